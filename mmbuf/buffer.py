"""TrajectoryReplayBuffer: add batched trajectories, sample random rows of the newest.

It can stand in the place of RLinf's class of that name: same constructor arguments and methods,
same directory.

Whatever changes the buffer is handed to `shield.run`, so that an interrupt finds it as it was
before or as it is afterwards, and a signal handler may call it in the middle of any call.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import multiprocessing.context
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from mmbuf import arguments, checkpoint, files, shield, snapshot, storage, vm
from mmbuf.budget import DiskBudget
from mmbuf.cache import TrajectoryCache
from mmbuf.columns import REMEDY, SAME, check_alike, differs, is_common, own
from mmbuf.entry import Entry
from mmbuf.errors import (
    ClosedError,
    CorruptError,
    EmptyBufferError,
    MmbufError,
    SchemaError,
    WriteError,
)
from mmbuf.index import Contents, TrajectoryIndex, check_can_count, check_is_no_checkpoint, is_store
from mmbuf.locations import location
from mmbuf.notebook import Shown
from mmbuf.places import Slot
from mmbuf.sampling import Sampler
from mmbuf.schema import Payload, Schema, measure
from mmbuf.trajectory import Trajectory, fields_of
from mmbuf.window import Item, Window
from mmbuf.writer import MAX_PENDING_BYTES, TrajectoryWriter

_log = logging.getLogger("mmbuf")

# What a read fails with while another thread loads, or where others have removed or moved files.
_MAY_HAVE_CHANGED = (EmptyBufferError, CorruptError, FileNotFoundError)


class TrajectoryReplayBuffer:
    """A replay buffer of batched trajectories ``[T, B, ...]``; samples rows ``[K, ...]``.

    Parameters
    ----------
    seed
        Of the buffer's own generator, an int of 0 or more or several; None draws one. No global
        random state is read or set.
    enable_cache
        False: no file is mapped, and every row of a written trajectory is read when it is drawn
        (for network file systems).
    cache_size
        How many of the window's newest trajectories are resident; None: all.
    sample_window_size
        `sample` draws from so many of the newest trajectories; 0: from all.
    auto_save, auto_save_path
        Keep the trajectories as files in this directory. A store that is there already is
        continued. Without ``auto_save`` the window is in memory only, and ``enable_cache``,
        ``cache_size`` and ``auto_save_path`` have no effect; a warning in the log says so where
        there is a store.
    trajectory_format
        Of the files.
    columns
        "same": all trajectories have the columns of the first one. "common": one may lack some of
        them, or bring others, and a batch has those that every trajectory of the window has; see
        `mmbuf.columns`.
    max_pending_bytes
        Bounds the rows that are in memory and not yet in a file: past it `add_trajectories` waits.
    max_disk_bytes
        Bounds what the trajectories' files take on the disk: past it the oldest outside the window
        are removed. `add_trajectories` raises WriteError when the window alone does not fit.

    One thread may add while any number sample. A forked child can sample but not add, and goes on
    without what its parent removes from the disk. A buffer in memory is copied and pickled with the
    rows of its window, and the copy draws the same batches (sent to a spawned process, others).
    One with files is not: open a `ReplayReader` on its path.
    """

    def __init__(
        self,
        seed: int | Sequence[int] | None = 1234,
        enable_cache: bool = True,
        cache_size: int | None = None,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | os.PathLike[str] = "",
        trajectory_format: str = "arrow",
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_disk_bytes: int | None = None,
        columns: str = SAME,
    ) -> None:
        names_before = set(vars(self))
        seed = arguments.seed(seed)
        trajectory_format = storage.checked_format(trajectory_format)
        cache_size = arguments.whole_or_none("cache_size", cache_size)
        sample_window_size = arguments.whole("sample_window_size", sample_window_size)
        max_pending_bytes = arguments.whole("max_pending_bytes", max_pending_bytes)
        max_disk_bytes = arguments.whole_or_none("max_disk_bytes", max_disk_bytes)
        self._is_common = is_common(columns)
        if auto_save:
            auto_save_path = location("auto_save_path", auto_save_path)
        else:
            _warn_of_store(auto_save_path)
        self._options = {  # as a copy is made
            "seed": seed,
            "enable_cache": enable_cache,
            "cache_size": cache_size,
            "sample_window_size": sample_window_size,
            "trajectory_format": trajectory_format,
            "max_pending_bytes": max_pending_bytes,
            "max_disk_bytes": max_disk_bytes,
            "columns": columns,
        }
        self.seed = seed
        self.enable_cache = enable_cache
        self.sample_window_size = sample_window_size
        self.auto_save = auto_save
        self.auto_save_path = str(auto_save_path) if auto_save else None
        self.trajectory_format = trajectory_format
        self._pid = files.process_id()
        self._save_lock = shield.Lock()  # nothing is cleared or loaded while one saves; first
        self._add_lock = shield.Lock()  # one caller at a time adds, flushes, clears or closes
        self._is_closed = False
        self._add_wait_s = 0.0
        self._next_id = 0
        self._id_step = 1
        self._window = Window(
            seeds=np.random.SeedSequence(seed),
            window_size=sample_window_size,
            cache_size=(cache_size if enable_cache else 0) if auto_save else None,
            can_map=enable_cache,
            on_fork=_weakly(self._renew_locks),
        )
        self._budget = DiskBudget(max_disk_bytes if auto_save else None, sample_window_size)
        self._writer: TrajectoryWriter | None = None
        self._holding: _Holding | None = None
        self._own_names = set(vars(self)) - names_before
        if self.auto_save_path is not None:
            try:
                shield.run(self._open_store, self.auto_save_path, max_pending_bytes)
            except BaseException:
                if self._holding is not None:  # interrupted; the traceback may keep us for long
                    self._holding.is_given_up = True
                    shield.run(_let_go_of_dropped)
                raise

    def _open_store(self, directory: str, max_pending_bytes: int) -> None:
        if files.exists(directory) and not files.is_directory(directory):
            raise NotADirectoryError(
                f"auto_save_path: expected a directory, got a file: {directory}"
            )
        _let_go_of_dropped()
        files.make_directory(directory)
        check_is_no_checkpoint(directory)
        self._lock = files.WriterLock(files.join(directory, files.WRITER_LOCK))
        try:
            with vm.uncollected():
                index = TrajectoryIndex(directory, storage.verify, storage.size_of, self._lock)
                contents = index.contents
                try:
                    self._check_columns(directory, contents)
                    items = _items(contents, directory)
                    self._window.load(self._window.cache_for(contents.schema, items), items)
                    self._count_disk_bytes(directory, contents)
                except BaseException:
                    index.close()
                    raise
        except BaseException:
            self._window.close()
            self._lock.release()
            raise
        self._next_id, self._id_step = contents.trajectory_counter, contents.id_step
        window = self._window
        self._writer = TrajectoryWriter(  # has nothing of the buffer: it may outlive it
            index,
            partial(_metadata, window, self.trajectory_format, self.seed),
            lambda entry: window.set_written(entry, directory),
            window.forget,
            self.trajectory_format,
            self._budget,
            max_pending_bytes,
        )
        self._holding = _Holding(weakref.ref(self), self._pid, self._writer, self._lock)
        _holdings.add(self._holding)
        # At exit the writer's thread ends by itself.
        weakref.finalize(self, shield.run, _let_go_of_dropped).atexit = False

    # -- adding ------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[Any]) -> None:
        """Add trajectories, oldest first; they can be sampled when this returns.

        Each is a `Trajectory`, a dataclass with such fields, or a nested dict of ``[T, B, ...]``
        tensors or arrays. The rows are copied, so the caller may reuse its memory at once. Each is
        added whole or not at all: SchemaError for data that do not fit, WriteError if an earlier
        one could not be written (before anything of this call's rest is added), MemoryError.
        """
        self._check_can_write("add_trajectories")
        if isinstance(trajectories, (str, bytes, Mapping)) or not isinstance(
            trajectories, Iterable
        ):
            raise TypeError(
                f"trajectories: expected a list of trajectories, "
                f"got {type(trajectories).__name__}. Put a single one in a list."
            )
        # The items come from code of the caller's, that may call this buffer or take for ever.
        for item in trajectories:
            fields, max_episode_length, model_weights_id = fields_of(item)
            is_added = False
            while not is_added:
                known = self._window.union
                payload = self._measured(fields, known).on_host()
                is_added = shield.run(
                    self._add, payload, known, max_episode_length, model_weights_id
                )

    def _measured(self, fields: Mapping[str, Any], known: Schema | None) -> Payload:
        """The leaves, which fit to those of the list, whose union is ``known``."""
        if known is None:
            return measure(fields)
        if self._is_common:
            return measure(fields, own(fields, known, self._window.own_schemas))
        try:
            return measure(fields, known)
        except SchemaError as error:
            if not differs(fields, known):
                raise
            raise SchemaError(f"{error} {REMEDY}") from None

    def _check_columns(self, directory: str, contents: Contents) -> None:
        if not self._is_common:
            check_alike(contents.schemas_of_files(directory))

    def _add(
        self,
        payload: Payload,
        known: Schema | None,
        max_episode_length: int,
        model_weights_id: str,
    ) -> bool:
        """False where it is to be measured again: there are others of another thread's by now."""
        with self._add_lock:
            self._check_can_write("add_trajectories")
            writer = self._writer
            if writer is not None:
                writer.raise_failure()
            check_can_count(self._next_id + self._id_step)
            now = self._window.union
            if now is not None and now is not known:
                return False
            entry = Entry(
                uuid.uuid4().hex,
                self._next_id,
                payload.shape,
                max_episode_length,
                model_weights_id,
                time.time(),
                schema=payload.schema,
            )
            size_bytes = payload.size_bytes
            if writer is not None:
                self._budget.check(size_bytes)
                with self._waiting():
                    writer.wait_for_room(size_bytes)
            cache = self._window.begin(payload.schema)
            slot = self._put(cache, entry, payload)
            # Before the writer starts: torch drops the GIL to free what NumPy looked into, and
            # would wait up to 5 ms to get it back.
            del payload
            try:
                self._window.add(slot)
            except BaseException:
                cache.remove([slot])  # or it would be drawn, and be no part of the list
                raise
            self._budget.add(entry.trajectory_id, size_bytes)
            self._next_id += self._id_step
            if writer is not None:
                writer.submit(cache, slot, size_bytes)
            else:
                cache.reclaim()
            return True

    def _put(self, cache: TrajectoryCache, entry: Entry, payload: Payload) -> Slot:
        """Copy the rows into the cache, when there is room for them."""
        writer = self._writer
        while (slot := cache.put(entry, payload, is_written=writer is None)) is None:
            # The ring of addresses is full: wait for gathers to end, or for files to be written.
            with self._waiting():
                if cache.make_room():
                    time.sleep(0.0005)
                    shield.check()
                elif writer is not None and writer.num_pending:
                    writer.wait_for_next()
                else:
                    raise MemoryError(
                        f"a trajectory of {payload.size_bytes} bytes: expected room for the window "
                        f"in the reserved addresses, got none. Raise RLIMIT_AS or shrink "
                        f"sample_window_size."
                    )
        return slot

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._add_wait_s += time.monotonic() - start_s

    # -- sampling ----------------------------------------------------------------------------

    def sample(
        self,
        num_chunks: int = 0,
        out: Mapping[str, Any] | None = None,
        *,
        sampler: Sampler | None = None,
        with_info: bool | str = False,
        as_numpy: bool = False,
        as_tensordict: bool = False,
        device: torch.device | str | None = None,
    ) -> Any:
        """``num_chunks`` rows, uniform with replacement over the rows of the window.

        A nested dict with the trajectories' own keys and dtypes, tensors ``[K, ...]`` that are the
        caller's to keep and change (text: list of K str). ``out``: an earlier batch of as many
        rows, refilled in place. ValueError for ``num_chunks`` < 1, EmptyBufferError when there is
        nothing to draw from, SchemaError when ``out`` is not such a batch or its tensors overlap.
        Thread-safe.

        ``sampler``: another way to draw, see `mmbuf.sampling`. ``with_info`` adds
        ``batch["info"]``, or the key that it names, int64: ``trajectory_id``, ``step`` and ``env``
        of each row, and its ``handle`` ``[K, 2]``, which stays its name for as long as the
        trajectory exists.
        ``as_numpy``: arrays, bfloat16 and float8 as float32. ``as_tensordict``: a `TensorDict`.
        ``device``: tensors there, copied from pinned memory without waiting for the copy. The last
        three are not for batches that are refilled.
        """
        if self._is_closed:
            raise _closed("sample")
        while True:
            num_changes = self._window.num_changes
            try:
                # Called as it is, by no C code: so that no interrupt loses a batch that has come.
                return self._window.sample(
                    num_chunks, out, sampler, with_info, as_numpy, as_tensordict, device
                )
            except _MAY_HAVE_CHANGED as error:
                self._check_can_retry("sample", error, num_changes)

    def get_trajectory(self, trajectory_id: int) -> Trajectory:
        """One trajectory as it was added, steps that are left out of the rows included.

        Its tensors are the caller's. KeyError if there is none of this id, or not any more.
        """
        if self._is_closed:
            raise _closed("get_trajectory")
        return shield.run(self._get_trajectory, trajectory_id)

    def _get_trajectory(self, trajectory_id: int) -> Trajectory:
        while True:
            num_changes = self._window.num_changes
            try:
                return self._window.get_trajectory(trajectory_id)
            except (KeyError, *_MAY_HAVE_CHANGED) as error:
                self._check_can_retry("get_trajectory", error, num_changes)

    def get_entry(self, trajectory_id: int) -> Entry:
        """What the index says of one trajectory: shape, weights, time of addition, file.

        KeyError if there is none of this id, or not any more.
        """
        return self._window.get_entry(trajectory_id)

    def _check_can_retry(self, what: str, error: Exception, num_changes: int) -> None:
        """Raise the error, unless the window has changed since, by us or by another thread."""
        if not isinstance(error, (EmptyBufferError, KeyError)):
            shield.run(self._drop_missing)
        has_changed = shield.run(self._window.has_changed_since, num_changes)
        if self._is_closed:  # since it was looked at, by another thread or a handler
            raise _closed(what) from None
        if not has_changed:
            raise error

    def _drop_missing(self) -> None:
        """Go on without what is not where it was, or with where it is now.

        Files of a forked child's parent, and those that a memory-only buffer maps where they are.
        """
        if self._writer is None:
            with self._add_lock:
                if not self._is_closed:
                    self._window.drop_missing(snapshot.whereabouts)
        elif self._is_forked():
            self._window.drop_missing()

    # -- state -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._window.entries)

    @property
    def size(self) -> int:
        """Number of trajectories in the list."""
        return len(self._window.entries)

    @property
    def total_samples(self) -> int:
        """Number of rows of all trajectories in the list."""
        return self._window.total_samples

    @property
    def schema(self) -> Schema | None:
        """The columns of a batch: those of the trajectories; None while there are none."""
        return self._window.schema

    @property
    def trajectory_counter(self) -> int:
        """The id that the next trajectory gets."""
        return self._next_id

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of all trajectories in the list, oldest first."""
        return self._window.trajectory_ids

    @property
    def window_ids(self) -> list[int]:
        """Ids of the trajectories that `sample` draws from, oldest first."""
        return self._window.window_ids

    def is_ready(self, min_size: int) -> bool:
        """Whether the list holds at least ``min_size`` trajectories."""
        if self._is_closed:
            raise _closed("is_ready")
        return len(self) >= arguments.whole("min_size", min_size, None)

    async def is_ready_async(self, min_size: int) -> bool:
        """`is_ready`, for callers that await it."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, Any]:
        """Counts of the list, the window, the cache, the sampling and what is still to be written.

        ``sampled_rows_per_s`` is since they were asked last, ``reuse`` the rows sampled for each
        row that was added, ``window_age_s`` the age of the oldest trajectory of the window, and
        ``add_wait_s`` how long adding has waited for the disk or for room. Samplers that have drawn
        from the buffer add counts of their own.
        """
        stats = shield.run(self._window.get_stats)
        stats["trajectory_counter"] = self._next_id
        stats["add_wait_s"] = self._add_wait_s
        stats["pending_trajectories"] = self._writer.num_pending if self._writer else 0
        stats["pending_bytes"] = self._writer.pending_bytes if self._writer else 0
        return stats

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator: a buffer of the same content that loads it goes on alike.

        Checkpoints have it too; this is for what goes on in another way, such as a dataset.
        """
        return self._window.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the stream of a `state_dict`; ValueError, nothing changed, if it is none."""
        self._window.load_state_dict(state)

    # -- giving back -------------------------------------------------------------------------

    def flush(self, sync: bool = False) -> None:
        """Wait until all that was added is published in files, which survive a killed process.

        ``sync=True``: and on the disk itself, where it survives power loss. WriteError if it
        fails; what could not be written stays in memory, and the next flush tries again. Without
        ``auto_save`` there is nothing to do.
        """
        shield.run(self._flush, sync)

    def _flush(self, sync: bool) -> None:
        with self._add_lock:
            self._check_can_write("flush")
            if self._writer is not None:
                self._writer.flush(sync=sync)

    def clear_cache(self) -> None:
        """Give back the memory of all that can be read from files again."""
        shield.run(self._clear_cache)

    def _clear_cache(self) -> None:
        with self._add_lock:
            if self._is_closed:
                raise _closed("clear_cache")
            if self._window.cache is not None:
                self._window.cache.drop_pages(files.exists)

    def clear(self) -> None:
        """Remove all trajectories, their files too. Ids go on; the schema is free again."""
        shield.run(self._clear)

    def _clear(self) -> None:
        with self._save_lock, self._add_lock:
            self._check_can_write("clear")
            if self._writer is not None:
                self._writer.flush(sync=False)
                self._writer.clear()
            self._window.clear()
            self._budget.load(())
            if self._writer is not None:
                self._writer.remove_dead_files()

    # -- checkpoints -------------------------------------------------------------------------

    def save_checkpoint(
        self, save_path: str | os.PathLike[str], trajectory_format: str | None = None
    ) -> None:
        """Save the window, its counters and the generator's state to the directory ``save_path``.

        Of a memory-only buffer that is what is still in memory. Files are linked, not copied,
        where the file system allows; ``trajectory_format`` other than None or their own converts
        them. All is on the disk itself when this returns; until then an earlier checkpoint there
        stays whole. Into the store's own directory it is ``flush(sync=True)``. Nothing in the
        buffer changes, and other threads may add and sample meanwhile. WriteError if it fails,
        LockedError while somebody else goes on saving there or repairing for more than 10 s.
        """
        if trajectory_format is not None:
            trajectory_format = storage.checked_format(trajectory_format)
        path = location("save_path", save_path)
        shield.run(self._save_checkpoint, path, trajectory_format)

    def _save_checkpoint(self, path: str, trajectory_format: str | None) -> None:
        with self._save_lock:
            while True:
                num_changes = self._window.num_changes
                try:
                    self._save(path, trajectory_format)
                    return
                except WriteError as error:
                    if self._writer is not None or not isinstance(
                        error.__cause__, FileNotFoundError
                    ):
                        raise
                    # Somebody may have saved where the files of a memory-only buffer are.
                    self._drop_missing()
                    if self._window.num_changes == num_changes:
                        raise

    def _save(self, path: str, trajectory_format: str | None) -> None:
        with ExitStack() as stack:
            with self._add_lock:
                self._check_can_write("save_checkpoint")
                if self._writer is not None:
                    is_own = files.is_same(path, self._writer.directory)
                    self._writer.flush(sync=is_own)
                    if is_own:
                        return
                stack.enter_context(self._budget.held())
                entries, put = stack.enter_context(self._window.held())
                contents = Contents()
                contents.schema = self._window.union if entries else None
                for entry in entries:
                    contents.add(entry)
                contents.count_from(self._next_id, self._id_step)
                metadata = _metadata(self._window, self.trajectory_format, self.seed)
                unsynced = self._writer.unsynced() if self._writer is not None else set()
            try:
                synced = self._sync_files(entries, unsynced)
                in_use = self._window.files_in(path)
                checkpoint.save(path, contents, metadata, put, trajectory_format, synced, in_use)
            except (FileExistsError, NotADirectoryError):
                raise
            except OSError as error:
                raise WriteError(f"{path}: the checkpoint could not be saved: {error}") from error

    def _sync_files(self, entries: list[Entry], unsynced: set[str]) -> set[str]:
        """Bring the store's files of ``entries`` to the disk itself; the uuids of which it is true.

        Not by ``flush(sync=True)``, which would keep others from adding as long as the disk takes.
        """
        if self._writer is None:  # of files elsewhere nothing is known
            return set()
        for entry in entries:
            if entry.uuid in unsynced:
                shield.check()
                files.sync_whole(files.join(self._writer.directory, entry.file))
        uuids = {entry.uuid for entry in entries}
        self._writer.note_synced(uuids)
        return uuids

    def load_checkpoint(
        self,
        load_path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Replace the content by that of a checkpoint, a store or a directory of RLinf's.

        ``is_distributed``: by the part of ``local_rank`` among ``world_size``; the parts are
        contiguous, and no two ranks give the same id to what they add afterwards. What is loaded
        keeps its ids, new ones are higher than these and than all that this buffer gave before.
        The generator goes on where it was saved, in each part with a stream of its own. A
        memory-only buffer maps the files where they are; an auto-saving one links or copies them
        into its store. FileNotFoundError where there is no checkpoint, CorruptError for a damaged
        one; then nothing has changed.
        """
        rank = (0, 1)
        if is_distributed:
            rank = arguments.rank_of("local_rank", local_rank, world_size)
        path = location("load_path", load_path)
        shield.run(self._load_checkpoint, path, *rank)

    def _load_checkpoint(self, path: str, local_rank: int, world_size: int) -> None:
        with self._save_lock, self._add_lock:
            self._check_can_write("load_checkpoint")
            if self._writer is not None:
                self._writer.flush(sync=False)
            checkpoint.settled(path, lambda: self._load(path, local_rank, world_size))

    def _load(self, path: str, rank: int, world_size: int) -> None:
        contents = checkpoint.read_whole(path)
        self._check_columns(path, contents)
        generator = checkpoint.generator_of(path, contents, self.seed)
        if world_size > 1:
            contents = checkpoint.shard(contents, rank, world_size)
            generator = checkpoint.stream_of(generator, rank, world_size)
        contents.count_above(self._next_id)
        # Or MemoryError, before anything has changed.
        cache = self._window.cache_for(contents.schema, _items(contents, path))
        if self._writer is not None:
            directory = self._writer.directory
            used_below = self._next_id
            with checkpoint.brought_in(directory, path, contents, used_below) as contents:
                self._writer.load(contents)
            path = directory
        self._window.load(cache, _items(contents, path))
        self._window.generator = generator
        self._next_id, self._id_step = contents.trajectory_counter, contents.id_step
        if self._writer is not None:
            self._count_disk_bytes(path, contents)
            self._writer.remove_dead_files()  # last: an interrupt may end it, or a failure

    def _count_disk_bytes(self, directory: str, contents: Contents) -> None:
        if self._budget.max_bytes is not None:
            self._budget.load(
                (entry.trajectory_id, files.disk_bytes_of(files.join(directory, entry.file)))
                for entry in contents.entries.values()
            )

    # -- ending ------------------------------------------------------------------------------

    def close(self, wait: bool = True) -> None:
        """Write what is pending, then give back all memory and the store's lock.

        If the writing fails WriteError is raised and the buffer stays open, since the rows are
        nowhere else. ``wait=False`` gives up what is not written yet, and says so in the log.
        Closing again does nothing. In a forked child only the child's memory is given back.
        """
        shield.run(self._close, wait)

    def _close(self, wait: bool) -> None:
        with self._save_lock, self._add_lock:
            if self._is_closed:
                return
            writer = None if self._is_forked() else self._writer
            if writer is not None:
                lost = writer.stop(wait=wait)
                if lost:
                    _log.warning(
                        "%s: closed with %d trajectories not written.", self.auto_save_path, lost
                    )
            self._is_closed = True
            if self._holding is not None:
                _holdings.discard(self._holding)
            self._window.close()
            if writer is not None:
                try:
                    writer.close()
                finally:
                    self._lock.release()

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.auto_save:
            raise TypeError(
                "a TrajectoryReplayBuffer with files does not pickle. Send its path, and use "
                "ReplayReader(path)."
            )
        return shield.run(self._state) | {"attributes": self._attributes()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        TrajectoryReplayBuffer.__init__(self, **state["options"])
        vars(self).update(state["attributes"])
        shield.run(self._set_state, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrajectoryReplayBuffer:
        state = self.__getstate__()
        made = memo[id(self)] = type(self).__new__(type(self))
        # The rows are copied in, as they are when they are added.
        made.__setstate__({**state, "attributes": copy.deepcopy(state["attributes"], memo)})
        return made

    def _attributes(self) -> dict[str, Any]:
        """What a subclass, or whoever has the buffer, has set on it."""
        names = vars(self).keys() - self._own_names - {"_own_names"}
        return {name: vars(self)[name] for name in names}

    def _state(self) -> dict[str, Any]:
        """What a memory-only buffer is, in copies."""
        with self._save_lock, self._add_lock:
            if self._is_closed:
                raise _closed("pickle")
            window = self._window
            stream = window.state_dict()
            if multiprocessing.context.get_spawning_popen() is not None:
                seeds = window.spawn()  # of its own, as each worker's of a DataLoader
                stream |= {
                    "rng_state": np.random.default_rng(seeds).bit_generator.state,
                    "spawn_key": list(seeds.spawn_key),
                    "num_children": 0,
                }
            return {
                "options": self._options,
                "schema": window.union,
                "entries": [
                    dataclasses.replace(entry, format="", file="", size_bytes=0, parts=())
                    for entry in window.entries.values()
                ],
                "rows": {i: self._leaves_of(i) for i in window.window_ids},
                "stream": stream,
                "ids": (self._next_id, self._id_step),
            }

    def _leaves_of(self, trajectory_id: int) -> list[Any]:
        """A trajectory's columns, in storage dtype: torch pickles not all of its own."""
        schema = self._window.entries[trajectory_id].schema or self._window.union
        assert schema is not None
        columns = self._window.get_trajectory(trajectory_id).to_columns()
        return [
            leaf if column.is_text else leaf.view(column.storage_as).numpy()
            for column, leaf in zip(schema.columns, schema.pick(columns, "trajectory"), strict=True)
        ]

    def _set_state(self, state: Mapping[str, Any]) -> None:
        with self._add_lock:
            rows, window = state["rows"], self._window
            window.list_gone(entry for entry in state["entries"] if entry.trajectory_id not in rows)
            for entry in state["entries"]:
                if entry.trajectory_id in rows:
                    schema = entry.schema or state["schema"]
                    leaves = [
                        leaf if column.is_text else column.tensor(leaf)
                        for column, leaf in zip(
                            schema.columns, rows[entry.trajectory_id], strict=True
                        )
                    ]
                    payload = measure(schema.nest(leaves), schema, is_stored=True)
                    window.add(self._put(window.begin(schema), entry, payload))
            window.load_state_dict(state["stream"])
            self._next_id, self._id_step = state["ids"]

    def __repr__(self) -> str:
        return self._shown().as_text()

    def _repr_html_(self) -> str:
        return self._shown().as_html()

    def _shown(self) -> Shown:
        state = " (closed)" if self._is_closed else ""
        where = self.auto_save_path or "in memory"
        return self._window.shown(f"TrajectoryReplayBuffer {where}{state}")

    def _renew_locks(self) -> None:
        """In a forked child: the threads that may have held them are gone."""
        self._save_lock = shield.Lock()
        self._add_lock = shield.Lock()

    def _is_forked(self) -> bool:
        return files.process_id() != self._pid

    def _check_can_write(self, what: str) -> None:
        if self._is_closed:
            raise _closed(what)
        if self._is_forked():
            raise MmbufError(
                f"{what}: expected the process that made the buffer, got a forked child of it. "
                f"A child can sample; let it send its trajectories to the parent."
            )


def _closed(what: str) -> ClosedError:
    return ClosedError(f"{what}: expected an open buffer, got one that was closed.")


def _items(contents: Contents, directory: str) -> list[Item]:
    return [(i, entry, directory) for i, entry in contents.entries.items()]


def _metadata(
    window: Window, trajectory_format: str, seed: int | Sequence[int] | None
) -> dict[str, Any]:
    """What checkpoints and snapshots say beside the index."""
    return {
        "trajectory_format": trajectory_format,
        "seed": seed,
        "rng_state": window.generator.bit_generator.state,
    }


def _warn_of_store(path: Any) -> None:
    """Say so where a store is at the path of a buffer that keeps no files."""
    try:
        directory = location("auto_save_path", path)
        is_ignored = is_store(directory)
    except (OSError, TypeError, ValueError):  # it has no effect, whatever it is
        return
    if is_ignored:
        _log.warning(
            "auto_save_path: expected auto_save=True, since there is a store, got False: %s is "
            "neither read nor written. Set auto_save=True to go on with it, or call "
            "load_checkpoint to have a copy of it in memory.",
            directory,
        )


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method for as long as there is its object, which is not kept by it."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        found = weak()
        if found is not None:
            found()

    return call


@dataclasses.dataclass(eq=False, slots=True)
class _Holding:
    """What a buffer has of its store until it is closed."""

    buffer: weakref.ref[TrajectoryReplayBuffer]
    pid: int
    writer: TrajectoryWriter
    lock: files.WriterLock
    is_given_up: bool = False  # the buffer's constructor has failed


# Whoever drops a buffer may be interrupted before its store is let go: the next one looks here.
_holdings: set[_Holding] = set()


def _let_go_of_dropped() -> None:
    """Let go of the stores of all buffers that are gone and were not closed."""
    for holding in list(_holdings):
        if holding.is_given_up or holding.buffer() is None:
            if files.process_id() == holding.pid:  # in a forked child all of it is the parent's
                holding.writer.let_go(holding.lock.release)
            _holdings.discard(holding)
