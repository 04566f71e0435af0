"""Samples that are spread over processes: DTensors, and parts with a process group, in worlds that the tests start."""

from __future__ import annotations

import math
import re
import time
import traceback
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import clipaware as ca
from clipaware import distributed, noise, targets
from clipaware._backends import numpy as numpy_backend
from clipaware.reference import bisect_rescale, directions, norm64, sort_rescale
from oracle import mp_gradients
from tiers import in_test_all

pytest.importorskip("torch.distributed.tensor", reason="this PyTorch has no DTensor")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

ORDERS = [1, 1.5, 2, 3, 50, math.inf]
HALVES = (torch.float16, torch.bfloat16)
PATIENCE = 240  # seconds, for all cases of a world


# --- worlds -----------------------------------------------------------------------------------------------------------


def world(size, folder, cases, seconds=60):
    """What each process of a new world said when it ended: None, or its error."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=member, args=(rank, size, folder, cases, seconds)) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging
    said = [folder / f"{rank}.txt" for rank in range(size)]
    assert all(file.exists() for file in said), [process.exitcode for process in processes]
    return [file.read_text() or None for file in said]


def member(rank, size, folder, cases, seconds):
    torch.set_num_threads(1)
    numpy_backend.kernels = lambda: None  # whose compilation, in every process, would take longer than all cases
    error = ""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    try:
        for case in cases:
            case(size)
    except Exception:
        error = traceback.format_exc()
    (folder / f"{rank}.txt").write_text(error)
    if not error:
        dist.destroy_process_group()


class Counted:
    """The bytes of every all_reduce, and of every collective by whatever means."""

    def __enter__(self):
        self.sizes, self._real, self._all = [], dist.all_reduce, CommDebugMode()
        dist.all_reduce = self._counted
        self._all.__enter__()
        return self

    def _counted(self, a, *args, **kwargs):
        self.sizes.append(a.numel() * a.element_size())
        return self._real(a, *args, **kwargs)

    def __exit__(self, *exception):
        self._all.__exit__(*exception)
        dist.all_reduce = self._real
        if exception[0] is None:
            assert self._all.get_total_counts() == len(self.sizes)  # none that is not ours


def problem(p, kind="gaussian", shape=(5, 301), share=None, seed=0, dtype=torch.float64):
    """x, delta, eps, and bounds per element, whole, the same on all processes."""
    rng = np.random.default_rng(seed)
    rows, n = shape[0], math.prod(shape[1:])
    x, delta = rng.uniform(0.05, 0.95, (rows, n)), directions(kind, rows, n, seed)
    lower, upper = rng.uniform(-0.2, 0, (1, n)), rng.uniform(1, 1.2, (rows, n))
    x, delta, lower, upper = (torch.tensor(a).to(dtype) for a in (x, delta, lower, upper))
    share = np.linspace(0.1, 0.9, rows) if share is None else share
    room = torch.where(delta > 0, upper - x, torch.where(delta < 0, x - lower, 0)).double().numpy()
    eps = torch.tensor(norm64(room, np.zeros_like(room), p) * share)
    wide = (1, *shape[1:])
    return x.reshape(shape), delta.reshape(shape), eps, lower.reshape(wide), upper.reshape(shape)


def flat(a):
    return a.reshape(len(a), -1).double().numpy()


def solution(x, delta, eps, lower, upper, p):
    """By bisection, of whole arrays."""
    x, delta, upper = map(flat, (x, delta, upper))
    lower = np.broadcast_to(flat(lower), x.shape)
    eta = bisect_rescale(x, delta, eps.numpy(), p, lower, upper).reshape(-1, 1)
    return eta, np.clip(x + eta * delta, lower, upper)


def assert_is_solution(v, whole, p, message):
    """Of the array as it is written, and near what bisection finds."""
    x, _, eps, *_ = whole
    single = x.dtype == torch.float32
    np.testing.assert_allclose(
        norm64(flat(v), flat(x), p) / eps.numpy(), 1, rtol=3e-7 if single else 1e-14, err_msg=message
    )
    _, expected = solution(*whole, p)
    np.testing.assert_allclose(flat(v), expected, rtol=0, atol=2e-6 if single else 1e-12, err_msg=message)


def layouts(size):
    """Meshes and placements for arrays of three axes: of batches, of samples, of both, of neither."""
    line = init_device_mesh("cpu", (size,))
    found = [(line, [p]) for p in (Shard(0), Shard(1), Shard(2), Replicate())]
    if size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        pairs = [(0, 1), (1, 2), (2, 2), (2, 0), (0, 0)]
        found += [(square, [Shard(i), Shard(j)]) for i, j in pairs] + [(square, [Replicate(), Shard(2)])]
    return found


def spread(mesh, placements, *arrays):
    """Arrays of x's number of axes; an axis of length 1 is on all processes."""
    found = []
    for a in arrays:
        own = [Replicate() if isinstance(p, Shard) and a.shape[p.dim] == 1 else p for p in placements]
        found.append(distribute_tensor(a, mesh, own))
    return found


# --- cases, that every process of a world goes through ----------------------------------------------------------------


def every_layout(size):
    for mesh, placements in layouts(size):
        for dtype in (torch.float32, torch.float64):
            for p in (2, 3):
                whole = problem(p, shape=(5, 7, 43), dtype=dtype)
                x, delta, lower, upper = spread(mesh, placements, whole[0], whole[1], whole[3], whole[4])
                v = ca.perturb(x, delta, whole[2], p=p, bounds=(lower, upper))
                assert (v.placements, v.device_mesh, v.dtype, v.shape) == (x.placements, mesh, dtype, x.shape)
                assert v.to_local().shape == x.to_local().shape
                assert_is_solution(v.full_tensor(), whole, p, f"{placements} {dtype} {p}")


def every_norm(size):
    mesh = init_device_mesh("cpu", (size,))
    for p in ORDERS:
        for kind in ("gaussian", "cauchy", "lognormal", "tied"):
            for dtype in (torch.float32, torch.float64):
                whole = problem(p, kind, dtype=dtype)
                x, delta, lower, upper = spread(mesh, [Shard(1)], whole[0], whole[1], whole[3], whole[4])
                message = f"{p} {kind} {dtype}"
                v = ca.perturb(x, delta, whole[2], p=p, bounds=(lower, upper))
                assert_is_solution(v.full_tensor(), whole, p, message)
                eta = ca.rescale(x, delta, whole[2], p=p, bounds=(lower, upper))
                assert eta.shape == (5, 1)
                assert eta.placements == (Replicate(),)
                rtol = 1e-5 if dtype == torch.float32 else 1e-11
                np.testing.assert_allclose(eta.to_local(), solution(*whole, p)[0], rtol=rtol, err_msg=message)
                reach = ca.reach(x, delta, p=p, bounds=(lower, upper)).to_local()[:, 0]
                np.testing.assert_allclose(reach * np.linspace(0.1, 0.9, 5), whole[2], rtol=1e-6, err_msg=message)


def hard_rows(size):
    """Breakpoints in geometric progression, no movement, eps = 0, no room, one element that moves, at the reach."""
    mesh = init_device_mesh("cpu", (size,))
    for p in ORDERS:
        x, delta = torch.full((6, 200), 0.5, dtype=torch.float64), torch.from_numpy(directions("geometric", 6, 200, 0))
        delta[1], delta[4] = 0, 0
        delta[4, 17] = -1e-9
        x[3] = (delta[3] > 0).double()
        eps = torch.tensor([0.4, 0.3, 0.0, 0.2, 0.1, 0.5 * 200 ** (1 / p)], dtype=torch.float64)
        X, D = spread(mesh, [Shard(1)], x, delta)
        v = flat(ca.perturb(X, D, eps, p=p).full_tensor())
        norms = norm64(v, x, p)
        np.testing.assert_allclose(norms, [0.4, 0, 0, 0, 0.1, eps[5]], rtol=1e-12, atol=1e-15, err_msg=str(p))
        said = ca.report(X, D, eps, p=p)
        assert said.reachable.to_local().ravel().tolist() == [True, False, True, False, True, True]
        np.testing.assert_allclose(said.norm.to_local().ravel(), norms, rtol=1e-12, atol=1e-15)
        assert "reachable" in str(said)


def modes(size):
    mesh = init_device_mesh("cpu", (size,))
    for p, dtype in zip((1, 2, 1.5, 2, 50, math.inf), (*HALVES, torch.float32, torch.float64, *HALVES), strict=True):
        x, delta, eps, lower, upper = problem(p, dtype=dtype, shape=(6, 150), share=0.2)
        factors = torch.tensor([0.5, 0.5, 1.0, 1.0, 4.0, 4.0])
        sizes = norm64(flat(delta), 0 * flat(delta), p)
        delta = (delta.double() * (factors * eps / torch.tensor(sizes))[:, None]).to(dtype)
        X, D, L, U = spread(mesh, [Shard(1)], x, delta, lower, upper)
        plain = flat(torch.clamp(x + delta, lower, upper))
        for mode, left in (("equal", []), ("at_most", [0, 1]), ("at_least", [4, 5])):
            v = flat(ca.perturb(X, D, eps, p=p, bounds=(L, U), mode=mode).full_tensor())
            norm = norm64(v, flat(x), p)
            np.testing.assert_array_equal(v[left], plain[left])
            assert mode != "at_most" or (norm <= eps.numpy()).all()
            # As near as one process gets, of which other tests say how near that is.
            alone = flat(ca.perturb(x, delta, eps, p=p, bounds=(lower, upper), mode=mode))
            rtol = {2: 1e-4, 4: 3e-7, 8: 1e-13}[dtype.itemsize]
            np.testing.assert_allclose(norm, norm64(alone, flat(x), p), rtol=rtol, err_msg=f"{p} {dtype} {mode}")


def out_of_reach(size):
    for mesh, placements in layouts(size):
        x, delta, eps, lower, upper = problem(2, shape=(4, 6, 20), share=np.array([0.5, 1.5, 0.5, 2.0]))
        X, D, L, U = spread(mesh, placements, x, delta, lower, upper)
        options = {"bounds": (L, U)}
        v = ca.perturb(X, D, eps, **options).full_tensor()
        corner = torch.where(delta > 0, upper, lower)
        torch.testing.assert_close(v[1::2], corner[1::2], rtol=0, atol=0)
        v = ca.perturb(X, D, eps, unreachable="nan", **options).full_tensor()
        assert v.isnan().flatten(1).all(1).tolist() == [False, True, False, True]
        assert not v[::2].isnan().any()
        here = len(X.to_local())
        mine = [r for r in range(4) if placements[0] != Shard(0)] if here == 4 else None
        if mine == [0, 1, 2, 3]:
            with pytest.raises(ca.UnreachableError) as caught:
                ca.perturb(X, D, eps, unreachable="raise", **options)
            assert caught.value.rows.tolist() == [1, 3]
            reach = ca.reach(x, delta, bounds=(lower, upper)).ravel()
            np.testing.assert_allclose(caught.value.reach, reach[1::2], rtol=1e-12)
            assert not hasattr(caught.value, "__notes__")
    # Whole samples are a process's own business, and so are their numbers.
    mesh, rank = init_device_mesh("cpu", (size,)), dist.get_rank()
    X = distribute_tensor(torch.full((2 * size, 3), 0.5), mesh, [Shard(0)])
    eps = np.where(np.arange(2 * size) == 3, 9.0, 0.1)
    if rank == 1:
        with pytest.raises(ca.UnreachableError, match=r"sample 1: eps 9") as caught:
            ca.perturb(X, X, eps, unreachable="raise")
        assert caught.value.__notes__ == ["samples are counted from the first one of this process's part"]
    else:
        ca.perturb(X, X, eps, unreachable="raise")


def uneven(size):
    """Parts of different lengths, and none."""
    mesh = init_device_mesh("cpu", (size,))
    for n in (1, 2, 3, 4 * size + 1):
        for p in (1, 2, math.inf):
            whole = problem(p, shape=(3, n))
            parts = (distribute_tensor(whole[i], mesh, [Shard(1)]) for i in (0, 1, 3, 4))
            x, delta, lower, upper = arrays = [a.requires_grad_() for a in parts]
            v = ca.perturb(x, delta, whole[2], p=p, bounds=(lower, upper))
            assert v.to_local().shape == x.to_local().shape
            assert_is_solution(v.detach().full_tensor(), whole, p, f"{n} {p}")
            v.backward(v.detach())
            for a in arrays:
                assert a.grad.to_local().shape == a.to_local().shape
                assert a.grad.to_local().isfinite().all()
            assert (ca.report(x, delta, 100.0, p=p, bounds=(lower, upper)).clipped.to_local() == 1).all()
            lost = ca.report(x, delta, 100.0, p=p, bounds=(lower, upper), unreachable="nan")
            assert lost.norm.to_local().isnan().all()
            assert not lost.naive_norm.to_local().isnan().any()
    # As many samples as there are for some of the processes.
    for rows in (0, 1, size - 1):
        x = torch.rand((rows, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for placement in (Shard(0), Shard(1)):
            X, D = spread(mesh, [placement], x, x - 0.5)
            v = ca.perturb(X, D, 0.2, unreachable="raise").full_tensor()
            np.testing.assert_allclose((v - x).norm(dim=1), np.full(rows, 0.2), rtol=1e-12)


def gradients(size):
    """Of all arguments, against autodiff through the sort, by one collective in backward."""
    for mesh, placements in layouts(size):
        shared = any(isinstance(p, Shard) and p.dim > 0 for p in placements)
        for p in (1, 1.5, 2, 3):
            whole = [a.requires_grad_() for a in problem(p, shape=(5, 7, 9))]
            x, delta, eps, lower, upper = whole
            lower = lower.expand(5, 7, 9)
            parts = [a.flatten(1) for a in (x, delta, lower, upper)]
            eta = sort_rescale(parts[0], parts[1], eps, p, parts[2], parts[3]).reshape(5, 1, 1)
            moved = x + eta * delta
            expected = torch.where(moved > upper, upper, torch.where(moved < lower, lower, moved))
            g = torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            wanted = torch.autograd.grad(expected, whole, g)

            arrays = spread(mesh, placements, *(a.detach() for a in (x, delta, whole[3], upper)))
            E = distribute_tensor(eps.detach(), mesh, [q if q == Shard(0) else Replicate() for q in placements])
            X, D, L, U = arrays = [a.requires_grad_() for a in arrays]
            E.requires_grad_()
            v = ca.perturb(X, D, E, p=p, bounds=(L, U))
            (G,) = spread(mesh, placements, g)
            with Counted() as counted:
                v.backward(G)
            rows = len(X.to_local())
            assert counted.sizes == [2 * 8 * rows] * (shared and rows > 0), (placements, counted.sizes)
            for a, b in zip((X, D, E, L, U), wanted, strict=True):
                np.testing.assert_allclose(a.grad.full_tensor(), b, rtol=1e-8, atol=1e-11, err_msg=f"{placements} {p}")
            assert X.grad.placements == X.placements

            found = ca.perturb_vjp(*(a.detach() for a in (X, D, E)), G, p=p, bounds=(L.detach(), U.detach()))
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a.full_tensor(), b, rtol=1e-8, atol=1e-11, err_msg=f"{placements} {p}")


def gradients_of_numbers(size):
    """Of an eps and a bound for all samples, as tensors that every process has, and of eta."""
    for mesh, placements in layouts(size):
        x, delta, *_ = problem(2, shape=(5, 7, 9))
        for function in (ca.perturb, ca.rescale):
            wanted, found = ([torch.tensor(a, dtype=torch.float64).requires_grad_() for a in (0.8, 1.0)] for _ in "12")
            g = torch.rand(
                (5, 7, 9) if function is ca.perturb else (5, 1, 1), generator=torch.Generator().manual_seed(2)
            )
            function(x, delta, wanted[0], bounds=(0, wanted[1])).backward(g.double())
            X, D = spread(mesh, placements, x, delta)
            v = function(X, D, found[0], bounds=(0, found[1]))
            v.backward(distribute_tensor(g.double(), mesh, v.placements))
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a.grad, b.grad, rtol=1e-10, err_msg=str(placements))
            bars = ca.perturb_vjp(X, D, 0.8, *spread(mesh, placements, torch.ones_like(x)))
            alone = ca.perturb_vjp(x, delta, 0.8, torch.ones_like(x))
            for a, b in zip(bars, alone, strict=True):
                np.testing.assert_allclose(a.full_tensor(), b, rtol=1e-10, atol=1e-12)


def gradients_of_edges(size):
    """p = inf, with and without ties, and eps = 0: against mpmath, or the limit."""
    mesh = init_device_mesh("cpu", (size,))
    x, delta, eps, lower, upper = problem(math.inf, shape=(2, 12), share=np.array([0.2, 0.4]))
    g = torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (G,) = spread(mesh, [Shard(1)], g)
    X, D, L, U = (a.requires_grad_() for a in spread(mesh, [Shard(1)], x, delta, lower, upper))
    v = ca.perturb(X, D, eps, p=math.inf, bounds=(L, U))
    with Counted() as counted:
        v.backward(G)
    assert len(counted.sizes) == 1
    for row in range(2):
        wanted = mp_gradients(x[row], delta[row], eps[row], math.inf, lower[0], upper[row], g[row])
        for a, b in ((X, wanted.x), (D, wanted.delta), (U, wanted.upper)):
            np.testing.assert_allclose(a.grad.full_tensor()[row], b, rtol=1e-9, atol=1e-12)
    for p in ORDERS:
        X, D = (a.requires_grad_() for a in spread(mesh, [Shard(1)], x, torch.sign(delta) * (1 + abs(delta).round())))
        E = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        v = ca.perturb(X, D, E, p=p)
        with Counted() as counted:
            v.backward(G)
        assert len(counted.sizes) == 1
        torch.testing.assert_close(X.grad.full_tensor(), g)
        assert not D.grad.full_tensor().any()
        d = D.detach().full_tensor()
        limit = (g * d).sum(1) / torch.linalg.vector_norm(d, p, 1)
        torch.testing.assert_close(E.grad, limit)


def collectives(size):
    """Four or five for a typical solve, one in backward, a few numbers per row each; none where samples are whole."""
    mesh = init_device_mesh("cpu", (size,))
    for dtype, most in ((torch.float32, 4), (torch.float64, 5)):
        for shape in ((1, 40_000), (16, 3072)):
            x, delta, eps, *_ = problem(2, shape=shape, share=0.25, dtype=dtype)
            X, D = (a.requires_grad_() for a in spread(mesh, [Shard(1)], x, delta))
            with Counted() as forward:
                v = ca.perturb(X, D, eps)
            with Counted() as backward:
                v.backward(D.detach())
            first, *others = forward.sizes
            assert len(forward.sizes) <= most, forward.sizes
            assert first <= 8 * (size + shape[0] * (5 + 2 * (256 + size)))
            assert max(others) <= 8 * 20 * shape[0]
            assert backward.sizes == [16 * shape[0]]
            with Counted() as forward:
                ca.rescale(X, D, eps)
            assert len(forward.sizes) <= 5, forward.sizes
        with Counted() as forward:
            ca.perturb(X, D, 0.2, p=math.inf)
        assert forward.sizes == [8 * (size + 5 * 16), 8 * 16]
        for placement in (Shard(0), Replicate()):
            X, D = (a.requires_grad_() for a in spread(mesh, [placement], x, delta))
            with Counted() as counted:
                v = ca.perturb(X, D, 0.5, mode="at_most", unreachable="raise")
                v.backward(D.detach())
                ca.report(X, D, 0.5), ca.rescale(X, D, 0.5), ca.reach(X, D)
            assert counted.sizes == []


def near_the_reach(size):
    """Where a sample says little, more rounds of several scales, not a pass for every step of Newton."""
    mesh = init_device_mesh("cpu", (size,))
    for kind in ("gaussian", "cauchy"):
        for share in (0.5, 0.9, 0.99, 0.999):
            whole = problem(2, kind, shape=(4, 5000), share=share, dtype=torch.float32)
            x, delta, lower, upper = spread(mesh, [Shard(1)], whole[0], whole[1], whole[3], whole[4])
            with Counted() as counted:
                v = ca.perturb(x, delta, whole[2], bounds=(lower, upper))
            assert len(counted.sizes) <= 9, (kind, share, counted.sizes)
            np.testing.assert_allclose(norm64(flat(v.full_tensor()), flat(whole[0]), 2) / whole[2], 1, rtol=3e-7)


def other_arguments(size):
    """Axes, replicated delta, eps and bounds of all kinds, the paper's function, targets."""
    mesh = init_device_mesh("cpu", (size,))
    x, delta, *_ = problem(2, shape=(5, 4, 30))
    (X, D) = spread(mesh, [Shard(2)], x, delta)
    for axis in (None, 2, (0, 2), (1, 2), "batch"):
        for a, b in (
            (ca.perturb(X, D, 0.3, axis=axis), ca.perturb(x, delta, 0.3, axis=axis)),
            (ca.rescale(X, D, 0.3, axis=axis), ca.rescale(x, delta, 0.3, axis=axis)),
        ):
            assert a.shape == b.shape
            np.testing.assert_allclose(a.full_tensor(), b, rtol=1e-12, err_msg=str(axis))
    with Counted() as counted:  # the axis that is sharded is not a sample's
        v = ca.perturb(X, D, 0.3, axis=1)
    assert counted.sizes == []
    np.testing.assert_allclose(v.full_tensor(), ca.perturb(x, delta, 0.3, axis=1), rtol=1e-12)
    eps = np.linspace(0.2, 0.9, 5)
    wanted = ca.perturb(x, delta, eps, bounds=(-0.1, 1.5 + x[:1].numpy()))
    for e in (eps, eps.astype(np.float32).astype(float), torch.tensor(eps), torch.tensor(eps).reshape(5, 1, 1)):
        v = ca.perturb(X, D, e, bounds=(-0.1, 1.5 + x[:1].numpy()))
        np.testing.assert_allclose(v.full_tensor(), wanted, rtol=1e-6)
    v = ca.perturb(X, distribute_tensor(delta, mesh, [Replicate()]), eps, bounds=(-0.1, 1.5 + x[:1].numpy()))
    np.testing.assert_allclose(v.full_tensor(), wanted, rtol=1e-12)
    (rows,) = spread(mesh, [Shard(0)], x)
    v = ca.perturb(rows, distribute_tensor(delta, mesh, [Shard(0)]), eps, bounds=(-0.1, 1.5 + x[:1].numpy()))
    np.testing.assert_allclose(v.full_tensor(), wanted, rtol=1e-12)
    (flat_x, flat_d) = spread(mesh, [Shard(0)], x.ravel(), delta.ravel())
    assert ca.perturb(flat_x, flat_d, 1.0).placements == (Shard(0),)
    np.testing.assert_allclose((ca.perturb(flat_x, flat_d, 1.0).full_tensor() - x.ravel()).norm(), 1.0, rtol=1e-13)
    eta = ca.l2_clipping_aware_rescaling(X, D, 0.7)
    np.testing.assert_allclose(eta.full_tensor(), ca.l2_clipping_aware_rescaling(x, delta, 0.7), rtol=1e-12)
    for target in (partial(targets.eps_from_snr, snr=6), partial(targets.eps_from_rms, rms=0.1)):
        for a in (X, rows):
            np.testing.assert_allclose(target(a).full_tensor(), target(x), rtol=1e-12)
    on_grid = torch.round(x * 255) / 255
    (grid,) = spread(mesh, [Shard(0)], on_grid)
    v = ca.perturb_quantized(grid, *spread(mesh, [Shard(0)], delta), 0.7)
    np.testing.assert_allclose(v.full_tensor(), ca.perturb_quantized(on_grid, delta, 0.7), rtol=1e-12)


def between_collectives(size):
    """What comes from a collective that is still under way, and gradients that do."""
    mesh = init_device_mesh("cpu", (size,))
    x, delta, *_ = problem(2, shape=(2 * size, 6 * size))
    for here, there in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        X, D = (a.requires_grad_() for a in spread(mesh, [there], x, delta))
        v = ca.perturb(
            X.redistribute(placements=[here], async_op=True), D.redistribute(placements=[here], async_op=True), 0.5
        )
        (v.redistribute(placements=[there], async_op=True) * X.detach()).sum().backward()
        a, b = x.clone().requires_grad_(), delta.clone().requires_grad_()
        (ca.perturb(a, b, 0.5) * x).sum().backward()
        for found, wanted in ((X, a), (D, b)):
            np.testing.assert_allclose(found.grad.full_tensor(), wanted.grad, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            v = ca.perturb(
                X.redistribute(placements=[here], async_op=True), D.redistribute(placements=[here], async_op=True), 0.5
            )
        np.testing.assert_allclose(norm64(v.full_tensor(), x), 0.5, rtol=1e-13)


def parts_and_groups(size):
    """Without DTensors; parts of different lengths; a group that is not all of the world."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(size)))]
    for group, members in zip((*groups, None), (2, size, size), strict=True):
        if rank >= members:
            continue
        for p in (1, 2, math.inf):
            x, delta, eps, lower, upper = whole = problem(p, shape=(3, 100))
            cuts = [0, *sorted(100 * i * i // members**2 for i in range(1, members)), 100]
            here = slice(cuts[rank], cuts[rank + 1])
            mine = [a[:, here].clone().requires_grad_() for a in (x, delta, lower, upper)]
            e = eps.clone().requires_grad_()
            options = {"p": p, "bounds": tuple(mine[2:]), "group": group}
            v = distributed.perturb(*mine[:2], e, **options)
            _, expected = solution(*whole, p)
            np.testing.assert_allclose(v.detach(), expected[:, here], rtol=0, atol=1e-12)
            v.backward(torch.ones_like(v))
            a = [t.clone().requires_grad_() for t in whole]
            ca.perturb(*a[:3], p=p, bounds=tuple(a[3:])).sum().backward()
            wanted = [t.grad[:, here] for t in (a[0], a[1], a[3], a[4])]
            for found, b in zip((*(t.grad for t in mine), e.grad), (*wanted, a[2].grad), strict=True):
                np.testing.assert_allclose(found, b, rtol=1e-9, atol=1e-11)
            plain = [t.detach() for t in mine]
            options["bounds"] = tuple(plain[2:])
            bars = distributed.perturb_vjp(*plain[:2], eps, torch.ones_like(v), **options)
            for found, b in zip(bars, (wanted[0], wanted[1], a[2].grad, wanted[2], wanted[3]), strict=True):
                np.testing.assert_allclose(found, b, rtol=1e-9, atol=1e-11)
            reach = ca.reach(x, delta, p=p, bounds=(lower, upper))
            np.testing.assert_allclose(distributed.reach(*plain[:2], p=p, bounds=options["bounds"], group=group), reach)
            eta = distributed.rescale(*plain[:2], eps, **options)
            said = distributed.report(*plain[:2], eps, **options)
            np.testing.assert_allclose(said.eta, eta, rtol=1e-12)
            np.testing.assert_allclose(said.clipped, ca.report(*whole[:3], p=p, bounds=(lower, upper)).clipped)
    with pytest.raises(TypeError, match=r"x is a numpy array, expected a PyTorch tensor"):
        distributed.perturb(np.ones((2, 2)), np.ones((2, 2)), 0.1)


def bad_values(size):
    """What is wrong on one process is an error on all, and nobody waits."""
    mesh = init_device_mesh("cpu", (size,))
    rank = dist.get_rank()
    own = {0: "on rank 1 of the group, whose own error says which"}
    cases = [
        ("x", lambda a: a["x"][0].fill_(math.nan), r"x has \d+ element\(s\) that are NaN or infinite"),
        ("delta", lambda a: a["delta"][0, :1].fill_(math.inf), r"delta has 1 element\(s\) that are NaN or infinite"),
        ("x", lambda a: a["x"][1, :1].fill_(1.5), r"x has 1 element\(s\) outside its bounds"),
    ]
    for name, spoil, message in cases:
        x, delta, *_ = problem(2, shape=(3, 40))
        X, D = spread(mesh, [Shard(1)], x, delta)
        if rank == 1:
            spoil({"x": X.to_local(), "delta": D.to_local()})
        for function in (ca.perturb, ca.rescale, ca.report):
            with pytest.raises(ValueError, match=message if rank == 1 else own[0]):
                function(X, D, 0.5)
        with pytest.raises(ValueError, match=message if rank == 1 else own[0]):
            ca.reach(X, D)
        assert name in message
    # Rounding may leave x outside, and that is no error.
    X, D = spread(mesh, [Shard(1)], torch.full((2, 40), 1 + 2.0**-23), -torch.ones(2, 40))
    np.testing.assert_allclose((ca.perturb(X, D, 0.5).full_tensor() - 1).norm(dim=1), 0.5, rtol=3e-7)
    with pytest.raises(ValueError, match=r"eps is from 0.5 to 0.75 for sample 1, expected the same number on all"):
        distributed.perturb(X.to_local(), D.to_local(), torch.tensor([0.5, 0.75 if rank == 1 else 0.5]))


def bad_arguments(size):
    mesh = init_device_mesh("cpu", (size,))
    x, delta, *_ = problem(2, shape=(6, 40))
    X, D = spread(mesh, [Shard(1)], x, delta)
    rows = distribute_tensor(delta, mesh, [Shard(0)])
    added = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    other = distribute_tensor(delta, init_device_mesh("cpu", (1, size)), [Replicate(), Shard(1)])
    eps = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    cases = [
        ((added, D, 0.5), {}, ValueError, r"x has placements \[Partial\(sum\)\], expected Shard and Replicate"),
        ((X, added, 0.5), {}, ValueError, r"delta has placements \[Partial\(sum\)\], .*redistribute\(placements=\[Rep"),
        (
            (X, rows, 0.5),
            {},
            ValueError,
            r"delta has placements \[Shard\(0\)\], expected \[Shard\(1\)\] to match x with",
        ),
        ((X, rows, 0.5), {}, ValueError, r"call redistribute\(placements=\[Shard\(1\)\]\) of delta first"),
        ((X, other, 0.5), {}, ValueError, r"delta is on .*, expected .*, the mesh of x"),
        ((X, delta, 0.5), {}, TypeError, r"delta is a torch array, expected a DTensor array to match x"),
        ((x, D, 0.5), {}, TypeError, r"delta is a DTensor array, expected a torch array to match x"),
        ((X, D, eps), {}, ValueError, r"eps has placements \[Shard\(0\)\], expected \[Replicate\(\)\] to match x"),
        ((X, D, torch.ones(5)), {}, ValueError, r"eps has shape \(5,\), expected a number or shape \(6,\)"),
        ((X, D, -torch.ones(6)), {}, ValueError, r"eps is -1.0 for 6 of 6"),
        ((X, D, "1"), {}, TypeError, r"eps is a str, expected a number"),
        ((X, D, 0.5), {"bounds": (0, torch.ones(7))}, ValueError, r"the upper bound has shape \(7,\)"),
        ((X, D, 0.5), {"bounds": (rows, 2)}, ValueError, r"\[Shard\(1\)\]\) of the lower bound first"),
        ((X, D, 0.5), {"mode": "most"}, ValueError, r"mode is 'most'"),
        ((X, D), {}, TypeError, r"missing a required argument: 'eps'"),
    ]
    for args, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            ca.perturb(*args, **options)
    with pytest.raises(
        TypeError, match=r"which perturb_quantized does not take; call x.redistribute\(placements=\[Rep"
    ):
        ca.perturb_quantized(X, D, 0.5)
    with pytest.raises(TypeError, match=r"call this for x.to_local\(\)"):
        noise.sample("gaussian", X)
    with pytest.raises(TypeError, match=r"call this for x.to_local\(\)"):
        noise.AddNoise("gaussian", 1.0)(X)
    X.requires_grad_()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again"):
        torch.autograd.grad(ca.perturb(X, D, 0.5).to_local().sum(), X, create_graph=True)


def local_batches(size):
    """As in data-parallel training, parameters sharded: every process has a batch of its own, and no word is said."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    alone = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    alone.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    batches = torch.rand((size, 5, 12), generator=torch.Generator().manual_seed(1))

    def loss(model, x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).square().sum(), x)
        with Counted() as counted:
            v = ca.perturb(x.detach(), g, 0.4)
        assert counted.sizes == []
        torch.testing.assert_close((v - x).norm(dim=1), torch.full((5,), 0.4), rtol=3e-7, atol=0)
        return model(v).square().mean()

    mine = loss(model, batches[dist.get_rank()])
    model.zero_grad()
    mine = model(ca.perturb(batches[dist.get_rank()], torch.ones(5, 12), 0.4)).square().mean()
    mine.backward()
    sum(alone(ca.perturb(x, torch.ones(5, 12), 0.4)).square().mean() for x in batches).div(size).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6)


def compiled(size):
    """Around a call, torch.compile has its graphs; the call itself is not in them."""
    mesh = init_device_mesh("cpu", (size,))
    x, delta, *_ = problem(2, shape=(3, 40))
    X, D = spread(mesh, [Shard(1)], x, delta)
    v = torch.compile(lambda x, d: ca.perturb(x, d, 0.5) * 1.0, backend="eager")(X, D)
    np.testing.assert_allclose((v.full_tensor() - x).norm(dim=1), 0.5, rtol=1e-12)


CASES = [
    every_layout,
    every_norm,
    hard_rows,
    modes,
    out_of_reach,
    uneven,
    gradients,
    gradients_of_numbers,
    gradients_of_edges,
    collectives,
    near_the_reach,
    other_arguments,
    between_collectives,
    parts_and_groups,
    bad_values,
    bad_arguments,
    local_batches,
    compiled,
]


# A world of four adds meshes of two axes, and groups that are not all of it.
OF_FOUR = [every_layout, out_of_reach, uneven, gradients, gradients_of_numbers, collectives, parts_and_groups]


@pytest.mark.parametrize(("size", "cases"), [(2, CASES), *in_test_all((4, OF_FOUR))], ids=["2", "4"])
def test_world(size, cases, tmp_path):
    said = world(size, tmp_path, cases)
    assert not any(said), "\n".join(filter(None, said))


# --- processes that fail ----------------------------------------------------------------------------------------------


def one_gives_up(size):
    mesh = init_device_mesh("cpu", (size,))
    x, delta, *_ = problem(2, shape=(3, 40))
    X, D = spread(mesh, [Shard(1)], x, delta)
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    ca.perturb(X, D, 0.5)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_others_raise_when_one_fails(size, tmp_path):
    said = world(size, tmp_path, [one_gives_up], seconds=5)
    assert "out of luck" in said[1]
    for rank in {*range(size)} - {1}:
        assert re.search(r"RuntimeError|DistBackendError", said[rank])
        assert "in reduced" in said[rank]
