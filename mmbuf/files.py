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
from typing import BinaryIO

import filelock

from mmbuf.errors import LockedError

_TEMPORARY = ".tmp"
_MAX_NAME_BYTES = 200  # of the 255 that file systems allow: room for the id and a temporary's marks
# What link answers where there are none: other file systems, some network and FAT ones, too many.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)
_COPY_BYTES = 8 << 20
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def join(directory: str, name: str) -> str:
    return os.path.join(directory, name)


def directory_of(path: str) -> str:
    return os.path.dirname(path)


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


def trajectory_name(trajectory_id: int, model_weights_id: str) -> str:
    """The name of a trajectory's file, without its extension; as RLinf has it."""
    return f"trajectory_{trajectory_id}_{escape(model_weights_id)}"


def make_directory(path: str) -> None:
    """Make ``path`` and what is missing above it; an existing directory is left as it is."""
    os.makedirs(path, exist_ok=True)


def exists(path: str) -> bool:
    return os.path.lexists(path)


def is_directory(path: str) -> bool:
    return os.path.isdir(path)


def size_of(path: str) -> int:
    """Bytes of a file, or of all files in a directory (not of those below)."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    with os.scandir(path) as names:
        return sum(name.stat().st_size for name in names)


def disk_bytes_of(path: str) -> int:
    """Bytes that a file, or all files in a directory, take on the disk: holes take none."""
    if not os.path.isdir(path):
        return os.stat(path).st_blocks * 512
    with os.scandir(path) as names:
        return sum(name.stat().st_blocks for name in names) * 512


def names_in(directory: str) -> list[str]:
    return os.listdir(directory)


def unlink(path: str) -> None:
    """Remove a file; none there is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def remove(path: str) -> None:
    """Remove a file, or a directory with all that is in it; none there is fine."""
    if os.path.isdir(path) and not os.path.islink(path):
        if not os.path.basename(path).startswith("."):
            # All of it goes at once: nobody may find a trajectory with half of its files.
            path, shown = temporary(path), path
            os.rename(shown, path)
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        os.rmdir(path)
    else:
        unlink(path)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def is_same(path: str, other: str) -> bool:
    """Whether both names are there and mean the same file, or directories of the same files."""
    try:
        if os.path.samefile(path, other):
            return True
        names = os.listdir(path)
        return sorted(names) == sorted(os.listdir(other)) and all(
            os.path.samefile(os.path.join(path, name), os.path.join(other, name)) for name in names
        )
    except OSError:
        return False


def link_or_copy(source: str, target: str) -> None:
    """Give a file, or a directory of files, the new name ``target`` as well.

    By hard links, which write no data; by copies where the file systems do not allow them. The
    target is complete when it appears. FileExistsError if it is there already.
    """
    if not os.path.isdir(source):
        try:
            os.link(source, target)
            return
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    name = temporary(target)
    try:
        if os.path.isdir(source):
            os.mkdir(name)
            for inner in os.listdir(source):
                link_or_copy(os.path.join(source, inner), os.path.join(name, inner))
        else:
            _copy(source, name)
        if os.path.lexists(target):  # a race would be with another writer, which the lock forbids
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(name, target)
    except BaseException:
        remove(name)
        raise


def _copy(source: str, target: str) -> None:
    with opened(source) as fd, created(target) as new:
        left, offset = os.fstat(fd).st_size, 0
        while left:
            copied = _copy_some(fd, new, offset, left)
            if not copied:
                raise EOFError(f"{source}: the file ends at byte {offset}")
            offset, left = offset + copied, left - copied


def _copy_some(fd: int, new: int, offset: int, size: int) -> int:
    """Copy some of ``size`` bytes from ``offset`` on; how many."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(fd, new, size, offset, offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
    data = os.pread(fd, min(size, _COPY_BYTES), offset)
    write_at(new, data, offset)
    return len(data)


def temporary(path: str) -> str:
    """A hidden name in the directory of ``path`` that no other call gives."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{uuid.uuid4().hex[:12]}{_TEMPORARY}")


def remove_temporaries_of(path: str) -> None:
    """Remove what is left of earlier tries to make ``path``. Only for who alone makes it."""
    directory, name = os.path.split(path)
    for other in os.listdir(directory):
        if other.startswith(f".{name}.") and other.endswith(_TEMPORARY):
            remove(os.path.join(directory, other))


def remove_temporaries(directory: str) -> None:
    """Remove what a writer that died left half written. Only for who holds the writer's lock."""
    for name in os.listdir(directory):
        if name.startswith(".") and name.endswith(_TEMPORARY):
            remove(os.path.join(directory, name))


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
def created_file(path: str) -> Iterator[BinaryIO]:
    """A new file as a file object, for libraries that want one; else like `created`."""
    with created(path) as fd, open(fd, "wb", closefd=False) as file:
        yield file


@contextmanager
def created_directory(path: str) -> Iterator[None]:
    """A new directory, removed with the files in it if the block fails."""
    os.mkdir(path)
    try:
        yield
    except BaseException:
        remove(path)
        raise


@contextmanager
def opened(path: str) -> Iterator[int]:
    """An existing file, open for reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_file(path: str) -> Iterator[BinaryIO]:
    """An existing file as a file object, for libraries that want one; else like `opened`."""
    with open(path, "rb") as file:
        yield file


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


def sync_whole(path: str) -> None:
    """Bring a file, or a directory and the files in it, to the disk itself."""
    if os.path.isdir(path):
        for name in os.listdir(path):
            sync(os.path.join(path, name))
    sync(path)


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
