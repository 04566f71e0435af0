"""EagerPy tensors: what comes in wrapped goes out wrapped, and EagerPy is not imported for it."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import clipaware as ca
from conftest import jax, tf

ep = pytest.importorskip("eagerpy", reason="EagerPy is not installed")

rng = np.random.default_rng(0)
X, D, G = rng.random((4, 3, 5)), rng.standard_normal((4, 3, 5)), rng.standard_normal((4, 3, 5))
EPS = np.array([0.3, 0.0, 1.0, 99.0])
RAW = {"numpy": np.asarray, "torch": torch.tensor, "jax": jax and jax.numpy.asarray, "tensorflow": tf and tf.constant}


@pytest.fixture(params=[name for name, make in RAW.items() if make is not None])
def wrap(request):
    return lambda a: ep.astensor(RAW[request.param](a))


def assert_wrapped(found, raw, like):
    """The tensor type of x around the very numbers that the framework's own arrays give."""
    assert type(found) is type(like)
    assert type(found.raw) is type(raw)
    np.testing.assert_array_equal(found.numpy(), np.asarray(raw))


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_every_function(wrap, p):
    x, delta, grad = wrap(X), wrap(D), wrap(G)
    lower, upper = wrap(np.zeros(5)), wrap(np.ones((3, 1)))
    raw = x.raw, delta.raw
    for eps, own in ((0.3, 0.3), (EPS, EPS), (wrap(EPS), wrap(EPS).raw)):
        for bounds, theirs in (
            ((0, 1), (0, 1)),
            ((lower, upper), (lower.raw, upper.raw)),
            ([0, upper], [0, upper.raw]),
        ):
            options, unwrapped = {"p": p, "bounds": bounds}, {"p": p, "bounds": theirs}
            assert_wrapped(ca.perturb(x, delta, eps, **options), ca.perturb(*raw, own, **unwrapped), x)
            assert_wrapped(ca.rescale(x, delta, eps, **options), ca.rescale(*raw, own, **unwrapped), x)
            assert_wrapped(ca.reach(x, delta, **options), ca.reach(*raw, **unwrapped), x)
            bars = ca.perturb_vjp(x, delta, eps, grad, **options)
            assert len(bars) == 5
            for bar, expected in zip(bars, ca.perturb_vjp(*raw, own, grad.raw, **unwrapped), strict=True):
                assert_wrapped(bar, expected, x)
            report, expected = ca.report(x, delta, eps, **options), ca.report(*raw, own, **unwrapped)
            assert isinstance(report, ca.Report)
            for name, found in vars(report).items():
                assert_wrapped(found, getattr(expected, name), x)
            assert str(report) == str(expected)
    assert_wrapped(
        ca.l2_clipping_aware_rescaling(x, delta, wrap(EPS), a=lower, b=upper),
        ca.l2_clipping_aware_rescaling(*raw, EPS, a=lower.raw, b=upper.raw),
        x,
    )


def test_by_keyword(wrap):
    assert_wrapped(ca.perturb(x=wrap(X), delta=wrap(D), eps=0.3), ca.perturb(wrap(X).raw, wrap(D).raw, 0.3), wrap(X))


def test_gradients_flow_through():
    x, delta = torch.tensor(X, requires_grad=True), torch.tensor(D, requires_grad=True)
    ca.perturb(ep.astensor(x), ep.astensor(delta), 0.3).raw.backward(torch.tensor(G))
    x_bar, delta_bar, *_ = ca.perturb_vjp(X, D, 0.3, G)
    np.testing.assert_allclose(x.grad.numpy(), x_bar, rtol=1e-13)
    np.testing.assert_allclose(delta.grad.numpy(), delta_bar, rtol=1e-13, atol=1e-15)


def test_errors_are_those_of_the_framework(wrap):
    with pytest.raises(ValueError, match=r"delta has shape \(4, 3\), expected \(4, 3, 5\) to match x"):
        ca.perturb(wrap(X), wrap(D[..., 0]), 0.3)
    with pytest.raises(ca.UnreachableError, match=r"sample 3: eps 99 > reach"):
        ca.perturb(wrap(X), wrap(D), EPS, unreachable="raise")
    with pytest.raises(TypeError, match=r"positional argument"):
        ca.perturb(wrap(X), wrap(D), 0.3, 2)


def test_half_wrapped(wrap):
    x, delta = wrap(X), wrap(D)
    with pytest.raises(TypeError, match=r"delta is a \w+ array, expected an EagerPy tensor to match x"):
        ca.perturb(x, delta.raw, 0.3)
    with pytest.raises(TypeError, match=r"delta is a list, expected an EagerPy tensor to match x"):
        ca.reach(x, delta=D.tolist())
    with pytest.raises(TypeError, match=r"grad is a \w+ array, expected an EagerPy tensor to match x"):
        ca.perturb_vjp(x, delta, 0.3, delta.raw)
    with pytest.raises(TypeError, match=r"delta is a eagerpy\.\S+Tensor, expected a \w+ array to match x"):
        ca.perturb(x.raw, delta, 0.3)
    with pytest.raises(
        TypeError, match=r"eps is a eagerpy\.\S+Tensor, expected a number, a NumPy array or a \w+ array"
    ):
        ca.perturb(x.raw, delta.raw, wrap(EPS))


def test_half_wrapped_companions():
    """Beside a wrapped x, eps and the bounds are wrapped or constants of NumPy's."""
    x, delta = ep.astensor(torch.tensor(X)), ep.astensor(torch.tensor(D))
    expected = r"expected a number, a NumPy array or an EagerPy tensor like x"
    with pytest.raises(TypeError, match=rf"eps is a torch array, {expected}"):
        ca.perturb(x, delta, torch.tensor(EPS))
    with pytest.raises(TypeError, match=rf"an item of bounds is a torch array, {expected}"):
        ca.perturb(x, delta, 0.3, bounds=(0, torch.tensor(1.0)))
    for eps in (EPS, ep.astensor(EPS)):
        assert isinstance(ca.perturb(x, delta, eps, bounds=(np.zeros(5), np.float64(1))), ep.PyTorchTensor)


def test_two_frameworks_wrapped():
    with pytest.raises(TypeError, match=r"delta is a torch array, expected a numpy array to match x"):
        ca.perturb(ep.astensor(X), ep.astensor(torch.tensor(D)), 0.3)


def test_eagerpy_is_not_imported():
    code = """
import sys, numpy as np, torch, clipaware as ca
for full in (np.full, torch.full):
    x = full((2, 3), 0.5)
    ca.perturb(x, x, 0.1), ca.reach(x, x), str(ca.report(x, x, 0.1)), ca.perturb_vjp(x, x, 0.1, x)
print("eagerpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
