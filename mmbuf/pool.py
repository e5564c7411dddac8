"""BatchPool: memory for big batches, used again when nobody holds it any more.

Fresh memory for a 25 MB batch costs three times the gather itself. So big columns of a batch are
laid into blocks of huge pages; a block comes back when the last array or tensor that looks into it
is gone, and what somebody holds is never handed out again.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from mmbuf import vm

# Below this the allocator's own memory is as fast, and blocks are whole huge pages.
MIN_BYTES = 1 << 20
_MAX_IDLE_BYTES = 512 << 20


class BatchPool:
    """Arrays over blocks of reused memory. Thread-safe."""

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: dict[int, list[int]] = {}
        self._lock = threading.Lock()  # guards _idle's keys and the trimming, not the lists

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An uninitialised array, like ``numpy.empty``; its memory comes back by itself."""
        size = math.prod(shape) * dtype.itemsize
        block_bytes = vm.round_up(size, vm.HUGE_PAGE)
        idle = self._idle.get(block_bytes)
        if idle is None:
            with self._lock:
                idle = self._idle.setdefault(block_bytes, [])
        try:
            address = idle.pop()
        except IndexError:
            self._trim()
            address = vm.new_block(block_bytes)
        # list.append alone: the finalizer may run in any thread, in the middle of anything.
        return vm.lend_block(address, size, idle.append).view(dtype).reshape(shape)

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def clear(self) -> None:
        """Give the idle blocks back to the system; lent ones come back to the pool later."""
        with self._lock:
            self._shrink(0)

    def _trim(self) -> None:
        if self.idle_bytes > self._max_idle_bytes:
            with self._lock:
                self._shrink(self._max_idle_bytes)

    def _shrink(self, max_idle_bytes: int) -> None:
        for size, idle in self._idle.items():
            while idle and self.idle_bytes > max_idle_bytes:
                try:
                    vm.free_block(idle.pop(), size)
                except IndexError:  # another thread took the last one
                    break

    def renew_lock(self) -> None:
        """Make the lock anew, in a forked child."""
        self._lock = threading.Lock()
