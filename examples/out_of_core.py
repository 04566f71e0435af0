"""One sample, larger than memory if you like, perturbed from Zarr to Zarr with a progress bar.

    python examples/out_of_core.py --elements 2.5e9 --folder /somewhere/with/room

makes two arrays of float32 numbers of that many elements, x and delta (10 GB each, 20 GB in all), and writes the third,
which differs from x by exactly a quarter of what is possible. None of them is ever in memory as a whole. What is there
already is used again. At the end, the norm is measured on disk. Needs dask, zarr and room for three such arrays.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import dask
import dask.array as da
from dask.diagnostics import ProgressBar

import clipaware as ca
from clipaware import noise


def made(folder: Path, elements: int, chunk: int) -> tuple[da.Array, da.Array]:
    """x, uniform, and delta, normal, as they are on disk."""
    for name in ("x", "delta"):
        path = folder / f"{name}-{elements}.zarr"
        if not path.exists():
            print(f"Writing {path}")
            x = da.random.default_rng(0).random((1, elements), dtype="float32", chunks=(1, chunk))
            (x if name == "x" else noise.sample("gaussian", x, seed=1)).to_zarr(str(path))
    x, delta = (da.from_zarr(str(folder / f"{name}-{elements}.zarr")) for name in ("x", "delta"))
    return x, delta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=2e7, help="of the sample (default: 2e7)")
    parser.add_argument("--chunk", type=float, default=2**22, help="elements of a chunk (default: 2**22, 16 MB)")
    parser.add_argument("--folder", type=Path, default=Path("out_of_core"), help="where arrays go")
    parser.add_argument("--threads", type=int, default=None, help="for Dask; all cores unless given")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    ca.set_threads(1)  # Dask has its own
    with ProgressBar(), dask.config.set(scheduler="threads", num_workers=args.threads):
        x, delta = made(args.folder, int(args.elements), int(args.chunk))
        eps = 0.25 * math.sqrt(x.size / 3)  # x is uniform: the room ahead has a mean square of 1/3
        out = args.folder / "v.zarr"
        start = time.perf_counter()
        ca.perturb(x, delta, eps).to_zarr(str(out), overwrite=True)
        print(f"Perturbed {x.nbytes / 1e9:.3g} GB in {time.perf_counter() - start:.1f} s")
        moved = da.from_zarr(str(out)).astype("float64") - x
        delivered = math.sqrt(float((moved**2).sum().compute()))
    off = abs(delivered / eps - 1)
    print(f"asked {eps:.6f}, delivered {delivered:.6f}, off by {off:.1e}")
    if off > 3e-7:
        raise SystemExit("which is more than float32 explains")


if __name__ == "__main__":
    main()
