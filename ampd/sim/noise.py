"""Noise: work that takes now more, now less than its cost."""

from __future__ import annotations

import random
from math import exp


class Noise:
    """Factors of mean 1, lognormal; `sigma` is that of their logarithm. 0: always 1. A function
    of the seed and of how many were drawn."""

    __slots__ = ("_rng", "_sigma")

    def __init__(self, sigma: float, seed: str) -> None:
        self._sigma = sigma
        self._rng = random.Random(seed)  # noqa: S311 - a model, not a secret

    def factor(self) -> float:
        """The next one."""
        sigma = self._sigma
        return exp(self._rng.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0
