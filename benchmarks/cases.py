"""What is measured: a registry of cases, each of which yields rows (what, of what, how much)."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import clipaware as ca
from clipaware import cli
from clipaware._backends import numpy as backend
from clipaware._cli import demo
from clipaware.reference import directions, l2_clipping_aware_rescaling, naive_perturb, norm64

Row = dict[str, Any]
Times = dict[str, tuple[float, float, float]]
CASES: dict[str, Callable[[bool], Iterator[Row]]] = {}

SIZES = (1, 784), (256, 3072), (64, 150_528), (1, 10_000_000)


def case(function: Callable[[bool], Iterator[Row]]) -> Callable[[bool], Iterator[Row]]:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


def timed(functions: dict[str, Callable[[], Any]], repeats: int) -> Times:
    """Lower quartile, median and upper quartile in milliseconds, the functions taking turns in random order.

    At its turn each is called once before it is timed, so that caches and threads are as its own calls leave them, and
    what takes less than five milliseconds is called until it has taken that, and averaged.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    calls = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        calls[name] = max(1, round(5e-3 / (time.perf_counter() - start)))
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for name in rng.permutation(list(functions)):
            function = functions[name]
            function()
            start = time.perf_counter()
            for _ in range(calls[name]):
                function()
            taken[name].append(1e3 * (time.perf_counter() - start) / calls[name])
    quartiles = {name: np.quantile(times, [0.25, 0.5, 0.75]) for name, times in taken.items()}
    return {name: (float(q[0]), float(q[1]), float(q[2])) for name, q in quartiles.items()}


def time_rows(times: Times, **where: Any) -> Iterator[Row]:
    for name, (low, median, high) in times.items():
        yield {**where, "variant": name, "quantity": "time", "value": median, "low": low, "high": high, "unit": "ms"}


def ratio(times: Times, over: str, under: str, **where: Any) -> Row:
    value = times[over][1] / times[under][1]
    return {**where, "variant": f"{over} / {under}", "quantity": "ratio", "value": value, "unit": ""}


def problem(rows: int, n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.random((rows, n), np.float32), rng.standard_normal((rows, n), np.float32)


def usual_eps(n: int, p: float) -> float:
    """A quarter of what a perturbation as large as the box has on average."""
    return 0.25 * (n / (p + 1)) ** (1 / p) if p < math.inf else 0.25


def paper_code() -> Any:
    """The published code, in the copy that Foolbox carries."""
    from foolbox.external import clipping_aware_rescaling

    return clipping_aware_rescaling.l2_clipping_aware_rescaling


@case
def numpy_speed(quick: bool) -> Iterator[Row]:
    """perturb on NumPy beside a plain addition, naive scaling and the paper's code (Foolbox's copy); float32, p = 2."""
    paper = paper_code()
    for (rows, n), repeats in zip(SIZES, (60, 20, 9, 5), strict=True):
        x, delta = problem(rows, n)
        eps, out = usual_eps(n, 2), np.empty_like(x)
        one = (x[0], delta[0]) if rows == 1 else (x, delta)
        functions: dict[str, Callable[[], Any]] = {
            "clipaware": lambda: ca.perturb(*one, eps),  # noqa: B023
            "clipaware, eta alone": lambda: ca.rescale(*one, eps),  # noqa: B023
            "floor": lambda: np.add(x, delta, out=out),  # noqa: B023
            "naive": lambda: naive_perturb(x, delta, eps),  # noqa: B023
            "paper": lambda: np.clip(x + paper(x, delta, eps) * delta, 0, 1),  # noqa: B023
        }
        where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        times = timed(functions, 2 if quick else repeats)
        yield from time_rows(times, **where)
        for pair in (("clipaware", "floor"), ("naive", "clipaware"), ("paper", "clipaware")):
            yield ratio(times, *pair, **where)
        for name in ("clipaware", "naive", "paper"):
            error = np.abs(norm64(functions[name]().reshape(rows, n), x, 2) / eps - 1).max()
            yield {**where, "variant": name, "quantity": "norm error", "value": error, "unit": "of eps"}


@case
def without_numba(quick: bool) -> Iterator[Row]:
    """The same without compiled kernels: what NumPy's own operations do."""
    paper, kernels = paper_code(), backend.kernels
    for (rows, n), repeats in (((256, 3072), 20), ((64, 150_528), 7)):
        x, delta = problem(rows, n)
        eps = usual_eps(n, 2)
        try:
            backend.kernels = lambda: None  # type: ignore[assignment]
            times = timed(
                {
                    "clipaware": lambda: ca.perturb(x, delta, eps),  # noqa: B023
                    "clipaware, eta alone": lambda: ca.rescale(x, delta, eps),  # noqa: B023
                    "paper": lambda: np.clip(x + paper(x, delta, eps) * delta, 0, 1),  # noqa: B023
                    "paper, eta alone": lambda: paper(x, delta, eps),  # noqa: B023
                },
                2 if quick else repeats,
            )
        finally:
            backend.kernels = kernels
        where = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        yield from time_rows(times, **where)
        for suffix in ("", ", eta alone"):
            yield ratio(times, f"paper{suffix}", f"clipaware{suffix}", **where)


@case
def norms(quick: bool) -> Iterator[Row]:
    """perturb by the order of the norm, beside p = 2; NumPy, float32."""
    rows, n = 64, 150_528
    x, delta = problem(rows, n)
    orders = (1, 1.5, 2, 2.7, 3, 4, 10, math.inf)
    functions: dict[str, Callable[[], Any]] = {
        f"p = {p:g}": partial(ca.perturb, x, delta, usual_eps(n, p), p=p) for p in orders
    }
    times = timed(functions, 2 if quick else 11)
    for p in orders:
        where = {"rows": rows, "n": n, "dtype": "float32", "p": p}
        name = f"p = {p:g}"
        yield from time_rows({name: times[name]}, **where)
        yield ratio(times, name, "p = 2", **where)
        error = np.abs(norm64(functions[name](), x, p) / usual_eps(n, p) - 1).max()
        yield {**where, "variant": name, "quantity": "norm error", "value": error, "unit": "of eps"}


def over_first(
    functions: dict[str, Callable[[], Any]], repeats: int, rows: int, n: int, p_of: dict[str, float]
) -> Iterator[Row]:
    """Times, and ratios over the first function. A name says what differs from float32 and p = 2."""
    times, first = timed(functions, repeats), next(iter(functions))
    for name, quartiles in times.items():
        dtype = name if name in ("float16", "bfloat16") else "float32"
        where: Row = {"rows": rows, "n": n, "dtype": dtype, "p": p_of.get(name, 2)}
        yield from time_rows({name: quartiles}, **where)
        if name != first:
            yield ratio(times, name, first, **where)


def kinds_of_rows(x: Any, delta: Any) -> dict[str, tuple[Any, Any, Any]]:
    """x, delta and eps: rows that are harder than Gaussian noise at a quarter of the reach, or easier, or far off."""
    rng = np.random.default_rng(1)
    signs, levels = np.sign(delta), np.rint(255 * x) / np.float32(255)
    one_hot = np.where(np.arange(x.shape[1]) == rng.integers(x.shape[1], size=(len(x), 1)), delta, np.float32(0))
    sparse = np.where(rng.random(x.shape) < 0.01, delta, np.float32(0))
    cauchy = rng.standard_cauchy(x.shape).astype(np.float32)
    return {
        "signs at 2% of the reach": (x, signs, 0.02 * ca.reach(x, signs)),
        "8-bit x, signs, eps .25": (levels, signs, 0.25),
        "8-bit x, signs, eps 3": (levels, signs, 3.0),
        "Cauchy": (x, cauchy, usual_eps(x.shape[1], 2)),
        "97% of the reach": (x, delta, 0.97 * ca.reach(x, delta)),
        "one-hot": (x, one_hot, 0.25 * ca.reach(x, one_hot)),
        "99% zeros": (x, sparse, 0.25 * ca.reach(x, sparse)),
        # Its squares underflow in float32, so that the careful lane has every row.
        "all rows flagged": (x, delta * np.float32(1e-30), usual_eps(x.shape[1], 2)),
    }


def lanes_of(rows: int, n: int, repeats: int, repeats_without: int) -> Iterator[Row]:
    """The ratios of one size: with Numba, then without."""
    import ml_dtypes

    x, delta = problem(rows, n)
    eps, small = usual_eps(n, 2), n < 10**5
    # A quarter of the reach in any norm clips 14% of the elements for p = 1, 13% for 2, and 6% for infinity.
    p_of = {f"p = {p:g}": p for p in (1, 1.5, 2.7, 3, 4, 10, math.inf)}
    functions: dict[str, Callable[[], Any]] = {"Gaussian": partial(ca.perturb, x, delta, eps)}
    functions |= {name: partial(ca.perturb, x, delta, usual_eps(n, p), p=p) for name, p in p_of.items()}
    kinds = kinds_of_rows(x, delta) if small else {}
    functions |= {name: partial(ca.perturb, *arguments) for name, arguments in kinds.items()}
    if small:
        for dtype in (np.float16, ml_dtypes.bfloat16):
            halves = x.astype(dtype), delta.astype(dtype)
            functions[np.dtype(dtype).name] = partial(ca.perturb, *halves, eps)
        g = delta[::-1].copy()
        functions["forward and perturb_vjp"] = lambda: [ca.perturb(x, delta, eps), ca.perturb_vjp(x, delta, eps, g)]
    yield from over_first(functions, repeats, rows, n, p_of)

    both = [name for name in ("Gaussian", "all rows flagged") if name in functions]
    without = {f"{name}, without Numba": functions[name] for name in both}
    without["paper's algorithm"] = lambda: np.clip(x + l2_clipping_aware_rescaling(x, delta, eps) * delta, 0, 1)
    with mock.patch.object(backend, "kernels", return_value=None):
        yield from over_first(without, repeats_without, rows, n, {})


@case
def lanes(quick: bool) -> Iterator[Row]:
    """perturb by norm, kind of row and dtype, beside Gaussian noise in float32 with p = 2; one thread; compilation."""
    ca.set_threads(1)
    try:
        for (rows, n), repeats, repeats_without in (((256, 3072), 60, 15), ((64, 150_528), 11, 5)):
            yield from lanes_of(rows, n, 2 if quick else repeats, 2 if quick else repeats_without)
    finally:
        ca.set_threads(None)
    code = """if True:
    import time, numba, numpy as np, clipaware as ca
    rng = np.random.default_rng(0)
    x, delta = rng.random((4, 3072), np.float32), rng.standard_normal((4, 3072), np.float32)
    moments = [time.process_time()]
    for _ in range(2):
        ca.perturb(x, delta, 8.0)
        moments.append(time.process_time())
    first, second = np.diff(moments)
    print(first - second)
    """
    taken = []  # of the processor, as others may use it too, and without the import of Numba
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {"NUMBA_CACHE_DIR": empty}
            run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
            taken.append(float(run.stdout))
    low, median, high = np.quantile(taken, [0.25, 0.5, 0.75])
    span: Row = {"value": median, "low": low, "high": high, "unit": "s"}
    yield {"variant": "compilation", "dtype": "float32", "p": 2, "quantity": "CPU time", **span}


@case
def torch_speed(quick: bool) -> Iterator[Row]:
    """PyTorch on the CPU: forward, and forward and backward to delta, beside naive scaling and the paper's code."""
    import torch

    paper = paper_code()
    for (rows, n), repeats in (((256, 3072), 15), ((64, 150_528), 5)):
        x, delta = (torch.from_numpy(a) for a in problem(rows, n))
        leaf, g = delta.clone().requires_grad_(), torch.ones(rows, n)
        eps, in_numpy = usual_eps(n, 2), (x.numpy(), delta.numpy())

        def naive(delta: Any) -> Any:
            return torch.clamp(x + eps / delta.norm(dim=1, keepdim=True) * delta, 0, 1)  # noqa: B023

        def published(delta: Any) -> Any:
            return torch.clamp(x + paper(x, delta, eps) * delta, 0, 1)  # noqa: B023

        def exact(delta: Any) -> Any:
            return ca.perturb(x, delta, eps)  # noqa: B023

        def both_ways(function: Any) -> Any:
            return lambda: torch.autograd.grad(function(leaf), leaf, g)  # noqa: B023

        functions: dict[str, Callable[[], Any]] = {
            "clipaware": lambda: exact(delta),  # noqa: B023
            "clipaware on NumPy": lambda: ca.perturb(*in_numpy, eps),  # noqa: B023
            "naive": lambda: naive(delta),  # noqa: B023
            "paper": lambda: published(delta),  # noqa: B023
            "clipaware, and backward": both_ways(exact),
            "naive, and backward": both_ways(naive),
            "paper, and backward": both_ways(published),
        }
        where = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        times = timed(functions, 2 if quick else repeats)
        yield from time_rows(times, **where)
        yield ratio(times, "clipaware", "clipaware on NumPy", **where)
        for suffix in ("", ", and backward"):
            for other in ("naive", "paper"):
                yield ratio(times, f"{other}{suffix}", f"clipaware{suffix}", **where)


def jax_naive(x: Any, delta: Any, eps: Any) -> Any:
    import jax.numpy as jnp

    return jnp.clip(x + eps / jnp.linalg.norm(delta, axis=1, keepdims=True) * delta, 0, 1)


@case
def jax_speed(quick: bool) -> Iterator[Row]:
    """JAX on the CPU under jit: forward, and value and gradient, beside naive scaling and the paper's code."""
    import jax
    import jax.numpy as jnp

    paper = paper_code()
    for (rows, n), repeats in (((256, 3072), 25), ((64, 150_528), 7)):
        x, delta = (jnp.asarray(a) for a in problem(rows, n))
        eps = usual_eps(n, 2)

        def published(x: Any, delta: Any, eps: Any) -> Any:
            return jnp.clip(x + paper(x, delta, eps) * delta, 0, 1)

        def ready(function: Any) -> Callable[[], Any]:
            return lambda: jax.tree.map(np.asarray, function(x, delta, eps))  # noqa: B023

        def both_ways(function: Any) -> Any:
            return jax.value_and_grad(lambda *arguments: (function(*arguments) ** 2).sum(), argnums=1)

        where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        functions: dict[str, Callable[[], Any]] = {}
        for name, function in (("clipaware", ca.perturb), ("naive", jax_naive), ("paper", published)):
            for suffix, transformed in (("", function), (", and gradient", both_ways(function))):
                functions[name + suffix] = ready(jax.jit(transformed))
                start = time.perf_counter()
                functions[name + suffix]()
                taken = time.perf_counter() - start
                yield {**where, "variant": name + suffix, "quantity": "first call", "value": taken, "unit": "s"}
        functions["clipaware, not compiled"] = ready(ca.perturb)
        times = timed(functions, 2 if quick else repeats)
        yield from time_rows(times, **where)
        for suffix in ("", ", and gradient"):
            for other in ("naive", "paper"):
                yield ratio(times, f"{other}{suffix}", f"clipaware{suffix}", **where)
        error = np.abs(norm64(np.asarray(functions["clipaware"]()), np.asarray(x), 2) / eps - 1).max()
        yield {**where, "variant": "clipaware", "quantity": "norm error", "value": error, "unit": "of eps"}


@case
def tensorflow_speed(quick: bool) -> Iterator[Row]:
    """TensorFlow on the CPU under tf.function and XLA, beside naive scaling and the paper's code."""
    import tensorflow as tf

    paper = paper_code()
    for (rows, n), repeats in (((256, 3072), 15), ((64, 150_528), 5)):
        x, delta = (tf.constant(a) for a in problem(rows, n))
        eps = usual_eps(n, 2)

        def naive(x: Any, delta: Any) -> Any:
            return tf.clip_by_value(x + eps / tf.norm(delta, axis=1, keepdims=True) * delta, 0, 1)  # noqa: B023

        def published(x: Any, delta: Any) -> Any:
            return tf.clip_by_value(x + paper(x, delta, eps) * delta, 0, 1)  # noqa: B023

        def exact(x: Any, delta: Any) -> Any:
            return ca.perturb(x, delta, eps)  # noqa: B023

        unknown = [tf.TensorSpec((None, None), tf.float32)] * 2
        graphs = {
            "clipaware": tf.function(exact),
            "clipaware, XLA": tf.function(exact, jit_compile=True),
            "clipaware, unknown dimensions": tf.function(exact, input_signature=unknown),
            "clipaware, eager": exact,
            "naive": tf.function(naive),
            # AutoGraph would rewrite EagerPy for nothing.
            "paper": tf.function(published, autograph=False),
        }
        where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        functions: dict[str, Callable[[], Any]] = {}
        for name, graph in graphs.items():
            functions[name] = lambda graph=graph: graph(x, delta).numpy()  # type: ignore[misc] # noqa: B023
            start = time.perf_counter()
            functions[name]()
            taken = time.perf_counter() - start
            yield {**where, "variant": name, "quantity": "first call", "value": taken, "unit": "s"}
        times = timed(functions, 2 if quick else repeats)
        yield from time_rows(times, **where)
        for name in ("clipaware", "clipaware, XLA", "clipaware, unknown dimensions"):
            for other in ("naive", "paper"):
                yield ratio(times, other, name, **where)
        yield ratio(times, "clipaware", "clipaware, XLA", **where)
        error = np.abs(norm64(functions["clipaware"](), x.numpy(), 2) / eps - 1).max()
        yield {**where, "variant": "clipaware", "quantity": "norm error", "value": error, "unit": "of eps"}


def gpu_timed(functions: dict[str, Callable[[], Any]], repeats: int) -> Times:
    """Quartiles of a GPU's time in milliseconds, the functions taking turns in random order, with cold caches.

    What a function launches is captured in a graph, if it can be, and replayed: its time on the host is another matter.
    """
    import torch

    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    replays = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            replays[name] = graph.replay
        except RuntimeError:
            torch.cuda.synchronize()
            replays[name] = function
    taken: dict[str, list[float]] = {name: [] for name in functions}
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for name in rng.permutation(list(functions)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.zero_()
            begin.record()
            replays[name]()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: tuple(np.percentile(values, (25, 50, 75))) for name, values in taken.items()}


def gpu_functions(x: Any, delta: Any, eps: float, compiled: Any) -> dict[str, Callable[[], Any]]:
    """`perturb` and what it stands beside, of tensors on a GPU; `compiled` is torch.compile of `gpu_naive`."""
    import torch

    out = torch.empty_like(x)
    return {
        "clipaware": lambda: ca.perturb(x, delta, eps),
        "floor": lambda: torch.add(x, delta, out=out),
        "naive": lambda: gpu_naive(x, delta, eps),
        "naive, compiled": lambda: compiled(x, delta, eps),
        "paper": lambda: gpu_paper(x, delta, eps),
    }


def gpu_naive(x: Any, delta: Any, eps: float) -> Any:
    return (x + eps / delta.norm(dim=1, keepdim=True) * delta).clamp(0, 1)


def gpu_paper(x: Any, delta: Any, eps: float) -> Any:
    return (x + l2_clipping_aware_rescaling(x, delta, eps) * delta).clamp(0, 1)


@case
def gpu_speed(quick: bool) -> Iterator[Row]:
    """PyTorch on a GPU, beside an addition, naive scaling (also compiled) and the paper's algorithm; needs a GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    repeats = 3 if quick else 40
    sizes = (128, 784), (1024, 3072), (8192, 3072), (64, 150_528), (256, 150_528), (1024, 150_528)
    for rows, n in (*sizes, (8, 4_000_000), (1, 30_000_000)):
        torch.manual_seed(0)
        x, delta = torch.rand(rows, n, device="cuda"), torch.randn(rows, n, device="cuda")
        eps = usual_eps(n, 2)
        heavy = torch.tan(torch.pi * (torch.rand_like(x) - 0.5))  # Cauchy
        most = ca.reach(x, delta)[:, 0].double() * 0.99
        functions: dict[str, Callable[[], Any]] = {
            **gpu_functions(x, delta, eps, torch.compile(gpu_naive)),
            "clipaware, Cauchy": lambda: ca.perturb(x, heavy, eps),  # noqa: B023
            "clipaware, 99% of the reach": lambda: ca.perturb(x, delta, most),  # noqa: B023
        }
        where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        times = gpu_timed(functions, repeats)
        yield from time_rows(times, **where)
        for other in ("floor", "clipaware, Cauchy", "clipaware, 99% of the reach"):
            over, under = ("clipaware", other) if other == "floor" else (other, "clipaware")
            yield ratio(times, over, under, **where)
        for other in ("naive", "naive, compiled", "paper"):
            yield ratio(times, other, "clipaware", **where)
        for name in ("clipaware", "naive"):
            spent = []
            for _ in range(10):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    functions[name]()
                spent.append((time.perf_counter() - start) / 20)
            yield {**where, "variant": name, "quantity": "host", "value": 1e6 * np.median(spent), "unit": "us"}
        error = (torch.linalg.vector_norm((ca.perturb(x, delta, eps).double() - x), dim=1) / eps - 1).abs().max().item()
        yield {**where, "variant": "clipaware", "quantity": "norm error", "value": error, "unit": "of eps"}
        if (rows, n) != (256, 150_528):
            continue

        x16, delta16 = x.bfloat16(), delta.bfloat16()
        leaf, g = delta.clone().requires_grad_(), torch.randn_like(x)
        halves: dict[str, Callable[[], Any]] = {
            "clipaware": functions["clipaware"],
            "clipaware, bfloat16": lambda: ca.perturb(x16, delta16, eps),  # noqa: B023
        }
        times = gpu_timed(halves, repeats)
        yield ratio(times, "clipaware, bfloat16", "clipaware", **where)

        def both_ways(function: Any) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(function(x, leaf, eps), leaf, g)  # noqa: B023

        named = {"clipaware": ca.perturb, "naive": gpu_naive, "paper": gpu_paper}
        both = {f"{name}, and backward": both_ways(function) for name, function in named.items()}
        times = gpu_timed(both, repeats)
        yield from time_rows(times, **where)
        for other in ("naive", "paper"):
            yield ratio(times, f"{other}, and backward", "clipaware, and backward", **where)

        def waited(call: Callable[[], Any]) -> Callable[[], None]:
            def called() -> None:
                call()
                torch.cuda.synchronize()

            return called

        times = timed({f"{name}, called": waited(call) for name, call in both.items()}, repeats)
        yield from time_rows(times, **where)
        for other in ("naive", "paper"):
            yield ratio(times, f"{other}, and backward, called", "clipaware, and backward, called", **where)
        for name, function in both.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            extra = (torch.cuda.max_memory_allocated() - before) / (x.numel() * x.element_size())
            yield {**where, "variant": name, "quantity": "peak memory", "value": extra, "unit": "of the input"}


@case
def cupy_speed(quick: bool) -> Iterator[Row]:
    """CuPy on a GPU, beside an addition, naive scaling and the paper's algorithm in CuPy; nothing without a GPU."""
    try:
        import cupy
    except ImportError:
        return
    if not cupy.is_available():
        return

    for rows, n in ((256, 3072), (64, 150_528), (256, 150_528)):
        x, delta = (cupy.asarray(a) for a in problem(rows, n))
        eps, out = usual_eps(n, 2), cupy.empty_like(x)
        calls: dict[str, Callable[[], Any]] = {
            "clipaware": lambda: ca.perturb(x, delta, eps),  # noqa: B023
            "floor": lambda: cupy.add(x, delta, out=out),  # noqa: B023
            "naive": lambda: naive_perturb(x, delta, eps),  # noqa: B023
            "paper": lambda: cupy.clip(x + l2_clipping_aware_rescaling(x, delta, eps) * delta, 0, 1),  # noqa: B023
        }

        def waited(call: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: (call(), cupy.cuda.Device().synchronize())

        times = timed({name: waited(call) for name, call in calls.items()}, 2 if quick else 15)
        where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        yield from time_rows(times, **where)
        for other in ("naive", "paper"):
            yield ratio(times, other, "clipaware", **where)
        error = np.abs(norm64(calls["clipaware"]().get(), x.get(), 2) / eps - 1).max()
        yield {**where, "variant": "clipaware", "quantity": "norm error", "value": error, "unit": "of eps"}


def compared(rows: int, n: int, repeats: int) -> Iterator[Row]:
    """Times for the plots."""
    x, delta = problem(rows, n)
    eps, out, paper = usual_eps(n, 2), np.empty_like(x), paper_code()
    functions: dict[str, Callable[[], Any]] = {
        "clipaware": lambda: ca.perturb(x, delta, eps),
        "floor": lambda: np.add(x, delta, out=out),
        "naive": lambda: naive_perturb(x, delta, eps),
        "paper": lambda: np.clip(x + paper(x, delta, eps) * delta, 0, 1),
    }
    yield from time_rows(timed(functions, repeats), rows=rows, n=n, dtype="float32", p=2)


@case
def jax_gpu_speed(quick: bool) -> Iterator[Row]:
    """JAX on a GPU under jit, beside naive scaling and beside PyTorch's kernels, called and waited for; needs a GPU."""
    try:
        import jax
        import torch
    except ImportError:
        return
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        return

    for rows, n in ((1024, 3072), (64, 150_528), (256, 150_528)):
        x, delta = (jax.device_put(a) for a in problem(rows, n))
        of_torch = [torch.tensor(np.asarray(a), device="cuda") for a in (x, delta)]
        eps = usual_eps(n, 2)
        exact, naive = jax.jit(ca.perturb), jax.jit(jax_naive)

        def waited(x: Any, delta: Any, eps: float = eps) -> None:
            ca.perturb(x, delta, eps)
            torch.cuda.synchronize()

        functions: dict[str, Callable[[], Any]] = {
            "clipaware": lambda: exact(x, delta, eps).block_until_ready(),  # noqa: B023
            "naive": lambda: naive(x, delta, eps).block_until_ready(),  # noqa: B023
            "clipaware, PyTorch": lambda: waited(of_torch[0], of_torch[1]),  # noqa: B023
        }
        times = timed(functions, 2 if quick else 15)
        where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        yield from time_rows(times, **where)
        for other in ("naive", "clipaware, PyTorch"):
            yield ratio(times, "clipaware", other, **where)
        error = np.abs(norm64(np.asarray(exact(x, delta, eps)), np.asarray(x), 2) / eps - 1).max()
        yield {**where, "variant": "clipaware", "quantity": "norm error", "value": error, "unit": "of eps"}


def gpu_compared(sizes: list[tuple[int, int]], repeats: int) -> Iterator[Row]:
    """Times for the plots."""
    import torch

    if not torch.cuda.is_available():
        return
    compiled = torch.compile(gpu_naive, dynamic=True)
    for rows, n in sizes:
        x, delta = torch.rand(rows, n, device="cuda"), torch.randn(rows, n, device="cuda")
        functions = gpu_functions(x, delta, usual_eps(n, 2), compiled)
        yield from time_rows(gpu_timed(functions, repeats), rows=rows, n=n, dtype="float32", p=2)


@case
def gpu_by_length(quick: bool) -> Iterator[Row]:
    """Time against the length of 64 rows; PyTorch on a GPU, float32, p = 2; needs a GPU."""
    yield from gpu_compared([(64, 4**k) for k in range(4, 8 if quick else 12)], 3 if quick else 15)


@case
def gpu_by_rows(quick: bool) -> Iterator[Row]:
    """Time against the number of rows of 3072 elements; PyTorch on a GPU, float32, p = 2; needs a GPU."""
    yield from gpu_compared([(4**k, 3072) for k in range(4 if quick else 9)], 3 if quick else 15)


@case
def by_length(quick: bool) -> Iterator[Row]:
    """Time against the length of 16 rows; NumPy, float32, p = 2."""
    for n in 4 ** np.arange(3, 8 if quick else 11):
        yield from compared(16, int(n), 2 if quick else 5 if n > 10**5 else 15)


@case
def by_rows(quick: bool) -> Iterator[Row]:
    """Time against the number of rows of 3072 elements; NumPy, float32, p = 2."""
    for rows in 4 ** np.arange(0, 4 if quick else 7):
        yield from compared(int(rows), 3072, 2 if quick else 5 if rows > 500 else 15)


@case
def memory(quick: bool) -> Iterator[Row]:
    """The most memory that a process holds during a call, beyond what it held before, over the size of the result."""
    code = """if True:
    import sys, threading, time, numpy as np, clipaware as ca

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    def watch():
        while watching:
            seen.append(resident())
            time.sleep(0.0003)

    framework, rows, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = np.random.default_rng(0)
    x, delta = rng.random((rows, n), np.float32), rng.standard_normal((rows, n), np.float32)
    if framework == "torch":
        import torch
        x, delta = torch.from_numpy(x), torch.from_numpy(delta)
    for _ in range(2):
        v = ca.perturb(x, delta, 0.25 * (n / 3) ** 0.5)
        del v
    seen, watching = [], True
    watcher = threading.Thread(target=watch)
    before = resident()
    watcher.start()
    for _ in range(5):
        v = ca.perturb(x, delta, 0.25 * (n / 3) ** 0.5)
        del v
    watching = False
    watcher.join()
    print((max(seen) - before) / (4 * rows * n))
    """
    for framework in ("numpy", "torch"):
        for rows, n in SIZES[2:]:
            command = [sys.executable, "-c", code, framework, str(rows), str(n)]
            share = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            where = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
            yield {**where, "variant": framework, "quantity": "peak memory", "value": share, "unit": "of the result"}


@case
def dask_batch(quick: bool) -> Iterator[Row]:
    """perturb of a batch in chunks of 64 MB, from memory to memory, beside NumPy's kernels on the whole of it."""
    import dask
    import dask.array as da

    rows, n = 22_000 if quick else 100_000, 3072
    x, delta = problem(rows, n)
    eps = usual_eps(n, 2)
    lazy_x, lazy_delta = (da.from_array(a, chunks=(2**26 // (4 * n), n)) for a in (x, delta))

    def in_chunks() -> None:
        ca.set_threads(1)
        try:
            with dask.config.set(scheduler="threads"):
                ca.perturb(lazy_x, lazy_delta, eps).persist()
        finally:
            ca.set_threads(None)

    times = timed({"dask": in_chunks, "numpy": lambda: ca.perturb(x, delta, eps)}, 2 if quick else 5)
    where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
    yield from time_rows(times, **where)
    yield ratio(times, "numpy", "dask", **where)


@case
def dask_sample(quick: bool) -> Iterator[Row]:
    """One sample from Zarr to Zarr, chunked along the sample: time beside that of reading it five times and writing
    it, and the most memory that the whole process ever has. Of up to 4e9 elements, if half of the free disk allows."""
    code = """if True:
    import math, sys, time
    import dask, dask.array as da, numpy as np, zarr
    import clipaware as ca
    folder, n = sys.argv[1], int(sys.argv[2])
    chunk = 2**22
    ca.set_threads(1)
    dask.config.set(scheduler="threads")

    def timed(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    class Nowhere:
        def __setitem__(self, part, a):
            pass

    rng = da.random.default_rng(0)
    rng.random((1, n), dtype="float32", chunks=(1, chunk)).to_zarr(f"{folder}/x", compressors=None)
    rng.standard_normal((1, n), chunks=(1, chunk)).astype("float32").to_zarr(f"{folder}/delta", compressors=None)
    x, delta = (da.from_zarr(f"{folder}/{name}") for name in ("x", "delta"))
    small = [a[:, : 2 * chunk] for a in (x, delta)]
    ca.perturb(*small, 1.0).compute()  # compiles
    eps = 0.25 * math.sqrt(n / 3)
    taken = timed(lambda: ca.perturb(x, delta, eps).to_zarr(f"{folder}/v", compressors=None))
    reading = timed(lambda: da.store([x, delta], [Nowhere(), Nowhere()], lock=False))
    writing = timed(lambda: x.to_zarr(f"{folder}/copy", compressors=None)) - reading / 2
    v = da.from_zarr(f"{folder}/v").astype("float64")
    off = abs(math.sqrt(float(((v - x) ** 2).sum().compute())) / eps - 1)
    most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(taken, 5 * reading + max(writing, 0), float(most.split()[1]) / 1e6, off)
    """
    with tempfile.TemporaryDirectory() as folder:
        n = 20_000_000 if quick else min(4_000_000_000, int(shutil.disk_usage(folder).free / 32))
        command = [sys.executable, "-c", code, folder, str(n)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    taken, floor, peak, off = map(float, done.stdout.split())
    where: Row = {"rows": 1, "n": n, "dtype": "float32", "p": 2}
    yield {**where, "variant": "dask", "quantity": "time", "value": 1e3 * taken, "unit": "ms"}
    yield {**where, "variant": "reading 5x, writing", "quantity": "time", "value": 1e3 * floor, "unit": "ms"}
    yield {**where, "variant": "dask / reading 5x, writing", "quantity": "ratio", "value": taken / floor, "unit": ""}
    yield {**where, "variant": "dask", "quantity": "peak memory", "value": peak, "unit": "GB"}
    yield {**where, "variant": "dask", "quantity": "norm error", "value": off, "unit": "of eps"}


@case
def first_call(quick: bool) -> Iterator[Row]:
    """The first call of a new process, beyond its imports: with nothing in Numba's cache, and with."""
    code = """if True:
    import sys, time, numpy as np, numba, clipaware as ca
    x, delta = np.full((4, 3000), 0.5, np.float32), np.ones((4, 3000), np.float32)
    start = time.perf_counter()
    ca.perturb(x, delta, 3.0, p=float(sys.argv[1]))
    print(time.perf_counter() - start)
    """
    for p in (2,) if quick else (1, 2, 2.7, math.inf):
        with tempfile.TemporaryDirectory() as empty:
            for name in ("cold cache", "warm cache"):
                command, environment = [sys.executable, "-c", code, str(p)], os.environ | {"NUMBA_CACHE_DIR": empty}
                run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                yield {"variant": name, "p": p, "quantity": "time", "value": float(run.stdout), "unit": "s"}


@case
def many_threads(quick: bool) -> Iterator[Row]:
    """16 Python threads that call perturb at once, beside the same calls one after another."""
    for rows, n, calls in ((256, 3072, 10), (8, 150_528, 4)):
        x, delta = problem(rows, n)
        eps = usual_eps(n, 2)

        def work(calls: int = calls) -> None:
            for _ in range(calls):
                ca.perturb(x, delta, eps)  # noqa: B023

        def at_once() -> None:
            workers = [threading.Thread(target=work) for _ in range(16)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        times = timed({"at once": at_once, "in turn": lambda: work(16 * calls)}, 2 if quick else 9)  # noqa: B023
        where = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
        yield from time_rows(times, **where)
        yield ratio(times, "at once", "in turn", **where)


@case
def accuracy(quick: bool) -> Iterator[Row]:
    """Worst norm error, over directions, norms, sizes and 2% to 99.95% of the reach."""
    sizes = (784, 20_000) if quick else (1, 7, 784, 20_000, 150_528, 10_000_000)
    for dtype in ("float32", "float64"):
        for kind in ("gaussian", "cauchy", "lognormal", "tied"):
            for p in (1, 1.3, 2, 3, 10, 50, math.inf):
                worst, where = 0.0, {}
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
                        tied = n ** (1 / p) if kind == "tied" else moved ** (p - 1 if p < math.inf else 0)
                        error = abs(float(norm64(v, x, p)[0]) / eps - 1) - float(spacing / eps * tied)
                        if error > worst:
                            worst, where = error, {"n": n}
                row = {"dtype": dtype, "p": p, "variant": kind, **where}
                quantity = "worst norm error beyond the dtype's spacing"
                yield {**row, "quantity": quantity, "value": worst, "unit": "of eps"}


@case
def foolbox_attack(quick: bool) -> Iterator[Row]:
    """Foolbox's clipping-aware Gaussian attack beside ours, on pictures of PyTorch and noise drawn before; no model."""
    import torch
    from foolbox.attacks.additive_noise import L2ClippingAwareAdditiveGaussianNoiseAttack
    from foolbox.models.pytorch import PyTorchModel

    import clipaware.foolbox as ours

    rows, n = 64, 150_528
    x, delta = (torch.from_numpy(a).reshape(rows, 3, 224, 224) for a in problem(rows, n))
    eps, model = usual_eps(n, 2), PyTorchModel(torch.nn.Identity().eval(), bounds=(0, 1), device="cpu")
    theirs = L2ClippingAwareAdditiveGaussianNoiseAttack()
    mine = ours.L2ClippingAwareAdditiveGaussianNoiseAttack()
    functions: dict[str, Callable[[], Any]] = {
        "clipaware": lambda: mine.run(model, x, epsilon=eps),
        "foolbox": lambda: theirs.run(model, x, None, epsilon=eps),
    }
    with (
        mock.patch.object(ours, "sample", return_value=delta),
        mock.patch.object(theirs, "sample_noise", lambda like: type(like)(delta)),
    ):
        times = timed(functions, 2 if quick else 9)
        errors = {
            name: np.abs(norm64(attack().reshape(rows, n), x.reshape(rows, n), 2) / eps - 1).max()
            for name, attack in functions.items()
        }
    where: Row = {"rows": rows, "n": n, "dtype": "float32", "p": 2}
    yield from time_rows(times, **where)
    yield ratio(times, "foolbox", "clipaware", **where)
    for name, error in errors.items():
        yield {**where, "variant": name, "quantity": "norm error", "value": error, "unit": "of eps"}


@case
def noise_attack_time(quick: bool) -> Iterator[Row]:
    """noise_attack with up to 100 repeats on 1,000 pictures of 28 x 28 and a CNN, beside the model's share of it."""
    import torch

    from clipaware.attacks import noise_attack

    torch.manual_seed(0)
    model = small_cnn().eval()
    x, repeats = torch.rand(1000, 1, 28, 28), 5 if quick else 100
    asked, inside = 0, 0.0

    def watched(v: Any) -> Any:
        nonlocal asked, inside
        start = time.perf_counter()
        scores = model(v)
        asked, inside = asked + len(v), inside + time.perf_counter() - start
        return scores

    with torch.no_grad():
        labels = model(x).argmax(1)
    taken: dict[str, list[float]] = {"noise_attack": [], "forward passes": []}
    for _ in range(1 if quick else 3):
        # Both in one run, since it takes long enough for a machine to have other things to do for a part of it.
        asked, inside, start = 0, 0.0, time.perf_counter()
        found = noise_attack(watched, x, labels, 2.0, repeats=repeats, seed=0)
        taken["noise_attack"].append(1e3 * (time.perf_counter() - start))
        taken["forward passes"].append(1e3 * inside)
    times = {name: (min(t), float(np.median(t)), max(t)) for name, t in taken.items()}
    where: Row = {"rows": 1000, "n": 784, "dtype": "float32", "p": 2}
    yield from time_rows(times, **where)
    ratios = np.array(taken["noise_attack"]) / taken["forward passes"]
    span = {"value": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max())}
    yield {**where, "variant": "noise_attack / forward passes", "quantity": "ratio", **span, "unit": ""}
    quantities = {"samples asked about": asked, "share that fell": float(found.success.mean())}
    for quantity, value in quantities.items():
        yield {**where, "variant": "noise_attack", "quantity": quantity, "value": value, "unit": ""}


class Residual:
    """The pieces of a ResNet-18 (He et al. 2015, arXiv 1512.03385), without its weights."""

    @staticmethod
    def block(before: int, after: int, stride: int) -> Any:
        import torch

        layers = torch.nn

        class Block(layers.Module):
            """Two convolutions and a way around them."""

            def __init__(self) -> None:
                super().__init__()
                self.way = layers.Sequential(
                    *(layers.Conv2d(before, after, 3, stride, 1, bias=False), layers.BatchNorm2d(after), layers.ReLU()),
                    *(layers.Conv2d(after, after, 3, 1, 1, bias=False), layers.BatchNorm2d(after)),
                )
                changed = stride > 1 or before != after
                self.around = (
                    layers.Sequential(layers.Conv2d(before, after, 1, stride, bias=False), layers.BatchNorm2d(after))
                    if changed
                    else layers.Identity()
                )

            def forward(self, x: Any) -> Any:
                return torch.relu(self.way(x) + self.around(x))

        return Block()

    @staticmethod
    def network() -> Any:
        import torch

        layers, block = torch.nn, Residual.block
        widths, blocks = (64, 64, 128, 256, 512), []
        for before, after in itertools.pairwise(widths):
            blocks += [block(before, after, 1 if before == after else 2), block(after, after, 1)]
        return layers.Sequential(
            *(layers.Conv2d(3, 64, 7, 2, 3, bias=False), layers.BatchNorm2d(64), layers.ReLU()),
            *(layers.MaxPool2d(3, 2, 1), *blocks, layers.AdaptiveAvgPool2d(1), layers.Flatten()),
            layers.Linear(512, 1000),
        )


def small_cnn() -> Any:
    import torch

    layers = torch.nn
    return layers.Sequential(
        *(layers.Conv2d(1, 32, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2)),
        *(layers.Conv2d(32, 64, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2)),
        *(layers.Flatten(), layers.Linear(3136, 128), layers.ReLU(), layers.Linear(128, 10)),
    )


def training_step(device: str, model: Any, shape: tuple[int, ...], eps: float, quick: bool) -> Iterator[Row]:
    """A step of train_robust with replay, and the rescaling of the noisy half of the batch, forward and backward."""
    import torch

    from clipaware import adversarial_noise as an
    from clipaware._training import Run

    torch.manual_seed(0)
    model, x = model.to(device).train(), torch.rand(shape, device=device)
    y = torch.randint(10, shape[:1], device=device)
    rows, n = shape[0], math.prod(shape[1:])
    noisy = x[an._parts(rows)[0] :]
    delta, g = torch.randn_like(noisy).requires_grad_(), torch.randn_like(noisy)

    def rescaling() -> None:
        torch.autograd.grad(ca.perturb(noisy, delta, eps), delta, g)
        if device == "cuda":
            torch.cuda.synchronize()

    for amp in (None, torch.bfloat16) if device == "cuda" else (None,):
        run = Run(model, [(x, y)], 2, (0, 1), amp, 0, False)
        noise = an._Noise(run, "ant", eps, None, 0.3, 1, 1e-3)
        noise.begin((x, y))
        for _ in range(3):  # two of which are earlier ones
            noise.remember()
            noise.renew()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

        def step() -> None:
            an._robust_step(run, noise, optimizer, x, y)  # noqa: B023
            if device == "cuda":
                torch.cuda.synchronize()

        times = timed({"step": step, "rescaling": rescaling}, 3 if quick else 25)
        where: Row = {"rows": rows, "n": n, "dtype": "float32" if amp is None else "bfloat16 model", "p": 2}
        yield from time_rows(times, **where)
        yield ratio(times, "rescaling", "step", **where)


@case
def cpu_training_step(quick: bool) -> Iterator[Row]:
    """Adversarial noise training of a small CNN on 128 pictures of 28 x 28, one thread: the rescaling's share of it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other on a machine that is busy, for ten times as long
    try:
        yield from training_step("cpu", small_cnn(), (128, 1, 28, 28), 6.0, quick)
    finally:
        torch.set_num_threads(threads)


@case
def gpu_training_step(quick: bool) -> Iterator[Row]:
    """The same of a ResNet-18 on 64 pictures of 3 x 224 x 224, on a GPU; nothing without one."""
    import torch

    if torch.cuda.is_available():
        yield from training_step("cuda", Residual.network(), (64, 3, 224, 224), 60.0, quick)


@case
def quantized_speed(quick: bool) -> Iterator[Row]:
    """perturb_quantized beside the float perturb, on one picture of 1000 x 1000 x 3; float32, p = 2."""
    rng = np.random.default_rng(0)
    whole, drawn = rng.integers(0, 256, (1000, 1000, 3)), rng.standard_normal((1000, 1000, 3), np.float32)
    x = (whole / 255).astype(np.float32)
    for noise, delta in (("Gaussian", drawn), ("sign", np.sign(drawn))):
        for eps in (3.0, 30.0, 300.0):
            times = timed(
                {
                    "perturb": lambda: ca.perturb(x, delta, eps, axis=None),  # noqa: B023
                    "perturb_quantized": lambda: ca.perturb_quantized(x, delta, eps, axis=None),  # noqa: B023
                },
                2 if quick else 15,
            )
            named = {f"{name}, {noise} noise, eps {eps:g}": found for name, found in times.items()}
            where: Row = {"rows": 1, "n": x.size, "dtype": "float32", "p": 2}
            yield from time_rows(named, **where)
            yield ratio(named, *reversed(list(named)), **where)


def cut_photographs(folder: Path, number: int) -> list[Path]:
    """Pieces of the bundled photograph of 224 x 224, turned and of different brightness, as PNG."""
    from PIL import Image

    photograph, rng, paths = demo.photograph(), np.random.default_rng(0), []
    for k in range(number):
        top, left = rng.integers(0, 32, endpoint=True), rng.integers(0, 160, endpoint=True)
        piece = photograph[top : top + 224, left : left + 224]
        turned = np.rot90(piece, int(rng.integers(4))) ** rng.uniform(0.6, 1.6)
        paths.append(folder / f"{k:04d}.png")
        Image.fromarray(np.rint(255 * turned).astype(np.uint8)).save(paths[-1], compress_level=6)
    return paths


@case
def files_throughput(quick: bool) -> Iterator[Row]:
    """`clipaware perturb` of 1,000 PNGs of 224 x 224 on two threads, beside reading them, writing the same outputs
    and reading these back with Pillow alone, at the same level of compression."""
    from PIL import Image

    # In turns of a few seconds, since machines are noisy.
    number, turns = (30, 2) if quick else (100, 10)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folders = [root / f"in{k}" for k in range(turns)]
        for folder in (*folders, root / "plain"):
            folder.mkdir()
        inputs = {folder: cut_photographs(folder, number) for folder in folders}

        def perturbed(folder: Path) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                options = ["--eps", "3", "--out", str(folder / "out"), "--overwrite", "--jobs", "2"]
                assert cli.main(["perturb", str(folder), *options]) == 0

        def read_picture(path: Path) -> Any:
            with Image.open(path) as image:
                return np.asarray(image)

        def copied(path: Path, output: Any) -> None:
            read_picture(path)
            with (root / "plain" / path.name).open("wb") as file:
                Image.fromarray(output).save(file, "PNG", compress_level=6)
            read_picture(root / "plain" / path.name)

        def only_files(folder: Path) -> None:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(copied, inputs[folder], outputs))

        rates: dict[str, list[float]] = {"clipaware perturb": [], "files alone": []}
        perturbed(folders[0])  # which compiles
        for folder in folders:
            for name, function in (("clipaware perturb", perturbed), ("files alone", only_files)):
                start = time.perf_counter()
                function(folder)
                rates[name].append(number / (time.perf_counter() - start))
                outputs = [read_picture(folder / "out" / f"{path.stem}_eps3.png") for path in inputs[folder]]
        for name, found in rates.items():
            low, median, high = np.quantile(found, [0.25, 0.5, 0.75])
            yield {
                "variant": name,
                "n": 150_528,
                "quantity": "rate",
                "value": median,
                "low": low,
                "high": high,
                "unit": "files/s",
            }
        shares = np.divide(rates["clipaware perturb"], rates["files alone"])
        low, median, high = np.quantile(shares, [0.25, 0.5, 0.75])
        yield {"variant": "clipaware perturb / files alone", "n": 150_528, "quantity": "share", "value": median,
               "low": low, "high": high, "unit": ""}  # fmt: skip


@case
def saved_norms(quick: bool) -> Iterator[Row]:
    """How far the norm that a written file holds is from what was asked for, by format; the SNR of a clipping sound."""
    import soundfile
    import tifffile
    from PIL import Image

    t = np.arange(32_000) / 16_000
    voice = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 20)) * np.sin(2 * np.pi * 2.5 * t) ** 2
    voice /= 1.02 * abs(voice).max()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        photograph = np.clip(demo.photograph()[:224, :224], 0, 1)
        eight, sixteen = (
            np.rint(photograph * top).astype(dtype) for top, dtype in ((255, np.uint8), (65535, np.uint16))
        )
        Image.fromarray(eight).save(root / "8 bit PNG.png")
        tifffile.imwrite(root / "16 bit TIFF.tif", sixteen, photometric="rgb")
        tifffile.imwrite(root / "float TIFF.tif", photograph.astype(np.float32), photometric="rgb")
        np.save(root / "float npy.npy", photograph.astype(np.float32))
        soundfile.write(root / "16 bit WAV.wav", voice, 16_000, "PCM_16")
        soundfile.write(root / "24 bit WAV.wav", voice, 16_000, "PCM_24")
        runs: list[tuple[Path, tuple[str, ...], str]] = [
            (path, ("--eps", "3"), kind) for path in sorted(root.iterdir()) for kind in ("gaussian", "rademacher")
        ]
        runs += [(root / "16 bit TIFF.tif", ("--eps", "3", "--format", "png"), "gaussian")]
        runs += [(root / f"{bits} bit WAV.wav", ("--snr", "0"), "gaussian") for bits in (16, 24)]
        for k, (path, options, kind) in enumerate(runs):
            out = root / f"out{k}"
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                argv = ["perturb", str(path), *options, "--noise", kind, "--out", str(out), "--json"]
                assert cli.main(argv) == 0
            row = json.loads(printed.getvalue())
            name = "16 bit PNG" if "png" in options else path.stem
            where: Row = {"variant": f"{name}, {kind}, {options[0][2:]} {options[1]}"}
            if options[0] == "--snr":
                apart = -20 * math.log10(row["delivered"] / row["asked"])
                yield {**where, "quantity": "SNR error", "value": apart, "unit": "dB"}
                naive = -20 * math.log10(row["naive"] / row["asked"])
                yield {**where, "quantity": "SNR error of naive scaling", "value": naive, "unit": "dB"}
            else:
                for quantity, held in (("norm error", "delivered"), ("norm error of naive scaling", "naive")):
                    yield {**where, "quantity": quantity, "value": row[held] / row["asked"] - 1, "unit": "of eps"}


@case
def import_time(quick: bool) -> Iterator[Row]:
    """What ``import clipaware`` takes beyond ``import numpy``, in new processes."""

    def taken() -> float:
        code = "import numpy, time; t = time.perf_counter(); import clipaware; print(time.perf_counter() - t)"
        return 1e3 * float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)

    low, median, high = np.quantile([taken() for _ in range(3 if quick else 11)], [0.25, 0.5, 0.75])
    yield {"variant": "import clipaware", "quantity": "time", "value": median, "low": low, "high": high, "unit": "ms"}
