"""The norm after clipping as a function of the scale, and Newton's way to a size on it. See ``docs/math.md``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any

MOST = 2**19  # elements that are looked at; of more, as many are drawn
LEVELS = 1021  # of the room, for p = inf: the 256 of 8 bits are among them
PASSES = 64  # the most that the solver takes


class Curve:
    """``||clip(x + eta*delta, a, b) - x||_p`` by eta: breakpoints in order, and sums over those before and after each.

    Of a long array it is the curve of a random sample, scaled up; for ``p = inf`` that of all of it, with rooms rounded
    to `LEVELS` values.

    Parameters
    ----------
    size, room
        |delta| and the way to the bound, of every element; float arrays.
    p
        Order of the norm.

    Attributes
    ----------
    top
        The largest |delta|. Scales are counted as ``eta*top`` throughout, so that no power overflows.

    Examples
    --------
    >>> import numpy as np
    >>> curve = Curve(np.array([1.0, 1.0, 2.0]), np.array([0.8, 0.5, 0.1]), p=2)
    >>> scales = curve.newton(0.6)
    >>> [round(scale, 4) for scale in scales]
    [0.0, 0.4899, 0.8367]
    >>> float(curve.norm(scales[-1]).round(9))
    0.6
    """

    def __init__(self, size: Array, room: Array, p: float) -> None:
        size, room = size.reshape(-1), room.reshape(-1)
        self.p, self.sampled = p, size.size > MOST
        self.top = float(size.max(initial=0)) or 1.0
        weight = 1.0
        if self.sampled and p == math.inf:
            size, room = _largest_by_room(size, room)
        elif self.sampled:
            drawn = np.random.default_rng(0).integers(size.size, size=MOST)
            weight, size, room = size.size / MOST, size[drawn], room[drawn]
        size, room = size.astype(np.float64) / self.top, room.astype(np.float64)
        # What is smaller has no power any more, and hardly moves.
        size, room = size[size > 1e-100], room[size > 1e-100]
        order = np.argsort(room / size)
        self.size, self.room = size[order], room[order]
        self.breaks = self.room / self.size
        # Of the first k, which are clipped, what they contribute; of the others, what a unit of eta^p brings.
        if p == math.inf:
            self._clipped = np.maximum.accumulate(np.append(0.0, self.room))
            self._free = np.append(np.maximum.accumulate(self.size[::-1])[::-1], 0.0)
        else:
            self._clipped = weight * np.append(0.0, np.cumsum(self.room**p))
            self._free = weight * np.append(np.cumsum(self.size[::-1] ** p)[::-1], 0.0)
        self.last = float(self.breaks[-1]) if self.breaks.size else 0.0  # from here on everything is clipped

    def sums(self, scale: Any) -> tuple[Array, Array]:
        """Of the linear piece that begins at a scale, or contains it: its value at 0 and its slope, in ``scale**p``."""
        k = np.searchsorted(self.breaks, scale, "right")
        return self._clipped[k], self._free[k]

    def power(self, scale: Any) -> Array:
        """The p-th power of the norm, piecewise linear in ``scale**p``; for ``p = inf`` the norm itself."""
        clipped, free = self.sums(scale)
        if self.p == math.inf:
            return np.maximum(clipped, scale * free)
        # Not the power of the scale by itself, which may overflow.
        return clipped + (scale * free ** (1 / self.p)) ** self.p

    def norm(self, scale: Any) -> Array:
        power = self.power(scale)
        return power if self.p == math.inf else power ** (1 / self.p)

    def newton(self, eps: float) -> list[float]:
        """The scales that Newton's method goes through from 0 on. The last one solves, or clips everything. For
        ``p = inf`` there is a closed form: of the elements with room enough, the one that moves fastest decides."""
        if self.p == math.inf:
            wide = self.room >= eps * (1 - 1e-12)
            return [0.0, eps / float(self.size[wide].max()) if wide.any() else self.last]
        # More than twice of all there is asks for the same, and has a power.
        scales, target = [0.0], min(eps, 2 * float(self.norm(self.last))) ** self.p
        while len(scales) <= PASSES:
            clipped, free = self.sums(scales[-1])
            if free <= 0 or target <= clipped:
                break
            with np.errstate(over="ignore"):
                step = min(float((target - clipped) / free) ** (1 / self.p), self.last)
            if step <= scales[-1] * (1 + 1e-14):
                break
            scales.append(step)
        return scales


def _largest_by_room(size: Array, room: Array) -> tuple[Array, Array]:
    """Of elements with the same room only the one that moves fastest matters for the largest move."""
    widest = float(room.max(initial=0)) or 1.0
    level = np.rint(room * ((LEVELS - 1) / widest)).astype(np.int64)
    largest = np.zeros(LEVELS, size.dtype)
    np.maximum.at(largest, level, size)
    return largest, np.arange(LEVELS) * (widest / (LEVELS - 1))
