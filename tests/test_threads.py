"""One adds, four sample, one checkpoints, one clears the cache: rows are right, nobody hangs."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data import is_whole, opened, row_ids, trajectory

from mmbuf import ReplayReader, TrajectoryReplayBuffer

IMAGE = (64, 64)  # of 12 rows: 48 KiB, so that it is mapped
WINDOW = 6
pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """Should it hang, the stacks of all threads are shown."""
    faulthandler.dump_traceback_later(100, exit=False)
    yield
    faulthandler.cancel_dump_traceback_later()


class Crew:
    """Threads that work until the adder is done; the first failure ends them all."""

    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                while not self.is_done.is_set():
                    work()
            except BaseException as failure:
                self.failures.append(failure)
                self.is_done.set()

        thread = threading.Thread(target=run, name="mmbuf-test")
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self.is_done.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        assert self.failures == []


def sample(buffer: TrajectoryReplayBuffer, counts: list[int]) -> None:
    batch = buffer.sample(48)
    assert is_whole(batch)
    counts.append(len({i for i, _, _ in row_ids(batch)}))


@pytest.mark.parametrize("options", [{}, {"cache_size": 2}], ids=["all cached", "two cached"])
@pytest.mark.parametrize(
    "rounds", [60, pytest.param(3_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_every_row_is_right_while_all_work_at_once(
    tmp_path: Path, options: dict[str, Any], rounds: int
) -> None:
    crew = Crew()
    counts: list[int] = []
    saves: list[int] = []
    with opened(tmp_path / "live", sample_window_size=WINDOW, **options) as buffer:
        buffer.add_trajectories([trajectory(0, image=IMAGE)])

        def save() -> None:
            buffer.save_checkpoint(tmp_path / "saved")
            saves.append(1)

        for _ in range(4):
            crew.start(lambda: sample(buffer, counts))
        crew.start(save)
        crew.start(lambda: (buffer.clear_cache(), crew.is_done.wait(0.01)))
        for i in range(1, rounds):
            buffer.add_trajectories([trajectory(i, image=IMAGE)])
            if i % 10 == 0:
                buffer.flush()
            if crew.is_done.is_set():
                break
        crew.end()
        assert len(buffer) == rounds
        assert counts
        assert saves
        buffer.save_checkpoint(tmp_path / "saved")
    with ReplayReader(tmp_path / "saved") as reader:
        assert reader.trajectory_ids == list(range(rounds - WINDOW, rounds))
        assert is_whole(reader.sample(200))
