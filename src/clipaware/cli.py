"""The command line: ``clipaware demo`` and ``clipaware env``, a function each."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import io
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import clipaware as ca
from clipaware._kernels import threads

Image = np.ndarray[Any, np.dtype[np.float32]]

# The demo's norms and the sizes asked for. The last of p = 2 is more than the photograph has room for.
SIZES: dict[float, list[float]] = {1: [20000, 60000], 2: [20, 40, 80, 160, 400], math.inf: [0.5, 0.9]}
SHOWN = 160.0  # the L2 norm in the pictures

# Modules that clipaware can work with, and the distribution that usually brings each.
OPTIONAL = {
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow",
    "cupy": "cupy",
    "dask": "dask",
    "numba": "numba",
    "ml_dtypes": "ml_dtypes",
    "foolbox": "foolbox",
    "matplotlib": "matplotlib",
    "PIL": "pillow",
}


class CommandError(Exception):
    """What the user should know, in one line; it ends the command with exit code 2."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line (by default, this process's) and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        args.run(args)
    except CommandError as error:
        print(f"clipaware: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="clipaware", description=ca.__doc__)
    parser.add_argument("--version", action="version", version=f"clipaware {ca.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    about = "perturb the bundled photograph, naively and exactly: a table and a figure"
    command = commands.add_parser("demo", help=about, description=about)
    command.add_argument(
        "--out", type=Path, default=Path("clipaware-demo"), metavar="DIR", help="where demo.png goes (%(default)s)"
    )
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the noise (%(default)s)")
    command.set_defaults(run=demo)

    about = "say which versions are installed and what does the computing"
    command = commands.add_parser("env", help=about, description=about)
    command.set_defaults(run=env)
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of 0 or more, got {text!r}")
    return int(text)


# --- clipaware demo ---------------------------------------------------------------------------------------------------


def demo(args: argparse.Namespace) -> None:
    """Gaussian noise of several sizes on the bundled photograph: a table, and ``demo.png``."""
    # Before any work, so that what is missing or forbidden is said at once.
    x = _photograph()
    figure_class = _figure_class()
    _make_directory(args.out)

    noise: Image = np.asarray(np.random.default_rng(args.seed).standard_normal(x.shape), np.float32)
    height, width, channels = x.shape
    print(f"Gaussian noise (seed {args.seed}) on a photograph of {height} x {width} x {channels} values in [0, 1]:\n")
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
    path = args.out / "demo.png"
    _write(path, _figure(figure_class, x, noise, shown, _report(x, noise, asked, 2)))
    print(f"Figure: {path}")


def _photograph() -> Image:
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise _missing("Pillow") from error
    source = importlib.resources.files("clipaware") / "data" / "coffee.jpg"
    with source.open("rb") as file, pillow.open(file) as image:
        return np.asarray(image.convert("RGB"), np.float32) / np.float32(255)


def _figure_class() -> Any:
    try:
        # Not pyplot: a Figure of its own draws with Agg, needs no display and leaves no state behind.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing("Matplotlib") from error
    return Figure


def _missing(what: str) -> CommandError:
    return CommandError(f"the demo needs {what}, which cannot be imported: pip install 'clipaware[cli]'")


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


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the directory {path}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: under another name first."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


# --- clipaware env ----------------------------------------------------------------------------------------------------


def env(args: argparse.Namespace) -> None:
    """Versions, and what computes on which arrays. Of the frameworks it reads metadata only, and imports none."""
    versions = {"clipaware": ca.__version__, "Python": platform.python_version(), "NumPy": np.__version__}
    installed = _installed()
    versions |= {OPTIONAL[module]: installed.get(module, "not installed") for module in OPTIONAL}
    _print_pairs(versions)
    print("\nKernels in use:")
    _print_pairs(_kernels(installed))


def _installed() -> dict[str, str]:
    """Versions by module, since some come in distributions of several names (tensorflow-cpu, cupy-cuda12x)."""
    distributions = importlib.metadata.packages_distributions()
    found = {}
    for module, usual in OPTIONAL.items():
        names = {name.lower().replace("-", "_"): name for name in distributions.get(module, ())}
        if names:
            name = names.get(usual) or min(names.values())
            version = importlib.metadata.version(name)
            found[module] = version if usual in names else f"{version} ({name})"
    return found


def _kernels(installed: dict[str, str]) -> dict[str, str]:
    """What computes on each kind of array, and why that."""
    try:
        importlib.import_module("clipaware._kernels.numba")
        cpu = f"compiled by Numba, on up to {threads.count()} thread(s)"
    except ImportError as error:
        found = installed.get("numba")
        why = f"Numba {found} does not work here: {error}" if found else "Numba is not installed: pip install numba"
        cpu = f"NumPy operations ({why})"
    absent = "none (torch is not installed)"
    compiles = "torch" in installed and importlib.util.find_spec("triton") is not None
    gpu = "compiled by Triton" if compiles else "PyTorch operations (Triton is not installed: pip install triton)"
    cupy = "compiled by Triton, by way of PyTorch" if compiles else "CuPy operations (PyTorch with Triton has kernels)"
    return {
        "NumPy arrays": cpu,
        "PyTorch tensors, CPU": cpu if "torch" in installed else absent,
        "PyTorch tensors, CUDA": gpu if "torch" in installed else absent,
        "PyTorch tensors, else": "PyTorch operations" if "torch" in installed else absent,
        "CuPy arrays": cupy if "cupy" in installed else "none (cupy is not installed)",
    }


def _print_pairs(pairs: dict[str, str]) -> None:
    width = max(map(len, pairs))
    for name, value in pairs.items():
        print(f"  {name.ljust(width)}  {value}")


if __name__ == "__main__":
    raise SystemExit(main())
