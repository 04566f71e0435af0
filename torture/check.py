"""Everything that must hold for a batch on a backend. docs/precision.md derives the tolerances."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import clipaware as ca
from torture import gradients
from torture.backends import Backend
from torture.cases import Batch, call_of
from torture.oracle import LEAST_NORMAL, MOST, TINY, ULP, L, exact, mp_solved, norm, spacing, working

Array = Any

NORM = {"float64": 1e-14, "float32": 3e-7, "float16": 3e-7, "bfloat16": 3e-7}  # of the norm, beyond a step of the dtype
STEP = 4  # working spacings of the scale within which neighbouring arrays on the ray count as one
# Of the norm at the eta of a report: it is that of sums in the working precision, since the array is polished after it.
ADDED = {"float64": 1e-14, "float32": 2e-6}
FARTHEST = 1e300  # scales beyond, or scales times the largest |delta|, are not promised
ZONE = 32  # working spacings around the reach within which eps may count as either


@dataclass
class Outcome:
    """What was found wrong, and what was measured."""

    failures: list[tuple[int, str, str]] = field(default_factory=list)  # row, kind, message
    error: float = 0.0  # of the norm, beyond what a step of the dtype explains
    errors: Array = None  # of the norm, all rows
    flagged: list[bool] = field(default_factory=list)  # rows of fast lanes, whether they left them to the careful lane
    seconds: float = 0.0
    gradients: int = 0  # rows whose gradients were compared
    pulled: int = 0  # of so many

    def expect(self, good: Array, kind: str, message: str, **values: Array) -> None:
        """A failure for every row that is not good."""
        for row in np.flatnonzero(~np.asarray(good).reshape(-1)).tolist():
            shown = ", ".join(f"{k}={_shown(np.asarray(v).reshape(-1), row)}" for k, v in values.items())
            self.failures.append((row, kind, f"{message}; {shown}" if shown else message))


def _shown(values: Array, row: int) -> str:
    value = values[row if len(values) > 1 else 0]
    return np.format_float_scientific(value, precision=18, unique=True, trim="-")


@contextmanager
def counted(flagged: list[bool]) -> Iterator[None]:
    """Note of every row that NumPy's fast lanes are given whether they flag it."""
    from clipaware._backends import numpy as host

    def noting(solve: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            found = solve(*args, **options)
            flagged.extend((found[2] < 0).ravel().tolist())
            return found

        return noted

    compiled = host.kernels()
    places = [(host, "_solve_by_operations")] + ([] if compiled is None else [(compiled, "solve")])
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, noting(getattr(module, name))))
        yield


class Checker:
    """One batch on one backend."""

    def __init__(self, backend: Backend, batch: Batch) -> None:
        self.backend, self.batch, self.call = backend, batch, call_of(batch)
        self.truth, self.out = batch.truth(), Outcome()
        self.options = {"p": batch.p, "axis": self.call.axis}
        self.choice = {"mode": batch.mode, "unreachable": batch.unreachable}
        call, make = self.call, backend.make
        self.x, self.delta = make(call.x), make(call.delta)
        self.eps, self.lower, self.upper = (self.companion(a) for a in (call.eps, call.lower, call.upper))
        self.before = [np.array(backend.fetch(a)).tobytes() for a in (self.x, self.delta)]
        self.u = ULP[working(batch.dtype)]
        t = self.truth
        with np.errstate(all="ignore"):
            self.tol = np.full_like(t.eps, NORM[batch.dtype])
            zone = ZONE * self.u + ZONE * ULP["float64"]
            # What is smaller than the smallest normal number may count as 0.
            self.floor = L(LEAST_NORMAL[working(batch.dtype)])
            self.beyond = t.eps > t.reach * (1 + zone) + self.floor
            self.within = (t.eps <= t.reach * (1 - zone) - self.floor) | ((t.eps == 0) & ~t.zero)
            self.small = (t.eps > 0) & (t.eps <= self.floor)
        self.still = (t.eps == 0) | t.zero

    def companion(self, a: Any) -> Any:
        """eps or a bound as it is handed over."""
        return self.backend.make(a) if isinstance(a, np.ndarray) and self.batch.look.own else a

    def run(self, function: Any, *args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*writ(e)?able.*")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            return self.backend.computed(function(*args, bounds=(self.lower, self.upper), **self.options, **options))

    def differentiated(self, x: Any, delta: Any, eps: Any, lower: Any, upper: Any) -> Any:
        """What a framework differentiates by itself."""
        options: dict[str, Any] = {**self.options, **self.choice}
        return ca.perturb(x, delta, eps, bounds=(lower, upper), **options)

    def rows(self, a: Any) -> Array:
        return exact(self.call.back(self.backend.fetch(a)))

    def numbers(self, a: Any) -> Array:
        return exact(self.call.per_row(self.backend.fetch(a))).reshape(-1, 1)

    # --- the array ---

    def perturbed(self) -> Array:
        v = self.run(ca.perturb, self.x, self.delta, self.eps, **self.choice)
        got = self.backend.fetch(v)
        if got.shape != self.call.x.shape or got.dtype != self.call.x.dtype:
            self.out.failures.append((0, "form", f"perturb returned {got.shape} {got.dtype}"))
        return v

    def check_array(self, v: Array) -> None:
        t, out, batch = self.truth, self.out, self.batch
        missing = np.isnan(v).all(axis=1, keepdims=True) & (batch.n > 0)
        may_be_nan = (
            (~self.within & (t.eps > 0)) if batch.mode != "at_most" and batch.unreachable == "nan" else t.zero & False
        )
        must_be_nan = (self.beyond | (t.zero & (t.eps > 0))) & may_be_nan & ~self.small
        out.expect(~missing | may_be_nan, "nan", "perturb returned NaN", eps=t.eps, reach=t.reach)
        out.expect(
            missing | ~must_be_nan | (batch.n == 0), "nan", "perturb did not return NaN", eps=t.eps, reach=t.reach
        )
        v = np.where(missing, t.x, v)
        good = np.isfinite(v).all(axis=1, keepdims=True)
        out.expect(good, "finite", "perturb returned infinity or NaN", eps=t.eps, reach=t.reach)
        v = np.where(np.isfinite(v), v, t.x)
        boxed = ((v >= t.lower) & (v <= t.upper)) | ((v == t.given) & ~t.moves)
        out.expect(boxed.all(axis=1), "bounds", "perturb left the bounds")
        stays = ((v == t.x) | (v == t.given)) | t.moves
        out.expect(stays.all(axis=1), "still", "an element whose delta is 0 moved")
        done = missing | ~good
        moved = (v - t.x) * t.sign
        out.expect(done | (moved >= 0).all(axis=1, keepdims=True), "backwards", "an element moved against delta")
        moved = np.where(t.moves, np.maximum(moved, 0), L(0))
        size = norm(moved, t.p)
        self.size = np.where(done, np.nan, size)

        out.expect(done | ~self.still | (size == 0), "still", "nothing was to move, and something did", norm=size)
        done = done | self.still | (self.small & (size == 0))
        if batch.mode == "at_most":
            over = size > t.eps
            out.expect(done | ~over, "at_most", "the norm exceeds eps", norm=size, eps=t.eps)
            plain64 = self.norm64(v)
            out.expect(
                done | (plain64 <= t.eps[:, 0]).reshape(-1, 1),
                "at_most",
                "the norm in float64 exceeds eps",
                norm=plain64,
                eps=t.eps,
            )
        held = self.held(v, done)
        done = done | held
        corner = (v == t.corner).all(axis=1, keepdims=True)
        out.expect(
            done | ~self.beyond | corner | (batch.mode == "at_most"),
            "corner",
            "eps is out of reach, and v is not at its bounds",
            eps=t.eps,
            reach=t.reach,
        )
        # What is next to the reach may be either, and ends at its corner or on the ray.
        done = done | (corner & ~self.within)
        self.check_ray(v, moved, size, done)

    def held(self, v: Array, done: Array) -> Array:
        """Rows that are to keep delta as it is, and do."""
        t, mode = self.truth, self.batch.mode
        if mode == "equal":
            return done
        plain = t.plain()
        size = norm(np.abs(plain - t.x) * t.moves, t.p)
        ideal = t.norm_at(L(1))
        margin = 4 * self.tol + self.backend.slack
        as_is = ((v == plain) | ~t.moves).all(axis=1, keepdims=True)
        if mode == "at_most":
            must = np.maximum(size, ideal) < t.eps * (1 - margin)
            may = size <= t.eps
        else:
            must = ideal > t.eps * (1 + margin)
            may = ideal >= t.eps * (1 - margin)
        must = must & np.isfinite(plain).all(axis=1, keepdims=True)
        self.out.expect(done | ~must | as_is, "held", f"{mode}: delta was to be left alone", norm=size, eps=t.eps)
        return as_is & may

    def norm64(self, v: Array) -> Array:
        """As somebody else would take it."""
        z = np.abs(v.astype(np.float64) - self.truth.x.astype(np.float64))
        top = z.max(axis=1, initial=0)
        if self.truth.p == math.inf:
            return top
        unit = np.where(top > 0, top, 1.0)
        with np.errstate(all="ignore"):
            return ((z / unit[:, None]) ** self.truth.p).sum(axis=1) ** (1 / self.truth.p) * unit

    def check_ray(self, v: Array, moved: Array, size: Array, done: Array) -> None:
        """One scale explains every element, and the next array on the ray is no nearer to eps."""
        t, dtype = self.truth, self.batch.dtype
        with np.errstate(all="ignore"):
            at_bound = (v == t.ahead) & t.moves
            half = spacing(v, dtype) / 2 + spacing(v, working(dtype)) * 2
            # A direction in its unit may be subnormal, and lose as much.
            top = t.size.max(axis=1, keepdims=True, initial=0)
            guess = np.where(t.moves, moved / t.size, 0).max(axis=1, keepdims=True, initial=0)
            half = half + np.minimum(guess * top, L(1e4000)) * L(TINY[working(dtype)])
            low = np.where(t.moves & (t.room > 0), np.maximum(moved - half, 0) / t.size, L(0))
            high = np.where(t.moves & ~at_bound, (moved + half) / t.size, L(np.inf))
            lowest, highest = low.max(axis=1, keepdims=True, initial=0), high.min(axis=1, keepdims=True, initial=np.inf)
            step = STEP * self.u
            self.out.expect(
                done | (lowest * (1 - step) <= highest * (1 + step)),
                "ray",
                "no single scale explains the array",
                least=lowest,
                most=highest,
            )
            error = np.where(done, 0, np.abs(size - t.eps) / t.eps)
            floor = np.where(done, 0, L(LEAST_NORMAL[working(dtype)]) / t.eps)
        limit = L(1) - (self.backend.slack if self.batch.mode == "at_most" else 0)
        far = error > self.tol + (1 - limit) + floor
        self.out.errors = error[~done].astype(float)
        self.out.error = float(np.where(far | (floor > self.tol), 0, error).max(initial=0))
        if far.any():
            rows = np.flatnonzero(far)
            some = self.batch.take(rows).truth()
            aim = some.eps * limit
            below, above = some.nearest(aim, step)
            best = (aim - below) / some.eps if limit < 1 else np.minimum(aim - below, above - aim) / some.eps
            excess = error[rows] - np.maximum(best, 0) - (1 - limit)
            # Next to the reach the corner is as good.
            either = ~self.within & ~self.beyond & (np.abs(size - t.reach) <= self.tol * t.reach)
            excess = np.where(either[rows], 0, excess)
            good = np.ones_like(done)
            good[rows] = excess <= self.tol[rows]
            whole = [np.zeros_like(size) for _ in range(2)]
            whole[0][rows], whole[1][rows] = below, above
            self.out.error = max(self.out.error, float(excess.max()))
            self.out.expect(
                good,
                "norm",
                "the norm is not the nearest",
                norm=size,
                eps=t.eps,
                error=error,
                below=whole[0],
                above=whole[1],
            )

    # --- the scale ---

    def check_scale(self, eta: Array, dtype: str) -> None:
        """The norms at the neighbours of eta are on either side of eps."""
        t, out, mode = self.truth, self.out, self.batch.mode
        lost = np.isnan(eta)
        may = (~self.within & (t.eps > 0)) if mode != "at_most" and self.batch.unreachable == "nan" else t.zero & False
        out.expect(~lost | may, "eta", "rescale returned NaN", eps=t.eps, reach=t.reach)
        must = may & (self.beyond | t.zero) & ~self.small
        out.expect(lost | ~must, "eta", "rescale did not return NaN", eta=eta)
        done = lost
        out.expect(done | (eta >= 0), "eta", "rescale returned a negative scale", eta=eta)
        out.expect(done | ~self.still | (eta == 0), "eta", "nothing was to move, and eta is not 0", eta=eta)
        done = done | self.still | (self.small & (eta == 0))
        if self.backend.flushes:
            done = done | ((eta == 0) & (t.norm_at(L(LEAST_NORMAL[dtype])) >= np.minimum(t.eps, t.reach)))
        farthest = FARTHEST / np.maximum(t.size.max(axis=1, keepdims=True, initial=0), L(1))
        done = done | ((eta >= farthest * (1 - L(1e-9))) & (farthest < t.last_break()) & (t.norm_at(farthest) < t.eps))
        below, above = self.around(eta, dtype)
        if mode == "at_most":
            out.expect(done | (eta <= 1), "eta", "at_most: eta exceeds 1", eta=eta)
            above = np.where(eta == 1, L(np.inf), above)
        elif mode == "at_least":
            out.expect(done | (eta >= 1) | ~self.within, "eta", "at_least: eta is below 1", eta=eta)
            below = np.where(eta == 1, L(0), below)
        least, most = t.norm_at(below), t.norm_at(above)
        last_below, last_above = self.around(t.last_break(), dtype)
        extreme = (eta >= last_below * (1 - 4 * self.u)) & (eta <= last_above * (1 + 4 * self.u))
        out.expect(
            done | ~self.beyond | extreme | (mode != "equal"),
            "eta",
            "eps is out of reach, and eta is not the least that clips all",
            eta=eta,
            expected=t.last_break(),
        )
        floor = self.floor
        good = (least <= t.eps * (1 + self.tol) + floor) & (most >= np.minimum(t.eps, t.reach) * (1 - self.tol) - floor)
        good = good | (~self.within & extreme)
        out.expect(
            done | good,
            "eta",
            "the norms next to eta are not on either side of eps",
            eta=eta,
            eps=t.eps,
            below=least,
            above=most,
        )

    def around(self, eta: Array, dtype: str) -> tuple[Array, Array]:
        """The neighbours of eta in its dtype."""
        most = L(MOST[dtype])
        with np.errstate(all="ignore"):
            gap = spacing(eta, dtype)
            below = np.where(eta > most, most * (1 - ULP[dtype]), np.maximum(eta - gap, 0))
            above = np.where(eta + gap > most, L(np.inf), eta + gap)
        return below, above

    def check_reach(self, reach: Array) -> None:
        t = self.truth
        floor = self.floor
        most = L(float(np.finfo(np.float32 if self.batch.dtype != "float64" else np.float64).max))
        with np.errstate(all="ignore"):
            good = (np.abs(reach - t.reach) <= self.tol * t.reach + floor) | (
                (reach > most) & (t.reach > most * (1 - self.tol))
            )
        self.out.expect(good, "reach", "reach is off", reach=reach, expected=t.reach)

    def check_report(self, report: Any, eta: Array, reach: Array) -> None:
        t, out, batch = self.truth, self.out, self.batch
        found = {name: self.numbers(a) for name, a in vars(report).items()}
        wide = "float64" if batch.dtype == "float64" else "float32"
        same = (found["reach"] == reach) | (np.isnan(reach) & np.isnan(found["reach"]))
        out.expect(same, "report", "report.reach is not reach", found=found["reach"], reach=reach)
        with np.errstate(all="ignore"):
            close = np.abs(found["eta"] - eta) <= spacing(eta, batch.dtype)
            # Where the norm hardly depends on the scale, they may be further apart, and their norms may not.
            here, least, most = (t.norm_at(a) for a in (found["eta"], *self.around(eta, batch.dtype)))
            close |= (here >= least * (1 - ADDED[wide])) & (here <= most * (1 + ADDED[wide]))
        out.expect(
            close | ~np.isfinite(eta) | (np.abs(eta) < LEAST_NORMAL[batch.dtype]),
            "report",
            "report.eta is not rescale's",
            found=found["eta"],
            eta=eta,
        )
        with np.errstate(all="ignore"):
            off = np.abs(found["norm"] - self.size)
            good = (off <= (ULP[wide] + 1e-14) * self.size + LEAST_NORMAL[wide]) | np.isnan(self.size)
            good |= np.isinf(found["norm"]) & (self.size > MOST[wide])
        out.expect(good, "report", "report.norm is not the norm", found=found["norm"], norm=self.size)
        reachable = found["reachable"] != 0
        out.expect(
            reachable | ~(self.within | (t.eps == 0)), "report", "report.reachable is wrong", eps=t.eps, reach=t.reach
        )
        out.expect(
            ~(reachable & self.beyond & (batch.mode == "equal")),
            "report",
            "report.reachable is wrong",
            eps=t.eps,
            reach=t.reach,
        )
        with np.errstate(all="ignore"):
            total = norm(t.size, t.p)
            naive = np.where(self.still, L(0), t.eps / np.where(total > 0, total, L(1)))
            move = t.moved(naive)
            loose = spacing(t.x + t.sign * move, batch.dtype) + 4 * self.u * move
            least = norm(np.maximum(move - loose, 0), t.p) * (1 - self.tol)
            most = norm(np.where(t.moves, np.minimum(move + loose, t.room), 0), t.p) * (1 + self.tol)
            floor = LEAST_NORMAL[wide]
            good = (found["naive_norm"] >= least - floor) & (found["naive_norm"] <= most + floor)
        out.expect(
            good | self.still, "report", "report.naive_norm is off", found=found["naive_norm"], least=least, most=most
        )

    # --- all of it ---

    def check(self, thorough: bool = True, part: int = 0) -> Outcome:
        """All that there is, or a part of what costs more."""
        backend, batch, out = self.backend, self.batch, self.out
        try:
            with counted(out.flagged):
                v = self.perturbed()
                eta = self.run(ca.rescale, self.x, self.delta, self.eps, **self.choice)
            got, scale = backend.fetch(v), self.numbers(eta)
            self.check_array(exact(self.call.back(got)))
            self.check_scale(scale, batch.dtype)
            if thorough or part % 3 == 0:
                reach = self.numbers(self.run(ca.reach, self.x, self.delta))
                self.check_reach(reach)
                report = self.run(ca.report, self.x, self.delta, self.eps, **self.choice)
                self.check_report(report, scale, reach)
            if thorough or part % 4 == 1:
                again = backend.fetch(self.run(ca.perturb, self.x, self.delta, self.eps, **self.choice))
                if again.tobytes() != np.asarray(got).tobytes():
                    out.failures.append((0, "determinism", "the same call gave other bits"))
                if batch.rows:
                    self.check_alone(self.call.back(got), part % batch.rows)
            after = [np.array(backend.fetch(a)).tobytes() for a in (self.x, self.delta)]
            if after != self.before:
                out.failures.append((0, "inputs", "x or delta were changed"))
            if thorough or part % 8 == 2:
                self.check_by_mpmath(scale)
            if thorough or part % 5 == 3:
                gradients.check(self)
            if thorough or part % 7 == 5:
                self.check_raised()
        except Exception as error:
            out.failures.append((0, f"raised {type(error).__name__}", f"{type(error).__name__}: {error}"))
        return out

    def check_raised(self) -> None:
        """An error if and only if some row is out of reach."""
        t, batch = self.truth, self.batch
        missed = (self.beyond | (t.zero & (t.eps > 0))) & ~self.small & (batch.mode != "at_most") & (batch.n > 0)
        fine = self.within | (t.eps == 0) | (batch.mode == "at_most")
        try:
            choice = {"mode": batch.mode, "unreachable": "raise"}
            self.backend.fetch(self.run(ca.perturb, self.x, self.delta, self.eps, **choice))
            self.out.expect(~missed, "raise", "no error, and eps is out of reach", eps=t.eps, reach=t.reach)
        except ca.UnreachableError as error:
            if fine.all():
                self.out.failures.append((0, "raise", f"an error, and eps is within reach: {error}"))

    def check_alone(self, got: Array, row: int) -> None:
        """A row by itself: the same bits."""
        if not self.backend.alone:
            return
        alone = Checker(self.backend, self.batch.take(np.array([row])))
        v, here = (
            np.ascontiguousarray(a)
            for a in (alone.call.back(self.backend.fetch(alone.perturbed())), got[row : row + 1])
        )
        if v.tobytes() != here.tobytes():
            other = (v != here) | (np.signbit(v) != np.signbit(here))
            message = f"a row alone gives other bits than in its batch: {v[other][:3]} instead of {here[other][:3]}"
            self.out.failures.append((row, "alone", message))

    def check_by_mpmath(self, eta: Array) -> None:
        """One short row, by other means."""
        t, batch = self.truth, self.batch
        if (
            batch.n == 0
            or batch.n > 64
            or batch.mode != "equal"
            or not (here := self.within & ~self.still & ~self.small).any()
        ):
            return
        row = int(np.flatnonzero(here)[0])
        low, high = (np.broadcast_to(np.asarray(b, np.float64), batch.x.shape)[row] for b in (batch.lower, batch.upper))
        solved, reach = mp_solved(batch.x[row], batch.delta[row], low, high, float(batch.eps[row]), batch.p)
        mine = t.reach[row, 0]
        if np.isfinite(mine) and not abs(mine - _wide(reach)) <= 1e-17 * mine:
            self.out.failures.append((row, "oracle", f"the oracle's reach is {mine}, mpmath's {reach}"))
        found = norm_at = t.norm_at(_wide(solved))[row, 0]
        if not abs(found - t.eps[row, 0]) <= 1e-17 * t.eps[row, 0]:
            self.out.failures.append((row, "oracle", f"at mpmath's scale the oracle's norm is {norm_at}"))
        below, above = self.around(eta, batch.dtype)
        value = _wide(solved)
        # Where the norm hardly grows, the scale may be another.
        norms = (t.norm_at(a)[row, 0] for a in (below, eta, above))
        tol = self.tol[row, 0]
        flat = any(abs(a - t.eps[row, 0]) <= tol * t.eps[row, 0] for a in norms)
        if not (below[row, 0] * (1 - tol) <= value <= above[row, 0] * (1 + tol) or flat):
            self.out.failures.append((row, "mpmath", f"eta is {eta[row, 0]}, mpmath's {solved}"))


def _wide(a: Any) -> Any:
    """A number of mpmath's in extended precision."""
    import mpmath as mp

    with mp.workdps(30):
        return L(mp.nstr(a, 25))


def check(backend: Backend, batch: Batch, thorough: bool = True, part: int = 0) -> Outcome:
    with backend.enter():
        return Checker(backend, batch).check(thorough, part)
