"""What docs/precision.md promises, as assertions: of the array as it is stored, and of the scale that was returned.

They compare with measurements in float64, never with another solver's digits: next to the reach, where hardly anything
still moves, two right answers may differ by far more than their norms do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clipaware.reference import norm64

Array = Any

NORM = {"float32": 3e-7, "float64": 2e-14}
ULP = {"float32": 2.0**-23, "float64": 2.0**-52}


def rows_of(a: Array) -> Array:
    """One row per sample, in float64."""
    return np.asarray(a, float).reshape(len(a), -1)


def assert_norm(v: Array, x: Array, eps: Array, p: float, tied: Any = False, steps: float = 0.5) -> None:
    """The norm of v - x is eps within the promise, plus what an array of this dtype cannot hold.

    That is half of the step that the norm takes as the element that moves most goes from one number to the next, or
    all of it where the norm may not exceed eps. In `tied` rows all elements move by the same amount and take that step
    together.
    """
    dtype = str(v.dtype)
    v, x = rows_of(v), rows_of(x)
    spacing = np.spacing(np.abs(v).max(axis=1).astype(dtype)).astype(float)
    share = (np.abs(v - x).max(axis=1) / eps) ** (p - 1 if p < math.inf else 0)
    step = steps * spacing * np.where(tied, x.shape[1] ** (1 / p), share) / eps
    error = np.abs(norm64(v, x, p) / eps - 1)
    assert (error <= NORM[dtype] + step).all(), (error, NORM[dtype] + step)


def assert_on_ray(v: Array, x: Array, delta: Array, lower: Array, upper: Array) -> None:
    """Every row of v is clip(x + eta*delta) for one eta, up to the rounding of each element."""
    dtype = str(v.dtype)
    lower, upper = (rows_of(np.broadcast_to(b, v.shape)) for b in (lower, upper))
    half = rows_of(np.spacing(np.abs(v))) * 2 + 4 * ULP[dtype] * np.abs(rows_of(v) - rows_of(x))
    v, x, delta = rows_of(v), rows_of(x), rows_of(delta)
    assert (v >= lower).all()
    assert (v <= upper).all()
    assert ((v - x) * delta >= 0).all()
    assert (v == x)[delta == 0].all()
    size, moved = np.where(delta == 0, 1.0, np.abs(delta)), np.abs(v - x)
    at_bound = v == np.where(delta > 0, upper, lower)
    least = np.where(delta == 0, 0.0, (moved - half) / size).max(axis=1)
    most = np.where((delta == 0) | at_bound, np.inf, (moved + half) / size).min(axis=1)
    assert (least <= most).all(), (least, most)


def assert_scale(
    eta: Array, x: Array, delta: Array, eps: Array, p: float, lower: Array, upper: Array, dtype: str
) -> None:
    """The unrounded norms at the neighbours of eta in its dtype are on either side of eps, within the promise."""
    lower, upper = (rows_of(np.broadcast_to(b, x.shape)) for b in (lower, upper))
    x, delta, eta = rows_of(x), rows_of(delta), rows_of(eta)
    for side in (-1, 1):
        beside = eta * (1 + side * ULP[dtype])
        norm = norm64(np.clip(x + beside * delta, lower, upper), x, p)
        assert (side * norm >= side * eps * (1 - side * NORM[dtype])).all(), (side, norm / eps - 1)


def share_that_grows(x: Array, delta: Array, eta: Array, p: float, lower: Array, upper: Array) -> Array:
    """d log(norm)/d log(eta) of every row: one over it is the condition number of the scale and of the gradients."""
    lower, upper = (rows_of(np.broadcast_to(b, x.shape)) for b in (lower, upper))
    x, delta, eta = rows_of(x), rows_of(delta), rows_of(eta)
    moved = np.minimum(eta * np.abs(delta), np.where(delta > 0, upper - x, x - lower))
    free = moved >= eta * np.abs(delta)
    top = np.maximum(moved.max(axis=1, keepdims=True), 1e-300)
    if p == math.inf:
        return np.ones(len(x))
    powers = (moved / top) ** p
    return np.where(free, powers, 0.0).sum(axis=1) / np.maximum(powers.sum(axis=1), 1e-300)
