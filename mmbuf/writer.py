"""TrajectoryWriter: the one background thread: write, publish, journal, rewire.

Trajectories are written in the order they were added, so a store is always a prefix of what was
added. A failure stops the thread: the trajectory stays in memory and first in line, the failure is
raised to whoever calls next, and the call after that tries again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mmbuf import files, storage
from mmbuf.budget import DiskBudget
from mmbuf.cache import TrajectoryCache
from mmbuf.entry import Entry
from mmbuf.errors import WriteError
from mmbuf.index import Contents, TrajectoryIndex
from mmbuf.places import Slot

_T = TypeVar("_T")

MAX_PENDING_BYTES = 512 << 20
_LOOK_S = 1.0  # waits end by themselves to look whether the thread still lives


class TrajectoryWriter:
    """Writes slots of a cache to the store of ``index``.

    ``submit``, ``wait_for_room``, ``flush``, ``clear``, ``load``, ``stop`` and ``close`` are for
    one thread at a time. ``metadata()`` gives what the snapshots say beside the index;
    ``format_name`` is that of the files. What ``budget`` has no room for is dropped once newer ones
    are written.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        metadata: Callable[[], dict[str, Any]],
        on_written: Callable[[Entry], None],
        on_dropped: Callable[[list[int]], None],
        format_name: str,
        budget: DiskBudget,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._index = index
        self._metadata = metadata
        self._on_written = on_written
        self._on_dropped = on_dropped
        self._budget = budget
        self._format_name = format_name
        self._max_pending_bytes = max_pending_bytes
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmbuf-writer")
        self._pending: deque[tuple[TrajectoryCache, Slot, int]] = deque()
        self._changed = threading.Condition()  # guards all below; notified after each write
        self.pending_bytes = 0
        self._is_running = False
        self._failure: BaseException | None = None
        self._published: tuple[Slot, Entry, str] | None = None  # and not yet told to the cache

    @property
    def directory(self) -> str:
        """The store's."""
        return self._index.directory

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, cache: TrajectoryCache, slot: Slot, size_bytes: int) -> None:
        """Have the slot written; returns at once."""
        with self._changed:
            self._pending.append((cache, slot, size_bytes))
            self.pending_bytes += size_bytes
        self._start()

    def raise_failure(self) -> None:
        """Raise a failure that nobody was told of yet, as WriteError."""
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise WriteError(
                f"{self._index.directory}: could not be written to: {failure}. "
                f"What has no file stays in memory; flush() tries again."
            ) from failure

    def wait_for_room(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more may be pending; a larger trajectory is let in alone."""
        self._wait(
            lambda: (
                not self.pending_bytes or self.pending_bytes + size_bytes <= self._max_pending_bytes
            )
        )

    def wait_for_next(self) -> None:
        """Wait until one more trajectory is written than now, if any is pending."""
        before = self.num_pending
        self._wait(lambda: not self._pending or self.num_pending < before)

    def flush(self, *, sync: bool) -> None:
        """Wait until all is published and the snapshots are as current as they are to be.

        With ``sync`` also until it is on the disk itself. WriteError if it fails.
        """
        self.raise_failure()
        self._wait(lambda: not self._pending)
        self._call(self._after_flush, sync)
        self.raise_failure()  # of a snapshot, which comes after the last trajectory

    def clear(self) -> None:
        """Journal that all trajectories are gone. Nothing may be pending."""
        self._call(self._index.clear)

    def load(self, contents: Contents) -> None:
        """Journal that others have taken the place of all. Nothing may be pending."""
        self._call(self._index.load, contents)

    def remove_dead_files(self) -> None:
        """Unlink what is gone, once no gather is shown it any more."""
        self._call(self._index.remove_dead_files)

    def stop(self, *, wait: bool) -> int:
        """End the thread; with ``wait`` write all before. How many trajectories were given up.

        WriteError if that fails; then the thread goes on.
        """
        if wait:
            self.flush(sync=False)
            self._call(self._write_snapshots)
        with self._changed:
            lost = len(self._pending)
            self._pending.clear()
            self.pending_bytes = 0
        self._executor.shutdown(wait=True)
        return lost

    def close(self) -> None:
        """Close the journal, after `stop`; and so it is even if that is a WriteError."""
        try:
            self._index.close()
        except OSError as error:
            raise WriteError(f"{self._index.directory}: {error}") from error

    def _start(self) -> None:
        with self._changed:
            # Not while a failure is untold: it would be told a second time, as another.
            if not self._is_running and self._pending and self._failure is None:
                self._is_running = True
                self._executor.submit(self._run)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        self._start()
        with self._changed:
            while not is_done() and self._failure is None:
                self._changed.wait(_LOOK_S)
        self.raise_failure()

    def unsynced(self) -> set[str]:
        """The uuids of those whose files may not be on the disk itself. Nothing may be pending."""
        return self._call(self._index.unsynced)

    def note_synced(self, uuids: set[str]) -> None:
        """Somebody has brought their files to the disk itself, though not their names here.

        Does not wait: the thread may have no end of trajectories to write before it.
        """
        self._executor.submit(self._index.note_synced, uuids)

    def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run something in the thread, after what is pending; OSError becomes WriteError."""
        try:
            return self._executor.submit(function, *arguments).result()
        except OSError as error:
            with self._changed:
                self._failure = None  # an earlier one is told by this: the next call tries again
            raise WriteError(f"{self._index.directory}: {error}") from error

    # -- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._has_more():
                self._write_pending()
                if self._index.is_snapshot_due():
                    self._write_snapshots()
        except BaseException as error:  # reaches the caller by raise_failure
            with self._changed:
                self._is_running = False
                self._failure = error
                self._changed.notify_all()

    def _has_more(self) -> bool:
        """Whether anything is pending; if not the thread is free to be begun anew.

        Not before the snapshots are written: else one more run could wait behind them, and fail
        once more after their failure was told.
        """
        with self._changed:
            self._is_running = bool(self._pending)
            return self._is_running

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                if not self._pending:
                    return
                cache, slot, size_bytes = self._pending[0]
            self._write(cache, slot)
            with self._changed:
                if self._pending:
                    self._pending.popleft()
                    self.pending_bytes -= size_bytes
                self._changed.notify_all()
            self._drop_excess()

    def _write(self, cache: TrajectoryCache, slot: Slot) -> None:
        # What is published is not published again when only what follows has failed.
        if self._published is None or self._published[0] is not slot:
            self._published = (slot, *self._publish(cache, slot))
        _, entry, path = self._published
        if self._budget.max_bytes is not None:
            self._budget.written(entry.trajectory_id, files.disk_bytes_of(path))
        self._on_written(entry)
        cache.written(slot, entry, path)
        self._published = None

    def _drop_excess(self) -> None:
        gone = self._budget.excess()
        if gone:
            self._index.drop(gone)
            self._budget.dropped(gone)
            # Nobody is shown them any more when their files go.
            self._on_dropped(gone)
            self._index.remove_dead_files()

    def _publish(self, cache: TrajectoryCache, slot: Slot) -> tuple[Entry, str]:
        """Write the slot's file, give it its name and journal it; its entry and path."""
        entry = slot.entry
        name = files.trajectory_name(entry.trajectory_id, entry.model_weights_id)
        extension = storage.FORMATS[self._format_name].EXTENSION
        file = name + extension
        if files.exists(files.join(self._index.directory, file)):
            # Left by a writer that died before it journalled it, or brought in by a load.
            file = f"{name}.{entry.uuid[:8]}{extension}"
        path = files.join(self._index.directory, file)
        entry = dataclasses.replace(entry, file=file)
        rows, texts = cache.lend(slot)
        entry = storage.write(path, entry, cache.schema, rows, texts, self._format_name)
        try:
            self._index.add(cache.schema, entry)
        except BaseException:
            files.remove(path)
            raise
        return entry, path

    def _after_flush(self, sync: bool) -> None:
        if self._index.is_snapshot_due():
            self._write_snapshots()
        if sync:
            self._index.sync()

    def _write_snapshots(self) -> None:
        self._index.write_snapshots(self._metadata())
