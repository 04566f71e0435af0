"""A failing batch made small: one row, few elements, short numbers, nothing special about the arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from torture.backends import Backend
from torture.cases import Batch, Look, cast, to_json
from torture.check import check

TRIES = 400


def fails(backend: Backend, batch: Batch, kind: str) -> bool:
    """Whether it still fails in that way."""
    return any(found == kind for _, found, _ in check(backend, batch).failures)


def shrunk(backend: Backend, batch: Batch, row: int, kind: str, tries: int = TRIES) -> Batch:
    """The smallest batch found that fails in the same way."""
    left = tries

    def still(candidate: Batch) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(backend, candidate, kind)

    for simpler in (batch.take(np.array([row])), replace(batch, look=Look()), replace(batch, unreachable="maximize")):
        if simpler.rows < batch.rows and still(simpler):
            batch, row = simpler, 0
    for look in (Look(), replace(batch.look, layout="C"), replace(batch.look, place="first", sample=())):
        if look != batch.look and still(candidate := replace(batch, look=look)):
            batch = candidate
    batch = _shorter(batch, still)
    changed = True
    while changed and left > 0:
        changed = False
        for candidate in _plainer(batch):
            if still(candidate):
                batch, changed = candidate, True
                break
    return batch


def _shorter(batch: Batch, still: Callable[[Batch], bool]) -> Batch:
    """Without every element that it fails without: first large parts, then single ones."""
    size = batch.n // 2
    while size >= 1:
        start = 0
        while start < batch.n and batch.n > 1:
            keep = np.r_[0:start, min(start + size, batch.n) : batch.n]
            candidate = batch.take(np.arange(batch.rows), keep)
            if len(keep) and still(candidate):
                batch = candidate
            else:
                start += size
        size //= 2
    return batch


def _with(batch: Batch, name: str, value: Any) -> Batch:
    changed: dict[str, Any] = {name: value}
    return replace(batch, **changed)


def _plainer(batch: Batch) -> Iterator[Batch]:
    """The same with a simpler number somewhere."""
    if batch.n > 8 or batch.rows > 1:
        return
    for name in ("p", "mode"):
        simple: tuple[Any, ...] = (1.0, 2.0) if name == "p" else ("equal",)
        for value in simple:
            if getattr(batch, name) != value:
                yield _with(batch, name, value)
            else:
                break
    for name in ("lower", "upper", "delta", "x", "eps"):
        a = getattr(batch, name)
        for i in np.ndindex(a.shape):
            for value in _simpler(float(a[i])):
                b = np.array(a)
                b[i] = value if name == "eps" else cast(np.array(value), batch.dtype)
                # Only towards fewer digits, so that this ends.
                if b[i] != a[i] and len(float(b[i]).hex()) <= len(float(a[i]).hex()):
                    yield _with(batch, name, b)


def _simpler(value: float) -> Iterator[float]:
    if value in (0.0, 1.0, -1.0) or not np.isfinite(value):
        return
    yield from (0.0, 1.0, -1.0)
    for digits in (1, 2, 4):
        yield float(f"{value:.{digits - 1}e}")


def as_test(batch: Batch, backend: str, kind: str, message: str, name: str) -> str:
    """A test that can be pasted, and fails."""
    lines = to_json(batch, found=f"{backend}: {kind}: {message}").rstrip().splitlines()
    body = "\n".join("        " + line for line in lines)
    return (
        f"def test_{name}():\n"
        f'    """{backend}: {kind}."""\n'
        f"    batch = from_json(\n"
        f'        """\n{body}\n        """\n    )\n'
        f'    assert not check(load("{backend}"), batch).failures\n'
    )


def file_name(batch: Batch, backend: str, kind: str) -> str:
    words: list[Any] = [kind, batch.dtype, f"p{batch.p:g}", batch.mode, backend]
    return "_".join(str(word).replace("-", "_").replace(" ", "_").replace(".", "_") for word in words).lower()
