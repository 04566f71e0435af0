"""The README's Python runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from clipaware._kernels import threads

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


BLOCKS = blocks(README)


def test_there_is_one_for_numpy_and_one_for_torch():
    assert [("numpy" in block, "torch" in block) for block in BLOCKS] == [(True, False), (False, True)]


def test_numpy(capsys):
    names: dict = {}
    exec(BLOCKS[0], names)
    printed = capsys.readouterr().out.splitlines()
    assert f"# {printed[0]}" in BLOCKS[0]
    assert printed[1].split()[:4] == ["sample", "eps", "eta", "norm"]
    assert abs(names["w"] - names["x"]).max() == pytest.approx(8 / 255, rel=1e-14)


def test_torch():
    names: dict = {}
    torch._dynamo.reset()
    exec(BLOCKS[1], names)
    moved = torch.linalg.vector_norm((names["v"] - names["x"]).flatten(1).double(), dim=1)
    np.testing.assert_allclose(moved.detach(), 5.0, rtol=3e-7)
    assert names["delta"].grad.abs().sum() > 0


def test_table_is_as_printed():
    assert (ROOT / "benchmarks" / "results" / "table.md").read_text() in README.read_text()


def test_speed_page():
    first, then = blocks(ROOT / "docs" / "speed.md")
    names: dict = {}
    exec(first, names)
    assert names["x"].dtype == np.float32
    before = threads.count()
    one, again = then.splitlines()
    exec(one, names)
    assert threads.count() == 1
    exec(again, names)
    assert threads.count() == before
