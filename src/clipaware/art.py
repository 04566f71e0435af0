"""Evasion attacks for the Adversarial Robustness Toolbox whose perturbations have their eps after clipping."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

try:
    from art.attacks.attack import EvasionAttack
    from art.estimators.classification.classifier import ClassifierMixin
    from art.estimators.estimator import BaseEstimator, LossGradientsMixin
except ImportError as error:
    raise ImportError("clipaware.art needs the Adversarial Robustness Toolbox: pip install 'clipaware[art]'") from error

from clipaware import _check
from clipaware.attacks import Climb, Task, noise_attack

Array = Any

__all__ = ["GradientAttack", "NoiseAttack"]


class _Exact(EvasionAttack):  # type: ignore[misc]
    """What the attacks here have in common: parameters, labels and bounds."""

    attack_params: ClassVar[list[str]] = [
        *EvasionAttack.attack_params,
        "eps",
        "norm",
        "bounds",
        "targeted",
        "batch_size",
        "seed",
        "verbose",
    ]
    _estimator_requirements: ClassVar[tuple[Any, ...]] = (BaseEstimator, ClassifierMixin)

    def __init__(self, classifier: Any, **params: Any) -> None:
        super().__init__(estimator=classifier)
        self.set_params(**params)

    def _check_params(self) -> None:
        super()._check_params()
        if self.norm != "inf" and not (_check.is_number(self.norm) and self.norm >= 1):
            raise ValueError(f"norm is {self.norm!r}, expected a number from 1 to infinity or 'inf'")
        if not np.all(np.asarray(self.eps) >= 0):
            raise ValueError(f"eps is {self.eps}, expected numbers that are not negative")

    @property
    def _p(self) -> float:
        return math.inf if self.norm == "inf" else float(self.norm)

    @property
    def _bounds(self) -> tuple[Any, Any]:
        """Those given, else the classifier's; none if it has none."""
        bounds = self.estimator.clip_values if self.bounds is None else self.bounds
        return (None, None) if bounds is None else tuple(bounds)

    def _scores(self, x: Array) -> Array:
        return self.estimator.predict(x, batch_size=self.batch_size)

    def _labels(self, x: Array, y: Array | None) -> Array:
        """Class indices, from one-hot labels too; without any, what the classifier says."""
        if y is None:
            if self.targeted:
                raise ValueError("y is None, expected the target classes of a targeted attack")
            return self._scores(x).argmax(axis=1)
        y = np.asarray(y)
        return y.argmax(axis=1) if y.ndim == 2 and y.shape[1] > 1 else y.reshape(len(y)).astype(np.int64)


class NoiseAttack(_Exact):
    """Noise whose norm is eps after clipping, again and again until the classifier is wrong.

    Parameters
    ----------
    classifier
        A classifier of the toolbox, for any framework.
    eps
        The norm of the noise: a number, or one per sample.
    noise
        One of ``clipaware.noise.KINDS``.
    norm
        Its order, from 1 to infinity, or ``"inf"``.
    bounds
        Instead of the classifier's ``clip_values``: numbers, or arrays that broadcast to x.
    repeats, targeted, batch_size, seed
        As for ``clipaware.attacks.noise_attack``.
    verbose
        Whether to show a progress bar.
    """

    attack_params: ClassVar[list[str]] = [*_Exact.attack_params, "noise", "repeats"]

    def __init__(
        self,
        classifier: Any,
        eps: Any = 1.0,
        *,
        noise: str = "gaussian",
        norm: float | str = 2,
        bounds: tuple[Any, Any] | None = None,
        repeats: int = 1,
        targeted: bool = False,
        batch_size: int = 128,
        seed: int | None = None,
        verbose: bool = False,
    ) -> None:
        shared = {"bounds": bounds, "targeted": targeted, "batch_size": batch_size, "seed": seed, "verbose": verbose}
        super().__init__(classifier, eps=eps, noise=noise, norm=norm, repeats=repeats, **shared)

    def generate(self, x: Array, y: Array | None = None, **kwargs: Any) -> Array:
        """x with noise; y are labels, or with `targeted` target classes, as indices or one-hot."""
        found = noise_attack(
            self._scores,
            x,
            self._labels(x, y),
            self.eps,
            noise=self.noise,
            p=self._p,
            bounds=self._bounds,
            repeats=self.repeats,
            targeted=self.targeted,
            batch_size=self.batch_size,
            seed=self.seed,
            progress=self.verbose,
        )
        return found.perturbed


class GradientAttack(_Exact):
    """The fast gradient method, or projected gradient descent, which spend all of eps after clipping and not more.

    Parameters
    ----------
    classifier
        A classifier of the toolbox with loss gradients.
    eps
        The most that the perturbation may have: a number, or one per sample.
    steps, step_size, random_start
        As for ``clipaware.attacks.gradient_attack``. The loss is the classifier's own.
    norm, bounds, targeted, batch_size, seed, verbose
        As for :class:`NoiseAttack`.
    """

    attack_params: ClassVar[list[str]] = [*_Exact.attack_params, "steps", "step_size", "random_start"]
    _estimator_requirements = (BaseEstimator, LossGradientsMixin, ClassifierMixin)

    def __init__(
        self,
        classifier: Any,
        eps: Any = 1.0,
        *,
        norm: float | str = 2,
        bounds: tuple[Any, Any] | None = None,
        steps: int = 1,
        step_size: float | None = None,
        random_start: bool = False,
        targeted: bool = False,
        batch_size: int = 128,
        seed: int | None = None,
        verbose: bool = False,
    ) -> None:
        shared = {"bounds": bounds, "targeted": targeted, "batch_size": batch_size, "seed": seed, "verbose": verbose}
        steps_of = {"steps": steps, "step_size": step_size, "random_start": random_start}
        super().__init__(classifier, eps=eps, norm=norm, **steps_of, **shared)

    def generate(self, x: Array, y: Array | None = None, **kwargs: Any) -> Array:
        """Perturbed x; y are labels, or with `targeted` target classes, as indices or one-hot."""
        labels = self._labels(x, y)
        task = Task(self._scores, x, labels, self._p, self._bounds, self.targeted, self.batch_size)
        climb = Climb(task, task.per_sample(self.eps), self.steps, self.step_size, self.random_start, self._slope)
        return climb.all(self.seed, self.verbose).perturbed

    def _slope(self, v: Array, labels: Array) -> tuple[Array, Array]:
        scores = self._scores(v)
        one_hot = np.eye(scores.shape[1], dtype=np.float32)[labels]
        return self.estimator.loss_gradient(v, one_hot).astype(v.dtype), scores
