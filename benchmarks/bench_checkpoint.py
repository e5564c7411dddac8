"""What a checkpoint costs: to save, to save again, to go on from.

Cases and their bars:

save     a window of 10 GB ([50, 4] image trajectories of 19.7 MB) that is on the disk already: no
         save to a new path takes 1 s, and no save writes data anew; saved again to the same path
         after one more add; beside `torch.save`
load     `load_checkpoint` of the same window into a fresh buffer in memory, and its first ten
         batches, with the files in the page cache and without; they equal the ten that came without
         a resume; beside `torch.load`
formats  100 state trajectories of [50, 8], saved from memory and loaded, in each format; the files
         are in the page cache

A checkpoint is on the disk itself when it is saved; of the others, those that say "synced".
`torch.save` writes one file per trajectory, as RLinf does. A part of 1 GB is timed several times,
and scaled; all of the window is timed once, where disk and memory have room. torch is always there:
`--peers` changes nothing. Only `formats` is interleaved: what the others do to the disk and to the
page cache would be charged to whoever comes next.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
import timing
import torch
from timing import Bar, Case, Contender, Row, clock

from mmbuf import TrajectoryReplayBuffer

CASES = ("save", "load", "formats")
FORMATS = ("arrow", "npy", "pt", "pkl")
SHAPE = (50, 4)
NUM_ROWS = SHAPE[0] * SHAPE[1]
NUM_BATCHES = 10


class Store:
    """A live store, synced; its window is full of image trajectories with their own row numbers."""

    def __init__(self, directory: Path, *, is_tiny: bool) -> None:
        self.directory = directory
        self.data = peers.make_data(NUM_ROWS, has_images=True)
        (self._trajectory,) = peers.trajectories_of(self.data, *SHAPE)
        trajectory_bytes = sum(array.nbytes for array in self.data.values())
        self.num_trajectories = (40_000_000 if is_tiny else 10_000_000_000) // trajectory_bytes + 1
        self.size_bytes = self.num_trajectories * trajectory_bytes
        # What is timed several times by torch.
        self.num_part = 2 if is_tiny else round(1e9 / trajectory_bytes)
        self.part_bytes = self.num_part * trajectory_bytes
        self.buffer = TrajectoryReplayBuffer(
            seed=1,
            sample_window_size=self.num_trajectories,
            auto_save=True,
            auto_save_path=str(directory),
        )
        self._num_added = 0
        for _ in range(self.num_trajectories):
            self.add()
        self.buffer.flush(sync=True)

    def numbered(self, position: int) -> dict[str, Any]:
        """What was added at `position`; always the same tensors, with other row numbers."""
        first = position * NUM_ROWS
        self.data[peers.ROW_NUMBER][:, 0] = np.arange(first, first + NUM_ROWS)
        return self._trajectory

    def add(self) -> None:
        self.buffer.add_trajectories([self.numbered(self._num_added)])
        self._num_added += 1

    def check(self, batch: dict[str, Any]) -> None:
        """Check that a batch has rows of the window."""
        rows = {path: tensor.numpy() for path, tensor in peers.unnest(batch).items()}
        position, number = np.divmod(rows[peers.ROW_NUMBER], NUM_ROWS)
        if not self._num_added - self.num_trajectories <= position.min() < self._num_added:
            raise timing.UnequalError(f"mmbuf: a row of trajectory {position.min():.0f}")
        self.numbered(0)
        peers.check_batch("mmbuf", rows | {peers.ROW_NUMBER: number}, self.data, is_partial=False)

    def title(self) -> str:
        return (
            f"a window of {self.size_bytes / 1e9:.2f} GB, {self.num_trajectories} image"
            f" trajectories of {list(SHAPE)}"
        )


def seconds(call: Callable[..., object], *arguments: Any, **options: Any) -> float:
    start = clock()
    call(*arguments, **options)
    return clock() - start


def sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def link(source: Path, target: Path, *, is_each_synced: bool = False) -> None:
    """The least that a save can do: a new name for each file, and the names on the disk."""
    target.mkdir()
    for path in source.glob("trajectory_*"):
        os.link(path, target / path.name)
        if is_each_synced:
            sync(target / path.name)
    sync(target)


def write_plain(target: Path, num_files: int, content: bytes) -> None:
    """As many bytes in as many files, synced."""
    target.mkdir()
    for i in range(num_files):
        path = target / str(i)
        path.write_bytes(content)
        sync(path)
    sync(target)


def torch_save(store: Store, target: Path, num_trajectories: int, *, is_synced: bool) -> None:
    target.mkdir()
    for position in range(num_trajectories):
        path = target / f"trajectory_{position}.pt"
        torch.save(store.numbered(position), path)
        if is_synced:
            sync(path)
    if is_synced:
        sync(target)


def torch_load(source: Path) -> list[dict[str, Any]]:
    """All trajectories, in memory."""
    return [torch.load(source / f"trajectory_{i}.pt") for i in range(len(os.listdir(source)))]


def bytes_written() -> int:
    """Bytes that the process has given to the disk so far; 0 where nobody counts them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    return 0


def bytes_anew(checkpoint: Path, store: Path) -> int:
    """Disk space of the trajectory files in `checkpoint` that are not the store's own files."""
    known = {path.stat().st_ino for path in store.iterdir()}
    stats = [path.stat() for path in checkpoint.glob("trajectory_*.arrow")]
    return sum(stat.st_blocks * 512 for stat in stats if stat.st_ino not in known)


def bytes_on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def drop_from_page_cache(directory: Path) -> None:
    """What is on the disk itself and mapped by nobody goes; elsewhere than on Linux all stays."""
    if hasattr(os, "posix_fadvise"):
        for path in directory.glob("trajectory_*"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def share_in_page_cache(directory: Path) -> float:
    """How much of the disk space of the trajectories is in the page cache, of 1."""
    mincore = ctypes.CDLL(None).mincore
    num_cached = num_bytes = 0
    for path in directory.glob("trajectory_*"):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        ):
            pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(memory, np.uint8).ctypes.data
            mincore(
                ctypes.c_void_p(address),
                ctypes.c_size_t(len(memory)),
                ctypes.c_void_p(pages.ctypes.data),
            )
            num_cached += int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
            num_bytes += os.fstat(file.fileno()).st_blocks * 512
    return min(1.0, num_cached / num_bytes)


def has_room(directory: Path, disk_bytes: int, memory_bytes: int = 0) -> bool:
    """Whether so much more would leave half of the free disk and a third of the free memory."""
    available = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return shutil.disk_usage(directory).free > 2 * disk_bytes and available > 1.5 * memory_bytes


def check_same(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that two nested dicts hold equal tensors."""
    columns, wanted = peers.unnest(found), peers.unnest(expected)
    if columns.keys() != wanted.keys():
        raise timing.UnequalError(f"{name}: columns {sorted(columns)}, expected {sorted(wanted)}")
    for path, tensor in columns.items():
        if tensor.dtype != wanted[path].dtype or not torch.equal(tensor, wanted[path]):
            raise timing.UnequalError(f"{name}: column {'.'.join(path)} differs")


def rows_of_part(times: dict[str, list[float]], store: Store) -> list[Row]:
    """Rows of what was done with a part, with a note of what that means for the window."""
    rows = timing.rows_of(times)
    for row in rows:
        per_byte = row.median / store.part_bytes
        whole = per_byte * store.size_bytes
        row.note = f"{per_byte * 1e9:.2f} s/GB; scaled to the window {whole:.1f} s"
    return rows


def row_of_all(name: str, taken: float, store: Store) -> Row:
    return Row(name, taken, taken, taken, 1, f"{taken / store.size_bytes * 1e9:.2f} s/GB")


def save_window(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Saving a window whose files can be linked, and what `torch.save` takes for the same rows."""
    store = Store(directory / "store", is_tiny=is_tiny)
    buffer = store.buffer
    links, synced_links = "hard links, names synced", "hard links, each file synced too"
    new = "save to a new path"
    again, unwritten = "save again, one more added", "save again, one more not written yet"
    times: dict[str, list[float]] = {
        key: [] for key in (links, synced_links, new, again, unwritten)
    }
    written: dict[str, list[int]] = {key: [] for key in times}
    num_anew = 0
    with timing.frozen_gc():
        for i in range(2 if is_tiny else 7):
            checkpoint = directory / f"checkpoint{i}"
            for key in (new, again, unwritten):
                before = bytes_written()
                times[key].append(seconds(buffer.save_checkpoint, checkpoint))
                written[key].append(bytes_written() - before)
                num_anew += bytes_anew(checkpoint, store.directory)
                if key != unwritten:
                    store.add()
                if key != again:
                    buffer.flush(sync=True)
            for key in (links, synced_links):
                target = directory / f"{key}{i}"
                is_each_synced = key != links
                times[key].append(seconds(link, checkpoint, target, is_each_synced=is_each_synced))
    snapshots = sum(path.stat().st_size for path in checkpoint.glob("*.json"))
    with contextlib.closing(peers.MmbufResumed(checkpoint)) as resumed:
        store.check(resumed.sample())
    buffer.close()
    rows = timing.rows_of(times)
    for row in rows[2:]:
        row.note = f"writes {statistics.median(written[row.name]) / 1e6:.2f} MB"
    rows[2].note += f"; the first of them took {times[new][0] * 1e3:.0f} ms"
    slowest = max(times[new])

    target = directory / "torch"
    unsynced = f"torch.save of {store.part_bytes / 1e9:.2f} GB"
    times = {unsynced: [], f"{unsynced}, synced": []}
    with timing.frozen_gc():
        for _ in range(2 if is_tiny else 3):
            for key, taken in times.items():
                os.sync()
                is_synced = key != unsynced
                taken.append(
                    seconds(torch_save, store, target, store.num_part, is_synced=is_synced)
                )
                shutil.rmtree(target)
        rows += rows_of_part(times, store)
        if has_room(directory, store.size_bytes):
            os.sync()
            whole = seconds(torch_save, store, target, store.num_trajectories, is_synced=True)
            whole_name = f"torch.save of {store.size_bytes / 1e9:.2f} GB, synced"
            rows.append(row_of_all(whole_name, whole, store))
            shutil.rmtree(target)
    bars = [
        Bar("no save to a new path takes 1 s", slowest, 1, is_strict=True, unit=" s"),
        Bar("bytes of trajectories that saves wrote anew: none", num_anew, 0, unit=""),
    ]
    remarks = [
        f"writes: write_bytes of the process; the checkpoint's two JSON files have"
        f" {snapshots / 1e6:.2f} MB",
    ]
    return Case(name, f"saving {store.title()}", rows, bars, "ms", remarks)


def load_window(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Going on from a checkpoint; no two rounds share a buffer."""
    store = Store(directory / "store", is_tiny=is_tiny)
    checkpoint = directory / "checkpoint"
    store.buffer.save_checkpoint(checkpoint)
    expected = [store.buffer.sample(peers.BATCH_ROWS) for _ in range(NUM_BATCHES)]
    for batch in expected:
        store.check(batch)
    # What the store maps could not be dropped from the page cache.
    store.buffer.close()

    rows: list[Row] = []
    for state in ("cached", "cold"):
        load, first, later = (
            f"{what}, {state}" for what in ("load", "first batch", f"batches 2 to {NUM_BATCHES}")
        )
        times: dict[str, list[float]] = {load: [], first: [], later: []}
        shares = []
        with timing.frozen_gc():
            for _ in range(2 if is_tiny else 3):
                if state == "cold":
                    drop_from_page_cache(checkpoint)
                shares.append(share_in_page_cache(checkpoint))
                start = clock()
                resumed = peers.MmbufResumed(checkpoint)
                times[load].append(clock() - start)
                for i, batch in enumerate(expected):
                    start = clock()
                    found = resumed.sample()
                    times[later if i else first].append(clock() - start)
                    check_same("mmbuf, resumed", found, batch)
                resumed.close()
        rows += timing.rows_of(times)
        rows[-3].note = f"{statistics.median(shares):.1%} of the files in the page cache"
    shutil.rmtree(checkpoint)
    shutil.rmtree(store.directory)

    target = directory / "torch"
    torch_save(store, target, store.num_part, is_synced=True)
    for position, trajectory in enumerate(torch_load(target)):
        check_same("torch.load", trajectory, store.numbered(position))
    part = f"torch.load of {store.part_bytes / 1e9:.2f} GB"
    times = {f"{part}, cached": [], f"{part}, cold": []}
    with timing.frozen_gc():
        for _ in range(2 if is_tiny else 3):
            for key, taken in times.items():
                if key.endswith("cold"):
                    drop_from_page_cache(target)
                taken.append(seconds(torch_load, target))
    shutil.rmtree(target)
    rows += rows_of_part(times, store)
    if has_room(directory, store.size_bytes, store.size_bytes):
        torch_save(store, target, store.num_trajectories, is_synced=True)
        drop_from_page_cache(target)
        whole = seconds(torch_load, target)
        rows.append(
            row_of_all(f"torch.load of {store.size_bytes / 1e9:.2f} GB, cold", whole, store)
        )
        shutil.rmtree(target)
    remarks = [
        f"{NUM_BATCHES} batches of {peers.BATCH_ROWS} equal those without a resume, in each round",
        "load opens no trajectory: rows come from the disk with the batches; after torch.load all"
        " rows are in memory",
    ]
    return Case(name, f"loading {store.title()}", rows, [], "ms", remarks)


def save_formats(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """A window in memory, written and read in each format."""
    num_trajectories, shape = 4 if is_tiny else 100, (50, 8)
    num_rows = shape[0] * shape[1]
    data = peers.make_data(num_trajectories * num_rows)
    trajectories = peers.trajectories_of(data, *shape)
    content = bytes(num_rows * peers.row_bytes_of(data))
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    buffer.add_trajectories(trajectories)
    saved = {key: directory / key for key in FORMATS}
    for key, path in saved.items():
        buffer.save_checkpoint(path, trajectory_format=key)
        with TrajectoryReplayBuffer(sample_window_size=0) as resumed:
            resumed.load_checkpoint(path)
            for i, trajectory in zip(resumed.trajectory_ids, trajectories, strict=True):
                check_same(key, resumed.get_trajectory(i).to_columns(), trajectory)
        with contextlib.closing(peers.MmbufResumed(path)) as contender:
            peers.check_equal(key, contender, data)

    target = directory / "target"
    remove = functools.partial(shutil.rmtree, target)
    plain = functools.partial(write_plain, target, num_trajectories, content)
    contenders = {"plain files, synced": Contender(plain, remove)}
    for key in FORMATS:
        save = functools.partial(buffer.save_checkpoint, target, trajectory_format=key)
        contenders[f"save {key}"] = Contender(save, remove)
    rows = timing.rows_of(timing.interleave(contenders, 25, is_tiny=is_tiny))
    rows[0].note = f"{num_trajectories * len(content) / 1e6:.1f} MB"
    for row, path in zip(rows[1:], saved.values(), strict=True):
        row.note = f"{bytes_on_disk(path) / 1e6:.1f} MB on the disk"
    buffer.close()

    what = ("load", "first batch")
    times: dict[str, list[float]] = {f"{part} {key}": [] for part in what for key in FORMATS}
    with timing.frozen_gc():
        for _ in range(2 if is_tiny else 20):
            for key, path in saved.items():
                start = clock()
                resumed = peers.MmbufResumed(path)
                times[f"load {key}"].append(clock() - start)
                times[f"first batch {key}"].append(seconds(resumed.sample))
                resumed.close()
    rows += timing.rows_of(times)
    title = (
        f"{num_trajectories} state trajectories of {list(shape)}, saved from memory to a new path"
    )
    return Case(name, title, rows, [], "ms")


def main() -> int:
    arguments = timing.argument_parser(__doc__, CASES).parse_args()
    cases = {"save": save_window, "load": load_window, "formats": save_formats}
    return timing.run_cases(arguments, cases, [], [], 8 << 30)


if __name__ == "__main__":
    sys.exit(main())
