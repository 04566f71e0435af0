"""Numba on the CPU: how ``compiled.py`` and ``grid.py`` are launched, over threads where that pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np

from clipaware._kernels import threads
from clipaware._kernels.compiled import (
    ANY_ORDER,
    DONE,
    LANE,
    MAXIMA,
    MODES,
    ORDERS,
    REACHED,
    RULES,
    SAMPLE,
    SOLVED,
    STATE,
    advance_row,
    begin_row,
    look_at_rows,
    measure_rows,
    move_rows,
    pull_rows,
    sample_row,
    solve_rows,
    sweep_part,
    tally_rows,
)
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
from clipaware._math import DOUBLE, SINGLE

Array = Any

LOOSE = 2.0**-12  # where Newton may stop if the array is measured as it is written
GROUP = 2**20  # elements converted at a time, of arrays that compiled code does not take as they are
GRIDS = {np.dtype(np.float64): 0, np.dtype(np.float32): 0, np.dtype(np.float16): 1}
BFLOAT16 = 2
LONG = 2**18  # rows from this length on are swept by several threads
LARGE = 2**17  # elements that are worth a thread; batches of twice as many are split
TABLE = 2**16  # powers that a table of them may have
PIECE = 2**19  # elements that a thread takes at a time, unless there are fewer; between two, Ctrl-C is heard
HUGE = 2**22  # rows from this length on are swept in parts by one thread, too


def launch(kernel: Any, *arguments: Any) -> Any:
    """Call a kernel. At its first call it is compiled and written to the cache, and a full disk does not matter."""
    try:
        return kernel(*arguments)
    except OSError:
        return kernel(*arguments)


@lru_cache(maxsize=256)
def rules_for(n: int, p: float, task: int, mode: str, write: bool, grid: int, single: bool, final: bool) -> Array:
    numerics = SINGLE if single else DOUBLE
    # A short step may be followed by a long one, beyond a kink: not where eta decides whether delta is left alone, and
    # not of halves, whose norm does not tell.
    loosely = single and write and mode == "equal" and not grid
    settled = LOOSE * min(1.0, 4 / p) if loosely else numerics.settled
    limits = numerics.ulp, numerics.tiny, settled, numerics.settled, numerics.close, numerics.least
    return np.array([(n, task, MODES[mode], write, grid, single, final, p, *limits)], RULES)


def launch_rows(kernel: Any, arrays: tuple[Any, ...], piece: tuple[int, int]) -> None:
    launch(kernel, *arrays, *piece)


def split(rows: int, n: int) -> list[tuple[int, int]]:
    """Blocks of rows: one, if they are not worth a thread, or enough of them to even out what threads get done."""
    workers = min(threads.count(), rows * n // LARGE)  # each with enough to do to be worth waking
    pieces = min(rows, max(workers, rows * n // PIECE, 1))
    return [(rows * k // pieces, rows * (k + 1) // pieces) for k in range(pieces)]


def is_easy(a: Array, dtype: Any) -> bool:
    """Whether compiled code takes this array as it is: in C order, writable, aligned, of that dtype.

    What is read only is another type to Numba, and would be compiled for once more.
    """
    return bool(a.flags.carray and a.dtype == dtype)


def easy(a: Array, dtype: Any) -> Array:
    return a if is_easy(a, dtype) else np.array(a, dtype, order="C")


def easy_bounds(lower: Array, upper: Array, n: int, dtype: Any) -> tuple[Array, Array]:
    """Both one number per row, or both one per element."""
    if lower.size == upper.size == 1:
        return easy(lower[0], dtype), easy(upper[0], dtype)
    if lower.shape[1] == upper.shape[1] == 1:
        return easy(lower[:, 0], dtype), easy(upper[:, 0], dtype)
    return easy(np.broadcast_to(lower, (len(lower), n)), dtype), easy(np.broadcast_to(upper, (len(upper), n)), dtype)


def groups(rows: int, n: int) -> Iterator[slice]:
    """Rows that are converted together."""
    height = max(1, GROUP // n)
    return (slice(start, start + height) for start in range(0, rows, height))


def some(a: Array, part: slice, rows: int) -> Array:
    """What belongs to some of the rows, of something that has one per row or one for all."""
    return a if len(a) == 1 < rows else a[part]


def solve(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    p: float,
    mode: str = "equal",
    write: bool = False,
    final: bool = False,
    task: int = SOLVED,
    dtype: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """v (None unless `write`), eta, status and passes. Rows of status BAD are not solved; if `final`, they are LOST.

    `dtype` is what v is rounded to, if that is not x's own.
    """
    rows, n = x.shape
    working = np.float64 if x.dtype == np.float64 else np.float32
    grid = BFLOAT16 if dtype == "bfloat16" else GRIDS.get(x.dtype, BFLOAT16)
    rules = rules_for(n, p, task, mode, write, grid, working is np.float32, final)
    if is_easy(x, working) and is_easy(delta, working):
        return _solve_easy(x, delta, easy(eps, np.float64), *easy_bounds(lower, upper, n, working), rules, p, write)
    out = np.empty((rows, n), x.dtype) if write else None
    eta, status, passes = np.empty((rows, 1)), np.empty((rows, 1), np.int64), np.empty(rows, np.int64)
    for part in groups(rows, n):
        low, high = (some(bound, part, rows) for bound in (lower, upper))
        problem = easy(x[part], working), easy(delta[part], working), easy(some(eps, part, rows), np.float64)
        found = _solve_easy(*problem, *easy_bounds(low, high, n, working), rules, p, write)
        v, eta[part], status[part], passes[part] = found
        if out is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # of what happens to be in rows that were not solved
                out[part] = v
    return out, eta, status, passes


def reach(x: Array, delta: Array, lower: Array, upper: Array, p: float, final: bool = False) -> tuple[Array, Array]:
    """The reach and the status, as above."""
    return solve(x, delta, np.ones((1, 1)), lower, upper, p, final=final, task=REACHED)[1:3]


def _solve_easy(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, rules: Array, p: float, write: bool
) -> tuple[Array, Array, Array, Array]:
    rows, n = x.shape
    out = np.empty((rows, n), x.dtype) if write else x
    eta, info = np.empty((rows, 1)), np.empty((2, rows), np.int64)
    arrays = x, delta, lower, upper, eps, out, eta, info, rules, ORDERS.get(p, ANY_ORDER)
    if rows * n < LARGE:
        launch(solve_rows, *arrays, 0, rows)
    elif n >= HUGE or (n >= LONG and rows < 2 * threads.count() > 2):
        _solve_long(*arrays)
    else:
        threads.run(partial(launch_rows, solve_rows, arrays), split(rows, n))
    return out if write else None, eta, info[0].reshape(rows, 1), info[1]


def _solve_long(
    x: Array,
    delta: Array,
    lower: Array,
    upper: Array,
    eps: Array,
    out: Array,
    eta: Array,
    info: Array,
    rules: Array,
    order: Any,
) -> None:
    """Few long rows: one after the other, each sweep in parts."""
    n, states = x.shape[1], np.zeros(2, STATE)
    pieces = max(4 * threads.count(), n // PIECE)
    edges = [n * k // pieces // LANE * LANE for k in range(pieces)] + [n]
    found = np.empty((pieces, 4))
    for i in range(x.shape[0]):

        def work(k: int, i: int = i) -> None:
            ends = edges[k], edges[k + 1]
            found[k] = launch(sweep_part, x, delta, lower, upper, out, i, *ends, states, rules, order)

        launch(begin_row, states, eps[i if len(eps) > 1 else 0, 0], lower, upper, i, rules)
        while (want := states["want"][0]) != DONE:
            if want == SAMPLE:
                launch(sample_row, x, delta, lower, upper, i, states, rules, order)
            else:
                threads.run(work, range(pieces))
                largest = want in MAXIMA or rules["p"][0] == math.inf
                u, w = found[:, :2].max(axis=0) if largest else found[:, :2].sum(axis=0)
                launch(advance_row, states, u, w, *found[:, 2:].max(axis=0), lower, upper, i, rules)
        eta[i, 0], info[0, i], info[1, i] = (states[name][0] for name in ("eta", "status", "count"))


def vjp(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    p: float,
    eta: Array,
    status: Array,
    g: Array,
    h: Array | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Array, ...]:
    """Gradients of x, delta and the bound ahead of each element, the sums of that over a row for each bound, and the
    gradient of eps. None for what is not needed; of the bounds one of the two, sums if each is a number per row."""
    rows, n = x.shape
    working = np.float64 if x.dtype == np.float64 else np.float32
    in_sum = lower.shape[1] == upper.shape[1] == 1
    wanted = needs[0], needs[1], needs[2] and not in_sum
    # Bounds' are summed, which in 16 bits could be infinity less infinity.
    kinds = x.dtype, x.dtype, working
    bars: list[Array] = [np.empty((rows, n), k) if want else None for k, want in zip(kinds, wanted, strict=True)]
    bound_sums, eps_bar = np.empty((rows if needs[2] and in_sum else 0, 2)), np.empty((rows, 1))
    rules = rules_for(n, p, SOLVED, "equal", False, 0, working is np.float32, False)
    if g.strides[0] == 0:
        g = g[:1]  # one row for all samples, as of a sum's gradient: the kernel takes it as such
    if len(g) == 1 or g.shape[1] != n:
        g = easy(np.broadcast_to(g, (len(g), n)), working)
    h = np.empty((0, 1)) if h is None else h
    direct = all(is_easy(a, working) for a in (x, delta, g))
    for part in [slice(0, rows)] if direct else groups(rows, n):
        problem = [easy(some(a, part, rows), working) for a in (x, delta)]
        bounds = easy_bounds(some(lower, part, rows), some(upper, part, rows), n, working)
        per_row = easy(some(eps, part, rows), np.float64), easy(eta[part], np.float64), easy(status[part], np.int64)
        pulled = easy(some(g, part, rows), working), easy(h[part], np.float64)
        height = len(problem[0])
        mine = [
            bar if direct and want else np.empty((height if want else 0, n), working)
            for bar, want in zip(bars, wanted, strict=True)
        ]
        found = tuple(mine), bound_sums[part], eps_bar[part]
        arrays = *problem, *bounds, *per_row, *pulled, *found, rules, ORDERS.get(p, ANY_ORDER)
        work = partial(threads.run, partial(launch_rows, pull_rows, arrays), split(height, n))
        threads.run_apart(work) if n >= HUGE else work()
        if not direct:
            with np.errstate(over="ignore"):  # in float16
                for bar, some_of_it in zip(bars, mine, strict=True):
                    if bar is not None:
                        bar[part] = some_of_it
    return *bars, bound_sums if bound_sums.size else None, eps_bar


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
        work = partial(launch, count_steps, delta, room, unit, eta, p, ORDERS.get(p, ANY_ORDER))
    found = over_parts(work, delta.size)
    totals = [total for total, _ in found]
    return max(totals) if p == math.inf else sum(totals), sum(number for _, number in found)


def power_of(delta: Array, unit: Any, scale: float, p: float) -> float:
    """The sum of (unit*scale*|delta|)^p over a row."""
    order = ORDERS.get(p, ANY_ORDER)
    return float(sum(over_parts(partial(launch, sum_sizes, delta, unit, scale, p, order), delta.size)))


def gains_by_key(moved: Array, after: Array, unit: Any, p: float, keys: Array, number: int) -> Array:
    """What going on from `moved` to `after` adds to the sum of powers, by the key of the element."""
    sums = np.zeros(number)
    launch(sum_by_key, moved, after, unit, p, ORDERS.get(p, ANY_ORDER), keys, sums)
    return sums


def make(delta: Array, room: Array, eta: float, out: Array) -> None:
    """Write m itself to `out`."""
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
    inv = easy(np.broadcast_to(1 / eps, (len(x), 1))[:, 0], np.float64)
    launch(look_at_rows, *arrays, inv, enough, p, ORDERS.get(p, ANY_ORDER), found)
    return found


def tally(x: Array, delta: Array, lower: Array, upper: Array, per_row: list[Array], p: float, found: Array) -> None:
    """Add the breakpoints of a tile to their bins, as ``clipaware._rounds`` has it. On one thread, too."""
    done, eps, first, shift, edges = (easy(a, a.dtype) for a in per_row)
    numbers = done[:, 0], 1 / eps[:, 0], first[:, 0], shift[:, 0], edges
    launch(tally_rows, *_tile(x, delta, lower, upper), *numbers, p, ORDERS.get(p, ANY_ORDER), found)


def move(x: Array, delta: Array, lower: Array, upper: Array, K: Array, dm: Array) -> Array:
    """clip(x + K*(delta*dm)) of a tile, with x clipped before: rounded to x's dtype, and wider if that is half."""
    arrays = _tile(x, delta, lower, upper)
    out = np.empty(x.shape, arrays[0].dtype)
    numbers = (easy(np.broadcast_to(a, (len(x), 1))[:, 0], out.dtype) for a in (K, dm))
    launch(move_rows, *arrays, *numbers, GRIDS.get(x.dtype, BFLOAT16), out)
    return out


def measure_moves(
    x: Array, delta: Array, lower: Array, upper: Array, inv: Array, K: Array, dm: Array, p: float
) -> Array:
    """Sums of the powers of what `move` moves, times `inv`, for each K of a row, or the largest."""
    arrays = _tile(x, delta, lower, upper)
    found = np.zeros((len(x), K.shape[1]))
    numbers = easy(np.broadcast_to(inv, found.shape), np.float64), easy(K, arrays[0].dtype)
    along = *numbers, easy(np.broadcast_to(dm, (len(x), 1))[:, 0], arrays[0].dtype)
    launch(measure_rows, *arrays, *along, GRIDS.get(x.dtype, BFLOAT16), p, ORDERS.get(p, ANY_ORDER), found)
    return found


def _tile(x: Array, delta: Array, lower: Array, upper: Array) -> tuple[Array, ...]:
    working: Any = np.float64 if x.dtype == np.float64 else np.float32
    return easy(x, working), easy(delta, working), *easy_bounds(lower, upper, x.shape[1], working)
