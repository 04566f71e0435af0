"""The fuzzer: its corpus on every backend, a short run, and that it finds and shrinks what is broken."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import numpy as np
import pytest

import clipaware as ca
from tiers import in_test_all
from torture.__main__ import main
from torture.backends import LOADERS, load
from torture.cases import FAMILIES, Batch, Look, Profile, call_of, corpus, from_json, make, to_json
from torture.check import check
from torture.gradients import NAMES, solved
from torture.oracle import ULP, Truth, norm, rounded
from torture.shrink import as_test, shrunk

# Batches of a short run, in `make test` and in `make test-all`. Those that compile or make a graph for each take few.
BATCHES = dict.fromkeys(LOADERS, (25, 60))
BATCHES |= {"jax-operations": (1, 2), "jax32-operations": (1, 2), "tensorflow-operations": (1, 2)}
BATCHES |= {"jax": (6, 25), "jax32": (6, 25), "dask": (4, 12), "dask-batch": (4, 12), "triton": (3, 5)}


def _loaded():
    """The backends that this machine and environment have."""
    found = {}
    for name in LOADERS:
        with contextlib.suppress(ImportError):
            found[name] = load(name)
    return found


HERE = _loaded()


def takes(profile, batch):
    """Whether a backend has all numbers of a batch of the corpus; and whether it compiles nothing for it."""
    if profile.few or batch.dtype not in profile.dtypes:
        return False
    if profile.single_eps and (batch.eps != np.float32(batch.eps)).any():
        return False
    subnormal = batch.dtype == "float64" and (abs(batch.delta[batch.delta != 0]) < 2.0**-1022).any()
    return profile.subnormal64 or not subnormal


CORPUS = {path.stem: from_json(path.read_text()) for path in corpus()}


def is_for_test_all(name, case):
    """Whether `make test` does without: Triton's interpreter takes seconds for each, the others share NumPy's code."""
    shared = name in ("jax", "jax32", "tensorflow", "array-api-strict") or (
        name.startswith("dask") and "dask" not in case
    )
    return name == "triton" or shared


REPLAYS = [(name, case) for name in HERE for case in CORPUS if takes(HERE[name].profile, CORPUS[case])]


@pytest.mark.parametrize(
    ("name", "case"),
    [r for r in REPLAYS if not is_for_test_all(*r)] + in_test_all(*(r for r in REPLAYS if is_for_test_all(*r))),
)
def test_corpus(name, case):
    assert not check(HERE[name], CORPUS[case]).failures


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [(name, 0, BATCHES[name][0]) for name in HERE] + in_test_all(*((name, *BATCHES[name]) for name in HERE)),
)
def test_a_short_run(name, first, last):
    backend, gradients = HERE[name], 0
    for index in range(first, last):
        batch = make(1, index, replace(backend.profile, longest=2000))
        out = check(backend, batch, thorough=False, part=2 * index + 1 if backend.profile.few else index)
        assert not out.failures, f"batch {index}"
        gradients += out.gradients
    assert gradients > 0 or last - first < 10


def test_a_batch_follows_from_its_number():
    for index in range(40):
        first, second = (make(3, index, Profile()) for _ in range(2))
        assert to_json(first) == to_json(second)
        again = from_json(to_json(first))
        for name in ("x", "delta", "eps"):
            assert getattr(again, name).tobytes() == getattr(first, name).tobytes()
        assert (again.p, again.mode, again.look) == (first.p, first.mode, first.look)


def test_families_are_what_they_say():
    batches = [make(6, index, Profile(longest=2000)) for index in range(150)]
    assert {batch.family for batch in batches} == set(FAMILIES)
    rows_of = {"clustered": [], "levels": []}
    for batch in batches:
        truth = batch.truth()
        if batch.family == "clustered" and batch.p < np.inf and batch.look.eps != "number":
            with np.errstate(all="ignore"):
                near = abs(truth.room / truth.size / solved(truth)[0] - 1) < 2e-4
            rows_of["clustered"] += (near.mean(axis=1) > 0.08).tolist()
        if batch.family == "levels":
            level = 255 * (truth.x - truth.lower) / (truth.upper - truth.lower)
            assert abs(level - np.rint(level)).max() <= 255 * ULP[batch.dtype]
            assert len(np.unique(truth.size)) <= 2
            rows_of["levels"] += (truth.eps <= 0.3 * truth.reach)[:, 0].tolist()
    for family, rows in rows_of.items():
        assert np.mean(rows) > 0.5, family


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


def broken(which, fault):
    """perturb_vjp with one of its gradients wrong."""
    right = ca.perturb_vjp

    def wrong(*args, **options):
        bars = list(right(*args, **options))
        bars[which] = fault(np.array(bars[which]))
        return tuple(bars)

    return wrong


def scaled(bar):
    return bar * (1 + 1e-6)


def other_sign(bar):
    bar.reshape(-1)[np.argmax(np.abs(bar))] *= -1
    return bar


def one_missing(bar):
    bar.reshape(-1)[np.argmax(np.abs(bar))] = 0
    return bar


def without_a_number(bar):
    bar.reshape(-1)[-1] = np.nan
    return bar


@pytest.mark.parametrize("fault", [scaled, other_sign, one_missing, without_a_number])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, np.inf])
def test_a_wrong_gradient_is_caught(monkeypatch, p, which, fault):
    eps = np.full(4, {1.0: 1.2, 2.0: 0.8, 3.5: 0.6, np.inf: 0.45}[p])
    for bounds in ({}, {"lower": np.zeros((4, 6)), "upper": np.ones((4, 6))}):
        batch = small(p=p, eps=eps, **bounds)
        out = check(load("numpy"), batch)
        assert not out.failures
        assert out.gradients == out.pulled == 4
        with monkeypatch.context() as patch:
            patch.setattr(ca, "perturb_vjp", broken(which, fault))
            kinds = {kind for _, kind, _ in check(load("numpy"), batch).failures}
        assert kinds == {f"gradient of {NAMES[which]}"}


def test_a_missing_term_is_caught(monkeypatch):
    """The scale taken for a constant: g where v moves with delta."""
    right = ca.perturb_vjp

    def without(x, delta, eps, g, **options):
        x_bar, delta_bar, *others = right(x, delta, eps, g, **options)
        return x_bar, np.where(delta_bar != 0, ca.rescale(x, delta, eps, **options) * g, 0.0), *others

    monkeypatch.setattr(ca, "perturb_vjp", without)
    assert {kind for _, kind, _ in check(load("numpy"), small()).failures} == {"gradient of delta"}


def test_a_wrong_backward_pass_is_caught():
    backend = load("torch")
    batch = small(look=Look(own=True))
    assert check(backend, batch).gradients == 8

    def pull(*args):
        bars = backend.pull(*args)
        return [bars[0], bars[1] * (1 + 1e-6), *bars[2:]]

    failures = check(replace(backend, pull=pull), batch).failures
    assert {kind for _, kind, _ in failures} == {"gradient of delta"}
    assert all("autodiff" in message for _, _, message in failures)


def test_kinks_have_two_gradients(monkeypatch):
    """Elements of the same kind next to their kinks count together; of different kinds, nothing is compared."""
    x, delta = np.full((1, 4), 0.5), np.array([[1.0, 1.0, 0.5, 0.25]])
    at_kink = {"eps": np.array([np.sqrt(0.25 * (2 + 0.25 + 0.0625))]), "x": x}
    out = check(load("numpy"), small(delta=delta, **at_kink))
    assert not out.failures
    assert out.gradients == 1
    other = {"x": np.array([[0.5, 0.5, 0.75, 0.5]]), "eps": np.array([np.sqrt(0.5 + 0.25**2 + 0.125**2)])}
    out = check(load("numpy"), small(delta=delta, **other))
    assert not out.failures
    assert (out.gradients, out.pulled) == (0, 1)


@pytest.mark.parametrize("far", [False, True])
def test_a_wrong_error_is_caught(monkeypatch, far):
    right = ca.perturb

    def wrong(*args, unreachable, **options):
        if unreachable == "raise" and not far:
            raise ca.UnreachableError(np.array([0]), np.array([0.0]), np.array([0.4]))
        return right(*args, unreachable="maximize", **options)

    batch = small(eps=np.full(4, 9.0 if far else 0.4))
    assert not check(load("numpy"), batch).failures
    monkeypatch.setattr(ca, "perturb", wrong)
    assert {kind for _, kind, _ in check(load("numpy"), batch).failures} == {"raise"}


@pytest.mark.parametrize("name", ["numpy", "numpy-operations"])
def test_flagged_rows_are_counted(name):
    """Of perturb and of rescale; not once more where they are tried again."""
    ordinary, still = (check(load(name), small(eps=np.full(4, eps))) for eps in (0.4, 0.0))
    assert ordinary.flagged == [False] * 8
    assert still.flagged == [True] * 8
    assert not ordinary.failures
    assert not still.failures


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
    (line,) = (text for text in (tmp_path / "r.md").read_text().splitlines() if text.startswith("| numpy | float64 |"))
    assert re.fullmatch(r"(\| [^|]+ ){6}\| \d+\.\d% \| \d+\.\d\d s \(batch \d+\) \|", line)
    right = ca.perturb
    monkeypatch.setattr(ca, "perturb", lambda x, *args, **options: right(x, *args, **options) * 1.0000001)
    report = tmp_path / "wrong.md"
    command = ["--cases", "30", "--backends", "numpy", "--seed", "1", "--most-tests", "1", "--report", str(report)]
    assert main(command) == 1
    out = capsys.readouterr().out
    listed = [line[2:] for line in report.read_text().splitlines() if line.startswith("- numpy, batch")]
    assert out.count("def test_") == 1
    assert len(listed) > 5
    assert all(line in out for line in listed)


def test_truth_of_a_small_row():
    truth = Truth(
        *(np.array([a]) for a in ([0.2, 0.5], [1.0, -1.0], [0.0, 0.0], [1.0, 1.0])), np.ones(1), 2.0, "float64"
    )
    np.testing.assert_allclose(truth.norm_at(np.longdouble(0.6))[0, 0], np.hypot(0.6, 0.5), rtol=1e-16)
    np.testing.assert_allclose(truth.reach[0, 0], np.hypot(0.8, 0.5), rtol=1e-15)
