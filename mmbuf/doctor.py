"""Doctor: whether the machine gives what a store needs, and what to do where it does not.

What a store needs is counted for all of its trajectories, as a `ReplayReader` has them in its
window. Nothing here makes rows wrong or loses them: what cannot be mapped is copied or read.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata

from mmbuf import checkpoint, files, storage, vm
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError, MmbufError
from mmbuf.locations import location
from mmbuf.salvage import salvage
from mmbuf.writer import MAX_PENDING_BYTES

_LOW_DISK_BYTES = 1 << 30
_LARGEST_PAGE = 16 << 10  # the columns of our files begin on multiples of it
_NUM_FILES = 64  # open at once at most, however many trajectories there are
_PACKAGES = ("mmbuf", "numpy", "pyarrow", "torch")
_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs"),
    *("fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb2", "smb3", "smbfs"),
}


@dataclass(frozen=True)
class Remark:
    """``value`` is what was found, ``needed`` what would do; None where there is no limit.

    ``remedy`` is empty where all is fine.
    """

    name: str
    value: int | str | None
    needed: int | None
    is_fine: bool
    remedy: str


@dataclass(frozen=True)
class _Needs:
    """Of all trajectories of a store: columns to be mapped, bytes of all rows, bytes copied."""

    num_maps: int = 0
    size_bytes: int = 0
    copied_bytes: int = 0


def examine(path: str | os.PathLike[str] | None = None) -> list[Remark]:
    """What there is to say of the machine, and of the store or checkpoint at ``path``.

    Reads the index and no data file; takes no lock and writes nothing. FileNotFoundError where
    there is no such directory.
    """
    remarks = []
    needs = _Needs()
    if path is not None:
        directory = location("path", path)
        if not files.is_directory(directory):
            raise files.no_store(directory)
        remarks += [_free_disk(directory), _file_system(directory)]
        try:
            needs = _needs_of(directory)
        except MmbufError as error:
            remarks.append(_remark("index", str(error), None, "Run: mmbuf verify " + directory))
    remarks += [_page_size(), _huge_pages(), _maps(needs), _open_files(), _addresses(needs)]
    remarks.append(_data(needs))
    if path is not None:
        remarks += [_lock(directory), _temporaries(directory), _wrong_files(directory)]
    return [*remarks, *_versions()]


def _remark(name: str, value: int | str | None, needed: int | None, remedy: str = "") -> Remark:
    return Remark(name, value, needed, not remedy, remedy)


def _needs_of(directory: str) -> _Needs:
    found = salvage(directory)
    if found.schema is None:
        return _Needs()
    num_maps = size_bytes = copied_bytes = 0
    for entry in found.entries:
        can_map = entry.format in storage.FORMATS and storage.FORMATS[entry.format].CAN_MAP
        schema = entry.schema or found.schema
        for column, part in zip(schema.columns, entry.parts, strict=False):
            size = part.rows * column.row_bytes
            is_mapped = can_map and not column.is_text and size >= vm.MAP_THRESHOLD
            num_maps += is_mapped
            size_bytes += size
            copied_bytes += 0 if is_mapped else size
    return _Needs(num_maps, size_bytes, copied_bytes)


def _free_disk(directory: str) -> Remark:
    free = files.free_bytes(directory)
    remedy = "Free some space, or bound the store: max_disk_bytes."
    return _remark(
        "free disk bytes", free, _LOW_DISK_BYTES, remedy if free < _LOW_DISK_BYTES else ""
    )


def _file_system(directory: str) -> Remark:
    kind = files.file_system_of(directory)
    remedy = "Files over a network are better read than mapped: enable_cache=False."
    return _remark("file system", kind, None, remedy if kind in _NETWORK else "")


def _page_size() -> Remark:
    remedy = "Columns begin on smaller pages: they are copied, not mapped. Use a kernel of 4 KiB."
    is_large = vm.PAGE > _LARGEST_PAGE
    return _remark("page bytes", vm.PAGE, None, remedy if is_large else "")


def _huge_pages() -> Remark:
    found = vm.huge_pages_setting()
    remedy = "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return _remark("huge pages", found, None, remedy if found == "never" else "")


def _maps(needs: _Needs) -> Remark:
    limit = vm.max_map_count()
    needed = int(needs.num_maps / vm.MAPS_SHARE) + 1 if needs.num_maps else 0
    remedy = (
        f"As root: sysctl -w vm.max_map_count={needed}. "
        f"Until then columns are copied or read that could be mapped."
    )
    return _remark("vm.max_map_count", limit, needed, remedy if limit < needed else "")


def _open_files() -> Remark:
    limit = vm.open_files_limit()
    is_short = limit is not None and limit < _NUM_FILES
    remedy = f"ulimit -n {_NUM_FILES}, or more."
    return _remark("open files", limit, _NUM_FILES, remedy if is_short else "")


def _addresses(needs: _Needs) -> Remark:
    left = vm.address_space_left()
    needed = 2 * needs.size_bytes  # half of what is left is reserved
    is_short = left is not None and left < needed
    remedy = "ulimit -v unlimited, or a smaller sample_window_size."
    return _remark("address bytes left", left, needed, remedy if is_short else "")


def _data(needs: _Needs) -> Remark:
    limit = vm.data_limit()
    needed = needs.copied_bytes + MAX_PENDING_BYTES
    is_short = limit is not None and limit < needed
    remedy = "ulimit -d unlimited, or smaller max_pending_bytes and sample_window_size."
    return _remark("data bytes", limit, needed, remedy if is_short else "")


def _lock(directory: str) -> Remark:
    path = files.join(directory, files.WRITER_LOCK)
    if not files.exists(path):
        return _remark("writer", "none", None)
    holder = files.last_holder(path)
    who = "unknown" if holder is None else f"process {holder[0]} on {holder[1]}"
    is_running = None if holder is None else files.is_running(*holder)
    try:
        is_held = files.is_locked(path)
    except CorruptError as error:
        return _remark("writer", str(error), None, f"Remove {path}.")
    except OSError:  # a file system without locks: what the file says is all there is
        remedy = f"If it has ended there, remove {path}."
        return _remark("writer", who, None, "" if is_running else remedy)
    if not is_held:
        return _remark("writer", f"none; the last one was {who}", None)
    remedy = f"It has ended, but holds the lock: end the children that it left, see: fuser {path}"
    return _remark("writer", who, None, remedy if is_running is False else "")


def _temporaries(directory: str) -> Remark:
    found = len(files.temporaries_in(directory))
    path = files.join(directory, files.WRITER_LOCK)
    try:
        is_written = files.exists(path) and files.is_locked(path)
    except (CorruptError, OSError):
        is_written = False
    remedy = "Left by a process that has ended; the next writer that opens the store removes them."
    return _remark("temporaries", found, 0, remedy if found and not is_written else "")


def _wrong_files(directory: str) -> Remark:
    """How many files are missing, or of another length than the index says; none is opened."""
    try:
        rlinf = checkpoint.read_rlinf(directory, [])
        listed = salvage(directory).entries if rlinf is None else list(rlinf.entries.values())
    except MmbufError as error:
        return _remark("files of the wrong length", str(error), None)
    suspects = [entry for entry in listed if not _has_its_length(directory, entry)]
    if suspects and rlinf is None:  # what its writer has removed since is not missing
        still = {entry.uuid for entry in salvage(directory).entries}
        suspects = [entry for entry in suspects if entry.uuid in still]
    wrong = [entry.file for entry in suspects]
    remedy = f"{wrong[0]} is one of them. Run: mmbuf verify {directory}" if wrong else ""
    return _remark("files of the wrong length", len(wrong), 0, remedy)


def _has_its_length(directory: str, entry: Entry) -> bool:
    if entry.format not in storage.FORMATS:
        return True  # of a newer mmbuf
    path = files.join(directory, entry.file)
    try:
        return storage.size_of(path, entry) == entry.size_bytes
    except (CorruptError, FileNotFoundError):
        return False


def _versions() -> list[Remark]:
    remarks = [_remark("python", ".".join(map(str, sys.version_info[:3])), None)]
    for name in _PACKAGES:
        try:
            remarks.append(_remark(name, metadata.version(name), None))
        except metadata.PackageNotFoundError:  # run from where it lies
            continue
    return remarks
