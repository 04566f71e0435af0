"""Compiled kernels: threads, processes, the cache, and what only they do."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("numba", reason="Numba is not installed")
from numba import njit

import clipaware as ca
from clipaware import _math
from clipaware._backends import numpy as backend
from clipaware._kernels import compiled, threads
from clipaware._kernels import numba as kernels
from clipaware.reference import directions
from tiers import in_test_all


@pytest.fixture
def restored_threads():
    before = threads.count()
    yield
    ca.set_threads(before)


def large(rows=64, n=5000, seed=0):
    """Enough elements for a call to be split over threads."""
    rng = np.random.default_rng(seed)
    x, delta = rng.random((rows, n), np.float32), rng.standard_normal((rows, n), np.float32)
    assert len(kernels.split(rows, n)) > 1 or threads.count() == 1
    return x, delta


def mixed(n, dtype):
    """Rows of every kind, and their eps."""
    rng = np.random.default_rng(n)
    x, delta = rng.random((9, n)).astype(dtype), directions("cauchy", 9, n, n).astype(dtype)
    delta[1], delta[2] = 0, np.abs(delta[2])
    x[2] = 1
    delta[3, ::2], delta[4] = 0, delta[4] * np.asarray(1e-30, dtype)
    delta[5] *= np.asarray(1e30, dtype)
    eps = np.array([0.3, 0.3, 0.3, 0.1, 0.4, 0.4, 0.0, 1e6, 0.9])
    return x, delta, eps


# In float32 each order that has code of its own is compiled by other tests, too.
@pytest.mark.parametrize(
    ("p", "dtype"),
    [
        *((p, "float64") for p in (2, 2.7, 3, math.inf)),
        *((p, "float32") for p in (1, 2, 2.7)),
        *in_test_all(*((p, "float64") for p in (1, 1.5, 4, 20)), *((p, "float32") for p in (1.5, 3, 4, 20, math.inf))),
    ],
)
@pytest.mark.parametrize("n", [700, *in_test_all(2, 9000)])
def test_kernels_agree_with_the_text(n, p, dtype, monkeypatch):
    x, delta, eps = mixed(n, dtype)
    eps[8] *= ca.reach(x, delta, p=p)[8, 0]
    tolerance = 2e-6 if dtype == "float32" else 1e-12
    g = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
    lower, upper = np.full(n, -0.5, dtype), np.linspace(1, 2, n).astype(dtype)
    for bounds in ((0, 1), (None, 1), (lower, upper), (lower, None)):
        for mode in ("equal", "at_most", "at_least"):
            options = {"p": p, "bounds": bounds, "mode": mode}
            with monkeypatch.context() as patch:
                patch.setattr(backend, "kernels", lambda: None)
                eta = ca.rescale(x, delta, eps, **options)
                v = ca.perturb(x, delta, eps, **options)
                bars = ca.perturb_vjp(x, delta, eps, g, **options)
            np.testing.assert_allclose(ca.rescale(x, delta, eps, **options), eta, rtol=tolerance * 10)
            np.testing.assert_allclose(ca.perturb(x, delta, eps, **options), v, rtol=tolerance, atol=tolerance)
            for mine, theirs in zip(ca.perturb_vjp(x, delta, eps, g, **options), bars, strict=True):
                scale = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
                # An element at its kink may fall on either side, as rounding has it.
                off = np.abs(mine - theirs) > (2e-3 if dtype == "float32" else 1e-9) * scale
                assert off.mean() <= 2 / n, (off.sum(), scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cotangents_are_not_copied_to_the_size_of_x(dtype, monkeypatch):
    """One number for all, as of a sum; one row, as of weights that all samples share; or one for each."""
    x, delta, eps = mixed(700, dtype)
    row = np.random.default_rng(1).standard_normal(700).astype(dtype)
    monkeypatch.setattr(kernels, "groups", None)  # where rows are copied: a dense cotangent is not, either
    for g in (np.broadcast_to(row[0], x.shape), np.broadcast_to(row, x.shape)):
        found, expected = (ca.perturb_vjp(x, delta, eps, given) for given in (g, g.copy()))
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [2, 2.7, math.inf, *in_test_all(1, 1.5, 3, 4, 20)])
@pytest.mark.parametrize("n", [20_000, *in_test_all(5)])
def test_a_long_row_in_parts_is_the_same_row(n, p, dtype, monkeypatch, restored_threads):
    """One row's sweeps spread over threads; every kind of row, most of which are not long."""
    x, delta, eps = mixed(n, dtype)
    eps[8] *= ca.reach(x, delta, p=p)[8, 0]
    bounds = np.zeros((1, 1), dtype), np.ones((1, 1), dtype)
    ca.set_threads(2)

    def solved():
        found = [
            kernels.solve(*(a[k : k + 1] for a in (x, delta, eps[:, None])), *bounds, float(p), write=True)
            for k in range(len(x))
        ]
        return [np.concatenate([row[i] for row in found]) for i in range(3)]

    whole = solved()
    monkeypatch.setattr(kernels, "LONG", 1)
    monkeypatch.setattr(kernels, "LARGE", 1)
    in_parts = solved()
    np.testing.assert_array_equal(in_parts[2], whole[2])
    np.testing.assert_allclose(in_parts[1], whole[1], rtol=1e-6 if dtype == "float32" else 1e-13)
    np.testing.assert_allclose(in_parts[0], whole[0], rtol=0, atol=2e-7 if dtype == "float32" else 1e-14)
    reached = [kernels.reach(x[:1], delta[:1], *bounds, float(p))[0]]
    monkeypatch.undo()
    np.testing.assert_allclose(reached[0], kernels.reach(x[:1], delta[:1], *bounds, float(p))[0], rtol=1e-6)


def test_a_long_row_that_does_not_reach(monkeypatch, restored_threads):
    """The largest element is that of all parts, not more."""
    ca.set_threads(2)
    monkeypatch.setattr(kernels, "LONG", 1)
    monkeypatch.setattr(kernels, "LARGE", 1)
    x, delta, one = np.full((1, 20_000), 0.5), np.ones((1, 20_000)), np.ones((1, 1))
    v, eta, status, _ = kernels.solve(x, delta, 0.6 * one, 0 * one, one, math.inf, "at_most", write=True)
    assert (v == 1).all()
    assert (eta[0, 0], status[0, 0]) == (0.5, _math.UNREACHABLE)


def test_gradients_of_several_groups(monkeypatch):
    """Of halves, which are converted some rows at a time."""
    rng = np.random.default_rng(0)
    x, delta, g = (a.astype(np.float16) for a in (rng.random((6, 50)), *rng.standard_normal((2, 6, 50))))
    problem = x, delta, np.full((6, 1), 0.8), np.zeros((1, 1), np.float16), np.ones((1, 1), np.float16), 2.0
    _, eta, status = kernels.solve(*problem)[:3]
    given = *problem, eta, status, g, np.arange(6.0)[:, None], (True, True, True)
    whole = kernels.vjp(*given)
    monkeypatch.setattr(kernels, "GROUP", 100)
    for mine, expected in zip(kernels.vjp(*given), whole, strict=True):
        if expected is not None:
            np.testing.assert_array_equal(mine, expected)


@njit
def powers(z, p, out):
    for i in range(z.size):
        out[i] = compiled.power(z[i], p)


@pytest.mark.parametrize("p", [0.3, 1.0, 1.3, 2.7, 10.0, 50.0])
def test_power(p):
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.random(1000), np.exp(rng.uniform(-80, 80, 1000)), [0.0, 1.0, 2.0, 0.5, 1e-45, 3e38]])
    z = z.astype(np.float32)
    out = np.empty(z.size)
    powers(z, p, out)
    with np.errstate(over="ignore"):
        expected = z.astype(float) ** p
    usual = (expected > 1e-300) & (expected < 1e300)
    np.testing.assert_allclose(out[usual], expected[usual], rtol=3e-9)
    assert out[z == 0] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_half(dtype):
    """Where nothing is rescaled, the result is the sum, rounded as the dtype is."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (4, 3000)
    scale = 2.0 ** torch.randint(-30, 12, shape, generator=generator)
    x, delta = ((torch.randn(shape, generator=generator) * scale).to(kind) for _ in range(2))
    delta[1], x[2] = delta[1] / 1000, delta[2] * 3  # ties and their neighbours
    v = ca.perturb(x, delta, 1e30, bounds=(None, None), mode="at_most")
    torch.testing.assert_close(v, (x.float() + delta.float()).to(kind), rtol=0, atol=0)


def test_threads_at_once_and_their_number(restored_threads):
    x, delta = large()
    ca.set_threads(1)
    expected, long = ca.perturb(x, delta, 5.0), ca.perturb(x.reshape(1, -1), delta.reshape(1, -1), 5.0)
    gradients = ca.perturb_vjp(x, delta, 5.0, x)
    failures = []

    def work():
        for _ in range(6):
            if not np.array_equal(ca.perturb(x, delta, 5.0), expected):
                failures.append("rows")
            if np.abs(ca.perturb(x.reshape(1, -1), delta.reshape(1, -1), 5.0) - long).max() > 2e-7:
                failures.append("long")
            if any(not np.array_equal(*pair) for pair in zip(ca.perturb_vjp(x, delta, 5.0, x), gradients, strict=True)):
                failures.append("gradients")

    for number in (1, 2, 5):
        ca.set_threads(number)
        assert threads.count() == number
        workers = [threading.Thread(target=work) for _ in range(16)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failures


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2"])
def test_number_of_threads_that_cannot_be(number):
    with pytest.raises(ValueError, match="expected a positive int or None"):
        ca.set_threads(number)


def test_an_error_in_a_thread_is_raised_in_the_caller(restored_threads):
    ca.set_threads(3)

    def work(piece):
        raise KeyError(piece)

    with pytest.raises(KeyError):
        threads.run(work, range(8))


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_waits_for_its_threads(fails, restored_threads):
    """Also for one that is still at work when nothing is left to take."""
    ca.set_threads(2)
    here, started, done = threading.current_thread(), threading.Event(), []

    def work(piece):
        if threading.current_thread() is here:
            assert started.wait(60)
        else:
            started.set()
            time.sleep(0.3)
            if fails:
                raise KeyError(piece)
        done.append(piece)

    with pytest.raises(KeyError) if fails else nullcontext():
        threads.run(work, range(4))
    assert len(done) == (3 if fails else 4)


def test_a_new_number_of_threads_has_all_of_them(restored_threads):
    """Whatever those before are still busy with."""
    ca.set_threads(2)
    here, begun, free = threading.current_thread(), threading.Event(), threading.Event()

    def first(piece):
        if threading.current_thread() is here:
            assert begun.wait(60)
            raise KeyError(piece)  # upon which the other is left alone
        begun.set()
        assert free.wait(60)

    with pytest.raises(KeyError):
        threads.run(first, range(2))
    ca.set_threads(2)
    met = threading.Barrier(2, timeout=60)
    try:
        threads.run(lambda piece: met.wait(), range(2))
    finally:
        free.set()


def in_a_process(queue):
    x, delta = large()
    queue.put(ca.perturb(x, delta, 5.0).sum())


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes(how, restored_threads):
    """Children that split their work, of a parent that has done so before."""
    ca.set_threads(2)
    x, delta = large()
    expected = ca.perturb(x, delta, 5.0).sum()
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads, which is the point
        children = [context.Process(target=in_a_process, args=(queue,)) for _ in range(2)]
        for child in children:
            child.start()
    sums = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=120)
    assert sums == [expected] * 2


class Noisy:
    """Pictures with noise on them, as a loader's worker makes them."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        import torch

        x, delta = (torch.from_numpy(a) for a in large(seed=index))
        return ca.perturb(x, delta, 5.0)


def test_in_a_data_loader():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ca.perturb(*large(), 5.0)  # the parent's own threads
    torch.ones(2_000_000).exp().sum()  # and PyTorch's
    data = Noisy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for index, v in enumerate(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)):
            assert torch.equal(v, data[index])


CALL = (
    "import numpy as np, clipaware as ca; v = ca.perturb(np.full(9, 0.5), np.ones(9), 0.6); print((v - 0.5).round(6))"
)


def run(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


if sysconfig.get_config_var("Py_GIL_DISABLED"):

    def test_the_interpreters_lock_stays_off():
        assert run(f"{CALL}; import sys; print(sys._is_gil_enabled())")[0].endswith("False")


@pytest.mark.parametrize(
    "before",
    [
        "",  # as it is
        "import sys; sys.modules['numba'] = None; ",  # not installed
        *in_test_all(
            "import numba.core.caching as c; c.CacheImpl._locator_classes = []; ",  # nowhere to write to
            # A disk that fills up.
            "import numba.core.caching as c\n"
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "c.IndexDataCacheFile.save = full; c.IndexDataCacheFile.load = lambda *_: None\n",
        ),
    ],
    ids=["as it is", "no Numba", "read-only", "full"],
)
def test_first_call_is_right_and_silent(before):
    assert run(before + CALL) == ("[0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2]", "")


def test_read_only_input_is_not_compiled_for_again():
    x, delta = large(8, 40_000)
    before = ca.perturb(x, delta, 5.0)
    count = len(compiled.solve_rows.signatures)
    x.flags.writeable = delta.flags.writeable = False
    np.testing.assert_array_equal(ca.perturb(x, delta, np.broadcast_to(5.0, 8)), before)
    np.testing.assert_array_equal(ca.perturb(x[::-1], delta[::-1], 5.0)[::-1], before)
    assert len(compiled.solve_rows.signatures) == count


def test_status_of_compiled_rows():
    x, delta, eps = mixed(700, "float64")
    zero, one = np.zeros((1, 1)), np.ones((1, 1))
    status = kernels.solve(x, delta, eps[:, None], zero, one, 2.0)[2][:, 0]
    kinds = [_math.ZERO, _math.UNREACHABLE, _math.AT_ZERO, _math.UNREACHABLE]
    assert status[[1, 2, 6, 7]].tolist() == kinds
    assert (status[[0, 3, 4, 5, 8]] == _math.REGULAR).all()


@pytest.mark.parametrize("p", [1.5, 2, 3, 4])
def test_back_from_finer_units(p):
    """A sample that sees nothing of what counts leads so far right that sums underflow, and back again."""
    n = compiled.SAMPLE_FROM
    delta = np.full((1, n), 1e-13, np.float32)
    delta[0, 5000:5100] = 100  # between two runs of the sample
    eta = ca.rescale(np.full((1, n), 0.5, np.float32), delta, 1.0, p=p)
    np.testing.assert_allclose(eta[0, 0], 0.01 / 100 ** (1 / p), rtol=1e-6)


def test_rows_that_are_not_solved_do_not_warn(monkeypatch):
    """They hold whatever was in memory before, here numbers that are too large for float16."""
    empty = np.empty

    def filled(*args, **options):
        array = empty(*args, **options)
        if array.dtype == np.float32:
            array.fill(1e30)
        return array

    monkeypatch.setattr(np, "empty", filled)
    x = np.full((2, 3), 2.0, np.float16)
    with pytest.raises(ValueError, match="outside its bounds"):
        ca.perturb(x, np.ones_like(x), 0.1)
