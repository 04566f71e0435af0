"""The corruptions of ImageNet-C that `clipaware.adversarial_noise` evaluates with, for batches of any size."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from clipaware import _check

Array = Any

NOISES = ("gaussian", "shot", "impulse", "speckle", "uniform")
OTHERS = ("blur", "contrast", "brightness", "pixelate")

# At severities 1 to 5, those of Hendrycks & Dietterich (2019), arXiv 1903.12261. Uniform noise is none of theirs, and
# has the standard deviations of the Gaussian noise.
STRENGTHS = {
    "gaussian": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot": (60, 25, 12, 5, 3),
    "impulse": (0.03, 0.06, 0.09, 0.17, 0.27),
    "speckle": (0.15, 0.2, 0.35, 0.45, 0.6),
    "uniform": (0.08, 0.12, 0.18, 0.26, 0.38),
    "blur": (1, 2, 3, 4, 6),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
}
SIDE = 224  # of the pictures that the widths of blur are meant for


def corrupt(
    x: torch.Tensor, kind: str, severity: int, *, bounds: tuple[Any, Any] = (0, 1), seed: Any = None
) -> torch.Tensor:
    """Corrupt a batch as ImageNet-C does (Hendrycks & Dietterich 2019, arXiv 1903.12261), whatever its size.

    With u the values of x mapped from their bounds to [0, 1], c the strength at a severity, and all clipped to [0, 1]:

    ==============  ==============================================================================================
    ``gaussian``    ``u + c*N(0, 1)``
    ``shot``        ``Poisson(c*u)/c``
    ``impulse``     a share c of all values becomes 0 or 1
    ``speckle``     ``u + c*u*N(0, 1)``
    ``uniform``     ``u + c*U(-3**0.5, 3**0.5)``, with the c of ``gaussian``; not in ImageNet-C
    ``blur``        a Gaussian of width c pixels, for pictures with a shorter side of 224; others in proportion
    ``contrast``    ``mean + c*(u - mean)``, the mean of a channel
    ``brightness``  V + c in the colour space HSV; u + c unless there are three channels
    ``pixelate``    shrunk to a share c of every side by box filtering, and back
    ==============  ==============================================================================================

    Parameters
    ----------
    x
        (samples, channels, ...), floating, on any device; first clipped into its bounds.
    kind
        One of the above.
    severity
        From 1 to 5.
    bounds
        Where x lives: finite numbers, or tensors that broadcast to x.
    seed
        A whole number, a ``torch.Generator``, or None for PyTorch's global random state.

    Returns
    -------
    tensor
        Like x.

    Examples
    --------
    >>> import torch
    >>> from clipaware.adversarial_noise import corrupt
    >>> corrupt(torch.tensor([[[0.0, 0.5, 1.0]]]), "contrast", 1)
    tensor([[[0.3000, 0.5000, 0.7000]]])
    """
    _check.option(kind, tuple(STRENGTHS), "kind")
    if not isinstance(severity, numbers.Integral) or severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity is {severity!r}, expected a whole number from 1 to 5")
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim < 3:
        came = f"of {tuple(x.shape)}, {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise TypeError(f"x is {came}, expected a floating tensor of (samples, channels, ...)")
    lower, upper = (torch.as_tensor(b, dtype=x.dtype, device=x.device) for b in _check.bounds_pair(bounds))
    if not (torch.isfinite(lower).all() and torch.isfinite(upper).all()):
        raise ValueError("bounds are infinite, expected finite ones: corruptions are defined inside a box")
    if isinstance(seed, int | np.integer):
        seed = torch.Generator(x.device).manual_seed(int(seed))
    width = upper - lower
    u = ((x - lower) / torch.where(width > 0, width, 1)).clamp(0, 1)  # where there is no room, 0
    corrupted = CORRUPTIONS[kind](u, STRENGTHS[kind][severity - 1], seed)
    return lower + width * corrupted.clamp(0, 1)


def _normal(u: torch.Tensor, generator: Any) -> torch.Tensor:
    return torch.randn(u.shape, dtype=u.dtype, device=u.device, generator=generator)


def _uniform(u: torch.Tensor, generator: Any) -> torch.Tensor:
    return torch.rand(u.shape, dtype=u.dtype, device=u.device, generator=generator)


def _impulse(u: torch.Tensor, c: float, generator: Any) -> torch.Tensor:
    hit, salt = _uniform(u, generator) < c, _uniform(u, generator) < 0.5
    return torch.where(hit, salt.to(u.dtype), u)


def gaussian_filter() -> Any:
    try:
        from scipy.ndimage import gaussian_filter
    except ImportError as error:
        raise ImportError("blur needs SciPy: pip install 'clipaware[training]'") from error
    return gaussian_filter


def _blur(u: torch.Tensor, c: float, generator: Any) -> torch.Tensor:
    width = c * min(u.shape[2:]) / SIDE
    host = u.detach().cpu().to(torch.float64).numpy()
    blurred = gaussian_filter()(host, (0, 0, *(width,) * (u.ndim - 2)), mode="nearest")
    return torch.from_numpy(blurred).to(u.device, u.dtype)


def _contrast(u: torch.Tensor, c: float, generator: Any) -> torch.Tensor:
    mean = u.mean(dim=tuple(range(2, u.ndim)), keepdim=True)
    return mean + c * (u - mean)


def _brightness(u: torch.Tensor, c: float, generator: Any) -> torch.Tensor:
    if u.shape[1] != 3:
        return u + c
    # At constant hue and saturation all channels grow like the largest, V; black, without either, becomes grey.
    v = u.amax(dim=1, keepdim=True)
    brighter = (v + c).clamp(max=1)
    return torch.where(v > 0, u * (brighter / torch.where(v > 0, v, 1)), brighter)


def _pixelate(u: torch.Tensor, c: float, generator: Any) -> torch.Tensor:
    for axis in range(2, u.ndim):
        n = u.shape[axis]
        m = max(int(c * n), 1)
        there_and_back = torch.from_numpy(_box(n, m) @ _box(m, n)).to(u.device, u.dtype)
        u = torch.tensordot(u, there_and_back, dims=([axis], [1])).movedim(-1, axis)
    return u


def _box(m: int, n: int) -> Array:
    """The (m, n) matrix that resizes n elements to m: means of those whose middle lies in the box, as in Pillow."""
    scale = n / m
    centres, middles = (np.arange(m)[:, None] + 0.5) * scale, np.arange(n) + 0.5
    away = (middles - centres) / max(scale, 1)
    inside = (-0.5 < away) & (away <= 0.5)
    return inside / inside.sum(axis=1, keepdims=True)


CORRUPTIONS: dict[str, Callable[[torch.Tensor, float, Any], torch.Tensor]] = {
    "gaussian": lambda u, c, generator: u + c * _normal(u, generator),
    "shot": lambda u, c, generator: torch.poisson(c * u.clamp(min=0), generator=generator) / c,
    "impulse": _impulse,
    "speckle": lambda u, c, generator: u + c * u * _normal(u, generator),
    "uniform": lambda u, c, generator: u + c * math.sqrt(3) * (2 * _uniform(u, generator) - 1),
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "pixelate": _pixelate,
}
