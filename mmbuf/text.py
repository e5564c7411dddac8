"""Text of a window: its strings and their codes, for as long as something there has them.

Text that never repeats would fill a table that only grows. So each place in the cache, and each
read of a trajectory that has none, says which codes it uses and gives them back; a string that
nobody uses any more is forgotten, and its code is another one's. Whoever gives codes back sees to
it that no gather has them in hand: the cache does so when the gathers that could have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from mmbuf.schema import Array


class WindowText:
    """The strings of a text column. Thread-safe: any number may `decode` while one encodes."""

    def __init__(self) -> None:
        self._strings: list[str] = []  # by code; empty where the code is free
        self._codes: dict[str, int] = {}
        self._num_uses: list[int] = []  # by code
        self._free: list[int] = []
        self._lock = threading.Lock()  # guards all of it against two that encode or give back

    def __len__(self) -> int:
        return len(self._codes)

    def encode(self, strings: Iterable[str]) -> tuple[Array, TextUse]:
        """Codes ``int32 [N]`` of ``strings``, and the use of them, to be given back as it is."""
        codes = self._codes
        out: list[int] = []
        with self._lock:
            for string in strings:
                code = codes.get(string)
                if code is None:
                    code = codes[string] = self._new(string)
                out.append(code)
            used = list(set(out))
            num_uses = self._num_uses
            for code in used:
                num_uses[code] += 1
        return np.array(out, np.int32), (self, np.array(used, np.int32))

    def _new(self, string: str) -> int:
        if self._free:
            code = self._free.pop()
            self._strings[code] = string
            return code
        # In this order: whatever ends it in the middle, no code is without a count.
        self._num_uses.append(0)
        self._strings.append(string)
        return len(self._strings) - 1

    def _give_back(self, used: Array) -> None:
        num_uses, strings = self._num_uses, self._strings
        with self._lock:
            for code in used.tolist():
                num_uses[code] -= 1
                if not num_uses[code]:
                    del self._codes[strings[code]]
                    strings[code] = ""
                    self._free.append(code)

    def decode(self, codes: Array) -> list[str]:
        """The strings of ``codes``, which are in use."""
        strings = self._strings
        return [strings[code] for code in codes.tolist()]

    def renew_lock(self) -> None:
        """Make the lock anew, in a forked child."""
        self._lock = threading.Lock()


TextUse = tuple[WindowText, Array]  # the codes, each once, that somebody uses


def give_back(uses: list[TextUse]) -> None:
    """End these uses, and forget the strings that nobody else uses; the list is empty then.

    No gather may have their codes in hand.
    """
    while uses:
        text, used = uses.pop()
        text._give_back(used)
