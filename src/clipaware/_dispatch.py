"""Which backend an array belongs to: a dict lookup on its type."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

_known: dict[type, ModuleType] = {}


def _numpy() -> ModuleType:
    from clipaware._backends import numpy

    return numpy


def _torch() -> ModuleType:
    from clipaware._backends import torch

    return torch


# By the root module of an array's type, or of one of its bases. A backend imports its framework, which by then the
# caller has done: there are no arrays of it otherwise.
_ROOTS: dict[str, Callable[[], ModuleType]] = {"numpy": _numpy, "torch": _torch}


def backend_of(array: Any) -> Any:
    """Return the backend module for this array, or None if no backend knows it."""
    cls = type(array)
    if cls in _known:
        return _known[cls]
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _ROOTS:
            module = _ROOTS[root]()
            if not module.is_array(array):
                return None
            _known[cls] = module
            return module
    return None
