"""NumPy: rows in groups that fit the cache, long rows in blocks of columns.

The first part is what ``_math`` asks of every backend, the second what ``_api`` does.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from clipaware import _check, _math
from clipaware._math import DOUBLE, SINGLE, Block, Numerics

Array = Any

GROUP = 2**19  # elements solved together: what a pass needs of them stays in the cache
TILE = 2**17  # elements that an operation works on at a time, so that what it makes stays in a nearer one
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


clip = np.clip


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


def room(key: Any, block: Block, buffers: dict[Any, Array]) -> Array:
    """Distance from x to the bound that delta points to, with the sign of delta, in the buffer of that key."""
    distance = _bound_ahead(block.delta, block.lower, block.upper, _buffer(buffers, key, block.x))
    distance -= block.x
    return distance


def raised(tile: Any, a: Array, p: float, buffers: dict[Any, Array] | None) -> Array:
    """|a|^p, in a buffer or, without them, in place of a."""
    out = a if buffers is None else _buffer(buffers, ("raised", tile[2]), a)
    if p == 2:
        return np.multiply(a, a, out=out)
    return _math.power(_this, np.abs(a, out=out), p)


def quotient(tile: Any, w: Array, d: Array, buffers: dict[Any, Array]) -> Array:
    return np.divide(w, d, out=_buffer(buffers, ("quotient", tile[2]), w))


def difference(v: Array, x: Array, buffers: dict[Any, Array]) -> Array:
    return np.subtract(v, x, out=_buffer(buffers, "mask", x))


def fold(combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
    """Values per row of each tile, added up or maximised over the tiles of a row."""
    total = np.zeros((like.shape[0], values[0].shape[1]))
    ufunc = np.add if combine == "sum" else np.maximum
    for (rows, *_), value in zip(tiles, values, strict=True):
        ufunc(total[rows], value, out=total[rows])
    return total


def where(condition: Array, yes: Array, no: Array) -> Array:
    """np.where; on large arrays by bits, since its branches cost far more than the arithmetic."""
    dtype = np.result_type(yes, no)
    if isinstance(yes, float) and no.dtype.itemsize == 2:
        yes, dtype = no.dtype.type(yes), no.dtype  # NumPy has no rule for a number beside bfloat16
    if condition.size < SMALL or dtype.kind != "f" or dtype.itemsize == 2:
        return np.where(condition, yes, no)
    integer: Any = np.int32 if dtype.itemsize == 4 else np.int64
    mask = condition.astype(integer)
    np.negative(mask, out=mask)
    yes_bits, no_bits = (np.asarray(a, dtype).view(integer) for a in (yes, no))
    return (no_bits ^ ((yes_bits ^ no_bits) & mask)).view(dtype)


def _bound_ahead(delta: Array, lower: Array, upper: Array, out: Array | None = None) -> Array:
    """`lower` where delta is negative, `upper` elsewhere: where(delta < 0, ...) in three integer operations."""
    integer: Any = np.int32 if delta.dtype.itemsize == 4 else np.int64
    shift = 8 * delta.dtype.itemsize - 1
    low, high = (bound.view(integer) for bound in (lower, upper))
    bits = np.right_shift(delta.view(integer), shift, out=None if out is None else out.view(integer))
    bits &= low ^ high
    bits ^= high
    return bits.view(delta.dtype)


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


def row_sums(t: Array, breakpoints: Array, dp: Array, wp: Array, buffers: dict[Any, Array]) -> Array:
    """(rows, 2): the sum of dp over t < breakpoints, and of wp over the rest."""
    clipped = np.greater_equal(t, breakpoints, out=_buffer(buffers, "clipped", dp, bool))
    mask = _buffer(buffers, "mask", dp)
    np.copyto(mask, clipped)
    C = row_dot(wp, mask)
    return np.concatenate((row_dot(dp, np.subtract(1, mask, out=mask)), C), axis=1)


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


def runs(n: int, count: int, length: int) -> Array:
    """Indices of `count` evenly spaced runs of `length` neighbours."""
    return (np.linspace(0, n - length, count).astype(np.intp)[:, None] + np.arange(length)).ravel()


def row_top(delta: Array) -> Array:
    """The largest |delta|."""
    return np.maximum(row_max(delta), -delta.min(axis=-1, keepdims=True))


def sensible(block: Block, top: Array) -> bool:
    """Whether everything is finite and x inside its bounds. Then they are in order, too."""
    x, lower, upper = block.x, block.lower, block.upper
    if lower.size == upper.size == 1:
        low, high = x.min(), x.max()
        return bool(lower <= low and high <= upper and low > -np.inf and high < np.inf and (top < np.inf).all())
    return bool(((lower <= x) & (x <= upper) & np.isfinite(x)).all() and (top < np.inf).all())


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
    return np.array([[value]], dtype)


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


def _groups(*problem: Any, checked: bool = True) -> Any:
    x = problem[0]
    return _math.groups(_this, problem, _numerics(x), GROUP, TILE, checked, _kept.__dict__) if x.size else ()


@cache
def kernels() -> Any:
    """The compiled kernels, or None if Numba is not installed or does not work with what is."""
    try:
        from clipaware._kernels import numba
    except ImportError:
        return None
    return numba


def _least(a: Array) -> Any:
    return a.item() if a.size == 1 else a.min()  # a reduction of one number takes a microsecond


def _reconsidered(
    status: Array, x: Array, delta: Array, lower: Array, upper: Array, checked: bool, dtype: str | None
) -> tuple[Any, ...]:
    """The rows that kernels found bad: they raise if they are `checked`, unless it is but rounding that left x outside
    its bounds. Else they are returned to be solved with x clipped, and a way to take what belongs to them."""
    if checked:
        explain(x, delta, lower, upper, dtype)
    bad = np.flatnonzero(status < 0)

    def take(a: Array) -> Array:
        return a if a.shape[0] == 1 else a[bad]

    x, lower, upper = (take(a) for a in (x, lower, upper))
    with np.errstate(invalid="ignore"):
        clipped = np.where(np.isfinite(x), np.clip(x, lower, upper), np.nan).astype(x.dtype)
    return bad, take, clipped, take(delta), lower, upper


def solve(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    p: float,
    mode: str,
    write: bool,
    checked: bool = True,
    dtype: str | None = None,
) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status. Bad values raise if they are `checked`, and else make their row NaN.

    `dtype` is what v is to be rounded to, if that is not the arrays' own: kernels round float32 to bfloat16.
    """
    compiled = kernels()
    if compiled is not None and x.size:
        v, eta, status, _ = compiled.solve(x, delta, eps, lower, upper, p, mode, write, dtype=dtype)
        if _least(status) < 0:
            bad, take, *again = _reconsidered(status[:, 0], x, delta, lower, upper, checked, dtype)
            problem = *again[:2], take(eps), *again[2:], p, mode, write
            some, eta[bad], found, _ = compiled.solve(*problem, final=True, dtype=dtype)
            status[bad] = np.where(found < 0, _math.ZERO, found)
            if write:
                v[bad] = some
        return v, eta, status
    rows, n = x.shape
    out: Array = np.empty_like(x, order="C") if write else None
    eta, status = np.zeros((rows, 1)), np.full((rows, 1), _math.ZERO)
    half = x.dtype.itemsize == 2
    with _quick_and_quiet():
        for part, group, blank in _groups(x, delta, eps, lower, upper, p, checked=checked):
            found = _math.solve(group, n, mode, write)

            def store(tile: Any, block: Block, direction: Array, k: Array, part: slice = part) -> Array:
                kept = out[part][tile[:2]]
                v = np.multiply(direction, k, out=None if half else kept)
                v += block.x
                np.clip(v, block.lower, block.upper, out=v)
                if half:
                    kept[...] = v
                return kept.astype(v.dtype, copy=False)

            if write:
                (found,) = _math.write(group, found, mode, store, half)
            eta[part], status[part] = found.K / found.m, found.status
            if blank is not None:
                lost = np.broadcast_to(blank, eta[part].shape)[:, 0]
                eta[part][lost] = np.nan
                if write:
                    out[part][lost] = np.nan
    return out, eta, status


def reach(
    x: Array, delta: Array, lower: Array, upper: Array, p: float, dtype: str | None = None, checked: bool = True
) -> Array:
    compiled = kernels()
    if compiled is not None and x.size:
        found, status = compiled.reach(x, delta, lower, upper, p)
        if _least(status) < 0:
            bad, _, *again = _reconsidered(status[:, 0], x, delta, lower, upper, checked, dtype)
            found[bad] = compiled.reach(*again, p, final=True)[0]
        return found
    found = np.zeros((x.shape[0], 1))
    with _quick_and_quiet():
        for part, group, blank in _groups(x, delta, np.ones((1, 1)), lower, upper, p, checked=checked):
            found[part] = _math.reach(group) if blank is None else where(blank, math.nan, _math.reach(group))
    return found


def summary(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, p: float, v: Array
) -> tuple[Array, Array, Array]:
    """Of v: norm, naive norm and share of elements at their bounds."""
    rows, n = x.shape
    found = np.zeros((3, rows, 1))
    with _quick_and_quiet():
        # Already looked at; in half precision from elsewhere, more counts as rounding than these arrays tell.
        for part, group, _ in _groups(x, delta, eps, lower, upper, p, checked=False):
            found[:, part] = _math.summary(group, v[part], n)
    return tuple(found)


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
    h: Array | None = None,
    needs: tuple[bool, ...] = (True,) * 5,
) -> tuple[Array, ...]:
    """Gradients of x, delta, eps and the bounds, those summed to their rows form; `h` is the cotangent of eta.

    What is not needed may be None instead.
    """
    rows, n = x.shape
    compiled = kernels()
    if compiled is not None and x.size:
        bars = (needs[0], needs[1], needs[3] or needs[4])
        x_bar, delta_bar, c_bar, sums, eps_bar = compiled.vjp(x, delta, eps, lower, upper, p, eta, status, g, h, bars)
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
            parts = _math.partials(_this, block, e, eta[part], status[part], p, numerics)
            up_eta = 0.0 if h is None else h[part]
            found = _math.vjp(_this, parts, np.asarray(up, _working(numerics)), up_eta, numerics)
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
