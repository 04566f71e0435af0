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

# What a row is stored in, and what its array is rounded to; OWN is what it is computed in.
OWN, FLOAT16, BFLOAT16, SINGLE_FORMAT, DOUBLE_FORMAT = range(5)
KINDS = {OWN: (0,), FLOAT16: (0,) * 2, BFLOAT16: (0,) * 3}  # formats that compiled code tells apart, by their length
ANY_KIND = (0,) * 4

TAKE, GIVE = (
    -1,
    -2,
)  # what a conversion is for, unlike all sweeps: x and delta before a row is solved, or the array after it


@loop
def to_float16(v):
    """v, a float32, rounded to float16."""
    bits = np.float32(v).view(np.int32)
    rounded = np.int32(bits + np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1)))
    normal = np.int32(rounded & np.int32(~0x1FFF)).view(np.float32)
    # Below its normal numbers are multiples of 2^-24, the spacing of float32 from 1/2 to 1.
    small = (v + np.float32(0.75)) - np.float32(0.75)
    normal = pick(abs(v) < np.float32(65520), normal, v * np.float32(np.inf))
    return pick(abs(v) < np.float32(2.0**-14), small, normal)


@loop
def to_bfloat16(v):
    """v, a float32, rounded to bfloat16, which is the first half of its bits."""
    bits = np.float32(v).view(np.int32)
    rounded = np.int32(bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1)))
    return np.int32(rounded & np.int32(~0xFFFF)).view(np.float32)


def to_format(v, format, kind):
    """v as it is stored in a format, which kernels know when they are compiled, by the length of the tuple `kind`, or,
    of float64, when they run."""


@overload(to_format)
def _to_format(v, format, kind):
    if kind.count == 1 + OWN:
        return lambda v, format, kind: v
    if kind.count == 1 + FLOAT16:
        return lambda v, format, kind: to_float16(v)
    if kind.count == 1 + BFLOAT16:
        return lambda v, format, kind: to_bfloat16(v)

    def when_run(v, format, kind):
        single = np.float32(v)
        half = pick(format == FLOAT16, to_float16(single), to_bfloat16(single))
        return np.float64(pick(format == SINGLE_FORMAT, single, half))

    return when_run


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
def _take(stored, address, target):
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
def _give(stored, source, address):
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
def conversion_for(dtype: Any) -> Any:
    """Between what a row is stored in and this dtype. It has the form of a sweep; its numbers mean nothing."""
    F = dtype.type

    def convert(what, K, pointer):
        frame = carray(pointer, 1)[0]
        n = frame.n
        if what == TAKE:
            _take(frame.stored, frame.stored_x, carray(pointer_to(frame.x), n, F))
            _take(frame.stored, frame.stored_delta, carray(pointer_to(frame.delta), n, F))
        else:
            _give(frame.stored, carray(pointer_to(frame.out), n, F), frame.stored_out)

    return compiled_for_c(types.void(types.int64, types.float64, FRAME_POINTER), convert)
