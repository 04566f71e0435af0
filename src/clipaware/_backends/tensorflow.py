"""TensorFlow: NumPy's kernels on eager CPU tensors, elsewhere one fused XLA program of plain operations.

In a graph, ``_traced`` runs on the whole problem with ``tf.while_loop`` and ``tf.cond``. One by one, TensorFlow's
operations would cost more than the paper's sort, so the solver is a function with ``jit_compile=True`` inside whatever
graph the caller builds. Its results have no derivatives of their own: `_attached` adds them, in closed form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from clipaware import _check, _derivatives, _traced
from clipaware._backends import numpy as host
from clipaware._problem import DOUBLE, SINGLE, ZERO, Block, Numerics, Problem
from clipaware._traced import Rows

Array = Any

TRACES = True
TAKES_ALL_AXES = False
LANES = 8  # elements of a row that are summed at once, in their own dtype; with 16, LLVM no longer makes vectors of it
CHEAP = (1, 1.5, 2, 3, 4)  # orders whose powers cost less to compute again than to keep

LENGTHS = np.array([1, 2, 3, *(m << k for k in range(29) for m in (4, 5, 6, 7))], np.int32)

# --- array functions --------------------------------------------------------------------------------------------------

sqrt = tf.sqrt
sign = tf.sign
constant = tf.stop_gradient
minimum = tf.minimum
maximum = tf.maximum


def power(a: Array, p: float) -> Array:
    """a^p by way of float64, since a float32 power may be biased, which a sum does not average out."""
    return tf.cast(tf.pow(widen(a), tf.constant(p, tf.float64)), a.dtype)


def clip(a: Array, lower: Array, upper: Array) -> Array:
    return tf.minimum(tf.maximum(a, lower), upper)


def where(condition: Array, yes: Array, no: Array) -> Array:
    """tf.where, in which a number takes the dtype of the other side."""
    if not tf.is_tensor(yes):
        yes = tf.constant(yes, no.dtype if tf.is_tensor(no) else None)
    return tf.where(condition, yes, no if tf.is_tensor(no) else tf.constant(no, yes.dtype))


def fold(combine: str, tiles: list[Any], values: list[Array], like: Array) -> Array:
    """Values per row of the one tile that there is."""
    return widen(values[0])


def signbit(a: Array) -> Array:
    return tf.bitcast(a, tf.int32 if a.dtype == tf.float32 else tf.int64) < 0


def row_sum(a: Array) -> Array:
    """(rows, 1) in float64."""
    return _reduced(tf.reduce_sum, a)[:, None]


def row_dot(u: Array, v: Array) -> Array:
    return row_sum(u * v)


def row_sums(t: Array, breakpoints: Array, dp: Array, wp: Array) -> Array:
    """(rows, 2): the sum of dp over t < breakpoints, and of wp over the rest; stacked, since XLA fuses that into one
    pass, and not two sums."""
    clipped = t >= breakpoints
    return _reduced(tf.reduce_sum, tf.stack((where(clipped, 0.0, dp), where(clipped, wp, 0.0)), axis=1))


def row_max(a: Array) -> Array:
    """The largest of each row; nothing here is negative, and of nothing it is 0."""
    return tf.cast(tf.maximum(_reduced(tf.reduce_max, a)[:, None], 0), a.dtype)


def row_top(delta: Array) -> Array:
    """The largest |delta|."""
    return row_max(abs(delta))


def _reduced(reduce: Callable[..., Array], a: Array) -> Array:
    """Sums or maxima over the last axis, in float64: first of a few elements that lie far apart, then of those. XLA
    vectorises that, and fuses it with what makes the elements."""
    *outer, n = shape(a)
    length = n // LANES
    whole = length * LANES
    rest = None
    if not (isinstance(n, int) and whole == n):
        a, rest = a[..., : _size(whole)], a[..., _size(whole) :]
    total = reduce(widen(reduce(reshape(a, (*outer, LANES, length)), axis=-2)), axis=-1)
    if rest is None:
        return total
    more = reduce(widen(rest), axis=-1)
    return total + more if reduce is tf.reduce_sum else tf.maximum(total, more)


def _working(numerics: Numerics) -> Any:
    return tf.float32 if numerics is SINGLE else tf.float64


def widen(a: Array) -> Array:
    return tf.cast(a, tf.float64)


def narrow(a: Array, numerics: Numerics) -> Array:
    return tf.cast(a, _working(numerics))


def cast_like(a: Array, like: Array) -> Array:
    return tf.cast(a, like.dtype)


def pow2(a: Array, numerics: Numerics) -> Array:
    """A power of two near a whose reciprocal is a normal number too: 1 for every a that is neither large nor small."""
    limit = 126 if numerics is SINGLE else 1022
    exponent = tf.clip_by_value(tf.bitwise.right_shift(tf.bitcast(a, tf.int64), 52) - 1023, -limit, limit)
    exponent = where(abs(exponent) <= 8, 0, exponent)
    return tf.bitcast(tf.bitwise.left_shift(exponent + 1023, 52), tf.float64)


def loop(step: Callable[[Any], Any], state: tuple[Any, ...], limit: int) -> tuple[Any, ...]:
    """Repeat `step` until every row is done, as the last of the state says, or the first, a count, is at its limit."""

    def goes_on(*state: Any) -> Array:
        return (state[0] < limit) & ~tf.reduce_all(state[-1])

    return tuple(tf.while_loop(goes_on, lambda *state: step(state), [tf.convert_to_tensor(a) for a in state]))


def anew(block: Block, T: Array) -> Block:
    """The block for another pass. XLA would keep several arrays derived from it instead, and read those, if they did
    not depend on T, which is never negative."""
    return block._replace(delta=where(T < 0, 0.0, block.delta))


def when(condition: Array, change: Callable[..., Any], *state: Any) -> tuple[Any, ...]:
    """The state, changed if the condition is true anywhere."""
    same = tuple(tf.convert_to_tensor(a) for a in state)
    return tuple(tf.cond(tf.reduce_any(condition), lambda: tuple(change(*same)), lambda: same))


def senseless(block: Block, x: Array) -> Array:
    """Per row, 1 where x, not yet clipped, or delta is not finite, or the bounds are not in order, else 0."""
    # Of delta as well: XLA's maxima lose a NaN.
    fine = tf.math.is_finite(x) & tf.math.is_finite(block.delta) & (block.lower <= block.upper)
    return row_max(tf.cast(~fine, tf.float32))


# --- what the API asks for --------------------------------------------------------------------------------------------


class _Unknown:
    """A length that is known only when the graph runs. It counts as one that is not 1, and may equal any other."""

    __slots__ = ("size",)

    def __init__(self, size: Array) -> None:
        self.size = size

    def __mul__(self, other: Any) -> _Unknown:
        return _Unknown(self.size * _size(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> _Unknown:
        return _Unknown(self.size // other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unknown) or (isinstance(other, int) and other != 1)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "?"


def _size(length: Any) -> Any:
    return length.size if isinstance(length, _Unknown) else length


def is_array(a: Any) -> bool:
    """Tensors, eager or not, and variables, Keras's too; not ragged or sparse ones."""
    return isinstance(a, tf.__internal__.types.Tensor)


def dtype_name(a: Array) -> str:
    return str(tf.as_dtype(a.dtype).name)


def shape(a: Array) -> tuple[Any, ...]:
    sizes = None
    lengths: list[Any] = _lengths(a)
    for axis, length in enumerate(lengths):
        if length is None:
            sizes = tf.shape(a) if sizes is None else sizes
            lengths[axis] = _Unknown(sizes[axis])
    return tuple(lengths)


def _lengths(a: Array) -> list[Any]:
    static = tf.TensorShape(a.shape)
    if static.rank is None:
        raise ValueError("a tensor of unknown rank came, expected one whose number of axes is known: tf.ensure_shape")
    return static.as_list()  # type: ignore[no-any-return]


def ndim(a: Array) -> int:
    return len(_lengths(a))


def device_name(a: Array) -> str:
    """Of an eager tensor; where an operation of a graph will run is for TensorFlow to say."""
    return str(tf.convert_to_tensor(a).device).rpartition("/device:")[2] if tf.executing_eagerly() else ""


def _on_host(a: Array) -> bool:
    """Whether NumPy's backend takes this tensor: its values are at hand, in memory that it can read."""
    return bool(tf.executing_eagerly() and device_name(a).startswith("CPU"))


def values_of(a: Array) -> Any:
    """The array for its values to be checked; None where that would wait for a device or a trace."""
    return np.asarray(fetch(a), np.float64) if _on_host(a) else None


def fetch(a: Array) -> Any:
    return np.asarray(tf.convert_to_tensor(a))


def permute(a: Array, axes: tuple[int, ...]) -> Array:
    return tf.transpose(a, axes)


def reshape(a: Array, shape: tuple[Any, ...]) -> Array:
    return tf.reshape(a, [_size(length) for length in shape])


def broadcast_to(a: Array, shape: tuple[Any, ...]) -> Array:
    return tf.broadcast_to(a, [_size(length) for length in shape])


def sum_axes(a: Array, axes: tuple[int, ...]) -> Array:
    return tf.reduce_sum(a, axes) if axes else a


def number(value: Any, like: Array) -> Array:
    """A bound for all rows and elements."""
    return _as_tensor([[float(value)]], tf.as_dtype(like.dtype))


def wide_number(value: Any, like: Array) -> Array:
    """An eps for all rows, in float64: it is never rounded to x's dtype."""
    return tf.constant([[float(value)]], tf.float64)


def as_eps(eps: Any, like: Array) -> Array:
    return _as_tensor(eps, tf.float64)


def as_bound(bound: Any, like: Array) -> Array:
    return _as_tensor(bound, tf.as_dtype(like.dtype))


def returned(a: Any, like: Array) -> Array:
    """NumPy's array as one of this framework, of that dtype and on that device."""
    with tf.device(tf.convert_to_tensor(like).device):
        return tf.cast(tf.constant(a), like.dtype)


def _as_tensor(a: Any, dtype: Any) -> Array:
    if is_array(a):
        return tf.cast(a, dtype)
    # Not by TensorFlow, to whose casts subnormal numbers are 0.
    with np.errstate(all="ignore"):
        return tf.constant(np.asarray(a, np.float64).astype(dtype.as_numpy_dtype))


def result(a: Array, x: Array) -> Array:
    """In x's dtype, or float32 if that is wider."""
    return tf.cast(a, tf.float64 if x.dtype == tf.float64 else tf.float32)


def true_rows(condition: Array) -> Any:
    _check.values_are_known(tf.executing_eagerly(), "tf.function")
    return np.flatnonzero(fetch(condition))


def _numerics(x: Array) -> Numerics:
    return DOUBLE if x.dtype == tf.float64 else SINGLE


def _compiled(function: Callable[..., Any], *options: Any) -> Callable[..., tuple[Array, ...]]:
    """The function with these options as one XLA program, in a graph or out of it.

    XLA compiles for every shape, which takes seconds. So a length that a graph leaves open is filled up to one of a
    few, four to an octave, with rows or elements that do not move.
    """

    def called(*arguments: Array) -> tuple[Array, ...]:
        lengths = shape(arguments[0])
        filled = [_filled(a, lengths) for a in arguments]
        # What varies from trace to trace are lengths, but not which of them are 1.
        broadcast = tuple(length == 1 for a in filled for length in a.shape)
        found = _program(function, options, broadcast)(*filled)
        return tuple(_cut(a, lengths) for a in found)

    return called


@lru_cache(maxsize=256)
def _program(function: Callable[..., Any], options: tuple[Any, ...], broadcast: tuple[bool, ...]) -> Any:
    return tf.function(partial(function, *options), jit_compile=True, reduce_retracing=True, autograph=False)


def _filled(a: Array, lengths: tuple[Any, ...]) -> Array:
    """With zeros, up to lengths that there are programs for. The status of a row that does not move is ZERO."""
    missing = [
        tf.reduce_min(tf.where(LENGTHS >= full.size, LENGTHS, LENGTHS[-1])) - full.size
        if isinstance(full, _Unknown) and here != 1
        else 0
        for full, here in zip(lengths, a.shape, strict=True)
    ]
    if all(isinstance(count, int) for count in missing):
        return a
    return tf.pad(a, [[0, count] for count in missing], constant_values=ZERO if a.dtype.is_integer else 0)


def _cut(a: Array, lengths: tuple[Any, ...]) -> Array:
    """Without what was filled up."""
    ends = [
        full.size if isinstance(full, _Unknown) and here != 1 else None
        for full, here in zip(lengths, a.shape, strict=True)
    ]
    return a if ends == [None, None] else a[: ends[0], : ends[1]]


def _whole(problem: Problem) -> tuple[Rows, Array]:
    """All of the problem as one group of rows, unchecked, and which of them are to become NaN."""
    rows, bad = _traced.whole(_this, problem, _numerics(problem.x), problem.p not in CHEAP)
    block = rows.load(rows.tiles[0])
    return rows._replace(load=lambda _, T=None: block if T is None else anew(block, T)), bad


def _rounded(v: Array, dtype: Any) -> Array:
    """v as rounded to half precision, in float32. A cast there and back XLA may take for nothing at all."""
    digits, least = (10, 113) if dtype == tf.float16 else (7, 8)  # and the exponent of the least normal number
    exponent = tf.bitwise.right_shift(tf.bitcast(abs(v), tf.int32), 23)
    # The spacing of the numbers around v is a power of two; its reciprocal too, and so nothing but the round rounds.
    spacing = tf.maximum(exponent, least) - digits
    up = tf.bitcast(tf.bitwise.left_shift(254 - spacing, 23), tf.float32)
    return tf.round(v * up) * tf.bitcast(tf.bitwise.left_shift(spacing, 23), tf.float32)


def _apart(product: Array, k: Array) -> Array:
    """A product with k, rounded whatever it is added to: it gets the sign of k as a last bit, which XLA does not know
    to be 0."""
    sign = tf.bitwise.right_shift(tf.bitcast(k, tf.int64), 63)
    return tf.bitcast(tf.bitwise.bitwise_or(tf.bitcast(product, tf.int64), sign), tf.float64)


def _solved(
    p: float, mode: str, write: bool, x: Array, delta: Array, eps: Array, lower: Array, upper: Array
) -> tuple[Array, ...]:
    """v (if `write`), eta and status; in a trace."""
    group, bad = _whole(Problem(x, delta, eps, lower, upper, p))
    half = x.dtype.size == 2
    found = _traced.solve(group, 0, mode, write)
    if not write:
        return where(bad, np.nan, found.K / found.m), found.status

    def store(tile: Any, block: Block, direction: Array, k: Array) -> Array:
        # XLA may round a product and a sum once, here and not there, and then what is measured is not what is returned.
        # In float64 the product of two float32 is exact; of others it is kept apart.
        product = widen(direction) * widen(k)
        if mode == "at_most" and x.dtype == tf.float64:
            product = _apart(product, k)
        moved = tf.cast(product + widen(block.x), block.x.dtype)
        v = clip(moved, block.lower, block.upper)
        return _rounded(v, x.dtype) if half else v

    found, v = _traced.write(group, found, mode, store, half)
    return where(bad, np.nan, tf.cast(v, x.dtype)), where(bad, np.nan, found.K / found.m), found.status


def _reach(p: float, x: Array, delta: Array, lower: Array, upper: Array) -> tuple[Array]:
    group, bad = _whole(Problem(x, delta, tf.ones((1, 1), tf.float64), lower, upper, p))
    return (where(bad, np.nan, _traced.reach(group)),)


def _summary(p: float, x: Array, delta: Array, eps: Array, lower: Array, upper: Array, v: Array) -> tuple[Array, ...]:
    """Norm, naive norm and number of elements at their bounds."""
    group, _ = _whole(Problem(x, delta, eps, lower, upper, p))
    return _traced.summary(group, v, 1)


def _bars(
    p: float,
    x: Array,
    delta: Array,
    eps: Array,
    lower: Array,
    upper: Array,
    eta: Array,
    status: Array,
    g: Array,
    h: Array,
) -> tuple[Array, ...]:
    """Gradients of x, delta, eps, lower and upper for cotangents g of v and h of eta, each of its argument's own shape
    and dtype, but for bounds in half precision: there may be more to add up. Differentiable again."""
    numerics = _numerics(x)
    (eta,) = _attached(Problem(x, delta, eps, lower, upper, p), (eta,), status)
    block = Block(*(narrow(a, numerics) for a in (x, delta, lower, upper)))
    part = _derivatives.partials(_derivable, block, eps, eta, status, p, numerics)
    x_bar, delta_bar, c_bar, eps_bar = _derivatives.vjp(_derivable, part, narrow(g, numerics), h, numerics)
    lost = tf.math.is_nan(eta)
    found = x_bar, delta_bar, eps_bar, where(delta < 0, c_bar, 0.0), where(delta > 0, c_bar, 0.0)
    kept = (_summed(where(lost, np.nan, bar), a) for bar, a in zip(found, (x, delta, eps, lower, upper), strict=True))
    return _typed(tuple(kept), x)


def _summed(bar: Array, like: Array) -> Array:
    """Summed over what was broadcast."""
    if like.shape[1] == 1 and bar.shape[1] != 1:
        bar = row_sum(bar)
    if like.shape[0] == 1 and bar.shape[0] != 1:
        bar = tf.reduce_sum(widen(bar), axis=0, keepdims=True)
    return bar


def _typed(bars: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
    """Gradients of x, delta, eps and both bounds in the dtypes that `_bars` promises."""
    full = tf.float64 if x.dtype == tf.float64 else tf.float32
    kinds = x.dtype, x.dtype, tf.float64, full, full
    return tuple(tf.cast(bar, kind) for bar, kind in zip(bars, kinds, strict=True))


def _attached(problem: Problem, values: tuple[Array, ...], status: Array) -> tuple[Array, ...]:
    """The values, (v, eta) or (eta,), as functions of the problem's arrays."""
    p = problem.p

    def function(*arguments: Array) -> Any:
        arrays, values = arguments[:5], arguments[5:]

        def pull(*cotangents: Array) -> Any:
            g = cotangents[0] if len(values) == 2 else tf.zeros((1, 1), arrays[0].dtype)
            bars = _pulled(p, *arrays, values[-1], status, g, cotangents[-1])
            return *(tf.cast(bar, a.dtype) for bar, a in zip(bars, arrays, strict=True)), *(None for _ in values)

        return tuple(tf.identity(a) for a in values), pull

    return tuple(tf.custom_gradient(function)(*problem.arrays(), *(tf.stop_gradient(a) for a in values)))


def _pulled(p: float, *arguments: Array) -> tuple[Array, ...]:
    """`_bars`, compiled or by NumPy's kernels."""
    if not _on_host(arguments[0]):
        return _compiled(_bars, p)(*arguments)

    def function(*arguments: Array) -> Any:
        def pull(*cotangents: Array) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([a for a in arguments if a.dtype.is_floating])
                bars = _bars(p, *arguments)
            return tape.gradient(bars, arguments, cotangents)

        *arrays, eta, status, g, h = (host.memory(a) for a in arguments)
        problem = Problem.of(arrays, p)
        bars = host.vjp(problem, eta, status, g, h)
        eps_bar = bars[2].sum(axis=0, keepdims=True) if len(problem.eps) == 1 else bars[2]
        return _typed((*bars[:2], eps_bar, *bars[3:]), arguments[0]), pull

    return tuple(tf.custom_gradient(function)(*arguments))


def solve(problem: Problem, mode: str, write: bool) -> tuple[Array, Array, Array]:
    """v (None unless `write`), eta and status."""
    if _on_host(problem.x):
        found = host.solve(problem.mapped(host.memory), mode, write, dtype=dtype_name(problem.x), certify=True)
        *values, status = (tf.convert_to_tensor(a) for a in found[0 if write else 1 :])
    else:
        *values, status = _compiled(_solved, problem.p, mode, write)(*map(tf.stop_gradient, problem.arrays()))
    *v, eta = _attached(problem, tuple(values), status)
    return v[0] if write else None, eta, status


def reach(problem: Problem) -> Array:
    """The largest norm of every row."""
    x = problem.x
    if _on_host(x):
        return tf.convert_to_tensor(host.reach(problem.mapped(host.memory), dtype_name(x)))
    arrays = x, problem.delta, problem.lower, problem.upper
    return _compiled(_reach, problem.p)(*map(tf.stop_gradient, arrays))[0]


def summary(problem: Problem, v: Array) -> tuple[Array, Array, Array]:
    """Of v: norm, naive norm and share of elements at their bounds."""
    if _on_host(problem.x):
        found = host.summary(problem.mapped(host.memory), host.memory(v))
        norm, naive, clipped = (tf.convert_to_tensor(a) for a in found)
        return norm, naive, clipped
    norm, naive, clipped = _compiled(_summary, problem.p)(*problem.arrays(), v)
    return norm, naive, clipped / widen(tf.shape(problem.x)[1])


def vjp(problem: Problem, eta: Array, status: Array, g: Array) -> tuple[Array, ...]:
    """Gradients of x, delta, eps, lower and upper; those of the bounds summed to their rows form."""
    per_row = problem._replace(eps=tf.broadcast_to(problem.eps, tf.shape(eta)))
    return _pulled(problem.p, *per_row.arrays(), eta, status, g, tf.zeros_like(eta))


def _changed(condition: Array, change: Callable[..., Any], *state: Any) -> tuple[Any, ...]:
    """`when` without a tf.cond, whose derivative XLA does not take."""
    return tuple(change(*state))


# --- random numbers ---------------------------------------------------------------------------------------------------


log = tf.math.log


def random(x: Array, seed: Any) -> tuple[Any, Any]:
    """Two functions that draw as many as an array like x has: normal numbers, and uniform ones from 0 to below 1."""
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    if seed is None:
        normal, uniform = tf.random.normal, tf.random.uniform
    elif isinstance(seed, tf.random.Generator):
        normal, uniform = seed.normal, seed.uniform
    else:
        # Two 32-bit numbers, as in the state of Keras's SeedGenerator. What is above them counts the draws.
        is_number = isinstance(seed, int | np.integer)
        pair = tf.constant(divmod(int(seed), 2**32), tf.int64) if is_number else tf.cast(seed, tf.int64)
        draws = count()

        def stateless(function: Callable[..., Array], size: Any, dtype: Any) -> Array:
            return function(size, pair + tf.constant((0, next(draws) << 32), tf.int64), dtype=dtype)

        normal, uniform = (
            partial(stateless, function) for function in (tf.random.stateless_normal, tf.random.stateless_uniform)
        )

    def draw(function: Callable[..., Array], like: Array) -> Array:
        drawn = function(tf.shape(like), dtype=dtype)
        drawn.set_shape(like.shape)
        return drawn

    return partial(draw, normal), partial(draw, uniform)


def is_traced(x: Array) -> bool:
    return not tf.executing_eagerly()


def filtered(a: Array, gain: Any, axes: tuple[int, ...]) -> Array:
    """a with its spectrum over these axes, the last of them halved, multiplied by NumPy's array `gain`.

    TensorFlow transforms up to three axes, the last ones.
    """
    if len(axes) > 3:
        raise ValueError(f"pink noise is over the axes {axes}, expected at most three with TensorFlow; pass axes=...")
    order = [axis for axis in range(a.shape.rank) if axis not in axes] + list(axes)
    transforms = {
        1: (tf.signal.rfft, tf.signal.irfft),
        2: (tf.signal.rfft2d, tf.signal.irfft2d),
        3: (tf.signal.rfft3d, tf.signal.irfft3d),
    }
    there, back = transforms[len(axes)]
    spectrum = there(tf.transpose(a, order))
    spectrum *= tf.cast(np.transpose(gain, order), spectrum.dtype)
    return tf.transpose(back(spectrum, [a.shape[axis] for axis in axes]), np.argsort(order))


# --- batches and models -----------------------------------------------------------------------------------------------


def take(a: Array, rows: Any) -> Array:
    """These rows, by their numbers."""
    return tf.gather(a, rows)


def concatenate(pieces: list[Array]) -> Array:
    return tf.concat(pieces, 0)


def evaluated(model: Any, x: Array) -> Array:
    """What the model makes of x, of which nobody asks for derivatives."""
    return model(x)


def gradient(loss: Any, x: Array) -> tuple[Array, Array]:
    """The gradient in x of a loss, and what comes with it: `loss` returns both."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value, scores = loss(x)
    return tape.gradient(value, x), scores


def log_softmax(scores: Array) -> Array:
    return tf.nn.log_softmax(scores, 1)


def highest(scores: Array) -> Array:
    return tf.reduce_max(scores, 1, keepdims=True)


def labels_like(labels: Any, x: Array) -> Array:
    return tf.constant(labels)


_this = sys.modules[__name__]
_derivable = SimpleNamespace(**(vars(_this) | {"when": _changed}))
