"""Foolbox's names for what is exact here, on its models of every framework."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from clipaware.reference import norm64
from conftest import BACKENDS, DIFFERENTIATING, tf

fb = pytest.importorskip("foolbox", reason="Foolbox is not installed")
ep = pytest.importorskip("eagerpy", reason="EagerPy is not installed")
mine = pytest.importorskip("clipaware.foolbox", reason="Foolbox is not installed")

N, SHAPE, CLASSES = 30, (3, 6, 5), 4
WEIGHTS = np.random.default_rng(1).standard_normal((math.prod(SHAPE), CLASSES)).astype(np.float32)
NOISE = [name for name in mine.__all__ if "NoiseAttack" in name and name.startswith("L")]
GRADIENT = [name for name in mine.__all__ if "FastGradient" in name]


def linear(x):
    return x.reshape(len(x), -1) @ WEIGHTS


def problem():
    # Much of it near the bounds, as photographs are.
    x = np.clip(np.random.default_rng(0).uniform(-0.5, 1.5, (N, *SHAPE)), 0, 1).astype(np.float32)
    return x, linear(x).argmax(axis=1)


def made(name):
    """A Foolbox model in a framework, and how to make its arrays."""
    make = BACKENDS[name].make
    if name == "torch":
        layer = torch.nn.Linear(math.prod(SHAPE), CLASSES, bias=False)
        layer.weight.data = torch.from_numpy(WEIGHTS.T.copy())
        model = fb.PyTorchModel(torch.nn.Sequential(torch.nn.Flatten(), layer).eval(), bounds=(0, 1))
    elif name == "jax":
        model = fb.JAXModel(linear, bounds=(0, 1))
    elif name == "tensorflow":
        model = fb.TensorFlowModel(lambda x: tf.reshape(x, (len(x), -1)) @ WEIGHTS, bounds=(0, 1))
    else:
        model = fb.NumPyModel(linear, bounds=(0, 1))
    return model, make


@pytest.fixture(params=["numpy", *DIFFERENTIATING])
def framework(request):
    return request.param


def like(labels, x):
    """Labels of the framework that x is of."""
    return ep.astensor(x).from_numpy(labels).raw


def norms(v, x, p):
    return norm64(np.asarray(v).reshape(N, -1), x.reshape(N, -1), p)


def order(name):
    return math.inf if "Linf" in name else int(name[1])


def test_every_name_is_here():
    theirs = {name for name in vars(fb.attacks) if "AdditiveGaussian" in name or "AdditiveUniform" in name}
    assert theirs == set(NOISE)
    assert all(issubclass(getattr(mine, name), fb.attacks.base.FixedEpsilonAttack) for name in mine.__all__)
    for name in (*NOISE, *GRADIENT):
        # What can be said to theirs can be said to these.
        options = {"repeats": 3, "check_trivial": False} if "Repeated" in name else {}
        assert (
            vars(getattr(fb.attacks, name)(**options)).items()
            <= {
                **vars(getattr(mine, name)(**options)),
                "rel_stepsize": 1.0,
                "abs_stepsize": None,
            }.items()
        )


@pytest.mark.parametrize("name", NOISE)
def test_noise_has_its_norm(framework, name):
    model, make = made(framework)
    x, labels = problem()
    p = order(name)
    epsilons = [0.05, 0.5] if p == math.inf else [0.3, 3.0]
    options = {"check_trivial": False, "repeats": 5} if "Repeated" in name else {}
    attack = getattr(mine, name)(seed=0, **options)
    assert attack.distance.p == p
    raw = make(x, "float32")
    advs, clipped, success = attack(model, raw, like(labels, raw), epsilons=epsilons)
    for eps, v, w, fell in zip(epsilons, advs, clipped, np.asarray(success), strict=True):
        assert type(v) is type(raw)
        assert np.asarray(v).min() >= 0
        assert np.asarray(v).max() <= 1
        moved = np.isclose(norms(v, x, p), eps, rtol=3e-7, atol=2.0**-25)
        assert moved.all() if "Repeated" not in name else (moved == (norms(v, x, p) > 0)).all()
        assert moved[fell].all()
        np.testing.assert_array_equal(linear(np.asarray(w)).argmax(1) != labels, fell)
    assert np.asarray(success)[1].sum() > np.asarray(success)[0].sum()


def test_linf_noise_where_theirs_exceeds_its_epsilon():
    model, make = made("torch")
    x, _ = problem()
    raw = make(x, "float32")
    torch.manual_seed(0)
    theirs = fb.attacks.LinfAdditiveUniformNoiseAttack().run(model, raw, epsilon=0.1)
    assert (norms(theirs, x, math.inf) > 0.1 + 1e-6).any()
    ours = mine.LinfAdditiveUniformNoiseAttack(seed=0).run(model, raw, epsilon=0.1)
    np.testing.assert_allclose(norms(ours, x, math.inf), 0.1, atol=2.0**-25)


@pytest.mark.parametrize("framework", DIFFERENTIATING)
@pytest.mark.parametrize("name", GRADIENT)
def test_gradients_spend_all_and_not_more(framework, name):
    model, make = made(framework)
    x, labels = problem()
    p = order(name)
    epsilons = {2: [0.3, 0.8], math.inf: [0.03, 0.1]}[p]
    raw = make(x, "float32")
    targets = (labels + 1) % CLASSES
    for criterion, attack in (
        (fb.Misclassification(like(labels, raw)), getattr(mine, name)()),
        (fb.TargetedMisclassification(like(targets, raw)), getattr(mine, name)(random_start=True, seed=0, steps=5)),
    ):
        advs, _, success = attack(model, raw, criterion, epsilons=epsilons)
        for eps, v in zip(epsilons, advs, strict=True):
            assert (norms(v, x, p) <= eps).all()
            assert (norms(v, x, p) >= eps * (1 - 3e-6)).all()
        assert 0 < np.asarray(success)[1].sum()


@pytest.mark.parametrize("name", GRADIENT)
def test_gradients_succeed_where_theirs_do(name):
    model, make = made("torch")
    x, labels = problem()
    raw, labels = make(x, "float32"), torch.from_numpy(labels)
    epsilons = {2: [0.3, 0.5, 0.8], math.inf: [0.03, 0.05, 0.1]}[order(name)]
    _, _, ours = getattr(mine, name)()(model, raw, labels, epsilons=epsilons)
    _, _, theirs = getattr(fb.attacks, name)()(model, raw, labels, epsilons=epsilons)
    assert (ours.sum(1) >= theirs.sum(1)).all()


def test_criteria_bounds_and_repeat(framework):
    model, make = made(framework)
    x, labels = problem()
    raw = make(x, "float32")
    criterion = fb.Misclassification(like(labels, raw))
    single = mine.L2AdditiveGaussianNoiseAttack(seed=0)
    many = mine.L2AdditiveGaussianNoiseAttack(seed=0).repeat(8)
    _, _, once = single(model, raw, criterion, epsilons=1.0)
    v, _, often = many(model, raw, criterion, epsilons=1.0)
    assert np.asarray(once).shape == (N,)
    assert 0 < np.asarray(once).sum() < np.asarray(often).sum()
    np.testing.assert_allclose(norms(v, x, 2), 1.0, rtol=3e-7)
    again, _, _ = mine.L2AdditiveGaussianNoiseAttack(seed=0).repeat(8)(model, raw, criterion, epsilons=1.0)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(v))
    # Of several criteria, all are to be met.
    both = criterion & fb.TargetedMisclassification(like((labels + 1) % CLASSES, raw))
    attack = mine.L2RepeatedAdditiveUniformNoiseAttack(repeats=10, seed=0)
    v, _, success = attack(model, raw, both, epsilons=3.0)
    np.testing.assert_array_equal(linear(np.asarray(v)).argmax(1) == (labels + 1) % CLASSES, np.asarray(success))
    assert 0 < np.asarray(success).sum() < N
    for attack in (single, many, mine.L2RepeatedAdditiveGaussianNoiseAttack()):
        with pytest.raises(AssertionError):  # Foolbox's verify_input_bounds
            attack(model, make(x + 1, "float32"), criterion, epsilons=1.0)
    with pytest.raises(AssertionError):
        single.run(model, make(x - 1, "float32"), epsilon=1.0)


def test_check_trivial():
    model, _ = made("numpy")
    x, labels = problem()
    labels[:10] = (labels[:10] + 1) % CLASSES
    v, _, success = mine.L2RepeatedAdditiveGaussianNoiseAttack(repeats=2, seed=0)(model, x, labels, epsilons=0.1)
    assert success[:10].all()
    np.testing.assert_array_equal(v[:10], x[:10])
    np.testing.assert_array_equal(v[~success], x[~success])
    free = mine.L2RepeatedAdditiveGaussianNoiseAttack(repeats=2, check_trivial=False, seed=0)
    v, _, success = free(model, x, labels, epsilons=0.1)
    np.testing.assert_allclose(norms(v, x, 2)[success], 0.1, rtol=3e-7)


def test_any_norm_noise_and_bounds_per_channel():
    model, make = made("torch")
    x, labels = problem()
    lower, upper = (np.array(a, np.float32).reshape(3, 1, 1) for a in ([0.0, 0.2, 0.1], [0.8, 1.0, 0.9]))
    x = np.clip(x, lower, upper)
    attack = mine.AdditiveNoiseAttack(noise="pink", p=3, bounds=(lower, upper), seed=0)
    (v,), _, _ = attack(model, make(x, "float32"), torch.from_numpy(labels), epsilons=[0.6])
    np.testing.assert_allclose(norms(v, x, 3), 0.6, rtol=3e-7)
    assert (v.numpy() >= lower).all()
    assert (v.numpy() <= upper).all()
    (v,), _, success = mine.GradientAttack(p=1)(model, make(x, "float32"), torch.from_numpy(labels), epsilons=[4.0])
    # The one that is filled last stops on the way, and float32 moves those at their bounds by an ulp.
    inside = np.minimum(v.numpy() - lower, upper - v.numpy()) > 1e-6
    assert ((inside & (abs(v.numpy() - x) > 1e-6)).reshape(N, -1).sum(1) <= 1).all()
    pgd = mine.GradientAttack(p=1.5, steps=4, bounds=(lower, upper), loss="margin")
    (v,), _, success = pgd(model, make(x, "float32"), torch.from_numpy(labels), epsilons=[1.0])
    assert (norms(v, x, 1.5) <= 1.0).all()
    assert success.any()
    both = fb.Misclassification(torch.from_numpy(labels)) & fb.Misclassification(torch.from_numpy(labels))
    with pytest.raises(ValueError, match="expected Misclassification or TargetedMisclassification"):
        pgd(model, make(x, "float32"), both, epsilons=1.0)
    with pytest.raises(ValueError, match="noise is 'brown'"):
        mine.AdditiveNoiseAttack(noise="brown")


def test_a_seed_of_pytorch_is_heard():
    model, make = made("torch")
    x, _ = problem()
    raw = make(x, "float32")
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(mine.L2AdditiveGaussianNoiseAttack().run(model, raw, epsilon=1.0))
    assert torch.equal(*drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repr(mine.L2AdditiveGaussianNoiseAttack())
