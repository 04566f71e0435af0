"""JAX: one traced program for all rows, differentiated in closed form, by a ``custom_jvp`` and a primitive that knows
its transpose; or on a CPU NumPy's solver.

Newton is a ``lax.while_loop``, and nothing calls back to the host. Numbers per row and the last steps of sums are
float64 whether or not the user has enabled it: inside the solver x64 is on, and what leaves it has a dtype that the
user's setting allows. (Derivatives are in that dtype: what JAX does with them happens outside.)

Arrays that are spread over devices stay there: ``jax_mesh.py`` has what that takes. For its sake arrays come here with
all their axes, and become (rows, n) on their device.

Arrays outside of any transformation, with their values at hand on a CPU, are solved by NumPy's backend on their own
memory: nothing is compiled for every new shape, and values are checked.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from clipaware import _check, _derivatives, _traced
from clipaware._backends import jax_mesh as mesh
from clipaware._backends import numpy as host
from clipaware._problem import DOUBLE, REGULAR, SINGLE, ZERO, Block, Numerics, Problem, bound_ahead
from clipaware._report import Report

Array = Any

TRACES = True
TAKES_ALL_AXES = True
SLACK = 2.0**-46  # how far at_most stays below eps: XLA's powers are off by up to 1e-14
# Rows are reduced by parts, of which this many lie side by side, and two arrays or two halves at a time: of that XLA
# makes vectors, whereas along a row, of one array, or of so many parts that it does not write out the loop over them,
# it takes one element after another: five to ten times as long.
PARTS = 6
HALVES = {"float16": (5, 10), "bfloat16": (8, 7)}  # bits of their exponents and mantissas

jax.tree_util.register_dataclass(Report, [field.name for field in dataclasses.fields(Report)], [])

# --- array functions --------------------------------------------------------------------------------------------------

where = jnp.where
minimum = jnp.minimum
maximum = jnp.maximum
sqrt = jnp.sqrt
sign = jnp.sign
clip = jnp.clip
signbit = jnp.signbit
constant = lax.stop_gradient


def power(a: Array, p: float) -> Array:
    """a^p by way of float64, since a float32 power may be biased, which a sum does not average out."""
    return jnp.power(widen(a), p).astype(a.dtype)


def fold(combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
    """Values per row of the one tile that there is."""
    return widen(values[0])


def _parted(a: Array) -> list[Array]:
    """Rows as (rows, k, n // k), for a reduction of the middle axis, and what is left over, if anything, as it is."""
    rows, n = a.shape
    k = next((k for k in range(PARTS, 3, -1) if n % k == 0), PARTS)
    whole = n - n % k
    return [a[:, :whole].reshape(rows, k, n // k)] + ([a[:, whole:]] if whole < n else [])


def _added(a: Array, b: Array) -> tuple[Array, Array]:
    """The sums of rows of two arrays; of few elements in their own dtype, and then in float64."""
    if a.shape[1] < 10 * PARTS:
        return _reduced(widen(a), widen(b))
    (a, *a_left), (b, *b_left) = _parted(a), _parted(b)
    totals = [_added(*map(widen, _reduced(a, b))), *map(_added, a_left, b_left)]
    return sum(total[0] for total in totals), sum(total[1] for total in totals)


def _reduced(a: Array, b: Array) -> tuple[Array, Array]:
    zero = np.zeros((), a.dtype)
    return lax.reduce((a, b), (zero, zero), lambda s, t: (s[0] + t[0], s[1] + t[1]), (1,))  # type: ignore[no-any-return]


def _transposable_sum(a: Array) -> Array:
    return jnp.sum(a, axis=1, keepdims=True, dtype=_wide())


@jax.custom_jvp
def row_sum(a: Array) -> Array:
    half = a.shape[1] // 2
    total = sum(_added(a[:, :half], a[:, half : 2 * half]))[:, None]  # type: ignore[index]
    return total + widen(a[:, 2 * half :]).sum(1, keepdims=True) if a.shape[1] % 2 else total


@row_sum.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return row_sum(*primals), _transposable_sum(*tangents)


@jax.custom_jvp
def two_row_sums(a: Array, b: Array) -> tuple[Array, Array]:
    """Of two arrays, in one pass."""
    one, other = _added(a, b)
    return one[:, None], other[:, None]


@two_row_sums.defjvp
def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return two_row_sums(*primals), tuple(map(_transposable_sum, tangents))


def row_dot(u: Array, v: Array) -> Array:
    return row_sum(u * v)


def row_sums(t: Array, breakpoints: Array, dp: Array, wp: Array) -> Array:
    """(rows, 2): the sum of dp over t < breakpoints, and of wp over the rest."""
    clipped = t >= breakpoints
    return jnp.stack(_added(jnp.where(clipped, 0.0, dp), jnp.where(clipped, wp, 0.0)), axis=1)


def row_max(a: Array) -> Array:
    """The largest of each row; nothing here is negative."""
    half = a.shape[1] // 2
    if half < 5 * PARTS:
        return a.max(1, keepdims=True, initial=0)
    (one, *one_left), (two, *two_left) = _parted(a[:, :half]), _parted(a[:, half : 2 * half])
    zero = np.zeros((), a.dtype)
    most = lax.reduce((one, two), (zero, zero), lambda s, t: (lax.max(s[0], t[0]), lax.max(s[1], t[1])), (1,))
    return row_max(jnp.concatenate((*most, *one_left, *two_left, a[:, 2 * half :]), axis=1))


def row_top(delta: Array) -> Array:
    """The largest |delta|."""
    return row_max(abs(delta))


def _working(numerics: Numerics) -> Any:
    return jnp.float32 if numerics is SINGLE else jnp.float64


def _wide() -> Any:
    """float64 inside of the solver, and outside of it if the user has allowed that."""
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]


def widen(a: Array) -> Array:
    return a.astype(_wide())


def narrow(a: Array, numerics: Numerics) -> Array:
    return a.astype(_working(numerics))


def cast_like(a: Array, like: Array) -> Array:
    return a.astype(like.dtype)


def pow2(a: Array, numerics: Numerics) -> Array:
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    limit = 126 if numerics is SINGLE else 1022
    # By its bits: JAX 0.12 compiles frexp and ldexp without regard to enable_x64 where they are.
    whole, digits, bias = (jnp.int32, 23, 127) if a.dtype == jnp.float32 else (jnp.int64, 52, 1023)
    exponent = jnp.clip((lax.bitcast_convert_type(a, whole) >> digits) - bias, -limit, limit)
    return lax.bitcast_convert_type((jnp.where(abs(exponent) <= 8, 0, exponent) + bias) << digits, a.dtype)


def loop(step: Callable[[Any], Any], state: tuple[Any, ...], limit: int) -> tuple[Any, ...]:
    """Repeat `step` until every row is done, as the last of the state says, or the first, a count, is at its limit."""
    return lax.while_loop(lambda now: (now[0] < limit) & ~now[-1].all(), step, (jnp.int32(state[0]), *state[1:]))


def anew(block: Block, T: Array) -> Block:
    """The block for another pass. XLA would keep several arrays derived from it instead, and read those."""
    return Block(*lax.optimization_barrier((*block, T))[:4])  # type: ignore[no-untyped-call]


def when(condition: Array, change: Callable[..., Any], *state: Any) -> tuple[Any, ...]:
    """The state, changed if the condition is true anywhere."""
    return lax.cond(condition.any(), change, lambda *same: same, *state)  # type: ignore[no-any-return]


def senseless(block: Block, x: Array) -> Array:
    """Per row, not 0 where x, not yet clipped, or delta is not finite, or the bounds are not in order."""
    disorder = row_max(jnp.where(block.lower <= block.upper, 0.0, 1.0))
    # What is not finite makes the sum NaN, in much less time than asking every element; XLA's maxima may lose a NaN.
    zeros = x.astype(block.delta.dtype) * 0 + block.delta * 0
    return jnp.where(jnp.isnan(row_sum(zeros)), 1.0, disorder)


# --- what the API asks for --------------------------------------------------------------------------------------------


def is_array(a: Any) -> bool:
    return isinstance(a, jax.Array)


def dtype_name(a: Array) -> str:
    return str(a.dtype)


def shape(a: Array) -> tuple[int, ...]:
    return tuple(a.shape)


def _is_traced(*arrays: Array) -> bool:
    return any(isinstance(a, jax.core.Tracer) for a in arrays)


def _at_hand(*arrays: Array) -> bool:
    """Whether values can be looked at without waiting for a device or a trace."""
    if _is_traced(*arrays):
        return False
    devices = [device for a in arrays for device in a.devices()]
    return len(devices) == len(arrays) and all(device.platform == "cpu" for device in devices)


def device_name(a: Array) -> str:
    """Where the array was put; nothing if JAX may move it."""
    return "" if _is_traced(a) or not a.committed else ", ".join(sorted(map(str, a.devices())))


def split_of(a: Array) -> str:
    """How the array is spread over devices; nothing if it is not, or if only XLA will know."""
    sharding = jax.typeof(a).sharding if _is_traced(a) else a.sharding
    names = mesh.names_of(sharding, a.shape)
    return str(mesh.spec_of(names)) if any(names) else ""


def values_of(a: Array) -> Any:
    """The array for its values to be checked; None where that would wait for a device or a trace."""
    return np.asarray(a, np.float64) if _at_hand(a) else None


def fetch(a: Array) -> Any:
    return np.asarray(a)


def permute(a: Array, axes: tuple[int, ...]) -> Array:
    return jnp.transpose(a, axes)


reshape = jnp.reshape
broadcast_to = jnp.broadcast_to


def sum_axes(a: Array, axes: tuple[int, ...]) -> Array:
    return a.sum(axes)


def ndim(a: Array) -> int:
    return int(a.ndim)


def number(value: Any, like: Array) -> Array:
    """A bound for all rows and elements."""
    return jnp.full((1,) * like.ndim, value, like.dtype)


def wide_number(value: Any, like: Array) -> Array:
    """An eps for all rows; never rounded to x's dtype, unless x64 is off and it is float32."""
    return jnp.full((1,) * like.ndim, value, _wide())


def as_eps(eps: Any, like: Array) -> Array:
    return jnp.asarray(eps, _wide())


def as_bound(bound: Any, like: Array) -> Array:
    return jnp.asarray(bound, like.dtype)


def returned(a: Any, like: Array) -> Array:
    """NumPy's array as one of this framework, of that dtype and on that device."""
    made = jnp.asarray(a, like.dtype)
    return jax.device_put(made, like.sharding) if like.committed else made


def result(a: Array, x: Array) -> Array:
    """In x's dtype, or float32 if that is wider."""
    return a.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def true_rows(condition: Array) -> Any:
    _check.values_are_known(not _is_traced(condition), "jax.jit and other transformations of JAX")
    _check.values_are_known(condition.is_fully_addressable, "several processes that share an array")
    return np.flatnonzero(fetch(condition))


def _numerics(x: Array) -> Numerics:
    return DOUBLE if x.dtype == jnp.float64 else SINGLE


def _block(x: Array, delta: Array, lower: Array, upper: Array, numerics: Numerics) -> Block:
    return Block(*(narrow(a, numerics) for a in (x, delta, lower, upper)))


def _rounded(v: Array, dtype: str) -> Array:
    """v as an array of that dtype holds it. Not by a cast and back, which XLA may take for superfluous."""
    if dtype not in HALVES:
        return v
    near = lax.reduce_precision(v, *HALVES[dtype])
    if dtype == "bfloat16":
        return near
    # There, subnormal numbers are 0. In float16 they are multiples of 2^-24, and not that small.
    small = lax.round(v * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(abs(v) < 2.0**-14, small, near)


def _apart(product: Array, k: Array) -> Array:
    """A product with k, rounded whatever it is added to: it gets the sign of k as a last bit, which XLA does not know
    to be 0. Behind an optimization barrier, LLVM rounds product and sum once after all."""
    sign = lax.bitcast_convert_type(k, jnp.int64) >> 63
    return lax.bitcast_convert_type(lax.bitcast_convert_type(product, jnp.int64) | sign, jnp.float64)


def _as_rows(samples: int, x: Array, *others: Array) -> list[Array]:
    """(rows, n) of arrays whose last `samples` axes are those of a sample; of all but x, also 1 in their place."""
    first = x.ndim - samples
    xp = np if isinstance(x, np.ndarray) else jnp

    def of(a: Array) -> Array:
        parts = [
            whole if any(s != 1 for s in mine) else mine
            for mine, whole in ((a.shape[:first], x.shape[:first]), (a.shape[first:], x.shape[first:]))
        ]
        return xp.broadcast_to(a, sum(parts, ())).reshape(*map(math.prod, parts))

    return [x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:])), *map(of, others)]


def _summed_to(bar: Array, x: Array, shape: tuple[int, ...], samples: int) -> Array:
    """What has been (rows or 1, n or 1) with x's axes again, or 1 in their place, and summed over those of `shape`."""
    first = x.ndim - samples
    parts = [
        whole if length == math.prod(whole) else (1,) * len(whole)
        for length, whole in zip(bar.shape, (x.shape[:first], x.shape[first:]), strict=True)
    ]
    once = tuple(i for i, n in enumerate(shape) if n == 1)
    return bar.reshape(sum(parts, ())).sum(axis=once, keepdims=True)


def _kept(x: Array, samples: int) -> tuple[int, ...]:
    """The shape of numbers per row."""
    return (*x.shape[: x.ndim - samples], *(1,) * samples)


def _along(names: mesh.Names, samples: int) -> tuple[str, ...]:
    """The mesh's axes along which rows are split."""
    return sum(names[len(names) - samples :], ())


def _solved_here(
    names: mesh.Names, *arrays: Array, p: float, mode: str, write: bool, samples: int, wide: Any
) -> tuple[Array, ...]:
    """v (if `write`), eta and status, of a traced problem, of which this may be one device's part."""
    shape, kept, along = arrays[0].shape, _kept(arrays[0], samples), _along(names, samples)
    x, delta, eps, lower, upper = _as_rows(samples, *arrays)
    numerics = _numerics(x)
    if not x.size:
        nothing = jnp.zeros(kept, wide), jnp.full(kept, ZERO, wide)
        return (arrays[0], *nothing) if write else nothing
    # An eps that is float32 may have been rounded up, and at_most is a promise about what it was.
    slack = 2.0**-23 if wide == jnp.float32 else SLACK
    with jax.enable_x64(True):
        # Powers that take long are kept from pass to pass, products are faster made anew.
        keep = p not in (1, 1.5, 2, 3, 4, math.inf)
        rows, bad = _traced.whole(_this, Problem(x, delta, widen(eps), lower, upper, p), numerics, keep)
        sample = None
        if along:
            rows, bad, sample = mesh.agreed(rows, bad, along, starts=p < math.inf)
        found = _traced.solve(rows, 0, mode, write, sample and partial(_traced.sample_start, *sample))
        found = found._replace(K=jnp.where(bad, jnp.nan, found.K))

        def numbers(found: _traced.Solution) -> tuple[Array, Array]:
            # The status is a floating number as well: one without tangents cannot differ between devices, for JAX.
            return (found.K / found.m).astype(wide).reshape(kept), found.status.astype(wide).reshape(kept)

        if not write:
            return numbers(found)

        def store(tile: Any, block: Block, direction: Array, k: Array) -> Array:
            # XLA may round a product and a sum once, here and not there, and then what is measured is not what is
            # returned. In float64 the product of two float32 is exact; of others it is kept apart.
            if numerics is SINGLE:
                moved = narrow(widen(direction) * widen(k) + widen(block.x), numerics)
            else:
                moved = (_apart(direction * k, k) if mode == "at_most" else direction * k) + block.x
            return _rounded(jnp.clip(moved, block.lower, block.upper), str(x.dtype))

        found, v = _traced.write(rows, found, mode, store, str(x.dtype) in HALVES, slack)
        return v.astype(x.dtype).reshape(shape), *numbers(found)


@lru_cache(maxsize=256)
def _solver(p: float, mode: str, write: bool, samples: int, wide: Any) -> Callable[..., tuple[Array, ...]]:
    """The solver of traced arrays: under vmap one more dimension is more rows, and loops and conditions stay one."""
    here = partial(_solved_here, p=p, mode=mode, write=write, samples=samples, wide=wide)
    return _folding(mesh.distributed(here), 2)


def _folding(function: Callable[..., tuple[Array, ...]], whole: int) -> Callable[..., tuple[Array, ...]]:
    """The function, for which under vmap one more dimension is one more axis of the batch.

    Of its arguments the first `whole` always have all axes.
    """
    folding = jax.custom_batching.custom_vmap(function)

    @folding.def_vmap
    def _(size: int, batched: Any, *arrays: Array) -> Any:
        found = folding(*_folded(arrays, batched, size, range(whole)))
        return found, (True,) * len(found)

    return folding


def _folded(arrays: Any, batched: Any, size: int, whole: Any) -> list[Array]:
    """Arrays with one more axis in front; those that are not for each of it have length 1 there, if they may."""
    folded = [a if of_each else a[None] for a, of_each in zip(arrays, batched, strict=True)]
    return [jnp.broadcast_to(a, (size, *a.shape[1:])) if i in whole else a for i, a in enumerate(folded)]


@partial(jax.jit, static_argnames=("p", "mode", "write", "samples"))
def _solved(*arrays: Array, p: float, mode: str, write: bool, samples: int) -> tuple[Array, ...]:
    return _solver(p, mode, write, samples, _wide())(*arrays)


def _memories(samples: int, *arrays: Array) -> Any:
    return tuple(_as_rows(samples, *map(host.memory, arrays)))


def _beside(x: Array, a: Any) -> Array:
    """A NumPy array on the device of x, if that was put there."""
    return jax.device_put(a, x.sharding) if x.committed else jnp.asarray(a)


@partial(jax.custom_jvp, nondiff_argnums=(5, 6, 7, 8))
def _perturb(
    x: Array, delta: Array, eps: Array, lower: Array, upper: Array, p: float, mode: str, write: bool, samples: int
) -> tuple[Array, ...]:
    """(v, eta, status), without v unless `write`, with the derivatives of docs/math.md."""
    arrays = x, delta, eps, lower, upper
    if not _at_hand(*arrays):
        return _solved(*arrays, p=p, mode=mode, write=write, samples=samples)  # type: ignore[no-any-return]
    mine, its_delta, its_eps, *bounds = _memories(samples, *arrays)
    if mode == "at_most" and _wide() == jnp.float32:
        # It may have been rounded up, and at_most is a promise about what it was.
        its_eps = its_eps.astype(np.float64) * (1 - 2.0**-24)
    v, eta, status = host.solve(Problem.of((mine, its_delta, its_eps, *bounds), p), mode, write, certify=True)
    kept = _kept(x, samples)
    with np.errstate(over="ignore"):  # a scale may be too large for float32
        numbers = tuple(a.astype(_wide()).reshape(kept) for a in (eta, status))
    return tuple(_beside(x, a) for a in ((v.reshape(x.shape), *numbers) if write else numbers))


@_perturb.defjvp
def _(p: float, mode: str, write: bool, samples: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = *_, eta, status = _perturb(*primals, p, mode, write, samples)
    v_dot, eta_dot = _motion.bind(*primals, eta, status, *tangents, p=p, samples=samples)  # type: ignore[no-untyped-call]
    numbers = eta_dot, status * 0
    return found, (v_dot, *numbers) if write else numbers


def _moved_here(names: mesh.Names, *arrays: Array, p: float, samples: int) -> tuple[Array, Array]:
    """The tangents of v and of eta, which are linear in those of the arguments."""
    shape, kept = arrays[0].shape, arrays[5].shape
    x, delta, eps, lower, upper, eta, status, *tangents = _as_rows(samples, *arrays)
    numerics, split = _numerics(x), _along(names, samples)
    be = mesh.summing(_this, split)
    # As the user had it where eta was found: JAX may come here later, to compile what it has traced.
    with jax.enable_x64(eta.dtype == jnp.float64):
        block = _block(x, delta, lower, upper, numerics)
        unit = _unit(eps, eta, status) if split else None
        part = _derivatives.partials(be, block, widen(eps), _finite(eta), status, p, numerics, unit)
        x_dot, delta_dot, eps_dot, low_dot, high_dot = tangents
        x_dot, delta_dot, low_dot, high_dot = _block(x_dot, delta_dot, low_dot, high_dot, numerics)
        c_dot = bound_ahead(be, block.delta, low_dot, high_dot)
        v_dot, eta_dot = _derivatives.jvp(be, part, x_dot, delta_dot, c_dot, widen(eps_dot), numerics)
        # Rows that make no sense have no derivatives either.
        lost = jnp.where(jnp.isnan(eta), jnp.nan, 1.0)
        v_dot, eta_dot = (v_dot * narrow(lost, numerics)).astype(x.dtype), eta_dot * widen(lost)
        return v_dot.reshape(shape), eta_dot.reshape(kept)


@lru_cache(maxsize=256)
def _mover(p: float, samples: int) -> Callable[..., tuple[Array, ...]]:
    return mesh.distributed(partial(_moved_here, p=p, samples=samples))


def _moved(*arrays: Array, p: float, samples: int) -> tuple[Array, ...]:
    return _mover(p, samples)(*arrays)


# JAX would transpose _moved operation by operation. Of a primitive, its author says what the transpose is.
_motion = Primitive("clipaware_motion")
_motion.multiple_results = True
_motion.def_impl(jax.jit(_moved, static_argnames=("p", "samples")))  # type: ignore[no-untyped-call]
mlir.register_lowering(_motion, mlir.lower_fun(_moved, multiple_results=True))


@_motion.def_abstract_eval  # type: ignore[untyped-decorator]
def _(*arrays: Any, p: float, samples: int) -> tuple[Any, Any]:
    x, _, _, _, _, eta, *_ = arrays
    return x.update(weak_type=False), eta.update(weak_type=False)


def _motion_moved(primals: Any, tangents: Any, p: float, samples: int) -> Any:
    plainly = partial(_moved_here, ((),) * primals[0].ndim, p=p, samples=samples)
    return jax.jvp(plainly, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _motion_transposed(bars: Any, *arrays: Any, p: float, samples: int) -> list[Any]:
    tangents = [a.aval if ad.is_undefined_primal(a) else None for a in arrays[7:]]  # type: ignore[no-untyped-call]
    shapes = tuple(a and a.shape for a in tangents)
    found = iter(_pulled(*arrays[:7], *map(ad.instantiate_zeros, bars), p=p, samples=samples, shapes=shapes))
    return [None] * 7 + [a and next(found).astype(a.dtype) for a in tangents]


def _motion_batched(arrays: Any, axes: Any, p: float, samples: int) -> tuple[Any, Any]:
    """One more dimension is one more axis of the batch."""
    batched = [axis is not None for axis in axes]
    arrays = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
    size = arrays[batched.index(True)].shape[0]
    folded = _folded(arrays, batched, size, (0, 1, 5, 6))  # x, delta, eta and status
    return _motion.bind(*folded, p=p, samples=samples), [0, 0]  # type: ignore[no-untyped-call]


ad.primitive_jvps[_motion] = _motion_moved
ad.primitive_transposes[_motion] = _motion_transposed
batching.primitive_batchers[_motion] = _motion_batched


def _finite(eta: Array) -> Array:
    """eta, of which float32 may not hold as much as there is."""
    return jnp.minimum(eta, jnp.finfo(eta.dtype).max)  # type: ignore[no-untyped-call]


def _unit(eps: Array, eta: Array, status: Array) -> Array:
    """What |delta| is where it moves by eps, no more than which it is where nothing clips."""
    moves = (status == REGULAR) & (eta > 0)
    return jnp.where(moves, widen(eps) / jnp.where(moves, _finite(eta), 1.0), 1.0)


def solve(problem: Problem, mode: str, write: bool, samples: int) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status."""
    *v, eta, status = _perturb(*_alike(*problem.arrays()), problem.p, mode, write, samples)
    return v[0] if write else None, eta, status


def _alike(*arrays: Array) -> tuple[Array, ...]:
    """Arrays that differ between devices along the same axes of a mesh, if this is inside of somebody's shard_map."""
    if not _is_traced(*arrays):
        return arrays
    differ = [jax.typeof(a).mat.varying for a in arrays]
    common = frozenset().union(*differ)
    return tuple(
        lax.pcast(a, tuple(sorted(common - mine)), to="varying") if common - mine else a
        for a, mine in zip(arrays, differ, strict=True)
    )


def reach(problem: Problem, samples: int) -> Array:
    """The largest norm of every row."""
    x, p = problem.x, problem.p
    arrays = x, problem.delta, problem.lower, problem.upper
    if _at_hand(*arrays):
        mine, its_delta, *bounds = _memories(samples, *arrays)
        found = host.reach(Problem.of((mine, its_delta, None, *bounds), p))
        return _beside(x, found.astype(_wide()).reshape(_kept(x, samples)))
    return _reached(*map(lax.stop_gradient, _alike(*arrays)), p=p, samples=samples)


@partial(jax.jit, static_argnames=("p", "samples"))
def _reached(*arrays: Array, p: float, samples: int) -> Array:
    (found,) = _reacher(p, samples, _wide())(*arrays)
    return found


@lru_cache(maxsize=256)
def _reacher(p: float, samples: int, wide: Any) -> Callable[..., tuple[Array, ...]]:
    return _folding(mesh.distributed(partial(_reached_here, p=p, samples=samples, wide=wide)), 2)


def _reached_here(names: mesh.Names, *arrays: Array, p: float, samples: int, wide: Any) -> tuple[Array]:
    kept, along = _kept(arrays[0], samples), _along(names, samples)
    x, delta, lower, upper = _as_rows(samples, *arrays)
    if not x.size:
        return (jnp.zeros(kept, wide),)
    with jax.enable_x64(True):
        problem = Problem(x, delta, jnp.ones((1, 1)), lower, upper, p)
        rows, bad = _traced.whole(_this, problem, _numerics(x), keep=True)
        if along:
            rows, bad, _ = mesh.agreed(rows, bad, along)
        return (jnp.where(bad, jnp.nan, _traced.reach(rows)).astype(wide).reshape(kept),)


def summary(problem: Problem, v: Array, samples: int) -> tuple[Array, Array, Array]:
    """Of v: norm, naive norm and share of elements at their bounds."""
    x, p, arrays = problem.x, problem.p, (*problem.arrays(), v)
    if _at_hand(*arrays):
        *memories, its_v = _memories(samples, *arrays)
        found = host.summary(Problem.of(memories, p), its_v)
        return tuple(_beside(x, a.astype(_wide()).reshape(_kept(x, samples))) for a in found)
    return _summed_up(*map(lax.stop_gradient, _alike(*arrays)), p=p, samples=samples)  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames=("p", "samples"))
def _summed_up(*arrays: Array, p: float, samples: int) -> tuple[Array, ...]:
    return _summer(p, samples, _wide())(*arrays)


@lru_cache(maxsize=256)
def _summer(p: float, samples: int, wide: Any) -> Callable[..., tuple[Array, ...]]:
    return _folding(mesh.distributed(partial(_summed_up_here, p=p, samples=samples, wide=wide)), 2)


def _summed_up_here(names: mesh.Names, *arrays: Array, p: float, samples: int, wide: Any) -> tuple[Array, ...]:
    kept, along = _kept(arrays[0], samples), _along(names, samples)
    x, delta, eps, lower, upper, v = _as_rows(samples, *arrays)
    with jax.enable_x64(True):
        problem = Problem(x, delta, widen(eps), lower, upper, p)
        rows, bad = _traced.whole(_this, problem, _numerics(x), keep=True)
        if along:
            rows, bad, _ = mesh.agreed(rows, bad, along)
        found = _traced.summary(rows, v, x.shape[1] * mesh.devices(along))
        return tuple(a.astype(wide).reshape(kept) for a in found)


def vjp(problem: Problem, eta: Array, status: Array, g: Array, samples: int) -> tuple[Array, ...]:
    """Gradients of x, delta, eps, lower and upper; those of the bounds summed to their shapes, that of eps not."""
    x, p = problem.x, problem.p
    shapes = x.shape, problem.delta.shape, eta.shape, problem.lower.shape, problem.upper.shape
    if _at_hand(*problem.arrays(), g):
        *mine, its_eta, its_status, its_g = _memories(samples, *problem.arrays(), eta, status, g)
        bars = host.vjp(Problem.of(mine, p), its_eta.astype(np.float64), its_status.astype(np.int32), its_g)
        found = [_summed_to(bar, x, shape, samples) for bar, shape in zip(bars, shapes, strict=True)]
        return *(_beside(x, bar) for bar in found[:2]), *(_beside(x, bar.astype(_wide())) for bar in found[2:])
    arrays = _alike(*problem.arrays(), eta, status, g, jnp.zeros_like(eta))
    x_bar, delta_bar, *bars = _pulled(*arrays, p=p, samples=samples, shapes=shapes)
    return x_bar.astype(x.dtype), delta_bar.astype(x.dtype), *bars


@partial(jax.jit, static_argnames=("p", "samples", "shapes"))
def _pulled(*arrays: Array, p: float, samples: int, shapes: tuple[Any, ...]) -> tuple[Array, ...]:
    return _puller(p, samples, shapes, arrays[5].dtype == jnp.float64)(*arrays)


@lru_cache(maxsize=256)
def _puller(p: float, samples: int, shapes: tuple[Any, ...], x64: bool) -> Callable[..., tuple[Array, ...]]:
    """Gradients, which can be differentiated themselves, operation by operation."""
    here = partial(_pulled_here, p=p, samples=samples, shapes=shapes, x64=x64)
    folding = jax.custom_batching.custom_vmap(mesh.distributed(here))

    @folding.def_vmap
    def _(size: int, batched: Any, *arrays: Array) -> Any:
        more = _puller(p, samples, tuple(shape and (size, *shape) for shape in shapes), x64)
        found = more(*_folded(arrays, batched, size, (0, 1, 5, 6)))
        return found, (True,) * len(found)

    pulled = jax.custom_jvp(folding)

    @pulled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(partial(here, ((),) * primals[0].ndim), primals, tangents)

    return pulled


def _pulled_here(
    names: mesh.Names, *arrays: Array, p: float, samples: int, shapes: tuple[Any, ...], x64: bool
) -> tuple[Array, ...]:
    """Gradients of x, delta, eps, lower and upper, summed to these shapes; not those whose shape is None."""
    split = _along(names, samples)
    be = mesh.summing(_this, split)
    x, delta, eps, lower, upper, eta, status, g, h = _as_rows(samples, *arrays)
    numerics = _numerics(x)
    with jax.enable_x64(x64):
        block, g = _block(x, delta, lower, upper, numerics), narrow(g, numerics)
        unit = _unit(eps, eta, status) if split else None
        parts, pace = _derivatives.divided(be, block, widen(eps), _finite(eta), status, p, numerics, unit)
        part = _derivatives.weighed(be, parts, pace, p, numerics)
        D, along = be.two_row_sums(*(jnp.where(part.free, a * part.direction, 0.0) for a in (part.w, g)))
        pace = _derivatives.sloped(be, pace, D)
        # No D is negative, but XLA does not know, and so keeps nothing of one pass in memory for the other.
        again = block._replace(delta=jnp.where(D < 0, 0.0, block.delta))
        part = _derivatives.weighed(be, _derivatives.split(be, again, pace, numerics), pace, p, numerics)
        bars = _derivatives.pulled(be, part, g, h, along, numerics)
        # Rows that make no sense have no derivatives either.
        x_bar, delta_bar, c_bar, eps_bar = (jnp.where(jnp.isnan(eta), jnp.nan, bar) for bar in bars)
        low_bar, high_bar = jnp.where(delta < 0, c_bar, 0.0), jnp.where(delta > 0, c_bar, 0.0)

        def summed(bar: Array, shape: Any) -> Array:
            total = _summed_to(widen(bar), arrays[0], shape, samples)
            axes = names[: len(names) - samples] if bar is eps_bar else names
            return mesh.added(total, sum((mine for mine, n in zip(axes, shape, strict=False) if n == 1), ()))

        all_bars = zip((x_bar, delta_bar, eps_bar, low_bar, high_bar), shapes, strict=True)
        return tuple(summed(bar, shape) for bar, shape in all_bars if shape is not None)


# --- random numbers ---------------------------------------------------------------------------------------------------


log = jnp.log


def random(x: Array, seed: Any) -> tuple[Any, Any]:
    """Two functions that draw as many as an array like x has: normal numbers, and uniform ones from 0 to below 1."""
    if seed is None:
        _check.seed_is_given(not _is_traced(x))
        seed = np.random.SeedSequence().generate_state(1, np.uint64)[0]
    if isinstance(seed, int | np.integer):
        high, low = np.array(divmod(int(seed), 2**32), np.uint32)
        seed = jax.random.fold_in(jax.random.key(low), high)
    drawn, dtype = count(), jnp.float64 if x.dtype == jnp.float64 else jnp.float32

    def draw(distribution: Callable[..., Array], like: Array) -> Array:
        return distribution(jax.random.fold_in(seed, next(drawn)), like.shape, dtype)

    return partial(draw, jax.random.normal), partial(draw, jax.random.uniform)


def is_traced(x: Array) -> bool:
    return _is_traced(x)


def filtered(a: Array, gain: Any, axes: tuple[int, ...]) -> Array:
    """a with its spectrum over these axes, the last of them halved, multiplied by NumPy's array `gain`."""
    spectrum = jnp.fft.rfftn(a, axes=axes) * gain.astype(a.dtype)
    return jnp.fft.irfftn(spectrum, [a.shape[axis] for axis in axes], axes)


# --- batches and models -----------------------------------------------------------------------------------------------


def take(a: Array, rows: Any) -> Array:
    """These rows, by their numbers."""
    return a[rows]


def concatenate(pieces: list[Array]) -> Array:
    return jnp.concatenate(pieces)


def evaluated(model: Any, x: Array) -> Array:
    """What the model makes of x, of which nobody asks for derivatives."""
    return model(x)


def gradient(loss: Any, x: Array) -> tuple[Array, Array]:
    """The gradient in x of a loss, and what comes with it: `loss` returns both."""
    found: tuple[Array, Array] = jax.grad(loss, has_aux=True)(x)
    return found


def log_softmax(scores: Array) -> Array:
    return jax.nn.log_softmax(scores, 1)


def highest(scores: Array) -> Array:
    return scores.max(1, keepdims=True)


def labels_like(labels: Any, x: Array) -> Array:
    return jnp.asarray(labels)


_this = sys.modules[__name__]
