"""Learned adversarial noise: train the worst noise for a classifier at exactly eps, then train against it (PyTorch).

After Rusak et al. (2020), "A simple way to make neural networks robust against diverse image corruptions", arXiv
2001.06057, who learn the noise by backpropagating through clipping-aware rescaling.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("clipaware.adversarial_noise needs PyTorch: pip install 'clipaware[torch]'") from error
from torch.nn.functional import cross_entropy

from clipaware import _check
from clipaware._api import perturb, reach
from clipaware._corruptions import NOISES, OTHERS, corrupt, gaussian_filter
from clipaware._training import Run, check_optimizer, mode, positive, positive_eps
from clipaware.attacks import Robustness, noise_robustness
from clipaware.noise import sample

__all__ = [
    "CORRUPTIONS",
    "METHODS",
    "CorruptionResult",
    "NoiseGenerator",
    "Training",
    "corrupt",
    "evaluate_corruptions",
    "train_noise",
    "train_robust",
]

METHODS = ("ant", "gaussian", "speckle", "clean")
CORRUPTIONS = (*NOISES, "learned", *OTHERS)
CONVOLUTIONS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
SHARES = (0.5, 0.3, 0.1, 0.1)  # of a batch: clean, of this epoch's generator, and of two earlier ones
GAIN = 0.2  # by which the logarithm of an adaptive eps follows the error
STEP = 128  # samples in a step of the noise to evaluate with, at most
SMALLEST, LARGEST = 1e-3, 0.9  # that it becomes, of what noise can reach


class NoiseGenerator(torch.nn.Module):
    """Noise with a learned distribution: ``delta = z + conv4(relu(conv3(relu(conv2(relu(conv1(z)))))))``, z ~ N(0, 1).

    The convolutions have ``channels -> 20 -> 20 -> 20 -> channels`` channels. With a kernel of 1 every pixel's noise is
    its own; with 3 the second convolution is that wide, and what it needs beyond the edge is drawn, too. Weights begin
    as N(0, 0.01) (a standard deviation of 0.01) and biases at 0, so that the noise begins as Gaussian.

    Parameters
    ----------
    channels
        Of the samples that it makes noise for.
    kernel_size
        1, or 3 for noise that neighbours share.
    dims
        How many axes a sample has beside its channels: 1 (audio), 2 (pictures) or 3 (volumes).
    hidden
        Channels in between.

    Examples
    --------
    >>> import torch
    >>> from clipaware.adversarial_noise import NoiseGenerator
    >>> generator, x = NoiseGenerator(3, kernel_size=3), torch.rand(4, 3, 32, 32)
    >>> v = generator.perturb(x, 5.0)
    >>> (v - x).flatten(1).norm(dim=1).allclose(torch.tensor(5.0))
    True
    """

    def __init__(self, channels: int, kernel_size: int = 1, *, dims: int = 2, hidden: int = 20) -> None:
        super().__init__()
        positive(channels, "channels")
        positive(hidden, "hidden")
        if kernel_size not in (1, 3):
            raise ValueError(f"kernel_size is {kernel_size!r}, expected 1 or 3")
        if dims not in CONVOLUTIONS:
            raise ValueError(f"dims is {dims!r}, expected 1 (audio), 2 (pictures) or 3 (volumes)")
        self.channels, self.kernel_size, self.dims, self.hidden = channels, kernel_size, dims, hidden
        widths, kernels = (channels, hidden, hidden, hidden, channels), (1, kernel_size, 1, 1)
        layers = [
            CONVOLUTIONS[dims](before, after, kernel)
            for before, after, kernel in zip(widths, widths[1:], kernels, strict=False)
        ]
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=0.01)
            torch.nn.init.constant_(layer.bias, 0)  # type: ignore[arg-type]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Noise in the shape and dtype of x, and of no particular size; `generator` is what z is drawn from."""
        if x.ndim != self.dims + 2 or x.shape[1] != self.channels:
            rest = ("length", "height, width", "depth, height, width")[self.dims - 1]
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (samples, {self.channels}, {rest})")
        margin, weight = self.kernel_size // 2, next(self.parameters())
        shape = (*x.shape[:2], *(n + 2 * margin for n in x.shape[2:]))
        z = torch.randn(shape, dtype=weight.dtype, device=x.device, generator=generator)
        hidden = z
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        inside = (slice(None), slice(None), *(slice(margin, margin + n) for n in x.shape[2:]))
        noise: torch.Tensor = self.layers[-1](hidden) + z[inside]
        return noise.to(x.dtype)

    def perturb(
        self,
        x: torch.Tensor,
        eps: Any,
        bounds: tuple[Any, Any] = (0, 1),
        *,
        p: float = 2,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Noise added to x, with a norm of exactly eps after clipping, as :func:`clipaware.perturb` has it."""
        return perturb(x, self(x, generator=generator), eps, p=p, bounds=bounds)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}, dims={self.dims}"


@dataclass(frozen=True)
class Training:
    """What a training has left.

    Attributes
    ----------
    history
        A dictionary for every epoch, as in ``metrics.csv``.
    eps
        The size of the noise in the end; None where there was no such noise.
    generators
        The noise generators, one for every epoch of an adversarial training; of ``train_noise`` the one.
    """

    history: list[dict[str, float]]
    eps: float | None
    generators: list[NoiseGenerator]


def train_noise(
    generator: NoiseGenerator,
    model: torch.nn.Module,
    loader: Any,
    eps: float,
    *,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    epochs: int = 1,
    lr: float = 1e-3,
    amp: torch.dtype | None = None,
    seed: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    tensorboard: bool | None = None,
    check: int | None = None,
    progress: bool = False,
) -> Training:
    """Train the noise that a fixed classifier gets wrong most: ``max E[cross-entropy(model(clip(x + eta*delta)), y)]``.

    Every batch is perturbed by exactly eps, and Adam follows the gradient through the model and the rescaling to the
    generator's weights. The model stays as it is, in evaluation mode.

    Parameters
    ----------
    generator
        Trained in place, and moved to the model's device.
    model
        Takes a batch and returns logits, (samples, classes); also one of ``torch.compile``.
    loader
        A ``DataLoader``, or anything that can be gone through more than once, of batches (x, labels).
    eps
        Norm of the noise after clipping.
    p, bounds
        As for :func:`clipaware.perturb`.
    epochs
        How often to go through the loader.
    lr
        Adam's learning rate.
    amp
        ``torch.bfloat16`` or ``torch.float16`` for mixed precision; the rescaling itself stays in x's.
    seed
        A whole number, from which all of the randomness follows: that of noise, of the loader, of dropout.
    folder
        Where to write ``checkpoint.pt`` and ``metrics.csv`` after every epoch, each of them as a whole or not at all,
        and TensorBoard's files.
    resume
        Whether to go on from the checkpoint in `folder`, if there is one, to the same result as without the break.
    tensorboard
        Whether to write for TensorBoard, too. None: if it is installed.
    check
        How many batches to look at before training, for bad labels, values and an eps that is too large. None: all.
    progress
        Whether to show a progress bar, which needs tqdm.

    Returns
    -------
    Training
        With ``history``, ``eps`` and ``generators``.

    Examples
    --------
    >>> import torch
    >>> from clipaware.adversarial_noise import NoiseGenerator, train_noise
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    >>> x = torch.rand(32, 1, 8, 8)
    >>> loader = [(x, model(x).argmax(1))] * 50
    >>> done = train_noise(NoiseGenerator(1), model, loader, 2.0, epochs=2, seed=0)
    >>> done.history[1]["loss"] > done.history[0]["loss"]
    True
    """
    if not isinstance(generator, NoiseGenerator):
        raise TypeError(f"generator is a {type(generator).__name__}, expected a NoiseGenerator")
    run = Run(model, loader, p, bounds, amp, seed, progress)
    positive(epochs, "epochs")
    positive_eps(eps)
    generator.to(run.device).requires_grad_(True)
    optimizer = torch.optim.Adam(generator.parameters(), lr, maximize=True)
    run.settings = {"training": "noise", "eps": float(eps), "lr": float(lr)}
    run.kept = {"generator": generator, "optimizer": optimizer}
    with run.random_state(), mode(model, training=False):
        run.open(folder, resume, tensorboard)
        run.look(check, eps, generator)
        for epoch in run.epochs(epochs):
            with run.bar(f"noise, epoch {epoch + 1} of {epochs}") as bar:
                for x, y in run.batches():
                    run.noise_step(generator, optimizer, x, y, eps)
                    run.show(bar)
            run.close(epoch, {"eps": float(eps)})
    return Training(run.history, float(eps), [generator])


def train_robust(
    model: torch.nn.Module,
    loader: Any,
    eps: float | str | None,
    *,
    method: str = "ant",
    kernel_size: int = 1,
    sigma: float | Sequence[float] | None = None,
    p: float = 2,
    bounds: tuple[Any, Any] = (0, 1),
    epochs: int = 10,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    noise_lr: float = 3e-4,
    warmup: int = 50,
    error: float = 0.3,
    amp: torch.dtype | None = None,
    seed: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    tensorboard: bool | None = None,
    check: int | None = None,
    progress: bool = False,
) -> Training:
    """Train a classifier against noise that is trained against it: ``min E[max cross-entropy(model(clip(...)), y)]``.

    Half of every batch stays clean. 30% gets noise of this epoch's generator, which begins anew every epoch, and two
    times 10% that of generators of earlier epochs, so that what was learned against them is not forgotten. (As long as
    there are none, this epoch's.) After every batch classifier and generator each take a step, down and up the gradient
    of the same loss.

    Parameters
    ----------
    model
        Trained in place: best one that was trained before. Takes a batch and returns logits, (samples, classes); also
        one of ``torch.compile``.
    loader, p, bounds, amp, seed, folder, resume, tensorboard, check, progress
        As for :func:`train_noise`.
    eps
        Norm of the noise after clipping; ``"adaptive"`` to change it so that a share of `error` of the noisy samples is
        misclassified. None with `sigma`, and for ``"clean"``.
    method
        ``"ant"``, adversarial noise training. Or something to compare it with: ``"gaussian"`` and ``"speckle"``, with
        noise of that kind on half of the batch, ``"clean"`` with none.
    kernel_size
        Of the generators, 1 or 3.
    sigma
        For ``"gaussian"`` and ``"speckle"``, instead of eps: the standard deviation of the noise before clipping, which
        then shrinks it; or several, of which every sample draws one.
    epochs
        How often to go through the loader, altogether: of a training that is resumed, too.
    optimizer
        Of the model's parameters. None: SGD with a learning rate of 0.01 and a momentum of 0.9.
    scheduler
        Of the optimizer's learning rate; takes a step after every epoch.
    noise_lr
        Learning rate of the generators' Adam.
    warmup
        How many steps each new generator takes alone, while the classifier stays as it is.
    error
        For an adaptive eps: the share of noisy samples to be misclassified.

    Returns
    -------
    Training
        With ``history``, ``eps`` and ``generators``.

    Examples
    --------
    >>> import torch
    >>> from clipaware.adversarial_noise import train_robust
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    >>> x = torch.rand(32, 1, 8, 8)
    >>> loader = [(x, x[:, 0, 0, 0].gt(0.5).long())] * 20
    >>> done = train_robust(model, loader, 2.0, epochs=3, seed=0)
    >>> [row["epoch"] for row in done.history], len(done.generators)
    ([1, 2, 3], 3)
    """
    _check.option(method, METHODS, "method")
    run = Run(model, loader, p, bounds, amp, seed, progress)
    positive(epochs, "epochs")
    if not isinstance(warmup, numbers.Integral) or warmup < 0:
        raise ValueError(f"warmup is {warmup!r}, expected a whole number of 0 or more")
    if not (_check.is_number(error) and 0 < error < 1):
        raise ValueError(f"error is {error!r}, expected a number between 0 and 1")
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    check_optimizer(optimizer, scheduler, model)
    noise = _Noise(run, method, eps, sigma, error, kernel_size, noise_lr)
    run.settings = {"training": "robust", **noise.settings, "warmup": int(warmup)}
    run.kept = {"model": getattr(model, "_orig_mod", model), "optimizer": optimizer, "noise": noise}
    if scheduler is not None:
        run.kept["scheduler"] = scheduler
    with run.random_state(), mode(model, training=True):
        run.open(folder, resume, tensorboard)
        seen = run.look(check, eps if _check.is_number(eps) else None, None, noise.kind)
        if not run.history:
            noise.begin(seen)
        for epoch in run.epochs(epochs):
            noise.renew()
            if noise.current is not None and warmup:
                with run.bar(f"generator, epoch {epoch + 1} of {epochs}", warmup) as bar, mode(model, training=False):
                    for x, y in run.batches(warmup):
                        run.noise_step(noise.current, noise.optimizer, x, y, noise.eps)
                        run.show(bar)
                run.forget()
            with run.bar(f"epoch {epoch + 1} of {epochs}") as bar:
                for x, y in run.batches():
                    _robust_step(run, noise, optimizer, x, y)
                    run.show(bar)
            rate = optimizer.param_groups[0]["lr"]
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(run.metrics()["loss"])
            elif scheduler is not None:
                scheduler.step()
            noise.remember()
            run.close(epoch, {"eps": math.nan if noise.eps is None else float(noise.eps), "lr": float(rate)})
    size = None if noise.eps is None else float(noise.eps)
    return Training(run.history, size, noise.earlier)


def _robust_step(run: Run, noise: _Noise, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """A step of the classifier, and of the generator if there is one, from one gradient."""
    v, y, clean = noise.mixed(x, y)
    scores = run.scores(v)
    loss = cross_entropy(scores, y)
    run.step(loss, optimizer, noise.optimizer, inputs=noise.trained(optimizer))
    noise.adapt(run.count(loss, scores, y, clean))


class _Noise:
    """What a robust training puts on half of its batches; its state is part of the checkpoint."""

    def __init__(
        self, run: Run, method: str, eps: Any, sigma: Any, error: float, kernel_size: int, noise_lr: float
    ) -> None:
        self.run, self.method, self.error, self.noise_lr, self.kernel_size = run, method, error, noise_lr, kernel_size
        self.adaptive, self.sigma = isinstance(eps, str) and eps == "adaptive", None
        self.kind = "speckle" if method == "speckle" else "gaussian"  # that it begins as, or is
        if method == "clean":
            if eps is not None or sigma is not None:
                raise ValueError(f"eps is {eps!r} and sigma is {sigma!r}, expected None of both for method 'clean'")
        elif sigma is not None:
            if method == "ant" or eps is not None:
                raise ValueError(
                    f"sigma is {sigma!r}, expected None for method {method!r} and eps {eps!r}: it is for 'gaussian' "
                    "and 'speckle', instead of eps"
                )
            several = sigma if isinstance(sigma, Sequence) else (sigma,)
            if not several or not all(_check.is_number(s) and 0 < s < math.inf for s in several):
                raise ValueError(f"sigma is {sigma!r}, expected a positive number or several")
            self.sigma = torch.tensor(several, device=run.device)
        elif not self.adaptive:
            positive_eps(eps)
        if kernel_size not in (1, 3):
            raise ValueError(f"kernel_size is {kernel_size!r}, expected 1 or 3")
        self.eps: Any = float(eps) if _check.is_number(eps) else None
        self.span = (0.0, math.inf)
        self.shape: tuple[int, int] = (1, 2)  # channels, and axes beside them
        self.current: NoiseGenerator | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.earlier: list[NoiseGenerator] = []
        self.settings = {
            "method": method,
            "eps": "adaptive" if self.adaptive else self.eps,
            "sigma": None if self.sigma is None else [float(s) for s in several],
            "error": float(error),
            "kernel_size": int(kernel_size),
            "noise_lr": float(noise_lr),
        }

    def begin(self, seen: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Once, with a few samples: what they look like, and for an adaptive eps where to begin."""
        x, y = seen
        self.shape = (x.shape[1] if x.ndim > 1 else 1, x.ndim - 2)
        if self.method == "ant" and self.shape[1] not in CONVOLUTIONS:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (samples, channels, ...) with 1 to 3 more axes")
        if self.adaptive:
            delta, run = sample(self.kind, x), self.run
            most = float(reach(x, delta, p=run.p, bounds=run.bounds).median())
            if not 0 < most < math.inf:
                raise ValueError(
                    f"eps is 'adaptive' and noise inside the bounds can have a norm of {most:g}, expected finite "
                    "bounds with room between them"
                )
            self.span = (SMALLEST * most, LARGEST * most)
            low, high = map(math.log, self.span)
            with torch.no_grad(), mode(run.model, training=False):
                for _ in range(12):
                    middle = (low + high) / 2
                    v = perturb(x, delta, math.exp(middle), p=run.p, bounds=run.bounds)
                    wrong = float((run.scores(v).argmax(1) != y).double().mean())
                    low, high = (low, middle) if wrong > self.error else (middle, high)
            self.eps = torch.tensor(math.exp(low), dtype=torch.float64, device=x.device)

    def renew(self) -> None:
        """A new generator, for a new epoch."""
        if self.method == "ant":
            channels, dims = self.shape
            self.current = NoiseGenerator(channels, self.kernel_size, dims=dims).to(self.run.device)
            self.optimizer = torch.optim.Adam(self.current.parameters(), self.noise_lr, maximize=True)

    def trained(self, optimizer: Any) -> list[Any]:
        """All that gradients are for: of the classifier, what its optimizer has."""
        optimizers = [one for one in (optimizer, self.optimizer) if one is not None]
        return [p for one in optimizers for group in one.param_groups for p in group["params"] if p.requires_grad]

    def remember(self) -> None:
        if self.current is not None:
            self.earlier.append(self.current.requires_grad_(False))

    def mixed(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """A batch with noise, its labels in the same order, and how many in front are clean."""
        if self.method == "clean":
            return x, y, len(x)
        # Which samples stay clean is not to depend on whether the loader shuffles.
        order = torch.randperm(len(x), device=x.device)
        x, y, parts = x[order], y[order], _parts(len(x))
        clean, rest = x[: parts[0]], x[parts[0] :]
        if self.current is None:
            return torch.cat([clean, self.plain(rest)]), y, parts[0]
        deltas = [self.run.noise(self.current, rest[: parts[1]])]
        known = self.earlier or [self.current]
        which = torch.randperm(len(known))[: len(parts) - 2].tolist()
        for number, part in enumerate(torch.split(rest[parts[1] :], parts[2:])):
            deltas.append(self.run.noise(known[which[number % len(which)]], part))
        # All at once: a GPU takes hardly longer for that than for one of them.
        noisy = perturb(rest, torch.cat(deltas), self.eps, p=self.run.p, bounds=self.run.bounds)
        return torch.cat([clean, noisy]), y, parts[0]

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """x with Gaussian or speckle noise."""
        delta = sample(self.method, x)
        if self.sigma is None:
            return perturb(x, delta, self.eps, p=self.run.p, bounds=self.run.bounds)
        drawn = self.sigma[torch.randint(len(self.sigma), (len(x),), device=x.device)].to(x.dtype)
        lower, upper = (torch.as_tensor(b, dtype=x.dtype, device=x.device) for b in self.run.bounds)
        return (x + drawn.reshape(-1, *(1,) * (x.ndim - 1)) * delta).clamp(lower, upper)

    def adapt(self, wrong: float) -> None:
        """Move eps so that this share of the noisy samples, which was wrong, comes nearer to what it is to be."""
        if self.adaptive and math.isfinite(wrong):
            low, high = self.span
            self.eps = (self.eps * math.exp(GAIN * (self.error - wrong))).clamp(low, high)

    def state_dict(self) -> dict[str, Any]:
        return {
            "eps": None if self.eps is None else float(self.eps),
            "span": list(self.span),
            "shape": list(self.shape),
            "earlier": [generator.state_dict() for generator in self.earlier],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.span, self.shape = tuple(state["span"]), tuple(state["shape"])
        self.eps = state["eps"]
        if self.adaptive:
            self.eps = torch.tensor(self.eps, dtype=torch.float64, device=self.run.device)
        self.earlier = []
        for weights in state["earlier"]:
            self.renew()
            assert self.current is not None
            self.current.load_state_dict(weights)
            self.remember()


def _parts(samples: int) -> list[int]:
    """How many of so many are clean, of this epoch's generator, and of each earlier one; all of them together."""
    ends = [round(samples * share) for share in np.cumsum(SHARES)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class CorruptionResult:
    """How often a classifier is right under corruptions.

    Attributes
    ----------
    clean
        Accuracy on the samples as they are.
    accuracy
        Of every kind of corruption, the accuracies by severity.
    severities
        Which these are.
    robustness
        How much Gaussian noise each sample takes; its ``median`` is the measure of Rusak et al. (2020). None if it was
        not asked for.
    """

    clean: float
    accuracy: dict[str, list[float]]
    severities: tuple[int, ...]
    robustness: Robustness | None = field(default=None, repr=False)

    def mean(self, kinds: Sequence[str] | None = None) -> float:
        """The mean accuracy over these kinds of corruption, or all, and over severities; NaN if there are none."""
        chosen = [self.accuracy[kind] for kind in (self.accuracy if kinds is None else kinds)]
        return float(np.mean(chosen)) if chosen else math.nan

    @property
    def noise(self) -> float:
        """The mean accuracy over the kinds of noise."""
        return self.mean([kind for kind in (*NOISES, "learned") if kind in self.accuracy])

    def table(self) -> str:
        """All of it in Markdown."""
        lines = [
            f"| corruption | {' | '.join(f'severity {severity}' for severity in self.severities)} | mean |",
            "|---" * (len(self.severities) + 2) + "|",
        ]
        for kind, row in self.accuracy.items():
            lines.append(f"| {kind} | {' | '.join(f'{a:.1%}' for a in row)} | {np.mean(row):.1%} |")
        return "\n".join(lines) + "\n"


def evaluate_corruptions(
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    bounds: tuple[Any, Any] = (0, 1),
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    generator: NoiseGenerator | None = None,
    steps: int = 200,
    robustness: bool = True,
    batch_size: int = 500,
    seed: int = 0,
    progress: bool = False,
) -> CorruptionResult:
    """Accuracy under noise and other corruptions of five severities, and the median norm of noise that flips a sample.

    What they are, :func:`corrupt` says. ``"learned"`` is noise of a generator, which on every sample has exactly the
    norm that the Gaussian noise of the same severity has there after clipping, so that the two can be compared; or as
    much of it as its direction has room for.

    Parameters
    ----------
    model
        As for :func:`train_noise`. Asked in evaluation mode.
    x, y
        Samples inside their bounds, (samples, channels, ...), and their labels, on any device.
    bounds
        Finite numbers, or tensors per channel or element, the same for all samples.
    corruptions
        Which of `CORRUPTIONS`.
    severities
        Which of 1 to 5.
    generator
        Of the learned noise. None: one with a kernel of 1 is trained against this model, on x and y themselves, at the
        mean norm of Gaussian noise of severity 3.
    steps
        For how many steps.
    robustness
        Whether to look for the smallest norm of Gaussian noise that flips each sample, which takes some twenty passes.
    batch_size
        How many samples the model gets at once.
    seed
        The same seed and batch size give the same corruptions.
    progress
        Whether to show a progress bar, which needs tqdm.

    Returns
    -------
    CorruptionResult
        With ``clean``, ``accuracy`` by kind and severity, ``noise`` (their mean over noise), ``mean()``, ``table()``
        and ``robustness``.

    Examples
    --------
    >>> import torch
    >>> from clipaware.adversarial_noise import evaluate_corruptions
    >>> model = torch.nn.Flatten()  # the class is the brightest of four pixels
    >>> x = torch.eye(4).reshape(4, 1, 2, 2).repeat(50, 1, 1, 1)
    >>> found = evaluate_corruptions(model, x, x.flatten(1).argmax(1), corruptions=("gaussian", "contrast"))
    >>> found.clean, found.accuracy["contrast"]
    (1.0, [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    for kind in corruptions:
        _check.option(kind, CORRUPTIONS, "corruptions")
    for severity in severities:
        if severity not in (1, 2, 3, 4, 5):
            raise ValueError(f"severities has {severity!r}, expected whole numbers from 1 to 5")
    positive(batch_size, "batch_size")
    positive(steps, "steps")
    if not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed is a {type(seed).__name__}, expected a whole number")
    if "blur" in corruptions:
        gaussian_filter()  # which may not be installed
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if not len(x):
        raise ValueError(f"x has shape {tuple(x.shape)}, expected one sample at least")
    if y.shape != (len(x),):
        raise ValueError(f"y has shape {tuple(y.shape)}, expected ({len(x)},): a label for every sample")
    batches = list(zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True))
    run = Run(model, batches, 2, bounds, None, seed, progress)
    with run.random_state(), mode(model, training=False):
        run.look(None, None, generator)
        if generator is None and "learned" in corruptions:
            with torch.inference_mode(False), torch.enable_grad():
                generator = _worst(run, steps)
        accuracy = {kind: [0.0] * len(severities) for kind in corruptions}
        jobs = [(kind, place) for kind in corruptions for place in range(len(severities))]
        right = []
        with torch.no_grad(), run.bar("corruptions", (len(jobs) + 1) * len(run.loader)) as bar:
            for here, labels in run.batches():
                right.append(run.scores(here).argmax(1) == labels)
                bar.update(1)
            for kind, place in jobs:
                hits = []
                for number, (here, labels) in enumerate(run.batches()):
                    v = _corrupted(run, here, kind, severities[place], generator, number)
                    hits.append(run.scores(v).argmax(1) == labels)
                    bar.update(1)
                accuracy[kind][place] = float(torch.cat(hits).double().mean())
        found = None
        if robustness:
            options = {"batch_size": batch_size, "seed": int(seed), "progress": progress}
            found = noise_robustness(model, x.to(run.device), y, bounds=run.bounds, **options)
    return CorruptionResult(float(torch.cat(right).double().mean()), accuracy, tuple(severities), found)


def _corrupted(run: Run, x: torch.Tensor, kind: str, severity: int, generator: Any, number: int) -> torch.Tensor:
    def seeded(what: str) -> torch.Generator:
        words = [run.seed, CORRUPTIONS.index(what), severity, number]
        return torch.Generator(x.device).manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))

    if kind != "learned":
        return corrupt(x, kind, severity, bounds=run.bounds, seed=seeded(kind))
    beside = corrupt(x, "gaussian", severity, bounds=run.bounds, seed=seeded("gaussian"))
    eps = (beside - x).flatten(1).double().norm(dim=1)
    return generator.perturb(x, eps, run.bounds, generator=seeded("learned"))  # type: ignore[no-any-return]


def _worst(run: Run, steps: int) -> NoiseGenerator:
    """A generator trained against the model on the samples that it will be tried on."""
    run.reseed(1)
    x, _ = next(run.batches())
    generator = NoiseGenerator(x.shape[1], dims=x.ndim - 2).to(run.device)
    optimizer = torch.optim.Adam(generator.parameters(), 1e-3, maximize=True)
    eps = float((corrupt(x, "gaussian", 3, bounds=run.bounds) - x).flatten(1).double().norm(dim=1).mean())
    with run.bar("learned noise", steps) as bar:
        for here, labels in run.batches(steps):
            # The model may be asked about more at once than a step needs.
            some = torch.randperm(len(here), device=here.device)[:STEP]
            run.noise_step(generator, optimizer, here[some].clone(), labels[some].clone(), eps)
            run.show(bar)
    return generator
