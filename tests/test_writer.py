"""The background writer: in order, published whole or not at all, and every failure is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from data import contents_of, is_equal, is_whole, names_of, row_ids, trajectory

from mmbuf import (
    LockedError,
    ReplayReader,
    Trajectory,
    TrajectoryReplayBuffer,
    WriteError,
    files,
    health,
    index,
)
from mmbuf.cache import TrajectoryCache
from mmbuf.formats import arrow
from mmbuf.schema import measure

SIZE = measure(trajectory(0)).size_bytes
STEPS = ("allocate", "write_at", "rename", "append")  # of publishing one file, in their order


class Fault:
    """Makes ``files.name`` fail with ENOSPC the next ``times`` times."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, times: float = 1) -> None:
        self.times = times
        self.num_raised = 0
        real = getattr(files, name)

        def function(*arguments: Any, **options: Any) -> Any:
            if self.num_raised < self.times:
                self.num_raised += 1
                raise OSError(errno.ENOSPC, f"No space left on device, in {name}")
            return real(*arguments, **options)

        patch.setattr(files, name, function)

    def repair(self) -> None:
        self.times = 0


class Gate:
    """Holds the writer before each file until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()
        self.error: Exception | None = None
        real = files.allocate

        def allocate(*arguments: Any) -> None:
            self.is_reached.set()
            assert self.is_open.wait(30)
            if self.error is not None:
                raise self.error
            real(*arguments)

        patch.setattr(files, "allocate", allocate)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open.set()  # or the buffer could not close


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[TrajectoryReplayBuffer]:
    with new_buffer(tmp_path) as buffer:
        yield buffer


def new_buffer(directory: Path, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=directory, sample_window_size=0, **options
    )


def add(buffer: TrajectoryReplayBuffer, *numbers: int) -> None:
    buffer.add_trajectories([trajectory(i) for i in numbers])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def wait_for_failure(buffer: TrajectoryReplayBuffer) -> None:
    wait_until(lambda: buffer._writer is not None and buffer._writer._failure is not None)


def sampled_ids(buffer: Any) -> set[int]:
    batch = buffer.sample(400)
    assert is_whole(batch)
    return {i for i, _, _ in row_ids(batch)}


def assert_is(item: Trajectory, i: int) -> None:
    assert is_equal(item.to_columns(), Trajectory.from_columns(trajectory(i)).to_columns())


def assert_stored(directory: Path, *numbers: int) -> None:
    """The store holds these trajectories in this order, and no other file."""
    contents, valid = index.read(str(directory))
    assert valid == (directory / index.JOURNAL).stat().st_size
    stored = [entry.file for entry in contents.entries.values()]
    assert sorted(stored) == names_of(directory)
    assert [name for name in os.listdir(directory) if name.endswith(".tmp")] == []
    with ReplayReader(directory) as reader:
        assert len(reader) == len(numbers)
        for trajectory_id, i in zip(reader.trajectory_ids, numbers, strict=True):
            assert_is(reader.get_trajectory(trajectory_id), i)


# -- order ---------------------------------------------------------------------------------------


def test_files_are_written_in_the_order_of_the_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[str] = []
    real = files.rename

    def rename(source: str, target: str) -> None:
        renamed.append(os.path.basename(target))
        real(source, target)

    monkeypatch.setattr(files, "rename", rename)
    with new_buffer(tmp_path) as buffer:
        add(buffer, *range(10))
        for i in range(10, 30):
            add(buffer, i)
    assert renamed == [f"trajectory_{i}_.arrow" for i in range(30)]
    assert_stored(tmp_path, *range(30))


def test_a_store_is_a_prefix_of_the_adds_at_every_moment(
    tmp_path: Path, buffer: TrajectoryReplayBuffer
) -> None:
    add(buffer, 0)
    seen = []
    while len(seen) < 20:
        add(buffer, len(buffer))
        ids = list(index.read(str(tmp_path))[0].entries)
        assert ids == list(range(len(ids)))
        seen.append(len(ids))
    assert seen == sorted(seen)
    buffer.flush()
    assert len(index.read(str(tmp_path))[0].entries) == 21


def test_the_name_of_a_file_says_id_and_weights(tmp_path: Path) -> None:
    with new_buffer(tmp_path) as buffer:
        for weights in ("", "step-7", "a/../b", "é" * 1000, "\ud800"):
            buffer.add_trajectories([{**trajectory(0), "model_weights_id": weights}])
    names = names_of(tmp_path)
    assert names[:3] == [
        *("trajectory_0_.arrow", "trajectory_1_step-7.arrow", "trajectory_2_a%2f%2e%2e%2fb.arrow")
    ]
    assert_stored(tmp_path, *[0] * 5)


# -- failures ------------------------------------------------------------------------------------


def next_add(buffer: TrajectoryReplayBuffer) -> None:
    add(buffer, 2, 3)


def next_flush(buffer: TrajectoryReplayBuffer) -> None:
    buffer.flush()


def next_sync(buffer: TrajectoryReplayBuffer) -> None:
    buffer.flush(sync=True)


def next_clear(buffer: TrajectoryReplayBuffer) -> None:
    buffer.clear()


def next_close(buffer: TrajectoryReplayBuffer) -> None:
    buffer.close()


@pytest.mark.parametrize("call", [next_add, next_flush, next_sync, next_clear, next_close])
@pytest.mark.parametrize("step", STEPS)
def test_a_failed_write_is_told_once_by_the_next_call_and_made_good_by_flush(
    tmp_path: Path,
    buffer: TrajectoryReplayBuffer,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    call: Callable[[TrajectoryReplayBuffer], None],
) -> None:
    add(buffer, 0)
    buffer.flush()
    before = contents_of(tmp_path)
    Fault(monkeypatch, step)
    add(buffer, 1)
    wait_for_failure(buffer)
    with pytest.raises(WriteError, match=f"No space left on device, in {step}") as error:
        call(buffer)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.ENOSPC
    assert str(tmp_path) in str(error.value)
    assert buffer.trajectory_ids == [0, 1]
    assert sampled_ids(buffer) == {0, 1}
    assert_is(buffer.get_trajectory(1), 1)
    assert contents_of(tmp_path) == before
    buffer.flush()
    add(buffer, 2)
    buffer.flush()
    assert sampled_ids(buffer) == {0, 1, 2}
    assert_stored(tmp_path, 0, 1, 2)


def test_a_failure_that_comes_while_flush_begins_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_buffer(tmp_path) as buffer, Gate(monkeypatch) as gate:
        gate.error = OSError(errno.ENOSPC, "No space left on device")
        add(buffer, 0)
        writer = buffer._writer
        assert writer is not None
        real = writer._wait

        def wait(is_done: Callable[[], bool]) -> None:
            gate.is_open.set()
            wait_for_failure(buffer)
            gate.is_open.clear()
            real(is_done)

        with monkeypatch.context() as patch:
            patch.setattr(writer, "_wait", wait)
            with pytest.raises(WriteError):
                buffer.flush()
        assert not writer._has_work(), "begun again, to fail again"
        gate.error = None
        gate.is_open.set()
        buffer.flush()
    assert_stored(tmp_path, 0)


@pytest.mark.parametrize("step", STEPS)
def test_while_the_disk_stays_full_every_flush_says_so_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with new_buffer(tmp_path) as buffer:
        fault = Fault(monkeypatch, step, float("inf"))
        refused = 0
        while len(buffer) < 5:
            wait_until(lambda: not buffer._writer._has_work())  # type: ignore[union-attr]
            try:
                add(buffer, len(buffer))
            except WriteError:
                refused += 1
        assert refused == 4
        for _ in range(3):
            with pytest.raises(WriteError) as error:
                buffer.flush()
            assert isinstance(error.value.__cause__, OSError)
        assert names_of(tmp_path) == []
        assert buffer.get_stats()["pending_trajectories"] == 5
        assert buffer.get_stats()["pending_bytes"] == 5 * SIZE
        assert sampled_ids(buffer) == set(range(5))
        fault.repair()
        buffer.flush()
        assert buffer.get_stats()["pending_bytes"] == 0
        assert sampled_ids(buffer) == set(range(5))
        assert_stored(tmp_path, *range(5))


@pytest.mark.parametrize("failure", [MemoryError("no memory"), ValueError("of another kind")])
def test_a_failure_of_any_kind_is_told_and_made_good(
    tmp_path: Path,
    buffer: TrajectoryReplayBuffer,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    def write(*_: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(arrow, "write", write)
        add(buffer, 0)
        with pytest.raises(WriteError) as error:
            buffer.flush()
        assert error.value.__cause__ is failure
    buffer.flush()
    assert_stored(tmp_path, 0)


def test_a_failure_after_the_journal_says_so_leaves_the_store_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*_: Any) -> None:
        raise MemoryError("no memory")

    buffer = new_buffer(tmp_path)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(TrajectoryCache, "written", written)
            add(buffer, 0)
            with pytest.raises(WriteError):
                buffer.flush()
        buffer.flush()
        assert sampled_ids(buffer) == {0}
    finally:
        buffer.close(wait=False)
        assert_stored(tmp_path, 0)


def test_a_failed_snapshot_is_told_once_though_more_was_added_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was added while the snapshot failed is not tried before the failure is told."""
    is_reached, is_open = threading.Event(), threading.Event()

    def fail(*_: Any) -> None:
        is_reached.set()
        assert is_open.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    with new_buffer(tmp_path) as buffer:
        add(buffer, 0)
        buffer.flush()
        writer = buffer._writer
        assert writer is not None
        with monkeypatch.context() as patch:
            patch.setattr(index.TrajectoryIndex, "is_snapshot_due", lambda _: True)
            patch.setattr(index.TrajectoryIndex, "write_snapshots", fail)
            add(buffer, 1)
            assert is_reached.wait(20)
            add(buffer, 2)
            is_open.set()
            wait_for_failure(buffer)
            with pytest.raises(WriteError):
                buffer.flush()
            writer._call(lambda: None)
            assert writer._failure is None, "tried again, to fail again"
            assert buffer.get_stats()["pending_trajectories"] == 1
        buffer.flush()
    assert_stored(tmp_path, 0, 1, 2)


def test_a_failed_sync_is_told_and_made_good(
    tmp_path: Path, buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(buffer, 0)
    with monkeypatch.context() as patch:
        Fault(patch, "sync")
        with pytest.raises(WriteError, match="No space left on device, in sync") as error:
            buffer.flush(sync=True)
        assert isinstance(error.value.__cause__, OSError)
    assert index.read(str(tmp_path))[0].unsynced == [0]
    buffer.flush(sync=True)
    assert index.read(str(tmp_path))[0].unsynced == []
    assert_stored(tmp_path, 0)


def test_a_failed_snapshot_is_told_and_made_good(
    tmp_path: Path, buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(buffer, 0)
    buffer.flush()
    with monkeypatch.context() as patch:
        Fault(patch, "replace")
        add(buffer, 1)
        with pytest.raises(WriteError, match="in replace"):
            buffer.flush()
    assert_stored(tmp_path, 0, 1)
    buffer.flush()
    assert snapshot_ids(tmp_path) == [0, 1]


def test_a_file_whose_close_failed_is_not_published(
    tmp_path: Path, buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        if threading.current_thread().name.startswith("mmbuf-writer"):
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "close", close)
        add(buffer, 0)
        with pytest.raises(WriteError, match="Input/output error"):
            buffer.flush()
    assert names_of(tmp_path) == []
    assert sampled_ids(buffer) == {0}
    buffer.flush()
    assert_stored(tmp_path, 0)


def test_close_without_waiting_gives_up_what_is_not_written_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = new_buffer(tmp_path)
    add(buffer, 0)
    buffer.flush()
    with monkeypatch.context() as patch:
        Fault(patch, "write_at", float("inf"))
        add(buffer, 1)
        wait_for_failure(buffer)
        buffer.close(wait=False)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: closed with 1 trajectories not written."
    ]
    assert_stored(tmp_path, 0)
    with new_buffer(tmp_path) as again:
        add(again, 2)
    assert_stored(tmp_path, 0, 2)


# -- a store that is gone ------------------------------------------------------------------------


def assert_told(buffer: TrajectoryReplayBuffer, match: str) -> None:
    """By each flush, and whatever would change the store; nothing is lost."""
    before = buffer.trajectory_ids
    calls: list[Callable[[], object]] = [
        buffer.flush,
        lambda: buffer.flush(sync=True),
        buffer.clear,
        lambda: buffer.save_checkpoint(f"{buffer.auto_save_path}.saved"),
        lambda: buffer.load_checkpoint("nowhere"),
        buffer.flush,
    ]
    for call in calls:
        with pytest.raises(WriteError, match=match):
            call()
        assert buffer.trajectory_ids == before
    assert sampled_ids(buffer) == set(before)


def test_a_renamed_store_is_told_and_gone_on_with_once_it_is_back(tmp_path: Path) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with new_buffer(store) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        before = contents_of(store)
        store.rename(elsewhere)
        assert_told(buffer, "got none")
        with suppress(WriteError):
            add(buffer, 2, 3)
        store.mkdir()
        assert_told(buffer, "got none")
        assert (os.listdir(store), contents_of(elsewhere)) == ([], before)
        store.rmdir()
        elsewhere.rename(store)
        buffer.flush()
        assert_stored(store, *range(len(buffer)))
        assert os.listdir(tmp_path) == ["store"]


def test_another_store_in_its_place_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with new_buffer(store) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        shutil.rmtree(store)
        with new_buffer(store) as other:
            add(other, 7, 8, 9)
            other.flush()
            before = contents_of(store)
            with suppress(WriteError):
                add(buffer, 2)
            assert_told(buffer, "got another")
            assert contents_of(store) == before
            add(other, 6)
            other.flush()
            assert_stored(store, 7, 8, 9, 6)
        with pytest.raises(WriteError, match="got another"):
            buffer.close()
        buffer.close(wait=False)
        assert_stored(store, 7, 8, 9, 6)


def test_a_store_that_was_removed_lets_a_buffer_with_nothing_to_write_close(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path / "store")
    add(buffer, 0, 1)
    buffer.flush()
    shutil.rmtree(tmp_path / "store")
    assert_told(buffer, "got none")
    buffer.close()
    assert os.listdir(tmp_path) == []


def test_what_is_dropped_after_a_store_went_is_not_unlinked_in_another(tmp_path: Path) -> None:
    store = tmp_path / "store"
    size = 2 * SIZE + (64 << 10)
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=store, sample_window_size=1, max_disk_bytes=size
    ) as buffer:
        add(buffer, 0)
        buffer.flush()
        store.rename(tmp_path / "elsewhere")
        with new_buffer(store) as other:
            add(other, 7, 8)
        before = contents_of(store)
        for i in (1, 2, 3, 4):
            with suppress(WriteError):
                add(buffer, i)
            with pytest.raises(WriteError):
                buffer.flush()
        assert contents_of(store) == before
        shutil.rmtree(store)
        (tmp_path / "elsewhere").rename(store)


def test_a_lock_file_that_is_removed_and_taken_by_another_is_told(tmp_path: Path) -> None:
    with new_buffer(tmp_path) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        os.unlink(tmp_path / files.WRITER_LOCK)
        with new_buffer(tmp_path) as other:
            assert other.trajectory_ids == [0, 1]
            with suppress(WriteError):
                add(buffer, 2)
            assert_told(buffer, f"the lock is lost: .* process {os.getpid()} on")
            add(other, 7)
            other.flush()
        assert_told(buffer, "another has written to it")
        buffer.close(wait=False)
    assert_stored(tmp_path, 0, 1, 7)


def test_a_lock_file_that_is_removed_is_made_anew_by_the_next_add(tmp_path: Path) -> None:
    with new_buffer(tmp_path) as buffer:
        add(buffer, 0)
        buffer.flush()
        os.unlink(tmp_path / files.WRITER_LOCK)
        add(buffer, 1)
        buffer.flush()
        with pytest.raises(LockedError):
            new_buffer(tmp_path)
    assert_stored(tmp_path, 0, 1)


@pytest.mark.parametrize("form", ["arrow", "npy", "pt"])
def test_a_store_and_its_copy_by_hard_links_go_on_each_by_itself(tmp_path: Path, form: str) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    with (
        new_buffer(store, trajectory_format=form) as buffer,
        ReplayReader(store) as reader,
    ):
        add(buffer, 0, 1)
        buffer.flush()
        shutil.copytree(store, copy, copy_function=os.link)
        add(buffer, 2)
        buffer.flush()
        with new_buffer(copy, trajectory_format=form) as other, ReplayReader(copy) as copied:
            assert other.trajectory_ids == [0, 1]
            add(other, 5)
            other.flush()
            buffer.clear()
            add(buffer, 3)
            buffer.flush()
            for each, numbers in ((buffer, {3}), (reader, {3}), (other, {0, 1, 5})):
                assert sampled_ids(each) == numbers
            assert sampled_ids(copied) == {0, 1, 5}
            other.clear()
            add(other, 6)
            assert sampled_ids(buffer) == {3}
    for path, number in ((store, 3), (copy, 6)):
        with new_buffer(path) as buffer:
            assert sampled_ids(buffer) == {number}
        assert [finding.what for finding in health.verify(path)] == []


# -- bounded memory ------------------------------------------------------------------------------


def started(function: Callable[[], None]) -> tuple[threading.Thread, list[BaseException | None]]:
    """A thread that runs ``function``, and how that ended: None or what it raised."""
    ends: list[BaseException | None] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            ends.append(error)
        else:
            ends.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def test_an_add_waits_while_too_much_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_buffer(tmp_path, max_pending_bytes=2 * SIZE) as buffer, Gate(monkeypatch) as gate:
        add(buffer, 0)
        assert gate.is_reached.wait(20)
        add(buffer, 1)
        assert buffer.get_stats()["pending_bytes"] == 2 * SIZE
        thread, ends = started(lambda: add(buffer, 2))
        thread.join(0.1)
        assert thread.is_alive()
        assert sampled_ids(buffer) == {0, 1}
        gate.is_open.set()
        thread.join(20)
        assert ends == [None]
        assert sampled_ids(buffer) == {0, 1, 2}
    assert_stored(tmp_path, 0, 1, 2)


def test_what_is_pending_never_exceeds_the_bound(tmp_path: Path) -> None:
    with new_buffer(tmp_path, max_pending_bytes=3 * SIZE) as buffer:
        for i in range(30):
            add(buffer, i)
            assert buffer.get_stats()["pending_bytes"] <= 3 * SIZE
    assert_stored(tmp_path, *range(30))


def test_one_trajectory_above_the_bound_is_let_in_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_buffer(tmp_path, max_pending_bytes=1) as buffer, Gate(monkeypatch) as gate:
        add(buffer, 0)
        assert gate.is_reached.wait(20)
        thread, ends = started(lambda: add(buffer, 1))
        thread.join(0.1)
        assert thread.is_alive()
        assert len(buffer) == 1
        gate.is_open.set()
        thread.join(20)
        assert ends == [None]
        assert len(buffer) == 2
    assert_stored(tmp_path, 0, 1)


def test_a_failing_writer_wakes_a_waiting_add_that_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_buffer(tmp_path, max_pending_bytes=SIZE) as buffer, Gate(monkeypatch) as gate:
        add(buffer, 0)
        assert gate.is_reached.wait(20)
        thread, ends = started(lambda: add(buffer, 1))
        thread.join(0.1)
        assert thread.is_alive()
        gate.error = OSError(errno.ENOSPC, "No space left on device")
        gate.is_open.set()
        thread.join(20)
        assert [type(end) for end in ends] == [WriteError]
        assert ends[0] is not None
        assert ends[0].__cause__ is gate.error
        assert (buffer.trajectory_ids, buffer.trajectory_counter) == ([0], 1)
        gate.error = None
        buffer.flush()
    assert_stored(tmp_path, 0)


def test_samples_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_buffer(tmp_path) as buffer, Gate(monkeypatch) as gate:
        add(buffer, 0, 1)
        assert gate.is_reached.wait(20)
        assert sampled_ids(buffer) == {0, 1}
        assert_is(buffer.get_trajectory(1), 1)
        assert names_of(tmp_path) == []


# -- flush ---------------------------------------------------------------------------------------


def snapshot_ids(directory: Path) -> list[int]:
    ids: list[int] = json.loads((directory / index.INDEX).read_text())["trajectory_id_list"]
    return ids


def test_snapshots_are_current_after_each_flush(
    tmp_path: Path, buffer: TrajectoryReplayBuffer
) -> None:
    for count in range(1, 6):
        add(buffer, count)
        buffer.flush()
        assert snapshot_ids(tmp_path) == list(range(count))
        metadata = json.loads((tmp_path / index.METADATA).read_text())
        assert metadata.keys() == {
            *("trajectory_format", "size", "total_samples", "trajectory_counter", "seed"),
            *("rng_state", "id_step"),
        }
        assert metadata["trajectory_format"] == "arrow"
        assert metadata["size"] == metadata["trajectory_counter"] == count
        assert metadata["total_samples"] == 12 * count
        assert metadata["seed"] == 1234
    buffer.clear()
    buffer.flush()
    assert snapshot_ids(tmp_path) == []
    assert json.loads((tmp_path / index.METADATA).read_text())["trajectory_counter"] == 5


def test_snapshots_of_a_long_list_are_current_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SHORT_LIST", 3)
    with new_buffer(tmp_path) as buffer:
        for i in range(50):
            add(buffer, i)
            buffer.flush()
        late = snapshot_ids(tmp_path)
        assert late == list(range(len(late)))
        assert len(late) >= 50 / 1.25 - 1
        add(buffer, 50)
        while snapshot_ids(tmp_path) == list(range(len(buffer))):
            add(buffer, len(buffer))
            buffer.flush()
        expected = buffer.trajectory_ids
    assert snapshot_ids(tmp_path) == expected


def test_flush_with_sync_syncs_each_new_file_then_the_names_then_the_journal(
    tmp_path: Path, buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, sync_open = files.sync, files.sync_open

    def recorded_sync(path: str) -> None:
        calls.append(os.path.relpath(path, tmp_path))
        sync(path)

    def recorded_sync_open(fd: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync_open(fd)

    monkeypatch.setattr(files, "sync", recorded_sync)
    if os.path.exists("/proc/self/fd"):
        monkeypatch.setattr(files, "sync_open", recorded_sync_open)
    add(buffer, 0, 1)
    buffer.flush()
    assert calls == []
    buffer.flush(sync=True)
    tail = [".", index.JOURNAL] if os.path.exists("/proc/self/fd") else ["."]
    assert calls == ["trajectory_0_.arrow", "trajectory_1_.arrow", *tail]
    assert index.read(str(tmp_path))[0].unsynced == []
    calls.clear()
    add(buffer, 2)
    buffer.flush(sync=True)
    assert calls == ["trajectory_2_.arrow", *tail]


def test_flush_without_anything_to_write_changes_no_file(
    tmp_path: Path, buffer: TrajectoryReplayBuffer
) -> None:
    add(buffer, 0)
    buffer.flush()
    before = contents_of(tmp_path)
    buffer.flush()
    buffer.flush()
    assert contents_of(tmp_path) == before


# -- names that are taken ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_a_name_that_an_orphan_has_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    orphan = tmp_path / "trajectory_0_.arrow"
    if kind == "file":
        orphan.write_bytes(b"orphan")
    elif kind == "directory":
        orphan.mkdir()
    else:
        orphan.symlink_to(tmp_path / "nowhere")
    with new_buffer(tmp_path) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        assert sampled_ids(buffer) == {0, 1}
        entries = list(index.read(str(tmp_path))[0].entries.values())
    assert entries[0].file == f"trajectory_0_.{entries[0].uuid[:8]}.arrow"
    assert entries[1].file == "trajectory_1_.arrow"
    if kind == "file":
        assert orphan.read_bytes() == b"orphan"
        orphan.unlink()
        assert_stored(tmp_path, 0, 1)
    elif kind == "directory":
        orphan.rmdir()
        assert_stored(tmp_path, 0, 1)
    else:
        assert os.readlink(orphan) == str(tmp_path / "nowhere")


def test_a_published_file_is_never_written_again(
    tmp_path: Path, buffer: TrajectoryReplayBuffer
) -> None:
    add(buffer, 0)
    buffer.flush()
    path = tmp_path / "trajectory_0_.arrow"
    before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
    add(buffer, 1, 2)
    buffer.sample(100)
    leaf = buffer.get_trajectory(0).rewards
    assert isinstance(leaf, torch.Tensor)
    leaf.fill_(-1)
    buffer.flush(sync=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
