"""The only door to the disk: names, whole writes, atomic replacement, sync, locks.

All functions raise OSError as the operating system gives it, with the path where there is one. What
is opened, measured, linked, copied or synced is a file itself: a symbolic link, which may lead out
of the store, a pipe, a socket or a device in its place is a CorruptError, and is not opened. They
are called as ``files.function`` throughout, so that a test can put another disk in their place.

Locks are those of ``flock``, taken here and by no package: what they lock is free when its process
has ended, however it ended. A lock that is the mere presence of a file, as packages have it where
there is no ``flock``, outlives a killed process and is nobody's then; `NoLocksError` instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import struct
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from mmbuf.errors import BAD_JSON, CorruptError, LockedError, NoLocksError

WRITER_LOCK = ".writer.lock"  # in a store; held by its one writer

_TEMPORARY = ".tmp"
_MADE_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp", re.DOTALL)  # as `temporary` makes them
_MAX_NAME_BYTES = 200  # of the 255 that file systems allow: room for the id and a temporary's marks
# What link answers where there are none: other file systems, some network and FAT ones, too many.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)
# What flock answers where there are no locks: FUSE and Lustre without them, NFS without its lock
# daemon; 524 is ENOTSUPP, the kernel's own, that some file systems let out.
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, 524)
_COPY_BYTES = 8 << 20
_PATIENCE_S = 1.0  # with who holds a writer's lock for a moment only
_MAX_CHANGES = 100  # of a lock's file while it is taken
_MAX_HOLDER_BYTES = 1024  # that say who holds a lock
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def join(directory: str, name: str) -> str:
    return os.path.join(directory, name)


def name_of(path: str) -> str:
    return os.path.basename(path)


def directory_of(path: str) -> str:
    return os.path.dirname(path)


def absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


def expanded(path: str) -> str:
    """With the home directory in the place of a leading ``~``; of an unknown user as it is."""
    return os.path.expanduser(path)


def process_id() -> int:
    return os.getpid()


def boot_id() -> str:
    """What tells one start of this machine from all others; empty where the system does not say."""
    try:
        with opened("/proc/sys/kernel/random/boot_id") as fd:
            return read_at(fd, 64, 0).decode().strip()
    except OSError:
        return ""


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
    parents = []
    above = path
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
        parents.append(above or os.curdir)
    os.makedirs(path, exist_ok=True)
    for parent in reversed(parents):
        sync(parent)  # or all that is synced in the new directory is lost with its name


def exists(path: str) -> bool:
    """Whether there is such a name. OSError where the disk does not say: that is no No."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_directory(path: str) -> bool:
    """Whether there is such a directory. OSError as in `exists`."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def no_store(path: str) -> FileNotFoundError:
    """The error that says that ``path`` is no directory, and what it is."""
    got = "a file. Give the directory of its store" if exists(path) else "none"
    return FileNotFoundError(f"{path}: expected a store directory, got {got}.")


def is_file(path: str) -> bool:
    """Whether there is such a file of its own, no link to one. OSError as in `exists`."""
    return exists(path) and stat.S_ISREG(os.lstat(path).st_mode)


def size_of_file(path: str) -> int:
    """Bytes of a file; CorruptError for a directory."""
    status = os.lstat(path)
    _check_is_file(path, status)
    return status.st_size


def size_of(path: str) -> int:
    """Bytes of a file, or of all files in a directory."""
    return sum(status.st_size for status in _files_of(path).values())


def _files_of(path: str) -> dict[str, os.stat_result]:
    """The file of this name, or all files in the directory of this name, by path.

    CorruptError unless all are files. A trajectory of many files has no directories in its own.
    """
    status = os.lstat(path)
    found = {path: status}
    if stat.S_ISDIR(status.st_mode):
        with os.scandir(path) as names:
            found = {name.path: name.stat(follow_symlinks=False) for name in names}
    for name, status in found.items():
        _check_is_file(name, status)
    return found


def check_is_no_link(path: str) -> None:
    """CorruptError for a symbolic link."""
    if os.path.islink(path):
        raise _not_a_file(path, "a symbolic link")


def check_can_be_read(path: str) -> None:
    """CorruptError for a pipe, a socket or a device, which others would wait for or change.

    For files that a caller names, and that a library opens: links are followed.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise CorruptError(path, f"expected a file, got {_KINDS[kind]}.")


def _check_is_file(path: str, status: os.stat_result) -> None:
    """CorruptError unless this is the status of a file."""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise _not_a_file(path, _KINDS[kind])


def _not_a_file(path: str, what: str) -> CorruptError:
    return CorruptError(path, f"expected a file of the store's own, got {what}.")


class Identity(NamedTuple):
    """Which file it is, whatever it is called. No other is it while somebody holds it open."""

    device: int
    inode: int


_NO_FILE = Identity(0, 0)


def identity(fd: int) -> Identity:
    status = os.fstat(fd)
    return Identity(status.st_dev, status.st_ino)


def num_names(path: str, known: Identity) -> int:
    """How many names the file ``known`` has, if ``path`` is one of them; else 0. One ``stat``."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return status.st_nlink if (status.st_dev, status.st_ino) == known else 0


class Signature(NamedTuple):
    """What tells one state of a file from another; times in ns.

    ``changed_at`` is when its bytes changed or it got or lost a name.
    """

    inode: int
    size: int
    changed_at: int


def signature(file: str | int) -> Signature:
    """The state of a file, given by its path or open; one ``stat``."""
    status = os.stat(file)
    return Signature(status.st_ino, status.st_size, status.st_ctime_ns)


def has_changed(path: str, known: Signature) -> bool:
    """Whether the state of the file of this name is another; one ``stat``."""
    status = os.stat(path)
    return (
        status.st_size != known.size
        or status.st_ctime_ns != known.changed_at
        or status.st_ino != known.inode
    )


class Watch:
    """A file held open: asking whether it has changed costs a fifth of asking by its name.

    It does not tell when the directory was moved away with the file in it. Closed at the latest
    when the last who has it lets go of it, so that one thread may do so while another asks.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        # No `__del__`: at the end of a program what that needs may be gone before the object.
        self._end = weakref.finalize(self, _close_after_reading, self._fd)
        self._end.atexit = False

    def has_changed(self, known: Signature) -> bool:
        """Whether the file's state is another, or it has lost its name."""
        status = os.fstat(self._fd)
        return (
            status.st_size != known.size
            or status.st_ctime_ns != known.changed_at
            or status.st_ino != known.inode
            or not status.st_nlink
        )

    def close(self) -> None:
        """Give the descriptor back; asking is an OSError from then on."""
        self._fd = -1
        self._end()


def disk_bytes_of(path: str) -> int:
    """Bytes that a file, or all files in a directory, take on the disk: holes take none."""
    return sum(status.st_blocks for status in _files_of(path).values()) * 512


def free_bytes(path: str) -> int:
    """Bytes that the file system of ``path`` has left for who is not root."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: str) -> str | None:
    """The type of the file system that ``path`` is on; None where that is not to be had."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = file.read()
    except OSError:
        return None
    path = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):  # of two at one place the later one shows
            best, kind = point, after.split()[0]
    return kind


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
    """Whether both names mean the same file, which is there, or directories of the same files.

    A link is no file, but where a directory is meant it may lead to it.
    """
    try:
        if not os.path.isdir(path):
            return _is_same_file(path, other)
        if os.path.samefile(path, other):
            return True
        names = os.listdir(path)
        return (
            names != []
            and sorted(names) == sorted(os.listdir(other))
            and all(
                _is_same_file(os.path.join(path, name), os.path.join(other, name)) for name in names
            )
        )
    except OSError:
        return False


def _is_same_file(path: str, other: str) -> bool:
    return os.path.samestat(os.lstat(path), os.lstat(other))


def link_or_copy(source: str, target: str) -> None:
    """Give a file, or a directory of files, the new name ``target`` as well.

    By hard links, which write no data; by copies where the file systems do not allow them. The
    target is complete when it appears, and but for its name it is on the disk itself if the source
    is. FileExistsError if it is there already.
    """
    found = _files_of(source)
    if source in found:
        _link_or_copy_file(source, target)
        return
    name = temporary(target)
    try:
        os.mkdir(name)
        for inner in found:
            _link_or_copy_file(inner, os.path.join(name, os.path.basename(inner)))
        sync(name)  # the names in it
        _give_name(name, target)
    except BaseException:
        remove(name)
        raise


def _link_or_copy_file(source: str, target: str) -> None:
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
        _copy(source, name)
        _give_name(name, target)
    except BaseException:
        remove(name)
        raise


def _give_name(path: str, target: str) -> None:
    """Rename to what is no name yet."""
    if os.path.lexists(target):  # a race would be with another writer, which the lock forbids
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(path, target)


def _copy(source: str, target: str) -> None:
    with opened(source) as fd, created(target) as new:
        left, offset = os.fstat(fd).st_size, 0
        while left:
            copied = _copy_some(fd, new, offset, left)
            if not copied:
                raise OSError(errno.EIO, f"the file ends at byte {offset}", source)
            offset, left = offset + copied, left - copied
        os.fsync(new)  # a link of a synced file would be synced


def _copy_some(fd: int, new: int, offset: int, size: int) -> int:
    """Copy some of ``size`` bytes from ``offset`` on; how many."""
    if hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(fd, new, size, offset, offset)
            if copied:  # some file systems say 0 where they mean that they cannot
                return copied
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
    made = re.compile(re.escape(f".{name}.") + f"[0-9a-f]{{12}}{re.escape(_TEMPORARY)}")
    for other in os.listdir(directory):
        if made.fullmatch(other):
            remove(os.path.join(directory, other))


def remove_temporaries(directory: str) -> None:
    """Remove what a writer that died left half written. Only for who holds the writer's lock."""
    for name in temporaries_in(directory):
        remove(os.path.join(directory, name))


def temporaries_in(directory: str) -> list[str]:
    """Names of what a writer has half written, or has left so when it died.

    Other programs' temporaries, which lie where somebody saves into a directory of theirs, are
    none of them.
    """
    return [name for name in os.listdir(directory) if _MADE_TEMPORARY.fullmatch(name)]


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
    except BaseException as error:
        _name(error, path)
        with suppress(OSError):  # what went wrong first is to be told
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
    fd = _open(path, os.O_RDONLY)
    try:
        yield fd
    except OSError as error:
        _name(error, path)
        raise
    finally:
        _close_after_reading(fd)


def _close_after_reading(fd: int) -> None:
    with suppress(OSError):  # what was read is read
        os.close(fd)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Give the path to an OSError of the block that has none, such as those of descriptors."""
    try:
        yield
    except OSError as error:
        _name(error, path)
        raise


def _name(error: BaseException, path: str) -> None:
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = path


def _open(path: str, flags: int) -> int:
    """Open a file; CorruptError, and nothing is opened, where something else has its name."""
    with suppress(FileNotFoundError):  # to be made, or to be told by what follows
        _check_is_file(path, os.lstat(path))
    # Should a pipe have taken its place since, we do not wait for who writes to it.
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_a_file(path, "a symbolic link") from error
        raise
    try:
        _check_is_file(path, os.fstat(fd))
    except BaseException as error:
        _name(error, path)
        _close_after_reading(fd)
        raise
    return fd


@contextmanager
def opened_file(path: str) -> Iterator[BinaryIO]:
    """An existing file as a file object, for libraries that want one; else like `opened`."""
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        yield file


@contextmanager
def readable(path: str) -> Iterator[BinaryIO]:
    """A file of others that a caller names, as a file object: links are followed."""
    with open(path, "rb") as file:
        yield file


@contextmanager
def opened_directory(path: str) -> Iterator[int]:
    """A directory, for `opened_in`: what is opened there is of this one, whatever has its name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and os.path.lexists(path):
            what = "a symbolic link" if os.path.islink(path) else "no directory"
            raise _not_a_file(path, what) from error
        raise
    try:
        yield fd
    finally:
        _close_after_reading(fd)


@contextmanager
def opened_in(directory: int, path: str) -> Iterator[int]:
    """As `opened`, the file in an open directory that was found as that of ``path``."""
    name = os.path.basename(path)
    try:
        _check_is_file(path, os.stat(name, dir_fd=directory, follow_symlinks=False))
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        error.filename = path
        raise
    try:
        yield fd
    except OSError as error:
        _name(error, path)
        raise
    finally:
        _close_after_reading(fd)


def has_name(fd: int, path: str) -> bool:
    """Whether what is open is still what ``path`` leads to."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def open_for_append(path: str) -> int:
    return _open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)


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
        if not written:
            raise OSError(errno.EIO, f"nothing could be written at byte {offset}")
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
    with opened(path) as fd:
        return read_at(fd, length(fd), 0)


def blocks_of(fd: int, size: int) -> Iterator[bytes]:
    """The first ``size`` bytes of an open file, some at a time; EOFError if it is shorter."""
    for offset in range(0, size, _COPY_BYTES):
        block = read_at(fd, min(_COPY_BYTES, size - offset), offset)
        if len(block) < min(_COPY_BYTES, size - offset):
            raise EOFError(f"the file ends at byte {offset + len(block)}")
        yield block


def replace(path: str, blocks: Iterable[bytes]) -> None:
    """Put a new file in the place of ``path``: after power loss the old one or the new one."""
    name = _written(path, blocks)
    try:
        os.rename(name, path)
    except OSError:
        unlink(name)
        raise


def replaced(path: str, blocks: Iterable[bytes]) -> int:
    """As `replace`; the new file, open for appending. What fails leaves the old one in place."""
    name = _written(path, blocks)
    fd = -1
    try:
        fd = open_for_append(name)
        os.rename(name, path)
    except BaseException:
        if fd >= 0:
            _close_after_reading(fd)
        with suppress(OSError):
            unlink(name)
        raise
    return fd


def _written(path: str, blocks: Iterable[bytes]) -> str:
    """A new file beside ``path``, on the disk itself."""
    name = temporary(path)
    with created(name) as fd:
        offset = 0
        for block in blocks:
            write_at(fd, block, offset)
            offset += len(block)
        os.fsync(fd)  # or the rename could survive without the bytes
    return name


def sync_whole(path: str) -> None:
    """Bring a file, or a directory and the files in it, to the disk itself."""
    found = _files_of(path)
    for name in found:
        sync(name)
    if path not in found:
        sync(path)


def sync(path: str) -> None:
    """Bring a file, or the names in a directory, to the disk itself."""
    is_names = is_directory(path)
    if is_names:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    else:
        fd = _open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # SMB and others sync no directories: names are there when their server says so.
        if error.errno != errno.EINVAL or not is_names:
            _name(error, path)
            raise
    finally:
        _close_after_reading(fd)


def sync_open(fd: int) -> None:
    os.fsync(fd)


class WriterLock:
    """The one writer of a store: a lock on ``path`` that dies with its process.

    The file says who holds it. It is removed only by who holds it, and replaced only by who holds
    its successor as well; whoever has locked a file looks afterwards whether that still has the
    name, and else tries the one that has it now.

    A file with other names is that of another store too: of a copy by hard links. It is not written
    to but replaced by one of our own, so that the two stores do not lock each other.

    LockedError where another writer holds it, NoLocksError where the file system has no locks,
    CorruptError where ``path`` is no file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptors: list[int] = []  # the one that is locked
        self._identity = _NO_FILE  # of the file
        weakref.finalize(self, _let_go, self._descriptors).atexit = False
        _locks.add(self)
        try:
            self.hold()
        except BaseException:
            self.release()
            raise

    def hold(self) -> None:
        """See that ``path`` still is the file that we hold, and ours alone; one ``stat`` if so.

        Where it was removed or replaced the lock is taken anew, where it has got another name the
        file is made our own. LockedError where another writer has got in: then it is lost, and the
        next call tries again.
        """
        with naming(self._path):
            for _ in range(_MAX_CHANGES):
                names = num_names(self._path, self._identity)
                if names == 1:
                    return
                self._take(self._replaced() if names else self._acquired())
            raise locked(self._path)

    def release(self) -> None:
        """Let it go. To do so again does nothing."""
        _let_go(self._descriptors)

    def remove(self) -> None:
        """Let it go, and its file with it; while it is locked, so that it is nobody else's."""
        try:
            if num_names(self._path, self._identity):
                unlink(self._path)
        finally:
            self.release()

    def forget(self) -> None:
        """In a forked child: close what the parent has locked, which stays locked."""
        while self._descriptors:
            fd = self._descriptors.pop()
            _held.pop(fd, None)
            _close_after_reading(fd)

    def _take(self, fd: int) -> None:
        """Go on with what is locked now, and let the former go."""
        former = self._descriptors.copy()
        self._descriptors[:] = [fd]
        self._identity = _held[fd] = identity(fd)
        _let_go(former)

    def _acquired(self) -> int:
        """The file of the name, locked."""
        deadline = time.monotonic() + _PATIENCE_S
        sleep_s = 0.001
        while True:
            fd = _open(self._path, os.O_CREAT | os.O_RDWR)
            is_kept = False
            try:
                if _lock(fd, self._path):
                    if num_names(self._path, identity(fd)) == 1:
                        _say_who(fd)
                    is_kept = True
                    return fd
                # A writer stays; not so whoever looks by locking it, and the writer of a store that
                # shares the file with us will have one of its own.
                is_final = _is_marked(fd) is True and os.fstat(fd).st_nlink == 1
            finally:
                if not is_kept:
                    _close_after_reading(fd)
            if is_final or time.monotonic() > deadline:
                raise locked(self._path)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, 0.05)

    def _replaced(self) -> int:
        """A new file in the place of ours, locked too."""
        name = temporary(self._path)
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            if not _lock(fd, self._path):
                raise OSError(errno.EAGAIN, "a new file is locked by another", name)
            _say_who(fd)
            os.rename(name, self._path)
        except BaseException:
            _close_after_reading(fd)
            with suppress(OSError):
                unlink(name)
            raise
        return fd


_locks: weakref.WeakSet[WriterLock] = weakref.WeakSet()
_held: dict[int, Identity] = {}  # the files that this process has locked, by descriptor


def _forget_locks() -> None:
    for lock in list(_locks):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _lock(fd: int, path: str) -> bool:
    """Lock an open file as its writer; False where somebody else has done so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            raise _no_locks(path, error) from error
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    with suppress(OSError):  # then it is a lock all the same
        _mark(fd, fcntl.F_WRLCK)
    return True


def _let_go(descriptors: list[int]) -> None:
    """Unlock and close; a child that was forked meanwhile may have them open still."""
    while descriptors:
        fd = descriptors.pop()
        _held.pop(fd, None)
        with suppress(OSError):
            _mark(fd, fcntl.F_UNLCK)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        _close_after_reading(fd)


def _say_who(fd: int) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    write_at(fd, text, 0)
    truncate(fd, len(text))


# Locks of `flock` can be asked about only by trying to take them: a writer that comes at that
# moment is refused. ``/proc/locks`` shows none of another container's, and names files by devices
# that are not those of `stat` on some file systems. So a writer puts a lock of another kind on a
# byte far behind the text as well, for no other purpose: such a lock can be asked about. It belongs
# to the open file as that of `flock` does.
_MARKED_BYTE = 1 << 30
_FLOCK = "hhqqi4x"  # struct flock where it has 64-bit offsets: type, whence, start, length, pid


def _mark(fd: int, kind: int) -> None:
    if hasattr(fcntl, "F_OFD_SETLK"):
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, _MARKED_BYTE, 1, 0)
        )


def _is_marked(fd: int) -> bool | None:
    """Whether a writer has put its mark on an open file; None where the system has no marks."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return None
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _MARKED_BYTE, 1, 0)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a kernel that knows none
            return None
        raise
    kind: int = struct.unpack(_FLOCK, found)[0]
    return kind != fcntl.F_UNLCK


def is_locked(path: str) -> bool:
    """Whether somebody holds the lock on ``path`` now; asked without writing to it.

    Nor is it locked to find out, but for a moment where the system has no marks: a writer that
    comes then tries again. OSError where the file system cannot tell, CorruptError for what is no
    file.
    """
    with opened(path) as fd:
        is_marked = _is_marked(fd)
        if is_marked is not None:
            return is_marked
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def last_holder(path: str) -> tuple[int, str] | None:
    """Process id and host of who took the lock on ``path`` last; None if it does not say."""
    try:
        with opened(path) as fd:
            holder = json.loads(read_at(fd, _MAX_HOLDER_BYTES, 0))
        return int(holder["pid"]), str(holder["host"])
    except (CorruptError, OSError, *BAD_JSON):
        return None


def is_running(pid: int, host: str) -> bool | None:
    """Whether a process is there; None for one on another host."""
    if host != socket.gethostname():
        return None
    if pid <= 0:  # would ask about others than one process
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _no_locks(path: str, error: OSError) -> NoLocksError:
    directory = os.path.dirname(path)
    kind = file_system_of(directory) or "one"
    return NoLocksError(
        f"{directory}: expected a file system that locks files, got {kind} that does not "
        f"({error.strerror}). Keep it on a local disk, or have it mounted with locks (Lustre: -o "
        f"flock; NFS: version 4, or its lock daemon). Without them it can be read, by ReplayReader "
        f"or load_checkpoint, and a checkpoint can be saved to a new path."
    )


def locked(path: str) -> LockedError:
    """The error that says who holds the lock on ``path``."""
    pid, host = last_holder(path) or (None, None)
    who = f"process {pid} on {host} holds the store"
    if pid is None:
        who = "a process that has not yet said its name holds the store"
    remedy = "Close that buffer, or read the store with ReplayReader."
    with suppress(OSError):
        status = os.lstat(path)
        if status.st_nlink > 1:
            remedy = (
                f"Or another one: {os.path.basename(path)} has more than one name, as in a copy by "
                f"hard links; then its next add or flush sets this one free. {remedy}"
            )
        elif Identity(status.st_dev, status.st_ino) in list(_held.values()):
            who += ": this very process, by a buffer that is still open"
            remedy = (
                "Call that buffer's close() first, or make it in a with block: a notebook's cell "
                "that is run again makes a second one while the first is there. One that has no "
                "name any more may be kept by the last error's traceback."
            )
    return LockedError(
        f"{os.path.dirname(path)}: expected no other writer, but {who}. {remedy}",
        pid=pid,
        host=host,
    )
