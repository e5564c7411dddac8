"""Memory that the processes of an attack share, and that outlives each of them."""

from __future__ import annotations

import itertools
import mmap
import pickle
import struct
import threading
import time
from typing import Any

_HEAD = struct.Struct("<q")


class Slot:
    """The newest object that one process has put there. Readers need no lock.

    There are two places, written in turn; the number of the newest is changed last, so whoever is
    killed while it writes leaves the one before.
    """

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self._size_bytes = size_bytes
        self._memory = mmap.mmap(-1, 2 * size_bytes + mmap.PAGESIZE)

    def put(self, item: Any) -> None:
        """For one thread at a time, of one process."""
        data = pickle.dumps(item)
        assert len(data) + _HEAD.size <= self._size_bytes, f"{len(data)} bytes are too many"
        number = self.number + 1
        start = self._start(number)
        self._memory[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        self._memory[start : start + _HEAD.size] = _HEAD.pack(len(data))
        self._memory[: _HEAD.size] = _HEAD.pack(number)  # one aligned copy of eight bytes

    def get(self) -> tuple[int, Any]:
        """How many were put so far, and the newest; None where there is none."""
        while True:
            number = self.number
            if not number:
                return 0, None
            start = self._start(number)
            (size,) = _HEAD.unpack_from(self._memory, start)
            data = self._memory[start + _HEAD.size : start + _HEAD.size + size]
            if self.number == number:  # else it may be written over already
                return number, pickle.loads(data)

    @property
    def number(self) -> int:
        """How many were put so far."""
        number: int = _HEAD.unpack_from(self._memory, 0)[0]
        return number

    def _start(self, number: int) -> int:
        return mmap.PAGESIZE + number % 2 * self._size_bytes


class Ring:
    """The last lines of what a process did, by any of its threads."""

    _LINES, _WIDTH = 200, 192

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._LINES * self._WIDTH)
        self._numbers = itertools.count()
        self._begun = time.monotonic()

    def note(self, text: str) -> None:
        number = next(self._numbers)
        when = time.monotonic() - self._begun
        line = f"{number:9d} {when:8.3f} {threading.current_thread().name}: {text}"
        start = number % self._LINES * self._WIDTH
        data = line.encode(errors="replace")[: self._WIDTH]
        self._memory[start : start + self._WIDTH] = data.ljust(self._WIDTH)

    def __str__(self) -> str:
        data = self._memory[:]
        lines = (data[i : i + self._WIDTH] for i in range(0, len(data), self._WIDTH))
        return "\n".join(
            line.decode(errors="replace").rstrip()[10:]
            for line in sorted(line for line in lines if line[0])
        )
