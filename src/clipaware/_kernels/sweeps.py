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

from clipaware._kernels.formats import ANY_KIND, KINDS, OWN, to_format
from clipaware._kernels.loops import (
    ANY_ORDER,
    FRAME_POINTER,
    LANE,
    ORDERS,
    at,
    bits_of,
    compiled_for_c,
    cut,
    float_of,
    loop,
    nothing_of,
    pick,
    plus,
    pointer_to,
    raised,
    step,
    type_of,
)

# What a sweep is for.
LOOK, SAMPLE, SUMS, WIDE_SUMS, WRITE, WIDE_WRITE, CORNER, INSIDE = range(8)

SAMPLE_RUN, SAMPLE_RUNS = 64, 64  # a sample has so many neighbours in each of at most about so many places


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
def _look(x, delta, a, b):
    """The sum of delta^2, whatever p is, and how many x are not inside their bounds, NaN if one is infinite."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    total, wrong = zero, zero
    for i in range(x.size):
        here = x[i]
        total = plus(total, delta[i] * delta[i])
        wrong = plus(wrong, pick((here >= at(a, i)) & (here <= at(b, i)), here - here, one))
    return total, wrong


@loop
def _sums(x, delta, a, b, K, p, order, nothing):
    """Of z = clip(K*delta, a - x, b - x): the sum of |z|^p, and of those that are not at their bounds."""
    F, A, none = nothing, nothing, nothing
    for i in range(x.size):
        here, move = x[i], K * delta[i]
        low, high = at(a, i) - here, at(b, i) - here
        z = pick(move < low, low, move)
        z = pick(z > high, high, z)
        size = type_of(none)(raised(abs(z), p, order))
        F = plus(F, size)
        A = plus(A, pick(z == move, size, none))
    return F, A


@loop
def _look_for_largest(x, delta, a, b, enough):
    """For p = inf: the largest |delta| of what has enough room, of all, and how many x are not inside their bounds."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    found, top, outside = bits_of(zero), bits_of(zero), zero
    for i in range(x.size):
        here, towards = x[i], delta[i]
        low, high = at(a, i), at(b, i)
        s, d = pick(towards > 0, high - here, here - low), abs(towards)
        u, w = bits_of(pick(s >= enough, d, zero)), bits_of(d)
        found, top = pick(found > u, found, u), pick(top > w, top, w)
        outside = plus(outside, pick((here >= low) & (here <= high), here - here, one))
    return float_of(found), float_of(top), outside


@loop
def _write(x, delta, a, b, out, K, p, order, format, kind):
    """v = clip(x + K*delta) as it is stored, and the sum of |v - x|^p. NaN stays NaN.

    The powers are added up in float64: in float32, rounding errors of equal powers would be equal, too, and not average
    out.
    """
    total = 0.0
    for i in range(x.size):
        here = x[i]
        low, high = at(a, i), at(b, i)
        v = here + K * delta[i]
        v = pick(v < low, low, v)
        v = to_format(pick(v > high, high, v), format, kind)
        out[i] = v
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
    """Of what moves: the sum of s^p, the last breakpoint max s/|delta|, and the largest s, in float64."""
    total, last, largest = 0.0, bits_of(0.0), bits_of(0.0)
    for i in range(x.size):
        towards, here = delta[i], np.float64(x[i])
        s = abs(np.float64(pick(towards > 0, at(b, i), at(a, i))) - here)
        s, d = pick(towards != 0, s, 0.0), abs(np.float64(towards))
        total = plus(total, raised(s, p, order))
        u, w = bits_of(pick(towards != 0, s / d, 0.0)), bits_of(s)
        last, largest = pick(last > u, last, u), pick(largest > w, largest, w)
    return total, float_of(last), float_of(largest)


@loop
def _write_corner(x, delta, a, b, out):
    for i in range(out.size):
        ahead = pick(delta[i] > 0, at(b, i), at(a, i))
        out[i] = pick(delta[i] != 0, ahead, x[i])


@loop
def _clip_inside(x, a, b):
    """Clip x itself, which is a copy, into its bounds. NaN stays NaN, and infinity becomes NaN."""
    for i in range(x.size):
        here = x[i]
        inside = pick(here < at(a, i), at(a, i), here)
        inside = pick(inside > at(b, i), at(b, i), inside)
        x[i] = pick(here - here == 0, inside, here - here)


# --- a sweep over a row, or a part of it ------------------------------------------------------------------------------


def _written(x, delta, a, b, out, K, p, order, format, kind):
    """Call `_write` for the format that the sweep was compiled for, or in float64 for the one that `format` says."""


@overload(_written)
def _choose_write(x, delta, a, b, out, K, p, order, format, kind):
    if kind.count < len(ANY_KIND):
        return lambda x, delta, a, b, out, K, p, order, format, kind: _write(
            x, delta, a, b, out, K, p, order, format, kind
        )

    def when_run(x, delta, a, b, out, K, p, order, format, kind):
        if format == OWN:
            return _write(x, delta, a, b, out, K, p, order, format, (0,))
        return _write(x, delta, a, b, out, K, p, order, format, kind)

    return when_run


@step
def _rarely_swept(what, x, delta, a, b, out, K, p, order, format, kind):
    """What a sweep finds in a lane, for a finite p and sweeps that few rows need."""
    if what == WIDE_SUMS:
        F, A = _sums(x, delta, a, b, K, p, order, 0.0)
        return F, A, 0.0
    if what == CORNER:
        total, last, largest = _rooms(x, delta, a, b, p, order)
        _write_corner(x, delta, a, b, out)
        return total, largest, last
    if what == INSIDE:
        _clip_inside(x, a, b)
        return 0.0, 0.0, 0.0
    _written(x, delta, a, b, out, K, p, order, format, kind)
    return _measure(x, out, p, order), 0.0, 0.0


@step
def _largest_swept(what, x, delta, a, b, out, K, p, order, format, kind):
    """What a sweep finds in a lane for p = inf: the largest |delta| with room, and of all; or the largest |v - x|."""
    if what == LOOK:
        found, top, wrong = _look_for_largest(x, delta, a, b, K)  # K is the room that an element needs
        return np.float64(found), np.float64(top), np.float64(wrong)
    if what == CORNER:
        _, last, largest = _rooms(x, delta, a, b, p, order)
        _write_corner(x, delta, a, b, out)
        return largest, largest, last
    if what == INSIDE:
        _clip_inside(x, a, b)
        return 0.0, 0.0, 0.0
    _written(x, delta, a, b, out, K, p, order, format, kind)
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
    """A sweep for a finite p. It finds sums, and as the third number a maximum."""

    def sweep(what, K, pointer):
        frame = carray(pointer, 1)[0]
        n, p, format, write = frame.n, frame.p, frame.rounded, frame.write
        x, delta = carray(pointer_to(frame.x), n, F), carray(pointer_to(frame.delta), n, F)
        lower, upper = bound_at(frame.lower, x, length), bound_at(frame.upper, x, length)
        out, K, nothing = carray(pointer_to(frame.out), n if write else 0, F), F(K), nothing_of(F(0), order)
        one, lost, two, three = 0.0, 0.0, 0.0, 0.0
        if what == SUMS or what == SAMPLE:
            stride, run = (LANE, LANE) if what == SUMS else (sample_stride(n), SAMPLE_RUN)
            for i in range(0, n, stride):
                j = min(i + run, n)
                u, w = _sums(x[i:j], delta[i:j], cut(lower, i, j), cut(upper, i, j), K, p, order, nothing)
                one, lost = added(one, lost, u)
                two += w
        elif what == LOOK:
            for i in range(0, n, LANE):
                j = min(i + LANE, n)
                u, w = _look(x[i:j], delta[i:j], cut(lower, i, j), cut(upper, i, j))
                one, lost = added(one, lost, u)
                two += w
        elif what == WRITE:
            for i in range(0, n, LANE):
                j = min(i + LANE, n)
                low, high = cut(lower, i, j), cut(upper, i, j)
                u = _written(x[i:j], delta[i:j], low, high, out[i:j], K, p, order, format, kind)
                one, lost = added(one, lost, u)
        else:
            for i in range(0, n, LANE):
                j = min(i + LANE, n)
                low, high = cut(lower, i, j), cut(upper, i, j)
                u, w, y = _rarely_swept(what, x[i:j], delta[i:j], low, high, out[i:j], K, p, order, format, kind)
                one, lost = added(one, lost, u)
                two, three = two + w, max(three, y)
        frame.one, frame.two, frame.three = one + lost, two, three

    return sweep


def _sweep_by_maxima(F: Any, order: Any, length: Any, kind: Any) -> Any:
    """A sweep for p = inf. It finds maxima; the third number of a look is a sum."""

    def sweep(what, K, pointer):
        frame = carray(pointer, 1)[0]
        n, format, write = frame.n, frame.rounded, frame.write
        x, delta = carray(pointer_to(frame.x), n, F), carray(pointer_to(frame.delta), n, F)
        lower, upper = bound_at(frame.lower, x, length), bound_at(frame.upper, x, length)
        out = carray(pointer_to(frame.out), n if write else 0, F)
        one, two, three = 0.0, 0.0, 0.0
        for i in range(0, n, LANE):
            j = min(i + LANE, n)
            low, high = cut(lower, i, j), cut(upper, i, j)
            u, w, y = _largest_swept(what, x[i:j], delta[i:j], low, high, out[i:j], F(K), np.inf, order, format, kind)
            # Not by max(): NaN stays NaN.
            one = u if u > one or u != u else one
            two = w if w > two or w != w else two
            three = three + y if what == LOOK else max(three, y)
        frame.one, frame.two, frame.three = one, two, three

    return sweep


def sweep_for(dtype: Any, p: float, bounds_are_arrays: bool, rounded: int) -> Any:
    """The compiled sweep, whose ``.address`` compiled code calls and whose ``.ctypes`` Python does."""
    kind = KINDS[rounded] if dtype == np.float32 else ANY_KIND
    return _compiled(dtype.type, ORDERS.get(p, ANY_ORDER), (0, 0) if bounds_are_arrays else (0,), kind)


@cache
def _compiled(F: Any, order: Any, length: Any, kind: Any) -> Any:
    """One for all p that have no code of their own."""
    make = _sweep_by_maxima if order == ORDERS[np.inf] else _sweep_by_sums
    return compiled_for_c(types.void(types.int64, types.float64, FRAME_POINTER), make(F, order, length, kind))
