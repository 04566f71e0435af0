"""The bundled photograph, perturbed naively and exactly."""

from __future__ import annotations

import importlib.resources
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import clipaware as ca
from clipaware._cli.work import CommandError
from clipaware._media import FileError, read, write_bytes

Image = np.ndarray[Any, np.dtype[np.float32]]

# Norms and the sizes asked for. The last of p = 2 is more than the photograph has room for.
SIZES: dict[float, list[float]] = {1: [20000, 60000], 2: [20, 40, 80, 160, 400], math.inf: [0.5, 0.9]}
SHOWN = 160.0  # the L2 norm in the pictures


def run_demo(out: Path, seed: int) -> None:
    """Gaussian noise of several sizes: a table, and ``demo.png``."""
    # Before any work, so that what is missing or forbidden is said at once.
    x = photograph()
    figure_class = figure_classes()
    make_directory(out)

    noise: Image = np.asarray(np.random.default_rng(seed).standard_normal(x.shape), np.float32)
    height, width, channels = x.shape
    print(f"Gaussian noise (seed {seed}) on a photograph of {height} x {width} x {channels} values in [0, 1]:\n")
    reports = {p: _report(x, noise, sizes, p) for p, sizes in SIZES.items()}
    for line in _table(reports):
        print(line)

    shown = _report(x, noise, [SHOWN], 2)
    naive, reach = shown.naive_norm.item(), shown.reach.item()
    print(
        f"\nNaive scaling loses what clipping cuts off, {1 - naive / SHOWN:.0%} at an L2 norm of {SHOWN:g};\n"
        f"the exact scale delivers what was asked for, up to the most that this noise can have ({reach:.1f})."
    )
    asked = np.concatenate([np.linspace(0, reach, 31), reach * np.array([1.1, 1.2])])
    path = out / "demo.png"
    save(path, _figure(figure_class, x, noise, shown, _report(x, noise, asked, 2)))
    print(f"Figure: {path}")


def photograph() -> Image:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise missing("Pillow") from error
    with importlib.resources.as_file(importlib.resources.files("clipaware") / "data" / "coffee.jpg") as path:
        return np.asarray(read(path).parts[""].values, np.float32) / np.float32(255)


def figure_classes() -> Any:
    """Matplotlib's Figure. Not pyplot: a Figure of its own draws with Agg, needs no display and leaves no state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("Matplotlib") from error
    return Figure


def missing(what: str) -> CommandError:
    return CommandError(f"this needs {what}, which cannot be imported: pip install 'clipaware[cli]'")


def make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the directory {path}: {error.strerror}") from error


def save(path: Path, content: bytes) -> None:
    try:
        write_bytes(path, content)
    except FileError as error:
        raise CommandError(str(error)) from error


def _report(x: Image, noise: Image, sizes: Sequence[float] | np.ndarray[Any, Any], p: float) -> ca.Report:
    """The same picture and noise once per size."""
    batch = (len(sizes), *x.shape)
    return ca.report(np.broadcast_to(x, batch), np.broadcast_to(noise, batch), np.asarray(sizes, float), p=p)


def _table(reports: dict[float, ca.Report]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("p", "asked", "naive norm", "exact norm", "naive error", "exact error", "clipped", "reachable")
    ]
    for p, report in reports.items():
        columns = (report.eps, report.naive_norm, report.norm, report.clipped, report.reachable)
        for asked, naive, exact, clipped, reachable in zip(*(c.ravel().tolist() for c in columns), strict=True):
            errors = (f"{round(100 * (norm / asked - 1), 4) + 0.0:+.4f}%" for norm in (naive, exact))  # + 0.0: no "-0"
            numbers = (f"{p:g}", f"{asked:g}", f"{naive:.7g}", f"{exact:.7g}")
            rows.append((*numbers, *errors, f"{clipped:.1%}", "yes" if reachable else "no"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _figure(figure_class: Any, x: Image, noise: Image, shown: ca.Report, curve: ca.Report) -> bytes:
    """A PNG: the photograph, both results at one size, how far each moved the pixels, and delivered against asked."""
    import matplotlib

    scale = np.float32(SHOWN / math.sqrt(np.vdot(noise, noise)))
    results = {
        "naive": (np.clip(x + scale * noise, 0, 1), shown.naive_norm.item()),
        "exact": (ca.perturb(x, noise, SHOWN, axis=None), shown.norm.item()),
    }
    # Per pixel, the L2 norm over its channels: the norm in the title is that of this picture.
    moves = {name: np.sqrt(np.sum((v - x) ** 2, axis=-1)) for name, (v, _) in results.items()}
    brightest = max(np.quantile(move, 0.995) for move in moves.values())

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same figure whatever the user's settings
        figure = figure_class(figsize=(13.2, 6.7), dpi=110, layout="constrained")
        axes = figure.subplots(2, 3)
        figure.suptitle(f"Gaussian noise, asked to have an L2 norm of {SHOWN:g}, then clipped to [0, 1]", fontsize=15)

        axes[0, 0].imshow(x)
        axes[0, 0].set_title("photograph")
        for column, (name, (v, norm)) in enumerate(results.items(), start=1):
            axes[0, column].imshow(v)
            axes[0, column].set_title(f"{name}: norm {norm:.2f} ({round(100 * (norm / SHOWN - 1), 1) + 0.0:+.1f}%)")
            drawn = axes[1, column].imshow(moves[name], cmap="magma", vmin=0, vmax=brightest)
            axes[1, column].set_title(f"{name}: change per pixel")
        figure.colorbar(drawn, ax=axes[1, 2], extend="max", shrink=0.8, label="change (L2 norm over R, G, B)")
        for picture in (*axes[0], *axes[1, 1:]):
            picture.set_axis_off()

        plot = axes[1, 0]
        asked, reach = curve.eps.ravel(), shown.reach.item()
        plot.plot(asked, asked, color="0.6", linestyle=":", label="asked")
        plot.plot(asked, curve.norm.ravel(), color="tab:blue", linewidth=2.2, label="exact")
        plot.plot(asked, curve.naive_norm.ravel(), color="tab:red", linewidth=2.2, label="naive")
        plot.axhline(reach, color="0.4", linewidth=0.9, linestyle="--")
        plot.text(0.02 * reach, 1.02 * reach, f"all clipped: {reach:.1f}", color="0.3", va="bottom", fontsize=9)
        plot.axvline(SHOWN, color="0.8", linewidth=0.9, zorder=0)
        for name, colour in (("naive", "tab:red"), ("exact", "tab:blue")):
            plot.plot(SHOWN, results[name][1], "o", color=colour)
        plot.set(xlabel="L2 norm asked", ylabel="L2 norm delivered", xlim=(0, asked[-1]), ylim=(0, asked[-1]))
        plot.set_title("delivered against asked")
        plot.legend(loc="lower right", frameon=False)
        plot.set_box_aspect(x.shape[0] / x.shape[1])  # in line with the pictures beside it
        plot.spines[["top", "right"]].set_visible(False)
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()
