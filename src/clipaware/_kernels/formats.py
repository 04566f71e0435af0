"""The formats that rows are stored in, by Numba: rounding to them, and conversion to and from what is computed in.

NumPy converts float16 one by one and has no bfloat16. These loops vectorise, and take one row at a time, so that
no copy of a whole array is needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import overload

from clipaware._kernels.loops import FRAME_POINTER, compiled_for_c, loop, pick, pointer_to, step

# What a row is stored in, and what its array is rounded to. Halves are computed in float32.
FLOAT16, BFLOAT16, SINGLE_FORMAT, DOUBLE_FORMAT = range(4)
# By format, a tuple whose length, which is part of its type, tells a sweep what to round to; the longest, to nothing.
KINDS = {FLOAT16: (0,), BFLOAT16: (0, 0), SINGLE_FORMAT: (0, 0, 0), DOUBLE_FORMAT: (0, 0, 0)}

# What a conversion is for: x and delta before a row is solved, or the array after it. No sweep has these numbers.
TAKE, GIVE = 100, 101


@step
def bytes_of(format):
    """How many bytes a number takes."""
    return 2 if format < SINGLE_FORMAT else 4 if format == SINGLE_FORMAT else 8


@loop
def _rounded_to_float16(v):
    """v, a float32, rounded to the digits of float16; what is too large for it stays a number."""
    # Let 2^e be the power of two below |v|, but at least 2^-14. Next to 1.5*2^(13 + e), float32 has the spacing that
    # float16 has at v, so adding this number and subtracting it again rounds. Its bits are those of 2^e + 0x06C00000.
    power = np.int32(np.float32(v).view(np.int32) & np.int32(0x7F800000))
    power = pick(power > np.int32(0x38800000), power, np.int32(0x38800000))
    large = np.int32(power + np.int32(0x06C00000)).view(np.float32)
    return (v + large) - large


@loop
def to_float16(v):
    """v, a float32, rounded to float16."""
    return pick(abs(v) < np.float32(65520), _rounded_to_float16(v), v * np.float32(np.inf))


@loop
def to_bfloat16(v):
    """v, a float32, rounded to bfloat16, which is the first half of its bits."""
    bits = np.float32(v).view(np.int32)
    rounded = np.int32(bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1)))
    return np.int32(rounded & np.int32(~0xFFFF)).view(np.float32)


def to_format(v, kind):
    """v as it is stored in the format of that kind."""


@overload(to_format)
def _to_format(v, kind):
    if kind.count == 1:
        return lambda v, kind: to_float16(v)
    if kind.count == 2:
        return lambda v, kind: to_bfloat16(v)
    return lambda v, kind: v


def to_format_in_range(v, kind):
    """The same for a v that the format can hold; a larger one need not become infinite, which saves a choice."""


@overload(to_format_in_range)
def _to_format_in_range(v, kind):
    if kind.count == 1:
        return lambda v, kind: _rounded_to_float16(v)
    return lambda v, kind: to_format(v, kind)


@loop
def _round_to_kind(v, kind):
    for i in range(v.size):
        v[i] = np.float64(to_format(np.float32(v[i]), kind))


@step
def round_to(format, v):
    """Round float64 to a format."""
    if format == FLOAT16:
        _round_to_kind(v, (0,))
    elif format == BFLOAT16:
        _round_to_kind(v, (0, 0))
    elif format == SINGLE_FORMAT:
        _round_to_kind(v, (0, 0, 0))


@loop
def _from_float16(source, target):
    """Convert the bits of float16; infinity becomes NaN, too."""
    for i in range(target.size):
        bits = np.int32(source[i])
        # Its exponent has 5 bits, float32's has 8 and is 112 larger. Infinity and NaN come out as 2^16 or more.
        size = np.int32((bits & np.int32(0x7FFF)) << np.int32(13)).view(np.float32) * np.float32(2.0**112)
        size = pick(size < np.float32(2.0**16), size, np.float32(np.nan))
        target[i] = pick(bits < np.int32(0x8000), size, -size)


@loop
def _from_bfloat16(source, target):
    """Convert the bits of bfloat16."""
    for i in range(target.size):
        target[i] = np.int32(np.int32(source[i]) << np.int32(16)).view(np.float32)


@loop
def _copy(source, target):
    for i in range(target.size):
        target[i] = source[i]


@loop
def _to_float16(source, target):
    """Convert numbers that float16 has, and larger ones to infinity."""
    for i in range(target.size):
        v = np.float32(source[i])
        bits = np.int32(np.float32(abs(v) * np.float32(2.0**-112)).view(np.int32) >> np.int32(13))
        bits = pick(abs(v) < np.float32(2.0**16), bits, np.int32(0x7C00))
        target[i] = np.uint16(bits | ((v.view(np.int32) >> np.int32(16)) & np.int32(0x8000)))


@loop
def _to_bfloat16(source, target):
    """Convert numbers that bfloat16 has to its bits."""
    for i in range(target.size):
        target[i] = np.uint16((np.float32(source[i]).view(np.int32) >> np.int32(16)) & np.int32(0xFFFF))


@step
def take(stored, address, target):
    """Fill `target` from what lies at an address in that format."""
    n = target.size
    if stored == FLOAT16:
        _from_float16(carray(pointer_to(address), n, np.uint16), target)
    elif stored == BFLOAT16:
        _from_bfloat16(carray(pointer_to(address), n, np.uint16), target)
    elif stored == SINGLE_FORMAT:
        _copy(carray(pointer_to(address), n, np.float32), target)
    else:
        _copy(carray(pointer_to(address), n, np.float64), target)


@step
def give(stored, source, address):
    """Write `source` to an address in that format."""
    n = source.size
    if stored == FLOAT16:
        _to_float16(source, carray(pointer_to(address), n, np.uint16))
    elif stored == BFLOAT16:
        _to_bfloat16(source, carray(pointer_to(address), n, np.uint16))
    elif stored == SINGLE_FORMAT:
        _copy(source, carray(pointer_to(address), n, np.float32))
    else:
        _copy(source, carray(pointer_to(address), n, np.float64))


@cache
def conversion() -> Any:
    """Between halves and the float32 they are computed in. It has the form of a sweep; its numbers mean nothing."""

    def convert(what, K, pointer):
        frame = carray(pointer, 1)[0]
        n = frame.n
        if what == TAKE:
            take(frame.stored, frame.stored_x, carray(pointer_to(frame.x), n, np.float32))
            take(frame.stored, frame.stored_delta, carray(pointer_to(frame.delta), n, np.float32))
        else:
            give(frame.stored, carray(pointer_to(frame.out), n, np.float32), frame.stored_out)

    return compiled_for_c(types.void(types.int64, types.float64, FRAME_POINTER), convert)
