"""What a visitor looks at, and what becomes of it: read, perturbed naively and exactly, measured."""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import clipaware as ca
from clipaware import noise, targets
from clipaware._cli.work import levels_between, norm_of, on_grid
from clipaware._explorer.curve import Curve
from clipaware._media import FORMATS, KINDS, Content, FileError, Part, read

Array = Any

MOST = 2**25  # elements of an upload: a picture of 11 million pixels in colour
MEASURES = ("eps", "rms", "snr", "psnr")
BUNDLED = {
    "picture": {"Coffee": "coffee.jpg", "Astronaut": "astronaut.jpg", "Rocket": "rocket.jpg"},
    "sound": {"Melody": "melody.flac"},
}
STARTS = {"eps": 0.5, "rms": 0.2, "snr": 3.0, "psnr": 15.0}  # sizes; of a norm, its share of the reach
OWN_BOUNDS = {"picture": (0.0, 1.0), "sound": (-1.0, 1.0)}
BITS = {"picture": 8, "sound": 16}
SAVED = "saved"  # the folder, inside that of temporary files, of what is to be fetched


@dataclass(frozen=True)
class Choice:
    """All that the controls say."""

    noise: str = "gaussian"
    seed: int = 0
    p: float = 2.0
    measure: str = "eps"
    value: float = 100.0
    bounds: tuple[float, float] = (0.0, 1.0)
    whole: bool = True  # 8 bits, of sounds 16; else floats


@dataclass(frozen=True)
class Subject:
    """A picture or a recording, and the name of its file."""

    name: str
    content: Content

    @property
    def kind(self) -> str:
        return self.content.kind


def endings(kind: str) -> list[str]:
    """Of the files that may be uploaded."""
    return [ending for ending, format in FORMATS.items() if format in KINDS[kind]]


@lru_cache
def bundled(kind: str, title: str) -> Subject:
    name = BUNDLED[kind][title]
    with importlib.resources.as_file(importlib.resources.files("clipaware") / "data" / name) as path:
        return Subject(name, read(path))


def opened(path: Path, kind: str, most: int = MOST) -> Subject:
    """Read an upload. A FileError says what is wrong with it, and names the file without its folder, which is ours."""
    try:
        if path.suffix.lower() not in endings(kind):
            raise FileError(f"{path.name}: is no {kind} that can be read here, expected {' '.join(endings(kind))}")
        content = read(path, most)
    except FileError as error:
        raise FileError(str(error).replace(str(path), path.name).replace(" (--max-elements)", "")) from error
    shape, channels = content.parts[""].values.shape, content.parts[""].channels
    if kind == "picture" and (len(shape) > 2 + channels or (channels and shape[-1] != 3)):
        raise FileError(f"{path.name}: has shape {shape}, expected one picture, grey or RGB")
    if not content.parts[""].levels and (odd := int((~np.isfinite(content.parts[""].values)).sum())):
        raise FileError(f"{path.name}: has {odd} element(s) that are NaN or infinite")
    return Subject(path.name, content)


def as_floats(part: Part) -> Array:
    """In float32, on the scale of low and high."""
    with np.errstate(over="ignore"):  # what is too large for float32 is outside of any bounds
        floats = part.values.astype(np.float32)
    if part.levels is None:
        return floats
    return floats / np.float32(-part.first if part.first else part.levels - 1)


def on_own_grid(part: Part, kind: str) -> Part:
    """With 8 bits, of sounds 16: as it came, or rounded to that."""
    levels = 2 ** BITS[kind]
    if part.levels == levels:
        return part
    values: Array
    if kind == "sound":
        if part.levels:  # as libsndfile has it
            shift = part.levels.bit_length() - 17
            values = part.values >> shift if shift > 0 else part.values << -shift
        else:
            values = np.clip(np.rint(part.values.astype(np.float32) * 32768), -32768, 32767)
        return Part(values.astype(np.int32), -1.0, 1 - 2.0**-15, levels, -(2**15), part.channels, part.spatial)
    values = np.clip(np.rint(as_floats(part) * np.float32(255)), 0, 255).astype(np.uint8)
    return Part(values, 0.0, 1.0, levels, 0, part.channels, part.spatial)


# --- one answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a choice. Norms are of order p and of the whole array."""

    subject: Subject
    choice: Choice
    part: Part  # what is perturbed, inside the bounds
    made: Array  # what it has become, as `part.values` are
    delta: Array
    asked: float
    naive: float
    exact: float
    reach: float
    reachable: bool
    clipped: float  # the share of elements that end at a bound
    outside: int  # elements that had to be moved into the bounds first
    scale: float  # the naive one, asked/||delta||
    curve: Curve

    @property
    def ends(self) -> tuple[float, float]:
        """The bounds, of a grid as levels."""
        return limits(self.part, self.choice.bounds)

    def naively(self, where: Any = ...) -> Array:
        """What scaling, clipping and, on a grid, rounding makes of some elements, as `part.values` are."""
        values, delta = self.part.values[where], self.delta[where]
        low, high = self.ends
        if self.part.levels is None:
            return np.clip(values + self.scale * delta.astype(np.float64), low, high).astype(values.dtype)
        steps = np.floor(self.scale / self.part.step * np.abs(delta).astype(np.float64) + 0.5)
        return np.clip(values + np.copysign(steps, delta), low, high).astype(values.dtype)

    def real(self, values: Array) -> Array:
        """On the scale of low and high, in float64."""
        return dataclasses.replace(self.part, values=values).real()

    def decibels(self) -> tuple[float, float]:
        """The SNR that naive scaling leaves, and that exact scaling does."""
        x = self.real(self.part.values)
        signal = norm_of(x, 2)
        left = (norm_of(self.real(values) - x, 2) for values in (self.naively(), self.made))
        naive, exact = (20 * math.log10(signal / size) if signal and size else math.inf for size in left)
        return naive, exact


def limits(part: Part, bounds: tuple[float, float]) -> tuple[float, float]:
    """Between which the values of an array stay."""
    if part.levels is None:
        return bounds
    first, last = levels_between(part, bounds)
    return float(first + part.first), float(last + part.first)


def outside_of(part: Part, bounds: tuple[float, float]) -> int:
    """How many values of a file are not between the bounds; those of whole numbers up to rounding."""
    if part.levels is None:
        low, high = bounds
    else:
        low, high = ((end - part.low) / part.step + part.first for end in bounds)
        low, high = math.ceil(low - 1e-6), math.floor(high + 1e-6)
    with np.errstate(over="ignore"):  # of bounds in float16
        return int(np.count_nonzero((part.values < low) | (part.values > high)))


class Visit:
    """What one visitor looks at, with what can be kept from one answer to the next. No two visitors share one."""

    def __init__(self) -> None:
        self.subject: Subject | None = None
        self.own: Subject | None = None  # what was uploaded last
        self.shown: Outcome | None = None  # what the page shows, and what is taken home
        self.sizes = dict(STARTS)  # of every measure, the last
        self.norm = "2"  # the last that was chosen
        self._reach = 1.0  # of which the last norm was a part
        self.lock = threading.Lock()
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._folder: Path | None = None

    def __deepcopy__(self, _: Any) -> Visit:
        return Visit()

    def new_folder(self) -> Path:
        """For a file to be fetched; the one before is gone."""
        self.forget()
        # Whoever knows the name may fetch it, so nobody is to guess it.
        root = Path(os.environ.get("GRADIO_TEMP_DIR") or tempfile.gettempdir())
        self._folder = root / SAVED / secrets.token_hex(16)
        self._folder.mkdir(mode=0o700, parents=True)
        return self._folder

    def forget(self) -> None:
        """Remove the file that was to be fetched."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def look_at(self, subject: Subject) -> None:
        if subject is not self.subject:
            self.subject = subject
            self._kept.clear()

    def _keep(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """The last of its name, if it was made for the same."""
        if self._kept.get(name, (None, None))[0] != key:
            self._kept.pop(name, None)  # before there is another one
            self._kept[name] = key, make()
        return self._kept[name][1]

    def _start(self, choice: Choice) -> tuple[Part, Array, int]:
        """What is perturbed: inside the bounds, as it is stored and in float32; and how much of it was outside."""
        assert self.subject is not None
        part, kind = self.subject.content.parts[""], self.subject.kind
        outside = outside_of(part, choice.bounds)
        if choice.whole:
            part = on_own_grid(part, kind)
        else:
            part = Part(as_floats(part), *OWN_BOUNDS[kind], None, 0, part.channels, part.spatial)
        low, high = limits(part, choice.bounds)
        if part.values.min() < low or part.values.max() > high:
            part = dataclasses.replace(part, values=np.clip(part.values, low, high).astype(part.values.dtype))
        return part, as_floats(part), outside

    def _drawn(self, choice: Choice) -> tuple[Part, Array, int, Array]:
        start = (choice.whole, choice.bounds)
        part, x, outside = self._keep("start", start, lambda: self._start(choice))
        delta = self._keep(
            "delta",
            (start, choice.noise, choice.seed),
            lambda: noise.sample(choice.noise, x, seed=choice.seed, axes=part.spatial),
        )
        return part, x, outside, delta

    def _curve(self, choice: Choice) -> tuple[Curve, float, float]:
        """The curve, the norm of delta, and the reach."""
        part, x, _, delta = self._drawn(choice)
        low, high = limits(part, choice.bounds)
        low, high = ((end - part.first) * part.step + part.low if part.levels else end for end in (low, high))

        def make() -> tuple[Curve, float, float]:
            room = np.where(delta > 0, np.float32(high) - x, x - np.float32(low))
            curve = Curve(np.abs(delta), np.maximum(room, 0), choice.p)
            reach = float(ca.reach(x, delta, p=choice.p, bounds=(low, high), axis=None).item())
            # Of numbers around 1, since those of salt and pepper have no squares in float32.
            return curve, curve.top * norm_of(delta / np.float32(curve.top), choice.p), reach

        return self._keep("curve", (choice.whole, choice.bounds, choice.noise, choice.seed, choice.p), make)  # type: ignore[no-any-return]

    def reach(self, choice: Choice) -> float:
        return self._curve(choice)[2]

    def keep_size(self, choice: Choice) -> None:
        """As the last of its measure."""
        self.sizes[choice.measure] = choice.value
        if choice.measure == "eps":
            self._reach = self.reach(choice)

    def size_for(self, choice: Choice) -> float:
        """The last of a measure. Of a norm whose reach is another now, as large a share of that, to three digits."""
        size = self.sizes[choice.measure]
        if choice.measure != "eps" or (reach := self.reach(choice)) == self._reach:
            return size
        share = min(size / self._reach, 1.0) if self._reach else STARTS["eps"]
        if not share * reach:
            return 0.0
        unit = 10.0 ** (math.floor(math.log10(share * reach)) - 2)
        return float(f"{math.floor(share * reach / unit + 1e-9) * unit:.12g}")

    def asked(self, choice: Choice) -> float:
        """The norm that a size stands for."""
        if choice.measure == "eps":
            return choice.value
        _, x, _, _ = self._drawn(choice)
        return size_of(x, choice.measure, choice.value, choice.bounds)

    def solve(self, choice: Choice) -> Outcome:
        """Perturb as the controls say; a ValueError says why that cannot be."""
        assert self.subject is not None
        part, x, outside, delta = self._drawn(choice)
        curve, norm, reach = self._curve(choice)
        eps = self.asked(choice)
        if part.levels:
            made, row = on_grid(part, delta, eps, choice.p, choice.bounds, 0)
            exact, naive, reachable, clipped = row["counted"], row["naive"], row["reachable"], row["clipped"]
            reach = row["reach"]
        else:
            options: Any = {"p": choice.p, "bounds": choice.bounds, "axis": None}
            made, report = ca.perturb(x, delta, eps, **options), ca.report(x, delta, eps, **options)
            exact, naive = report.norm.item(), report.naive_norm.item()
            reachable, clipped = report.reachable.item(), report.clipped.item()
        return Outcome(
            self.subject, choice, part, made, delta, eps, naive, exact, reach, reachable, clipped, outside,
            eps / norm if norm else 0.0, curve,
        )  # fmt: skip


def size_of(x: Array, measure: str, value: float, bounds: tuple[float, float]) -> float:
    """The L2 norm of an RMS, SNR or PSNR."""
    options = {"bounds": bounds} if measure == "psnr" else {}
    found = float(getattr(targets, f"eps_from_{measure}")(x, value, axis=None, **options).item())
    if measure == "snr" and found == 0:
        raise ValueError("all of it is 0, and an SNR is relative to that; choose another size")
    return found
