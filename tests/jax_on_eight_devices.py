"""What test_jax_sharding.py runs in a process with eight devices: checks by their names, given as arguments."""

from __future__ import annotations

import json
import math
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipaware as ca
from clipaware._backends import jax as backend
from clipaware._backends import jax_mesh

SPLIT = [("b",), (None, "f"), ("b", "f"), (("b", "f"),), (None, ("b", "f"))]
COLLECTIVE = re.compile(r"= (\S.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(")
BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}


def mesh(kind=AxisType.Auto, shape=(2, 4), names=("b", "f")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def spread(a, over, *axes):
    return jax.device_put(a, NamedSharding(over, PartitionSpec(*axes)))


def problem(shape=(16, 3072), dtype="float64", p=2, seed=0):
    rng = np.random.default_rng(seed)
    x, delta = rng.random(shape).astype(dtype), rng.standard_normal(shape).astype(dtype)
    return x, delta, 0.25 * ca.reach(x, delta, p=p).astype(float).ravel()


def collectives(function, *arguments):
    """Of a compiled program: each with the bytes that come of it on one device."""
    found = []
    for line in jax.jit(function).lower(*arguments).compile().as_text().splitlines():
        if match := COLLECTIVE.search(line):
            parts = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            found.append((match[2], sum(BYTES[t] * math.prod(map(int, filter(None, s.split(",")))) for t, s in parts)))
    return found


def assert_small(found, limit):
    for kind, size in found:
        assert kind in ("all-reduce", "all-gather"), kind
        assert size <= limit, (kind, size, limit)


ALL_CASES = ("float64", 2, SPLIT), ("float32", 2, SPLIT[2:3]), ("float64", math.inf, SPLIT[1:2])


def check_values(kind, cases=ALL_CASES):
    """Every way to split rows and samples, eager and compiled, against NumPy on the whole."""
    for dtype, p, split in cases:
        x, delta, eps = problem((16, 768), dtype, p)
        v, bars = ca.perturb(x, delta, eps, p=p), ca.perturb_vjp(x, delta, eps, x, p=p)
        close = {"rtol": 1e-6, "atol": 3e-7} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-13}
        loose = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else close

        def loss(delta, eps, x, weights):
            v = ca.perturb(x, delta, eps, p=p)  # noqa: B023
            return (v * weights).sum(), v

        for axes in split:
            X, D = (spread(a, mesh(kind), *axes) for a in (x, delta))
            found, mine = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(D, eps, X, X)[::-1]
            assert_split(found, X)
            np.testing.assert_allclose(found, v, **close)
            if p == 2:
                norms = np.linalg.norm(np.asarray(found, float) - x, axis=1)
                np.testing.assert_allclose(norms, eps, rtol=3e-7 if dtype == "float32" else 1e-14)
            assert_split(mine[0], X)
            for bar, expected in zip(mine, bars[1:], strict=False):
                np.testing.assert_allclose(bar, expected, **loose)
        # Outside of a trace; the last of them.
        found = ca.perturb(X, D, eps, p=p)
        assert_split(found, X)
        np.testing.assert_allclose(found, v, **close)
    np.testing.assert_allclose(ca.rescale(X, D, eps, p=p), ca.rescale(x, delta, eps, p=p), **close)


def assert_split(found, like):
    assert found.sharding.is_equivalent_to(like.sharding, like.ndim), found.sharding


def check_rows_and_samples():
    """Split along both, in one program."""
    check_values(AxisType.Auto, [("float64", 2, SPLIT[2:3])])


def check_auto():
    check_values(AxisType.Auto)


def check_explicit():
    check_values(AxisType.Explicit)


def check_program():
    """What devices tell each other does not grow with the length of a row, in the whole of a program."""
    rows = 16
    for n in (3072, 49152):
        for axes in ((None, ("b", "f")), ("b", "f"), ("b",)):
            x, delta, eps = problem((rows, n), "float32")
            X, D = (spread(a, mesh(), *axes) for a in (x, delta))
            forward = collectives(ca.perturb, X, D, eps)
            both = collectives(jax.grad(lambda X, D: ca.perturb(X, D, eps).sum(), argnums=(0, 1)), X, D)  # noqa: B023
            assert bool(forward) == (axes != ("b",))
            assert_small(forward + both, rows * 4 * (2 * jax_mesh.SAMPLE + 3 * 8))
            gathers = [size for kind, size in both if kind == "all-gather"]
            assert len(gathers) == bool(forward)
            # Of the operands on one device, twice 4 bytes an element.
            assert sum(gathers) <= X.nbytes / 2


def check_exchanges():
    """How often devices exchange something in a typical solution, and how much each of them sends."""
    over, log = mesh(shape=(8,), names=("f",)), []

    def counted(name):
        exchange = getattr(jax_mesh, name)

        def counting(a, names):
            if names:
                size = a.size * a.dtype.itemsize
                jax.debug.callback(lambda i: log.append((name, size)) if i == 0 else None, jax.lax.axis_index("f"))
            return exchange(a, names)

        setattr(jax_mesh, name, counting)

    for name in ("added", "largest", "gathered"):
        counted(name)

    def run(local, split, whole, out, *arrays):
        in_specs = tuple(PartitionSpec(None, "f") if i in split else PartitionSpec() for i in range(len(arrays)))
        out_specs = tuple(PartitionSpec(None, "f") if split_up else PartitionSpec() for split_up in out)
        every = jax.shard_map(
            partial(local, ((), ("f",))), mesh=over, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        log.clear()
        found = jax.block_until_ready(jax.jit(every)(*arrays))
        jax.effects_barrier()
        return found, list(log)

    results = {}
    rows = 32
    for n, dtype in ((3072, "float32"), (3072, "float64"), (65536, "float32"), (65536, "float64")):
        x, delta, eps = problem((rows, n), dtype)
        arrays = x, delta, eps[:, None], np.zeros((1, 1), dtype), np.ones((1, 1), dtype)
        solve = partial(backend._solved_here, p=2, mode="equal", write=True, samples=1, wide=jnp.float64)
        (v, eta, status), seen = run(solve, (0, 1), rows, (True, False, False), *arrays)
        np.testing.assert_allclose(np.linalg.norm(np.asarray(v, float) - x, axis=1), eps, rtol=3e-7)
        assert len(seen) <= 5, seen
        assert [name for name, _ in seen].count("gathered") == 1
        for name, size in seen:
            each = 3 + 2 * jax_mesh.SAMPLE // 8
            assert size <= rows * (x.itemsize * each if name == "gathered" else 16), (name, size)
        pull = partial(backend._pulled_here, p=2, samples=1, shapes=(x.shape, x.shape, (rows, 1), None, None), x64=True)
        more = *arrays, eta, status, x, np.zeros((rows, 1))
        bars, back = run(pull, (0, 1, 7), rows, (True, True, False), *more)
        assert back == [("added", rows * 16)], back
        np.testing.assert_allclose(bars[2].ravel(), ca.perturb_vjp(x, delta, eps, x)[2], rtol=1e-4)
        results[f"{n} {dtype}"] = {"forward": seen, "backward": back}
    print(json.dumps(results), file=sys.stderr)


def check_pictures():
    """Samples with several axes, of which any is split; bounds per channel, per pixel and per sample; other axes."""
    x, delta, eps = problem((4, 3, 8, 12))
    low, high = np.linspace(-0.2, 0, 3)[:, None, None], np.linspace(1, 1.2, 12)
    each = np.linspace(1, 1.5, 4).reshape(4, 1, 1, 1)
    for axes, bounds in (
        ((None, None, "f"), (low, high)),
        (("b", None, None, "f"), (low, each)),
        ((None, None, "b", "f"), (None, 1)),
    ):
        X, D, G = (spread(a, mesh(), *axes) for a in (x, delta, x))
        expected = ca.perturb(x, delta, eps, bounds=bounds)
        compiled = jax.jit(partial(ca.perturb, bounds=bounds))
        assert_same(compiled(X, D, eps), expected, X)
        assert_small(collectives(compiled, X, D, eps), X.nbytes / 4)
        mine = tuple(b if b is None or np.isscalar(b) else jnp.asarray(b) for b in bounds)
        found = ca.perturb_vjp(X, D, eps, G, bounds=mine)
        for a, b in zip(found, ca.perturb_vjp(x, delta, eps, x, bounds=bounds), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    for axis in ((0, 3), None):
        assert_same(ca.perturb(X, D, 0.9, axis=axis), ca.perturb(x, delta, 0.9, axis=axis), X)
    for a, b in zip(vars(ca.report(X, D, eps)).values(), vars(ca.report(x, delta, eps)).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def assert_same(found, expected, like):
    assert_split(found, like)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


def check_rows():
    """Rows of every kind, next to each other and on all devices: zero, out of reach, without sense, at their bounds."""
    x, delta, _ = problem((8, 64))
    delta[1], x[2, 63], delta[3, 1:] = 0, np.nan, 0
    delta[6, :60] = 0
    eps = np.array([0.5, 0.5, 0.5, 0.1, 100, 0, 0.3, -1])
    X, D = jax.device_put(x), jax.device_put(delta)
    for mode, orders in (("equal", (1, 2, 3, math.inf)), ("at_most", (2,)), ("at_least", (2,))):
        for p in orders:
            perturb = jax.jit(partial(ca.perturb, p=p, mode=mode))
            expected = perturb(X, D, eps)
            found = perturb(*(spread(a, mesh(), "b", "f") for a in (x, delta)), eps)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
            if mode != "equal":
                continue
            gradient = jax.jit(jax.grad(lambda X, D, e: (ca.perturb(X, D, e, p=p) ** 2).sum(), argnums=(0, 1, 2)))  # noqa: B023
            spreaded = gradient(*(spread(a, mesh(), "b", "f") for a in (x, delta)), eps)
            for a, b in zip(spreaded, gradient(X, D, eps), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    half = [a.astype("bfloat16") for a in (abs(np.nan_to_num(x)), delta)]
    found = ca.perturb(*(spread(a, mesh(), "b", "f") for a in half), 0.5)
    np.testing.assert_array_equal(found, jax.jit(ca.perturb)(*map(jnp.asarray, half), 0.5))


def check_transformations():
    x, delta, eps = problem((8, 48))
    g = np.random.default_rng(1).standard_normal((8, 48))
    X, D = (spread(a, mesh(), "b", "f") for a in (x, delta))
    forward = lambda X, D: jax.jvp(lambda D: ca.perturb(X, D, eps), (D,), (jnp.asarray(g),))[1]  # noqa: E731
    expected = forward(jnp.asarray(x), jnp.asarray(delta))
    np.testing.assert_allclose(jax.jit(forward)(X, D), expected, rtol=1e-10, atol=1e-12)
    each = jax.jit(jax.vmap(jax.grad(lambda D, X, e: (ca.perturb(X, D, e, axis=None) * X).sum())))
    np.testing.assert_allclose(each(D, X, eps), ca.perturb_vjp(x, delta, eps, x)[1], rtol=1e-10, atol=1e-12)
    flat = [a[:2, :8] for a in (x, delta)]
    curved = jax.hessian(lambda D, X: (ca.perturb(X, D, eps[:2]) ** 3).sum())
    split = [spread(a, mesh(), "b", "f") for a in flat]
    np.testing.assert_allclose(
        jax.jit(curved)(split[1], split[0]), jax.jit(curved)(*map(jnp.asarray, flat[::-1])), rtol=1e-8, atol=1e-9
    )

    # What is only split inside, and arrays that nobody has put anywhere.
    def inside(x, delta):
        split = NamedSharding(mesh(), PartitionSpec(None, "f"))
        x, delta = (jax.lax.with_sharding_constraint(a, split) for a in (x, delta))
        return ca.perturb(x, delta, eps)

    found = collectives(inside, jnp.asarray(x), jnp.asarray(delta))
    assert_small(found, x.nbytes / 2)
    np.testing.assert_allclose(jax.jit(inside)(x, delta), ca.perturb(x, delta, eps), rtol=1e-12)
    # Rows that are no multiple of the number of devices.
    odd = jax.jit(lambda x, d: inside(x, d)[:, :45])(x[:, :45], delta[:, :45])
    np.testing.assert_allclose(odd, ca.perturb(x[:, :45], delta[:, :45], eps), rtol=1e-12)


def check_shard_map():
    """A user's own: every device has some of the samples."""
    x, delta, eps = problem((8, 40))
    bars = ca.perturb_vjp(x, delta, eps, 2 * ca.perturb(x, delta, eps))
    rows, all_of_it = PartitionSpec("b"), PartitionSpec()
    for check in (True, False):
        split = jax.shard_map(ca.perturb, mesh=mesh(), in_specs=(rows, rows, rows), out_specs=rows, check_vma=check)
        found = jax.jit(jax.grad(lambda *a: (split(*a) ** 2).sum(), argnums=(0, 1, 2)))(x, delta, eps)  # noqa: B023
        for mine, theirs in zip(found, bars, strict=False):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
        inner = jax.shard_map(
            jax.grad(lambda d, x, e: (ca.perturb(x, d, e) ** 2).sum()),
            mesh=mesh(), in_specs=(rows, rows, rows), out_specs=rows, check_vma=check,
        )  # fmt: skip
        np.testing.assert_allclose(jax.jit(inner)(delta, x, eps), bars[1], rtol=1e-10, atol=1e-12)
        # One x and one eps for the samples of all devices.
        same = jax.shard_map(
            lambda x, d, e: ca.perturb(jnp.broadcast_to(x, d.shape), d, e),
            mesh=mesh(), in_specs=(all_of_it, rows, all_of_it), out_specs=rows, check_vma=check,
        )  # fmt: skip
        loss = lambda x, e: (same(x, delta, e) ** 2).sum()  # noqa: B023, E731
        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x[:1], 0.5)
        whole = np.repeat(x[:1], 8, 0)
        expected = ca.perturb_vjp(whole, delta, 0.5, 2 * ca.perturb(whole, delta, 0.5))
        np.testing.assert_allclose(found[0], expected[0].sum(0, keepdims=True), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found[1], expected[2], rtol=1e-10)


def check_arguments():
    """eps, bounds and directions that are split differently, or not at all."""
    x, delta, eps = problem((8, 48))
    expected = ca.perturb(x, delta, eps, bounds=(np.full(48, -0.1), 1))
    X, D = (spread(a, mesh(), "b", "f") for a in (x, delta))
    low = np.full(48, -0.1)
    for its_eps, its_low in (
        (spread(eps, mesh(), "b"), spread(low, mesh(), "f")),
        (spread(eps, mesh(), "f"), spread(low, mesh(), "b")),
        (spread(eps, mesh()), low),
    ):
        for perturb in (ca.perturb, jax.jit(ca.perturb)):
            assert_same(perturb(X, D, its_eps, bounds=(its_low, 1)), expected, X)
    assert_same(ca.perturb(X, spread(delta, mesh()), eps, bounds=(low, 1)), expected, X)
    for kind in (AxisType.Auto, AxisType.Explicit):
        X, other = spread(x, mesh(kind), "b", "f"), spread(delta, mesh(kind), None, ("b", "f"))
        for function in (lambda *a: ca.perturb(*a, eps), lambda *a: ca.perturb_vjp(a[0], a[0], eps, a[1])):
            try:
                function(X, other)
            except ValueError as error:
                print(error)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for name in sys.argv[1:]:
        globals()[f"check_{name}"]()
