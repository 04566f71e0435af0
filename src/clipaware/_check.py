"""Every input check and its message: the argument, what was expected, what came."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipaware._dispatch import backend_of, described, framework_of

Array = Any

FLOATS = ("float16", "bfloat16", "float32", "float64")
MODES = ("equal", "at_most", "at_least")
UNREACHABLE = ("maximize", "nan", "raise")


class UnreachableError(ValueError):
    """The asked-for norm is larger than any that the direction can have inside the bounds.

    Attributes
    ----------
    rows : numpy.ndarray
        Indices of the samples that cannot reach their eps, counted in C order over the batch axes.
    reach : numpy.ndarray
        The largest norm that each of them can have.
    """

    def __init__(self, rows: Array, reach: Array, eps: Array) -> None:
        self.rows, self.reach = rows, reach
        shown = ", ".join(
            f"sample {r}: eps {e:.6g} > reach {m:.6g}" for r, e, m in zip(rows[:5], eps, reach, strict=False)
        )
        more = f", and {len(rows) - 5} more" if len(rows) > 5 else ""
        super().__init__(
            f"eps cannot be reached by {len(rows)} sample(s) ({shown}{more}); ask for at most "
            'clipaware.reach(x, delta), or choose unreachable="maximize" or "nan"'
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.rows, self.reach, self.args)


def _unpickled(rows: Array, reach: Array, args: tuple[Any, ...]) -> UnreachableError:
    error = UnreachableError.__new__(UnreachableError)
    error.rows, error.reach, error.args = rows, reach, args
    return error


def array(a: Any, name: str) -> Any:
    """The backend of x."""
    be = backend_of(a)
    if be is None:
        hint = "; convert it first, for instance with numpy.asarray" if isinstance(a, (list, tuple, int, float)) else ""
        frameworks = "NumPy, PyTorch, JAX, TensorFlow, CuPy, Dask, or any with __array_namespace__"
        raise TypeError(f"{name} is {described(a)}, expected an array of a supported framework ({frameworks}){hint}")
    return be


def floating(be: Any, a: Array, name: str) -> None:
    dtype = be.dtype_name(a)
    if dtype not in FLOATS:
        how = (
            f"; convert it first, such as {name}.astype('float32') / 255 with bounds=(0, 1), or without the "
            "division and with bounds=(0, 255)"
            if "int" in dtype
            else ""
        )
        raise TypeError(f"{name} has dtype {dtype}, expected one of {', '.join(FLOATS)}{how}")


def same_kind(be: Any, x: Array, other: Any, name: str) -> None:
    """`other` must be of x's framework, device, shape and dtype."""
    if framework_of(other) != framework_of(x):
        raise TypeError(f"{name} is {described(other)}, expected {described(x)} to match x")
    dtype, shape = be.dtype_name(other), be.shape(other)
    if dtype != be.dtype_name(x):
        floating(be, other, name)
    same_device(be, x, other, name)
    if shape != be.shape(x):
        raise ValueError(f"{name} has shape {shape}, expected {be.shape(x)} to match x")
    if dtype != be.dtype_name(x):
        raise TypeError(f"{name} has dtype {dtype}, expected {be.dtype_name(x)} to match x")
    if be.TAKES_ALL_AXES:
        same_split(be.split_of(x), be.split_of(other), name)


def same_split(mine: str, theirs: str, name: str) -> None:
    """How arrays are spread over devices; nothing if they are not, or nobody knows."""
    if mine and theirs and mine != theirs:
        raise ValueError(
            f"{name} is split over devices by {theirs}, expected {mine} to match x; to split it like x takes "
            f"jax.device_put({name}, x.sharding), and jax.reshard({name}, jax.typeof(x).sharding) under jax.jit"
        )


def same_device(be: Any, x: Array, other: Array, name: str) -> None:
    """A device without a name is one that is not known yet, or that does not matter."""
    theirs, mine = be.device_name(other), be.device_name(x)
    if theirs and mine and theirs != mine:
        raise TypeError(f"{name} is on {theirs}, expected {mine} to match x")


def norm_order(p: Any) -> float:
    if not is_number(p):
        raise TypeError(f"p is {described(p)}, expected a number from 1 to inf")
    order = float(p)
    if not order >= 1:
        raise ValueError(f"p is {order}, expected a number from 1 to inf")
    return order


def option(value: Any, allowed: Sequence[str], name: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, allowed))}")


def sample_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes that one sample spans, increasing."""
    if isinstance(axis, str) and axis == "batch":
        return tuple(range(1, ndim)) if ndim > 1 else tuple(range(ndim))
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, numbers.Integral) else axis
    if not isinstance(axes, (tuple, list)) or not all(isinstance(a, numbers.Integral) for a in axes):
        raise TypeError(f"axis is {axis!r}, expected 'batch', None, an int or a tuple of ints")
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"axis is {axis!r}, expected axes from {-ndim} to {ndim - 1} for x with {ndim} dimensions")
    found = sorted(int(a) % ndim for a in axes)
    if len(set(found)) < len(found):
        raise ValueError(f"axis is {axis!r}, expected no axis twice")
    return tuple(found)


def is_number(a: Any) -> bool:
    # The usual types first: asking an abstract class takes a microsecond.
    return type(a) in (float, int) or (isinstance(a, numbers.Real) and not isinstance(a, bool))


def companion(be: Any, x: Array, a: Any, name: str) -> None:
    """eps and the bounds: numbers, NumPy arrays, or arrays of x's own framework and device."""
    if is_number(a):
        return
    other, alike = backend_of(a), framework_of(a) == framework_of(x)
    if other is None or not (alike or isinstance(a, (np.ndarray, np.generic))):
        raise TypeError(f"{name} is {described(a)}, expected a number, a NumPy array or {described(x)} like x")
    dtype = other.dtype_name(a)
    if dtype not in FLOATS and "int" not in dtype:
        raise TypeError(f"{name} has dtype {dtype}, expected real numbers")
    if alike and other.ndim(a):
        same_device(be, x, a, name)


def eps_shape(shape: tuple[int, ...], batch: tuple[int, ...], kept: tuple[int, ...]) -> None:
    if shape not in ((), batch, kept):
        allowed = " or ".join(map(str, dict.fromkeys([batch, kept] if batch else [kept])))
        raise ValueError(f"eps has shape {shape}, expected a number or shape {allowed}: one per sample")


def eps_values(eps: Any) -> None:
    """Every eps whose value is at hand is checked: not under a trace, nor on an accelerator."""
    if is_number(eps):
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps is {eps}, expected a finite number that is not negative")
        return
    concrete = array(eps, "eps").values_of(eps)
    if concrete is not None and not ((concrete >= 0) & (concrete < math.inf)).all():
        bad = ~((concrete >= 0) & (concrete < math.inf))
        raise ValueError(
            f"eps is {concrete[bad].ravel()[0]} for {int(bad.sum())} of {concrete.size} sample(s), expected finite "
            "numbers that are not negative"
        )


def bounds_pair(bounds: Any) -> tuple[Any, Any]:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        came = f"{len(bounds)} items" if isinstance(bounds, (tuple, list)) else described(bounds)
        raise TypeError(f"bounds is {came}, expected a pair (lower, upper)")
    lower, upper = bounds
    lower, upper = -math.inf if lower is None else lower, math.inf if upper is None else upper
    if is_number(lower) and is_number(upper) and not lower <= upper:
        raise ValueError(f"bounds are ({lower}, {upper}), expected lower <= upper")
    return lower, upper


def bound_shape(shape: tuple[int, ...], x_shape: tuple[int, ...], name: str) -> None:
    padded = (1,) * (len(x_shape) - len(shape)) + shape
    # Written without `in`, which takes a number for different from every symbolic size.
    if len(shape) > len(x_shape) or any(not (s == 1 or s == n) for s, n in zip(padded, x_shape, strict=True)):
        raise ValueError(f"{name} has shape {shape}, expected one that broadcasts to {x_shape}, the shape of x")


def values(problem: list[Array], ulp: float) -> None:
    """Say what is wrong with values of (x, delta, lower, upper) that a first look found wanting, float64 in rows form.

    Nothing, if rounding explains it; `ulp` is the spacing at 1 of the dtype that they came in.
    """
    x, delta, lower, upper = problem
    for name, a in (("x", x), ("delta", delta)):
        bad = ~np.isfinite(a)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"{name} has {int(bad.sum())} element(s) that are NaN or infinite, the first in sample {row} "
                f"({float(a[row, column])}), expected finite numbers"
            )
    for name, bound in (("lower", lower), ("upper", upper)):
        if np.isnan(bound).any():
            raise ValueError(f"the {name} bound has {int(np.isnan(bound).sum())} NaN, expected numbers or infinity")
    if (lower > upper).any():
        low, high = np.broadcast_arrays(lower, upper)
        first = tuple(np.argwhere(lower > upper)[0])
        raise ValueError(
            f"bounds have lower > upper in {int((lower > upper).sum())} place(s), first {low[first]} > {high[first]}, "
            "expected lower <= upper"
        )
    # Rounding at the scale of the box, such as normalisation by mean and std, may leave x an ulp or two outside.
    scale = np.maximum(*(np.where(np.isfinite(b), np.abs(b), 0) for b in np.broadcast_arrays(lower, upper)))
    excess = np.maximum(lower - x, x - upper)
    outside = excess > 4 * ulp * scale
    if outside.any():
        row, column = np.unravel_index(np.argmax(np.where(outside, excess, -1)), x.shape)
        here = [float(np.broadcast_to(b, x.shape)[row, column]) for b in (x, lower, upper)]
        raise ValueError(
            f"x has {int(outside.sum())} element(s) outside its bounds, the worst in sample {row}: {here[0]}, "
            f"expected {here[1]} to {here[2]}"
        )


def values_are_known(known: bool, traces: str) -> None:
    """unreachable="raise" cannot look at what a trace has no values of."""
    if not known:
        raise ValueError(
            f'unreachable is "raise", which needs values that are not known under {traces}; compare eps with '
            'clipaware.reach(x, delta) instead, or choose "maximize" or "nan"'
        )


def one_process(x: Array) -> None:
    """Random numbers of the parts of an array are for each process to draw, or they would be the same."""
    if framework_of(x) == "DTensor":
        raise TypeError(
            "x is a DTensor array, expected one that is not distributed: call this for x.to_local(), with another seed "
            "for every part, and DTensor.from_local for the result"
        )


def seed(value: Any) -> None:
    """A whole number, None, or whatever the framework itself draws from."""
    if is_number(value) and not (isinstance(value, numbers.Integral) and 0 <= int(value) < 2**64):
        raise ValueError(f"seed is {value}, expected a whole number from 0 to 2**64 - 1, None or a generator")


def seed_is_given(given: bool) -> None:
    """JAX has no random numbers without a key, and one made in a trace would be the same at every call."""
    if not given:
        raise ValueError("seed is None, expected a key from jax.random under jax.jit and other transformations of JAX")
