"""BatchPool: memory for big batches, used again when nobody holds it any more.

Fresh memory for a 25 MB batch costs three times the gather itself. So big columns of a batch are
laid into blocks of huge pages; a block comes back when the last array or tensor that looks into it
is gone, and what somebody holds is never handed out again.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from functools import partial
from typing import Any

import numpy as np

from mmbuf import shield, vm

# Below this the allocator's own memory is as fast, and blocks are whole huge pages.
MIN_BYTES = 1 << 20
_MAX_IDLE_BYTES = 512 << 20


class _Loan(weakref.ref[Any]):
    """A block that is lent, until the memory that arrays look into is gone."""

    key = 0
    block: vm.Block | None = None  # not yet


class BatchPool:
    """Arrays over blocks of reused memory. Thread-safe, without a lock.

    Blocks come back in any thread in the middle of anything, and a signal handler may interrupt
    what is called then. So each is held by what has it (the memory, the loan, the idle list), and
    whatever drops it gives it back to the system; and C code notes that it has come back, for
    `_settle`, before that is called.
    """

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self.max_idle_bytes = max_idle_bytes
        self._idle: dict[int, list[vm.Block]] = {}
        # Of each loan also what is called at its end; by the id of the loan.
        self._lent: dict[int, tuple[_Loan, weakref.ref[Any]]] = {}
        self._returned: deque[_Loan] = deque()  # to be settled
        self._on_return = partial(_settle, weakref.ref(self))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An uninitialised array, like ``numpy.empty``; its memory comes back by itself."""
        size = math.prod(shape) * dtype.itemsize
        block_bytes = vm.round_up(size, vm.HUGE_PAGE)
        try:
            block = self._idle[block_bytes].pop()
        except LookupError:
            try:
                self._settle()
                block = shield.run(vm.new_block, block_bytes)
            except OSError:  # no mapping is left: the allocator may still have memory
                return np.empty(shape, dtype)
        memory = block.memory(size)
        # The callbacks of an object are called in the order from the newest to the oldest.
        then = weakref.ref(memory, self._on_return)
        loan = _Loan(memory, self._returned.append)
        loan.block, loan.key = block, id(loan)
        self._lent[loan.key] = (loan, then)
        return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def _settle(self) -> None:
        """Keep what has come back for later use, or leave it to the system."""
        while self._returned:
            idle_bytes = self.idle_bytes
            # At once: neither a signal handler nor another thread comes between what is done
            # without a call.
            if not self._returned:
                return
            loan = self._returned[0]
            del self._returned[0]
            if loan.key in self._lent:
                del self._lent[loan.key]
            block = loan.block
            if block is None or idle_bytes + block.size_bytes > self.max_idle_bytes:
                continue
            if block.size_bytes in self._idle:
                self._idle[block.size_bytes] += [block]
            else:
                self._idle[block.size_bytes] = [block]

    def clear(self) -> None:
        """Give the idle blocks back to the system; lent ones come back to the pool later."""
        self._settle()
        self._idle = {}


def _settle(pool: weakref.ref[BatchPool], _: object) -> None:
    owner = pool()
    if owner is not None:
        owner._settle()
