"""One thread adds, four sample, one checkpoints, one clears the cache: every row is right.

In a forked child with a watchdog, which writes the stacks of all threads and ends it should they
wait for each other.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
from children import Child, Parent

from mmbuf import ReplayReader, TrajectoryReplayBuffer, files, vm

WINDOW = 8
IMAGE = (32, 32, 3)


class Work:
    """Threads that run until one of them is done or fails."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.failures: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def repeat(self, name: str, function: Callable[[int], None], rounds: int | None = None) -> None:
        """Have a thread call ``function(round)``: so many times, or as long as the others run."""

        def run() -> None:
            number = 0
            try:
                while not self.is_over.is_set() and number != rounds:
                    function(number)
                    number += 1
                    self.rounds[name] = number
            except BaseException as failure:
                self.failures.append(failure)
                self.is_over.set()
            if rounds is not None:
                self.is_over.set()

        self._threads.append(threading.Thread(target=run, name=name))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def work_together(
    _: Parent, directory: Path, rounds: int, timeout_s: int, options: dict[str, Any]
) -> dict[str, int]:
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    store, path = directory / "store", directory / "checkpoint"
    started = added = 0
    lengths = np.random.default_rng(rounds)
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=store, sample_window_size=WINDOW, **options
    )

    def add(_: int) -> None:
        nonlocal started, added
        num_steps, num_envs = int(lengths.integers(1, 40)), int(lengths.integers(1, 4))
        item = data.coded(started, num_steps, num_envs, image=IMAGE)
        started += 1
        buffer.add_trajectories([item])
        added += 1
        if lengths.random() < 0.1:
            buffer.flush()

    def ids_of(batch: dict[str, Any]) -> Any:
        return data.codes_of(batch) // 1_000_000

    out: list[Any] = [None] * 4

    def sample(sampler: int, number: int) -> None:
        oldest = max(0, added - WINDOW)
        if sampler == 3 and number % 5 == 0:
            # The oldest of the window: it may have been evicted and written meanwhile.
            found = buffer.get_trajectory(max(0, added - WINDOW)).to_columns()
            flat = {key: value.flatten(0, 1) for key, value in found.items() if key != "curr_obs"}
            observation = {**found["curr_obs"]}
            observation["task"] = [text for row in observation["task"] for text in row]
            for key in ("states", "image"):
                observation[key] = observation[key].flatten(0, 1)
            data.codes_of({**flat, "curr_obs": observation})
            return
        if sampler % 2:
            batch = out[sampler] = buffer.sample(400, out=out[sampler])
        else:
            batch = buffer.sample(60)
        ids = ids_of(batch)
        assert oldest <= ids.min(), "a row of a trajectory that had left the window"
        assert ids.max() < started

    def save(number: int) -> None:
        before = added
        buffer.save_checkpoint(path)
        with ReplayReader(path) as reader:
            ids = reader.trajectory_ids
            assert ids == list(range(ids[0], ids[-1] + 1)), "a checkpoint of one moment"
            assert before - 1 <= ids[-1] < started
            assert set(ids_of(reader.sample(300)).tolist()) <= set(ids)

    def clear(_: int) -> None:
        buffer.clear_cache()
        time.sleep(0.002)

    with buffer:
        add(0)
        work = Work()
        work.repeat("adds", add, rounds)
        for sampler in range(4):
            work.repeat(f"samples {sampler}", lambda number, s=sampler: sample(s, number))
        work.repeat("checkpoints", save)
        work.repeat("clears", clear)
        work.run()
        buffer.flush()
        assert len(buffer) == started == added == rounds + 1
        newest = list(range(max(0, added - WINDOW), added))
        assert sorted(set(ids_of(buffer.sample(5_000)).tolist())) == newest
    with ReplayReader(store) as reader:
        assert reader.trajectory_ids == list(range(added))
        assert ids_of(reader.sample(5_000)).max() < added
    assert vm.MAPS.used == 0
    faulthandler.cancel_dump_traceback_later()
    return work.rounds


VARIANTS: dict[str, dict[str, Any]] = {
    "arrow": {},
    "a small cache": {"cache_size": 3},
    "no cache": {"enable_cache": False},
    "npy": {"trajectory_format": "npy", "cache_size": 5},
    "little may be pending": {"max_pending_bytes": 300_000},
    "little disk": {"max_disk_bytes": 16 << 20},
}


@pytest.mark.parametrize("variant", ["arrow", "a small cache"])
def test_seven_threads_get_right_rows_and_never_wait_for_each_other(
    tmp_path: Path, without_fsync: None, variant: str
) -> None:
    with Child(work_together, tmp_path, 60, 80, VARIANTS[variant]) as child:
        rounds = child.result(90)
    assert len(rounds) == 7, f"some did nothing: {rounds}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "little disk"])
def test_seven_threads_get_right_rows_for_long(tmp_path: Path, variant: str) -> None:
    with Child(work_together, tmp_path, 500, 105, VARIANTS[variant]) as child:
        rounds = child.result(108)
    assert len(rounds) == 7, f"some did nothing: {rounds}"


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt", "pkl"])
def test_nothing_is_opened_or_mapped_where_a_signal_handler_may_come(
    tmp_path: Path, trajectory_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be left open when the handler raises: no step of these is in the main thread."""
    found: list[str] = []
    main = threading.get_ident()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == main:
                found.append("".join(traceback.format_stack(limit=8)))
            return real(*arguments, **options)

        return call

    class Watched:
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            return watched(name, real) if name in ("open", "dup", "scandir") else real

    monkeypatch.setattr(files, "os", Watched())
    monkeypatch.setattr(files, "open", watched("open", open), raising=False)
    monkeypatch.setattr(vm, "_mmap", watched("mmap", vm._mmap))
    store, saved = tmp_path / "store", tmp_path / "saved"
    items = [data.trajectory(i, image=(64, 64)) for i in range(5)]
    with (
        TrajectoryReplayBuffer(
            auto_save=True,
            auto_save_path=store,
            trajectory_format=trajectory_format,
            cache_size=1,
            sample_window_size=3,
        ) as buffer,
        ReplayReader(store) as reader,
    ):
        buffer.add_trajectories(items)
        buffer.flush(sync=True)
        reader.refresh()
        for source in (buffer, reader):
            assert len(data.row_ids(source.sample(400))) == 400  # its images are of a block
            source.get_trajectory(source.trajectory_ids[0])
            source.get_stats()
        buffer.save_checkpoint(saved)
        buffer.clear_cache()
        buffer.load_checkpoint(saved)
        assert reader.refresh()
        reader.sample(10)
        buffer.clear()
    with ReplayReader(saved, follow=False) as reader:
        reader.sample(10)
    assert found == []
