"""JAX's own transformations, alone and nested; 32 bits and 64; what a trace cannot know."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

import clipaware as ca
from clipaware.reference import directions, norm64
from promises import assert_norm
from tiers import in_test_all

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp, lax = jax.numpy, jax.lax
from clipaware._backends import jax as backend  # noqa: E402

ORDERS = [1, 1.5, 2, 3, math.inf]


def problem(rows=4, n=30, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    x, delta = rng.uniform(0.05, 0.95, (rows, n)), rng.standard_normal((rows, n))
    eps = 0.5 * ca.reach(x, delta)[:, 0] * np.linspace(0.2, 1.6, rows)
    return jnp.asarray(x, dtype), jnp.asarray(delta, dtype), jnp.asarray(eps, dtype), rng.standard_normal((rows, n))


@pytest.mark.parametrize(
    ("p", "mode"),
    [
        *((p, "equal") for p in ORDERS),
        (2, "at_most"),
        (1.5, "at_least"),
        *in_test_all(*((p, mode) for p in (1, 3, math.inf) for mode in ("at_most", "at_least"))),
    ],
)
def test_jit_is_as_eager(p, mode):
    x, delta, eps, _ = problem()
    for function in (ca.perturb, ca.rescale):
        jitted = jax.jit(lambda x, delta, eps: function(x, delta, eps, p=p, mode=mode))  # noqa: B023
        np.testing.assert_allclose(jitted(x, delta, eps), function(x, delta, eps, p=p, mode=mode), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(lambda *a: ca.reach(*a, p=p))(x, delta), ca.reach(x, delta, p=p), rtol=1e-14)


@pytest.mark.parametrize("p", [1.5, math.inf, *in_test_all(1, 2, 3)])
def test_gradients_in_a_trace(p):
    x, delta, eps, g = problem()
    lower, upper = jnp.full((30,), -0.1), jnp.full((4, 1), 1.1)

    def loss(x, delta, eps, lower, upper):
        return (ca.perturb(x, delta, eps, p=p, bounds=(lower, upper)) * g).sum()

    arguments = x, delta, eps, lower, upper
    expected = ca.perturb_vjp(
        *map(np.asarray, (x, delta, eps)), g, p=p, bounds=(np.full(30, -0.1), np.full((4, 1), 1.1))
    )
    value, found = jax.jit(jax.value_and_grad(loss, argnums=range(5)))(*arguments)
    np.testing.assert_allclose(value, loss(*arguments), rtol=1e-12)
    for bar, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(bar, theirs, rtol=1e-9, atol=1e-12)
    # Forward mode and reverse mode are each other's transposes.
    tangents = [jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(arguments)]
    _, forward = jax.jit(lambda *a: jax.jvp(loss, a, tuple(tangents)))(*arguments)
    np.testing.assert_allclose(forward, sum((b * t).sum() for b, t in zip(found, tangents, strict=True)), rtol=1e-9)


@pytest.mark.parametrize("p", [1.5, *in_test_all(2, 3)])
def test_second_derivatives(p):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, delta, eps, g = problem(rows=1, n=6)

    def loss(module, x, delta, eps, g):
        return (ca.perturb(x, delta, eps, p=p) ** 3 * g).sum()

    found = jax.hessian(lambda delta, eps: loss(jnp, x, delta, eps, g), argnums=(0, 1))(delta, eps)
    tx, td, te, tg = (torch.tensor(np.asarray(a)) for a in (x, delta, eps, g))
    expected = torch.autograd.functional.hessian(lambda delta, eps: loss(torch, tx, delta, eps, tg), (td, te))
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-8, atol=1e-9)
    # Reverse over reverse, reverse over forward.
    gradient = jax.grad(lambda delta: loss(jnp, x, delta, eps, g))
    for jacobian in (jax.jacrev(gradient), jax.jacfwd(gradient), jax.jit(jax.jacrev(gradient))):
        np.testing.assert_allclose(jacobian(delta), found[0][0], rtol=1e-8, atol=1e-9)


def test_derivatives_of_tangents():
    x, delta, eps, g = problem(n=6)
    turn, change = jnp.asarray(g), jnp.linspace(-0.1, 0.1, 4)

    def loss(delta, eps):
        return (ca.perturb(x, delta, eps) ** 3).sum() + (ca.rescale(x, delta, eps) ** 2).sum()

    def along(delta, eps):
        return jax.jvp(loss, (delta, eps), (turn, change))[1]

    def product(delta, eps):
        """The Hessian with that tangent, by forward over reverse."""
        return jax.jvp(jax.grad(loss, argnums=(0, 1)), (delta, eps), (turn, change))[1]

    expected = product(delta, eps)
    # Reverse over forward; the tangent's own gradient is zero elsewhere.
    for found in (jax.grad(along, argnums=(0, 1))(delta, eps), jax.jit(jax.grad(along, argnums=(0, 1)))(delta, eps)):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-9)
    # Forward over forward.
    curvature = jax.jvp(along, (delta, eps), (turn, change))[1]
    np.testing.assert_allclose(curvature, (expected[0] * turn).sum() + (expected[1] * change).sum(), rtol=1e-8)
    # In the tangent alone it is linear, and its own derivative.
    of_tangent = jax.jvp(lambda t: jax.jvp(lambda d: ca.perturb(x, d, eps), (delta,), (t,))[1], (turn,), (turn,))
    np.testing.assert_allclose(*of_tangent, rtol=1e-12)


@pytest.mark.parametrize("p", [2, *in_test_all(math.inf)])
@pytest.mark.parametrize(
    "axes",
    [
        (0, 0, 0, 0, 0),
        (0, None, 0, None, 0),
        *in_test_all(((None, 0, None, None, None),), ((None, None, 0, 0, None),)),
    ],
)
def test_derivatives_under_vmap(axes, p):
    x, delta, eps, g = problem(rows=12)
    arguments = [x.reshape(3, 4, 30), delta.reshape(3, 4, 30), eps.reshape(3, 4)]
    arguments += [jnp.linspace(-0.3, 0, 3), jnp.linspace(1, 1.2, 90).reshape(3, 30)]
    arguments = [a if axis == 0 else a[0] for a, axis in zip(arguments, axes, strict=True)]
    tangents = [jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(arguments)]
    weights = jnp.asarray(g.reshape(3, 4, 30))

    def loss(weights, *a):
        return (ca.perturb(*a[:3], p=p, bounds=a[3:]) * weights).sum()

    def apart(arrays, i):
        return [a[i] if axis == 0 else a for a, axis in zip(arrays, axes, strict=True)]

    gradient = jax.grad(loss, argnums=range(1, 6))
    expected = [gradient(weights[i], *apart(arguments, i)) for i in range(3)]
    each = jax.jit(jax.vmap(gradient, in_axes=(0, *axes)))(weights, *arguments)
    total = jax.grad(lambda *a: jax.vmap(loss, in_axes=(0, *axes))(weights, *a).sum(), argnums=range(5))(*arguments)
    for bars, mine, summed, axis in zip(zip(*expected, strict=True), each, total, axes, strict=True):
        np.testing.assert_allclose(mine, jnp.stack(bars), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(summed, jnp.stack(bars) if axis == 0 else sum(bars), rtol=1e-9, atol=1e-12)
    forward = jax.vmap(lambda w, a, t: jax.jvp(lambda *a: loss(w, *a), a, t)[1], in_axes=(0, axes, axes))
    moved = [sum((b * t).sum() for b, t in zip(expected[i], apart(tangents, i), strict=True)) for i in range(3)]
    np.testing.assert_allclose(forward(weights, tuple(arguments), tuple(tangents)), moved, rtol=1e-8)


def test_tangents_under_vmap_over_the_last_axis():
    x, delta, eps, g = problem(rows=4)
    arrays = [jnp.stack([a, a[::-1], a[:, ::-1]]) for a in (x, delta, g)]

    def along(x, delta, turn):
        return jax.jvp(lambda delta: ca.perturb(x, delta, eps), (delta,), (turn,))[1]

    expected = jnp.stack([along(*a) for a in zip(*arrays, strict=True)])
    found = jax.vmap(along, in_axes=2)(*(jnp.moveaxis(a, 0, 2) for a in arrays))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3])
def test_jacobians(rows):
    """Many tangents, or cotangents, of one problem."""
    x, delta, eps, _ = problem(rows=rows, n=5)
    for function in (ca.perturb, ca.rescale):
        forward, backward = (
            jax.jit(transform(function, argnums=(1, 2)))(x, delta, eps) for transform in (jax.jacfwd, jax.jacrev)
        )
        for mine, theirs in zip(forward, backward, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 59, 60, 61, 119, 121, 727, 784, 4999])
def test_reductions(n):
    """By parts and halves, whatever is left over."""
    a, b = np.random.default_rng(n).standard_normal((2, 3, n)).astype("float32")
    exact = [c.sum(axis=1, keepdims=True, dtype=float) for c in (a, b)]
    np.testing.assert_allclose(backend.row_sum(jnp.asarray(a)), exact[0], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(backend.two_row_sums(jnp.asarray(a), jnp.asarray(b)), exact, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(backend.row_max(jnp.asarray(abs(a))), abs(a).max(axis=1, keepdims=True))
    for where in {0, n // 2, n - 1}:
        a[1, where] = np.nan
        assert np.isnan(backend.row_max(jnp.asarray(abs(a)))[1, 0])
        a[1, where] = 100
        assert backend.row_max(jnp.asarray(abs(a)))[1, 0] == 100


def test_vmap_over_everything():
    x, delta, eps, _ = problem(rows=12)
    x, delta, eps = x.reshape(3, 4, 30), delta.reshape(3, 4, 30), eps.reshape(3, 4)
    lower, upper = jnp.linspace(-0.3, 0, 3), jnp.linspace(1, 1.2, 90).reshape(3, 30)

    def one(x, delta, eps, lower, upper):
        return ca.perturb(x, delta, eps, bounds=(lower, upper))

    expected = jnp.stack([one(*a) for a in zip(x, delta, eps, lower, upper, strict=True)])
    for transformed in (jax.vmap(one), jax.jit(jax.vmap(one))):
        np.testing.assert_allclose(transformed(x, delta, eps, lower, upper), expected, rtol=1e-12)
    for axes in ((0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (None, 0, 0), (1, 1, 1)):
        given = [a if axis is not None else a[0] for a, axis in zip((x, delta, eps), axes, strict=True)]
        moved = [a if axis != 1 else jnp.swapaxes(a, 0, 1) for a, axis in zip(given, axes, strict=True)]
        found = jax.vmap(ca.perturb, in_axes=axes)(*moved)
        for i in range(3):
            alone = [a if axis is None else a[i] for a, axis in zip(given, axes, strict=True)]
            np.testing.assert_allclose(found[i], ca.perturb(*alone), rtol=1e-12)
    # One picture at a time, twice nested.
    whole = jax.vmap(jax.vmap(lambda x, delta, eps: ca.perturb(x, delta, eps, axis=None)))
    np.testing.assert_allclose(
        whole(x, delta, eps), ca.perturb(x.reshape(12, 30), delta.reshape(12, 30), eps.ravel()).reshape(3, 4, 30)
    )
    # Gradients per sample.
    per_sample = jax.vmap(jax.grad(lambda d, x, e: (ca.perturb(x, d, e, axis=None) ** 2).sum()))
    expected = jax.grad(lambda d: (ca.perturb(x[0], d, eps[0]) ** 2).sum())(delta[0])
    np.testing.assert_allclose(per_sample(delta[0], x[0], eps[0]), expected, rtol=1e-9, atol=1e-12)


def test_vmap_runs_one_program():
    """Under vmap conditions would become selections, and every branch would run."""
    x, delta, eps, _ = problem()
    text = str(jax.make_jaxpr(jax.vmap(lambda x, d, e: ca.perturb(x, d, e, axis=None)))(x, delta, eps))
    assert "cond[" in text
    assert "while[" in text


def test_scan_checkpoint_and_map():
    x, delta, eps, g = problem()

    def walk(x, delta):
        return lax.scan(lambda v, d: (ca.perturb(v, d, 0.3), None), x, delta)[0]

    steps = jnp.stack([delta, -delta, delta[::-1]])
    expected = x
    for step in steps:
        expected = ca.perturb(expected, step, 0.3)
    np.testing.assert_allclose(walk(x, steps), expected, rtol=1e-12)

    def unrolled(x, steps):
        for step in steps:
            x = ca.perturb(x, step, 0.3)
        return x

    for function in (walk, jax.checkpoint(walk), jax.jit(jax.checkpoint(unrolled))):
        found = jax.grad(lambda s: (function(x, s) * g).sum())(steps)  # noqa: B023
        np.testing.assert_allclose(found, jax.grad(lambda s: (unrolled(x, s) * g).sum())(steps), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(
        lax.map(lambda a: ca.perturb(*a, axis=None), (x, delta, eps)), ca.perturb(x, delta, eps), rtol=1e-12
    )


def test_nothing_calls_the_host():
    x, delta, eps, _ = problem()
    loss = jax.value_and_grad(lambda d: ca.perturb(x, d, eps).sum())
    for traced in (jax.jit(ca.perturb).trace(x, delta, eps), jax.jit(loss).trace(delta)):
        assert "callback" not in str(traced.jaxpr)
        assert "callback" not in traced.lower().as_text()


def test_no_recompilation_for_another_eps():
    x, delta, _, _ = problem(n=31)
    count = []

    @jax.jit
    def f(x, delta, eps, low):
        count.append(1)
        return ca.perturb(x, delta, eps, bounds=(low, 1))

    for eps in (0.1, 0.2, 0.3):
        v = f(x, delta, eps, -eps)
        np.testing.assert_allclose(norm64(v, x), eps, rtol=1e-12)
    assert len(count) == 1


def test_no_recompilation_outside_a_trace(monkeypatch):
    """As on an accelerator, where arrays go to the program although nothing is traced."""
    monkeypatch.setattr(backend, "_at_hand", lambda *arrays: False)
    x, delta, _, _ = problem(n=37)
    before = backend._solved._cache_size()
    for eps in (0.1, 0.2, np.full(4, 0.3)[0]):
        ca.perturb(x, delta, eps, bounds=(-eps, 1 + eps))
    assert backend._solved._cache_size() == before + 1


def test_static_eps_and_bounds_in_a_trace():
    x, delta, _, _ = problem()
    for eps, bounds in ((0.5, (0, 1)), (np.full(4, 0.5), (None, np.ones(30))), (np.float32(0.5), (-1, math.inf))):
        found = jax.jit(lambda x, d: ca.perturb(x, d, eps, bounds=bounds))(x, delta)  # noqa: B023
        np.testing.assert_allclose(found, ca.perturb(x, delta, eps, bounds=bounds), rtol=1e-12)


def test_nan_in_delta_makes_its_row_nan_for_any_number_of_rows():
    """XLA's maxima lose it in large batches."""
    f = jax.jit(lambda x, delta: ca.perturb(x, delta, 5e-3, p=np.inf, mode="at_most"))
    for rows in (3, 4000):
        delta = np.full((rows, 6), 1e-5)
        delta[1, 0] = np.nan
        v = np.asarray(f(jnp.full((rows, 6), 0.5), jnp.asarray(delta)))
        np.testing.assert_array_equal(np.isnan(v).all(axis=1), np.arange(rows) == 1)


def test_bad_values_in_a_trace_make_their_row_nan():
    x, delta, eps, _ = problem()
    f = jax.jit(lambda *a: ca.perturb(a[0], a[1], a[2], bounds=(a[3], 1)))
    fine = np.asarray(f(x, delta, eps, 0.0))
    for bad in (
        (x.at[1, 2].set(jnp.nan), delta, eps),
        (x, delta.at[1, 3].set(jnp.inf), eps),
        (x, delta, eps.at[1].set(-1)),
    ):
        v = np.asarray(f(*bad, 0.0))
        assert np.isnan(v[1]).all()
        np.testing.assert_allclose(v[[0, 2, 3]], fine[[0, 2, 3]], rtol=1e-12)
    assert np.isnan(f(x, delta, eps, 2.0)).all()
    # x outside of its bounds is clipped first.
    np.testing.assert_allclose(f(x.at[0, 0].set(7.0), delta, eps, 0.0), f(x.at[0, 0].set(1.0), delta, eps, 0.0))
    # No gradient in that row, that of the others as it was.
    gradient = jax.jit(jax.grad(lambda d, x: (ca.perturb(x, d, eps) ** 2).sum()))
    lost, whole = gradient(delta, x.at[1, 2].set(jnp.nan)), gradient(delta, x)
    assert np.isnan(lost[1]).all()
    np.testing.assert_allclose(lost[jnp.array([0, 2, 3])], whole[jnp.array([0, 2, 3])], rtol=1e-9)


def test_unreachable_in_a_trace():
    x, delta, _, _ = problem()
    with pytest.raises(
        ValueError, match=r'unreachable is "raise", which needs values that are not known under jax.jit'
    ):
        jax.jit(lambda x, d: ca.perturb(x, d, 100.0, unreachable="raise"))(x, delta)
    v = jax.jit(lambda x, d, e: ca.perturb(x, d, e, unreachable="nan"))(x, delta, jnp.array([0.1, 100, 0.1, 0.1]))
    np.testing.assert_array_equal(np.isnan(v).all(axis=1), [False, True, False, False])


def test_report_in_a_trace():
    x, delta, eps, _ = problem()
    expected, found = ca.report(x, delta, eps), jax.jit(ca.report)(x, delta, eps)
    assert isinstance(found, ca.Report)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert str(found).splitlines()[0].split()[:2] == ["sample", "eps"]


@pytest.mark.parametrize("traced", [True, *in_test_all(False)])
def test_without_x64(traced, monkeypatch):
    """float32 all around, and as exact as it is with x64: inside, sums are float64 all the same."""
    with jax.enable_x64(False):
        rng = np.random.default_rng(0)
        for n in (1, 784, 150_528):
            x = rng.random((15, n)).astype("float32")
            kinds = "gaussian", "tied", "lognormal"
            delta = np.concatenate([directions(kind, 5, n, 0) for kind in kinds]).astype("float32")
            tied = np.repeat([kind == "tied" for kind in kinds], 5)
            for p in (1, 2, 2.7, math.inf) if n == 784 else (2,):
                eps = ca.reach(x, delta, p=p)[:, 0].astype(float) * np.tile([0.02, 0.3, 0.7, 0.99, 0.9995], 3)
                some, eps = eps > 0, np.where(eps > 0, eps, 0.1)
                f = lambda x, d, e, p=p: ca.perturb(x, d, e, p=p)  # noqa: E731
                v = (jax.jit(f) if traced else f)(jnp.asarray(x), jnp.asarray(delta), jnp.asarray(eps, jnp.float32))
                assert v.dtype == jnp.float32
                assert_norm(np.asarray(v)[some], x[some], eps[some], p, tied[some])
        for dtype in (jnp.float16, jnp.bfloat16):
            x, delta = jnp.full((2, 50), 0.5, dtype), jnp.linspace(-1, 1, 100).reshape(2, 50).astype(dtype)
            v = jax.jit(lambda x, d: ca.perturb(x, d, 1.5))(x, delta)
            assert v.dtype == dtype
            np.testing.assert_allclose(norm64(v.astype(jnp.float32), x.astype(jnp.float32)), 1.5, rtol=3e-4)
            np.testing.assert_array_equal(v, ca.perturb(x, delta, 1.5))


@pytest.mark.long
def test_transformations_without_x64():
    with jax.enable_x64(False):
        x, delta, eps, g = problem(dtype="float32", n=40)
        wide = [np.asarray(a, float) for a in (x, delta, eps)]
        expected = ca.perturb_vjp(*wide, g)
        loss = lambda x, d, e: (ca.perturb(x, d, e) * g.astype("float32")).sum()  # noqa: E731
        for transformed in (jax.grad(loss, (0, 1, 2)), jax.jit(jax.grad(loss, (0, 1, 2)))):
            for mine, theirs in zip(transformed(x, delta, eps), expected, strict=False):
                assert mine.dtype == jnp.float32
                np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)
        curvature = jax.jit(jax.hessian(lambda d: (ca.perturb(x[:1, :6], d, eps[:1]) ** 3).sum()))(delta[:1, :6])
        assert curvature.dtype == jnp.float32
        assert np.isfinite(curvature).all()
        assert jax.vmap(lambda x, d: ca.rescale(x, d, 0.5, axis=None))(x, delta).dtype == jnp.float32
        v, _ = lax.scan(lambda v, d: (ca.perturb(v, delta, d), None), x, eps)
        assert v.dtype == jnp.float32
        found = jax.jit(jax.grad(jax.checkpoint(lambda d: ca.perturb(x, d, eps).sum())))(delta)
        assert found.dtype == jnp.float32


def test_x64_inside_of_a_trace_without():
    """JAX compiles after the context has ended in which it traced."""
    x, delta, eps, g = problem()
    wide = [np.asarray(a) for a in (x, delta, eps)]
    expected = jax.jvp(lambda d: ca.perturb(x, d, eps), (delta,), (jnp.asarray(g),))[1]

    def inside(scale):
        with jax.enable_x64(True):
            x, delta, eps = map(jnp.asarray, wide)
            v_dot = jax.jvp(lambda d: ca.perturb(x, d, eps), (delta,), (jnp.asarray(g) * scale,))[1]
            assert v_dot.dtype == jnp.float64
            return v_dot.astype(jnp.float32)

    with jax.enable_x64(False):
        found = jax.jit(inside)(1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-34, 1e30, *in_test_all(1e-20)])
def test_scales_without_x64(scale):
    """eta is not in float32's range, its gradients are finite."""
    with jax.enable_x64(False):
        x, delta, eps, _ = problem(dtype="float32")
        scaled = jnp.asarray((np.asarray(delta, float) * scale).astype("float32"))
        for transform in (lambda f: f, jax.jit):
            v = transform(ca.perturb)(x, scaled, eps)
            np.testing.assert_allclose(norm64(v, x), eps, rtol=1e-6)
            x_bar = transform(jax.grad(lambda x: (ca.perturb(x, scaled, eps) ** 2).sum()))(x)
            reference = jax.grad(lambda x: (ca.perturb(x, delta, eps) ** 2).sum())(x)
            np.testing.assert_allclose(x_bar, reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("eps", [0.7, 0.8, 1.1])  # float32 has 0.69999999, 0.80000001 and 1.10000002
@pytest.mark.parametrize("traced", [False, True])
def test_at_most_without_x64(traced, eps):
    with jax.enable_x64(False):
        rng = np.random.default_rng(0)
        x, delta = rng.random((2000, 40)).astype("float32"), rng.standard_normal((2000, 40)).astype("float32")
        f = lambda x, d: ca.perturb(x, d, eps, mode="at_most")  # noqa: E731
        v = np.asarray((jax.jit(f) if traced else f)(jnp.asarray(x), jnp.asarray(delta)), float)
        norms = np.linalg.norm(v - x, axis=1)
        assert (norms <= eps).all()
        assert (norms > eps * (1 - 1e-6)).all()


@pytest.mark.parametrize(
    ("dtype", "p"),
    [("float16", 2), *in_test_all(("bfloat16", math.inf), ("float16", 1), ("float16", math.inf), ("bfloat16", 2))],
)
def test_half_precision_gradients(dtype, p):
    x, delta, _, g = problem(dtype=dtype)
    found = jax.jit(jax.grad(lambda d: (ca.perturb(x, d, 0.5, p=p) * g.astype(dtype)).astype("float32").sum()))(delta)
    assert found.dtype == dtype
    wide = [np.asarray(a, float) for a in (x, delta)]
    expected = ca.perturb_vjp(*wide, 0.5, np.asarray(jnp.asarray(g, dtype), float), p=p)[1]
    np.testing.assert_allclose(np.asarray(found, float), expected, rtol=0.03, atol=0.03 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "cases"),
    [
        ("(784, 5000)", '(0.01, 2, "equal"), (9.0, 2, "equal"), (3.0, 1, "at_most"), (3.0, 3, "equal")'),
    ],
)
def test_as_xla_compiles_by_default(lengths, cases):
    """The other tests do without XLA's optimisations; these change how arithmetic is rounded."""
    code = """if True:
    import jax, jax.numpy as jnp, numpy as np, clipaware as ca
    rng = np.random.default_rng(0)
    for n in LENGTHS:
        x, delta = rng.uniform(0.3, 0.7, (6, n)).astype("float32"), rng.standard_normal((6, n)).astype("float32")
        for dtype in ("float32", "bfloat16"):
            for eps, p, mode in (CASES,):
                X, D = jnp.asarray(x, dtype), jnp.asarray(delta, dtype)
                perturb = lambda x, d: ca.perturb(x, d, eps, p=p, mode=mode)
                norm, eager = (
                    (abs(np.asarray(f(X, D), float) - np.asarray(X, float)) ** p).sum(axis=1) ** (1 / p)
                    for f in (jax.jit(perturb), perturb)
                )
                # Twice: a product and a sum may be rounded once or separately, and not all rays are the same.
                assert (abs(norm - eps) <= 2 * abs(eager - eps) + 3e-7 * eps).all(), (n, dtype, eps, norm)
                assert mode == "equal" or (norm <= eps).all()
    """
    code = code.replace("LENGTHS", lengths).replace("CASES", cases)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.long
def test_quotients_that_xla_rearranges():
    """Of one over another it makes products, which overflow where delta spans hundreds of orders of magnitude."""
    x = np.array([[0.4, 0.15, 0.68, 0.41, 0.81, 0.65, 0.11]])
    delta = np.array([[2e216, -3.5e-18, -7.4e74, 7.1e108, 1.2e92, 1.1e187, -1.3e219]])
    with jax.enable_x64(True):
        for p in (1, 1.5, 4, 7.0):
            eps = 0.93 * ca.reach(x, delta, p=p)[:, 0]
            found = jax.jit(lambda x, delta, eps, p=p: ca.rescale(x, delta, eps, p=p))(x, delta, eps)
            np.testing.assert_allclose(found, ca.rescale(x, delta, eps, p=p), rtol=1e-12)


@pytest.mark.long
def test_two_devices():
    code = """if True:
    import jax, jax.numpy as jnp, clipaware as ca
    one, two = jax.devices()
    x, delta = jax.device_put(jnp.full((2, 3), 0.5), one), jax.device_put(jnp.ones((2, 3)), two)
    try:
        ca.perturb(x, delta, 0.1)
    except TypeError as error:
        print(error)
    # What JAX may move, it moves.
    print(ca.perturb(delta * 0.5, delta, jnp.asarray(0.1)).devices() == {two})
    """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["delta is on cpu:1, expected cpu:0 to match x", "True"]
