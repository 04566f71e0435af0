"""What holds for every input, tried on those that Hypothesis makes up."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import clipaware as ca
from clipaware.reference import norm64

orders = st.one_of(st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]), st.floats(1, 60))


@st.composite
def problems(draw):
    """x in its box, a direction with zeros and ties among its elements, and a share of the reach."""
    n = draw(st.integers(1, 25))
    lower = draw(st.sampled_from([0.0, -1.0, -2.5]))
    upper = draw(st.sampled_from([1.0, 255.0]))
    unit = hnp.arrays(float, n, elements=st.floats(0, 1))
    x = np.clip(lower + draw(unit) * (upper - lower), lower, upper)
    size = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1e6))
    delta = draw(hnp.arrays(float, n, elements=size)) * draw(
        hnp.arrays(float, n, elements=st.sampled_from([-1.0, 1.0]))
    )
    p = draw(orders)
    reach = ca.reach(x, delta, p=p, bounds=(lower, upper)).item()
    assume(reach > 1e-3)
    return x, delta, draw(st.floats(1e-3, 0.999)) * reach, p, (lower, upper)


def moved(v, x, p):
    return norm64(v[None], x[None], p)[0]


def granularity(v, x, eps, p):
    """How far off the norm may be because v is rounded to float64."""
    return 4e-14 * eps + x.size ** (1 / p) * np.spacing(np.abs(v).max())


@given(problems())
def test_the_norm_is_hit_inside_the_bounds(problem):
    x, delta, eps, p, bounds = problem
    v = ca.perturb(x, delta, eps, p=p, bounds=bounds)
    assert (v >= bounds[0]).all()
    assert (v <= bounds[1]).all()
    assert abs(moved(v, x, p) - eps) <= granularity(v, x, eps, p)
    assert (np.sign(v - x) * np.sign(delta) >= 0).all()


@given(problems(), st.floats(0.1, 0.999))
def test_monotone_in_eps(problem, share):
    x, delta, eps, p, bounds = problem
    more, less = (ca.rescale(x, delta, e, p=p, bounds=bounds).item() for e in (eps, share * eps))
    assert less <= more * (1 + 1e-12)


@given(problems(), st.integers(-400, 400))
def test_the_scale_of_delta_does_not_matter(problem, exponent):
    x, delta, eps, p, bounds = problem
    expected = ca.perturb(x, delta, eps, p=p, bounds=bounds)
    v = ca.perturb(x, np.ldexp(delta, exponent), eps, p=p, bounds=bounds)
    np.testing.assert_allclose(v, expected, rtol=0, atol=granularity(expected, x, eps, p))


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_elements_does_not_matter(problem, random):
    x, delta, eps, p, bounds = problem
    order = list(range(x.size))
    random.shuffle(order)
    expected = ca.perturb(x, delta, eps, p=p, bounds=bounds)[order]
    v = ca.perturb(x[order], delta[order], eps, p=p, bounds=bounds)
    np.testing.assert_allclose(v, expected, rtol=0, atol=granularity(v, x, eps, p))


@given(problems(), st.integers(0, 3))
def test_other_rows_do_not_matter(problem, position):
    x, delta, eps, p, bounds = problem
    rng = np.random.default_rng(position)
    others = [rng.uniform(*bounds, (4, x.size)), rng.standard_cauchy((4, x.size))]
    for batch, row in zip(others, (x, delta), strict=True):
        batch[position] = row
    expected = ca.perturb(x, delta, eps, p=p, bounds=bounds)
    v = ca.perturb(*others, np.full(4, eps), p=p, bounds=bounds)[position]
    np.testing.assert_allclose(v, expected, rtol=0, atol=granularity(v, x, eps, p))


@given(problems(), st.integers(0, 2**32 - 1))
def test_the_gradient_is_orthogonal_to_delta(problem, seed):
    x, delta, eps, p, bounds = problem
    g = np.random.default_rng(seed).standard_normal(x.size)
    x_bar, delta_bar, eps_bar, lower_bar, upper_bar = ca.perturb_vjp(x, delta, eps, g, p=p, bounds=bounds)
    for bar in (x_bar, delta_bar, eps_bar, lower_bar, upper_bar):
        assert np.isfinite(bar).all()
    terms = delta * delta_bar
    assert abs(terms.sum()) <= 1e-9 * (np.abs(terms).sum() + np.abs(g).sum() * eps)
    # Moving x and both bounds together moves v alike.
    assert abs(x_bar.sum() + lower_bar + upper_bar - g.sum()) <= 1e-8 * (
        1 + np.abs(g).sum() + abs(lower_bar) + abs(upper_bar)
    )


@given(problems())
def test_at_most_and_at_least(problem):
    x, delta, eps, p, bounds = problem
    plain = np.clip(x + delta, *bounds)
    at_most = ca.perturb(x, delta, eps, p=p, bounds=bounds, mode="at_most")
    at_least = ca.perturb(x, delta, eps, p=p, bounds=bounds, mode="at_least")
    assert moved(at_most, x, p) <= eps
    assert moved(at_least, x, p) >= eps - granularity(at_least, x, eps, p)
    if moved(plain, x, p) < eps * (1 - 1e-9):
        np.testing.assert_array_equal(at_most, plain)
    if moved(plain, x, p) > eps * (1 + 1e-9):
        np.testing.assert_array_equal(at_least, plain)


@given(problems(), st.integers(1, 40))
def test_reach_is_the_limit(problem, ulps):
    x, delta, _, p, bounds = problem
    reach = ca.reach(x, delta, p=p, bounds=bounds).item()
    corner = np.where(delta > 0, bounds[1], np.where(delta < 0, bounds[0], x))
    assert abs(moved(corner, x, p) / reach - 1) < 1e-14
    v = ca.perturb(x, delta, reach, p=p, bounds=bounds, unreachable="raise")
    np.testing.assert_allclose(moved(v, x, p), reach, rtol=1e-13)
    beyond = reach * (1 + 1e-12 * ulps)
    np.testing.assert_array_equal(ca.perturb(x, delta, beyond, p=p, bounds=bounds), corner)
    assert np.isnan(ca.rescale(x, delta, beyond, p=p, bounds=bounds, unreachable="nan")).all()
