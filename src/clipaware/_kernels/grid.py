"""What Numba compiles for ``perturb_quantized``: the whole steps that the elements of a row make on the grid of a file.

``delta`` is in steps, ``room`` is how many steps each element has ahead of it, and ``unit`` is the length of a step. At
the scale ``eta`` an element makes ``m = min(floor(eta*|delta| + 1/2), room)`` of them. The code is made of the parts of
``loops.py``.
"""

from __future__ import annotations

import numpy as np

from clipaware._kernels.loops import at, cut, entry, pick, plus, raised, step

LANE = 4096  # elements that are counted at a time


@step
def _steps(delta, room, unit, eta, p, order):
    """The sum of (unit*m)^p and of m, the whole steps of each element. Products are not fused with sums here: m is to
    be the same as NumPy's."""
    total, count = 0.0, 0.0
    for i in range(delta.size):
        m, most = np.floor(eta * np.float64(abs(delta[i])) + 0.5), np.float64(room[i])
        m = pick(m < most, m, most)
        total = plus(total, raised(at(unit, i) * m, p, order))
        count = plus(count, m)
    return total, count


@step
def _most_steps(delta, room, unit, eta):
    """The largest unit*m, and the sum of m."""
    largest, count = 0.0, 0.0
    for i in range(delta.size):
        m, most = np.floor(eta * np.float64(abs(delta[i])) + 0.5), np.float64(room[i])
        m = pick(m < most, m, most)
        largest = max(largest, at(unit, i) * m)
        count = plus(count, m)
    return largest, count


@entry
def count_steps(delta, room, unit, eta, p, order, start, stop):
    """Of the elements from start to stop, the sum of (unit*m)^p, or the largest if p is infinite, and of m."""
    total, count = 0.0, 0.0
    for first in range(start, stop, LANE):
        last = min(first + LANE, stop)
        part = delta[first:last], room[first:last], cut(unit, first, last)
        if p == np.inf:
            u, w = _most_steps(*part, eta)
            total = max(total, u)
        else:
            u, w = _steps(*part, eta, p, order)
            total += u
        count += w
    return total, count


@step
def _steps_by_table(delta, room, eta, powers):
    total, count = 0.0, 0.0
    for i in range(delta.size):
        m, most = np.floor(eta * np.float64(abs(delta[i])) + 0.5), np.float64(room[i])
        m = pick(m < most, m, most)
        total += powers[int(m)]
        count = plus(count, m)
    return total, count


@entry
def count_by_table(delta, room, eta, powers, start, stop):
    """As `count_steps`, by powers that are computed already, for every m."""
    total, count = 0.0, 0.0
    for first in range(start, stop, LANE):
        last = min(first + LANE, stop)
        u, w = _steps_by_table(delta[first:last], room[first:last], eta, powers)
        total += u
        count += w
    return total, count


@step
def _sizes(delta, unit, scale, p, order):
    """The sum of (unit*scale*|delta|)^p."""
    total = 0.0
    for i in range(delta.size):
        total = plus(total, raised(at(unit, i) * (scale * np.float64(abs(delta[i]))), p, order))
    return total


@entry
def sum_sizes(delta, unit, scale, p, order, start, stop):
    total = 0.0
    for first in range(start, stop, LANE):
        last = min(first + LANE, stop)
        total += _sizes(delta[first:last], cut(unit, first, last), scale, p, order)
    return total


@entry
def sum_by_key(moved, after, unit, p, order, keys, sums):
    """What the steps still to be made add to the sum of powers, by the key of their element."""
    for i in range(moved.size):
        if after[i] > moved[i]:
            u = at(unit, i)
            sums[keys[i]] += raised(u * np.float64(after[i]), p, order) - raised(u * np.float64(moved[i]), p, order)


@step
def _make_steps(delta, room, eta, out):
    for i in range(delta.size):
        m, most = np.floor(eta * np.float64(abs(delta[i])) + 0.5), np.float64(room[i])
        out[i] = pick(m < most, m, most)


@entry
def make_steps(delta, room, eta, out, start, stop):
    """m itself."""
    _make_steps(delta[start:stop], room[start:stop], eta, out[start:stop])


@entry
def find_changes(delta, room, lo, hi, found):
    """The elements that make steps between two eta, as many as there is room for in `found`; how many there are."""
    number = 0
    for start in range(0, delta.size, 64):
        stop = min(start + 64, delta.size)
        if _steps_in(delta[start:stop], room[start:stop], lo, hi) > 0:
            for i in range(start, stop):
                d, most = np.float64(abs(delta[i])), np.float64(room[i])
                if min(np.floor(hi * d + 0.5), most) > min(np.floor(lo * d + 0.5), most):
                    if number < found.size:
                        found[number] = i
                    number += 1
    return number


@step
def _steps_in(delta, room, lo, hi):
    """How many steps some elements make between two eta."""
    number = 0.0
    for i in range(delta.size):
        d, most = np.float64(abs(delta[i])), np.float64(room[i])
        before, after = np.floor(lo * d + 0.5), np.floor(hi * d + 0.5)
        number = plus(number, pick(after < most, after, most) - pick(before < most, before, most))
    return number


@step
def _level(x, lower, step, last):
    """How many steps x lies above the lower bound, and the level there."""
    exact = (np.float64(x) - lower) / step
    place = np.rint(exact)
    place = pick(place > 0.0, place, 0.0)
    return exact, pick(place < last, place, last)


@step
def _find_room(x, delta, lower, step, tolerance, last, room):
    bad = 0.0
    for i in range(x.size):
        exact, place = _level(x[i], at(lower, i), at(step, i), last)
        towards = np.float64(delta[i])
        fine = (abs(exact - place) * at(step, i) <= at(tolerance, i)) & (abs(towards) < np.inf)
        bad = plus(bad, pick(fine, 0.0, 1.0))
        room[i] = pick(towards > 0, last - place, pick(towards < 0, place, 0.0))
    return bad


@entry
def find_room(x, delta, lower, step, tolerance, last, room, start, stop):
    """The steps that each element has ahead, and how many elements are not on the grid, or have no numbers."""
    grid = cut(lower, start, stop), cut(step, start, stop), cut(tolerance, start, stop)
    return _find_room(x[start:stop], delta[start:stop], *grid, last, room[start:stop])


@step
def _write_steps(x, delta, lower, step, span, last, moved, out):
    for i in range(x.size):
        place = _level(x[i], at(lower, i), at(step, i), last)[1]
        m = np.float64(moved[i])
        there = (place + pick(delta[i] > 0, m, -m)) * at(span, i) / last + at(lower, i)
        out[i] = pick(m > 0, there, np.float64(x[i]))


@entry
def write_steps(x, delta, lower, step, span, last, moved, out, start, stop):
    """The values on the grid that elements move to; x where they do not."""
    grid = cut(lower, start, stop), cut(step, start, stop), cut(span, start, stop)
    part = slice(start, stop)
    _write_steps(x[part], delta[part], *grid, last, moved[part], out[part])
