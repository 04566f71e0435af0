"""The norm that was asked for is the norm that is delivered."""

from __future__ import annotations

import math

import numpy as np
import pytest

import clipaware as ca
from clipaware.reference import directions, norm64, sort_rescale
from oracle import mp_rescale
from promises import NORM, assert_norm, assert_on_ray, assert_scale, share_that_grows

ORDERS = [1, 1.3, 2, 3, 10, 50, math.inf]
KINDS = ["gaussian", "cauchy", "lognormal", "tied"]
SHARES = np.array([0.02, 0.3, 0.7, 0.99, 0.9995])


def problem(kind, n, dtype, scale=1.0, seed=0):
    """One row per share of the reach."""
    rng = np.random.default_rng(seed)
    x = rng.random((len(SHARES), n)).astype(dtype)
    delta = (directions(kind, len(SHARES), n, seed) * scale).astype(dtype)
    return x, delta


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 7, 784, 20_000])
def test_norm(be, n, p, dtype):
    """Every kind of direction at every scale and share of the reach, a row each."""
    scales = [1e-30, 1.0, 1e30] if dtype == "float32" else [1e-150, 1.0, 1e150]
    variants = [(kind, scale) for kind in KINDS for scale in (scales if n < 10_000 else [1.0])]
    problems = [problem(kind, n, dtype, scale) for kind, scale in variants]
    x, delta = (np.concatenate(arrays) for arrays in zip(*problems, strict=True))
    tied = np.repeat([kind == "tied" for kind, _ in variants], len(SHARES))
    eps = be.reach(x, delta, p=p, dtype=dtype)[:, 0].astype(float) * np.tile(SHARES, len(variants))
    some = eps > 0
    v = be.perturb(x[some], delta[some], eps[some], p=p, dtype=dtype)
    assert v.dtype == x.dtype
    assert (v >= 0).all()
    assert (v <= 1).all()
    assert_norm(v, x[some], eps[some], p, tied[some])


@pytest.mark.parametrize("p", [2, math.inf])
def test_norm_of_long_rows(be, p):
    x, delta = problem("gaussian", 1_500_000, "float32")
    eps = np.asarray(be.reach(x, delta, p=p, dtype="float32"), np.float64)[:, 0] * SHARES
    assert_norm(be.perturb(x, delta, eps, p=p, dtype="float32"), x, eps, p)


@pytest.mark.long
@pytest.mark.needs("eager")  # programs and graphs have the same sums as in the test above, and take half a minute each
def test_norm_of_ten_million(be):
    rng = np.random.default_rng(0)
    x, delta = rng.random((1, 10_000_000), np.float32), rng.standard_cauchy((1, 10_000_000)).astype(np.float32)
    for eps in (0.01, 500.0):
        v = be.perturb(x, delta, eps, dtype="float32")
        assert abs(norm64(v, x, 2)[0] / eps - 1) <= 3e-7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", ORDERS)
def test_small_eps(be, p, dtype):
    x, delta = problem("gaussian", 3000, dtype)
    for bounds, scale in (((0, 1), 1), ((0, 255), 255)):
        x = x * np.asarray(scale, dtype)
        v = be.perturb(x, delta, 0.01, p=p, bounds=bounds, dtype=dtype)
        assert_norm(v, x, np.full(len(x), 0.01), p)


@pytest.mark.parametrize("p", [1, 1.3, 2, 3, 10, 50, math.inf])
def test_against_mpmath(be, p):
    rng = np.random.default_rng(3)
    x, delta = rng.random((6, 12)), directions("lognormal", 6, 12, 4)
    delta[:, 3] = 0
    x[:, 5] = 0.0
    x[:, 6] = 1.0
    eps = be.reach(x, delta, p=p)[:, 0] * np.array([0.01, 0.2, 0.6, 0.9, 0.99, 0.999])
    eta, v = be.rescale(x, delta, eps, p=p)[:, 0], be.perturb(x, delta, eps, p=p)
    for i in range(6):
        eta_mp, v_mp = mp_rescale(x[i], delta[i], eps[i], p, 0.0, 1.0)
        # Near the reach eta is ill-conditioned, v is not.
        assert abs(eta[i] / float(eta_mp) - 1) < 1e-12
        np.testing.assert_allclose(v[i], np.array(v_mp, float), rtol=0, atol=2e-15)


@pytest.mark.parametrize("p", [1, 2, 2.5, math.inf])
@pytest.mark.parametrize("mode", ["equal", "at_most", "at_least"])
def test_modes(be, mode, p):
    rng = np.random.default_rng(0)
    x, delta = rng.random((8, 50)), rng.standard_normal((8, 50)) * 0.3
    plain = norm64(np.clip(x + delta, 0, 1), x, p)
    eps = np.minimum(
        plain * np.array([0.5, 0.9, 0.999, 1.0, 1.001, 1.1, 1.3, 1.5]), 0.99 * ca.reach(x, delta, p=p)[:, 0]
    )
    v, eta = be.perturb(x, delta, eps, p=p, mode=mode), be.rescale(x, delta, eps, p=p, mode=mode)[:, 0]
    expected = {"equal": eps, "at_most": np.minimum(eps, plain), "at_least": np.maximum(eps, plain)}[mode]
    np.testing.assert_allclose(norm64(v, x, p), expected, rtol=2e-14)
    if mode != "equal":
        alone = plain < eps * (1 - 1e-12) if mode == "at_most" else plain > eps * (1 + 1e-12)
        assert alone.sum() >= 3
        assert (eta[alone] == 1).all()
        np.testing.assert_array_equal(v[alone], np.clip(x + delta, 0, 1)[alone])


@pytest.mark.parametrize("p", [1, 2, 7.5, math.inf])
def test_reach_is_reachable(be, p):
    rng = np.random.default_rng(0)
    for dtype in be.dtypes:
        x, delta = (
            np.asarray(be.numpy(be.array(a, dtype)), float) for a in (rng.random((20, 300)), rng.normal(size=(20, 300)))
        )
        reach = be.reach(x, delta, p=p, dtype=dtype)
        assert reach.dtype == (np.float64 if dtype == "float64" else np.float32)
        corner = np.where(delta > 0, 1.0, np.where(delta < 0, 0.0, x))
        np.testing.assert_allclose(reach[:, 0], norm64(corner, x, p), rtol=3e-7 if dtype != "float64" else 1e-14)
        v = be.perturb(x, delta, reach[:, 0], p=p, dtype=dtype, unreachable="raise")
        # The error's room is a few ulp: what is left to move is next to nothing.
        assert np.abs(norm64(np.asarray(v, float), x, p) / reach[:, 0] - 1).max() < (
            1e-3 if dtype == "bfloat16" else 1e-4
        )


@pytest.mark.parametrize("p", [1, 2, 10])
@pytest.mark.parametrize("ratio", [1.5, 10.0, 1e3])
def test_geometric_breakpoints(be, ratio, p):
    count = min(100, int(280 / math.log10(ratio)))
    delta = ratio ** -np.arange(count, dtype=float)[None]
    x = np.full((1, count), 0.5)
    for share in (0.3, 0.9, 0.99, 0.9999):
        eps = be.reach(x, delta, p=p)[0, 0] * share
        v = be.perturb(x, delta, eps, p=p)
        assert abs(norm64(v, x, p)[0] / eps - 1) <= 2e-14


def cluster(dtype, p, side, gap=0.0, others=0.1):
    """Rows of 1000 elements, 700 of which have their breakpoints within 1e-4 of t, and eps, which is the norm at t.

    At t they are all clipped, or none of them is: their breakpoints are on one `side` of it, beyond a `gap` of that
    1e-4. The `others` have moved by about this share of their room there.
    """
    rng = np.random.default_rng(0)
    t, sign = rng.uniform(0.5, 2, (6, 1)), rng.choice([-1.0, 1.0], (6, 1000))
    x = rng.uniform(0.1, 0.9, (6, 1000)).astype(dtype).astype(float)
    room = np.where(sign > 0, 1 - x, x)
    breaks = t * (1 + side * 1e-4 * rng.uniform(gap, 1, (6, 1000)))
    delta = sign * room * np.where(np.arange(1000) < 700, 1, rng.uniform(0.8, 1.2, (6, 1000)) * others) / breaks
    delta = delta.astype(dtype).astype(float)
    return x, delta, norm64(np.clip(x + t * delta, 0, 1), x, p)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 2, 2.7])
@pytest.mark.parametrize("side", [-1, 1, 0])
def test_a_cluster_of_breakpoints_at_the_root(be, side, p, dtype):
    """A step across it leaves an error of more than its square, which the norm of an array as written may hide."""
    x, delta, eps = cluster(dtype, p, side)
    v, eta = be.perturb(x, delta, eps, p=p, dtype=dtype), be.rescale(x, delta, eps, p=p, dtype=dtype)
    assert_norm(v, x, eps, p)
    assert_on_ray(v, x, delta, 0.0, 1.0)
    assert_scale(eta, x, delta, eps, p, 0.0, 1.0, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 2, 2.7])
@pytest.mark.parametrize("side", [-1, 1])
def test_gradients_in_a_cluster_of_breakpoints(be, side, p, dtype):
    """Of what is clipped at the scale of a sort, in float64. With another scale, hundreds of elements change sides."""
    # The less the others have moved, the worse the scale is conditioned: too badly for float32.
    x, delta, eps = cluster(dtype, p, side, gap=0.1, others=0.1 if dtype == "float64" else 0.8)
    g = np.random.default_rng(1).standard_normal(x.shape).astype(dtype).astype(float)
    eta = sort_rescale(x, delta, eps, p)
    bars = ca.perturb_vjp(*(be.array(a, dtype) for a in (x, delta)), eps, be.array(g, dtype), p=p)
    x_bar, delta_bar, eps_bar = (np.asarray(be.numpy(bar), float) for bar in bars[:3])
    room = np.where(delta > 0, 1 - x, x)
    free = eta * abs(delta) <= room
    weight = (np.where(free, eta * abs(delta), room) / eps[:, None]) ** (p - 1)
    S, D = ((np.where(free, a, 0)).sum(axis=1, keepdims=True) for a in (g * delta, weight * abs(delta)))
    pulled = S / D * np.sign(delta) * weight
    grows = share_that_grows(x, delta, eta, p, 0.0, 1.0)[:, None]
    # The scale is as uncertain as the norm over the share that grows, lambda as its sums; w_i <= 1.
    terms = np.where(free, abs(g * delta), 0).sum(axis=1, keepdims=True) / D
    off = (32 * NORM[dtype] / grows) * (1 + terms)
    assert (abs(eta * abs(delta) / room - 1) > 4 * NORM[dtype] / grows).all()  # no element is on both sides of its kink
    assert (abs(x_bar - np.where(free, g, pulled)) <= off).all()
    assert (abs(delta_bar - np.where(free, eta * (g - pulled), 0)) <= off * eta).all()
    np.testing.assert_allclose(eps_bar.reshape(-1, 1), S / D, rtol=0, atol=off.max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 1.5, 2, 6, 20, math.inf])
@pytest.mark.parametrize("kind", ["gaussian", "cauchy"])
def test_eta_and_reachability_near_the_reach(be, kind, p, dtype):
    """Where the polish of perturb would hide a wrong eta."""
    shares = np.array([0.5, 0.99, 0.999, 0.9999, 1.0, 1.0001, 1.001, 1.01])
    rng = np.random.default_rng(7)
    x = rng.random((len(shares), 3000)).astype(dtype)
    delta = directions(kind, len(shares), 3000, 7).astype(dtype)
    corner = np.where(delta < 0, 0.0, 1.0)
    reach = norm64(corner, x, p)
    eps = reach * shares
    eta = be.rescale(x, delta, eps, p=p, dtype=dtype).astype(float)
    v = np.clip(x.astype(float) + eta * delta.astype(float), 0, 1)
    np.testing.assert_allclose(norm64(v, x, p), np.minimum(eps, reach), rtol=1e-6 if dtype == "float32" else 2e-14)
    missed = np.isnan(be.rescale(x, delta, eps, p=p, dtype=dtype, unreachable="nan"))[:, 0]
    np.testing.assert_array_equal(missed, shares > 1)


@pytest.mark.parametrize("p", [1, 2, 2.7])
@pytest.mark.parametrize(("n", "size"), [(50, 1e-6), (50, 1e5), (20_000, 1.0)])
def test_eta_of_other_units_and_of_long_rows(be, n, size, p):
    """A unit of eps that is not 1, and a start from a sample: where the polish of perturb would hide a wrong eta."""
    rng = np.random.default_rng(3)
    x, delta = rng.random((4, n)) * size, rng.standard_normal((4, n))
    eps = np.array([0.05, 0.2, 0.3, 0.45]) * size * n ** (1 / p)
    eta = be.rescale(x, delta, eps, p=p, bounds=(0, size))
    v = np.clip(x + eta * delta, 0, size)
    assert ((v == 0) | (v == size)).any(axis=1).all()
    np.testing.assert_allclose(norm64(v, x, p), eps, rtol=2e-13)


@pytest.mark.parametrize("p", [1, 2])
def test_eta_beyond_a_short_step(be, p):
    """Newton's second step is one of 1e-4, across a kink beyond which there is little left to grow."""
    upper = np.repeat([0.1, 0.100015, 1.0], [50, 49, 1]).astype(np.float32)
    eps = 0.10001 * 100 ** (1 / p)
    eta = be.rescale(np.zeros((1, 100)), np.ones((1, 100)), eps, p=p, bounds=(0, upper), dtype="float32").item()
    last = (eps**p - (upper[:-1].astype(float) ** p).sum()) ** (1 / p)
    assert eta == pytest.approx(last, rel=1e-4)


def test_eta_of_small_elements(be):
    """Powers of float32 are not taken in float32, of which even p is none: here that would be off by 2.6e-7."""
    eta = be.rescale(np.full((1, 3000), 0.5), np.full((1, 3000), 2.0**-8), 0.01, p=2.1, dtype="float32").item()
    assert eta == pytest.approx(2.56 / 3000 ** (1 / 2.1), rel=1.3e-7)


def test_eta_of_much_that_is_small(be):
    """A hundred sums that each are less than half of the last digit of another one, in float32."""
    x, delta = np.full((1, 2**17), 0.5, np.float32), np.full((1, 2**17), 1.9 * 2.0**-17, np.float32)
    delta[0, :1024] = 256
    eta = be.rescale(x, delta, 0.3, p=1, dtype="float32")
    np.testing.assert_allclose(eta, 0.3 / delta.sum(dtype=float), rtol=5e-7)


@pytest.mark.parametrize("p", [1, 2])
def test_equal_elements(be, p):
    """Sums of many equal numbers, whose rounding errors do not average out."""
    rng = np.random.default_rng(0)
    for n in (300, 4096, 20_000):
        x, delta = np.full((20, n), 0.5, np.float32), np.repeat(rng.uniform(0.1, 1, (20, 1)), n, axis=1)
        eps = rng.uniform(0.05, 0.4, 20) * n ** (1 / p)
        assert_norm(be.perturb(x, delta, eps, p=p, dtype="float32"), x, eps, p, tied=True)


@pytest.mark.parametrize(("dtype", "sigma"), [("float32", 6), ("float64", 15)])
@pytest.mark.parametrize("p", [10, 50])
def test_eta_of_very_heavy_tails(be, p, dtype, sigma):
    """Where many passes are needed and sums underflow on the way."""
    rng = np.random.default_rng(0)
    x = rng.random((60, 200)).astype(dtype)
    delta = (rng.choice([-1, 1], (60, 200)) * rng.lognormal(0, sigma, (60, 200))).astype(dtype)
    for share in (0.99, 0.999, 0.9999):
        eps = be.reach(x, delta, p=p, dtype=dtype)[:, 0].astype(float) * share
        eta = be.rescale(x, delta, eps, p=p, dtype=dtype).astype(float)
        v = np.clip(x.astype(float) + eta * delta.astype(float), 0, 1)
        np.testing.assert_allclose(norm64(v, x, p), eps, rtol=1e-6 if dtype == "float32" else 1e-13)


@pytest.mark.needs("subnormal")
@pytest.mark.parametrize("p", [1, 2, 4.5, 10])
def test_subnormal_delta(be, p):
    x, delta = np.array([[0.5, 0.4, 0.3]], np.float32), np.array([[1, -2, 3]], np.float32)
    expected = be.perturb(x, delta, 1e-3, p=p, dtype="float32")
    tiny = (delta * 1e-40).astype(np.float32)  # to four digits
    np.testing.assert_allclose(be.perturb(x, tiny, 1e-3, p=p, dtype="float32"), expected, rtol=0, atol=2e-6)
