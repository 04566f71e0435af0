"""Attacks that spend their whole budget: noise and gradients, of exactly the norm that was asked for after clipping."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from clipaware import _check
from clipaware._api import perturb, reach
from clipaware._dispatch import backend_of, described
from clipaware.noise import KINDS, sample
from clipaware.reference import norm64

Array = Any
Slope = Callable[[Array, Array], tuple[Array, Array]]

__all__ = ["AttackResult", "Robustness", "gradient_attack", "noise_attack", "noise_robustness"]

LOSSES = ("cross-entropy", "margin")
STARTS = 8  # times that an eps is doubled until it is all that a direction can reach
LEAST = 1e-30  # of the steepest direction, so that p near 1 leaves no element with a gradient behind; float16 has 1e-7
FINEST = 2.0**-20  # of what a direction can reach: nothing below that is looked for


@dataclass(frozen=True)
class AttackResult:
    """What an attack found, sample by sample.

    Attributes
    ----------
    perturbed
        Like x. Where the attack failed, its last attempt.
    success
        Whether the model misses the label there, or says the target class. This and the following are NumPy arrays.
    norms
        The norm of ``perturbed - x``, measured in float64.
    repeat
        Which repeat (or step, of a gradient attack) succeeded, counted from 0; -1 where none did.
    """

    perturbed: Array
    success: Array
    norms: Array
    repeat: Array


@dataclass(frozen=True)
class Robustness:
    """How much noise each sample takes.

    Attributes
    ----------
    eps
        The smallest norm of noise at which the model was seen to miss the label: 0 where it does so without noise,
        infinite where no noise did it. A NumPy array in float64, like the next.
    repeat
        Which repeat that was; -1 where there is none.
    p
        Order of the norm.
    """

    eps: Array
    repeat: Array
    p: float

    @property
    def median(self) -> float:
        """The median over samples, the robustness measure of Rusak et al. (2020)."""
        return float(np.median(self.eps)) if len(self.eps) else math.nan

    def accuracy(self, eps: Any) -> Array:
        """The share of samples that noise of this norm did not flip, for a number or an array of them."""
        ordered = np.sort(self.eps)
        return 1 - np.searchsorted(ordered, np.asarray(eps, float), side="right") / max(len(ordered), 1)

    def plot(self, axes: Any = None, **style: Any) -> Any:
        """Draw accuracy against eps on Matplotlib's axes, or on new ones, and return them; `style` is the line's."""
        if axes is None:
            try:
                # Not pyplot: a Figure of its own needs no display and leaves no state behind.
                from matplotlib.figure import Figure
            except ImportError as error:
                raise ImportError("a plot needs Matplotlib: pip install 'clipaware[attacks]'") from error
            axes = Figure(figsize=(6, 4), dpi=110, layout="constrained").subplots()
        finite = np.sort(self.eps[np.isfinite(self.eps)])
        levels = np.concatenate([[0.0], finite, finite[-1:] * 1.05])
        (line,) = axes.step(levels, self.accuracy(levels), where="post", **style)
        if math.isfinite(self.median):
            axes.axvline(self.median, color=line.get_color(), linestyle=":", linewidth=1)
        axes.set(xlabel=f"norm of the noise (p = {self.p:g})", ylabel="accuracy", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        return axes


def noise_attack(
    model: Callable[[Any], Any],
    x: Array,
    labels: Any,
    eps: Any,
    *,
    noise: str = "gaussian",
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    repeats: int = 1,
    targeted: bool = False,
    batch_size: int = 128,
    seed: int | None = None,
    progress: bool = False,
) -> AttackResult:
    """Add noise with ``||v - x||_p = eps`` after clipping, again and again, until the model is wrong.

    Samples that have fallen are not asked for again. What is needed beyond x and the result is bounded by the batch.

    Parameters
    ----------
    model
        Takes a batch like x and returns scores, (samples, classes): a PyTorch module, a Keras model, any function.
    x
        Samples inside their bounds, counted by the first axis: a floating array of the model's framework.
    labels
        The class of every sample; with ``targeted``, the class that the model is to say.
    eps
        The norm of the noise: a number, or one per sample.
    noise
        One of ``clipaware.noise.KINDS``.
    p, bounds
        As for :func:`clipaware.perturb`.
    repeats
        How often to try.
    batch_size
        How many samples the model gets at once.
    seed
        A whole number for the same noise again, with the same batch size. ``None``: as for ``clipaware.noise.sample``.
    progress
        Whether to show a progress bar, which needs tqdm.

    Returns
    -------
    AttackResult
        With ``perturbed``, ``success``, ``norms`` and ``repeat``.

    Examples
    --------
    >>> import numpy as np
    >>> from clipaware.attacks import noise_attack
    >>> x = np.full((4, 50), [[0.2], [0.4], [0.49], [0.6]])
    >>> def model(x):  # is it dark or bright on average?
    ...     return np.stack([0.5 - x.mean(axis=1), x.mean(axis=1) - 0.5], axis=1)
    >>> found = noise_attack(model, x, [0, 0, 0, 1], 1.0, repeats=20, seed=0)
    >>> found.success, found.norms.round(12)
    (array([False, False,  True, False]), array([1., 1., 1., 1.]))
    """
    task = Task(model, x, labels, p, bounds, targeted, batch_size)
    _check.option(noise, KINDS, "noise")
    _positive(repeats, "repeats")
    sizes, seeds = task.per_sample(eps), _seeds(seed)
    standing, kept = np.arange(task.samples), _Kept(task)
    with _bar(progress, repeats * task.samples, "noise attack") as bar:
        for repeat in range(repeats):
            left = [standing[:0]]
            for rows in task.batches(standing):
                here, box = task.of(rows)
                v = perturb(here, sample(noise, here, seed=next(seeds)), sizes[rows], p=p, bounds=box)
                fell = task.fell(rows, task.scores(v))
                kept.add(rows, v, fell | (repeat == repeats - 1), np.where(fell, repeat, -1))
                left.append(rows[~fell])
                bar.update(len(rows) + int(fell.sum()) * (repeats - 1 - repeat))
            standing = np.concatenate(left)
    return kept.result()


def noise_robustness(
    model: Callable[[Any], Any],
    x: Array,
    labels: Any,
    *,
    noise: str = "gaussian",
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    repeats: int = 1,
    largest: float | None = None,
    tolerance: float = 0.01,
    batch_size: int = 128,
    seed: int | None = None,
    progress: bool = False,
) -> Robustness:
    """Find the smallest norm of noise at which the model misses each label.

    Every sample and repeat has a direction of its own. Along it, eps is doubled from 1/256 of what it can reach until
    the model is wrong, then bisected; every probe has its norm exactly. The result is the least over the repeats.

    Parameters
    ----------
    model, x, labels, noise, p, bounds, repeats, batch_size, seed, progress
        As for :func:`noise_attack`.
    largest
        Look no further than this eps. Without bounds there must be one.
    tolerance
        How near, relative to eps, bisection comes; but no nearer than a millionth of what the direction can reach.

    Returns
    -------
    Robustness
        With ``eps`` and ``repeat`` per sample, their ``median``, ``accuracy(eps)`` and ``plot()``.

    Examples
    --------
    >>> import numpy as np
    >>> from clipaware.attacks import noise_robustness
    >>> x = np.full((3, 50), [[0.4], [0.49], [0.6]])
    >>> def model(x):
    ...     return np.stack([0.5 - x.mean(axis=1), x.mean(axis=1) - 0.5], axis=1)
    >>> found = noise_robustness(model, x, [0, 0, 0], repeats=20, seed=0)
    >>> found.eps.round(2), round(found.median, 2)
    (array([2.27, 0.39, 0.  ]), 0.39)
    """
    task = Task(model, x, labels, p, bounds, False, batch_size)
    _check.option(noise, KINDS, "noise")
    _positive(repeats, "repeats")
    if largest is not None and not (_check.is_number(largest) and 0 < largest < math.inf):
        raise ValueError(f"largest is {largest}, expected a positive number or None")
    if not 1e-6 <= tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}, expected a number from 1e-6 to 1")
    seeds = _seeds(seed)
    best, which = np.full(task.samples, math.inf), np.full(task.samples, -1)
    with _bar(progress, (repeats + 1) * task.samples, "noise robustness") as bar:
        for rows in task.batches(np.arange(task.samples)):
            best[rows[task.fell(rows, task.scores(task.of(rows)[0]))]] = 0
            bar.update(len(rows))
        for repeat in range(repeats):
            for rows in task.batches(np.flatnonzero(best > 0)):
                found = _along(task, rows, noise, next(seeds), best[rows], largest, tolerance)
                better = rows[found < best[rows]]
                best[rows], which[better] = np.minimum(found, best[rows]), repeat
                bar.update(len(rows))
            bar.update(int((best == 0).sum()))
    return Robustness(best, which, float(p))


def _along(
    task: Task, rows: Array, noise: str, seed: Any, best: Array, largest: float | None, tolerance: float
) -> Array:
    """The smallest eps that flips each of these samples along one direction; infinite if it is not less than `best`."""
    be, (here, box) = task.be, task.of(rows)
    delta = sample(noise, here, seed=seed)
    most = _host(be, reach(here, delta, p=task.p, bounds=box)).reshape(len(rows)).astype(float)
    most = most if largest is None else np.minimum(most, largest)
    if not np.isfinite(most).all():
        raise ValueError("bounds are infinite, so that eps has no end, expected finite ones or a `largest` eps")
    low, high = np.zeros(len(rows)), np.full(len(rows), math.inf)

    def probe(some: Array, eps: Array) -> None:
        """Ask the model about these samples at these eps, and narrow what is known."""
        if len(some):
            _, box = task.of(rows[some])
            v = perturb(be.take(here, some), be.take(delta, some), eps, p=task.p, bounds=box)
            fell = task.fell(rows[some], task.scores(v))
            high[some[fell]], low[some[~fell]] = eps[fell], eps[~fell]

    for doublings in range(STARTS + 1):
        going = np.flatnonzero(np.isinf(high) & (low < np.minimum(best, most)))
        probe(going, most[going] * 2.0 ** (doublings - STARTS))
    while True:
        wide = high - low > np.maximum(tolerance * high, FINEST * most)
        going = np.flatnonzero(np.isfinite(high) & (low < best) & wide)
        if not len(going):
            return high
        probe(going, (low[going] + high[going]) / 2)


def gradient_attack(
    model: Callable[[Any], Any],
    x: Array,
    labels: Any,
    eps: Any,
    *,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    steps: int = 1,
    step_size: float | None = None,
    random_start: bool = False,
    loss: str | Callable[[Any, Any], Any] = "cross-entropy",
    targeted: bool = False,
    batch_size: int = 128,
    seed: int | None = None,
    progress: bool = False,
) -> AttackResult:
    """Follow the gradient of the loss to a norm of eps after clipping: the fast gradient method, or in steps.

    The direction is the steepest one in the p-norm, ``sign(g)*|g|^(q-1)`` with ``1/p + 1/q = 1``. What clipping takes
    away the other elements make up for, which maximises the linearised loss over all perturbations inside the bounds
    and the ball. For ``p = 1`` that means to fill the elements up to their bounds in the order of ``|g|``. With more
    steps (projected gradient descent) each is exactly as long as it says, and ends at a norm of eps from x.

    Parameters
    ----------
    model, x, labels, p, bounds, batch_size, progress
        As for :func:`noise_attack`. x is PyTorch's, TensorFlow's or JAX's, and the model differentiable.
    eps
        The most that the perturbation may have, and has unless the gradient is 0 or the bounds allow no more: a number,
        or one per sample. Never exceeded, not even by rounding.
    steps
        How many gradients to take.
    step_size
        Norm of a step. ``None``: eps for one step, otherwise ``2.5*eps/steps``.
    random_start
        Whether to begin at random noise with a norm of eps instead of at x.
    loss
        ``"cross-entropy"`` of scores that are logits, ``"margin"`` (the best other score less that of the label, which
        does not saturate), or a function of scores and labels, to be maximised; with ``targeted``, minimised.
    targeted
        Whether `labels` are what the model is to say.
    seed
        As for :func:`noise_attack`, for the random start.

    Returns
    -------
    AttackResult
        With ``perturbed``, ``success``, ``norms`` and ``repeat``. A sample that succeeded on the way is the last of its
        steps that did.

    Examples
    --------
    >>> import torch
    >>> from clipaware.attacks import gradient_attack
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)).eval()
    >>> x = torch.full((5, 3, 2, 2), 0.9)
    >>> found = gradient_attack(model, x, model(x).argmax(1), 1.0)
    >>> found.norms.round(6)
    array([1., 1., 1., 1., 1.])
    """
    task = Task(model, x, labels, p, bounds, targeted, batch_size)
    if not hasattr(task.be, "gradient"):
        raise TypeError(
            f"x is {described(x)}, expected one of PyTorch, TensorFlow or JAX, which differentiate the model"
        )
    if not callable(loss):
        _check.option(loss, LOSSES, "loss")
    climb = Climb(task, task.per_sample(eps), steps, step_size, random_start, partial(_slope, task, loss))
    return climb.all(seed, progress)


class Task:
    """The arguments that attacks share, checked before anything takes long, and what is asked of the model."""

    def __init__(
        self, model: Any, x: Array, labels: Any, p: float, bounds: tuple[Any, Any], targeted: bool, batch_size: int
    ) -> None:
        if not callable(model):
            raise TypeError(f"model is {described(model)}, expected a function of a batch")
        self.be = be = _check.array(x, "x")
        _check.floating(be, x, "x")
        self.p, self.bounds, self.targeted = _check.norm_order(p), _check.bounds_pair(bounds), targeted
        _positive(batch_size, "batch_size")
        if be.ndim(x) < 2:
            raise ValueError(f"x has shape {be.shape(x)}, expected a batch: the first axis counts samples")
        if getattr(model, "training", False) is True:
            warnings.warn(
                "the model is in training mode, in which its answers may be random: model.eval()", stacklevel=3
            )
        self.model, self.x, self.batch_size = model, be.constant(x), batch_size
        self.samples = int(be.shape(x)[0])
        self.labels = _labels(labels, self.samples)
        _check_inside(be, x, self.bounds, self.p)

    def per_sample(self, eps: Any) -> Array:
        """eps in float64, (samples,)."""
        if not _check.is_number(eps):
            _check.companion(self.be, self.x, eps, "eps")
            be = _check.array(eps, "eps")
            _check.eps_shape(be.shape(eps), (self.samples,), (self.samples, *(1,) * (self.be.ndim(self.x) - 1)))
            eps = _host(be, eps)
        sizes = np.broadcast_to(np.asarray(eps, np.float64).reshape(-1), (self.samples,))
        if self.samples:
            _check.eps_values(sizes)
        return sizes

    def batches(self, rows: Array) -> Iterator[Array]:
        for start in range(0, len(rows), self.batch_size):
            yield rows[start : start + self.batch_size]

    def of(self, rows: Array) -> tuple[Array, tuple[Any, Any]]:
        """These rows of x, and of the bounds."""
        whole = len(rows) == rows[-1] - rows[0] + 1  # then a slice, which need not be a copy
        x = self.x[int(rows[0]) : int(rows[-1]) + 1, ...] if whole else self.be.take(self.x, rows)
        return x, (_rows_of(self.bounds[0], self.x, rows), _rows_of(self.bounds[1], self.x, rows))

    def scores(self, v: Array) -> Array:
        """What the model says of a batch, in NumPy."""
        return self.looked_at(self.be.evaluated(self.model, v), int(self.be.shape(v)[0]))

    def looked_at(self, scores: Any, samples: int) -> Array:
        found = _host(self.shaped(scores, samples), scores)
        if np.isnan(found).any():
            bad = np.isnan(found).any(axis=1)
            raise ValueError(
                f"the model's scores are NaN for {int(bad.sum())} of {samples} sample(s), expected numbers"
            )
        return found

    def shaped(self, scores: Any, samples: int) -> Any:
        """The backend of scores that have a row for every sample, and a column for every label."""
        be = _check.array(scores, "the model's result")
        shape = be.shape(scores)
        if len(shape) != 2 or shape[0] != samples or shape[1] < 1:
            raise ValueError(
                f"the model's scores have shape {shape}, expected ({samples}, classes) for {samples} sample(s)"
            )
        if self.samples and self.labels.max() >= shape[1]:
            row = int(self.labels.argmax())
            raise ValueError(
                f"labels has {self.labels[row]} for sample {row}, expected 0 to {shape[1] - 1} for a model with "
                f"{shape[1]} classes"
            )
        return be

    def fell(self, rows: Array, scores: Array) -> Array:
        """Whether the attack has succeeded with these samples."""
        said = scores.argmax(axis=1) == self.labels[rows]
        return said if self.targeted else ~said


class _Kept:
    """The result in the making: pieces of what it is to be, in the order in which they come."""

    def __init__(self, task: Task) -> None:
        self.task, self.rows, self.pieces = task, [np.arange(0)], []  # type: tuple[Task, list[Array], list[Array]]
        self.norms, self.repeat = np.zeros(task.samples), np.full(task.samples, -1)

    def add(self, rows: Array, v: Array, some: Array, repeat: Array) -> None:
        """Keep `some` of these samples for good."""
        if not some.any():
            return
        be, kept = self.task.be, rows[some]
        v = v if some.all() else be.take(v, np.flatnonzero(some))
        before, after = (_host(be, a).reshape(len(kept), -1) for a in (self.task.of(kept)[0], v))
        self.norms[kept], self.repeat[kept] = norm64(after, before, self.task.p), repeat[some]
        self.rows.append(kept)
        self.pieces.append(v)

    def result(self) -> AttackResult:
        be, order = self.task.be, np.concatenate(self.rows)
        perturbed = be.concatenate(self.pieces) if self.pieces else self.task.x
        if (np.diff(order) < 0).any():
            perturbed = be.take(perturbed, np.argsort(order))
        return AttackResult(perturbed, self.repeat >= 0, self.norms, self.repeat)


class Climb:
    """The steps of a gradient attack. `slope` has the gradient and the scores, in NumPy, of a batch with its labels."""

    def __init__(
        self, task: Task, eps: Array, steps: int, step_size: float | None, random_start: bool, slope: Slope
    ) -> None:
        _positive(steps, "steps")
        if step_size is not None and not (_check.is_number(step_size) and 0 < step_size < math.inf):
            raise ValueError(f"step_size is {step_size}, expected a positive number or None")
        self.task, self.eps, self.steps, self.step_size = task, eps, steps, step_size
        self.random_start, self.slope = random_start, slope

    def all(self, seed: int | None, progress: bool) -> AttackResult:
        """Batch after batch."""
        seeds, kept = _seeds(seed), _Kept(self.task)
        with _bar(progress, self.task.samples, "gradient attack") as bar:
            for rows in self.task.batches(np.arange(self.task.samples)):
                v, step = self.batch(rows, next(seeds))
                kept.add(rows, v, np.ones(len(rows), bool), step)
                bar.update(len(rows))
        return kept.result()

    def batch(self, rows: Array, seed: int | None) -> tuple[Array, Array]:
        """Samples, and the step at which each succeeded."""
        task, be, eps = self.task, self.task.be, self.eps[rows]
        x, box = task.of(rows)
        size = min(1, 2.5 / self.steps) * eps if self.step_size is None else np.full(len(rows), self.step_size)
        v, best, step = x, x, np.full(len(rows), -1)
        if self.random_start:
            kind = {1: "laplace", math.inf: "uniform"}.get(task.p, "gaussian")
            v = self.ended(x, perturb(x, sample(kind, x, seed=seed), eps, p=task.p, bounds=box), None, eps, box)
        for number in range(self.steps + 1):
            # The gradient at the end of a step says how it went; after the last there is no need for one.
            g, scores = self.gradient(v, rows) if number < self.steps else (None, task.scores(v))
            if number or self.random_start:
                fell = task.fell(rows, scores)
                best, step = _chosen(be, fell | (step < 0), v, best), np.where(fell, max(number - 1, 0), step)
            if number < self.steps:
                v = self.ended(x, self.moved(v, g, size, box), g, eps, box)
        return best, step

    def gradient(self, v: Array, rows: Array) -> tuple[Array, Array]:
        """In the direction of success, and the scores."""
        be = self.task.be
        g, scores = self.slope(v, self.task.labels[rows])
        total = _host(be, be.row_sum(abs(be.reshape(g, (len(rows), -1)))))
        if not np.isfinite(total).all():
            bad = int((~np.isfinite(total)).sum())
            raise ValueError(f"the gradient of the loss is NaN or infinite for {bad} of {len(rows)} sample(s)")
        return (-g if self.task.targeted else g), scores

    def moved(self, v: Array, g: Array, size: Array, box: tuple[Any, Any]) -> Array:
        """The step of that size that gains most, to first order, inside the bounds."""
        be, p = self.task.be, self.task.p
        if p == 1:
            lower, upper = map(_host_bound, box)
            return be.as_bound(_filled(_host(be, v), _host(be, g), size, lower, upper), v)
        if p == math.inf:
            delta = be.sign(g)
        elif p == 2:
            delta = g
        else:
            flat = be.reshape(be.result(g, g), (len(size), -1))
            top = be.row_max(abs(flat))
            unit = abs(flat) / be.where(top > 0, top, be.sign(top) + 1)
            least = 1e-7 if be.dtype_name(v) == "float16" else LEAST
            delta = be.reshape(be.sign(flat) * be.maximum(be.power(unit, 1 / (p - 1)), least), be.shape(g))
        return perturb(v, be.cast_like(delta, v), size, p=p, bounds=box)

    def ended(self, x: Array, v: Array, g: Array, eps: Array, box: tuple[Any, Any]) -> Array:
        """v as far from x as eps allows, and by rounding no further; along g if its own direction has an end before."""
        be, p, delta = self.task.be, self.task.p, v - x
        if p == math.inf:
            # Each element for itself: what is too far comes back, and what is not stays.
            limit = be.reshape(be.cast_like(be.as_eps(eps, x), x), (len(eps), *(1,) * (be.ndim(x) - 1)))
            delta = be.minimum(be.maximum(delta, -limit), limit)
        v = perturb(x, delta, eps, p=p, bounds=box)
        if p == 1 and g is not None:
            # Few elements have moved, and these may all be at their bounds.
            lower, upper = map(_host_bound, box)
            before, after, along = (_host(be, a) for a in (x, v, g))
            missing = np.maximum(eps - norm64(after.reshape(len(eps), -1), before.reshape(len(eps), -1), 1), 0)
            outward = np.where((after - before) * along >= 0, along, 0)
            v = be.as_bound(_filled(after, outward, missing, lower, upper), x)
        return perturb(x, v - x, eps, p=p, bounds=box, mode="at_most")


def _slope(task: Task, loss: Any, v: Array, labels: Array) -> tuple[Array, Array]:
    """The gradient of the loss in a batch, and the model's scores in NumPy."""
    be = task.be

    def value(v: Array) -> tuple[Array, Array]:
        scores = task.model(v)
        task.shaped(scores, len(labels))
        if callable(loss):
            losses = loss(scores, be.labels_like(labels, v))
        else:
            mine = be.as_bound(np.eye(int(scores.shape[1]))[labels], scores)
            if loss == "cross-entropy":
                losses = -mine * be.log_softmax(scores)
            else:
                # Less so much that the label's own score is none of the best others.
                others = scores - mine * 2 * (1 + be.highest(abs(be.constant(scores))))
                losses = be.sum_axes(be.highest(others), (0, 1)) - be.sum_axes(mine * scores, (0, 1))
        return be.sum_axes(losses, tuple(range(be.ndim(losses)))), scores

    g, scores = be.gradient(value, v)
    scores = task.looked_at(scores, len(labels))
    if g is None:
        raise ValueError("the loss does not depend on x, expected a model that can be differentiated")
    return g, scores


def _chosen(be: Any, some: Array, new: Array, old: Array) -> Array:
    """Rows of `new` where `some` are true, else of `old`."""
    if some.all() or not some.any():
        return new if some.all() else old
    both = be.concatenate([old, new])
    return be.take(both, np.arange(len(some)) + len(some) * some)


def _filled(v: Array, g: Array, size: Array, lower: Array, upper: Array) -> Array:
    """v with elements moved to their bounds, in the order of |g|, until that has an L1 norm of `size`."""
    shape = v.shape
    lower, upper = (np.broadcast_to(b, shape).reshape(len(v), -1) for b in (lower, upper))
    v, g, size = v.reshape(len(v), -1).astype(float), g.reshape(len(v), -1), size[:, None]
    room = np.clip(np.where(g > 0, upper - v, v - lower), 0, size) * (g != 0)
    order = np.argsort(-np.abs(g), axis=1, kind="stable")
    room = np.take_along_axis(room, order, 1)
    share = np.clip(size - (np.cumsum(room, axis=1) - room), 0, room)
    moved = np.zeros_like(v)
    np.put_along_axis(moved, order, share, 1)
    return (v + np.sign(g) * moved).reshape(shape)


def _host(be: Any, a: Array) -> Array:
    """As a NumPy array of float32 at least."""
    return be.fetch(be.result(a, a))


def _host_bound(bound: Any) -> Array:
    return np.asarray(bound) if _check.is_number(bound) else _host(backend_of(bound), bound)


def _rows_of(bound: Any, x: Array, rows: Array) -> Any:
    """A bound's part for these rows, if it has one for each."""
    be = None if _check.is_number(bound) else _check.array(bound, "bounds")
    if be is None or be.ndim(bound) < _check.array(x, "x").ndim(x) or be.shape(bound)[0] == 1:
        return bound
    return be.take(bound, rows)


def _check_inside(be: Any, x: Array, bounds: tuple[Any, Any], p: float) -> None:
    """All of x before the first batch of it; on an accelerator, too, whose values are not looked at otherwise."""
    for bound in bounds:
        if not _check.is_number(bound):
            _check.companion(be, x, bound, "bounds")
    if be.values_of(x[:1, ...]) is None:
        host = _host(be, x)
        reach(host, host, p=p, bounds=tuple(map(_host_bound, bounds)))
    else:
        reach(x, x, p=p, bounds=bounds)


def _labels(labels: Any, samples: int) -> Array:
    be = backend_of(labels)
    found = np.asarray(labels) if be is None else be.fetch(labels)
    if found.shape != (samples,):
        raise ValueError(f"labels has shape {found.shape}, expected ({samples},): one for every sample of x")
    if samples and found.dtype.kind not in "iu":
        raise TypeError(f"labels has dtype {found.dtype}, expected whole numbers: the index of every sample's class")
    if samples and found.min() < 0:
        raise ValueError(f"labels has {found.min()} for sample {found.argmin()}, expected 0 or more")
    return found.astype(np.int64)


def _positive(value: Any, name: str) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number of 1 or more")


def _seeds(seed: int | None) -> Iterator[int | None]:
    """One for every batch."""
    if seed is not None and not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed is a {type(seed).__name__}, expected a whole number or None")
    _check.seed(seed)
    sequence = None if seed is None else np.random.SeedSequence(int(seed))
    while True:
        yield None if sequence is None else int(sequence.spawn(1)[0].generate_state(1, np.uint64)[0])


def _bar(progress: bool, total: int, what: str) -> AbstractContextManager[Any]:
    if not progress:
        return nullcontext(SimpleNamespace(update=lambda number: None))
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("a progress bar needs tqdm: pip install 'clipaware[attacks]'") from error
    return tqdm(total=total, desc=what, unit=" samples", disable=None)  # type: ignore[no-any-return]
