"""What a visitor takes home: the result as a file, and the lines of Python that make it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clipaware import audio, images
from clipaware._explorer.solve import OWN_BOUNDS, Outcome, limits
from clipaware._media import ENDINGS, Content, write, write_bytes

Array = Any


def name_of(outcome: Outcome) -> str:
    """Of the file with the result."""
    format = _format(outcome)
    return f"{Path(outcome.subject.name).stem}_exact{ENDINGS[format]}"


def _format(outcome: Outcome) -> str:
    if outcome.subject.kind == "sound":
        return "wav"
    return "png" if outcome.choice.whole else "tiff"


def save(outcome: Outcome, folder: Path) -> Path:
    """Write the result: PNG of 8 bits or TIFF of floats, WAV of 16 bits or floats. What stands beside the values of the
    original (alpha, profile, orientation, resolution; rate and titles) stays."""
    made = dataclasses.replace(outcome.part, values=outcome.made)
    came = outcome.subject.content.extra
    extra: Any
    if outcome.subject.kind == "sound":
        extra = audio.Extra(came.rate, "PCM_16" if outcome.choice.whole else "FLOAT", came.strings)
    else:
        alpha = None if came.alpha is None else _alpha(came.alpha, outcome.made.dtype)
        extra = images.Extra(alpha, came.profile, came.exif, came.orientation, came.dpi, came.chunks)
    path = folder / name_of(outcome)
    write(path, Content(outcome.subject.kind, _format(outcome), {"": made}, False, extra))
    return path


def save_code(outcome: Outcome, folder: Path) -> Path:
    path = folder / f"{Path(name_of(outcome)).stem}.py"
    write_bytes(path, code(outcome).encode())
    return path


def _alpha(alpha: Array, dtype: Any) -> Array:
    """Of a picture, in the dtype of its new values; one channel, if there are more."""
    most = np.iinfo(alpha.dtype).max if alpha.dtype.kind == "u" else 1
    shares = alpha[..., :1] / np.float32(most)
    return np.rint(shares * 255).astype(np.uint8) if dtype == np.uint8 else shares.astype(dtype)


# --- lines of Python --------------------------------------------------------------------------------------------------


def code(outcome: Outcome) -> str:
    """About ten lines that read the original, perturb it as the page did, and write the same values."""
    choice, picture = outcome.choice, outcome.subject.kind == "picture"
    imports, reading, saving = (_picture if picture else _sound)(outcome)
    low, high = (float(end) for end in limits(outcome.part, choice.bounds))
    steps = 255 if picture else 2**15
    moved = outcome.outside or choice.bounds != OWN_BOUNDS[outcome.subject.kind]
    if choice.whole:
        ends = f"({low:g} / {steps}, {high:g} / {steps})"
        function, levels = "perturb_quantized", f"levels={high - low + 1:g}, "
    else:
        ends, function, levels = f"({low!r}, {high!r})", "perturb", ""
    lines = [
        "import numpy as np",
        *imports,
        "import clipaware as ca",
        f"from clipaware import {'noise' if choice.measure == 'eps' else 'noise, targets'}",
        "",
        *reading,
        f"bounds = {ends}",
        *(["x = x.clip(*np.float32(bounds))"] if moved else []),
        f'delta = noise.sample("{choice.noise}", x, seed={choice.seed}, axes={outcome.part.spatial})',
        f"eps = {_size(outcome)}",
        f"v = ca.{function}(x, delta, eps, p={_order(choice.p)}, {levels}bounds=bounds, axis=None)",
        *saving,
        f"print(np.linalg.norm(np.float64(v - x).ravel(), {_order(choice.p)}))",
    ]
    return "\n".join(lines) + "\n"


def _order(p: float) -> str:
    return "np.inf" if p == float("inf") else f"{p:g}"


def _size(outcome: Outcome) -> str:
    choice = outcome.choice
    if choice.measure == "eps":
        return repr(choice.value)
    bounds = f", bounds={choice.bounds}" if choice.measure == "psnr" else ""
    return f"targets.eps_from_{choice.measure}(x, {choice.value!r}{bounds}, axis=None).item()"


def _picture(outcome: Outcome) -> tuple[list[str], list[str], list[str]]:
    part, name, format = outcome.subject.content.parts[""], outcome.subject.name, outcome.subject.content.format
    imports = ["from PIL import Image"]
    if part.levels == 256 and format != "tiff":
        mode = "RGB" if part.channels else "L"
        reading = [f"x = np.asarray(Image.open({name!r}).convert({mode!r})) / np.float32(255)"]
    else:
        imports = ["from pathlib import Path", *imports, "from clipaware import images"]
        reading = [f'stored = images.read(Path({name!r}), {format!r}, 2**28).parts[""].values']
        reading.append(
            f"x = stored / np.float32({part.levels - 1})" if part.levels else "x = stored.astype(np.float32)"
        )
        if outcome.choice.whole and part.levels != 256:
            reading.append("x = np.rint(x * np.float32(255)).clip(0, 255) / np.float32(255)")
    if outcome.choice.whole:
        saving = [f"Image.fromarray(np.rint(v * 255).astype(np.uint8)).save({name_of(outcome)!r})"]
    else:
        imports = [line for line in imports if reading[0].count("Image.open") or "PIL" not in line]
        imports.append("import tifffile")
        colours = "rgb" if part.channels else "minisblack"
        saving = [f"tifffile.imwrite({name_of(outcome)!r}, v, photometric={colours!r})"]
    return imports, reading, saving


def _sound(outcome: Outcome) -> tuple[list[str], list[str], list[str]]:
    part, name, whole = outcome.subject.content.parts[""], outcome.subject.name, outcome.choice.whole
    kind = "int16" if part.levels and (whole or part.levels == 2**16) else "float32"
    reading = [f"samples, rate = soundfile.read({name!r}, dtype={kind!r}, always_2d=True)"]
    if kind == "int16":
        reading.append("x = samples / np.float32(2**15)")
    elif whole:
        reading.append("x = np.rint(samples * 2**15).clip(-(2**15), 2**15 - 1) / np.float32(2**15)")
    else:
        reading.append("x = samples")
    result = "np.rint(v * 2**15).astype(np.int16)" if whole else "v"
    subtype = "PCM_16" if whole else "FLOAT"
    saving = [f"soundfile.write({name_of(outcome)!r}, {result}, rate, subtype={subtype!r})"]
    return ["import soundfile"], reading, saving
