"""Dask: nothing is computed before it is asked for, a fixed number of rounds, no array in memory as a whole."""

from __future__ import annotations

import math
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import clipaware as ca
from clipaware import noise, targets
from clipaware._backends import numpy as numpy_backend
from clipaware.reference import directions, norm64
from conftest import NUMPY_DTYPES
from tiers import in_test_all

dask = pytest.importorskip("dask", reason="Dask is not installed")
da = pytest.importorskip("dask.array", reason="dask.array does not work here")
from clipaware._backends import dask as backend  # noqa: E402

rng = np.random.default_rng(0)
X, D = rng.random((6, 4, 50)), rng.standard_normal((6, 4, 50))
CHUNKINGS = [(6, 4, 50), (2, 4, 50), (6, 4, 20), (6, 1, 50), (4, 3, 17), (1, 1, 1000)]


@pytest.fixture(autouse=True)
def _one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def lazy(*arrays, chunks):
    return [da.from_array(a, chunks=chunks) for a in arrays]


class Counted:
    """An array that counts how often each of its parts is read."""

    def __init__(self, a):
        self.a, self.reads, self.shape, self.dtype, self.ndim = a, Counter(), a.shape, a.dtype, a.ndim

    def __getitem__(self, part):
        self.reads[tuple((s.start, s.stop) for s in part)] += 1
        return self.a[part]


class Sizes(dask.callbacks.Callback):
    """The most bytes of a task's result, and how many tasks there were."""

    def __init__(self):
        super().__init__(posttask=self._add)
        self.largest, self.tasks = 0, 0

    def _add(self, key, result, *_):
        self.largest, self.tasks = max(self.largest, getattr(result, "nbytes", 0)), self.tasks + 1


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize(("p", "mode"), [(1, "equal"), (2, "at_most"), (3.3, "at_least"), (math.inf, "equal")])
def test_every_chunking_gives_the_same(chunks, p, mode):
    x, delta = lazy(X, D, chunks=chunks)
    eps = 0.4 * ca.reach(X, D, p=p)
    options = {"p": p, "mode": mode}
    np.testing.assert_allclose(ca.reach(x, delta, p=p), ca.reach(X, D, p=p), rtol=1e-14)
    np.testing.assert_allclose(ca.rescale(x, delta, eps, **options), ca.rescale(X, D, eps, **options), rtol=1e-12)
    v = ca.perturb(x, delta, eps, **options)
    assert v.chunks == x.chunks
    np.testing.assert_allclose(v, ca.perturb(X, D, eps, **options), rtol=0, atol=1e-13)


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
@pytest.mark.parametrize("mode", ["equal", "at_most"])
def test_norm_as_written_of_small_eps(eps, mode):
    """Rounding moves the norm of float32 arrays by 1e-5 and more here."""
    n = 2_000_000
    x, delta = rng.random((1, n), np.float32), rng.standard_normal((1, n), np.float32)
    v = ca.perturb(*lazy(x, delta, chunks=(1, 600_000)), eps, mode=mode).compute()
    off = norm64(v, x, 2)[0] / eps - 1
    assert -2e-6 * (mode == "at_most") - 3e-7 <= off <= 3e-7 * (mode == "equal")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_as_near_as_in_one_piece(dtype, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    kind = NUMPY_DTYPES[dtype]
    x, delta = rng.random((2, 3000)).astype(kind), rng.standard_normal((2, 3000)).astype(kind)
    for p in (1, 2, math.inf):
        eps = ca.reach(x, delta, p=p)[:, 0].astype(float) * np.array([0.1, 0.6])
        off = [
            abs(norm64(v.astype(float), x.astype(float), p) / eps - 1)
            for v in (ca.perturb(*lazy(x, delta, chunks=(1, 1100)), eps, p=p).compute(), ca.perturb(x, delta, eps, p=p))
        ]
        assert (off[0] <= off[1] + 1e-6).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_far_below_their_spacing(dtype):
    """Rounding moves the norm by more than eps here, and few elements carry it."""
    kind, rng = NUMPY_DTYPES[dtype], np.random.default_rng(5)
    size = 100 * 10.0 ** rng.uniform(-3, 0, (6, 5000)) * (8 if dtype == "float16" else 1)
    x, delta = (rng.standard_normal((6, 5000)) * size).astype(kind), rng.standard_normal((6, 5000)).astype(kind)
    for eps in (20.0, 70.0):
        options = {"eps": eps, "bounds": (-math.inf, math.inf)}
        split = ca.perturb(*lazy(x, delta, chunks=(6, 1250)), **options).compute()
        off = [
            abs(norm64(v.astype(float), x.astype(float), 2) / eps - 1) for v in (split, ca.perturb(x, delta, **options))
        ]
        assert (off[0] <= off[1] + 3e-7).all()


@pytest.mark.parametrize("scale", [1, 1e-30, 1e-250, *in_test_all(1e-3, 1e-150)])
def test_small_deltas(scale):
    """Neither large sizes nor little room make a difference to that in one piece."""
    x, delta = np.array([[0.5, 0.25, -0.5, 0.75]]), np.array([[0.5, 0.25, -0.125, 0.25]]) * scale
    everywhere = (-math.inf, math.inf)
    cases = [(eps, (-1, 1), p, mode) for eps in (1e160, 1e290) for p in (2, 7) for mode in ("equal", "at_most")]
    cases += [(eps, everywhere, p, "equal") for eps in (1e-200, 1e160, 1e200) for p in (1, 2, math.inf)]
    cases += [(eps, (-4e200, 4e200), p, "equal") for eps in (1e-300, 1e-200) for p in (1, 2, 7)]
    cases += [(1.0, (-1e-200, 1e-200), 2, "equal")]
    for eps, bounds, p, mode in cases:
        start = x * 0 if bounds == everywhere or bounds[1] < 1 else x * bounds[1]
        options = {"eps": eps, "bounds": bounds, "p": p, "mode": mode}
        for function in (ca.perturb, ca.rescale):
            found = function(*lazy(start, delta, chunks=(1, 2)), **options).compute()
            np.testing.assert_allclose(found, function(start, delta, **options), rtol=1e-12, err_msg=f"{options}")


def test_moves_that_are_no_normal_numbers():
    """For large p, powers are taken in units of the largest move of a chunk."""
    x = np.array([[0.17, 0.0, 0.66, 0.78], [0.65, 0.0, 0.54, 0.27]])
    delta = np.array([[-1.3e-320, 1.2e-320, -83.6, -172.2], [-1.1e300, -8.7e299, 0.23, 7.8e-11]])
    for p in (5, 100):
        v = ca.perturb(*lazy(x, delta, chunks=(2, 2)), 0.05, p=p, mode="at_most").compute()
        np.testing.assert_allclose(v, ca.perturb(x, delta, 0.05, p=p, mode="at_most"), rtol=0, atol=1e-12)


def test_empty_batches_and_samples():
    for size, chunks in (((0, 5), (1, 2)), ((3, 0), (2, 1)), ((0, 0), (1, 1))):
        x = da.zeros(size, chunks=chunks)
        for eps in (1.0, np.ones(size[0])):
            assert ca.perturb(x, x, eps).compute().shape == size
            assert ca.rescale(x, x, eps).compute().shape == (size[0], 1)
            assert [a.compute().shape for a in ca.perturb_vjp(x, x, eps, x)] == [size, size, np.shape(eps), (), ()]
        bounds = np.zeros((size[0], 1)), np.ones((1, size[1]))
        assert [a.compute().shape for a in ca.perturb_vjp(x, x, 1.0, x, bounds=bounds)[3:]] == [
            (size[0], 1),
            (1, size[1]),
        ]


@pytest.mark.parametrize("chunks", [((2, 4), (1, 3), (20, 0, 30)), ((0, 6, 0), (0, 4), (25, 25))], ids=str)
@pytest.mark.parametrize("p", [2, math.inf])
def test_empty_chunks(p, chunks):
    """As a mask leaves them, along samples and along the batch."""
    x, delta = lazy(X, D, chunks=chunks)
    np.testing.assert_allclose(ca.perturb(x, delta, 0.3, p=p), ca.perturb(X, D, 0.3, p=p), rtol=1e-12)
    found, known = ca.report(x, delta, 0.3, p=p), ca.report(X, D, 0.3, p=p)
    np.testing.assert_allclose(found.norm, known.norm, rtol=1e-12)
    for bar, known in zip(ca.perturb_vjp(x, delta, 0.3, delta, p=p), ca.perturb_vjp(X, D, 0.3, D, p=p), strict=True):
        np.testing.assert_allclose(bar, known, rtol=1e-9, atol=1e-12)


def test_a_batch_of_which_nothing_is_left():
    x = da.from_array(X, chunks=(2, 3, 25))
    none = x[x[:, 0, 0] > 2].compute_chunk_sizes()
    assert ca.perturb(none, none, 0.3).compute().shape == (0, *X.shape[1:])


def test_arrays_of_all_kinds_are_read_anew(tmp_path):
    """Slices, what is rechunked, concatenated, in memory: their graphs differ."""
    a = da.from_array(X, chunks=(4, 3, 20))
    grown = da.concatenate([a, a + 1], axis=2)
    for x in (
        a[:, 1:, 3:44],
        a.rechunk((2, 2, 13)),
        grown / 2,
        grown,
        a.persist(),
        a.transpose(2, 0, 1),
        da.where(a > 0.5, a, 0),
    ):
        delta = -2 * x
        whole = x.compute()
        expected = ca.perturb(whole, -2 * whole, 0.3, bounds=(-1, 3))
        np.testing.assert_allclose(ca.perturb(x, delta, 0.3, bounds=(-1, 3)), expected, rtol=0, atol=1e-13)


def test_nothing_is_computed_by_the_call():
    x, delta = (da.from_array(Counted(a), chunks=(3, 2, 25)) for a in (X, D))
    with Sizes() as sizes:
        for found in (
            ca.perturb(x, delta, 1.0),
            ca.rescale(x, delta, np.ones(6)),
            ca.reach(x, delta),
            ca.report(x, delta, 1.0).norm,
            *ca.perturb_vjp(x, delta, 1.0, x),
            ca.l2_clipping_aware_rescaling(x, delta, 1.0),
        ):
            assert isinstance(found, da.Array)
    assert sizes.tasks == 0


@pytest.mark.parametrize(("p", "eps", "rounds"), [(2, 1.0, 6), (2, da.ones(6), 7), (math.inf, 0.2, 5)])
def test_rounds_of_gradients(p, eps, rounds):
    x, delta = Counted(X), Counted(D)
    lazy_x, lazy_delta = (da.from_array(a, chunks=(3, 4, 20), name=False) for a in (x, delta))
    bars = ca.perturb_vjp(lazy_x, lazy_delta, eps, da.ones(X.shape, chunks=(3, 4, 20)), p=p)
    delta.reads.clear()
    dask.compute(*bars)
    assert set(delta.reads.values()) == {rounds}


@pytest.mark.parametrize(("chunks", "rounds"), [((3, 4, 20), 5), ((3, 4, 50), 1)])
def test_rounds_of_a_report(chunks, rounds):
    x, delta = Counted(X), Counted(D)
    report = ca.report(*(da.from_array(a, chunks=chunks, name=False) for a in (x, delta)), 1.0)
    delta.reads.clear()
    dask.compute(*vars(report).values())
    assert set(delta.reads.values()) == {rounds}


@pytest.mark.parametrize(
    ("p", "mode", "chunks", "rounds"),
    [
        (2, "equal", (3, 4, 20), 5),
        (1, "at_most", (3, 4, 20), 5),
        (math.inf, "equal", (3, 4, 20), 3),
        (2, "equal", (3, 4, 50), 1),
    ],
)
def test_rounds(p, mode, chunks, rounds):
    x, delta = Counted(X), Counted(D)
    lazy_x, lazy_delta = (da.from_array(a, chunks=chunks, name=False) for a in (x, delta))
    v = ca.perturb(lazy_x, lazy_delta, 1.0, p=p, mode=mode)
    for counted in (x, delta):
        counted.reads.clear()  # of nothing, to see what it would be
    v.compute()
    for counted in (x, delta):
        assert len(counted.reads) == lazy_x.npartitions
        assert set(counted.reads.values()) == {rounds}


def test_no_task_makes_more_than_a_chunk():
    n, chunk = 400_000, 50_000
    x, delta = rng.random((1, n), np.float32), rng.standard_normal((1, n), np.float32)
    for p in (2, math.inf):
        for mode in ("equal", "at_most"):
            lazy_x, lazy_delta = (da.from_array(Counted(a), chunks=(1, chunk)) for a in (x, delta))
            v = ca.perturb(lazy_x, lazy_delta, 50.0 if p == 2 else 0.3, p=p, mode=mode)
            with Sizes() as sizes:
                total = (v - lazy_x).sum().compute()
            assert math.isfinite(total)
            assert 0 < sizes.largest <= 4 * chunk


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("p", [1, 7.0, *in_test_all(2)])
def test_awkward_rows(p, compiled, monkeypatch):
    """Geometric breakpoints, clusters of them, ties, next to the reach; with kernels and without."""
    if not compiled:
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    n = 600
    rows = [
        1.5 ** -np.arange(n, dtype=float).clip(0, 500),
        10.0 ** -(np.arange(n) % 250.0),
        1 + 1e-9 * rng.random(n),
        np.where(np.arange(n) % 2, 1.0, 1e-7 * (1 + 1e-12 * rng.random(n))),
        np.ones(n),
        rng.standard_cauchy(n),
    ]
    x, delta = np.full((len(rows), n), 0.5), np.stack(rows)
    lazy_x, lazy_delta = lazy(x, delta, chunks=(4, 130))
    for share in (0.01, 0.5, 0.99, 0.99999, 1.0):
        eps = ca.reach(x, delta, p=p)[:, 0] * share
        v = ca.perturb(lazy_x, lazy_delta, eps, p=p).compute()
        np.testing.assert_allclose(norm64(v, x, p), eps, rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("p", [1, 3])
def test_sums_of_many_equal_elements(p, compiled, axis, monkeypatch):
    """One after another they would drift, as NumPy adds up samples that lie across memory."""
    if not compiled:
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    n = 40_000
    sample = np.full(n, 0.1)
    sample[0] = 0.3
    delta = np.stack([sample, sample], axis=1 - axis)
    x, delta = lazy(delta * 0, delta, chunks=[25_000 if i == axis else 2 for i in (0, 1)])
    for upper in (np.full(n, math.inf), np.where(np.arange(n) % 2, 0.05, 1)):
        eps = math.fsum(np.minimum(0.7 * sample, upper) ** p) ** (1 / p)
        bounds = (0, np.expand_dims(upper, 1 - axis))
        for eta in ca.rescale(x, delta, eps, p=p, bounds=bounds, axis=axis).compute().ravel():
            found = math.fsum(np.minimum(eta * sample, upper) ** p) ** (1 / p)
            np.testing.assert_allclose(found, eps, rtol=1e-14)


@pytest.mark.parametrize("kind", ["gaussian", "cauchy", "lognormal"])
def test_float32_of_many_chunks(kind):
    n = 300_000
    x, delta = rng.random((2, n), np.float32), directions(kind, 2, n, 1).astype(np.float32)
    for share in (0.05, 0.25, 0.9):
        eps = ca.reach(x, delta)[:, 0].astype(float) * share
        v = ca.perturb(*lazy(x, delta, chunks=(1, 40_000)), eps).compute()
        np.testing.assert_allclose(norm64(v, x, 2), eps, rtol=3e-7)


@pytest.mark.parametrize("p", [2, math.inf])
def test_chunks_of_several_tiles(p, monkeypatch):
    monkeypatch.setattr(backend, "TILE", 16)
    x, delta = lazy(X, D, chunks=(4, 3, 17))
    eps = 0.4 * ca.reach(X, D, p=p)
    np.testing.assert_allclose(ca.reach(x, delta, p=p), ca.reach(X, D, p=p), rtol=1e-14)
    np.testing.assert_allclose(ca.perturb(x, delta, eps, p=p), ca.perturb(X, D, eps, p=p), rtol=0, atol=1e-13)
    for mine, known in zip(ca.perturb_vjp(x, delta, eps, delta, p=p), ca.perturb_vjp(X, D, eps, D, p=p), strict=True):
        np.testing.assert_allclose(mine, known, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunks", [(2, 4, 50), (4, 3, 17)])
def test_eps_and_bounds_in_other_chunks(chunks):
    x, delta = lazy(X, D, chunks=chunks)
    eps, lower, upper = rng.uniform(0.5, 1.5, 6), -rng.random((4, 50)), 1 + rng.random((6, 1, 1))
    expected = ca.perturb(X, D, eps, bounds=(lower, upper))
    for given in (eps, da.from_array(eps, chunks=5), da.from_array(eps.reshape(6, 1, 1), chunks=1)):
        for bounds in ((lower, upper), (da.from_array(lower, chunks=(2, 7)), da.from_array(upper, chunks=4))):
            np.testing.assert_allclose(ca.perturb(x, delta, given, bounds=bounds), expected, rtol=0, atol=1e-13)
    v = ca.perturb(x, delta.rechunk((5, 2, 9)), eps, bounds=(lower, upper))
    assert v.chunks == x.chunks
    np.testing.assert_allclose(v, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunks", [(2, 4, 50), (4, 3, 17)])
def test_rows_that_make_no_sense_are_nan(chunks):
    x, delta, eps = X.copy(), D.copy(), np.full(6, 1.0)
    x[0, 1, 30], delta[1, 2, 7], eps[2], delta[3] = math.nan, math.inf, -1.0, 0.0
    eps[4] = 0.0
    x[5, 3, 3] = 1.5  # outside its bounds: clipped first
    lazy_x, lazy_delta = lazy(x, delta, chunks=chunks)
    v = ca.perturb(lazy_x, lazy_delta, da.from_array(eps, chunks=2)).compute()
    assert np.isnan(v[:3]).all()
    np.testing.assert_array_equal(v[3:5], X[3:5])
    x[5, 3, 3] = 1.0
    np.testing.assert_allclose(v[5], ca.perturb(x[5], delta[5], 1.0, axis=None), atol=1e-14)
    eta = ca.rescale(lazy_x, lazy_delta, da.from_array(eps, chunks=2), unreachable="nan").compute().ravel()
    np.testing.assert_array_equal(np.isnan(eta), [True, True, True, True, False, False])


def test_what_is_refused():
    x, delta = lazy(X, D, chunks=(2, 4, 20))
    with pytest.raises(TypeError, match=r"delta is a numpy array, expected a dask array to match x"):
        ca.perturb(x, D, 1.0)
    unknown = x[x[:, 0, 0] > 0.5]
    with pytest.raises(ValueError, match=r"expected known chunk sizes; call its compute_chunk_sizes\(\) first"):
        ca.perturb(unknown, unknown, 1.0)
    with pytest.raises(ValueError, match=r"x has samples in several chunks, .* x.rechunk\(\{2: -1\}\) brings them"):
        ca.perturb_quantized(x, delta, 1.0)


@pytest.mark.parametrize("chunks", [(2, 4, 50), (4, 3, 17)])
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_unreachable_is_an_error_when_computed(chunks, p):
    x, delta = lazy(X, D, chunks=chunks)
    eps = np.array([0.1, 0.1, 0.1, 500.0, 0.1, 0.1])
    for function in (ca.perturb, ca.rescale):
        found = function(x, delta, eps, p=p, unreachable="raise")
        with pytest.raises(ca.UnreachableError, match=r"sample 3: eps 500 > reach") as caught:
            found.compute()
        np.testing.assert_array_equal(caught.value.rows, [3])
        np.testing.assert_allclose(caught.value.reach, ca.reach(X, D, p=p).ravel()[3], rtol=1e-12)
        assert not np.isnan(function(x, delta, 0.1, p=p, unreachable="raise")).any()


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_quantized(kind):
    x, delta = (np.rint(X * 255) / 255).astype(kind), D.astype(kind)
    lower, upper = np.zeros((4, 1), kind), da.ones((6, 1, 1), dtype=kind, chunks=4)
    eps = np.linspace(0.2, 2, 6).astype(kind)
    for given, bounds in ((1.0, (0, 1)), (eps, (lower, upper)), (da.from_array(eps, chunks=4), (0, 1))):
        size, *ends = (np.asarray(a) if isinstance(a, da.Array) else a for a in (given, *bounds))
        expected = ca.perturb_quantized(x, delta, size, bounds=tuple(ends), seed=3)
        v = ca.perturb_quantized(*lazy(x, delta, chunks=(4, 4, 50)), given, bounds=bounds, seed=3)
        assert isinstance(v, da.Array)
        np.testing.assert_array_equal(v, expected)
    too_much = ca.perturb_quantized(*lazy(x, delta, chunks=(4, 4, 50)), eps * 25, unreachable="raise")
    with pytest.raises(ca.UnreachableError, match=r"sample 5: eps 50 > reach"):
        too_much.compute()


def test_report_prints():
    x, delta = lazy(X, D, chunks=(2, 4, 20))
    assert str(ca.report(x, delta, 1.0)) == str(ca.report(X, D, 1.0))


@pytest.mark.parametrize("chunks", [(2, 4, 50), (4, 3, 17)])
def test_targets_and_noise(chunks):
    (x,) = lazy(X, chunks=chunks)
    np.testing.assert_allclose(targets.eps_from_snr(x, 6.0), targets.eps_from_snr(X, 6.0))
    np.testing.assert_allclose(targets.eps_from_psnr(x, 20.0), targets.eps_from_psnr(X, 20.0))
    np.testing.assert_allclose(targets.eps_from_rms(x, 0.1), targets.eps_from_rms(X, 0.1))
    np.testing.assert_allclose(targets.eps_from_contrast(x, 0.1), targets.eps_from_contrast(X, 0.1))
    for kind in noise.KINDS[:-1]:
        delta = noise.sample(kind, x, seed=0)
        assert delta.chunks == x.chunks
        np.testing.assert_array_equal(delta, noise.sample(kind, x, seed=0))
        v = ca.perturb(x, delta, 0.5).compute()
        np.testing.assert_allclose(np.linalg.norm((v - X).reshape(6, -1), axis=1), 0.5, rtol=1e-12)
    if x.numblocks[2] == 1:
        assert noise.sample("pink", x, seed=0).compute().shape == X.shape
    else:
        with pytest.raises(ValueError, match=r"x has several chunks along \[2\], expected one"):
            noise.sample("pink", x, seed=0)


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_from_zarr_to_zarr(tmp_path, scheduler):
    pytest.importorskip("zarr", reason="zarr is not installed")
    for name, a in (("x", X), ("delta", D)):
        da.from_array(a, chunks=(4, 3, 20)).to_zarr(str(tmp_path / name))
    with dask.config.set(scheduler=scheduler, num_workers=2):
        x, delta = (da.from_zarr(str(tmp_path / name)) for name in ("x", "delta"))
        ca.perturb(x, delta, 1.0).to_zarr(str(tmp_path / "v"))
    np.testing.assert_allclose(da.from_zarr(str(tmp_path / "v")), ca.perturb(X, D, 1.0), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", *in_test_all("float64")])
def test_other_processes_give_the_same(dtype):
    """To the last digit: what travels there is what it was."""
    x, delta, g = lazy(*(a.astype(dtype) for a in (X, D / 8, rng.standard_normal(X.shape))), chunks=(4, 3, 17))
    found = []
    for scheduler in ("synchronous", "processes"):
        with dask.config.set(scheduler=scheduler, num_workers=2):
            results = [(ca.perturb(x, delta, 0.1, p=p), *ca.perturb_vjp(x, delta, 0.1, g, p=p)) for p in (2, math.inf)]
            found.append(dask.compute(*sum(results, ())))
    for here, there in zip(*found, strict=True):
        assert here.dtype == there.dtype
        np.testing.assert_array_equal(here, there)


def test_on_a_cluster():
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        x, delta = lazy(X, D, chunks=(4, 3, 17))
        expected = ca.perturb(X, D, 1.0)
        for a in (x, client.persist(x)):
            v = client.compute(ca.perturb(a, delta, 1.0)).result()
            np.testing.assert_allclose(v, expected, rtol=0, atol=1e-13)


def test_the_example(tmp_path, monkeypatch, capsys):
    pytest.importorskip("zarr", reason="zarr is not installed")
    file = Path(__file__).parent.parent / "examples" / "out_of_core.py"
    arguments = ["--elements", "1e5", "--chunk", "3e4", "--folder", str(tmp_path / "arrays"), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [file.name, *arguments])
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        ca.set_threads(None)
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.rpartition(" ")[2]) <= 3e-7
