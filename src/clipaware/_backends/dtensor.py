"""PyTorch's DTensors: from and to the parts that this process holds.

Samples that are whole on their processes go to PyTorch's backend as any other tensors do, without a word to the other
processes. Those that are sharded go to ``clipaware.distributed`` with the group of processes that share them.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from clipaware import _check, distributed
from clipaware._backends import torch as alone
from clipaware._backends.shards import Shards
from clipaware._report import Report

Array = Any

LIKE_X = ("perturb", "perturb_quantized")  # the functions whose result is like x, and not one per sample
SQUARES = ("eps_from_psnr", "eps_from_rms", "eps_from_snr")  # and those whose squares add up over parts of a sample


class Layout:
    """How x lies on its mesh, and what follows from that for everything else."""

    def __init__(self, x: Array, axis: Any) -> None:
        self.x, self.mesh = x, x.device_mesh
        if self.mesh.get_coordinate() is None:
            raise ValueError("x is on a device mesh that this process is not part of")
        _placed(x, "x")
        self.shape = tuple(x.shape)
        self.sample = _check.sample_axes(axis, x.ndim)
        self.batch = tuple(i for i in range(x.ndim) if i not in self.sample)
        self.kept = tuple(1 if i in self.sample else s for i, s in enumerate(self.shape))
        # What a mesh dimension of one process shards is whole.
        self.axes = [
            p.dim % x.ndim if not p.is_replicate() and self.mesh.size(i) > 1 else None
            for i, p in enumerate(x.placements)
        ]

    def shared_by(self) -> Any:
        """The group of processes that hold parts of the same samples; None if those are whole."""
        dims = tuple(i for i, axis in enumerate(self.axes) if axis in self.sample)
        return _group(self.mesh, dims, dist.group.WORLD) if dims else None

    def placements(self, axes: tuple[int | None, ...]) -> list[Any]:
        """Of an array whose axes are these of x, or None for those that are not."""
        return [Shard(axes.index(axis)) if axis is not None and axis in axes else Replicate() for axis in self.axes]

    def summed(self, axes: tuple[int | None, ...], per_sample: bool) -> list[Any]:
        """Of the gradient of such an array: what each process adds to it, unless all that share a sample know it."""
        return [
            Partial() if axis is not None and axis not in axes and not (per_sample and axis in self.sample) else placed
            for axis, placed in zip(self.axes, self.placements(axes), strict=True)
        ]

    def axes_of(self, name: str, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        """Which of x's axes those of eps or a bound are."""
        if name == "eps":
            batch = tuple(self.shape[i] for i in self.batch)
            _check.eps_shape(shape, batch, self.kept)
            return self.batch if shape == batch else tuple(None if i in self.sample else i for i in range(len(shape)))
        _check.bound_shape(shape, self.shape, name)
        first = len(self.shape) - len(shape)
        return tuple(first + i if s == self.shape[first + i] else None for i, s in enumerate(shape))

    def without_shards(self) -> list[Any]:
        """x's placements, if its samples were whole."""
        return [Replicate() if a in self.sample else p for a, p in zip(self.axes, self.x.placements, strict=True)]

    def companion(self, a: Any, name: str) -> tuple[Any, tuple[int, ...], list[Any]]:
        """This process's part of eps or a bound, and its shape and the placements of its gradient."""
        per_sample = name == "eps"
        if _check.is_number(a):
            return a, (), self.summed((), per_sample)
        _check.companion(alone, self.x if isinstance(a, DTensor) else self.x.to_local(), a, name)
        axes = self.axes_of(name, tuple(a.shape))
        wanted, summed = self.placements(axes), self.summed(axes, per_sample)
        if not isinstance(a, DTensor):
            # The same on all processes.
            a = a if isinstance(a, torch.Tensor) else torch.from_numpy(np.array(a, np.float64))
            a = DTensor.from_local(a, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return self.moved(a, wanted, name).to_local(grad_placements=summed), tuple(a.shape), summed

    def moved(self, a: Array, wanted: list[Any], name: str) -> Array:
        """With these placements, if no process needs what it does not have."""
        _placed(a, name)
        if a.device_mesh != self.mesh:
            raise ValueError(f"{name} is on {a.device_mesh}, expected {self.mesh}, the mesh of x")
        changed = [
            (now, then)
            for i, (now, then) in enumerate(zip(a.placements, wanted, strict=True))
            if now != then and self.mesh.size(i) > 1
        ]
        if any(not now.is_replicate() for now, _ in changed):
            raise ValueError(
                f"{name} has placements {_named(a.placements)}, expected {_named(wanted)} to match x with "
                f"{_named(self.x.placements)}; call redistribute(placements={_named(wanted)}) of {name} first"
            )
        return a.redistribute(placements=wanted) if changed else a

    def back(self, a: Array, placements: Any, shape: tuple[int, ...]) -> Array:
        """This process's part of a result as a DTensor of that shape."""
        stride = tuple(torch.empty(shape, device="meta").stride())
        a = a.contiguous()
        return DTensor.from_local(a, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _placed(a: Array, name: str) -> None:
    """Every process has a part, or all of it: neither something to be added up nor every so many elements."""
    if any(type(p) not in (Shard, Replicate) for p in a.placements):
        whole = _named([p if type(p) is Shard else Replicate() for p in a.placements])
        raise ValueError(
            f"{name} has placements {_named(a.placements)}, expected Shard and Replicate; call "
            f"redistribute(placements={whole}) of {name} first"
        )


def _named(placements: Any) -> str:
    """As they are written in Python."""

    def name(p: Any) -> str:
        return f"Shard({p.dim})" if type(p) is Shard else "Replicate()" if p.is_replicate() else repr(p)

    return f"[{', '.join(map(name, placements))}]"


@lru_cache(maxsize=64)
def _group(mesh: Any, dims: tuple[int, ...], world: Any) -> Any:
    """The processes of this world that differ from this one in these dimensions of the mesh."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    here = mesh.get_coordinate()
    ranks = mesh.mesh[tuple(slice(None) if i in dims else c for i, c in enumerate(here))].flatten().tolist()
    if len(ranks) == dist.get_world_size(world):
        return world
    # The first time, all of them ask for it.
    return dist.new_group(sorted(ranks), use_local_synchronization=True)


@lru_cache(maxsize=64)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Any, args: Any, kwargs: Any) -> Any:
    """A public function of DTensors."""
    name = function.__name__
    if name == "l2_clipping_aware_rescaling":
        return function(*args, **kwargs)  # a rescale under another name
    given = _signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    arguments = dict(given.arguments)
    x = arguments["x"]
    layout = Layout(x, arguments["axis"])
    bars: list[Any] = [(layout.shape, x.placements)] * 2
    for key in ("delta", "grad"):
        if key in arguments:
            _check.same_kind(alone, x, arguments[key], key)
            arguments[key] = layout.moved(arguments[key], list(x.placements), key).to_local()
    if "eps" in arguments:
        arguments["eps"], *bar = layout.companion(arguments["eps"], "eps")
        bars.append(bar)
    if "delta" in arguments:
        bounds = []
        for bound, which in zip(_check.bounds_pair(arguments["bounds"]), ("lower", "upper"), strict=True):
            part, *bar = layout.companion(bound, f"the {which} bound")
            bounds.append(part)
            bars.append(bar)
        arguments["bounds"] = tuple(bounds)
    arguments["x"] = x.to_local()

    group = layout.shared_by()
    if group is not None and name not in SQUARES:
        if name not in distributed.__all__:
            raise TypeError(
                f"x is sharded along its samples, {_named(x.placements)}, which {name} does not take; call "
                f"x.redistribute(placements={_named(layout.without_shards())}) first"
            )
        function, arguments["group"] = getattr(distributed, name), group
    try:
        found = function(**arguments)
    except _check.UnreachableError as error:
        if any(axis in layout.batch for axis in layout.axes):
            error.add_note("samples are counted from the first one of this process's part")
        raise
    if group is not None and name in SQUARES:
        found = alone.result(torch.sqrt(Shards(group).reduced("sum", found.detach().double() ** 2)), found)
    if isinstance(found, tuple):
        return tuple(layout.back(a, p, shape) for a, (shape, p) in zip(found, bars, strict=True))
    per_sample = layout.kept, layout.placements(tuple(None if i in layout.sample else i for i in range(x.ndim)))
    if isinstance(found, Report):
        return Report(*(layout.back(a, per_sample[1], per_sample[0]) for a in vars(found).values()))
    shape, placements = (layout.shape, x.placements) if name in LIKE_X else per_sample
    return layout.back(found, placements, shape)
