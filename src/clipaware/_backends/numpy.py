"""NumPy: rows in groups that fit the cache, by compiled kernels or by operations.

The first part is what ``_fast`` and ``_derivatives`` ask of every backend, the second what ``_api`` does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from clipaware import _careful, _check, _derivatives, _fast
from clipaware._problem import DOUBLE, SINGLE, ZERO, Block, Numerics, Problem

Array = Any

GROUP = 2**19  # elements that gradients and checks take at a time, and that a scratch buffer keeps
TILE = 2**18  # elements that are solved at a time: more fit the cache less, fewer wait for Python
LANE = 1024  # float32 elements that are summed in float32
SMALL = 4096  # elements up to which branches cost less than more operations
TRACES = False
TAKES_ALL_AXES = False

# --- array functions --------------------------------------------------------------------------------------------------


def power(a: Array, p: float) -> Array:
    """a^p by way of float64: NumPy's float32 power is biased by several 1e-7, which a sum does not average out."""
    return np.power(a.astype(np.float64), p).astype(a.dtype)


minimum = np.minimum
maximum = np.maximum
sqrt = np.sqrt
sign = np.sign
signbit = np.signbit


def clip(a: Array, lower: Array, upper: Array) -> Array:
    """a inside its bounds. np.clip is quickest for numbers, and takes three times as long for bounds per element."""
    if lower.shape[1] == upper.shape[1] == 1:
        return np.clip(a, lower, upper)
    inside = np.maximum(a, lower)
    return np.minimum(inside, upper, out=inside)


_kept = threading.local()  # buffers, a few megabytes per thread, that the next call finds again


def _buffer(buffers: dict[Any, Array], key: Any, like: Array, dtype: Any = None) -> Array:
    """An array to write to again and again, instead of fresh memory from the system for every tile."""
    dtype = np.dtype(dtype or like.dtype)
    flat = buffers.get(key)
    if flat is None or flat.nbytes < like.size * dtype.itemsize:
        flat = buffers[key] = np.empty(like.size * dtype.itemsize, np.uint8)
    return flat[: like.size * dtype.itemsize].view(dtype).reshape(like.shape)


def scratch(key: Any, like: Array, dtype: Any) -> Array:
    """An array to work in, of that shape: memory that this thread's next call finds again, unless it is much."""
    if like.size > GROUP:
        return np.empty(like.shape, dtype)
    return _buffer(_kept.__dict__, ("scratch", key), like, dtype)


def where(condition: Array, yes: Array, no: Array) -> Array:
    """np.where; on large arrays by bits, since its branches cost far more than the arithmetic."""
    if isinstance(yes, float) and no.dtype.itemsize == 2:
        yes = no.dtype.type(yes)  # NumPy has no rule for a number beside bfloat16
    if condition.size < SMALL:
        return np.where(condition, yes, no)
    dtype = np.result_type(yes, no)
    if dtype.kind != "f" or dtype.itemsize == 2:
        return np.where(condition, yes, no)
    integer: Any = np.int32 if dtype.itemsize == 4 else np.int64
    mask = condition.astype(integer)
    np.negative(mask, out=mask)
    yes_bits, no_bits = (np.asarray(a, dtype).view(integer) for a in (yes, no))
    return (no_bits ^ ((yes_bits ^ no_bits) & mask)).view(dtype)


def row_dot(u: Array, v: Array) -> Array:
    """Dot product of each row, (rows, 1) in float64: lanes in the arrays' dtype, then float64."""
    rows, n = u.shape
    if n <= LANE:
        return np.vecdot(u, v).astype(np.float64)[:, None]
    whole = n - n % LANE
    shape = rows, whole // LANE, LANE
    total = np.vecdot(u[:, :whole].reshape(shape), v[:, :whole].reshape(shape)).sum(axis=1, dtype=np.float64)
    if whole < n:
        total += np.vecdot(u[:, whole:], v[:, whole:])
    return total[:, None]


def _ones(dtype: Any, size: int) -> Array:
    kept = _kept.__dict__.get(dtype)
    if kept is None or kept.size < size:
        kept = _kept.__dict__[dtype] = np.ones(size, dtype)
    return kept[:size]


def row_sum(a: Array) -> Array:
    return row_dot(a, _ones(a.dtype, a.size).reshape(a.shape))


def row_max(a: Array) -> Array:
    return a.max(axis=-1, keepdims=True)


def any_true(condition: Array) -> bool:
    return bool(condition.any())


def widen(a: Array) -> Array:
    return np.asarray(a, np.float64)


def narrow(a: Array, numerics: Numerics) -> Array:
    return np.asarray(a, _working(numerics))


def cast_like(a: Array, like: Array) -> Array:
    with np.errstate(over="ignore"):
        return a.astype(like.dtype, copy=False)


def constant(a: Array) -> Array:
    return a


def pow2(a: Array, numerics: Numerics) -> Array:
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    limit = 126 if numerics is SINGLE else 1022
    exponent = np.clip(np.frexp(a)[1] - 1, -limit, limit)
    return np.ldexp(1.0, np.where(np.abs(exponent) <= 8, 0, exponent))


def row_top(delta: Array) -> Array:
    """The largest |delta|."""
    return np.maximum(row_max(delta), -delta.min(axis=-1, keepdims=True))


def senseless(block: Block, x: Array) -> Array:
    """Per row, 1 where x, not yet clipped, is not finite or the bounds are not in order, else 0."""
    fine = np.isfinite(x) & (block.lower <= block.upper)
    return row_max((~fine).astype(np.float32))


def explain(x: Array, delta: Array, lower: Array, upper: Array, dtype: str | None = None) -> None:
    digits = {"float16": 10, "float32": 23, "float64": 52}.get(dtype or str(x.dtype), 7)
    _check.values([a.astype(np.float64) for a in (x, delta, lower, upper)], 2.0**-digits)


# --- what the API asks for --------------------------------------------------------------------------------------------


def is_array(a: Any) -> bool:
    return isinstance(a, (np.ndarray, np.generic)) and not isinstance(a, np.ma.MaskedArray)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return str(dtype)


def dtype_name(a: Array) -> str:
    return _name(a.dtype)


def shape(a: Array) -> tuple[int, ...]:
    return a.shape  # type: ignore[no-any-return]


def device_name(a: Array) -> str:
    return "cpu"


def values_of(a: Array) -> Array | None:
    """The array for its values to be checked; None where that would wait for a device or a trace."""
    return np.asarray(a)


def permute(a: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(a).transpose(axes)


def reshape(a: Array, shape: tuple[int, ...]) -> Array:
    return np.asarray(a).reshape(shape)


def broadcast_to(a: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(a, shape)


@lru_cache(maxsize=64)
def _number(value: Any, dtype: Any) -> Array:
    return np.array([[value + 0.0]], dtype)  # -0 and 0 are one number to the cache


def number(value: Any, like: Array) -> Array:
    """A bound for all rows and elements. Not to be written to: it is kept for the next call."""
    return _number(value, like.dtype)


def wide_number(value: Any, like: Array) -> Array:
    """An eps for all rows, in float64: it is never rounded to x's dtype."""
    return np.array([[value]], np.float64)


def as_eps(eps: Any, like: Array) -> Array:
    return np.asarray(eps, np.float64)


def as_bound(bound: Any, like: Array) -> Array:
    return np.asarray(bound, like.dtype)


def returned(a: Array, like: Array) -> Array:
    """In that dtype."""
    return a.astype(like.dtype, copy=False)


def sum_axes(a: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(a.sum(axis=axes)) if axes else a


def ndim(a: Array) -> int:
    return int(a.ndim)


def result(a: Array, x: Array) -> Array:
    """In x's dtype, or float32 if that is wider."""
    with np.errstate(over="ignore"):
        return a.astype(np.float64 if x.dtype == np.float64 else np.float32)


def true_rows(condition: Array) -> Array:
    return np.flatnonzero(condition)


def fetch(a: Array) -> Array:
    return a


def memory(a: Any) -> Array:
    """Another framework's own memory, only to be read: kernels would copy an array that calls itself read-only."""
    array = np.asarray(a)
    if array.dtype.itemsize < 4 or array.flags.writeable:
        return array
    interface = dict(array.__array_interface__, data=(array.ctypes.data, False))
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=array))


def _working(numerics: Numerics) -> Any:
    return np.float32 if numerics is SINGLE else np.float64


def _numerics(x: Array) -> Numerics:
    return DOUBLE if x.dtype == np.float64 else SINGLE


@contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """No warnings, and no buffering of a value per row against rows of less than 8192 elements, which costs 3x."""
    before = np.setbufsize(1024)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        np.setbufsize(before)


@cache
def kernels() -> Any:
    """The compiled kernels, or None if Numba is not installed or does not work with what is."""
    try:
        from clipaware._kernels import numba
    except ImportError:
        return None
    return numba


def _rows_of(problem: Problem, rows: Array) -> Problem:
    """Some rows of a problem, by their numbers."""
    return problem.mapped(lambda a: a if a.shape[0] == 1 < problem.x.shape[0] else a[rows])


def solve(
    problem: Problem,
    mode: str,
    write: bool,
    checked: bool = True,
    dtype: str | None = None,
    certify: bool | None = None,
) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status. Bad values raise if they are `checked`, and else make their row NaN.

    `dtype` is what v is to be rounded to, if that is not the arrays' own: kernels round float32 to bfloat16. Where an
    array is written and nobody asks to `certify` eta, eta need not be right.
    """
    compiled, x = kernels(), problem.x
    certify = not write if certify is None else certify
    if not x.size:
        return (x.copy() if write else None), np.zeros((len(x), 1)), np.full((len(x), 1), ZERO)
    found: tuple[Array, Array, Array]
    if compiled is not None:
        found = compiled.solve(problem, mode, write, certify, dtype)
    else:
        found = _solve_by_operations(problem, mode, write, certify)
    if (found[2] < 0).any():
        if checked:
            _check_values(problem, found[2] == _fast.FLAGGED, dtype)
        solve_flagged_in_place(problem, mode, found, dtype or dtype_name(x))
    return found


def _groups_of(chosen: Array, n: int) -> Iterator[Array]:
    """The numbers of the rows that are chosen, some at a time."""
    rows, height = np.flatnonzero(chosen), max(1, GROUP // n)
    return (rows[start : start + height] for start in range(0, len(rows), height))


def _check_values(problem: Problem, chosen: Array, dtype: str | None) -> None:
    """Raise if there are bad values in these rows."""
    for part in _groups_of(chosen, problem.x.shape[1]):
        if not values_are_fine(_rows_of(problem, part)):
            explain(problem.x, problem.delta, problem.lower, problem.upper, dtype)
            return  # all rows have been looked at


def values_are_fine(problem: Problem) -> bool:
    """Whether all values are finite and x lies within 2 ulp of its bounds. If not, `explain` has to look closer."""
    x, lower, upper = problem.x, problem.lower, problem.upper
    ulp = 2.0**-52 if x.dtype == np.float64 else 2.0**-23
    with np.errstate(all="ignore"):  # of values that are not fine
        scale = np.maximum(*(np.where(np.isfinite(b), abs(b), 0) for b in (lower, upper)))
        slack = (2 * ulp * scale).astype(x.dtype)
        inside = (lower - slack <= x) & (x <= upper + slack) & np.isfinite(x)
        return bool(inside.all() and np.isfinite(problem.delta).all() and (lower <= upper).all())


def solve_flagged_in_place(problem: Problem, mode: str, found: tuple[Array, Array, Array], dtype: str) -> None:
    """Solve the rows that are flagged in `found` by the careful lane, in place."""
    v, eta, status = found
    compiled = kernels()
    if compiled is not None:
        compiled.solve_flagged(problem, mode, found, dtype)
        return
    for part in _groups_of(status < 0, problem.x.shape[1]):
        careful, eta[part], status[part] = _careful.solve(_rows_of(problem, part), mode, v is not None, dtype)
        if v is not None:
            v[part] = careful


def solve_flagged(problem: Problem, mode: str, write: bool, dtype: str) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status of rows that another backend's fast lane has flagged."""
    rows = len(problem.x)
    out: Array = np.empty_like(problem.x, order="C") if write else None
    found = out, np.empty((rows, 1)), np.full((rows, 1), _fast.FLAGGED)
    if problem.x.size:
        solve_flagged_in_place(problem, mode, found, dtype)
    return found


def _solve_by_operations(problem: Problem, mode: str, write: bool, certify: bool) -> tuple[Array, Array, Array]:
    """The fast lane without compiled kernels."""
    x, numerics = problem.x, _numerics(problem.x)
    rows, n = x.shape
    out: Array = np.empty_like(x, order="C") if write else None
    eta, status = np.empty((rows, 1)), np.empty((rows, 1), np.int64)
    height = max(1, TILE // n)
    with _quick_and_quiet():
        for start in range(0, rows, height):
            part = slice(start, min(start + height, rows))
            some = _rows_of(problem, part)
            # In C order: the bits of a sum must not depend on how many rows there are.
            arrays = (np.ascontiguousarray(a, _working(numerics)) for a in (some.x, some.delta, some.lower, some.upper))
            block = Block(*arrays)
            found = _fast.solve(
                _fast.Rows(_this, block, some.eps, some.p, numerics, x, 8 * x.itemsize), mode, write, certify
            )
            v, eta[part], status[part] = found
            if write:
                out[part] = v
    return out, eta, status


def reach(problem: Problem, dtype: str | None = None, checked: bool = True) -> Array:
    """The largest norm of every row."""
    compiled, rows = kernels(), len(problem.x)
    if not problem.x.size:
        return np.zeros((rows, 1))
    problem = problem._replace(eps=np.ones((1, 1)))
    if compiled is None:
        if checked:
            _check_values(problem, np.full(rows, True), dtype)
        return _careful.reach(problem)
    found, status = compiled.reach(problem)
    if (status < 0).any():
        if checked:
            _check_values(problem, status < 0, dtype)
        compiled.solve_flagged(problem, "reach", (None, found, status))
    return found


def summary(problem: Problem, v: Array) -> tuple[Array, Array, Array]:
    """Of v: norm, naive norm and share of elements at their bounds."""
    if not problem.x.size:
        zero = np.zeros((len(problem.x), 1))
        return zero, zero, zero
    return _careful.summary(problem, v)


def vjp(
    problem: Problem,
    eta: Array,
    status: Array,
    g: Array,
    h: Array | None = None,
    needs: tuple[bool, ...] = (True,) * 5,
) -> tuple[Array, ...]:
    """Gradients of x, delta, eps and the bounds, those summed to their rows form; `h` is the cotangent of eta.

    What is not needed may be None instead.
    """
    x, delta, eps, lower, upper = problem.arrays()
    rows, n = x.shape
    compiled = kernels()
    if compiled is not None and x.size:
        bars = (needs[0], needs[1], needs[3] or needs[4])
        x_bar, delta_bar, c_bar, sums, eps_bar = compiled.vjp(problem, eta, status, g, h, bars)
        low_bar = high_bar = None
        if sums is not None:
            low_bar, high_bar = (
                bar if len(bound) == rows else bar.sum(axis=0, keepdims=True)
                for bar, bound in ((sums[:, :1], lower), (sums[:, 1:], upper))
            )
        elif c_bar is not None:
            low_bar, high_bar = _of_bound(c_bar, lower, delta < 0), _of_bound(c_bar, upper, delta > 0)
        return x_bar, delta_bar, eps_bar, low_bar, high_bar
    numerics = _numerics(x)
    x_bar, delta_bar = np.empty_like(x, order="C"), np.empty_like(x, order="C")
    eps_bar = np.zeros((rows, 1))
    bound_bars = [np.zeros(b.shape) for b in (lower, upper)]
    with _quick_and_quiet():
        for start in range(0, rows if n else 0, max(1, GROUP // max(n, 1))):
            part = slice(start, start + max(1, GROUP // n))
            a, b, e, up = (v if v.shape[0] == 1 else v[part] for v in (lower, upper, eps, g))
            block = Block(*(np.asarray(v, _working(numerics)) for v in (x[part], delta[part], a, b)))
            parts = _derivatives.partials(_this, block, e, eta[part], status[part], problem.p, numerics)
            up_eta = 0.0 if h is None else h[part]
            found = _derivatives.vjp(_this, parts, np.asarray(up, _working(numerics)), up_eta, numerics)
            x_bar[part], delta_bar[part], c_bar, eps_bar[part] = found
            lost = np.isnan(eta[part, 0])
            if lost.any():
                for bar in (x_bar[part], delta_bar[part], c_bar, eps_bar[part]):
                    bar[lost] = np.nan
            for bar, mine in zip(bound_bars, (block.delta < 0, block.delta > 0), strict=True):
                share = where(mine, c_bar, 0.0).astype(np.float64)
                share = share.sum(axis=1, keepdims=True) if bar.shape[1] == 1 else share
                bar[part if bar.shape[0] > 1 or rows == 1 else slice(None)] += (
                    share.sum(axis=0, keepdims=True) if bar.shape[0] == 1 else share
                )
    return x_bar, delta_bar, eps_bar, *bound_bars


def _of_bound(c_bar: Array, bound: Array, mine: Array) -> Array:
    """The part of the bounds' gradient that is one bound's own, summed to its rows form."""
    axes = tuple(axis for axis in (0, 1) if bound.shape[axis] == 1)
    return np.sum(c_bar, axis=axes, dtype=np.float64, keepdims=True, where=mine) if axes else np.where(mine, c_bar, 0.0)


# --- random numbers ---------------------------------------------------------------------------------------------------


log = np.log


def random(x: Array, seed: Any) -> tuple[Any, Any]:
    """Two functions that draw as many as an array like x has: normal numbers, and uniform ones from 0 to below 1."""
    rng = np.random.default_rng(seed)
    dtype: Any = np.float64 if x.dtype == np.float64 else np.float32
    return lambda like: rng.standard_normal(like.shape, dtype), lambda like: rng.random(like.shape, dtype)


def is_traced(x: Array) -> bool:
    return False


def filtered(a: Array, gain: Array, axes: tuple[int, ...]) -> Array:
    """a with its spectrum over these axes, the last of them halved, multiplied by NumPy's array `gain`."""
    spectrum = np.fft.rfftn(a, axes=axes) * gain.astype(a.dtype)
    return np.fft.irfftn(spectrum, [a.shape[axis] for axis in axes], axes)


# --- batches and models -----------------------------------------------------------------------------------------------


def take(a: Array, rows: Array) -> Array:
    """These rows, by their numbers."""
    return a[rows]


def concatenate(pieces: list[Array]) -> Array:
    return np.concatenate(pieces)


def evaluated(model: Any, x: Array) -> Array:
    """What the model makes of x, of which nobody asks for derivatives."""
    return model(x)


_this = sys.modules[__name__]
