"""Derived: arrays over a window's rows or trajectories, made once for each and kept while it stays.

The window only grows at its end and shrinks at its beginning, nearly always; so does what is
derived from it, at a cost in proportion to what came and went. Where its middle changed all is made
anew.

A draw reads it without a lock: what is there is never changed, but for what is kept for the next
view. That is made where no signal handler interrupts it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mmbuf import shield
from mmbuf.sampling.draw import Sampler, Sight, StaleSightError
from mmbuf.schema import Array
from mmbuf.slots import Pin, View

_MIN_ROOM = 64


class Fifo:
    """An array that values are appended to at its end and dropped from at its beginning.

    Each costs a constant on average. `live` is what it holds: a view, that stays as it is whatever
    is appended or dropped later.
    """

    def __init__(self, dtype: Any, *row_shape: int) -> None:
        self._data: Array = np.empty((_MIN_ROOM, *row_shape), dtype)
        self._head = self._tail = 0

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def live(self) -> Array:
        return self._data[self._head : self._tail]

    def extend(self, values: Array) -> None:
        if self._tail + len(values) > len(self._data):
            live = self.live
            room = max(_MIN_ROOM, 2 * (len(live) + len(values)))
            data = np.empty((room, *self._data.shape[1:]), self._data.dtype)
            data[: len(live)] = live
            self._data, self._head, self._tail = data, 0, len(live)
        self._data[self._tail : self._tail + len(values)] = values
        self._tail += len(values)

    def drop(self, count: int) -> None:
        self._head += count

    def clear(self) -> None:
        self._data = np.empty((_MIN_ROOM, *self._data.shape[1:]), self._data.dtype)
        self._head = self._tail = 0


class Follower(Sampler):
    """A sampler that draws from what is derived of the window."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: tuple[View | None, Any] = (None, None)

    @abstractmethod
    def _see(self, sight: Sight) -> Any:
        """What a draw from the sight's view needs, never changed later."""

    def _known(self, sight: Sight) -> Any:
        """What `_see` gives, asked once for each view."""
        view, known = self._seen
        return known if view is sight.view else shield.run(self._look, sight)

    def _look(self, sight: Sight) -> Any:
        pin = Pin()
        sight.view.pin(pin)  # of its own: who draws may be interrupted, and not wait for this
        try:
            self._check_is_outside()
            with self._lock:
                view, known = self._seen
                if view is not sight.view:
                    known = self._see(sight)
                    self._seen = (sight.view, known)
                return known
        finally:
            del pin  # the traceback of an error may keep this frame for long


class Derived(ABC):
    """What follows the window. For one thread at a time, which no signal handler interrupts.

    After `follow` it knows exactly the slots of the sight's view. ``num_dropped_rows`` counts the
    rows that were before its first one, so that rows keep an *ordinal* while they stay:
    ``row - view.low + num_dropped_rows``.
    """

    def __init__(self) -> None:
        self.num_dropped_rows = 0
        self._owner: object | None = None
        self._view: View | None = None
        self._first = self._next = 0  # numbers of the slots that are known
        self._lengths = Fifo(np.int64)  # their rows

    def is_at(self, sight: Sight) -> bool:
        """Whether the sight's view is what is known."""
        return self._view is sight.view

    def follow(self, sight: Sight) -> None:
        """Take in what came and went; StaleSightError for a sight from before the last one."""
        view = sight.view
        if view is self._view:
            return
        first, stop = view.first_number + view.first, view.first_number + view.stop
        is_known = sight.owner is self._owner
        if is_known and (first < self._first or stop < self._next):
            raise StaleSightError
        # All anew the next time, should this not come to its end: by an error or a cancellation,
        # in a forked child.
        self._owner = self._view = None
        # Where the middle changed all slots have new numbers, that begin here.
        if not is_known or first >= self._next:
            self._forget()
            self._first = self._next = first
        if first > self._first:
            count = first - self._first
            num_rows = int(self._lengths.live[:count].sum())
            self._drop(count, num_rows)
            self._lengths.drop(count)
            self.num_dropped_rows += num_rows
            self._first = first
        if stop > self._next:
            index = self._next - view.first_number
            lengths = np.diff(view.starts[index : view.stop + 1])
            self._add(sight, index, lengths)
            self._lengths.extend(lengths)
            self._next = stop
        self._owner, self._view = sight.owner, view

    def _forget(self) -> None:
        self._clear()
        self._lengths.clear()
        self.num_dropped_rows = 0

    @abstractmethod
    def _clear(self) -> None:
        """Nothing is known any more."""

    @abstractmethod
    def _drop(self, num_slots: int, num_rows: int) -> None:
        """The oldest are gone."""

    @abstractmethod
    def _add(self, sight: Sight, first: int, lengths: Array) -> None:
        """Slots of ``lengths`` rows came, from index ``first`` of the sight's view to its end."""


def blocks(lengths: Array, max_rows: int) -> list[slice]:
    """Slices of consecutive slots with about ``max_rows`` rows each, so that work stays small."""
    if not len(lengths):
        return []
    borders = np.unique(np.cumsum(lengths) // max_rows, return_index=True)[1].tolist()
    return [slice(a, b) for a, b in zip(borders, [*borders[1:], len(lengths)], strict=True)]
