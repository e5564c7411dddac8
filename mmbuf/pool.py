"""BatchPool: memory for big batches, used again when nobody holds it any more.

Fresh memory for a 25 MB batch costs three times the gather itself. So big columns of a batch are
laid into blocks of huge pages; a block comes back when the last array or tensor that looks into it
is gone, and what somebody holds is never handed out again.
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import Any

import numpy as np

from mmbuf import vm

# Below this the allocator's own memory is as fast, and blocks are whole huge pages.
MIN_BYTES = 1 << 20
_MAX_IDLE_BYTES = 512 << 20


class BatchPool:
    """Arrays over blocks of reused memory. Thread-safe, without a lock.

    Blocks come back by finalizers, which run in any thread in the middle of anything; so all that
    is done to the idle lists is one append or pop at a time.
    """

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self.max_idle_bytes = max_idle_bytes
        self._idle: dict[int, list[int]] = {}
        weakref.finalize(self, _free, self._idle).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An uninitialised array, like ``numpy.empty``; its memory comes back by itself."""
        size = math.prod(shape) * dtype.itemsize
        block_bytes = vm.round_up(size, vm.HUGE_PAGE)
        try:
            address = self._idle.setdefault(block_bytes, []).pop()
        except IndexError:
            try:
                address = vm.new_block(block_bytes)
            except OSError:  # no mapping is left: the allocator may still have memory
                return np.empty(shape, dtype)
        give_back = partial(_give_back, weakref.ref(self), block_bytes)
        return vm.lend_block(address, size, give_back).view(dtype).reshape(shape)

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def keep(self, block_bytes: int, address: int) -> None:
        """Take a block for later use."""
        self._idle.setdefault(block_bytes, []).append(address)

    def clear(self) -> None:
        """Give the idle blocks back to the system; lent ones come back to the pool later."""
        _free(self._idle)


def _give_back(pool: weakref.ref[BatchPool], block_bytes: int, address: int) -> None:
    owner = pool()
    if owner is None or owner.idle_bytes + block_bytes > owner.max_idle_bytes:
        vm.free_block(address, block_bytes)
    else:
        owner.keep(block_bytes, address)


def _free(idle: dict[int, list[int]]) -> None:
    for size, addresses in list(idle.items()):
        while addresses:
            try:
                vm.free_block(addresses.pop(), size)
            except IndexError:  # another thread took the last one
                break
