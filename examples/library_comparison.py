"""What attacks and noises of several libraries deliver, in norm, when they are asked for one.

    python examples/library_comparison.py [--out FILE]

Sixteen patches of the bundled photograph, an untrained linear model, one norm. Libraries that are not installed are
left out, and said to be. The documentation's page of comparisons has the table that this writes.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import clipaware.attacks

EPS = 20.0
SIZE = 64
STEPS = 10
Attack = Callable[[], Any]


def patches() -> torch.Tensor:
    """Sixteen of them, beside and below each other."""
    with as_file(files("clipaware") / "data" / "coffee.jpg") as path:
        picture = torch.from_numpy(np.asarray(Image.open(path)).copy()).float() / 255
    corners = [(i, j) for i in range(0, 4 * SIZE, SIZE) for j in range(0, 4 * SIZE, SIZE)]
    return torch.stack([picture[i : i + SIZE, j : j + SIZE].permute(2, 0, 1) for i, j in corners])


def of_clipaware(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Attack]:
    def gradient(steps: int) -> Any:
        return clipaware.attacks.gradient_attack(model, x, y, EPS, steps=steps).perturbed

    return {
        "Gaussian noise": lambda: clipaware.attacks.noise_attack(model, x, y, EPS, seed=0).perturbed,
        "fast gradient": lambda: gradient(1),
        "projected gradient": lambda: gradient(STEPS),
    }


def of_foolbox(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Attack]:
    import foolbox

    fmodel = foolbox.PyTorchModel(model, bounds=(0, 1))
    attacks = {
        "Gaussian noise": foolbox.attacks.L2AdditiveGaussianNoiseAttack(),
        "Gaussian noise, clipping-aware": foolbox.attacks.L2ClippingAwareAdditiveGaussianNoiseAttack(),
        "fast gradient": foolbox.attacks.L2FastGradientAttack(),
        "projected gradient": foolbox.attacks.L2ProjectedGradientDescentAttack(steps=STEPS),
    }
    return {name: lambda attack=attack: attack.run(fmodel, x, y, epsilon=EPS) for name, attack in attacks.items()}


def of_art(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Attack]:
    from art.attacks.evasion import FastGradientMethod, ProjectedGradientDescent
    from art.estimators.classification import PyTorchClassifier

    classifier = PyTorchClassifier(model, torch.nn.CrossEntropyLoss(), tuple(x.shape[1:]), 10, clip_values=(0, 1))
    attacks = {
        "fast gradient": FastGradientMethod(classifier, norm=2, eps=EPS),
        "projected gradient": ProjectedGradientDescent(
            classifier, norm=2, eps=EPS, eps_step=2.5 * EPS / STEPS, max_iter=STEPS, verbose=False
        ),
    }
    return {name: lambda attack=attack: attack.generate(x.numpy(), y.numpy()) for name, attack in attacks.items()}


def of_torchattacks(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Attack]:
    import torchattacks

    noise = torchattacks.GN(model, std=EPS / x[0].numel() ** 0.5)
    descent = torchattacks.PGDL2(model, eps=EPS, alpha=2.5 * EPS / STEPS, steps=STEPS)
    return {"Gaussian noise": lambda: noise(x, y), "projected gradient": lambda: descent(x, y)}


def of_autoattack(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Attack]:
    from pyautoattack.autopgd_base import APGDAttack

    attack = APGDAttack(model, n_iter=STEPS, norm="L2", eps=EPS, seed=0, device="cpu")
    return {"auto projected gradient": lambda: attack.perturb(x, y)}


LIBRARIES = {
    "clipaware": of_clipaware,
    "foolbox": of_foolbox,
    "adversarial-robustness-toolbox": of_art,
    "torchattacks": of_torchattacks,
    "pyautoattack": of_autoattack,
}


def measured(name: str, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[dict[str, Any]]:
    """One row per attack of a library."""
    rows = []
    for attack, run in LIBRARIES[name](model, x, y).items():
        torch.manual_seed(0)
        np.random.seed(0)  # some of the libraries draw from it
        v = torch.as_tensor(run()).detach().double()
        norms = (v - x.double()).flatten(1).norm(dim=1)
        row: dict[str, Any] = {"library": f"{name} {version(name)}", "attack": attack, "asked": f"{EPS:g}"}
        row |= {key: f"{value:.4f}" for key, value in zip(("least", "mean", "most"), _summary(norms), strict=True)}
        rows.append(row | {"date": datetime.date.today().isoformat()})
    return rows


def _summary(norms: torch.Tensor) -> list[float]:
    return [norms.min().item(), norms.mean().item(), norms.max().item()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a CSV file to write")
    out = parser.parse_args().out
    warnings.filterwarnings("ignore")  # of the libraries, about each other
    torch.manual_seed(0)
    x = patches()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, 10)).eval()
    y = model(x).argmax(1)
    rows = []
    for name in LIBRARIES:
        try:
            rows += measured(name, model, x, y)
        except (ImportError, PackageNotFoundError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    for row in rows:
        print("  ".join(f"{value:>{38 if key in ('library', 'attack') else 10}}" for key, value in row.items()))
    if out:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
