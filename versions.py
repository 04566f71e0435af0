"""``python versions.py [NAME ...]``: try the oldest and the newest versions that the extras allow, and other Pythons.

Each environment has one extra, in the versions that are its lower bounds in pyproject.toml or in the newest there are,
and what its tests need. What was installed and what became of the tests goes to ``docs/versions.csv``, by environment,
so that some of them can be tried again.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent
RESULTS = ROOT / "docs" / "versions.csv"
FOLDER = ROOT / ".venv-versions"  # one environment at a time; what a run that was killed has left is cleared
COLUMNS = ["environment", "Python", "versions", "outcome"]
SHARED = (
    "tests/test_frameworks.py tests/test_values.py tests/test_gradients.py tests/test_edges.py tests/test_errors.py"
)
FEWER = "and not test_norm and not long_rows"  # of which there are hundreds, and which take long
TOOLS = ("hypothesis", "mpmath", "pytest", "pytest-xdist")  # in the versions of requirements-dev.txt
LATER = ("3.12", "3.13", "3.14", "3.14t")  # Pythons, beside the one that runs this; t: without the interpreter's lock


class Extra(NamedTuple):
    """What to install, and what of the tests is about it."""

    extras: str
    tests: str
    also: str = ""  # what else its tests need
    torch: bool = False  # whether PyTorch is the point; else it is what the tests themselves need


EXTRAS = {
    "numpy": Extra("", f"{SHARED} tests/test_inputs.py tests/test_rounding.py -k 'numpy {FEWER}'"),
    "numba": Extra("numba", f"{SHARED} tests/test_kernels.py -k '(numpy and not operations or kernels) {FEWER}'"),
    "torch": Extra("torch", f"{SHARED} tests/test_torch.py -k 'torch {FEWER}'", "numba", torch=True),
    "jax": Extra(
        "jax", "tests/test_frameworks.py tests/test_jax.py -k 'jax and (test_values or vmap or x64)'", "numba"
    ),
    "tensorflow": Extra(
        "tensorflow", "tests/test_frameworks.py tests/test_tensorflow.py -k 'tensorflow and not operations'", "numba"
    ),
    "array-api": Extra("array-api", f"{SHARED} tests/test_array_api.py -k 'array {FEWER}'", "array-api-strict"),
    "dask": Extra("dask", "tests/test_frameworks.py tests/test_dask.py tests/test_errors.py -k dask", "numba"),
    "foolbox": Extra("foolbox", "tests/test_foolbox.py"),
    "art": Extra("art", "tests/test_art.py"),
    "cli": Extra("cli", "tests/test_cli.py tests/test_images.py tests/test_audio.py", "numba"),
    "explorer": Extra("explorer", "tests/test_explorer.py", "playwright"),
    "training": Extra("attacks,training", "tests/test_attacks.py tests/test_adversarial_noise.py"),
}


def lower_bounds(extras: str) -> list[str]:
    """Of the package's own requirements and of those of some extras, as pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras.split(",") if extras else ():
        for requirement in project["optional-dependencies"][extra]:
            inner = re.fullmatch(r"clipaware\[(.*)\]", requirement)
            found += lower_bounds(inner[1]) if inner else [requirement]
    return list(dict.fromkeys(re.sub(r">=([\w.]+).*", r"==\1", requirement) for requirement in found))


def pinned(names: tuple[str, ...]) -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def requirements(extra: Extra, age: str, here: bool) -> list[str]:
    """What to install.

    Where PyTorch is not the point it is that of requirements-dev.txt, and other Pythons have none: not every one comes
    without CUDA.
    """
    oldest = lower_bounds(extra.extras) if age == "oldest" else []
    torch = pinned(("torch",)) if here and not extra.torch else []
    package = f"{ROOT}[{extra.extras}]" if extra.extras else str(ROOT)
    return [package, *oldest, *pinned(TOOLS), *torch, "ml_dtypes", *extra.also.split()]


def interpreter(version: str) -> str | None:
    """The command for a Python, also of pyenv."""
    found = shutil.which(f"python{version}")
    candidates = [found] if found else []
    patched = re.sub(r"(t?)$", r".*[0-9]\1", version, count=1)  # 3.14.7, or 3.14.7t
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{patched}/bin/python")))
    for command in candidates:
        if subprocess.run([command, "-c", ""], capture_output=True).returncode == 0:
            return command
    return None


def environments() -> dict[str, tuple[Extra, str, str]]:
    """By name: what to install, how old, and the Python."""
    found = {f"{name}, {age}": (extra, age, "") for name, extra in EXTRAS.items() for age in ("oldest", "newest")}
    found |= {f"Python {version}": (EXTRAS["numba"], "newest", version) for version in LATER}
    return found | {"jax, Python 3.13": (EXTRAS["jax"], "newest", "3.13")}  # whose newest the oldest Python cannot have


def tried(extra: Extra, age: str, version: str, folder: Path) -> dict[str, str]:
    """The columns of an environment that is made in this folder."""
    command = interpreter(version) if version else sys.executable
    if command is None:
        return {"Python": version, "versions": "", "outcome": "this Python could not be had"}
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([command, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    wanted = requirements(extra, age, here=not version)
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *wanted]
    done = subprocess.run(install, capture_output=True, text=True)
    shown = subprocess.run([python, "--version"], capture_output=True, text=True).stdout.split()[1]
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        print(done.stderr)
        return {"Python": shown, "versions": "", "outcome": f"cannot be installed: {errors[0]}"}
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    installed = dict(line.lower().replace("_", "-").split("==") for line in frozen.splitlines() if "==" in line)
    names = [re.split(r"[=\[]", pin.lower())[0] for pin in lower_bounds(extra.extras)]
    versions = ", ".join(f"{name} {installed[name]}" for name in names if name in installed)
    # Not in the checkout: what is installed is tested.
    for name in ("tests", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    tests = [python, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *shlex.split(extra.tests)]
    settings = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # an XLA ends at flags it does not know
    done = subprocess.run(tests, cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print("\n".join(done.stdout.splitlines()[-40:]))
    outcome = re.sub(r"\x1b\[\d*m|=", "", done.stdout.splitlines()[-1]).strip()
    outcome = re.sub(r" in .*|, \d+ deselected", "", outcome)
    if done.returncode not in (0, 1):
        outcome = f"the tests ended with {done.returncode}: {outcome}"
    return {"Python": shown, "versions": versions, "outcome": outcome}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python versions.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as jax, or 'jax, oldest'; all of them without")
    given = parser.parse_args()
    known = environments()
    rows: dict[str, dict[str, str]] = {}
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            rows = {row["environment"]: row for row in csv.DictReader(file)}
    for name, (extra, age, version) in known.items():
        if given.names and not any(name in (word, f"{word}, oldest", f"{word}, newest") for word in given.names):
            continue
        try:
            rows[name] = {"environment": name, **tried(extra, age, version, FOLDER)}
        finally:
            shutil.rmtree(FOLDER, ignore_errors=True)
        print(f"{name}: {rows[name]['versions']}: {rows[name]['outcome']}", flush=True)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[name] for name in known if name in rows)


if __name__ == "__main__":
    main()
