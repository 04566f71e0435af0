"""What the trainings of `clipaware.adversarial_noise` share: seeds, batches and their checks, steps, metrics, files."""

from __future__ import annotations

import csv
import io
import math
import numbers
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from clipaware import _check
from clipaware._api import perturb, reach
from clipaware.noise import sample

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.csv"
SOME = 500  # samples that are enough to choose a first eps by


class Run:
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
        if hasattr(loader, "__next__"):
            raise TypeError(
                f"loader is a {type(loader).__name__}, which can be gone through but once, expected a DataLoader or "
                "a list of batches"
            )
        self.model, self.loader, self.p, self.amp, self.progress = model, loader, _check.norm_order(p), amp, progress
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        lower, upper = _check.bounds_pair(bounds)
        self.bounds = on_device(lower, self.device), on_device(upper, self.device)
        self.asked, self.seed = seed, int.from_bytes(os.urandom(6), "little") if seed is None else int(seed)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=amp is torch.float16)
        self.history: list[dict[str, float]] = []
        self.settings: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}  # whatever has a state to be saved
        self.folder: Path | None = None
        self.tensorboard: bool | None = None
        self.stale: list[Path] = []
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
        batches: Any = getattr(self.loader, "batch_sampler", None)
        owners: list[Any] = [self.loader, getattr(self.loader, "sampler", None)]
        for owner in (*owners, batches, getattr(batches, "sampler", None)):
            if isinstance(getattr(owner, "generator", None), torch.Generator):
                owner.generator.manual_seed(int(words[0]))
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def epochs(self, number: int) -> Iterator[int]:
        # What another training left is not to be resumed as this one.
        for path in self.stale:
            path.unlink(missing_ok=True)
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

    def look(
        self, check: int | None, eps: float | None, generator: Any, kind: str = "gaussian"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go through the batches before anything is trained, and return some samples of them."""
        if check is not None:
            positive(check, "check")
        self.reseed(0)
        reaches: list[torch.Tensor] = []
        some: list[tuple[torch.Tensor, torch.Tensor]] = []
        classes = None
        for number, (x, y) in enumerate(self.batches(check)):
            here = f"batch {number} of the loader"
            if not len(x):
                raise ValueError(f"{here}: has no samples")
            if classes is None:
                classes = self.classes(x, here)
                if generator is not None:
                    generator(x[:1])  # which says whether the shape is the one it was made for
            check_labels(y, len(x), classes, here)
            try:
                # On the CPU, where values are looked at.
                x = x.cpu()
                lower, upper = (on_device(b, torch.device("cpu")) for b in self.bounds)
                reaches.append(reach(x, sample(kind, x), p=self.p, bounds=(lower, upper)).reshape(-1))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{here}: {error}") from error
            if sum(len(labels) for _, labels in some) < SOME:
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
        with torch.no_grad(), mode(self.model, training=False):
            scores = self.scores(x)
        if scores.ndim != 2 or len(scores) != len(x):
            raise ValueError(f"the model's scores have shape {tuple(scores.shape)}, expected ({len(x)}, classes)")
        return int(scores.shape[1])

    # --- steps --------------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            scores: torch.Tensor = self.model(x)
        if not isinstance(scores, torch.Tensor):
            raise TypeError(f"the model returned a {type(scores).__name__}, expected a tensor of scores")
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def noise(self, generator: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What a generator makes for x, before it has its size."""
        with self.autocast():
            return generator(x)  # type: ignore[no-any-return]

    def noise_step(self, generator: torch.nn.Module, optimizer: Any, x: Any, y: Any, eps: Any) -> None:
        """A step of the generator alone."""
        scores = self.scores(perturb(x, self.noise(generator, x), eps, p=self.p, bounds=self.bounds))
        loss = cross_entropy(scores, y)
        self.step(loss, optimizer, inputs=list(generator.parameters()))
        self.count(loss, scores, y, 0)

    def step(self, loss: torch.Tensor, *optimizers: Any, inputs: Any = None) -> None:
        """Differentiate, and let all optimizers take a step, unless the gradient is NaN or infinite."""
        steppers = [optimizer for optimizer in optimizers if optimizer is not None]
        for optimizer in steppers:
            optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward(inputs=inputs)  # type: ignore[no-untyped-call]
        finite = torch.isfinite(loss.detach())
        if self.scaler.is_enabled() and finite and self.scaler.get_scale() >= 1:
            for optimizer in steppers:
                self.scaler.step(optimizer)  # which skips what is not finite, and makes the scale smaller
            self.scaler.update()
            return
        for optimizer in steppers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # For the norm that it returns: nothing is above the limit.
            finite = finite & torch.isfinite(torch.nn.utils.clip_grad_norm_(parameters, math.inf))
        if not finite:
            raise FloatingPointError(
                f"the loss is {loss.item():.4g} with a gradient that is not finite, in epoch {len(self.history) + 1}; "
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
        if number is None:
            with suppress(TypeError):  # of a loader that does not know
                number = len(self.loader)
        return tqdm(total=number, desc=what, unit=" batches", disable=None)  # type: ignore[no-any-return]

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
        if not resume:
            self.stale = [path, self.folder / METRICS]
        if not resume or not path.exists():
            return
        try:
            # To the CPU, from where each takes what it has: Adam's counters, for one, stay there.
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever pickle may raise
            raise ValueError(f"{path} cannot be read: {error}; remove it to begin anew") from error
        if not isinstance(saved, dict) or not {"settings", "seed", "history", "scaler", "kept"} <= set(saved):
            raise ValueError(f"{path} is no checkpoint of clipaware.adversarial_noise")
        settings, then = self.identity(), {"seed": saved["seed"], **saved["settings"]}
        if self.asked is not None:
            settings["seed"] = self.seed
        for name, value in settings.items():
            if then.get(name) != value:
                raise ValueError(f"{name} is {value!r}, expected {then.get(name)!r}, as in {path}")
        if set(saved["kept"]) != set(self.kept):
            raise ValueError(f"{path} has {sorted(saved['kept'])}, expected {sorted(self.kept)}: no other scheduler")
        for name, owner in self.kept.items():
            owner.load_state_dict(saved["kept"][name])
        self.scaler.load_state_dict(saved["scaler"])
        self.history, self.seed = saved["history"], saved["seed"]

    def identity(self) -> dict[str, Any]:
        """What a training that is resumed must have in common with its checkpoint."""
        bounds = [torch.as_tensor(b).tolist() for b in self.bounds]
        return {**self.settings, "p": self.p, "bounds": bounds, "amp": str(self.amp)}

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
            "settings": self.identity(),
            "seed": self.seed,
            "history": self.history,
            "scaler": self.scaler.state_dict(),
            "kept": {name: plain(owner.state_dict()) for name, owner in self.kept.items()},
        }
        written(self.folder / CHECKPOINT, lambda file: torch.save(saved, file))
        written(self.folder / METRICS, lambda file: file.write(text.getvalue().encode()))
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
        with SummaryWriter(self.folder, purge_step=step) as writer:
            for name, value in self.history[-1].items():
                if name != "epoch" and not math.isnan(value):
                    writer.add_scalar(name, value, step)


def written(path: Path, write: Callable[[Any], Any]) -> None:
    """A file that is there as a whole or as it was before, whatever happens in between."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def plain(state: Any) -> Any:
    """With Python's numbers for NumPy's, which a checkpoint could not be read back with."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(plain(value) for value in state)
    return state.item() if isinstance(state, np.generic) else state


@contextmanager
def mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, and then each of its parts as it was."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


def on_device(bound: Any, device: torch.device) -> Any:
    return bound.to(device) if isinstance(bound, torch.Tensor) else bound


def positive_eps(eps: Any) -> None:
    if not _check.is_number(eps) or not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps!r}, expected a positive number")


def positive(value: Any, name: str) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number of 1 or more")


def check_optimizer(optimizer: Any, scheduler: Any, model: torch.nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected one of torch.optim that is not LBFGS")
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimizer has none of the model's parameters, expected one that was made with them")
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("scheduler is of another optimizer, expected one of the optimizer that was given")


def check_labels(y: torch.Tensor, samples: int, classes: int, here: str) -> None:
    if y.shape != (samples,):
        raise ValueError(f"{here}: labels have shape {tuple(y.shape)}, expected ({samples},): one for every sample")
    if y.dtype != torch.int64:
        raise TypeError(f"{here}: labels have dtype {y.dtype}, expected torch.int64: the index of every class")
    if samples and not (0 <= int(y.min()) and int(y.max()) < classes):
        worst = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise ValueError(f"{here}: labels have {worst}, expected 0 to {classes - 1} for a model with {classes} classes")
