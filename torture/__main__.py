"""``python -m torture --minutes N --seed S --backends numpy,torch``: hostile inputs, until something breaks.

Prints a table of what was tried, of the worst errors and of the passes; exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from torture.backends import LOADERS, Backend, load
from torture.cases import make, to_json
from torture.check import check
from torture.oracle import require_extended
from torture.shrink import as_test, file_name, shrunk

CHUNK = 25  # batches that a process is handed at a time


@dataclass
class Tally:
    """What became of some batches on one backend; one dtype's row of the table, or a sum of them."""

    cases: int = 0
    wrong: int = 0
    error: float = 0.0  # the worst, beyond what a step of the dtype explains
    typical: list[float] = field(default_factory=list)  # the 99.9th percentiles of batches' errors
    passes: int = 0
    most_passes: int = 0
    solved: int = 0
    slowest: float = 0.0
    slowest_index: int = -1

    def add(self, other: Tally) -> None:
        self.cases, self.wrong, self.solved = (
            self.cases + other.cases,
            self.wrong + other.wrong,
            self.solved + other.solved,
        )
        self.error, self.passes = max(self.error, other.error), self.passes + other.passes
        self.most_passes = max(self.most_passes, other.most_passes)
        if other.slowest > self.slowest:
            self.slowest, self.slowest_index = other.slowest, other.slowest_index


Tallies = dict[str, Tally]
Failure = tuple[int, int, str, str]  # index, row, kind, message


def tried(backend: Backend, seed: int, indices: range) -> tuple[Tallies, list[Failure]]:
    """These batches on that backend."""
    tallies: Tallies = {}
    failures: list[Failure] = []
    for index in indices:
        batch = make(seed, index, backend.profile)
        start = time.perf_counter()
        out = check(backend, batch, thorough=False, part=index)
        seconds = time.perf_counter() - start
        rows = {row for row, _, _ in out.failures}
        mine = Tally(
            batch.rows,
            len(rows),
            out.error,
            [],
            sum(out.passes),
            max(out.passes, default=0),
            len(out.passes),
            seconds,
            index,
        )
        tallies.setdefault(batch.dtype, Tally()).add(mine)
        seen: set[str] = set()
        for row, kind, message in out.failures:
            if kind not in seen:
                failures.append((index, row, kind, message))
                seen.add(kind)
    return tallies, failures


def tried_by_name(name: str, seed: int, start: int, stop: int) -> tuple[Tallies, list[Failure]]:
    """For a process of its own."""
    return tried(load(name), seed, range(start, stop))


def chunks(
    backend: Backend, seed: int, processes: int, enough: list[bool], from_index: int
) -> Iterator[tuple[Tallies, list[Failure]]]:
    """Results of one chunk after another, until told that it is enough."""
    if processes == 1:
        start = from_index
        while not enough[0]:
            yield tried(backend, seed, range(start, start + CHUNK))
            start += CHUNK
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        start, running = from_index, set[Future[tuple[Tallies, list[Failure]]]]()
        while not enough[0] or running:
            while not enough[0] and len(running) < 2 * processes:
                running.add(pool.submit(tried_by_name, backend.name, seed, start, start + CHUNK))
                start += CHUNK
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def told(backend: Backend, seed: int, failure: Failure, keep: bool) -> None:
    """Shrink a failure, print it as a test, and keep it."""
    index, row, kind, message = failure
    tqdm.write(f"\n{backend.name}, seed {seed}, batch {index}, row {row}: {kind}: {message}")
    small = shrunk(backend, make(seed, index, backend.profile), row, kind)
    name = file_name(small, backend.name, kind)
    tqdm.write(as_test(small, backend.name, kind, message, name))
    if keep:
        folder = Path(__file__).parent / "corpus"
        folder.mkdir(exist_ok=True)
        found = f"{backend.name}, seed {seed}, batch {index}, row {row}: {kind}"
        (folder / f"{name}.json").write_text(to_json(small, found=found))


def table(results: dict[str, Tallies], seed: int) -> str:
    lines = [
        f"seed {seed}",
        "",
        "| backend | dtype | cases | wrong | worst norm error | passes, worst | mean | slowest batch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, tallies in results.items():
        for dtype, tally in sorted(tallies.items()):
            mean = f"{tally.passes / tally.solved:.2f}" if tally.solved else ""
            most = str(tally.most_passes) if tally.solved else ""
            slowest = f"{tally.slowest:.2f} s (batch {tally.slowest_index})"
            cells = [name, dtype, f"{tally.cases:,}", str(tally.wrong), f"{tally.error:.1e}", most, mean, slowest]
            lines.append(f"| {' | '.join(cells)} |")
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
    parser.add_argument("--report", type=Path, help="a file for the table")
    parser.add_argument("--keep", action="store_true", help="failures go to torture/corpus, which make test replays")
    parser.add_argument("--most-failures", type=int, default=10, help="of a backend, after which it is left")
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
    try:
        for number, backend in enumerate(backends):
            start = time.monotonic()
            minutes = (args.minutes) / len(backends)
            tallies = results.setdefault(backend.name, {})
            enough, shown = [False], set[str]()
            total = None if args.cases == sys.maxsize else args.cases
            with tqdm(total=total, desc=backend.name, unit=" cases", position=0, disable=None) as bar:
                for found, failures in chunks(backend, args.seed, args.processes, enough, args.from_batch):
                    for dtype, tally in found.items():
                        tallies.setdefault(dtype, Tally()).add(tally)
                        bar.update(tally.cases)
                    for failure in failures:
                        if failure[2] not in shown and len(shown) < args.most_failures:
                            shown.add(failure[2])
                            told(backend, args.seed, failure, args.keep)
                    cases = sum(tally.cases for tally in tallies.values())
                    enough[0] = cases >= args.cases or time.monotonic() - start > 60 * minutes
            del number
    except KeyboardInterrupt:
        tqdm.write("\nstopped")
    text = table(results, args.seed)
    tqdm.write(text)
    if args.report:
        args.report.write_text(text)
    return int(any(tally.wrong for tallies in results.values() for tally in tallies.values()))


if __name__ == "__main__":
    np.seterr(all="ignore")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    raise SystemExit(main())
