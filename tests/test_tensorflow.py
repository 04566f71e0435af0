"""What TensorFlow adds to the shared suite: graphs, XLA, tapes of any order, variables, Keras and tf.data."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import clipaware as ca
from clipaware.reference import norm64
from conftest import NUMPY_DTYPES
from tiers import in_test_all

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
keras = pytest.importorskip("keras", reason="Keras is not installed")
from clipaware._backends import tensorflow as backend  # noqa: E402

ROWS, N = 4, 30
rng = np.random.default_rng(0)
X = rng.random((ROWS, N))
D = rng.standard_normal((ROWS, N))
G = rng.standard_normal((ROWS, N))
EPS = 0.25 * math.sqrt(N / 3)
ARRAYS = [tf.constant(a, tf.float32) for a in (X, D)]

# One row for every line of the table of edge cases, and rows as usual between them.
EDGY_X, EDGY_D = np.repeat(X[:1], 8, axis=0), np.repeat(D[:1], 8, axis=0)
EDGY_EPS = np.array([0.5, 0.5, 0.0, 50.0, 0.5, 0.5, 1e-3, 3.0])
EDGY_D[1] = 0
EDGY_X[4] = EDGY_D[4] > 0  # no room
EDGY_D[5, ::2] = -0.0


def gradients(function, inputs, g):
    """The result of the function, and the gradients of sum(g*result)."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        v = function(*inputs)
    return [v, *tape.gradient(v, inputs, tf.cast(g, v.dtype))]


def assert_alike(found, expected, rtol=1e-6, atol=2e-6):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_allclose(tf.cast(a, tf.float64), tf.cast(b, tf.float64), rtol=rtol, atol=atol)


# --- graphs and XLA ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, math.inf, *in_test_all(1, 1.5, 3, 10)])
def test_a_graph_does_what_eager_does(p):
    """Values and all gradients, with a bound per element and one per row."""

    def function(x, delta, eps, lower, upper):
        return ca.perturb(x, delta, eps, p=p, bounds=(lower, upper))

    eps = [0.5, 0.1, 0.9, 0.3] if p == math.inf else [EPS, 0.1, 2 * EPS, 1.0]
    given = X, D, eps, np.full((ROWS, 1), -0.1), np.full(N, 1.05)
    inputs = [tf.constant(a, tf.float64) for a in given]
    graph = tf.function(lambda *inputs: gradients(function, inputs, G), autograph=False)
    assert_alike(graph(*inputs), gradients(function, inputs, G), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mode", ["equal", *in_test_all("at_most", "at_least")])
def test_every_edge_case_in_a_graph(mode):
    def function(x, delta, eps, lower, upper):
        return ca.perturb(x, delta, eps, bounds=(lower, upper), mode=mode)

    inputs = [tf.constant(a, tf.float64) for a in (EDGY_X, EDGY_D, EDGY_EPS, np.zeros(N), np.ones(N))]
    g = rng.standard_normal(EDGY_X.shape)
    found = tf.function(lambda *inputs: gradients(function, inputs, g), autograph=False)(*inputs)
    assert all(np.isfinite(a).all() for a in found)
    assert_alike(found, gradients(function, inputs, g), rtol=1e-11, atol=1e-11)


def test_jit_compile_does_what_eager_does():
    def function(x, delta):
        return gradients(lambda x, delta: ca.perturb(x, delta, EPS), [x, delta], G)

    assert_alike(tf.function(function, jit_compile=True)(*ARRAYS), function(*ARRAYS))


@pytest.mark.parametrize(
    ("dtype", "jit"), [("bfloat16", True), *in_test_all(("float16", False), ("float16", True), ("bfloat16", False))]
)
def test_rounding_to_half_precision_survives_xla(dtype, jit):
    """XLA may take a cast to half precision and back for nothing; the polish must see what is written."""
    x, delta = (tf.cast(a, dtype) for a in ARRAYS)
    v = tf.function(lambda x, delta: ca.perturb(x, delta, 0.7), jit_compile=jit)(x, delta)
    assert v.dtype == dtype
    norms = norm64(v.numpy().astype(float), x.numpy().astype(float), 2)
    expected = norm64(ca.perturb(x.numpy(), delta.numpy(), 0.7).astype(float), x.numpy().astype(float), 2)
    assert (abs(norms - 0.7) <= abs(expected - 0.7) * 1.01 + 1e-7).all()


def test_rounded_is_what_a_cast_does():
    every = np.arange(0, 2**31, 9973, dtype=np.uint32).view(np.float32)
    for dtype, largest in ((tf.float16, 65504.0), (tf.bfloat16, 3.3e38)):
        v = every[(every <= largest) & ((every >= 2.0**-118) | (every == 0))]
        v = tf.constant(np.concatenate([v, -v]))
        np.testing.assert_array_equal(backend._rounded(v, dtype), tf.cast(tf.cast(v, dtype), tf.float32))


@pytest.mark.parametrize("dtype", ["float32", *in_test_all("bfloat16")])
def test_at_most_is_a_promise_in_a_graph(dtype):
    x, delta = (tf.cast(a, dtype) for a in ARRAYS)
    v = tf.function(lambda x, delta: ca.perturb(x, delta, EPS, mode="at_most"))(x, delta)
    norms = norm64(v.numpy().astype(float), x.numpy().astype(float), 2)
    assert (norms <= EPS).all()
    assert (norms > EPS * (1 - (1e-6 if dtype == "float32" else 1e-3))).all()


@pytest.mark.long
def test_at_most_is_a_promise_of_code_that_xla_optimises():
    """Unlike the others here: then a product and a sum may be rounded once, and elsewhere in the program separately."""
    code = """if True:
    import numpy as np, tensorflow as tf, clipaware as ca
    from clipaware.reference import norm64
    rng = np.random.default_rng(0)
    x, delta = rng.random((2560, 2), np.float32), rng.standard_normal((2560, 2), np.float32)
    perturb = tf.function(lambda x, delta: ca.perturb(x, delta, 0.3, p=4, mode="at_most"), autograph=False)
    v = perturb(tf.constant(x), tf.constant(delta)).numpy()
    norms, plain = (norm64(a.astype(float), x.astype(float), 4) for a in (v, np.clip(x + delta, 0, 1)))
    assert (norms <= 0.3).all(), (norms > 0.3).sum()
    assert (norms >= np.minimum(0.3, plain) * (1 - 1e-6)).all()
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# --- dimensions that are not known ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(None, None), *in_test_all(((None, N),), ((ROWS, None),))])
def test_unknown_dimensions(shape):
    spec = tf.TensorSpec(shape, tf.float32)
    function = tf.function(
        lambda x, delta: gradients(lambda x, delta: ca.perturb(x, delta, EPS), [x, delta], tf.ones_like(x)),
        input_signature=[spec, spec],
    )
    assert_alike(function(*ARRAYS), gradients(lambda x, delta: ca.perturb(x, delta, EPS), ARRAYS, np.ones((ROWS, N))))
    if shape[0] is None:
        v, *_ = function(*(a[:1] for a in ARRAYS))
        np.testing.assert_allclose(v, ca.perturb(*(a[:1] for a in ARRAYS), EPS), atol=1e-6)
        assert all(a.shape == (0, N) for a in function(*(a[:0] for a in ARRAYS)))


@pytest.mark.long
@pytest.mark.parametrize("axis", ["batch", None, 1, -1, (0, 2)])
def test_unknown_dimensions_and_axes(axis):
    x, delta = (tf.reshape(a, (ROWS, 5, 6)) for a in ARRAYS)
    spec = tf.TensorSpec((None, None, 6), tf.float32)
    both = tf.function(
        lambda x, delta: (ca.perturb(x, delta, 0.5, axis=axis), ca.rescale(x, delta, 0.5, axis=axis)),
        input_signature=[spec, spec],
    )
    assert_alike(both(x, delta), (ca.perturb(x, delta, 0.5, axis=axis), ca.rescale(x, delta, 0.5, axis=axis)))


@pytest.mark.parametrize("bound", [(None, 1), *in_test_all(((None,),), ((None, None),), ((1, None),))])
@pytest.mark.parametrize("known", [False, *in_test_all(True)])
def test_eps_and_bounds_of_unknown_length(bound, known):
    """Whether x's own dimensions are known or not; a bound's unknown one may turn out to be 1."""
    shape = [length or full for length, full in zip(bound, (ROWS, N)[-len(bound) :], strict=True)]
    upper = tf.constant(rng.uniform(1.0, 1.2, shape), tf.float32)
    spec = tf.TensorSpec((ROWS, N) if known else (None, None), tf.float32)

    @tf.function(input_signature=[spec, spec, tf.TensorSpec((None,), tf.float64), tf.TensorSpec(bound, tf.float32)])
    def graph(x, delta, eps, upper):
        return gradients(lambda *a: ca.perturb(*a[:3], bounds=(0, a[3])), [x, delta, eps, upper], tf.ones_like(x))

    eps = tf.constant([EPS, 0.5, 0.1, 1.0], tf.float64)
    for some in (upper, upper[..., :1]):
        inputs = [*ARRAYS, eps, some]
        expected = gradients(lambda *a: ca.perturb(*a[:3], bounds=(0, a[3])), inputs, np.ones((ROWS, N)))
        assert_alike(graph(*inputs), expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("eps", [np.linspace(0.1, 2, 9), 0.0], ids=["each", "zero"])
def test_rows_that_fill_up_a_program_count_for_nothing(eps):
    """Nor do elements; 9 and 33 are lengths that no program is compiled for. Gradients of the bounds sum over rows, and
    so do those of one eps for all."""

    def function(x, delta, eps, lower, upper):
        return ca.perturb(x, delta, eps, bounds=(lower, upper))

    def both_orders(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            first = gradients(function, inputs, tf.ones_like(inputs[0]))
            total = tf.add_n([tf.reduce_sum(bar * bar) for bar in first])
        return [*first, *tape.gradient(total, inputs)]

    matrix, number = tf.TensorSpec((None, None), tf.float64), tf.TensorSpec((), tf.float64)
    signature = [matrix, matrix, tf.TensorSpec((None,), tf.float64) if np.ndim(eps) else number, number, number]
    given = rng.uniform(0.1, 0.9, (9, 33)), rng.standard_normal((9, 33)), eps, 0.1, 0.9
    inputs = [tf.constant(a, tf.float64) for a in given]
    assert_alike(tf.function(both_orders, input_signature=signature)(*inputs), both_orders(*inputs), 1e-10, 1e-10)


def test_a_wrong_length_is_found_when_the_graph_runs():
    spec = tf.TensorSpec((None, None), tf.float32)
    graph = tf.function(
        lambda x, eps: ca.perturb(x, x, eps), input_signature=[spec, tf.TensorSpec((None,), tf.float32)]
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        graph(ARRAYS[0], tf.ones(3))
    with pytest.raises(ValueError, match=r"eps has shape \(3, 3\), expected a number or shape \(\?,\) or \(\?, 1\)"):
        tf.function(lambda x: ca.perturb(x, x, np.ones((3, 3))), input_signature=[spec])(ARRAYS[0])


@pytest.mark.parametrize("unknown", ["x", "delta", "eps", "lower", "upper", "grad"])
def test_an_unknown_number_of_axes(unknown):
    """What came, what was expected and what to do about it, in our words."""
    given = {"x": X, "delta": D, "eps": np.full(ROWS, EPS), "lower": np.zeros(N), "upper": np.ones(N), "grad": G}
    specs = [tf.TensorSpec(None if name == unknown else a.shape, tf.float64) for name, a in given.items()]

    @tf.function(input_signature=specs)
    def graph(x, delta, eps, lower, upper, grad):
        return ca.perturb_vjp(x, delta, eps, grad, bounds=(lower, upper))

    message = r"a tensor of unknown rank came, expected one whose number of axes is known: tf\.ensure_shape"
    with pytest.raises(ValueError, match=message):
        graph(*given.values())


def test_one_trace_for_every_eps():
    traces = []

    @tf.function
    def function(x, delta, eps):
        traces.append(eps)
        return ca.perturb(x, delta, eps)

    for eps in (0.1, 0.5, 2.0):
        v = function(*ARRAYS, tf.constant(eps))
        np.testing.assert_allclose(norm64(v.numpy().astype(float), ARRAYS[0].numpy().astype(float), 2), eps, rtol=3e-7)
    assert len(traces) == 1


# --- bad values -------------------------------------------------------------------------------------------------------


def test_nan_in_delta_makes_its_row_nan():
    """XLA's maxima lose it."""
    delta = np.full((4, 6), 1e-5)
    delta[1, 0] = np.nan
    v = tf.function(lambda x, delta: ca.perturb(x, delta, 5e-3, p=np.inf))(
        tf.fill((4, 6), 0.5), tf.constant(delta, "float32")
    )
    np.testing.assert_array_equal(np.isnan(v).all(axis=1), [False, True, False, False])


def test_bad_rows_become_nan_in_a_graph_and_others_do_not():
    x, delta, eps = X.copy(), D.copy(), np.array([EPS, EPS, -1.0, EPS])
    x[0, 3], delta[1, 5] = np.nan, np.inf
    inputs = [tf.constant(x), tf.constant(delta), tf.constant(eps)]
    graph = tf.function(lambda *inputs: gradients(ca.perturb, inputs, G))
    expected = gradients(ca.perturb, [a[3:] for a in inputs], G[3:])
    for found, right in zip(graph(*inputs), expected, strict=True):
        assert np.isnan(found[:3]).all()
        np.testing.assert_allclose(found[3:], right, rtol=1e-11, atol=1e-11)
    eta, reach = tf.function(lambda x, d, e: (ca.rescale(x, d, e), ca.reach(x, d)))(*inputs)
    np.testing.assert_array_equal(np.isnan(eta[:, 0]), [True, True, True, False])
    np.testing.assert_array_equal(np.isnan(reach[:, 0]), [True, True, False, False])


def test_x_outside_its_bounds_is_clipped_in_a_graph():
    x = tf.constant(X * 1.5)
    v = tf.function(lambda x, delta: ca.perturb(x, delta, EPS))(x, tf.constant(D))
    np.testing.assert_allclose(v, ca.perturb(np.clip(X * 1.5, 0, 1), D, EPS), atol=1e-12)


def test_unreachable_in_a_graph():
    with pytest.raises(ValueError, match=r"not known under tf\.function"):
        tf.function(lambda x, delta: ca.perturb(x, delta, EPS, unreachable="raise"))(*ARRAYS)
    eps = tf.constant([EPS, 100.0, EPS, EPS])
    v, *bars = tf.function(
        lambda *inputs: gradients(lambda *inputs: ca.perturb(*inputs, unreachable="nan"), inputs, G)
    )(*ARRAYS, eps)
    np.testing.assert_array_equal(np.isnan(v).all(axis=1), [False, True, False, False])
    assert not any(bar[1].numpy().any() for bar in bars)


def test_what_is_not_a_dense_tensor_of_numbers_is_refused():
    x = ARRAYS[0]
    for bad in (tf.ragged.constant([[0.1], [0.2, 0.3]]), tf.sparse.from_dense(x)):
        with pytest.raises(TypeError, match="x is a tensorflow"):
            ca.perturb(bad, bad, 0.1)
        with pytest.raises(TypeError, match="delta is a tensorflow"):
            ca.perturb(x, bad, 0.1)
    for bad in (tf.constant([["a"]]), tf.constant([[1]]), tf.constant([[1 + 1j]])):
        with pytest.raises(TypeError, match="x has dtype"):
            ca.perturb(bad, bad, 0.1)
    with pytest.raises(TypeError, match="delta is a numpy array, expected a tensorflow array"):
        ca.perturb(x, D, 0.1)


@pytest.mark.parametrize("upper", [8e-39, np.full(4, 8e-39), np.full((1, 1), 8e-39)], ids=["number", "row", "column"])
def test_subnormal_bounds_of_bfloat16(upper):
    """To TensorFlow's own casts they are 0, and x would be outside of them."""
    x, delta = (np.array(a, NUMPY_DTYPES["bfloat16"]) for a in ([[6e-39] * 4], [[1, -1, 2, 0.5]]))
    v = ca.perturb(tf.constant(x), tf.constant(delta), 1.0, bounds=(0 * upper, upper))
    np.testing.assert_array_equal(v.numpy(), np.where(delta > 0, x.dtype.type(8e-39), x * 0))


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "graph"), [(1.5, False), *in_test_all((1.5, True), (2, False), (2, True), (3, True), (3, False))]
)
def test_second_order(p, graph):
    """Of sum(g*v^2) in x, delta and eps at once, against PyTorch and against differences of the first order."""
    n = 6
    point = np.concatenate([X[0, :n], D[0, :n], [0.6]])
    g = G[0, :n]

    def loss(z, square):
        return square(ca.perturb(z[:n], z[n:-1], z[-1], p=p, axis=None))

    def slope(z):
        with tf.GradientTape() as tape:
            tape.watch(z)
            value = loss(z, lambda v: tf.reduce_sum(g * v * v))
        return tape.gradient(value, z)

    def hessian(z):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(z)
            first = slope(z)
        return outer.jacobian(first, z, experimental_use_pfor=False)

    found = (tf.function(hessian) if graph else hessian)(tf.constant(point)).numpy()
    torch_g = torch.from_numpy(g)
    expected = torch.autograd.functional.hessian(
        lambda z: loss(z, lambda v: (torch_g * v * v).sum()), torch.from_numpy(point)
    )
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9, atol=1e-10)
    h = 1e-6
    for column, axis in enumerate(np.eye(len(point)) * h):
        difference = (slope(tf.constant(point + axis)) - slope(tf.constant(point - axis))) / (2 * h)
        np.testing.assert_allclose(found[:, column], difference, rtol=1e-5, atol=1e-6)


def test_second_order_is_finite_in_edge_cases():
    inputs = [tf.constant(a) for a in (EDGY_X, EDGY_D, EDGY_EPS)]
    for p in (1, 1.5, 2, 3, math.inf):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                v = ca.perturb(*inputs, p=p)
                loss = tf.reduce_sum(v * v)
            total = tf.add_n([tf.reduce_sum(bar * bar) for bar in tape.gradient(loss, inputs)])
        assert all(np.isfinite(bar).all() for bar in outer.gradient(total, inputs))


def test_a_persistent_tape_and_gradients_of_eta():
    x, delta = (tf.constant(a) for a in (X, D))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, delta])
        v, eta, reach = ca.perturb(x, delta, EPS), ca.rescale(x, delta, EPS), ca.reach(x, delta)
    first = tape.gradient(v, [x, delta], G)
    assert_alike(tape.gradient(v, [x, delta], G), first, 0, 0)
    tensors = [torch.tensor(a, requires_grad=True) for a in (X, D)]
    ca.rescale(*tensors, EPS).sum().backward()
    for bar, tensor in zip(tape.gradient(eta, [x, delta]), tensors, strict=True):
        np.testing.assert_allclose(bar, tensor.grad.numpy(), rtol=1e-10, atol=1e-12)
    assert tape.gradient(reach, [x, delta]) == [None, None]


@pytest.mark.parametrize("graph", [False, True])
def test_perturb_vjp(graph):
    function = tf.function(ca.perturb_vjp) if graph else ca.perturb_vjp
    for found, expected in zip(
        function(tf.constant(X), tf.constant(D), tf.constant(EPS, tf.float64), tf.constant(G)),
        ca.perturb_vjp(X, D, np.array(EPS), G),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


# --- at work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_variables(make):
    x, delta, eps, upper = make(ARRAYS[0]), make(ARRAYS[1]), make(tf.constant(EPS)), make(tf.constant(1.0))
    values = [tf.Variable, keras.Variable].index(make)

    def function():
        with tf.GradientTape() as tape:
            v = ca.perturb(x, delta, eps, bounds=(0, upper))
        variables = [a.value if values else a for a in (x, delta, eps, upper)]
        return [v, *tape.gradient(v, variables, tf.cast(G, tf.float32))]

    expected = gradients(
        lambda *a: ca.perturb(*a[:3], bounds=(0, a[3])), [*ARRAYS, tf.constant(EPS), tf.constant(1.0)], G
    )
    assert isinstance(function()[0], tf.Tensor)
    assert_alike(function(), expected)
    assert_alike(tf.function(function)(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", *in_test_all("float16")])
def test_mixed_precision(dtype):
    """The gradient of a half-precision result, computed in float32, to float32 weights."""
    weights = tf.Variable(ARRAYS[1])

    def function(x):
        with tf.GradientTape() as tape:
            v = ca.perturb(tf.cast(x, dtype), tf.cast(weights, dtype), EPS)
            loss = tf.reduce_sum(tf.cast(v, tf.float32) * tf.cast(G, tf.float32))
        return v, tape.gradient(loss, weights)

    eager, graph = function(ARRAYS[0]), tf.function(function)(ARRAYS[0])
    assert eager[0].dtype == graph[0].dtype == dtype
    assert eager[1].dtype == graph[1].dtype == tf.float32
    assert_alike(graph, eager, atol=2.0**-7)


class Noise(keras.layers.Layer):
    """Adds a learned direction of a fixed norm."""

    def build(self, shape):
        self.direction = self.add_weight(shape=shape[1:], initializer="random_normal", name="direction")

    def call(self, x):
        delta = tf.broadcast_to(tf.cast(self.direction, x.dtype), tf.shape(x))
        return ca.perturb(x, tf.ensure_shape(delta, x.shape), 0.5)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_keras_model_trains(policy, jit):
    keras.utils.set_random_seed(0)
    noise = Noise(dtype=policy)
    model = keras.Sequential([keras.Input((N,)), noise, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
    before = noise.direction.numpy().copy()
    history = model.fit(X.astype(np.float32), X[:, :1].astype(np.float32), epochs=2, batch_size=ROWS, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert (noise.direction.numpy() != before).all()


@pytest.mark.long
def test_a_map_over_a_data_set():
    data = tf.data.Dataset.from_tensor_slices(tuple(ARRAYS)).batch(3)
    batches = list(data.map(lambda x, delta: ca.perturb(x, delta, EPS), num_parallel_calls=2))
    assert [len(batch) for batch in batches] == [3, 1]
    np.testing.assert_allclose(tf.concat(batches, 0), ca.perturb(*ARRAYS, EPS), atol=1e-6)


def test_a_saved_model(tmp_path):
    module = tf.Module()
    spec = tf.TensorSpec((None, N), tf.float32)
    module.perturb = tf.function(lambda x, delta: ca.perturb(x, delta, EPS), input_signature=[spec, spec])
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert_alike(gradients(loaded.perturb, ARRAYS, G), gradients(module.perturb, ARRAYS, G))


@pytest.mark.long
def test_report_in_a_graph():
    def report(x, delta):
        found = ca.report(x, delta, EPS)
        return found.eta, found.norm, found.naive_norm, found.reach, found.clipped, found.reachable

    x, delta = ARRAYS
    # From the second on, the solver is a program for all lengths, and no longer knows that of v.
    for columns in (2, 3, 4):
        tf.function(ca.perturb)(x[:, :columns], delta[:, :columns], 0.1)
    for found, expected in zip(tf.function(report)(x, delta), report(x, delta), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
