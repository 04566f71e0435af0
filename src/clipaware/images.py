"""Pictures for the command line: Pillow and tifffile, and PNG of 16 bits, which Pillow does not do in colour."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from clipaware._media import Content, FileError, Part, not_too_large

Array = Any

# Of a PNG; iCCP and eXIf are the profile and the EXIF. Not sBIT: noise is in all bits, and readers may drop some by it.
COLOUR_CHUNKS = (b"cHRM", b"gAMA", b"sRGB", b"cICP")
ORIENTATION = 274  # the tag of that, in EXIF and TIFF
PROFILE, RESOLUTION = 34675, (282, 283, 296)  # tags of a TIFF: across, down and their unit
_opening = threading.Lock()
for _library in ("PIL", "tifffile"):  # not to the terminal, if nobody listens: a FileError tells of what matters
    logging.getLogger(_library).addHandler(logging.NullHandler())
OPENED = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF")  # the last one to be told by its name; no other decoder
PROFILE_MOST = 2**26  # bytes of a colour profile
DEFLATE = 1032  # times as many bytes as are stored may come out, see https://zlib.net/zlib_tech.html
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
    samples: tuple[int, ...] = ()  # of a TIFF: what its channels beyond grey or RGB are; 1 and 2 are alpha
    resolution: tuple[Any, Any, int] | None = None  # of a TIFF: fractions across and down, and their unit


def read(path: Path, format: str, most: int) -> Content:
    if format == "tiff":
        return _read_tiff(path, most)
    if format != "png":
        return _read_pillow(path, format, most)
    with path.open("rb") as file:
        header, chunks, key = _start_of_png(path, file)
    if header.depth == 16:
        return _read_png16(path, most)
    return _read_pillow(path, format, most, chunks, key)


def write(path: Path, content: Content, level: int) -> None:
    part, extra = content.parts[""], content.extra
    if content.format != "tiff":
        _check_fits(content.format, part, extra)
    values = part.values
    if content.format == "tiff" and extra.photometric == "miniswhite":
        values = np.iinfo(values.dtype).max - values
    if extra.alpha is not None:
        values = np.concatenate((values if part.channels else values[..., None], extra.alpha), axis=-1)
    if content.format == "tiff":
        _write_tiff(path, values, part, extra, level)
    elif part.values.dtype == np.uint16:
        path.write_bytes(_png16(values, extra, level))
    else:
        _write_pillow(path, values, content.format, extra, level)


def _part(values: Array, channels: bool) -> Part:
    """Of pixels (height, width), or of pages of them; with or without channels at the end."""
    across = values.ndim - 1 - channels
    return Part(
        np.ascontiguousarray(values),
        0.0,
        1.0,
        DEPTHS.get(values.dtype.name),
        channels=channels,
        spatial=(across - 1, across),
    )


def _check_fits(format: str, part: Part, extra: Extra) -> None:
    """A format that cannot hold all of a picture is not written in part."""
    name, dtype, shape = format.upper(), part.values.dtype, part.values.shape
    if len(shape) > 2 + part.channels:
        raise FileError(f"{name} holds one picture, and this has shape {shape}; choose --format tiff")
    if part.channels and (shape[-1] != 3 or extra.photometric not in (None, "rgb")):
        raise FileError(f"{name} cannot hold {shape[-1]} channels that are not RGB; choose --format tiff")
    if dtype != np.uint8 and not (dtype == np.uint16 and format == "png"):
        bits = "8 or 16 bits" if format == "png" else "8 bits"
        raise FileError(
            f"{name} has {bits}, and this is {dtype}; choose --format tiff" + " or png" * (dtype == np.uint16)
        )
    if extra.alpha is not None:
        _check_alpha(name, extra.alpha.shape[-1], extra.samples)
    if format == "bmp" and (extra.profile or extra.orientation != 1):
        what = "a colour profile" if extra.profile else "an EXIF orientation"
        raise FileError(f"BMP cannot hold {what}, and this has one; choose --format png")
    if format == "jpeg" and extra.dpi and max(extra.dpi) > 65535:
        raise FileError(f"JPEG has at most 65535 dots per inch, and this has {max(extra.dpi):.0f}; choose --format png")
    if format == "webp" and not part.channels:
        raise FileError("WEBP has colour always, and this is grey; choose --format png")
    if format == "webp" and max(shape[:2]) > 16383:
        raise FileError(f"WEBP has at most 16383 pixels a side, and this has {max(shape[:2])}; choose --format png")


def _check_alpha(name: str, count: int, samples: tuple[int, ...]) -> None:
    if name in ("JPEG", "BMP"):
        # A BMP with alpha can be written, but is read without by most.
        raise FileError(f"{name} has no alpha channel, and this has one; choose --format png")
    if count > 1:
        raise FileError(f"{name} has one alpha channel, and this has {count}; choose --format tiff")
    if 1 in samples:
        raise FileError(f"{name} has no colours multiplied by alpha, and this has them; choose --format tiff")


# --- Pillow -----------------------------------------------------------------------------------------------------------


def _read_pillow(
    path: Path, format: str, most: int, chunks: tuple[tuple[bytes, bytes], ...] = (), key: Array | None = None
) -> Content:
    """`key` is the one value, or colour, that is transparent."""
    from PIL import Image

    with _opened(Image, path) as image:
        # Nothing is decoded yet.
        not_too_large(path, (image.width, image.height, len(image.getbands())), most)
        if image.format not in (format.upper(), "MPO" if format == "jpeg" else None):
            raise FileError(f"{path}: is a {image.format} file, and its name says {format.upper()}; rename it")
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise FileError(f"{path}: has {image.n_frames} frames, expected one picture")
        orientation = image.getexif().get(ORIENTATION, 1)
        image.load()
        info, mode = image.info, image.mode
        if mode == "P":
            mode = "RGBA" if "transparency" in info else "RGB"
        mode = {"1": "L", "PA": "RGBA"}.get(mode, mode)
        if mode not in ("L", "LA", "RGB", "RGBA", "I;16", "I;16B"):
            raise FileError(f"{path}: has the colours {mode}, expected grey or RGB; convert it first")
        values = np.array(image if mode == image.mode else image.convert(mode))
        if format == "tiff" and ORIENTATION not in image.getexif():
            # Pillow turns these, and takes the tag away.
            values = as_stored(values, orientation)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    alpha = None if key is None else _but(values, key)
    if mode in ("LA", "RGBA"):
        values, alpha = values[..., :-1], values[..., -1:]
        values = values[..., 0] if mode == "LA" else values
    dpi = info.get("dpi")
    extra = Extra(
        alpha, info.get("icc_profile"), info.get("exif"), orientation, dpi and (float(dpi[0]), float(dpi[1])), chunks
    )
    return Content("picture", format, {"": _part(values, values.ndim == 3)}, format == "jpeg", extra)


def _but(values: Array, key: Array) -> Array:
    """An alpha channel: all is opaque but what has this value, or colour."""
    equal = (values == key[0])[..., None] if values.ndim == 2 else (values == key).all(axis=-1, keepdims=True)
    return np.where(equal, 0, np.iinfo(values.dtype).max).astype(values.dtype)


def as_stored(values: Array, orientation: int) -> Array:
    """Undo what an EXIF orientation asks for."""
    if orientation in (6, 8):
        return np.rot90(values, 1 if orientation == 6 else -1)
    if orientation in (5, 7):
        values = np.swapaxes(values, 0, 1)
    return values[:: -1 if orientation in (3, 4, 7) else 1, :: -1 if orientation in (2, 3, 7) else 1]


def _opened(pillow: Any, path: Path | BinaryIO) -> Any:
    """Without Pillow's own limit, which is another one and for all of a process."""
    with _opening:
        limit, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None
        try:
            return pillow.open(path, formats=OPENED)
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

    _check_list(path)
    with tifffile.TiffFile(path) as file:
        series, page = file.series[0], file.pages[0]
        assert isinstance(page, tifffile.TiffPage)
        if len(file.series) > 1:
            raise FileError(f"{path}: holds {len(file.series)} pictures of different kinds, expected one")
        not_too_large(path, series.shape, most)
        _check_axes(path, series.axes, series.shape)
        photometric = tifffile.PHOTOMETRIC(page.photometric).name.lower()
        samples = tuple(int(kind) for kind in page.extrasamples)
        about = _about(page)
        needed = page.compression not in (1, 8, 32946, 32773)  # what tifffile does by itself
        if needed or page.bitspersample in (1, 2, 4) or photometric not in ("minisblack", "miniswhite", "rgb"):
            # LZW and the like: Pillow has them, for 8 bits and for 16 without colour.
            deep = page.bitspersample == 16 and (page.samplesperpixel > 1 or photometric == "miniswhite")
            if deep or samples not in ((), (2,)):
                raise FileError(
                    f"{path}: has {page.samplesperpixel} channel(s) of {page.bitspersample} bits, {photometric}, with "
                    f"{tifffile.COMPRESSION(page.compression).name} compression; save it as grey or RGB without that"
                )
            content = _read_pillow(path, "tiff", most)
            extra = dataclasses.replace(content.extra, compressed=page.compression != 1, **about)
            return dataclasses.replace(content, extra=extra)
        for part in file.pages:
            _check_segments(path, part, most)
        values, axes = series.asarray(maxworkers=1), series.axes
    if page.bitspersample != 8 * values.dtype.itemsize:
        raise FileError(f"{path}: has {page.bitspersample} bits, expected 8 or 16, or floats")
    if values.dtype.name not in (*DEPTHS, "float16", "float32", "float64"):
        raise FileError(f"{path}: has dtype {values.dtype}, expected uint8, uint16, float16, float32 or float64")
    values = np.moveaxis(values, axes.index("S"), -1) if "S" in axes else values[..., None]
    if math.prod(values.shape[:-3]) == 1:
        values = values.reshape(values.shape[-3:])  # one page is none
    else:
        values = values.reshape(-1, *values.shape[-3:])
    own = 3 if photometric == "rgb" else 1
    if values.shape[-1] < own:
        raise FileError(f"{path}: says RGB, and has {values.shape[-1]} channel(s)")
    samples = (*samples, *(0,) * values.shape[-1])[: values.shape[-1] - own]
    colours = own + sum(kind not in (1, 2) for kind in samples)
    if any(kind in (1, 2) for kind in samples[: colours - own]):
        raise FileError(f"{path}: has an alpha channel before others, expected it to be the last")
    values, alpha = values[..., :colours], values[..., colours:]
    if photometric == "miniswhite":
        if colours > 1 or values.dtype.name not in DEPTHS:
            raise FileError(f"{path}: has {colours} channel(s) of {values.dtype} whose 0 is white; convert it first")
        values = np.iinfo(values.dtype).max - values
    extra = Extra(
        alpha if alpha.shape[-1] else None,
        photometric=photometric,
        compressed=page.compression != 1,
        samples=samples,
        **about,
    )
    return Content("picture", "tiff", {"": _part(values if colours > 1 else values[..., 0], colours > 1)}, False, extra)


def _check_axes(path: Path, axes: str, shape: tuple[int, ...]) -> None:
    """Pages of pictures are written and read back as they are; what has more axes would come back in another shape."""
    pages = [size for axis, size in zip(axes, shape, strict=True) if axis not in "YXS" and size > 1]
    if not axes.replace("S", "").endswith("YX") or len(pages) > 1:
        raise FileError(f"{path}: has the axes {axes} of shape {shape}, expected one picture or pages of one size")


def _about(page: Any) -> dict[str, Any]:
    """What the tags of a TIFF say beside its pixels."""
    tags = {name: page.tags[name].value for name in (ORIENTATION, PROFILE, *RESOLUTION) if name in page.tags}
    across, down, unit = (tags.get(name) for name in RESOLUTION)
    unit, resolution, dpi = 2 if unit is None else int(unit), None, None
    if across and down and across[1] and down[1] and unit in (1, 2, 3):
        resolution = across, down, unit
        if unit in (2, 3):  # an inch, or a centimetre
            dpi = tuple(a / b * (1 if unit == 2 else 2.54) for a, b in (across, down))
    return {
        "profile": tags.get(PROFILE),
        "orientation": int(tags.get(ORIENTATION, 1)),
        "dpi": dpi,
        "resolution": resolution,
    }


def _check_list(path: Path) -> None:
    """The pages of a TIFF are a list, each with the place of the next. tifffile would go round in a ring for ever."""
    size = path.stat().st_size
    with path.open("rb") as file:
        order = "<" if file.read(2) == b"II" else ">"
        big = file.read(2) in (b"+\0", b"\0+")
        count, place, tag = (f"{order}Q", f"{order}Q", 20) if big else (f"{order}H", f"{order}I", 12)

        def number(at: int, kind: str) -> int:
            file.seek(at)
            found = file.read(struct.calcsize(kind))
            return struct.unpack(kind, found)[0] if len(found) == struct.calcsize(kind) else 0  # the end, or beyond it

        at, left = number(8 if big else 4, place), size
        while 0 < at < size:
            length = struct.calcsize(count) + number(at, count) * tag + struct.calcsize(place)
            left -= length
            if left < 0:
                raise FileError(f"{path}: is damaged: its list of pages is longer than the file")
            at = number(at + length - struct.calcsize(place), place)


def _check_segments(path: Path, page: Any, most: int) -> None:
    """Before a page is decoded, which takes what comes: no strip or tile holds more than there may be of a picture."""
    if page.keyframe.is_tiled:
        not_too_large(path, page.keyframe.chunks, most)
    if page.keyframe.compression == 1:
        return
    if sum(page.databytecounts) > path.stat().st_size:
        raise FileError(f"{path}: is cut off, or damaged: it says to have {sum(page.databytecounts):,} bytes of pixels")
    with path.open("rb") as file:
        for at, length in zip(page.dataoffsets, page.databytecounts, strict=True):
            if length * DEFLATE > 8 * most:  # or else it cannot
                file.seek(at)
                _inflated(path, file.read(length), 8 * most)


def _write_tiff(path: Path, values: Array, part: Part, extra: Extra, level: int) -> None:
    import tifffile

    options: dict[str, Any] = {"photometric": extra.photometric or ("rgb" if part.channels else "minisblack")}
    if part.channels or extra.alpha is not None:
        options["planarconfig"] = "contig"
    if extra.samples or extra.alpha is not None:
        options["extrasamples"] = extra.samples or (2,)
    if extra.compressed:
        options |= {"compression": "zlib", "compressionargs": {"level": level}}
    if extra.resolution:
        options |= {"resolution": extra.resolution[:2], "resolutionunit": extra.resolution[2]}
    elif extra.dpi:
        options |= {"resolution": extra.dpi, "resolutionunit": "inch"}
    if extra.orientation != 1:
        options["extratags"] = [(ORIENTATION, "H", 1, extra.orientation, True)]
    tifffile.imwrite(path, values, iccprofile=extra.profile, metadata=None, software=False, **options)


# --- PNG of 16 bits: the format is https://www.w3.org/TR/png-3/ -------------------------------------------------------

CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by the type of colour; without palettes
BITS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # that each may have
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
    size = path.stat().st_size
    if file.read(8) != SIGNATURE:
        raise FileError(f"{path}: is no PNG file, though its name says so")
    while True:
        start = file.read(8)
        if len(start) < 8:
            raise FileError(f"{path}: is cut off")
        length, name = struct.unpack(">I4s", start)
        if name == until:
            return
        if length > size:  # or memory for it would be asked for
            raise FileError(f"{path}: is cut off")
        data, check = file.read(length), file.read(4)
        if len(data) < length or len(check) < 4:
            raise FileError(f"{path}: is cut off")
        if zlib.crc32(name + data) != int.from_bytes(check, "big"):
            raise FileError(f"{path}: is damaged: a check sum is wrong")
        yield name, data
        if name == b"IEND":
            return


def _inflated(path: Path, packed: bytes, most: int) -> bytes:
    """No more than that is taken into memory."""
    found = zlib.decompressobj().decompress(packed, most + 1)
    if len(found) > most:
        raise FileError(f"{path}: is damaged: {len(packed):,} bytes stand for more than {most:,}")
    return found


def _header(path: Path, data: bytes) -> _Header:
    width, height, depth, colour, _, _, interlaced = struct.unpack(">2I5B", data)
    if not width or not height:
        raise FileError(f"{path}: has no elements")
    if depth not in BITS.get(colour, ()):
        raise FileError(f"{path}: is damaged: there is no PNG of colour type {colour} with {depth} bits")
    return _Header(width, height, depth, colour, bool(interlaced))


def _start_of_png(path: Path, file: BinaryIO) -> tuple[_Header, tuple[tuple[bytes, bytes], ...], Array | None]:
    """The header, what stands before the pixels about colour, and what is transparent, of 8 bits."""
    start = file.read(8)
    if start != SIGNATURE:
        # Pillow knows what it is instead.
        return _Header(1, 1, 8, 0, False), (), None
    file.seek(0)
    header, found, key = None, [], None
    for name, data in _chunks(path, file, until=b"IDAT"):
        if name == b"IHDR":
            header = _header(path, data)
        elif name == b"tRNS":
            key = data
        elif name in COLOUR_CHUNKS:
            found.append((name, data))
    if header is None:
        raise FileError(f"{path}: is damaged: it has no header")
    return header, tuple(found), None if key is None else _key(path, header, key)


def _key(path: Path, header: _Header, data: bytes) -> Array | None:
    """The value, or colour, that is transparent, on the scale on which pixels are read. Palettes have another way."""
    if header.colour not in (0, 2):
        return None
    if len(data) != 2 * CHANNELS[header.colour]:
        raise FileError(f"{path}: is damaged: {len(data)} bytes say what is transparent")
    top = 2**header.depth - 1
    return (np.frombuffer(data, ">u2") & top) * (1 if top > 255 else 255 // top)


def _read_png16(path: Path, most: int) -> Content:
    kept, pixels, profile, exif, dpi, key = [], [], None, None, None, None
    with path.open("rb") as file:
        for name, data in _chunks(path, file):
            if name == b"IHDR":
                header = _header(path, data)
                not_too_large(path, (header.width, header.height, CHANNELS[header.colour]), most)
            elif name == b"acTL" and (frames := struct.unpack(">2I", data)[0]) > 1:
                raise FileError(f"{path}: has {frames} frames, expected one picture")
            elif name == b"IDAT":
                pixels.append(data)
            elif name == b"tRNS":
                key = _key(path, header, data)
            elif name == b"iCCP":
                profile = _inflated(path, data[data.index(b"\0") + 2 :], PROFILE_MOST)
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
    alpha = alpha if key is None else _but(values, key)
    orientation = 1
    if exif:
        from PIL import Image

        found = Image.Exif()
        found.load(exif)
        orientation = found.get(ORIENTATION, 1)
    extra = Extra(alpha, profile, exif, orientation, dpi, tuple(kept))
    return Content("picture", "png", {"": _part(values, values.ndim == 3)}, False, extra)


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
            if lines[:, 0].max() > 4:
                raise FileError(f"{path}: is damaged: there is no filter {lines[:, 0].max()}")
            values[row::down, column::across] = _unfiltered(lines, columns, 2 * channels).view(">u2")
        start += length
    return values


def _unfiltered(lines: Array, columns: int, width: int) -> Array:
    """Undo a PNG's filters, by which every byte was stored as its difference from a guess made of the same byte of the
    pixels to the left, above and between. So some of a pixel's bytes are a picture of 8 bits, which Pillow decodes."""
    from PIL import Image

    rows = len(lines)
    kinds, stored = lines[:, :1], lines[:, 1:].reshape(rows, columns, width)
    out = np.empty((rows, columns, width), np.uint8)
    few = width if width <= 4 else width // 2
    colour = {2: 4, 3: 2, 4: 6}[few]
    for first in range(0, width, few):
        here = stored[..., first : first + few].reshape(rows, -1)
        data = zlib.compress(np.concatenate((kinds, here), axis=1).tobytes(), 0)
        png = _joined(((b"IHDR", struct.pack(">2I5B", columns, rows, 8, colour, 0, 0, 0)), (b"IDAT", data)))
        with _opened(Image, io.BytesIO(png)) as image:
            out[..., first : first + few] = image
    return out


def _png16(values: Array, extra: Extra, level: int) -> bytes:
    values = values if values.ndim == 3 else values[..., None]
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
    return _joined([*found, (b"IDAT", zlib.compress(filtered.tobytes(), level))])


def _joined(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (*chunks, (b"IEND", b""))
    )
