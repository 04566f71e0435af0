"""What the results look like: the table of the README, and time against length and against rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Results = dict[str, list[dict[str, str]]]

STYLES = {
    "paper": ("the paper's code", "tab:orange", "s"),
    "naive": ("naive scaling", "tab:red", "^"),
    "naive, compiled": ("naive scaling, torch.compile", "tab:pink", "v"),
    "clipaware": ("clipaware", "tab:blue", "o"),
    "floor": ("add(x, delta, out=...)", "0.5", "."),
}


def value(results: Results, case: str, rows: int, n: int, variant: str, quantity: str = "ratio") -> float:
    wanted = {"rows": str(rows), "n": str(n), "variant": variant, "quantity": quantity}
    return next(float(row["value"]) for row in results[case] if all(row[k] == v for k, v in wanted.items()))


def table(results: Results) -> str:
    """In Markdown: how many times faster `perturb` is than something else, and the norms that they deliver."""
    if not (results["numpy_speed"] and results["torch_speed"]):
        return ""
    lines = [
        "| rows x elements | than naive scaling | than the paper's code | than `np.add(x, delta, out=...)` "
        "| norm error: clipaware | the paper's code | naive |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows, n in ((1, 784), (256, 3072), (64, 150_528), (1, 10_000_000)):

        def number(variant: str, quantity: str = "ratio", rows: int = rows, n: int = n) -> float:
            return value(results, "numpy_speed", rows, n, variant, quantity)

        errors = (f"{number(name, 'norm error'):.0e}" for name in ("clipaware", "paper", "naive"))
        lines.append(
            f"| NumPy, {rows:,} x {n:,} | {number('naive / clipaware'):.1f}x | {number('paper / clipaware'):.0f}x "
            f"| {1 / number('clipaware / floor'):.2g}x | {' | '.join(errors)} |"
        )
    for rows, n in ((256, 3072), (64, 150_528)):
        for suffix, name in (("", ""), (", and backward", ", forward and backward")):
            ratios = [
                value(results, "torch_speed", rows, n, f"{other}{suffix} / clipaware{suffix}")
                for other in ("naive", "paper")
            ]
            lines.append(f"| PyTorch, {rows:,} x {n:,}{name} | {ratios[0]:.1f}x | {ratios[1]:.0f}x | | | | |")
    for label, case, suffix in (
        ("JAX, jit", "jax_speed", ""),
        ("JAX, jit, value and gradient", "jax_speed", ", and gradient"),
        ("TensorFlow, `tf.function`", "tensorflow_speed", ""),
    ):
        for rows, n in ((256, 3072), (64, 150_528)) if results[case] else ():
            variants = [f"{other}{suffix} / clipaware{suffix}" for other in ("naive", "paper")]
            naive, paper = (value(results, case, rows, n, variant) for variant in variants)
            lines.append(f"| {label}, {rows:,} x {n:,} | {naive:.2f}x | {paper:.0f}x | | | | |")
    return "\n".join(lines) + "\n"


def gpu_table(results: Results) -> str:
    """In Markdown: times on a GPU, and what they are beside an addition, which reads and writes as much at least."""
    if not results["gpu_speed"]:
        return ""
    names = {"floor": "`torch.add`", "clipaware": "clipaware", "naive": "naive", "naive, compiled": "naive, compiled"}
    columns = {**names, "paper": "the paper's algorithm"}
    lines = [f"| rows x elements | {' | '.join(columns.values())} | clipaware / `torch.add` |", "|---|" + "---|" * 6]
    sizes = dict.fromkeys((int(row["rows"]), int(row["n"])) for row in results["gpu_speed"])
    for rows, n in sizes:
        times = [value(results, "gpu_speed", rows, n, name, "time") for name in columns]
        cells = " | ".join(f"{time:.3g}" for time in times)
        lines.append(f"| {rows:,} x {n:,} | {cells} | {times[1] / times[0]:.2f} |")
    return "\n".join(lines) + "\n"


def draw(results: Results, folder: Path) -> list[Path]:
    """Time per element against length and against rows, as far as they have been measured."""
    figures = (
        ("speed.png", "NumPy", "by_length", "by_rows", 16),
        ("gpu_speed.png", "PyTorch on a GPU", "gpu_by_length", "gpu_by_rows", 64),
    )
    return [
        _drawn(results, folder / file, what, (by_length, by_rows), rows)
        for file, what, by_length, by_rows, rows in figures
        if results[by_length] and results[by_rows]
    ]


def _drawn(results: Results, path: Path, what: str, cases: tuple[str, str], rows: int) -> Path:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    columns = (("n", f"elements in each of {rows} rows"), ("rows", "rows of 3072 elements"))
    for axis, case, (column, label) in zip(axes, cases, columns, strict=True):
        for variant, (name, colour, marker) in STYLES.items():
            points = [row for row in results[case] if row["variant"] == variant]
            if not points:
                continue
            where = [int(row[column]) for row in points]
            per_element = [1e6 / (int(row["rows"]) * int(row["n"])) for row in points]
            low, middle, high = (
                [float(row[key]) * scale for row, scale in zip(points, per_element, strict=True)]
                for key in ("low", "value", "high")
            )
            axis.plot(where, middle, color=colour, marker=marker, markersize=5, label=name)
            axis.fill_between(where, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("nanoseconds per element")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"{what}, float32, p = 2 ({results[cases[0]][0]['device']}); medians and quartiles")
    figure.savefig(path)
    return path
