"""The types, constants and array functions that the solvers and the derivatives share.

A call's arguments are a `Problem`, what became of a row is a status, and what a working precision allows is a
`Numerics`. The array functions at the end are for any backend module ``be``, which supplies the operations under common
names (``_backends/numpy.py`` lists them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Array = Any
Backend = Any

# What became of a row. Where several apply, ZERO (no delta, or values that make no sense) comes before AT_ZERO (eps
# counts as 0), then HELD (the mode keeps eta at 1), then UNREACHABLE.
REGULAR, ZERO, AT_ZERO, UNREACHABLE, HELD = range(5)

SLACK = 2.0**-47  # how far below eps at_most stays, for norms that are added up in another order


class Problem(NamedTuple):
    """One call's arguments as (rows, n) arrays, or with all of x's axes for a backend that takes them.

    The bounds have each axis as x has it, or 1. Under ``torch.compile``, fields are read by their names: older PyTorch
    compiles neither slices of a named tuple nor its ``_replace``.
    """

    x: Array
    delta: Array
    eps: Array  # (rows, 1) or (1, 1); of all axes, those of a sample are 1; a backend's reach ignores it
    lower: Array
    upper: Array
    p: float
    weights: Any = None  # nothing reads them yet

    @classmethod
    def of(cls, arrays: Iterable[Array], p: float) -> Problem:
        """Return the problem of x, delta, eps and the bounds, which came one by one."""
        x, delta, eps, lower, upper = arrays
        return cls(x, delta, eps, lower, upper, p)

    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return x, delta, eps and the bounds, for what takes arrays one by one."""
        return self.x, self.delta, self.eps, self.lower, self.upper

    def mapped(self, function: Callable[[Array], Array]) -> Problem:
        """Return the same problem with this function of every array."""
        x, delta, eps, lower, upper = (function(a) for a in (self.x, self.delta, self.eps, self.lower, self.upper))
        weights = None if self.weights is None else function(self.weights)
        return Problem(x, delta, eps, lower, upper, self.p, weights)


class Numerics(NamedTuple):
    """What the working precision allows."""

    ulp: float  # spacing at 1
    tiny: float  # a sum of powers below this has lost elements to underflow
    settled: float  # relative step at which Newton has arrived
    close: float  # relative error of a norm that is as good as none
    far: float  # further than any bound
    least: float  # the smallest normal number: an eps below counts as 0

    def __reduce__(self) -> str:
        """The one of two that there are, in another process too: they are told apart by identity."""
        return "SINGLE" if self is SINGLE else "DOUBLE"


SINGLE = Numerics(ulp=2.0**-23, tiny=1e-20, settled=2.0**-31, close=2e-7, far=2.0**127, least=2.0**-126)
DOUBLE = Numerics(ulp=2.0**-52, tiny=1e-150, settled=2.0**-51, close=4e-15, far=2.0**1023, least=2.0**-1022)


class Block(NamedTuple):
    """A tile of the problem in the working dtype. The bounds broadcast to x."""

    x: Array
    delta: Array
    lower: Array
    upper: Array


# --- array functions --------------------------------------------------------------------------------------------------


def any_true(be: Backend, condition: Array) -> bool:
    """Whether it is true anywhere; in a trace, which cannot tell, it may be."""
    return bool(be.TRACES or be.any_true(condition))


def when(be: Backend, condition: Array, change: Callable[..., Any], *state: Any) -> tuple[Any, ...]:
    """The state, changed if the condition is true anywhere."""
    if be.TRACES:
        return tuple(be.when(condition, change, *state))
    return change(*state) if be.any_true(condition) else state


def bound_ahead(be: Backend, delta: Array, lower: Array, upper: Array) -> Array:
    """The bound that each element moves towards: lower if the sign bit of delta is set, else upper."""
    # The sign bit instead of delta < 0, so that room/delta is never negative, not even for -0.
    return be.where(be.signbit(delta), lower, upper)


def times(be: Backend, a: Array, factor: Array) -> Array:
    """a times a factor per row; nothing is done where all of them are 1, as they mostly are."""
    return a * factor if any_true(be, factor != 1) else a


def power(be: Backend, base: Array, p: float) -> Array:
    """base^p, by multiplication for the exponents people use."""
    if p == 1:
        return base
    if p == 1.5:
        return base * be.sqrt(base)
    if p == 2:
        return base * base
    if p == 3:
        return base * base * base
    if p == 4:
        square = base * base
        return square * square
    return be.power(base, p)
