"""How a process or a buffer ends: at exit, without a close, without threads. Nothing added is lost.

In processes of their own, with a watchdog that shows all stacks should one hang.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from data import names_of
from interrupts import storm

from mmbuf import LockedError, ReplayReader, TrajectoryReplayBuffer, WriteError, files, storage
from mmbuf.writer import TrajectoryWriter

ITEM = {"rewards": torch.ones(4, 2, 1)}

PREAMBLE = """
import atexit, faulthandler, os, sys, threading
faulthandler.dump_traceback_later(60, exit=True)
import torch
from mmbuf import TrajectoryReplayBuffer
ITEM = {"rewards": torch.ones(4, 2, 1)}
path, *rest = sys.argv[1:]
buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
buffer.add_trajectories([ITEM] * 50)
"""


def run_process(script: str, *arguments: object) -> str:
    """What a process of its own has written; it must end well."""
    process = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def stored_ids(path: Path) -> list[int]:
    with ReplayReader(path) as reader:
        return [int(i) for i in reader.trajectory_ids]


def test_a_script_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    assert run_process("", tmp_path) == ""
    assert stored_ids(tmp_path) == list(range(50))


def test_a_script_that_ends_without_closing_its_reader_says_nothing(tmp_path: Path) -> None:
    script = """
from mmbuf import ReplayReader
buffer.close()
reader = ReplayReader(path)
print(reader.sample(1)["rewards"].tolist())
"""
    assert run_process(script, tmp_path) == "[[1.0]]\n"


def test_a_buffer_can_be_closed_at_exit(tmp_path: Path) -> None:
    assert run_process("atexit.register(buffer.close)", tmp_path) == ""
    assert stored_ids(tmp_path) == list(range(50))


def test_a_checkpoint_can_be_saved_at_exit(tmp_path: Path) -> None:
    script = "atexit.register(buffer.save_checkpoint, rest[0])"
    assert run_process(script, tmp_path / "store", tmp_path / "checkpoint") == ""
    assert stored_ids(tmp_path / "store") == list(range(50))
    assert stored_ids(tmp_path / "checkpoint") == list(range(50))


def test_a_buffer_that_a_finalizer_closes_at_the_very_end_does_not_hang(tmp_path: Path) -> None:
    script = """
class Trainer:
    def __init__(self):
        self.buffer, self.itself = buffer, self
        buffer.flush()
    def __del__(self):
        self.buffer.close()
        print("closed", flush=True)
Trainer()
del buffer
"""
    assert run_process(script, tmp_path) == "closed\n"
    assert stored_ids(tmp_path) == list(range(50))


def test_what_is_added_at_exit_is_written(tmp_path: Path) -> None:
    script = """
def last():
    buffer.add_trajectories([ITEM])
    print(buffer.get_stats()["pending_trajectories"])
atexit.register(last)
"""
    assert run_process(script, tmp_path) == "0\n"
    assert stored_ids(tmp_path) == list(range(51))


def test_what_is_added_and_closed_at_exit_is_written(tmp_path: Path) -> None:
    script = """
def last():
    buffer.add_trajectories([ITEM])
    buffer.close()
atexit.register(last)
"""
    assert run_process(script, tmp_path) == ""
    assert stored_ids(tmp_path) == list(range(51))


def test_a_process_of_multiprocessing_that_ends_without_close_loses_nothing(
    tmp_path: Path,
) -> None:
    script = """
import multiprocessing
def work(path):
    inner = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
    inner.add_trajectories([ITEM] * 50)
buffer.close()
process = multiprocessing.get_context("fork").Process(target=work, args=(rest[0],))
process.start()
process.join()
assert process.exitcode == 0
"""
    run_process(script, tmp_path / "store", tmp_path / "of the child")
    assert stored_ids(tmp_path / "of the child") == list(range(50))


# -- without threads -------------------------------------------------------------------------------


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_once_does_not_stop_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            buffer.add_trajectories([ITEM])
            assert buffer.get_stats()["pending_trajectories"] == 1
        buffer.flush()
        assert buffer.get_stats()["pending_trajectories"] == 0
    assert stored_ids(tmp_path) == [0]


def test_without_any_thread_whoever_waits_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store")
    buffer.add_trajectories([ITEM] * 3)
    buffer.flush()
    assert stored_ids(tmp_path / "store") == [0, 1, 2]
    buffer.add_trajectories([ITEM])
    buffer.save_checkpoint(tmp_path / "checkpoint")
    assert stored_ids(tmp_path / "checkpoint") == [0, 1, 2, 3]
    buffer.clear()
    buffer.add_trajectories([ITEM])
    buffer.close()
    assert stored_ids(tmp_path / "store") == [4]


def test_an_interrupt_of_who_writes_without_any_thread_is_no_failure_of_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([ITEM])
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                buffer.flush()
        buffer.flush()
        assert stored_ids(tmp_path) == [0]


def test_what_is_written_while_a_buffer_gives_up_is_not_told_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_written = threading.Event()
    is_writing = threading.Event()
    really = storage.write

    def write(*arguments: Any) -> Any:
        is_writing.set()
        assert is_written.wait(10)
        return really(*arguments)

    monkeypatch.setattr(storage, "write", write)
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
    buffer.add_trajectories([ITEM] * 3)
    assert is_writing.wait(10)
    writing = threading.Timer(0.2, is_written.set)
    stop = TrajectoryWriter.stop

    def stop_and_write(self: TrajectoryWriter, *, wait: bool) -> int:
        writing.start()  # not before, however long it takes to get here
        return stop(self, wait=wait)

    monkeypatch.setattr(TrajectoryWriter, "stop", stop_and_write)
    buffer.close(wait=False)
    assert stored_ids(tmp_path) == [0]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: closed with 2 trajectories not written."
    ]


def test_a_failure_without_any_thread_is_told_and_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(files, "allocate", full)
            buffer.add_trajectories([ITEM])
            with pytest.raises(WriteError, match="No space left"):
                buffer.flush()
        buffer.flush()
    assert stored_ids(tmp_path) == [0]


# -- without a close -------------------------------------------------------------------------------


def wait_for(path: Path) -> TrajectoryReplayBuffer:
    """The store of a buffer that was dropped, opened again as soon as it is let go."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
        except LockedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_buffer_that_is_dropped_writes_what_is_pending_and_lets_the_store_go(
    tmp_path: Path,
) -> None:
    gc.disable()  # no cycle keeps it
    try:
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
        buffer.add_trajectories([ITEM] * 50)
        del buffer
        with wait_for(tmp_path) as again:
            assert again.trajectory_ids == list(range(50))
    finally:
        gc.enable()


def test_the_store_of_a_dropped_buffer_that_was_interrupted_is_let_go_when_another_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    told: list[object] = []
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
    buffer.add_trajectories([ITEM])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
        patch.setattr(TrajectoryWriter, "let_go", interrupt)
        del buffer
        gc.collect()
    assert told == [KeyboardInterrupt]
    with wait_for(tmp_path) as buffer:
        assert buffer.trajectory_ids == [0]


def test_stores_whose_opening_is_interrupted_again_and_again_are_let_go(tmp_path: Path) -> None:
    wait_for(tmp_path).close()
    descriptors = len(os.listdir("/proc/self/fd"))
    num_interrupted = 0
    ends_at = time.monotonic() + 4
    with storm(0, 0.002) as is_open:
        while time.monotonic() < ends_at:
            buffer = None
            try:
                is_open[0] = True
                buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
                is_open[0] = False
            except KeyboardInterrupt:
                is_open[0] = False
                num_interrupted += 1
            except LockedError:  # the one before is let go by and by
                is_open[0] = False
            if buffer is not None:
                buffer.close()
    wait_for(tmp_path).close()
    assert num_interrupted > 10
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_buffers_that_are_dropped_leave_no_descriptor_and_no_mapping(tmp_path: Path) -> None:
    def open_one() -> None:
        with wait_for(tmp_path) as buffer:
            buffer.add_trajectories([{"image": torch.zeros(8, 2, 64, 64, 3)}])
        buffer = wait_for(tmp_path)
        buffer.sample(100)
        reader = ReplayReader(tmp_path)
        reader.sample(100)

    open_one()
    wait_for(tmp_path).close()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_one()
    wait_for(tmp_path).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_dropped_buffer_that_cannot_write_says_how_much_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
    buffer.add_trajectories([ITEM])
    buffer.flush()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "mmbuf"):
        patch.setattr(files, "allocate", full)
        buffer.add_trajectories([ITEM])
        del buffer
        wait_for(tmp_path).close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        f"{tmp_path}: a buffer was dropped without close, and 1 trajectories were not written: "
        f"[Errno 28] No space left on device"
    )
    assert stored_ids(tmp_path) == [0]
    assert len(names_of(tmp_path)) == 1


LEFT_OPEN = """
import builtins
from mmbuf import Channel, PreloadReplayBufferDataset, ReplayReader, TrajectoryCollector
from mmbuf.analysis import Tables

class Cycle:
    def __init__(self, held):
        self.held, self.me = held, self

buffer.flush()
reader = ReplayReader(path)
tables = Tables(path)
memory = TrajectoryReplayBuffer()
memory.add_trajectories([ITEM])
dataset = PreloadReplayBufferDataset(
    reader, None, batch_size=7, min_replay_buffer_size=1, min_demo_buffer_size=0
)
batches = iter(dataset)
channel = Channel(maxsize=4)
channel.put(ITEM)
collector = TrajectoryCollector()
collector.append(rewards=torch.ones(3))
held = [
    reader, reader.sample(9), reader.get_trajectory(0), tables, tables.steps.to_pandas(["t"]),
    memory, dataset, batches, next(batches), channel, collector, buffer,
]
del reader, tables, memory, dataset, batches, channel, collector, buffer
"""


@pytest.mark.parametrize(
    "way",
    ["left = held", "left = Cycle(held)", "builtins.left = Cycle(held)"],
    ids=["names", "cycle", "builtins"],
)
def test_a_script_that_leaves_all_open_ends_without_noise(tmp_path: Path, way: str) -> None:
    """What was there: Exception ignored in ... Watch.__del__ ... TypeError."""
    assert run_process(LEFT_OPEN + way + "\ndel held", tmp_path) == ""
    assert stored_ids(tmp_path) == list(range(50))


def test_nothing_has_a_del_that_needs_names_at_the_end_of_a_program() -> None:
    root = Path(files.__file__).parent
    assert [path.name for path in root.rglob("*.py") if "def __del__" in path.read_text()] == []


def test_a_watch_that_is_dropped_or_closed_gives_its_descriptor_back_once(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        signature = files.signature(file.fileno())
        before = len(os.listdir("/proc/self/fd"))
        watch = files.Watch(file.fileno())
        assert not watch.has_changed(signature)
        watch.close()
        others = [os.dup(file.fileno()) for _ in range(3)]  # one of them has its number now
        watch.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            watch.has_changed(signature)
        files.Watch(file.fileno())
        del watch
        gc.collect()
        for fd in others:
            os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == before
