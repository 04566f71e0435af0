"""Learned adversarial noise: train the worst noise for a classifier at exactly eps, then train against it (PyTorch).

After Rusak et al. (2020), "A simple way to make neural networks robust against diverse image corruptions", arXiv
2001.06057, who learn the noise by backpropagating through clipping-aware rescaling.
"""

from __future__ import annotations

import csv
import io
import math
import numbers
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("clipaware.adversarial_noise needs PyTorch: pip install 'clipaware[torch]'") from error
from torch.nn.functional import cross_entropy

from clipaware import _check
from clipaware._api import perturb, reach
from clipaware._corruptions import NOISES, OTHERS, corrupt
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
SMALLEST, LARGEST = 1e-3, 0.9  # that it becomes, of what noise can reach
CHECKPOINT, METRICS = "checkpoint.pt", "metrics.csv"


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
    >>> (v - x).flatten(1).norm(dim=1)
    tensor([5.0000, 5.0000, 5.0000, 5.0000], grad_fn=<LinalgVectorNormBackward0>)
    """

    def __init__(self, channels: int, kernel_size: int = 1, *, dims: int = 2, hidden: int = 20) -> None:
        super().__init__()
        _positive(channels, "channels")
        _positive(hidden, "hidden")
        if kernel_size not in (1, 3):
            raise ValueError(f"kernel_size is {kernel_size!r}, expected 1 or 3")
        if dims not in CONVOLUTIONS:
            raise ValueError(f"dims is {dims!r}, expected 1 (audio), 2 (pictures) or 3 (volumes)")
        self.channels, self.kernel_size, self.dims, self.hidden = channels, kernel_size, dims, hidden
        widths, kernels = (channels, hidden, hidden, hidden, channels), (1, kernel_size, 1, 1)
        self.layers = torch.nn.ModuleList(
            CONVOLUTIONS[dims](before, after, kernel)
            for before, after, kernel in zip(widths, widths[1:], kernels, strict=False)
        )
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=0.01)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Noise in the shape and dtype of x, and of no particular size; `generator` is what z is drawn from."""
        if x.ndim != self.dims + 2 or x.shape[1] != self.channels:
            rest = ", ".join(("length", "height, width", "depth, height, width")[self.dims - 1 :][:1])
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (samples, {self.channels}, {rest})")
        margin, weight = self.kernel_size // 2, self.layers[0].weight
        shape = (*x.shape[:2], *(n + 2 * margin for n in x.shape[2:]))
        z = torch.randn(shape, dtype=weight.dtype, device=x.device, generator=generator)
        hidden = z
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        inside = (..., *(slice(margin, margin + n) for n in x.shape[2:]))
        return (self.layers[-1](hidden) + z[inside]).to(x.dtype)

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
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    >>> x = torch.rand(32, 1, 8, 8)
    >>> loader = [(x, model(x).argmax(1))] * 50
    >>> done = train_noise(NoiseGenerator(1), model, loader, 2.0, epochs=2, seed=0)
    >>> done.history[1]["loss"] > done.history[0]["loss"]
    True
    """
    if not isinstance(generator, NoiseGenerator):
        raise TypeError(f"generator is a {type(generator).__name__}, expected a NoiseGenerator")
    run = _Run(model, loader, p, bounds, amp, seed, progress)
    _positive(epochs, "epochs")
    _eps(eps)
    generator.to(run.device)
    optimizer = torch.optim.Adam(generator.parameters(), lr, maximize=True)
    run.settings = {"training": "noise", "eps": float(eps), "p": float(p)}
    run.kept = {"generator": generator, "optimizer": optimizer}
    with run.random_state(), _mode(model, training=False):
        run.open(folder, resume, tensorboard)
        if not run.history:
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
    noise_lr: float = 1e-3,
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
        ``"ant"``, adversarial noise training. Or something to compare it with: ``"gaussian"`` and ``"speckle"`` for half
        of the batch with noise of that kind, ``"clean"`` for none.
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
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    >>> x = torch.rand(32, 1, 8, 8)
    >>> loader = [(x, x[:, 0, 0, 0].gt(0.5).long())] * 20
    >>> done = train_robust(model, loader, 2.0, epochs=3, seed=0)
    >>> [row["epoch"] for row in done.history], len(done.generators)
    ([1, 2, 3], 3)
    """
    _check.option(method, METHODS, "method")
    run = _Run(model, loader, p, bounds, amp, seed, progress)
    _positive(epochs, "epochs")
    if not isinstance(warmup, numbers.Integral) or warmup < 0:
        raise ValueError(f"warmup is {warmup!r}, expected a whole number of 0 or more")
    if not (_check.is_number(error) and 0 < error < 1):
        raise ValueError(f"error is {error!r}, expected a number between 0 and 1")
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    noise = _Noise(run, method, eps, sigma, error, kernel_size, noise_lr)
    run.settings = {"training": "robust", "p": float(p), **noise.settings, "warmup": int(warmup)}
    run.kept = {"model": getattr(model, "_orig_mod", model), "optimizer": optimizer, "noise": noise}
    if scheduler is not None:
        run.kept["scheduler"] = scheduler
    with run.random_state(), _mode(model, training=True):
        run.open(folder, resume, tensorboard)
        if not run.history:
            noise.begin(run.look(check, eps if _check.is_number(eps) else None, None))
        for epoch in run.epochs(epochs):
            noise.renew()
            if noise.current is not None and warmup:
                with run.bar(f"generator, epoch {epoch + 1} of {epochs}", warmup) as bar, _mode(model, training=False):
                    for x, y in run.batches(warmup):
                        run.noise_step(noise.current, noise.optimizer, x, y, noise.eps)
                        run.show(bar)
                run.forget()
            with run.bar(f"epoch {epoch + 1} of {epochs}") as bar:
                for x, y in run.batches():
                    v, y, clean = noise.mixed(x, y)
                    scores = run.scores(v)
                    loss = cross_entropy(scores, y)
                    run.step(loss, optimizer, noise.optimizer)
                    noise.adapt(run.count(loss, scores, y, clean))
                    run.show(bar)
            rate = optimizer.param_groups[0]["lr"]
            if scheduler is not None:
                scheduler.step()
            noise.remember()
            run.close(epoch, {"eps": math.nan if noise.eps is None else float(noise.eps), "lr": float(rate)})
    size = None if noise.eps is None else float(noise.eps)
    return Training(run.history, size, noise.earlier)


class _Noise:
    """What a robust training puts on half of its batches; its state is part of the checkpoint."""

    def __init__(
        self, run: _Run, method: str, eps: Any, sigma: Any, error: float, kernel_size: int, noise_lr: float
    ) -> None:
        self.run, self.method, self.error, self.noise_lr, self.kernel_size = run, method, error, noise_lr, kernel_size
        self.adaptive, self.sigma = isinstance(eps, str) and eps == "adaptive", None
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
            _eps(eps)
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
            kind = "speckle" if self.method == "speckle" else "gaussian"
            delta, run = sample(kind, x), self.run
            most = float(reach(x, delta, p=run.p, bounds=run.bounds).median())
            self.span = (SMALLEST * most, LARGEST * most)
            low, high = map(math.log, self.span)
            with torch.no_grad(), _mode(run.model, training=False):
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
        run = self.run
        clean, rest = x[: parts[0]], x[parts[0] :]
        if self.current is None:
            return torch.cat([clean, self.plain(rest)]), y, parts[0]
        pieces = [clean, self.current.perturb(rest[: parts[1]], self.eps, run.bounds, p=run.p)]
        known = self.earlier or [self.current]
        which = torch.randperm(len(known))[: len(parts) - 2].tolist()
        with torch.set_grad_enabled(not self.earlier):
            for number, part in enumerate(rest[parts[1] :].split(parts[2:])):
                pieces.append(known[which[number % len(which)]].perturb(part, self.eps, run.bounds, p=run.p))
        return torch.cat(pieces), y, parts[0]

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """x with Gaussian or speckle noise."""
        delta = sample(self.method, x)
        if self.sigma is None:
            return perturb(x, delta, self.eps, p=self.run.p, bounds=self.run.bounds)  # type: ignore[no-any-return]
        drawn = self.sigma[torch.randint(len(self.sigma), (len(x),), device=x.device)].to(x.dtype)
        lower, upper = self.run.bounds
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


class _Run:
    """What both trainings share: the device, the seeds, the steps, and what is written after every epoch."""

    def __init__(
        self, model: Any, loader: Any, p: float, bounds: Any, amp: Any, seed: int | None, progress: bool
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        if amp not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"amp is {amp!r}, expected torch.bfloat16, torch.float16 or None")
        if seed is not None and not isinstance(seed, numbers.Integral):
            raise TypeError(f"seed is a {type(seed).__name__}, expected a whole number or None")
        _check.seed(seed)
        self.model, self.loader, self.p, self.amp, self.progress = model, loader, _check.norm_order(p), amp, progress
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.bounds = tuple(_on(b, self.device) for b in _check.bounds_pair(bounds))
        self.seed = int.from_bytes(os.urandom(6), "little") if seed is None else int(seed)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=amp is torch.float16)
        self.history: list[dict[str, float]] = []
        self.settings: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}  # whatever has a state to be saved
        self.folder: Path | None = None
        self.tensorboard: bool | None = None
        self.forget()

    # --- randomness ---------------------------------------------------------------------------------------------------

    @contextmanager
    def random_state(self) -> Iterator[None]:
        """Leave the global random numbers as they were."""
        devices = [self.device] if self.device.type == "cuda" else []
        plain, of_numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices):
            try:
                yield
            finally:
                random.setstate(plain)
                np.random.set_state(of_numpy)

    def reseed(self, epoch: int) -> None:
        """All that is random in an epoch follows from the seed and its number, so that it can be repeated."""
        words = np.random.SeedSequence([self.seed, epoch]).generate_state(3)
        torch.manual_seed(int(words[0]))
        np.random.seed(int(words[1]))
        random.seed(int(words[2]))
        sampler = getattr(self.loader, "sampler", None)
        for owner in (self.loader, sampler):
            if isinstance(getattr(owner, "generator", None), torch.Generator):
                owner.generator.manual_seed(int(words[0]))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def epochs(self, number: int) -> Iterator[int]:
        for epoch in range(len(self.history), number):
            self.reseed(epoch + 1)
            yield epoch

    # --- batches ------------------------------------------------------------------------------------------------------

    def batches(self, number: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Those of the loader, or as many as there are to be, on the model's device."""
        count = 0
        while number is None or count < number:
            before = count
            for batch in self.loader:
                if count == number:
                    return
                count += 1
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    came = f"{len(batch)} items" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
                    raise ValueError(f"loader has a batch of {came}, expected a pair (x, labels)")
                x, y = (torch.as_tensor(part).to(self.device, non_blocking=True) for part in batch)
                yield x, y
            if count == before:
                raise ValueError("loader is empty, expected batches (x, labels)")
            if number is None:
                return

    def look(self, check: int | None, eps: float | None, generator: NoiseGenerator | None) -> tuple[Any, Any]:
        """Go through the batches before anything is trained, and return some 500 samples of them."""
        if check is not None:
            _positive(check, "check")
        self.reseed(0)
        reaches, some, classes = [], [], None
        for number, (x, y) in enumerate(self.batches(check)):
            here = f"batch {number} of the loader"
            if classes is None:
                classes = self.classes(x, here)
                if generator is not None:
                    generator(x[:1])  # which says whether the shape is the one it was made for
            _check_labels(y, len(x), classes, here)
            try:
                # On the CPU, where values are looked at.
                x = x.cpu()
                bounds = tuple(b.cpu() if isinstance(b, torch.Tensor) else b for b in self.bounds)
                reaches.append(reach(x, sample("gaussian", x), p=self.p, bounds=bounds).reshape(-1))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{here}: {error}") from error
            if sum(len(labels) for _, labels in some) < 500:
                some.append((x, y.cpu()))
        reached = torch.cat(reaches)
        if eps is not None and (reached < eps).double().mean() > 0.5:
            raise ValueError(
                f"eps is {eps}, which noise on {int((reached < eps).sum())} of {len(reached)} samples cannot have "
                f"inside the bounds, expected less than {float(reached.median()):.4g}, what half of them can"
            )
        x, y = (torch.cat(parts).to(self.device) for parts in zip(*some, strict=True))
        return x, y

    def classes(self, x: torch.Tensor, here: str) -> int:
        if not x.is_floating_point():
            raise TypeError(
                f"{here}: x has dtype {x.dtype}, expected a floating one; convert it first, such as x.float() / 255"
            )
        with torch.no_grad(), _mode(self.model, training=False):
            scores = self.scores(x)
        if scores.ndim != 2 or len(scores) != len(x):
            raise ValueError(f"the model's scores have shape {tuple(scores.shape)}, expected ({len(x)}, classes)")
        return int(scores.shape[1])

    # --- steps --------------------------------------------------------------------------------------------------------

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            return self.model(x).float()  # type: ignore[no-any-return]

    def noise_step(self, generator: NoiseGenerator, optimizer: Any, x: Any, y: Any, eps: Any) -> None:
        """A step of the generator alone."""
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            delta = generator(x)
        scores = self.scores(perturb(x, delta, eps, p=self.p, bounds=self.bounds))
        loss = cross_entropy(scores, y)
        self.step(loss, optimizer, inputs=list(generator.parameters()))
        self.count(loss, scores, y, 0)

    def step(self, loss: torch.Tensor, *optimizers: Any, inputs: Any = None) -> None:
        """Differentiate, and let all optimizers take a step, unless the gradient is NaN or infinite."""
        steppers = [optimizer for optimizer in optimizers if optimizer is not None]
        for optimizer in steppers:
            optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward(inputs=inputs)
        self.finite = torch.isfinite(loss.detach())
        if self.scaler.is_enabled():
            for optimizer in steppers:
                self.scaler.step(optimizer)  # which skips what is not finite, and makes the scale smaller
            self.scaler.update()
            return
        for optimizer in steppers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # With no limit but the norm that it returns.
            norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf)
            self.finite = self.finite & torch.isfinite(norm)
        if not self.finite:
            raise FloatingPointError(
                f"the loss is {float(loss):.4g} with a gradient that is not finite, in epoch {len(self.history) + 1}; "
                "no step was taken. Expected a model with finite gradients: is the learning rate too large?"
            )
        for optimizer in steppers:
            optimizer.step()

    # --- metrics ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        # Of the loss, clean samples, those that are right, noisy ones, those that are right.
        self.totals = [0.0] * 5

    def count(self, loss: torch.Tensor, scores: torch.Tensor, y: torch.Tensor, clean: int) -> float:
        """Add a batch, of which the first `clean` have no noise, and return the share of wrong ones of the others."""
        right = (scores.detach().argmax(1) == y).double()
        # One look at the device for all of it.
        total, first, rest = torch.stack([loss.detach().double(), right[:clean].sum(), right[clean:].sum()]).tolist()
        noisy = len(y) - clean
        added = (total * len(y), clean, first, noisy, rest)
        self.totals = [before + more for before, more in zip(self.totals, added, strict=True)]
        return 1 - rest / noisy if noisy else math.nan

    def metrics(self) -> dict[str, float]:
        loss, clean, first, noisy, rest = self.totals
        return {
            "loss": loss / max(clean + noisy, 1),
            "clean_accuracy": first / clean if clean else math.nan,
            "noisy_accuracy": rest / noisy if noisy else math.nan,
        }

    def bar(self, what: str, number: int | None = None) -> AbstractContextManager[Any]:
        if not self.progress:
            return nullcontext(SimpleNamespace(update=lambda number: None, set_postfix=lambda **shown: None))
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError("a progress bar needs tqdm: pip install 'clipaware[training]'") from error
        total = number or (len(self.loader) if hasattr(self.loader, "__len__") else None)
        return tqdm(total=total, desc=what, unit=" batches", disable=None)  # type: ignore[no-any-return]

    def show(self, bar: Any) -> None:
        bar.update(1)
        bar.set_postfix(
            refresh=False, **{name: f"{value:.3f}" for name, value in self.metrics().items() if value == value}
        )

    # --- files --------------------------------------------------------------------------------------------------------

    def open(self, folder: Any, resume: bool, tensorboard: bool | None) -> None:
        """Load the checkpoint, if there is one to go on from."""
        self.tensorboard = tensorboard
        if folder is None:
            if resume:
                raise ValueError("resume is True and folder is None, expected the folder of the checkpoint")
            return
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / CHECKPOINT
        if not resume or not path.exists():
            return
        saved = torch.load(path, map_location=self.device, weights_only=True)
        for name, value in self.settings.items():
            if saved["settings"].get(name) != value:
                raise ValueError(f"{name} is {value!r}, expected {saved['settings'].get(name)!r}, as in {path}")
        if set(saved["kept"]) != set(self.kept):
            raise ValueError(f"{path} has {sorted(saved['kept'])}, expected {sorted(self.kept)}: no other scheduler")
        for name, owner in self.kept.items():
            owner.load_state_dict(saved["kept"][name])
        self.scaler.load_state_dict(saved["scaler"])
        self.history, self.seed = saved["history"], saved["seed"]

    def close(self, epoch: int, more: dict[str, float]) -> None:
        """The end of an epoch: its metrics, and a checkpoint."""
        self.history.append({"epoch": epoch + 1, **self.metrics(), **more})
        self.forget()
        if self.folder is None:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.history[-1]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.history)
        saved = {
            "settings": self.settings,
            "seed": self.seed,
            "history": self.history,
            "scaler": self.scaler.state_dict(),
            "kept": {name: owner.state_dict() for name, owner in self.kept.items()},
        }
        _written(self.folder / CHECKPOINT, lambda file: torch.save(saved, file))
        _written(self.folder / METRICS, lambda file: file.write(text.getvalue().encode()))
        self.write_events(epoch + 1)

    def write_events(self, step: int) -> None:
        if self.tensorboard is False:
            return
        try:
            # Not before the first epoch's end: it may import TensorFlow, after which Triton could not be loaded.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            if self.tensorboard:
                raise ImportError("TensorBoard is not installed: pip install 'clipaware[training]'") from error
            return
        with SummaryWriter(self.folder, purge_step=step) as writer:  # type: ignore[no-untyped-call]
            for name, value in self.history[-1].items():
                if name != "epoch" and not math.isnan(value):
                    writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]


def _written(path: Path, write: Callable[[Any], Any]) -> None:
    """A file that is there as a whole or as it was before, whatever happens in between."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextmanager
def _mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, and then each of its parts as it was."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


def _parts(samples: int) -> list[int]:
    """How many of so many are clean, of this epoch's generator, and of each earlier one; all of them together."""
    ends = [round(samples * share) for share in np.cumsum(SHARES)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _on(bound: Any, device: torch.device) -> Any:
    return bound.to(device) if isinstance(bound, torch.Tensor) else bound


def _eps(eps: Any) -> None:
    if not _check.is_number(eps) or not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps!r}, expected a positive number")


def _positive(value: Any, name: str) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number of 1 or more")


def _check_labels(y: torch.Tensor, samples: int, classes: int, here: str) -> None:
    if y.shape != (samples,):
        raise ValueError(f"{here}: labels have shape {tuple(y.shape)}, expected ({samples},): one for every sample")
    if y.dtype != torch.int64:
        raise TypeError(f"{here}: labels have dtype {y.dtype}, expected torch.int64: the index of every class")
    if samples and not (0 <= int(y.min()) and int(y.max()) < classes):
        worst = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise ValueError(f"{here}: labels have {worst}, expected 0 to {classes - 1} for a model with {classes} classes")


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
        """The mean accuracy over these kinds of corruption, or all, and over severities."""
        return float(np.mean([self.accuracy[kind] for kind in kinds or self.accuracy]))

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
    norm that the Gaussian noise of the same severity has there after clipping, so that the two can be compared.

    Parameters
    ----------
    model
        As for :func:`train_noise`. Asked in evaluation mode.
    x, y
        Samples inside their bounds, (samples, channels, ...), and their labels, on any device.
    bounds
        Finite numbers, or tensors that broadcast to x.
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
        With ``clean``, ``accuracy`` by kind and severity, ``noise`` (their mean over noise), ``mean()``, ``table()`` and
        ``robustness``.

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
    _positive(batch_size, "batch_size")
    _positive(steps, "steps")
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if not len(x):
        raise ValueError(f"x has shape {tuple(x.shape)}, expected one sample at least")
    run = _Run(model, list(zip(x.split(batch_size), y.split(batch_size), strict=True)), 2, bounds, None, seed, progress)
    with run.random_state(), _mode(model, training=False):
        run.look(None, None, generator)
        if generator is None and "learned" in corruptions:
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
            found = noise_robustness(model, x.to(run.device), y, bounds=run.bounds, **options)  # type: ignore[arg-type]
    return CorruptionResult(float(torch.cat(right).double().mean()), accuracy, tuple(severities), found)


def _corrupted(run: _Run, x: torch.Tensor, kind: str, severity: int, generator: Any, number: int) -> torch.Tensor:
    def seeded(what: str) -> torch.Generator:
        words = [run.seed, CORRUPTIONS.index(what), severity, number]
        return torch.Generator(x.device).manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))

    if kind != "learned":
        return corrupt(x, kind, severity, bounds=run.bounds, seed=seeded(kind))
    beside = corrupt(x, "gaussian", severity, bounds=run.bounds, seed=seeded("gaussian"))
    eps = (beside - x).flatten(1).double().norm(dim=1)
    return generator.perturb(x, eps, run.bounds, generator=seeded("learned"))  # type: ignore[no-any-return]


def _worst(run: _Run, steps: int) -> NoiseGenerator:
    """A generator trained against the model on the samples that it will be tried on."""
    run.reseed(1)
    x, _ = next(run.batches())
    generator = NoiseGenerator(x.shape[1], dims=x.ndim - 2).to(run.device)
    optimizer = torch.optim.Adam(generator.parameters(), 1e-3, maximize=True)
    eps = float((corrupt(x, "gaussian", 3, bounds=run.bounds) - x).flatten(1).double().norm(dim=1).mean())
    with run.bar("learned noise", steps) as bar:
        for here, labels in run.batches(steps):
            run.noise_step(generator, optimizer, here, labels, eps)
            run.show(bar)
    return generator
