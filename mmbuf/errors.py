"""The exception tree. Every error mmbuf raises on purpose is one of these.

::

    MmbufError
    ├── SchemaError      (ValueError)    data do not fit the schema
    ├── EmptyBufferError (RuntimeError)  nothing to draw from
    ├── CorruptError                     bytes on disk are wrong; .path, .offset
    ├── VersionError                     written by a newer mmbuf
    ├── LockedError                      another writer holds the store; .pid, .host
    ├── NoLocksError                     the file system has no locks: nobody can be its one writer
    ├── WriteError       (OSError)       the background write failed; the cause is chained
    └── ClosedError      (ValueError)    used after close

Messages read *where: what: expected X, got Y. Remedy.* They are one line and can be printed,
whatever the names in them are made of.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mmbuf.terminal import printable

# What JSON of any other form than ours may raise on its way into what it stands for.
BAD_JSON = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


class MmbufError(Exception):
    """Base of all errors of mmbuf."""

    def __str__(self) -> str:
        return printable(super().__str__())


class SchemaError(MmbufError, ValueError):
    """Data do not fit the schema; the message names the column, what was expected and what came."""


class EmptyBufferError(MmbufError, RuntimeError):
    """There is no row to draw from."""


class CorruptError(MmbufError):
    """Bytes on disk are wrong.

    ``path`` is the file; ``offset`` the byte where the damage was seen, None if the whole file is
    concerned; ``what`` the message without them.
    """

    def __init__(self, path: str, what: str, *, offset: int | None = None) -> None:
        where = path if offset is None else f"{path} at byte {offset}"
        super().__init__(f"{where}: {what}")
        self.path = path
        self.what = what
        self.offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.path, self.what, offset=self.offset), ()


class VersionError(MmbufError):
    """The store was written by a newer mmbuf."""


class LockedError(MmbufError):
    """Another writer holds the store; ``pid`` and ``host`` name it where that is known."""

    def __init__(self, message: str, *, pid: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class NoLocksError(MmbufError):
    """The file system locks no files, so that two writers could not know of each other."""


class WriteError(MmbufError, OSError):
    """The background write failed; ``__cause__`` says why. The rows stay in memory."""


class ClosedError(MmbufError, ValueError):
    """The object was used after ``close``."""
