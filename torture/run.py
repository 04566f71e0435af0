"""Batch after batch on a backend, in one process or in several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from torture.backends import Backend, load
from torture.cases import make
from torture.check import check

CHUNK = 25  # batches that a process is handed at a time


@dataclass
class Tally:
    """What became of some batches on one backend; one dtype's row of the table, or a sum of them."""

    cases: int = 0
    wrong: int = 0
    error: float = 0.0  # the worst, beyond what a step of the dtype explains
    flagged: int = 0  # rows that a fast lane left to the careful lane
    solved: int = 0  # of so many
    slowest: float = 0.0
    slowest_index: int = -1
    gradients: int = 0  # rows whose gradients were compared
    pulled: int = 0  # of so many

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.wrong += other.wrong
        self.solved += other.solved
        self.flagged += other.flagged
        self.gradients += other.gradients
        self.pulled += other.pulled
        self.error = max(self.error, other.error)
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
            sum(out.flagged),
            len(out.flagged),
            seconds,
            index,
            out.gradients,
            out.pulled,
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
    np.seterr(all="ignore")
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
