"""Pictures: what is read is what was written, with alpha, profile, orientation, and every depth."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="Pillow is not installed")
pytest.importorskip("tifffile", reason="tifffile is not installed")
import tifffile
from PIL import Image, ImageCms

from clipaware import images
from clipaware._media import Content, FileError, Part, read, write

RNG = np.random.default_rng(0)
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SHAPES = {"grey": (11, 7), "rgb": (11, 7, 3)}


def picture(shape, dtype, alpha=False, **extra):
    values = RNG.integers(0, np.iinfo(dtype).max, shape, endpoint=True, dtype=dtype)
    transparent = RNG.integers(0, np.iinfo(dtype).max, (*shape[:2], 1), endpoint=True, dtype=dtype) if alpha else None
    part = images._part(values, len(shape) == 3)
    return Content("picture", "png", {"": part}, False, images.Extra(alpha=transparent, **extra))


def assert_same(a, b):
    np.testing.assert_array_equal(a.parts[""].values, b.parts[""].values)
    assert a.parts[""].levels == b.parts[""].levels
    assert a.parts[""].values.dtype == b.parts[""].values.dtype
    if a.extra.alpha is None:
        assert b.extra.alpha is None
    else:
        np.testing.assert_array_equal(a.extra.alpha, b.extra.alpha)


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("format", "dtype"), [("png", "uint8"), ("png", "uint16"), ("tiff", "uint8"), ("tiff", "uint16"), ("webp", "uint8")]
)
def test_everything_survives(format, dtype, shape, alpha, tmp_path):
    if format == "webp" and shape == "grey":
        return  # refused, see below
    given = picture(SHAPES[shape], dtype, alpha, profile=PROFILE, orientation=6, dpi=(300.0, 300.0))
    path = tmp_path / f"a.{format}"
    write(path, dataclasses.replace(given, format=format))
    found = read(path)
    assert_same(given, found)
    assert found.extra.profile == PROFILE
    assert found.extra.orientation == 6
    if format != "webp":
        assert found.extra.dpi == pytest.approx((300, 300), rel=1e-3)
    # And once more, from what was read.
    write(tmp_path / f"b.{format}", found)
    assert (tmp_path / f"b.{format}").read_bytes() == path.read_bytes()
    # Others agree.
    if format == "tiff":
        theirs = tifffile.imread(path).reshape(11, 7, -1)[..., : 3 if shape == "rgb" else 1]
        np.testing.assert_array_equal(theirs.reshape(SHAPES[shape]), given.parts[""].values)
    else:
        with Image.open(path) as image:
            assert image.getexif()[274] == 6
            assert image.info["icc_profile"] == PROFILE
            if dtype == "uint8":
                assert len(image.getbands()) == {"grey": 1, "rgb": 3}[shape] + alpha


def test_bmp(tmp_path):
    for shape in SHAPES.values():
        given = dataclasses.replace(picture(shape, "uint8"), format="bmp")
        write(tmp_path / "a.bmp", given)
        assert_same(given, read(tmp_path / "a.bmp"))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tiff_of_floats(dtype, tmp_path):
    values = RNG.random((5, 6, 3)).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="rgb")
    found = read(tmp_path / "a.tif")
    assert found.parts[""].levels is None
    write(tmp_path / "b.tif", found)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "b.tif"), values)


def test_tiff_compressed_planar_and_of_many_pages(tmp_path):
    values = RNG.integers(0, 65536, (3, 9, 8, 3)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "pages.tif", values, photometric="rgb", compression="zlib")
    found = read(tmp_path / "pages.tif")
    np.testing.assert_array_equal(found.parts[""].values, values)
    write(tmp_path / "again.tif", found)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "again.tif"), values)
    tifffile.imwrite(tmp_path / "planar.tif", values[0].transpose(2, 0, 1), photometric="rgb", planarconfig="separate")
    np.testing.assert_array_equal(read(tmp_path / "planar.tif").parts[""].values, values[0])
    # A compression that tifffile leaves to others.
    Image.fromarray((values[0] >> 8).astype(np.uint8)).save(tmp_path / "lzw.tif", compression="tiff_lzw")
    np.testing.assert_array_equal(read(tmp_path / "lzw.tif").parts[""].values, values[0] >> 8)


def test_jpeg_is_as_pillow_reads_it(tmp_path):
    smooth = np.linspace(0, 255, 40 * 30 * 3).reshape(40, 30, 3).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = 8
    Image.fromarray(smooth).save(tmp_path / "a.jpg", exif=exif, icc_profile=PROFILE, dpi=(96, 96))
    found = read(tmp_path / "a.jpg")
    assert found.lossy
    assert found.extra.orientation == 8
    with Image.open(tmp_path / "a.jpg") as image:
        np.testing.assert_array_equal(found.parts[""].values, np.asarray(image))
    for format in ("png", "webp", "tiff", "jpeg"):
        write(tmp_path / f"b.{format}".replace("jpeg", "jpg"), dataclasses.replace(found, format=format))
        again = read(tmp_path / f"b.{format}".replace("jpeg", "jpg"))
        assert again.extra.orientation == 8
        assert again.extra.profile == PROFILE
        if format != "jpeg":
            assert_same(found, again)


def test_colour_chunks_of_a_png_survive(tmp_path):
    given = picture((4, 5, 3), "uint8")
    write(tmp_path / "a.png", given)
    gamma = struct.pack(">I", 45455)
    chunk = struct.pack(">I", 4) + b"gAMA" + gamma + struct.pack(">I", zlib.crc32(b"gAMA" + gamma))
    plain = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(plain[:33] + chunk + plain[33:])  # after the header
    found = read(tmp_path / "a.png")
    assert found.extra.chunks == ((b"gAMA", gamma),)
    write(tmp_path / "b.png", found)
    assert read(tmp_path / "b.png").extra.chunks == ((b"gAMA", gamma),)


@pytest.mark.parametrize("mode", ["P", "1", "LA"])
def test_palettes_and_other_modes(mode, tmp_path):
    original = Image.fromarray(RNG.integers(0, 256, (6, 5, 4)).astype(np.uint8))
    original = original.convert(mode) if mode == "LA" else original.convert("RGB").convert(mode)
    original.save(tmp_path / "a.png")
    found = read(tmp_path / "a.png")
    expected = np.asarray(original.convert({"P": "RGB", "1": "L", "LA": "LA"}[mode]))
    np.testing.assert_array_equal(found.parts[""].values, expected[..., 0] if mode == "LA" else expected)


def filtered(values, kinds):
    """Lines of a PNG, filtered as its standard says: a byte at a time."""
    lines = np.ascontiguousarray(values.astype(">u2")).view(np.uint8).reshape(len(values), -1).astype(int)
    width, out = 2 * values.shape[2], []
    for i, (line, kind) in enumerate(zip(lines, kinds, strict=True)):
        stored = [int(kind)]
        for j, byte in enumerate(line):
            a = line[j - width] if j >= width else 0
            b = lines[i - 1][j] if i else 0
            c = lines[i - 1][j - width] if i and j >= width else 0
            guess = a + b - c
            nearest = min((abs(guess - a), 0, a), (abs(guess - b), 1, b), (abs(guess - c), 2, c))[2]
            stored.append(int(byte - (0, a, b, (a + b) // 2, nearest)[int(kind)]) % 256)
        out.append(bytes(stored))
    return b"".join(out)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(values, packed, interlaced=0):
    header = struct.pack(">2I5B", values.shape[1], values.shape[0], 16, 2, 0, 0, interlaced)
    return images.SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(packed)) + chunk(b"IEND", b"")


def test_png16_filters(tmp_path):
    values = RNG.integers(0, 65536, (25, 9, 3)).astype(np.uint16)
    (tmp_path / "a.png").write_bytes(png(values, filtered(values, np.arange(25) % 5)))
    np.testing.assert_array_equal(read(tmp_path / "a.png").parts[""].values, values)


@pytest.mark.parametrize("shape", [(17, 13, 3), (1, 1, 3), (3, 2, 3)])
def test_png16_interlaced(shape, tmp_path):
    values = RNG.integers(0, 65536, shape).astype(np.uint16)
    passes = [values[r::down, c::across] for r, c, down, across in images.PASSES]
    packed = b"".join(filtered(a, np.arange(len(a)) % 5) for a in passes if a.size)
    (tmp_path / "a.png").write_bytes(png(values, packed, interlaced=1))
    np.testing.assert_array_equal(read(tmp_path / "a.png").parts[""].values, values)


def test_bad_png16(tmp_path):
    values = RNG.integers(0, 65536, (6, 5, 3)).astype(np.uint16)
    good = png(values, filtered(values, [4] * 6))
    path = tmp_path / "a.png"
    for bad, what in (
        (good[:60], "is cut off"),
        (good[:70] + bytes([good[70] ^ 1]) + good[71:], "a check sum is wrong"),
        (png(values, filtered(values, [4] * 6)[:-9]), "is cut off"),
        (png(values, b"\x09" + filtered(values, [4] * 6)[1:]), "there is no filter 9"),
        (png(values[:0], b""), "has no elements"),
        (good[:33] + chunk(b"acTL", struct.pack(">2I", 2, 0)) + good[33:], "has 2 frames, expected one picture"),
    ):
        path.write_bytes(bad)
        with pytest.raises(FileError, match=what) as raised:
            read(path)
        assert str(path) in str(raised.value)
    # As many bytes as the header says are unpacked, however many there are.
    path.write_bytes(png(values, filtered(values, [4] * 6) + bytes(10**7)))
    np.testing.assert_array_equal(read(path).parts[""].values, values)


def test_what_a_format_cannot_hold_is_not_written(tmp_path):
    def failing(name, content, what):
        with pytest.raises(FileError, match=what):
            write(tmp_path / name, content)
        assert list(tmp_path.iterdir()) == []

    deep = picture((4, 5, 3), "uint16")
    failing(
        "a.bmp",
        dataclasses.replace(deep, format="bmp"),
        "BMP has 8 bits, and this is uint16; choose --format tiff or png",
    )
    failing("a.jpg", dataclasses.replace(deep, format="jpeg"), "JPEG has 8 bits")
    alpha = picture((4, 5, 3), "uint8", alpha=True)
    failing("a.jpg", dataclasses.replace(alpha, format="jpeg"), "JPEG has no alpha")
    turned = picture((4, 5, 3), "uint8", orientation=6)
    failing("a.bmp", dataclasses.replace(turned, format="bmp"), "BMP cannot hold an EXIF orientation")
    coloured = picture((4, 5, 3), "uint8", profile=PROFILE)
    failing("a.bmp", dataclasses.replace(coloured, format="bmp"), "BMP cannot hold a colour profile")
    floats = Content("picture", "png", {"": Part(np.zeros((3, 3), np.float32), 0.0, 1.0)}, False, images.Extra())
    failing("a.png", floats, "PNG has 8 or 16 bits, and this is float32")
    pages = Content("picture", "png", {"": images._part(np.zeros((2, 3, 3, 3), np.uint8), True)}, False, images.Extra())
    failing("a.png", pages, "PNG holds one picture")
    grey = dataclasses.replace(pages, parts={"": images._part(np.zeros((2, 3, 3), np.uint8), False)})
    failing("a.png", grey, "PNG holds one picture")
    for transparent in (False, True):
        grey = dataclasses.replace(picture((4, 5), "uint8", alpha=transparent), format="webp")
        failing("a.webp", grey, "WEBP has colour always, and this is grey; choose --format png")
        bitmap = dataclasses.replace(picture((4, 5, 3)[: 2 + transparent], "uint8", alpha=True), format="bmp")
        failing("a.bmp", bitmap, "BMP has no alpha channel, and this has one; choose --format png")
    long = dataclasses.replace(picture((1, 16384, 3), "uint8"), format="webp")
    failing("a.webp", long, "WEBP has at most 16383 pixels a side")
    fine = dataclasses.replace(picture((4, 5, 3), "uint8", dpi=(254000.0, 254000.0)), format="jpeg")
    failing("a.jpg", fine, "JPEG has at most 65535 dots per inch, and this has 254000")


def test_bad_pictures(tmp_path):
    good = tmp_path / "good.png"
    Image.fromarray(RNG.integers(0, 256, (50, 50, 3)).astype(np.uint8)).save(good)
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:])
    Image.new("CMYK", (4, 4)).save(tmp_path / "print.jpg")
    tifffile.imwrite(tmp_path / "wide.tif", np.zeros((3, 3), np.int32))
    (tmp_path / "empty.png").touch()
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-3000])
    Image.open(good).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-600])
    (tmp_path / "cut.tif").write_bytes(b"II*\0\x08\0\0\0\x01")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "text.webp").write_text("no picture")
    Image.open(good).save(tmp_path / "bmp.png", format="BMP")
    (tmp_path / "notes.txt").write_text("hello")
    for name, what in {
        "none.png": "there is no such file",
        "moving.webp": "has 2 frames",
        "print.jpg": "has the colours CMYK",
        "wide.tif": "has dtype int32",
        "empty.png": "the file is empty",
        "cut.png": "cut off|cannot be read",
        "cut.jpg": "cut off|cannot be read",
        "cut.tif": "cut off|cannot be read",
        "text.png": "cut off|cannot be read",
        "text.webp": "cut off|cannot be read",
        "bmp.png": "is a BMP file, and its name says PNG",
        "notes.txt": "ends in '.txt'",
    }.items():
        with pytest.raises(FileError, match=what) as raised:
            read(tmp_path / name)
        assert name in str(raised.value)
        assert "\n" not in str(raised.value)


def test_bombs_are_not_decoded(tmp_path):
    for depth in (8, 16):
        header = struct.pack(">2I5B", 60000, 60000, depth, 2, 0, 0, 0)
        path = tmp_path / f"{depth}.png"
        path.write_bytes(images.SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10**6))))
        with pytest.raises(FileError, match="10,800,000,000 elements, more than the limit"):
            read(path)
    Image.new("RGB", (20, 20)).save(tmp_path / "c.png")
    tifffile.imwrite(tmp_path / "c.tif", np.zeros((20, 20, 3), np.uint8), photometric="rgb")
    for name in ("c.png", "c.tif"):
        with pytest.raises(FileError, match="1,200 elements, more than the limit of 1,199"):
            read(tmp_path / name, 1199)
        assert read(tmp_path / name, 1200)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(FileError, match=r"a\.png: cannot be written: No space left"):
        write(path, picture((3, 3), "uint8"))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def axes_of(path):
    part = read(path).parts[""]
    return part.values.shape, part.channels, part.spatial


def test_axes(tmp_path):
    for name, mode in (("a.png", "L"), ("a.jpg", "L"), ("a.bmp", "L"), ("la.png", "LA")):
        Image.new(mode, (5, 4)).save(tmp_path / name)
        assert axes_of(tmp_path / name) == ((4, 5), False, (0, 1))
    for name, mode in (("b.png", "RGB"), ("b.jpg", "RGB"), ("b.webp", "RGB"), ("b.png", "P"), ("b.png", "RGBA")):
        Image.new(mode, (5, 4)).save(tmp_path / name)
        assert axes_of(tmp_path / name) == ((4, 5, 3), True, (0, 1))
    for shape in SHAPES.values():
        write(tmp_path / "deep.png", picture(shape, "uint16", alpha=True))
        assert axes_of(tmp_path / "deep.png") == (shape, len(shape) == 3, (0, 1))


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((4, 5), {}, ((4, 5), False, (0, 1))),
        ((1, 4, 5), {}, ((4, 5), False, (0, 1))),
        ((6, 4, 3), {}, ((6, 4, 3), False, (1, 2))),
        ((6, 4, 5), {"imagej": True, "metadata": {"axes": "ZYX"}}, ((6, 4, 5), False, (1, 2))),
        ((4, 5, 3), {"photometric": "rgb"}, ((4, 5, 3), True, (0, 1))),
        ((3, 4, 5), {"photometric": "rgb", "planarconfig": "separate"}, ((4, 5, 3), True, (0, 1))),
        ((3, 3, 3, 3), {"photometric": "rgb"}, ((3, 3, 3, 3), True, (1, 2))),
        ((2, 4, 5, 4), {"photometric": "rgb"}, ((2, 4, 5, 3), True, (1, 2))),
        ((2, 4, 5, 2), {"planarconfig": "contig", "extrasamples": (2,)}, ((2, 4, 5), False, (1, 2))),
        ((4, 5, 7), {"planarconfig": "contig"}, ((4, 5, 7), True, (0, 1))),
    ],
)
def test_axes_of_a_tiff(shape, options, expected, tmp_path):
    values = RNG.integers(0, 256, shape).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", values, **({"photometric": "minisblack"} | options))
    assert axes_of(tmp_path / "a.tif") == expected
    found = read(tmp_path / "a.tif")
    write(tmp_path / "b.tif", found)
    assert axes_of(tmp_path / "b.tif") == expected
    assert_same(found, read(tmp_path / "b.tif"))


def test_more_axes_than_pages_are_refused(tmp_path):
    stack = np.zeros((3, 2, 16, 16), np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", stack, imagej=True, metadata={"axes": "ZCYX"})
    tifffile.imwrite(tmp_path / "b.tif", stack, photometric="minisblack")
    tifffile.imwrite(tmp_path / "c.tif", stack[0], photometric="minisblack", metadata={"axes": "YXQ"})
    for name, axes in (("a.tif", "ZCYX"), ("b.tif", "QQYX"), ("c.tif", "YXQ")):
        with pytest.raises(FileError, match=f"has the axes {axes} of shape .*, expected one picture or pages"):
            read(tmp_path / name)


def written_png(path, depth, colour, rows, transparent):
    """Of rows that are packed already, with a tRNS chunk."""
    width = 8 * len(rows[0]) // (depth * {0: 1, 2: 3}[colour])
    start = chunk(b"IHDR", struct.pack(">2I5B", width, len(rows), depth, colour, 0, 0, 0)) + chunk(b"tRNS", transparent)
    packed = b"".join(b"\0" + row for row in rows)
    path.write_bytes(images.SIGNATURE + start + chunk(b"IDAT", zlib.compress(packed)) + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("depth", "colour", "row", "transparent", "values", "alpha"),
    [
        (1, 0, b"\xa0", b"\0\1", [255, 0, 255, 0, 0, 0, 0, 0], [0, 255, 0, 255, 255, 255, 255, 255]),
        (2, 0, b"\x1b", b"\0\2", [0, 85, 170, 255], [255, 255, 0, 255]),
        (4, 0, b"\x1b", b"\0\x0b", [17, 187], [255, 0]),
        (8, 0, b"\x1b\xff", b"\0\x1b", [27, 255], [0, 255]),
        (8, 2, b"\1\2\3\1\2\4", b"\0\1\0\2\0\3", [[1, 2, 3], [1, 2, 4]], [0, 255]),
        (16, 0, b"\1\2\1\3", b"\1\3", [258, 259], [65535, 0]),
        (16, 2, b"\1\2\1\3\1\4\1\2\1\3\1\5", b"\1\2\1\3\1\4", [[258, 259, 260], [258, 259, 261]], [0, 65535]),
    ],
)
def test_one_transparent_value_becomes_alpha(depth, colour, row, transparent, values, alpha, tmp_path):
    written_png(tmp_path / "a.png", depth, colour, [row, row], transparent)
    found = read(tmp_path / "a.png")
    np.testing.assert_array_equal(found.parts[""].values, [values, values])
    np.testing.assert_array_equal(found.extra.alpha[..., 0], [alpha, alpha])
    write(tmp_path / "b.png", found)
    assert_same(found, read(tmp_path / "b.png"))
    written_png(tmp_path / "a.png", depth, colour, [row, row], b"\0")
    with pytest.raises(FileError, match="is damaged: 1 bytes say what is transparent"):
        read(tmp_path / "a.png")


def tiff_with(path, values, extras, photometric="rgb", **options):
    tifffile.imwrite(path, values, photometric=photometric, extrasamples=extras, planarconfig="contig", **options)


@pytest.mark.parametrize("kind", [1, 2])
def test_alpha_of_a_tiff_stays_of_its_kind(kind, tmp_path):
    tiff_with(tmp_path / "a.tif", RNG.integers(0, 256, (4, 5, 4)).astype(np.uint8), [kind])
    found = read(tmp_path / "a.tif")
    assert found.extra.alpha.shape == (4, 5, 1)
    write(tmp_path / "b.tif", found)
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert file.pages[0].extrasamples == (kind,)
    if kind == 1:
        with pytest.raises(FileError, match="PNG has no colours multiplied by alpha, and this has them"):
            write(tmp_path / "b.png", dataclasses.replace(found, format="png"))


def test_channels_of_a_tiff_that_are_not_alpha_are_data(tmp_path):
    for photometric, extras, shape in (
        ("minisblack", [0] * 4, (40, 48, 5)),
        ("rgb", [0], (40, 48, 4)),
        ("minisblack", [0, 2], (40, 48, 2)),
        ("rgb", [0, 2, 1], (40, 48, 4)),
    ):
        own = 3 if photometric == "rgb" else 1
        values = RNG.integers(0, 65536, (40, 48, own + len(extras))).astype(np.uint16)
        tiff_with(tmp_path / "a.tif", values, extras, photometric)
        found = read(tmp_path / "a.tif")
        np.testing.assert_array_equal(found.parts[""].values, values[..., : shape[-1]])
        assert found.parts[""].channels
        write(tmp_path / "b.tif", found)
        np.testing.assert_array_equal(tifffile.imread(tmp_path / "b.tif"), values)
        with tifffile.TiffFile(tmp_path / "b.tif") as file:
            assert list(file.pages[0].extrasamples) == extras
        with pytest.raises(FileError, match=f"PNG cannot hold {shape[-1]} channels that are not RGB"):
            write(tmp_path / "b.png", dataclasses.replace(found, format="png"))
    tiff_with(tmp_path / "a.tif", values[..., :5], [2, 0])
    with pytest.raises(FileError, match="has an alpha channel before others"):
        read(tmp_path / "a.tif")
    tiff_with(tmp_path / "a.tif", values[..., :5], [2, 2])
    with pytest.raises(FileError, match="PNG has one alpha channel, and this has 2"):
        write(tmp_path / "b.png", dataclasses.replace(read(tmp_path / "a.tif"), format="png"))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_tiff_whose_0_is_white(dtype, tmp_path):
    values = RNG.integers(0, 256, (4, 5)).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="miniswhite")
    found = read(tmp_path / "a.tif")
    np.testing.assert_array_equal(found.parts[""].values, np.iinfo(dtype).max - values)
    write(tmp_path / "b.tif", found)
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert file.pages[0].photometric == 0
        np.testing.assert_array_equal(file.asarray(), values)
    write(tmp_path / "b.png", dataclasses.replace(found, format="png"))
    assert_same(found, read(tmp_path / "b.png"))
    tifffile.imwrite(tmp_path / "a.tif", values.astype(np.float32), photometric="miniswhite")
    with pytest.raises(FileError, match="of float32 whose 0 is white"):
        read(tmp_path / "a.tif")


@pytest.mark.parametrize("unit", [1, 2, 3])
def test_resolution_of_a_tiff(unit, tmp_path):
    values = np.zeros((4, 5), np.uint8)
    tifffile.imwrite(
        tmp_path / "a.tif", values, photometric="minisblack", resolution=((1000, 3), (100, 1)), resolutionunit=unit
    )
    found = read(tmp_path / "a.tif")
    inch = {1: None, 2: (1000 / 3, 100), 3: (2540 / 3, 254)}[unit]
    assert found.extra.dpi == (inch and pytest.approx(inch))
    write(tmp_path / "b.tif", found)
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert [file.pages[0].tags[tag].value for tag in (282, 283, 296)] == [(1000, 3), (100, 1), unit]
    write(tmp_path / "b.png", dataclasses.replace(found, format="png"))
    assert read(tmp_path / "b.png").extra.dpi == (inch and pytest.approx(inch, rel=1e-3))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_of_a_compressed_tiff_are_as_stored(orientation, tmp_path):
    values = RNG.integers(0, 256, (4, 6, 3)).astype(np.uint8)
    info = {274: orientation, 282: 100.0, 283: 50.0, 296: 3}
    Image.fromarray(values).save(tmp_path / "a.tif", compression="tiff_lzw", tiffinfo=info)
    found = read(tmp_path / "a.tif")
    np.testing.assert_array_equal(found.parts[""].values, values)
    assert found.extra.orientation == orientation
    write(tmp_path / "b.tif", found)
    assert_same(found, read(tmp_path / "b.tif"))
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        tags = file.pages[0].tags
        assert tags[274].value == orientation if orientation > 1 else 274 not in tags
        assert [tags[tag].value for tag in (282, 283, 296)] == [(100, 1), (50, 1), 3]


def test_compressed_tiffs_that_pillow_would_change_are_refused(tmp_path):
    for name, values, extras, photometric in (
        ("colour", np.zeros((4, 5, 3), np.uint16), [], "rgb"),  # would have 8 bits
        ("white", np.zeros((4, 5), np.uint16), [], "miniswhite"),  # would not be inverted
        ("premultiplied", np.zeros((4, 5, 4), np.uint8), [1], "rgb"),  # would be divided by alpha
        ("data", np.zeros((4, 5, 4), np.uint8), [0], "rgb"),  # would lose a channel
    ):
        path = tmp_path / f"{name}.tif"
        tifffile.imwrite(path, values, photometric=photometric, extrasamples=extras or None, compression="zlib")
        with tifffile.TiffFile(path, mode="r+") as file:
            file.pages[0].tags[259].overwrite(5)
        with pytest.raises(FileError, match=r"with LZW compression; save it as grey or RGB without that"):
            read(path)


def test_tiff_of_one_bit(tmp_path):
    values = RNG.integers(0, 2, (4, 9)).astype(bool)
    for compression in (None, "group4"):
        Image.fromarray(values).save(tmp_path / "a.tif", compression=compression)
        np.testing.assert_array_equal(read(tmp_path / "a.tif").parts[""].values, 255 * values)


@pytest.mark.parametrize(("depth", "colour"), [(16, 3), (16, 5), (8, 7), (4, 2), (3, 0)])
def test_png_of_no_known_kind(depth, colour, tmp_path):
    header = struct.pack(">2I5B", 4, 4, depth, colour, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(images.SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    with pytest.raises(FileError, match=f"there is no PNG of colour type {colour} with {depth} bits"):
        read(path)
    path.write_bytes(images.SIGNATURE + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    with pytest.raises(FileError, match="is damaged: it has no header"):
        read(path)
