"""Forks beside changes, signal handlers and interrupts: no child has half a change, nobody hangs.

A child that hangs is ended by an alarm.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from data import trajectory

from mmbuf import ReplayReader, TrajectoryReplayBuffer, forks
from mmbuf.forks import ChangeLock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def fork(in_child: Callable[[], bool] = lambda: True) -> None:
    """A child that must end well within ten seconds."""
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        is_right = False
        try:
            is_right = in_child()
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_waits_for_a_change_and_a_change_for_a_fork() -> None:
    lock = ChangeLock()
    steps: list[str] = []
    has_begun = threading.Event()

    def change() -> None:
        with lock, lock:
            has_begun.set()
            time.sleep(0.2)
            steps.append("changed")

    thread = threading.Thread(target=change)
    thread.start()
    assert has_begun.wait(10)
    fork(lambda: steps == ["changed"])
    thread.join()
    assert forks._forking == forks._changes == []

    forks._forking.append(-1)  # another thread is at it
    thread = threading.Thread(target=change)
    thread.start()
    time.sleep(0.1)
    assert len(steps) == 1
    forks._forking.clear()
    thread.join(10)
    assert len(steps) == 2


def test_a_change_that_does_not_end_keeps_no_fork_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.1)
    with ChangeLock():
        fork()
    assert forks._forking == forks._changes == []


@pytest.mark.parametrize("what", ["sample", "load"])
def test_a_signal_handler_within_a_fork_does_not_wait_for_it(tmp_path: Path, what: str) -> None:
    """It comes where the fork is told to begin: the fork goes on when the handler has ended."""
    handled: list[int] = []
    with (
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer,
        TrajectoryReplayBuffer() as memory,
    ):
        buffer.add_trajectories([trajectory(0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        with ReplayReader(tmp_path / "store") as reader:
            buffer.add_trajectories([trajectory(1)])
            buffer.flush()

            def handle(*_: object) -> None:
                if what == "load":
                    memory.load_checkpoint(tmp_path / "checkpoint")
                else:
                    reader.sample(4)
                handled.append(len(forks._forking))

            def trace(frame: FrameType, event: str, arg: Any) -> Any:
                if frame.f_code.co_name == "_before_fork":
                    sys.settrace(None)
                    os.kill(os.getpid(), signal.SIGALRM)
                return None

            before = signal.signal(signal.SIGALRM, handle)
            sys.settrace(trace)
            try:
                fork(lambda: len(reader) == (2 if what == "sample" else 1))
            finally:
                sys.settrace(None)
                signal.signal(signal.SIGALRM, before)
            assert reader.refresh() == (what == "load")
            assert len(reader) == 2
    assert len(handled) == 1


def fork_interrupted_at(line: int) -> bool:
    """A fork whose hooks before it are interrupted at this line of theirs; whether they were."""
    num_seen = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_seen
        num_seen += event == "line"
        if num_seen == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        is_ours = frame.f_globals.get("__name__") in ("mmbuf.forks", "mmbuf.window")
        return local if is_ours and frame.f_code.co_name.startswith("_before") else None

    sys.settrace(trace)
    try:
        fork()
    finally:
        sys.settrace(None)
    return num_seen >= line


def test_an_interrupt_at_any_line_of_the_hooks_of_a_fork_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    num_raised = 0
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.flush()
        with ReplayReader(tmp_path) as reader:
            while fork_interrupted_at(num_raised + 1):
                num_raised += 1
                assert forks._forking == forks._changes == []
                buffer.add_trajectories([trajectory(num_raised)])
                buffer.flush()
                assert reader.refresh()
    assert num_raised > 3


def test_buffers_that_are_made_beside_a_fork_do_not_disturb_it() -> None:
    told: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, told.append
    buffers = [TrajectoryReplayBuffer() for _ in range(100)]
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            TrajectoryReplayBuffer()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(30):
            fork()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
        sys.unraisablehook = before
    assert told == []
    assert len(buffers) == 100
