"""A store that may only take so many bytes of the disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import data
import pytest
import torch

from mmbuf import ReplayReader, TrajectoryReplayBuffer, files, index
from mmbuf.budget import _OVERHEAD_BYTES, DiskBudget
from mmbuf.errors import WriteError

ROW_BYTES = 64 << 10  # so that a file's head and tail hardly matter


def fields_of(i: int) -> dict[str, Any]:
    """[2, 4], half a megabyte."""
    return {
        "rewards": torch.full((2, 4), float(i)),
        "image": torch.full((2, 4, ROW_BYTES), i % 256, dtype=torch.uint8),
    }


def new_buffer(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)


def bytes_of(path: Path) -> int:
    return sum(
        files.disk_bytes_of(str(p)) for p in path.iterdir() if p.suffix in (".arrow", ".npy")
    )


# -- the count -----------------------------------------------------------------------------------


def test_without_a_limit_nothing_is_counted() -> None:
    budget = DiskBudget(None, 2)
    for i in range(5):
        budget.check(1 << 60)
        budget.add(i, 1 << 60)
    assert budget.excess() == []


def test_the_oldest_outside_the_window_go_until_the_rest_fits() -> None:
    budget = DiskBudget(50, 2)
    budget.load((i, 10) for i in range(7))
    assert budget.excess() == [0, 1]
    budget.dropped([0, 1])
    assert budget.excess() == []


def test_the_window_never_goes() -> None:
    budget = DiskBudget(5, 2)
    budget.load((i, 10) for i in range(4))
    assert budget.excess() == [0, 1]


def test_without_a_window_size_all_is_window() -> None:
    budget = DiskBudget(5, 0)
    budget.load((i, 10) for i in range(4))
    assert budget.excess() == []


def test_nothing_goes_while_files_are_held() -> None:
    budget = DiskBudget(5, 1)
    budget.load((i, 10) for i in range(3))
    with budget.held():
        assert budget.excess() == []
    assert budget.excess() == [0, 1]


def test_a_window_that_does_not_fit_is_refused() -> None:
    budget = DiskBudget(100 + _OVERHEAD_BYTES, 2)
    budget.load([(0, 60), (1, 50)])
    budget.check(50)  # 0 leaves the window
    with pytest.raises(WriteError, match="expected the window to fit in"):
        budget.check(51)


def test_an_estimate_gives_way_to_what_was_written() -> None:
    budget = DiskBudget(3 * _OVERHEAD_BYTES, 1)
    for i in range(4):
        budget.add(i, 0)
    assert budget.excess() == []  # what has no file cannot go
    for i in range(3):
        budget.written(i, _OVERHEAD_BYTES)
    assert budget.excess() == []  # what has no file takes no room
    budget.written(3, 2 * _OVERHEAD_BYTES)
    assert budget.excess() == [0, 1]
    budget.written(0, 0)
    budget.written(1, 0)
    assert budget.excess() == []
    budget.written(99, 1 << 60)  # cleared meanwhile
    assert budget.excess() == []


def test_a_window_of_files_never_goes_for_what_has_no_file() -> None:
    budget = DiskBudget(2 * _OVERHEAD_BYTES, 2)
    for i in range(6):
        budget.add(i, 0)
    for i in range(3):
        budget.written(i, _OVERHEAD_BYTES)
    assert budget.excess() == [0]


# -- a store -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt"])
def test_a_store_stays_within_its_bytes(tmp_path: Path, trajectory_format: str) -> None:
    limit = 3 << 20
    with new_buffer(
        tmp_path,
        sample_window_size=2,
        max_disk_bytes=limit,
        trajectory_format=trajectory_format,
    ) as buffer:
        for i in range(12):
            buffer.add_trajectories([fields_of(i)])
            buffer.flush()
            taken = sum(
                files.disk_bytes_of(str(p))
                for p in tmp_path.iterdir()
                if p.name.startswith("trajectory_") and p.suffix != ".json"
            )
            assert taken <= limit
            assert set(buffer.sample(64)["rewards"].tolist()) <= {float(i), float(i - 1)}
        assert buffer.trajectory_ids == [7, 8, 9, 10, 11]
        assert buffer.total_samples == 40
        assert buffer.trajectory_counter == 12
        assert buffer.get_trajectory(7).rewards[0, 0] == 7  # type: ignore[index]
        with pytest.raises(KeyError):
            buffer.get_trajectory(6)
    with new_buffer(tmp_path, sample_window_size=2, max_disk_bytes=limit) as buffer:
        assert buffer.trajectory_ids == [7, 8, 9, 10, 11]


def test_a_dropped_file_is_journalled_before_it_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    removed, appended = files.remove, files.append
    monkeypatch.setattr(files, "remove", lambda path: (calls.append("remove"), removed(path)))
    monkeypatch.setattr(files, "append", lambda fd, d: (calls.append("append"), appended(fd, d)))
    with new_buffer(tmp_path, sample_window_size=1, max_disk_bytes=1 << 20) as buffer:
        buffer.add_trajectories([fields_of(0)])
        buffer.flush()
        buffer.add_trajectories([fields_of(1)])
        buffer.flush()
        buffer.add_trajectories([fields_of(2)])
        buffer.flush()
    assert calls.count("remove") == 2
    first = calls.index("remove")
    assert calls[first - 2 : first] == ["append", "append"]  # the add, the drop


def test_a_trajectory_in_hand_stays_readable_when_its_file_goes(tmp_path: Path) -> None:
    with new_buffer(tmp_path, sample_window_size=1, max_disk_bytes=1 << 20) as buffer:
        buffer.add_trajectories([fields_of(0)])
        buffer.flush()
        held = buffer.get_trajectory(0)
        for i in range(1, 5):
            buffer.add_trajectories([fields_of(i)])
        buffer.flush()
        assert 0 not in buffer.trajectory_ids
        assert held.extra["image"].eq(0).all()


def test_a_window_larger_than_the_limit_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with new_buffer(tmp_path, sample_window_size=0, max_disk_bytes=2 << 20) as buffer:
        for i in range(3):
            buffer.add_trajectories([fields_of(i)])
        buffer.flush()
        before = data.contents_of(tmp_path)
        with pytest.raises(WriteError, match="Raise max_disk_bytes or shrink sample_window_size"):
            buffer.add_trajectories([fields_of(3)])
        assert buffer.trajectory_ids == [0, 1, 2]
        assert buffer.trajectory_counter == 3
        buffer.flush()
        assert data.contents_of(tmp_path) == before


def test_a_store_that_is_opened_with_less_room_shrinks_with_the_next_add(tmp_path: Path) -> None:
    with new_buffer(tmp_path, sample_window_size=2) as buffer:
        for i in range(8):
            buffer.add_trajectories([fields_of(i)])
    with new_buffer(tmp_path, sample_window_size=2, max_disk_bytes=2 << 20) as buffer:
        assert len(buffer) == 8
        buffer.add_trajectories([fields_of(8)])
        buffer.flush()
        assert buffer.trajectory_ids == [6, 7, 8]
        assert bytes_of(tmp_path) <= 2 << 20


def test_a_reader_of_a_store_that_drops_files_finds_all_that_the_journal_lists(
    tmp_path: Path,
) -> None:
    with new_buffer(tmp_path, sample_window_size=1, max_disk_bytes=1 << 20) as buffer:
        for i in range(6):
            buffer.add_trajectories([fields_of(i)])
            buffer.flush()
            with ReplayReader(tmp_path) as reader:
                assert reader.trajectory_ids == buffer.trajectory_ids
                assert reader.sample(16)["rewards"].max() == i
    contents, _ = index.read(str(tmp_path))
    names = {entry.file for entry in contents.entries.values()}
    assert names == {name for name in os.listdir(tmp_path) if name.endswith(".arrow")}


def test_a_checkpoint_that_is_being_saved_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_linking, may_link = threading.Event(), threading.Event()
    link = files.link_or_copy

    def slow_link(source: str, target: str) -> None:
        is_linking.set()
        assert may_link.wait(30)
        link(source, target)

    monkeypatch.setattr(files, "link_or_copy", slow_link)
    with new_buffer(tmp_path / "live", sample_window_size=2, max_disk_bytes=2 << 20) as buffer:
        buffer.add_trajectories([fields_of(0), fields_of(1)])
        thread = threading.Thread(target=buffer.save_checkpoint, args=(tmp_path / "saved",))
        thread.start()
        assert is_linking.wait(30)
        for i in range(2, 8):
            buffer.add_trajectories([fields_of(i)])
        may_link.set()
        thread.join(30)
        buffer.add_trajectories([fields_of(8)])
        buffer.flush()
        assert buffer.trajectory_ids == [6, 7, 8]
    with ReplayReader(tmp_path / "saved") as reader:
        assert reader.trajectory_ids == [0, 1]
        assert set(reader.sample(64)["rewards"].tolist()) == {0.0, 1.0}


def test_a_negative_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_disk_bytes: expected None or at least 0, got -1"):
        new_buffer(tmp_path, max_disk_bytes=-1)
