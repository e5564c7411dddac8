"""Readers that follow live stores, each danger with real processes: killed writers, deleted files,
forks, workers, and collectors beside a trainer."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import coded, codes_of, is_equal, opened, without_privileges
from torch.utils.data import DataLoader, IterableDataset

from mmbuf import (
    CorruptError,
    EmptyBufferError,
    MmbufError,
    ReplayReader,
    SchemaError,
    TrajectoryReplayBuffer,
    checkpoint,
    files,
    index,
    stores,
    vm,
)
from mmbuf.entry import Part
from mmbuf.index import TrajectoryIndex
from mmbuf.schema import Array

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
pytestmark = pytest.mark.usefixtures("without_fsync")
IMAGE = (32, 32, 3)  # of 6 rows and more: mapped; the other columns are copied
MILLION = 1_000_000


def item(i: int, num_rows: int = 8) -> dict[str, Any]:
    return coded(i, num_rows, image=IMAGE)


def add(buffer: TrajectoryReplayBuffer, *numbers: int) -> None:
    buffer.add_trajectories([item(i) for i in numbers])
    buffer.flush()


def write(path: Path, *numbers: int) -> Path:
    """A closed store of trajectories of these numbers; their ids are 0, 1, 2, ..."""
    with opened(path) as buffer:
        add(buffer, *numbers)
    return path


def numbers_in(reader: ReplayReader, count: int = 300) -> set[int]:
    """Numbers of the trajectories in a batch, every row of which is checked."""
    return set((codes_of(reader.sample(count)) // MILLION).tolist())


def check_trajectory(reader: ReplayReader, key: Any) -> int:
    """The number of a trajectory, every row of which is checked."""
    got = reader.get_trajectory(key).to_columns()
    observation = {name: flat(leaf) for name, leaf in got["curr_obs"].items()}
    columns = {name: flat(leaf) for name, leaf in got.items() if name != "curr_obs"}
    codes = codes_of({**columns, "curr_obs": observation})
    assert (codes % MILLION).tolist() == list(range(len(codes)))
    return int(codes[0]) // MILLION


def flat(leaf: Any) -> Any:
    return list(itertools.chain(*leaf)) if isinstance(leaf, list) else leaf.flatten(0, 1)


def deleted_maps(path: Path) -> int:
    """How many files below ``path`` are gone and still mapped by this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(path) in line and line.endswith("(deleted)") for line in lines)


# -- a writer that lives, dies and comes again --------------------------------------------------


def test_a_reader_sees_what_is_published_with_its_next_sample(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer, ReplayReader(tmp_path) as reader:
        with pytest.raises(EmptyBufferError):
            reader.sample(1)
        for i in range(20):
            add(buffer, i)
            assert numbers_in(reader) == set(range(i + 1))
            assert reader.trajectory_ids == list(range(i + 1))


def test_a_reader_goes_on_through_clear_and_load(tmp_path: Path) -> None:
    write(tmp_path / "other", 50, 51)
    with opened(tmp_path / "store") as buffer, ReplayReader(tmp_path / "store") as reader:
        add(buffer, 0, 1)
        assert numbers_in(reader) == {0, 1}
        buffer.clear()
        with pytest.raises(EmptyBufferError):
            reader.sample(1)
        assert (len(reader), reader.total_samples) == (0, 0)
        add(buffer, 2)
        assert numbers_in(reader) == {2}
        buffer.load_checkpoint(tmp_path / "other")
        assert numbers_in(reader) == {50, 51}
        add(buffer, 3)
        assert numbers_in(reader) == {3, 50, 51}
        assert reader.trajectory_ids == buffer.trajectory_ids


def test_a_reader_goes_on_where_a_cleared_store_has_another_schema(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer, ReplayReader(tmp_path) as reader:
        for dtype in (torch.float32, torch.int64, torch.float16):
            buffer.add_trajectories([{"rewards": torch.ones(4, 2, dtype=dtype)}])
            buffer.flush()
            assert reader.sample(8)["rewards"].dtype == dtype
            buffer.clear()


def add_until_killed(parent: Parent, path: Path) -> None:
    """Trajectories whose numbers are their ids; says after each flush how many there are."""
    with opened(path) as buffer:
        parent.send(buffer.trajectory_counter)
        while True:
            for _ in range(3):
                buffer.add_trajectories([item(buffer.trajectory_counter)])
            buffer.flush()
            parent.send(buffer.trajectory_counter)


def test_a_reader_goes_on_through_a_killed_writer_and_its_successor(tmp_path: Path) -> None:
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path).close()
    pick = random.Random(0)
    num_flushed = 0
    with ReplayReader(tmp_path) as reader:
        for _ in range(4):
            with Child(add_until_killed, tmp_path) as writer:
                assert writer.receive() >= num_flushed
                until = time.monotonic() + 0.3 + pick.random() / 5
                while time.monotonic() < until or not num_flushed:
                    while writer.pipe.poll():
                        num_flushed = writer.receive()
                    if num_flushed:
                        numbers_in(reader, 50)
                        assert len(reader) >= num_flushed
            assert reader.wait_for(num_flushed, 10)
            assert numbers_in(reader) <= set(reader.trajectory_ids)
        with opened(tmp_path) as buffer:
            add(buffer, buffer.trajectory_counter)
            assert numbers_in(reader, 50) <= set(buffer.trajectory_ids)
            assert reader.trajectory_ids == buffer.trajectory_ids
            assert [check_trajectory(reader, i) for i in reader.trajectory_ids] == list(
                reader.trajectory_ids
            )
        with ReplayReader(tmp_path) as fresh:
            assert fresh.trajectory_ids == reader.trajectory_ids


# -- many rounds --------------------------------------------------------------------------------


def sample_until_told(parent: Parent, path: str, seed: int, options: dict[str, Any]) -> Any:
    """Check rows of batches and trajectories until told to end; what is there then."""
    pick = random.Random(seed)
    num_batches = num_trajectories = 0
    with ReplayReader(path, seed=seed, **options) as reader:
        batch = None
        while not parent.has_spoken():
            try:
                batch = reader.sample(32, out=batch)
            except EmptyBufferError:
                continue
            codes_of(batch)
            num_batches += 1
            if num_batches % 10 == 0 and len(reader):
                try:
                    check_trajectory(reader, pick.choice(reader.trajectory_ids))
                except (KeyError, IndexError):  # it went, or all did
                    continue
                num_trajectories += 1
        reader.refresh()
        is_clean = not sys.platform.startswith("linux") or not deleted_maps(Path(path).parent)
        return reader.trajectory_ids, num_batches, num_trajectories, is_clean


SMALL = {"sample_window_size": 6, "max_disk_bytes": 700_000, "max_pending_bytes": 500_000}


def run_rounds(path: Path, num_rounds: int) -> None:
    pick = random.Random(num_rounds)
    options: list[dict[str, Any]] = [{}, {"sample_window_size": 5, "cache_size": 3}]
    with (
        opened(path / "store", **SMALL) as buffer,
        Child(sample_until_told, str(path / "store"), 0, options[0]) as one,
        Child(sample_until_told, str(path / "store"), 1, options[1]) as other,
    ):
        for i in range(num_rounds):
            buffer.add_trajectories([item(i % 1000, pick.randint(1, 12))])
            if pick.random() < 0.1:
                buffer.flush()
            if pick.random() < 0.01:
                buffer.clear()
        buffer.flush()
        for child in (one, other):
            with suppress(BrokenPipeError):  # it has failed, and says how
                child.pipe.send("end")
        for child in (one, other):
            ids, num_batches, num_trajectories, is_clean = child.result()
            assert ids == buffer.trajectory_ids
            assert min(num_batches, num_trajectories) > 0
            assert is_clean


def test_two_readers_see_only_whole_rows_through_1000_rounds_of_adds(tmp_path: Path) -> None:
    run_rounds(tmp_path, 1000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_readers_see_only_whole_rows_through_10000_rounds_of_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("children._LIFE_S", 590)
    run_rounds(tmp_path, 10_000)


# -- files that go ----------------------------------------------------------------------------


@LINUX_ONLY
@pytest.mark.parametrize("is_many", [False, True])
def test_deleted_files_leave_the_window_and_the_memory_at_the_next_refresh(
    tmp_path: Path, is_many: bool
) -> None:
    with opened(tmp_path / "b", sample_window_size=2, max_disk_bytes=300_000) as buffer:
        if is_many:  # those that go lie between others
            write(tmp_path / "a", 90)
        with ReplayReader(tmp_path / "*" if is_many else tmp_path / "b") as reader:
            for i in range(40):
                add(buffer, i)
                seen = numbers_in(reader)
                assert seen - {90} == set(range(i + 1)[-len(buffer) :])
                assert deleted_maps(tmp_path) == 0
            assert len(buffer) < 12
            assert vm.MAPS.used < 40


@LINUX_ONLY
def test_what_a_running_gather_looks_at_stays_valid(tmp_path: Path) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    codes: list[int] = []

    def draw(low: int, high: int) -> Array:
        begun.set()
        assert may_go_on.wait(60)
        return np.arange(low, high)

    with opened(tmp_path) as buffer, ReplayReader(tmp_path) as reader:
        add(buffer, 0, 1)
        numbers_in(reader)
        cache = reader._window.cache
        assert cache is not None

        def gather() -> None:
            codes.extend(codes_of(cache.schema.nest(cache.gather(draw)[1])).tolist())

        thread = threading.Thread(target=gather)
        thread.start()
        assert begun.wait(60)
        buffer.clear()
        add(buffer, 2)
        assert numbers_in(reader) == {2}
        assert deleted_maps(tmp_path) > 0
        may_go_on.set()
        thread.join()
        assert codes == [i * MILLION + row for i in (0, 1) for row in range(8)]
        reader.sample(1)
        assert deleted_maps(tmp_path) == 0


@LINUX_ONLY
def test_a_trajectory_that_was_got_stays_valid_when_its_file_goes(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer, ReplayReader(tmp_path) as reader:
        add(buffer, 7)
        reader.refresh()
        got = reader.get_trajectory(0)
        buffer.clear()
        reader.refresh()
        with pytest.raises(KeyError, match="trajectory 0"):
            reader.get_trajectory(0)
        assert deleted_maps(tmp_path) == 1
        assert got.actions is not None
        assert (got.actions[:, 0, 0] - 7 * MILLION).tolist() == list(range(8))
        del got
        assert deleted_maps(tmp_path) == 0


def test_a_trajectory_that_is_gone_and_still_listed_is_a_key_error(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer, ReplayReader(tmp_path) as reader:
        add(buffer, 0)
        reader.refresh()
        buffer.clear()
        assert reader.trajectory_ids == [0]
        with pytest.raises(KeyError, match="trajectory 0"):
            reader.get_trajectory(0)
        assert reader.trajectory_ids == []


def test_a_file_that_was_taken_away_from_a_store_is_said(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    (tmp_path / "trajectory_1_.arrow").unlink()
    with ReplayReader(tmp_path) as reader:
        for _ in range(2):
            with pytest.raises(CorruptError, match="the file is missing"):
                reader.sample(100)
            with pytest.raises(FileNotFoundError):
                reader.get_trajectory(1)


@pytest.mark.parametrize("is_pattern", [False, True])
def test_a_store_directory_that_was_replaced_is_read_anew(tmp_path: Path, is_pattern: bool) -> None:
    store = write(tmp_path / "store", 0, 1)
    with ReplayReader(tmp_path / "*" if is_pattern else store) as reader:
        assert numbers_in(reader) == {0, 1}
        for numbers in ((2,), (3, 4, 5), (6, 7)):
            shutil.rmtree(store)
            write(store, *numbers)
            assert numbers_in(reader) == set(numbers)
            assert len(reader) == len(numbers)
        write(tmp_path / "aside" / "new", 8, 9)
        store.rename(tmp_path / "aside" / "old")
        (tmp_path / "aside" / "new").rename(store)
        reader.refresh()
        assert numbers_in(reader) == {8, 9}


def test_sampling_sees_within_a_second_that_the_directory_was_moved_away(tmp_path: Path) -> None:
    store = write(tmp_path / "store", 0, 1)
    with ReplayReader(store) as reader:
        write(tmp_path / "new", 2, 3)
        store.rename(tmp_path / "old")
        (tmp_path / "new").rename(store)
        deadline = time.monotonic() + 1.1
        while numbers_in(reader) == {0, 1}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert numbers_in(reader) == {2, 3}


def test_a_window_does_not_keep_what_it_slid_over(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer, ReplayReader(tmp_path, sample_window_size=2) as reader:
        for i in range(30):
            add(buffer, i)
            assert numbers_in(reader) == {i, max(0, i - 1)}
            assert reader.get_stats()["cache_size"] == min(2, i + 1)
            assert reader._window.cache is not None
            assert len(reader._window.cache._slots) <= 2
        assert not reader._window.has_evicted


@LINUX_ONLY
def test_a_directory_that_may_only_be_read_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_LOOK_S", -1.0)
    write(tmp_path / "rank_0", 0)
    write(tmp_path / "rank_1", 1).rename(tmp_path / "later")
    with ReplayReader(tmp_path / "rank_*") as reader:
        assert numbers_in(reader) == {0}
        (tmp_path / "later").rename(tmp_path / "rank_1")
        for store in tmp_path.iterdir():
            for path in store.iterdir():
                path.chmod(0o444)
            store.chmod(0o555)

        def read() -> None:
            with pytest.raises(PermissionError):
                (tmp_path / "rank_1" / "new").touch()
            assert reader.wait_for(2, 10)
            assert numbers_in(reader) == {0, 1}
            assert reader.get_stats()["unread_bytes"] == 0

        try:
            without_privileges(read)
        finally:
            for store in tmp_path.iterdir():
                store.chmod(0o755)


# -- several threads ------------------------------------------------------------------------------


def test_no_thread_sees_an_empty_window_or_a_missing_file_while_another_takes_in_a_change(
    tmp_path: Path,
) -> None:
    """Files come, go and are reordered under three sampling threads."""
    failures: list[BaseException] = []
    is_done = threading.Event()
    with (
        opened(tmp_path / "a", sample_window_size=2, max_disk_bytes=250_000) as one,
        opened(tmp_path / "b", sample_window_size=2, max_disk_bytes=250_000) as other,
    ):
        add(one, 0)
        with ReplayReader(tmp_path / "*", sample_window_size=4, cache_size=3) as reader:

            def sample() -> None:
                try:
                    while not is_done.is_set():
                        codes_of(reader.sample(40))
                        reader.get_stats()
                        len(reader.window_ids)
                except BaseException as failure:
                    failures.append(failure)

            threads = [threading.Thread(target=sample) for _ in range(3)]
            for thread in threads:
                thread.start()
            pick = random.Random(0)
            for i in range(1, 120):
                buffer = one if pick.random() < 0.5 else other
                buffer.add_trajectories([item(i)])
                if pick.random() < 0.3:
                    other.flush()
                    one.flush()
                if i % 20 == 0:
                    with reader._window.change_lock:  # as a store that comes late
                        reader._window._open_anew(reader.trajectory_ids)
            is_done.set()
            for thread in threads:
                thread.join()
    assert failures == []


def test_a_clear_and_what_follows_it_are_one_change(tmp_path: Path) -> None:
    """A thread that samples meanwhile gets rows of before or of after."""
    write(tmp_path / "other", 1)
    failures: list[BaseException] = []
    is_done = threading.Event()
    with opened(tmp_path / "store") as buffer:
        add(buffer, 0)
        with ReplayReader(tmp_path / "store") as reader:

            def sample() -> None:
                try:
                    while not is_done.is_set():
                        codes_of(reader.sample(20))
                except BaseException as failure:
                    failures.append(failure)

            threads = [threading.Thread(target=sample) for _ in range(2)]
            for thread in threads:
                thread.start()
            for _ in range(60):
                buffer.load_checkpoint(tmp_path / "other")  # one line of the journal
                reader.refresh()
            is_done.set()
            for thread in threads:
                thread.join()
    assert failures == []


# -- what fails half way --------------------------------------------------------------------------


def test_a_trajectory_of_an_impossible_layout_is_said_again_and_costs_no_other(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0)
    with ReplayReader(tmp_path) as reader:
        assert numbers_in(reader) == {0}
        store = TrajectoryIndex(str(tmp_path))
        known = store.contents.entries[0]
        fields = {name: getattr(known, name) for name in known.__slots__}
        schema = store.contents.schema
        assert schema is not None
        fields |= {"trajectory_id": 1, "uuid": "1" * 32, "parts": (Part(0, 1),)}
        store.add(schema, type(known)(**fields))
        for _ in range(2):
            with pytest.raises(CorruptError, match="columns in the index, got 1"):
                reader.sample(1)
            assert reader.trajectory_ids == [0]
        store.drop([1])
        store.close()
        assert numbers_in(reader) == {0}
    with opened(tmp_path) as buffer, ReplayReader(tmp_path) as reader:
        add(buffer, 2)
        assert numbers_in(reader) == {0, 2}


@pytest.mark.parametrize("code", ["EMFILE", "EACCES", "EIO"])
def test_a_journal_that_cannot_be_opened_once_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    import errno

    write(tmp_path / "rank_0", 0)
    write(tmp_path / "rank_1", 1)
    really = files.opened
    with ReplayReader(tmp_path / "rank_*") as reader:
        for i in range(2):
            with opened(tmp_path / f"rank_{i}") as buffer:
                add(buffer, 10 + i)

        def fail(path: str) -> Any:
            if path.endswith(f"rank_1/{index.JOURNAL}"):
                raise OSError(getattr(errno, code), code, path)
            return really(path)

        with monkeypatch.context() as patch:
            patch.setattr(files, "opened", fail)
            with pytest.raises(OSError, match=code):
                reader.sample(1)
        assert numbers_in(reader) == {0, 1, 10, 11}
        shutil.rmtree(tmp_path / "rank_0")
        reader.refresh()
        assert numbers_in(reader) == {1, 11}


def test_a_store_of_another_schema_is_said_while_the_others_are_followed(tmp_path: Path) -> None:
    with opened(tmp_path / "rank_0") as buffer, ReplayReader(tmp_path / "rank_*") as reader:
        add(buffer, 0)
        reader.refresh()
        with opened(tmp_path / "rank_1") as misfit:
            misfit.add_trajectories([{"rewards": torch.ones(4, 2)}])
        for i in (1, 2):
            add(buffer, i)
            with pytest.raises(SchemaError, match=r"rank_1: .* as in .*rank_0"):
                reader.refresh()
            assert numbers_in(reader) == set(range(i + 1))


# -- frozen, waiting, resuming --------------------------------------------------------------------


def test_without_following_nothing_changes(tmp_path: Path) -> None:
    with opened(tmp_path / "rank_0") as buffer:
        add(buffer, 0, 1)
        with ReplayReader(tmp_path / "*", follow=False) as reader:
            add(buffer, 2)
            write(tmp_path / "rank_1", 3)
            assert numbers_in(reader) == {0, 1}
            assert not reader.refresh()
            assert len(reader) == 2
            buffer.clear()
            assert numbers_in(reader) == {0, 1}  # its mappings hold the files
            started = time.monotonic()
            assert reader.wait_for(2)
            assert not reader.wait_for(3)
            assert time.monotonic() - started < 5


def add_slowly(parent: Parent, path: Path, count: int) -> None:
    with opened(path) as buffer:
        for i in range(count):
            time.sleep(0.1)
            add(buffer, i)


def test_waiting_ends_when_there_are_enough_and_burns_no_core(tmp_path: Path) -> None:
    with ReplayReader(tmp_path / "*") as reader, Child(add_slowly, tmp_path / "store", 10) as child:
        burnt = time.process_time()
        started = time.monotonic()
        assert reader.wait_for(8, 60)
        assert len(reader) >= 8
        burnt, passed = time.process_time() - burnt, time.monotonic() - started
        assert burnt < 0.5 * passed
        child.result()


def test_waiting_in_vain_ends_by_its_timeout(tmp_path: Path) -> None:
    write(tmp_path, 0)
    with ReplayReader(tmp_path) as reader:
        burnt = time.process_time()
        started = time.monotonic()
        assert not reader.wait_for(2, 1.0)
        assert 1.0 <= time.monotonic() - started < 5
        assert time.process_time() - burnt < 0.4
        assert not reader.wait_for(2, 0)
        assert not reader.wait_for(2, -1)
        assert reader.wait_for(1, 0)


def test_waiting_never_sleeps_for_less_than_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline may pass between any two looks at the clock."""
    write(tmp_path, 0)
    for at in range(1, 8):
        ticks = itertools.chain([0.0] * at, itertools.repeat(10.0))
        slept: list[float] = []
        with ReplayReader(tmp_path) as reader, monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda ticks=ticks: next(ticks))
            patch.setattr(time, "sleep", slept.append)
            assert not reader.wait_for(2, 1.0)
        assert min(slept, default=0.0) >= 0


def test_a_reader_goes_on_exactly_where_a_state_was_taken(tmp_path: Path) -> None:
    write(tmp_path, *range(5))
    with ReplayReader(tmp_path, seed=3) as reader:
        reader.sample(40)
        child = pickle.loads(pickle.dumps(reader))
        state = pickle.loads(pickle.dumps(reader.state_dict()))
        expected = [reader.sample(40) for _ in range(3)]
        expected_child = pickle.loads(pickle.dumps(reader))
        with ReplayReader(tmp_path, seed=8) as other:
            other.load_state_dict(state)
            assert is_equal([other.sample(40) for _ in range(3)], expected)
            with pickle.loads(pickle.dumps(other)) as again, child, expected_child:
                assert is_equal(again.sample(40), expected_child.sample(40))
                assert not is_equal(again.sample(40), child.sample(40))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("rng_state"),
        lambda state: state.update(rng_state={"bit_generator": "MT19937"}),
        lambda state: state.update(num_children="many"),
        lambda state: state.update(spawn_key=[-1]),
        lambda state: state.update(entropy="none"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    write(tmp_path, *range(5))
    with ReplayReader(tmp_path) as reader, ReplayReader(tmp_path) as twin:
        state = reader.state_dict()
        change(state)
        with pytest.raises(ValueError, match="state"):
            reader.load_state_dict(state)
        assert is_equal(reader.sample(40), twin.sample(40))


def test_stats_say_how_far_behind_a_reader_is(tmp_path: Path) -> None:
    write(tmp_path / "rank_0", 0)
    with ReplayReader(tmp_path / "*") as reader, opened(tmp_path / "rank_1") as buffer:
        assert reader.get_stats()["unread_bytes"] == 0
        add(buffer, 1)
        reader.refresh()
        before = (tmp_path / "rank_1" / index.JOURNAL).stat().st_size
        add(buffer, 2, 3)
        behind = (tmp_path / "rank_1" / index.JOURNAL).stat().st_size - before
        stats = reader.get_stats()
        assert (stats["num_stores"], stats["num_trajectories"]) == (2, 2)
        assert stats["unread_bytes"] == behind > 0
        reader.refresh()
        stats = reader.get_stats()
        assert (stats["num_trajectories"], stats["unread_bytes"]) == (4, 0)


# -- forks ----------------------------------------------------------------------------------------


def sample_and_end(parent: Parent, buffer: TrajectoryReplayBuffer) -> list[int]:
    with pytest.raises(MmbufError, match="forked child"):
        buffer.add_trajectories([item(0)])
    got = [codes_of(buffer.sample(64)).tolist() for _ in range(3)]
    buffer.get_stats()
    buffer.close()
    return got[0]  # type: ignore[no-any-return]


def test_no_child_hangs_that_is_forked_while_the_writer_thread_works(tmp_path: Path) -> None:
    is_done = threading.Event()
    failures: list[BaseException] = []
    with opened(
        tmp_path,
        sample_window_size=4,
        cache_size=3,
        max_disk_bytes=400_000,
        max_pending_bytes=500_000,
    ) as buffer:
        add(buffer, 0)

        def add_without_pause() -> None:
            try:
                for i in itertools.count(1):
                    if is_done.is_set():
                        return
                    buffer.add_trajectories([item(i % 1000)])
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=add_without_pause)
        thread.start()
        streams = []
        try:
            for _ in range(50):
                with Child(sample_and_end, buffer) as child:
                    streams.append(tuple(child.result(20)))
        finally:
            is_done.set()
            thread.join()
        buffer.flush()
        assert len(set(streams)) == 50
        assert failures == []


def sample_what_is_left(parent: Parent, buffer: TrajectoryReplayBuffer) -> None:
    for i in range(4):
        buffer.get_trajectory(i)
    parent.send("ready")
    parent.receive()
    assert set((codes_of(buffer.sample(500)) // 1_000_000).tolist()) == {2, 3}
    assert buffer.window_ids == [2, 3]
    with pytest.raises(KeyError):
        buffer.get_trajectory(0)


def test_forked_child_goes_on_without_files_that_its_parent_removes(tmp_path: Path) -> None:
    with opened(tmp_path, sample_window_size=4, cache_size=2) as buffer:
        add(buffer, 0, 1, 2, 3)
        buffer.sample(500)  # fills the slots of the newest two
        with Child(sample_what_is_left, buffer) as child:
            child.receive()
            buffer.clear()
            child.pipe.send("cleared")
            child.result()


def add_until_told(parent: Parent, path: Path) -> None:
    with opened(path, **SMALL) as buffer:
        for i in itertools.count():
            buffer.add_trajectories([item(i % 1000)])
            if parent.has_spoken():
                return


def follow_and_end(parent: Parent, reader: ReplayReader) -> None:
    for _ in range(3):
        reader.refresh()
        codes_of(reader.sample(32))
    for key in reader.trajectory_ids:
        try:
            assert check_trajectory(reader, key) == key[1] % 1000
        except KeyError:  # it went
            continue
    reader.close()


def test_children_forked_while_a_thread_refreshes_follow_the_store(tmp_path: Path) -> None:
    is_done = threading.Event()
    failures: list[BaseException] = []
    with (
        Child(add_until_told, tmp_path / "store") as writer,
        ReplayReader(tmp_path / "*") as reader,
    ):
        assert reader.wait_for(1, 30)

        def refresh() -> None:
            try:
                while not is_done.is_set():
                    reader.refresh()
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=refresh)
        thread.start()
        try:
            for _ in range(25):
                with Child(follow_and_end, reader) as child:
                    child.result(20)
        finally:
            is_done.set()
            thread.join()
            writer.pipe.send("end")
            writer.result()
    assert failures == []


def codes_in_child(parent: Parent, reader: ReplayReader) -> list[int]:
    return codes_of(reader.sample(60)).tolist()  # type: ignore[no-any-return]


def test_forked_children_of_a_reader_draw_streams_of_their_own_that_a_seed_gives_again(
    tmp_path: Path,
) -> None:
    write(tmp_path, *range(5))
    runs = []
    for _ in range(2):
        with ReplayReader(tmp_path, seed=5) as reader:
            streams = []
            for _ in range(4):
                with Child(codes_in_child, reader) as child:
                    streams.append(tuple(child.result()))
            streams.append(tuple(codes_of(reader.sample(60)).tolist()))
            runs.append(streams)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 5


def read_with_few_descriptors(parent: Parent, path: Path, count: int) -> list[int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    found = []
    for options in ({}, {"cache_size": 20}, {"sample_window_size": 150}):
        with ReplayReader(path, **options) as reader:
            batches = [numbers_in(reader, 1000) for _ in range(3)]
            found.append(len(set().union(*batches)))
            assert [check_trajectory(reader, i) for i in range(count)] == list(range(count))
    return found


def test_64_descriptors_are_enough_for_200_trajectories(tmp_path: Path) -> None:
    with opened(tmp_path, sample_window_size=0) as buffer:
        buffer.add_trajectories([item(i) for i in range(200)])
    with Child(read_with_few_descriptors, tmp_path, 200) as child:
        all_of_them, few_resident, window = child.result()
    assert (all_of_them, few_resident, window) == (200, 200, 150)


# -- pickles and other ways to begin a process --------------------------------------------------


def test_a_reader_is_sent_in_a_few_kilobytes(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([item(i, 1) for i in range(300)])
    with ReplayReader(tmp_path, shard=(0, 2)) as reader:
        reader.sample(500)
        assert len(pickle.dumps(reader)) < 4096


def test_each_reader_that_was_sent_draws_from_a_stream_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, *range(5))
    runs = []
    for _ in range(2):
        with ReplayReader(tmp_path, seed=5) as reader:
            readers = [pickle.loads(pickle.dumps(reader)) for _ in range(4)]
            readers.append(pickle.loads(pickle.dumps(readers[0])))
            runs.append([tuple(codes_of(one.sample(60)).tolist()) for one in (*readers, reader)])
            for one in readers:
                one.close()
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6


def test_a_reader_that_was_sent_sees_what_it_would_see_here(tmp_path: Path) -> None:
    write(tmp_path / "rank_0", 0, 1, 2)
    write(tmp_path / "rank_1", 3, 4, 5)
    options: dict[str, Any] = {"sample_window_size": 2, "shard": (1, 2), "follow": False}
    with (
        ReplayReader(tmp_path / "rank_*", **options) as reader,
        pickle.loads(pickle.dumps(reader)) as sent,
    ):
        assert sent.trajectory_ids == reader.trajectory_ids
        assert sent.window_ids == reader.window_ids
        with opened(tmp_path / "rank_1") as buffer:
            add(buffer, 6, 7)
        assert not sent.refresh()


def send_codes(reader: ReplayReader, pipe: Any) -> None:
    """Of a few batches, when there are six trajectories. In a process of its own."""
    try:
        assert reader.wait_for(6, 30)
        pipe.send([codes_of(reader.sample(60)).tolist() for _ in range(2)])
    except BaseException as failure:
        pipe.send(repr(failure))


def test_spawn_and_forkserver_children_follow_with_streams_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer, ReplayReader(tmp_path, seed=7) as reader:
        add(buffer, *range(5))
        reader.refresh()
        processes, pipes = [], []
        for method in ("spawn", "spawn", "forkserver", "forkserver"):
            context = multiprocessing.get_context(method)
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=send_codes, args=(reader, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        add(buffer, 5)
        streams = []
        for process, pipe in zip(processes, pipes, strict=True):
            assert pipe.poll(60)
            streams.append(pipe.recv())
            process.join(30)
            assert process.exitcode == 0
            pipe.close()
    assert [s for s in streams if isinstance(s, str)] == []
    assert len({str(stream) for stream in streams}) == 4
    with ReplayReader(tmp_path, seed=7) as reader, pickle.loads(pickle.dumps(reader)) as first:
        assert streams[0] == [codes_of(first.sample(60)).tolist() for _ in range(2)]


@pytest.fixture(autouse=True, scope="module")
def _end_forkserver() -> Iterator[None]:
    yield
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]


# -- inside of a DataLoader -----------------------------------------------------------------------


class Batches(IterableDataset[Any]):
    """``count`` batches of a reader, which is opened here or, given a path, by each worker."""

    def __init__(self, reader: ReplayReader | Path, count: int) -> None:
        self.reader = reader
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.reader, Path):
            with ReplayReader(self.reader, seed=11) as reader:
                yield from self._codes(reader)
        else:
            yield from self._codes(self.reader)

    def _codes(self, reader: ReplayReader) -> Iterator[list[int]]:
        for _ in range(self.count):
            yield codes_of(reader.sample(20)).tolist()


def epochs_of(
    source: ReplayReader | Path, num_workers: int, is_persistent: bool, context: str | None = "fork"
) -> list[list[list[int]]]:
    """The batches of three epochs; the order of workers is that of the loader, always the same."""
    loader = DataLoader(
        Batches(source, 3),
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=is_persistent,
        multiprocessing_context=context if num_workers else None,
    )
    epochs = [list(loader) for _ in range(3)]
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
    return epochs


WORKERS = [(0, False), (1, False), (1, True), (4, False), (4, True)]
LOADERS = pytest.mark.filterwarnings("ignore:.*suggested max number of worker:UserWarning")


@LOADERS
@pytest.mark.parametrize(("num_workers", "is_persistent"), WORKERS)
def test_every_worker_and_epoch_has_other_batches_and_one_seed_gives_them_again(
    tmp_path: Path, num_workers: int, is_persistent: bool
) -> None:
    write(tmp_path, *range(6))
    runs = []
    for _ in range(2):
        with ReplayReader(tmp_path, seed=11) as reader:
            runs.append(epochs_of(reader, num_workers, is_persistent))
    batches = [tuple(batch) for epoch in runs[0] for batch in epoch]
    assert runs[0] == runs[1]
    assert len(batches) == len(set(batches)) == 9 * max(1, num_workers)


@LOADERS
@pytest.mark.parametrize(("num_workers", "is_persistent"), WORKERS[3:])
def test_workers_that_open_the_reader_themselves_have_streams_of_their_own(
    tmp_path: Path, num_workers: int, is_persistent: bool
) -> None:
    write(tmp_path, *range(6))
    runs = [epochs_of(tmp_path, num_workers, is_persistent) for _ in range(2)]
    assert runs[0] == runs[1]
    for epoch in runs[0]:
        assert len({tuple(batch) for batch in epoch}) == 3 * num_workers


@LOADERS
def test_spawned_workers_have_streams_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, *range(6))
    with ReplayReader(tmp_path, seed=11) as reader:
        loader = DataLoader(
            Batches(reader, 3), batch_size=None, num_workers=2, multiprocessing_context="spawn"
        )
        batches = [tuple(batch) for batch in loader]
    assert len(batches) == len(set(batches)) == 6


class Followed(IterableDataset[Any]):
    """The number of trajectories that a reader sees, until there are enough."""

    def __init__(self, reader: ReplayReader, count: int) -> None:
        self.reader = reader
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield len(self.reader)
        if self.reader.wait_for(self.count, 30):
            codes_of(self.reader.sample(100))
        yield len(self.reader)


def test_workers_follow_the_store(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        add(buffer, 0)
        with ReplayReader(tmp_path) as reader:
            loader = DataLoader(
                Followed(reader, 4),
                batch_size=None,
                num_workers=2,
                prefetch_factor=1,
                multiprocessing_context="fork",
            )
            iterator = iter(loader)
            first = next(iterator)
            add(buffer, 1, 2, 3)
            sizes = [first, *iterator]
            assert len(reader) == 1  # the parent has not looked
    assert sorted(sizes) in ([1, 1, 4, 4], [1, 4, 4, 4])


def test_a_store_that_begins_while_it_is_looked_at_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal appears between the look for one and the reading of a store without one."""
    real = checkpoint.read_rlinf
    begun: list[TrajectoryReplayBuffer] = []

    def read(path: str, damage: Any = None) -> Any:
        if not begun:
            begun.append(opened(Path(path)))
            add(begun[0], 0)
            begun[0].flush()
        return real(path, damage)

    (tmp_path / "rank_0").mkdir()
    monkeypatch.setattr(checkpoint, "read_rlinf", read)
    with ReplayReader(tmp_path / "rank_*") as reader, begun[0] as buffer:
        assert len(reader) == 1
        add(buffer, 1, 2)
        buffer.flush()
        reader.refresh()
        assert len(reader) == 3


# -- collectors and a trainer -----------------------------------------------------------------


def collect(parent: Parent, path: Path, rank: int, count: int) -> None:
    pick = random.Random(rank)
    with opened(path, sample_window_size=3, max_disk_bytes=600_000) as buffer:
        for i in range(count):
            buffer.add_trajectories([item(1000 * rank + i, pick.randint(1, 12))])
            if i % 5 == 0:
                buffer.flush()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_reads_what_two_collectors_write(tmp_path: Path, world_size: int) -> None:
    count = 60
    with (
        Child(collect, tmp_path / "rank_0", 0, count) as one,
        Child(collect, tmp_path / "rank_1", 1, count) as other,
    ):
        pattern = tmp_path / "rank_*"
        readers = [ReplayReader(pattern, shard=(r, world_size)) for r in range(world_size)]
        seen: list[set[Any]] = [set() for _ in readers]
        for reader in readers:
            assert reader.wait_for(1, 30)
        while one._process.is_alive() or other._process.is_alive():
            for reader, keys in zip(readers, seen, strict=True):
                codes_of(reader.sample(32))
                keys.update(reader.trajectory_ids)
        one.result()
        other.result()
        for reader, keys in zip(readers, seen, strict=True):
            reader.refresh()
            keys.update(reader.trajectory_ids)
            for key in reader.trajectory_ids:
                rank = int(key[0][-1])
                assert check_trajectory(reader, key) == 1000 * rank + key[1]
        assert not set.intersection(*seen) or world_size == 1
        with ReplayReader(pattern) as fresh:
            together = [key for reader in readers for key in reader.trajectory_ids]
            assert sorted(together) == sorted(fresh.trajectory_ids)
            assert {Path(directory).name for directory, _ in together} == {"rank_0", "rank_1"}
        for reader in readers:
            reader.close()
