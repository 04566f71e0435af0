"""Numba on the CPU: how the compiled kernels are launched, over threads where that pays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from clipaware._kernels import threads
from clipaware._kernels.backward import pull_rows
from clipaware._kernels.careful import careful_sweep, solve_flagged_rows
from clipaware._kernels.fast import MODES, LongRow, Rules, solve_row, solve_rows
from clipaware._kernels.formats import BFLOAT16, DOUBLE_FORMAT, FLOAT16, GIVE, SINGLE_FORMAT, TAKE, conversion
from clipaware._kernels.grid import (
    count_by_table,
    count_steps,
    find_changes,
    find_room,
    make_steps,
    sum_by_key,
    sum_sizes,
    write_steps,
)
from clipaware._kernels.loops import FRAME, ORDERS, order_of
from clipaware._kernels.parts import look_at_rows, measure_rows, move_rows, tally_rows
from clipaware._kernels.sweeps import CORNER, FIRST_SAMPLE, SAMPLE, sweep_for
from clipaware._problem import Problem

Array = Any

GROUP = 2**20  # elements converted at a time, of arrays that compiled code does not take as they are
FORMATS = {np.dtype(np.float64): DOUBLE_FORMAT, np.dtype(np.float32): SINGLE_FORMAT, np.dtype(np.float16): FLOAT16}
LONG = 2**18  # rows from this length on are swept by several threads
LARGE = 2**17  # elements that are worth a thread; batches of twice as many are split
TABLE = 2**16  # powers that a table of them may have
PIECE = 2**19  # elements that a thread takes at a time, unless there are fewer; between two, Ctrl-C is heard
HUGE = 2**22  # rows from this length on are swept in parts by one thread, too
BYTES = np.dtype(np.uint8)


def launch(kernel: Any, *arguments: Any) -> Any:
    """Call a kernel. At its first call it is compiled and written to the cache, and a full disk does not matter."""
    try:
        return kernel(*arguments)
    except OSError:
        return kernel(*arguments)


def launch_rows(kernel: Any, arrays: tuple[Any, ...], piece: tuple[int, int]) -> None:
    """Launch a kernel on one block of rows, from the first to before the last number of `piece`."""
    launch(kernel, *arrays, *piece)


def split(rows: int, n: int) -> list[tuple[int, int]]:
    """Blocks of rows: one, if they are not worth a thread, or enough of them to even out what threads get done."""
    workers = min(threads.count(), rows * n // LARGE)  # each with enough to do to be worth waking
    pieces = min(rows, max(workers, rows * n // PIECE, 1))
    return [(rows * k // pieces, rows * (k + 1) // pieces) for k in range(pieces)]


def takes_as_is(a: Array, dtype: Any) -> bool:
    """Whether compiled code takes this array as it is: in C order, writable, aligned, of that dtype.

    What is read only is another type to Numba, and would be compiled for once more.
    """
    return bool(a.flags.carray and a.dtype == dtype)


def taken(a: Array, dtype: Any) -> Array:
    """The array, or a copy that compiled code takes."""
    return a if takes_as_is(a, dtype) else np.array(a, dtype, order="C")


def taken_bounds(lower: Array, upper: Array, n: int, dtype: Any) -> tuple[Array, Array]:
    """Both one number per row, or both one per element."""
    if lower.shape[1] == upper.shape[1] == 1:
        return taken(lower, dtype), taken(upper, dtype)
    return taken(np.broadcast_to(lower, (len(lower), n)), dtype), taken(np.broadcast_to(upper, (len(upper), n)), dtype)


def groups(rows: int, n: int) -> Iterator[slice]:
    """Rows that are converted together."""
    height = max(1, GROUP // n)
    return (slice(start, start + height) for start in range(0, rows, height))


def rows_of(a: Array, part: slice, rows: int) -> Array:
    """What belongs to some of the rows, of something that has one per row or one for all."""
    return a if len(a) == 1 < rows else a[part]


# --- the two lanes ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def rules_for(p: float, mode: str, write: bool, certify: bool, dtype: Any, to: str | None = None) -> Rules:
    """The rules for arrays of a dtype, of which v is rounded `to` another one if that is named."""
    stored = FORMATS.get(dtype, BFLOAT16)
    rounded = BFLOAT16 if to == "bfloat16" else stored
    return Rules(p, MODES[mode], write, certify or mode != "equal", rounded, stored, stored != DOUBLE_FORMAT)


@lru_cache(maxsize=256)
def _as_numbers(rules: Rules) -> Array:
    return np.array(rules, np.float64)


def solve(
    problem: Problem, mode: str, write: bool, certify: bool = True, dtype: str | None = None
) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status. Where status is negative, a row is not ordinary: v and eta mean nothing.

    Without `certify`, v is right but eta need not be. `dtype` is what v is rounded to, if that is not x's own.
    """
    x = problem.x
    rules = rules_for(problem.p, mode, write, certify, x.dtype, dtype)
    found = np.empty(x.shape, x.dtype) if write else None, np.empty((len(x), 1)), np.empty((len(x), 1), np.int64)
    if takes_as_is(x, x.dtype) and takes_as_is(problem.delta, x.dtype):
        _solve(problem, found, rules)
        return found
    for part in groups(*x.shape):
        some, found_there = _rows_taken(problem, found, part)
        _solve(some, found_there, rules)
    return found


def solve_flagged(problem: Problem, mode: str, found: tuple[Array, Array, Array], dtype: str | None = None) -> None:
    """Solve the rows that are flagged in `found` by the careful lane, in place. Rows that make no sense become NaN."""
    v, eta, status = found
    rules = rules_for(problem.p, mode, v is not None, True, problem.x.dtype, dtype)._replace(single=False)
    for part in groups(*problem.x.shape):
        if (status[part] < 0).any():
            some, found_there = _rows_taken(problem, found, part)
            arrays = _as_bytes(_arrays_for_kernel(some, found_there, np.dtype(np.float64)))
            given = careful_sweep().address, *arrays, _as_numbers(rules)
            _run(partial(launch_rows, solve_flagged_rows, given), *some.x.shape)
    if v is not None:
        v[np.isnan(eta[:, 0])] = math.nan


def _rows_taken(problem: Problem, found: tuple[Any, ...], part: slice) -> tuple[Problem, tuple[Any, ...]]:
    """Some rows of a problem, as compiled code takes them, and the places for what is found."""
    some = problem.mapped(partial(rows_of, part=part, rows=len(problem.x)))
    dtype = some.x.dtype
    some = some._replace(x=taken(some.x, dtype), delta=taken(some.delta, dtype))
    return some, tuple(None if a is None else a[part] for a in found)


def _arrays_for_kernel(problem: Problem, found: tuple[Any, ...], working: Any) -> tuple[Array, ...]:
    """A problem whose x and delta compiled code takes as they are, with bounds in the dtype that is computed in."""
    x, delta, eps, lower, upper = problem.arrays()
    v, eta, status = found
    bounds = taken_bounds(lower, upper, x.shape[1], working)
    return x, delta, *bounds, taken(eps, np.float64), x if v is None else v, eta, status


def _solve(problem: Problem, found: tuple[Any, ...], rules: Rules) -> None:
    """The fast lane, over as many threads as pay."""
    rows, n = problem.x.shape
    working = np.dtype(np.float32 if rules.single else np.float64)
    arrays = _arrays_for_kernel(problem, found, working)
    sweep = sweep_for(working, rules.p, arrays[2].shape[1] > 1, rules.rounded if rules.write else SINGLE_FORMAT)
    convert = conversion() if rules.stored < SINGLE_FORMAT else None
    if n >= HUGE or (n >= LONG and threads.count() > 1 and rows < 2 * threads.count()):
        _solve_long(sweep, convert, arrays, rules)
        return
    given = sweep.address, 0 if convert is None else convert.address, *_as_bytes(arrays), _as_numbers(rules)
    _run(partial(launch_rows, solve_rows, given), rows, n)


def _run(work: Callable[[tuple[int, int]], None], rows: int, n: int) -> None:
    """Do the work, which is given the first of some rows and the one after the last, over as many threads as pay."""
    if rows * n < LARGE:
        work((0, rows))
    elif n >= HUGE:  # so that Ctrl-C is heard
        threads.run_apart(partial(threads.run, work, split(rows, n)))
    else:
        threads.run(work, split(rows, n))


def _as_bytes(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    x, delta, lower, upper, eps, out, eta, status = arrays
    return x.view(BYTES), delta.view(BYTES), lower.view(BYTES), upper.view(BYTES), eps, out.view(BYTES), eta, status


def _solve_long(sweep: Any, convert: Any, arrays: tuple[Array, ...], rules: Rules) -> None:
    """Few long rows: one after the other, each sweep in parts."""
    x, delta, lower, upper, eps, out, eta, status = arrays
    n, copies = x.shape[1], np.empty((0 if convert is None else 3, x.shape[1]), lower.dtype)
    with np.errstate(all="ignore"):  # as in compiled code, with NumPy's numbers
        for i in range(len(x)):
            stored = [a[i] for a in (x, delta, out)]
            row = [*(stored if convert is None else copies), *(a[i if len(a) > 1 else 0] for a in (lower, upper))]
            frames = _frames_of_parts(row, stored, rules)
            if convert is not None:
                _sweep_in_parts(convert, frames, rules, TAKE, 0.0)
            swept = LongRow(partial(_sweep_in_parts, sweep, frames, rules), n)
            found = solve_row(swept, eps[i if len(eps) > 1 else 0, 0], rules)  # type: ignore[no-untyped-call]
            status[i, 0], eta[i, 0] = found
            if convert is not None and rules.write and status[i, 0] >= 0:
                _sweep_in_parts(convert, frames, rules, GIVE, 0.0)


def _frames_of_parts(row: list[Array], stored: list[Array], rules: Rules) -> Array:
    """A frame for each part of a row, and one for all of it. The parts do not depend on the number of threads."""
    n = row[0].size
    edges = [*range(0, n, LONG), n]
    frames = np.zeros(len(edges), FRAME)
    names = "x", "delta", "out", "lower", "upper", "stored_x", "stored_delta", "stored_out"
    for frame, (start, stop) in zip(frames, [*pairwise(edges), (0, n)], strict=True):
        for name, a in zip(names, (*row, *stored), strict=True):
            frame[name] = a.ctypes.data + (start * a.itemsize if a.size > 1 else 0)
        frame["n"], frame["p"] = stop - start, rules.p
        frame["stored"], frame["write"] = rules.stored, rules.write
    return frames


def _sweep_in_parts(sweep: Any, frames: Array, rules: Rules, what: int, K: float) -> tuple[float, float, float]:
    """What a sweep over a row finds, or a conversion does."""
    kind = sweep.ctypes.argtypes[2]

    def go_over(k: int) -> None:
        launch(sweep.ctypes, what, K, ctypes.cast(frames[k:].ctypes.data, kind))

    if what in (SAMPLE, FIRST_SAMPLE):
        go_over(len(frames) - 1)
        found = frames[-1:]
    else:
        threads.run(go_over, range(len(frames) - 1))
        found = frames[:-1]
    one, two = (found[name].max() if rules.p == math.inf else found[name].sum() for name in ("one", "two"))
    return one, two, found["three"].max() if what == CORNER or rules.p == math.inf else found["three"].sum()


def reach(problem: Problem) -> tuple[Array, Array]:
    """The reach, and the status: FLAGGED if values are not as they should be, or powers come near the ends of range."""
    _, found, status = solve(problem._replace(eps=np.ones((1, 1))), "reach", write=False)
    return found, status


# --- the gradients ----------------------------------------------------------------------------------------------------


def vjp(
    problem: Problem, eta: Array, status: Array, g: Array, h: Array | None, needs: tuple[bool, bool, bool]
) -> tuple[Array, ...]:
    """Gradients of x, delta and the bound ahead of each element, the sums of that over a row for each bound, and the
    gradient of eps. None for what is not needed; of the bounds one of the two, sums if each is a number per row."""
    x, delta, eps, lower, upper = problem.arrays()
    rows, n = x.shape
    working = np.float64 if x.dtype == np.float64 else np.float32
    in_sum = lower.shape[1] == upper.shape[1] == 1
    wanted = needs[0], needs[1], needs[2] and not in_sum
    # Bounds' are summed, which in 16 bits could be infinity less infinity.
    kinds = x.dtype, x.dtype, working
    bars: list[Array] = [np.empty((rows, n), k) if want else None for k, want in zip(kinds, wanted, strict=True)]
    bound_sums, eps_bar = np.empty((rows if needs[2] and in_sum else 0, 2)), np.empty((rows, 1))
    if g.strides[0] == 0:
        g = g[:1]  # one row for all samples, as of a sum's gradient: the kernel takes it as such
    if len(g) == 1 or g.shape[1] != n:
        g = taken(np.broadcast_to(g, (len(g), n)), working)
    h = np.empty((0, 1)) if h is None else h
    direct = all(takes_as_is(a, working) for a in (x, delta, g))
    for part in [slice(0, rows)] if direct else groups(rows, n):
        bounds = taken_bounds(rows_of(lower, part, rows), rows_of(upper, part, rows), n, working)
        if in_sum:
            bounds = bounds[0][:, 0].copy(), bounds[1][:, 0].copy()  # as numbers, to compiled code
        given = *(taken(rows_of(a, part, rows), working) for a in (x, delta)), *bounds
        height = len(given[0])
        numbers = taken(rows_of(eps, part, rows), np.float64), taken(eta[part], np.float64)
        per_row = *numbers, taken(status[part], np.int64)
        cotangents = taken(rows_of(g, part, rows), working), taken(h[part], np.float64)
        mine = [
            bar if direct and want else np.empty((height if want else 0, n), working)
            for bar, want in zip(bars, wanted, strict=True)
        ]
        found = tuple(mine), bound_sums[part], eps_bar[part]
        arrays = given, per_row, cotangents, *found, problem.p, order_of(problem.p)
        _run(partial(launch_rows, pull_rows, arrays), height, n)
        if not direct:
            with np.errstate(over="ignore"):  # in float16
                for bar, of_part in zip(bars, mine, strict=True):
                    if bar is not None:
                        bar[part] = of_part
    return *bars, bound_sums if bound_sums.size else None, eps_bar


# --- the grid of files, and rows in parts -----------------------------------------------------------------------------


def over_parts(work: Callable[[int, int], Any], n: int) -> list[Any]:
    """What `work` returns for each part of a row: always the same parts, so that sums do not depend on the threads."""
    edges = [*range(0, n, LONG), n]
    found: list[Any] = [None] * (len(edges) - 1)

    def piece(k: int) -> None:
        found[k] = work(edges[k], edges[k + 1])

    threads.run(piece, range(len(found)))
    return found


def table_of_powers(room: Array, unit: Any, p: float) -> Array | None:
    """(unit*m)^p for all m there can be, where that is less work than the power of every element."""
    if p in ORDERS or not isinstance(unit, float) or (most := int(room.max())) >= min(TABLE, room.size):
        return None
    with np.errstate(over="ignore", under="ignore"):
        return (unit * np.arange(most + 1.0)) ** p


def count(delta: Array, room: Array, unit: Any, p: float, eta: float, powers: Array | None) -> tuple[float, float]:
    """The sum of (unit*m)^p over a row, or the largest if p is infinite, and the sum of m, the whole steps of each
    element on a grid: min(floor(eta*|delta| + 1/2), room). `powers` is their table, if there is one."""
    if powers is not None:
        work = partial(launch, count_by_table, delta, room, eta, powers)
    else:
        work = partial(launch, count_steps, delta, room, unit, eta, p, order_of(p))
    found = over_parts(work, delta.size)
    totals = [total for total, _ in found]
    return max(totals) if p == math.inf else sum(totals), sum(number for _, number in found)


def power_of(delta: Array, unit: Any, scale: float, p: float) -> float:
    """The sum of (unit*scale*|delta|)^p over a row."""
    order = order_of(p)
    return float(sum(over_parts(partial(launch, sum_sizes, delta, unit, scale, p, order), delta.size)))


def gains_by_key(moved: Array, after: Array, unit: Any, p: float, keys: Array, number: int) -> Array:
    """What going on from `moved` to `after` adds to the sum of powers, by the key of the element."""
    sums = np.zeros(number)
    launch(sum_by_key, moved, after, unit, p, order_of(p), keys, sums)
    return sums


def make(delta: Array, room: Array, eta: float, out: Array) -> None:
    """Write to `out` the whole grid steps of each element: min(floor(eta*|delta| + 1/2), room)."""
    over_parts(partial(launch, make_steps, delta, room, eta, out), delta.size)


def changes(delta: Array, room: Array, lo: float, hi: float, most: int) -> Array:
    """The elements that make steps between two eta, of which there are at most so many."""
    found = np.empty(most, np.int64)
    return found[: launch(find_changes, delta, room, lo, hi, found)]


def room_on_grid(x: Array, delta: Array, lower: Any, step: Any, tolerance: Any, last: int, room: Array) -> int:
    """Fill `room` with the steps that each element has ahead, and return how many do not lie on the grid."""
    grid = lower, step, tolerance, float(last)
    return int(sum(over_parts(partial(launch, find_room, x, delta, *grid, room), x.size)))


def write_on_grid(
    x: Array, delta: Array, lower: Any, step: Any, span: Any, last: int, moved: Array, out: Array
) -> None:
    """Write to `out` where the elements of x are after that many steps."""
    over_parts(partial(launch, write_steps, x, delta, lower, step, span, float(last), moved, out), x.size)


def look_ahead(x: Array, delta: Array, lower: Array, upper: Array, eps: Array, enough: float, p: float) -> Array:
    """A Look of ``clipaware._rounds`` at a tile. On one thread: its caller has others."""
    arrays = _tile(x, delta, lower, upper)
    found = np.zeros((len(x), 11))
    found[:, 5] = math.inf
    inv = taken(np.broadcast_to(1 / eps, (len(x), 1))[:, 0], np.float64)
    launch(look_at_rows, *arrays, inv, enough, p, order_of(p), found)
    return found


def tally(x: Array, delta: Array, lower: Array, upper: Array, per_row: list[Array], p: float, found: Array) -> None:
    """Add the breakpoints of a tile to their bins, as ``clipaware._rounds`` has it. On one thread, too."""
    done, eps, first, shift, edges = (taken(a, a.dtype) for a in per_row)
    numbers = done[:, 0], 1 / eps[:, 0], first[:, 0], shift[:, 0], edges
    launch(tally_rows, *_tile(x, delta, lower, upper), *numbers, p, order_of(p), found)


def move(x: Array, delta: Array, lower: Array, upper: Array, K: Array, dm: Array) -> Array:
    """clip(x + K*(delta*dm)) of a tile, with x clipped before: rounded to x's dtype, and wider if that is half."""
    arrays = _tile(x, delta, lower, upper)
    out = np.empty(x.shape, arrays[0].dtype)
    numbers = (taken(np.broadcast_to(a, (len(x), 1))[:, 0], out.dtype) for a in (K, dm))
    launch(move_rows, *arrays, *numbers, FORMATS.get(x.dtype, BFLOAT16), out)
    return out


def measure_moves(
    x: Array, delta: Array, lower: Array, upper: Array, inv: Array, K: Array, dm: Array, p: float
) -> Array:
    """Sums of the powers of what `move` moves, times `inv`, for each K of a row, or the largest."""
    arrays = _tile(x, delta, lower, upper)
    found = np.zeros((len(x), K.shape[1]))
    numbers = taken(np.broadcast_to(inv, found.shape), np.float64), taken(K, arrays[0].dtype)
    along = *numbers, taken(np.broadcast_to(dm, (len(x), 1))[:, 0], arrays[0].dtype)
    order = order_of(p)
    launch(measure_rows, *arrays, *along, FORMATS.get(x.dtype, BFLOAT16), p, order, found)
    return found


def _tile(x: Array, delta: Array, lower: Array, upper: Array) -> tuple[Array, ...]:
    working: Any = np.float64 if x.dtype == np.float64 else np.float32
    low, high = taken_bounds(lower, upper, x.shape[1], working)
    if low.shape[1] == 1:
        low, high = low[:, 0].copy(), high[:, 0].copy()  # as numbers, to compiled code
    return taken(x, working), taken(delta, working), low, high
