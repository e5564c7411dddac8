"""Lanes: the columns of equal row size, side by side in address ranges, as a ring of rows.

Not in the first design, which gave this to the cache: a lane knows *where* rows lie and which pages
are behind them, the cache knows *whose* rows they are.

All columns of a lane share their row numbers, so that one computation of row numbers serves them
all. A trajectory's *extent* in a lane is one of two kinds:

mappable
    starts at a row that is also a page boundary (2 MiB where the extent is that large and the row
    size allows) and owns whole pages, so that a file can be mapped over it;
dense
    starts right behind the row before it; copied, never mapped.

Ranges are reserved once, as large as they may ever grow, and rows go round in them: a soft limit
decides when the ring turns, and doubles while the live rows do not fit below it. So nothing is ever
moved, and page tables stay proportional to what is live. Extents are given back to the ring, and
their pages to the system, oldest first. The live ones lie in *runs*, each without a turn in it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmbuf import vm
from mmbuf.schema import Array, Column
from mmbuf.vm import HUGE_PAGE, PAGE, AddressRange, round_up

# An extent may take this many times its bytes in addresses to begin on a page boundary.
_MAX_STRETCH = 64
_FIRST_LIMIT = 64 << 20
_COMMIT_STEP = 256 << 10

_log = logging.getLogger("mmbuf")


@dataclass(slots=True)
class Extent:
    """A trajectory's bytes ``[start, stop)`` in each range of a lane."""

    start: int
    stop: int
    is_mappable: bool
    is_released: bool = False


class Lane:
    """One ring of rows for ``columns``, whose ``row_bytes`` are equal.

    ``place``, ``release`` and ``close`` are for one thread at a time. ``positions`` are the
    columns' places in the schema; ``arrays`` all rows of each range (views: see `vm`).
    """

    def __init__(
        self, positions: list[int], columns: list[Column], num_rows: int, *, can_map: bool
    ) -> None:
        self.positions = positions
        self.row_bytes = columns[0].row_bytes
        self._can_map = can_map and not columns[0].is_text
        self._page = math.lcm(self.row_bytes, PAGE)
        self._huge_page = math.lcm(self.row_bytes, HUGE_PAGE)
        self._size = round_up(num_rows * self.row_bytes, HUGE_PAGE)
        self.ranges: list[AddressRange] = []
        try:
            for _ in columns:
                self.ranges.append(AddressRange(self._size))
        except OSError:
            self.close()
            raise
        self.arrays: list[Array] = [
            range_.array(column.storage, column.row_shape)
            for range_, column in zip(self.ranges, columns, strict=True)
        ]
        self._limit = min(self._size, max(_FIRST_LIMIT, 2 * self._page))
        self._runs: deque[deque[Extent]] = deque()  # oldest first, and so is each of them
        # Up to here the bytes behind the newest extent can be written, and have pages already.
        self._committed = self._populated = 0

    def place(self, num_rows: int) -> Extent | None:
        """Take the next ``num_rows`` rows of the ring; None when there is no room now.

        Dense extents have anonymous pages at once. OSError when there is no memory.
        """
        size = num_rows * self.row_bytes
        step = self._step(size)
        head = self._runs[-1][-1].stop if self._runs else 0
        start = round_up(head, self.row_bytes)
        if self._runs and not step and start + size <= self._committed:  # nothing to look for
            self._runs[-1].append(Extent(start, start + size, False))
            return self._runs[-1][-1]
        extent = self._fit(head, size, step) or self._fit_elsewhere(size, step)
        if extent is None:
            return None
        is_new_run = not self._runs or extent.start != round_up(head, step or self.row_bytes)
        if is_new_run:
            self._committed = self._populated = 0
        if not extent.is_mappable:
            self._commit_dense(extent)
        if is_new_run:
            self._runs.append(deque())
        self._runs[-1].append(extent)
        return extent

    def place_all(self, num_rows: Sequence[int]) -> list[Extent] | None:
        """Take so many rows for each of many trajectories, at the cost of few; None if it cannot.

        It can where all are of one kind and lie behind the newest without a turn; nothing is done
        otherwise, and `place` is to be asked for each.
        """
        steps = {length: self._step(length * self.row_bytes) for length in set(num_rows)}
        is_mappable = any(steps.values())
        if is_mappable and not all(steps.values()):
            return None
        units = {  # what an extent of so many rows starts on, and its bytes
            length: (step or self.row_bytes, round_up(length * self.row_bytes, step or 1))
            for length, step in steps.items()
        }
        head = self._runs[-1][-1].stop if self._runs else 0
        extents: list[Extent] = []
        stop = head
        for length in num_rows:
            unit, size = units[length]
            start = -(-stop // unit) * unit
            stop = start + size
            extents.append(Extent(start, stop, is_mappable))
        limit = self._limit
        while limit < min(round_up(stop, PAGE), self._size):
            limit = min(2 * limit, self._size)
        if round_up(stop, PAGE) > self._roof(head, limit):
            return None
        self._limit = limit
        if not self._runs:
            self._committed = self._populated = 0
        if not is_mappable:
            self._commit_dense(Extent(extents[0].start, stop, False))
        if not self._runs:
            self._runs.append(deque())
        self._runs[-1].extend(extents)
        return extents

    def commit(self, extent: Extent) -> None:
        """Put anonymous pages behind an extent that rows are copied into now."""
        if extent.is_mappable:
            for range_ in self.ranges:
                range_.commit(extent.start, extent.stop)
        elif extent.stop > self._populated and self._populated < self._committed:
            # As far ahead as is committed, since a fault for each page would cost more than the
            # copy; and by huge pages, since random rows of them are looked up faster.
            start = max(_floor(extent.start), self._populated)
            for range_ in self.ranges:
                range_.populate(start, self._committed)
            self._populated = self._committed

    def release(self, extent: Extent) -> None:
        """Give back the extent's rows, and the pages that only released extents lie in.

        What the system refuses stays taken, and is given back with a later extent.
        """
        extent.is_released = True
        try:
            if extent is not self._runs[0][0]:
                self._empty(extent)
            self._give_back_ends()
        except OSError as error:
            _log.warning("addresses could not be given back yet: %s", error)

    def _empty(self, extent: Extent) -> None:
        """Give back what is behind an extent whose rows stay taken for as long as older ones."""
        if extent.is_mappable:
            self._give_back(extent.start, round_up(extent.stop, PAGE))
            return
        for range_ in self.ranges:
            range_.discard(round_up(extent.start, PAGE), _floor(extent.stop))

    def _give_back_ends(self) -> None:
        while self._runs and self._runs[0][0].is_released:
            run = self._runs[0]
            oldest = run[0]
            if len(run) == 1 and run is self._runs[-1]:
                self._committed = self._populated = 0
            # A dense extent's last page may hold the first rows of the next one.
            stop = _floor(run[1].start) if len(run) > 1 else round_up(oldest.stop, PAGE)
            self._give_back(_floor(oldest.start), stop)
            run.popleft()
            if not run:
                self._runs.popleft()
        # What was taken last and never used, since a later step of adding it failed.
        while self._runs and self._runs[-1][-1].is_released:
            run = self._runs[-1]
            newest = run[-1]
            start = newest.start if newest.is_mappable else round_up(newest.start, PAGE)
            self._committed = min(self._committed, start)
            self._populated = min(self._populated, start)
            self._give_back(start, round_up(newest.stop, PAGE))
            run.pop()
            if not run:
                self._runs.pop()
                self._committed = self._populated = 0

    def close(self) -> None:
        for range_ in self.ranges:
            range_.close()
        self.ranges = []

    def _step(self, size: int) -> int:
        """What a mappable extent of ``size`` bytes starts on and is rounded up to; 0 for dense."""
        if not self._can_map or size < vm.MAP_THRESHOLD:
            return 0
        if size >= HUGE_PAGE and round_up(size, self._huge_page) <= 2 * size:
            return self._huge_page
        return self._page if round_up(size, self._page) <= _MAX_STRETCH * size else 0

    def _fit(self, head: int, size: int, step: int) -> Extent | None:
        """The extent of ``size`` bytes from ``head`` on, None if its pages would cross the roof."""
        start = round_up(head, step or self.row_bytes)
        stop = start + round_up(size, step or 1)
        fits = round_up(stop, PAGE) <= self._roof(head)
        return Extent(start, stop, step > 0) if fits else None

    def _fit_elsewhere(self, size: int, step: int) -> Extent | None:
        """The extent where the newest run cannot go on: at the start, or above all others."""
        while True:
            # Turning for a short stretch only would make the ring turn all the time.
            if 2 * self._roof(0) >= self._limit or self._limit == self._size:
                extent = self._fit(0, size, step)
                if extent is not None:
                    return extent
            if self._limit == self._size:
                return None
            self._limit = min(2 * self._limit, self._size)
            top = max((run[-1].stop for run in self._runs), default=0)
            extent = self._fit(round_up(top, PAGE), size, step)
            if extent is not None:
                return extent

    def _roof(self, head: int, limit: int | None = None) -> int:
        """Where the free bytes from ``head`` on end; ``limit`` instead of the one that holds."""
        starts = [_floor(run[0].start) for run in self._runs if run[0].start >= head]
        return min(starts, default=self._limit if limit is None else limit)

    def _commit_dense(self, extent: Extent) -> None:
        start, stop = max(_floor(extent.start), self._committed), round_up(extent.stop, PAGE)
        if stop <= start:
            return
        # Ahead of need, since a system call per column and trajectory would cost more than a copy;
        # and as far as whole huge pages go once there are many rows (see `commit`).
        ahead = start + _COMMIT_STEP if start < HUGE_PAGE else round_up(stop, HUGE_PAGE)
        stop = max(stop, min(ahead, self._roof(extent.start)))
        for range_ in self.ranges:
            range_.commit(start, stop, is_whole=False)  # nobody knows which rows will be filled
        self._committed = stop

    def _give_back(self, start: int, stop: int) -> None:
        if start < stop:
            for range_ in self.ranges:
                range_.release(start, stop)


def _floor(position: int) -> int:
    return position // PAGE * PAGE


def lanes_of(columns: tuple[Column, ...], num_rows: int, *, can_map: bool) -> list[Lane]:
    """The lanes of a schema's columns, each with room for about ``num_rows`` rows.

    OSError when so many addresses are not to be had.
    """
    groups: dict[Any, list[int]] = {}
    for position, column in enumerate(columns):
        if column.row_bytes:
            groups.setdefault((column.row_bytes, column.is_text), []).append(position)
    lanes: list[Lane] = []
    try:
        for positions in groups.values():
            members = [columns[position] for position in positions]
            lanes.append(Lane(positions, members, num_rows, can_map=can_map))
    except OSError:
        for lane in lanes:
            lane.close()
        raise
    return lanes
