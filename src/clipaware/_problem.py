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

# What became of a row. ZERO (no delta, or values that make no sense) comes before AT_ZERO (eps counts as 0), and that
# before the others. HELD: the mode keeps eta at 1. Out of reach, at_most does so if delta itself clips everything;
# otherwise the row is UNREACHABLE, and eta its largest breakpoint.
REGULAR, ZERO, AT_ZERO, UNREACHABLE, HELD = range(5)

SLACK = 2.0**-47  # at_most aims this far below eps, so that norms added up in another order stay below it, too


class Problem(NamedTuple):
    """One call's arguments as (rows, n) arrays, or with all of x's axes for a backend that takes them.

    The bounds have each axis as x has it, or 1. Under ``torch.compile``, fields are read by their names: older PyTorch
    compiles neither slices of a named tuple nor its ``_replace``.
    """

    x: Array
    delta: Array
    eps: Array  # (rows, 1) or (1, 1), or all of x's axes with those of a sample reduced to 1; `reach` does not read it
    lower: Array
    upper: Array
    p: float
    weights: Any = None  # nothing reads them yet

    @classmethod
    def of(cls, arrays: Iterable[Array], p: float) -> Problem:
        """Return the problem of x, delta, eps, lower and upper, given as one iterable."""
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

    ulp: float  # the spacing of numbers at 1
    tiny: float  # of the former solver: a smaller sum of powers has lost terms to underflow
    settled: float  # of the former solver: the relative step at which Newton has arrived
    close: float  # the relative error that a stored norm may have; searches stop at half of it
    far: float  # stands for infinity where infinity times 0 would be NaN
    least: float  # the smallest normal number; a smaller eps counts as 0

    def __reduce__(self) -> str:
        """Pickle as a name, since code asks whether it `is SINGLE`, also in another process."""
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
