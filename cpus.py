"""``python cpus.py [WORD ...]``: run the numeric tests as other CPUs would compute, and with other numbers of threads.

Numba, NumPy, PyTorch and XLA choose instructions by the CPU that they find, and the order in which a sum is added up
follows from that. Each can be told to take those of another CPU, as far as this machine has them. Rows whose name has
one of the words are run, or all of them. Exits with 1 if any test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent
FILES = [
    f"tests/test_{name}.py"
    for name in ("values", "frameworks", "edges", "rounding", "gradients", "inputs", "quantize", "properties")
]
KERNELS = ["tests/test_kernels.py", "tests/test_trust.py", "tests/test_array_api.py"]
FUZZER = ["tests/test_torture.py"]
AVX512 = ("avx512f", "avx512vl", "avx512bw", "avx512dq")


class Row(NamedTuple):
    """A CPU to be taken for, and the tests that depend on it."""

    name: str
    settings: dict[str, str]
    needs: tuple[str, ...]  # flags that the CPU of this machine must have
    arguments: list[str]


def _numba(cpu: str, *needs: str) -> Row:
    settings = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}  # empty: the features of that CPU and no others
    chosen = "(numpy or torch or kernels or corpus) and not operations and not jax and not tensorflow and not dask"
    return Row(f"Numba {cpu}", settings, needs, [*FILES, *KERNELS, *FUZZER, "-k", chosen])


def _features_of_numpy() -> str:
    """All that NumPy chooses by the CPU, and this one has."""
    umath: Any = import_module("numpy._core._multiarray_umath")
    return " ".join(name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name))


def rows() -> list[Row]:
    operations = [*FILES, *FUZZER, "-k", "numpy-operations or strict or numpy or properties"]
    torch = [*FILES, "tests/test_torch.py", *FUZZER, "-k", "torch-operations or test_torch"]
    jax = [*FILES, "tests/test_jax.py", *FUZZER, "-k", "jax-operations or test_jax"]
    whole = [*FILES, *KERNELS, *FUZZER, "-k", "numpy or torch or kernels"]
    return [
        _numba("x86-64"),
        _numba("haswell", "avx2", "fma"),
        _numba("znver4", *AVX512),
        _numba("sapphirerapids", *AVX512),
        Row("NumPy without dispatch", {"NPY_DISABLE_CPU_FEATURES": _features_of_numpy()}, (), operations),
        Row("PyTorch default", {"ATEN_CPU_CAPABILITY": "default"}, (), torch),
        Row("PyTorch avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, ("avx2",), torch),
        Row("XLA AVX2", {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}, ("avx2",), jax),
        *(Row(f"{number} threads", {}, (), [*whole, "--threads", str(number)]) for number in (1, 2, 7)),
    ]


def main() -> None:
    words = sys.argv[1:]
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    failed = 0
    for row in rows():
        if words and not any(word in row.name for word in words):
            continue
        missing = [flag for flag in row.needs if flag not in flags]
        if missing:
            print(f"{row.name}: not tried, this CPU has no {', '.join(missing)}", flush=True)
            continue
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not long"]
        run = subprocess.run(
            [*command, *row.arguments], cwd=ROOT, env=os.environ | row.settings, capture_output=True, text=True
        )
        said = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        summary = [line for line in run.stdout.splitlines() if " passed" in line or " failed" in line]
        print(f"{row.name}: {summary[-1] if summary else run.stdout + run.stderr}", flush=True)
        for line in said:
            print(f"    {line}", flush=True)
        print(f"    {time.monotonic() - start:.0f} s", flush=True)
        failed += run.returncode != 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
