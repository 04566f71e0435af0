"""
Contrast as saved
=================

A noise stimulus has the contrast of the file that is shown, after clipping and after rounding to 8 bits. Below, noise
of a given RMS contrast on a picture, and what is left of it.
"""

from importlib.resources import as_file, files

import matplotlib.pyplot as plt
import numpy as np

import clipaware as ca
from clipaware.noise import sample
from clipaware.targets import eps_from_contrast

with as_file(files("clipaware") / "data" / "coffee.jpg") as path:
    grey = plt.imread(path)[40:240, 100:320].mean(axis=-1)
x = np.rint(grey) / 255  # on the grid of 8 bits
noise = sample("pink", x, seed=0)


def contrast(v):
    return np.sqrt(np.mean((v - x) ** 2)) / x.mean()


# %%
# ``perturb_quantized`` returns what the file will hold: ``np.rint(255 * v)`` loses nothing.

asked = np.array([0.02, 0.1, 0.3, 0.6])
figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
for axis, wanted in zip(axes, asked, strict=True):
    eps = eps_from_contrast(x, wanted, axis=None).item()
    naive = np.rint(255 * np.clip(x + eps / np.linalg.norm(noise) * noise, 0, 1)) / 255
    v = ca.perturb_quantized(x, noise, eps, axis=None)
    print(f"asked {wanted:.3f}: naive {contrast(naive):.6f}, clipaware {contrast(v):.6f}")
    axis.imshow(v, cmap="gray", vmin=0, vmax=1)
    axis.set_title(f"contrast {contrast(v):.4f}\n(naive: {contrast(naive):.4f})")
    axis.set_axis_off()
plt.show()
