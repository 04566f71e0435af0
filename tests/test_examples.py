"""The attack study, on pictures of stripes, and what is left of it after Ctrl-C; training on several devices."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

for needed in ("foolbox", "matplotlib", "tqdm", "PIL"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

FILE = Path(__file__).parent.parent / "examples" / "attack_study.py"


@pytest.fixture
def study(monkeypatch):
    spec = importlib.util.spec_from_file_location("attack_study", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"noise": {1: (30,), 2: (3, 6), math.inf: (0.3,)}, "fast gradient": {1: (3,), 2: (0.5,)}}
    sizes["projected gradient"] = {2: (0.5,)}
    monkeypatch.setitem(module.SIZES, "fashion-mnist", sizes)
    return module


@pytest.fixture
def folder(tmp_path):
    """Files as Fashion-MNIST has them: wide or narrow stripes."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 1500), ("t10k", 60)):
        labels = rng.integers(0, 2, count)
        columns = (np.arange(28) // np.where(labels, 4, 2)[:, None]) % 2
        pictures = np.clip(rng.normal(columns[:, None] * 160 + 30, 60, (count, 28, 28)), 0, 255)
        for kind, a in ((f"{name}-images-idx3", pictures), (f"{name}-labels-idx1", labels)):
            header = bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">i4").tobytes()
            (tmp_path / f"{kind}-ubyte.gz").write_bytes(gzip.compress(header + a.astype(np.uint8).tobytes()))
    return tmp_path


def run(study, folder, monkeypatch):
    out = folder / "out"
    arguments = ["--study", "fashion-mnist", "--fashion-mnist", str(folder), "--samples", "50", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["attack_study.py", *arguments, "--gradients", "30", "--projected", "20"])
    code = study.main()
    with (out / "results.csv").open(newline="") as file:
        return code, out, list(csv.DictReader(file))


@pytest.mark.long
def test_study(study, folder, monkeypatch, capsys):
    code, out, rows = run(study, folder, monkeypatch)
    assert code == 0
    assert [(row["attack"], row["samples"]) for row in rows] == [
        *[("noise", "50")] * 4,
        *[("fast gradient", "30")] * 2,
        ("projected gradient", "20"),
    ]
    for row in rows:
        eps, naive, exact = (float(row[key]) for key in ("eps", "naive_norm", "exact_norm"))
        assert exact == pytest.approx(eps, rel=1e-6)
        assert naive <= eps * (1 + 1e-6)
        assert int(row["exact"]) - int(row["naive"]) == int(row["only_exact"]) - int(row["only_naive"])
    assert "| noise | 2 | 6 | 50 |" in (out / "tables.md").read_text()
    for figure in ("fashion-mnist.png", "fashion-mnist-success.png", "fashion-mnist-delivered.png"):
        assert (out / figure).stat().st_size > 5000


def test_what_was_done_is_left(study, folder, monkeypatch, capsys):
    compared, calls = study.compared, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compared(*arguments)

    monkeypatch.setattr(study, "compared", interrupted)
    code, out, rows = run(study, folder, monkeypatch)
    assert code == 130
    assert [float(row["eps"]) for row in rows] == [30, 3]
    assert f"What was done is in {out / 'results.csv'}" in capsys.readouterr().err


def test_intervals(study):
    assert study.interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # Wilson's, as tabulated
    assert study.interval(0, 10)[0] == pytest.approx(0, abs=1e-12)
    more, half = study.gain({"samples": 100, "only_exact": 10, "only_naive": 4})
    assert more == pytest.approx(0.06)
    assert half == pytest.approx(1.96 * math.sqrt(0.14 - 0.06**2) / 10)


def test_tables_are_as_in_the_csv(study):
    with (FILE.parent / "results" / "attack_study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for key in set(row) - {"study", "attack"}:
            whole = key in ("samples", "naive", "exact", "only_naive", "only_exact")
            row[key] = int(row[key]) if whole else float(row[key])
    page = (FILE.parent.parent / "docs" / "attacks.md").read_text()
    for name in study.SIZES:
        assert study.table(name, rows) in page
    # What the page says of them: the exact attack is no worse wherever something was lost.
    for row in rows:
        if row["naive_norm"] < 0.97 * row["eps"]:
            assert row["exact"] > row["naive"]
        assert row["exact_norm"] == pytest.approx(row["eps"], rel=1e-6)


@pytest.mark.long
def test_torch_distributed():
    pytest.importorskip("torch.distributed.tensor", reason="this PyTorch has no DTensor")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(FILE.with_name("torch_distributed.py")), "--features", "5000", "--steps", "3", "--eps", "5"]
    done = subprocess.run([*launch, *script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"loss (\S+), norms off by (\S+), (\d+) collectives", done.stdout)
    assert len(steps) == 3
    assert float(steps[-1][0]) < float(steps[0][0])
    for _, off, collectives in steps:
        assert float(off) < 3e-7
        assert int(collectives) <= 5


@pytest.mark.long
def test_eight_devices():
    pytest.importorskip("jax", reason="JAX is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, FILE.parent / "jax_sharded.py"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run.stdout)]
    assert losses[-1] < losses[0] / 10
    assert "norms of the noise: 12.00000" in run.stdout
    assert "to 12.00000" in run.stdout
    assert "is split like the samples: True" in run.stdout
    assert int(re.search(r"receives (\d+) numbers", run.stdout)[1]) < 8192 / 3
