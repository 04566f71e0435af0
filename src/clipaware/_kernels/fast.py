"""The fast lane in Numba: ordinary rows, by a guess that is measured. Rows that are not ordinary are flagged.

With ``z = clip(K*delta, a - x, b - x)``, ``F = sum |z|^p`` and ``A`` the part of it that is not at its bounds, Newton's
step is ``K <- K*(1 + (eps^p - F)/A)^(1/p)`` (docs/math.md). A sample of the row gives the first K, two or three steps
give the scale, and the array is measured as it is written. Newton's part neither rescales a row nor brackets the root:
a row whose sums come near the ends of the dtype's range, that has an x outside its bounds, or whose norm is not what it
should be after some tries is flagged. Flagged rows are tried again, in float64 and with x inside its bounds.
What is flagged once more is for the careful lane.

Rows are swept over by ``sweeps.py``. This text is compiled once for all dtypes and orders; for a long row it runs in
Python, and each sweep is spread over threads. ``swept`` is what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload, register_jitable

from clipaware._fast import CLOSE_HALF, FAINT, FLAGGED, LOOSE_DOUBLE, LOOSE_SINGLE, NEWTON_PASSES, TRIES
from clipaware._kernels.formats import BFLOAT16, FLOAT16, GIVE, OWN, SINGLE_FORMAT, TAKE
from clipaware._kernels.loops import FRAME, call_sweep, entry
from clipaware._kernels.sweeps import (
    CORNER,
    INSIDE,
    LOOK,
    SAMPLE,
    SAMPLE_RUN,
    SUMS,
    WIDE_SUMS,
    WIDE_WRITE,
    WRITE,
    sample_stride,
)
from clipaware._problem import HELD, REGULAR, SINGLE, SLACK, UNREACHABLE

FLAGGED_SOUND = -2  # also flagged, but all values of the row are finite, and x is inside its bounds

MODES = {"equal": 0, "at_most": 1, "at_least": 2, "reach": 3}  # with the last, the reach is found instead of a scale
_AT_MOST, _AT_LEAST, _REACH = MODES["at_most"], MODES["at_least"], MODES["reach"]

SAMPLE_FROM = 512  # rows this long take their first K from a sample

# How far the norm of an array may be off. Sums of float32 lanes are off by 1e-7 themselves.
CLOSE_SINGLE, CLOSE_DOUBLE = 1.5e-7, 4e-15
# How far the norm before rounding may be off at the scale, whose sums are taken in float64.
CERTAIN_SINGLE, CERTAIN_DOUBLE = 7e-8, 2e-15
SAFE = 1e25  # powers and sums of float32 up to this, and down to its reciprocal, have lost nothing
SAFE_DOUBLE = 1e250
LEAST = SINGLE.least  # an eps below the normal numbers of float32 counts as 0, or is for the careful lane
PLAIN_CORNER = 1e-5  # an eps that exceeds the reach by this share is out of reach, whatever the rounding of sums


class Rules(NamedTuple):
    """What all rows of a call share."""

    p: float
    mode: int
    write: bool
    certify: bool  # whether eta is used, so that the norm before rounding must be right at it, too
    rounded: int  # the format that the array is rounded to
    stored: int  # the format that rows are stored in
    single: bool  # whether rows are computed in float32
    again: bool  # whether only flagged rows are solved, with x inside its bounds


class Row(NamedTuple):
    """A row in compiled code: `sweep` and `address` are addresses of its sweep and its frame, which `frames` holds."""

    sweep: int
    address: int
    frames: Any
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
        call_sweep(row.sweep, what, K, row.address)
        frame = row.frames[0]
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
    # The exponent is rounded, which costs digits far from 1; a step of Newton's gets them back.
    z = y**p
    return y + y * (total / z - 1) / p if 0 < z < np.inf else y


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
def sampled(row, K, target, p):
    """K nearer to the root, by Newton's steps on a sample of the row until one is short."""
    stride = sample_stride(row.n)
    runs = (row.n - 1) // stride
    target *= (runs * SAMPLE_RUN + min(SAMPLE_RUN, row.n - runs * stride)) / row.n
    for _ in range(4):
        F, A, _ = swept(row, SAMPLE, K)
        if not A > 0:
            break
        grown = 1 + (target - F) / A
        if not 0 < grown < np.inf:
            break
        K *= root_of(grown, p)
        if abs(grown - 1) <= p / 8:
            break
    return K


@register_jitable
def newton(row, eps, rules):
    """The status of a row, K, and the share of eps^p that still grows with K there."""
    p, target = rules.p, eps**rules.p
    close = p * (CERTAIN_SINGLE if rules.single else CERTAIN_DOUBLE)
    safe, loose = (SAFE, LOOSE_SINGLE) if rules.single else (SAFE_DOUBLE, LOOSE_DOUBLE)
    squares, wrong, _ = swept(row, LOOK, 0.0)
    if not (wrong == 0 and squares < np.inf):
        return FLAGGED, 0.0, 0.0
    if not (1 / safe < squares < safe and 1 / safe < target < safe):
        return FLAGGED_SOUND, 0.0, 0.0
    K = root_of(target / row.n, p) / math.sqrt(squares / row.n)
    K = in_dtype(sampled(row, K, target, p) if row.n >= SAMPLE_FROM else K, rules.single)
    settled = False
    for _ in range(NEWTON_PASSES):
        # Of a scale that is used, the last sums are taken in float64.
        F, A, _ = swept(row, WIDE_SUMS if settled else SUMS, K)
        if not (F < safe and 1 / safe < K < safe):
            return FLAGGED_SOUND, 0.0, 0.0
        if A <= 0 and F < target:
            return UNREACHABLE, 0.0, 0.0
        if settled and abs(F - target) <= close * target:
            return REGULAR, K, A / target
        grown = 1 + (target - F) / A if A > 0 else 0.0
        # A guess too far beyond the root has no step back to it.
        root = in_dtype(K * root_of(grown, p) if grown > 0 else K / 4, rules.single)
        settled = abs(root - K) <= loose * root
        K = root
        if settled and not rules.certify:
            return REGULAR if 1 / safe < K < safe else FLAGGED_SOUND, K, A / target
    return FLAGGED_SOUND, 0.0, 0.0


@register_jitable
def scale_for_inf(row, eps, rules):
    """newton() for p = inf: K = eps/M, where M is the largest |delta| of the elements that can move by eps."""
    ulp = 2.0**-23 if rules.single else 2.0**-52
    found, top, wrong = swept(row, LOOK, eps * (1 - 2 * ulp))
    safe = SAFE if rules.single else SAFE_DOUBLE
    if not (wrong == 0 and top < np.inf):
        return FLAGGED, 0.0, 0.0
    if not (1 / safe < top < safe and 1 / safe < eps < safe):
        return FLAGGED_SOUND, 0.0, 0.0
    if found <= 0:
        return UNREACHABLE, 0.0, 0.0
    K = in_dtype(eps / found, rules.single)
    return REGULAR if 1 / safe < found and 1 / safe < K < safe else FLAGGED_SOUND, K, 1.0


@register_jitable
def write_corner(row, eps, rules):
    """Move every element to its bound. The status, UNREACHABLE if eps is clearly beyond the reach and else flagged, and
    the last breakpoint, which is the scale."""
    total, _, last = swept(row, CORNER, 0.0)
    reach = root_of(total, rules.p)
    plain = reach < eps * (1 - PLAIN_CORNER) and rules.mode != _AT_MOST
    return UNREACHABLE if plain else FLAGGED_SOUND, last


@register_jitable
def reach_of(row, rules):
    """The status and the reach of a row: its norm when every element that moves is at its bound."""
    one, two, three = swept(row, LOOK, 0.0)
    top, wrong = (two, three) if rules.p == np.inf else (one, two)
    total, room, _ = swept(row, CORNER, 0.0)
    fine = wrong == 0 and top < np.inf and (room == 0 or 1 / SAFE_DOUBLE < total < SAFE_DOUBLE)
    return REGULAR if fine else FLAGGED, root_of(total, rules.p) if total > 0 else 0.0


@register_jitable
def next_index(low, high, at_low, at_high, widest, count):
    """The number of the float to try next between the floats numbered low and high.

    This is the ITP method of Oliveira and Takahashi (2020).

    Goes along a straight line, a little towards the middle, and never takes one step more than halving would.
    """
    width = float(high - low)
    # From low, which may take more digits than a float has.
    middle, line = width / 2, width * (at_low / (at_low - at_high))
    push = min(0.2 * width * width / widest, abs(middle - line))
    guess = line + push if line < middle else line - push
    radius = max(2.0 ** (math.ceil(math.log2(widest)) - count) - width / 2, 0.0)
    guess = min(max(guess, middle - radius), middle + radius)
    return min(max(low + np.int64(guess), low + 1), high - 1)


@register_jitable
def write_nearest(row, K, eps, share, held, rules):
    """Write the array, from K on the one whose norm as stored is nearest to eps. False if that is not found.

    The norm is a step function of K that never decreases. The search ends at a norm that is near enough, or between
    two neighbouring K. With `at_most` the norm stays below eps by a margin; if delta is `held` and small enough, it
    is left alone.
    """
    single, at_most = rules.single, rules.mode == _AT_MOST
    what, aim = (WIDE_WRITE, eps * (1 - SLACK)) if at_most else (WRITE, eps)
    half = rules.rounded == FLOAT16 or rules.rounded == BFLOAT16
    close = CLOSE_HALF if half else CLOSE_SINGLE if single or rules.rounded == SINGLE_FORMAT else CLOSE_DOUBLE
    low, high, at_low, at_high = np.int64(0), index_of(np.inf, single), -1.0, np.inf
    best, gap, stride, widest, count = -1.0, np.inf, 1.0, 0.0, 0
    for tried in range(TRIES):
        off = root_of(swept(row, what, K)[0], rules.p) / aim - 1
        if off != off:
            return False
        if held and tried == 0 and (off <= 0 or not at_most):
            return True
        if off <= 0:
            low, at_low = index_of(K, single), off
        else:
            high, at_high = index_of(K, single), min(off, 1e30)
        if abs(off) < gap and not (at_most and off > 0):
            best, gap = K, abs(off)
        if gap <= close or high - low <= 1:
            break
        if low > 0 and at_high < np.inf:
            widest, count = (float(high - low), 0) if count == 0 else (widest, count)
            index, count = next_index(low, high, at_low, at_high, widest, count), count + 1
        else:
            # The tangent's step, further each time that it was too short.
            shift = 1 + min(abs(off) / share * stride, 8.0)
            index, stride = index_of(K / shift if off > 0 else K * shift, single), 4 * stride
            index = min(max(index, low + 1), high - 1)
        K = float_at(index, single)
    else:
        return False
    if best < 0 or (gap > close and at_high == np.inf):
        return False  # nothing that qualifies, or no end to it: eps may be out of reach
    if close < gap and rules.p < np.inf and (1 - min(gap, 1.0)) ** rules.p < FAINT:
        return False  # its powers may have vanished, and another array may be nearer
    if best != K:
        swept(row, what, best)
    return True


@register_jitable
def solve_row(row, eps, rules):
    """The status of a row and its scale; its array is written if the rules say so. Negative if it is not ordinary."""
    if rules.again:
        swept(row, INSIDE, 0.0)
    if rules.mode == _REACH:
        return reach_of(row, rules)
    if not LEAST < eps < np.inf:
        return FLAGGED, 0.0
    status, K, share = scale_for_inf(row, eps, rules) if rules.p == np.inf else newton(row, eps, rules)
    if status == UNREACHABLE:
        return write_corner(row, eps, rules)
    if status < 0:
        return status, 0.0
    held = (rules.mode == _AT_MOST and K > 1) or (rules.mode == _AT_LEAST and K < 1)
    K = 1.0 if held else K
    if rules.write and not write_nearest(row, K, eps, share, held, rules):
        return FLAGGED_SOUND, 0.0
    return HELD if held else REGULAR, K


@entry
def solve_rows(sweep, conversion, x, delta, lower, upper, eps, out, eta, status, rules, i, stop):
    """Solve the rows from i to stop: the arrays into `out`, the scales into `eta`, what became of them into `status`.

    Arrays come as bytes, (rows, bytes of a row), so that this is compiled once: x, delta and `out` in the format that
    they are stored in, the bounds in the one that is computed in, with a row for all or for each, and either one number
    or one for each element. `rules` are numbers in an array, which Numba takes faster.
    """
    p, stored, single = rules[0], int(rules[5]), rules[6] > 0
    shared = Rules(p, int(rules[1]), rules[2] > 0, rules[3] > 0, int(rules[4]), stored, single, rules[7] > 0)
    frames = np.zeros(1, FRAME)
    frame = frames[0]
    size = 4 if single else 8
    frame.n = x.shape[1] // (
        size if stored == OWN else 2 if stored < SINGLE_FORMAT else 4 if stored == SINGLE_FORMAT else 8
    )
    frame.write, frame.rounded, frame.stored, frame.p = shared.write, shared.rounded, stored, p
    copies = np.empty((0 if stored == OWN else 3, frame.n * size + 256), np.uint8)
    row = Row(sweep, frames.ctypes.data, frames, frame.n)
    starts = x.ctypes.data, delta.ctypes.data, lower.ctypes.data, upper.ctypes.data, out.ctypes.data
    if stored != OWN:
        frame.x, frame.delta = copies.ctypes.data, copies.ctypes.data + copies.shape[1]
        frame.out = copies.ctypes.data + 2 * copies.shape[1]
    while i < stop:
        if shared.again and status[i, 0] >= 0:
            i += 1
            continue
        here = starts[0] + i * x.shape[1], starts[1] + i * x.shape[1], starts[4] + i * out.shape[1]
        if stored == OWN:
            frame.x, frame.delta, frame.out = here
        else:
            frame.stored_x, frame.stored_delta, frame.stored_out = here
            call_sweep(conversion, TAKE, 0.0, row.address)
        frame.lower = starts[2] + (i * lower.shape[1] if lower.shape[0] > 1 else 0)
        frame.upper = starts[3] + (i * upper.shape[1] if upper.shape[0] > 1 else 0)
        status[i, 0], eta[i, 0] = solve_row(row, eps[i if eps.shape[0] > 1 else 0, 0], shared)
        if stored != OWN and shared.write and status[i, 0] >= 0:
            call_sweep(conversion, GIVE, 0.0, row.address)
        i += 1
    # Keeps them alive until here.
    return frames.size + copies.size + x.size + delta.size + lower.size + upper.size + out.size
