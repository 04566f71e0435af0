"""eps from other ways to say how large a perturbation is: SNR, PSNR, RMS, contrast. All are L2 norms, for ``p=2``."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from clipaware import _check
from clipaware._api import _call_of
from clipaware._dispatch import public

Array = Any
ArrayT = TypeVar("ArrayT")

__all__ = ["eps_from_contrast", "eps_from_psnr", "eps_from_rms", "eps_from_snr"]


@public
def eps_from_snr(x: ArrayT, snr: float, *, axis: Any = "batch") -> ArrayT:
    """Return the L2 norm of noise that leaves a signal-to-noise ratio of `snr` decibels: ``||x||_2 * 10^(-snr/20)``.

    The ratio is that of the sums of squares, ``snr = 10*log10(sum(x^2)/sum(noise^2))``; a mean of x counts as signal.

    Parameters
    ----------
    x
        Signals: a floating array of any supported framework.
    snr
        In decibels: a number.
    axis
        What one sample spans, as for :func:`clipaware.perturb`.

    Returns
    -------
    array
        Like x but float32 at least, with the axes of a sample reduced to length 1: an eps for
        :func:`clipaware.perturb`.

    Examples
    --------
    >>> import numpy as np, clipaware as ca
    >>> from clipaware.targets import eps_from_snr
    >>> t = np.linspace(0, 1, 8000)
    >>> x = 0.9 * np.sin(2 * np.pi * 440 * t)
    >>> v = ca.perturb(x, np.random.default_rng(0).standard_normal(8000), eps_from_snr(x, 6.0), bounds=(-1, 1))
    >>> float((10 * np.log10(np.sum(x**2) / np.sum((v - x) ** 2))).round(9))
    6.0
    """
    be, rows, kept, _ = _sample_sizes(x, axis)
    return be.reshape(be.result(be.sqrt(be.row_dot(rows, rows)) * amplitude(snr, "snr"), rows), kept)  # type: ignore[no-any-return]


@public
def eps_from_psnr(x: ArrayT, psnr: float, *, bounds: tuple[float, float] = (0, 1), axis: Any = "batch") -> ArrayT:
    """Return the L2 norm for a peak signal-to-noise ratio of `psnr` decibels: ``(b - a)*sqrt(n)*10^(-psnr/20)``.

    The ratio is ``psnr = 10*log10((b - a)^2/mean((v - x)^2))``, with ``b - a`` the distance of the bounds and n the
    elements of a sample.

    Parameters
    ----------
    psnr
        In decibels: a number.
    bounds
        Two numbers; their distance is the peak.
    x, axis
        As for :func:`eps_from_snr`.

    Returns
    -------
    array
        As of :func:`eps_from_snr`.

    Examples
    --------
    >>> import numpy as np
    >>> from clipaware.targets import eps_from_psnr
    >>> eps_from_psnr(np.zeros((2, 100)), 20.0)
    array([[1.],
           [1.]])
    """
    return _same_for_all(x, axis, peak(bounds) * amplitude(psnr, "psnr"))  # type: ignore[no-any-return]


@public
def eps_from_rms(x: ArrayT, rms: float, *, axis: Any = "batch") -> ArrayT:
    """Return the L2 norm of a perturbation with that root mean square: ``rms*sqrt(n)``, n the elements of a sample.

    Parameters
    ----------
    rms
        A number, in the units of x.
    x, axis
        As for :func:`eps_from_snr`.

    Returns
    -------
    array
        As of :func:`eps_from_snr`.

    Examples
    --------
    >>> import numpy as np
    >>> from clipaware.targets import eps_from_rms
    >>> eps_from_rms(np.zeros((1, 32, 32, 3)), 0.1).round(4)
    array([[[[5.5426]]]])
    """
    not_negative(rms, "rms")
    return _same_for_all(x, axis, rms)  # type: ignore[no-any-return]


@public
def eps_from_contrast(x: ArrayT, contrast: float, *, axis: Any = "batch") -> ArrayT:
    """Return the L2 norm of noise with that RMS contrast: ``contrast*mean(x)*sqrt(n)``, n the elements of a sample.

    RMS contrast is the root mean square of the noise over the mean of the picture, which is to be linear in luminance
    (undo a display's gamma first) and to have 0 for black.

    Parameters
    ----------
    contrast
        A number: 0.1 for noise of a tenth of the mean luminance.
    x, axis
        As for :func:`eps_from_snr`.

    Returns
    -------
    array
        As of :func:`eps_from_snr`. A sample with a mean of 0 or less has no contrast: NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from clipaware.targets import eps_from_contrast
    >>> x = np.full((1, 100, 100), 0.5)
    >>> float(eps_from_contrast(x, 0.2).item())
    10.0
    """
    not_negative(contrast, "contrast")
    be, rows, kept, n = _sample_sizes(x, axis)
    total = be.row_sum(rows)
    found = be.where(total > 0, total * (contrast / math.sqrt(n or 1)), math.nan)
    return be.reshape(be.result(found, rows), kept)  # type: ignore[no-any-return]


def _sample_sizes(x: Array, axis: Any) -> tuple[Any, Array, Any, int]:
    """The backend, x as (rows, n) and float32 at least, the shape in which one number per sample goes back, and n."""
    call = _call_of(x, x, 0.0, 2, (None, None), axis, flat=True)
    n = call.be.shape(call.problem.x)[1]
    if not isinstance(n, int):
        raise ValueError(f"x has shape {call.shape}, expected known lengths of a sample")
    return call.be, call.be.result(call.problem.x, x), call.kept, n


def _same_for_all(x: Array, axis: Any, per_root_n: float) -> Array:
    be, rows, kept, n = _sample_sizes(x, axis)
    return be.reshape(be.result(0 * be.row_sum(rows[:, :1]) + per_root_n * math.sqrt(n), rows), kept)


def peak(bounds: Any) -> float:
    """The distance of two bounds."""
    low, high = _check.bounds_pair(bounds)
    if not (_check.is_number(low) and _check.is_number(high) and 0 < high - low < math.inf):
        raise ValueError(f"bounds are {bounds}, expected two numbers a finite distance apart, the peak")
    return float(high - low)


def amplitude(decibels: Any, name: str) -> float:
    """A ratio of amplitudes, from decibels."""
    if not _check.is_number(decibels):
        raise TypeError(f"{name} is {decibels!r}, expected a number of decibels")
    if not math.isfinite(decibels):
        raise ValueError(f"{name} is {decibels}, expected a finite number of decibels")
    return float(10 ** (-decibels / 20))


def not_negative(value: Any, name: str) -> None:
    """Raise unless it is a finite number that is not."""
    if not _check.is_number(value):
        raise TypeError(f"{name} is {value!r}, expected a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number that is not negative")
