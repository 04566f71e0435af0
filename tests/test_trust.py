"""Files, manifests and moments that mean harm: bombs, damage, paths that lead out, Ctrl-C, forks, many threads."""

from __future__ import annotations

import ast
import csv
import ctypes
import io
import json
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

import clipaware as ca
from clipaware._kernels import threads
from tiers import in_test_all

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


# --- no code from files -----------------------------------------------------------------------------------------------


def test_nothing_is_unpickled():
    """np.load, torch.load and the like only where they are told not to."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "shelve", "marshal", "joblib", "dill"} & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                if isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy", "torch"):
                    found.append(node.func.value.id)
                    assert given.get("allow_pickle") is False or given.get("weights_only") is True, path
            if isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec"), path
    assert found == ["torch"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def readers():
    for name in ("PIL", "soundfile", "tifffile"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from load import readers

    return readers


def test_damaged_files_are_read_or_refused(readers, tmp_path, recwarn):
    found = set()
    for name, data in readers.cases(seed=7, number=600):
        (tmp_path / name).write_bytes(data)
        found.add(what := readers.outcome(tmp_path / name))
        assert what in readers.RIGHT, name
    assert {"read", "refused"} <= found
    for name, data in readers.seeds().items():
        (tmp_path / name).write_bytes(data)
        whole = readers.outcome(tmp_path / name)
        refused = name in ("gif.png", "frames.png", "frames.webp", "cmyk.jpg", "aiff.wav", "mp3.wav", "other.npz")
        assert (whole == "refused") == refused, (name, whole)


def refused(path, most=2**20):
    from clipaware._media import FileError, read

    with pytest.raises(FileError) as raised:
        read(path, most)
    return str(raised.value)


def npy(shape, descr="<f8", version=1):
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    return (
        b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(text) + 1) + text + b"\n"
    )


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (npy((2**40,)), "1,099,511,627,776 elements, more than the limit"),
        (npy((2**20, 2**20, 2**20)), "more than the limit"),
        (npy((-1,)) + bytes(64), r"damaged: it says to have the shape \(-1,\)"),
        (npy((1,), "|V999999999"), "has dtype void"),
        (npy((1,), "|O") + bytes(8), "holds Python objects"),
        (npy((3,), version=9) + bytes(24), "has version 9.0 of the format"),
        (npy((3,), version=2)[:8] + b"\xff\xff\xff\x7f" + bytes(10**5), "cannot be read as NPY"),
        (npy((10,)) + bytes(79), "is cut off"),
    ],
)
def test_arrays_that_are_not_what_they_say(tmp_path, data, what):
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    import re

    assert re.search(what, refused(path))


def test_an_archive_counts_as_a_whole(tmp_path):
    """Each array is below the limit, and a kilobyte stands for a megabyte."""
    from clipaware._media import read

    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(4):
            archive.writestr(f"{k}.npy", npy((2**18,)) + bytes(8 * 2**18))
    assert path.stat().st_size < 2**16
    assert len(read(path, 2**20).parts) == 4
    assert "1,048,576 elements, more than the limit of 1,048,575" in refused(path, 2**20 - 1)


def peak(code, limit=2**30):
    """Of a process with a limit on its memory: bytes that it needed beyond what it had after its imports."""
    start = "import resource, sys, logging; from pathlib import Path; import PIL.Image, tifffile, soundfile, numpy\n"
    start += "from clipaware import images, audio\nfrom clipaware._media import read, FileError\n"
    start += "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\nbefore = used()\n"
    code = start + code + "\nprint(used() - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return int(done.stdout)


def test_bombs_stay_small(readers, tmp_path):
    """A profile, a strip and a header that a few kilobytes blow up to a quarter of a gigabyte."""
    import tifffile

    much = zlib.compress(bytes(2**28), 9)
    chunks = ((b"IHDR", struct.pack(">2I5B", 1, 1, 16, 0, 0, 0, 0)), (b"iCCP", b"p\0\0" + much))
    pixel = (b"IDAT", zlib.compress(bytes(3)))
    png = tmp_path / "profile.png"
    png.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(readers._chunk(*c) for c in (*chunks, pixel, (b"IEND", b""))))
    tif = tmp_path / "strip.tif"
    tifffile.imwrite(tif, np.zeros((16, 16), np.uint8), compression="zlib", metadata=None)
    data = bytearray(tif.read_bytes())
    with tifffile.TiffFile(tif) as file:
        tags = file.pages[0].tags
        for name, value in (("StripOffsets", len(data)), ("StripByteCounts", len(much))):
            tag = tags[name]
            data[tag.offset + 2 : tag.offset + 12] = struct.pack("<HII", 4, 1, value)
    tif.write_bytes(bytes(data) + much)
    npz = tmp_path / "header.npz"
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy((3,), version=2)[:8] + struct.pack("<I", 2**28) + bytes(2**28))
    for path in (png, tif, npz):
        assert path.stat().st_size < 2**19
        code = (
            f"try:\n    read(Path({str(path)!r}), 2**20)\nexcept FileError as e:\n    pass\nelse:\n    sys.exit('read')"
        )
        assert peak(code) < 160 * 2**20, path.name


def test_a_ring_of_pages(readers, tmp_path):
    """Of two pages, the second of which names the first as the next; and a longer ring."""
    for number in (1, 2, 300):
        pages = b"".join(struct.pack("<HI", 0, 8 + 6 * ((k + 1) % number)) for k in range(number))
        path = tmp_path / f"{number}.tif"
        path.write_bytes(b"II*\0" + struct.pack("<I", 8) + pages)
        assert "its list of pages is longer than the file" in refused(path)


def test_a_wide_picture_of_16_bits(readers, tmp_path):
    """Filters of every kind are undone, and a million pixels in one line take no longer than in many."""
    from clipaware import images
    from clipaware._media import read

    rng = np.random.default_rng(0)
    for kind in range(5):
        raw = rng.integers(0, 256, (7, 1 + 6 * 5), np.uint8)
        raw[:, 0] = kind
        path = tmp_path / f"{kind}.png"
        path.write_bytes(
            images._joined(
                ((b"IHDR", struct.pack(">2I5B", 5, 7, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(raw.tobytes())))
            )
        )
        wanted = np.zeros((8, 6, 6), np.int64)
        for i in range(7):
            for j in range(5):
                left, above, between = (wanted[a, b] for a, b in ((i + 1, j), (i, j + 1), (i, j)))
                guess = left + above - between
                paeth = np.where(
                    (abs(guess - left) <= abs(guess - above)) & (abs(guess - left) <= abs(guess - between)),
                    left,
                    np.where(abs(guess - above) <= abs(guess - between), above, between),
                )
                guesses = (0, left, above, (left + above) // 2, paeth)
                wanted[i + 1, j + 1] = (raw[i, 1 + 6 * j : 7 + 6 * j].astype(np.int64) + guesses[kind]) % 256
        found = read(path).parts[""].values.astype(">u2").view(np.uint8).reshape(7, 5, 6)
        np.testing.assert_array_equal(found, wanted[1:, 1:])
    line = b"\3" + bytes(2 * 10**6)
    path = tmp_path / "wide.png"
    path.write_bytes(
        images._joined(((b"IHDR", struct.pack(">2I5B", 10**6, 1, 16, 0, 0, 0, 0)), (b"IDAT", zlib.compress(line))))
    )
    assert read(path).parts[""].values.shape == (1, 10**6)


# --- manifests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A manifest, two folders deep, and a way to change its only row."""
    for name in ("PIL", "typer", "soundfile"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).save("p.png")
    assert command("perturb", "p.png", "--out", "a/b", "--eps", "1")[0] == 0
    with open("a/b/manifest.csv", newline="") as file:
        (row,) = csv.DictReader(file)

    def change(**changes):
        with open("a/b/manifest.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row | changes)

    return change


def command(*argv):
    from contextlib import redirect_stderr, redirect_stdout

    from clipaware import cli

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(list(argv))
    return code, out.getvalue(), err.getvalue()


def outside(tmp_path):
    return {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["../x.png", "../../x.png", "{here}/x.png", "link/x.png", "a/../../../x.png"])
def test_replay_does_not_leave_its_folder(study, tmp_path, name):
    os.symlink(tmp_path, "a/b/link")
    study(output=name.format(here=tmp_path))
    before = outside(tmp_path)
    code, _, err = command("replay", "a/b/manifest.csv")
    assert code == 1
    assert "is not below" in err
    assert outside(tmp_path) == before
    assert command("replay", "a/b/manifest.csv", "--out", "again")[0] == 0
    assert outside(tmp_path) == before | {"again/x.png"}
    assert command("perturb", "p.png", "--out", "a/b", "--eps", "1", "--resume")[0] == 0
    assert outside(tmp_path) == before | {"again/x.png"}


def test_replay_does_not_follow_links_in_out(study, tmp_path):
    study(output="sub/x.png")
    os.mkdir("again")
    os.symlink(tmp_path, "again/sub")
    code, _, err = command("replay", "a/b/manifest.csv", "--out", "again")
    assert code == 1
    assert "is not below" in err
    assert not Path("x.png").exists()


@pytest.mark.parametrize(
    "name", ["C:\\x.png", "a\0b.png", "x" * 300 + ".png", "d/" * 3000 + "x.png", "..", "", "/dev/zero"]
)
def test_odd_names_in_a_manifest(study, tmp_path, name):
    study(output=name)
    for argv in (("replay", "a/b/manifest.csv"), ("perturb", "p.png", "--out", "a/b", "--eps", "1", "--resume")):
        _, _, err = command(*argv)
        assert "Traceback" not in err
        assert err.count("\n") <= 1
    assert {p.split("/")[0] for p in outside(tmp_path)} == {"a", "p.png"}


def test_names_do_not_steer_a_terminal(study):
    study(output="\x1b[31mred\n.png")
    _, out, err = command("replay", "a/b/manifest.csv")
    assert "\x1b" not in out + err
    assert (out + err).count("\n") == 1


@pytest.mark.parametrize("text", ["[" * 10**5, '{"seed": Infinity}', '{"value": 1' + "0" * 400 + "}", "5", "[1]"])
def test_odd_lines_of_json(study, text):
    with open("a/b/manifest.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    if text[0] == "{":
        text = json.dumps(row)[:-1] + ", " + text[1:]
    Path("m.jsonl").write_text(text + "\n")
    code, _, err = command("replay", "m.jsonl")
    assert code == 2
    assert "m.jsonl is no manifest" in err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_is_not_waited_for(study):
    os.remove("a/b/p_eps1.png")
    os.mkfifo("a/b/p_eps1.png")
    code, _, err = command("replay", "a/b/manifest.csv")
    assert code == 1
    assert "p_eps1.png: is no file" in err


# --- a full disk, and the end of the process -------------------------------------------------------------------------


def assert_whole(folder):
    from clipaware._media import read

    for path in Path(folder).rglob("*"):
        if path.is_file() and path.name[0] != "." and path.suffix != ".csv":
            assert read(path)


@pytest.mark.parametrize("limit", [1, 300, 900])
def test_a_disk_that_is_full(study, limit):
    """Files can have no more bytes than that: the pictures have about 900, and the manifest comes to more."""
    argv = [sys.executable, "-m", "clipaware.cli", "perturb", "p.png", "--out", "o", "--eps", "1", "--repeats", "5"]

    def small():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(argv, capture_output=True, text=True, preexec_fn=small, check=False)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "cannot" in done.stderr
    assert_whole("o")
    assert not [p for p in Path("o").rglob("*") if p.name.endswith(".part")]
    assert command(*argv[3:], "--resume")[0] == 0
    assert command("replay", "o/manifest.csv")[0] == 0


def test_a_process_that_is_killed(study):
    argv = ["perturb", "p.png", "--out", "o", "--eps", "1", "--repeats", "200"]
    delays = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "clipaware.cli", *argv, "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.readline()  # the header, with which work begins
        time.sleep(delays.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert_whole("o")
    assert command(*argv, "--resume")[0] == 0
    assert len(list(Path("o").glob("*.png"))) == 200
    assert command("replay", "o/manifest.csv")[0] == 0


# --- threads and processes --------------------------------------------------------------------------------------------


def test_many_threads_get_what_one_gets():
    from load.__main__ import run_threads

    counts, wrong = run_threads(16, 0.0, ["numpy"])
    assert wrong == []
    assert sum(counts.values()) >= 16


def test_after_an_error_no_more_is_begun():
    """And a thread that is still at work does not keep the next call from having the others."""
    ca.set_threads(3)
    begun, release = [], threading.Event()

    def work(piece):
        begun.append(piece)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        release.wait(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run(work, range(1000))
        assert len(begun) <= 3
        release.set()
        for future in threads._busy:
            future.result()
        assert len(begun) <= 3
        for _ in range(20):
            done = []
            threads.run(done.append, range(50))
            assert sorted(done) == list(range(50))
    finally:
        release.set()
        ca.set_threads(None)


def test_what_runs_apart():
    done = []
    threads.run_apart(lambda: done.append(threading.current_thread()))
    assert done[0] is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        threads.run_apart(lambda: 1 / 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("p", [1.5, 2, math.inf])
def test_steps_of_a_long_sample_are_counted_apart(monkeypatch, p):
    from clipaware import quantize

    x, delta = np.full((2, 300), 0.2), np.random.default_rng(0).standard_normal((2, 300)) * 1e-200
    here = ca.perturb_quantized(x, delta, 0.5, p=p)
    row, places = quantize._row, []

    def noted(*arguments):
        places.append(threading.current_thread())
        return row(*arguments)

    monkeypatch.setattr(quantize, "_row", noted)
    monkeypatch.setattr(quantize, "LONG", 300)
    np.testing.assert_array_equal(ca.perturb_quantized(x, delta, 0.5, p=p), here)
    assert len(places) == 2
    assert threading.main_thread() not in places


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
import clipaware as ca
from clipaware._kernels import numba
small = np.full((2, 9), .5), np.ones((2, 9))
wanted = ca.perturb(*small, .3)
launch, begun = numba.launch, threading.Event()
def slow(*arguments):  # as if each compiled call took long
    begun.set()
    time.sleep(.2)
    return launch(*arguments)
numba.launch = slow
def interrupt():
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
ca.set_threads(int(sys.argv[1]))
x = np.full((1, 2**23), .5, np.float32)
try:
    ca.perturb(x, np.broadcast_to(np.float32(.3), x.shape).copy(), 1.0)
except KeyboardInterrupt:
    numba.launch = launch
    assert np.array_equal(ca.perturb(*small, .3), wanted)
    print("interrupted")
"""

SHUTDOWN = """
import threading
import numpy as np
import clipaware as ca
x, delta = np.full((64, 20000), .5), np.random.default_rng(0).standard_normal((64, 20000))
begun = threading.Event()
def work():
    while True:
        ca.perturb(x, delta, 3.0, p=1.5)
        begun.set()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("number", ["1", "2"])
def test_ctrl_c_in_a_long_row(number):
    pytest.importorskip("numba", reason="Numba is not installed")
    argv = [sys.executable, "-c", INTERRUPTED, number]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


@pytest.mark.parametrize("number", [1, 2])
def test_no_compiled_call_is_long(number, monkeypatch):
    """Between two of them Ctrl-C is heard."""
    pytest.importorskip("numba", reason="Numba is not installed")
    from clipaware._kernels import numba
    from clipaware._kernels.formats import GIVE, TAKE
    from clipaware._kernels.loops import FRAME
    from clipaware._kernels.sweeps import FIRST_SAMPLE, SAMPLE

    assert not {TAKE, GIVE} & {FIRST_SAMPLE, SAMPLE}  # conversions are of all parts

    launch, sizes = numba.launch, []

    def launched(kernel, *arguments):
        if kernel is numba.solve_rows:
            sizes.append((arguments[-1] - arguments[-2]) * arguments[2].shape[1] // 4)
        elif arguments[0] not in (FIRST_SAMPLE, SAMPLE):  # a sweep over a part of a long row, which its frame describes
            sizes.append(int(np.frombuffer(ctypes.string_at(arguments[2], FRAME.itemsize), FRAME)["n"][0]))
        return launch(kernel, *arguments)

    monkeypatch.setattr(numba, "launch", launched)
    ca.set_threads(number)
    try:
        for shape, dtype in (((1, 2**23), np.float32), ((1, 2**23), np.float16), ((400, 10**4), np.float32)):
            ca.perturb(np.full(shape, 0.5, dtype), np.full(shape, 0.3, dtype), 1.0)
            assert len(sizes) > 5
            assert max(sizes) < 2**20 + 2**14
            sizes.clear()
    finally:
        ca.set_threads(None)


def test_the_end_of_the_interpreter_during_calls():
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", SHUTDOWN], capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Noisy:
    """A data set whose samples have noise, made in a loader's workers."""

    def __len__(self):
        return 8

    def __getitem__(self, k):
        import torch

        from clipaware.noise import AddNoise

        return AddNoise("gaussian", 1.0, seed=k)(torch.full((1, 3, 16, 16), 0.5))[0]


@pytest.mark.parametrize("how", ["fork", *in_test_all("spawn")])
def test_workers_of_a_loader(how):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    Noisy()[0]  # before there are others
    loader = torch.utils.data.DataLoader(Noisy(), 4, num_workers=2, multiprocessing_context=how)
    found = torch.cat(list(loader))
    torch.testing.assert_close((found - 0.5).flatten(1).norm(dim=1), torch.ones(8), rtol=3e-7, atol=0)
    assert len({float(sample.sum()) for sample in found}) == 8  # each worker has its own
    torch.testing.assert_close((Noisy()[0] - 0.5).norm(), torch.tensor(1.0), rtol=3e-7, atol=0)


def test_caches_do_not_grow():
    """Of what is made for shapes, orders and bounds: thousands of them leave as many as fit."""
    from load.__main__ import small_calls

    call = small_calls(["numpy"])["another shape, order and bounds"]
    for k in range(2000):
        call(k)
    from clipaware._backends import numpy as host

    caches = [host._number, host._name]
    if host.kernels() is not None:
        caches.append(host.kernels().rules_for)
    for cache in caches:
        assert cache.cache_info().maxsize is not None
        assert cache.cache_info().currsize <= 256
