"""The public functions: signatures, documentation, and the way from anybody's axes to (rows, n)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clipaware import _check
from clipaware._dispatch import public
from clipaware._problem import UNREACHABLE, ZERO, Problem
from clipaware._report import Report

Array = Any
ArrayT = TypeVar("ArrayT")


class _Call(NamedTuple):
    """The arguments of a call, checked, as a problem for the backend `be`.

    Its arrays are (rows, n) or, for a backend whose arrays may be spread over devices along any axis, have all of x's
    axes, in that order.
    """

    be: Any
    problem: Problem
    shape: tuple[int, ...]
    order: tuple[int, ...]  # x's axes: those of the batch, then those of a sample
    samples: int  # how many axes are a sample's
    kept: tuple[int, ...]  # x's shape with the axes of a sample reduced to 1
    shapes: tuple[tuple[int, ...], ...]  # in which eps and the bounds came
    span: dict[str, int]  # for a backend to which all axes go: how many are a sample's

    def rows(self, a: Array) -> Array:
        """From x's shape to (rows, n)."""
        return _to_rows(self.be, a, self.order, self.be.shape(self.problem.x))

    def unrows(self, a: Array) -> Array:
        """Back from (rows, n) to x's shape."""
        if self.order == tuple(range(len(self.order))):
            return self.be.reshape(a, self.shape)
        a = self.be.reshape(a, tuple(self.shape[i] for i in self.order))
        return self.be.permute(a, tuple(self.order.index(i) for i in range(len(self.order))))


def _to_rows(be: Any, a: Array, order: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    return be.reshape(a if order == tuple(range(len(order))) else be.permute(a, order), shape)


def _call_of(x: Any, delta: Any, eps: Any, p: Any, bounds: Any, axis: Any, flat: bool = False) -> _Call:
    """The call; `flat` if its problem must be (rows, n) for every backend."""
    be = _check.array(x, "x")
    all_axes = be.TAKES_ALL_AXES and not flat
    _check.floating(be, x, "x")
    _check.same_kind(be, x, delta, "delta")
    p = _check.norm_order(p)
    shape = be.shape(x)
    sample = _check.sample_axes(axis, len(shape))
    first = len(shape) - len(sample)
    in_order = sample == tuple(range(first, len(shape)))
    if in_order:
        # The usual case, in less time.
        batch = tuple(range(first))
        rows, n, kept = math.prod(shape[:first]), math.prod(shape[first:]), shape[:first] + (1,) * len(sample)
    else:
        batch = tuple(i for i in range(len(shape)) if i not in sample)
        rows, n = math.prod([shape[i] for i in batch]), math.prod([shape[i] for i in sample])
        kept = tuple(1 if i in sample else s for i, s in enumerate(shape))
    order = batch + sample
    form = tuple([shape[i] for i in order]) if all_axes else (rows, n)

    eps_shape: tuple[int, ...] = ()
    if _check.is_number(eps):
        _check.eps_values(eps)
        eps = be.wide_number(eps, x)
    else:
        _check.companion(be, x, eps, "eps")
        eps_shape = _check.array(eps, "eps").shape(eps)
        _check.eps_shape(eps_shape, tuple([shape[i] for i in batch]), kept)
        _check.eps_values(eps)
        each = form[:first] + (1,) * len(sample) if all_axes else (rows, 1)
        eps = be.reshape(be.as_eps(eps, x), (1,) * len(form) if eps_shape == () else each)

    low, high = _check.bounds_pair(bounds)
    layout = shape, batch, sample
    lower, low_shape = _bound(be, x, low, "the lower bound", layout, all_axes)
    upper, high_shape = _bound(be, x, high, "the upper bound", layout, all_axes)
    if not in_order:
        x, delta = _to_rows(be, x, order, form), _to_rows(be, delta, order, form)
    elif not all_axes:
        x, delta = be.reshape(x, form), be.reshape(delta, form)
    shapes = eps_shape, low_shape, high_shape
    span = {"samples": len(sample)} if all_axes else {}
    problem = Problem(x, delta, eps, lower, upper, p)
    return _Call(be, problem, shape, order, len(sample), kept, shapes, span)


def _bound(
    be: Any, x: Array, bound: Any, name: str, layout: tuple[tuple[int, ...], ...], all_axes: bool
) -> tuple[Array, Any]:
    """A bound in rows form, or with all axes, and the shape in which it came."""
    if _check.is_number(bound):
        return be.number(bound, x), ()
    _check.companion(be, x, bound, name)
    bound = be.as_bound(bound, x)
    came, (shape, batch, sample) = be.shape(bound), layout
    _check.bound_shape(came, shape, name)
    full, target = _expanded(came, shape, batch, sample)
    bound = be.reshape(bound, full)
    if all_axes:
        return _to_rows(be, bound, batch + sample, tuple([full[i] for i in batch + sample])), came
    bound = be.broadcast_to(bound, target)
    rows, n = math.prod([target[i] for i in batch]), math.prod([target[i] for i in sample])
    return _to_rows(be, bound, batch + sample, (rows, n)), came


@public
def perturb(
    x: ArrayT,
    delta: ArrayT,
    eps: Any,
    *,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> ArrayT:
    """Return ``v = clip(x + eta*delta, *bounds)`` with ``||v - x||_p = eps`` for every sample.

    Parameters
    ----------
    x
        Samples inside their bounds: a floating array of NumPy, PyTorch, JAX, TensorFlow, CuPy, Dask or the Array API.
    delta
        Directions, of x's framework, device, shape and dtype. Their scale does not matter.
    eps
        The norm to deliver: a number, or one per sample (the batch's shape, or that with axes of length 1).
    p
        Order of the norm, from 1 to ``math.inf``.
    bounds
        Pair of lower and upper bound: numbers, ``None`` for no bound, or arrays that broadcast to x.
    axis
        What one sample spans. ``"batch"``: everything but the first axis, or all of a 1-D array. ``None``: the whole
        array. Otherwise an axis, or a tuple of them.
    mode
        ``"equal"``; ``"at_most"``, which leaves a perturbation that is small enough alone and never exceeds eps, not
        even by rounding; ``"at_least"``, which leaves one that is large enough alone.
    unreachable
        What to do where even ``reach(x, delta)`` is less than eps: ``"maximize"`` (everything at its bound), ``"nan"``,
        or ``"raise"`` an :class:`UnreachableError`. With ``mode="at_most"`` nothing is unreachable.

    Returns
    -------
    array
        Like x. Differentiable in x, delta, eps and the bounds where the framework differentiates.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> x = np.array([0.2, 0.5, 0.9])
    >>> v = ca.perturb(x, np.array([1.0, -1.0, 2.0]), 0.6)
    >>> v.round(4)
    array([0.6183, 0.0817, 1.    ])
    >>> float(np.linalg.norm(v - x).round(12))
    0.6
    """
    return _perturb(_call_of(x, delta, eps, p, bounds, axis), mode, unreachable)  # type: ignore[no-any-return]


def _perturb(call: _Call, mode: str, unreachable: str) -> Array:
    v, *_ = _solve(call, mode, unreachable, write=True)
    return call.unrows(v)


@public
def rescale(
    x: ArrayT,
    delta: ArrayT,
    eps: Any,
    *,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> ArrayT:
    """Return the scale ``eta >= 0`` with ``||clip(x + eta*delta, *bounds) - x||_p = eps`` for every sample.

    This is the mathematical solution. :func:`perturb` goes one step further and allows for the rounding of the array
    that it returns, so prefer it where the array is what you need. In x's dtype, eta may overflow or be subnormal if
    delta's scale makes it so.

    Parameters
    ----------
    x, delta, eps, p, bounds, axis, mode, unreachable
        As for :func:`perturb`.

    Returns
    -------
    array
        Like x, with the axes of a sample reduced to length 1.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> eta = ca.rescale(np.array([0.2, 0.5, 0.9]), np.array([1.0, -1.0, 2.0]), 0.6)
    >>> eta.round(4)
    array([0.4183])
    """
    return _rescale(_call_of(x, delta, eps, p, bounds, axis), mode, unreachable)  # type: ignore[no-any-return]


def _rescale(call: _Call, mode: str, unreachable: str) -> Array:
    _, eta, _ = _solve(call, mode, unreachable, write=False)
    return call.be.reshape(call.be.cast_like(eta, call.problem.x), call.kept)


def _solve(call: _Call, mode: str, unreachable: str, write: bool) -> tuple[Array, Array, Array]:
    """v (if it is to be written) and eta in rows form, and the status of every row."""
    _check.option(mode, _check.MODES, "mode")
    _check.option(unreachable, _check.UNREACHABLE, "unreachable")
    be = call.be
    v, eta, status = be.solve(call.problem, mode, write, **call.span)
    if unreachable == "maximize" or mode == "at_most":
        return v, eta, status
    missed = _missed(call, status)
    if unreachable == "nan":
        return be.where(missed, math.nan, v) if write else v, be.where(missed, math.nan, eta), status
    rows = be.true_rows(missed)
    if len(rows):
        reached = be.fetch(be.reach(call.problem, **call.span)).ravel()[rows]
        asked = np.broadcast_to(be.fetch(call.problem.eps), missed.shape).ravel()[rows]
        raise _check.UnreachableError(rows, reached, asked)
    return v, eta, status


def _missed(call: _Call, status: Array) -> Array:
    """Where eps was out of reach; also where nothing moves and something is asked for."""
    return (status == UNREACHABLE) | ((status == ZERO) & (call.problem.eps > 0))


@public
def reach(x: ArrayT, delta: ArrayT, *, p: float = 2, bounds: tuple[Any, Any] = (0, 1), axis: Any = "batch") -> ArrayT:
    """Return the largest norm that a perturbation along delta can have inside the bounds: where all of it is clipped.

    Parameters
    ----------
    x, delta, p, bounds, axis
        As for :func:`perturb`.

    Returns
    -------
    array
        Like x but float32 at least, with the axes of a sample reduced to length 1; infinite without a bound. It does
        not carry gradients.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> ca.reach(np.array([0.2, 0.5, 0.9]), np.array([1.0, -1.0, 2.0])).round(4)
    array([0.9487])
    """
    return _reach(_call_of(x, delta, 0.0, p, bounds, axis))  # type: ignore[no-any-return]


def _reach(call: _Call) -> Array:
    found = call.be.reach(call.problem, **call.span)
    return call.be.reshape(call.be.result(found, call.problem.x), call.kept)


@public
def report(
    x: Any,
    delta: Any,
    eps: Any,
    *,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> Report:
    """Say per sample what :func:`perturb` delivers, what naive scaling would have, and what is possible.

    Parameters
    ----------
    x, delta, eps, p, bounds, axis, mode, unreachable
        As for :func:`perturb`.

    Returns
    -------
    Report
        With ``eps, eta, norm, naive_norm, reach, clipped, reachable``, arrays of x's framework and float32 at least.
        Printed, it is a table.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> x, delta = np.array([[0.2, 0.5, 0.9], [0.5, 0.5, 0.5]]), np.array([[1.0, -1.0, 2.0], [1.0, 1.0, 1.0]])
    >>> print(ca.report(x, delta, 0.6))
    sample  eps        eta  norm  naive_norm      reach    clipped  reachable
         0  0.6    0.41833   0.6   0.3605551  0.9486833  0.3333333        yes
         1  0.6  0.3464102   0.6         0.6  0.8660254          0        yes
    """
    return _report(_call_of(x, delta, eps, p, bounds, axis), mode, unreachable)


def _report(call: _Call, mode: str, unreachable: str) -> Report:
    be = call.be
    v, _, status = _solve(call, mode, unreachable, write=True)
    _, eta, _ = _solve(call, mode, unreachable, write=False)  # more exactly: the array is polished anyway
    norm, naive_norm, clipped = be.summary(call.problem, v, **call.span)
    reached = be.reach(call.problem, **call.span)
    per_sample = be.where(status == status, call.problem.eps, eta)  # one for all samples becomes one for each
    found = [be.result(a, call.problem.x) for a in (per_sample, eta, norm, naive_norm, reached, clipped)]
    return Report(*(be.reshape(a, call.kept) for a in (*found, ~_missed(call, status))))


@public
def perturb_vjp(
    x: ArrayT,
    delta: ArrayT,
    eps: Any,
    grad: ArrayT,
    *,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT, ArrayT]:
    """Pull `grad`, a gradient with respect to the result of :func:`perturb`, back to its arguments.

    ``v = clip(x + eta*delta)`` has a closed-form derivative, with eta the implicit function of all the arguments that
    it is; see ``docs/math.md``. For frameworks without automatic differentiation, and for tests of those with.

    Parameters
    ----------
    grad
        Like x.
    x, delta, eps, p, bounds, axis, mode, unreachable
        As for :func:`perturb`.

    Returns
    -------
    x_bar, delta_bar, eps_bar, lower_bar, upper_bar : array
        Each of the shape of its argument, summed over what was broadcast; float32 at least for the last three.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> x, delta = np.array([0.2, 0.5, 0.9]), np.array([1.0, -1.0, 2.0])
    >>> x_bar, delta_bar, eps_bar, _, upper_bar = ca.perturb_vjp(x, delta, 0.6, np.ones(3))
    >>> x_bar, float(upper_bar)
    (array([1., 1., 0.]), 1.0)
    """
    call = _call_of(x, delta, eps, p, bounds, axis)
    _check.same_kind(call.be, x, grad, "grad")
    return _pull(call, grad, mode, unreachable)  # type: ignore[no-any-return]


def _pull(call: _Call, grad: Array, mode: str, unreachable: str) -> Any:
    be = call.be
    # A result of NaN is a constant: at those samples nothing is pulled back.
    _, eta, status = _solve(call, mode, "maximize" if unreachable == "nan" else unreachable, write=False)
    g = call.rows(grad)
    if unreachable == "nan" and mode != "at_most":
        g = be.where(_missed(call, status), 0.0, g)
    x_bar, delta_bar, eps_bar, *bound_bars = be.vjp(call.problem, eta, status, g, **call.span)
    eps_shape, *bound_shapes = call.shapes
    eps_bar = (
        be.sum_axes(eps_bar, tuple(range(be.ndim(eps_bar)))) if eps_shape == () else be.reshape(eps_bar, eps_shape)
    )
    bars = [_unbroadcast(call, bar, shape) for bar, shape in zip(bound_bars, bound_shapes, strict=True)]
    return call.unrows(x_bar), call.unrows(delta_bar), *(be.result(bar, call.problem.x) for bar in (eps_bar, *bars))


def _expanded(
    shape: tuple[int, ...], x_shape: tuple[int, ...], batch: tuple[int, ...], sample: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A bound's shape with all of x's axes, and that as far expanded as it must be to become (rows or 1, n or 1)."""
    full = (1,) * (len(x_shape) - len(shape)) + shape
    target = list(full)
    for axes in (batch, sample):
        if any(full[i] != 1 for i in axes):
            for i in axes:
                target[i] = x_shape[i]
    return full, tuple(target)


def _unbroadcast(call: _Call, bar: Array, shape: tuple[int, ...]) -> Array:
    """A gradient in rows form, summed to the shape that its bound came in."""
    be, order = call.be, call.order
    batch = len(call.shape) - call.samples
    full, target = _expanded(shape, call.shape, order[:batch], order[batch:])
    target = full if call.span else target
    bar = be.permute(be.reshape(bar, tuple(target[i] for i in order)), tuple(order.index(i) for i in range(len(order))))
    return be.reshape(
        be.sum_axes(bar, tuple(i for i, (f, t) in enumerate(zip(full, target, strict=True)) if f != t)), shape
    )


@public
def l2_clipping_aware_rescaling(x: ArrayT, delta: ArrayT, eps: Any, a: Any = 0.0, b: Any = 1.0) -> ArrayT:
    """Return eta with ``||clip(x + eta*delta, a, b) - x||_2 = eps``, under the name and signature of the paper's code.

    The first axis always counts samples, and the result has x's number of dimensions. For new code, :func:`rescale`.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> x, delta = np.full((2, 3), 0.5), np.array([[1.0, 2.0, 3.0], [3.0, -3.0, 3.0]])
    >>> ca.l2_clipping_aware_rescaling(x, delta, 0.6).round(4)
    array([[0.1604],
           [0.1155]])
    """
    return rescale(x, delta, eps, p=2, bounds=(a, b), axis=tuple(range(1, _check.array(x, "x").ndim(x))))
