"""eps from SNR, PSNR, RMS and contrast, on every backend: what perturb then delivers has it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import clipaware as ca
from clipaware.targets import eps_from_contrast, eps_from_psnr, eps_from_rms, eps_from_snr


def problem():
    rng = np.random.default_rng(0)
    return rng.random((3, 20, 10)), rng.standard_normal((3, 20, 10))


def delivered(be, make, dtype="float64", **options):
    """x, and what perturb does to it with the eps that `make` finds, as rows of float64."""
    x, delta = problem()
    given = be.array(x, dtype)
    eps = make(given)
    assert type(eps) is type(given)
    assert be.numpy(eps).shape == (3, 1, 1)
    assert be.numpy(eps).dtype == (np.float64 if dtype == "float64" else np.float32)
    v = ca.perturb(given, be.array(delta, dtype), eps, **options)
    return (be.numpy(a).astype(float).reshape(3, -1) for a in (given, v))


@pytest.mark.parametrize("snr", [0.0, 12.5])
def test_snr(be, snr):
    x, v = delivered(be, lambda x: eps_from_snr(x, snr), bounds=(-2, 2))
    found = 10 * np.log10(np.sum(x**2, axis=1) / np.sum((v - x) ** 2, axis=1))
    np.testing.assert_allclose(found, snr, atol=1e-9)


def test_psnr(be):
    x, v = delivered(be, lambda x: eps_from_psnr(x, 17.0, bounds=(-1, 3)), bounds=(-1, 3))
    np.testing.assert_allclose(10 * np.log10(16 / np.mean((v - x) ** 2, axis=1)), 17, atol=1e-9)


def test_rms(be):
    x, v = delivered(be, lambda x: eps_from_rms(x, 0.15))
    np.testing.assert_allclose(np.sqrt(np.mean((v - x) ** 2, axis=1)), 0.15, rtol=1e-12)


def test_contrast(be):
    x, v = delivered(be, lambda x: eps_from_contrast(x, 0.3))
    np.testing.assert_allclose(np.sqrt(np.mean((v - x) ** 2, axis=1)) / x.mean(axis=1), 0.3, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(be, dtype):
    x, v = delivered(be, lambda x: eps_from_snr(x, 12.0), dtype, bounds=(-2, 2))
    found = 10 * np.log10(np.sum(x**2, axis=1) / np.sum((v - x) ** 2, axis=1))
    np.testing.assert_allclose(found, 12, atol=1e-5 if dtype == "float32" else 0.01)


@pytest.mark.parametrize("find", [eps_from_snr, eps_from_psnr, eps_from_rms, eps_from_contrast])
def test_axes(find):
    x, delta = problem()
    for axis, shape in ((None, (1, 1, 1)), (1, (3, 1, 10)), ((0, 2), (1, 20, 1)), ("batch", (3, 1, 1))):
        eps = find(x, 2.0, axis=axis)
        assert eps.shape == shape
        ca.perturb(x, delta, eps, axis=axis)
    np.testing.assert_allclose(
        find(x, 2.0, axis=(1, 0))[0, 0, 3], find(np.ascontiguousarray(x[:, :, 3]), 2.0, axis=None).item()
    )


def test_under_traces():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = problem()[0]
    for find in (eps_from_snr, eps_from_psnr, eps_from_rms, eps_from_contrast):
        np.testing.assert_allclose(jax.jit(lambda x, find=find: find(x, 0.5))(x), find(x, 0.5), rtol=1e-12)
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    graph = tf.function(lambda x: eps_from_snr(x, 3.0), input_signature=[tf.TensorSpec((None, 20, 10), tf.float64)])
    np.testing.assert_allclose(graph(x), eps_from_snr(x, 3.0), rtol=1e-12)


def test_no_contrast_without_light():
    x = np.stack([np.zeros((4, 4)), np.full((4, 4), -1.0), np.ones((4, 4))])
    found = eps_from_contrast(x, 0.5).ravel()
    assert np.isnan(found[:2]).all()
    assert found[2] == 2


def test_bad_input():
    x = problem()[0]
    with pytest.raises(ValueError, match="snr is inf, expected a finite number"):
        eps_from_snr(x, math.inf)
    with pytest.raises(TypeError, match="psnr is '3', expected a number"):
        eps_from_psnr(x, "3")
    with pytest.raises(ValueError, match=r"bounds are \(0, None\), expected two numbers"):
        eps_from_psnr(x, 3.0, bounds=(0, None))
    with pytest.raises(ValueError, match="rms is -1"):
        eps_from_rms(x, -1)
    with pytest.raises(TypeError, match="contrast is None"):
        eps_from_contrast(x, None)
    with pytest.raises(TypeError, match="dtype uint8"):
        eps_from_snr((255 * x).astype(np.uint8), 3.0)
    with pytest.raises(TypeError, match="expected an array"):
        eps_from_rms([1.0], 3.0)
