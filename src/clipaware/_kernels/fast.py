"""The fast lane in Numba: ordinary rows, by a guess that is measured. Rows that are not ordinary are flagged.

With ``z = clip(K*delta, a - x, b - x)``, ``F = sum |z|^p`` and ``A`` the part of it that is not at its bounds, Newton's
step is ``K <- K*(1 + (eps^p - F)/A)^(1/p)`` (docs/math.md). A row of 512 elements or more takes its first K from a
sample of it, two or three steps give the scale, and the array is measured as it is written. Newton's part neither
rescales a row nor brackets the root: a row whose sums come near the ends of the dtype's range, that has an x outside
its bounds, or whose norm is not what it should be after some tries is flagged, and left to the careful lane
(``careful.py``).

Rows are swept over by ``sweeps.py``. This text is compiled once for all dtypes and orders; for a long row it runs in
Python, and each sweep is spread over threads. ``swept`` is what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import carray
from numba.extending import overload, register_jitable

from clipaware._careful import MOST_TRIES
from clipaware._fast import CLOSE_HALF, FAINT, FLAGGED, LOOSE_DOUBLE, NEWTON_PASSES
from clipaware._kernels.formats import BFLOAT16, FLOAT16, GIVE, SINGLE_FORMAT, TAKE, bytes_of
from clipaware._kernels.loops import FRAME, address_of, call_sweep, entry, pointer_to_frame
from clipaware._kernels.sweeps import (
    CORNER,
    FIRST,
    FIRST_SAMPLE,
    SAMPLE,
    SAMPLE_RUN,
    SUMS,
    TRY,
    WIDE_SUMS,
    WIDE_WRITE,
    WRITE,
    sample_stride,
)
from clipaware._problem import DOUBLE, HELD, REGULAR, SINGLE, SLACK, UNREACHABLE

MODES = {"equal": 0, "at_most": 1, "at_least": 2, "reach": 3}  # with the last, the reach is found instead of a scale
AT_MOST, AT_LEAST, REACH = MODES["at_most"], MODES["at_least"], MODES["reach"]

FLAGGED_SOUND = -2  # also flagged, but all values of the row are finite, and x is inside its bounds
SAMPLE_FROM = 512  # rows this long take their first K from a sample

# How far the norm of an array may be off. Sums of float32 lanes are off by 1e-7 themselves.
CLOSE_SINGLE, CLOSE_DOUBLE = 1.5e-7, 4e-15
# In float32, a step this short leaves an error of about its square: one row in fifty is written twice.
LOOSE_SINGLE = 2.0**-10
# How far the norm before rounding may be off at the scale, whose sums are taken in float64.
CERTAIN_SINGLE, CERTAIN_DOUBLE = 7e-8, 2e-15
ULP, ULP_DOUBLE = SINGLE.ulp, DOUBLE.ulp
SAFE = 1e25  # powers and sums of float32 up to this, and down to its reciprocal, have lost nothing
SAFE_DOUBLE = 1e250
LEAST = SINGLE.least  # an eps below the normal numbers of float32 counts as 0, or is for the careful lane
LEAST_SHARE = 1e-6  # a norm is taken to grow with K at least by this, so that no step is too long
PLAIN_CORNER = 1e-5  # beyond the reach by this share, eps is out of reach however sums were rounded


class Rules(NamedTuple):
    """What all rows of a call share."""

    p: float
    mode: int
    write: bool
    certify: bool  # whether eta is used, so that the norm before rounding must be right at it, too
    rounded: int  # the format that the array is rounded to
    stored: int  # the format that rows are stored in
    single: bool  # whether rows are computed in float32


class Row(NamedTuple):
    """A row in compiled code: the addresses of its sweep and of its frame, and its length."""

    sweep: int
    frame: int
    n: int


class LongRow(NamedTuple):
    """A row in Python: `sweep(what, K)` goes over it by threads."""

    sweep: Callable[[int, float], tuple[float, float, float]]
    n: int


def swept(row, what, K):
    """The three numbers that a sweep over a row finds."""
    return row.sweep(what, K)


@overload(swept)
def _swept(row, what, K):
    def compiled(row, what, K):
        call_sweep(row.sweep, what, K, row.frame)
        frame = carray(pointer_to_frame(row.frame), 1)[0]
        return frame.one, frame.two, frame.three

    return compiled


# --- what follows from a sweep: compiled, and in Python for long rows -------------------------------------------------


@register_jitable
def root_of(total, p):
    """total^(1/p); the norm itself for p = inf."""
    if p == 2:
        return math.sqrt(total)
    if p == 1 or p == np.inf:
        return total
    y = total ** (1 / p)
    if 1e-3 < total < 1e3:
        return y
    # The exponent is rounded, which costs digits far from 1; a step of Newton's gets them back.
    z = y**p
    return y + y * (total / z - 1) / p if 0 < z < np.inf else y


@register_jitable
def norm_at(row, what, K, p):
    """The norm that a sweep measures at K, and d log(norm)/d log(K) there, or -1 where it does not measure that.

    A negative `what` is one of the careful lane's, which return the norm itself.
    """
    one, two, _ = swept(row, what, K)
    return (one, two) if what < 0 else (root_of(one, p), -1.0)


@register_jitable
def in_dtype(K, single):
    """K, rounded to what the row's arithmetic is in."""
    return np.float64(np.float32(K)) if single else np.float64(K)


@register_jitable
def index_of(K, single):
    """The number of K among the floats of the row's dtype that are not negative, in their order."""
    return np.int64(np.float32(K).view(np.int32)) if single else np.float64(K).view(np.int64)


@register_jitable
def float_at(index, single):
    """The float of that number."""
    return np.float64(np.int32(index).view(np.float32)) if single else np.int64(index).view(np.float64)


@register_jitable
def naive_scale(target, squares, n, p):
    """The scale without clipping, from the sum of delta^2 over n elements; for p = 2 exactly."""
    return root_of(target / n, p) * math.sqrt(n / squares) if squares > 0 else np.inf


@register_jitable
def sampled(row, target, p):
    """K near the root, by Newton's steps on a sample of the row until one is short; 0 if nothing of it can move."""
    stride = sample_stride(row.n)
    runs = (row.n - 1) // stride
    n = runs * SAMPLE_RUN + min(SAMPLE_RUN, row.n - runs * stride)
    target *= n / row.n
    _, _, squares = swept(row, FIRST_SAMPLE, 0.0)
    if not 0 < squares < np.inf:
        return 0.0
    K = naive_scale(target, squares, n, p)
    for _ in range(4):
        F, A, _ = swept(row, SAMPLE, K)
        grown = 1 + (target - F) / A if A > 0 else 0.0
        if not 0 < grown < np.inf:
            break
        K *= root_of(grown, p)
        if abs(grown - 1) <= p / 8:
            break
    return K


@register_jitable
def newton(row, eps, rules):
    """The status of a row, K, and the share of eps^p that still grows with K there."""
    p, single = rules.p, rules.single
    target = eps * eps if p == 2 else eps**p
    close = p * (CERTAIN_SINGLE if single else CERTAIN_DOUBLE)
    safe, loose = (SAFE, LOOSE_SINGLE) if single else (SAFE_DOUBLE, LOOSE_DOUBLE)
    K = in_dtype(sampled(row, target, p), single) if row.n >= SAMPLE_FROM else 0.0
    F, A, squares = swept(row, FIRST, K)
    if not squares < np.inf:
        return FLAGGED, 0.0, 0.0
    if not (1 / safe < target < safe and squares > 0):
        return FLAGGED_SOUND, 0.0, 0.0
    if not A > 0:  # a row without a sample, or one that the sample misjudged
        K = in_dtype(naive_scale(target, squares, row.n, p), single)
        F, A, _ = swept(row, SUMS, K)
    settled = False
    for _ in range(NEWTON_PASSES):
        if not (F < safe and 1 / safe < K < safe):
            return FLAGGED_SOUND, 0.0, 0.0
        if A <= 0 and F < target:
            return UNREACHABLE, 0.0, 0.0
        if settled and abs(F - target) <= close * target:
            return REGULAR, K, A / target
        grown = 1 + (target - F) / A if A > 0 else 0.0
        # A guess too far beyond the root has no step back to it.
        root = in_dtype(K * root_of(grown, p) if grown > 0 else K / 4, single)
        settled = abs(root - K) <= loose * root
        K = root
        if settled and not rules.certify:
            return REGULAR if 1 / safe < K < safe else FLAGGED_SOUND, K, A / target
        # Of a scale that is used, the last sums are taken in float64.
        F, A, _ = swept(row, WIDE_SUMS if settled else SUMS, K)
    return FLAGGED_SOUND, 0.0, 0.0


@register_jitable
def scale_for_inf(row, eps, rules):
    """newton() for p = inf: K = eps/M, where M is the largest |delta| of the elements that can move by eps."""
    ulp, safe = (ULP, SAFE) if rules.single else (ULP_DOUBLE, SAFE_DOUBLE)
    found, _, top = swept(row, FIRST, eps * (1 - 2 * ulp))
    if not top < np.inf:
        return FLAGGED, 0.0, 0.0
    if not (1 / safe < top < safe and 1 / safe < eps < safe):
        return FLAGGED_SOUND, 0.0, 0.0
    if found <= 0:
        return UNREACHABLE, 0.0, 0.0
    K = in_dtype(eps / found, rules.single)
    return REGULAR if 1 / safe < found and 1 / safe < K < safe else FLAGGED_SOUND, K, 1.0


@register_jitable
def write_corner(row, eps, rules):
    """Move every element that has a delta to its bound. Return the status, which is UNREACHABLE if eps is clearly
    beyond the reach and else flagged, and the last breakpoint, which is the scale."""
    total, _, last = swept(row, CORNER, 0.0)
    plain = root_of(total, rules.p) < eps * (1 - PLAIN_CORNER) and rules.mode != AT_MOST
    return UNREACHABLE if plain else FLAGGED_SOUND, last


@register_jitable
def reach_of(row, rules):
    """The status and the reach of a row: its norm when every element that moves is at its bound."""
    _, _, fine = swept(row, FIRST, 0.0)
    total, room, _ = swept(row, CORNER, 0.0)
    in_range = room == 0 or 1 / SAFE_DOUBLE < total < SAFE_DOUBLE
    return REGULAR if fine < np.inf and in_range else FLAGGED, root_of(total, rules.p) if total > 0 else 0.0


@register_jitable
def next_index(low, high, at_low, at_high, widest, limit):
    """The number of the float to try next between the floats numbered low and high.

    This is the ITP method of Oliveira and Takahashi (2020): along a straight line, a little towards the middle. The
    interval, `widest` at first, stays within a `limit` that halves, so it takes at most one step more than halving.
    """
    width = float(high - low)
    # From low, which may take more digits than a float has.
    middle, line = width / 2, width * (at_low / (at_low - at_high))
    push = min(0.2 * width * width / widest, abs(middle - line))
    guess = line + push if line < middle else line - push
    radius = max(limit - width / 2, 0.0)
    guess = min(max(guess, middle - radius), middle + radius)
    return min(max(low + np.int64(guess), low + 1), high - 1)


@register_jitable
def tangent_step(off, share, p):
    """By what Newton's step multiplies K, where the norm is off by `off`, from d log(norm)/d log(K)."""
    if p == np.inf:
        return 1 / (1 + off)
    grown = 1 + ((1 + off) ** -p - 1) / share
    return grown ** (1 / p) if grown > 0 else 0.0


@register_jitable
def nearest(row, what, K, aim, share, close, below, rules):
    """The K whose norm is nearest to `aim`, how far off its norm is, the K that was tried last, and the share there.

    The search starts from K. `what` is a sweep whose norm never decreases with K, and `share` is d log(norm)/d log(K),
    replaced by the sweep's own where it measures that. The search ends within `close` of `aim`, or at two neighbouring
    K. With `below`, only norms up to `aim` qualify. If no K qualifies, or no norm was found above `aim`, the norm is
    infinitely far off.
    """
    single = rules.single
    low, high, at_low, at_high = np.int64(0), index_of(np.inf, single), -1.0, np.inf
    best, gap, more, widest, limit = K, np.inf, ULP if single else ULP_DOUBLE, 0.0, 0.0
    for _ in range(MOST_TRIES):
        norm, grows = norm_at(row, what, K, rules.p)
        off, share = norm / aim - 1, share if grows < 0 else grows
        if off != off or (share == 0 and off < -close):  # beyond all that grows
            return best, np.inf, K, share
        if off <= 0:
            low, at_low = index_of(K, single), off
        else:
            high, at_high = index_of(K, single), min(off, 1e30)
        if abs(off) < gap and not (below and off > 0):
            best, gap = K, abs(off)
        if gap <= close or high - low <= 1:
            return best, gap if gap <= close or at_high < np.inf else np.inf, K, share
        if low > 0 and at_high < np.inf:
            widest = widest if widest > 0 else float(high - low)
            limit = limit / 2 if limit > 0 else math.ldexp(1.0, math.frexp(widest - 0.5)[1])
            index = next_index(low, high, at_low, at_high, widest, limit)
        else:
            # Newton's step, and a little more each time that it was too short: there is no limit to where it may lead.
            factor, most = tangent_step(off, max(share, LEAST_SHARE), rules.p), max(8.0, more)
            factor = factor / (1 + more) if off > 0 else factor * (1 + more)
            index, more = index_of(K * min(max(factor, 1 / most), most), single), 4 * more
            index = min(max(index, low + 1), high - 1)
        K = float_at(index, single)
    return best, np.inf, K, share


@register_jitable
def write_nearest(row, K, eps, share, held, rules):
    """Write the array, from K on the one whose norm as stored is nearest to eps. False if that is not found.

    With `at_most` the norm stays below eps by a margin; if delta is `held` and small enough, it is left alone.
    """
    below = rules.mode == AT_MOST
    what, aim = (WIDE_WRITE, eps * (1 - SLACK)) if below else (WRITE, eps)
    if held:
        norm, _ = norm_at(row, what, K, rules.p)
        if not below or norm <= aim:
            return True
    half = rules.rounded == FLOAT16 or rules.rounded == BFLOAT16
    close = CLOSE_HALF if half else CLOSE_SINGLE if rules.single else CLOSE_DOUBLE
    # Halves take about ten tries, which are quicker if nothing is written.
    tried = TRY if half and not below and rules.p < np.inf else what
    best, gap, last, _ = nearest(row, tried, K, aim, share, close, below, rules)
    if gap == np.inf:
        return False
    if close < gap and rules.p < np.inf and (1 - min(gap, 1.0)) ** rules.p < FAINT:
        return False  # its powers may have vanished, and another array may be nearer
    if tried != what or best != last:
        norm, _ = norm_at(row, what, best, rules.p)
        return abs(norm / aim - 1) <= gap + SINGLE.close
    return True


@register_jitable
def solve_row(row, eps, rules):
    """The status of a row and its scale; its array is written if the rules say so. Negative if it is not ordinary."""
    if rules.mode == REACH:
        return reach_of(row, rules)
    if not LEAST < eps < np.inf:
        return FLAGGED, 0.0
    status, K, share = scale_for_inf(row, eps, rules) if rules.p == np.inf else newton(row, eps, rules)
    if status == UNREACHABLE:
        return write_corner(row, eps, rules)
    if status < 0:
        return status, 0.0
    held = (rules.mode == AT_MOST and K > 1) or (rules.mode == AT_LEAST and K < 1)
    K = 1.0 if held else K
    if rules.write and not write_nearest(row, K, eps, share, held, rules):
        return FLAGGED_SOUND, 0.0
    return HELD if held else REGULAR, K


@register_jitable
def rules_of(numbers):
    """The rules, which come as an array of numbers: Numba takes that faster."""
    p, mode, write, certify, rounded, stored, single = numbers
    return Rules(p, int(mode), write > 0, certify > 0, int(rounded), int(stored), single > 0)


@entry
def solve_rows(sweep, conversion, x, delta, lower, upper, eps, out, eta, status, numbers, i, stop):
    """Solve the rows from i to stop: the arrays into `out`, the scales into `eta`, what became of them into `status`.

    Arrays come as bytes, (rows, bytes of a row), so that this is compiled once: x, delta and `out` in the format that
    they are stored in, the bounds in the one that is computed in, with a row for all or for each, and either one number
    or one for each element. The first two arguments are addresses of compiled functions.
    """
    rules = rules_of(numbers)
    frames = np.zeros(1, FRAME)
    frame = frames[0]
    half = rules.stored < SINGLE_FORMAT
    frame.n, frame.write, frame.stored, frame.p = (
        x.shape[1] // bytes_of(rules.stored),
        rules.write,
        rules.stored,
        rules.p,
    )
    copies = np.empty((3 if half else 0, frame.n * 4 + 256), np.uint8)
    row = Row(sweep, address_of(frames), frame.n)
    starts = address_of(x), address_of(delta), address_of(lower), address_of(upper), address_of(out)
    if half:
        frame.x, frame.delta = address_of(copies), address_of(copies) + copies.shape[1]
        frame.out = address_of(copies) + 2 * copies.shape[1]
    while i < stop:
        here = starts[0] + i * x.shape[1], starts[1] + i * x.shape[1], starts[4] + i * out.shape[1]
        if half:
            frame.stored_x, frame.stored_delta, frame.stored_out = here
            call_sweep(conversion, TAKE, 0.0, row.frame)
        else:
            frame.x, frame.delta, frame.out = here
        frame.lower = starts[2] + (i * lower.shape[1] if lower.shape[0] > 1 else 0)
        frame.upper = starts[3] + (i * upper.shape[1] if upper.shape[0] > 1 else 0)
        status[i, 0], eta[i, 0] = solve_row(row, eps[i if eps.shape[0] > 1 else 0, 0], rules)
        if half and rules.write and status[i, 0] >= 0:
            call_sweep(conversion, GIVE, 0.0, row.frame)
        i += 1
    # Keeps them alive until here.
    return frames.size + copies.size + x.size + delta.size + lower.size + upper.size + out.size
