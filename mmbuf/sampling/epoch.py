"""WithoutReplacement: each row of the window once, in an order that is computed and not stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from mmbuf.sampling.draw import Draw, Sampler, Sight, StaleSightError
from mmbuf.schema import Array
from mmbuf.slots import UUID_MARK, View

_BLOCK = 1 << 14  # indices computed at once, since NumPy's calls cost more than a few numbers
_ROUNDS = 8  # with 4, neighbours in orders of 16 or 64 still prefer some distances to others
_NONE: Array = np.empty(0, np.int64)
_GONE = np.iinfo(np.int64).min // 2


class WithoutReplacement(Sampler):
    """Epochs: each row that the window has at an epoch's begin once, in shuffled order.

    What is added meanwhile joins the next epoch; what has left the window is passed over. The last
    batch of an epoch has the rows that are left, or is left out with ``drop_last``. ``epoch``
    counts the epochs that have begun.
    """

    def __init__(self, drop_last: bool = False) -> None:
        super().__init__()
        self.has_even_batches = self.drop_last = drop_last
        self.epoch = 0
        self._order: Permutation | None = None
        self._listing: _Listing | None = None
        self._newest: tuple[object, int] | None = None  # of the sights
        self._position = 0  # of the order: how many indices were taken
        self._ahead: Array = np.empty(0, np.int64)  # rows of the epoch's listing, in order

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        with self._lock:
            self._check_newest(sight)
            if self.drop_last and num_chunks > view.high - view.low:
                raise ValueError(
                    f"num_chunks: expected at most the {view.high - view.low} rows of the window "
                    f"with drop_last, got {num_chunks}."
                )
            if self._order is None:
                self._begin(view, generator)
            rows, taken = self._next(view, num_chunks)
            if len(rows) < (num_chunks if self.drop_last else 1):
                self._begin(view, generator)
                rows, taken = self._next(view, num_chunks)
            return Draw(rows, undo=partial(self._put_back, taken, self._order))

    def _put_back(self, taken: Array, order: Permutation | None) -> None:
        """Give these indices again, if their epoch goes on."""
        with self._lock:
            if order is self._order:
                self._ahead = np.concatenate([taken, self._ahead])

    def _check_newest(self, sight: Sight) -> None:
        """StaleSightError for a sight that lacks trajectories of an earlier one."""
        stop = sight.view.first_number + sight.view.stop
        if self._newest is not None and self._newest[0] is sight.owner and stop < self._newest[1]:
            raise StaleSightError
        self._newest = (sight.owner, stop)

    def _begin(self, view: View, generator: np.random.Generator) -> None:
        self.epoch += 1
        self._listing = _Listing.of(view)
        keys = generator.integers(0, 1 << 63, 2 * _ROUNDS)
        self._order = Permutation(view.high - view.low, keys)
        self._position = 0
        self._ahead = self._ahead[:0]

    def _next(self, view: View, count: int) -> tuple[Array, Array]:
        """Up to ``count`` rows of ``view``, fewer at the end of the epoch; and their indices."""
        assert self._order is not None
        assert self._listing is not None
        found: list[tuple[Array, Array]] = []
        while count:
            if not len(self._ahead):
                stop = min(self._position + _BLOCK, self._order.size)
                if self._position == stop:
                    break
                self._ahead = self._order.at(self._position, stop)
                self._position = stop
            taken, self._ahead = self._ahead[:count], self._ahead[count:]
            rows = self._listing.rows_in(view, taken)
            found.append((rows, taken))
            count -= len(rows)
        if len(found) == 1:
            return found[0]
        # None at the end of an epoch, several where trajectories have gone.
        all_rows, all_taken = (np.concatenate([_NONE, *(p[i] for p in found)]) for i in (0, 1))
        return all_rows, all_taken

    def state_dict(self) -> dict[str, Any]:
        """Where in which epoch it is; tensors and numbers."""
        with self._lock:
            if self._order is None or self._listing is None:
                return {"epoch": self.epoch}
            return {
                "epoch": self.epoch,
                "keys": torch.from_numpy(self._order.keys.copy()),
                "position": self._position - len(self._ahead),
                "starts": torch.from_numpy(self._listing.starts.copy()),
                "marks": torch.from_numpy(self._listing.marks.copy()),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, with a window of the same trajectories."""
        with self._lock:
            self.epoch = int(state["epoch"])
            self._order = self._listing = None
            self._ahead = self._ahead[:0]
            if "keys" in state:
                starts, marks = state["starts"].numpy().copy(), state["marks"].numpy().copy()
                self._listing = _Listing(starts, marks)
                self._order = Permutation(int(starts[-1]), state["keys"].numpy().copy())
                self._position = int(state["position"])


class _Listing:
    """The trajectories of an epoch: of each its first row, counted from 0, and its mark."""

    def __init__(self, starts: Array, marks: Array, view: View | None = None) -> None:
        self.starts = starts
        self.marks = marks
        self._view = view  # whose rows they are now, and how to get there
        self._shifts: Array | None = None
        self._low = 0 if view is None else view.low

    @classmethod
    def of(cls, view: View) -> _Listing:
        starts = view.starts[view.first : view.stop + 1]
        # Nothing is copied: no memory for each trajectory.
        return cls(
            starts - view.low if view.low else starts,
            view.facts[UUID_MARK, view.first : view.stop],
            view,
        )

    def rows_in(self, view: View, rows: Array) -> Array:
        """``rows`` of the listing as rows of ``view``, without those that have left it."""
        if view is not self._view:
            self._look(view)
        if self._shifts is None:
            found: Array = rows + self._low
            return found if self._low == view.low else found[found >= view.low]
        shifts = self._shifts[self.starts.searchsorted(rows, "right") - 1]
        found = (rows + shifts)[shifts != _GONE]
        return found[found >= view.low]

    def _look(self, view: View) -> None:
        """Find the listing's trajectories in another view."""
        was = self._view
        self._view = view
        if was is not None and view.starts is was.starts:
            return  # the same row numbers still
        marks = view.facts[UUID_MARK, view.first : view.stop]
        order = marks.argsort(kind="stable")
        places = np.minimum(marks[order].searchsorted(self.marks), len(order) - 1)
        found = order[places]
        shifts = view.starts[view.first + found] - self.starts[:-1]
        self._shifts = np.where(marks[found] == self.marks, shifts, _GONE)


class Permutation:
    """The numbers below ``size`` in an order that ``keys`` choose, without memory for it.

    Additions, multiplications by odd numbers and xors with the upper half are one-to-one on the
    numbers of b bits; what they lead out of the range is sent through them again until it is in
    (cycle walking: Black and Rogaway, *Ciphers with Arbitrary Finite Domains*, 2002).
    """

    def __init__(self, size: int, keys: Array) -> None:
        self.size = size
        self.keys = keys
        bits = max(2, (size - 1).bit_length())
        self._mask = np.uint64((1 << bits) - 1)
        self._shift = np.uint64((bits + 1) // 2)
        values = keys.astype(np.uint64)
        self._adds = values[:_ROUNDS] & self._mask
        self._factors = values[_ROUNDS:] | np.uint64(1)

    def at(self, start: int, stop: int) -> Array:
        """The numbers at places ``[start, stop)`` of the order; int64."""
        numbers = np.arange(start, stop, dtype=np.uint64)
        self._mix(numbers)
        outside = (numbers >= self.size).nonzero()[0]
        while len(outside):
            walking = numbers[outside]
            self._mix(walking)
            numbers[outside] = walking
            outside = outside[walking >= self.size]
        return numbers.view(np.int64)

    def _mix(self, numbers: Array) -> None:
        for add, factor in zip(self._adds, self._factors, strict=True):
            numbers += add
            numbers *= factor
            numbers &= self._mask
            numbers ^= numbers >> self._shift
