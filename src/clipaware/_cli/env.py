"""Versions, and what computes on which arrays. Of the frameworks it reads metadata only, and imports none."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform

import numpy as np

import clipaware as ca
from clipaware._kernels import threads

# Modules that clipaware can work with, and the distribution that usually brings each.
OPTIONAL = {
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow",
    "cupy": "cupy",
    "dask": "dask",
    "numba": "numba",
    "ml_dtypes": "ml_dtypes",
    "foolbox": "foolbox",
    "matplotlib": "matplotlib",
    "PIL": "pillow",
    "tifffile": "tifffile",
    "soundfile": "soundfile",
    "gradio": "gradio",
}


def report(as_json: bool = False) -> None:
    """Print what there is."""
    versions = {"clipaware": ca.__version__, "Python": platform.python_version(), "NumPy": np.__version__}
    found = installed()
    versions |= {OPTIONAL[module]: found.get(module, "not installed") for module in OPTIONAL}
    if as_json:
        print(json.dumps({"versions": versions, "kernels": kernels(found)}))
        return
    _print_pairs(versions)
    print("\nKernels in use:")
    _print_pairs(kernels(found))


def installed() -> dict[str, str]:
    """Versions by module, since some come in distributions of several names (tensorflow-cpu, cupy-cuda12x)."""
    distributions = importlib.metadata.packages_distributions()
    found = {}
    for module, usual in OPTIONAL.items():
        names = {name.lower().replace("-", "_"): name for name in distributions.get(module, ())}
        if names:
            name = names.get(usual) or min(names.values())
            version = importlib.metadata.version(name)
            found[module] = version if usual in names else f"{version} ({name})"
    return found


def kernels(installed: dict[str, str]) -> dict[str, str]:
    """What computes on each kind of array, and why that."""
    try:
        importlib.import_module("clipaware._kernels.numba")
        cpu = f"compiled by Numba, on up to {threads.count()} thread(s)"
    except ImportError as error:
        found = installed.get("numba")
        why = f"Numba {found} does not work here: {error}" if found else "Numba is not installed: pip install numba"
        cpu = f"NumPy operations ({why})"
    absent = "none (torch is not installed)"
    compiles = "torch" in installed and importlib.util.find_spec("triton") is not None
    gpu = "compiled by Triton" if compiles else "PyTorch operations (Triton is not installed: pip install triton)"
    cupy = "compiled by Triton, by way of PyTorch" if compiles else "CuPy operations (PyTorch with Triton has kernels)"
    return {
        "NumPy arrays": cpu,
        "PyTorch tensors, CPU": cpu if "torch" in installed else absent,
        "PyTorch tensors, CUDA": gpu if "torch" in installed else absent,
        "PyTorch tensors, else": "PyTorch operations" if "torch" in installed else absent,
        "Dask arrays": f"on their chunks {cpu}" if "dask" in installed else "none (dask is not installed)",
        "CuPy arrays": cupy if "cupy" in installed else "none (cupy is not installed)",
    }


def _print_pairs(pairs: dict[str, str]) -> None:
    width = max(map(len, pairs))
    for name, value in pairs.items():
        print(f"  {name.ljust(width)}  {value}")
