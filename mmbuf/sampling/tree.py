"""SumTree: numbers that are drawn in proportion to their size.

Each node is the sum of `FANOUT` below it, so a draw goes down few levels, all draws of a batch at
once. A changed leaf makes its nodes be summed anew from below, never adjusted by a difference:
rounding does not add up.
"""

from __future__ import annotations

import numpy as np

from mmbuf.schema import Array

FANOUT = 32
_MAX_TOP = 4096  # nodes that are searched as one


class SumTree:
    """``size`` leaves, float64 and 0 to begin with. For one thread at a time."""

    def __init__(self, size: int) -> None:
        sizes = [-(-size // FANOUT) * FANOUT]
        while sizes[-1] > _MAX_TOP:
            sizes.append(-(-sizes[-1] // FANOUT**2) * FANOUT)
        # From the leaves up; all are whole rows of FANOUT.
        self._levels = [np.zeros(count) for count in sizes]
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
        """The leaf within which the running sum of all leaves reaches each of ``sums``; int64.

        ``sums`` are of ``[0, total)``. A leaf of 0 is never found.
        """
        top = self._levels[-1]
        running = top.cumsum()
        nodes, shares = _find(running, top, sums)
        for level in reversed(self._levels[:-1]):
            # The children of all nodes in one row, where each node's share is 1: so one search
            # finds all, and the small are as exact as the large.
            children = level.reshape(-1, FANOUT).take(nodes, 0)
            children /= children.sum(1)[:, None]
            running = children.reshape(-1).cumsum()
            ends = running[FANOUT - 1 :: FANOUT]
            begins = np.concatenate([[0.0], ends[:-1]])
            at, shares = _find(
                running, children.reshape(-1), begins + shares * (ends - begins), ends
            )
            nodes = nodes * FANOUT + at % FANOUT
        return nodes


def _find(
    running: Array, sizes: Array, sums: Array, ends: Array | None = None
) -> tuple[Array, Array]:
    """Where running sums first exceed ``sums``, and which share of that step is below them.

    ``ends``: what each of ``sums`` must stay below, whatever rounding has made of it.
    """
    sums = np.minimum(sums, np.nextafter(running[-1] if ends is None else ends, 0))
    found = running.searchsorted(sums, "right")
    steps = sizes[found]
    shares = (sums - (running[found] - steps)) / steps
    return found, np.clip(shares, 0.0, 1.0)
