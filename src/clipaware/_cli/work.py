"""What `perturb` and `replay` do: plan; solve one file at one size, write it and read it back; keep a manifest."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

import clipaware as ca
from clipaware import noise, targets
from clipaware._backends import numpy as host
from clipaware._media import (
    ENDINGS,
    FORMATS,
    KINDS,
    LOSSY,
    MOST,
    Content,
    FileError,
    Part,
    format_of,
    kind_of,
    one_line,
    read,
    write,
    write_bytes,
)
from clipaware.quantize import on_levels

Array = Any
Row = dict[str, Any]

MEASURES = ("eps", "rms", "snr", "psnr", "contrast")
UNREACHABLE = ("maximize", "skip", "fail")
COLUMNS = (
    *("input", "output", "part", "noise", "seed", "repeat", "measure", "value", "norm"),
    *("asked", "naive", "delivered", "reach", "reachable", "clipped", "eta", "bounds"),
    *("grayscale", "unreachable", "compression", "input_sha256", "delta_sha256", "output_sha256", "version"),
)
NUMBERS = ("value", "norm", "asked", "naive", "delivered", "reach", "clipped", "eta")


class CommandError(Exception):
    """What the user should know, in one line; it ends the command with exit code 2."""


class Skipped(Exception):
    """Why a file was left out, as was asked for."""


@dataclass(frozen=True)
class Settings:
    """What all files of a run share."""

    noise: str = "gaussian"
    delta: Path | None = None
    norm: float = 2.0
    bounds: tuple[float, float] | None = None  # None: the format's own
    grayscale: bool = False
    unreachable: str = "fail"
    allow_lossy: bool = False
    compression: int = 6
    most: int = MOST


@dataclass(frozen=True)
class Task:
    """One output: a file at a size, with a seed."""

    input: Path
    output: Path
    measure: str
    value: float
    repeat: int
    seed: int
    replaces: bool = False  # a file that is there already, unless that is the same


def real(path: Path) -> Path:
    """As it is without links to folders; the file itself keeps its name."""
    return Path(os.path.realpath(path.parent)) / path.name


# --- planning ---------------------------------------------------------------------------------------------------------


def find_inputs(given: list[Path], out: Path) -> tuple[list[tuple[Path, str]], list[FileError]]:
    """Files, each with the name under which it goes to `out`; and what is wrong with the inputs that give none."""
    found, errors, below = [], [], out.resolve()
    for path in given:
        if re.fullmatch(r"[-+.\d]+", str(path)) and not path.exists():
            raise CommandError(
                f"{path}: there is no such file; several sizes have commas between them, as in --eps 3,20"
            )
        if not path.is_dir():
            found.append((path, path.name))
            continue
        if below == path.resolve():
            raise CommandError(f"--out is {out}, which is a folder of inputs, too; choose another")
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in FORMATS and file.name[0] != "."]
        if below.is_relative_to(path.resolve()):
            # What an earlier run wrote there is no input.
            files = [file for file in files if not file.resolve().is_relative_to(below)]
        inside = [(file, file.relative_to(path).as_posix()) for file in files if file.is_file()]
        if not inside:
            errors.append(FileError(f"{path}: has no files that end in {' '.join(FORMATS)}"))
        found += inside
    return found, errors


def shown(value: float) -> str:
    """A number as short as it can be told."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def seed_for(seed: int, name: str, repeat: int, measure: str, value: float) -> int:
    """Of one output. It depends on nothing else: not on the other files, their order, or who works on them."""
    text = f"{seed}\n{PurePosixPath(name)}\n{repeat}\n{measure}\n{value!r}"
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big") >> 1


def plan(
    inputs: list[tuple[Path, str]],
    out: Path,
    sizes: list[tuple[str, float]],
    repeats: int,
    seed: int,
    format: str | None,
    delta: Path | None = None,
) -> list[Task]:
    """All outputs, in the order of inputs, sizes and repeats."""
    tasks: dict[Path, Task] = {}
    read_from = [path for path, _ in inputs] + ([delta] if delta else [])
    names, sources = {path.name for path in read_from}, {path.resolve() for path in read_from}
    for path, name in inputs:
        suffix = ENDINGS.get(format, f".{format}") if format else path.suffix
        for measure, value in sizes:
            for repeat in range(repeats):
                tag = f"_{measure}{shown(value)}" + (f"_{repeat}" if repeats > 1 else "")
                output = out / PurePosixPath(name).with_name(f"{PurePosixPath(name).stem}{tag}{suffix}")
                if output in tasks and tasks[output].input != path:
                    raise CommandError(f"{tasks[output].input} and {path} would both be written to {output}")
                if output.name in names and output.resolve() in sources:
                    raise CommandError(f"{output} is an input and would be written over; choose another --out")
                tasks[output] = Task(path, output, measure, value, repeat, seed_for(seed, name, repeat, measure, value))
    return list(tasks.values())


# --- one file ---------------------------------------------------------------------------------------------------------


def do(task: Task, settings: Settings) -> list[Row]:
    """Perturb a file, write it, read it back, and say what happened: a row for each array in it."""
    content = read(task.input, settings.most)
    format = format_of(task.output)
    if kind_of(format) != content.kind or (content.kind == "array" and format != content.format):
        allowed = " ".join(KINDS[content.kind]) if content.kind != "array" else content.format
        kind = "an array" if content.kind == "array" else f"a {content.kind}"
        raise FileError(f"{task.input}: is {kind}, which cannot be written as {format}, but as {allowed}")
    if format in LOSSY and not settings.allow_lossy:
        lossless = "png" if content.kind == "picture" else "wav"
        raise FileError(
            f"{task.input}: {format.upper()} is lossy and would not keep the norm; choose --format {lossless}, or "
            "--allow-lossy to write it all the same"
        )
    parts, rows = {}, []
    for name, part in content.parts.items():
        made, row = perturbed(task, settings, content.kind, name, part)
        parts[name] = dataclasses.replace(part, values=made)
        rows.append(row)
    try:
        task.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{task.output.parent}: the folder cannot be made: {error.strerror}") from error
    extra = content.extra
    # What a lossy sound was decoded to are floats.
    if content.kind == "sound" and format == "wav" and content.lossy:
        extra = dataclasses.replace(extra, subtype="FLOAT")
    saved = _saved(task, Content(content.kind, format, parts, format in LOSSY, extra), settings)
    digests = {"input_sha256": digest(task.input), "output_sha256": digest(task.output)}
    digests["delta_sha256"] = digest(settings.delta) if settings.delta else ""
    for (name, part), row in zip(content.parts.items(), rows, strict=True):
        held, counted = saved.parts[name], row.pop("counted")
        # What was counted in steps, if these are in the file. Else what is.
        same = counted is not None and np.array_equal(held.values, parts[name].values)
        row |= {"delivered": counted if same else distance(part, held, settings.norm), **digests}
    return rows


def _saved(task: Task, content: Content, settings: Settings) -> Content:
    """Write an output and read it back; it has its name only when that has worked."""
    made = task.output.with_name(f".{task.output.stem}.{os.getpid()}{task.output.suffix}")
    try:
        write(made, content, settings.compression)
        saved = read(made, settings.most)
        for name, part in content.parts.items():
            if name not in saved.parts or saved.parts[name].values.shape != part.values.shape:
                raise FileError(f"{task.output}: {content.format.upper()} does not keep the shape {part.values.shape}")
        if task.output.exists() and not task.replaces and digest(made) != digest(task.output):
            raise FileError(f"{task.output}: exists and is another file; choose --overwrite or another --out")
        made.replace(task.output)
    except FileError as error:
        raise FileError(str(error).replace(str(made), str(task.output))) from error
    except OSError as error:
        raise FileError(f"{task.output}: cannot be written: {error.strerror or one_line(error)}") from error
    finally:
        made.unlink(missing_ok=True)
    return saved


def perturbed(task: Task, settings: Settings, kind: str, name: str, part: Part) -> tuple[Array, Row]:
    where = f"{task.input}{f' ({name})' if name else ''}"
    if not part.values.size:
        raise FileError(f"{where}: has no elements")
    if part.levels is None and (odd := int((~np.isfinite(part.values)).sum())):
        raise FileError(f"{where}: has {odd} element(s) that are NaN or infinite")
    # Of an archive, every array has noise of its own.
    seed = [task.seed, *name.encode()] if name else task.seed
    p, bounds = settings.norm, settings.bounds or (part.low, part.high)
    delta = _delta(settings.delta, part, settings.most, where) if settings.delta else _noise(settings, kind, part, seed)
    try:
        eps = _eps(task, kind, part, bounds)
        solve = on_grid if part.levels else _in_floats
        values, row = solve(part, delta, eps, p, bounds, task.seed)
    except ValueError as error:
        raise FileError(f"{where}: {error}") from error
    if not row["reachable"]:
        text = (
            f"{where}: {task.measure} {shown(task.value)} asks for a norm of {eps:.7g}, more than this noise can have "
            f"({row['reach']:.7g})"
        )
        if settings.unreachable == "fail":
            raise FileError(f"{text}; ask for less, or choose --unreachable maximize or skip")
        if settings.unreachable == "skip":
            raise Skipped(text)
    return values, {
        "input": task.input,
        "output": task.output,
        "part": name,
        "noise": str(settings.delta) if settings.delta else settings.noise,
        "seed": task.seed,
        "repeat": task.repeat,
        "measure": task.measure,
        "value": task.value,
        "norm": p,
        "asked": eps,
        **row,
        "bounds": f"{bounds[0]!r} {bounds[1]!r}" if settings.bounds else "",
        "grayscale": settings.grayscale,
        "unreachable": settings.unreachable,
        "compression": settings.compression,
        "version": ca.__version__,
    }


def _eps(task: Task, kind: str, part: Part, bounds: tuple[float, float]) -> float:
    """The norm that a size stands for."""
    if task.measure == "eps":
        return task.value
    if task.measure in ("rms", "psnr"):
        # Not a matter of the values.
        like: Array = np.broadcast_to(np.float64(0), part.values.shape)
    else:
        like = part.real()
    if task.measure == "contrast" and kind == "sound":
        raise ValueError("a sound has no contrast; choose --snr or --rms")
    options = {"bounds": bounds} if task.measure == "psnr" else {}
    found = float(getattr(targets, f"eps_from_{task.measure}")(like, task.value, axis=None, **options).item())
    if math.isnan(found):
        raise ValueError("all of it is black, and contrast is relative to the mean")
    if task.measure == "snr" and found == 0:
        raise ValueError("all of it is 0, and an SNR is relative to that")
    return found


def _noise(settings: Settings, kind: str, part: Part, seed: Any) -> Array:
    """Of the shape of an array; one for all channels if that was asked for."""
    shape = part.values.shape
    if settings.grayscale and part.channels:
        shape = (*shape[:-1], 1)
    dtype: Any = np.float64 if part.values.dtype == np.float64 or (part.levels or 0) > 2**24 else np.float32
    axes = noise._long_axes(shape, None) if part.spatial is None else part.spatial
    drawn = "gaussian" if settings.noise == "speckle" else settings.noise
    delta = noise.sample(drawn, np.broadcast_to(dtype(0), shape), seed=np.random.default_rng(seed), axes=tuple(axes))
    if settings.noise == "speckle":
        delta = delta * part.real().astype(dtype)
    # As it is, if it can be: what is broadcast is only to be read, and would be copied.
    return delta if delta.shape == part.values.shape else np.broadcast_to(delta, part.values.shape)


@lru_cache(maxsize=2)
def _read_delta(path: Path, folder: str, changed: int, most: int) -> Array:
    """The array in a file, which is as it was as long as these are the same."""
    content = read(path, most)
    if len(content.parts) > 1:
        raise FileError(f"{path}: holds {len(content.parts)} arrays, expected one")
    (part,) = content.parts.values()
    if content.kind == "picture" and part.levels:
        raise FileError(
            f"{path}: has no values below 0; expected a direction: an .npy array, a TIFF of floats or a sound"
        )
    values = part.real() if part.levels else part.values
    if not np.isfinite(values).all():
        raise FileError(f"{path}: has {int((~np.isfinite(values)).sum())} element(s) that are NaN or infinite")
    return values


def _delta(path: Path, part: Part, most: int, where: str) -> Array:
    """The direction in a file, in the shape of an array; one for all channels if it has but one."""
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    values, shape = _read_delta(path, os.getcwd(), changed, most), part.values.shape
    if part.channels and values.ndim == len(shape) - 1:
        values = values[..., None]
    if values.shape != shape and not (part.channels and values.shape == (*shape[:-1], 1)):
        raise FileError(f"{where}: --delta {path} has shape {values.shape}, expected {shape}")
    return np.broadcast_to(values.astype(np.float64), shape)


def levels_between(part: Part, bounds: tuple[float, float]) -> tuple[int, int]:
    """The first and the last level inside the bounds; rounding does not move them."""
    first = max(0, math.ceil((bounds[0] - part.low) / part.step - 1e-6))
    last = min((part.levels or 2) - 1, math.floor((bounds[1] - part.low) / part.step + 1e-6))
    if first >= last:
        raise ValueError(f"the bounds are {bounds}, between which the format has less than two values")
    return first, last


def on_grid(
    part: Part, delta: Array, eps: float, p: float, bounds: tuple[float, float], seed: Any
) -> tuple[Array, Row]:
    """Whole numbers: by the steps of the format's own grid."""
    levels, step = part.levels or 2, part.step
    first, last = levels_between(part, bounds)
    exact: Any = np.float32 if levels <= 2**16 else np.float64
    flat = part.values.reshape(-1)
    place, made = host.scratch("place", flat, exact), host.scratch("made", flat, exact)
    np.subtract(flat, exact(part.first), out=place, dtype=exact)
    if place.min() < first or place.max() > last:
        outside = int(((place < first) | (place > last)).sum())
        raise ValueError(f"{outside} element(s) are outside the bounds {bounds}; choose others with --bounds")
    found = on_levels(place, np.ascontiguousarray(delta).reshape(-1), eps / step, (first, last), p, seed, made)
    row = {
        "naive": float(found.naive * step),
        "reach": float(found.reach * step),
        "reachable": bool(found.reachable),
        "clipped": float((np.count_nonzero(made == first) + np.count_nonzero(made == last)) / made.size),
        "eta": float(found.eta * step),
        "counted": float(found.norm * step),
    }
    if part.first:
        made = made.astype(np.int64) + part.first
    return made.astype(part.values.dtype).reshape(part.values.shape), row


def _in_floats(
    part: Part, delta: Array, eps: float, p: float, bounds: tuple[float, float], seed: Any
) -> tuple[Array, Row]:
    """Floats: as they are."""
    x = part.values.astype(part.values.dtype.newbyteorder("="))
    # So that it is neither too large nor too small for x's dtype.
    top = float(np.max(np.abs(delta), initial=0))
    shift = 0 if 1e-3 < top < 1e3 else -math.frexp(top)[1]
    problem: Any = x, np.ldexp(delta, shift).astype(x.dtype), eps
    options: Any = {"p": p, "bounds": bounds, "axis": None}
    report = ca.report(*problem, **options)
    row = {
        name: getattr(report, column).item()
        for name, column in (("naive", "naive_norm"), ("reach", "reach"), ("reachable", "reachable"))
    }
    row |= {"clipped": report.clipped.item(), "eta": math.ldexp(report.eta.item(), shift), "counted": None}
    return ca.perturb(*problem, **options).astype(part.values.dtype), row


def distance(a: Part, b: Part, p: float) -> float:
    """The norm of the difference of two arrays, in float64; of whole numbers, counted in steps."""
    if a.levels and a.levels == b.levels and a.first == b.first:
        # Of bytes, squares are summed fastest, and exactly, as whole numbers.
        wide: Any = np.int32 if a.levels == 256 else np.float64
        apart = host.scratch("apart", a.values, wide)
        return norm_of(np.subtract(b.values, a.values, out=apart, dtype=wide), p) * a.step
    return norm_of(b.real() - a.real(), p)


def norm_of(difference: Array, p: float) -> float:
    """Of p from 1 to infinity."""
    if p == 2:
        squares = np.multiply(difference, difference, out=host.scratch("squares", difference, difference.dtype))
        if math.isfinite(square := float(np.sum(squares))):
            return math.sqrt(square)
    wide = np.abs(difference)
    top = float(wide.max(initial=0))  # without which powers may overflow
    return top if p == math.inf or top == 0 else top * float(np.sum((wide / top) ** p)) ** (1 / p)


def digest(path: Path) -> str:
    if not path.is_file():
        raise FileError(f"{path}: is no file")  # a pipe or a device might never end
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- all of them ------------------------------------------------------------------------------------------------------


def run(tasks: list[Task], work: Callable[[Task], Any], jobs: int) -> Iterator[tuple[Task, Any]]:
    """The tasks in their order, each with what `work` returned or the FileError or Skipped that it raised.

    Threads are enough: compressing, computing and reading all let go of Python's lock.
    """
    if jobs == 1:
        yield from ((task, _tried(work, task)) for task in tasks)
        return
    with ThreadPoolExecutor(jobs) as pool:
        ahead: list[tuple[Task, Future[Any]]] = []
        left = iter(tasks)
        try:
            while True:
                # Not all at once: what has been done waits here for its turn.
                while len(ahead) < 4 * jobs and (task := next(left, None)) is not None:
                    ahead.append((task, pool.submit(_tried, work, task)))
                if not ahead:
                    return
                task, future = ahead.pop(0)
                yield task, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tried(work: Callable[[Task], Any], task: Task) -> Any:
    try:
        return work(task)
    except (FileError, Skipped) as error:
        return error
    except MemoryError:
        return FileError(f"{task.input}: there is not enough memory to perturb it")
    except Exception as error:  # one file is not to end the work on all
        return FileError(f"{task.input}: cannot be perturbed: {type(error).__name__}: {one_line(error)}")


# --- the manifest -----------------------------------------------------------------------------------------------------


class Manifest:
    """Rows in a file beside the outputs, CSV or JSON lines, added one by one and in the end put in order."""

    def __init__(self, path: Path) -> None:
        self.path, self.base = path, path.parent

    def load(self) -> list[Row]:
        """The rows that are there. The last line of an interrupted run may be cut off, and does not count."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise CommandError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            if self.path.suffix == ".jsonl":
                lines = text.split("\n")
                rows = [json.loads(line) for line in lines[:-1] if line]
            else:
                rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
            # Of an output that was made again, the last row counts.
            found = {(row["output"], row["part"]): row for row in map(self._loaded, rows)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
            raise CommandError(
                f"{self.path} is no manifest of clipaware perturb: {type(error).__name__}: {error}"
            ) from error
        return list(found.values())

    def _loaded(self, row: Row) -> Row:
        row = {name: row[name] for name in COLUMNS}
        for name in NUMBERS:
            row[name] = float(row[name])
        for name in ("seed", "repeat", "compression"):
            row[name] = int(row[name])
        for name in ("reachable", "grayscale"):
            row[name] = row[name] in (True, "True", "yes")
        for name in ("input", "output"):
            row[name] = self._found(row[name])
        if row["noise"] not in noise.KINDS:
            row["noise"] = str(self._found(row["noise"]))
        return row

    def _found(self, path: str) -> Path:
        return real(Path(os.path.normpath(Path(os.path.realpath(self.base)) / path)))

    def _stored(self, row: Row) -> Row:
        """Paths as seen from the manifest, so that all may be moved together."""
        row = {name: row[name] for name in COLUMNS}
        for name in ("input", "output"):
            row[name] = self._seen(row[name])
        if row["noise"] not in noise.KINDS:
            row["noise"] = self._seen(Path(row["noise"]))
        return row

    def _seen(self, path: Path) -> str:
        return os.path.relpath(real(path), os.path.realpath(self.base)).replace(os.sep, "/")

    def _text(self, rows: Iterable[Row], header: bool) -> str:
        stored = [self._stored(row) for row in rows]
        if self.path.suffix == ".jsonl":
            return "".join(json.dumps(row | {"norm": shown(row["norm"])}) + "\n" for row in stored)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(row | {name: repr(row[name]) for name in NUMBERS} for row in stored)
        return text.getvalue()

    def add(self, rows: list[Row]) -> None:
        try:
            self.base.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(self._text(rows, header=file.tell() == 0))
        except OSError as error:
            raise CommandError(f"cannot write {self.path}: {error.strerror}") from error

    def replace(self, rows: Iterable[Row]) -> None:
        try:
            write_bytes(self.path, self._text(rows, header=True).encode(errors="surrogateescape"))
        except FileError as error:
            raise CommandError(str(error)) from error
