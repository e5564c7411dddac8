"""Checkpoints: what saving, loading, sharding and resuming promise, whatever happens meanwhile.

Not tested, since it cannot be suffered: a prefetched batch that a resume would drop (`sample` draws
when it is called), and a pickle too large (a buffer does not pickle).
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import (
    Halt,
    anonymous_bytes,
    columns_of,
    contents_of,
    counts_of,
    is_equal,
    is_whole,
    names_of,
    random_bits,
    row_ids,
    run_python,
    trajectory,
)

from mmbuf import (
    CorruptError,
    EmptyBufferError,
    LockedError,
    MmbufError,
    ReplayReader,
    SchemaError,
    TrajectoryReplayBuffer,
    VersionError,
    WriteError,
    checkpoint,
    files,
    health,
    storage,
)
from mmbuf.cache import TrajectoryCache
from mmbuf.writer import TrajectoryWriter

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
FORMATS = list(storage.FORMATS)
JSONS = ["metadata.json", "trajectory_index.json"]
RLINF_KEYS = ["num_samples", "trajectory_id", "max_episode_length", "shape", "model_weights_id"]
N = 12  # rows of a trajectory of the usual shape

by_format = pytest.mark.parametrize("form", FORMATS)
by_mode = pytest.mark.parametrize("is_saved", [False, True], ids=["memory", "saved"])


@pytest.fixture(autouse=True)
def _is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return tmp_path / "live"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def made(
    live: Path, is_saved: bool = True, form: str = "arrow", **options: Any
) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        auto_save=is_saved, auto_save_path=live, trajectory_format=form, **options
    )


def add(buffer: TrajectoryReplayBuffer, *numbers: int, **options: Any) -> None:
    buffer.add_trajectories([trajectory(i, **options) for i in numbers])


@contextmanager
def loaded(path: Path, *rank: int, **options: Any) -> Iterator[TrajectoryReplayBuffer]:
    """A memory-only buffer with what is in ``path``, or the part of ``rank`` of ``world_size``."""
    with TrajectoryReplayBuffer(**{"sample_window_size": 0, **options}) as buffer:
        load(buffer, path, *rank)
        yield buffer


def load(buffer: TrajectoryReplayBuffer, path: Path, *rank: int) -> None:
    if rank:
        buffer.load_checkpoint(path, is_distributed=True, local_rank=rank[0], world_size=rank[1])
    else:
        buffer.load_checkpoint(path)


def held(source: TrajectoryReplayBuffer | ReplayReader) -> dict[int, int]:
    """The number of the `trajectory` that each id holds, all of it, left-out steps included."""
    numbers = {}
    num_rows = 0
    for trajectory_id in source.trajectory_ids:
        columns = source.get_trajectory(trajectory_id).to_columns()
        number = int(columns["curr_obs"]["states"][0, 0, 0])
        image = columns["curr_obs"].get("image", columns["rewards"])
        expected = trajectory(number, *columns["rewards"].shape, image=tuple(image.shape[2:]))
        assert is_equal(columns, columns_of(expected))
        numbers[trajectory_id] = number
        num_rows += columns["rewards"].numel()
    assert source.total_samples == num_rows
    return numbers


def held_in(path: Path, *rank: int, **options: Any) -> dict[int, int]:
    with loaded(path, *rank, **options) as buffer:
        return held(buffer)


def sampled(source: TrajectoryReplayBuffer | ReplayReader) -> set[int]:
    """The numbers of the trajectories whose rows are drawn; all rows are whole."""
    batch = source.sample(300)
    assert is_whole(batch)
    return {i for i, _, _ in row_ids(batch)}


def same(*numbers: int) -> dict[int, int]:
    """What `held` gives where each trajectory's id is its number."""
    return {i: i for i in numbers}


def listing(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def files_of(form: str, *ids: int) -> list[str]:
    """What is in a checkpoint of these trajectories."""
    return sorted([*JSONS, *(f"trajectory_{i}_.{form}" for i in ids)])


def parts_of(path: Path) -> list[Path]:
    """The file, or the files of the directory."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def inodes(path: Path) -> list[int]:
    return [part.stat().st_ino for part in parts_of(path)]


def stamps(path: Path) -> list[tuple[int, int]]:
    """Which files they are, and when they were written to."""
    return [(part.stat().st_ino, part.stat().st_mtime_ns) for part in parts_of(path)]


def index_of(path: Path) -> dict[str, Any]:
    snapshot: dict[str, Any] = json.loads((path / "trajectory_index.json").read_text())
    return snapshot


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the index of the checkpoint ``path`` says, by hand."""
    snapshot = index_of(path)
    snapshot.pop("crc", None)  # RLinf's has none
    change(snapshot)
    (path / "trajectory_index.json").write_text(json.dumps(snapshot))


def checkpoint_of(path: Path, *numbers: int, form: str = "arrow", **options: Any) -> Path:
    """A checkpoint of these trajectories, with ids from 0 on."""
    with TrajectoryReplayBuffer(sample_window_size=0, trajectory_format=form) as buffer:
        add(buffer, *numbers, **options)
        buffer.save_checkpoint(path)
    return path


# -- which trajectories are saved ----------------------------------------------------------------


@by_format
def test_the_window_is_saved_and_nothing_else(tmp_path: Path, form: str) -> None:
    for is_saved in (False, True):
        path = tmp_path / f"checkpoint {is_saved}"
        with made(tmp_path / "live", is_saved, form, sample_window_size=2) as buffer:
            add(buffer, 0, 1, 2, 3, 4)
            buffer.save_checkpoint(path)
        assert listing(path) == files_of(form, 3, 4)
        assert held_in(path) == same(3, 4)
        assert held_in(path, 0, 2) == same(3)
        assert held_in(path, 1, 2) == same(4)


@by_mode
def test_the_counts_and_the_index_speak_of_the_window_only(
    live: Path, path: Path, is_saved: bool
) -> None:
    with made(live, is_saved, sample_window_size=2, seed=7) as buffer:
        add(buffer, 0, 1, 2)
        add(buffer, 3, num_steps=2)
        add(buffer, 4)
        buffer.save_checkpoint(path)
    snapshot = index_of(path)
    assert (snapshot["trajectory_id_list"], list(snapshot["trajectory_index"])) == (
        [3, 4],
        ["3", "4"],
    )
    entry = snapshot["trajectory_index"]["3"]
    assert [entry[key] for key in RLINF_KEYS] == [6, 3, 0, [2, 3], ""]
    metadata = json.loads((path / "metadata.json").read_text())
    keys = ("trajectory_format", "size", "total_samples", "trajectory_counter", "seed")
    assert [metadata[key] for key in keys] == ["arrow", 2, 18, 5, 7]


@by_mode
def test_a_full_load_keeps_counting(live: Path, path: Path, is_saved: bool) -> None:
    with made(live, is_saved, sample_window_size=2) as buffer:
        add(buffer, 0, 1, 2, 3, 4)
        buffer.save_checkpoint(path)
    with loaded(path) as buffer:
        assert (buffer.size, len(buffer), buffer.total_samples) == (2, 2, 2 * N)
        assert buffer.trajectory_counter == 5
        add(buffer, 5)
        assert held(buffer) == same(3, 4, 5)


@by_mode
def test_a_counter_beyond_the_window_is_kept(live: Path, path: Path, is_saved: bool) -> None:
    with made(live, is_saved) as buffer:
        add(buffer, 0, 1, 2)
        buffer.clear()
        buffer.save_checkpoint(path)
    with loaded(path) as buffer:
        add(buffer, 3)
        assert held(buffer) == same(3)


@pytest.mark.parametrize("has_sampled", [False, True])
def test_sampling_before_makes_no_difference(live: Path, path: Path, has_sampled: bool) -> None:
    with made(live, sample_window_size=3, cache_size=1) as buffer:
        add(buffer, 0, 1, 2, 3, 4, 5)
        if has_sampled:
            buffer.sample(50)
        add(buffer, 6)
        buffer.save_checkpoint(path)
    assert listing(path) == files_of("arrow", 4, 5, 6)
    assert held_in(path) == same(4, 5, 6)


@by_mode
def test_a_window_as_long_as_the_list_or_longer_is_saved_whole(
    tmp_path: Path, is_saved: bool
) -> None:
    for size in (0, 3, 4):
        with made(tmp_path / f"live {size}", is_saved, sample_window_size=size) as buffer:
            add(buffer, 0, 1, 2)
            buffer.save_checkpoint(tmp_path / str(size))
        assert held_in(tmp_path / str(size)) == same(0, 1, 2)


def test_files_outside_the_window_stay_in_the_live_directory(live: Path, path: Path) -> None:
    with made(live, sample_window_size=2) as buffer:
        add(buffer, 0, 1, 2, 3, 4)
        buffer.save_checkpoint(path)
        assert held(buffer) == same(0, 1, 2, 3, 4)
    assert names_of(live) == [f"trajectory_{i}_.arrow" for i in range(5)]


def test_a_small_window_is_loaded_into_a_large_one(live: Path, path: Path) -> None:
    with made(live, False, sample_window_size=3) as buffer:
        add(buffer, *range(8))
        buffer.save_checkpoint(path)
    with loaded(path, sample_window_size=8) as buffer:
        assert sampled(buffer) == {5, 6, 7}


@by_format
def test_what_was_loaded_from_elsewhere_is_saved_too(tmp_path: Path, form: str) -> None:
    first = checkpoint_of(tmp_path / "first", 0, 1, form=form)
    with loaded(first, trajectory_format=form) as buffer:
        add(buffer, 2)
        buffer.save_checkpoint(tmp_path / "second")
    shutil.rmtree(first)
    assert listing(tmp_path / "second") == files_of(form, 0, 1, 2)
    assert held_in(tmp_path / "second") == same(0, 1, 2)


@by_mode
@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one_are_saved_and_loaded(
    live: Path, path: Path, is_saved: bool, count: int
) -> None:
    with made(live, is_saved) as buffer:
        add(buffer, *range(count))
        buffer.save_checkpoint(path)
    assert listing(path) == files_of("arrow", *range(count))
    with loaded(path) as buffer:
        assert held(buffer) == same(*range(count))
        if not count:
            with pytest.raises(EmptyBufferError):
                buffer.sample(1)
        add(buffer, 7)
        assert held(buffer) == {**same(*range(count)), count: 7}
        assert sampled(buffer) == {*range(count), 7}


@by_mode
def test_a_window_that_is_exactly_full_is_saved(live: Path, path: Path, is_saved: bool) -> None:
    with made(live, is_saved, sample_window_size=3) as buffer:
        add(buffer, 0, 1, 2)
        buffer.save_checkpoint(path)
    with loaded(path, sample_window_size=3) as buffer:
        assert held(buffer) == same(0, 1, 2)
        assert sampled(buffer) == {0, 1, 2}


@pytest.mark.parametrize("is_cached", [False, True])
@by_mode
def test_every_combination_of_flags_saves_and_loads(
    live: Path, path: Path, is_saved: bool, is_cached: bool
) -> None:
    with made(live, is_saved, enable_cache=is_cached) as buffer:
        add(buffer, 0, 1)
        buffer.sample(4)
        buffer.save_checkpoint(path)
        expected = buffer.sample(50)
    with made(live.with_name("b"), is_saved, enable_cache=is_cached) as buffer:
        buffer.load_checkpoint(path)
        assert is_equal(buffer.sample(50), expected)
        assert held(buffer) == same(0, 1)


@by_mode
def test_a_directory_of_other_programs_keeps_their_temporaries(
    tmp_path: Path, path: Path, is_saved: bool
) -> None:
    others = [".cache.tmp", ".mine.0123456789ab.tmpx", ".notes.tmp"]
    (path / ".cache.tmp").mkdir(parents=True)
    (path / ".cache.tmp" / "precious").write_text("x")
    for name in others[1:]:
        (path / name).write_text("x")
    if is_saved:
        with made(path) as buffer:
            add(buffer, 0)
    else:
        with TrajectoryReplayBuffer() as buffer:
            add(buffer, 0)
            buffer.save_checkpoint(path)
    assert set(others) < set(listing(path))
    assert (path / ".cache.tmp" / "precious").read_text() == "x"
    (path / ".notes.tmp").unlink()  # the check for leaks takes it for ours


def test_a_checkpoint_that_is_mistaken_for_a_store_stays_as_it_is(live: Path, path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
    temporary = Path(files.temporary(str(path / "trajectory_2_.arrow")))
    temporary.write_bytes(b"half")
    before = listing(path)
    with pytest.raises(FileExistsError, match=r"expected a live store .*, got a checkpoint\."):
        made(path)
    assert listing(path) == before
    temporary.unlink()
    assert health.verify(path) == []
    assert not health.repair(path).has_changes
    assert listing(path) == files_of("arrow", 0, 1)


def test_an_empty_path_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        with pytest.raises(ValueError, match=r"^save_path: expected a path, got an empty one\.$"):
            buffer.save_checkpoint("")
        with pytest.raises(ValueError, match=r"^load_path: expected a path, got an empty one\.$"):
            buffer.load_checkpoint("")
        with pytest.raises(ValueError, match=r"^path: expected a path, got an empty one\.$"):
            ReplayReader("")
        with pytest.raises(ValueError, match=r"^auto_save_path: expected a path, got an empty"):
            TrajectoryReplayBuffer(auto_save=True)
        assert listing(tmp_path) == []
        buffer.save_checkpoint(Path(""))
    assert listing(tmp_path) == files_of("arrow", 0)


# -- saving leaves the buffer as it is -----------------------------------------------------------


@by_mode
@by_format
def test_saving_changes_nothing_in_the_buffer(
    live: Path, path: Path, is_saved: bool, form: str
) -> None:
    with made(live, is_saved, form, sample_window_size=3) as buffer:
        add(buffer, 0, 1, 2, 3)
        buffer.sample(20)
        buffer.flush()

        def state() -> list[Any]:
            return [
                buffer._window.generator.bit_generator.state,
                (buffer.trajectory_ids, buffer.window_ids, buffer.trajectory_counter),
                counts_of(buffer),
                buffer.trajectory_format,
                contents_of(live) if is_saved else None,
            ]

        before = state()
        for other in (None, "arrow", "pt"):
            buffer.save_checkpoint(path, trajectory_format=other)
            assert state() == before
        assert sampled(buffer) == {1, 2, 3}


@pytest.mark.parametrize("image", [(), (64, 64)])
def test_rows_that_are_evicted_while_they_are_saved_are_saved_right(
    path: Path, monkeypatch: pytest.MonkeyPatch, image: tuple[int, ...]
) -> None:
    is_writing, may_write = threading.Event(), threading.Event()
    write = storage.write

    def slow(*arguments: Any) -> Any:
        is_writing.set()
        assert may_write.wait(20)
        return write(*arguments)

    monkeypatch.setattr(storage, "write", slow)
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        add(buffer, 0, 1, image=image)
        thread = threading.Thread(target=buffer.save_checkpoint, args=(path,))
        thread.start()
        assert is_writing.wait(20)
        try:
            for i in range(2, 9):
                add(buffer, i, image=image)
                assert sampled(buffer) == {i - 1, i}
        finally:
            may_write.set()
            thread.join()
        buffer._window.cache.reclaim()
        assert sampled(buffer) == {7, 8}
    assert held_in(path) == same(0, 1)


@by_mode
def test_others_add_and_sample_while_one_saves(tmp_path: Path, is_saved: bool) -> None:
    is_done = threading.Event()
    failures: list[BaseException] = []

    def repeat(work: Callable[[int], object]) -> None:
        try:
            for i in range(3, 300):
                if is_done.is_set():
                    break
                work(i)
        except BaseException as failure:
            failures.append(failure)

    with made(tmp_path / "live", is_saved, sample_window_size=3) as buffer:
        add(buffer, 0, 1, 2, image=(64, 64))
        works = [lambda i: add(buffer, i, image=(64, 64)), lambda _: sampled(buffer)]
        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            for i in range(6):
                buffer.save_checkpoint(tmp_path / f"checkpoint {i % 3}")
        finally:
            is_done.set()
            for thread in threads:
                thread.join()
    assert failures == []
    for i in range(3):
        ids = held_in(tmp_path / f"checkpoint {i}")
        first = min(ids)
        assert ids == same(first, first + 1, first + 2)


def test_a_save_ends_though_others_add_faster_than_is_written(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saving, is_done = threading.Event(), threading.Event()
    write, sync_whole = storage.write, files.sync_whole

    def wait_for_pending() -> None:
        while buffer.get_stats()["pending_trajectories"] < 2 and not is_done.is_set():
            time.sleep(0.001)

    def slow_sync(file: str) -> None:
        is_saving.set()
        wait_for_pending()
        sync_whole(file)

    def slow_write(*arguments: Any) -> Any:
        if is_saving.is_set():
            wait_for_pending()
        return write(*arguments)

    def go_on() -> None:
        is_saving.wait(20)
        for i in range(3, 10_000):
            if is_done.wait(0.002):
                break
            add(buffer, i)

    monkeypatch.setattr(files, "sync_whole", slow_sync)
    monkeypatch.setattr(storage, "write", slow_write)
    with made(live, sample_window_size=3) as buffer:
        add(buffer, 0, 1, 2)
        adding = threading.Thread(target=go_on)
        saving = threading.Thread(target=buffer.save_checkpoint, args=(path,))
        adding.start()
        saving.start()
        saving.join(3)
        has_ended = not saving.is_alive()
        is_done.set()
        adding.join()
        saving.join()
    assert has_ended
    assert held_in(path) == same(0, 1, 2)


# -- formats -------------------------------------------------------------------------------------


@by_format
def test_another_format_converts_while_saving(tmp_path: Path, form: str) -> None:
    for source in ("memory", *FORMATS):
        is_saved = source != "memory"
        with made(tmp_path / source, is_saved, source if is_saved else "arrow") as buffer:
            add(buffer, 0, 1)
            path = tmp_path / f"checkpoint of {source}"
            buffer.save_checkpoint(path, trajectory_format=form)
        assert listing(path) == files_of(form, 0, 1)
        assert json.loads((path / "metadata.json").read_text())["trajectory_format"] == form
        with loaded(path) as buffer:
            assert held(buffer) == same(0, 1)
            assert sampled(buffer) == {0, 1}


def test_an_unknown_format_is_refused_before_anything_is_done(path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        with pytest.raises(ValueError, match="trajectory_format: expected one of"):
            buffer.save_checkpoint(path, trajectory_format="parquet")
    assert not path.exists()


def mixed(live: Path, order: list[str], **options: Any) -> TrajectoryReplayBuffer:
    """A buffer whose trajectory i is in the i-th format."""
    for i, form in enumerate(order):
        buffer = made(live, True, form, **options)
        add(buffer, i)
        if i + 1 < len(order):
            buffer.close()
    return buffer


@pytest.mark.parametrize("order", [FORMATS, FORMATS[::-1]], ids=["forward", "backward"])
def test_a_store_of_several_formats_keeps_each_files_own(
    live: Path, path: Path, order: list[str]
) -> None:
    with mixed(live, order) as buffer:
        buffer.save_checkpoint(path)
        assert sampled(buffer) == {0, 1, 2, 3}
    names = [f"trajectory_{i}_.{form}" for i, form in enumerate(order)]
    assert listing(path) == sorted([*JSONS, *names])
    assert [inodes(path / name) for name in names] == [inodes(live / name) for name in names]
    assert json.loads((path / "metadata.json").read_text())["trajectory_format"] == order[-1]
    with loaded(path) as buffer:
        assert held(buffer) == same(0, 1, 2, 3)
        assert sampled(buffer) == {0, 1, 2, 3}


@by_format
def test_a_store_of_several_formats_converts_what_is_in_another(
    live: Path, path: Path, form: str
) -> None:
    with mixed(live, FORMATS) as buffer:
        buffer.save_checkpoint(path, trajectory_format=form)
    assert listing(path) == files_of(form, 0, 1, 2, 3)
    assert held_in(path) == same(0, 1, 2, 3)
    name = f"trajectory_{FORMATS.index(form)}_.{form}"
    assert inodes(path / name) == inodes(live / name)


def test_what_has_no_file_yet_is_saved_in_the_buffers_format(tmp_path: Path) -> None:
    first = checkpoint_of(tmp_path / "first", 0, 1)
    with loaded(first, trajectory_format="pt") as buffer:
        add(buffer, 2)
        buffer.save_checkpoint(tmp_path / "second")
    assert listing(tmp_path / "second") == sorted(
        [*JSONS, "trajectory_0_.arrow", "trajectory_1_.arrow", "trajectory_2_.pt"]
    )
    metadata = json.loads((tmp_path / "second" / "metadata.json").read_text())
    assert metadata["trajectory_format"] == "pt"
    assert held_in(tmp_path / "second") == same(0, 1, 2)


@by_format
def test_leading_flags_and_metadata_come_through_every_format(path: Path, form: str) -> None:
    item = {
        **trajectory(0, 4, 3),
        "dones": random_bits("bool", (6, 3), 1),  # two epochs
        "prev_values": random_bits("bfloat16", (6, 3, 2), 2),
        "max_episode_length": 80,
        "model_weights_id": "weights/é",
    }
    with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
        buffer.add_trajectories([item])
        buffer.save_checkpoint(path)
        expected = buffer.sample(30)
    with loaded(path, seed=5) as buffer:
        found = buffer.get_trajectory(0)
        assert is_equal(found.dones, item["dones"])
        assert is_equal(found.prev_values, item["prev_values"])
        assert (found.max_episode_length, found.model_weights_id) == (80, "weights/é")
        assert is_equal(buffer.sample(30), expected)


# -- cost ----------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of all writes and copies."""
    sizes: list[int] = []
    pwrite, copy = os.pwrite, os.copy_file_range

    def counted(function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            sizes.append(function(*arguments))
            return sizes[-1]

        return call

    monkeypatch.setattr(os, "pwrite", counted(pwrite))
    monkeypatch.setattr(os, "copy_file_range", counted(copy))
    return sizes


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)


@by_format
def test_files_are_linked_and_no_row_is_written(
    live: Path, path: Path, written: list[int], form: str
) -> None:
    with made(live, True, form) as buffer:
        add(buffer, 0, 1, 2, image=(64, 64))
        buffer.flush()
        written.clear()
        buffer.save_checkpoint(path)
        assert sum(written) < N * 64 * 64 / 2
    for i in range(3):
        name = f"trajectory_{i}_.{form}"
        assert inodes(path / name) == inodes(live / name)
        assert {part.stat().st_nlink for part in parts_of(path / name)} == {2}


@by_format
def test_saving_again_reuses_what_is_there(live: Path, path: Path, form: str) -> None:
    with made(live, True, form, sample_window_size=3) as buffer:
        add(buffer, 0, 1, 2)
        buffer.save_checkpoint(path)
        kept = [path / f"trajectory_{i}_.{form}" for i in (1, 2)]
        before = [stamps(name) for name in kept]
        add(buffer, 3)
        links = os.link
        try:
            made_links: list[str] = []
            os.link = lambda source, target: (made_links.append(source), links(source, target))[1]
            buffer.save_checkpoint(path)
        finally:
            os.link = links
    assert {Path(source).name for source in made_links} <= {
        f"trajectory_3_.{form}",
        *(part.name for part in parts_of(path / f"trajectory_3_.{form}")),
    }
    assert len(made_links) == len(parts_of(path / f"trajectory_3_.{form}"))
    assert listing(path) == files_of(form, 1, 2, 3)
    assert held_in(path) == same(1, 2, 3)
    assert [stamps(name) for name in kept] == before


@by_format
def test_where_links_do_not_work_copies_are_made(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    no_links(monkeypatch)
    with made(live, True, form, sample_window_size=2) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
        add(buffer, 2)
        before = inodes(path / f"trajectory_1_.{form}")
        buffer.save_checkpoint(path)
    assert listing(path) == files_of(form, 1, 2)
    for i in (1, 2):
        name = f"trajectory_{i}_.{form}"
        found, known = parts_of(path / name), parts_of(live / name)
        assert [part.read_bytes() for part in found] == [part.read_bytes() for part in known]
        assert {part.stat().st_nlink for part in (*found, *known)} == {1}
    assert inodes(path / f"trajectory_1_.{form}") == before
    assert held_in(path) == same(1, 2)


def test_a_second_copy_costs_what_is_new(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    no_links(monkeypatch)
    with made(live) as buffer:
        add(buffer, *range(8), image=(64, 64))
        buffer.save_checkpoint(path)
        add(buffer, 8, image=(64, 64))
        buffer.flush()
        written.clear()
        buffer.save_checkpoint(path)
    size = (live / "trajectory_8_.arrow").stat().st_size
    index = sum((path / name).stat().st_size for name in JSONS)
    assert size <= sum(written) <= size + index + 100


@by_mode
def test_what_a_memory_only_buffer_saved_before_is_not_written_again(
    live: Path, path: Path, is_saved: bool
) -> None:
    with made(live, is_saved, sample_window_size=3) as buffer:
        add(buffer, 0, 1, 2)
        buffer.save_checkpoint(path)
        before = inodes(path / "trajectory_2_.arrow")
        buffer.save_checkpoint(path)
        add(buffer, 3, 4)
        buffer.save_checkpoint(path)
    assert inodes(path / "trajectory_2_.arrow") == before
    assert listing(path) == files_of("arrow", 2, 3, 4)


@LINUX_ONLY
@by_format
def test_saving_takes_the_memory_of_about_one_trajectory(live: Path, path: Path, form: str) -> None:
    size = 4 << 20
    with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
        for i in range(4):
            buffer.add_trajectories([{"x": torch.full((4, 2, size // 8), i, dtype=torch.uint8)}])
        buffer.save_checkpoint(path)  # what is allocated once
        shutil.rmtree(path)
        assert peak_bytes(lambda: buffer.save_checkpoint(path)) < 1.1 * size + (2 << 20)


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much ``work`` raises the memory of this process; Linux only."""

    def resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


@LINUX_ONLY
def test_what_is_loaded_is_in_memory_once_at_most(path: Path) -> None:
    size = 4 << 20
    with TrajectoryReplayBuffer() as buffer:
        for i in range(6):
            buffer.add_trajectories([{"x": torch.full((4, 2, size // 8), i, dtype=torch.uint8)}])
        buffer.save_checkpoint(path)
    with TrajectoryReplayBuffer() as buffer:
        before = anonymous_bytes()
        for _ in range(3):
            buffer.load_checkpoint(path)
            assert (buffer.size, buffer.total_samples) == (6, 48)
            assert set(
                buffer.sample(
                    200,
                )["x"][:, 0].tolist()
            ) == set(range(6))
        assert anonymous_bytes() - before < 2 * 200 * size // 8


# -- interrupted ---------------------------------------------------------------------------------

# All that changes what is on the disk. `os.open` counts where it makes a file.
CHANGES = (
    *("open", "write", "pwrite", "copy_file_range", "posix_fallocate", "ftruncate", "fsync"),
    *("link", "rename", "unlink", "mkdir", "rmdir"),
)


class Fault:
    """A disk that fails at the n-th change, and at all that come after if the fault lasts.

    One that lasts leaves what a killed process would.
    """

    def __init__(self, at: int, *, is_lasting: bool) -> None:
        self._at = at
        self._is_lasting = is_lasting
        self._count = 0
        self._lock = threading.Lock()

    @property
    def has_struck(self) -> bool:
        return self._count >= self._at

    @contextmanager
    def on(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                if hasattr(os, name):
                    patch.setattr(os, name, self._failing(getattr(os, name), name))
            yield

    def _failing(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return function(*arguments, **options)
            with self._lock:
                self._count += 1
                strikes = self._count == self._at or (self._is_lasting and self.has_struck)
            if strikes:
                raise OSError(errno.EIO, f"{name} failed")
            return function(*arguments, **options)

        return call


def add_tiny(buffer: TrajectoryReplayBuffer, *numbers: int) -> None:
    buffer.add_trajectories([{"x": torch.full((2, 1, 3), i)} for i in numbers])


def tiny_of(source: TrajectoryReplayBuffer) -> dict[int, int]:
    """As `held`, of trajectories of `add_tiny`."""
    numbers = {}
    for trajectory_id in source.trajectory_ids:
        columns = source.get_trajectory(trajectory_id).to_columns()
        numbers[trajectory_id] = int(columns["x"][0, 0, 0])
        assert is_equal(columns, {"x": torch.full((2, 1, 3), numbers[trajectory_id])})
    assert source.total_samples == 2 * len(numbers)
    return numbers


def tiny_in(path: Path) -> dict[int, int]:
    with loaded(path) as buffer:
        return tiny_of(buffer)


by_fault = pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "for good"])


def linked(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, copy_function=os.link)
    return target


def save_faultily(
    buffer: TrajectoryReplayBuffer, path: Path, fault: Fault, form: str | None
) -> None:
    with fault.on():
        try:
            buffer.save_checkpoint(path, trajectory_format=form)
        except WriteError:
            assert fault.has_struck


by_save = pytest.mark.parametrize(
    ("is_saved", "form", "other", "is_copied", "is_lasting"),
    [
        pytest.param(True, "arrow", None, False, False, id="links of arrow, once"),
        pytest.param(True, "arrow", None, False, True, id="links of arrow, for good"),
        pytest.param(True, "npy", None, True, True, id="copies of npy, for good"),
        pytest.param(False, "npy", None, False, False, id="rows as npy, once"),
        pytest.param(True, "arrow", "pt", False, True, id="arrow to pt, for good"),
    ],
)


@by_save
def test_a_new_checkpoint_that_is_interrupted_is_there_whole_or_not_at_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_saved: bool,
    form: str,
    other: str | None,
    is_copied: bool,
    is_lasting: bool,
) -> None:
    if is_copied:
        no_links(monkeypatch)
    outcomes = set()
    with made(tmp_path / "live", is_saved, form, sample_window_size=2) as buffer:
        add_tiny(buffer, 0, 1, 2)
        buffer.flush()
        at = 1
        while True:
            fault = Fault(at, is_lasting=is_lasting)
            parent = tmp_path / str(at)
            parent.mkdir()
            path = parent / "checkpoint"
            save_faultily(buffer, path, fault, other)
            outcomes.add(path.exists())
            if path.exists():
                assert tiny_in(path) == same(1, 2)
            elif not is_lasting:
                assert len(listing(parent)) <= 1  # what could not be removed, once
            buffer.save_checkpoint(path, trajectory_format=other)
            assert listing(parent) == ["checkpoint"]
            assert listing(path) == files_of(other or form, 1, 2)
            assert tiny_in(path) == same(1, 2)
            if not fault.has_struck:
                break
            at += 1
    assert at > 15
    assert outcomes == {False, True}


@by_save
def test_an_existing_checkpoint_is_the_old_or_the_new_one_when_the_save_is_interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_saved: bool,
    form: str,
    other: str | None,
    is_copied: bool,
    is_lasting: bool,
) -> None:
    old = tmp_path / "old"
    outcomes = []
    with made(tmp_path / "live", is_saved, form, sample_window_size=2) as buffer:
        add_tiny(buffer, 0, 1)
        buffer.save_checkpoint(old)
        add_tiny(buffer, 2)
        buffer.flush()
        at = 1
        while True:
            fault = Fault(at, is_lasting=is_lasting)
            path = linked(old, tmp_path / f"checkpoint {at}")
            with pytest.MonkeyPatch.context() as patch:
                if is_copied:
                    no_links(patch)
                save_faultily(buffer, path, fault, other)
            found = tiny_in(path)
            assert found in (same(0, 1), same(1, 2))
            outcomes.append(found == same(1, 2))
            buffer.save_checkpoint(path, trajectory_format=other)
            assert listing(path) == files_of(other or form, 1, 2)
            assert tiny_in(path) == same(1, 2)
            if not fault.has_struck:
                break
            at += 1
    assert at > 15
    assert outcomes == sorted(outcomes), "old until a certain point, and new from then on"
    assert not outcomes[0]
    assert outcomes[-2], "something can fail after that point"


@by_fault
def test_what_an_interrupted_save_left_is_gone_after_another_one_of_other_trajectories(
    live: Path, tmp_path: Path, is_lasting: bool
) -> None:
    old = tmp_path / "old"
    with made(live, True, sample_window_size=2) as buffer:
        add_tiny(buffer, 0, 1)
        buffer.save_checkpoint(old)
        interrupted = []
        add_tiny(buffer, 2)
        buffer.flush()
        at = 1
        while True:
            fault = Fault(at, is_lasting=is_lasting)
            path = linked(old, tmp_path / f"checkpoint {at}")
            interrupted.append(path)
            save_faultily(buffer, path, fault, None)
            if not fault.has_struck:
                break
            at += 1
        add_tiny(buffer, 3, 4)
        buffer.flush()
        for path in interrupted:
            buffer.save_checkpoint(path)
            assert listing(path) == files_of("arrow", 3, 4)
            assert tiny_in(path) == same(3, 4)


def test_a_directory_of_rlinf_is_the_old_or_the_new_one_when_a_save_over_it_is_interrupted(
    tmp_path: Path,
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add_tiny(buffer, 0)
        at = 1
        while True:
            fault = Fault(at, is_lasting=True)
            path = linked(FIXTURES / "rlinf_pt", tmp_path / str(at))
            save_faultily(buffer, path, fault, None)
            with loaded(path) as other:
                if other.size == 1:
                    assert tiny_of(other) == same(0)
                else:
                    assert hashes_of(other) == expected_of(path)
            buffer.save_checkpoint(path)
            if not fault.has_struck:
                break
            at += 1


@LINUX_ONLY
@by_mode
@pytest.mark.parametrize("form", ["arrow", "npy"])
def test_all_is_on_the_disk_itself_before_the_checkpoint_appears(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool, form: str
) -> None:
    synced: dict[int, set[str]] = {}  # inodes, and of directories the names that will survive
    unsynced: list[list[str]] = []
    rename = os.rename

    def fsync(fd: int) -> None:
        status = os.fstat(fd)
        is_directory = stat.S_ISDIR(status.st_mode)
        synced[status.st_ino] = set(os.listdir(fd)) if is_directory else set()

    def lost(directory: str) -> Iterator[str]:
        """What is in ``directory`` and could be gone after a power loss."""
        for where, directories, names in os.walk(directory):
            inode = os.stat(where).st_ino
            for name in (*directories, *names):
                inner = os.path.join(where, name)
                if os.stat(inner).st_ino not in synced or name not in synced.get(inode, ()):
                    yield inner

    def watched(source: str, target: str) -> None:
        if target == str(path):
            unsynced.append(list(lost(source)))
        if target == str(path / "trajectory_index.json"):
            assert os.stat(source).st_ino in synced
            unsynced.append([name for name in lost(str(path)) if "trajectory_2" in name])
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", watched)
    with made(live, is_saved, form, sample_window_size=2) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
        assert unsynced == [[]]
        assert path.name in synced[path.parent.stat().st_ino]
        add(buffer, 2)
        buffer.save_checkpoint(path)
        assert unsynced == [[], []]
        assert {*JSONS, f"trajectory_2_.{form}"} <= synced[path.stat().st_ino]


# -- where to ------------------------------------------------------------------------------------


def test_into_the_live_directory_itself_it_is_a_synced_flush(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    with made(live, sample_window_size=2) as buffer:
        add(buffer, 0, 1, 2)
        buffer.flush()
        before = listing(live)
        add(buffer, 3)
        synced.clear()
        buffer.save_checkpoint(live)
        names = ["trajectory_3_.arrow", "journal.jsonl", "."]
        assert {os.stat(live / name).st_ino for name in names} <= set(synced)
        assert listing(live) == sorted([*before, "trajectory_3_.arrow"])
        assert json.loads((live / "journal.jsonl").read_text().splitlines()[-1])["event"] == "sync"
    with made(live) as buffer:
        assert held(buffer) == same(0, 1, 2, 3)


def test_another_name_of_the_live_directory_is_the_live_directory(
    live: Path, tmp_path: Path
) -> None:
    with made(live) as buffer:
        add(buffer, 0)
        buffer.flush()
        before = listing(live)
        (tmp_path / "link").symlink_to(live)
        buffer.save_checkpoint(tmp_path / "link")
        buffer.save_checkpoint(live / ".." / "live")
        assert listing(live) == before
    assert listing(tmp_path) == ["link", "live"]


@by_mode
def test_another_live_store_is_refused_and_left_alone(
    live: Path, tmp_path: Path, is_saved: bool
) -> None:
    with made(tmp_path / "other") as other, made(live, is_saved) as buffer:
        add(buffer, 0)
        with pytest.raises(FileExistsError, match="got the live store"):
            buffer.save_checkpoint(tmp_path / "other")
        add(other, 5, 6)
        other.flush()
        before = contents_of(tmp_path / "other")
        with pytest.raises(FileExistsError, match="got the live store"):
            buffer.save_checkpoint(tmp_path / "other")
        assert contents_of(tmp_path / "other") == before
        assert held(other) == {0: 5, 1: 6}
    with pytest.raises(FileExistsError), loaded(live if is_saved else tmp_path / "other") as buffer:
        buffer.save_checkpoint(tmp_path / "other")
    assert held_in(tmp_path / "other") == {0: 5, 1: 6}


def test_a_file_is_refused_and_left_alone(path: Path) -> None:
    path.write_text("precious")
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        with pytest.raises(NotADirectoryError, match="save_path: expected a directory"):
            buffer.save_checkpoint(path)
    assert path.read_text() == "precious"


@by_format
def test_the_files_of_others_stay(path: Path, form: str) -> None:
    path.mkdir()
    (path / f"trajectory_0_.{form}").write_text("somebody's")
    (path / "notes.txt").write_text("mine")
    (path / "directory").mkdir()
    (path / "directory" / "more").write_text("yours")
    foreign = contents_of(path)
    with TrajectoryReplayBuffer(sample_window_size=1, trajectory_format=form) as buffer:
        for i in range(3):
            add(buffer, i)
            buffer.save_checkpoint(path)
            assert held_in(path) == same(i)
    found = contents_of(path)
    assert {name: found[name] for name in foreign} == foreign
    assert listing(path) == sorted(
        [*JSONS, f"trajectory_0_.{form}", "notes.txt", "directory", f"trajectory_2_.{form}"]
    )


def test_directories_above_are_made(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "a" / "b" / "c", 0)
    assert held_in(path) == same(0)


def test_an_index_names_nothing_outside_that_could_be_removed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    checkpoint_of(path, 0, 1)
    (path / "trajectory_0_.arrow").unlink()

    def change(snapshot: dict[str, Any]) -> None:
        snapshot["trajectory_index"]["0"]["file"] = "../precious"
        snapshot["trajectory_index"]["1"]["file"] = ""

    rewrite(path, change)
    checkpoint_of(path, 7)
    assert (tmp_path / "precious").read_text() == "precious"
    assert held_in(path) == {0: 7}


def test_a_damaged_checkpoint_is_replaced(path: Path) -> None:
    checkpoint_of(path, 0, 1)
    (path / "trajectory_index.json").write_text("{")
    checkpoint_of(path, 5, 6)
    assert held_in(path) == {0: 5, 1: 6}


def test_a_checkpoint_of_another_run_is_replaced_whole(path: Path) -> None:
    checkpoint_of(path, 0, 1, 2)
    checkpoint_of(path, 5, 6)
    assert held_in(path) == {0: 5, 1: 6}
    assert len(listing(path)) == 4
    checkpoint_of(path, 7)
    assert (len(listing(path)), held_in(path)) == (3, {0: 7})


@by_format
def test_trajectories_with_equal_bytes_are_saved_again_without_a_leftover(
    tmp_path: Path, form: str
) -> None:
    source = checkpoint_of(tmp_path / "source", 0, 0, 1, form=form)

    def as_rlinf(snapshot: dict[str, Any]) -> None:
        del snapshot["version"]

    if form in ("pt", "pkl"):
        rewrite(source, as_rlinf)  # there the bytes are the identity
    with loaded(source) as buffer:
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.save_checkpoint(tmp_path / "checkpoint")
        assert held_in(tmp_path / "checkpoint") == {0: 0, 1: 0, 2: 1}
        buffer.clear()
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert listing(tmp_path / "checkpoint") == JSONS


# -- ranks ---------------------------------------------------------------------------------------


@by_mode
def test_a_rank_outside_the_world_is_refused(live: Path, path: Path, is_saved: bool) -> None:
    checkpoint_of(path, 0)
    with made(live, is_saved) as buffer:
        for rank in (-1, 2, 5):
            with pytest.raises(ValueError, match=rf"local_rank: expected \[0, 2\), got {rank}"):
                load(buffer, path, rank, 2)
        assert buffer.size == 0


def test_a_world_of_nobody_is_refused(path: Path) -> None:
    checkpoint_of(path, 0)
    with TrajectoryReplayBuffer() as buffer:
        for size in (0, -1):
            with pytest.raises(ValueError, match=f"world_size: expected at least 1, got {size}"):
                load(buffer, path, 0, size)


def test_ranks_count_only_where_they_are_asked_for(path: Path) -> None:
    checkpoint_of(path, 0, 1)
    with TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(path, is_distributed=False, local_rank=9, world_size=0)
        assert held(buffer) == same(0, 1)


@pytest.mark.parametrize(
    ("count", "world_size", "expected"),
    [
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (3, 1, [[0, 1, 2]]),
        (2, 4, [[0], [1], [], []]),
        (0, 2, [[], []]),
    ],
)
def test_ranks_get_contiguous_parts_and_the_first_ones_one_more(
    tmp_path: Path, count: int, world_size: int, expected: list[list[int]]
) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(count))
    for rank, ids in enumerate(expected):
        for is_saved in (False, True):
            with made(tmp_path / str(rank), is_saved) as buffer:
                load(buffer, path, rank, world_size)
                assert held(buffer) == same(*ids)
                assert (buffer.size, buffer.total_samples) == (len(ids), N * len(ids))
                if ids:
                    assert sampled(buffer) == set(ids)


@by_mode
def test_no_two_ranks_give_the_same_id(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(7))
    given = []
    for rank in range(3):
        with made(tmp_path / str(rank), is_saved) as buffer:
            load(buffer, path, rank, 3)
            assert buffer.trajectory_counter == 7 + rank
            before = buffer.size
            add(buffer, 20, 21, 22)
            given.append(buffer.trajectory_ids[before:])
    assert given == [[7, 10, 13], [8, 11, 14], [9, 12, 15]]


@by_mode
def test_ranks_that_gave_ids_before_give_none_of_them_again(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(7))
    given = []
    for rank, num_before in enumerate([0, 20, 9]):
        with made(tmp_path / str(rank), is_saved) as buffer:
            add(buffer, *range(num_before))
            load(buffer, path, rank, 3)
            counter = buffer.trajectory_counter
            assert buffer.get_stats()["trajectory_counter"] == counter
            before = buffer.size
            add(buffer, 20, 21, 22)
            given.append(buffer.trajectory_ids[before:])
            assert given[-1][0] == counter
    # 7, 8 and 9 modulo 3, and not below 0, 20 and 9.
    assert given == [[7, 10, 13], [20, 23, 26], [9, 12, 15]]


@by_mode
def test_ids_rise_for_ever_however_often_something_is_loaded(
    tmp_path: Path, is_saved: bool
) -> None:
    lower = checkpoint_of(tmp_path / "lower", 0, 1)
    with made(tmp_path / "other") as other:
        add(other, *range(8))
        other.save_checkpoint(tmp_path / "higher")
    with made(tmp_path / "live", is_saved) as buffer:
        add(buffer, 5, 6, 7)
        ids = [2]
        for path in (lower, lower, tmp_path / "higher", lower, tmp_path / "higher"):
            buffer.load_checkpoint(path)
            add(buffer, 5)
            ids.append(buffer.trajectory_ids[-1])
        assert ids == [2, 3, 4, 8, 9, 10]
        buffer.load_checkpoint(lower)
        assert buffer.trajectory_counter == 11
    if is_saved:
        with made(tmp_path / "live") as buffer:
            assert (buffer.trajectory_ids, buffer.trajectory_counter) == ([0, 1], 11)


def test_the_journal_of_a_load_tells_the_id_that_is_given_next(live: Path, path: Path) -> None:
    checkpoint_of(path, *range(4))
    with made(live) as buffer:
        add(buffer, *range(9))
        load(buffer, path, 1, 2)
        assert (buffer.trajectory_ids, buffer.trajectory_counter) == ([2, 3], 9)
    events = [json.loads(line) for line in (live / "journal.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "load"]
    assert (event["trajectory_counter"], event["id_step"]) == (9, 2)
    with made(live) as buffer:
        add(buffer, 5, 6)
        assert held(buffer) == {2: 2, 3: 3, 9: 5, 11: 6}


def test_a_new_buffer_that_loads_goes_on_with_the_ids_of_the_saved_one(
    tmp_path: Path, path: Path
) -> None:
    with made(tmp_path / "saved") as buffer:
        add(buffer, 0, 1, 2)
        buffer.load_checkpoint(checkpoint_of(tmp_path / "lower", 5))
        buffer.save_checkpoint(path)
        add(buffer, 7, 8)
        expected = held(buffer)
    assert expected == {0: 5, 3: 7, 4: 8}
    for is_saved in (False, True):
        with made(tmp_path / "live", is_saved) as buffer:
            buffer.load_checkpoint(path)
            add(buffer, 7, 8)
            assert held(buffer) == expected


@by_mode
def test_an_empty_part_can_be_added_to(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 0, 1)
    with made(tmp_path / "live", is_saved) as buffer:
        load(buffer, path, 4, 5)
        assert (buffer.size, buffer.total_samples, buffer.trajectory_counter) == (0, 0, 6)
        with pytest.raises(EmptyBufferError):
            buffer.sample(1)
        add(buffer, 20, 21)
        assert held(buffer) == {6: 20, 11: 21}
        assert sampled(buffer) == {20, 21}


def test_a_part_that_is_opened_again_goes_on_with_its_own_ids(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(7))
    given = []
    for rank in range(3):
        with made(tmp_path / str(rank)) as buffer:
            load(buffer, path, rank, 3)
        for _ in range(2):
            with made(tmp_path / str(rank)) as buffer:
                add(buffer, 20)
                given.append(buffer.trajectory_ids[-1])
        with made(tmp_path / str(rank)) as buffer:
            buffer.clear()
        with made(tmp_path / str(rank)) as buffer:
            add(buffer, 21)
            assert held(buffer) == {13 + rank: 21}
    assert given == [7, 10, 8, 11, 9, 12]


@by_mode
def test_a_part_that_is_saved_and_loaded_whole_goes_on_with_its_own_ids(
    tmp_path: Path, is_saved: bool
) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(7))
    given = []
    for rank in range(3):
        own = tmp_path / f"checkpoint {rank}"
        with made(tmp_path / str(rank), is_saved) as buffer:
            load(buffer, path, rank, 3)
            add(buffer, 20)
            buffer.save_checkpoint(own)
        for again in range(2):
            with made(tmp_path / f"{rank} {again}", is_saved) as buffer:
                buffer.load_checkpoint(own)
                add(buffer, 21)
                buffer.save_checkpoint(own)
                given.append(buffer.trajectory_ids[-2:])
    assert given == [[7, 10], [10, 13], [8, 11], [11, 14], [9, 12], [12, 15]]


@by_mode
def test_parts_of_parts_give_no_id_twice(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(7))
    given: list[int] = []
    for rank in range(2):
        own = tmp_path / f"checkpoint {rank}"
        with made(tmp_path / str(rank), is_saved) as buffer:
            load(buffer, path, rank, 2)
            add(buffer, 20, 21)
            given += buffer.trajectory_ids
            buffer.save_checkpoint(own)
        for part in range(3):
            with made(tmp_path / f"{rank} {part}", is_saved) as buffer:
                load(buffer, own, part, 3)
                before = buffer.size
                add(buffer, 22, 23, 24)
                given += buffer.trajectory_ids[before:]
    assert given == [
        *(0, 1, 2, 3, 7, 9),
        *(11, 17, 23, 13, 19, 25, 15, 21, 27),
        *(4, 5, 6, 8, 10),
        *(12, 18, 24, 14, 20, 26, 16, 22, 28),
    ]
    assert len(set(given)) == len(given)


# -- load ----------------------------------------------------------------------------------------


@by_format
def test_loading_replaces_the_content(tmp_path: Path, form: str) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 5, 6, form=form)
    for is_saved in (False, True):
        with made(tmp_path / "live", is_saved, sample_window_size=2) as buffer:
            add(buffer, 0, 1, 2)
            assert sampled(buffer) == {1, 2}
            buffer.load_checkpoint(path)
            assert held(buffer) == {0: 5, 1: 6}
            assert sampled(buffer) == {5, 6}
            add(buffer, 7)
            assert held(buffer) == {0: 5, 1: 6, 3: 7}
            assert sampled(buffer) == {6, 7}


@by_mode
def test_another_schema_takes_the_place_of_the_old_one(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 5, 6)
    with made(tmp_path / "live", is_saved) as buffer:
        buffer.add_trajectories([{"x": torch.ones(1, 1, 2)}])
        buffer.sample(3)
        buffer.load_checkpoint(path)
        assert sampled(buffer) == {5, 6}
        with pytest.raises(SchemaError):
            buffer.add_trajectories([{"x": torch.ones(1, 1, 2)}])
        add(buffer, 7)
        buffer.flush()
        assert held(buffer) == {0: 5, 1: 6, 2: 7}


@by_mode
def test_an_empty_checkpoint_leaves_the_schema_free(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint")
    with made(tmp_path / "live", is_saved) as buffer:
        buffer.add_trajectories([{"x": torch.ones(1, 1, 2)}])
        buffer.load_checkpoint(path)
        assert (buffer.size, buffer.total_samples) == (0, 0)
        add(buffer, 7)
        buffer.flush()
        assert held(buffer) == {1: 7}
        buffer.save_checkpoint(tmp_path / "second")
    assert held_in(tmp_path / "second") == {1: 7}


@by_mode
def test_loading_twice_is_loading_once(tmp_path: Path, is_saved: bool) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 5, 6)
    with made(tmp_path / "live", is_saved) as buffer:
        for _ in range(2):
            buffer.load_checkpoint(path)
            assert held(buffer) == {0: 5, 1: 6}
            assert buffer.total_samples == 2 * N
            assert sampled(buffer) == {5, 6}
    if is_saved:
        assert len(names_of(tmp_path / "live")) == 2


def lose(snapshot: dict[str, Any]) -> None:
    del snapshot["trajectory_index"]["1"]


DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no directory": (shutil.rmtree, FileNotFoundError, "expected a store directory, got none"),
    "an empty directory": (
        lambda path: [(path / name).unlink() for name in listing(path)],
        FileNotFoundError,
        "expected a store or a checkpoint",
    ),
    "half an index": (
        lambda path: os.truncate(path / "trajectory_index.json", 500),
        CorruptError,
        "trajectory_index.json: expected JSON",
    ),
    "an empty index": (
        lambda path: os.truncate(path / "trajectory_index.json", 0),
        CorruptError,
        "trajectory_index.json: expected JSON",
    ),
    "no object": (
        lambda path: (path / "trajectory_index.json").write_text("[]"),
        CorruptError,
        "expected a JSON object, got list",
    ),
    "an entry is missing": (
        lambda path: rewrite(path, lose),
        CorruptError,
        "not an index: KeyError",
    ),
    "a file is missing": (
        lambda path: (path / "trajectory_1_.arrow").unlink(),
        CorruptError,
        r"trajectory_1_.arrow: expected a trajectory's file, got none",
    ),
    "a file is cut": (
        lambda path: os.truncate(path / "trajectory_1_.arrow", 1000),
        CorruptError,
        r"trajectory_1_.arrow: expected \d+ bytes, got 1000",
    ),
    "a column is missing": (
        lambda path: rewrite(path, lambda s: s["trajectory_index"]["1"]["parts"].pop()),
        CorruptError,
        "expected 5 columns",
    ),
    "a format that nobody knows": (
        lambda path: rewrite(path, lambda s: s["trajectory_index"]["1"].update(format="lance")),
        CorruptError,
        "trajectory_1_.arrow: .*lance",
    ),
    "a file outside": (
        lambda path: rewrite(
            path, lambda s: s["trajectory_index"]["1"].update(file="../live/trajectory_0_.arrow")
        ),
        CorruptError,
        "expected the name of a trajectory's file, got '../live/trajectory_0_.arrow'",
    ),
    "a schema of no dtype": (
        lambda path: rewrite(path, lambda s: s["schema"][0].update(dtype="float31")),
        CorruptError,
        "not an index",
    ),
    "no counter": (
        lambda path: rewrite(path, lambda s: s["metadata"].pop("trajectory_counter")),
        CorruptError,
        "not an index: KeyError",
    ),
    "a step of none": (
        lambda path: rewrite(path, lambda s: s["metadata"].update(id_step=0)),
        CorruptError,
        "not an index: ValueError",
    ),
    "a newer version": (
        lambda path: rewrite(path, lambda s: s.update(version=4)),
        VersionError,
        "trajectory_index.json: expected store version 3 or older, got 4. Update mmbuf.",
    ),
    "no metadata": (
        lambda path: rewrite(path, lambda s: s.update(metadata=None)),
        CorruptError,
        "not an index: TypeError",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_load_that_fails_changes_nothing(tmp_path: Path, damage: str) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 5, 6)
    break_it, kind, message = DAMAGES[damage]
    break_it(path)
    live = tmp_path / "live"
    with made(live) as saved, TrajectoryReplayBuffer() as in_memory:
        for buffer in (saved, in_memory):
            add(buffer, 0, 1, 2)
            buffer.sample(10)
            buffer.flush()
            before = contents_of(live)
            generator = buffer._window.generator
            state = generator.bit_generator.state
            with pytest.raises(kind, match=message):
                buffer.load_checkpoint(path)
            assert contents_of(live) == before
            assert buffer._window.generator is generator
            assert generator.bit_generator.state == state
            assert sampled(buffer) == {0, 1, 2}
            add(buffer, 3)
            buffer.flush()
            assert held(buffer) == same(0, 1, 2, 3)
    with made(live) as buffer:
        assert held(buffer) == same(0, 1, 2, 3)


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "empty": lambda m: m["rng_state"].clear(),
    "text": lambda m: m.update(rng_state="x"),
    "none": lambda m: m.update(rng_state=None),
    "another generator": lambda m: m["rng_state"].update(bit_generator="MT19937"),
    "no state": lambda m: m["rng_state"].pop("state"),
    "a state of text": lambda m: m["rng_state"]["state"].update(state="x"),
    "a negative state": lambda m: m["rng_state"]["state"].update(state=-1),
    "a state too large": lambda m: m["rng_state"]["state"].update(inc=1 << 200),
    "no flag": lambda m: m["rng_state"].pop("has_uint32"),
    "a rest too large": lambda m: m["rng_state"].update(uinteger=1 << 40),
    "a seed of text": lambda m: m.update(seed="x"),
    "a negative seed": lambda m: m.update(seed=-1),
}


def test_a_damaged_generator_is_told(path: Path) -> None:
    checkpoint_of(path, 5)
    whole = (path / "trajectory_index.json").read_text()
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        for damage, change in STATES.items():
            (path / "trajectory_index.json").write_text(whole)
            rewrite(path, lambda snapshot, change=change: change(snapshot["metadata"]))
            for rank in ((), (0, 2)):
                with pytest.raises(CorruptError, match="not the state of a generator") as caught:
                    load(buffer, path, *rank)
                assert caught.value.path == str(path), damage
            assert held(buffer) == same(0)


def test_an_index_that_is_cut_loads_nothing(path: Path) -> None:
    checkpoint_of(path, 5, 6)
    index = path / "trajectory_index.json"
    size = index.stat().st_size
    for cut_bytes in (1, 100, size // 2, size - 1, size):
        os.truncate(index, size - cut_bytes)
        for open_it in (held_in, ReplayReader):
            with pytest.raises(CorruptError) as caught:
                open_it(path)
            assert caught.value.path == str(index)


@by_format
def test_a_missing_file_of_our_own_is_named(tmp_path: Path, form: str) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 0, 1, form=form)
    files.remove(str(path / f"trajectory_1_.{form}"))
    with pytest.raises(CorruptError) as caught:
        held_in(path)
    assert caught.value.path == str(path / f"trajectory_1_.{form}")


def test_a_file_of_an_npy_directory_that_is_missing_is_told(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 0, 1, form="npy")
    parts_of(path / "trajectory_1_.npy")[0].unlink()
    with pytest.raises(CorruptError, match=r"trajectory_1_\.npy: expected"):
        held_in(path)


@by_format
def test_a_live_store_loads_as_a_checkpoint_does(tmp_path: Path, form: str) -> None:
    with made(tmp_path / "other", True, form, sample_window_size=2) as other:
        add(other, 0, 1, 2)
        other.flush()
        with loaded(tmp_path / "other") as buffer:
            assert held(buffer) == same(0, 1, 2)
            assert buffer.trajectory_counter == 3
        with made(tmp_path / "live") as buffer:
            buffer.load_checkpoint(tmp_path / "other")
            assert held(buffer) == same(0, 1, 2)


def test_an_own_live_store_can_be_loaded(live: Path) -> None:
    with made(live) as buffer:
        add(buffer, 0, 1, 2)
        buffer.load_checkpoint(live)
        assert held(buffer) == same(0, 1, 2)
        load(buffer, live, 0, 2)
        assert held(buffer) == same(0, 1)
        assert names_of(live) == ["trajectory_0_.arrow", "trajectory_1_.arrow"]


# -- load into a live store ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "is_copied"), [("arrow", False), ("npy", False), ("npy", True), ("pt", True)]
)
def test_a_live_store_stands_alone_after_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, is_copied: bool
) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", 5, 6, form=form)
    live = tmp_path / "live"
    if is_copied:
        no_links(monkeypatch)
    with made(live, True, form) as buffer:
        add(buffer, 0, 1, 2)
        buffer.load_checkpoint(path)
        shutil.rmtree(path)
        assert held(buffer) == {0: 5, 1: 6}
        assert sampled(buffer) == {5, 6}
        add(buffer, 7)
    with made(live, True, form) as buffer:
        assert held(buffer) == {0: 5, 1: 6, 3: 7}
        assert sampled(buffer) == {5, 6, 7}
        assert len(names_of(live, f".{form}")) == 3


@by_format
def test_a_name_in_a_store_never_is_that_of_another_trajectory(tmp_path: Path, form: str) -> None:
    paths = [
        checkpoint_of(tmp_path / "a", 5, 6, form=form),
        checkpoint_of(tmp_path / "b", 7, 8, 9, 10, form=form),
    ]
    owners: dict[str, set[str]] = {}

    def note(buffer: TrajectoryReplayBuffer) -> None:
        buffer.flush()
        for entry in map(buffer.get_entry, buffer.trajectory_ids):
            owners.setdefault(entry.file, set()).add(entry.uuid)

    with made(tmp_path / "live", True, form) as buffer:
        for number in range(2):
            add(buffer, 2 * number, 2 * number + 1)
            note(buffer)
            buffer.clear()  # its files are gone, and so are their names
            for path in paths:
                buffer.load_checkpoint(path)
                note(buffer)
    assert {name: len(uuids) for name, uuids in owners.items()} == dict.fromkeys(owners, 1)
    # Those that had no id of the store's yet have RLinf's names.
    plain = [f"trajectory_{i}_.{form}" for i in (0, 1, 2, 3, 4, 5)]
    assert sorted(name for name in owners if name.count(".") == 1) == plain


def test_a_load_that_is_interrupted_before_its_line_leaves_no_file_behind(
    live: Path, path: Path
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
    with made(live) as buffer:
        add(buffer, 9)
        buffer.flush()
        before = listing(live)
        writer, gate = buffer._writer, threading.Event()
        assert writer is not None
        load, seen = writer.load, []

        def late(contents: Any) -> None:
            """Its turn does not come before it is interrupted."""
            writer._add_call(gate.wait, 20)
            seen.append(".loading.json" in os.listdir(live))
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            load(contents)

        # In the background of a shell it is ignored, unless somebody says otherwise.
        former = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(writer, "load", late)
                with pytest.raises(KeyboardInterrupt):
                    buffer.load_checkpoint(path)
        finally:
            signal.signal(signal.SIGINT, former)
        gate.set()
        assert seen == [True]
        assert listing(live) == before
        assert held(buffer) == {0: 9}
        buffer.load_checkpoint(path)
        assert ".loading.json" not in listing(live)
    with made(live) as buffer:
        assert held(buffer) == same(0, 1)


def test_what_a_killed_load_has_brought_is_removed_and_not_taken_in(live: Path, path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0, 1, 2)
        buffer.save_checkpoint(path)
    with made(live) as buffer:
        add(buffer, 9)
    before = listing(live)

    def load_and_hang(parent: Parent) -> None:
        buffer = made(live)
        assert buffer._writer is not None
        buffer._writer.load = lambda contents: (parent.send(listing(live)), time.sleep(60))
        buffer.load_checkpoint(path)

    with Child(load_and_hang) as child:
        found = child.receive()
        brought = sorted(set(found) - set(before) - {".loading.json"})
        assert len(brought) == 3
        assert ".loading.json" in found
        assert health.verify(live) == []
    remark = "of an unfinished load; the next writer removes it."
    assert health.verify(live) == [
        health.Finding(str(live / name), remark, False) for name in brought
    ]
    assert not health.repair(live).has_changes
    assert listing(live) == found
    with made(live) as buffer:
        assert held(buffer) == {0: 9}
        assert listing(live) == before
    assert health.verify(live) == []


def test_a_load_whose_list_is_still_there_keeps_its_files(live: Path, path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 5)
        buffer.save_checkpoint(path)
    real = files.unlink

    def unlink(name: str) -> None:
        if name.endswith(".loading.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        real(name)

    with made(live) as buffer:
        add(buffer, 9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "unlink", unlink)
            buffer.load_checkpoint(path)
        assert held(buffer) == {0: 5}
    assert ".loading.json" in listing(live)
    assert health.verify(live) == []
    with made(live) as buffer:
        assert held(buffer) == {0: 5}
    assert ".loading.json" not in listing(live)


def test_a_load_of_an_own_checkpoint_reuses_the_live_files(live: Path, path: Path) -> None:
    with made(live) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
        before = [stamps(live / f"trajectory_{i}_.arrow") for i in range(2)]
        add(buffer, 2)
        buffer.load_checkpoint(path)
        assert held(buffer) == same(0, 1)
        assert [stamps(live / f"trajectory_{i}_.arrow") for i in range(2)] == before
        assert names_of(live) == ["trajectory_0_.arrow", "trajectory_1_.arrow"]
        add(buffer, 7)
    with made(live) as buffer:
        assert held(buffer) == {**same(0, 1), 3: 7}


@pytest.mark.parametrize(
    ("form", "is_copied", "is_lasting"),
    [
        pytest.param("arrow", False, False, id="links of arrow, once"),
        pytest.param("npy", True, True, id="copies of npy, for good"),
    ],
)
def test_a_live_store_holds_the_old_or_the_new_when_a_load_is_interrupted(
    tmp_path: Path, form: str, is_copied: bool, is_lasting: bool
) -> None:
    path = tmp_path / "checkpoint"
    with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
        add_tiny(buffer, 5)
        buffer.save_checkpoint(path)
    old, new = {0: 0}, {0: 5}
    with made(tmp_path / "pristine", True, form) as buffer:
        add_tiny(buffer, 0)
    before = listing(tmp_path / "pristine")
    outcomes = []
    at = 1
    while True:
        fault = Fault(at, is_lasting=is_lasting)
        live = tmp_path / f"live {at}"
        shutil.copytree(tmp_path / "pristine", live)
        with made(live, True, form) as buffer:
            with pytest.MonkeyPatch.context() as patch:
                if is_copied:
                    no_links(patch)
                with fault.on():
                    try:
                        buffer.load_checkpoint(path)
                    except OSError:
                        assert fault.has_struck
            found = tiny_of(buffer)
            assert found in (old, new)
            if found == old and not is_lasting:
                assert listing(live) == before
            killed = shutil.copytree(live, tmp_path / f"killed {at}")
        for reopened in (live, killed):
            with made(reopened, True, form) as buffer:
                assert tiny_of(buffer) == found
            if found == new or not is_lasting:
                assert len(names_of(reopened, f".{form}")) == 1
        outcomes.append(found == new)
        if not fault.has_struck:
            break
        at += 1
    assert outcomes == sorted(outcomes), "old until a certain point, and new from then on"
    assert {*outcomes} == {False, True}
    assert tiny_in(path) == new


def test_a_journal_that_cannot_be_appended_to_leaves_the_old_content_and_no_new_file(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_of(path, 5, 6)
    with made(live) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        before = contents_of(live)
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, "no space")
            patch.setattr(files, "append", lambda *_: (_ for _ in ()).throw(full))
            with pytest.raises(WriteError, match="no space"):
                buffer.load_checkpoint(path)
        assert contents_of(live) == before
        assert held(buffer) == same(0, 1)
        add(buffer, 2)
    with made(live) as buffer:
        assert held(buffer) == same(0, 1, 2)


def test_nothing_old_is_touched_before_the_new_content_is_journalled(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_of(path, 5, 6)
    append = files.append
    seen = []

    def watched(fd: int, data: bytes) -> None:
        found = contents_of(live)
        seen.append({name: found[name] for name in before} == before)
        append(fd, data)

    with made(live) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        before = contents_of(live)
        monkeypatch.setattr(files, "append", watched)
        buffer.load_checkpoint(path)
    assert seen == [True]


def test_a_process_killed_right_after_a_load_has_loaded(live: Path, path: Path) -> None:
    checkpoint_of(path, 5, 6)
    killed = live.with_name("killed")
    with made(live) as buffer:
        add(buffer, 0, 1, 2)
        buffer.load_checkpoint(path)
        shutil.copytree(live, killed)
    shutil.rmtree(path)
    with made(killed) as buffer:
        assert held(buffer) == {0: 5, 1: 6}
        assert sampled(buffer) == {5, 6}
        add(buffer, 7)
        assert held(buffer) == {0: 5, 1: 6, 3: 7}


def test_a_load_into_a_closed_buffer_or_a_save_of_one_is_refused(path: Path) -> None:
    checkpoint_of(path, 0)
    buffer = TrajectoryReplayBuffer()
    buffer.close()
    with pytest.raises(ValueError, match="load_checkpoint: expected an open buffer"):
        buffer.load_checkpoint(path)
    with pytest.raises(ValueError, match="save_checkpoint: expected an open buffer"):
        buffer.save_checkpoint(path)


@by_format
def test_a_name_in_a_checkpoint_never_is_that_of_another_trajectory(path: Path, form: str) -> None:
    owners: dict[str, set[str]] = {}
    for numbers in ([0, 1, 2], [5], [6, 7, 8, 9], []):
        checkpoint_of(path, *numbers, form=form)
        assert held_in(path) == dict(enumerate(numbers))
        for entry in index_of(path)["trajectory_index"].values():
            owners.setdefault(entry["file"], set()).add(entry["uuid"])
    assert {name: len(uuids) for name, uuids in owners.items()} == dict.fromkeys(owners, 1)
    plain = [f"trajectory_{i}_.{form}" for i in range(4)]
    assert sorted(name for name in owners if name.count(".") == 1) == plain
    metadata = json.loads((path / "metadata.json").read_text())
    assert metadata["names_used_below"] == 4


def test_a_checkpoint_that_is_saved_over_in_another_format_has_the_names_of_rlinf(
    live: Path, path: Path
) -> None:
    with made(live) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
        buffer.save_checkpoint(path, trajectory_format="pt")
        assert listing(path) == files_of("pt", 0, 1)
        add(buffer, 2)
        buffer.save_checkpoint(path, trajectory_format="pkl")
    assert listing(path) == files_of("pkl", 0, 1, 2)
    assert held_in(path) == same(0, 1, 2)


# -- a memory-only buffer and the files that it maps ---------------------------------------------


def save_where_it_was_loaded_from(path: Path, form: str, other: str | None) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    with loaded(path, sample_window_size=3, trajectory_format=form) as buffer:
        add(buffer, 3)
        buffer.save_checkpoint(path, trajectory_format=other)
        assert sampled(buffer) == {1, 2, 3}
        for i in buffer.window_ids:
            assert is_equal(buffer.get_trajectory(i).to_columns(), columns_of(trajectory(i)))
    assert held_in(path) == same(1, 2, 3)


@by_format
def test_a_buffer_that_saves_where_it_loaded_from_keeps_its_rows(path: Path, form: str) -> None:
    save_where_it_was_loaded_from(path, form, None)


@pytest.mark.parametrize(("form", "other"), [("arrow", "pt"), ("pt", "arrow")])
def test_a_buffer_that_converts_where_it_loaded_from_keeps_its_rows(
    path: Path, form: str, other: str
) -> None:
    save_where_it_was_loaded_from(path, form, other)


@pytest.mark.parametrize("name", ["step_1", "latest"])
def test_files_that_a_buffer_lists_stay_where_it_saves_by_another_name_of_their_directory(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "step_1"
    (tmp_path / "latest").symlink_to("step_1")
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, *range(6))
        buffer.save_checkpoint(path)
    with loaded(tmp_path / name, sample_window_size=3) as buffer:
        buffer.save_checkpoint(path)
        assert held(buffer) == same(*range(6))
    assert held_in(path) == same(3, 4, 5)


def test_what_a_buffer_uses_in_a_directory_is_told_while_trajectories_go(path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
    with loaded(path) as buffer:
        window = buffer._window
        assert window.files_in(str(path)) == {"trajectory_0_.arrow", "trajectory_1_.arrow"}
        del window.entries[0]  # by another thread, in the middle of it
        assert window.files_in(str(path)) == {"trajectory_1_.arrow"}


# -- saved over while others are on it ------------------------------------------------------------


def save_over(path: Path, *numbers: int, form: str = "arrow", **options: Any) -> None:
    """Save ``numbers``: the newest that are in ``path``, if any, and new ones."""
    with loaded(path, sample_window_size=len(numbers), trajectory_format=form) as buffer:
        add(buffer, *(n for n in numbers if n not in held(buffer).values()), **options)
        buffer.save_checkpoint(path)
    with TrajectoryReplayBuffer() as buffer:  # what that one had in use goes with the next save
        buffer.load_checkpoint(path)
        buffer.save_checkpoint(path)


@by_format
def test_a_reader_of_a_checkpoint_follows_to_the_new_one(path: Path, form: str) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    with ReplayReader(path) as reader, ReplayReader(path.parent / "check*") as other:
        for numbers in ((1, 2, 3), (3, 4, 5), (6, 7, 8)):
            save_over(path, *numbers, form=form)
            for each in (reader, other):
                assert sampled(each) == set(numbers)
                assert set(held(each).values()) == set(numbers)


@by_format
def test_a_reader_that_does_not_follow_goes_on_with_what_is_left(
    path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint_of(path, 0, 1, 2, 3, form=form)
    with ReplayReader(path, follow=False) as reader:
        save_over(path, 2, 3, 4, form=form)
        assert sampled(reader) == {2, 3}
        assert reader.trajectory_ids == [2, 3]
        with pytest.raises(KeyError):
            reader.get_trajectory(0)
    assert [message.split(":")[1] for message in caplog.messages] == [
        " the files of trajectories [0, 1] were removed by who writes there"
    ]


@by_format
@pytest.mark.parametrize("window_size", [0, 3, 100])
def test_a_memory_only_buffer_goes_on_with_what_is_left(
    path: Path, form: str, window_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint_of(path, 0, 1, 2, 3, form=form)
    with loaded(path, sample_window_size=window_size) as buffer:
        add(buffer, 7)
        save_over(path, 3, 4, 5, form=form)
        assert sampled(buffer) == {3, 7}
        assert held(buffer) == {3: 3, 4: 7}
        assert (len(buffer), buffer.total_samples) == (2, 2 * N)
        add(buffer, 8)
        assert sampled(buffer) == {3, 7, 8}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("form", ["arrow", "npy"])
def test_a_memory_only_buffer_keeps_the_rows_that_it_has(path: Path, form: str) -> None:
    checkpoint_of(path, 0, 1, 2, form=form, image=(64, 64, 3))
    with loaded(path) as buffer:
        assert sampled(buffer) == {0, 1, 2}
        save_over(path, 5, form=form, image=(64, 64, 3))
        assert [name for name in listing(path) if name.startswith("trajectory_0")] == []
        for _ in range(2):
            assert sampled(buffer) == {0, 1, 2}
            assert held(buffer) == same(0, 1, 2)
            buffer.clear_cache()  # gives back only what can be read again
        buffer.save_checkpoint(path.with_name("again"))
        assert buffer.trajectory_ids == [0, 1, 2]
    assert set(held_in(path.with_name("again")).values()) == {0, 1, 2}


def test_a_buffer_of_many_cold_trajectories_saves_what_is_left(path: Path) -> None:
    checkpoint_of(path, *range(6))
    with loaded(path, sample_window_size=3) as buffer:
        save_over(path, 4, 5, 6)
        buffer.save_checkpoint(path.with_name("again"))
        assert sampled(buffer) == {4, 5}
        assert buffer.trajectory_ids == [4, 5]
    assert set(held_in(path.with_name("again")).values()) == {4, 5}


def test_a_checkpoint_that_is_made_anew_with_other_names_is_found_again(path: Path) -> None:
    checkpoint_of(path, 0, 1, 2)
    with (
        loaded(path) as buffer,
        ReplayReader(path) as reader,
        ReplayReader(path, follow=False) as frozen,
    ):
        path.rename(path.with_name("old"))
        with loaded(path.with_name("old")) as other:
            other.load_checkpoint(path.with_name("old"), True, 1, 2)  # trajectory 2 only
            add(other, 8)
            other.save_checkpoint(path)
        (path / "trajectory_2_.arrow").rename(path / "trajectory_2_x.arrow")
        rewrite(
            path, lambda index: index["trajectory_index"]["2"].update(file="trajectory_2_x.arrow")
        )
        assert (sampled(buffer), sampled(frozen), sampled(reader)) == ({2}, {2}, {2, 8})
        assert (held(buffer), held(frozen)) == (same(2), same(2))


@by_format
def test_a_file_that_a_checkpoint_still_lists_is_missed_by_all(path: Path, form: str) -> None:
    checkpoint_of(path, 0, 1, form=form)
    with (
        loaded(path) as buffer,
        ReplayReader(path) as reader,
        ReplayReader(path, follow=False) as frozen,
    ):
        files.remove(str(path / f"trajectory_1_.{form}"))
        for each in (buffer, reader, frozen):
            for _ in range(2):
                with pytest.raises(CorruptError, match="the file is missing"):
                    each.sample(200)
            assert each.trajectory_ids == [0, 1]


def test_a_forked_child_goes_on_without_what_a_save_removed(path: Path) -> None:
    checkpoint_of(path, 0, 1, 2)
    with loaded(path) as buffer, Child(sample_when_told, buffer) as child:
        save_over(path, 2, 3)
        child.pipe.send("go")
        assert child.result() == {2}
        assert sampled(buffer) == {2}


def sample_when_told(parent: Parent, buffer: TrajectoryReplayBuffer) -> set[int]:
    parent.receive()
    return sampled(buffer)


def test_threads_that_miss_a_file_at_once_all_go_on(path: Path) -> None:
    for round_ in range(10):
        checkpoint_of(path, *range(20))
        with (
            loaded(path) as buffer,
            ReplayReader(path) as reader,
            ReplayReader(path, follow=False) as frozen,
            ThreadPoolExecutor(9) as threads,
        ):
            save_over(path, 18, 19, 20)
            sources: list[Any] = [buffer, reader, frozen] * 3
            found = list(threads.map(sampled, sources))
            assert found == [{18, 19}, {18, 19, 20}, {18, 19}] * 3, round_
        shutil.rmtree(path)


@by_format
@pytest.mark.parametrize("is_other_schema", [False, True], ids=["same", "other schema"])
def test_what_is_added_after_an_empty_part_was_loaded_is_read_again(
    live: Path, path: Path, form: str, is_other_schema: bool
) -> None:
    """The part had columns, and no trajectory that would hold the next ones to them."""
    checkpoint_of(path, 0, form=form)
    image = (4, 4, 3) if is_other_schema else ()
    with made(live, form=form) as buffer, ReplayReader(live) as reader:
        load(buffer, path, 1, 2)
        assert not reader.refresh()
        assert (buffer.schema, reader.schema) == (None, None)
        add(buffer, 5, 6, image=image)
        buffer.flush()
        reader.refresh()
        assert held(reader) == held(buffer) == {2: 5, 4: 6}
    with made(live, form=form) as buffer:
        assert held(buffer) == {2: 5, 4: 6}


@by_mode
@pytest.mark.parametrize("is_other_schema", [False, True], ids=["same", "other schema"])
def test_whoever_reads_while_another_thread_loads_finds_the_old_rows_or_the_new(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool, is_other_schema: bool
) -> None:
    checkpoint_of(path, 5, 6, image=(8, 8, 3) if is_other_schema else ())
    with made(live, is_saved) as buffer:
        add(buffer, 0, 1)
        halt = Halt(monkeypatch, TrajectoryCache, "open", lambda *_: True)
        halt.run(lambda: buffer.load_checkpoint(path))
        assert (len(buffer), buffer.is_ready(2)) == (2, True)
        assert buffer.trajectory_ids == buffer.window_ids == [0, 1]
        assert buffer.get_entry(0).trajectory_id == 0
        loading = threading.Timer(0.3, halt.result)
        loading.start()
        assert sampled(buffer) == {5, 6}  # and waits: half of it is there
        loading.join()
        assert held(buffer) == {0: 5, 1: 6}
        with pytest.raises(KeyError, match="trajectory 7"):
            buffer.get_trajectory(7)


@by_mode
def test_a_load_that_there_are_no_addresses_for_changes_nothing(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("no addresses")

    checkpoint_of(path, 7, image=(4, 4, 3))
    with made(live, is_saved) as buffer:
        add(buffer, 0, 1)
        buffer.flush()
        before = listing(live) if is_saved else []
        with monkeypatch.context() as patch:
            patch.setattr("mmbuf.cache.Places", refuse)
            with pytest.raises(MemoryError, match="no addresses"):
                buffer.load_checkpoint(path)
        assert (listing(live) if is_saved else []) == before
        assert held(buffer) == {0: 0, 1: 1}
        assert sampled(buffer) == {0, 1}
        add(buffer, 2)
        assert held(buffer) == {0: 0, 1: 1, 2: 2}
        buffer.clear()
        with monkeypatch.context() as patch:
            patch.setattr("mmbuf.cache.Places", refuse)
            with pytest.raises(MemoryError, match="no addresses"):
                add(buffer, 3, image=(4, 4, 3))
        add(buffer, 4)
        assert held(buffer) == {3: 4}
        assert sampled(buffer) == {4}


def test_an_interrupted_load_counts_what_the_files_take_on_the_disk(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    checkpoint_of(path, 7)
    with made(live, max_disk_bytes=100_000, sample_window_size=1) as buffer:
        add(buffer, 0, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(TrajectoryWriter, "remove_dead_files", interrupt)
            with pytest.raises(KeyboardInterrupt):
                buffer.load_checkpoint(path)
        assert held(buffer) == {0: 7}
        assert list(buffer._budget._sizes) == [0]


def test_no_list_of_an_unfinished_load_or_save_takes_away_what_is_no_trajectory(
    live: Path, path: Path
) -> None:
    names = ["journal.jsonl", "trajectory_index.json", "metadata.json", "notes.txt", "../outside"]
    with made(live) as buffer:
        add(buffer, 0)
    (live / "notes.txt").write_text("mine")
    (live / ".loading.json").write_text(json.dumps([*names, "trajectory_0_.arrow"]))
    checkpoint_of(path, 1)
    (path / "notes.txt").write_text("mine")
    (path / ".saving.json").write_text(json.dumps(names))
    (live.parent / "outside").write_text("another's")
    with made(live) as buffer:
        assert held(buffer) == {0: 0}
        buffer.load_checkpoint(path)
        buffer.save_checkpoint(path)
    assert (live / "notes.txt").read_text() == (path / "notes.txt").read_text() == "mine"
    assert (live.parent / "outside").read_text() == "another's"
    assert not (live / ".loading.json").exists()
    assert set(held_in(path).values()) == {1}


def save_over_at_first_link(
    patch: pytest.MonkeyPatch, path: Path, *numbers: int, form: str
) -> list[str]:
    """Save over ``path`` just before the first file is linked elsewhere; what was to be linked."""
    real = files.link_or_copy
    sources: list[str] = []

    def link_or_copy(source: str, target: str) -> None:
        sources.append(source)
        if len(sources) == 1:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(files, "link_or_copy", real)
                save_over(path, *numbers, form=form)
        real(source, target)

    patch.setattr(files, "link_or_copy", link_or_copy)
    return sources


@by_format
def test_a_buffer_saves_what_is_left_where_its_files_go_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    checkpoint_of(path, 0, 1, 2, 3, form=form)
    with loaded(path, trajectory_format=form) as buffer:
        add(buffer, 9)
        sources = save_over_at_first_link(monkeypatch, path, 2, 3, 4, form=form)
        buffer.save_checkpoint(path.with_name("again"))
        assert buffer.trajectory_ids == [2, 3, 4]
    assert len(sources) == 3  # one in vain, then the two that are left
    assert set(held_in(path.with_name("again")).values()) == {2, 3, 9}


@by_format
def test_a_store_loads_the_new_checkpoint_where_one_is_saved_meanwhile(
    live: Path, path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    checkpoint_of(path, 0, 1, 2, 3, form=form)
    with made(live, form=form) as buffer:
        add(buffer, 9)
        save_over_at_first_link(monkeypatch, path, 2, 3, 4, form=form)
        buffer.load_checkpoint(path)
        assert set(held(buffer).values()) == {2, 3, 4}
    assert len([name for name in listing(live) if name.endswith(f".{form}")]) == 3


def test_a_missing_file_of_a_checkpoint_that_changes_all_the_time_is_told_in_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_of(path, 0, 1)
    (path / "trajectory_1_.arrow").unlink()
    real = checkpoint.check_files

    def check_files(directory: str, contents: Any) -> None:
        rewrite(path, lambda index: index)
        real(directory, contents)

    monkeypatch.setattr(checkpoint, "check_files", check_files)
    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.1)
    with TrajectoryReplayBuffer() as buffer, pytest.raises(CorruptError, match="got none"):
        buffer.load_checkpoint(path)


def save_over_and_over(parent: Parent, live: Path, path: Path) -> int:
    """Save a window that moves on, until told to end."""
    saves = 0
    with made(live, sample_window_size=4, max_disk_bytes=200_000) as buffer:
        while not parent.has_spoken():
            add(buffer, buffer.trajectory_counter)
            buffer.save_checkpoint(path)
            saves += 1
            if saves == 1:
                parent.send("saved")
    return saves


def test_whatever_is_on_a_checkpoint_that_is_saved_over_all_the_time_goes_on(
    live: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    with Child(save_over_and_over, live, path) as child:
        assert child.receive() == "saved"
        deadline = time.monotonic() + 5
        seen: set[int] = set()
        with (
            ReplayReader(path) as reader,
            ReplayReader(path, cache_size=0) as cold,
            made(path.with_name("own")) as own,
        ):
            while time.monotonic() < deadline:
                seen |= sampled(reader) | sampled(cold)
                with ReplayReader(path, follow=False) as frozen, loaded(path) as buffer:
                    for each in (frozen, buffer):
                        with suppress(EmptyBufferError):  # all of it may have gone by now
                            sampled(each)
                    buffer.save_checkpoint(path.with_name("again"))
                own.load_checkpoint(path)
                assert 1 <= len(held(own)) <= 4
        child.pipe.send("end")
        assert child.result() > 20
        assert len(seen) > 10


# -- several who save to one path ----------------------------------------------------------------


def paused(patch: pytest.MonkeyPatch, path: Path, meanwhile: Callable[[], None]) -> None:
    """Call ``meanwhile`` once, in the save that comes first, before it replaces the index."""
    real, is_done = files.sync, threading.Event()

    def sync(name: str) -> None:
        if name == str(path) and not is_done.is_set():
            is_done.set()
            meanwhile()
        real(name)

    patch.setattr(files, "sync", sync)


def test_a_second_save_to_an_existing_checkpoint_waits_for_the_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrajectoryReplayBuffer() as first, TrajectoryReplayBuffer() as second:
        add(first, 0)
        first.save_checkpoint(path)
        add(first, 1)
        add(second, 2)
        late = threading.Thread(target=second.save_checkpoint, args=(path,))
        seen = []

        def meanwhile() -> None:
            late.start()
            late.join(0.3)
            seen.append((late.is_alive(), ".checkpoint.lock" in os.listdir(path)))

        paused(monkeypatch, path, meanwhile)
        first.save_checkpoint(path)
        late.join()
    assert seen == [(True, True)]
    assert held_in(path) == {0: 2}
    (name,) = set(listing(path)) - set(JSONS)
    assert re.fullmatch(r"trajectory_0_\.[0-9a-f]{8}\.arrow", name)


def test_two_buffers_that_save_to_one_path_all_the_time_leave_one_whole_checkpoint(
    path: Path,
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        buffer.save_checkpoint(path)

    def save(number: int) -> None:
        with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
            for i in range(15):
                add(buffer, number + i)
                buffer.save_checkpoint(path)

    with ThreadPoolExecutor(2) as executor:
        assert [*executor.map(save, (100, 200))] == [None, None]
    assert held_in(path) in [{i: number + i for i in (12, 13, 14)} for number in (100, 200)]
    assert health.verify(path) == []
    assert len(listing(path)) == len(JSONS) + 3


def test_a_save_beside_one_that_does_not_end_is_a_locked_error_that_says_who(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_LOCK_PATIENCE_S", 0.2)
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        buffer.save_checkpoint(path)

        def hold(parent: Parent) -> None:
            with checkpoint.locked(str(path)):
                parent.send(os.getpid())
                time.sleep(60)

        with Child(hold) as child:
            pid = child.receive()
            expected = (
                f"{path}: expected nobody else who saves or repairs there, but process {pid} on "
                f"{socket.gethostname()} does. Try again when it has ended, or save to another "
                f"path."
            )
            for call in (
                lambda: buffer.save_checkpoint(path),
                lambda: health.repair(path),
                lambda: health.repair(path, dry_run=True),
            ):
                with pytest.raises(LockedError) as error:
                    call()
                assert (str(error.value), error.value.pid) == (expected, pid)
            assert held_in(path) == same(0)
            assert health.verify(path) == []
        # It was killed: its file is there still, and locks nobody out.
        assert listing(path) == sorted([".checkpoint.lock", *files_of("arrow", 0)])
        assert health.verify(path) == []
        assert not health.repair(path, dry_run=True).has_changes
        add(buffer, 1)
        buffer.save_checkpoint(path)
    assert listing(path) == files_of("arrow", 0, 1)
    assert held_in(path) == same(0, 1)


def test_a_save_while_a_checkpoint_is_repaired_waits_for_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
        (path / "metadata.json").write_text("{")
        add(buffer, 2, 3)
        late = threading.Thread(target=buffer.save_checkpoint, args=(path,))
        seen = []

        def meanwhile() -> None:
            late.start()
            late.join(0.3)
            seen.append(late.is_alive())

        paused(monkeypatch, path, meanwhile)
        assert health.repair(path).rewritten == sorted(JSONS)
        late.join()
    assert seen == [True]
    assert held_in(path) == same(2, 3)
    assert listing(path) == sorted(["quarantine", *files_of("arrow", 2, 3)])
    assert health.verify(path) == []


def test_a_removed_lock_that_another_has_made_anew_stays_the_others(path: Path) -> None:
    path.mkdir()
    lock = files.WriterLock(str(path / "lock"))
    (path / "lock").unlink()
    other = files.WriterLock(str(path / "lock"))
    lock.remove()
    assert files.is_locked(str(path / "lock"))
    other.remove()
    assert listing(path) == []


# -- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["memory", "saved", "small cache", "no cache"])
def test_ten_batches_after_a_resume_are_those_that_would_have_come(
    tmp_path: Path, target: str
) -> None:
    options = {"small cache": {"cache_size": 1}, "no cache": {"enable_cache": False}}
    is_saved = target != "memory"
    for form in FORMATS:
        path = tmp_path / f"checkpoint {form}"
        with made(tmp_path / form, is_saved, form, sample_window_size=3) as buffer:
            add(buffer, 0, 1)
            buffer.sample(20)
            add(buffer, 2, num_steps=2)
            add(buffer, 3, 4)
            buffer.sample(33)
            buffer.save_checkpoint(path)
            expected = [buffer.sample(40) for _ in range(10)]
            add(buffer, 5)
            after = buffer.sample(40)
        with made(
            tmp_path / f"resumed {form}",
            is_saved,
            form,
            sample_window_size=3,
            seed=99,
            **options.get(target, {}),
        ) as buffer:
            buffer.load_checkpoint(path)
            assert is_equal([buffer.sample(40) for _ in range(10)], expected), form
            add(buffer, 5)
            assert is_equal(buffer.sample(40), after), form


def test_a_batch_after_a_resume_is_not_the_first_of_the_old_run(path: Path) -> None:
    with TrajectoryReplayBuffer(seed=3) as buffer:
        add(buffer, 0, 1)
        first = buffer.sample(50)
        buffer.save_checkpoint(path)
    with loaded(path, seed=3) as buffer:
        assert not is_equal(buffer.sample(50), first)


@by_format
def test_each_rank_has_a_stream_of_its_own_that_can_be_repeated(path: Path, form: str) -> None:
    # Equal trajectories: ranks differ by what they draw, not by what they hold.
    checkpoint_of(path, *[0] * 6, form=form)

    def batches(*rank: int) -> list[Any]:
        with loaded(path, *rank) as buffer:
            return [row_ids(buffer.sample(40)) for _ in range(10)]

    ranks = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    streams = [batches(*rank) for rank in ranks]
    assert [batches(*rank) for rank in ranks] == streams
    assert all(streams[i] != streams[j] for i in range(5) for j in range(i))


def test_a_later_checkpoint_gives_ranks_other_streams(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0, 0)
        buffer.save_checkpoint(tmp_path / "a")
        buffer.sample(1)
        buffer.save_checkpoint(tmp_path / "b")
    batches = []
    for name in "ab":
        with loaded(tmp_path / name, 0, 2) as buffer:
            batches.append(row_ids(buffer.sample(40)))
    assert batches[0] != batches[1]


def test_a_world_of_one_resumes_as_if_it_were_not_distributed(path: Path) -> None:
    checkpoint_of(path, 0, 1)
    with loaded(path, 0, 1) as one, loaded(path) as other:
        assert is_equal(one.sample(50), other.sample(50))
        assert one.trajectory_counter == other.trajectory_counter == 2


@by_format
def test_a_ranks_own_checkpoint_resumes_exactly(tmp_path: Path, form: str) -> None:
    path = checkpoint_of(tmp_path / "checkpoint", *range(5), form=form)
    for rank in range(2):
        own = tmp_path / f"checkpoint {rank}"
        with made(tmp_path / f"live {rank}", False, form) as buffer:
            load(buffer, path, rank, 2)
            buffer.sample(30)
            add(buffer, 7)
            buffer.sample(30)
            buffer.save_checkpoint(own)
            expected = [buffer.sample(40) for _ in range(10)]
        with made(tmp_path / f"resumed {rank}", False, form, seed=9) as buffer:
            buffer.load_checkpoint(own)
            assert is_equal([buffer.sample(40) for _ in range(10)], expected)


@by_mode
def test_three_resumes_in_a_row_lose_nothing(tmp_path: Path, is_saved: bool) -> None:
    with TrajectoryReplayBuffer(sample_window_size=5) as whole:
        paths = [tmp_path / f"checkpoint {i}" for i in range(4)]
        add(whole, 0)
        whole.save_checkpoint(paths[0])
        kept = [contents_of(paths[0])]
        for i in range(1, 4):
            with made(tmp_path / f"live {i}", is_saved, sample_window_size=5) as buffer:
                buffer.load_checkpoint(paths[i - 1])
                for one in (whole, buffer):
                    add(one, 2 * i - 1, 2 * i)
                assert is_equal(buffer.sample(50), whole.sample(50))
                buffer.save_checkpoint(paths[i])
                kept.append(contents_of(paths[i]))
        assert [contents_of(path) for path in paths] == kept, "an old checkpoint has changed"
        assert held_in(paths[3]) == same(2, 3, 4, 5, 6)
        assert [len(held_in(path)) for path in paths] == [1, 3, 5, 5]


@by_mode
def test_an_old_checkpoint_stays_as_it_is_while_the_buffer_goes_on(
    live: Path, path: Path, is_saved: bool
) -> None:
    with made(live, is_saved, sample_window_size=2) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(path)
        before = contents_of(path)
        add(buffer, 2, 3)
        buffer.sample(10)
        buffer.clear()
        add(buffer, 4)
        buffer.load_checkpoint(path)
        buffer.clear()
        buffer.flush()
    assert contents_of(path) == before
    assert held_in(path) == same(0, 1)


@by_mode
def test_no_global_random_state_is_touched(tmp_path: Path, is_saved: bool) -> None:
    def states() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()
        return name, keys.tolist(), rest, torch.get_rng_state().tolist(), random.getstate()

    before = states()
    with made(tmp_path / "live", is_saved) as buffer:
        add(buffer, 0, 1)
        buffer.sample(10)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.load_checkpoint(tmp_path / "checkpoint")
        load(buffer, tmp_path / "checkpoint", 0, 2)
        buffer.sample(10)
    assert states() == before


# -- elsewhere -----------------------------------------------------------------------------------


@by_format
def test_a_checkpoint_that_was_moved_loads(tmp_path: Path, form: str) -> None:
    with made(tmp_path / "live", True, form) as buffer:
        add(buffer, 0, 1)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "live")
    (tmp_path / "far").mkdir()
    moved = (tmp_path / "checkpoint").rename(tmp_path / "far" / "away")
    with loaded(moved) as buffer:
        assert held(buffer) == same(0, 1)
        assert sampled(buffer) == {0, 1}
    assert str(tmp_path).encode() not in b"".join((moved / name).read_bytes() for name in JSONS)


@by_format
def test_a_reader_opens_a_checkpoint_under_a_sampler_of_its_own(path: Path, form: str) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    before = contents_of(path)
    with ReplayReader(path, seed=5, sample_window_size=2) as reader:
        assert (len(reader), reader.total_samples) == (3, 3 * N)
        assert held(reader) == same(0, 1, 2)
        assert sampled(reader) == {1, 2}
    assert contents_of(path) == before


def test_a_checkpoint_is_no_live_store(path: Path) -> None:
    checkpoint_of(path, 0)
    before = contents_of(path)
    with pytest.raises(FileExistsError, match="Use load_checkpoint"):
        made(path)
    assert contents_of(path) == before
    assert held_in(path) == same(0)


# -- what RLinf wrote ----------------------------------------------------------------------------

FIXTURES = Path(__file__).parent / "fixtures"
DIRECTORIES = sorted(
    str(found.parent.relative_to(FIXTURES)) for found in FIXTURES.rglob("metadata.json")
)
FLAGS = ("terminations", "truncations", "dones")
by_directory = pytest.mark.parametrize("name", DIRECTORIES)


def copied(name: str, target: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, target))


def expected_of(directory: Path) -> dict[int, Any]:
    """What RLinf saw in each trajectory that has a file there."""
    known = json.loads((directory / "expected.json").read_text())
    ids = {int(file.name.split("_")[1]) for file in directory.glob("trajectory_*_*")}
    return {i: known[str(i)] for i in sorted(ids)}


def hashes_of(source: TrajectoryReplayBuffer | ReplayReader) -> dict[int, Any]:
    """Dtype, shape and SHA-256 of the N rows of each column of each trajectory."""
    return {
        i: dict(sorted(column_hashes(source.get_trajectory(i).to_columns())))
        for i in source.trajectory_ids
    }


def column_hashes(columns: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    num_steps = len(columns["rewards"])
    for name, leaf in flat(columns):
        extra = len(leaf) - num_steps
        if extra:
            epochs = leaf.reshape(extra, num_steps // extra + 1, *leaf.shape[1:])
            leaf = epochs[:, 1:] if name in FLAGS else epochs[:, :-1]
            leaf = leaf.reshape(num_steps, *leaf.shape[2:])
        rows = leaf.reshape(-1, *leaf.shape[2:]).contiguous()
        data = rows.reshape(-1).view(torch.uint8).numpy().tobytes()
        yield (
            name,
            {
                "dtype": str(rows.dtype).removeprefix("torch."),
                "sha256": hashlib.sha256(data).hexdigest(),
                "shape": list(rows.shape),
            },
        )


def flat(columns: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, leaf in columns.items():
        if isinstance(leaf, dict):
            yield from flat(leaf, f"{prefix}{key}.")
        else:
            yield prefix + key, leaf


def test_all_directories_of_rlinf_are_there() -> None:
    names = ["rlinf_pkl", "rlinf_pt", "rlinf_pt_extra_dones", "rlinf_pt_ragged", "rlinf_pt_window2"]
    ranks = ["rlinf_ranks/rank_0", "rlinf_ranks/rank_1"]
    assert ["rlinf_main/store_pt", *names, *ranks] == DIRECTORIES


@by_directory
def test_a_directory_of_rlinf_loads_with_every_column_as_it_was(tmp_path: Path, name: str) -> None:
    directory = copied(name, tmp_path / "rlinf")
    before = contents_of(directory)
    expected = expected_of(directory)
    rows = sum(known["rewards"]["shape"][0] for known in expected.values())
    counter = json.loads((directory / "metadata.json").read_text())["trajectory_counter"]
    sources = [
        ReplayReader(directory),
        *(made(tmp_path / "live", is_saved, sample_window_size=0) for is_saved in (False, True)),
    ]
    for source in sources:
        with source:
            if not isinstance(source, ReplayReader):
                source.load_checkpoint(directory)
                assert source.trajectory_counter == counter
            assert hashes_of(source) == expected
            assert (len(source), source.total_samples) == (len(expected), rows)
            assert len(source.sample(64)["rewards"]) == 64
    assert contents_of(directory) == before


def test_a_directory_of_rlinf_migrates(tmp_path: Path) -> None:
    for number, name in enumerate(DIRECTORIES):
        directory, ours = copied(name, tmp_path / name), tmp_path / str(number)
        with loaded(directory) as buffer:
            buffer.save_checkpoint(ours, trajectory_format="arrow")
        expected = expected_of(directory)
        shutil.rmtree(directory)
        with loaded(ours) as buffer:
            assert hashes_of(buffer) == expected
        index = index_of(ours)["trajectory_index"]
        assert {entry["format"] for entry in index.values()} == {"arrow"}


def test_leading_flags_of_rlinf_come_back(tmp_path: Path) -> None:
    directory = copied("rlinf_pt_extra_dones", tmp_path / "rlinf")
    with loaded(directory) as buffer:
        found = buffer.get_trajectory(0)
        file = next(directory.glob("trajectory_0_*"))
        known = torch.load(file, weights_only=True)
        assert is_equal(found.dones, known["dones"])
        assert len(found.dones) == len(found.rewards) + 2
        assert found.forward_inputs["hidden"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["memory", "saved", "reader"])
def test_evicted_trajectories_of_rlinf_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    directory = copied("rlinf_pt_window2", tmp_path / "rlinf")
    if kind == "reader":
        source: Any = ReplayReader(directory)
    else:
        source = made(tmp_path / "live", kind == "saved")
    with source:
        if kind != "reader":
            source.load_checkpoint(directory)
        assert source.trajectory_ids == [3, 4]
        assert source.total_samples == 24
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", f"{directory}: trajectories [0, 1, 2] are listed and have no file.")
    ]


def test_evicted_trajectories_of_rlinf_are_no_part_of_a_shard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copied("rlinf_pt_window2", tmp_path / "rlinf")
    for rank in range(2):
        with loaded(directory, rank, 2) as buffer:
            assert buffer.trajectory_ids == [3 + rank]
            assert buffer.trajectory_counter == 5 + rank
    assert len(caplog.records) == 2


@pytest.mark.parametrize("open_it", [loaded, ReplayReader])
def test_the_legacy_name_of_the_index_is_accepted(tmp_path: Path, open_it: Any) -> None:
    directory = copied("rlinf_pkl", tmp_path / "rlinf")
    (directory / "trajectory_index.json").rename(directory / "trajector_index.json")
    with open_it(directory) as source:
        assert hashes_of(source) == expected_of(directory)


def test_without_metadata_the_ids_go_on_after_the_last(tmp_path: Path) -> None:
    directory = copied("rlinf_pt", tmp_path / "rlinf")
    (directory / "metadata.json").unlink()
    with loaded(directory) as buffer:
        assert hashes_of(buffer) == expected_of(directory)
        assert buffer.trajectory_counter == 4


def test_the_saved_seed_of_rlinf_begins_the_stream(tmp_path: Path) -> None:
    directory = copied("rlinf_pt", tmp_path / "rlinf")
    with loaded(directory, seed=1) as one, loaded(directory, seed=2) as other:
        assert is_equal(one.sample(50), other.sample(50))


def test_files_of_rlinf_with_different_columns_are_refused(tmp_path: Path) -> None:
    directory = copied("rlinf_pt", tmp_path / "rlinf")
    file = next(directory.glob("trajectory_2_*"))
    item = torch.load(file, weights_only=True)
    torch.save({**item, "more": item["rewards"]}, file)
    with TrajectoryReplayBuffer() as buffer:
        add(buffer, 0)
        with pytest.raises(SchemaError, match="trajectory_2_"):
            buffer.load_checkpoint(directory)
        assert held(buffer) == same(0)


def test_a_damaged_index_of_rlinf_is_told(tmp_path: Path) -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda s: s["trajectory_index"].pop("1"),
        lambda s: s["trajectory_index"]["1"].pop("model_weights_id"),
        lambda s: s.pop("trajectory_id_list"),
        lambda s: s["trajectory_id_list"].append(0),
        lambda s: s["trajectory_id_list"].append("x"),
        lambda s: s.update(trajectory_index=[]),
        lambda s: s["trajectory_index"].update({"1": None}),
    ]
    directory = copied("rlinf_pt", tmp_path / "rlinf")
    whole = (directory / "trajectory_index.json").read_text()
    for change in changes:
        (directory / "trajectory_index.json").write_text(whole)
        rewrite(directory, change)
        with pytest.raises(CorruptError, match="not an index"):
            held_in(directory)


RLINF = """
import logging, sys, types
import torch

for name in ("logging", "omega_resolver"):
    sys.modules[f"rlinf.utils.{name}"] = types.ModuleType(name)
sys.modules["rlinf.utils.logging"].get_logger = lambda: logging.getLogger("rlinf")
sys.modules["rlinf.utils.omega_resolver"].omegaconf_register = lambda: None
from rlinf.data.replay_buffer import TrajectoryReplayBuffer

seen = {}
for directory in sys.argv[2:]:
    buffer = TrajectoryReplayBuffer(seed=1, enable_cache=True, cache_size=5)
    buffer.load_checkpoint(directory)
    rows = {
        i: buffer._flatten_trajectory(
            buffer._load_trajectory(i, buffer._trajectory_index[i]["model_weights_id"])
        )
        for i in buffer._trajectory_id_list
    }
    counts = [buffer.size, buffer._total_samples, buffer._trajectory_counter]
    seen[directory] = [rows, counts, len(buffer.sample(16)["rewards"])]
    buffer.close()
torch.save(seen, sys.argv[1])
"""


def rlinf_fields(i: int) -> dict[str, Any]:
    """One leading step for each of two rollout epochs."""
    return {
        "actions": random_bits("float32", (4, 2, 3), i),
        "rewards": random_bits("float32", (4, 2, 1), i + 1),
        "dones": random_bits("bool", (6, 2), i + 2),
        "forward_inputs": {"tokens": random_bits("int64", (4, 2, 2), i + 4)},
        "curr_obs": {"states": random_bits("bfloat16", (4, 2, 5), i + 3)},
        "max_episode_length": 80,
        "model_weights_id": f"0b3f1b1e-weights-{i}",
    }


def rlinf_rows(i: int) -> dict[str, torch.Tensor]:
    fields = rlinf_fields(i)
    fields["dones"] = fields["dones"].reshape(2, 3, 2)[:, 1:].reshape(4, 2)
    columns = {key: fields[key] for key in fields if key not in RLINF_KEYS}
    return {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in flat(columns)}


@pytest.mark.skipif(importlib.util.find_spec("rlinf") is None, reason="needs rlinf")
def test_rlinf_loads_our_checkpoints_and_stores(tmp_path: Path) -> None:
    directories = []
    for form in ("pt", "pkl"):
        for is_saved in (False, True):
            live = tmp_path / f"live {form}"
            path = tmp_path / f"checkpoint {form} {is_saved}"
            with made(live, is_saved, form, sample_window_size=2) as buffer:
                buffer.add_trajectories([rlinf_fields(i) for i in range(4)])
                buffer.save_checkpoint(path)
                buffer.add_trajectories([rlinf_fields(4)])
                buffer.save_checkpoint(path)
            directories.append((path, [3, 4]))
        directories.append((live, [0, 1, 2, 3, 4]))
    with made(tmp_path / "arrow") as buffer:
        buffer.add_trajectories([rlinf_fields(i) for i in range(5)])
        buffer.save_checkpoint(tmp_path / "converted", trajectory_format="pt")
    directories.append((tmp_path / "converted", [0, 1, 2, 3, 4]))
    done = run_python(RLINF, tmp_path / "seen", *(directory for directory, _ in directories))
    assert done.returncode == 0, done.stderr
    seen = torch.load(tmp_path / "seen")
    for directory, ids in directories:
        rows, counts, num_rows = seen[str(directory)]
        assert (list(rows), counts, num_rows) == (ids, [len(ids), 8 * len(ids), 5], 16)
        for i in ids:
            found = dict(flat(rows[i]))
            assert sorted(found) == sorted(rlinf_rows(i))
            assert is_equal({key: found[key] for key in rlinf_rows(i)}, rlinf_rows(i))


# -- others that have taken the names of files ---------------------------------------------------


@by_format
def test_a_checkpoint_that_is_removed_and_saved_anew_never_gives_rows_under_an_old_id(
    path: Path, form: str
) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    with loaded(path) as buffer, ReplayReader(path, follow=False) as reader:
        shutil.rmtree(path)
        checkpoint_of(path, 7, 8, 9, form=form)
        for source in (buffer, reader):
            with pytest.raises(CorruptError, match=r"trajectory_0_\.|uuid"):
                source.get_trajectory(0)
            with pytest.raises(CorruptError):
                source.sample(50)
    assert held_in(path) == {0: 7, 1: 8, 2: 9}


@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_what_rlinf_saves_over_its_own_directory_is_not_read_as_what_was_there(
    tmp_path: Path, form: str
) -> None:
    directory = rlinf_directory(tmp_path / "rlinf", form, 0, 1)
    with loaded(directory) as buffer, ReplayReader(directory) as reader:
        assert held(buffer) == held(reader) == {0: 0, 1: 1}
        rlinf_directory(directory, form, 7, 8)
        for source in (buffer, reader):
            with pytest.raises(CorruptError, match="got another one"):
                source.get_trajectory(0)
    assert held_in(directory) == {0: 7, 1: 8}


def rlinf_directory(directory: Path, form: str, *numbers: int) -> Path:
    """What RLinf saves of these trajectories, under the same names each time."""
    directory.mkdir(exist_ok=True)
    index = {}
    for i, number in enumerate(numbers):
        fields = trajectory(number)
        path = directory / f"trajectory_{i}_w.{form}"
        if form == "pt":
            torch.save(fields, path)
        else:  # of one length, though torch writes addresses: what follows a pickle is not read
            path.write_bytes(pickle.dumps(fields, protocol=4).ljust(1 << 16, b"\0"))
        facts = [N, i, 0, list(fields["rewards"].shape), "w"]
        index[i] = dict(zip(RLINF_KEYS, facts, strict=True))
    listed = {"trajectory_index": index, "trajectory_id_list": list(index)}
    (directory / "trajectory_index.json").write_text(json.dumps(listed))
    metadata = {"trajectory_format": form, "trajectory_counter": len(numbers), "seed": 1}
    (directory / "metadata.json").write_text(json.dumps(metadata))
    return directory


@pytest.mark.parametrize("form", ["arrow", "npy"])
@pytest.mark.parametrize("target_form", [None, "pt"])
def test_a_memory_only_buffer_saves_its_own_rows_where_others_have_taken_the_names(
    tmp_path: Path, path: Path, form: str, target_form: str | None
) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    with loaded(path) as buffer:
        assert sampled(buffer) == {0, 1, 2}  # all are mapped
        shutil.rmtree(path)
        checkpoint_of(path, 7, 8, 9, form=form)
        buffer.save_checkpoint(tmp_path / "saved", trajectory_format=target_form)
    assert held_in(tmp_path / "saved") == same(0, 1, 2)


@by_format
def test_what_is_nowhere_any_more_is_not_saved_as_another_that_has_its_name(
    tmp_path: Path, path: Path, form: str
) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    with loaded(path) as buffer:
        shutil.rmtree(path)
        checkpoint_of(path, 7, 8, 9, form=form)
        with pytest.raises(WriteError, match=r"got another one's file: '.*trajectory_0_"):
            buffer.save_checkpoint(tmp_path / "saved")
    assert listing(tmp_path) == ["checkpoint"]


@by_format
def test_a_load_brings_in_what_its_index_lists_when_another_takes_its_place(
    live: Path, tmp_path: Path, path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_of(path, 0, 1, 2, form=form)
    later = checkpoint_of(tmp_path / "later", 7, 8, 9, form=form)
    link_or_copy = files.link_or_copy

    def swapped(source: str, target: str) -> None:
        if later.exists():
            shutil.rmtree(path)
            later.rename(path)
        link_or_copy(source, target)

    with made(live, form=form) as buffer:
        monkeypatch.setattr(files, "link_or_copy", swapped)
        buffer.load_checkpoint(path)
        assert held(buffer) == {0: 7, 1: 8, 2: 9}
        buffer.flush()
        assert len(names_of(live, f".{form}")) == 3
    assert held_in(live) == {0: 7, 1: 8, 2: 9}


# -- ids without end -----------------------------------------------------------------------------


@by_mode
def test_ids_that_no_index_can_be_read_with_are_refused(
    live: Path, path: Path, is_saved: bool
) -> None:
    checkpoint_of(path, 0)
    with made(live, is_saved) as buffer:
        load(buffer, path, 2**61 - 2, 2**61)
        assert buffer.trajectory_counter == 2**61 - 1
        add(buffer, 1)
        assert buffer.trajectory_ids == [2**61 - 1]
        with pytest.raises(MmbufError, match=f"ids below {2**62}, got {2**62 + 2**61 - 1}"):
            add(buffer, 2)
        with pytest.raises(MmbufError, match=f"ids below {2**62}, got steps of 1"):
            load(buffer, path, 2**62 - 1, 2**62)
        rewrite(path, lambda snapshot: snapshot["metadata"].update(trajectory_counter=2**62 - 1))
        with pytest.raises(MmbufError, match=f"ids below {2**62}, got {2**62}"):
            load(buffer, path, 1, 2)
        assert held(buffer) == {2**61 - 1: 1}
        buffer.flush()
    if is_saved:
        assert held_in(live) == {2**61 - 1: 1}
