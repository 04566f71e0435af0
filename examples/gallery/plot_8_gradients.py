"""
Gradients through the rescaling
===============================

The scale depends on the direction: lengthen one element of it, and all others get shorter, or meet their bounds later.
The gradient of :func:`clipaware.perturb` knows that. A gradient that takes the scale for a constant does not.
"""

import matplotlib.pyplot as plt
import torch

import clipaware as ca

torch.manual_seed(0)
x = torch.rand(1, 60, dtype=torch.float64)
delta = torch.randn(1, 60, dtype=torch.float64)
weights = torch.randn(1, 60, dtype=torch.float64) + 0.5 * delta.sign()
eps = 2.5


def loss(v):
    return (weights * v).sum()


def exact(delta):
    return loss(ca.perturb(x, delta, eps))


def constant(delta):
    eta = ca.rescale(x, delta, eps).detach()
    return loss((x + eta * delta).clamp(0, 1))


# %%
# Differences, one element of delta at a time, are what both should agree with.

steps = 1e-6 * torch.eye(60, dtype=torch.float64)
differences = torch.stack([(exact(delta + h) - exact(delta - h)) / 2e-6 for h in steps])

gradients = {}
for name, function in (("scale held constant", constant), ("clipaware", exact)):
    argument = delta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(argument), argument)
    gradients[name] = gradient[0]
    print(f"{name}: largest deviation {(gradient[0] - differences).abs().max():.1e}")

# %%
# The scale itself, and its derivative in eps: every kink is one more element at its bound.

reach = ca.reach(x, delta).item()
sizes = torch.linspace(0.02, 0.995 * reach, 200, dtype=torch.float64, requires_grad=True)
eta = ca.rescale(x.expand(200, -1), delta.expand(200, -1), sizes)[:, 0]
(slope,) = torch.autograd.grad(eta.sum(), sizes)

# %%
# Left, a point for each element of delta; right, both against eps.

figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
ends = [differences.min(), differences.max()]
left.plot(ends, ends, color="0.6", linestyle=":")
for (name, gradient), colour in zip(gradients.items(), ("tab:red", "tab:blue"), strict=True):
    left.plot(differences, gradient, "o", color=colour, label=name, markersize=4)
left.set(xlabel="by differences", ylabel="by autograd", title="gradient in delta")
right.semilogy(sizes.detach(), eta.detach(), color="tab:blue", label=r"$\eta$")
right.semilogy(sizes.detach(), slope, color="tab:green", label=r"$\partial\eta/\partial\varepsilon$")
right.axvline(reach, color="0.6", linestyle=":")
right.text(reach, eta[0].item(), "reach ", ha="right", color="0.4")
right.set(xlabel=r"$\varepsilon$", title="the scale and its derivative")
for axis in (left, right):
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()
