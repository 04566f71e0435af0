"""The faults: in which file, what stands there and what is put in its place, and the tests that are to find it.

``before`` is found exactly once in its file. ``tests`` are arguments of pytest. Of JAX, TensorFlow and Dask, those are
imported whose name is among them: the others would only take time. A fault that changes nothing but the speed is none.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault, in a file below ``src/clipaware``."""

    name: str
    file: str
    before: str
    after: str
    tests: str
    triton: bool = False  # whether it takes Triton's interpreter, in an environment of its own


def of(backend: str, files: str, tests: str = "") -> str:
    """Those of some files that a backend goes through, without what takes long."""
    paths = " ".join(f"tests/test_{file}.py" for file in files.split())
    also = f" and ({tests})" if tests else ""
    return f"{paths} -k '{backend} and not ten_million and not long_rows_and_many{also}'"


TEXT = of("numpy-operations", "values edges")
TEXT_GRADIENTS = of("numpy-operations", "gradients edges")
POLISH = of("numpy-operations", "rounding edges")
COMPILED = "-k 'numpy and not operations and not ten_million{}'"
KERNELS = "tests/test_values.py " + COMPILED.format(" and (test_modes or near_the_reach)")
KERNEL_GRADIENTS = "tests/test_gradients.py tests/test_edges.py " + COMPILED.format(" and not scale")
IN_PARTS = "tests/test_kernels.py -k test_a_long_row"
QUANTIZED = "tests/test_quantize.py -k 'not backend and not dtype'"
ROUNDS = "tests/test_dask.py -k 'chunking or halves or awkward or make_no_sense or norm_as_written'"
DASK = of("dask", "values edges gradients", "not batch")
PROCESSES = "tests/test_distributed.py -k test_world"
INTERPRETED = "tests/test_triton.py -k '{}'"

FAULTS = [
    # --- the text of the algorithm ------------------------------------------------------------------------------------
    Fault(
        "the bound behind instead of the bound ahead",
        "_math.py",
        "return be.where(be.signbit(delta), lower, upper)",
        "return be.where(be.signbit(delta), upper, lower)",
        TEXT,
    ),
    Fault(
        "p = 3 is 2",
        "_math.py",
        "        return base * base * base\n",
        "        return base * base\n",
        of("numpy-operations", "values", "3"),
    ),
    Fault(
        "at_least holds what at_most does",
        "_math.py",
        'held = K > m if mode == "at_most" else K < m if mode == "at_least" else K < 0',
        'held = K > m if mode in ("at_most", "at_least") else K < 0',
        TEXT,
    ),
    Fault(
        "held rows do not move",
        "_math.py",
        "K = be.where(still, 0.0, be.where(held, 1.0, K))",
        "K = be.where(still | held, 0.0, K)",
        TEXT,
    ),
    Fault(
        "the reach is out of reach",
        "_math.py",
        "unreachable = short & (C < passes.target * (1 - 8 * p * numerics.ulp))",
        "unreachable = short & (C < passes.target * (1 + 8 * p * numerics.ulp))",
        TEXT,
    ),
    Fault(
        "p = inf: an element with room of just eps does not count",
        "_math.py",
        "enough = self.target * (1 - 2 * rows.numerics.ulp)",
        "enough = self.target * (1 + 2 * rows.numerics.ulp)",
        TEXT,
    ),
    Fault(
        "at_most is rounded up",
        "_math.py",
        "limit = 1 - slack if at_most else math.inf",
        "limit = 1 + slack if at_most else math.inf",
        POLISH,
    ),
    Fault(
        "the polish takes what is above the limit",
        "_math.py",
        "new_gap = be.where(norm <= limit, abs(norm - 1), HUGE)",
        "new_gap = abs(norm - 1)",
        POLISH,
    ),
    Fault(
        "the polish returns the last and not the best",
        "_math.py",
        "best, gap = be.where(better, K, best), be.where(better, new_gap, gap)",
        "best, gap = K, be.where(better, new_gap, gap)",
        POLISH,
    ),
    Fault(
        "the polish goes the wrong way",
        "_math.py",
        "be.where(above, K / (1 + reach), K * (1 + reach))",
        "be.where(above, K * (1 + reach), K / (1 + reach))",
        POLISH,
    ),
    Fault(
        "the largest unclipped is the largest clipped",
        "_math.py",
        "clipped = rows.pick(T, tile) >= self.piece(tile, top)[0]",
        "clipped = rows.pick(T, tile) < self.piece(tile, top)[0]",
        TEXT,
    ),
    Fault(
        "back from finer units by the wrong factor",
        "_math.py",
        "back = be.where(finer, 1.0, 1 / to_near)",
        "back = be.where(finer, 1.0, to_near)",
        TEXT,
    ),
    Fault(
        "the bracket is never halved",
        "_math.py",
        "bisect = ~closed & from_left & (spent > NEWTON_PASSES)",
        "bisect = closed & from_left & (spent > NEWTON_PASSES)",
        TEXT,
    ),
    Fault(
        "when the bracket is halved depends on other rows",
        "_math.py",
        "bisect = ~closed & from_left & (spent > NEWTON_PASSES)",
        "bisect = ~closed & from_left & (count >= NEWTON_PASSES)",
        "tests/test_inputs.py -k needs_care",
    ),
    Fault(
        "Newton stops too early",
        "_math.py",
        "return count + 1, better, lo, C, T, A, spent, hard, done | (abs(better - T) <= settled * better)",
        "return count + 1, better, lo, C, T, A, spent, hard, done | (abs(better - T) <= 1e-3 * better)",
        TEXT,
    ),
    Fault(
        "the last tile of a long row is dropped",
        "_math.py",
        "along = [slice(j, min(j + wide, n)) for j in range(0, n, wide)]",
        "along = [slice(j, j + wide) for j in range(0, n - wide + 1, wide)]",
        of("numpy-operations", "values", "long_rows"),
    ),
    Fault(
        "reach counts what does not move",
        "_math.py",
        'return be.where(block.delta == 0, 0.0, abs(room(rows, "spare", block)))',
        'return abs(room(rows, "spare", block))',
        TEXT,
    ),
    Fault(
        "report counts what does not move",
        "_math.py",
        "there = (here >= ahead) & (here <= ahead) & (block.delta != 0)",
        "there = (here >= ahead) & (here <= ahead)",
        of("numpy-operations", "inputs edges"),
    ),
    Fault(
        "a negative eps is as good as any",
        "_math.py",
        "bad = ~((eps >= 0) & (eps < math.inf) & (top < math.inf))",
        "bad = ~((eps < math.inf) & (top < math.inf))",
        "tests/test_array_api.py tests/test_torch.py -k 'unchecked or bad_eps'",
    ),
    Fault(
        "an element at its kink is clipped",
        "_math.py",
        "free = still | ((moved <= s * (1 + 4 * numerics.ulp)) & (s > 0))",
        "free = still | ((moved < s * (1 - 4 * numerics.ulp)) & (s > 0))",
        TEXT_GRADIENTS,
    ),
    Fault(
        "weights of the power p instead of p - 1",
        "_math.py",
        "power(be, be.where(positive, sign * base, 1.0), p - 1)",
        "power(be, be.where(positive, sign * base, 1.0), p)",
        TEXT_GRADIENTS,
    ),
    Fault(
        "the wrong sign in lambda",
        "_math.py",
        "lam = (h / part.pace.m + along) * part.pace.inverse",
        "lam = (h / part.pace.m - along) * part.pace.inverse",
        TEXT_GRADIENTS,
    ),
    Fault(
        "the gradient of delta without eta",
        "_math.py",
        "delta_bar = be.where(part.free, eta * (g - pull), 0.0)",
        "delta_bar = be.where(part.free, g - pull, 0.0)",
        TEXT_GRADIENTS,
    ),
    Fault(
        "at eps = 0 the gradient of x stays at the bounds",
        "_math.py",
        "x_bar = be.where(part.follows, g, pull)",
        "x_bar = be.where(part.free, g, pull)",
        TEXT_GRADIENTS,
    ),
    Fault(
        "the gradient of a bound without its pull",
        "_math.py",
        "c_bar = be.where(part.follows, 0.0, g - pull)",
        "c_bar = be.where(part.follows, 0.0, g)",
        TEXT_GRADIENTS,
    ),
    Fault(
        "the slope at eps = 0 without the root",
        "_math.py",
        "limit = be.where(norm > 0, m / top / be.where(norm > 0, norm, 1.0) ** (1 / p), 0.0)",
        "limit = be.where(norm > 0, m / top / be.where(norm > 0, norm, 1.0), 0.0)",
        TEXT_GRADIENTS,
    ),
    Fault(
        "p = inf: every active element has the whole weight",
        "_math.py",
        "rate = 1 / be.where(count > 0, count, 1.0)",
        "rate = be.where(count > 0, 1.0, 1.0)",
        TEXT_GRADIENTS,
    ),
    Fault(
        "tangents drift the wrong way",
        "_math.py",
        "rate = (eps_dot - be.row_sum(part.w * drift)) * part.pace.inverse",
        "rate = (eps_dot + be.row_sum(part.w * drift)) * part.pace.inverse",
        "tests/test_torch.py -k func_transforms",
    ),
    Fault(
        "a compiled derivative with what is clipped added",
        "_math.py",
        "share = (be.where(regular, eps / unit, 1.0) ** p - clipped) / be.where(regular, free, 1.0)",
        "share = (be.where(regular, eps / unit, 1.0) ** p + clipped) / be.where(regular, free, 1.0)",
        "tests/test_torch.py -k test_compile_fullgraph",
    ),
    # --- axes, options and checks -------------------------------------------------------------------------------------
    Fault(
        "axes are not put back but permuted once more",
        "_api.py",
        "return self.be.permute(a, tuple(self.order.index(i) for i in range(len(self.order))))",
        "return self.be.permute(a, self.order)",
        "tests/test_inputs.py -k numpy",
    ),
    Fault(
        "a zero delta is always reachable",
        "_api.py",
        "return (status == _math.UNREACHABLE) | ((status == _math.ZERO) & (problem.eps > 0))",
        "return status == _math.UNREACHABLE",
        "tests/test_edges.py tests/test_inputs.py -k numpy",
    ),
    Fault(
        "at_least ignores what is unreachable",
        "_api.py",
        'if unreachable == "maximize" or mode == "at_most":',
        'if unreachable == "maximize" or mode != "equal":',
        "tests/test_edges.py tests/test_values.py -k 'numpy and not operations and (unreachable or mode)'",
    ),
    Fault(
        "a result of NaN has gradients",
        "_api.py",
        'if unreachable == "nan" and mode != "at_most":',
        'if unreachable == "nan" and mode == "at_most":',
        "tests/test_edges.py -k 'numpy and not operations and gradients'",
    ),
    Fault(
        "bounds are broadcast from the left",
        "_api.py",
        "full = (1,) * (len(x_shape) - len(shape)) + shape",
        "full = shape + (1,) * (len(x_shape) - len(shape))",
        "tests/test_gradients.py tests/test_edges.py -k 'numpy and not operations'",
    ),
    Fault(
        "the gradient of one eps for all is that of each",
        "_api.py",
        "be.sum_axes(eps_bar, tuple(range(be.ndim(eps_bar)))) if eps_shape == ()",
        "be.reshape(eps_bar[:1], ()) if eps_shape == ()",
        "tests/test_gradients.py -k 'numpy and not operations'",
    ),
    Fault(
        "an ulp outside of the bounds is an error",
        "_check.py",
        "outside = excess > 4 * ulp * scale",
        "outside = excess > 0",
        "tests/test_errors.py -k 'numpy and not operations'",
    ),
    Fault(
        "a negative eps is no error",
        "_check.py",
        "        if not 0 <= eps < math.inf:",
        "        if not -math.inf < eps < math.inf:",
        "tests/test_errors.py -k 'numpy and not operations'",
    ),
    # --- compiled kernels ---------------------------------------------------------------------------------------------
    Fault(
        "the sums lose the last element",
        "_kernels/compiled.py",
        "    zero = T - T\n"
        "    A, C = zero, zero\n"
        "    for i in range(x.size):\n"
        "        here, towards = x[i], delta[i]\n"
        "        d, w = abs(towards), abs(",
        "    zero = T - T\n"
        "    A, C = zero, zero\n"
        "    for i in range(x.size - 1):\n"
        "        here, towards = x[i], delta[i]\n"
        "        d, w = abs(towards), abs(",
        KERNELS,
    ),
    Fault(
        "an element is dropped at the edge of every lane",
        "_kernels/compiled.py",
        "        stop = min(start + LANE, x.size)\n        here, along, low, high",
        "        stop = min(start + LANE - 1, x.size)\n        here, along, low, high",
        "tests/test_kernels.py -k 'agree_with_the_text and 9000 and float64'",
    ),
    Fault(
        "halves are rounded up at every tie",
        "_kernels/compiled.py",
        "- np.int32(1) + odd",
        "",
        "tests/test_kernels.py -k rounding_to_half",
    ),
    Fault(
        "subnormal halves are rounded to twice their spacing",
        "_kernels/compiled.py",
        "math.copysign((size + np.float32(0.5)) - np.float32(0.5), v)",
        "math.copysign((size + np.float32(1.0)) - np.float32(1.0), v)",
        "tests/test_kernels.py -k rounding_to_half",
    ),
    Fault(
        "compiled at_most is rounded up",
        "_kernels/compiled.py",
        "LIMIT = 1 - 32 * 2.0**-52",
        "LIMIT = 1 + 32 * 2.0**-52",
        "tests/test_rounding.py -k 'numpy and not operations and at_most'",
    ),
    Fault(
        "compiled at_most holds what at_least does",
        "_kernels/compiled.py",
        "(rules.mode == _AT_MOST and (s.K > s.m or least)) or (rules.mode == _AT_LEAST and s.K < s.m)",
        "(rules.mode == _AT_MOST and (s.K < s.m or least)) or (rules.mode == _AT_LEAST and s.K > s.m)",
        KERNELS,
    ),
    Fault(
        "a unit of eps is taken for 1",
        "_kernels/compiled.py",
        "s.plain = p <= 4 and s.m == 1 and s.inv == 1 and roomy",
        "s.plain = p <= 4 and s.m == 1 and roomy",
        "tests/test_values.py -k 'numpy and not operations and other_units'",
    ),
    Fault(
        "a sample's solution counts as left of the root",
        "_kernels/compiled.py",
        "s.T, s.lo, s.left, s.want = t.T, 0.0, 0, SUMS",
        "s.T, s.lo, s.left, s.want = t.T, t.T, 1, SUMS",
        "tests/test_values.py -k 'numpy and not operations and other_units'",
    ),
    Fault(
        "compiled sums keep their finer units",
        "_kernels/compiled.py",
        "        if not (regular and root >= T):\n            rescale(s, s.old_m / s.m)",
        "        if False:\n            rescale(s, s.old_m / s.m)",
        "tests/test_kernels.py tests/test_values.py -k 'finer_units or (numpy and not operations and very_heavy)'",
    ),
    Fault(
        "sums of samples in parts drift",
        "_kernels/compiled.py",
        "return new, (new - total) - z",
        "return new, 0.0",
        "tests/test_dask.py -k many_equal",
    ),
    Fault(
        "what is nearly in reach is not",
        "_kernels/compiled.py",
        "close_by = rules.p < np.inf and w >= s.target * (1 - 8 * rules.p * rules.ulp)",
        "close_by = rules.p < np.inf and w >= s.target * (1 + 8 * rules.p * rules.ulp)",
        "tests/test_edges.py tests/test_values.py -k 'numpy and not operations and reach'",
    ),
    Fault(
        "a block of rows lacks its last one",
        "_kernels/numba.py",
        "return [(rows * k // pieces, rows * (k + 1) // pieces) for k in range(pieces)]",
        "return [(rows * k // pieces, rows * (k + 1) // pieces - (pieces > 1)) for k in range(pieces)]",
        "tests/test_kernels.py -k 'threads or processes or read_only'",
    ),
    Fault(
        "the end of a long row is in no part",
        "_kernels/numba.py",
        "for k in range(pieces)] + [n]",
        "for k in range(pieces)] + [n // LANE * LANE]",
        IN_PARTS,
    ),
    Fault(
        "maxima of parts are added up",
        "_kernels/numba.py",
        'largest = want in MAXIMA or rules["p"][0] == math.inf',
        "largest = want in MAXIMA",
        "tests/test_kernels.py -k does_not_reach",
    ),
    Fault(
        "rescale is as loose as perturb",
        "_kernels/numba.py",
        'loosely = single and write and mode == "equal" and not grid',
        'loosely = single and mode == "equal" and not grid',
        "tests/test_values.py -k 'numpy and not operations and short_step'",
    ),
    Fault(
        "every group has the first one's gradient of eta",
        "_kernels/numba.py",
        "easy(some(g, part, rows), working), easy(h[part], np.float64)",
        "easy(some(g, part, rows), working), easy(h, np.float64)",
        "tests/test_kernels.py -k several_groups",
    ),
    Fault(
        "nobody waits for the other threads",
        "_kernels/threads.py",
        "            if not helper.cancel():\n                helper.result()\n",
        "            helper.cancel()\n",
        "tests/test_kernels.py -k waits_for_its_threads",
    ),
    Fault(
        "the last piece is taken and not worked on",
        "_kernels/threads.py",
        "            work(piece)\n",
        "            if left:\n                work(piece)\n",
        "tests/test_kernels.py -k 'thread or processes'",
    ),
    # --- NumPy --------------------------------------------------------------------------------------------------------
    Fault(
        "an element after the last whole lane is dropped",
        "_backends/numpy.py",
        "total += np.vecdot(u[:, whole:], v[:, whole:])",
        "total += np.vecdot(u[:, whole + 1 :], v[:, whole + 1 :])",
        TEXT,
    ),
    Fault(
        "maxima of tiles are added up",
        "_backends/numpy.py",
        'ufunc = np.add if combine == "sum" else np.maximum',
        "ufunc = np.add",
        of("numpy-operations", "values", "long_rows"),
    ),
    Fault(
        "powers in float32",
        "_backends/numpy.py",
        "return np.power(a.astype(np.float64), p).astype(a.dtype)",
        "return np.power(a, a.dtype.type(p))",
        of("numpy-operations", "values", "small_elements"),
    ),
    Fault(
        "sums in float32",
        "_backends/numpy.py",
        ".sum(axis=1, dtype=np.float64)\n    if whole < n:",
        ".sum(axis=1, dtype=u.dtype)\n    if whole < n:",
        of("numpy-operations", "values", "that_is_small"),
    ),
    Fault(
        "NumPy's seed is ignored",
        "_backends/numpy.py",
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng()",
        "tests/test_noise.py -k 'numpy or generators'",
    ),
    Fault(
        "x outside by rounding is not clipped",
        "_backends/numpy.py",
        "np.where(np.isfinite(x), np.clip(x, lower, upper), np.nan)",
        "np.where(np.isfinite(x), x, np.nan)",
        "tests/test_errors.py tests/test_edges.py -k 'numpy and not operations'",
    ),
    # --- PyTorch ------------------------------------------------------------------------------------------------------
    Fault(
        "the bounds have each other's gradient",
        "_backends/torch.py",
        "found = (x_bar, delta_bar, eps_bar, torch.where(delta < 0, c_bar, 0.0), torch.where(delta > 0, c_bar, 0.0))",
        "found = (x_bar, delta_bar, eps_bar, torch.where(delta > 0, c_bar, 0.0), torch.where(delta < 0, c_bar, 0.0))",
        of("torch-operations", "gradients"),
    ),
    Fault(
        "halves are measured before they are rounded",
        "_backends/torch.py",
        "return v.to(x.dtype).to(v.dtype) if half else v",
        "return v",
        of("torch-operations", "rounding edges values"),
    ),
    Fault(
        "the memory of a negative view as it is",
        "_backends/torch.py",
        "a = a.detach().resolve_neg()",
        "a = a.detach()\n    a = torch._neg_view(a) if a.is_neg() else a",
        "tests/test_torch.py -k are_negative",
    ),
    Fault(
        "a group's gradient replaces those before it",
        "_backends/torch.py",
        "                take(bar).add_(more)\n",
        "                take(bar).copy_(more)\n",
        "tests/test_torch.py -k several_groups",
    ),
    Fault(
        "vmap over any axis is over the first",
        "_backends/torch.py",
        "t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)",
        "t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(0, dim)",
        "tests/test_torch.py -k 'func_transforms or another_axis'",
    ),
    Fault(
        "the highest score of a class and not of a sample",
        "_backends/torch.py",
        "return torch.amax(scores, 1, keepdim=True)",
        "return torch.amax(scores, 0, keepdim=True)",
        "tests/test_attacks.py -k 'margin and torch'",
    ),
    # --- JAX ----------------------------------------------------------------------------------------------------------
    Fault(
        "a float32 eps that was rounded up",
        "_backends/jax.py",
        "its_eps = its_eps.astype(np.float64) * (1 - 2.0**-24)",
        "its_eps = its_eps.astype(np.float64)",
        "tests/test_jax.py -k at_most_without_x64",
    ),
    Fault(
        "the bounds have each other's gradient, in JAX",
        "_backends/jax.py",
        "low_bar, high_bar = jnp.where(delta < 0, c_bar, 0.0), jnp.where(delta > 0, c_bar, 0.0)",
        "low_bar, high_bar = jnp.where(delta > 0, c_bar, 0.0), jnp.where(delta < 0, c_bar, 0.0)",
        "tests/test_gradients.py tests/test_jax.py -k 'jax-operations or gradients_in_a_trace'",
    ),
    Fault(
        "a float32 eps that was rounded up, in a trace",
        "_backends/jax.py",
        "slack = 2.0**-23 if wide == jnp.float32 else SLACK",
        "slack = SLACK",
        "tests/test_jax.py -k at_most_without_x64",
    ),
    Fault(
        "the gradient of eta is lost in a transposition",
        "_backends/jax.py",
        "bars = _math.pulled(be, part, g, h, along, numerics)",
        "bars = _math.pulled(be, part, g, h * 0, along, numerics)",
        "tests/test_jax.py -k 'jacobians or gradients_in_a_trace or second'",
    ),
    Fault(
        "small numbers of float16 are 0",
        "_backends/jax.py",
        "return jnp.where(abs(v) < 2.0**-14, small, near)",
        "return near",
        "tests/test_edges.py -k 'jax and subnormal_numbers_of_float16'",
    ),
    Fault(
        "tangents under vmap along any axis are along the first",
        "_backends/jax.py",
        "a if axis is None else jnp.moveaxis(a, axis, 0) for",
        "a if axis is None else jnp.moveaxis(a, 0, axis) for",
        "tests/test_jax.py -k tangents",
    ),
    Fault(
        "devices do not exchange their sums",
        "_backends/jax_mesh.py",
        'return (added if combine == "sum" else largest)(be.fold(combine, tiles, values, like), names)',
        "return be.fold(combine, tiles, values, like)",
        "tests/test_jax_sharding.py -k eight",
    ),
    Fault(
        "devices do not exchange the sums of derivatives",
        "_backends/jax_mesh.py",
        "both = added(jnp.concatenate(be.two_row_sums(a, b), axis=1), names)",
        "both = jnp.concatenate(be.two_row_sums(a, b), axis=1)",
        "tests/test_jax_sharding.py -k eight",
    ),
    # --- TensorFlow ---------------------------------------------------------------------------------------------------
    Fault(
        "what does not fill a lane is dropped",
        "_backends/tensorflow.py",
        "return total + more if reduce is tf.reduce_sum else tf.maximum(total, more)",
        "return total",
        of("tensorflow-operations", "values", "modes or mpmath"),
    ),
    Fault(
        "float16 with a digit too many",
        "_backends/tensorflow.py",
        "(10, 113) if dtype == tf.float16",
        "(11, 113) if dtype == tf.float16",
        "tests/test_tensorflow.py -k rounded_is",
    ),
    Fault(
        "the gradient of what was broadcast is a mean",
        "_backends/tensorflow.py",
        "bar = tf.reduce_sum(widen(bar), axis=0, keepdims=True)",
        "bar = tf.reduce_mean(widen(bar), axis=0, keepdims=True)",
        "tests/test_gradients.py tests/test_tensorflow.py -k 'tensorflow-operations or second_order'",
    ),
    Fault(
        "one eps for all has the first row's gradient",
        "_backends/tensorflow.py",
        "eps_bar = bars[2].sum(axis=0, keepdims=True) if len(eps) == 1 else bars[2]",
        "eps_bar = bars[2][:1] if len(eps) == 1 else bars[2]",
        "tests/test_gradients.py tests/test_tensorflow.py -k 'tensorflow and not operations'",
    ),
    Fault(
        "rows that fill up a program are regular ones",
        "_backends/tensorflow.py",
        "constant_values=_math.ZERO if a.dtype.is_integer else 0",
        "constant_values=_math.REGULAR if a.dtype.is_integer else 0",
        "tests/test_tensorflow.py -k fill_up",
    ),
    # --- the Array API ------------------------------------------------------------------------------------------------
    Fault(
        "of several groups, a bound has the first one's gradient",
        "_backends/array_api.py",
        "reduce(operator.add, pieces) if a.shape[0] == 1",
        "pieces[0] if a.shape[0] == 1",
        "tests/test_array_api.py tests/test_gradients.py -k 'groups or strict'",
    ),
    Fault(
        "bounds in the wrong order are not looked at",
        "_backends/array_api.py",
        "bad = xp.any(~fine, axis=-1, keepdims=True) | ~(",
        "bad = ~(",
        "tests/test_array_api.py -k unchecked",
    ),
    Fault(
        "tiles are measured before they are rounded",
        "_backends/array_api.py",
        "return _cast(kept, v.dtype)",
        "return v",
        "tests/test_array_api.py -k half",
    ),
    Fault(
        "the bounds have each other's gradient, in the Array API",
        "_backends/array_api.py",
        "lower_bar, upper_bar = where(block.delta < 0, c_bar, 0.0), where(block.delta > 0, c_bar, 0.0)",
        "lower_bar, upper_bar = where(block.delta > 0, c_bar, 0.0), where(block.delta < 0, c_bar, 0.0)",
        "tests/test_gradients.py -k strict",
    ),
    Fault(
        "rows that make no sense have a reach",
        "_backends/array_api.py",
        "found.append(reached if blank is None else where(blank, math.nan, reached))",
        "found.append(reached)",
        "tests/test_array_api.py -k unchecked",
    ),
    Fault(
        "seeds of the Array API are ignored",
        "_backends/array_api.py",
        "rng = (cupy if mine else np).random.default_rng(seed)",
        "rng = (cupy if mine else np).random.default_rng()",
        "tests/test_noise.py -k strict",
    ),
    # --- Dask ---------------------------------------------------------------------------------------------------------
    Fault(
        "norms of chunks are not merged",
        "_backends/dask.py",
        "return _reduced(parts, problem, _rounds.merged_norms, p=problem.p)",
        "return _reduced(parts, problem, _rounds.merged_norms, p=math.inf)",
        "tests/test_dask.py -k chunking",
    ),
    Fault(
        "of the tiles of a chunk the first one counts",
        "_backends/dask.py",
        "merge(np.stack(parts, axis=1), axis=(1,))[:, 0] if len(parts) > 1 else parts[0]",
        "parts[0]",
        "tests/test_dask.py -k several_tiles",
    ),
    Fault(
        "maxima of chunks are added up",
        "_backends/dask.py",
        'return (a.max if "max" in kinds else a.sum)(axis=axis, keepdims=True)',
        "return a.sum(axis=axis, keepdims=True)",
        of("dask", "gradients", "not batch"),
    ),
    Fault(
        "what is out of reach is written all the same, in chunks",
        "_backends/dask.py",
        "lost=(now.lost > 0) | missed, scale=",
        "lost=now.lost > 0, scale=",
        "tests/test_edges.py tests/test_dask.py -k 'dask and unreachable'",
    ),
    Fault(
        "Dask's signal is squared and stays so",
        "_backends/dask.py",
        "return (da.sqrt(_of_samples(x, axis, da.square)[0]) * amplitude).astype(_result(x))",
        "return (_of_samples(x, axis, da.square)[0] * amplitude).astype(_result(x))",
        "tests/test_targets.py -k 'dask and snr'",
    ),
    Fault(
        "the gradient of a bound is summed over its own axes",
        "_backends/dask.py",
        "axes = tuple(i for i in range(bar.ndim) if i < extra or (came[i - extra] == 1 != bar.shape[i]))",
        "axes = tuple(range(extra))",
        of("dask", "gradients", "not batch"),
    ),
    Fault(
        "bins of chunks are not added up",
        "_rounds.py",
        "found = sums.sum(axis=axis, keepdims=True)",
        "found = sums.max(axis=axis, keepdims=True)",
        ROUNDS,
    ),
    Fault(
        "rows that make no sense are written all the same",
        "_rounds.py",
        "        v = np.where(now.lost > 0, math.nan, v)\n",
        "",
        ROUNDS,
    ),
    Fault(
        "the largest of the smallest breakpoints",
        "_rounds.py",
        'merged["least"] = looks.least.min(axis=axis, keepdims=True)',
        'merged["least"] = looks.least.max(axis=axis, keepdims=True)',
        ROUNDS,
    ),
    Fault(
        "at_most is rounded up, in chunks",
        "_rounds.py",
        "np.where(fitting == count, right, left)",
        "right",
        "tests/test_rounding.py tests/test_dask.py -k '(dask and at_most) or awkward'",
    ),
    # --- parts of samples on several processes ------------------------------------------------------------------------
    Fault(
        "processes do not exchange their sums",
        "_backends/shards.py",
        "return self.reduced(combine, alone.fold(combine, tiles, values, like).clone())",
        "return alone.fold(combine, tiles, values, like)",
        PROCESSES,
    ),
    Fault(
        "processes do not exchange the sums of derivatives",
        "_backends/shards.py",
        'slope, along = self.fold("sum", tiles, [sums(tile) for tile in tiles], eta).split(1, dim=1)',
        'slope, along = alone.fold("sum", tiles, [sums(tile) for tile in tiles], eta).split(1, dim=1)',
        PROCESSES,
    ),
    Fault(
        "a maximum loses another process's NaN",
        "_backends/shards.py",
        "            norm = torch.where(lost, torch.nan, norm)\n",
        "",
        PROCESSES,
    ),
    Fault(
        "the bounds have each other's gradient, on several processes",
        "_backends/shards.py",
        "of_bounds = torch.where(moves < 0, c_bar, 0.0), torch.where(moves > 0, c_bar, 0.0)",
        "of_bounds = torch.where(moves > 0, c_bar, 0.0), torch.where(moves < 0, c_bar, 0.0)",
        PROCESSES,
    ),
    Fault(
        "the gradient of eps once for every process",
        "_backends/dtensor.py",
        "axis not in axes and not (per_sample and axis in self.sample) else placed",
        "axis not in axes else placed",
        PROCESSES,
    ),
    Fault(
        "squares of processes are not added up",
        "_backends/dtensor.py",
        'torch.sqrt(Shards(group).reduced("sum", found.detach().double() ** 2))',
        "torch.sqrt(found.detach().double() ** 2)",
        PROCESSES,
    ),
    # --- grids of files -----------------------------------------------------------------------------------------------
    Fault(
        "a step more where it is further away",
        "quantize.py",
        'if mode == "at_least" or (mode == "equal" and above - size < size - below):',
        'if mode == "at_least" or (mode == "equal" and above - size > size - below):',
        QUANTIZED,
    ),
    Fault(
        "a step too many",
        "quantize.py",
        "np.add.at(moved, which[order[:last]], 1)",
        "np.add.at(moved, which[order[: last + 1]], 1)",
        QUANTIZED,
    ),
    Fault(
        "ties in the order of the elements",
        "quantize.py",
        "order = np.lexsort((rng.permutation(len(which)), turns))",
        "order = np.lexsort((np.arange(len(which)), turns))",
        QUANTIZED,
    ),
    Fault(
        "steps have their turn when they are whole",
        "quantize.py",
        "turn = np.minimum((step - 0.5) / delta, LAST) * (1 - 4 * ULP)",
        "turn = np.minimum(step / delta, LAST) * (1 - 4 * ULP)",
        QUANTIZED,
    ),
    Fault(
        "a norm of whole steps is above itself",
        "quantize.py",
        '{"at_most": fine, "at_least": -fine}',
        '{"at_most": -fine, "at_least": fine}',
        QUANTIZED,
    ),
    Fault(
        "without kernels, levels are rounded down",
        "quantize.py",
        "return exact, np.clip(np.rint(exact), 0, grid.last)",
        "return exact, np.clip(np.floor(exact), 0, grid.last)",
        QUANTIZED,
    ),
    # --- noise, targets, attacks --------------------------------------------------------------------------------------
    Fault(
        "more salt than pepper",
        "noise.py",
        "return 2 * be.cast_like(u < 0.5, u) - 1",
        "return 2 * be.cast_like(u < 0.6, u) - 1",
        "tests/test_noise.py -k 'moments and numpy'",
    ),
    Fault(
        "Laplace noise of one sign",
        "noise.py",
        "drawn = be.log((1 - uniform(x)) / (1 - uniform(x)))",
        "drawn = be.log(1 - uniform(x))",
        "tests/test_noise.py -k 'moments and numpy'",
    ),
    Fault(
        "pink noise falls like 1/f^2",
        "noise.py",
        "gain = np.where(f2 > 0, 1 / np.sqrt(np.where(f2 > 0, f2, 1)), 0)",
        "gain = np.where(f2 > 0, 1 / np.where(f2 > 0, f2, 1), 0)",
        "tests/test_noise.py -k pink",
    ),
    Fault(
        "a range of eps begins at 0",
        "noise.py",
        "eps = low + (high - low) * draws[1](x[one_each])",
        "eps = high * draws[1](x[one_each])",
        "tests/test_noise.py -k 'range or norm'",
    ),
    Fault(
        "workers of a loader have the same noise",
        "noise.py",
        "entropy = [int(self.seed or 0), *self._place, self._calls]",
        "entropy = [int(self.seed or 0), self._calls]",
        "tests/test_noise.py -k 'workers or processes'",
    ),
    Fault(
        "decibels of power",
        "targets.py",
        "return float(10 ** (-decibels / 20))",
        "return float(10 ** (-decibels / 10))",
        "tests/test_targets.py -k numpy",
    ),
    Fault(
        "the contrast of a mean square",
        "targets.py",
        "total * (contrast / math.sqrt(n or 1))",
        "total * (contrast / (n or 1))",
        "tests/test_targets.py -k numpy",
    ),
    Fault(
        "a light below 0 has contrast",
        "targets.py",
        "found = be.where(total > 0, total * (contrast",
        "found = be.where(total != 0, total * (contrast",
        "tests/test_targets.py -k 'contrast and not dask and not jax and not tensorflow'",
    ),
    Fault(
        "the norm of n elements of an RMS without the root",
        "targets.py",
        "+ per_root_n * math.sqrt(n), rows)",
        "+ per_root_n * n, rows)",
        "tests/test_targets.py -k numpy",
    ),
    Fault(
        "targeted attacks climb",
        "attacks.py",
        "return (-g if self.task.targeted else g), scores",
        "return g, scores",
        "tests/test_attacks.py -k 'targeted and not tensorflow'",
    ),
    Fault(
        "the steepest direction of another norm",
        "attacks.py",
        "be.power(unit, 1 / (p - 1))",
        "be.power(unit, p - 1)",
        "tests/test_attacks.py -k gains_more",
    ),
    Fault(
        "the smallest gradients first",
        "attacks.py",
        "order = np.argsort(-np.abs(g), axis=1",
        "order = np.argsort(np.abs(g), axis=1",
        "tests/test_attacks.py -k 'one_norm or gains_more'",
    ),
    Fault(
        "robustness by the last repeat",
        "attacks.py",
        "best[rows], which[better] = np.minimum(found, best[rows]), repeat",
        "best[rows], which[better] = found, repeat",
        "tests/test_attacks.py -k robustness",
    ),
    Fault(
        "rounding takes attacks beyond eps",
        "attacks.py",
        'return perturb(x, v - x, eps, p=p, bounds=box, mode="at_most")',
        "return perturb(x, v - x, eps, p=p, bounds=box)",
        "tests/test_attacks.py -k spend_all",
    ),
    # --- files --------------------------------------------------------------------------------------------------------
    Fault(
        "a level too many",
        "_media.py",
        "* (self.high - self.low) / (self.levels - 1) + self.low",
        "* (self.high - self.low) / self.levels + self.low",
        "tests/test_cli.py -k 'norm_is_exact or measure'",
    ),
    Fault(
        "samples a bit too loud",
        "audio.py",
        'values = file.read(dtype="int32", always_2d=True) >> (32 - bits)',
        'values = file.read(dtype="int32", always_2d=True) >> (31 - bits)',
        "tests/test_audio.py",
    ),
    Fault(
        "floats carry the time",
        "audio.py",
        "            found[at + 12 : at + 16] = bytes(4)\n",
        "            pass\n",
        "tests/test_audio.py",
    ),
    Fault(
        "a bomb of a TIFF",
        "images.py",
        "        not_too_large(path, series.shape, most)\n",
        "",
        "tests/test_images.py -k bomb",
    ),
    Fault(
        "what is white is black",
        "images.py",
        'whose 0 is white; convert it first")\n        values = np.iinfo(values.dtype).max - values\n',
        'whose 0 is white; convert it first")\n',
        "tests/test_images.py -k 'white or tiff'",
    ),
    # --- Triton's kernels ---------------------------------------------------------------------------------------------
    Fault(
        "the mask lacks the last element",
        "_kernels/triton.py",
        "y = tl.load(a + cols, mask=cols < n, other=0.0, eviction_policy=POLICY)",
        "y = tl.load(a + cols, mask=cols < n - 1, other=0.0, eviction_policy=POLICY)",
        INTERPRETED.format("modes or numbers"),
        True,
    ),
    Fault(
        "the room behind instead of the room ahead",
        "_kernels/triton.py",
        '    """The distance to the bound ahead, of what moves."""\n'
        "    x = tl.minimum(tl.maximum(x, lower), upper)\n"
        "    s = tl.maximum(tl.where(delta < 0, x - lower, upper - x), 0.0)",
        '    """The distance to the bound ahead, of what moves."""\n'
        "    x = tl.minimum(tl.maximum(x, lower), upper)\n"
        "    s = tl.maximum(tl.where(delta > 0, x - lower, upper - x), 0.0)",
        INTERPRETED.format("modes or numbers"),
        True,
    ),
    Fault(
        "eta makes good for rounding",
        "_kernels/triton.py",
        "if fine & (count > 1):",
        "if fine & (count > 9):",
        INTERPRETED.format("small_eps"),
        True,
    ),
    Fault(
        "sums of few digits are trusted",
        "_kernels/triton.py",
        "fine = (C < target) & (U > LEAST)",
        "fine = (C < target) & (U > 0)",
        INTERPRETED.format("almost_vanish"),
        True,
    ),
    Fault(
        "the exponent of a float64 power is rounded",
        "_kernels/triton.py",
        "y = _of_octaves(z, whole, tl.log2(m) * order + tl.fma(e, order, -whole))",
        "y = tl.exp2(P * tl.log2(z))",
        INTERPRETED.format("far_from_1"),
        True,
    ),
    Fault(
        "on a GPU, at_most holds what at_least does",
        "_kernels/triton.py",
        "tl.where((K > 1) | (corner & (K == 1)), HELD, code)",
        "tl.where((K < 1) | (corner & (K == 1)), HELD, code)",
        INTERPRETED.format("modes or gradients"),
        True,
    ),
    Fault(
        "on a GPU, weights of the power p",
        "_kernels/triton.py",
        "_power(tl.where(positive, base, 1.0), P - 1, False)",
        "_power(tl.where(positive, base, 1.0), P, False)",
        INTERPRETED.format("test_gradients"),
        True,
    ),
]
