"""The rows of the table of edge cases (docs/math.md), values and gradients, and what goes wrong elsewhere."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

import clipaware as ca
from clipaware._backends import numpy as numpy_backend
from clipaware.reference import naive_perturb, norm64

ORDERS = [1, 1.5, 2, 3, 10, math.inf]
rng = np.random.default_rng(0)
G = rng.standard_normal(5)
X = np.array([0.2, 0.0, 0.5, 1.0, 0.7])
D = np.array([0.5, -1.0, 0.0, 1.0, -0.3])  # elements: free, without room, not moving, without room, free


def gradients(be, x, delta, eps, g=G, **options):
    """(x, delta, eps, lower, upper) gradients with per-element bounds 0 and 1."""
    found = be.gradients(x, delta, np.asarray(eps, float), np.zeros_like(x), np.ones_like(x), g, **options)
    assert all(np.isfinite(a).all() for a in found)
    return found


@pytest.mark.parametrize("p", ORDERS)
def test_zero_delta(be, p):
    assert be.rescale(X, X * 0, 0.5, p=p) == 0
    np.testing.assert_array_equal(be.perturb(X, X * 0, 0.5, p=p), X)
    x_bar, *others = gradients(be, X, X * 0, 0.5, p=p)
    np.testing.assert_array_equal(x_bar, G)
    assert not any(a.any() for a in others)


@pytest.mark.parametrize("scale", [1e-40, 1.0, 300.0, 1e40])
@pytest.mark.parametrize("p", [*ORDERS, 400])
def test_slope_at_eps_zero_for_any_scale(be, p, scale):
    moving = abs(D[[0, 4]])
    expected = (G[[0, 4]] * D[[0, 4]]).sum() / norm64(moving[None], moving[None] * 0, p)[0]
    np.testing.assert_allclose(gradients(be, X, D * scale, 0.0, p=p)[2], expected, rtol=1e-12)


@pytest.mark.parametrize("p", ORDERS)
def test_eps_zero(be, p):
    for mode in ("equal", "at_most", "at_least"):
        assert be.rescale(X, D, 0.0, p=p, mode=mode) == 0
        np.testing.assert_array_equal(be.perturb(X, D, 0.0, p=p, mode=mode), X)
    x_bar, delta_bar, eps_bar, lower_bar, upper_bar = gradients(be, X, D, 0.0, p=p)
    np.testing.assert_array_equal(x_bar, G)
    assert not delta_bar.any()
    assert not lower_bar.any()
    assert not upper_bar.any()
    # The limit from the right, by a difference quotient.
    h = 1e-7
    slope = (be.perturb(X, D, h, p=p) @ G - X @ G) / h
    np.testing.assert_allclose(eps_bar, slope, rtol=1e-6)


def test_slope_of_equal_elements(be):
    """For p = inf several elements share the weight, and eta is eps over their size all the same."""
    delta, x = np.array([2.0, -2.0, 1.0, 2.0, 0.0]), np.full(5, 0.5)
    found = gradients(be, x, delta, 0.2, p=math.inf)
    np.testing.assert_allclose(found[2], (G * delta).sum() / 2, rtol=1e-12)
    shared = (G * delta).sum() / 2 / 3
    np.testing.assert_allclose(found[1], 0.1 * (G - np.array([1, -1, 0, 1, 0]) * shared), rtol=1e-12)


@pytest.mark.parametrize("p", ORDERS)
def test_no_room_at_all(be, p):
    x, delta = np.array([0.0, 1.0, 0.5]), np.array([-1.0, 2.0, 0.0])
    assert be.reach(x, delta, p=p) == 0
    np.testing.assert_array_equal(be.perturb(x, delta, 0.5, p=p), x)
    x_bar, delta_bar, eps_bar, lower_bar, upper_bar = gradients(be, x, delta, 0.5, G[:3], p=p)
    np.testing.assert_array_equal(x_bar, [0, 0, G[2]])
    np.testing.assert_array_equal(lower_bar, [G[0], 0, 0])
    np.testing.assert_array_equal(upper_bar, [0, G[1], 0])
    assert not delta_bar.any()
    assert eps_bar == 0
    assert (gradients(be, x, delta, 0.0, G[:3], p=p)[0] == G[:3]).all()


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("mode", ["equal", "at_least"])
def test_unreachable(be, p, mode):
    corner = np.array([1.0, 0.0, 0.5, 1.0, 0.0])
    eta = be.rescale(X, D, 10.0, p=p, mode=mode)
    np.testing.assert_allclose(eta, 0.7 / 0.3, rtol=1e-14)  # the smallest that clips everything
    np.testing.assert_array_equal(be.perturb(X, D, 10.0, p=p, mode=mode), corner)
    x_bar, delta_bar, eps_bar, lower_bar, upper_bar = gradients(be, X, D, 10.0, p=p, mode=mode)
    np.testing.assert_array_equal(x_bar, np.where(D == 0, G, 0))
    np.testing.assert_array_equal(lower_bar, np.where(D < 0, G, 0))
    np.testing.assert_array_equal(upper_bar, np.where(D > 0, G, 0))
    assert not delta_bar.any()
    assert eps_bar == 0

    assert np.isnan(be.rescale(X, D, 10.0, p=p, mode=mode, unreachable="nan")).all()
    assert np.isnan(be.perturb(X, D, 10.0, p=p, mode=mode, unreachable="nan")).all()
    for function in (be.perturb, be.rescale):
        with pytest.raises(ca.UnreachableError, match=r"sample 1: eps 10 > reach"):
            function(np.stack([X, X]), np.stack([D, D]), np.array([0.1, 10.0]), p=p, mode=mode, unreachable="raise")
    # Nothing is out of reach for at_most: what is small enough is left alone.
    v = be.perturb(X, D * 0.1, 10.0, p=p, mode="at_most", unreachable="raise")
    np.testing.assert_array_equal(v, np.clip(X + D * 0.1, 0, 1))


def test_unreachable_error_says_what_is_possible(be):
    with pytest.raises(ca.UnreachableError) as caught:
        be.perturb(np.stack([X, X, X]), np.stack([D, D * 0, D]), np.array([10.0, 0.1, 0.2]), unreachable="raise")
    np.testing.assert_array_equal(caught.value.rows, [0, 1])
    np.testing.assert_allclose(caught.value.reach, [math.hypot(0.8, 0.7), 0])
    # A zero delta is out of reach, unless nothing is asked of it.
    assert be.rescale(X, D * 0, 0.0, unreachable="raise") == 0


@pytest.mark.parametrize("p", ORDERS)
def test_held_at_one(be, p):
    v = np.clip(X + D, 0, 1)
    plain = norm64(v[None], X[None], p)[0]
    for mode, eps in (("at_most", plain * 1.01), ("at_least", plain * 0.9)):
        assert be.rescale(X, D, eps, p=p, mode=mode) == 1
        np.testing.assert_array_equal(be.perturb(X, D, eps, p=p, mode=mode), v)
        x_bar, delta_bar, eps_bar, lower_bar, upper_bar = gradients(be, X, D, eps, p=p, mode=mode)
        inside = np.array([True, False, True, False, True])
        np.testing.assert_array_equal(x_bar, np.where(inside, G, 0))
        np.testing.assert_array_equal(delta_bar, np.where(inside, G, 0))
        np.testing.assert_array_equal(lower_bar, np.where(~inside & (D < 0), G, 0))
        np.testing.assert_array_equal(upper_bar, np.where(~inside & (D > 0), G, 0))
        assert eps_bar == 0


@pytest.mark.parametrize("p", ORDERS)
def test_some_zeros_in_delta(be, p):
    eps = 0.1
    eta = be.rescale(X, D, eps, p=p)
    assert be.perturb(X, D, eps, p=p)[2] == X[2]
    x_bar, delta_bar, *_ = gradients(be, X, D, eps, p=p)
    assert x_bar[2] == G[2]
    np.testing.assert_allclose(delta_bar[2], eta[0] * G[2], rtol=1e-14)


@pytest.mark.parametrize("delta", [1.0, 0.3, 7.7])
@pytest.mark.parametrize("p", ORDERS)
def test_kink_counts_as_unclipped(be, p, delta):
    x, d = np.array([0.5]), np.array([delta])
    x_bar, _, eps_bar, _, upper_bar = gradients(be, x, d, 0.5, np.ones(1), p=p)
    assert x_bar == 1
    assert upper_bar == 0
    np.testing.assert_allclose(eps_bar, 1, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_no_warnings(be, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in ORDERS if be.eager and be.whole_samples else (2, math.inf):
            for delta in (D, D * 0, D * 1e-5, D * 1e4):
                for eps in (0.0, 1e-3, 0.5, 10.0):
                    assert np.isfinite(be.perturb(X, delta, eps, p=p, dtype=dtype)).all()


# --- what goes wrong elsewhere: one test per row that is not covered above --------------------------------------------


def uniform(rows, n, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((rows, n)).astype(dtype), rng.standard_normal((rows, n)).astype(dtype)


def test_case_1_and_2_scale_of_delta(be):
    x, delta = uniform(4, 784, "float64")
    for scale in (1e-150, 1e-12, 1e-11, 1e-10, 1.0, 1e150):
        np.testing.assert_allclose(norm64(be.perturb(x, delta * scale, 3.6), x, 2), 3.6, rtol=2e-14)
    x, delta = uniform(4, 784, "float32")
    for scale in (1e-38, 1e-20, 1e19, 1e37):
        v = be.perturb(x, delta * np.float32(scale), 3.6, dtype="float32")
        np.testing.assert_allclose(norm64(v, x, 2), 3.6, rtol=3e-7)


def test_case_5_unreachable_with_zeros(be):
    x, delta = uniform(2, 100, "float64")
    delta[:, ::3] = 0
    v = be.perturb(x, delta, 100.0)
    np.testing.assert_array_equal(v, np.where(delta > 0, 1, np.where(delta < 0, 0, x)))
    bars = be.gradients(x, delta, np.full((2, 1), 100.0), np.zeros(100), np.ones(100), np.ones((2, 100)))
    assert not bars[1].any()
    assert not bars[2].any()


def test_case_7_infinite_bounds(be):
    x, delta = uniform(4, 784, "float64")
    for bounds in ((None, None), (-math.inf, math.inf), (None, math.inf)):
        v = be.perturb(x, delta, 3.6, bounds=bounds)
        np.testing.assert_allclose(v, x + delta * 3.6 / np.linalg.norm(delta, axis=1, keepdims=True), atol=1e-15)
        assert (be.reach(x, delta, bounds=bounds) == math.inf).all()
    for bounds in ((0, None), (None, 1), (0, math.inf)):
        v = be.perturb(x, delta, 20.0, bounds=bounds)
        np.testing.assert_allclose(norm64(v, x, 2), 20, rtol=2e-14)
        assert (v >= 0).all() or bounds[0] is None
        assert (v <= 1).all() or bounds[1] != 1


@pytest.mark.needs("float16")
def test_case_8_float16(be):
    x, delta = uniform(3, 3072, "float16")
    for d in (delta, np.where(np.arange(3072) % 2, delta, 0).astype("float16")):
        v = be.perturb(x, d, 3.0, dtype="float16")
        np.testing.assert_allclose(norm64(v.astype(float), x.astype(float), 2), 3, rtol=1e-5)


@pytest.mark.needs("bfloat16")
def test_case_9_bfloat16(be):
    rng = np.random.default_rng(0)
    x, delta = (be.numpy(be.array(a, "bfloat16")) for a in (rng.random((1, 150528)), rng.standard_normal((1, 150528))))
    v = be.perturb(x, delta, 135.0, dtype="bfloat16")
    np.testing.assert_allclose(norm64(v.astype(float), x.astype(float), 2), 135, rtol=1e-6)


@pytest.mark.parametrize("eps", [1e-3, 0.01, 0.5])
def test_case_10_small_eps(be, eps):
    rng = np.random.default_rng(0)
    x, delta = rng.uniform(0.3, 0.7, (2, 150528)).astype("float32"), rng.standard_normal((2, 150528)).astype("float32")
    expected = eps / np.linalg.norm(delta.astype(float), axis=1)
    np.testing.assert_allclose(be.rescale(x, delta, eps, dtype="float32")[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(norm64(be.perturb(x, delta, eps, dtype="float32"), x, 2), eps, rtol=3e-7)


def test_case_11_eps_per_sample(be):
    x, delta = uniform(4, 4, "float64")  # as many samples as elements
    eps = np.array([0.1, 0.2, 0.3, 0.4])
    for shape in ((4,), (4, 1)):
        assert be.rescale(x, delta, eps.reshape(shape)).shape == (4, 1)
        np.testing.assert_allclose(norm64(be.perturb(x, delta, eps.reshape(shape)), x, 2), eps, rtol=2e-14)
        np.testing.assert_allclose(
            norm64(be.perturb(x, delta, be.array(eps.reshape(shape), "float64")), x, 2), eps, rtol=2e-14
        )


def test_case_13_empty_batches_and_one_dimension(be):
    empty = np.zeros((0, 3, 4))
    assert be.perturb(empty, empty, 1.0).shape == (0, 3, 4)
    assert be.rescale(empty, empty, 1.0).shape == (0, 1, 1)
    assert be.reach(empty, empty).shape == (0, 1, 1)
    assert be.perturb(np.zeros((3, 0)), np.zeros((3, 0)), 1.0).shape == (3, 0)
    assert (be.rescale(np.zeros((3, 0)), np.zeros((3, 0)), 1.0) == 0).all()
    assert be.rescale(X, D, 0.1).shape == (1,)


def test_case_16_linf_uses_absolute_values(be):
    x, delta = uniform(50, 20, "float64")
    delta[:, 0] = -10
    np.testing.assert_allclose(
        norm64(be.perturb(x, delta, 0.05, p=math.inf, bounds=(-9, 9)), x, math.inf), 0.05, rtol=2e-14
    )


def test_case_18_what_naive_scaling_delivers(be):
    x, delta = uniform(200, 784, "float64")
    for eps, naive in ((3.6, 3.34), (10.0, 7.87), (15.0, 10.09)):
        assert abs(norm64(naive_perturb(x, delta, eps), x, 2).mean() - naive) < 0.05
        np.testing.assert_allclose(norm64(be.perturb(x, delta, eps), x, 2), eps, rtol=2e-14)


def test_per_channel_bounds(be):
    """Pictures normalised per channel, the bounds that go with it, and float32 rounding at their edges."""
    rng = np.random.default_rng(0)
    mean = np.array([0.485, 0.456, 0.406], "float32")[:, None, None]
    std = np.array([0.229, 0.224, 0.225], "float32")[:, None, None]
    pixels = rng.integers(0, 256, (5, 3, 16, 16)).astype("float32") / np.float32(255)
    pixels[:, :, 0] = 0
    pixels[:, :, 1] = 1
    x = (pixels - mean) / std
    lower, upper = (0 - mean.astype(float)) / std, (1 - mean.astype(float)) / std
    delta = rng.standard_normal(x.shape).astype("float32")
    for bounds in ((lower, upper), (be.array(lower, "float32"), be.array(upper, "float32"))):
        v = be.perturb(x, delta, 30.0, bounds=bounds, dtype="float32")
        np.testing.assert_allclose(norm64(v.reshape(5, -1), x.reshape(5, -1), 2), 30, rtol=3e-7)
        assert (v >= lower.astype("float32")).all()
        assert (v <= upper.astype("float32")).all()


@pytest.mark.parametrize("p", [1, 1.5, 2, 10, math.inf])
def test_negative_zeros(be, p):
    x, delta = np.full((1, 3), 0.5), np.array([[1.0, -0.0, -0.5]])
    for eps in 0.98 * be.reach(x, delta, p=p)[:, 0], 99.0:
        np.testing.assert_array_equal(be.perturb(x, delta, eps, p=p), be.perturb(x, abs(delta) * [1, 0, -1], eps, p=p))


@pytest.mark.parametrize("p", [1, 1.5, 2, 4, 50, math.inf])
def test_directions_that_span_the_whole_range_of_the_dtype(be, p):
    for dtype, large, small in (("float32", 1e15, 1e-30), ("float32", 1e37, 1e-37), ("float64", 1e150, 1e-170)):
        x, delta = np.array([[0.9, 0.5, 0.5]], dtype), np.array([[large, 0.0, small]], dtype)
        reach = np.asarray(be.reach(x, delta, p=p, dtype=dtype), float)[0, 0]
        np.testing.assert_array_equal(
            be.perturb(x, delta, 1.2 * reach, p=p, dtype=dtype), np.array([[1, 0.5, 1]], dtype)
        )
        if p < 50:
            v = be.perturb(x, delta, 0.9 * reach, p=p, dtype=dtype)
            np.testing.assert_allclose(norm64(v, x, p), 0.9 * reach, rtol=3e-7 if dtype == "float32" else 2e-14)
    steps = np.geomspace(1e10, 1e-37, 40)[None].astype("float32")
    v = be.perturb(np.full((1, 40), 0.5, "float32"), steps, 99.0, p=p, dtype="float32")
    np.testing.assert_array_equal(v, np.ones((1, 40), "float32"))


@pytest.mark.needs("subnormal")
def test_mixed_scales_in_one_row(be):
    """One element is huge and clipped, what is left would underflow next to it."""
    for p in (1, 2, 50):
        for small in (1e-7, 1e-100, 1e-290):
            x, delta = np.array([0.5, 0.5]), np.array([1.0, small])
            eps = 0.5 * 1.2 ** (1 / p) if p < 50 else 0.502
            v = be.perturb(x, delta, eps, p=p)
            assert v[0] == 1
            np.testing.assert_allclose(norm64(v[None], x[None], p), eps, rtol=2e-14)
    v = be.perturb(np.array([0.5, 0.5]), np.array([1.0, 1e-40]), 0.6, dtype="float32")
    np.testing.assert_allclose(norm64(v[None], np.array([[0.5, 0.5]]), 2), 0.6, rtol=3e-7)


def test_at_most_next_to_the_reach(be):
    """Many small rooms beside a large one: in float32 their sum misses some, and the target seems out of reach."""
    x, delta = np.full((1, 4096), 2.9e-8, np.float32), np.full((1, 4096), -100, np.float32)
    x[0, 0], x[0, 17], delta[0, 17] = 1, 0.003, -0.1
    eps = math.fsum(x[0].astype(float)) * (1 - 2e-6)
    v = be.perturb(x, delta, eps, p=1, mode="at_most", dtype="float32")
    assert math.fsum(np.abs(v[0].astype(float) - x[0])) <= eps


@pytest.mark.parametrize(("p", "eps"), [(3, 1e-20), (10, 1e-5), (50, 1e-2)])
def test_gradients_of_held_samples_are_finite(be, p, eps):
    """w = (z/eps)^(p - 1) is not, and counts for nothing."""
    x, delta, g = np.full((1, 4), 0.5), np.array([[1, -1, 0.1, 0.2]]), np.ones((1, 4))
    bars = be.gradients(x, delta, np.full(1, eps), 0.0, 1.0, g, p=p, mode="at_least")
    np.testing.assert_array_equal(bars[0], [[0, 0, 1, 1]])
    np.testing.assert_array_equal(bars[1], [[0, 0, 1, 1]])
    assert [float(np.sum(bar)) for bar in bars[2:]] == [0, 1, 1]


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
def test_gradients_of_x_an_ulp_outside_are_those_on_the_bound(be, p):
    """An element that hardly moves, where it is outside, has no room for that."""
    x = np.array([[0.5, 1 + 2.0**-52, -(2.0**-54), 0.2, 0.7, 1 + 2.0**-52]])
    delta, g = np.array([[1, 1e-18, -1e-18, 0, -1, 2]]), np.arange(1.0, 7)[None]
    outside, on_it = (be.gradients(a, delta, np.full(1, 0.3), 0.0, 1.0, g, p=p) for a in (x, np.clip(x, 0, 1)))
    for bar, expected in zip(outside, on_it, strict=True):
        np.testing.assert_allclose(bar, expected, rtol=2.0**-50, atol=0)  # the two need not be solved in one lane


def test_gradients_of_nan_are_zero(be):
    x, delta, g = np.full((2, 3), 0.5), np.array([[1.0, -1, 2], [1, 2, 3]]), np.ones((2, 3))
    eps, options = np.array([9.0, 0.2]), {"unreachable": "nan"}
    bars = be.gradients(x, delta, eps, 0.0, 1.0, g, **options)
    alone = be.gradients(x[1:], delta[1:], eps[1:], 0.0, 1.0, g[1:], **options)
    for bar, expected in zip(bars[:3], alone[:3], strict=True):
        assert not np.any(bar[0])
        np.testing.assert_allclose(bar[1], expected[0])
    np.testing.assert_allclose(bars[3:], alone[3:])


@pytest.mark.parametrize("scale", [1e-40, 1e-29, 1e38])
@pytest.mark.parametrize("p", [1, 1.5, 2, 2.7, 10, math.inf])
def test_gradients_where_eta_is_no_float32(scale, p):
    rng = np.random.default_rng(3)
    box = 1e-6 if scale > 1 else 1e13 if scale > 1e-30 else 1
    x = (rng.random((3, 50)) * box).astype(np.float32)
    delta = (rng.uniform(-3, 3, (3, 50)) * scale).astype(np.float32)
    g, options = rng.standard_normal((3, 50)).astype(np.float32), {"p": p, "bounds": (0, box)}
    eps = 0.3 * ca.reach(x, delta, **options)[:, 0]
    mine = ca.perturb_vjp(x, delta, eps, g, **options)
    wide = ca.perturb_vjp(*(a.astype(float) for a in (x, delta, eps, g)), **options)
    assert not any(np.isnan(bar).any() for bar in mine)
    for i in (0, 2, 3, 4):
        # The rounding of eps and of delta may move an element over its kink.
        off = np.abs(mine[i] - wide[i]) > 1e-3 * np.abs(wide[i]).max()
        assert off.mean() < 0.02


@pytest.mark.parametrize("p", [1, 1.5, 2])
def test_reach_is_in_reach_whatever_its_rounding(be, p):
    """Many equal rooms beside a larger one, whose sums in float32 are off in one direction."""
    rng = np.random.default_rng(0)
    for n in (1000, 4096):
        x, delta = np.repeat(rng.uniform(0, 0.9, (200, 1)), n, axis=1).astype(np.float32), np.ones((200, n), np.float32)
        x[:, 0] = 0
        eps = be.reach(x, delta, p=p, dtype="float32")[:, 0]
        v = be.perturb(x, delta, eps, p=p, dtype="float32", unreachable="raise")
        # 8 ulp: as far as an eps may be beyond the reach. The sums are off by three of them at most.
        np.testing.assert_allclose(eps, norm64(np.ones_like(x), x, p), rtol=8 * 2.0**-23)
        np.testing.assert_allclose(norm64(v, x, p), eps, rtol=8 * 2.0**-23)


# --- what the fuzzer found (torture/) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_target_at_a_kink_with_almost_nothing_left_to_move(be, dtype):
    """Beyond the kink the slope is 1e-14 of what it was, and a step back from there is rounding."""
    x = np.array([[-0.6704232805019112, 0.8165273684684917, 0.08281173607912273, 0.22268286706596618]])
    delta = np.array([[0.00014970925592939596, -1000.0, -1000.0, 1000.0]])
    x, delta = (a.astype(dtype).astype(float) for a in (x, delta))
    kink = norm64(np.where(delta > 1, 1.0, np.where(delta < -1, -1.0, x)), x, 2)[0]
    for eps in kink * (1 + np.array([-4e-16, -2e-16, 0.0, 2e-16, 4e-16])):
        eta = float(be.rescale(x, delta, eps, bounds=(-1, 1), dtype=dtype)[0, 0])
        found = norm64(np.clip(x + eta * delta, -1, 1), x, 2)[0]
        np.testing.assert_allclose(found, eps, rtol=3e-7 if dtype == "float32" else 1e-14)
        v = be.perturb(x, delta, eps, bounds=(-1, 1), dtype=dtype)
        np.testing.assert_allclose(norm64(v, x, 2)[0], eps, rtol=3e-7 if dtype == "float32" else 1e-14)


def test_nan_for_unreachable_keeps_the_dtype(be):
    for dtype in ("float16", "bfloat16", "float32"):
        if dtype in be.dtypes:
            v = be.perturb(np.stack([X, X]), np.stack([D, D]), np.array([0.1, 10.0]), unreachable="nan", dtype=dtype)
            assert v.dtype.name == dtype
            assert np.isnan(v[1].astype(float)).all()
            assert np.isfinite(v[0].astype(float)).all()


@pytest.mark.parametrize("p", [1, 2, 5, 400, math.inf])
def test_eps_below_every_normal_number_counts_as_zero(be, p):
    for dtype, eps in (("float32", 1e-40), ("float64", 1e-310)):
        x = np.array([[0.0, 0.5, 1.0]])
        np.testing.assert_array_equal(be.perturb(x, np.ones((1, 3)), eps, p=p, dtype=dtype), x)
        assert be.rescale(x, np.ones((1, 3)), eps, p=p, dtype=dtype) == 0


def test_report_of_a_norm_far_below_eps(be):
    """The powers of 2/100 to 400 are none."""
    x, delta = np.full((1, 5), 0.5), np.array([[0.02, -0.01, 0.0, 0.02, 0.005]])
    found = ca.report(be.array(x, "float64"), be.array(delta, "float64"), 1.0, p=400, mode="at_most")
    np.testing.assert_allclose(np.asarray(be.numpy(found.norm), float), 0.02 * 2 ** (1 / 400), rtol=1e-13)


def test_at_most_of_a_grid_that_takes_long_to_leave(be):
    """eps is the norm of the array as stored, which stays the same down to a thousandth less than its scale."""
    grid = 1024 + np.arange(12) * 2.0**-42
    x, delta = np.stack([grid[[2, 3, 4]]]), np.array([[-1617.0, 44.0, 0.04]])
    eps = norm64(np.array([[grid[0], grid[11], grid[4]]]), x, 2)[0]
    v = be.perturb(x, delta, eps, mode="at_most", bounds=(grid[0], grid[11]))
    assert 0 < norm64(v, x, 2)[0] <= eps


def test_scales_near_the_largest_numbers(be):
    most = 1e299
    rng = np.random.default_rng(0)
    x, delta = rng.uniform(-0.5, 0.5, (1, 40)) * most, rng.choice([-0.5, 0.5], (1, 40)) * most
    eps = most * 1e-3
    v = be.perturb(x, delta, eps, p=math.inf, bounds=(-most, most), mode="at_most")
    found = abs(v / eps - x / eps).max()
    assert found <= 1
    assert found > 1 - 1e-12


@pytest.mark.needs("float16")
@pytest.mark.parametrize("p", [30, 2000])
def test_nearest_of_a_coarse_grid_for_a_large_order(be, p):
    """An array whose norm is a quarter more or less: its power overflows, or vanishes, and it is near all the same."""
    x, delta = np.ones((1, 4)), -np.array([[1.0, 0.5, 0.25, 0.125]])
    v = be.perturb(x, delta, 1.3e-3, p=p, dtype="float16")
    moved = norm64(v.astype(float), x, p)[0]
    assert abs(moved - 1.3e-3) <= 2.5e-4


def test_breakpoints_over_three_hundred_orders(be):
    """In units of the largest of delta, the last breakpoints are larger than any number."""
    rng = np.random.default_rng(0)
    delta = 10.0 ** rng.uniform(-250, 60, (1, 2600)) * rng.choice([-1, 1], (1, 2600))
    x = np.zeros_like(delta)
    for eps in (20.0, 35.0, 45.0):
        eta = float(be.rescale(x, delta, eps, bounds=(-1, 1))[0, 0])
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(norm64(np.clip(eta * delta, -1, 1), x, 2)[0], eps, rtol=1e-13)


def test_report_of_naive_scales_beyond_all_numbers(be):
    x, delta = np.zeros((1, 2)), np.array([[1e-10, -5e-11]])
    found = ca.report(be.array(x, "float64"), be.array(delta, "float64"), 1e300, p=math.inf, bounds=(-np.inf, np.inf))
    np.testing.assert_allclose(np.asarray(be.numpy(found.naive_norm), float), 1e300, rtol=1e-13)


@pytest.mark.needs("float16")
def test_subnormal_numbers_of_float16(be):
    """They are multiples of 2^-24 below 2^-14, where float32 is far from its own."""
    unit = 2.0**-24
    v = be.perturb(np.zeros((1, 1)), np.ones((1, 1)), 315.4 * unit, bounds=(-1, 1), p=10, dtype="float16")
    assert v.astype(float) == 315 * unit
    x, delta, lower = np.array([[0.0, 300 * unit]]), np.array([[1.0, -0.5]]), np.array([0, 169 * unit])
    for bound in (lower, be.array(lower, "float16")):
        v = be.perturb(x, delta, 0.25, bounds=(bound, 1), p=10, dtype="float16")
        np.testing.assert_array_equal(v.astype(float), [[0.25, 169 * unit]])


@pytest.mark.parametrize("p", [3, 10])
def test_reach_of_rooms_near_the_largest_numbers(be, p):
    """The reciprocal of such a room is a subnormal number, which is 0 to XLA and TensorFlow."""
    reach = be.reach(np.zeros((1, 2)), np.ones((1, 2)), p=p, bounds=(0, 2e38), dtype="float32")
    np.testing.assert_allclose(reach.astype(float), 2e38 * 2 ** (1 / p), rtol=1e-6)


def test_a_bound_of_minus_zero_is_not_kept_for_zero():
    """To the cache of bounds that are numbers the two are one, and each call is to have the same bits."""
    x, delta = np.zeros((1, 1)), -np.ones((1, 1))
    numpy_backend._number.cache_clear()
    signs = [np.signbit(ca.perturb(x, delta, 0.0, bounds=(low, 1))) for low in (-0.0, 0.0)]
    assert not any(signs)
