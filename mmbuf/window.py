"""Window: the trajectory list, the cache and the sampler joined; what buffer and reader share.

The trajectory list holds all trajectories, oldest first; `sample` draws from the newest
``sample_window_size`` of them (0: all).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mmbuf import files, shield, storage
from mmbuf.arguments import key_name, told, whole
from mmbuf.batch import (
    Batch,
    Leaf,
    check_free,
    check_lacks,
    check_room,
    nested,
    numpy_of,
    put_text,
    targets,
    tensordict_of,
)
from mmbuf.cache import STATS, Origins, TrajectoryCache
from mmbuf.entry import Entry
from mmbuf.errors import ClosedError, CorruptError, EmptyBufferError, SchemaError
from mmbuf.forks import ChangeLock
from mmbuf.notebook import Shown, told_bytes
from mmbuf.places import Slot
from mmbuf.sampling.draw import Delivery, Draw, Sampler
from mmbuf.sampling.uniform import Uniform, uniform
from mmbuf.schema import Column, Schema, interleave, interleave_text
from mmbuf.staging import Staging, as_device
from mmbuf.trajectory import Trajectory

_MAX_DRAWN = 1024  # batches whose rows are counted together

_UNIFORM = Uniform()  # it remembers nothing, so all may share it

Key = Hashable  # what a trajectory of the list is called: its id, where there is only one store
Item = tuple[Key, Entry, str]  # and the directory of its file
# Of trajectories of a directory whose files are missing: see `snapshot.whereabouts`.
Whereabouts = Callable[[str, Sequence[Entry]], Mapping[str, Entry | None]]


class Window:
    """A trajectory list and batches of random rows of its newest.

    One thread may add, any number sample. In a forked child the window goes on with the rows it
    had, and draws from a stream of its own.
    """

    def __init__(
        self,
        *,
        seeds: np.random.SeedSequence,
        window_size: int,
        cache_size: int | None,
        can_map: bool,
        on_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self._window_size = window_size
        self._cache_size = cache_size
        self._can_map = can_map
        self.cache: TrajectoryCache | None = None
        self.entries: dict[Key, Entry] = {}  # the trajectory list
        self.total_samples = 0
        self._list_lock = threading.Lock()  # guards the counts: one adds, the writer forgets
        self._directories: dict[Key, str] = {}
        self._slots: dict[Key, Slot] = {}  # of the window, and of those not written yet
        self._leaving: deque[Key] = deque()
        self._seeds = seeds
        self.generator = np.random.default_rng(seeds)
        self._num_children = 0
        self.identity = object()  # what its samplers are known by
        self._samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()
        self._stagings: dict[torch.device, Staging] = {}
        self._count_lock = threading.Lock()  # guards the samplers and the next two
        self._num_sampled = 0
        self._counted = (0, time.monotonic())  # rows and time when it was asked last
        self._drawn: deque[int] = deque()  # rows of batches that are not counted yet
        self._num_seen = 0  # rows that were ever in the list
        self._on_fork = on_fork  # called in a forked child, to make other locks anew
        self.num_changes = 0  # of the list as a whole: see `changing`
        self._is_closed = False
        self.change_lock = ChangeLock()  # held while it changes so
        _windows.add(self)

    @property
    def schema(self) -> Schema | None:
        """The columns of a batch, None while there are no trajectories."""
        return self.cache.shown_schema if self.cache is not None and self.entries else None

    @property
    def union(self) -> Schema | None:
        """All columns that trajectories may share, None while there are none."""
        return self.cache.schema if self.cache is not None and self.entries else None

    @property
    def own_schemas(self) -> list[Schema]:
        """Those by which trajectories were taken in."""
        return [] if self.cache is None else self.cache.schemas

    @property
    def trajectory_ids(self) -> list[Any]:
        """Keys of all trajectories, oldest first."""
        return list(self.entries)

    @property
    def window_ids(self) -> list[Any]:
        """Keys of the trajectories that `sample` draws from, oldest first."""
        ids = list(self.entries)
        return ids[-self._window_size :] if self._window_size else ids

    def begin(self, schema: Schema) -> TrajectoryCache:
        """The cache for trajectories of ``schema`` too, made if there is none yet.

        SchemaError where it does not fit to those in the list.
        """
        former = self.cache
        if former is not None and self.entries:
            former.admit(schema)
            return former
        if former is not None and former.schema != schema:
            self.cache = None  # in this order: there may be no memory for another
            former.close()
        self.cache = self._cache_of(schema)
        return self.cache

    def cache_for(self, schema: Schema | None, items: Sequence[Item]) -> TrajectoryCache | None:
        """The cache to `load` these into, this one or a new one; None where there are none.

        CorruptError unless they can be what they say, MemoryError where there is no room for it.
        """
        if schema is None or not items:
            return None
        storage.check_entries(schema, [(entry, directory) for _, entry, directory in items])
        return self._cache_of(schema)

    def _cache_of(self, schema: Schema) -> TrajectoryCache:
        if self._is_closed:
            raise ClosedError("expected an open window, got one that was closed.")
        if self.cache is not None and self.cache.schema == schema:
            return self.cache
        return TrajectoryCache(
            schema,
            window_size=self._window_size,
            cache_size=self._cache_size,
            can_map=self._can_map,
        )

    def add(self, slot: Slot) -> None:
        """Append to the list what was put into the cache."""
        entry = slot.entry
        self._slots[entry.trajectory_id] = slot  # first: who finds it in the list may look at it
        with self._list_lock:
            self.entries[entry.trajectory_id] = entry
            self.total_samples += entry.num_samples
        self._num_seen += entry.num_samples
        if self._window_size:
            self._leaving.append(entry.trajectory_id)
            while len(self._leaving) > self._window_size:
                if not self._slots[self._leaving[0]].is_written:
                    break
                del self._slots[self._leaving.popleft()]

    def list_gone(self, entries: Iterable[Entry]) -> None:
        """Append to the list what has left the window, and has neither rows nor a file any more."""
        for entry in entries:
            with self._list_lock:
                self.entries[entry.trajectory_id] = entry
                self.total_samples += entry.num_samples
            self._num_seen += entry.num_samples

    def set_written(self, entry: Entry, directory: str) -> None:
        """The trajectory has a file in ``directory`` now."""
        self._directories[entry.trajectory_id] = directory
        self.entries[entry.trajectory_id] = entry

    def forget(self, keys: Iterable[Key]) -> None:
        """These, which are not in the window, are no longer in the list."""
        with self._list_lock:
            for key in keys:
                self.total_samples -= self.entries.pop(key).num_samples
                self._directories.pop(key, None)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Within it more changes than is added or forgotten; what may fail meanwhile is retried.

        For a moment other threads may find no row to draw from, or no trajectory of an id.
        """
        with self.change_lock:
            try:
                yield
            finally:
                self.num_changes += 1

    def has_changed_since(self, num_changes: int) -> bool:
        """Whether it has changed so; waits while it does."""
        self.change_lock.wait()
        return self.num_changes != num_changes

    def load(self, cache: TrajectoryCache | None, items: Sequence[Item]) -> None:
        """`open` these in the place of all others, in the cache that is for them (`cache_for`).

        The list is replaced at once, the rows to be drawn a moment later.
        """
        self._replace(cache, items)
        self._num_seen += self.total_samples

    def _replace(self, cache: TrajectoryCache | None, items: Sequence[Item]) -> None:
        with self.changing():
            if cache is None:
                self.clear()
                return
            former, self.cache = self.cache, cache
            if former is cache:
                cache.clear()
            elif former is not None:
                former.close()
            self._slots.clear()
            self._leaving.clear()
            self._directories = {key: directory for key, _, directory in items}
            self.entries = {key: entry for key, entry, _ in items}
            self.total_samples = sum(entry.num_samples for _, entry, _ in items)
            self._open_in(cache, items)

    def open(self, schema: Schema, items: Iterable[Item]) -> None:
        """Append trajectories that have files, oldest first; no data file is opened."""
        items = list(items)
        storage.check_entries(schema, [(entry, directory) for _, entry, directory in items])
        cache = self.begin(schema)
        # First: other threads find these by the list.
        self._directories.update((key, directory) for key, _, directory in items)
        self.entries.update((key, entry) for key, entry, _ in items)
        num_rows = sum(entry.num_samples for _, entry, _ in items)
        self.total_samples += num_rows
        self._num_seen += num_rows
        self._open_in(cache, items)

    def _open_in(self, cache: TrajectoryCache, items: Sequence[Item]) -> None:
        roots = {directory: files.join(directory, "") for directory in {item[2] for item in items}}
        slots = cache.open(
            [(entry, roots[directory] + entry.file) for _, entry, directory in items]
        )
        for (key, _, _), slot in zip(items[len(items) - len(slots) :], slots, strict=True):
            self._slots[key] = slot
            if self._window_size:
                self._leaving.append(key)
        while self._window_size and len(self._leaving) > self._window_size:
            del self._slots[self._leaving.popleft()]

    def remove(self, keys: Iterable[Key]) -> None:
        """These, which have files, are gone from the list, and from the window if they were in it.

        What is older than the window moves up into it; or goes too, where some have no files.
        """
        gone = set(keys)
        slots = [self._slots.pop(key) for key in gone if key in self._slots]
        self.forget(gone)
        if self._window_size and slots:
            self._leaving = deque(key for key in self._leaving if key not in gone)
            if len(self._leaving) < min(len(self.entries), self._window_size):
                if len(self._directories) == len(self.entries):
                    self._open_anew(list(self.entries))
                    return
                self.forget(self.entries.keys() - set(self._leaving))
        if self.cache is not None and slots:
            self.cache.remove(slots)

    def drop_missing(self, whereabouts: Whereabouts | None = None) -> None:
        """Remove those whose rows are neither in memory nor in a file any more.

        ``whereabouts`` says what has become of them (`snapshot.whereabouts`): those that it knows
        by another name stay, and are read there. Without it all are gone: for a forked child, whose
        parent removes files without telling.
        """
        with self.change_lock:
            if self._is_closed:
                return
            missing: dict[str, dict[Key, Entry]] = {}
            for key in filter(self._is_missing, self.trajectory_ids):
                missing.setdefault(self._directories[key], {})[key] = self.entries[key]
            gone: list[Key] = []
            for directory, entries in missing.items():
                if whereabouts is None:
                    gone += entries
                    continue
                found = whereabouts(directory, list(entries.values()))
                for key, entry in entries.items():
                    now = found.get(entry.uuid, entry)
                    if now is None:
                        gone.append(key)
                    elif now is not entry:
                        self._move(key, now)
                        self.num_changes += 1
            if gone:
                with self.changing():
                    self.remove(gone)

    def _is_missing(self, key: Key) -> bool:
        slot = self._slots.get(key)
        path = self._path_of(key)
        return path != "" and (slot is None or not slot.is_filled) and not files.exists(path)

    def _move(self, key: Key, entry: Entry) -> None:
        """The trajectory's file has another name, or another format, as in ``entry``."""
        entry = replace(entry, trajectory_id=self.entries[key].trajectory_id)
        self.entries[key] = entry
        slot = self._slots.get(key)
        if slot is not None:
            slot.entry, slot.path, slot.is_checked = entry, self._path_of(key), False

    @property
    def has_evicted(self) -> bool:
        """Whether `reclaim` has something to give back, as soon as no gather looks at it."""
        return self.cache is not None and self.cache.has_evicted

    def reclaim(self) -> None:
        """Give back what left the window and is not looked at any more. Does not wait."""
        if self.cache is not None:
            self.cache.reclaim()

    def sort(self) -> None:
        """Put the list, of written trajectories only, in the order of the time of addition."""
        keys = sorted(self.entries, key=lambda key: self.entries[key].added_at)
        if keys != list(self.entries):
            self._open_anew(keys)

    def _open_anew(self, keys: Sequence[Key]) -> None:
        items = [(key, self.entries[key], self._directories[key]) for key in keys]
        self._replace(self.cache if items else None, items)

    def clear(self) -> None:
        """Forget all trajectories."""
        if self.cache is not None:
            self.cache.clear()
        self.entries.clear()
        self._directories.clear()
        self._slots.clear()
        self._leaving.clear()
        self.total_samples = 0

    def close(self) -> None:
        """Give all memory back, once the gathers that go on have ended."""
        self._is_closed = True
        _windows.discard(self)
        self._stagings.clear()
        if self.cache is not None:
            self.cache.close()

    def sample(
        self,
        num_chunks: int,
        out: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
        with_info: bool | str = False,
        as_numpy: bool = False,
        as_tensordict: bool = False,
        device: torch.device | str | None = None,
    ) -> Any:
        """As `TrajectoryReplayBuffer.sample`."""
        num_chunks = whole("num_chunks", num_chunks, 1)
        if isinstance(with_info, str):
            with_info = key_name("with_info", with_info)
        delivery = Delivery()
        try:
            if device is None and not as_numpy and not as_tensordict:
                batch = self._sample(num_chunks, out, sampler, with_info, delivery)
            else:
                if out is not None or (as_numpy and (as_tensordict or device is not None)):
                    raise ValueError(
                        "sample: expected one of out, as_numpy, and as_tensordict or device, "
                        "got several."
                    )
                if device is None:
                    batch = self._sample(num_chunks, None, sampler, with_info, delivery)
                else:
                    device = as_device(device)
                    batch = self._send(device, num_chunks, sampler, with_info, delivery)
                if as_numpy:
                    batch = numpy_of(batch)
                elif as_tensordict:
                    batch = tensordict_of(batch, (sampler or _UNIFORM).num_dims)
            delivery.has_come = True  # from here to the caller nothing is called
            return batch
        except BaseException:
            delivery.attempt += 1
            raise

    def _sample(
        self,
        num_chunks: int,
        out: Mapping[str, Any] | None,
        sampler: Sampler | None,
        with_info: bool | str,
        delivery: Delivery,
    ) -> Batch:
        while True:
            cache = self.cache
            if cache is None:
                raise EmptyBufferError("sample: expected rows to draw from, got none.")
            check_room(cache.shown_schema, num_chunks)
            try:
                if sampler is not None or with_info:
                    return self._sample_by(
                        sampler, cache, num_chunks, out, delivery, with_info=with_info
                    )
                draw = partial(uniform, self.generator, num_chunks)
                if out is None:
                    batch = nested(*cache.gather(draw))
                else:
                    into = partial(_targets, cache, out=out, shape=(num_chunks,))
                    cache.gather(draw, into)
                    batch = out  # type: ignore[assignment]
            except EmptyBufferError:
                if cache is self.cache:  # else another schema's has taken its place
                    raise
            else:
                self._count_sampled(num_chunks)
                return batch

    def _sample_by(
        self,
        sampler: Sampler | None,
        cache: TrajectoryCache,
        num_chunks: int,
        out: Mapping[str, Any] | None,
        delivery: Delivery,
        *,
        with_info: bool | str,
    ) -> Batch:
        if sampler is None:
            sampler = _UNIFORM
        else:
            self._own(sampler)
        has_info = bool(with_info) or sampler.needs_info
        info = with_info if isinstance(with_info, str) else sampler.info

        def into(schema: Schema, draw: Draw) -> list[Leaf] | None:
            check_free(schema, [*draw.added, *([info] if has_info else [])])
            if has_info and info in draw.added:
                raise ValueError(
                    f"with_info: expected another name than those that the sampler adds, "
                    f"got {info!r}."
                )
            if out is None:
                return None
            return _targets(cache, schema, out, draw.shape or (len(draw.rows),))

        schema, leaves, draw, origins = cache.sample(
            lambda sight: sampler.draw(sight, num_chunks, self.generator),
            into,
            delivery,
            has_info=has_info,
        )
        batch = nested(schema, leaves, draw.shape)
        if out is not None:
            if draw.shape:
                put_text(schema, out, batch)
            batch = out  # type: ignore[assignment]
        for name, values in draw.added.items():
            batch[name] = torch.from_numpy(values)
        if origins is not None:
            batch[info] = _info(origins, draw.shape)
        self._count_sampled(len(draw.rows))
        return batch

    def _send(
        self,
        device: torch.device,
        num_chunks: int,
        sampler: Sampler | None,
        with_info: bool | str,
        delivery: Delivery,
    ) -> Batch:
        """A batch on a device."""
        staging = self._stagings.setdefault(device, Staging(device))
        is_even = sampler is None or sampler.has_even_batches

        def fill(out: Batch | None) -> Batch:
            return self._sample(num_chunks, out if is_even else None, sampler, with_info, delivery)

        while True:
            schema = self.schema
            try:
                return staging.send((num_chunks, sampler, with_info, schema), fill)
            except SchemaError:
                if self.schema is schema:  # else a batch has other columns by now
                    raise

    def _own(self, sampler: Sampler) -> None:
        """ValueError for a sampler that belongs to another, TypeError for what is none."""
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler: expected a Sampler, got {told(sampler)}.")
        if sampler.owner is None:
            shield.run(self._adopt, sampler)
        elif sampler.owner is not self.identity:
            raise ValueError(
                "sampler: expected one of this buffer's own, got one that has drawn from another. "
                "Make one for each."
            )

    def _adopt(self, sampler: Sampler) -> None:
        with self._count_lock:
            self._samplers.add(sampler)
        sampler.owner = self.identity

    def _count_sampled(self, num_rows: int) -> None:
        # Without a lock, which a signal handler could find held by what it has interrupted.
        self._drawn.append(num_rows)
        if len(self._drawn) > _MAX_DRAWN:
            shield.run(self._count_drawn)

    def _count_drawn(self) -> int:
        """How many rows were sampled up to now."""
        with self._count_lock:
            while self._drawn:
                self._num_sampled += self._drawn.popleft()
            return self._num_sampled

    def get_entry(self, trajectory_id: Key) -> Entry:
        """What the index says of one trajectory. KeyError if there is none of this id."""
        entry = self.entries.get(trajectory_id)
        if entry is None:
            raise KeyError(f"trajectory {trajectory_id}: expected an id of trajectory_ids.")
        return entry

    def get_trajectory(self, trajectory_id: Key) -> Trajectory:
        """One trajectory ``[T, B, ...]``, left-out steps included.

        The tensors are the caller's: copies, or private pages of the file that cost memory only
        where they are written to. KeyError if there is no such trajectory (any more).
        """
        while True:
            # In this order: a slot is never of a later cache than the one that is looked at last.
            entry = self.get_entry(trajectory_id)
            slot = self._slots.get(trajectory_id)
            directory = self._directories.get(trajectory_id, "")
            cache = self.cache
            if cache is None:  # all are gone by now
                continue
            schema = entry.schema or cache.schema
            leaves = None
            if slot is not None and slot.entry.uuid != entry.uuid:
                slot = None
            if slot is not None and not slot.path:
                leaves = cache.copy_of(slot)
            if leaves is None and entry.file:
                path = files.join(directory, entry.file)
                format_ = storage.FORMATS[entry.format]
                try:
                    leaves = format_.load(path, entry, schema, can_map=self._can_map)
                except (FileNotFoundError, CorruptError) as error:
                    if isinstance(error, FileNotFoundError) and slot is not None:
                        leaves = cache.copy_of(slot)  # what is mapped outlives its name
                    if leaves is None and self.entries.get(trajectory_id) is entry:
                        raise
            if leaves is not None:
                break
            if self.entries.get(trajectory_id) is entry:
                raise KeyError(
                    f"trajectory {trajectory_id}: no longer in memory, and it has no file."
                )
            # It was written meanwhile, or is gone, or another one has its id.
        return Trajectory.from_columns(
            schema.nest(
                [
                    _whole(column, leaf, entry.num_steps, entry.num_envs)
                    for column, leaf in zip(schema.columns, leaves, strict=True)
                ]
            ),
            max_episode_length=entry.max_episode_length,
            model_weights_id=entry.model_weights_id,
        )

    @contextmanager
    def held(self) -> Iterator[tuple[list[Entry], Callable[[Entry, str, str], Entry]]]:
        """The window's trajectories as they are now, and what brings one of them to a file.

        That is ``put(entry, path, format_name)``; it links or copies the file where there is one,
        and else writes the rows in memory, which are held within the block.
        """
        if self.cache is None:
            yield [], _nothing_to_put
            return
        cache = self.cache
        with cache.held() as lend:
            entries = [self.entries[trajectory_id] for trajectory_id in self.window_ids]
            sources = {entry.uuid: (entry, self._path_of(entry.trajectory_id)) for entry in entries}
            slots = {entry.uuid: self._slots.get(entry.trajectory_id) for entry in entries}

            def put(entry: Entry, path: str, format_name: str) -> Entry:
                known, source = sources[entry.uuid]
                slot = slots[entry.uuid]
                try:
                    if source:
                        schema = known.schema or cache.schema
                        return storage.copy(
                            source, known, schema, path, format_name, can_map=self._can_map
                        )
                    lent = None if slot is None else lend(slot)
                    assert lent is not None
                except FileNotFoundError:
                    # What is mapped outlives its name.
                    lent = None if slot is None else lend(slot)
                    if lent is None:
                        raise
                return storage.write(path, entry, entry.schema or cache.schema, *lent, format_name)

            yield entries, put

    def _path_of(self, key: Key) -> str:
        """The trajectory's file; empty where there is none."""
        file = self.entries[key].file
        return files.join(self._directories[key], file) if file else ""

    def files_in(self, directory: str) -> set[str]:
        """Names of the files of this directory that are read when their rows are drawn.

        It may be known here by another name, as a link that leads to it.
        """
        found = list(self._directories.items())
        same = {d for d in {d for _, d in found} if d == directory or files.is_same(d, directory)}
        entries = [self.entries.get(key) for key, other in found if other in same]
        return {entry.file for entry in entries if entry is not None}

    def get_stats(self) -> dict[str, Any]:
        """Counts of the list, the window, the cache and the sampling.

        ``sampled_rows_per_s`` is since it was asked last; ``reuse`` the rows sampled for each row
        that was taken in; ``window_age_s`` the age of the window's oldest trajectory.
        """
        stats: dict[str, Any] = {
            "num_trajectories": len(self.entries),
            "total_samples": self.total_samples,
        }
        stats |= dict.fromkeys(STATS, 0) if self.cache is None else self.cache.get_stats()
        stats |= self._rates()
        with self._count_lock:
            samplers = list(self._samplers)
        for sampler in samplers:
            stats |= sampler.get_stats()
        return stats

    def _rates(self) -> dict[str, float]:
        now = time.monotonic()
        num_rows = self._count_drawn()
        with self._count_lock:
            before, then = self._counted
            self._counted = (num_rows, now)
        oldest = next(iter(self.window_ids), None)
        entry = None if oldest is None else self.entries.get(oldest)
        return {
            "sampled_rows": num_rows,
            "sampled_rows_per_s": (num_rows - before) / max(now - then, 1e-9),
            "reuse": num_rows / self._num_seen if self._num_seen else 0.0,
            "window_age_s": 0.0 if entry is None else max(0.0, time.time() - entry.added_at),
        }

    def shown(self, title: str) -> Shown:
        """What buffer and reader show of themselves. Reads no file and waits for nobody.

        Bytes are those of the rows, of text those of its codes.
        """
        num_trajectories, num_rows = len(self.entries), self.total_samples
        schema = self.schema
        columns = () if schema is None else schema.columns
        size_bytes = num_rows * sum(column.row_bytes for column in columns)
        window = f"the newest {self._window_size:,}" if self._window_size else "all"
        return Shown(
            title,
            f"{num_trajectories:,} trajectories, {num_rows:,} rows, {told_bytes(size_bytes)}, "
            f"window: {window}",
            ("column", "dtype", "row shape", "bytes"),
            [
                (c.name, c.dtype, str(c.row_shape), told_bytes(num_rows * c.row_bytes))
                for c in columns
            ],
        )

    def spawn(self) -> np.random.SeedSequence:
        """Seeds of a child's stream: another one for each call."""
        self._num_children += 1
        return self._child_seeds()

    def _child_seeds(self) -> np.random.SeedSequence:
        key = (*self._seeds.spawn_key, self._num_children)
        return np.random.SeedSequence(self._seeds.entropy, spawn_key=key)

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, and of the streams of children."""
        return {
            "rng_state": self.generator.bit_generator.state,
            "entropy": self._seeds.entropy,
            "spawn_key": list(self._seeds.spawn_key),
            "num_children": self._num_children,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; ValueError, and nothing changed, where it is none."""
        try:
            key = tuple(map(int, state["spawn_key"]))
            seeds = np.random.SeedSequence(state["entropy"], spawn_key=key)
            generator = np.random.default_rng(seeds)
            generator.bit_generator.state = state["rng_state"]
            num_children = int(state["num_children"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"state: expected a state_dict of a reader: {error!r}.") from error
        self._seeds, self.generator, self._num_children = seeds, generator, num_children

    def count_fork(self) -> None:
        """Before a fork: so that each child draws from a stream of its own."""
        self._num_children += 1

    def renew_after_fork(self) -> None:
        """In the child: locks and streams anew."""
        self._seeds = self._child_seeds()
        self.generator = np.random.default_rng(self._seeds)
        self._num_children = 0
        self._list_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self.change_lock = ChangeLock()
        for sampler in list(self._samplers):
            sampler.renew_lock()
        if self.cache is not None:
            self.cache.renew_locks()
        self._on_fork()


def _targets(
    cache: TrajectoryCache, schema: Schema, out: Mapping[str, Any], shape: tuple[int, ...]
) -> list[Leaf]:
    """The memory of ``out`` for a batch of ``schema``; SchemaError if it is not such a batch."""
    if schema is not cache.schema:
        check_lacks(out, schema, cache.schema)
    return targets(schema, out, shape)


def _info(origins: Origins, shape: tuple[int, ...]) -> Batch:
    """Where rows are from, as tensors; of leading dimensions ``shape`` if it is not empty."""
    info: Batch = {}
    for name, values in origins._asdict().items():
        info[name] = torch.from_numpy(
            values.reshape(*shape, *values.shape[1:]) if shape else values
        )
    return info


def _nothing_to_put(entry: Entry, path: str, format_name: str) -> Entry:
    raise AssertionError("there is no trajectory")


def _whole(column: Column, leaf: Leaf, num_steps: int, num_envs: int) -> Any:
    """The rows of one column as ``[T, B, ...]`` or ``[T + E, B, ...]``."""
    if isinstance(leaf, list):
        return interleave_text(leaf, column, num_steps, num_envs)
    return column.tensor(interleave(leaf, column, num_steps, num_envs))


# Those that a forked child has to make whole again.
_windows: weakref.WeakSet[Window] = weakref.WeakSet()


def _before_fork() -> None:
    for window in _all_windows():
        window.count_fork()


def _after_fork_in_child() -> None:
    for window in _all_windows():
        window.renew_after_fork()


def _all_windows() -> list[Window]:
    while True:
        with suppress(RuntimeError):  # another thread has made one meanwhile
            return list(_windows)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
