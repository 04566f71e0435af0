"""The commands and their options."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import clipaware as ca
from clipaware import noise
from clipaware._cli import show
from clipaware._cli.work import (
    MEASURES,
    UNREACHABLE,
    CommandError,
    Manifest,
    Row,
    Settings,
    Skipped,
    Task,
    digest,
    do,
    find_inputs,
    plan,
    real,
    run,
)
from clipaware._media import KINDS, MOST, FileError

EXIT_CODES = "Exit codes: 0 all done, 1 some files failed (the others are done), 2 nothing was done, 130 interrupted."

app = typer.Typer(
    help="Perturbations of exactly the size you asked for, after clipping, as saved in a file.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def examples(*lines: str) -> str:
    """For the end of a help text, as they stand."""
    return "\b\nExamples:\n" + "\n".join(f"  clipaware {line}" for line in lines) + f"\n\n{EXIT_CODES}"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"clipaware {ca.__version__}")
        raise typer.Exit


@app.callback()
def clipaware(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# --- reading options --------------------------------------------------------------------------------------------------


def numbers(texts: list[str] | None, name: str, least: float | None = 0.0, infinite: bool = False) -> list[float]:
    """Those of an option that may be repeated, and may have several separated by commas."""
    found = []
    for text in ",".join(texts or []).split(",") if texts else []:
        try:
            value = float(text)
        except ValueError:
            raise CommandError(f"{name} is {text!r}, expected numbers such as 1 or 0.5,1,2") from None
        if math.isnan(value) or (math.isinf(value) and not infinite) or (least is not None and value < least):
            what = "a number" if least is None else f"a number of {least:g} or more"
            raise CommandError(f"{name} is {text}, expected {what}")
        found.append(value)
    return list(dict.fromkeys(found))


def one_of(value: str, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise CommandError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    return value


def bounds_of(values: tuple[float, float] | None) -> tuple[float, float] | None:
    if values and not values[0] < values[1]:
        raise CommandError(f"--bounds are {values[0]:g} {values[1]:g}, expected the lower one first")
    return values


def at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise CommandError(f"{name} is {value}, expected a whole number of {least} or more")
    return value


def settings_of(norm: str, kind: str, unreachable: str, **others: Any) -> Settings:
    orders = numbers([norm], "--norm", 1.0, infinite=True)
    if len(orders) != 1:
        raise CommandError(f"--norm is {norm}, expected one number")
    one_of(kind, noise.KINDS, "--noise")
    one_of(unreachable, UNREACHABLE, "--unreachable")
    return Settings(noise=kind, norm=orders[0], unreachable=unreachable, **others)


def complete(*words: str) -> Callable[[str], list[str]]:
    """For the shell's completion of an option's value."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


Sizes = Annotated[
    list[str] | None, typer.Option(metavar="N,...", help="The norm itself, in full scales: black to white is 1.")
]
Jobs = Annotated[int | None, typer.Option(metavar="N", help="How many files at a time; as many as cores unless told.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the noise: each output has its own that follows from this.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, a line per output.")]
Most = Annotated[int, typer.Option(metavar="N", help="Files that say to have more elements are refused.")]
Norm = Annotated[str, typer.Option(metavar="P", help="Order of the norm, from 1 to inf.")]
Kind = Annotated[
    str,
    typer.Option(
        "--noise", metavar="KIND", help=f"One of {', '.join(noise.KINDS)}.", autocompletion=complete(*noise.KINDS)
    ),
]
Bounds = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="LOW HIGH", help="Between which values stay; the format's own unless told: 0 1, or -1 1."),
]
Compression = Annotated[int, typer.Option(metavar="0-9", help="Of PNG and TIFF: 0 is fast, 9 is small.")]


# --- perturb ----------------------------------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "perturb photo.png --eps 3 --out noisy",
        "perturb photos --out noisy --rms 0.02,0.05 --noise pink --repeats 10",
        "perturb speech.wav --out noisy --snr 0,6,12 --delta babble.wav",
        "perturb photo.jpg --out noisy --contrast 0.1 --format png --grayscale-noise",
        "perturb photos --out noisy --eps 8 --resume",
    )
)
def perturb(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Files, or folders with all that is in them: PNG, JPEG, TIFF, WebP, BMP, WAV, FLAC, OGG, .npy, .npz.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the outputs and their manifest go.", show_default=False)
    ],
    eps: Sizes = None,
    rms: Annotated[list[str] | None, typer.Option(metavar="N,...", help="The root mean square of the noise.")] = None,
    snr: Annotated[list[str] | None, typer.Option(metavar="DB,...", help="The signal-to-noise ratio left.")] = None,
    psnr: Annotated[
        list[str] | None, typer.Option(metavar="DB,...", help="The peak signal-to-noise ratio left.")
    ] = None,
    contrast: Annotated[
        list[str] | None, typer.Option(metavar="N,...", help="The RMS contrast of the noise: RMS over mean luminance.")
    ] = None,
    kind: Kind = "gaussian",
    delta: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A direction instead of noise: .npy, float TIFF or sound.")
    ] = None,
    norm: Norm = "2",
    bounds: Bounds = None,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(metavar="N", help="How many outputs of each size, of different noise.")] = 1,
    grayscale_noise: Annotated[bool, typer.Option("--grayscale-noise", help="One noise for all channels.")] = False,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the outputs, if not the inputs': png, tiff, webp, bmp, jpeg; wav, flac, ogg.",
            autocompletion=complete(*KINDS["picture"], *KINDS["sound"]),
        ),
    ] = None,
    unreachable: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="Where the size is more than there is room for: maximize, skip or fail.",
            autocompletion=complete(*UNREACHABLE),
        ),
    ] = "fail",
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Write JPEG and OGG, which keep the norm only about.")
    ] = False,
    compression: Compression = 6,
    manifest: Annotated[
        str, typer.Option(metavar="csv|jsonl", help="The kind of manifest.", autocompletion=complete("csv", "jsonl"))
    ] = "csv",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace outputs that are there already.")] = False,
    jobs: Jobs = None,
    max_elements: Most = MOST,
    json_lines: Json = False,
) -> None:
    """Perturb files by exactly what was asked for, as saved.

    Whatever has 8, 16 or 24 bits is perturbed on its own grid, so that rounding changes nothing. Every output is read
    back, and the norm in the table is the one that the file holds. Sizes are of the L2 norm unless --norm says
    otherwise, and may be given as several values at once. A manifest beside the outputs says how each was made.
    """
    given = {"eps": eps, "rms": rms, "snr": snr, "psnr": psnr, "contrast": contrast}
    sizes = [
        (measure, value)
        for measure in MEASURES
        for value in numbers(given[measure], f"--{measure}", None if measure in ("snr", "psnr") else 0.0)
    ]
    settings = settings_of(
        norm, kind, unreachable, delta=delta, bounds=bounds_of(bounds), grayscale=grayscale_noise,
        allow_lossy=allow_lossy, compression=compression, most=max_elements,
    )  # fmt: skip
    if not sizes:
        raise CommandError("no size was asked for, expected --eps, --rms, --snr, --psnr or --contrast")
    others = sorted({measure for measure, _ in sizes} - {"eps"})
    if others and settings.norm != 2:
        raise CommandError(f"--{others[0]} is a size in the L2 norm, and --norm is {norm}; give an --eps")
    if format is not None:
        one_of(format, (*KINDS["picture"], *KINDS["sound"]), "--format")
    if not 0 <= compression <= 9:
        raise CommandError(f"--compression is {compression}, expected a whole number from 0 to 9")
    at_least(repeats, 1, "--repeats")
    at_least(seed, 0, "--seed")
    at_least(1 if jobs is None else jobs, 1, "--jobs")
    if resume and overwrite:
        raise CommandError("--resume keeps what is there and --overwrite does not; choose one")
    if out.exists() and not out.is_dir():
        raise CommandError(f"--out is {out}, which is a file, expected a folder")
    found, errors = find_inputs(inputs, out)
    tasks = plan(found, out, sizes, repeats, seed, format, delta)
    record = Manifest(out / f"manifest.{one_of(manifest, ('csv', 'jsonl'), '--manifest')}")
    _perturb(tasks, settings, record, errors, jobs, json_lines, resume, overwrite)


def _before(
    record: Manifest, tasks: list[Task], settings: Settings, resume: bool, overwrite: bool
) -> tuple[dict[Path, list[Row]], set[Path]]:
    """What the manifest tells of outputs that are there, and which of them this run need not make again. Without leave,
    nothing is to be there."""
    if record.path.exists() and not (resume or overwrite):
        raise CommandError(f"{record.path} exists; choose --resume, --overwrite or another --out")
    there = [task.output for task in tasks if task.output.exists()]
    if there and not (resume or overwrite):
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise CommandError(f"{there[0]}{more} exist(s) already; choose --resume, --overwrite or another --out")
    rows: dict[Path, list[Row]] = {}
    for row in record.load() if record.path.exists() else []:
        if os.path.exists(row["output"]):  # which is False of names that cannot be, too
            rows.setdefault(row["output"], []).append(row)
    there_already = ((real(task.output), task) for task in tasks if resume)
    return rows, {path for path, task in there_already if _kept(task, rows.get(path, []), settings, record)}


def _kept(task: Task, found: list[Row], settings: Settings, record: Manifest) -> bool:
    """Whether an output is what this run would make, too; a CommandError, if the run was another."""
    now = _identity(task, settings)
    for row in found:
        for name in now:
            if row[name] != now[name]:
                raise CommandError(
                    f"{record.path} was made with {name} {row[name]} for {task.output.name}, now it is {now[name]}; "
                    "choose the same options, --overwrite or another --out"
                )
        if task.input.is_file() and digest(task.input) != row["input_sha256"]:
            return False
        if digest(task.output) != row["output_sha256"]:
            return False
    return bool(found)


def _identity(task: Task, settings: Settings) -> Row:
    """What makes an output the one that it is, as the manifest has it."""
    return {
        "noise": str(real(settings.delta)) if settings.delta else settings.noise,
        "delta_sha256": digest(settings.delta) if settings.delta and settings.delta.is_file() else "",
        "seed": task.seed,
        "measure": task.measure,
        "value": task.value,
        "norm": settings.norm,
        "bounds": f"{settings.bounds[0]!r} {settings.bounds[1]!r}" if settings.bounds else "",
        "grayscale": settings.grayscale,
        "unreachable": settings.unreachable,
        "compression": settings.compression,
    }


def _perturb(
    tasks: list[Task],
    settings: Settings,
    record: Manifest,
    errors: list[FileError],
    jobs: int | None,
    json_lines: bool,
    resume: bool,
    overwrite: bool,
) -> None:
    root = record.base
    rows, known = _before(record, tasks, settings, resume, overwrite)
    # What the manifest does not know of is not to be written over, unless with leave.
    todo = [
        dataclasses.replace(task, replaces=overwrite or real(task.output) in rows)
        for task in tasks
        if real(task.output) not in known
    ]
    if record.path.exists():
        record.replace(row for found in rows.values() for row in found)
    for error in errors:
        show.error(f"error: {error}")
    failed, whole = len(errors), set(known)
    plain = not show.on_terminal() and not json_lines
    if plain and todo:
        print(show.line(show.HEADER))
    with _threads(jobs, len(todo)) as workers:
        for task, result in show.progress(run(todo, lambda task: do(task, settings), workers), len(todo), "perturbing"):
            if isinstance(result, Exception):
                failed += not isinstance(result, Skipped)
                show.error(f"{'skipped' if isinstance(result, Skipped) else 'error'}: {result}")
                continue
            record.add(result)
            rows[real(task.output)] = result
            whole.add(real(task.output))
            for row in result:
                if not row["reachable"]:
                    show.error(
                        f"note: {task.input}: asked for {row['asked']:.7g}, all there is room for: {row['reach']:.7g}"
                    )
                if json_lines:
                    print(show.as_json(row), flush=True)
                elif plain:
                    print(show.line(show.cells(row, root)), flush=True)
    done = [row for task in tasks if real(task.output) in whole for row in rows.pop(real(task.output))]
    others = [row for found in rows.values() for row in found]
    if done or others:
        record.replace([*others, *done])
    elif record.path.exists():
        record.path.unlink()  # there is nothing left that it tells of
    if not json_lines:
        if show.on_terminal() and done:
            shown = [show.cells(row, root) for row in done]
            show.table(show.HEADER, shown, f"norm asked and delivered, p = {settings.norm:g}", f" in {record.path}")
        kept = f", {len(known)} kept from before" if known else ""
        print(
            f"{len({row['output'] for row in done})} of {len(tasks)} outputs in {root}{kept}; manifest: {record.path}"
            if done
            else "nothing written"
        )
    if failed:
        raise typer.Exit(1)


class _threads:
    """How many files at a time. Each is worked on by one thread, since sums of several threads' are rounded otherwise,
    and bytes are not to depend on how many there are."""

    def __init__(self, jobs: int | None, tasks: int) -> None:
        if jobs is not None:
            at_least(jobs, 1, "--jobs")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.jobs = max(1, min(jobs or cores, tasks))

    def __enter__(self) -> int:
        ca.set_threads(1)
        return self.jobs

    def __exit__(self, *_: object) -> None:
        ca.set_threads(None)


# --- replay -----------------------------------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "replay noisy/manifest.csv", "replay noisy/manifest.csv --out again", "replay noisy/manifest.csv --json"
    )
)
def replay(
    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="That of a run of clipaware perturb.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where outputs go; without, only those that are missing are written."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files in --out that are there already.")
    ] = False,
    jobs: Jobs = None,
    max_elements: Most = MOST,
    json_lines: Json = False,
) -> None:
    """Make the outputs of a manifest again, and compare them with it byte for byte.

    Outputs that are still there are never touched: they are made anew in a hidden folder, compared, and removed.
    """
    if not manifest.is_file():
        raise CommandError(f"{manifest}: there is no such file")
    if manifest.suffix not in (".csv", ".jsonl"):
        raise CommandError(f"{manifest}: expected a manifest that ends in .csv or .jsonl")
    from clipaware._cli.replay import replayed

    with _threads(jobs, 10**6) as workers:
        failed = 0
        for name, error in replayed(manifest, out, overwrite, workers, max_elements):
            failed += error is not None
            if json_lines:
                print(json.dumps({"output": name, "identical": error is None, "error": error}), flush=True)
            elif error is None:
                print(show.readable(f"identical  {name}"), flush=True)
            if error is not None:
                show.error(f"error: {error}")
    if failed:
        raise typer.Exit(1)


# --- measure ----------------------------------------------------------------------------------------------------------


@app.command(epilog=examples("measure photo.png noisy/photo_eps3.png", "measure speech.wav noisy.wav --json"))
def measure(
    a: Annotated[Path, typer.Argument(metavar="A", help="The file before.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The file after.", show_default=False)],
    norms: Annotated[list[str] | None, typer.Option(metavar="P,...", help="More norms than 1, 2 and inf.")] = None,
    max_elements: Most = MOST,
    json_lines: Json = False,
) -> None:
    """Say how far apart two files are: norms, RMS, SNR, PSNR and the share of clipped elements.

    Values count from 0 to 1, of sounds from -1 to 1. Alpha channels do not count.
    """
    from clipaware._cli.measure import measured

    more = numbers(norms, "--norms", 1.0, infinite=True)
    rows = measured(a, b, [1.0, 2.0, math.inf, *(p for p in more if p not in (1, 2, math.inf))], max_elements)
    if json_lines:
        for row in rows:
            print(show.as_json(row))
        return
    for row in rows:
        name = row.pop("part")
        pairs = [(key, value if isinstance(value, str) else f"{value:.9g}") for key, value in row.items()]
        if name:
            print(f"{name}:")
        show.table(("quantity", "value"), pairs)


# --- sweep ------------------------------------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "sweep photo.png --out sweep --rms 0.02,0.05,0.1,0.2 --norms 1,2,inf",
        "sweep photo.png --out sweep --eps 10,20,40,80 --noise pink",
        "sweep speech.wav --out sweep --rms 0.05,0.1,0.2",
    )
)
def sweep(
    input: Annotated[Path, typer.Argument(metavar="INPUT", help="A picture or a sound.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the figures and the table go.", show_default=False)],
    eps: Sizes = None,
    rms: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,...", help="Sizes that compare across norms: of elements on average, n^(1/p) times it."
        ),
    ] = None,
    norms: Annotated[list[str] | None, typer.Option(metavar="P,...", help="Orders of the norm; 2 unless told.")] = None,
    kind: Kind = "gaussian",
    bounds: Bounds = None,
    seed: Seed = 0,
    grayscale_noise: Annotated[bool, typer.Option("--grayscale-noise", help="One noise for all channels.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")] = False,
    max_elements: Most = MOST,
    json_lines: Json = False,
) -> None:
    """Perturb one file by several sizes in several norms: a contact sheet, asked against delivered, and a CSV.

    Writes sweep.png, sweep.pdf, delivered.png, delivered.pdf and sweep.csv. The same noise is used throughout.
    """
    from clipaware._cli.sweep import swept

    given = {"eps": numbers(eps, "--eps"), "rms": numbers(rms, "--rms")}
    sizes = [(measure, value) for measure, values in given.items() for value in values]
    if not sizes:
        raise CommandError("no size was asked for, expected --eps or --rms")
    orders = numbers(norms, "--norms", 1.0, infinite=True) or [2.0]
    settings = settings_of(
        "2", kind, "maximize", bounds=bounds_of(bounds), grayscale=grayscale_noise, most=max_elements
    )
    rows, paths = swept(input, out, sizes, orders, settings, at_least(seed, 0, "--seed"), overwrite)
    if json_lines:
        for row in rows:
            print(show.as_json(row))
        return
    header = ("p", "asked", "naive", "delivered", "clipped", "reach")
    show.table(
        header,
        [
            (f"{r['norm']:g}", *(f"{r[name]:.7g}" for name in header[1:4]), f"{r['clipped']:.1%}", f"{r['reach']:.7g}")
            for r in rows
        ],
        f"{input.name}, {kind} noise",
    )
    print("Written: " + ", ".join(map(str, paths)))


# --- explore ----------------------------------------------------------------------------------------------------------


@app.command(
    epilog=examples("explore", "explore --port 8000 --no-browser", "explore --host 0.0.0.0 --max-elements 10000000")
)
def explore(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="What to listen on; this machine alone unless told.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(metavar="N", help="The port; a free one from 7860 on unless told.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    max_elements: Annotated[int | None, typer.Option(metavar="N", help="Of an upload; 33,554,432 unless told.")] = None,
    max_megabytes: Annotated[int, typer.Option(metavar="N", help="Of an upload.")] = 64,
) -> None:
    """Open a page to see it: drop a picture or a recording, move the size, and compare naive and exact.

    It is served from this machine and to this machine. Nothing is fetched from the internet, and uploads are read into
    memory and not kept.
    """
    from clipaware import explorer

    at_least(max_megabytes, 1, "--max-megabytes")
    most = explorer.MOST if max_elements is None else at_least(max_elements, 1, "--max-elements")
    if port is not None and not 0 < port < 2**16:
        raise CommandError(f"--port is {port}, expected a number from 1 to 65535")
    if not host:
        raise CommandError("--host is empty, expected an address or a name")
    if not explorer.is_loopback(host):
        show.error(f"warning: --host {host} lets whoever can reach this machine use the page; it asks for no password")
    try:
        explorer.launch(host, port, browser=browser, most=most, megabytes=max_megabytes, started=_explorer_started)
    except ImportError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        where = f"port {port}" if port else "a port from 7860 on"
        raise CommandError(f"cannot listen on {host}, {where}: taken, or not this machine's; choose others") from error


def _explorer_started(address: str) -> None:
    print(f"The explorer is at {address} until you press Ctrl-C.", flush=True)


# --- env and demo -----------------------------------------------------------------------------------------------------


@app.command(epilog=examples("env", "env --json"))
def env(json_lines: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say which versions are installed and what does the computing."""
    from clipaware._cli.env import report

    report(json_lines)


@app.command(epilog=examples("demo", "demo --out figures --seed 1"))
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where demo.png goes.")] = Path("clipaware-demo"),
    seed: Annotated[int, typer.Option(metavar="N", help="Of the noise.")] = 0,
) -> None:
    """Perturb the bundled photograph, naively and exactly: a table and a figure."""
    from clipaware._cli.demo import run_demo

    run_demo(out, at_least(seed, 0, "--seed"))
