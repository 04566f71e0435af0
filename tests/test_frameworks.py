"""One problem, every framework: what is promised of arrays and scales, and the closed form's gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

import clipaware as ca
from clipaware.reference import KINDS, directions, norm64
from promises import NORM, assert_norm, assert_on_ray, assert_scale, rows_of, share_that_grows

# Not every mode with every order: frameworks that compile take seconds for each of them.
CASES = [*((p, "equal") for p in (1, 1.5, 2, 3, math.inf)), (1.5, "at_least"), (2, "at_most"), (math.inf, "at_most")]
SHAPE = (3, 6, 5)
# eps as a share of the reach: nothing, little, much, next to everything, everything, more, and far too much.
SHARES = np.tile([0.0, 0.02, 0.5, 0.97, 1.0, 1.1, 1e3], len(KINDS))
LOWER, UPPER = (np.array(a).reshape(3, 1, 1) for a in ([-1.0, 0.0, -0.25], [0.5, 1.0, 1.5]))


def problem(dtype):
    """x and delta of that dtype, as float64: for every kind of direction a row per share of the reach."""
    rng = np.random.default_rng(0)
    rows, n = len(SHARES) // len(KINDS), math.prod(SHAPE)
    delta = np.concatenate([directions(kind, rows, n, 1) for kind in KINDS]).reshape(-1, *SHAPE)
    if dtype == "float32":
        delta = np.where(abs(delta) < 1e-30, 0, delta)  # geometric directions go down to 1e-99
    x = LOWER + rng.random(delta.shape) * (UPPER - LOWER)
    x, delta = (a.astype(dtype).astype(float) for a in (x, delta))
    return np.clip(x, LOWER, UPPER), delta


def corner_of(x, delta):
    return np.where(delta > 0, UPPER, np.where(delta < 0, LOWER, x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("p", "mode"), CASES)
def test_values(be, p, mode, dtype):
    x, delta = problem(dtype)
    options = {"p": p, "bounds": (LOWER, UPPER), "dtype": dtype}
    corner, plain = corner_of(x, delta), np.clip(x + delta, LOWER, UPPER)
    most, as_it_is = (norm64(rows_of(a), rows_of(x), p) for a in (corner, plain))
    reach = be.reach(x, delta, **options).ravel()
    np.testing.assert_allclose(reach, most, rtol=1e-15 if dtype == "float64" else 2.5e-7)
    eps = reach.astype(float) * SHARES
    v, eta = be.perturb(x, delta, eps, mode=mode, **options), be.rescale(x, delta, eps, mode=mode, **options)
    assert_on_ray(v, x, delta, LOWER, UPPER)
    norm = norm64(rows_of(v), rows_of(x), p)
    if mode == "at_most":
        assert (norm <= eps).all()
    # Delta is left alone where that is the answer; what is asked beyond the reach ends in the corner.
    margin = 4 * NORM[dtype]
    smaller, larger = as_it_is < eps * (1 - margin), as_it_is > eps * (1 + margin)
    held = {"equal": eps < 0, "at_most": smaller, "at_least": larger & (eps > 0)}[mode]
    missed = (eps > most * (1 + margin)) & ~held
    still, found = eps == 0, ~(held | missed | (eps == 0))
    assert (eta.ravel()[held] == 1).all()
    np.testing.assert_allclose(v[held], plain[held], rtol=0, atol=2.0**-23 if dtype == "float32" else 0)
    np.testing.assert_array_equal(v[missed], corner[missed])
    np.testing.assert_array_equal(v[still], x[still])
    assert (eta.ravel()[still] == 0).all()
    tied = np.repeat(np.array(KINDS) == "tied", 7)[found]
    assert_norm(v[found], x[found], eps[found], p, tied, steps=1 if mode == "at_most" else 0.5)
    assert_scale(eta[found], x[found], delta[found], eps[found], p, LOWER, UPPER, dtype)


@pytest.mark.parametrize(("p", "mode"), CASES)
def test_gradients(be, p, mode):
    x, delta = problem("float64")
    # Not at 100% of the reach, which is the kink between what is reachable and what is not.
    some = SHARES != 1
    x, delta = x[some], delta[some]
    options = {"p": p, "mode": mode}
    eps = ca.reach(x, delta, p=p, bounds=(LOWER, UPPER)).ravel() * SHARES[some]
    g = np.random.default_rng(2).standard_normal(x.shape)
    found = be.gradients(x, delta, eps, LOWER, UPPER, g, **options)
    closed = ca.perturb_vjp(x, delta, eps, g, bounds=(LOWER, UPPER), **options)
    eta = ca.rescale(x, delta, eps, bounds=(LOWER, UPPER), **options)
    condition = 1 / np.maximum(share_that_grows(x, delta, eta, p, LOWER, UPPER), 1e-4)
    for name, mine, theirs in zip(("x", "delta", "eps", "lower", "upper"), found, closed, strict=True):
        assert mine.shape == theirs.shape
        # A gradient in delta is as large as delta is small: its rounding is measured by the largest of its row. Those
        # of the bounds are sums over the batch, as ill-conditioned as its worst row.
        size = np.abs(theirs).reshape(len(theirs), -1).max(axis=1)
        bound = 1e-12 * (condition if len(theirs) == len(x) else condition.max()) * size
        assert (np.abs(mine - theirs) <= bound.reshape(-1, *(1,) * (theirs.ndim - 1))).all(), name
