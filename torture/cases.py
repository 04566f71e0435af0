"""Batches of cases: hostile rows, and ways to hand arrays over. Each follows from (seed, index) alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torture.oracle import DTYPES, LEAST_NORMAL, MOST, TINY, ULP, L, Truth, norm, working

Array = Any
Rng = np.random.Generator

MODES = ("equal", "at_most", "at_least")
ORDERS = (1.0, 1.5, 2.0, 3.0, 4.0, 10.0, math.inf)
SOME = (*ORDERS, 1 + 1e-9, 4.7, 60.0, 1e4)


@dataclass(frozen=True)
class Look:
    """How a batch is handed over."""

    sample: tuple[int, ...] = ()  # the shape of a sample; (n,) if empty
    place: str = "first"  # of the batch axis: first, tuple (the same, by axis), last, split (two axes), none, flat
    layout: str = "C"
    eps: str = "row"  # number, row, kept
    own: bool = False  # whether eps and bounds are arrays of the framework instead of NumPy's
    channel: bool = False  # whether bounds differ by the first axis of a sample only


@dataclass(frozen=True)
class Batch:
    """Rows that share a call: one case each."""

    x: Array  # (rows, n), of the dtype
    delta: Array
    lower: Array  # rows or 1, n or 1
    upper: Array
    eps: Array  # (rows,), float64
    p: float
    mode: str
    unreachable: str
    dtype: str
    look: Look = field(default_factory=Look)
    family: str = ""

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])

    @property
    def n(self) -> int:
        return int(self.x.shape[1])

    def truth(self) -> Truth:
        return Truth(self.x, self.delta, self.lower, self.upper, self.eps, self.p, self.dtype)

    def take(self, rows: Array, columns: Array | None = None) -> Batch:
        """Some rows, and some columns, plainly handed over if the shape no longer allows for more."""

        def cut(a: Array) -> Array:
            a = a if a.shape[0] == 1 < self.rows else a[rows]
            return a if columns is None or (a.shape[1] == 1 != self.n) else a[:, columns]

        x, delta, lower, upper = (cut(a) for a in (self.x, self.delta, self.lower, self.upper))
        look = self.look if columns is None else replace(self.look, sample=(), channel=False)
        if look.place in ("none", "flat", "split"):
            look = replace(look, place="first")
        return replace(self, x=x, delta=delta, lower=lower, upper=upper, eps=self.eps[rows], look=look)


@dataclass(frozen=True)
class Profile:
    """What a backend can take."""

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    few: bool = False  # whether every shape, order and mode costs a compilation: then there are few of them
    few_orders: bool = False  # whether only orders do
    subnormal: bool = True  # whether it knows subnormal numbers
    subnormal64: bool = True  # also in float64
    longest: int = 10**7
    least_rows: int = 1  # of short rows
    most_rows: int = 64
    single_eps: bool = False  # whether eps is rounded to float32


# --- rows -------------------------------------------------------------------------------------------------------------


def signs(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.choice([-1.0, 1.0], shape)


def directions(rng: Rng, shape: tuple[int, ...]) -> Array:
    kind = rng.integers(5)
    if kind == 0:
        return rng.standard_normal(shape)
    if kind == 1:
        return rng.standard_cauchy(shape)
    if kind == 2:
        return rng.uniform(-1, 1, shape)
    if kind == 3:
        return signs(rng, shape) * np.exp(rng.standard_normal(shape) * 3)
    return signs(rng, shape)


def boxes(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, Array]:
    """Bounds that are numbers, per sample, per element, or one-sided."""
    low, high = [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0), (-2.5, 3.75), (100.0, 101.0), (-1e-3, 1e3)][rng.integers(6)]
    shape = [(1, 1), (1, n), (rows, 1), (rows, n)][rng.choice(4, p=[0.5, 0.2, 0.1, 0.2])]
    lower, upper = np.full(shape, low), np.full(shape, high)
    if shape != (1, 1):
        width = high - low
        lower = lower + rng.uniform(0, 0.2, shape) * width
        upper = upper - rng.uniform(0, 0.2, shape) * width
    which = rng.integers(12)
    if which in (0, 2):
        lower = np.full_like(lower, -np.inf)
    if which in (1, 2):
        upper = np.full_like(upper, np.inf)
    return cast(lower, dtype), cast(upper, dtype)


def cast(a: Array, dtype: str) -> Array:
    """Rounded to the dtype, without overflow."""
    a = np.asarray(a, np.float64)
    return np.where(np.isfinite(a), np.clip(a, -MOST[dtype], MOST[dtype]), a).astype(DTYPES[dtype])


def inside(rng: Rng, lower: Array, upper: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Uniform in the box, or about 0 where it has no end."""
    low, high = (np.broadcast_to(np.asarray(b, np.float64), shape) for b in (lower, upper))
    low, high = (
        np.where(np.isfinite(low), low, np.where(np.isfinite(high), high - 1, -1.0)),
        np.where(np.isfinite(high), high, np.where(np.isfinite(low), low + 1, 1.0)),
    )
    x = cast(low + rng.random(shape) * (high - low), dtype)
    return np.clip(x, lower, upper).astype(DTYPES[dtype])


def usual(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    lower, upper = boxes(rng, rows, n, dtype)
    x = inside(rng, lower, upper, (rows, n), dtype)
    scale = 10.0 ** rng.uniform(-4, 4, (rows, 1)) if rng.random() < 0.5 else 1.0
    return x, cast(directions(rng, (rows, n)) * scale, dtype), lower, upper


def denormal(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """delta, or all of it, in numbers that have lost their leading bits."""
    tiny = TINY[dtype]
    delta = signs(rng, (rows, n)) * tiny * rng.integers(0, 2 ** rng.integers(1, 9), (rows, n))
    if rng.random() < 0.5:
        x, _, lower, upper = usual(rng, rows, n, dtype)
        return x, cast(delta, dtype), lower, upper
    span = float(rng.integers(2, 2000))
    lower, upper = cast(np.full((1, 1), 0.0), dtype), cast(np.full((1, 1), span * tiny), dtype)
    return cast(tiny * np.floor(rng.random((rows, n)) * (span + 1)), dtype), cast(delta, dtype), lower, upper


def overflowing(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """Numbers near the largest, and rooms that are not numbers of the dtype."""
    most = min(MOST[dtype], 1e290)  # so that norms stay below 1e300
    part = rng.choice([0.01, 0.24, 0.5, 1.0])
    lower, upper = cast(np.full((1, 1), -most * part), dtype), cast(np.full((1, 1), most * part), dtype)
    low, high = (cast(np.asarray(b, np.float64) / 2, dtype) for b in (lower, upper))
    x = inside(rng, low, high, (rows, n), dtype)
    delta = directions(rng, (rows, n))
    delta = delta / np.maximum(np.abs(delta).max(initial=1e-300), 1e-300)
    return x, cast(delta * most * rng.choice([1e-3, 0.5, 1.0]), dtype), lower, upper


def tied(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """One or two values of x, few of delta: breakpoints and rounding by the thousand at one scale."""
    lower, upper = cast(np.zeros((1, 1)), dtype), cast(np.ones((1, 1)), dtype)
    x = rng.choice(rng.random(int(rng.integers(1, 4))), (rows, n))
    return cast(x, dtype), cast(rng.choice([-1.0, 1.0, 2.0, 0.5][: rng.integers(1, 5)], (rows, n)), dtype), lower, upper


def geometric(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """Breakpoints in geometric progression, which slow Newton down."""
    ratio = rng.choice([1.05, 1.5, 2.0, 10.0, 1e3])
    span = math.log(MOST[dtype] * 1e-3) / math.log(ratio)
    steps = np.mod(np.arange(n), max(1, int(min(span, 300)))) * 1.0
    powers = ratio**-steps
    if rng.random() < 0.5:
        # All as fast, with ever less room: at the bound of an element.
        upper = cast(np.broadcast_to(powers, (1, n)), dtype)
        return (
            cast(np.zeros((rows, n)), dtype),
            cast(np.ones((rows, n)), dtype),
            cast(np.full((1, 1), -1.0), dtype),
            upper,
        )
    delta = signs(rng, (rows, n)) * powers
    return cast(np.full((rows, n), 0.5), dtype), cast(delta, dtype), cast([[0.0]], dtype), cast([[1.0]], dtype)


def lone(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """All but one clipped early; the one has far to go."""
    x, delta, lower, upper = usual(rng, rows, n, dtype)
    delta = np.asarray(delta, np.float64) * 1e3
    if n:
        delta[np.arange(rows), rng.integers(n, size=rows)] = 10.0 ** -rng.uniform(0, 4 if dtype == "float16" else 9)
    return x, cast(delta, dtype), lower, upper


def edges(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """x on its bounds and next to them, on either side by what counts as rounding."""
    low, high = [(0.0, 1.0), (-1.0, 1.0), (0.25, 0.75), (-3.0, -1.0)][rng.integers(4)]
    lower, upper = cast(np.full((1, 1), low), dtype), cast(np.full((1, 1), high), dtype)
    gap = ULP[dtype] * max(abs(low), abs(high)) / 2
    x = rng.choice([low, high, (low + high) / 2], (rows, n)) + rng.integers(-3, 4, (rows, n)) * gap
    if rng.random() < 0.7:
        x = np.clip(x, low, high)
    return cast(x, dtype), cast(directions(rng, (rows, n)), dtype), lower, upper


def zeros(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """Zeros of either sign, in x, delta and the bounds."""
    x = rng.choice([0.0, -0.0, 0.5, 1.0], (rows, n))
    delta = directions(rng, (rows, n)) * rng.choice([0.0, -0.0, 1.0, -1.0], (rows, n))
    low = rng.choice([0.0, -0.0, -1.0])
    return cast(x, dtype), cast(delta, dtype), cast(np.full((1, 1), low), dtype), cast(np.ones((1, 1)), dtype)


def patchy(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """Finite and infinite bounds side by side, and elements without any room."""
    shape = (rows, n) if rng.random() < 0.7 else (1, n)
    lower = rng.choice([0.0, -1.0, -np.inf, -1e4], shape)
    upper = rng.choice([1.0, 2.0, np.inf, 1e4], shape)
    same = rng.random(shape) < 0.1
    upper = np.where(same, np.where(np.isfinite(lower), lower, 0.0), upper)
    lower = np.where(same, upper, lower)
    lower, upper = cast(lower, dtype), cast(upper, dtype)
    return inside(rng, lower, upper, (rows, n), dtype), cast(directions(rng, (rows, n)), dtype), lower, upper


def spread(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """delta over 300 orders of magnitude; 30 where the working precision is float32, which has 76 in all."""
    x, _, lower, upper = usual(rng, rows, n, dtype)
    least: Any = math.log10(LEAST_NORMAL[dtype])
    most: Any = math.log10(MOST[dtype]) - 0.01
    orders = 300 if dtype == "float64" else 30
    if most - least > orders:
        least = rng.uniform(least, most - orders, (rows, 1))
        most = least + orders
    delta = signs(rng, (rows, n)) * 10.0 ** rng.uniform(least, most, (rows, n))
    return x, cast(delta, dtype), lower, upper


def coarse(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """x far from 0 in a small box: few numbers to move to."""
    centre = 2.0 ** rng.integers(0, 12)
    steps = int(rng.integers(1, 50))
    low, high = centre, centre * (1 + steps * ULP[dtype])
    lower, upper = cast(np.full((1, 1), low), dtype), cast(np.full((1, 1), high), dtype)
    return inside(rng, lower, upper, (rows, n), dtype), cast(directions(rng, (rows, n)), dtype), lower, upper


def clustered(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """Many breakpoints in one place, tied or up to 1e-4 of it apart, the others around them."""
    low, high = [(0.0, 1.0), (-1.0, 1.0), (0.0, 256.0)][rng.integers(3)]
    # Steps from x to its bound, of which every dtype has all multiples: as many for the room as for delta make a tie.
    steps, sign = rng.integers(1, 64, (rows, n)), signs(rng, (rows, n))
    apart = rng.choice([0.0, 4 * ULP[working(dtype)], 1e-6, 1e-5, 1e-4]) * rng.uniform(-0.5, 0.5, (rows, n))
    x = np.where(sign > 0, high, low) - sign * (high - low) / 64 * steps
    delta = sign * steps / 64 * (1 + apart)
    others = rng.random((rows, n)) > rng.uniform(0.1, 1.1, (rows, 1))
    x = np.where(others, rng.uniform(low, high, (rows, n)), x)
    delta = np.where(others, directions(rng, (rows, n)), delta) * 2.0 ** rng.integers(-6, 7, (rows, 1))
    return cast(x, dtype), cast(delta, dtype), cast([[low]], dtype), cast([[high]], dtype)


def levels(rng: Rng, rows: int, n: int, dtype: str) -> tuple[Array, ...]:
    """x of 8 bits and directions of signs, some of them 0, as pictures and the signs of gradients have them."""
    low, high = [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)][rng.integers(3)]
    lower, upper = cast([[low]], dtype), cast([[high]], dtype)
    x = low + (high - low) * rng.integers(0, 256, (rows, n)) / 255
    still = rng.choice([0.0, 0.05, 0.9])
    unit = rng.choice([1.0, (high - low) / 255])
    return cast(x, dtype), cast(unit * signs(rng, (rows, n)) * (rng.random((rows, n)) >= still), dtype), lower, upper


FAMILIES = {
    f.__name__: f
    for f in (
        *(usual, denormal, overflowing, tied, geometric, lone, edges, zeros, patchy, spread, coarse),
        *(clustered, levels),
    )
}


# --- targets ----------------------------------------------------------------------------------------------------------


def aims(rng: Rng, truth: Truth) -> Array:
    """An eps for every row: inside the reach, next to it, beyond, at a breakpoint, as plain delta has it, or 0."""
    rows, dtype, p = truth.x.shape[0], truth.dtype, truth.p
    finite = np.isfinite(truth.reach[:, 0])
    plain = norm(np.abs(truth.plain() - truth.x), p)[:, 0]
    scale = np.where(finite, truth.reach[:, 0], 10.0 ** rng.uniform(-6, 3, rows))
    most = L(MOST[dtype]) / 8
    ulps = rng.integers(-12, 13, rows) * rng.choice([2.0**-53, ULP[working(dtype)]], rows)
    with np.errstate(all="ignore"):
        which = rng.integers(len(truth.moves[0]) or 1, size=rows)
        chosen = np.take_along_axis(truth.room / truth.size, which[:, None], 1) if truth.x.size else truth.reach
        kink = truth.norm_at(np.where(np.isfinite(chosen), chosen, L(0)))[:, 0]
    choices = np.stack(
        [
            scale * rng.uniform(0, 1, rows),
            scale * 10.0 ** -rng.uniform(0, 12, rows),
            scale * (1 - 10.0 ** -rng.uniform(1, 16, rows)),
            np.where(finite, scale * (1 + ulps), scale),
            scale * (1 + 10.0 ** rng.uniform(-15, 3, rows)),
            kink,
            plain * (1 + ulps),
            plain * rng.uniform(0.5, 1.5, rows),
            np.zeros(rows),
        ]
    )
    kind = rng.choice(len(choices), p=[0.25, 0.15, 0.1, 0.1, 0.1, 0.1, 0.08, 0.08, 0.04], size=rows)
    eps = choices[kind, np.arange(rows)]
    with np.errstate(all="ignore"):
        eps = np.where(np.isfinite(eps), np.minimum(eps, most), most)
        return eps.astype(np.float64)


def aims_in_a_cluster(rng: Rng, truth: Truth) -> Array:
    """Mostly the norm at a scale where breakpoints are closest together, or next to it."""
    eps = aims(rng, truth)
    rows, n = truth.x.shape
    with np.errstate(all="ignore"):
        breaks = np.sort(np.where(truth.moves & (truth.room > 0), truth.room / truth.size, L(np.inf)), axis=1)
        many = max(1, n // 12)
        width = breaks[:, many:] / breaks[:, :-many] if n > many else np.ones((rows, 1))
        first = np.where(np.isfinite(width), width, np.inf).argmin(axis=1)
        which = np.minimum(first + rng.integers(0, many + 1, rows), max(n - 1, 0))
        chosen = np.take_along_axis(breaks, which[:, None], 1)
        off = signs(rng, (rows, 1)) * rng.choice([0.0, 1e-7, 1e-6, 1e-5, 1e-4], (rows, 1)) * rng.random((rows, 1))
        kink = truth.norm_at(chosen * (1 + off))[:, 0]
    return np.where(np.isfinite(kink) & (rng.random(rows) < 0.8), kink, eps).astype(np.float64)


def aims_near_x(rng: Rng, truth: Truth) -> Array:
    """Mostly a small part of the reach."""
    eps, rows = aims(rng, truth), truth.x.shape[0]
    small = truth.reach[:, 0] * 10.0 ** rng.uniform(-4, math.log10(0.3), rows)
    return np.where(rng.random(rows) < 0.8, small, eps).astype(np.float64)


AIMS = {"clustered": aims_in_a_cluster, "levels": aims_near_x}  # of other families, `aims`


# --- batches ----------------------------------------------------------------------------------------------------------


def factors(rng: Rng, n: int) -> tuple[int, ...]:
    """A shape of a sample of n elements."""
    for _ in range(4):
        k = int(rng.integers(1, 9))
        if n and n % k == 0:
            rest = n // k
            return (k, rest) if rest % 2 or rng.random() < 0.5 else (k, rest // 2, 2)
    return (n,)


def order(rng: Rng) -> float:
    kind = rng.random()
    if kind < 0.6:
        return float(rng.choice(ORDERS, p=[0.15, 0.05, 0.4, 0.1, 0.05, 0.05, 0.2]))
    if kind < 0.7:
        return float(1 + 10.0 ** -rng.uniform(0, 15))
    if kind < 0.85:
        return float(rng.uniform(1, 6))
    return float(10.0 ** rng.uniform(0, 4))


def length(rng: Rng, longest: int) -> int:
    kind = rng.random()
    if kind < 0.03:
        return 0
    if kind < 0.9:
        return int(2.0 ** rng.uniform(0, 7))
    if kind < 0.998:
        return int(2.0 ** rng.uniform(5, 13))
    return int(min(longest, 10.0 ** rng.uniform(4, 6 if kind < 0.9998 else 7)))


def make(seed: int, index: int, profile: Profile) -> Batch:
    """The batch of that number."""
    rng = np.random.default_rng([seed, index])
    names = [name for name in FAMILIES if profile.subnormal or name != "denormal"]
    family = str(rng.choice(names))
    dtype = str(rng.choice(profile.dtypes))
    if profile.few:
        # From a small pool, so that programs are found again.
        pool = np.random.default_rng([seed, int(rng.integers(24))])
        rows, n = 64, int(pool.choice([1, 2, 7, 33]))
        p, mode, dtype = float(pool.choice(ORDERS)), str(pool.choice(MODES)), str(pool.choice(profile.dtypes))
    else:
        n, p = length(rng, profile.longest), float(rng.choice(SOME)) if profile.few_orders else order(rng)
        if family in AIMS:  # hundreds of elements, and thousands
            n = int(min(profile.longest, 2.0 ** rng.uniform(5, 12.5)))
        mode = str(rng.choice(MODES, p=[0.6, 0.2, 0.2]))
        most = max(1, 2**14 // max(n, 1))
        rows = int(min(profile.most_rows, most, max(profile.least_rows, 2.0 ** rng.uniform(0, 6.1))))
    if family == "denormal" and dtype == "float64" and not profile.subnormal64:
        family = "usual"
    x, delta, lower, upper = FAMILIES[family](rng, rows, n, dtype)
    if not profile.subnormal:
        delta = np.where(np.abs(delta) < LEAST_NORMAL[dtype], 0, delta).astype(delta.dtype)
        x = np.where(np.abs(x) < LEAST_NORMAL[dtype], 0, x).astype(x.dtype)
        x = cast(np.clip(x, lower, upper), dtype)
    if mode == "at_least":  # x + delta itself is to be a number
        delta = cast(np.clip(delta.astype(np.float64), -MOST[dtype] / 4, MOST[dtype] / 4), dtype)
    if rng.random() < 0.1 and rows > 1:
        delta[rng.integers(rows)] = 0
    look = looked(rng, rows, n, lower, upper)
    if profile.few:
        look = Look(own=True)
        lower, upper = (np.ascontiguousarray(np.broadcast_to(b, (rows, n))) for b in (lower, upper))
    if look.layout == "broadcast":
        if lower.shape[0] == upper.shape[0] == 1:
            x = np.broadcast_to(x[:1], x.shape)
        else:
            look = replace(look, layout="C")
    if look.channel:
        k = n // look.sample[0]
        lower, upper = (np.repeat(b[:, ::k], k, axis=1) if b.shape[1] > 1 else b for b in (lower, upper))
        x = cast(np.clip(x, lower, upper), dtype)
    truth = Truth(x, delta, lower, upper, np.zeros(rows), p, dtype)
    eps = AIMS.get(family, aims)(rng, truth)
    if profile.single_eps:
        eps = np.minimum(eps, 1e37).astype(np.float32).astype(np.float64)
    if look.eps == "number":
        eps = np.full(rows, eps[0] if rows else 0.5)
    unreachable = str(rng.choice(["maximize", "nan"], p=[0.7, 0.3]))
    return Batch(x, delta, lower, upper, eps, p, mode, unreachable, dtype, look, family)


def looked(rng: Rng, rows: int, n: int, lower: Array, upper: Array) -> Look:
    sample = factors(rng, n) if rng.random() < 0.5 else (n,)
    places = ["first", "first", "tuple", "last"] + (["none", "flat"] if rows == 1 else []) + ["split"] * (rows % 2 == 0)
    place = str(rng.choice(places))
    if place == "flat":
        sample = (n,)
    layouts = ["C", "C", "C", "F", "reversed", "sliced", "transposed", "readonly", "broadcast"]
    shapes = {lower.shape, upper.shape}
    channel = bool(len(sample) > 1 and shapes <= {(1, 1), (1, n)} and (1, n) in shapes and rng.random() < 0.5)
    return Look(
        sample,
        place,
        str(rng.choice(layouts)),
        str(rng.choice(["number", "row", "kept"], p=[0.2, 0.5, 0.3])),
        bool(rng.random() < 0.5),
        channel,
    )


# --- handing over -----------------------------------------------------------------------------------------------------


def laid_out(a: Array, layout: str) -> Array:
    """The same values in other memory."""
    if layout == "F":
        return np.asfortranarray(a)
    if layout == "reversed":
        back = tuple(slice(None, None, -1) for _ in a.shape)
        return np.ascontiguousarray(a[back])[back]
    if layout == "sliced":
        wide = np.full(tuple(2 * size + 1 for size in a.shape), 7, a.dtype)
        part = tuple(slice(1, 2 * size + 1, 2) for size in a.shape)
        wide[part] = a
        return wide[part]
    if layout == "transposed":
        axes = tuple(reversed(range(a.ndim)))
        return np.ascontiguousarray(a.transpose(axes)).transpose(axes)
    a = np.ascontiguousarray(a)
    if layout == "readonly":
        a = a.copy()
        a.flags.writeable = False
    return a


@dataclass(frozen=True)
class Call:
    """A batch as NumPy's arguments, and the way back to rows."""

    x: Array
    delta: Array
    eps: Any
    lower: Any
    upper: Any
    axis: Any
    back: Any  # from x's shape to (rows, n)
    per_row: Any  # from what has one number per sample to (rows,)
    spread: Any  # from (rows, n) to x's shape


def call_of(batch: Batch) -> Call:
    look, rows, n = batch.look, batch.rows, batch.n
    sample = look.sample or (n,)
    ones = (1,) * len(sample)
    if look.place == "last":
        shape, kept = (*sample, rows), (*ones, rows)
        axis: Any = tuple(range(len(sample)))

        def spread(a: Array) -> Array:
            return np.moveaxis(a.reshape(len(a), *sample), 0, -1)

        def back(a: Array) -> Array:
            return np.moveaxis(a, -1, 0).reshape(rows, n)

        of_sample = (*sample, 1)
    else:
        if look.place == "split":
            first: tuple[int, ...] = (2, rows // 2)
            axis = tuple(range(2, 2 + len(sample)))
        elif look.place in ("none", "flat"):
            first, axis = (), None if look.place == "none" else "batch"
        else:
            first, axis = (rows,), "batch" if look.place == "first" else tuple(range(1, 1 + len(sample)))
        shape, kept = first + sample, first + ones

        def spread(a: Array) -> Array:
            return a.reshape(shape)

        def back(a: Array) -> Array:
            return a.reshape(rows, n)

        of_sample = sample

    def bound(b: Array) -> Any:
        if b.shape == (1, 1):
            value = float(b[0, 0])
            return None if math.isinf(value) and look.channel is False and rows % 2 else value
        if b.shape == (rows, n) and not (rows == 1 and n > 1):
            return np.ascontiguousarray(spread(b))
        if b.shape[0] == 1:
            b = b.reshape(of_sample)
            return b[(slice(None), *(slice(0, 1),) * (len(sample) - 1))] if look.channel else b
        return b.reshape(kept)

    x, delta = (laid_out(np.array(spread(a)), look.layout) for a in (batch.x, batch.delta))
    if look.layout == "broadcast" and look.place in ("first", "tuple"):
        x = np.broadcast_to(x[:1], x.shape)
    eps: Any = batch.eps
    if look.eps == "number":
        eps = float(eps[0]) if rows else 0.5
    elif look.eps == "kept" or look.place == "split":
        eps = eps.reshape(kept)
    elif look.place in ("none", "flat"):
        eps = eps.reshape(())
    return Call(x, delta, eps, bound(batch.lower), bound(batch.upper), axis, back, lambda a: a.reshape(rows), spread)


# --- files ------------------------------------------------------------------------------------------------------------


def hexed(a: Array) -> list[Any]:
    return [hexed(v) if np.ndim(v) else float(v).hex() for v in np.asarray(a, np.float64)]


def unhexed(values: list[Any]) -> Any:
    return [unhexed(v) if isinstance(v, list) else float.fromhex(v) for v in values]


def to_json(batch: Batch, **more: Any) -> str:
    """A batch as text; every number exactly."""
    look = {k: v for k, v in vars(batch.look).items() if v != getattr(Look(), k)}
    data = {
        **more,
        "dtype": batch.dtype,
        "p": float(batch.p).hex(),
        "mode": batch.mode,
        "unreachable": batch.unreachable,
        "look": look,
        **{name: hexed(getattr(batch, name)) for name in ("x", "delta", "lower", "upper", "eps")},
    }
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str) -> Batch:
    data = json.loads(text)
    dtype, rows = data["dtype"], len(data["eps"])

    def array(name: str) -> Array:
        a = np.array(unhexed(data[name]), np.float64)
        return cast(a.reshape(len(a) if a.size or name == "x" else rows, -1 if a.size else 0), dtype)

    x, delta, lower, upper = (array(name) for name in ("x", "delta", "lower", "upper"))
    given: dict[str, Any] = {k: tuple(v) if k == "sample" else v for k, v in data["look"].items()}
    eps = np.array(unhexed(data["eps"]), np.float64)
    options = float.fromhex(data["p"]), data["mode"], data["unreachable"], dtype
    return Batch(x, delta, lower, upper, eps, *options, Look(**given), "corpus")


def corpus() -> list[Path]:
    return sorted((Path(__file__).parent / "corpus").glob("*.json"))
