"""Every backend: how its arrays are made and read, what it can take, and how it differentiates."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from torture.cases import Profile

Array = Any


def _same(a: Any) -> Any:
    return a


@dataclass(frozen=True)
class Backend:
    """How to call one."""

    name: str
    make: Callable[[Array], Any]  # from NumPy's array, of whatever layout
    fetch: Callable[[Any], Array]
    profile: Profile = field(default_factory=Profile)
    alone: bool = True  # whether a row alone gives the same bits as in a batch
    enter: Callable[[], Any] = ExitStack
    counts: bool = False  # whether passes can be counted
    slack: float = 2.0**-46  # of eps, by which at_most may stay below it: twice what it leaves, for its own measuring
    pull: Callable[..., Any] | None = None  # of a function, its arguments and a cotangent, gradients; None of constants
    flushes: bool = False  # whether a cast takes subnormal numbers for 0
    pulls_normal: bool = False  # whether `pull` does
    computed: Callable[[Any], Any] = _same  # of what a call returns, where that is lazy


@contextmanager
def patched(module: str, **attributes: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, value))
        yield


def needs(*modules: str) -> list[Any]:
    return [importlib.import_module(name) for name in modules]


def _numpy() -> Backend:
    return Backend("numpy", np.asarray, np.asarray, counts=True)


def _numpy_operations() -> Backend:
    enter = partial(patched, "clipaware._backends.numpy", kernels=lambda: None)
    return Backend("numpy-operations", np.asarray, np.asarray, enter=enter, counts=True)


def _torch_made(torch: Any, device: str, a: Array) -> Any:
    """With the array's strides where PyTorch has them, which are not negative."""
    a = np.asarray(a)
    if not a.flags.writeable or min(a.strides, default=0) <= 0 or a.dtype.byteorder == ">":
        a = a.copy()
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(a).to(device)


def _torch_fetched(torch: Any, a: Any) -> Array:
    a = a.detach().cpu()
    if a.dtype == torch.bfloat16:
        return a.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return a.numpy()


def _torch_pulled(torch: Any, function: Callable[..., Any], arguments: Any, g: Any) -> list[Any]:
    arguments = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]
    leaves = [a for a in arguments if isinstance(a, torch.Tensor)]
    bars = iter(torch.autograd.grad(function(*arguments), leaves, g))
    return [next(bars) if isinstance(a, torch.Tensor) else None for a in arguments]


def _torch(name: str = "torch", device: str = "cpu", **options: Any) -> Backend:
    (torch,) = needs("torch")
    make, pull = partial(_torch_made, torch, device), partial(_torch_pulled, torch)

    return Backend(name, make, partial(_torch_fetched, torch), pull=pull, **options)


def _torch_operations() -> Backend:
    enter = partial(patched, "clipaware._backends.torch", _numpy_can=lambda x: False)
    return _torch("torch-operations", enter=enter, counts=True, alone=False)  # sums depend on the shape


def _cuda() -> Backend:
    (torch,) = needs("torch")
    if not torch.cuda.is_available():
        raise ImportError("PyTorch finds no GPU")
    # Code for an order, a dtype and a shape takes long to make, and is used for many rows then.
    profile = Profile(subnormal64=False, least_rows=128, most_rows=256, few_orders=True)
    return _torch("cuda", "cuda", alone=False, profile=profile)


def _triton() -> Backend:
    """The GPU's kernels in Triton's interpreter: ``TRITON_INTERPRET=1``, and no TensorFlow."""
    kernels, interpreter = needs("clipaware._kernels.triton", "triton.runtime.interpreter")
    if not kernels.INTERPRETED:
        raise ImportError("Triton does not interpret: TRITON_INTERPRET=1")

    def splat(self: Any, kind: Any, a: Any) -> Any:
        """Its own makes integers of truth values."""
        return interpreter.TensorHandle(np.full(kind.shape, a.data.ravel()[0], a.data.dtype), a.dtype.scalar)

    def enter() -> Any:
        stack, no = ExitStack(), {"_numpy_can": lambda x: False, "values_of": lambda a: None}
        stack.enter_context(patched("clipaware._backends.torch", _kernels_of=lambda x: kernels, **no))
        stack.enter_context(mock.patch.object(interpreter.InterpreterBuilder, "create_splat", splat))
        stack.enter_context(np.errstate(all="ignore"))  # of which a GPU says nothing
        return stack

    # Its rounding to bfloat16 is not a GPU's.
    profile = Profile(("float16", "float32", "float64"), subnormal64=False, longest=2000, most_rows=8)
    return _torch("triton", enter=enter, alone=False, profile=profile)


def _jax(name: str = "jax", x64: bool = True, **options: Any) -> Backend:
    jax, numpy = needs("jax", "jax.numpy")

    def make(a: Array) -> Any:
        return numpy.asarray(np.array(a))

    def pull(function: Callable[..., Any], arguments: Any, g: Any) -> list[Any]:
        which = [i for i, a in enumerate(arguments) if isinstance(a, jax.Array)]

        def of_arrays(*arrays: Any) -> Any:
            given = dict(zip(which, arrays, strict=True))
            return function(*(given.get(i, a) for i, a in enumerate(arguments)))

        _, back = jax.vjp(of_arrays, *(arguments[i] for i in which))
        bars = dict(zip(which, back(g), strict=True))
        return [bars.get(i) for i in range(len(arguments))]

    def enter() -> Any:
        stack = ExitStack()
        stack.enter_context(jax.enable_x64(x64))
        if name.endswith("operations"):
            stack.enter_context(patched("clipaware._backends.jax", _at_hand=lambda *arrays: False))
        return stack

    return Backend(name, make, np.asarray, enter=enter, pull=pull, flushes=True, pulls_normal=True, **options)


def _jax_operations() -> Backend:
    # For another number of rows, XLA compiles other code. Its powers are off by more, and at_most leaves twice as much.
    return _jax("jax-operations", alone=False, profile=Profile(few=True, subnormal=False), slack=2.0**-45)


def _jax32() -> Backend:
    dtypes = "float16", "bfloat16", "float32"
    return _jax("jax32", x64=False, profile=Profile(dtypes, single_eps=True))


def _jax32_operations() -> Backend:
    profile = Profile(("float16", "bfloat16", "float32"), few=True, subnormal=False, single_eps=True)
    return _jax("jax32-operations", x64=False, alone=False, profile=profile, slack=2.0**-22)  # it adds up in float32


def _tensorflow(name: str = "tensorflow", **options: Any) -> Backend:
    (tf,) = needs("tensorflow")

    def pull(function: Callable[..., Any], arguments: Any, g: Any) -> list[Any]:
        watched = [a for a in arguments if isinstance(a, tf.Tensor)]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            v = function(*arguments)
        bars = iter(tape.gradient(v, watched, g))
        return [next(bars) if isinstance(a, tf.Tensor) else None for a in arguments]

    return Backend(name, lambda a: tf.constant(np.array(a)), lambda a: a.numpy(), pull=pull, flushes=True, **options)


def _tensorflow_operations() -> Backend:
    enter = partial(patched, "clipaware._backends.tensorflow", _on_host=lambda a: False)
    profile = Profile(few=True, subnormal=False)
    return _tensorflow("tensorflow-operations", enter=enter, alone=False, profile=profile)


def _array_api() -> Backend:
    (strict,) = needs("array_api_strict")
    profile = Profile(("float32", "float64"), longest=10**6)
    # In which order NumPy adds up a row depends on the others.
    options: Any = {"alone": False, "counts": True}
    return Backend("array-api-strict", lambda a: strict.asarray(np.array(a)), np.asarray, profile, **options)


def _dask_made(array: Any, batch: bool, a: Array) -> Any:
    a = np.asarray(a)
    chunks = tuple(size - size // 2 or 1 if i == 0 or not batch else size for i, size in enumerate(a.shape))
    return array.from_array(np.array(a), chunks=chunks)


def _dask(name: str = "dask", batch: bool = False) -> Backend:
    dask, array = needs("dask", "dask.array")
    profile = Profile(longest=10**5, least_rows=64, most_rows=256)  # a graph takes long, for one row as for many

    def computed(found: Any) -> Any:
        # All parts of it at once, or each would be solved for anew.
        return dask.compute(found, scheduler="synchronous")[0]

    options: Any = {"alone": False, "computed": computed}
    return Backend(name, partial(_dask_made, array, batch), np.asarray, profile, **options)


def _cupy() -> Backend:
    (cupy,) = needs("cupy")
    if not cupy.is_available():
        raise ImportError("CuPy finds no GPU")
    profile = Profile(("float16", "float32", "float64"), subnormal=False, most_rows=256)
    return Backend("cupy", lambda a: cupy.asarray(np.array(a)), lambda a: a.get(), profile, alone=False)


LOADERS: dict[str, Callable[[], Backend]] = {
    "numpy": _numpy,
    "numpy-operations": _numpy_operations,
    "torch": _torch,
    "torch-operations": _torch_operations,
    # A trace for every shape takes long, too.
    "jax": partial(_jax, profile=Profile(least_rows=64, most_rows=256)),
    "jax-operations": _jax_operations,
    "jax32": _jax32,
    "jax32-operations": _jax32_operations,
    "tensorflow": _tensorflow,
    "tensorflow-operations": _tensorflow_operations,
    "array-api-strict": _array_api,
    "dask": _dask,
    "dask-batch": partial(_dask, "dask-batch", True),
    "cuda": _cuda,
    "triton": _triton,
    "cupy": _cupy,
}


def load(name: str) -> Backend:
    """A backend by its name; ImportError where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LOADERS[name]()
