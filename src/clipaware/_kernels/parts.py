"""What Numba compiles for rows that no one holds as a whole: Dask's rounds over blocks (``clipaware._rounds``)."""

from __future__ import annotations

import numpy as np

from clipaware._kernels.formats import FLOAT16, SINGLE_FORMAT, to_bfloat16, to_float16
from clipaware._kernels.loops import at, bits_of, cut, entry, float_of, loop, of_row, pick, plus, raised, step, type_of

LANE = 4096  # elements that are moved at a time


@loop
def _write(x, delta, a, b, out, K, dm):
    for i in range(x.size):
        v = x[i] + K * (delta[i] * dm)
        low, high = at(a, i), at(b, i)
        v = pick(v > low, v, low)
        out[i] = pick(v < high, v, high)


@step
def _halved(here, move, low, high, grid):
    """clip(here + move), rounded to half precision, in float32."""
    v = np.float32(min(max(here + move, low), high))
    return pick(grid == FLOAT16, to_float16(v), to_bfloat16(v))


@step
def _write_half(x, delta, a, b, out, K, dm, grid):
    """The same as `_write`, rounded to half precision, in float32."""
    for i in range(x.size):
        out[i] = _halved(x[i], K * (delta[i] * dm), at(a, i), at(b, i), grid)


@loop
def _measure(x, v, down, p, order):
    """The sum of |v - x|^p, taken in the dtype of `down` and summed in float64."""
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
    if grid >= SINGLE_FORMAT:
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
        if grid < SINGLE_FORMAT and p <= 4:
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
