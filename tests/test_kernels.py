"""Compiled kernels: threads, processes, the cache, and what only they do."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from contextlib import nullcontext
from functools import partial

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba", reason="Numba is not installed")
from numba import njit

import clipaware as ca
from clipaware import _careful
from clipaware._backends import numpy as backend
from clipaware._kernels import fast, formats, loops, threads
from clipaware._kernels import numba as kernels
from clipaware._problem import AT_ZERO, DOUBLE, HELD, REGULAR, SINGLE, UNREACHABLE, ZERO, Problem
from clipaware.reference import directions, norm64
from promises import NORM, ULP, assert_norm, assert_on_ray, share_that_grows
from tiers import in_test_all

MODES = ["equal", "at_most", "at_least"]
LANES = {"numba": kernels.solve, "operations": backend._solve_by_operations}


@pytest.fixture
def restored_threads():
    before = threads.count()
    yield
    ca.set_threads(before)


def large(rows=64, n=5000, seed=0):
    """Enough elements for a call to be split over threads."""
    rng = np.random.default_rng(seed)
    x, delta = rng.random((rows, n), np.float32), rng.standard_normal((rows, n), np.float32)
    assert len(kernels.split(rows, n)) > 1 or threads.count() == 1
    return x, delta


def mixed(n, dtype):
    """Rows of every kind, and their eps."""
    rng = np.random.default_rng(n)
    x, delta = rng.random((9, n)).astype(dtype), directions("cauchy", 9, n, n).astype(dtype)
    delta[1], delta[2] = 0, np.abs(delta[2])
    x[2] = 1
    delta[3, ::2], delta[4] = 0, delta[4] * np.asarray(1e-30, dtype)
    delta[5] *= np.asarray(1e30, dtype)
    eps = np.array([0.3, 0.3, 0.3, 0.1, 0.4, 0.4, 0.0, 1e6, 0.9])
    return x, delta, eps


def problem_of(x, delta, eps, p, lower=0.0, upper=1.0):
    """In rows form, as a backend has it. A negative eps is a share of the reach, or of 100 where that is infinite."""
    lower, upper = (np.asarray(bound, x.dtype).reshape(1, -1) for bound in (lower, upper))
    problem = Problem(x, delta, np.ones((1, 1)), lower, upper, float(p))
    eps = np.broadcast_to(np.asarray(eps, float).reshape(-1, 1), (len(x), 1))
    return problem._replace(eps=np.where(eps < 0, -eps * np.nan_to_num(_careful.reach(problem), posinf=100), eps))


# In float32 each order that has code of its own is compiled by other tests, too.
@pytest.mark.parametrize(
    ("p", "dtype"),
    [
        *((p, "float64") for p in (2, 2.7, 3, math.inf)),
        *((p, "float32") for p in (1, 2, 2.7)),
        *in_test_all(*((p, "float64") for p in (1, 1.5, 4, 20)), *((p, "float32") for p in (1.5, 3, 4, 20, math.inf))),
    ],
)
@pytest.mark.parametrize("n", [700, *in_test_all(2, 9000)])
def test_kernels_agree_with_operations(n, p, dtype, monkeypatch):
    x, delta, eps = mixed(n, dtype)
    eps[8] *= ca.reach(x, delta, p=p)[8, 0]
    tolerance = 2e-6 if dtype == "float32" else 1e-12
    g = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
    lower, upper = np.full(n, -0.5, dtype), np.linspace(1, 2, n).astype(dtype)
    for bounds in ((0, 1), (None, 1), (lower, upper), (lower, None)):
        for mode in MODES:
            options = {"p": p, "bounds": bounds, "mode": mode}
            with monkeypatch.context() as patch:
                patch.setattr(backend, "kernels", lambda: None)
                eta = ca.rescale(x, delta, eps, **options)
                v = ca.perturb(x, delta, eps, **options)
                bars = ca.perturb_vjp(x, delta, eps, g, **options)
            np.testing.assert_allclose(ca.rescale(x, delta, eps, **options), eta, rtol=tolerance * 10)
            np.testing.assert_allclose(ca.perturb(x, delta, eps, **options), v, rtol=tolerance, atol=tolerance)
            for mine, theirs in zip(ca.perturb_vjp(x, delta, eps, g, **options), bars, strict=True):
                scale = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
                # An element at its kink may fall on either side, as rounding has it.
                off = np.abs(mine - theirs) > (2e-3 if dtype == "float32" else 1e-9) * scale
                assert off.mean() <= 2 / n, (off.sum(), scale)


def assert_same_solution(problem, mode, found, expected, rows):
    """These rows have the status of the careful lane, its scale as far as it is conditioned, and the norm promised."""
    (v, eta, status), (ideal, right, kind) = found, expected
    x, delta, eps, lower, upper = problem.arrays()
    np.testing.assert_array_equal(status[rows], kind[rows])
    np.testing.assert_array_equal(v[rows & (kind[:, 0] != REGULAR)], ideal[rows & (kind[:, 0] != REGULAR)])
    dtype = str(x.dtype)
    grows = share_that_grows(x, delta, right, problem.p, lower, upper)[:, None]
    grows = np.where(kind == REGULAR, grows, 1.0)
    # K is a number of this dtype, and so is each K*delta whose powers are added up.
    bound = (NORM[dtype] + ULP[dtype]) / np.maximum(grows, 1e-9) * np.abs(right)
    assert (np.abs(eta - right) <= bound)[rows].all(), (eta, right, bound)
    regular = rows & (kind[:, 0] == REGULAR)
    if regular.any():
        assert_norm(v[regular], x[regular], eps[regular, 0], problem.p, steps=1 if mode == "at_most" else 0.5)
    assert_on_ray(v[rows], x[rows], delta[rows], lower, upper)
    if mode == "at_most":
        assert (norm64(v[rows], x[rows], problem.p) <= eps[rows, 0]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 1.5, 2, 2.7, math.inf])
@pytest.mark.parametrize("lane", LANES)
def test_both_fast_lanes_agree_with_the_careful_lane(lane, p, dtype, monkeypatch):
    """What a fast lane takes, and what comes of all rows, is what the one text of the algorithm says."""
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    x, delta, eps = mixed(700, dtype)
    eps[8] *= -1
    arrays = np.full(700, -0.5), np.linspace(1, 2, 700)
    for bounds in ((0.0, 1.0), arrays, (arrays[0], np.inf)):
        problem = problem_of(x, delta, eps, p, *bounds)
        for mode in MODES:
            expected = _careful.solve(problem, mode, True, dtype)
            taken = LANES[lane](problem, mode, True, True)
            rows = taken[2][:, 0] >= 0
            assert rows[[0, 3, 8]].sum() >= 2
            assert_same_solution(problem, mode, taken, expected, rows)
            found = backend.solve(problem, mode, True, certify=True)
            assert_same_solution(problem, mode, found, expected, rows | True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("n", "p"), [(700, 1), (700, 2), (5000, 2.7), (700, math.inf), *in_test_all((5000, 2), (2, 40))]
)
def test_the_compiled_careful_lane_is_the_careful_lane(n, p, dtype):
    """Of more than a block, too; with delta of 1e-30 and 1e30, the latter no number in 16 bits."""
    x, delta, eps = mixed(n, "float64" if dtype == "float64" else "float32")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    with np.errstate(over="ignore"):
        x, delta = x.astype(kind), delta.astype(kind)
    eps[8] *= -1
    # How close the norm gets to eps, at eta and as stored.
    close, close_as_stored = (8 * ULP["float64"], DOUBLE.close) if dtype == "float64" else (8e-9, SINGLE.close)
    arrays = np.linspace(-0.5, -1, n), np.linspace(1, 2, n)
    for bounds in ((0.0, 1.0), arrays, (-np.inf, arrays[1])):
        problem = problem_of(x, delta, eps, p, *bounds)
        wide = problem.mapped(lambda a: a.astype(float))
        for mode in MODES:
            v, eta, status = _careful.solve(problem, mode, True, dtype)
            found = np.empty_like(x), np.empty_like(eta), np.full_like(status, fast.FLAGGED)
            kernels.solve_flagged(problem, mode, found)
            np.testing.assert_array_equal(found[2], status)
            grows = share_that_grows(wide.x, wide.delta, eta, p, wide.lower, wide.upper)[:, None]
            bound = close / np.maximum(grows, 1e-9) * np.abs(eta)
            assert ((np.abs(found[1] - eta) <= bound) | np.isnan(found[1] + 0 * eta)).all(), (found[1], eta)
            np.testing.assert_array_equal(np.isnan(found[1]), np.isnan(eta))
            searched = (status == REGULAR)[:, 0]
            np.testing.assert_array_equal(found[0][~searched].astype(float), v[~searched].astype(float))
            mine, theirs = (norm64(a[searched], x[searched], p) / problem.eps[searched, 0] - 1 for a in (found[0], v))
            assert (np.abs(mine) <= np.abs(theirs) + close_as_stored).all(), (mode, mine, theirs)
            if mode == "at_most":
                assert (mine <= 0).all()


def test_what_vanishes_beside_the_largest_element_counts_as_zero():
    """Both texts of the careful lane say so, of the reach and of the array alike."""
    x, delta = np.full((1, 2), 0.5), np.array([[1e299, 1e-250]])
    problem = problem_of(x, delta, np.full(1, 0.6), 2)
    for solve in (partial(_careful.solve, dtype="float64"), solved_compiled):
        v, _, status = solve(problem, "equal", True)
        np.testing.assert_array_equal(v, [[1.0, 0.5]])
        assert status == UNREACHABLE
    assert _careful.reach(problem) == ca.reach(x, delta) == 0.5


@pytest.mark.parametrize("lane", LANES)
def test_newton_may_take_more_steps_than_it_has(lane, monkeypatch):
    """Each step gets past one breakpoint or two, of which there are 25 before the root."""
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    x, delta = np.full((1, 28), 0.5), 10.0 ** (13 - np.arange(28))[None]
    eta = ca.rescale(x, delta, 13.3, p=1)
    np.testing.assert_allclose(norm64(np.clip(x + eta * delta, 0, 1), x, 1), 13.3, rtol=1e-14)
    assert (LANES[lane](problem_of(x, delta, np.full(1, 13.3), 1), "equal", False, True)[2] < 0).all()


def solved_compiled(problem, mode, write):
    found = np.empty_like(problem.x), np.empty((1, 1)), np.full((1, 1), fast.FLAGGED)
    kernels.solve_flagged(problem, mode, found)
    return found


def test_carefully_only_what_is_flagged():
    problem = problem_of(*mixed(700, "float32"), 2)
    found = v, eta, status = kernels.solve(problem, "equal", write=True)
    v[0], eta[0], status[0] = 7, 7, REGULAR
    kernels.solve_flagged(problem, "equal", found)
    assert (v[0] == 7).all()
    assert eta[0] == 7
    assert (status >= 0).all()


def ordinary(kind, rows, n, dtype):
    """What a fast lane is for."""
    rng = np.random.default_rng(n)
    x, delta = rng.random((rows, n)), rng.standard_normal((rows, n))
    if kind == "levels":  # a picture of 8 bits
        x = rng.integers(0, 256, (rows, n)) / 255
    if kind in ("signs", "levels"):
        delta = np.sign(delta)
    if kind == "cauchy":
        delta = rng.standard_cauchy((rows, n))
    if kind == "one-hot":
        delta = np.where(np.arange(n) == rng.integers(0, n, (rows, 1)), delta, 0)
    if kind == "sparse":
        delta = np.where(rng.random((rows, n)) < 0.01, delta, 0)
    return x.astype(dtype), delta.astype(dtype)


KINDS = ["gaussian", "signs", "levels", "cauchy", "one-hot", "sparse"]
ASKED = [(mode, write, certify) for mode in MODES for write, certify in ((True, False), (True, True), (False, True))]


def most_flagged(lane, kind, share, certified):
    """The share of rows that a lane may flag: none, but for what was measured, and a little more."""
    if not certified:
        return 0.04 if (lane, kind) == ("operations", "cauchy") else 0.0
    # A scale of float32 leaves a norm that is off by half a unit, and little more is allowed.
    return 0.06 if lane == "numba" else 0.72 if kind in ("signs", "levels") else 0.32


@pytest.mark.parametrize(("n", "p"), [(784, 1), (784, 2), (3072, 2), (3072, 3), (784, math.inf)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lane", LANES)
def test_fast_lanes_take_ordinary_rows(lane, kind, n, p):
    """Were they flagged, results would be right, and take many times as long."""
    for dtype in ("float32", "float64", *(("float16", ml_dtypes.bfloat16) if kind == "gaussian" else ())):
        for share in (0.02, 0.3, 0.97):
            problem = problem_of(*ordinary(kind, 50, n, dtype), -share, p)
            for mode, write, certify in ASKED:
                flagged = (LANES[lane](problem, mode, write, certify)[2] < 0).mean()
                most = most_flagged(lane, kind, share, certify or mode != "equal")
                assert flagged <= most, (dtype, share, mode, write, certify)


def not_ordinary(dtype, p):
    """Rows that no fast lane is for, by what is the matter with them; x, delta and eps."""
    rng = np.random.default_rng(0)
    x, delta = rng.random(784), rng.standard_normal(784)
    small, large = (1e-30, 1e30) if dtype == "float32" else (1e-270, 1e270)
    reach = norm64(np.where(delta > 0, 1.0, 0.0)[None].astype(dtype), x[None].astype(dtype), p)[0]
    with_nan = np.where(np.arange(784) == 5, np.nan, 0.0)
    return {
        "small delta": (x, delta * small, 0.3 * reach),
        "large delta": (x, delta * large, 0.3 * reach),
        "small eps": (x, delta, small),
        "tiny eps": (x, delta, 1e-39 if dtype == "float32" else 1e-309),
        "the reach": (x, delta, reach),
        "next to the reach": (x, delta, reach * (1 + 1e-6)),
        "no delta": (x, delta * 0, 0.3),
        "no eps": (x, delta, 0.0),
        "outside": (np.where(np.arange(784) == 5, 1.01, x), delta, 0.3),
        "NaN in x": (x + with_nan, delta, 0.3),
        "NaN in delta": (x, delta + with_nan, 0.3),
        "NaN for eps": (x, delta, np.nan),
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
@pytest.mark.parametrize("lane", LANES)
def test_what_is_not_ordinary_is_flagged_and_right(lane, p, dtype, monkeypatch):
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    cases = not_ordinary(dtype, p)
    x, delta, eps = (np.array(a) for a in zip(*cases.values(), strict=True))
    problem = problem_of(x.astype(dtype), delta.astype(dtype), eps, p)
    for mode, write, certify in ASKED:
        status = LANES[lane](problem, mode, write, certify)[2][:, 0]
        taken = [name for name, mine in zip(cases, status, strict=True) if mine >= 0]
        # Where the norm as written is right, or all elements must move, nobody asks for a scale.
        assert set(taken) <= {"the reach"}, (mode, write, certify)
    v, eta, status = backend.solve(problem, "equal", True, checked=False, certify=True)
    lost = np.array([name.startswith("NaN") for name in cases])
    assert np.isnan(v[lost]).all()
    assert np.isnan(eta[lost]).all()
    named = dict(zip(cases, status[:, 0].tolist(), strict=True))
    regular = ("small delta", "large delta", "small eps", "outside", "the reach")
    assert {name: named[name] for name in cases if not name.startswith("NaN")} == {
        **dict.fromkeys(regular, REGULAR),
        "tiny eps": AT_ZERO,
        "no eps": AT_ZERO,
        "no delta": ZERO,
        "next to the reach": UNREACHABLE,
    }
    # And through the API, which does not take NaN.
    fine = ~lost & (np.array(list(cases)) != "outside")
    some = Problem(*(a[fine] if len(a) > 1 else a for a in problem.arrays()), problem.p)
    v = ca.perturb(some.x, some.delta, some.eps[:, 0], p=p, unreachable="maximize")
    eta = ca.rescale(some.x, some.delta, some.eps[:, 0], p=p, unreachable="maximize")
    ideal, right, _ = _careful.solve(some, "equal", True, dtype)
    size = norm64(some.x, ideal, p)
    assert_norm(v[size > 0], some.x[size > 0], size[size > 0], p)
    np.testing.assert_array_equal(v[size == 0], some.x[size == 0])
    grows = share_that_grows(some.x, some.delta, right, p, 0.0, 1.0)[:, None]
    bound = (NORM[dtype] + ULP[dtype]) / np.maximum(grows, 1e-9) * right
    assert (np.abs(eta - right) <= bound).all(), (eta, right)
    for name in ("NaN in x", "NaN in delta", "outside"):
        with pytest.raises(ValueError, match=r"x has|x is|delta has|delta is"):
            ca.perturb(*(a.astype(dtype) for a in cases[name][:2]), cases[name][2], p=p)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cotangents_are_not_copied_to_the_size_of_x(dtype, monkeypatch):
    """One number for all, as of a sum; one row, as of weights that all samples share; or one for each."""
    problem = problem_of(*mixed(700, dtype), 2)
    _, eta, status = backend.solve(problem, "equal", False)
    row = np.random.default_rng(1).standard_normal(700).astype(dtype)
    monkeypatch.setattr(kernels, "groups", None)  # where rows are copied: a dense cotangent is not, either
    for g in (np.broadcast_to(row[0], problem.x.shape), np.broadcast_to(row, problem.x.shape)):
        found, expected = (backend.vjp(problem, eta, status, given) for given in (g, g.copy()))
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [2, 2.7, math.inf, *in_test_all(1, 1.5, 3, 4, 20)])
@pytest.mark.parametrize("n", [20_000, *in_test_all(5)])
def test_a_long_row_in_parts_is_the_same_row(n, p, dtype, monkeypatch, restored_threads):
    """One row's sweeps spread over threads; every kind of row, most of which are not long."""
    x, delta, eps = mixed(n, dtype)
    eps[8] *= -1
    delta[[0, 3, 8]] /= abs(delta[[0, 3, 8]]).max(axis=1, keepdims=True)  # so that no power of these is out of range
    problem = problem_of(x, delta, eps, p)
    ca.set_threads(2)

    def solved():
        rows = [problem.mapped(lambda a, k=k: a[k : k + 1] if len(a) > 1 else a) for k in range(len(x))]
        found = [(*kernels.solve(row, "equal", write=True), *kernels.reach(row)) for row in rows]
        return [np.concatenate(column) for column in zip(*found, strict=True)]

    v, eta, status, reach, fine = solved()
    monkeypatch.setattr(kernels, "LONG", max(1, n // 7))
    monkeypatch.setattr(kernels, "LARGE", 1)
    in_parts = solved()
    np.testing.assert_array_equal(in_parts[2], status)
    np.testing.assert_array_equal(in_parts[4], fine)
    taken = status[:, 0] >= 0
    assert taken[[0, 3]].all()
    assert taken.sum() >= 3 or p == 20  # the 20th powers of most of these rows overflow
    np.testing.assert_allclose(in_parts[1][taken], eta[taken], rtol=1e-6 if dtype == "float32" else 1e-13)
    np.testing.assert_allclose(in_parts[0][taken], v[taken], rtol=0, atol=2e-7 if dtype == "float32" else 1e-14)
    np.testing.assert_allclose(in_parts[3], reach, rtol=1e-14)


def test_a_long_row_that_hardly_moves(monkeypatch, restored_threads):
    """In Python a division by 0 is an error, where compiled code goes on with infinity and flags the row."""
    ca.set_threads(2)
    monkeypatch.setattr(kernels, "LONG", 1024)
    monkeypatch.setattr(kernels, "HUGE", 1)
    x, delta = np.full((1, 5000), 0.5), np.zeros((1, 5000))
    delta[0, 7] = 3e-162  # whose square, divided by the size of a sample, is 0
    v = ca.perturb(x, delta, 0.3)
    np.testing.assert_allclose(v[0, 6:9], [0.5, 0.8, 0.5], rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32"])
def test_a_long_row_is_converted_in_parts(dtype, monkeypatch, restored_threads):
    """To what it is computed in, and back: halves at once, and what is flagged before it is solved again."""
    ca.set_threads(2)
    rng = np.random.default_rng(0)
    x, delta = rng.random((3, 5000)).astype(dtype), rng.standard_normal((3, 5000)).astype(dtype)
    x[2, 7] = 1.1
    problem = problem_of(x, delta, np.full(3, 9.0), 2)

    def solved():
        found = kernels.solve(problem, "equal", write=True)
        before = found[2].copy()
        kernels.solve_flagged(problem, "equal", found)
        return before, *(a.astype(float) for a in found)

    whole = solved()
    monkeypatch.setattr(kernels, "LONG", 2 * loops.LANE)  # whole lanes, as it is: halves are tried in sums of float32
    monkeypatch.setattr(kernels, "HUGE", 1)
    for mine, expected in zip(solved(), whole, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6)
    assert whole[0].tolist() == [[REGULAR], [REGULAR], [fast.FLAGGED]]
    assert (whole[3] == REGULAR).all()
    assert_norm(whole[1].astype("float32"), np.minimum(x, x.dtype.type(1)), np.full(3, 9.0), 2, steps=5e3)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_is_converted_and_back(name):
    every = np.arange(2**16).astype(np.uint16)
    take, give = {
        "float16": (formats._from_float16, formats._to_float16),
        "bfloat16": (formats._from_bfloat16, formats._to_bfloat16),
    }[name]

    @njit
    def there_and_back(bits, wide, again):
        take(bits, wide)
        give(wide, again)

    with np.errstate(invalid="ignore"):
        expected = every.view(np.float16 if name == "float16" else ml_dtypes.bfloat16).astype(np.float32)
    for working in (np.float32, np.float64):
        wide, again, finite = np.empty(2**16, working), np.empty(2**16, np.uint16), np.isfinite(expected)
        there_and_back(every, wide, again)
        np.testing.assert_array_equal(wide[finite], expected[finite])
        np.testing.assert_array_equal(np.signbit(wide[finite]), np.signbit(expected[finite]))
        assert not np.isfinite(wide[~finite]).any()  # such rows are flagged
        np.testing.assert_array_equal(again[finite], every[finite])


def test_a_long_row_that_does_not_reach(monkeypatch, restored_threads):
    """The largest element is that of all parts, not more."""
    ca.set_threads(2)
    monkeypatch.setattr(kernels, "LONG", 3000)
    monkeypatch.setattr(kernels, "LARGE", 1)
    problem = problem_of(np.full((1, 20_000), 0.5), np.ones((1, 20_000)), 0.6, math.inf)
    v, eta, status = kernels.solve(problem, "equal", write=True)
    assert (v == 1).all()
    assert (eta[0, 0], status[0, 0]) == (0.5, UNREACHABLE)


def test_gradients_of_several_groups(monkeypatch):
    """Of halves, which are converted some rows at a time."""
    rng = np.random.default_rng(0)
    x, delta, g = (a.astype(np.float16) for a in (rng.random((6, 50)), *rng.standard_normal((2, 6, 50))))
    problem = problem_of(x, delta, 0.8, 2)
    _, eta, status = kernels.solve(problem, "equal", write=False)
    assert (status == REGULAR).all()
    given = problem, eta, status, g, np.arange(6.0)[:, None], (True, True, True)
    whole = kernels.vjp(*given)
    monkeypatch.setattr(kernels, "GROUP", 100)
    for mine, expected in zip(kernels.vjp(*given), whole, strict=True):
        if expected is not None:
            np.testing.assert_array_equal(mine, expected)


@njit
def powers(z, p, out):
    for i in range(z.size):
        out[i] = loops.power(z[i], p)


@njit
def whole_powers(z, p, out):
    for i in range(z.size):
        out[i] = loops.whole_power(z[i], p)


@pytest.mark.parametrize("p", [0.3, 1.0, 1.3, 2.7, 10.0, 50.0])
def test_power(p):
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.random(1000), np.exp(rng.uniform(-80, 80, 1000)), [0.0, 1.0, 2.0, 0.5, 1e-45, 3e38]])
    z = z.astype(np.float32)
    out = np.empty(z.size)
    powers(z, p, out)
    with np.errstate(over="ignore"):
        expected = z.astype(float) ** p
    usual = (expected > 1e-300) & (expected < 1e300)
    np.testing.assert_allclose(out[usual], expected[usual], rtol=3e-9)
    assert out[z == 0] == 0


@pytest.mark.parametrize("height", [1.0001, 2, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_search_takes_at_most_a_step_more_than_halving(dtype, height):
    """A norm with a single jump, which straight lines lead away from."""
    rules = kernels.rules_for(1.0, "equal", True, True, np.dtype(dtype))
    for jump in np.random.default_rng(0).uniform(1, 2, 20).astype(dtype).astype(float):
        tried = []

        def sweep(what, K, jump=jump, tried=tried):
            tried.append(K)
            return 1e-9 if jump > K else height, 0.0, 0.0

        _, gap, _, _ = fast.nearest(fast.LongRow(sweep, 9), 0, 1.0, 1.0, 0.1, 0.0, False, rules)
        assert abs(gap - min(1, height - 1)) < 1e-8
        below, above = (max(K for K in tried if jump > K), min(K for K in tried if jump <= K))
        assert above == jump == np.nextafter(np.dtype(dtype).type(below), np.dtype(dtype).type(4))
        sides = [jump > K for K in tried]
        outward = sides.index(not sides[0]) + 1
        first = sorted(fast.index_of(K, rules.single) for K in tried[outward - 2 : outward])
        assert len(tried) <= outward + math.ceil(math.log2(first[1] - first[0])) + 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("p", [5, 10, 63])
def test_whole_power(p, dtype):
    """By squaring, every product adds a rounding error; squares that are not needed may overflow."""
    z = np.random.default_rng(0).uniform(0.3, 3, 1000).astype(dtype)
    z[:4] = 0, 1, np.nan, 1e5
    with np.errstate(over="ignore"):
        expected = z.astype(float) ** p
    in_range = ~(expected > np.finfo(dtype).max)
    found = np.empty_like(z)
    whole_powers(z, float(p), found)
    np.testing.assert_allclose(found[in_range], expected[in_range], rtol=p * ULP[np.dtype(dtype).name])
    assert (found[~in_range] == np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_half(dtype):
    """Where nothing is rescaled, the result is the sum, rounded as the dtype is."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (4, 3000)
    scale = 2.0 ** torch.randint(-30, 12, shape, generator=generator)
    x, delta = ((torch.randn(shape, generator=generator) * scale).to(kind) for _ in range(2))
    delta[1], x[2] = delta[1] / 1000, delta[2] * 3  # ties and their neighbours
    v = ca.perturb(x, delta, 1e30, bounds=(None, None), mode="at_most")
    torch.testing.assert_close(v, (x.float() + delta.float()).to(kind), rtol=0, atol=0)


def test_threads_at_once_and_their_number(restored_threads):
    x, delta = large()
    ca.set_threads(1)
    expected, long = ca.perturb(x, delta, 5.0), ca.perturb(x.reshape(1, -1), delta.reshape(1, -1), 5.0)
    gradients = ca.perturb_vjp(x, delta, 5.0, x)
    failures = []

    def work():
        for _ in range(6):
            if not np.array_equal(ca.perturb(x, delta, 5.0), expected):
                failures.append("rows")
            if np.abs(ca.perturb(x.reshape(1, -1), delta.reshape(1, -1), 5.0) - long).max() > 2e-7:
                failures.append("long")
            if any(not np.array_equal(*pair) for pair in zip(ca.perturb_vjp(x, delta, 5.0, x), gradients, strict=True)):
                failures.append("gradients")

    for number in (1, 2, 5):
        ca.set_threads(number)
        assert threads.count() == number
        workers = [threading.Thread(target=work) for _ in range(16)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failures


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2"])
def test_number_of_threads_that_cannot_be(number):
    with pytest.raises(ValueError, match="expected a positive int or None"):
        ca.set_threads(number)


def test_an_error_in_a_thread_is_raised_in_the_caller(restored_threads):
    ca.set_threads(3)

    def work(piece):
        raise KeyError(piece)

    with pytest.raises(KeyError):
        threads.run(work, range(8))


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_waits_for_its_threads(fails, restored_threads):
    """Also for one that is still at work when nothing is left to take."""
    ca.set_threads(2)
    here, started, done = threading.current_thread(), threading.Event(), []

    def work(piece):
        if threading.current_thread() is here:
            assert started.wait(60)
        else:
            started.set()
            time.sleep(0.3)
            if fails:
                raise KeyError(piece)
        done.append(piece)

    with pytest.raises(KeyError) if fails else nullcontext():
        threads.run(work, range(4))
    assert len(done) == (3 if fails else 4)


def test_a_new_number_of_threads_has_all_of_them(restored_threads):
    """Whatever those before are still busy with."""
    ca.set_threads(2)
    here, begun, free = threading.current_thread(), threading.Event(), threading.Event()

    def first(piece):
        if threading.current_thread() is here:
            assert begun.wait(60)
            raise KeyError(piece)  # upon which the other is left alone
        begun.set()
        assert free.wait(60)

    with pytest.raises(KeyError):
        threads.run(first, range(2))
    ca.set_threads(2)
    met = threading.Barrier(2, timeout=60)
    try:
        threads.run(lambda piece: met.wait(), range(2))
    finally:
        free.set()


def in_a_process(queue):
    x, delta = large()
    queue.put(ca.perturb(x, delta, 5.0).sum())


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes(how, restored_threads):
    """Children that split their work, of a parent that has done so before."""
    ca.set_threads(2)
    x, delta = large()
    expected = ca.perturb(x, delta, 5.0).sum()
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads, which is the point
        children = [context.Process(target=in_a_process, args=(queue,)) for _ in range(2)]
        for child in children:
            child.start()
    sums = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=120)
    assert sums == [expected] * 2


class Noisy:
    """Pictures with noise on them, as a loader's worker makes them."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        import torch

        x, delta = (torch.from_numpy(a) for a in large(seed=index))
        return ca.perturb(x, delta, 5.0)


def test_in_a_data_loader():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ca.perturb(*large(), 5.0)  # the parent's own threads
    torch.ones(2_000_000).exp().sum()  # and PyTorch's
    data = Noisy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for index, v in enumerate(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)):
            assert torch.equal(v, data[index])


CALL = (
    "import numpy as np, clipaware as ca; v = ca.perturb(np.full(9, 0.5), np.ones(9), 0.6); print((v - 0.5).round(6))"
)


def run(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


if sysconfig.get_config_var("Py_GIL_DISABLED"):

    def test_the_interpreters_lock_stays_off():
        assert run(f"{CALL}; import sys; print(sys._is_gil_enabled())")[0].endswith("False")


@pytest.mark.parametrize(
    "before",
    [
        "",  # as it is
        "import sys; sys.modules['numba'] = None; ",  # not installed
        *in_test_all(
            "import numba.core.caching as c; c.CacheImpl._locator_classes = []; ",  # nowhere to write to
            # A disk that fills up.
            "import numba.core.caching as c\n"
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "c.IndexDataCacheFile.save = full; c.IndexDataCacheFile.load = lambda *_: None\n",
        ),
    ],
    ids=["as it is", "no Numba", "read-only", "full"],
)
def test_first_call_is_right_and_silent(before):
    assert run(before + CALL) == ("[0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2]", "")


def test_read_only_input_is_not_compiled_for_again():
    x, delta = large(8, 40_000)
    before = ca.perturb(x, delta, 5.0)
    count = len(fast.solve_rows.signatures)
    x.flags.writeable = delta.flags.writeable = False
    np.testing.assert_array_equal(ca.perturb(x, delta, np.broadcast_to(5.0, 8)), before)
    np.testing.assert_array_equal(ca.perturb(x[::-1], delta[::-1], 5.0)[::-1], before)
    assert len(fast.solve_rows.signatures) == count


def test_orders_without_code_of_their_own_share_it():
    single = np.dtype(np.float32)
    sweeps = {kernels.sweep_for(single, p, False, 0) for p in (2.7, 3.3, 64, 527.5)}
    whole = {kernels.sweep_for(single, p, False, 0) for p in (5, 10, 63.0)}
    assert len(sweeps) == len(whole) == 1
    assert len({*sweeps, *whole, kernels.sweep_for(single, 2.0, False, 0)}) == 3


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_largest_half_is_nearer_than_infinity(dtype):
    """Without bounds, the nearest norm may be that of the largest number, since the next array is infinite."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x, delta = np.full((1, 600), 0.9375 * largest).astype(dtype), np.ones((1, 600), dtype)
    v = ca.perturb(x, delta, 1.1 * (largest - float(x[0, 0])) * math.sqrt(600), bounds=(None, None))
    np.testing.assert_array_equal(v.astype(float), largest)


def test_status_of_compiled_rows():
    problem = problem_of(*mixed(700, "float64"), 2)
    status = kernels.solve(problem, "equal", write=False)[2][:, 0]
    assert status[[1, 2, 6, 7]].tolist() == [fast.FLAGGED_SOUND, UNREACHABLE, fast.FLAGGED, UNREACHABLE]
    assert (status[[0, 3, 4, 5, 8]] == REGULAR).all()
    status = backend.solve(problem, "equal", write=False)[2][:, 0]
    assert status[[1, 2, 6, 7]].tolist() == [ZERO, UNREACHABLE, AT_ZERO, UNREACHABLE]
    held = kernels.solve(problem, "at_least", write=False)[2][:, 0]
    assert held[[0, 3, 5]].tolist() == [HELD] * 3


@pytest.mark.parametrize("p", [1.5, 2, 3, 4])
def test_a_sample_that_misses_what_counts(p):
    """It leads so far to the right that sums are infinite, or everything is clipped."""
    n = 2**14
    assert fast.SAMPLE_FROM <= n
    delta = np.full((1, n), 1e-13, np.float32)
    delta[0, 5000:5100] = 100  # between two runs of the sample
    eta = ca.rescale(np.full((1, n), 0.5, np.float32), delta, 1.0, p=p)
    np.testing.assert_allclose(eta[0, 0], 0.01 / 100 ** (1 / p), rtol=1e-6)


def test_rows_that_are_not_solved_do_not_warn(monkeypatch):
    """They hold whatever was in memory before, here numbers that are too large for float16."""
    empty = np.empty

    def filled(*args, **options):
        array = empty(*args, **options)
        if array.dtype == np.float32:
            array.fill(1e30)
        return array

    monkeypatch.setattr(np, "empty", filled)
    x = np.full((2, 3), 2.0, np.float16)
    with pytest.raises(ValueError, match="outside its bounds"):
        ca.perturb(x, np.ones_like(x), 0.1)


@pytest.mark.parametrize("p", [1, 2])
def test_at_least_beyond_a_short_step(p, monkeypatch):
    """Newton's second step is one of 1e-4, across a kink: a scale that stopped there would hold what it must not."""
    upper = np.repeat([0.1, 0.100015, 1.0], [50, 49, 1]).astype(np.float32)
    x, eps = np.zeros((1, 100), np.float32), 0.10001 * 100 ** (1 / p)
    last = (eps**p - (upper[:-1].astype(float) ** p).sum()) ** (1 / p)
    delta = np.full_like(x, last / 1.001)
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(backend, "kernels", lambda: None)
            v = ca.perturb(x, delta, eps, p=p, bounds=(0, upper), mode="at_least")
        assert abs((v.astype(float) ** p).sum() ** (1 / p) / eps - 1) < 3e-7


@pytest.mark.parametrize("p", [2, math.inf])
def test_halves_next_to_the_largest(p):
    x, delta = np.array([[65000, 10]], np.float16), np.ones((1, 2), np.float16)
    assert np.isfinite(ca.perturb(x, delta, 900.0, p=p, bounds=(None, None))).all()


@pytest.mark.parametrize("p", [3, 528, *in_test_all(1, 1.5, 2, 4, math.inf)])
@pytest.mark.parametrize("lane", LANES)
def test_a_nearest_norm_far_from_eps(lane, p, monkeypatch):
    """One element goes one step or none. The power of either is far from that of eps."""
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    share = np.concatenate([np.linspace(0.3, 0.4995, 40), np.linspace(0.5005, 0.503, 40)])
    x, delta = np.full((80, 5), 0.125, np.float16), np.zeros((80, 5), np.float16)
    delta[:, 2] = 1
    step = float(np.spacing(np.float16(0.125)))
    moved = ca.perturb(x, delta, share * step, p=p).astype(float) - 0.125
    np.testing.assert_array_equal(moved[:, 2], np.where(share > 0.5, step, 0))


@pytest.mark.parametrize("lane", LANES)
def test_a_nearest_norm_whose_power_vanishes(lane, monkeypatch):
    """One element has moved as far as it can, by a sixteenth of eps, and the other one would go to twice eps."""
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    x, delta = np.array([[1024, 16]], np.float16), np.ones((1, 2), np.float16)
    upper = np.array([[2048, 16.03125]], np.float16)
    v = ca.perturb(x, delta, 0.51, p=30, bounds=(0, upper))
    np.testing.assert_array_equal(v, [[1024, 16.03125]])


@pytest.mark.parametrize("p", [1, *in_test_all(1.5, 2, 3)])
def test_few_equal_elements_among_many_that_are_still(p):
    """Their powers are added up with thousands of zeros, whose rounding errors would all be the same."""
    x, delta = np.zeros((300, 4096), np.float32), np.zeros((300, 4096), np.float32)
    delta[:, :64] = 1
    eps = np.random.default_rng(0).uniform(0.1, 0.2, 300)
    v = ca.perturb(x, delta, eps, p=p, bounds=(-1, 1))
    assert_norm(v, x, eps, p, tied=np.full(300, False))


def test_thousands_of_equal_lanes():
    """Their sums are equal, and so would be the rounding errors as these are added up."""
    n = 2**20 - 512
    x, delta = np.zeros((1, n)), np.ones((1, n))
    v = ca.perturb(x, delta, 330402.176, p=1, bounds=(-1, 1), mode="at_most")
    assert abs(v[0, 0] * n / 330402.176 - 1) < 1e-14
    assert v[0, 0] * n <= 330402.176
    x, delta = np.full((1, 10**6), 0.3), np.where(np.arange(10**6) % 2, 1.0, -1.0)[None]
    ca.perturb(x, delta, ca.reach(x, delta).ravel(), unreachable="raise")


@pytest.mark.parametrize("p", [1, math.inf])
@pytest.mark.parametrize("lane", LANES)
def test_a_scale_that_is_no_normal_number(lane, p, monkeypatch):
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    x, delta = np.zeros((1, 2), np.float32), np.full((1, 2), 1e22, np.float32)
    moved = ca.perturb(x, delta, 1e-24, p=p, bounds=(-1, 1))[0, 0]
    np.testing.assert_allclose(moved, 1e-24 if p > 1 else 5e-25, rtol=3e-7)


def test_the_reach_of_a_small_box():
    """Its room over delta is no number."""
    assert ca.reach(np.zeros(1), np.array([1e150]), bounds=(0, 1e-180)) == 1e-180


@pytest.mark.parametrize("lane", LANES)
def test_a_delta_that_is_held_may_be_of_any_scale(lane, monkeypatch):
    """Beside eps it is so small or so large that no number in units of both is its scale."""
    if lane == "operations":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    x, small, large = np.array([254.0, 253.0]), np.array([-8e48, 1e-200]), np.array([1e298, -1e122])
    left = ca.perturb(x, small, 1e233, bounds=(None, 255), mode="at_most")
    np.testing.assert_array_equal(left, x + small)
    kept = ca.perturb(x, large, 1e-7, p=15.7, bounds=(None, 255), mode="at_least")
    np.testing.assert_array_equal(kept, [255, -1e122])


def test_careful_rounding_to_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    rng = np.random.default_rng(0)
    v = rng.standard_normal(4000).astype(np.float32)
    v[:2000] = (v[:2000].view(np.int32) & ~0xFFFF | 0x8000).view(np.float32)  # ties
    np.testing.assert_array_equal(
        _careful.stored(v.astype(float), "bfloat16"), v.astype(ml_dtypes.bfloat16).astype(float)
    )


def test_rows_of_nan_have_gradients_of_nan():
    x, delta, g = np.full((2, 30), 0.5), np.ones((2, 30)), np.ones((2, 30))
    delta[0, 3] = np.nan
    problem = Problem(x, delta, np.full((1, 1), 0.3), np.zeros((1, 1)), np.ones((1, 1)), 2.0)
    _, eta, status = backend.solve(problem, "equal", False, checked=False)
    x_bar, delta_bar, *_ = backend.vjp(problem, eta, status, g)
    for bar in (x_bar, delta_bar):
        assert np.isnan(bar[0]).all()
        assert np.isfinite(bar[1]).all()


def test_bounds_of_each_long_row(monkeypatch, restored_threads):
    ca.set_threads(2)
    rng = np.random.default_rng(0)
    x, delta = rng.random((3, 5000)), rng.standard_normal((3, 5000))
    upper = np.array([[1.0], [1.2], [2.0]])
    expected = ca.perturb(x, delta, 15.0, bounds=(0, upper))
    monkeypatch.setattr(kernels, "LONG", 1000)
    monkeypatch.setattr(kernels, "LARGE", 1)
    np.testing.assert_allclose(ca.perturb(x, delta, 15.0, bounds=(0, upper)), expected, rtol=0, atol=1e-13)


def test_solutions_of_several_groups(monkeypatch):
    """Of arrays in another order, which are copied some rows at a time, each with an eps and bounds of its own."""
    rng = np.random.default_rng(0)
    x, delta = (np.asfortranarray(a, np.float16) for a in (rng.random((6, 50)), rng.standard_normal((6, 50))))
    eps, upper = np.linspace(0.2, 1.2, 6), np.linspace(1, 2, 6)[:, None].astype(np.float16)
    expected = ca.perturb(x, delta, eps, bounds=(0, upper))
    monkeypatch.setattr(kernels, "GROUP", 100)
    np.testing.assert_array_equal(ca.perturb(x, delta, eps, bounds=(0, upper)), expected)
