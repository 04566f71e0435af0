"""Dask: lazy arrays in, lazy arrays out; what is computed on a block is NumPy's.

Where every sample lies within one block, blocks are problems for NumPy, one by one. Where samples are spread over
blocks they are solved in a fixed number of rounds, by ``_rounds``: each reads the arrays anew, a block at a time, and
adds up a few numbers per sample. Here, arrays keep their axes: what there is per sample has its axes at length 1, and
what a round knows of it along a further one. ``_dispatch.public`` calls the public functions under their names here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import DataNode, GraphNode, convert_legacy_graph
from dask.base import clone_key, tokenize
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from clipaware import _check, _math, _rounds, targets
from clipaware._backends import numpy as host
from clipaware._math import DOUBLE, SINGLE, Block, Numerics
from clipaware._report import Report

Array = Any

TALLIES = 3  # rounds that narrow the bracket, between the first look and the one that writes
TILE = 2**17  # elements of a block that are worked on at a time

# --- what the checks ask for ------------------------------------------------------------------------------------------


def is_array(a: Any) -> bool:
    return isinstance(a, da.Array)


def dtype_name(a: Array) -> str:
    return str(a.dtype)


def ndim(a: Array) -> int:
    return int(a.ndim)


def shape(a: Array) -> tuple[int, ...]:
    if any(math.isnan(n) for n in a.shape):
        raise ValueError(
            f"a dask array has shape {a.shape}, expected known chunk sizes; call its compute_chunk_sizes() first"
        )
    return tuple(map(int, a.shape))


def device_name(a: Array) -> str:
    return ""


def values_of(a: Array) -> None:
    """None: values are not looked at before they are computed."""


def fetch(a: Array) -> Any:
    """As a NumPy array."""
    return a.compute()


# --- the problem ------------------------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """The arguments of a call, checked, with all of x's axes; those that are not Dask's are NumPy's."""

    x: Array
    delta: Array
    eps: Array  # the axes of a sample at length 1, or all of them
    lower: Array  # each axis as in x, or 1
    upper: Array
    p: float
    sample: tuple[int, ...]
    eps_shape: tuple[int, ...]
    bound_shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def split(self) -> bool:
        """Whether there are samples in more than one block."""
        return any(self.x.numblocks[i] > 1 for i in self.sample)

    @property
    def numerics(self) -> Numerics:
        return DOUBLE if self.x.dtype == np.float64 else SINGLE

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self[:5]

    def again(self, number: int) -> _Problem:
        """The same arrays to be read once more: under one name, Dask would keep them in memory from round to round."""
        again = [_renamed(a, f"round {number}") if isinstance(a, da.Array) else a for a in self.arrays]
        return self._replace(**dict(zip(self._fields, again, strict=False)))


def _problem(x: Any, delta: Any, eps: Any, p: Any, bounds: Any, axis: Any) -> _Problem:
    this = _check.array(x, "x")
    for a, name in ((x, "x"), (delta, "delta")):
        if isinstance(a, da.Array) and not isinstance(a._meta, np.ndarray):
            raise TypeError(f"{name} has chunks of {type(a._meta)}, expected NumPy arrays")
    _check.floating(this, x, "x")
    _check.same_kind(this, x, delta, "delta")
    p = _check.norm_order(p)
    lengths = shape(x)
    sample = _check.sample_axes(axis, x.ndim)
    kept = tuple(1 if i in sample else n for i, n in enumerate(lengths))

    eps_shape: tuple[int, ...] = ()
    if _check.is_number(eps):
        _check.eps_values(eps)
        eps = np.full((1,) * x.ndim, eps, np.float64)
    else:
        _check.companion(this, x, eps, "eps")
        eps_shape = _check.array(eps, "eps").shape(eps)
        _check.eps_shape(eps_shape, tuple(lengths[i] for i in range(x.ndim) if i not in sample), kept)
        _check.eps_values(eps)
        if eps_shape != kept or not kept:
            eps = eps[tuple(None if i in sample or not eps_shape else slice(None) for i in range(x.ndim))]
        eps = _alongside(eps, x, np.float64)

    low, high = _check.bounds_pair(bounds)
    lower, low_shape = _bound(x, low, "the lower bound")
    upper, high_shape = _bound(x, high, "the upper bound")
    delta = delta.rechunk(x.chunks)
    return _Problem(x, delta, eps, lower, upper, p, sample, eps_shape, (low_shape, high_shape))


def _bound(x: Array, bound: Any, name: str) -> tuple[Array, tuple[int, ...]]:
    """A bound with all of x's axes, and the shape in which it came."""
    if _check.is_number(bound):
        return np.full((1,) * x.ndim, bound, x.dtype), ()
    this = _check.array(x, "x")
    _check.companion(this, x, bound, name)
    came = _check.array(bound, name).shape(bound)
    _check.bound_shape(came, x.shape, name)
    return _alongside(bound[(None,) * (x.ndim - len(came))], x, x.dtype), came


def _alongside(a: Array, x: Array, dtype: Any) -> Array:
    """In x's chunks, along all axes that are as long as x's."""
    if a.size == 1 and not isinstance(a, da.Array):
        return np.asarray(a, dtype)
    chunks = tuple(c if n > 1 else (1,) for c, n in zip(x.chunks, a.shape, strict=True))
    a = a if isinstance(a, da.Array) else da.from_array(np.asarray(a), chunks=chunks)
    return a.rechunk(chunks).astype(dtype)


def _renamed(a: Array, seed: str) -> Array:
    """The same array from tasks of other names, but for what is in memory anyway: read or computed anew.

    As ``dask.graph_manipulation.clone``, which loses the dependencies of materialized layers (Dask 2026.8).
    """
    graph = a.__dask_graph__()
    held = {name for name, layer in graph.layers.items() if _is_data(layer)}
    names = {name: name if name in held else clone_key(name, seed) for name in graph.layers}
    keys = {key for name, layer in graph.layers.items() if name not in held for key in layer.get_output_keys()}
    layers: dict[str, Any] = {}
    for name, layer in graph.layers.items():
        if name in held:
            layers[name] = layer
        elif isinstance(layer, Blockwise):
            layers[names[name]] = layer.clone(keys=keys, seed=seed)[0]
        else:
            tasks = convert_legacy_graph(dict(layer), keys | set(layer))
            others = {key: clone_key(key, seed) for task in tasks.values() for key in task.dependencies & keys}
            others |= {key: clone_key(key, seed) for key in tasks}
            layers[names[name]] = MaterializedLayer(
                {others[key]: task.substitute(others, key=others[key]) for key, task in tasks.items()}
            )
    dependencies = {names[name]: {names[other] for other in of_it} for name, of_it in graph.dependencies.items()}
    new = HighLevelGraph(layers, dependencies)
    return da.Array(new, names[a.name], a.chunks, meta=a._meta)


def _is_data(layer: Any) -> bool:
    """Whether all that a layer has is arrays, or their futures."""
    if not isinstance(layer, MaterializedLayer):
        return False
    return not any(isinstance(v, GraphNode | tuple | list) and not isinstance(v, DataNode) for v in layer.values())


# --- blocks -----------------------------------------------------------------------------------------------------------


def _blockwise(function: Callable[..., Array], arrays: Any, ndim: int, dtype: Any, width: int, **options: Any) -> Array:
    """`function` of the blocks of arrays with as many axes or, for numbers per sample, one more, which the result has
    at that width unless it is 0. Arrays of NumPy go with every block."""
    axes = tuple(range(ndim))
    arguments: list[Any] = []
    for i, a in enumerate(arrays):
        arguments += [a, (*axes, ndim + 1 + i)[: a.ndim] if isinstance(a, da.Array) else None]
    options = {name: value for name, value in options.items() if value is not None}
    settings = options.pop("settings", {})
    token = tokenize(function.__qualname__, arrays, ndim, str(dtype), width, settings, options)
    return da.blockwise(
        partial(_quiet, function, **settings),
        (*axes, ndim) if width else axes,
        *arguments,
        dtype=dtype,
        meta=np.empty((0,) * (ndim + bool(width)), dtype),
        name=f"{function.__name__.strip('_')}-{token}",
        concatenate=True,
        new_axes={ndim: width} if width else None,
        **options,
    )


def _quiet(function: Callable[..., Array], *blocks: Array, **settings: Any) -> Array:
    with np.errstate(all="ignore"):
        return function(*blocks, **settings)


def _map(function: Callable[..., Array], problem: _Problem, *more: Array, width: int = 0, **settings: Any) -> Array:
    """`function` of every block of the problem and of `more`: an array like x, or with a width so many numbers per
    sample and block of it."""
    arrays, x = (*problem.arrays, *more), problem.x
    dtype = np.dtype(np.float64) if width else x.dtype
    lengths = dict.fromkeys(problem.sample, 1) if width else None
    settings = {"sample": problem.sample, **settings}
    return _blockwise(function, arrays, x.ndim, dtype, width, adjust_chunks=lengths, settings=settings)


def _per_sample(function: Callable[..., Array], width: int, *arrays: Array, **settings: Any) -> Array:
    """`function` of numbers per sample, so many of them."""
    return _blockwise(function, arrays, arrays[0].ndim - 1, np.dtype(np.float64), width, settings=settings)


def _reduced(parts: Array, problem: _Problem, merge: Callable[..., Array], **settings: Any) -> Array:
    """Numbers per sample from those of its blocks, as a tree."""
    merged = partial(_merged, merge=merge, settings=settings)
    return da.reduction(
        parts,
        _unchanged,
        merged,
        axis=problem.sample,
        keepdims=True,
        dtype=parts.dtype,
        combine=merged,
        meta=parts._meta,
    )


def _unchanged(a: Array, axis: Any, keepdims: bool) -> Array:
    return a


def _merged(a: Array, axis: Any, keepdims: bool, merge: Callable[..., Array], settings: Any) -> Array:
    with np.errstate(all="ignore"):
        return merge(a, axis=axis, **settings)


def _rows(a: Array, sample: tuple[int, ...], like: Array) -> Array:
    """(rows, n) of a block, or with 1 for either."""
    batch = tuple(i for i in range(a.ndim) if i not in sample)
    target = list(a.shape)
    for axes in (batch, sample):
        if any(a.shape[i] != 1 for i in axes):
            for i in axes:
                target[i] = like.shape[i]
    order = (*batch, *sample)
    size = math.prod([target[i] for i in batch]), math.prod([target[i] for i in sample])
    return np.broadcast_to(a, target).transpose(order).reshape(size)


def _in_rows(sample: tuple[int, ...], x: Array, *others: Array) -> Any:
    return [_rows(a, sample, x) for a in (x, *others)]


def _unrows(a: Array, sample: tuple[int, ...], like: Array) -> Array:
    order = (*(i for i in range(like.ndim) if i not in sample), *sample)
    return a.reshape([like.shape[i] for i in order]).transpose(np.argsort(order))


def _kept(a: Array, sample: tuple[int, ...], like: Array) -> Array:
    """(rows, width) with the axes of a sample at length 1."""
    return a.reshape(*(1 if i in sample else n for i, n in enumerate(like.shape)), a.shape[1])


def _tiles(rows: int, n: int) -> Iterator[tuple[slice, list[slice]]]:
    """Rows that are worked on together, and their columns in turn."""
    height, width = max(1, TILE // max(n, 1)), min(n, TILE) or 1
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows)), [slice(j, min(j + width, n)) for j in range(0, n, width)]


def _cut(a: Array, across: slice, along: slice | None = None) -> Array:
    """A tile of an array in rows form; without columns, of one with numbers per row."""
    a = a[across] if a.shape[0] > 1 else a
    return a if along is None or a.shape[1] == 1 else a[:, along]


def _swept(
    function: Callable[..., Array], merge: Callable[..., Array], arrays: list[Array], numbers: list[Array], width: int
) -> Array:
    """(rows, width): numbers per row of a block, from its tiles."""
    rows, n = arrays[0].shape
    found = np.empty((rows, width))
    for across, columns in _tiles(rows, n):
        some = [_cut(a, across) for a in numbers]
        parts = [function(*(_cut(a, across, along) for a in arrays), *some) for along in columns]
        found[across] = merge(np.stack(parts, axis=1), axis=(1,))[:, 0] if len(parts) > 1 else parts[0]
    return found


# --- the rounds, of a block -------------------------------------------------------------------------------------------


def _look(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float, measure: bool
) -> Array:
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    function = partial(_rounds.look, p=p, numerics=_numerics(x), measure=measure)
    found = _swept(function, partial(_rounds.merged_looks, p=p), arrays, [], len(_rounds.Look._fields))
    return _kept(found, sample, x)


def _tally(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, state: Array, *, sample: Any, p: float, bins: int
) -> Array:
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    function = partial(_rounds.tally, p=p, bins=bins)
    numbers = [state.reshape(-1, state.shape[-1])]
    return _kept(_swept(function, _rounds.merged_tallies, arrays, numbers, 4 * (bins + 2)), sample, x)


def _try(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, state: Array, *, sample: Any, p: float
) -> Array:
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    function = partial(_rounds.tried, p=p, numerics=_numerics(x))
    numbers = [state.reshape(-1, state.shape[-1])]
    found = _swept(function, partial(_merged_powers, p=p), arrays, numbers, len(_rounds.TRIES))
    return _kept(found, sample, x)


def _merged_powers(a: Array, axis: Any, p: float) -> Array:
    return a.max(axis=axis, keepdims=True) if p == math.inf else a.sum(axis=axis, keepdims=True)


def _write(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, state: Array, *, sample: Any, missed: bool
) -> Array:
    arrays = _in_rows(sample, x, delta, lower, upper)
    state, eps = state.reshape(-1, state.shape[-1]), _rows(eps, sample, x)
    if missed:
        now = _rounds.columns(_rounds.State, state)
        state = _rounds.stacked(now._replace(lost=now.lost.astype(bool) | _is_missed(now.status, eps)))
    v = np.empty(arrays[0].shape, x.dtype)
    for across, columns in _tiles(*v.shape):
        for along in columns:
            tile = [*(_cut(a, across, along) for a in arrays), _cut(state, across), _numerics(x)]
            v[across, along] = _rounds.written(*tile)
    return _unrows(v, sample, x)


def _numerics(x: Array) -> Numerics:
    return DOUBLE if x.dtype == np.float64 else SINGLE


def _is_missed(status: Array, eps: Array) -> Array:
    """Where eps was out of reach; also where nothing moves and something is asked for."""
    return (status == _math.UNREACHABLE) | ((status == _math.ZERO) & (eps > 0))


# --- samples within one block -----------------------------------------------------------------------------------------


def _solve_whole(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float, mode: str, missed: bool
) -> Array:
    """v."""
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    v, _, status = host.solve(*[*arrays, p, mode, True, False])
    lost = _is_missed(status, arrays[2]) & missed
    return _unrows(np.where(lost, math.nan, v).astype(x.dtype) if lost.any() else v, sample, x)


def _scale_whole(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float, mode: str
) -> Array:
    """State, as far as there is something to say."""
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    _, eta, status = host.solve(*[*arrays, p, mode, False, False])
    one = np.ones_like(eta)
    state = _rounds.State(one, one, one, one, one, one, status, np.isnan(eta), eta)
    return _kept(_rounds.stacked(state), sample, x)


# --- solving ----------------------------------------------------------------------------------------------------------


def _solved(problem: _Problem, mode: str, write: bool) -> Array:
    """The State of every sample; if `write`, for v, and else for eta."""
    p, x, width = problem.p, problem.x, len(_rounds.State._fields)
    if not problem.split:
        return _map(_scale_whole, problem, width=width, p=p, mode=mode)
    eps = problem.eps[..., None]
    n = math.prod([x.shape[i] for i in problem.sample])
    measure = write and mode == "at_most"
    looks = _map(_look, problem.again(0), width=len(_rounds.Look._fields), p=p, measure=measure)
    looks = _reduced(looks, problem, _rounds.merged_looks, p=p)
    settings: Any = {"p": p, "n": n, "numerics": problem.numerics, "mode": mode, "measured": measure}
    state = _per_sample(_rounds.begun, width, looks, eps, **settings)
    bins = _rounds.bins_for(math.prod([max(x.chunks[i]) for i in problem.sample]))
    for number in range(0 if p == math.inf else TALLIES - measure):
        tallies = _map(_tally, problem.again(1 + number), state, width=4 * (bins + 2), p=p, bins=bins)
        tallies = _reduced(tallies, problem, _rounds.merged_tallies)
        state = _per_sample(_rounds.narrowed, width, state, tallies, eps, p=p, bins=bins)
    state = _per_sample(_rounds.held, width, state, mode=mode, measured=measure)
    if measure:
        tries = _map(_try, problem.again(TALLIES), state, width=len(_rounds.TRIES), p=p)
        state = _per_sample(_rounds.chosen, width, state, _reduced(tries, problem, _merged_powers, p=p), p=p)
    return state


def _column(state: Array, name: str) -> Array:
    return state[..., _rounds.State._fields.index(name)]


def _options(mode: Any, unreachable: Any) -> bool:
    """Check them; whether samples that cannot reach eps become NaN."""
    _check.option(mode, _check.MODES, "mode")
    _check.option(unreachable, _check.UNREACHABLE, "unreachable")
    _check.values_are_known(unreachable != "raise" or mode == "at_most", "Dask, which computes later")
    return bool(unreachable == "nan" and mode != "at_most")


def perturb(
    x: Array,
    delta: Array,
    eps: Any,
    *,
    p: float = 2,
    bounds: Any = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> Array:
    """See clipaware.perturb."""
    problem = _problem(x, delta, eps, p, bounds, axis)
    return _perturbed(problem, mode, _options(mode, unreachable))


def _perturbed(problem: _Problem, mode: str, missed: bool) -> Array:
    if not problem.split:
        return _map(_solve_whole, problem, p=problem.p, mode=mode, missed=missed)
    return _map(_write, problem.again(-1), _solved(problem, mode, write=True), missed=missed)


def rescale(
    x: Array,
    delta: Array,
    eps: Any,
    *,
    p: float = 2,
    bounds: Any = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> Array:
    """See clipaware.rescale."""
    problem = _problem(x, delta, eps, p, bounds, axis)
    missed = _options(mode, unreachable)
    state = _solved(problem, mode, write=False)
    eta = _column(state, "eta")
    if missed:
        eta = da.where(_is_missed(_column(state, "status"), problem.eps), math.nan, eta)
    return _cast(eta, x.dtype)


def _cast(a: Array, dtype: Any) -> Array:
    """In that dtype, without a warning of what overflows there."""
    return a.map_blocks(partial(_quiet, np.ndarray.astype), dtype, dtype=dtype)


def reach(x: Array, delta: Array, *, p: float = 2, bounds: Any = (0, 1), axis: Any = "batch") -> Array:
    """See clipaware.reach."""
    problem = _problem(x, delta, 0.0, p, bounds, axis)
    return _reached(problem).astype(_result(x))


def _result(x: Array) -> Any:
    return np.float64 if x.dtype == np.float64 else np.float32


def _reached(problem: _Problem) -> Array:
    return _norms(_map(_reach_of_block, problem, width=1, p=problem.p), problem)[..., 0]


def _reach_of_block(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float) -> Array:
    arrays = _in_rows(sample, x, delta, lower, upper)
    return _kept(host.reach(*[*arrays, p, None, False]), sample, x)


def _norms(parts: Array, problem: _Problem) -> Array:
    """Norms of samples from those of their blocks."""
    return _reduced(parts, problem, _merged_norms, p=problem.p)


def _merged_norms(a: Array, axis: Any, p: float) -> Array:
    largest = a.max(axis=axis, keepdims=True)
    if p == math.inf:
        return largest
    unit = np.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return np.where(largest < math.inf, unit * ((a / unit) ** p).sum(axis=axis, keepdims=True) ** (1 / p), largest)


def l2_clipping_aware_rescaling(x: Array, delta: Array, eps: Any, a: Any = 0.0, b: Any = 1.0) -> Array:
    """See clipaware.l2_clipping_aware_rescaling."""
    return rescale(x, delta, eps, bounds=(a, b), axis=tuple(range(1, x.ndim)))


# --- report -----------------------------------------------------------------------------------------------------------


def report(
    x: Array,
    delta: Array,
    eps: Any,
    *,
    p: float = 2,
    bounds: Any = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> Report:
    """See clipaware.report."""
    problem = _problem(x, delta, eps, p, bounds, axis)
    missed = _options(mode, unreachable)
    v, state = _perturbed(problem, mode, missed), _solved(problem, mode, write=False)
    length = _norms(_map(_length_of_block, problem.again(-2), width=1, p=problem.p), problem)
    parts = _map(_summary_of_block, problem.again(-3), v, length, width=3, p=problem.p)
    norms = _norms(parts[..., :2], problem)
    n = math.prod([x.shape[i] for i in problem.sample])
    clipped = parts[..., 2].sum(axis=problem.sample, keepdims=True) / max(n, 1)
    eta, status = _column(state, "eta"), _column(state, "status")
    out_of_reach = _is_missed(status, problem.eps)
    asked = da.where(status == status, problem.eps, eta)
    if missed:
        eta = da.where(out_of_reach, math.nan, eta)
    found = asked, eta, norms[..., 0], norms[..., 1], _reached(problem), clipped
    return Report(*[*(_cast(a, _result(x)) for a in found), ~out_of_reach])


def _length_of_block(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float) -> Array:
    """The norm of delta."""
    d = abs(_rows(delta, sample, x).astype(np.float64))
    return _kept(_merged_norms(d, axis=(1,), p=p) if d.size else np.zeros((len(d), 1)), sample, x)


def _summary_of_block(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    v: Array,
    length: Array,
    *,
    sample: Any,
    p: float,
) -> Array:
    """The norm of v - x, that of naive scaling, and how many elements are at their bounds."""
    x_rows, delta, eps, lower, upper, v = _in_rows(sample, x, delta, eps, lower, upper, v)
    length = length.reshape(-1, 1)

    def of_tile(x: Array, delta: Array, lower: Array, upper: Array, v: Array, eps: Array, length: Array) -> Array:
        block = Block(*(a.astype(np.float64) for a in (x, delta, lower, upper)))
        kept = np.clip(block.x, block.lower, block.upper)
        step = np.where(length > 0, block.delta / np.where(length > 0, length, 1.0) * eps, 0.0)
        naive = np.clip(kept + step, block.lower, block.upper)
        ahead = _math.bound_ahead(host, block.delta, block.lower, block.upper)
        norms = [_merged_norms(abs(a - kept), axis=(1,), p=p) for a in (v.astype(np.float64), naive)]
        return np.concatenate([*norms, ((v == ahead) & (delta != 0)).sum(axis=1, keepdims=True)], axis=1)

    def merge(a: Array, axis: Any) -> Array:
        norms = _merged_norms(a[..., :2], axis, p)
        return np.concatenate([norms, a[..., 2:].sum(axis=axis, keepdims=True)], axis=-1)

    if not x_rows.size:
        return _kept(np.zeros((len(x_rows), 3)), sample, x)
    return _kept(_swept(of_tile, merge, [x_rows, delta, lower, upper, v], [eps, length], 3), sample, x)


# --- derivatives ------------------------------------------------------------------------------------------------------

# The sums and maxima over a row that `_math.vjp` asks for one after another: a round for each.
REDUCTIONS = ("max", "sum", "sum", "sum")
REDUCTIONS_INF = ("max", "max", "sum", "sum", "sum")


class _Needed(Exception):
    """A sum or maximum over a row of which a block has but a part, which is the argument."""


class _Ledger:
    """NumPy's functions, but for sums and maxima over a row: those are what earlier rounds found, in their order."""

    def __init__(self, known: Array) -> None:
        self.known = iter([known[:, i : i + 1] for i in range(known.shape[1])])

    def __getattr__(self, name: str) -> Any:
        return getattr(host, name)

    def any_true(self, condition: Array) -> bool:
        return True  # in every block alike, so that they ask for the same sums

    def row_sum(self, a: Array) -> Array:
        return self._found(host.row_sum, a)

    def row_max(self, a: Array) -> Array:
        return self._found(host.row_max, a)

    def _found(self, reduction: Callable[[Array], Array], a: Array) -> Array:
        found = next(self.known, None)
        if found is None:
            raise _Needed(reduction(np.ascontiguousarray(a)))
        return found


def _pulled(p: float, arrays: list[Array], numbers: list[Array]) -> tuple[Array, ...]:
    """Gradients of a tile: of x, delta, the bound ahead and eps."""
    (x, delta, lower, upper, g), (eps, state, known) = arrays, numbers
    numerics, ledger = _numerics(x), _Ledger(known)
    block = Block(*(host.narrow(a, numerics) for a in (x, delta, lower, upper)))
    block = block._replace(x=np.clip(block.x, block.lower, block.upper))
    now = _rounds.columns(_rounds.State, state)
    parts = _math.partials(ledger, block, eps, now.eta, now.status, p, numerics)
    return _math.vjp(ledger, parts, host.narrow(g, numerics), 0.0, numerics)


def _next_reduction(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    g: Array,
    state: Array,
    *known: Array,
    sample: Any,
    p: float,
    kind: str,
) -> Array:
    """The first sum or maximum that is not known yet."""

    def of_tile(*arguments: Array) -> Array:
        try:
            _pulled(p, list(arguments[:5]), list(arguments[5:]))
        except _Needed as needed:
            return needed.args[0]
        raise AssertionError("all sums are known")

    arrays = _in_rows(sample, x, delta, lower, upper, g)
    found = _swept(of_tile, partial(_merged_kind, kind=kind), arrays, _numbers(eps, state, known, sample, x), 1)
    return _kept(found, sample, x)


def _numbers(eps: Array, state: Array, known: tuple[Array, ...], sample: Any, x: Array) -> list[Array]:
    state = state.reshape(-1, state.shape[-1])
    sums = np.concatenate([np.empty((len(state), 0)), *(a.reshape(-1, 1) for a in known)], axis=1)
    return [_rows(eps, sample, x), state, sums]


def _merged_kind(a: Array, axis: Any, kind: str) -> Array:
    return (a.max if kind == "max" else a.sum)(axis=axis, keepdims=True)


def _pull_block(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    g: Array,
    state: Array,
    *known: Array,
    sample: Any,
    p: float,
    of: str,
) -> Array:
    """The gradient of x, of delta, or of a bound as if it had been broadcast."""
    arrays = _in_rows(sample, x, delta, lower, upper, g)
    numbers = _numbers(eps, state, known, sample, x)
    out = np.empty(arrays[0].shape, x.dtype)
    for across, columns in _tiles(*out.shape):
        some = [_cut(a, across) for a in numbers]
        lost = _rounds.columns(_rounds.State, some[1]).lost > 0
        for along in columns:
            tiles = [_cut(a, across, along) for a in arrays]
            x_bar, delta_bar, c_bar, _ = _pulled(p, tiles, some)
            if of in ("lower", "upper"):
                c_bar = np.where(tiles[1] < 0 if of == "lower" else tiles[1] > 0, c_bar, 0.0)
            bar = x_bar if of == "x" else delta_bar if of == "delta" else c_bar
            out[across, along] = np.where(lost, math.nan, bar)
    return _unrows(out, sample, x)


def _pull_eps(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    g: Array,
    state: Array,
    *known: Array,
    sample: Any,
    p: float,
) -> Array:
    """The gradient of eps, which every block of a sample finds alike."""
    tile = [a[:, :1] for a in _in_rows(sample, x, delta, lower, upper, g)]
    numbers = _numbers(eps, state, known, sample, x)
    *_, eps_bar = _pulled(p, tile, numbers)
    lost = _rounds.columns(_rounds.State, numbers[1]).lost > 0
    return _kept(np.where(lost, math.nan, eps_bar), sample, x)


def perturb_vjp(
    x: Array,
    delta: Array,
    eps: Any,
    grad: Array,
    *,
    p: float = 2,
    bounds: Any = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> tuple[Array, ...]:
    """See clipaware.perturb_vjp."""
    problem = _problem(x, delta, eps, p, bounds, axis)
    _check.same_kind(_check.array(x, "x"), x, grad, "grad")
    missed = _options(mode, unreachable)
    g = grad.rechunk(x.chunks)
    state = _solved(problem, mode, write=False)
    if missed:
        # A result of NaN is a constant: at those samples nothing is pulled back.
        g = da.where(_is_missed(_column(state, "status"), problem.eps), 0.0, g).astype(x.dtype)
    known: list[Array] = []
    p = problem.p
    for number, kind in enumerate(REDUCTIONS_INF if p == math.inf else REDUCTIONS):
        again = problem.again(10 + number)
        parts = _map(_next_reduction, again, g, state, *known, width=1, p=p, kind=kind)
        known.append(_reduced(parts, problem, _merged_kind, kind=kind))

    def pulled(of: str) -> Array:
        return _map(_pull_block, problem.again(20), g, state, *known, p=p, of=of)

    bars = [
        _unbroadcast(pulled(of), came).astype(_result(x))
        for of, came in zip(("lower", "upper"), problem.bound_shapes, strict=True)
    ]
    eps_bar = _reduced(
        _map(_pull_eps, problem.again(21), g, state, *known, width=1, p=p), problem, _merged_kind, kind="max"
    )[..., 0]
    came = problem.eps_shape
    if came == ():
        eps_bar = eps_bar.sum()
    elif len(came) < x.ndim:
        eps_bar = eps_bar[tuple(0 if i in problem.sample else slice(None) for i in range(x.ndim))]
    return pulled("x"), pulled("delta"), eps_bar.astype(_result(x)), *bars


def _unbroadcast(bar: Array, came: tuple[int, ...]) -> Array:
    """Summed to the shape that a bound came in."""
    extra = bar.ndim - len(came)
    axes = tuple(i for i in range(bar.ndim) if i < extra or (came[i - extra] == 1 < bar.shape[i]))
    bar = bar.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else bar
    return bar[(0,) * extra]


# --- eps from other ways to say it (clipaware.targets) ----------------------------------------------------------------


def _of_samples(x: Array, axis: Any, function: Callable[[Array], Array]) -> tuple[Array, int]:
    """The sum of `function` of x over each sample, and the elements of one."""
    _check.floating(_check.array(x, "x"), x, "x")
    lengths, sample = shape(x), _check.sample_axes(axis, x.ndim)
    total = function(x.astype(_result(x))).sum(axis=sample, keepdims=True, dtype=np.float64)
    return total, math.prod([lengths[i] for i in sample])


def eps_from_snr(x: Array, snr: float, *, axis: Any = "batch") -> Array:
    """See clipaware.targets."""
    amplitude = targets.amplitude(snr, "snr")
    return (da.sqrt(_of_samples(x, axis, da.square)[0]) * amplitude).astype(_result(x))


def eps_from_psnr(x: Array, psnr: float, *, bounds: tuple[float, float] = (0, 1), axis: Any = "batch") -> Array:
    """See clipaware.targets."""
    return _same_for_all(x, axis, targets.peak(bounds) * targets.amplitude(psnr, "psnr"))


def eps_from_rms(x: Array, rms: float, *, axis: Any = "batch") -> Array:
    """See clipaware.targets."""
    targets.not_negative(rms, "rms")
    return _same_for_all(x, axis, rms)


def eps_from_contrast(x: Array, contrast: float, *, axis: Any = "batch") -> Array:
    """See clipaware.targets."""
    targets.not_negative(contrast, "contrast")
    total, n = _of_samples(x, axis, da.asarray)
    return da.where(total > 0, total * (contrast / math.sqrt(n or 1)), math.nan).astype(_result(x))


def _same_for_all(x: Array, axis: Any, per_root_n: float) -> Array:
    total, n = _of_samples(x, axis, da.zeros_like)
    return (total + per_root_n * math.sqrt(n)).astype(_result(x))


# --- random numbers ---------------------------------------------------------------------------------------------------


log = da.log


def random(x: Array, seed: Any) -> tuple[Any, Any]:
    """Two functions that draw as many as an array like x has: normal numbers, and uniform ones from 0 to below 1."""
    rng = seed if isinstance(seed, da.random.Generator) else da.random.default_rng(seed)

    def draw(function: Callable[..., Array], like: Array) -> Array:
        return function(size=like.shape, chunks=like.chunks).astype(_result(x))

    return partial(draw, rng.standard_normal), partial(draw, rng.random)


def cast_like(a: Array, like: Array) -> Array:
    return _cast(a, like.dtype)


def result(a: Array, x: Array) -> Array:
    """In x's dtype, or float32 if that is wider."""
    return a.astype(_result(x))


def is_traced(x: Array) -> bool:
    return False


def filtered(a: Array, gain: Any, axes: tuple[int, ...]) -> Array:
    """a with its spectrum over these axes, the last of them halved, multiplied by NumPy's array `gain`."""
    spread = [axis for axis in axes if a.numblocks[axis] > 1]
    if spread:
        raise ValueError(f"x has several chunks along {spread}, expected one along each axis of pink noise; rechunk it")
    return a.map_blocks(partial(host.filtered, gain=gain, axes=axes), dtype=a.dtype)
