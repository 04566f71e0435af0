"""A page in the browser to see it: drop a picture or a recording, move the size, and watch naive scaling fall short.

``clipaware explore`` opens it. It needs Gradio: ``pip install 'clipaware[explorer]'``.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import ipaddress
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clipaware import noise
from clipaware._explorer import draw, results
from clipaware._explorer.solve import BITS, BUNDLED, MEASURES, MOST, OWN_BOUNDS, Choice, Visit, bundled, opened
from clipaware._media import FileError

__all__ = ["MOST", "launch", "page"]

OWN = "Your own"
NORMS = {"1": 1.0, "2": 2.0, "3": 3.0, "∞": math.inf}
ANY = "any p"
LARGEST_P = 50.0
MEGABYTES = 64  # of an upload
VISITORS = 16  # whose pictures are kept in memory
LABELS = {"eps": "norm ε", "rms": "RMS", "snr": "SNR, dB", "psnr": "PSNR, dB"}
RANGES = {"rms": (0.0, 0.5, 0.0005), "snr": (-10.0, 40.0, 0.05), "psnr": (0.0, 50.0, 0.05)}
STARTS = {"picture": "eps", "sound": "snr"}  # the measure at first
KEPT = (300, 900)  # seconds: how often files are looked at, and how old they may get

INTRODUCTION = """
# clipaware explorer
Noise is scaled to the size you ask for, added, and clipped to what a file can hold. Clipping takes some of it away:
**naive** scaling delivers less than was asked. **Exact** scaling finds the noise of the right size *after* clipping.
"""
# Of what Gradio would do unless told: a second server, a tunnel, pages of its own, and notes in the visitor's browser.
NOT_NEEDED: dict[str, Any] = {
    "share": False, "ssr_mode": False, "mcp_server": False, "pwa": False, "enable_monitoring": False,
    "run_history": False, "footer_links": [],
}  # fmt: skip
CLICK = "() => {{ (document.querySelector('#{0} a') || document.querySelector('#{0}')).click(); }}"


def gradio() -> Any:
    """The module, or an ImportError that says how to get it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise ImportError(
            "the explorer needs Gradio, which cannot be imported: pip install 'clipaware[explorer]'"
        ) from error
    return gradio


def page(most: int = MOST) -> Any:
    """Return the page, a ``gradio.Blocks``.

    Parameters
    ----------
    most
        How many elements an upload may have.

    Returns
    -------
    gradio.Blocks
    """
    gr = gradio()
    with gr.Blocks(title="clipaware explorer", analytics_enabled=False, delete_cache=KEPT) as blocks:
        gr.Markdown(INTRODUCTION, elem_classes="ca-introduction")
        for kind in ("picture", "sound"):
            with gr.Tab(kind.capitalize()):
                _Tab(gr, blocks, kind, most)
    return blocks


class _Tab:
    """The controls for pictures or for sounds, what they show, and what happens when they are used."""

    def __init__(self, gr: Any, blocks: Any, kind: str, most: int) -> None:
        self.gr, self.kind, self.most = gr, kind, most
        self.visit = gr.State(Visit(), delete_callback=Visit.forget)
        with gr.Row(elem_classes="ca-columns"):
            with gr.Column(scale=2, min_width=280, elem_classes="ca-controls"):
                self._controls()
            with gr.Column(scale=7, min_width=320):
                self.message = gr.HTML(elem_classes="ca-message", elem_id=f"{kind}-message", padding=False)
                self.answer = gr.HTML(elem_id=f"{kind}-answer", padding=False)
        self._take_home()
        self._events(blocks)

    def _controls(self) -> None:
        gr, kind = self.gr, self.kind
        titles = list(BUNDLED[kind])
        self.title = gr.Radio(titles, value=titles[0], label=kind.capitalize(), elem_id=f"{kind}-title")
        self.file = gr.File(
            label=f"Drop a {kind} of your own", height=132, elem_classes="ca-file", elem_id=f"{kind}-file"
        )
        self.measure = gr.Radio(
            [(LABELS[name], name) for name in MEASURES], value=STARTS[kind], label="Size as", elem_id=f"{kind}-measure"
        )
        self.value = gr.Slider(0, 1, value=0.5, step=1e-4, label="Size", elem_id=f"{kind}-value")
        self.kind_of_noise = gr.Dropdown(
            list(noise.KINDS), value=noise.KINDS[0], label="Noise", elem_id=f"{kind}-noise", filterable=False
        )
        self.norm = gr.Radio(
            [*NORMS, ANY], value="2", label="Norm", elem_id=f"{kind}-norm", interactive=STARTS[kind] == "eps"
        )
        self.order = gr.Slider(1, LARGEST_P, value=1.5, step=0.1, label="p", visible=False, elem_id=f"{kind}-order")
        with gr.Accordion("Seed, bounds, precision", open=False):
            self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id=f"{kind}-seed")
            with gr.Row():
                low, high = OWN_BOUNDS[kind]
                self.low = gr.Number(low, label="Lower bound", step=0.05, min_width=100, elem_id=f"{kind}-low")
                self.high = gr.Number(high, label="Upper bound", step=0.05, min_width=100, elem_id=f"{kind}-high")
            bits = f"{BITS[kind]}-bit"
            self.depth = gr.Radio([bits, "float"], value=bits, label="Saved as", elem_id=f"{kind}-depth")

    def _take_home(self) -> None:
        gr, kind = self.gr, self.kind
        with gr.Accordion("Take it home: the file, and the Python that makes it", open=True):
            with gr.Row():
                self.save_file = gr.Button(f"Download the exact {kind}", variant="primary", elem_id=f"{kind}-save")
                self.save_code = gr.Button("Download the Python", elem_id=f"{kind}-save-code")
            self.code = gr.Code(
                language="python", show_label=False, interactive=False, elem_classes="ca-code", elem_id=f"{kind}-code"
            )
            self.link = gr.DownloadButton(visible="hidden", elem_id=f"{kind}-link")

    def _inputs(self) -> list[Any]:
        return [
            self.visit, self.title, self.measure, self.value, self.kind_of_noise, self.norm, self.order, self.seed,
            self.low, self.high, self.depth,
        ]  # fmt: skip

    def _events(self, blocks: Any) -> None:
        gr, hidden = self.gr, {"show_progress": "hidden", "api_visibility": "private"}
        shown = [self.message, self.answer, self.code]
        every = [self.title, self.value, self.norm, self.order, *shown]
        again = [self.kind_of_noise.input, self.seed.input, self.low.input, self.high.input, self.depth.input]
        anew = [blocks.load, self.title.input, self.measure.input, self.norm.input, self.order.input]
        latest = {"trigger_mode": "always_last", **hidden}
        gr.on([self.value.input, *again], self.again, self._inputs(), shown, **latest)
        gr.on(anew, self.anew, self._inputs(), every, **latest)
        self.file.upload(self.upload, [self.file, *self._inputs()], [self.file, *every], **hidden)
        for button, make in ((self.save_file, self.saved), (self.save_code, self.saved_code)):
            button.click(make, self._inputs(), [self.message, self.link], **hidden)
        self.link.change(None, js=CLICK.format(f"{self.kind}-link"), **hidden)

    # --- what the events do ---

    def choice(
        self, measure: str, value: float, kind: str, norm: str, order: float, seed: Any, low: Any, high: Any, depth: str
    ) -> Choice:  # fmt: skip
        """What the controls say; a ValueError, if one of them says nothing."""
        for name, given in (("seed", seed), ("lower bound", low), ("upper bound", high), ("size", value)):
            if given is None or not math.isfinite(given):
                raise ValueError(f"the {name} is empty, expected a number")
        if not low < high:
            raise ValueError(f"the bounds are {low:g} and {high:g}, expected the lower one first")
        if seed < 0:
            raise ValueError(f"the seed is {seed}, expected a whole number that is not negative")
        if measure in ("eps", "rms") and value < 0:
            raise ValueError(f"the size is {value:g}, expected one that is not negative")
        p = 2.0 if measure != "eps" else NORMS.get(norm, order)
        return Choice(kind, int(seed), float(p), measure, float(value), (float(low), float(high)), depth != "float")

    def _turn_to(self, visit: Visit, title: str) -> None:
        subject = visit.own if title == OWN else bundled(self.kind, title)
        if subject is None:
            raise ValueError(f"your {self.kind} is no longer here; drop it once more")
        visit.look_at(subject)

    def again(self, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """The answer to controls that leave the others as they are."""
        with self._safely() as problem, visit.lock:
            self._turn_to(visit, title)
            return self._answer(visit, self.choice(*controls))
        return draw.trouble(problem[0]), self.gr.skip(), self.gr.skip()

    def anew(self, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """The answer to controls with which a size means something else: at a size that is as large as before."""
        with self._safely() as problem, visit.lock:
            self._turn_to(visit, title)
            return self._anew(visit, title, *controls)
        return (*[self.gr.skip()] * 4, draw.trouble(problem[0]), self.gr.skip(), self.gr.skip())

    def _anew(self, visit: Visit, title: str, measure: str, value: Any, *controls: Any) -> tuple[Any, ...]:
        gr = self.gr
        choice = self.choice(measure, 0.0, *controls)
        low, high, step = RANGES.get(measure, (0.0, 0.0, 0.0))
        value = visit.sizes[measure]
        if measure == "eps":
            reach = visit.reach(choice)
            step = 10.0 ** math.floor(math.log10(reach) - 4) if reach else 1e-4
            high, value = _up(1.1 * reach, step), _up(value * reach, 100 * step)
        titles = [*BUNDLED[self.kind], *([OWN] if visit.own else [])]
        is_norm = measure == "eps"
        norm = controls[1] if is_norm else "2"
        return (
            gr.Radio(titles, value=title),
            gr.Slider(low, high or 1.0, value=value, step=step, label=f"Size: {LABELS[measure]}"),
            gr.Radio(value=norm, interactive=is_norm),
            gr.Slider(visible=is_norm and norm == ANY),
            *self._answer(visit, self.choice(measure, value, *controls)),
        )

    def _answer(self, visit: Visit, choice: Choice) -> tuple[str, str, str]:
        outcome = visit.solve(choice)
        visit.sizes[choice.measure] = choice.value
        if choice.measure == "eps":
            visit.sizes["eps"] = min(choice.value / outcome.reach, 1.0) if outcome.reach else 0.0
        return "", draw.answer(outcome), results.code(outcome)

    def upload(self, path: str | None, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """Read a file and look at that. It does not stay on the disk."""
        skip = self.gr.skip()
        if path is None:
            return (skip,) * 8
        with self._safely() as problem, visit.lock:
            try:
                own = opened(Path(path), self.kind, self.most)
            finally:
                _remove(Path(path))
            visit.own = own
            visit.look_at(own)
            return None, *self._anew(visit, OWN, *controls)
        return (None, *[skip] * 4, draw.trouble(problem[0]), skip, skip)

    def saved(self, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """The result as a file, for the browser to fetch."""
        with self._safely() as problem, visit.lock:
            self._turn_to(visit, title)
            return "", str(results.save(visit.solve(self.choice(*controls)), visit.new_folder()))
        return draw.trouble(problem[0]), self.gr.skip()

    def saved_code(self, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """The lines of Python as a file."""
        with self._safely() as problem, visit.lock:
            self._turn_to(visit, title)
            outcome = visit.solve(self.choice(*controls))
            path = visit.new_folder() / f"{Path(results.name_of(outcome)).stem}.py"
            path.write_text(results.code(outcome), encoding="utf-8")
            return "", str(path)
        return draw.trouble(problem[0]), self.gr.skip()

    @contextlib.contextmanager
    def _safely(self) -> Iterator[list[str]]:
        """Go on after what is the visitor's to mend, with a message."""
        problem: list[str] = []
        try:
            yield problem
        except (FileError, ValueError) as error:
            problem.append(str(error))
        except MemoryError:
            problem.append(f"there is not enough memory for this {self.kind}")


def _up(value: float, step: float) -> float:
    """Rounded up to a whole number of steps."""
    return float(f"{math.ceil(value / step - 1e-9) * step:.12g}")


def _remove(upload: Path) -> None:
    """With the folder that it has for itself, and nothing else."""
    upload.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        upload.parent.rmdir()


# --- the server -------------------------------------------------------------------------------------------------------


class _OwnFilesOnly:
    """Gradio would fetch an address for whoever asks it to. Nothing here needs that, so nobody gets it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and any(part in path for part in ("/file=http", "/proxy=")):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def launch(
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    browser: bool = True,
    most: int = MOST,
    megabytes: int = MEGABYTES,
    started: Callable[[str], Any] = print,
) -> None:
    """Serve the page until interrupted.

    Nothing is fetched from the internet and nothing is reported to anybody. What is uploaded is read into memory, apart
    for each visitor, and leaves the disk at once.

    Parameters
    ----------
    host
        The address to listen on. Whoever can reach any other than the default one can use the page.
    port
        The port; a free one from 7860 on unless told.
    browser
        Whether to open the page in a browser.
    most, megabytes
        How many elements and megabytes an upload may have.
    started
        Is called with the address once the page is there.
    """
    gr = gradio()
    from starlette.middleware import Middleware

    before, folder = os.environ.get("GRADIO_TEMP_DIR"), tempfile.mkdtemp(prefix="clipaware-explorer-")
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        blocks = page(most)
        blocks.queue(default_concurrency_limit=os.cpu_count() or 1, api_open=False)
        try:
            _, address, _ = blocks.launch(
                server_name=host,
                server_port=port,
                inbrowser=browser,
                prevent_thread_lock=True,
                quiet=True,
                max_file_size=megabytes * 2**20,
                state_session_capacity=VISITORS,
                theme=_theme(gr),
                css=_style(),
                app_kwargs={"middleware": [Middleware(_OwnFilesOnly)]},
                **NOT_NEEDED,
            )
            with contextlib.suppress(KeyboardInterrupt), _ended_by_a_signal():
                started(address)
                threading.Event().wait()
        finally:
            blocks.close(verbose=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            del os.environ["GRADIO_TEMP_DIR"]
        else:
            os.environ["GRADIO_TEMP_DIR"] = before


@contextlib.contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Whoever ends this process asks it to tidy up, too, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _theme(gr: Any) -> Any:
    """With the fonts that the system has: others would have to be fetched."""
    fonts = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
    return gr.themes.Soft(primary_hue="blue", neutral_hue="slate", font=fonts, font_mono=("ui-monospace", "monospace"))


def _style() -> str:
    return (importlib.resources.files("clipaware") / "_explorer" / "page.css").read_text(encoding="utf-8")
