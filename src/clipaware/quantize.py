"""Exact on the grid of a file format: perturbations that keep their norm when they are saved with 8, 16 or 24 bits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clipaware import _check
from clipaware._api import _call_of
from clipaware._backends import numpy as host
from clipaware._dispatch import public
from clipaware._kernels import threads

Array = Any
ArrayT = TypeVar("ArrayT")

MOST_LEVELS = 2**32
TILE = 2**15  # elements that are converted at a time, so that what is made of them stays in the cache
FEW = 2**12  # steps that are looked at one by one
KEYS = 2**16
LONG = 2**22  # elements of a sample from which on Ctrl-C is heard while its steps are counted
SECANTS = 10  # passes after which a search no longer goes by them
LAST = float(np.finfo(np.float64).max)
ULP = float(np.finfo(np.float64).eps)


@public
def perturb_quantized(
    x: ArrayT,
    delta: ArrayT,
    eps: Any,
    *,
    levels: int = 256,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
    seed: int = 0,
) -> ArrayT:
    """Return ``v = Q(clip(x + eta*delta, *bounds))`` on a grid of `levels`, with ``||v - x||_p`` as near eps as can be.

    The grid goes from the lower bound to the upper in ``levels - 1`` equal steps, and x lies on it, as what was read
    from a file does. Along delta each element moves by whole steps, ``m = min(floor(eta*|delta|/step + 1/2), room)``,
    so the norm grows with eta in jumps; the result has the norm that is nearest to eps. Where several elements jump at
    the same eta (sign noise), they do so one after another, in a random order that `seed` decides.

    Parameters
    ----------
    x
        Samples on the grid: a floating array of any supported framework.
    levels
        How many values an element can have: 256 for 8 bits, 65536 for 16, ``2**24`` for 24; ``2**32`` at most. x's
        dtype must be fine enough to tell them apart.
    mode
        ``"equal"``: the nearest norm, of two that are equally near the smaller. ``"at_most"``: never above eps, and
        ``Q(clip(x + delta))`` where that is small enough. ``"at_least"``: never below, and that where it is large
        enough. Norms are counted in steps, so that ``eps=8/255`` is 8 of them.
    seed
        Of the order in which elements move that would move at the same time. A sample of a batch gets what it would
        get alone.
    delta, eps, p, bounds, axis, unreachable
        As for :func:`clipaware.perturb`; both bounds finite.

    Returns
    -------
    array
        Like x; where nothing moved, x itself. It is computed on the host, in float64, for every framework, and carries
        no gradients. In a trace (``torch.compile``, ``jax.jit``, ``tf.function``) there is nothing to compute with: a
        ValueError.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> rng = np.random.default_rng(0)
    >>> x = rng.integers(0, 256, (224, 224, 3)) / 255
    >>> v = ca.perturb_quantized(x, rng.standard_normal(x.shape), 3.0, axis=None)
    >>> saved = np.rint(v * 255).astype(np.uint8)
    >>> float(np.linalg.norm(saved / 255 - x).round(6))
    3.000008
    """
    be = _check.array(x, "x")
    if be.is_traced(x):
        raise ValueError(
            "x has no values yet, expected an array outside of torch.compile, jax.jit, tf.function and the like: "
            "perturb_quantized counts steps on the host"
        )
    _check.option(mode, _check.MODES, "mode")
    _check.option(unreachable, _check.UNREACHABLE, "unreachable")
    check_levels(levels)
    _check.seed(seed)
    call = _call_of(x, delta, eps, p, bounds, axis, flat=True)
    problem = call.problem
    rows = [np.asarray(be.fetch(be.result(a, x))) for a in (problem.x, problem.delta)]
    limits: list[Array] = [
        # A number as it came, and not as x's dtype has it.
        np.array([[float(bound)]]) if _check.is_number(bound) else np.asarray(be.fetch(be.result(found, x)), np.float64)
        for bound, found in zip(_check.bounds_pair(bounds), (problem.lower, problem.upper), strict=True)
    ]
    sizes = np.array([[float(eps)]]) if _check.is_number(eps) else np.asarray(be.fetch(problem.eps), np.float64)
    asked = np.broadcast_to(sizes, (len(rows[0]), 1))
    slack = 8 * spacing("float64" if _check.is_number(eps) else _check.array(eps, "eps").dtype_name(eps))
    grid = _Grid(limits[0], limits[1], levels, be.dtype_name(x))

    v, missed = np.empty_like(rows[0]), []
    for i, (here, towards) in enumerate(zip(*rows, strict=True)):
        work = partial(_row, grid, i, here, towards, float(asked[i, 0]), problem.p, mode, seed, slack, v[i])
        found = threads.run_apart(work) if here.size >= LONG else work()
        if not found.reachable:
            missed.append((i, found.reach))
            v[i] = math.nan if unreachable == "nan" else v[i]
    if missed and unreachable == "raise":
        which, most = np.array([i for i, _ in missed]), np.array([reach for _, reach in missed])
        raise _check.UnreachableError(which, most, asked[which, 0])
    return call.unrows(be.returned(v, x))  # type: ignore[no-any-return]


def check_levels(levels: Any) -> None:
    if isinstance(levels, bool) or not isinstance(levels, numbers.Integral):
        raise TypeError(f"levels is {levels!r}, expected a whole number, such as 256")
    if not 2 <= int(levels) <= MOST_LEVELS:
        raise ValueError(f"levels is {levels}, expected a whole number from 2 to 2**32")


def spacing(dtype: str) -> float:
    """At 1, in that dtype; integers are exact."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}.get(dtype, ULP)


# --- from floating numbers to the grid and back -----------------------------------------------------------------------


class _Grid:
    """What bounds and levels make of an element: its place on the grid, and the size of a step there."""

    def __init__(self, lower: Array, upper: Array, levels: int, dtype: str) -> None:
        if not (np.isfinite(lower).all() and np.isfinite(upper).all()):
            raise ValueError("bounds are not all finite, expected two numbers: a grid has a first and a last level")
        if (lower > upper).any():
            _check.values([np.zeros((1, 1)), np.zeros((1, 1)), lower, upper], ULP)
        self.lower, self.upper, self.last = lower, upper, int(levels) - 1
        self.step = (upper - lower) / self.last
        scale = np.maximum(abs(lower), abs(upper)) + 0 * self.step
        # Between two powers of two, numbers are half as far apart as at the upper one, and rounding moves by half that.
        if (scale * spacing(dtype) / 4 > self.step / 4)[self.step > 0].any():
            raise ValueError(
                f"x has dtype {dtype}, which cannot tell {levels} levels between these bounds apart; use a wider one"
            )
        self.tolerance = np.minimum(16 * spacing(dtype) * scale, self.step / 4)

    def row(self, i: int) -> list[Array]:
        """Lower bound, upper bound, step and tolerance of a row: one number each, or one per element."""
        return [a[i if len(a) > 1 else 0] for a in (self.lower, self.upper, self.step, self.tolerance)]


def _row(
    grid: _Grid, i: int, x: Array, delta: Array, eps: float, p: float, mode: str, seed: Any, slack: float, out: Array
) -> Steps:
    """Solve a sample and write it to `out`."""
    here = grid.row(i)
    lower, upper, step, _ = here
    each = float(step[0])
    room = _rooms(grid, i, x, delta, *here)
    along, unit = delta, 1.0  # type: tuple[Array, Any]
    if step.size == 1 and each > 0:
        # Sizes are counted in steps, which keeps sums of squares exact.
        size, one = eps / each, 1 / each
    else:
        size, one, unit = eps, 1.0, np.broadcast_to(step, x.shape).copy()
        room[unit == 0] = 0
        along = np.divide(delta, unit, out=np.zeros(x.size), where=unit > 0)
    top = _top(along)
    if not 1e-100 < top < 1e100 and top > 0:
        # Or no eta might be a number, or only a subnormal one.
        shift = -math.frexp(top)[1]
        along, one = np.ldexp(along.astype(np.float64), shift), math.ldexp(one, max(-1000, min(-shift, 1000)))
    moved = host.scratch("moved", room, room.dtype)
    found = steps(along, room, size, p=p, mode=mode, seed=seed, one=one, unit=unit, slack=slack, out=moved)
    compiled = host.kernels()
    if compiled is not None:
        compiled.write_on_grid(x, delta, *_one_or_all(lower, step, upper - lower), grid.last, found.moved, out)
    else:
        places = _places(grid, x, lower, step)[1] + np.copysign(found.moved.astype(np.float64), delta)
        np.copyto(out, np.where(found.moved == 0, x, places * (upper - lower) / grid.last + lower), casting="same_kind")
    return found._replace(reach=found.reach * (each if isinstance(unit, float) else 1.0))


def on_levels(place: Array, delta: Array, size: float, ends: tuple[int, int], p: float, seed: Any, out: Array) -> Steps:
    """A sample of whole numbers between two of them, perturbed by a size that counts steps of 1, into `out`."""
    lower, upper = (np.array([[float(end)]]) for end in ends)
    grid = _Grid(lower, upper, ends[1] - ends[0] + 1, place.dtype.name)
    return _row(grid, 0, place, delta, size, p, "equal", seed, 8 * ULP, out)


def _one_or_all(*arrays: Array) -> list[Any]:
    """For compiled code: all of them numbers, or one per element each, and nowhere a step of 0."""
    n = max(a.size for a in arrays)
    if n == 1:
        return [float(a[0]) or 1.0 if k == 1 else float(a[0]) for k, a in enumerate(arrays)]
    full = [np.broadcast_to(a, n).copy() for a in arrays]
    full[1][full[1] == 0] = 1.0
    return full


def _places(grid: _Grid, x: Array, lower: Array, step: Array) -> tuple[Array, Array]:
    """Where elements lie, in steps from the lower bound, and the level there."""
    exact = (x.astype(np.float64) - lower) / np.where(step > 0, step, 1)
    return exact, np.clip(np.rint(exact), 0, grid.last)


def _rooms(
    grid: _Grid, i: int, x: Array, delta: Array, lower: Array, upper: Array, step: Array, tolerance: Array
) -> Array:
    """The steps that each element has ahead; in float32 where that has all the whole numbers needed."""
    room = host.scratch("room", x, np.float32 if grid.last <= 2**24 else np.float64)
    compiled = host.kernels()
    if compiled is not None and not compiled.room_on_grid(
        x, delta, *_one_or_all(lower, step, tolerance), grid.last, room
    ):
        return room
    exact, place = _places(grid, x, lower, step)
    fine = abs(exact - place) * step <= tolerance  # what is not a number is not
    if not (fine.all() and np.isfinite(delta).all()):
        _check.values([np.atleast_2d(np.asarray(a, np.float64)) for a in (x, delta, lower, upper)], 1e-6)
        worst = int(np.argmax(np.where(fine, -1, abs(exact - place))))
        raise ValueError(
            f"x has {int((~fine).sum())} element(s) that are not on the grid of {grid.last + 1} levels, the worst in "
            f"sample {i}: {float(x[worst])} is {abs(exact - place)[worst]:.2g} steps off; round it first, such as by "
            f"lower + (upper - lower) * round((x - lower) / (upper - lower) * {grid.last}) / {grid.last}"
        )
    room[:] = np.where(delta > 0, grid.last - place, np.where(delta < 0, place, 0))
    return room


def _top(a: Array) -> float:
    """The largest |a|."""
    return max(float(a.max(initial=0)), -float(a.min(initial=0)))


# --- along the grid ---------------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """How far each element of a sample goes, in whole steps, and what that comes to, in the units of the size."""

    moved: Array
    eta: float  # the scale of delta at which the last of them moved
    norm: float
    naive: float  # the norm after scaling delta to the size, clipping and rounding
    reach: float
    reachable: bool


def steps(
    delta: Array,
    room: Array,
    size: float,
    *,
    p: float = 2,
    mode: str = "equal",
    seed: Any = 0,
    one: float = 1.0,
    unit: Any = 1.0,
    slack: float = 8 * ULP,
    out: Array | None = None,
) -> Steps:
    """Go along delta, step by step, until the norm is as near `size` as it gets.

    An element's steps are ``m(eta) = min(floor(eta*|delta| + 1/2), room)``, the norm is that of ``unit*m``. As computed
    in float64, too, m never decreases with eta, so each step has its turn: the least eta at which it is made. A bracket
    around the size is narrowed until few steps have their turn in it, or all of them the same, and these are sorted.

    Parameters
    ----------
    delta, room
        Of one sample, in one dimension. The room is a whole number, and 0 where delta is.
    size
        The norm asked for.
    p, mode, seed
        As for :func:`perturb_quantized`; the seed may be whatever NumPy's generators take.
    one
        The eta of the perturbation as it came, for the modes.
    unit
        The weight of a step: a number, or one per element.
    slack
        Eight times the spacing of the size's dtype at 1: that much above the reach still counts as reachable.
    out
        Where the steps of each element may be written to: an array like `room`.

    Returns
    -------
    Steps
    """
    path = _Path(delta, room, unit, p)
    end = path.point(LAST)
    # The largest norm is a whole number of steps, which a size may have been rounded from.
    fine = slack / 16 if p == math.inf else 8 * ULP
    if not 1e-270 < end.power < 1e270 and p < math.inf and end.number:
        # Powers of these numbers are none any more: count in other units.
        largest = float(np.max(unit * room))
        found = steps(delta, room, size / largest, p=p, mode=mode, seed=seed, one=one, unit=unit / largest, slack=slack)
        return found._replace(**{name: getattr(found, name) * largest for name in ("norm", "naive", "reach")})

    reach, norm = path.root(end.power), path.norm_of_delta()
    naive = path.point(size / norm if norm > 0 else 0.0)

    def done(moved: Array, eta: float, power: float, reachable: bool = True) -> Steps:
        return Steps(moved, eta, path.root(power), path.root(naive.power), reach, reachable)

    if size == 0 or not end.number:
        return done(np.zeros_like(room), 0.0, 0.0, size == 0 or mode == "at_most")
    if mode != "equal":
        came = path.point(one)
        norm = path.root(came.power)
        if norm <= size * (1 + fine) if mode == "at_most" else norm >= size * (1 - fine):
            return done(path.at(one), one, came.power)
    if size >= reach:
        moves = room > 0
        with np.errstate(over="ignore"):
            last = np.max((room[moves] - 0.5) / abs(delta[moves]).astype(np.float64))
        return done(room.copy(), float(last), end.power, size <= reach * (1 + slack))

    straight = None
    if p == math.inf:
        # Many an eta has that norm. Then rather the one without the grid, if it does.
        wide = (unit * room >= size) & (room > 0)
        straight = path.point(size / float(np.max(np.where(wide, abs(delta) * unit, 0))))
        if mode == "equal" and isinstance(unit, float) and abs(straight.power - size) < unit / 2:
            # Norms are whole numbers of steps, and no other is as near.
            return done(path.at(straight.eta, out), straight.eta, straight.power)
    limit = path.raised(size * (1 + {"at_most": fine, "at_least": -fine}.get(mode, 0.0)))
    lo, hi = _bracket(path, _Point(0.0, 0.0, 0.0), end, naive, limit)
    moved = path.at(lo.eta, out)
    found = done(moved, *_last_steps(path, moved, lo, hi, limit, size, mode, seed))
    if straight is not None and straight.power == found.norm:
        return done(path.at(straight.eta), straight.eta, straight.power)
    return found


class _Point(NamedTuple):
    """Where the path is at an eta: the sum of powers (p = inf: the largest), and how many steps have been made."""

    eta: float
    power: float
    number: float


class _Path:
    """A sample's way along the grid."""

    def __init__(self, delta: Array, room: Array, unit: Any, p: float) -> None:
        self.compiled = host.kernels() if delta.size else None
        if self.compiled is not None:
            delta, room = (self.compiled.taken(a, a.dtype) for a in (delta, room))
        self.delta, self.room, self.unit, self.p = delta, room, unit, p
        self.powers = None if self.compiled is None else self.compiled.table_of_powers(room, unit, p)

    def point(self, eta: float) -> _Point:
        if self.compiled is not None:
            return _Point(eta, *self.compiled.count(self.delta, self.room, self.unit, self.p, eta, self.powers))
        power, number = 0.0, 0.0
        for part in self._tiles():
            moved = self.steps(eta, part)
            power, number = self._with(power, moved, part), number + float(moved.sum())
        return _Point(eta, power, number)

    def at(self, eta: float, out: Array | None = None) -> Array:
        """The steps of each element."""
        moved = np.empty_like(self.room) if out is None else out
        if self.compiled is not None:
            self.compiled.make(self.delta, self.room, eta, moved)
            return moved
        for part in self._tiles():
            moved[part] = self.steps(eta, part)
        return moved

    def changes(self, lo: _Point, hi: _Point) -> Array:
        """The elements that make the few steps between two points."""
        if self.compiled is not None:
            return self.compiled.changes(self.delta, self.room, lo.eta, hi.eta, FEW)
        return np.flatnonzero(self.at(hi.eta) > self.at(lo.eta))

    def _tiles(self) -> Iterator[slice]:
        return (slice(start, start + TILE) for start in range(0, self.delta.size, TILE))

    def steps(self, eta: float, part: Any) -> Array:
        """Those of some elements, in float64."""
        with np.errstate(over="ignore", under="ignore"):
            return np.minimum(np.floor(eta * abs(self.delta[part]).astype(np.float64) + 0.5), self.room[part])

    def _with(self, power: float, some: Array, part: slice) -> float:
        """That power and those of some more elements, float64."""
        weighted = some * (self.unit if isinstance(self.unit, float) else self.unit[part])
        if self.p == math.inf:
            return max(power, float(weighted.max(initial=0)))
        with np.errstate(over="ignore", under="ignore"):
            return power + float(np.sum(weighted * weighted if self.p == 2 else weighted**self.p))

    def first(self) -> float:
        """Where the first element moves, or before."""
        return 0.5 / _top(self.delta)

    def norm_of_delta(self) -> float:
        """Without the grid; scaled, so that no power overflows."""
        top, power = _top(self.delta), 0.0
        if self.compiled is not None and self.p < math.inf:
            return top * self.root(self.compiled.power_of(self.delta, self.unit, 1 / (top or 1.0), self.p))
        for part in self._tiles():
            power = self._with(power, abs(self.delta[part]).astype(np.float64) / (top or 1.0), part)
        return top * self.root(power)

    def gains_by_key(self, moved: Array, after: Array, keys: Array) -> Array:
        """What going on to `after` adds to the power, by the key of the element."""
        if self.compiled is not None:
            return self.compiled.gains_by_key(moved, after, self.unit, self.p, keys, KEYS)
        wide = (a.astype(np.float64) * self.unit for a in (after, moved))
        return np.bincount(keys, np.subtract(*map(self.raised, wide)), KEYS)

    def raised(self, a: Any) -> Any:
        return a if self.p == math.inf else a**self.p

    def root(self, power: float) -> float:
        return power if self.p == math.inf else power ** (1 / self.p)


def _bracket(path: _Path, lo: _Point, hi: _Point, here: _Point, limit: float) -> tuple[_Point, _Point]:
    """Two points, one with at most that power and one with more, between which there are few steps, or no number.

    By secants of the norm: after two points on one side the next goes twice as far, to come out on the other. Where
    that takes long, since many steps have the same turn, by the turns of some of the elements.
    """
    size, side = path.root(limit), 0
    for passes in count():
        before, side = side, -1 if here.power <= limit else 1
        lo, hi = (here, hi) if side < 0 else (lo, here)
        if hi.number - lo.number <= FEW or _bits(hi.eta) - _bits(lo.eta) <= 1:
            break
        low, high = path.root(lo.power), path.root(hi.power)
        if passes >= SECANTS:
            eta = math.nextafter(hi.eta, 0) if passes % 2 else _middle_turn(path, lo, hi)
        elif hi.eta == LAST:
            eta = max(lo.eta * size / low * (1 + 2.0 ** (passes - 5)) if low > 0 else 2 * lo.eta, path.first())
        else:
            eta = lo.eta + (size - low) / (high - low) * (hi.eta - lo.eta)
            eta += eta - here.eta if before == side else 0
        if not lo.eta < eta < hi.eta or passes > 3 * SECANTS:
            eta = _number((_bits(lo.eta) + _bits(hi.eta)) // 2)
        here = path.point(eta)
    return lo, hi


def _middle_turn(path: _Path, lo: _Point, hi: _Point) -> float:
    """In the middle of the turns between two points, of some of the elements; 0 if those have none."""
    some = slice(None, None, max(1, path.room.size // FEW))
    delta, room = abs(path.delta[some]).astype(np.float64), path.room[some]
    with np.errstate(over="ignore"):
        before, after = (np.minimum(np.floor(eta * delta + 0.5), room) for eta in (lo.eta, hi.eta))
    moves = after > before
    if not moves.any():
        return 0.0
    turns = np.sort(_turns(delta[moves], np.ceil((before + after + 1) / 2)[moves]))
    return float(turns[len(turns) // 2])


def _turns(delta: Array, step: Array) -> Array:
    """The least eta at which ``floor(eta*delta + 1/2)`` is that step or more."""
    with np.errstate(over="ignore"):
        turn = np.minimum((step - 0.5) / delta, LAST) * (1 - 4 * ULP)
        while (early := np.floor(turn * delta + 0.5) < step).any():
            turn[early] = np.nextafter(turn[early], np.inf)
    return turn


def _bits(a: float) -> int:
    """A number that is not negative as an integer, in the same order."""
    return int(np.float64(a).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


def _last_steps(
    path: _Path, moved: Array, lo: _Point, hi: _Point, limit: float, size: float, mode: str, seed: Any
) -> tuple[float, float]:
    """Make those steps between two points that are still to be made, in `moved`. Returns eta and the power then."""
    rng, power = np.random.default_rng(seed), lo.power
    at_once = _bits(hi.eta) - _bits(lo.eta) <= 1
    if hi.number - lo.number <= FEW:
        which = path.changes(lo, hi)
    else:
        after = path.at(hi.eta)
        moving = after > moved
        if path.p < math.inf:
            # In the order of a random key. All of a key that fit are taken together, and sorted is one key alone.
            keys = rng.integers(KEYS, size=moved.size, dtype=np.uint16)
            sums = power + np.cumsum(path.gains_by_key(moved, after, keys))
            key = min(int(np.searchsorted(sums, limit, "right")), KEYS - 1)
            moved += moving & (keys < key)
            power = float(sums[key - 1]) if key else power
            moving &= keys == key
        which = np.flatnonzero(moving)
    step = moved[which].astype(np.float64)
    number = (path.steps(hi.eta, which) - step).astype(np.int64)
    if number.max(initial=1) > 1:
        # An element with several steps stands here as often.
        nth = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        which, step = np.repeat(which, number), np.repeat(step, number) + nth
    unit = path.unit if isinstance(path.unit, float) else path.unit[which]
    gains = path.raised(unit * (step + 1)) - (0 if path.p == math.inf else path.raised(unit * step))
    turns = np.full(len(which), hi.eta) if at_once else _turns(abs(path.delta[which]).astype(np.float64), step + 1)
    order = np.lexsort((rng.permutation(len(which)), turns))
    if path.p == math.inf:
        powers = np.maximum.accumulate(np.append(power, gains[order]))
    else:
        powers = power + np.append(0, gains[order].cumsum())
    # The last that is not above; then one more, if it must be or is nearer.
    last = max(int(np.searchsorted(powers, limit, "right")) - 1, 0)
    below, above = (path.root(float(powers[min(last + k, len(which))])) for k in (0, 1))
    if mode == "at_least" or (mode == "equal" and above - size < size - below):
        last = min(last + 1, len(which))
    np.add.at(moved, which[order[:last]], 1)
    return float(turns[order[last - 1]]) if last else hi.eta if power > lo.power else lo.eta, float(powers[last])
