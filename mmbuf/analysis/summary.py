"""Summaries: of each column and of the episodes of each model version, in one pass over a store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mmbuf.analysis.episodes import OPEN, Episodes
from mmbuf.analysis.rows import TrajectoryRows, decoded
from mmbuf.analysis.tables import Tables
from mmbuf.schema import Array

_BLOCK = 1 << 18  # numbers that are summed at once: some MiB of doubles


@dataclass
class ColumnSummary:
    """Of all numbers of a column; ``std`` is that of the population.

    ``min``, ``mean``, ``std`` and ``max`` are those of the finite ones, None where there are none.
    A bool counts as 0 or 1, a complex number as two.
    """

    num_finite: int = 0
    min: float | None = None
    mean: float | None = None
    std: float | None = None
    max: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    _squares: float = field(default=0.0, repr=False)  # sum of squared distances from the mean

    def add(self, values: Array) -> None:
        """Take in ``values``, numbers of any shape."""
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # squares of the largest doubles
            for start in range(0, flat.size, _BLOCK):
                self._add_block(flat[start : start + _BLOCK])

    def _add_block(self, block: Array) -> None:
        if block.dtype.kind == "f":
            num_nan = int(np.isnan(block).sum())
            is_finite = np.isfinite(block)
            self.num_nan += num_nan
            self.num_inf += int(block.size - is_finite.sum()) - num_nan
            block = block[is_finite]
        if not block.size:
            return
        low, high = float(block.min()), float(block.max())
        self.min = low if self.min is None else min(low, self.min)
        self.max = high if self.max is None else max(high, self.max)
        # Chan's: two means and sums of squares joined lose no digits, as sums of all would.
        doubles = block.astype(np.float64)
        mean = float(doubles.mean())
        squares = float(np.square(doubles - mean).sum())
        total = self.num_finite + block.size
        apart = mean - (self.mean or 0.0)
        self._squares += squares + apart * apart * self.num_finite * block.size / total
        self.mean = (self.mean or 0.0) + apart * block.size / total
        self.num_finite = total
        self.std = math.sqrt(self._squares / total)


@dataclass(frozen=True)
class Spread:
    """How numbers are distributed; None where there are none."""

    mean: float | None = None
    min: float | None = None
    p25: float | None = None
    median: float | None = None
    p75: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[Array]) -> Spread:
        """Of all in these arrays."""
        numbers = np.concatenate([np.empty(0), *values])
        if not numbers.size:
            return cls()
        with np.errstate(invalid="ignore"):  # of infinite ones
            quantiles = np.quantile(numbers, (0, 0.25, 0.5, 0.75, 1)).tolist()
            return cls(float(numbers.mean()), *quantiles)


@dataclass(frozen=True)
class VersionSummary:
    """The episodes of one ``model_weights_id``.

    ``returns``, ``lengths`` and ``success_rate`` are of those that ended, and not by the end of
    their trajectory; of all where no column says where an episode ends. Of these, the returns of
    ``num_nan_returns``, which have a reward that is NaN, are left out.
    """

    num_trajectories: int
    num_rows: int
    num_episodes: int
    num_open: int
    returns: Spread
    lengths: Spread
    success_rate: float | None
    num_nan_returns: int = 0


@dataclass(frozen=True)
class Summary:
    """``columns`` by dotted name (text has none), ``versions`` by weights id, oldest first."""

    columns: dict[str, ColumnSummary]
    versions: dict[str, VersionSummary]


class _Version:
    """What is gathered of one version: a few numbers an episode."""

    def __init__(self) -> None:
        self.num_trajectories = self.num_rows = self.num_episodes = self.num_open = 0
        self.returns: list[Array] = []
        self.lengths: list[Array] = []
        self.successes: list[Array] = []

    def add(self, episodes: Episodes) -> None:
        is_open = episodes.ended_by == OPEN
        self.num_trajectories += 1
        self.num_rows += episodes.rows.num_rows
        self.num_episodes += len(episodes)
        self.num_open += int(is_open.sum())
        counted = ~is_open if episodes.roles.ends else np.ones_like(is_open)
        for found, values in (
            (self.returns, episodes.returns),
            (self.lengths, episodes.lengths),
            (self.successes, episodes.successes),
        ):
            if values is not None:
                found.append(values[counted])

    def summary(self) -> VersionSummary:
        returns = np.concatenate([np.empty(0), *self.returns])
        is_nan = np.isnan(returns)
        return VersionSummary(
            self.num_trajectories,
            self.num_rows,
            self.num_episodes,
            self.num_open,
            Spread.of([returns[~is_nan]]),
            Spread.of(self.lengths),
            Spread.of(self.successes).mean,
            int(is_nan.sum()),
        )


def summarize(tables: Tables) -> Summary:
    """Read all of the stores once, in memory for one trajectory and a few numbers an episode."""
    columns: dict[str, ColumnSummary] = {}
    versions: dict[str, _Version] = {}

    def read(rows: TrajectoryRows) -> None:
        parts = {
            column: rows.rows(position)
            for position, column in enumerate(rows.schema.columns)
            if column.row_bytes and not column.is_text
        }
        episodes = Episodes(rows, tables.roles)
        version = versions.setdefault(rows.entry.model_weights_id, _Version())
        version.add(episodes)  # first: what can not be read is counted nowhere
        for column, part in parts.items():
            summary = columns.setdefault(column.name, ColumnSummary())
            # In blocks, so that an image is not in memory twice.
            step = max(1, _BLOCK * column.storage.itemsize // column.row_bytes)
            for start in range(0, len(part), step):
                summary.add(decoded(column, part[start : start + step]))

    for _ in tables.read_each(read):
        pass
    return Summary(columns, {name: version.summary() for name, version in versions.items()})
