"""The command line, run in this process except where the modules that it imports are the question."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import clipaware as ca
from clipaware import cli

FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy", "dask", "numba", "ml_dtypes", "foolbox", "matplotlib", "PIL")


def demo_rows(printed: str) -> list[dict[str, str]]:
    """The table of `clipaware demo`, a dictionary per row."""
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["p", "asked"])
    names = ("p", "asked", "naive", "exact", "naive error", "exact error", "clipped", "reachable")
    rows = []
    for line in lines[start + 1 :]:
        if not line:
            break
        rows.append(dict(zip(names, line.split(), strict=True)))
    return rows


def assert_one_line_error(captured: str, *parts: str) -> None:
    assert captured.startswith("clipaware: error: ")
    assert captured.count("\n") == 1
    for part in parts:
        assert part in captured


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the demo wrote, and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by it"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["demo", "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_demo_writes_one_png(demo: tuple[Path, str]) -> None:
    from PIL import Image

    out, printed = demo
    assert [path.name for path in out.iterdir()] == ["demo.png"]
    assert str(out / "demo.png") in printed.splitlines()[-1]
    with Image.open(out / "demo.png") as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert image.height > 500
        levels = np.asarray(image.convert("L"))
    assert levels.std() > 30  # a picture, not an empty page


def test_demo_table(demo: tuple[Path, str]) -> None:
    rows = demo_rows(demo[1])
    assert {row["p"] for row in rows} == {"1", "2", "inf"}
    assert len(rows) == sum(map(len, cli.SIZES.values()))
    reachable = [row for row in rows if row["reachable"] == "yes"]
    assert len(reachable) == len(rows) - 1
    for row in reachable:
        assert float(row["exact"]) == pytest.approx(float(row["asked"]), rel=1e-5)
        assert float(row["exact error"].rstrip("%")) == pytest.approx(0, abs=1e-3)
    for row in rows:
        asked, naive, exact = (float(row[name]) for name in ("asked", "naive", "exact"))
        # In the largest norm naive scaling loses nothing where the largest noise has room.
        assert naive < exact * (1 - 1e-3) or (row["p"] == "inf" and naive <= exact)
        assert float(row["naive error"].rstrip("%")) == pytest.approx(100 * (naive / asked - 1), abs=1e-3)
    (short,) = (row for row in rows if row["reachable"] == "no")
    assert short["clipped"] == "100.0%"
    assert float(short["exact"]) < float(short["asked"])


def test_demo_table_agrees_with_numpy(demo: tuple[Path, str]) -> None:
    x = cli._photograph()
    noise = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    for row in demo_rows(demo[1]):
        p, asked = float(row["p"]), float(row["asked"])
        wide, direction = x.astype(np.float64).ravel(), noise.astype(np.float64).ravel()
        naive = np.clip(wide + asked / np.linalg.norm(direction, p) * direction, 0, 1)
        assert float(row["naive"]) == pytest.approx(np.linalg.norm(naive - wide, p), rel=1e-5)
        v = ca.perturb(x, noise, asked, p=p, axis=None).astype(np.float64).ravel()
        assert float(row["exact"]) == pytest.approx(np.linalg.norm(v - wide, p), rel=1e-5)


def test_photograph_has_bright_and_dark_areas() -> None:
    x = cli._photograph()
    assert x.dtype == np.float32
    assert x.shape == (256, 384, 3)
    assert x.min() >= 0
    assert x.max() <= 1
    assert np.mean(x < 0.1) > 0.1
    assert np.mean(x > 0.9) > 0.03


def test_seed_changes_the_noise(demo: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--out", str(tmp_path), "--seed", "1"]) == 0
    first, second = demo_rows(demo[1])[2], demo_rows(capsys.readouterr().out)[2]
    assert first["asked"] == second["asked"]
    assert first["naive"] != second["naive"]


@pytest.mark.parametrize("seed", ["-1", "1.5", "x"])
def test_bad_seed(seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--out", str(tmp_path), f"--seed={seed}"])
    assert stopped.value.code == 2
    assert f"--seed: expected a whole number of 0 or more, got '{seed}'" in capsys.readouterr().err


def test_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        assert cli.main(["demo", "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert_one_line_error(captured.err, str(out))
        assert captured.out == ""
    assert taken.read_text() == "mine"


def test_figure_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.png").mkdir()
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert_one_line_error(capsys.readouterr().err, str(tmp_path / "demo.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


def test_failed_write_keeps_the_old_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demo.png"
    path.write_bytes(b"old")

    def full_disk(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(cli.CommandError, match="No space left on device"):
        cli._write(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["demo.png"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("module", ["matplotlib.figure", "PIL"])
def test_missing_module_is_named(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "out"
    assert cli.main(["demo", "--out", str(out)]) == 2
    name = {"matplotlib.figure": "Matplotlib", "PIL": "Pillow"}[module]
    assert_one_line_error(capsys.readouterr().err, name, "pip install 'clipaware[cli]'")
    assert not out.exists()


def test_env_imports_no_framework() -> None:
    code = f"""
import sys
from clipaware.cli import main
code = main(["env"])
print("imported:", *[name for name in {FRAMEWORKS!r} if name in sys.modules])
sys.exit(code)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, imported = ran.stdout.splitlines()
    assert imported == "imported: numba"  # which says whether its kernels work
    shown = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert ["clipaware", ca.__version__] in shown
    assert ["NumPy", np.__version__] in shown
    assert ["matplotlib", importlib.metadata.version("matplotlib")] in shown
    assert {"pillow" if name == "PIL" else name for name in FRAMEWORKS} <= {name for name, _ in shown}
    assert any(name == "NumPy" and "compiled by Numba, on up to" in value for name, value in shown)


@pytest.mark.parametrize("installed", [True, False])
def test_env_says_why_there_are_no_kernels(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("clipaware._kernels.numba", "clipaware._kernels.compiled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    if not installed:
        monkeypatch.setattr(cli, "_installed", dict)
    assert cli.main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "NumPy operations (Numba" in printed
    assert ("does not work here: import of numba" in printed) == installed
    assert ("pip install numba" in printed) != installed


def test_env_names_unusual_distributions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions",
        lambda: {"tensorflow": ["tensorflow-cpu"], "PIL": ["Pillow"], "ml_dtypes": ["ml-dtypes"]},
    )
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"9.{len(name)}")
    assert cli.main(["env"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert ["tensorflow", "9.14 (tensorflow-cpu)"] in lines
    assert ["pillow", "9.6"] in lines
    assert ["ml_dtypes", "9.9"] in lines
    assert ["torch", "not installed"] in lines
    assert ["PyTorch", "tensors, CPU   none (torch is not installed)"] in lines


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"clipaware {ca.__version__}\n"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: clipaware")
    assert "demo" in printed
    assert "env" in printed
