"""Gradients three ways: the closed form, finite differences, and autodiff through the paper's sort. And mpmath."""

from __future__ import annotations

import math

import numpy as np
import pytest

import clipaware as ca
from clipaware.reference import directions, sort_rescale
from oracle import mp_gradients

ORDERS = [1, 1.5, 2, 3, 10, math.inf]
NAMES = ("x", "delta", "eps", "lower", "upper")


def problem(p, kind="gaussian", rows=4, n=12, seed=0, share=None):
    rng = np.random.default_rng(seed)
    x, delta = rng.uniform(0.05, 0.95, (rows, n)), directions(kind, rows, n, seed)
    lower, upper = rng.uniform(-0.2, 0, (rows, n)), rng.uniform(1, 1.2, (rows, n))
    share = np.linspace(0.1, 0.9, rows)[:, None] if share is None else share
    eps = ca.reach(x, delta, p=p, bounds=(lower, upper)) * share
    return x, delta, eps, lower, upper, rng.standard_normal((rows, n))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("kind", ["gaussian", "lognormal"])
def test_against_finite_differences(be, p, kind):
    *arguments, g = problem(p, kind)
    found = be.gradients(*arguments, g, p=p)
    for i, (name, argument) in enumerate(zip(NAMES, arguments, strict=True)):
        direction = np.random.default_rng(i).standard_normal(argument.shape)
        h = 1e-7

        def value(step, i=i, direction=direction):
            moved = [a + (step * direction if j == i else 0) for j, a in enumerate(arguments)]
            return (ca.perturb(*moved[:3], bounds=tuple(moved[3:]), p=p) * g).sum()

        numeric = (value(h) - value(-h)) / (2 * h)
        np.testing.assert_allclose((found[i] * direction).sum(), numeric, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 10])
def test_against_autodiff_through_the_sort(be, p):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    *arguments, g = problem(p, rows=5, n=40)
    inputs = [torch.tensor(a, requires_grad=True) for a in arguments]
    x, delta, eps, lower, upper = inputs
    eta = sort_rescale(x, delta, eps[:, 0], p, lower, upper).reshape(-1, 1)
    # Not torch.clamp, whose gradient at a bound is its own affair.
    moved = x + eta * delta
    v = torch.where(moved > upper, upper, torch.where(moved < lower, lower, moved))
    v.backward(torch.tensor(g))
    for name, found, expected in zip(NAMES, be.gradients(*arguments, g, p=p), inputs, strict=True):
        np.testing.assert_allclose(found, expected.grad.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("p", [1, 1.5, 2, 10, math.inf])
def test_against_mpmath(be, p):
    *arguments, g = problem(p, rows=2, n=5, seed=3)
    found = be.gradients(*arguments, g, p=p)
    for row in range(2):
        x, delta, eps, lower, upper = (a[row] for a in arguments)
        expected = mp_gradients(x, delta, float(eps[0]), p, lower, upper, g[row])
        for name, mine, theirs in zip(NAMES, found, expected, strict=True):
            np.testing.assert_allclose(
                mine[row], np.array(theirs, float).reshape(-1), rtol=1e-11, atol=1e-12, err_msg=name
            )


@pytest.mark.parametrize("p", ORDERS)
def test_gradients_have_the_shape_of_their_argument(be, p):
    rng = np.random.default_rng(0)
    x, delta, g = (rng.uniform(0.1, 0.9, (4, 3, 5, 6)) * s for s in (1, 1, 1))
    delta = delta - 0.5
    full = [np.zeros_like(x), np.ones_like(x)]
    eps = np.full((4, 1, 1, 1), 0.7)
    reference = be.gradients(x, delta, eps, *full, g, p=p)
    for lower_shape, upper_shape in (
        ((), (3, 1, 1)),
        ((1,), (4, 1, 1, 1)),
        ((6,), (1, 3, 5, 6)),
        ((4, 1, 5, 1), (5, 6)),
    ):
        found = be.gradients(x, delta, eps[:, 0, 0, 0], np.zeros(lower_shape), np.ones(upper_shape), g, p=p)
        assert found[2].shape == (4,)
        np.testing.assert_allclose(found[2], reference[2].ravel())
        for bar, whole, shape in zip(found[3:], reference[3:], (lower_shape, upper_shape), strict=True):
            assert bar.shape == shape
            padded = (1,) * (4 - len(shape)) + shape
            summed = whole.sum(axis=tuple(i for i in range(4) if padded[i] == 1), keepdims=True).reshape(shape)
            np.testing.assert_allclose(bar, summed, rtol=1e-10, atol=1e-12)
    # One eps for all samples.
    found = be.gradients(x, delta, np.asarray(0.7), *full, g, p=p)
    assert found[2].shape == ()
    np.testing.assert_allclose(found[2], reference[2].sum(), rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_bound_adds_up_is_not_rounded_to_half_precision(be, dtype):
    rng = np.random.default_rng(0)
    x, delta, g = rng.random((9, 3, 400)), rng.standard_normal((9, 3, 400)), rng.standard_normal((9, 3, 400))
    given = [be.array(a, dtype) for a in (x, delta, g, np.zeros(()), np.ones((3, 1)))]
    x, delta, g, lower, upper = (be.numpy(a).astype(float) for a in given)
    *_, expected_lower, expected_upper = ca.perturb_vjp(x, delta, 9.0, g, bounds=(lower, upper))
    *_, lower_bar, upper_bar = ca.perturb_vjp(*given[:2], 9.0, given[2], bounds=tuple(given[3:]))
    for found, expected in ((lower_bar, expected_lower), (upper_bar, expected_upper)):
        np.testing.assert_allclose(be.numpy(found), expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("axis", [None, 1, (2, 3), (0, 1, 3), -1])
def test_gradients_for_any_axis(be, axis):
    rng = np.random.default_rng(0)
    x, delta, g = (
        rng.uniform(0.1, 0.9, (2, 3, 4, 5)),
        rng.standard_normal((2, 3, 4, 5)),
        rng.standard_normal((2, 3, 4, 5)),
    )
    eps = 0.5 * ca.reach(x, delta, axis=axis)
    found = be.gradients(x, delta, eps, np.zeros(()), np.ones(()), g, axis=axis)
    for i, argument in enumerate((x, delta, eps)):
        direction = np.random.default_rng(i).standard_normal(argument.shape)

        def value(step, i=i, direction=direction):
            moved = [a + (step * direction if j == i else 0) for j, a in enumerate((x, delta, eps))]
            return (ca.perturb(*moved, axis=axis) * g).sum()

        np.testing.assert_allclose(
            (found[i] * direction).sum(), (value(1e-7) - value(-1e-7)) / 2e-7, rtol=1e-5, atol=1e-6
        )


def test_large_and_small_scales(be):
    """d eta / d delta scales with delta; nothing overflows on the way."""
    *arguments, g = problem(2)
    reference = be.gradients(*arguments, g)
    for scale in (1e-120, 1e120):
        x, delta, *rest = arguments
        found = be.gradients(x, delta * scale, *rest, g)
        np.testing.assert_allclose(found[1] * scale, reference[1], rtol=1e-9, atol=1e-14)
        for i in (0, 2, 3, 4):
            np.testing.assert_allclose(found[i], reference[i], rtol=1e-9, atol=1e-12)


def test_eps_zero_and_a_large_order():
    """What has no room does not count, however large it is: compiled kernels take powers of the others alone."""
    pytest.importorskip("numba", reason="Numba is not installed")
    x, delta, g = np.array([-1.0, -3.0]), np.array([-1.0, -4.0]), np.array([0.5, 2.0])
    _, _, eps_bar, _, _ = ca.perturb_vjp(x, delta, 0.0, g, p=2000, bounds=(-3, -1))
    np.testing.assert_allclose(eps_bar, -0.5)


def test_no_elements(be):
    empty, eps = np.zeros((3, 0)), np.ones((3, 1))
    found = be.gradients(empty, empty, eps, np.zeros((3, 0)), np.ones((3, 0)), empty)
    for bar, like in zip(found, (empty, empty, eps, empty, empty), strict=True):
        assert np.shape(bar) == like.shape
        assert not np.any(bar)


@pytest.mark.needs("eager", "whole_samples")
def test_long_rows_and_many_rows(be):
    """More elements than are worked on at a time."""
    rng = np.random.default_rng(0)
    for rows, n in ((300, 4000), (2, 700_000)):
        x, delta, g = rng.random((rows, n)), rng.standard_normal((rows, n)), rng.standard_normal((rows, n))
        eps = np.full((rows, 1), 5.0)
        found = be.gradients(x, delta, eps, np.zeros(()), np.ones(()), g)
        for part in (slice(0, 1), slice(rows - 1, rows)):
            alone = be.gradients(x[part], delta[part], eps[part], np.zeros(()), np.ones(()), g[part])
            for i in range(3):
                np.testing.assert_allclose(found[i][part], alone[i], rtol=1e-9, atol=1e-12)
        # In a regular row the result does not depend on the scale of delta.
        assert np.abs((delta * found[1]).sum(axis=1)).max() < 1e-9
