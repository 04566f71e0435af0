"""The explorer: what is behind the page, and the page itself in a browser."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tifffile
from PIL import Image

from clipaware import cli, explorer, noise, reference
from clipaware._explorer import draw, results, solve
from clipaware._explorer.curve import Curve
from clipaware._explorer.solve import Choice, Visit, bundled, opened
from clipaware._media import FileError, read

RNG = np.random.default_rng(0)
ORDERS = (1.0, 1.5, 2.0, 3.0, math.inf)
PICTURE, SOUND = (0.0, 1.0), (-1.0, 1.0)
DATA = Path(solve.__file__).parents[1] / "data"


def visit_to(subject):
    visit = Visit()
    visit.look_at(subject)
    return visit


def picture(path, shape=(40, 60, 3), dtype=np.uint8):
    """A file with much black and white in it, and what it holds from 0 to 1."""
    x = np.clip(RNG.normal(0.5, 0.5, shape), 0, 1)
    if dtype == np.uint8:
        Image.fromarray(np.rint(x * 255).astype(np.uint8)).save(path)
    else:
        tifffile.imwrite(path, (x * 65535 if dtype == np.uint16 else x).astype(dtype))
    return path


def value(html, name):
    return float(re.search(f'data-name="{name}" data-value="([^"]+)"', html)[1])


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "rademacher", "salt-and-pepper"])
@pytest.mark.parametrize("p", ORDERS)
def test_numbers_of_floats_are_those_of_the_reference(p, kind, tmp_path) -> None:
    subject = opened(picture(tmp_path / "x.png"), "picture")
    x = subject.content.parts[""].values.reshape(1, -1) / np.float32(255)
    delta = noise.sample(kind, x.reshape(40, 60, 3), seed=3, axes=(0, 1)).reshape(1, -1)
    corner = np.where(delta > 0, 1, np.where(delta < 0, 0, x))
    reach = reference.norm64(corner, x, p).item()
    eps = reach / 2
    outcome = visit_to(subject).solve(Choice(kind, 3, p, "eps", eps, PICTURE, whole=False))
    eta = reference.bisect_rescale(x, delta, eps, p)
    exact = np.clip(x + eta * delta.astype(np.float64), 0, 1)
    assert outcome.reach == pytest.approx(reach, rel=1e-6)
    assert outcome.exact == pytest.approx(eps, rel=3e-6)
    assert np.abs(outcome.made.reshape(1, -1) - exact).max() < 1e-5
    naive = reference.naive_perturb(x.astype(np.float64), delta.astype(np.float64), eps, p)
    assert outcome.naive == pytest.approx(reference.norm64(naive, x, p).item(), rel=1e-5, abs=1e-6)
    assert np.abs(outcome.naively().reshape(1, -1) - naive).max() < 1e-5
    room = np.where(delta > 0, 1 - x, x)
    assert outcome.clipped == pytest.approx((eta * abs(delta) >= room).mean(), abs=2e-3)


@pytest.mark.parametrize("p", ORDERS)
def test_numbers_of_bytes_are_what_the_file_holds(p, tmp_path) -> None:
    subject = opened(picture(tmp_path / "x.png"), "picture")
    visit = visit_to(subject)
    eps = visit.reach(Choice(p=p)) / 3
    outcome = visit.solve(Choice(p=p, value=eps))
    saved = read(results.save(outcome, tmp_path)).parts[""].values
    rows = [a.reshape(1, -1) / 255 for a in (saved.astype(float), subject.content.parts[""].values.astype(float))]
    held = reference.norm64(*rows, p).item()
    assert saved.dtype == np.uint8
    assert outcome.exact == pytest.approx(held, rel=1e-12)
    assert held == pytest.approx(eps, rel=1e-3 if p < math.inf else 1e-2)
    naive = outcome.naively().reshape(1, -1) / 255
    assert outcome.naive == pytest.approx(reference.norm64(naive, rows[1], p).item(), rel=1e-9)
    assert outcome.naive < 0.97 * eps or p == math.inf


def test_other_bounds_move_values_into_them_first(tmp_path) -> None:
    subject = opened(picture(tmp_path / "x.png"), "picture")
    for whole in (True, False):
        outcome = visit_to(subject).solve(Choice(value=5.0, bounds=(0.2, 0.8), whole=whole))
        x = subject.content.parts[""].values / 255
        assert outcome.outside == np.count_nonzero((x < 0.2 - 1e-6) | (x > 0.8 + 1e-6))
        made = outcome.real(outcome.made)
        assert made.min() >= 0.2 - 1e-6
        assert made.max() <= 0.8 + 1e-6
        moved = reference.norm64(made.reshape(1, -1), x.clip(0.2, 0.8).reshape(1, -1)).item()
        assert moved == pytest.approx(5.0, rel=1e-3)
        assert "lay outside the bounds" in draw.answer(outcome)


def test_what_is_not_reachable_goes_as_far_as_it_can(tmp_path) -> None:
    visit = visit_to(opened(picture(tmp_path / "x.png"), "picture"))
    reach = visit.reach(Choice())
    outcome = visit.solve(Choice(value=2 * reach))
    assert not outcome.reachable
    assert outcome.exact == pytest.approx(reach, rel=1e-6)
    assert "more than this noise can have" in draw.answer(outcome)


@pytest.mark.parametrize("whole", [True, False])
def test_the_snr_of_a_sound_is_what_was_asked_for(whole, tmp_path) -> None:
    outcome = visit_to(bundled("sound", "Melody")).solve(Choice("pink", 1, 2.0, "snr", 3.0, SOUND, whole))
    path = results.save(outcome, tmp_path)
    v, rate = soundfile.read(path)
    x, _ = soundfile.read(DATA / "melody.flac")
    assert rate == 16000
    assert soundfile.info(path).subtype == ("PCM_16" if whole else "FLOAT")
    assert 10 * np.log10(np.sum(x**2) / np.sum((v - x) ** 2)) == pytest.approx(3.0, abs=1e-3)
    naive, exact = outcome.decibels()
    assert exact == pytest.approx(3.0, abs=1e-3)
    assert naive > 3.1


def test_sizes_in_other_units(tmp_path) -> None:
    visit = visit_to(bundled("picture", "Coffee"))
    x = bundled("picture", "Coffee").content.parts[""].values / 255
    for measure, size in (("rms", 0.1), ("snr", 10.0), ("psnr", 20.0)):
        outcome = visit.solve(Choice(measure=measure, value=size))
        change = outcome.made / 255.0 - x
        found = {
            "rms": np.sqrt(np.mean(change**2)),
            "snr": 10 * np.log10(np.sum(x**2) / np.sum(change**2)),
            "psnr": -10 * np.log10(np.mean(change**2)),
        }
        assert found[measure] == pytest.approx(size, rel=1e-4)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "black.png")
    black = visit_to(opened(tmp_path / "black.png", "picture"))
    with pytest.raises(ValueError, match="all of it is 0"):
        black.solve(Choice(measure="snr", value=3.0))


@pytest.mark.parametrize("p", ORDERS)
def test_everything_is_drawn_at_the_edges(p, tmp_path) -> None:
    """Nothing asked, all of it, more than there is; no room at all, no noise at all."""
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "black.png")
    for subject in (opened(tmp_path / "black.png", "picture"), opened(picture(tmp_path / "x.png"), "picture")):
        visit = visit_to(subject)
        for kind, whole in itertools.product(noise.KINDS, (True, False)):
            reach = visit.reach(Choice(kind, p=p, whole=whole))
            for eps in (0.0, 1e-3 * reach, 0.5 * reach, (1 - 1e-6) * reach, 3 * reach + 1):
                outcome = visit.solve(Choice(kind, p=p, value=eps, whole=whole))
                drawn = draw.answer(outcome)
                assert "nan" not in drawn.replace("base64,", "").split("<svg", 1)[1]
                assert value(drawn, "exact") == pytest.approx(min(eps, reach), rel=2e-3, abs=1 / 255)
                assert outcome.reachable == (eps <= reach or not eps)


@pytest.mark.parametrize("p", [1.0, 50.0, math.inf])
def test_the_largest_and_the_smallest_are_drawn(p, tmp_path) -> None:
    """What the controls let through, at its ends: without a warning and without what is no number."""
    tifffile.imwrite(tmp_path / "x.tif", RNG.normal(0, 1e300, (20, 30)))
    for path in (tmp_path / "x.tif", picture(tmp_path / "one.png", (1, 1))):
        visit = visit_to(opened(path, "picture"))
        for kind, whole, bounds in itertools.product(noise.KINDS, (True, False), (PICTURE, (-1e5, 1e5))):
            reach = visit.reach(Choice(kind, p=p, whole=whole, bounds=bounds))
            for eps in (1e-6 * reach, 0.5 * reach, 1e9):
                outcome = visit.solve(Choice(kind, p=p, value=eps, whole=whole, bounds=bounds))
                assert np.isfinite(outcome.naively()).all()
                shown = re.sub('base64,[^"]*', "", draw.answer(outcome))
                assert not re.search(r"\bnan\b|[^a-z]inf\b", shown)


def test_a_scale_that_float32_does_not_have(tmp_path) -> None:
    """The one pixel's noise is 1e-29 with this seed."""
    visit = visit_to(opened(picture(tmp_path / "one.png", (1, 1)), "picture"))
    outcome = visit.solve(Choice("salt-and-pepper", 34, 2.0, "psnr", -100.0, (-1e5, 1e5), whole=False))
    assert outcome.scale > 1e39
    assert abs(outcome.naively().item()) == 1e5


@pytest.mark.parametrize("whole", [True, False])
def test_floats_outside_the_bounds_are_counted(whole, tmp_path, run_lines) -> None:
    x = RNG.normal(0.5, 0.5, (30, 40, 3)).astype(np.float32)
    tifffile.imwrite(tmp_path / "x.tif", x, photometric="rgb")
    soundfile.write(tmp_path / "x.wav", 3 * x[..., 0].reshape(-1, 1), 8000, subtype="FLOAT")
    for name, kind, values, bounds in (
        ("x.tif", "picture", x, PICTURE),
        ("x.tif", "picture", x, (0.2, 0.8)),
        ("x.wav", "sound", 3 * x[..., 0], SOUND),
    ):
        outcome = visit_to(opened(tmp_path / name, kind)).solve(Choice(value=3.0, bounds=bounds, whole=whole))
        outside = np.count_nonzero((values < np.float32(bounds[0])) | (values > np.float32(bounds[1])))
        assert outcome.outside == outside > 0
        assert f"{outside:,} of {values.size:,} values lay outside the bounds" in draw.answer(outcome)
        page, mine, norm = run_lines(outcome)
        assert norm == pytest.approx(outcome.exact, rel=1e-5)
        assert np.array_equal(read(mine).parts[""].values, read(page).parts[""].values)


def test_what_is_inside_the_bounds_and_not_on_their_levels(tmp_path, run_lines) -> None:
    """Of 16 bits, 0.2015 is inside; of 8, it would be 51/255, which is not."""
    tifffile.imwrite(tmp_path / "x.tif", np.full((9, 9), round(0.2015 * 65535), np.uint16))
    outcome = visit_to(opened(tmp_path / "x.tif", "picture")).solve(Choice(value=0.5, bounds=(0.201, 0.9)))
    assert outcome.outside == 0
    page, mine, _ = run_lines(outcome)
    assert np.array_equal(read(mine).parts[""].values, read(page).parts[""].values)


# --- the curve --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "cauchy", "lognormal", "tied"])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("share", [0.05, 0.6, 0.99])
def test_newton_ends_at_the_root_and_goes_along_tangents(share, p, kind) -> None:
    x, delta = RNG.random((1, 5000)), reference.directions(kind, 1, 5000, 2)
    room = np.where(delta > 0, 1 - x, np.where(delta < 0, x, 0))
    curve = Curve(np.abs(delta), room, p)
    eps = share * float(curve.norm(curve.last))
    scales = curve.newton(eps)
    assert scales[-1] / curve.top == pytest.approx(reference.bisect_rescale(x, delta, eps, p).item(), rel=1e-9)
    for scale in [*scales[1:], 0.3 * curve.last]:
        v = np.clip(x + scale / curve.top * delta, 0, 1)
        assert float(curve.norm(scale)) == pytest.approx(reference.norm64(v, x, p).item(), rel=1e-9)
    if p < math.inf:
        for here, there in itertools.pairwise(scales):
            # Where the line that the curve follows at `here` has the size.
            eta = here / curve.top * np.abs(delta)
            clipped = (eta >= room) & (delta != 0)
            rest = eps**p - np.sum(room[clipped] ** p)
            assert there**p == pytest.approx(rest / np.sum((np.abs(delta) / curve.top)[~clipped] ** p), rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0, 5.0, math.inf])
def test_the_curve_of_a_large_picture_is_close(p, monkeypatch) -> None:
    rng = np.random.default_rng(1)  # of its own: it is a matter of luck how close
    size, room = np.abs(rng.standard_normal(200_000)), rng.integers(0, 256, 200_000) / 255
    whole = Curve(size, room, p)
    monkeypatch.setattr("clipaware._explorer.curve.MOST", 50_000)
    sample = Curve(size, room, p)
    assert sample.sampled
    assert not whole.sampled
    scales = np.linspace(0.01, 1, 20) * 4
    assert np.allclose(sample.norm(scales), whole.norm(scales), rtol=1e-2 if p < math.inf else 1e-3)


# --- files and lines of Python ----------------------------------------------------------------------------------------

CASES = [
    ("x.png", (20, 30, 3), np.uint8),
    ("x.png", (20, 30), np.uint8),
    ("x.tif", (20, 30, 3), np.uint16),
    ("x.tif", (20, 30), np.float32),
]


@pytest.fixture
def run_lines(tmp_path, monkeypatch, capsys):
    """Save a result as the page does; run the lines beside the original; both files, and the norm that was printed."""

    def run(outcome):
        (tmp_path / "page").mkdir(exist_ok=True)
        page = results.save(outcome, tmp_path / "page")
        monkeypatch.chdir(tmp_path)
        Path("exact.py").write_text(results.code(outcome))
        runpy.run_path("exact.py")
        return page, tmp_path / results.name_of(outcome), float(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("name", "shape", "dtype"), CASES)
def test_lines_make_the_same_picture(name, shape, dtype, whole, tmp_path, run_lines) -> None:
    subject = opened(picture(tmp_path / name, shape, dtype), "picture")
    for choice in (
        Choice("uniform", 5, 2.0, "psnr", 14.0, PICTURE, whole),
        Choice("speckle", 5, 1.5, "eps", 20.0, (0.1, 0.9), whole),
        Choice("gaussian", 0, math.inf, "eps", 0.3, PICTURE, whole),
    ):
        outcome = visit_to(subject).solve(choice)
        page, mine, norm = run_lines(outcome)
        assert norm == pytest.approx(outcome.exact, rel=1e-5)
        page, mine = (read(path).parts[""].values for path in (page, mine))
        assert mine.dtype == page.dtype == (np.uint8 if whole else np.float32)
        assert np.array_equal(mine, page)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_lines_make_the_same_sound(subtype, whole, tmp_path, run_lines) -> None:
    samples = np.clip(RNG.normal(0, 0.5, (3000, 2)), -1, 0.9999)
    soundfile.write(tmp_path / "x.wav", samples, 8000, subtype=subtype)
    outcome = visit_to(opened(tmp_path / "x.wav", "sound")).solve(Choice("laplace", 2, 2.0, "snr", 4.0, SOUND, whole))
    page, mine, norm = run_lines(outcome)
    assert norm == pytest.approx(outcome.exact, rel=1e-5)
    assert np.array_equal(read(mine).parts[""].values, read(page).parts[""].values)


def test_lines_of_a_bundled_picture_make_the_same_bytes(tmp_path, run_lines) -> None:
    outcome = visit_to(bundled("picture", "Coffee")).solve(Choice(value=100.0))
    shutil.copy(DATA / "coffee.jpg", tmp_path)
    page, mine, norm = run_lines(outcome)
    assert norm == pytest.approx(100.0, rel=1e-5)
    assert mine.name == "coffee_exact.png"
    assert mine.read_bytes() == page.read_bytes()
    assert len([line for line in results.code(outcome).splitlines() if line]) <= 11


def test_alpha_and_orientation_stay(tmp_path) -> None:
    pixels = RNG.integers(0, 256, (12, 20, 4), np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    outcome = visit_to(opened(tmp_path / "a.png", "picture")).solve(Choice(value=3.0))
    (tmp_path / "out").mkdir()
    made = read(results.save(outcome, tmp_path / "out"))
    assert np.array_equal(made.extra.alpha, pixels[..., 3:])
    assert made.extra.orientation == 6
    # Shown upright: on its side it is 12 pixels wide.
    shown = re.search(r'alt="original" src="data:image/jpeg;base64,([^"]+)"', draw.answer(outcome))[1]
    assert Image.open(io.BytesIO(base64.b64decode(shown))).size == (12, 20)


def test_uploads_are_checked(tmp_path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "a.npy").write_bytes(b"")
    whole = picture(tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    tifffile.imwrite(tmp_path / "nan.tif", np.full((4, 4), np.nan, np.float32))
    tifffile.imwrite(tmp_path / "pages.tif", np.zeros((4, 9, 9), np.uint8), photometric="minisblack")
    for name, what in (
        ("text.png", "cannot be read|is no PNG"),
        ("empty.png", "is empty"),
        ("a.npy", "is no picture that can be read here, expected .png"),
        ("cut.png", "cut off|cannot be read"),
        ("nan.tif", r"has 16 element\(s\) that are NaN or infinite"),
        ("pages.tif", "expected one picture"),
    ):
        with pytest.raises(FileError, match=what) as caught:
            opened(tmp_path / name, "picture")
        assert str(caught.value).startswith(f"{name}: ")  # and not with the folder of uploads
        assert str(tmp_path) not in str(caught.value)
    with pytest.raises(FileError, match=r"has 7,200 elements, more than the limit of 7,000$"):
        opened(tmp_path / "whole.png", "picture", 7000)
    with pytest.raises(FileError, match="is no sound"):
        opened(tmp_path / "whole.png", "sound")


def test_names_of_files_are_text(tmp_path) -> None:
    """And neither HTML nor Python."""
    name = "<img src=x onerror=alert(1)>'\"\\.png"
    assert "<img" not in draw.trouble(f"{name}: bad")
    outcome = visit_to(opened(picture(tmp_path / name), "picture")).solve(Choice(value=3.0))
    assert "onerror" not in draw.answer(outcome)
    compile(results.code(outcome), "exact.py", "exec")
    assert repr(name) in results.code(outcome)


def test_what_is_kept_follows_the_controls(tmp_path) -> None:
    """One visit with many choices gives what a fresh one gives."""
    visit = visit_to(bundled("picture", "Rocket"))
    choices = [
        Choice(value=30.0), Choice(value=40.0), Choice(value=40.0, seed=1), Choice("pink", 1, value=40.0),
        Choice("pink", 1, 1.0, value=9000.0), Choice("pink", 1, 1.0, value=9000.0, bounds=(0.0, 0.5)),
        Choice("pink", 1, 1.0, value=9000.0, bounds=(0.0, 0.5), whole=False),
    ]  # fmt: skip
    for choice in choices:
        fresh = visit_to(bundled("picture", "Rocket")).solve(choice)
        assert np.array_equal(visit.solve(choice).made, fresh.made)
    visit.look_at(bundled("picture", "Coffee"))
    assert visit.solve(choices[0]).made.shape == (256, 384, 3)


@pytest.mark.parametrize(
    ("shape", "size", "caption"),
    [
        ((300, 400), (400, 300), "original<"),
        ((1200, 400), (134, 400), "original, every 3rd pixel<"),
        ((3, 1300), (434, 3), "original, every 3rd pixel, stretched<"),
        ((7000, 1), (1, 539), "original, every 13th pixel, stretched<"),
    ],
)
def test_previews_of_large_and_long_pictures(shape, size, caption, tmp_path) -> None:
    outcome = visit_to(opened(picture(tmp_path / "x.png", shape), "picture")).solve(Choice(value=1.0))
    drawn = draw.answer(outcome)
    shown = re.search(r'alt="original" src="data:image/jpeg;base64,([^"]+)"', drawn)[1]
    assert Image.open(io.BytesIO(base64.b64decode(shown))).size == size
    assert caption in drawn


# --- what the controls do ---------------------------------------------------------------------------------------------

CONTROLS = {
    "measure": "eps", "size": 80.0, "noise": "gaussian", "norm": "2", "order": 1.5, "seed": 0, "low": 0, "high": 1,
    "depth": "8-bit",
}  # fmt: skip


class Anything:
    """Stands in for Gradio, its components and their events: keeps what it was made with."""

    def __init__(self, *given, **options) -> None:
        self.given = options.get("value", given[0] if given else None)

    def __getattr__(self, name):
        return Anything

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


@pytest.fixture
def tab():
    return explorer._Tab(Anything(), Anything(), "picture", explorer.MOST)


def use(tab, visit, what="again", title="Coffee", **controls):
    return getattr(tab, what)(visit, title, *(CONTROLS | controls).values())


@pytest.mark.parametrize(
    ("control", "given", "said"),
    [
        ("size", None, "the size is empty, expected a number from 0 to 1000000000"),
        ("size", -5, "the size is -5, expected"),
        ("size", 1e30, "the size is 1e\\+30, expected"),
        ("size", math.nan, "the size is nan, expected"),
        ("size", "80", "the size is 80, expected a number"),
        ("order", 0.5, "the p of the norm is 0.5, expected a number from 1 to 50"),
        ("order", 51, "the p of the norm is 51, expected"),
        ("order", None, "the p of the norm is empty, expected"),
        ("seed", None, "the seed is empty, expected a number from 0 to 9007199254740991"),
        ("seed", 1.5, "the seed is 1.5, expected a whole number"),
        ("seed", -1, "the seed is -1, expected"),
        ("seed", 2**53, "the seed is 9007199254740992, expected"),
        ("seed", 1e30, "the seed is 1e\\+30, expected"),
        ("low", None, "the lower bound is empty, expected"),
        ("low", 1, "the bounds are 1 and 1, expected the lower one first"),
        ("low", 1 - 1e-12, "the bounds are 1 and 1, expected the lower one first"),
        ("high", 1e6, "the upper bound is 1000000.0, expected a number from -100000 to 100000"),
        ("noise", "blue", "the noise is &#x27;blue&#x27;, expected one of gaussian"),
        ("measure", ["eps"], "the size is "),
    ],
)
def test_controls_that_cannot_be(control, given, said, tab) -> None:
    visit = Visit()
    norm = {"norm": "any p"} if control == "order" else {}
    shown = use(tab, visit, **norm)[1]
    message, *rest = use(tab, visit, **norm, **{control: given})
    assert re.search(f'class="ca-trouble" role="alert">{said}', message)
    assert shown
    assert [update.given for update in rest] == [None, None]  # what was shown stays
    again = use(tab, visit, **norm)
    assert again[0] == ""
    assert again[1] == shown


def size_after(tab, visit, title="Coffee", **controls):
    """The size and the norm that are set when another control is used."""
    changed = use(tab, visit, "anew", title, **controls)
    return changed[1].given, changed[3].given


@pytest.mark.long
@pytest.mark.parametrize("size", [80.123456, 0.0123, 400.0, 319.0, 0.0])
def test_a_size_comes_back(size, tab) -> None:
    visit = Visit()
    use(tab, visit, "anew")
    use(tab, visit, size=size)
    for _ in range(3):
        assert size_after(tab, visit, measure="rms") == (0.2, "2")
        assert size_after(tab, visit) == (size, "2")
        there, _ = size_after(tab, visit, norm="∞")
        assert there == pytest.approx(min(size / visit.reach(Choice()), 1), rel=1e-2)
        assert size_after(tab, visit) == (size, "2")
        rocket, _ = size_after(tab, visit, "Rocket")
        assert 0 < rocket < 400 or not size
        assert size_after(tab, visit) == (size, "2")


def test_a_norm_comes_back(tab) -> None:
    visit = Visit()
    use(tab, visit, "anew")
    size_after(tab, visit, norm="∞")
    use(tab, visit, norm="∞", size=0.25)
    assert size_after(tab, visit, measure="snr", norm="∞") == (3.0, "2")
    assert size_after(tab, visit, measure="eps", norm="2") == (0.25, "∞")
    assert visit.shown.choice.p == math.inf


def test_what_is_saved_is_what_was_shown(tab, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    visit = Visit()
    for save in (tab.saved, tab.saved_code):
        assert "nothing is shown any more" in save(visit)[0]
    use(tab, visit, size=60.0)
    use(tab, visit, size=-1.0)
    use(tab, visit, "anew", "Your own")
    outcome = coffee_outcome(value=60.0)
    message, path = tab.saved(visit)
    assert np.array_equal(read(Path(path)).parts[""].values, outcome.made)
    assert message.given is None  # it is about the controls
    assert Path(tab.saved_code(visit)[1]).read_text() == results.code(outcome)


def test_a_file_that_does_not_fit_the_controls_stays(tab, tmp_path) -> None:
    path = tmp_path / "black.png"
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(path)
    visit, controls = Visit(), (CONTROLS | {"measure": "snr"}).values()
    changed = tab.upload({"path": str(path)}, visit, "Coffee", *controls)
    assert "all of it is 0" in changed[6]
    assert changed[1].given == "Your own"
    assert not path.exists()
    assert size_after(tab, visit, "Your own", measure="rms") == (0.2, "2")
    assert visit.shown.subject.name == "black.png"


# --- the command ------------------------------------------------------------------------------------------------------


def fails(*argv):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert cli.main(["explore", "--no-browser", *argv]) == 2
    return err.getvalue()


def test_without_gradio_the_command_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "pip install 'clipaware[explorer]'" in fails()


def test_other_hosts_are_warned_of(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "warning" not in fails("--host", "127.0.0.1")
    assert "warning" not in fails("--host", "localhost")
    assert "warning: --host 0.0.0.0 lets whoever can reach this machine use the page" in fails("--host", "0.0.0.0")
    assert "warning" not in fails("--host", "::1")
    assert "warning" not in fails("--host", "[::1]")
    assert "warning: --host :: lets whoever" in fails("--host", "::")
    assert "warning: --host 2001:db8::1 lets whoever" in fails("--host", "2001:db8::1")
    assert "--host is empty" in fails("--host", "")
    assert "--port is 70000" in fails("--port", "70000")
    assert "--max-elements is 0" in fails("--max-elements", "0")


# --- the page ---------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium")


@contextlib.contextmanager
def serving(folder, *options):
    """The address of an explorer, in a process of its own, with a folder for temporary files of its own."""
    pytest.importorskip("gradio", reason="the explorer needs Gradio")
    process = subprocess.Popen(
        [sys.executable, "-m", "clipaware.cli", "explore", "--no-browser", *options],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    try:
        said = process.stdout.readline()
        yield re.search(r"http://\S+", said)[0].rstrip("/")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not list(folder.glob("clipaware-explorer-*"))  # nothing is left behind
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("temporary")
    with serving(folder, "--max-elements", "30000", "--max-megabytes", "1") as address:
        yield address, folder


def status(address, data=None, **headers):
    """Of what a server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_server_listens_to_this_machine_and_hands_out_no_files(server, tmp_path) -> None:
    address, _ = server
    assert re.match(r"http://127\.0\.0\.1:\d+$", address)
    assert status(address) == 200
    for path in ("/etc/passwd", Path(__file__), DATA / "coffee.jpg"):
        assert status(f"{address}/gradio_api/file={path}") in (403, 404)
    # Nor does it fetch anything for others.
    assert status(f"{address}/gradio_api/file=http://example.com/") == 403
    assert status(f"{address}/gradio_api/proxy=http://example.com/") == 403
    assert status(f"{address}/gradio_api/file/http://example.com/") == 403
    # Nor what else Gradio could do.
    for name in ("deep_link?session_hash=a", "process_recording", "openapi.json", "run/again", "call/again", "runs"):
        assert status(f"{address}/gradio_api/{name}") == 403
        assert status(f"{address}/gradio_api/{name}", b"{}") == 403


def test_the_server_answers_to_the_names_of_this_machine(server) -> None:
    """And not to another one that somebody has given its address."""
    address, _ = server
    for host in ("localhost", "LOCALHOST:7860", "127.0.0.1:80", "[::1]:7860"):
        assert status(address, Host=host) == 200
    for host in ("example.com", "example.com:7860", "localhost.example.com", "127.0.0.1.example.com", "10.0.0.1"):
        assert status(address, Host=host) == 403


def sent(address, name, body):
    """Upload bytes under a name, as browsers do; the path that they have got, or a status."""
    start = f'--b\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    data = start + body + b"\r\n--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/gradio_api/upload", data, headers)) as answer:
            return json.loads(answer.read())[0]
    except urllib.error.HTTPError as error:
        return error.code


def asked_for(address, what, *values):
    """The answer to an event of the picture's controls, as the page would send it."""
    config = json.loads(urllib.request.urlopen(f"{address}/config").read())
    kinds = {component["id"]: component["type"] for component in config["components"]}
    inputs = {"upload": ["file", "state", "radio"], "again": ["state", "radio", "radio"]}[what]
    event = next(e for e in config["dependencies"] if [kinds[i] for i in e["inputs"][:3]] == inputs)
    body = {"data": [*values, *CONTROLS.values()], "fn_index": event["id"], "session_hash": "visitor"}
    headers = {"Content-Type": "application/json"}
    join = urllib.request.Request(f"{address}/gradio_api/queue/join", json.dumps(body).encode(), headers)
    assert urllib.request.urlopen(join).status == 200
    with urllib.request.urlopen(f"{address}/gradio_api/queue/data?session_hash=visitor", timeout=60) as lines:
        return next(line.decode() for line in lines if b"process_completed" in line)


def test_only_what_was_uploaded_is_read(server, tmp_path) -> None:
    address, folder = server
    mine = picture(tmp_path / "mine.png")
    meta = {"meta": {"_type": "gradio.FileData"}}
    for path in ("http://example.com/x.png", "https://127.0.0.1/x.png", "ftp://example.com/x.png", "file:///x.png"):
        for answer in (
            asked_for(address, "upload", {"path": path, **meta}, None, "Coffee"),
            asked_for(address, "again", None, {"path": path, **meta}),
        ):
            assert "only what was uploaded is read, and nothing is fetched" in answer
    root = next(folder.glob("clipaware-explorer-*"))
    for path in (mine, f"{root}/../{mine.name}", "/etc/passwd", "../../etc/passwd", root.parent):
        for more in (meta, {}, {**meta, "url": "http://example.com/x.png"}):
            answer = asked_for(address, "upload", {"path": str(path), **more}, None, "Coffee")
            assert '"success":false' in answer
            assert "root:" not in answer
    assert mine.exists()
    # Whoever has been away for too long is asked for it once more.
    assert "your picture is no longer here; drop it once more" in asked_for(address, "again", None, "Your own")
    # The folder itself is no upload, and is not removed.
    assert "only what was uploaded is read" in asked_for(address, "upload", {"path": str(root), **meta}, None, "Coffee")
    assert root.is_dir()


def test_names_and_sizes_of_uploads(server, tmp_path) -> None:
    address, folder = server
    body = picture(tmp_path / "mine.png").read_bytes()
    for name in ("../../../x.png", "/etc/x.png", "a" * 3000 + ".png", "ü ☃.png", "a\x00.png"):
        path = Path(sent(address, name, body))
        assert folder in path.parents
        assert path.resolve() == path
        answer = asked_for(address, "upload", {"path": str(path), "meta": {"_type": "gradio.FileData"}}, None, "Coffee")
        assert "data-name" in answer
        assert not path.exists()
        assert not [left for left in folder.rglob("*") if left.is_file()]
    assert sent(address, "..", body) == 400
    assert sent(address, "x.png", bytes(2**20 + 1)) == 413
    # Of a request as a whole, before any of it is read; and without a length, none is.
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    for headers, refused in (({"Content-Length": str(2**40)}, 413), ({"Transfer-Encoding": "chunked"}, 411)):
        connection.putrequest("POST", "/gradio_api/upload")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == refused
        connection.close()


def test_uploads_that_nobody_looks_at_fill_no_disk(server, tmp_path) -> None:
    address, folder = server
    try:
        taken = list(itertools.takewhile(lambda k: sent(address, f"{k}.png", k.to_bytes(2) * 2**19) != 507, range(40)))
        assert 16 <= len(taken) <= 33
    finally:
        shutil.rmtree(next(folder.glob("clipaware-explorer-*")))
    assert sent(address, "x.png", b"1") != 507


@pytest.mark.long
def test_an_address_of_ipv6(tmp_path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"there is no IPv6 here: {error}")
    # As if another explorer had the first port: the next one is taken at once.
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("::1", 7860), family=socket.AF_INET6))
        with serving(tmp_path, "--host", "::1") as address:
            assert re.match(r"http://\[::1\]:\d+$", address)
            assert not address.endswith(":7860")
            assert status(address) == 200
            assert status(address, Host="example.com") == 403
    assert explorer._address("::", 7860) == "http://[::1]:7860/"
    assert explorer._address("0.0.0.0", 7860) == "http://localhost:7860/"


class Browser:
    """A page in Chromium, which may talk to the explorer only."""

    def __init__(self, page, address) -> None:
        self.page, self.address, self.errors, self.others = page, address, [], []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.route("**/*", self._route)
        page.goto(address)
        page.wait_for_selector("#picture-answer .ca-value", timeout=120_000)

    def _route(self, route) -> None:
        if route.request.url.startswith((f"{self.address}/", "data:", "blob:")):
            route.continue_()
        else:
            self.others.append(route.request.url)
            route.abort()

    def number(self, name, kind="picture"):
        return float(self.page.locator(f'#{kind}-answer [data-name="{name}"]').get_attribute("data-value"))

    def wait_for(self, name, expected, kind="picture") -> None:
        """Until a number is that one, as near as it is shown."""
        self.page.wait_for_function(
            "([kind, name, expected]) => { const e = document.querySelector(`#${kind}-answer [data-name='${name}']`);"
            "return e && Math.abs(e.dataset.value - expected) <= 1e-3 * Math.abs(expected); }",
            arg=[kind, name, expected], timeout=60_000,
        )  # fmt: skip

    def slide_to(self, size, kind="picture") -> None:
        box = self.page.locator(f"#{kind}-size input")
        box.fill(str(size))
        box.blur()

    def choose(self, group, text, kind="picture") -> None:
        self.page.locator(f"#{kind}-{group} label").get_by_text(text, exact=True).click()

    def upload(self, path, kind="picture") -> None:
        self.page.locator(f"#{kind}-file input[type=file]").set_input_files(path)

    def message(self, kind="picture"):
        place = self.page.locator(f"#{kind}-message .ca-trouble")
        place.wait_for(timeout=60_000)
        return place.inner_text()

    def download(self, button, folder):
        with self.page.expect_download(timeout=60_000) as waiting:
            self.page.locator(f"#{button}").click()
        path = folder / waiting.value.suggested_filename
        waiting.value.save_as(path)
        return path


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visitors(chromium, server):
    """Opens pages, each of another visitor; in the end none may have had an error or asked for anything elsewhere."""
    with contextlib.ExitStack() as stack:
        opened_pages = []

        def open_page(width=1280, height=900):
            context = chromium.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
            stack.callback(context.close)
            opened_pages.append(Browser(context.new_page(), server[0]))
            return opened_pages[-1]

        yield open_page
        for page in opened_pages:
            assert page.errors == []
            assert page.others == []


def coffee_outcome(**choice):
    return visit_to(bundled("picture", "Coffee")).solve(Choice(**choice))


def assert_shows(page, outcome) -> None:
    for name in ("asked", "naive", "exact", "reach", "clipped"):
        assert page.number(name) == pytest.approx(getattr(outcome, name), rel=1e-9)


def test_the_controls_move_the_numbers(visitors) -> None:
    page = visitors()
    page.slide_to(80)
    page.wait_for("asked", 80)
    outcome = coffee_outcome(value=80.0)
    assert_shows(page, outcome)
    assert page.number("naive") < 77 < 79.99 < page.number("exact") < 80.01
    # With the mouse.
    before = page.page.locator("#picture-answer [data-plot=delivered]").inner_html()
    box = page.page.locator("#picture-value input[type=range]").bounding_box()
    page.page.mouse.click(box["x"] + 0.7 * box["width"], box["y"] + box["height"] / 2)
    page.page.wait_for_function(
        "() => document.querySelector('#picture-answer [data-name=asked]').dataset.value > 150", timeout=60_000
    )
    assert_shows(page, coffee_outcome(value=page.number("asked")))
    assert page.page.locator("#picture-answer [data-plot=delivered]").inner_html() != before
    page.choose("norm", "∞")
    page.page.wait_for_function(
        "() => document.querySelector('#picture-answer [data-name=asked]').dataset.value < 1", timeout=60_000
    )
    page.slide_to(0.25)
    page.wait_for("asked", 0.25)
    assert_shows(page, coffee_outcome(value=0.25, p=math.inf))
    assert not page.page.locator("#picture-order").is_visible()
    page.choose("norm", "any p")
    page.wait_for("reach", coffee_outcome(value=1.0, p=1.5).reach)
    assert page.page.locator("#picture-order").is_visible()
    page.choose("measure", "PSNR, dB")
    page.wait_for("reach", coffee_outcome(value=1.0).reach)
    page.slide_to(20)
    page.wait_for("asked", 0.1 * math.sqrt(256 * 384 * 3))
    assert_shows(page, coffee_outcome(measure="psnr", value=20.0))
    page.choose("title", "Rocket")
    rocket = visit_to(bundled("picture", "Rocket")).solve(Choice(measure="psnr", value=20.0))
    page.wait_for("naive", rocket.naive)
    assert_shows(page, rocket)


@pytest.mark.long
def test_noise_seed_bounds_and_precision(visitors) -> None:
    page = visitors()
    page.slide_to(50)
    page.wait_for("asked", 50)
    page.page.locator("#picture-noise input").click()
    page.page.get_by_role("option", name="rademacher").click()
    page.wait_for("naive", coffee_outcome(noise="rademacher", value=50.0).naive)
    page.page.get_by_text("Seed, bounds, precision").first.click()
    page.page.locator("#picture-seed input").fill("7")
    page.wait_for("reach", coffee_outcome(noise="rademacher", seed=7, value=50.0).reach)
    page.choose("depth", "float")
    page.page.locator("#picture-high input").fill("0.9")
    outcome = coffee_outcome(noise="rademacher", seed=7, value=50.0, bounds=(0.0, 0.9), whole=False)
    page.wait_for("reach", outcome.reach)
    assert_shows(page, outcome)
    page.page.locator("#picture-high input").fill("-1")
    assert "expected the lower one first" in page.message()


@pytest.mark.long
def test_uploads_good_and_bad(visitors, server, tmp_path) -> None:
    page, other = visitors(), visitors()
    path = picture(tmp_path / "mine.png")
    page.upload(path)
    visit = visit_to(opened(path, "picture"))
    reach = visit.reach(Choice())
    page.wait_for("reach", reach)
    page.slide_to(20)
    page.wait_for("asked", 20)
    outcome = visit.solve(Choice(value=20.0))
    assert_shows(page, outcome)
    # It is nobody else's, and not on the disk any more.
    assert other.page.locator("#picture-title").get_by_text("Your own").count() == 0
    other.slide_to(30)
    other.wait_for("asked", 30)
    assert_shows(other, coffee_outcome(value=30.0))
    assert not list(server[1].rglob("mine.png"))
    # What cannot be read is said, and what was there stays.
    (tmp_path / "bad.png").write_text("this is no picture")
    page.upload(tmp_path / "bad.png")
    assert page.message().startswith("bad.png: ")
    assert_shows(page, outcome)
    page.upload(picture(tmp_path / "large.png", (110, 100, 3)))
    page.page.get_by_text("large.png: says that it has 33,000 elements, more than the limit of 30,000").wait_for()
    page.choose("title", "Coffee")
    page.wait_for("reach", coffee_outcome(value=1.0).reach)
    page.choose("title", "Your own")
    page.wait_for("reach", reach)


@pytest.mark.long
def test_downloads(visitors, server, tmp_path, monkeypatch, capsys) -> None:
    page = visitors()
    page.slide_to(60)
    page.wait_for("asked", 60)
    path = page.download("picture-save", tmp_path)
    outcome = coffee_outcome(value=60.0)
    assert path.name == "coffee_exact.png"
    assert np.array_equal(read(path).parts[""].values, outcome.made)
    lines = page.download("picture-save-code", tmp_path)
    assert lines.read_text() == results.code(outcome)
    made = path.read_bytes()
    shutil.copy(DATA / "coffee.jpg", tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(lines))
    assert float(capsys.readouterr().out) == pytest.approx(60.0, rel=1e-5)
    assert path.read_bytes() == made


@pytest.mark.long
def test_downloads_are_what_is_shown(visitors, tmp_path) -> None:
    page = visitors()
    page.slide_to(60)
    page.wait_for("asked", 60)
    page.slide_to(-5)
    assert "the size is -5, expected a number from 0" in page.message()
    outcome = coffee_outcome(value=60.0)
    assert_shows(page, outcome)
    assert np.array_equal(read(page.download("picture-save", tmp_path)).parts[""].values, outcome.made)
    assert page.download("picture-save-code", tmp_path).read_text() == results.code(outcome)
    assert "the size is -5" in page.message()


@pytest.mark.long
def test_numbers_that_cannot_be(visitors) -> None:
    """They stay as they were typed, and a message says what is wrong until it is mended."""
    page = visitors()
    page.page.get_by_text("Seed, bounds, precision").first.click()
    page.choose("norm", "any p")
    page.page.locator("#picture-order").wait_for()
    for name, typed, said, mended in (
        ("size", "1e30", "the size is 1e+30, expected", "1000"),
        ("size", "", "the size is empty, expected", "1000"),
        ("order", "0.5", "the p of the norm is 0.5, expected a number from 1 to 50", "2"),
        ("seed", "1.5", "the seed is 1.5, expected a whole number", "3"),
        ("seed", "-1", "the seed is -1, expected", "3"),
        ("seed", "9007199254740993", "the seed is 9007199254740992, expected", "3"),
    ):
        box = page.page.locator(f"#picture-{name} input")
        box.fill(typed)
        box.blur()
        page.page.locator("#picture-message .ca-trouble").get_by_text(said).wait_for()
        assert box.input_value() == typed
        assert page.page.locator(".toast-body").count() == 0
        box.fill(mended)
        page.page.locator("#picture-message .ca-trouble").wait_for(state="detached")
    page.slide_to(1e6)
    page.page.get_by_text("is more than this noise can have").wait_for()


@pytest.mark.long
def test_the_number_and_the_slider_follow_each_other(visitors) -> None:
    page = visitors()
    number = page.page.locator("#picture-size input")
    slider = page.page.locator("#picture-value input[type=range]")
    page.slide_to(80)
    page.wait_for("asked", 80)
    assert float(slider.input_value()) == 80
    slider.fill("120")
    page.wait_for("asked", 120)
    assert float(number.input_value()) == 120
    page.choose("norm", "∞")
    page.page.wait_for_function("() => document.querySelector('#picture-size input').value < 1")
    page.choose("norm", "2")
    page.wait_for("asked", 120)
    assert float(number.input_value()) == float(slider.input_value()) == 120


@pytest.mark.long
def test_a_sign_while_it_works(visitors) -> None:
    page = visitors()
    sign, held = page.page.locator("#picture-busy .ca-busy"), []
    sign.wait_for(state="hidden")
    for size, appears in ((70, "asked, L2"), (-1, "the size is -1, expected")):
        held.clear()
        page.page.route("**/queue/join*", lambda route: held.append(route))
        page.slide_to(size)
        sign.wait_for()
        box = sign.bounding_box()
        assert box["width"] * box["height"] < 5000
        assert box["x"] + box["width"] <= 1280
        (route,) = held
        route.continue_()
        sign.wait_for(state="hidden")
        page.page.unroute("**/queue/join*")
        page.page.get_by_text(appears).first.wait_for()
    assert page.number("asked") == 70


@pytest.mark.long
def test_what_is_too_large_to_upload_is_said(visitors, tmp_path) -> None:
    page = visitors()
    (tmp_path / "large.png").write_bytes(bytes(2**20 + 1))
    page.upload(tmp_path / "large.png")
    page.page.get_by_text(
        re.compile("exceeds? the maximum|maximum allowed size|too large", re.IGNORECASE)
    ).first.wait_for()
    assert_shows(page, coffee_outcome(value=page.number("asked")))
    page.upload(picture(tmp_path / "mine.png"))
    page.page.locator("#picture-title").get_by_text("Your own").wait_for()


@pytest.mark.long
def test_the_sound_tab(visitors, tmp_path) -> None:
    page = visitors()
    page.page.get_by_role("tab", name="Sound").click()
    page.page.wait_for_selector("#sound-answer .ca-value", timeout=60_000)
    page.slide_to(5, "sound")
    page.wait_for("exact-snr", 5.0, "sound")
    outcome = visit_to(bundled("sound", "Melody")).solve(Choice(measure="snr", value=5.0, bounds=SOUND))
    assert page.number("naive-snr", "sound") == pytest.approx(outcome.decibels()[0], rel=1e-9)
    assert page.number("exact", "sound") == pytest.approx(outcome.exact, rel=1e-9)
    lengths = page.page.evaluate(
        "() => Promise.all([...document.querySelectorAll('#sound-answer audio')].map(a => a.readyState ? a.duration "
        ": new Promise(done => a.addEventListener('loadedmetadata', () => done(a.duration)))))"
    )
    assert lengths == pytest.approx([8.4] * 3, abs=0.01)
    path = page.download("sound-save", tmp_path)
    assert path.name == "melody_exact.wav"
    assert np.array_equal(read(path).parts[""].values, outcome.made)
    soundfile.write(tmp_path / "mine.wav", np.clip(RNG.normal(0, 0.5, (4000, 2)), -1, 0.99), 8000)
    page.upload(tmp_path / "mine.wav", "sound")
    visit = visit_to(opened(tmp_path / "mine.wav", "sound"))
    page.wait_for("reach", visit.reach(Choice(bounds=SOUND)), "sound")
    page.upload(picture(tmp_path / "no.png"), "sound")
    assert "is no sound that can be read here" in page.message("sound")


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_the_window(width, visitors, tmp_path) -> None:
    page = visitors(width)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("original", "naive", "exact", "clipped", "naive-change", "exact-change"):
        box = page.page.locator(f"#picture-answer img[alt={name}]").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["width"] > 140
    page.page.get_by_role("tab", name="Sound").click()
    page.page.wait_for_selector("#sound-answer .ca-value", timeout=60_000)
    soundfile.write(tmp_path / "short.wav", np.random.default_rng(0).normal(0, 0.2, (7, 2)), 44100)
    page.upload(tmp_path / "short.wav", "sound")
    page.page.locator("#sound-title").get_by_text("Your own").wait_for()
    page.wait_for("reach", visit_to(opened(tmp_path / "short.wav", "sound")).reach(Choice(bounds=SOUND)), "sound")
    for card in page.page.locator("#sound-answer .ca-card").all():
        box = card.bounding_box()
        assert box["x"] + box["width"] <= width - 16
        text = card.locator(".ca-value")
        assert text.evaluate("e => e.scrollWidth <= e.clientWidth")
