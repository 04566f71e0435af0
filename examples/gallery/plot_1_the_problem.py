"""
The problem in one figure
=========================

Noise is scaled to a norm, added to a picture, and clipped to the range of pixels. Clipping takes some of it away, so
the picture has less noise than was asked for. :func:`clipaware.perturb` finds the scale that is right after clipping.
"""

# %%
# A photograph with values in [0, 1], and Gaussian noise.

from importlib.resources import as_file, files

import matplotlib.pyplot as plt
import numpy as np

import clipaware as ca

with as_file(files("clipaware") / "data" / "coffee.jpg") as path:
    x = plt.imread(path).astype(np.float32) / 255
noise = np.random.default_rng(0).standard_normal(x.shape, np.float32)
eps = 160.0

# %%
# Scaled naively, and exactly. ``axis=None`` says that the whole array is one sample.

naive = np.clip(x + eps / np.linalg.norm(noise) * noise, 0, 1)
exact = ca.perturb(x, noise, eps, axis=None)
for name, v in (("naive", naive), ("exact", exact)):
    print(f"{name}: asked {eps:g}, delivered {np.linalg.norm((v - x).astype(float)):.4f}")

# %%
# The same for many sizes at once: a batch of the same picture, with one eps per sample.

reach = float(ca.reach(x, noise, axis=None).item())
asked = np.linspace(0, 1.15 * reach, 24)
batch = (len(asked), *x.shape)
report = ca.report(np.broadcast_to(x, batch), np.broadcast_to(noise, batch), asked)

figure, axes = plt.subplots(2, 2, figsize=(9.6, 6.4), layout="constrained")
delivered = np.linalg.norm(naive - x)
for axis, picture, title in zip(
    (axes[0, 0], axes[1, 0], axes[1, 1]),
    (x, naive, exact),
    ("the photograph", f"naive: asked {eps:g}, got {delivered:.1f}", f"clipaware: asked {eps:g}, got {eps:.1f}"),
    strict=True,
):
    axis.imshow(picture)
    axis.set_title(title)
    axis.set_axis_off()
plot = axes[0, 1]
plot.axhline(reach, color="0.7", linewidth=1)
plot.text(0, reach, "everything clipped", color="0.4", va="top")
plot.plot(asked, report.naive_norm.ravel(), color="tab:red", label="naive")
plot.plot(asked, report.norm.ravel(), color="tab:blue", label="clipaware")
plot.plot([eps, eps], [delivered, eps], "o", color="0.2", markersize=4)
plot.annotate(f"{100 * (1 - delivered / eps):.0f}% lost", (eps, (eps + delivered) / 2), (1.1 * eps, 0.72 * eps))
plot.set(xlabel="norm asked for", ylabel="norm delivered", ylim=(0, 1.05 * reach))
plot.legend(frameon=False, loc="lower right")
plot.spines[["top", "right"]].set_visible(False)
plt.show()
