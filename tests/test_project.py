"""What surrounds the code: versions, the workflow, the documentation's own tools."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

import clipaware as ca

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = ("", ".noise", ".targets", ".attacks", ".distributed", ".adversarial_noise", ".foolbox", ".art")


def load(path):
    """A module that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE))


def test_version_is_from_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert importlib.metadata.version("clipaware") == ca.__version__
    for file in ("pyproject.toml", "CITATION.cff", "docs/conf.py", "README.md"):
        assert not re.search(rf"\b{re.escape(ca.__version__)}\b", (ROOT / file).read_text()), file


def test_everything_is_pinned_once():
    development, documentation = pins("requirements-dev.txt"), pins("requirements-docs.txt")
    assert len(development) > 20
    assert not development.keys() & documentation.keys()
    for name in ("requirements-dev.txt", "requirements-docs.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        assert lines == [f"{package}=={version}" for package, version in pins(name).items()]
        assert list(pins(name)) == sorted(pins(name), key=str.lower)


def test_hooks_have_the_versions_of_ci():
    found = re.findall(r"([\w-]+)==([\w.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name for name, _ in found} == {"ruff"}
    assert {version for _, version in found} == {pins("requirements-dev.txt")["ruff"]}


def workflow():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def test_the_workflow_runs_targets_of_the_makefile():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runs = [step["run"] for job in workflow().values() for step in job["steps"] if "run" in step]
    assert {run.split()[0] for run in runs} == {"make"}
    called = {run.split()[1] for run in runs}
    assert called <= set(phony.split())
    assert {"test", "test-extra", "docs", "dist"} <= called


def test_the_workflow_tries_every_python_and_extra():
    jobs = workflow()
    python = jobs["python"]["strategy"]["matrix"]["python"]
    supported = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert python == supported
    assert PROJECT["project"]["requires-python"] == f">={python[0]}"
    extras = {*jobs["extra"]["strategy"]["matrix"]["extra"], *jobs["python"]["strategy"]["matrix"]["extra"]} - {"none"}
    # CuPy needs a GPU, "all" is what `make test` has.
    assert extras == PROJECT["project"]["optional-dependencies"].keys() - {"cupy", "all"}


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_has_every_public_name(name):
    try:
        module = importlib.import_module(f"clipaware{name}")
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    page = (ROOT / "docs" / "api" / f"{name[1:] or 'core'}.md").read_text()
    listed = re.findall(r"^(?:   |.. py:data:: clipaware[\w.]*\.)(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(module.__all__)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_guide_names_what_backends_have(name):
    page = (ROOT / "docs" / "extending.md").read_text()
    named = re.findall(r"`(\w+)`", re.search(r"^1\. .*^5\. .*?;", page, re.DOTALL | re.MULTILINE)[0])
    assert len(named) > 30
    backend = importlib.import_module(f"clipaware._backends.{name}")
    texts = ("_traced", "_derivatives")
    assert [function for function in named if not hasattr(backend, function) and function not in texts] == []


CHECK = load(ROOT / "docs" / "check_pages.py")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="other.html#there">', None),
        ('<a href="#here">', None),
        ('<a href="sub/">', None),
        ('<a href="https://example.org/nowhere">', None),
        ('<img src="data:image/png;base64,AAAA">', None),
        ('<a href="missing.html">', "missing.html does not exist"),
        ('<a href="other.html#elsewhere">', "other.html#elsewhere has no such anchor"),
        ('<a href="#nowhere">', "#nowhere has no such anchor"),
        ('<img src="missing.png">', "missing.png does not exist"),
        ('<script src="https://example.org/script.js"></script>', "fetches https://example.org/script.js"),
        ('<link rel="stylesheet" href="//example.org/style.css">', "fetches //example.org/style.css"),
    ],
)
def test_pages_are_looked_through(tmp_path, body, fault):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(f'<p id="here">{body}')
    (tmp_path / "other.html").write_text('<p id="there">')
    wrong, elsewhere = CHECK.faults(tmp_path)
    assert wrong == ([] if fault is None else [f"index.html: {fault}"])
    assert len(elsewhere) == ("example.org" in body)


def test_no_pages_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_pages.py", str(tmp_path)])
    assert CHECK.main() == 1


@pytest.fixture(scope="module")
def measured():
    for needed in ("docutils", "sphinx"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    return load(ROOT / "docs" / "_ext" / "measured.py")


LINES = [
    {"variant": variant, "rows": "64", "n": n, "quantity": "time", "value": value}
    for variant, n, value in (("ours", "784", "0.01234"), ("ours", "3072", "1234.5"), ("theirs", "3072", "2"))
]


def test_a_table_of_measurements(measured):
    lines = measured.selected(LINES, "quantity=time; variant=theirs|ours")
    assert measured.table(lines, {"rows": "rows, n", "columns": "variant", "names": "theirs=other"}) == [
        "| rows x elements | other | ours |",
        "|---|--:|--:|",
        "| 64 x 3,072 | 2 | 1,234 |",
        "| 64 x 784 |  | 0.0123 |",
    ]


@pytest.mark.parametrize("only", ["variant=nobody", "quantity=time; n=785"])
def test_a_table_of_nothing_is_an_error(measured, only):
    with pytest.raises(ValueError, match="nothing has"):
        measured.selected(LINES, only)


def test_two_values_for_one_cell_are_an_error(measured):
    with pytest.raises(ValueError, match="two values for time, ours"):
        measured.table(LINES, {"rows": "quantity", "columns": "variant"})


def every_test_function():
    """The functions of all test files, by their ids without parameters."""
    return {
        f"tests/{path.name}::{node.name}": node
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


def test_what_covers_each_test_that_make_test_leaves_out():
    with (ROOT / "tests" / "tiers.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    tests, leaves_out = every_test_function(), re.compile(r"in_test_all|mark\.long|cases\(|BOTH_LATER")
    marked = {
        name for name, node in tests.items() if any(leaves_out.search(ast.unparse(d)) for d in node.decorator_list)
    }
    assert {test for test, change, _ in rows if test in tests and change != "merged"} == marked
    for test, change, covered_by in rows:
        assert change in ("moved", "partly moved", "merged"), test
        assert covered_by in tests or covered_by.startswith(("the same test", "the doctests of make test")), covered_by
        if change == "moved":
            assert not covered_by.startswith("the same test"), test
