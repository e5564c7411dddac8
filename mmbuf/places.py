"""Places: where trajectories lie in the lanes of a schema, and the pages behind them.

Between `lane`, which knows rows and addresses, and `cache`, which knows which trajectories are in
the window: here a trajectory's columns are copied in, mapped, rewired or read. Nothing here says
*when* a place may be taken away; that is the cache's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmbuf import storage, vm
from mmbuf.columns import union
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError
from mmbuf.lane import Extent, Lane, lanes_of
from mmbuf.schema import Array, Column, Path, Payload, Schema
from mmbuf.storage import Source
from mmbuf.text import TextUse, WindowText, give_back

RESERVED_BYTES = 8 << 40  # of the 128 TiB of addresses that a process has
_MIN_RESERVED_BYTES = 64 << 20
_SHORT_OF_MAPS = 4  # the threshold rises by this when half of the process's mappings are spent

_log = logging.getLogger("mmbuf")

_Home = tuple[int, int, Array]  # a lane, a range of it, all rows of that


@dataclass(slots=True)
class Place:
    """An extent in each lane, how many of the columns there are mapped, and what text it uses."""

    extents: list[Extent]
    num_maps: int = 0
    texts: list[TextUse] = field(default_factory=list)


class Layout:
    """Where the columns of one schema lie in the lanes: of trajectories, or of batches.

    ``homes[position]`` is a column's lane, its number in the lane, and all rows of its range
    (None for a column without bytes); ``texts[position]`` the table of a text column. ``takes``
    are what gathers rows, each with its lane; ``members`` the columns in each lane, by position.
    """

    def __init__(
        self,
        schema: Schema,
        homes: list[_Home | None],
        texts: dict[int, WindowText],
        num_lanes: int,
    ) -> None:
        self.schema = schema
        self.homes = homes
        self.texts = texts
        self.positions = {column.path: i for i, column in enumerate(schema.columns)}
        self.widest = max((column.row_bytes for column in schema.columns), default=0)
        self.takes = [
            (home[0], home[2].take) if home else (0, _no_bytes(column).take)
            for home, column in zip(homes, schema.columns, strict=True)
        ]
        self.members: list[list[int]] = [[] for _ in range(num_lanes)]
        for position, home in enumerate(homes):
            if home is not None:
                self.members[home[0]].append(position)
        self._idle = [lane for lane, positions in enumerate(self.members) if not positions]

    def idle_lanes(self, num_lanes: int) -> list[int]:
        """The lanes, of so many, without any of these columns."""
        return [*self._idle, *range(len(self.members), num_lanes)]

    def members_of(self, lane_number: int) -> list[int]:
        """The columns in a lane, which may be a later one."""
        return self.members[lane_number] if lane_number < len(self.members) else []


@dataclass(eq=False, slots=True)
class Slot:
    """One trajectory of the window.

    ``path`` is its file, empty before it has one; ``layout`` that of its own columns; ``rows`` the
    rows of each, left-out ones included; ``place`` None while it is cold; ``is_filled`` whether
    pages are behind the place.
    """

    entry: Entry
    path: str
    layout: Layout
    rows: tuple[int, ...]
    is_written: bool
    is_filled: bool
    place: Place | None
    number: int = -1
    is_checked: bool = False


class Places:
    """The lanes of one list. What changes them is for one thread at a time.

    ``schema`` is the union of all columns. What comes later gets lanes of its own; a place has
    extents in all lanes that there were when it was found.
    """

    def __init__(self, schema: Schema, *, can_map: bool, reserved_bytes: int) -> None:
        self.schema = Schema(())
        self.lanes: list[Lane] = []
        self.texts: dict[Path, WindowText] = {}
        self._can_map = can_map
        self._reserved_bytes = reserved_bytes
        self._maps = vm.MapShare()
        self._homes: dict[Path, _Home] = {}
        self._layouts: dict[Schema, Layout] = {}
        self._known: dict[int, Layout] = {}  # by the identity of schemas, which these keep
        self.first = self.layout_of(schema)

    @property
    def schemas(self) -> list[Schema]:
        """Those of all layouts, oldest first."""
        return list(self._layouts)

    def layout_of(self, schema: Schema) -> Layout:
        """The layout of these columns; those that are new get lanes of their own.

        SchemaError where one does not fit to the others, MemoryError where there is no room.
        """
        layout = self._known.get(id(schema))
        if layout is None:
            layout = self._layouts.get(schema)
            if layout is None:
                layout = self._layouts[schema] = self._laid_out(schema)
                self._known[id(schema)] = layout
        return layout

    def _laid_out(self, schema: Schema) -> Layout:
        known = union(self.schema, schema) if self.schema.columns else schema
        new = known.columns[len(self.schema.columns) :]
        if new:
            lanes = _reserve(new, self._reserved_bytes, self._can_map)
            self.schema = known
            for lane_number, lane in enumerate(lanes, len(self.lanes)):
                for i, position in enumerate(lane.positions):
                    self._homes[new[position].path] = (lane_number, i, lane.arrays[i])
            self.lanes.extend(lanes)
            self.texts |= {column.path: WindowText() for column in new if column.is_text}
        columns = list(enumerate(schema.columns))
        return Layout(
            schema,
            [self._homes.get(column.path) for _, column in columns],
            {i: self.texts[column.path] for i, column in columns if column.is_text},
            len(self.lanes),
        )

    def find(self, layout: Layout, rows: tuple[int, ...]) -> Place | None:
        """A place for a trajectory; None when there is no room now, OSError without memory."""
        extents: list[Extent] = []
        is_even = len(set(rows)) == 1  # no column with left-out rows
        try:
            for lane_number, lane in enumerate(self.lanes):
                num_rows = rows[0] if is_even else _longest(layout, lane_number, rows)
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

    def find_all(self, slots: Sequence[Slot]) -> list[Place] | None:
        """Places for many trajectories, at the cost of few; None where each has to be asked for."""
        found: list[list[Extent]] = []
        keys = [(slot.layout, slot.rows) for slot in slots]
        try:
            for lane_number, lane in enumerate(self.lanes):
                # Most are as long as others: few of these keys differ.
                longest = {key: _longest(key[0], lane_number, key[1]) for key in set(keys)}
                extents = lane.place_all([longest[key] for key in keys])
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
        for lane, extent in zip(self.lanes, place.extents, strict=False):
            lane.release(extent)
        self._maps.give_back(place.num_maps)
        give_back(place.texts)

    def starts(self, place: Place) -> list[int]:
        """The place's first row in each lane."""
        return [
            extent.start // lane.row_bytes
            for lane, extent in zip(self.lanes, place.extents, strict=False)
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

    def rows_of(self, layout: Layout, place: Place, position: int, num_rows: int) -> Array:
        """The rows of a column of its layout; a view of the range."""
        home = layout.homes[position]
        if home is None:
            column = layout.schema.columns[position]
            return np.empty((num_rows, *column.row_shape), column.storage)
        lane_number, _, array = home
        start = place.extents[lane_number].start // self.lanes[lane_number].row_bytes
        return array[start : start + num_rows]

    def copy_in(self, layout: Layout, place: Place, payload: Payload) -> None:
        """Copy a trajectory's rows, which has these columns, to its place."""
        for lane_number, extent in enumerate(place.extents):
            if layout.members_of(lane_number):
                self.lanes[lane_number].commit(extent)
        with torch.no_grad():
            for position, num_rows in enumerate(payload.rows):
                rows = self.rows_of(layout, place, position, num_rows)
                text = layout.texts.get(position)
                if text is None:
                    payload.copy_rows(position, rows)
                else:
                    rows[...], use = text.encode(payload.texts(position))
                    place.texts.append(use)

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
            give_back(place.texts)
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

    def read_rows(
        self,
        slot: Slot,
        shown: Layout,
        rows: Array,
        leaves: Sequence[Any],
        targets: Array,
        uses: list[TextUse],
    ) -> None:
        """Read ``rows`` of a cold slot from its file into ``leaves[position][targets]``.

        Of text columns the codes, whose uses join ``uses``. The leaves are of the columns of
        ``shown``, which the slot has; those that are None are left out.
        """
        if shown is not slot.layout:
            by_path = dict(zip(shown.positions, leaves, strict=True))
            leaves = [by_path.get(path) for path in slot.layout.positions]
        with self._opened(slot) as source:
            source.read_rows(rows, leaves, targets)
            for position, text in slot.layout.texts.items():
                if leaves[position] is None:
                    continue
                codes, strings = source.read_text(position)
                own, use = text.encode(strings)
                uses.append(use)
                leaves[position][targets] = own[codes[rows]]

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
        schema = slot.layout.schema
        with format_.opened(slot.path, slot.entry, schema, is_checked=is_checked) as source:
            slot.is_checked = True
            yield source

    def _columns_to_map(self, slot: Slot, place: Place) -> list[tuple[int, Lane, Extent, int]]:
        """Position, lane, extent and range of each column whose file part is to be mapped."""
        if not self._can_map or not storage.FORMATS[slot.entry.format].CAN_MAP:
            return []
        threshold = vm.MAP_THRESHOLD * (_SHORT_OF_MAPS if vm.MAPS.is_short else 1)
        found = []
        for position, home in enumerate(slot.layout.homes):
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
            home = slot.layout.homes[position]
            if home is None or position in mapped:
                continue
            extent = place.extents[home[0]]
            if extent.is_mappable:
                range_ = self.lanes[home[0]].ranges[home[1]]
                range_.release(extent.start, extent.stop)  # what an earlier try may have mapped
                range_.commit(extent.start, extent.stop)
            rows = self.rows_of(slot.layout, place, position, num_rows)
            text = slot.layout.texts.get(position)
            if text is None:
                source.read_part(position, rows)
            else:
                codes, strings = source.read_text(position)
                own, use = text.encode(strings)
                place.texts.append(use)
                rows[...] = own[codes]


def _longest(layout: Layout, lane_number: int, rows: tuple[int, ...]) -> int:
    """The rows that a trajectory takes in a lane: as many where it has no column there."""
    return max((rows[p] for p in layout.members_of(lane_number)), default=min(rows))


def _no_bytes(column: Column) -> Array:
    """Any number of rows of a column whose rows have no bytes."""
    return np.empty((1, *column.row_shape), column.storage)


def _reserve(columns: tuple[Column, ...], reserved_bytes: int, can_map: bool) -> list[Lane]:
    """Lanes with as many rows as ``reserved_bytes`` of addresses, or what is to be had, allow."""
    row_bytes = sum(column.row_bytes for column in columns)
    left = vm.address_space_left()
    if left is not None:
        reserved_bytes = min(reserved_bytes, left // 2)
    while True:
        try:
            return lanes_of(columns, reserved_bytes // max(1, row_bytes), can_map=can_map)
        except OSError as error:
            reserved_bytes //= 2
            if reserved_bytes < _MIN_RESERVED_BYTES:
                raise MemoryError(
                    f"expected {_MIN_RESERVED_BYTES} bytes of addresses, got none: {error}. "
                    f"Raise RLIMIT_AS (ulimit -v)."
                ) from error
