"""How results are shown: tables and a progress bar on a terminal, plain lines in a pipe, JSON for scripts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
Item = TypeVar("Item")

MOST_ROWS = 40  # of a table on a terminal
HEADER = ("asked", "naive", "delivered", "error", "clipped", "reach", "file")
WIDTHS = (12, 12, 12, 10, 8, 12, 0)


def on_terminal() -> bool:
    return sys.stdout.isatty()


def error(text: str) -> None:
    print(readable(f"clipaware: {text}"), file=sys.stderr)


def readable(text: str) -> str:
    """In one line, without what would steer a terminal: names of files may have any bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cells(row: Row, root: Path) -> tuple[str, ...]:
    """A row of `perturb`, for reading."""
    asked, delivered = row["asked"], row["delivered"]
    off = f"{delivered / asked - 1:+.1e}" if asked else "0"
    name = row["output"].relative_to(root) if row["output"].is_relative_to(root) else row["output"]
    part = f" ({row['part']})" if row["part"] else ""
    reach = f"{row['reach']:.7g}" if row["reachable"] else f"{row['reach']:.7g}!"
    return (
        f"{asked:.7g}",
        f"{row['naive']:.7g}",
        f"{delivered:.7g}",
        off,
        f"{row['clipped']:.1%}",
        reach,
        f"{name}{part}",
    )


def line(values: Sequence[str]) -> str:
    return readable("  ".join(value.rjust(width) for value, width in zip(values, WIDTHS, strict=True)))


def as_json(row: Row) -> str:
    """Numbers that JSON does not have become strings; paths too."""
    plain = {}
    for name, value in row.items():
        odd = isinstance(value, float) and not math.isfinite(value)
        plain[name] = str(value) if odd or isinstance(value, Path) else value
    return json.dumps(plain)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, more: str = "") -> None:
    """With lines on a terminal, else in plain columns."""
    if not on_terminal():
        columns = [header, *rows]
        widths = [max(len(row[k]) for row in columns) for k in range(len(header))]
        for row in columns:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title)
    for name in header:
        drawn.add_column(name, justify="left" if name in ("file", "quantity") else "right", overflow="fold")
    for row in rows[:MOST_ROWS]:
        drawn.add_row(*row)
    console = Console()
    console.print(drawn)
    if len(rows) > MOST_ROWS:
        console.print(f"... and {len(rows) - MOST_ROWS} more{more}")


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items as they come, with a bar and the time left where somebody may be watching."""
    if not sys.stderr.isatty() or total < 2:
        yield from items
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        done = bar.add_task(what, total=total)
        for item in items:
            bar.advance(done)
            yield item
