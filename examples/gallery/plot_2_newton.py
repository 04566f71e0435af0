r"""
The curve, and Newton's path on it
==================================

As a function of :math:`t = \eta^p`, the :math:`p`-th power of the norm after clipping,

.. math:: f(t) = \sum_i \min(|\delta_i|^p\, t,\; s_i^p),

is concave and piecewise linear: every element goes along a line until it meets its bound. Newton's method follows the
piece it is on to the height :math:`\varepsilon^p`, which never overshoots, and from the piece that holds the root it
lands on the root.
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import clipaware as ca

delta = np.array([3.0, 2.2, 1.5, 1.0, 0.7, 0.5])
room = np.array([0.35, 0.5, 0.3, 0.45, 0.6, 0.4])  # up to the upper bound, which is 1
x = 1 - room
p = 2
eps = 0.93 * float(ca.reach(x, delta)[0])

# %%
# Newton's steps, as they are on the page about the mathematics: with C the part of the norm that is clipped and A the
# slope of the rest, :math:`t \leftarrow (\varepsilon^p - C)/A`.

path = [0.0]
while True:
    clipped = path[-1] * delta**p >= room**p
    t = (eps**p - np.sum(room[clipped] ** p)) / np.sum(delta[~clipped] ** p)
    if t <= path[-1]:
        break
    path.append(t)
print("eta by step:", np.round(np.array(path) ** (1 / p), 4))
print("rescale:    ", ca.rescale(x, delta, eps).round(4))

# %%
# Each vertical line is a breakpoint, where one more element is clipped. The first step is naive scaling.


def f(t):
    return np.minimum(np.multiply.outer(t, delta**p), room**p).sum(-1)


kinks = np.sort((room / delta) ** p)
t = np.unique(np.concatenate([np.linspace(0, 1.25 * path[-1], 200), kinks[kinks < 1.25 * path[-1]]]))
figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
for kink in kinks[kinks < t[-1]]:
    axis.axvline(kink, color="0.9", zorder=0)
axis.axhline(eps**p, color="0.5", linestyle=":")
axis.text(t[-1], eps**p, r"$\varepsilon^p$", va="bottom", ha="right", color="0.3")
axis.plot(t, f(t), color="tab:blue", linewidth=2.5, label=r"$f(t)$, the norm after clipping, to the power $p$")
for step, (here, there) in enumerate(pairwise(path)):
    label = {"label": "Newton: along the piece, to the height"} if step == 0 else {}
    axis.plot([here, there], [f(here), eps**p], color="tab:red", linewidth=1.2, **label)
    axis.plot([there, there], [eps**p, f(there)], color="tab:red", linewidth=0.8, linestyle="--")
    axis.plot(there, f(there), "o", color="tab:red", markersize=5)
axis.annotate("naive scaling", (path[1], f(path[1])), (path[1] + 0.04 * t[-1], f(path[1]) - 0.09), color="tab:red")
axis.annotate("the solution", (path[-1], eps**p), (path[-1], eps**p + 0.06), color="tab:blue", ha="center")
axis.set(xlabel=r"$t = \eta^p$", xlim=(0, t[-1]), ylim=(0, 1.2 * eps**p))
axis.legend(frameon=False, loc="lower right")
axis.spines[["top", "right"]].set_visible(False)
plt.show()
