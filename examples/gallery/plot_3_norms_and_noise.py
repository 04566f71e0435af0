"""
Seven kinds of noise, one size
==============================

:func:`clipaware.noise.sample` draws a direction, :func:`clipaware.perturb` gives it its size. All pictures below
differ from the photograph by an L2 norm of 60, and no two of them look alike.
"""

from importlib.resources import as_file, files

import matplotlib.pyplot as plt
import numpy as np

import clipaware as ca
from clipaware.noise import KINDS, sample

with as_file(files("clipaware") / "data" / "coffee.jpg") as path:
    x = plt.imread(path)[40:240, 100:320].astype(np.float32) / 255
eps = 60.0

figure, axes = plt.subplots(2, 4, figsize=(12, 6), layout="constrained")
axes[0, 0].imshow(x)
axes[0, 0].set_title("the photograph")
for axis, kind in zip(axes.flat[1:], KINDS, strict=True):
    noise = sample(kind, x, seed=0)
    report = ca.report(x, noise, eps, axis=None)
    axis.imshow(ca.perturb(x, noise, eps, axis=None))
    axis.set_title(f"{kind}\nnaive scaling: {report.naive_norm.item():.1f}")
for axis in axes.flat:
    axis.set_axis_off()
plt.show()

# %%
# The size may be that of any norm. Here the same Gaussian noise has a mean absolute change (p = 1), a root mean square
# (p = 2) and a largest change (p = inf) of 0.2 each.

noise = sample("gaussian", x, seed=0)
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for axis, p, root in zip(axes, (1, 2, np.inf), (x.size, x.size**0.5, 1), strict=True):
    v = ca.perturb(x, noise, 0.2 * root, p=p, axis=None)
    axis.imshow(v)
    moved = np.abs(v - x)
    axis.set_title(f"p = {p}: mean {moved.mean():.3f}, RMS {np.sqrt((moved**2).mean()):.3f}, most {moved.max():.3f}")
    axis.set_axis_off()
plt.show()
