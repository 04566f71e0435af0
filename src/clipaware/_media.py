"""Files of values: what the command line reads and writes, whatever their format."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = Any

HEADER = 2**14  # bytes, among which that of an array is; NumPy takes none above 10,000
MOST = 2**28  # elements of a file, beyond which it counts as a bomb unless told otherwise


class FileError(Exception):
    """What is wrong with a file, in one line that names it."""


@dataclass(frozen=True)
class Part:
    """An array of a file: whole numbers from `first` on, that stand for `levels` values from low to high, or floats."""

    values: Array
    low: float
    high: float
    levels: int | None = None  # None for floats
    first: int = 0
    channels: bool = False  # whether the last axis counts channels
    spatial: tuple[int, ...] | None = None  # the axes along which neighbours are; None: what looks like it

    @property
    def step(self) -> float:
        return (self.high - self.low) / (self.levels - 1) if self.levels else 0.0

    def real(self) -> Array:
        """The values on the scale of low and high, in float64."""
        if self.levels is None:
            return self.values.astype(np.float64)
        return (self.values.astype(np.float64) - self.first) * (self.high - self.low) / (self.levels - 1) + self.low


@dataclass(frozen=True)
class Content:
    """What a file holds. `extra` is what its format needs beside the values."""

    kind: str  # "picture", "sound" or "array"
    format: str
    parts: dict[str, Part]  # by name in an .npz, else by ""
    lossy: bool = False
    extra: Any = field(default=None, repr=False)


FORMATS = {  # by the ending of a file's name
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".tif": "tiff",
    ".tiff": "tiff",
    ".webp": "webp",
    ".bmp": "bmp",
    ".wav": "wav",
    ".flac": "flac",
    ".ogg": "ogg",
    ".npy": "npy",
    ".npz": "npz",
}
KINDS = {
    "picture": ("png", "jpeg", "tiff", "webp", "bmp"),
    "sound": ("wav", "flac", "ogg"),
    "array": ("npy", "npz"),
}
ENDINGS = {"jpeg": ".jpg", "tiff": ".tif"} | {name: f".{name}" for name in ("png", "webp", "bmp", "wav", "flac", "ogg")}
LOSSY = ("jpeg", "ogg")  # however they are written


def format_of(path: Path) -> str:
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise FileError(f"{path}: ends in {path.suffix or 'nothing'!r}, expected one of {' '.join(FORMATS)}")
    return found


def kind_of(format: str) -> str:
    return next(kind for kind, formats in KINDS.items() if format in formats)


def read(path: Path, most: int = MOST) -> Content:
    """Read a file of any format; a FileError says what is wrong with it."""
    try:
        if not path.is_file():
            raise FileError(f"{path}: {'is no file' if path.exists() else 'there is no such file'}")
        format = format_of(path)
        if path.stat().st_size == 0:
            raise FileError(f"{path}: the file is empty")
        content = _reader(format)(path, format, most)
    except FileError:
        raise
    except MemoryError as error:
        raise FileError(f"{path}: there is not enough memory for it") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error
    except Exception as error:  # whatever a library may raise on bytes that it does not understand
        raise FileError(f"{path}: cannot be read as {format.upper()}: {one_line(error)}") from error
    if not any(part.values.size for part in content.parts.values()):
        raise FileError(f"{path}: has no {'samples' if content.kind == 'sound' else 'elements'}")
    return content


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _reader(format: str) -> Callable[[Path, str, int], Content]:
    if kind_of(format) == "picture":
        from clipaware import images

        return images.read
    if kind_of(format) == "sound":
        from clipaware import audio

        return audio.read
    return read_arrays


def write(path: Path, content: Content, level: int = 6) -> None:
    """Write a file, whole or not at all: under another name first, then renamed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            if content.kind == "picture":
                from clipaware import images

                images.write(partial, content, level)
            elif content.kind == "sound":
                from clipaware import audio

                audio.write(partial, content)
            else:
                write_arrays(partial, content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or one_line(error)}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or one_line(error)}") from error


def not_too_large(path: Path, sizes: Iterable[int], most: int, before: int = 0) -> None:
    """Nor with what was read before."""
    elements = before + math.prod(int(size) for size in sizes)
    if elements > most:
        raise FileError(
            f"{path}: says that it has {elements:,} elements, more than the limit of {most:,} (--max-elements)"
        )


# --- .npy and .npz ----------------------------------------------------------------------------------------------------


def read_arrays(path: Path, format: str, most: int) -> Content:
    arrays: dict[str, Array] = {}
    if format == "npy":
        with path.open("rb") as file:
            arrays[""] = _read_npy(path, file, path.stat().st_size, most, 0)
    else:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                before = sum(a.size for a in arrays.values())
                with archive.open(entry) as member:
                    name = entry.filename.removesuffix(".npy")
                    arrays[name] = _read_npy(path, member, entry.file_size, most, before)
    return Content("array", format, {name: _part(path, a) for name, a in arrays.items()})


def _read_npy(path: Path, file: Any, length: int, most: int, before: int) -> Array:
    """An array, after so many elements of others. Nothing is taken into memory that the header has not been believed
    to tell of: in an archive a kilobyte may stand for a megabyte."""
    start = io.BytesIO(file.read(HEADER))
    version = np.lib.format.read_magic(start)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise FileError(f"{path}: has version {version[0]}.{version[1]} of the format, expected 1.0, 2.0 or 3.0")
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = reader(start)
    if dtype.hasobject:
        raise FileError(f"{path}: holds Python objects, expected numbers")
    _name_of(path, dtype)
    if any(size < 0 for size in shape):
        raise FileError(f"{path}: is damaged: it says to have the shape {shape}")
    not_too_large(path, shape, most, before)
    size = math.prod(shape) * dtype.itemsize
    length -= start.tell()
    if size > length:
        raise FileError(f"{path}: is cut off: {length:,} bytes for an array of shape {shape} and dtype {dtype}")
    data = start.read(size)
    flat = np.frombuffer(data + file.read(size - len(data)), dtype).copy()
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _name_of(path: Path, dtype: Any) -> str:
    name = str(dtype.newbyteorder("=").name)
    if name not in ("float16", "float32", "float64", "uint8", "uint16", "int16"):
        raise FileError(f"{path}: has dtype {name}, expected float16, float32, float64, uint8, uint16 or int16")
    return name


def _part(path: Path, values: Array) -> Part:
    name = _name_of(path, values.dtype)
    if name in ("uint8", "uint16"):
        return Part(values, 0.0, 1.0, 256 if name == "uint8" else 65536)
    if name == "int16":
        return Part(values, -1.0, 1 - 2.0**-15, 65536, -(2**15))
    return Part(values, 0.0, 1.0)


def write_arrays(path: Path, content: Content) -> None:
    with path.open("wb") as file:
        if content.format == "npy":
            np.save(file, content.parts[""].values, allow_pickle=False)
        else:
            # Not np.savez: its archives carry the time.
            with zipfile.ZipFile(file, "w") as archive:
                for name, part in content.parts.items():
                    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(part.values), allow_pickle=False)
