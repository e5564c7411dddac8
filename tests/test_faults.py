"""Each single call to the disk and to the kernel fails in turn: nothing is lost, nothing wrong.

A scenario is run again and again; in its n-th run the n-th call fails, until a run comes to its end
without a fault. After each fault: a typed error that says why and where, every row still right, and
once the fault is lifted everything can be written and read by others.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import gc
import inspect
import itertools
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Child, Parent
from data import is_equal, is_whole, row_ids, trajectory

from mmbuf import (
    ClosedError,
    ReplayReader,
    Trajectory,
    TrajectoryReplayBuffer,
    WriteError,
    files,
    vm,
)
from mmbuf.formats import native
from mmbuf.storage import FORMATS

IS_LINUX = vm.CAN_REWIRE
CODES = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.EINTR)
# 28 kB a trajectory: mapped, or read by one call; a batch of 500 rows is memory of the pool.
IMAGE = (24, 32, 3)

SYSTEM_CALLS = frozenset(
    (
        *("open", "close", "read", "write", "pwrite", "pread", "preadv", "ftruncate", "fsync"),
        *("posix_fallocate", "copy_file_range", "rename", "link", "unlink", "mkdir", "rmdir"),
        *("makedirs", "listdir", "scandir", "stat", "lstat", "fstat"),
    )
)
MEMORY_CALLS = frozenset(["mmap", "munmap", "mprotect", "madvise", "mremap"])
# What asks nothing of the system, or is meant to answer whatever the system says.
HARMLESS = frozenset(
    (
        *("join", "directory_of", "name_of", "absolute", "process_id", "boot_id", "is_pattern"),
        *("matches", "escape", "trajectory_name", "temporary", "is_same", "naming"),
    )
)
RANGE_CALLS = ("commit", "map_file", "rewire", "release")
# What has no path to tell.
OF_MEMORY = {*MEMORY_CALLS, *(f"AddressRange.{name}" for name in RANGE_CALLS)}
OF_MEMORY |= {"map_privately", "new_block"}


class Faults:
    """Counts the calls to what it has replaced; armed, it makes the n-th of them fail.

    ``lasts``: and all after it, until it is lifted. ``code`` None: a write comes short instead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_armed = False
        self._number = 0
        self._lasts = False
        self.code: int | None = None
        self.hit = ""  # the first call that failed
        self.hits: set[str] = set()
        self.total = 0

    def arm(self, number: int, code: int | None, *, lasts: bool) -> None:
        self._number, self.code, self._lasts = number, code, lasts
        self.hit, self.hits = "", set()
        self._is_armed = True

    def lift(self) -> None:
        self._is_armed = False

    def strikes(self, name: str) -> bool:
        with self._lock:
            if not self._is_armed:
                return False
            if self.code is None and name not in ("write", "pwrite"):
                return False
            self._number -= 1
            if self._number and not (self._lasts and self._number < 0):
                return False
            self.hit = self.hit or name
            self.hits.add(name)
            self.total += 1
            return True

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            if not self.strikes(name):
                return real(*arguments, **options)
            if self.code is None:
                fd, data, *offset = arguments
                return real(fd, memoryview(data)[: len(data) // 2], *offset)
            if name == "close":  # Linux closes a descriptor even where it says that it failed
                real(*arguments, **options)
            where = [argument for argument in arguments if isinstance(argument, str)][:1]
            raise OSError(self.code, os.strerror(self.code), *where)

        return function

    def around_libc(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            if self.code is None or not self.strikes(name):
                return real(*arguments)
            ctypes.set_errno(self.code)
            return ctypes.c_void_p(-1).value if name in ("mmap", "mremap") else -1

        return function


class Replaced:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, functions: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(functions)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def fail_system_calls(
    patch: pytest.MonkeyPatch, names: frozenset[str] = SYSTEM_CALLS | MEMORY_CALLS
) -> Faults:
    """Faults in what `files` asks of the system and `vm` of the kernel."""
    faults = Faults()
    calls = {name: faults.around(name, getattr(os, name)) for name in names & SYSTEM_CALLS}
    patch.setattr(files, "os", Replaced(os, calls))
    if "open" in names:
        patch.setattr(files, "open", faults.around("open", builtins.open), raising=False)
    libc = {
        name: faults.around_libc(name, getattr(vm._libc, name)) for name in names & MEMORY_CALLS
    }
    patch.setattr(vm, "_libc", Replaced(vm._libc, libc))
    return faults


def fail_functions(patch: pytest.MonkeyPatch) -> Faults:
    """Faults in the functions of `files`, the formats and `vm` themselves."""
    faults = Faults()
    for name, function in inspect.getmembers(files, inspect.isfunction):
        is_own = function.__module__ == files.__name__ and not name.startswith("_")
        if is_own and name not in HARMLESS:
            patch.setattr(files, name, faults.around(name, function))
    patch.setattr(files, "WriterLock", faults.around("WriterLock", files.WriterLock))
    for format_ in FORMATS.values():
        for name in ("write", "opened", "load"):
            real = getattr(format_, name)
            patch.setattr(format_, name, faults.around(f"{format_.NAME}.{name}", real))
    for name in RANGE_CALLS:
        real = getattr(vm.AddressRange, name)
        patch.setattr(vm.AddressRange, name, faults.around(f"AddressRange.{name}", real))
    patch.setattr(native, "map_privately", faults.around("map_privately", vm.map_privately))
    patch.setattr(vm, "new_block", faults.around("new_block", vm.new_block))
    return faults


LAYERS = {"system calls": fail_system_calls, "functions": fail_functions}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are compared all the time: handing them to other threads costs most of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def item(number: int) -> dict[str, Any]:
    return trajectory(number, image=IMAGE)


@functools.cache
def stored(number: int) -> dict[str, Any]:
    return Trajectory.from_columns(item(number)).to_columns()


class Run:
    """One run of a scenario in a directory of its own, which holds a store of two trajectories."""

    def __init__(self, faults: Faults, directory: Path, trajectory_format: str) -> None:
        self.faults = faults
        self.directory = directory
        self.store = directory / "store"
        self.format = trajectory_format
        self.numbers = [0, 1]  # of the trajectories that are there, oldest first
        self.errors: list[Exception] = []

    def open(self, **options: Any) -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=self.store,
            sample_window_size=0,
            trajectory_format=self.format,
            **options,
        )

    def attempt(self, function: Callable[[], Any], *allowed: type[Exception]) -> bool:
        """Whether it went through; else it has to fail by an error that is allowed."""
        try:
            function()
            return True
        except allowed as error:
            self.check(error)
            self.errors.append(error)
            return False

    def check(self, error: Exception) -> None:
        """The error says why, and where."""
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        if isinstance(error, WriteError):
            assert isinstance(error.__cause__, OSError), "a cause"
        if self.faults.code is not None:
            codes = {link.errno for link in chain if isinstance(link, OSError)}
            assert self.faults.code in codes, f"the code, got {chain}"
        if not self.faults.hits & OF_MEMORY:
            assert str(self.directory) in str(error), f"the path, got {chain!r}"

    def add(self, buffer: TrajectoryReplayBuffer, *numbers: int) -> None:
        for number in numbers:
            adding = functools.partial(buffer.add_trajectories, [item(number)])
            if self.attempt(adding, *ADDING):
                self.numbers.append(number)

    def sample(self, buffer: TrajectoryReplayBuffer | ReplayReader, count: int = 100) -> None:
        self.attempt(lambda: self.sampled(buffer, count), OSError, MemoryError)

    def sampled(self, buffer: TrajectoryReplayBuffer | ReplayReader, count: int = 100) -> None:
        batch = buffer.sample(max(count, 30 * len(self.numbers)))
        assert is_whole(batch), "rows"
        assert {i for i, *_ in row_ids(batch)} == set(self.numbers), "trajectories"

    def settle(self, buffer: TrajectoryReplayBuffer) -> None:
        """The fault is lifted: all is right, can be written, and is then read by others."""
        self.faults.lift()
        assert len(buffer) == len(self.numbers)
        self.sampled(buffer)
        buffer.flush()
        self.sampled(buffer)
        self.add(buffer, 9)
        buffer.flush()
        self.sampled(buffer)
        buffer.close()
        self.assert_stored(self.store, self.numbers)
        with self.open() as buffer:
            self.sampled(buffer)
        assert [name for name in os.listdir(self.store) if name.endswith(".tmp")] == []

    def assert_stored(self, path: Path, numbers: list[int]) -> None:
        with ReplayReader(path) as reader:
            assert len(reader) == len(numbers)
            for trajectory_id, number in zip(reader.trajectory_ids, numbers, strict=True):
                found = reader.get_trajectory(trajectory_id).to_columns()
                assert is_equal(found, stored(number)), "the stored trajectory"


ADDING = (WriteError, MemoryError, OSError)
Scenario = Callable[[Run, Callable[[], None]], None]


def add_and_flush(run: Run, arm: Callable[[], None]) -> None:
    buffer = run.open()
    arm()
    run.add(buffer, 2, 3)
    run.sample(buffer)
    run.attempt(buffer.flush, WriteError)
    run.attempt(lambda: buffer.flush(sync=True), WriteError)
    run.settle(buffer)


def add_sample_and_evict(run: Run, arm: Callable[[], None]) -> None:
    buffer = run.open(cache_size=1)
    arm()
    for number in (2, 3):
        run.add(buffer, number)
        run.sample(buffer, 500)
        run.attempt(buffer.flush, WriteError)
    run.attempt(buffer.clear_cache, OSError)
    run.sample(buffer)
    run.attempt(buffer.flush, WriteError)
    run.settle(buffer)


def reopen(run: Run, arm: Callable[[], None]) -> None:
    opened: list[TrajectoryReplayBuffer] = []
    arm()
    for _ in range(2):
        if not opened:
            run.attempt(lambda: opened.append(run.open()), OSError, MemoryError)
    if not opened:
        run.faults.lift()
        opened.append(run.open())
    run.sample(opened[0])
    run.settle(opened[0])


def read(run: Run, arm: Callable[[], None]) -> None:
    opened: list[ReplayReader] = []
    arm()
    run.attempt(lambda: opened.append(ReplayReader(run.store)), OSError, MemoryError)
    if not opened:
        run.faults.lift()
        opened.append(ReplayReader(run.store))
    with opened[0] as reader:
        run.sample(reader)
        run.attempt(lambda: reader.get_trajectory(0), OSError, MemoryError)
        run.faults.lift()
        run.sampled(reader)


def save_to_a_new_path(run: Run, arm: Callable[[], None]) -> None:
    buffer = run.open()
    run.add(buffer, 2)
    path = run.directory / "checkpoint"
    arm()
    is_saved = run.attempt(lambda: buffer.save_checkpoint(path), WriteError)
    run.faults.lift()
    if path.exists():
        run.assert_stored(path, [0, 1, 2])
    assert path.exists() or not is_saved
    buffer.save_checkpoint(path)
    run.assert_stored(path, [0, 1, 2])
    run.settle(buffer)
    assert [name for name in os.listdir(run.directory) if name.endswith(".tmp")] == []


def save_to_an_old_path(run: Run, arm: Callable[[], None]) -> None:
    path = run.directory / "checkpoint"
    buffer = run.open()
    buffer.save_checkpoint(path)
    buffer.clear()
    run.numbers = []
    run.add(buffer, 2, 3)
    arm()
    is_saved = run.attempt(lambda: buffer.save_checkpoint(path), WriteError)
    run.faults.lift()
    with ReplayReader(path) as reader:
        is_new = len(reader) == 2 and reader.trajectory_ids[0] == 2
    assert is_new or not is_saved
    run.assert_stored(path, [2, 3] if is_new else [0, 1])
    buffer.save_checkpoint(path)
    run.assert_stored(path, [2, 3])
    assert len([name for name in os.listdir(path) if name.startswith("trajectory_")]) == 3
    run.settle(buffer)
    assert [name for name in os.listdir(path) if name.startswith(".")] == []


def load_into_a_live_store(run: Run, arm: Callable[[], None]) -> None:
    path = run.directory / "checkpoint"
    buffer = run.open()
    buffer.save_checkpoint(path)
    run.add(buffer, 2)
    arm()
    is_loaded = run.attempt(lambda: buffer.load_checkpoint(path), WriteError, OSError, MemoryError)
    run.faults.lift()
    if is_loaded or len(buffer) == 2:
        run.numbers = [0, 1]
    run.sampled(buffer)
    buffer.flush()
    buffer.load_checkpoint(path)
    run.numbers = [0, 1]
    run.settle(buffer)


def clear(run: Run, arm: Callable[[], None]) -> None:
    buffer = run.open()
    run.sampled(buffer)
    arm()
    run.add(buffer, 2)
    is_cleared = run.attempt(buffer.clear, WriteError)
    run.faults.lift()
    if is_cleared or not len(buffer):
        run.numbers = []
        assert len(buffer) == 0
    else:
        run.sampled(buffer)
    run.add(buffer, 4)
    run.settle(buffer)


def close(run: Run, arm: Callable[[], None]) -> None:
    buffer = run.open()
    run.sampled(buffer)
    arm()
    run.add(buffer, 2)
    if not run.attempt(buffer.close, WriteError):
        run.faults.lift()
        buffer.close()
    run.faults.lift()
    run.settle(run.open())


SCENARIOS: dict[str, Scenario] = {
    "add and flush": add_and_flush,
    "add, sample and evict": add_sample_and_evict,
    "reopen": reopen,
    "read": read,
    "save to a new path": save_to_a_new_path,
    "save to an old path": save_to_an_old_path,
    "load into a live store": load_into_a_live_store,
    "clear": clear,
    "close": close,
}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if IS_LINUX else 0


def run_with_each_fault(
    scenario: Scenario,
    faults: Faults,
    directory: Path,
    trajectory_format: str,
    codes: tuple[int | None, ...],
    *,
    lasts: bool = False,
    step: int = 1,
) -> int:
    """Run it with the n-th call failing, for each ``step``-th n; ``codes`` take turns.

    How many were hit.
    """
    template = Run(faults, directory / "template", trajectory_format)
    with template.open() as buffer:
        buffer.add_trajectories([item(number) for number in template.numbers])
    for turn, number in enumerate(itertools.count(1, step)):
        code = codes[turn % len(codes)]
        run = Run(faults, directory / str(number), trajectory_format)
        shutil.copytree(template.directory, run.directory)
        num_files, num_maps = open_files(), vm.MAPS.used
        try:
            scenario(run, lambda: faults.arm(number, code, lasts=lasts))  # noqa: B023
            assert vm.MAPS.used == num_maps, "mappings"
            if open_files() > num_files:
                gc.collect()
            assert open_files() <= num_files, "descriptors"
        except BaseException as error:
            what = "short" if code is None else errno.errorcode[code]
            error.add_note(f"fault {number}: {what} in {faults.hit}, after {run.errors}")
            raise
        finally:
            faults.lift()
        shutil.rmtree(run.directory)
        if not faults.hit:
            return turn
    raise AssertionError("a scenario of endlessly many calls")


@pytest.mark.timeout(100)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_call_that_fails_is_told_and_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_fsync: None, scenario: str
) -> None:
    faults = fail_system_calls(monkeypatch)
    hits = run_with_each_fault(SCENARIOS[scenario], faults, tmp_path, "arrow", CODES, step=6)
    assert hits > 5


@pytest.mark.timeout(100)
@pytest.mark.parametrize("scenario", ["add and flush", "save to an old path"])
def test_a_write_that_comes_short_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_fsync: None, scenario: str
) -> None:
    faults = fail_system_calls(monkeypatch)
    assert run_with_each_fault(SCENARIOS[scenario], faults, tmp_path, "arrow", (None,)) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_call_that_fails_is_told_and_made_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_fsync: None,
    scenario: str,
    layer: str,
    trajectory_format: str,
    lasts: bool,
) -> None:
    faults = LAYERS[layer](monkeypatch)
    # Each code by itself where that is affordable: all of them in turn, begun at another one.
    for first in range(0, len(CODES), 1 if trajectory_format == "arrow" and not lasts else 3):
        codes = CODES[first:] + CODES[:first]
        directory = tmp_path / str(first)
        directory.mkdir()
        hits = run_with_each_fault(
            SCENARIOS[scenario], faults, directory, trajectory_format, codes, lasts=lasts
        )
        assert hits > 5
    print(f"{faults.total} faults", end=" ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("trajectory_format", list(FORMATS))
@pytest.mark.parametrize("scenario", ["add and flush", "save to an old path", "clear", "close"])
def test_each_write_that_comes_short_is_made_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_fsync: None,
    scenario: str,
    trajectory_format: str,
    lasts: bool,
) -> None:
    faults = fail_system_calls(monkeypatch)
    run_with_each_fault(
        SCENARIOS[scenario], faults, tmp_path, trajectory_format, (None,), lasts=lasts
    )
    print(f"{faults.total} faults", end=" ")


# -- no mapping is left ----------------------------------------------------------------------------


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
@pytest.mark.parametrize("cache_size", [None, 1])
def test_without_any_mapping_left_all_goes_on_by_copies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_size: int | None,
    trajectory_format: str,
) -> None:
    faults = fail_system_calls(monkeypatch, frozenset(["mmap", "mremap"]))
    run = Run(faults, tmp_path, trajectory_format)
    with run.open() as buffer:
        buffer.add_trajectories([item(number) for number in run.numbers])
    with run.open(cache_size=cache_size) as buffer, ReplayReader(run.store) as reader:
        faults.arm(1, errno.ENOMEM, lasts=True)
        run.sampled(reader, 500)
        for _ in range(3):
            run.sampled(buffer, 500)
        run.add(buffer, 2)
        buffer.flush()
        run.sampled(buffer, 500)
        assert is_equal(buffer.get_trajectory(2).to_columns(), stored(2))
        buffer.clear_cache()
        run.sampled(buffer, 500)
        assert run.errors == []
        run.settle(buffer)


# -- a disk that is really full --------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB; skipped where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def wait_for_writer(buffer: TrajectoryReplayBuffer) -> None:
    """Until all is written that can be."""
    deadline = time.monotonic() + 20
    while buffer._writer is not None and buffer._writer._has_work():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fill(path: Path, left_bytes: int) -> None:
    """Leave so much of the disk of ``path``, a new file."""
    status = os.statvfs(path.parent)
    size = status.f_bavail * status.f_frsize - left_bytes
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, max(1, size))
    finally:
        os.close(fd)


def test_a_full_disk_loses_nothing_and_all_is_written_once_there_is_room(small_disk: Path) -> None:
    run = Run(Faults(), small_disk, "arrow")
    run.numbers = []
    ballast = small_disk / "ballast"
    fill(ballast, 300 << 10)
    with run.open() as buffer:
        for number in range(40):
            run.add(buffer, number)
            wait_for_writer(buffer)
            run.sampled(buffer, 500)
            if len(run.errors) == 5:
                break
        codes = [error.__cause__.errno for error in run.errors]  # type: ignore[union-attr]
        assert codes == [errno.ENOSPC] * 5
        for _ in range(2):
            with pytest.raises(WriteError, match="No space left on device"):
                buffer.flush()
        assert buffer.get_stats()["pending_trajectories"] > 0
        ballast.unlink()
        buffer.flush()
        run.sampled(buffer, 500)
        assert buffer.get_stats()["pending_trajectories"] == 0
    run.assert_stored(run.store, run.numbers)
    with run.open() as buffer:
        run.sampled(buffer, 500)


def test_a_disk_that_is_full_at_any_step_loses_nothing(small_disk: Path) -> None:
    """With each number of blocks left, so that each step of publishing is once the first to fail.

    The last of them is the journal's line, which is longer than what its last block has room for.
    """
    run = Run(Faults(), small_disk, "arrow")
    with run.open() as buffer:
        buffer.add_trajectories([item(number) for number in run.numbers])
        buffer.flush()
        refusals = set()
        ballast = small_disk / "ballast"
        for number, blocks in enumerate([*range(16), *range(3)], 2):
            fill(ballast, blocks * 4096)
            run.add(buffer, number)
            try:
                buffer.flush()
            except WriteError as error:
                refusals.add(blocks)
                run.check(error)
            run.sampled(buffer, 300)
            ballast.unlink()
            buffer.flush()
        assert {0, 1, 2} <= refusals
        assert 15 not in refusals
    run.assert_stored(run.store, run.numbers)


def test_a_checkpoint_on_a_full_disk_leaves_the_old_one(small_disk: Path, tmp_path: Path) -> None:
    path = small_disk / "checkpoint"
    ballast = small_disk / "ballast"
    run = Run(Faults(), tmp_path, "arrow")
    with run.open() as buffer:
        buffer.add_trajectories([item(0), item(1)])
        buffer.save_checkpoint(path)
        buffer.add_trajectories([item(2)])
        for blocks in range(0, 16, 3):
            fill(ballast, blocks * 4096)
            try:
                buffer.save_checkpoint(path)
            except WriteError as error:
                run.check(error)
                run.assert_stored(path, [0, 1])
            else:
                assert blocks > 6
            ballast.unlink()
        buffer.save_checkpoint(path)
    run.assert_stored(path, [0, 1, 2])


def add_up_to_a_limit(parent: Parent, directory: Path, limit: int) -> int:
    """Add under ``RLIMIT_FSIZE`` until three adds were refused; how many were added."""
    unlimited = resource.RLIM_INFINITY
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    run = Run(Faults(), directory, "arrow")
    run.numbers = []
    buffer = run.open()
    number = 0
    while len(run.errors) < 3:
        number += 1
        run.add(buffer, number)
        run.sampled(buffer, 40 * number)
        run.attempt(buffer.flush, WriteError)
        run.sampled(buffer, 40 * number)
    for error in run.errors:
        assert error.__cause__.errno in (errno.EFBIG, errno.ENOSPC)  # type: ignore[union-attr]
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    run.settle(buffer)
    return len(run.numbers)


@pytest.mark.parametrize("limit", [20_000, 50_000])
def test_a_limit_of_the_size_of_files_is_an_error_and_no_signal(tmp_path: Path, limit: int) -> None:
    """20,000: no trajectory can be written. 50,000: journal and snapshot grow up to the limit."""
    with Child(add_up_to_a_limit, tmp_path, limit) as child:
        added = child.result()
    assert added <= 4 if limit == 20_000 else added > 20


# -- what failing calls once broke -----------------------------------------------------------------


def test_a_journal_that_cannot_be_looked_at_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fail_system_calls(monkeypatch, frozenset(["lstat"])), tmp_path, "arrow")
    with run.open() as buffer:
        buffer.add_trajectories([item(0), item(1)])
    before = (run.store / "journal.jsonl").read_bytes()
    for number in itertools.count(1):
        run.faults.arm(number, errno.EIO, lasts=True)
        try:
            run.open().close()
        except OSError:
            assert (run.store / "journal.jsonl").read_bytes() == before
        if not run.faults.hit:
            break
    run.faults.lift()
    assert number > 2
    run.assert_stored(run.store, [0, 1])


def test_the_beginning_of_a_line_that_could_not_be_cut_off_damages_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Faults(), tmp_path, "arrow")

    def write(fd: int, data: bytes) -> int:
        return os.write(fd, data[: len(data) // 2])

    def ftruncate(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as file systems that copy do

    with run.open() as buffer:
        buffer.add_trajectories([item(0)])
        buffer.flush()
        with monkeypatch.context() as patch:
            calls: dict[str, Any] = {"write": write, "ftruncate": ftruncate}
            patch.setattr(files, "os", Replaced(os, calls))
            buffer.add_trajectories([item(1)])
            with pytest.raises(WriteError):
                buffer.flush()
        buffer.flush()
        run.assert_stored(run.store, [0, 1])
    run.assert_stored(run.store, [0, 1])


def test_an_error_of_reading_rows_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fail_system_calls(monkeypatch, frozenset(["preadv"])), tmp_path, "arrow")
    with run.open() as buffer:
        buffer.add_trajectories([item(0)])
    with run.open(cache_size=0) as buffer:
        run.faults.arm(1, errno.EIO, lasts=False)
        with pytest.raises(OSError, match=r"trajectory_0_\.arrow") as error:
            buffer.sample(3)
        assert error.value.errno == errno.EIO
        run.faults.lift()


def test_a_store_that_could_not_be_opened_is_not_left_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Faults(), tmp_path, "arrow")
    with run.open() as buffer:
        buffer.add_trajectories([item(0), item(1)])

    def refuse(path: str) -> int:
        raise OSError(errno.EIO, "Input/output error", path)

    def refuse_to_cut(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    replaced = {"disk_bytes_of": refuse, "truncate": refuse_to_cut}
    for name, function in replaced.items():
        with monkeypatch.context() as patch:
            patch.setattr(files, name, function, raising=False)
            try:
                run.open(max_disk_bytes=1 << 30)
            except OSError:
                patch.undo()
                with run.open(max_disk_bytes=1 << 30) as buffer:  # while the error is still held
                    run.sampled(buffer)
            else:
                raise AssertionError(f"{name} was not called")


def test_a_journal_whose_closing_fails_is_told_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Faults(), tmp_path, "arrow")
    buffer = run.open()
    buffer.add_trajectories([item(0), item(1)])
    buffer.flush()

    def close(fd: int) -> None:
        os.close(fd)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "close", close)
        with pytest.raises(WriteError, match="Input/output error"):
            buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.sample(1)
    run.settle(run.open())


def test_a_snapshot_that_failed_is_not_told_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Faults(), tmp_path, "arrow")
    run.numbers = [0]

    def replace(path: str, blocks: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with run.open() as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(files, "replace", replace)
            buffer.add_trajectories([item(0)])
            with pytest.raises(WriteError):
                buffer.flush()
        buffer.flush()
        run.settle(buffer)


def test_addresses_that_are_not_taken_back_at_once_are_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vm.AddressRange.release
    refusals = 0

    def release(self: vm.AddressRange, start: int, stop: int) -> None:
        nonlocal refusals
        refusals += 1
        if refusals % 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        real(self, start, stop)

    monkeypatch.setattr(vm.AddressRange, "release", release)
    buffer = TrajectoryReplayBuffer(sample_window_size=3)
    run = Run(Faults(), tmp_path, "arrow")
    run.numbers = []
    with buffer:
        for number in range(60):
            buffer.add_trajectories([item(number % 9)])
            run.numbers = [i % 9 for i in range(max(0, number - 2), number + 1)]
            run.sampled(buffer)
        monkeypatch.setattr(vm.AddressRange, "release", real)
        buffer.add_trajectories([item(7)])
        lanes = buffer._window.cache._places.lanes  # type: ignore[union-attr]
        assert max(sum(map(len, lane._runs)) for lane in lanes) <= 4
        buffer.clear()
        run.numbers = []
        assert [list(lane._runs) for lane in lanes] == [[]] * len(lanes)


def test_a_copy_that_the_system_says_is_of_no_bytes_is_made_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    calls: dict[str, Any] = {"copy_file_range": lambda *_: 0, "link": refuse}
    monkeypatch.setattr(files, "os", Replaced(os, calls))
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 100)
    files.link_or_copy(str(source), str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
