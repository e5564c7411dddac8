"""WithoutReplacement: each row of the window once, in an order that is computed and not stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from mmbuf.sampling.draw import Delivery, Draw, Sampler, Sight, StaleSightError
from mmbuf.schema import Array
from mmbuf.slots import UUID_MARK, View

_BLOCK = 1 << 14  # indices computed at once, since NumPy's calls cost more than a few numbers
_ROUNDS = 8  # with 4, neighbours in orders of 16 or 64 still prefer some distances to others
_NONE: Array = np.empty(0, np.int64)
_GONE = np.iinfo(np.int64).min // 2


# Indices that were given for a batch, until it is known what became of it.
_Given = tuple[Delivery, int, Array]  # the second is `Delivery.attempt` when they were drawn


class _Place(NamedTuple):
    """Where in which epoch a sampler is. Never changed: a draw puts another one in its place."""

    epoch: int = 0
    listing: _Listing | None = None
    order: Permutation | None = None
    position: int = 0  # of the order: how many of its indices were taken
    ahead: Array = _NONE  # those of them that are still to be given, in order
    returned: Array = _NONE  # indices from before, that were in vain: they come first
    given: tuple[_Given, ...] = ()
    newest: tuple[object, int] = (None, 0)  # of the sights


class WithoutReplacement(Sampler):
    """Epochs: each row that the window has at an epoch's begin once, in shuffled order.

    What is added meanwhile joins the next epoch; what has left the window is passed over. The last
    batch of an epoch has the rows that are left, or is left out with ``drop_last``. ``epoch``
    counts the epochs that have begun.
    """

    def __init__(self, drop_last: bool = False) -> None:
        super().__init__()
        self.has_even_batches = self.drop_last = drop_last
        self._place = _Place()

    @property
    def epoch(self) -> int:
        """How many epochs have begun."""
        return self._place.epoch

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        self._check_is_outside()
        with self._lock:
            place = self._place
            self._check_newest(sight, place.newest)
            if self.drop_last and num_chunks > view.high - view.low:
                raise ValueError(
                    f"num_chunks: expected at most the {view.high - view.low} rows of the window "
                    f"with drop_last, got {num_chunks}."
                )
            if place.order is None:
                place = _begun(place, view, generator)
            rows, place = _next(place, sight, num_chunks)
            if len(rows) < (num_chunks if self.drop_last else 1):
                rows, place = _next(_begun(place, view, generator), sight, num_chunks)
            self._place = place
        return Draw(rows)

    def _check_newest(self, sight: Sight, newest: tuple[object, int]) -> None:
        """StaleSightError for a sight that lacks trajectories of an earlier one."""
        owner, stop = newest
        if owner is sight.owner and sight.view.first_number + sight.view.stop < stop:
            raise StaleSightError

    def state_dict(self) -> dict[str, Any]:
        """Where in which epoch it is; tensors and numbers.

        Of a batch that is on its way to its caller: as before it was drawn.
        """
        place = self._place
        if place.order is None or place.listing is None:
            return {"epoch": place.epoch}
        state = {
            "epoch": place.epoch,
            "keys": torch.from_numpy(place.order.keys.copy()),
            "position": place.position - len(place.ahead),
            "starts": torch.from_numpy(place.listing.starts.copy()),
            "marks": torch.from_numpy(place.listing.marks.copy()),
        }
        returned, on_way = _settled(place.returned, place.given)
        returned = np.concatenate([*(indices for _, _, indices in on_way), returned])
        if len(returned):
            state["returned"] = torch.from_numpy(returned)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, with a window of the same trajectories."""
        place = _Place(int(state["epoch"]))
        if "keys" in state:
            starts, marks = state["starts"].numpy().copy(), state["marks"].numpy().copy()
            place = place._replace(
                listing=_Listing(starts, marks),
                order=Permutation(int(starts[-1]), state["keys"].numpy().copy()),
                position=int(state["position"]),
            )
        if "returned" in state:
            place = place._replace(returned=state["returned"].numpy().copy())
        self._check_is_outside()
        with self._lock:
            self._place = place._replace(newest=self._place.newest)


class _Listing:
    """The trajectories of an epoch: of each its first row, counted from 0, and its mark."""

    def __init__(self, starts: Array, marks: Array, view: View | None = None) -> None:
        self.starts = starts
        self.marks = marks
        # Whose rows they are now, and how to get there.
        self._found: tuple[View | None, Array | None] = (view, None)
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
        known, shifts = self._found
        if known is not view:
            shifts = self._find(view)
        if shifts is None:
            found: Array = rows + self._low
            return found if self._low == view.low else found[found >= view.low]
        shifts = shifts[self.starts.searchsorted(rows, "right") - 1]
        found = (rows + shifts)[shifts != _GONE]
        return found[found >= view.low]

    def _find(self, view: View) -> Array | None:
        """Find the listing's trajectories in another view."""
        known, shifts = self._found
        if known is None or view.starts is not known.starts:  # else the same row numbers still
            marks = view.facts[UUID_MARK, view.first : view.stop]
            order = marks.argsort(kind="stable")
            places = np.minimum(marks[order].searchsorted(self.marks), len(order) - 1)
            found = order[places]
            shifts = view.starts[view.first + found] - self.starts[:-1]
            shifts = np.where(marks[found] == self.marks, shifts, _GONE)
        self._found = (view, shifts)
        return shifts


def _begun(place: _Place, view: View, generator: np.random.Generator) -> _Place:
    """The begin of the next epoch."""
    keys = generator.integers(0, 1 << 63, 2 * _ROUNDS)
    order = Permutation(view.high - view.low, keys)
    return _Place(place.epoch + 1, _Listing.of(view), order)


def _next(place: _Place, sight: Sight, count: int) -> tuple[Array, _Place]:
    """Up to ``count`` rows of the sight's view, fewer at the end of the epoch; and where it is."""
    epoch, listing, order, position, ahead, returned, given, _ = place
    assert listing is not None
    assert order is not None
    view, delivery = sight.view, sight.delivery
    if given:
        returned, given = _settled(returned, given)
    found: list[tuple[Array, Array]] = []
    while count:
        if len(returned):
            taken, returned = returned[:count], returned[count:]
        else:
            if not len(ahead):
                stop = min(position + _BLOCK, order.size)
                if position == stop:
                    break
                ahead, position = order.at(position, stop), stop
            taken, ahead = ahead[:count], ahead[count:]
        rows = listing.rows_in(view, taken)
        found.append((rows, taken))
        count -= len(rows)
    if len(found) == 1:
        rows, taken = found[0]
    else:  # none at the end of an epoch, several where trajectories have gone
        rows, taken = (np.concatenate([_NONE, *(part[i] for part in found)]) for i in (0, 1))
    given = (*given, (delivery, delivery.attempt, taken))
    newest = (sight.owner, view.first_number + view.stop)
    return rows, _Place(epoch, listing, order, position, ahead, returned, given, newest)


def _settled(returned: Array, given: tuple[_Given, ...]) -> tuple[Array, tuple[_Given, ...]]:
    """What comes again, with the batches that were in vain, and those that are on their way."""
    in_vain, on_way = [], []
    for batch in given:
        delivery, attempt, indices = batch
        if attempt < delivery.attempt:
            in_vain.append(indices)
        elif not delivery.has_come:
            on_way.append(batch)
    return np.concatenate([*in_vain, returned]) if in_vain else returned, tuple(on_way)


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
