"""What the page shows: HTML with pictures and sounds inside, so that nothing of a visitor's lies in a file, and SVG."""

from __future__ import annotations

import base64
import html
import io
import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from clipaware import images
from clipaware._explorer.curve import PASSES
from clipaware._explorer.solve import Outcome

Array = Any

SIDE = 560  # pixels of a preview at most, either way
SECONDS = 15  # of a recording that can be listened to on the page
LONG = 8  # as long as this many times its width: it is stretched
COLUMNS = 420  # of a waveform
NAMES = {"eps": "norm", "rms": "RMS", "snr": "SNR", "psnr": "PSNR"}


def trouble(text: str) -> str:
    """A message instead of an answer."""
    return f'<div class="ca-trouble" role="alert">{html.escape(text)}</div>'


def answer(outcome: Outcome) -> str:
    """All of it: numbers, pictures or sounds, plots."""
    shown = _pictures(outcome) if outcome.subject.kind == "picture" else _sounds(outcome)
    return f'<div class="ca-answer">{_numbers(outcome)}{shown}{_plots(outcome)}</div>'


# --- numbers ----------------------------------------------------------------------------------------------------------


def _numbers(outcome: Outcome) -> str:
    p = "∞" if outcome.choice.p == math.inf else f"{outcome.choice.p:g}"
    below = [_off(delivered, outcome.asked) for delivered in (outcome.naive, outcome.exact)]
    if outcome.subject.kind == "sound":
        for k, (name, ratio) in enumerate(zip(("naive", "exact"), outcome.decibels(), strict=True)):
            below[k] = f'SNR <b data-name="{name}-snr" data-value="{ratio!r}">{ratio:.4f}</b> dB, {below[k]}'
    cards = (
        _card("asked", f"asked, L{p}", outcome.asked, _said(outcome)),
        _card("naive", "naive delivers", outcome.naive, below[0]),
        _card("exact", "exact delivers", outcome.exact, below[1]),
        _card("reach", "reach", outcome.reach, "the most this noise can have"),
        _card("clipped", "clipped", outcome.clipped, "of the values end at a bound", f"{outcome.clipped:.1%}"),
    )
    return f'<div class="ca-cards">{"".join(cards)}</div>{_notes(outcome)}'


def _card(name: str, title: str, value: float, below: str, text: str | None = None) -> str:
    return (
        f'<div class="ca-card ca-{name}"><div class="ca-title">{title}</div>'
        f'<div class="ca-value" data-name="{name}" data-value="{value!r}">{text or f"{value:.6g}"}</div>'
        f'<div class="ca-below">{below}</div></div>'
    )


def _said(outcome: Outcome) -> str:
    """The size as it was asked for, if not as a norm."""
    choice = outcome.choice
    if choice.measure == "eps":
        return f"{outcome.part.values.size:,} values"
    return f"{NAMES[choice.measure]} {choice.value:g}" + (" dB" if choice.measure in ("snr", "psnr") else "")


def _off(delivered: float, asked: float) -> str:
    """How far it is from what was asked for."""
    if not asked:
        return "nothing asked"
    off = delivered / asked - 1
    return (
        f"{off:+.1%}" if abs(off) >= 5e-4 else f"off by {abs(off):.0e}".replace("e-0", "e-") if off else "to the digit"
    )


def _notes(outcome: Outcome) -> str:
    notes = []
    if not outcome.reachable:
        notes.append(f"{outcome.asked:.6g} is more than this noise can have; exact goes as far as there is room")
    elif outcome.part.levels and outcome.asked and abs(outcome.exact / outcome.asked - 1) >= 5e-4:
        notes.append("exact is as near as whole steps can come; choose float for a nearer one")
    if outcome.outside:
        of = f"{outcome.outside:,} of {outcome.part.values.size:,}"
        notes.append(f"{of} values lay outside the bounds and were moved to them first")
    return "".join(f'<div class="ca-note">{html.escape(note)}</div>' for note in notes)


# --- pictures ---------------------------------------------------------------------------------------------------------


def _pictures(outcome: Outcome) -> str:
    """The picture before and after, the change of every pixel on one scale of colours, and what is clipped."""
    some = _some(outcome.part.values)
    before, naive, exact = outcome.part.values[some], outcome.naively(some), outcome.made[some]
    moves = [_change(outcome.real(after), outcome.real(before)) for after in (naive, exact)]
    brightest = max(float(np.quantile(move, 0.995)) for move in moves) or 1.0
    bar = f'<span class="ca-bar"></span> {brightest:.2g}+'
    orientation = getattr(outcome.subject.content.extra, "orientation", 1)
    strides, long = _strides(outcome.part.values), " ca-long" if _is_long(outcome.part.values) else ""
    every = f", every {_ordinal(max(strides))} pixel" if max(strides) > 1 else ""
    every += ", stretched" if long else ""
    figures = [
        ("original", f"original{every}", _grey_or_rgb(outcome, before)),
        ("naive", f"naive: {outcome.naive:.5g}", _grey_or_rgb(outcome, naive)),
        ("exact", f"exact: {outcome.exact:.5g}", _grey_or_rgb(outcome, exact)),
        (
            "clipped",
            '<span class="ca-dot ca-high"></span>at the upper bound <span class="ca-dot ca-low"></span>lower',
            _clipped(outcome, before, exact),
        ),
        ("naive-change", f"naive: change 0 {bar}", _coloured(moves[0] / brightest)),
        ("exact-change", f"exact: change 0 {bar}", _coloured(moves[1] / brightest)),
    ]
    return '<div class="ca-gallery">' + "".join(
        f'<figure class="ca-figure ca-of-{name}{long}"><img alt="{name}" src="{_jpeg(pixels, orientation)}">'
        f"<figcaption>{caption}</figcaption></figure>"
        for name, caption, pixels in figures
    ) + "</div>"  # fmt: skip


def _is_long(values: Array) -> bool:
    """Whether a picture is so long that at its own proportions there would be nothing to see."""
    down, across = values.shape[:2]
    return bool(max(down, across) > LONG * min(down, across))


def _strides(values: Array) -> tuple[int, int]:
    """Down and across, the same unless a picture is long."""
    down, across = (-(-int(side) // SIDE) for side in values.shape[:2])
    return (down, across) if _is_long(values) else (max(down, across),) * 2


def _some(values: Array) -> tuple[slice, slice]:
    """Pixels for a preview, as they are: an average of neighbours would have less noise."""
    down, across = _strides(values)
    return slice(None, None, down), slice(None, None, across)


def _ordinal(k: int) -> str:
    last = "th" if k // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(k % 10, "th")
    return f"{k}{last}"


def _change(after: Array, before: Array) -> Array:
    """Of every pixel, the L2 norm over its channels."""
    change = after - before
    return np.sqrt((change**2).sum(axis=-1)) if change.ndim == 3 else abs(change)


def _grey_or_rgb(outcome: Outcome, values: Array) -> Array:
    return values if outcome.part.levels else np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _clipped(outcome: Outcome, before: Array, after: Array) -> Array:
    """The picture in pale grey, and in colour what has come to a bound: orange the upper one, blue the lower."""
    low, high = outcome.ends
    pale = _grey_or_rgb(outcome, before)
    pale = pale.mean(axis=-1) if pale.ndim == 3 else pale.astype(np.float64)
    pale = np.repeat(190 + pale[..., None] / 255 * 55, 3, axis=-1)
    for end, colour in ((high, (234, 88, 12)), (low, (37, 99, 235))):
        at_end = after >= end if end == high else after <= end
        share = (at_end.mean(axis=-1) if at_end.ndim == 3 else at_end)[..., None]
        pale = pale * (1 - share) + np.array(colour) * share
    return np.rint(pale).astype(np.uint8)


def _coloured(shares: Array) -> Array:
    """From 0 to 1 as colours."""
    import matplotlib

    table = np.rint(255 * matplotlib.colormaps["magma"](np.arange(256))[:, :3]).astype(np.uint8)
    return table[np.minimum(np.rint(255 * shares), 255).astype(np.uint8)]


def _jpeg(pixels: Array, orientation: int) -> str:
    from PIL import Image

    turned = images.as_stored(pixels, {6: 8, 8: 6}.get(orientation, orientation))
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(turned)).save(data, "JPEG", quality=90, subsampling=0)
    return _inside(data.getvalue(), "image/jpeg")


def _inside(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# --- sounds -----------------------------------------------------------------------------------------------------------


def _sounds(outcome: Outcome) -> str:
    """The recording before and after: its waveform, and a player."""
    rate = outcome.subject.content.extra.rate
    whole = {"original": outcome.part.values, "naive": outcome.naively(), "exact": outcome.made}
    length = len(outcome.part.values)
    heard = f", the first {SECONDS} seconds to listen to" if length > SECONDS * rate else ""
    figures = [
        f'<figure class="ca-figure ca-sound ca-of-{name}"><figcaption>{name}{heard}</figcaption>'
        f'{_wave(outcome, values)}<audio controls preload="auto" src="{_wav(outcome, values, rate)}"></audio></figure>'
        for name, values in whole.items()
    ]
    return f'<div class="ca-sounds">{"".join(figures)}</div>'


def _wave(outcome: Outcome, values: Array) -> str:
    """The lowest and the highest value of every stretch, of all channels; what is at a bound in another colour."""
    low, high = outcome.ends
    edges = np.linspace(0, len(values), min(COLUMNS, len(values)) + 1).astype(int)[:-1]
    least = np.minimum.reduceat(values.min(axis=1), edges)
    most = np.maximum.reduceat(values.max(axis=1), edges)
    least, most = ((a.astype(np.float64) - low) / (high - low) for a in (least, most))
    height, lines, ends = 100, [], []
    for i, (bottom, top) in enumerate(zip(least.tolist(), most.tolist(), strict=True)):
        lines.append(f"M{i + 0.5:g} {height * (1 - bottom) + 0.5:.1f}V{height * (1 - top) - 0.5:.1f}")
        ends += [f"M{i} {y}h1" for y, there in ((0.5, top >= 1), (height - 0.5, bottom <= 0)) if there]
    return (
        f'<svg class="ca-wave" viewBox="0 0 {len(edges)} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="ca-line" d="{"".join(lines)}"/><path class="ca-end" d="{"".join(ends)}"/></svg>'
    )


def _wav(outcome: Outcome, values: Array, rate: int) -> str:
    """The start, in 16 bits, for a player."""
    samples = outcome.real(values[: SECONDS * rate, :2])
    data = np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2").tobytes()
    channels = samples.shape[1]
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return _inside(b"RIFF" + struct.pack("<I", len(chunks)) + chunks, "audio/wav")


# --- plots ------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40


class _Plot:
    """An SVG with axes from 0 on."""

    def __init__(self, across: float, up: float, x_name: str, y_name: str, power: str = "") -> None:
        self.across, self.up = across or 1.0, up or 1.0
        self.items: list[str] = []
        above = f'<tspan dy="-5" font-size="9">{power}</tspan>' if power else ""
        self.x_name, self.y_name = x_name + above, y_name + above

    def at(self, x: float, y: float) -> tuple[float, float]:
        """In pixels, and not far outside."""
        wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return (
            round(LEFT + wide * min(x / self.across, 1.2), 1),
            round(HEIGHT - BOTTOM - high * min(y / self.up, 1.2), 1),
        )

    def line(self, points: Iterable[tuple[float, float]], name: str) -> None:
        path = "L".join(f"{x} {y}" for x, y in (self.at(*point) for point in points))
        self.items.append(f'<path class="ca-{name}" d="M{path}"/>')

    def dot(self, x: float, y: float, name: str) -> None:
        x, y = self.at(x, y)
        self.items.append(f'<circle class="ca-{name}" cx="{x}" cy="{y}" r="4.5"/>')

    def text(self, x: float, y: float, text: str, name: str = "label", anchor: str = "start") -> None:
        self._note(*self.at(x, y), text, name, anchor)

    def _note(self, across: float, down: float, text: str, name: str, anchor: str) -> None:
        place = f'x="{across}" y="{down}" text-anchor="{anchor}"'
        self.items.append(f'<text class="ca-{name}" {place}>{text}</text>')

    def ticks(self, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]]) -> None:
        for x, text in xs:
            self._note(self.at(x, 0)[0], HEIGHT - BOTTOM + 16, text, "tick", "middle")
        for y, text in ys:
            _, up = self.at(0, y)
            self._note(LEFT - 6, up + 4, text, "tick", "end")
            self.items.append(f'<path class="ca-grid" d="M{LEFT} {up}H{WIDTH - RIGHT}"/>')

    def svg(self, name: str, title: str) -> str:
        self._note((WIDTH + LEFT - RIGHT) / 2, HEIGHT - 6, self.x_name, "name", "middle")
        turned = f"translate(13 {(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)"
        return (
            f'<svg class="ca-plot" data-plot="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
            f'<path class="ca-axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>{"".join(self.items)}'
            f'<text class="ca-name" transform="{turned}" text-anchor="middle">{self.y_name}</text></svg>'
        )


def _plots(outcome: Outcome) -> str:
    sampled = outcome.curve.sampled and outcome.choice.p < math.inf
    drawn = " Curves are drawn from half a million of the values; dots and numbers are of all." if sampled else ""
    passes = len(outcome.curve.newton(outcome.asked)) - 1
    if outcome.choice.p == math.inf:
        way = "For the largest change there is a closed form: it takes no steps."
    elif passes >= PASSES:
        way = "Newton alone would take many steps here; the solver bisects in between."
    elif not outcome.reachable:
        way = "Newton's steps end where everything is clipped: the size that was asked for lies above the curve."
    else:
        way = f"Newton's steps from 0 to the solution, at 1: {passes}. The red dot is naive scaling."
    return (
        f'<div class="ca-plots"><figure class="ca-figure">{_delivered(outcome)}'
        f"<figcaption>Delivered against asked.{drawn}</figcaption></figure>"
        f'<figure class="ca-figure">{_newton(outcome)}<figcaption>{way}</figcaption></figure></div>'
    )


def _delivered(outcome: Outcome) -> str:
    """The norm after clipping against the norm asked for, of naive scaling and of exact."""
    curve, reach = outcome.curve, outcome.reach
    most = max(1.12 * reach, 1.05 * outcome.asked)
    plot = _Plot(most, most, "norm asked", "norm delivered")
    marks = [(a, f"{a:g}") for a in _round_numbers(most)]
    plot.ticks(marks, marks)
    asked = np.linspace(0, most, 81)
    per = outcome.scale * curve.top / outcome.asked if outcome.asked else 0.0
    plot.line([(0, 0), (most, most)], "asked-line")
    plot.line([(0, reach), (most, reach)], "reach-line")
    plot.text(0.02 * most, reach + 0.02 * most, "reach: all clipped")
    plot.line([(outcome.asked, 0), (outcome.asked, most)], "asked-line")
    plot.line(zip(asked.tolist(), curve.norm(asked * per).tolist(), strict=True), "naive-line")
    plot.line([(0, 0), (min(reach, most), min(reach, most)), (most, reach)], "exact-line")
    plot.dot(outcome.asked, outcome.naive, "naive-dot")
    plot.dot(outcome.asked, outcome.exact, "exact-dot")
    plot.text(0.98 * most, 0.13 * most, "exact", "exact-text", "end")
    plot.text(0.98 * most, 0.05 * most, "naive", "naive-text", "end")
    return plot.svg("delivered", "delivered norm against asked norm, naive and exact")


def _newton(outcome: Outcome) -> str:
    """The p-th power of the norm against the p-th power of eta: concave, made of straight pieces; and the steps."""
    curve, p = outcome.curve, outcome.choice.p
    scales = curve.newton(outcome.asked)
    # In units of the solution, where no power overflows; if there is none, of where nearly all is clipped.
    one, order = scales[-1] or 1.0, p if p < math.inf else 1.0
    if not outcome.reachable and curve.breaks.size:
        norms = curve.norm(curve.breaks)
        one = float(curve.breaks[np.argmax(norms >= 0.99 * norms[-1])]) or 1.0
    unit = float(curve.norm(one)) or 1.0

    def power(ratio: Any) -> float:
        """Of what is far outside the plot, one that is outside, too, and does not overflow."""
        return float(min(float(ratio), 4.0) ** order)

    def at(scale: float) -> tuple[float, float]:
        return power(scale / one), power(curve.norm(scale) / unit)

    target = power(outcome.asked / unit)

    far, high = 1.3, 1.25 * max(1.0, min(target, 1.6))
    plot = _Plot(far, high, "scale", "norm", "" if p in (1, math.inf) else f"{p:g}")
    plot.ticks([(0, "0"), (0.5, "0.5"), (1, "1")], [(0, "0"), (0.5, "0.5"), (1, "1")])
    if target <= high:
        plot.line([(0, target), (far, target)], "asked-line")
        plot.text(0.985 * far, target + 0.02 * high, "asked", "label", "end")
    shares = np.linspace(0, 1, 121) ** 2 * far
    plot.line([(share, at(one * share ** (1 / order))[1]) for share in shares.tolist()], "curve-line")
    seen = [scale for scale in scales if at(scale)[0] <= far]
    if p < math.inf and target <= high:
        for here, there in itertools.pairwise(seen):
            plot.line([at(here), (at(there)[0], target)], "step-line")
            plot.line([(at(there)[0], target), at(there)], "drop-line")
    if p < math.inf:
        for scale in seen[1:]:
            plot.dot(*at(scale), "step-dot")
    plot.dot(*at(outcome.scale * curve.top), "naive-dot")
    if outcome.reachable:
        plot.dot(*at(scales[-1]), "exact-dot")
    return plot.svg("newton", "the concave curve and Newton's steps on it")


def _round_numbers(most: float) -> list[float]:
    """Four or so, from 0."""
    if most <= 0:
        return [0.0]
    unit = 10 ** math.floor(math.log10(most))
    step = next(a * unit for a in (0.1, 0.2, 0.5, 1, 2, 5) if most / (a * unit) <= 5.5)
    return [round(k * step, 12) for k in range(int(most / step) + 1)]
