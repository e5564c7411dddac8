"""Merge, split, convert: what the target holds, and that it is there whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pty
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from data import (
    anonymous_bytes,
    bits,
    coded,
    columns_of,
    contents_of,
    is_equal,
    names_of,
    trajectory,
)
from typer.testing import CliRunner

import mmbuf
from mmbuf import CorruptError, SchemaError, TrajectoryReplayBuffer, checkpoint, cli, files, storage
from mmbuf.transfer import Transferred, convert, merge, split

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(mmbuf.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
FORMATS = ["arrow", "npy", "pt", "pkl"]
NATIVE = ["arrow", "npy"]
is_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def store(
    directory: Path,
    numbers: Iterable[int],
    trajectory_format: str = "arrow",
    make: Callable[[int], dict[str, Any]] = trajectory,
) -> Path:
    """A closed live store of the trajectories ``make(number)``."""
    with TrajectoryReplayBuffer(
        seed=7,
        auto_save=True,
        auto_save_path=str(directory),
        trajectory_format=trajectory_format,
        sample_window_size=0,
    ) as buffer:
        buffer.add_trajectories(make(number) for number in numbers)
    return directory


def saved(directory: Path, numbers: Iterable[int], trajectory_format: str = "arrow") -> Path:
    """A checkpoint of the newest three, its generator not at its start."""
    with TrajectoryReplayBuffer(seed=5, sample_window_size=3) as buffer:
        buffer.add_trajectories(trajectory(number) for number in numbers)
        buffer.sample(100)
        buffer.save_checkpoint(directory, trajectory_format)
    return directory


def loaded(directory: Path, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    buffer.load_checkpoint(directory, **options)
    return buffer


def numbers_in(directory: Path) -> dict[int, int]:
    """The number of the trajectory under each id; every one of them whole, steps and text too."""
    numbers = {}
    with loaded(directory) as buffer:
        for trajectory_id in buffer.trajectory_ids:
            columns = buffer.get_trajectory(trajectory_id).to_columns()
            number = int(columns["curr_obs"]["states"][0, 0, 0])
            assert is_equal(columns, columns_of(trajectory(number)))
            assert columns["dones"].shape == (5, 3)
            numbers[trajectory_id] = number
    return numbers


def formats_in(directory: Path) -> list[str]:
    return [entry.format for entry in checkpoint.read(str(directory)).entries.values()]


def uuids_in(directory: Path) -> list[str]:
    return [entry.uuid for entry in checkpoint.read(str(directory)).entries.values()]


def inodes_in(directory: Path) -> dict[str, int]:
    """Of the trajectories' files, without their ids, which are not the same everywhere."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    trajectories = (path for path in paths if path.relative_to(directory).parts[0][0] == "t")
    return {
        re.sub(r"trajectory_\d+_", "", str(path.relative_to(directory))): path.stat().st_ino
        for path in trajectories
        if path.name != "trajectory_index.json"
    }


def size_of(directory: Path) -> int:
    """Bytes of the trajectories' files."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    names = ("trajectory_index.json", "metadata.json", "journal.jsonl", ".writer.lock")
    return sum(path.stat().st_size for path in paths if path.name not in names)


def batches(buffer: TrajectoryReplayBuffer, number: int = 10) -> list[Any]:
    return [buffer.sample(16) for _ in range(number)]


# -- merge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("one", FORMATS)
def test_merged_are_interleaved_by_their_ids(one: str, other: str, tmp_path: Path) -> None:
    sources = [store(tmp_path / "a", [0, 1, 2], one), saved(tmp_path / "b", [10, 11], other)]
    result = merge(sources, tmp_path / "m")
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 10, 2: 1, 3: 11, 4: 2}
    assert formats_in(tmp_path / "m") == [one, other, one, other, one]
    assert result == Transferred(5, 60, size_of(tmp_path / "m"), 0)


@pytest.mark.parametrize("trajectory_format", FORMATS)
def test_merged_are_all_of_the_format_asked_for(trajectory_format: str, tmp_path: Path) -> None:
    sources = [store(tmp_path / name, [number], name) for number, name in enumerate(FORMATS)]
    result = merge(sources, tmp_path / "m", trajectory_format=trajectory_format)
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert formats_in(tmp_path / "m") == [trajectory_format] * 4
    assert result == Transferred(4, 48, size_of(tmp_path / "m"), 0)


def test_interleaving_goes_by_the_ids_and_not_by_the_places(tmp_path: Path) -> None:
    sources = [saved(tmp_path / "a", range(5)), saved(tmp_path / "b", range(10, 14))]
    merge(sources, tmp_path / "m")  # ids 2, 3, 4 and 1, 2, 3
    assert numbers_in(tmp_path / "m") == {0: 11, 1: 2, 2: 12, 3: 3, 4: 13, 5: 4}


def test_appended_come_one_source_after_the_other(tmp_path: Path) -> None:
    sources = [store(tmp_path / "a", [0, 1, 2]), store(tmp_path / "b", [10, 11], "pt")]
    merge(sources, tmp_path / "m", order="appended")
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 1, 2: 2, 3: 10, 4: 11}
    merge(sources[::-1], tmp_path / "n", order="appended")
    assert numbers_in(tmp_path / "n") == {0: 10, 1: 11, 2: 0, 3: 1, 4: 2}


def test_merged_may_come_in_the_order_of_their_addition(tmp_path: Path) -> None:
    sources = [tmp_path / "a", tmp_path / "b"]
    buffers = [TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) for path in sources]
    for number in (0, 1, 2, 3, 4):
        buffers[number in (1, 2)].add_trajectories([trajectory(number)])
    for buffer in buffers:
        buffer.close()
    merge(sources, tmp_path / "m", order="added")
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}


def test_merged_go_on_with_the_next_id_and_the_first_seed(tmp_path: Path) -> None:
    sources = [saved(tmp_path / "a", range(5)), store(tmp_path / "b", [10])]
    merge(sources, tmp_path / "m")
    contents = checkpoint.read(str(tmp_path / "m"))
    assert (contents.trajectory_counter, contents.id_step) == (4, 1)
    assert (contents.metadata["seed"], "rng_state" in contents.metadata) == (5, False)


def test_what_is_known_of_a_trajectory_goes_with_it(tmp_path: Path) -> None:
    def make(number: int) -> dict[str, Any]:
        return trajectory(number) | {"max_episode_length": 80, "model_weights_id": f"w/{number}"}

    source = store(tmp_path / "a", [3], make=make)
    (known,) = checkpoint.read(str(source)).entries.values()
    merge([store(tmp_path / "b", [4], "pt"), source], tmp_path / "m", trajectory_format="npy")
    entry = checkpoint.read(str(tmp_path / "m")).entries[1]
    assert (entry.max_episode_length, entry.model_weights_id) == (80, "w/3")
    assert (entry.uuid, entry.added_at) == (known.uuid, known.added_at)
    assert entry.file == "trajectory_1_w%2f3.npy"


@pytest.mark.parametrize("trajectory_format", FORMATS)
def test_files_whose_format_stays_are_links(trajectory_format: str, tmp_path: Path) -> None:
    source = store(tmp_path / "a", [0, 1], trajectory_format)
    merge([source], tmp_path / "m")
    split(source, tmp_path / "s", num_shards=1)
    convert(source, tmp_path / "c", trajectory_format)
    known = inodes_in(source)
    for target in ("m", "s/rank_0", "c"):
        assert inodes_in(tmp_path / target) == known, target


@pytest.mark.parametrize("trajectory_format", NATIVE)
def test_one_trajectory_in_several_sources_is_taken_once(
    trajectory_format: str, tmp_path: Path
) -> None:
    source = store(tmp_path / "a", [0, 1, 2], trajectory_format)
    split(source, tmp_path / "b", first=2)
    convert(source, tmp_path / "c", {"arrow": "npy", "npy": "arrow"}[trajectory_format])
    result = merge([tmp_path / "b", source, tmp_path / "c"], tmp_path / "m")
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 1, 2: 2}
    assert formats_in(tmp_path / "m") == [trajectory_format] * 3
    assert uuids_in(tmp_path / "m") == uuids_in(source)
    assert result == Transferred(3, 36, size_of(tmp_path / "m"), 5)


@pytest.mark.parametrize("target_format", [None, *FORMATS])
@pytest.mark.parametrize("trajectory_format", ["pt", "pkl"])
def test_equal_files_without_a_name_of_their_own_are_all_taken(
    trajectory_format: str, target_format: str | None, tmp_path: Path
) -> None:
    source = store(tmp_path / "a", [0, 1], trajectory_format)
    convert(source, tmp_path / "b", "arrow")
    sources = [source, source, tmp_path / "b"]
    result = merge(sources, tmp_path / "m", trajectory_format=target_format)
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    uuids = uuids_in(tmp_path / "m")
    assert len(set(uuids)) == 6
    assert uuids[2::3] == uuids_in(tmp_path / "b")  # which their files say
    assert result.num_duplicates == 0


def test_store_that_is_being_written_can_be_merged(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a") as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.flush()
        merge([tmp_path / "a", store(tmp_path / "b", [1])], tmp_path / "m")
        buffer.add_trajectories([trajectory(2)])
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 1}


def test_empty_stores_add_nothing(tmp_path: Path) -> None:
    empty = store(tmp_path / "empty", [])
    merge([empty, store(tmp_path / "a", [4], "npy"), empty], tmp_path / "m")
    assert numbers_in(tmp_path / "m") == {0: 4}
    assert merge([empty, empty], tmp_path / "n") == Transferred(0, 0, 0, 0)
    assert numbers_in(tmp_path / "n") == {}


def _without_text(number: int) -> dict[str, Any]:
    fields = trajectory(number)
    del fields["curr_obs"]["task"]
    return fields


def _with_values(number: int) -> dict[str, Any]:
    return trajectory(number) | {"values": torch.zeros(4, 3)}


def _of_float64(number: int) -> dict[str, Any]:
    return trajectory(number) | {"rewards": torch.zeros(4, 3, dtype=torch.float64)}


def _turned(number: int) -> dict[str, Any]:
    fields = trajectory(number)
    fields["curr_obs"] = dict(reversed(fields["curr_obs"].items()))
    return fields


_REMEDY = 'Merge with columns "common" where some may lack columns of others.'


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _without_text,
            "column 'curr_obs.task': expected text rows of shape () as in {a}, got none. "
            + _REMEDY,
        ),
        (
            _with_values,
            "column 'values': expected none as in {a}, got float32 rows of shape (). " + _REMEDY,
        ),
        (
            _of_float64,
            "column 'rewards': expected float32 rows of shape () as in {a}, "
            "got float64 rows of shape ().",
        ),
        (
            _turned,
            "expected the columns in the order "
            "['rewards', 'actions', 'dones', 'curr_obs.states', 'curr_obs.task'] as in {a}, got "
            "['rewards', 'actions', 'dones', 'curr_obs.task', 'curr_obs.states'].",
        ),
    ],
)
def test_sources_of_other_columns_are_refused(
    make: Callable[[int], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    a, b = store(tmp_path / "a", [0]), store(tmp_path / "b", [0], make=make)
    with pytest.raises(SchemaError) as caught:
        merge([store(tmp_path / "empty", []), a, b], tmp_path / "m")
    assert str(caught.value) == f"{b}: {message.format(a=a)}"
    assert not (tmp_path / "m").exists()


# -- split -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trajectory_format", [None, *FORMATS])
def test_first_are_the_oldest_under_their_ids(
    trajectory_format: str | None, tmp_path: Path
) -> None:
    source = saved(tmp_path / "a", range(5), "npy")
    result = split(source, tmp_path / "s", first=2, trajectory_format=trajectory_format)
    assert numbers_in(tmp_path / "s") == {2: 2, 3: 3}
    assert formats_in(tmp_path / "s") == [trajectory_format or "npy"] * 2
    assert checkpoint.read(str(tmp_path / "s")).trajectory_counter == 5
    assert result == Transferred(2, 24, size_of(tmp_path / "s"), 0)


def test_all_of_them_as_first_sample_as_the_source(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", range(5))
    split(source, tmp_path / "s", first=3)
    with loaded(source) as known, loaded(tmp_path / "s") as buffer:
        assert is_equal(batches(buffer), batches(known))


@pytest.mark.parametrize("trajectory_format", [None, *FORMATS])
@pytest.mark.parametrize(
    ("num_shards", "ids"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6]]),
        (3, [[0, 1, 2], [3, 4], [5, 6]]),
        (9, [[0], [1], [2], [3], [4], [5], [6], [], []]),
    ],
)
def test_shards_are_contiguous_parts(
    num_shards: int, ids: list[list[int]], trajectory_format: str | None, tmp_path: Path
) -> None:
    source = store(tmp_path / "a", range(7))
    target = tmp_path / "s"
    result = split(source, target, num_shards=num_shards, trajectory_format=trajectory_format)
    ranks = [f"rank_{rank}" for rank in range(num_shards)]
    assert sorted(path.name for path in target.iterdir()) == ranks
    assert [numbers_in(target / rank) for rank in ranks] == [{i: i for i in part} for part in ids]
    assert formats_in(target / "rank_0") == [trajectory_format or "arrow"] * len(ids[0])
    assert result == Transferred(7, 84, size_of(target), 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shard_is_what_a_distributed_load_gives(world_size: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", range(5), "pt")
    split(source, tmp_path / "s", num_shards=world_size, trajectory_format="arrow")
    for rank in range(world_size):
        options = {"local_rank": rank, "world_size": world_size}
        with (
            loaded(source, is_distributed=True, **options) as known,
            loaded(tmp_path / "s" / f"rank_{rank}") as buffer,
        ):
            assert is_equal(batches(buffer), batches(known))
            for _ in range(2):
                buffer.add_trajectories([trajectory(9)])
                known.add_trajectories([trajectory(9)])
            assert buffer.trajectory_ids == known.trajectory_ids
            assert buffer.trajectory_ids[-2:] == [5 + rank, 5 + rank + world_size]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected either first or num_shards, got first=None, num_shards=None."),
        (
            {"first": 1, "num_shards": 2},
            "expected either first or num_shards, got first=1, num_shards=2.",
        ),
        ({"first": 0}, "first: expected at least 1, got 0."),
        ({"num_shards": 0}, "num_shards: expected at least 1, got 0."),
        ({"first": 4}, "first: expected at most 3, the trajectories of {source}, got 4."),
    ],
)
def test_parts_that_are_none_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = store(tmp_path / "a", range(3))
    with pytest.raises(ValueError, match=r"expected") as caught:
        split(source, tmp_path / "s", **options)
    assert str(caught.value) == message.format(source=source)
    assert not (tmp_path / "s").exists()


# -- convert ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("one", FORMATS)
def test_converted_store_goes_on_as_the_source_would(one: str, other: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", range(5), one)
    result = convert(source, tmp_path / "c", other)
    assert numbers_in(tmp_path / "c") == {2: 2, 3: 3, 4: 4}
    assert formats_in(tmp_path / "c") == [other] * 3
    assert result == Transferred(3, 36, size_of(tmp_path / "c"), 0)
    with loaded(source) as known, loaded(tmp_path / "c") as buffer:
        assert buffer.trajectory_counter == known.trajectory_counter == 5
        assert is_equal(batches(buffer), batches(known))
    metadata = json.loads((source / "metadata.json").read_text())
    assert json.loads((tmp_path / "c" / "metadata.json").read_text()) == metadata | {
        "trajectory_format": other
    }


def test_converted_live_store_keeps_its_counter_and_seed(tmp_path: Path) -> None:
    source = tmp_path / "a"
    with TrajectoryReplayBuffer(seed=3, auto_save=True, auto_save_path=source) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.clear()
        buffer.add_trajectories([trajectory(1)])
        buffer.sample(100)
    convert(source, tmp_path / "c", "npy")
    assert numbers_in(tmp_path / "c") == {1: 1}
    with loaded(tmp_path / "c") as converted, TrajectoryReplayBuffer(seed=3) as known:
        assert converted.trajectory_counter == 2
        known.add_trajectories([trajectory(1)])
        assert is_equal(batches(converted), batches(known))


def test_there_and_back_gives_the_same_files(tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    convert(source, tmp_path / "b", "npy")
    convert(tmp_path / "b", tmp_path / "c", "pt")
    convert(tmp_path / "c", tmp_path / "d", "arrow")
    for name in names_of(source):
        assert (tmp_path / "d" / name).read_bytes() == (source / name).read_bytes()


def test_equal_files_of_one_source_are_told_apart(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "rlinf_ranks" / "rank_0", tmp_path / "a")
    index = json.loads((source / "trajectory_index.json").read_text())
    (first,) = source.glob("trajectory_0_*")
    shutil.copy(first, source / first.name.replace("_0_", "_7_", 1))
    index["trajectory_id_list"].append(7)
    index["trajectory_index"]["7"] = index["trajectory_index"]["0"] | {"trajectory_id": 7}
    (source / "trajectory_index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "c", "arrow")
    contents = checkpoint.read(str(tmp_path / "c"))
    assert list(contents.entries) == [0, 1, 2, 7]
    assert len({entry.uuid for entry in contents.entries.values()}) == 4
    with loaded(tmp_path / "c") as buffer:
        one, other = (buffer.get_trajectory(i).to_columns() for i in (0, 7))
        assert is_equal(one, other)


@is_linux
@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("one", FORMATS)
def test_memory_does_not_grow_with_the_store(one: str, other: str, tmp_path: Path) -> None:
    def make(number: int) -> dict[str, Any]:
        return coded(number, 400, image=(128, 128, 1))  # 6.6 MB

    source = store(tmp_path / "a", range(12), one, make)
    grown = []
    before = anonymous_bytes()
    convert(
        source,
        tmp_path / "c",
        other,
        on_progress=lambda done, total: grown.append(anonymous_bytes() - before),
    )
    assert len(grown) == 12
    # Each is over when the next begins, but for what the allocator keeps.
    assert max(grown) < 24 << 20


# -- directories of RLinf --------------------------------------------------------------------------


def test_rank_directories_of_rlinf_become_one_store(tmp_path: Path) -> None:
    ranks = [
        shutil.copytree(FIXTURES / "rlinf_ranks" / rank, tmp_path / rank)
        for rank in ("rank_0", "rank_1")
    ]
    result = merge(ranks, tmp_path / "m", trajectory_format="arrow")
    assert (result.num_trajectories, result.num_rows, result.num_duplicates) == (6, 48, 0)
    expected = [json.loads((rank / "expected.json").read_text()) for rank in ranks]
    contents = checkpoint.read(str(tmp_path / "m"))
    assert contents.schema is not None
    assert list(contents.entries) == [0, 1, 2, 3, 4, 5]
    for trajectory_id, entry in contents.entries.items():
        path = str(tmp_path / "m" / entry.file)
        leaves = storage.FORMATS["arrow"].load(path, entry, contents.schema, can_map=False)
        got = {
            column.name: {
                "dtype": column.dtype,
                "sha256": hashlib.sha256(bits(leaf[: entry.num_samples])).hexdigest(),
                "shape": [entry.num_samples, *column.row_shape],
            }
            for column, leaf in zip(contents.schema.columns, leaves, strict=True)
        }
        assert got == expected[trajectory_id % 2][str(trajectory_id // 2)]


@pytest.mark.parametrize(
    ("name", "extra"), [("rlinf_pt", 0), ("rlinf_pkl", 0), ("rlinf_pt_extra_dones", 2)]
)
def test_directory_of_rlinf_comes_back_as_it_was(name: str, extra: int, tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / name, tmp_path / "a")
    own = formats_in(source)[0]
    convert(source, tmp_path / "b", "npy")
    convert(tmp_path / "b", tmp_path / "c", own)
    assert names_of(tmp_path / "c", f".{own}") == names_of(source, f".{own}")
    with loaded(source) as known, loaded(tmp_path / "c") as buffer:
        assert buffer.trajectory_ids == known.trajectory_ids
        for trajectory_id in known.trajectory_ids:
            got, want = buffer.get_trajectory(trajectory_id), known.get_trajectory(trajectory_id)
            assert is_equal(got.to_columns(), want.to_columns())
            assert got.model_weights_id == want.model_weights_id
            assert got.dones is not None
            assert want.rewards is not None
            assert got.dones.shape[0] == want.rewards.shape[0] + extra


# -- what is refused, and what an error leaves -----------------------------------------------------


def _merge(source: Path, target: Path, on_progress: Any = None) -> Transferred:
    return merge([source, source], target, trajectory_format="npy", on_progress=on_progress)


def _merge_links(source: Path, target: Path, on_progress: Any = None) -> Transferred:
    return merge([source], target, on_progress=on_progress)


def _split_first(source: Path, target: Path, on_progress: Any = None) -> Transferred:
    return split(source, target, first=3, on_progress=on_progress)


def _split_shards(source: Path, target: Path, on_progress: Any = None) -> Transferred:
    return split(source, target, num_shards=2, trajectory_format="pt", on_progress=on_progress)


def _convert(source: Path, target: Path, on_progress: Any = None) -> Transferred:
    return convert(source, target, "npy", on_progress=on_progress)


WAYS = [_merge, _merge_links, _split_first, _split_shards, _convert]
Way = Callable[..., Transferred]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))


@each_way
def test_source_is_only_read(way: Way, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    before = contents_of(source)
    way(source, tmp_path / "t")
    assert contents_of(source) == before


@each_way
def test_progress_counts_to_the_total(way: Way, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    calls: list[tuple[int, int]] = []
    way(source, tmp_path / "t", lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


@each_way
def test_empty_directory_and_missing_parents_are_accepted(way: Way, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    (tmp_path / "t").mkdir()
    way(source, tmp_path / "t")
    way(source, tmp_path / "new" / "inner" / "t")
    assert list(contents_of(tmp_path / "t")) == list(contents_of(tmp_path / "new" / "inner" / "t"))


@each_way
def test_target_that_is_not_empty_is_refused(way: Way, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    target = tmp_path / "t"
    target.mkdir()
    (target / "thesis.tex").touch()
    with pytest.raises(FileExistsError) as caught:
        way(source, target)
    assert str(caught.value) == (
        f"target: expected a new path or an empty directory, got one that is not empty: {target}"
    )
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


@each_way
def test_target_that_is_a_file_is_refused(way: Way, tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_text("a thesis")
    with pytest.raises(NotADirectoryError) as caught:
        way(store(tmp_path / "a", range(3)), target)
    assert str(caught.value) == (
        f"target: expected a new path or an empty directory, got a file: {target}"
    )
    assert target.read_text() == "a thesis"


@each_way
def test_target_that_is_the_source_is_refused(way: Way, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    before = contents_of(source)
    with pytest.raises(FileExistsError):
        way(source, source)
    assert contents_of(source) == before


@each_way
@pytest.mark.parametrize("inner", ["t", "b/c/t"])
def test_target_within_the_source_is_refused(way: Way, inner: str, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    (source / "b").mkdir()
    (tmp_path / "link").symlink_to(source / "b")
    before = contents_of(source)
    for target in (source / inner, tmp_path / "link" / inner):
        with pytest.raises(ValueError, match="outside") as caught:
            way(source, target)
        message = f"target: expected a path outside of {source}, got {target}."
        assert str(caught.value) == message
    assert contents_of(source) == before


@each_way
def test_target_beside_the_source_is_no_target_within(way: Way, tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    way(source, tmp_path / "a-new")
    way(source, tmp_path / "a.new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-new", "a.new"]


@each_way
def test_missing_source_is_named(way: Way, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/a: expected a store")):
        way(tmp_path / "a", tmp_path / "t")
    (tmp_path / "b").mkdir()
    (tmp_path / "t").mkdir()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/b: expected a store")):
        way(tmp_path / "b", tmp_path / "t")
    assert list((tmp_path / "t").iterdir()) == []


@each_way
@pytest.mark.parametrize("is_short", [False, True])
def test_damaged_source_is_seen_before_anything_is_done(
    way: Way, is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store(tmp_path / "a", range(3))
    path = source / names_of(source)[-1]
    if is_short:
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    monkeypatch.setattr(files, "make_directory", None)
    with pytest.raises(CorruptError) as caught:
        way(source, tmp_path / "t")
    assert caught.value.path == str(path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_arguments_that_are_none_are_refused(tmp_path: Path) -> None:
    source, target = store(tmp_path / "a", [0]), tmp_path / "t"
    with pytest.raises(ValueError, match=r"trajectory_format: expected one of .*, got 'zip'\."):
        convert(source, target, "zip")
    with pytest.raises(ValueError, match=r"trajectory_format: expected one of .*, got 'zip'\."):
        split(source, target, first=1, trajectory_format="zip")
    with pytest.raises(ValueError, match=r"trajectory_format: expected one of .*, got 'zip'\."):
        merge([source], target, trajectory_format="zip")
    with pytest.raises(ValueError, match=r"order: expected one of .*, got 'sorted'\."):
        merge([source], target, order="sorted")
    with pytest.raises(ValueError, match="sources: expected at least one path, got none"):
        merge([], target)
    with pytest.raises(TypeError, match="sources: expected a list of directories, got"):
        merge(str(source), target)
    assert not target.exists()


@each_way
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_error_at_any_trajectory_leaves_nothing(
    way: Way,
    is_there: bool,
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = store(tmp_path / "a", range(3)), tmp_path / "t"
    before = contents_of(tmp_path)
    names = {"a", "t"} if is_there else {"a"}
    if is_there:
        target.mkdir()
    copy = storage.copy
    for last in range(3):
        left = iter(range(last))

        def fail(*args: Any, left: Any = left, **options: Any) -> Any:
            if next(left, None) is None:
                raise error("here")
            return copy(*args, **options)

        monkeypatch.setattr(storage, "copy", fail)
        with pytest.raises(error, match="here"):
            way(source, target)
        assert {path.name for path in tmp_path.iterdir()} == names
        assert contents_of(tmp_path) == before
    monkeypatch.setattr(storage, "copy", copy)
    assert way(source, target).num_trajectories == 3


class _NoDiskError(OSError):
    pass


@each_way
def test_error_of_the_disk_at_any_moment_leaves_nothing_or_all(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = store(tmp_path / "a", range(3)), tmp_path / "t"
    left = [0]

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise _NoDiskError
            return function(*args)

        return call

    names = ("make_directory", "link_or_copy", "write_at", "replace", "rename", "unlink")
    for name in (*names, "sync", "sync_whole"):
        monkeypatch.setattr(files, name, failing(getattr(files, name)))
    num_whole = 0
    for number in range(1, 1000):
        left[0] = number
        try:
            way(source, target)
        except _NoDiskError:
            pass
        else:
            break
        left[0] = 0
        if target.exists():
            num_whole += 1
            assert {path.name for path in tmp_path.iterdir()} == {"a", "t"}
            for part in target.iterdir() if way is _split_shards else [target]:
                contents = checkpoint.read(str(part))
                checkpoint.check_files(str(part), contents)
            shutil.rmtree(target)
        else:
            assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert number > 15
    assert num_whole == 1  # the last sync, after which nothing can fail any more


@each_way
def test_killed_process_leaves_no_target_and_the_next_one_cleans_up(
    way: Way, tmp_path: Path
) -> None:
    source, target = store(tmp_path / "a", range(3)), tmp_path / "t"
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_transfer import {way.__name__} as way

def wait(done, total):
    if done == 2:
        print("there", flush=True)
        time.sleep(60)

way(Path({str(source)!r}), Path({str(target)!r}), wait)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    (hidden,) = {path.name for path in tmp_path.iterdir()} - {"a"}
    assert re.fullmatch(r"\.t\.\w+\.tmp", hidden)
    assert way(source, target).num_trajectories == 3
    assert {path.name for path in tmp_path.iterdir()} == {"a", "t"}


# -- the commands ----------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def message(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """With what `mmbuf` ends."""
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_merge_command_tells_its_counts(tmp_path: Path) -> None:
    a, b = store(tmp_path / "a", [0, 1]), store(tmp_path / "b", [10], "npy")
    result = run("merge", a, b, tmp_path / "m", "--json")
    counts = Transferred(3, 36, size_of(tmp_path / "m"), 0)
    assert (result.exit_code, json.loads(result.stdout)) == (0, dataclasses.asdict(counts))
    assert list(json.loads(result.stdout)) == [
        "num_trajectories",
        "num_rows",
        "size_bytes",
        "num_duplicates",
    ]
    assert result.stderr == ""
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 10, 2: 1}


def test_merge_command_takes_order_and_format(tmp_path: Path) -> None:
    a, b = store(tmp_path / "a", [0, 1]), store(tmp_path / "b", [10], "npy")
    result = run("merge", a, b, b, tmp_path / "m", "--order", "appended", "--format", "arrow")
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()
    assert re.fullmatch(rf"{tmp_path}/m: 3 trajectories, 36 rows, \d+\.\d kB", first)
    assert second == "left out, since another source has them too: 1"
    assert numbers_in(tmp_path / "m") == {0: 0, 1: 1, 2: 10}
    assert formats_in(tmp_path / "m") == ["arrow"] * 3


def test_split_command_takes_first_or_shards(tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    result = run("split", source, tmp_path / "s", "--first", "2", "--format", "npy")
    assert (result.exit_code, result.stderr) == (0, "")
    assert numbers_in(tmp_path / "s") == {0: 0, 1: 1}
    assert formats_in(tmp_path / "s") == ["npy", "npy"]
    result = run("split", source, tmp_path / "t", "--shards", "2", "--json")
    assert json.loads(result.stdout)["num_trajectories"] == 3
    assert numbers_in(tmp_path / "t" / "rank_1") == {2: 2}


def test_convert_command_takes_a_format(tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    result = run("convert", source, tmp_path / "c", "--format", "pt", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["size_bytes"] == size_of(tmp_path / "c")
    assert formats_in(tmp_path / "c") == ["pt"] * 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "{t}"),
        ("convert", "{a}", "{t}"),
        ("split", "{a}", "{t}"),
        ("split", "{a}", "{t}", "--first", "1", "--shards", "1"),
        ("split", "{a}", "{t}", "--first", "0"),
        ("split", "{a}", "{t}", "--shards", "x"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two(arguments: tuple[str, ...], tmp_path: Path) -> None:
    source, target = store(tmp_path / "a", range(3)), tmp_path / "t"
    result = run(*(argument.format(a=source, t=target) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("convert", "{a}", "{t}", "--format", "zip"),
            "--format: expected one of ['arrow', 'npy', 'pt', 'pkl'], got 'zip'.",
        ),
        (
            ("merge", "{a}", "{t}", "--order", "sorted"),
            "--order: expected one of ['interleaved', 'appended', 'added'], got 'sorted'.",
        ),
        (
            ("merge", "{a}", "{t}/none", "{t}"),
            "{t}/none: expected a store directory, got none.",
        ),
        (
            ("split", "{a}", "{a}/inner", "--first", "1"),
            "target: expected a path outside of {a}, got {a}/inner.",
        ),
        (
            ("split", "{a}", "{b}", "--shards", "2"),
            "target: expected a new path or an empty directory, got one that is not empty: {b}",
        ),
        (
            ("split", "{a}", "{t}", "--first", "4"),
            "--first: expected at most 3, the trajectories of {a}, got 4.",
        ),
        (
            ("merge", "{a}", "{b}", "{t}"),
            "{b}: column 'curr_obs.task': expected text rows of shape () as in {a}, got none. "
            + _REMEDY,
        ),
        (
            ("convert", "{bad}", "{t}", "--format", "npy"),
            "{bad}/trajectory_0_.arrow: expected {size} bytes, got 10. All that is wrong: "
            "mmbuf verify {bad}. To set it aside: mmbuf repair {bad}",
        ),
        (
            ("convert", "{worse}", "{t}", "--format", "npy"),
            "{worse}/trajectory_index.json: expected JSON: Expecting value: line 1 column 1 "
            "(char 0). All that is wrong: mmbuf verify {worse}. To set it aside: mmbuf repair "
            "{worse}",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistake_is_one_line(
    arguments: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = store(tmp_path / "a", range(3))
    b = store(tmp_path / "b", [0], make=_without_text)
    bad = store(tmp_path / "bad", [0])
    (file,) = names_of(bad)
    size = (bad / file).stat().st_size
    os.truncate(bad / file, 10)
    worse = tmp_path / "worse"
    worse.mkdir()
    (worse / "trajectory_index.json").write_text("index")
    words = {"a": a, "b": b, "t": tmp_path / "t", "bad": bad, "worse": worse, "size": size}
    before = contents_of(tmp_path)
    code = message(monkeypatch, *(argument.format(**words) for argument in arguments))
    assert code == "mmbuf: " + expected.format(**words)
    assert capsys.readouterr() == ("", "")
    assert contents_of(tmp_path) == before


def script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """With what a script of ``tools/`` ends, in this process."""
    path = ROOT / "tools" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value.code


def test_script_merges_rank_directories(tmp_path: Path) -> None:
    for rank in ("rank_0", "rank_1"):
        shutil.copytree(FIXTURES / "rlinf_ranks" / rank, tmp_path / rank)
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "merge.py", "rank_0", "rank_1", "m", "--json"],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "num_trajectories": 6,
        "num_rows": 48,
        "size_bytes": size_of(tmp_path / "m"),
        "num_duplicates": 0,
    }
    assert formats_in(tmp_path / "m") == ["pt"] * 6


def test_scripts_are_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store(tmp_path / "a", range(3))
    assert script("split", monkeypatch, source, tmp_path / "s", "--shards", 2) == 0
    assert numbers_in(tmp_path / "s" / "rank_0") == {0: 0, 1: 1}
    assert script("convert", monkeypatch, source, tmp_path / "c", "--format", "npy") == 0
    assert formats_in(tmp_path / "c") == ["npy"] * 3
    assert script("merge", monkeypatch, source, source) == (
        "mmbuf: target: expected a new path or an empty directory, got one that is not empty: "
        f"{source}"
    )


@pytest.mark.parametrize("name", ["merge", "split", "convert"])
def test_script_tells_its_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "tools" / f"{name}.py").read_text()
    assert f"    python tools/{name}.py " in text.split('"""')[1]
    assert script(name, monkeypatch, "--help") == 0
    assert f"Usage: mmbuf {name} [OPTIONS] " in capsys.readouterr().out


def test_bar_is_shown_on_a_terminal(tmp_path: Path) -> None:
    source = store(tmp_path / "a", range(3))
    command: list[str | Path] = [sys.executable, ROOT / "tools" / "convert.py"]
    terminal, stderr = pty.openpty()
    try:
        process = subprocess.Popen(
            [*command, source, tmp_path / "c", "--format", "npy", "--json"],
            env=ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        os.close(stderr)  # only the child holds it now: its end ends what can be read
        shown = all_of(terminal).decode()
    finally:
        os.close(terminal)
    result, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert json.loads(result)["num_trajectories"] == 3
    assert "converting" in shown
    assert "3/3" in re.sub(r"\x1b\[[0-9;]*m", "", shown)


def all_of(terminal: int) -> bytes:
    """What is written to a terminal until no process has it open, however many reads that takes."""
    chunks = []
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # EIO is how Linux tells the end of a terminal
                raise
            chunk = b""
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
