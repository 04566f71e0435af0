"""Which backend an array belongs to: a dict lookup on its type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from itertools import zip_longest
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from clipaware._report import Report

Params = ParamSpec("Params")
Result = TypeVar("Result")

_known: dict[type, tuple[ModuleType, str]] = {}


def _numpy() -> ModuleType:
    from clipaware._backends import numpy

    return numpy


def _torch() -> ModuleType:
    from clipaware._backends import torch

    return torch


def _jax() -> ModuleType:
    from clipaware._backends import jax

    return jax


def _tensorflow() -> ModuleType:
    from clipaware._backends import tensorflow

    return tensorflow


def _dask() -> ModuleType:
    from clipaware._backends import dask

    return dask


def _array_api() -> ModuleType:
    from clipaware._backends import array_api

    return array_api


# By the root module of an array's type, or of one of its bases. A backend imports its framework, which by then the
# caller has done: there are no arrays of it otherwise.
_ROOTS: dict[str, tuple[Callable[[], ModuleType], str]] = {
    "numpy": (_numpy, "numpy"),
    "torch": (_torch, "torch"),
    "DTensor": (_torch, "DTensor"),  # a class of PyTorch's, but not one of its tensors
    "jax": (_jax, "jax"),
    "jaxlib": (_jax, "jax"),
    "tensorflow": (_tensorflow, "tensorflow"),
    "cupy": (_array_api, "cupy"),
    "dask": (_dask, "dask"),
}


def backend_of(array: Any) -> Any:
    """Return the backend module for this array, or None if no backend knows it."""
    known = _known.get(type(array)) or _found(array)
    return known and known[0]


def framework_of(array: Any) -> str | None:
    """Return the name of the framework that this array is of, or None if no backend knows it."""
    known = _known.get(type(array)) or _found(array)
    return known and known[1]


def _found(array: Any) -> Any:
    cls = type(array)
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "torch" and base.__name__ == "DTensor":
            root = "DTensor"
        if root in _ROOTS:
            load, name = _ROOTS[root]
            module = load()
            if not module.is_array(array):
                return None
            _known[cls] = module, name
            return _known[cls]
    if hasattr(array, "__array_namespace__"):
        _known[cls] = _array_api(), cls.__module__.partition(".")[0]
        return _known[cls]
    return None


def described(a: Any) -> str:
    """What an argument is, in the words of an error message."""
    if backend_of(a) is None:
        return f"a {type(a).__module__}.{type(a).__qualname__}".replace("a builtins.", "a ")
    return f"a {framework_of(a)} array"


# --- around every public function -------------------------------------------------------------------------------------


def public(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let a function take arrays that others lend their code, and return such: EagerPy's tensors, which wrap another
    framework's, CuPy's arrays, whose memory PyTorch's kernels can work on, and DTensors, of which every process holds a
    part. Nothing is imported for the question."""
    names = tuple(signature(function).parameters)

    @wraps(function)
    def called(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        x = args[0] if args else kwargs.get("x")
        eagerpy = sys.modules.get("eagerpy")
        lend: Callable[[Any], Any]
        if eagerpy is not None and isinstance(x, eagerpy.Tensor):
            kind, what, lend, back = eagerpy.Tensor, "an EagerPy tensor", lambda a: a.raw, eagerpy.astensor
        elif (framework := framework_of(x)) == "dask":
            return _lazy(function.__name__)(*args, **kwargs)  # type: ignore[no-any-return]
        elif framework == "DTensor":
            return _dtensor().call(function, args, kwargs)  # type: ignore[no-any-return]
        elif framework == "cupy" and (torch := _torch_with_kernels()) is not None:
            cupy: Any = sys.modules["cupy"]
            kind, what, lend, back = cupy.ndarray, "a cupy array", _shared(torch.from_dlpack), cupy.from_dlpack
        else:
            return function(*args, **kwargs)

        # An argument too many has no name, and is left to the function to refuse.
        lent: Any = [_lent(a, name, kind, what, lend) for a, name in zip_longest(args, names[: len(args)])]
        named: Any = {name: _lent(a, name, kind, what, lend) for name, a in kwargs.items()}
        return _wrapped(function(*lent, **named), back)  # type: ignore[no-any-return]

    # For TensorFlow's AutoGraph: not to be rewritten.
    called.autograph_info__ = None  # type: ignore[attr-defined]
    return called


def _lazy(name: str) -> Any:
    """The function of that name for Dask's arrays, which are not looked at before they are computed."""
    return getattr(_dask(), name)


def _dtensor() -> Any:
    from clipaware._backends import dtensor

    return dtensor


def _torch_with_kernels() -> Any:
    """PyTorch, if it is installed and has kernels for the GPU."""
    try:
        backend: Any = _torch()
    except ImportError:
        return None
    return backend.torch if backend.gpu_kernels() is not None else None


def _shared(from_dlpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """CuPy's memory as PyTorch's tensor, which has no negative strides."""
    return lambda a: from_dlpack(a if min(a.strides, default=0) >= 0 else a.copy())


def _lent(a: Any, name: str | None, kind: type, what: str, lend: Callable[[Any], Any]) -> Any:
    """What stands for an argument beside an x of that kind: then delta is of it, too, and so is what is not NumPy's."""
    if isinstance(a, kind):
        return lend(a)
    if name in ("delta", "grad"):
        raise TypeError(f"{name} is {described(a)}, expected {what} to match x")
    if type(a) in (tuple, list):
        return type(a)(_lent(item, f"an item of {name}", kind, what, lend) for item in a)
    if framework_of(a) not in (None, "numpy"):
        raise TypeError(f"{name} is {described(a)}, expected a number, a NumPy array or {what} like x")
    return a


def _wrapped(result: Any, wrap: Callable[[Any], Any]) -> Any:
    if isinstance(result, Report):
        return Report(*(wrap(a) for a in vars(result).values()))
    return tuple(wrap(a) for a in result) if isinstance(result, tuple) else wrap(result)
