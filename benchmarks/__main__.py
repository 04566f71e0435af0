"""``python -m benchmarks [--case NAME ...] [--quick]``: measure, print, and write ``benchmarks/results/``.

Times are medians with quartiles; ratios are taken within one run, from medians, since machines are noisy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import clipaware as ca
from benchmarks import plots
from benchmarks.cases import CASES, Row

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
MARKERS = "<!-- printed by make bench: -->", "<!-- end of what it printed -->"
GPU_MARKERS = "<!-- printed by make bench, on a GPU: -->", "<!-- end of what it printed on a GPU -->"
COLUMNS = ["case", "variant", "rows", "n", "dtype", "p", "quantity", "value", "low", "high", "unit"]


def device() -> str:
    """The processor, how many cores of it, and the GPU if one is in use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch and torch.cuda.is_available() else ""
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores" + (gpu and f", {gpu}")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def described(row: Row) -> str:
    """A line for a row."""
    size = f"{row['rows']} x {row['n']}" if "rows" in row else str(row.get("n", ""))
    label = f"{row['variant']}, {row.get('dtype', '')} p={row['p']}" if "p" in row else str(row["variant"])
    span = f"  [{row['low']:.4g}, {row['high']:.4g}]" if "low" in row else ""
    return f"  {label:<52} {size:>15}  {row['quantity']}: {row['value']:.4g} {row['unit']}{span}"


def save(name: str, rows: list[Row]) -> None:
    context = {
        "clipaware": ca.__version__,
        **{package: version(package) for package in ("numpy", "numba", "torch", "jax", "tensorflow-cpu", "foolbox")},
        "python": platform.python_version(),
        "device": device(),
        "date": datetime.date.today().isoformat(),
    }
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS + list(context), restval="")
        writer.writeheader()
        writer.writerows({**row, **context} for row in rows)


def load(name: str) -> list[dict[str, str]]:
    """The rows of a case as they were written."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_to_readme(table: str, markers: tuple[str, str]) -> None:
    """Between the two comments that say what it is."""
    text = README.read_text()
    start, end = text.index(markers[0]) + len(markers[0]), text.index(markers[1])
    README.write_text(f"{text[:start]}\n{table}{text[end:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = list(CASES)
    parser.add_argument("--case", nargs="*", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="few repetitions; prints and writes nothing")
    args = parser.parse_args()
    np.seterr(all="ignore")
    for name in args.case:
        tqdm.write(f"\n{name}: {CASES[name].__doc__}")
        rows: list[Row] = []
        # How much a case has to say is not known before; what it has said is.
        with tqdm(CASES[name](args.quick), desc=name, unit=" results", leave=False, disable=None) as results:
            for row in results:
                rows.append({"case": name, **row})
                tqdm.write(described(row))
        if rows and not args.quick:  # a case without its hardware has none, and what another machine said stays
            RESULTS.mkdir(exist_ok=True)
            save(name, rows)
    if not args.quick:
        everything: dict[str, Any] = {name: load(name) for name in names}
        for name, table, markers in (
            ("table.md", plots.table(everything), MARKERS),
            ("gpu_table.md", plots.gpu_table(everything), GPU_MARKERS),
        ):
            (RESULTS / name).write_text(table)
            write_to_readme(table, markers)
            tqdm.write(f"\n{table}")
        for path in plots.draw(everything, RESULTS):
            tqdm.write(f"Figure: {path}")


if __name__ == "__main__":
    main()
