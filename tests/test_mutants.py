"""The list of deliberate faults, which ``make mutants`` tries, fits the code as it is."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

if not (ROOT / "src").is_dir():
    pytest.skip("here is but an installed package", allow_module_level=True)

from mutants.__main__ import CODE, REPORT, SURVIVED, changed  # noqa: E402
from mutants.faults import FAULTS, Fault  # noqa: E402


def test_there_are_enough_and_each_has_a_name():
    assert len(FAULTS) >= 154
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_they_are_all_over_the_code():
    files = {fault.file for fault in FAULTS}
    backends = {f"_backends/{path.name}" for path in (ROOT / CODE / "_backends").glob("*.py")}
    kernels = {f"_kernels/{path.name}" for path in (ROOT / CODE / "_kernels").glob("*.py")}
    others = {"_api.py", "_careful.py", "_derivatives.py", "_fast.py", "_problem.py", "_traced.py"}
    assert backends | kernels | others <= files | {"_backends/__init__.py", "_kernels/__init__.py"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_it_replaces_is_there_once(fault):
    text = (ROOT / CODE / fault.file).read_text()
    assert changed(fault, text) != text


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_tests_are_there(fault):
    files = [word for word in shlex.split(fault.tests) if word.endswith(".py")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(("before", "times"), [("here", 2), ("nowhere", 0)])
def test_a_list_that_no_longer_fits_is_refused(before, times):
    fault = Fault("some fault", "some.py", before, "there", "tests/test_values.py")
    with pytest.raises(SystemExit, match=f"some.py: .* is there {times} times, expected once"):
        changed(fault, "here = here")


def test_the_report_has_found_them_all():
    with REPORT.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["fault"], row["file"]) for row in rows] == [(fault.name, fault.file) for fault in FAULTS]
    assert [row["fault"] for row in rows if row["found by"] == SURVIVED] == []
