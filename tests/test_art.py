"""The Adversarial Robustness Toolbox: its classifiers, attacked by ours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clipaware.reference import norm64

pytest.importorskip("art", reason="the Adversarial Robustness Toolbox is not installed")
from art.attacks.evasion import FastGradientMethod
from art.estimators.classification import BlackBoxClassifier, PyTorchClassifier
from art.exceptions import EstimatorError

from clipaware.art import GradientAttack, NoiseAttack

N, SHAPE, CLASSES = 40, (3, 6, 5), 4


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(90, CLASSES))
    return PyTorchClassifier(
        net, torch.nn.CrossEntropyLoss(), SHAPE, CLASSES, clip_values=(0.0, 1.0), device_type="cpu"
    )


@pytest.fixture
def x():
    return np.clip(np.random.default_rng(0).uniform(-0.5, 1.5, (N, *SHAPE)), 0, 1).astype(np.float32)


def norms(v, x, p):
    return norm64(v.reshape(N, -1), x.reshape(N, -1), p)


@pytest.mark.parametrize("norm", [1, 2, 3, "inf", np.inf])
def test_noise(classifier, x, norm):
    p = math.inf if norm == "inf" else norm
    eps = {1: 15.0, 2: 2.0, 3: 1.2, math.inf: 0.4}[p]
    y = classifier.predict(x).argmax(1)
    attack = NoiseAttack(classifier, eps, norm=norm, repeats=4, seed=0)
    v = attack.generate(x)
    np.testing.assert_allclose(norms(v, x, p), eps, rtol=3e-7, atol=2.0**-25)
    assert v.min() >= 0
    assert v.max() <= 1
    assert (classifier.predict(v).argmax(1) != y).any()
    np.testing.assert_array_equal(attack.generate(x, y), v)
    np.testing.assert_array_equal(attack.generate(x, np.eye(CLASSES)[y]), v)


@pytest.mark.parametrize("norm", [1, 1.5, 2, "inf"])
def test_gradients(classifier, x, norm):
    p = math.inf if norm == "inf" else norm
    eps = {1: 5.0, 1.5: 1.5, 2: 0.8, math.inf: 0.1}[p]
    y = classifier.predict(x).argmax(1)
    fast = GradientAttack(classifier, eps, norm=norm)
    v = fast.generate(x, y)
    assert (norms(v, x, p) <= eps).all()
    assert (norms(v, x, p) >= eps * (1 - 3e-6)).all()
    if norm != 1.5:
        theirs = FastGradientMethod(classifier, norm=norm, eps=eps).generate(x, y)
        success = [(classifier.predict(w).argmax(1) != y).sum() for w in (v, theirs)]
        assert success[0] >= success[1] > 0
    fast.set_params(targeted=True, steps=5, random_start=True, seed=0)
    targets = (y + 1) % CLASSES
    w = fast.generate(x, np.eye(CLASSES)[targets])
    assert (norms(w, x, p) <= eps).all()
    assert (classifier.predict(w).argmax(1) == targets).sum() > (classifier.predict(x).argmax(1) == targets).sum()


def test_parameters(classifier, x):
    attack = NoiseAttack(classifier, 1.0, seed=0)
    attack.set_params(eps=np.linspace(0.5, 1.5, N), norm=np.int64(2), noise="pink", bounds=(np.zeros((3, 1, 1)), 1))
    np.testing.assert_allclose(norms(attack.generate(x), x, 2), np.linspace(0.5, 1.5, N), rtol=3e-7)
    assert "noise=pink" in repr(attack)
    for wrong, message in (
        ({"norm": 0.5}, "norm is 0.5, expected a number from 1"),
        ({"norm": "two"}, "norm is 'two', expected a number from 1"),
        ({"eps": -1.0}, "eps is -1.0, expected numbers that are not negative"),
        ({"radius": 1}, 'attribute "radius" cannot be set'),
    ):
        with pytest.raises(ValueError, match=message):
            NoiseAttack(classifier).set_params(**wrong)
    with pytest.raises(ValueError, match="y is None, expected the target classes"):
        NoiseAttack(classifier, targeted=True).generate(x)


def test_a_black_box_has_no_gradients(classifier, x):
    box = BlackBoxClassifier(classifier.predict, SHAPE, CLASSES)
    v = NoiseAttack(box, 1.0, seed=0).generate(x)  # no clip_values, so no bounds
    np.testing.assert_allclose(norms(v, x, 2), 1.0, rtol=3e-7)
    assert v.min() < 0
    with pytest.raises(EstimatorError):
        GradientAttack(box)
