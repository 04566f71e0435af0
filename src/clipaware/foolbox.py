"""Attacks for Foolbox whose perturbations have their epsilon after clipping: change the import, and keep the rest.

All of Foolbox's additive and repeated noise attacks and its fast gradient attacks for L2 and Linf are here under their
names. They take Foolbox's models and criteria, several epsilons at once, and have ``repeat()``.
"""

from __future__ import annotations

import math
from typing import Any

try:
    import eagerpy as ep
    from eagerpy.astensor import astensor, astensor_
    from foolbox.attacks.base import (
        FixedEpsilonAttack,
        get_criterion,
        get_is_adversarial,
        raise_if_kwargs,
        verify_input_bounds,
    )
    from foolbox.criteria import Misclassification, TargetedMisclassification
    from foolbox.devutils import atleast_kd
    from foolbox.distances import LpDistance
except ImportError as error:
    raise ImportError("clipaware.foolbox needs Foolbox: pip install 'clipaware[foolbox]'") from error

import numpy as np

from clipaware import _check
from clipaware._api import perturb
from clipaware.attacks import gradient_attack
from clipaware.noise import KINDS, sample

Array = Any

__all__ = [
    "AdditiveNoiseAttack",
    "GradientAttack",
    "L2AdditiveGaussianNoiseAttack",
    "L2AdditiveUniformNoiseAttack",
    "L2ClippingAwareAdditiveGaussianNoiseAttack",
    "L2ClippingAwareAdditiveUniformNoiseAttack",
    "L2ClippingAwareRepeatedAdditiveGaussianNoiseAttack",
    "L2ClippingAwareRepeatedAdditiveUniformNoiseAttack",
    "L2FastGradientAttack",
    "L2RepeatedAdditiveGaussianNoiseAttack",
    "L2RepeatedAdditiveUniformNoiseAttack",
    "LinfAdditiveUniformNoiseAttack",
    "LinfFastGradientAttack",
    "LinfRepeatedAdditiveUniformNoiseAttack",
    "RepeatedAdditiveNoiseAttack",
]


class _Exact(FixedEpsilonAttack):
    """What the attacks here have in common: a norm, bounds, and a seed for every run."""

    def __init__(self, *, p: float, bounds: tuple[Any, Any] | None, seed: int | None) -> None:
        _check.seed(seed)
        self.p, self.bounds, self.seed, self.runs = _check.norm_order(p), bounds, seed, 0

    @property
    def distance(self) -> LpDistance:
        return LpDistance(self.p)

    def _begun(self, model: Any, inputs: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any, Any]]:
        """The inputs as a tensor, how to return them, and the bounds."""
        raise_if_kwargs(kwargs)
        x, restore = astensor_(inputs)
        verify_input_bounds(x, model)
        self.runs += 1
        return x, restore, tuple(model.bounds) if self.bounds is None else self.bounds

    def _seed(self, repeat: int = 0) -> int | None:
        if self.seed is None:
            return None
        return int(np.random.SeedSequence([self.seed, self.runs, repeat]).generate_state(1, np.uint64)[0])


class AdditiveNoiseAttack(_Exact):
    """Noise whose p-norm is epsilon after clipping, once.

    Parameters
    ----------
    noise
        One of ``clipaware.noise.KINDS``.
    p
        Order of the norm, from 1 to infinity.
    bounds
        Instead of the model's: numbers, or arrays that broadcast to the inputs, such as one per channel.
    seed
        A whole number for the same noise again. ``None``: as for ``clipaware.noise.sample``.

    Examples
    --------
    >>> import foolbox, numpy as np
    >>> from clipaware.foolbox import L2AdditiveGaussianNoiseAttack
    >>> model = foolbox.NumPyModel(lambda x: x[:, :3], bounds=(0, 1))
    >>> x = np.random.default_rng(0).random((5, 20))
    >>> (advs,), _, success = L2AdditiveGaussianNoiseAttack(seed=0)(model, x, x[:, :3].argmax(1), epsilons=[1.5])
    >>> np.linalg.norm(advs - x, axis=1).round(12)
    array([1.5, 1.5, 1.5, 1.5, 1.5])
    """

    def __init__(
        self,
        *,
        noise: str = "gaussian",
        p: float = 2,
        bounds: tuple[Any, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        _check.option(noise, KINDS, "noise")
        super().__init__(p=p, bounds=bounds, seed=seed)
        self.noise = noise

    def run(self, model: Any, inputs: Any, criterion: Any = None, *, epsilon: float, **kwargs: Any) -> Any:
        x, restore, bounds = self._begun(model, inputs, kwargs)
        return restore(self._noisy(x, epsilon, bounds))

    def _noisy(self, x: Any, epsilon: float, bounds: tuple[Any, Any], repeat: int = 0) -> Any:
        delta = sample(self.noise, x.raw, seed=self._seed(repeat))
        return astensor(perturb(x.raw, delta, epsilon, p=self.p, bounds=bounds))


class RepeatedAdditiveNoiseAttack(AdditiveNoiseAttack):
    """Noise whose p-norm is epsilon after clipping, until the criterion is met; where it never is, the input.

    Parameters
    ----------
    repeats
        How often to draw noise.
    check_trivial
        Whether to look first if the inputs meet the criterion as they are.
    noise, p, bounds, seed
        As for :class:`AdditiveNoiseAttack`.
    """

    def __init__(self, *, repeats: int = 100, check_trivial: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.repeats, self.check_trivial = repeats, check_trivial

    def run(self, model: Any, inputs: Any, criterion: Any = None, *, epsilon: float, **kwargs: Any) -> Any:
        x, restore, bounds = self._begun(model, inputs, kwargs)
        is_adversarial = get_is_adversarial(get_criterion(criterion), model)
        result = x
        found = is_adversarial(x) if self.check_trivial else ep.zeros(x, len(x)).bool()
        for repeat in range(self.repeats):
            if found.all():
                break
            v = self._noisy(x, epsilon, bounds, repeat)
            fell = is_adversarial(v)
            result = ep.where(atleast_kd(ep.logical_and(fell, ep.logical_not(found)), v.ndim), v, result)
            found = ep.logical_or(found, fell)
        return restore(result)


class L2AdditiveGaussianNoiseAttack(AdditiveNoiseAttack):
    """Gaussian noise whose L2 norm is epsilon after clipping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(noise="gaussian", p=2, **options)


class L2AdditiveUniformNoiseAttack(AdditiveNoiseAttack):
    """Uniform noise whose L2 norm is epsilon after clipping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(noise="uniform", p=2, **options)


class L2ClippingAwareAdditiveGaussianNoiseAttack(L2AdditiveGaussianNoiseAttack):
    """Gaussian noise whose L2 norm is epsilon after clipping."""


class L2ClippingAwareAdditiveUniformNoiseAttack(L2AdditiveUniformNoiseAttack):
    """Uniform noise whose L2 norm is epsilon after clipping."""


class LinfAdditiveUniformNoiseAttack(AdditiveNoiseAttack):
    """Uniform noise whose largest element, by magnitude, is epsilon after clipping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(noise="uniform", p=math.inf, **options)


class L2RepeatedAdditiveGaussianNoiseAttack(RepeatedAdditiveNoiseAttack):
    """Gaussian noise whose L2 norm is epsilon after clipping, until the criterion is met."""

    def __init__(self, *, repeats: int = 100, check_trivial: bool = True, **options: Any) -> None:
        super().__init__(repeats=repeats, check_trivial=check_trivial, noise="gaussian", p=2, **options)


class L2RepeatedAdditiveUniformNoiseAttack(RepeatedAdditiveNoiseAttack):
    """Uniform noise whose L2 norm is epsilon after clipping, until the criterion is met."""

    def __init__(self, *, repeats: int = 100, check_trivial: bool = True, **options: Any) -> None:
        super().__init__(repeats=repeats, check_trivial=check_trivial, noise="uniform", p=2, **options)


class L2ClippingAwareRepeatedAdditiveGaussianNoiseAttack(L2RepeatedAdditiveGaussianNoiseAttack):
    """Gaussian noise whose L2 norm is epsilon after clipping, until the criterion is met."""


class L2ClippingAwareRepeatedAdditiveUniformNoiseAttack(L2RepeatedAdditiveUniformNoiseAttack):
    """Uniform noise whose L2 norm is epsilon after clipping, until the criterion is met."""


class LinfRepeatedAdditiveUniformNoiseAttack(RepeatedAdditiveNoiseAttack):
    """Uniform noise whose largest element, by magnitude, is epsilon after clipping, until the criterion is met."""

    def __init__(self, *, repeats: int = 100, check_trivial: bool = True, **options: Any) -> None:
        super().__init__(repeats=repeats, check_trivial=check_trivial, noise="uniform", p=math.inf, **options)


class GradientAttack(_Exact):
    """The steps of ``clipaware.attacks.gradient_attack``, by default one: the fast gradient method.

    Parameters
    ----------
    p, steps, step_size, random_start, loss
        As for ``clipaware.attacks.gradient_attack``.
    bounds, seed
        As for :class:`AdditiveNoiseAttack`.
    """

    def __init__(
        self,
        *,
        p: float = 2,
        steps: int = 1,
        step_size: float | None = None,
        random_start: bool = False,
        loss: Any = "cross-entropy",
        bounds: tuple[Any, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(p=p, bounds=bounds, seed=seed)
        self.steps, self.step_size, self.random_start, self.loss = steps, step_size, random_start, loss

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        x, restore, bounds = self._begun(model, inputs, kwargs)
        criterion = get_criterion(criterion)
        targeted = isinstance(criterion, TargetedMisclassification)
        if not targeted and not isinstance(criterion, Misclassification):
            raise ValueError(f"criterion is {criterion}, expected Misclassification or TargetedMisclassification")
        labels = criterion.target_classes if targeted else criterion.labels
        found = gradient_attack(
            model,
            x.raw,
            labels.raw,
            epsilon,
            p=self.p,
            bounds=bounds,
            steps=self.steps,
            step_size=self.step_size,
            random_start=self.random_start,
            loss=self.loss,
            targeted=targeted,
            batch_size=max(len(x), 1),
            seed=self._seed(),
        )
        return restore(astensor(found.perturbed))


class L2FastGradientAttack(GradientAttack):
    """The fast gradient method with an L2 norm of epsilon after clipping."""

    def __init__(self, *, random_start: bool = False, **options: Any) -> None:
        super().__init__(p=2, random_start=random_start, **options)


class LinfFastGradientAttack(GradientAttack):
    """The fast gradient sign method."""

    def __init__(self, *, random_start: bool = False, **options: Any) -> None:
        super().__init__(p=math.inf, random_start=random_start, **options)
