"""One file at several sizes in several norms: a contact sheet, asked against delivered, and a CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from clipaware._cli.demo import figure_classes, make_directory, save
from clipaware._cli.work import CommandError, Row, Settings, Task, distance, perturbed, seed_for, shown
from clipaware._media import Content, FileError, Part, read

Array = Any

COLUMNS = ("input", "noise", "seed", "norm", "asked", "naive", "delivered", "reach", "reachable", "clipped", "eta")
CURVE = 25  # points of the plot, and how far beyond the largest size it goes
BEYOND = 1.15


def swept(
    path: Path,
    out: Path,
    sizes: list[tuple[str, float]],
    norms: list[float],
    settings: Settings,
    seed: int,
    overwrite: bool,
) -> tuple[list[Row], list[Path]]:
    """The rows of the table, and the files written."""
    figure_class = figure_classes()
    content = read(path, settings.most)
    if content.kind == "array":
        raise FileError(f"{path}: is an array, expected a picture or a sound")
    part = content.parts[""]
    if content.kind == "picture" and part.values.ndim > 3:
        raise FileError(f"{path}: has shape {part.values.shape}, expected one picture")
    paths = [out / name for name in ("sweep.png", "sweep.pdf", "delivered.png", "delivered.pdf", "sweep.csv")]
    for old in paths:
        if old.exists() and not overwrite:
            raise CommandError(f"{old} exists; choose --overwrite or another --out")
    make_directory(out)

    noise_seed = seed_for(seed, path.name, 0, "sweep", 0.0)

    def solved(p: float, eps: float) -> tuple[Part, Row]:
        task = Task(path, path, "eps", eps, 0, noise_seed)
        values, row = perturbed(task, dataclasses.replace(settings, norm=p), content.kind, "", part)
        made = dataclasses.replace(part, values=values)
        del row["counted"]
        return made, row | {"delivered": distance(part, made, p)}

    sheet, rows, curves = [], [], {}
    for p in norms:
        asked = [eps_of(measure, value, p, part.values.size) for measure, value in sizes]
        line = [solved(p, eps) for eps in asked]
        sheet.append(line)
        rows += [row for _, row in line]
        grid = np.linspace(0, BEYOND * max(asked), CURVE)
        curves[p] = [solved(p, float(eps))[1] for eps in grid]
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"input": path.name} for row in rows)
    save(paths[4], table.getvalue().encode())
    _save_figure(paths[:2], _sheet(figure_class, content, sheet, path.name, settings.noise))
    _save_figure(paths[2:4], _delivered(figure_class, curves, rows))
    return rows, paths


def eps_of(measure: str, value: float, p: float, n: int) -> float:
    """--rms stands for elements of that size: in the norm p, n of them have n^(1/p) times as much."""
    return value if measure == "eps" else value * n ** (1 / p)


def _save_figure(paths: list[Path], figure: Any) -> None:
    for path in paths:
        file = io.BytesIO()
        # Without the time, so that the same command gives the same bytes.
        figure.savefig(file, format=path.suffix[1:], metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
        save(path, file.getvalue())


def _sheet(figure_class: Any, content: Content, sheet: list[list[tuple[Part, Row]]], name: str, noise: str) -> Any:
    """A line per norm; first the file as it was, then from small to large."""
    part = content.parts[""]
    height, width = part.values.shape[:2] if content.kind == "picture" else (3, 4)
    across, down = 1 + len(sheet[0]), len(sheet)
    side = 2.3
    figure = figure_class(
        figsize=(side * across, (side * height / width + 0.4) * down + 0.3), dpi=130, layout="constrained"
    )
    axes = np.atleast_2d(figure.subplots(down, across, squeeze=False))
    figure.suptitle(f"{name}, {noise} noise", fontsize=11)
    for line, (first, *others) in zip(sheet, axes, strict=True):
        _draw(first, content, part)
        first.set_title("as it was", fontsize=8)
        for (made, row), axis in zip(line, others, strict=True):
            _draw(axis, content, made)
            missed = "" if row["reachable"] else " (all there is)"
            axis.set_title(
                f"L{_order(row['norm'])}: asked {row['asked']:.6g}\ndelivered {row['delivered']:.7g}{missed}",
                fontsize=8,
            )
    return figure


def _order(p: float) -> str:
    return "∞" if p == math.inf else shown(p)


def _draw(axis: Any, content: Content, part: Part) -> None:
    values = np.clip((part.real() - part.low) / (part.high - part.low), 0, 1)
    if content.kind == "sound":
        time = np.arange(len(values)) / content.extra.rate
        axis.plot(time, 2 * values - 1, linewidth=0.3)
        axis.set(ylim=(-1.05, 1.05), xlim=(0, max(time[-1], 1e-9)))
        axis.tick_params(labelsize=6)
        return
    axis.imshow(values, cmap="gray", vmin=0, vmax=1)
    axis.set_axis_off()


def _delivered(figure_class: Any, curves: dict[float, list[Row]], rows: list[Row]) -> Any:
    """A plot per norm: what naive scaling and what this delivers, against what was asked for."""
    figure = figure_class(figsize=(3.4 * len(curves), 3.4), dpi=130, layout="constrained")
    for axis, (p, curve) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        asked = [row["asked"] for row in curve]
        axis.plot(asked, asked, color="0.6", linestyle=":", label="asked")
        axis.plot(asked, [row["naive"] for row in curve], color="tab:red", label="naive")
        axis.plot(asked, [row["delivered"] for row in curve], color="tab:blue", label="clipaware")
        here = [row for row in rows if row["norm"] == p]
        axis.plot(
            [row["asked"] for row in here], [row["delivered"] for row in here], "o", color="tab:blue", markersize=4
        )
        axis.set_title(f"L{_order(p)}", fontsize=10)
        axis.set(xlabel="norm asked", ylabel="norm delivered", xlim=(0, None), ylim=(0, None))
        axis.locator_params(nbins=5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    return figure
