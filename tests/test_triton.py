"""The GPU's kernels: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1, without TensorFlow in the process)."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import clipaware as ca
from clipaware.reference import directions, norm64
from conftest import BACKENDS, GPU, NUMPY_DTYPES
from tiers import in_test_all

kernels = pytest.importorskip("clipaware._kernels.triton", reason="Triton is not installed", exc_type=ImportError)
# NumPy warns of what Triton's interpreter computes with it and a GPU says nothing of.
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ROW = 150


@pytest.fixture(params=["short", "long"])
def gpu(request, monkeypatch):
    """The kernels, which hold a row of 150, or which do not and share it."""
    backend = BACKENDS["cuda"]
    request.getfixturevalue("on_gpu")
    monkeypatch.setattr(kernels, "_compiled", {})
    if request.param == "long":
        for name, size in (("LONGEST", 64), ("STREAM", 64), ("SAMPLE", 128), ("SAMPLE_RUN", 16)):
            monkeypatch.setattr(kernels, name, size)
        monkeypatch.setattr(kernels, "AT_NODES", {**kernels.AT_NODES, "SEGMENT": 64, "CHUNK": 32})
        monkeypatch.setattr(kernels, "IN_WRITE", {**kernels.IN_WRITE, "SEGMENT": 64, "CHUNK": 64})
    # What a kernel does not write is not what it was before by chance.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _poisoned(empty(*a, **k)))
    return backend


def _poisoned(a):
    return a.fill_(math.nan) if a.dtype.is_floating_point else a.fill_(-77)


def cases(*both, short=(), rest=()):
    """Pairs of `gpu` and something else. `make test` takes those of `both` with either kind of kernel, and those of
    `short` with that one; `make test-all` adds the other one, and all of `rest`."""
    now = [*itertools.product(("short", "long"), both), *(("short", case) for case in short)]
    later = [*(("long", case) for case in short), *itertools.product(("short", "long"), rest)]
    return now + in_test_all(*later)


# With the kernels that share a row in `make test-all` alone.
BOTH_LATER = pytest.mark.parametrize("gpu", ["short", *in_test_all("long")], indirect=True)


def problem(rows=5, dtype="float64", seed=0, n=ROW):
    rng = np.random.default_rng(seed)
    x, delta = rng.random((rows, n)), directions("gaussian", rows, n, seed)
    return x.astype(NUMPY_DTYPES[dtype]).astype(float), delta.astype(NUMPY_DTYPES[dtype]).astype(float)


@pytest.mark.parametrize(("gpu", "p"), cases(2, short=(10, math.inf), rest=(1, 1.5, 3)), indirect=["gpu"])
def test_values(gpu, p):
    """As NumPy's backend finds them in float64. A kind of direction and a share of the reach to each row."""
    kinds = ["gaussian", "cauchy", "tied", "cauchy", "gaussian", "tied"]
    x = np.random.default_rng(0).random((len(kinds), ROW))
    delta = np.concatenate([directions(kind, 1, ROW, row) for row, kind in enumerate(kinds)])
    reach = ca.reach(x, delta, p=p)[:, 0]
    np.testing.assert_allclose(gpu.reach(x, delta, p=p)[:, 0], reach, rtol=1e-14)
    eps = reach * np.array([0.02, 0.3, 0.7, 0.99, 0.99, 1.5])
    np.testing.assert_allclose(gpu.perturb(x, delta, eps, p=p), ca.perturb(x, delta, eps, p=p), rtol=0, atol=1e-13)
    np.testing.assert_allclose(gpu.rescale(x, delta, eps, p=p), ca.rescale(x, delta, eps, p=p), rtol=1e-11)
    v = gpu.perturb(x, delta, eps, p=p, dtype="float32")
    some = np.array([p <= 2 or kind == "gaussian" for kind in kinds])
    tied = np.array([kind == "tied" for kind in kinds])
    x, delivered = x.astype(np.float32), np.minimum(eps, reach)
    step = np.spacing(np.float32(1)) / 2 * np.where(tied, ROW ** (1 / p), 1) / delivered
    assert (np.abs(norm64(v, x, p) / delivered - 1) <= 4e-7 + step)[some].all()


@pytest.mark.parametrize("mode", ["equal", "at_most"])
@pytest.mark.parametrize(("gpu", "p"), cases(10, rest=[2, 1000]), indirect=["gpu"])
def test_room_without_end(gpu, p, mode):
    """The largest element is clipped at once, next to it the powers of the others vanish, and their room has no end."""
    x, delta = np.zeros((1, ROW)), np.zeros((1, ROW))
    delta[0, :4] = -1e50, 1e20, 1e-30, 1e-100
    options = {"p": p, "mode": mode, "bounds": (-0.5, math.inf)}
    v = gpu.perturb(x, delta, 24.6, **options)
    np.testing.assert_allclose(norm64(v, x, p), 24.6, rtol=1e-13)
    np.testing.assert_allclose(
        gpu.rescale(x, delta, 24.6, **options), ca.rescale(x, delta, 24.6, **options), rtol=1e-13
    )


MODES = ["equal", "at_most", "at_least"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
SOME = [(2, "equal", "float16"), (2, "at_most", "bfloat16"), (2, "at_least", "float32"), (2, "at_most", "float64")]
SOME += [(2.5, "at_most", "float16"), (math.inf, "equal", "bfloat16"), (math.inf, "at_least", "float16")]
REST = [case for case in itertools.product([2, 2.5, math.inf], MODES, DTYPES) if case not in SOME][::3]


@pytest.mark.parametrize(("gpu", "case"), cases(*SOME[:2], short=SOME[2:], rest=REST), indirect=["gpu"])
def test_modes(gpu, case):
    p, mode, dtype = case
    x, delta = problem(dtype=dtype, seed=1)
    delta *= 0.25
    plain = norm64(np.clip(x + delta, 0, 1).astype(NUMPY_DTYPES[dtype]).astype(float), x, p)
    eps = plain * np.array([0.5, 0.9, 1.0, 1.02, 1.1])
    v = gpu.perturb(x, delta, eps, p=p, mode=mode, dtype=dtype)
    expected = {"equal": eps, "at_most": np.minimum(eps, plain), "at_least": np.maximum(eps, plain)}[mode]
    coarse = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 4e-7)
    np.testing.assert_allclose(norm64(v.astype(float), x, p), expected, rtol=coarse)
    if mode == "at_most":
        assert (norm64(v.astype(float), x, p) <= eps).all()


@pytest.mark.parametrize(("gpu", "p"), cases(2, short=(10, math.inf), rest=(1, 1.5, 3)), indirect=["gpu"])
def test_gradients(gpu, p):
    """Also of rows that are out of reach, held, at eps = 0 and without a direction."""
    x, delta = problem(rows=6)
    delta[5] = 0
    delta[0, :7] = 0
    reach = ca.reach(x, delta, p=p)[:, 0]
    eps = np.array([0.3, 0.8, 0.95, 2.0, 0.0, 0.0]) * reach
    eps[5] = 1.0
    g = np.random.default_rng(2).standard_normal(x.shape)
    for lower, upper in ((np.zeros(()), np.ones(())), (np.full(ROW, -0.1), np.full((6, 1), 1.05))):
        expected = ca.perturb_vjp(x, delta, eps, g, bounds=(lower, upper), p=p)
        found = gpu.gradients(x, delta, eps, lower, upper, g, p=p)
        for bar, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(bar, other, rtol=1e-9, atol=1e-11)


def test_a_gradient_that_is_infinite(gpu):
    """Where everything is clipped, a bound has nothing of what the other one is pulled by."""
    x, delta = problem(rows=2)
    g = np.ones_like(x)
    g[:, 5], delta[:, 5] = math.inf, 1.0
    eps = 2 * ca.reach(x, delta)[:, 0]
    *_, lower_bar, upper_bar = gpu.gradients(x, delta, eps, np.zeros_like(x), np.ones_like(x), g)
    np.testing.assert_array_equal(lower_bar, delta < 0)
    np.testing.assert_array_equal(upper_bar, np.where(delta > 0, g, 0))


def test_gradient_of_the_scale(gpu):
    x, delta = problem()
    x = 0.1 + 0.8 * x
    eps = ca.reach(x, delta)[:, 0] * 0.6
    inputs = [torch.tensor(a, device=GPU, requires_grad=True) for a in (x, delta, eps)]
    ca.rescale(*inputs).sum().backward()
    # By differences of the scale that NumPy's backend finds.
    towards = np.random.default_rng(3).standard_normal(x.shape) * 1e-6
    for place in (0, 1, 2):
        step = towards if place < 2 else np.full(len(x), 1e-6)
        ends = [[a + side * step if i == place else a for i, a in enumerate((x, delta, eps))] for side in (1, -1)]
        change = [np.asarray(ca.rescale(*end)).sum() for end in ends]
        found = (inputs[place].grad.cpu().numpy() * step).sum()
        np.testing.assert_allclose(found, (change[0] - change[1]) / 2, rtol=1e-4, atol=1e-11)


@pytest.mark.parametrize(("gpu", "p"), cases(2, rest=[1, math.inf]), indirect=["gpu"])
def test_rows_that_make_no_sense(gpu, p):
    """They are NaN, and the others right."""
    x, delta = problem(rows=8)
    eps = ca.reach(x, delta, p=p)[:, 0] * 0.5
    expected = ca.perturb(x, delta, eps, p=p)
    lower = np.zeros((8, ROW))
    x[0, 3], x[1, ROW - 1], delta[2, 100], delta[3, 0] = math.nan, math.inf, math.nan, -math.inf
    eps[4], eps[5], lower[6, 9] = math.nan, -1.0, 2.0
    lower_on = gpu.array(lower, "float64")
    v = gpu.numpy(
        ca.perturb(
            gpu.array(x, "float64"), gpu.array(delta, "float64"), gpu.array(eps, "float64"), p=p, bounds=(lower_on, 1)
        )
    )
    assert np.isnan(v[:7]).all()
    np.testing.assert_allclose(v[7], expected[7], atol=1e-13)


@pytest.mark.parametrize(("gpu", "scale"), cases(1e-35, short=[1e20], rest=[1e-20, 1e35]), indirect=["gpu"])
def test_scales(gpu, scale):
    x, delta = problem(dtype="float32")
    reach = ca.reach(x, delta)[:, 0]
    eps = reach * np.array([0.02, 0.3, 0.7, 0.99, 0.5])
    v = gpu.perturb(x, delta * scale, eps, dtype="float32")
    assert (np.abs(norm64(v, x.astype(np.float32), 2) / eps - 1) <= 4e-7 + 2.0**-24 / eps).all()


@BOTH_LATER
def test_very_heavy_tails(gpu):
    """Where what is not clipped yet is next to nothing, and a guess may go beyond all numbers."""
    rng = np.random.default_rng(0)
    x, delta = rng.random((60, 200)), rng.choice([-1, 1], (60, 200)) * rng.lognormal(0, 6, (60, 200))
    x, delta = (a[[8, 21, 32]].astype(np.float32).astype(float) for a in (x, delta))
    eps = ca.reach(x, delta, p=50)[:, 0] * 0.99
    found = gpu.rescale(x, delta, eps, p=50, dtype="float32").astype(float)
    np.testing.assert_allclose(found, ca.rescale(x, delta, eps, p=50), rtol=1e-5)


@BOTH_LATER
def test_misleading_rows(gpu):
    """Geometric breakpoints, one huge element, all but one clipped, and what a sample does not see."""
    x = np.full((4, ROW), 0.5)
    delta = np.ones((4, ROW))
    delta[0] = 10.0 ** -np.linspace(0, 30, ROW)
    delta[1, 17] = 1e12
    delta[2] = 1e9
    delta[2, 125] = 1e-9
    delta[3] = 1e-6
    delta[3, 20:30] = 1.0
    reach = ca.reach(x, delta)[:, 0]
    for share in (0.1, 0.9, 0.999):
        v = gpu.perturb(x, delta, reach * share)
        np.testing.assert_allclose(norm64(v, x, 2), reach * share, rtol=2e-14)


# Triton's interpreter does not round to bfloat16 as a GPU does.
@pytest.mark.parametrize("dtype", ["float16"] if kernels.INTERPRETED else ["float16", "bfloat16"])
@pytest.mark.parametrize(("gpu", "p"), cases(2, short=[1, math.inf]), indirect=["gpu"])
def test_half_precision_has_the_nearest_norm(gpu, p, dtype):
    x, delta = problem(rows=3, dtype=dtype)
    eps = ca.reach(x, delta, p=p)[:, 0] * np.array([0.05, 0.3, 0.8])
    v, eta = gpu.perturb(x, delta, eps, p=p, dtype=dtype).astype(float), ca.rescale(x, delta, eps, p=p)
    for i in range(3):
        # Every array on the ray near the solution, by a grid finer than its steps.
        grid = (eta[i] * np.linspace(0.97, 1.03, 20_001)).astype(np.float32)[:, None]
        ray = np.clip(x[i] + grid * delta[i], 0, 1).astype(np.float32).astype(NUMPY_DTYPES[dtype]).astype(float)
        best = np.abs(norm64(ray, np.broadcast_to(x[i], ray.shape), p) / eps[i] - 1).min()
        assert abs(norm64(v[i : i + 1], x[i : i + 1], p)[0] / eps[i] - 1) <= max(best, 2e-7) + 1e-8


@pytest.mark.parametrize("gpu", ["long"], indirect=True)
@pytest.mark.long
@pytest.mark.parametrize(("share", "dtype"), [(0.4, "bfloat16"), (0.4, "float64"), (0.99, "float32"), (1.2, "float32")])
def test_programs_that_share_a_row_finish_it(gpu, share, dtype, monkeypatch):
    """And leave nothing to be done by one program, which would take many times as long."""
    rng = np.random.default_rng(0)
    x, delta = (
        a.astype(NUMPY_DTYPES[dtype]).astype(float) for a in (rng.random((2, 9000)), rng.standard_normal((2, 9000)))
    )
    for name, size in (("SAMPLE", 2048), ("SAMPLE_RUN", 64)):
        monkeypatch.setattr(kernels, name, size)
    for name in ("AT_NODES", "IN_WRITE"):
        monkeypatch.setattr(kernels, name, {**getattr(kernels, name), "SEGMENT": 1024, "CHUNK": 512})
    left, launch = [], kernels._launch

    def watched(kernel, programs, arguments, *rest):
        if kernel is kernels._solve_rows:
            left.append((arguments[-1][:, 0] != kernels.DONE.value).sum().item())
        launch(kernel, programs, arguments, *rest)

    monkeypatch.setattr(kernels, "_launch", watched)
    eps = ca.reach(x, delta)[:, 0] * share
    found = gpu.perturb(x, delta, eps, dtype=dtype)
    assert left == [0]
    np.testing.assert_allclose(
        found.astype(float), ca.perturb(x, delta, eps), atol=1e-5 if dtype != "bfloat16" else 1e-2
    )
    if dtype == "float64":
        np.testing.assert_allclose(gpu.rescale(x, delta, eps, dtype=dtype), ca.rescale(x, delta, eps), rtol=1e-12)
        assert left == [0, 0]


@pytest.mark.parametrize(
    ("eps", "bounds"),
    [(5e-324, (-0.3, 1.1)), (0.1, (None, 5e-324)), *in_test_all((0.7, (0, 1)), (1e-310, (None, None)))],
)
def test_numbers(gpu, eps, bounds):
    """Those of eps and bounds are arguments of kernels, unless they are subnormal."""
    x, delta = problem(rows=2)
    x = x if bounds[1] != 5e-324 else -x
    arrays = [torch.tensor(a, device=GPU) for a in (x, delta)]
    found = ca.perturb(*arrays, eps, bounds=bounds).cpu().numpy()
    np.testing.assert_allclose(found, ca.perturb(x, delta, eps, bounds=bounds), rtol=0, atol=1e-13)
    found = ca.report(*arrays, eps, bounds=bounds)
    for name, expected in vars(ca.report(x, delta, eps, bounds=bounds)).items():
        np.testing.assert_allclose(getattr(found, name).cpu().numpy(), expected, rtol=1e-9, atol=1e-300)
    if eps == 0.7 and bounds == (0, 1):
        with pytest.raises(ca.UnreachableError, match="eps 99 > reach"):
            ca.perturb(*arrays, 99, unreachable="raise")


def test_a_bound_is_rounded_as_x_is(gpu):
    x, delta = problem(rows=2, dtype="bfloat16")
    v = gpu.perturb(0.3 * x, np.abs(delta), 99.0, bounds=(0, 0.3), dtype="bfloat16").astype(float)
    assert set(v[delta != 0]) == {float(np.array(0.3, NUMPY_DTYPES["bfloat16"]))}


@pytest.mark.parametrize("bounds", [(1.0, 2.0), *in_test_all(((0.02, 1.0),), ((-2.0, -0.5),))])
def test_a_box_without_zero(gpu, bounds):
    """What a program holds beyond the end of a row is 0, and counts for nothing."""
    x, delta = problem(rows=3)
    x = (bounds[0] + x * (bounds[1] - bounds[0])).astype(np.float32).astype(float)
    eps = ca.reach(x, delta, bounds=bounds)[:, 0] * np.array([0.1, 0.5, 0.9])
    for p in (2, 1.5):
        v = gpu.perturb(x, delta, eps, p=p, bounds=bounds, dtype="float32")
        expected = np.minimum(eps, ca.reach(x, delta, p=p, bounds=bounds)[:, 0])
        assert (np.abs(norm64(v, x, p) / expected - 1) <= 4e-7).all()


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["short"], indirect=True)
def test_gradients_near_the_reach(gpu):
    """The array of float32 is right long before the scale is, which the gradients follow from."""
    rng = np.random.default_rng(11)
    x, delta = (a.astype(np.float32).astype(float) for a in (rng.random((6, 3000)), rng.standard_normal((6, 3000))))
    eps = ca.reach(x, delta)[:, 0] * np.array([0.9, 0.99, 0.998, 0.999, 0.999, 0.9995])
    _, _, expected, *_ = ca.perturb_vjp(x, delta, eps, np.abs(delta))
    single = [torch.tensor(a, dtype=torch.float32, device=GPU) for a in (x, delta)]
    leaf = torch.tensor(eps, device=GPU, requires_grad=True)
    (found,) = torch.autograd.grad(ca.perturb(*single, leaf), leaf, single[1].abs())
    np.testing.assert_allclose(found.cpu(), expected, rtol=3e-4)


@pytest.mark.parametrize(("gpu", "p"), cases(short=[2], rest=[1, 3]), indirect=["gpu"])
def test_gradients_of_a_small_eps(gpu, p):
    """They are taken at the scale, and not at one that makes good for the rounding of the array."""
    x, delta = problem(dtype="float32", n=300)  # in shorter rows it happens to make no difference
    eps = 1e-4 * 300 ** (1 / p)
    _, expected, *_ = ca.perturb_vjp(x, delta, eps, x, p=p)
    single = [torch.tensor(a, dtype=torch.float32, device=GPU) for a in (x, delta)]
    leaf = single[1].requires_grad_()
    (found,) = torch.autograd.grad(ca.perturb(single[0], leaf, eps, p=p), leaf, single[0])
    np.testing.assert_allclose(found.cpu(), expected, rtol=0, atol=3e-6 * abs(expected).max())


@pytest.mark.long
def test_gradients_of_a_small_eps_of_longer_rows(gpu):
    """The same, of so many elements that their rounding adds up."""
    rng = np.random.default_rng(0)
    x, delta = (a.astype(np.float32).astype(float) for a in (rng.random((2, 2500)), rng.standard_normal((2, 2500))))
    for p in (1, 3):
        eps = 1e-4 * 2500 ** (1 / p)
        _, expected, *_ = ca.perturb_vjp(x, delta, eps, x, p=p)
        single = [torch.tensor(a, dtype=torch.float32, device=GPU) for a in (x, delta)]
        v = ca.perturb(single[0], single[1].requires_grad_(), eps, p=p)
        (found,) = torch.autograd.grad(v, single[1], single[0])
        np.testing.assert_allclose(found.cpu(), expected, rtol=0, atol=1e-6 * abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cotangents_that_are_no_numbers(gpu, dtype):
    x, delta = (torch.tensor(a, dtype=dtype, device=GPU) for a in ([[0.2, 0.5, 0.4, 0.95]], [[0.3, -0.2, 0.5, 1.0]]))
    g = torch.tensor([[1.0, math.nan, 1.0, 1.0]], dtype=dtype, device=GPU)
    (found,) = torch.autograd.grad(ca.perturb(x, delta.requires_grad_(), 0.3), delta, g)
    np.testing.assert_array_equal(found.cpu(), [[math.nan, math.nan, math.nan, 0]])


def test_gradients_of_subnormal_deltas_at_eps_zero(gpu):
    """The gradient of eps may be beyond float32 there, and nothing else is infinite, or no number, for that."""
    x, delta = (torch.tensor([[a]], dtype=torch.float32, device=GPU) for a in (1.6e-38, 2.755e-40))
    for eps in (0.0, 1.3e-43):
        found = ca.perturb_vjp(x, delta, eps, torch.full_like(x, 1.7), bounds=(0, 1e-37), mode="at_most")
        assert all(bar.isfinite().all() for bar in found[:2])


@pytest.mark.parametrize("p", [1.01, 1.3])
def test_weights_of_numbers_that_are_subnormal(gpu, p):
    x, delta = np.full((1, 3), 0.5), np.array([[1e200, 1e-110, 1e200]])
    options = {"p": p, "bounds": (-math.inf, math.inf)}
    _, expected, *_ = ca.perturb_vjp(x, delta, 0.3, x, **options)
    given = [torch.tensor(a, device=GPU) for a in (x, delta)]
    (found,) = torch.autograd.grad(ca.perturb(given[0], given[1].requires_grad_(), 0.3, **options), given[1], given[0])
    np.testing.assert_allclose(found.cpu()[0, 1], expected[0, 1], rtol=1e-12)


@pytest.mark.parametrize(("gpu", "p"), cases(short=[4.7], rest=[1.5, 3, 60]), indirect=["gpu"])
def test_powers_of_numbers_far_from_1(gpu, p):
    """Of one element, whose scale is a quotient whatever the norm."""
    delta = 10.0 ** np.linspace(-250, 250, 81)[:, None]
    eta = gpu.rescale(delta * 0, delta, 0.3, p=p, bounds=(-math.inf, math.inf))
    np.testing.assert_allclose(eta, 0.3 / delta, rtol=4e-15)


def test_sums_that_almost_vanish(gpu):
    """Large elements are clipped long before a small one moves, whose powers are no float32 until then."""
    x, delta = np.array([[-2.168549, 2.7017596, 0.8192101]]), np.array([[1.469983e-6, 142633.23, 142633.23]])
    options = {"p": 4, "bounds": (-2.5, 3.75)}
    single = [torch.tensor(a, dtype=torch.float32, device=GPU) for a in (x, delta)]
    v = ca.perturb(single[0].requires_grad_(), single[1], 5.972195, **options)
    (found,) = torch.autograd.grad(v, single[0], single[1])
    x, delta = (a.detach().double().cpu().numpy() for a in single)
    np.testing.assert_allclose(found.cpu(), ca.perturb_vjp(x, delta, 5.972195, delta, **options)[0], rtol=1e-5)


@BOTH_LATER
def test_gradients_that_are_negative_views(gpu):
    x, delta = (torch.tensor(a, device=GPU) for a in problem(rows=2))
    g = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0)).to(GPU)
    leaf = delta.requires_grad_()
    for function, up in ((ca.perturb, g), (ca.rescale, g[:, :1])):
        found, expected = (
            torch.autograd.grad(function(x, leaf, 0.7), leaf, some)[0] for some in (torch._neg_view(up), -up)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@BOTH_LATER
def test_layouts(gpu):
    """Transposed and sliced input, and a gradient that is broadcast."""
    x, delta = problem()
    eps = ca.reach(x, delta)[:, 0] * 0.4
    expected = ca.perturb(x, delta, eps)
    xt, dt = (gpu.array(np.ascontiguousarray(a.T), "float64").T for a in (x, delta))
    np.testing.assert_allclose(gpu.numpy(ca.perturb(xt, dt, eps)), expected, atol=1e-13)
    wide = gpu.array(np.concatenate([x, x, x], axis=1), "float64")[:, ROW : 2 * ROW]
    leaf = gpu.array(delta, "float64").requires_grad_()
    v = ca.perturb(wide, leaf, eps)
    np.testing.assert_allclose(gpu.numpy(v), expected, atol=1e-13)
    v.sum().backward()
    np.testing.assert_allclose(
        gpu.numpy(leaf.grad), ca.perturb_vjp(x, delta, eps, np.ones_like(x))[1], rtol=1e-9, atol=1e-11
    )


@BOTH_LATER
def test_twice_the_same_bits(gpu):
    x, delta = problem(dtype="float32")
    first, again = (gpu.perturb(x, delta, 2.0, dtype="float32") for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_one_element_and_none(gpu):
    np.testing.assert_allclose(gpu.perturb(np.full((3, 1), 0.5), np.full((3, 1), -2.0), 0.2), 0.3)
    assert gpu.perturb(np.zeros((0, 4)), np.zeros((0, 4)), 0.2).shape == (0, 4)


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ('(torch.float16, 1.0, 20000, "at_most")', "_nodes _pull_sums _pull_write _reach_parts _rounds _start _write"),
        *in_test_all(
            (
                '(torch.float32, 2.0, 300, "equal"), (torch.float64, 1.7, 20, "at_least")',
                "_pull_rows _reach_rows _solve_rows",
            )
        ),
    ],
)
def test_the_kernels_compile(problems, expected):
    """For a GPU that need not be there: the interpreter takes what the compiler refuses."""
    code = """if True:
    import torch, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from clipaware._kernels import triton as kernels
    from clipaware._problem import Problem

    names = dict(float16="fp16", float32="fp32", float64="fp64", int32="i32", int64="i64")
    compiled = set()

    def launch(kernel, programs, arguments, key, constants):
        given = constants()
        kinds = ["*" + names[str(a.dtype)[6:]] if hasattr(a, "dtype") else "i64" for a in arguments]
        kinds += ["constexpr"] * (len(kernel.arg_names) - len(kinds))
        signature = dict(zip(kernel.arg_names, kinds))
        values = {(i,): given[name] for i, name in enumerate(kernel.arg_names) if name in given}
        options = {name: given[name] for name in ("num_warps", "maxnreg") if name in given}
        triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options=options)
        compiled.add(kernel.fn.__name__)

    kernels._launch = launch
    solve, reach, vjp = (function.__wrapped__ for function in (kernels.solve, kernels.reach, kernels.vjp))
    for dtype, p, n, mode in (CASES,):
        x, row = torch.zeros(2, n, dtype=dtype), torch.ones(2, 1, dtype=torch.float64)
        problem = Problem(x, x, row, 0.0, 1.0, p)
        solve(problem, mode, True)
        reach(problem)
        vjp(problem, row, row.long(), x, None, (True, True, True))
    print(*sorted(compiled))
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = code.replace("CASES", problems)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) >= set(expected.split())
