"""TrajectoryCache: the window's trajectories in address ranges; put, rewire, evict, gather.

What a trajectory goes through::

    put      rows copied into anonymous pages; can be sampled at once
    written  its file is published: the file's pages take the place of the anonymous ones (rewire)
    evict    it left the cache or the window: its addresses are given back

A trajectory of a store that is opened starts with a *place* and without pages; it is filled (mapped
or copied from its file) when a row of it is first drawn. A trajectory of the window that has no
place (``cache_size`` smaller than the window, caching off, mappings spent) is *cold*: its rows are
read from the file.

Gathers take no lock. They read one published `View`, complete before it is published; they pin it
while they go on and look again whether it is still the current one. Addresses are given back only
when no view published before the eviction is pinned (`reclaim`). A gather may be interrupted
anywhere: its pin is a variable of its own and goes with it. All that changes the cache runs where
no signal interrupts it (`shield`), filling and cold reads within a gather too.

No array that points into a range leaves this module, but for `lend` and `held`: who writes files
needs the pages of trajectories that are not given back before he is done.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmbuf import shield, vm
from mmbuf.columns import common, union_of
from mmbuf.entry import Entry
from mmbuf.errors import ClosedError, CorruptError, EmptyBufferError, SchemaError
from mmbuf.places import RESERVED_BYTES, Layout, Place, Places, Slot
from mmbuf.pool import MIN_BYTES, BatchPool
from mmbuf.sampling.draw import Delivery, Draw, StaleSightError
from mmbuf.schema import Array, Column, Path, Payload, Schema
from mmbuf.slots import Facts, Pin, SlotTable, View
from mmbuf.text import TextUse, WindowText, give_back

_Seen = TypeVar("_Seen")
Leaf = Any  # an array [K, *S] in storage dtype, or a list of K str
Lent = tuple[list[Array], dict[int, list[str]]]  # rows of each column, strings of text columns

_MANY = 64  # trajectories that are opened at once are placed at once

STATS = ("window_trajectories", "window_samples", "cache_size", "cache_filled", "cache_maps")


class Origins(NamedTuple):
    """Where the rows of a batch are from: int64 ``[K]``, and handles ``[K, 2]``.

    A handle is the mark of the trajectory's uuid and the row in the trajectory: it names the row
    for as long as there is the trajectory, and never another one.
    """

    trajectory_id: Array
    step: Array
    env: Array
    handle: Array


@dataclass(slots=True)
class _Retired:
    """What is given back when the gathers of ``blockers`` have ended."""

    blockers: list[View]
    place: Place | None
    number: int | None
    texts: list[TextUse] = field(default_factory=list)


class _End:
    """Held by the pins of a cache that is closed."""


class Sight:
    """The window as one gather sees it, for samplers; see `mmbuf.sampling.Sight`."""

    __slots__ = ("_cache", "delivery", "view")

    def __init__(self, cache: TrajectoryCache, view: View, delivery: Delivery) -> None:
        self._cache = cache
        self.view = view
        self.delivery = delivery

    @property
    def owner(self) -> object:
        return self._cache.identity

    @property
    def schema(self) -> Schema:
        schema = self.view.schema
        assert schema is not None
        return schema

    @property
    def union(self) -> Schema:
        union = self.view.union
        assert union is not None
        return union

    def read(self, paths: Sequence[Path], rows: Array) -> list[Leaf]:
        return self._cache.read(self.view, paths, rows)

    def entry(self, index: int) -> Entry:
        return self._cache.entry(self.view, index)


class TrajectoryCache:
    """The rows of a window of trajectories of one list; ``schema`` is the union of their columns.

    The window is the newest ``window_size`` of all put (0: all), and a gather is of the columns
    that all of these have; the newest ``cache_size`` of them (None: all) have a place in memory.
    ``can_map=False`` never maps a file. One thread may put, one call `written`, and any number
    gather, all at the same time.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        window_size: int = 0,
        cache_size: int | None = None,
        can_map: bool = True,
        reserved_bytes: int = RESERVED_BYTES,
    ) -> None:
        self.identity = object()  # of its slot numbers
        self._window_size = window_size
        self._cache_size = cache_size
        self._can_map = can_map
        self._places = Places(schema, can_map=can_map, reserved_bytes=reserved_bytes)
        self._pool = BatchPool()
        left = vm.memory_left()
        self._spared_bytes = None if left is None else left // 2
        self._table = SlotTable(len(self._places.lanes))
        self._shown = self._places.first
        self._num_of: dict[Layout, int] = {}  # how many slots of the window have which columns
        self._shown_of: set[Layout] = set()  # whose common columns they are
        self._union: Schema | None = self._shown.schema
        self._view = View(self._table, True, self._shown.schema, self._union)
        self._is_closed = False
        self._slots: dict[int, Slot] = {}
        self._resident: deque[Slot] = deque()  # those with a place, oldest first
        self._num_unfilled = 0  # of the window
        self._busy: list[View] = []  # earlier views that gathers still use
        self._retired: deque[_Retired] = deque()
        # Text of slots without a place, as it was read; given back with the view of that moment.
        self._cold_texts: dict[tuple[Slot, WindowText], TextUse] = {}
        self._lock = threading.Lock()  # guards all of the above but what gathers read
        self._fill_lock = threading.Lock()  # one fill at a time; taken before _lock
        self._vm_lock = threading.Lock()  # a place is not given back while it is rewired; first

    @property
    def schema(self) -> Schema:
        return self._places.schema

    @property
    def schemas(self) -> list[Schema]:
        """Those that trajectories have, or had."""
        return self._places.schemas

    @property
    def shown_schema(self) -> Schema:
        """The columns that every trajectory of the window has: those of a gather."""
        schema = self._view.schema
        assert schema is not None
        return schema

    def admit(self, schema: Schema) -> None:
        """Make room for columns that are new. SchemaError where they do not fit, MemoryError."""
        with self._lock:
            self._check_open()
            self._layout_of(schema)

    # -- adding ------------------------------------------------------------------------------

    def put(self, entry: Entry, payload: Payload, *, is_written: bool) -> Slot | None:
        """Copy a trajectory in; None, and nothing done, when there is no room at the moment.

        ``is_written`` is for one that will have no file: it may be evicted at any time. Raises
        MemoryError when it can never fit.
        """
        place = None
        try:
            with self._lock:
                self._check_open()
                layout = self._layout_of(payload.schema)
                place = self._places.find(layout, payload.rows)
                if place is None:
                    if not self._resident and not self._retired:
                        raise _too_large(payload.size_bytes)
                    return None
            self._places.copy_in(layout, place, payload)
        except BaseException as error:
            if place is not None:
                with self._lock:
                    self._places.give_back(place)
            if isinstance(error, OSError) and vm.is_out_of_memory(error):
                with self._lock:
                    if any(slot.path or not slot.is_written for slot in self._resident):
                        return None  # these can be read from their files instead
                raise MemoryError(f"a trajectory of {payload.size_bytes} bytes: {error}") from error
            raise
        slot = Slot(entry, "", layout, payload.rows, is_written, True, place)
        with self._lock:
            self._append(slot)
            self._publish(self._leave())
        return slot

    def open(self, entries: Iterable[tuple[Entry, str]]) -> list[Slot]:
        """Take in trajectories that have a file, oldest first, without reading one."""
        entries = list(entries)
        if self._window_size:
            entries = entries[-self._window_size :]
        cached = len(entries) if self._cache_size is None else self._cache_size
        num_cold = max(0, len(entries) - cached)
        # Equal parts of a journal are one object, and so are equal schemas.
        known: dict[int, tuple[int, ...]] = {}
        layouts = {id(None): self._places.first}
        slots = []
        with self._lock:
            self._check_open()
            for entry, path in entries:
                rows = known.get(id(entry.parts))
                if rows is None:
                    rows = known[id(entry.parts)] = tuple(part.rows for part in entry.parts)
                layout = layouts.get(id(entry.schema))
                if layout is None:
                    assert entry.schema is not None
                    layout = layouts[id(entry.schema)] = self._layout_of(entry.schema)
                slots.append(Slot(entry, path, layout, rows, True, False, None))
            if len(slots) < _MANY or not self._append_all(slots, num_cold):
                for i, slot in enumerate(slots):
                    slot.place = self._find_place(slot) if i >= num_cold else None
                    self._append(slot)
            self._publish(self._leave())
        self.reclaim()
        return slots

    def lend(self, slot: Slot) -> Lent:
        """The rows of each column of an unwritten slot, and the strings of text columns.

        Views of the range, for the writer alone: `written` must not have been called yet.
        """
        assert slot.place is not None
        return self._lend(slot, slot.place)

    @contextmanager
    def held(self) -> Iterator[Callable[[Slot], Lent | None]]:
        """Rows that stay where they are within the block, whatever is evicted meanwhile.

        Yields what lends a slot, None for one that was not in memory when the block began.
        """
        pin = Pin()
        with self._lock:  # or an eviction could be half done
            self._pinned(pin)
            places = {slot: slot.place for slot in self._resident if slot.is_filled}

        def lend(slot: Slot) -> Lent | None:
            place = places.get(slot)
            return None if place is None else self._lend(slot, place)

        try:
            yield lend
        finally:
            del pin
            self.reclaim()

    def _lend(self, slot: Slot, place: Place) -> Lent:
        rows: list[Array] = []
        texts: dict[int, list[str]] = {}
        for position, num_rows in enumerate(slot.rows):
            column_rows = self._places.rows_of(slot.layout, place, position, num_rows)
            text = slot.layout.texts.get(position)
            if text is not None:
                codes, local = np.unique(column_rows, return_inverse=True)
                texts[position] = text.decode(codes)
                column_rows = local.reshape(-1).astype(np.int32)
            rows.append(column_rows)
        return rows, texts

    def written(self, slot: Slot, entry: Entry, path: str) -> None:
        """The slot's file is published at ``path``: put its pages in the place of our own."""
        with self._lock:
            slot.entry, slot.path, slot.is_written, slot.is_checked = entry, path, True, True
            leaving = self._leave()
            if leaving:
                self._publish(leaving)
        if self._can_map:
            with self._vm_lock:
                place = slot.place
                # Meanwhile drop_pages may have given it another place, still to be filled.
                if place is None or not slot.is_filled:
                    pass
                elif not vm.CAN_REWIRE:
                    with self._lock:
                        self._place_anew([slot])
                elif not self._places.rewire(slot, place):
                    self._make_cold(slot)
        self.reclaim()

    # -- gathering ---------------------------------------------------------------------------

    def gather(
        self,
        draw: Callable[[int, int], Array],
        targets: Callable[[Schema], Sequence[Leaf]] | None = None,
    ) -> tuple[Schema, list[Leaf]]:
        """Copies of the rows that ``draw(low, high)`` gives, of the columns of the window.

        ``low`` and ``high`` bound the row numbers of the window; ``draw`` returns int64 ``[K]``.
        With their schema arrays ``[K, *S]`` in storage dtype, or list of K str. ``targets`` gives
        such, to be refilled. EmptyBufferError when there is no row, SchemaError when there is no
        column.
        """

        def look(view: View) -> tuple[Schema, list[Leaf]]:
            schema = self._shown_in(view).schema
            out = None if targets is None else targets(schema)
            return schema, self._gather(view, draw(view.low, view.high), out)

        return self._look(look)

    def sample(
        self,
        draw: Callable[[Sight], Draw],
        targets: Callable[[Schema, Draw], Sequence[Leaf] | None],
        delivery: Delivery,
        *,
        has_info: bool,
    ) -> tuple[Schema, list[Leaf], Draw, Origins | None]:
        """What a sampler draws: `gather` of its rows, the `Draw` itself and the rows' origins.

        ``targets`` gives the arrays to be refilled, or None. The origins, with ``has_info``
        only, are what `origins_of` says of them. ``delivery`` is told what is drawn in vain.
        """

        def look(view: View) -> tuple[Schema, list[Leaf], Draw, Origins | None]:
            try:
                schema = self._shown_in(view).schema
                drawn = draw(Sight(self, view, delivery))
                leaves = self._gather_draw(view, drawn, targets(schema, drawn))
                if drawn.derive is not None:
                    columns = zip(self._shown_in(view).positions, leaves, strict=True)
                    drawn.added |= drawn.derive(dict(columns))
                return schema, leaves, drawn, origins_of(view, drawn.rows) if has_info else None
            except BaseException:
                delivery.attempt += 1
                raise

        return self._look(look)

    def _look(self, look: Callable[[View], _Seen]) -> _Seen:
        """What ``look`` gives of the current view, while nothing that it shows is given back."""
        while True:
            pin = Pin()
            try:
                view = self._pinned(pin)
                if view.low == view.high:
                    raise EmptyBufferError("sample: expected rows to draw from, got none.")
                if not self._shown_in(view).takes:
                    raise SchemaError(
                        "sample: expected a column that every trajectory of the window has, "
                        "got none."
                    )
                return look(view)
            except StaleSightError:
                continue  # by now there is a newer one
            finally:
                del pin  # the traceback of an error may keep this frame for long

    def copy_of(self, slot: Slot) -> list[Leaf] | None:
        """A copy of all rows of a slot, left-out ones too; None when it has to be read."""
        pin = Pin()
        self._pinned(pin)
        try:
            # Whoever takes this place away from now on waits for our pin.
            place = slot.place
            if place is None or not slot.is_filled:
                return None
            leaves: list[Leaf] = []
            for position, num_rows in enumerate(slot.rows):
                rows = self._places.rows_of(slot.layout, place, position, num_rows)
                text = slot.layout.texts.get(position)
                leaves.append(np.array(rows) if text is None else text.decode(rows))
            return leaves
        finally:
            del pin

    def _pinned(self, pin: Pin) -> View:
        """The current view; nothing that it shows is given back while there is ``pin``."""
        while True:
            view = self._view
            reference = view.pin(pin)
            if view is self._view:
                return view
            view.pins.discard(reference)

    # -- giving back -------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Give back what was evicted and is not looked at any more. Does not wait."""
        with self._vm_lock, self._lock:
            while self._retired and not any(view.pins for view in self._retired[0].blockers):
                retired = self._retired.popleft()
                if retired.place is not None:
                    self._places.give_back(retired.place)
                give_back(retired.texts)
                if retired.number is not None:
                    self._slots.pop(retired.number, None)

    @property
    def has_evicted(self) -> bool:
        """Whether there is something that gathers had still to let go when it was evicted."""
        return bool(self._retired)

    def make_room(self) -> bool:
        """Take the oldest place that has a file, or wait for one to be let go; False if none."""
        self.reclaim()
        if self._retired:  # gathers still look at what will make room
            return True
        with self._lock:
            slot = next((slot for slot in self._resident if slot.path), None)
        if slot is not None:
            self._make_cold(slot)
            self.reclaim()
        return slot is not None

    def drop_pages(self, is_there: Callable[[str], bool] = lambda path: True) -> None:
        """Give back the memory of all that can be read from a file again, if that is there."""
        with self._lock:
            self._place_anew([s for s in self._resident if s.path and is_there(s.path)])
        self.reclaim()
        self._pool.clear()

    def remove(self, slots: Iterable[Slot]) -> None:
        """Take written slots out of the window, wherever they lie in it."""
        with self._lock:
            table = self._table
            gone = {slot for slot in slots if table.is_in_window(slot.number)}
            leaving = []
            for slot in gone:
                leaving.append(_Retired([], slot.place, slot.number))
                self._num_unfilled -= not slot.is_filled
                self._count(slot, -1)
                slot.place, slot.is_filled = None, False
            first, stop = table.first_number + table.first, table.first_number + table.stop
            while first < stop and self._slots[first] in gone:  # nearly always the oldest
                gone.remove(self._slots[first])
                table.drop_oldest()
                first += 1
            if gone:
                kept = [self._slots[n] for n in range(first, stop) if self._slots[n] not in gone]
                leaving.extend(_Retired([], None, slot.number) for slot in kept)
                table.keep(np.array([slot.number for slot in kept], np.int64))
                for number, slot in enumerate(kept, table.first_number):
                    slot.number = number
                    self._slots[number] = slot
            self._resident = deque(slot for slot in self._resident if slot.place is not None)
            self._publish(leaving)
        self.reclaim()

    def clear(self) -> None:
        """Forget all trajectories. None may be on its way to a file."""
        with self._lock:
            self._forget_all()
        self.reclaim()

    def close(self) -> None:
        """Give all addresses back: now, or when the gathers that go on have ended."""
        with self._lock:
            self._is_closed = True
            self._forget_all()
            end = _End()
            weakref.finalize(end, self._give_all_back).atexit = False
            for view in (*self._busy, self._view):
                for reference in tuple(view.pins):
                    pin = reference()
                    if pin is not None:
                        pin.holds = [*(pin.holds or ()), end]
        del end  # at the latest with the last of the pins

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("expected an open cache, got one that was closed.")

    def _give_all_back(self) -> None:
        with self._vm_lock, self._lock:
            self._places.close([retired.place for retired in self._retired if retired.place])
            self._retired.clear()
            self._cold_texts.clear()
            self._slots.clear()
        self._pool.clear()

    def renew_locks(self) -> None:
        """Make locks and pins anew, in a forked child: the threads that held them are gone."""
        self._lock = threading.Lock()
        self._fill_lock = threading.Lock()
        self._vm_lock = threading.Lock()
        for text in self._places.texts.values():
            text.renew_lock()
        for view in (*self._busy, self._view):
            view.pins.clear()

    def get_stats(self) -> dict[str, int]:
        """Counts of the window and of the cache."""
        with self._lock:
            counts = (
                self._table.stop - self._table.first,
                self._view.high - self._view.low,
                len(self._resident),
                sum(slot.is_filled for slot in self._resident),
                sum(slot.place.num_maps for slot in self._resident if slot.place),
            )
        return dict(zip(STATS, counts, strict=True))

    # -- the window, all under _lock -----------------------------------------------------------

    def _append(self, slot: Slot) -> None:
        starts = None if slot.place is None else self._places.starts(slot.place)
        num_samples = slot.entry.num_samples
        slot.number = self._table.append(
            num_samples, starts, is_filled=slot.is_filled, facts=_facts(slot.entry)
        )
        self._slots[slot.number] = slot
        self._count(slot, 1)
        if slot.place is not None:
            self._resident.append(slot)
        if not slot.is_filled:
            self._num_unfilled += 1

    def _append_all(self, slots: list[Slot], num_cold: int) -> bool:
        """Append unfilled slots at once, the first ``num_cold`` without places; False if not."""
        placed = slots[num_cold:]
        places = self._find_places(placed) if placed else []
        if places is None:
            return False
        for slot, place in zip(placed, places, strict=True):
            slot.place = place
        num_rows = np.array([slot.entry.num_samples for slot in slots], np.int64)
        facts = np.array([_facts(slot.entry) for slot in slots], np.int64).T
        starts = self._places.starts_of(places)
        for part, lane_starts in ((slice(num_cold), None), (slice(num_cold, None), starts)):
            if slots[part]:
                number = self._table.extend(num_rows[part], lane_starts, facts[:, part])
                for slot in slots[part]:
                    slot.number = number
                    self._slots[number] = slot
                    self._count(slot, 1)
                    number += 1
        self._resident.extend(placed)
        self._num_unfilled += len(slots)
        return True

    def _leave(self) -> list[_Retired]:
        """Take out of window and cache what is over their sizes; to be retired when published."""
        leaving: list[_Retired] = []
        table = self._table
        while self._window_size and table.stop - table.first > self._window_size:
            slot = self._slots[table.first_number + table.first]
            table.drop_oldest()
            self._count(slot, -1)
            if not slot.is_filled:
                self._num_unfilled -= 1
            if slot.place is None:
                leaving.append(_Retired([], None, slot.number))
        limit = len(self._resident) if self._cache_size is None else self._cache_size
        while self._resident:
            slot = self._resident[0]
            is_in_window = table.is_in_window(slot.number)
            if not slot.is_written or (is_in_window and len(self._resident) <= limit):
                break
            self._resident.popleft()
            leaving.append(self._take_place(slot))
        return leaving

    def _take_place(self, slot: Slot) -> _Retired:
        """Leave a slot without pages; what is given back when that is published."""
        is_in_window = self._table.is_in_window(slot.number)
        retired = _Retired([], slot.place, None if is_in_window else slot.number)
        slot.place = None
        if slot.is_filled:
            self._set_filled(slot, False)
        return retired

    def _forget_all(self) -> None:
        self._table.drop_all()
        self._num_of.clear()
        self._resident.clear()
        self._num_unfilled = 0
        leaving = []
        # One slot may still have two numbers, since gathers know it by its former one.
        for number, slot in self._slots.items():
            leaving.append(_Retired([], slot.place, number))
            slot.place = None
        self._publish(leaving)

    def _set_filled(self, slot: Slot, is_filled: bool) -> None:
        slot.is_filled = is_filled
        if self._table.is_in_window(slot.number):
            self._num_unfilled += -1 if is_filled else 1
            self._table.set_filled(slot.number, is_filled)

    def _publish(self, leaving: list[_Retired]) -> None:
        """Show gathers the window as it is now; what left is given back once they let it go."""
        if self._num_of and self._num_of.keys() != self._shown_of:
            self._shown_of = set(self._num_of)
            schemas = [layout.schema for layout in self._num_of]
            self._shown = self._layout_of(common(self._places.schema, schemas))
            self._union = union_of(schemas)
        idle_lanes = self._shown.idle_lanes(len(self._table.changed))
        is_filled = self._num_unfilled == 0
        view = View(self._table, is_filled, self._shown.schema, self._union, idle_lanes)
        old, self._view = self._view, view
        self._busy = [view for view in (*self._busy, old) if view.pins]
        if self._cold_texts:
            texts, self._cold_texts = [*self._cold_texts.values()], {}
            leaving = [*leaving, _Retired([], None, None, texts)]
        for retired in leaving:
            retired.blockers = self._busy
            self._retired.append(retired)

    def _count(self, slot: Slot, change: int) -> None:
        """A slot has come into the window, or left it."""
        self._num_of[slot.layout] = number = self._num_of.get(slot.layout, 0) + change
        if not number:
            del self._num_of[slot.layout]

    def _layout_of(self, schema: Schema) -> Layout:
        layout = self._places.layout_of(schema)
        if num_new := len(self._places.lanes) - len(self._table.offsets):
            self._table.add_lanes(num_new)
        return layout

    def _place_anew(self, slots: list[Slot]) -> None:
        """Give written slots places that are still to be filled, in exchange for theirs."""
        self._table.renew()
        leaving = []
        for slot in slots:
            leaving.append(self._take_place(slot))
            slot.is_checked = False
            slot.place = self._find_place(slot)
            if slot.place is not None:
                self._table.place(slot.number, self._places.starts(slot.place))
        self._resident = deque(slot for slot in self._resident if slot.place is not None)
        self._publish(leaving)

    def _find_place(self, slot: Slot) -> Place | None:
        """A place for what can be read from a file if there is none."""
        if self._is_short_of_memory():
            return None
        try:
            return self._places.find(slot.layout, slot.rows)
        except OSError:
            return None

    def _find_places(self, slots: list[Slot]) -> list[Place] | None:
        """`_find_place` for many at once; None where each has to be asked for."""
        if self._spared_bytes is not None:  # any of them may be the one that spends it
            return None
        try:
            return self._places.find_all(slots)
        except OSError:
            return None

    def _is_short_of_memory(self) -> bool:
        """Whether half of what ``RLIMIT_DATA`` left to us is spent; the rest is for batches."""
        return self._spared_bytes is not None and (vm.memory_left() or 0) < self._spared_bytes

    # -- pages -----------------------------------------------------------------------------------

    def _make_cold(self, slot: Slot) -> None:
        """Take a written slot's place away; its rows are read from the file from now on."""
        with self._lock:
            if slot.place is not None:
                self._resident.remove(slot)
                self._publish([self._take_place(slot)])

    def _fill(self, slot: Slot) -> None:
        """Put the file's rows behind the place of ``slot``, if it has one and they are not yet."""
        with self._fill_lock:
            place = slot.place
            if place is None or slot.is_filled or not self._places.fill(slot, place):
                return
            with self._lock:
                if slot.place is place:
                    self._set_filled(slot, True)
                    if self._num_unfilled == 0:
                        self._publish([])

    # -- gathers ---------------------------------------------------------------------------------

    def _shown_in(self, view: View) -> Layout:
        """Where the columns lie that every slot of the view has."""
        assert view.schema is not None
        return self._places.layout_of(view.schema)

    def _gather(self, view: View, rows: Array, out: Sequence[Leaf] | None) -> list[Leaf]:
        shown = self._shown_in(view)
        slots = view.slots_of(rows) if view.needs_slots else None
        if slots is not None and not view.is_filled and not self._fill_drawn(view, slots):
            leaves = self._targets(shown, len(rows), out)
            self._gather_mixed(view, rows, slots, leaves)
            return _with_text(shown, leaves, out)
        lane_rows = view.lane_rows(rows, slots) or [rows]  # no lane where no column has bytes
        if out is None and len(rows) * shown.widest < MIN_BYTES:
            # The small batch: nothing but one take a column, since each step counts here.
            leaves = [take(lane_rows[lane], 0, None, "clip") for lane, take in shown.takes]
        else:
            leaves = self._targets(shown, len(rows), out)
            for (lane, take), leaf in zip(shown.takes, leaves, strict=True):
                take(lane_rows[lane], 0, leaf, "clip")
        return _with_text(shown, leaves, out) if shown.texts else leaves

    def _targets(self, shown: Layout, count: int, out: Sequence[Leaf] | None) -> list[Leaf]:
        """The arrays to gather into: those of ``out``, else new ones."""
        if out is not None and not shown.texts:
            return list(out)
        return [
            self._empty(column, count) if out is None or column.is_text else out[position]
            for position, column in enumerate(shown.schema.columns)
        ]

    def _empty(self, column: Column, count: int) -> Array:
        shape = (count, *column.row_shape)
        if count * column.row_bytes >= MIN_BYTES:
            return self._pool.empty(shape, column.storage)
        return np.empty(shape, column.storage)

    def _fill_drawn(self, view: View, slots: Array) -> bool:
        """Fill the slots that were drawn; whether all of them have their pages in this view."""
        drawn = view.filled.take(slots)
        if drawn.all():
            return True
        shield.run(self._fill_all, view, np.unique(slots[~drawn]))
        return bool(view.filled.take(slots).all())

    def _fill_all(self, view: View, indices: Array) -> None:
        """Fill the slots of these indices of a view that have places."""
        pin = Pin()
        self._pinned(pin)  # of its own: the gather may be interrupted, and not wait for this
        try:
            for index in indices.tolist():
                shield.check()
                slot = self._slots[view.first_number + index]
                if slot.place is not None:
                    self._read(slot, self._fill, slot)
        finally:
            del pin

    def _gather_draw(self, view: View, draw: Draw, out: Sequence[Leaf] | None) -> list[Leaf]:
        """The columns of a draw, each from its own rows."""
        if not draw.moved and not draw.replaced:
            return self._gather(view, draw.rows, out)
        moved, moved_rows = draw.moved or (frozenset(), draw.rows)
        leaves = self._targets(self._shown_in(view), len(draw.rows), out)
        kept: list[Leaf] = [None] * len(leaves)
        others = kept.copy()
        for path, position in self._shown_in(view).positions.items():
            if path in draw.replaced:
                if out is None:
                    leaves[position] = draw.replaced[path]
                else:
                    leaves[position][...] = draw.replaced[path]
            else:
                (others if path in moved else kept)[position] = leaves[position]
        self._gather_some(view, draw.rows, kept)
        self._gather_some(view, moved_rows, others)
        return _with_text(self._shown_in(view), leaves, out)

    def read(self, view: View, paths: Sequence[Path], rows: Array) -> list[Leaf]:
        """These columns of these rows, for a `Sight`."""
        shown = self._shown_in(view)
        positions = [shown.positions[path] for path in paths]
        leaves: list[Leaf] = [None] * len(shown.takes)
        for position in positions:
            column = shown.schema.columns[position]
            leaves[position] = np.empty((len(rows), *column.row_shape), column.storage)
        self._gather_some(view, rows, leaves)
        found = []
        for position in positions:
            text = shown.texts.get(position)
            leaf = leaves[position]
            found.append(leaf if text is None else text.decode(leaf))
        return found

    def entry(self, view: View, index: int) -> Entry:
        """Of the slot of this index of the view, which is marked."""
        return self._slots[view.first_number + index].entry

    def _gather_some(self, view: View, rows: Array, leaves: Sequence[Leaf]) -> None:
        """Rows of those columns whose leaf is not None, into it; of text the codes."""
        slots = view.slots_of(rows) if view.needs_slots else None
        if slots is not None and not view.is_filled and not self._fill_drawn(view, slots):
            self._gather_mixed(view, rows, slots, leaves)
            return
        lane_rows = view.lane_rows(rows, slots) or [rows]
        for (lane, take), leaf in zip(self._shown_in(view).takes, leaves, strict=True):
            if leaf is not None:
                take(lane_rows[lane], 0, leaf, "clip")

    def _gather_mixed(self, view: View, rows: Array, slots: Array, leaves: Sequence[Leaf]) -> None:
        """Rows with pages from the ranges, the others from their files; as `_gather_some`."""
        is_warm = view.filled.take(slots)
        warm = is_warm.nonzero()[0]
        if len(warm):
            warm_rows, warm_slots = rows[warm], slots[warm]
            lane_rows = view.lane_rows(warm_rows, warm_slots)
            for leaf, home in zip(leaves, self._shown_in(view).homes, strict=True):
                if leaf is not None and home is not None:
                    leaf[warm] = home[2].take(lane_rows[home[0]], 0, None, "clip")
        shield.run(self._read_cold, view, rows, slots, leaves, (~is_warm).nonzero()[0])

    def _read_cold(
        self, view: View, rows: Array, slots: Array, leaves: Sequence[Leaf], cold: Array
    ) -> None:
        """Rows ``rows[cold]`` from their files into ``leaves[...][cold]``."""
        # Slot by slot, so that each file is opened once.
        cold = cold[slots[cold].argsort(kind="stable")]
        cold_slots = slots[cold]
        local = rows[cold] - view.first_rows(cold_slots)
        borders = [0, *(np.diff(cold_slots).nonzero()[0] + 1).tolist(), len(cold)]
        for start, stop in itertools.pairwise(borders):
            if start < stop:
                shield.check()
                slot = self._slots[view.first_number + int(cold_slots[start])]
                rows_of_slot = self._shown_in(view), local[start:stop], leaves, cold[start:stop]
                uses: list[TextUse] = []
                try:
                    self._read(slot, self._places.read_rows, slot, *rows_of_slot, uses)
                finally:
                    self._keep_cold_texts(slot, uses)

    def _keep_cold_texts(self, slot: Slot, uses: list[TextUse]) -> None:
        """Keep the strings until no gather has their codes, which those of this view may have.

        Once for each slot: the use that is kept is given back when ours would be, or later.
        """
        if uses:
            with self._lock:
                again = [
                    use
                    for use in uses
                    if self._cold_texts.setdefault((slot, use[0]), use) is not use
                ]
                give_back(again)

    def _read(self, slot: Slot, read: Callable[..., None], *arguments: Any) -> None:
        """Have the slot's file read; StaleSightError where it is no longer in the window.

        Whoever unlinks a file has published a view without it before: by now its name may be
        nobody's, or lead to a file that is the wrong one. Of what is shown that is damage.
        """
        try:
            read(*arguments)
        except (CorruptError, FileNotFoundError) as error:
            with self._lock:
                number = slot.number
                is_shown = self._table.is_in_window(number) and self._slots.get(number) is slot
            if not is_shown:
                raise StaleSightError from error
            if isinstance(error, FileNotFoundError):
                raise CorruptError(str(error.filename), "the file is missing.") from error
            raise


def origins_of(view: View, rows: Array) -> Origins:
    """Where ``rows`` of a view are from."""
    slots = view.slots_of(rows)
    num_envs, trajectory_ids, marks = view.facts.take(slots, 1)
    handles = np.empty((len(rows), 2), np.int64)
    handles[:, 0] = marks
    local = np.subtract(rows, view.first_rows(slots), out=handles[:, 1])
    return Origins(trajectory_ids, *np.divmod(local, num_envs), handles)


def _facts(entry: Entry) -> Facts:
    return Facts(entry.num_envs, entry.trajectory_id, entry.uuid_mark)


def _with_text(shown: Layout, leaves: list[Leaf], out: Sequence[Leaf] | None) -> list[Leaf]:
    for position, text in shown.texts.items():
        strings = text.decode(leaves[position])
        if out is not None:
            target = out[position]
            target[:] = strings
            strings = target
        leaves[position] = strings
    return leaves


def _too_large(size_bytes: int) -> MemoryError:
    return MemoryError(
        f"a trajectory of {size_bytes} bytes does not fit the addresses that could be reserved. "
        f"Raise RLIMIT_AS (ulimit -v), or add smaller trajectories."
    )
