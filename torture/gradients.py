"""The gradients of a batch, from the oracle's own scale and in extended precision, against a backend's.

With U the elements that move, z how far, w = (z/eps)^(p-1), S the sum of g*delta and D that of w*|delta| over U, the
gradients are those of docs/math.md. Every rounding on the way to them is bounded by a few units in the last place of
the working precision, relative to the terms of a sum and not to the sum. Where two answers are right, as next to a
kink, the whole sample must agree with one of them; where more are, or rounding explains anything, it is left out and
not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import clipaware as ca
from torture.cases import cast
from torture.oracle import LEAST_NORMAL, MOST, L, Truth, exact, norm, raised, spacing, working

if TYPE_CHECKING:
    from torture.check import Checker

Array = Any
NAMES = "x", "delta", "eps", "lower", "upper"

FEW = 4  # working spacings that a few operations may cost
KINK = 8  # working spacings next to its kink within which an element may count as clipped or not
ROOM = 16  # and for p = inf, next to eps within which a room may count as enough
LOST = 1 / 16  # an uncertainty, relative to what there is, beyond which nothing is compared
LANE = 4096  # elements that are added up in the working precision, eight sums or more side by side
FAR = {dtype: 2.0**1023 if dtype == "float64" else 2.0**127 for dtype in MOST}
STEPS = 300  # of Newton's method


class Answer(NamedTuple):
    """Gradients in rows form, and how far off they may be."""

    values: dict[str, Array]  # of x, delta and both bounds (rows, n), of eps (rows, 1)
    slack: dict[str, Array]
    sure: Array  # (rows, 1), whether that is known
    each: Array  # (rows, n), and of which elements


def cotangent(rows: int, n: int, dtype: str) -> Array:
    return cast(np.random.default_rng(0).standard_normal((rows, n)), dtype)


def solved(t: Truth) -> tuple[Array, Array]:
    """For p < inf, the scale of every row and whether it was found: Newton from the left, until no element is clipped
    any more. Then it is the root of its piece."""
    eta = t.eps / np.maximum(norm(t.size, t.p), L(1e-4900))
    found = np.zeros(t.eps.shape, bool)
    left = np.flatnonzero((t.eps > 0) & (t.eps <= t.reach) & ~t.zero)
    before = np.zeros((len(left), t.x.shape[1]), bool)
    for _ in range(STEPS):
        size, room, eps, here = t.size[left], t.room[left], t.eps[left], eta[left]
        free = t.moves[left] & (here * size < room)
        over, some = np.where(free, here * size, room) / eps, free.any(axis=1, keepdims=True)
        clipped = np.where(free, 0, raised(over, t.p)).sum(axis=1, keepdims=True)
        top = np.where(some, np.where(free, over, 0).max(axis=1, keepdims=True, initial=0), L(1))
        slope = np.where(free, raised(over / top, t.p), 0).sum(axis=1, keepdims=True)
        there = here * np.power(np.maximum(1 - clipped, 0) / slope, L(1) / L(t.p)) / top
        eta[left] = np.where(some & (there > here), there, here)
        same = (free == before).all(axis=1)
        found[left[same]] = some[same]
        left, before = left[~same], free[~same]
        if not len(left):
            break
    return eta, found


class Pull:
    """A cotangent and a batch, and what is pulled back."""

    def __init__(self, checker: Checker, g: Array) -> None:
        t, batch = checker.truth, checker.batch
        self.t, self.p, self.u, self.floor = t, t.p, checker.u, checker.floor
        self.tol, self.g = checker.tol, exact(g)
        self.adding = (FEW + min(batch.n, LANE) / 16) * self.u
        plain, margin = t.norm_at(L(1)), 4 * checker.tol + checker.backend.slack
        short, long = plain < t.eps * (1 - margin), plain > t.eps * (1 + margin)
        self.at_zero = (t.eps == 0) & ~t.zero
        going = checker.within & (t.eps > self.floor)
        last = t.last_break()
        if batch.mode == "equal":
            self.held, self.corner, self.regular = t.zero & False, checker.beyond, going
        elif batch.mode == "at_most":
            far, near = last > 1 + KINK * self.u, last < 1 - KINK * self.u
            self.held = (going & short) | (checker.beyond & far)
            self.corner, self.regular = checker.beyond & near, going & long
        else:
            self.held, self.corner, self.regular = going & long, checker.beyond, going & short
        self.held, self.corner = self.held & ~t.zero, self.corner & ~t.zero
        # A result of NaN is a constant.
        nan = batch.unreachable == "nan" and batch.mode != "at_most"
        self.constant = (self.corner | (t.zero & (t.eps > 0))) & nan
        self.eta: Array
        self.found: Array
        self.eta, self.found = solved(t) if t.p < math.inf else (t.eps * 0, t.eps > 0)
        self.scale = "float32" if checker.backend.profile.single_eps else "float64"  # in which eta is kept

    def answers(self) -> tuple[Answer, Answer]:
        """With all elements next to their kinks unclipped, and with all of them clipped."""
        return self.answer(True), self.answer(False)

    def answer(self, unclipped: bool) -> Answer:
        t, p, u, g, floor = self.t, self.p, self.u, self.g, self.floor
        rolling = self.regular | self.at_zero
        top = t.size.max(axis=1, keepdims=True, initial=0)
        active = t.moves & False
        doubtful = active
        if p == math.inf:
            margin = ROOM * u
            enough = t.room >= t.eps * (1 - margin if unclipped else 1 + margin)
            roomy = t.moves & (t.room > 0) & enough
            most = np.where(roomy, t.size, 0).max(axis=1, keepdims=True, initial=0)
            active = roomy & (t.size == most) & rolling
            doubtful = (
                t.moves
                & (np.abs(t.room - t.eps) <= margin * t.eps + np.abs(t.given - t.x))
                & (t.size >= most)
                & self.regular
            )
            eta, found, off = t.eps / most, most > 0, np.where(self.regular, L(FEW * u), 0)
        else:
            eta, found, off = self.eta, self.found, L(0)
        eta = np.where(self.regular & found, eta, np.where(self.held, L(1), L(0)))
        inside = t.moves & (t.room > 0)
        # An x next to its bounds may count where it is, or where it is clipped to.
        outside = np.abs(t.given - t.x)
        moved = np.where(t.moves, eta * t.size, 0)
        free = ~t.moves | (inside & (moved <= t.room))
        kinked, steady = inside & False, self.regular | True
        for _ in range(3):
            before = kinked
            if p < math.inf:
                # Of the norm, what still grows beyond the kinks; by it a scale is as uncertain as the norm is.
                part = np.where(inside & free & ~kinked, moved, 0) / np.where(self.regular, t.eps, 1)
                share = np.where(self.regular, raised(part, p).sum(axis=1, keepdims=True), 1)
                off = np.where(self.regular, (self.tol + FEW * u + t.x.shape[1] * L(2) ** -62) / share, 0)
            kinked = (
                inside & (np.abs(moved - t.room) <= (off + KINK * u) * t.room + outside) & (self.regular | self.held)
            )
            kinked |= inside & (t.room < floor) & (moved <= t.room)
            steady = (kinked == before).all(axis=1, keepdims=True)
        free = np.where(kinked, unclipped, free) | active
        doubtful = doubtful | kinked
        # More than one kind of doubt has more than two answers.
        first = doubtful & (np.cumsum(doubtful, axis=1) == 1)
        alike = np.ones_like(self.at_zero)
        for a in (t.size, t.room):
            alike &= (~doubtful | (a == np.where(first, a, 0).sum(axis=1, keepdims=True))).all(axis=1, keepdims=True)

        total = norm(np.where(inside, t.size, 0), p)
        z = np.where(free, moved / np.where(self.regular, t.eps, 1), t.room / np.where(self.regular, t.eps, 1))
        z = np.where(self.at_zero, np.where(inside, t.size / np.where(total > 0, total, 1), 0), z)
        z = np.where(rolling & t.moves, np.minimum(z, 1), 0)
        # In which delta may be measured: what is far below has lost its digits.
        unit = np.maximum(top, np.where(self.regular & (eta > 0), 1 / np.where(eta > 0, eta, 1), 0))
        in_z = FEW * u + np.where(t.moves & free, floor * unit / t.size, 0)
        in_z = in_z + np.where(self.at_zero, self.adding, 0)
        if p == math.inf:
            count = np.maximum(active.sum(axis=1, keepdims=True), 1)
            w, dw = np.where(active, L(1) / count, 0), np.where(active, FEW * u / count, 0)
        elif p == 1:
            w, dw = np.where(t.moves & rolling, L(1), 0), z * 0
        else:
            w = np.where(z > 0, np.power(np.where(z > 0, z, 1), L(p - 1)), 0)
            logarithm = np.abs(np.log(np.where(w > 0, w, 1)))
            dw = w * np.expm1((p - 1) * in_z + (FEW + logarithm) * u) + np.where(t.moves & rolling, floor, 0)
            further = np.power((t.room + outside) / np.where(self.regular, t.eps, 1), L(p - 1)) - w
            dw = dw + np.where(self.regular & t.moves & ~free & (outside > 0), further, 0)
            dw = np.where(t.moves & rolling & (in_z > LOST), L(1), np.minimum(dw, 1))
        S, terms, D, dD = (
            np.where(free, a, 0).sum(axis=1, keepdims=True)
            for a in (g * t.delta, np.abs(g * t.delta), w * t.size, dw * t.size)
        )
        lost = t.x.shape[1] * floor * unit
        dS, dD = self.adding * terms + lost, dD + self.adding * D + lost
        good = rolling & (D > 0)
        D = np.where(good, D, 1)
        lam = np.where(good, S / D, 0)
        own = np.where(good, (dS + np.abs(lam) * dD) / D + FEW * u * np.abs(lam), 0)
        # The scale's error is the same in all w of U, and cancels in lam*w there.
        in_lam = own + np.abs(lam) * np.expm1(np.minimum((p - 1) * off, 1) if p < math.inf else off)
        pull = lam * t.sign * w
        in_pull = np.where(free, own, in_lam) * w + np.abs(lam) * dw + FEW * u * np.abs(pull) + floor
        in_pull = np.where(good, in_pull, 0)
        beyond = self.corner & t.moves
        follows = (free & ~beyond) | self.at_zero
        g = np.where(self.constant, 0, g)
        c = np.where(follows, 0, g - pull)
        in_c = np.where(follows | ~good, 0, in_pull + u * (np.abs(g) + np.abs(pull)) + spacing(c, t.dtype))
        moving = free & (self.regular | self.held) & ~beyond
        size = np.abs(g) + np.abs(pull)
        wobble = eta * (in_pull + FEW * u * size) + (off + FEW * u) * np.abs(eta * (g - pull)) + floor * (size + 1)
        exactly = self.held | self.at_zero | self.corner | t.zero
        values = {
            "x": np.where(follows, g, pull),
            "delta": np.where(moving, eta * (g - pull), 0),
            "eps": lam,
            "lower": np.where(t.delta < 0, c, 0),
            "upper": np.where(t.delta > 0, c, 0),
        }
        slack = {
            "x": np.where(follows, 0, in_pull),
            "delta": np.where(moving & ~exactly, wobble, 0),
            "eps": in_lam,
            "lower": np.where(t.delta < 0, in_c, 0),
            "upper": np.where(t.delta > 0, in_c, 0),
        }
        known = (eta > LEAST_NORMAL[self.scale]) & (eta < MOST[self.scale])
        known &= found & steady & (off <= LOST) & (in_lam <= LOST * terms / D) & alike & (D > lost)
        # At eps = 0 powers are taken in units of the largest, which may have no room, and the others' may vanish.
        largest = np.where(inside, t.size, 0).max(axis=1, keepdims=True, initial=0)
        resting = self.at_zero & ~kinked.any(axis=1, keepdims=True)
        resting &= (largest == 0) | (p == math.inf) | (np.power(largest / top, L(min(p, 1e5))) > floor)
        sure = np.where(self.regular, known, resting | self.held)
        # Beyond the numbers of the working precision, a scale may be cut to the largest.
        slack["delta"] = np.where(eta >= FAR[t.dtype], L(np.inf), slack["delta"])
        return Answer(values, slack, sure | self.corner | t.zero, ~(kinked & self.held))


def summed(a: Array, shape: tuple[int, ...]) -> Array:
    """Over what was broadcast."""
    a = a.sum(axis=tuple(range(a.ndim - len(shape))))
    return a.sum(axis=tuple(i for i, size in enumerate(shape) if size == 1), keepdims=True).reshape(shape)


def close(got: Array, value: Array, slack: Array, dtype: str) -> Array:
    """Whether a gradient is within its slack and the rounding of its dtype, which may have no such number."""
    off = slack + spacing(np.maximum(np.abs(value), np.abs(np.where(np.isfinite(got), got, 0))), dtype)
    large = (
        np.isinf(got) & (np.abs(value) + off >= MOST[dtype]) & ((np.sign(got) == np.sign(value)) | (off >= MOST[dtype]))
    )
    return (np.abs(got - value) <= off) | large


def check(checker: Checker) -> None:
    """By ``perturb_vjp``, and by what the framework has of its own."""
    batch = checker.batch
    g = cotangent(batch.rows, batch.n, batch.dtype)
    with np.errstate(all="ignore"):
        answers = Pull(checker, g).answers()
        clear = one_answer(answers)
    asked = [(g, answers, True)]
    if not clear.all():
        # Sums over samples, too: nothing is pulled back from those that have no answer, or two.
        asked.append((np.where(clear, g, 0).astype(g.dtype), (kept(answers[0], clear),) * 2, False))
    for up, expected, counts in asked:
        for way, bars in pulled(checker, up):
            with np.errstate(all="ignore"):
                compare(checker, exact(up), expected, way, bars, counts)


def one_answer(answers: tuple[Answer, Answer]) -> Array:
    """(rows, 1), where there is just one."""
    one, other = answers
    same = one.sure & other.sure
    for name in ("x", "delta", "eps"):
        same = same & (one.values[name] == other.values[name]).all(axis=1, keepdims=True)
    return same


def pulled(checker: Checker, g: Array) -> Iterator[tuple[str, Any]]:
    backend = checker.backend
    given = checker.x, checker.delta, checker.eps, checker.lower, checker.upper
    up = backend.make(np.array(checker.call.spread(g)))
    yield "perturb_vjp", checker.run(ca.perturb_vjp, *given[:3], up, **checker.choice)
    if backend.pull is not None:
        yield "autodiff", backend.pull(checker.differentiated, given, up)


def kept(answer: Answer, clear: Array) -> Answer:
    """The answer if the cotangent is 0 in all other rows."""
    values, slack = ({name: np.where(clear, a, 0) for name, a in found.items()} for found in answer[:2])
    return Answer(values, slack, clear | True, answer.each | True)


def compare(checker: Checker, g: Array, answers: tuple[Answer, Answer], way: str, bars: Any, counts: bool) -> None:
    call, t, out, batch = checker.call, checker.truth, checker.out, checker.batch
    sure = answers[0].sure & answers[1].sure
    lost = sure & False
    if way == "autodiff" and checker.backend.pulls_normal:
        least = LEAST_NORMAL[working(batch.dtype)]
        for a in (t.given, t.delta, t.room):
            lost |= ((np.abs(a) < least) & (a != 0)).any(axis=1, keepdims=True)
    sure = sure & ~lost
    given = {name: getattr(call, name) for name in NAMES}
    right = [sure | True, sure | True]
    whole = bool((one_answer(answers) & ~lost).all())
    for name, bar in zip(NAMES, bars, strict=True):
        if bar is None:
            continue
        got = checker.backend.fetch(bar)
        dtype = str(got.dtype)
        own = {"x", "delta"} if way == "perturb_vjp" else {"x", "delta", "lower", "upper"}
        wide = "float64" if batch.dtype == "float64" else "float32"
        if got.shape != np.shape(given[name]) or dtype not in ({batch.dtype} if name in own else {"float64", wide}):
            out.failures.append((0, f"gradient of {name}", f"{way} returned {got.shape} {dtype}"))
            continue
        got = exact(got)
        per_row = name != "eps" or got.ndim > 0 or batch.rows == 1
        full = name in ("x", "delta") or got.shape == call.x.shape
        if full or (name == "eps" and per_row):
            mine = call.back(got) if name != "eps" else got.reshape(-1, 1)
            there = lost | ~np.isnan(mine).any(axis=1, keepdims=True)
            out.expect(there, f"gradient of {name}", f"{way} returned NaN", eps=t.eps)
            for k, answer in enumerate(answers):
                good = close(mine, answer.values[name], answer.slack[name], dtype)
                right[k] = right[k] & (good | ~answer.each if name != "eps" else good).all(axis=1, keepdims=True)
            either = right[0] | right[1] | ~sure
            out.expect(either, f"gradient of {name}", f"{way} is off", **shown(mine, answers[0], name, t))
            right = [a | ~either for a in right]
            if name == "x":
                may = (mine == g) | ((mine == 0) & (batch.unreachable == "nan"))
                out.expect((may | t.moves).all(axis=1), "gradient of x", f"{way}: not g where delta is 0")
        else:
            if np.isnan(got).any() and not lost.any():
                out.failures.append((0, f"gradient of {name}", f"{way} returned NaN"))
            if whole:
                value, slack, size = (
                    summed(a if name == "eps" else call.spread(a), got.shape)
                    for a in (answers[0].values[name], answers[0].slack[name], np.abs(answers[0].values[name]))
                )
                slack = slack + (FEW + min(batch.rows * batch.n, LANE) / 16) * checker.u * size
                if name != "eps":
                    slack = slack + spacing(value, batch.dtype)  # a bound is of x's dtype
                if name != "eps" and way == "autodiff":
                    # As is what it is spread to, whose gradients the framework adds up.
                    rows, n = np.shape(getattr(batch, name))
                    part = np.zeros_like(answers[0].values[name])
                    part[:rows, :n] = spacing(summed(answers[0].values[name], (rows, n)), batch.dtype) / 2
                    slack = slack + summed(call.spread(part), got.shape)
                if not close(got, value, slack, dtype).all():
                    worst = np.unravel_index(np.argmax(np.abs(got - value) - slack), got.shape)
                    text = f"{way} is off; got={got[worst]}, expected={value[worst]} within {slack[worst]}"
                    out.failures.append((0, f"gradient of {name}", text))
    if counts:
        out.gradients += int(sure.sum())
        out.pulled += len(sure)


def shown(got: Array, answer: Answer, name: str, t: Truth) -> dict[str, Array]:
    """The worst element of every row."""
    if not got.shape[1]:
        return {}
    value, slack = answer.values[name], answer.slack[name]
    worst = np.argmax(np.abs(got - value) - slack, axis=1)[:, None]
    found = {k: np.take_along_axis(a, worst, 1) for k, a in (("got", got), ("expected", value), ("slack", slack))}
    return {**found, "element": worst.astype(float), "eps": t.eps, "reach": t.reach}
