"""Many threads at once: every row is right, and nobody waits for ever.

One thread adds, four sample, one checkpoints, one clears the cache; or one adds, saves, loads and
clears, and others sample it and read its store, also from another process. In a forked child with a
watchdog, which writes the stacks of all threads and ends it should they wait for each other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import torch
from attack import rows
from children import Child, Parent

from mmbuf import EmptyBufferError, ReplayReader, TrajectoryReplayBuffer, files, health, vm

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


class Rows:
    """What is known of rows that were sampled: those of one handle are of one trajectory."""

    def __init__(self) -> None:
        self._serials: dict[int, int] = {}  # by the mark of the uuid

    def check(self, batch: Mapping[str, Any]) -> None:
        """A batch, every value of it; of one with info that all of it is true."""
        codes = rows.checked(batch).codes
        if "info" not in batch:
            return
        serials, own_rows = np.divmod(codes, 1_000_000)
        marks, handled = batch["info"]["handle"].numpy().T
        assert np.array_equal(handled, own_rows), "handles"
        for mark, serial in zip(marks.tolist(), serials.tolist(), strict=True):
            assert self._serials.setdefault(mark, serial) == serial, "rows of another trajectory"


def read_on(parent: Parent, store: Path, cache_size: int | None) -> int:
    """Follow a store in a process of its own, until the parent speaks; how many batches came."""
    known, count = Rows(), 0
    with ReplayReader(store, cache_size=cache_size, sample_window_size=7) as reader:
        while not parent.has_spoken():
            with contextlib.suppress(EmptyBufferError):
                known.check(reader.sample(50, with_info=True))
                count += 1
            with contextlib.suppress(KeyError, IndexError):
                rows.serial_of(reader.get_trajectory(reader.trajectory_ids[count % 3]))
    return count


def replace_together(
    parent: Parent, directory: Path, seconds: float, options: dict[str, Any]
) -> dict[str, int]:
    faulthandler.dump_traceback_later(seconds + 40, exit=True)
    store, known = directory / "store", Rows()
    dice = np.random.default_rng(int(seconds))
    ends_at = time.monotonic() + seconds
    names: dict[str, str] = {}  # the uuid that a name was given to
    saved: list[Path] = []
    num_added = highest = 0
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=store, sample_window_size=5, **options
    )
    buffer.flush()
    parent.send("there is a store")

    def add() -> None:
        nonlocal num_added, highest
        for _ in range(int(dice.integers(1, 4))):
            assert buffer.trajectory_counter >= highest, "an id is given twice"
            buffer.add_trajectories([rows.content(2 * num_added)])  # even ones: of one schema
            highest = buffer.trajectory_ids[-1] + 1
            num_added += 1
        if dice.random() < 0.5:
            buffer.flush()

    def save() -> None:
        path = directory / f"checkpoint {dice.integers(3)}"
        buffer.save_checkpoint(path)
        saved.append(path)

    def load() -> None:
        if saved:
            buffer.load_checkpoint(saved[dice.integers(len(saved))])

    steps = [add, add, add, add, save, load, load, buffer.clear_cache, buffer.clear]

    def change(_: int) -> None:
        if time.monotonic() > ends_at:
            work.is_over.set()
        step = steps[dice.choice(len(steps), p=[0.2, 0.2, 0.1, 0.1, 0.15, 0.1, 0.1, 0.04, 0.01])]
        step()
        for entry in map(buffer.get_entry, buffer.trajectory_ids):
            if entry.file:
                assert names.setdefault(entry.file, entry.uuid) == entry.uuid, entry.file

    def sample(way: int, out: list[Any], number: int) -> None:
        with contextlib.suppress(EmptyBufferError):
            if way == 0:
                known.check(buffer.sample(60))
            elif way == 1:
                known.check(buffer.sample(60, with_info=True))
            else:
                out[0] = buffer.sample(40, out=out[0])
                known.check(out[0])

    def look(number: int) -> None:
        with contextlib.suppress(KeyError, IndexError):
            rows.serial_of(buffer.get_trajectory(buffer.trajectory_ids[-1 - number % 4]))

    def follow(reader: ReplayReader, number: int) -> None:
        with contextlib.suppress(EmptyBufferError):
            known.check(reader.sample(50, with_info=True))
        if number % 3 == 0:
            with contextlib.suppress(KeyError, IndexError):
                rows.serial_of(reader.get_trajectory(reader.trajectory_ids[number % 5]))

    with contextlib.ExitStack() as stack:
        stack.enter_context(buffer)
        add()
        buffer.flush()
        work = Work()
        work.repeat("changes", change)
        for way in range(3):
            out: list[Any] = [None]
            work.repeat(f"samples {way}", lambda n, way=way, out=out: sample(way, out, n))
        work.repeat("looks", look)
        for cache_size in (0, 3):
            reader = stack.enter_context(ReplayReader(store, cache_size=cache_size))
            work.repeat(f"reads {cache_size}", lambda n, reader=reader: follow(reader, n))
        work.run()
        buffer.flush()
    assert not any(finding.is_damage for finding in health.verify(store))
    assert vm.MAPS.used == 0
    faulthandler.cancel_dump_traceback_later()
    return work.rounds


REPLACING: dict[str, dict[str, Any]] = {
    "a cache of 3": {"cache_size": 3},
    "cold": {"cache_size": 0},
    "npy, cold": {"cache_size": 0, "trajectory_format": "npy"},
    "no mappings": {"enable_cache": False},
    "pt": {"cache_size": 2, "trajectory_format": "pt"},
    "little disk": {"cache_size": 3, "max_disk_bytes": 4 << 20},
}


def check_replacing(directory: Path, seconds: float, variant: str) -> None:
    with Child(replace_together, directory, seconds, REPLACING[variant]) as child:
        assert child.receive() == "there is a store"
        with Child(read_on, directory / "store", 0) as reading:
            rounds = child.result(seconds + 45)
            with contextlib.suppress(BrokenPipeError):  # it has failed, and says how
                reading.pipe.send("enough")
            assert reading.result() > 0
    assert len(rounds) == 7, f"some did nothing: {rounds}"


@pytest.mark.parametrize("variant", ["a cache of 3", "cold"])
def test_rows_are_right_while_all_is_replaced(
    tmp_path: Path, without_fsync: None, variant: str
) -> None:
    check_replacing(tmp_path, 5, variant)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("variant", REPLACING)
def test_rows_are_right_while_all_is_replaced_for_long(tmp_path: Path, variant: str) -> None:
    check_replacing(tmp_path, 60, variant)


def test_a_trajectory_that_is_just_added_can_be_read_as_soon_as_it_is_listed(
    tmp_path: Path,
) -> None:
    found: list[int] = []

    class Listed(dict[Any, Any]):
        def __setitem__(self, key: Any, entry: Any) -> None:
            super().__setitem__(key, entry)
            trajectory = buffer._window.get_trajectory(key)  # as another thread may
            found.append(int(trajectory.to_columns()["rewards"][0, 0]))

    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer._window.entries = Listed()
        for i in range(3):
            buffer.add_trajectories([{"rewards": torch.full((4, 2), float(i))}])
    assert set(found) == {0, 1, 2}  # again when they are written


FINDING = """
import sys, threading
import torch, mmbuf.sampling
from mmbuf import *  # what is not named in an import is imported when it is used
found = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            found.append(name)
sys.meta_path.insert(0, Finder())
def sample(source):
    for options in ({}, {"with_info": True}, {"as_numpy": True}):
        source.sample(8, **options)
    for sampler in (mmbuf.sampling.Prioritized(), mmbuf.sampling.FreshVersions(max_lag=1)):
        source.sample(8, sampler=sampler)
for form in ("arrow", "npy", "pt", "pkl"):
    path = f"{sys.argv[1]}/{form}"
"""
WRITING = """
    item = {"rewards": torch.ones(4, 2, 1), "versions": torch.ones(4, 2), "task": [["a"] * 2] * 4}
    with mmbuf.TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, trajectory_format=form, cache_size=1
    ) as buffer:
        buffer.add_trajectories([item] * 3)
        buffer.flush(sync=True)
        sample(buffer)
        buffer.save_checkpoint(path + " saved")
        buffer.load_checkpoint(path + " saved")
        with mmbuf.ReplayReader(path) as reader:
            reader.sample(8)
            reader.get_trajectory(0)
        buffer.clear()
        buffer.add_trajectories([item] * 3)
"""
READING = """
    with mmbuf.ReplayReader(path) as reader:
        sample(reader)
        reader.get_trajectory(reader.trajectory_ids[0])
        reader.refresh()
"""


def test_nothing_is_imported_where_a_signal_handler_may_come(tmp_path: Path) -> None:
    """An import that is interrupted may leave a lock held that all other imports wait for."""
    for calls in (WRITING, READING):  # in processes of their own: one imports for the other
        done = data.run_python(f"{FINDING}{calls}\nprint(found)", tmp_path)
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


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
