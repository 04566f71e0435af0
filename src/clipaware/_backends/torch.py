"""PyTorch: derivatives in closed form around a solver of kernels, on a CPU NumPy's and on an NVIDIA GPU Triton's, or of
plain tensor operations elsewhere.

Eagerly, an ``autograd.Function`` whose backward runs on blocks of rows and saves nothing but the inputs and a number
or two per row. Dynamo does not take a Function with forward mode, so under ``torch.compile`` the solve is one opaque
operator without derivatives, and ``_derivatives.implicit`` puts them back in operations that every transform can
follow.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch

from clipaware import _check, _derivatives, _fast, _traced
from clipaware._backends import numpy as host
from clipaware._problem import DOUBLE, SINGLE, ZERO, Block, Numerics, Problem, bound_ahead
from clipaware._traced import Rows

Array = Any

GROUP = 2**19  # elements solved together on a CPU
BATCH = 2**26  # and elsewhere, where it bounds the memory that is needed on the way
TRACES = False
TAKES_ALL_AXES = False
FLOATS = {getattr(torch, name): name for name in _check.FLOATS}

# --- array functions --------------------------------------------------------------------------------------------------

where = torch.where
sqrt = torch.sqrt
sign = torch.sign
signbit = torch.signbit
clip = torch.clamp


def power(a: Array, p: float) -> Array:
    """a^p by way of float64, since a float32 power may be biased, which a sum does not average out."""
    return torch.pow(widen(a), p).to(a.dtype)


def minimum(a: Array, b: Array) -> Array:
    return torch.clamp(a, max=b)


def maximum(a: Array, b: Array) -> Array:
    return torch.clamp(a, min=b)


def fold(combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
    """Values per row of each tile, added up or maximised over the tiles of a row."""
    if len(tiles) == 1:
        return widen(values[0])
    total = widen(torch.zeros((like.shape[0], values[0].shape[1]), device=like.device))
    for (rows, *_), value in zip(tiles, values, strict=True):
        total[rows] = total[rows] + value if combine == "sum" else torch.maximum(total[rows], widen(value))
    return total


def row_sum(a: Array) -> Array:
    return torch.sum(a, dim=-1, keepdim=True, dtype=_wide(a))


def row_dot(u: Array, v: Array) -> Array:
    return row_sum(u * v)


def row_sums(t: Array, breakpoints: Array, dp: Array, wp: Array) -> Array:
    """(rows, 2): the sum of dp over t < breakpoints, and of wp over the rest."""
    clipped = t >= breakpoints
    return torch.cat((row_sum(torch.where(clipped, 0.0, dp)), row_sum(torch.where(clipped, wp, 0.0))), dim=1)


def row_max(a: Array) -> Array:
    return torch.amax(a, dim=-1, keepdim=True)


def row_top(delta: Array) -> Array:
    """The largest |delta|."""
    return row_max(abs(delta))


def any_true(condition: Array) -> bool:
    """Whether it is true anywhere; inside a transform, which cannot tell, it may be."""
    return _is_traced(condition) or bool(condition.any())


def _wide(a: Array) -> torch.dtype:
    return torch.float32 if a.device.type == "mps" else torch.float64


def _working(numerics: Numerics) -> torch.dtype:
    return torch.float32 if numerics is SINGLE else torch.float64


def widen(a: Array) -> Array:
    return a.to(_wide(a))


def narrow(a: Array, numerics: Numerics) -> Array:
    return a.to(_working(numerics))


def cast_like(a: Array, like: Array) -> Array:
    return a.to(like.dtype)


def constant(a: Array) -> Array:
    return a.detach()


def pow2(a: Array, numerics: Numerics) -> Array:
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    limit = 126 if numerics is SINGLE else 1022
    exponent = torch.floor(torch.log2(a)).clamp(-limit, limit)
    return torch.exp2(torch.where(abs(exponent) <= 8, 0.0, exponent))


def runs(n: int, count: int, length: int) -> Array:
    """Indices of `count` evenly spaced runs of `length` neighbours."""
    starts = torch.linspace(0, n - length, count, dtype=torch.float64).long()
    return (starts[:, None] + torch.arange(length)).reshape(-1)


def sensible(block: Block, top: Array) -> bool:
    """Whether everything is finite and x inside its bounds. Then they are in order, too."""
    inside = (block.lower <= block.x) & (block.x <= block.upper) & torch.isfinite(block.x)
    return bool(inside.all() & (top < torch.inf).all())


def senseless(block: Block, x: Array) -> Array:
    """Per row, 1 where x, not yet clipped, is not finite or the bounds are not in order, else 0."""
    fine = torch.isfinite(x) & (block.lower <= block.upper)
    return row_max((~fine).to(torch.float32))


def explain(x: Array, delta: Array, lower: Array, upper: Array) -> None:
    _check.values([fetch(a.double()) for a in (x, delta, lower, upper)], torch.finfo(x.dtype).eps)


# --- what the API asks for --------------------------------------------------------------------------------------------


def is_array(a: Any) -> bool:
    return isinstance(a, torch.Tensor)


def dtype_name(a: Array) -> str:
    return FLOATS.get(a.dtype) or str(a.dtype).removeprefix("torch.")


def shape(a: Array) -> tuple[int, ...]:
    return tuple(a.shape)


def device_name(a: Array) -> str:
    return str(a.device)


def _is_traced(a: Array) -> bool:
    """Whether the values of a are not to be had: under torch.compile, and inside a transform of torch.func."""
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(a)


def _is_transformed() -> bool:
    """Whether this runs under torch.compile, or inside a transform of torch.func."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _is_differentiated(tensors: tuple[Any, ...]) -> bool:
    """Whether anything may ask for derivatives; if not, there is no need for a Function and its overhead."""
    if torch.autograd.forward_ad._current_level >= 0 or _is_transformed():
        return True
    return torch.is_grad_enabled() and any(type(a) is not float and a.requires_grad for a in tensors)


def values_of(a: Array) -> Any:
    """The array for its values to be checked; None where that would wait for a device or a trace."""
    return None if _is_traced(a) or a.device.type != "cpu" else fetch(a.double())


def fetch(a: Array) -> Any:
    return a if isinstance(a, float) else a.detach().cpu().numpy()


def permute(a: Array, axes: tuple[int, ...]) -> Array:
    return a.permute(axes)


def reshape(a: Array, shape: tuple[int, ...]) -> Array:
    return a if a.shape == shape else a.reshape(shape)


def broadcast_to(a: Array, shape: tuple[int, ...]) -> Array:
    return a.expand(shape)


def sum_axes(a: Array, axes: tuple[int, ...]) -> Array:
    return a.sum(axes) if axes else a


def ndim(a: Array) -> int:
    return int(a.ndim)


def number(value: Any, like: Array) -> Any:
    """A bound for all rows and elements."""
    if _takes_numbers(value, like):
        return _rounded(float(value), like.dtype)
    return torch.full((1, 1), value, dtype=like.dtype, device=like.device)


def wide_number(value: Any, like: Array) -> Any:
    """An eps for all rows, in float64: it is never rounded to x's dtype."""
    if _takes_numbers(value, like):
        return float(value)
    return torch.full((1, 1), value, dtype=_wide(like), device=like.device)


def _takes_numbers(value: Any, like: Array) -> bool:
    """Whether a number may remain one, for the kernels to take as an argument: none that is nearly 0, see there."""
    return not _is_transformed() and _kernels_of(like) is not None and (value == 0 or abs(value) > 1e-300)


@lru_cache(maxsize=256)
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _tensor(a: Any, dtype: torch.dtype, like: Array) -> Array:
    """An eps or a bound, which may have remained a number."""
    return torch.full((1, 1), a, dtype=dtype, device=like.device) if isinstance(a, float) else a


def _as_tensors(problem: Problem) -> Problem:
    """The problem without numbers."""
    x, eps = problem.x, _tensor(problem.eps, torch.float64, problem.x)
    lower, upper = _tensor(problem.lower, x.dtype, x), _tensor(problem.upper, x.dtype, x)
    return Problem(x, problem.delta, eps, lower, upper, problem.p, problem.weights)


def _detached(a: Array) -> Array:
    return a.detach()


def as_eps(eps: Any, like: Array) -> Array:
    return _as_tensor(eps, _wide(like), like)


def as_bound(bound: Any, like: Array) -> Array:
    return _as_tensor(bound, like.dtype, like)


def returned(a: Any, like: Array) -> Array:
    """NumPy's array as one of this framework, of that dtype and on that device."""
    return torch.from_numpy(a).to(like.device, like.dtype)


def _as_tensor(a: Any, dtype: torch.dtype, like: Array) -> Array:
    if isinstance(a, torch.Tensor):
        return a.to(like.device, dtype)
    return torch.from_numpy(np.array(a, np.float64)).to(like.device, dtype)


def result(a: Array, x: Array) -> Array:
    """In x's dtype, or float32 if that is wider."""
    return a.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def true_rows(condition: Array) -> Any:
    _check.values_are_known(not _is_traced(condition), "torch.compile and torch.func")
    return np.flatnonzero(fetch(condition))


def _numerics(x: Array) -> Numerics:
    return DOUBLE if x.dtype == torch.float64 else SINGLE


def _numpy_can(x: Array) -> bool:
    """Whether NumPy's backend takes this tensor: its kernels, or its operations with less overhead than PyTorch's.

    NumPy has no bfloat16 of its own, but kernels know how to round to it.
    """
    return bool(x.device.type == "cpu" and (x.dtype != torch.bfloat16 or host.kernels() is not None))


@cache
def gpu_kernels() -> Any:
    """The GPU's kernels; None without Triton, and where to import it after TensorFlow would abort the process."""
    if not torch.cuda.is_available() or ("tensorflow" in sys.modules and "triton" not in sys.modules):
        return None
    try:
        from clipaware._kernels import triton
    except ImportError:
        return None
    return triton


def _kernels_of(x: Array) -> Any:
    """The kernels that take this tensor, if any."""
    return gpu_kernels() if x.is_cuda and not torch.version.hip else None


def _on_host(a: Array) -> Any:
    """The tensor's own memory, or a float32 copy of bfloat16."""
    a = a.detach().resolve_neg()
    return (a.float() if a.dtype == torch.bfloat16 else a).numpy()


def _groups(problem: Problem, checked: bool = True) -> Any:
    x = problem.x
    on_cpu = x.device.type == "cpu"
    size = GROUP if on_cpu else BATCH
    return _traced.groups(_this, problem, _numerics(x), size, size, checked=checked and on_cpu) if x.numel() else ()


def _solved(
    problem: Problem, mode: str, write: bool, checked: bool = True, certify: bool = True
) -> tuple[Array, Array, Array]:
    """v (empty unless `write`), eta and status, of tensors whose values are at hand."""
    x = problem.x
    kernels = _kernels_of(x)
    if kernels is not None:
        return kernels.solve(problem, mode, write)  # type: ignore[no-any-return]
    if _numpy_can(x):
        v, eta, status = host.solve(problem.mapped(_on_host), mode, write, checked, dtype_name(x), certify)
        out = torch.from_numpy(v).to(x.dtype) if write else x.new_empty(0)
        return out, torch.from_numpy(eta), torch.from_numpy(status)
    problem = problem.mapped(_detached)
    x, numerics = problem.x, _numerics(x)
    rows, n = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if write else x.new_empty(0)
    eta = torch.zeros((rows, 1), dtype=_wide(x), device=x.device)
    status = torch.full((rows, 1), ZERO, device=x.device)
    on_cpu = x.device.type == "cpu"
    height = max(1, (GROUP if on_cpu else BATCH) // max(n, 1))
    for start in range(0, rows if n else 0, height):
        part = slice(start, start + height)
        some = problem.mapped(partial(_rows_of, rows=part, count=rows))
        block = _block(some)
        group = _fast.Rows(_this, block, some.eps, some.p, numerics, x, 8 * x.dtype.itemsize)
        v, eta[part], status[part] = _fast.solve(group, mode, write, certify)
        if write:
            out[part] = v
    flagged = torch.nonzero(status[:, 0] < 0)[:, 0]
    for some_rows in torch.split(flagged, height):
        some = problem.mapped(partial(_rows_of, rows=some_rows, count=rows)).mapped(lambda a: _on_host(a.cpu()))
        if checked and on_cpu and not host.values_are_fine(some):
            explain(x, problem.delta, problem.lower, problem.upper)
            checked = False  # all rows have been looked at
        found = host.solve_flagged(some, mode, write, dtype_name(x))
        for into, part_found in zip((out, eta, status), found, strict=True):
            if part_found is not None:
                into[some_rows] = torch.from_numpy(part_found).to(x.device, into.dtype)
    return out, eta, status


def _rows_of(a: Array, rows: Any, count: int) -> Array:
    """Some of so many rows, of something that has one per row or one for all."""
    return a if a.shape[0] == 1 < count else a[rows]


@torch.library.custom_op("clipaware::solve", mutates_args=())
def _solve_op(
    x: torch.Tensor,
    delta: torch.Tensor,
    eps: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    p: float,
    mode: str,
    write: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _solved(Problem(x, delta, eps, lower, upper, p), mode, write, checked=False)


@_solve_op.register_vmap
def _vmapped_solve_op(info: Any, in_dims: Any, *arguments: Any) -> Any:
    return _vmapped(_solve_op, info, in_dims, arguments)


@_solve_op.register_fake
def _(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, p: float, mode: str, write: bool
) -> tuple[Array, ...]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if write else x.new_empty(0)
    return out, eps.new_empty((x.shape[0], 1)), torch.empty((x.shape[0], 1), dtype=torch.int64, device=x.device)


class _Perturb(torch.autograd.Function):
    """(v, eta, status) of tensors in rows form, with the derivatives of docs/math.md."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *problem, mode, write = arguments
        return _solved(Problem(*problem), mode, write)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *problem, ctx.p, _, ctx.write = inputs
        v, eta, status = output
        ctx.numbers = [a if type(a) is float else None for a in problem]
        tensors = [None if type(a) is float else a for a in problem]
        ctx.mark_non_differentiable(status, *([] if ctx.write else [v]))
        ctx.save_for_backward(*tensors, eta, status)
        ctx.save_for_forward(*tensors, eta, status)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any, _: Any) -> Any:
        problem, eta, status = _saved(ctx)
        bars = _backward(problem, eta, status, g if ctx.write else None, h, ctx.needs_input_grad)
        given = (None if bar is None else bar.to(a.dtype) for bar, a in zip(bars, problem.arrays(), strict=True))
        return *given, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        problem, eta, status = _saved(ctx)
        problem = _as_tensors(problem)
        x, eps, numerics = problem.x, problem.eps, _numerics(problem.x)
        block = _block(problem)
        part = _derivatives.partials(_this, block, eps, eta, status, problem.p, numerics)

        def tangent(dot: Any, like: Array) -> Array:
            return torch.zeros_like(like) if dot is None else dot.to(like.dtype)

        x_dot, delta_dot, low_dot, high_dot = (
            tangent(dot, like) for dot, like in zip((*tangents[:2], *tangents[3:5]), block, strict=True)
        )
        c_dot = bound_ahead(_this, block.delta, low_dot, high_dot)
        v_dot, eta_dot = _derivatives.jvp(_this, part, x_dot, delta_dot, c_dot, tangent(tangents[2], eps), numerics)
        return (v_dot.to(x.dtype) if ctx.write else None), eta_dot, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _vmapped(_Perturb.apply, info, in_dims, arguments)


def _saved(ctx: Any) -> tuple[Problem, Array, Array]:
    """The problem, eta and status; numbers are not saved as tensors are."""
    *tensors, eta, status = ctx.saved_tensors
    arrays = [number if a is None else a for a, number in zip(tensors, ctx.numbers, strict=True)]
    return Problem.of(arrays, ctx.p), eta, status


class _Eagerly(torch.autograd.Function):
    """The same outside of torch.func: if there is no setup_context, PyTorch need not bind arguments at every call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = _Perturb.forward(*arguments)
        _Perturb.setup_context(ctx, arguments, output)
        return output

    backward = _Perturb.backward
    jvp = _Perturb.jvp


def _vmapped(function: Any, info: Any, in_dims: Any, arguments: Any) -> Any:
    """The rule for vmap: one more dimension is more rows."""
    size = info.batch_size
    *tensors, p, mode, write = arguments
    batched = [
        t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims[:5], strict=True)
    ]
    rows = batched[0].shape[1]
    v, eta, status = function(
        *(t.expand(size, rows, t.shape[2]).reshape(size * rows, t.shape[2]) for t in batched), p, mode, write
    )
    v = v.reshape(size, rows, -1) if write else v.expand(size, 0)
    return (v, eta.reshape(size, rows, 1), status.reshape(size, rows, 1)), (0, 0, 0)


def _block(problem: Problem) -> Block:
    """All of the problem, in the working dtype."""
    dtype = _working(_numerics(problem.x))
    return Block(*(a.to(dtype) for a in (problem.x, problem.delta, problem.lower, problem.upper)))


def _backward(problem: Problem, eta: Array, status: Array, g: Any, h: Any, needs: Any) -> list[Any]:
    """Gradients of x, delta, eps, lower and upper as far as they are needed, each of its argument's shape.

    Those of eps and the bounds are not rounded to half precision: there may be more to add up.
    """
    x = problem.x
    if (
        torch.is_grad_enabled()
        or _is_traced(x)
        or (g is not None and _is_traced(g))
        or (h is not None and _is_traced(h))
    ):
        return _bars(_as_tensors(problem), eta, status, g, h, needs)
    if _numpy_can(x):
        there = problem.mapped(_on_host)
        up = np.zeros((1, 1), there.x.dtype) if g is None else _on_host(g)
        down = None if h is None else _on_host(h)
        found = host.vjp(there, _on_host(eta), _on_host(status), up, down, needs)
        return [
            torch.from_numpy(bar).sum_to_size(a.shape) if need else None
            for bar, a, need in zip(found, problem.arrays(), needs[:5], strict=True)
        ]
    kernels = _kernels_of(x)
    if kernels is not None:
        up = torch.zeros((1, 1), dtype=x.dtype, device=x.device) if g is None else g
        wanted = needs[0], needs[1], needs[3] or needs[4]
        x_bar, delta_bar, eps_bar, c_bar = kernels.vjp(problem, eta, status, up, h, wanted)
        of_bounds: list[Any] = [None, None]
        if wanted[2]:
            lost = torch.isnan(eta)
            of_bounds = [torch.where(ahead | lost, c_bar, 0.0) for ahead in (problem.delta < 0, problem.delta > 0)]
        found = x_bar, delta_bar, eps_bar, *of_bounds
        return [
            bar.sum_to_size(a.shape) if need else None
            for bar, a, need in zip(found, problem.arrays(), needs[:5], strict=True)
        ]
    kinds = x.dtype, x.dtype, *(_wide(x),) * 3
    bars: list[Any] = [
        torch.zeros_like(a, dtype=kind) if need else None
        for a, kind, need in zip(problem.arrays(), kinds, needs[:5], strict=True)
    ]
    height = max(1, (GROUP if x.device.type == "cpu" else BATCH) // max(x.shape[1], 1))
    for start in range(0, x.shape[0] if x.shape[1] else 0, height):
        part = slice(start, start + height)

        def take(a: Any, part: slice = part) -> Any:
            return a if a is None or a.shape[0] == 1 < x.shape[0] else a[part]

        some = _bars(problem.mapped(take), take(eta), take(status), take(g), take(h), needs)
        for bar, more in zip(bars, some, strict=True):
            if bar is not None:
                take(bar).add_(more)
    return bars


def _bars(problem: Problem, eta: Array, status: Array, g: Any, h: Any, needs: Any) -> list[Any]:
    """Those gradients for all rows at once; differentiable again."""
    delta, numerics, block = problem.delta, _numerics(problem.x), _block(problem)
    part = _derivatives.partials(_this, block, problem.eps, eta, status, problem.p, numerics)
    g = torch.zeros_like(block.x) if g is None else g.to(block.x.dtype)
    h = torch.zeros_like(eta) if h is None else h
    x_bar, delta_bar, c_bar, eps_bar = _derivatives.vjp(_this, part, g, h, numerics)
    lost = torch.isnan(eta)
    found = (x_bar, delta_bar, eps_bar, torch.where(delta < 0, c_bar, 0.0), torch.where(delta > 0, c_bar, 0.0))
    return [
        torch.where(lost, torch.nan, bar).sum_to_size(a.shape) if need else None
        for bar, a, need in zip(found, problem.arrays(), needs[:5], strict=True)
    ]


def solve(problem: Problem, mode: str, write: bool) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status."""
    x, delta, eps, p = problem.x, problem.delta, problem.eps, problem.p
    if not torch.compiler.is_compiling():
        if _is_differentiated(problem.arrays()):
            function: Any = _Perturb.apply if _is_transformed() else _Eagerly.apply
            v, eta, status = function(*problem.arrays(), p, mode, write)
        else:
            v, eta, status = _solved(problem, mode, write, certify=not write)
        return v if write else None, eta, status
    v, eta, status = _solve_op(*(a.detach() for a in problem.arrays()), p, mode, write)
    around, eta = _derivatives.implicit(_this, _block(problem), eps, eta, status, p, _numerics(x))
    # Rows that make no sense have no derivatives either: NaN times everything there, nothing elsewhere.
    poison = torch.where(torch.isnan(eta), torch.nan, 0.0).to(x.dtype)
    around = around.to(x.dtype) + poison * (x + delta + eps.to(x.dtype))
    # The values are the solver's, rounding and all.
    return v + (around - around.detach()) if write else None, eta, status


def reach(problem: Problem) -> Array:
    """The largest norm of every row."""
    arrays = problem.x, problem.delta, problem.lower, problem.upper
    traced = _is_transformed() and any(_is_traced(a) for a in arrays)
    kernels = None if traced else _kernels_of(problem.x)
    if kernels is not None:
        return kernels.reach(problem)
    x, delta, lower, upper = (a.detach() for a in arrays)
    eps = torch.ones((1, 1), dtype=_wide(x), device=x.device)
    problem = Problem(x, delta, eps, lower, upper, problem.p, problem.weights)
    if traced:
        block = _block(problem)
        block = Block(torch.clamp(block.x, block.lower, block.upper), block.delta, block.lower, block.upper)
        everything = (slice(None), slice(None), 0)
        rows = Rows(_this, lambda _: block, [everything], True, eps, problem.p, eps, _numerics(x))
        return torch.where(senseless(block, x) > 0, torch.nan, _traced.reach(rows))
    if _numpy_can(x):
        return torch.from_numpy(host.reach(problem.mapped(_on_host), dtype_name(x)))
    found = torch.zeros((x.shape[0], 1), dtype=_wide(x), device=x.device)
    for part, group, blank in _groups(problem):
        found[part] = _traced.reach(group)
        if blank is not None:
            found[part] = torch.where(blank, torch.nan, found[part])
    return found


def summary(problem: Problem, v: Array) -> tuple[Array, Array, Array]:
    """Of v: norm, naive norm and share of elements at their bounds."""
    if _numpy_can(problem.x):
        norm, naive, clipped = host.summary(problem.mapped(_on_host), _on_host(v))
        return torch.from_numpy(norm), torch.from_numpy(naive), torch.from_numpy(clipped)
    problem, v = _as_tensors(problem).mapped(_detached), v.detach()
    x = problem.x
    rows, n = x.shape
    found = torch.zeros((3, rows, 1), dtype=_wide(x), device=x.device)
    for part, group, _ in _groups(problem):
        found[:, part] = torch.stack(_traced.summary(group, v[part], n))
    return found[0], found[1], found[2]


def vjp(problem: Problem, eta: Array, status: Array, g: Array) -> tuple[Array, ...]:
    """Gradients of x, delta, eps, lower and upper; those of the bounds summed to their rows form."""
    given = _as_tensors(problem).mapped(_detached)
    x = given.x
    per_row = given.eps.expand(x.shape[0], 1)
    given = Problem(x, given.delta, per_row, given.lower, given.upper, given.p, given.weights)
    with torch.no_grad():
        x_bar, delta_bar, *others = _backward(given, eta.detach(), status, g.detach(), None, (True,) * 5)
    return x_bar.to(x.dtype), delta_bar.to(x.dtype), *others


# --- random numbers ---------------------------------------------------------------------------------------------------


log = torch.log


def random(x: Array, seed: Any) -> tuple[Any, Any]:
    """Two functions that draw as many as an array like x has: normal numbers, and uniform ones from 0 to below 1."""
    own = seed is None or isinstance(seed, torch.Generator)
    generator = seed if own else torch.Generator(x.device).manual_seed(int(seed))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    options: Any = {"generator": generator, "dtype": dtype, "device": x.device}
    return lambda like: torch.randn(like.shape, **options), lambda like: torch.rand(like.shape, **options)


def is_traced(x: Array) -> bool:
    return _is_traced(x)


def filtered(a: Array, gain: Any, axes: tuple[int, ...]) -> Array:
    """a with its spectrum over these axes, the last of them halved, multiplied by NumPy's array `gain`."""
    spectrum = torch.fft.rfftn(a, dim=axes) * torch.from_numpy(gain).to(a)
    return torch.fft.irfftn(spectrum, [a.shape[axis] for axis in axes], axes)


# --- batches and models -----------------------------------------------------------------------------------------------


def take(a: Array, rows: Any) -> Array:
    """These rows, by their numbers."""
    return a[torch.from_numpy(rows).to(a.device)]


def concatenate(pieces: list[Array]) -> Array:
    return torch.cat(pieces)


def evaluated(model: Any, x: Array) -> Array:
    """What the model makes of x, of which nobody asks for derivatives."""
    with torch.no_grad():
        return model(x)


def gradient(loss: Any, x: Array) -> tuple[Array, Array]:
    """The gradient in x of a loss, and what comes with it: `loss` returns both."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value, scores = loss(leaf)
        found = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
    return found, scores.detach()


def log_softmax(scores: Array) -> Array:
    return torch.log_softmax(scores, 1)


def highest(scores: Array) -> Array:
    return torch.amax(scores, 1, keepdim=True)


def labels_like(labels: Any, x: Array) -> Array:
    return torch.from_numpy(labels).to(x.device)


_this = sys.modules[__name__]
