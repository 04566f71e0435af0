"""The fuzzer: its corpus on every backend, a short run, and that it finds and shrinks what is broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import clipaware as ca
from torture.__main__ import main
from torture.backends import LOADERS, load
from torture.cases import Batch, Profile, call_of, corpus, from_json, make, to_json
from torture.check import check
from torture.oracle import Truth, norm, rounded
from torture.shrink import as_test, shrunk

SHORT = {"jax-operations": 2, "jax32-operations": 2, "tensorflow-operations": 2, "dask": 12, "dask-batch": 12}


@pytest.fixture(params=LOADERS)
def backend(request):
    try:
        return load(request.param)
    except ImportError as error:
        pytest.skip(f"{request.param}: {error}")


@pytest.mark.parametrize("path", corpus(), ids=lambda path: path.stem)
def test_corpus(backend, path):
    batch = from_json(path.read_text())
    profile = backend.profile
    if batch.dtype not in profile.dtypes or (profile.single_eps and (batch.eps != np.float32(batch.eps)).any()):
        pytest.skip(f"{backend.name} has no such numbers")
    if profile.few:
        pytest.skip("a compilation for every file")
    assert not check(backend, batch).failures


def test_a_short_run(backend):
    for index in range(SHORT.get(backend.name, 60)):
        batch = make(1, index, replace(backend.profile, longest=2000))
        assert not check(backend, batch, thorough=False, part=index).failures, f"batch {index}"


def test_a_batch_follows_from_its_number():
    for index in range(40):
        first, second = (make(3, index, Profile()) for _ in range(2))
        assert to_json(first) == to_json(second)
        again = from_json(to_json(first))
        for name in ("x", "delta", "eps"):
            assert getattr(again, name).tobytes() == getattr(first, name).tobytes()
        assert (again.p, again.mode, again.look) == (first.p, first.mode, first.look)


def test_arrays_are_handed_over_and_back():
    for index in range(200):
        batch = make(4, index, Profile(longest=100))
        call = call_of(batch)
        assert call.back(call.x).tobytes() == np.ascontiguousarray(batch.x).tobytes()


def test_rounding_of_the_oracle():
    a = np.random.default_rng(0).standard_normal(1000) * 2.0 ** np.random.default_rng(1).integers(-160, 100, 1000)
    np.testing.assert_array_equal(rounded(a.astype(np.longdouble), "float32"), a.astype(np.float32))


def test_norm_of_the_oracle():
    z = np.array([[3e-4000, 4e-4000], [3, 4]], np.longdouble) if np.finfo(np.longdouble).maxexp > 2000 else None
    if z is None:
        pytest.skip("no extended precision")
    np.testing.assert_allclose(norm(z[1:], 2), 5, rtol=1e-18)
    np.testing.assert_allclose(norm(z[1:], 1e4), 4, rtol=1e-18)


def small(**changed):
    x, delta = np.linspace(0.1, 0.9, 24).reshape(4, 6), np.tile([1.0, -2.0, 0.5, 3.0, -1.0, 0.25], (4, 1))
    zero, one = np.zeros((1, 1)), np.ones((1, 1))
    given = {"x": x, "delta": delta, "lower": zero, "upper": one, "eps": np.full(4, 0.4), "p": 2.0}
    return Batch(**{**given, "mode": "equal", "unreachable": "maximize", "dtype": "float64", **changed})


def wrong_norm(v, x):
    return x + (v - x) * (1 + 1e-12)


def wrong_element(v, x):
    v = v.copy()
    v[..., -1] = x[..., -1]
    return v


def not_a_number(v, x):
    return np.where(np.arange(v.shape[-1]) == 2, np.nan, v)


def outside(v, x):
    return np.where(np.arange(v.shape[-1]) == 2, 1.5, v)


@pytest.mark.parametrize(
    ("fault", "kind"), [(wrong_norm, "norm"), (wrong_element, "ray"), (not_a_number, "finite"), (outside, "bounds")]
)
def test_a_broken_function_is_caught_and_shrunk(monkeypatch, fault, kind):
    backend, right = load("numpy"), ca.perturb
    assert not check(backend, small()).failures
    monkeypatch.setattr(ca, "perturb", lambda x, *args, **options: fault(right(x, *args, **options), x))
    found = [failure for failure in check(backend, small()).failures if failure[1] == kind]
    assert found
    tiny = shrunk(backend, small(), found[0][0], kind, tries=60)
    assert tiny.rows == 1
    assert tiny.n <= 3
    assert any(failure[1] == kind for failure in check(backend, tiny).failures)
    text = as_test(tiny, "numpy", kind, "", "found")
    compile(text, "test", "exec")
    space = {"from_json": from_json, "check": check, "load": load}
    exec(text, space)
    with pytest.raises(AssertionError):
        space["test_found"]()


@pytest.mark.parametrize("name", ["rescale", "reach"])
def test_a_wrong_number_is_caught(monkeypatch, name):
    right = getattr(ca, name)
    monkeypatch.setattr(ca, name, lambda *args, **options: right(*args, **options) * (1 + 1e-12))
    assert check(load("numpy"), small()).failures


def test_changed_inputs_are_caught(monkeypatch):
    right = ca.perturb

    def careless(x, *args, **options):
        v = right(x, *args, **options)
        x[...] = v
        return v

    monkeypatch.setattr(ca, "perturb", careless)
    assert "inputs" in {kind for _, kind, _ in check(load("numpy"), small()).failures}


def test_the_command_says_what_it_found(monkeypatch, capsys, tmp_path):
    assert main(["--cases", "60", "--backends", "numpy", "--seed", "1", "--report", str(tmp_path / "r.md")]) == 0
    assert "| numpy | float64 |" in (tmp_path / "r.md").read_text()
    right = ca.perturb
    monkeypatch.setattr(ca, "perturb", lambda x, *args, **options: right(x, *args, **options) * 1.0000001)
    assert main(["--cases", "30", "--backends", "numpy", "--seed", "1", "--most-failures", "1"]) == 1
    assert "def test_" in capsys.readouterr().out


def test_truth_of_a_small_row():
    truth = Truth(
        *(np.array([a]) for a in ([0.2, 0.5], [1.0, -1.0], [0.0, 0.0], [1.0, 1.0])), np.ones(1), 2.0, "float64"
    )
    np.testing.assert_allclose(truth.norm_at(np.longdouble(0.6))[0, 0], np.hypot(0.6, 0.5), rtol=1e-16)
    np.testing.assert_allclose(truth.reach[0, 0], np.hypot(0.8, 0.5), rtol=1e-15)
