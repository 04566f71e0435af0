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


def _array_api() -> ModuleType:
    from clipaware._backends import array_api

    return array_api


# By the root module of an array's type, or of one of its bases. A backend imports its framework, which by then the
# caller has done: there are no arrays of it otherwise.
_ROOTS: dict[str, tuple[Callable[[], ModuleType], str]] = {
    "numpy": (_numpy, "numpy"),
    "torch": (_torch, "torch"),
    "jax": (_jax, "jax"),
    "jaxlib": (_jax, "jax"),
    "tensorflow": (_tensorflow, "tensorflow"),
    "cupy": (_array_api, "cupy"),
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
    """Let a function take EagerPy tensors and return them, if x is one. EagerPy is not imported for that."""
    names = tuple(signature(function).parameters)

    @wraps(function)
    def called(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        eagerpy = sys.modules.get("eagerpy")
        if eagerpy is None or not isinstance(args[0] if args else kwargs.get("x"), eagerpy.Tensor):
            return function(*args, **kwargs)

        # An argument too many has no name, and is left to the function to refuse.
        raw_args: Any = [_raw(a, name, eagerpy.Tensor) for a, name in zip_longest(args, names[: len(args)])]
        raw_kwargs: Any = {name: _raw(a, name, eagerpy.Tensor) for name, a in kwargs.items()}
        return _wrapped(function(*raw_args, **raw_kwargs), eagerpy.astensor)  # type: ignore[no-any-return]

    # For TensorFlow's AutoGraph: not to be rewritten.
    called.autograph_info__ = None  # type: ignore[attr-defined]
    return called


def _raw(a: Any, name: str | None, tensor: type) -> Any:
    """What an EagerPy tensor wraps, beside an x that is one: then delta is one, too, and so is what is not NumPy's."""
    if isinstance(a, tensor):
        return a.raw  # type: ignore[attr-defined]
    if name in ("delta", "grad"):
        raise TypeError(f"{name} is {described(a)}, expected an EagerPy tensor to match x")
    if type(a) in (tuple, list):
        return type(a)(_raw(item, f"an item of {name}", tensor) for item in a)
    if framework_of(a) not in (None, "numpy"):
        raise TypeError(f"{name} is {described(a)}, expected a number, a NumPy array or an EagerPy tensor like x")
    return a


def _wrapped(result: Any, wrap: Callable[[Any], Any]) -> Any:
    if isinstance(result, Report):
        return Report(*(wrap(a) for a in vars(result).values()))
    return tuple(wrap(a) for a in result) if isinstance(result, tuple) else wrap(result)
