"""The fast lane in array operations: ordinary rows, by a guess that is measured. Rows that are not
ordinary are flagged.

With ``z = clip(K*delta, a - x, b - x)``, ``F = sum |z|^p`` and ``A`` the part of it that is not at its bounds, Newton's
step is ``K <- K*(1 + (eps^p - F)/A)^(1/p)`` (docs/math.md). Then the array is written and measured, and K corrected
until the norm as stored is right, or K lies between two neighbours. The operations are those of a backend ``be``; all
rows of a group go through them together, with a number per row in float64.
"""

from __future__ import annotations

import math
from typing import Any

from clipaware._problem import DOUBLE, HELD, REGULAR, SINGLE, SLACK, Block, Numerics, power

Array = Any
Backend = Any

FLAGGED = -1  # the status of a row that is not ordinary, which is for the careful lane
NEWTON_PASSES = 16
# A step this short leaves an error of about its square, which the norm as written shows. One row for which that is too
# much has its whole group written again, so it is rare.
LOOSE_SINGLE, LOOSE_DOUBLE = 2.0**-12, 2.0**-24
TRIES = 64
FAINT = 1e-12  # powers below this share of eps^p may have underflowed, so that another array may be nearer
CLOSE_HALF = 1e-8  # arrays of 16 bits are seldom near eps, so the search goes on to the nearest


class Rows:
    """A group of rows in the working precision. `like` has the dtype of the array that is returned, in `bits`."""

    def __init__(
        self, be: Backend, block: Block, eps: Array, p: float, numerics: Numerics, like: Array, bits: int
    ) -> None:
        self.be, self.p, self.numerics, self.like = be, p, numerics, like
        self.close = {16: CLOSE_HALF, 32: SINGLE.close / 2}.get(bits, DOUBLE.close / 2)
        self.x, self.delta, self.lower, self.upper = block
        self.below, self.above = self.lower - self.x, self.upper - self.x
        self.eps = eps
        # Sums of powers between 1/safe and safe have lost nothing. In float64 the range is narrower, since 1/p is
        # rounded, which takes digits from total^(1/p) far from 1; the kernels' `root_of` gets them back.
        self.safe, self.loose = (1e25, LOOSE_SINGLE) if numerics is SINGLE else (1e15, LOOSE_DOUBLE)

    def powers(self, z: Array) -> Array:
        return z * z if self.p == 2 else power(self.be, abs(z), self.p)

    def norm(self, z: Array) -> Array:
        be = self.be
        if self.p == math.inf:
            return be.widen(be.row_max(abs(z)))
        return (be.row_dot(z, z) if self.p == 2 else be.row_sum(self.powers(z))) ** (1 / self.p)

    def within_range(self, a: Array) -> Array:
        """Whether it is far from the ends of the dtype's range."""
        return (a > 1 / self.safe) & (a < self.safe)

    def narrow(self, K: Array) -> Array:
        return self.be.narrow(K, self.numerics)

    def rounded(self, K: Array) -> Array:
        """K as a number of the working precision."""
        return self.be.widen(self.narrow(K))

    def flagged(self) -> Array:
        """Rows with an x outside its bounds or not a number, or with an eps^p near the ends of the range."""
        be = self.be
        inside = be.row_max(be.maximum(self.below, -self.above)) <= 0
        target = self.eps ** (1.0 if self.p == math.inf else self.p)
        safe = (target > 1 / self.safe) & (target < self.safe) & (self.eps > self.numerics.least)
        return ~(inside & safe)

    def newton(self, flagged: Array, certify: bool) -> tuple[Array, Array, Array]:
        """K, the share of eps^p that still grows with it, and which rows are flagged."""
        be, p = self.be, self.p
        target = be.where(flagged, 1.0, self.eps) ** p
        size = be.row_sum(self.powers(self.delta))
        flagged = flagged | ~((size > 1 / self.safe) & (size < self.safe))
        K = self.rounded((target / be.where(flagged, 1.0, size)) ** (1 / p))
        share, settled, done = K * 0 + 1, K < 0, flagged
        for _ in range(NEWTON_PASSES):
            move = self.delta * self.narrow(K)
            z = be.clip(move, self.below, self.above)
            powers = self.powers(z)
            F, A = be.row_sum(powers), be.row_dot(powers, be.cast_like(z == move, z))
            right = settled & (abs(F / target - 1) <= p * self.numerics.close / 4)
            grows = (A > target / self.safe) | (F > target)  # or is too far, beyond where anything grows
            lost = ~done & ~(grows & (F < self.safe) & self.within_range(K))
            share = be.where(done, share, A / target)
            flagged, done = flagged | lost, done | lost | (right & certify)
            if not be.any_true(~done):
                break
            # A guess too far beyond the root has no step back to it.
            grown = be.where(A > 0, 1 + (target - F) / be.where(A > 0, A, 1.0), 0.0)
            root = self.rounded(be.where(grown > 0, K * abs(grown) ** (1 / p), K / 4))
            settled = abs(root - K) <= self.loose * root
            K = be.where(done, K, root)
            if not certify:
                # The norm as written shows what a short step has left.
                done = done | settled
                if not be.any_true(~done):
                    break
        return K, share, flagged | ~done

    def scale_for_inf(self, flagged: Array) -> tuple[Array, Array, Array]:
        """newton() for p = inf: K = eps/M, where M is the largest |delta| of the elements that can move by eps."""
        be = self.be
        room = be.where(self.delta > 0, self.above, -self.below)
        enough = self.narrow(self.eps * (1 - 2 * self.numerics.ulp))
        found = be.widen(be.row_max(be.where(room >= enough, abs(self.delta), 0.0)))
        flagged = flagged | ~((found > 1 / self.safe) & (found < self.safe) & (be.row_max(abs(self.delta)) < self.safe))
        K = self.rounded(be.where(flagged, 1.0, self.eps) / be.where(flagged, 1.0, found))
        return K, K * 0 + 1, flagged | ~self.within_range(K)

    def stored_at(self, K: Array) -> tuple[Array, Array]:
        """clip(x + K*delta) in the dtype it is returned in, and once more in the working precision."""
        be = self.be
        v = be.clip(self.x + self.delta * self.narrow(K), self.lower, self.upper)
        kept = be.cast_like(v, self.like)
        return kept, v if kept.dtype == v.dtype else self.narrow(kept)

    def written(self, K: Array, share: Array, searched: Array, held: Array, at_most: bool) -> tuple[Array, Array]:
        """The arrays whose norms as stored are nearest to eps, from K on, and the `searched` rows without one.

        With `at_most` the norm stays below eps by a margin, and rows that are `held` are left alone if it does.
        """
        be = self.be
        aim = be.where(searched, self.eps, 1.0)
        if at_most:
            # On a device without float64, the first of these margins would be rounded away.
            less = aim * (1 - SLACK)
            aim = be.where(less < aim, less, aim * (1 - 4 * SINGLE.ulp))
        low, high, best = K * 0, K * 0 + math.inf, K
        below, above, gap = K * 0 - 1, K * 0 + math.inf, K * 0 + math.inf
        kept, stride, done = None, 1.0, ~searched
        for count in range(TRIES):
            kept, v = self.stored_at(K)
            # Sums of float32 tell whether a search is needed, but not which of two neighbours is nearer.
            moved = be.widen(v) - be.widen(self.x) if at_most or count else v - self.x
            off = self.norm(moved) / aim - 1
            if count == 0:
                done = done | (held & ((off <= 0) | (not at_most)))
            better = ~done & (abs(off) < gap) & ((off <= 0) | (not at_most))
            best, gap = be.where(better, K, best), be.where(better, abs(off), gap)
            under = off <= 0
            low, below = be.where(under, K, low), be.where(under, off, below)
            high, above = be.where(under, high, K), be.where(under, above, off)
            inside = (low > 0) & (high < math.inf)
            middle = self.rounded(low + (be.where(inside, high, low) - low) / 2)
            done = done | (gap <= self.close) | (inside & ((middle <= low) | (middle >= high)) & (gap < math.inf))
            if not be.any_true(~done) or count == TRIES - 1:
                break
            line = low + (be.where(inside, high, low) - low) * (-below / be.where(inside, above - below, 1.0))
            line = self.rounded(line) if count % 3 < 2 else middle
            between = be.where((line > low) & (line < high), line, middle)
            # Until there is a bracket: the tangent's step, further each time that it was too short.
            shift = 1 + be.minimum(abs(off) / share * stride + 2 * self.numerics.ulp, 8.0)
            outward = self.rounded(be.where(under, K * shift, K / shift))
            K, stride = be.where(done, best, be.where(inside, between, outward)), 4 * stride
        if be.any_true(best != K):
            kept, _ = self.stored_at(best)
        return kept, searched & (~done | self.faint(gap))

    def faint(self, gap: Array) -> Array:
        """Where a norm is so far off that the powers of a nearer one may have vanished."""
        if self.p == math.inf:
            return gap < 0
        off = (gap > self.close) & (gap < math.inf)
        return off & ((1 - self.be.minimum(gap, 1.0)) ** self.p < FAINT)


def solve(rows: Rows, mode: str, write: bool, certify: bool) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status, which is FLAGGED where a row is not ordinary."""
    be = rows.be
    flagged = rows.flagged()
    if rows.p == math.inf:
        K, share, flagged = rows.scale_for_inf(flagged)
    else:
        K, share, flagged = rows.newton(flagged, certify or mode != "equal")
    held = ~flagged & (K > 1 if mode == "at_most" else K < 1 if mode == "at_least" else K < 0)
    K = be.where(held, 1.0, K)
    v = None
    if write:
        v, lost = rows.written(be.where(flagged, 0.0, K), share, ~flagged, held, mode == "at_most")
        flagged = flagged | lost
    return v, K, be.where(flagged, FLAGGED, be.where(held, HELD, REGULAR))
