"""Noise to perturb with: samples of seven kinds, and augmentation with noise of an exact size."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from clipaware import _check
from clipaware._api import perturb

Array = Any
ArrayT = TypeVar("ArrayT")

__all__ = ["KINDS", "AddNoise", "sample"]

KINDS = ("gaussian", "uniform", "laplace", "rademacher", "salt-and-pepper", "speckle", "pink")
CHANNELS = 4  # an axis of at most as many elements counts channels
WORKERS = 1024  # of a DataLoader, whose starts are counted

_forked = False  # whether this process is another one's child, by whatever means


def _remember() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)


def sample(kind: str, x: ArrayT, *, seed: Any = None, axes: Sequence[int] | None = None) -> ArrayT:
    """Draw noise in the shape of x, by the random numbers of x's own framework.

    ===================  ===============================================================================
    ``gaussian``         normal, of variance 1
    ``uniform``          from -1 to 1
    ``laplace``          density ``exp(-|delta|)/2``
    ``rademacher``       -1 or 1
    ``salt-and-pepper``  of either sign and sizes so different that, however much is asked for, elements
                         go to their bounds one after another while the others hardly move
    ``speckle``          normal, times x
    ``pink``             normal, with an amplitude spectrum that falls like 1/f, and without a mean
    ===================  ===============================================================================

    Parameters
    ----------
    kind
        One of `KINDS`.
    x
        A floating array of any supported framework. Only speckle looks at its values.
    seed
        A whole number, with which the result is always the same. Or what x's framework draws from: NumPy's and CuPy's
        ``Generator``, PyTorch's ``Generator``, a key of JAX, TensorFlow's ``Generator``. ``None``: PyTorch's and
        TensorFlow's global random state, elsewhere a seed from the system. In a trace, JAX needs a key.
    axes
        Of pink noise, the axes along which it is pink. By default, of the axes of a sample (all but the first, or the
        only one) those that are longer than 4: the others count channels.

    Returns
    -------
    array
        Like x.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> from clipaware import noise
    >>> x = np.full((2, 3, 32, 32), 0.5)
    >>> v = ca.perturb(x, noise.sample("pink", x, seed=0), 5.0)
    >>> np.linalg.norm((v - x).reshape(2, -1), axis=1).round(9)
    array([5., 5.])
    """
    be = _check.array(x, "x")
    _check.one_process(x)
    _check.floating(be, x, "x")
    _check.option(kind, KINDS, "kind")
    _check.seed(seed)
    axes = _long_axes(be.shape(x), "batch") if axes is None else axes
    return _drawn(be, kind, x, be.random(x, seed), axes)  # type: ignore[no-any-return]


def _long_axes(shape: tuple[Any, ...], axis: Any) -> Sequence[int]:
    """Of the axes of a sample those that do not count channels, if there are any."""
    of_sample = _check.sample_axes(axis, len(shape))
    return [i for i in of_sample if not (isinstance(shape[i], int) and shape[i] <= CHANNELS)] or of_sample


def _drawn(be: Any, kind: str, x: Array, draws: tuple[Any, Any], axes: Sequence[int]) -> Array:
    normal, uniform = draws
    if kind == "gaussian":
        drawn = normal(x)
    elif kind == "uniform":
        drawn = 2 * uniform(x) - 1
    elif kind == "laplace":
        drawn = be.log((1 - uniform(x)) / (1 - uniform(x)))  # the difference of two exponential variables
    elif kind == "rademacher":
        drawn = _signs(be, uniform(x))
    elif kind == "salt-and-pepper":
        drawn = _signs(be, uniform(x)) * _order(uniform(x), be.dtype_name(x))
    elif kind == "speckle":
        drawn = normal(x) * be.result(x, x)
    else:
        drawn = _pink(be, x, normal(x), axes)
    return be.cast_like(drawn, x)


def _signs(be: Any, u: Array) -> Array:
    return 2 * be.cast_like(u < 0.5, u) - 1


def _order(u: Array, dtype: str) -> Array:
    """Powers of u around 1, as steep as the dtype has room for."""
    power, least = (4, 2.0**-7) if dtype == "float16" else (12, 2.0**-16)
    return (math.sqrt(least) / (1 - u * (1 - least))) ** power


def _pink(be: Any, x: Array, white: Array, axes: Sequence[int]) -> Array:
    shape = be.shape(x)
    along = _check.sample_axes(tuple(axes), len(shape))
    if not along or not all(isinstance(shape[i], int) for i in along):
        raise ValueError(f"x has shape {shape}, expected known lengths along {along}, the axes of pink noise")
    return be.filtered(white, _gain(shape, along), along)


def _gain(shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """1/f, of mean square 1, for the frequencies of a real transform; 0 for the mean."""
    f2 = np.zeros([1] * len(shape))
    for axis in axes:
        f2 = f2 + np.fft.fftfreq(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]) ** 2
    gain = np.where(f2 > 0, 1 / np.sqrt(np.where(f2 > 0, f2, 1)), 0)
    gain /= math.sqrt(max(np.mean(gain**2), np.finfo(float).tiny))
    return np.take(gain, range(shape[axes[-1]] // 2 + 1), axis=axes[-1])


class AddNoise:
    """Add noise of exactly the asked-for norm after clipping: augmentation for arrays of every framework.

    Parameters
    ----------
    kind
        One of `KINDS`.
    eps
        The norm of the noise: a number, or a range ``(low, high)`` from which every sample draws its own.
    p, bounds
        As for :func:`clipaware.perturb`.
    seed
        A whole number, from which all noise follows: that of every call, and of every worker of a ``DataLoader`` every
        time that it starts. ``None``: as for :func:`sample`.
    axis
        What one sample spans, as for :func:`clipaware.perturb`. ``"auto"``: all of an array with three axes, which is
        one picture, as a ``Compose`` sees them; else, and in a layer of Keras, as ``"batch"``.
    framework
        ``"torch"`` for a ``torch.nn.Module`` and ``"keras"`` for a layer, which add noise while training and pass on
        what they get otherwise. A layer of Keras also takes a layer's own arguments, such as ``name``.

    Examples
    --------
    >>> import numpy as np
    >>> from clipaware.noise import AddNoise
    >>> augment = AddNoise("gaussian", (1.0, 2.0), seed=0)
    >>> x = np.full((3, 3, 32, 32), 0.5, np.float32)
    >>> np.linalg.norm((augment(x) - x).reshape(3, -1), axis=1).round(3)
    array([1.256, 1.565, 1.775], dtype=float32)
    """

    def __new__(cls, *args: Any, framework: str | None = None, **options: Any) -> AddNoise:
        if cls is not AddNoise or framework is None:
            return super().__new__(cls)
        _check.option(framework, ("torch", "keras"), "framework")
        if framework == "torch":
            from clipaware._layers import torch as layers
        else:
            from clipaware._layers import keras as layers  # type: ignore[no-redef]
        return layers.AddNoise.__new__(layers.AddNoise, *args, **options)

    def __init__(
        self,
        kind: str,
        eps: float | tuple[float, float],
        *,
        p: float = 2,
        bounds: tuple[Any, Any] = (0, 1),
        seed: int | None = None,
        axis: Any = "auto",
        framework: str | None = None,
    ) -> None:
        _check.option(kind, KINDS, "kind")
        _check.norm_order(p)
        _check.bounds_pair(bounds)
        if seed is not None and not isinstance(seed, int | np.integer):
            raise TypeError(f"seed is a {type(seed).__name__}, expected a whole number or None")
        _check.seed(seed)
        for size in eps if isinstance(eps, tuple | list) else (eps,):
            _check.eps_values(size)
        if isinstance(eps, tuple | list) and not (len(eps) == 2 and eps[0] <= eps[1]):
            raise ValueError(f"eps is {eps}, expected a number or a range (low, high) with low <= high")
        self.kind, self.eps, self.p, self.bounds, self.seed, self.axis = kind, eps, p, bounds, seed, axis
        self._home, self._process, self._calls, self._place = os.getpid(), -1, 0, (0, 0)
        # In memory that workers share, since a loader has new ones for every epoch.
        torch = sys.modules.get("torch")
        self._starts = torch.zeros(WORKERS, dtype=torch.int64).share_memory_() if torch and seed is not None else None

    def __call__(self, x: ArrayT, *, seed: Any = None) -> ArrayT:
        """x with noise; by this seed, key or generator if one is given, and else by the next of its own."""
        be = _check.array(x, "x")
        _check.one_process(x)
        axis = self.axis
        if isinstance(axis, str) and axis == "auto":
            axis = None if be.ndim(x) == 3 else "batch"
        if seed is None and self.seed is not None:
            if be.is_traced(x):
                raise ValueError(
                    "the seed of AddNoise is for calls, of which a trace makes but one; pass a seed to every call, "
                    'leave it out (TensorFlow has tf.random.set_seed), or use framework="keras"'
                )
            seed = self._next_seed()
        draws, eps = be.random(x, seed), self.eps
        delta = _drawn(be, self.kind, x, draws, _long_axes(be.shape(x), axis))
        if isinstance(eps, tuple | list):
            (low, high), of_sample = eps, _check.sample_axes(axis, be.ndim(x))
            one_each: Any = tuple(0 if i in of_sample else slice(None) for i in range(be.ndim(x)))
            eps = low + (high - low) * draws[1](x[one_each])  # type: ignore[index]
        return perturb(x, delta, eps, p=self.p, bounds=self.bounds, axis=axis)  # type: ignore[no-any-return]

    def _next_seed(self) -> int:
        """Of this call, in this process. What a ``DataLoader`` forks off has the same past, but not the same future."""
        if self._process != os.getpid():
            self._process, self._calls, self._place = os.getpid(), 0, self._placed()
        self._calls += 1
        entropy = [int(self.seed or 0), *self._place, self._calls]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    def _placed(self) -> tuple[int, int]:
        """Which worker this is, and how often it has been started before."""
        data, here = sys.modules.get("torch.utils.data"), os.getpid()
        worker = data.get_worker_info() if data else None
        if worker is None:
            if multiprocessing.parent_process() is not None:
                return WORKERS + zlib.crc32(multiprocessing.current_process().name.encode()), 0
            return (2**32 + here if _forked and self._home != here else 0), 0
        if self._starts is None or self._home == here:
            # It was not there to count when workers started. Their own seeds are other ones every time.
            return worker.id + 1, worker.seed
        starts = int(self._starts[worker.id % WORKERS])
        self._starts[worker.id % WORKERS] += 1
        return worker.id + 1, starts
