"""The command line, run in this process except where the modules that it imports are the question."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="Typer and others of the extra cli are not installed")
import soundfile
import tifffile
from PIL import Image

import clipaware as ca
from clipaware import cli, noise
from clipaware._cli import demo as demo_module
from clipaware._cli import env as env_module
from clipaware._cli import show, work
from clipaware._media import read
from tiers import in_test_all

FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy", "dask", "numba", "ml_dtypes", "foolbox", "matplotlib", "PIL")
COMMANDS = ("perturb", "replay", "measure", "sweep", "explore", "env", "demo")
RNG = np.random.default_rng(0)


def run(*argv, code=0):
    """What a command prints to either stream, after checking its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = cli.main([str(a) for a in argv])
    assert found == code, (found, out.getvalue(), err.getvalue())
    assert "Traceback" not in err.getvalue()
    return out.getvalue(), err.getvalue()


def fails(*argv, code=2):
    """The one line that a command says to its standard error."""
    _, err = run(*argv, code=code)
    assert err.startswith("clipaware: error: ")
    assert err.count("\n") == 1
    return err


def manifest(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in, with a picture, a sound and an array."""
    monkeypatch.chdir(tmp_path)
    smooth = np.clip(128 + 90 * np.cumsum(RNG.standard_normal((40, 30, 3)), axis=0) / 8, 0, 255)
    Image.fromarray(smooth.astype(np.uint8)).save("photo.png")
    t = np.arange(8000) / 8000
    speech = 0.9 * np.sin(2 * np.pi * 200 * t) * np.sin(2 * np.pi * 3 * t)
    soundfile.write("speech.wav", np.stack([speech, speech[::-1]], axis=1), 8000, "PCM_16")
    np.save("array.npy", RNG.random((20, 20)).astype(np.float32))
    return tmp_path


def apart(a, b):
    return (read(Path(b)).parts[""].real() - read(Path(a)).parts[""].real()).ravel()


# --- perturb ----------------------------------------------------------------------------------------------------------


def test_norm_is_exact_as_saved(here):
    out, err = run("perturb", "photo.png", "--out", "o", "--eps", "3", "--noise", "gaussian")
    assert err == ""
    delivered = np.linalg.norm(apart("photo.png", "o/photo_eps3.png"))
    assert delivered == pytest.approx(3, rel=1e-3)
    (row,) = manifest("o/manifest.csv")
    assert float(row["delivered"]) == pytest.approx(delivered, rel=1e-12)
    assert float(row["naive"]) != float(row["delivered"])
    assert (row["input"], row["output"]) == ("../photo.png", "photo_eps3.png")
    assert (row["norm"], row["reachable"], row["version"], row["noise"]) == ("2.0", "True", ca.__version__, "gaussian")
    for name in ("seed", "asked", "clipped", "eta", "reach", "input_sha256", "output_sha256"):
        assert row[name]
    header, line, total = out.splitlines()
    assert header.split() == ["asked", "naive", "delivered", "error", "clipped", "reach", "file"]
    assert line.split()[0] == "3"
    assert line.split()[-1] == "photo_eps3.png"
    assert "1 of 1 outputs" in total


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_8_bits_of_224(kind, tmp_path):
    """The bar of the command line: under 1e-4 at eps 3."""
    values = np.clip(RNG.normal(128, 60, (224, 224, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    run("perturb", tmp_path / "a.png", "--out", tmp_path / "o", "--eps", "3", "--noise", kind)
    assert np.linalg.norm(apart(tmp_path / "a.png", tmp_path / "o/a_eps3.png")) == pytest.approx(3, rel=1e-4 / 3)


@pytest.mark.parametrize("kind", noise.KINDS)
def test_every_noise(kind, here):
    run("perturb", "photo.png", "speech.wav", "array.npy", "--out", "o", "--rms", "0.05", "--noise", kind)
    for name in ("photo.png", "speech.wav", "array.npy"):
        stem, suffix = name.split(".")
        moved = apart(name, f"o/{stem}_rms0.05.{suffix}")
        assert np.sqrt(np.mean(moved**2)) == pytest.approx(0.05, rel=1e-3)


def test_every_format(here):
    values = np.asarray(Image.open("photo.png"))
    deep = values.astype(np.uint16) * 257
    alpha = np.dstack([values, RNG.integers(0, 256, values.shape[:2])]).astype(np.uint8)
    os.mkdir("in")
    Image.fromarray(alpha).save("in/rgba.png")
    Image.fromarray(values).save("in/a.bmp")
    Image.fromarray(values).save("in/a.webp", lossless=True)
    tifffile.imwrite("in/a8.tif", values, photometric="rgb")
    tifffile.imwrite("in/a16.tif", deep, photometric="rgb")
    tifffile.imwrite("in/float.tif", (values / 255).astype(np.float32), photometric="rgb")
    os.makedirs("in/below/it")
    shutil.copy("photo.png", "in/below/it/deep.png")
    y = soundfile.read("speech.wav")[0]
    soundfile.write("in/s24.wav", y, 8000, "PCM_24")
    soundfile.write("in/float.wav", y, 8000, "FLOAT")
    soundfile.write("in/s.flac", y, 8000, "PCM_16")
    np.save("in/bytes.npy", values)
    np.savez("in/two.npz", one=RNG.random((9, 9)), two=RNG.random((3, 3)))
    (Path("in") / "notes.txt").write_text("not for us")
    run("perturb", "in", "--out", "o", "--rms", "0.02", "--grayscale-noise")
    rows = manifest("o/manifest.csv")
    assert [row["part"] for row in rows if row["input"].endswith("two.npz")] == ["one", "two"]
    assert len(rows) == 13
    for row in rows:
        tolerance = 3e-7 if "float" in row["input"] else 2e-3 if row["part"] else 2e-4
        assert float(row["delivered"]) == pytest.approx(float(row["asked"]), rel=tolerance)
    assert "below/it/deep_rms0.02.png" in files("o")
    np.testing.assert_array_equal(np.asarray(Image.open("o/rgba_rms0.02.png"))[..., 3], alpha[..., 3])
    assert soundfile.info("o/s24_rms0.02.wav").subtype == "PCM_24"
    # 16 bits, and floats, are as exact as they can be.
    deviations = {row["input"]: abs(float(row["delivered"]) / float(row["asked"]) - 1) for row in rows}
    assert deviations["../in/a16.tif"] < 1e-6
    assert deviations["../in/s24.wav"] < 1e-9
    assert deviations["../in/float.tif"] < 3e-7


def test_16_bit_png(here):
    values = np.asarray(Image.open("photo.png")).astype(np.uint16) * 257
    tifffile.imwrite("a.tif", values, photometric="rgb")
    run("perturb", "a.tif", "--out", "o", "--eps", "1", "--format", "png")
    assert np.linalg.norm(apart("a.tif", "o/a_eps1.png")) == pytest.approx(1, rel=1e-6)
    run("perturb", "o/a_eps1.png", "--out", "p", "--eps", "2")
    assert np.linalg.norm(apart("o/a_eps1.png", "p/a_eps1_eps2.png")) == pytest.approx(2, rel=1e-6)


def test_snr_of_clipping_speech(here):
    """The bar: 16 bits, 0 dB, much of it clipped, within 0.001 dB."""
    run("perturb", "speech.wav", "--out", "o", "--snr", "0,6,-3.5")
    x = read(Path("speech.wav")).parts[""].real()
    for snr in ("0", "6", "-3.5"):
        moved = apart("speech.wav", f"o/speech_snr{snr}.wav")
        assert 10 * np.log10(np.sum(x**2) / np.sum(moved**2)) == pytest.approx(float(snr), abs=1e-3)
    rows = manifest("o/manifest.csv")
    assert float(rows[0]["clipped"]) > 0.05
    assert float(rows[0]["naive"]) < 0.98 * float(rows[0]["asked"])


def test_psnr_and_contrast(here):
    run("perturb", "photo.png", "--out", "o", "--psnr", "30", "--contrast", "0.2")
    x = read(Path("photo.png")).parts[""].real()
    mse = np.mean(apart("photo.png", "o/photo_psnr30.png") ** 2)
    assert 10 * np.log10(1 / mse) == pytest.approx(30, abs=1e-3)
    assert np.sqrt(np.mean(apart("photo.png", "o/photo_contrast0.2.png") ** 2)) / x.mean() == pytest.approx(
        0.2, rel=1e-4
    )


@pytest.mark.parametrize(("p", "eps"), [("1", 60.0), ("1.5", 10.0), ("3", 1.0), ("inf", 20 / 255)])
def test_norms(p, eps, here):
    run("perturb", "photo.png", "--out", "o", "--eps", repr(eps), "--norm", p)
    (path,) = Path("o").glob("*.png")
    assert np.linalg.norm(apart("photo.png", path), float(p)) == pytest.approx(eps, rel=1e-3)


def test_bounds(here):
    run("perturb", "array.npy", "--out", "o", "--eps", "3", "--bounds", "-0.5", "1.5")
    made = np.load("o/array_eps3.npy")
    assert made.min() < 0
    assert made.max() <= 1.5
    values = np.clip(np.asarray(Image.open("photo.png")), 60, 200)
    Image.fromarray(values).save("mid.png")
    run("perturb", "mid.png", "--out", "p", "--eps", "20", "--bounds", "0.23", "0.79", "--unreachable", "maximize")
    made = np.asarray(Image.open("p/mid_eps20.png"))
    assert (made.min(), made.max()) == (59, 201)
    err = fails("perturb", "photo.png", "--out", "q", "--eps", "3", "--bounds", "0.3", "0.4", code=1)
    assert "outside the bounds (0.3, 0.4); choose others with --bounds" in err
    assert "lower one first" in fails("perturb", "photo.png", "--out", "q", "--eps", "3", "--bounds", "1", "0")


def test_grayscale_noise(here):
    run("perturb", "photo.png", "--out", "o", "--eps", "1", "--grayscale-noise", "--bounds", "-0", "1")
    moved = np.sign(apart("photo.png", "o/photo_eps1.png")).reshape(-1, 3)
    assert (moved.max(axis=1) - moved.min(axis=1) <= 1).all()  # never against one another
    run("perturb", "photo.png", "--out", "p", "--eps", "1")
    moved = np.sign(apart("photo.png", "p/photo_eps1.png")).reshape(-1, 3)
    assert (moved.max(axis=1) - moved.min(axis=1) == 2).any()


def test_delta(here):
    np.save("d.npy", RNG.standard_normal((40, 30, 3)))
    run("perturb", "photo.png", "--out", "o", "--eps", "2", "--delta", "d.npy")
    moved = apart("photo.png", "o/photo_eps2.png")
    assert np.linalg.norm(moved) == pytest.approx(2, rel=1e-3)
    assert (np.sign(moved) * np.sign(np.load("d.npy").ravel()) >= 0).all()
    soundfile.write("babble.wav", RNG.uniform(-0.3, 0.3, (8000, 1)), 8000)
    run("perturb", "speech.wav", "--out", "p", "--snr", "3", "--delta", "babble.wav")
    assert manifest("p/manifest.csv")[0]["noise"] == "../babble.wav"
    run("replay", "p/manifest.csv")
    np.save("small.npy", np.ones((4, 4)))
    err = fails("perturb", "photo.png", "--out", "q", "--eps", "2", "--delta", "small.npy", code=1)
    assert "photo.png: --delta small.npy has shape (4, 4, 1), expected (40, 30, 3)" in err
    assert "has no values below 0" in fails(
        "perturb", "photo.png", "--out", "q", "--eps", "2", "--delta", "photo.png", code=1
    )
    np.save("nan.npy", np.full((40, 30, 3), np.nan))
    assert "NaN or infinite" in fails("perturb", "photo.png", "--out", "q", "--eps", "2", "--delta", "nan.npy", code=1)
    assert not Path("q").exists()


def test_seeds_and_repeats(here):
    run("perturb", "photo.png", "--out", "o", "--eps", "2,4", "--repeats", "2", "--seed", "5")
    assert files("o") == ["manifest.csv", *(f"photo_eps{e}_{r}.png" for e in (2, 4) for r in (0, 1))]
    assert len({row["seed"] for row in manifest("o/manifest.csv")}) == 4
    assert len({Path("o", f).read_bytes() for f in files("o")}) == 5
    run(
        "perturb", "photo.png", "--out", "p", "--eps", "4", "--repeats", "2", "--seed", "5"
    )  # others were not asked for
    for r in (0, 1):
        assert Path(f"o/photo_eps4_{r}.png").read_bytes() == Path(f"p/photo_eps4_{r}.png").read_bytes()
    run("perturb", "photo.png", "--out", "q", "--eps", "2", "--repeats", "2", "--seed", "6")
    assert Path("o/photo_eps2_0.png").read_bytes() != Path("q/photo_eps2_0.png").read_bytes()


@pytest.fixture
def many(here):
    os.mkdir("in")
    for k in range(9):
        Image.fromarray(RNG.integers(0, 256, (16, 16, 3)).astype(np.uint8)).save(f"in/{k}.png")
    return here


def test_jobs_do_not_matter(many):
    run("perturb", "in", "--out", "one", "--eps", "1", "--jobs", "1")
    run("perturb", "in", "--out", "four", "--eps", "1", "--jobs", "4")
    assert files("one") == files("four")
    for name in files("one"):
        assert Path("one", name).read_bytes() == Path("four", name).read_bytes()


def test_resume(many, monkeypatch):
    run("perturb", "in", "--out", "whole", "--eps", "1")
    original, calls = work.write, []

    def interrupted(path, *args):
        calls.append(path)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(path, *args)

    monkeypatch.setattr(work, "write", interrupted)
    out, err = run("perturb", "in", "--out", "o", "--eps", "1", "--jobs", "1", code=130)
    assert "interrupted" in err
    assert len(files("o")) == 5  # four, and the manifest
    with open("o/manifest.csv", "a") as file:
        file.write("../in/4.png,4_eps1.p")  # as if the lights had gone out
    calls.clear()
    monkeypatch.setattr(work, "write", lambda path, *args: (calls.append(path), original(path, *args)))
    out, _ = run("perturb", "in", "--out", "o", "--eps", "1", "--resume")
    assert len(calls) == 5
    assert "9 of 9 outputs in o, 4 kept from before" in out
    assert files("o") == files("whole")
    for name in files("o"):
        assert Path("o", name).read_bytes() == Path("whole", name).read_bytes()
    # What is missing is made again; with other options nothing is.
    os.remove("o/3_eps1.png")
    calls.clear()
    run("perturb", "in", "--out", "o", "--eps", "1", "--resume")
    assert ["3_eps1" in path.name for path in calls] == [True]
    assert Path("o/3_eps1.png").read_bytes() == Path("whole/3_eps1.png").read_bytes()
    err = fails("perturb", "in", "--out", "o", "--eps", "1", "--resume", "--noise", "pink")
    assert "was made with noise gaussian for 0_eps1.png, now it is pink" in err


def test_interrupted_from_outside(many):
    """A real signal to a real process."""
    argv = [sys.executable, "-m", "clipaware.cli", "perturb", "in", "--out", "o", "--eps", "1", "--repeats", "400"]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Shells have what they start in the background ignore it, and so would this then.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not Path("o/manifest.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.startswith("clipaware: interrupted")
    assert "Traceback" not in err
    left = [name for name in files("o") if name.endswith(".part")]
    assert left == []
    for name in files("o"):
        if name.endswith(".png"):
            assert read(Path("o", name))  # whole


def test_nothing_is_written_over(many):
    run("perturb", "in", "--out", "o", "--eps", "1")
    before = {name: Path("o", name).read_bytes() for name in files("o")}
    assert "manifest.csv exists; choose --resume, --overwrite or another --out" in fails(
        "perturb", "in", "--out", "o", "--eps", "1", "--seed", "1"
    )
    os.remove("o/manifest.csv")
    assert "0_eps1.png and 8 more exist(s) already" in fails("perturb", "in", "--out", "o", "--eps", "1", "--seed", "1")
    assert Path("o/0_eps1.png").read_bytes() == before["0_eps1.png"]
    run("perturb", "in", "--out", "o", "--eps", "1", "--seed", "1", "--overwrite")
    assert Path("o/0_eps1.png").read_bytes() != before["0_eps1.png"]
    assert "choose one" in fails("perturb", "in", "--out", "o", "--eps", "1", "--resume", "--overwrite")
    # Inputs least of all.
    shutil.copy("in/0.png", "in/x.png")
    shutil.copy("in/0.png", "in/x_eps1.png")
    inputs = {name: Path("in", name).read_bytes() for name in files("in")}
    assert "in/x_eps1.png is an input and would be written over" in fails(
        "perturb", "in/x.png", "in/x_eps1.png", "--out", "in", "--eps", "1", "--overwrite"
    )
    assert "--out is in, which is a folder of inputs, too" in fails("perturb", "in", "--out", "in", "--eps", "1")
    assert {name: Path("in", name).read_bytes() for name in files("in")} == inputs


def test_outputs_inside_the_inputs_are_no_inputs(many):
    run("perturb", "in", "--out", "in/noisy", "--eps", "1")
    run("perturb", "in", "--out", "in/noisy", "--eps", "1", "--overwrite")
    assert len(files("in/noisy")) == 10


def test_two_inputs_for_one_output(here):
    shutil.copy("photo.png", "photo.bmp")
    Image.open("photo.png").save("photo.bmp")
    assert "photo.png and photo.bmp would both be written to" in fails(
        "perturb", "photo.png", "photo.bmp", "--out", "o", "--eps", "1", "--format", "tiff"
    )


def test_lossy_formats(here):
    Image.open("photo.png").save("photo.jpg", quality=95)
    err = fails("perturb", "photo.jpg", "--out", "o", "--eps", "3", code=1)
    assert "photo.jpg: JPEG is lossy and would not keep the norm; choose --format png, or --allow-lossy" in err
    assert files("o") == [] if Path("o").exists() else True
    run("perturb", "photo.jpg", "--out", "o", "--eps", "3", "--format", "png")
    assert np.linalg.norm(apart("photo.jpg", "o/photo_eps3.png")) == pytest.approx(3, rel=1e-3)
    run("perturb", "photo.jpg", "--out", "p", "--eps", "3", "--allow-lossy")
    held = np.linalg.norm(apart("photo.jpg", "p/photo_eps3.jpg"))
    assert float(manifest("p/manifest.csv")[0]["delivered"]) == pytest.approx(held)
    assert abs(held - 3) > 1e-3
    run("replay", "p/manifest.csv")
    soundfile.write("s.ogg", soundfile.read("speech.wav")[0], 8000)
    assert "choose --format wav" in fails("perturb", "s.ogg", "--out", "q", "--snr", "3", code=1)
    run("perturb", "s.ogg", "--out", "q", "--snr", "3", "--format", "wav")
    assert soundfile.info("q/s_snr3.wav").subtype == "FLOAT"
    run("perturb", "s.ogg", "--out", "r", "--snr", "3", "--allow-lossy")
    run("replay", "r/manifest.csv")


def test_formats_that_do_not_go_together(here):
    assert "is a sound, which cannot be written as png, but as wav flac ogg" in fails(
        "perturb", "speech.wav", "--out", "o", "--eps", "1", "--format", "png", code=1
    )
    assert "is an array, which cannot be written as png, but as npy" in fails(
        "perturb", "array.npy", "--out", "o", "--eps", "1", "--format", "png", code=1
    )


def test_out_of_reach(here):
    err = fails("perturb", "photo.png", "--out", "o", "--eps", "1000", code=1)
    assert re.search(r"photo\.png: eps 1000 asks for a norm of 1000, more than this noise can have \(\d+\.\d+\)", err)
    assert not Path("o").exists()
    _, err = run("perturb", "photo.png", "--out", "o", "--eps", "1,1000", "--unreachable", "skip")
    assert files("o") == ["manifest.csv", "photo_eps1.png"]
    assert err.startswith("clipaware: skipped: photo.png: eps 1000")
    _, err = run("perturb", "photo.png", "--out", "p", "--eps", "1000", "--unreachable", "maximize")
    assert set(np.asarray(Image.open("p/photo_eps1000.png")).ravel()) == {0, 255}
    assert "all there is room for" in err
    (row,) = manifest("p/manifest.csv")
    assert row["reachable"] == "False"
    assert float(row["delivered"]) == pytest.approx(float(row["reach"]))
    run("replay", "p/manifest.csv")


def test_bad_files_one_line_each_and_the_rest_goes_on(here):
    os.mkdir("in")
    shutil.copy("photo.png", "in/fine.png")
    good = Path("photo.png").read_bytes()
    Path("in/empty.png").touch()
    Path("in/cut.png").write_bytes(good[: len(good) // 2])
    Path("in/text.png").write_text("no picture")
    Path("notes.txt").write_text("no picture either")
    Image.open("photo.png").save("in/wrong.png", format="BMP")
    soundfile.write("in/silent.wav", np.zeros((0, 1)), 8000)
    np.save("in/nan.npy", np.array([0.5, np.nan]))
    np.save("in/outside.npy", np.array([0.5, 3.0]))
    np.save("in/strings.npy", np.array(["a"]))
    black = np.zeros((5, 5), np.uint8)
    Image.fromarray(black).save("in/black.png")
    _, err = run("perturb", "in", "gone.png", "notes.txt", "--out", "o", "--contrast", "0.01", code=1)
    lines = err.splitlines()
    assert all(line.startswith("clipaware: error: ") for line in lines)
    for name, what in {
        "in/empty.png": "the file is empty",
        "in/cut.png": "",
        "in/text.png": "",
        "in/wrong.png": "is a BMP file",
        "in/silent.wav": "has no samples",
        "in/nan.npy": "NaN",
        "in/outside.npy": "outside its bounds",
        "in/strings.npy": "has dtype",
        "in/black.png": "all of it is black",
        "gone.png": "there is no such file",
        "notes.txt": "ends in '.txt'",
    }.items():
        (line,) = (line for line in lines if f" {name}: " in line)
        assert what in line
    assert len(lines) == 11
    assert files("o") == ["fine_contrast0.01.png", "manifest.csv"]


def test_sizes_without_commas(here):
    err = fails("perturb", "photo.png", "--out", "o", "--eps", "3", "20", code=2)
    assert "20: there is no such file; several sizes have commas between them, as in --eps 3,20" in err
    assert not Path("o").exists()


def test_bombs(here):
    err = fails("perturb", "photo.png", "--out", "o", "--eps", "1", "--max-elements", "3599", code=1)
    assert "photo.png: says that it has 3,600 elements, more than the limit of 3,599 (--max-elements)" in err
    assert not Path("o").exists()


def test_an_empty_folder(here):
    os.mkdir("nothing")
    assert "nothing: has no files that end in .png" in fails("perturb", "nothing", "--out", "o", "--eps", "1", code=1)
    assert not Path("o").exists()


def test_a_folder_that_cannot_be_written(here):
    Path("taken").write_text("mine")
    assert "--out is taken, which is a file" in fails("perturb", "photo.png", "--out", "taken", "--eps", "1")
    assert "the folder cannot be made" in fails("perturb", "photo.png", "--out", "taken/below", "--eps", "1", code=1)
    assert Path("taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((), "no size was asked for"),
        (("--eps", "-1"), "--eps is -1, expected a number of 0 or more"),
        (("--eps", "x"), "--eps is 'x', expected numbers such as"),
        (("--eps", "nan"), "--eps is nan"),
        (("--eps", "inf"), "--eps is inf"),
        (("--eps", "1", "--norm", "0.5"), "--norm is 0.5, expected a number of 1 or more"),
        (("--snr", "3", "--norm", "1"), "--snr is a size in the L2 norm, and --norm is 1"),
        (("--eps", "1", "--noise", "brown"), "--noise is 'brown', expected one of gaussian"),
        (("--eps", "1", "--unreachable", "cry"), "--unreachable is 'cry', expected one of maximize, skip, fail"),
        (("--eps", "1", "--format", "gif"), "--format is 'gif'"),
        (("--eps", "1", "--repeats", "0"), "--repeats is 0"),
        (("--eps", "1", "--jobs", "0"), "--jobs is 0"),
        (("--eps", "1", "--seed", "-1"), "--seed is -1"),
        (("--eps", "1", "--compression", "10"), "--compression is 10"),
        (("--eps", "1", "--manifest", "xml"), "--manifest is 'xml'"),
        (("--eps", "1", "--wat"), "No such option: --wat"),
        (("--eps", "1", "--seed", "x"), "--seed"),
    ],
)
def test_bad_options(options, what, here):
    assert what in fails("perturb", "photo.png", "--out", "o", *options)
    assert not Path("o").exists()


def test_missing_arguments(here):
    assert "--out" in fails("perturb", "photo.png", "--eps", "1")
    assert "Missing argument" in fails("perturb", "--out", "o", "--eps", "1")
    assert "No such command 'perturbed'" in fails("perturbed")


def test_json(here):
    out, _ = run("perturb", "photo.png", "array.npy", "--out", "o", "--eps", "1,2", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["asked"] for row in rows] == [1, 2, 1, 2]
    assert rows[0]["output"] == str(Path("o/photo_eps1.png"))
    assert rows[0]["delivered"] == pytest.approx(1, rel=1e-3)


# --- the manifest and replay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_replay(kind, here):
    np.savez("two.npz", one=RNG.random((9, 9)), two=RNG.random((3, 3)))
    run(
        *("perturb", "photo.png", "speech.wav", "array.npy", "two.npz", "--out", "o", "--rms", "0.01,0.03"),
        *("--repeats", "2", "--noise", "pink", "--manifest", kind, "--bounds", "-1", "1.5", "--norm", "2"),
    )
    path = f"o/manifest.{kind}"
    out, err = run("replay", path)
    assert err == ""
    assert out.count("identical  ") == 16
    before = {name: Path("o", name).read_bytes() for name in files("o")}
    run("replay", path, "--out", "again", "--jobs", "2")
    assert {name: Path("again", name).read_bytes() for name in files("again")} == {
        name: content for name, content in before.items() if "manifest" not in name
    }
    assert "exists" in run("replay", path, "--out", "again", code=1)[1]
    run("replay", path, "--out", "again", "--overwrite")
    # What is missing is made anew; what has changed is told.
    os.remove("o/photo_rms0.01_0.png")
    Path("o/photo_rms0.01_1.png").write_bytes(b"spoilt")
    out, err = run("replay", path, "--json", code=1)
    assert Path("o/photo_rms0.01_0.png").read_bytes() == before["photo_rms0.01_0.png"]
    assert "photo_rms0.01_1.png: is not the file that the manifest tells of any more" in err
    assert sum(json.loads(line)["identical"] for line in out.splitlines()) == 15
    assert not [name for name in os.listdir("o") if name.startswith(".")]
    # The folder as a whole may go elsewhere.
    os.mkdir("moved")
    for name in ("photo.png", "speech.wav", "array.npy", "two.npz", "o"):
        shutil.move(name, f"moved/{name}")
    run("replay", f"moved/{path}", "--out", "third")
    Image.fromarray(np.zeros((40, 30, 3), np.uint8)).save("moved/photo.png")
    assert "photo.png: is not the file that the manifest was made from" in run("replay", f"moved/{path}", code=1)[1]


def test_replay_of_norms_and_gray_noise(here):
    run(
        "perturb", "photo.png", "--out", "o", "--eps", "0.1", "--norm", "inf", "--grayscale-noise", "--compression", "9"
    )
    run("perturb", "photo.png", "--out", "p", "--eps", "0.1", "--norm", "inf", "--manifest", "jsonl")
    for path in ("o/manifest.csv", "p/manifest.jsonl"):
        out, _ = run("replay", path)
        assert out.count("identical") == 1


def test_replay_says_so_if_bytes_differ(here):
    run("perturb", "photo.png", "--out", "o", "--eps", "1")
    (row,) = manifest("o/manifest.csv")
    text = Path("o/manifest.csv").read_text()
    Path("o/manifest.csv").write_text(text.replace(row["output_sha256"], "0" * 64))
    assert (
        "came out different from what the manifest tells of" in run("replay", "o/manifest.csv", "--out", "p", code=1)[1]
    )


def test_bad_manifests(here):
    assert "there is no such file" in fails("replay", "gone.csv")
    assert "expected a manifest that ends in" in fails("replay", "photo.png")
    Path("other.csv").write_text("a,b\n1,2\n")
    assert "other.csv is no manifest of clipaware perturb" in fails("replay", "other.csv")
    Path("other.jsonl").write_text("{}\n[\n")
    assert "other.jsonl is no manifest of clipaware perturb" in fails("replay", "other.jsonl")


def test_replay_says_so_if_the_version_differs(here):
    run("perturb", "photo.png", "--out", "o", "--eps", "1")
    text = Path("o/manifest.csv").read_text()
    Path("o/manifest.csv").write_text(text.replace(f",{ca.__version__}\n", ",0.0.9\n"))
    assert "made by version 0.0.9, and this is" in run("replay", "o/manifest.csv")[1]


# --- measure ----------------------------------------------------------------------------------------------------------


def test_measure(here):
    run("perturb", "photo.png", "--out", "o", "--eps", "3")
    out, _ = run("measure", "photo.png", "o/photo_eps3.png", "--norms", "3")
    found = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[1:])
    found = {name.strip(): float(value) for name, value in found.items()}
    moved, x = apart("photo.png", "o/photo_eps3.png"), read(Path("photo.png")).parts[""].real().ravel()
    for p in (1, 2, 3, np.inf):
        assert found[f"L{p:g}"] == pytest.approx(np.linalg.norm(moved, p), rel=1e-8)
    assert found["RMS"] == pytest.approx(np.sqrt(np.mean(moved**2)), rel=1e-8)
    assert found["SNR (dB)"] == pytest.approx(10 * np.log10(np.sum(x**2) / np.sum(moved**2)), rel=1e-8)
    assert found["PSNR (dB)"] == pytest.approx(-10 * np.log10(np.mean(moved**2)), rel=1e-8)
    v = x + moved
    assert found["clipped"] == pytest.approx(np.mean((v < 1e-9) | (v > 1 - 1e-9)), rel=1e-8)
    out, _ = run("measure", "photo.png", "o/photo_eps3.png", "--json")
    assert json.loads(out)["L2"] == pytest.approx(3, rel=1e-3)
    assert json.loads(run("measure", "photo.png", "photo.png", "--json")[0])["SNR (dB)"] == "inf"


def test_measure_of_what_does_not_match(here):
    assert "array.npy: has shape (20, 20), expected (40, 30, 3) as photo.png has" in fails(
        "measure", "photo.png", "array.npy"
    )
    assert "gone.png: there is no such file" in fails("measure", "photo.png", "gone.png")
    np.savez("two.npz", one=np.ones(3))
    assert "two.npz: holds ['one']" in fails("measure", "array.npy", "two.npz")
    assert "--norms is 0.5" in fails("measure", "photo.png", "photo.png", "--norms", "0.5")


# --- sweep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["photo.png", *in_test_all("speech.wav")])
def test_sweep(name, here):
    out, _ = run("sweep", name, "--out", "s", "--rms", "0.02,0.1", "--norms", "1,2,inf")
    assert files("s") == ["delivered.pdf", "delivered.png", "sweep.csv", "sweep.pdf", "sweep.png"]
    rows = manifest("s/sweep.csv")
    assert [row["norm"] for row in rows] == ["1.0", "1.0", "2.0", "2.0", "inf", "inf"]
    n = read(Path(name)).parts[""].values.size
    for row, rms in zip(rows, [0.02, 0.1] * 3, strict=True):
        assert float(row["asked"]) == pytest.approx(rms * n ** (1 / float(row["norm"])))
        # In the largest norm there are only whole steps.
        assert float(row["delivered"]) == pytest.approx(float(row["asked"]), rel=2e-3 if row["norm"] != "inf" else 0.1)
    assert len({row["seed"] for row in rows}) == 1
    for figure in ("sweep", "delivered"):
        with Image.open(f"s/{figure}.png") as image:
            assert image.width > 400
            assert np.asarray(image.convert("L")).std() > 10
        assert Path(f"s/{figure}.pdf").read_bytes().startswith(b"%PDF")
    assert out.splitlines()[0].split() == ["p", "asked", "naive", "delivered", "clipped", "reach"]
    assert "exists; choose --overwrite" in fails("sweep", name, "--out", "s", "--rms", "0.02")
    before = Path("s/sweep.pdf").read_bytes()
    run("sweep", name, "--out", "s", "--rms", "0.02,0.1", "--norms", "1,2,inf", "--overwrite")
    assert Path("s/sweep.pdf").read_bytes() == before


def test_sweep_by_eps(here):
    out, _ = run("sweep", "photo.png", "--out", "s", "--eps", "2,1000", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[0]["delivered"] == pytest.approx(2, rel=1e-3)
    assert not rows[1]["reachable"]
    assert "is an array, expected a picture or a sound" in fails("sweep", "array.npy", "--out", "t", "--eps", "1")
    assert "no size was asked for" in fails("sweep", "photo.png", "--out", "t")
    assert not Path("t").exists()


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command):
    out, _ = run(command, "--help")
    assert "Usage: clipaware" in out
    assert "\nExamples:\n" in re.sub(r"\n +Examples:", "\nExamples:", out)
    assert f"clipaware {command}" in out
    assert "Exit codes: 0 all done" in " ".join(out.split())


def test_shell_completion(monkeypatch):
    for shell, word in (("bash", "complete"), ("zsh", "compdef"), ("fish", "complete --command")):
        monkeypatch.setattr("shellingham.detect_shell", lambda *_, shell=shell: (shell, shell))
        assert word in run("--show-completion")[0]
    from clipaware._cli.app import complete

    assert complete(*noise.KINDS)("s") == ["salt-and-pepper", "speckle"]


def test_on_a_terminal(here, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["perturb", "photo.png", "array.npy", "--out", "o", "--eps", "1,2"]) == 0
    assert "┃" in out.getvalue()
    assert "photo_eps1.png" in out.getvalue()
    assert "perturbing" in err.getvalue()
    monkeypatch.setattr(show, "MOST_ROWS", 2)
    assert cli.main(["perturb", "photo.png", "array.npy", "--out", "p", "--eps", "1,2"]) == 0
    assert "... and 2 more" in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert cli.main(["measure", "photo.png", "photo.png"]) == 0


def test_without_typer(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert "the command line needs Typer" in fails("env")


def test_version():
    assert run("--version")[0] == f"clipaware {ca.__version__}\n"


def test_no_command_prints_help():
    out, _ = run(code=2)
    for command in COMMANDS:
        assert f"  {command}" in out


# --- demo -------------------------------------------------------------------------------------------------------------


def demo_rows(printed: str) -> list[dict[str, str]]:
    """The table of `clipaware demo`, a dictionary per row."""
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["p", "asked"])
    names = ("p", "asked", "naive", "exact", "naive error", "exact error", "clipped", "reachable")
    rows = []
    for line in lines[start + 1 :]:
        if not line:
            break
        rows.append(dict(zip(names, line.split(), strict=True)))
    return rows


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the demo wrote, and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by it"
    return out, run("demo", "--out", out)[0]


def test_demo_writes_one_png(demo: tuple[Path, str]) -> None:
    out, printed = demo
    assert [path.name for path in out.iterdir()] == ["demo.png"]
    assert str(out / "demo.png") in printed.splitlines()[-1]
    with Image.open(out / "demo.png") as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert image.height > 500
        levels = np.asarray(image.convert("L"))
    assert levels.std() > 30  # a picture, not an empty page


def test_demo_table(demo: tuple[Path, str]) -> None:
    rows = demo_rows(demo[1])
    assert {row["p"] for row in rows} == {"1", "2", "inf"}
    assert len(rows) == sum(map(len, demo_module.SIZES.values()))
    reachable = [row for row in rows if row["reachable"] == "yes"]
    assert len(reachable) == len(rows) - 1
    for row in reachable:
        assert float(row["exact"]) == pytest.approx(float(row["asked"]), rel=1e-5)
        assert float(row["exact error"].rstrip("%")) == pytest.approx(0, abs=1e-3)
    for row in rows:
        asked, naive, exact = (float(row[name]) for name in ("asked", "naive", "exact"))
        # In the largest norm naive scaling loses nothing where the largest noise has room.
        assert naive < exact * (1 - 1e-3) or (row["p"] == "inf" and naive <= exact)
        assert float(row["naive error"].rstrip("%")) == pytest.approx(100 * (naive / asked - 1), abs=1e-3)
    (short,) = (row for row in rows if row["reachable"] == "no")
    assert short["clipped"] == "100.0%"
    assert float(short["exact"]) < float(short["asked"])


def test_demo_table_agrees_with_numpy(demo: tuple[Path, str]) -> None:
    x = demo_module.photograph()
    drawn = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    for row in demo_rows(demo[1]):
        p, asked = float(row["p"]), float(row["asked"])
        wide, direction = x.astype(np.float64).ravel(), drawn.astype(np.float64).ravel()
        naive = np.clip(wide + asked / np.linalg.norm(direction, p) * direction, 0, 1)
        assert float(row["naive"]) == pytest.approx(np.linalg.norm(naive - wide, p), rel=1e-5)
        v = ca.perturb(x, drawn, asked, p=p, axis=None).astype(np.float64).ravel()
        assert float(row["exact"]) == pytest.approx(np.linalg.norm(v - wide, p), rel=1e-5)


def test_photograph_has_bright_and_dark_areas() -> None:
    x = demo_module.photograph()
    assert x.dtype == np.float32
    assert x.shape == (256, 384, 3)
    assert x.min() >= 0
    assert x.max() <= 1
    assert np.mean(x < 0.1) > 0.1
    assert np.mean(x > 0.9) > 0.03


def test_seed_changes_the_noise(demo: tuple[Path, str], tmp_path: Path) -> None:
    first, second = demo_rows(demo[1])[2], demo_rows(run("demo", "--out", tmp_path, "--seed", "1")[0])[2]
    assert first["asked"] == second["asked"]
    assert first["naive"] != second["naive"]


@pytest.mark.parametrize("seed", ["-1", "1.5", "x"])
def test_bad_seed(seed: str, tmp_path: Path) -> None:
    assert "--seed" in fails("demo", "--out", tmp_path, f"--seed={seed}")


def test_out_that_is_a_file(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        assert str(out) in fails("demo", "--out", out)
    assert taken.read_text() == "mine"


def test_figure_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "demo.png").mkdir()
    assert str(tmp_path / "demo.png") in run("demo", "--out", tmp_path, code=2)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


@pytest.mark.parametrize("module", ["matplotlib.figure", "PIL"])
def test_missing_module_is_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "out"
    err = fails("demo", "--out", out)
    assert {"matplotlib.figure": "Matplotlib", "PIL": "Pillow"}[module] in err
    assert "pip install 'clipaware[cli]'" in err
    assert not out.exists()


# --- env --------------------------------------------------------------------------------------------------------------


def test_env_imports_no_framework() -> None:
    code = f"""
import sys
from clipaware.cli import main
code = main(["env"])
print("imported:", *[name for name in {FRAMEWORKS!r} if name in sys.modules])
sys.exit(code)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, imported = ran.stdout.splitlines()
    assert imported == "imported: numba"  # which says whether its kernels work
    shown = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert ["clipaware", ca.__version__] in shown
    assert ["NumPy", np.__version__] in shown
    assert ["matplotlib", importlib.metadata.version("matplotlib")] in shown
    assert {"pillow" if name == "PIL" else name for name in FRAMEWORKS} <= {name for name, _ in shown}
    assert any(name == "NumPy" and "compiled by Numba, on up to" in value for name, value in shown)


@pytest.mark.parametrize("installed", [True, False])
def test_env_says_why_there_are_no_kernels(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("clipaware._kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    if not installed:
        monkeypatch.setattr(env_module, "installed", dict)
    printed, _ = run("env")
    assert "NumPy operations (Numba" in printed
    assert ("does not work here: import of numba" in printed) == installed
    assert ("pip install numba" in printed) != installed


def test_env_names_unusual_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions",
        lambda: {"tensorflow": ["tensorflow-cpu"], "PIL": ["Pillow"], "ml_dtypes": ["ml-dtypes"]},
    )
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"9.{len(name)}")
    printed, _ = run("env")
    lines = [line.split(maxsplit=1) for line in printed.splitlines() if line.startswith("  ")]
    assert ["tensorflow", "9.14 (tensorflow-cpu)"] in lines
    assert ["pillow", "9.6"] in lines
    assert ["ml_dtypes", "9.9"] in lines
    assert ["torch", "not installed"] in lines
    assert ["PyTorch", "tensors, CPU   none (torch is not installed)"] in lines
    assert json.loads(run("env", "--json")[0])["versions"]["tensorflow"] == "9.14 (tensorflow-cpu)"


# --- what must not go wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_bytes_do_not_depend_on_how_many_work(here, jobs):
    """Sums of several threads' are rounded otherwise, which floats keep."""
    np.save("f8.npy", np.random.default_rng(0).random((1200, 1000)))
    run("perturb", "f8.npy", "--eps", "300", "--out", "o", "--jobs", str(jobs))
    for options in ([], ["--jobs", "1"]):
        out, _ = run("replay", "o/manifest.csv", *options)
        assert out.count("identical") == 1


def test_the_manifest_keeps_what_other_runs_made(here):
    shutil.copy("photo.png", "other.png")
    run("perturb", "photo.png", "--eps", "1", "--out", "o")
    run("perturb", "other.png", "--eps", "1", "--out", "o", "--resume")
    run("perturb", "photo.png", "--eps", "2", "--out", "o", "--overwrite")
    names = ["other_eps1.png", "photo_eps1.png", "photo_eps2.png"]
    assert sorted(row["output"] for row in manifest("o/manifest.csv")) == names
    before = Path("o/manifest.csv").read_bytes()
    fails("perturb", "gone.png", "--eps", "1", "--out", "o", "--overwrite", code=1)
    fails("perturb", "photo.png", "--eps", "1", "--out", "o", "--overwrite", "--jobs", "0")
    assert sorted(row["output"] for row in manifest("o/manifest.csv")) == names
    assert Path("o/manifest.csv").read_bytes() == before
    run("replay", "o/manifest.csv")


def test_what_cannot_be_made_again_stays_in_the_manifest(here):
    run("perturb", "photo.png", "--eps", "1,2", "--out", "o")
    before = manifest("o/manifest.csv")
    Path("photo.png").write_bytes(b"junk")
    for option in ("--overwrite", "--resume"):
        fails("perturb", "photo.png", "--eps", "1", "--out", "o", option, code=1)
        assert sorted(row["output"] for row in manifest("o/manifest.csv")) == ["photo_eps1.png", "photo_eps2.png"]
    assert sorted(map(str, before)) == sorted(map(str, manifest("o/manifest.csv")))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_line_that_was_cut_off_spoils_no_other(many, monkeypatch, kind):
    run("perturb", "in", "--out", "o", "--eps", "1", "--manifest", kind)
    path, original, calls = Path(f"o/manifest.{kind}"), work.write, []
    path.write_bytes(path.read_bytes()[:-40])

    def interrupted(path, *args):
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(path, *args)

    os.remove("o/0_eps1.png")
    monkeypatch.setattr(work, "write", interrupted)
    run("perturb", "in", "--out", "o", "--eps", "1", "--manifest", kind, "--resume", "--jobs", "1", code=130)
    run("perturb", "in", "--out", "o", "--eps", "1", "--manifest", kind, "--resume")
    assert len(path.read_text().splitlines()) == 9 + (kind == "csv")
    run("replay", str(path))


def test_resume_makes_anew_what_is_not_what_it_was(many):
    run("perturb", "in", "--out", "o", "--eps", "1")
    whole = {name: Path("o", name).read_bytes() for name in files("o")}
    Path("o/1_eps1.png").write_bytes(b"junk")
    out, _ = run("perturb", "in", "--out", "o", "--eps", "1", "--resume")
    assert "8 kept from before" in out
    assert {name: Path("o", name).read_bytes() for name in files("o")} == whole
    shutil.copy("in/2.png", "in/1.png")
    run("perturb", "in", "--out", "o", "--eps", "1", "--resume")
    run("replay", "o/manifest.csv")


def test_resume_writes_over_nothing_that_it_did_not_make(here):
    os.mkdir("o")
    Path("o/photo_eps1.png").write_text("precious")
    err = fails("perturb", "photo.png", "--eps", "1", "--out", "o", "--resume", code=1)
    assert "o/photo_eps1.png: exists and is another file" in err
    assert Path("o/photo_eps1.png").read_text() == "precious"
    assert files("o") == ["photo_eps1.png"]


def test_a_direction_is_an_input(here):
    np.save("x.npy", np.full((4, 5), 0.5, np.float32))
    np.save("d.npy", np.random.default_rng(0).standard_normal((4, 5)))
    delta = str(Path("d.npy").absolute())
    run("perturb", "x.npy", "--delta", delta, "--eps", "1", "--out", "o")
    out, _ = run("perturb", "x.npy", "--delta", delta, "--eps", "1", "--out", "o", "--resume")
    assert "1 kept from before" in out
    run("perturb", "x.npy", "--delta", "d.npy", "--eps", "1", "--out", "o", "--resume")
    shutil.copy("d.npy", "o/x_eps2.npy")
    err = fails("perturb", "x.npy", "--delta", "o/x_eps2.npy", "--eps", "2", "--out", "o", "--overwrite")
    assert "o/x_eps2.npy is an input" in err
    np.save("d.npy", np.ones((4, 5)))
    assert "is not the direction that the manifest was made with" in fails("replay", "o/manifest.csv", code=1)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_directions_of_any_scale(here, scale):
    np.save("x.npy", np.full((4, 5), 0.5, np.float32))
    np.save("d.npy", np.random.default_rng(0).standard_normal((4, 5)) * scale)
    run("perturb", "x.npy", "--delta", "d.npy", "--eps", "1", "--out", "o")
    (row,) = manifest("o/manifest.csv")
    assert float(row["delivered"]) == pytest.approx(1, rel=3e-7)
    v, d = np.load("o/x_eps1.npy"), np.load("d.npy")
    np.testing.assert_allclose(v, np.clip(0.5 + float(row["eta"]) * d, 0, 1), atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (5,), (1, 5)])
def test_a_direction_is_not_broadcast_along_an_array(here, shape):
    np.save("x.npy", np.full((4, 5), 0.5, np.float32))
    np.save("d.npy", np.ones(shape))
    err = fails("perturb", "x.npy", "--delta", "d.npy", "--eps", "1", "--out", "o", code=1)
    assert f"--delta d.npy has shape {shape}, expected (4, 5)" in err


def test_names_that_are_no_letters(here):
    os.mkdir("in")
    shutil.copy("photo.png", os.fsdecode(b"in/bad\xff.png"))
    shutil.copy("photo.png", "in/good.png")
    run("perturb", "in", "--out", "o", "--eps", "1")
    assert len(files("o")) == 3
    run("replay", "o/manifest.csv")


def test_replay_where_a_file_is_in_the_way(here):
    os.mkdir("in")
    os.mkdir("in/a")
    shutil.copy("photo.png", "in/a/i.png")
    shutil.copy("photo.png", "in/j.png")
    run("perturb", "in", "--out", "o", "--eps", "1")
    os.mkdir("again")
    Path("again/a").touch()
    err = fails("replay", "o/manifest.csv", "--out", "again", code=1)
    assert err.count("\n") == 1
    assert Path("again/j_eps1.png").exists()


def test_out_by_way_of_a_link(here):
    os.makedirs("real/deep")
    os.symlink("real/deep", "link")
    run("perturb", "photo.png", "--eps", "1", "--out", "link")
    for folder in ("real/deep", "link"):
        out, _ = run("replay", f"{folder}/manifest.csv")
        assert out.count("identical") == 1


def test_sizes_relative_to_nothing(here):
    soundfile.write("quiet.wav", np.zeros((100, 1)), 8000)
    assert "all of it is 0" in fails("perturb", "quiet.wav", "--snr", "0", "--out", "o", code=1)
    assert "--norm is 1,2, expected one number" in fails(
        "perturb", "photo.png", "--eps", "1", "--norm", "1,2", "--out", "o"
    )
    np.savez("some.npz", a=np.zeros((0, 3), np.uint8), b=np.full(4, 0.5))
    assert "some.npz (a): has no elements" in fails("perturb", "some.npz", "--eps", "1", "--out", "o", code=1)


def test_one_file_that_nobody_understands(here, monkeypatch):
    shutil.copy("photo.png", "a.png")
    original = work.perturbed

    def broken(task, *args):
        if task.input.name == "a.png":
            raise ZeroDivisionError("of all things")
        return original(task, *args)

    monkeypatch.setattr(work, "perturbed", broken)
    err = fails("perturb", "a.png", "photo.png", "--eps", "1", "--out", "o", code=1)
    assert err == "clipaware: error: a.png: cannot be perturbed: ZeroDivisionError: of all things\n"
    assert files("o") == ["manifest.csv", "photo_eps1.png"]
