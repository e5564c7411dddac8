"""DiskBudget: which trajectories go when a store may only take so many bytes of the disk.

The oldest ones outside the window go first; those of the window never do. What counts are the bytes
that the trajectories' files take on the disk; journal and snapshots are small beside them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mmbuf.errors import WriteError

# What a file takes beyond its rows: head, tail, and the last block of each column.
_OVERHEAD_BYTES = 64 << 10


class DiskBudget:
    """Bytes of each trajectory of a store, oldest first. Thread-safe.

    ``max_bytes`` None: no limit, and nothing is counted. ``window_size`` 0: all are in the window.
    """

    def __init__(self, max_bytes: int | None, window_size: int) -> None:
        self.max_bytes = max_bytes
        self._window_size = window_size
        self._lock = threading.Lock()  # guards all below
        self._sizes: dict[int, int] = {}  # an estimate until it is written
        self._unwritten: set[int] = set()  # the newest
        self._unwritten_bytes = 0
        self._window: deque[int] = deque()
        self._window_bytes = 0
        self._total_bytes = 0
        self._num_holds = 0

    def check(self, size_bytes: int) -> None:
        """WriteError if the window does not fit with one more trajectory of about so many bytes."""
        if self.max_bytes is None:
            return
        with self._lock:
            is_full = len(self._window) == self._window_size > 0
            leaving = self._sizes[self._window[0]] if is_full else 0
            needed = self._window_bytes - leaving + size_bytes + _OVERHEAD_BYTES
        if needed > self.max_bytes:
            raise WriteError(
                f"max_disk_bytes: expected the window to fit in {self.max_bytes} bytes, got "
                f"{needed} with the trajectory that is added. Raise max_disk_bytes or shrink "
                f"sample_window_size."
            )

    def add(self, trajectory_id: int, size_bytes: int) -> None:
        """Count one more, of about ``size_bytes`` until it is written."""
        if self.max_bytes is not None:
            with self._lock:
                self._append(trajectory_id, size_bytes + _OVERHEAD_BYTES)
                self._unwritten.add(trajectory_id)
                self._unwritten_bytes += size_bytes + _OVERHEAD_BYTES

    def written(self, trajectory_id: int, size_bytes: int) -> None:
        """The trajectory's file takes ``size_bytes`` of the disk."""
        with self._lock:
            if trajectory_id in self._unwritten:
                self._unwritten.discard(trajectory_id)
                self._unwritten_bytes -= self._sizes[trajectory_id]
            if trajectory_id in self._sizes:
                more = size_bytes - self._sizes[trajectory_id]
                self._sizes[trajectory_id] = size_bytes
                self._total_bytes += more
                if trajectory_id in self._window:
                    self._window_bytes += more

    def excess(self) -> list[int]:
        """The ids that have to go, oldest first.

        What is not written yet takes no room and the place of nothing: a process that is killed
        leaves a whole window on the disk.
        """
        gone: list[int] = []
        if self.max_bytes is None or not self._window_size:
            return gone
        with self._lock:
            if self._num_holds:
                return gone
            written_bytes = self._total_bytes - self._unwritten_bytes
            outside = max(0, len(self._sizes) - len(self._unwritten) - self._window_size)
            for trajectory_id, size_bytes in itertools.islice(self._sizes.items(), outside):
                if written_bytes <= self.max_bytes:
                    break
                written_bytes -= size_bytes
                gone.append(trajectory_id)
        return gone

    def dropped(self, trajectory_ids: Iterable[int]) -> None:
        """These are gone from the disk."""
        with self._lock:
            for trajectory_id in trajectory_ids:
                self._total_bytes -= self._sizes.pop(trajectory_id)

    def load(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Count these trajectories, ``(id, bytes)`` oldest first, instead of those before."""
        with self._lock:
            self._sizes.clear()
            self._unwritten.clear()
            self._window.clear()
            self._window_bytes = self._total_bytes = self._unwritten_bytes = 0
            for trajectory_id, size_bytes in sizes:
                self._append(trajectory_id, size_bytes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing goes within the block, in which somebody links the files."""
        with self._lock:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holds -= 1

    def _append(self, trajectory_id: int, size_bytes: int) -> None:
        self._sizes[trajectory_id] = size_bytes
        self._total_bytes += size_bytes
        self._window.append(trajectory_id)
        self._window_bytes += size_bytes
        if self._window_size and len(self._window) > self._window_size:
            self._window_bytes -= self._sizes[self._window.popleft()]
