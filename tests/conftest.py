"""One fixture entry per backend: a new framework joins every test by adding one here."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import clipaware as ca
from clipaware._backends import numpy as numpy_backend

# JAX's programs are small and many here: less time for their compilation. Before JAX is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


def _optional(name: str) -> Any:
    """A module, or None where it is not installed: then what needs it is skipped."""
    try:
        return import_module(name)
    except ImportError:
        return None


hypothesis = _optional("hypothesis")
array_api_strict, cupy, jax, tf, torch = map(_optional, ("array_api_strict", "cupy", "jax", "tensorflow", "torch"))
dask, dask_array = map(_optional, ("dask", "dask.array"))
MODULES = {"array-api-strict": array_api_strict, "cupy": cupy, "dask": dask, "jax": jax, "tensorflow": tf}
MODULES |= {"torch": torch, "cuda": torch}
jax_backend, tensorflow_backend, torch_backend = (
    _optional(f"clipaware._backends.{name}") for name in ("jax", "tensorflow", "torch")
)

triton_kernels = _optional("clipaware._kernels.triton")

if hypothesis is not None:
    hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
    hypothesis.settings.load_profile("default")
if torch is not None:
    torch.set_num_threads(1)  # the tests themselves run side by side
if jax is not None:
    jax.config.update("jax_enable_x64", True)  # without, there is test_jax.py

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
    make: Callable[[Any, str], Any]  # a framework array of that dtype from a NumPy array
    numpy: Callable[[Any], Any]  # and back; bfloat16 through ml_dtypes
    # (x, delta, eps, lower, upper, g, **options), all NumPy float64 -> the five gradients of sum(g*perturb(...))
    gradients: Callable[..., list[Any]]
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    checked: bool = True  # whether bad values are errors; on accelerators they make their row NaN

    def array(self, a: Any, dtype: str) -> Any:
        """A framework array of that dtype from a NumPy array; the test is skipped if there is no such dtype."""
        if dtype not in self.dtypes:
            pytest.skip(f"{self.name} has no {dtype}")
        return self.make(a, dtype)

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


# Where the GPU's kernels run: on a GPU, or one program after another in Triton's interpreter.
GPU = "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _to_cuda(a: Any, dtype: str) -> torch.Tensor:
    return _to_torch(a, dtype).to(GPU)


def _cuda_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    inputs = [torch.tensor(a, dtype=torch.float64, device=GPU).requires_grad_() for a in (x, delta, eps, lower, upper)]
    v = ca.perturb(*inputs[:3], bounds=tuple(inputs[3:]), **options)
    v.backward(torch.tensor(g, device=GPU))
    return [a.grad.cpu().numpy() for a in inputs]


def _to_jax(a: Any, dtype: str) -> Any:
    return jax.numpy.asarray(np.array(a, np.float64), dtype)


def _jax_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    def perturb(x: Any, delta: Any, eps: Any, lower: Any, upper: Any) -> Any:
        return ca.perturb(x, delta, eps, bounds=(lower, upper), **options)

    _, pull = jax.vjp(perturb, *(jax.numpy.asarray(a, float) for a in (x, delta, eps, lower, upper)))
    return [np.asarray(bar) for bar in pull(jax.numpy.asarray(g))]


def _to_tensorflow(a: Any, dtype: str) -> Any:
    return tf.constant(np.array(a).astype(NUMPY_DTYPES[dtype]))  # a cast of its own would flush subnormal numbers


def _tensorflow_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    inputs = [tf.constant(np.array(a, np.float64)) for a in (x, delta, eps, lower, upper)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        v = ca.perturb(*inputs[:3], bounds=tuple(inputs[3:]), **options)
    return [a.numpy() for a in tape.gradient(v, inputs, g)]


def _to_strict(a: Any, dtype: str) -> Any:
    return array_api_strict.asarray(np.array(a).astype(dtype))


def _to_cupy(a: Any, dtype: str) -> Any:
    return cupy.asarray(np.array(a).astype(dtype))


def _from_cupy(a: Any) -> Any:
    return a.get()


def _to_dask(a: Any, dtype: str) -> Any:
    """In two chunks along every axis, so that samples are spread over several."""
    a = _to_numpy(a, dtype)
    return dask_array.from_array(a, chunks=tuple(n - n // 2 or 1 for n in a.shape))


def _to_dask_batch(a: Any, dtype: str) -> Any:
    """In two chunks along the first axis."""
    a = _to_numpy(a, dtype)
    return dask_array.from_array(a, chunks=tuple(n - n // 2 or 1 if i == 0 else n for i, n in enumerate(a.shape)))


def _from_dask(a: Any) -> Any:
    return a.compute(scheduler="synchronous")


def _closed_form(make: Callable[..., Any], back: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """The gradients of a framework that does not differentiate by itself."""

    def gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
        x, delta, eps, lower, upper, g = (make(a, "float64") for a in (x, delta, eps, lower, upper, g))
        return [back(bar) for bar in ca.perturb_vjp(x, delta, eps, g, bounds=(lower, upper), **options)]

    return gradients


def _to_numpy(a: Any, dtype: str) -> Any:
    return np.array(a).astype(NUMPY_DTYPES[dtype])


BACKENDS = {
    "numpy": Backend("numpy", _to_numpy, np.asarray, _numpy_gradients),
    # As without Numba: NumPy's own operations instead of compiled kernels.
    "numpy-operations": Backend("numpy-operations", _to_numpy, np.asarray, _numpy_gradients),
    "torch": Backend("torch", _to_torch, _from_torch, _torch_gradients),
    # As on other devices: PyTorch's own operations instead of NumPy's kernels on the same memory.
    "torch-operations": Backend("torch-operations", _to_torch, _from_torch, _torch_gradients),
    # PyTorch's tensors on a GPU, by Triton's kernels.
    "cuda": Backend("cuda", _to_cuda, _from_torch, _cuda_gradients, checked=False),
    "jax": Backend("jax", _to_jax, np.asarray, _jax_gradients),
    # As in a trace and on other devices: one compiled program instead of NumPy's kernels.
    "jax-operations": Backend("jax-operations", _to_jax, np.asarray, _jax_gradients, checked=False),
    "tensorflow": Backend("tensorflow", _to_tensorflow, lambda a: a.numpy(), _tensorflow_gradients),
    # As in a graph and on other devices: TensorFlow's own operations, though not compiled for every shape.
    "tensorflow-operations": Backend(
        "tensorflow-operations", _to_tensorflow, lambda a: a.numpy(), _tensorflow_gradients, checked=False
    ),
    "array-api-strict": Backend(
        "array-api-strict", _to_strict, np.asarray, _closed_form(_to_strict, np.asarray), dtypes=("float32", "float64")
    ),
    # Samples that are spread over chunks, and samples within one.
    "dask": Backend("dask", _to_dask, _from_dask, _closed_form(_to_dask, _from_dask), checked=False),
    "dask-batch": Backend(
        "dask-batch", _to_dask_batch, _from_dask, _closed_form(_to_dask_batch, _from_dask), checked=False
    ),
    "cupy": Backend(
        "cupy",
        _to_cupy,
        _from_cupy,
        _closed_form(_to_cupy, _from_cupy),
        dtypes=("float16", "float32", "float64"),
        checked=False,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    """XLA's programs end with the module that made them: those of all tests together would take ten gigabytes."""
    yield
    if jax is not None:
        jax.clear_caches()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)  # what was freed would stay with this process otherwise


@pytest.fixture(
    params=[
        pytest.param(b, id=name, marks=[pytest.mark.cuda] * (name in ("cuda", "cupy"))) for name, b in BACKENDS.items()
    ]
)
def be(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    subnormal = request.node.originalname in ("test_subnormal_delta", "test_mixed_scales_in_one_row")
    if subnormal and request.param.name in ("jax-operations", "tensorflow-operations", "cupy"):
        pytest.skip("XLA, TensorFlow and CuPy take subnormal numbers for 0")
    if request.node.originalname == "test_one_picture_of_a_batch_alone" and request.param.name.startswith("dask"):
        pytest.skip("the order of sums depends on the chunks")
    if request.node.originalname == "test_one_picture_of_a_batch_alone" and request.param.name in ("cuda", "cupy"):
        pytest.skip("the order of a GPU's sums depends on where a row begins")
    if request.param.name.startswith("dask") and request.node.originalname == "test_long_rows_and_many_rows":
        pytest.skip("half a minute, for what others test with smaller chunks")
    if request.param.name == "dask" and request.module.__name__ == "test_quantize":
        pytest.skip("perturb_quantized takes no samples that are spread over chunks")
    framework = request.param.name.removesuffix("-operations").removesuffix("-batch")
    if MODULES.get(framework, np) is None:
        pytest.skip(f"{framework} is not installed")
    if request.param.name == "numpy-operations":
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    elif request.param.name == "torch-operations":
        monkeypatch.setattr(torch_backend, "_numpy_can", lambda x: False)
    elif request.param.name == "jax-operations":
        monkeypatch.setattr(jax_backend, "_at_hand", lambda *arrays: False)
    elif request.param.name == "tensorflow-operations":
        monkeypatch.setattr(tensorflow_backend, "_on_host", lambda a: False)
        monkeypatch.setattr(tensorflow_backend, "_compiled", partial)
        if request.module.__name__ == "test_properties":
            pytest.skip("operations one by one take minutes for all the examples")
        if request.node.originalname == "test_one_picture_of_a_batch_alone":
            pytest.skip("TensorFlow's sums depend on the shape in their last bit")
    elif request.param.name == "cuda":
        request.getfixturevalue("on_gpu")
    elif request.param.name == "cupy":
        if not cupy.is_available():
            pytest.skip("CuPy finds no GPU")
    else:
        # Kernels wherever Numba is installed, or these would test the operations twice.
        assert (numpy_backend.kernels() is None) == (_optional("numba") is None)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tensors of `_to_cuda` go to Triton's kernels."""
    if INTERPRETED and triton_kernels is not None:
        from triton.runtime import interpreter

        def splat(self: Any, kind: Any, a: Any) -> Any:
            return interpreter.TensorHandle(np.full(kind.shape, a.data.ravel()[0], a.data.dtype), a.dtype.scalar)

        # Its own makes integers of truth values.
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat)
        monkeypatch.setattr(torch_backend, "_numpy_can", lambda x: False)
        monkeypatch.setattr(torch_backend, "_kernels_of", lambda x: triton_kernels)
        monkeypatch.setattr(torch_backend, "values_of", lambda a: None)
    elif GPU == "cpu":
        pytest.skip("PyTorch finds no GPU, and this is not Triton's interpreter")
    else:
        assert torch_backend.gpu_kernels() is not None  # or this would test the operations twice


@pytest.fixture(autouse=True)
def _forget_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA maps memory for every program that it compiles, and Linux allows a process 65,530 maps."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in request.node.nodeid and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests with many parameters, those that compile a program or make a graph for each take some."""
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        backend = getattr(item, "callspec", None) and item.callspec.params.get("be")  # type: ignore[attr-defined]
        if backend and backend.name in ("dask", "dask-batch", "jax-operations", "tensorflow-operations"):
            groups.setdefault((item.location[0] + item.originalname, backend.name), []).append(item)  # type: ignore[attr-defined]
    # An odd stride, for otherwise it is always the same dtype.
    most = {"dask": 3, "dask-batch": 3}
    left_out = {
        item
        for (_, name), group in groups.items()
        for i, item in enumerate(group)
        if i % (len(group) // most.get(name, 10) | 1)
    }
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
