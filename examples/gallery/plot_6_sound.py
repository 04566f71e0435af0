"""
An SNR that is right in the file
================================

Speech in noise, mixed at a signal-to-noise ratio. Peaks beyond full scale are cut off, so the mix has an SNR that
nobody asked for. :func:`clipaware.targets.eps_from_snr` turns decibels into a norm, and
:func:`clipaware.perturb_quantized` delivers it, on the 16-bit grid of a WAV file.
"""

import matplotlib.pyplot as plt
import numpy as np

import clipaware as ca
from clipaware.targets import eps_from_snr

rate = 16_000
time = np.arange(2 * rate) / rate
syllables = np.sin(2 * np.pi * 1.5 * time) ** 2
speech = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in range(1, 12)) * syllables
x = np.rint(0.95 * speech / np.abs(speech).max() * 2**15) / 2**15  # 16-bit samples, nearly at full scale
noise = np.random.default_rng(0).standard_normal(x.size)
bounds = (-1.0, 1 - 2**-15)  # what 16-bit samples can be


def snr(v):
    return 10 * np.log10(np.sum(x**2) / np.sum((v - x) ** 2))


# %%
# Asked for, and delivered.

asked = np.arange(-6.0, 13.0, 1.0)
found = {"naive": [], "clipaware": []}
for decibels in asked:
    eps = eps_from_snr(x, decibels)
    mixed = np.clip(x + eps / np.linalg.norm(noise) * noise, *bounds)
    found["naive"].append(snr(np.rint(mixed * 2**15) / 2**15))
    found["clipaware"].append(snr(ca.perturb_quantized(x, noise, eps, levels=2**16, bounds=bounds)))
for decibels, naive, exact in list(zip(asked, *found.values(), strict=True))[::6]:
    print(f"asked {decibels:+5.1f} dB: naive {naive:+7.3f} dB, clipaware {exact:+10.6f} dB")

v = ca.perturb_quantized(x, noise, eps_from_snr(x, 0.0), levels=2**16, bounds=bounds)
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
left.plot(time, v, color="tab:blue", linewidth=0.4, label="mixed at 0 dB")
left.plot(time, x, color="0.3", linewidth=0.4, label="speech")
left.set(xlabel="seconds", ylabel="amplitude", ylim=(-1.15, 1.15), title="the mix, as saved")
for (name, delivered), colour in zip(found.items(), ("tab:red", "tab:blue"), strict=True):
    right.plot(asked, np.array(delivered) - asked, "o-", color=colour, label=name, markersize=4)
right.set(xlabel="SNR asked for, dB", ylabel="delivered less asked, dB", title="error of the SNR")
for axis in (left, right):
    axis.legend(frameon=False, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)
plt.show()
