"""Noise as a layer of Keras, on whichever of its backends."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from clipaware import noise


@keras.saving.register_keras_serializable(package="clipaware")
class AddNoise(keras.layers.Layer, noise.AddNoise):  # type: ignore[misc]
    """``clipaware.noise.AddNoise`` as a layer that does nothing but while training."""

    def __init__(
        self,
        kind: str,
        eps: float | tuple[float, float],
        *,
        p: float = 2,
        bounds: tuple[Any, Any] = (0, 1),
        seed: int | None = None,
        axis: Any = "auto",
        framework: str = "keras",
        **options: Any,
    ) -> None:
        keras.layers.Layer.__init__(self, **options)
        axis = "batch" if axis == "auto" else axis
        noise.AddNoise.__init__(self, kind, eps, p=p, bounds=bounds, seed=seed, axis=axis)
        # Its state is a variable, which is also another one in every step of a compiled loop.
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        seed = self.seed_generator.next()
        if keras.config.backend() == "torch":
            # Mixed, since PyTorch's generator looks at 32 bits of it alone.
            state = np.random.SeedSequence([int(part) for part in seed])
            seed = int(state.generate_state(1, np.uint64)[0])
        return noise.AddNoise.__call__(self, x, seed=seed)

    def get_config(self) -> dict[str, Any]:
        bounds = [None if b is None else np.asarray(b, float).tolist() for b in self.bounds]
        own = {"kind": self.kind, "eps": self.eps, "p": self.p, "bounds": bounds, "seed": self.seed, "axis": self.axis}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AddNoise:
        lower, upper = (np.asarray(b) if isinstance(b, list) else b for b in config["bounds"])
        eps = config["eps"]
        return cls(**{**config, "bounds": (lower, upper), "eps": tuple(eps) if isinstance(eps, list) else eps})
