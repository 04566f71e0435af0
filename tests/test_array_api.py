"""What arrays of the Array API standard have of their own: devices, versions of it, libraries side by side."""

from __future__ import annotations

import math
import subprocess
import sys
import types

import numpy as np
import pytest

import clipaware as ca
from clipaware import _dispatch
from clipaware.reference import directions, norm64
from tiers import in_test_all

xp = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
from clipaware._backends import array_api  # noqa: E402
from clipaware._backends import numpy as numpy_backend  # noqa: E402

torch_backend = pytest.importorskip("clipaware._backends.torch", reason="PyTorch is not installed")

CPU, OTHER = xp.Device("CPU_DEVICE"), xp.Device("device1")
rng = np.random.default_rng(0)
X, D, G = rng.random((4, 50)), rng.standard_normal((4, 50)), rng.standard_normal((4, 50))
EPS = np.array([0.3, 0.0, 0.9, 99.0])  # the last is out of reach


def on(device, *arrays, dtype="float64"):
    return [xp.asarray(a.astype(dtype), device=device) for a in arrays]


def back(a):
    return np.asarray(a.to_device(CPU))


@pytest.fixture
def stand_in(monkeypatch):
    """NumPy's arrays in the place of CuPy's: through array-api-compat, and without a look at their values."""
    monkeypatch.setitem(_dispatch._known, np.ndarray, (array_api, "numpy"))
    monkeypatch.setattr(array_api, "_on_cpu", lambda a: False)


@pytest.mark.parametrize("p", [2, *in_test_all(1, 7.5, math.inf)])
@pytest.mark.parametrize("name", ["device1", "no_float64", "no_x64"])
def test_everything_stays_on_the_device_of_x(name, p):
    """Also where float64 is missing, and what depends on it is less exact."""
    device, dtype = xp.Device(name), "float64" if name == "device1" else "float32"
    x, delta, g = on(device, X, D, G, dtype=dtype)
    bounds = [(0, 1), (np.zeros(50), np.ones((4, 1))), tuple(on(device, np.zeros(50), np.ones((4, 1)), dtype=dtype))]
    for eps in (0.3, EPS, *on(device, EPS, dtype=dtype)):
        for pair in bounds:
            options = {"p": p, "bounds": pair}
            v, eta, reach = (
                ca.perturb(x, delta, eps, **options),
                ca.rescale(x, delta, eps, **options),
                ca.reach(x, delta),
            )
            report, bars = ca.report(x, delta, eps, **options), ca.perturb_vjp(x, delta, eps, g, **options)
            for a in (v, eta, reach, *vars(report).values(), *bars):
                assert a.device == device
            expected = ca.perturb(X.astype(dtype), D.astype(dtype), eps if isinstance(eps, float) else EPS, p=p)
            np.testing.assert_allclose(back(v), expected, rtol=0, atol=1e-15 if dtype == "float64" else 4e-6)
            assert len(str(report).splitlines()) == 5
    with pytest.raises(ca.UnreachableError, match=r"1 sample\(s\) \(sample 3: eps 99 > reach"):
        ca.perturb(x, delta, EPS, p=p, unreachable="raise")


def test_two_devices():
    (x, delta), (theirs, eps) = on(CPU, X, D), on(OTHER, D, EPS)
    here = r"expected array_api_strict.Device\('CPU_DEVICE'\) to match x"
    with pytest.raises(TypeError, match=rf"delta is on array_api_strict.Device\('device1'\), {here}"):
        ca.perturb(x, theirs, 0.3)
    with pytest.raises(TypeError, match=rf"eps is on array_api_strict.Device\('device1'\), {here}"):
        ca.perturb(x, delta, eps)
    with pytest.raises(TypeError, match=rf"the lower bound is on array_api_strict.Device\('device1'\), {here}"):
        ca.perturb(x, delta, 0.3, bounds=(xp.zeros(50, device=OTHER), 1))
    # A number is a number wherever it is.
    for eps in on(OTHER, np.array(0.3), np.array(0.3)):
        np.testing.assert_array_equal(np.asarray(ca.perturb(x, delta, eps)), np.asarray(ca.perturb(x, delta, 0.3)))


def test_at_most_never_exceeds_eps_without_float64():
    """Where float32 is the widest dtype, the margin must be one that float32 can tell."""
    device = xp.Device("no_float64")
    x, delta = np.repeat(X[:1], 300, axis=0).astype("float32"), np.repeat(D[:1], 300, axis=0).astype("float32")
    eps = np.linspace(0.5, 1.5, 300).astype("float32")
    v = back(ca.perturb(*on(device, x, delta, dtype="float32"), eps, mode="at_most"))
    norms = norm64(v.astype(float), x.astype(float), 2)
    assert (norms <= eps).all()
    assert (norms >= eps * (1 - 2e-6)).all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("p", [1, math.inf, *in_test_all(2, 2.5)])
def test_unchecked_values_make_their_own_row_nan(p, compiled, monkeypatch):
    """In the careful lane, which is where such rows go, compiled or not."""
    if not compiled:
        monkeypatch.setattr(numpy_backend, "kernels", lambda: None)
    x, delta, eps = np.repeat(X[:1], 10, axis=0), np.repeat(D[:1], 10, axis=0), np.full(10, 0.3)
    lower, upper = np.zeros((10, 50)), np.ones((10, 50))
    x[1, 3], x[2, 3] = math.nan, -math.inf
    delta[3, 3], delta[4, 3] = math.nan, math.inf
    eps[5], eps[6] = -1, math.nan
    lower[7, 3], upper[8, 3] = 2, math.nan
    lower[9, 3] = upper[9, 3] = -math.inf
    lost = np.arange(10) > 0
    x_, delta_, eps_, lower_, upper_, g = on(OTHER, x, delta, eps, lower, upper, np.ones((10, 50)))
    options = {"p": p, "bounds": (lower_, upper_)}
    v, eta = (back(f(x_, delta_, eps_, **options)) for f in (ca.perturb, ca.rescale))
    np.testing.assert_array_equal(np.isnan(v), np.broadcast_to(lost[:, None], v.shape))
    np.testing.assert_array_equal(np.isnan(eta[:, 0]), lost)
    np.testing.assert_array_equal(
        np.isnan(back(ca.reach(x_, delta_, **options)))[:, 0], lost & (np.isfinite(eps) & (eps > 0))
    )
    bars = [back(bar) for bar in ca.perturb_vjp(x_, delta_, eps_, g, **options)]
    expected = ca.perturb_vjp(x[:1], delta[:1], eps[:1], np.ones((1, 50)), p=p, bounds=(lower[:1], upper[:1]))
    np.testing.assert_allclose(v[0], ca.perturb(x[0], delta[0], 0.3, p=p), rtol=0, atol=1e-15)
    for bar, alone in zip(bars, expected, strict=True):
        assert np.isnan(bar[1:]).all()
        np.testing.assert_allclose(bar[0], alone[0], rtol=1e-12, atol=1e-14)


def test_unchecked_x_is_clipped_first():
    x = X.copy()
    x[:, 0], x[:, 1] = -0.5, 1.5
    clipped = np.clip(x, 0, 1)
    v, r = (back(a) for a in (ca.perturb(*on(OTHER, x, D), 0.3), ca.reach(*on(OTHER, x, D))))
    np.testing.assert_allclose(v, ca.perturb(clipped, D, 0.3), atol=1e-15)
    np.testing.assert_allclose(r, ca.reach(clipped, D), rtol=1e-14)


@pytest.mark.parametrize("version", ["2024.12", "2025.12"])
def test_nothing_beyond_the_standard(version):
    """Nor what the standard leaves to its implementations: shapes that depend on values, masks as indices."""
    x, delta, eps, g = on(CPU, X, D, EPS, G)
    with xp.ArrayAPIStrictFlags(api_version=version, boolean_indexing=False, data_dependent_shapes=False):
        for p in (1, 2, 7.5, math.inf):
            for mode in ("equal", "at_most", "at_least"):
                v = ca.perturb(x, delta, eps, p=p, mode=mode)
                np.testing.assert_allclose(np.asarray(v), ca.perturb(X, D, EPS, p=p, mode=mode), rtol=0, atol=1e-15)
            str(ca.report(x, delta, eps, p=p))
            ca.perturb_vjp(x, delta, eps, g, p=p)


@pytest.mark.parametrize("axis", ["batch", None])
@pytest.mark.parametrize("size", [7, *in_test_all(1, 50, 120)])
def test_many_groups_and_rows_in_parts(monkeypatch, axis, size):
    x, delta, g = on(CPU, X, D, G)
    eps = EPS if axis == "batch" else 1.7
    bounds = on(CPU, np.zeros((4, 1)), np.ones(50))

    def everything():
        options = {"axis": axis, "bounds": tuple(bounds)}
        report = ca.report(x, delta, eps, **options)
        bars = ca.perturb_vjp(x, delta, eps, g, **options)
        found = (
            ca.perturb(x, delta, eps, **options),
            ca.rescale(x, delta, eps, **options),
            ca.reach(x, delta, axis=axis),
        )
        return [np.asarray(a, float) for a in (*found, *vars(report).values(), *bars)]

    expected = everything()
    monkeypatch.setattr(array_api, "GROUP", size)
    for mine, whole in zip(everything(), expected, strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-12, atol=1e-14)


def test_rows_that_lie_across_memory():
    """Along those, NumPy adds up one element after another, and many equal ones drift."""
    delta = np.full((3, 5000), 0.1)
    delta[:, 0] = 0.3
    delta, total = np.asfortranarray(delta), math.fsum(delta[0])
    x, delta = on(CPU, delta * 0, delta)
    eta = ca.rescale(x, delta, 2.0, p=1, bounds=(-math.inf, math.inf))
    np.testing.assert_allclose(np.asarray(eta) * total, 2, rtol=1e-14)
    np.testing.assert_allclose(np.asarray(ca.reach(x, delta, p=1, bounds=(0, delta))), total, rtol=1e-14)


@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
@pytest.mark.parametrize("kind", ["gaussian", "tied"])
def test_half_precision(stand_in, kind, p):
    """As CuPy has it: the nearest norm that the ray has in float16."""
    x, delta = rng.random((6, 40)).astype(np.float16), directions(kind, 6, 40, 0).astype(np.float16)
    eps = ca.reach(x, delta, p=p)[:, 0] * np.array([0.03, 0.1, 0.3, 0.5, 0.8, 0.95])
    v, eta = ca.perturb(x, delta, eps, p=p), ca.rescale(x.astype(float), delta.astype(float), eps, p=p)
    assert v.dtype == np.float16
    for i in range(6):
        grid = eta[i] * np.linspace(0.9, 1.1, 20_001)[:, None]
        ray = np.clip(x[i].astype(float) + grid * delta[i].astype(float), 0, 1)
        ray = ray.astype(np.float32).astype(np.float16).astype(float)
        best = np.abs(norm64(ray, np.broadcast_to(x[i], ray.shape), p) - eps[i]).min()
        assert abs(norm64(v[i : i + 1], x[i : i + 1], p)[0] - eps[i]) <= best * (1 + 1e-6) + 1e-8 * eps[i]
    bars = ca.perturb_vjp(x, delta, eps, delta, p=p)
    assert [bar.dtype for bar in bars] == [np.float16, np.float16, np.float32, np.float32, np.float32]


@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_half_precision_of_long_rows(stand_in, p):
    """Where norms are closer to each other than the 2e-7 that are good enough in float32: still the nearest of them."""
    rng = np.random.default_rng(0)
    x, delta = rng.random((4, 20_000)).astype(np.float16), rng.standard_normal((4, 20_000)).astype(np.float16)
    eps = ca.reach(x, delta, p=p)[:, 0] * np.array([0.5, 0.8, 0.9, 0.95])
    v, scale = ca.perturb(x, delta, eps, p=p), np.float32(ca.rescale(x.astype(float), delta.astype(float), eps, p=p))
    for i in range(4):
        # Every array on the ray near the solution: float32 has no scales between these.
        scales = scale[i] + np.arange(-300, 301, dtype=np.float32)[:, None] * np.spacing(scale[i])
        ray = np.clip(x[i].astype(np.float32) + scales * delta[i].astype(np.float32), 0, 1).astype(np.float16)
        best = np.abs(norm64(ray, np.broadcast_to(x[i], ray.shape), p) - eps[i]).min()
        assert abs(norm64(v[i : i + 1], x[i : i + 1], p)[0] - eps[i]) <= best * (1 + 1e-6) + 1e-8 * eps[i]


class Mine:
    """An array of yet another library, as far as dispatch looks."""

    __array_namespace__ = shape = device = dtype = None


def test_two_libraries_of_the_standard():
    Mine.__module__ = "mine.arrays"
    (x,) = on(CPU, X)
    with pytest.raises(TypeError, match=r"delta is a mine array, expected a array_api_strict array to match x"):
        ca.perturb(x, Mine(), 0.3)
    with pytest.raises(TypeError, match=r"delta is a numpy array, expected a array_api_strict array to match x"):
        ca.perturb(x, X, 0.3)
    with pytest.raises(TypeError, match=r"delta is a array_api_strict array, expected a numpy array to match x"):
        ca.perturb(X, x, 0.3)
    with pytest.raises(TypeError, match=r"eps is a mine array, expected a number, a NumPy array or a array_api_strict"):
        ca.perturb(x, x, Mine())


def test_dtypes():
    integers = xp.asarray(np.zeros((2, 3), np.uint8))
    with pytest.raises(TypeError, match=r"x has dtype uint8, expected one of .*convert it first"):
        ca.perturb(integers, integers, 0.3)
    x, delta = on(CPU, X, D)
    whole = xp.asarray(np.array([0, 1, 1, 2]))
    np.testing.assert_array_equal(
        np.asarray(ca.perturb(x, delta, whole, bounds=(xp.asarray(0), np.int64(1)))),
        np.asarray(ca.perturb(x, delta, np.array([0.0, 1, 1, 2]))),
    )


def test_without_array_api_compat():
    code = """
import sys
sys.modules["array_api_compat"] = None
import array_api_strict as xp, numpy as np, clipaware as ca
ca.perturb(np.full(3, 0.5), np.ones(3), 0.1)
try:
    ca.perturb(xp.full(3, 0.5), xp.ones(3), 0.1)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == (
        "arrays of this type need the package array-api-compat: pip install 'clipaware[array-api]'"
    )


def test_cupys_memory_is_lent_to_kernels(monkeypatch):
    """CuPy by a stand-in whose arrays are on the CPU, where PyTorch shares their memory as it would on a GPU."""

    class Array(np.ndarray):
        __module__ = "cupy"

        def __dlpack__(self, **_):
            assert min(self.strides, default=0) >= 0
            lent.append(self)
            return np.asarray(self).__dlpack__()

    def array(a, dtype=np.float64):
        return np.array(a, dtype).view(Array)

    lent, cupy = [], types.ModuleType("cupy")
    cupy.ndarray, cupy.from_dlpack = Array, lambda a: a.numpy().view(Array)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(_dispatch._known, Array, (array_api, "cupy"))
    monkeypatch.setattr(torch_backend, "gpu_kernels", lambda: ...)
    x, delta, g, low = array(X), array(D)[:, ::-1], array(G), array(np.zeros(50))
    options = {"p": 3, "bounds": (low, np.ones(50))}
    plain = np.array(X), np.array(delta), EPS
    for function, more in ((ca.perturb, ()), (ca.rescale, ()), (ca.report, ()), (ca.perturb_vjp, (np.array(G),))):
        found = function(x, delta, array(EPS), *map(array, more), **options)
        expected = function(*plain, *more, p=3, bounds=(np.zeros(50), np.ones(50)))
        pairs = [(found, expected)] if isinstance(found, Array) else zip(*map(_listed, (found, expected)), strict=True)
        for a, b in pairs:
            assert type(a) is Array
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12)
    assert len(lent) == 4 * 4 + 1
    assert type(ca.perturb(x=x, delta=delta, eps=EPS)) is Array
    with pytest.raises(TypeError, match=r"delta is a numpy array, expected a cupy array to match x"):
        ca.perturb(x, D, 0.3)
    with pytest.raises(TypeError, match=r"eps is a torch array, expected a number, a NumPy array or a cupy array"):
        ca.perturb(x, delta, torch_backend.torch.tensor(0.3))
    with pytest.raises(ValueError, match=r"grad has shape \(4, 49\)"):
        ca.perturb_vjp(x, delta, 0.3, g[:, 1:])


def _listed(found):
    return found if isinstance(found, tuple) else list(vars(found).values())
