"""Places: where trajectories lie in the lanes of a schema, and the pages behind them.

Between `lane`, which knows rows and addresses, and `cache`, which knows which trajectories are in
the window: here a trajectory's columns are copied in, mapped, rewired or read. Nothing here says
*when* a place may be taken away; that is the cache's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmbuf import storage, vm
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError
from mmbuf.lane import Extent, Lane, lanes_of
from mmbuf.schema import Array, Payload, Schema, TextTable
from mmbuf.storage import Source

RESERVED_BYTES = 8 << 40  # of the 128 TiB of addresses that a process has
_MIN_RESERVED_BYTES = 64 << 20
_SHORT_OF_MAPS = 4  # the threshold rises by this when half of the process's mappings are spent

_log = logging.getLogger("mmbuf")


@dataclass(slots=True)
class Place:
    """An extent in each lane, and how many of the columns there are mapped."""

    extents: list[Extent]
    num_maps: int = 0


@dataclass(eq=False, slots=True)
class Slot:
    """One trajectory of the window.

    ``path`` is its file, empty before it has one; ``rows`` the rows of each column, left-out ones
    included; ``place`` None while it is cold; ``is_filled`` whether pages are behind the place.
    """

    entry: Entry
    path: str
    rows: tuple[int, ...]
    is_written: bool
    is_filled: bool
    place: Place | None
    number: int = -1
    is_checked: bool = False


class Places:
    """The lanes of one schema. ``find`` and ``give_back`` are for one thread at a time.

    ``homes[position]`` is a column's lane, its number in the lane, and all rows of its range
    (None for a column without bytes); ``texts[position]`` the table of a text column.
    """

    def __init__(self, schema: Schema, *, can_map: bool, reserved_bytes: int) -> None:
        self.schema = schema
        self._can_map = can_map
        self._maps = vm.MapShare()
        self.lanes = _reserve(schema, reserved_bytes, can_map)
        self.texts = {i: TextTable() for i, c in enumerate(schema.columns) if c.is_text}
        self.homes: list[tuple[int, int, Array] | None] = [None] * len(schema.columns)
        for lane_number, lane in enumerate(self.lanes):
            for i, position in enumerate(lane.positions):
                self.homes[position] = (lane_number, i, lane.arrays[i])

    def find(self, rows: tuple[int, ...]) -> Place | None:
        """A place for a trajectory; None when there is no room now, OSError without memory."""
        extents: list[Extent] = []
        is_even = len(set(rows)) == 1  # no column with left-out rows
        try:
            for lane in self.lanes:
                num_rows = rows[0] if is_even else max(rows[p] for p in lane.positions)
                extent = lane.place(num_rows)
                if extent is None:
                    break
                extents.append(extent)
        finally:
            is_whole = len(extents) == len(self.lanes)
            if not is_whole:
                for lane, extent in zip(self.lanes, extents, strict=False):
                    lane.release(extent)
        return Place(extents) if is_whole else None

    def find_all(self, rows: Sequence[tuple[int, ...]]) -> list[Place] | None:
        """Places for many trajectories, at the cost of few; None where each has to be asked for."""
        found: list[list[Extent]] = []
        try:
            for lane in self.lanes:
                # Most are as long as others: few of these tuples differ.
                longest = {r: max(r[p] for p in lane.positions) for r in set(rows)}
                extents = lane.place_all([longest[r] for r in rows])
                if extents is None:
                    break
                found.append(extents)
        finally:
            is_whole = len(found) == len(self.lanes)
            if not is_whole:
                for lane, extents in zip(self.lanes, found, strict=False):
                    for extent in reversed(extents):
                        lane.release(extent)
        return [Place(list(extents)) for extents in zip(*found, strict=True)] if is_whole else None

    def give_back(self, place: Place) -> None:
        """Give the rows and pages of a place back. No gather may look at them any more."""
        for lane, extent in zip(self.lanes, place.extents, strict=True):
            lane.release(extent)
        self._maps.give_back(place.num_maps)

    def starts(self, place: Place) -> list[int]:
        """The place's first row in each lane."""
        return [
            extent.start // lane.row_bytes
            for lane, extent in zip(self.lanes, place.extents, strict=True)
        ]

    def starts_of(self, places: Sequence[Place]) -> Array:
        """The first rows of many places; int64 ``[lanes, n]``."""
        return np.array(
            [
                [place.extents[i].start // lane.row_bytes for place in places]
                for i, lane in enumerate(self.lanes)
            ],
            np.int64,
        )

    def rows_of(self, place: Place, position: int, num_rows: int) -> Array:
        """A column's rows; a view of the range."""
        home = self.homes[position]
        if home is None:
            column = self.schema.columns[position]
            return np.empty((num_rows, *column.row_shape), column.storage)
        lane_number, _, array = home
        start = place.extents[lane_number].start // self.lanes[lane_number].row_bytes
        return array[start : start + num_rows]

    def copy_in(self, place: Place, payload: Payload) -> None:
        """Copy a trajectory's rows to its place."""
        for lane, extent in zip(self.lanes, place.extents, strict=True):
            lane.commit(extent)
        with torch.no_grad():
            for position, num_rows in enumerate(payload.rows):
                rows = self.rows_of(place, position, num_rows)
                text = self.texts.get(position)
                if text is None:
                    payload.copy_rows(position, rows)
                else:
                    rows[...] = text.encode(payload.texts(position))

    def fill(self, slot: Slot, place: Place) -> bool:
        """Map or copy the slot's file to its place; False where no mapping or memory is left."""
        columns = self._columns_to_map(slot, place)
        if not self._maps.take(len(columns)):
            return False
        try:
            with self._opened(slot) as source:
                for position, lane, extent, i in columns:
                    fd, offset = source.location(position)
                    lane.ranges[i].map_file(extent.start, extent.stop, fd, offset)
                self._read_in(source, slot, place, {position for position, *_ in columns})
        except BaseException as error:
            # The next try may map other columns, and must find no mapping where it copies.
            for _, lane, extent, i in columns:
                with suppress(OSError):  # `_read_in` does it again
                    lane.ranges[i].release(extent.start, extent.stop)
            self._maps.give_back(len(columns))
            if isinstance(error, OSError) and vm.is_out_of_memory(error):
                return False
            raise
        place.num_maps = len(columns)
        return True

    def rewire(self, slot: Slot, place: Place) -> bool:
        """Put the pages of the slot's file in the place of equal anonymous ones.

        False where no mapping is left. Where the system refuses for another reason the anonymous
        pages stay: they are as right as the file's.
        """
        columns = self._columns_to_map(slot, place)
        if not columns:
            return True
        if place.num_maps:  # it is already, and what came after that failed
            return True
        if not self._maps.take(len(columns)):
            return False
        place.num_maps = len(columns)
        try:
            with self._opened(slot) as source:
                for position, lane, extent, i in columns:
                    fd, offset = source.location(position)
                    size = slot.rows[position] * lane.row_bytes
                    lane.ranges[i].rewire(extent.start, extent.stop, fd, offset, size)
        except (OSError, CorruptError) as error:
            _log.warning("%s: its pages stay in memory of their own: %s", slot.path, error)
        return True

    def read_rows(self, slot: Slot, rows: Array, leaves: Sequence[Any], targets: Array) -> None:
        """Read ``rows`` of a cold slot from its file into ``leaves[position][targets]``.

        Of text columns the codes. Columns whose leaf is None are left out.
        """
        with self._opened(slot) as source:
            source.read_rows(rows, leaves, targets)
            for position, text in self.texts.items():
                if leaves[position] is None:
                    continue
                codes, strings = source.read_text(position)
                leaves[position][targets] = text.encode(strings)[codes[rows]]

    def close(self, places: Iterable[Place]) -> None:
        """Give all addresses back, with those of the ``places`` that were not given back."""
        self._maps.give_back(sum(place.num_maps for place in places))
        for lane in self.lanes:
            lane.close()

    @contextmanager
    def _opened(self, slot: Slot) -> Iterator[Source]:
        """The slot's file, compared with its entry when it is opened for the first time."""
        format_ = storage.FORMATS[slot.entry.format]
        is_checked = slot.is_checked
        with format_.opened(slot.path, slot.entry, self.schema, is_checked=is_checked) as source:
            slot.is_checked = True
            yield source

    def _columns_to_map(self, slot: Slot, place: Place) -> list[tuple[int, Lane, Extent, int]]:
        """Position, lane, extent and range of each column whose file part is to be mapped."""
        if not self._can_map or not storage.FORMATS[slot.entry.format].CAN_MAP:
            return []
        threshold = vm.MAP_THRESHOLD * (_SHORT_OF_MAPS if vm.MAPS.is_short else 1)
        found = []
        for position, home in enumerate(self.homes):
            if home is None:
                continue
            lane, extent = self.lanes[home[0]], place.extents[home[0]]
            is_aligned = slot.entry.parts[position].offset % vm.PAGE == 0
            size = slot.rows[position] * lane.row_bytes
            if extent.is_mappable and is_aligned and size >= threshold:
                found.append((position, lane, extent, home[1]))
        return found

    def _read_in(self, source: Source, slot: Slot, place: Place, mapped: set[int]) -> None:
        """Copy the columns that are not mapped from the file to their place."""
        for position, num_rows in enumerate(slot.rows):
            home = self.homes[position]
            if home is None or position in mapped:
                continue
            extent = place.extents[home[0]]
            if extent.is_mappable:
                range_ = self.lanes[home[0]].ranges[home[1]]
                range_.release(extent.start, extent.stop)  # what an earlier try may have mapped
                range_.commit(extent.start, extent.stop)
            rows = self.rows_of(place, position, num_rows)
            text = self.texts.get(position)
            if text is None:
                source.read_part(position, rows)
            else:
                codes, strings = source.read_text(position)
                rows[...] = text.encode(strings)[codes]


def _reserve(schema: Schema, reserved_bytes: int, can_map: bool) -> list[Lane]:
    """Lanes with as many rows as ``reserved_bytes`` of addresses, or what is to be had, allow."""
    row_bytes = sum(column.row_bytes for column in schema.columns)
    left = vm.address_space_left()
    if left is not None:
        reserved_bytes = min(reserved_bytes, left // 2)
    while True:
        try:
            return lanes_of(schema.columns, reserved_bytes // max(1, row_bytes), can_map=can_map)
        except OSError as error:
            reserved_bytes //= 2
            if reserved_bytes < _MIN_RESERVED_BYTES:
                raise MemoryError(
                    f"expected {_MIN_RESERVED_BYTES} bytes of addresses, got none: {error}. "
                    f"Raise RLIMIT_AS (ulimit -v)."
                ) from error
