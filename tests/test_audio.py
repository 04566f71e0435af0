"""Sounds and arrays: what is read is what was written, of every depth."""

from __future__ import annotations

import dataclasses
import zipfile

import numpy as np
import pytest

from clipaware._media import FileError, read, write

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")

RNG = np.random.default_rng(0)


def sound(frames=3000, channels=2):
    return np.clip(0.5 * RNG.standard_normal((frames, channels)), -1, 1)


@pytest.mark.parametrize(
    ("name", "subtype", "levels"),
    [
        ("a.wav", "PCM_U8", 2**8),
        ("a.wav", "PCM_16", 2**16),
        ("a.wav", "PCM_24", 2**24),
        ("a.wav", "PCM_32", 2**32),
        ("a.wav", "FLOAT", None),
        ("a.wav", "DOUBLE", None),
        ("a.flac", "PCM_S8", 2**8),
        ("a.flac", "PCM_16", 2**16),
        ("a.flac", "PCM_24", 2**24),
    ],
)
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_everything_survives(name, subtype, levels, channels, tmp_path):
    y = sound(channels=channels)
    with soundfile.SoundFile(tmp_path / name, "w", 22050, channels, subtype) as file:
        file.title = "a title"
        file.write(y)
    found = read(tmp_path / name)
    part = found.parts[""]
    assert (found.kind, found.lossy, part.levels) == ("sound", False, levels)
    assert part.values.shape == (3000, channels)
    np.testing.assert_allclose(part.real(), y, atol=2 / levels if levels else 1e-7)
    if levels:
        assert part.real().min() >= -1
        assert part.high == 1 - 2 / levels
    other = tmp_path / f"b.{found.format}"
    write(other, found)
    again = read(other)
    np.testing.assert_array_equal(again.parts[""].values, part.values)
    assert again.extra == found.extra
    info = soundfile.info(other)
    assert (info.samplerate, info.channels, info.subtype) == (22050, channels, subtype)
    np.testing.assert_array_equal(soundfile.read(other)[0], soundfile.read(tmp_path / name)[0])


def test_ogg_is_lossy_but_always_the_same(tmp_path):
    soundfile.write(tmp_path / "a.ogg", sound(70_000), 16000)
    found = read(tmp_path / "a.ogg")
    assert found.lossy
    written = []
    for k in range(2):
        write(tmp_path / f"b{k}.ogg", found)
        written.append((tmp_path / f"b{k}.ogg").read_bytes())
        assert soundfile.info(tmp_path / f"b{k}.ogg").frames == len(found.parts[""].values)  # check sums are right
    assert written[0] == written[1]


def test_floats_carry_no_time(tmp_path):
    soundfile.write(tmp_path / "a.wav", sound(), 8000, "FLOAT")
    raw = (tmp_path / "a.wav").read_bytes()
    at = raw.index(b"PEAK") + 12
    assert raw[at : at + 4] != bytes(4)  # else there is nothing to be tested
    write(tmp_path / "b.wav", read(tmp_path / "a.wav"))
    assert (tmp_path / "b.wav").read_bytes() == raw[:at] + bytes(4) + raw[at + 4 :]


def test_bad_sounds(tmp_path):
    soundfile.write(tmp_path / "good.wav", sound(), 8000)
    soundfile.write(tmp_path / "silent.wav", np.zeros((0, 1)), 8000)
    soundfile.write(tmp_path / "really.flac", sound(), 8000)
    (tmp_path / "really.flac").rename(tmp_path / "flac.wav")
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "cut.flac", sound(60_000), 8000)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "cut.flac").read_bytes()[:20_000])
    for name, what in {
        "silent.wav": "has no samples",
        "flac.wav": "is a FLAC file, and its name says WAV",
        "empty.wav": "the file is empty",
        "text.wav": "is no WAV file, though its name says so",
        "cut.flac": "cut off|cannot be read",
        "none.wav": "there is no such file",
    }.items():
        with pytest.raises(FileError, match=what) as raised:
            read(tmp_path / name)
        assert name in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(FileError, match="6,000 elements, more than the limit of 5,999"):
        read(tmp_path / "good.wav", 5999)
    floats = read(tmp_path / "good.wav")
    floats = dataclasses.replace(floats, format="flac", extra=dataclasses.replace(floats.extra, subtype="FLOAT"))
    with pytest.raises(FileError, match="FLAC cannot hold samples of FLOAT; choose --format wav"):
        write(tmp_path / "a.flac", floats)
    assert not (tmp_path / "a.flac").exists()


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "uint16", "int16", ">f4"])
def test_arrays(dtype, tmp_path):
    a = (50 * RNG.random((4, 5))).astype(dtype)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "f.npy", np.asfortranarray(a))
    np.savez_compressed(tmp_path / "a.npz", one=a, two=a[0])
    for name in ("a", "f"):
        np.testing.assert_array_equal(read(tmp_path / f"{name}.npy").parts[""].values, a)
    found = read(tmp_path / "a.npz")
    assert list(found.parts) == ["one", "two"]
    write(tmp_path / "b.npz", found)
    write(tmp_path / "b.npy", read(tmp_path / "a.npy"))
    assert (tmp_path / "b.npy").read_bytes() == (tmp_path / "a.npy").read_bytes()
    with np.load(tmp_path / "b.npz") as again:
        np.testing.assert_array_equal(again["one"], a)
        np.testing.assert_array_equal(again["two"], a[0])
    first = (tmp_path / "b.npz").read_bytes()
    write(tmp_path / "b.npz", found)
    assert (tmp_path / "b.npz").read_bytes() == first


def test_bad_arrays(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "whole.npy", np.arange(5))
    np.save(tmp_path / "nothing.npy", np.zeros((0, 3)))
    np.save(tmp_path / "cut.npy", np.zeros(1000))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:500])
    np.save(tmp_path / "huge.npy", np.zeros(3))
    raw = (tmp_path / "huge.npy").read_bytes()
    (tmp_path / "huge.npy").write_bytes(raw.replace(b"(3,), }" + 9 * b" ", b"(3000000000,), }"))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "text.npz").write_text("no arrays")
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as archive:
        archive.writestr("readme", "hello")
    for name, what in {
        "objects.npy": "holds Python objects",
        "whole.npy": "has dtype int64, expected float16",
        "nothing.npy": "has no elements",
        "cut.npy": r"is cut off: 372 bytes for an array of shape \(1000,\)",
        "huge.npy": "3,000,000,000 elements, more than the limit",
        "text.npy": "cannot be read as NPY",
        "text.npz": "cannot be read as NPZ",
        "odd.npz": "cannot be read as NPZ",
    }.items():
        with pytest.raises(FileError, match=what) as raised:
            read(tmp_path / name)
        assert name in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_a_sound_that_is_cut_off(tmp_path, subtype):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.sin(np.arange(1000) / 9), 8000, subtype)
    whole = path.read_bytes()
    read(path)
    path.write_bytes(whole[: len(whole) * 3 // 5])
    with pytest.raises(FileError, match="is cut off"):
        read(path)


def test_eight_bits_in_flac_and_wav(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, np.sin(np.arange(1000) / 9), 8000, "PCM_S8")
    content = read(path)
    write(tmp_path / "a.wav", dataclasses.replace(content, format="wav"))
    np.testing.assert_array_equal(read(tmp_path / "a.wav").parts[""].values, content.parts[""].values)
