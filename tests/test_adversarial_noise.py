"""Learned noise: its generator, the training of it and against it, what is left on disk, and the corruptions."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import math
import random
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from clipaware import _corruptions, _training, adversarial_noise
from clipaware.adversarial_noise import (
    CORRUPTIONS,
    METHODS,
    NoiseGenerator,
    corrupt,
    evaluate_corruptions,
    train_noise,
    train_robust,
)
from clipaware.attacks import noise_robustness
from clipaware.reference import l2_clipping_aware_rescaling, norm64, sort_rescale

SHAPES = {1: (5, 2, 40), 2: (5, 3, 9, 7), 3: (5, 1, 4, 5, 6)}
EXAMPLE = Path(__file__).parent.parent / "examples" / "robust_training.py"


def problem(samples=96, side=6, seed=0):
    """A bright bar in the dark, upright or not."""
    g = torch.Generator().manual_seed(seed)
    y, place = (torch.randint(0, n, (samples,), generator=g) for n in (2, side))
    upright = torch.nn.functional.one_hot(place, side).float()[:, None, :].expand(samples, side, side)
    x = torch.where(y[:, None, None] == 0, upright, upright.transpose(1, 2))[:, None] * 0.6
    return (x + 0.05 * torch.randn(x.shape, generator=g)).clamp(0, 1), y


def network(side=6, seed=0, dropout=False):
    torch.manual_seed(seed)
    layers = [torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
    layers += [torch.nn.Dropout(0.2)] * dropout
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(4 * side * side, 2))


def loader(samples=96, batch=24, **options):
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*problem(samples)), batch_size=batch, shuffle=True, **options
    )


@pytest.fixture(scope="module")
def trained():
    """A network that knows clean pictures."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    train_robust(model, loader(480, 48), None, method="clean", epochs=8, optimizer=optimizer, seed=0)
    return model


def copy_of(model):
    other = network()
    other.load_state_dict(model.state_dict())
    return other


def assert_same_weights(one, other):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


# --- the generator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_generator_has_its_layers(dims, kernel_size):
    x = torch.zeros(SHAPES[dims])
    channels = x.shape[1]
    generator = NoiseGenerator(channels, kernel_size, dims=dims)
    shapes = [tuple(layer.weight.shape) for layer in generator.layers]
    one, wide = (1,) * dims, (kernel_size,) * dims
    assert shapes == [(20, channels, *one), (20, 20, *wide), (20, 20, *one), (channels, 20, *one)]
    assert generator(x).shape == x.shape
    assert all((layer.bias == 0).all() for layer in generator.layers)


def test_weights_begin_small():
    torch.manual_seed(0)
    weights = torch.cat([p.flatten() for n, p in NoiseGenerator(3, 3).named_parameters() if "weight" in n])
    assert weights.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(weights.mean().item()) < 1e-3


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_begins_as_gaussian_noise(kernel_size):
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    torch.manual_seed(0)
    delta = NoiseGenerator(3, kernel_size)(torch.zeros(8, 3, 40, 40)).detach().numpy().ravel()
    assert stats.kstest(delta[:20000], "norm").pvalue > 0.01


def test_residual_is_the_middle_of_z():
    generator = NoiseGenerator(1, 3)
    with torch.no_grad():
        for layer in generator.layers:
            layer.weight.zero_()
    drawn = generator(torch.zeros(2, 1, 5, 4), generator=torch.Generator().manual_seed(3))
    z = torch.randn((2, 1, 7, 6), generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn, z[:, :, 1:6, 1:5])


def test_convolutions_are_as_said():
    torch.manual_seed(0)
    generator = NoiseGenerator(2, 3)
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.normal_(std=0.3)
    z = torch.randn((3, 2, 7, 6), generator=torch.Generator().manual_seed(3))
    h = z
    for number, layer in enumerate(generator.layers):
        h = torch.nn.functional.conv2d(h, layer.weight, layer.bias)
        h = h.clamp(min=0) if number < 3 else h
    drawn = generator(torch.zeros(3, 2, 5, 4), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(drawn, h + z[:, :, 1:6, 1:5])


@pytest.mark.parametrize(("p", "dtype"), [(2, torch.float32), (1, torch.float64), (math.inf, torch.float32)])
@pytest.mark.parametrize(("dims", "kernel_size"), [(1, 3), (2, 1), (2, 3), (3, 3)])
def test_delivers_eps(dims, kernel_size, p, dtype):
    torch.manual_seed(0)
    x = torch.rand(SHAPES[dims], dtype=dtype)
    generator = NoiseGenerator(x.shape[1], kernel_size, dims=dims)
    eps = torch.linspace(0.1, 0.5, len(x)) * {1: 20, 2: 3, math.inf: 1}[p]
    v = generator.perturb(x, eps, (0, 1), p=p).detach()
    assert v.dtype == dtype
    assert ((0 <= v) & (v <= 1)).all()
    np.testing.assert_allclose(norm64(v.flatten(1), x.flatten(1), p), eps, rtol=1e-6)


def test_bounds_per_channel():
    lower, upper = torch.tensor([-1.0, 0, 2]).reshape(3, 1, 1), torch.tensor([1.0, 3, 5]).reshape(3, 1, 1)
    x = lower + torch.rand(4, 3, 8, 8) * (upper - lower)
    v = NoiseGenerator(3).perturb(x, 6.0, (lower, upper)).detach()
    assert ((lower <= v) & (v <= upper)).all()
    np.testing.assert_allclose(norm64(v.flatten(1), x.flatten(1)), 6, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "channels is 0"),
        ((1, 2), {}, "kernel_size is 2, expected 1 or 3"),
        ((1,), {"dims": 4}, "dims is 4"),
        ((1,), {"hidden": 0}, "hidden is 0"),
    ],
)
def test_bad_generators(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        NoiseGenerator(*arguments, **options)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 8, 8\), expected \(samples, 1, height, width\)"):
        NoiseGenerator(1)(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"expected \(samples, 1, length\)"):
        NoiseGenerator(1, dims=1)(torch.zeros(2, 1, 8, 8))


# --- gradients --------------------------------------------------------------------------------------------------------


def through_the_sort(x, delta, eps):
    """The paper's own way: scale by what its sort says, clip, and let autodiff run through all of it."""
    return (x + l2_clipping_aware_rescaling(x, delta, eps) * delta).clamp(0, 1)


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_gradients_are_those_through_the_sort(kernel_size):
    x, y = problem(16)
    x = x.double()
    torch.manual_seed(0)
    model, generator = network().double().eval(), NoiseGenerator(1, kernel_size).double()
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.normal_(std=0.3)
    for eps in (0.5, 1.5, 2.5):
        found = []
        for way in ("exact", "sort"):
            delta = generator(x, generator=torch.Generator().manual_seed(1))
            v = adversarial_noise.perturb(x, delta, eps) if way == "exact" else through_the_sort(x, delta, eps)
            loss = torch.nn.functional.cross_entropy(model(v), y)
            found.append(torch.autograd.grad(loss, [*generator.parameters(), *model.parameters()]))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()) + 1e-15)


@pytest.mark.long
def test_gradients_in_float32_and_other_norms():
    x, y = problem(16)
    model, generator = network().eval(), NoiseGenerator(1, 3)
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.normal_(std=0.3)
    for p, eps in ((1, 6.0), (3, 0.9)):
        delta = generator(x, generator=torch.Generator().manual_seed(1))
        eta = sort_rescale(x.flatten(1), delta.flatten(1), eps, p).reshape(-1, 1, 1, 1)
        theirs = (x.double() + eta * delta.double()).clamp(0, 1).float()
        mine = adversarial_noise.perturb(x, delta, eps, p=p)
        for one, other in itertools.pairwise(
            torch.autograd.grad(
                torch.nn.functional.cross_entropy(model(v), y), list(generator.parameters()), retain_graph=True
            )
            for v in (mine, theirs)
        ):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-9)


def test_gradients_are_finite_at_the_edges():
    """Black and white pictures, eps out of reach, pictures at their bounds: whatever a batch may have."""
    x = torch.cat([torch.zeros(2, 1, 6, 6), torch.ones(2, 1, 6, 6), problem(4)[0].round()])
    model, generator = network(), NoiseGenerator(1, 3)
    for eps in (1e-6, 1.0, 5.0, 100.0):
        loss = torch.nn.functional.cross_entropy(model(generator.perturb(x, eps)), torch.zeros(8, dtype=torch.long))
        for g in torch.autograd.grad(loss, [*generator.parameters(), *model.parameters()]):
            assert torch.isfinite(g).all()


def test_a_step_is_never_nan():
    class Broken(torch.nn.Module):
        """Its loss is finite and its gradient is not."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(36, 2)

        def forward(self, x):
            return self.linear(x.flatten(1)) * 0 + torch.sqrt(self.linear.weight.sum() * 0)

    model = Broken()
    before = model.linear.weight.clone()
    with pytest.raises(FloatingPointError, match="in epoch 1; no step was taken"):
        train_robust(model, loader(), 1.0, epochs=1, warmup=0, seed=0)
    assert torch.equal(model.linear.weight, before)


# --- training ---------------------------------------------------------------------------------------------------------


def accuracy(model, generator, eps):
    x, y = problem(500, seed=5)
    torch.manual_seed(1)
    with torch.no_grad():
        return float((model.eval()(generator.perturb(x, eps)).argmax(1) == y).double().mean())


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_learned_noise_is_worse_than_gaussian(trained, kernel_size):
    model, generator = copy_of(trained), NoiseGenerator(1, kernel_size)
    done = train_noise(generator, model, loader(480, 48), 1.2, epochs=15, lr=1e-2, seed=0)
    losses = [row["loss"] for row in done.history]
    assert losses[-1] > 2 * losses[0]
    assert done.generators == [generator]
    assert done.eps == 1.2
    assert_same_weights(trained, model)  # the model stays as it is
    assert all(parameter.grad is None for parameter in model.parameters())
    assert accuracy(trained, generator, 1.2) < accuracy(trained, NoiseGenerator(1), 1.2) - 0.1


def test_robust_training_helps(trained):
    model = copy_of(trained)
    done = train_robust(model, loader(480, 48), 1.2, epochs=6, warmup=10, noise_lr=1e-2, seed=0)
    assert [row["epoch"] for row in done.history] == [1, 2, 3, 4, 5, 6]
    assert done.history[-1]["loss"] < done.history[0]["loss"]
    assert done.history[-1]["clean_accuracy"] > 0.98
    assert len(done.generators) == 6
    assert done.eps == 1.2
    under_learned = []
    for one in (trained, model):
        generator = NoiseGenerator(1)
        train_noise(generator, one, loader(480, 48), 1.2, epochs=10, lr=1e-2, seed=1)
        under_learned.append(accuracy(one, generator, 1.2))
    assert under_learned[1] > under_learned[0] + 0.1


@pytest.mark.parametrize("samples", [100, 24, 10, 7, 3, 1])
def test_parts_of_a_batch(samples):
    parts = adversarial_noise._parts(samples)
    assert sum(parts) == samples
    assert all(abs(part - share * samples) < 1 for part, share in zip(parts, (0.5, 0.3, 0.1, 0.1), strict=True))


def test_replay(trained):
    """Half of a batch is clean, 30% is of the newest generator and 10% each of two earlier ones, all of size eps."""
    calls, sizes = [], []
    forward, perturb = NoiseGenerator.forward, adversarial_noise.perturb

    def drawn(self, x):
        calls.append((self, len(x)))
        return forward(self, x)

    def scaled(x, delta, *arguments, **options):
        v = perturb(x, delta, *arguments, **options)
        sizes.extend(norm64(v.detach().flatten(1), x.flatten(1)))
        return v

    with mock.patch.object(NoiseGenerator, "forward", drawn), mock.patch.object(adversarial_noise, "perturb", scaled):
        done = train_robust(copy_of(trained), loader(100, 100), 1.5, epochs=4, warmup=0, seed=0)
    by_epoch = [calls[start : start + 3] for start in range(0, 12, 3)]
    assert [[count for _, count in epoch] for epoch in by_epoch] == [[30, 10, 10]] * 4
    for number, epoch in enumerate(by_epoch):
        current, *earlier = [generator for generator, _ in epoch]
        assert current is done.generators[number]
        assert all(generator in done.generators[: max(number, 1)] for generator in earlier)
    assert len({id(generator) for generator, _ in by_epoch[3][1:]}) == 2
    assert len(sizes) == 4 * 50
    np.testing.assert_allclose(sizes, 1.5, rtol=1e-6)
    assert len(set(map(id, done.generators))) == 4


def test_half_stays_clean(trained):
    """And which half, is random even if the loader does not shuffle."""
    x, y = problem(40)
    seen = []

    class Watched(torch.nn.Module):
        """Remembers what it was shown while training."""

        def __init__(self):
            super().__init__()
            self.inner = copy_of(trained)

        def forward(self, v):
            if self.training:
                seen.append({tuple(row.tolist()) for row in v.detach().flatten(1)})
            return self.inner(v)

    train_robust(Watched(), [(x, y)], 1.5, epochs=3, warmup=0, seed=0)
    pictures = {tuple(row.tolist()): number for number, row in enumerate(x.flatten(1))}
    clean = [frozenset(pictures[row] for row in batch if row in pictures) for batch in seen]
    assert [len(which) for which in clean] == [20, 20, 20]
    assert len(set(clean)) == 3


def test_generators_begin_anew(trained):
    """Every epoch has a new one, which takes `warmup` steps while the classifier waits."""
    made, steps = [], []
    step = _training.Run.noise_step

    def counted(self, generator, *arguments):
        made.append(generator)
        before = {name: a.clone() for name, a in self.model.state_dict().items()}
        step(self, generator, *arguments)
        assert all(torch.equal(a, before[name]) for name, a in self.model.state_dict().items())
        steps.append(len(arguments[1]))

    with mock.patch.object(_training.Run, "noise_step", counted):
        train_robust(copy_of(trained), loader(96, 48), 1.5, epochs=2, warmup=5, seed=0)
    assert len(steps) == 10  # of five batches each, though an epoch has two
    assert len(set(map(id, made))) == 2


def test_eps_adapts(trained):
    done = train_robust(
        copy_of(trained), loader(960, 48), "adaptive", epochs=4, noise_lr=1e-2, warmup=10, error=0.3, seed=0
    )
    assert 1 - done.history[-1]["noisy_accuracy"] == pytest.approx(0.3, abs=0.06)
    assert done.eps == done.history[-1]["eps"]
    sizes = [row["eps"] for row in done.history]
    assert max(sizes) > 1.02 * min(sizes)


def test_an_adaptive_eps_begins_where_it_is_to_be(trained):
    run = _training.Run(trained.eval(), loader(480, 480), 2, (0, 1), None, 0, False)
    noise = adversarial_noise._Noise(run, "gaussian", "adaptive", None, 0.3, 1, 1e-3)
    x, y = run.look(None, None, None)
    noise.begin((x, y))
    torch.manual_seed(1)
    with torch.no_grad():
        wrong = (trained(noise.plain(x)).argmax(1) != y).double().mean()
    assert wrong == pytest.approx(0.3, abs=0.06)
    for asked, moved in ((1.0, -1), (0.0, 1)):  # too many are wrong, and too few
        before = float(noise.eps)
        noise.adapt(asked)
        assert np.sign(float(noise.eps) - before) == moved


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("clean", {"eps": None}),
        ("gaussian", {"eps": 1.0}),
        ("gaussian", {"eps": None, "sigma": 0.3}),
        ("gaussian", {"eps": None, "sigma": (0.1, 0.3)}),
        ("gaussian", {"eps": "adaptive"}),
        ("speckle", {"eps": None, "sigma": 0.5}),
        ("speckle", {"eps": 1.0}),
    ],
)
def test_baselines(method, options):
    model, done = network(), None
    eps = options.pop("eps")
    done = train_robust(model, loader(), eps, method=method, epochs=6, seed=0, **options)
    assert done.generators == []
    assert done.history[-1]["clean_accuracy"] > 0.8
    assert math.isnan(done.history[-1]["noisy_accuracy"]) == (method == "clean")


def test_baselines_have_their_noise(trained):
    x, y = problem(4000)
    run = _training.Run(trained, [(x, y)], 2, (0, 1), None, 0, False)
    torch.manual_seed(0)
    grey = torch.full((4000, 1, 6, 6), 0.5)
    small = adversarial_noise._Noise(run, "gaussian", None, (0.02, 0.06), 0.3, 1, 1e-3).plain(grey)
    spread = (small - grey).flatten(1).std(1)
    assert ((spread < 0.035).double().mean() - 0.5).abs() < 0.05  # half of them each
    assert spread[spread < 0.035].mean().item() == pytest.approx(0.02, rel=0.05)
    assert spread[spread > 0.035].mean().item() == pytest.approx(0.06, rel=0.05)
    dark = torch.full((4000, 1, 6, 6), 0.2)
    speckle = adversarial_noise._Noise(run, "speckle", None, 0.1, 0.3, 1, 1e-3).plain(dark)
    assert (speckle - dark).std().item() == pytest.approx(0.02, rel=0.05)
    exact = adversarial_noise._Noise(run, "gaussian", 1.5, None, 0.3, 1, 1e-3).plain(x)
    np.testing.assert_allclose(norm64(exact.flatten(1), x.flatten(1)), 1.5, rtol=1e-6)


def test_float64():
    """The loss, too, has the precision of the model."""
    x, y = problem(48)
    model = network().double()
    run = _training.Run(model, [(x.double(), y)], 2, (0, 1), None, 0, False)
    assert run.scores(x.double()).dtype == torch.float64
    done = train_robust(model, [(x.double(), y)] * 4, 1.0, epochs=2, warmup=2, seed=0)
    assert done.history[1]["loss"] < done.history[0]["loss"]


def test_signals_and_volumes():
    """The same training for audio and for volumes, with bounds of their own."""
    for dims, shape in ((1, (24, 2, 30)), (3, (24, 1, 4, 4, 4))):
        torch.manual_seed(0)
        x = 2 * torch.rand(shape) - 1
        y = (x.flatten(1).mean(1) > 0).long()
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape[1:]), 2))
        done = train_robust(model, [(x, y)] * 5, 1.0, bounds=(-1, 1), kernel_size=3, epochs=2, warmup=2, seed=0)
        assert done.generators[0].dims == dims
        v = done.generators[0].perturb(x, 1.0, (-1, 1))
        np.testing.assert_allclose(norm64(v.flatten(1), x.flatten(1)), 1, rtol=1e-6)


class Stream(torch.utils.data.IterableDataset):
    """Samples without a number."""

    def __iter__(self):
        return zip(*problem(48), strict=True)


def test_loader_without_a_length(capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    batches = torch.utils.data.DataLoader(Stream(), batch_size=16)
    done = train_robust(network(), batches, 1.0, epochs=2, warmup=4, seed=0, progress=True)
    assert len(done.history) == 2


# --- seeds, checkpoints and metrics -----------------------------------------------------------------------------------


def robust(folder, epochs, *, seed=3, model=None, **options):
    """A training with everything in it that has a state."""
    model = model or network(dropout=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    options = {"eps": "adaptive", "warmup": 3, "tensorboard": False, **options}
    done = train_robust(
        model, loader(), options.pop("eps"), epochs=epochs, optimizer=optimizer, scheduler=scheduler, folder=folder,
        seed=seed, **options,
    )  # fmt: skip
    return model, done


def test_seeds_reproduce():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one, first = robust(None, 2)
    two, second = robust(None, 2)
    other, _ = robust(None, 2, seed=4)
    assert_same_weights(one, two)
    assert first.history == second.history
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    torch.manual_seed(0)
    network()  # whose weights are all that is drawn from the global state
    torch.set_rng_state(before[0])
    state = torch.get_rng_state()
    train_noise(NoiseGenerator(1), one, loader(), 1.0, seed=0)
    model = network(dropout=True)
    torch.set_rng_state(state)
    np.random.seed(1)
    numbers = np.random.get_state()[1].copy()
    train_robust(model, loader(), 1.0, epochs=1, warmup=0, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numbers).all()


def test_every_epoch_has_random_numbers_of_its_own():
    run = _training.Run(network(), loader(), 2, (0, 1), None, 7, False)

    def drawn(epoch):
        run.reseed(epoch)
        return torch.rand(1).item(), np.random.rand(), random.random(), tuple(next(iter(run.loader))[1].tolist())

    with run.random_state():
        first, second, third, again = (drawn(epoch) for epoch in (1, 2, 3, 1))
    assert first == again
    for several in zip(first, second, third, strict=True):
        assert len(set(several)) == 3


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_resume_is_as_if_nothing_had_happened(tmp_path, kernel_size):
    whole, all_at_once = robust(tmp_path / "one", 5, kernel_size=kernel_size)
    robust(tmp_path / "two", 2, kernel_size=kernel_size)
    resumed, in_parts = robust(
        tmp_path / "two", 5, kernel_size=kernel_size, resume=True, model=network(dropout=True, seed=9)
    )
    assert_same_weights(whole, resumed)
    assert all_at_once.history == in_parts.history
    assert all_at_once.eps == in_parts.eps
    for one, other in zip(all_at_once.generators, in_parts.generators, strict=True):
        assert_same_weights(one, other)
    for file in ("metrics.csv",):
        assert (tmp_path / "one" / file).read_text() == (tmp_path / "two" / file).read_text()


class Interrupted(Exception):
    """Somebody pulled the plug."""


def test_resume_after_a_break_in_mid_epoch(tmp_path):
    whole, all_at_once = robust(tmp_path / "one", 4)
    steps, step = [], _training.Run.step

    def breaking(self, *arguments, **options):
        steps.append(1)
        if len(steps) == 2 * 7 + 5:  # the third epoch has begun
            raise Interrupted
        step(self, *arguments, **options)

    with mock.patch.object(_training.Run, "step", breaking), pytest.raises(Interrupted):
        robust(tmp_path / "two", 4)
    assert len((tmp_path / "two" / "metrics.csv").read_text().splitlines()) == 3
    resumed, in_parts = robust(tmp_path / "two", 4, resume=True, model=network(dropout=True, seed=9))
    assert_same_weights(whole, resumed)
    assert all_at_once.history == in_parts.history


def test_resume_with_a_loader_that_has_a_generator(tmp_path):
    """Which goes on drawing where it was left, unless it is told otherwise."""

    def trained_in(folder, epochs, resume=False):
        model = network()
        batches = loader(generator=torch.Generator().manual_seed(5))
        train_robust(
            model, batches, 1.0, epochs=epochs, warmup=2, folder=folder, resume=resume, seed=0, tensorboard=False
        )
        return model

    whole = trained_in(tmp_path / "one", 3)
    trained_in(tmp_path / "two", 1)
    assert_same_weights(whole, trained_in(tmp_path / "two", 3, resume=True))


def test_resume_of_noise(tmp_path, trained):
    def learned(folder, epochs, resume=False):
        torch.manual_seed(0)
        generator = NoiseGenerator(1)
        train_noise(
            generator, trained, loader(), 1.5, epochs=epochs, folder=folder, resume=resume, seed=0, tensorboard=False
        )
        return generator

    whole = learned(tmp_path / "one", 4)
    learned(tmp_path / "two", 2)
    assert_same_weights(whole, learned(tmp_path / "two", 4, resume=True))


def test_resume_without_a_seed(tmp_path):
    """The seed that was drawn is in the checkpoint."""
    robust(tmp_path, 1, seed=None)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    one, _ = robust(None, 3, seed=saved["seed"])
    other, _ = robust(tmp_path, 3, seed=None, resume=True)
    assert_same_weights(one, other)


def test_resume_says_what_does_not_fit(tmp_path, trained):
    robust(tmp_path, 1)
    with pytest.raises(ValueError, match="kernel_size is 3, expected 1, as in"):
        robust(tmp_path, 2, resume=True, kernel_size=3)
    with pytest.raises(ValueError, match="expected"):
        train_robust(network(dropout=True), loader(), "adaptive", warmup=3, folder=tmp_path, resume=True, seed=3)
    with pytest.raises(ValueError, match="seed is 4, expected 3, as in"):
        robust(tmp_path, 2, resume=True, seed=4)
    with pytest.raises(ValueError, match="resume is True and folder is None"):
        robust(None, 1, resume=True)
    robust(tmp_path / "new", 1, resume=True)  # with nothing there it begins


def test_a_crash_while_writing_leaves_the_old_file(tmp_path):
    robust(tmp_path, 1)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def crashing(saved, file):
        file.write(b"half of it")
        raise Interrupted

    with mock.patch.object(torch, "save", crashing), pytest.raises(Interrupted):
        robust(tmp_path, 2, resume=True)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    model, done = robust(tmp_path, 2, resume=True)
    whole, _ = robust(None, 2)
    assert_same_weights(whole, model)
    assert len(done.history) == 2
    assert not list(tmp_path.glob(".*"))


def test_metrics(tmp_path):
    _, done = robust(tmp_path, 3)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "loss", "clean_accuracy", "noisy_accuracy", "eps", "lr"]
    assert [{name: float(value) for name, value in row.items()} for row in rows] == done.history
    assert [row["lr"] for row in done.history] == [3e-3, 3e-3, 1.5e-3]


def test_metrics_are_right():
    """By hand, of a model that cannot learn."""
    x, y = problem(40)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    done = train_robust(
        model, [(x[:30], y[:30]), (x[30:], y[30:])], None, method="clean", optimizer=optimizer, epochs=1
    )
    with torch.no_grad():
        scores = model(x)
    assert done.history[0]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, y)), rel=1e-6)
    assert done.history[0]["clean_accuracy"] == pytest.approx(float((scores.argmax(1) == y).double().mean()))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, done = robust(tmp_path, 2, tensorboard=None)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "clean_accuracy", "noisy_accuracy", "eps", "lr"}
    seen = [(event.step, event.value) for event in events.Scalars("loss")]
    assert seen == [(row["epoch"], pytest.approx(row["loss"], rel=1e-6)) for row in done.history]


def test_without_tensorboard(tmp_path):
    with mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None}):
        robust(tmp_path, 1, tensorboard=None)
        assert not list(tmp_path.glob("events*"))
        with pytest.raises(ImportError, match=r"clipaware\[training\]"):
            robust(tmp_path, 1, tensorboard=True)


def test_progress(trained, capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    import tqdm

    shown = []

    class Bar(tqdm.tqdm):
        """One that is shown though nobody looks."""

        def __init__(self, **options):
            super().__init__(**{**options, "disable": False})

        def set_postfix(self, **values):
            shown.append(values)
            super().set_postfix(**values)

    with mock.patch.object(tqdm, "tqdm", Bar):
        train_robust(copy_of(trained), loader(), 1.0, epochs=2, warmup=2, seed=0, progress=True)
    said = capsys.readouterr().err
    assert "epoch 1 of 2" in said
    assert "generator, epoch 2 of 2" in said
    assert {"loss", "clean_accuracy", "noisy_accuracy"} <= set(shown[-1])
    with mock.patch.dict(sys.modules, {"tqdm": None}), pytest.raises(ImportError, match="needs tqdm"):
        train_robust(copy_of(trained), loader(), 1.0, epochs=1, progress=True)


# --- precision and compilation ----------------------------------------------------------------------------------------


@pytest.fixture
def plain_kernels():
    """oneDNN's half precision fails in virtual machines whose processor has AMX and whose host does not allow it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what its flags are to be called
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_mixed_precision(trained, amp):
    model, seen = copy_of(trained), []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    done = train_robust(model, loader(), 1.5, epochs=3, warmup=3, amp=amp, seed=0)
    assert set(seen) == {amp}
    assert done.history[-1]["clean_accuracy"] > 0.9
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())
    generator = NoiseGenerator(1)
    history = train_noise(generator, model, loader(), 1.5, epochs=20, lr=1e-2, amp=amp, seed=0).history
    assert history[-1]["loss"] > history[0]["loss"]
    assert all(torch.isfinite(p).all() for p in generator.parameters())


@pytest.mark.usefixtures("plain_kernels")
def test_mixed_precision_delivers_eps():
    x, _ = problem(8)
    with torch.autocast("cpu", torch.bfloat16):
        v = NoiseGenerator(1).perturb(x, 1.5).detach()
    assert v.dtype == torch.float32
    np.testing.assert_allclose(norm64(v.flatten(1), x.flatten(1)), 1.5, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # PyTorch's own
def test_compiled_model(trained, tmp_path):
    torch._dynamo.reset()
    plain, other = copy_of(trained), copy_of(trained)
    compiled = torch.compile(other, backend="aot_eager")
    options = {"epochs": 2, "warmup": 2, "seed": 0, "tensorboard": False}
    train_robust(plain, loader(), 1.5, folder=tmp_path / "one", **options)
    train_robust(compiled, loader(), 1.5, folder=tmp_path / "two", **options)
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # Its checkpoint is the same as without.
    one, two = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("one", "two"))
    assert list(one["kept"]["model"]) == list(two["kept"]["model"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16])
def test_cuda(trained, tmp_path, amp):
    """On a GPU the same, up to what its kernels do in another order; bounds and data come from the CPU."""
    lower, upper = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    model = copy_of(trained).cuda()
    options = {"bounds": (lower, upper), "warmup": 5, "noise_lr": 1e-2, "seed": 0, "amp": amp, "folder": tmp_path}
    train_robust(model, loader(480, 48), "adaptive", epochs=1, tensorboard=False, **options)
    done = train_robust(model, loader(480, 48), "adaptive", epochs=3, tensorboard=False, resume=True, **options)
    assert len(done.history) == 3
    assert done.history[-1]["clean_accuracy"] > 0.95
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    generator = NoiseGenerator(1, 3)
    train_noise(generator, model, loader(480, 48), 1.2, epochs=10, lr=1e-2, seed=0, amp=amp)
    x, y = problem(200)
    v = generator.perturb(x.cuda(), 1.2).detach().cpu()
    np.testing.assert_allclose(norm64(v.flatten(1), x.flatten(1)), 1.2, rtol=1e-6)
    found = evaluate_corruptions(model, x, y, steps=20, corruptions=[kind for kind in CORRUPTIONS if kind != "blur"])
    assert found.clean > 0.95
    assert found.robustness.median > 0


# --- bad input --------------------------------------------------------------------------------------------------------


def bad(**changes):
    x, y = problem(24)
    x, y = changes.get("x", x), changes.get("y", y)
    return [problem(24), (x, y)]


@pytest.mark.parametrize(
    ("batches", "eps", "kind", "message"),
    [
        (bad(y=torch.full((24,), 2)), 1.0, ValueError, "batch 1 of the loader: labels have 2, expected 0 to 1"),
        (bad(y=torch.full((24,), -1)), 1.0, ValueError, "batch 1 of the loader: labels have -1"),
        (bad(y=torch.zeros(24)), 1.0, TypeError, "batch 1 of the loader: labels have dtype torch.float32"),
        (bad(y=torch.zeros(23, dtype=torch.long)), 1.0, ValueError, r"labels have shape \(23,\), expected \(24,\)"),
        (bad(x=problem(24)[0] + 1), 1.0, ValueError, "batch 1 of the loader: x has .* outside its bounds"),
        (bad(x=problem(24)[0] * math.nan), 1.0, ValueError, "batch 1 of the loader: x has .* NaN"),
        (
            [(torch.zeros(4, 1, 6, 6, dtype=torch.uint8), torch.zeros(4).long())],
            1.0,
            TypeError,
            "x has dtype torch.uint8",
        ),
        ([], 1.0, ValueError, "loader is empty"),
        ([problem(24)[0]], 1.0, ValueError, "loader has a batch of a Tensor, expected a pair"),
        (bad(), 50.0, ValueError, "eps is 50.0, which noise on 48 of 48 samples cannot have"),
        (bad(), -1.0, ValueError, "eps is -1.0, expected a positive number"),
        (bad(), 0, ValueError, "eps is 0, expected a positive number"),
        (bad(), math.nan, ValueError, "eps is nan"),
        (bad(), "much", ValueError, "eps is 'much', expected"),
    ],
)
def test_bad_input_is_an_error_before_training(batches, eps, kind, message):
    for train in (
        lambda model: train_robust(model, batches, eps, seed=0),
        lambda model: train_noise(NoiseGenerator(1), model, batches, eps, seed=0),
    ):
        model = network()
        before = {name: a.clone() for name, a in model.state_dict().items()}
        with pytest.raises(kind, match=message):
            train(model)
        assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "fgsm"}, ValueError, "method is 'fgsm', expected one of"),
        ({"kernel_size": 5}, ValueError, "kernel_size is 5"),
        ({"epochs": 0}, ValueError, "epochs is 0"),
        ({"warmup": -1}, ValueError, "warmup is -1"),
        ({"error": 1.0}, ValueError, "error is 1.0"),
        ({"amp": torch.float64}, ValueError, "amp is torch.float64"),
        ({"seed": 0.5}, TypeError, "seed is a float"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"check": 0}, ValueError, "check is 0"),
        ({"p": 0.5}, ValueError, "p is 0.5"),
        ({"bounds": (1, 0)}, ValueError, "bounds are"),
        ({"sigma": 0.1}, ValueError, "sigma is 0.1, expected None for method 'ant'"),
        (
            {"method": "gaussian", "sigma": 0.1},
            ValueError,
            "sigma is 0.1, expected None for method 'gaussian' and eps 1.0",
        ),
        ({"method": "gaussian", "sigma": (), "eps": None}, ValueError, r"sigma is \(\)"),
        ({"method": "gaussian", "sigma": -1, "eps": None}, ValueError, "sigma is -1"),
        ({"method": "clean"}, ValueError, "eps is 1.0 and sigma is None, expected None of both"),
    ],
)
def test_bad_options(options, kind, message):
    options = {"eps": 1.0, "seed": 0, **options}
    with pytest.raises(kind, match=message):
        train_robust(network(), loader(), options.pop("eps"), **options)


def test_bad_models():
    with pytest.raises(TypeError, match="model is a function"):
        train_robust(lambda x: x, loader(), 1.0)
    with pytest.raises(TypeError, match="generator is a Sequential"):
        train_noise(network(), network(), loader(), 1.0)
    with pytest.raises(ValueError, match=r"scores have shape \(24, 1, 6, 6\), expected \(24, classes\)"):
        train_robust(torch.nn.Conv2d(1, 1, 1), loader(), 1.0)
    with pytest.raises(ValueError, match=r"expected \(samples, 3, height, width\)"):
        train_noise(NoiseGenerator(3), network(), loader(), 1.0)
    with pytest.raises(ValueError, match=r"x has shape \(4, 36\), expected \(samples, channels, ...\)"):
        train_robust(torch.nn.Linear(36, 2), [(torch.rand(4, 36), torch.zeros(4).long())], 1.0)


def test_an_adaptive_eps_needs_bounds():
    for bounds in ((None, None), (0, math.inf)):
        with pytest.raises(ValueError, match="eps is 'adaptive' and noise inside the bounds can have a norm of inf"):
            train_robust(network(), loader(), "adaptive", bounds=bounds, seed=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_batches(size):
    """Of which no sample may be left for some of the parts."""
    x, y = problem(6)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    batches = list(zip(x.split(size), y.split(size), strict=True))
    for kernel_size in (1, 3):
        done = train_robust(model, batches, 1.0, kernel_size=kernel_size, epochs=3, warmup=2, seed=0)
        assert all(math.isfinite(row["loss"]) for row in done.history)


def test_few_batches_are_looked_at():
    looked = []

    class Counted:
        """A loader that knows how often it was asked."""

        def __iter__(self):
            for batch in loader(96, 12):
                looked.append(1)
                yield batch

    train_robust(network(), Counted(), 1.0, epochs=1, warmup=0, check=2, seed=0)
    assert len(looked) <= 3 + 8


def test_eps_out_of_reach_of_a_few_is_fine():
    x, y = problem(48)
    x = x.round()
    x[:10] = 0.5  # where no noise has more than 3
    done = train_robust(network(), [(x, y)], 3.5, epochs=1, warmup=0, seed=0)
    assert math.isfinite(done.history[0]["loss"])


def test_the_model_is_left_in_its_mode(trained):
    for training in (True, False):
        model = copy_of(trained).train(training)
        model[1].eval()
        train_robust(model, loader(), 1.0, epochs=1, warmup=1, seed=0)
        train_noise(NoiseGenerator(1), model, loader(), 1.0, seed=0)
        evaluate_corruptions(model, *problem(20), corruptions=("gaussian",), robustness=False)
        assert (model.training, model[0].training, model[1].training) == (training, training, False)


# --- corruptions ------------------------------------------------------------------------------------------------------

PAPER = {
    "gaussian": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot": (60, 25, 12, 5, 3),
    "impulse": (0.03, 0.06, 0.09, 0.17, 0.27),
    "speckle": (0.15, 0.2, 0.35, 0.45, 0.6),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "blur": (1, 2, 3, 4, 6),
}


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_noise_has_its_distribution(severity):
    grey = torch.full((200, 3, 16, 16), 0.5)
    place = severity - 1
    moved = {kind: corrupt(grey, kind, severity, seed=1).double() - 0.5 for kind in _corruptions.NOISES}
    # What clipping to [0, 1] leaves of a normal variable, and of a Poisson variable, by quadrature and by summation.
    t = np.linspace(-8, 8, 200001)
    density = np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi) * (t[1] - t[0])
    for kind, scale in (("gaussian", PAPER["gaussian"][place]), ("speckle", PAPER["speckle"][place] / 2)):
        expected = math.sqrt((np.clip(scale * t, -0.5, 0.5) ** 2 * density).sum())
        assert moved[kind].std().item() == pytest.approx(expected, rel=0.01)
    c = PAPER["shot"][place]
    k = np.arange(400)
    log_weights = k * math.log(c / 2) - c / 2 - np.array([math.lgamma(n + 1) for n in k])
    mean = (np.exp(log_weights) * np.clip(k / c, 0, 1)).sum()
    spread = math.sqrt((np.exp(log_weights) * (np.clip(k / c, 0, 1) - mean) ** 2).sum())
    assert moved["shot"].mean().item() + 0.5 == pytest.approx(mean, abs=0.005)
    assert moved["shot"].std().item() == pytest.approx(spread, rel=0.02)
    hit = moved["impulse"] != 0
    assert hit.double().mean().item() == pytest.approx(PAPER["impulse"][place], rel=0.05)
    assert (moved["impulse"][hit] > 0).double().mean().item() == pytest.approx(0.5, abs=0.03)
    u = np.clip(PAPER["gaussian"][place] * math.sqrt(3) * np.linspace(-1, 1, 100001), -0.5, 0.5)
    assert moved["uniform"].std().item() == pytest.approx(u.std(), rel=0.01)


def test_noise_follows_its_seed():
    x, _ = problem(4)
    for kind in _corruptions.NOISES:
        one, same, other = (corrupt(x, kind, 3, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert ((0 <= one) & (one <= 1)).all()
        torch.manual_seed(7)
        drawn = corrupt(x, kind, 3)
        assert torch.equal(drawn, corrupt(x, kind, 3, seed=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_blur(severity):
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    x = torch.rand(2, 3, 224, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blurred = corrupt(x, "blur", severity)
    width = PAPER["blur"][severity - 1]
    offsets = np.arange(-int(4 * width + 0.5), int(4 * width + 0.5) + 1)
    kernel = np.exp(-(offsets**2) / (2 * width**2))
    kernel /= kernel.sum()
    expected = x[1, 2].numpy()
    for axis in (0, 1):
        expected = ndimage.correlate1d(expected, kernel, axis, mode="nearest")
    np.testing.assert_allclose(blurred[1, 2], expected, atol=1e-12)
    # A picture of half the size has half the width.
    small = x[:, :, ::2, ::2]
    half = ndimage.gaussian_filter(small[0, 0].numpy(), width / 2, mode="nearest")
    np.testing.assert_allclose(corrupt(small, "blur", severity)[0, 0], half, atol=1e-12)
    with mock.patch.dict(sys.modules, {"scipy.ndimage": None}), pytest.raises(ImportError, match="blur needs SciPy"):
        corrupt(x, "blur", severity)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_pixelate_is_what_pillow_does(severity):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for side in (28, 32, 224):
        x = torch.rand(1, 1, side, side, generator=torch.Generator().manual_seed(0))
        picture = image.fromarray(x[0, 0].numpy())
        small = int(side * PAPER["pixelate"][severity - 1])
        expected = picture.resize((small, small), image.Resampling.BOX).resize((side, side), image.Resampling.BOX)
        np.testing.assert_allclose(corrupt(x, "pixelate", severity)[0, 0], np.asarray(expected), atol=2e-6)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_brightness_is_in_hsv(severity):
    import colorsys

    x = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    x[0, :, 0, 0] = 0
    c = PAPER["brightness"][severity - 1]
    found = corrupt(x, "brightness", severity)
    for row, column in itertools.product(range(4), range(5)):
        h, s, v = colorsys.rgb_to_hsv(*x[0, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb(h, s, min(v + c, 1))
        np.testing.assert_allclose(found[0, :, row, column], expected, atol=1e-6)
    grey = x[:, :1]
    np.testing.assert_allclose(corrupt(grey, "brightness", severity), (grey + c).clamp(max=1), atol=1e-7)


def test_contrast():
    x = torch.rand(3, 2, 5, 6)
    for severity, c in enumerate(PAPER["contrast"], 1):
        mean = x.numpy().mean(axis=(2, 3), keepdims=True)
        expected = np.clip((x.numpy() - mean) * c + mean, 0, 1)
        np.testing.assert_allclose(corrupt(x, "contrast", severity), expected, atol=1e-6)


def test_corruptions_know_their_bounds():
    """Of normalised pictures: the same corruption of what they are a map of."""
    x = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    mean, std = (torch.tensor(c, dtype=torch.float64).reshape(3, 1, 1) for c in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    bounds = (0 - mean) / std, (1 - mean) / std
    for kind in _corruptions.STRENGTHS:
        plain, mapped = corrupt(x, kind, 3, seed=1), corrupt((x - mean) / std, kind, 3, bounds=bounds, seed=1)
        torch.testing.assert_close(mapped * std + mean, plain, atol=1e-9, rtol=0)


def test_corruptions_of_signals_and_volumes():
    for shape in ((2, 1, 50), (2, 1, 8, 9, 10)):
        x = torch.rand(shape)
        for kind in _corruptions.STRENGTHS:
            found = corrupt(x, kind, 4, seed=0)
            assert found.shape == x.shape
            assert not torch.equal(found, x)


def test_bad_corruptions():
    x, y = problem(8)
    with pytest.raises(ValueError, match="kind is 'fog'"):
        corrupt(x, "fog", 1)
    with pytest.raises(ValueError, match="severity is 6"):
        corrupt(x, "shot", 6)
    with pytest.raises(TypeError, match="x is a ndarray"):
        corrupt(x.numpy(), "shot", 1)
    with pytest.raises(TypeError, match="expected a floating tensor"):
        corrupt(x.flatten(1), "shot", 1)
    with pytest.raises(ValueError, match="bounds are infinite"):
        corrupt(x, "shot", 1, bounds=(0, None))
    for options, message in (
        ({"corruptions": ("fog",)}, "corruptions is 'fog'"),
        ({"severities": (0,)}, "severities has 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_corruptions(network(), x, y, **options)
    with pytest.raises(ValueError, match="labels have 7"):
        evaluate_corruptions(network(), x, y * 0 + 7)
    with pytest.raises(ValueError, match="expected one sample"):
        evaluate_corruptions(network(), x[:0], y[:0])


def test_evaluation(trained):
    pytest.importorskip("scipy", reason="SciPy is not installed")
    x, y = problem(150, seed=5)
    found = evaluate_corruptions(trained, x, y, batch_size=64, steps=30, seed=2)
    assert list(found.accuracy) == list(CORRUPTIONS)
    assert all(len(row) == 5 and all(0 <= a <= 1 for a in row) for row in found.accuracy.values())
    trained.eval()
    with torch.no_grad():
        assert found.clean == pytest.approx(float((trained(x).argmax(1) == y).double().mean()))
        exact = (trained(corrupt(x, "contrast", 4)).argmax(1) == y).double().mean()
    assert found.accuracy["contrast"][3] == pytest.approx(float(exact))
    for kind in ("gaussian", "uniform", "impulse", "learned"):
        assert found.accuracy[kind][0] > found.accuracy[kind][4]
    noises = [found.accuracy[kind] for kind in (*_corruptions.NOISES, "learned")]
    assert found.noise == pytest.approx(np.mean(noises))
    assert found.mean() == pytest.approx(np.mean(list(found.accuracy.values())))
    expected = noise_robustness(trained, x, y, batch_size=64, seed=2)
    assert found.robustness.median == expected.median > 0
    assert f"| contrast | {found.accuracy['contrast'][0]:.1%} |" in found.table()
    again = evaluate_corruptions(trained, x, y, batch_size=64, steps=30, seed=2, robustness=False)
    assert again.accuracy == found.accuracy
    assert again.robustness is None


def test_learned_noise_has_the_norm_of_gaussian_noise(trained):
    x, y = problem(64, seed=5)
    sizes = {}
    perturbed = NoiseGenerator.perturb

    def watched(self, x, eps, *arguments, **options):
        sizes[len(sizes)] = eps
        return perturbed(self, x, eps, *arguments, **options)

    with mock.patch.object(NoiseGenerator, "perturb", watched):
        evaluate_corruptions(
            trained, x, y, corruptions=("learned",), severities=(2, 5), generator=NoiseGenerator(1), robustness=False
        )
    for eps, severity in zip(sizes.values(), (2, 5), strict=True):
        assert eps.shape == (64,)
        # By clipping less than sigma times the root of the number of pixels, and not much.
        assert 0.6 < float(eps.mean()) / (PAPER["gaussian"][severity - 1] * 6) < 1.02


# --- the example ------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("robust_training", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example, monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["robust_training.py", "--out", str(folder), "--jobs", "1", *arguments])
    return example.main()


QUICK = ["--quick", "--samples", "96", "--tests", "40", "--epochs", "1", "--further", "1", "--noise-steps", "2"]


@pytest.mark.long
def test_example(example, monkeypatch, tmp_path, capsys):
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    methods = ["--methods", "clean", "Gaussian", "ANT 1x1"]
    assert run(example, monkeypatch, tmp_path, *QUICK, *methods, "--seeds", "2") == 0
    rows = example.load(tmp_path / "results.csv")
    assert {(row["method"], row["seed"]) for row in rows} == {
        (method, seed) for method in ("clean, before", *methods[1:]) for seed in (0, 1)
    }
    kinds = {row["what"] for row in rows if row["method"] == "ANT 1x1"}
    assert set(CORRUPTIONS) | {"clean", "median eps", "Gaussian at eps", "learned at eps"} == kinds
    text = (tmp_path / "tables.md").read_text()
    assert "| ANT 1x1 less Gaussian |" in text
    assert "±" in text
    for figure in ("accuracy.png", "noise.png", "pictures.png"):
        assert (tmp_path / figure).stat().st_size > 5000
    # Again: nothing is left to do.
    before = (tmp_path / "results.csv").read_text()
    assert run(example, monkeypatch, tmp_path, *QUICK, *methods, "--seeds", "2") == 0
    assert (tmp_path / "results.csv").read_text() == before
    (tmp_path / "accuracy.png").unlink()
    assert run(example, monkeypatch, tmp_path, "--figures-only") == 0
    assert (tmp_path / "accuracy.png").exists()


def test_example_goes_on_where_it_was(example, monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    judged, calls = example.Study.judged, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return judged(*arguments)

    methods = ["--methods", "clean", "ANT 3x3", "--seeds", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(example.Study, "judged", interrupted)
        assert run(example, patch, tmp_path, *QUICK, *methods) == 130
    assert "the same command goes on" in capsys.readouterr().err
    half = (tmp_path / "results.csv").read_text()
    assert run(example, monkeypatch, tmp_path, *QUICK, *methods) == 0
    whole = (tmp_path / "results.csv").read_text()
    assert whole.startswith(half)
    assert "ANT 3x3,0,clean" in whole


def test_example_tunes_where_it_does_not_test(example, monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    monkeypatch.setattr(example, "CHOICES", {"Gaussian": [{"sigma": 0.1}, {"sigma": (0.2, 0.3)}], "ANT 1x1": []})
    assert run(example, monkeypatch, tmp_path, *QUICK, "--tune", "--methods", "Gaussian", "--seeds", "1") == 0
    rows = example.table_rows(tmp_path / "tuning.csv")
    assert [row["setting"] for row in rows] == ['{"sigma": 0.1}', '{"sigma": [0.2, 0.3]}']
    best = max(rows, key=lambda row: float(row["noise"]))
    assert str(example.chosen(mock.Mock(out=tmp_path))["Gaussian"]["sigma"]) in best["setting"]
    x, _, held, _, tests, _ = example.pictures(mock.Mock(data="digits", samples=None, tests=None, device="cpu"))[1]
    assert len(x) + len(held) + len(tests) == 1797
    assert not {tuple(a.flatten().tolist()) for a in held} & {tuple(a.flatten().tolist()) for a in tests}


@pytest.mark.long
def test_example_side_by_side(example, monkeypatch, tmp_path, capsys):
    """Several at once come to the same results."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    options = [*QUICK, "--methods", "clean", "ANT 1x1", "--seeds", "1"]
    assert run(example, monkeypatch, tmp_path / "one", *options) == 0
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path / "two"), *options, "--jobs", "2"]
    subprocess.run(command, check=True, capture_output=True)
    one, two = (sorted((tmp_path / name / "results.csv").read_text().splitlines()) for name in ("one", "two"))
    assert one == two


def test_tables_are_as_in_the_csv(example):
    rows = example.load(EXAMPLE.parent / "results" / "robust_training.csv")
    page = (EXAMPLE.parent.parent / "docs" / "adversarial_noise.md").read_text()
    for table in example.tables(rows).strip().split("\n\n"):
        assert table in page
    # What the page says of them.
    best = {}
    for row in example.table_rows(EXAMPLE.parent / "results" / "robust_tuning.csv"):
        best.setdefault(row["method"], []).append((float(row["noise"]), row["setting"]))
    assert max(best["Gaussian"])[1] == '{"sigma": 0.35}'
    assert max(best["ANT 1x1"])[1] == max(best["ANT 3x3"])[1] == '{"eps": 0.25, "noise_lr": 0.0003}'
    by_method = {method: example.by_seed(rows, method, example.FIXED) for method in example.METHODS}
    gained = by_method["ANT 3x3"] - by_method["Gaussian"]
    assert len(gained) == 5
    assert gained.mean() > gained.std(ddof=1) / 5**0.5
    for kernel in (1, 3):
        for eps in (4, 6, 8):
            learned, gaussian = (
                example.by_seed(rows, "clean, before", (f"error, {kind}",), eps)
                for kind in (f"learned {kernel}x{kernel}", "Gaussian")
            )
            more = learned - gaussian
            assert more.mean() > more.std(ddof=1) / 5**0.5


def test_standard_errors(example):
    assert example.stated([0.5, 0.6, 0.7]) == "60.00 ± 5.77"
    assert example.stated([0.5]) == "50.00"
    assert example.stated([math.nan, 1]) == "-"
    assert METHODS == ("ant", "gaussian", "speckle", "clean")


# --- what must not go wrong -------------------------------------------------------------------------------------------


def test_the_mean_of_no_noise_is_none(trained):
    x, y = problem(24)
    found = evaluate_corruptions(trained, x, y, corruptions=("contrast", "brightness"), robustness=False)
    assert math.isnan(found.noise)
    assert found.mean() == pytest.approx(np.mean([*found.accuracy["contrast"], *found.accuracy["brightness"]]))


def test_a_loss_that_is_not_finite_ends_training_with_a_scaler_too(tmp_path):
    class Overflowing(torch.nn.Module):
        """Its scores are beyond float16."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(36, 2)

        def forward(self, x):
            return self.layer(x.flatten(1)) * torch.inf

    with pytest.raises(FloatingPointError, match="the loss is nan"):
        train_robust(Overflowing(), loader(), 1.0, epochs=1, amp=torch.float16, folder=tmp_path, seed=0)
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize("kind", _corruptions.STRENGTHS)
def test_corruptions_where_the_box_has_no_width(kind):
    upper = torch.ones(1, 6, 6)
    upper[:, 0, 0] = 0
    x = problem(8)[0] * upper
    v = corrupt(x, kind, 3, bounds=(torch.zeros(1, 6, 6), upper), seed=0)
    assert torch.isfinite(v).all()
    assert (v[:, :, 0, 0] == 0).all()
    assert ((0 <= v) & (v <= upper)).all()


def test_speckle_noise_has_less_reach(trained):
    x, y = problem(96)
    dark = torch.where(x > 0.3, x, 0.0)
    most = math.sqrt(36)
    with pytest.raises(ValueError, match="cannot have inside the bounds"):
        train_robust(copy_of(trained), [(dark, y)], most / 2, method="speckle", epochs=1, seed=0)


@pytest.mark.parametrize(("then", "now"), [({"bounds": (0, 1)}, {"bounds": (-1, 2)}), ({"lr": 1e-3}, {"lr": 0.5})])
def test_a_resumed_training_of_noise_has_the_same_settings(trained, tmp_path, then, now):
    options = {"folder": tmp_path, "seed": 0, "tensorboard": False}
    train_noise(NoiseGenerator(1), trained, loader(), 1.0, **then, **options)
    with pytest.raises(ValueError, match=rf"{next(iter(now))} is .*, expected .*, as in"):
        train_noise(NoiseGenerator(1), trained, loader(), 1.0, epochs=2, resume=True, **now, **options)


def test_what_another_training_left_is_not_resumed(trained, tmp_path):
    options = {"folder": tmp_path, "epochs": 1, "seed": 0, "tensorboard": False, "warmup": 0}
    train_robust(copy_of(trained), loader(), 1.0, **options)
    # Bad input leaves it alone.
    with pytest.raises(ValueError, match="labels"):
        train_robust(copy_of(trained), [(torch.rand(4, 1, 6, 6), torch.full((4,), 7))], 1.0, **options)
    assert (tmp_path / "checkpoint.pt").exists()

    class Interrupted(list):
        """Batches that end in the middle of the second time that they are gone through."""

        times = 0

        def __iter__(self):
            self.times += 1
            yield from list.__iter__(self)
            if self.times == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_robust(copy_of(trained), Interrupted(loader()), 1.0, **options)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_samplers_of_batches_follow_the_seed(trained):
    weights = []
    data = torch.utils.data.TensorDataset(*problem(48))
    random_ones = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(5))
    batches = torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(random_ones, 12, False))
    for _ in range(2):
        model = copy_of(trained)
        train_robust(model, batches, 1.0, epochs=1, warmup=1, seed=0)
        weights.append(model)
    assert_same_weights(*weights)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(trained, context):
    x, y = problem(24)
    expected = evaluate_corruptions(trained, x, y, corruptions=("learned",), steps=3, robustness=False)
    with context():
        found = evaluate_corruptions(trained, x, y, corruptions=("learned",), steps=3, robustness=False)
    assert found.accuracy == expected.accuracy


def test_a_resumed_training_checks_its_input(trained, tmp_path):
    options = {"folder": tmp_path, "seed": 0, "tensorboard": False, "warmup": 0}
    train_robust(copy_of(trained), loader(), 1.0, epochs=1, **options)
    bad = [(torch.rand(4, 1, 6, 6), torch.full((4,), 7))]
    with pytest.raises(ValueError, match="labels have 7"):
        train_robust(copy_of(trained), bad, 1.0, epochs=2, resume=True, **options)


def test_generators_of_a_training_can_be_trained_on(trained):
    done = train_robust(copy_of(trained), loader(), 1.0, epochs=1, warmup=0, seed=0)
    before = [p.clone() for p in done.generators[0].parameters()]
    train_noise(done.generators[0], trained, loader(), 1.0, seed=0)
    assert any(not torch.equal(a, b) for a, b in zip(before, done.generators[0].parameters(), strict=True))


def test_optimizers_and_schedulers(trained, tmp_path):
    model = copy_of(trained)
    with pytest.raises(TypeError, match="LBFGS"):
        train_robust(model, loader(), 1.0, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="none of the model's parameters"):
        train_robust(model, loader(), 1.0, optimizer=torch.optim.SGD(network().parameters(), 0.1))
    # Numbers of NumPy's can be read back, and a plateau is one of the loss.
    optimizer = torch.optim.SGD(model.parameters(), np.float64(0.01))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    options = {"scheduler": plateau, "folder": tmp_path, "seed": 0, "warmup": 0, "tensorboard": False}
    train_robust(model, loader(), 1.0, optimizer=optimizer, epochs=1, **options)
    train_robust(model, loader(), 1.0, optimizer=optimizer, epochs=2, resume=True, **options)
    # What is not trained keeps no gradients.
    head = torch.optim.SGD(model[-1].parameters(), 0.01)
    model.zero_grad()
    train_robust(model, loader(), 1.0, optimizer=head, epochs=1, warmup=0, seed=0)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("content", [b"junk", b"", None])
def test_checkpoints_that_are_none(trained, tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content) if content is not None else torch.save({"a": 1}, path)
    with pytest.raises(ValueError, match=r"checkpoint\.pt"):
        train_robust(copy_of(trained), loader(), 1.0, folder=tmp_path, resume=True)
    assert path.exists()


def test_more_bad_input(trained):
    with pytest.raises(TypeError, match="can be gone through but once"):
        train_noise(NoiseGenerator(1), trained, iter(loader()), 1.0)
    with pytest.raises(ValueError, match="has no samples"):
        train_noise(NoiseGenerator(1), trained, [(torch.rand(0, 1, 6, 6), torch.zeros(0, dtype=torch.int64))], 1.0)
    x, y = problem(8)
    with pytest.raises(TypeError, match="seed is a NoneType"):
        evaluate_corruptions(trained, x, y, seed=None)
    with pytest.raises(ValueError, match=r"y has shape \(7,\), expected \(8,\)"):
        evaluate_corruptions(trained, x, y[:7])
    with pytest.raises(ValueError, match=r"severity is 1\.0"):
        corrupt(x, "gaussian", 1.0)


def test_results_of_two_settings_are_not_mixed(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    few = ["--quick", "--samples", "64", "--tests", "32", "--seeds", "1", "--methods", "clean", "--noise-steps", "2"]
    assert run(example, monkeypatch, tmp_path, *few, "--epochs", "1", "--further", "1") == 0
    with pytest.raises(SystemExit):
        run(example, monkeypatch, tmp_path, *few, "--epochs", "2", "--further", "1")
    assert "has results with other settings (epochs: 1)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(example, monkeypatch, tmp_path, "--fashion-mnist", str(tmp_path / "nothing"))
