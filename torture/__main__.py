"""``python -m torture --minutes N --seed S --backends numpy,torch``: hostile inputs, until something breaks.

Prints every failure, the first of its kind as a test, and a table of what was tried, of the worst errors and of the
share of rows that NumPy's fast lanes flagged; exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from torture.backends import LOADERS, Backend, load
from torture.cases import make, to_json
from torture.oracle import require_extended
from torture.run import Failure, Tallies, Tally, chunks
from torture.shrink import as_test, file_name, shrunk


def told(backend: Backend, seed: int, failure: Failure, keep: bool) -> None:
    """Shrink a failure, print it as a test, and keep it."""
    index, row, kind, message = failure
    small = shrunk(backend, make(seed, index, backend.profile), row, kind)
    name = file_name(small, backend.name, kind)
    tqdm.write(as_test(small, backend.name, kind, message, name))
    if keep:
        folder = Path(__file__).parent / "corpus"
        folder.mkdir(exist_ok=True)
        found = f"{backend.name}, seed {seed}, batch {index}, row {row}: {kind}"
        (folder / f"{name}.json").write_text(to_json(small, found=found))


def line(backend: Backend, failure: Failure) -> str:
    index, row, kind, message = failure
    return f"{backend.name}, batch {index}, row {row}: {kind}: {message}"


def report(results: dict[str, Tallies], seed: int, wrong: list[str]) -> str:
    """The table, and what was wrong."""
    lines = [
        f"seed {seed}",
        "",
        "| backend | dtype | cases | wrong | worst norm error | gradients | flagged | slowest batch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, tallies in results.items():
        for dtype, tally in sorted(tallies.items()):
            flagged = f"{tally.flagged / tally.solved:.1%}" if tally.solved else ""
            slowest = f"{tally.slowest:.2f} s (batch {tally.slowest_index})"
            pulled = f"{tally.gradients:,} of {tally.pulled:,}"
            counts = [name, dtype, f"{tally.cases:,}", str(tally.wrong), f"{tally.error:.1e}", pulled]
            cells = [*counts, flagged, slowest]
            lines.append(f"| {' | '.join(cells)} |")
    if wrong:
        lines += ["", *(f"- {text}" for text in wrong)]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=math.inf, help="in all; without, until --cases or Ctrl-C")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="of every backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from-batch", type=int, default=0, help="the number of the first batch")
    parser.add_argument(
        "--backends", default="", help=f"comma-separated, of {', '.join(LOADERS)}; all that are installed"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a file for the table and the failures, up to date all along")
    parser.add_argument("--keep", action="store_true", help="failures go to torture/corpus, which make test replays")
    parser.add_argument("--most-tests", type=int, default=10, help="of a backend, into which failures are turned")
    args = parser.parse_args(argv)
    require_extended()
    names = [name for name in args.backends.split(",") if name] or list(LOADERS)
    backends = []
    for name in names:
        if name not in LOADERS:
            parser.error(f"no backend {name}, expected one of {', '.join(LOADERS)}")
        try:
            backends.append(load(name))
        except ImportError as error:
            tqdm.write(f"without {name}: {error}")
    results: dict[str, Tallies] = {}
    wrong: list[str] = []  # a line each
    try:
        for backend in backends:
            start = time.monotonic()
            minutes = args.minutes / len(backends)
            tallies = results.setdefault(backend.name, {})
            enough, shown = [False], set[str]()
            total = None if args.cases == sys.maxsize else args.cases
            with tqdm(total=total, desc=backend.name, unit=" cases", position=0, disable=None) as bar:
                for found, failures in chunks(backend, args.seed, args.processes, enough, args.from_batch):
                    for dtype, tally in found.items():
                        tallies.setdefault(dtype, Tally()).add(tally)
                        bar.update(tally.cases)
                    for failure in failures:
                        wrong.append(line(backend, failure))
                        tqdm.write(wrong[-1])
                        if failure[2] not in shown and len(shown) < args.most_tests:
                            shown.add(failure[2])
                            told(backend, args.seed, failure, args.keep)
                    if args.report:
                        args.report.write_text(report(results, args.seed, wrong))
                    cases = sum(tally.cases for tally in tallies.values())
                    enough[0] = cases >= args.cases or time.monotonic() - start > 60 * minutes
    except KeyboardInterrupt:
        tqdm.write("\nstopped")
    tqdm.write(report(results, args.seed, wrong))
    return int(any(tally.wrong for tallies in results.values() for tally in tallies.values()))


if __name__ == "__main__":
    np.seterr(all="ignore")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    raise SystemExit(main())
