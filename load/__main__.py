"""Many threads for minutes, and a million calls: ``python -m load --threads 64 --minutes 5 --calls 1000000``.

Every thread calls what there is, with a problem that it picks by chance, and compares with what one thread got before,
bit for bit. Then one thread makes small calls of each framework, and some of shapes that are never the same, and memory
is not to grow.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import clipaware as ca

Array = Any
Call = Callable[[], Any]

GROWTH = 2**20  # bytes by which a million calls may let memory grow
SHAPES = ((1, 7), (16, 784), (4, 3072), (3, 50_001), (2, 300_000))
ORDERS = (1.0, 1.5, 2.0, np.inf)


def converters(names: list[str]) -> dict[str, tuple[Callable[[Array], Any], Callable[[Any], Array]]]:
    """From NumPy and back, for each framework."""
    found: dict[str, tuple[Callable[[Array], Any], Callable[[Any], Array]]] = {}
    for name in names:
        if name == "numpy":
            found[name] = np.asarray, np.asarray
        elif name == "torch":
            torch = importlib.import_module("torch")
            found[name] = torch.from_numpy, lambda a: a.numpy()
        elif name == "jax":
            found[name] = importlib.import_module("jax.numpy").asarray, np.asarray
        else:
            found[name] = importlib.import_module("tensorflow").constant, np.asarray
    return found


def calls(names: list[str]) -> dict[str, Call]:
    """What threads do, by name. Each returns what is to be the same every time."""
    found: dict[str, Call] = {}
    rng = np.random.default_rng(0)
    for framework, (there, back) in converters(names).items():
        for rows, n in SHAPES:
            for p in ORDERS:
                dtype = np.float32 if rows % 2 else np.float64
                if framework == "jax":
                    dtype = np.float32
                x, delta = rng.random((rows, n)).astype(dtype), rng.standard_normal((rows, n)).astype(dtype)
                eps = 0.1 * n ** (1 / p) if p < np.inf else 0.1
                problem = there(x), there(delta)
                options: Any = {"p": p}
                key = f"{framework} {rows}x{n} {np.dtype(dtype).name} p={p:g}"

                def perturb(problem: Any = problem, eps: float = eps, options: Any = options, back: Any = back) -> Any:
                    return back(ca.perturb(problem[0], problem[1], eps, **options))

                def vjp(problem: Any = problem, eps: float = eps, options: Any = options, back: Any = back) -> Any:
                    return [back(a) for a in ca.perturb_vjp(problem[0], problem[1], eps, problem[1], **options)[:3]]

                def report(problem: Any = problem, eps: float = eps, options: Any = options, back: Any = back) -> Any:
                    return [back(a) for a in vars(ca.report(problem[0], problem[1], eps, **options)).values()]

                found |= {f"perturb {key}": perturb, f"vjp {key}": vjp, f"report {key}": report}
    return found


def same(a: Any, b: Any) -> bool:
    a, b = (z if isinstance(z, list) else [z] for z in (a, b))
    return all(np.array_equal(u, v, equal_nan=True) for u, v in zip(a, b, strict=True))


def near(a: Any, b: Any) -> bool:
    a, b = (z if isinstance(z, list) else [z] for z in (a, b))
    return all(np.allclose(u, v, rtol=1e-4, atol=1e-5, equal_nan=True) for u, v in zip(a, b, strict=True))


def run_threads(number: int, seconds: float, names: list[str], seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How often each framework was called, and what went wrong. Sums are made on one thread each, to be the same."""
    ca.set_threads(1)
    try:
        todo = calls(names)
        wanted = {name: call() for name, call in todo.items()}
    finally:
        ca.set_threads(None)
    keys, counts, wrong = list(todo), [Counter[str]() for _ in range(number)], list[str]()
    # Several threads round the sums of long rows otherwise, if they are free.
    agree = {name: same if same(todo[name](), wanted[name]) else near for name in keys}
    end = time.monotonic() + seconds

    def work(k: int) -> None:
        rng = np.random.default_rng((seed, k))
        while True:
            name = keys[int(rng.integers(len(keys)))]
            try:
                if not agree[name](todo[name](), wanted[name]):
                    wrong.append(f"{name}: another result")
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
            counts[k][name.split()[1]] += 1
            if time.monotonic() > end or wrong:
                return

    workers = [threading.Thread(target=work, args=(k,)) for k in range(number)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts, Counter[str]()), wrong


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def growth(number: int, call: Callable[[int], Any]) -> int:
    """Bytes that so many calls add, after a tenth as many to warm up."""
    for k in range(number // 10):
        call(k)
    gc.collect()
    before = resident()
    for k in range(number):
        call(k)
    gc.collect()
    return resident() - before


def small_calls(names: list[str]) -> dict[str, Callable[[int], Any]]:
    """One problem for ever, of each framework; and of NumPy shapes, orders and bounds that are hardly ever the same."""
    rng = np.random.default_rng(0)
    x, delta = rng.random((2, 5)).astype(np.float32), rng.standard_normal((2, 5)).astype(np.float32)
    flat, along = rng.random(1000).astype(np.float32), rng.standard_normal(1000).astype(np.float32)

    def other(k: int) -> Any:
        rows, n = 1 + k % 31, 1 + k // 31 % 29
        x, delta = (a[: rows * n].reshape(rows, n) for a in (flat, along))
        return ca.perturb(x, delta, 0.01, p=1 + k % 99991 / 1e4, bounds=(-k / 1e3, 1 + k / 1e3))

    found: dict[str, Callable[[int], Any]] = {"another shape, order and bounds": other} if "numpy" in names else {}

    def again(problem: Any, k: int) -> Any:
        return ca.perturb(problem[0], problem[1], 0.3)

    for name, (there, _) in converters(names).items():
        found[f"the same, {name}"] = partial(again, (there(x), there(delta)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--calls", type=int, default=10**6)
    parser.add_argument("--frameworks", nargs="*", default=["numpy", "torch", "jax", "tensorflow"])
    parser.add_argument("--no-numba", action="store_true", help="NumPy's own operations instead of compiled kernels")
    options = parser.parse_args()
    if options.no_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
    failed = False
    if options.minutes:
        start = time.monotonic()
        counts, wrong = run_threads(options.threads, 60 * options.minutes, options.frameworks)
        took = time.monotonic() - start
        print(
            f"{options.threads} threads, {took:.0f} s: {sum(counts.values())} calls {dict(counts)}, {len(wrong)} wrong"
        )
        print(*wrong[:20], sep="\n")
        failed = bool(wrong)
    for name, call in small_calls(options.frameworks).items() if options.calls else ():
        grown = growth(options.calls, call)
        print(f"{options.calls} small calls, {name}: memory grew by {grown / 1024:.0f} kB", flush=True)
        failed |= grown > GROWTH
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
