"""SlotTable: from row numbers of the window to slots and to rows of the lanes.

Row numbers count the rows of the table's slots, oldest first. The table's arrays are only ever
appended to, or made anew; a `View` of them is complete before it is published, so gathers read it
without a lock.

Finding the slot of a row is the largest cost of our own in a small batch: ``searchsorted`` takes
9 µs for 256 rows of 100 slots and 28 µs of 100,000. A guide (bucket of the row number to the slot
of the bucket's first row and the row where the next slot begins) takes 3 at any size. It needs
buckets no larger than the shortest slot; where lengths differ so much that the guide would be far
larger than the table, ``searchsorted`` has to do.

Slots whose offset into a lane agrees need no search at all: dense lanes are such.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mmbuf.schema import Array, Schema

_MAX_BUCKETS_PER_SLOT = 16


class Facts(NamedTuple):
    """What is known of a slot beside its rows: B, the trajectory's id, and a mark of its uuid."""

    num_envs: int = 1
    trajectory_id: int = 0
    uuid_mark: int = 0


NUM_ENVS, TRAJECTORY_ID, UUID_MARK = range(len(Facts._fields))  # rows of `SlotTable.facts`


class Pin:
    """Keeps what a view shows from being given back, for as long as somebody has the pin.

    That is a variable of who gathers: it goes with him, whatever ends him, and nothing has to be
    called for that. ``holds`` lives as long as the pin.
    """

    __slots__ = ("__weakref__", "holds")

    def __init__(self) -> None:
        self.holds: list[object] | None = None


class View:
    """What one gather needs to know, never changed once made (but for ``filled``, see `cache`).

    ``low`` and ``high`` bound the window's row numbers, ``first`` and ``stop`` the indices of its
    slots; slot ``i`` has the rows from ``starts[i]`` to ``starts[i + 1]`` and ``facts[:, i]``, the
    fields of `Facts`. ``needs_slots`` says whether `lane_rows` wants the slots, ``pins`` are the
    gathers that go on, ``schema`` are the columns that every slot has, and ``union`` those that any
    slot has. No row's memory is kept: a sampler may have a view for longer than there is a buffer.
    """

    __slots__ = (
        "_border",
        "_bucket_shift",
        "_guide",
        "_offsets",
        "_shifts",
        "facts",
        "filled",
        "first",
        "first_number",
        "high",
        "is_filled",
        "low",
        "needs_slots",
        "pins",
        "schema",
        "starts",
        "stop",
        "union",
    )

    def __init__(
        self,
        table: SlotTable,
        is_filled: bool,
        schema: Schema | None = None,
        union: Schema | None = None,
        idle_lanes: Iterable[int] = (),
    ) -> None:
        self.schema = schema
        self.union = union
        self.first, self.stop = first, stop = table.first, table.stop
        self.starts = table.starts
        self.facts = table.facts
        self._offsets = table.offsets
        self._guide = table.guide
        self._border = table.border
        self._bucket_shift = table.bucket_shift
        self.filled = table.filled
        self.first_number = table.first_number
        self.low = int(self.starts[first])
        self.high = int(self.starts[stop])
        self.is_filled = is_filled
        last = stop - 1
        # The one offset of all slots of a lane, None where they differ.
        self._shifts = [
            int(offsets[last]) if changed <= first <= last else None
            for offsets, changed in zip(table.offsets, table.changed, strict=True)
        ]
        for lane in idle_lanes:  # nobody asks for their rows
            self._shifts[lane] = 0
        self.needs_slots = not is_filled or None in self._shifts
        self.pins: set[weakref.ref[Pin]] = set()

    def pin(self, pin: Pin) -> weakref.ref[Pin]:
        """Pin the view for as long as there is ``pin``."""
        reference = weakref.ref(pin, self.pins.discard)
        self.pins.add(reference)
        return reference

    def slots_of(self, rows: Array) -> Array:
        """Index into the table of the slot of each row; int64."""
        if self._guide is None:
            return np.asarray(self.starts[: self.stop + 1].searchsorted(rows, "right") - 1)
        buckets = rows >> self._bucket_shift
        slots: Array = self._guide.take(buckets)
        slots += rows >= self._border.take(buckets)
        return slots

    def lane_rows(self, rows: Array, slots: Array | None) -> list[Array]:
        """Row numbers in each lane; int64. ``slots`` may be None unless ``needs_slots``."""
        lanes: list[Array] = []
        shifted: dict[int, Array] = {0: rows}
        for shift, offsets in zip(self._shifts, self._offsets, strict=True):
            if shift is None:
                lanes.append(rows + offsets.take(slots))  # type: ignore[arg-type]
            else:
                if shift not in shifted:
                    shifted[shift] = rows + shift
                lanes.append(shifted[shift])
        return lanes

    def first_rows(self, slots: Array) -> Array:
        starts: Array = self.starts.take(slots)
        return starts


class SlotTable:
    """The slots of the window, oldest first. Changed by one thread at a time.

    Index ``i`` of its arrays is the slot of number ``first_number + i``; those from ``first`` to
    ``stop`` are in the window. Numbers rise for ever; row numbers begin again when the arrays are
    made anew.
    """

    def __init__(self, num_lanes: int) -> None:
        self.first = self.stop = 0
        self.first_number = 0
        self.starts = np.zeros(1, np.int64)
        self.offsets = np.zeros((num_lanes, 0), np.int64)
        self.facts = np.zeros((len(Facts._fields), 0), np.int64)
        self.filled = np.zeros(0, np.bool_)
        self.changed = [0] * num_lanes  # the last index whose offset differs from the one before
        self.guide: Array | None = None  # of each bucket: the slot of its first row
        self.border = np.zeros(0, np.int64)  # of each bucket: where the slot after that begins
        self.bucket_shift = 0
        self._shortest = 0  # of the slots, while there are any

    def append(
        self,
        num_rows: int,
        lane_starts: Sequence[int] | None,
        *,
        is_filled: bool,
        facts: Facts = Facts(),  # noqa: B008
    ) -> int:
        """Add a slot of ``num_rows`` rows; its number. ``lane_starts`` None: not in the lanes."""
        if self.stop == len(self.filled):
            self.renew()
        index = self.stop
        start = int(self.starts[index])
        self.starts[index + 1] = start + num_rows
        self.facts[:, index] = facts
        self.filled[index] = is_filled
        if lane_starts is not None:
            self._set_offsets(index, lane_starts)
        elif index:
            self.offsets[:, index] = self.offsets[:, index - 1]
        self.stop = index + 1
        self._guide_to(index, num_rows)
        return self.first_number + index

    def extend(self, num_rows: Array, lane_starts: Array | None, facts: Array) -> int:
        """Add unfilled slots, int64 ``[n]`` rows each; the first's number.

        ``lane_starts`` are int64 ``[lanes, n]``, None for slots that are not in the lanes;
        ``facts`` int64 ``[fields, n]``.
        """
        count = len(num_rows)
        if self.stop + count > len(self.filled):
            self.renew(count)
        first, stop = self.stop, self.stop + count
        self.starts[first + 1 : stop + 1] = self.starts[first] + num_rows.cumsum()
        self.facts[:, first:stop] = facts
        self.filled[first:stop] = False
        if lane_starts is not None:
            self.offsets[:, first:stop] = lane_starts - self.starts[first:stop]
        elif first:
            self.offsets[:, first:stop] = self.offsets[:, first - 1 : first]
        if count:
            shortest = int(num_rows.min())
            self._shortest = min(self._shortest or shortest, shortest)
        self.stop = stop
        self.changed = [_last_change(lane[:stop]) for lane in self.offsets]
        self._make_guide()
        return self.first_number + first

    def place(self, number: int, lane_starts: Sequence[int]) -> None:
        """Say where a slot lies from now on; only after `renew`, since views must not see it."""
        self._set_offsets(number - self.first_number, lane_starts)
        # Now younger slots may lie before it: no lane has one offset until all have left.
        self.changed = [self.stop] * len(self.changed)

    def set_filled(self, number: int, is_filled: bool) -> None:
        self.filled[number - self.first_number] = is_filled

    def is_in_window(self, number: int) -> bool:
        return self.first <= number - self.first_number < self.stop

    def add_lanes(self, count: int) -> None:
        """More lanes, for the slots to come; the views that there are go on without."""
        new = np.zeros((count, self.offsets.shape[1]), np.int64)
        self.offsets = np.concatenate([self.offsets, new])
        self.changed = [*self.changed, *[self.stop] * count]

    def drop_oldest(self) -> None:
        self.first += 1

    def drop_all(self) -> None:
        self.first = self.stop

    def renew(self, room: int = 0) -> None:
        """Make the arrays anew, with room for as many slots again; old views keep the old ones.

        And with room for ``room`` more.
        """
        first = self.first
        self._make_anew(np.arange(first, self.stop), room)
        self.first_number += first

    def keep(self, numbers: Array) -> None:
        """Make the arrays anew with these slots only, in their order; they get new numbers.

        The new numbers rise from ``first_number``; old views keep the old ones.
        """
        next_number = self.first_number + self.stop
        self._make_anew(numbers - self.first_number)
        self.first_number = next_number

    def _make_anew(self, indices: Array, room: int = 0) -> None:
        """Arrays of these slots, and room for as many again and for ``room`` others."""
        live = len(indices)
        capacity = max(64, 2 * live + room)
        old_starts = self.starts[indices]
        lengths = self.starts[indices + 1] - old_starts
        starts = np.zeros(capacity + 1, np.int64)
        starts[1 : live + 1] = lengths.cumsum()
        filled = np.zeros(capacity, np.bool_)
        filled[:live] = self.filled[indices]
        facts = np.zeros((len(self.facts), capacity), np.int64)
        facts[:, :live] = self.facts[:, indices]
        offsets = np.zeros((len(self.offsets), capacity), np.int64)
        # What leads from row numbers into the lanes changes as the row numbers do.
        offsets[:, :live] = self.offsets[:, indices] + (old_starts - starts[:live])
        self.changed = [_last_change(lane[:live]) for lane in offsets]
        self.starts, self.filled, self.offsets, self.facts = starts, filled, offsets, facts
        self.first, self.stop = 0, live
        self._shortest = int(lengths.min()) if live else 0
        self._make_guide()

    def _set_offsets(self, index: int, lane_starts: Sequence[int]) -> None:
        start = int(self.starts[index])
        for lane, lane_start in enumerate(lane_starts):
            offsets = self.offsets[lane]
            offsets[index] = lane_start - start
            if index and offsets[index] != offsets[index - 1]:
                self.changed[lane] = index

    def _make_guide(self) -> None:
        """Make the guide for all slots, with room for as many again."""
        self.guide = None
        if not self.stop:
            return
        self.bucket_shift = self._shortest.bit_length() - 1
        buckets = (int(self.starts[self.stop]) >> self.bucket_shift) + 1
        if buckets > _MAX_BUCKETS_PER_SLOT * self.stop + 64:
            return
        firsts = np.arange(buckets) << self.bucket_shift
        slots = self.starts[: self.stop].searchsorted(firsts, "right") - 1
        self.guide = np.zeros(2 * buckets + 64, np.int64)
        self.border = np.zeros(len(self.guide), np.int64)
        self.guide[:buckets] = slots
        self.border[:buckets] = self.starts[slots + 1]

    def _guide_to(self, index: int, num_rows: int) -> None:
        """Add the buckets that begin in the new slot ``index``."""
        if not self._shortest or num_rows < self._shortest:
            is_first, self._shortest = not self._shortest, num_rows
            if is_first or num_rows < 1 << self.bucket_shift:
                self._make_guide()
                return
        if self.guide is None:
            return
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        first = -(-start >> self.bucket_shift)
        last = -(-stop >> self.bucket_shift)
        if last > len(self.guide):
            self._make_guide()
        else:
            self.guide[first:last] = index
            self.border[first:last] = stop


def _last_change(offsets: Array) -> int:
    """The last index whose offset differs from the one before; 0 if there is none."""
    changes = np.diff(offsets).nonzero()[0]
    return int(changes[-1]) + 1 if len(changes) else 0
