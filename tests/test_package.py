"""The package as such: what it exports, what it imports, what it keeps in memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import clipaware as ca


def test_all_is_what_there_is():
    public = {name for name in vars(ca) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(ca, name), type(sys))}
    assert public - modules == set(ca.__all__)
    assert ca.__all__ == sorted(ca.__all__)
    # No module hides behind a public function's name.
    assert not modules & set(ca.__all__)
    for name in ca.__all__:
        assert getattr(ca, name).__doc__


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_no_framework():
    files = "'PIL', 'typer', 'rich', 'soundfile', 'tifffile'"
    heavy = f"{{'torch', 'jax', 'tensorflow', 'cupy', 'dask', 'numba', 'matplotlib', 'foolbox', 'eagerpy', {files}}}"
    used = "import numpy as np; ca.perturb(np.full((2, 3), 0.5), np.ones((2, 3)), 0.1)"
    loaded = f"print(sorted({heavy} & set(sys.modules)))"
    then = ["numba"] if importlib.util.find_spec("numba") else []
    assert run(f"import sys, clipaware as ca; {loaded}; {used}; {loaded}") == f"[]\n{then}"


def test_noise_and_attacks_load_no_framework():
    heavy = "{'torch', 'jax', 'tensorflow', 'keras', 'foolbox', 'eagerpy', 'art', 'matplotlib', 'tqdm'}"
    used = "ca.attacks.noise_attack(lambda x: x, np.full((2, 3), 0.5), [0, 1], 0.1, seed=0)"
    code = f"import sys, numpy as np, clipaware as ca, clipaware.attacks; {used}; print({heavy} & set(sys.modules))"
    assert run(code) == "set()"


def test_learned_noise_loads_nothing_but_torch():
    others = "{'jax', 'tensorflow', 'tensorboard', 'scipy', 'sklearn', 'matplotlib'}"
    assert run(f"import sys, clipaware.adversarial_noise; print({others} & set(sys.modules))") == "set()"


@pytest.mark.long
def test_triton_is_never_imported(tmp_path):
    """After TensorFlow that would end the process, here by a Triton that does so whenever it is imported."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos.abort()\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import tensorflow as tf, torch, numpy as np, clipaware as ca
x = np.full((2, 3), 0.5)
t = torch.tensor(x, requires_grad=True)
ca.perturb(t, t, 0.1).sum().backward()
constant = tf.constant(x)
with tf.GradientTape() as tape:
    tape.watch(constant)
    v = ca.perturb(constant, constant, 0.1)
tape.gradient(v, constant)
for a in (x, t, constant):
    ca.perturb(a, a, 0.1), ca.rescale(a, a, 0.1), ca.reach(a, a), str(ca.report(a, a, 0.1))
print("triton" in sys.modules)
"""
    assert run(code) == "False"


def test_a_subclass_is_found_by_its_base():
    class Mine(np.ndarray):
        """A stranger."""

    x = np.full(3, 0.5).view(Mine)
    np.testing.assert_allclose(np.linalg.norm(ca.perturb(x, x, 0.1) - x), 0.1)


def test_memory_of_a_call():
    """Beyond the result, a constant: nothing that grows with the batch."""
    rng = np.random.default_rng(0)
    x, delta = rng.random((64, 150528), np.float32), rng.standard_normal((64, 150528), np.float32)
    flagged = delta * np.float32(1e-30)  # whose squares vanish: these rows are for the careful lane
    for direction in (delta, flagged):  # compiling takes memory, too
        ca.perturb(x[:2], direction[:2], 50.0)
        ca.rescale(x[:2], direction[:2], 50.0)
    for function, direction in ((ca.perturb, delta), (ca.rescale, delta), (ca.perturb, flagged), (ca.rescale, flagged)):
        tracemalloc.start()
        result = function(x, direction, 50.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - result.nbytes < 8e6  # of an input of 38.5e6 bytes
    long = rng.random((1, 8_000_000), np.float32)
    tracemalloc.start()
    ca.perturb(long, long - np.float32(0.5), 50.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.2 * long.nbytes  # delta, the result, and a constant


def test_memory_of_the_gradient():
    rng = np.random.default_rng(0)
    x, delta = rng.random((64, 150528), np.float32), rng.standard_normal((64, 150528), np.float32)
    tracemalloc.start()
    ca.perturb_vjp(x, delta, 50.0, delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * x.nbytes + 40e6  # two gradients and a constant
