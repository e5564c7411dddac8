"""Which rows: pure functions of a generator and of the window's row numbers."""

from __future__ import annotations

import numpy as np

from mmbuf.schema import Array


def uniform(generator: np.random.Generator, num_chunks: int, low: int, high: int) -> Array:
    """``num_chunks`` row numbers of ``[low, high)``, uniform with replacement; int64 ``[K]``.

    Uniform over rows, so a longer trajectory is drawn more often. Thread-safe, as the generator's
    own lock makes each call whole.
    """
    return generator.integers(low, high, num_chunks)
