"""Pictures for the command line: Pillow and tifffile, and PNG of 16 bits, which Pillow does not do in colour."""

from __future__ import annotations

import dataclasses
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from clipaware._media import Content, FileError, Part, not_too_large

Array = Any

COLOUR_CHUNKS = (b"cHRM", b"gAMA", b"sRGB", b"cICP", b"sBIT")  # of a PNG; iCCP and eXIf are the profile and the EXIF
ORIENTATION = 274  # the tag of that, in EXIF and TIFF
_opening = threading.Lock()
DEPTHS = {"uint8": 256, "uint16": 65536}


@dataclass(frozen=True)
class Extra:
    """What belongs to a picture beside the values that are perturbed."""

    alpha: Array | None = None  # with an axis for itself at the end
    profile: bytes | None = None
    exif: bytes | None = None
    orientation: int = 1
    dpi: tuple[float, float] | None = None
    chunks: tuple[tuple[bytes, bytes], ...] = ()  # of a PNG, about colour
    photometric: str | None = None  # of a TIFF
    compressed: bool = False


def read(path: Path, format: str, most: int) -> Content:
    if format == "tiff":
        return _read_tiff(path, most)
    chunks: tuple[tuple[bytes, bytes], ...] = ()
    if format == "png":
        with path.open("rb") as file:
            header, chunks = _start_of_png(path, file)
        if header.depth == 16:
            return _read_png16(path, most)
    return _read_pillow(path, format, most, chunks)


def write(path: Path, content: Content, level: int) -> None:
    part, extra = content.parts[""], content.extra
    if content.format != "tiff":
        _check_fits(content.format, part, extra)
    values = part.values if extra.alpha is None else np.concatenate((_with_channels(part.values), extra.alpha), axis=-1)
    if content.format == "tiff":
        _write_tiff(path, values, extra, level)
    elif part.values.dtype == np.uint16:
        path.write_bytes(_png16(values, extra, level))
    else:
        _write_pillow(path, values, content.format, extra, level)


def _with_channels(values: Array) -> Array:
    return values[..., None] if values.ndim == 2 else values


def _check_fits(format: str, part: Part, extra: Extra) -> None:
    """A format that cannot hold all of a picture is not written in part."""
    name, dtype = format.upper(), part.values.dtype
    if part.values.ndim > 3:
        raise FileError(f"{name} holds one picture, and this has shape {part.values.shape}; choose --format tiff")
    if dtype != np.uint8 and not (dtype == np.uint16 and format == "png"):
        bits = "8 or 16 bits" if format == "png" else "8 bits"
        raise FileError(
            f"{name} has {bits}, and this is {dtype}; choose --format tiff" + " or png" * (dtype == np.uint16)
        )
    if format == "jpeg" and extra.alpha is not None:
        raise FileError("JPEG has no alpha channel, and this has one; choose --format png")
    if format == "bmp" and (extra.profile or extra.orientation != 1):
        what = "a colour profile" if extra.profile else "an EXIF orientation"
        raise FileError(f"BMP cannot hold {what}, and this has one; choose --format png")
    if format == "bmp" and extra.alpha is not None and part.values.ndim == 2:
        raise FileError("BMP has no alpha channel without colour; choose --format png")


# --- Pillow -----------------------------------------------------------------------------------------------------------


def _read_pillow(path: Path, format: str, most: int, chunks: tuple[tuple[bytes, bytes], ...] = ()) -> Content:
    from PIL import Image

    with _opened(Image, path) as image:
        # Nothing is decoded yet.
        not_too_large(path, (image.width, image.height, len(image.getbands())), most)
        if image.format not in (format.upper(), "MPO" if format == "jpeg" else None):
            raise FileError(f"{path}: is a {image.format} file, and its name says {format.upper()}; rename it")
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise FileError(f"{path}: has {image.n_frames} frames, expected one picture")
        image.load()
        info, mode = image.info, image.mode
        if mode == "P" or (mode in ("L", "RGB") and "transparency" in info):
            mode = ("LA" if mode == "L" else "RGBA") if "transparency" in info else "RGB"
        mode = {"1": "L", "PA": "RGBA"}.get(mode, mode)
        if mode not in ("L", "LA", "RGB", "RGBA", "I;16"):
            raise FileError(f"{path}: has the colours {mode}, expected grey or RGB; convert it first")
        values = np.array(image if mode == image.mode else image.convert(mode))
        orientation = image.getexif().get(ORIENTATION, 1) if info else 1
    alpha = None
    if mode in ("LA", "RGBA"):
        values, alpha = values[..., :-1], values[..., -1:]
        values = values[..., 0] if mode == "LA" else values
    dpi = info.get("dpi")
    extra = Extra(
        alpha, info.get("icc_profile"), info.get("exif"), orientation, dpi and (float(dpi[0]), float(dpi[1])), chunks
    )
    return Content("picture", format, {"": Part(values, 0.0, 1.0, DEPTHS[values.dtype.name])}, format == "jpeg", extra)


def _opened(pillow: Any, path: Path) -> Any:
    """Without Pillow's own limit, which is another one and for all of a process."""
    with _opening:
        limit, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None
        try:
            return pillow.open(path)
        finally:
            pillow.MAX_IMAGE_PIXELS = limit


def _exif_of(extra: Extra) -> bytes | None:
    """As it came, or one that says the orientation."""
    if extra.exif or extra.orientation == 1:
        return extra.exif
    from PIL import Image

    exif = Image.Exif()
    exif[ORIENTATION] = extra.orientation
    return exif.tobytes()


def _write_pillow(path: Path, values: Array, format: str, extra: Extra, level: int) -> None:
    from PIL import Image, PngImagePlugin

    options: dict[str, Any] = {}
    if extra.dpi and format != "webp":
        options["dpi"] = extra.dpi
    if format != "bmp":
        options |= {"icc_profile": extra.profile} if extra.profile else {}
        options |= {"exif": exif} if (exif := _exif_of(extra)) else {}
    if format == "png":
        options["compress_level"] = level
        options["pnginfo"] = PngImagePlugin.PngInfo()
        for name, data in extra.chunks:
            options["pnginfo"].add(name, data)
    elif format == "jpeg":
        options |= {"quality": 95, "subsampling": 0}
    elif format == "webp":
        options |= {"lossless": True, "exact": True, "quality": 50}
    values = values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values
    with path.open("wb") as file:
        Image.fromarray(np.ascontiguousarray(values)).save(file, format.upper(), **options)


# --- TIFF -------------------------------------------------------------------------------------------------------------


def _read_tiff(path: Path, most: int) -> Content:
    import tifffile

    with tifffile.TiffFile(path) as file:
        series, page = file.series[0], file.pages[0]
        assert isinstance(page, tifffile.TiffPage)
        if len(file.series) > 1:
            raise FileError(f"{path}: holds {len(file.series)} pictures of different kinds, expected one")
        not_too_large(path, series.shape, most)
        photometric = tifffile.PHOTOMETRIC(page.photometric).name.lower()
        needed = page.compression not in (1, 8, 32946, 32773)  # what tifffile does by itself
        if needed or photometric not in ("minisblack", "miniswhite", "rgb"):
            # LZW and the like: Pillow has them, for 8 bits and for 16 without colour.
            content = _read_pillow(path, "tiff", most)
            return dataclasses.replace(content, extra=dataclasses.replace(content.extra, compressed=True))
        values, axes = series.asarray(), series.axes
        if "S" in axes:
            values = np.moveaxis(values, axes.index("S"), -1)
        tags = {name: page.tags[name].value for name in (ORIENTATION, 34675, 282, 283, 296) if name in page.tags}
    channels = 3 if photometric == "rgb" else 1
    alpha = None
    if "S" in axes and values.shape[-1] > channels:
        values, alpha = values[..., :channels], values[..., channels:]
        values = values[..., 0] if channels == 1 else values
    levels = DEPTHS.get(values.dtype.name)
    if levels is None and values.dtype.name not in ("float16", "float32", "float64"):
        raise FileError(f"{path}: has dtype {values.dtype}, expected uint8, uint16, float16, float32 or float64")
    dpi = None
    if 282 in tags and 283 in tags and tags.get(296, 2) == 2 and tags[282][1] and tags[283][1]:
        dpi = tags[282][0] / tags[282][1], tags[283][0] / tags[283][1]
    compressed = page.compression != 1
    extra = Extra(alpha, tags.get(34675), None, int(tags.get(ORIENTATION, 1)), dpi, (), photometric, compressed)
    return Content("picture", "tiff", {"": Part(np.ascontiguousarray(values), 0.0, 1.0, levels)}, False, extra)


def _write_tiff(path: Path, values: Array, extra: Extra, level: int) -> None:
    import tifffile

    colour = values.shape[-1] - (0 if extra.alpha is None else extra.alpha.shape[-1]) if values.ndim > 2 else 1
    options: dict[str, Any] = {"photometric": extra.photometric or ("rgb" if colour == 3 else "minisblack")}
    if extra.alpha is not None:
        options |= {"extrasamples": ["unassalpha"] * extra.alpha.shape[-1], "planarconfig": "contig"}
    if extra.compressed:
        options |= {"compression": "zlib", "compressionargs": {"level": level}}
    if extra.dpi:
        options |= {"resolution": extra.dpi, "resolutionunit": "inch"}
    if extra.orientation != 1:
        options["extratags"] = [(ORIENTATION, "H", 1, extra.orientation, True)]
    tifffile.imwrite(path, values, iccprofile=extra.profile, metadata=None, software=False, **options)


# --- PNG of 16 bits: the format is https://www.w3.org/TR/png-3/ -------------------------------------------------------

CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by the type of colour; without palettes
SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Of the seven passes of an interlaced picture: first row and column, and the distance to the next.
PASSES = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


@dataclass(frozen=True)
class _Header:
    width: int
    height: int
    depth: int
    colour: int
    interlaced: bool


def _chunks(path: Path, file: BinaryIO, until: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    if file.read(8) != SIGNATURE:
        raise FileError(f"{path}: is no PNG file, though its name says so")
    while True:
        start = file.read(8)
        if len(start) < 8:
            raise FileError(f"{path}: is cut off")
        length, name = struct.unpack(">I4s", start)
        if name == until:
            return
        data, check = file.read(length), file.read(4)
        if len(data) < length or len(check) < 4:
            raise FileError(f"{path}: is cut off")
        if zlib.crc32(name + data) != int.from_bytes(check, "big"):
            raise FileError(f"{path}: is damaged: a check sum is wrong")
        yield name, data
        if name == b"IEND":
            return


def _header(path: Path, data: bytes) -> _Header:
    width, height, depth, colour, _, _, interlaced = struct.unpack(">2I5B", data)
    if not width or not height:
        raise FileError(f"{path}: has no elements")
    return _Header(width, height, depth, colour, bool(interlaced))


def _start_of_png(path: Path, file: BinaryIO) -> tuple[_Header, tuple[tuple[bytes, bytes], ...]]:
    """The header, and what stands before the pixels about colour."""
    start = file.read(8)
    if start != SIGNATURE:
        # Pillow knows what it is instead.
        return _Header(1, 1, 8, 0, False), ()
    file.seek(0)
    found = []
    for name, data in _chunks(path, file, until=b"IDAT"):
        if name == b"IHDR":
            header = _header(path, data)
        elif name in COLOUR_CHUNKS:
            found.append((name, data))
    return header, tuple(found)


def _read_png16(path: Path, most: int) -> Content:
    kept, pixels, profile, exif, dpi = [], [], None, None, None
    with path.open("rb") as file:
        for name, data in _chunks(path, file):
            if name == b"IHDR":
                header = _header(path, data)
                not_too_large(path, (header.width, header.height, CHANNELS[header.colour]), most)
            elif name == b"IDAT":
                pixels.append(data)
            elif name == b"iCCP":
                profile = zlib.decompress(data[data.index(b"\0") + 2 :])
            elif name == b"eXIf":
                exif = b"Exif\0\0" + data
            elif name == b"pHYs" and data[8] == 1:
                across, down = struct.unpack(">2I", data[:8])
                dpi = across * 0.0254, down * 0.0254
            elif name in COLOUR_CHUNKS:
                kept.append((name, data))
    values = _unpacked(path, header, b"".join(pixels))
    alpha = None
    if header.colour in (4, 6):
        values, alpha = values[..., :-1], values[..., -1:]
    values = values[..., 0] if values.shape[-1] == 1 else values
    orientation = 1
    if exif:
        from PIL import Image

        found = Image.Exif()
        found.load(exif)
        orientation = found.get(ORIENTATION, 1)
    extra = Extra(alpha, profile, exif, orientation, dpi, tuple(kept))
    return Content("picture", "png", {"": Part(np.ascontiguousarray(values), 0.0, 1.0, 65536)}, False, extra)


def _unpacked(path: Path, header: _Header, packed: bytes) -> Array:
    channels = CHANNELS[header.colour]
    passes = PASSES if header.interlaced else ((0, 0, 1, 1),)
    sizes = [
        (-((row - header.height) // down), -((column - header.width) // across)) for row, column, down, across in passes
    ]
    lengths = [rows * (1 + 2 * channels * columns) if columns > 0 else 0 for rows, columns in sizes]
    stream = zlib.decompressobj()
    raw = np.frombuffer(stream.decompress(packed, sum(lengths)), np.uint8)  # no more than the header says
    if raw.size < sum(lengths):
        raise FileError(f"{path}: is cut off")
    values = np.empty((header.height, header.width, channels), np.uint16)
    start = 0
    for (row, column, down, across), (rows, columns), length in zip(passes, sizes, lengths, strict=True):
        if length:
            lines = raw[start : start + length].reshape(rows, -1)
            values[row::down, column::across] = _unfiltered(path, lines, columns, 2 * channels).view(">u2")
        start += length
    return values


def _unfiltered(path: Path, lines: Array, columns: int, width: int) -> Array:
    """Undo a PNG's filters: every byte was stored as its difference from a guess made of its neighbours to the left,
    above and between. Along diagonals, whose neighbours are all on earlier ones, a whole diagonal at a time."""
    rows = len(lines)
    kinds, stored = lines[:, 0], lines[:, 1:].reshape(rows, columns, width)
    if kinds.max() > 4:
        raise FileError(f"{path}: is damaged: there is no filter {kinds.max()}")
    out = np.zeros((rows + 1, columns + 1, width), np.int16)  # with a margin of 0 above and to the left
    for diagonal in range(rows + columns - 1):
        i = np.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1))
        j = diagonal - i
        left, above, between = out[i + 1, j], out[i, j + 1], out[i, j]
        guess = left + above - between
        away = [abs(guess - a) for a in (left, above, between)]
        nearest = np.where(
            (away[0] <= away[1]) & (away[0] <= away[2]), left, np.where(away[1] <= away[2], above, between)
        )
        kind = kinds[i, None]
        guesses = [np.zeros_like(left), left, above, (left + above) >> 1, nearest]
        out[i + 1, j + 1] = (stored[i, j] + np.choose(kind, guesses)) & 255
    return np.ascontiguousarray(out[1:, 1:].astype(np.uint8))


def _png16(values: Array, extra: Extra, level: int) -> bytes:
    values = _with_channels(values)
    height, width, channels = values.shape
    colour = {count: colour for colour, count in CHANNELS.items()}[channels]
    lines = np.ascontiguousarray(values.astype(">u2")).view(np.uint8).reshape(height, -1)
    filtered = np.full((height, 1 + lines.shape[1]), 2, np.uint8)  # each byte as its difference from the one above
    filtered[:, 1:] = lines
    filtered[1:, 1:] -= lines[:-1]
    found = [(b"IHDR", struct.pack(">2I5B", width, height, 16, colour, 0, 0, 0)), *extra.chunks]
    if extra.profile:
        found.append((b"iCCP", b"profile\0\0" + zlib.compress(extra.profile)))
    if extra.dpi:
        found.append((b"pHYs", struct.pack(">2IB", *(round(a / 0.0254) for a in extra.dpi), 1)))
    if exif := _exif_of(extra):
        found.append((b"eXIf", exif.removeprefix(b"Exif\0\0")))
    found += [(b"IDAT", zlib.compress(filtered.tobytes(), level)), (b"IEND", b"")]
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in found
    )
