"""One fixture entry per backend: a new framework joins every test by adding one here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import settings

import clipaware as ca
from clipaware._backends import numpy as numpy_backend
from clipaware._backends import torch as torch_backend

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")
torch.set_num_threads(1)  # the tests themselves run side by side

NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Backend:
    """How the tests make a framework's arrays, read them, and differentiate with it."""

    name: str
    array: Callable[[Any, str], Any]  # a framework array of that dtype from a NumPy array
    numpy: Callable[[Any], Any]  # and back; bfloat16 through ml_dtypes
    # (x, delta, eps, lower, upper, g, **options), all NumPy float64 -> the five gradients of sum(g*perturb(...))
    gradients: Callable[..., list[Any]]

    def perturb(self, x: Any, delta: Any, *args: Any, dtype: str = "float64", **options: Any) -> Any:
        """perturb of NumPy arrays, through this framework."""
        return self.numpy(ca.perturb(self.array(x, dtype), self.array(delta, dtype), *args, **options))

    def rescale(self, x: Any, delta: Any, *args: Any, dtype: str = "float64", **options: Any) -> Any:
        return self.numpy(ca.rescale(self.array(x, dtype), self.array(delta, dtype), *args, **options))

    def reach(self, x: Any, delta: Any, *args: Any, dtype: str = "float64", **options: Any) -> Any:
        return self.numpy(ca.reach(self.array(x, dtype), self.array(delta, dtype), *args, **options))


def _numpy_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    return list(ca.perturb_vjp(x, delta, eps, g, bounds=(lower, upper), **options))


def _to_torch(a: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(a, np.float64)).to(getattr(torch, dtype))


def _from_torch(a: torch.Tensor) -> Any:
    name = str(a.dtype).removeprefix("torch.")
    wide = a.detach().cpu()
    return wide.double().numpy().astype(NUMPY_DTYPES[name]) if name in NUMPY_DTYPES else wide.numpy()


def _torch_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, delta, eps, lower, upper)]
    v = ca.perturb(*inputs[:3], bounds=tuple(inputs[3:]), **options)
    v.backward(torch.tensor(g))
    return [a.grad.numpy() for a in inputs]


def _to_numpy(a: Any, dtype: str) -> Any:
    return np.array(a).astype(NUMPY_DTYPES[dtype])


BACKENDS = {
    "numpy": Backend("numpy", _to_numpy, np.asarray, _numpy_gradients),
    # As without Numba: NumPy's own operations instead of compiled kernels.
    "numpy-operations": Backend("numpy-operations", _to_numpy, np.asarray, _numpy_gradients),
    "torch": Backend("torch", _to_torch, _from_torch, _torch_gradients),
    # As on other devices: PyTorch's own operations instead of NumPy's kernels on the same memory.
    "torch-operations": Backend("torch-operations", _to_torch, _from_torch, _torch_gradients),
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def be(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param.name == "numpy-operations":
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    elif request.param.name == "torch-operations":
        monkeypatch.setattr(torch_backend, "_numpy_can", lambda x: False)
    else:
        assert numpy_backend.kernels() is not None  # or these would test the operations twice
    return request.param  # type: ignore[no-any-return]
