"""Uniform: rows with replacement."""

from __future__ import annotations

import numpy as np

from mmbuf.sampling.draw import Draw, Sampler, Sight
from mmbuf.schema import Array


def uniform(generator: np.random.Generator, num_chunks: int, low: int, high: int) -> Array:
    """``num_chunks`` row numbers of ``[low, high)``, uniform with replacement; int64 ``[K]``.

    Uniform over rows, so a longer trajectory is drawn more often. Thread-safe, as the generator's
    own lock makes each call whole.
    """
    return generator.integers(low, high, num_chunks)


class Uniform(Sampler):
    """Rows of the window, uniform with replacement: a longer trajectory is drawn more often."""

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        return Draw(uniform(generator, num_chunks, sight.view.low, sight.view.high))
