"""The Python of the README and of the documentation runs, and prints what it says."""

from __future__ import annotations

import importlib.resources
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from clipaware import cli
from clipaware._kernels import threads

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


BLOCKS = blocks(README)


def test_there_is_one_for_each_framework():
    assert [block.split()[1] for block in BLOCKS] == ["numpy", "torch", "jax", "tensorflow"]


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


def test_jax():
    pytest.importorskip("jax", reason="JAX is not installed")
    names: dict = {}
    exec(BLOCKS[2], names)
    before = names["delta"]
    names["loss"], names["delta"] = names["step"](names["x"], before, 6.0)
    assert names["loss"] > 0
    assert abs(names["delta"] - before).max() > 0


def test_tensorflow():
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    names: dict = {}
    exec(BLOCKS[3], names)
    for x, v in zip(names["images"], names["noisy"], strict=True):
        # Another epoch, another noise; the norm is the same.
        assert v.shape == x.shape
        np.testing.assert_allclose(np.linalg.norm((v - x).numpy().reshape(16, -1), axis=1), 5.0, rtol=1e-6)


JAX, KERAS, ARRAY_API, EAGERPY = blocks(ROOT / "docs" / "frameworks.md")


@pytest.mark.long
def test_jax_training_step():
    pytest.importorskip("jax", reason="JAX is not installed")
    names: dict = {}
    exec(JAX, names)
    assert names["step"]._cache_size() <= 2  # eps as a number and as an array
    assert names["value"] < 0.69  # it has learned something
    moved = np.linalg.norm(names["v"] - names["x"], axis=1)
    np.testing.assert_allclose(moved, 0.2, rtol=1e-6)
    assert names["curvature"].shape == (64, 64)


@pytest.mark.long
def test_keras_layer():
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    names: dict = {}
    exec(KERAS, names)
    x = names["x"].numpy()
    assert sum(len(v) for v in names["noisy"]) == 64
    for v in (names["v"], names["model"].layers[0](names["x"], training=True)):
        np.testing.assert_allclose(np.linalg.norm((v.numpy() - x).reshape(64, -1), axis=1), 1.5, rtol=1e-6)
    assert names["model"].layers[0](names["x"]) is names["x"]


def test_array_api():
    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    names: dict = {}
    exec(ARRAY_API, names)
    assert names["xp"].isdtype(names["v"].dtype, "real floating")
    np.testing.assert_array_equal(np.asarray(names["x_bar"]), [[1, 1, 0]])


def test_eagerpy():
    pytest.importorskip("eagerpy", reason="EagerPy is not installed")
    names: dict = {}
    exec(EAGERPY, names)
    moved = (names["v"] - names["x"]).norms.l2(axis=1)
    assert isinstance(moved, names["ep"].Tensor)
    np.testing.assert_allclose(moved.numpy(), 0.6)


def test_noise_page():
    first, module, layer = blocks(ROOT / "docs" / "noise.md")
    names: dict = {}
    exec(first, names)
    x = names["x"].reshape(8, -1).astype(float)
    np.testing.assert_allclose(np.linalg.norm(names["v"].reshape(8, -1) - x, axis=1), 5.0, rtol=3e-7)
    sizes = np.linalg.norm(names["w"].reshape(8, -1) - x, axis=1)
    assert 1 <= sizes.min() < sizes.max() <= 5
    exec(module, names)
    assert names["picture"].shape == (3, 32, 32)
    assert names["model"](torch.rand(4, 3, 32, 32)).shape == (4, 10)
    pytest.importorskip("keras", reason="Keras is not installed")
    exec(layer, names)
    assert names["model"](np.zeros((4, 32, 32, 3), np.float32)).shape == (4, 10)


@pytest.mark.long
def test_attacks_page(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    first, plot, foolbox, art = blocks(ROOT / "docs" / "attacks.md")
    names: dict = {}
    torch.manual_seed(0)  # a model without any training, of which some take more noise than others
    exec(first, names)
    assert (names["found"].norms <= 0.5).all()
    assert 0 < names["robustness"].median < 20
    exec(plot, names)
    assert (tmp_path / "robustness.png").stat().st_size > 1000
    pytest.importorskip("foolbox", reason="Foolbox is not installed")
    exec(foolbox, names)
    assert names["success"].shape == (3, 16)
    pytest.importorskip("art", reason="the Adversarial Robustness Toolbox is not installed")
    exec(art, names)
    assert abs(names["v"] - names["x"]).max() <= 0.1


@pytest.mark.long
def test_adversarial_noise_page(tmp_path, monkeypatch):
    pytest.importorskip("scipy", reason="SciPy is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (block,) = blocks(ROOT / "docs" / "adversarial_noise.md")
    names: dict = {}
    exec(block, names)
    moved = torch.linalg.vector_norm((names["v"] - names["x"]).flatten(1).double(), dim=1)
    np.testing.assert_allclose(moved.detach(), 4.0, rtol=1e-6)
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert len(names["done"].history) == 3
    assert len(names["found"].accuracy) == 10


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to be in with what the commands of the documentation speak of."""
    for needed in ("matplotlib", "PIL", "rich", "soundfile", "tifffile", "typer"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    import soundfile
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    with importlib.resources.as_file(importlib.resources.files("clipaware") / "data" / "coffee.jpg") as photo:
        Image.open(photo).save("photo.png")
    t = np.arange(8000) / 8000
    soundfile.write("speech.wav", 0.9 * np.sin(2 * np.pi * 200 * t) * np.sin(2 * np.pi * 3 * t), 8000)
    soundfile.write("babble.wav", np.random.default_rng(0).uniform(-0.5, 0.5, 8000), 8000)


def commands(path):
    """The lines that call clipaware, in blocks of code of either kind."""
    return re.findall(r"^(?:    )?clipaware (.*?)(?:  +#.*)?$", path.read_text(), re.MULTILINE)


def test_command_line_of_the_readme(files, capsys):
    first, second = commands(README)
    assert cli.main(shlex.split(first)) == 0
    for line in capsys.readouterr().out.splitlines()[:4]:
        assert line in README.read_text()
        assert line in (ROOT / "docs" / "command_line.md").read_text()
    assert cli.main(shlex.split(second)) == 0
    assert capsys.readouterr().out.count("identical") == 3


def test_command_line_page(files, capsys):
    page = ROOT / "docs" / "command_line.md"
    lines = commands(page)
    assert {line.split()[0] for line in lines} == {"perturb", "replay", "measure", "sweep"}
    for line in lines:
        assert cli.main(shlex.split(line)) == 0, line
    capsys.readouterr()
    (block,) = blocks(page)
    names: dict = {}
    exec(block, names)
    assert f"# {capsys.readouterr().out.strip()}" in block
    noise = names["mixed"] - np.rint(names["sound"] * 2**15) / 2**15
    assert 10 * np.log10(np.sum(names["sound"] ** 2) / np.sum(noise**2)) == pytest.approx(6, abs=1e-4)
    x = names["x"].astype(float).reshape(4, -1)
    moved = names["w"].reshape(4, -1) - x
    np.testing.assert_allclose(np.sqrt(np.mean(moved**2, axis=1)) / x.mean(axis=1), 0.1, rtol=1e-5)


PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]


def has_no_test_of_its_own(page):
    """Whether no test reads the page by its name: then its code is run as it stands."""
    return not any(f'"{page.name}"' in test.read_text() for test in Path(__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and has_no_test_of_its_own(page)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
@pytest.mark.long
def test_page(page, capsys, tmp_path, monkeypatch):
    """Its blocks run one after another; what they print is on the page, what it says that they print is printed."""
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    code = "".join(blocks(page))
    for needed in dict.fromkeys(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    for line in printed:
        assert line.rstrip() in page.read_text()
    said = re.findall(r"^print\(.*\)  # (.+)$", code, re.MULTILINE)
    rest = iter(printed)
    assert all(line in rest for line in said), (said, printed)


@pytest.mark.parametrize("name", ["audio", "vision"])
def test_commands_of_a_tutorial(files, capsys, name):
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    for line in commands(page):
        assert cli.main(shlex.split(line)) == 0, line


def test_table_is_as_printed():
    for table in ("table.md", "gpu_table.md"):
        assert (ROOT / "benchmarks" / "results" / table).read_text() in README.read_text()


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


def test_scaling_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("dask.array", reason="Dask is not installed")
    pytest.importorskip("zarr", reason="zarr is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(blocks(ROOT / "docs" / "scaling.md")[0], names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("dask.array<truediv, shape=(2,), ")
    assert printed[1].split()[:4] == ["sample", "eps", "eta", "norm"]
    moved = names["da"].from_zarr("v.zarr") - names["x"]
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), names["eps"].compute()[:, 0], rtol=1e-12)


@pytest.mark.parametrize(
    ("number", "framework", "launch"),
    [(1, "jax", []), (2, "torch", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])],
    ids=["jax", "torch"],
)
@pytest.mark.long
def test_scaling_page_on_several_devices(tmp_path, number, framework, launch):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    code = blocks(ROOT / "docs" / "scaling.md")[number]
    assert f"import {framework}\n" in code
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, *launch, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert f"# {line}" in code
