"""One problem, every framework: the same numbers as NumPy's, up to the rounding of the dtype."""

from __future__ import annotations

import math

import numpy as np
import pytest

import clipaware as ca
from clipaware.reference import KINDS, directions

# Not every mode with every order: frameworks that compile take seconds for each of them.
CASES = [*((p, "equal") for p in (1, 1.5, 2, 3, math.inf)), (1.5, "at_least"), (2, "at_most"), (math.inf, "at_most")]
ROWS, SHAPE = 7, (3, 6, 5)
# eps as a share of the reach: nothing, little, much, next to everything, everything, more, and far too much.
SHARES = np.array([0.0, 0.02, 0.5, 0.97, 1.0, 1.1, 1e3])

NEAR = (SHARES > 0.9) & (SHARES <= 1)
# v is in [-1, 1.5]. float64: sums of 90 numbers in another order move the scale by a few 1e-16. float32: an ulp at 1,
# and a polish that ends at any norm within 2e-7 of eps, in each of the two. Next to the reach but few elements still
# move and take all of that: in float32 30x as much. What eta is off by is v's, over elements of 0.1 and more.
V_ATOL = {"float64": 1e-13, "float32": np.where(NEAR, 1.2e-5, 4e-7)[:, None, None, None]}
ETA_RTOL = {"float64": 1e-12, "float32": np.where(NEAR, 1e-4, 4e-6)[:, None, None, None]}


def problem(kind, dtype):
    """x and delta of that dtype, as float64, and bounds per channel."""
    rng = np.random.default_rng(KINDS.index(kind))
    lower, upper = (np.array(a).reshape(3, 1, 1) for a in ([-1.0, 0.0, -0.25], [0.5, 1.0, 1.5]))
    x = lower + rng.random((ROWS, *SHAPE)) * (upper - lower)
    delta = directions(kind, ROWS, math.prod(SHAPE), 1).reshape(x.shape)
    if dtype == "float32":
        delta = np.where(abs(delta) < 1e-30, 0, delta)  # geometric directions go down to 1e-99
    x, delta = (a.astype(dtype).astype(float) for a in (x, delta))
    return np.clip(x, lower, upper), delta, (lower, upper)


def answers(kind, dtype, p, mode):
    """What NumPy says: eps, v, eta and reach."""
    x, delta, bounds = problem(kind, dtype)
    arrays, options = (x.astype(dtype), delta.astype(dtype)), {"p": p, "bounds": bounds}
    reach = ca.reach(*arrays, **options).astype(float)
    eps = reach.ravel() * SHARES
    found = (ca.perturb(*arrays, eps, mode=mode, **options), ca.rescale(*arrays, eps, mode=mode, **options), reach)
    return eps, *(a.astype(float) for a in found)


@pytest.fixture(scope="module")
def expected():
    """Of every problem, before a test may swap NumPy's kernels for its operations."""
    return {(kind, dtype, *case): answers(kind, dtype, *case) for kind in KINDS for dtype in V_ATOL for case in CASES}


@pytest.mark.parametrize("dtype", V_ATOL)
@pytest.mark.parametrize(("p", "mode"), CASES)
def test_values(expected, be, p, mode, dtype):
    for kind in KINDS:
        x, delta, bounds = problem(kind, dtype)
        eps, v, eta, reach = expected[kind, dtype, p, mode]
        options = {"p": p, "bounds": bounds, "dtype": dtype}
        np.testing.assert_allclose(be.reach(x, delta, **options), reach, rtol=1e-15 if dtype == "float64" else 2.5e-7)
        mine = be.perturb(x, delta, eps, mode=mode, **options).astype(float)
        # A GPU's kernels measure a norm in float32.
        single = 2 if be.name in ("cuda", "cupy") and dtype == "float32" else 1
        assert (np.abs(mine - v) <= V_ATOL[dtype] * single).all(), kind
        scale = be.rescale(x, delta, eps, mode=mode, **options).astype(float)
        assert (np.abs(scale - eta) <= ETA_RTOL[dtype] * eta).all(), kind


@pytest.mark.parametrize(("p", "mode"), CASES)
def test_gradients(expected, be, p, mode):
    # Not at 100% of the reach, which is the kink between what is reachable and what is not.
    some = SHARES != 1
    g = np.random.default_rng(2).standard_normal((ROWS, *SHAPE))[some]
    for kind in KINDS:
        x, delta, (lower, upper) = problem(kind, "float64")
        x, delta, eps = x[some], delta[some], expected[kind, "float64", p, mode][0][some]
        found = be.gradients(x, delta, eps, lower, upper, g, p=p, mode=mode)
        closed = ca.perturb_vjp(x, delta, eps, g, p=p, bounds=(lower, upper), mode=mode)
        for name, mine, theirs in zip(("x", "delta", "eps", "lower", "upper"), found, closed, strict=True):
            assert mine.shape == theirs.shape
            # A gradient in delta is as large as delta is small: its rounding is measured by the largest of its row.
            # Next to the reach they are ill-conditioned: 3e-11 is the most that was seen, in a sum over the batch.
            size = np.abs(theirs).reshape(len(theirs), -1).max(axis=1).reshape(-1, *(1,) * (theirs.ndim - 1))
            assert (np.abs(mine - theirs) <= 1e-9 * size).all(), (kind, name)
