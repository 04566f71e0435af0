"""Damaged files for every reader: ``python -m load.readers --minutes 5 --seed 0``.

Whatever the bytes, reading is to end in a Content or a FileError: no other error, no more memory than a limit, not
long, and nothing printed. What was read is written again and read back the same, or refused by a FileError. Each
process has a limit on its memory and tells what it is at, so that a crash is a finding, too. A file that does something
else is kept.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import wave
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = Any

MOST = 2**22  # elements of a file
MEMORY = 3 * 2**30  # that a process may have
GROWTH = 512 * 2**20  # by which a file may let it grow
LONG = 20  # seconds that a file may take
AT_ONCE = 500  # files of a process

RIGHT = ("read", "refused", "read, refused to be written")

# Numbers that headers are wrong with.
NUMBERS = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


# --- files that are whole ---------------------------------------------------------------------------------------------


def seeds() -> dict[str, bytes]:
    """Small files of every format and of what is read in a way of its own, by name."""
    return dict((*_pictures(), *_tiffs(), *_sounds(), *_arrays()))


def _pictures() -> Iterator[tuple[str, bytes]]:
    from PIL import Image, ImageCms

    from clipaware import images
    from clipaware._media import Content

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[images.ORIENTATION] = 6
    about: dict[str, Any] = {"icc_profile": profile, "exif": exif.tobytes(), "dpi": (72, 72)}
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (17, 23, 3), np.uint8))

    def saved(image: Any, format: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, format, **options)
        return file.getvalue()

    yield "rgb.png", saved(rgb, "PNG", **about)
    yield "grey.png", saved(rgb.convert("L"), "PNG", transparency=7)
    yield "alpha.png", saved(rgb.convert("RGBA"), "PNG")
    yield "palette.png", saved(rgb.convert("P"), "PNG", transparency=3)
    yield "bits.png", saved(rgb.convert("1"), "PNG")
    yield "frames.png", saved(rgb, "PNG", save_all=True, append_images=[rgb.rotate(90)])
    for name, shape in (("deep", (9, 11, 3)), ("deep_grey", (9, 11)), ("deep_alpha", (5, 4, 3))):
        values = rng.integers(0, 65536, shape, np.uint16)
        alpha = values[..., :1] if name == "deep_alpha" else None
        extra = images.Extra(alpha, profile, exif.tobytes(), 6, (72.0, 72.0))
        part = images._part(values, values.ndim == 3)
        yield (
            f"{name}.png",
            images._png16(
                values if alpha is None else np.concatenate((values, alpha), axis=-1),
                Content("picture", "png", {"": part}, False, extra).extra,
                6,
            ),
        )
    yield "interlaced.png", _interlaced()
    yield "rgb.jpg", saved(rgb, "JPEG", **about)
    yield "progressive.jpg", saved(rgb.convert("L"), "JPEG", progressive=True)
    yield "cmyk.jpg", saved(rgb.convert("CMYK"), "JPEG")
    yield "several.jpg", saved(rgb, "MPO", save_all=True, append_images=[rgb])
    yield "rgb.webp", saved(rgb, "WEBP", lossless=True, icc_profile=profile)
    yield "lossy.webp", saved(rgb.convert("RGBA"), "WEBP")
    yield "frames.webp", saved(rgb, "WEBP", save_all=True, append_images=[rgb.rotate(90)])
    yield "rgb.bmp", saved(rgb, "BMP")
    yield "grey.bmp", saved(rgb.convert("L"), "BMP")
    yield "palette.bmp", saved(rgb.convert("P"), "BMP")
    yield "bits.bmp", saved(rgb.convert("1"), "BMP")
    yield "gif.png", saved(rgb, "GIF")
    yield "lzw.tif", saved(rgb, "TIFF", compression="tiff_lzw", **about)
    yield "jpeg.tif", saved(rgb, "TIFF", compression="jpeg")
    yield "fax.tif", saved(rgb.convert("1"), "TIFF", compression="group4")
    yield "palette.tif", saved(rgb.convert("P"), "TIFF")


def _interlaced() -> bytes:
    """A PNG of 16 bits in seven passes, none of them filtered."""
    from clipaware import images

    passes = [(len(range(row, 9, down)), len(range(column, 10, across))) for row, column, down, across in images.PASSES]
    raw = b"".join((b"\0" + bytes(range(2 * columns))) * rows for rows, columns in passes)
    chunks = ((b"IHDR", struct.pack(">2I5B", 10, 9, 16, 0, 0, 0, 1)), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return images.SIGNATURE + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _tiffs() -> Iterator[tuple[str, bytes]]:
    import tifffile

    rng = np.random.default_rng(1)
    bytewise = rng.integers(0, 256, (16, 32, 3), np.uint8)
    files: Any = (
        ("plain", bytewise, {"photometric": "rgb"}),
        ("zlib", bytewise, {"photometric": "rgb", "compression": "zlib", "predictor": True}),
        ("tiles", bytewise[..., 0], {"tile": (16, 16), "compression": "zlib"}),
        ("deep", bytewise[..., 0].astype(np.uint16) * 257, {"photometric": "miniswhite"}),
        ("float", rng.random((8, 9)).astype(np.float32), {"resolution": (72, 72)}),
        ("pages", rng.integers(0, 256, (3, 8, 9), np.uint8), {"photometric": "minisblack"}),
        ("planes", rng.integers(0, 256, (3, 8, 9), np.uint8), {"photometric": "rgb", "planarconfig": "separate"}),
        ("big", bytewise[..., 0], {"bigtiff": True}),
        ("other_end", bytewise[..., 0].astype(np.uint16), {"byteorder": ">"}),
        ("packbits", bytewise[..., 0], {"compression": "packbits"}),
    )
    for name, values, options in files:
        file = io.BytesIO()
        try:
            tifffile.imwrite(file, values, **{"metadata": None, **options})
        except (KeyError, ValueError):  # of what needs another package to be written
            continue
        yield f"{name}.tif", file.getvalue()


def _sounds() -> Iterator[tuple[str, bytes]]:
    import soundfile

    rng = np.random.default_rng(2)
    values = rng.uniform(-0.5, 0.5, (300, 2))
    for name, format, subtype in (
        ("pcm.wav", "WAV", "PCM_16"),
        ("float.wav", "WAV", "FLOAT"),
        ("law.wav", "WAV", "ULAW"),
        ("adpcm.wav", "WAV", "IMA_ADPCM"),
        ("extensible.wav", "WAVEX", "PCM_24"),
        ("wide.wav", "RF64", "PCM_32"),
        ("pcm.flac", "FLAC", "PCM_16"),
        ("deep.flac", "FLAC", "PCM_24"),
        ("vorbis.ogg", "OGG", "VORBIS"),
        ("aiff.wav", "AIFF", "PCM_16"),
        ("mp3.wav", "MP3", "MPEG_LAYER_III"),
    ):
        if not soundfile.check_format(format, subtype):
            continue
        file = io.BytesIO()
        soundfile.write(file, values, 8000, subtype, format=format)
        yield name, file.getvalue()
    file = io.BytesIO()
    with wave.open(file, "wb") as plain:
        plain.setparams((1, 1, 8000, 0, "NONE", ""))
        plain.writeframes(bytes(range(200)))
    yield "bytes.wav", file.getvalue()


def _arrays() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(3)
    for name, values, version in (
        ("single", rng.random((7, 5), np.float32), (1, 0)),
        ("double", rng.random((3, 4, 5)), (2, 0)),
        ("half", rng.random((3, 4)).astype(">f2"), (3, 0)),
        ("bytes", np.asfortranarray(rng.integers(0, 256, (6, 7), np.uint8)), (1, 0)),
        ("number", np.array(0.5), (1, 0)),
    ):
        file = io.BytesIO()
        np.lib.format.write_array(file, values, version, allow_pickle=False)
        yield f"{name}.npy", file.getvalue()
    file = io.BytesIO()
    np.savez(file, a=rng.random((4, 5)), b=rng.integers(0, 256, 9, np.uint8))
    yield "stored.npz", file.getvalue()
    file = io.BytesIO()
    np.savez_compressed(file, a=rng.random((4, 5)).astype(np.float16), c=np.zeros((50, 50)))
    yield "packed.npz", file.getvalue()
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("readme.txt", "no array")
    yield "other.npz", file.getvalue()


# --- and damaged ------------------------------------------------------------------------------------------------------


def damaged(data: bytes, others: list[bytes], rng: np.random.Generator) -> bytes:
    """A few things wrong with it, more often near its start, where headers are; check sums of PNG sometimes mended."""
    found = bytearray(data)
    for _ in range(1 + rng.geometric(0.5)):
        if not found:
            break
        near = min(len(found), 128) if rng.random() < 0.6 else len(found)
        at = int(rng.integers(near))
        kind = rng.integers(8)
        if kind == 0:
            found[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            found[at] = int(rng.integers(256))
        elif kind == 2:
            del found[int(rng.integers(len(found))) :]
        elif kind == 3:
            width = int(rng.choice((1, 2, 4, 8)))
            number = int(rng.choice(NUMBERS)) % 2 ** (8 * width)
            found[at : at + width] = number.to_bytes(width, "big" if rng.random() < 0.5 else "little")
        elif kind == 4:
            del found[at : at + int(rng.integers(1, 17))]
        elif kind == 5:
            found[at:at] = bytes(rng.integers(0, 256, int(rng.integers(1, 17)), np.uint8))
        elif kind == 6:
            other = others[int(rng.integers(len(others)))]
            start = int(rng.integers(len(other)))
            length = int(rng.integers(1, 65))
            found[at : at + length] = other[start : start + length]
        else:
            length = int(rng.integers(1, 65))
            found[at:at] = found[at : at + length] * int(rng.integers(1, 5))
    made = bytes(found)
    return mended(made) if made[:4] == b"\x89PNG" and rng.random() < 0.7 else made


def mended(png: bytes) -> bytes:
    """With right check sums, so that what is wrong with a chunk is looked at."""
    found, at = bytearray(png), 8
    while at + 12 <= len(found):
        (length,) = struct.unpack(">I", found[at : at + 4])
        end = at + 8 + length
        if end + 4 > len(found):
            break
        found[end : end + 4] = struct.pack(">I", zlib.crc32(found[at + 4 : end]))
        at = end + 4
    return bytes(found)


def cases(seed: int, number: int) -> Iterator[tuple[str, bytes]]:
    """Names and bytes, always the same for a seed."""
    whole = seeds()
    names, rng = list(whole), np.random.default_rng(seed)
    others = list(whole.values())
    for k in range(number):
        name = names[int(rng.integers(len(names)))]
        yield f"{seed}-{k}-{name}", damaged(whole[name], others, rng)


# --- read -------------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> str:
    """What reading a file came to. One of RIGHT, unless something is wrong."""
    from clipaware._media import Content, FileError, read, write

    again = path.with_name(f"again{path.suffix}")
    try:
        content = read(path, MOST)
        assert isinstance(content, Content)
        assert 0 < sum(part.values.size for part in content.parts.values()) <= MOST
    except FileError as error:
        text = str(error)
        return "refused" if "\n" not in text and path.name in text else f"not one line that names the file: {text!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    try:
        write(again, content)
        second = read(again, MOST)
    except FileError:
        return "read, refused to be written"
    except BaseException as error:
        return f"writing: {type(error).__name__}: {error}"
    finally:
        again.unlink(missing_ok=True)
    for name, part in content.parts.items():
        if not content.lossy and not np.array_equal(part.values, second.parts[name].values, equal_nan=True):
            return "other values after writing"
    return "read"


def work(seed: int, number: int, first: int) -> None:
    """In a process of its own: a line of JSON before each file, and one after it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")  # as the command line does
    report = os.fdopen(os.dup(1), "w", buffering=1)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        before = 0
        for k, (name, data) in enumerate(cases(seed, number)):
            if k < first:
                continue
            path = Path(folder) / name
            path.write_bytes(data)
            report.write(json.dumps({"at": k, "name": name}) + "\n")
            start, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.alarm(LONG)  # which ends the process, wherever it is
            found = outcome(path)
            signal.alarm(0)
            took = time.monotonic() - start
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
            sys.stdout.flush()
            sys.stderr.flush()
            if (size := os.fstat(printed.fileno()).st_size) > before:
                text = os.pread(printed.fileno(), size - before, before).decode(errors="replace")
                # libtiff, in Pillow, has no way to be quiet.
                own = name.endswith(".tif") and all(re.match(r"[\w.]+: ", line) for line in text.splitlines())
                found, before = f"{found}, libtiff printed" if own else f"printed: {text[:300]}", size
            elif grown > GROWTH:
                found = f"memory: {grown >> 20} MB"
            elif took > LONG / 4:
                found = f"took {took:.1f} s"
            report.write(json.dumps({"at": k, "found": found}) + "\n")
            path.unlink()


def watched(seed: int, number: int) -> dict[str, str]:
    """Outcomes by name, of which a process that dies or does not end has one, too."""
    found: dict[str, str] = {}
    first, name = 0, ""
    while first < number:
        command = [sys.executable, "-m", "load.readers", "--work", str(seed), str(number), str(first)]
        process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        name = ""
        for line in map(json.loads, process.stdout.splitlines()):
            name = line.get("name", name)
            if "found" in line:
                found[name], first, name = line["found"], line["at"] + 1, ""
        if name:
            found[name] = f"ended the process: {process.returncode}"
            first += 1
        elif process.returncode:
            raise RuntimeError(f"the process ended with {process.returncode} before it read anything")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("load-found"), help="where files go that did something else")
    parser.add_argument("--work", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return 0
    end, seed, counts = time.monotonic() + 60 * options.minutes, options.seed, Counter[str]()
    kinds = Counter[str]()
    while time.monotonic() < end:
        found = watched(seed, AT_ONCE)
        bad = {name: what for name, what in found.items() if what.removesuffix(", libtiff printed") not in RIGHT}
        counts.update("WRONG" if name in bad else what for name, what in found.items())
        kinds.update(name.rpartition(".")[2] for name in found)
        if bad:
            options.keep.mkdir(exist_ok=True)
            for name, data in cases(seed, AT_ONCE):
                if name in bad:
                    (options.keep / name).write_bytes(data)
                    print(f"{name}: {bad[name]}", flush=True)
        seed += 1
    print(f"{sum(counts.values())} files, seeds {options.seed} to {seed - 1}: {dict(counts)}; {dict(kinds)}")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
