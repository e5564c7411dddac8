"""Address ranges: virtual memory that is reserved, filled, mapped to files and given back.

The only ctypes. An `AddressRange` is reserved once (``PROT_NONE``, which costs nothing) and never
moves; pages behind parts of it change. Arrays over it stay valid Python objects for ever, but
touching a part that is not filled or mapped kills the process: only `lane` and `cache` hold them.

A *mapping* costs the kernel a VMA, and Linux allows 65,530 of them per process. `MAPS` counts all
mappings of this process against a share of that number.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20

_IS_LINUX = sys.platform.startswith("linux")
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20 if _IS_LINUX else 0x1000
_MAP_NORESERVE = 0x4000 if _IS_LINUX else 0x40
_MADV_RANDOM = 1
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if _IS_LINUX:
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]

# Below this a mapping's VMA, its faults and its page-by-page look-ups cost more than a copy: with
# columns of 51 kB copied, a batch of 256 rows takes 1.2x the time that it takes from one contiguous
# array, with them mapped 1.4x.
MAP_THRESHOLD = 64 << 10

CAN_REWIRE = _IS_LINUX  # Elsewhere there is no mremap: a slot keeps its anonymous pages.


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _failed() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _mmap(address: int | None, size: int, prot: int, flags: int, fd: int, offset: int) -> int:
    got: int | None = _libc.mmap(address, size, prot, flags, fd, offset)
    if got is None or got == _FAILED:
        raise _failed()
    return got


def _munmap(address: int, size: int) -> None:
    if _libc.munmap(address, size):
        raise _failed()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in a block that makes many objects that stay.

    Each would look at all of them again: a third of the time that it takes to open 50,000
    trajectories.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Pages(NamedTuple):
    address: int
    size_bytes: int
    key: int = 0  # of none


class _Mapping(weakref.ref[Any]):
    """Pages that are given back when their owner is gone."""

    __slots__ = ("address", "key", "size_bytes")
    address: int
    size_bytes: int
    key: int  # in `_mappings`


# What is to be given back: its owner is gone, or the system refused to take it.
_unheld: deque[_Pages | _Mapping] = deque()
# Of what has an owner: what notes its end, and what is called then, by the id of the first.
_mappings: dict[int, tuple[_Mapping, weakref.ref[Any]]] = {}


def _unmap(address: int, size: int) -> None:
    """`_munmap` where nobody could do anything about a failure; it is tried again with the next."""
    _unheld.append(_Pages(address, size))
    _give_back_unheld()


def _give_back_unheld(_: object = None) -> None:
    for _ in range(len(_unheld)):
        # Neither a signal handler nor another thread comes before the call, which is of C code.
        if not _unheld:
            return
        pages = _unheld[0]
        del _unheld[0]
        if pages.key in _mappings:
            del _mappings[pages.key]
        is_refused = _libc.munmap(pages.address, pages.size_bytes)
        if is_refused:
            _unheld.append(pages)


def _own(owner: object, address: int, size_bytes: int) -> int:
    """Have the pages be given back when ``owner`` is gone. Not for where signal handlers run.

    Their key in ``_mappings``: who takes them out of it gives them back himself.

    An object may die in the main thread, and a signal handler interrupt what Python calls then. So
    first C code notes what is left; whoever comes next finds it.
    """
    # The callbacks of an object are called in the order from the newest to the oldest.
    then = weakref.ref(owner, _give_back_unheld)
    mapping = _Mapping(owner, _unheld.append)
    mapping.address, mapping.size_bytes, mapping.key = address, size_bytes, id(mapping)
    _mappings[mapping.key] = (mapping, then)
    return mapping.key


def _advise(address: int, size: int, advice: int) -> None:
    """``madvise`` where the kernel knows it: speed only, so a refusal is no error."""
    if _IS_LINUX:
        _libc.madvise(address, size, advice)


def _reserve(size: int, alignment: int) -> int:
    """Address of ``size`` reserved bytes on ``alignment``."""
    flags = mmap.MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    address = _mmap(None, size + alignment, _PROT_NONE, flags, -1, 0)
    start, stop = round_up(address, alignment), address + size + alignment
    try:
        if start > address:
            _munmap(address, start - address)
            address = start
        if stop > start + size:
            _munmap(start + size, stop - start - size)
    except OSError:
        _munmap(address, stop - address)
        raise
    return start


class MapBudget:
    """How many mappings of files this process may still make. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()  # guards used

    def take(self, count: int) -> bool:
        """Take ``count`` mappings; False, and none taken, if so many are not left."""
        with self._lock:
            if self.used + count > self.limit:
                return False
            self.used += count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self.used -= count

    @property
    def is_short(self) -> bool:
        """Whether more than half of the budget is used."""
        return 2 * self.used > self.limit

    def renew_lock(self) -> None:
        """Make the lock anew, in a forked child."""
        self._lock = threading.Lock()


class MapShare:
    """The mappings of one owner: what it still has is given back to `MAPS` when it is gone.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._used = [0]
        weakref.finalize(self, _give_back_maps, self._used).atexit = False

    def take(self, count: int) -> bool:
        """As `MapBudget.take`."""
        if not MAPS.take(count):
            return False
        self._used[0] += count
        return True

    def give_back(self, count: int) -> None:
        self._used[0] -= count
        MAPS.give_back(count)


def _give_back_maps(used: list[int]) -> None:
    MAPS.give_back(used[0])
    used[0] = 0


def max_map_count() -> int:
    """How many VMAs the kernel allows a process."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65_530


# A mapping may cost three VMAs (itself, and the anonymous pages on both sides of it), and torch,
# allocators and threads need some as well; so the budget is 30 % of the limit, and what evicts can
# never fail for want of one.
MAPS_SHARE = 0.3
MAPS = MapBudget(int(MAPS_SHARE * max_map_count()))


class AddressRange:
    """``size_bytes`` of reserved addresses, on a huge-page boundary.

    ``commit``, ``populate``, ``map_file``, ``rewire`` and ``release`` take byte offsets into the
    range that are multiples of `PAGE`. They raise OSError. Not thread-safe for overlapping parts;
    gathers may go on in all others, and in a part that is rewired.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(size_bytes, HUGE_PAGE)
        self.address = _reserve(self.size_bytes, HUGE_PAGE)
        self._key = _own(self, self.address, self.size_bytes)

    def array(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """All rows ``[rows, *row_shape]`` that the range has room for; a view."""
        row_bytes = dtype.itemsize
        for size in row_shape:
            row_bytes *= size
        rows = self.size_bytes // row_bytes
        memory: Any = (ctypes.c_char * (rows * row_bytes)).from_address(self.address)
        memory.owner = self  # the addresses live at least as long as an array over them
        array: np.ndarray[Any, Any] = np.frombuffer(memory, dtype)
        return array.reshape(rows, *row_shape)

    def commit(self, start: int, stop: int, *, is_whole: bool = True) -> None:
        """Make anonymous pages of ``[start, stop)``; they are zero until written.

        Whole huge pages are asked for where ``start`` is on such a boundary, unless only parts will
        be written (``is_whole`` False): each of them would cost a huge page. Pages that are
        committed already keep what they hold.
        """
        address, size = self.address + start, stop - start
        if _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _failed()
        if is_whole and start % HUGE_PAGE == 0 and size >= HUGE_PAGE:
            _advise(address, size, _MADV_HUGEPAGE)

    def populate(self, start: int, stop: int) -> None:
        """Have the pages of a committed ``[start, stop)`` ready; one call for many faults.

        Whole huge pages are asked for as in `commit`.
        """
        if start % HUGE_PAGE == 0 and stop - start >= HUGE_PAGE:
            _advise(self.address + start, stop - start, _MADV_HUGEPAGE)
        _advise(self.address + start, stop - start, _MADV_POPULATE_WRITE)

    def discard(self, start: int, stop: int) -> None:
        """Give the memory of committed pages back, which may be read again and are zero then.

        Costs no mapping, unlike `release` of pages between others.
        """
        if start < stop:
            _advise(self.address + start, stop - start, _MADV_DONTNEED)

    def map_file(self, start: int, stop: int, fd: int, offset: int) -> None:
        """Map a file's bytes from ``offset`` over ``[start, stop)``, which holds no rows yet.

        Shared and read-only. The mapping may go beyond the end of the file; what lies there must
        not be touched.
        """
        address, size = self.address + start, stop - start
        _mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        _advise(address, size, _MADV_RANDOM)

    def rewire(self, start: int, stop: int, fd: int, offset: int, filled_bytes: int) -> None:
        """Put a file's pages in the place of ``[start, stop)``, whose bytes they equal.

        Gathers may read meanwhile. The file is mapped elsewhere first and then moved, since a
        failed ``mmap`` with ``MAP_FIXED`` may already have dropped the old pages. The first
        ``filled_bytes`` are populated before they are moved, so that no gather pays for it.
        """
        size = stop - start
        # Equal alignment on both sides lets the kernel move whole page tables.
        scratch = _reserve(size, HUGE_PAGE if size >= HUGE_PAGE else PAGE)
        try:
            _mmap(scratch, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
            _advise(scratch, filled_bytes, _MADV_POPULATE_READ)
            _advise(scratch, size, _MADV_RANDOM)
            flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
            moved = _libc.mremap(scratch, size, size, flags, self.address + start)
            if moved is None or moved == _FAILED:
                raise _failed()
        except OSError:
            _unmap(scratch, size)
            raise

    def release(self, start: int, stop: int) -> None:
        """Give the pages of ``[start, stop)`` back, whatever they are; only addresses remain."""
        flags = mmap.MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(self.address + start, stop - start, _PROT_NONE, flags, -1, 0)

    def close(self) -> None:
        """Give the addresses back too. No array over the range may be touched any more.

        What the system refuses to take back is tried again when the next is closed.
        """
        key, self._key = self._key, 0
        if _mappings.pop(key, None) is not None:
            _unmap(self.address, self.size_bytes)


def map_privately(fd: int, size_bytes: int) -> np.ndarray[Any, Any]:
    """A whole file as writable ``uint8 [size_bytes]``: writes go to private copies of its pages.

    The mapping dies with the last array that looks into it.
    """
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, size_bytes, prot, mmap.MAP_PRIVATE, fd, 0)
    memory: Any = (ctypes.c_char * size_bytes).from_address(address)
    _own(memory, address, size_bytes)
    return np.frombuffer(memory, np.uint8)


class Block:
    """Anonymous memory, in whole huge pages; it is given back when nobody has the block any more.

    Also where whoever had it was interrupted before he could do anything with it.
    """

    __slots__ = ("__weakref__", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes

    def memory(self, size_bytes: int) -> Any:
        """Its first bytes, for ``numpy.frombuffer``; they hold the block."""
        memory: Any = (ctypes.c_char * size_bytes).from_address(self.address)
        memory.owner = self
        return memory


def new_block(size_bytes: int) -> Block:
    """A block of at least so many bytes, of zeros. Not for where signal handlers run."""
    _give_back_unheld()
    size = round_up(size_bytes, HUGE_PAGE)
    address = _reserve(size, HUGE_PAGE)
    if _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE):
        failure = _failed()
        _unmap(address, size)
        raise failure
    _advise(address, size, _MADV_HUGEPAGE)
    block = Block(address, size)
    _own(block, address, size)
    return block


def address_space_left() -> int | None:
    """Bytes of addresses that ``RLIMIT_AS`` leaves to this process; None for no limit."""
    return _left(resource.RLIMIT_AS, 0)


def memory_left() -> int | None:
    """Bytes of private memory that ``RLIMIT_DATA`` leaves to this process; None for no limit."""
    return _left(resource.RLIMIT_DATA, 5)


def _left(kind: int, field: int) -> int | None:
    limit = _soft_limit(kind)
    if limit is None:
        return None
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[field]) * PAGE
    except OSError:
        used = 0
    return max(0, limit - used)


def free_bytes() -> int | None:
    """Memory that the system can give without taking it from others; None where it is unknown."""
    try:
        with open("/proc/meminfo") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return None


def huge_pages_setting() -> str | None:
    """When the kernel gives huge pages: always, madvise or never; None where it does not say."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            found = file.read()
    except OSError:
        return None
    _, _, chosen = found.partition("[")
    return chosen.partition("]")[0] or None


def data_limit() -> int | None:
    """``RLIMIT_DATA`` in bytes; None for no limit."""
    return _soft_limit(resource.RLIMIT_DATA)


def open_files_limit() -> int | None:
    """``RLIMIT_NOFILE``; None for no limit."""
    return _soft_limit(resource.RLIMIT_NOFILE)


def _soft_limit(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def is_out_of_memory(error: OSError) -> bool:
    """Whether ``error`` says that addresses, mappings or memory have run out."""
    return error.errno in (errno.ENOMEM, errno.EAGAIN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=MAPS.renew_lock)
