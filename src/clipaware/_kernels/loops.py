"""What Numba's kernels are made of: how they are compiled, a branchless choice, sums that vectorise, powers.

Functions marked ``@loop`` are vectorised. Where they add up float32, their callers hand them at most ``LANE`` elements
at a time, and add up the results in float64. LLVM vectorises such a loop only if it runs from 0 over a slice, loads
each value once, takes ``pick`` in place of a branch, and has constants of the array's dtype. Numba infers all types.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.extending import intrinsic, overload

# Elements that are added up in float32 before float64 takes over. With 4096, rows of equal elements were 4e-7 off.
LANE = 512
WIDE_LANE = 4096  # the same for powers of float32 that float64 adds up anyway: each slice costs some nanoseconds

# Orders whose powers are worth their own code. Compiled code tells them apart by the length of a tuple: it is a type.
ORDERS = {1.0: (0,), 1.5: (0,) * 2, 2.0: (0,) * 3, 3.0: (0,) * 4, 4.0: (0,) * 5, math.inf: (0,) * 6}
ANY_ORDER, QUICK_ORDER = (0,) * 7, (0,) * 8  # the latter by `power`, also of float64
WHOLE_ORDER, WHOLE_BITS = (0,) * 9, 6  # whole numbers of so many bits, by squaring


def order_of(p: float) -> tuple[int, ...]:
    """What the powers of that p are compiled for."""
    return ORDERS.get(p, WHOLE_ORDER if p % 1 == 0 and p < 2**WHOLE_BITS else ANY_ORDER)


# A frame describes a row and receives the three numbers that a sweep finds. Functions that are called by their address
# take a pointer to one. A row that is `stored` in another format than it is computed in is converted from there and
# back (`formats.py`). What follows that belongs to the careful lane.
FRAME = np.dtype(
    [(name, np.int64) for name in ("x", "delta", "lower", "upper", "out", "n", "write")]
    + [(name, np.int64) for name in ("stored", "stored_x", "stored_delta", "stored_out")]
    + [
        (name, np.int64)
        for name in ("rounded", "exact", "bounds_are_arrays", "blocks", "loaded", "down", "unit", "back")
    ]
    + [(name, np.float64) for name in ("p", "one", "two", "three")],
    align=True,
)
FRAME_POINTER = types.CPointer(from_dtype(FRAME))

# Products and sums may be fused. Only the sums that `plus` makes are reordered.
_inner: Any = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
loop: Any = njit(fastmath={"contract"}, **_inner)
step: Any = njit(**_inner)


def entry(function: Any) -> Any:
    """Compile at the first call and keep the result on disk, or only in memory where nothing can be written."""
    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no place for a cache
        return njit(**options)(function)


def compiled_for_c(signature: Any, function: Any) -> Any:
    """Compile now, as a C function, with the same cache; a full disk does not matter either."""
    options: Any = {"nopython": True, "error_model": "numpy"}
    try:
        return cfunc(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):
        return cfunc(signature, **options)(function)


@intrinsic
def pick(typing, condition, yes, no):
    """`yes` if condition else `no`, without a branch."""

    def generate(context, builder, signature, arguments):
        return builder.select(*arguments)

    return yes(types.boolean, yes, yes), generate


@loop
def clamped(v, low, high):
    """v inside its bounds; NaN stays NaN."""
    v = pick(v < low, low, v)
    return pick(v > high, high, v)


@intrinsic
def plus(typing, total, z):
    """total + z in the type of the total, in any order with its other terms: what lets LLVM vectorise a sum."""

    def generate(context, builder, signature, arguments):
        total, z = arguments
        z = context.cast(builder, z, signature.args[1], signature.args[0])
        return builder.fadd(total, z, flags=("reassoc", "contract"))

    return total(total, z), generate


@intrinsic
def pointer_to(typing, address):
    """A pointer to what is at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def pointer_to_frame(typing, address):
    """A pointer to the frame at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(FRAME_POINTER))

    return FRAME_POINTER(types.int64), generate


@intrinsic
def address_of(typing, array):
    """The address of an array's first element. Numba's own ``.ctypes.data`` counts references, which takes longer."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def call_sweep(typing, address, what, K, frame):
    """Call the function at an address, as C does: ``void f(int64_t what, double K, void *frame)``."""

    def generate(context, builder, signature, arguments):
        address, *given = arguments
        values = [context.get_value_type(kind) for kind in signature.args[1:]]
        kind = ir.FunctionType(ir.VoidType(), values).as_pointer()
        builder.call(builder.inttoptr(address, kind), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float64, types.int64), generate


def at(bound, i):
    """A bound at an element: its own, or the row's."""


@overload(at)
def _at(bound, i):
    if isinstance(bound, types.Array):
        return lambda bound, i: bound[i]
    return lambda bound, i: bound


def cut(bound, start, stop):
    """The part of a bound that belongs to a part of its row."""


@overload(cut)
def _cut(bound, start, stop):
    if isinstance(bound, types.Array):
        return lambda bound, start, stop: bound[start:stop]
    return lambda bound, start, stop: bound


def of_row(bounds, i):
    """The bound of a row, from one for all rows or one for each: a number, or an array if they have two axes."""


@overload(of_row)
def _of_row(bounds, i):
    return lambda bounds, i: bounds[i if bounds.shape[0] > 1 else 0]


def bits_of(z):
    """The bits of a float. For floats that are not negative, they are in the same order as the floats."""


@overload(bits_of)
def _bits_of(z):
    if z == types.float32:
        return lambda z: np.float32(z).view(np.int32)
    return lambda z: np.float64(z).view(np.int64)


def float_of(i):
    """The float that has these bits."""


@overload(float_of)
def _float_of(i):
    if i == types.int32:
        return lambda i: np.int32(i).view(np.float32)
    return lambda i: np.int64(i).view(np.float64)


def type_of(a):
    """The type of a number."""


@overload(type_of)
def _type_of(a):
    number = np.float32 if a == types.float32 else np.float64
    return lambda a: number


@loop
def power(z, p):
    """z^p for z >= 0 to about 1e-10, in operations that vectorise: 2^(p*log2(z))."""
    pattern = np.float64(z).view(np.int64)
    exponent = (pattern - np.int64(0x3FE6A09E667F3BCD)) >> np.int64(52)  # leaves a mantissa from sqrt(1/2) to sqrt(2)
    mantissa = np.int64(pattern - (exponent << np.int64(52))).view(np.float64)
    # log2(mantissa) = 2*atanh(s)/log(2). This polynomial and the next interpolate at Chebyshev's points: they are right
    # to 4e-12 and 6e-11.
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    atanh = 0.33333332620842543 + q * (0.20000192829985586 + q * (0.14267498640346274 + q * 0.1180863659999469))
    y = p * (exponent + s * 2.8853900817779268 * (1.0000000000042069 + q * atanh))
    y = pick(y > -1020.0, y, -1020.0)
    y = pick(y < 1020.0, y, 1020.0)
    shifted = np.float64(y + 1.5 * 2.0**52)  # the last bits of which are y, rounded to a whole number
    f = y - (shifted - 1.5 * 2.0**52)
    scale = np.int64((shifted.view(np.int64) + np.int64(1023)) << np.int64(52)).view(np.float64)
    tail = 0.009618025602863522 + f * (0.0013333450560450353 + f * (0.0001546973200317073 + f * 1.531008115456696e-05))
    tail = 0.6931471805459304 + f * (0.24022651213596063 + f * (0.05550410941215323 + f * tail))
    return pick(z > 0, scale * (0.9999999999595487 + f * tail), np.float64(z) * 0.0)  # NaN stays NaN


@loop
def whole_power(z, p):
    """z^p for a whole p of at most WHOLE_BITS bits, in z's dtype: the product of z^(2^k) over the bits k of p."""
    bits, square, product = np.int64(p), z, type_of(z)(1)
    for k in range(WHOLE_BITS):
        product = pick((bits >> k) & 1 == 1, product * square, product)
        square = square * square
    return product


def raised(z, p, order):
    """z^p for z >= 0, in z's dtype; where the order has no code of its own, in float64."""


@overload(raised)
def _raised(z, p, order):
    if order.count in (1, 6):
        return lambda z, p, order: z
    if order.count == 2:
        return lambda z, p, order: z * math.sqrt(z)
    if order.count == 3:
        return lambda z, p, order: z * z
    if order.count == 4:
        return lambda z, p, order: z * z * z
    if order.count == 5:
        return lambda z, p, order: (z * z) * (z * z)
    if order.count == 9:
        return lambda z, p, order: whole_power(z, p)
    if z == types.float32 or order.count == 8:
        return lambda z, p, order: power(z, p)
    return lambda z, p, order: z**p


def nothing_of(z, order):
    """The zero that a sum of such powers starts from, in the dtype that it is added up in."""


@overload(nothing_of)
def _nothing_of(z, order):
    number = np.float32 if z == types.float32 and order.count != 7 else np.float64
    return lambda z, order: number(0)
