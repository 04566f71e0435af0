"""The gradients in Numba, in two sweeps over a row: the sums that docs/math.md calls S and D, and what follows.

Formulas and names are those of ``clipaware._derivatives``. Only what is asked for is computed.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload

from clipaware._kernels.loops import (
    LANE,
    at,
    bits_of,
    clamped,
    cut,
    entry,
    float_of,
    loop,
    nothing_of,
    of_row,
    pick,
    plus,
    power,
    raised,
    step,
    type_of,
    whole_power,
)
from clipaware._problem import AT_ZERO, REGULAR, UNREACHABLE

GREATEST = float(np.finfo(np.float64).max)
FAR_SINGLE, FAR_DOUBLE = 2.0**127, 2.0**1023


@step
def pow2(a, single):
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    exponent = math.frexp(a)[1] - 1
    limit = 126 if single else 1022
    return 1.0 if abs(exponent) <= 8 else math.ldexp(1.0, min(max(exponent, -limit), limit))


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
    if order.count == 9:
        return lambda z, p, order: whole_power(z, p - 1)
    if z == types.float32:
        return lambda z, p, order: np.float32(power(z, p - 1))
    return lambda z, p, order: z ** (p - 1)


def set_and_weight(towards, size, s, part, p, order, like):
    """Whether an element is in U, and its weight w. `part` is what `_partials` found for the row."""


@overload(set_and_weight)
def _set_and_weight(towards, size, s, part, p, order, like):
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
def _room(x, towards, a, b, i):
    """The room of an element, from where it is inside its bounds: rounding may have left x beside them."""
    low, high = at(a, i), at(b, i)
    inside = clamped(x, low, high)
    return pick(towards > 0, high - inside, inside - low)


@loop
def _largest(x, delta, a, b, inv, enough, most):
    """The largest |delta|, of `most` at most, among the elements that have room, and enough of it."""
    zero = inv - inv
    found = bits_of(zero)
    for i in range(x.size):
        here, towards = x[i], delta[i]
        s = _room(here, towards, a, b, i)
        u = bits_of(pick((s * inv >= enough) & (s > 0) & (abs(towards) <= most), abs(towards), zero))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _top(x, delta, a, b):
    """The largest |delta| of what has room."""
    zero = delta.dtype.type(0)
    found = bits_of(zero)
    for i in range(delta.size):
        u = bits_of(pick(_room(x[i], delta[i], a, b, i) > 0, abs(delta[i]), zero))
        found = pick(found > u, found, u)
    return float_of(found)


@loop
def _limit(x, delta, a, b, dm, per, p, order):
    """The sum of d^p over what has room."""
    zero = dm - dm
    total = nothing_of(zero, order)
    for i in range(x.size):
        towards = delta[i]
        d = pick(_room(x[i], towards, a, b, i) > 0, abs(towards) * dm * per, zero)
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
        free, w = set_and_weight(towards, size, _room(x[i], towards, a, b, i), part, p, order, x)
        S = plus(S, pick(free, g[i] * (towards * dm), zero))
        D = plus(D, pick(free, w * size, zero))
    return S, D


@loop
def _pull_x(x, delta, a, b, g, part, p, order, lam, at_zero, bar):
    for i in range(x.size):
        towards = delta[i]
        free, w = set_and_weight(towards, abs(towards) * part[0], _room(x[i], towards, a, b, i), part, p, order, x)
        bar[i] = pick(free | at_zero, g[i], pick(towards > 0, lam, -lam) * w)


@loop
def _pull_delta(x, delta, a, b, g, part, p, order, lam, scale, down, bar):
    """`scale` times `down` is eta, which may be no number of this precision itself."""
    for i in range(x.size):
        towards = delta[i]
        free, w = set_and_weight(towards, abs(towards) * part[0], _room(x[i], towards, a, b, i), part, p, order, x)
        bar[i] = pick(free, scale * (g[i] - pick(towards > 0, lam, -lam) * w) * down, lam - lam)


@loop
def _pull_bounds(x, delta, a, b, g, part, p, order, lam, at_zero, bar):
    """To an array that has the bound ahead of every element."""
    for i in range(x.size):
        towards = delta[i]
        free, w = set_and_weight(towards, abs(towards) * part[0], _room(x[i], towards, a, b, i), part, p, order, x)
        bar[i] = pick(free | at_zero, lam - lam, g[i] - pick(towards > 0, lam, -lam) * w)


@loop
def _bound_sums(x, delta, a, b, g, part, p, order, lam, at_zero):
    """The same, summed for each of the two bounds."""
    zero = lam - lam
    low, high = zero, zero
    for i in range(x.size):
        towards = delta[i]
        free, w = set_and_weight(towards, abs(towards) * part[0], _room(x[i], towards, a, b, i), part, p, order, x)
        c = pick(free | at_zero, zero, g[i] - pick(towards > 0, lam, -lam) * w)
        low = plus(low, pick(towards < 0, c, zero))
        high = plus(high, pick(towards < 0, zero, c))
    return low, high


@step
def _partials(x, delta, a, b, eps, eta, status, p, order):
    """Of a row: m; 1/m, eta*m, the slack of U's test, the factors of d and s in w; for p = inf the largest d and the
    room that it needs. As in ``_derivatives.partials``, but m is near eps/eta: what is in U has eta*|delta| <= eps."""
    F, single = x.dtype.type, x.itemsize == 4
    ulp, at_zero, still = 2.0**-23 if single else 2.0**-52, status == AT_ZERO, status == UNREACHABLE
    top = 0.0
    if at_zero:
        for start in range(0, x.size, LANE):
            stop = min(start + LANE, x.size)
            low, high = cut(a, start, stop), cut(b, start, stop)
            top = max(top, _top(x[start:stop], delta[start:stop], low, high))
    moving = status == REGULAR and 0 < eta < np.inf
    m = pow2(top, single) if top > 0 else pow2(eps / eta, single) if moving else 1.0
    inv, rate, enough = 1.0, 0.0, 0.0
    if status == REGULAR:
        inv, rate, enough = 1 / eps, eta * m / eps, 1 - 8 * ulp
    elif not at_zero:
        inv, enough = 0.0, 1.0  # eta does not move: nothing is active, and w must only be finite
    largest = F(-1)
    # Leaves out elements with a little less room, which would move further at this eta.
    furthest = eps / eta * (1 + 8 * ulp) if moving else np.inf
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
    slack = -1.0 if still else 1 + 4 * ulp
    return m, (F(1 / m), F(eta * m), F(slack), F(rate), F(inv), largest, F(enough))


@entry
def pull_rows(problem, per_row, cotangents, bars, bound_sums, eps_bar, p, order, i, stop):
    """Gradients of the rows from i to stop: of x, delta and the bound ahead of each element into those of the three
    `bars` that are not empty, of the two bounds of a row into `bound_sums` unless it is, and of eps.

    `problem` is x, delta and the bounds; `per_row` eps, eta and status; the `cotangents` are of the array, and of eta
    or empty.
    """
    x, delta, lower, upper = problem
    eps, eta, status = per_row
    g, h = cotangents
    x_bar, delta_bar, c_bar = bars
    F = x.dtype.type
    while i < stop:
        a, b = of_row(lower, i), of_row(upper, i)
        row, along, up = x[i], delta[i], g[i if g.shape[0] > 1 else 0]
        my_eps, my_eta, my_status = eps[i if eps.shape[0] > 1 else 0, 0], eta[i, 0], status[i, 0]
        # An infinite scale counts as the largest number, so that nothing becomes NaN.
        my_eta = GREATEST if my_eta == np.inf else my_eta
        m, part = _partials(row, along, a, b, my_eps, my_eta, my_status, p, order)
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
        # For p = inf, w is 1 here, and one over the number of active elements in _derivatives.
        eps_bar[i, 0] = lam * (D / part[5]) if p == np.inf and moves else lam
        # Where all w have nearly vanished, lam may overflow, and inf*0 would be NaN.
        far = FAR_SINGLE if x.itemsize == 4 else FAR_DOUBLE
        lam, at_zero = F(min(max(lam, -far), far)), my_status == AT_ZERO
        unit = pow2(1 / my_eta, x.itemsize == 4) if 0 < my_eta < np.inf else 1.0
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
