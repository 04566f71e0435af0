"""The closed-form derivatives of a solution, for ``(rows, n)`` arrays and any backend module ``be``.

The letters are the paper's, and ``docs/math.md`` derives the formulas.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from clipaware._problem import AT_ZERO, REGULAR, UNREACHABLE, Block, Numerics, bound_ahead, power, times, when

Array = Any
Backend = Any


class Pace(NamedTuple):
    """What the formulas need to know of a row."""

    m: Array
    eta: Array
    status: Array
    inv: Array  # 1/eps, or 0 where eta does not move
    rate: Array  # eta*m/eps, so that z = eps*rate*d on U; for p = inf 1/k, the weight of each of k active elements
    largest: Array  # for p = inf, the d of the active elements, which move by eps
    inverse: Array  # m/D, or 0 where eta does not move


class Split(NamedTuple):
    """What the formulas need to know of an element."""

    free: Array  # U, where v moves with x and delta
    still: Array
    sign: Array
    direction: Array  # delta/m
    d: Array
    gap: Array  # from x to the bound that delta points to
    s: Array


class Partials(NamedTuple):
    """What every derivative is made of."""

    free: Array
    follows: Array  # where v moves with x: U, or everything at eps = 0
    sign: Array
    direction: Array
    w: Array  # sign*w
    pace: Pace


def partials(
    be: Backend,
    block: Block,
    eps: Array,
    eta: Array,
    status: Array,
    p: float,
    numerics: Numerics,
    unit: Array | None = None,
) -> Partials:
    """The sets, weights and slopes of docs/math.md at a solution eta. Differentiable itself, in eta and the block."""
    part = weighed(be, *divided(be, block, eps, eta, status, p, numerics, unit), p, numerics)
    pace = sloped(be, part.pace, be.row_sum(be.where(part.free, part.w * part.direction, 0.0)))
    return Partials(part.free, part.follows, part.sign, part.direction, part.w, pace)


def divided(
    be: Backend,
    block: Block,
    eps: Array,
    eta: Array,
    status: Array,
    p: float,
    numerics: Numerics,
    unit: Array | None = None,
) -> tuple[Split, Pace]:
    """The sets, and all there is per row but 1/D. A `unit` for delta takes the place of the largest |delta|."""

    def largest() -> Array:
        top = be.widen(be.row_max(abs(be.constant(block.delta))))
        return be.where(top > 0, top, 1.0)

    of_delta = largest() if unit is None else None
    m = be.pow2(unit if of_delta is None else of_delta, numerics)
    at_zero, regular = status == AT_ZERO, status == REGULAR
    # Where eta does not move, w counts for nothing but must be finite.
    inv = be.where(regular, 1 / be.where(regular, eps, 1.0), 0.0)
    # A small delta may make eta infinite, which would make NaN of 0.
    eta = be.where(status == UNREACHABLE, 0.0, be.where(eta == math.inf, numerics.far, eta))
    rate = eta * m * inv
    inv = be.narrow(inv, numerics)
    pace = Pace(m, eta, status, inv, rate, largest=rate, inverse=rate)  # the last two follow below
    parts = split(be, block, pace, numerics)
    if p == math.inf:
        d = be.constant(parts.d)
        # Leaves out elements with a little less room, which at this eta would move further.
        moves = _roomy(parts, pace, numerics) & (be.narrow(rate, numerics) * d <= 1 + 8 * numerics.ulp)
        pace = Pace(m, eta, status, inv, rate, be.row_max(be.where(moves, d, 0.0)), rate)
        count = be.row_sum(be.cast_like(_active(parts, pace, numerics), parts.d))
        rate = 1 / be.where(count > 0, count, 1.0)
    else:
        # At eps = 0 the rate is its limit for small eps.
        def at_limit(rate: Array) -> tuple[Array]:
            # From the block once more: what stands outside of this branch a trace computes in any case.
            free, still, _, _, d, _, _ = split(be, block, pace, numerics)
            counted = free & ~still
            top = largest() if of_delta is None else of_delta
            powers = power(be, be.where(counted, d * be.narrow(m / top, numerics), 1.0), p)
            norm = be.row_sum(be.where(counted, powers, 0.0))
            limit = be.where(norm > 0, m / top / be.where(norm > 0, norm, 1.0) ** (1 / p), 0.0)
            return (be.where(at_zero, limit, rate),)

        (rate,) = when(be, at_zero, at_limit, rate)
    return parts, Pace(m, eta, status, inv, be.narrow(rate, numerics), pace.largest, pace.inverse)


def split(be: Backend, block: Block, pace: Pace, numerics: Numerics) -> Split:
    """Tell U from the rest, and find the direction, size and room of every element."""
    still, sign = block.delta == 0, be.sign(block.delta)
    direction = block.delta * be.narrow(1 / pace.m, numerics)
    d = direction * sign
    gap = bound_ahead(be, block.delta, block.lower, block.upper) - block.x
    # Rounding may have left x outside its bounds, on either side.
    width = be.constant(block.upper - block.lower)
    s = be.minimum(be.maximum(sign * gap, 0.0), width)
    gap = be.where(sign * gap < 0, 0.0, be.where(sign * gap > width, be.constant(sign * width), gap))
    # An element at its kink, up to rounding, counts as unclipped.
    # By two factors: as one, eta*m may be no float32 where its product with d is.
    pace_of_d, more = be.minimum(pace.eta * pace.m, 2.0**100), be.maximum(pace.eta * pace.m * 2.0**-100, 1.0)
    moved = times(be, d * be.narrow(pace_of_d, numerics), be.narrow(more, numerics))
    free = still | ((moved <= s * (1 + 4 * numerics.ulp)) & (s > 0))
    return Split(be.where(pace.status == UNREACHABLE, still, free), still, sign, direction, d, gap, s)


def _roomy(parts: Split, pace: Pace, numerics: Numerics) -> Array:
    """The elements whose room is at least eps, up to rounding."""
    return (parts.s * pace.inv >= 1 - 8 * numerics.ulp) | ((pace.status == AT_ZERO) & (parts.s > 0))


def _active(parts: Split, pace: Pace, numerics: Numerics) -> Array:
    """The elements that attain the maximum, for p = inf."""
    largest = (parts.d == pace.largest) & (parts.d > 0)
    return _roomy(parts, pace, numerics) & largest & ~(pace.status == UNREACHABLE)


def weighed(be: Backend, parts: Split, pace: Pace, p: float, numerics: Numerics) -> Partials:
    """The weights w with the sign of delta, for these sets and rates."""
    free, _, sign, direction, d, gap, _ = parts
    at_zero = pace.status == AT_ZERO
    if p == math.inf:
        active = _active(parts, pace, numerics)
        free = free | active
        w = sign * be.cast_like(active, d) * pace.rate
    else:
        # z/eps with the sign of delta.
        base = be.where(free, direction * pace.rate, be.where(free | at_zero, 0.0, gap) * pace.inv)
        if p == 1:
            w = sign
        elif p == 2:
            w = base
        else:
            # Not at 0, where a power's own derivative may be infinite.
            positive = sign * base > 0
            w = sign * be.where(positive, power(be, be.where(positive, sign * base, 1.0), p - 1), 0.0)
    return Partials(free, free | at_zero, sign, direction, w, pace)


def sloped(be: Backend, pace: Pace, D: Array) -> Pace:
    """The row's quantities with `inverse` set by D/m, the sum of w*direction over U."""
    moves = ((pace.status == REGULAR) | (pace.status == AT_ZERO)) & (D > 0)
    inverse = be.where(moves, 1 / be.where(moves, D, 1.0), 0.0)
    # Infinite where all w have nearly vanished, which would be NaN where nothing else pulls at eta.
    inverse = be.where(inverse < math.inf, inverse, 0.0)
    return Pace(pace.m, pace.eta, pace.status, pace.inv, pace.rate, pace.largest, inverse)


def vjp(be: Backend, part: Partials, g: Array, h: Array, numerics: Numerics) -> tuple[Array, Array, Array, Array]:
    """(x_bar, delta_bar, c_bar, eps_bar) for cotangents g of v and h of eta; c is the bound that delta points to."""
    return pulled(be, part, g, h, be.row_sum(be.where(part.free, g * part.direction, 0.0)), numerics)


def pulled(
    be: Backend, part: Partials, g: Array, h: Array, along: Array, numerics: Numerics
) -> tuple[Array, Array, Array, Array]:
    """vjp(), given `along`, the sum of g*direction over U."""
    lam = (h / part.pace.m + along) * part.pace.inverse
    # Where all w have nearly vanished, lam may overflow, and inf*0 would be NaN.
    pull = be.narrow(be.minimum(be.maximum(lam, -numerics.far), numerics.far), numerics) * part.w
    x_bar = be.where(part.follows, g, pull)
    eta = be.narrow(be.minimum(part.pace.eta, numerics.far), numerics)
    delta_bar = be.where(part.free, eta * (g - pull), 0.0)
    c_bar = be.where(part.follows, 0.0, g - pull)
    return x_bar, delta_bar, c_bar, lam


def jvp(
    be: Backend, part: Partials, x_dot: Array, delta_dot: Array, c_dot: Array, eps_dot: Array, numerics: Numerics
) -> tuple[Array, Array]:
    """(v_dot, eta_dot) for tangents of the arguments; c is the bound that delta points to."""
    eta = be.narrow(part.pace.eta, numerics)
    drift = be.where(part.free, eta * delta_dot, be.where(part.follows, 0.0, c_dot - x_dot))
    rate = (eps_dot - be.row_sum(part.w * drift)) * part.pace.inverse
    along = x_dot + eta * delta_dot + part.direction * be.narrow(rate, numerics)
    return be.where(part.free, along, be.where(part.follows, x_dot, c_dot)), rate / part.pace.m


def implicit(
    be: Backend, block: Block, eps: Array, eta: Array, status: Array, p: float, numerics: Numerics
) -> tuple[Array, Array]:
    """(v, eta) around a solution eta, as functions that a framework can differentiate by itself, to any order.

    With the sets of clipped and unclipped elements held fixed, eta is an explicit function of everything else.
    """
    eps0, eta0 = be.constant(eps), be.constant(eta)
    part = partials(be, block, eps0, eta0, status, p, numerics)
    direction = part.direction
    c = bound_ahead(be, block.delta, block.lower, block.upper)
    regular = (part.pace.inverse > 0) & (status == REGULAR)
    unit = be.where(regular, eps0, 1.0)
    if p == math.inf:
        largest = be.where(regular, be.row_sum(be.constant(part.w) * direction), 1.0)
        grown = eps / unit * (be.constant(largest) / largest)
    else:
        gap = be.where(part.free, 0.0, c - block.x)
        base = be.where(part.free, direction * be.narrow(eta0 * part.pace.m, numerics), gap)
        base = base * be.narrow(1 / unit, numerics)
        if p == 2:
            powers = base * base
        else:
            # Not at 0, where a power's own derivatives may be infinite.
            positive = (part.sign * base > 0) | (p == 1)
            powers = be.where(positive, power(be, be.where(positive, part.sign * base, 1.0), p), 0.0)
        free = be.row_sum(be.where(part.free, powers, 0.0))
        clipped = be.row_sum(be.where(part.free, 0.0, powers))
        share = (be.where(regular, eps / unit, 1.0) ** p - clipped) / be.where(regular, free, 1.0)
        grown = be.where(regular & (share > 0), share, 1.0) ** (1 / p)
    slope = be.where(status == AT_ZERO, part.pace.inverse / part.pace.m, 0.0)
    moved = be.where(regular, eta0 * grown, slope * eps)
    eta = eta0 + (moved - be.constant(moved))
    along = block.x + direction * be.narrow(eta * part.pace.m, numerics)
    v = be.where(part.free & ~(status == UNREACHABLE), along, be.where(part.follows, block.x, c))
    return v, eta
