"""What became of each sample: asked, delivered, and what naive scaling would have delivered."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

Array = Any


@dataclass(frozen=True)
class Report:
    """Per sample, each with the axes of a sample reduced to length 1; ``print`` shows them as a table.

    Attributes
    ----------
    eps
        The norm that was asked for.
    eta
        The scale that delivers it, as of :func:`clipaware.rescale`.
    norm
        The norm of the array that :func:`clipaware.perturb` returns.
    naive_norm
        The norm of ``clip(x + delta*eps/||delta||)``.
    reach
        The largest norm that this direction can have.
    clipped
        The share of elements that end at a bound.
    reachable
        Whether eps can be delivered.
    """

    eps: Array
    eta: Array
    norm: Array
    naive_norm: Array
    reach: Array
    clipped: Array
    reachable: Array

    def __str__(self) -> str:
        columns = [[f.name, *map(_shown, _flat(getattr(self, f.name)))] for f in fields(self)]
        columns.insert(0, ["sample", *map(str, range(len(columns[0]) - 1))])
        widths = [max(map(len, column)) for column in columns]
        rows = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in zip(*columns, strict=True)
        ]
        if len(rows) > 21:
            rows = [*rows[:11], f"... {len(rows) - 21} more ...", *rows[-10:]]
        return "\n".join(rows)


def _shown(value: float | bool) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.7g}"


def _flat(a: Array) -> list[Any]:
    from clipaware._dispatch import backend_of

    a = getattr(a, "raw", a)  # of an EagerPy tensor
    a = a.to_local() if hasattr(a, "to_local") else a  # of a DTensor, what this process knows
    return backend_of(a).fetch(a).ravel().tolist()  # type: ignore[no-any-return]
