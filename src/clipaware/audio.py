"""Sounds for the command line, by soundfile: WAV, FLAC and OGG."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clipaware._media import Content, FileError, Part, not_too_large

Array = Any

BITS = {"PCM_S8": 8, "PCM_U8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
FLOATS = {"FLOAT": np.float32, "DOUBLE": np.float64}
STARTS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS")  # of the formats
STRINGS = ("title", "copyright", "artist", "comment", "date", "album", "license", "tracknumber", "genre")


@dataclass(frozen=True)
class Extra:
    """What belongs to a sound beside its values."""

    rate: int
    subtype: str
    strings: dict[str, str] = field(default_factory=dict)


def read(path: Path, format: str, most: int) -> Content:
    import soundfile

    with path.open("rb") as file:
        start = file.read(4)
    if start not in STARTS:  # not even shown to a decoder, of which there are many
        raise FileError(f"{path}: is no {format.upper()} file, though its name says so")
    _check_length(path)
    with soundfile.SoundFile(path) as file:
        name = {"WAVEX": "WAV", "RF64": "WAV"}.get(file.format, file.format)
        if name != format.upper():
            raise FileError(f"{path}: is a {file.format} file, and its name says {format.upper()}; rename it")
        not_too_large(path, (file.frames, file.channels), most)
        extra = Extra(file.samplerate, file.subtype, {s: text for s in STRINGS if (text := getattr(file, s))})
        bits = BITS.get(file.subtype)
        if bits:
            values = file.read(dtype="int32", always_2d=True) >> (32 - bits)
            part = Part(values, -1.0, 1 - 2.0 ** (1 - bits), 2**bits, -(2 ** (bits - 1)), True, (0,))
        else:
            # Vorbis and companded samples are decoded to floats.
            values = file.read(dtype=np.dtype(FLOATS.get(file.subtype, np.float32)).name, always_2d=True)
            part = Part(values, -1.0, 1.0, channels=True, spatial=(0,))
        if len(part.values) < file.frames:
            raise FileError(f"{path}: is cut off: {len(part.values):,} of {file.frames:,} samples")
    return Content("sound", format, {"": part}, not bits and extra.subtype not in FLOATS, extra)


def _check_length(path: Path) -> None:
    """A WAV that is cut off is read as if it were shorter; but it says how long it is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"RIFF":
            return
        at = 12
        while at + 8 <= size:
            file.seek(at)
            name, length = struct.unpack("<4sI", file.read(8))
            at += 8 + length + length % 2
            # Programs that write to a pipe do not know the length, and say 0 or the most there is.
            if name == b"data" and length < 2**32 - 1 and at - length % 2 > size:
                raise FileError(f"{path}: is cut off: {size:,} of {at - length % 2:,} bytes")


def write(path: Path, content: Content) -> None:
    import soundfile

    part, extra, format = content.parts[""], content.extra, content.format.upper()
    # Eight bits are signed in FLAC and not in WAV.
    bytewise = {"WAV": "PCM_U8", "FLAC": "PCM_S8"}.get(format, extra.subtype)
    subtype = "VORBIS" if format == "OGG" else bytewise if BITS.get(extra.subtype) == 8 else extra.subtype
    if not soundfile.check_format(format, subtype):
        raise FileError(f"{format} cannot hold samples of {subtype}; choose --format wav")
    values = part.values
    if part.levels:
        values = values.astype(np.int32) << (32 - BITS[extra.subtype])
    with soundfile.SoundFile(path, "w", extra.rate, values.shape[1], subtype, format=format) as file:
        for name, text in extra.strings.items():
            setattr(file, name, text)
        for start in range(0, len(values), 2**16):  # large blocks overflow the stack of libsndfile's Vorbis
            file.write(values[start : start + 2**16])
    if format == "WAV" and subtype in FLOATS:
        path.write_bytes(_without_time(path.read_bytes()))
    elif format == "OGG":
        path.write_bytes(_with_serial(path.read_bytes(), 0))


def _without_time(wav: bytes) -> bytes:
    """The chunk with the peaks says when it was written. The same samples are to give the same bytes."""
    at, found = 12, bytearray(wav)
    while at + 8 <= len(found):
        name, length = struct.unpack("<4sI", found[at : at + 8])
        if name == b"PEAK":
            found[at + 12 : at + 16] = bytes(4)
        at += 8 + length + length % 2
    return bytes(found)


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _with_serial(ogg: bytes, serial: int) -> bytes:
    """Pages of an Ogg stream carry a random number, and a check sum over it: the CRC of zlib with its bits reversed
    (RFC 3533)."""
    at, found = 0, bytearray(ogg)
    while found[at : at + 4] == b"OggS":
        segments = found[at + 26]
        end = at + 27 + segments + sum(found[at + 27 : at + 27 + segments])
        found[at + 14 : at + 18] = struct.pack("<I", serial)
        found[at + 22 : at + 26] = bytes(4)
        check = zlib.crc32(bytes(found[at:end]).translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
        found[at + 22 : at + 26] = struct.pack("<I", int(f"{check:032b}"[::-1], 2))
        at = end
    return bytes(found)
