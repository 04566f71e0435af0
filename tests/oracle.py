"""What the tests trust beside ``clipaware.reference``: one row solved and differentiated in mpmath."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mpmath
import numpy as np

DIGITS = 50
STEP = "1e-20"  # of central differences at 50 digits: an error of about 1e-30 from rounding, 1e-40 from curvature


class Derivatives(NamedTuple):
    """One array per argument, and a number for eps."""

    x: np.ndarray
    delta: np.ndarray
    eps: float
    lower: np.ndarray
    upper: np.ndarray


def _exact(a: Any, n: int) -> list[mpmath.mpf]:
    """A number or a row as mpf, without rounding."""
    if isinstance(a, mpmath.mpf):
        return [a] * n
    values = list(a) if isinstance(a, Sequence) else np.broadcast_to(np.asarray(a), (n,)).tolist()
    return [mpmath.mpf(value) for value in values]


def mp_rescale(
    x: Any, delta: Any, eps: Any, p: float = 2, lower: Any = 0.0, upper: Any = 1.0
) -> tuple[mpmath.mpf, list[mpmath.mpf]]:
    """The scale of one row and ``clip(x + eta*delta)``, at 50 digits.

    Piece by piece between the sorted breakpoints: the first piece that contains the root of its own line has the root.
    """
    with mpmath.workdps(DIGITS):
        n = len(x)
        x, delta, lower, upper = (_exact(a, n) for a in (x, delta, lower, upper))
        eps = eps if isinstance(eps, mpmath.mpf) else mpmath.mpf(float(eps))
        room = [b - v if d > 0 else v - a for v, d, a, b in zip(x, delta, lower, upper, strict=True)]
        moving = [(s / abs(d), s, abs(d)) for s, d in zip(room, delta, strict=True) if d != 0]
        eta = _scale(sorted(moving), eps, p)
        moved = (v + eta * d if d != 0 else v for v, d in zip(x, delta, strict=True))
        return eta, [min(max(v, a), b) for v, a, b in zip(moved, lower, upper, strict=True)]


def _scale(moving: list[tuple[mpmath.mpf, ...]], eps: mpmath.mpf, p: float) -> mpmath.mpf:
    if eps == 0 or not moving:
        return mpmath.mpf(0)
    if p == math.inf:
        return min((eps / d for _, s, d in moving if s >= eps), default=moving[-1][0])
    slopes = [mpmath.mpf(0)]
    for _, _, d in reversed(moving):
        slopes.append(slopes[-1] + d ** mpmath.mpf(p))
    missing = eps ** mpmath.mpf(p)
    for (end, s, _), slope in zip(moving, reversed(slopes), strict=False):
        eta = (missing / slope) ** (1 / mpmath.mpf(p))
        if eta <= end:
            return eta
        missing -= s ** mpmath.mpf(p)
    return moving[-1][0]


def mp_gradients(
    x: Any, delta: Any, eps: Any, p: float = 2, lower: Any = 0.0, upper: Any = 1.0, g: Any = None
) -> Derivatives:
    """The derivatives of ``sum(g*v)`` in all arguments of one row, or of eta without a g.

    They are central differences at 50 digits, so they owe nothing to the closed forms. Meant for rows with no element
    at a kink and none without room. What an infinite bound gets is 0.
    """
    with mpmath.workdps(DIGITS):
        n = len(x)
        x, delta, lower, upper = (_exact(a, n) for a in (x, delta, lower, upper))
        eps = mpmath.mpf(float(eps))
        weights = None if g is None else _exact(g, n)
        arguments = {"x": x, "delta": delta, "eps": eps, "lower": lower, "upper": upper}

        def output(**changed: Any) -> mpmath.mpf:
            eta, v = mp_rescale(p=p, **(arguments | changed))
            return eta if weights is None else mpmath.fdot(weights, v)

        def slope(change: Callable[[mpmath.mpf], dict[str, Any]], scale: mpmath.mpf) -> float:
            step = mpmath.mpf(STEP) * scale
            return float((output(**change(step)) - output(**change(-step))) / (2 * step))

        def slopes(name: str, row: list[mpmath.mpf], scale: mpmath.mpf) -> np.ndarray:
            found = [slope(_nudged(name, row, i), scale) if mpmath.isfinite(row[i]) else 0.0 for i in range(n)]
            return np.array(found)

        return Derivatives(
            x=slopes("x", x, eps),
            delta=slopes("delta", delta, max(map(abs, delta))),
            eps=slope(lambda step: {"eps": eps + step}, eps),
            lower=slopes("lower", lower, eps),
            upper=slopes("upper", upper, eps),
        )


def _nudged(name: str, row: list[mpmath.mpf], i: int) -> Callable[[mpmath.mpf], dict[str, Any]]:
    return lambda step: {name: [*row[:i], row[i] + step, *row[i + 1 :]]}
