"""What is true of a problem, in extended precision: 64 bits of mantissa and exponents up to 10^4932, so that no power,
sum or scale overflows on the way. Rows of a batch at once; mpmath for a row.

Nothing here is solved but by mpmath. A scale is judged by the norms on either side of it, and an array by the scales
that could have made it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import ml_dtypes
import numpy as np

Array = Any
L: Any = np.longdouble

DTYPES: dict[str, Any] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
LEAST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
MOST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}


def require_extended() -> None:
    if np.finfo(L).nmant < 63:
        raise RuntimeError("numpy.longdouble is no wider than float64 here, expected 64 bits of mantissa at least")


def working(dtype: str) -> str:
    """What a dtype is computed in."""
    return "float64" if dtype == "float64" else "float32"


def exact(a: Array) -> Array:
    """An array of any dtype, without rounding."""
    return np.asarray(a).astype(np.float64).astype(L)


def spacing(a: Array, dtype: str) -> Array:
    """From |a| to the next number of that dtype."""
    exponent = np.frexp(np.abs(a))[1] - 1
    gap = np.ldexp(a.dtype.type(ULP[dtype]), np.where(np.isfinite(a) & (a != 0), exponent, 0))
    return np.maximum(np.where(a == 0, 0.0, gap), TINY[dtype])


def rounded(a: Array, dtype: str) -> Array:
    """a, rounded to the nearest number of that dtype, in extended precision still."""
    gap = spacing(a, dtype)
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(a), np.rint(a / gap) * gap, a)


def raised(z: Array, p: float) -> Array:
    if p == 1:
        return z
    if p == 2:
        return z * z
    return np.power(z, z.dtype.type(p))


def norm(z: Array, p: float) -> Array:
    """The p-norm of every row of z >= 0, as (rows, 1)."""
    top = z.max(axis=1, keepdims=True, initial=0)
    if p == math.inf:
        return top
    unit = np.where((top > 0) & np.isfinite(top), top, 1.0)
    with np.errstate(all="ignore"):
        total = raised(z / unit, p).sum(axis=1, keepdims=True)
        return np.where(np.isfinite(top), np.power(total, 1 / total.dtype.type(p)) * unit, top)


class Truth:
    """A batch in extended precision, and what follows from it without solving anything."""

    def __init__(self, x: Array, delta: Array, lower: Array, upper: Array, eps: Array, p: float, dtype: str) -> None:
        self.dtype, self.p = dtype, p
        self.given = exact(x)
        self.lower, self.upper = (np.broadcast_to(exact(b), self.given.shape) for b in (lower, upper))
        self.x = np.clip(self.given, self.lower, self.upper)
        self.delta, self.eps = exact(delta), np.asarray(eps, np.float64).astype(L).reshape(-1, 1)
        self.sign, self.size = np.sign(self.delta), np.abs(self.delta)
        self.moves = self.size > 0
        self.ahead = np.where(self.delta > 0, self.upper, np.where(self.delta < 0, self.lower, self.x))
        self.room = np.where(self.moves, np.abs(self.ahead - self.x), L(0))
        self.corner = np.where(self.moves, self.ahead, self.x)
        self.reach = norm(self.room, p)
        self.zero = ~self.moves.any(axis=1, keepdims=True)

    def moved(self, eta: Array) -> Array:
        """How far every element goes at a scale per row."""
        with np.errstate(all="ignore"):
            return np.where(self.moves, np.minimum(eta * self.size, self.room), 0.0)

    def norm_at(self, eta: Array) -> Array:
        """The norm at a scale per row, without rounding."""
        return norm(self.moved(eta), self.p)

    def last_break(self) -> Array:
        """The least scale at which everything that moves is clipped."""
        with np.errstate(all="ignore"):
            return np.where(self.moves, self.room / self.size, 0.0).max(axis=1, keepdims=True, initial=0)

    def stored_at(self, eta: Array, slack: float) -> Array:
        """How far elements go at a scale per row, as stored: pushed by `slack` working spacings, then rounded."""
        target = self.x + self.sign * self.moved(eta)
        target = target + slack * self.sign * spacing(target, working(self.dtype))
        stored = np.clip(rounded(target, self.dtype), self.lower, self.upper)
        return np.where(self.moves, np.maximum((stored - self.x) * self.sign, 0), 0.0)

    def in_float64(self) -> Truth:
        """The same with less digits and range, but more than enough of both for a narrower dtype; and in less time."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if getattr(value, "dtype", None) == L:
                setattr(other, name, value.astype(np.float64))
        return other

    def nearest(self, aim: Array, step: float) -> tuple[Array, Array]:
        """The norms of stored arrays on either side of `aim`, if scales are known up to `step`."""
        if self.dtype != "float64" and self.x.dtype == L:
            return self.in_float64().nearest(aim.astype(np.float64), step)
        top, least = (L(2) ** 16000, L(1e-4900)) if self.x.dtype == L else (2.0**1000, 1e-290)
        ends = []
        # Rounding on the way to the dtype may make the crossing come a little earlier, or later.
        for slack in (1, -1):
            high = np.maximum(np.minimum(self.last_break(), top), least)
            with np.errstate(all="ignore"):
                low = np.minimum(high, aim / np.maximum(norm(self.size, self.p), least)) / 2**40
                for _ in range(300):
                    middle = np.sqrt(low) * np.sqrt(high)
                    above = norm(self.stored_at(middle, slack), self.p) > aim
                    low, high = np.where(above, low, middle), np.where(above, middle, high)
                    if (high <= low * (1 + step / 4)).all():
                        break
            ends.append((low, high))
        (low, _), (_, high) = ends
        below, beyond = self.stored_at(low * (1 - step), -2), self.stored_at(high * (1 + step), 2)
        return norm(below, self.p), norm(beyond, self.p)

    def plain(self) -> Array:
        """clip(x + delta), as stored."""
        kind = DTYPES[working(self.dtype)]
        with np.errstate(all="ignore"):
            inside = exact((self.x.astype(kind) + self.delta.astype(kind)).astype(DTYPES[self.dtype]))
        return np.clip(inside, self.lower, self.upper)


def mp_solved(
    x: Array, delta: Array, lower: Array, upper: Array, eps: float, p: float, digits: int = 50
) -> tuple[Any, Any]:
    """Of one row: the scale, solved piece by piece between its sorted breakpoints, and the reach. By mpmath."""
    import mpmath as mp

    with mp.workdps(digits):
        rows = zip(*(np.asarray(a, np.float64).tolist() for a in (x, delta, lower, upper)), strict=True)
        moving = []
        for here, d, low, high in rows:
            if d:
                here = min(max(here, low), high)
                s = mp.mpf(high) - mp.mpf(here) if d > 0 else mp.mpf(here) - mp.mpf(low)
                moving.append((s / abs(mp.mpf(d)), s, abs(mp.mpf(d))))
        moving.sort()
        target, order = mp.mpf(eps), mp.mpf(p)
        if not moving:
            return mp.mpf(0), mp.mpf(0)
        if p == math.inf:
            reach = max(s for _, s, _ in moving)
            return min((target / d for _, s, d in moving if s >= target), default=moving[-1][0]), reach
        top = max(s for _, s, _ in moving)
        reach = top if top in (0, mp.inf) else top * sum((s / top) ** order for _, s, _ in moving) ** (1 / order)
        if target == 0:
            return mp.mpf(0), reach
        slopes = [mp.mpf(0)]
        for _, _, d in reversed(moving):
            slopes.append(slopes[-1] + d**order)
        missing = target**order
        start = mp.mpf(0)
        for (end, s, _), slope in zip(moving, reversed(slopes), strict=False):
            eta = max((missing / slope) ** (1 / order), start)
            if eta <= end:
                return eta, reach
            missing, start = missing - s**order, end
        return moving[-1][0], reach
