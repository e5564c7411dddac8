"""SumTree: numbers that are drawn in proportion to their size.

Each node is the sum of `FANOUT` below it, so a draw goes down few levels, all draws of a batch at
once. A changed leaf makes its nodes be summed anew from below, never adjusted by a difference:
rounding does not add up.
"""

from __future__ import annotations

import numpy as np

from mmbuf.schema import Array

FANOUT = 32


class SumTree:
    """``size`` leaves, float64 and 0 to begin with. For one thread at a time."""

    def __init__(self, size: int) -> None:
        num_levels = 1
        while FANOUT**num_levels < size:
            num_levels += 1
        # From the leaves up; the last one has FANOUT nodes at most.
        self._levels = [np.zeros(FANOUT ** (num_levels - i)) for i in range(num_levels)]
        self._size = size

    @property
    def total(self) -> float:
        return float(self._levels[-1].sum())

    @property
    def leaves(self) -> Array:
        """A view; change it by `set` and `fill` only."""
        return self._levels[0][: self._size]

    def set(self, indices: Array, values: Array) -> None:
        """Change these leaves; of equal indices the last one holds."""
        self._levels[0][indices] = values
        nodes = indices
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            nodes = nodes // FANOUT
            level[nodes] = below.reshape(-1, FANOUT).take(nodes, 0).sum(1)

    def fill(self, start: int, values: Array | float, stop: int) -> None:
        """Change the leaves of ``[start, stop)``."""
        if start == stop:
            return
        self._levels[0][start:stop] = values
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start // FANOUT, -(-stop // FANOUT)
            level[start:stop] = below.reshape(-1, FANOUT)[start:stop].sum(1)

    def find(self, sums: Array) -> Array:
        """The leaf within which the running sum of all leaves reaches each of ``sums``.

        Of ``[0, total)``. A leaf of 0 is never found.
        """
        sums = sums.copy()
        nodes = np.zeros(len(sums), np.int64)
        for level in reversed(self._levels):
            children = level.reshape(-1, FANOUT).take(nodes, 0)
            running = children.cumsum(1)
            # Rounding may leave a little more than all children hold: the last that holds anything.
            np.minimum(sums, np.nextafter(running[:, -1], 0), out=sums)
            child = (running <= sums[:, None]).sum(1)
            at = np.arange(len(nodes)), child
            sums -= running[at] - children[at]
            np.maximum(sums, 0, out=sums)
            nodes = nodes * FANOUT + child
        return nodes
