"""Train classifiers against noise, learned and not, and compare them under corruptions: Fashion-MNIST, or 8 x 8 digits.

For every seed a small CNN is trained on clean pictures. Then copies of it go through the same further epochs of
`train_robust`: clean ones, Gaussian noise of one and of several sizes, speckle noise, and adversarial noise training
(ANT) with generators of 1x1 and 3x3. All are tried on the test pictures under the corruptions of
`evaluate_corruptions`; the learned noise there is trained against each classifier anew, on training pictures. Beside
that, learned noise is compared with Gaussian noise of the same norm on the classifier that knows neither.

It writes results.csv, complete after every classifier, so that a run that was stopped goes on where it was when it is
started again; pictures.npz, what figures show; and then tables.md and the figures (with Matplotlib, and also later, by
--figures-only). What it needs beyond clipaware:

    pip install 'clipaware[torch,training]' scikit-learn
    apt-get install dataset-fashion-mnist  # or four IDX files elsewhere: --fashion-mnist DIR; else there are the digits
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import csv
import gzip
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clipaware as ca
from clipaware.adversarial_noise import (
    CORRUPTIONS,
    NoiseGenerator,
    evaluate_corruptions,
    train_noise,
    train_robust,
)
from clipaware.attacks import noise_robustness
from clipaware.noise import sample

Row = dict[str, Any]
Found = tuple[str, float, float]  # what, at which level, its value
COLUMNS = ["data", "method", "seed", "what", "level", "value"]
TRIED = ["method", "setting", "noise", "clean"]
TUNING = 1000  # the seed that settings are chosen with
SIGMAS = (0.08, 0.12, 0.18, 0.26, 0.38)  # those of the Gaussian noise that they are tried on
# As --tune chose them for Fashion-MNIST. eps is in units of the box's diagonal, which is 28 for pictures of 28 x 28.
METHODS: dict[str, dict[str, Any]] = {
    "clean": {"method": "clean"},
    "Gaussian": {"method": "gaussian", "sigma": 0.35},
    "Gaussian, several sizes": {"method": "gaussian", "sigma": [1.25 * sigma for sigma in SIGMAS]},
    "speckle": {"method": "speckle", "sigma": 0.6},
    "ANT 1x1": {"method": "ant", "kernel_size": 1, "eps": 0.25, "noise_lr": 3e-4},
    "ANT 3x3": {"method": "ant", "kernel_size": 3, "eps": 0.25, "noise_lr": 3e-4},
}
# Settings that --tune chooses from.
CHOICES: dict[str, list[dict[str, Any]]] = {
    "Gaussian": [{"sigma": sigma} for sigma in (0.2, 0.25, 0.3, 0.35, 0.45)],
    "Gaussian, several sizes": [{"sigma": [round(k * sigma, 4) for sigma in SIGMAS]} for k in (1, 1.25, 1.5, 2)],
    "speckle": [{"sigma": sigma} for sigma in (0.6, 1.0, 1.5)],
    "ANT 1x1": [
        *({"eps": eps, "noise_lr": 3e-4} for eps in (0.2, 0.25, 0.3)),
        *({"eps": eps, "noise_lr": 1e-3} for eps in (0.25, 0.3, "adaptive")),
    ],
    "ANT 3x3": [
        *({"eps": eps, "noise_lr": 3e-4} for eps in (0.2, 0.25)),
        *({"eps": eps, "noise_lr": 1e-3} for eps in (0.15, 0.2, "adaptive")),
    ],
}
FIXED = ("gaussian", "shot", "impulse", "speckle", "uniform")  # the kinds of noise that are the same for all
OTHERS = ("blur", "contrast", "brightness", "pixelate")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", choices=["auto", "fashion-mnist", "digits"], default="auto", help="which pictures (%(default)s)"
    )
    parser.add_argument("--fashion-mnist", type=Path, metavar="DIR", help=f"the folder of its IDX files ({DEBIAN})")
    parser.add_argument("--quick", action="store_true", help="the digits and few epochs: two minutes on two cores")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--samples", type=int, metavar="N", help="at most as many pictures to train with (all)")
    parser.add_argument("--tests", type=int, metavar="N", help="and as many to test with (all)")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="first choose sizes of noise, on pictures held back from training",
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="of the clean classifier (10, --quick 8)")
    parser.add_argument("--further", type=int, metavar="N", help="and of each method (10, --quick 8)")
    parser.add_argument("--jobs", type=int, metavar="N", help="classifiers at once (1, --quick 2)")
    parser.add_argument("--noise-steps", type=int, metavar="N", help="of noise to test with (500, --quick 100)")
    parser.add_argument("--batch", type=int, metavar="N", help="pictures in a batch (250, of digits 32)")
    parser.add_argument("--out", type=Path, default=Path("robust-training"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--figures-only", action="store_true", help="tables and figures of what is there already")
    parser.add_argument("--progress", action="store_true", help="show progress bars")
    args = parser.parse_args()
    args.jobs = args.jobs or (2 if args.quick else 1)
    if args.fashion_mnist is None:
        args.fashion_mnist = DEBIAN
    elif not args.fashion_mnist.is_dir():
        parser.error(f"--fashion-mnist is {args.fashion_mnist}, expected the folder of its IDX files")
    elif args.quick and args.data == "auto":
        parser.error("--quick takes the digits, and --fashion-mnist says otherwise; add --data fashion-mnist")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.figures_only:
        if differing := other_settings(args):
            parser.error(f"{args.out} has results with other settings ({differing}); choose another --out")
        try:
            study(args)
        except KeyboardInterrupt:
            print(f"\nStopped. What was done is in {args.out}; the same command goes on.", file=sys.stderr)
            return 130
    rows = load(args.out / "results.csv")
    text = tables(rows)
    (args.out / "tables.md").write_text(text)
    print(text)
    if importlib.util.find_spec("matplotlib") is None:
        print("Matplotlib is not installed: no figures. --figures-only draws them later.")
    else:
        draw(rows, args.out)
    print(f"Results: {args.out}")
    return 0


def other_settings(args: argparse.Namespace) -> str:
    """What an earlier run into the same folder was asked for otherwise, so that results of two are not mixed."""
    names = ("quick", "samples", "tests", "epochs", "further", "noise_steps", "batch")
    now = {"data": pictures_name(args), **{name: getattr(args, name) for name in names}}
    path = args.out / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(now, indent=1) + "\n")
    then = json.loads(path.read_text())
    return ", ".join(f"{name}: {then.get(name)}" for name in now if then.get(name) != now[name])


# --- pictures and models ----------------------------------------------------------------------------------------------


class Batches:
    """A loader of tensors that are on their device already: batches of one size, in random order."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, min(size, len(x))

    def __len__(self) -> int:
        return len(self.x) // self.size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.x)).to(self.x.device)
        for rows in order[: len(self) * self.size].split(self.size):
            yield self.x[rows], self.y[rows]


def idx(path: Path) -> Any:
    """The array in an IDX file of bytes."""
    content = gzip.decompress(path.read_bytes())
    lengths = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(lengths)).reshape(lengths)


def pictures_name(args: argparse.Namespace) -> str:
    if args.data != "auto":
        return str(args.data)
    found = args.fashion_mnist.exists() and not args.quick
    return "fashion-mnist" if found or importlib.util.find_spec("sklearn") is None else "digits"


def pictures(args: argparse.Namespace) -> tuple[str, list[torch.Tensor]]:
    """Which they are, and x and y to train, to choose settings and to test with, on the device."""
    name = pictures_name(args)
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        order = np.random.default_rng(0).permutation(len(bunch.target))
        x, y = bunch.images[order, None] / 16, bunch.target[order]
        x, y, tests, labels = x[:1297], y[:1297], x[1297:], y[1297:]
    else:
        parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        x, y, tests, labels = (idx(args.fashion_mnist / f"{part}-ubyte.gz") for part in parts)
        x, tests = x[:, None] / 255, tests[:, None] / 255
    held = len(x) // 6
    few, some = slice(args.samples), slice(args.tests)
    arrays = (x[:-held][few], y[:-held][few], x[-held:][some], y[-held:][some], tests[some], labels[some])
    kinds = (np.float32, np.int64) * 3
    return name, [torch.from_numpy(a.astype(kind)).to(args.device) for a, kind in zip(arrays, kinds, strict=True)]


def cnn(side: int) -> torch.nn.Module:
    layers = torch.nn
    return layers.Sequential(
        *(layers.Conv2d(1, 32, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2)),
        *(layers.Conv2d(32, 64, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2)),
        *(layers.Flatten(), layers.Linear(64 * (side // 4) ** 2, 128), layers.ReLU(), layers.Linear(128, 10)),
    )


def fitted(model: torch.nn.Module, loader: Batches, rate: float, epochs: int, **options: Any) -> None:
    """Adam with a learning rate that falls to 0, whatever the method."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    eps = options.pop("eps", None)
    if isinstance(eps, float):
        eps *= loader.x[0].numel() ** 0.5
    train_robust(model, loader, eps, optimizer=optimizer, scheduler=schedule, epochs=epochs, check=10, **options)


# --- the study --------------------------------------------------------------------------------------------------------


class Study:
    """The pictures, and what is to be done with them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name, (x, y, self.held, self.held_labels, self.tests, self.labels) = pictures(args)
        usual = 8 if args.quick else 10
        self.epochs, self.further = args.epochs or usual, args.further or usual
        self.loader = Batches(x, y, args.batch or (32 if self.name == "digits" else 250))
        self.size = noise_size(x)

    def base(self, seed: int) -> torch.nn.Module:
        """The classifier that all methods begin with."""
        torch.manual_seed(seed)
        model = self.new()
        path = self.args.out / f"base-{seed}.pt"
        if path.exists():
            model.load_state_dict(torch.load(path, map_location=self.args.device))
        else:
            fitted(model, self.loader, 1e-3, self.epochs, method="clean", seed=seed, progress=self.args.progress)
            torch.save(model.state_dict(), path)
        return model.eval()

    def base_rows(self, seed: int) -> list[Found]:
        """That one, of which there is nothing to tell."""
        self.base(seed)
        return []

    def new(self) -> torch.nn.Module:
        return cnn(self.loader.x.shape[-1]).to(self.args.device)

    def before(self, seed: int) -> list[Found]:
        """Errors of a clean classifier under learned and Gaussian noise of the same norms, and what they look like."""
        model = self.base(seed)
        learned = {f"learned {kernel}x{kernel}": self.attacker(model, kernel, seed) for kernel in (1, 3)}
        rows = []
        for what, generator in {"Gaussian": None, **learned}.items():
            for eps in (round(self.size * factor, 2) for factor in (0.5, 1, 1.5, 2)):
                rows.append((f"error, {what}", eps, 1 - self.under(model, generator, eps, seed)))
        if seed == 0:
            save_pictures(self.args.out / "pictures.npz", learned, self.tests, self.size)
        return rows

    def tried(self, method: str, setting: dict[str, Any]) -> list[Found]:
        """Accuracies on pictures that nothing was trained with, of a seed that no result comes from."""
        model = self.base(TUNING)
        options = {**METHODS[method], **setting}
        fitted(model, self.loader, 5e-4, self.further, seed=TUNING, progress=self.args.progress, **options)
        found = evaluate_corruptions(
            model, self.held, self.held_labels, corruptions=FIXED, robustness=False, seed=TUNING
        )
        return [("noise", 0, found.noise), ("clean", 0, found.clean)]

    def judged(self, method: str, seed: int, options: dict[str, Any], done: set[str]) -> list[Found]:
        """A method's classifier, trained or read, under all corruptions but those that were done."""
        model = self.base(seed)
        weights = self.args.out / f"{method.replace(' ', '-').replace(',', '')}-{seed}.pt"
        if weights.exists():
            model.load_state_dict(torch.load(weights, map_location=self.args.device))
        else:
            fitted(model, self.loader, 5e-4, self.further, seed=seed, progress=self.args.progress, **options)
            torch.save(model.state_dict(), weights)
        model.eval()
        kinds = [kind for kind in possible() if kind not in done]
        rows: list[Found] = []
        generator = None
        if "learned" in kinds:
            generator = self.attacker(model, 1, 100 + seed)
            for eps in (self.size * factor for factor in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3)):
                rows.append(("Gaussian at eps", eps, self.under(model, None, eps, seed)))
                rows.append(("learned at eps", eps, self.under(model, generator, eps, seed)))
        found = evaluate_corruptions(
            model, self.tests, self.labels, corruptions=kinds, generator=generator, robustness=False, seed=seed
        )
        for kind, row in found.accuracy.items():
            rows.extend((kind, severity, value) for severity, value in zip(found.severities, row, strict=True))
        some = slice(200 if self.args.quick else 1000)
        flipped = noise_robustness(model, self.tests[some], self.labels[some], batch_size=1000, seed=seed)
        return [*rows, ("clean", 0, found.clean), ("median eps", 0, flipped.median)]

    def attacker(self, model: torch.nn.Module, kernel: int, seed: int) -> NoiseGenerator:
        """A generator trained against this classifier, on training pictures."""
        steps, loader = self.args.noise_steps or (100 if self.args.quick else 500), self.loader
        torch.manual_seed(seed)
        generator = NoiseGenerator(1, kernel)
        some = Batches(loader.x[: steps * loader.size], loader.y[: steps * loader.size], loader.size)
        options = {"epochs": -(-steps // len(loader)), "lr": 0.01, "check": 1, "progress": self.args.progress}
        train_noise(generator, model, some, self.size, seed=seed, **options)
        return generator

    def under(self, model: torch.nn.Module, generator: NoiseGenerator | None, eps: float, seed: int) -> float:
        """Accuracy under learned noise, or Gaussian without a generator, of exactly this norm."""
        right = []
        torch.manual_seed(seed)
        with torch.no_grad():
            for x, labels in zip(self.tests.split(1000), self.labels.split(1000), strict=True):
                delta = sample("gaussian", x) if generator is None else generator(x)
                right.append(model(ca.perturb(x, delta, eps)).argmax(1) == labels)
        return float(torch.cat(right).double().mean())


_study: Study | None = None  # a worker's own


def begin(args: argparse.Namespace) -> None:
    global _study
    if args.jobs > 1:
        torch.set_num_threads(1)
    _study = Study(args)


def unit(what: str, *arguments: Any) -> list[Found]:
    """One of the things that can be done side by side."""
    assert _study is not None
    rows: list[Found] = getattr(_study, what)(*arguments)
    return rows


def units(pool: Any, several: list[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], list[Found]]]:
    """All of them, each with what came out, as soon as it has."""
    if pool is None:
        for one in several:
            yield one, unit(*one)
        return
    waiting = {pool.submit(unit, *one): one for one in several}
    for future in concurrent.futures.as_completed(waiting):
        yield waiting[future], future.result()


def study(args: argparse.Namespace) -> None:
    """First the clean classifiers, then what --tune asks for, then every method with every seed."""
    start, path, tuning = time.perf_counter(), args.out / "results.csv", args.out / "tuning.csv"
    pool = None
    if args.jobs > 1:
        spawn = multiprocessing.get_context("spawn")  # after CUDA has begun, nothing can be forked
        pool = concurrent.futures.ProcessPoolExecutor(args.jobs, spawn, begin, (args,))
    else:
        begin(args)
    name = pictures_name(args)

    def told(*what: Any) -> None:
        print(f"{time.perf_counter() - start:5.0f} s: {name},", *what, flush=True)

    with pool or contextlib.nullcontext():
        seeds = [seed for seed in range(args.seeds) if not known(path, name, "clean, before", seed)]
        tries = [(method, setting) for method in args.methods for setting in CHOICES.get(method, [])]
        past = {(row["method"], row["setting"]) for row in table_rows(tuning)}
        tries = [(method, setting) for method, setting in tries if (method, json.dumps(setting)) not in past]
        firsts: list[tuple[Any, ...]] = [("before", seed) for seed in seeds]
        if args.tune and tries:
            firsts.insert(0, ("base_rows", TUNING))
        for (what, seed), rows in units(pool, firsts):
            add(path, name, "clean, before", seed, rows)
            told(what, seed)
        if args.tune:
            for (_, method, setting), rows in units(pool, [("tried", *one) for one in tries]):
                noise, clean = (value for _, _, value in rows)
                append(tuning, TRIED, [[method, json.dumps(setting), f"{noise:.6g}", f"{clean:.6g}"]])
                told(f"{method}, {setting}: {noise:.2%} under noise, {clean:.2%} clean")
        settings, last = chosen(args), []
        for seed in range(args.seeds):
            for method in args.methods:
                done = known(path, name, method, seed)
                if not set(possible()) <= done:
                    last.append(("judged", method, seed, settings[method], done))
        for (_, method, seed, _, _), rows in units(pool, last):
            add(path, name, method, seed, rows)
            clean = next(value for what, _, value in rows if what == "clean")
            told(f"{method}, seed {seed}: {clean:.2%} clean")


def chosen(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every method's options: its best of tuning.csv, or as they are above."""
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for row in table_rows(args.out / "tuning.csv"):
        if float(row["noise"]) > best.get(row["method"], (-1.0,))[0]:
            best[row["method"]] = float(row["noise"]), json.loads(row["setting"])
    return {method: {**options, **best.get(method, (0, {}))[1]} for method, options in METHODS.items()}


def possible() -> list[str]:
    """All corruptions, or all but blur; then a later run with SciPy makes up for it."""
    return [kind for kind in CORRUPTIONS if kind != "blur" or importlib.util.find_spec("scipy")]


def noise_size(x: torch.Tensor) -> float:
    """An L2 norm that is a seventh of a picture from black to white: 4 for 28 x 28 pixels, 1.1 for 8 x 8."""
    return round(x[0].numel() ** 0.5 / 7, 1)


def save_pictures(path: Path, learned: dict[str, NoiseGenerator], tests: torch.Tensor, size: float) -> None:
    """What figures show: some pictures with noise of each kind, and the noise itself."""
    torch.manual_seed(0)
    kept: dict[str, Any] = {"size": size, "as they are": tests[:4].cpu().numpy()}
    with torch.no_grad():
        for name, generator in {"Gaussian": None, **learned}.items():
            x = tests[:500]
            delta = torch.randn_like(x) if generator is None else generator(x)
            kept[name] = ca.perturb(x, delta, size)[:4].cpu().numpy()
            kept[f"noise, {name}"] = (delta / delta.square().mean().sqrt()).cpu().numpy()
    np.savez_compressed(path, **kept)


# --- results, tables and figures --------------------------------------------------------------------------------------


def add(path: Path, data: str, method: str, seed: int, rows: list[Found]) -> None:
    done = known(path, data, method, seed)
    rows = [row for row in rows if row[0] not in done]
    append(path, COLUMNS, [[data, method, seed, what, f"{level:g}", f"{value:.6g}"] for what, level, value in rows])


def append(path: Path, columns: list[str], rows: list[list[Any]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns] * new + rows)


def table_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def load(path: Path) -> list[Row]:
    rows: list[Row] = [dict(row) for row in table_rows(path)]
    for row in rows:
        row.update(seed=int(row["seed"]), level=float(row["level"]), value=float(row["value"]))
    return rows


def known(path: Path, data: str, method: str, seed: int) -> set[str]:
    """What there are rows of already."""
    return {row["what"] for row in load(path) if (row["data"], row["method"], row["seed"]) == (data, method, seed)}


def by_seed(rows: list[Row], method: str, kinds: tuple[str, ...], level: float | None = None) -> Any:
    """For every seed the mean over kinds, each of them a mean over levels; nothing where one of them is missing."""
    found = []
    for seed in sorted({row["seed"] for row in rows if row["method"] == method}):
        means = []
        for kind in kinds:
            values = [
                row["value"]
                for row in rows
                if (row["method"], row["seed"], row["what"]) == (method, seed, kind) and level in (None, row["level"])
            ]
            means.append(np.mean(values) if values else np.nan)
        found.append(np.mean(means))
    return np.array(found)


def stated(values: Any, scale: float = 100, digits: int = 2) -> str:
    """Mean and standard error over seeds."""
    values = scale * np.asarray(values)
    if not len(values) or np.isnan(values).any():
        return "-"
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{error}"


def tables(rows: list[Row]) -> str:
    """What came out, in Markdown."""
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    summary: dict[str, tuple[str, ...]] = {
        "clean": ("clean",),
        "mean of noise": FIXED,
        "and with learned": (*FIXED, "learned"),
        "mean of others": OTHERS,
    }
    lines = [f"| trained with | {' | '.join(summary)} | median eps |", "|---" * (len(summary) + 2) + "|"]
    for method in methods:
        cells = [stated(by_seed(rows, method, kinds)) for kinds in summary.values()]
        lines.append(f"| {method} | {' | '.join(cells)} | {stated(by_seed(rows, method, ('median eps',)), 1)} |")
    lines += ["", *differences(rows, methods), "", *by_kind(rows, methods), "", *errors_by_size(rows)]
    return "\n".join(lines) + "\n"


def by_kind(rows: list[Row], methods: list[str]) -> list[str]:
    """Every corruption by itself."""
    kinds = (*FIXED, "learned", *OTHERS)
    lines = [f"| trained with | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for method in methods:
        lines.append(f"| {method} | {' | '.join(stated(by_seed(rows, method, (kind,)), 100, 1) for kind in kinds)} |")
    return lines


def errors_by_size(rows: list[Row]) -> list[str]:
    """Learned noise against Gaussian noise of the same norm, on the clean classifiers."""
    kinds = ("Gaussian", "learned 1x1", "learned 3x3")
    lines = [f"| eps | {' | '.join(kinds)} | 1x1 less Gaussian | 3x3 less Gaussian |", "|---" * 6 + "|"]
    for eps in sorted({row["level"] for row in rows if row["what"] == "error, Gaussian"}):
        errors = [by_seed(rows, "clean, before", (f"error, {kind}",), eps) for kind in kinds]
        cells = [stated(values) for values in (*errors, errors[1] - errors[0], errors[2] - errors[0])]
        lines.append(f"| {eps:g} | {' | '.join(cells)} |")
    return lines


def differences(rows: list[Row], methods: list[str]) -> list[str]:
    """Between methods, seed by seed: of ANT and the best Gaussian, and of that and clean."""
    lines = ["| difference, in points | mean of noise | and with learned | clean |", "|---|---|---|---|"]
    gaussians = [method for method in methods if method.startswith("Gaussian")]
    if not gaussians or "clean" not in methods:
        return lines[:0]
    best = max(gaussians, key=lambda method: by_seed(rows, method, FIXED).mean())
    pairs = [(method, best) for method in methods if method.startswith("ANT")]
    for one, other in [*pairs, (best, "clean"), *((ant, "clean") for ant, _ in pairs)]:
        cells = []
        for kinds in (FIXED, (*FIXED, "learned"), ("clean",)):
            first, second = by_seed(rows, one, kinds), by_seed(rows, other, kinds)
            both = min(len(first), len(second))
            cells.append(stated(first[:both] - second[:both]))
        lines.append(f"| {one} less {other} | {' | '.join(cells)} |")
    return lines


def draw(rows: list[Row], folder: Path) -> None:
    draw_accuracy(rows, folder / "accuracy.png")
    if (folder / "pictures.npz").exists():
        with np.load(folder / "pictures.npz") as kept:
            draw_noise(kept, folder / "noise.png")
            draw_examples(kept, folder / "pictures.png")


def draw_accuracy(rows: list[Row], path: Path) -> None:
    """Accuracy against eps, with standard errors over seeds."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, what, title in zip(
        axes,
        ("Gaussian at eps", "learned at eps"),
        ("under Gaussian noise", "under noise learned against each"),
        strict=True,
    ):
        sizes = sorted({row["level"] for row in rows if row["what"] == what})
        for method in METHODS:
            found = [by_seed(rows, method, (what,), eps) for eps in sizes]
            if not found or not len(found[0]):
                continue
            means = np.array([values.mean() for values in found])
            errors = np.array([values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0 for values in found])
            (line,) = axis.plot(sizes, means, marker="o", markersize=3, label=method)
            axis.fill_between(sizes, means - errors, means + errors, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(title=title, xlabel="norm of the noise (L2, exact after clipping)", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(frameon=False)
    figure.savefig(path)


def draw_noise(kept: Any, path: Path) -> None:
    """The density of each kind of noise before it is scaled and clipped, and a patch of it."""
    from matplotlib.figure import Figure

    names = ("Gaussian", "learned 1x1", "learned 3x3")
    figure: Any = Figure(figsize=(13, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(1.5, 1, 1, 1))
    for name in names:
        density, edges = np.histogram(kept[f"noise, {name}"], bins=120, range=(-4, 4), density=True)
        axes[0].plot((edges[1:] + edges[:-1]) / 2, density, label=name)
    axes[0].set(title="density, at a mean square of 1", xlabel="noise", yscale="log")
    axes[0].legend(frameon=False)
    for axis, name in zip(axes[1:], names, strict=True):
        axis.imshow(kept[f"noise, {name}"][0, 0], cmap="coolwarm", vmin=-3, vmax=3)
        axis.set_title(f"a patch: {name}")
        axis.set_axis_off()
    figure.savefig(path)


def draw_examples(kept: Any, path: Path) -> None:
    """Pictures as they are, and with noise of one norm."""
    from matplotlib.figure import Figure

    names = ("as they are", "Gaussian", "learned 1x1", "learned 3x3")
    figure: Any = Figure(figsize=(9, 9.4), dpi=90, layout="constrained")
    axes = figure.subplots(4, len(names))
    for column, name in enumerate(names):
        for row in range(4):
            axes[row, column].imshow(kept[name][row, 0], cmap="gray", vmin=0, vmax=1)
            axes[row, column].set_axis_off()
        axes[0, column].set_title(name if not column else f"{name}, eps {float(kept['size']):g}")
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
