"""The references agree with each other, with mpmath and with the published code, whose faults are really there."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipaware import reference
from clipaware.reference import KINDS, directions, norm64
from oracle import mp_gradients, mp_rescale

ORDERS = (1, 1.5, 2, 3, 10, 50, math.inf)
SOLVERS = {"sort": reference.sort_rescale, "bisect": reference.bisect_rescale}


@pytest.fixture(scope="module")
def published() -> Any:
    """The listing as Foolbox carries it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports are of their time
        return pytest.importorskip("foolbox.external.clipping_aware_rescaling").l2_clipping_aware_rescaling


def solvers(p: float) -> dict[str, Any]:
    return SOLVERS if p < math.inf else {"bisect": reference.bisect_rescale}


def sample(kind: str, rows: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(seed).random((rows, n)), directions(kind, rows, n, seed + 1)


def reach(x: np.ndarray, delta: np.ndarray, p: float) -> np.ndarray:
    corner = np.where(delta > 0, 1, np.where(delta < 0, 0, x))
    return norm64(corner, x, p)


def assert_solves(
    eta: Any, x: Any, delta: Any, eps: Any, p: float, rtol: float, lower: Any = 0.0, upper: Any = 1.0
) -> None:
    v = np.clip(x + np.asarray(eta) * delta, lower, upper)
    np.testing.assert_allclose(norm64(v, x, p), np.broadcast_to(eps, len(x)), rtol=rtol)


def assert_same_as_mpmath(eta: Any, x: Any, delta: Any, eps: Any, p: float, rtol: float, **bounds: Any) -> None:
    eps = np.broadcast_to(eps, len(x))
    exact = [float(mp_rescale(*row, p, **bounds)[0]) for row in zip(x, delta, eps, strict=True)]
    np.testing.assert_allclose(np.asarray(eta)[:, 0], exact, rtol=rtol)


@pytest.mark.parametrize(
    ("p", "eps", "expected"),
    [
        (1, 0.375, 0.125),  # the second element just at its bound
        (1, 0.75, 0.5),
        (1, 0.875, 0.625),  # all the reach there is
        (1, 1.0, 0.625),  # more than that
        (2, math.sqrt(0.3125), 0.5),
        (math.inf, 0.25, 0.125),
        (math.inf, 0.375, 0.375),  # too far for the second element
        (math.inf, 1.0, 0.625),
    ],
)
def test_a_row_by_hand(p: float, eps: float, expected: float) -> None:
    x, delta = np.array([[0.375, 0.25, 0.5]]), np.array([[1.0, -2.0, 0.0]])
    for solver in solvers(p).values():
        eta = solver(x, delta, eps, p)
        assert eta.shape == (1, 1)
        np.testing.assert_allclose(eta, expected, rtol=1e-15)
    np.testing.assert_allclose(float(mp_rescale(x[0], delta[0], eps, p)[0]), expected, rtol=1e-15)


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.5])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_solvers_agree_with_mpmath(kind: str, p: float, share: float) -> None:
    x, delta = sample(kind, 3, 30)
    x[:, ::5] = np.random.default_rng(2).choice([0.0, 1.0], x[:, ::5].shape)
    eps = share * reach(x, delta, p)
    for solver in solvers(p).values():
        eta = solver(x, delta, eps, p)
        # Towards the reach, the rounding of eps alone moves eta by more and more.
        assert_same_as_mpmath(eta, x, delta, eps, p, rtol=2e-15 if share < 0.01 or share > 1 else 1e-12)
        if 0.01 < share < 1:
            assert_solves(eta, x, delta, eps, p, rtol=2e-15)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_solvers_agree_on_long_rows(kind: str, p: float) -> None:
    x, delta = sample(kind, 2, 3072)
    for share in (0.01, 0.7):
        eps = share * reach(x, delta, p)
        for solver in solvers(p).values():
            assert_solves(solver(x, delta, eps, p), x, delta, eps, p, rtol=1e-14)


@pytest.mark.parametrize("p", [1, 2, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_eps_right_at_a_breakpoint(kind: str, p: float) -> None:
    x, delta = sample(kind, 1, 1000, 3)
    delta *= 1e-140
    room = np.where(delta > 0, 1 - x, np.where(delta < 0, x, 0))
    breaks = np.sort(room[delta != 0] / np.abs(delta[delta != 0]))
    for index in (100, 500, -2, -1):
        moved = np.minimum(breaks[index] * np.abs(delta), room)
        eps = moved.max() * math.fsum((moved[0] / moved.max()) ** p) ** (1 / p)
        for solver in SOLVERS.values():
            moved = np.minimum(solver(x, delta, eps, p) * np.abs(delta), room)
            assert math.fsum((moved[0] / eps) ** p) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("p", ORDERS)
def test_a_sample_outside_its_bounds_by_rounding_has_no_room_there(p: float) -> None:
    x, delta = np.array([[np.nextafter(1, 2), 0.5, 0.5]]), np.array([[2.0, -1.0, 0.5]])
    for solver in solvers(p).values():
        np.testing.assert_array_equal(solver(x, delta, 0.25, p), solver(np.minimum(x, 1.0), delta, 0.25, p))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
def test_the_scale_of_delta_does_not_matter(p: float, scale: float) -> None:
    x, delta = sample("gaussian", 2, 20)
    eps = 0.6 * reach(x, delta, p)
    for solver in solvers(p).values():
        assert_same_as_mpmath(solver(x, scale * delta, eps, p), x, scale * delta, eps, p, rtol=1e-14)


@pytest.mark.parametrize("p", ORDERS)
def test_the_scale_of_the_box_does_not_matter(p: float) -> None:
    x, delta = sample("cauchy", 2, 20)
    for scale in (1e-150, 1e150):
        eps = 0.6 * scale * reach(x, delta, p)
        for solver in solvers(p).values():
            eta = solver(scale * x, delta, eps, p, 0.0, scale)
            assert_same_as_mpmath(eta, scale * x, delta, eps, p, rtol=1e-14, upper=scale)


@pytest.mark.parametrize("p", ORDERS)
def test_elements_that_underflow_beside_a_large_one(p: float) -> None:
    x, delta = np.full((1, 3), 0.5), np.array([[1.0, -1e-7, 1e-9]])
    for eps in (0.4, 0.51):
        for solver in solvers(p).values():
            assert_same_as_mpmath(solver(x, delta, eps, p), x, delta, [eps], p, rtol=1e-13)


@pytest.mark.parametrize("p", ORDERS)
def test_infinite_bounds(p: float) -> None:
    x, delta = sample("gaussian", 3, 12)
    for lower, upper in ((-math.inf, math.inf), (0.0, math.inf), (-math.inf, 1.0)):
        for solver in solvers(p).values():
            eta = solver(x, delta, 3.0, p, lower, upper)
            assert_same_as_mpmath(eta, x, delta, 3.0, p, rtol=1e-14, lower=lower, upper=upper)
            assert_solves(eta, x, delta, 3.0, p, 2e-15, lower, upper)


@pytest.mark.parametrize("p", ORDERS)
def test_bounds_of_every_element(p: float) -> None:
    x, delta = sample("gaussian", 3, 12)
    rng = np.random.default_rng(5)
    lower, upper = x - rng.random(x.shape), x + rng.random(x.shape)
    for solver in solvers(p).values():
        assert_solves(solver(x, delta, 0.3, p, lower, upper), x, delta, 0.3, p, 2e-15, lower, upper)


@pytest.mark.parametrize("p", ORDERS)
def test_rows_that_stay(p: float) -> None:
    x = np.array([[0.2, 0.8], [0.2, 0.8], [0.0, 1.0], [0.2, 0.8]])
    delta = np.array([[0.0, 0.0], [1.0, -3.0], [-1.0, 2.0], [0.0, 0.0]])
    eps = np.array([0.5, 0.0, 0.5, 0.0])  # nothing moves; nothing asked for; no room; neither
    for solver in solvers(p).values():
        for per_row in (eps, eps[:, None]):
            np.testing.assert_array_equal(solver(x, delta, per_row, p), np.zeros((4, 1)))


@pytest.mark.parametrize("p", ORDERS)
def test_unreachable_rows_get_the_smallest_scale_that_clips_everything(p: float) -> None:
    x, delta = sample("gaussian", 5, 20)
    delta[:, 3] = 0
    smallest = np.max(np.where(delta == 0, 0, np.where(delta > 0, 1 - x, x) / np.abs(delta + (delta == 0))), axis=1)
    for solver in solvers(p).values():
        for excess in (1.001, 100.0):
            eta = solver(x, delta, excess * reach(x, delta, p), p)
            np.testing.assert_allclose(eta[:, 0], smallest, rtol=4e-16)


def test_bisection_goes_to_the_last_bit() -> None:
    x, delta = np.zeros((1, 2)), np.array([[3.0, 4.0]])
    eta = reference.bisect_rescale(x, delta, 0.5)
    below = np.nextafter(eta, 0)
    assert ((eta * delta / 0.5) ** 2).sum() >= 1 > ((below * delta / 0.5) ** 2).sum()
    assert reference.bisect_rescale(x, delta * 2.0**-1074, 2.0, 2, 0.0, 9.0)[0, 0] == math.inf


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 50),
    st.sampled_from(KINDS),
    st.floats(1, 20),
    st.floats(0, 1.2),
    st.integers(-100, 100),
)
def test_sort_and_bisection_agree(seed: int, n: int, kind: str, p: float, share: float, exponent: int) -> None:
    x, delta = sample(kind, 2, n, seed)
    delta *= 2.0**exponent
    eps = share * reach(x, delta, p)
    by_sort, by_bisection = (solver(x, delta, eps, p) for solver in SOLVERS.values())
    norms = [norm64(np.clip(x + eta * delta, 0, 1), x, p) for eta in (by_sort, by_bisection)]
    np.testing.assert_allclose(*norms, rtol=1e-14)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_and_numpy_agree(kind: str, p: float) -> None:
    torch = pytest.importorskip("torch")
    x, delta = sample(kind, 3, 30)
    eps = 0.6 * reach(x, delta, p)
    tensors = torch.tensor(x), torch.tensor(delta), torch.tensor(eps)
    for solver in (*solvers(p).values(), reference.naive_perturb):
        found = solver(*tensors, p)
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found.numpy(), solver(x, delta, eps, p), rtol=1e-12)
    if p == 2:
        found = reference.l2_clipping_aware_rescaling(*tensors[:2], 0.6)
        np.testing.assert_allclose(found.numpy(), reference.l2_clipping_aware_rescaling(x, delta, 0.6), rtol=1e-12)


@pytest.mark.parametrize("share", [0.3, 0.8, 0.99])
@pytest.mark.parametrize("p", [p for p in ORDERS if p < 50])
def test_gradients_of_the_sort_are_those_of_mpmath(p: float, share: float) -> None:
    torch = pytest.importorskip("torch")
    x, delta = sample("gaussian", 1, 8)
    delta[0, 3] = 0
    lower, upper = np.zeros_like(x), np.ones_like(x)
    upper[0, 5] = math.inf if p < 3 else 1.0
    eps = np.array(share * reach(x, delta, p)[0])
    arguments = [torch.tensor(a, requires_grad=True) for a in (x, delta, eps, lower, upper)]
    eta = reference.sort_rescale(*arguments[:3], p, *arguments[3:])
    found = torch.autograd.grad(eta.sum(), arguments)
    expected = mp_gradients(x[0], delta[0], eps, p, lower[0], upper[0])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy().reshape(np.shape(theirs)), theirs, rtol=1e-10, atol=1e-14)


def test_gradients_of_the_listing_are_those_of_mpmath() -> None:
    torch = pytest.importorskip("torch")
    x, delta = sample("gaussian", 1, 8)
    arguments = [torch.tensor(a, requires_grad=True) for a in (x, delta, np.array(0.9))]
    found = torch.autograd.grad(reference.l2_clipping_aware_rescaling(*arguments).sum(), arguments)
    expected = mp_gradients(x[0], delta[0], 0.9)
    for ours, theirs in zip(found, expected[:3], strict=True):
        np.testing.assert_allclose(ours.numpy().reshape(np.shape(theirs)), theirs, rtol=1e-10, atol=1e-14)


def test_gradients_where_nothing_is_clipped() -> None:
    """Then eta is eps/||delta||, and v = x + eta*delta: what mp_gradients should say of both."""
    x, delta, g = np.full(3, 0.5), np.array([1.0, -2.0, 2.0]), np.array([1.0, 0.5, -1.0])
    of_eta, of_v = mp_gradients(x, delta, 0.3), mp_gradients(x, delta, 0.3, g=g)
    np.testing.assert_allclose(of_eta.eps, 1 / 3, rtol=1e-15)
    np.testing.assert_allclose(of_eta.delta, -0.1 * delta / 9, rtol=1e-15)
    np.testing.assert_allclose(of_v.delta, 0.1 * (g - (g @ delta) * delta / 9), rtol=1e-14)
    np.testing.assert_allclose(of_v.eps, g @ delta / 3, rtol=1e-14)
    np.testing.assert_allclose(of_v.x, g, rtol=1e-15)
    for still in (of_eta.x, of_eta.lower, of_eta.upper, of_v.lower, of_v.upper):
        np.testing.assert_array_equal(still, np.zeros(3))


# --- the published listing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 784), (4, 3, 8, 8), (5, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_listing_is_the_published_one(published: Any, kind: str, shape: tuple[int, ...], dtype: str) -> None:
    x, delta = (a.reshape(shape).astype(dtype) for a in sample(kind, shape[0], math.prod(shape[1:])))
    for eps in (0.1, 1.0, 3.6, 50.0):
        for bounds in ((), (-0.5, 1.5)):
            ours = reference.l2_clipping_aware_rescaling(x, delta, eps, *bounds)
            with np.errstate(all="ignore"):
                theirs = published(x, delta, eps, *bounds)
            assert ours.shape == theirs.shape == (shape[0],) + (1,) * (len(shape) - 1)
            assert ours.dtype == theirs.dtype == dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-6 if dtype == "float32" else 1e-13)


def test_listing_and_published_one_have_the_same_gradients(published: Any) -> None:
    torch = pytest.importorskip("torch")
    x, delta = (torch.tensor(a.reshape(4, 3, 8, 8), requires_grad=True) for a in sample("gaussian", 4, 192))
    found = []
    for listing in (reference.l2_clipping_aware_rescaling, published):
        eta = listing(x, delta, 3.0)
        assert eta.shape == (4, 1, 1, 1)
        found.append((eta, *torch.autograd.grad(eta.sum(), (x, delta))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_listing_agrees_with_the_solvers() -> None:
    x, delta = sample("gaussian", 4, 784)
    for eps in (0.1, 3.6, 10.0, 15.0, 30.0):
        eta = reference.l2_clipping_aware_rescaling(x, delta, eps)
        np.testing.assert_allclose(eta, reference.sort_rescale(x, delta, eps), rtol=1e-11)


def test_listing_loses_a_small_delta() -> None:
    x, delta = sample("gaussian", 4, 784)
    lost = {1e-10: (3.605, 3.62), 1e-11: (2.4, 2.8), 1e-12: (0.25, 0.3)}
    for scale, (least, most) in lost.items():
        small = scale * delta
        norm = norm64(np.clip(x + reference.l2_clipping_aware_rescaling(x, small, 3.6) * small, 0, 1), x)
        assert ((least < norm) & (norm < most)).all()
        assert_solves(reference.sort_rescale(x, small, 3.6), x, small, 3.6, 2, rtol=1e-14)


def test_listing_loses_a_small_eps_in_float32() -> None:
    rng = np.random.default_rng(0)
    x, delta = (rng.uniform(0.3, 0.7, (2, 150528)).astype("f"), rng.standard_normal((2, 150528)).astype("f"))
    for eps, least, most in ((1e-3, 0.9, 1.1), (0.01, 0.05, 0.5), (0.5, 1e-6, 1e-4)):
        exact = reference.bisect_rescale(x, delta, eps)
        error = np.abs(reference.l2_clipping_aware_rescaling(x, delta, eps) / exact - 1)
        assert ((least < error) & (error < most)).all()
        np.testing.assert_allclose(reference.sort_rescale(x, delta, eps), exact, rtol=1e-13)


def test_listing_gives_nan_gradients_and_a_huge_scale() -> None:
    torch = pytest.importorskip("torch")
    for start, direction, eps in ((0.5, 0.0, 0.3), (0.5, 1.0, 0.0), (0.0, -1.0, 0.3)):
        x, delta = (torch.full((1, 4), value, dtype=torch.float64, requires_grad=True) for value in (start, direction))
        eta = reference.l2_clipping_aware_rescaling(x, delta, eps)
        gradients = torch.autograd.grad(eta.sum(), (x, delta))
        assert eta.item() == pytest.approx(5e9 if direction == 0 else 0)
        assert any(g.isnan().any() for g in gradients)


# --- naive rescaling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", ORDERS)
def test_naive_norm_is_right_only_without_clipping(p: float) -> None:
    x, delta = sample("gaussian", 3, 20)
    free = reference.naive_perturb(x, delta, 0.7, p, -math.inf, math.inf)
    np.testing.assert_allclose(norm64(free, x, p), 0.7, rtol=1e-14)
    eps = 0.9 * reach(x, delta, p)
    v = reference.naive_perturb(x, delta, eps, p)
    assert ((v >= 0) & (v <= 1)).all()
    assert (norm64(v, x, p) < 0.999 * eps).any()


def test_naive_perturb_keeps_dtype_and_still_rows() -> None:
    x = np.full((2, 3), 0.5, np.float32)
    delta = np.array([[0, 0, 0], [3, 0, 4]], np.float32)
    v = reference.naive_perturb(x, delta, np.array([1.0, 0.5]))
    assert v.dtype == np.float32
    np.testing.assert_allclose(v, [[0.5, 0.5, 0.5], [0.8, 0.5, 0.9]], rtol=1e-6)


# --- the oracle itself ------------------------------------------------------------------------------------------------


def test_norm64_does_not_overflow() -> None:
    v = np.array([[3e300, 4e300], [3e-300, 4e-300], [0.0, 0.0]])
    np.testing.assert_allclose(norm64(v, 0 * v), [5e300, 5e-300, 0.0], rtol=1e-15)
    np.testing.assert_allclose(norm64(v, 0 * v, math.inf), [4e300, 4e-300, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_what_they_say(kind: str) -> None:
    delta = directions(kind, 3, 40, 7)
    assert delta.shape == (3, 40)
    assert np.isfinite(delta).all()
    np.testing.assert_array_equal(delta, directions(kind, 3, 40, 7))
    if kind == "geometric":
        np.testing.assert_allclose(np.diff(np.log10(np.sort(np.abs(delta), axis=1)), axis=1), 1.0)
    elif kind == "tied":
        assert len(np.unique(np.abs(delta))) == 4
