"""JAX's arrays that are spread over a mesh of devices: how their shardings go through the solver, and what its devices
tell each other.

Under ``jit`` nobody knows a sharding before XLA has found it, so XLA calls back, when it compiles, for a program of
what lies on one device. There, sums of rows are sums over devices, too: of the numbers per row alone, all rows at once.
Devices that share rows decide on them alike, as they only look at what was summed up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from clipaware import _traced
from clipaware._problem import Block, power
from clipaware._traced import Rows

Array = Any
Names = tuple[tuple[str, ...], ...]  # of the mesh's axes along which each axis of an array is split

SAMPLE = 1024  # elements of a row that all of its devices tell each other, to begin near the solution,
RARE = 8  # if they are not more than one in so many
RUN = 16  # of which so many are neighbours


def distributed(local: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """``local(names, *arrays)`` of arrays that may be spread over devices, whatever axes of the first are split.

    All arrays that go in and come out have the axes of the first, or 1 in their place.
    """

    def alone(*arrays: Array) -> tuple[Array, ...]:
        return local(((),) * arrays[0].ndim, *arrays)

    anywhere = custom_partitioning(alone)  # type: ignore[no-untyped-call]
    anywhere.def_partition(partial(_partitioned, local), sharding_rule=_rule)  # type: ignore[no-untyped-call]

    def called(*arrays: Array) -> tuple[Array, ...]:
        types = [jax.typeof(a) for a in arrays]
        mesh, whole = types[0].sharding.mesh, types[0].shape
        if AxisType.Explicit not in mesh.axis_types:
            return anywhere(*arrays)  # type: ignore[no-any-return]
        # Types say how arrays are split.
        names = _either(*(names_of(a.sharding, whole) for a in types[:2]))
        results = jax.eval_shape(alone, *(_bare(a) for a in types))
        before, after = (tuple(_spec(names, whole, a.shape) for a in some) for some in (types, results))
        where = [NamedSharding(mesh, spec) for spec in before]
        split = [jax.sharding.reshard(a, to) for a, to in zip(arrays, where, strict=True)]  # type: ignore[no-untyped-call]
        every = jax.shard_map(partial(local, names), mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
        return every(*split)

    return called


def _bare(a: Any) -> Any:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)  # type: ignore[no-untyped-call]


def _rule(mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
    """Axes that are split alike: those of what is like x and of results. eps and bounds have to follow."""
    whole = operands[0].shape

    def mapped(i: int, shape: Any, follows: bool) -> tuple[str, ...]:
        return tuple(f"x{j}" if follows and n == whole[j] else f"free{i}_{j}" for j, n in enumerate(shape))

    before: Any = tuple(mapped(i, a.shape, a.shape == whole) for i, a in enumerate(operands))
    after: Any = tuple(mapped(i, a.shape, True) for i, a in enumerate(results, len(operands)))
    return SdyShardingRule(before, after)


def names_of(sharding: Any, shape: tuple[int, ...]) -> Names:
    """Of the mesh's axes, by those of an array; none where its length is no multiple of the number of devices."""
    if not isinstance(sharding, NamedSharding):
        return ((),) * len(shape)
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    sizes = sharding.mesh.shape
    named = [(e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in entries]
    split = [tuple(name for name in names if sizes[name] > 1) for names in named]
    counts = [math.prod(sizes[name] for name in names) for names in split]
    return tuple(names if n % count == 0 else () for names, n, count in zip(split, shape, counts, strict=True))


def spec_of(names: Names) -> PartitionSpec:
    return PartitionSpec(*(mine or None for mine in names))  # type: ignore[no-untyped-call]


def _either(of_x: Names, of_delta: Names) -> Names:
    return of_x if any(of_x) else of_delta


def _spec(names: Names, whole: tuple[int, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Of an array that has the axes of x, or 1 in their place."""
    return spec_of(tuple(mine if n == m else () for mine, n, m in zip(names, whole, shape, strict=True)))


def _partitioned(local: Any, mesh: Any, arrays: Any, results: Any) -> Any:
    """What a device is to do, and how the arrays are to be split for it: as x is, or delta if x is not."""
    whole = arrays[0].shape
    names = _either(*(names_of(a.sharding, whole) for a in arrays[:2]))

    def shardings(given: Any) -> Any:
        return tuple(NamedSharding(mesh, _spec(names, whole, a.shape)) for a in given)

    return mesh, partial(local, names), shardings(results), shardings(arrays)


# --- what devices tell each other -------------------------------------------------------------------------------------


def added(a: Array, names: tuple[str, ...]) -> Array:
    """The sum over the devices along these axes of the mesh."""
    return lax.psum(a, names) if names else a  # type: ignore[no-untyped-call]


def largest(a: Array, names: tuple[str, ...]) -> Array:
    return lax.pmax(a, names) if names else a  # type: ignore[no-untyped-call]


def gathered(a: Array, names: tuple[str, ...]) -> Array:
    """(rows, devices, columns) of (rows, columns)."""
    return lax.all_gather(a, names, axis=1)


def devices(names: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(name) for name in names)


def folding(be: ModuleType, names: tuple[str, ...]) -> Any:
    """The backend, for rows whose parts lie along these axes of the mesh: what is folded goes to all of them."""
    spread = SimpleNamespace(**vars(be))

    def fold(combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
        return (added if combine == "sum" else largest)(be.fold(combine, tiles, values, like), names)

    spread.fold = fold
    return spread


def summing(be: ModuleType, names: tuple[str, ...]) -> Any:
    """The same for derivatives, which do not fold."""
    spread = SimpleNamespace(**vars(be))

    def two_row_sums(a: Array, b: Array) -> tuple[Array, Array]:
        both = added(jnp.concatenate(be.two_row_sums(a, b), axis=1), names)
        return both[:, :1], both[:, 1:]

    spread.two_row_sums = two_row_sums
    spread.row_sum = lambda a: added(be.row_sum(a), names)
    spread.row_max = lambda a: largest(be.row_max(a), names)
    return spread


def agreed(
    rows: Rows, bad: Array, names: tuple[str, ...], starts: bool = False
) -> tuple[Rows, Array, tuple[Rows, float] | None]:
    """Rows of which every device has looked at a part, which of them are not to be solved, and if there is one and it
    is asked for, a sample of them for a start.

    One exchange: the largest |delta|, whether there is anything bad, the sum of its powers and some elements.
    """
    be, p, numerics = rows.be, rows.p, rows.numerics
    whole = folding(be, names)
    if not starts:
        both = largest(jnp.concatenate([rows.top, be.widen(bad)], axis=1), names)
        return rows._replace(be=whole, **_without(rows, both[:, :1], both[:, 1:] > 0)), both[:, 1:] > 0, None
    block = rows.load(rows.tiles[0])
    delta, room = block.delta, _traced.room(rows, block)
    n = delta.shape[1]
    few = min(-(-SAMPLE // devices(names)), n // RARE) // RUN * RUN
    runs = np.linspace(0, n - RUN, few // RUN).astype(int)
    places = (runs[:, None] + np.arange(RUN)).ravel()

    def total(delta: Array, top: Array) -> Array:
        """The sum of powers, in units of `top`."""
        return be.row_sum(power(be, abs(delta) * be.narrow(1 / jnp.where(top > 0, top, 1.0), numerics), p))

    numbers = jnp.concatenate([rows.top, bad, total(delta, rows.top)], axis=1)
    seen = gathered(jnp.concatenate([be.narrow(numbers, numerics), delta[:, places], room[:, places]], axis=1), names)
    tops, bad, totals = (be.widen(seen[:, :, i]) for i in range(3))
    top, bad = tops.max(1, keepdims=True), (bad > 0).any(1, keepdims=True)
    together = rows._replace(be=whole, **_without(rows, top, bad))
    if not few:
        return together, bad, None
    delta, room = (a.reshape(len(a), -1) for a in jnp.split(seen[:, :, 3:], 2, axis=2))
    # Where nothing clips, the sample is to have the solution of the whole.
    share = few / n
    true = (totals * (tops / jnp.where(top > 0, top, 1.0)) ** p).sum(1, keepdims=True)
    found = total(delta, top)
    fit = jnp.where((found > 0) & (true > 0), true * share / jnp.where(found > 0, found, 1.0), 1.0) ** (1 / p)
    sample = Block(jnp.zeros_like(delta), delta * be.narrow(fit, numerics), -abs(room), abs(room))
    return together, bad, (rows._replace(load=lambda *_: sample, keep=True), share)


def _without(rows: Rows, top: Array, bad: Array) -> dict[str, Array]:
    return {"top": jnp.where(bad, 0.0, top), "eps": jnp.where(bad, 0.0, rows.eps)}
