"""The paper's algorithm and two slow, simple ones: the oracle of the tests and the baseline of the benchmarks.

All that solve take NumPy or CuPy arrays or PyTorch tensors. The letters are the paper's; ``docs/math.md`` derives the
formulas. What they are tried on, `directions`, and measured by, `norm64`, is NumPy's.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

Array = Any

__all__ = [
    "KINDS",
    "bisect_rescale",
    "directions",
    "l2_clipping_aware_rescaling",
    "naive_perturb",
    "norm64",
    "sort_rescale",
]

KINDS = ("gaussian", "cauchy", "lognormal", "tied", "geometric")


def _namespace(a: Array) -> Any:
    """NumPy, torch or CuPy, whatever the array is of: then somebody has imported it already."""
    root = type(a).__module__.partition(".")[0]
    return sys.modules[root] if root in ("torch", "cupy") else np


def _cast(a: Any, like: Array, dtype: Any) -> Array:
    """An array of the framework and device of `like`, still part of a's autograd graph."""
    xp = _namespace(like)
    return xp.as_tensor(a, dtype=dtype, device=like.device) if xp.__name__ == "torch" else xp.asarray(a, dtype)


def _take(a: Array, indices: Array) -> Array:
    """a[i, indices[i, j]]."""
    xp = _namespace(a)
    return xp.take_along_dim(a, indices, 1) if xp.__name__ == "torch" else xp.take_along_axis(a, indices, 1)


@np.errstate(all="ignore")
def l2_clipping_aware_rescaling(x: Array, delta: Array, eps: Any, a: Any = 0.0, b: Any = 1.0) -> Array:
    """Return eta with ``||clip(x + eta*delta, a, b) - x||_2 = eps``, by the algorithm of Rauber & Bethge (2020).

    In ``t = eta^2`` the squared norm is piecewise linear. Its breakpoints ``(s/delta)^2`` are sorted, its slopes are
    sums of ``delta^2`` from the end, and the first breakpoint that is far enough is corrected back along its piece.

    This is the baseline, faults included. It works in the dtype of x, where squares overflow and sums of increments
    lose small targets. A ``delta^2`` below 1e-20 is raised to it, so a small delta gives a wrong eta and a row of zeros
    a huge one. Rows with ``eps = 0`` or without room have NaN gradients. Nothing is checked.

    Parameters
    ----------
    x, delta
        Arrays whose first axis counts samples.
    eps
        The norm to deliver, a number for all samples.
    a, b
        The bounds, numbers.

    Returns
    -------
    array
        Shape (N, 1, ..., 1). Where eps cannot be reached, the largest breakpoint. PyTorch differentiates it through the
        sort.

    Examples
    --------
    >>> import numpy as np
    >>> x, delta = np.full((2, 3), 0.5), np.array([[1.0, 2.0, 3.0], [3.0, -3.0, 3.0]])
    >>> l2_clipping_aware_rescaling(x, delta, 0.6).round(4)
    array([[0.1604],
           [0.1155]])
    """
    xp = _namespace(x)
    rows, squares = x.shape[0], (delta * delta).reshape((x.shape[0], -1))
    room = xp.where(delta >= 0, b - x, x - a).reshape((rows, -1))
    t = room * room / xp.clip(squares, 1e-20, None)
    order = xp.argsort(t, axis=1)
    t = _take(t, order)
    slope = xp.flip(xp.cumsum(xp.flip(_take(squares, order), (1,)), axis=1), (1,))
    norm2 = xp.cumsum(slope * xp.concatenate((t[:, :1], t[:, 1:] - t[:, :-1]), axis=1), axis=1)
    enough = norm2 >= eps**2
    first = xp.argmax(1 * enough, axis=1, keepdims=True)
    root = _take(t, first) - (_take(norm2, first) - eps**2) / _take(slope, first)
    return xp.sqrt(xp.where(enough[:, -1:], root, t[:, -1:])).reshape((rows,) + (1,) * (x.ndim - 1))


def _problem(x: Array, delta: Array, eps: Any, lower: Any, upper: Any) -> tuple[Any, Array, Array, Array]:
    """The namespace and, in float64, eps as (rows, 1) or (1, 1), ``|delta|`` and the room of every element.

    Still elements have no room. No element moves further than eps, so more room than that is cut to it: the solution
    stays what it is, powers of ``room/eps`` cannot overflow, and an infinite bound needs no case of its own.
    """
    xp = _namespace(x)
    x, delta, eps, lower, upper = (_cast(a, x, xp.float64) for a in (x, delta, eps, lower, upper))
    eps = eps.reshape((-1, 1))
    room = xp.clip(xp.where(delta < 0, x - lower, upper - x), 0.0, None)
    room = xp.where(delta == 0, 0.0, xp.where(room < eps, room, eps))
    return xp, eps, abs(delta), room


@np.errstate(all="ignore")
def sort_rescale(x: Array, delta: Array, eps: Any, p: float = 2, lower: Any = 0.0, upper: Any = 1.0) -> Array:
    """Return eta with ``||clip(x + eta*delta, lower, upper) - x||_p = eps`` per row, by sorting, for any finite p.

    With ``t = eta^p`` and the breakpoints ``t_k`` in order, the p-th power of the norm at breakpoint k is
    ``f(t_k) = sum_{i <= k} s_i^p + t_k * sum_{i > k} |delta_i|^p``. The first that reaches ``eps^p`` tells which
    elements are clipped; sums over these and over the others then give eta.

    Parameters
    ----------
    x, delta
        (rows, n) arrays, computed in float64.
    eps
        A number, or one per row.
    p
        Order of the norm, at least 1 and finite.
    lower, upper
        Bounds that broadcast to x, possibly infinite.

    Returns
    -------
    array
        (rows, 1). Where eps cannot be reached, the smallest eta that clips everything. PyTorch differentiates it; the
        derivatives are meant for rows with ``0 < eps < reach``.

    Examples
    --------
    >>> import numpy as np
    >>> sort_rescale(np.array([[0.2, 0.5, 0.9]]), np.array([[1.0, -1.0, 2.0]]), 0.6).round(4)
    array([[0.4183]])
    """
    xp, eps, size, room = _problem(x, delta, eps, lower, upper)
    unit, moves = xp.where(eps > 0, eps, 1.0), size > 0
    share = (room / unit) ** p

    # In logarithms, where no scale of delta and no p overflows; still elements and those without room come first.
    log_size = xp.log(size)
    breaks = xp.where(moves, xp.log(room) - log_size, -math.inf)
    order = xp.argsort(breaks, axis=1)
    ahead = xp.flip(p * _take(log_size, order), (1,))
    ahead = xp.flip(np.logaddexp.accumulate(ahead, axis=1) if xp is np else xp.logcumsumexp(ahead, 1), (1,))
    ahead = xp.concatenate((ahead[:, 1:], ahead[:, :1] * 0 - math.inf), axis=1)
    moved = xp.exp(p * (_take(breaks, order) - xp.log(unit)) + ahead)
    missing = xp.cumsum(_take(share, order), axis=1) + moved < 1
    first = xp.clip(xp.sum(missing, axis=1, keepdims=True), None, x.shape[1] - 1)
    clipped = breaks < _take(_take(breaks, order), first)

    # Running sums and logarithms round: near a breakpoint, the eta found says better what is clipped there.
    eta = xp.amax(xp.where(moves, room / xp.where(moves, size, 1.0), 0.0), axis=1, keepdims=True)
    reached = xp.sum(share, axis=1, keepdims=True) >= 1
    for _ in range(2):
        free = xp.where(clipped, 0.0, size)
        top = xp.amax(free if xp is np else free.detach(), axis=1, keepdims=True)
        rest = 1 - xp.sum(xp.where(clipped, share, 0.0), axis=1, keepdims=True)
        regular, top = reached & (top > 0) & (rest > 0), xp.where(top > 0, top, 1.0)
        slope = xp.sum((free / top) ** p, axis=1, keepdims=True)
        root = xp.where(regular, rest, 1.0) / xp.where(regular, slope, 1.0)
        eta = xp.where(regular, root ** (1 / p) * eps / top, eta)
        clipped = eta * size > room
    return eta


@np.errstate(all="ignore")
def bisect_rescale(x: Array, delta: Array, eps: Any, p: float = 2, lower: Any = 0.0, upper: Any = 1.0) -> Array:
    """Return eta with ``||clip(x + eta*delta, lower, upper) - x||_p = eps`` per row, by bisection to the last bit.

    Non-negative floating-point numbers are in the order of their bit patterns read as integers, so halving an interval
    of these finds, in 63 steps at any scale, the smallest number whose norm, as computed, is at least eps.

    Parameters
    ----------
    x, delta, eps, lower, upper
        As for :func:`sort_rescale`.
    p
        Order of the norm, from 1 to ``math.inf``.

    Returns
    -------
    array
        (rows, 1). Where eps cannot be reached, the smallest eta that clips everything; infinite if no float64 is large
        enough. Not differentiable.

    Examples
    --------
    >>> import numpy as np
    >>> bisect_rescale(np.array([[0.2, 0.5, 0.9]]), np.array([[1.0, -1.0, 2.0]]), 0.6).round(4)
    array([[0.4183]])
    """
    xp, eps, size, room = _problem(x, delta, eps, lower, upper)
    unit = xp.where(eps > 0, eps, 1.0)

    def is_enough(moved: Array) -> Array:
        share = moved / unit
        if p == math.inf:
            return xp.amax(share, axis=1, keepdims=True) >= 1
        return xp.sum(share**p, axis=1, keepdims=True) >= 1

    reached = is_enough(room)
    high = (size[:, :1] * 0 + math.inf).view(xp.int64)
    low = high * 0 - 1
    while (high - low > 1).any():
        middle = low + (high - low) // 2
        moved = middle.view(xp.float64) * size
        over = xp.where(reached, is_enough(xp.where(moved < room, moved, room)), (moved >= room).all(1)[:, None])
        low, high = xp.where(over, low, middle), xp.where(over, middle, high)
    return high.view(xp.float64)


def naive_perturb(x: Array, delta: Array, eps: Any, p: float = 2, lower: Any = 0.0, upper: Any = 1.0) -> Array:
    """Return ``clip(x + eps*delta/||delta||_p, lower, upper)``, which clipping leaves with a norm of at most eps.

    Parameters
    ----------
    x, delta
        (rows, n) arrays, computed in their own dtype.
    eps, p, lower, upper
        As for :func:`bisect_rescale`.

    Returns
    -------
    array
        Like x.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[0.2, 0.5, 0.9]])
    >>> v = naive_perturb(x, np.array([[1.0, -1.0, 2.0]]), 0.6)
    >>> float(np.linalg.norm(v - x).round(4))
    0.3606
    """
    xp = _namespace(x)
    eps, lower, upper = (_cast(a, x, x.dtype) for a in (eps, lower, upper))
    norm = xp.linalg.norm(delta, p, 1, True)
    return xp.clip(x + delta * (eps.reshape((-1, 1)) / xp.where(norm > 0, norm, 1.0)), lower, upper)


def norm64(v: Any, x: Any, p: float = 2) -> Array:
    """Return the p-norm of every row of ``v - x``, taken in float64 without overflow.

    Parameters
    ----------
    v, x
        (rows, n) arrays that NumPy can read.
    p
        Order of the norm, from 1 to ``math.inf``.

    Returns
    -------
    array
        (rows,).

    Examples
    --------
    >>> import numpy as np
    >>> norm64(np.array([[3.0, 4.0], [3e300, 4e300]]), np.zeros((2, 2)))
    array([5.e+000, 5.e+300])
    """
    z = np.abs(np.asarray(v, np.float64) - np.asarray(x, np.float64))
    top = z.max(axis=1)
    if p == math.inf:
        return top
    unit = np.where(top > 0, top, 1.0)
    return unit * ((z / unit[:, None]) ** p).sum(axis=1) ** (1 / p) * (top > 0)


def directions(kind: str, rows: int, n: int, seed: Any) -> Array:
    """Return random directions of a kind: easy ones, and those that are hard to solve for.

    Parameters
    ----------
    kind
        One of `KINDS`: Gaussian, Cauchy, log-normal over several orders of magnitude, tied (four sizes, one of them 0),
        geometric (powers of ten from 1 to 1e-99).
    rows, n
        Their number and length.
    seed
        A number, or a generator to draw from.

    Returns
    -------
    array
        (rows, n) in float64.

    Examples
    --------
    >>> import numpy as np
    >>> np.unique(abs(directions("tied", 2, 50, seed=0)))
    array([0. , 0.5, 1. , 3. ])
    """
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], (rows, n))
    if kind == "gaussian":
        return rng.standard_normal((rows, n))
    if kind == "cauchy":
        return rng.standard_cauchy((rows, n))
    if kind == "lognormal":
        return signs * rng.lognormal(sigma=3, size=(rows, n))
    if kind == "tied":
        return signs * rng.choice([0.0, 0.5, 1.0, 3.0], (rows, n))
    if kind == "geometric":  # with equal rooms, each breakpoint is ten times the one before
        return signs * rng.permuted(np.tile(10.0 ** -(np.arange(n) % 100), (rows, 1)), axis=1)
    raise ValueError(f"kind is {kind!r}, expected one of {KINDS}")
