"""What the user holds is rounded to a dtype: the nearest norm that the ray has there, and at_most without exception."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

import clipaware as ca
from clipaware.reference import bisect_rescale, norm64
from conftest import NUMPY_DTYPES
from tiers import in_test_all


@cache
def nearest_by_brute_force(n, p, dtype):
    """Rows of half precision, their eps, and how near to it the nearest array on each ray comes."""
    rng, kind = np.random.default_rng(n), NUMPY_DTYPES[dtype]
    delta = np.concatenate([rng.standard_normal((6, n)), rng.choice([-1.0, 1.0, 2.0], (6, n))])
    x, delta = (a.astype(kind).astype(float) for a in (rng.random((12, n)), delta))
    reach = norm64(np.where(delta > 0, 1.0, np.where(delta < 0, 0.0, x)), x, p)
    eps = reach * np.tile([0.03, 0.1, 0.3, 0.5, 0.8, 0.95], 2)
    x, delta, eps = (a[eps > 0] for a in (x, delta, eps))
    eta, gaps = bisect_rescale(x, delta, eps, p), []
    for i in range(len(eps)):
        # Every array on the ray near the solution, by a grid much finer than its steps.
        grid = eta.ravel()[i] * np.linspace(0.9, 1.1, 40_001)[:, None]
        ray = np.clip(x[i] + grid * delta[i], 0, 1).astype(np.float32).astype(kind).astype(float)
        gaps.append(np.abs(norm64(ray, np.broadcast_to(x[i], ray.shape), p) - eps[i]).min())
    return x, delta, eps, np.array(gaps)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("p", [1, 1.5, 2, 5, math.inf])
@pytest.mark.parametrize("n", [3, 60, *in_test_all(1, 12)])
def test_nearest_norm_by_brute_force(be, n, p, dtype):
    x, delta, eps, best = nearest_by_brute_force(n, p, dtype)
    v = be.perturb(x, delta, eps, p=p, dtype=dtype).astype(float)
    assert (np.abs(norm64(v, x, p) - eps) <= best * (1 + 1e-6) + 1e-8 * eps).all()


@cache
def nearest_of_ties(p):
    """A constant picture and sign noise: the norm moves in few large steps."""
    x = np.full((4, 500), 0.6, np.float32)
    delta = np.random.default_rng(0).choice([-1.0, 1.0], (4, 500)).astype(np.float32)
    eps, gaps = np.array([0.011, 0.013, 0.017, 0.019]) * 500 ** (1 / p), []
    for i in range(4):
        steps = (eps[i] / 500 ** (1 / p) * (1 + np.linspace(-1e-4, 1e-4, 20_001))).astype(np.float32)[:, None]
        gaps.append(np.abs(norm64(x[i] + steps * delta[i], np.broadcast_to(x[i], (20_001, 500)), p) - eps[i]).min())
    return x, delta, eps, np.array(gaps)


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_ties_in_float32_end_at_the_nearest_norm(be, p):
    x, delta, eps, best = nearest_of_ties(p)
    v = be.perturb(x, delta, eps, p=p, dtype="float32")
    assert (np.abs(norm64(v, x, p) - eps) <= best * (1 + 1e-9) + 1e-15).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("n", [1, 5, 300, *in_test_all(2, 33)])
def test_at_most_never_exceeds(be, n, dtype):
    """100,000 random rows in all, of every dtype and several norms, measured in float64."""
    rng = np.random.default_rng(n)
    rows = 420
    for p in (1, 1.7, 2, 3, 9.0, math.inf):
        kind = NUMPY_DTYPES[dtype]
        x = (rng.random((rows, n)) * rng.choice([0.0, 1.0, 1.0], (rows, n))).astype(kind)
        delta = (rng.standard_normal((rows, n)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))).astype(kind)
        eps = 10.0 ** rng.uniform(-3, 0.5, rows)
        # A third of them are exactly as large as the perturbation already is.
        plain = norm64(np.clip(x + delta, 0, 1).astype(kind).astype(float), x.astype(float), p)
        eps = np.where((np.arange(rows) % 3 == 0) & (plain > 0), plain, eps)
        v = be.perturb(x, delta, eps, p=p, mode="at_most", dtype=dtype)
        moved = np.abs(v.astype(float) - x.astype(float))
        norms = moved.max(axis=1) if p == math.inf else (moved**p).sum(axis=1) ** (1 / p)
        assert (norms <= eps).all(), (norms / eps).max() - 1
        assert (norm64(v.astype(float), x.astype(float), p) <= eps).all()
        # And it is not by giving up: most rows that were too large end close to their eps.
        if n >= 33 and dtype in ("float32", "float64"):
            large = (plain > eps * 1.01) & (eps > 0.05)
            assert (norms[large] > eps[large] * (1 - 1e-5)).mean() > 0.9


@pytest.mark.needs("bfloat16")
def test_eps_is_not_rounded_to_the_dtype(be):
    x, delta = np.full((1, 4096), 0.5), np.random.default_rng(0).choice([-1.0, 1.0], (1, 4096))
    eps = 0.1  # bfloat16 has 0.10009765625
    v = be.perturb(x * 0, abs(delta), eps, dtype="bfloat16").astype(float)
    coarse = be.perturb(x * 0, abs(delta), 0.10009765625, dtype="bfloat16").astype(float)
    assert abs(norm64(v, x * 0, 2)[0] - eps) <= abs(norm64(coarse, x * 0, 2)[0] - eps)


def test_rescale_is_not_polished():
    rng = np.random.default_rng(0)
    x, delta = rng.random((3, 400)).astype(np.float16), rng.standard_normal((3, 400)).astype(np.float16)
    exact = ca.rescale(x.astype(float), delta.astype(float), 0.7)
    np.testing.assert_allclose(ca.rescale(x, delta, 0.7), exact, rtol=2.0**-11)
