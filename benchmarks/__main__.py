"""``python -m benchmarks [--case NAME ...] [--quick]``: measure, print, and write ``benchmarks/results/*.csv``.

Times are medians with quartiles; ratios are taken within one run, from medians, since machines are noisy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import clipaware as ca
from clipaware import _math
from clipaware.reference import naive_perturb

Row = dict[str, Any]
CASES: dict[str, Callable[[bool], Iterator[Row]]] = {}
RESULTS = Path(__file__).parent / "results"


def case(function: Callable[[bool], Iterator[Row]]) -> Callable[[bool], Iterator[Row]]:
    """Register a case under its function's name. It yields rows: what, of what, how much."""
    CASES[function.__name__] = function
    return function


def timed(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile in milliseconds, the functions taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            taken[name].append(1e3 * (time.perf_counter() - start))
    quartiles = {name: np.quantile(times, [0.25, 0.5, 0.75]) for name, times in taken.items()}
    return {name: (float(q[0]), float(q[1]), float(q[2])) for name, q in quartiles.items()}


def norm64(v: Any, x: Any, p: float) -> Any:
    z = np.abs(v.astype(np.float64) - x)
    return z.max(axis=1) if p == math.inf else ((z / z.max()) ** p).sum(axis=1) ** (1 / p) * z.max()


def paper_code() -> Any:
    """The published code, in the copy that Foolbox carries."""
    from foolbox.external import clipping_aware_rescaling

    return clipping_aware_rescaling.l2_clipping_aware_rescaling


@case
def numpy_speed(quick: bool) -> Iterator[Row]:
    """perturb and rescale beside the paper's code (Foolbox's copy) and naive scaling; float32, p = 2."""
    paper = paper_code()

    def compared(x: Any, delta: Any, eps: float, repeats: int) -> dict[str, tuple[float, float, float]]:
        out = np.empty_like(x)
        functions = {
            "perturb": lambda: ca.perturb(x, delta, eps),
            "rescale": lambda: ca.rescale(x, delta, eps),
            "paper, scaled and clipped": lambda: np.clip(x + paper(x, delta, eps) * delta, 0, 1),
            "paper, eta alone": lambda: paper(x, delta, eps),
            "naive": lambda: naive_perturb(x, delta, eps),
            "add(x, delta, out)": lambda: np.add(x, delta, out=out),
        }
        return timed(functions, 2 if quick else repeats)

    for rows, n, repeats in ((1, 784, 50), (256, 3072, 20), (64, 150528, 7)):
        rng = np.random.default_rng(0)
        x, delta = rng.random((rows, n), np.float32), rng.standard_normal((rows, n), np.float32)
        eps = 0.25 * math.sqrt(n / 3)
        times = compared(x, delta, eps, repeats)
        where = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        for name, (low, median, high) in times.items():
            yield {
                **where,
                "variant": name,
                "quantity": "time",
                "value": median,
                "low": low,
                "high": high,
                "unit": "ms",
            }
        for mine, theirs in (("perturb", "paper, scaled and clipped"), ("rescale", "paper, eta alone")):
            ratio = times[theirs][1] / times[mine][1]
            yield {**where, "variant": f"{theirs} / {mine}", "quantity": "ratio", "value": ratio, "unit": ""}
        error = np.abs(norm64(ca.perturb(x, delta, eps), x, 2) / eps - 1).max()
        yield {**where, "variant": "perturb", "quantity": "norm error", "value": error, "unit": "of eps"}


@case
def torch_speed(quick: bool) -> Iterator[Row]:
    """Forward, and forward and backward to delta, beside autograd through the paper's sort; float32, p = 2, CPU."""
    import torch

    paper = paper_code()

    rows, n = 256, 3072
    generator = torch.Generator().manual_seed(0)
    x, delta = torch.rand(rows, n, generator=generator), torch.randn(rows, n, generator=generator)
    leaf, eps = delta.clone().requires_grad_(), 8.0

    def pulled(v: torch.Tensor) -> Any:
        return torch.autograd.grad(v.sum(), leaf)

    times = timed(
        {
            "perturb": lambda: ca.perturb(x, delta, eps),
            "paper": lambda: torch.clamp(x + paper(x, delta, eps) * delta, 0, 1),
            "perturb, forward and backward": lambda: pulled(ca.perturb(x, leaf, eps)),
            "paper, forward and backward": lambda: pulled(torch.clamp(x + paper(x, leaf, eps) * leaf, 0, 1)),
        },
        2 if quick else 10,
    )
    where = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
    for name, (low, median, high) in times.items():
        yield {**where, "variant": name, "quantity": "time", "value": median, "low": low, "high": high, "unit": "ms"}
    for suffix in ("", ", forward and backward"):
        ratio = times[f"paper{suffix}"][1] / times[f"perturb{suffix}"][1]
        yield {**where, "variant": f"paper / perturb{suffix}", "quantity": "ratio", "value": ratio, "unit": ""}


def directions(kind: str, rows: int, n: int, rng: np.random.Generator) -> Any:
    """Gaussian, heavy-tailed and tied directions."""
    signs = rng.choice([-1.0, 1.0], (rows, n))
    if kind == "gaussian":
        return rng.standard_normal((rows, n))
    if kind == "cauchy":
        return rng.standard_cauchy((rows, n))
    if kind == "lognormal":
        return rng.lognormal(0, 3, (rows, n)) * signs
    return rng.choice([1.0, 2.0, 5.0], (rows, n)) * signs


@case
def accuracy(quick: bool) -> Iterator[Row]:
    """Worst norm error and number of passes, over directions, norms, sizes and 2% to 99.95% of the reach."""
    counts: list[int] = []
    solve: Any = _math.solve

    def counted(*args: Any, **options: Any) -> Any:
        found = solve(*args, **options)
        counts.append(found.passes)
        return found

    _math.solve = counted
    sizes = (784, 20_000) if quick else (1, 7, 784, 20_000, 150_528, 10_000_000)
    for dtype in ("float32", "float64"):
        for kind in ("gaussian", "cauchy", "lognormal", "tied"):
            for p in (1, 1.3, 2, 3, 10, 50, math.inf):
                worst, where = 0.0, {}
                counts.clear()
                for n in sizes:
                    rng = np.random.default_rng(0)
                    x, delta = rng.random((1, n)).astype(dtype), directions(kind, 1, n, rng).astype(dtype)
                    reach = float(ca.reach(x, delta, p=p)[0, 0])
                    for share in (0.02, 0.9995) if n > 10**6 else (0.02, 0.3, 0.7, 0.99, 0.9995):
                        eps = share * reach
                        if n > 10**6 and (p not in (1, 2, math.inf) or kind == "lognormal"):
                            continue
                        v = ca.perturb(x, delta, eps, p=p)
                        # Less the half spacing of v that no array of this dtype can avoid.
                        spacing = np.spacing(np.abs(v).max()) / 2
                        moved = np.abs(v.astype(float) - x).max() / eps
                        held = (
                            spacing
                            / eps
                            * (n ** (1 / p) if kind == "tied" else moved ** (p - 1 if p < math.inf else 0))
                        )
                        error = abs(float(norm64(v, x, p)[0]) / eps - 1) - float(held)
                        if error > worst:
                            worst, where = error, {"n": n}
                row = {"dtype": dtype, "p": p, "variant": kind, **where}
                yield {
                    **row,
                    "quantity": "worst norm error beyond the dtype's spacing",
                    "value": worst,
                    "unit": "of eps",
                }
                if p < math.inf:
                    mean, most = float(np.mean(counts)), max(counts)
                    yield {**row, "quantity": "passes, mean", "value": mean, "high": most, "unit": "passes"}
    _math.solve = solve


@case
def import_time(quick: bool) -> Iterator[Row]:
    """What ``import clipaware`` takes beyond ``import numpy``, in new processes."""

    def taken() -> float:
        code = "import numpy, time; t = time.perf_counter(); import clipaware; print(time.perf_counter() - t)"
        return 1e3 * float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)

    low, median, high = np.quantile([taken() for _ in range(3 if quick else 11)], [0.25, 0.5, 0.75])
    yield {"variant": "import clipaware", "quantity": "time", "value": median, "low": low, "high": high, "unit": "ms"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--case", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME", help=", ".join(CASES)
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions; prints and writes nothing")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "torch", "foolbox")}
    context = {
        "clipaware": ca.__version__,
        **versions,
        "python": platform.python_version(),
        "device": platform.machine(),
        "date": datetime.date.today().isoformat(),
    }
    for name in args.case:
        print(f"\n{name}: {CASES[name].__doc__}")
        rows = []
        for row in CASES[name](args.quick):
            rows.append({"case": name, **row})
            size = f"{row.get('rows', '')} x {row.get('n', '')}" if "rows" in row else str(row.get("n", ""))
            span = f"  [{row['low']:.4g}, {row['high']:.4g}]" if "low" in row else ""
            label = f"{row['variant']}, {row.get('dtype', '')} p={row['p']}" if "p" in row else row["variant"]
            print(f"  {label:<60} {size:>14}  {row['quantity']}: {row['value']:.4g} {row['unit']}{span}", flush=True)
        if not args.quick:
            RESULTS.mkdir(exist_ok=True)
            fields = [
                "case",
                "variant",
                "rows",
                "n",
                "dtype",
                "p",
                "quantity",
                "value",
                "low",
                "high",
                "unit",
                *context,
            ]
            with (RESULTS / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, fields, restval="")
                writer.writeheader()
                writer.writerows({**row, **context} for row in rows)


if __name__ == "__main__":
    main()
