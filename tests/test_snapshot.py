"""A checkpoint's index that is replaced: what a reader is told, and what became of its files."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from mmbuf import CorruptError, index
from mmbuf.entry import Entry, Part
from mmbuf.index import INDEX, Contents
from mmbuf.schema import Column, Schema
from mmbuf.snapshot import SnapshotReader, whereabouts

SCHEMA = Schema([Column(("states",), "float32", (3,))])


def entry(i: int, **known: object) -> Entry:
    fields = {
        "uuid": f"{i:032x}",
        "trajectory_id": i,
        "shape": (2, 1),
        "format": "arrow",
        "file": f"trajectory_{i}_.arrow",
        "size_bytes": 2000,
        "parts": (Part(64, 2),),
    }
    return Entry(**{**fields, **known})  # type: ignore[arg-type]


def save(directory: Path, *entries: Entry, counter: int = 0, id_step: int = 1) -> None:
    contents = Contents()
    contents.schema = SCHEMA
    for item in entries:
        contents.add(item)
    contents.count_from(counter, id_step)
    index.write_snapshots(str(directory), contents, {})


def ids_told(reader: SnapshotReader) -> tuple[bool, list[int], list[int]]:
    changes = reader.refresh()
    return changes.is_reset, changes.dropped, list(changes.added)


# -- what is told ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_held", [False, True])
def test_a_window_that_moves_on_is_told_as_what_left_and_what_came(
    tmp_path: Path, is_held: bool
) -> None:
    save(tmp_path, *map(entry, range(5)))
    reader = SnapshotReader(str(tmp_path), is_held=is_held)
    assert reader.looks_changed()
    assert ids_told(reader) == (False, [], [0, 1, 2, 3, 4])
    for newest in (6, 7, 9):
        assert (reader.looks_changed(), reader.has_changed()) == (False, False)
        before = list(reader.contents.entries)
        now = list(range(newest - 4, newest + 1))
        save(tmp_path, *map(entry, now))
        assert (reader.looks_changed(), reader.has_changed()) == (True, True)
        gone = [i for i in before if i not in now]
        assert ids_told(reader) == (False, gone, [i for i in now if i not in before])
    reader.let_go()


def test_an_index_that_is_written_again_as_it_was_tells_nothing(tmp_path: Path) -> None:
    save(tmp_path, entry(0), entry(1))
    reader = SnapshotReader(str(tmp_path))
    reader.refresh()
    save(tmp_path, entry(0), entry(1))
    assert reader.has_changed()
    assert not reader.refresh()
    assert not reader.has_changed()


def test_another_order_is_told_as_all_anew(tmp_path: Path) -> None:
    save(tmp_path, entry(0), entry(1), entry(2))
    reader = SnapshotReader(str(tmp_path))
    reader.refresh()
    save(tmp_path, entry(2), entry(1), entry(0), counter=3)
    assert ids_told(reader) == (True, [], [2, 1, 0])


def test_another_file_under_one_id_is_told_as_gone_and_come(tmp_path: Path) -> None:
    save(tmp_path, entry(0), entry(1))
    reader = SnapshotReader(str(tmp_path))
    reader.refresh()
    save(tmp_path, entry(0), entry(1, file="trajectory_1_.0000.arrow"))
    assert ids_told(reader) == (False, [1], [1])


@pytest.mark.parametrize("id_step", [1, 3])
def test_numbers_stay_while_a_window_moves_on_and_are_the_same_for_all_readers(
    tmp_path: Path, id_step: int
) -> None:
    pick = random.Random(id_step)
    followed = SnapshotReader(str(tmp_path))
    numbers: dict[int, int] = {}
    newest = 0
    for _ in range(30):
        newest += pick.randint(1, 7)
        ids = [id_step * i for i in range(max(0, newest - 12), newest)]
        save(tmp_path, *map(entry, ids), counter=id_step * newest, id_step=id_step)
        assert not followed.refresh().is_reset
        for reader in (followed, SnapshotReader(str(tmp_path))):
            reader.refresh()
            for i, (_, number) in reader._known.items():
                assert numbers.setdefault(i, number) == number
    assert sorted(numbers.values()) == list(range(newest))


def test_a_damaged_index_is_said_and_what_was_known_stays(tmp_path: Path) -> None:
    save(tmp_path, entry(0))
    reader = SnapshotReader(str(tmp_path))
    reader.refresh()
    whole = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_bytes(whole[:-20])
    for _ in range(2):
        assert reader.has_changed()
        with pytest.raises(CorruptError, match="not an index"):
            reader.refresh()
        assert list(reader.contents.entries) == [0]
    save(tmp_path, entry(0), entry(1))
    assert ids_told(reader) == (False, [], [1])


def test_an_index_that_is_gone_is_said_until_there_is_one_again(tmp_path: Path) -> None:
    save(tmp_path, entry(0))
    reader = SnapshotReader(str(tmp_path), is_held=True)
    reader.refresh()
    (tmp_path / INDEX).unlink()
    with pytest.raises(FileNotFoundError):
        reader.looks_changed()
    with pytest.raises(FileNotFoundError):
        reader.refresh()
    save(tmp_path, entry(1))
    assert ids_told(reader) == (False, [0], [1])
    reader.let_go()


# -- what became of files --------------------------------------------------------------------------


def test_what_is_no_longer_listed_is_gone_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, entry(1), entry(3))
    missing = [entry(i) for i in range(4)]
    assert whereabouts(str(tmp_path), missing) == {entry(0).uuid: None, entry(2).uuid: None}
    assert caplog.messages == [
        f"{tmp_path}: the files of trajectories [0, 2] were removed by who writes there: going on "
        f"without."
    ]


def test_what_has_another_name_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = entry(1, trajectory_id=7, file="trajectory_7_.arrow")
    save(tmp_path, entry(0), now)
    assert whereabouts(str(tmp_path), [entry(0), entry(1)]) == {entry(1).uuid: now}
    assert caplog.messages == []


def test_what_has_other_rows_now_is_gone(tmp_path: Path) -> None:
    now = entry(1, file="x.arrow", shape=(3, 1), parts=(Part(64, 3),))
    save(tmp_path, now)
    assert whereabouts(str(tmp_path), [entry(1)]) == {entry(1).uuid: None}


def test_of_a_live_store_the_journal_counts(tmp_path: Path) -> None:
    writer = index.TrajectoryIndex(str(tmp_path))
    items = [dataclasses.replace(entry(i)) for i in range(3)]
    for item in items:
        writer.add(SCHEMA, item)
    writer.write_snapshots({})
    writer.drop([1])
    writer.close()
    assert whereabouts(str(tmp_path), items) == {items[1].uuid: None}


@pytest.mark.parametrize("what", ["nothing", "damaged", "RLinf's"])
def test_where_no_index_says_so_nothing_is_gone(tmp_path: Path, what: str) -> None:
    if what != "nothing":
        text = "{}" if what == "damaged" else '{"trajectory_index": {}, "trajectory_id_list": []}'
        (tmp_path / INDEX).write_text(text)
    assert whereabouts(str(tmp_path), [entry(0)]) == {}
