"""
How much noise a classifier takes
=================================

A linear classifier of 8 x 8 digits, and the noise at which it errs. Naive scaling delivers less than the eps on the
axis, so the classifier looks more robust than it is.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from clipaware.attacks import noise_attack, noise_robustness
from clipaware.noise import sample

x, labels = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32)
fitted = LogisticRegression(max_iter=300).fit(x[:1200], labels[:1200])
weights, offset = fitted.coef_.T.astype(np.float32), fitted.intercept_.astype(np.float32)
x, labels = x[1200:], labels[1200:]


def model(batch):
    return batch @ weights + offset


# %%
# Any function from a batch to scores is a model. Below, noise of several sizes, exact by
# :func:`clipaware.attacks.noise_attack` and naive for comparison.

sizes = np.linspace(0.25, 4, 16)
noise = sample("gaussian", x, seed=0)
directions = noise / np.linalg.norm(noise, axis=1, keepdims=True)
wrong = {"naive": [], "exact": []}
delivered = []
for eps in sizes:
    v = np.clip(x + np.float32(eps) * directions, 0, 1)
    delivered.append(np.linalg.norm(v - x, axis=1).mean())
    wrong["naive"].append(np.mean(model(v).argmax(1) != labels))
    wrong["exact"].append(noise_attack(model, x, labels, eps, repeats=1, seed=0).success.mean())

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
left.plot(sizes, sizes, color="0.6", linestyle=":", label="asked")
left.plot(sizes, delivered, color="tab:red", label="naive")
left.set(xlabel="eps", ylabel="mean norm delivered", title="what naive scaling delivers")
for (name, errors), colour in zip(wrong.items(), ("tab:red", "tab:blue"), strict=True):
    right.plot(sizes, 100 * np.array(errors), color=colour, label=name)
right.set(xlabel="eps", ylabel="errors, percent", title="errors under Gaussian noise")
for axis in (left, right):
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# :func:`clipaware.attacks.noise_robustness` finds the least norm for each digit, by bisection along each direction.

robustness = noise_robustness(model, x[:100], labels[:100], repeats=3, seed=0)
print(f"half of the digits fall to noise of norm {robustness.median:.2f}")
robustness.plot()
plt.show()
