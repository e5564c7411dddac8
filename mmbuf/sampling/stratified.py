"""Stratified: so many rows of each kind of trajectory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from mmbuf import shield
from mmbuf.arguments import number, text, told, whole
from mmbuf.entry import Entry
from mmbuf.errors import EmptyBufferError, SchemaError
from mmbuf.sampling.derived import Derived, Follower, blocks
from mmbuf.sampling.draw import Draw, Sight, flat
from mmbuf.schema import Array, Column

_ATTRIBUTES = ("model_weights_id", "max_episode_length", "trajectory_id")
_BLOCK_ROWS = 1 << 18

_log = logging.getLogger("mmbuf")


class Stratified(Follower):
    """Rows with replacement, so many from each stratum: the trajectories of one value of ``by``.

    ``by`` is an attribute of the index (``model_weights_id``, ``max_episode_length``), the dotted
    name of a column, or a function of an `Entry`, which another thread calls while the one that
    draws waits for it. Of a column of flags it is whether any row is set, of another one, text too,
    the value of the first row (of its first element).

    ``quotas`` are shares of each batch by value, which sum to 1, or numbers of rows, which sum to
    ``num_chunks``. Shares are rounded by largest remainder, so that the batch is whole. A stratum
    without rows gives its part to the others; `get_stats` counts how often one had fewer rows than
    its quota (``small_strata``, by value), and the first time it is empty is told in the log. Rows
    of the values that ``quotas`` does not name are not drawn.
    """

    def __init__(
        self,
        by: str | Callable[[Entry], Hashable],
        quotas: Mapping[Any, float],
    ) -> None:
        super().__init__()
        if not callable(by):
            by = text("by", by)
        if not isinstance(quotas, Mapping):
            raise TypeError(f"quotas: expected a mapping, got {told(quotas)}.")
        quotas = {value: _quota_of(quota) for value, quota in quotas.items()}
        if not quotas or not all(0 <= quota < np.inf for quota in quotas.values()):
            raise ValueError(f"quotas: expected shares or numbers of rows, got {quotas}.")
        self._are_counts = all(isinstance(quota, int) for quota in quotas.values())
        if not self._are_counts and not np.isclose(sum(quotas.values()), 1.0):
            raise ValueError(f"quotas: expected shares that sum to 1, or ints, got {quotas}.")
        self.by = by
        self.quotas = quotas
        self._numbers = {value: i for i, value in enumerate(self.quotas)}
        self._shares = np.array(list(self.quotas.values()), np.float64)
        self._strata = _Strata(by, self._numbers)
        self._num_small = [0] * len(self.quotas)
        self._told: set[Any] = set()  # values that were empty

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        if self._are_counts and sum(self.quotas.values()) != num_chunks:
            raise ValueError(
                f"num_chunks: expected {sum(self.quotas.values())}, the sum of the quotas, "
                f"got {num_chunks}."
            )
        firsts, ends, borders = self._known(sight)
        sizes = np.diff(borders)
        quotas = self._quotas_for(num_chunks, sizes)
        self._note_small(_apportioned(self._shares, num_chunks), sizes)
        draws = generator.integers(np.repeat(borders[:-1], quotas), np.repeat(borders[1:], quotas))
        rows = firsts[ends.searchsorted(draws, "right")] + draws
        return Draw(generator.permutation(rows))

    def _see(self, sight: Sight) -> tuple[Array, Array, Array]:
        """Rows of the window put in the order of their strata, as cumulative counts."""
        self._strata.follow(sight)
        view = sight.view
        codes = self._strata.codes
        order = codes.argsort(kind="stable")
        order = order[codes[order] >= 0]
        starts = view.starts[view.first : view.stop]
        lengths = view.starts[view.first + 1 : view.stop + 1] - starts
        ends = lengths[order].cumsum()
        firsts = starts[order] - (ends - lengths[order])
        sizes = np.bincount(codes[order], lengths[order], len(self.quotas)).astype(np.int64)
        return firsts, ends, np.concatenate([[0], sizes.cumsum()])

    def _quotas_for(self, num_chunks: int, sizes: Array) -> Array:
        shares = np.where(sizes > 0, self._shares, 0.0)
        if not shares.any():
            raise EmptyBufferError(
                f"sample: expected trajectories of {list(self.quotas)}, got none in the window."
            )
        return _apportioned(shares, num_chunks)

    def _note_small(self, quotas: Array, sizes: Array) -> None:
        for i in (sizes < quotas).nonzero()[0].tolist():
            value = list(self.quotas)[i]
            if not sizes[i] and value not in self._told:
                shield.run(self._tell, value)
            self._num_small[i] += 1

    def _tell(self, value: Any) -> None:
        with self._lock:
            if value not in self._told:
                self._told.add(value)
                _log.warning("Stratified: no trajectory of %r is in the window.", value)

    def get_stats(self) -> dict[str, Any]:
        """``small_strata``: how often each value had fewer rows than its quota."""
        return {"small_strata": dict(zip(self.quotas, self._num_small, strict=True))}


def _quota_of(value: Any) -> int | float:
    """A number of rows as an int, a share as a float."""
    try:
        return whole("quotas", value, None)
    except TypeError:
        return number("quotas", value)


def _apportioned(shares: Array, total: int) -> Array:
    """``total`` in parts that are as the shares, by largest remainder; int64."""
    exact = shares / shares.sum() * total
    parts = np.floor(exact + 1e-9).astype(np.int64)
    largest = (parts - exact).argsort(kind="stable")[: total - int(parts.sum())]
    parts[largest] += 1
    return np.asarray(parts)


class _Strata(Derived):
    """The number of each trajectory's stratum, -1 for none."""

    def __init__(
        self, by: str | Callable[[Entry], Hashable], numbers: Mapping[Hashable, int]
    ) -> None:
        super().__init__()
        self._by = by
        self._numbers = numbers
        self.codes: Array = np.empty(0, np.int64)

    def _clear(self) -> None:
        self.codes = self.codes[:0]

    def _drop(self, num_slots: int, num_rows: int) -> None:
        self.codes = self.codes[num_slots:]

    def _add(self, sight: Sight, first: int, lengths: Array) -> None:
        by = self._by
        if callable(by) or by in _ATTRIBUTES:
            entries = [sight.entry(first + i) for i in range(len(lengths))]
            values = [by(e) if callable(by) else getattr(e, by) for e in entries]
        else:
            values = _values_of(sight, _column_named(sight, by), first, lengths)
        codes = [self._numbers.get(value, -1) for value in values]
        self.codes = np.concatenate([self.codes, np.array(codes, np.int64)])


def _column_named(sight: Sight, name: str) -> Column:
    for column in sight.schema.columns:
        if column.name == name:
            return column
    raise SchemaError(
        f"by: expected one of {', '.join(_ATTRIBUTES)} or the name of a column, got {name!r}."
    )


def _values_of(sight: Sight, column: Column, first: int, lengths: Array) -> list[Any]:
    """What a column says of each trajectory."""
    starts = sight.view.starts[first : first + len(lengths)]
    if column.dtype != "bool":
        (found,) = sight.read([column.path], starts)
        if isinstance(found, list):
            return found
        if column.viewed_as is not None:
            found = column.tensor(found).float().numpy()
        return list(flat(found)[:, 0].tolist())
    values: list[Any] = []
    for block in blocks(lengths, _BLOCK_ROWS):
        low = int(starts[block][0])
        (flags,) = sight.read([column.path], np.arange(low, low + int(lengths[block].sum())))
        values += np.logical_or.reduceat(flat(flags).any(axis=1), starts[block] - low).tolist()
    return values
