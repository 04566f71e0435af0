"""Newton's method for the scale, and its polish, in operations that a framework may trace.

JAX's traces, TensorFlow's graphs, meshes and shards run on this module. So do ``reach`` and ``report`` of PyTorch on a
GPU and of Array-API arrays. Everything else has the two lanes of ``_fast`` and ``_careful``.

Everything here is written for ``(rows, n)`` arrays and a backend module ``be`` that supplies a handful of array
functions under common names (``_backends/numpy.py`` lists them). The letters are the paper's, and ``docs/math.md``
derives the formulas.

Working units: with ``m`` a power of two near a row's largest ``|delta|`` and ``inv`` near 1/eps, each element has
``d = |delta|/m`` and a room ``w = s*inv``, and the unknown is ``T`` in

    sum_i min(T*d_i, w_i)^p = target,      target = (eps*inv)^p,      eta = T/(inv*m).

Nothing in it overflows, whatever the scale of delta, eps or x; in the usual range both units are 1 and cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from clipaware._problem import (
    AT_ZERO,
    HELD,
    REGULAR,
    SINGLE,
    SLACK,
    UNREACHABLE,
    ZERO,
    Block,
    Numerics,
    Problem,
    any_true,
    bound_ahead,
    power,
    times,
    when,
)

Array = Any
Backend = Any

NEWTON_PASSES = 12  # plain Newton up to here, then every other pass halves the bracket
MAX_PASSES = 64
ROOMY = 1e6  # rooms up to this many units of eps can be raised to the fourth power
POLISH_PASSES = 96
HALVE_FROM = 30  # passes of a polish after which every one halves the bracket
HUGE = 1e300  # more than any norm, scale or step that is worth a thought
LOOSE = 2.0**-13  # the step at which Newton stops for float32 arrays: what is missing shows in the norm as written
LOOSE_DOUBLE = 2.0**-20  # and for float64, where another pass would have to wait for others
SAMPLE_FROM = 2**19  # rows this long first solve a sample of contiguous runs, and start there
SAMPLE_RUNS, SAMPLE_RUN = 64, 512


class Rows(NamedTuple):
    """A group of rows, seen through tiles: pairs of what to take of the rows and of the columns."""

    be: Backend
    load: Callable[..., Block]
    tiles: list[Any]
    keep: bool  # whether what is derived from the tiles may stay in memory from pass to pass
    eps: Array  # (rows, 1)
    p: float
    top: Array  # (rows, 1): the largest |delta|
    numerics: Numerics

    def fold(self, combine: str, of_tile: Callable[[Any], Array]) -> Array:
        """A number per row, added up or maximised over its tiles."""
        return self.be.fold(combine, self.tiles, [of_tile(tile) for tile in self.tiles], self.top)

    def pick(self, per_row: Array, tile: Any) -> Array:
        """What belongs to a tile of something that has one value per row, or one for all, in the working dtype."""
        return self.be.narrow(per_row if per_row.shape[0] == 1 else per_row[tile[0], :], self.numerics)


class Solution(NamedTuple):
    """What was found, per row. ``v = clip(x + K*(delta/m))``: split so that a subnormal eta = K/m loses nothing."""

    K: Array
    m: Array
    slope: Array  # d log(norm) / d log(eta), the share of eps^p that unclipped elements carry
    status: Array
    passes: int


# What a backend that traces has its own of.


def loop(be: Backend, step: Callable[[Any], Any], state: tuple[Any, ...], limit: int) -> tuple[Any, ...]:
    """Repeat `step` until every row is done, as the last of the state says, or the first, a count, is at its limit."""
    if be.TRACES:
        return tuple(be.loop(step, state, limit))
    while state[0] < limit and be.any_true(~state[-1]):
        state = step(state)
    return state


def room(rows: Rows, block: Block) -> Array:
    """Distance from x to the bound that delta points to, with the sign of delta."""
    return bound_ahead(rows.be, block.delta, block.lower, block.upper) - block.x


def raised(rows: Rows, a: Array) -> Array:
    """|a|^p."""
    return a * a if rows.p == 2 else power(rows.be, abs(a), rows.p)


def groups(be: Backend, problem: Problem, numerics: Numerics, group: int, tile: int, checked: bool) -> Any:
    """The problem in groups of rows and tiles of them, of so many elements at most.

    Yields where a group is, the group, and which of its rows are to become NaN. Every group is looked at once, for its
    largest |delta| and for values that should not be. If they are `checked`, those raise. If not, x is clipped into its
    bounds first, and rows that make no sense are left out of the solution.
    """
    x, delta, eps, lower, upper = problem.arrays()
    rows, n = x.shape
    height, tall, wide = max(1, group // n), max(1, tile // n), min(n, tile)
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        count = part.stop - part.start
        # No slice reaches further than its axis: there, the Array API standard is silent.
        across = [slice(i, min(i + tall, count)) for i in range(0, count, tall)]
        along = [slice(j, min(j + wide, n)) for j in range(0, n, wide)]
        spans = [(i, j) for i in across for j in along]
        keep = count * n <= group
        # Tiles that are kept have a number each.
        tiles = [(*span, index if keep else 0) for index, span in enumerate(spans)]
        here = [a if a.shape[0] == 1 else a[part, :] for a in (lower, upper, eps)]
        look = x[part, :], delta[part, :], here[0], here[1], here[2]
        load, top, bad = _looked_at(be, look, tiles, numerics, problem if checked else None)
        some_eps = here[2] if bad is None else be.where(bad, 0.0, here[2])
        yield part, Rows(be, load, tiles, keep, some_eps, problem.p, top, numerics), bad


def whole(be: Backend, problem: Problem, numerics: Numerics, keep: bool) -> tuple[Rows, Array]:
    """All of the problem as one group of one tile, unchecked, and which of its rows are to become NaN: for a trace."""
    x, delta, eps, lower, upper = problem.arrays()
    tiles = [(slice(None), slice(None), 0)]
    load, top, bad = _looked_at(be, (x, delta, lower, upper, eps), tiles, numerics, None)
    return Rows(be, load, tiles, keep, be.where(bad, 0.0, eps), problem.p, top, numerics), bad


def _looked_at(
    be: Backend, rows: tuple[Array, ...], tiles: list[Any], numerics: Numerics, problem: Problem | None
) -> tuple[Callable[..., Block], Array, Array | None]:
    """How to load a tile of these rows, their largest |delta|, and which of them make no sense, if any."""
    x, delta, lower, upper, eps = rows
    clipped = problem is None

    def load(tile: Any, T: Array | None = None) -> Block:
        """A tile; if T is given and this is a trace, for a pass of its own."""
        across, along, _ = tile
        bounds = (
            b[across if b.shape[0] != 1 else slice(None), along if b.shape[1] != 1 else slice(None)]
            for b in (lower, upper)
        )
        block = Block(x[across, along], delta[across, along], *bounds)
        if be.TRACES and T is not None:
            block = be.anew(block, T)
        block = Block(*(be.narrow(a, numerics) for a in block))
        if clipped:
            block = block._replace(x=be.clip(block.x, block.lower, block.upper))
        return block

    tops, senseless = [], []
    for tile in tiles:
        block = load(tile)
        tops.append(be.row_top(block.delta))
        if problem is None:
            senseless.append(be.senseless(block, x[tile[:2]]))
        elif not be.sensible(block, tops[-1]):
            # This raises, unless it is but rounding that leaves x outside its bounds.
            be.explain(problem.x, problem.delta, problem.lower, problem.upper)
            clipped = True
    top = be.fold("max", tiles, tops, x)
    bad = ~((eps >= 0) & (eps < math.inf) & (top < math.inf))
    if senseless:
        bad = bad | (be.fold("max", tiles, senseless, top) > 0)
    if not any_true(be, bad):
        return load, top, None
    # Rows without a top are not solved, and whatever is in them does no harm.
    return load, be.where(bad, 0.0, top), bad


# --- one pass over the rows -------------------------------------------------------------------------------------------


class Passes:
    """The sums that Newton asks for. What is derived from the tiles of a small group is kept from pass to pass."""

    def __init__(self, rows: Rows) -> None:
        be = rows.be
        self.rows = rows
        # For a large p the unit is eps itself, up to a rounding that `target` takes out again.
        unit = be.pow2(rows.eps, rows.numerics) if rows.p <= 4 else rows.eps
        self.inv = be.widen(be.narrow(1 / unit, rows.numerics))
        self.target = (rows.eps * self.inv) ** (rows.p if rows.p < math.inf else 1.0)
        self.m = be.pow2(rows.top, rows.numerics)
        self.kept: dict[Any, tuple[Array, ...]] = {}
        self.kept_top = rows.top

    def plain(self, top: Array) -> bool:
        """Whether d^p itself is safe: a small p, and nothing above the unit yet."""
        return self.rows.p <= 4 and top is self.rows.top

    def per_unit(self, top: Array) -> Array:
        """1 over what d is measured in before it is raised to p. To multiply with: of something over a quotient XLA
        makes a quotient of products, and those overflow."""
        if self.plain(top):
            return 1.0
        per_unit = self.m_of(top) / top
        # Where the top is still the first one, as if that were so of all rows: none depends on the others.
        return self.rows.be.where(top == self.rows.top, 1.0, per_unit) if self.rows.p <= 4 else per_unit

    def m_of(self, top: Array) -> Array:
        return self.m if top is self.rows.top else self.rows.be.pow2(top, self.rows.numerics)

    def rooms(self, tile: Any, block: Block) -> Array:
        """w of a tile, with the sign of delta."""
        rows, be = self.rows, self.rows.be
        inv = rows.pick(self.inv, tile)
        w = times(be, room(rows, block), inv)
        # No element moves further than eps: cut there, neither a power nor an infinite bound overflows.
        if rows.p > 4 or any_true(be, (block.upper - block.lower) * inv > ROOMY):
            most = rows.pick(rows.eps * self.inv * (1 + 4 * rows.numerics.ulp), tile)
            w = be.clip(w, -most, most)
        return w

    def piece(self, tile: Any, top: Array, T: Array | None = None) -> tuple[Array, ...]:
        """The breakpoints w/d, (d/unit)^p and w^p of a tile, which do not depend on the T that they are for."""
        if self.kept_top is not top:
            self.kept, self.kept_top = {}, top
        if tile[2] in self.kept:
            return self.kept[tile[2]]
        rows, be = self.rows, self.rows.be
        block = rows.load(tile, T)
        w, d = self.rooms(tile, block), times(be, block.delta, rows.pick(1 / self.m_of(top), tile))
        # In these units a quotient misleads by a rounding at most: it is infinite only where d is too small to count.
        breakpoints = w / d
        if not self.plain(top):
            # What exceeds `top` is clipped by now and counts for nothing, but its power must stay finite.
            first = (top == rows.top) & (rows.p <= 4)
            most = rows.pick(be.where(first, top / self.m_of(top), top * 0 + 1.0), tile)
            d = be.clip(d * rows.pick(self.per_unit(top), tile), -most, most)
        piece = breakpoints, raised(rows, d), raised(rows, w)
        if rows.keep:
            self.kept[tile[2]] = piece
        return piece

    def naive(self) -> tuple[Array, Array]:
        """The T of naive rescaling, as if nothing clipped: never right of the root. And the sum of d^p."""
        rows = self.rows
        total = rows.fold("sum", lambda tile: rows.be.row_sum(self.piece(tile, rows.top)[1]))
        return (self.target / total) ** (1 / rows.p) * self.per_unit(rows.top), total

    def sums(self, T: Array, top: Array) -> tuple[Array, Array]:
        """A and C."""
        rows, be = self.rows, self.rows.be
        both = rows.fold("sum", lambda tile: be.row_sums(rows.pick(T, tile), *self.piece(tile, top, T)))
        return both[:, :1], both[:, 1:]

    def biggest(self, T: Array, top: Array) -> Array:
        """The largest |delta| that is not clipped."""
        rows, be = self.rows, self.rows.be

        def of_tile(tile: Any) -> Array:
            clipped = rows.pick(T, tile) >= self.piece(tile, top)[0]
            return be.row_max(be.where(clipped, 0.0, abs(rows.load(tile).delta)))

        return rows.fold("max", of_tile)

    def most(self) -> Array:
        """C where all that moves is clipped."""
        rows, be = self.rows, self.rows.be

        def of_tile(tile: Any) -> Array:
            block = rows.load(tile)
            w = be.where(block.delta == 0, 0.0, abs(self.rooms(tile, block)))
            return be.row_sum(power(be, w, rows.p))

        return rows.fold("sum", of_tile)

    def ceiling(self) -> Array:
        """The least T for which all that moves is clipped: not left of the root."""
        rows, be = self.rows, self.rows.be

        def of_tile(tile: Any) -> Array:
            block = rows.load(tile)
            size = be.widen(abs(block.delta))
            quotient = be.widen(abs(self.rooms(tile, block))) / be.where(size > 0, size, 1.0)
            return be.row_max(be.where(size > 0, quotient, 0.0))

        return be.minimum(rows.fold("max", of_tile), HUGE / self.m) * self.m

    def largest_with_room(self) -> Array:
        """The largest |delta| among the elements that can move by eps."""
        rows, be = self.rows, self.rows.be
        enough = self.target * (1 - 2 * rows.numerics.ulp)

        def of_tile(tile: Any) -> Array:
            block = rows.load(tile)
            return be.row_max(be.where(abs(self.rooms(tile, block)) >= rows.pick(enough, tile), abs(block.delta), 0.0))

        return rows.fold("max", of_tile)


# --- solving ----------------------------------------------------------------------------------------------------------


def root_of(be: Backend, q: Array, p: float) -> Array:
    """q^(1/p). That exponent is rounded, which costs digits far from q = 1; a step of Newton's gets them back."""
    y = q ** (1 / p)
    if p in (1, 2, 4):
        return y
    z = y**p
    far = ((q < 1e-2) | (q > 1e2)) & (z > 0) & (z < HUGE)
    return be.where(far, y + y * (q / be.where(far, z, 1.0) - 1) / p, y)


def extrapolated(be: Backend, p: float, naive: Array, root: Array, a: Array, c: Array) -> Array:
    """A better second guess than Newton's own `root`.

    A pass at the naive T tells the share `a` of the slope that is left there, and the share `c` of the target that the
    clipped elements carry. Those two fix a quadratic for the slope between 0 and naive, which is followed a little on.
    """
    b = (a + c - 1 + (1 - a) * p / (p + 1)) * (p + 1) * (p + 2) / p
    linear, quadratic = (1 - a - b) * p / (p + 1), b * p / (p + 2)
    first = guess = root / naive
    for _ in range(3):
        guess = be.maximum(1 - guess * (linear + quadratic * guess), 0.1) ** (-1 / p)
    return naive * be.minimum(be.maximum(guess, first), 2 * first - 1)


def curved(be: Backend, p: float, T: Array, root: Array, slope: Array, before: tuple[Array, Array]) -> Array:
    """A better guess than Newton's `root` from T: with the curvature that the last two slopes show."""
    last_T, last_slope = before
    change = (root / T) ** p - 1
    distance = 1 - (last_T / T) ** p
    bend = be.where(abs(distance) > 1e-6, (last_slope / slope - 1) / be.where(abs(distance) > 1e-6, distance, 1.0), 0.0)
    return T * (1 + change + be.minimum(be.maximum(bend * change, -1.0), 1.0) * change / 2) ** (1 / p)


def newton(
    passes: Passes, start: Array, target: Array, settled: float, done: Array, total: Array | None = None
) -> tuple[Array, Array, Array, Array, int]:
    """Solve ``sum min(T*d, w)^p = target`` from `start`, any T > 0; if that is the naive T, `total` is sum(d^p).

    A Newton step from anywhere lands left of the root or on it, and from the left they increase to it. Each is improved
    by what the passes before it tell of the slope, and the last is Newton's own, once the clipped set stays the same.
    Rows that are `done` stay as they are, and so do those that need more care once the others are, so that no row
    depends on the others of its group. Returns T, the `top` that its unit belongs to, C, where everything is clipped
    and that is not enough, and the number of passes.
    """
    be, p, top, tiny = passes.rows.be, passes.rows.p, passes.rows.top, passes.rows.numerics.tiny
    zero = top * 0

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, T, lo, C, last_T, last_A, spent, hard, done = state
        A, C_here = passes.sums(T, top)
        spent = be.where(done, spent, spent + 1)
        C = be.where(done, C, C_here)
        hard = hard | (~done & ((A < tiny) | (C >= target)))
        done = done | hard
        root = root_of(be, (target - C) / A, p) * passes.per_unit(top)
        first = root if total is None else extrapolated(be, p, T, root, A / total, C / target)
        better = be.where(last_A > 0, curved(be, p, T, root, A, (last_T, last_A)), first)
        lo, better = be.where(done, lo, root), be.where(done, T, better)
        return count + 1, better, lo, C, T, A, spent, hard, done | (abs(better - T) <= settled * better)

    state = (0, start, zero if total is None else start, zero, start, zero, zero, zero > 0, done)
    state = loop(be, step, state, NEWTON_PASSES)
    count, T, lo, C, _, _, spent, hard, done = state
    hard = hard | ~done

    def with_care(count: Any, T: Array, top: Array, C: Array, short: Array) -> tuple[Any, ...]:
        return guarded_newton(passes, T, lo, C, ~hard, target, settled, count, spent)

    count, T, top, C, short = when(be, hard, with_care, count, T, top, C, zero > 0)
    return T, top, C, short, count


def guarded_newton(
    passes: Passes,
    T: Array,
    lo: Array,
    C: Array,
    done: Array,
    target: Array,
    settled: float,
    count: Any,
    spent: Array,
) -> tuple[Any, Array, Array, Array, Array]:
    """Newton for rows that need more care: a start too far right, targets out of reach, sums that underflow, and
    breakpoints in geometric progression, which take a bracket and every other pass a bisection of it. `lo` is not right
    of the root; `spent` are a row's own passes so far, on which it depends alone."""
    be, p, numerics = passes.rows.be, passes.rows.p, passes.rows.numerics

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, T, top, lo, hi, from_left, C_old, spent, done = state
        A, C = passes.sums(T, top)
        lost = (A < numerics.tiny) & ~done

        def closer(count: Any, T: Array, near: Array, lo: Array, hi: Array, *_: Array) -> tuple[Any, ...]:
            """The sums have lost elements to underflow: once more, in units of the largest that is not clipped."""
            biggest = passes.biggest(T, top)
            near = be.where(lost & (biggest > 0), biggest, top)
            to_near = passes.m_of(near) / passes.m_of(top)
            A, C = passes.sums(T * to_near, near)
            return count + 1, T * to_near, near, lo * to_near, hi * to_near, to_near, A, C, lost & (biggest <= 0)

        count, T, near, lo, hi, to_near, A, C, nothing_left = when(
            be, lost, closer, count, T, top, lo, hi, top * 0 + 1.0, A, C, top < 0
        )
        over = C >= target
        regular = ~over & (A > 0)
        root = root_of(be, be.where(regular, (target - C) / be.where(A > 0, A, 1.0), 0.0), p) * passes.per_unit(near)

        arrived = regular & be.where(from_left, root <= T * (1 + settled), abs(root - T) <= settled * T)
        stay = (nothing_left & ~over) | (over & from_left)
        hi = be.where(over | (regular & (root < T)), be.minimum(hi, T), hi)
        lo = be.where(regular, be.maximum(lo, root), lo)
        closed = hi <= lo * (1 + settled)
        spent = be.where(lost, spent + 2, spent + 1)
        bisect = ~closed & from_left & (spent > NEWTON_PASSES)
        following = be.where(bisect, be.sqrt(lo) * be.sqrt(hi), lo)
        # From the left no step goes back: what would is rounding, which a flat slope makes much of.
        following = be.where(arrived & (~from_left | (root > T)), root, following)
        following = be.where((arrived & from_left & (root <= T)) | stay | done, T, following)

        # From the left, all that is clipped remains so, and the finer units can stay. Otherwise, back to the old ones.
        finer = ~done & regular & (root >= T) & (near < top)
        back = be.where(finer, 1.0, 1 / to_near)
        (top,) = when(be, finer, lambda top: (be.where(finer, near, top),), top)
        return (
            count + 1,
            following * back,
            top,
            lo * back,
            be.minimum(hi * back, HUGE),
            ~bisect,
            be.where(done, C_old, C),
            spent,
            done | stay | arrived | closed,
        )

    most, ceiling = passes.most(), passes.ceiling()
    short = (most < target) & ~done
    T, C = be.where(short, ceiling, T), be.where(short, most, C)
    state = (count, T, passes.rows.top, lo, be.minimum(ceiling, HUGE), T <= lo, C, spent, done | short)
    count, T, top, _, _, _, C, _, _ = loop(be, step, state, MAX_PASSES)
    # Next to the reach, what is missing is but rounding, and a step that makes up for it may be too long.
    return count, be.where(top == passes.rows.top, be.minimum(T, ceiling), T), top, C, short


def runs_of(rows: Rows, n: int) -> tuple[Rows, float]:
    """A sample of long rows, contiguous runs of them, and which share of a row it is."""
    tiles = [(slice(None), rows.be.runs(n, SAMPLE_RUNS, SAMPLE_RUN), -1)]
    return rows._replace(tiles=tiles, keep=True), SAMPLE_RUNS * SAMPLE_RUN / n


def sample_start(sample: Rows, share: float, passes: Passes, done: Array) -> Array:
    """Newton's start: the solution of a sample, which is that share of the rows."""
    rows, be = passes.rows, passes.rows.be
    few = Passes(sample._replace(eps=rows.eps, top=rows.top))
    first = few.naive()[0] * share ** (1 / rows.p)
    T, top, _, short, _ = newton(few, first, passes.target * share, 0.01, done)
    return be.where(short | (top < rows.top), first, T)


def solve(
    rows: Rows, n: int, mode: str, write: bool, begin: Callable[[Passes, Array], Array] | None = None
) -> Solution:
    """The scale of every row of `n` elements, and what became of it; nearly, if `write` is to follow.

    ``begin(passes, still)`` is for those who know more beforehand: a T near the root of each row that does not stay
    still, or for p = inf the largest |delta| among the elements that can move by eps.
    """
    be, p, numerics = rows.be, rows.p, rows.numerics
    settled = numerics.settled
    # Not where eta decides whether delta is left alone: a short step may be followed by a long one, beyond a kink.
    if write and (begin is not None or (numerics is SINGLE and mode == "equal")):
        settled = (LOOSE if numerics is SINGLE else LOOSE_DOUBLE) * min(1.0, 4 / p)
    is_zero, at_zero = rows.top <= 0, rows.eps < numerics.least
    still = is_zero | at_zero
    rows = rows._replace(eps=be.where(at_zero, 1.0, rows.eps), top=be.where(is_zero, 1.0, rows.top))
    passes = Passes(rows)
    if p < math.inf:
        if begin is None and n >= SAMPLE_FROM:
            begin = partial(sample_start, *runs_of(rows, n))
        start, total = passes.naive() if begin is None else (begin(passes, still), None)
        T, top, C, short, count = newton(passes, start, passes.target, settled, still, total)
        unreachable = short & (C < passes.target * (1 - 8 * p * numerics.ulp))
    else:
        largest = passes.largest_with_room() if begin is None else begin(passes, still)
        unreachable = short = largest <= 0
        top, C, count = be.where(short, rows.top, largest), largest * 0, 1
        T = passes.target * (passes.m_of(top) / top)
        (T,) = when(be, short, lambda T: (be.where(short, passes.ceiling(), T),), T)
    # What is large about T goes to m, not to K, which might not be a number where their quotient is.
    m = passes.m_of(top)
    large = be.pow2(512 * be.minimum(T, 2.0**100), numerics) / 512
    shift = be.maximum(be.minimum(large, m * (numerics.far / 2)), 1.0)
    K, m = be.minimum(T / shift, HUGE) / passes.inv, m / shift  # of two quotients, XLA would make one

    held = K > m if mode == "at_most" else K < m if mode == "at_least" else K < 0
    if mode == "at_most":
        # Delta as it is may get everything to its bound, too, but for rounding.
        held = held | (unreachable & (K == m))
        unreachable = unreachable & ~held
    # Held rows take delta as it is; rows that stay take nothing of it.
    held = held & ~unreachable & ~still
    status = be.where(held, HELD, REGULAR)
    if any_true(be, held | unreachable | still):
        status = be.where(unreachable, UNREACHABLE, status)
        status = be.where(is_zero, ZERO, be.where(at_zero, AT_ZERO, status))
        K = be.where(still, 0.0, be.where(held, 1.0, K))
        m = be.where(still, passes.m, be.where(held, 1.0, m))
    return Solution(K, m, be.maximum(1 - C / passes.target, numerics.ulp), status, count)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    rows: Rows, solution: Solution, mode: str, store: Callable[..., Array], half: bool, slack: float = SLACK
) -> tuple[Any, ...]:
    """Have `store` keep every block of ``v = clip(x + eta*delta)``, polished where its rounding moves the norm.

    ``store(columns, block, direction, k)`` keeps ``clip(x + k*direction)`` in the array's own dtype and returns what it
    kept in the working dtype; in a trace, that is returned here too. Before it comes the solution, once more:
    it may take a look at the norm to see what is out of reach.
    """
    be, p, numerics, status = rows.be, rows.p, rows.numerics, solution.status
    at_most = mode == "at_most"
    eps = be.where(rows.eps >= numerics.least, rows.eps, 1.0)
    down = 1 / (be.pow2(eps, numerics) if p <= 4 else eps)
    # at_most is a promise in float64; elsewhere the working precision can tell whether a polish is needed.
    limit = 1 - slack if at_most else math.inf
    corner = status == UNREACHABLE

    written: list[Array] = []  # by a trace, for its one tile

    def stored(K: Array, tile: Any) -> tuple[Array, Array]:
        """Store a tile of the array for this K; what was kept, and x."""
        block = rows.load(tile)
        direction = times(be, block.delta, rows.pick(1 / solution.m, tile))
        K = be.minimum(K, numerics.far)  # or float32 might take it for infinite
        # What cannot be reached ends on its bounds, however far they are and whatever the rounding of K.
        if corners := any_true(be, corner):
            direction = be.where(corner[tile[0], :], be.sign(block.delta) * numerics.far, direction)
        v = store(tile, block, direction, rows.pick(be.where(corner, 1.0, K) if corners else K, tile))
        if be.TRACES:
            written[:] = [v]
        return v, block.x

    def norm_of(K: Array, widen: bool) -> Array:
        """Store the array for this K; its norm over eps."""
        return norm(lambda tile: powers(tile, *stored(K, tile), widen))

    def powers(tile: Any, v: Array, x: Array, widen: bool) -> tuple[Array, Array]:
        """Of a tile: the sum of powers, and for a large p the largest element."""
        if widen:
            z = (be.widen(v) - be.widen(x)) * (down if down.shape[0] == 1 else down[tile[0], :])
        else:
            z = times(be, v - x, rows.pick(down, tile))
        if p <= 4:
            return be.row_dot(z, z) if p == 2 else be.row_sum(power(be, abs(z), p)), None
        furthest = be.row_max(abs(z))
        if p == math.inf:
            return None, furthest
        # In units of the largest, so that no power overflows, nor all of them vanish.
        unit = be.where((furthest > 0) & (furthest < math.inf), furthest, 1.0)
        return be.row_sum(power(be, abs(z) / unit, p)), furthest

    def norm(of_tile: Callable[[Any], tuple[Array, Array]]) -> Array:
        sums, largest = zip(*(of_tile(tile) for tile in rows.tiles), strict=True)
        if p <= 4:
            return be.fold("sum", rows.tiles, sums, rows.top) ** (1 / p) / (eps * down)
        furthest = be.fold("max", rows.tiles, largest, rows.top)
        if p == math.inf:
            return furthest / (eps * down)
        finite = (furthest > 0) & (furthest < math.inf)
        unit = be.widen(be.where(finite, furthest, 1.0))
        parts = [
            u * (be.widen(z) / unit[tile[0], :]) ** p for u, z, tile in zip(sums, largest, rows.tiles, strict=True)
        ]
        total = be.fold("sum", rows.tiles, parts, rows.top) ** (1 / p)
        return be.where(finite, be.widen(furthest) * total, be.widen(furthest)) / (eps * down)

    if not be.TRACES:
        first = norm_of(solution.K, at_most)
    else:
        # Of the array in memory, in a branch: elsewhere, XLA would make it once more for this sum.
        v, _ = stored(solution.K, rows.tiles[0])
        moves = (status != ZERO) & (status != AT_ZERO)
        (first,) = when(
            be, moves, lambda _: (norm(lambda tile: powers(tile, v, rows.load(tile).x, at_most)),), rows.top * 0 + 1.0
        )
    off = abs(first - 1) > numerics.close
    # Newton's last step may have been a short one next to a kink, with nothing to be had beyond.
    short = (first < 1 - 4 * numerics.close) & (status == REGULAR) & (p < math.inf)

    def looked_at(K: Array, status: Array) -> tuple[Array, Array]:
        passes = Passes(rows._replace(eps=eps))
        beyond = short & (passes.most() < passes.target * (1 - 8 * p * numerics.ulp))
        ceiling = passes.ceiling() / passes.inv * (solution.m / passes.m)
        return be.where(beyond, ceiling, K), be.where(beyond, UNREACHABLE, status)

    K, status = when(be, short, looked_at, solution.K, status)
    solution = solution._replace(K=K, status=status)
    late, corner = (status == UNREACHABLE) & ~corner, status == UNREACHABLE
    moving = (status == REGULAR) & ((first < HUGE) if half else off)
    if at_most:
        # Also of what sums in float32 took for out of reach although it is not.
        over = (first > limit) & ((status == REGULAR) | (status == HELD) | corner)
        corner, moving = corner & ~over, moving | over
    close = 1e-8 if half else numerics.close / 2

    def polished(*_: Array) -> tuple[Array, ...]:
        best = polish(rows, lambda K: norm_of(K, True), solution, moving, limit, close)
        for tile in rows.tiles:
            stored(best, tile)
        return tuple(written)

    return solution, *when(be, moving | late, polished, *written)


def polish(
    rows: Rows, norm_of: Callable[[Array], Array], solution: Solution, moving: Array, limit: float, close: float
) -> Array:
    """The K whose array, as stored, has the norm nearest to eps.

    ``norm_of(K)`` is that norm over eps: a monotone step function. `limit` is the most it may be, or infinity; rows
    that are not `moving` keep their K. A bracketed secant alternates with bisection, down to neighbouring numbers K
    unless a norm within `close` comes first.
    """
    be, ulp = rows.be, rows.numerics.ulp
    edge = min(limit, 1.0)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, K, lo, hi, at_lo, at_hi, best, gap, stride, halving, done = state
        norm = norm_of(be.where(done, solution.K, K))
        new_gap = be.where(norm <= limit, abs(norm - 1), HUGE)
        better = ~done & (new_gap < gap)
        best, gap = be.where(better, K, best), be.where(better, new_gap, gap)
        above = norm > edge
        lo, at_lo = be.where(above, lo, K), be.where(above, at_lo, norm)
        hi, at_hi = be.where(above, K, hi), be.where(above, norm, at_hi)
        inside = (lo >= 0) & (hi < math.inf)
        # Over orders of magnitude, half of them.
        low = be.maximum(lo, rows.numerics.least)
        halfway = be.where(hi > 4 * low, be.sqrt(low) * be.sqrt(hi), lo + (hi - lo) / 2)
        middle = rounded(be.where(inside, halfway, K))
        secant = rounded(be.where(inside, lo + (hi - lo) * ((edge - at_lo) / be.where(inside, at_hi - at_lo, 1.0)), K))
        # Until there is a bracket: the tangent's step and a little more, further each time it was too short.
        reach = (abs(edge - norm) / solution.slope + 2 * ulp) * stride
        # Not so far that nothing times it is something.
        outward = rounded(be.minimum(be.where(above, K / (1 + reach), K * (1 + reach)), rows.numerics.far))
        between = be.where(~halving & (secant > lo) & (secant < hi), secant, middle)
        closed = inside & ((between <= lo) | (between >= hi))
        return (
            count + 1,
            be.where(inside, between, outward),
            lo,
            hi,
            at_lo,
            at_hi,
            best,
            gap,
            be.minimum(4 * stride * stride, 2.0**510),
            ~halving | (count >= HALVE_FROM),
            done | closed | (gap <= close + 1 - edge),
        )

    def rounded(K: Array) -> Array:
        return be.widen(be.narrow(K, rows.numerics))

    zero, start = solution.K * 0, rounded(solution.K)
    at_worst = zero if limit < math.inf else start
    state = (0, start, zero - 1, zero + math.inf, zero, zero, at_worst, zero + HUGE, zero + 1.0, zero > 0, ~moving)
    state = loop(be, step, state, POLISH_PASSES)
    return be.where(moving, state[6], solution.K)


def reach(rows: Rows) -> Array:
    """The norm at which everything that moves is clipped; infinite if something moves without a bound."""
    be, p = rows.be, rows.p

    def rooms(tile: Any) -> Array:
        block = rows.load(tile)
        return be.where(block.delta == 0, 0.0, abs(room(rows, block)))

    largest = rows.fold("max", lambda tile: be.row_max(rooms(tile)))
    if p == math.inf:
        return largest
    finite = (largest > 0) & (largest < math.inf)
    unit = be.maximum(be.where(finite, largest, 1.0), rows.numerics.least)
    # In two steps: the reciprocal of a large unit may be too small a number.
    m = be.pow2(unit, rows.numerics)

    def parts(tile: Any) -> Array:
        return rooms(tile) * rows.pick(1 / m, tile) * rows.pick(m / unit, tile)

    total = rows.fold("sum", lambda tile: be.row_sum(power(be, be.minimum(parts(tile), 2.0), p)))
    return be.where(finite, total ** (1 / p) * unit, largest)


def summary(rows: Rows, v: Array, n: int) -> tuple[Array, Array, Array]:
    """Of v: its norm, the norm that naive scaling has instead, and the share of elements at their bounds."""
    be, p, numerics = rows.be, rows.p, rows.numerics

    def written(tile: Any) -> Array:
        return be.narrow(v[tile[:2]], rows.numerics)

    at_zero = rows.eps < numerics.least
    still = (rows.top <= 0) | at_zero
    rows = rows._replace(eps=be.where(at_zero, 1.0, rows.eps), top=be.where(rows.top > 0, rows.top, 1.0))
    passes = Passes(rows)
    # As a product: of two quotients XLA makes one of products, which overflow.
    K = rows.eps * (passes.naive()[0] / (rows.eps * passes.inv) if p < math.inf else passes.m / rows.top)
    K = be.where(still, 0.0, K)

    def norm(array: Callable[[Any, Block], Array]) -> Array:
        def moved(tile: Any) -> Array:
            block = rows.load(tile)
            return abs(be.widen(array(tile, block)) - be.widen(block.x))

        # Not in units of eps, which may be far from what it is: powers would overflow, or vanish.
        largest = rows.fold("max", lambda tile: be.row_max(moved(tile)))
        if p == math.inf:
            return largest
        unit = be.where(largest >= numerics.least, largest, numerics.least)

        def of_tile(tile: Any) -> Array:
            here = unit if unit.shape[0] == 1 else unit[tile[0], :]
            return be.row_sum(power(be, moved(tile) / here, p))

        return unit * rows.fold("sum", of_tile) ** (1 / p)

    def naive(tile: Any, block: Block) -> Array:
        move = block.delta * rows.pick(1 / passes.m, tile) * rows.pick(K, tile)
        return be.clip(block.x + move, block.lower, block.upper)

    def at_bound(tile: Any) -> Array:
        block = rows.load(tile)
        here, ahead = written(tile), bound_ahead(be, block.delta, block.lower, block.upper)
        # TensorFlow's == may have no shape, not knowing whether those of its arguments agree.
        there = (here >= ahead) & (here <= ahead) & (block.delta != 0)
        return be.row_sum(be.cast_like(there, block.x))

    return norm(lambda tile, _: written(tile)), norm(naive), rows.fold("sum", at_bound) / n
