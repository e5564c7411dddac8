"""Recent and FreshVersions: rather the newer rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmbuf import shield
from mmbuf.arguments import number
from mmbuf.errors import EmptyBufferError
from mmbuf.sampling.derived import Derived, Fifo, Follower, blocks
from mmbuf.sampling.draw import Draw, Sampler, Sight, column_of, flat, numbers_of
from mmbuf.schema import Array, Path

_VERSIONS: Path = ("versions",)
_BLOCK_ROWS = 1 << 18


class Recent(Sampler):
    """Rows with replacement, the newest most often: the weight halves every ``half_life`` rows.

    The age of a row is the number of rows that were added after it. It comes from a logarithm,
    which another kind of processor may round otherwise: equal seeds give equal batches on one kind.
    """

    def __init__(self, half_life: float) -> None:
        super().__init__()
        half_life = number("half_life", half_life)
        if not 0 < half_life < np.inf:
            raise ValueError(
                f"half_life: expected a finite number of rows above 0, got {half_life}."
            )
        self.half_life = half_life

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        num_rows = view.high - view.low
        # The geometric distribution of ages, cut off at the window's end, by its inverse.
        share = -np.expm1(-num_rows / self.half_life * np.log(2))
        ages = -self.half_life * np.log1p(-generator.random(num_chunks) * share) / np.log(2)
        rows = view.high - 1 - np.minimum(ages.astype(np.int64), num_rows - 1)
        return Draw(rows)


class FreshVersions(Follower):
    """Rows whose ``versions`` lag at most ``max_lag`` behind the newest one of the window.

    Uniform with replacement over these. Where a row has several versions its oldest counts.
    `get_stats` counts the rows that are left out, by version.
    """

    def __init__(self, max_lag: float) -> None:
        super().__init__()
        max_lag = number("max_lag", max_lag)
        if not max_lag >= 0:
            raise ValueError(f"max_lag: expected at least 0, got {max_lag}.")
        self.max_lag = max_lag
        self._runs = _VersionRuns()
        self._excluded: dict[float, int] = {}

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        firsts, counts = self._known(sight)
        draws = generator.integers(0, counts[-1], num_chunks)
        chosen = counts.searchsorted(draws, "right")
        return Draw(firsts[chosen] + draws)

    def _see(self, sight: Sight) -> tuple[Array, Array]:
        """Of each fresh run what is added to a draw of all fresh rows for its row, and the counts.

        Cumulative, of their rows.
        """
        runs = self._runs
        runs.follow(sight)
        versions, lengths = runs.versions.live, runs.lengths.live
        is_fresh = versions >= np.fmax.reduce(versions) - self.max_lag
        if not is_fresh.any():
            raise EmptyBufferError("sample: expected versions that are numbers, got NaN only.")
        counts = lengths[is_fresh].cumsum()
        firsts = runs.firsts.live[is_fresh] + sight.view.low - runs.num_dropped_rows
        stale, inverse = np.unique(versions[~is_fresh], return_inverse=True)
        num_rows = np.bincount(inverse, lengths[~is_fresh], len(stale)).astype(np.int64)
        self._excluded = dict(zip(stale.tolist(), num_rows.tolist(), strict=True))
        return firsts - (counts - lengths[is_fresh]), counts

    def get_stats(self) -> dict[str, Any]:
        """``excluded_versions``: the rows of each version that the last draw left out."""
        return {"excluded_versions": dict(self._excluded)}


class _VersionRuns(Derived):
    """Stretches of consecutive rows of one version."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts, self.lengths = Fifo(np.int64), Fifo(np.int64)  # ordinals, rows
        self.versions = Fifo(np.float64)
        self._counts = Fifo(np.int64)  # runs of each slot

    def _clear(self) -> None:
        for fifo in (self.firsts, self.lengths, self.versions, self._counts):
            fifo.clear()

    def _drop(self, num_slots: int, num_rows: int) -> None:
        count = int(self._counts.live[:num_slots].sum())
        for fifo in (self.firsts, self.lengths, self.versions):
            fifo.drop(count)
        self._counts.drop(num_slots)

    def _add(self, sight: Sight, first: int, lengths: Array) -> None:
        column = column_of(sight, _VERSIONS, "FreshVersions")
        for block in blocks(lengths, _BLOCK_ROWS):
            shield.check()
            low = int(sight.view.starts[first + block.start])
            num_rows = int(lengths[block].sum())
            (found,) = sight.read([_VERSIONS], np.arange(low, low + num_rows))
            versions = flat(numbers_of(column, found)).min(axis=1).astype(np.float64)
            begins = np.cumsum(lengths[block]) - lengths[block]
            is_first = np.empty(num_rows, np.bool_)
            is_first[0] = True
            np.not_equal(versions[1:], versions[:-1], out=is_first[1:])
            is_first[begins] = True  # runs leave with their slots
            firsts = is_first.nonzero()[0]
            self.firsts.extend(firsts + self.num_dropped_rows + low - sight.view.low)
            self.lengths.extend(np.diff(firsts, append=num_rows))
            self.versions.extend(versions[firsts])
            slots = np.searchsorted(begins, firsts, "right") - 1
            self._counts.extend(np.bincount(slots, minlength=len(begins)))
