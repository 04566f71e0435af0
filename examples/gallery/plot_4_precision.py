"""
What a dtype can hold
=====================

The array that you keep is rounded: to its dtype, or to the 256 levels of an 8-bit file. Rounding moves the norm.
:func:`clipaware.perturb` and :func:`clipaware.perturb_quantized` look for the scale whose *rounded* array has the norm
that is nearest to eps.
"""

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

import clipaware as ca

rng = np.random.default_rng(0)
wide = (rng.integers(0, 256, 3 * 64 * 64) / 255).astype(np.float64)
noise = rng.standard_normal(wide.size)
sizes = np.geomspace(1e-3, 20, 12)

# %%
# Three ways to the same eps. "eta alone" has the exact scale and rounds what it gives, "naive" has not even that.


def rounded(a, dtype):
    """To a dtype, or to the levels of 8 bits."""
    return np.rint(255 * a) / 255 if dtype == "8 bits" else a.astype(dtype)


def norm(v, x):
    return np.linalg.norm(v.astype(np.float64) - x.astype(np.float64))


def errors(dtype, eps):
    x, delta = rounded(wide, dtype), noise if dtype == "8 bits" else noise.astype(dtype)
    start, direction = x.astype(np.float64), delta.astype(np.float64)
    eta = ca.rescale(start, direction, eps)
    naive = np.clip(start + eps / np.linalg.norm(direction) * direction, 0, 1)
    ours = ca.perturb_quantized(x, delta, eps) if dtype == "8 bits" else ca.perturb(x, delta, eps)
    found = (rounded(naive, dtype), rounded(np.clip(start + eta * direction, 0, 1), dtype), ours)
    return [max(abs(norm(v, x) / eps - 1), 1e-17) for v in found]


dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "8 bits": "8 bits"}
figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharex=True, sharey=True)
for axis, (name, dtype) in zip(axes.flat, dtypes.items(), strict=True):
    found = np.array([errors(dtype, eps) for eps in sizes])
    styles = {"naive": ("^", "tab:red"), "eta alone": ("s", "tab:orange"), "clipaware": ("o", "tab:blue")}
    for column, (label, (marker, colour)) in zip(found.T, styles.items(), strict=True):
        axis.loglog(sizes, column, marker=marker, color=colour, label=label, markersize=4)
    axis.set(title=name, ylim=(1e-12, 2))
    axis.grid(alpha=0.3)
    print(f"{name:>8}: worst of clipaware from eps = 1 on: {found[sizes >= 1, 2].max():.1e}")
figure.supxlabel("eps asked for")
figure.supylabel("error of the norm, over eps")
axes[0, 0].legend(frameon=False)
plt.show()

# %%
# Where the curve of clipaware rises, eps is so small that hardly any element can move: the nearest norm on this ray is
# still far away. In 8 bits the least norm above 0 is 1/255.
