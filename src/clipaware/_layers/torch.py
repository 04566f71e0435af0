"""Noise as a ``torch.nn.Module``."""

from __future__ import annotations

from typing import Any

import torch

from clipaware import noise


class AddNoise(torch.nn.Module, noise.AddNoise):
    """``clipaware.noise.AddNoise`` with a mode for training and one for evaluation, in which it does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        noise.AddNoise.__init__(self, *args, **options)

    def forward(self, x: torch.Tensor, *, seed: Any = None) -> torch.Tensor:
        return noise.AddNoise.__call__(self, x, seed=seed) if self.training else x

    def extra_repr(self) -> str:
        return f"{self.kind!r}, eps={self.eps}, p={self.p}, seed={self.seed}"
