"""CuPy, and every other array with an ``__array_namespace__``: what the Array API standard (2024.12) has, and no more.

No array is written to: some cannot be, and where there is but one group of rows, its result needs no copy.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from clipaware import _derivatives, _fast, _traced
from clipaware._backends import numpy as host
from clipaware._problem import DOUBLE, SINGLE, ZERO, Block, Numerics, Problem

try:
    import array_api_compat
except ImportError as error:
    raise ImportError(
        "arrays of this type need the package array-api-compat: pip install 'clipaware[array-api]'"
    ) from error

Array = Any
Namespace = Any

GROUP = 2**19  # elements solved together on a CPU
BATCH = 2**26  # and elsewhere, where it bounds the memory that is needed on the way
LONG, PARTS = 2**16, 256  # a row this long is added up in this many parts, if there are few
TRACES = False
TAKES_ALL_AXES = False

_namespaces: dict[type, Namespace] = {}
_wides: dict[tuple[Namespace, str], Any] = {}


def _xp(a: Array) -> Namespace:
    found = _namespaces.get(type(a))
    if found is None:
        found = _namespaces[type(a)] = array_api_compat.array_namespace(a)
    return found


def _wide(a: Array) -> Any:
    """float64, unless the array's device has none."""
    xp = _xp(a)
    key = xp, str(a.device)  # CuPy's devices cannot be keys
    if key not in _wides:
        info = getattr(xp, "__array_namespace_info__", None)
        known = info is None or "float64" in info().dtypes(device=a.device, kind="real floating")
        _wides[key] = xp.float64 if known else xp.float32
    return _wides[key]


def _working(a: Array, numerics: Numerics) -> Any:
    return _xp(a).float32 if numerics is SINGLE else _xp(a).float64


def _cast(a: Array, dtype: Any) -> Array:
    return a if a.dtype == dtype else _xp(a).astype(a, dtype)


# --- array functions --------------------------------------------------------------------------------------------------


def where(condition: Array, yes: Any, no: Any) -> Array:
    """xp.where, also of two numbers. The standard wants an array among them, to tell the dtype."""
    xp = _xp(condition)
    if isinstance(yes, int | float) and isinstance(no, int | float):
        yes = xp.full((1, 1), yes, dtype=xp.int32, device=condition.device)  # the status of a row
    return xp.where(condition, yes, no)


def sqrt(a: Array) -> Array:
    return _xp(a).sqrt(a)


def sign(a: Array) -> Array:
    return _xp(a).sign(a)


def signbit(a: Array) -> Array:
    return _xp(a).signbit(a)


def minimum(a: Array, b: Any) -> Array:
    return _xp(a).minimum(a, b)


def maximum(a: Array, b: Any) -> Array:
    return _xp(a).maximum(a, b)


def clip(a: Array, lower: Any, upper: Any) -> Array:
    # Not xp.clip: for CuPy, array-api-compat makes one of boolean masks, each of which waits for the GPU.
    return minimum(maximum(a, lower), upper)


def power(a: Array, p: float) -> Array:
    """a^p by way of float64, since a float32 power may be biased, which a sum does not average out."""
    return _cast(widen(a) ** p, a.dtype)


def fold(combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
    """Values per row of each tile, added up or maximised: a group is one tile, or one row in several."""
    return reduce(operator.add if combine == "sum" else maximum, map(widen, values))


def _along_rows(reduction: Callable[..., Array], a: Array, **options: Any) -> Array:
    """A reduction, of few long rows in parts: CuPy has no more than one block of threads for each of its results."""
    rows, n = a.shape
    parts = math.gcd(n, PARTS) if rows < PARTS and n >= LONG else 1
    if parts > 1:
        a = reduction(reshape(a, (rows, parts, n // parts)), axis=-1, **options)
    return reduction(a, axis=-1, keepdims=True, **options)


def row_sum(a: Array) -> Array:
    return _along_rows(_xp(a).sum, a, dtype=_wide(a))


def row_dot(u: Array, v: Array) -> Array:
    return row_sum(u * v)


def row_max(a: Array) -> Array:
    return _along_rows(_xp(a).max, a)


def _row_min(a: Array) -> Array:
    return _along_rows(_xp(a).min, a)


def row_top(delta: Array) -> Array:
    """The largest |delta|."""
    return maximum(row_max(delta), -_row_min(delta))


def any_true(condition: Array) -> bool:
    return bool(_xp(condition).any(condition))


def widen(a: Array) -> Array:
    return _cast(a, _wide(a))


def narrow(a: Array, numerics: Numerics) -> Array:
    return _cast(a, _working(a, numerics))


def cast_like(a: Array, like: Array) -> Array:
    with np.errstate(over="ignore"):
        return _cast(a, like.dtype)


def constant(a: Array) -> Array:
    return a


def pow2(a: Array, numerics: Numerics) -> Array:
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    xp, limit = _xp(a), 126 if numerics is SINGLE else 1022
    exponent = clip(xp.floor(xp.log2(a)), -limit, limit)
    exponent = xp.where(abs(exponent) <= 8, 0.0, exponent)
    # exp2 is not in the standard, but where there is one it is exact, which a power on a GPU need not be.
    return xp.exp2(exponent) if hasattr(xp, "exp2") else 2.0**exponent


def sensible(block: Block, top: Array) -> bool:
    """Whether everything is finite and x inside its bounds. Then they are in order, too."""
    xp = _xp(block.x)
    inside = (block.lower <= block.x) & (block.x <= block.upper) & xp.isfinite(block.x)
    return bool(xp.all(inside)) and bool(xp.all(top < math.inf))


def senseless(block: Block, x: Array) -> Array:
    """Per row, 1 where x, not yet clipped, is not finite or the bounds are not in order, else 0.

    The extremes of a row are NaN if anything in it is, and reductions make no arrays of x's size.
    """
    xp, lower, upper = _xp(x), block.lower, block.upper
    fine = (lower <= upper) & (lower < math.inf) & (upper > -math.inf)
    bad = xp.any(~fine, axis=-1, keepdims=True) | ~(xp.isfinite(row_max(x)) & xp.isfinite(_row_min(x)))
    return xp.astype(bad, xp.float32)


def explain(x: Array, delta: Array, lower: Array, upper: Array) -> None:
    host.explain(fetch(x), fetch(delta), fetch(lower), fetch(upper), dtype_name(x))


# --- what the API asks for --------------------------------------------------------------------------------------------


def is_array(a: Any) -> bool:
    return bool(array_api_compat.is_array_api_obj(a))


def dtype_name(a: Array) -> str:
    return str(a.dtype).rpartition(".")[2]


def shape(a: Array) -> tuple[int, ...]:
    return tuple(a.shape)


def device_name(a: Array) -> str:
    return str(a.device)


def _on_cpu(a: Array) -> bool:
    # What a device is the standard leaves open; libraries with one for the CPU call it so.
    return "cpu" in device_name(a).lower()


def values_of(a: Array) -> Any:
    """The array for its values to be checked; None where that would wait for a device."""
    return fetch(a) if _on_cpu(a) else None


@cache
def _cpu(xp: Namespace) -> Any:
    """The device that a CPU is; for CuPy, array-api-compat has a word for it."""
    return next((device for device in xp.__array_namespace_info__().devices() if "cpu" in str(device).lower()), "cpu")


def fetch(a: Array) -> Any:
    """As a NumPy array."""
    a = a if _on_cpu(a) else array_api_compat.to_device(a, _cpu(_xp(a)))
    # NumPy wraps what it does not know into an array of objects.
    return np.asarray(a) if hasattr(a, "__array__") or hasattr(a, "__buffer__") else np.from_dlpack(a)


def permute(a: Array, axes: tuple[int, ...]) -> Array:
    return _xp(a).permute_dims(a, axes)


def reshape(a: Array, shape: tuple[int, ...]) -> Array:
    return _xp(a).reshape(a, shape)


def broadcast_to(a: Array, shape: tuple[int, ...]) -> Array:
    return _xp(a).broadcast_to(a, shape)


def sum_axes(a: Array, axes: tuple[int, ...]) -> Array:
    return _xp(a).sum(a, axis=axes) if axes else a


def ndim(a: Array) -> int:
    return int(a.ndim)


def number(value: Any, like: Array) -> Array:
    """A bound for all rows and elements."""
    return _xp(like).full((1, 1), float(value), dtype=like.dtype, device=like.device)


def wide_number(value: Any, like: Array) -> Array:
    """An eps for all rows, in float64: it is never rounded to x's dtype."""
    return _xp(like).full((1, 1), float(value), dtype=_wide(like), device=like.device)


def as_eps(eps: Any, like: Array) -> Array:
    return _as_array(eps, _wide(like), like)


def as_bound(bound: Any, like: Array) -> Array:
    return _as_array(bound, like.dtype, like)


def returned(a: Any, like: Array) -> Array:
    """NumPy's array as one of this framework, of that dtype and on that device."""
    return _as_array(a, like.dtype, like)


def _as_array(a: Any, dtype: Any, like: Array) -> Array:
    if isinstance(a, np.ndarray | np.generic):
        # By way of float64: what else NumPy has, other libraries may not know.
        return _xp(like).asarray(np.asarray(a, np.float64), dtype=dtype, device=like.device)
    a = a if a.device == like.device else array_api_compat.to_device(a, like.device)
    return _cast(a, dtype)


def result(a: Array, x: Array) -> Array:
    """In x's dtype, or float32 if that is wider."""
    xp = _xp(x)
    return _cast(a, xp.float64 if x.dtype == xp.float64 else xp.float32)


def true_rows(condition: Array) -> Any:
    return np.flatnonzero(fetch(condition))


def _numerics(x: Array) -> Numerics:
    return DOUBLE if x.dtype == _xp(x).float64 else SINGLE


def _by_rows(a: Array) -> Array:
    """With rows that lie in memory one after another: along others, NumPy's sums are not by halves and drift."""
    return reshape(reshape(a, (-1,)), a.shape)


def _groups(problem: Problem) -> Any:
    x, delta = _by_rows(problem.x), _by_rows(problem.delta)
    on_cpu = _on_cpu(x)
    size = GROUP if on_cpu else BATCH
    # As large as a group, there is one tile to it, unless a row alone is larger.
    return _traced.groups(_this, problem._replace(x=x, delta=delta), _numerics(x), size, size, checked=on_cpu)


def _joined(pieces: Iterable[Array], axis: int) -> Array:
    pieces = list(pieces)
    return pieces[0] if len(pieces) == 1 else _xp(pieces[0]).concat(pieces, axis=axis)


def solve(problem: Problem, mode: str, write: bool) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status."""
    x = problem.x
    xp, (rows, n) = _xp(x), x.shape
    if not rows * n:
        zero = xp.zeros((rows, 1), dtype=_wide(x), device=x.device)
        return xp.zeros_like(x) if write else None, zero, where(zero == 0, ZERO, ZERO)
    numerics, height = _numerics(x), max(1, (GROUP if _on_cpu(x) else BATCH) // n)
    given = problem._replace(x=_by_rows(x), delta=_by_rows(problem.delta))
    solved = []
    # Arrays that wrap NumPy's would warn of what is in rows that are not solved.
    with np.errstate(all="ignore"):
        for start in range(0, rows, height):
            part = slice(start, min(start + height, rows))
            some = given.mapped(partial(_rows_of, part=part))
            block = Block(*(narrow(a, numerics) for a in (some.x, some.delta, some.lower, some.upper)))
            group = _fast.Rows(_this, block, some.eps, some.p, numerics, x, _xp(x).finfo(x.dtype).bits)
            solved.append(_fast.solve(group, mode, write, certify=not write))
        vs, etas, statuses = zip(*solved, strict=True)
        found = (_joined(vs, axis=0) if write else None), _joined(etas, axis=0), _joined(statuses, axis=0)
        flagged = true_rows(found[2][:, 0] < 0)
        return found if not len(flagged) else _with_flagged(given, found, flagged, mode)


def _rows_of(a: Array, part: slice) -> Array:
    """Some rows, of something that has one per row or one for all."""
    return a if a.shape[0] == 1 else a[part, :]


def _with_flagged(problem: Problem, found: tuple[Array, ...], flagged: Any, mode: str) -> tuple[Array, Array, Array]:
    """What was found, with the rows that were flagged solved on the host."""
    x = problem.x
    some = problem.mapped(lambda a: fetch(a if a.shape[0] == 1 < x.shape[0] else take(a, flagged)))
    if _on_cpu(x) and not host.values_are_fine(some):
        explain(x, problem.delta, problem.lower, problem.upper)
    again = host.solve_flagged(some, mode, found[0] is not None, dtype_name(x))
    order = np.arange(x.shape[0])
    order[flagged] = x.shape[0] + np.arange(len(flagged))
    v, eta, status = (
        None if a is None else take(_xp(x).concat([a, _as_array(b, a.dtype, a)]), order)
        for a, b in zip(found, again, strict=True)
    )
    return v, eta, status


def reach(problem: Problem) -> Array:
    """The largest norm of every row."""
    x = problem.x
    xp, (rows, n) = _xp(x), x.shape
    if not rows * n:
        return xp.zeros((rows, 1), dtype=_wide(x), device=x.device)
    found = []
    with np.errstate(all="ignore"):
        for _, group, blank in _groups(problem._replace(eps=wide_number(1, x))):
            reached = _traced.reach(group)
            found.append(reached if blank is None else where(blank, math.nan, reached))
    return _joined(found, axis=0)


def summary(problem: Problem, v: Array) -> tuple[Array, Array, Array]:
    """Of v: norm, naive norm and share of elements at their bounds."""
    x = problem.x
    rows, n = x.shape
    if not rows * n:
        zero = _xp(x).zeros((rows, 1), dtype=_wide(x), device=x.device)
        return zero, zero, zero
    with np.errstate(all="ignore"):
        found = [_traced.summary(group, v[part, :], n) for part, group, _ in _groups(problem)]
    norms, naive_norms, clipped = (_joined(pieces, axis=0) for pieces in zip(*found, strict=True))
    return norms, naive_norms, clipped


def vjp(problem: Problem, eta: Array, status: Array, g: Array) -> tuple[Array, ...]:
    """Gradients of x, delta, eps and the bounds, those summed to their rows form."""
    x, delta, eps, lower, upper = problem.arrays()
    xp, (rows, n), numerics = _xp(x), x.shape, _numerics(x)
    like = x, delta, eta, lower, upper
    if not rows * n:
        return tuple(xp.zeros_like(a) for a in like)
    x, delta, g = _by_rows(x), _by_rows(delta), _by_rows(g)
    height = max(1, (GROUP if _on_cpu(x) else BATCH) // n)
    found = []
    with np.errstate(all="ignore"):
        for start in range(0, rows, height):
            part = slice(start, min(start + height, rows))
            here = [a if a.shape[0] == 1 else a[part, :] for a in (x, delta, lower, upper, eps, eta, status, g)]
            block, (some_eps, some_eta) = Block(*(narrow(a, numerics) for a in here[:4])), here[4:6]
            parts = _derivatives.partials(_this, block, some_eps, some_eta, here[6], problem.p, numerics)
            x_bar, delta_bar, c_bar, eps_bar = _derivatives.vjp(_this, parts, narrow(here[7], numerics), 0.0, numerics)
            lower_bar, upper_bar = where(block.delta < 0, c_bar, 0.0), where(block.delta > 0, c_bar, 0.0)
            bars = [where(xp.isnan(some_eta), math.nan, a) for a in (x_bar, delta_bar, eps_bar, lower_bar, upper_bar)]
            found.append([_summed(bar, a) for bar, a in zip(bars, like, strict=True)])
    return tuple(
        _cast(
            reduce(operator.add, pieces) if a.shape[0] == 1 else _joined(pieces, axis=0), a.dtype if i < 2 else _wide(x)
        )
        for i, (pieces, a) in enumerate(zip(zip(*found, strict=True), like, strict=True))
    )


def _summed(bar: Array, like: Array) -> Array:
    """Over what was broadcast."""
    axes = tuple(axis for axis in (0, 1) if like.shape[axis] == 1 < bar.shape[axis])
    return _xp(bar).sum(bar, axis=axes, keepdims=True, dtype=_wide(bar)) if axes else bar


# --- random numbers ---------------------------------------------------------------------------------------------------


def log(a: Array) -> Array:
    return _xp(a).log(a)


def random(x: Array, seed: Any) -> tuple[Any, Any]:
    """Two functions that draw as many as an array like x has: normal numbers, and uniform ones from 0 to below 1.

    The standard has no random numbers: but for CuPy's own they are NumPy's.
    """
    cupy = sys.modules.get("cupy")
    mine = cupy is not None and isinstance(x, cupy.ndarray)
    dtype: Any = np.float64 if dtype_name(x) == "float64" else np.float32
    rng = (cupy if mine else np).random.default_rng(seed)  # type: ignore[union-attr]

    def draw(function: Callable[..., Array], like: Array) -> Array:
        drawn = function(like.shape, dtype=dtype)
        return drawn if mine else _xp(x).asarray(drawn, device=x.device)

    return partial(draw, rng.standard_normal), partial(draw, rng.random)


def is_traced(x: Array) -> bool:
    return False


def filtered(a: Array, gain: Any, axes: tuple[int, ...]) -> Array:
    """a with its spectrum over these axes, the last of them halved, multiplied by NumPy's array `gain`."""
    xp = _xp(a)
    spectrum = xp.fft.rfftn(a, axes=axes)
    spectrum *= xp.astype(_as_array(gain, a.dtype, a), spectrum.dtype)
    return xp.fft.irfftn(spectrum, s=[a.shape[axis] for axis in axes], axes=axes)


# --- batches and models -----------------------------------------------------------------------------------------------


def take(a: Array, rows: Any) -> Array:
    """These rows, by their numbers."""
    # Not every device has the 64-bit integers that NumPy numbers rows by.
    return _xp(a).take(a, _xp(a).asarray(np.asarray(rows, np.int32), device=a.device), axis=0)


def concatenate(pieces: list[Array]) -> Array:
    return _xp(pieces[0]).concat(pieces)


def evaluated(model: Any, x: Array) -> Array:
    """What the model makes of x, of which nobody asks for derivatives."""
    return model(x)


_this = sys.modules[__name__]
