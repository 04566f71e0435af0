"""Whatever comes in: layouts, axes, empty arrays, subclasses; it goes out as it came, and is never modified."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import clipaware as ca
from clipaware._backends import numpy as numpy_backend
from clipaware.reference import norm64

rng = np.random.default_rng(0)
X, D = rng.random((4, 3, 5, 6)), rng.standard_normal((4, 3, 5, 6))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 7), (2, 3, 4), (1, 1), (5, 1)])
def test_dtype_and_shape_go_out_as_they_came(be, shape, dtype):
    x, delta = be.array(np.full(shape, 0.5), dtype), be.array(np.ones(shape), dtype)
    v, eta, reach = ca.perturb(x, delta, 0.1), ca.rescale(x, delta, 0.1), ca.reach(x, delta)
    assert type(v) is type(x)
    assert v.dtype == eta.dtype == x.dtype
    assert tuple(v.shape) == shape
    kept = (shape[0], *(1,) * (len(shape) - 1)) if len(shape) > 1 else (1,) * len(shape)
    assert tuple(eta.shape) == tuple(reach.shape) == kept
    assert ("float64" if dtype == "float64" else "float32") in str(reach.dtype)


@pytest.mark.parametrize("axis", ["batch", None, 0, 1, -1, (1, 2, 3), (0, 2), (3, 1), [2, 3], ()])
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_axis(be, axis, p):
    sample = {"batch": (1, 2, 3), None: (0, 1, 2, 3)}.get(axis if not isinstance(axis, list) else 0, axis)
    sample = tuple(i % 4 for i in ((sample,) if isinstance(sample, int) else sample)) if axis != [2, 3] else (2, 3)
    batch = tuple(i for i in range(4) if i not in sample)
    kept = tuple(1 if i in sample else n for i, n in enumerate(X.shape))
    eps = 0.4 * be.reach(X, D, p=p, axis=axis)
    assert eps.shape == kept
    for given in (eps, eps.reshape([X.shape[i] for i in batch])):
        v = be.perturb(X, D, given, p=p, axis=axis)
        moved = np.transpose(v - X, batch + sample).reshape(max(1, eps.size), -1)
        np.testing.assert_allclose(norm64(moved, moved * 0, p), eps.ravel(), rtol=1e-13)
        np.testing.assert_array_equal(be.rescale(X, D, given, p=p, axis=axis).shape, kept)


@pytest.mark.needs("same_alone")
def test_one_picture_of_a_batch_alone(be):
    for i in range(4):
        np.testing.assert_array_equal(be.perturb(X, D, 1.3)[i], be.perturb(X[i], D[i], 1.3, axis=None))


@pytest.mark.parametrize("n", [3, 300_000, 900, 5000])
def test_a_row_does_not_depend_on_the_others(be, n):
    rng = np.random.default_rng(n)
    for dtype, p in (("float32", 2), ("float64", 3.5)):
        x, delta = rng.random((9, n)).astype(dtype), rng.standard_cauchy((9, n)).astype(dtype)
        eps = be.reach(x, delta, p=p, dtype=dtype)[:, 0] * np.linspace(0.05, 1.05, 9)
        together = be.perturb(x, delta, eps, p=p, dtype=dtype)
        for i in (0, 4, 8):
            alone = be.perturb(x[i], delta[i], float(eps[i]), p=p, dtype=dtype)
            # A GPU's kernels leave long rows as they are once their norm is within 2.5e-7 of eps.
            single = 2e-6 if be.name in ("cuda", "cupy") else 4e-7
            np.testing.assert_allclose(together[i], alone, rtol=0, atol=single if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 2, 3, 130])
def test_a_row_that_needs_care_does_not_depend_on_the_others(p, dtype, monkeypatch):
    """When its bracket is halved for the first time follows from its own passes, and its units from its own sums."""
    monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    rng = np.random.default_rng(0)
    x = rng.uniform(-0.6, 0.6, (40, 100)).astype(dtype)
    spread = 6 if p == 1 else 3
    delta = (10 ** rng.uniform(-spread, spread, (40, 100)) * rng.choice([-1.0, 1.0], (40, 100))).astype(dtype)
    options = {"p": p, "bounds": (-1, 1)}
    eps = 0.999 * ca.reach(x, delta, **options)[:, 0]
    together = ca.rescale(x, delta, eps, **options)
    alone = [ca.rescale(x[i : i + 1], delta[i : i + 1], eps[i : i + 1], **options)[0] for i in range(40)]
    np.testing.assert_array_equal(together, alone)


def test_layouts_numpy(tmp_path):
    expected = ca.perturb(X, D, 1.1)
    wide = np.zeros((4, 3, 5, 12))
    wide[..., ::2] = X
    backwards = np.ascontiguousarray(X[::-1, :, ::-1])[::-1, :, ::-1]
    read_only = X.copy()
    read_only.flags.writeable = False
    mapped = np.memmap(tmp_path / "x", float, "w+", shape=X.shape)
    mapped[:] = X
    for x in (wide[..., ::2], backwards, np.asfortranarray(X), read_only, mapped, X.astype(">f8").astype(float)):
        np.testing.assert_array_equal(ca.perturb(x, D, 1.1), expected)
        bounds = np.zeros(6)[::-1], np.ones((4, 1, 1, 1))
        np.testing.assert_array_equal(ca.perturb(x, D, 1.1, bounds=bounds), expected)
    np.testing.assert_array_equal(ca.perturb(X, np.asfortranarray(D), 1.1), expected)
    assert type(ca.perturb(mapped, D, 1.1)) is np.ndarray


def test_layouts_torch():
    x, delta = torch.tensor(X), torch.tensor(D)
    expected = ca.perturb(x, delta, 1.1)
    wide = torch.zeros(4, 3, 5, 12, dtype=torch.float64)
    wide[..., ::2] = x
    channels_last = x.to(memory_format=torch.channels_last)
    for other in (wide[..., ::2], channels_last, x.flip(0).flip(0), x.transpose(0, 3).contiguous().transpose(0, 3)):
        assert torch.equal(ca.perturb(other, delta, 1.1), expected)
    parameter = torch.nn.Parameter(x)
    v = ca.perturb(parameter, delta, 1.1)
    assert type(v) is torch.Tensor
    v.sum().backward()
    assert parameter.grad is not None
    assert ca.perturb(x.requires_grad_(False), delta, 1.1).requires_grad is False


@pytest.mark.needs("eager")
def test_inputs_are_never_modified(be):
    rng = np.random.default_rng(0)
    for dtype in be.dtypes:
        for n in (10, 140_000):
            x, delta = be.array(rng.random((3, n)), dtype), be.array(rng.standard_normal((3, n)), dtype)
            eps = be.array(np.array([0.5, 1.0, 100000.0]), "float64")
            lower, upper = be.array(np.zeros(n), dtype), be.array(np.ones((3, 1)), dtype)
            everything = (x, delta, eps, lower, upper)
            before = [be.numpy(a).copy() for a in everything]
            for p in (2, 2.5, math.inf) if n == 10 else (2,):
                for mode in ("equal", "at_most", "at_least") if n == 10 else ("equal",):
                    v = ca.perturb(x, delta, eps, p=p, bounds=(lower, upper), mode=mode)
                    ca.rescale(x, delta, eps, p=p, bounds=(lower, upper), mode=mode)
                ca.reach(x, delta, p=p, bounds=(lower, upper))
                ca.report(x, delta, eps, p=p, bounds=(lower, upper))
                ca.perturb_vjp(x, delta, eps, delta, p=p, bounds=(lower, upper))
            for a, old in zip(everything, before, strict=True):
                np.testing.assert_array_equal(be.numpy(a), old)
            # The result is the caller's own: not a view of an input, nor of a buffer that the next call writes to.
            kept = be.numpy(v).copy()
            ca.perturb(x, -delta, eps, bounds=(lower, upper))
            np.testing.assert_array_equal(be.numpy(v), kept)


def test_report(be):
    x, delta = be.array(X, "float32"), be.array(D, "float32")
    report = ca.report(x, delta, np.array([0.5, 1.0, 3.0, 100.0]))
    found = {name: be.numpy(getattr(report, name)) for name in report.__dataclass_fields__}
    assert all(a.shape == (4, 1, 1, 1) for a in found.values())
    np.testing.assert_array_equal(found["reachable"].ravel(), [True, True, True, False])
    np.testing.assert_allclose(found["norm"].ravel()[:3], [0.5, 1.0, 3.0], rtol=3e-7)
    np.testing.assert_allclose(found["norm"].ravel()[3], found["reach"].ravel()[3], rtol=1e-6)
    flat, direction = be.numpy(x).reshape(4, -1).astype(float), be.numpy(delta).reshape(4, -1).astype(float)
    length = np.linalg.norm(direction, axis=1, keepdims=True)
    naive = np.clip(flat + direction * np.array([[0.5], [1], [3], [100]]) / length, 0, 1)
    np.testing.assert_allclose(found["naive_norm"].ravel(), norm64(naive, flat, 2), rtol=1e-6)
    v = be.numpy(ca.perturb(x, delta, np.array([0.5, 1.0, 3.0, 100.0]))).reshape(4, -1)
    np.testing.assert_allclose(found["clipped"].ravel(), ((v == 0) | (v == 1)).mean(axis=1), rtol=1e-6)
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["sample", "eps", "eta", "norm", "naive_norm", "reach", "clipped", "reachable"]
    assert lines[4].split()[-1] == "no"
    for p in (1, 3.3, math.inf):
        again = ca.report(x, delta, 0.2, p=p)
        np.testing.assert_allclose(be.numpy(again.norm), 0.2, rtol=3e-7 if p < math.inf else 1e-6)
    empty = ca.report(be.array(np.zeros((2, 3)), "float64"), be.array(np.zeros((2, 3)), "float64"), 0.0)
    assert not be.numpy(empty.norm).any()
    assert be.numpy(empty.reachable).all()


def test_report_counts_what_moved_to_its_bound(be):
    """Not what was there and stays."""
    x, delta = np.array([[1.0, 0.0, 0.9, 0.5]]), np.array([[0.0, -0.0, 1.0, 1.0]])
    report = ca.report(be.array(x, "float64"), be.array(delta, "float64"), 0.3)
    assert be.numpy(report.clipped) == 0.25


def test_the_papers_signature(be):
    from clipaware import reference

    for shape in ((5,), (5, 4), (5, 3, 4)):
        x, delta = rng.random(shape), rng.standard_normal(shape)
        mine = be.numpy(ca.l2_clipping_aware_rescaling(be.array(x, "float64"), be.array(delta, "float64"), 0.1))
        np.testing.assert_allclose(mine, reference.l2_clipping_aware_rescaling(x, delta, 0.1), rtol=1e-7)
        assert mine.shape == (5, *(1,) * (len(shape) - 1))
    x, delta = rng.uniform(-1, 2, (5, 40)), rng.standard_normal((5, 40))
    arrays = be.array(x, "float64"), be.array(delta, "float64")
    mine = be.numpy(ca.l2_clipping_aware_rescaling(*arrays, 2.0, a=-1.0, b=2.0))
    np.testing.assert_allclose(mine, reference.l2_clipping_aware_rescaling(x, delta, 2.0, a=-1.0, b=2.0), rtol=1e-7)
