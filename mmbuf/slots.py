"""SlotTable: from row numbers of the window to slots and to rows of the lanes.

Rows have absolute numbers that rise for ever: a trajectory of N rows takes the next N. The table's
arrays are only ever appended to (or made anew, larger); a `View` of it is complete before it is
published, so gathers read it without a lock.

Finding the slot of a row is the largest cost of our own in a small batch: ``searchsorted`` takes
9 µs for 256 rows of 100 slots and 28 µs of 100,000. A guide table (bucket of the row number to the
slot of the bucket's first row, then one correction) takes 3 at any size. It needs buckets no larger
than the shortest slot; where lengths differ so much that the guide would be far larger than the
table, ``searchsorted`` has to do.

Slots whose offset into a lane agrees need no search at all: dense lanes are such.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmbuf.schema import Array

_MAX_BUCKETS_PER_SLOT = 16


class View:
    """What one gather needs to know, never changed once made (but for ``filled``, see `cache`).

    ``low`` and ``high`` bound the window's rows. ``shifts[lane]`` is the one offset of all slots
    of a lane, None where they differ. ``marks`` is the list of the gathers that go on.
    """

    __slots__ = (
        "_bucket_shift",
        "_first_bucket",
        "_guide",
        "_offsets",
        "_starts",
        "_stop",
        "filled",
        "first_number",
        "high",
        "is_filled",
        "low",
        "marks",
        "needs_slots",
        "shifts",
    )

    def __init__(self, table: SlotTable, is_filled: bool) -> None:
        first, self._stop = table.first, table.stop
        self._starts = table.starts
        self._offsets = table.offsets
        self._guide = table.guide
        self._bucket_shift = table.bucket_shift
        self._first_bucket = table.first_bucket
        self.filled = table.filled
        self.first_number = table.first_number
        self.low = int(self._starts[first])
        self.high = int(self._starts[self._stop])
        self.is_filled = is_filled
        last = self._stop - 1
        self.shifts = [
            int(offsets[last]) if changed <= first <= last else None
            for offsets, changed in zip(table.offsets, table.changed, strict=True)
        ]
        self.needs_slots = not is_filled or None in self.shifts
        self.marks: list[object] = []

    def slots_of(self, rows: Array) -> Array:
        """Index into the table of the slot of each row; int64."""
        if self._guide is None:
            starts = self._starts[: self._stop + 1]
            return np.asarray(starts.searchsorted(rows, "right") - 1)
        slots: Array = self._guide.take((rows >> self._bucket_shift) - self._first_bucket)
        slots += rows >= self._starts.take(slots + 1)
        return slots

    def lane_rows(self, lane: int, rows: Array, slots: Array | None) -> Array:
        """Row numbers in ``lane``; int64. ``slots`` may be None unless ``needs_slots``."""
        shift = self.shifts[lane]
        if shift is not None:
            return rows + shift
        offsets: Array = self._offsets[lane].take(slots)
        return rows + offsets

    def first_rows(self, slots: Array) -> Array:
        starts: Array = self._starts.take(slots)
        return starts


class SlotTable:
    """The slots of the window, oldest first. Changed by one thread at a time.

    Index ``i`` of its arrays is the slot of number ``first_number + i``; those from ``first`` to
    ``stop`` are in the window.
    """

    def __init__(self, num_lanes: int, next_row: int = 0, next_number: int = 0) -> None:
        self.first = self.stop = 0
        self.first_number = next_number
        self.starts = np.full(1, next_row, np.int64)
        self.offsets = np.zeros((num_lanes, 0), np.int64)
        self.filled = np.zeros(0, np.bool_)
        self.changed = [0] * num_lanes  # the last index whose offset differs from the one before
        self.guide: Array | None = None
        self.bucket_shift = 0
        self.first_bucket = 0
        self._shortest = 1 << 62

    def append(self, num_rows: int, lane_starts: Sequence[int] | None, *, is_filled: bool) -> int:
        """Add a slot of ``num_rows`` rows; its number. ``lane_starts`` None: not in the lanes."""
        index = self.stop
        if index == len(self.filled):
            self._grow()
            index = self.stop
        start = int(self.starts[index])
        self.starts[index + 1] = start + num_rows
        self.filled[index] = is_filled
        if lane_starts is None:
            self.offsets[:, index] = self.offsets[:, index - 1] if index else 0
        else:
            self._set_offsets(index, lane_starts)
        self.stop = index + 1
        self._extend_guide(index, start, num_rows)
        return self.first_number + index

    def place(self, number: int, lane_starts: Sequence[int]) -> None:
        """Say where a slot lies from now on; only after `renew`, since views must not see it."""
        self._set_offsets(number - self.first_number, lane_starts)
        # Now younger slots may lie before it: no lane has one offset until all have left.
        self.changed = [self.stop] * len(self.changed)

    def set_filled(self, number: int, is_filled: bool) -> None:
        self.filled[number - self.first_number] = is_filled

    def is_in_window(self, number: int) -> bool:
        return self.first <= number - self.first_number < self.stop

    def drop_oldest(self) -> None:
        self.first += 1

    def drop_all(self) -> None:
        self.first = self.stop

    def renew(self) -> None:
        """Go on with new arrays, so that views keep what they saw."""
        self._grow()

    def _set_offsets(self, index: int, lane_starts: Sequence[int]) -> None:
        start = int(self.starts[index])
        for lane, lane_start in enumerate(lane_starts):
            offsets = self.offsets[lane]
            offsets[index] = lane_start - start
            if index and offsets[index] != offsets[index - 1]:
                self.changed[lane] = index

    def _grow(self) -> None:
        """Make the arrays anew, twice as large as what is live; old views keep the old ones."""
        first, stop = self.first, self.stop
        live = stop - first
        capacity = max(64, 2 * live)
        starts = np.empty(capacity + 1, np.int64)
        starts[: live + 1] = self.starts[first : stop + 1]
        filled = np.zeros(capacity, np.bool_)
        filled[:live] = self.filled[first:stop]
        offsets = np.zeros((len(self.offsets), capacity), np.int64)
        offsets[:, :live] = self.offsets[:, first:stop]
        self.starts, self.filled, self.offsets = starts, filled, offsets
        self.changed = [max(0, changed - first) for changed in self.changed]
        self.first_number += first
        self.first, self.stop = 0, live
        self._shortest = int(np.diff(starts[: live + 1]).min()) if live else 1 << 62
        self._make_guide()

    def _make_guide(self) -> None:
        """Make the guide for the live slots, with room for as many again."""
        self.guide = None
        live = self.stop - self.first
        if not live:
            return
        self.bucket_shift = self._shortest.bit_length() - 1
        start, stop = int(self.starts[self.first]), int(self.starts[self.stop])
        self.first_bucket = start >> self.bucket_shift
        buckets = (stop >> self.bucket_shift) - self.first_bucket + 1
        if buckets > _MAX_BUCKETS_PER_SLOT * live + 64:
            return
        firsts = (self.first_bucket + np.arange(buckets)) << self.bucket_shift
        guide = np.empty(2 * buckets + 64, np.int64)
        slots = self.starts[self.first : self.stop].searchsorted(firsts, "right") - 1
        guide[:buckets] = self.first + slots.clip(0)
        self.guide = guide

    def _extend_guide(self, index: int, start: int, num_rows: int) -> None:
        if num_rows < self._shortest:
            was_first = self._shortest == 1 << 62
            self._shortest = num_rows
            if was_first or num_rows < 1 << self.bucket_shift:
                self._make_guide()
                return
        if self.guide is None:
            return
        # The buckets that begin in the new slot.
        mask = (1 << self.bucket_shift) - 1
        first = ((start + mask) >> self.bucket_shift) - self.first_bucket
        last = ((start + num_rows + mask) >> self.bucket_shift) - self.first_bucket
        if last > len(self.guide):
            self._make_guide()
        else:
            self.guide[first:last] = index
