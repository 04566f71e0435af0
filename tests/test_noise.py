"""Noise of every kind on every framework: its statistics, its seeds, and augmentation with it."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import clipaware as ca
from clipaware.noise import KINDS, AddNoise, sample
from clipaware.reference import norm64
from conftest import FRAMEWORKS, jax, tf

SHAPE = 6, 3, 64, 64


def pictures(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).random(shape)


def assert_norms(v, x, eps, p=2, rtol=3e-7):
    rows = len(x)
    np.testing.assert_allclose(norm64(np.reshape(v, (rows, -1)), np.reshape(x, (rows, -1)), p), eps, rtol=rtol)


# Of the distribution: mean, variance, fourth moment over the square of the variance. None: has none.
MOMENTS = {
    "gaussian": (0, 1, 3),
    "uniform": (0, 1 / 3, 1.8),
    "laplace": (0, 2, 6),
    "rademacher": (0, 1, 1),
    "speckle": (0, 1 / 3, 3 * (1 / 5) / (1 / 3) ** 2),  # x is uniform
    "pink": (0, 1, 3),
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_moments(framework, kind):
    x = pictures((40, 3, 64, 64))
    drawn = framework.numpy(sample(kind, framework.array(x, "float64"), seed=1)).astype(float)
    mean, variance, kurtosis = MOMENTS[kind]
    size = drawn.size if kind != "pink" else 40 * 3 * 60  # its variance is in few frequencies
    assert abs(drawn.mean() - mean) < 6 * math.sqrt(variance / drawn.size)
    assert drawn.var() == pytest.approx(variance, rel=12 / math.sqrt(size))
    if kind != "pink":
        assert (drawn**4).mean() / drawn.var() ** 2 == pytest.approx(kurtosis, rel=0.05)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_in_goes_out(framework, kind, dtype):
    x = framework.array(pictures((4, 3, 16, 15)), dtype)
    one, again, other = (sample(kind, x, seed=seed) for seed in (7, 7, 8))
    assert type(one) is type(x)
    assert (one.dtype, one.shape) == (x.dtype, x.shape)
    a, b, c = (framework.numpy(drawn).astype(float) for drawn in (one, again, other))
    assert np.isfinite(a).all()
    np.testing.assert_array_equal(a, b)
    assert (a != c).mean() > 0.3
    assert (framework.numpy(sample(kind, x)).astype(float) != framework.numpy(sample(kind, x)).astype(float)).any()
    # Samples differ from each other.
    assert all((a[0] != a[i]).any() for i in range(1, 4))


def test_salt_and_pepper_goes_to_the_bounds(framework):
    x = pictures()
    for dtype in ("float32", "float64"):
        mine = framework.array(x, dtype)
        delta = sample("salt-and-pepper", mine, seed=0)
        for eps in (10.0, 20.0, 50.0):
            v = framework.numpy(ca.perturb(mine, delta, eps)).astype(float)
            assert_norms(v, framework.numpy(mine), eps)
            moved = np.abs(v - framework.numpy(mine))
            clipped = (v == 0) | (v == 1)
            # Nearly all of the norm is in elements that are black or white, and of each there are as many.
            assert (moved**2)[~clipped].sum() < 0.1 * (moved**2).sum()
            assert (v[clipped] == 0).mean() == pytest.approx(0.5, abs=2.5 / math.sqrt(clipped.sum()))


@pytest.mark.parametrize(("shape", "axes"), [((4, 3, 64, 96), (2, 3)), ((4, 96, 64, 3), (1, 2)), ((16, 4096), (1,))])
def test_pink_amplitude_falls_like_one_over_f(framework, shape, axes):
    x = framework.array(np.zeros(shape), "float64")
    drawn = framework.numpy(sample("pink", x, seed=0))
    power = np.mean(
        np.abs(np.fft.fftn(drawn, axes=axes)) ** 2, axis=tuple(i for i in range(len(shape)) if i not in axes)
    )
    f = np.sqrt(sum(np.meshgrid(*(np.fft.fftfreq(shape[a]) ** 2 for a in axes), indexing="ij")))
    some = f > 0
    slope = np.polyfit(np.log(f[some]), np.log(power[some]), 1)[0] / 2
    assert slope == pytest.approx(-1, abs=0.03)
    assert np.abs(drawn.mean(axis=axes)).max() < 1e-12


def test_axes_of_pink_noise():
    picture = np.zeros((64, 65, 3))  # no batch: height is not what counts samples
    drawn = sample("pink", picture, seed=0, axes=(0, 1))
    assert np.abs(drawn.mean(axis=(0, 1))).max() < 1e-12
    assert sample("pink", np.zeros((2, 3)), seed=0).shape == (2, 3)  # channels alone
    assert sample("pink", np.zeros(4096), seed=0).std() == pytest.approx(1, rel=0.5)
    np.testing.assert_array_equal(sample("pink", np.zeros((2, 1)), seed=0), 0)  # nothing but a mean


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
def test_tensorflow_transforms_three_axes():
    with pytest.raises(ValueError, match=r"pink noise is over the axes \(1, 2, 3, 4\), expected at most three"):
        sample("pink", tf.zeros((2, 8, 8, 8, 8)))
    assert sample("pink", tf.zeros((2, 8, 8, 8, 8)), axes=(2, 3, 4)).shape == (2, 8, 8, 8, 8)


def test_generators_of_the_frameworks():
    rng = np.random.default_rng(3)
    x = np.zeros((2, 5))
    first, second = sample("gaussian", x, seed=rng), sample("gaussian", x, seed=rng)
    assert (first != second).all()
    np.testing.assert_array_equal(first, sample("gaussian", x, seed=np.random.default_rng(3)))
    t = torch.zeros(2, 5)
    assert torch.equal(sample("uniform", t, seed=torch.Generator().manual_seed(1)), sample("uniform", t, seed=1))
    torch.manual_seed(5)
    drawn = sample("gaussian", t)
    torch.manual_seed(5)
    assert torch.equal(drawn, sample("gaussian", t))


def test_jax_keys_and_traces():
    if jax is None:
        pytest.skip("JAX is not installed")
    x = jax.numpy.zeros((2, 5))
    step = jax.jit(lambda x, key: sample("laplace", x, seed=key))
    first, second = step(x, jax.random.key(0)), step(x, jax.random.key(1))
    assert (first != second).all()
    np.testing.assert_array_equal(first, sample("laplace", x, seed=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"seed is None, expected a key from jax\.random"):
        jax.jit(lambda x: sample("laplace", x))(x)
    with pytest.raises(ValueError, match="pass a seed to every call"):
        jax.jit(AddNoise("gaussian", 0.1, seed=0))(x)
    noisy = jax.jit(lambda x, key: AddNoise("gaussian", 0.1, seed=0)(x, seed=key))(x, jax.random.key(0))
    assert_norms(noisy, x, 0.1)
    # All bits of a seed matter.
    drawn = [sample("uniform", x, seed=seed) for seed in (1, 1 + 2**31, 1 + 2**32, 1 + 2**63)]
    assert len({float(a[0, 0]) for a in drawn}) == 4


def test_tensorflow_graphs_and_generators():
    if tf is None:
        pytest.skip("TensorFlow is not installed")
    x = tf.zeros((2, 5))
    generator = tf.random.Generator.from_seed(1)
    assert (sample("gaussian", x, seed=generator) != sample("gaussian", x, seed=generator)).numpy().all()

    @tf.function(input_signature=[tf.TensorSpec((None, 16, None), tf.float32)])
    def unknown(x):
        return AddNoise("gaussian", (0.5, 1.0), axis="batch")(x), sample("pink", x, axes=(1,), seed=3)

    batch = tf.zeros((3, 16, 8)) + 0.5
    (first, pink), (second, again) = unknown(batch), unknown(batch)
    assert (first != second).numpy().any()  # no constant of the graph
    np.testing.assert_array_equal(pink, again)
    norms = norm64(first.numpy().reshape(3, -1), batch.numpy().reshape(3, -1))
    assert ((norms > 0.5) & (norms < 1)).all()
    assert len(set(norms)) == 3
    with pytest.raises(ValueError, match="expected known lengths along"):
        tf.function(lambda x: sample("pink", x), input_signature=[tf.TensorSpec((None, None), tf.float32)])(x)
    with pytest.raises(ValueError, match="pass a seed to every call"):
        tf.function(AddNoise("gaussian", 0.1, seed=0))(x)
    drawn = [sample("uniform", x, seed=seed) for seed in (1, 1 + 2**31, 1 + 2**32, 1 + 2**63)]
    assert len({float(a[0, 0]) for a in drawn}) == 4


@pytest.mark.parametrize("p", [1, 2, 2.7, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_added_noise_has_its_norm(framework, kind, p):
    x = pictures((4, 3, 16, 16))
    eps = 0.2 * (768 / (p + 1)) ** (1 / p) if p < math.inf else 0.2
    mine = framework.array(x, "float32")
    v = framework.numpy(AddNoise(kind, eps, p=p, seed=1)(mine))
    assert_norms(v, framework.numpy(mine), eps, p)
    assert v.min() >= 0
    assert v.max() <= 1


def test_bounds_per_channel_and_a_range_of_eps(framework):
    lower, upper = (np.array(a).reshape(3, 1, 1) for a in ([-1.0, 0.0, -2.0], [1.0, 0.5, 2.0]))
    x = lower + pictures((50, 3, 16, 16)) * (upper - lower)
    mine = framework.array(x, "float32")
    augment = AddNoise("uniform", (2.0, 6.0), bounds=(lower, upper), seed=4)
    v = framework.numpy(augment(mine)).astype(float)
    norms = norm64(v.reshape(50, -1), framework.numpy(mine).reshape(50, -1))
    assert (v >= np.float32(lower)).all()
    assert (v <= np.float32(upper)).all()
    assert 2 <= norms.min() < 2.5 < 5.5 < norms.max() <= 6
    assert norms.mean() == pytest.approx(4, abs=6 * 4 / math.sqrt(12 * 50))
    # Another call, another noise; the same seed, the same again.
    assert (framework.numpy(augment(mine)) != v).any()
    again = AddNoise("uniform", (2.0, 6.0), bounds=(lower, upper), seed=4)
    np.testing.assert_array_equal(framework.numpy(again(mine)), v)


def test_what_a_sample_is():
    picture, batch, rows = pictures((3, 16, 16)), pictures((4, 3, 16, 16)), pictures((5, 60))
    augment = AddNoise("gaussian", 1.0, seed=0)
    assert_norms(augment(picture)[None], picture[None], 1.0, rtol=1e-13)
    assert_norms(augment(batch), batch, 1.0, rtol=1e-13)
    assert_norms(augment(rows), rows, 1.0, rtol=1e-13)
    assert_norms(AddNoise("gaussian", 1.0, seed=0, axis="batch")(picture), picture, 1.0, rtol=1e-13)


@pytest.mark.parametrize("shape", [(3, 64, 64), (64, 64, 3)])
def test_one_picture_has_one_eps_and_pink_noise_over_both_of_its_axes(framework, shape):
    x = np.full(shape, 0.5)
    augment = AddNoise("pink", (1.0, 2.0), seed=0)
    delta = framework.numpy(augment(framework.array(x, "float64"))) - x
    assert 1 <= np.linalg.norm(delta) <= 2
    picture = delta if shape[0] == 3 else np.moveaxis(delta, -1, 0)
    for axis in (1, 2):
        a, b = picture.take(range(63), axis), picture.take(range(1, 64), axis)
        assert (a * b).sum() > 0.6 * (a * a).sum()  # neighbours are alike


def test_module_in_a_compose_and_in_a_model():
    augment = AddNoise("gaussian", 2.0, seed=0, framework="torch")
    assert isinstance(augment, torch.nn.Module)
    assert isinstance(augment, AddNoise)
    assert "eps=2.0" in repr(augment)
    picture = torch.from_numpy(pictures((3, 32, 32))).float()
    # What torchvision's Compose does, which takes any callable.
    transformed = picture
    for transform in (lambda x: x.flip(-1), augment):
        transformed = transform(transformed)
    assert_norms(transformed[None].numpy(), picture.flip(-1)[None].numpy(), 2.0)
    model = torch.nn.Sequential(augment, torch.nn.Flatten(), torch.nn.Linear(3072, 2))
    batch = torch.from_numpy(pictures((4, 3, 32, 32))).float().requires_grad_()
    model(batch).sum().backward()
    assert batch.grad.abs().sum() > 0
    assert model.eval()[0](batch) is batch
    twins = [copy.deepcopy(augment), pickle.loads(pickle.dumps(augment))]
    for twin in twins:
        twin.train()
    assert torch.equal(twins[0](picture), twins[1](picture))


class Lazy:
    """Made by the worker that is the first to need it."""

    augment = None

    def __call__(self, x):
        self.augment = self.augment or AddNoise("gaussian", 1.0, seed=0)
        return self.augment(x)


class Pictures(torch.utils.data.Dataset):
    """The same picture eight times, so that what differs is noise."""

    def __init__(self, transform, x):
        self.transform, self.x = transform, x

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(self.x)


@pytest.mark.parametrize("framework", [None, "torch"])
def test_workers_of_a_loader_have_their_own_noise(framework):
    x = torch.full((3, 8, 8), 0.5) if framework else np.full((3, 8, 8), 0.5)  # far from where noise ends

    def epochs(seed):
        augment = AddNoise("gaussian", 1.0, seed=seed, framework=framework)
        loader = torch.utils.data.DataLoader(Pictures(augment, x), batch_size=2, num_workers=2)
        return [np.concatenate([np.asarray(v) for v in loader]) for _ in range(2)]

    seeded, again, free = epochs(0), epochs(0), epochs(None)
    np.testing.assert_array_equal(seeded, again)
    for noisy in (seeded, free):
        both = np.concatenate(noisy)
        # No two of 16 are alike: not of two workers, nor of two epochs.
        assert len(np.unique(both[:, 0, 0, 0])) == 16
        assert_norms(both, np.broadcast_to(x, both.shape), 1.0)


def test_noise_made_by_a_worker_is_its_own():
    x = np.full((3, 8, 8), 0.5)

    def epochs():
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(Pictures(Lazy(), x), batch_size=2, num_workers=2)
        return [np.concatenate([np.asarray(v) for v in loader]) for _ in range(2)]

    both = np.concatenate(epochs())
    assert len(np.unique(both[:, 0, 0, 0])) == 16
    np.testing.assert_array_equal(both, np.concatenate(epochs()))


def test_other_processes_have_their_own_noise():
    code = """if True:
        import multiprocessing, numpy as np
        from clipaware.noise import AddNoise
        augment, x = AddNoise("gaussian", 1.0, seed=0), np.full(60, 0.5)
        augment(x)
        def work(_):
            return augment(x)[0]
        with multiprocessing.get_context("fork").Pool(3) as pool:
            first = pool.map(work, range(3), chunksize=1)
        print(len({*first, augment(x)[0]}))
        import os, pickle
        for _ in range(2):
            if not os.fork():
                print(augment(x)[0], flush=True)
                os._exit(0)
            os.wait()
        print(pickle.loads(pickle.dumps(AddNoise("gaussian", 1.0, seed=0)))(x)[0])
    """
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    four, *others, unpickled = found.stdout.split()
    assert four == "4"
    first = AddNoise("gaussian", 1.0, seed=0)(np.full(60, 0.5))[0]
    assert float(unpickled) == first
    assert len({*others, unpickled}) == 3


KERAS = """if True:
    import keras, numpy as np
    from clipaware.noise import AddNoise
    from clipaware.reference import norm64
    def layers():
        bounds = np.array([0.0, 0.0, 0.1]), 1
        layer = AddNoise("gaussian", (1.0, 2.0), bounds=bounds, seed=3, framework="keras", name="noise")
        return keras.Sequential([keras.Input((8, 8, 3)), layer, keras.layers.Flatten(), keras.layers.Dense(2)])
    x = np.clip(np.random.default_rng(0).random((64, 8, 8, 3)), 0.1, 1).astype(np.float32)
    y = np.arange(64) % 2
    for jit in JITS:
        model = layers()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
        model.fit(x, y, epochs=2, batch_size=20, verbose=0)
    layer, twin = model.layers[0], layers().layers[0]
    assert isinstance(layer, keras.layers.Layer)
    for copied in (twin, keras.layers.deserialize(keras.layers.serialize(twin))):
        noisy = [keras.ops.convert_to_numpy(copied(x, training=True)) for _ in range(2)]
        norms = norm64(noisy[0].reshape(64, -1), x.reshape(64, -1))
        assert norms.min() >= 0.9999999 and norms.max() <= 2.0000001 and len(set(norms)) == 64
        assert (noisy[0] != noisy[1]).any() and noisy[0][..., 2].min() >= np.float32(0.1)
        first = noisy if copied is twin else first
        np.testing.assert_array_equal(noisy, first)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer(x)), x)
    others = [AddNoise("gaussian", 1.0, seed=seed, framework="keras") for seed in (1, 2, None, None)]
    noisy = [keras.ops.convert_to_numpy(other(x, training=True))[0, 0, 0, 0] for other in others]
    assert len(set(map(float, noisy))) == 4
    print("fine")
"""


JITS = {"tensorflow": "(False, True)", "jax": "(True,)", "torch": "(False,)"}


@pytest.mark.long
@pytest.mark.parametrize(("backend", "jits"), [item for item in JITS.items() if item[0] in FRAMEWORKS])
def test_keras_layer(backend, jits):
    pytest.importorskip("keras", reason="Keras is not installed")
    code = f"import os\nos.environ['KERAS_BACKEND'] = {backend!r}\n{KERAS.replace('JITS', jits)}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "fine", run.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: sample("brown", x), "kind is 'brown', expected one of 'gaussian'"),
        (lambda x: sample("gaussian", x.astype(int)), "x has dtype int64, expected one of float16"),
        (lambda x: sample("gaussian", [0.5]), "x is a list, expected an array"),
        (lambda x: sample("gaussian", x, seed=-1), "seed is -1, expected a whole number from 0"),
        (lambda x: sample("gaussian", x, seed=0.5), "seed is 0.5, expected a whole number from 0"),
        (lambda x: sample("pink", x, axes=(5,)), r"axis is \(5,\), expected axes from -2 to 1"),
        (lambda x: AddNoise("brown", 1.0), "kind is 'brown', expected one of"),
        (lambda x: AddNoise("pink", -1.0), "eps is -1.0, expected a finite number"),
        (lambda x: AddNoise("pink", (2.0, 1.0)), r"eps is \(2.0, 1.0\), expected a number or a range \(low, high\)"),
        (lambda x: AddNoise("pink", 1.0, p=0.5), "p is 0.5, expected a number from 1 to inf"),
        (lambda x: AddNoise("pink", 1.0, bounds=(1, 0)), r"bounds are \(1, 0\), expected lower <= upper"),
        (lambda x: AddNoise("pink", 1.0, seed="a"), "seed is a str, expected a whole number or None"),
        (lambda x: AddNoise("pink", 1.0, framework="mxnet"), "framework is 'mxnet', expected one of 'torch', 'keras'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(np.full((2, 3), 0.5))
