"""The only door to the disk: names, whole writes, atomic replacement, sync, locks.

All functions raise OSError as the operating system gives it, with the path where there is one.
They are called as ``files.function`` throughout, so that a test can put another disk in their
place.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import filelock

from mmbuf.errors import LockedError

_TEMPORARY = ".tmp"
_MAX_NAME_BYTES = 200  # of the 255 that file systems allow: room for the id and a temporary's marks
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def join(directory: str, name: str) -> str:
    return os.path.join(directory, name)


def absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


def process_id() -> int:
    return os.getpid()


def escape(text: str) -> str:
    """``text`` as a part of a file name: no separators or dots, bounded, one-to-one."""
    escaped = "".join(
        c if c in _PLAIN else f"%{c.encode('utf-8', 'surrogatepass').hex()}" for c in text
    )
    if len(escaped) > _MAX_NAME_BYTES:
        digest = uuid.uuid5(uuid.NAMESPACE_OID, escaped).hex
        escaped = f"{escaped[: _MAX_NAME_BYTES - len(digest) - 1]}%{digest}"
    return escaped


def make_directory(path: str) -> None:
    """Make ``path`` and what is missing above it; an existing directory is left as it is."""
    os.makedirs(path, exist_ok=True)


def exists(path: str) -> bool:
    return os.path.lexists(path)


def is_directory(path: str) -> bool:
    return os.path.isdir(path)


def size_of(path: str) -> int:
    return os.stat(path).st_size


def names_in(directory: str) -> list[str]:
    return os.listdir(directory)


def unlink(path: str) -> None:
    """Remove a file; none there is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def temporary(path: str) -> str:
    """A hidden name in the directory of ``path`` that no other call gives."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{uuid.uuid4().hex[:12]}{_TEMPORARY}")


def remove_temporaries(directory: str) -> None:
    """Remove what a writer that died left half written. Only for who holds the writer's lock."""
    for name in os.listdir(directory):
        if name.startswith(".") and name.endswith(_TEMPORARY):
            unlink(os.path.join(directory, name))


@contextmanager
def created(path: str) -> Iterator[int]:
    """A new file, open for writing; closed at the end, and removed if the block fails."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield fd
        finally:
            # An error of close is an error of the write: the file must not be published.
            os.close(fd)
    except BaseException:
        unlink(path)
        raise


@contextmanager
def opened(path: str) -> Iterator[int]:
    """An existing file, open for reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def open_for_append(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)


def close(fd: int) -> None:
    os.close(fd)


def length(fd: int) -> int:
    return os.fstat(fd).st_size


def truncate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)


def allocate(fd: int, offset: int, size: int) -> None:
    """Take the space now, so that a full disk is an error here and not a signal later."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, size)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` (C-contiguous)."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def append(fd: int, data: bytes) -> None:
    """Append ``data`` by one write; what came short of it is cut off again before the error."""
    before = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be appended")
    except OSError:
        os.ftruncate(fd, before)
        raise


def read_at(fd: int, size: int, offset: int) -> bytes:
    """``size`` bytes from ``offset``; fewer only at the end of the file."""
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def read_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` (bytes) from ``offset``; EOFError if the file ends before."""
    while view:
        read = os.preadv(fd, [view], offset)
        if not read:
            raise EOFError(f"the file ends at byte {offset}")
        view, offset = view[read:], offset + read


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def replace(path: str, blocks: Iterable[bytes]) -> None:
    """Put a new file in the place of ``path``: after power loss the old one or the new one."""
    name = temporary(path)
    with created(name) as fd:
        offset = 0
        for block in blocks:
            write_at(fd, block, offset)
            offset += len(block)
        os.fsync(fd)  # or the rename could survive without the bytes
    try:
        os.rename(name, path)
    except OSError:
        unlink(name)
        raise


def sync(path: str) -> None:
    """Bring a file, or the names in a directory, to the disk itself."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_open(fd: int) -> None:
    os.fsync(fd)


class WriterLock:
    """The one writer of a store: a lock on ``path`` that dies with its process.

    The file says who holds it. It is never removed: a new file would be another lock.
    """

    def __init__(self, path: str) -> None:
        self._lock = filelock.FileLock(path, is_singleton=False)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise _locked(path) from None
        with open(path, "r+") as file:
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            file.truncate()

    def release(self) -> None:
        self._lock.release()


def _locked(path: str) -> LockedError:
    pid = host = None
    try:
        holder = json.loads(read(path))
        pid, host = int(holder["pid"]), str(holder["host"])
        who = f"process {pid} on {host}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "a process that has not yet said its name"
    return LockedError(
        f"{os.path.dirname(path)}: expected no other writer, but {who} holds the store. "
        f"Close that buffer, or read the store with ReplayReader.",
        pid=pid,
        host=host,
    )
