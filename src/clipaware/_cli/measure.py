"""How far apart two files are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from clipaware._cli.work import Row, distance, norm_of
from clipaware._media import FileError, Part, read


def measured(a: Path, b: Path, norms: list[float], most: int) -> list[Row]:
    """A row for each array that two files have."""
    first, second = read(a, most), read(b, most)
    if first.parts.keys() != second.parts.keys():
        raise FileError(f"{b}: holds {sorted(second.parts)}, expected {sorted(first.parts)} as {a} does")
    rows = []
    for name, part in first.parts.items():
        other = second.parts[name]
        if part.values.shape != other.values.shape:
            raise FileError(f"{b}: has shape {other.values.shape}, expected {part.values.shape} as {a} has")
        rows.append({"part": name, **_compared(part, other, norms)})
    return rows


def _compared(a: Part, b: Part, norms: list[float]) -> Row:
    x, v = a.real(), b.real()
    row: dict[str, Any] = {"elements": int(x.size)}
    for p in norms:
        row[f"L{p:g}"] = distance(a, b, p)
    rms = row["L2"] / math.sqrt(x.size)
    row |= {
        "RMS": rms,
        "SNR (dB)": _decibels(norm_of(x, 2), row["L2"]),
        "PSNR (dB)": _decibels(a.high - a.low, rms),
        "contrast": rms / x.mean() if x.mean() > 0 else math.nan,
        # Of B, whatever moved it there.
        "clipped": float(np.mean((v <= b.low) | (v >= b.high))),
        "changed": float(np.mean(x != v)),
    }
    return row


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal > 0 else -math.inf
