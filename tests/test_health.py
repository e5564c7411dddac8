"""What is damaged is found and named, and a repair keeps all that is whole.

Each trajectory is that of `data.trajectory`, so that every sampled row says whether it is right.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from data import columns_of, contents_of, is_equal, is_whole, names_of, row_ids, trajectory
from typer.testing import CliRunner

from mmbuf import (
    CorruptError,
    LockedError,
    ReplayReader,
    TrajectoryReplayBuffer,
    VersionError,
    cli,
    doctor,
    files,
    health,
    index,
    salvage,
    storage,
    transfer,
    vm,
)
from mmbuf.entry import Entry
from mmbuf.formats import arrow
from mmbuf.health import Report
from mmbuf.schema import Schema

FORMATS = list(storage.FORMATS)
IMAGE = (40, 40)  # 19,200 bytes a trajectory: mapped where mappings are

by_format = pytest.mark.parametrize("trajectory_format", FORMATS)


def buffer_on(path: Path, trajectory_format: str = "arrow", **options: Any) -> Any:
    return TrajectoryReplayBuffer(
        seed=1,
        sample_window_size=0,
        auto_save=True,
        auto_save_path=path,
        trajectory_format=trajectory_format,
        **options,
    )


def store(path: Path, trajectory_format: str = "arrow", count: int = 4) -> Path:
    """A store of trajectories 0 ... ``count``, each longer than the one before."""
    with buffer_on(path, trajectory_format) as buffer:
        buffer.add_trajectories([trajectory(i, 4 + i, image=IMAGE) for i in range(count)])
    return path


def checkpoint_of(path: Path, trajectory_format: str = "arrow", count: int = 4) -> Path:
    with TrajectoryReplayBuffer(
        sample_window_size=0, trajectory_format=trajectory_format
    ) as buffer:
        buffer.add_trajectories([trajectory(i, 4 + i, image=IMAGE) for i in range(count)])
        buffer.save_checkpoint(path)
    return path


def file_of(path: Path, i: int) -> Path:
    (found,) = path.glob(f"trajectory_{i}_*")
    return found


def entry_of(path: Path, i: int) -> tuple[Entry, Schema]:
    contents = index.read(str(path))[0]
    assert contents.schema is not None
    return contents.entries[i], contents.schema


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage(path: Path) -> list[tuple[str, str]]:
    """Name and what is said of all that is damaged."""
    return [
        (str(Path(finding.path).relative_to(path)), finding.what)
        for finding in health.verify(path)
        if finding.is_damage
    ]


def remarks(path: Path) -> list[tuple[str, str]]:
    findings = health.verify(path)
    assert not any(finding.is_damage for finding in findings)
    return [(str(Path(finding.path).relative_to(path)), finding.what) for finding in findings]


def assert_holds(path: Path, numbers: dict[int, int]) -> None:
    """The directory opens and holds these trajectories, by id, each row of them right."""
    assert list(index.read(str(path))[0].entries) == list(numbers)
    with ReplayReader(path) as reader:
        assert sorted(reader.trajectory_ids) == sorted(numbers)
        for trajectory_id, i in numbers.items():
            got = reader.get_trajectory(trajectory_id).to_columns()
            assert is_equal(got, columns_of(TRAJECTORIES[i]))
        if numbers:
            batch = reader.sample(300)
            assert is_whole(batch)
            assert {i for i, _, _ in row_ids(batch)} == set(numbers.values())


TRAJECTORIES = {i: trajectory(i, 4 + i, image=IMAGE) for i in range(6)}


# -- what is whole ---------------------------------------------------------------------------------


@by_format
@pytest.mark.parametrize("make", [store, checkpoint_of])
def test_nothing_is_found_in_what_is_whole(
    tmp_path: Path, trajectory_format: str, make: Callable[[Path, str], Path]
) -> None:
    path = make(tmp_path / "a", trajectory_format)
    before = contents_of(path)
    assert health.verify(path) == []
    rows = 3 * (4 + 5 + 6 + 7)
    assert health.repair(path, dry_run=True) == Report(4, rows)
    assert health.repair(path) == Report(4, rows)
    assert contents_of(path) == before


def test_nothing_is_found_in_a_store_that_was_cleared_loaded_and_bounded(tmp_path: Path) -> None:
    saved = checkpoint_of(tmp_path / "c", "npy", 2)
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([TRAJECTORIES[0], TRAJECTORIES[1]])
        buffer.clear()
        buffer.load_checkpoint(saved)
        buffer.add_trajectories([TRAJECTORIES[2]])
        buffer.flush()
        assert health.verify(tmp_path / "a") == []
    before = contents_of(tmp_path / "a")
    assert not health.repair(tmp_path / "a").has_changes
    assert contents_of(tmp_path / "a") == before


@pytest.mark.parametrize(
    "name",
    [
        *("rlinf_pt", "rlinf_pkl", "rlinf_pt_extra_dones", "rlinf_pt_ragged", "rlinf_pt_window2"),
        "rlinf_main",
    ],
)
def test_nothing_is_found_in_what_rlinf_wrote(tmp_path: Path, name: str) -> None:
    for found in (Path(__file__).parent / "fixtures" / name).rglob("metadata.json"):
        path = Path(shutil.copytree(found.parent, tmp_path / found.parent.name))
        before = contents_of(path)
        assert health.verify(path) == []
        assert not health.repair(path).has_changes
        assert contents_of(path) == before


def test_a_damaged_file_of_rlinf_is_named(tmp_path: Path) -> None:
    fixture = next((Path(__file__).parent / "fixtures" / "rlinf_pt").rglob("metadata.json")).parent
    path = Path(shutil.copytree(fixture, tmp_path / "a"))
    names = names_of(path, ".pt")
    os.truncate(path / names[0], 1000)
    (finding,) = damage(path)
    assert finding[0] == names[0]
    report = health.repair(path)
    assert list(report.quarantined) == [names[0]]
    assert report.num_trajectories == len(names) - 1
    assert damage(path) == []
    assert not health.repair(path).has_changes


def test_an_empty_store_is_whole(tmp_path: Path) -> None:
    with buffer_on(tmp_path / "a"):
        assert health.verify(tmp_path / "a") == []
    assert health.verify(tmp_path / "a") == []
    assert health.repair(tmp_path / "a") == Report()


def test_a_column_of_zeros_with_a_zeroed_page_is_whole(tmp_path: Path) -> None:
    fields = {"rewards": np.zeros((4, 1), np.float32), "image": np.zeros((4, 1, 100, 100), "uint8")}
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([fields])
    entry, _ = entry_of(tmp_path / "a", 0)
    with open(file_of(tmp_path / "a", 0), "r+b") as file:
        file.seek(entry.parts[1].offset)
        file.write(b"\0" * 4096)
    assert health.verify(tmp_path / "a") == []


def test_progress_counts_trajectories(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    health.verify(store(tmp_path / "a"), on_progress=lambda *call: calls.append(call))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_progress_that_raises_ends_the_work(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        health.verify(store(tmp_path / "a"), on_progress=stop)


@pytest.mark.parametrize("count", [0, -1])
def test_less_than_one_thread_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="num_threads: expected None or at least 1"):
        health.verify(store(tmp_path / "a"), num_threads=count)


@pytest.mark.parametrize("call", [health.verify, health.repair, doctor.examine])
def test_what_is_no_directory_is_told(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    with pytest.raises(FileNotFoundError, match="expected a store directory"):
        call(tmp_path / "none")


@pytest.mark.parametrize("call", [health.verify, health.repair])
def test_a_directory_without_a_store_is_told(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    (tmp_path / "weights.pt").write_bytes(b"mine")
    with pytest.raises(FileNotFoundError, match="expected a store or a checkpoint"):
        call(tmp_path)
    assert os.listdir(tmp_path) == ["weights.pt"]


# -- damage of arrow files -------------------------------------------------------------------------


def arrow_places(path: Path) -> dict[str, int]:
    """Bytes of the file of trajectory 1, by what they are."""
    entry, schema = entry_of(path, 1)
    data = file_of(path, 1).read_bytes()
    places = {
        "header in the head": data.index(b'"max_episode_length": 0') + 22,
        "header in the footer": data.rindex(b'"max_episode_length": 0') + 22,
        "uuid": data.index(entry.uuid.encode()),
        "name of a column for others": data.index(b"\x07\0\0\0rewards") + 5,
        "magic": 0,
        "last magic": len(data) - 1,
        "size of the footer": len(data) - 10,
    }
    for column, part in zip(schema.columns, entry.parts, strict=True):
        places[f"{column.name}, first byte"] = part.offset
        places[f"{column.name}, last byte"] = part.offset + part.rows * column.row_bytes - 1
        if part.table is not None:
            places["ends of the text"] = part.table.offsets_at + 4
            places["text"] = part.table.bytes_at
            places["last of the text"] = part.table.bytes_at + part.table.num_bytes - 1
    return places


ARROW_PLACES = [
    *("header in the head", "header in the footer", "uuid", "name of a column for others"),
    *("magic", "last magic", "size of the footer"),
    *(
        f"{name}, {which} byte"
        for name in ("actions", "rewards", "dones", "curr_obs.states", "curr_obs.task")
        for which in ("first", "last")
    ),
    *("curr_obs.image, first byte", "curr_obs.image, last byte"),
    *("ends of the text", "text", "last of the text"),
]


def test_all_places_of_an_arrow_file_are_tried(tmp_path: Path) -> None:
    assert set(arrow_places(store(tmp_path / "a"))) == set(ARROW_PLACES)


@pytest.mark.parametrize("place", ARROW_PLACES)
def test_a_flipped_bit_of_an_arrow_file_is_found(tmp_path: Path, place: str) -> None:
    path = store(tmp_path / "a")
    file = file_of(path, 1)
    flip(file, arrow_places(path)[place])
    ((name, what),) = damage(path)
    assert name == file.name
    if ", " in place:
        column = place.split(", ")[0]
        assert what == f"column {column!r}: expected bytes of its CRC-32, got others."


def test_all_damaged_columns_are_named(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    for column in ("rewards", "curr_obs.image", "curr_obs.task"):
        flip(file_of(path, 2), arrow_places_of(path, 2, column))
    assert damage(path) == [
        (
            "trajectory_2_.arrow",
            "column 'rewards', 'curr_obs.task', 'curr_obs.image': "
            "expected bytes of its CRC-32, got others.",
        )
    ]


def arrow_places_of(path: Path, i: int, column: str) -> int:
    entry, schema = entry_of(path, i)
    (position,) = [p for p, c in enumerate(schema.columns) if c.name == column]
    return entry.parts[position].offset


def test_ends_of_text_that_moved_are_found(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    entry, schema = entry_of(path, 0)
    (table,) = [part.table for part in entry.parts if part.table is not None]
    file = file_of(path, 0)
    data = bytearray(file.read_bytes())
    ends = np.frombuffer(data, "<i4", table.num_strings + 1, table.offsets_at)
    ends[1] += 1  # the strings one after the other are the same as before
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"column 'curr_obs.task': expected bytes of its CRC-32"):
        storage.verify(str(file), entry, schema)


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_anywhere_is_found_or_harmless_to_all(tmp_path: Path, seed: int) -> None:
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([trajectory(0, 2, 2)])
    entry, schema = entry_of(tmp_path / "a", 0)
    file = file_of(tmp_path / "a", 0)
    data = file.read_bytes()
    rows = rows_of(file, entry, schema)
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    generator = np.random.default_rng(seed)
    found = 0
    for at in generator.choice(len(data), 300, replace=False).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(generator.integers(8))
        file.write_bytes(damaged)
        try:
            storage.verify(str(file), entry, schema)
        except CorruptError:
            found += 1
            continue
        assert rows_of(file, entry, schema) == rows, at
        read = pa.ipc.open_file(pa.BufferReader(bytes(damaged))).read_all()
        assert read.equals(table, check_metadata=True), at
    assert found > 100


def rows_of(file: Path, entry: Entry, schema: Schema) -> list[Any]:
    leaves = arrow.load(str(file), entry, schema, can_map=False)
    return [leaf if isinstance(leaf, list) else leaf.tobytes() for leaf in leaves]


def test_columns_larger_than_one_read_are_summed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmbuf.formats.native._CRC_BYTES", 1000)
    path = store(tmp_path / "a")
    assert health.verify(path) == []
    entry, schema = entry_of(path, 3)
    column = [column.name for column in schema.columns].index("curr_obs.image")
    flip(file_of(path, 3), entry.parts[column].offset + 12_345)
    assert [name for name, _ in damage(path)] == ["trajectory_3_.arrow"]


# -- damage of every format, and its repair --------------------------------------------------------


def inner(path: Path, i: int) -> Path:
    """The file with the rewards of trajectory ``i``."""
    file = file_of(path, i)
    return file / "rewards.npy" if file.is_dir() else file


def truncate(path: Path) -> None:
    os.truncate(inner(path, 1), 100)


def empty(path: Path) -> None:
    os.truncate(inner(path, 1), 0)


def garbage(path: Path) -> None:
    inner(path, 1).write_bytes(np.random.default_rng(0).bytes(3000))


def zero_page(path: Path) -> None:
    file = file_of(path, 1)
    image = file / "curr_obs.image.npy" if file.is_dir() else file
    at = image.read_bytes().index(bytes([6]) * 1600)  # i + t + b
    with open(image, "r+b") as opened:
        # A pickle has no checksum: of its rows nothing is known.
        opened.seek(0 if file.suffix == ".pkl" else at)
        opened.write(b"\0" * 1600)


def lengthen(path: Path) -> None:
    with open(inner(path, 1), "ab") as file:
        file.write(b"\0" * 10)


BREAKS = [truncate, empty, garbage, zero_page]


@by_format
@pytest.mark.parametrize("break_it", BREAKS)
@pytest.mark.parametrize("make", [store, checkpoint_of])
def test_a_broken_file_is_found_and_repaired(
    tmp_path: Path,
    trajectory_format: str,
    break_it: Callable[[Path], None],
    make: Callable[[Path, str], Path],
) -> None:
    path = make(tmp_path / "a", trajectory_format)
    name = file_of(path, 1).name
    break_it(path)
    ((found, _),) = damage(path)
    assert file_of_name(found) == name

    before = contents_of(path)
    planned = health.repair(path, dry_run=True)
    assert contents_of(path) == before

    report = health.repair(path)
    assert report == planned
    assert list(report.quarantined) == [name]
    truth = "journal.jsonl" if make is store else "trajectory_index.json"
    expected = Report(3, 3 * (4 + 6 + 7), [], {}, [], report.quarantined)
    expected.rewritten = sorted({truth, "metadata.json", "trajectory_index.json"})
    assert report == expected
    moved = {key: value for key, value in before.items() if key.split("/")[0] in (name, truth)}
    assert {
        key.removeprefix("quarantine/"): value
        for key, value in contents_of(path).items()
        if key.startswith("quarantine/")
    } == moved
    assert_repaired(path, {0: 0, 2: 2, 3: 3})


def assert_repaired(path: Path, numbers: dict[int, int], next_id: int = 4) -> None:
    """It is whole, holds these, stays as it is when it is repaired again, and goes on."""
    assert health.verify(path) == []
    assert_holds(path, numbers)
    before = contents_of(path)
    assert not health.repair(path).has_changes
    assert contents_of(path) == before
    is_live = (path / "journal.jsonl").exists()
    options = {} if is_live else {"auto_save": False}
    with (
        buffer_on(path) if is_live else TrajectoryReplayBuffer(sample_window_size=0, **options)
    ) as buffer:
        if not is_live:
            buffer.load_checkpoint(path)
        assert buffer.trajectory_ids == list(numbers)
        assert buffer.trajectory_counter == next_id
        buffer.add_trajectories([TRAJECTORIES[5]])
        buffer.flush()
        assert buffer.trajectory_ids == [*numbers, next_id]
        assert is_whole(buffer.sample(100))
    if is_live:
        assert health.verify(path) == []


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_a_file_with_bytes_behind_it_is_found(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "a", trajectory_format)
    lengthen(path)
    ((found, _),) = damage(path)
    assert list(health.repair(path).quarantined) == [file_of_name(found)]
    assert_repaired(path, {0: 0, 2: 2, 3: 3})


def file_of_name(found: str) -> str:
    return found.split("/")[0]


NPY_FILES = [
    *("trajectory.json", "actions.npy", "rewards.npy", "dones.npy", "curr_obs.states.npy"),
    *("curr_obs.task.npy", "curr_obs.image.npy"),
]


def test_all_files_of_an_npy_directory_are_tried(tmp_path: Path) -> None:
    path = store(tmp_path / "a", "npy")
    assert sorted(file.name for file in file_of(path, 1).iterdir()) == sorted(NPY_FILES)


@pytest.mark.parametrize("name", NPY_FILES)
@pytest.mark.parametrize("at", [0, 60, -1], ids=["magic", "header", "last"])
def test_a_flipped_bit_of_an_npy_file_is_found(tmp_path: Path, name: str, at: int) -> None:
    path = store(tmp_path / "a", "npy")
    flip(file_of(path, 1) / name, at if at >= 0 or name != "trajectory.json" else -2)
    ((found, _),) = damage(path)
    assert found.startswith("trajectory_1_.npy")
    assert list(health.repair(path).quarantined) == ["trajectory_1_.npy"]
    assert_repaired(path, {0: 0, 2: 2, 3: 3})


def test_a_flipped_byte_of_an_npy_text_is_found(tmp_path: Path) -> None:
    path = store(tmp_path / "a", "npy")
    file = file_of(path, 1) / "trajectory.json"
    flip(file, file.read_bytes().index(b"task 1") + 5)
    assert damage(path) == [
        ("trajectory_1_.npy", "column 'curr_obs.task': expected bytes of its CRC-32, got others.")
    ]


@pytest.mark.parametrize("name", NPY_FILES)
def test_a_missing_npy_file_is_found(tmp_path: Path, name: str) -> None:
    path = store(tmp_path / "a", "npy")
    (file_of(path, 1) / name).unlink()
    assert [found for found, _ in damage(path)] == [f"trajectory_1_.npy/{name}"]
    assert list(health.repair(path).quarantined) == ["trajectory_1_.npy"]
    assert_repaired(path, {0: 0, 2: 2, 3: 3})


def test_a_flipped_bit_of_any_record_of_a_pt_file_is_found(tmp_path: Path) -> None:
    path = store(tmp_path / "a", "pt")
    file = file_of(path, 1)
    data = file.read_bytes()
    entry, schema = entry_of(path, 1)
    import zipfile

    with zipfile.ZipFile(file) as archive:
        records = [record for record in archive.filelist if record.file_size > 1]
    assert len(records) > 6
    for record in records:
        head = data[record.header_offset : record.header_offset + 30]
        start = record.header_offset + 30 + sum(np.frombuffer(head[26:30], "<u2").tolist())
        for at in (start, start + record.file_size - 1):
            damaged = bytearray(data)
            damaged[at] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(CorruptError):
                storage.verify(str(file), entry, schema)


def tell(path: Path, i: int, **said: Any) -> None:
    """Have the journal say something else of trajectory ``i``, with a checksum that fits."""
    contents = index.read(str(path))[0]
    contents.entries[i] = dataclasses.replace(contents.entries[i], **said)
    index.write_journal(str(path), contents)


LIES: dict[str, Any] = {
    "steps": (lambda entry: {"shape": (entry.num_steps - 1, 3)}),
    "environments": (lambda entry: {"shape": (entry.num_steps, 2)}),
    "steps and environments": (lambda entry: {"shape": (3, entry.num_steps)}),
    "rows of a column": (
        lambda entry: {"parts": (entry.parts[0]._replace(rows=16), *entry.parts[1:])}
    ),
    "length of episodes": (lambda entry: {"max_episode_length": 77}),
    "weights": (lambda entry: {"model_weights_id": "others"}),
}


@pytest.mark.parametrize(
    ("trajectory_format", "lie"),
    [
        (name, lie)
        for name in FORMATS
        for lie in LIES
        # What is left out the index decides, as RLinf's does.
        if name in ("arrow", "npy") or lie not in ("length of episodes", "weights")
    ],
)
def test_a_journal_that_lies_is_found_and_mended(
    tmp_path: Path, trajectory_format: str, lie: str
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    name = file_of(path, 1).name
    tell(path, 1, **LIES[lie](entry_of(path, 1)[0]))
    # Some are found when the index is read, and the others when the file is.
    with pytest.raises(CorruptError, match=re.escape(name)), ReplayReader(path) as reader:
        reader.get_trajectory(1)
    with pytest.raises(CorruptError, match=re.escape(name)), buffer_on(path) as buffer:
        buffer.sample(500)
    ((found, _),) = damage(path)
    assert file_of_name(found) == name
    report = health.repair(path)
    is_in_doubt = trajectory_format == "npy" and lie not in (
        *("steps", "environments", "rows of a column"),
    )
    if is_in_doubt:  # its header has no checksum: the journal may be right
        assert list(report.quarantined) == [name]
        assert_repaired(path, {0: 0, 2: 2, 3: 3})
    else:
        assert (report.quarantined, report.lost, report.renumbered) == ({}, [], {})
        if trajectory_format in ("arrow", "npy"):
            assert (report.corrected, report.taken_in) == ([name], [])
        assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


def test_a_journal_that_gives_two_columns_each_others_rows_is_found_and_mended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    with buffer_on(path) as buffer:
        buffer.add_trajectories(
            [{"a": torch.full((4, 2), float(i)), "b": torch.full((4, 2), -1.0)} for i in range(3)]
        )
    first, second = entry_of(path, 1)[0].parts
    tell(path, 1, parts=(second, first))
    with ReplayReader(path) as reader, pytest.raises(CorruptError, match="column 'a': expected it"):
        reader.sample(100)
    ((name, _),) = damage(path)
    assert name == "trajectory_1_.arrow"
    assert health.repair(path).corrected == [name]
    assert health.verify(path) == []
    with ReplayReader(path) as reader:
        assert reader.get_trajectory(1).to_columns()["a"].tolist() == [[1.0, 1.0]] * 4


def test_a_journal_that_lies_about_the_columns_is_found_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with buffer_on(path) as buffer:
        buffer.add_trajectories([{"a": torch.ones(4, 2), "b": torch.zeros(4, 2)}])
    contents = index.read(str(path))[0]
    contents.schema = Schema(reversed(contents.schema.columns))
    entries = contents.entries.items()
    contents.entries = {i: dataclasses.replace(entry, schema=None) for i, entry in entries}
    index.write_journal(str(path), contents)
    with ReplayReader(path) as reader, pytest.raises(CorruptError, match="column 'b': expected"):
        reader.sample(10)
    assert [name for name, _ in damage(path)] == ["trajectory_0_.arrow"]
    assert health.repair(path).quarantined == {}
    with ReplayReader(path) as reader:
        batch = reader.sample(10)
        assert (batch["a"].sum(), batch["b"].sum()) == (10, 0)


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_what_does_not_say_when_it_was_added_is_taken_in_once(
    tmp_path: Path, trajectory_format: str
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    source = tmp_path / "b"
    with TrajectoryReplayBuffer(trajectory_format="pt") as buffer:
        buffer.add_trajectories([TRAJECTORIES[4]])
        buffer.save_checkpoint(source)
    rewrite(source / "trajectory_index.json")
    transfer.convert(source, tmp_path / "c", trajectory_format)
    name = f"trajectory_9_.{trajectory_format}"
    shutil.move(file_of(tmp_path / "c", 0), path / name)
    assert health.repair(path).taken_in == [name]
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, 10)


def rewrite(path: Path) -> None:
    """As RLinf writes it: without all that it does not know."""
    snapshot = json.loads(path.read_text())
    for key in ("version", "crc", "schema", "metadata"):
        del snapshot[key]
    path.write_text(json.dumps(snapshot))


@by_format
def test_a_missing_file_is_found_and_no_longer_listed(
    tmp_path: Path, trajectory_format: str
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    name = file_of(path, 3).name
    files.remove(str(path / name))
    assert damage(path) == [(name, "expected a trajectory's file, got none.")]
    report = health.repair(path)
    assert (report.lost, report.quarantined) == ([name], {})
    assert_repaired(path, {0: 0, 1: 1, 2: 2})


def swap(path: Path) -> None:
    first, second, aside = file_of(path, 1), file_of(path, 2), path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


@by_format
def test_swapped_files_are_found_and_nothing_of_them_is_lost(
    tmp_path: Path, trajectory_format: str
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    swap(path)
    names = [f"trajectory_{i}_.{trajectory_format}" for i in (1, 2)]
    assert [file_of_name(name) for name, _ in damage(path)] == names
    report = health.repair(path)
    assert (report.quarantined, report.lost, report.num_trajectories) == ({}, [], 4)
    if trajectory_format in ("arrow", "npy"):
        assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})
    else:  # they cannot say who they are: the number is that of the name
        assert_repaired(path, {0: 0, 1: 2, 2: 1, 3: 3})


@by_format
def test_a_file_that_is_not_listed_is_a_remark_and_taken_in(
    tmp_path: Path, trajectory_format: str
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    other = store(tmp_path / "b", trajectory_format, 6)
    name = f"trajectory_5_.{trajectory_format}"
    shutil.move(other / name, path / name)
    assert remarks(path) == [
        (name, "a trajectory's file that is not listed; a repair takes it in.")
    ]
    report = health.repair(path)
    assert report.taken_in == [name]
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3, 5: 5}, 6)


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_files_whose_id_is_taken_are_numbered_anew(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "a", trajectory_format, 3)
    other = store(tmp_path / "b", trajectory_format, 3)
    for i in (2, 1):
        shutil.move(
            other / f"trajectory_{i}_.{trajectory_format}",
            path / f"trajectory_{i}_x.{trajectory_format}",
        )
    report = health.repair(path)
    names = [f"trajectory_{i}_x.{trajectory_format}" for i in (1, 2)]
    assert report.taken_in == names
    assert report.renumbered == dict(zip(names, (3, 4), strict=True))
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 1, 4: 2}, 5)


def test_equal_files_of_pt_are_each_a_trajectory(tmp_path: Path) -> None:
    path = store(tmp_path / "a", "pt", 2)
    shutil.copy(file_of(path, 1), path / "trajectory_3_.pt")
    shutil.copy(file_of(path, 1), path / "trajectory_2_.pt")
    assert health.repair(path).num_trajectories == 4
    assert_repaired(path, {0: 0, 1: 1, 2: 1, 3: 1})


def test_the_same_trajectory_twice_is_kept_once(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    shutil.copy(file_of(path, 1), path / "trajectory_0_a.arrow")
    report = health.repair(path)
    assert report.quarantined == {
        "trajectory_0_a.arrow": "the same trajectory as trajectory_1_.arrow."
    }
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


def test_a_whole_copy_takes_the_place_of_the_damaged_file(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    shutil.copy(file_of(path, 1), path / "trajectory_9_copy.arrow")
    flip(path / "trajectory_1_.arrow", arrow_places(path)["rewards, first byte"])
    report = health.repair(path)
    assert list(report.quarantined) == ["trajectory_1_.arrow"]
    assert_holds(path, {0: 0, 1: 1, 2: 2, 3: 3})


def test_files_with_other_columns_are_quarantined(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    with buffer_on(tmp_path / "b") as buffer:
        buffer.add_trajectories([trajectory(0)] * 7)
    for i in (4, 5, 6):
        shutil.move(tmp_path / "b" / f"trajectory_{i}_.arrow", path)
    report = health.repair(path)
    assert list(report.quarantined) == [f"trajectory_{i}_.arrow" for i in (4, 5, 6)]
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3}, 7)


def test_other_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    for name in ("weights.pt", "notes.txt", "trajectory_x.arrow", "trajectory_1_plot.png"):
        (path / name).write_bytes(b"mine")
    assert health.verify(path) == []
    assert not health.repair(path).has_changes


def test_quarantined_names_are_never_written_over(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    (path / "quarantine").mkdir()
    for name in ("trajectory_1_.arrow", "trajectory_1_.1.arrow", "journal.jsonl"):
        (path / "quarantine" / name).write_bytes(b"before")
    truncate(path)
    health.repair(path)
    assert {name: len(data) for name, data in contents_of(path / "quarantine").items()} == {
        "journal.1.jsonl": (path / "quarantine" / "journal.1.jsonl").stat().st_size,
        "journal.jsonl": 6,
        "trajectory_1_.1.arrow": 6,
        "trajectory_1_.2.arrow": 100,
        "trajectory_1_.arrow": 6,
    }


# -- damage of the index ---------------------------------------------------------------------------


def lines_of(path: Path) -> list[bytes]:
    return (path / "journal.jsonl").read_bytes().splitlines(keepends=True)


def number_of_line(path: Path, text: bytes) -> int:
    (number,) = [i for i, line in enumerate(lines_of(path)) if text in line]
    return number


def break_line(path: Path, text: bytes) -> int:
    """Flip a bit of the line that holds ``text``; the line's offset."""
    lines = lines_of(path)
    offset = sum(map(len, lines[: number_of_line(path, text)]))
    flip(path / "journal.jsonl", offset + 30)
    return offset


def add_line(i: int) -> bytes:
    return b'"trajectory_id": %d,' % i


@by_format
@pytest.mark.parametrize("text", [b'"schema"', add_line(0), add_line(2)])
@pytest.mark.parametrize("has_snapshots", [True, False])
def test_a_damaged_line_is_found_and_the_journal_rebuilt(
    tmp_path: Path, trajectory_format: str, text: bytes, has_snapshots: bool
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    if not has_snapshots:
        (path / "trajectory_index.json").unlink()
        (path / "metadata.json").unlink()
    offset = break_line(path, text)
    found = [(error.offset, error.what) for error in salvage.salvage(str(path)).damage]
    assert found[0] == (offset, "a damaged line before a valid one.")
    assert damage(path)[0] == ("journal.jsonl", "a damaged line before a valid one.")
    broken = (path / "journal.jsonl").read_bytes()
    report = health.repair(path)
    assert (report.quarantined, report.lost, report.renumbered) == ({}, [], {})
    assert (path / "quarantine" / "journal.jsonl").read_bytes() == broken
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


@by_format
def test_ids_go_on_when_the_line_of_a_clear_is_damaged(
    tmp_path: Path, trajectory_format: str
) -> None:
    with buffer_on(tmp_path / "a", trajectory_format) as buffer:
        buffer.add_trajectories([TRAJECTORIES[0], TRAJECTORIES[1]])
        buffer.clear()
        buffer.add_trajectories([TRAJECTORIES[2]])
    break_line(tmp_path / "a", b'"clear"')
    report = health.repair(tmp_path / "a")
    assert report.lost == [f"trajectory_{i}_.{trajectory_format}" for i in (0, 1)]
    assert_repaired(tmp_path / "a", {2: 2}, 3)


def test_ids_go_on_when_all_trajectories_are_gone(tmp_path: Path) -> None:
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([TRAJECTORIES[0], TRAJECTORIES[1]])
        buffer.clear()
    (tmp_path / "a" / "journal.jsonl").unlink()
    health.repair(tmp_path / "a")
    assert_repaired(tmp_path / "a", {}, 2)


@by_format
@pytest.mark.parametrize("others", [(), ("trajectory_index.json", "metadata.json")])
def test_a_missing_journal_is_found_and_rebuilt(
    tmp_path: Path, trajectory_format: str, others: tuple[str, ...]
) -> None:
    path = store(tmp_path / "a", trajectory_format)
    for name in ("journal.jsonl", *others):
        (path / name).unlink()
    assert damage(path) == [("journal.jsonl", "expected the journal of a store, got none.")]
    report = health.repair(path)
    assert report.rewritten == ["journal.jsonl", "metadata.json", "trajectory_index.json"]
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


@by_format
def test_a_journal_of_zeros_is_rebuilt(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "a", trajectory_format)
    size = (path / "journal.jsonl").stat().st_size
    (path / "journal.jsonl").write_bytes(b"\0" * size)
    health.repair(path)
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


@by_format
def test_a_torn_tail_is_a_remark(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "a", trajectory_format)
    size = (path / "journal.jsonl").stat().st_size
    with open(path / "journal.jsonl", "ab") as file:
        file.write(b'{"event": "add", "entry": {"num_sam')
    assert remarks(path) == [
        ("journal.jsonl", f"a torn line at byte {size}; a writer cuts it off.")
    ]
    assert health.repair(path).rewritten == [
        *("journal.jsonl", "metadata.json", "trajectory_index.json")
    ]
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


@pytest.mark.parametrize("name", ["trajectory_index.json", "metadata.json"])
@pytest.mark.parametrize("make", [store, checkpoint_of])
@pytest.mark.parametrize("how", ["cut", "emptied", "flipped"])
def test_a_damaged_snapshot_is_found_and_written_anew(
    tmp_path: Path, name: str, make: Callable[[Path], Path], how: str
) -> None:
    path = make(tmp_path / "a")
    file = path / name
    if how == "flipped":
        flip(
            file,
            file.read_bytes().index(b'"trajectory_counter"') + 1
            if make is store
            else file.read_bytes().index(b'"trajectory_counter": ') + 22,
        )
    else:
        os.truncate(file, 0 if how == "emptied" else file.stat().st_size // 2)
    if (name, make, how) == ("metadata.json", store, "flipped"):
        assert damage(path) == []  # another key: it is only a copy for people
        return
    assert [found for found, _ in damage(path)] == [name]
    broken = file.read_bytes()
    report = health.repair(path)
    assert report.rewritten == ["metadata.json", "trajectory_index.json"]
    assert (path / "quarantine" / name).read_bytes() == broken
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


@by_format
@pytest.mark.parametrize("keep_metadata", [True, False])
def test_a_checkpoint_without_an_index_is_rebuilt(
    tmp_path: Path, trajectory_format: str, keep_metadata: bool
) -> None:
    path = checkpoint_of(tmp_path / "a", trajectory_format)
    (path / "trajectory_index.json").unlink()
    if not keep_metadata:
        (path / "metadata.json").unlink()
    assert damage(path) == [
        ("trajectory_index.json", "expected a journal or an index, got neither.")
    ]
    report = health.repair(path)
    assert report.taken_in == names_of(path, trajectory_format)
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})
    assert ".writer.lock" not in os.listdir(path)


@by_format
def test_what_a_damaged_index_says_of_each_file_still_counts(
    tmp_path: Path, trajectory_format: str
) -> None:
    with TrajectoryReplayBuffer(
        sample_window_size=0, trajectory_format=trajectory_format
    ) as buffer:
        buffer.add_trajectories([TRAJECTORIES[i] for i in (0, 1, 2)])
        buffer.save_checkpoint(tmp_path / "a")
    entries = index.read(str(tmp_path / "a"))[0].entries
    flip(tmp_path / "a" / "trajectory_index.json", -1)
    health.repair(tmp_path / "a")
    assert index.read(str(tmp_path / "a"))[0].entries == entries
    with TrajectoryReplayBuffer() as resumed:
        resumed.load_checkpoint(tmp_path / "a")
        assert resumed.seed == 1234


def test_the_generator_survives_a_damaged_index(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "a")
    shutil.copytree(path, tmp_path / "b")
    os.truncate(path / "trajectory_index.json", 300)
    health.repair(path)
    batches = []
    for directory in (path, tmp_path / "b"):
        with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
            buffer.load_checkpoint(directory)
            batches.append(row_ids(buffer.sample(50)))
    assert batches[0] == batches[1]


def test_several_ranks_still_give_different_ids_after_a_repair(tmp_path: Path) -> None:
    saved = checkpoint_of(tmp_path / "c", count=4)
    for rank in range(2):
        path = tmp_path / f"rank_{rank}"
        with buffer_on(path) as buffer:
            buffer.load_checkpoint(saved, True, rank, 2)
            buffer.add_trajectories([TRAJECTORIES[4]])
        os.truncate(file_of(path, 4 + rank), 10)
        assert health.repair(path).num_trajectories == 2
        with buffer_on(path) as buffer:
            assert buffer.trajectory_counter == 6 + rank
            buffer.add_trajectories([TRAJECTORIES[5]])
            assert buffer.trajectory_counter == 8 + rank


def test_a_repair_after_a_load_gives_no_id_again(tmp_path: Path) -> None:
    saved = checkpoint_of(tmp_path / "c", count=2)
    path = tmp_path / "a"
    with buffer_on(path) as buffer:
        buffer.add_trajectories([TRAJECTORIES[i] for i in range(5)])
        buffer.load_checkpoint(saved)
        assert buffer.trajectory_counter == 5
    assert not health.repair(path).has_changes
    os.truncate(next(path.glob("trajectory_1_*.arrow")), 10)
    health.repair(path)
    with buffer_on(path) as buffer:
        assert (buffer.trajectory_ids, buffer.trajectory_counter) == ([0], 5)


def test_a_dropped_file_that_is_still_there_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with buffer_on(path) as buffer:
        buffer.add_trajectories([TRAJECTORIES[0]])
        buffer.flush()
        shutil.copy(path / "trajectory_0_.arrow", tmp_path)
        buffer.clear()
        buffer.add_trajectories([TRAJECTORIES[1]])
    shutil.copy(tmp_path / "trajectory_0_.arrow", path)
    assert remarks(path) == [
        ("trajectory_0_.arrow", "of a trajectory that was dropped; the next writer removes it.")
    ]
    report = health.repair(path)
    assert report.quarantined == {"trajectory_0_.arrow": "its trajectory was dropped."}
    assert_repaired(path, {1: 1}, 2)


def test_what_an_unfinished_save_left_is_a_remark_and_not_taken_in(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "a")
    other = checkpoint_of(tmp_path / "b", count=6)
    shutil.copy(other / "trajectory_5_.arrow", path)
    (path / ".saving.json").write_text('["trajectory_5_.arrow"]')
    what = "of an earlier or an unfinished save; the next one removes it."
    assert remarks(path) == [("trajectory_5_.arrow", what)]
    assert not health.repair(path).has_changes


def test_what_is_half_written_is_a_remark(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    name = ".trajectory_9_.arrow.0123456789ab.tmp"
    (path / name).write_bytes(b"half")
    assert remarks(path) == [(name, "left half written; the next writer removes it.")]
    assert not health.repair(path).has_changes
    (path / name).unlink()


def test_files_of_a_newer_mmbuf_are_no_damage_and_never_moved(tmp_path: Path) -> None:
    path = store(tmp_path / "a", "npy")
    header = file_of(path, 1) / "trajectory.json"
    header.write_bytes(header.read_bytes().replace(b'"version": 1', b'"version": 3'))
    ((name, what),) = remarks(path)
    assert (name, "Update mmbuf" in what) == ("trajectory_1_.npy", True)
    before = contents_of(path)
    with pytest.raises(VersionError):
        health.repair(path)
    assert contents_of(path) == before


def test_a_symbolic_link_is_damage_and_not_followed(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    file = file_of(path, 1)
    target = file.rename(tmp_path / "outside.arrow")
    file.symlink_to(target)
    ((name, what),) = damage(path)
    assert (name, "a symbolic link" in what) == (file.name, True)
    assert list(health.repair(path).quarantined) == [file.name]
    assert target.exists()


@pytest.mark.parametrize("make", [store, checkpoint_of])
@pytest.mark.parametrize("name", ["journal.jsonl", "trajectory_index.json", "metadata.json"])
@pytest.mark.parametrize("kind", ["link", "directory"])
def test_an_index_that_is_no_file_is_found_and_written_anew(
    tmp_path: Path, make: Callable[[Path], Path], name: str, kind: str
) -> None:
    path = make(tmp_path / "a")
    if (make, name) == (checkpoint_of, "journal.jsonl"):
        return
    if kind == "link":
        (path / name).rename(tmp_path / "outside")
        (path / name).symlink_to(tmp_path / "outside")
    else:
        (path / name).unlink()
        (path / name).mkdir()
    assert [found for found, _ in damage(path)] == [name]
    health.repair(path)
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


def test_a_journal_that_no_reader_opens_is_found(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    lines = lines_of(path)
    del lines[number_of_line(path, b'"schema"')]
    (path / "journal.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(CorruptError, match="without a schema"):
        ReplayReader(path)
    assert "without a schema" in damage(path)[0][1]
    health.repair(path)
    assert_repaired(path, {0: 0, 1: 1, 2: 2, 3: 3})


@pytest.mark.parametrize("make", [store, checkpoint_of])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_damaged_all_that_is_whole_is_kept(
    tmp_path: Path, make: Callable[..., Path], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    trajectory_format = FORMATS[seed % 3]  # of a pickle nobody knows whether it is whole
    path = make(tmp_path / "a", trajectory_format)
    hit = set()
    for file in generator.permutation(sorted(map(str, path.rglob("*"))))[:3]:
        if Path(file).is_file() and not file.endswith(".lock"):
            data = bytearray(Path(file).read_bytes())
            at = int(generator.integers(len(data)))
            data[at : at + 8] = generator.bytes(min(8, len(data) - at))
            Path(file).write_bytes(data)
            hit.add(file_of_name(str(Path(file).relative_to(path))))
    broken = {file_of_name(name) for name, _ in damage(path)}
    assert broken <= hit | {"metadata.json"}
    numbers = {i: i for i in range(4) if file_of(path, i).name not in broken}
    report = health.repair(path)
    assert set(report.quarantined) == {
        name for name in broken if name.startswith("trajectory_")
    } - {"trajectory_index.json"}
    assert_repaired(path, numbers)


# -- while others work -----------------------------------------------------------------------------


def test_a_live_store_is_verified(tmp_path: Path) -> None:
    with buffer_on(tmp_path / "a", max_disk_bytes=None) as buffer:
        for i in range(4):
            buffer.add_trajectories([TRAJECTORIES[i]])
            buffer.flush()
            assert health.verify(tmp_path / "a") == []


def test_files_that_a_writer_drops_meanwhile_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([TRAJECTORIES[0], TRAJECTORIES[1]])
        buffer.flush()
        plain = storage.verify
        calls = []

        def verify(path: str, entry: Entry, schema: Schema) -> None:
            if not calls:
                calls.append(path)
                buffer.clear()
                buffer.add_trajectories([TRAJECTORIES[2]])
                buffer.flush()
            plain(path, entry, schema)

        monkeypatch.setattr(storage, "verify", verify)
        assert health.verify(tmp_path / "a", num_threads=1) == []


def test_a_file_that_is_journalled_meanwhile_is_no_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "a")
    lines = lines_of(path)
    number = number_of_line(path, add_line(3))
    (path / "journal.jsonl").write_bytes(b"".join(lines[:number]))
    plain = storage.verify

    def verify(name: str, entry: Entry, schema: Schema) -> None:
        (path / "journal.jsonl").write_bytes(b"".join(lines))
        plain(name, entry, schema)

    monkeypatch.setattr(storage, "verify", verify)
    assert health.verify(path) == []


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_store_that_is_written_is_not_repaired(tmp_path: Path, dry_run: bool) -> None:
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([TRAJECTORIES[0]])
        buffer.flush()
        with pytest.raises(LockedError) as caught:
            health.repair(tmp_path / "a", dry_run=dry_run)
    assert caught.value.pid == os.getpid()


def test_a_disk_that_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path / "a")
    plain = storage.verify

    def verify(name: str, entry: Entry, schema: Schema) -> None:
        if name.endswith("trajectory_1_.arrow"):
            raise OSError(errno.EIO, "Input/output error", name)
        plain(name, entry, schema)

    monkeypatch.setattr(storage, "verify", verify)
    ((name, what),) = damage(path)
    assert (name, what.startswith("could not be read: [Errno 5]")) == (
        "trajectory_1_.arrow",
        True,
    )
    assert list(health.repair(path).quarantined) == ["trajectory_1_.arrow"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_fault_of_the_machine_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = store(tmp_path / "a")
    before = contents_of(path)

    def verify(name: str, entry: Entry, schema: Schema) -> None:
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr(storage, "verify", verify)
    with pytest.raises(OSError, match=os.strerror(code)):
        health.repair(path)
    assert contents_of(path) == before


STEPS = ["make_directory", "link_or_copy", "rename", "sync", "sync_whole", "replace"]


@pytest.mark.parametrize("make", [store, checkpoint_of])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", range(3))
def test_an_interrupted_repair_can_be_run_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    step: str,
    number: int,
) -> None:
    path = make(tmp_path / "a")
    shutil.copytree(path, tmp_path / "b")
    other = make(tmp_path / "c")
    shutil.move(file_of(other, 3), path / "trajectory_3_new.arrow")
    truncate(path)
    os.truncate(file_of(path, 2), 50)
    plain = getattr(files, step)
    calls = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return plain(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(files, step, interrupted)
        try:
            health.repair(path)
        except KeyboardInterrupt:
            pass
        else:
            assert len(calls) <= number
    health.repair(path)
    assert {name for name in contents_of(path / "quarantine") if "trajectory_" in name} - {
        "trajectory_index.json"
    } == {"trajectory_1_.arrow", "trajectory_2_.arrow"}
    assert_repaired(path, {0: 0, 3: 3, 4: 3}, 5)


class Killed(BaseException):
    """What stops a save, in the place of a signal."""


def save_killed_before(path: Path, name: str, buffer: TrajectoryReplayBuffer) -> None:
    """A save that ends before it puts the file ``name`` in its place."""
    real = files.replace

    def replace(target: str, blocks: Any) -> None:
        if target == str(path / name):
            raise Killed
        real(target, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "replace", replace)
        with pytest.raises(Killed):
            buffer.save_checkpoint(path)


def test_a_save_of_no_new_file_that_is_killed_before_its_metadata_is_no_damage(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([TRAJECTORIES[i] for i in range(3)])
        buffer.save_checkpoint(path)
        before = (path / "metadata.json").read_bytes()
        buffer.sample(3)
        save_killed_before(path, "metadata.json", buffer)
        assert (path / "metadata.json").read_bytes() == before
        assert health.verify(path) == []
        assert not health.repair(path).has_changes
        buffer.save_checkpoint(path)
    assert ".saving.json" not in os.listdir(path)
    assert (path / "metadata.json").read_bytes() != before
    assert health.verify(path) == []


@pytest.mark.parametrize("num_new", [0, 2])
def test_a_checkpoint_that_is_saved_over_while_it_is_verified_is_no_damage(
    tmp_path: Path, num_new: int
) -> None:
    path = tmp_path / "a"
    real, saves = health.salvage, [1, 1]
    with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
        buffer.add_trajectories([TRAJECTORIES[i] for i in range(3)])
        buffer.save_checkpoint(path)

        def salvage(directory: str) -> Any:
            found = real(directory)
            if saves:
                saves.pop()
                buffer.sample(3)
                buffer.add_trajectories([TRAJECTORIES[3]] * num_new)
                buffer.save_checkpoint(path)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(health, "salvage", salvage)
            assert health.verify(path) == []
        assert saves == []
        assert health.verify(path) == []


# -- commands --------------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_verify_command_says_that_nothing_is_damaged(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    result = run("verify", path)
    assert (result.exit_code, result.stdout) == (
        0,
        f"{path}: 4 trajectories read, nothing is damaged\n",
    )
    result = run("verify", path, "--json", "--threads", 2)
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])


def test_verify_command_lists_what_is_damaged(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    flip(file_of(path, 1), arrow_places(path)["rewards, first byte"])
    (path / ".x.0123456789ab.tmp").write_bytes(b"")
    result = run("verify", path)
    what = "column 'rewards': expected bytes of its CRC-32, got others."
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        [
            f"damage: {path}/trajectory_1_.arrow: {what}",
            f"remark: {path}/.x.0123456789ab.tmp: left half written; the next writer removes it.",
            f"{path}: 4 trajectories read, 1 things are damaged",
        ],
    )
    result = run("verify", path, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (
        1,
        [
            {"path": f"{path}/trajectory_1_.arrow", "what": what, "is_damage": True},
            {
                "path": f"{path}/.x.0123456789ab.tmp",
                "what": "left half written; the next writer removes it.",
                "is_damage": False,
            },
        ],
    )
    (path / ".x.0123456789ab.tmp").unlink()


def test_verify_command_does_not_fail_on_remarks(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    with open(path / "journal.jsonl", "ab") as file:
        file.write(b"{")
    assert run("verify", path).exit_code == 0


def test_repair_command_says_what_it_does(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    truncate(path)
    files.remove(str(file_of(path, 3)))
    other = store(tmp_path / "b")
    shutil.move(file_of(other, 2), path / "trajectory_2_x.arrow")
    before = contents_of(path)
    said = [
        "moved to quarantine/: trajectory_1_.arrow: "
        "expected an Arrow file, got one that ends otherwise.",
        "no longer listed, since it has no file: trajectory_3_.arrow",
        "listed again: trajectory_2_x.arrow",
        "numbered 4: trajectory_2_x.arrow",
        "written anew: journal.jsonl",
        "written anew: metadata.json",
        "written anew: trajectory_index.json",
    ]
    counts = f"{path}: 3 trajectories, 48 rows"
    result = run("repair", path, "--dry-run")
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [*(f"would be {line}" for line in said), counts],
    )
    assert contents_of(path) == before
    result = run("repair", path)
    assert (result.exit_code, result.stdout.splitlines()) == (0, [*said, counts])
    result = run("repair", path)
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["nothing to do", counts])


def test_repair_command_gives_json(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    truncate(path)
    expected = {
        "num_trajectories": 3,
        "num_rows": 51,
        "taken_in": [],
        "renumbered": {},
        "lost": [],
        "quarantined": {
            "trajectory_1_.arrow": "expected an Arrow file, got one that ends otherwise."
        },
        "rewritten": ["journal.jsonl", "metadata.json", "trajectory_index.json"],
        "corrected": [],
    }
    for options in (("--dry-run", "--json"), ("--json",)):
        result = run("repair", path, *options)
        assert (result.exit_code, json.loads(result.stdout)) == (0, expected)


@pytest.mark.parametrize("command", ["verify", "repair", "doctor"])
def test_a_mistake_is_one_line_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["mmbuf", command, str(tmp_path / "none")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    expected = f"mmbuf: {tmp_path / 'none'}: expected a store directory, got none."
    assert caught.value.code == expected


def test_a_store_that_is_written_is_one_line_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mmbuf", "repair", str(tmp_path / "a")])
    with buffer_on(tmp_path / "a"), pytest.raises(SystemExit) as caught:
        cli.main()
    assert str(caught.value.code).startswith(f"mmbuf: {tmp_path / 'a'}: expected no other writer")


# -- doctor ----------------------------------------------------------------------------------------


def by_name(path: Path | None) -> dict[str, doctor.Remark]:
    remarks = doctor.examine(path)
    assert len({remark.name for remark in remarks}) == len(remarks)
    assert all(remark.is_fine == (remark.remedy == "") for remark in remarks)
    return {remark.name: remark for remark in remarks}


MACHINE = ["page bytes", "huge pages", "vm.max_map_count", "open files", "address bytes left"]
MACHINE += ["data bytes"]
STORE = ["writer", "temporaries", "files of the wrong length"]
VERSIONS = ["python", "mmbuf", "numpy", "pyarrow", "torch"]


def test_doctor_without_a_path_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in by_name(None) if name != "mmbuf"]
    assert names == [*MACHINE, *(name for name in VERSIONS if name != "mmbuf")]


def test_doctor_with_a_path_looks_at_the_store_too(tmp_path: Path) -> None:
    names = [name for name in by_name(store(tmp_path / "a")) if name not in VERSIONS]
    assert names == ["free disk bytes", "file system", *MACHINE, *STORE]


def doctored(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any) -> None:
    monkeypatch.setattr(module, name, lambda *_: value)


@pytest.mark.parametrize(
    ("module", "function", "name", "fine", "bad", "remedy"),
    [
        (files, "free_bytes", "free disk bytes", 1 << 30, (1 << 30) - 1, "max_disk_bytes"),
        (files, "file_system_of", "file system", "ext4", "nfs4", "enable_cache=False"),
        (files, "file_system_of", "file system", None, "fuse.sshfs", "enable_cache=False"),
        (vm, "huge_pages_setting", "huge pages", "madvise", "never", "echo madvise"),
        (vm, "huge_pages_setting", "huge pages", "always", "never", "echo madvise"),
        (vm, "open_files_limit", "open files", 64, 63, "ulimit -n 64"),
        (vm, "max_map_count", "vm.max_map_count", 14, 13, "sysctl -w vm.max_map_count=14"),
    ],
)
def test_doctor_tells_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    function: str,
    name: str,
    fine: Any,
    bad: Any,
    remedy: str,
) -> None:
    path = store(tmp_path / "a")
    for value, is_fine in ((fine, True), (bad, False)):
        doctored(monkeypatch, module, function, value)
        remark = by_name(path)[name]
        assert (remark.value, remark.is_fine) == (value, is_fine)
    assert remedy in remark.remedy


def test_doctor_counts_what_the_store_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "a")
    entries, schema = index.read(str(path))[0].entries.values(), entry_of(path, 0)[1]
    sizes = [
        (column.name, part.rows * column.row_bytes)
        for entry in entries
        for column, part in zip(schema.columns, entry.parts, strict=True)
    ]
    copied = sum(size for name, size in sizes if name != "curr_obs.image")
    found = by_name(path)
    assert found["vm.max_map_count"].needed == int(4 / 0.3) + 1  # the images
    assert found["address bytes left"].needed == 2 * sum(size for _, size in sizes)
    assert found["data bytes"].needed == copied + (512 << 20)
    for name, function in (
        ("data bytes", "data_limit"),
        ("address bytes left", "address_space_left"),
    ):
        needed = found[name].needed
        assert needed is not None
        for value, is_fine in ((None, True), (needed, True), (needed - 1, False)):
            doctored(monkeypatch, vm, function, value)
            assert (by_name(path)[name].value, by_name(path)[name].is_fine) == (value, is_fine)


def test_doctor_counts_no_mapping_for_what_cannot_be_mapped(tmp_path: Path) -> None:
    assert by_name(store(tmp_path / "a", "pt"))["vm.max_map_count"].needed == 0


def test_doctor_minds_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "PAGE", 64 << 10)
    remark = by_name(None)["page bytes"]
    assert (remark.value, remark.needed, remark.is_fine) == (64 << 10, None, False)


def test_doctor_says_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    who = f"process {os.getpid()} on {os.uname().nodename}"
    with buffer_on(path) as buffer:
        buffer.add_trajectories([TRAJECTORIES[0]])
        buffer.flush()
        remark = by_name(path)["writer"]
        assert (remark.value, remark.is_fine) == (who, True)
    remark = by_name(path)["writer"]
    assert (remark.value, remark.is_fine) == (f"none; the last one was {who}", True)
    assert by_name(checkpoint_of(tmp_path / "c"))["writer"].value == "none"


def test_doctor_minds_a_lock_whose_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with buffer_on(tmp_path / "a") as buffer:
        buffer.add_trajectories([TRAJECTORIES[0]])
        buffer.flush()
        doctored(monkeypatch, files, "is_running", False)
        remark = by_name(tmp_path / "a")["writer"]
        assert (remark.is_fine, "fuser" in remark.remedy) == (False, True)


def test_doctor_minds_temporaries_that_nobody_writes(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    (path / ".a.0123456789ab.tmp").write_bytes(b"")
    with_one = by_name(path)["temporaries"]
    assert (with_one.value, with_one.is_fine) == (1, False)
    (path / ".a.0123456789ab.tmp").unlink()
    assert by_name(path)["temporaries"].value == 0


def test_doctor_looks_at_a_damaged_store_too(tmp_path: Path) -> None:
    path = store(tmp_path / "a")
    break_line(path, add_line(1))
    assert by_name(path)["vm.max_map_count"].needed == int(3 / 0.3) + 1


def test_doctor_command_prints_every_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "a")
    doctored(monkeypatch, files, "free_bytes", 12_000)
    doctored(monkeypatch, vm, "open_files_limit", None)
    result = run("doctor", path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        "mind free disk bytes: 12.0 kB (needed: 1.1 GB)",
        "     Free some space, or bound the store: max_disk_bytes.",
    ]
    assert "ok   open files: unlimited (needed: 64)" in lines
    remarks = doctor.examine(path)
    result = run("doctor", path, "--json")
    found = json.loads(result.stdout)
    assert [remark["name"] for remark in found] == [remark.name for remark in remarks]
    assert found[0] == {
        "name": "free disk bytes",
        "value": 12_000,
        "needed": 1 << 30,
        "is_fine": False,
        "remedy": "Free some space, or bound the store: max_disk_bytes.",
    }
    assert run("doctor").exit_code == 0


# -- what is asked of the system -------------------------------------------------------------------


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    assert files.file_system_of("/proc/self") == "proc"
    assert files.file_system_of("/proc") == "proc"
    assert files.file_system_of(str(tmp_path)) not in ("proc", None)


def test_a_process_is_running_until_it_has_ended() -> None:
    host = os.uname().nodename
    assert files.is_running(os.getpid(), host) is True
    assert files.is_running(os.getpid(), "elsewhere.example") is None
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert files.is_running(pid, host) is False
    assert [files.is_running(n, host) for n in (0, -1, 1 << 70)] == [False] * 3


def test_asking_for_a_lock_takes_and_changes_nothing(tmp_path: Path) -> None:
    lock = files.WriterLock(str(tmp_path / "lock"))
    before = (tmp_path / "lock").read_bytes()
    assert files.is_locked(str(tmp_path / "lock")) is True
    lock.release()
    assert files.is_locked(str(tmp_path / "lock")) is False
    assert (tmp_path / "lock").read_bytes() == before
    files.WriterLock(str(tmp_path / "lock")).release()
