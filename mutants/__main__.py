"""``python -m mutants [WORD ...]``: put faults into a copy of the code, one at a time, for the tests to find.

With words, only the faults whose name or file has one of them. What has found each is in ``mutants/report.csv``, by
fault and with the make target that runs the test, so that some of them can be tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent
CODE = Path("src", "clipaware")
REPORT = ROOT / "mutants" / "report.csv"
SURVIVED = "nothing: it survived"
COPIED = ("src", "tests", "torture", "pyproject.toml")
HEAVY = ("dask", "jax", "tensorflow")  # imported only for tests that name them
# What Numba compiles, and what it takes constants from: its cache would not notice a change there.
COMPILED = (
    *(f"_kernels/{name}.py" for name in ("backward", "careful", "fast", "formats", "grid", "loops", "parts", "sweeps")),
    "_careful.py",
    "_fast.py",
    "_problem.py",
)
# In the process that runs the tests. It must be the copy that is tested.
RUN = """
import pathlib, sys, pytest
class Hidden:
    def find_spec(self, name, *_):
        if name in {hidden!r}:
            raise ModuleNotFoundError(f"{{name}} is hidden", name=name)
sys.meta_path.insert(0, Hidden())
import clipaware
assert pathlib.Path(clipaware.__file__).is_relative_to({copy!r}), clipaware.__file__
sys.exit(pytest.main({arguments!r}))
"""


class Outcome(NamedTuple):
    """What became of some tests."""

    code: int | None  # pytest's, None if they took too long
    failed: str  # the first test that failed
    passed: int
    output: str


class Copy:
    """A copy of the code and its tests, in a folder of its own."""

    def __init__(self, folder: Path, triton: str, limit: float) -> None:
        self.folder, self.triton, self.limit = folder, triton, limit
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)

    def tests(self, arguments: list[str], triton: bool, hidden: list[str], fresh: bool, limit: float | None) -> Outcome:
        """Run them; `fresh` if nothing that was compiled before may be used. Under a limit, until the first fails."""
        cache = Path(tempfile.mkdtemp(dir=self.folder)) if fresh else self.folder / "compiled"
        options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *(["-x"] if limit else [])]
        code = RUN.format(hidden=hidden, copy=str(self.folder), arguments=[*options, *arguments])
        paths = {"PYTHONPATH": str(self.folder / "src"), "NUMBA_CACHE_DIR": str(cache)}
        settings = {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # seconds, for what no test uses
            "TRITON_INTERPRET": "1" if triton else "0",
        }
        process = subprocess.Popen(
            [self.triton if triton else sys.executable, "-c", code],
            cwd=self.folder,
            env=os.environ | paths | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Outcome(None, "", 0, output)
        finally:
            if fresh:
                shutil.rmtree(cache, ignore_errors=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
        passed = re.findall(r"(\d+) passed", output)
        return Outcome(process.returncode, failed[0] if failed else "", int(passed[-1]) if passed else 0, output)

    def with_fault(self, fault: Fault) -> Outcome:
        file = self.folder / CODE / fault.file
        text = file.read_text()
        file.write_text(changed(fault, text))
        try:
            return self.of(fault, fault.file in COMPILED)
        finally:
            file.write_text(text)

    def of(self, fault: Fault, fresh: bool) -> Outcome:
        """The tests of a fault."""
        hidden = [name for name in HEAVY if name not in fault.tests]
        chosen = ["-m", "long" if fault.long else "not long", *shlex.split(fault.tests)]
        return self.tests(chosen, fault.triton, hidden, fresh, self.limit)


def changed(fault: Fault, text: str) -> str:
    """The text of its file, with the fault."""
    found = text.count(fault.before)
    if found != 1:
        raise SystemExit(f"{fault.file}: what {fault.name!r} replaces is there {found} times, expected once")
    text = text.replace(fault.before, fault.after)
    compile(text, fault.file, "exec")
    return text


def verdict(fault: Fault, outcome: Outcome, copy: Copy) -> str:
    """What has found the fault."""
    if outcome.failed:
        return outcome.failed
    if outcome.code is not None and outcome.code >= 0:
        if not outcome.passed:
            print(f"no tests were run for {fault.name!r}:\n{outcome.output}")
        return SURVIVED
    # There is no test to be tried without the fault: all of them, then.
    without = copy.of(fault, False)
    if without.code != 0:
        raise SystemExit(f"{fault.name}: its tests fail without it\n{without.output}")
    return f"timeout after {copy.limit:.0f} s" if outcome.code is None else f"the process ended with {outcome.code}"


def check(found: dict[str, str], copy: Copy) -> None:
    """Every test that has found a fault passes without it."""
    for triton in (False, True):
        names = sorted({found[f.name] for f in FAULTS if f.triton == triton and "::" in found.get(f.name, "")})
        if names:
            outcome = copy.tests(names, triton, [], fresh=False, limit=None)
            if outcome.code != 0 or outcome.passed != len(names):
                raise SystemExit(f"tests that have found a fault fail without it\n{outcome.output}")


def report() -> dict[str, str]:
    """What has found the faults before, by name."""
    if not REPORT.exists():
        return {}
    with REPORT.open(newline="") as file:
        return {row["fault"]: row["found by"] for row in csv.DictReader(file)}


def save(found: dict[str, str]) -> None:
    with REPORT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["fault", "file", "run by", "found by"])
        writer.writerows((f.name, f.file, target(f), found[f.name]) for f in FAULTS if f.name in found)


def target(fault: Fault) -> str:
    """The make target whose tests are to find it."""
    return "make test-all" if fault.long else "make test"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    triton = str(ROOT / ".venv-triton" / "bin" / "python")
    parser.add_argument("--triton", default=triton, help="the Python that has Triton (default: of .venv-triton)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of a fault (default: 300)")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at the same time (default: 2)")
    given = parser.parse_args()
    chosen = [f for f in FAULTS if not given.words or any(word in f"{f.name} {f.file}" for word in given.words)]
    for fault in chosen:
        changed(fault, (ROOT / CODE / fault.file).read_text())
    found = report()
    with contextlib.ExitStack() as folders, ThreadPoolExecutor(given.jobs) as workers:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for _ in range(given.jobs):
            folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
            copies.put(Copy(Path(folder).resolve(), given.triton, given.limit))

        def tried(fault: Fault) -> tuple[Fault, str]:
            copy = copies.get()
            try:
                return fault, verdict(fault, copy.with_fault(fault), copy)
            finally:
                copies.put(copy)

        for number, future in enumerate(as_completed([workers.submit(tried, fault) for fault in chosen]), 1):
            fault, how = future.result()
            found[fault.name] = how
            print(f"{number:3}/{len(chosen)}  {fault.file:22} {fault.name}: {how}", flush=True)
            save(found)
        check({fault.name: found[fault.name] for fault in chosen}, copies.get())
    survived = sum(found[fault.name] == SURVIVED for fault in chosen)
    print(f"{len(chosen) - survived} of {len(chosen)} faults were found")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
