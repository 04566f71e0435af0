"""The solution of rows that nobody holds in one piece: a fixed number of rounds, a few numbers per row from each part.

In the letters of ``docs/math.md``, with ``w = min(s/eps, 1)`` the room of an element and ``q = w/|delta|`` its
breakpoint, the unknown is ``T = eta/eps`` in

    f(T) = sum_i min(T*|delta_i|, w_i)^p = 1.

The first round, `look`, gives a bracket of T. Every further one, `tally`, puts the breakpoints of the bracket into
bins, with sums of powers for each. They add up over the parts of a row and tell f at every edge, and so the bin of the
root. `narrowed` makes the breakpoints of that bin, from the least to the largest, the next bracket. Outside of it, and
if it has but one breakpoint, f is known in closed form: once the root is there, it is exact. Else, after the last
round, it is known to the width of a bracket times the share of f that belongs to it.

What is wanted is the norm of the array as it is stored, which rounding moves. Where that matters, the rounds also
measure it, at several scales around the root at once (`tried`), and `chosen` takes the one that is nearest to eps, or a
scale between two where the norm is as good as a line there. For p = inf the first round finds the scales next to eps
by itself, since the largest move of a row is that of one of its parts.

All arrays are NumPy's, ``(rows, n)`` for parts of rows and ``(..., 1)`` for numbers per row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from clipaware._backends import numpy as host
from clipaware._problem import (
    AT_ZERO,
    DOUBLE,
    HELD,
    REGULAR,
    SINGLE,
    SLACK,
    UNREACHABLE,
    ZERO,
    Block,
    Numerics,
    bound_ahead,
    power,
)
from clipaware._traced import HUGE

Array = Any

CAP = 1 + 2.0**-50  # in units of eps, more room than any element needs
MOST = np.finfo(np.float64).max
FINEST = 2.0**-44  # the least share of the way outwards at which a scale is tried
FEWEST, MOST_TRIES, TRIED = 128, 512, 2**19  # scales that are tried, and elements in all for a row to have more of them
LONG = 2**17  # elements from which on a row is not measured before its bracket is narrow
LANES = 1024  # sums that share a bin, without compiled code


class Look(NamedTuple):
    """What the first round tells of a row."""

    bad: Array  # 1 if it makes no sense
    top: Array  # the largest |delta|
    unit: Array  # and that of what has room, the unit of
    total: Array  # the sum of |delta|^p of what has room
    most: Array  # the sum of w^p: f where everything is clipped
    least: Array  # the smallest breakpoint
    last: Array  # the largest
    largest: Array  # the largest |delta| of what can move by eps
    far: Array  # the largest |v| that there can be
    plain: Array  # the norm of clip(x + delta) - x, as rounded, over eps
    past: Array  # for p = inf, the least T whose norm, as rounded, exceeds eps


class State(NamedTuple):
    """What is known of a row between rounds."""

    T: Array  # as good as it is known
    done: Array  # 1 if that is exact
    doubt: Array  # and else by what share it may be off
    lo: Array  # the root is between these two breakpoints
    hi: Array
    slope: Array  # d log(norm) / d log(T)
    noise: Array  # the share of eps that rounding usually adds to the norm, or takes
    top: Array  # the largest |delta|
    factor: Array  # what delta is multiplied by
    status: Array
    lost: Array  # 1 if the row is to become NaN
    reach: Array  # of rows that cannot reach eps
    scale: Array  # to write with: a T, too
    # Scales are tried between the outer two, most of them between the inner; none if those are the same.
    left: Array
    near_left: Array
    near_right: Array
    right: Array


def columns(kind: Any, a: Array) -> Any:
    """The NamedTuple of what `stacked` made one array of."""
    return kind(*(a[..., i : i + 1] for i in range(len(kind._fields))))


def stacked(numbers: Any) -> Array:
    return np.concatenate([np.asarray(a, np.float64) for a in np.broadcast_arrays(*numbers)], axis=-1)


def lift(top: Array, numerics: Numerics) -> Array:
    """What delta is multiplied by, and scales are divided by: the breakpoints of small deltas may be no numbers.

    It is a power of two, and 1 for every delta that is not small.
    """
    exponent = np.frexp(top)[1]
    small = (top > 0) & (exponent < -8) & (numerics is DOUBLE)
    return np.ldexp(1.0, np.where(small, np.minimum(-exponent, 1000), 0))


def _times_eps(T: Array, eps: Array, *powers: Array) -> Array:
    """T*eps times powers of two, rounded once and without an overflow on the way; where eps is 0, of 1 instead."""
    digits, exponent = np.frexp(np.where(eps > 0, eps, 1.0))
    return np.ldexp(T * digits, exponent + sum(np.frexp(power)[1] - 1 for power in powers))


def _lifted(delta: Array, factor: Array) -> Array:
    return delta * factor if (factor != 1).any() else delta


# --- the first round --------------------------------------------------------------------------------------------------


def look(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    p: float,
    numerics: Numerics,
    ulp: float,
    mode: str,
    write: bool,
) -> Array:
    """Look, of a tile; if `write`, also at the norms as rounded that matter."""
    eps = np.where(eps > 0, eps, 1.0)
    factor = lift(host.row_top(delta), numerics)
    seen = columns(Look, _seen(x, _lifted(delta, factor), lower, upper, eps, p, numerics))
    # Below the smallest normal number, spacings are not smaller.
    seen = seen._replace(far=np.maximum(seen.far, 2.0**-14 if x.dtype == np.float16 else numerics.least))
    plain, past = seen.plain, seen.past
    if write and mode == "at_most":
        one = np.ones((len(x), 1))
        plain = _norms(x, delta, lower, upper, eps, host.narrow(one, numerics), host.narrow(one, numerics), p)
    if write and p == math.inf:
        past = _past(x, delta, lower, upper, eps, seen, factor, numerics, ulp)
    return stacked(seen._replace(top=seen.top / factor, plain=plain, past=past))


def _seen(x: Array, delta: Array, lower: Array, upper: Array, eps: Array, p: float, numerics: Numerics) -> Array:
    enough = 1 - 2 * numerics.ulp
    kernels = host.kernels()
    if kernels is not None:
        return kernels.look_ahead(x, delta, lower, upper, eps, enough, p)
    block = Block(*(host.narrow(a, numerics) for a in (x, delta, lower, upper)))
    kept = np.clip(block.x, block.lower, block.upper)
    w = _rooms(block._replace(x=kept), eps)
    d, moves = abs(block.delta).astype(np.float64), w > 0
    unit = host.row_max(np.where(moves, d, 0.0))
    q = _breakpoints(w, d)
    order = p if p < math.inf else 1.0
    found = Look(
        bad=host.senseless(block, x) + ~(host.row_max(d) < math.inf),
        top=host.row_max(d),
        unit=unit,
        total=_sum(np.where(moves, power(host, d / np.where(unit > 0, unit, 1.0), order), 0.0)),
        most=_sum(power(host, w, p)) if p < math.inf else host.row_max(w),
        least=np.where(moves, q, math.inf).min(axis=-1, keepdims=True),
        last=host.row_max(np.where(moves, q, 0.0)),
        largest=host.row_max(np.where((w >= enough) & moves, d, 0.0)),
        far=host.row_max(np.where(moves, abs(kept) + w * eps, 0.0)),
        plain=np.zeros_like(unit),
        past=np.zeros_like(unit),
    )
    return stacked(found)


def _past(
    x: Array,
    delta: Array,
    lower: Array,
    upper: Array,
    eps: Array,
    seen: Look,
    factor: Array,
    numerics: Numerics,
    ulp: float,
) -> Array:
    """The least T of the working precision whose largest move, as rounded, is beyond eps, or infinity.

    The largest move of a row is that of one of its parts, and so the least of their scales is that of the row.
    """
    # What rounding makes of a move is less than four times as long.
    first = _index(1 / np.where(seen.top > 0, 4 * seen.top, 1.0), numerics)
    last = np.maximum(_index(_end(seen, eps, ulp), numerics), first) + 1

    def is_past(index: Array) -> Array:
        T = _scale(index, numerics)
        return _norms(x, delta, lower, upper, eps, *_factors(T, T, eps, factor, numerics), math.inf) > 1

    is_any = is_past(last)
    while (last - first > 1).any():
        middle = first + (last - first) // 2
        above = is_past(middle)
        first, last = np.where(above, first, middle), np.where(above, middle, last)
    return np.where(is_any, _scale(last, numerics), math.inf)


def _end(seen: Look, eps: Array, ulp: float) -> Array:
    """A T at which everything is at its bound or has moved by eps, as rounded to that spacing at 1."""
    return np.minimum(seen.last * (1 + 8 * ulp) * (1 + ulp * seen.far / eps), HUGE)


def _index(scale: Array, numerics: Numerics) -> Array:
    """Of the numbers of the working precision, whatever their exponents, the last that is not above it."""
    return np.asarray(scale, np.float64).view(np.int64) >> (29 if numerics is SINGLE else 0)


def _scale(index: Array, numerics: Numerics) -> Array:
    return (index << (29 if numerics is SINGLE else 0)).view(np.float64)


def _sum(a: Array) -> Array:
    # NumPy adds up by halves what lies side by side, and the rest one after another.
    return np.ascontiguousarray(a).sum(axis=-1, keepdims=True, dtype=np.float64)


def _rooms(block: Block, eps: Array) -> Array:
    """w, or 0 where nothing moves."""
    ahead = bound_ahead(host, block.delta, block.lower, block.upper).astype(np.float64)
    return np.minimum(np.where(block.delta == 0, 0.0, abs(ahead - block.x)) / eps, CAP)


def _breakpoints(w: Array, d: Array) -> Array:
    return np.minimum(w / np.where(d > 0, d, 1.0), MOST)


def merged_looks(a: Array, p: float, numerics: Numerics, axis: Any) -> Array:
    """Of a whole row, from those of its parts along these axes."""
    looks = columns(Look, a)
    # In the units of the row.
    factor = lift(looks.top, numerics) / lift(looks.top.max(axis=axis, keepdims=True), numerics)
    inward = {name: getattr(looks, name) / factor for name in ("unit", "largest")}
    outward = {name: np.minimum(getattr(looks, name) * factor, MOST) for name in ("least", "last")}
    looks = looks._replace(**inward, **outward, past=looks.past * factor)
    merged = {name: value.max(axis=axis, keepdims=True) for name, value in looks._asdict().items()}
    share = power(host, looks.unit / np.where(merged["unit"] > 0, merged["unit"], 1.0), p) if p < math.inf else 0
    merged["total"] = (looks.total * share).sum(axis=axis, keepdims=True)
    merged["least"] = looks.least.min(axis=axis, keepdims=True)
    merged["past"] = looks.past.min(axis=axis, keepdims=True)
    if p < math.inf:
        merged["most"] = looks.most.sum(axis=axis, keepdims=True)
        merged["plain"] = merged_norms(looks.plain, axis, p)
    return stacked(Look(**merged))


def merged_norms(a: Array, axis: Any, p: float) -> Array:
    """Norms of rows from those of their parts along these axes."""
    largest = a.max(axis=axis, keepdims=True)
    if p == math.inf:
        return largest
    unit = np.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return np.where(largest < math.inf, unit * ((a / unit) ** p).sum(axis=axis, keepdims=True) ** (1 / p), largest)


def begun(a: Array, eps: Array, p: float, n: int, numerics: Numerics, ulp: float, mode: str, write: bool) -> Array:
    """State, after a look at the whole rows of `n` elements, stored with that spacing at 1. For p = inf it is the
    last one that looks for the root."""
    seen = columns(Look, a)
    factor = lift(seen.top, numerics)
    lost = (seen.bad > 0) | ~((eps >= 0) & (eps < math.inf) & (seen.top < math.inf))
    is_zero, at_zero = seen.top <= 0, eps < numerics.least
    eps = np.where(at_zero | lost, 1.0, eps)
    if p == math.inf:
        unreachable = short = seen.largest <= 0
        start = 1 / np.where(short, 1.0, seen.largest)
        free = ~short
    else:
        short = seen.most < 1
        unreachable = seen.most < 1 - 8 * p * numerics.ulp
        start = seen.total ** (-1 / p) / seen.unit
        # Where nothing clips, naive scaling is exact.
        free = ~short & (start <= seen.least)
    T = np.where(short, seen.last, start)
    lo, hi = np.maximum(start, seen.least), seen.last
    # What cannot reach eps has less room than eps in every element: there, the last breakpoint is one of delta's own.
    scale = np.minimum(np.where(unreachable, seen.last, T), HUGE)
    reach = np.where(is_zero, 0.0, eps * np.minimum(seen.most, 1.0) ** (1 / p if p < math.inf else 1.0))
    # Rounding moves an element by that share of eps: one that carries the norm, each as it happens to, all one way.
    one = np.minimum(ulp * seen.far / eps, HUGE)
    most = np.minimum(one * n ** (1 / p if p < math.inf else 0.0), HUGE)
    noise = np.maximum(one, most * np.minimum(most * max(min(p, HUGE) - 1, 1) / 12 + 2 / math.sqrt(max(n, 1)), 1.0))
    status = np.where(is_zero, ZERO, np.where(at_zero, AT_ZERO, np.where(unreachable, UNREACHABLE, REGULAR)))
    if mode == "at_most":
        # What is small enough is left alone: as measured, where it is to be written.
        alone = (status == REGULAR) | ((status == UNREACHABLE) & (_times_eps(scale, eps, factor) >= 1))
        status = np.where(alone & write & (seen.plain <= 1), HELD, status)
    done = free | short | (status == ZERO) | (status == AT_ZERO) | (status == HELD) | lost | ~(lo < hi)
    lo, hi = np.where(done, 1.0, lo), np.where(done, 1.0, hi)
    # Rounding makes a move less than four times as long as naive scaling has it.
    left, right = start / 4, np.maximum(_end(seen, eps, ulp), scale)
    ends = left, scale, scale, right
    if p == math.inf and write:
        # What is next to the norm wanted; where none is too large, the largest.
        wanted = (status == REGULAR) & (seen.past < math.inf)
        scale = np.where((status == REGULAR) & (seen.past == math.inf), right, scale)
        before = _scale(_index(seen.past, numerics) - 1, numerics)
        ends = left, np.where(wanted, before, scale), np.where(wanted, seen.past, scale), right
    slope = np.ones_like(T)
    known = T, done, np.where(done, 0.0, 1.0), lo, hi, slope, noise, seen.top, factor, status, lost, reach, scale
    return stacked(State(*known, *ends))


# --- further rounds ---------------------------------------------------------------------------------------------------


def bins_for(n: int) -> int:
    """How many bins the breakpoints of a row go to, where a part has `n` of them: a power of two."""
    return int(2 ** np.clip(math.ceil(math.log2(max(n, 1))), 8, 9))


def tally(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, state: Array, p: float, bins: int) -> Array:
    """(rows, 4*(bins + 2)) of a tile: per bin of the bracket, below it and above, sums of (t*|delta|)^p with t the
    bin's lower edge, and of w^p, and the least and the largest breakpoint."""
    here = columns(State, state)
    first, shift = _grid(here, bins)
    edges = _edges(first, shift, bins)
    rows, eps, delta = len(x), np.where(eps > 0, eps, 1.0), _lifted(delta, here.factor)
    found = np.zeros((rows, bins + 2, 4))
    found[..., 2] = math.inf
    kernels = host.kernels()
    if kernels is not None:
        numbers = [np.broadcast_to(a, (rows, a.shape[1])) for a in (here.done, eps, first, shift, edges)]
        kernels.tally(x, delta, lower, upper, numbers, p, found)
        return found.reshape(rows, -1)
    block = _block(x, delta, lower, upper)
    w, d = _rooms(block, eps), abs(block.delta).astype(np.float64)
    q = _breakpoints(w, d)
    place = np.clip((q.view(np.int64) - first) >> shift, -1, bins) + 1
    unit = np.concatenate([edges[..., :1], edges], axis=-1)
    counted = (w > 0) & (here.done == 0)
    for row in np.flatnonzero(counted.any(axis=-1)):
        some = counted[row]
        where, of_row = place[row, some], found[row]
        steepness = unit[row if len(unit) > 1 else 0][where] * d[row, some]
        # In lanes: one after another, many equal terms would drift.
        lanes = where * LANES + np.arange(where.size) % LANES
        for i, a in enumerate((steepness, w[row, some])):
            sums = np.bincount(lanes, power(host, np.minimum(a, 2.0), p), (bins + 2) * LANES)
            of_row[:, i] = sums.reshape(bins + 2, LANES).sum(axis=1)
        np.minimum.at(of_row[:, 2], where, q[row, some])
        np.maximum.at(of_row[:, 3], where, q[row, some])
    return found.reshape(rows, -1)


def _grid(state: State, bins: int) -> tuple[Array, Array]:
    """The bits of the lower end of the bracket, and how many of the bits above that tell elements of a bin apart.

    The bits of positive numbers are in the same order as they are, and nearly logarithmic.
    """
    first, last = (np.ascontiguousarray(a).view(np.int64) for a in (state.lo, state.hi))
    length = np.frexp((last - first).astype(np.float64))[1]
    return first, np.maximum(length - int(math.log2(bins)), 0).astype(np.int64)


def _edges(first: Array, shift: Array, bins: int) -> Array:
    most = (np.float64(MOST).view(np.int64) - first) >> shift
    return (first + (np.minimum(np.arange(bins + 1), most) << shift)).view(np.float64)


def merged_tallies(a: Array, axis: Any) -> Array:
    parts = a.reshape(*a.shape[:-1], a.shape[-1] // 4, 4)
    sums, least, largest = parts[..., :2], parts[..., 2:3], parts[..., 3:]
    found = sums.sum(axis=axis, keepdims=True), least.min(axis=axis, keepdims=True), largest.max(axis, keepdims=True)
    merged = np.concatenate(found, axis=-1)
    return merged.reshape(*merged.shape[:-2], a.shape[-1])


def narrowed(state: Array, tallies: Array, p: float, bins: int) -> Array:
    """State, after a tally of whole rows: the root's bin, and the root if no breakpoint of it is in the way."""
    now = columns(State, state)
    edges = _edges(*_grid(now, bins), bins)
    parts = tallies.reshape(*tallies.shape[:-1], bins + 2, 4)
    A, C, least, last = (parts[..., i] for i in range(4))
    # C and f at every edge; F is what has not been clipped there, in units that neither overflow nor vanish.
    C = np.cumsum(C[..., :-1], axis=-1)
    F = np.empty_like(edges)
    F[..., -1] = A[..., -1]
    shrink = (edges[..., :-1] / edges[..., 1:]) ** p
    for k in range(bins - 1, -1, -1):
        F[..., k] = A[..., k + 1] + F[..., k + 1] * shrink[..., k]
    place = np.clip((C + F <= 1).sum(axis=-1, keepdims=True) - 1, 0, bins - 1)

    def at(a: Array, offset: int = 0) -> Array:
        return np.take_along_axis(a, place + offset, axis=-1)

    left, right = at(edges), at(edges, 1)
    lo, hi, own = at(least, 1), at(last, 1), at(parts[..., 1], 1)
    # Two lines on which f does not lie below: that from the left edge is f up to `lo`, the other from `hi` on.
    # At the edges of the bracket, f is 1 up to rounding, which may be on either side.
    from_left = np.where(at(F) > 0, left * (np.maximum(1 - at(C), 0) / at(F)) ** (1 / p), left)
    more = (at(C, 1) < 1) & (at(F, 1) > 0)
    from_right = np.where(more, right * ((1 - at(C, 1)) / np.where(more, at(F, 1), 1.0)) ** (1 / p), 0.0)
    # For a large p, powers may vanish at the left edge. A single breakpoint and none tell the same from the right.
    vanished, single = (at(F) <= 0) & (at(C) < 1), ~(lo < hi)
    at_one = own + at(F, 1) * (lo / right) ** p
    nearer = np.where(hi < lo, from_right, lo * ((1 - at(C)) / np.where(at_one > 0, at_one, 1.0)) ** (1 / p))
    from_left = np.maximum(np.where(vanished & single, nearer, from_left), left)
    before = (from_left <= lo) & (single | ~vanished)
    exact = single | before | (from_right >= hi)
    root = np.where(hi < lo, from_left, np.maximum(from_left, np.where(before, 0.0, from_right)))
    root = np.where(lo == hi, np.where(before, from_left, np.maximum(from_right, lo)), root)
    lo = np.where(exact | ~vanished, lo, left)  # the root may be before the first breakpoint
    # And a chord, which does not lie above it: what is left between them is as small as a bin is narrow.
    at_lo, at_hi = at(C) + _times(at(F), (lo / left) ** p), at(C, 1) + at(F, 1) * (hi / right) ** p
    share = np.clip((1 - at_lo) / (at_hi - at_lo), 0.0, 1.0)
    chord = lo * (1 + share * ((hi / lo) ** p - 1)) ** (1 / p)
    chord = np.where(chord < hi, chord, hi)
    between = np.clip(root, lo, hi)
    gap = np.maximum(chord, between) - between
    T = np.where(exact, root, between + gap / 2)
    done = now.done > 0
    doubt = np.where(done, now.doubt, np.where(exact, 0.0, gap / between))
    T = np.where(done, now.T, np.clip(T, now.lo, now.hi))
    slope = np.where(vanished, 1 - at(C) - own * (T >= hi), _times(at(F), (T / left) ** p))
    slope = np.where(done, now.slope, np.clip(slope, 2.0**-52, 1.0))
    scale = np.where(done, now.scale, T)
    done = done | exact
    lo, hi = np.where(done, 1.0, lo), np.where(done, 1.0, hi)
    return stacked(now._replace(T=T, done=done, doubt=doubt, lo=lo, hi=hi, slope=slope, scale=scale))


def _times(a: Array, factor: Array) -> Array:
    """The product, and 0 if the first is."""
    return np.where(a > 0, a * factor, 0.0)


# --- writing ----------------------------------------------------------------------------------------------------------


def held(state: Array, eps: Array, mode: str, write: bool) -> Array:
    """State, with the rows that `mode` leaves alone; if not to `write`, with eta for a scale."""
    now = columns(State, state)
    status, eta = now.status, _times_eps(now.T, eps, now.factor)
    if mode == "at_least":
        status = np.where((status == REGULAR) & (eta < 1), HELD, status)
    elif mode == "at_most" and not write:
        status = np.where(((status == REGULAR) & (eta > 1)) | ((status == UNREACHABLE) & (eta >= 1)), HELD, status)
    scale = now.scale if write else np.where(status == HELD, 1.0, _times_eps(now.scale, eps, now.factor))
    scale = np.where((status == ZERO) | (status == AT_ZERO), 0.0, scale)
    return stacked(now._replace(status=status, scale=np.where(now.lost > 0, math.nan, scale)))


def written(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, state: Array, numerics: Numerics) -> Array:
    """v of a tile."""
    now = columns(State, state)
    factors = _factors(now.scale, now.scale, eps, now.factor, numerics)
    v = _moved(x, delta, lower, upper, *(np.where(now.status == HELD, a.dtype.type(1), a) for a in factors))
    corner, still = now.status == UNREACHABLE, (now.status == ZERO) | (now.status == AT_ZERO)
    if corner.any() or still.any() or now.lost.any():
        block = _block(x, delta, lower, upper)
        ahead = bound_ahead(host, block.delta, block.lower, block.upper)
        v = np.where(corner, np.where(block.delta == 0, block.x, ahead), np.where(still, block.x, v))
        v = np.where(now.lost > 0, math.nan, v)
    return v.astype(x.dtype, copy=False)


def _factors(near: Array, T: Array, eps: Array, factor: Array, numerics: Numerics) -> tuple[Array, Array]:
    """K and dm of K*(delta*dm), for scales T near another, in units of eps and that factor: so split, what is too large
    or too small for the dtype loses nothing."""
    m = host.pow2(np.maximum(1 / _times_eps(np.where(near > 0, near, 1.0), eps, factor), numerics.least), numerics)
    K = np.minimum(_times_eps(T, eps, factor, m), numerics.far)
    return host.narrow(K, numerics), host.narrow(1 / m, numerics)


def _block(x: Array, delta: Array, lower: Array, upper: Array) -> Block:
    """A tile in the working dtype, with x inside its bounds."""
    numerics = DOUBLE if x.dtype == np.float64 else SINGLE
    block = Block(*(host.narrow(a, numerics) for a in (x, delta, lower, upper)))
    return block._replace(x=np.clip(block.x, block.lower, block.upper))


def _moved(x: Array, delta: Array, lower: Array, upper: Array, K: Array, dm: Array) -> Array:
    """clip(x + K*(delta*dm)) of a tile, as it is stored."""
    kernels = host.kernels()
    if kernels is not None:
        return kernels.move(x, delta, lower, upper, K, dm).astype(x.dtype, copy=False)
    block = _block(x, delta, lower, upper)
    return _added(block.x, block.delta * dm * K, block, x.dtype)


def _added(x: Array, step: Array, block: Block, dtype: Any) -> Array:
    """clip(x + step) as it is stored."""
    return np.clip(x + step, block.lower, block.upper).astype(dtype, copy=False)


def _norms(x: Array, delta: Array, lower: Array, upper: Array, eps: Array, K: Array, dm: Array, p: float) -> Array:
    """The norm over eps of what is moved, for each K of a row, of a part of the rows."""
    if p <= 4 or p == math.inf:
        powers = _powers(x, delta, lower, upper, 1 / eps, K, dm, p)
        return powers if p == math.inf else powers ** (1 / p)
    # In units of the largest move, so that no power overflows, nor all of them vanish; a subnormal one is none.
    largest = _powers(x, delta, lower, upper, 1 / eps, K, dm, math.inf)
    unit = np.where((eps * largest >= DOUBLE.least) & (largest < math.inf), largest, 1.0)
    return unit * _powers(x, delta, lower, upper, 1 / (eps * unit), K, dm, p) ** (1 / p)


def _powers(x: Array, delta: Array, lower: Array, upper: Array, inv: Array, K: Array, dm: Array, p: float) -> Array:
    """The sum of powers of moves times `inv`, in float64, or the largest of them."""
    kernels = host.kernels()
    if kernels is not None:
        return kernels.measure_moves(x, delta, lower, upper, inv, K, dm, p)
    here = _block(x, delta, lower, upper).x.astype(np.float64)
    inv, found = np.broadcast_to(inv, K.shape), np.empty(K.shape)
    for k in range(K.shape[1]):
        v = _moved(x, delta, lower, upper, K[:, k : k + 1], dm)
        z = abs(v.astype(np.float64) - here) * inv[:, k : k + 1]
        found[:, k : k + 1] = host.row_max(z) if p == math.inf else _sum(power(host, z, p))
    return found


# --- the norm of what is written --------------------------------------------------------------------------------------


def tries_for(n: int, half: bool, p: float) -> int:
    """How many scales are tried for a row of `n` elements: of long ones few, for their norm is nearly continuous; many
    where elements take few values, in half precision. For p = inf the scales next to eps are known."""
    if p == math.inf:
        return 2
    return MOST_TRIES if half and p <= 4 else int(np.clip(TRIED // max(n, 1), FEWEST, MOST_TRIES))


def aimed(state: Array, eps: Array, mode: str, enough: float) -> Array:
    """State, with scales to try around the root, of rows whose norm rounding moves by more than `enough`; around those
    tried before where that is narrower."""
    now = columns(State, state)
    root = np.minimum(now.T, HUGE)
    wanted = (now.status == REGULAR) & (now.lost == 0) & ((mode == "at_most") | (now.noise > enough))
    if mode == "at_least":
        wanted = wanted & (_times_eps(root * (1 + now.doubt), eps, now.factor) >= 1)
    known = now.doubt < 1
    usual = 1 + (np.maximum(now.noise, 8 * SLACK) + np.where(known, now.doubt, 0.0)) / now.slope
    left, right = np.where(known, root, now.lo) / usual, np.where(known, root, now.hi) * usual
    left, right = np.maximum(left, now.left), np.minimum(right, now.right)
    left, right = np.where(left < right, left, now.left), np.where(left < right, right, now.right)
    tried = (now.near_left < now.near_right) & (now.near_right - now.near_left <= right - left)
    aim = wanted & ~tried
    near_left, near_right = np.where(aim, left, now.near_left), np.where(aim, right, now.near_right)
    return stacked(now._replace(near_left=near_left, near_right=near_right))


def _scales(now: State, count: int) -> Array:
    """(..., count) scales to try, increasing: most of them between the inner ends, and fewer and fewer towards the
    outer."""
    few = count // 8
    width, evenly = np.log(now.near_right / now.near_left), np.linspace(1, 0, few)

    def outside(inner: Array, outer: Array) -> Array:
        away = abs(np.log(outer / inner))
        return _between(inner, outer, np.clip(width / np.where(away > 0, away, 1.0), FINEST, 1.0) ** evenly)

    return np.concatenate(
        [
            outside(now.near_left, now.left)[..., ::-1],
            _between(now.near_left, now.near_right, np.linspace(0, 1, count - 2 * few)),
            outside(now.near_right, now.right),
        ],
        axis=-1,
    )


def _between(a: Array, b: Array, share: Array) -> Array:
    """Evenly; over orders of magnitude, in logarithms."""
    return np.where(abs(b - a) < a / 2, a + (b - a) * share, a * (b / a) ** share)


def tried(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    state: Array,
    p: float,
    numerics: Numerics,
    count: int,
) -> Array:
    """(rows, count) of a tile: the norm over eps at every scale, as it would be written."""
    now = columns(State, state)
    found = np.zeros((len(x), count))
    rows = np.flatnonzero(now.near_left < now.near_right)
    if not rows.size:
        return found
    some = [a if len(a) == 1 < len(x) else a[rows] for a in (x, delta, lower, upper, eps, state)]
    (x, delta, lower, upper, eps), now = some[:5], columns(State, some[5])
    # Of scales over many orders of magnitude, none that is too large for the dtype, nor one too small; nor a direction.
    near = np.clip(now.right * 2.0**-120, now.near_left, now.near_left * 2.0**120)
    near = np.minimum(near, np.maximum(numerics.far / 8 / (now.top * now.factor) / eps, now.near_left))
    K, dm = _factors(near, _scales(now, count), eps, now.factor, numerics)
    found[rows] = _norms(x, delta, lower, upper, eps, K, dm, p)
    return found


def chosen(before: Array, state: Array, norms: Array, mode: str) -> Array:
    """State, with the scale whose norm is the nearest to eps of those that were tried before, or not above it, and a
    narrower range for another try."""
    now, count = columns(State, state), norms.shape[-1]
    scales = _scales(columns(State, before), count)
    fitting = np.logical_and.accumulate(norms <= 1, axis=-1).sum(axis=-1, keepdims=True)
    place = np.clip(fitting - 1, 0, count - 2)

    def at(a: Array, offset: int) -> Array:
        return np.take_along_axis(a, np.clip(place + offset, 0, count - 1), axis=-1)

    def off_the_line(offset: int) -> Array:
        """How far a norm is from the line through the two beside it."""
        before, here, after = (at(scales, offset + i) for i in (-1, 0, 1))
        share = (here - before) / (after - before)
        off = abs(at(norms, offset) - (1 - share) * at(norms, offset - 1) - share * at(norms, offset + 1))
        return np.where(
            (share > 0.2) & (share < 0.8), off, math.inf
        )  # else it is next to one of them, and tells nothing

    left, right, below, above = at(scales, 0), at(scales, 1), 1 - at(norms, 0), at(norms, 1) - 1
    wave = np.maximum(off_the_line(0), off_the_line(1))
    between = (below >= 0) & (above > 0)
    straight = between & (8 * wave < below + above)
    line = left + (right - left) * (below / np.where(between, below + above, 1.0))
    scale: Array = np.where(abs(below) <= abs(above), left, right)
    scale = np.where(between & (wave < np.minimum(below, above)), line, scale)
    width = np.maximum(4 * wave, 8 * SLACK) / now.slope * line
    near_left = np.where(straight, np.maximum(line - width, left), left)
    near_right = np.where(straight, np.minimum(line + width, right), right)
    if mode == "at_most":
        scale = np.where(fitting == 0, 0.0, np.where(fitting == count, right, left))
    tried = columns(State, before).near_left < columns(State, before).near_right
    ends = zip(State._fields[-5:], (scale, left, near_left, near_right, right), strict=True)
    return stacked(now._replace(**{name: np.where(tried, a, getattr(now, name)) for name, a in ends}))
