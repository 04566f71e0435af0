"""Bad input: the right type of error, and a message that names the argument, the expectation and what came."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

import clipaware as ca

X, D = np.full((4, 6), 0.5), np.random.default_rng(0).standard_normal((4, 6))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"eps": -1.0}, ValueError, r"eps is -1.0, expected a finite number that is not negative"),
        ({"eps": math.nan}, ValueError, r"eps is nan, expected a finite number"),
        ({"eps": math.inf}, ValueError, r"eps is inf, expected a finite number"),
        (
            {"eps": np.array([1, 2, -3, 1.0])},
            ValueError,
            r"eps is -3.0 for 1 of 4 sample\(s\), expected finite numbers",
        ),
        ({"eps": np.ones(6)}, ValueError, r"eps has shape \(6,\), expected a number or shape \(4,\) or \(4, 1\)"),
        ({"eps": np.ones((4, 6))}, ValueError, r"eps has shape \(4, 6\), expected"),
        ({"eps": [1.0, 1.0, 1.0, 1.0]}, TypeError, r"eps is a list, expected a number"),
        ({"eps": "1"}, TypeError, r"eps is a str, expected a number"),
        ({"eps": None}, TypeError, r"eps is a NoneType, expected a number"),
        ({"eps": np.ones(4, complex)}, TypeError, r"eps has dtype complex128, expected real numbers"),
        ({"p": 0.5}, ValueError, r"p is 0.5, expected a number from 1 to inf"),
        ({"p": math.nan}, ValueError, r"p is nan, expected a number from 1 to inf"),
        ({"p": "2"}, TypeError, r"p is a str, expected a number from 1 to inf"),
        ({"bounds": (1, 0)}, ValueError, r"bounds are \(1, 0\), expected lower <= upper"),
        ({"bounds": (math.nan, 1)}, ValueError, r"bounds are \(nan, 1\), expected lower <= upper"),
        ({"bounds": 1}, TypeError, r"bounds is a int, expected a pair"),
        ({"bounds": (0, 1, 2)}, TypeError, r"bounds is 3 items, expected a pair"),
        (
            {"bounds": (0, np.ones(5))},
            ValueError,
            r"the upper bound has shape \(5,\), expected one that broadcasts to \(4, 6\)",
        ),
        ({"bounds": (np.zeros((1, 4, 6)), 1)}, ValueError, r"the lower bound has shape \(1, 4, 6\), expected"),
        ({"bounds": ([0], 1)}, TypeError, r"the lower bound is a list, expected a number"),
        ({"axis": 2}, ValueError, r"axis is 2, expected axes from -2 to 1"),
        ({"axis": (1, -1)}, ValueError, r"axis is \(1, -1\), expected no axis twice"),
        ({"axis": "samples"}, TypeError, r"axis is 'samples', expected 'batch', None, an int or a tuple"),
        ({"axis": 1.0}, TypeError, r"axis is 1.0, expected"),
        ({"mode": "exact"}, ValueError, r"mode is 'exact', expected one of 'equal', 'at_most', 'at_least'"),
        ({"unreachable": "ignore"}, ValueError, r"unreachable is 'ignore', expected one of 'maximize', 'nan', 'raise'"),
    ],
)
def test_options(be, changes, error, message):
    options = {"eps": 1.0, **changes}
    for function in (be.perturb, be.rescale):
        with pytest.raises(error, match=message):
            function(X, D, options["eps"], **{k: v for k, v in options.items() if k != "eps"})


@pytest.mark.needs("checked")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values(be, dtype):
    def with_value(a, value, *where):
        a = a.astype(dtype)
        for i in where:
            a[i] = value
        return a

    cases = [
        (
            with_value(X, math.nan, (2, 3)),
            D,
            r"x has 1 element\(s\) that are NaN or infinite, the first in sample 2 \(nan\)",
        ),
        (with_value(X, math.inf, (2, 3)), D, r"x has 1 element\(s\) that are NaN or infinite"),
        (
            X,
            with_value(D, math.nan, (1, 0), (3, 3)),
            r"delta has 2 element\(s\) that are NaN or infinite, the first in sample 1",
        ),
        (X, with_value(D, -math.inf, (0, 5)), r"delta has 1 element\(s\) that are NaN or infinite"),
        (
            with_value(X, 1.25, (1, 1), (2, 2)),
            D,
            r"x has 2 element\(s\) outside its bounds, the worst in sample 1: 1.25, expected 0.0 to 1.0",
        ),
        (with_value(X, -3, (3, 1)), D, r"x has 1 element\(s\) outside its bounds, the worst in sample 3: -3.0"),
    ]
    for x, delta, message in cases:
        for function in (lambda *a, **o: be.perturb(*a, 0.5, **o), lambda *a, **o: be.rescale(*a, 0.5, **o), be.reach):
            with pytest.raises(ValueError, match=message):
                function(x, delta, dtype=dtype)
    # Without bounds infinity is still not a number to perturb.
    with pytest.raises(ValueError, match="x has 1 element"):
        be.perturb(with_value(X, math.inf, (2, 3)), D, 0.5, bounds=(None, None), dtype=dtype)


@pytest.mark.needs("checked")
def test_values_of_bounds(be):
    for function in (be.perturb, be.rescale):
        with pytest.raises(ValueError, match=r"lower > upper in 2 place\(s\), first 1.6\d* > 1.5"):
            function(X, D, 1.0, bounds=(np.linspace(0, 2, 6), 1.5))
        with pytest.raises(ValueError, match=r"the lower bound has 6 NaN"):
            function(X, D, 1.0, bounds=(np.full(6, math.nan), 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rounding_at_the_bounds(be, dtype):
    """4 ulp outside counts as on the bound; 16 do not."""
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    x = np.array([[1 + 2 * ulp, 0.5, 0.25, -ulp]])
    delta = np.array([[1.0, 1.0, -1.0, -1.0]])
    v = np.asarray(be.perturb(x, delta, 0.25, dtype=dtype), float)
    assert v[0, 0] == 1
    assert v[0, 3] == 0
    if be.checked:
        with pytest.raises(ValueError, match=r"outside its bounds"):
            be.perturb(x + 16 * ulp, delta, 0.25, dtype=dtype)


def test_arrays(be):
    x = be.array(X, "float32")
    with pytest.raises(ValueError, match=r"delta has shape \(4, 5\), expected \(4, 6\) to match x"):
        ca.perturb(x, be.array(D[:, :5], "float32"), 1.0)
    with pytest.raises(TypeError, match=r"delta has dtype float64, expected float32 to match x"):
        ca.perturb(x, be.array(D, "float64"), 1.0)
    with pytest.raises(TypeError, match=r"delta is a list, expected a \w+ array to match x"):
        ca.perturb(x, D.tolist(), 1.0)
    with pytest.raises(ValueError, match=r"grad has shape \(4, 5\), expected \(4, 6\)"):
        ca.perturb_vjp(x, x, 1.0, be.array(D[:, :5], "float32"))


def test_other_types():
    for bad in ([[0.5]], 0.5, "x", None, {0.5}):
        with pytest.raises(TypeError, match=r"x is a .*, expected an array of a supported framework"):
            ca.perturb(bad, bad, 0.1)
    with pytest.raises(TypeError, match=r"convert it first, for instance with numpy.asarray"):
        ca.perturb([0.5], [0.5], 0.1)
    integer = np.zeros((2, 3), np.uint8)
    with pytest.raises(TypeError, match=r"x has dtype uint8, expected one of .*convert it first.*bounds=\(0, 255\)"):
        ca.perturb(integer, integer, 50.0, bounds=(0, 255))
    for dtype in (bool, complex, np.longdouble):
        with pytest.raises(TypeError, match=r"x has dtype .*, expected one of float16"):
            ca.perturb(np.zeros(3, dtype), np.zeros(3, dtype), 0.1)
    with pytest.raises(TypeError, match=r"x is a numpy.ma.MaskedArray"):
        ca.perturb(np.ma.zeros(3), np.ma.zeros(3), 0.1)


def test_mixed_frameworks():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, t = np.full(3, 0.5), torch.full((3,), 0.5, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"delta is a torch array, expected a numpy array to match x"):
        ca.perturb(x, t, 0.1)
    with pytest.raises(TypeError, match=r"delta is a numpy array, expected a torch array to match x"):
        ca.perturb(t, x, 0.1)
    with pytest.raises(
        TypeError, match=r"eps is a torch array, expected a number, a NumPy array or a numpy array like x"
    ):
        ca.perturb(x, x, torch.tensor(0.1))
    with pytest.raises(TypeError, match=r"the upper bound is a torch array"):
        ca.perturb(x, x, 0.1, bounds=(0, torch.tensor(1.0)))
    with pytest.raises(TypeError, match=r"delta is on meta, expected cpu to match x"):
        ca.perturb(t, t.to("meta"), 0.1)
    integer = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"x has dtype uint8, expected one of .*convert it first.*bounds=\(0, 255\)"):
        ca.perturb(integer, integer, 50.0, bounds=(0, 255))
    # Numbers and NumPy arrays go with everything.
    for eps in (0.1, np.float32(0.1), np.array(0.1), np.array([0.1])):
        assert isinstance(ca.perturb(t, t, eps, bounds=(np.zeros(3), np.float64(1))), torch.Tensor)


def test_unreachable_error_pickles():
    with pytest.raises(ca.UnreachableError) as caught:
        ca.perturb(X, D, 100.0, unreachable="raise")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)
    np.testing.assert_array_equal(again.rows, np.arange(4))
