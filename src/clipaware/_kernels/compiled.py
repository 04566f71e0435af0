"""What Numba compiles: the steps of ``_math``, a row at a time, in as few sweeps over its memory as they take.

A row is solved by a small machine. Its state says which sweep over the row it wants next (``LOOK``, ``SUMS``,
``WRITE``, ...); ``sweep`` makes it, over the row or any part of it, and boils it down to a few numbers; ``advance``
takes those and moves on. So a batch of rows is a loop in compiled code, and one long row is the same loop with its
sweeps spread over threads.

The innermost loops, marked ``@loop``, run over slices of at most ``LANE`` elements, which are summed in the array's own
dtype and added up in float64. They are written for LLVM to vectorise: each value loaded once, ``pick`` in place of a
branch, constants of the array's dtype, maxima over the bits of numbers that are not negative. Numba infers all types.

All compiled code of the solver is in this one file, since Numba looks at the file of an ``@entry`` to see whether what
it has on disk is out of date. What ``perturb_quantized`` needs is in ``grid.py``, made of the same parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from clipaware._math import (
    AT_ZERO,
    HALVE_FROM,
    HELD,
    MAX_PASSES,
    NEWTON_PASSES,
    POLISH_PASSES,
    REGULAR,
    ROOMY,
    UNREACHABLE,
    ZERO,
)

LANE = 4096
SAMPLE_FROM = 2**14  # rows this long solve a sample of contiguous runs first, and start there
SAMPLE_RUNS, SAMPLE_MOST = 8, 4096
HUGE, GREATEST = 1e300, float(np.finfo(np.float64).max)
SAFE = 1e30  # sums of powers up to this, and down to its reciprocal, have lost nothing
FAR_SINGLE, FAR_DOUBLE = 2.0**127, 2.0**1023
LIMIT = 1 - 32 * 2.0**-52  # of the norm over eps, where it must not be more
BAD = -1  # values of this row want looking at: something is not finite, or x not inside its bounds
LOST = -2  # and it stays so: the row is NaN

# The sweeps that a row may want.
DONE, LOOK, LARGEST, NAIVE, SAMPLE, SUMS, LOOK_AND_SUMS, BIGGEST, CEILING, TOP_OF_BRACKET, PROBE = range(11)
WRITE, REWRITE, COPY, CORNER, BLANK, ROOMS, REACH = range(11, 18)
MAXIMA = (LARGEST, BIGGEST, ROOMS)  # whose numbers are maxima, not sums

MODES = {"equal": 0, "at_most": 1, "at_least": 2}
_AT_MOST, _AT_LEAST = MODES["at_most"], MODES["at_least"]
SOLVED, REACHED = 0, 1

# What all rows of a call share.
RULES = np.dtype(
    [(name, np.int64) for name in ("n", "task", "mode", "write", "grid", "single", "final")]
    + [(name, np.float64) for name in ("p", "ulp", "tiny", "settled", "tight", "close", "least")],
)
# What a row knows of itself, in the letters of _math.
STATE = np.dtype(
    [(name, np.int64) for name in ("want", "status", "count", "left", "looked", "bracketed", "polishing")]
    + [(name, np.int64) for name in ("plain", "simple", "old_simple")]
    + [(name, np.float64) for name in ("eps", "inv", "target", "most", "m", "unit", "old_m", "old_unit")]
    + [(name, np.float64) for name in ("T", "lo", "hi", "C", "K", "slope", "down", "eta", "settled")]
    + [(name, np.float64) for name in ("below", "above", "at_below", "at_above", "best", "gap", "written")],
)

# Orders whose powers are worth their own code. Compiled code tells them apart by the length of a tuple, a type.
ORDERS = {1.0: (0,), 1.5: (0,) * 2, 2.0: (0,) * 3, 3.0: (0,) * 4, 4.0: (0,) * 5, math.inf: (0,) * 6}
ANY_ORDER = (0,) * 7

# Products and sums may be fused. Nothing else is reordered but the sums that `plus` makes: (eta*m)*(delta/m) is not
# eta*delta where eta is no float32.
_inner: Any = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
loop: Any = njit(fastmath={"contract"}, **_inner)
step: Any = njit(**_inner)


def entry(function: Any) -> Any:
    """Compile at the first call and keep the result on disk, or only in memory where nothing can be written."""
    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no place for a cache
        return njit(**options)(function)


# --- what the loops are made of ---------------------------------------------------------------------------------------


@intrinsic
def pick(typing, condition, yes, no):
    """`yes` if condition else `no`, without a branch."""

    def generate(context, builder, signature, arguments):
        return builder.select(*arguments)

    return yes(types.boolean, yes, yes), generate


@intrinsic
def plus(typing, total, z):
    """total + z in the type of the total, in any order with its other terms: what lets LLVM vectorise a sum."""

    def generate(context, builder, signature, arguments):
        total, z = arguments
        z = context.cast(builder, z, signature.args[1], signature.args[0])
        return builder.fadd(total, z, flags=("reassoc", "contract"))

    return total(total, z), generate


def at(bound, i):
    """A bound at an element: its own, or the row's."""


@overload(at)
def _at(bound, i):
    if isinstance(bound, types.Array):
        return lambda bound, i: bound[i]
    return lambda bound, i: bound


def cut(bound, start, stop):
    """The part of a bound that belongs to a part of its row."""


@overload(cut)
def _cut(bound, start, stop):
    if isinstance(bound, types.Array):
        return lambda bound, start, stop: bound[start:stop]
    return lambda bound, start, stop: bound


def of_row(bounds, i):
    """The bound of a row, from one for all rows or one for each: a number, or an array if they have two axes."""


@overload(of_row)
def _of_row(bounds, i):
    return lambda bounds, i: bounds[i if bounds.shape[0] > 1 else 0]


def is_roomy(lower, upper, most):
    """Whether a row's bounds are numbers, and no further apart than that."""


@overload(is_roomy)
def _is_roomy(lower, upper, most):
    if isinstance(lower, types.Array):
        return lambda lower, upper, most: False
    return lambda lower, upper, most: upper - lower <= most


def bits_of(z):
    """The bits of a float, which for those that are not negative are in the same order."""


@overload(bits_of)
def _bits_of(z):
    if z == types.float32:
        return lambda z: np.float32(z).view(np.int32)
    return lambda z: np.float64(z).view(np.int64)


def float_of(i):
    """The float that these bits are."""


@overload(float_of)
def _float_of(i):
    if i == types.int32:
        return lambda i: np.int32(i).view(np.float32)
    return lambda i: np.int64(i).view(np.float64)


@loop
def power(z, p):
    """z^p for z >= 0 to about 1e-10, in operations that vectorise: 2^(p*log2(z))."""
    pattern = np.float64(z).view(np.int64)
    exponent = (pattern - np.int64(0x3FE6A09E667F3BCD)) >> np.int64(52)  # leaves a mantissa from sqrt(1/2) to sqrt(2)
    mantissa = np.int64(pattern - (exponent << np.int64(52))).view(np.float64)
    # log(mantissa) = 2*atanh(s)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    series = 1 / 9 + q * (1 / 11 + q * (1 / 13 + q / 15))
    log2 = exponent + s * 2.8853900817779268 * (1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * series))))
    y = p * log2
    y = pick(y > -1020.0, y, -1020.0)
    y = pick(y < 1020.0, y, 1020.0)
    whole = math.floor(y + 0.5)
    f = (y - whole) * 0.6931471805599453
    tail = 1 / 120 + f * (1 / 720 + f * (1 / 5040 + f * (1 / 40320 + f * (1 / 362880))))
    scale = np.int64((np.int64(whole) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return pick(z > 0, scale * (1.0 + f * (1.0 + f * (1 / 2 + f * (1 / 6 + f * (1 / 24 + f * tail))))), 0.0)


def raised(z, p, order):
    """z^p for z >= 0, in z's dtype."""


@overload(raised)
def _raised(z, p, order):
    if order.count in (1, 6):
        return lambda z, p, order: z
    if order.count == 2:
        return lambda z, p, order: z * math.sqrt(z)
    if order.count == 3:
        return lambda z, p, order: z * z
    if order.count == 4:
        return lambda z, p, order: z * z * z
    if order.count == 5:
        return lambda z, p, order: (z * z) * (z * z)
    if z == types.float32:
        return lambda z, p, order: np.float32(power(z, p))
    return lambda z, p, order: z**p


# --- sweeps over a lane -----------------------------------------------------------------------------------------------


@loop
def _look(x, delta, a, b):
    """The largest |delta| and |x|, NaN if there is one, and how many x are not inside their bounds."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    top, far, outside = bits_of(zero), bits_of(zero), zero
    for i in range(x.size):
        here = x[i]
        u, w = bits_of(abs(delta[i])), bits_of(abs(here))
        top, far = pick(top > u, top, u), pick(far > w, far, w)
        outside = plus(outside, pick((here >= at(a, i)) & (here <= at(b, i)), zero, one))
    return float_of(top), float_of(far), outside


@loop
def _naive(delta, dm, per, full, p, order, none):
    """The sum of (d/unit)^p, in the dtype of `none`, which is 0."""
    total = none
    for i in range(delta.size):
        d = abs(delta[i]) * dm * per
        total = plus(total, raised(pick(d < full, d, full), p, order))
    return total


@loop
def _plain_sums(x, delta, a, b, T, p, order):
    """A and C where all units are 1 and no room is too large for its power."""
    zero = T - T
    A, C = zero, zero
    for i in range(x.size):
        here, towards = x[i], delta[i]
        d, w = abs(towards), abs(pick(towards > 0, at(b, i), at(a, i)) - here)
        clipped = T * d >= w
        z = raised(pick(clipped, w, d), p, order)
        A = plus(A, pick(clipped, zero, z))
        C = plus(C, pick(clipped, z, zero))
    return A, C


@loop
def _look_and_sums(x, delta, a, b, T, p, order):
    """The same, and the largest |delta|, NaN if there is one, and how many x are not inside their bounds."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    A, C, top, outside = zero, zero, bits_of(zero), zero
    for i in range(x.size):
        here, towards = x[i], delta[i]
        low, high = at(a, i), at(b, i)
        d, w = abs(towards), abs(pick(towards > 0, high, low) - here)
        clipped = T * d >= w
        z = raised(pick(clipped, w, d), p, order)
        A = plus(A, pick(clipped, zero, z))
        C = plus(C, pick(clipped, z, zero))
        u = bits_of(d)
        top = pick(top > u, top, u)
        outside = plus(outside, pick((here >= low) & (here <= high), zero, one))
    return A, C, float_of(top), outside


@loop
def _sums(x, delta, a, b, T, dm, inv, most, per, full, p, order, none):
    """A and C in any units, added up in the dtype of `none`, which is 0. `per` is one over the unit of d, of which no
    more than `full` counts."""
    zero = T - T
    A, C = none, none
    for i in range(x.size):
        here, towards = x[i], delta[i]
        d, w = abs(towards) * dm, abs(pick(towards > 0, at(b, i), at(a, i)) - here) * inv
        w = pick(w < most, w, most)
        clipped = T * d >= w
        d = d * per
        z = raised(pick(clipped, w, pick(d < full, d, full)), p, order)
        A = plus(A, pick(clipped, zero, z))
        C = plus(C, pick(clipped, z, zero))
    return A, C


@step
def _biggest(x, delta, a, b, T, dm, inv, most):
    """The largest |delta| that is not clipped."""
    found = T - T
    for i in range(x.size):
        d, w = abs(delta[i]) * dm, abs((at(b, i) if delta[i] > 0 else at(a, i)) - x[i]) * inv
        if T * d < min(w, most):
            found = max(found, abs(delta[i]))
    return found


@step
def _ceiling(x, delta, a, b, dm, inv, most, p, order):
    """The largest w/d, and the sum of all w^p, in float64: whether a target is out of reach depends on it."""
    largest, total = 0.0, 0.0
    for i in range(x.size):
        if delta[i] != 0:
            w = min(abs((at(b, i) if delta[i] > 0 else at(a, i)) - x[i]) * inv, most)
            d = np.float64(abs(delta[i])) * dm
            largest = max(largest, min(np.float64(w) / d, HUGE) if d > 0 else HUGE)
            total += raised(np.float64(w), p, order)
    return largest, total


@loop
def _largest(x, delta, a, b, inv, enough, most):
    """The largest |delta|, of `most` at most, among the elements that have room, and enough of it."""
    zero = inv - inv
    found = bits_of(zero)
    for i in range(x.size):
        here, towards = x[i], delta[i]
        s = _ahead(here, towards, a, b, i)
        u = bits_of(pick((s * inv >= enough) & (s > 0) & (abs(towards) <= most), abs(towards), zero))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _write(x, delta, a, b, out, K, dm):
    for i in range(x.size):
        v = x[i] + K * (delta[i] * dm)
        low, high = at(a, i), at(b, i)
        v = pick(v > low, v, low)
        out[i] = pick(v < high, v, high)


@step
def _halved(here, move, low, high, grid):
    """clip(here + move), rounded to float16 (grid 1) or bfloat16 (grid 2), in float32."""
    v = np.float32(min(max(here + move, low), high))
    pattern = v.view(np.int32)
    drop = np.int32(13 if grid == 1 else 16)
    odd = (pattern >> drop) & np.int32(1)
    rounded = pattern + (np.int32(1) << (drop - np.int32(1))) - np.int32(1) + odd
    size = abs(v)
    if grid == 1 and size < np.float32(2.0**-14):
        # Subnormal there: multiples of 2^-24, the spacing of float32 from 1/2 on.
        return np.float32(math.copysign((size + np.float32(0.5)) - np.float32(0.5), v))
    if grid == 1 and size >= np.float32(65520):
        return np.float32(math.copysign(np.float32(np.inf), v))
    return np.int32(rounded & ~((np.int32(1) << drop) - np.int32(1))).view(np.float32)


@step
def _write_half(x, delta, a, b, out, K, dm, grid):
    """The same, rounded to half precision, in float32."""
    for i in range(x.size):
        out[i] = _halved(x[i], K * (delta[i] * dm), at(a, i), at(b, i), grid)


@loop
def _measure(x, v, down, p, order):
    """The sum of |v - x|^p, taken in the dtype of `down` and summed in float64: rounding decides on a polish."""
    number = type_of(down)
    total = 0.0
    for i in range(x.size):
        total = plus(total, raised(abs(number(v[i]) - number(x[i])) * down, p, order))
    return total


@loop
def _furthest(x, v, down):
    """The largest |v - x|, in the dtype of `down`."""
    number = type_of(down)
    found = bits_of(number(0))
    for i in range(x.size):
        u = bits_of(abs(number(v[i]) - number(x[i])) * down)
        found = pick(found > u, found, u)
    return float_of(found)


def type_of(a):
    """The type of a number."""


@overload(type_of)
def _type_of(a):
    number = np.float32 if a == types.float32 else np.float64
    return lambda a: number


@loop
def _rooms(x, delta, a, b):
    """The largest room of what moves."""
    zero = x.dtype.type(0)
    found = bits_of(zero)
    for i in range(x.size):
        here, towards = x[i], delta[i]
        s = abs(pick(towards > 0, at(b, i), at(a, i)) - here)
        u = bits_of(pick(towards != 0, s, zero))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _reach(x, delta, a, b, per, p, order):
    """The sum of (room/unit)^p of what moves, in float64: eps may be just this, and must then be in reach."""
    total, zero = 0.0, per - per
    for i in range(x.size):
        here, towards = x[i], delta[i]
        s = abs(pick(towards > 0, at(b, i), at(a, i)) - here) * per
        total = plus(total, raised(pick(towards != 0, s, zero), p, order))
    return total


# --- a sweep over a row, or a part of it ------------------------------------------------------------------------------


@step
def sweep(x, delta, a, b, out, s, rules, order):
    """Make the sweep that the state wants. Returns two numbers, sums or maxima over the elements; then two that always
    are maxima: |delta| where it looks at the row or w/d for a ceiling, and 1 if something is not as it should be."""
    F = x.dtype.type
    want, p = s.want, rules.p
    T, K = F(s.T), F(s.K)
    dm, inv, most, per = F(1 / s.m), F(s.inv), F(s.most), F(1 / s.unit)
    full = F(1.0) if p > 4 or s.simple == 0 else F(HUGE)
    u, w, top, bad = 0.0, 0.0, 0.0, 0.0
    for start in range(0, x.size, LANE):
        stop = min(start + LANE, x.size)
        here, along, low, high = x[start:stop], delta[start:stop], cut(a, start, stop), cut(b, start, stop)
        if want == SUMS or want == PROBE:
            if not rules.write:
                # Nobody looks at the norm afterwards, and many float32, added up, are off by more than one of them.
                A, C = _sums(here, along, low, high, T, dm, inv, most, per, full, p, order, 0.0)
            elif s.plain:
                A, C = _plain_sums(here, along, low, high, T, p, order)
            else:
                A, C = _sums(here, along, low, high, T, dm, inv, most, per, full, p, order, F(0.0))
            u, w = u + A, w + C
        elif want == WRITE or want == REWRITE:
            v = out[start:stop]
            if rules.grid:
                _write_half(here, along, low, high, v, K, dm, rules.grid)
            else:
                _write(here, along, low, high, v, K, dm)
            careful = s.polishing or rules.mode == _AT_MOST
            if p > 4:
                top = max(top, _furthest(here, v, s.down) if careful else _furthest(here, v, F(s.down)))
            if p == np.inf:
                u = top
            else:
                u += _measure(here, v, s.down, p, order) if careful else _measure(here, v, F(s.down), p, order)
        elif want == LOOK_AND_SUMS:
            A, C, largest, outside = _look_and_sums(here, along, low, high, T, p, order)
            u, w, top = u + A, w + C, max(top, largest)
            if not (largest < np.inf and outside == 0):
                bad = 1.0
        elif want == LOOK:
            largest, far, outside = _look(here, along, low, high)
            top = max(top, largest)
            if not (largest < np.inf and far < np.inf and outside == 0):
                bad = 1.0
        elif want == NAIVE:
            naive = (along, dm, per, full, p, order)
            u += _naive(*naive, F(0.0)) if rules.write else _naive(*naive, 0.0)
        elif want == LARGEST:
            u = max(u, _largest(here, along, low, high, inv, F(s.target * (1 - 2 * rules.ulp)), F(np.inf)))
        elif want == BIGGEST:
            u = max(u, _biggest(here, along, low, high, T, dm, inv, most))
        elif want == CEILING or want == TOP_OF_BRACKET:
            largest, C = _ceiling(here, along, low, high, 1 / s.m, inv, most, p, order)
            w, top = w + C, max(top, largest)
        elif want == ROOMS:
            u = max(u, _rooms(here, along, low, high))
        elif want == REACH:
            u += _reach(here, along, low, high, per, p, order)
        elif want == COPY:
            for i in range(here.size):  # as a whole, it would be compiled with an error message of its own, for seconds
                out[start + i] = here[i]
        elif want == CORNER:
            v = out[start:stop]
            for i in range(here.size):
                v[i] = here[i] if along[i] == 0 else at(high, i) if along[i] > 0 else at(low, i)
            u = max(u, _furthest(here, v, s.down)) if p == np.inf else u + _measure(here, v, s.down, p, order)
        elif want == BLANK:
            for i in range(here.size):
                out[start + i] = F(np.nan)
    return u, w, top, bad


# --- what follows from it ---------------------------------------------------------------------------------------------


@step
def pow2(a, single):
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    exponent = math.frexp(a)[1] - 1
    limit = 126 if single else 1022
    return 1.0 if abs(exponent) <= 8 else math.ldexp(1.0, min(max(exponent, -limit), limit))


@step
def root_of(q, p):
    """``_math.root_of``."""
    y = q ** (1 / p)
    if 1e-2 < q < 1e2:  # too near to 1 to lose any
        return y
    z = y**p
    return y + y * (q / z - 1) / p if 0 < z < HUGE else y


@step
def narrow(a, single):
    return np.float64(np.float32(a)) if single else a


@step
def begin(s, eps, roomy, rules):
    s.eps, s.status, s.count, s.polishing = eps, ZERO, 0, 0
    s.T = s.K = s.eta = 0.0
    s.settled = rules.settled
    s.m = s.inv = s.unit = s.most = 1.0
    s.plain, s.simple, s.looked, s.bracketed = 0, 1, 0, 0
    s.want = LOOK
    if not 0 <= eps < np.inf:
        lose(s, rules)
    elif eps >= rules.least and roomy and rules.task == SOLVED and rules.n >= SAMPLE_FROM and rules.p < np.inf:
        # If all units turn out to be 1, as usual, the first look at the row is Newton's first step as well.
        set_units(s, 1.0, roomy, rules)
        if s.plain:
            s.want = SAMPLE


@step
def lose(s, rules):
    s.status, s.eta, s.want = LOST, np.nan, BLANK if rules.write else DONE


@step
def advance(s, u, w, top, bad, roomy, rules):
    """Take what a sweep found, and say which is next."""
    want = s.want
    if want == SUMS:
        newton_step(s, u, w, rules)
    elif want == WRITE:
        written(s, u, top, rules)
    elif want == LOOK or want == LOOK_AND_SUMS:
        looked(s, top, bad, roomy, rules)
        if want == LOOK_AND_SUMS and s.want == SAMPLE and s.plain:
            newton_step(s, u, w, rules)
    elif want == NAIVE:
        s.T = (s.target / u) ** (1 / rules.p) / s.unit
        s.lo, s.left, s.want = s.T, 1, SUMS
    elif want == LARGEST:
        if u > 0:
            m = pow2(u, rules.single)
            s.T, s.m, s.C = s.target * (m / u), m, 0.0
            finish(s, REGULAR, rules)
        else:
            s.want = CEILING
    elif want == BIGGEST:
        if u > 0:
            # The sums have lost elements to underflow: once more, in units of the largest that is not clipped.
            s.old_m, s.old_unit, s.old_simple = s.m, s.unit, s.simple
            s.m = pow2(u, rules.single)
            s.unit, s.simple, s.plain = u / s.m, 0, 0
            rescale(s, s.m / s.old_m)
            s.want = SUMS
        else:
            settle(s, 0.0, s.C, rules)
    elif want == CEILING:
        close_by = rules.p < np.inf and w >= s.target * (1 - 8 * rules.p * rules.ulp)
        if s.polishing and close_by:
            s.want = WRITE
        else:
            s.T, s.C = top, w
            finish(s, REGULAR if close_by else UNREACHABLE, rules)
    elif want == CORNER:
        # A promise is kept even where sums in float32 took for out of reach what is not.
        s.want = DONE
        if rules.mode == _AT_MOST and (u if rules.p == np.inf else u ** (1 / rules.p)) > s.eps * s.down * LIMIT:
            s.status, s.want = REGULAR, WRITE
    elif want == TOP_OF_BRACKET:
        s.hi = min(s.hi, top)
        s.below, s.T, s.want = s.T, top * (1 + 4 * rules.ulp), PROBE
    elif want == PROBE:
        s.T = s.below
        s.want = CEILING if w < s.target else SUMS
    elif want == ROOMS:
        s.eta = u
        if 0 < u < np.inf and rules.p < np.inf:
            s.unit, s.want = max(u, 2.0**-126 if rules.single else 2.0**-1022), REACH
        else:
            s.want = DONE
    elif want == REACH:
        s.eta, s.want = u ** (1 / rules.p) * s.unit, DONE
    else:
        s.want = DONE


@step
def looked(s, top, bad, roomy, rules):
    s.looked = 1
    if bad:
        if rules.final:
            lose(s, rules)
        else:
            s.status, s.want = BAD, DONE
    elif rules.task == REACHED:
        s.want = ROOMS
    elif top <= 0 or s.eps < rules.least:
        s.status = ZERO if top <= 0 else AT_ZERO
        s.want = COPY if rules.write else DONE
    else:
        set_units(s, top, roomy, rules)
        s.want = LARGEST if rules.p == np.inf else SAMPLE if rules.n >= SAMPLE_FROM else NAIVE


@step
def set_units(s, top, roomy, rules):
    p, single = rules.p, rules.single
    unit = pow2(s.eps, single) if p <= 4 else s.eps
    s.inv = s.down = narrow(1 / unit, single)
    s.target = (s.eps * s.inv) ** p if p < np.inf else s.eps * s.inv
    s.most = s.eps * s.inv * (1 + 4 * rules.ulp)
    s.m = pow2(top, single)
    s.unit = 1.0 if p <= 4 else top / s.m
    s.plain = p <= 4 and s.m == 1 and s.inv == 1 and roomy
    s.lo, s.hi, s.left, s.old_m = 0.0, HUGE, 0, 0.0


@step
def rescale(s, factor):
    s.T, s.lo = s.T * factor, s.lo * factor
    if s.hi < HUGE:
        s.hi = s.hi * factor


@step
def newton_step(s, A, C, rules):
    s.count += 1
    if A < rules.tiny and s.old_m == 0:
        s.C, s.want = C, BIGGEST
    else:
        settle(s, A, C, rules)


@step
def settle(s, A, C, rules):
    """A Newton step from T, or what it comes to where there is none to make: ``_math.guarded_newton``."""
    T, target, left = s.T, s.target, s.left
    over = C >= target
    short = A <= 0 and not over
    regular = A > 0 and not over
    root = root_of((target - C) / A, rules.p) / s.unit if regular else 0.0
    arrived = regular and (root <= T * (1 + s.settled) if left else abs(root - T) <= s.settled * T)
    if over or (regular and root < T):
        s.hi = min(s.hi, T)
    if regular:
        s.lo = max(s.lo, root)
    closed = s.hi <= s.lo * (1 + rules.tight)
    s.C = C
    # A bracket may reach further than numbers do.
    bisect = (s.bracketed or s.hi < HUGE) and left and s.count >= NEWTON_PASSES and not closed
    if arrived:
        # From the left no step goes back: what would is rounding, which a flat slope makes much of.
        s.T = max(root, T) if left else root
    elif not (short or (over and left)):
        s.T = math.sqrt(s.lo) * math.sqrt(s.hi) if bisect else s.lo
    s.left = not bisect
    if s.old_m > 0:
        # From the left, all that is clipped remains so, and the finer units can stay. Otherwise, back to the old ones.
        if not (regular and root >= T):
            rescale(s, s.old_m / s.m)
            s.m, s.unit, s.simple = s.old_m, s.old_unit, s.old_simple
        s.old_m = 0.0
    if short:
        s.want = CEILING
    elif arrived or closed or (over and left) or s.count >= MAX_PASSES:
        finish(s, REGULAR, rules)
    elif s.count >= NEWTON_PASSES and not s.bracketed:
        s.bracketed, s.want = 1, TOP_OF_BRACKET
    else:
        s.want = SUMS


@step
def finish(s, status, rules):
    """From T to K, and from there to eta."""
    # What is large about T goes to m, not to K, which might not be a number where their quotient is.
    large = pow2(512 * min(s.T, 2.0**100), rules.single) / 512
    shift = max(min(large, s.m * (2.0**126 if rules.single else 2.0**1022)), 1.0)
    s.K, s.m = s.T / shift / s.inv, s.m / shift
    s.slope = max(1 - s.C / s.target, rules.ulp)
    # Delta as it is may get everything to its bound, too, but for rounding.
    least = status == UNREACHABLE and s.K == s.m
    held = (rules.mode == _AT_MOST and (s.K > s.m or least)) or (rules.mode == _AT_LEAST and s.K < s.m)
    if held and (rules.mode == _AT_MOST or status == REGULAR):
        status, s.K, s.m = HELD, 1.0, 1.0
    s.status, s.eta = status, s.K / s.m
    s.want = DONE if not rules.write else CORNER if status == UNREACHABLE else WRITE


@step
def written(s, total, furthest, rules):
    """Whether the array as it was written has the norm; ``_math.write`` and ``_math.polish``."""
    p, ulp, at_most = rules.p, rules.ulp, rules.mode == _AT_MOST
    by_sum = p < np.inf and (p <= 4 or 1 / SAFE < total < SAFE)
    norm = (total ** (1 / p) if by_sum else furthest) / (s.eps * s.down)
    limit = LIMIT if at_most else np.inf
    edge = min(limit, 1.0)
    s.written = narrow(s.K, rules.single)
    if s.polishing == 0:
        moving = s.status == REGULAR and (rules.grid > 0 or abs(norm - 1) > rules.close)
        if not (moving or (at_most and norm > limit)):
            s.want = DONE
            return
        if norm < 1 - 4 * rules.close and s.settled > rules.tight and s.K * s.inv == s.T:
            # Newton's last step was short, and another may not be, beyond a kink.
            s.settled, s.left, s.lo, s.hi, s.want = rules.tight, 0, 0.0, HUGE, SUMS
            return
        s.below, s.above, s.gap, s.best = -1.0, np.inf, HUGE, 0.0 if at_most else s.written
        s.polishing = 1
        if not at_most and rules.single:
            s.K = s.written
            return  # measured again, in float64
    if not by_sum and p < np.inf and 0 < furthest < np.inf and s.down / furthest < HUGE:
        # Powers have overflowed, or vanished: once more, in units of the largest move.
        s.down = s.down / furthest
        return
    K = s.written
    gap = abs(norm - 1) if norm <= limit else HUGE
    if gap < s.gap:
        s.best, s.gap = K, gap
    above = norm > edge
    if above:
        s.above, s.at_above = K, norm
    else:
        s.below, s.at_below = K, norm
    count = s.polishing - 1
    s.polishing += 1
    closed = False
    if s.below >= 0 and s.above < np.inf:
        # Over orders of magnitude, half of them.
        low = max(s.below, rules.least)
        far = s.above > 4 * low
        middle = math.sqrt(low) * math.sqrt(s.above) if far else s.below + (s.above - s.below) / 2
        middle = narrow(middle, rules.single)
        share = (edge - s.at_below) / (s.at_above - s.at_below)
        between = (
            narrow(s.below + (s.above - s.below) * share, rules.single)
            if count % 2 == 0 and count < HALVE_FROM
            else middle
        )
        if not s.below < between < s.above:
            between = middle
        closed = not s.below < between < s.above
        s.K = between
    else:
        # Until there is a bracket: the tangent's step and a little more, further each time it was too short.
        stride = (abs(edge - norm) / s.slope + 2 * ulp) * 4.0 ** (2.0 ** min(count, 8) - 1)
        # Not so far that nothing times it is something.
        outward = min(K / (1 + stride) if above else K * (1 + stride), FAR_SINGLE if rules.single else FAR_DOUBLE)
        s.K = narrow(outward, rules.single)
        if count == 2 and not above and p < np.inf:
            s.want = CEILING  # or is it out of reach? Newton's last step may have been short, next to a kink
    near = 1e-8 if rules.grid else rules.close / 2
    if closed or s.gap <= near + 1 - edge or s.polishing > POLISH_PASSES:
        s.K = s.best
        s.want = DONE if s.best == s.written else REWRITE


# --- a start from a sample --------------------------------------------------------------------------------------------


@step
def start_from_sample(x, delta, a, b, s, t, scratch, rules, order):
    """Newton's start: the solution of a sample of contiguous runs, of which `t` is the state."""
    n = x.size
    length = min(n // 8, SAMPLE_MOST) // SAMPLE_RUNS
    size = length * SAMPLE_RUNS
    low, high = taken(a, scratch[2], n, length), taken(b, scratch[3], n, length)
    some, along = taken(x, scratch[0], n, length), taken(delta, scratch[1], n, length)
    t.inv, t.most, t.m, t.unit, t.plain, t.simple, t.want = s.inv, s.most, s.m, s.unit, s.plain, 1, NAIVE
    target = s.target * (size / n)
    total, _, _, _ = sweep(some, along, low, high, some, t, rules, order)
    t.T, t.want = (target / total) ** (1 / rules.p) / t.unit if total > 0 else 0.0, SUMS
    for _ in range(8):
        A, C, _, _ = sweep(some, along, low, high, some, t, rules, order)
        if not (A > rules.tiny and C < target):
            break
        root, last = ((target - C) / A) ** (1 / rules.p) / t.unit, t.T
        t.T = root
        if root <= last * 1.01:
            break
    s.T, s.lo, s.left, s.want = t.T, 0.0, 0, SUMS if s.looked else LOOK_AND_SUMS


def taken(a, into, n, length):
    """Evenly spaced runs of an array; a number stays what it is."""


@overload(taken)
def _taken(a, into, n, length):
    if not isinstance(a, types.Array):
        return lambda a, into, n, length: a

    def gathered(a, into, n, length):
        for run in range(SAMPLE_RUNS):
            start = run * (n - length) // (SAMPLE_RUNS - 1)
            for i in range(length):
                into[run * length + i] = a[start + i]
        return into[: SAMPLE_RUNS * length]

    return gathered


# --- the gradients ----------------------------------------------------------------------------------------------------


def weight(z, p, order):
    """z^(p - 1) for z >= 0, in z's dtype."""


@overload(weight)
def _weight(z, p, order):
    if order.count == 1:
        return lambda z, p, order: type_of(z)(1)
    if order.count == 2:
        return lambda z, p, order: math.sqrt(z)
    if order.count == 3:
        return lambda z, p, order: z
    if order.count == 4:
        return lambda z, p, order: z * z
    if order.count == 5:
        return lambda z, p, order: z * z * z
    if z == types.float32:
        return lambda z, p, order: np.float32(power(z, p - 1))
    return lambda z, p, order: z ** (p - 1)


def sorted_out(towards, size, s, part, p, order, like):
    """Whether an element is in U, and its w. `part` is what `_partials` found for the row."""


@overload(sorted_out)
def _sorted_out(towards, size, s, part, p, order, like):
    if order.count == 6:

        def largest(towards, size, s, part, p, order, like):
            _, eta, slack, _, inv, top, enough = part
            active = (s * inv >= enough) & (s > 0) & (size == top) & (size > 0)
            free = (towards == 0) | ((eta * size <= s * slack) & (s > 0)) | active
            return free, pick(active, like.dtype.type(1), like.dtype.type(0))

        return largest

    def powers(towards, size, s, part, p, order, like):
        _, eta, slack, rate, inv, _, _ = part
        free = (towards == 0) | ((eta * size <= s * slack) & (s > 0))
        w = weight(pick(free, size * rate, s * inv), p, order)
        return free, pick(towards == 0, like.dtype.type(0), w)

    return powers


@loop
def _ahead(x, towards, a, b, i):
    """The room of an element; not negative, even if rounding left x outside its bounds."""
    up, down = at(b, i) - x, x - at(a, i)
    s = pick(towards > 0, up, down)
    return pick(s > 0, s, s - s)


@loop
def _top(x, delta, a, b):
    """The largest |delta| of what has room."""
    zero = delta.dtype.type(0)
    found = bits_of(zero)
    for i in range(delta.size):
        u = bits_of(pick(_ahead(x[i], delta[i], a, b, i) > 0, abs(delta[i]), zero))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _limit(x, delta, a, b, dm, per, p, order):
    """The sum of d^p over what has room."""
    zero = dm - dm
    total = zero
    for i in range(x.size):
        towards = delta[i]
        d = pick(_ahead(x[i], towards, a, b, i) > 0, abs(towards) * dm * per, zero)
        total = plus(total, raised(d, p, order))
    return total


@loop
def _pull_sums(x, delta, a, b, g, part, p, order):
    """Sums over U: of g*delta and of w*|delta|, both with delta in its unit."""
    dm = part[0]
    zero = dm - dm
    S, D = zero, zero
    for i in range(x.size):
        towards = delta[i]
        size = abs(towards) * dm
        free, w = sorted_out(towards, size, _ahead(x[i], towards, a, b, i), part, p, order, x)
        S = plus(S, pick(free, g[i] * (towards * dm), zero))
        D = plus(D, pick(free, w * size, zero))
    return S, D


@loop
def _pull_x(x, delta, a, b, g, part, p, order, lam, at_zero, bar):
    for i in range(x.size):
        towards = delta[i]
        free, w = sorted_out(towards, abs(towards) * part[0], _ahead(x[i], towards, a, b, i), part, p, order, x)
        bar[i] = pick(free | at_zero, g[i], pick(towards > 0, lam, -lam) * w)


@loop
def _pull_delta(x, delta, a, b, g, part, p, order, lam, scale, down, bar):
    """`scale` times `down` is eta, which may be no number of this precision itself."""
    for i in range(x.size):
        towards = delta[i]
        free, w = sorted_out(towards, abs(towards) * part[0], _ahead(x[i], towards, a, b, i), part, p, order, x)
        bar[i] = pick(free, scale * (g[i] - pick(towards > 0, lam, -lam) * w) * down, lam - lam)


@loop
def _pull_bounds(x, delta, a, b, g, part, p, order, lam, at_zero, bar):
    """To an array that has the bound ahead of every element."""
    for i in range(x.size):
        towards = delta[i]
        free, w = sorted_out(towards, abs(towards) * part[0], _ahead(x[i], towards, a, b, i), part, p, order, x)
        bar[i] = pick(free | at_zero, lam - lam, g[i] - pick(towards > 0, lam, -lam) * w)


@loop
def _bound_sums(x, delta, a, b, g, part, p, order, lam, at_zero):
    """The same, summed for each of the two bounds."""
    zero = lam - lam
    low, high = zero, zero
    for i in range(x.size):
        towards = delta[i]
        free, w = sorted_out(towards, abs(towards) * part[0], _ahead(x[i], towards, a, b, i), part, p, order, x)
        c = pick(free | at_zero, zero, g[i] - pick(towards > 0, lam, -lam) * w)
        low = plus(low, pick(towards < 0, c, zero))
        high = plus(high, pick(towards < 0, zero, c))
    return low, high


@step
def _partials(x, delta, a, b, eps, eta, status, rules, order):
    """Of a row: m; 1/m, eta*m, the slack of U's test, the factors of d and s in w; for p = inf the largest d and the
    room that it needs. As in ``_math.partials``, but m near eps/eta: what is in U has eta*|delta| <= eps."""
    F = x.dtype.type
    p, at_zero, still = rules.p, status == AT_ZERO, status == UNREACHABLE
    top = 0.0
    if at_zero:
        for start in range(0, x.size, LANE):
            stop = min(start + LANE, x.size)
            low, high = cut(a, start, stop), cut(b, start, stop)
            top = max(top, _top(x[start:stop], delta[start:stop], low, high))
    moving = status == REGULAR and 0 < eta < np.inf
    m = pow2(top, rules.single) if top > 0 else pow2(eps / eta, rules.single) if moving else 1.0
    inv, rate, enough = 1.0, 0.0, 0.0
    if status == REGULAR:
        inv, rate, enough = 1 / eps, eta * m / eps, 1 - 8 * rules.ulp
    elif not at_zero:
        inv, enough = 0.0, 1.0  # eta does not move: nothing is active, and w counts for nothing but must be finite
    largest = F(-1)
    # Not of what has a little less room, and at this eta would move further.
    furthest = eps / eta * (1 + 8 * rules.ulp) if moving else np.inf
    if p == np.inf and not still:
        for start in range(0, x.size, LANE):
            stop = min(start + LANE, x.size)
            low, high = cut(a, start, stop), cut(b, start, stop)
            found = _largest(x[start:stop], delta[start:stop], low, high, F(inv), F(enough), F(furthest))
            largest = max(largest, found * F(1 / m))
    elif top > 0:
        total = 0.0
        for start in range(0, x.size, LANE):
            stop = min(start + LANE, x.size)
            low, high = cut(a, start, stop), cut(b, start, stop)
            total += _limit(x[start:stop], delta[start:stop], low, high, F(1 / m), F(m / top), p, order)
        rate = m / top / total ** (1 / p) if total > 0 else 0.0
    slack = -1.0 if still else 1 + 4 * rules.ulp
    return m, (F(1 / m), F(eta * m), F(slack), F(rate), F(inv), largest, F(enough))


# --- entries ----------------------------------------------------------------------------------------------------------


@entry
def solve_rows(x, delta, lower, upper, eps, out, eta, info, rules, order, i, stop):
    """Solve the rows from i to stop: the arrays into `out`, the scale into `eta`, status and passes into `info`."""
    states = np.zeros(2, STATE)
    rule, s, t = rules[0], states[0], states[1]
    scratch = np.empty((4, SAMPLE_MOST if x.shape[1] >= SAMPLE_FROM else 0), x.dtype)
    while i < stop:
        a, b = of_row(lower, i), of_row(upper, i)
        row, along, into = x[i], delta[i], out[i if rule.write else 0]
        roomy = is_roomy(a, b, ROOMY)
        begin(s, eps[i if eps.shape[0] > 1 else 0, 0], roomy, rule)
        while s.want != DONE:
            if s.want == SAMPLE:
                start_from_sample(row, along, a, b, s, t, scratch, rule, order)
            else:
                u, w, top, bad = sweep(row, along, a, b, into, s, rule, order)
                advance(s, u, w, top, bad, roomy, rule)
        eta[i, 0], info[0, i], info[1, i] = s.eta, s.status, s.count
        i += 1


@entry
def begin_row(states, eps, lower, upper, i, rules):
    begin(states[0], eps, is_roomy(of_row(lower, i), of_row(upper, i), ROOMY), rules[0])


@entry
def sample_row(x, delta, lower, upper, i, states, rules, order):
    scratch = np.empty((4, SAMPLE_MOST), x.dtype)
    a, b = of_row(lower, i), of_row(upper, i)
    start_from_sample(x[i], delta[i], a, b, states[0], states[1], scratch, rules[0], order)


@entry
def sweep_part(x, delta, lower, upper, out, i, start, stop, states, rules, order):
    a, b = of_row(lower, i), of_row(upper, i)
    into = out[i if rules[0].write else 0]
    return sweep(
        x[i, start:stop],
        delta[i, start:stop],
        cut(a, start, stop),
        cut(b, start, stop),
        into[start:stop],
        states[0],
        rules[0],
        order,
    )


@entry
def advance_row(states, u, w, top, bad, lower, upper, i, rules):
    advance(states[0], u, w, top, bad, is_roomy(of_row(lower, i), of_row(upper, i), ROOMY), rules[0])


@entry
def pull_rows(x, delta, lower, upper, eps, eta, status, g, h, bars, bound_sums, eps_bar, rules, order, i, stop):
    """Gradients of the rows from i to stop: of x, delta and the bound ahead of each element into those of the three
    `bars` that are not empty, of the two bounds of a row into `bound_sums` unless it is, and of eps. `g` is the
    cotangent of the array, `h` of eta, or empty."""
    rule = rules[0]
    p, (x_bar, delta_bar, c_bar) = rule.p, bars
    F = x.dtype.type
    while i < stop:
        a, b = of_row(lower, i), of_row(upper, i)
        row, along, up = x[i], delta[i], g[i if g.shape[0] > 1 else 0]
        my_eps, my_eta, my_status = eps[i if eps.shape[0] > 1 else 0, 0], eta[i, 0], status[i, 0]
        # A scale beyond all numbers: what is not clipped remains so, and nothing is NaN.
        my_eta = GREATEST if my_eta == np.inf else my_eta
        m, part = _partials(row, along, a, b, my_eps, my_eta, my_status, rule, order)
        S, D = 0.0, 0.0
        for start in range(0, row.size, LANE):
            end = min(start + LANE, row.size)
            low, high = cut(a, start, end), cut(b, start, end)
            u, w = _pull_sums(row[start:end], along[start:end], low, high, up[start:end], part, p, order)
            S, D = S + u, D + w
        if h.size:
            S += h[i, 0] / m
        moves = (my_status == REGULAR or my_status == AT_ZERO) and D > 0
        lam = S / D if moves else 0.0
        # For p = inf w is 1 here, and one over the number of active elements in the text.
        eps_bar[i, 0] = lam * (D / part[5]) if p == np.inf and moves else lam
        # Where all w have nearly vanished it may be too large a number, and infinity times 0 is none.
        far = FAR_SINGLE if rule.single else FAR_DOUBLE
        lam, at_zero = F(min(max(lam, -far), far)), my_status == AT_ZERO
        unit = pow2(1 / my_eta, rule.single) if 0 < my_eta < np.inf else 1.0
        scale, down = F(0.0 if my_status == UNREACHABLE else my_eta * unit), F(1 / unit)
        below, above = 0.0, 0.0
        for start in range(0, row.size, LANE):
            end = min(start + LANE, row.size)
            low, high, here, towards = cut(a, start, end), cut(b, start, end), row[start:end], along[start:end]
            pulled = up[start:end]
            if x_bar.size:
                _pull_x(here, towards, low, high, pulled, part, p, order, lam, at_zero, x_bar[i, start:end])
            if delta_bar.size:
                _pull_delta(here, towards, low, high, pulled, part, p, order, lam, scale, down, delta_bar[i, start:end])
            if c_bar.size:
                _pull_bounds(here, towards, low, high, pulled, part, p, order, lam, at_zero, c_bar[i, start:end])
            if bound_sums.size:
                u, w = _bound_sums(here, towards, low, high, pulled, part, p, order, lam, at_zero)
                below, above = below + u, above + w
        if bound_sums.size:
            bound_sums[i, 0], bound_sums[i, 1] = below, above
        if np.isnan(my_eta):
            eps_bar[i, 0] = np.nan
            if delta_bar.size:
                delta_bar[i] = np.nan
            if c_bar.size:
                c_bar[i] = np.nan
            if bound_sums.size:
                bound_sums[i] = np.nan
            if x_bar.size:
                x_bar[i] = np.nan
        i += 1


# --- rows in parts ----------------------------------------------------------------------------------------------------


@step
def _room(x, delta, low, high, inv):
    """Where x is, inside its bounds, and min(s/eps, 1), a little more being as good."""
    here = min(max(x, low), high)
    return here, min(abs(np.float64(pick(delta < 0, low, high)) - np.float64(here)) * inv, 1 + 2.0**-50)


@step
def _added(total, lost, z):
    """total + z, and what that loses to rounding: a sum of many equal terms would drift."""
    z -= lost
    new = total + z
    return new, (new - total) - z


@step
def _look_ahead(x, delta, a, b, inv, enough, p, order, found):
    bad, top, unit, total, most = found[0], found[1], found[2], found[3], found[4]
    least, last, largest, far = found[5], found[6], found[7], found[8]
    per, of_total, of_most = 1 / unit, 0.0, 0.0
    for i in range(x.size):
        d = np.float64(abs(delta[i]))
        low, high = at(a, i), at(b, i)
        if not (abs(x[i]) < np.inf and d < np.inf and low <= high):
            bad = 1.0
            continue
        here, w = _room(x[i], delta[i], low, high, inv)
        top = max(top, d)
        if d > 0 and w > 0:
            far = max(far, np.float64(abs(here)) + w / inv)
            q = min(w / d, 1.7976931348623157e308)
            least, last = min(least, q), max(last, q)
            if w >= enough:
                largest = max(largest, d)
            if p == np.inf:
                most = max(most, w)
            else:
                most, of_most = _added(most, of_most, raised(w, p, order))
            if d > unit:
                smaller = raised(unit / d, p, order)
                total, of_total = total * smaller, of_total * smaller
                unit, per = d, 1 / d
            total, of_total = _added(total, of_total, raised(d * per if per < np.inf else d / unit, p, order))
    found[0], found[1], found[2], found[3], found[4] = bad, top, unit, total, most
    found[5], found[6], found[7], found[8] = least, last, largest, far


@entry
def look_at_rows(x, delta, lower, upper, inv, enough, p, order, found):
    """A Look of ``clipaware._rounds`` at each row, added to what `found` has."""
    for i in range(x.shape[0]):
        _look_ahead(x[i], delta[i], of_row(lower, i), of_row(upper, i), inv[i], enough, p, order, found[i])


@loop
def _sides(x, delta, a, b, inv, start, end, p, order):
    """Sums over the elements whose breakpoints are below a bracket and above, and how many are inside."""
    below, above, inside = 0.0, 0.0, 0.0
    for i in range(x.size):
        d = np.float64(abs(delta[i]))
        low, high = at(a, i), at(b, i)
        here = min(max(x[i], low), high)
        w = min(abs(np.float64(pick(delta[i] < 0, low, high)) - np.float64(here)) * inv, 1 + 2.0**-50)
        before, after = w < start * d, w >= end * d
        below = plus(below, pick(before, raised(w, p, order), 0.0))
        above = plus(above, pick(after, raised(end * d, p, order), 0.0))
        inside = plus(inside, pick(before | after, 0.0, 1.0))
    return below, above, inside


@step
def _tally(x, delta, a, b, inv, first, shift, edges, p, order, found, lost):
    bins = edges.size - 1
    start, end = edges[0], edges[bins]
    for i in range(x.size):
        d = np.float64(abs(delta[i]))
        _, w = _room(x[i], delta[i], at(a, i), at(b, i), inv)
        if w >= start * d and w < end * d and w > 0:
            q = w / d
            k = min(max((bits_of(q) - first) >> shift, 0), bins - 1)
            mine, missing = found[k + 1], lost[k + 1]
            mine[0], missing[0] = _added(mine[0], missing[0], raised(edges[k] * d, p, order))
            mine[1], missing[1] = _added(mine[1], missing[1], raised(w, p, order))
            mine[2], mine[3] = min(mine[2], q), max(mine[3], q)


@entry
def tally_rows(x, delta, lower, upper, done, inv, first, shift, edges, p, order, found):
    """Into bins between `edges`, whose bits are evenly spaced, go the breakpoints min(s/eps, 1)/|delta| of each row:
    sums of (edge*|delta|)^p and of min(s/eps, 1)^p, the least and the largest. Below and above there is a bin each."""
    bins = edges.shape[1] - 1
    lost = np.empty((bins + 2, 2))
    for i in range(x.shape[0]):
        if done[i] == 0:
            lost[:] = 0.0
            a, b, sides = of_row(lower, i), of_row(upper, i), (edges[i, 0], edges[i, bins])
            for left in range(0, x.shape[1], 64):
                right = min(left + 64, x.shape[1])
                part = x[i, left:right], delta[i, left:right], cut(a, left, right), cut(b, left, right)
                below, above, inside = _sides(*part, inv[i], *sides, p, order)
                found[i, 0, 1], lost[0, 1] = _added(found[i, 0, 1], lost[0, 1], below)
                found[i, bins + 1, 0], lost[bins + 1, 0] = _added(found[i, bins + 1, 0], lost[bins + 1, 0], above)
                if inside > 0:
                    _tally(*part, inv[i], first[i], shift[i], edges[i], p, order, found[i], lost)


@step
def _kept(x, a, b, here):
    """x inside its bounds."""
    for i in range(x.size):
        here[i] = min(max(x[i], at(a, i)), at(b, i))


@step
def _move(here, delta, a, b, K, dm, grid, out):
    if grid == 0:
        _write(here, delta, a, b, out, K, dm)
    else:
        _write_half(here, delta, a, b, out, K, dm, grid)


@entry
def move_rows(x, delta, lower, upper, K, dm, grid, out):
    """clip(x + K*(delta*dm)), with x clipped before."""
    here = np.empty(LANE, x.dtype)
    for i in range(x.shape[0]):
        a, b = of_row(lower, i), of_row(upper, i)
        for left in range(0, x.shape[1], LANE):
            right = min(left + LANE, x.shape[1])
            some, bounds = here[: right - left], (cut(a, left, right), cut(b, left, right))
            _kept(x[i, left:right], *bounds, some)
            _move(some, delta[i, left:right], *bounds, K[i], dm[i], grid, out[i, left:right])


@step
def _changes(x, delta, a, b, inv, K, dm, grid, p, order, found):
    """What the power of every element changes by from one K to the next, of halves: each takes few values."""
    last = K.size - 1
    for i in range(x.size):
        low, high = at(a, i), at(b, i)
        here, along = min(max(x[i], low), high), delta[i] * dm
        v = _halved(here, K[0] * along, low, high, grid)
        end = _halved(here, K[last] * along, low, high, grid)
        power = raised(abs(np.float64(v) - np.float64(here)) * inv, p, order)
        found[0] += power
        k = 0
        while v != end and k < last:
            # The first K beyond with another value: in longer and longer steps, and then between the last two.
            left, right, stride = k, k + 1, 1
            while right < last and _halved(here, K[right] * along, low, high, grid) == v:
                left, stride = right, 2 * stride
                right = min(right + stride, last)
            while right - left > 1:
                middle = (left + right) // 2
                if _halved(here, K[middle] * along, low, high, grid) == v:
                    left = middle
                else:
                    right = middle
            k, v = right, _halved(here, K[right] * along, low, high, grid)
            new = raised(abs(np.float64(v) - np.float64(here)) * inv, p, order)
            found[k] += new - power
            power = new


@entry
def measure_rows(x, delta, lower, upper, inv, K, dm, grid, p, order, found):
    """Of the same for each K of a row, the sum of (|v - x|*inv)^p; for p = inf, the largest."""
    here, out = np.empty(LANE, x.dtype), np.empty(LANE, x.dtype)
    for i in range(x.shape[0]):
        a, b = of_row(lower, i), of_row(upper, i)
        if grid > 0 and p <= 4:
            _changes(x[i], delta[i], a, b, inv[i, 0], K[i], dm[i], grid, p, order, found[i])
            for k in range(1, K.shape[1]):
                found[i, k] += found[i, k - 1]
            continue
        for left in range(0, x.shape[1], LANE):
            right = min(left + LANE, x.shape[1])
            some, v, bounds = here[: right - left], out[: right - left], (cut(a, left, right), cut(b, left, right))
            _kept(x[i, left:right], *bounds, some)
            for k in range(K.shape[1]):
                _move(some, delta[i, left:right], *bounds, K[i, k], dm[i], grid, v)
                if p == np.inf:
                    found[i, k] = max(found[i, k], _furthest(some, v, inv[i, k]))
                else:
                    found[i, k] += _measure(some, v, inv[i, k], p, order)
