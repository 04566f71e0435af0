"""A page in the browser to see it: drop a picture or a recording, move the size, and watch naive scaling fall short.

``clipaware explore`` opens it. It needs Gradio: ``pip install 'clipaware[explorer]'``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import ipaddress
import math
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clipaware import noise
from clipaware._explorer import draw, results
from clipaware._explorer.solve import (
    BITS,
    BUNDLED,
    MEASURES,
    MOST,
    OWN_BOUNDS,
    SAVED,
    Choice,
    Outcome,
    Visit,
    bundled,
    opened,
)
from clipaware._media import FileError

__all__ = ["MOST", "launch", "page"]

OWN = "Your own"
NORMS = {"1": 1.0, "2": 2.0, "3": 3.0, "∞": math.inf}
ANY = "any p"
LARGEST_P = 50.0
LARGEST_BOUND = 1e5  # whose 50th power is a number
LARGEST_SEED = 2**53 - 1  # beyond, a browser's numbers skip some
MEGABYTES = 64  # of an upload
BESIDE = 2**20  # bytes of a request that are not the file
PORTS = range(7860, 7960)
VISITORS = 16  # whose pictures are kept in memory
LABELS = {"eps": "norm ε", "rms": "RMS", "snr": "SNR, dB", "psnr": "PSNR, dB"}
RANGES = {"rms": (0.0, 0.5, 0.0005), "snr": (-10.0, 40.0, 0.05), "psnr": (0.0, 50.0, 0.05)}  # of the sliders
TYPED = {"eps": (0.0, 1e9), "rms": (0.0, 1e6), "snr": (-100.0, 200.0), "psnr": (-100.0, 200.0)}  # what may be asked
STARTS = {"picture": "eps", "sound": "snr"}  # the measure at first
KEPT = (300, 900)  # seconds: how often files are looked at, and how old they may get

INTRODUCTION = """
# clipaware explorer
Noise is scaled to the size you ask for, added, and clipped to what a file can hold. Clipping takes some of it away:
**naive** scaling delivers less than was asked. **Exact** scaling finds the noise of the right size *after* clipping.
"""
BUSY = '<div class="ca-busy" role="status">working …</div>'
# Of what Gradio would do unless told: a second server, a tunnel, pages of its own, and notes in the visitor's browser.
NOT_NEEDED: dict[str, Any] = {
    "share": False, "ssr_mode": False, "mcp_server": False, "pwa": False, "enable_monitoring": False,
    "run_history": False, "footer_links": [],
}  # fmt: skip
# Of Gradio's own addresses, those that the page uses.
NEEDED = ("app_id", "cancel", "file=", "heartbeat/", "info", "queue/", "reset", "startup-events", "theme.css", "upload")
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

    class Page(gr.Blocks):  # type: ignore[misc, name-defined]
        """Gradio would fetch whatever address stands for a file, in any control's value, and keep a folder's path as
        that of a file to be removed."""

        async def preprocess_data(self, block_fn: Any, inputs: list[Any], *others: Any, **more: Any) -> Any:
            if _no_file(inputs):
                raise gr.Error("only what was uploaded is read, and nothing is fetched", print_exception=False)
            return await super().preprocess_data(block_fn, inputs, *others, **more)

    with Page(title="clipaware explorer", analytics_enabled=False, delete_cache=KEPT) as blocks:
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
                self.busy = gr.HTML(BUSY, elem_classes="ca-busy-place", elem_id=f"{kind}-busy", padding=False)
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
        # A slider's own box would move what is typed into its range, without a word.
        self.size = gr.Number(0.5, label="Size", elem_classes="ca-size", elem_id=f"{kind}-size")
        self.value = gr.Slider(
            0,
            1,
            value=0.5,
            step=1e-4,
            label="Size",
            show_label=False,
            buttons=[],
            elem_classes="ca-slider",
            elem_id=f"{kind}-value",
        )
        self.kind_of_noise = gr.Dropdown(
            list(noise.KINDS), value=noise.KINDS[0], label="Noise", elem_id=f"{kind}-noise", filterable=False
        )
        self.norm = gr.Radio(
            [*NORMS, ANY], value="2", label="Norm", elem_id=f"{kind}-norm", interactive=STARTS[kind] == "eps"
        )
        self.order = gr.Number(
            1.5, step=0.1, label=f"p, from 1 to {LARGEST_P:g}", visible=False, elem_id=f"{kind}-order"
        )
        with gr.Accordion("Seed, bounds, precision", open=False):
            self.seed = gr.Number(0, label="Seed", step=1, elem_id=f"{kind}-seed")
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

    def _inputs(self, size: Any) -> list[Any]:
        return [
            self.visit, self.title, self.measure, size, self.kind_of_noise, self.norm, self.order, self.seed,
            self.low, self.high, self.depth,
        ]  # fmt: skip

    def _events(self, blocks: Any) -> None:
        # Values come as they are: what is wrong with them is said here, and not by Gradio.
        gr, quiet = self.gr, {"preprocess": False, "api_visibility": "private", "show_progress": "hidden"}
        shows_work = {**quiet, "show_progress": "minimal", "show_progress_on": self.busy}
        latest = {"trigger_mode": "always_last", **shows_work}
        shown = [self.message, self.answer, self.code]
        every = [self.title, self.size, self.value, self.norm, self.order, *shown]
        again = [self.kind_of_noise.input, self.seed.input, self.low.input, self.high.input, self.depth.input]
        anew = [blocks.load, self.title.input, self.measure.input, self.norm.input, self.order.input]
        # The number and the slider follow each other at once, in the browser.
        self.value.input(None, self.value, self.size, js="value => value", **quiet)
        self.size.input(None, [self.size, self.value], self.value, js="(typed, value) => typed ?? value", **quiet)
        self.value.input(self.again, self._inputs(self.value), shown, **latest)
        gr.on([self.size.input, *again], self.again, self._inputs(self.size), shown, **latest)
        gr.on(anew, self.anew, self._inputs(self.size), every, **latest)
        self.file.upload(self.upload, [self.file, *self._inputs(self.size)], [self.file, *every], **shows_work)
        for button, make in ((self.save_file, self.saved), (self.save_code, self.saved_code)):
            button.click(make, self.visit, [self.message, self.link], **shows_work)
        self.link.change(None, js=CLICK.format(f"{self.kind}-link"), **quiet)

    # --- what the events do ---

    def choice(
        self, measure: Any, size: Any, kind: Any, norm: Any, order: Any, seed: Any, low: Any, high: Any, depth: Any
    ) -> Choice:  # fmt: skip
        """What the controls say; a ValueError, if one of them says nothing, or what cannot be."""
        for name, given, options in (
            ("size", measure, MEASURES), ("noise", kind, noise.KINDS), ("norm", norm, (*NORMS, ANY)),
        ):  # fmt: skip
            if given not in options:
                raise ValueError(f"the {name} is {given!r}, expected one of {', '.join(options)}")
        size = _number("size", size, *TYPED[measure])
        p = 2.0
        if measure == "eps":
            p = _number("p of the norm", order, 1.0, LARGEST_P) if norm == ANY else NORMS[norm]
        seed = _number("seed", seed, 0, LARGEST_SEED)
        if seed != int(seed):
            raise ValueError(f"the seed is {seed:g}, expected a whole number")
        low, high = (
            _number(f"{name} bound", end, -LARGEST_BOUND, LARGEST_BOUND)
            for name, end in (("lower", low), ("upper", high))
        )
        if not np.float32(low) < np.float32(high):
            raise ValueError(f"the bounds are {low:g} and {high:g}, expected the lower one first")
        return Choice(kind, int(seed), p, measure, size, (low, high), depth != "float")

    def _turn_to(self, visit: Visit, title: str) -> None:
        subject = bundled(self.kind, title) if title in tuple(BUNDLED[self.kind]) else visit.own
        if subject is None:
            raise ValueError(f"your {self.kind} is no longer here; drop it once more")
        visit.look_at(subject)

    def again(self, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """The answer to controls that leave the others as they are."""
        with self._safely() as problem, visit.lock:
            self._turn_to(visit, title)
            choice = self.choice(*controls)
            answer = self._answer(visit, choice)
            visit.keep_size(choice)
            return answer
        return draw.trouble(problem[0]), self.gr.skip(), self.gr.skip()

    def anew(self, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """The answer to controls with which a size means something else: at a size that is as large as before."""
        with self._safely() as problem, visit.lock:
            self._turn_to(visit, title)
            return self._anew(visit, title, *controls)
        return (*[self.gr.skip()] * 5, draw.trouble(problem[0]), self.gr.skip(), self.gr.skip())

    def _anew(
        self, visit: Visit, title: str, measure: str, _: Any, kind: str, norm: str, *others: Any
    ) -> tuple[Any, ...]:
        gr, is_norm = self.gr, measure == "eps"
        if visit.shown and (visit.shown.choice.measure == "eps") != is_norm:
            norm = visit.norm if is_norm else "2"
        choice = self.choice(measure, 0.0, kind, norm, *others)
        low, high, step = RANGES.get(measure, (0.0, 0.0, 0.0))
        if is_norm:
            reach = visit.reach(choice)
            step = 10.0 ** math.floor(math.log10(reach) - 4) if reach else 1e-4
            high = _up(1.1 * reach, step) or 1.0
        choice = dataclasses.replace(choice, value=visit.size_for(choice))
        answer = self._answer(visit, choice)
        if is_norm:
            visit.norm = norm
        return (
            self._titles(visit, title),
            gr.Number(choice.value, step=step, label=f"Size: {LABELS[measure]}"),
            gr.Slider(low, high, value=choice.value, step=step),
            gr.Radio(value=norm, interactive=is_norm),
            gr.Number(visible=is_norm and norm == ANY),
            *answer,
        )

    def _titles(self, visit: Visit, title: str) -> Any:
        return self.gr.Radio([*BUNDLED[self.kind], *([OWN] if visit.own else [])], value=title)

    def _answer(self, visit: Visit, choice: Choice) -> tuple[str, str, str]:
        outcome = visit.solve(choice)
        answer = "", draw.answer(outcome), results.code(outcome)
        visit.shown = outcome
        return answer

    def upload(self, file: Any, visit: Visit, title: str, *controls: Any) -> tuple[Any, ...]:
        """Read a file and look at that. It does not stay on the disk."""
        skip = self.gr.skip()
        if file is None:
            return (skip,) * 9
        path = Path(file["path"])
        with self._safely() as problem, visit.lock:
            try:
                own = opened(path, self.kind, self.most)
            finally:
                _remove(path)
            visit.own, title = own, OWN  # which stays, even if the controls do not fit it
            visit.look_at(own)
            return None, *self._anew(visit, OWN, *controls)
        return (None, self._titles(visit, title), *[skip] * 4, draw.trouble(problem[0]), skip, skip)

    def saved(self, visit: Visit) -> tuple[Any, ...]:
        """The result that is shown as a file, for the browser to fetch."""
        return self._saved(visit, results.save)

    def saved_code(self, visit: Visit) -> tuple[Any, ...]:
        """The lines of Python that are shown as a file."""
        return self._saved(visit, results.save_code)

    def _saved(self, visit: Visit, save: Callable[[Outcome, Path], Path]) -> tuple[Any, ...]:
        with self._safely() as problem, visit.lock:
            if visit.shown is None:
                raise ValueError(f"nothing is shown any more; choose a {self.kind} once more")
            # What the message says about the controls stays: they are not what is saved.
            return self.gr.skip(), str(save(visit.shown, visit.new_folder()))
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


def _number(name: str, given: Any, low: float, high: float) -> float:
    """A number in a range; a ValueError, if it is none."""
    if not isinstance(given, int | float) or not low <= given <= high:
        said = "empty" if given is None else given
        raise ValueError(f"the {name} is {said}, expected a number from {low:.16g} to {high:.16g}")
    return float(given)


def _up(value: float, step: float) -> float:
    """Rounded up to a whole number of steps."""
    return float(f"{math.ceil(value / step - 1e-9) * step:.12g}")


def _remove(upload: Path) -> None:
    """With the folder that it has for itself, and nothing else."""
    with contextlib.suppress(OSError):
        upload.unlink()
        upload.parent.rmdir()


# --- the server -------------------------------------------------------------------------------------------------------


def _no_file(data: Any) -> bool:
    """Whether the path of a file is an address or a folder, anywhere in what a browser sent."""
    if isinstance(data, dict):
        path = str(data.get("path"))
        return "://" in path or os.path.isdir(path) or _no_file(list(data.values()))
    return isinstance(data, list) and any(_no_file(item) for item in data)


class _Guard:
    """Gradio does more for whoever asks than this page needs: it fetches addresses, edits films, takes a thousand
    files at once. Nobody gets that. Nor may the pages of others reach a server that is for this machine alone by giving
    their own name its address."""

    def __init__(self, app: Any, local: bool, most: int, folder: Path) -> None:
        self.app, self.local, self.most, self.folder = app, local, most, folder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (status := self._refusal(scope)):
            # Whoever is still sending would not see the answer.
            while status == 507 and (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Any) -> int | None:
        """The status with which a request is answered that goes no further."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.local and not is_loopback(re.sub(r":\d*$", "", host)):
            return 403
        _, own, rest = scope["path"].partition("/gradio_api/")
        if own and (not rest.startswith(NEEDED) or "://" in rest):
            return 403
        if scope["method"] not in ("GET", "HEAD"):
            length = headers.get(b"content-length", "")
            if not length.isdecimal():
                return 411
            if int(length) > self.most:
                return 413
            # What is uploaded and never looked at is removed after some time only.
            if rest.startswith("upload") and _bytes_in(self.folder) > VISITORS * self.most:
                return 507
        return None


def _bytes_in(folder: Path) -> int:
    """Of the uploads in a folder."""
    sizes = 0
    for path in folder.glob("*/*"):
        with contextlib.suppress(OSError):  # it may be gone already
            sizes += path.stat().st_size if path.parent.name != SAVED else 0
    return sizes


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(_bare(host)).is_loopback
    return host.lower() == "localhost"


def _bare(host: str) -> str:
    """An address of IPv6 without the brackets that it has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _free_port(host: str) -> int:
    """The first one that is; an OSError, if there is none."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server((host, port), family=_family(host)):
            return port
    raise OSError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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

    host = _bare(host)
    port = _free_port(host) if port is None else port
    before, folder = os.environ.get("GRADIO_TEMP_DIR"), tempfile.mkdtemp(prefix="clipaware-explorer-")
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        blocks = page(most)
        blocks.queue(default_concurrency_limit=os.cpu_count() or 1, api_open=False)
        try:
            blocks.launch(
                server_name=f"[{host}]" if ":" in host else host,
                server_port=port,
                prevent_thread_lock=True,
                quiet=True,
                max_file_size=megabytes * 2**20,
                state_session_capacity=VISITORS,
                theme=_theme(gr),
                css=_style(),
                app_kwargs={
                    "middleware": [Middleware(_Guard, is_loopback(host), megabytes * 2**20 + BESIDE, Path(folder))]
                },
                **NOT_NEEDED,
            )
            with contextlib.suppress(KeyboardInterrupt), _ended_by_a_signal():
                address = _address(host, port)
                if browser:
                    webbrowser.open(address)
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


def _address(host: str, port: int) -> str:
    """Where a browser on this machine finds the page."""
    host = {"0.0.0.0": "localhost", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


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
