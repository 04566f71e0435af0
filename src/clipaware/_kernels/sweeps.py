"""One sweep over a row, by Numba: what the fast lane asks of a row's elements, boiled down to three numbers.

A sweep is a C function for each dtype, order of the norm and kind of bounds. Its caller hands over a ``FRAME`` with the
addresses of a row, or of a part of it, so that what decides on the next sweep (``fast.py``) is compiled once for all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import overload, register_jitable

from clipaware._kernels.formats import KINDS, to_format, to_format_in_range
from clipaware._kernels.loops import (
    FRAME_POINTER,
    LANE,
    ORDERS,
    WIDE_LANE,
    at,
    bits_of,
    clamped,
    compiled_for_c,
    cut,
    float_of,
    loop,
    nothing_of,
    order_of,
    pick,
    plus,
    pointer_to,
    raised,
    step,
    type_of,
)

# What a sweep is for, and the three numbers that it finds (F and A are those of `_sums`; s is a room):
#
#                            one                         two          three
#   FIRST, FIRST_SAMPLE      F                           A            sum of delta^2, infinite or NaN if a value is bad
#   SUMS, SAMPLE, WIDE_SUMS  F                           A            0
#   TRY, WRITE, WIDE_WRITE   sum of |v - x|^p            0            0
#   CORNER                   sum of s^p                  largest s    last breakpoint, the largest s/|delta|
#   FIRST, for p = inf       largest |delta| of s >= K   0            largest |delta|, infinite or NaN if a value is bad
#   others, for p = inf      a maximum in place of the sum
#   CAREFUL_UNROUNDED        norm                        d log(norm)/d log(K)
#   CAREFUL_STORED           norm                        -1
#   LOOK                     largest |delta|             largest s    sum of delta^2, NaN if a value is bad
#   EXTREMES                 last breakpoint             largest |delta| of s >= K
FIRST_SAMPLE, SAMPLE, FIRST, SUMS, WIDE_SUMS, TRY, WRITE, WIDE_WRITE, CORNER = range(9)
# The same for the careful lane (`careful.py`). The first two find a norm instead of sums.
CAREFUL_UNROUNDED, CAREFUL_STORED, LOOK, EXTREMES = range(-1, -5, -1)

SAMPLE_RUN, SAMPLE_RUNS = 64, 64  # neighbours in each run of a sample, and about how many runs it has at most


@register_jitable
def sample_stride(n):
    """How far apart the runs of a sample are."""
    return max(LANE, n // SAMPLE_RUNS)


@step
def added(total, lost, term):
    """A sum, and what rounding takes from it: long rows of equal numbers have thousands of equal terms."""
    grown = total + term
    part = grown - total
    return grown, lost + ((total - (grown - part)) + (term - part))


# --- sweeps over a lane -----------------------------------------------------------------------------------------------


@loop
def _sums(x, delta, a, b, K, p, order, nothing):
    """Of z = clip(K*delta, a - x, b - x): the sum of |z|^p, and of those that are not at their bounds."""
    F, A, none = nothing, nothing, nothing
    for i in range(x.size):
        here, move = x[i], K * delta[i]
        low, high = at(a, i) - here, at(b, i) - here
        z = clamped(move, low, high)
        size = type_of(none)(raised(abs(z), p, order))
        F = plus(F, size)
        A = plus(A, pick(z == move, size, none))
    return F, A


@loop
def _sums_and_squares(x, delta, a, b, K, p, order, nothing):
    """The same, and the sum of delta^2: infinite or NaN if a value is, or if an x is outside its bounds."""
    F, A, none = nothing, nothing, nothing
    zero, far = x.dtype.type(0), x.dtype.type(np.inf)
    squares = zero
    for i in range(x.size):
        here, towards = x[i], delta[i]
        move, low, high = K * towards, at(a, i) - here, at(b, i) - here
        z = clamped(move, low, high)
        size = type_of(none)(raised(abs(z), p, order))
        F = plus(F, size)
        A = plus(A, pick(z == move, size, none))
        squares = plus(squares, pick((low <= zero) & (high >= zero), towards * towards, far))
    return F, A, squares


@loop
def _largest(x, delta, a, b, enough):
    """For p = inf: the largest |delta| of what has enough room, and of all. Of the latter, infinite or NaN means that a
    value is, or that an x is outside its bounds."""
    zero, far = x.dtype.type(0), x.dtype.type(np.inf)
    found, top, wrong = bits_of(zero), bits_of(zero), zero
    for i in range(x.size):
        here, towards = x[i], delta[i]
        low, high = at(a, i), at(b, i)
        s, d = pick(towards > 0, high - here, here - low), abs(towards)
        u, w = bits_of(pick(s >= enough, d, zero)), bits_of(d)
        found, top = pick(found > u, found, u), pick(top > w, top, w)
        wrong = plus(wrong, pick((here >= low) & (here <= high), here - here, far))
    return float_of(found), float_of(top) + wrong


@loop
def _write(x, delta, a, b, out, K, p, order, kind):
    """v = clip(x + K*delta) as it is stored, and the sum of |v - x|^p. NaN stays NaN.

    The powers are added up in float64: in float32, rounding errors of equal powers would be equal, too, and not average
    out.
    """
    total = 0.0
    for i in range(x.size):
        here = x[i]
        v = to_format(clamped(here + K * delta[i], at(a, i), at(b, i)), kind)
        out[i] = v
        total = plus(total, raised(abs(v - here), p, order))
    return total


@loop
def _try(x, delta, a, b, K, p, order, kind, nothing):
    """The sum of |v - x|^p of the same array, which is not written, in the dtype of `nothing`."""
    total = nothing
    for i in range(x.size):
        here = x[i]
        v = to_format_in_range(clamped(here + K * delta[i], at(a, i), at(b, i)), kind)
        total = plus(total, raised(abs(v - here), p, order))
    return total


@loop
def _measure(x, v, p, order):
    """The sum of |v - x|^p in float64: at_most leaves no room for other sums."""
    total = 0.0
    for i in range(x.size):
        total = plus(total, raised(abs(np.float64(v[i]) - np.float64(x[i])), p, order))
    return total


@loop
def _furthest(x, v):
    """The largest |v - x|, in float64; NaN if there is one."""
    found = bits_of(0.0)
    for i in range(x.size):
        u = bits_of(abs(np.float64(v[i]) - np.float64(x[i])))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _rooms(x, delta, a, b, p, order):
    """Of what moves: the sum of s^p, the largest s, and the last breakpoint max s/|delta|, in float64."""
    total, largest, last = 0.0, bits_of(0.0), bits_of(0.0)
    for i in range(x.size):
        towards, here = delta[i], np.float64(x[i])
        s = abs(np.float64(pick(towards > 0, at(b, i), at(a, i))) - here)
        s, d = pick(towards != 0, s, 0.0), abs(np.float64(towards))
        total = plus(total, raised(s, p, order))
        u, w = bits_of(pick(towards != 0, s / d, 0.0)), bits_of(s)
        last, largest = pick(last > u, last, u), pick(largest > w, largest, w)
    return total, float_of(largest), float_of(last)


@loop
def _write_corner(x, delta, a, b, out):
    for i in range(out.size):
        ahead = pick(delta[i] > 0, at(b, i), at(a, i))
        out[i] = pick(delta[i] != 0, ahead, x[i])


# --- a sweep over a row, or a part of it ------------------------------------------------------------------------------


@step
def _rare_sweep(what, x, delta, a, b, out, K, p, order, kind):
    """What a sweep finds in a lane, for a finite p and sweeps that few rows need."""
    if what == WIDE_SUMS:
        F, A = _sums(x, delta, a, b, K, p, order, 0.0)
        return F, A, 0.0
    if what == CORNER:
        total, largest, last = _rooms(x, delta, a, b, p, order)
        _write_corner(x, delta, a, b, out)
        return total, largest, last
    _write(x, delta, a, b, out, K, p, order, kind)
    return _measure(x, out, p, order), 0.0, 0.0


@step
def _sweep_for_inf(what, x, delta, a, b, out, K, order, kind):
    """What a sweep finds in a lane, for p = inf: maxima."""
    if what == FIRST:
        found, top = _largest(x, delta, a, b, K)  # K is the room that an element needs
        return np.float64(found), 0.0, np.float64(top)
    if what == CORNER:
        _, largest, last = _rooms(x, delta, a, b, np.inf, order)
        _write_corner(x, delta, a, b, out)
        return largest, largest, last
    _write(x, delta, a, b, out, K, np.inf, order, kind)
    return _furthest(x, out), 0.0, 0.0


def bound_at(address, x, length):
    """A row's bound at an address: one number if `length` has length 1, or one for each element of x."""


@overload(bound_at)
def _bound_at(address, x, length):
    if length.count == 1:
        return lambda address, x, length: carray(pointer_to(address), 1, x.dtype)[0]
    return lambda address, x, length: carray(pointer_to(address), x.size, x.dtype)


# What a sweep is compiled for are numbers and tuples of them, not functions: Numba's cache would not know it again.


def _sweep_by_sums(F: Any, order: Any, length: Any, kind: Any) -> Any:
    """A sweep for a finite p. It finds two sums, and as the third number a sum or a maximum."""
    written_lane = WIDE_LANE if F is np.float32 else LANE

    def sweep(what, K, pointer):
        frame = carray(pointer, 1)[0]
        n, p = frame.n, frame.p
        x, delta = carray(pointer_to(frame.x), n, F), carray(pointer_to(frame.delta), n, F)
        lower, upper = bound_at(frame.lower, x, length), bound_at(frame.upper, x, length)
        out, K, nothing = carray(pointer_to(frame.out), n if frame.write else 0, F), F(K), nothing_of(F(0), order)
        one, lost, two, three = 0.0, 0.0, 0.0, 0.0
        # A loop for each, since one for all would have to choose again in every lane.
        if what == SUMS or what == SAMPLE:
            stride, run = (LANE, LANE) if what == SUMS else (sample_stride(n), SAMPLE_RUN)
            for i in range(0, n, stride):
                j = min(i + run, n)
                u, w = _sums(x[i:j], delta[i:j], cut(lower, i, j), cut(upper, i, j), K, p, order, nothing)
                one, lost = added(one, lost, u)
                two += w
        elif what == FIRST or what == FIRST_SAMPLE:
            stride, run = (LANE, LANE) if what == FIRST else (sample_stride(n), SAMPLE_RUN)
            for i in range(0, n, stride):
                j = min(i + run, n)
                low, high = cut(lower, i, j), cut(upper, i, j)
                u, w, y = _sums_and_squares(x[i:j], delta[i:j], low, high, K, p, order, nothing)
                one, lost = added(one, lost, u)
                two, three = two + w, three + y
        elif what == TRY:
            for i in range(0, n, LANE):
                j = min(i + LANE, n)
                u = _try(x[i:j], delta[i:j], cut(lower, i, j), cut(upper, i, j), K, p, order, kind, nothing)
                one, lost = added(one, lost, u)
        elif what == WRITE:
            for i in range(0, n, written_lane):
                j = min(i + written_lane, n)
                u = _write(x[i:j], delta[i:j], cut(lower, i, j), cut(upper, i, j), out[i:j], K, p, order, kind)
                one, lost = added(one, lost, u)
        else:
            for i in range(0, n, LANE):
                j = min(i + LANE, n)
                low, high = cut(lower, i, j), cut(upper, i, j)
                u, w, y = _rare_sweep(what, x[i:j], delta[i:j], low, high, out[i:j], K, p, order, kind)
                one, lost = added(one, lost, u)
                two, three = two + w, max(three, y)
        frame.one, frame.two, frame.three = one + lost, two, three

    return sweep


def _sweep_by_maxima(F: Any, order: Any, length: Any, kind: Any) -> Any:
    """A sweep for p = inf. It finds maxima."""

    def sweep(what, K, pointer):
        frame = carray(pointer, 1)[0]
        n = frame.n
        x, delta = carray(pointer_to(frame.x), n, F), carray(pointer_to(frame.delta), n, F)
        lower, upper = bound_at(frame.lower, x, length), bound_at(frame.upper, x, length)
        out = carray(pointer_to(frame.out), n if frame.write else 0, F)
        one, two, three = 0.0, 0.0, 0.0
        for i in range(0, n, LANE):
            j = min(i + LANE, n)
            low, high = cut(lower, i, j), cut(upper, i, j)
            u, w, y = _sweep_for_inf(what, x[i:j], delta[i:j], low, high, out[i:j], F(K), order, kind)
            # Not by max(): NaN stays NaN.
            one = u if u > one or u != u else one
            two = w if w > two or w != w else two
            three = y if y > three or y != y else three
        frame.one, frame.two, frame.three = one, two, three

    return sweep


def sweep_for(dtype: Any, p: float, bounds_are_arrays: bool, rounded: int) -> Any:
    """The compiled sweep, whose ``.address`` compiled code calls and whose ``.ctypes`` Python does."""
    return _compiled(dtype.type, order_of(p), (0, 0) if bounds_are_arrays else (0,), KINDS[rounded])


@cache
def _compiled(F: Any, order: Any, length: Any, kind: Any) -> Any:
    """One for all p of an order."""
    make = _sweep_by_maxima if order == ORDERS[np.inf] else _sweep_by_sums
    return compiled_for_c(types.void(types.int64, types.float64, FRAME_POINTER), make(F, order, length, kind))
