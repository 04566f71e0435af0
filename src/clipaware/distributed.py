"""Samples that are spread over processes (PyTorch): every one calls with its own part, and gets its part of the result.

For tensors that are no ``DTensor``: those, ``clipaware.perturb`` and the others take as they are. See
``docs/scaling.md``.
"""

from __future__ import annotations

from typing import Any

from clipaware import _api, _check
from clipaware._dispatch import described, framework_of
from clipaware._report import Report

__all__ = ["perturb", "perturb_vjp", "reach", "report", "rescale"]

Array = Any


def perturb(x: Array, delta: Array, eps: Any, *, group: Any = None, **options: Any) -> Array:
    """Return this process's part of ``v = clip(x + eta*delta)``, whose norm is eps over the parts of all processes.

    Every process of the group calls it, with parts of the same samples: as many rows, of any length, also none. It
    communicates a few numbers per sample, four times as a rule, and once in backward. What one process finds wrong with
    its values is an error on all of them.

    Parameters
    ----------
    x, delta
        PyTorch tensors: this process's part of all samples.
    eps
        As for :func:`clipaware.perturb`, and the same on all processes.
    group
        The process group, by default that of all processes.
    **options
        ``p, bounds, axis, mode, unreachable`` as for :func:`clipaware.perturb`; bounds that are arrays are this part's.

    Returns
    -------
    torch.Tensor
        Like x. The gradients of x and delta are those of this part, that of eps is the same on all processes, and that
        of a bound is what this part adds to it.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from clipaware import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one process, here of one
    >>> v = distributed.perturb(torch.full((2, 4), 0.5), torch.tensor([[1.0, -2.0, 3.0, 4.0]] * 2), 0.8)
    >>> dist.destroy_process_group()
    >>> (v - 0.5).norm(dim=1)
    tensor([0.8000, 0.8000])
    """
    return _api._perturb(*_shared(group, x, delta, eps, **options))


def rescale(x: Array, delta: Array, eps: Any, *, group: Any = None, **options: Any) -> Array:
    """Return the scale of :func:`clipaware.rescale`, the same on all processes; arguments as of :func:`perturb`."""
    return _api._rescale(*_shared(group, x, delta, eps, **options))


def reach(x: Array, delta: Array, *, group: Any = None, **options: Any) -> Array:
    """Return what :func:`clipaware.reach` does, the same on all processes; arguments as of :func:`perturb`."""
    return _api._reach(_shared(group, x, delta, 0.0, **options)[0])


def report(x: Array, delta: Array, eps: Any, *, group: Any = None, **options: Any) -> Report:
    """Return what :func:`clipaware.report` does, the same on all processes; arguments as of :func:`perturb`."""
    return _api._report(*_shared(group, x, delta, eps, **options))


def perturb_vjp(x: Array, delta: Array, eps: Any, grad: Array, *, group: Any = None, **options: Any) -> Array:
    """Return the gradients of :func:`clipaware.perturb_vjp`, as :func:`perturb` says; `grad` is like x."""
    call, mode, unreachable = _shared(group, x, delta, eps, **options)
    _check.same_kind(call.be, x, grad, "grad")
    return _api._pull(call, grad, mode, unreachable)


def _shared(
    group: Any,
    x: Array,
    delta: Array,
    eps: Any,
    p: float = 2,
    bounds: Any = (0, 1),
    axis: Any = "batch",
    mode: str = "equal",
    unreachable: str = "maximize",
) -> tuple[_api._Call, str, str]:
    """The call for parts, and the options that are not of its problem."""
    if framework_of(x) != "torch":
        raise TypeError(f"x is {described(x)}, expected a PyTorch tensor: this process's part of the samples")
    from clipaware._backends.shards import Shards

    return _api._call_of(x, delta, eps, p, bounds, axis)._replace(be=Shards(group)), mode, unreachable
