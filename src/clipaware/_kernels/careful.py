"""The careful lane in Numba: ``clipaware._careful``, one flagged row after the other.

Units, steps and letters are those of that text; the search is the fast lane's, in float64. A long row is read again for
every norm, in blocks that are converted to float64. So it needs five blocks of memory, and is compiled once for all
dtypes, orders of the norm and kinds of bounds. As in the fast lane, what goes over a row's elements is a C function,
and what decides on its next use is compiled separately.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types

from clipaware._careful import TOP
from clipaware._kernels.fast import AT_LEAST, AT_MOST, REACH, Row, nearest, norm_at, root_of, rules_of, swept
from clipaware._kernels.formats import DOUBLE_FORMAT, bytes_of, give, round_to, take
from clipaware._kernels.loops import (
    ANY_ORDER,
    FRAME,
    FRAME_POINTER,
    ORDERS,
    QUICK_ORDER,
    address_of,
    at,
    bits_of,
    clamped,
    compiled_for_c,
    entry,
    float_of,
    loop,
    pick,
    plus,
    pointer_to,
    pointer_to_frame,
    raised,
    step,
)
from clipaware._kernels.sweeps import CAREFUL_STORED, CAREFUL_UNROUNDED, EXTREMES, LOOK
from clipaware._problem import AT_ZERO, DOUBLE, HELD, REGULAR, SINGLE, SLACK, UNREACHABLE, ZERO

BLOCK = 4096  # elements that are converted together; a shorter row is converted once
FAR = 1e300  # a search starts between 1/FAR and FAR, and a breakpoint beyond counts as FAR
# For rows stored in at most 32 bits, and for float64: the spacing at 1, the least eps that does not count as 0, and how
# close to eps the norm has to be, before rounding and as stored.
OF_SINGLE = SINGLE.ulp, SINGLE.least, 1e-9, SINGLE.close / 2
OF_DOUBLE = DOUBLE.ulp, DOUBLE.least, DOUBLE.ulp, DOUBLE.close / 2
SQUARES = ORDERS[2.0]


# --- loops over a block -----------------------------------------------------------------------------------------------


@step
def exponent_of(a):
    """The exponent that brings a to between 1/2 and 1."""
    return math.frexp(a)[1] if 0 < a < np.inf else 0


@step
def two_factors(exponent):
    """Two powers of two that make 2^exponent, which itself may be no number."""
    return math.ldexp(1.0, exponent // 2), math.ldexp(1.0, exponent - exponent // 2)


@loop
def _prepare(x, delta, lower, upper, down, unit, ahead, room):
    """Clip x into its bounds, find the bound ahead and the room, and change units. What is not finite becomes NaN.

    A delta that vanishes in its unit is 0 from here on.
    """
    (down, more_down), (unit, more_unit) = down, unit
    for i in range(x.size):
        here, towards, low, high = x[i], delta[i] * down * more_down, at(lower, i), at(upper, i)
        inside = clamped(here, low, high)
        inside = pick((here - here == 0) & (low <= high), inside, np.nan)
        bound = pick(towards > 0, high, pick(towards < 0, low, inside))
        x[i], ahead[i], delta[i] = inside, bound, towards
        room[i] = abs(bound - inside) * unit * more_unit


@loop
def _powers(delta, room, K, per, p, order):
    """Of z = min(K*|delta|, s): the sum of (z*per)^p, that of what is not clipped, and how many are not."""
    F, A, count = 0.0, 0.0, 0.0
    for i in range(delta.size):
        move, s = K * abs(delta[i]), room[i]
        free = move < s  # also where K is infinite: 0*K is NaN, and what is still has no room
        y = raised(pick(free, move, s) * per, p, order)
        F, A, count = plus(F, y), plus(A, pick(free, y, 0.0)), plus(count, pick(free, 1.0, 0.0))
    return F, A, count


@loop
def _furthest(delta, room, K):
    """The largest z."""
    found = bits_of(0.0)
    for i in range(delta.size):
        move, s = K * abs(delta[i]), room[i]
        u = bits_of(pick(move < s, move, s))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _add(x, delta, ahead, K, back, v):
    """v = clip(x + K*delta), before rounding. What is still has x ahead, also where K is infinite and 0*K is NaN."""
    back, more_back = back
    for i in range(x.size):
        towards, bound = delta[i], ahead[i]
        y = x[i] + K * towards * back * more_back
        v[i] = pick(towards > 0, pick(y < bound, y, bound), pick(y > bound, y, bound))


@loop
def _distances(x, v, unit):
    """|v - x|, in the place of v, and the largest."""
    unit, more_unit = unit
    found = bits_of(0.0)
    for i in range(x.size):
        v[i] = abs(v[i] - x[i]) * unit * more_unit
        u = bits_of(v[i])
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _powers_of(z, per, p, order):
    """The sum of (z*per)^p."""
    F = 0.0
    for i in range(z.size):
        F = plus(F, raised(z[i] * per, p, order))
    return F


@loop
def _look(x, delta, room):
    """The largest |delta|, the largest room, and the sum of delta^2, which is NaN unless all values make sense."""
    top, most, squares = bits_of(0.0), bits_of(0.0), 0.0
    for i in range(x.size):
        d = abs(delta[i])
        u, w = bits_of(d), bits_of(room[i])
        top, most = pick(top > u, top, u), pick(most > w, most, w)
        squares = plus(squares, d * d + ((x[i] - x[i]) + (d - d)))
    return float_of(top), float_of(most), squares


@loop
def _extremes(delta, room, enough):
    """The last breakpoint s/|delta|, and the largest |delta| of what has enough room."""
    last, found = bits_of(0.0), bits_of(0.0)
    for i in range(delta.size):
        size, s = abs(delta[i]), room[i]
        u, w = bits_of(pick(size > 0, s / size, 0.0)), bits_of(pick(s >= enough, size, 0.0))
        last, found = pick(last > u, last, u), pick(found > w, found, w)
    return float_of(last), float_of(found)


# --- a sweep over a row -----------------------------------------------------------------------------------------------


@step
def _load(frame, start, x, delta, ahead, room):
    """Convert the block from `start` on, which has the length of these arrays."""
    offset = start * bytes_of(frame.stored)
    take(frame.stored, frame.stored_x + offset, x)
    take(frame.stored, frame.stored_delta + offset, delta)
    down, unit = two_factors(frame.down), two_factors(frame.unit)
    if frame.bounds_are_arrays:
        lower = carray(pointer_to(frame.lower + start * bytes_of(DOUBLE_FORMAT)), x.size, np.float64)
        upper = carray(pointer_to(frame.upper + start * bytes_of(DOUBLE_FORMAT)), x.size, np.float64)
        _prepare(x, delta, lower, upper, down, unit, ahead, room)
    else:
        low = carray(pointer_to(frame.lower), 1, np.float64)[0]
        high = carray(pointer_to(frame.upper), 1, np.float64)[0]
        _prepare(x, delta, low, high, down, unit, ahead, room)
    frame.loaded = start


@step
def _make_stored(frame, K, start, x, delta, ahead, v):
    """Make the array at K, as stored, write it if it is wanted, and leave the distances in `v`. The largest of them."""
    _add(x, delta, ahead, K, two_factors(frame.back), v)
    round_to(frame.rounded, v)
    if frame.write:
        give(frame.stored, v, frame.stored_out + start * bytes_of(frame.stored))
    return _distances(x, v, two_factors(frame.unit))


@step
def _sums(what, delta, room, z, K, per, p, order):
    """The sums of `_powers`; of z, what is not clipped counts as nothing."""
    if what == CAREFUL_UNROUNDED:
        return _powers(delta, room, K, per, p, order)
    return _powers_of(z, per, p, order), 0.0, 0.0


@step
def _sums_of(frame, what, delta, room, z, K, per):
    """The same for a row's p."""
    p = frame.p
    if p == 2:
        return _sums(what, delta, room, z, K, per, p, SQUARES)
    if frame.exact:
        return _sums(what, delta, room, z, K, per, p, ANY_ORDER)
    return _sums(what, delta, room, z, K, per, p, QUICK_ORDER)


def _sweep(what, K, pointer):
    """Find a norm in the unit of eps and d log(norm)/d log(K), or what `_look` or `_extremes` finds, over all blocks.

    The norm is taken in units of the largest element so far, but for p = 2, whose squares stay in range.
    """
    frame = carray(pointer, 1)[0]
    p, blocks = frame.p, carray(pointer_to(frame.blocks), (5, BLOCK), np.float64)
    one, two, three = 0.0, 0.0, 0.0
    so_far, F, A, count = 1.0 if p == 2 else 0.0, 0.0, 0.0, 0.0
    for start in range(0, frame.n, BLOCK):
        m = min(BLOCK, frame.n - start)
        x, delta, ahead, room, v = blocks[0, :m], blocks[1, :m], blocks[2, :m], blocks[3, :m], blocks[4, :m]
        if frame.loaded != start:
            _load(frame, start, x, delta, ahead, room)
        if what == LOOK:
            top, most, squares = _look(x, delta, room)
            one, two, three = max(one, top), max(two, most), three + squares
        elif what == EXTREMES:
            last, found = _extremes(delta, room, K)
            one, two = max(one, last), max(two, found)
        else:
            if what == CAREFUL_STORED:
                largest = _make_stored(frame, K, start, x, delta, ahead, v)
            else:
                largest = _furthest(delta, room, K) if p != 2 else 0.0
            if p != 2 and largest > so_far:
                smaller = (so_far / largest) ** p
                so_far, F, A = largest, F * smaller, A * smaller
            if p < np.inf and 1e-300 < so_far < np.inf:
                f, a, c = _sums_of(frame, what, delta, room, v, K, 1 / so_far)
                F, A, count = F + f, A + a, count + c
            one = so_far if p == np.inf or so_far == np.inf else so_far * root_of(F, p)
            two = 1.0 if p == np.inf else max(A / F, 1e-300) if F > 0 and count > 0 else min(count, 1.0)
    frame.one, frame.two, frame.three = one, -1.0 if what == CAREFUL_STORED else two, three


@cache
def careful_sweep() -> Any:
    """The compiled sweep."""
    return compiled_for_c(types.void(types.int64, types.float64, FRAME_POINTER), _sweep)


# --- what follows from the norms, as in ``_careful.Scaled`` -----------------------------------------------------------


@step
def set_units(row, down, unit, back):
    """From now on, multiply delta by 2^down, distances by 2^unit, and what is added to x by 2^back."""
    frame = carray(pointer_to_frame(row.frame), 1)[0]
    frame.down, frame.unit, frame.back, frame.loaded = down, unit, back, -1


@step
def root(row, K, goal, slack, close, rules):
    """The K at which the norm before rounding is `goal`, how much of it grows there, and whether it is out of reach."""
    if rules.p == np.inf:
        # The largest element that can move by eps does, and no other one moves further.
        last, found, _ = swept(row, EXTREMES, goal * (1 - slack))
        return (goal / found, 1.0, False) if found > 0 else (min(last, FAR), 1.0, True)
    K, gap, _, grows = nearest(row, CAREFUL_UNROUNDED, min(max(K, 1 / FAR), FAR), goal, 1.0, close, False, rules)
    if gap < np.inf and grows > 0:
        return K, grows, False
    # Beyond the last breakpoint nothing grows, though rounding may leave the norm short of its reach.
    last, _, _ = swept(row, EXTREMES, 0.0)
    reach, _ = norm_at(row, CAREFUL_UNROUNDED, np.inf, rules.p)
    return min(last, FAR), 1.0, reach < goal * (1 - slack)


@step
def write(row, K, goal, grows, status, down, unit, close, rules):
    """Write the array whose norm as stored is nearest, from K on; with `at_most`, nearest below eps by a margin."""
    below = rules.mode == AT_MOST
    aim = goal * (1 - SLACK) if below else goal
    if status == HELD:  # delta itself is added: its K may overflow
        set_units(row, 0, unit, 0)
        norm, _ = norm_at(row, CAREFUL_STORED, 1.0, rules.p)
        set_units(row, down, unit, -unit)
    else:
        norm, _ = norm_at(row, CAREFUL_STORED, np.inf if status == UNREACHABLE else K, rules.p)
    regular = status == REGULAR
    if (regular or norm > aim) if below else (regular and abs(norm / aim - 1) > close):
        K = min(max(K, 1 / FAR), FAR)
        best, _, last, _ = nearest(row, CAREFUL_STORED, K, aim, grows, 0.0 if below else close, below, rules)
        if best != last:
            norm_at(row, CAREFUL_STORED, best, rules.p)


@step
def solve_row(row, eps, rules):
    """The status of a row and its scale; its array is written if the rules say so, unless the scale is NaN."""
    p, mode = rules.p, rules.mode
    set_units(row, 0, 0, 0)
    top, room, squares = swept(row, LOOK, 0.0)
    ulp, least, close, close_as_stored = OF_DOUBLE if rules.rounded == DOUBLE_FORMAT else OF_SINGLE
    if not (squares >= 0 and 0 <= eps < np.inf):
        return ZERO, np.nan
    if top <= 0 or (eps < least and mode != REACH):
        norm_at(row, CAREFUL_STORED, 0.0, p)
        return ZERO if top <= 0 else AT_ZERO, 0.0
    # An eps that is far out of reach, being more than the sum of all rooms, takes the unit of the largest room instead.
    within = mode != REACH and (room <= 0 or eps <= room * row.n)
    unit, down = 0, 0  # squares of what 32 bits can hold are far from the ends of float64
    if rules.stored == DOUBLE_FORMAT or eps > 1e100:
        unit, down = -exponent_of(eps if within else room), TOP - exponent_of(top)
        set_units(row, down, unit, -unit)
    if mode == REACH:
        return REGULAR, math.ldexp(norm_at(row, CAREFUL_UNROUNDED, np.inf, p)[0], -unit)
    rms = math.sqrt(squares / row.n)
    rms = math.ldexp(rms if 0 < rms < np.inf else top, down)
    goal, slack = math.ldexp(eps, unit), (2 if p == np.inf else 8) * ulp
    K, grows, unreachable = root(row, goal / rms / row.n ** (1 / p), goal, slack, close, rules)
    one = math.ldexp(1.0, unit - down)  # the K of delta as it came
    held = (mode == AT_LEAST and K < one and not unreachable) or (
        mode == AT_MOST and (K > one or (unreachable and K >= one))
    )
    status = HELD if held else UNREACHABLE if unreachable else REGULAR
    if rules.write:
        write(row, one if held else K, goal, grows, status, down, unit, close_as_stored, rules)
    return status, 1.0 if held else math.ldexp(K, down - unit)


@entry
def solve_flagged_rows(sweep, x, delta, lower, upper, eps, out, eta, status, numbers, i, stop):
    """Solve those rows from i to stop whose status is negative. Arguments are those of ``fast.solve_rows``, but bounds
    are float64."""
    rules = rules_of(numbers)
    frames, blocks = np.zeros(1, FRAME), np.empty((5, BLOCK))
    frame = frames[0]
    frame.stored, frame.rounded, frame.write, frame.p = rules.stored, rules.rounded, rules.write, rules.p
    frame.n, frame.bounds_are_arrays = x.shape[1] // bytes_of(rules.stored), lower.shape[1] > bytes_of(DOUBLE_FORMAT)
    # What is stored in 32 bits cannot tell quick powers from exact ones; the margin of at_most can.
    frame.exact = rules.stored == DOUBLE_FORMAT or rules.mode == AT_MOST
    frame.blocks = address_of(blocks)
    row = Row(sweep, address_of(frames), frame.n)
    starts = address_of(x), address_of(delta), address_of(lower), address_of(upper), address_of(out)
    while i < stop:
        if status[i, 0] < 0:
            frame.stored_x, frame.stored_delta = starts[0] + i * x.shape[1], starts[1] + i * delta.shape[1]
            frame.lower = starts[2] + (i * lower.shape[1] if lower.shape[0] > 1 else 0)
            frame.upper = starts[3] + (i * upper.shape[1] if upper.shape[0] > 1 else 0)
            frame.stored_out = starts[4] + i * out.shape[1]
            status[i, 0], eta[i, 0] = solve_row(row, eps[i if eps.shape[0] > 1 else 0, 0], rules)
        i += 1
    # Keeps them alive until here.
    return frames.size + blocks.size + x.size + delta.size + lower.size + upper.size + out.size
