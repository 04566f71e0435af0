"""The careful lane: any row whatsoever, by the definition itself. The one text of the algorithm, in NumPy.

What a user holds is the array as stored. Element by element, ``|round(clip(x + K*delta)) - x|`` never decreases with
K, so its norm is a step function of K that never decreases, and the array nearest to eps is the better of two
neighbouring K. The scale eta is found in the same way, with the norm before rounding. Both are searched for over the
bit patterns of float64, which are in the order of the numbers: halving an interval of them ends after 64 tries at any
scale. A tangent's step from a guess makes most searches shorter, and is never trusted.

A row is scaled by exact powers of two, eps to about 1 and the largest |delta| to about 2^500, so that nothing
overflows. Rows are taken in groups, since all that is derived from them takes many times their memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from clipaware._problem import (
    AT_ZERO,
    DOUBLE,
    HELD,
    REGULAR,
    SINGLE,
    SLACK,
    UNREACHABLE,
    ZERO,
    Problem,
)

Array = Any

GROUP = 2**16  # elements that are solved together
# The largest |delta| is scaled to this power of two, since smaller elements may need a far larger K. What is more than
# 450 orders of magnitude smaller counts as 0.
TOP = 500
MOST_TRIES = 192  # up to 128 steps until there is a K on either side, then 64 halvings
BITS_OF_INFINITY = int(np.float64(np.inf).view(np.int64))
LARGEST = float(np.finfo(np.float64).max)


def solve(problem: Problem, mode: str, write: bool, dtype: str) -> tuple[Array, Array, Array]:
    """v (None unless `write`), rounded to that dtype, eta and status. Rows that make no sense are NaN."""
    rows, n = problem.x.shape
    out = np.empty((rows, n), problem.x.dtype) if write else None
    eta, status = np.empty((rows, 1)), np.empty((rows, 1), np.int64)
    with np.errstate(all="ignore"):
        for part, some in groups_of(problem):
            row = Scaled(some, dtype)
            K, eta[part], status[part] = row.solved(mode)
            if out is not None:
                out[part] = row.written(K, status[part], mode)
    return out, eta, status


def groups_of(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """The problem, some rows at a time."""
    rows, n = problem.x.shape
    height = max(1, GROUP // max(n, 1))
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        yield part, Problem.of((a if len(a) == 1 < rows else a[part] for a in problem.arrays()), problem.p)


def reach(problem: Problem) -> Array:
    """The norm at which everything that moves is clipped. Rows that make no sense are NaN."""
    found = np.empty((len(problem.x), 1))
    with np.errstate(all="ignore"):
        for part, some in groups_of(problem._replace(eps=np.ones((1, 1)))):
            row = Scaled(some, "float64")
            found[part] = np.where(row.bad, np.nan, np.ldexp(norm_of(row.room, row.p), -row.unit))
    return found


def summary(problem: Problem, v: Array) -> tuple[Array, Array, Array]:
    """Of v: its norm, the norm that naive scaling has instead, and the share of elements at their bounds."""
    found = np.empty((3, len(problem.x), 1))
    with np.errstate(all="ignore"):
        for part, some in groups_of(problem):
            row = Scaled(some, "float64" if problem.x.dtype == np.float64 else "float32")
            mine = v[part].astype(np.float64)
            naive = np.where(row.still, 0.0, row.goal / norm_of(row.size, row.p))
            found[0, part] = norm_of(abs(mine - row.x), row.p)
            found[1, part] = np.ldexp(row.norm_at(naive), -row.unit)
            found[2, part] = ((mine == row.ahead) & (row.size > 0)).mean(axis=1, keepdims=True)
    return found[0], found[1], found[2]


def stored(v: Array, dtype: str) -> Array:
    """v as it is stored in that dtype, in float64. Halves are rounded from float32, as in the fast lane."""
    if dtype == "float64":
        return v
    v = v.astype(np.float32)
    if dtype != "bfloat16":
        return v.astype(dtype).astype(np.float64)
    # NumPy has no bfloat16, which is the first half of a float32.
    bits = v.view(np.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    return np.where(np.isfinite(v), rounded.astype(np.int32).view(np.float32), v).astype(np.float64)


def clipped(v: Array, lower: Array, upper: Array) -> Array:
    """v inside its bounds. Of a zero beside another, np.clip takes one or the other sign by its place in memory."""
    return np.where(v < lower, lower, np.where(v > upper, upper, v))


def norm_of(z: Array, p: float) -> Array:
    """The p-norm of every row, in units of its largest element, so that no power overflows."""
    top = z.max(axis=1, keepdims=True)
    if p == math.inf:
        return top
    unit = np.where((top > 0) & (top < np.inf), top, 1.0)
    z = z / unit
    powers = z * z if p == 2 else z if p == 1 else z**p
    return np.where(top < np.inf, unit * powers.sum(axis=1, keepdims=True) ** (1 / p), top)


def neighbours(
    norm_at: Callable[[Array], Array], aim: Array, K: Array, share_at: Callable[[Array], Array], close: float
) -> tuple[Array, Array]:
    """Two neighbouring K: the last whose norm is at most `aim`, and the next; or one K twice, whose norm is `close`.

    ``norm_at(K)`` never decreases. ``share_at(K)`` is d log(norm)/d log(K), or a guess at it. Numbers are compared, and
    intervals halved, by their bit patterns. As long as there is no K on a side, `low` is 0 or `high` that of infinity.
    """
    low, high, bits = np.zeros(aim.shape, np.int64), np.full(aim.shape, BITS_OF_INFINITY), K.view(np.int64)
    for count in range(MOST_TRIES):
        K = bits.view(np.float64)
        off = norm_at(K) / aim - 1
        exact, under = abs(off) <= close, off <= 0
        low, high = np.where(exact | under, bits, low), np.where(exact | ~under, bits, high)
        if (high - low <= 1).all():
            break
        # Until there are two sides: a tangent's step, and a little more each time that it was too short.
        step, more = np.clip(off / share_at(K), -8.0, 8.0), 2.0 ** (2 * count - 52)
        outward = np.minimum(np.where(under, K * (1 - step + more), K / (1 + step + more)), LARGEST)
        bits = np.where((low > 0) & (high < BITS_OF_INFINITY), low + (high - low) // 2, outward.view(np.int64))
        bits = np.where(high - low <= 1, low, np.clip(bits, low + 1, high - 1))
    return low.view(np.float64), np.minimum(high, BITS_OF_INFINITY - 1).view(np.float64)


class Scaled:
    """Some rows in float64, in exact units of eps and of the largest |delta|.

    Values of a `bad` row make no sense, and in a `still` row nothing is to move. `ahead` is the bound that delta points
    to, `room` the distance to it, `size` is |delta| and `goal` is eps. The unit of `goal` and `room` is 2^-unit, and
    that of `delta` and `size` is 2^-down.
    """

    def __init__(self, problem: Problem, dtype: str) -> None:
        # In C order, so that NumPy adds up rows by halves, which keeps rounding errors small.
        x, delta, eps, lower, upper = (np.ascontiguousarray(a, np.float64) for a in problem.arrays())
        self.p, self.dtype, self.numerics = problem.p, dtype, DOUBLE if dtype == "float64" else SINGLE
        top = abs(delta).max(axis=1, keepdims=True)
        eps = np.broadcast_to(eps, top.shape)
        inside = clipped(x, lower, upper)
        finite = (np.isfinite(x) & np.isfinite(inside)).all(axis=1, keepdims=True)
        finite &= (top < np.inf) & (eps >= 0) & (eps < np.inf)
        self.bad = ~(finite & (lower <= upper).all(axis=1, keepdims=True))
        self.is_zero, self.at_zero = top <= 0, eps < self.numerics.least
        self.still = self.is_zero | self.at_zero | self.bad
        self.lower, self.upper = np.where(self.bad, 0.0, lower), np.where(self.bad, 0.0, upper)
        self.x = np.where(self.bad, 0.0, inside)
        # x*2^unit and delta*2^down: the exponents that bring eps and the largest |delta| to 1 and 2^TOP. What vanishes
        # there counts as 0. An eps that is far out of reach, being more than the sum of all rooms, takes the unit of
        # the largest room instead.
        self.down = TOP - np.frexp(np.where(self.still, 1.0, top))[1]
        self.unscaled_delta = np.where(self.bad, 0.0, delta)
        self.delta = np.ldexp(self.unscaled_delta, self.down)
        self.ahead = np.where(self.delta > 0, self.upper, np.where(self.delta < 0, self.lower, self.x))
        room = abs(self.ahead - self.x)
        largest = room.max(axis=1, keepdims=True)
        eps = np.where(self.still, 1.0, eps)
        self.unit = -np.frexp(np.where((largest <= 0) | (eps <= largest * x.shape[1]), eps, largest))[1]
        self.goal, self.size, self.room = np.ldexp(eps, self.unit), abs(self.delta), np.ldexp(room, self.unit)

    def norm_at(self, K: Array) -> Array:
        """The norm before rounding, in the units of `goal`."""
        return norm_of(np.where(self.size > 0, np.minimum(K * self.size, self.room), 0.0), self.p)

    def array_at(self, K: Array, held: Any = False) -> Array:
        """clip(x + K*delta) as stored. Where eta is `held` at 1, delta itself is added: its K may overflow."""
        move = np.where(held, self.unscaled_delta, np.ldexp(K * self.delta, -self.unit))
        return stored(clipped(self.x + move, self.lower, self.upper), self.dtype)

    def stored_norm_at(self, K: Array, held: Any = False) -> Array:
        """The norm of the array as stored, in the units of `goal`."""
        moved = abs(self.array_at(K, held) - self.x)
        return norm_of(np.where(self.size > 0, np.ldexp(moved, self.unit), 0.0), self.p)

    def share_at(self, K: Array) -> Array:
        """d log(norm)/d log(K): the share of norm^p that is not clipped; for p = inf, 1."""
        if self.p == math.inf:
            return np.ones_like(K)
        free = (K * self.size <= self.room) & (self.size > 0)
        part = norm_of(np.where(free, K * self.size, 0.0), self.p)
        return np.clip((part / np.maximum(self.norm_at(K), 1e-300)) ** self.p, 1e-6, 1.0)

    def solved(self, mode: str) -> tuple[Array, Array, Array]:
        """The scale of each row in these units (K) and in delta's own (eta), and the status."""
        reach = norm_of(self.room, self.p)
        # Up to 8 ulp beyond the reach count as reachable; for p = inf one element's room decides, up to 2.
        slack = (2 if self.p == math.inf else 8) * self.numerics.ulp
        unreachable = reach < self.goal * (1 - slack)
        last = np.where(self.size > 0, self.room / self.size, 0.0).max(axis=1, keepdims=True)
        # Beyond the last breakpoint nothing grows, though rounding may leave the norm short of its reach.
        last = np.minimum(last, 1e300)
        K: Array = np.where(unreachable, last, np.minimum(self.root(reach, last, slack), last))
        one = np.ldexp(1.0, self.unit - self.down)  # the K of delta as it came
        held: Array = np.zeros_like(self.still)
        if mode == "at_most":
            held = (K > one) | (unreachable & (K >= one))
        elif mode == "at_least":
            held = (K < one) & ~unreachable
        held = held & ~self.still
        status = np.where(held, HELD, np.where(unreachable, UNREACHABLE, REGULAR))
        status = np.where(self.is_zero | self.bad, ZERO, np.where(self.at_zero, AT_ZERO, status))
        K = np.where(held, one, K)
        eta = np.where(self.bad, np.nan, np.where(self.still, 0.0, np.ldexp(K, self.down - self.unit)))
        return K, np.where(held, 1.0, eta), status

    def root(self, reach: Array, last: Array, slack: float) -> Array:
        """The K at which the norm before rounding is eps."""
        if self.p == math.inf:
            # The largest element that can move by eps does, and no other one moves further.
            return self.goal / np.where(self.room >= self.goal * (1 - slack), self.size, 0.0).max(axis=1, keepdims=True)
        aim = np.maximum(np.minimum(self.goal, reach), 1e-300)
        naive = self.goal / np.maximum(norm_of(self.size, self.p), 1e-300)
        start = np.clip(naive, 1e-300, np.maximum(last, 1e-300))
        close = 1e-9 if self.numerics is SINGLE else 2.0**-52
        below, above = neighbours(self.norm_at, aim, start, self.share_at, close)
        return np.where(self.norm_at(below) < aim, above, below)

    def written(self, K: Array, status: Array, mode: str) -> Array:
        """An array whose norm as stored is close to eps, or the nearest; with `at_most`, the nearest below a margin."""
        limit = self.goal * (1 - SLACK) if mode == "at_most" else self.goal
        searched, held = status == REGULAR, status == HELD
        if mode == "at_most":
            searched |= (held | (status == UNREACHABLE)) & (self.stored_norm_at(K, held) > limit)
        if searched.any():
            close = 0.0 if mode == "at_most" else self.numerics.close / 2
            share = self.share_at(K)
            below, above = neighbours(self.stored_norm_at, limit, np.clip(K, 1e-300, 1e300), lambda _: share, close)
            if mode != "at_most":
                nearer = limit - self.stored_norm_at(below) <= self.stored_norm_at(above) - limit
                below = np.where(nearer, below, above)
            K = np.where(searched, below, K)
        v = self.array_at(K, held & ~searched)
        v = np.where((status == UNREACHABLE) & ~searched, self.ahead, np.where(self.still, self.x, v))
        return np.where(self.bad, np.nan, v)
