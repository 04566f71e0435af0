"""JAX's arrays that are spread over eight devices, in a process that has them: this one has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import in_test_all

pytest.importorskip("jax", reason="JAX is not installed")

FILE = Path(__file__).parent / "jax_on_eight_devices.py"


def on_eight_devices(*checks):
    environment = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"}
    run = subprocess.run([sys.executable, FILE, *checks], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


# Those of one process share what it compiles.
@pytest.mark.parametrize(
    "checks",
    [
        "rows_and_samples",
        *in_test_all("auto explicit", "program exchanges", "pictures rows", "transformations shard_map"),
    ],
)
def test_on_eight_devices(checks):
    on_eight_devices(*checks.split())


@pytest.mark.long
def test_arguments_that_are_split_differently():
    errors = on_eight_devices("arguments").splitlines()
    assert len(errors) == 4
    for error, name in zip(errors, ("delta", "grad") * 2, strict=True):
        assert error.startswith(f"{name} is split over devices by P")
        assert f"jax.device_put({name}, x.sharding)" in error
