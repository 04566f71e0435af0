"""PyTorch's tensors that are parts of samples, the other parts of which other processes hold.

The algorithm is that of ``_traced``: a sum or a maximum over a row is one over all of its parts, by one collective for
all rows. What depends on a decision depends on such numbers alone, which every process has in the same bits. So that
the passes are few, the first collective brings a small sample of every row, and the second the sums of Newton's pass at
several scales around its solution. What derivatives need in backward is one collective, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from clipaware import _derivatives, _traced
from clipaware._backends import torch as alone
from clipaware._derivatives import Pace, Partials
from clipaware._problem import AT_ZERO, DOUBLE, REGULAR, UNREACHABLE, Block, Numerics, Problem, bound_ahead, power
from clipaware._traced import Passes, Rows

Array = Any

SAMPLE = 2**17  # elements of all rows in the first collective, of which each row has
LEAST, MOST = 32, 256
NODES = 8  # scales of the second
ROUNDS = 3  # how often, with other scales, as long as the root is not known to
WIDE = 0.02
SURE = 3.0  # standard errors of the sample's solution to either side
KEPT = 2**24  # elements of a part whose powers may stay in memory from pass to pass


class Look(NamedTuple):
    """What the first collective tells, per row."""

    top: Array  # the largest |delta|
    largest: Array  # and that of the elements that can move by eps
    eps: Array  # the same for all processes, and 0 where a row makes no sense
    d: Array  # of a sample, |delta| and room
    s: Array
    bad: Array  # where a row makes no sense
    n: int  # elements of all parts


class Shards:
    """The backend for parts of rows, with the functions of PyTorch's but for those that look at whole rows."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(alone, name)

    def reduced(self, combine: str, a: Array) -> Array:
        """Added up or maximised over the processes, in place if possible."""
        a = a.contiguous()
        dist.all_reduce(a, dist.ReduceOp.SUM if combine == "sum" else dist.ReduceOp.MAX, group=self.group)
        return a

    def fold(self, combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
        # Of a single tile it is what was handed in, which may be needed as it was.
        return self.reduced(combine, alone.fold(combine, tiles, values, like).clone())

    # --- what the API asks for ----------------------------------------------------------------------------------------

    def solve(self, problem: Problem, mode: str, write: bool) -> tuple[Array, Array, Array]:
        """v (None unless `write`), eta and status."""
        arrays = alone._as_tensors(problem).arrays()
        v, eta, status = _Solve.apply(self, *arrays, problem.p, mode, write)  # type: ignore[no-untyped-call]
        return v if write else None, eta, status

    def reach(self, problem: Problem) -> Array:
        """The largest norm of every row."""
        one = torch.ones((1, 1), dtype=torch.float64, device=problem.x.device)
        if not problem.x.shape[0]:
            return one[:0]
        rows, look = self.rows(problem._replace(eps=one))
        return torch.where(look.bad, torch.nan, _traced.reach(rows))

    def summary(self, problem: Problem, v: Array) -> tuple[Array, Array, Array]:
        """Of v: norm, naive norm and share of elements at their bounds."""
        if not problem.x.shape[0]:
            nothing = torch.zeros((0, 1), dtype=torch.float64, device=problem.x.device)
            return nothing, nothing, nothing
        rows, look = self.rows(problem)
        v = v.detach() if v.shape[1] else v.new_zeros((len(v), 1))
        norm, naive, clipped = (torch.where(look.bad, torch.nan, a) for a in _traced.summary(rows, v, look.n))
        if problem.p == math.inf:  # a maximum may lose the NaN of another process
            lost = self.reduced("max", torch.isnan(v).any(1, keepdim=True).double()) > 0
            norm = torch.where(lost, torch.nan, norm)
        return norm, naive, clipped

    def vjp(self, problem: Problem, eta: Array, status: Array, g: Array) -> tuple[Array, ...]:
        """Gradients of x, delta, eps, lower and upper; those of the bounds summed to their rows form, of this part."""
        problem = alone._as_tensors(problem).mapped(alone._detached)
        rows = problem.x.shape[0]
        problem = problem._replace(eps=problem.eps.expand(rows, 1))
        top = largest = torch.zeros_like(problem.eps)
        if rows:
            _, look = self.rows(problem)
            top, largest = look.top, look.largest
        return tuple(self.bars(problem, (eta.detach(), status, top, largest), g.detach(), None, (True,) * 5))

    # --- parts of rows ------------------------------------------------------------------------------------------------

    def rows(self, problem: Problem, sampled: bool = False) -> tuple[Rows, Look]:
        """All of the problem as one group, and what a first collective tells of it: also a sample, for Newton."""
        length = problem.x.shape[1]
        problem = _plain(problem)
        x, p, numerics = problem.x, problem.p, alone._numerics(problem.x)
        tiles, load = _tiles(x), _loader(problem)
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        checked = x.device.type == "cpu"
        error = _explained(problem) if checked else None

        columns = _looked_at(x, problem.eps.expand(len(x), 1), p, load, tiles)
        columns[:, 0] = (rank + 1 if error else 0) if checked else columns[:, 0]
        count = -(-min(max(SAMPLE // len(x), LEAST), MOST) // size) if sampled else 0
        sample = torch.full((len(x), size, count, 2), -1.0, dtype=columns.dtype, device=x.device)
        sample[:, rank] = _sampled(load, x, count)
        lengths = torch.zeros(size, dtype=columns.dtype, device=x.device)
        lengths[rank] = length
        parts = lengths, columns, sample
        everything = self.reduced("max", torch.cat([a.reshape(-1) for a in parts])).split([a.numel() for a in parts])
        lengths, columns, sample = (a.reshape(part.shape) for a, part in zip(everything, parts, strict=True))
        if error is not None:
            raise error
        look = _told(lengths, columns, sample, p, checked)
        return Rows(self, load, tiles, x.numel() <= KEPT, look.eps, p, look.top, numerics), look

    def start(self, passes: Passes, look: Look, still: Array) -> Array:
        """A T near the root of every row, from its sample and a collective, or a few if the sample misleads."""
        rows = passes.rows
        guess, spread = _of_sample(rows, look, still)
        middle = guess * passes.inv * passes.m
        found, low, high = middle, middle * torch.exp(-spread), middle * torch.exp(spread)
        steps = torch.linspace(0, 1, NODES, dtype=middle.dtype, device=middle.device)
        zero, far = middle * 0, middle * 0 + rows.numerics.far

        def sums(nodes: Array) -> tuple[Array, Array]:
            def of_tile(tile: Any) -> Array:
                (breakpoints, dp, wp), here = passes.piece(tile, rows.top), rows.pick(nodes, tile)
                return torch.cat([alone.row_sums(T, breakpoints, dp, wp) for T in here.split(1, dim=1)], dim=1)

            both = rows.fold("sum", of_tile)
            return both[:, ::2], both[:, 1::2]

        for _ in range(ROUNDS):
            nodes = torch.cat((zero, low * (high / low) ** steps, far), dim=1)
            A, C = sums(nodes)
            per_unit = passes.per_unit(rows.top)
            root, low, high = _interpolated(nodes[:, :-1], A[:, :-1], C[:, :-1], passes.target, per_unit, rows.p)
            usable = (low > 0) & (root < math.inf) & ~still
            found = torch.where(usable, root, found)
            # Nothing to look for where even everything at its bound is not enough.
            wide = usable & (high > low * (1 + WIDE)) & (C[:, -1:] > passes.target)
            if not bool(wide.any()):
                break
            low, high = torch.where(wide, low, found), torch.where(wide, high, found * (1 + WIDE))
        return found

    def solved(self, problem: Problem, mode: str, write: bool) -> tuple[Array, ...]:
        """v (empty unless `write`), eta, status, the largest |delta|, and that of what can move by eps."""
        x, p = problem.x, problem.p
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if write else x.new_empty(0)
        if not x.shape[0]:
            nothing = torch.zeros((0, 1), dtype=torch.float64, device=x.device)
            return out, nothing, nothing.long(), nothing, nothing
        rows, look = self.rows(problem, sampled=p < math.inf)

        def begin(passes: Passes, still: Array) -> Array:
            return look.largest if p == math.inf else self.start(passes, look, still)

        found = _traced.solve(rows, look.n, mode, write, begin)
        half = x.dtype.itemsize == 2

        def store(tile: Any, block: Block, direction: Array, k: Array) -> Array:
            v = torch.clamp(direction * k + block.x, block.lower, block.upper)
            if x.shape[1]:
                out[tile[:2]] = v.to(x.dtype)
            return v.to(x.dtype).to(v.dtype) if half else v

        if write:
            (found,) = _traced.write(rows, found, mode, store, half)
            if look.bad.any():
                out.masked_fill_(look.bad, torch.nan)
        eta = torch.where(look.bad, torch.nan, found.K / found.m)
        return out, eta, found.status, look.top, look.largest

    # --- derivatives --------------------------------------------------------------------------------------------------

    def bars(self, problem: Problem, solution: tuple[Array, ...], g: Any, h: Any, needs: Any) -> list[Any]:
        """Gradients as far as they are needed, each of its argument's shape and dtype."""
        arrays = problem.arrays()
        found: list[Any] = [torch.zeros_like(a) if need else None for a, need in zip(arrays, needs, strict=False)]
        if not problem.x.shape[0]:
            return found
        # Not rounded to half precision while there is more to add up.
        found[3:] = [None if bar is None else bar.to(alone._wide(bar)) for bar in found[3:]]
        eta, status, top, largest = solution
        empty = not problem.x.shape[1]
        problem = _plain(problem)
        x, p, numerics = problem.x, problem.p, alone._numerics(problem.x)
        load, tiles = _loader(problem), _tiles(x)
        g = None if g is None or empty else g
        pace = _pace(problem.eps.expand(x.shape[0], 1), eta, status, top, largest, p, numerics)

        def part(tile: Any, pace: Pace) -> tuple[Partials, Array]:
            here = Pace(*(a[tile[0], :] for a in pace))
            block = load(tile)
            up = torch.zeros_like(block.x) if g is None else g[tile[:2]].to(block.x.dtype)
            parts = _derivatives.split(alone, block, here, numerics)
            return _derivatives.weighed(alone, parts, here, p, numerics), up

        def sums(tile: Any) -> Array:
            of_tile, up = part(tile, pace)
            slope = abs(of_tile.w) if p == math.inf else torch.where(of_tile.free, of_tile.w * of_tile.direction, 0.0)
            along = torch.where(of_tile.free, up * of_tile.direction, 0.0)
            return torch.cat((alone.row_sum(slope), alone.row_sum(along)), dim=1)

        slope, along = self.fold("sum", tiles, [sums(tile) for tile in tiles], eta).split(1, dim=1)
        pace = _sloped(pace, slope, top, p, numerics)
        if needs[2]:
            lam = ((0.0 if h is None else h) / pace.m + along) * pace.inverse
            eps_bar = torch.where(torch.isnan(eta), torch.nan, lam)
            found[2] = eps_bar.sum_to_size(arrays[2].shape).to(arrays[2].dtype)
        for tile in () if empty else tiles:
            of_tile, up = part(tile, pace)
            some = along[tile[0], :]
            down = torch.zeros_like(some) if h is None else h[tile[0], :]
            x_bar, delta_bar, c_bar, _ = _derivatives.pulled(alone, of_tile, up, down, some, numerics)
            moves = problem.delta[tile[:2]]
            of_bounds = torch.where(moves < 0, c_bar, 0.0), torch.where(moves > 0, c_bar, 0.0)
            lost = torch.isnan(eta[tile[0], :])
            for into, bar in zip((found[0], found[1], *found[3:]), (x_bar, delta_bar, *of_bounds), strict=True):
                if into is not None:
                    part_of = into[_of_tile(into, tile)]
                    part_of += torch.where(lost, torch.nan, bar).sum_to_size(part_of.shape)
        return [None if bar is None else bar.to(a.dtype) for bar, a in zip(found, arrays, strict=True)]


class _Solve(torch.autograd.Function):
    """(v, eta, status) of parts of rows, with the derivatives of docs/math.md."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *arguments: Any) -> Any:
        *arrays, p, mode, write = arguments
        v, eta, status, top, largest = shards.solved(Problem.of(arrays, p), mode, write)
        ctx.shards, ctx.p, ctx.write = shards, p, write
        ctx.mark_non_differentiable(status, *([] if write else [v]))
        ctx.save_for_backward(*arrays, eta, status, top, largest)
        ctx.set_materialize_grads(False)
        return v, eta, status

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any, _: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of samples that are spread over processes cannot be differentiated again, as "
                "create_graph=True asks for; have whole samples on every process for that"
            )
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:6]
        problem = Problem.of(saved[:5], ctx.p)
        return None, *ctx.shards.bars(problem, saved[5:], g if ctx.write else None, h, needs), None, None, None


def _plain(problem: Problem) -> Problem:
    """Without derivatives; and instead of a part without elements, one that does not move."""
    problem = alone._as_tensors(problem).mapped(alone._detached)
    if problem.x.shape[1]:
        return problem
    nothing = problem.x.new_zeros((problem.x.shape[0], 1))
    return problem._replace(x=nothing, delta=nothing, lower=nothing, upper=nothing + 1)


def _tiles(x: Array) -> list[Any]:
    rows, n = x.shape
    size = alone.GROUP if x.device.type == "cpu" else alone.BATCH
    tall, wide = max(1, size // n), min(n, size)
    spans = [
        (slice(i, min(i + tall, rows)), slice(j, min(j + wide, n)))
        for i in range(0, rows, tall)
        for j in range(0, n, wide)
    ]
    return [(*span, index) for index, span in enumerate(spans)]


def _of_tile(a: Array, tile: Any) -> tuple[slice, slice]:
    """What of a bound belongs to a tile."""
    across, along, _ = tile
    return across if a.shape[0] != 1 else slice(None), along if a.shape[1] != 1 else slice(None)


def _loader(problem: Problem) -> Any:
    x, delta, _, lower, upper = problem.arrays()
    numerics = alone._numerics(x)

    def load(tile: Any, T: Any = None) -> Block:
        parts = x[tile[:2]], delta[tile[:2]], lower[_of_tile(lower, tile)], upper[_of_tile(upper, tile)]
        block = Block(*(alone.narrow(a, numerics) for a in parts))
        return block._replace(x=torch.clamp(block.x, block.lower, block.upper))

    return load


def _room(block: Block) -> Array:
    """Distance from x to the bound that delta points to; 0 where it points nowhere."""
    ahead = bound_ahead(alone, block.delta, block.lower, block.upper)
    return torch.where(block.delta == 0, 0.0, abs(ahead - block.x))


def _explained(problem: Problem) -> ValueError | None:
    """What is wrong with the values of this part, to be raised when the others know that there is something."""
    x, delta, _, lower, upper = problem.arrays()
    fine = (lower <= x) & (x <= upper) & torch.isfinite(x) & torch.isfinite(delta)
    if bool(fine.all()):
        return None
    try:
        alone.explain(x, delta, lower, upper)
    except ValueError as error:
        return error
    return None


def _looked_at(x: Array, eps: Array, p: float, load: Any, tiles: list[Any]) -> Array:
    """Of this part, the columns whose maxima over all parts are to be known, none of them NaN."""
    numerics = alone._numerics(x)

    def most(of_tile: Any) -> Array:
        found = alone.fold("max", tiles, [of_tile(tile) for tile in tiles], eps)
        return torch.where(found < math.inf, found, math.inf)

    def can_move(tile: Any) -> Array:
        block = load(tile)
        s, here = _room(block), eps[tile[0], :]
        inv = alone.narrow(torch.where(here > 0, 1 / here, math.inf), numerics)
        enough = (s > 0) & (s * inv >= 1 - 2 * numerics.ulp)
        return alone.row_max(torch.where(enough, abs(block.delta), 0.0))

    bad = most(lambda tile: alone.senseless(load(tile), x[tile[:2]]))
    top = most(lambda tile: alone.row_top(load(tile).delta))
    largest = most(can_move) if p == math.inf else top * 0
    known = torch.where((eps >= 0) & (eps < math.inf), eps, math.inf)
    return torch.cat((bad, top, largest, known, -known), dim=1)


def _sampled(load: Any, x: Array, count: int) -> Array:
    """(rows, count, 2): |delta| and room of elements all over this part, the same of every row."""
    # Multiples of the golden ratio: evenly spread, but in step with no pattern of the data.
    places = (torch.arange(count, dtype=torch.float64) + 0.5) * ((math.sqrt(5) - 1) / 2) % 1 * x.shape[1]
    block = load((slice(0, len(x)), places.long().to(x.device), 0))
    return alone.widen(torch.nan_to_num(torch.stack((abs(block.delta), _room(block)), dim=-1), posinf=math.inf))


def _told(lengths: Array, columns: Array, sample: Array, p: float, checked: bool) -> Look:
    """What the maxima over all parts say; if they are `checked`, on every process the error that one has found."""
    bad, top, largest, eps, negative = columns.split(1, dim=1)
    if checked:
        where = int(bad.max())
        if where:
            raise ValueError(
                f"x, delta or a bound has bad values on rank {where - 1} of the group, whose own error says which"
            )
        differs = (eps != -negative).ravel()
        if bool(differs.any()):
            row = int(differs.nonzero()[0])
            raise ValueError(
                f"eps is from {-float(negative[row])} to {float(eps[row])} for sample {row}, expected the same number "
                "on all ranks of the group"
            )
    lost = (bad > 0) | ~(top < math.inf) | ~(eps < math.inf)
    # An element counts for as many as there are to one that was taken.
    weight = (lengths / max(sample.shape[2], 1)) ** (1 / p)
    sample = torch.where(sample >= 0, sample * weight.reshape(1, -1, 1, 1), 0.0).reshape(len(sample), -1, 2)
    top, largest, eps, d, s = (torch.where(lost, 0.0, a) for a in (top, largest, eps, sample[..., 0], sample[..., 1]))
    return Look(top, largest, eps, d, s, lost, int(lengths.sum()))


def _of_sample(rows: Rows, look: Look, still: Array) -> tuple[Array, Array]:
    """eta as the sample has it, and about how far that may be off, as a difference of logarithms."""
    p, d, s = rows.p, look.d, look.s
    tiles = [(slice(None), slice(None), 0)]
    zero = torch.zeros_like(d)

    def load(tile: Any, T: Any = None) -> Block:
        return Block(zero, d, zero, s)

    top = d.amax(dim=1, keepdim=True)
    sample = Rows(alone, load, tiles, True, torch.where(still, 0.0, rows.eps), p, top, DOUBLE)
    found = _traced.solve(sample, 0, "equal", False)
    eta = found.K / found.m
    terms = torch.minimum(eta * d, s) / rows.eps
    powers = power(alone, terms, p)
    total = powers.sum(dim=1, keepdim=True)
    spread = torch.sqrt(torch.clamp((powers * powers).sum(dim=1, keepdim=True) - total**2 / d.shape[1], min=0.0))
    off = SURE * spread / (p * torch.clamp(found.slope, min=1e-3))
    naive = rows.eps / rows.top  # at most, where the sample has nothing that moves
    usable = (eta > 0) & (eta < math.inf)
    return torch.where(usable, eta, naive), torch.clamp(off, 1e-3, 1.0)


def _interpolated(T: Array, A: Array, C: Array, target: Array, per_unit: Any, p: float) -> tuple[Array, Array, Array]:
    """The root, as nearly as the sums at these T tell, and two T between which it is.

    In t = T^p, C + A*t has the slope A, and values and slopes at the two T around the root make a cubic polynomial for
    t. It is kept between the tangents, left of which there is no root, and the chord, right of which there is none.
    """
    last = T[:, -1:]
    t, slope = (T / last) ** p, A * (last / per_unit) ** p
    f = C + slope * t
    place = torch.clamp((f <= target).sum(dim=1, keepdim=True) - 1, 0, T.shape[1] - 2)
    t0, f0, slope0, t1, f1, slope1 = (a.gather(1, place + i) for i in (0, 1) for a in (t, f, slope))
    rise = f1 - f0
    share = torch.clamp((target - f0) / rise, 0.0, 1.0)
    left = t0 + (target - f0) / slope0
    right = torch.where(slope1 > 0, t1 + (target - f1) / slope1, left)
    least, most = torch.maximum(left, right), t0 + (t1 - t0) * share
    past, ahead = share * (1 - share) ** 2 * rise / slope0, share**2 * (1 - share) * rise / slope1
    cubic = t0 + (t1 - t0) * share**2 * (3 - 2 * share) + past - torch.where(slope1 > 0, ahead, 0.0)
    # Right of them all: further on by the last tangent, and by several times as much.
    beyond = f[:, -1:] <= target
    low = last * torch.where(beyond, right, least) ** (1 / p)
    high = torch.where(beyond, low * (low / last) ** 4, last * torch.maximum(most, least) ** (1 / p))
    return torch.where(beyond, low, last * torch.maximum(torch.minimum(cubic, most), least) ** (1 / p)), low, high


def _pace(eps: Array, eta: Array, status: Array, top: Array, largest: Array, p: float, numerics: Numerics) -> Pace:
    """What is known of rows before their slopes are: where eps = 0, in units of the largest |delta|."""
    top = torch.where(top > 0, top, 1.0)
    m = alone.pow2(top, numerics)
    regular = status == REGULAR
    inv = torch.where(regular, 1 / torch.where(regular, eps, 1.0), 0.0)
    eta = torch.where(status == UNREACHABLE, 0.0, eta)
    rate = torch.where(status == AT_ZERO, m / top, eta * m * inv) if p < math.inf else torch.ones_like(top)
    narrow = alone.narrow
    of_largest = narrow(largest, numerics) * narrow(1 / m, numerics)
    return Pace(m, eta, status, narrow(inv, numerics), narrow(rate, numerics), of_largest, torch.zeros_like(top))


def _sloped(pace: Pace, slope: Array, top: Array, p: float, numerics: Numerics) -> Pace:
    """With what the sums tell: those of weights at the rate of `_pace`, which for p = inf is a count."""
    if p == math.inf:
        some = slope > 0
        pace = pace._replace(rate=alone.narrow(1 / torch.where(some, slope, 1.0), numerics))
        return _derivatives.sloped(alone, pace, torch.where(some, alone.widen(pace.largest), 0.0))
    at_zero = (pace.status == AT_ZERO) & (slope > 0)
    unit = pace.m / torch.where(top > 0, top, 1.0)
    norm = torch.where(at_zero, slope * unit, 1.0) ** (1 / p)
    limit = torch.where(at_zero, unit / norm, alone.widen(pace.rate))
    return _derivatives.sloped(
        alone, pace._replace(rate=alone.narrow(limit, numerics)), torch.where(at_zero, 1 / limit, slope)
    )
