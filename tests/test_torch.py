"""What PyTorch's users expect of a differentiable function: transforms, second order, torch.compile, memory."""

from __future__ import annotations

import math
import sys
import threading
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import clipaware as ca
from clipaware import _kernels
from clipaware._backends import torch as backend
from tiers import in_test_all

ORDERS = [1, 1.5, 2, 3, 10, math.inf]


def inputs(p, rows=2, n=5, seed=0, dtype=torch.float64):
    """(x, delta, eps, lower, upper), all requiring gradients, away from kinks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, n, generator=generator, dtype=dtype)
    delta = torch.randn(rows, n, generator=generator, dtype=dtype)
    lower, upper = torch.full((n,), -0.1, dtype=dtype), torch.full((rows, 1), 1.1, dtype=dtype)
    eps = 0.6 * ca.reach(x, delta, p=p, bounds=(lower, upper))[:, 0]
    return [a.requires_grad_() for a in (x, delta, eps, lower, upper)]


def perturb(p, **options):
    return lambda x, delta, eps, lower, upper: ca.perturb(x, delta, eps, p=p, bounds=(lower, upper), **options)


def rescale(p, **options):
    return lambda x, delta, eps, lower, upper: ca.rescale(x, delta, eps, p=p, bounds=(lower, upper), **options)


@pytest.mark.parametrize("function", [perturb, rescale])
@pytest.mark.parametrize("p", ORDERS)
def test_first_and_second_order(p, function):
    assert gradcheck(function(p), inputs(p), check_forward_ad=True)
    assert gradgradcheck(function(p), inputs(p))


@pytest.mark.parametrize("p", [2, 3, 10])
def test_second_order_where_delta_is_zero(p):
    x, delta, *rest = inputs(p)
    with torch.no_grad():
        delta[:, 1] = 0
    assert gradgradcheck(perturb(p), (x, delta, *rest))


@pytest.mark.parametrize("mode", ["at_most", "at_least"])
def test_first_and_second_order_of_modes(mode):
    for seed in range(3):
        assert gradcheck(perturb(2, mode=mode), inputs(2, seed=seed), check_forward_ad=True)
        assert gradgradcheck(rescale(2, mode=mode), inputs(2, seed=seed))


@pytest.mark.parametrize("p", ORDERS)
def test_edge_cases_have_finite_second_order(p):
    x, delta, eps = (torch.tensor(np.array(c, float), requires_grad=True) for c in zip(*EDGES.values(), strict=True))
    v = ca.perturb(x, delta, eps, p=p)
    first = torch.autograd.grad(v.pow(2).sum(), (x, delta, eps), create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, delta, eps), allow_unused=True)
    for found in (*first, *second):
        assert found is None or torch.isfinite(found).all()
    tangents = tuple(torch.ones_like(a) for a in (x, delta, eps))
    _, moved = torch.func.jvp(lambda *a: ca.perturb(*a, p=p), (x.detach(), delta.detach(), eps.detach()), tangents)
    assert torch.isfinite(moved).all()


def test_backward_is_the_closed_form():
    for p in ORDERS:
        arguments = inputs(p, 3, 40)
        g = torch.randn(3, 40, dtype=torch.float64)
        x, delta, eps, lower, upper = arguments
        mine = torch.autograd.grad(perturb(p)(*arguments), arguments, g)
        closed = ca.perturb_vjp(x, delta, eps, g, p=p, bounds=(lower, upper))
        for a, b in zip(mine, closed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_func_transforms():
    x, delta = torch.rand(6, 4, 10, dtype=torch.float64), torch.randn(6, 4, 10, dtype=torch.float64)
    eps = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)

    def loss(x, delta, eps):
        return ca.perturb(x, delta, eps).pow(3).sum()

    def by_autograd(i):
        leaves = [a[i].clone().requires_grad_() for a in (x, delta, eps)]
        return torch.autograd.grad(loss(*leaves), leaves)

    expected = [torch.stack(gs) for gs in zip(*(by_autograd(i) for i in range(6)), strict=True)]
    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    for found in (
        torch.func.vmap(grad)(x, delta, eps),
        [torch.stack(g) for g in zip(*map(grad, x, delta, eps), strict=True)],
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    # vmap over some arguments only, along another dimension, and nested.
    one = torch.func.vmap(lambda d: ca.perturb(x[0, 0], d, 0.3), in_dims=1)(delta[0].T.contiguous())
    torch.testing.assert_close(one, torch.stack([ca.perturb(x[0, 0], d, 0.3) for d in delta[0]]))
    nested = torch.func.vmap(torch.func.vmap(lambda a, b: ca.rescale(a, b, 0.3)))(x, delta)
    torch.testing.assert_close(
        nested[..., 0], torch.stack([ca.rescale(a, b, 0.3)[:, 0] for a, b in zip(x, delta, strict=True)])
    )
    bounds = torch.func.vmap(lambda a, b, low: ca.perturb(a, b, 0.3, bounds=(low, 1.0)))(
        x, delta, -torch.rand(6, 1, 10)
    )
    assert bounds.shape == x.shape
    torch.testing.assert_close(
        torch.func.vmap(ca.reach)(x, delta)[:, :, 0],
        torch.stack([ca.reach(a, b)[:, 0] for a, b in zip(x, delta, strict=True)]),
    )
    torch.testing.assert_close(
        torch.func.vmap(lambda d: ca.reach(x[0], d))(delta), torch.stack([ca.reach(x[0], d) for d in delta])
    )

    def f(d):
        return ca.perturb(x[0, 0], d, 0.3)

    torch.testing.assert_close(torch.func.jacrev(f)(delta[0, 0]), torch.func.jacfwd(f)(delta[0, 0]))
    v, pull = torch.func.vjp(f, delta[0, 0])
    _, push = torch.func.jvp(f, (delta[0, 0],), (torch.ones(10, dtype=torch.float64),))
    torch.testing.assert_close(pull(torch.ones_like(v))[0].sum(), push.sum())
    forward_over_reverse = torch.func.hessian(lambda d: f(d).pow(3).sum())(delta[0, 0])
    leaf = delta[0, 0].clone().requires_grad_()
    double_backward = torch.autograd.functional.hessian(lambda d: f(d).pow(3).sum(), leaf)
    torch.testing.assert_close(forward_over_reverse, double_backward)


# Ours is what torch.compile traces. Inductor's own code generation takes ten seconds and more for every program.
TRACED_ONLY = {"backend": "aot_eager"}


@pytest.mark.parametrize(
    ("p", "compiler"),
    [
        *((p, "aot_eager") for p in (2, math.inf)),
        *in_test_all((1, "aot_eager"), (3.5, "aot_eager"), (2, "inductor"), (math.inf, "inductor")),
    ],
)
def test_compile_fullgraph(p, compiler):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: perturb(p)(*a), fullgraph=True, backend=compiler)
    arguments = inputs(p, 4, 30, dtype=torch.float32)
    g = torch.randn(4, 30)
    v = compiled(*arguments)
    torch.testing.assert_close(v, perturb(p)(*arguments), rtol=0, atol=0)
    for mine, eager in zip(
        torch.autograd.grad(v, arguments, g), torch.autograd.grad(perturb(p)(*arguments), arguments, g), strict=True
    ):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_compile_what_surrounds_it():
    torch._dynamo.reset()
    model = torch.nn.Linear(12, 3)

    @torch.compile(fullgraph=True, **TRACED_ONLY)
    def step(x, delta, eps):
        eta = ca.rescale(x, delta, eps, mode="at_most", bounds=(0, None))
        v = ca.perturb(x, delta, torch.minimum(ca.reach(x, delta)[:, 0], eps), unreachable="nan")
        return model(v).square().mean() + eta.mean()

    x, delta, eps = torch.rand(5, 12), torch.randn(5, 12, requires_grad=True), torch.full((5,), 0.7)
    value = step(x, delta, eps)
    value.backward()
    assert torch.isfinite(delta.grad).all()
    assert delta.grad.abs().sum() > 0
    # A gradient by torch.func inside of a compiled function.
    inner = torch.compile(
        lambda d: torch.func.grad(lambda d: ca.perturb(x, d, 0.5).square().sum())(d), fullgraph=True, **TRACED_ONLY
    )
    expected = torch.func.grad(lambda d: ca.perturb(x, d, 0.5).square().sum())(delta.detach())
    torch.testing.assert_close(inner(delta.detach()), expected)
    # Another eps, another batch size: still right.
    again = torch.compile(lambda x, d, e: ca.perturb(x, d, e), fullgraph=True, **TRACED_ONLY)
    for rows, e in ((3, 0.2), (4, 0.3), (5, 0.4)):
        v = again(x[:rows], delta[:rows].detach(), e) if rows <= 5 else None
        torch.testing.assert_close((v - x[:rows]).norm(dim=1), torch.full((rows,), e))


def test_compile_symbolic_sizes():
    torch._dynamo.reset()
    x, delta = torch.rand(3, 5, 4), torch.randn(3, 5, 4)

    def channels(x, delta):
        return ca.rescale(x, delta, 0.3, axis=(0, 2), p=3, mode="at_most", bounds=(0, torch.ones(5, 1)))

    compiled = torch.compile(channels, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, delta), channels(x, delta))


EDGES = {
    "zero delta": ([0.2, 0.5, 0.7], [0.0, 0.0, 0.0], 0.1),
    "eps zero": ([0.2, 0.5, 0.7], [1.0, -1.0, 0.0], 0.0),
    "unreachable": ([0.2, 0.5, 0.7], [1.0, -1.0, 0.0], 9.0),
    "no room": ([0.0, 1.0, 0.5], [-1.0, 1.0, 0.0], 0.1),
    "some zeros": ([0.2, 0.5, 0.0], [1.0, 0.0, -1.0], 0.1),
    "ties": ([0.2, 0.5, 0.4], [1.0, 1.0, -1.0], 0.1),
}


@pytest.mark.long
@pytest.mark.parametrize(("p", "compiler"), [(1.5, "inductor"), (math.inf, "inductor")])
def test_compiled_edge_cases_and_transforms(p, compiler):
    torch._dynamo.reset()
    arguments = [torch.tensor(np.array(c, float), requires_grad=True) for c in zip(*EDGES.values(), strict=True)]

    def both(x, delta, eps):
        return ca.perturb(x, delta, eps, p=p), ca.rescale(x, delta, eps, p=p)

    g = torch.randn(len(EDGES), 3, dtype=torch.float64)
    found = []
    for function in (both, torch.compile(both, fullgraph=True, backend=compiler)):
        v, eta = function(*arguments)
        found.append([v, eta, *torch.autograd.grad((v * g).sum() + eta.sum(), arguments)])
    for eager, compiled in zip(*found, strict=True):
        assert torch.isfinite(compiled).all()
        torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)

    x, delta = torch.rand(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    delta[0, 1] = 0
    transforms = [
        lambda x, d: torch.func.jvp(lambda d: ca.perturb(x, d, 0.5, p=p), (d,), (torch.ones_like(d),))[1],
        lambda x, d: torch.func.vmap(torch.func.grad(lambda d, x: ca.perturb(x, d, 0.5, p=p).pow(2).sum()))(d, x),
        lambda x, d: torch.func.hessian(lambda d: ca.perturb(x[0], d, 0.5, p=p).pow(2).sum())(d[0]),
    ]
    for transform in transforms:
        compiled = torch.compile(transform, fullgraph=True, backend=compiler)(x, delta)
        torch.testing.assert_close(compiled, transform(x, delta), rtol=1e-9, atol=1e-11)


def test_vmap_over_another_axis():
    x, delta = torch.rand(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)

    def slope(x, delta):
        return torch.func.grad(lambda d: ca.perturb(x, d, 0.5, axis=None).pow(2).sum())(delta)

    expected = torch.stack([slope(a, b) for a, b in zip(x, delta, strict=True)])
    mapped = torch.func.vmap(slope, in_dims=(1, 0))
    for function in (mapped, torch.compile(mapped, **TRACED_ONLY)):
        torch.testing.assert_close(function(x.T.contiguous(), delta), expected, rtol=1e-9, atol=1e-11)
    # The last of three: there it matters where the others go.
    many = torch.rand(4, 5, 3, dtype=torch.float64)
    expected = torch.stack([ca.perturb(a, delta[0].expand(4, 5), 0.5) for a in many.unbind(2)])
    found = torch.func.vmap(lambda a: ca.perturb(a, delta[0].expand(4, 5), 0.5), in_dims=2)(many)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_views_that_are_negative():
    x, delta = torch.rand(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    turned = torch._neg_view(-delta)
    assert turned.is_neg()
    assert torch.equal(ca.perturb(x, turned, 0.5), ca.perturb(x, delta, 0.5))


def test_gradients_of_several_groups(monkeypatch):
    monkeypatch.setattr(backend, "_numpy_can", lambda x: False)
    torch.manual_seed(0)
    x, delta = torch.rand(6, 50, dtype=torch.float64), torch.randn(6, 50, dtype=torch.float64)

    def slopes():
        bounds = [torch.full((50,), b, dtype=torch.float64, requires_grad=True) for b in (0.0, 1.0)]
        return torch.autograd.grad(ca.perturb(x, delta, 0.8, bounds=tuple(bounds)).pow(2).sum(), bounds)

    whole = slopes()
    monkeypatch.setattr(backend, "GROUP", 100)
    torch.testing.assert_close(slopes(), whole, rtol=1e-12, atol=0)


def test_raise_is_refused_where_values_are_not_known():
    x, delta = torch.rand(3, 5), torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"compare eps with clipaware.reach"):
        torch.func.vmap(lambda a, b: ca.perturb(a, b, 9.0, unreachable="raise"))(x, delta)
    torch._dynamo.reset()
    # Older ones say that there was an error, and not which.
    older = "|Observed exception" * (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13))
    with pytest.raises(Exception, match=rf"compare eps with clipaware.reach{older}"):
        torch.compile(lambda a, b: ca.perturb(a, b, 9.0, unreachable="raise"), fullgraph=True)(x, delta)


@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
def test_unchecked_values_make_their_own_row_nan(p, monkeypatch):
    """What happens on an accelerator, where values are not fetched: the same operations, without the checks."""
    groups = backend._traced.groups
    monkeypatch.setattr(backend, "_numpy_can", lambda x: False)
    monkeypatch.setattr(backend, "_solved", partial(backend._solved, checked=False))
    monkeypatch.setattr(backend._traced, "groups", lambda *a, checked: groups(*a, checked=False))  # of reach
    x, delta = torch.rand(9, 20, dtype=torch.float64), torch.randn(9, 20, dtype=torch.float64)
    eps = torch.full((9, 1), 0.5, dtype=torch.float64)
    lower, upper = torch.zeros(9, 20, dtype=torch.float64), torch.ones(9, 20, dtype=torch.float64)
    expected = ca.perturb(x, delta, eps, p=p)
    outside = x.clone()
    x[0, 3], x[1, 3], delta[2, 4], delta[3, 4] = torch.nan, torch.inf, torch.nan, -torch.inf
    lower[4, 0], lower[5, 1], outside[6, 0] = torch.nan, 2.0, 1.5
    eps_bad = eps.clone()
    monkeypatch.setattr(backend, "values_of", lambda a: None)
    eps_bad[7] = -1.0
    x[6, 0] = 1.5
    arguments = [a.clone().requires_grad_() for a in (x, delta, eps_bad, lower, upper)]
    v = ca.perturb(*arguments[:3], p=p, bounds=tuple(arguments[3:]))
    bad = torch.tensor([0, 1, 2, 3, 4, 5, 7])
    assert torch.isnan(v[bad]).all()
    torch.testing.assert_close(v[8], expected[8])
    # x outside of its bounds is clipped into them first, and the distance measured from there.
    moved = v[6] - x[6].clamp(0, 1)
    torch.testing.assert_close(torch.linalg.vector_norm(moved, p), eps[6, 0])
    bars = torch.autograd.grad(v.sum(), arguments)
    for bar in bars[:2]:
        assert torch.isnan(bar[bad]).all()
        assert torch.isfinite(bar[[6, 8]]).all()
    assert torch.isnan(ca.reach(x, delta, p=p, bounds=(lower, upper))[:6]).all()
    assert torch.isfinite(ca.reach(x, delta, p=p, bounds=(lower, upper))[6:]).all()


def test_half_precision_gradients():
    for dtype in (torch.float16, torch.bfloat16):
        x, delta = torch.rand(3, 50).to(dtype).requires_grad_(), torch.randn(3, 50).to(dtype).requires_grad_()
        ca.perturb(x, delta, 1.0).float().pow(2).sum().backward()
        wide = [a.detach().double().requires_grad_() for a in (x, delta)]
        ca.perturb(*wide, 1.0).pow(2).sum().backward()
        for mine, exact in zip((x, delta), wide, strict=True):
            assert mine.grad.dtype == dtype
            torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=0.02, atol=0.02)


def test_saves_only_inputs_and_a_number_per_row():
    x, delta = torch.rand(8, 3 * 64 * 64), torch.randn(8, 3 * 64 * 64, requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ca.perturb(x, delta, 3.0)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    given = {t.untyped_storage().data_ptr() for t in (x, delta)}
    assert sum(size for pointer, size in storages.items() if pointer not in given) <= 8 * 64


def test_threads():
    x, delta = torch.rand(64, 3000), torch.randn(64, 3000)
    expected = ca.perturb(x, delta, 5.0)
    in_numpy = ca.perturb(x.numpy(), delta.numpy(), 5.0)
    failures = []

    def work():
        for _ in range(5):
            if not torch.equal(ca.perturb(x, delta, 5.0), expected):
                failures.append("torch")
            if not np.array_equal(ca.perturb(x.numpy(), delta.numpy(), 5.0), in_numpy):
                failures.append("numpy")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_old_triton_is_as_good_as_none(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["triton"], "language", sys.modules["triton.language"], raising=False)
    monkeypatch.delitem(sys.modules, "clipaware._kernels.triton", raising=False)
    monkeypatch.delattr(_kernels, "triton", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.gpu_kernels() is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
def test_cuda(p):
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, delta = torch.rand(16, 3000).to(dtype), torch.randn(16, 3000).to(dtype)
        eps = (ca.reach(x, delta, p=p) * torch.linspace(0.05, 0.95, 16)[:, None]).double()
        cpu, gpu = [a.clone().requires_grad_() for a in (x, delta)], [a.cuda().requires_grad_() for a in (x, delta)]
        v, w = ca.perturb(*cpu, eps, p=p), ca.perturb(*gpu, eps.cuda(), p=p)
        # Next to the reach few elements still move, and make up for the rounding of all.
        close = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(w.cpu(), v, rtol=0, atol=close)
        moved = torch.linalg.vector_norm(w.double() - gpu[0].double(), p, dim=1)
        # A GPU rounds the product and the sum at once, which half precision makes other norms of, 3e-5 apart here.
        torch.testing.assert_close(
            moved.cpu(),
            torch.linalg.vector_norm(v.double() - x.double(), p, dim=1),
            rtol=1e-6 if dtype.itemsize > 2 else 1e-4,
            atol=0,
        )
        w.sum().backward()
        v.sum().backward()
        torch.testing.assert_close(gpu[1].grad.cpu(), cpu[1].grad, rtol=0.05, atol=max(close, 1e-5) * 10)
        bad = x.cuda()
        bad[3, 5] = torch.nan
        w = ca.perturb(bad, delta.cuda(), eps.cuda(), p=p)
        assert torch.isnan(w[3]).all()
        assert torch.isfinite(w[4:]).all()
        with pytest.raises(ca.UnreachableError):
            ca.perturb(*gpu, eps.cuda() * 100, p=p, unreachable="raise")


def test_compiled_values_are_not_checked():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, d, e: ca.perturb(x, d, e), fullgraph=True, backend="aot_eager")
    x, delta, eps = torch.rand(5, 8), torch.randn(5, 8), torch.full((5,), 0.5)
    x[0, 0], x[1, 0], delta[2, 0], eps[3] = 1.5, torch.nan, torch.inf, -1.0
    arguments = [a.requires_grad_() for a in (x, delta, eps)]
    v = compiled(*arguments)
    assert torch.isnan(v[1:4]).all()
    moved = v[[0, 4]] - x[[0, 4]].clamp(0, 1)
    torch.testing.assert_close(moved.norm(dim=1), torch.full((2,), 0.5))
    x_bar, delta_bar, eps_bar = torch.autograd.grad(v.sum(), arguments)
    for bar in (x_bar, delta_bar, eps_bar):
        assert torch.isnan(bar[1:4]).all()
        assert torch.isfinite(bar[[0, 4]]).all()


def test_a_bad_eps_under_a_transform_is_nan_and_not_silence():
    x, delta = torch.rand(3, 5), torch.randn(3, 5)
    v = torch.func.vmap(lambda a, b, e: ca.perturb(a, b, e))(x, delta, torch.tensor([0.1, -1.0, torch.nan]))
    assert torch.isfinite(v[0]).all()
    assert torch.isnan(v[1:]).all()
    g = torch.func.grad(lambda d, e: ca.perturb(x, d, e).sum())(delta, torch.tensor([0.1, -1.0, 0.1]))
    assert torch.isnan(g[1]).all()
    assert torch.isfinite(g[[0, 2]]).all()


@pytest.mark.parametrize("p", [1.5, 2, 3, math.inf])
def test_second_order_in_mixed_batches(p):
    """Infinite bounds, eps = 0 and out of reach beside regular rows: finite, and the same compiled."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, 5, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    delta = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    eps = torch.tensor([0.5, 0.0, 50.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    lower, upper = torch.zeros_like(x), torch.ones_like(x)
    lower[3], upper[3], upper[4, 0], delta[5, :2] = -torch.inf, torch.inf, torch.inf, 0
    arguments = [a.requires_grad_() for a in (x, delta, eps)]
    weights = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(6, 5)

    def second(function):
        first = torch.autograd.grad((function(*arguments) * weights).sum(), arguments, create_graph=True)
        found = torch.autograd.grad(sum((g * g.detach().cos()).sum() for g in first), arguments, allow_unused=True)
        return [torch.zeros_like(a) if g is None else g for a, g in zip(arguments, found, strict=True)]

    def plain(x, delta, eps):
        return ca.perturb(x, delta, eps, p=p, bounds=(lower, upper))

    def aot(x, delta, eps):
        return torch.compile(plain, fullgraph=True, backend="eager")(x, delta, eps)

    for eager, compiled in zip(second(plain), second(aot), strict=True):
        assert torch.isfinite(eager).all()
        torch.testing.assert_close(compiled, eager, rtol=1e-8, atol=1e-10)
    # At eps = 0 the slope depends on delta: d v / d eps = delta/||delta||.
    row = [a[1].detach() for a in arguments]
    slope = torch.func.grad(
        lambda d: torch.func.jvp(lambda e: ca.perturb(row[0], d, e, p=p), (row[2],), (row[2] + 1,))[1][0]
    )
    expected = torch.func.grad(lambda d: d[0] / torch.linalg.vector_norm(d, p))(row[1])
    torch.testing.assert_close(slope(row[1]), expected)


@pytest.fixture(params=[784, 40_000])
def on_cuda(request):
    """Tensors of short rows and of long ones, an eps, and what comes of them on the CPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    torch.manual_seed(0)
    x, delta, eps = torch.rand(6, request.param), torch.randn(6, request.param), 0.2 * request.param**0.5
    return x.cuda(), delta.cuda(), eps, ca.perturb(x, delta, eps).cuda()


@pytest.mark.cuda
def test_cuda_graphs_and_streams(on_cuda):
    """Nothing is waited for: a graph can be captured, and replayed with other values in the same place."""
    x, delta, eps, expected = on_cuda
    into, static = torch.empty_like(delta), torch.cuda.CUDAGraph()
    into.copy_(delta)
    ca.perturb(x, into, eps)  # compiled before
    torch.cuda.synchronize()
    with torch.cuda.graph(static):
        v = ca.perturb(x, into, eps)
    static.replay()
    torch.testing.assert_close(v, expected, rtol=0, atol=2e-6)
    into.copy_(-delta)
    static.replay()
    torch.testing.assert_close(v, ca.perturb(x, -delta, eps), rtol=0, atol=0)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = delta * 1.0
        w = ca.perturb(x, late, eps)
    stream.synchronize()
    torch.testing.assert_close(w, expected, rtol=0, atol=2e-6)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ca.perturb(x, delta, eps)
        torch.autograd.grad(ca.perturb(x, delta.requires_grad_(), eps).sum(), delta)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_cuda_compiled_and_under_autocast(on_cuda):
    x, delta, eps, expected = on_cuda
    compiled = torch.compile(lambda x, delta: ca.perturb(x, delta, eps), fullgraph=True)
    torch.testing.assert_close(compiled(x, delta), expected, rtol=0, atol=2e-6)
    with torch.autocast("cuda", dtype=torch.float16):
        v = ca.perturb(x, delta, eps)
    assert v.dtype == torch.float32
    torch.testing.assert_close(v, expected, rtol=0, atol=2e-6)


@pytest.mark.cuda
def test_cuda_on_another_device(on_cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, delta, eps, expected = (a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in on_cuda)
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(ca.perturb(x, delta, eps), expected, rtol=0, atol=2e-6)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="no CUDA device with 24 GB free"
)
@pytest.mark.parametrize("rows", [800_000, 20_000])
def test_cuda_more_than_two_billion_elements(rows):
    """In bfloat16; the last rows are as if there were no others."""
    n = 2_200_000_000 // rows
    x, delta = (torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x[-3:], delta[-3:] = torch.rand(3, n), torch.randn(3, n)
    v = ca.perturb(x, delta, 0.2 * n**0.5)
    torch.testing.assert_close(v[-3:], ca.perturb(x[-3:], delta[-3:], 0.2 * n**0.5), rtol=0, atol=0)
    assert not v[:-3].any()
