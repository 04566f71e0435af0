"""Triton on the GPU: rows that one program holds in its registers, and long rows that many programs share.

A short row is solved, written, measured and, if need be, polished by one program. Long rows start from a sample of
them (`_start`); one pass adds up the norm at eight scales around that (`_nodes`), between which the solution is
interpolated; and one pass writes and measures (`_write`). For half precision, passes before it measure the array as it
would be written at four scales (`_rounds`). Whatever is then not as it should be, rows that make no sense included, is
done again by one program a row, which takes care of everything (`_solve_rows`). Programs that share a row
leave what they found in memory, and the last of them to finish adds it up, always in the same order: no kernel waits
for another, nothing is fetched, and the same input gives the same bits.

The unknown is ``c`` in ``sum min(c*|delta|, s*inv)^p = (eps*inv)^p`` with ``inv`` near 1/eps, so ``eta = c/inv``. It is
applied as a product of two factors, for neither of them to leave the range of float32.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs  # an ImportError where Triton is too old, as if there were none

from clipaware import _problem, _traced
from clipaware._problem import Problem

Array = Any

INTERPRETED = knobs.runtime.interpret

INF = tl.constexpr(math.inf)
REGULAR = tl.constexpr(_problem.REGULAR)
ZERO = tl.constexpr(_problem.ZERO)
AT_ZERO = tl.constexpr(_problem.AT_ZERO)
HALVE_FROM = tl.constexpr(_traced.HALVE_FROM)
UNREACHABLE = tl.constexpr(_problem.UNREACHABLE)
HELD = tl.constexpr(_problem.HELD)
SLACK = tl.constexpr(_problem.SLACK)
NEWTON_PASSES = tl.constexpr(_traced.NEWTON_PASSES)
MAX_PASSES = tl.constexpr(_traced.MAX_PASSES)
POLISH_PASSES = tl.constexpr(_traced.POLISH_PASSES)

# What a pass over a row is for, and so what it returns (two numbers).
LOOK = tl.constexpr(0)  # the largest |delta|, infinite if anything makes no sense
BEGIN = tl.constexpr(1)  # the sum of (k*|delta|)^p, and of the rooms' powers
SUMS = tl.constexpr(2)  # the sums of what is not clipped, and of what is
NORM = tl.constexpr(3)  # of the array as written
NEARLY = tl.constexpr(4)  # the same in the working precision
CEILING = tl.constexpr(5)  # the scale at which all is clipped
ABLE = tl.constexpr(6)  # the largest |delta| that has room for eps
ROOM = tl.constexpr(7)  # the largest room
FILLED = tl.constexpr(8)  # the sum of (k*room)^p
FURTHEST = tl.constexpr(9)  # the largest move, of the array as written

# What became of a long row.
CARE = tl.constexpr(0)  # left to `_solve_rows`
STARTED = tl.constexpr(1)
FOUND = tl.constexpr(2)
DONE = tl.constexpr(3)
SETTLED = tl.constexpr(4)  # of half precision: nothing is nearer
CORNER = tl.constexpr(5)  # all that moves ends at its bound

LONGEST = 16384  # elements that a program holds
STREAM = 4096  # elements that a program takes at a time of longer rows
SAMPLE = 8192
SAMPLE_RUN = 256
MODES = {"equal": 0, "at_most": 1, "at_least": 2}
NODES = tl.constexpr(8)
ROUNDS = 10

# What is known of a long row: float64 numbers at these places.
SCALE, WIDTH, SHARE, INV, FIRST, REST, KEPT, RESTS = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 6, 8))
MOST = tl.constexpr(7)
LO, AT_LO, HI, AT_HI, GAP, BEST = (tl.constexpr(i) for i in (16, 17, 18, 19, 20, 21))  # a bracket of norms as written
STATE = tl.constexpr(24)

ROUGH = tl.constexpr(0.1)  # octaves to each side of c that interpolation cannot make good for

# Which of the passes of `_nodes` it is.
OPENING, MIDDLE, CLOSING = (tl.constexpr(i) for i in (0, 1, 2))


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _octaves(z):
    """z >= 0 as m*2^e, with m from sqrt(1/2) to sqrt(2); and e, which is a float64 too."""
    small = z < 2.0**-1022
    bits = tl.where(small, z * 2.0**54, z).to(tl.int64, bitcast=True)
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).to(tl.float64, bitcast=True)
    high = m > 1.4142
    e = (bits >> 52) - tl.where(high, 1022, 1023) - tl.where(small, 54, 0)
    return tl.where(high, m / 2, m), e.to(tl.float64)


@triton.jit
def _of_octaves(z, whole, part):
    """2^(whole + part), by whole octaves and the rest of them, which is then small; of z = 0, infinity and NaN, z."""
    number = tl.minimum(tl.maximum(tl.floor(whole + part + 0.5), -1023.0), 1024.0)
    scale = ((number.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    y = scale * tl.exp2(tl.minimum(tl.maximum((whole - number) + part, -1.0), 1.0))
    return tl.where(z > 0, tl.where(z < INF, y, z), tl.where(z < 0, float("nan"), z))


@triton.jit
def _power(z, P: tl.constexpr, FAST: tl.constexpr):
    """z^P; `FAST` to about 1e-6."""
    if P == 1:
        y = z
    elif P == 1.5 and z.dtype == tl.float64:
        y = z * tl.sqrt(z)
    elif P == 2:
        y = z * z
    elif P == 3:
        y = z * z * z
    elif P == 4:
        y = (z * z) * (z * z)
    elif P == 0:
        y = z * 0 + 1
    elif FAST:
        y = tl.exp2(P * tl.log2(z))
    elif z.dtype == tl.float32:
        y = tl.exp2(P * tl.log2(z.to(tl.float64))).to(tl.float32)
    else:
        # The logarithm of a number far from 1 is large, and its rounding too.
        m, e = _octaves(z)
        order = e * 0 + P
        whole = e * order
        y = _of_octaves(z, whole, tl.log2(m) * order + tl.fma(e, order, -whole))
    return y


@triton.jit
def _root(q, P: tl.constexpr):
    """q^(1/P)."""
    if P == 1 or P == INF:
        y = q
    elif P == 2:
        y = tl.sqrt(q)
    elif q.dtype == tl.float32:
        y = tl.exp2(tl.log2(q) / P)
    else:
        m, e = _octaves(q)
        order = e * 0 + P
        whole = e / order
        y = _of_octaves(q, whole, (tl.log2(m) + tl.fma(-whole, order, e)) / order)
    return y


@triton.jit
def _real(a, DOUBLE: tl.constexpr):
    return a.to(tl.float64) if DOUBLE else a.to(tl.float32)


@triton.jit
def _split(k, DOUBLE: tl.constexpr):
    """k >= 0 as two factors, of which one is a power of two, in the working precision."""
    half = ((k.to(tl.int64, bitcast=True) >> 52) - 1023) >> 1
    if not DOUBLE:
        half = tl.minimum(tl.maximum(half, -120), 120)
    first = ((1023 + half) << 52).to(tl.float64, bitcast=True)
    rest = k * ((1023 - half) << 52).to(tl.float64, bitcast=True)
    if not DOUBLE:
        rest = tl.minimum(rest, 1e38)
    return _real(first, DOUBLE), _real(rest, DOUBLE)


@triton.jit
def _units(eps, P: tl.constexpr, DOUBLE: tl.constexpr):
    """1/eps in the working precision, and (eps/that)^p."""
    inv = 1 / eps
    if not DOUBLE:
        inv = tl.minimum(tl.maximum(inv, 2.0**-126), 2.0**126)  # normal numbers
    inv = _real(inv, DOUBLE)
    return inv, _power(eps * inv.to(tl.float64), 1 if P == INF else P, False)


@triton.jit
def _add(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


# --- elements ---------------------------------------------------------------------------------------------------------


@triton.jit
def _number(a, where):
    """A float64: by its place, or by its own bits."""
    if a.dtype.is_ptr():
        y = tl.load(a + where).to(tl.float64)
    else:
        y = tl.cast(a, tl.int64).to(tl.float64, bitcast=True)
    return y


@triton.jit
def _budget(eps, where, DOUBLE: tl.constexpr):
    """An eps; 0 if so small that it has no reciprocal, or is none of the normal numbers of the elements."""
    e = _number(eps, where)
    return tl.where((e > 0) & (e < (1e-290 if DOUBLE else 2.0**-126)), 0.0, e)


@triton.jit
def _loaded(a, cols, n, DOUBLE: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr):
    if WHOLE:
        y = tl.load(a + cols, eviction_policy=POLICY)
    else:
        y = tl.load(a + cols, mask=cols < n, other=0.0, eviction_policy=POLICY)
    return _real(y, DOUBLE)


@triton.jit
def _load(
    row, cols, n, LOW: tl.constexpr, UP: tl.constexpr, DOUBLE: tl.constexpr,
    WHOLE: tl.constexpr = False, AGAIN: tl.constexpr = False,
):  # fmt: skip
    """x, delta and the bounds at these columns; beyond the last, which are none if `WHOLE`, 0. `AGAIN`: for the last
    time; otherwise it would be the same load to the compiler."""
    POLICY: tl.constexpr = "evict_first" if AGAIN else ""
    x, delta, lower, upper = row
    x = _loaded(x, cols, n, DOUBLE, WHOLE, POLICY)
    delta = _loaded(delta, cols, n, DOUBLE, WHOLE, POLICY)
    if LOW:
        lower = _loaded(lower, cols, n, DOUBLE, WHOLE, "")
    else:
        lower = _real(_number(lower, 0), DOUBLE)
    if UP:
        upper = _loaded(upper, cols, n, DOUBLE, WHOLE, "")
    else:
        upper = _real(_number(upper, 0), DOUBLE)
    return x, delta, lower, upper


@triton.jit
def _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index):
    """Where a row begins. A bound that is a number has no steps from row to row, and remains what it is."""
    return (
        x + index * x_row,
        delta + index * delta_row,
        lower + index * lower_row,
        upper + index * upper_row,
    )


@triton.jit
def _room(x, delta, lower, upper):
    """The distance to the bound ahead, of what moves."""
    x = tl.minimum(tl.maximum(x, lower), upper)
    s = tl.maximum(tl.where(delta < 0, x - lower, upper - x), 0.0)
    return tl.where(delta == 0, 0.0, s)


@triton.jit
def _moved(elements, first, rest, corner, DTYPE: tl.constexpr):
    """clip(x + k*delta) as an array of that dtype holds it; the bounds, if at a `corner`."""
    x, delta, lower, upper = elements
    x = tl.minimum(tl.maximum(x, lower), upper)
    v = tl.minimum(tl.maximum((delta * first) * rest + x, lower), upper)
    ahead = tl.where(delta < 0, lower, tl.where(delta > 0, upper, x))
    return tl.where(corner, ahead, v).to(DTYPE)


@triton.jit
def _term(z, P: tl.constexpr):
    """z^P; in float64 where it may be no float32."""
    if P > 4 and z.dtype == tl.float32:
        y = tl.exp2(P * tl.log2(z.to(tl.float64)))
    else:
        y = _power(z, P, False)
    return y


@triton.jit
def _tile(
    elements, first, rest, inv, corner, P: tl.constexpr, WHAT: tl.constexpr, DTYPE: tl.constexpr, ULP: tl.constexpr
):
    """What some elements add to a pass: two arrays."""
    x, delta, lower, upper = elements
    size = tl.abs(delta)
    if WHAT == LOOK:
        fine = (tl.abs(x) < INF) & (lower <= upper) & (lower < INF) & (upper > -INF)
        one = tl.where(fine, tl.where(size < INF, size, INF), INF)
        two = one
    elif WHAT == NORM or WHAT == NEARLY or WHAT == FURTHEST:
        v = _moved(elements, first, rest, corner, DTYPE)
        x = tl.minimum(tl.maximum(x, lower), upper)
        if WHAT == NEARLY:
            move = tl.abs(v.to(x.dtype) - x) * inv
        else:
            move = tl.abs(v.to(tl.float64) - x.to(tl.float64)) * inv
        one = _power(move, 1 if P == INF or WHAT == FURTHEST else P, False)
        two = one
    elif WHAT == CEILING:
        one = tl.where(delta == 0, 0.0, _room(x, delta, lower, upper).to(tl.float64) / size.to(tl.float64))
        two = one
    elif WHAT == ROOM:
        one = _room(x, delta, lower, upper)
        two = one
    elif WHAT == FILLED:
        one = _power((_room(x, delta, lower, upper) * first).to(tl.float64) * rest, P, False)
        two = one
    else:
        room = tl.minimum(_room(x, delta, lower, upper) * inv, 1 + 2.0**-10)
        if WHAT == ABLE:
            one = tl.where(room + 2 * ULP >= 1, size, 0.0)
            two = one
        elif WHAT == BEGIN:
            wrong = (x - x) + tl.where((lower <= upper) & (lower < INF) & (upper > -INF), 0.0, float("nan"))
            one, two = _term((size * first) * rest, P) + wrong, _term(room, P)
        else:
            z = (size * first) * rest
            clipped = z >= room
            power = _term(tl.minimum(z, room), P)
            one, two = tl.where(clipped, 0.0, power), tl.where(clipped, power, 0.0)
    return one, two


@triton.jit
def _pass(
    held,
    row,
    n,
    k,
    inv,
    corner,
    P: tl.constexpr,
    WHAT: tl.constexpr,
    DTYPE: tl.constexpr,
    DOUBLE: tl.constexpr,
    LOW: tl.constexpr,
    UP: tl.constexpr,
    BLOCK: tl.constexpr,
    HOLDS: tl.constexpr,
):
    """Two numbers of a row, added up or maximised in float64. `k` is the scale, in the units of `inv` if for SUMS."""
    ULP: tl.constexpr = 2.0**-52 if DTYPE == tl.float64 else 2.0**-23
    MAXIMUM: tl.constexpr = (
        WHAT == LOOK
        or WHAT == CEILING
        or WHAT == ABLE
        or WHAT == ROOM
        or WHAT == FURTHEST
        or (P == INF and (WHAT == NORM or WHAT == NEARLY))
    )
    first, rest = _split(k, DOUBLE)
    if HOLDS:
        one, two = _tile(held, first, rest, inv, corner, P, WHAT, DTYPE, ULP)
    else:
        one = tl.zeros((BLOCK,), tl.float64)
        two = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, n, BLOCK):
            elements = _load(row, start + tl.arange(0, BLOCK), n, LOW, UP, DOUBLE)
            more, other = _tile(elements, first, rest, inv, corner, P, WHAT, DTYPE, ULP)
            if MAXIMUM:
                one, two = tl.maximum(one, more.to(tl.float64)), tl.maximum(two, other.to(tl.float64))
            else:
                one, two = one + more.to(tl.float64), two + other.to(tl.float64)
    if MAXIMUM:
        one = tl.max(one, 0)
        two = one
    elif WHAT == SUMS or WHAT == BEGIN:
        one, two = tl.reduce((one, two), 0, _add)
    else:
        one = tl.sum(one, 0)
        two = one
    return one.to(tl.float64), two.to(tl.float64)


# --- a row by one program ---------------------------------------------------------------------------------------------


@triton.jit
def _second(least, U, C, P: tl.constexpr):
    """`_traced.extrapolated`: the second guess over the first, the naive one, of which Newton's step is `least`."""
    b = (U + C - 1 + (1 - U) * (P / (P + 1))) * ((P + 1) * (P + 2) / P)
    linear, quadratic = (1 - U - b) * (P / (P + 1)), b * (P / (P + 2))
    guess = least
    for _ in range(3):
        guess = 1 / _root(tl.maximum(1 - guess * (linear + quadratic * guess), 0.1), P)
    return tl.minimum(tl.maximum(guess, least), 2 * least - 1)


@triton.jit
def _curved(least, past, slopes, P: tl.constexpr):
    """`_traced.curved`: the next guess over this one, from where the last one was and the slope there, over this."""
    change = _power(least, P, False) - 1
    distance = 1 - _power(past, P, False)
    wide = tl.abs(distance) > 1e-6
    bend = tl.where(wide, (slopes / (1 - distance) - 1) / tl.where(wide, distance, 1.0), 0.0)
    return _root(1 + change + tl.minimum(tl.maximum(bend * change, -1.0), 1.0) * change / 2, P)


@triton.jit
def _filling(most, U, C, past, last_slope, first, P: tl.constexpr):
    """The next guess over this one where little room remains, which falls like a power of the scale; and that power.
    From where the last guess was, over this one, and the power there."""
    rest = most - U - C
    fine = (rest > 0) & (U > 0)
    slope = P * U / tl.where(fine, rest, 1.0)
    octaves = tl.log2(tl.where(fine, rest, 1.0) / (most - 1))
    step = octaves / slope
    back = tl.log2(past)
    bend = tl.where(first | (tl.abs(back) < 1e-6), 0.0, (last_slope - slope) / tl.where(back == 0, 1.0, back))
    middle = tl.minimum(tl.maximum(slope + bend * step / 2, slope / 2), slope * 2)
    step = tl.minimum(tl.maximum(octaves / middle, -2.0), 4.0)
    return tl.where(fine, tl.exp2(step), 0.5), slope


@triton.jit
def _norm(
    held, row, n, K, inv, size, corner,
    P: tl.constexpr, WHAT: tl.constexpr, DTYPE: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr,
    UP: tl.constexpr, BLOCK: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """Of the array as it would be written, over eps; `WHAT` is how."""
    total, _ = _pass(held, row, n, K, inv, corner, P, WHAT, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
    norm = _root(total, P) / size
    if P > 4 and P != INF:
        if (total < 1e-30) | (total > 1e30):
            # Powers have overflowed, or vanished: once more, in units of the largest move.
            top, _ = _pass(held, row, n, K, inv, corner, P, FURTHEST, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
            finite = (top > 0) & (top < INF)
            closer = inv.to(tl.float64) / tl.where(finite, top, 1.0)
            total, _ = _pass(held, row, n, K, closer, corner, P, NORM, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
            norm = tl.where(finite, top * _root(total, P), top) / size
    return norm


@triton.jit
def _polished(
    held, row, n, K, slope, inv, size, norm, limit, close, corner,
    P: tl.constexpr, DTYPE: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr,
    BLOCK: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """`_traced.polish`: the K whose array, as written, has the norm nearest to eps; its norm at K is known."""
    ULP: tl.constexpr = 2.0**-52 if DOUBLE else 2.0**-23
    edge = tl.minimum(limit, 1.0)
    first, rest = _split(K, DOUBLE)
    K = first.to(tl.float64) * rest.to(tl.float64)
    best, gap = tl.where(limit < INF, 0.0, K), INF + K * 0
    lo, hi, at_lo, at_hi = K * 0 - 1, K * 0 + INF, K * 0, K * 0
    stride, halving, going, count = K * 0 + 1, K < 0, K >= 0, (K >= 0).to(tl.int32) * 0
    while going:
        here = tl.where(norm <= limit, tl.abs(norm - 1), INF)
        best, gap = tl.where(here < gap, K, best), tl.minimum(here, gap)
        above = norm > edge
        lo, at_lo = tl.where(above, lo, K), tl.where(above, at_lo, norm)
        hi, at_hi = tl.where(above, K, hi), tl.where(above, norm, at_hi)
        inside = (lo >= 0) & (hi < INF)
        low = tl.maximum(lo, 1e-300)
        middle = tl.where(hi > 4 * low, tl.sqrt(low) * tl.sqrt(hi), lo + (hi - lo) / 2)
        secant = lo + (hi - lo) * ((edge - at_lo) / tl.where(inside, at_hi - at_lo, 1.0))
        reach = (tl.abs(edge - norm) / slope + 2 * ULP) * stride
        outward = tl.where(above, K / (1 + reach), K * (1 + reach))
        between = tl.where((secant > lo) & (secant < hi) & ~halving, secant, middle)
        first, rest = _split(tl.where(inside, between, outward), DOUBLE)
        K = first.to(tl.float64) * rest.to(tl.float64)
        if inside & ((K <= lo) | (K >= hi)):  # the middle, if the secant is but rounding away from an end
            first, rest = _split(middle, DOUBLE)
            K = first.to(tl.float64) * rest.to(tl.float64)
        closed = inside & ((K <= lo) | (K >= hi))
        count += 1
        going = ~closed & (gap > close + 1 - edge) & (count < POLISH_PASSES)
        stride = tl.minimum(4 * stride * stride, 2.0**510)
        halving = ~halving | (count > HALVE_FROM)
        if going:
            norm = _norm(held, row, n, K, inv, size, corner, P, NORM, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
    return best


@triton.jit
def _tiled(
    row, i: tl.constexpr, n, LOW: tl.constexpr, UP: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The columns of a tile of a short row, and its elements; those beyond the last are inside their bounds."""
    WHOLE: tl.constexpr = EVEN or i < TILES - 1
    cols = i * TILE + tl.arange(0, TILE)
    x, delta, lower, upper = _load(row, cols, n, LOW, UP, False, WHOLE, AGAIN)
    if not WHOLE:
        x = tl.where(cols < n, x, tl.minimum(tl.maximum(0.0, lower), upper))
    return cols, x, delta, lower, upper


@triton.jit
def _solve_plainly(
    row, n, v, e, P: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr,
    DTYPE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A few steps of Newton's and the array, if nothing about the row is unusual: in float32 throughout, since float64
    is slow where a whole program computes one number. Returns eta, or NaN if it is to be done with more care."""
    inv = (1 / e).to(tl.float32)
    none = tl.zeros((TILE,), tl.float32)
    total, most, sizes, rooms = none, none, (), ()
    for i in tl.static_range(TILES):
        cols, x, delta, lower, upper = _tiled(row, i, n, LOW, UP, TILE, TILES, EVEN, False)
        room = tl.where(delta < 0, x - lower, upper - x) * inv
        # What makes no sense is NaN in the sums.
        some = tl.where((room >= 0) & (lower <= upper), tl.minimum(room, 2.0), float("nan"))
        if not EVEN and i == TILES - 1:
            some = tl.where(cols < n, some, 0.0)
        total, most = total + _power(tl.abs(delta), P, True), most + _power(some, P, True)
        sizes, rooms = sizes + (tl.abs(delta),), rooms + (some,)  # noqa: RUF005
    total, most = tl.reduce((total, most), 0, _add)
    nearly_full = most < 1.4
    going = (total > 1e-25) & (total < 1e25) & (most > 1) & (inv > 1e-25) & (inv < 1e25)
    c = _root(1 / total, P)
    fine, count, last_c, last_U, slope, last_share = going, (c >= 0).to(tl.int32) * 0, c, c, c, c
    while going:
        U, C = none, none
        for i in tl.static_range(TILES):
            z = sizes[i] * c
            clipped = z >= rooms[i]
            power = _power(tl.minimum(z, rooms[i]), P, True)
            U, C = U + tl.where(clipped, 0.0, power), C + tl.where(clipped, power, 0.0)
        U, C = tl.reduce((U, C), 0, _add)
        fine = ((C < 1) | nearly_full) & (U > 1e-30)
        least = _root(tl.where((C < 1) & fine, (1 - C) / U, 1.0), P)
        if nearly_full:
            factor, slope = _filling(most, U, C, last_c / c, slope, count == 0, P)
        elif count == 0:
            factor = _second(least, U, C, P)
        else:
            factor = _curved(least, last_c / c, last_U / U, P)
        factor = tl.where(factor > 0, factor, least)
        going = fine & (tl.abs(factor - 1) > 3e-4) & (count < 16)
        last_c, last_U, last_share = c, U, tl.maximum(1 - C, 1e-3)
        c *= factor
        count += 1
    fine = fine & (count < 17) & (last_U > 1e-3) & (c > 1e-25) & (c < 1e25)
    k = (c.to(tl.float64) / inv.to(tl.float64)).to(tl.float32)
    # Once more from the cache, instead of registers that are needed above.
    tiles = ()
    for i in tl.static_range(TILES):
        tiles = tiles + (_tiled(row, i, n, LOW, UP, TILE, TILES, EVEN, True),)  # noqa: RUF005
    norm, count, going = e * 0, count * 0, fine
    while going:
        moves = none
        for i in tl.static_range(TILES):
            _, x, delta, lower, upper = tiles[i]
            kept = tl.minimum(tl.maximum(delta * k + x, lower), upper)
            moves += _power(tl.abs(kept - x) * inv, P, False)
        norm = _root(tl.sum(moves), P) / (e * inv)
        count += 1
        going = (tl.abs(norm - 1) > 1.5e-7) & (count < 4)
        k = tl.where(going, k * (1 + (1 - norm) / last_share), k).to(tl.float32)
    fine = fine & (tl.abs(norm - 1) <= 1.5e-7)
    # What is written is right; but near the reach that leaves eta more room, which it is now known to have used.
    eta = k.to(tl.float64) * (1 + (1 - norm) / last_share)
    if fine & (count > 1):
        # The scale has made good for rounding, of which eta knows nothing.
        U, C = none, none
        for i in tl.static_range(TILES):
            _, x, delta, lower, upper = tiles[i]
            z, room = tl.abs(delta * k) * inv, tl.where(delta < 0, x - lower, upper - x) * inv
            power = _power(tl.minimum(z, room), P, True)
            U, C = U + tl.where(z >= room, 0.0, power), C + tl.where(z >= room, power, 0.0)
        U, C = tl.reduce((U, C), 0, _add)
        left = _power((e * inv).to(tl.float32), P, True) - C
        solvable = (left > 0) & (U > 1e-3)
        step = _root(tl.where(solvable, left / tl.where(solvable, U, 1.0), 1.0), P)
        eta = tl.where(solvable, k.to(tl.float64) * step.to(tl.float64), eta)
    if fine:
        for i in tl.static_range(TILES):
            cols, x, delta, lower, upper = tiles[i]
            kept = tl.minimum(tl.maximum(delta * k + x, lower), upper).to(DTYPE)
            if EVEN or i < TILES - 1:
                tl.store(v + cols, kept)
            else:
                tl.store(v + cols, kept, mask=cols < n)
    return tl.where(fine, eta, float("nan"))


@triton.jit
def _solve_rows(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n, v, eta, status, flags,
    P: tl.constexpr, MODE: tl.constexpr, WRITE: tl.constexpr, DOUBLE: tl.constexpr, HALF: tl.constexpr,
    LOW: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr, HOLDS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All that is to be done for a row; of rows that do not fit a program, for those which are not DONE."""
    index = tl.program_id(0).to(tl.int64)
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    if not HOLDS:
        if tl.load(flags + index * 4) == DONE:
            return
    elif WRITE and MODE == 0 and P < 5 and not (DOUBLE or HALF):
        DTYPE: tl.constexpr = v.dtype.element_ty
        e = _budget(eps, index * eps_row, False)
        K = _solve_plainly(row, n, v + index * n, e, P, LOW, UP, DTYPE, TILE, TILES, EVEN)
        if K == K:
            tl.store(eta + index, K)
            tl.store(status + index, REGULAR)
            return
    _solve_carefully(
        row[0], row[1], row[2], row[3], _budget(eps, index * eps_row, DOUBLE), n, v + index * n, eta + index,
        status + index, P, MODE, WRITE, DOUBLE, HALF, LOW, UP, BLOCK, HOLDS,
    )  # fmt: skip


@triton.jit(noinline=True)
def _solve_carefully(
    x, delta, lower, upper, e, n, v, eta, status,
    P: tl.constexpr, MODE: tl.constexpr, WRITE: tl.constexpr, DOUBLE: tl.constexpr, HALF: tl.constexpr,
    LOW: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """Whatever a row is like. A function of its own, so that it takes no registers from what is usual."""
    DTYPE: tl.constexpr = v.dtype.element_ty
    ULP: tl.constexpr = 2.0**-52 if DTYPE == tl.float64 else 2.0**-23
    STEADY: tl.constexpr = 2.0**-49 if DOUBLE else 2.0**-24
    CLOSE: tl.constexpr = 4e-15 if DOUBLE else 2e-7
    TINY: tl.constexpr = 1e-200 if DOUBLE else 1e-25
    LEAST: tl.constexpr = 1e-290 if DOUBLE or P > 4 else 1e-30  # below it, a sum has lost digits
    AT_MOST: tl.constexpr = MODE == 1
    row = (x, delta, lower, upper)
    cols = tl.arange(0, BLOCK)
    held = _load(row, cols, n, LOW, UP, DOUBLE)
    usual = (e > 0) & (e < INF)
    inv, target = _units(tl.where(usual, e, 1.0), P, DOUBLE)
    size, top, total, most = _root(target, P), e * 0 + 1, e * 0, e * 0
    if P != INF:
        total, most = _pass(held, row, n, e * 0 + 1, inv, False, P, BEGIN, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
        usual = usual & (total > TINY) & (total < 1 / TINY)
    if P == INF or ~usual:
        # The largest |delta| is the unit of what is neither large nor small.
        top, _ = _pass(held, row, n, e * 0, inv, False, P, LOOK, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
        if P != INF:
            unit = 1 / tl.where((top > 0) & (top < INF), top, 1.0)
            total, most = _pass(held, row, n, unit, inv, False, P, BEGIN, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
    good = (e >= 0) & (e < INF) & (top < INF)
    moves = good & (top > 0) & (e > 0)
    e = tl.where(moves, e, 1.0)
    K, slope, corner, short = e * 0, e * 0 + 1, e < 0, e < 0
    if moves:
        if P == INF:
            top, _ = _pass(held, row, n, K, inv, False, P, ABLE, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
            short = top <= 0
            corner = short
            K = e / tl.where(short, 1.0, top)
        else:
            c = _root(target / total, P) / top
            lo, hi, last_c, last_U, count, going = c, c * 0 + INF, c, c * 0, (c >= 0).to(tl.int32) * 0, most >= target
            short = most < target
            corner = most + target * (8 * P * ULP) < target
            C = most
            while going:
                first, rest = _split(c, DOUBLE)
                c = first.to(tl.float64) * rest.to(tl.float64)
                U, C = _pass(held, row, n, c, inv, False, P, SUMS, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
                fine = (C < target) & (U > LEAST)
                some_U = tl.where(fine, U, 1.0)
                root = tl.where(fine, c * _root(tl.where(fine, (target - C) / some_U, 1.0), P), lo)
                above = U + C >= target
                hi, lo = tl.where(above, tl.minimum(hi, c), hi), tl.where(above, lo, tl.maximum(lo, c))
                lo = tl.maximum(lo, tl.minimum(root, hi))
                least = _real(root / c, DOUBLE)
                if count == 0:
                    factor = _second(least, _real(some_U / target, DOUBLE), _real(C / target, DOUBLE), P)
                else:
                    factor = _curved(least, _real(last_c / c, DOUBLE), _real(last_U / some_U, DOUBLE), P)
                guess = c * factor.to(tl.float64)
                inside = (guess >= lo) & (guess <= hi) & (guess < INF)
                guess = tl.where(inside, guess, tl.minimum(tl.maximum(root, lo), hi))
                arrived = fine & (tl.abs(guess - c) <= STEADY * guess)
                astray = ~fine | ((count >= NEWTON_PASSES) & (count % 2 == 1))
                if astray & ~arrived & (hi >= INF):
                    farthest, _ = _pass(held, row, n, c, inv, False, P, CEILING, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
                    hi = tl.minimum(farthest * inv.to(tl.float64), 1e300)  # between which and lo there is a middle
                middle = tl.sqrt(lo) * tl.sqrt(hi)
                last_c, last_U = c, some_U
                c = tl.where(astray & ~arrived, middle, guess)
                count += 1
                going = ~arrived & (hi - lo > lo * STEADY) & (count < MAX_PASSES)
                # Next to the reach, what is missing is but rounding.
                short = ~going & (U < 1e-3 * target) & (hi >= INF)
            K = c / inv.to(tl.float64)
            slope = tl.maximum(1 - C / target, ULP)
        if short:
            most_K, _ = _pass(held, row, n, K, inv, False, P, CEILING, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
            K = most_K if P == INF else tl.where(most < target, most_K, tl.minimum(K, most_K))
    code = tl.where(corner, UNREACHABLE, REGULAR)
    if AT_MOST:
        code = tl.where((K > 1) | (corner & (K == 1)), HELD, code)
        corner = corner & (K < 1)
        K = tl.minimum(K, 1.0)
    elif MODE == 2:
        code = tl.where((K < 1) & ~corner, HELD, code)
        K = tl.where(corner, K, tl.maximum(K, 1.0))
    K = tl.where(moves, K, 0.0)
    code = tl.where(moves, code, tl.where(top <= 0, ZERO, AT_ZERO))
    tl.store(status, code.to(tl.int64))
    written = K
    if WRITE:
        if moves:
            limit = size * 0 + 1 - SLACK if AT_MOST else size * 0 + INF
            MEASURE: tl.constexpr = NORM if AT_MOST or HALF else NEARLY
            norm = _norm(held, row, n, K, inv, size, corner, P, MEASURE, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
            off = code == REGULAR
            if not HALF:
                if not DOUBLE:
                    # Near the reach, sums in float32 leave the scale more room than the norm does.
                    near = off & (slope < 0.05) & (slope > 1e-4) & (tl.abs(norm - 1) < 1e-6)
                    K *= tl.where(near, 1 + (1 - norm) / slope, 1.0)
                off = off & (tl.abs(norm - 1) > CLOSE)
            if AT_MOST:
                over = norm > limit
                corner = corner & (norm <= limit)
                off = off | over
            # The norm of a long row of a half takes steps that are finer than that.
            ENOUGH: tl.constexpr = CLOSE / 2 if not HALF else (1e-8 if HOLDS else CLOSE)
            if off:
                written = _polished(
                    held, row, n, written, slope, inv, size, norm, limit, ENOUGH, corner,
                    P, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS,
                )  # fmt: skip
        first, rest = _split(written, DOUBLE)
        if HOLDS:
            kept = _moved(held, first, rest, corner, DTYPE)
            tl.store(v + cols, tl.where(good, kept, float("nan")).to(DTYPE), mask=cols < n)
        else:
            for start in range(0, n, BLOCK):
                here = start + cols
                kept = _moved(_load(row, here, n, LOW, UP, DOUBLE), first, rest, corner, DTYPE)
                tl.store(v + here, tl.where(good, kept, float("nan")).to(DTYPE), mask=here < n)
    tl.store(eta, tl.where(good, K, float("nan")))


# --- long rows by many programs ---------------------------------------------------------------------------------------


@triton.jit
def _backwards(parts):
    """The row of a program, and the part of it: the last ones first, which the pass before has left in the cache."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return program.to(tl.int64) // parts, program % parts


@triton.jit
def _start(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n, state, flags, counts,
    P: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Where to look for c, and how far around: from a sample of contiguous runs of the row."""
    index = tl.program_id(0).to(tl.int64)
    tl.store(counts + index * 4, 0)
    e = _budget(eps, index * eps_row, DOUBLE)
    fine = (e > 0) & (e < INF)
    inv, target = _units(tl.where(fine, e, 1.0), P, DOUBLE)
    tl.store(state + index * STATE + INV, inv.to(tl.float64))
    flag = tl.where(fine, STARTED, CARE)
    if P != INF:
        i = tl.arange(0, SIZE)
        cols = ((i // RUN).to(tl.int64) * (n - RUN) // (SIZE // RUN - 1) // 8 * 8 + i % RUN).to(tl.int32)
        row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
        x, delta, lower, upper = _load(row, cols, n, LOW, UP, DOUBLE)
        size, room = tl.abs(delta), tl.minimum(_room(x, delta, lower, upper) * inv, 1.001)
        total, most = tl.reduce((_power(size, P, True), _power(room, P, True)), 0, _add)
        # The sample may not have as much room as the row.
        goal = tl.minimum(_real(target * SIZE / n, DOUBLE), 0.997 * most)
        fine = fine & (total > 1e-30) & (total < 1e30)
        c = _root(goal / tl.where(fine, total, 1.0), P)
        U, C, count, going = goal, goal * 0, (goal >= 0).to(tl.int32) * 0, fine
        while going:
            z = size * c
            clipped = z >= room
            power = _power(tl.minimum(z, room), P, True)
            U, C = tl.reduce((tl.where(clipped, 0.0, power), tl.where(clipped, power, 0.0)), 0, _add)
            fine = (C < goal) & (U > 0)
            root = tl.where(fine, c * _root(tl.where(fine, (goal - C) / tl.where(fine, U, 1.0), 1.0), P), c)
            count += 1
            going = fine & (tl.abs(root - c) > 2e-3 * root) & (count < 12)
            c = root
        power = _power(tl.minimum(size * c, room), P, True)
        mean, square = tl.reduce((power, power * power), 0, _add)
        mean, square = mean / SIZE, square / SIZE
        # As far as c may be off because this is but a sample: three times its standard error.
        spread = tl.sqrt(tl.maximum(square - mean * mean, 0.0) / SIZE) / mean
        share = tl.minimum(tl.maximum(1 - C / goal, 1e-2), 1.0)
        width = tl.minimum(tl.maximum(4.5 * spread / (P * share), 3e-3), 3.0)  # in octaves
        flag = tl.where(fine & (c > 1e-30) & (c < 1e30), STARTED, CARE)
        _aim(state + index * STATE, c.to(tl.float64), width.to(tl.float64), width > ROUGH, DOUBLE)
    tl.store(flags + index * 4, flag)


@triton.jit
def _aim(state, c, width, beyond, DOUBLE: tl.constexpr):
    """Where the nodes are: their common factor, and one for each, of which the last may be beyond all bounds."""
    first, _ = _split(c, DOUBLE)
    j = tl.arange(0, NODES)
    last = tl.where(beyond, NODES - 2, NODES - 1).to(tl.float64)
    t = (2 * j.to(tl.float64) - last) / last
    rest = c / first.to(tl.float64) * tl.exp2(width * t * (0.5 + 0.5 * t * t))  # closer to each other in the middle
    rest = tl.where(beyond & (j == NODES - 1), 1e30, rest)
    tl.store(state + WIDTH, width)
    tl.store(state + FIRST, first.to(tl.float64))
    tl.store(state + RESTS + tl.arange(0, NODES), _real(rest, DOUBLE).to(tl.float64))


@triton.jit
def _at(values, index):
    """An element of eight."""
    return tl.sum(tl.where(tl.arange(0, NODES) == index, values, 0.0))


@triton.jit
def _nodes(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n,
    state, flags, counts, partials, parts,
    P: tl.constexpr, MODE: tl.constexpr, WRITE: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """The row's sum at eight scales around c, and from them, by the row's last program, the c that it is to be. In the
    opening pass of a row that is far from certain the last of them is beyond all bounds, and so tells its reach."""
    index = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0) % parts
    if tl.load(flags + index * 4) != STARTED:
        return
    ULP: tl.constexpr = 2.0**-52 if x.dtype.element_ty == tl.float64 else 2.0**-23
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    state += index * STATE
    inv = _real(tl.load(state + INV), DOUBLE)
    real: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    a0 = tl.zeros((CHUNK,), real)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    if P != INF:
        first = _real(tl.load(state + FIRST), DOUBLE)
        k0, k1 = _real(tl.load(state + RESTS), DOUBLE), _real(tl.load(state + RESTS + 1), DOUBLE)
        k2, k3 = _real(tl.load(state + RESTS + 2), DOUBLE), _real(tl.load(state + RESTS + 3), DOUBLE)
        k4, k5 = _real(tl.load(state + RESTS + 4), DOUBLE), _real(tl.load(state + RESTS + 5), DOUBLE)
        k6, k7 = _real(tl.load(state + RESTS + 6), DOUBLE), _real(tl.load(state + RESTS + 7), DOUBLE)
    for start in tl.range(0, SEGMENT, CHUNK, num_stages=STAGES):
        cols = part * SEGMENT + start + tl.arange(0, CHUNK)
        here, along, low, high = _load(row, cols, n, LOW, UP, DOUBLE)
        here = tl.minimum(tl.maximum(here, low), high)
        room = tl.where(along < 0, here - low, high - here) * inv
        if P == INF:
            a0 = tl.maximum(a0, tl.where(room + 2 * ULP >= 1, tl.abs(along), 0.0))
        else:
            size = tl.abs(along) * first
            a0 += _power(tl.minimum(size * k0, room), P, True)
            a1 += _power(tl.minimum(size * k1, room), P, True)
            a2 += _power(tl.minimum(size * k2, room), P, True)
            a3 += _power(tl.minimum(size * k3, room), P, True)
            a4 += _power(tl.minimum(size * k4, room), P, True)
            a5 += _power(tl.minimum(size * k5, room), P, True)
            a6 += _power(tl.minimum(size * k6, room), P, True)
            a7 += _power(tl.minimum(size * k7, room), P, True)
    mine = partials + index * NODES * parts + part
    if P == INF:
        tl.store(mine, tl.max(a0).to(tl.float64))
    else:
        a0, a1, a2, a3, a4, a5, a6, a7 = tl.reduce((a0, a1, a2, a3, a4, a5, a6, a7), 0, _add8)
        tl.store(mine, a0.to(tl.float64))
        tl.store(mine + parts, a1.to(tl.float64))
        tl.store(mine + 2 * parts, a2.to(tl.float64))
        tl.store(mine + 3 * parts, a3.to(tl.float64))
        tl.store(mine + 4 * parts, a4.to(tl.float64))
        tl.store(mine + 5 * parts, a5.to(tl.float64))
        tl.store(mine + 6 * parts, a6.to(tl.float64))
        tl.store(mine + 7 * parts, a7.to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(counts + index * 4, 1, sem="acq_rel") != parts - 1:
        return

    # The row's last program.
    tl.store(counts + index * 4, 0)
    j = tl.arange(0, NODES)
    found = tl.zeros((NODES, 64), tl.float64)
    for start in range(0, parts, 64):
        where = start + tl.arange(0, 64)
        there = partials + index * NODES * parts + j[:, None] * parts + where[None, :]
        written = (where < parts)[None, :] & (j < (1 if P == INF else NODES))[:, None]
        some = tl.load(there, mask=written, other=0.0, cache_modifier=".cg")
        if P == INF:
            found = tl.maximum(found, some)
        else:
            found += some
    totals = tl.max(found, axis=1) if P == INF else tl.sum(found, axis=1)
    e = _budget(eps, index * eps_row, DOUBLE)
    inv, target = _units(e, P, DOUBLE)
    share = target * 0 + 1
    if P == INF:
        top = tl.max(totals)
        c = e / tl.where(top > 0, top, 1.0) * inv.to(tl.float64)
        flag = tl.where(top > 0, FOUND, CARE)
    else:
        ENOUGH: tl.constexpr = 1e-6 if DOUBLE else ROUGH
        width = tl.load(state + WIDTH)
        beyond = width > ROUGH if PASS == OPENING else width < 0
        most = tl.where(beyond, _at(totals, NODES - 1), tl.load(state + MOST) if PASS != OPENING else INF)
        count = tl.where(beyond, NODES - 1, NODES)
        nodes = first.to(tl.float64) * tl.load(state + RESTS + j)
        left = tl.sum(((totals <= target) & (j < count)).to(tl.int32)) - 1
        inside = (left >= 0) & (left < count - 1)
        left = tl.minimum(tl.maximum(left, 0), count - 2)
        # Linear in c^p between, or beyond, two nodes; and if between, a cubic through four for what they share.
        y0, y1, t0, t1 = _at(totals, left), _at(totals, left + 1), _at(nodes, left), _at(nodes, left + 1)
        rises = y1 > y0
        rise = tl.where(rises, y1 - y0, 1.0)
        q0, q1 = _power(t0, P, False), _power(t1, P, False)
        line = _root(tl.maximum(q0 + (target - y0) / rise * (q1 - q0), q0 * 0.1), P)
        line = tl.minimum(line, 8 * t1)
        b = tl.minimum(tl.maximum(left - 1, 0), count - 4)
        u0, u1 = _at(totals, b) - target, _at(totals, b + 1) - target
        u2, u3 = _at(totals, b + 2) - target, _at(totals, b + 3) - target
        l0 = _at(nodes, b) * (u1 / (u1 - u0)) * (u2 / (u2 - u0)) * (u3 / (u3 - u0))
        l1 = _at(nodes, b + 1) * (u0 / (u0 - u1)) * (u2 / (u2 - u1)) * (u3 / (u3 - u1))
        l2 = _at(nodes, b + 2) * (u0 / (u0 - u2)) * (u1 / (u1 - u2)) * (u3 / (u3 - u2))
        l3 = _at(nodes, b + 3) * (u0 / (u0 - u3)) * (u1 / (u1 - u3)) * (u2 / (u2 - u3))
        cubic = l0 + l1 + l2 + l3
        c = tl.where(inside & (cubic >= t0) & (cubic <= t1), cubic, line)
        share = tl.where(rises, rise / (t1 - t0) * c / (P * target), 1.0)
        exact = inside & rises & (width <= ENOUGH)
        # Near the reach, what is missing from it falls like a power of c; also beyond the nodes.
        near = rises & (share < 0.2) & (most < INF) & (y1 < most) & (target < most) & (width > 1e-4)
        r0, r1, r = tl.where(near, most - y0, 4.0), tl.where(near, most - y1, 1.0), most - target
        octaves, fall = tl.log2(t1 / t0), tl.log2(r1 / r0)
        c = tl.where(near, t0 * tl.exp2(tl.log2(tl.where(near, r / r0, 1.0)) / fall * octaves), c)
        share = tl.where(near, -fall / octaves * r / (P * target), share)
        if PASS == CLOSING:
            flag = tl.where(inside & rises, FOUND, CARE)
        else:
            flag = tl.where(exact, FOUND, tl.where(rises, STARTED, CARE))
            if flag == STARTED:
                # Near the reach c is less certain, and matters less.
                rough = tl.where(share > 0.1, 0.04, 0.08) if PASS == OPENING else 0.01
                narrower = tl.where(width <= ROUGH, 1e-3, rough)
                _aim(state, c, width * tl.where(inside, narrower, tl.where(near, 0.15, 2.0)), width < 0, DOUBLE)
        flag = tl.where((c > 0) & (c < 1e30), flag, CARE)
        if PASS == OPENING:
            tl.store(state + MOST, most)
            if MODE != 1:
                flag = tl.where(most < target * (1 - 1e-5), CORNER, flag)
    K = c / inv.to(tl.float64)
    if MODE == 1:
        K = tl.minimum(K, 1.0)
    elif MODE == 2:
        K = tl.maximum(K, 1.0)
    tl.store(state + SCALE, c)
    tl.store(state + SHARE, tl.maximum(share, 1e-4))
    tl.store(state + KEPT, K)
    tl.store(flags + index * 4, flag)
    if flag == FOUND:
        _set(state, K, c, WRITE, DOUBLE)


@triton.jit
def _rounds(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n,
    v, state, flags, counts, partials, parts,
    P: tl.constexpr, MODE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr, FIRST_ROUND: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`_traced.polish` for long rows of half precision, four scales at a time."""
    index = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0) % parts
    if tl.load(flags + index * 4) != FOUND:
        return
    DTYPE: tl.constexpr = v.dtype.element_ty
    state += index * STATE
    c, K = tl.load(state + SCALE), tl.load(state + KEPT)
    inv = tl.load(state + INV).to(tl.float32)
    if K != c / inv.to(tl.float64):  # held by the mode
        return
    first, _ = _split(K, False)
    i = tl.arange(0, 4)
    ABOUT: tl.constexpr = 4e-3 if DTYPE == tl.bfloat16 else 5e-4  # how far rounding may take it
    offsets = tl.where(i == 0, -0.15, tl.where(i == 1, -0.04, tl.where(i == 2, 0.04, 0.15)))
    if FIRST_ROUND:
        rests = (K * (1 + ABOUT * offsets.to(tl.float64)) / first.to(tl.float64)).to(tl.float32)
    else:
        rests = tl.load(state + RESTS + i).to(tl.float32)
    k0, k1, k2, k3 = _of_four(rests, 0), _of_four(rests, 1), _of_four(rests, 2), _of_four(rests, 3)
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    a0 = tl.zeros((CHUNK,), tl.float32)
    a1, a2, a3 = a0, a0, a0
    for start in range(0, SEGMENT, CHUNK):
        elements = _load(row, part * SEGMENT + start + tl.arange(0, CHUNK), n, LOW, UP, False)
        a0 = _and_move(a0, elements, first, k0, inv, P, DTYPE)
        a1 = _and_move(a1, elements, first, k1, inv, P, DTYPE)
        a2 = _and_move(a2, elements, first, k2, inv, P, DTYPE)
        a3 = _and_move(a3, elements, first, k3, inv, P, DTYPE)
    mine = partials + index * NODES * parts + part
    if P == INF:
        a0, a1, a2, a3 = tl.max(a0), tl.max(a1), tl.max(a2), tl.max(a3)
    else:
        a0, a1, a2, a3 = a0.to(tl.float64), a1.to(tl.float64), a2.to(tl.float64), a3.to(tl.float64)
        a0, a1, a2, a3 = tl.reduce((a0, a1, a2, a3), 0, _add4)
    tl.store(mine, a0.to(tl.float64))
    tl.store(mine + parts, a1.to(tl.float64))
    tl.store(mine + 2 * parts, a2.to(tl.float64))
    tl.store(mine + 3 * parts, a3.to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(counts + index * 4, 1, sem="acq_rel") != parts - 1:
        return

    tl.store(counts + index * 4, 0)
    found = tl.zeros((4, 128), tl.float64)
    for start in range(0, parts, 128):
        where = start + tl.arange(0, 128)
        there = partials + index * NODES * parts + i[:, None] * parts + where[None, :]
        some = tl.load(there, mask=(where < parts)[None, :] & (i >= 0)[:, None], other=0.0, cache_modifier=".cg")
        found = tl.maximum(found, some) if P == INF else found + some
    totals = tl.max(found, axis=1) if P == INF else tl.sum(found, axis=1)
    inv, target = _units(_budget(eps, index * eps_row, False), P, False)
    norms = _root(totals, P) / _root(target, P)
    scales = first.to(tl.float64) * rests.to(tl.float64)
    limit = target * 0 + 1 - 1e-7 if MODE == 1 else target * 0 + INF
    edge = tl.minimum(limit, 1.0)
    if FIRST_ROUND:
        lo, at_lo, hi, at_hi, gap, best = K * 0 - 1, K * 0, K * 0 + INF, K * 0, K * 0 + INF, K
    else:
        lo, at_lo, hi, at_hi = tl.load(state + LO), tl.load(state + AT_LO), tl.load(state + HI), tl.load(state + AT_HI)
        gap, best = tl.load(state + GAP), tl.load(state + BEST)
    above = norms > edge
    low, high = tl.max(tl.where(above, -1.0, scales)), tl.min(tl.where(above, scales, INF))
    at_lo = tl.where(low > lo, tl.max(tl.where(above, -1.0, norms)), at_lo)
    at_hi = tl.where(high < hi, tl.min(tl.where(above, norms, INF)), at_hi)
    before = hi - lo
    lo, hi = tl.maximum(lo, low), tl.minimum(hi, high)
    gaps = tl.where(norms <= limit, tl.abs(norms - 1), INF)
    here = tl.min(gaps)
    best = tl.where(here < gap, tl.max(tl.where(gaps == here, scales, 0.0)), best)
    gap = tl.minimum(gap, here)
    between = (lo >= 0) & (hi < INF)
    # Where a line leads: through both ends, or from the only one with the slope that the norm has without rounding.
    end, at_end = tl.where(lo >= 0, lo, hi), tl.where(lo >= 0, at_lo, at_hi)
    chord = lo + (hi - lo) * ((edge - at_lo) / tl.where(between, at_hi - at_lo, 1.0))
    beyond = end * (1 + tl.minimum(tl.maximum((edge - at_end) / tl.load(state + SHARE), -0.1), 0.1))
    guess = tl.where(between, chord, beyond)
    width = tl.where(between, hi - lo, 2 * tl.abs(guess - end) + end * 2.0**-22)
    # Where few elements move at a time, a line leads astray.
    astray = between & ((width < lo * 2.0**-20) | (width > 0.4 * before))
    spread = tl.where(astray, 0.2 * (i + 1).to(tl.float64), offsets.to(tl.float64))
    rests = ((tl.where(astray, lo, guess) + width * spread) / first.to(tl.float64)).to(tl.float32)
    scales = first.to(tl.float64) * rests.to(tl.float64)
    new = (scales > lo) & (scales < hi)
    settled = (gap <= 2e-7 + (1 - edge)) | (between & (tl.max(new.to(tl.int32)) == 0))
    tl.store(state + RESTS + i, rests.to(tl.float64))
    tl.store(state + LO, lo)
    tl.store(state + AT_LO, at_lo)
    tl.store(state + HI, hi)
    tl.store(state + AT_HI, at_hi)
    tl.store(state + GAP, gap)
    tl.store(state + BEST, best)
    if settled:
        tl.store(flags + index * 4, SETTLED)
        _set(state, best, c, True, False)


@triton.jit
def _of_four(values, index):
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0.0))


@triton.jit
def _and_move(total, elements, first, rest, inv, P: tl.constexpr, DTYPE: tl.constexpr):
    """A total, and what the elements add to it as they would be written."""
    x, _, lower, upper = elements
    x = tl.minimum(tl.maximum(x, lower), upper)
    move = tl.abs(_moved(elements, first, rest, False, DTYPE).to(tl.float32) - x) * inv
    if P == INF:
        total = tl.maximum(total, move)
    else:
        total += _power(move, P, False)
    return total


@triton.jit
def _set(state, K, c, WRITE: tl.constexpr, DOUBLE: tl.constexpr):
    """What `_write` is to multiply with."""
    first, rest = _split(K if WRITE else c, DOUBLE)
    tl.store(state + FIRST, first.to(tl.float64))
    tl.store(state + REST, rest.to(tl.float64))


@triton.jit
def _write(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n,
    v, eta, status, state, flags, counts, partials, parts,
    P: tl.constexpr, MODE: tl.constexpr, WRITE: tl.constexpr, DOUBLE: tl.constexpr, HALF: tl.constexpr,
    LOW: tl.constexpr, UP: tl.constexpr, AGAIN: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The array, and whether its norm is right: if so the row is DONE, and if not it has a better scale. Without an
    array, a step of Newton's from c instead. `AGAIN` also takes the rows that are out of reach."""
    index, part = _backwards(parts)
    flag = tl.load(flags + index * 4)
    corner = flag == CORNER if AGAIN else False
    if (flag != FOUND) & (flag != SETTLED) & (~corner if AGAIN else True):
        return
    DTYPE: tl.constexpr = v.dtype.element_ty
    CLOSE: tl.constexpr = 4e-15 if DOUBLE else 2.5e-7
    AT_MOST: tl.constexpr = MODE == 1
    # The scale makes good for rounding, of which eta knows nothing: its own norm is without.
    APART: tl.constexpr = WRITE and P != INF and not (DOUBLE or HALF)
    real: tl.constexpr = tl.float64 if DOUBLE or AT_MOST else tl.float32
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    state += index * STATE
    inv = _real(tl.load(state + INV), DOUBLE)
    first, rest = _real(tl.load(state + FIRST), DOUBLE), _real(tl.load(state + REST), DOUBLE)
    one = tl.zeros((CHUNK,), real)
    two = tl.zeros((CHUNK,), real)
    ceiling = tl.zeros((CHUNK,), real)
    for start in range(0, SEGMENT, CHUNK):
        cols = part * SEGMENT + start + tl.arange(0, CHUNK)
        elements = _load(row, cols, n, LOW, UP, DOUBLE)
        here, along, low, high = elements
        # NaN where anything makes no sense.
        ordered = (low <= high) & (low < INF) & (high > -INF)
        wrong = (here - here) + (along - along) + tl.where(ordered, 0.0, float("nan"))
        if WRITE:
            kept = _moved(elements, first, rest, corner, DTYPE)
            tl.store(v + index * n + cols, kept, mask=cols < n)
            inner = tl.minimum(tl.maximum(here, low), high)
            if AT_MOST:
                move = tl.abs(kept.to(tl.float64) - inner.to(tl.float64)) * inv
            else:
                move = tl.abs(_real(kept, DOUBLE) - inner) * inv
            if P == INF:
                one = tl.maximum(one, tl.where(wrong == 0, move, INF))
            else:
                one += _power(move, P, False) + wrong
            if APART:
                z = ((tl.abs(along) * first) * rest) * inv
                two += _power(tl.minimum(z, _room(here, along, low, high) * inv), P, True)
        else:
            room = tl.minimum(_room(here, along, low, high) * inv, 1 + 2.0**-10)
            z = (tl.abs(along) * first) * rest
            power = _power(tl.minimum(z, room), 1 if P == INF else P, False)
            one += tl.where(z >= room, 0.0, power) + wrong
            two += tl.where(z >= room, power, 0.0)
        if AGAIN:
            if corner:
                ahead = _room(here, along, low, high) / tl.where(along == 0, 1.0, tl.abs(along))
                ceiling = tl.maximum(ceiling, ahead.to(real))
    mine = partials + index * NODES * parts + part
    if WRITE and not APART:
        tl.store(mine, (tl.max(one) if P == INF else tl.sum(one)).to(tl.float64))
    else:
        one, two = tl.reduce((one, two), 0, _add)
        tl.store(mine, one.to(tl.float64))
        tl.store(mine + parts, two.to(tl.float64))
    if AGAIN:
        tl.store(mine + 2 * parts, tl.max(ceiling).to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(counts + index * 4, 1, sem="acq_rel") != parts - 1:
        return

    tl.store(counts + index * 4, 0)
    totals = tl.zeros((256,), tl.float64)
    others = tl.zeros((256,), tl.float64)
    ceilings = tl.zeros((256,), tl.float64)
    for start in range(0, parts, 256):
        where = start + tl.arange(0, 256)
        there = partials + index * NODES * parts + where
        some = tl.load(there, mask=where < parts, other=0.0, cache_modifier=".cg")
        if WRITE and P == INF:
            totals = tl.maximum(totals, some)
        else:
            totals += some
            if APART or not WRITE:
                others += tl.load(there + parts, mask=where < parts, other=0.0, cache_modifier=".cg")
        if AGAIN:
            most = tl.load(there + 2 * parts, mask=where < parts, other=0.0, cache_modifier=".cg")
            ceilings = tl.maximum(ceilings, most)
    c, K = tl.load(state + SCALE), tl.load(state + KEPT)
    inv, target = _units(_budget(eps, index * eps_row, DOUBLE), P, DOUBLE)
    free = c / inv.to(tl.float64)  # the scale without regard to the mode
    held = (free > 1) if AT_MOST else ((free < 1) if MODE == 2 else free < 0)
    if WRITE:
        total = tl.max(totals) if P == INF else tl.sum(totals)
        norm = _root(total, P) / _root(target, P)
        aim = target * 0 + 1 - CLOSE if AT_MOST else target * 0 + 1
        if AT_MOST:
            right = (norm + SLACK <= 1) & (held | (flag == SETTLED) | (norm + 2 * CLOSE >= 1))
        else:
            right = (tl.abs(norm - 1) <= CLOSE) | ((held | (flag == SETTLED)) & (norm < INF))
        share = tl.load(state + SHARE)
        if APART:
            free = K * (1 + (_root(target, P) / _root(tl.sum(others), P) - 1) / share)
        elif P != INF and not HALF:
            free = K * (1 + (1 / norm - 1) / share)
        found = tl.where(held, 1.0, free)
        K *= 1 + tl.minimum(tl.maximum((aim / norm - 1) / share, -0.5), 0.5)
        tl.store(state + KEPT, K)
    else:
        U, C = tl.sum(totals), tl.sum(others)
        fine = (C < target) & (U > 0)
        root = c if P == INF else c * _root(tl.where(fine, (target - C) / tl.where(fine, U, 1.0), 1.0), P)
        right = fine & (tl.abs(root - c) <= (1e-13 if DOUBLE else 1e-5) * c)
        if P == INF:
            right = U < INF
        found = root / inv.to(tl.float64)
        if AT_MOST:
            found = tl.minimum(found, 1.0)
        elif MODE == 2:
            found = tl.maximum(found, 1.0)
        if MODE == 0:
            held = found < 0
        else:
            held = found == 1.0
        c = root
        tl.store(state + SCALE, c)
    code = tl.where(held, HELD, REGULAR)
    if AGAIN:
        # Everything at its bound; NaN, if anything makes no sense.
        finite = norm < INF if WRITE else U + C < INF
        right, found = tl.where(corner, finite, right), tl.where(corner, tl.max(ceilings), found)
        code = tl.where(corner, UNREACHABLE, code)
    if right:
        tl.store(eta + index, found)
        tl.store(status + index, code.to(tl.int64))
        tl.store(flags + index * 4, DONE)
    else:
        tl.store(flags + index * 4, tl.where(flag == FOUND, FOUND, CARE))
        _set(state, K, c, WRITE, DOUBLE)


# --- derivatives ------------------------------------------------------------------------------------------------------

TOP = tl.constexpr(0)  # the largest |delta| that counts
LENGTH = tl.constexpr(1)  # the sum of (k*|delta|)^p over what counts
SLOPES = tl.constexpr(2)  # D, or for p = inf how many elements are active, and the sum of g*delta


@triton.jit
def _weights(elements, of_eta, of_ratio, inv, code, top, P: tl.constexpr, ULP: tl.constexpr):
    """`_derivatives.partials`: what is free, what follows x, and sign*w (for p = inf: of the active, sign)."""
    x, delta, lower, upper = elements
    size, still = tl.abs(delta), delta == 0
    sign = tl.where(delta < 0, -1.0, tl.where(still, 0.0, 1.0)).to(delta.dtype)
    s = tl.maximum(tl.where(delta < 0, x - lower, upper - x), 0.0)
    at_zero, unreachable = code == AT_ZERO, code == UNREACHABLE
    free = still | (((size * of_eta[0]) * of_eta[1] <= s + s * (4 * ULP)) & (s > 0) & ~unreachable)
    if P == INF:
        active = _able(s, inv, at_zero, ULP) & (size == top) & ~still & ~unreachable
        free = free | active
        w = tl.where(active, sign, 0.0)
    elif P == 1:
        w = sign
    else:
        base = tl.where(free, (size * of_ratio[0]) * of_ratio[1], tl.where(at_zero, 0.0, s * inv))
        positive = (base > 0) & ~still
        w = sign * tl.where(positive, _power(tl.where(positive, base, 1.0), P - 1, False), 0.0)
    return free, free | at_zero, w


@triton.jit
def _able(s, inv, at_zero, ULP: tl.constexpr):
    return (s * inv + 8 * ULP >= 1) | (at_zero & (s > 0))


@triton.jit
def _pull_tile(elements, g, of_eta, of_ratio, inv, code, top, P: tl.constexpr, WHAT: tl.constexpr, ULP: tl.constexpr):
    x, delta, lower, upper = elements
    size = tl.abs(delta)
    if WHAT == SLOPES:
        free, _, w = _weights(elements, of_eta, of_ratio, inv, code, top, P, ULP)
        wide = delta.to(tl.float64)
        one = tl.where(free, tl.abs(w).to(tl.float64) if P == INF else w.to(tl.float64) * wide, 0.0)
        two = tl.where(free, g.to(tl.float64) * wide, 0.0)
    else:
        s = tl.maximum(tl.where(delta < 0, x - lower, upper - x), 0.0)
        at_zero = code == AT_ZERO
        if P == INF:
            # Not of what has a little less room, and at this eta would move further.
            counts = _able(s, inv, at_zero, ULP) & ((size * of_ratio[0]) * of_ratio[1] - 8 * ULP <= 1)
        else:
            counts = s > 0
        size = tl.where(counts, size, 0.0)
        one = (
            size.to(tl.float64) if WHAT == TOP else _power((size * of_ratio[0]) * of_ratio[1], P, False).to(tl.float64)
        )
        two = one
    return one, two


@triton.jit
def _pull_pass(
    held, g_held, row, g, g_col, n, of_eta, of_ratio, inv, code, top,
    P: tl.constexpr, WHAT: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr,
    BLOCK: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    ULP: tl.constexpr = 2.0**-52 if DOUBLE else 2.0**-23
    if HOLDS:
        one, two = _pull_tile(held, g_held, of_eta, of_ratio, inv, code, top, P, WHAT, ULP)
    else:
        one = tl.zeros((BLOCK,), tl.float64)
        two = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, n, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            elements = _load(row, cols, n, LOW, UP, DOUBLE)
            above = _real(tl.load(g + cols.to(tl.int64) * g_col, mask=cols < n, other=0.0), DOUBLE)
            more, other = _pull_tile(elements, above, of_eta, of_ratio, inv, code, top, P, WHAT, ULP)
            if WHAT == TOP:
                one = tl.maximum(one, more)
            else:
                one, two = one + more, two + other
    if WHAT == TOP:
        one = tl.max(one, 0)
        two = one
    else:
        one, two = tl.reduce((one, two), 0, _add)
    return one, two


@triton.jit
def _pull_store(
    elements, g, x_bar, delta_bar, c_bar, cols, n, of_eta, of_ratio, inv, code, top, lam, scale, eta,
    P: tl.constexpr, X_BAR: tl.constexpr, DELTA_BAR: tl.constexpr, C_BAR: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """`_derivatives.vjp`. Rows that have no eta have no derivatives."""
    ULP: tl.constexpr = 2.0**-52 if DOUBLE else 2.0**-23
    free, follows, w = _weights(elements, of_eta, of_ratio, inv, code, top, P, ULP)
    if not DOUBLE:
        # Infinity times 0 is no number; but what is none remains so.
        lam = tl.where(lam == lam, tl.minimum(tl.maximum(lam, -(2.0**127)), 2.0**127), lam)
    pull = _real(lam, DOUBLE) * (w * _real(scale, DOUBLE))
    lost = eta != eta
    nan = float("nan")
    if X_BAR:
        bar = tl.where(lost, nan, tl.where(follows, g, pull))
        tl.store(x_bar + cols, bar.to(x_bar.dtype.element_ty), mask=cols < n)
    if DELTA_BAR:
        still = code == UNREACHABLE
        bar = tl.where(lost, nan, tl.where(free & ~still, ((g - pull) * of_eta[0]) * of_eta[1], 0.0))
        tl.store(delta_bar + cols, bar.to(delta_bar.dtype.element_ty), mask=cols < n)
    if C_BAR:
        bar = tl.where(lost, nan, tl.where(follows, 0.0, g - pull))
        tl.store(c_bar + cols, bar.to(c_bar.dtype.element_ty), mask=cols < n)


@triton.jit
def _pull_scalars(eps, eps_row, eta, status, index, DOUBLE: tl.constexpr):
    e, k, code = _budget(eps, index * eps_row, DOUBLE), tl.load(eta + index), tl.load(status + index)
    regular = code == REGULAR
    some = tl.where(k == k, k, 0.0)
    inv = tl.where(regular, 1 / tl.where(regular & (e > 0), e, 1.0), 0.0)
    if not DOUBLE:
        inv = tl.minimum(inv, 2.0**126)
    return k, code, _split(some, DOUBLE), _split(some * inv, DOUBLE), _real(inv, DOUBLE)


@triton.jit
def _pull_rows(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n,
    eta, status, g, g_row, g_col, h, x_bar, delta_bar, c_bar, eps_bar,
    P: tl.constexpr, X_BAR: tl.constexpr, DELTA_BAR: tl.constexpr, C_BAR: tl.constexpr, H: tl.constexpr,
    DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """The gradients of a row by one program; of rows that it cannot hold, those alone that `_pull_write` leaves out."""
    index = tl.program_id(0).to(tl.int64)
    k, code, of_eta, of_ratio, inv = _pull_scalars(eps, eps_row, eta, status, index, DOUBLE)
    if not HOLDS and P != INF:
        if code != AT_ZERO:
            return
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    g += index * g_row
    cols = tl.arange(0, BLOCK)
    held = _load(row, cols, n, LOW, UP, DOUBLE)
    g_held = _real(tl.load(g + cols.to(tl.int64) * g_col, mask=cols < n, other=0.0), DOUBLE)
    top = _real(k * 0, DOUBLE)
    if P == INF or code == AT_ZERO:
        wide_top, _ = _pull_pass(
            held, g_held, row, g, g_col, n, of_eta, of_ratio, inv, code, top,
            P, TOP, DOUBLE, LOW, UP, BLOCK, HOLDS,
        )  # fmt: skip
        top = _real(wide_top, DOUBLE)
        if P != INF:
            # At eps = 0 the weights are those of the limit.
            down = 1 / tl.where(wide_top > 0, wide_top, 1.0)
            length, _ = _pull_pass(
                held, g_held, row, g, g_col, n, of_eta, _split(down, DOUBLE), inv, code, top,
                P, LENGTH, DOUBLE, LOW, UP, BLOCK, HOLDS,
            )  # fmt: skip
            of_ratio = _split(tl.where(length > 0, down / _root(tl.where(length > 0, length, 1.0), P), 0.0), DOUBLE)
    D, S = _pull_pass(
        held, g_held, row, g, g_col, n, of_eta, of_ratio, inv, code, top, P, SLOPES, DOUBLE, LOW, UP, BLOCK, HOLDS
    )
    if H:
        S += tl.load(h + index)
    scale = 1 / tl.where(D > 0, D, 1.0) if P == INF else D * 0 + 1
    D = tl.where(D > 0, top.to(tl.float64), 0.0) if P == INF else D
    moves = ((code == REGULAR) | (code == AT_ZERO)) & (D > 0)
    lam = tl.where(moves, S / tl.where(moves, D, 1.0), 0.0)
    tl.store(eps_bar + index, tl.where(k == k, lam, float("nan")))
    if HOLDS:
        _pull_store(
            held, g_held, x_bar + index * n, delta_bar + index * n, c_bar + index * n, cols, n,
            of_eta, of_ratio, inv, code, top, lam, scale, k, P, X_BAR, DELTA_BAR, C_BAR, DOUBLE,
        )  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            here = start + cols
            above = _real(tl.load(g + here.to(tl.int64) * g_col, mask=here < n, other=0.0), DOUBLE)
            _pull_store(
                _load(row, here, n, LOW, UP, DOUBLE), above, x_bar + index * n, delta_bar + index * n,
                c_bar + index * n, here, n, of_eta, of_ratio, inv, code, top, lam, scale, k,
                P, X_BAR, DELTA_BAR, C_BAR, DOUBLE,
            )  # fmt: skip


@triton.jit
def _pull_sums(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n,
    eta, status, g, g_row, g_col, h, eps_bar, counts, partials, parts,
    P: tl.constexpr, H: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """eps_bar of long rows."""
    index = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0) % parts
    ULP: tl.constexpr = 2.0**-52 if DOUBLE else 2.0**-23
    k, code, of_eta, of_ratio, inv = _pull_scalars(eps, eps_row, eta, status, index, DOUBLE)
    if code != REGULAR:
        if part == 0:
            tl.store(eps_bar + index, 0.0)
        return
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    one = tl.zeros((CHUNK,), tl.float64)
    two = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, SEGMENT, CHUNK):
        cols = part * SEGMENT + start + tl.arange(0, CHUNK)
        elements = _load(row, cols, n, LOW, UP, DOUBLE)
        above = _real(tl.load(g + index * g_row + cols.to(tl.int64) * g_col, mask=cols < n, other=0.0), DOUBLE)
        more, other = _pull_tile(elements, above, of_eta, of_ratio, inv, code, inv, P, SLOPES, ULP)
        one, two = one + more, two + other
    one, two = tl.reduce((one, two), 0, _add)
    mine = partials + index * 2 * parts + part
    tl.store(mine, one)
    tl.store(mine + parts, two)
    tl.debug_barrier()
    if tl.atomic_add(counts + index * 4, 1, sem="acq_rel") != parts - 1:
        return
    one = tl.zeros((256,), tl.float64)
    two = tl.zeros((256,), tl.float64)
    for start in range(0, parts, 256):
        where = start + tl.arange(0, 256)
        there = partials + index * 2 * parts + where
        one += tl.load(there, mask=where < parts, other=0.0, cache_modifier=".cg")
        two += tl.load(there + parts, mask=where < parts, other=0.0, cache_modifier=".cg")
    D, S = tl.sum(one), tl.sum(two)
    if H:
        S += tl.load(h + index)
    lam = tl.where(D > 0, S / tl.where(D > 0, D, 1.0), 0.0)
    tl.store(eps_bar + index, tl.where(k == k, lam, float("nan")))


@triton.jit
def _pull_write(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, eps, eps_row, n,
    eta, status, g, g_row, g_col, x_bar, delta_bar, c_bar, eps_bar, parts,
    P: tl.constexpr, X_BAR: tl.constexpr, DELTA_BAR: tl.constexpr, C_BAR: tl.constexpr,
    DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The other gradients of long rows."""
    index, part = _backwards(parts)
    k, code, of_eta, of_ratio, inv = _pull_scalars(eps, eps_row, eta, status, index, DOUBLE)
    if code == AT_ZERO:
        return
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    lam = tl.load(eps_bar + index)
    for start in range(0, SEGMENT, CHUNK):
        cols = part * SEGMENT + start + tl.arange(0, CHUNK)
        above = _real(tl.load(g + index * g_row + cols.to(tl.int64) * g_col, mask=cols < n, other=0.0), DOUBLE)
        _pull_store(
            _load(row, cols, n, LOW, UP, DOUBLE), above, x_bar + index * n, delta_bar + index * n, c_bar + index * n,
            cols, n, of_eta, of_ratio, inv, code, inv, lam, lam * 0 + 1, k, P, X_BAR, DELTA_BAR, C_BAR, DOUBLE,
        )  # fmt: skip


@triton.jit
def _reach_rows(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, n, found,
    P: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr,
    BLOCK: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    held = _load(row, tl.arange(0, BLOCK), n, LOW, UP, DOUBLE)
    none = tl.load(row[0]).to(tl.float64) * 0
    inv = _real(none, DOUBLE)
    top, _ = _pass(held, row, n, none, inv, False, P, LOOK, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
    largest, _ = _pass(held, row, n, none, inv, False, P, ROOM, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
    reached = largest
    if P != INF:
        if (largest > 0) & (largest < INF):
            total, _ = _pass(held, row, n, 1 / largest, inv, False, P, FILLED, DTYPE, DOUBLE, LOW, UP, BLOCK, HOLDS)
            reached = _root(total, P) * largest
    tl.store(found + index, tl.where(top < INF, reached, float("nan")))


@triton.jit
def _reach_parts(
    x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, n, found, counts, partials, parts,
    P: tl.constexpr, DOUBLE: tl.constexpr, LOW: tl.constexpr, UP: tl.constexpr, SUMS: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest room of long rows, NaN if anything makes no sense; or then, from that, the reach."""
    index = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0) % parts
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = _row(x, delta, lower, upper, x_row, delta_row, lower_row, upper_row, index)
    largest = tl.load(found + index) if SUMS else tl.zeros((), tl.float64) + 1
    if SUMS:
        if ~((largest > 0) & (largest < INF)):
            return
    first, rest = _split(1 / largest, DOUBLE)
    one = tl.zeros((CHUNK,), tl.float64)
    two = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, SEGMENT, CHUNK):
        elements = _load(row, part * SEGMENT + start + tl.arange(0, CHUNK), n, LOW, UP, DOUBLE)
        if SUMS:
            more, _ = _tile(elements, first, rest, first, False, P, FILLED, DTYPE, 0.0)
            one += more
        else:
            more, _ = _tile(elements, first, rest, first, False, P, ROOM, DTYPE, 0.0)
            look, _ = _tile(elements, first, rest, first, False, P, LOOK, DTYPE, 0.0)
            one, two = tl.maximum(one, more.to(tl.float64)), tl.maximum(two, look.to(tl.float64))
    mine = partials + index * 2 * parts + part
    tl.store(mine, tl.sum(one) if SUMS else tl.max(one))
    tl.store(mine + parts, tl.max(two))
    tl.debug_barrier()
    if tl.atomic_add(counts + index * 4, 1, sem="acq_rel") != parts - 1:
        return
    tl.store(counts + index * 4, 0)
    one = tl.zeros((256,), tl.float64)
    two = tl.zeros((256,), tl.float64)
    for start in range(0, parts, 256):
        where = start + tl.arange(0, 256)
        there = partials + index * 2 * parts + where
        some = tl.load(there, mask=where < parts, other=0.0, cache_modifier=".cg")
        one = one + some if SUMS else tl.maximum(one, some)
        two = tl.maximum(two, tl.load(there + parts, mask=where < parts, other=0.0, cache_modifier=".cg"))
    if SUMS:
        tl.store(found + index, _root(tl.sum(one), P) * largest)
    else:
        tl.store(found + index, tl.where(tl.max(two) < INF, tl.max(one), float("nan")))


# --- launches ---------------------------------------------------------------------------------------------------------


def _lines(a: Array) -> Array:
    """With the elements of a row next to each other."""
    a = a.resolve_neg()
    return a if a.shape[1] == 1 or a.stride(1) == 1 else a.contiguous()


def _rows_of(a: Array) -> int:
    """From row to row: nothing, if there is one for all."""
    return 0 if a.shape[0] == 1 else a.stride(0)


@functools.lru_cache(maxsize=256)
def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _operand(a: Array) -> tuple[Any, int, bool, Any]:
    """An eps or a bound as kernels take it, its step from row to row, whether it has one value per element; and all
    that code depends on: what lies at a multiple of 16 bytes, as all of our own does, or how large a number is."""
    if isinstance(a, float):
        bits = _bits(a)
        return bits, 0, False, (bits == 0, bits % 16 == 0)
    a = _lines(a)
    return a, _rows_of(a), a.shape[1] != 1, a.data_ptr() % 16 == 0


class _Key(NamedTuple):
    """All that the code of a kernel depends on."""

    dtype: torch.dtype
    device: int
    low: bool  # whether that bound has a value per element
    up: bool
    rest: tuple[Any, ...]
    double: bool  # whether it computes in float64

    def kinds(self) -> dict[str, Any]:
        return {"DOUBLE": self.double, "LOW": self.low, "UP": self.up}


def _arguments(problem: Problem, *rest: Any) -> tuple[tuple[Any, ...], _Key]:
    """What every kernel takes first, and a key for the code, which also depends on the order of the norm and `rest`."""
    x, delta = _lines(problem.x), _lines(problem.delta)
    eps, eps_row, _, of_eps = _operand(problem.eps)
    lower, lower_row, low, of_lower = _operand(problem.lower)
    upper, upper_row, up, of_upper = _operand(problem.upper)
    steps = _rows_of(x), _rows_of(delta), lower_row, upper_row
    where = x.data_ptr() % 16 == 0, delta.data_ptr() % 16 == 0, of_eps, of_lower, of_upper
    double = x.dtype == torch.float64
    key = _Key(x.dtype, x.get_device(), low, up, (where, steps, eps_row, x.shape[1], problem.p, *rest), double)
    return (x, delta, lower, upper, *steps, eps, eps_row, x.shape[1]), key


def _block(n: int, key: _Key) -> dict[str, Any]:
    """How one program goes through a row: with so few registers that several of them share a processor."""
    size = triton.next_power_of_2(n) if n <= LONGEST else STREAM
    warps = min(max(size // (512 if key.double else 1024), 1), 16)
    fewer = {} if INTERPRETED or key.double or n > LONGEST else {"maxnreg": 128}
    # Two elements for a thread at least. Of one alone, its product and the first sum with another thread's are fused,
    # by each of the two in its own way, and threads that differ in the last bit of a sum part at the next branch.
    return {"BLOCK": max(size, 64), "HOLDS": n <= LONGEST, "num_warps": warps, **fewer}


def _tiled_block(n: int, key: _Key) -> dict[str, Any]:
    """The same for `_solve_plainly`, which has four elements of a tile in a thread."""
    block = _block(n, key)
    tile = min(128 * block["num_warps"], block["BLOCK"])
    tiles = -(-n // tile) if n <= LONGEST else 1
    if tiles <= 6 and "maxnreg" in block:
        block["maxnreg"] = 96
    return {**block, "TILE": tile, "TILES": tiles, "EVEN": n % tile == 0}


# How a program goes through its part of a long row, and how far ahead it loads.
AT_NODES = {"SEGMENT": 8192, "CHUNK": 512, "STAGES": 4, "num_warps": 4}
VERY_LONG, MORE = 2**22, {"SEGMENT": 32768}  # fewer parts to add up
IN_WRITE = {"SEGMENT": 4096, "CHUNK": 1024, "num_warps": 4}
MANY = 2**25  # elements that keep a GPU busy in larger parts, too: for passes that have few rows left


_compiled: dict[Any, Any] = {}


def _launch(kernel: Any, programs: int, arguments: tuple[Any, ...], key: Any, constants: Any) -> None:
    """Run a kernel with the constants that a function returns. The code is kept under `key`: to find out which it is
    costs Triton far more than the launch."""
    known = _compiled.get((kernel, key))
    if known is not None:
        code, values = known
        code[(programs, 1, 1)](*arguments, *values)
        return
    given = constants()
    code = kernel[(programs,)](*arguments, **given)
    if not INTERPRETED:
        _compiled[kernel, key] = code, [given[name] for name in kernel.arg_names[len(arguments) :]]


def _on_device(function: Any) -> Any:
    """Kernels run on the current device, which need not be that of the arrays."""

    @functools.wraps(function)
    def called(problem: Problem, *rest: Any) -> Any:
        if INTERPRETED or problem.x.device.index == torch.cuda.current_device():
            return function(problem, *rest)
        with torch.cuda.device(problem.x.device):
            return function(problem, *rest)

    return called


@_on_device
def solve(problem: Problem, mode: str, write: bool) -> tuple[Array, Array, Array]:
    """v (empty unless `write`), eta and status. eps and bounds may be numbers, which then need no place on the GPU."""
    x, p = problem.x, problem.p
    rows, n = x.shape
    v = torch.empty_like(x, memory_format=torch.contiguous_format) if write else x.new_empty(0)
    eta = torch.empty((rows, 1), dtype=torch.float64, device=x.device)
    status = torch.empty((rows, 1), dtype=torch.int64, device=x.device)
    if not rows * n:
        return v, eta.zero_(), status.fill_(_problem.ZERO)
    given, key = _arguments(problem, mode, write)
    key = key._replace(double=key.double or not write)  # where nobody looks at the norm afterwards

    def options(**more: Any) -> dict[str, Any]:
        return {"P": p, "MODE": MODES[mode], "WRITE": write, **key.kinds(), **more}

    def rounds(**more: Any) -> dict[str, Any]:
        return {"P": p, "MODE": MODES[mode], "LOW": key.low, "UP": key.up, **more}

    half = x.dtype.itemsize == 2
    flags = status
    if n > LONGEST:
        many = rows * n >= MANY
        at_nodes = AT_NODES if n < VERY_LONG else {**AT_NODES, **MORE}
        at_last = {**AT_NODES, **MORE} if many else at_nodes
        to_write = {**IN_WRITE, "SEGMENT": 2 * IN_WRITE["SEGMENT"]} if many else IN_WRITE
        parts, ends, pieces, halves = (-(-n // shape["SEGMENT"]) for shape in (at_nodes, at_last, IN_WRITE, to_write))
        state = torch.empty((rows, STATE.value), dtype=torch.float64, device=x.device)
        flags, counts = torch.empty((2, rows, 4), dtype=torch.int32, device=x.device)  # each aligned as the code is for
        partials = torch.empty((rows, NODES.value, max(parts, pieces)), dtype=torch.float64, device=x.device)
        shared = state, flags, counts, partials
        sample = {"SIZE": SAMPLE, "RUN": SAMPLE_RUN, "num_warps": max(1, SAMPLE // 1024)}
        _launch(_start, rows, (*given, *shared[:3]), key, lambda: {"P": p, **key.kinds(), **sample})
        for which in (OPENING, MIDDLE, MIDDLE) if key.double else (OPENING,):
            constants = functools.partial(options, PASS=which.value, **at_nodes)
            _launch(_nodes, rows * parts, (*given, *shared, parts), (which.value, key), constants)
        constants = functools.partial(options, PASS=CLOSING.value, **at_last)
        _launch(_nodes, rows * ends, (*given, *shared, ends), (CLOSING.value, many, key), constants)
        if half and write:
            arguments = *given, v, *shared, pieces
            for i in range(ROUNDS):
                constants = functools.partial(rounds, FIRST_ROUND=i == 0, **IN_WRITE)
                _launch(_rounds, rows * pieces, arguments, (i == 0, key), constants)
        arguments = *given, v, eta, status, *shared
        constants = functools.partial(options, HALF=half, AGAIN=False, **IN_WRITE)
        _launch(_write, rows * pieces, (*arguments, pieces), (False, key), constants)
        constants = functools.partial(options, HALF=half, AGAIN=True, **to_write)
        _launch(_write, rows * halves, (*arguments, halves), (True, many, key), constants)
    arguments = *given, v, eta, status, flags
    _launch(_solve_rows, rows, arguments, key, lambda: options(HALF=half, **_tiled_block(n, key)))
    return v, eta, status


@_on_device
def reach(problem: Problem) -> Array:
    """The largest norm of every row."""
    x, p = problem.x, problem.p
    rows, n = x.shape
    found = torch.zeros((rows, 1), dtype=torch.float64, device=x.device)
    if rows * n:
        given, key = _arguments(problem._replace(eps=0.0))
        arguments = *given[:8], n, found
        if n <= LONGEST:
            _launch(_reach_rows, rows, arguments, key, lambda: {"P": p, **key.kinds(), **_block(n, key)})
            return found
        parts = -(-n // IN_WRITE["SEGMENT"])
        counts = torch.zeros((rows, 4), dtype=torch.int32, device=x.device)
        arguments = *arguments, counts, torch.empty((rows, 2, parts), dtype=torch.float64, device=x.device), parts
        for sums in (False,) if p == math.inf else (False, True):
            constants = functools.partial(dict, P=p, SUMS=sums, **key.kinds(), **IN_WRITE)
            _launch(_reach_parts, rows * parts, arguments, (sums, key), constants)
    return found


@_on_device
def vjp(problem: Problem, eta: Array, status: Array, g: Array, h: Array | None, needs: tuple[bool, ...]) -> list[Array]:
    """Gradients of x, delta, eps, and of the bound that delta points to; those of them that are needed."""
    x, p = problem.x, problem.p
    rows, n = x.shape
    eps_bar = torch.zeros((rows, 1), dtype=torch.float64, device=x.device)
    # What is added up afterwards is not rounded to 16 bits before.
    dtypes = x.dtype, x.dtype, torch.float32 if x.dtype.itemsize == 2 else x.dtype
    bars = [
        torch.empty((rows, n), dtype=dtype, device=x.device) if need else eps_bar
        for dtype, need in zip(dtypes, needs, strict=True)
    ]
    if rows * n:
        g = g.resolve_neg()
        g_steps = _rows_of(g), 0 if g.shape[1] == 1 else g.stride(1)
        some_h = eps_bar if h is None else h.resolve_neg().contiguous()
        given, key = _arguments(problem, needs, g_steps, g.dtype, g.data_ptr() & 15 == 0, h is None)
        given = *given, eta, status, g, *g_steps

        def options(**more: Any) -> dict[str, Any]:
            return {"P": p, **key.kinds(), **more}

        wanted = dict(zip(("X_BAR", "DELTA_BAR", "C_BAR"), needs, strict=True))
        with_h = {"H": h is not None}
        if n > LONGEST and p < math.inf:
            parts = -(-n // IN_WRITE["SEGMENT"])
            counts = torch.zeros((rows, 4), dtype=torch.int32, device=x.device)
            partials = torch.empty((rows, 2, parts), dtype=torch.float64, device=x.device)
            arguments = *given, some_h, eps_bar, counts, partials, parts
            _launch(_pull_sums, rows * parts, arguments, key, lambda: options(**with_h, **IN_WRITE))
            arguments = *given, *bars, eps_bar, parts
            _launch(_pull_write, rows * parts, arguments, key, lambda: options(**wanted, **IN_WRITE))
        arguments = *given, some_h, *bars, eps_bar
        _launch(_pull_rows, rows, arguments, key, lambda: options(**with_h, **wanted, **_block(n, key)))
    return [*bars[:2], eps_bar, bars[2]]
