"""A study from its manifest, once more."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import clipaware as ca
from clipaware import noise
from clipaware._cli import show
from clipaware._cli.work import CommandError, Manifest, Row, Settings, Task, digest, do, run
from clipaware._media import FileError


def replayed(path: Path, out: Path | None, overwrite: bool, jobs: int, most: int) -> Iterator[tuple[str, str | None]]:
    """The name of each output, and what is wrong with it if it is not the same byte for byte."""
    rows = {row["output"]: row for row in Manifest(path).load()}
    versions = {row["version"] for row in rows.values()} - {ca.__version__}
    if versions:
        show.error(
            f"note: the manifest was made by version {', '.join(sorted(versions))}, and this is {ca.__version__}"
        )
    if out is not None and out.exists() and not out.is_dir():
        raise CommandError(f"--out is {out}, which is a file, expected a folder")
    base = path.parent
    try:
        base = base.resolve()
        scratch = Path(
            tempfile.mkdtemp(prefix=".clipaware-replay-", dir=out.parent if out and out.parent.exists() else base)
        )
    except OSError as error:
        raise CommandError(f"cannot write beside {path}: {error.strerror}") from error
    try:
        tasks = {}
        for number, (output, row) in enumerate(rows.items()):
            made = scratch / f"{number}{output.suffix}"
            tasks[Task(row["input"], made, row["measure"], row["value"], row["repeat"], row["seed"])] = output, row

        def again(task: Task) -> None:
            output, row = tasks[task]
            _again(task, output, row, base, out, overwrite, most)

        for task, result in run(list(tasks), again, jobs):
            yield str(tasks[task][0]), str(result) if isinstance(result, Exception) else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _again(task: Task, output: Path, row: Row, base: Path, out: Path | None, overwrite: bool, most: int) -> None:
    if task.input.is_file() and digest(task.input) != row["input_sha256"]:
        raise FileError(f"{task.input}: is not the file that the manifest was made from")
    if row["delta_sha256"] and Path(row["noise"]).is_file() and digest(Path(row["noise"])) != row["delta_sha256"]:
        raise FileError(f"{row['noise']}: is not the direction that the manifest was made with")
    low_high = [float(bound) for bound in row["bounds"].split()]
    settings = Settings(
        noise=row["noise"] if row["noise"] in noise.KINDS else "gaussian",
        delta=None if row["noise"] in noise.KINDS else Path(row["noise"]),
        norm=row["norm"],
        bounds=(low_high[0], low_high[1]) if low_high else None,
        grayscale=row["grayscale"],
        unreachable=row["unreachable"],
        allow_lossy=True,
        compression=row["compression"],
        most=most,
    )
    do(task, settings)
    same = digest(task.output) == row["output_sha256"]
    inside = output.resolve().is_relative_to(base)
    target = out / (output.resolve().relative_to(base) if inside else output.name) if out else output
    if out is None and output.exists():
        if digest(output) != row["output_sha256"]:
            raise FileError(f"{output}: is not the file that the manifest tells of any more")
    elif target.exists() and not overwrite:
        raise FileError(f"{target}: exists; choose --overwrite or another --out")
    else:
        # A manifest may come from others, and so may the folder that it is in, with its links.
        folder = out.resolve() if out else base
        if not target.parent.resolve().is_relative_to(folder):
            raise FileError(f"{target}: is not below {folder}, and nothing else is written to; choose another --out")
        _moved(task.output, target)
    if not same:
        raise FileError(f"{target}: came out different from what the manifest tells of (other versions of libraries?)")


def _moved(made: Path, target: Path) -> None:
    """Whole or not at all, from another disk, too."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.move(made, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{target}: cannot be written: {error.strerror}") from error
