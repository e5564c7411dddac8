"""ReplayReader: opening, sampling and closing a store that someone else writes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data import (
    Halt,
    anonymous_bytes,
    columns_of,
    contents_of,
    is_equal,
    is_whole,
    names_of,
    opened,
    row_ids,
    trajectory,
    without_privileges,
)

from mmbuf import (
    ClosedError,
    CorruptError,
    EmptyBufferError,
    ReplayReader,
    SchemaError,
    TrajectoryReplayBuffer,
    files,
    index,
    stores,
)
from mmbuf.cache import TrajectoryCache
from mmbuf.formats import arrow
from mmbuf.places import Places
from mmbuf.window import Window

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
pytestmark = pytest.mark.usefixtures("without_fsync")
IMAGE = (64, 64)  # of 12 rows: 48 KiB, so that it is mapped
T, B = 4, 3
N = T * B


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store of three trajectories."""
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(i, image=IMAGE) for i in range(3)])
    return tmp_path / "store"


def all_ids(*numbers: int) -> set[tuple[int, int, int]]:
    return {(i, t, b) for i in numbers for t in range(T) for b in range(B)}


def state_of(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of the last change of a directory and of all that is in it."""
    paths = [directory, *directory.iterdir()]
    stats = {path.name: path.stat() for path in paths}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


# -- opening -------------------------------------------------------------------------------------


def test_opening_reads_no_data_file(
    store: Path, opened_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    really = files.read
    monkeypatch.setattr(files, "read", lambda path: read.append(Path(path).name) or really(path))
    with ReplayReader(store) as reader:
        assert len(reader) == 3
        assert reader.total_samples == 3 * N
        assert reader.get_stats()["cache_filled"] == 0
    assert (read, opened_files) == ([], [])


def test_no_system_call_opens_a_data_file_at_opening(store: Path) -> None:
    paths: list[str] = []
    is_watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and event == "open":
            paths.append(str(arguments[0]))

    sys.addaudithook(watch)  # never removed, only blinded
    with ReplayReader(store):
        is_watching = False
    assert [Path(path).name for path in paths if str(store) in path] == ["journal.jsonl"]


@pytest.mark.parametrize("is_held", [False, True])
def test_reading_changes_nothing_in_the_directory(store: Path, is_held: bool) -> None:
    with opened(store) if is_held else contextlib.nullcontext():
        before = state_of(store)
        with ReplayReader(store) as reader:
            reader.sample(100)
            reader.get_trajectory(1)
        assert state_of(store) == before


@LINUX_ONLY
def test_a_directory_that_may_only_be_read_is_enough(store: Path) -> None:
    for path in store.iterdir():
        path.chmod(0o444)
    store.chmod(0o555)

    def read() -> None:
        with pytest.raises(PermissionError):
            (store / "new").touch()
        with ReplayReader(store) as reader:
            batch = reader.sample(800)
        assert is_whole(batch)
        assert set(row_ids(batch)) == all_ids(0, 1, 2)

    try:
        without_privileges(read)
    finally:
        store.chmod(0o755)


def test_no_snapshot_is_needed(store: Path) -> None:
    (store / "metadata.json").unlink()
    (store / "trajectory_index.json").unlink()
    (store / ".writer.lock").unlink()
    with ReplayReader(store) as reader:
        assert set(row_ids(reader.sample(800))) == all_ids(0, 1, 2)


def test_a_store_that_was_moved_opens(store: Path, tmp_path: Path) -> None:
    store.rename(tmp_path / "moved")
    with ReplayReader(tmp_path / "moved") as reader:
        assert set(row_ids(reader.sample(800))) == all_ids(0, 1, 2)


def test_a_relative_path_stays_where_it_was(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    with ReplayReader("store") as reader:
        monkeypatch.chdir(tmp_path.parent)
        assert reader.path == str(store)
        assert is_whole(reader.sample(50))


def test_a_missing_path_is_not_found_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a store directory, got none"):
        ReplayReader(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"mine")
    with pytest.raises(FileNotFoundError, match=r"got neither journal\.jsonl"):
        ReplayReader(tmp_path)
    assert contents_of(tmp_path) == {"notes.txt": b"mine"}


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileNotFoundError, match="expected a store directory"):
        ReplayReader(tmp_path / "file")


# -- sampling ------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_added(store: Path) -> None:
    with ReplayReader(store) as reader:
        batch = reader.sample(800)
    assert is_whole(batch)
    assert set(row_ids(batch)) == all_ids(0, 1, 2)


def test_batches_are_those_of_a_buffer_with_the_same_rows_and_seed(store: Path) -> None:
    with ReplayReader(store, seed=4) as reader, TrajectoryReplayBuffer(seed=4) as twin:
        twin.add_trajectories([trajectory(i, image=IMAGE) for i in range(3)])
        for _ in range(3):
            assert is_equal(reader.sample(40), twin.sample(40))


def test_another_seed_gives_other_batches(store: Path) -> None:
    with ReplayReader(store, seed=1) as one, ReplayReader(store, seed=2) as other:
        assert row_ids(one.sample(50)) != row_ids(other.sample(50))


def test_no_global_random_state_is_read_or_set(store: Path) -> None:
    before = torch.get_rng_state().tolist()
    with ReplayReader(store) as one:
        first = one.sample(50)
    torch.manual_seed(5)
    with ReplayReader(store) as again:
        assert is_equal(again.sample(50), first)
    torch.set_rng_state(torch.tensor(before, dtype=torch.uint8))


def test_only_what_is_drawn_is_filled(tmp_path: Path, opened_files: list[str]) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, 1, 1) for i in range(50)])
    opened_files.clear()
    with ReplayReader(tmp_path) as reader:
        for _ in range(5):
            drawn = {i for i, _, _ in row_ids(reader.sample(3))}
            assert {f"trajectory_{i}_.arrow" for i in drawn} <= set(opened_files)
            assert reader.get_stats()["cache_filled"] == len(set(opened_files)) < 16
        assert len(opened_files) == len(set(opened_files))


def test_a_filled_store_is_sampled_without_opening_a_file(
    store: Path, opened_files: list[str]
) -> None:
    with ReplayReader(store) as reader:
        reader.sample(800)
        opened_files.clear()
        for _ in range(5):
            reader.sample(800)
    assert opened_files == []


def test_the_window_is_the_newest_and_the_list_is_all(store: Path) -> None:
    with ReplayReader(store, sample_window_size=2) as reader:
        assert (reader.trajectory_ids, reader.window_ids) == ([0, 1, 2], [1, 2])
        assert (len(reader), reader.total_samples) == (3, 3 * N)
        assert set(row_ids(reader.sample(800))) == all_ids(1, 2)
        stats = reader.get_stats()
        assert (stats["window_trajectories"], stats["window_samples"]) == (2, 2 * N)


def test_the_window_is_the_whole_store_by_default(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, 1, 1) for i in range(130)])
    with ReplayReader(tmp_path) as reader:
        assert reader.window_ids == list(range(130))
        assert {i for i, _, _ in row_ids(reader.sample(5_000))} == set(range(130))


def test_a_batch_is_refilled_in_place(store: Path) -> None:
    with ReplayReader(store) as reader:
        batch = reader.sample(64)
        address = batch["rewards"].data_ptr()
        before = row_ids(batch)
        assert reader.sample(64, out=batch) is batch
        assert batch["rewards"].data_ptr() == address
        assert row_ids(batch) != before
        assert is_whole(batch)


def test_what_is_no_such_batch_is_refused(store: Path) -> None:
    with ReplayReader(store) as reader:
        batch = reader.sample(64)
        del batch["rewards"]
        with pytest.raises(SchemaError, match=r"column 'rewards': .*missing"):
            reader.sample(64, out=batch)


@pytest.mark.parametrize("count", [0, -1])
def test_zero_or_fewer_rows_are_refused(store: Path, count: int) -> None:
    with ReplayReader(store) as reader, pytest.raises(ValueError, match=f"got {count}"):
        reader.sample(count)


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_store_without_trajectories_opens_and_has_nothing_to_draw(
    tmp_path: Path, is_cleared: bool
) -> None:
    with opened(tmp_path) as buffer:
        if is_cleared:
            buffer.add_trajectories([trajectory(0)])
            buffer.clear()
    with ReplayReader(tmp_path) as reader:
        assert (len(reader), reader.trajectory_ids, reader.window_ids) == (0, [], [])
        with pytest.raises(EmptyBufferError):
            reader.sample(1)


@pytest.mark.parametrize("window", [0, 1])
def test_each_trajectory_comes_back_as_it_was_added(store: Path, window: int) -> None:
    with ReplayReader(store, sample_window_size=window) as reader:
        for i in range(3):
            got = reader.get_trajectory(i).to_columns()
            assert is_equal(got, columns_of(trajectory(i, image=IMAGE)))


def test_what_was_got_is_private(store: Path) -> None:
    before = contents_of(store)
    with ReplayReader(store) as reader:
        reader.get_trajectory(0).curr_obs["image"].zero_()
        assert is_whole(reader.sample(100))
        assert is_equal(
            reader.get_trajectory(0).to_columns(), columns_of(trajectory(0, image=IMAGE))
        )
    assert contents_of(store) == before


def test_an_id_that_is_not_in_the_store_is_a_key_error(store: Path) -> None:
    with ReplayReader(store) as reader, pytest.raises(KeyError, match="trajectory 3"):
        reader.get_trajectory(3)


# -- beside a writer and other readers -----------------------------------------------------------


def test_a_store_is_read_while_its_writer_holds_it(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(3)])
        buffer.flush()
        with ReplayReader(tmp_path, follow=False) as reader:
            for i in range(3, 6):
                buffer.add_trajectories([trajectory(i)])
                batch = reader.sample(300)
                assert is_whole(batch)
                assert set(row_ids(batch)) <= all_ids(0, 1, 2)
            assert reader.trajectory_ids == [0, 1, 2]
        buffer.flush()
        with ReplayReader(tmp_path) as reader:
            assert set(row_ids(reader.sample(1_500))) == all_ids(0, 1, 2, 3, 4, 5)


def test_a_reader_keeps_no_writer_out(store: Path) -> None:
    with ReplayReader(store) as reader, opened(store) as buffer:
        buffer.add_trajectories([trajectory(3, image=IMAGE)])
        buffer.flush()
        assert (len(buffer), len(reader)) == (4, 3)
        assert len(names_of(store)) == 4


def test_several_readers_and_threads_sample_at_once(store: Path) -> None:
    readers = [ReplayReader(store, seed=seed) for seed in range(4)]
    ids: dict[int, list[tuple[int, int, int]]] = {}
    failures: list[object] = []

    def sample(thread: int) -> None:
        try:
            batches = [readers[thread // 2].sample(50) for _ in range(20)]
            if not all(map(is_whole, batches)):
                failures.append("a row of several trajectories")
            ids[thread] = [row for batch in batches for row in row_ids(batch)]
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=sample, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reader in readers:
        reader.close()
    assert failures == []
    assert len({tuple(rows) for rows in ids.values()}) == 8
    assert all(set(rows) == all_ids(0, 1, 2) for rows in ids.values())


# -- closing -------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[ReplayReader], object]] = {
    "sample": lambda reader: reader.sample(1),
    "get_trajectory": lambda reader: reader.get_trajectory(0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_reader_refuses_what_needs_it_open(store: Path, name: str) -> None:
    reader = ReplayReader(store)
    reader.close()
    with pytest.raises(ClosedError, match=f"{name}: expected an open reader"):
        CALLS[name](reader)


def test_closing_again_does_nothing(store: Path) -> None:
    reader = ReplayReader(store)
    reader.sample(10)
    before = contents_of(store)
    reader.close()
    reader.close()
    assert contents_of(store) == before


def test_leaving_the_context_closes(store: Path) -> None:
    with ReplayReader(store) as reader:
        pass
    with pytest.raises(ClosedError):
        reader.sample(1)


def test_batches_outlive_the_reader(store: Path) -> None:
    with ReplayReader(store) as reader:
        batch = reader.sample(400)
    assert is_whole(batch)


@LINUX_ONLY
def test_a_reader_takes_hardly_any_memory_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, image=(256, 256)) for i in range(40)])  # 31 MB
    with ReplayReader(tmp_path) as reader:
        reader.sample(4)
        before = anonymous_bytes()
        for _ in range(100):
            reader.sample(8)
        assert reader.get_stats()["cache_filled"] == 40
        assert anonymous_bytes() - before < 8 << 20


def test_the_repr_says_where_and_how_much(store: Path) -> None:
    with ReplayReader(store) as reader:
        where, what = repr(reader).splitlines()[0].split(": ", 1)
        assert where == f"<ReplayReader {store}"
        assert what == "3 trajectories, 36 rows, 148.6 kB, window: all"


@LINUX_ONLY
def test_an_error_at_opening_holds_no_journal(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *_: object) -> None:
        raise PermissionError("refused")

    monkeypatch.setattr(Window, "load", refuse)
    with pytest.raises(PermissionError) as error:
        ReplayReader(store)
    held = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
    assert [path for path in held if path.startswith(str(store))] == []
    assert error.value.__traceback__ is not None


@pytest.mark.parametrize("is_enabled", [True, False])
def test_opening_leaves_the_garbage_collector_as_it_was(store: Path, is_enabled: bool) -> None:
    seen: list[bool] = []
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.MonkeyPatch.context() as patch:
            really = stores.Stores.open
            patch.setattr(
                stores.Stores, "open", lambda self: seen.append(gc.isenabled()) or really(self)
            )
            ReplayReader(store).close()
        with pytest.raises(FileNotFoundError):
            ReplayReader(store / "none")
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    assert seen == [False]


def test_a_reader_that_another_thread_closes_takes_in_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses may be other people's by then."""
    with opened(tmp_path / "live") as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.flush()
        for number in range(1, 40):
            reader = ReplayReader(tmp_path / "live")
            failures: list[BaseException] = []

            def sample(reader: ReplayReader = reader, told: list[BaseException] = failures) -> None:
                try:
                    while True:
                        reader.sample(4)
                except ClosedError:
                    pass
                except BaseException as failure:
                    told.append(failure)

            threads = [threading.Thread(target=sample) for _ in range(2)]
            for thread in threads:
                thread.start()
            buffer.add_trajectories([valued(float(number))] * 3)
            buffer.flush()
            reader.close()
            for thread in threads:
                thread.join()
            assert failures == []
            cache = reader._window.cache
            assert cache is not None
            assert cache._view.low == cache._view.high
            with pytest.raises(ClosedError):
                cache.open([])


# -- what is replaced meanwhile ------------------------------------------------------------------


def valued(value: float, num_envs: int = 2) -> dict[str, Any]:
    return {"rewards": torch.full((4, num_envs, 10), value)}


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("is_given_again", [False, True])
@pytest.mark.parametrize("cache_size", [0, None])
def test_a_read_that_a_load_overtakes_gives_rows_of_no_other_trajectory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_size: int | None,
    is_given_again: bool,
    num_envs: int,
    trajectory_format: str,
) -> None:
    with opened(tmp_path / "live", trajectory_format=trajectory_format) as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([valued(1.0)])
        buffer.flush()
        with ReplayReader(tmp_path / "live", cache_size=cache_size) as reader:
            if cache_size == 0:
                reader.sample(50)  # all files have been looked at
            if is_given_again:  # as an earlier version did
                monkeypatch.setattr(index, "next_id", lambda lowest, counter, step: counter)
            halt = Halt(
                monkeypatch,
                Places,
                "read_rows" if cache_size == 0 else "fill",
                lambda _, slot, *__: slot.entry.trajectory_id == 1,
            )
            halt.run(lambda: reader.sample(50, with_info=True))
            buffer.load_checkpoint(tmp_path / "checkpoint")
            buffer.add_trajectories([valued(777.0, num_envs)])
            buffer.flush()
            batch = halt.result()
            assert (batch["rewards"] == batch["rewards"][:, :1]).all()
            ids, values = batch["info"]["trajectory_id"], batch["rewards"][:, 0]
            new = 1 if is_given_again else 2
            assert set(zip(ids.tolist(), values.tolist(), strict=True)) == {(0, 0.0), (new, 777.0)}


def test_a_trajectory_that_is_replaced_while_a_reader_reads_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "live") as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([valued(1.0)])
        buffer.flush()
        with ReplayReader(tmp_path / "live") as reader:
            halt = Halt(monkeypatch, arrow, "load", lambda path, *_: "_1_" in path)
            halt.run(lambda: reader.get_trajectory(1))
            buffer.load_checkpoint(tmp_path / "checkpoint")
            with pytest.raises(KeyError, match="trajectory 1"):
                halt.result()
            assert reader.trajectory_ids == [0]


def test_a_trajectory_is_not_missed_while_another_thread_takes_in_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "live") as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        with ReplayReader(tmp_path / "live") as reader:
            buffer.load_checkpoint(tmp_path / "checkpoint")
            halt = Halt(monkeypatch, TrajectoryCache, "open", lambda *_: True)
            halt.run(reader.refresh)
            assert (len(reader), reader.trajectory_ids) == (1, [0])
            assert reader.get_entry(0).trajectory_id == 0
            looking = threading.Timer(0.05, halt.result)
            looking.start()
            assert torch.equal(reader.get_trajectory(0).rewards, valued(0.0)["rewards"])
            assert torch.equal(reader.sample(8)["rewards"], torch.zeros(8, 10))
            looking.join()


def test_a_file_of_another_trajectory_under_the_name_of_a_listed_one_is_damage(
    store: Path, tmp_path: Path
) -> None:
    with opened(tmp_path / "other") as other:
        other.add_trajectories([trajectory(i, image=IMAGE) for i in range(3)])
    with ReplayReader(store, cache_size=0) as reader:
        reader.sample(100)
        os.replace(tmp_path / "other/trajectory_1_.arrow", store / "trajectory_1_.arrow")
        with pytest.raises(CorruptError, match=r"trajectory_1_.arrow: expected trajectory"):
            reader.sample(100)
