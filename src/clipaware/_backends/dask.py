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
from operator import methodcaller
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import DataNode, GraphNode, convert_legacy_graph
from dask.base import clone_key, tokenize
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from clipaware import _check, _derivatives, _rounds, quantize, targets
from clipaware._backends import numpy as host
from clipaware._problem import DOUBLE, SINGLE, SLACK, UNREACHABLE, ZERO, Block, Numerics, Problem, bound_ahead
from clipaware._report import Report

Array = Any

TAKES_ALL_AXES = False  # from `_api`, which does not make problems for Dask
ROUNDS = 3  # between the first look and the one that writes
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
    lengths, x = shape(x), _without_nothing(x)
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


def _without_nothing(x: Array) -> Array:
    """Without chunks of length 0, such as a mask may leave."""
    chunks = tuple(tuple(n for n in lengths if n) or (0,) for lengths in x.chunks)
    return x if chunks == x.chunks else x.rechunk(chunks)


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
    chunks = tuple(c if n != 1 else (1,) for c, n in zip(x.chunks, a.shape, strict=True))
    a = a if isinstance(a, da.Array) else da.from_array(np.asarray(a), chunks=chunks)
    return a.rechunk(chunks).astype(dtype)


def _renamed(a: Array, seed: str) -> Array:
    """The same array from tasks of other names, but for what is in memory anyway: read or computed anew.

    ``dask.graph_manipulation.clone`` is the public way, but loses the dependencies of slices and of what was rechunked
    (Dask 2026.8). To rename them takes the classes of tasks, which are not public.
    """
    graph = a.__dask_graph__()
    held = {name for name, layer in graph.layers.items() if _is_data(layer)}
    names = {name: name if name in held else clone_key(name, seed) for name in graph.layers}
    every = {key for layer in graph.layers.values() for key in layer.get_output_keys()}
    keys = every - {key for name in held for key in graph.layers[name].get_output_keys()}
    layers: dict[str, Any] = {}
    for name, layer in graph.layers.items():
        if name in held:
            layers[name] = layer
        elif isinstance(layer, Blockwise):
            layers[names[name]] = layer.clone(keys=keys, seed=seed)[0]
        else:
            tasks = convert_legacy_graph(dict(layer), every | set(layer))
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


def _map(
    function: Callable[..., Array], problem: _Problem, *more: Array, width: int = 0, dtype: Any = None, **settings: Any
) -> Array:
    """`function` of every block of the problem and of `more`: an array like x, or with a width so many numbers per
    sample and block of it."""
    arrays, x = (*problem.arrays, *more), problem.x
    dtype = np.dtype(np.float64) if width else dtype or x.dtype
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
    # What is broadcast cannot be written to, and kernels would copy it.
    return (a if a.shape == tuple(target) else np.broadcast_to(a, target)).transpose(order).reshape(size)


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
    found = np.zeros((rows, width))
    if not n:
        return found
    for across, columns in _tiles(rows, n):
        some = [_cut(a, across) for a in numbers]
        parts = [function(*(_cut(a, across, along) for a in arrays), *some) for along in columns]
        found[across] = merge(np.stack(parts, axis=1), axis=(1,))[:, 0] if len(parts) > 1 else parts[0]
    return found


# --- the rounds, of a block -------------------------------------------------------------------------------------------


def _look(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float, mode: str, write: bool
) -> Array:
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    ulp = quantize.spacing(str(x.dtype))
    function = partial(_rounds.look, p=p, numerics=_numerics(x), ulp=ulp, mode=mode, write=write)
    merge = partial(_rounds.merged_looks, p=p, numerics=_numerics(x))
    found = _swept(function, merge, arrays, [], len(_rounds.Look._fields))
    return _kept(found, sample, x)


def _gather(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    state: Array,
    *,
    sample: Any,
    p: float,
    bins: int,
    tries: int,
) -> Array:
    """A tally, if there are bins, and the norms of some tries."""

    tally = partial(_rounds.tally, p=p, bins=bins)
    tried = partial(_rounds.tried, p=p, numerics=_numerics(x), count=tries)

    def of_tile(*tile: Array) -> Array:
        found = [tally(*tile)] if bins else []
        found += [tried(*tile)] if tries else []
        return np.concatenate(found, axis=1)

    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    merge = partial(_merged_parts, p=p, tries=tries)
    return _kept(_swept(of_tile, merge, arrays, [state.reshape(-1, state.shape[-1])], _width(bins, tries)), sample, x)


def _width(bins: int, tries: int) -> int:
    return 4 * (bins + 2) * bool(bins) + tries


def _merged_parts(a: Array, axis: Any, p: float, tries: int) -> Array:
    size = a.shape[-1] - tries
    tally, norms = _rounds.merged_tallies(a[..., :size], axis), _rounds.merged_norms(a[..., size:], axis, p)
    return np.concatenate([tally, norms], axis=-1)


def _advanced(state: Array, found: Array, p: float, bins: int, tries: int, mode: str) -> Array:
    """State, after a round."""
    size = found.shape[-1] - tries
    now = _rounds.narrowed(state, found[..., :size], p, bins) if bins else state
    return _rounds.chosen(state, now, found[..., size:], mode) if tries else now


def _write(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, state: Array, *, sample: Any) -> Array:
    arrays, state = _in_rows(sample, x, delta, eps, lower, upper), state.reshape(-1, state.shape[-1])
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
    return (status == UNREACHABLE) | ((status == ZERO) & (eps > 0))


def _ruled(state: Array, eps: Array, index: Array, unreachable: str) -> Array:
    """State, with samples that cannot reach their eps lost, or an error that names them."""
    now = _rounds.columns(_rounds.State, state)
    missed = _is_missed(now.status, eps)
    if unreachable == "raise":
        _refuse(missed, index, now.reach, eps)
    return _rounds.stacked(now._replace(lost=(now.lost > 0) | missed, scale=np.where(missed, math.nan, now.scale)))


def _refuse(missed: Array, index: Array, reach: Array, eps: Array) -> None:
    if missed.any():
        rows, most, asked = (np.broadcast_to(a, missed.shape)[missed] for a in (index, reach, eps))
        raise _check.UnreachableError(rows.astype(np.int64), most, asked)


# --- samples within one block -----------------------------------------------------------------------------------------


def _solve_whole(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    index: Array,
    *,
    sample: Any,
    p: float,
    mode: str,
    unreachable: str,
) -> Array:
    """v."""
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    v, _, status = host.solve(Problem.of(arrays, p), mode, write=True, checked=False)
    missed = _is_missed(status, arrays[2]) & (unreachable != "maximize")
    if missed.any():
        if unreachable == "raise":
            _refuse(missed, _rows(index, sample, x), host.reach(Problem.of(arrays, p), checked=False), arrays[2])
        v = np.where(missed, math.nan, v).astype(x.dtype)
    return _unrows(v, sample, x)


def _scale_whole(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float, mode: str
) -> Array:
    """State, as far as there is something to say."""
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    _, eta, status = host.solve(Problem.of(arrays, p), mode, write=False, checked=False)
    one, missed = np.ones_like(eta), _is_missed(status, arrays[2])
    reach = host.reach(Problem.of(arrays, p), checked=False) if missed.any() else one
    top = abs(arrays[1].astype(np.float64)).max(axis=1, keepdims=True, initial=0.0)
    state = (*[one] * 7, top, one, status, np.isnan(eta), reach, *[eta] * 5)
    return _kept(_rounds.stacked(state), sample, x)


# --- solving ----------------------------------------------------------------------------------------------------------


def _solved(problem: _Problem, mode: str, write: bool) -> Array:
    """The State of every sample; if `write`, for v, and else for eta."""
    p, x, width = problem.p, problem.x, len(_rounds.State._fields)
    if not problem.split:
        return _map(_scale_whole, problem, width=width, p=p, mode=mode)
    eps = problem.eps[..., None]
    n = math.prod([x.shape[i] for i in problem.sample])
    looks = _map(_look, problem.again(0), width=len(_rounds.Look._fields), p=p, mode=mode, write=write)
    looks = _reduced(looks, problem, _rounds.merged_looks, p=p, numerics=problem.numerics)
    half = x.dtype.itemsize == 2
    settings: Any = {"p": p, "n": n, "numerics": problem.numerics, "mode": mode, "write": write}
    state = _per_sample(_rounds.begun, width, looks, eps, ulp=quantize.spacing(str(x.dtype)), **settings)
    bins = 0 if p == math.inf else _rounds.bins_for(math.prod([max(x.chunks[i]) for i in problem.sample]))
    for number in range(ROUNDS if bins else bool(write)):
        # Where rounding matters, the array is measured as it would be written: of long rows, once a bracket is narrow.
        tries = _rounds.tries_for(n, half, p) if write else 0
        if number == 0 and bins and n >= _rounds.LONG:
            tries = 0
        if tries and bins:
            enough = 0.0 if half else problem.numerics.close / 2
            state = _per_sample(_rounds.aimed, width, state, eps, mode=mode, enough=enough)
        parts = _map(_gather, problem.again(1 + number), state, width=_width(bins, tries), p=p, bins=bins, tries=tries)
        found = _reduced(parts, problem, _merged_parts, p=p, tries=tries)
        state = _per_sample(_advanced, width, state, found, p=p, bins=bins, tries=tries, mode=mode)
    return _per_sample(_rounds.held, width, state, eps, mode=mode, write=write)


def _column(state: Array, name: str) -> Array:
    return state[..., _rounds.State._fields.index(name)]


def _options(mode: Any, unreachable: Any) -> str:
    """Check them; what becomes of samples that cannot reach eps, of which at_most has none."""
    _check.option(mode, _check.MODES, "mode")
    _check.option(unreachable, _check.UNREACHABLE, "unreachable")
    return "maximize" if mode == "at_most" else str(unreachable)


def _index(problem: _Problem) -> Array:
    """The number of each sample."""
    kept = [1 if i in problem.sample else n for i, n in enumerate(problem.x.shape)]
    return _alongside(np.arange(math.prod(kept)).reshape(kept), problem.x, np.float64)


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


def _perturbed(problem: _Problem, mode: str, unreachable: str) -> Array:
    if not problem.split:
        return _map(_solve_whole, problem, _index(problem), p=problem.p, mode=mode, unreachable=unreachable)
    if mode == "at_most":
        problem = problem._replace(eps=problem.eps * (1 - SLACK))
    return _map(_write, problem.again(-1), _settled(problem, mode, unreachable, write=True))


def _settled(problem: _Problem, mode: str, unreachable: str, write: bool) -> Array:
    """The State of every sample, also of those that cannot reach their eps."""
    state = _solved(problem, mode, write)
    if unreachable == "maximize":
        return state
    numbers = (a[..., None] for a in (problem.eps, _index(problem)))
    return _per_sample(_ruled, len(_rounds.State._fields), state, *numbers, unreachable=unreachable)


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
    return _cast(_column(_settled(problem, mode, _options(mode, unreachable), write=False), "scale"), x.dtype)


def _cast(a: Array, dtype: Any) -> Array:
    """In that dtype, without a warning of what overflows there."""
    return a.map_blocks(partial(_quiet, methodcaller("astype", dtype)), dtype=dtype)


def reach(x: Array, delta: Array, *, p: float = 2, bounds: Any = (0, 1), axis: Any = "batch") -> Array:
    """See clipaware.reach."""
    problem = _problem(x, delta, 0.0, p, bounds, axis)
    return _cast(_reached(problem), _result(x))


def _result(x: Array) -> Any:
    return np.float64 if x.dtype == np.float64 else np.float32


def _reached(problem: _Problem) -> Array:
    return _norms(_map(_reach_of_block, problem, width=1, p=problem.p), problem)[..., 0]


def _reach_of_block(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float) -> Array:
    arrays = _in_rows(sample, x, delta, eps, lower, upper)
    return _kept(host.reach(Problem.of(arrays, p), checked=False), sample, x)


def _norms(parts: Array, problem: _Problem) -> Array:
    """Norms of samples from those of their blocks."""
    return _reduced(parts, problem, _rounds.merged_norms, p=problem.p)


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
    unreachable = _options(mode, unreachable)
    v, state = _perturbed(problem, mode, unreachable), _settled(problem, mode, unreachable, write=False)
    # With what is read in the first round, and in the last.
    first, last = (problem.again(0), problem.again(-1)) if problem.split else (problem, problem)
    length = _reduced(_map(_length_of_block, first, width=2, p=problem.p), problem, _merged_lengths, p=problem.p)
    parts = _map(_summary_of_block, last, v, length, width=3, p=problem.p)
    norms = _norms(parts[..., :2], problem)
    n = math.prod([x.shape[i] for i in problem.sample])
    clipped = parts[..., 2].sum(axis=problem.sample, keepdims=True) / max(n, 1)
    eta, status = _column(state, "scale"), _column(state, "status")
    out_of_reach = _is_missed(status, problem.eps)
    asked = da.where(status == status, problem.eps, eta)
    found = asked, eta, norms[..., 0], norms[..., 1], _reached(first), clipped
    return Report(*[*(_cast(a, _result(x)) for a in found), ~out_of_reach])


def _length_of_block(x: Array, delta: Array, eps: Array, lower: Array, upper: Array, *, sample: Any, p: float) -> Array:
    """The largest |delta|, and the norm of delta over that, which subnormal numbers would not have the digits for."""
    d = abs(_rows(delta, sample, x).astype(np.float64))
    lengths = np.stack([d, np.ones_like(d)], axis=-1)
    return _kept(_merged_lengths(lengths, 1, p)[:, 0] if d.size else np.zeros((len(d), 2)), sample, x)


def _merged_lengths(a: Array, axis: Any, p: float) -> Array:
    largest = a[..., :1].max(axis=axis, keepdims=True)
    share = a[..., :1] / np.where(largest > 0, largest, 1.0)
    return np.concatenate([largest, _rounds.merged_norms(a[..., 1:] * share, axis, p)], axis=-1)


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
    length = length.reshape(-1, 2)

    def of_tile(x: Array, delta: Array, lower: Array, upper: Array, v: Array, eps: Array, length: Array) -> Array:
        block = Block(*(a.astype(np.float64) for a in (x, delta, lower, upper)))
        kept = np.clip(block.x, block.lower, block.upper)
        largest, rest = length[:, :1], length[:, 1:]
        step = np.where(largest > 0, block.delta / np.where(largest > 0, largest, 1.0) / rest * eps, 0.0)
        naive = np.clip(kept + step, block.lower, block.upper)
        ahead = bound_ahead(host, block.delta, block.lower, block.upper)
        norms = [_rounds.merged_norms(abs(a - kept), axis=(1,), p=p) for a in (v.astype(np.float64), naive)]
        return np.concatenate([*norms, ((v == ahead) & (delta != 0)).sum(axis=1, keepdims=True)], axis=1)

    def merge(a: Array, axis: Any) -> Array:
        norms = _rounds.merged_norms(a[..., :2], axis, p)
        return np.concatenate([norms, a[..., 2:].sum(axis=axis, keepdims=True)], axis=-1)

    if not x_rows.size:
        return _kept(np.zeros((len(x_rows), 3)), sample, x)
    return _kept(_swept(of_tile, merge, [x_rows, delta, lower, upper, v], [eps, length], 3), sample, x)


# --- derivatives ------------------------------------------------------------------------------------------------------

# What `_derivatives.vjp` asks of a whole row after its largest |delta|, in rounds of sums that do not need one another.
REDUCTIONS = (("sum",), ("sum", "sum"))  # the first only matters where eps is 0
REDUCTIONS_INF = (("max",), ("sum",), ("sum", "sum"))


class _Ledger:
    """NumPy's functions, but for sums and maxima over a row: those are what earlier rounds found, in their order. Parts
    of further ones are kept, as long as nothing depends on them."""

    def __init__(self, known: Array) -> None:
        self.known = iter([known[:, i : i + 1] for i in range(known.shape[1])])
        self.parts: list[Array] = []

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
            found = reduction(np.ascontiguousarray(a))
            self.parts.append(found)
        return found


def _pulled(p: float, arrays: list[Array], numbers: list[Array], ledger: Any) -> tuple[Array, ...]:
    """Gradients of a tile: of x, delta, the bound ahead and eps."""
    (x, delta, lower, upper, g), (eps, state) = arrays, numbers
    numerics = _numerics(x)
    block = Block(*(host.narrow(a, numerics) for a in (x, delta, lower, upper)))
    block = block._replace(x=np.clip(block.x, block.lower, block.upper))
    now = _rounds.columns(_rounds.State, state)
    parts = _derivatives.partials(ledger, block, eps, now.scale, now.status, p, numerics)
    return _derivatives.vjp(ledger, parts, host.narrow(g, numerics), 0.0, numerics)


def _next_reductions(
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
    kinds: tuple[str, ...],
) -> Array:
    """The first sums or maxima that are not known yet."""

    def of_tile(*tile: Array) -> Array:
        ledger = _Ledger(tile[7])
        _pulled(p, list(tile[:5]), list(tile[5:7]), ledger)
        return np.concatenate(ledger.parts[: len(kinds)], axis=1)

    arrays = _in_rows(sample, x, delta, lower, upper, g)
    numbers = _numbers(eps, state, known, sample, x)
    return _kept(_swept(of_tile, partial(_merged_kinds, kinds=kinds), arrays, numbers, len(kinds)), sample, x)


def _numbers(eps: Array, state: Array, known: tuple[Array, ...], sample: Any, x: Array) -> list[Array]:
    state = state.reshape(-1, state.shape[-1])
    top = _rounds.columns(_rounds.State, state).top
    sums = np.concatenate([top, *(a.reshape(-1, a.shape[-1]) for a in known)], axis=1)
    return [_rows(eps, sample, x), state, sums]


def _merged_kinds(a: Array, axis: Any, kinds: tuple[str, ...]) -> Array:
    return (a.max if "max" in kinds else a.sum)(axis=axis, keepdims=True)


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
    # Those of a bound are summed before they are rounded to half precision.
    out = np.empty(arrays[0].shape, x.dtype if of in ("x", "delta") else _result(x))
    for across, columns in _tiles(*out.shape):
        some = [_cut(a, across) for a in numbers]
        lost = _rounds.columns(_rounds.State, some[1]).lost > 0
        for along in columns:
            tiles = [_cut(a, across, along) for a in arrays]
            x_bar, delta_bar, c_bar, _ = _pulled(p, tiles, some[:2], _Ledger(some[2]))
            if of in ("lower", "upper"):
                c_bar = np.where(tiles[1] < 0 if of == "lower" else tiles[1] > 0, c_bar, 0.0)
            bar = x_bar if of == "x" else delta_bar if of == "delta" else c_bar
            out[across, along] = np.where(lost, math.nan, bar)
    return _unrows(out, sample, x)


def _pull_eps(state: Array, eps: Array, *known: Array, p: float, numerics: Numerics) -> Array:
    """The gradient of eps, which depends on the sums alone: as of rows that have nothing else."""
    rows, kept = state.reshape(-1, state.shape[-1]), state.shape[:-1]
    nothing = [np.zeros((len(rows), 1), np.float64 if numerics is DOUBLE else np.float32)] * 5
    numbers = _numbers(np.broadcast_to(eps, (*kept, 1)).reshape(-1, 1), rows, known, (1,), nothing[0])
    *_, eps_bar = _pulled(p, nothing, numbers[:2], _Ledger(numbers[2]))
    return np.where(_rounds.columns(_rounds.State, rows).lost > 0, math.nan, eps_bar).reshape(*kept, 1)


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
    unreachable = _options(mode, unreachable)
    g = grad.rechunk(problem.x.chunks)
    state = _settled(problem, mode, "maximize" if unreachable == "nan" else unreachable, write=False)
    if unreachable == "nan":
        # A result of NaN is a constant: at those samples nothing is pulled back.
        g = da.where(_is_missed(_column(state, "status"), problem.eps), 0.0, g).astype(x.dtype)
    known: list[Array] = []
    p = problem.p
    reductions: Any = REDUCTIONS_INF if p == math.inf else REDUCTIONS
    if p < math.inf and not isinstance(problem.eps, da.Array) and (problem.eps >= problem.numerics.least).all():
        known, reductions = [_column(state, "top")[..., None]], REDUCTIONS[1:]  # anything: it is not looked at
    for number, kinds in enumerate(reductions):
        again = problem.again(10 + number)
        parts = _map(_next_reductions, again, g, state, *known, width=len(kinds), p=p, kinds=kinds)
        known.append(_reduced(parts, problem, _merged_kinds, kinds=kinds))

    def pulled(of: str) -> Array:
        dtype = np.dtype(x.dtype if of in ("x", "delta") else _result(x))
        return _map(_pull_block, problem.again(20), g, state, *known, dtype=dtype, p=p, of=of)

    bars = [
        _cast(_unbroadcast(pulled(of), came), _result(x))
        for of, came in zip(("lower", "upper"), problem.bound_shapes, strict=True)
    ]
    eps_bar = _per_sample(_pull_eps, 1, state, problem.eps[..., None], *known, p=p, numerics=problem.numerics)[..., 0]
    came = problem.eps_shape
    if came == ():
        eps_bar = eps_bar.sum()
    elif len(came) < x.ndim:
        eps_bar = eps_bar[tuple(0 if i in problem.sample else slice(None) for i in range(x.ndim))]
    return pulled("x"), pulled("delta"), _cast(eps_bar, _result(x)), *bars


def _unbroadcast(bar: Array, came: tuple[int, ...]) -> Array:
    """Summed to the shape that a bound came in."""
    extra = bar.ndim - len(came)
    axes = tuple(i for i in range(bar.ndim) if i < extra or (came[i - extra] == 1 != bar.shape[i]))
    bar = bar.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else bar
    return bar[(0,) * extra]


# --- on the grid of a file format -------------------------------------------------------------------------------------


def perturb_quantized(
    x: Array,
    delta: Array,
    eps: Any,
    *,
    levels: int = 256,
    p: float = 2,
    bounds: Any = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
    seed: int = 0,
) -> Array:
    """See clipaware.perturb_quantized."""
    problem = _problem(x, delta, eps, p, bounds, axis)
    unreachable = _options(mode, unreachable)
    quantize.check_levels(levels)
    _check.seed(seed)
    if problem.split:
        spread = {i: -1 for i in problem.sample if x.numblocks[i] > 1}
        raise ValueError(
            f"x has samples in several chunks, expected each in one: perturb_quantized counts the steps of whole "
            f"samples; x.rechunk({spread}) brings them together"
        )
    # Numbers as they came, and not as x's dtype has them; of sizes, also the dtype counts.
    given = [a if _check.is_number(a) else None for a in (eps, *_check.bounds_pair(bounds))]
    kind = "float64" if given[0] is not None else _check.array(eps, "eps").dtype_name(eps)
    options = {"levels": levels, "p": p, "mode": mode, "unreachable": unreachable, "seed": seed}
    return _map(_quantize_whole, problem, _index(problem), given=given, kind=kind, options=options)


def _quantize_whole(
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    index: Array,
    *,
    sample: Any,
    given: list[Any],
    kind: str,
    options: Any,
) -> Array:
    if not x.size:
        return x
    sizes = eps if eps.dtype == kind or kind not in ("float16", "float32") else eps.astype(kind)
    size, low, high = (a if number is None else number for a, number in zip((sizes, lower, upper), given, strict=True))
    try:
        return quantize.perturb_quantized(x, delta, size, bounds=(low, high), axis=sample, **options)
    except _check.UnreachableError as error:
        rows = _rows(index, sample, x)[error.rows]
        asked = np.broadcast_to(_rows(eps, sample, x), (len(_rows(x, sample, x)), 1))[error.rows]
        raise _check.UnreachableError(rows[:, 0].astype(np.int64), error.reach, asked[:, 0]) from None


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
