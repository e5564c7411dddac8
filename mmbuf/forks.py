"""Forks: changes that no forked child finds half done.

A change is made within a `ChangeLock`. A fork waits until none goes on, and none begins before it
has happened. What says so are two lists, and nobody holds a lock across the fork: the hooks that
come after it are one call of C code each, so that an interrupt leaves nothing held for good.
"""

from __future__ import annotations

import os
import threading
import time

from mmbuf import shield

_PATIENCE_S = 30.0  # of a fork with changes that do not end: the child has half of one then
_PAUSE_S = 0.0005

_forking: list[int] = []  # threads that are in the middle of a fork
_changes: list[None] = []  # one for each that goes on


class ChangeLock:
    """One thread at a time changes something; it may enter again. For workers of `shield`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        shield.acquire(self._lock)
        try:
            if not self._depth:
                _begin()
        except BaseException:
            self._lock.release()
            raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            _changes.pop()
        self._lock.release()

    def wait(self) -> None:
        """Until no change goes on."""
        shield.acquire(self._lock)
        self._lock.release()


def _begin() -> None:
    while True:
        _changes.append(None)
        # A signal handler may come within a fork: that goes on only when the handler has ended.
        if not _forking or shield.caller() in _forking:
            return
        _changes.pop()
        time.sleep(_PAUSE_S)
        shield.check()


def _before() -> None:
    _forking.append(threading.get_ident())
    deadline = time.monotonic() + _PATIENCE_S
    while _changes and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_forking.clear, after_in_child=_forking.clear
    )
    os.register_at_fork(after_in_child=_changes.clear)
