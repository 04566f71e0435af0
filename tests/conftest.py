"""One fixture entry per backend: a new framework joins every test by adding one here."""

from __future__ import annotations

import csv
import ctypes
import gc
import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import clipaware as ca
from clipaware._backends import numpy as numpy_backend

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"  # programs that were compiled for a test, kept for the next run; `make clean` removes them


def _digest_of_compiled_code() -> str:
    """A digest of every file that Numba's code and its constants come from.

    Numba's own key covers only the file that a kernel is in.
    """
    package = Path(ca.__file__).parent
    files = sorted([*(package / "_kernels").glob("*.py"), package / "_fast.py", package / "_problem.py"])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


NUMBA_CACHE = CACHE / "numba" / _digest_of_compiled_code()

# JAX's programs are small and many here, so they are compiled with little optimisation. All of these are read when a
# framework is imported.
for _name, _value in {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    "NUMBA_CACHE_DIR": NUMBA_CACHE,
    "JAX_COMPILATION_CACHE_DIR": CACHE / "jax",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor",
    "TORCHINDUCTOR_COMPILE_THREADS": 1,  # more are processes of their own, half a gigabyte each
    "TRITON_CACHE_DIR": CACHE / "triton",
}.items():
    os.environ.setdefault(_name, str(_value))


# The process that hands tests out to others imports no framework, which would take a gigabyte.
HANDS_OUT = (
    "PYTEST_XDIST_WORKER" not in os.environ
    and any(argument.startswith(("-n", "--numprocesses")) for argument in sys.argv)
    and not {"--collect-only", "--co"} & set(sys.argv)
)


def _optional(name: str) -> Any:
    """A module, or None where it is not installed: then what needs it is not collected."""
    if HANDS_OUT:
        return None
    try:
        return import_module(name)
    except ImportError:
        return None


hypothesis = _optional("hypothesis")
array_api_strict, cupy, jax, tf, torch = map(_optional, ("array_api_strict", "cupy", "jax", "tensorflow", "torch"))
dask, dask_array = map(_optional, ("dask", "dask.array"))
MODULES = {"array-api-strict": array_api_strict, "cupy": cupy, "dask": dask, "jax": jax, "tensorflow": tf}
MODULES |= {"torch": torch, "cuda": torch}
jax_backend, tensorflow_backend, torch_backend = (
    _optional(f"clipaware._backends.{name}") for name in ("jax", "tensorflow", "torch")
)

triton_kernels = _optional("clipaware._kernels.triton")

if hypothesis is not None:
    hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
    hypothesis.settings.load_profile("default")
if torch is not None:
    torch.set_num_threads(1)  # the tests themselves run side by side
if jax is not None:
    jax.config.update("jax_enable_x64", True)  # without, there is test_jax.py

NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Backend:
    """How the tests make a framework's arrays, read them, and differentiate with it."""

    name: str
    make: Callable[[Any, str], Any]  # a framework array of that dtype from a NumPy array
    numpy: Callable[[Any], Any]  # and back; bfloat16 through ml_dtypes
    # (x, delta, eps, lower, upper, g, **options), all NumPy float64 -> the five gradients of sum(g*perturb(...))
    gradients: Callable[..., list[Any]]
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    # What a test may need of a backend, beside a dtype: with @pytest.mark.needs("float16", "checked") it leaves out the
    # backends that lack either.
    checked: bool = True  # bad values are errors; on accelerators and in traces they make their row NaN
    subnormal: bool = True  # subnormal numbers are not taken for 0
    eager: bool = True  # it works on the memory of its arguments, and not on what a program makes of them
    same_alone: bool = True  # the order of a row's sums does not depend on the shape of its batch
    whole_samples: bool = True  # no sample is spread over several chunks

    def array(self, a: Any, dtype: str) -> Any:
        """A framework array of that dtype from a NumPy array."""
        assert dtype in self.dtypes, f"{self.name} has no {dtype}: have the test take be.dtypes"
        return self.make(a, dtype)

    def perturb(self, x: Any, delta: Any, *args: Any, dtype: str = "float64", **options: Any) -> Any:
        """perturb of NumPy arrays, through this framework."""
        return self.numpy(ca.perturb(self.array(x, dtype), self.array(delta, dtype), *args, **options))

    def rescale(self, x: Any, delta: Any, *args: Any, dtype: str = "float64", **options: Any) -> Any:
        return self.numpy(ca.rescale(self.array(x, dtype), self.array(delta, dtype), *args, **options))

    def reach(self, x: Any, delta: Any, *args: Any, dtype: str = "float64", **options: Any) -> Any:
        return self.numpy(ca.reach(self.array(x, dtype), self.array(delta, dtype), *args, **options))


def _numpy_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    return list(ca.perturb_vjp(x, delta, eps, g, bounds=(lower, upper), **options))


def _to_torch(a: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(a, np.float64)).to(getattr(torch, dtype))


def _from_torch(a: torch.Tensor) -> Any:
    name = str(a.dtype).removeprefix("torch.")
    wide = a.detach().cpu()
    return wide.double().numpy().astype(NUMPY_DTYPES[name]) if name in NUMPY_DTYPES else wide.numpy()


def _torch_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, delta, eps, lower, upper)]
    v = ca.perturb(*inputs[:3], bounds=tuple(inputs[3:]), **options)
    v.backward(torch.tensor(g))
    return [a.grad.numpy() for a in inputs]


# Where the GPU's kernels run: on a GPU, or one program after another in Triton's interpreter.
GPU = "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _to_cuda(a: Any, dtype: str) -> torch.Tensor:
    return _to_torch(a, dtype).to(GPU)


def _cuda_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    inputs = [torch.tensor(a, dtype=torch.float64, device=GPU).requires_grad_() for a in (x, delta, eps, lower, upper)]
    v = ca.perturb(*inputs[:3], bounds=tuple(inputs[3:]), **options)
    v.backward(torch.tensor(g, device=GPU))
    return [a.grad.cpu().numpy() for a in inputs]


def _to_jax(a: Any, dtype: str) -> Any:
    return jax.numpy.asarray(np.array(a, np.float64), dtype)


def _jax_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    def perturb(x: Any, delta: Any, eps: Any, lower: Any, upper: Any) -> Any:
        return ca.perturb(x, delta, eps, bounds=(lower, upper), **options)

    _, pull = jax.vjp(perturb, *(jax.numpy.asarray(a, float) for a in (x, delta, eps, lower, upper)))
    return [np.asarray(bar) for bar in pull(jax.numpy.asarray(g))]


def _to_tensorflow(a: Any, dtype: str) -> Any:
    return tf.constant(np.array(a).astype(NUMPY_DTYPES[dtype]))  # a cast of its own would flush subnormal numbers


def _tensorflow_gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
    inputs = [tf.constant(np.array(a, np.float64)) for a in (x, delta, eps, lower, upper)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        v = ca.perturb(*inputs[:3], bounds=tuple(inputs[3:]), **options)
    return [a.numpy() for a in tape.gradient(v, inputs, g)]


def _to_strict(a: Any, dtype: str) -> Any:
    return array_api_strict.asarray(np.array(a).astype(dtype))


def _to_cupy(a: Any, dtype: str) -> Any:
    return cupy.asarray(np.array(a).astype(dtype))


def _from_cupy(a: Any) -> Any:
    return a.get()


def _to_dask(a: Any, dtype: str) -> Any:
    """In two chunks along every axis, so that samples are spread over several."""
    a = _to_numpy(a, dtype)
    return dask_array.from_array(a, chunks=tuple(n - n // 2 or 1 for n in a.shape))


def _to_dask_batch(a: Any, dtype: str) -> Any:
    """In two chunks along the first axis."""
    a = _to_numpy(a, dtype)
    return dask_array.from_array(a, chunks=tuple(n - n // 2 or 1 if i == 0 else n for i, n in enumerate(a.shape)))


def _from_dask(a: Any) -> Any:
    return a.compute(scheduler="synchronous")


def _closed_form(make: Callable[..., Any], back: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """The gradients of a framework that does not differentiate by itself."""

    def gradients(x: Any, delta: Any, eps: Any, lower: Any, upper: Any, g: Any, **options: Any) -> list[Any]:
        x, delta, eps, lower, upper, g = (make(a, "float64") for a in (x, delta, eps, lower, upper, g))
        return [back(bar) for bar in ca.perturb_vjp(x, delta, eps, g, bounds=(lower, upper), **options)]

    return gradients


def _to_numpy(a: Any, dtype: str) -> Any:
    return np.array(a).astype(NUMPY_DTYPES[dtype])


GPU_LIKE: Any = {"checked": False, "same_alone": False}
ALL_BACKENDS = [
    Backend("numpy", _to_numpy, np.asarray, _numpy_gradients),
    # As without Numba: NumPy's own operations instead of compiled kernels.
    Backend("numpy-operations", _to_numpy, np.asarray, _numpy_gradients),
    Backend("torch", _to_torch, _from_torch, _torch_gradients),
    # As on other devices: PyTorch's own operations instead of NumPy's kernels on the same memory.
    Backend("torch-operations", _to_torch, _from_torch, _torch_gradients),
    # PyTorch's tensors on a GPU, by Triton's kernels.
    Backend("cuda", _to_cuda, _from_torch, _cuda_gradients, **GPU_LIKE),
    Backend("jax", _to_jax, np.asarray, _jax_gradients),
    # As in a trace and on other devices: one compiled program instead of NumPy's kernels.
    Backend("jax-operations", _to_jax, np.asarray, _jax_gradients, checked=False, subnormal=False, eager=False),
    Backend("tensorflow", _to_tensorflow, lambda a: a.numpy(), _tensorflow_gradients),
    # As in a graph and on other devices: TensorFlow's own operations, though not compiled for every shape.
    Backend(
        "tensorflow-operations",
        _to_tensorflow,
        lambda a: a.numpy(),
        _tensorflow_gradients,
        checked=False,
        subnormal=False,
        eager=False,
        same_alone=False,
    ),
    Backend(
        "array-api-strict", _to_strict, np.asarray, _closed_form(_to_strict, np.asarray), dtypes=("float32", "float64")
    ),
    # Samples that are spread over chunks, and samples within one.
    Backend(
        "dask",
        _to_dask,
        _from_dask,
        _closed_form(_to_dask, _from_dask),
        checked=False,
        same_alone=False,
        whole_samples=False,
    ),
    Backend(
        "dask-batch",
        _to_dask_batch,
        _from_dask,
        _closed_form(_to_dask_batch, _from_dask),
        checked=False,
        same_alone=False,
    ),
    Backend(
        "cupy",
        _to_cupy,
        _from_cupy,
        _closed_form(_to_cupy, _from_cupy),
        dtypes=("float16", "float32", "float64"),
        subnormal=False,
        **GPU_LIKE,
    ),
]


def _is_here(name: str) -> bool:
    """Whether this machine and environment can run a backend. What cannot is not collected."""
    framework = name.removesuffix("-operations").removesuffix("-batch")
    if MODULES.get(framework, np) is None:
        return False
    if name == "cuda":
        return GPU == "cuda" or (INTERPRETED and triton_kernels is not None)
    return name != "cupy" or (_optional("array_api_compat") is not None and bool(cupy.is_available()))


BACKENDS = {backend.name: backend for backend in ALL_BACKENDS if _is_here(backend.name)}


FRAMEWORKS = [name for name in ("numpy", "torch", "jax", "tensorflow", "array-api-strict") if name in BACKENDS]
DIFFERENTIATING = [name for name in ("torch", "jax", "tensorflow") if name in BACKENDS]
collect_ignore = ["test_triton.py"] if "cuda" not in BACKENDS else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, help="how many threads a call may use (default: of PyTorch, one)")
    parser.addoption("--times", metavar="FILE", help="write a CSV of how long each test took, and show the slowest")


def pytest_configure(config: pytest.Config) -> None:
    if (number := config.getoption("--threads")) is not None:
        ca.set_threads(number)
        if torch is not None:
            torch.set_num_threads(number)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write and show the seconds that every test took, with its fixtures, and every file."""
    if not (path := config.getoption("--times")):
        return
    tests, files = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                tests[report.nodeid] += report.duration
                files[report.nodeid.partition("::")[0]] += report.duration
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([("seconds", "test"), *((f"{s:.2f}", name) for name, s in tests.most_common())])
    terminalreporter.section(f"seconds by file and by test; all of them are in {path}")
    for name, seconds in (*files.most_common(15), *tests.most_common(25)):
        terminalreporter.line(f"{seconds:8.1f}  {name}")


def pytest_report_header(config: pytest.Config) -> str | None:
    if HANDS_OUT:
        return None
    missing = [backend.name for backend in ALL_BACKENDS if backend.name not in BACKENDS]
    return f"backends: {', '.join(BACKENDS)}; not here, and not collected: {', '.join(missing) or 'none'}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Forget what Numba compiled of code that has changed since."""
    if not hasattr(session.config, "workerinput") and NUMBA_CACHE.parent.is_dir():
        for old in set(NUMBA_CACHE.parent.iterdir()) - {NUMBA_CACHE}:
            shutil.rmtree(old, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """No test depends on what others have drawn before it."""
    np.random.seed(0)
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    """XLA's programs end with the module that made them: those of all tests together would take ten gigabytes."""
    yield
    if tf is not None:
        tensorflow_backend._program.cache_clear()
        gc.collect()  # functions of TensorFlow refer to themselves
    if jax is not None:
        jax.clear_caches()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)  # what was freed would stay with this process otherwise


@pytest.fixture(
    params=[
        pytest.param(b, id=name, marks=[pytest.mark.cuda] * (name in ("cuda", "cupy"))) for name, b in BACKENDS.items()
    ]
)
def be(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend: Backend = request.param
    if backend.name == "numpy-operations":
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    elif backend.name == "torch-operations":
        monkeypatch.setattr(torch_backend, "_numpy_can", lambda x: False)
    elif backend.name == "jax-operations":
        monkeypatch.setattr(jax_backend, "_at_hand", lambda *arrays: False)
    elif backend.name == "tensorflow-operations":
        monkeypatch.setattr(tensorflow_backend, "_on_host", lambda a: False)
        monkeypatch.setattr(tensorflow_backend, "_compiled", partial)
    elif backend.name == "cuda":
        request.getfixturevalue("on_gpu")
    else:
        # Kernels wherever Numba is installed, or these would test the operations twice.
        assert (numpy_backend.kernels() is None) == (_optional("numba") is None)
    return backend


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Backend:
    """A framework as its users have it."""
    return BACKENDS[request.param]


@pytest.fixture(params=DIFFERENTIATING)
def differentiable(request: pytest.FixtureRequest) -> Backend:
    """A framework that differentiates by itself."""
    return BACKENDS[request.param]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tensors of `_to_cuda` go to Triton's kernels."""
    if INTERPRETED and triton_kernels is not None:
        from triton.runtime import interpreter

        def splat(self: Any, kind: Any, a: Any) -> Any:
            return interpreter.TensorHandle(np.full(kind.shape, a.data.ravel()[0], a.data.dtype), a.dtype.scalar)

        # Its own makes integers of truth values.
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat)
        monkeypatch.setattr(torch_backend, "_numpy_can", lambda x: False)
        monkeypatch.setattr(torch_backend, "_kernels_of", lambda x: triton_kernels)
        monkeypatch.setattr(torch_backend, "values_of", lambda a: None)
    elif GPU == "cpu":
        pytest.skip("PyTorch finds no GPU, and this is not Triton's interpreter")
    else:
        assert torch_backend.gpu_kernels() is not None  # or this would test the operations twice


@pytest.fixture(autouse=True)
def _forget_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA maps memory for every program that it compiles, and Linux allows a process 65,530 maps."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in request.node.nodeid and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


# Of the parameters of one test, how many a backend takes in `make test`, and how many in all. These have NumPy's
# kernels behind them, or the algorithm's one text, which "numpy" and "numpy-operations" put through everything; or they
# compile a program or make a graph for every test.
SHARE_OF_TESTS = {
    "jax-operations": (1, 3),
    "tensorflow-operations": (1, 3),
    "dask": (1, 3),
    "dask-batch": (1, 3),
    "jax": (2, 8),
    "tensorflow": (2, 8),
    "array-api-strict": (2, 8),
}
# These do without the solver's own grid of cases in `make test`: their solver is that of "numpy" or "numpy-operations".
SHARE_A_SOLVER = ("jax", "jax-operations", "tensorflow", "tensorflow-operations", "array-api-strict")
SOLVER_TESTS = "test_values.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a backend cannot do, and mark as long what `make test` does without."""
    left_out: set[pytest.Item] = set()
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        backend = given.get("be") or BACKENDS.get(given.get("framework", given.get("differentiable", "")))
        if item.get_closest_marker("cuda") and "cuda" not in BACKENDS:
            left_out.add(item)
        elif isinstance(backend, Backend):
            needed = [name for marker in item.iter_markers("needs") for name in marker.args]
            if "dtype" in given:
                needed.append(given["dtype"])
            if not all(name in backend.dtypes if name in NUMPY_DTYPES else getattr(backend, name) for name in needed):
                left_out.add(item)
            elif backend.name in SHARE_OF_TESTS:
                groups.setdefault((item.location[0] + item.originalname, backend.name), []).append(item)  # type: ignore[attr-defined]
    for (_, name), group in groups.items():
        few, most = SHARE_OF_TESTS[name]
        if name in SHARE_A_SOLVER and Path(group[0].location[0]).name == SOLVER_TESTS:
            few = 0
        kept = _spread(group, most)
        left_out.update(set(group) - set(kept))
        for item in set(kept) - set(_spread(kept, few)):
            item.add_marker(pytest.mark.long)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _spread(group: list[pytest.Item], most: int) -> list[pytest.Item]:
    """So many of a list at most, from all over it. By an odd stride, for otherwise it is always the same dtype."""
    if most == 0 or len(group) <= most:
        return group if most else []
    stride = -(-len(group) // most) | 1
    return group[stride // 2 :: stride]
