"""perturb_quantized against brute force: every step that every element can make, in the order of their turns."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipaware as ca
from clipaware import quantize
from clipaware._backends import numpy as numpy_backend
from clipaware.reference import norm64
from conftest import NUMPY_DTYPES

ORDERS = [1, 1.5, 2, 3, math.inf]
MODES = ["equal", "at_most", "at_least"]


def norm(a, p):
    return float(np.linalg.norm(np.asarray(a, float).ravel(), p)) if np.size(a) else 0.0


def turn_of(d, k):
    """The least number at which an element makes its k-th step, by walking from one number to the next."""
    turn = (k - 0.5) / d
    while math.floor(turn * d + 0.5) >= k:
        turn = math.nextafter(turn, 0)
    while math.floor(turn * d + 0.5) < k:
        turn = math.nextafter(turn, math.inf)
    return turn


def turns_of(delta, room):
    """Per turn, in their order, the elements that step at it."""
    found = {}
    for i, (d, r) in enumerate(zip(np.abs(delta).astype(float), room, strict=True)):
        for k in range(1, int(r) + 1):
            found.setdefault(turn_of(float(d), k), []).append(i)
    return dict(sorted(found.items()))


def assert_on_the_path(moved, delta, room, size, p, mode, unit, one):
    """That these steps are a point of the path, and none of its other points is nearer."""
    unit = np.broadcast_to(unit, np.shape(moved))
    norm_of = lambda m: norm(unit * m, p)  # noqa: E731
    tolerance = 1e-12 * max(size, 1)
    here, turns = np.zeros(len(delta)), turns_of(delta, room)
    corners = [here.copy()]
    for elements in turns.values():
        for i in elements:
            here[i] += 1
        corners.append(here.copy())
    came = np.minimum(np.floor(one * np.abs(delta) + 0.5), room)
    delivered = norm_of(moved)
    if (mode == "at_most" and norm_of(came) <= size) or (mode == "at_least" and norm_of(came) >= size):
        np.testing.assert_array_equal(moved, came)
        return
    between = [(low, high) for low, high in pairwise(corners) if (low <= moved).all() and (moved <= high).all()]
    assert between or (moved == corners[-1]).all()
    norms = np.array([norm_of(corner) for corner in corners])
    if mode == "equal":
        assert abs(delivered - size) <= np.abs(norms - size).min() + tolerance
    elif mode == "at_most":
        assert delivered <= size + tolerance
        assert delivered >= norms[norms <= size + tolerance].max() - tolerance
    elif size <= norms[-1]:
        assert delivered >= size - tolerance
        assert delivered <= norms[norms >= size - tolerance].min() + tolerance
    # Of what moves at once, one more or one less is no better either.
    for low, high in between:
        for i in np.flatnonzero(high > low):
            other = np.array(moved, float)
            other[i] += 1 if moved[i] == low[i] else -1
            further = norm_of(other)
            if (
                mode == "equal"
                and (delivered - size) * (further - delivered) < 0
                and (further - size) * (delivered - size) > 0
            ):
                # Nearer, without passing the size: then some element of its kind was not taken for being too large.
                assert len({float(unit[j] * (low[j] + 1)) for j in np.flatnonzero(high > low)}) > 1


def solved(delta, room, size, p, mode, unit=1.0, one=1.0):
    return quantize.steps(np.asarray(delta), np.asarray(room, np.float32), size, p=p, mode=mode, unit=unit, one=one)


@pytest.fixture(params=["compiled", "operations"])
def way(request, monkeypatch):
    """With Numba's kernels, and without."""
    if request.param == "operations":
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    else:
        pytest.importorskip("numba", reason="Numba is not installed")
        assert numpy_backend.kernels() is not None


@pytest.mark.parametrize(("p", "mode"), list(product(ORDERS, MODES)))
def test_against_brute_force(p, mode, way):
    rng = np.random.default_rng(0)
    for trial in range(30):
        n = int(rng.integers(1, 12))
        room = rng.integers(0, 7, n).astype(float)
        delta = rng.standard_normal(n).astype(np.float32 if trial % 2 else np.float64)
        delta[rng.random(n) < 0.2] = 0
        room[delta == 0] = 0
        reach = norm(room, p)
        for share in (0.01, 0.3, 0.5, 0.77, 0.999):
            found = solved(delta, room, share * reach, p, mode, one=3.0)
            assert found.norm == pytest.approx(norm(found.moved, p), rel=1e-12)
            assert found.reach == pytest.approx(reach, rel=1e-12)
            assert_on_the_path(found.moved, delta, room, share * reach, p, mode, 1.0, 3.0)


@pytest.mark.parametrize(("p", "mode"), list(product(ORDERS, MODES)))
def test_ties_and_steps_of_different_sizes(p, mode, way):
    rng = np.random.default_rng(1)
    for _ in range(30):
        n = int(rng.integers(2, 12))
        room, unit = rng.integers(0, 5, n).astype(float), rng.choice([0.25, 0.5, 1.0], n)
        delta = rng.choice([-1.0, 1.0, 2.0, 3.0], n)
        for share in (0.1, 0.45, 0.8):
            size = share * norm(unit * room, p)
            found = solved(delta, room, size, p, mode, unit, one=1.0)
            assert_on_the_path(found.moved, delta, room, size, p, mode, unit, 1.0)


@given(
    st.lists(st.tuples(st.floats(-4, 4, width=32), st.integers(0, 9)), min_size=1, max_size=9),
    st.floats(0, 1.1),
    st.sampled_from(ORDERS),
    st.sampled_from(MODES),
)
def test_any_small_problem(elements, share, p, mode):
    delta, room = (np.array(a, float) for a in zip(*elements, strict=True))
    delta[np.abs(delta) < 1e-30] = 0
    room[delta == 0] = 0
    size = share * norm(room, p)
    found = solved(delta, room, size, p, mode)
    if norm(room, p) == 0 or size == 0:
        assert (found.moved == 0).all()
    elif size > norm(room, p) * (1 + 1e-12) and mode != "at_most":
        assert not found.reachable or mode == "at_least"
        if not found.reachable:
            np.testing.assert_array_equal(found.moved, room)
    else:
        assert_on_the_path(found.moved, delta, room, size, p, mode, 1.0, 1.0)


def picture(shape=(32, 32, 3), levels=256, bounds=(0.0, 1.0), seed=0):
    """On the grid, and dark or bright in places."""
    rng = np.random.default_rng(seed)
    place = np.clip(np.rint((0.5 + 0.4 * rng.standard_normal(shape)) * (levels - 1)), 0, levels - 1)
    return place * (bounds[1] - bounds[0]) / (levels - 1) + bounds[0]


def steps_between(v, x, levels=256, bounds=(0.0, 1.0)):
    step = (bounds[1] - bounds[0]) / (levels - 1)
    apart = (np.asarray(v, float) - np.asarray(x, float)) / step
    assert abs(apart - np.rint(apart)).max() < 0.2  # on the grid, as far as float16 knows
    return np.rint(apart)


@pytest.mark.parametrize(
    ("levels", "bounds", "dtype"),
    [
        (256, (0.0, 1.0), "float32"),
        (256, (0.0, 255.0), "float32"),
        (256, (0.0, 1.0), "float16"),
        (65536, (0.0, 1.0), "float32"),
        (65536, (-1.0, 1 - 2.0**-15), "float32"),
        (2**24, (-1.0, 1 - 2.0**-23), "float32"),
        (2**24, (0.0, 1.0), "float64"),
        (2**32, (-1.0, 1 - 2.0**-31), "float64"),
    ],
)
def test_grids(levels, bounds, dtype, way):
    x = picture(levels=levels, bounds=bounds).astype(dtype)
    delta = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
    eps = 0.05 * math.sqrt(x.size) * (bounds[1] - bounds[0])
    v = ca.perturb_quantized(x, delta, eps, levels=levels, bounds=bounds, axis=None)
    assert v.dtype == x.dtype
    moved = (
        steps_between(v, x, levels, bounds)
        if levels < 2**20
        else (v.astype(float) - x) / (bounds[1] - bounds[0]) * (levels - 1)
    )
    delivered = norm(moved, 2) * (bounds[1] - bounds[0]) / (levels - 1)
    # A step of one element changes the norm by about step*m/norm.
    assert delivered == pytest.approx(eps, rel=1e-4 if levels == 256 else 1e-7)
    assert (np.sign(moved) * np.sign(delta) >= 0).all()
    assert (v == x)[np.rint(moved) == 0].all()


@pytest.mark.parametrize("noise", ["gaussian", "sign"])
def test_a_photograph_sized_picture(noise):
    x, delta = picture((224, 224, 3)), np.random.default_rng(1).standard_normal((224, 224, 3))
    delta = np.sign(delta) if noise == "sign" else delta
    v = ca.perturb_quantized(x, delta, 3.0, axis=None)
    assert norm(steps_between(v, x), 2) / 255 == pytest.approx(3, rel=1e-4 / 3)
    w = ca.perturb_quantized(x, delta, 3.0, axis=None, mode="at_most")
    assert 3 * (1 - 1e-5) < norm(steps_between(w, x), 2) / 255 <= 3


def test_many_ties_are_taken_in_a_seeded_order(way):
    x, delta = picture((100, 100, 3)), np.sign(np.random.default_rng(1).standard_normal((100, 100, 3)))
    found = [ca.perturb_quantized(x, delta, 1.0, axis=None, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()
    moved = [np.abs(steps_between(v, x)) for v in found]
    assert {m.max() for m in moved} <= {1, 2, 3}
    assert len({norm(m, 2) for m in moved}) == 1
    # Of those that could, as many above as below.
    last = moved[0] == moved[0].max()
    assert abs(last[:50].mean() - last[50:].mean()) < 0.03


def test_a_few_ties_are_taken_in_a_seeded_order(way):
    room = np.ones(20, np.float32)
    found = [quantize.steps(np.ones(20), room, math.sqrt(10), p=2, mode="equal", seed=seed).moved for seed in (0, 0, 1)]
    assert [m.sum() for m in found] == [10, 10, 10]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


def test_with_and_without_kernels_the_same(monkeypatch):
    pytest.importorskip("numba", reason="Numba is not installed")
    rng = np.random.default_rng(0)
    x = picture((64, 64, 3)).astype(np.float32)
    for delta, p, mode in product(
        (rng.standard_normal(x.shape, np.float32), np.sign(rng.standard_normal(x.shape, np.float32))),
        (1, 2, math.inf),
        MODES,
    ):
        eps = {1: 200.0, 2: 4.0, math.inf: 0.1}[p]
        v = ca.perturb_quantized(x, delta, eps, p=p, mode=mode, axis=None)
        with monkeypatch.context() as patch:
            patch.setattr(numpy_backend, "kernels", lambda: None)
            np.testing.assert_array_equal(v, ca.perturb_quantized(x, delta, eps, p=p, mode=mode, axis=None))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.needs("whole_samples")
def test_every_backend(be, p, mode):
    x = picture((3, 6, 7, 2))
    delta = np.random.default_rng(3).standard_normal(x.shape)
    eps = 0.2 * ca.reach(x, delta, p=p).ravel()
    expected = ca.perturb_quantized(x.astype(np.float32), delta.astype(np.float32), eps, p=p, mode=mode)
    given_x, given_delta = be.array(x, "float32"), be.array(delta, "float32")
    v = ca.perturb_quantized(given_x, given_delta, eps, p=p, mode=mode)
    assert type(v) is type(given_x)
    assert str(v.dtype) == str(given_x.dtype)
    np.testing.assert_array_equal(be.numpy(v), expected)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.needs("whole_samples")
def test_every_dtype(be, dtype):
    x, delta = picture((2, 50)), np.random.default_rng(3).standard_normal((2, 50))
    v = be.numpy(ca.perturb_quantized(be.array(x, dtype), be.array(delta, dtype), 0.5))
    assert str(v.dtype) == dtype
    for row, start in zip(v, x, strict=True):
        assert norm(steps_between(row, start.astype(dtype)), 2) / 255 == pytest.approx(0.5, abs=0.01)


def test_a_sample_of_a_batch_is_as_alone():
    x, delta = picture((4, 500)), np.sign(np.random.default_rng(0).standard_normal((4, 500)))
    v = ca.perturb_quantized(x, delta, 0.3)
    np.testing.assert_array_equal(v[2], ca.perturb_quantized(x[2], delta[2], 0.3))


def test_axes_and_eps_per_sample():
    x, delta = picture((3, 40, 5)), np.random.default_rng(0).standard_normal((3, 40, 5))
    v = ca.perturb_quantized(x, delta, np.array([0.1, 0.2, 0.3, 0.4, 0.5]), axis=(0, 1))
    assert v.shape == x.shape
    delivered = np.linalg.norm((v - x).transpose(2, 0, 1).reshape(5, -1), axis=1)
    np.testing.assert_allclose(delivered, [0.1, 0.2, 0.3, 0.4, 0.5], rtol=1e-2)


def test_bounds_per_channel():
    """As after normalisation by mean and standard deviation, in float32."""
    mean, std = (np.array(c, np.float32) for c in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    whole = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3))
    x = ((whole / np.float32(255)).astype(np.float32) - mean) / std
    bounds = (0 - mean) / std, (1 - mean) / std
    delta = np.random.default_rng(1).standard_normal(x.shape, np.float32)
    v = ca.perturb_quantized(x, delta, 5.0, bounds=bounds)
    saved = (v * std + mean) * 255
    assert abs(saved - np.rint(saved)).max() < 1e-3
    apart = (np.rint(saved) - whole) / 255 / std
    np.testing.assert_allclose(np.linalg.norm(apart.reshape(2, -1), axis=1), 5.0, rtol=3e-4)


def test_largest_norm_of_whole_steps():
    """eps = 8/255 is 8 steps for all elements of sign noise that have the room, in every mode."""
    x, delta = picture((20, 20)), np.sign(np.random.default_rng(0).standard_normal((20, 20)))
    room = np.where(delta > 0, 255 - np.rint(255 * x), np.rint(255 * x))
    for mode in MODES:
        for eps in (8 / 255, np.full((), 8 / 255, np.float32)):
            v = ca.perturb_quantized(x, delta, eps, p=math.inf, axis=None, mode=mode)
            expected = {"equal": 8, "at_most": 8, "at_least": 255}[mode]
            np.testing.assert_array_equal(np.abs(steps_between(v, x)), np.minimum(room, expected))


def test_modes_leave_alone_what_is_right():
    x, delta = picture((40,)), np.random.default_rng(0).standard_normal(40)
    small = steps_between(ca.perturb_quantized(x, 0.001 * delta, 1.0, mode="at_most"), x)
    assert norm(small, 2) < 2
    large = ca.perturb_quantized(x, delta, 0.5, mode="at_least")
    np.testing.assert_allclose(large, np.rint(255 * np.clip(x + delta, 0, 1)) / 255, atol=1e-12)


def test_out_of_reach():
    x, delta = picture((2, 30)), np.random.default_rng(0).standard_normal((2, 30))
    delta[1, 0] = 0
    corner = np.where(delta > 0, 1, np.where(delta < 0, 0, x))
    np.testing.assert_array_equal(ca.perturb_quantized(x, delta, 100.0), corner)
    reach = ca.reach(x, delta)
    np.testing.assert_array_equal(ca.perturb_quantized(x, delta, reach, unreachable="raise"), corner)
    eps = np.array([1.0, 100.0])
    v = ca.perturb_quantized(x, delta, eps, unreachable="nan")
    assert np.isnan(v[1]).all()
    assert not np.isnan(v[0]).any()
    with pytest.raises(ca.UnreachableError, match="sample 1: eps 100 > reach") as raised:
        ca.perturb_quantized(x, delta, eps, unreachable="raise")
    np.testing.assert_allclose(raised.value.reach, reach[1])
    assert ca.perturb_quantized(x, delta, 100.0, mode="at_most", unreachable="raise").shape == x.shape


def test_nothing_to_do():
    x = picture((2, 30))
    np.testing.assert_array_equal(ca.perturb_quantized(x, np.zeros_like(x), 0.5), x)
    np.testing.assert_array_equal(ca.perturb_quantized(x, np.ones_like(x), 0.0), x)
    with pytest.raises(ca.UnreachableError):
        ca.perturb_quantized(x, np.zeros_like(x), 0.5, unreachable="raise")
    assert ca.perturb_quantized(x[:0], x[:0], 0.5).shape == (0, 30)
    assert ca.perturb_quantized(x[:, :0], x[:, :0], 0.0).shape == (2, 0)


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-30, 1e30, 1e150, 1e300])
def test_scale_of_delta_does_not_matter(scale, way):
    x, delta = picture((50,)), np.random.default_rng(0).standard_normal(50)
    np.testing.assert_array_equal(ca.perturb_quantized(x, scale * delta, 0.3), ca.perturb_quantized(x, delta, 0.3))


@pytest.mark.parametrize("p", [30.0, 200.0])
def test_high_orders(p, way):
    x, delta = picture((50,), 2**24), np.random.default_rng(0).standard_normal(50)
    v = ca.perturb_quantized(x, delta, 0.3, p=p, levels=2**24)
    top = np.abs(v - x).max()
    assert top * np.linalg.norm((v - x) / top, p) == pytest.approx(0.3, rel=1e-5)


def test_bad_input():
    x, delta = picture((2, 30)), np.ones((2, 30))
    call = ca.perturb_quantized
    off = x.copy()
    off[1, 3] = 0.5 + 0.2 / 255
    with pytest.raises(
        ValueError, match=r"1 element\(s\) that are not on the grid of 256 levels.*sample 1.*round it first"
    ):
        call(off, delta, 1.0)
    with pytest.raises(ValueError, match="outside its bounds"):
        call(x, delta, 1.0, bounds=(0, 0.5))
    with pytest.raises(ValueError, match="bounds are not all finite"):
        call(x, delta, 1.0, bounds=(0, None))
    with pytest.raises(ValueError, match="lower <= upper"):
        call(x, delta, 1.0, bounds=(np.ones(30), np.zeros(30)))
    with pytest.raises(TypeError, match=r"levels is 2\.5"):
        call(x, delta, 1.0, levels=2.5)
    with pytest.raises(ValueError, match="levels is 1, expected a whole number from 2"):
        call(x, delta, 1.0, levels=1)
    with pytest.raises(ValueError, match="float16, which cannot tell 65536 levels"):
        call(x.astype(np.float16), delta.astype(np.float16), 1.0, levels=65536)
    with pytest.raises(ValueError, match="float32, which cannot tell 16777216 levels"):
        call(x.astype(np.float32), delta.astype(np.float32), 1.0, levels=2**24)
    with pytest.raises(TypeError, match="dtype uint8"):
        call((255 * x).astype(np.uint8), delta, 1.0)
    with pytest.raises(ValueError, match=r"delta has 1 element.*NaN"):
        call(x, np.where(np.arange(60).reshape(2, 30) == 3, np.nan, delta), 1.0)
    with pytest.raises(ValueError, match=r"x has 1 element.*NaN"):
        call(np.where(np.arange(60).reshape(2, 30) == 3, np.nan, x), delta, 1.0)
    with pytest.raises(ValueError, match="seed is -1"):
        call(x, delta, 1.0, seed=-1)
    with pytest.raises(ValueError, match="mode is 'most'"):
        call(x, delta, 1.0, mode="most")
    with pytest.raises(ValueError, match="eps is -1"):
        call(x, delta, -1.0)


def test_traces_are_refused():
    import torch

    x = picture((2, 30))
    with pytest.raises(ValueError, match="x has no values yet"):
        torch.func.vmap(lambda x: ca.perturb_quantized(x, x, 0.1))(torch.tensor(x))
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with pytest.raises(ValueError, match="x has no values yet"):
        jax.jit(lambda x: ca.perturb_quantized(x, x, 0.1))(jax.numpy.asarray(x))
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    with pytest.raises(ValueError, match="x has no values yet"):
        tf.function(lambda x: ca.perturb_quantized(x, x, 0.1))(tf.constant(x))


def test_no_gradients():
    import torch

    x = torch.tensor(picture((2, 30)), requires_grad=True)
    v = ca.perturb_quantized(x, torch.ones_like(x), 0.1)
    assert not v.requires_grad


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_an_eps_of_few_digits_is_that_number(p, dtype):
    """It may have been rounded from a whole number of steps, but is no licence beyond that."""
    rng = np.random.default_rng(0)
    x, delta = rng.integers(0, 256, (2, 300)) / 255, 10 * rng.standard_normal((2, 300))
    eps = np.array([0.3, 0.2]).astype(NUMPY_DTYPES[dtype])
    exact = eps.astype(float)
    norms = [norm64(ca.perturb_quantized(x, delta, eps, p=p, mode=mode), x, p) for mode in ("at_most", "at_least")]
    spacing = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype] if p == math.inf else 1e-14
    assert (norms[0] <= exact * (1 + spacing)).all()
    assert (norms[1] >= exact * (1 - spacing)).all()


@pytest.mark.parametrize("p", [1.25, 2.7, 30.0])
def test_powers_from_a_table_are_those_of_each_element(p):
    kernels = numpy_backend.kernels()
    rng = np.random.default_rng(0)
    delta, room = rng.standard_normal(10_000).astype(np.float32), rng.integers(0, 256, 10_000).astype(np.float32)
    powers = kernels.table_of_powers(room, 0.5, p)
    assert len(powers) == 256
    for eta in (0.3, 20.0, 1e9):
        steps = np.minimum(np.floor(eta * abs(delta.astype(np.float64)) + 0.5), room)
        for table in (powers, None):
            total, number = kernels.count(delta, room, 0.5, p, eta, table)
            assert total == pytest.approx(float(np.sum((0.5 * steps) ** p)), rel=1e-12)
            assert number == steps.sum()
    assert kernels.table_of_powers(room, 0.5, 2.0) is None  # squares are quickly made
    assert kernels.table_of_powers(room[:100], 0.5, p) is None  # and so are few
