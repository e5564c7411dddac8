"""TrajectoryWriter: the background thread: write, publish, journal, rewire.

Trajectories are written in the order they were added, so a store is always a prefix of what was
added. A failure stops the writing: the trajectory stays in memory and first in line, the failure is
raised to whoever calls next, and the call after that tries again.

The thread lives while there is something to write and a little longer; it is no daemon, so the
interpreter does not end before it has written all. Where no thread is to be had (a limit of
processes, the interpreter's exit) whoever waits does the work himself.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from mmbuf import files, shield, storage
from mmbuf.budget import DiskBudget
from mmbuf.cache import TrajectoryCache
from mmbuf.entry import Entry
from mmbuf.errors import WriteError
from mmbuf.index import Contents, TrajectoryIndex
from mmbuf.places import Slot

_T = TypeVar("_T")

MAX_PENDING_BYTES = 512 << 20
_LINGER_S = 2.0  # of a thread that has nothing to write, since starting one costs about 0.1 ms

_log = logging.getLogger("mmbuf")


class _Call:
    """A function to be called when all that is pending is written, and what became of it."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function(*self._arguments)
        except BaseException as error:
            self.error = error
        self.is_done = True


class TrajectoryWriter:
    """Writes slots of a cache to the store of ``index``.

    ``submit``, ``wait_for_room``, ``flush``, ``clear``, ``load``, ``stop`` and ``close`` are for
    one thread at a time, and for threads that no signal reaches. ``metadata()`` gives what the
    snapshots say beside the index; ``format_name`` is that of the files. What ``budget`` has no
    room for is dropped once newer ones are written.
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
        self._pending: deque[tuple[TrajectoryCache, Slot, int]] = deque()
        # Guards all below. Reentrant, since the garbage collection may call `let_go` in the middle
        # of anything.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # notified after each write and each call
        self._asked = threading.Condition(lock)  # notified when the thread has something to do
        self.pending_bytes = 0
        self._calls: deque[_Call] = deque()
        self._has_worker = False  # the thread, or whoever does its work
        self._is_stopping = False
        self._is_let_go = False
        self._on_end: Callable[[], None] | None = None  # when all is written and nobody is left
        self._failure: BaseException | None = None  # that nobody was told of yet
        self._has_failed = False  # and nobody has asked since to try again
        self._published: tuple[Slot, Entry, str] | None = None  # and not yet told to the cache

    @property
    def directory(self) -> str:
        """The store's."""
        return self._index.directory

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, cache: TrajectoryCache, slot: Slot, size_bytes: int) -> None:
        """Have the slot written; returns at once, but at the interpreter's exit."""
        with self._changed:
            self._pending.append((cache, slot, size_bytes))
            self.pending_bytes += size_bytes
        self._try_again()
        if not self._start() and shield.is_exiting():
            self._work_here()  # nobody else ever would

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

    def flush(self, *, sync: bool, is_last: bool = False) -> None:
        """Wait until all is published and the snapshots are as current as they are to be.

        With ``sync`` also until it is on the disk itself. WriteError if it fails; unless it
        ``is_last`` also where nothing was to be written, but the store is gone.
        """
        self.raise_failure()
        self._wait(lambda: not self._pending)
        self._call(self._after_flush, sync, is_last)
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
            self.flush(sync=False, is_last=True)
            self._call(self._write_snapshots)
        with self._changed:
            given_up = [slot.entry.trajectory_id for _, slot, _ in self._pending]
            self._pending.clear()
            self.pending_bytes = 0
            self._is_stopping = True
            self._asked.notify_all()
            while self._has_worker:
                self._changed.wait(shield.LOOK_S)
        # The first of them may have been on its way to its file.
        return sum(i not in self._index.contents.entries for i in given_up)

    def close(self) -> None:
        """Close the journal, after `stop`; and so it is even if that is a WriteError."""
        try:
            self._index.close()
        except OSError as error:
            raise WriteError(f"{self._index.directory}: {error}") from error

    def let_go(self, release: Callable[[], None]) -> None:
        """Nobody has the buffer any more: write what is pending, then end and ``release()``.

        Does not wait. What cannot be written is lost then, and the log says so. Again it does
        nothing.
        """
        with self._changed:
            if self._is_let_go:
                return
            self._is_let_go = True
            self._is_stopping, self._on_end = True, release
            self._failure, self._has_failed = None, False  # tried once more
            self._asked.notify_all()
            if self._has_worker:
                return
        if not self._pending or not self._start():
            self._end()

    def _end(self) -> None:
        """End for good if the buffer was let go: nobody works any more."""
        with self._changed:
            release, self._on_end = self._on_end, None
        if release is None:
            return
        if self._pending:
            _log.warning(
                "%s: a buffer was dropped without close, and %d trajectories were not written: %s",
                self.directory,
                len(self._pending),
                self._failure or "no thread is to be had",
            )
            self._pending.clear()
        try:
            self._index.close()
        except OSError as error:
            _log.warning("%s: %s", self.directory, error)
        release()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for the thread; WriteError should it fail meanwhile."""
        self._try_again()
        while True:
            if not self._start():
                self._work_here()
            with self._changed:
                if is_done() or self._failure is not None:
                    break
                self._changed.wait(shield.LOOK_S)
            shield.check()
        self.raise_failure()

    def unsynced(self) -> set[str]:
        """The uuids of those whose files may not be on the disk itself. Nothing may be pending."""
        return self._call(self._index.unsynced)

    def note_synced(self, uuids: set[str]) -> None:
        """Somebody has brought their files to the disk itself, though not their names here.

        Does not wait: the thread may have no end of trajectories to write before it.
        """
        self._add_call(self._index.note_synced, uuids)

    def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call something when all that is pending is written, and wait; OSError is a WriteError.

        Of a failure of the writing nothing is said here.
        """
        call = self._add_call(function, *arguments)
        while not call.is_done:
            if not self._start():
                self._work_here()
            with self._changed:
                if not call.is_done:
                    self._changed.wait(shield.LOOK_S)
                if call in self._calls:  # else it has begun, and is not left half done
                    try:
                        shield.check()
                    except BaseException:
                        self._calls.remove(call)
                        raise
        if isinstance(call.error, OSError):
            with self._changed:
                self._failure = None  # an earlier one is told by this: the next call tries again
            raise WriteError(f"{self._index.directory}: {call.error}") from call.error
        if call.error is not None:
            raise call.error
        result: _T = call.result
        return result

    def _add_call(self, function: Callable[..., Any], *arguments: Any) -> _Call:
        call = _Call(function, arguments)
        with self._changed:
            self._calls.append(call)
        self._start()
        return call

    def _start(self) -> bool:
        """See to it that somebody does what there is to do; False where no thread is to be had."""
        with self._changed:
            if self._has_worker or not self._has_work():
                self._asked.notify_all()
                return True
            if shield.is_exiting():
                return False
            self._has_worker = True
        try:
            threading.Thread(target=self._work, name="mmbuf-writer", daemon=False).start()
        except RuntimeError:
            with self._changed:
                self._has_worker = False
            return False
        return True

    def _try_again(self) -> None:
        """Write on after a failure; not while it is untold: it would be told again, as another."""
        with self._changed:
            if self._failure is None:
                self._has_failed = False

    def _has_work(self) -> bool:
        return bool(self._calls or (self._pending and not self._has_failed))

    def _work_here(self) -> None:
        """Do what there is to do in this thread, unless another does it."""
        with self._changed:
            if self._has_worker:
                return
            self._has_worker = True
        try:
            self._work(linger_s=0.0)
        except BaseException:  # an interrupt: in this thread it can be
            with self._changed:
                self._has_worker = False
            raise

    # -- in the thread -------------------------------------------------------------------------

    def _work(self, linger_s: float = _LINGER_S) -> None:
        while self._has_more(linger_s):
            if self._pending and not self._has_failed:
                self._write_all()
            elif self._calls:
                self._calls.popleft().run()
                with self._changed:
                    self._changed.notify_all()
        self._end()

    def _has_more(self, linger_s: float) -> bool:
        """Whether there is something to do, waiting a little for it; if not this was the last.

        That is decided under the lock, so that nothing is left to a thread that has ended.
        """
        deadline = time.monotonic() + linger_s
        with self._changed:
            while not self._has_work():
                left_s = deadline - time.monotonic()
                if self._is_stopping or left_s <= 0 or shield.is_exiting():
                    self._has_worker = False
                    self._changed.notify_all()
                    return False
                self._asked.wait(min(left_s, shield.LOOK_S))
            return True

    def _write_all(self) -> None:
        """Write what is pending, then the snapshots; `raise_failure` tells what fails."""
        try:
            self._write_pending()
            if self._index.is_snapshot_due():
                self._write_snapshots()
        except (KeyboardInterrupt, shield.CancelledError):  # where no thread is to be had
            raise
        except BaseException as error:
            with self._changed:
                self._failure, self._has_failed = error, True
                self._changed.notify_all()

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
            del cache, slot  # a thread that lingers must not keep what was dropped
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
        self._index.check()  # or it would be written into another's store
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
        schema = slot.layout.schema
        entry = storage.write(path, entry, schema, rows, texts, self._format_name)
        try:
            self._index.add(schema, entry)
        except BaseException:
            files.remove(path)
            raise
        return entry, path

    def _after_flush(self, sync: bool, is_last: bool) -> None:
        if not is_last:
            self._index.check()
        if self._index.is_snapshot_due():
            self._write_snapshots()
        if sync:
            self._index.sync()

    def _write_snapshots(self) -> None:
        self._index.write_snapshots(self._metadata())
