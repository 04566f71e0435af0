"""A training step on eight devices, with noise of an exact size on samples that no device holds alone.

    python examples/jax_sharded.py

Where JAX finds fewer than eight devices, it makes eight of the CPU. The mesh is 2 x 4: two halves of the batch, and
four parts of every sample. Noise is drawn where it is needed, and what devices tell each other about it does not grow
with the length of a sample.
"""

from __future__ import annotations

import os
import re

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipaware as ca

SAMPLES, LENGTH, CLASSES, EPS, STEPS = 32, 8192, 4, 12.0, 20


def problem(mesh: jax.sharding.Mesh) -> tuple[jax.Array, ...]:
    """Samples of four kinds, split along both axes, their labels, and weights that are split like a sample."""
    rng = np.random.default_rng(0)
    kinds = rng.random((CLASSES, LENGTH))
    labels = np.arange(SAMPLES) % CLASSES
    samples = np.clip(kinds[labels] + 0.2 * rng.standard_normal((SAMPLES, LENGTH)), 0, 1)
    put = {"samples": ("batch", "sample"), "labels": ("batch",), "weights": ("sample",)}
    where = {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in put.items()}
    return (
        jax.device_put(samples.astype(np.float32), where["samples"]),
        jax.device_put(labels, where["labels"]),
        jax.device_put(np.zeros((LENGTH, CLASSES), np.float32), where["weights"]),
    )


def noisy(samples: jax.Array, key: jax.Array) -> jax.Array:
    noise = jax.random.normal(key, samples.shape, samples.dtype)
    return ca.perturb(samples, noise, EPS)


def loss(weights: jax.Array, samples: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    scores = (noisy(samples, key) - 0.5) @ weights
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1).mean()


@jax.jit
def step(weights: jax.Array, samples: jax.Array, labels: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(weights, samples, labels, key)
    return weights - 0.05 * gradient, value


def main() -> None:
    devices = jax.devices() if len(jax.devices()) >= 8 else jax.devices("cpu")
    mesh = jax.make_mesh((2, 4), ("batch", "sample"), axis_types=(AxisType.Auto,) * 2, devices=devices[:8])
    samples, labels, weights = problem(mesh)
    keys = jax.random.split(jax.random.key(0), STEPS)
    for i, key in enumerate(keys):
        weights, value = step(weights, samples, labels, key)
        if i % 5 == 0 or i == STEPS - 1:
            print(f"step {i:2d}  loss {float(value):.4f}")

    program = jax.jit(noisy).lower(samples, keys[0]).compile()
    v = program(samples, keys[0])
    norms = np.linalg.norm(np.asarray(v, float) - np.asarray(samples, float), axis=1)
    print(f"norms of the noise: {norms.min():.6f} to {norms.max():.6f}, asked for {EPS}")
    print(f"the result is split like the samples: {v.sharding.is_equivalent_to(samples.sharding, v.ndim)}")
    gathered = re.findall(r"= f32\[(\d+),(\d+),(\d+)\]\S* all-gather\(", program.as_text())
    numbers = sum(int(a) * int(b) * int(c) for a, b, c in gathered)
    print(
        f"a device receives {numbers // (SAMPLES // 2)} numbers per sample of {LENGTH} to begin with, then two a pass"
    )


if __name__ == "__main__":
    main()
