"""Slices: sequences of consecutive steps of one environment inside one episode."""

from __future__ import annotations

import numpy as np

from mmbuf.arguments import key_name, whole
from mmbuf.batch import check_room
from mmbuf.errors import EmptyBufferError
from mmbuf.roles import Told
from mmbuf.sampling.derived import Follower
from mmbuf.sampling.draw import Draw, Sight
from mmbuf.sampling.episodes import Episodes
from mmbuf.schema import Array


class Slices(Follower):
    """``num_chunks`` sequences of ``length`` consecutive steps: batches ``[K, L, ...]``.

    Each is of one environment and inside one episode; every step that a whole sequence can start at
    is equally likely. ``pad``: shorter episodes can be drawn too, as often as one start; their
    last step is repeated, and ``batch["mask"]``, bool ``[K, L]``, is False there. Else they never
    are, and where there is no other EmptyBufferError is raised. ``mask`` is the name of that key,
    ``roles`` says which columns are the flags of ends, see `mmbuf.roles`.
    """

    num_dims = 2

    def __init__(
        self, length: int, pad: bool = False, *, roles: Told | None = None, mask: str = "mask"
    ) -> None:
        super().__init__()
        self.length = whole("length", length, 1)
        self.pad = pad
        self.mask = key_name("mask", mask)
        self._episodes = Episodes(roles)

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        check_room(sight.schema, num_chunks * self.length)
        table, counts, base, num_dropped_rows = self._known(sight)
        num_starts = int(counts[-1]) - base
        if not num_starts:
            raise EmptyBufferError(
                f"sample: expected episodes of {self.length} steps or more, got none. "
                f"Use a smaller length, or pad=True."
            )
        draws = generator.integers(base, base + num_starts, num_chunks)
        chosen = counts.searchsorted(draws, "right")
        firsts, num_steps, strides = table.take(chosen, 0).T
        # From the last start of its episode back, as the counts run up to there.
        starts = np.maximum(num_steps - self.length + 1, int(self.pad)) + draws - counts[chosen]
        firsts = firsts + starts * strides + (sight.view.low - num_dropped_rows)
        steps = np.arange(self.length)
        shape = (num_chunks, self.length)
        if not self.pad:
            return Draw((firsts[:, None] + strides[:, None] * steps).reshape(-1), shape)
        mask = steps < num_steps[:, None]
        steps = np.minimum(steps, num_steps[:, None] - 1)
        return Draw(
            (firsts[:, None] + strides[:, None] * steps).reshape(-1),
            shape,
            added={self.mask: mask},
        )

    def _see(self, sight: Sight) -> tuple[Array, Array, int, int]:
        """The episodes, where slices may start, and `Derived.num_dropped_rows`."""
        episodes = self._episodes
        episodes.follow(sight)
        counts, base = episodes.starts(self.length, pad=self.pad)
        return episodes.table, counts, base, episodes.num_dropped_rows
