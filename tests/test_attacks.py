"""Attacks on small models of every framework: their norms, what they gain, what they ask of the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import clipaware as ca
from clipaware import attacks
from clipaware._backends import torch as torch_backend
from clipaware.attacks import AttackResult, Robustness, gradient_attack, noise_attack, noise_robustness
from clipaware.reference import bisect_rescale, norm64
from conftest import jax, tf
from tiers import in_test_all

ORDERS = [1, 1.5, 2, 3, math.inf]
SHAPE = 3, 6, 5
N, CLASSES = 60, 4
LOWER, UPPER = (np.array(a).reshape(3, 1, 1) for a in ([-1.0, 0.0, -0.25], [0.5, 1.0, 1.5]))
WEIGHTS = np.random.default_rng(1).standard_normal((math.prod(SHAPE), CLASSES)).astype(np.float32)


def linear(name):
    """Scores that are linear in x, in a framework's own operations; half precision in float32."""
    if name == "torch":
        return lambda x: x.flatten(1).to(getattr(torch, _dtype(x))) @ torch.tensor(WEIGHTS.astype(_dtype(x)))
    if name == "jax":
        return lambda x: x.reshape(len(x), -1).astype(_dtype(x)) @ WEIGHTS.astype(_dtype(x))
    if name == "tensorflow":
        return lambda x: tf.cast(tf.reshape(x, (len(x), -1)), _dtype(x)) @ tf.constant(WEIGHTS, _dtype(x))
    return lambda x: _linear(np.asarray(x))


def _dtype(x):
    return "float64" if "float64" in str(x.dtype) else "float32"


def _linear(x):
    return x.reshape(len(x), -1).astype(_dtype(x)) @ WEIGHTS.astype(_dtype(x))


def problem(dtype="float32", seed=0):
    """Samples inside bounds per channel, some of their elements on them, and what the model says of them."""
    x = LOWER + np.random.default_rng(seed).uniform(-0.1, 1.1, (N, *SHAPE)) * (UPPER - LOWER)
    x = np.clip(x, LOWER, UPPER).astype(dtype)
    return x, _linear(x).argmax(axis=1)


def flat(a):
    return np.asarray(a).reshape(len(a), -1)


def sizes(p, share=0.2):
    """An eps for every sample, all of them within reach."""
    n = math.prod(SHAPE)
    return share * np.linspace(0.5, 1.5, N) * ((n / (p + 1)) ** (1 / p) if p < math.inf else 1)


def assert_found(found, framework, x, p):
    """What the fields say is so; returns the samples in NumPy."""
    assert isinstance(found, AttackResult)
    v = framework.numpy(found.perturbed)
    assert v.dtype == x.dtype
    assert v.shape == x.shape
    assert (v >= LOWER.astype(x.dtype)).all()
    assert (v <= UPPER.astype(x.dtype)).all()
    np.testing.assert_array_equal(found.norms, norm64(flat(v), flat(x), p))
    np.testing.assert_array_equal(found.success, found.repeat >= 0)
    return v


@pytest.mark.parametrize("p", [1, 2, math.inf, *in_test_all(1.5, 3)])
def test_noise_has_its_norm_and_the_model_is_wrong(framework, p):
    x, labels = problem()
    eps = sizes(p)
    mine = framework.array(x, "float32")
    options = {"p": p, "bounds": (LOWER, UPPER), "repeats": 5, "batch_size": 16, "seed": 0}
    found = noise_attack(linear(framework.name), mine, labels, eps, **options)
    v = assert_found(found, framework, x, p)
    # Of the largest element alone, float32 has no more digits.
    np.testing.assert_allclose(found.norms, eps, rtol=3e-7, atol=2.0**-24 if p == math.inf else 0)
    np.testing.assert_array_equal(_linear(v).argmax(axis=1) != labels, found.success)
    assert 0 < found.success.sum() < N
    assert found.repeat.max() > 0
    again = noise_attack(linear(framework.name), mine, labels, eps, **options)
    np.testing.assert_array_equal(framework.numpy(again.perturbed), v)
    other = noise_attack(linear(framework.name), mine, labels, eps, **{**options, "seed": 1})
    assert (framework.numpy(other.perturbed) != v).any()


@pytest.mark.parametrize("noise", ca.noise.KINDS)
def test_every_noise(noise):
    x, labels = problem()
    found = noise_attack(_linear, x, labels, 1.5, noise=noise, bounds=(LOWER, UPPER), seed=0, repeats=3)
    np.testing.assert_allclose(found.norms, 1.5, rtol=3e-7)


class Counting:
    """A model that remembers which samples it was asked about; they carry their number in one element."""

    def __init__(self):
        self.asked, self.largest = np.zeros(N, int), 0

    def __call__(self, x):
        np.add.at(self.asked, np.rint(x[:, 0, 0, 0] * 1e4).astype(int), 1)
        self.largest = max(self.largest, len(x))
        return _linear(x)


def numbered():
    x, _ = problem("float64")
    bounds = np.broadcast_to(LOWER, x.shape).copy(), np.broadcast_to(UPPER, x.shape).copy()
    # Bounds for every element of every sample keep that element where it is.
    x[:, 0, 0, 0] = bounds[0][:, 0, 0, 0] = bounds[1][:, 0, 0, 0] = np.arange(N) / 1e4
    return x, _linear(x).argmax(axis=1), bounds


def test_samples_that_fell_are_not_asked_for_again():
    x, labels, bounds = numbered()
    model = Counting()
    found = noise_attack(model, x, labels, 1.2, bounds=bounds, repeats=9, batch_size=7, seed=0)
    assert 0 < found.success.sum() < N
    np.testing.assert_array_equal(model.asked, np.where(found.success, found.repeat + 1, 9))
    assert model.largest == 7
    np.testing.assert_allclose(found.norms, 1.2, rtol=1e-13)
    assert (found.perturbed >= bounds[0]).all()
    assert (found.perturbed <= bounds[1]).all()


def test_targeted_noise():
    x, labels = problem()
    targets = (labels + 1) % CLASSES
    options = {"bounds": (LOWER, UPPER), "repeats": 20, "seed": 0}
    found = noise_attack(_linear, x, targets, 3.0, targeted=True, **options)
    np.testing.assert_array_equal(_linear(found.perturbed).argmax(axis=1) == targets, found.success)
    assert 0 < found.success.sum() < noise_attack(_linear, x, labels, 3.0, **options).success.sum()


def test_eps_out_of_reach_is_as_large_as_it_gets():
    x, labels = problem()
    found = noise_attack(_linear, x, labels, 1e3, bounds=(LOWER, UPPER), seed=0)
    assert (found.norms < 1e3).all()
    assert (np.isin(flat(found.perturbed[:, 1]), (0, 1))).all()


@pytest.mark.parametrize("attack", [noise_attack, gradient_attack])
def test_no_samples(attack):
    x = torch.zeros(0, *SHAPE)
    found = attack(linear("torch"), x, [], 1.0)
    assert found.perturbed.shape == (0, *SHAPE)
    assert found.success.shape == found.norms.shape == found.repeat.shape == (0,)
    assert math.isnan(noise_robustness(linear("torch"), x, []).median)


# --- robustness -------------------------------------------------------------------------------------------------------


def by_bisection(x, delta, label, p, steps=60):
    """The smallest eps at which a linear model flips along a direction, if it stays flipped from there on."""
    low, high = 0.0, float(ca.reach(x, delta, p=p, bounds=(LOWER, UPPER), axis=None).item())
    lower, upper = (flat(np.broadcast_to(b, x.shape)[None]) for b in (LOWER, UPPER))
    for _ in range(steps):
        eps = (low + high) / 2
        eta = bisect_rescale(flat(x[None]), flat(delta[None]), eps, p, lower, upper).item()
        flipped = _linear(np.clip(x + eta * delta, LOWER, UPPER)[None]).argmax() != label
        low, high = (low, eps) if flipped else (eps, high)
    return high


@pytest.mark.parametrize("p", [2, *in_test_all(1, math.inf)])
def test_robustness_is_what_bisection_finds(framework, monkeypatch, p):
    x, labels = problem("float64")
    # Directions that lower the label's score in every element: once flipped, a sample stays flipped.
    rng = np.random.default_rng(2)
    directions = -np.sign(WEIGHTS.T[labels]).reshape(x.shape) * rng.random(x.shape)
    scale = iter([1.0, 2.0, 3.0])

    def sampled(kind, here, seed):
        return framework.array(directions * next(scale), "float64")

    monkeypatch.setattr(attacks, "sample", sampled)
    some = [int(i) for i in rng.permutation(N)[:12]]
    directions, x, labels = directions[some], x[some], labels[some]
    found = noise_robustness(
        linear(framework.name), framework.array(x, "float64"), labels, p=p, bounds=(LOWER, UPPER), tolerance=1e-4
    )
    expected = [by_bisection(x[i], directions[i], labels[i], p) for i in range(12)]
    assert (found.eps >= np.array(expected) * (1 - 1e-9)).all()
    np.testing.assert_allclose(found.eps, expected, rtol=1.1e-4)
    np.testing.assert_array_equal(found.repeat, 0)


def test_robustness_is_the_least_over_repeats():
    x, labels, bounds = numbered()
    options = {"bounds": bounds, "seed": 0, "tolerance": 1e-3, "batch_size": N}
    asked = []

    def model(v):
        which = np.rint(v[:, 0, 0, 0] * 1e4).astype(int)
        scores = _linear(v)
        asked.extend(zip(which, norm64(flat(v), flat(x[which])), scores.argmax(1) != labels[which], strict=True))
        return scores

    found = noise_robustness(model, x, labels, repeats=8, **options)
    few = noise_robustness(_linear, x, labels, repeats=2, **options)
    assert (found.eps <= few.eps).all()
    early = (found.repeat >= 0) & (found.repeat < 2)
    np.testing.assert_array_equal(found.eps[early], few.eps[early])
    assert set(found.repeat) == set(range(8))
    # The least eps at which the model was asked and wrong, and hardly less one at which it was right.
    for i in range(N):
        wrong = [norm for which, norm, fell in asked if which == i and fell]
        right = [norm for which, norm, fell in asked if which == i and not fell]
        assert min(wrong) == pytest.approx(found.eps[i], rel=1e-12)
        assert max(norm for norm in right if norm < found.eps[i]) >= found.eps[i] * (1 - 1e-3) * (1 - 1e-12)


def test_robustness_of_what_is_wrong_or_never_falls():
    x, labels = problem()
    wrong = labels.copy()
    wrong[:30] = (labels[:30] + 1) % CLASSES
    found = noise_robustness(_linear, x, wrong, bounds=(LOWER, UPPER), largest=1e-3, seed=0)
    np.testing.assert_array_equal(found.eps, np.where(np.arange(N) < 30, 0, np.inf))
    np.testing.assert_array_equal(found.repeat, -1)
    assert found.accuracy(0.5) == 0.5
    assert found.median == math.inf


def test_robustness_of_what_falls_to_anything():
    """Here the least noise is enough, and looking for less of it comes to an end."""
    asked = []

    def model(v):
        asked.append(len(v))
        total = np.abs(v).sum(axis=1)
        return np.stack([np.zeros_like(total), total], axis=1)

    found = noise_robustness(model, np.zeros((2, 10)), [0, 0], seed=0)
    assert (found.eps > 0).all()
    assert (found.eps < 1e-5).all()
    assert len(asked) < 40
    with pytest.raises(ValueError, match=r"tolerance is 1e-17, expected a number from 1e-6 to 1"):
        noise_robustness(model, np.zeros((2, 10)), [0, 0], tolerance=1e-17)


@pytest.mark.parametrize("p", [1.02, 1.05])
def test_gradients_spend_all_of_float16(p):
    """Also near p = 1, where the steepest direction is nearly nothing in most elements."""
    x = torch.full((2, 1, 20, 20), 0.5).half()
    weights = torch.linspace(0.05, 1, 400)[:, None] * torch.tensor([[0.0, 1.0]])
    eps = 0.8 * 0.5 * 400 ** (1 / p)
    found = gradient_attack(lambda v: v.reshape(len(v), -1).float() @ weights, x, [0, 0], eps, p=p, loss="margin")
    assert (found.norms <= eps).all()
    assert (found.norms > 0.98 * eps).all()


def test_accuracy_and_plot(tmp_path):
    found = Robustness(np.array([0.0, 1.0, 2.0, math.inf]), np.array([-1, 0, 0, -1]), 2.0)
    np.testing.assert_array_equal(found.accuracy([0, 0.5, 1, 1.5, 2, 100]), [0.75, 0.75, 0.5, 0.5, 0.25, 0.25])
    assert found.median == 1.5
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    axes = found.plot(color="tab:blue")
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [0.75, 0.75, 0.5, 0.25, 0.25])
    axes.figure.savefig(tmp_path / "plot.png")
    assert found.plot(axes) is axes
    nothing = Robustness(np.array([math.inf]), np.array([-1]), 2.0)
    np.testing.assert_array_equal(nothing.plot().lines[0].get_ydata(), [1.0])


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "dtype"),
    [
        *((p, "float32") for p in (1, 2, math.inf)),
        *in_test_all((1.5, "float32"), (3, "float32")),
        *((p, d) for p in (1, 3, math.inf) for d in ("float16", "bfloat16", "float64")),
    ],
)
def test_gradients_spend_all_and_not_more(differentiable, p, dtype):
    x, labels = problem()
    mine = differentiable.array(x, dtype)
    x = differentiable.numpy(mine)
    eps = sizes(p)
    for options in ({"steps": 1}, {"steps": 4, "random_start": True, "seed": 0}, {"steps": 3, "step_size": 0.05}):
        found = gradient_attack(
            linear(differentiable.name), mine, labels, eps, p=p, bounds=(LOWER, UPPER), batch_size=25, **options
        )
        assert_found(found, differentiable, x, p)
        assert (found.norms <= eps).all()
        assert (found.norms > eps * (1 - {"float32": 1e-6, "float64": 1e-12}.get(dtype, 0.1))).all()


@pytest.mark.parametrize("p", ORDERS)
def test_no_other_perturbation_gains_more(differentiable, p):
    """Of a linear model and a linear loss, one step is the best there is: every other is no better."""
    x, labels = problem("float64")
    eps = sizes(p)

    def score(scores, labels):
        return -scores[:, 0]

    mine = differentiable.array(x, "float64")
    found = gradient_attack(linear(differentiable.name), mine, labels, eps, p=p, bounds=(LOWER, UPPER), loss=score)
    v = assert_found(found, differentiable, x, p)
    best = flat(x - v) @ WEIGHTS[:, 0].astype(float)
    rng = np.random.default_rng(3)
    signs = -np.sign(WEIGHTS[:, 0]).reshape(SHAPE)
    for sharpness in (0, 0.3, 1, 3, 10, 30):
        weights = np.abs(WEIGHTS[:, 0].astype(float).reshape(SHAPE)) ** sharpness
        for _ in range(10):
            other = ca.perturb(x, signs * weights * rng.random(x.shape), eps, p=p, bounds=(LOWER, UPPER))
            assert (flat(x - other) @ WEIGHTS[:, 0].astype(float) <= best * (1 + 1e-12)).all()


def test_one_norm_fills_in_the_order_of_the_gradient():
    x = torch.tensor([[0.9, 0.5, 0.2, 0.4]], dtype=torch.float64)

    def model(x):
        score = x @ torch.tensor([3.0, -2.0, 1.0, 0.0], dtype=torch.float64)
        return torch.stack([torch.zeros_like(score), score], 1)

    found = gradient_attack(model, x, [0], 0.8, p=1)
    np.testing.assert_allclose(found.perturbed, [[1.0, 0.0, 0.4, 0.4]], atol=1e-14)


def test_steps_do_better_than_one(differentiable):
    """On a model with a curved boundary."""
    x, _ = problem()
    mine = differentiable.array(x, "float32")

    def model(x):
        return linear(differentiable.name)(1.5 * x**2 * (3 - x))

    labels = np.asarray(model(mine)).argmax(axis=1)
    options = {"bounds": (LOWER, UPPER), "eps": 0.35}
    one = gradient_attack(model, mine, labels, **options)
    many = gradient_attack(model, mine, labels, steps=20, **options)
    margin = gradient_attack(model, mine, labels, steps=20, loss="margin", **options)
    assert 0 < one.success.sum() <= many.success.sum() < N
    assert one.success.sum() <= margin.success.sum()
    for found in (one, many, margin):
        wrong = np.asarray(model(found.perturbed)).argmax(axis=1) != labels
        np.testing.assert_array_equal(found.success, wrong)


def test_targeted_gradients(differentiable):
    x, labels = problem()
    targets = (labels + 1) % CLASSES
    mine = differentiable.array(x, "float32")
    for loss in ("cross-entropy", "margin"):
        found = gradient_attack(
            linear(differentiable.name), mine, targets, 1.5, bounds=(LOWER, UPPER), targeted=True, steps=5, loss=loss
        )
        v = assert_found(found, differentiable, x, 2)
        np.testing.assert_array_equal(_linear(v).argmax(axis=1) == targets, found.success)
        assert found.success.sum() > 30


def test_a_margin_does_not_saturate(differentiable):
    x, labels = problem()
    mine = differentiable.array(x, "float32")

    def certain(x):
        return 1e4 * linear(differentiable.name)(x)

    lost = gradient_attack(certain, mine, labels, 0.8, bounds=(LOWER, UPPER))
    found = gradient_attack(certain, mine, labels, 0.8, bounds=(LOWER, UPPER), loss="margin")
    assert (lost.norms == 0).sum() > 40  # no gradient, nowhere to go
    np.testing.assert_allclose(found.norms, 0.8, rtol=1e-6)
    assert found.success.sum() > lost.success.sum()


def test_a_margin_is_that_of_the_best_other(differentiable):
    """Of every sample its own, whatever the others of the batch are."""
    x = np.full((N, *SHAPE), 0.25) + np.random.default_rng(2).uniform(-0.1, 0.1, (N, *SHAPE))
    scores = _linear(x)
    labels, best = scores.argsort(axis=1)[:, -1:-3:-1].T
    assert len(set(zip(labels, best, strict=True))) > 2
    mine = differentiable.array(x, "float64")
    found = gradient_attack(linear(differentiable.name), mine, labels, 0.01, loss="margin")
    towards = WEIGHTS.T.astype(float)[best] - WEIGHTS.T[labels]
    expected = 0.01 * towards / np.linalg.norm(towards, axis=1, keepdims=True)
    np.testing.assert_allclose(flat(differentiable.numpy(found.perturbed) - x), expected, rtol=0, atol=1e-12)


def test_models_of_the_frameworks():
    torch.manual_seed(0)
    x, _ = problem()
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, CLASSES)
    )
    mine = torch.from_numpy(x)
    with pytest.warns(UserWarning, match="the model is in training mode"):
        noise_attack(net, mine, np.zeros(N, int), 1.0, bounds=(LOWER, UPPER))
    net.eval()
    labels = net(mine).argmax(1)
    found = gradient_attack(net, mine, labels, 2.0, bounds=(LOWER, UPPER), steps=3)
    assert not found.perturbed.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())
    assert found.success.any()
    noisy = noise_attack(net, mine.clone().requires_grad_(), labels, 2.0, bounds=(LOWER, UPPER))
    assert not noisy.perturbed.requires_grad
    if tf is not None:
        import keras

        keras.utils.set_random_seed(0)
        layers = [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dropout(0.9), keras.layers.Dense(CLASSES)]
        model = keras.Sequential(layers)
        mine = tf.constant(x)
        labels = tf.argmax(model(mine), 1)
        found = gradient_attack(model, mine, labels, 1.0, bounds=(LOWER, UPPER))
        np.testing.assert_array_equal(tf.argmax(model(found.perturbed), 1) != labels, found.success)
        assert found.success.any()
    if jax is not None:
        found = gradient_attack(jax.jit(linear("jax")), jax.numpy.asarray(x), labels, 1.0, bounds=(LOWER, UPPER))
        assert found.success.any()


def test_a_progress_bar(capsys):
    x, labels = problem()
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    found = noise_attack(_linear, x, labels, 1.0, bounds=(LOWER, UPPER), repeats=3, progress=True, seed=0)
    quiet = noise_attack(_linear, x, labels, 1.0, bounds=(LOWER, UPPER), repeats=3, seed=0)
    np.testing.assert_array_equal(found.perturbed, quiet.perturbed)


# --- errors -----------------------------------------------------------------------------------------------------------


def wide(x):
    return np.zeros((len(x), 3, 2))


BAD = [
    ({"model": None}, "model is a NoneType, expected a function of a batch"),
    ({"model": lambda x: np.full((len(x), CLASSES), np.nan)}, "the model's scores are NaN for 10 of 10 sample"),
    ({"model": lambda x: np.zeros(len(x))}, r"scores have shape \(10,\), expected \(10, classes\) for 10 sample"),
    ({"model": wide}, r"scores have shape \(10, 3, 2\), expected \(10, classes\)"),
    ({"model": lambda x: np.zeros((len(x) + 1, 2))}, r"scores have shape \(11, 2\), expected \(10, classes\)"),
    ({"model": lambda x: None}, "the model's result is a NoneType, expected an array"),
    ({"x": np.zeros((60, 4), int)}, "x has dtype int64, expected one of float16"),
    ({"x": np.zeros(60)}, r"x has shape \(60,\), expected a batch: the first axis counts samples"),
    ({"x": np.full((N, *SHAPE), np.nan)}, "x has 5400 element.s. that are NaN or infinite"),
    ({"labels": np.zeros(3, int)}, r"labels has shape \(3,\), expected \(60,\): one for every sample"),
    ({"labels": np.zeros(60)}, "labels has dtype float64, expected whole numbers"),
    ({"labels": np.full(60, -1)}, "labels has -1 for sample 0, expected 0 or more"),
    ({"labels": np.arange(60)}, "labels has 59 for sample 59, expected 0 to 3 for a model with 4 classes"),
    ({"eps": -1.0}, "eps is -1.0"),
    ({"eps": np.ones(3)}, r"eps has shape \(3,\), expected a number or shape \(60,\)"),
    ({"p": 0.5}, "p is 0.5, expected a number from 1 to inf"),
    ({"bounds": (1, 0)}, r"bounds are \(1, 0\), expected lower <= upper"),
    ({"noise": "brown"}, "noise is 'brown', expected one of 'gaussian'"),
    ({"repeats": 0}, "repeats is 0, expected a whole number of 1 or more"),
    ({"batch_size": 0}, "batch_size is 0, expected a whole number of 1 or more"),
    ({"seed": 0.5}, "seed is a float, expected a whole number or None"),
    ({"seed": -1}, "seed is -1, expected a whole number from 0"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_bad_input(wrong, message):
    x, labels = problem()
    given = {
        "model": _linear,
        "x": x,
        "labels": labels,
        "eps": 1.0,
        "bounds": (LOWER, UPPER),
        "batch_size": 10,
        **wrong,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        noise_attack(**given)
    if not {"eps", "repeats"} & set(wrong):
        del given["eps"]
        with pytest.raises((TypeError, ValueError), match=message):
            noise_robustness(**given)


def test_x_outside_its_bounds_is_said_before_the_model_is_asked():
    x, labels = problem()
    x[57, 1, 0, 0] = 1.5  # in the last batch

    def never(x):
        raise AssertionError("asked")

    for attack in (noise_attack, gradient_attack):
        for mine in (x, torch.from_numpy(x)) if attack is noise_attack else (torch.from_numpy(x),):
            with pytest.raises(
                ValueError, match=r"x has 1 element\(s\) outside its bounds, the worst in sample 57: 1\.5"
            ):
                attack(never, mine, labels, 1.0, bounds=(LOWER, UPPER), batch_size=10)


GRADIENT_BAD = [
    ({"x": np.zeros((N, *SHAPE))}, "x is a numpy array, expected one of PyTorch, TensorFlow or JAX"),
    ({"loss": "hinge"}, "loss is 'hinge', expected one of 'cross-entropy', 'margin'"),
    ({"steps": 0}, "steps is 0, expected a whole number of 1 or more"),
    ({"step_size": -1.0}, "step_size is -1.0, expected a positive number or None"),
    ({"model": lambda x: torch.zeros(len(x), 4)}, "the loss does not depend on x"),
    ({"model": lambda x: x.flatten(1)[:, :4] * math.nan}, "the model's scores are NaN for 10 of 10"),
    ({"model": lambda x: x.flatten(1)}, None),
    ({"model": lambda x: x.flatten(1).sum(1)}, r"scores have shape \(10,\), expected \(10, classes\)"),
    ({"model": lambda x: torch.sqrt(x.flatten(1)[:, :4] * 0)}, "the gradient of the loss is NaN or infinite"),
    ({"labels": np.full(N, 4)}, "labels has 4 for sample 0, expected 0 to 3 for a model with 4 classes"),
]


@pytest.mark.parametrize(("wrong", "message"), GRADIENT_BAD)
def test_bad_input_of_gradients(wrong, message):
    x, labels = problem()
    given = {
        "model": linear("torch"),
        "x": torch.from_numpy(x),
        "labels": labels,
        "eps": 1.0,
        "batch_size": 10,
        **wrong,
    }
    given["bounds"] = LOWER, UPPER
    if message is None:
        gradient_attack(**given)
        return
    with pytest.raises((TypeError, ValueError), match=message):
        gradient_attack(**given)


def test_without_bounds_there_must_be_a_largest_eps():
    x, labels = problem()
    with pytest.raises(ValueError, match="expected finite ones or a `largest` eps"):
        noise_robustness(_linear, x, labels, bounds=(None, None))
    found = noise_robustness(_linear, x, labels, bounds=(None, None), largest=50.0, repeats=3, seed=0)
    assert np.isfinite(found.eps).mean() > 0.9
    with pytest.raises(ValueError, match="largest is -1, expected a positive number"):
        noise_robustness(_linear, x, labels, bounds=(LOWER, UPPER), largest=-1)
    with pytest.raises(ValueError, match="tolerance is 2, expected a number from 1e-6 to 1"):
        noise_robustness(_linear, x, labels, bounds=(LOWER, UPPER), tolerance=2)


def test_x_is_looked_at_on_an_accelerator_too(monkeypatch):
    monkeypatch.setattr(torch_backend, "values_of", lambda a: None)
    monkeypatch.setattr(torch_backend, "_numpy_can", lambda x: False)
    x, labels = problem()
    bounds = torch.from_numpy(LOWER), torch.from_numpy(UPPER)
    found = noise_attack(linear("torch"), torch.from_numpy(x), labels, 1.0, bounds=bounds, seed=0)
    np.testing.assert_allclose(found.norms, 1.0, rtol=3e-7)
    x[57, 1, 0, 0] = 1.5
    with pytest.raises(ValueError, match="outside its bounds, the worst in sample 57"):
        noise_attack(linear("torch"), torch.from_numpy(x), labels, 1.0, bounds=bounds)
