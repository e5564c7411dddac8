"""The journal and its snapshots: what was appended is what is read, after any accident."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from data import contents_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbuf import files, index
from mmbuf.entry import Entry, Part, Table
from mmbuf.errors import CorruptError, LockedError, VersionError
from mmbuf.index import INDEX, JOURNAL, METADATA, Contents, TrajectoryIndex
from mmbuf.schema import Column, Schema

NAN, INFINITY = float("nan"), float("inf")
COLUMN = {"path": ["a"], "dtype": "bool", "row_shape": [2]}
SCHEMA = Schema([Column(("obs", "states"), "float32", (3,)), Column(("task",), "text", ())])


def entry(i: int, **known: Any) -> Entry:
    """Entry ``i`` of ``i + 1`` steps and two environments, with a file of ``100 + i`` bytes."""
    fields: dict[str, Any] = {
        "uuid": f"{i:032x}",
        "trajectory_id": i,
        "shape": (i + 1, 2, 7),
        "max_episode_length": 80,
        "model_weights_id": f"weights é/{i}",
        "added_at": 1700000000.125 + i,
        "format": "arrow",
        "file": f"trajectory_{i}_w.arrow",
        "size_bytes": 100 + i,
        "parts": (Part(1024, 2 * i + 2), Part(2048, 2 * i + 2, Table(64, 3, 128, 17))),
    }
    return Entry(**{**fields, **known})


def put_file(directory: Path, item: Entry) -> Entry:
    (directory / item.file).write_bytes(b"x" * item.size_bytes)
    return item


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[TrajectoryIndex]:
    store = TrajectoryIndex(str(directory), **options)
    try:
        yield store
    finally:
        store.close()


def write_store(directory: Path, count: int) -> list[Entry]:
    """A store of ``count`` trajectories whose files are there, without a sync mark."""
    entries = [entry(i) for i in range(count)]
    with opened(directory) as store:
        for item in entries:
            store.add(SCHEMA, put_file(directory, item))
    return entries


def line_of(event: Any) -> bytes:
    """A journal's line of ``event``, as the documentation describes it."""
    return sealed(json.dumps(event)[:-1].encode())


def sealed(body: bytes) -> bytes:
    """A line of an object without its last brace, with the CRC-32 of that."""
    return body + b', "crc": "%08x"}\n' % zlib.crc32(body)


def append(directory: Path, data: bytes) -> None:
    with open(directory / JOURNAL, "ab") as file:
        file.write(data)


def entries_of(directory: Path) -> list[Entry]:
    return list(index.read(str(directory))[0].entries.values())


def events_of(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / JOURNAL).read_bytes().splitlines()
    return [json.loads(line) for line in lines]


# -- entries -----------------------------------------------------------------------------------


def test_an_entry_survives_json() -> None:
    item = entry(3)
    again = Entry.from_json(json.loads(json.dumps(item.to_json())))
    assert again == item
    assert again.parts[1].table == Table(64, 3, 128, 17)
    assert (again.num_steps, again.num_envs, again.num_samples) == (4, 2, 8)


def test_the_keys_of_rlinf_come_first() -> None:
    assert list(entry(3).to_json().items())[:5] == [
        ("num_samples", 8),
        ("trajectory_id", 3),
        ("max_episode_length", 80),
        ("shape", (4, 2, 7)),
        ("model_weights_id", "weights é/3"),
    ]


@pytest.mark.parametrize("shape", [[], [4], [4, -1], [4, "2"], [4.0, 2], "ab", None, 7])
def test_an_entry_of_an_impossible_shape_is_refused(shape: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Entry.from_json({**entry(3).to_json(), "shape": shape})


@pytest.mark.parametrize("key", sorted(entry(0).to_json().keys() - {"num_samples"}))
def test_an_entry_that_lacks_a_key_is_refused(key: str) -> None:
    json_entry = entry(3).to_json()
    del json_entry[key]
    with pytest.raises(KeyError):
        Entry.from_json(json_entry)


# -- the journal ---------------------------------------------------------------------------------


def test_what_was_added_is_read_in_order(tmp_path: Path) -> None:
    entries = write_store(tmp_path, 4)
    contents, valid = index.read(str(tmp_path))
    assert list(contents.entries.items()) == list(enumerate(entries))
    assert contents.schema == SCHEMA
    assert contents.trajectory_counter == 4
    assert contents.total_samples == 2 + 4 + 6 + 8
    assert contents.unsynced == [0, 1, 2, 3]
    assert valid == (tmp_path / JOURNAL).stat().st_size


def test_the_journal_is_lines_as_documented(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add(SCHEMA, entry(0))
        store.clear()
    expected = [
        {"event": "boot", "id": files.boot_id()},
        {"event": "schema", "version": 1, "columns": SCHEMA.to_json()},
        {"event": "add", "entry": json.loads(json.dumps(entry(0).to_json()))},
        {"event": "clear", "trajectory_counter": 1},
    ]
    lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    assert lines == [line_of(event) for event in expected]


def test_a_store_is_continued_by_the_next_writer(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    with opened(tmp_path) as store:
        assert list(store.contents.entries) == [0, 1]
        store.add(SCHEMA, put_file(tmp_path, entry(2)))
    assert entries_of(tmp_path) == [entry(0), entry(1), entry(2)]
    assert [event["event"] for event in events_of(tmp_path)] == [
        *("boot", "schema", "add", "add", "add")
    ]


def test_a_new_store_is_empty(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.contents.entries == {}
        assert store.contents.trajectory_counter == 0
    contents, valid = index.read(str(tmp_path))
    assert (contents.entries, contents.schema, valid) == ({}, None, 0)


def test_a_directory_without_an_index_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        index.read(str(tmp_path))


def test_drop_takes_trajectories_out_and_keeps_the_counter(tmp_path: Path) -> None:
    write_store(tmp_path, 4)
    append(tmp_path, line_of({"event": "drop", "trajectory_ids": [3, 1]}))
    contents, _ = index.read(str(tmp_path))
    assert list(contents.entries) == [0, 2]
    assert contents.trajectory_counter == 4
    assert contents.total_samples == 2 + 6
    assert contents.unsynced == [0, 2]
    assert contents.dead_files == ["trajectory_3_w.arrow", "trajectory_1_w.arrow"]


def test_clear_keeps_the_counter_and_frees_the_schema(tmp_path: Path) -> None:
    write_store(tmp_path, 3)
    other = Schema([Column(("x",), "bool", ())])
    with opened(tmp_path) as store:
        store.clear()
        assert store.contents.trajectory_counter == 3
        store.add(other, put_file(tmp_path, entry(3, parts=(Part(64, 8),))))
    contents, _ = index.read(str(tmp_path))
    assert list(contents.entries) == [3]
    assert contents.schema == other
    assert contents.trajectory_counter == 4
    assert contents.total_samples == 8


def test_clear_unlinks_the_files_after_the_journal_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path, 2)
    calls = []
    for name in ("append", "unlink"):
        _record(monkeypatch, name, calls.append)
    with opened(tmp_path) as store:
        store.clear()
        assert calls == ["append"]
        store.remove_dead_files()
    assert calls == ["append", "unlink", "unlink"]
    assert sorted(os.listdir(tmp_path)) == [JOURNAL]


def _record(monkeypatch: pytest.MonkeyPatch, name: str, log: Callable[[str], None]) -> None:
    real = getattr(files, name)

    def function(*arguments: Any) -> Any:
        log(name)
        return real(*arguments)

    monkeypatch.setattr(files, name, function)


def test_ids_that_were_given_elsewhere_are_not_given_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.contents.count_from(10, 1)
        store.clear()
    assert index.read(str(tmp_path))[0].trajectory_counter == 10


def test_an_add_whose_parts_stand_elsewhere_is_read_as_well(tmp_path: Path) -> None:
    append(tmp_path, line_of({"event": "schema", "version": 1, "columns": SCHEMA.to_json()}))
    json_entry = entry(0).to_json()
    parts = json_entry.pop("parts")
    append(tmp_path, line_of({"event": "add", "entry": {"parts": parts, **json_entry}}))
    append(tmp_path, line_of({"event": "add", "entry": entry(1).to_json()}))
    assert index.read(str(tmp_path))[0].entries == {0: entry(0), 1: entry(1)}


def test_a_schema_is_said_again_after_trajectories_but_no_other_one(tmp_path: Path) -> None:
    other = [{**SCHEMA.to_json()[0], "dtype": "int16"}, *SCHEMA.to_json()[1:]]
    for columns in (SCHEMA.to_json(), SCHEMA.to_json()):
        append(tmp_path, line_of({"event": "schema", "version": 2, "columns": columns}))
        trajectory_id = len(index.read(str(tmp_path))[0].entries)
        append(tmp_path, line_of({"event": "add", "entry": entry(trajectory_id).to_json()}))
    assert list(index.read(str(tmp_path))[0].entries) == [0, 1]
    append(tmp_path, line_of({"event": "schema", "version": 2, "columns": other}))
    with pytest.raises(CorruptError, match="another schema after trajectories"):
        index.read(str(tmp_path))


def test_text_that_looks_like_parts_is_text(tmp_path: Path) -> None:
    odd = dataclasses.replace(entry(0), model_weights_id='", "parts": [[1, 2]]}', file="a.arrow")
    with opened(tmp_path) as store:
        store.add(SCHEMA, odd)
    assert index.read(str(tmp_path))[0].entries == {0: odd}


def loaded(ids: list[int], trajectory_counter: int, id_step: int) -> Contents:
    contents = Contents()
    contents.schema = SCHEMA
    for i in ids:
        contents.add(entry(i))
    contents.count_from(trajectory_counter, id_step)
    return contents


def test_a_load_takes_the_place_of_all_in_one_line(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    before = len(events_of(tmp_path))
    with opened(tmp_path) as store:
        for i in (4, 7):
            put_file(tmp_path, entry(i))
        store.load(loaded([4, 7], 12, 3))
        assert list(store.contents.entries) == [4, 7]
        assert store.contents.dead_files == [entry(0).file, entry(1).file]
        store.remove_dead_files()
    assert len(events_of(tmp_path)) == before + 1
    names = {entry(4).file, entry(7).file, JOURNAL}
    assert set(os.listdir(tmp_path)) == names
    contents = index.read(str(tmp_path))[0]
    assert (contents.entries, contents.schema) == ({4: entry(4), 7: entry(7)}, SCHEMA)
    assert (contents.trajectory_counter, contents.id_step) == (12, 3)
    assert contents.total_samples == entry(4).num_samples + entry(7).num_samples


@pytest.mark.parametrize(
    ("lowest", "counter", "step", "expected"),
    [(0, 5, 1, 5), (5, 5, 3, 5), (6, 5, 3, 8), (8, 5, 3, 8), (9, 5, 3, 11), (7, 0, 1, 7)],
)
def test_the_next_id_is_below_neither_and_among_those_of_its_rank(
    lowest: int, counter: int, step: int, expected: int
) -> None:
    assert index.next_id(lowest, counter, step) == expected


def test_a_load_does_not_set_the_counter_back(tmp_path: Path) -> None:
    write_store(tmp_path, 9)
    with opened(tmp_path) as store:
        put_file(tmp_path, entry(1))
        store.load(loaded([1], 2, 4))
        assert (store.contents.trajectory_counter, store.contents.id_step) == (10, 4)
    contents = index.read(str(tmp_path))[0]
    assert (contents.trajectory_counter, contents.id_step) == (10, 4)


def test_a_journal_in_which_an_id_was_given_again_after_a_load_is_read(tmp_path: Path) -> None:
    write_store(tmp_path, 3)
    event = index._load_event(loaded([0], 1, 1))
    lines = [line_of(event), line_of({"event": "add", "entry": entry(1).to_json()})]
    for line in lines:
        append(tmp_path, line)
    with opened(tmp_path) as store:
        assert list(store.contents.entries) == [0, 1]
        assert store.contents.trajectory_counter == 3


def test_ids_rise_by_the_step_after_a_load(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.load(loaded([], 5, 4))
        store.add(SCHEMA, entry(5))
        assert store.contents.trajectory_counter == 9
    assert index.read(str(tmp_path))[0].trajectory_counter == 9


def test_a_load_of_nothing_frees_the_schema(tmp_path: Path) -> None:
    write_store(tmp_path, 1)
    with opened(tmp_path) as store:
        store.load(Contents())
    contents = index.read(str(tmp_path))[0]
    assert (contents.entries, contents.schema, contents.total_samples) == ({}, None, 0)


@pytest.mark.parametrize("id_step", [0, -1])
def test_a_step_below_one_is_damage(tmp_path: Path, id_step: int) -> None:
    event = {"event": "load", "version": 1, "columns": None, "entries": []}
    append(tmp_path, line_of({**event, "trajectory_counter": 0, "id_step": id_step}))
    with pytest.raises(CorruptError, match="id_step"):
        index.read(str(tmp_path))


def test_an_event_of_an_unknown_kind_is_passed_over(tmp_path: Path) -> None:
    entries = write_store(tmp_path, 1)
    append(tmp_path, line_of({"event": "priority", "values": [1, 2]}))
    append(tmp_path, line_of({"event": "add", "entry": entry(1).to_json()}))
    put_file(tmp_path, entry(1))
    assert entries_of(tmp_path) == [*entries, entry(1)]
    with opened(tmp_path) as store:
        assert list(store.contents.entries) == [0, 1]
    assert [event["event"] for event in events_of(tmp_path)] == [
        *("boot", "schema", "add", "priority", "add")
    ]


def test_a_failed_append_leaves_contents_and_journal_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path, 1)
    before = (tmp_path / JOURNAL).read_bytes()

    def full(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(files, "append", full)
            with pytest.raises(OSError, match="No space"):
                store.add(SCHEMA, entry(1))
            with pytest.raises(OSError, match="No space"):
                store.clear()
        assert list(store.contents.entries) == [0]
        assert (tmp_path / JOURNAL).read_bytes() == before
        store.add(SCHEMA, put_file(tmp_path, entry(1)))
    assert entries_of(tmp_path) == [entry(0), entry(1)]


# -- torn tails and damage -----------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_ignored_and_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_store(tmp_path, 3)
    data = (tmp_path / JOURNAL).read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    for size in range(start, len(data)):
        (tmp_path / JOURNAL).write_bytes(data[:size])
        contents, valid = index.read(str(tmp_path))
        assert (list(contents.entries), valid) == ([0, 1], start)
        assert (tmp_path / JOURNAL).stat().st_size == size
        caplog.clear()
        with opened(tmp_path):
            assert (tmp_path / JOURNAL).read_bytes() == data[:start]
        assert [r.getMessage() for r in caplog.records] == [
            f"{tmp_path / JOURNAL}: a torn line at byte {start} was cut off."
        ] * (size > start)


def test_a_first_line_torn_at_any_byte_leaves_an_empty_store(tmp_path: Path) -> None:
    write_store(tmp_path, 1)
    data = (tmp_path / JOURNAL).read_bytes()
    for size in range(data.index(b"\n") + 1):
        (tmp_path / JOURNAL).write_bytes(data[:size])
        contents, valid = index.read(str(tmp_path))
        assert (contents.entries, contents.schema, valid) == ({}, None, 0)


@pytest.mark.parametrize(
    "tail",
    [
        *(b"\0", b"\0" * 4096, b"\n", b"\n\n\n", b"{}\n", b"garbage", b"garbage\nmore\n"),
        *(b"\xff\xfe\n", b'{"event": "sync"}\n', line_of({"event": "sync"})[:-1]),
        line_of({"event": "sync"}).replace(b"sync", b"sunc"),
    ],
)
def test_bytes_with_no_valid_line_behind_them_are_a_torn_tail(tmp_path: Path, tail: bytes) -> None:
    entries = write_store(tmp_path, 2)
    data = (tmp_path / JOURNAL).read_bytes()
    append(tmp_path, tail)
    contents, valid = index.read(str(tmp_path))
    assert (list(contents.entries.values()), valid) == (entries, len(data))
    with opened(tmp_path) as store:
        assert list(store.contents.entries.values()) == entries
        store.add(SCHEMA, put_file(tmp_path, entry(2)))
    assert (tmp_path / JOURNAL).read_bytes()[: len(data)] == data
    assert entries_of(tmp_path) == [*entries, entry(2)]


def test_damage_before_a_valid_line_is_corrupt_at_every_byte(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    path = tmp_path / JOURNAL
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    start = len(lines[0])
    for at in range(start, start + len(lines[1]) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 0x20
        path.write_bytes(damaged)
        with pytest.raises(CorruptError) as error:
            index.read(str(tmp_path))
        assert (error.value.path, error.value.offset) == (str(path), start)


def test_a_writer_leaves_a_damaged_journal_as_it_is(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    path = tmp_path / JOURNAL
    damaged = path.read_bytes().replace(b'"version": 1', b'"version": 4')
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match="a damaged line before a valid one") as error:
        TrajectoryIndex(str(tmp_path))
    assert error.value.offset == damaged.index(b'{"event": "schema"')
    assert path.read_bytes() == damaged


def test_zeros_before_a_valid_line_are_damage(tmp_path: Path) -> None:
    write_store(tmp_path, 1)
    size = (tmp_path / JOURNAL).stat().st_size
    append(tmp_path, b"\0" * 100 + b"\n" + line_of({"event": "sync"}))
    with pytest.raises(CorruptError) as error:
        index.read(str(tmp_path))
    assert error.value.offset == size


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "add"},
        {"event": "add", "entry": None},
        {"event": "add", "entry": []},
        {"event": "add", "entry": {}},
        {"event": "add", "entry": {**entry(5).to_json(), "shape": [1]}},
        {"event": "add", "entry": {**entry(5).to_json(), "trajectory_id": "x"}},
        {"event": "add", "entry": {**entry(5).to_json(), "trajectory_id": float("inf")}},
        {"event": "add", "entry": {**entry(5).to_json(), "parts": 7}},
        {"event": "add", "entry": {**entry(5).to_json(), "parts": [[]]}},
        {"event": "add", "entry": {**entry(5).to_json(), "parts": [[1, 2, [3]]]}},
        {"event": "schema", "columns": []},
        {"event": "schema", "version": 1, "columns": None},
        {"event": "schema", "version": float("inf"), "columns": []},
        {"event": "schema", "version": 1, "columns": [{"path": ["a"], "dtype": "bool"}]},
        {
            "event": "schema",
            "version": 1,
            "columns": [{"path": ["a"], "dtype": "complex32", "row_shape": []}],
        },
        {
            "event": "schema",
            "version": 1,
            "columns": [{"path": [], "dtype": "bool", "row_shape": []}],
        },
        {"event": "drop"},
        {"event": "drop", "trajectory_ids": 7},
        {"event": "drop", "trajectory_ids": [99]},
        {"event": "clear"},
        {"event": "clear", "trajectory_counter": "x"},
    ],
    ids=lambda event: json.dumps(event)[:60],
)
def test_a_whole_line_that_is_no_event_is_corrupt(tmp_path: Path, event: dict[str, Any]) -> None:
    write_store(tmp_path, 2)
    size = (tmp_path / JOURNAL).stat().st_size
    append(tmp_path, line_of(event) if event else sealed(b'{"a": 1'))
    with pytest.raises(CorruptError) as error:
        index.read(str(tmp_path))
    assert (error.value.path, error.value.offset) == (str(tmp_path / JOURNAL), size)


INTS = (True, 5.0, "5", None, [5], -1, 1 << 62, NAN, 1e308)
TEXTS = (True, 5, None, ["a"], {"a": 1})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("added_at", (NAN, INFINITY, -INFINITY, 1e308, 1e11, -1, 10**400, "5", True, None, [5])),
        ("trajectory_id", INTS),
        ("max_episode_length", INTS),
        ("size_bytes", INTS),
        ("shape", ([True, 2], [6.0, 2], ["6", 2], [1 << 40, 2], [1 << 62, 1 << 62], "12", {})),
        ("parts", ([[0, True], [0, 12]], [[0, 12.0], [0, 12]], [["0", 12]], [[0, 1 << 40]])),
        *((key, TEXTS) for key in ("model_weights_id", "format", "file", "uuid")),
    ],
)
def test_a_value_of_another_kind_than_was_written_is_corrupt(
    tmp_path: Path, key: str, values: tuple[Any, ...]
) -> None:
    write_store(tmp_path, 2)
    journal = (tmp_path / JOURNAL).read_bytes()
    for value in values:
        event = {"event": "add", "entry": {**entry(5).to_json(), key: value}}
        (tmp_path / JOURNAL).write_bytes(journal + line_of(event))
        with pytest.raises(CorruptError) as error:
            index.read(str(tmp_path))
        assert (error.value.path, error.value.offset) == (str(tmp_path / JOURNAL), len(journal))


@pytest.mark.parametrize(
    "event",
    [
        *({"event": "clear", "trajectory_counter": value} for value in INTS),
        *({"event": "drop", "trajectory_ids": [value]} for value in INTS),
        {"event": "drop", "trajectory_ids": "01"},
        *({"event": "boot", "id": value} for value in TEXTS),
        *({"event": value} for value in TEXTS),
        *(
            {"event": "schema", "version": value, "columns": []}
            for value in (*INTS, 0)
            if value != 1 << 62
        ),
        *(
            {"event": "schema", "version": 1, "columns": [{**COLUMN, key: value}]}
            for key, value in (
                *(("path", value) for value in ("ab", [1], [None], {"a": 1})),
                *(("dtype", value) for value in TEXTS),
                *(("row_shape", value) for value in ("12", [True], [2.0], ["2"], [-1])),
            )
        ),
        {"event": "schema", "version": 1, "columns": [{**COLUMN, "dtype": "text"}]},
    ],
    ids=lambda event: json.dumps(event)[:60],
)
def test_an_event_of_other_kinds_of_values_is_corrupt(tmp_path: Path, event: Any) -> None:
    write_store(tmp_path, 2)
    size = (tmp_path / JOURNAL).stat().st_size
    append(tmp_path, line_of(event))
    with pytest.raises(CorruptError) as error:
        index.read(str(tmp_path))
    assert (error.value.path, error.value.offset) == (str(tmp_path / JOURNAL), size)


def test_the_time_of_addition_may_be_unknown_or_whole(tmp_path: Path) -> None:
    for added_at in (0, 0.0, 1_700_000_000, 99_999_999_999.5):
        found = Entry.from_json({**entry(5).to_json(), "added_at": added_at})
        assert (type(found.added_at), found.added_at) == (float, added_at)


@pytest.mark.parametrize(
    "body",
    [
        b'{"event": "add", "entry": ' + b"[" * 200_000,
        b'{"event": "priority", "value": ' + b"9" * 10_000,
        b'{"event": "sync", "x": "\xff"',
        b"[1",
        b"",
    ],
    ids=["deep", "huge number", "no utf-8", "no object", "empty"],
)
def test_a_whole_line_that_is_no_json_object_is_corrupt(tmp_path: Path, body: bytes) -> None:
    write_store(tmp_path, 1)
    append(tmp_path, sealed(body) + line_of({"event": "sync"}))
    with pytest.raises(CorruptError) as error:
        index.read(str(tmp_path))
    assert error.value.path == str(tmp_path / JOURNAL)


def test_a_line_nested_deep_but_whole_is_corrupt(tmp_path: Path) -> None:
    write_store(tmp_path, 1)
    deep = b"[" * 200_000 + b"]" * 200_000
    append(tmp_path, sealed(b'{"event": "priority", "values": ' + deep))
    with pytest.raises(CorruptError):
        index.read(str(tmp_path))


def test_a_line_of_megabytes_is_read(tmp_path: Path) -> None:
    entries = write_store(tmp_path, 1)
    parts = tuple(Part(64 * i, 2) for i in range(100_000))
    append(tmp_path, line_of({"event": "add", "entry": entry(1, parts=parts).to_json()}))
    assert entries_of(tmp_path) == [*entries, entry(1, parts=parts)]


def test_an_id_that_comes_twice_is_corrupt(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    size = (tmp_path / JOURNAL).stat().st_size
    append(tmp_path, line_of({"event": "add", "entry": entry(1).to_json()}))
    with pytest.raises(CorruptError, match="trajectory_id 1 twice") as error:
        index.read(str(tmp_path))
    assert error.value.offset == size


def test_an_id_that_is_there_is_refused_before_it_is_journalled(tmp_path: Path) -> None:
    entries = write_store(tmp_path, 2)
    with opened(tmp_path) as store, pytest.raises(ValueError, match="trajectory_id 1 twice"):
        store.add(SCHEMA, entry(1))
    assert entries_of(tmp_path) == entries


def test_an_id_may_come_again_after_its_drop(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    append(tmp_path, line_of({"event": "drop", "trajectory_ids": [0]}))
    append(tmp_path, line_of({"event": "add", "entry": entry(0).to_json()}))
    assert [item.trajectory_id for item in entries_of(tmp_path)] == [1, 0]


def test_a_newer_version_is_refused_by_path(tmp_path: Path) -> None:
    append(tmp_path, line_of({"event": "schema", "version": 4, "columns": "of another kind"}))
    with pytest.raises(VersionError) as error:
        index.read(str(tmp_path))
    assert str(error.value) == (
        f"{tmp_path / JOURNAL}: expected store version 3 or older, got 4. Update mmbuf."
    )
    with pytest.raises(VersionError):
        TrajectoryIndex(str(tmp_path))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_a_journal_is_found_or_is_a_torn_tail(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    entries = [entry(i) for i in range(3)]
    events = [{"event": "schema", "version": 1, "columns": SCHEMA.to_json()}]
    events += [{"event": "add", "entry": item.to_json()} for item in entries]
    journal = bytearray(b"".join(line_of(event) for event in events))
    start = data.draw(st.integers(0, len(journal)))
    stop = data.draw(st.integers(start, min(len(journal), start + 50)))
    journal[start:stop] = data.draw(st.binary(max_size=50))
    (directory / JOURNAL).write_bytes(journal)
    try:
        contents, valid = index.read(str(directory))
    except CorruptError:
        return
    assert list(contents.entries.values()) == entries[: len(contents.entries)]
    assert valid <= len(journal)


# -- files ---------------------------------------------------------------------------------------


def test_files_of_cleared_trajectories_are_unlinked_at_open_and_live_ones_never(
    tmp_path: Path,
) -> None:
    write_store(tmp_path, 3)
    append(tmp_path, line_of({"event": "clear", "trajectory_counter": 3}))
    # The first name was taken again after the clear.
    again = put_file(tmp_path, entry(3, file="trajectory_0_w.arrow"))
    append(tmp_path, line_of({"event": "schema", "version": 1, "columns": SCHEMA.to_json()}))
    append(tmp_path, line_of({"event": "add", "entry": again.to_json()}))
    (tmp_path / "notes.txt").write_text("of a person")
    with opened(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [JOURNAL, "notes.txt", "trajectory_0_w.arrow"]
    assert entries_of(tmp_path) == [again]


def test_files_of_dropped_trajectories_are_unlinked_at_open(tmp_path: Path) -> None:
    write_store(tmp_path, 2)
    append(tmp_path, line_of({"event": "drop", "trajectory_ids": [0]}))
    with opened(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [JOURNAL, "trajectory_1_w.arrow"]


def test_a_dead_name_outside_of_the_store_is_damage_and_left_alone(tmp_path: Path) -> None:
    store_directory = tmp_path / "store"
    store_directory.mkdir()
    outside = tmp_path / "precious"
    outside.write_bytes(b"x" * 100)
    append(store_directory, line_of({"event": "schema", "version": 1, "columns": []}))
    append(
        store_directory,
        line_of({"event": "add", "entry": entry(0, file="../precious").to_json()}),
    )
    append(store_directory, line_of({"event": "clear", "trajectory_counter": 1}))
    with pytest.raises(CorruptError, match="precious"), opened(store_directory):
        pass
    assert outside.exists()


def test_temporaries_of_a_writer_that_died_are_removed_at_open(tmp_path: Path) -> None:
    entries = write_store(tmp_path, 1)
    Path(files.temporary(str(tmp_path / "trajectory_1_w.arrow"))).write_bytes(b"half")
    with opened(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [JOURNAL, entries[0].file]


def test_short_and_missing_files_after_the_last_sync_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = write_store(tmp_path, 5)
    os.truncate(tmp_path / entries[1].file, 50)
    os.unlink(tmp_path / entries[3].file)
    with opened(tmp_path) as store:
        assert list(store.contents.entries) == [0, 2, 4]
        assert store.contents.trajectory_counter == 5
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (
            logging.WARNING,
            f"{tmp_path}: trajectories [1, 3] were not synced and are gone or cut short; dropped.",
        )
    ]
    assert not (tmp_path / entries[1].file).exists()
    assert [item.trajectory_id for item in entries_of(tmp_path)] == [0, 2, 4]
    caplog.clear()
    with opened(tmp_path):
        assert caplog.records == []


def test_files_before_the_last_sync_are_not_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = write_store(tmp_path, 2)
    append(tmp_path, line_of({"event": "sync"}))
    append(tmp_path, line_of({"event": "add", "entry": entry(2).to_json()}))
    put_file(tmp_path, entry(2))
    os.unlink(tmp_path / entries[0].file)
    looked_at: list[str] = []
    real = files.size_of

    def size_of(path: str) -> int:
        looked_at.append(os.path.basename(path))
        return real(path)

    monkeypatch.setattr(files, "size_of", size_of)
    with opened(tmp_path) as store:
        assert list(store.contents.entries) == [0, 1, 2]
    assert looked_at == ["trajectory_2_w.arrow"]
    assert caplog.records == []


def test_sync_brings_files_then_names_then_the_mark_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path, 2)
    append(tmp_path, line_of({"event": "sync"}))
    calls: list[str] = []
    monkeypatch.setattr(files, "sync", lambda path: calls.append(os.path.relpath(path, tmp_path)))
    monkeypatch.setattr(files, "sync_open", lambda fd: calls.append("journal"))
    with opened(tmp_path) as store:
        store.add(SCHEMA, put_file(tmp_path, entry(2)))
        store.add(SCHEMA, put_file(tmp_path, entry(3)))
        store.sync()
        assert calls == ["trajectory_2_w.arrow", "trajectory_3_w.arrow", ".", "journal"]
        assert store.contents.unsynced == []
        calls.clear()
        store.sync()
        assert calls == [".", "journal"]
    assert index.read(str(tmp_path))[0].unsynced == []


def test_a_failed_sync_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(tmp_path, 2)

    def fails(path: str) -> None:
        raise OSError(5, "Input/output error")

    with opened(tmp_path) as store:
        monkeypatch.setattr(files, "sync", fails)
        with pytest.raises(OSError, match="Input/output"):
            store.sync()
        assert store.contents.unsynced == [0, 1]
    assert index.read(str(tmp_path))[0].unsynced == [0, 1]


# -- a journal with other names ------------------------------------------------------------------


def test_a_journal_that_is_linked_from_outside_is_not_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "precious").write_bytes(b"precious\n" * 100)
    os.link(tmp_path / "precious", store / JOURNAL)
    with opened(store) as writer:
        writer.add(SCHEMA, put_file(store, entry(0)))
    assert (tmp_path / "precious").read_bytes() == b"precious\n" * 100
    assert entries_of(store) == [entry(0)]
    assert caplog.messages == [f"{store / JOURNAL}: a torn line at byte 0 was cut off."]


def store_and_copy(tmp_path: Path, count: int) -> tuple[Path, Path]:
    """A store of ``count`` trajectories, and where a copy of it by hard links is to be."""
    store = tmp_path / "store"
    store.mkdir()
    write_store(store, count)
    return store, tmp_path / "copy"


def link_all(store: Path, copy: Path) -> dict[str, bytes]:
    """Copy as ``cp -al`` does; what the copy holds."""
    shutil.copytree(store, copy, copy_function=os.link)
    return contents_of(copy)


def change(writer: TrajectoryIndex, directory: Path) -> None:
    """Have trajectory 4 in the place of all."""
    writer.drop([0])
    writer.add(SCHEMA, put_file(directory, entry(3)))
    writer.sync()
    writer.clear()
    writer.remove_dead_files()
    writer.add(SCHEMA, put_file(directory, entry(4)))
    writer.write_snapshots({})


def test_a_copy_by_hard_links_keeps_what_it_had_when_the_store_is_opened(tmp_path: Path) -> None:
    store, copy = store_and_copy(tmp_path, 3)
    before = link_all(store, copy)
    with opened(store) as writer:
        change(writer, store)
    assert contents_of(copy) == before
    assert (entries_of(store), entries_of(copy)) == ([entry(4)], [entry(i) for i in range(3)])


def test_a_copy_by_hard_links_keeps_what_it_had_when_the_store_was_open(tmp_path: Path) -> None:
    store, copy = store_and_copy(tmp_path, 3)
    with opened(store) as writer:
        before = link_all(store, copy)
        change(writer, store)
    assert contents_of(copy) == before
    assert (entries_of(store), entries_of(copy)) == ([entry(4)], [entry(i) for i in range(3)])


def test_a_store_keeps_what_it_had_when_a_copy_of_it_by_hard_links_is_opened(
    tmp_path: Path,
) -> None:
    store, copy = store_and_copy(tmp_path, 3)
    link_all(store, copy)
    before = contents_of(store)
    with opened(copy) as writer:
        change(writer, copy)
    assert contents_of(store) == before
    with opened(store) as writer:
        writer.add(SCHEMA, put_file(store, entry(3)))
    assert (entries_of(store), entries_of(copy)) == ([entry(i) for i in range(4)], [entry(4)])


def test_a_copy_of_a_copy_and_many_more_keep_what_they_had(tmp_path: Path) -> None:
    store, _ = store_and_copy(tmp_path, 0)
    copies = {}
    with opened(store) as writer:
        for i in range(6):
            writer.add(SCHEMA, put_file(store, entry(i)))
            for name in ("a", "b"):
                copy = tmp_path / f"{name}{i}"
                copies[copy] = link_all(store, copy)
        assert os.stat(store / JOURNAL).st_nlink == 3
    for copy, before in copies.items():
        assert contents_of(copy) == before
    with opened(tmp_path / "a2") as writer:
        writer.clear()
    assert entries_of(tmp_path / "b2") == [entry(i) for i in range(3)]


def test_a_journal_that_is_ours_alone_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = store_and_copy(tmp_path, 2)
    inode = os.stat(store / JOURNAL).st_ino
    with opened(store) as writer:
        change(writer, store)
    assert os.stat(store / JOURNAL).st_ino == inode


def test_a_torn_tail_stays_in_the_copy_and_is_cut_off_in_the_store(tmp_path: Path) -> None:
    store, copy = store_and_copy(tmp_path, 2)
    append(store, b'{"event": "add"')
    before = link_all(store, copy)
    with opened(store):
        pass
    assert contents_of(copy) == before
    assert (store / JOURNAL).read_bytes() == before[JOURNAL].removesuffix(b'{"event": "add"')


def test_a_journal_that_cannot_be_copied_is_not_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copy = store_and_copy(tmp_path, 2)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(store) as writer:
        before = link_all(store, copy)
        with monkeypatch.context() as patch:
            patch.setattr(files, "replaced", refuse)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    writer.add(SCHEMA, entry(2))
        assert contents_of(store) == contents_of(copy) == before
        writer.add(SCHEMA, put_file(store, entry(2)))
    assert contents_of(copy) == before
    assert entries_of(store) == [entry(i) for i in range(3)]


def test_a_journal_whose_copy_cannot_be_opened_once_stays_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copy = store_and_copy(tmp_path, 2)

    def refuse(path: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with opened(store) as writer:
        before = link_all(store, copy)
        with monkeypatch.context() as patch:
            patch.setattr(files, "open_for_append", refuse)
            with pytest.raises(OSError, match="Too many open files"):
                writer.add(SCHEMA, entry(2))
        assert contents_of(store) == contents_of(copy) == before
        writer.add(SCHEMA, put_file(store, entry(2)))
    assert contents_of(copy) == before
    assert entries_of(store) == [entry(i) for i in range(3)]


def test_a_reader_goes_on_in_the_copy_that_took_the_journals_place(tmp_path: Path) -> None:
    store, copy = store_and_copy(tmp_path, 2)
    reader = index.JournalReader(str(store), is_held=True)
    reader.refresh()
    with opened(store) as writer:
        link_all(store, copy)
        writer.add(SCHEMA, put_file(store, entry(2)))
        assert reader.looks_changed()
        changes = reader.refresh()
        assert (changes.is_reset, changes.dropped, list(changes.added)) == (False, [], [2])
        assert not reader.looks_changed()
        writer.add(SCHEMA, put_file(store, entry(3)))
        assert reader.looks_changed()
        assert list(reader.refresh().added) == [3]
    reader.let_go()


def test_a_reader_of_the_copy_sees_what_its_writer_says(tmp_path: Path) -> None:
    store, copy = store_and_copy(tmp_path, 2)
    link_all(store, copy)
    reader = index.JournalReader(str(copy), is_held=True)
    reader.refresh()
    with opened(store) as writer:
        writer.add(SCHEMA, put_file(store, entry(2)))
        assert not reader.refresh()
        assert not reader.looks_changed()
    with opened(copy) as writer:
        writer.add(SCHEMA, put_file(copy, entry(7)))
        assert reader.looks_changed()
        assert list(reader.refresh().added) == [7]
    reader.let_go()


# -- a directory that is another one ---------------------------------------------------------------


def assert_refuses(writer: TrajectoryIndex, store: Path, match: str) -> None:
    """That nothing is written, linked or unlinked, whatever is asked for."""
    before = contents_of(store.parent)
    ways: list[Callable[[], object]] = [
        writer.check,
        writer.clear,
        writer.sync,
        lambda: writer.add(SCHEMA, entry(9)),
        lambda: writer.drop([1]),
        lambda: writer.load(Contents()),
        lambda: writer.write_snapshots({}),
        writer.remove_dead_files,
    ]
    for way in ways:
        with pytest.raises(OSError, match=match):
            way()
    assert contents_of(store.parent) == before


@contextmanager
def changed(store: Path) -> Iterator[TrajectoryIndex]:
    """A store of trajectories 0 and 1 with more to do: snapshots, and a file to unlink."""
    store.mkdir()
    write_store(store, 3)
    with opened(store) as writer:
        writer.drop([2])
        yield writer


def go_away(store: Path) -> None:
    store.rename(store.with_name("elsewhere"))


def go_away_and_come_again(store: Path) -> None:
    go_away(store)
    store.mkdir()


def be_replaced(store: Path) -> None:
    go_away(store)
    store.mkdir()
    write_store(store, 3)


def be_copied(store: Path) -> None:
    go_away(store)
    shutil.copytree(store.with_name("elsewhere"), store)


def lose_its_journal(store: Path) -> None:
    (store / JOURNAL).rename(store.with_name("elsewhere"))


def get_another_journal(store: Path) -> None:
    lose_its_journal(store)
    shutil.copy(store.with_name("elsewhere"), store / JOURNAL)


def become_a_file(store: Path) -> None:
    go_away(store)
    store.touch()


def become_a_link(store: Path) -> None:
    be_replaced(store)
    store.rename(store.with_name("other"))
    store.symlink_to("other")


CHANGES = {
    go_away: "got none",
    go_away_and_come_again: "got none",
    be_replaced: "got another",
    be_copied: "got another",
    lose_its_journal: "got none",
    get_another_journal: "got another",
    become_a_file: "got none",
    become_a_link: "got another",
}


@pytest.mark.parametrize("happens", CHANGES, ids=lambda happens: happens.__name__)
def test_a_writer_writes_nothing_where_its_store_is_not(
    tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    store = tmp_path / "store"
    with changed(store) as writer:
        happens(store)
        assert_refuses(writer, store, f"journal.jsonl: .*{CHANGES[happens]}")


def test_a_store_that_is_back_is_gone_on_with(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with changed(store) as writer:
        go_away_and_come_again(store)
        assert_refuses(writer, store, "got none")
        store.rmdir()
        store.with_name("elsewhere").rename(store)
        writer.add(SCHEMA, put_file(store, entry(3)))
        writer.remove_dead_files()
        writer.sync()
    assert entries_of(store) == [entry(0), entry(1), entry(3)]
    assert not (store / entry(2).file).exists()


def test_a_store_is_itself_by_another_name(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with changed(store) as writer:
        go_away(store)
        store.symlink_to("elsewhere")
        writer.add(SCHEMA, put_file(store, entry(3)))
    assert entries_of(store) == [entry(0), entry(1), entry(3)]


@pytest.mark.parametrize("by", [-1, 1, 1000])
def test_a_journal_that_somebody_else_has_written_to_is_left_as_it_is(
    tmp_path: Path, by: int
) -> None:
    store = tmp_path / "store"
    with changed(store) as writer:
        size = (store / JOURNAL).stat().st_size
        os.truncate(store / JOURNAL, size + by)
        message = f"journal.jsonl: expected {size} bytes, got {size + by}: another has written"
        assert_refuses(writer, store, message)
        os.truncate(store / JOURNAL, size)


def test_a_store_of_two_writers_is_written_by_the_one_that_has_the_lock(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    path = str(store / files.WRITER_LOCK)
    lock = files.WriterLock(path)
    first = TrajectoryIndex(str(store), lock=lock)
    first.add(SCHEMA, put_file(store, entry(0)))
    os.unlink(path)
    second_lock = files.WriterLock(path)
    second = TrajectoryIndex(str(store), lock=second_lock)
    assert second.contents.entries == {0: entry(0)}
    for _ in range(2):
        with pytest.raises(OSError, match=r"the lock is lost: .* holds the store"):
            first.add(SCHEMA, entry(1))
    second.add(SCHEMA, put_file(store, entry(7)))
    second.close()
    second_lock.release()
    with pytest.raises(OSError, match="another has written to it"):
        first.add(SCHEMA, entry(1))
    first.close()
    lock.release()
    assert entries_of(store) == [entry(0), entry(7)]


def test_a_lock_that_was_removed_is_no_obstacle_while_nobody_else_has_come(tmp_path: Path) -> None:
    path = str(tmp_path / files.WRITER_LOCK)
    lock = files.WriterLock(path)
    with opened(tmp_path, lock=lock) as writer:
        writer.add(SCHEMA, put_file(tmp_path, entry(0)))
        os.unlink(path)
        writer.add(SCHEMA, put_file(tmp_path, entry(1)))
        with pytest.raises(LockedError):
            files.WriterLock(path)
    lock.release()
    assert entries_of(tmp_path) == [entry(0), entry(1)]


def test_a_sync_mark_stays_when_more_is_added(tmp_path: Path) -> None:
    reader = index.JournalReader(str(tmp_path))
    with opened(tmp_path) as writer:
        writer.add(SCHEMA, put_file(tmp_path, entry(0)))
        writer.sync()
        assert list(reader.refresh().added) == [0]
        writer.add(SCHEMA, put_file(tmp_path, entry(1)))
        assert not reader.refresh().is_reset
    assert [event["event"] for event in events_of(tmp_path)][-3:] == ["add", "sync", "add"]


# -- snapshots -----------------------------------------------------------------------------------


def contents_equal(left: Contents, right: Contents) -> bool:
    return (
        list(left.entries.items()) == list(right.entries.items())
        and left.schema == right.schema
        and left.trajectory_counter == right.trajectory_counter
        and left.total_samples == right.total_samples
    )


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 600])
def test_snapshots_say_what_the_journal_says(tmp_path: Path, count: int) -> None:
    entries = [entry(i) for i in range(count)]
    with opened(tmp_path) as store:
        for item in entries:
            store.add(SCHEMA, item)
        store.contents.count_from(count + 3, 1)
        store._append(line_of({"event": "sync"}))  # so that there is something to snapshot
        store.write_snapshots({"trajectory_format": "arrow", "seed": 5, "rng_state": {"a": 1}})
        metadata = json.loads((tmp_path / METADATA).read_text())
        assert metadata == {
            "trajectory_format": "arrow",
            "seed": 5,
            "rng_state": {"a": 1},
            "size": count,
            "total_samples": sum(item.num_samples for item in entries),
            "trajectory_counter": count + 3,
            "id_step": 1,
        }
        snapshot = json.loads((tmp_path / INDEX).read_text())
        assert list(snapshot) == [
            *("trajectory_index", "trajectory_id_list", "version", "schema", "metadata", "crc")
        ]
        assert snapshot["trajectory_id_list"] == list(range(count))
        assert list(snapshot["trajectory_index"]) == [str(i) for i in range(count)]
        assert snapshot["metadata"] == metadata
        expected = store.contents
    os.unlink(tmp_path / JOURNAL)
    contents, valid = index.read(str(tmp_path))
    assert contents_equal(contents, expected)
    assert (contents.unsynced, valid) == ([], 0)


def test_each_entry_of_a_snapshot_has_the_keys_of_rlinf(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add(SCHEMA, entry(7))
        store.write_snapshots({})
    snapshot = json.loads((tmp_path / INDEX).read_text())
    assert {
        key: snapshot["trajectory_index"]["7"][key] for key in list(entry(7).to_json())[:5]
    } == {
        "num_samples": 16,
        "trajectory_id": 7,
        "max_episode_length": 80,
        "shape": [8, 2, 7],
        "model_weights_id": "weights é/7",
    }


def test_a_snapshot_is_due_after_each_change_while_the_list_is_short(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert not store.is_snapshot_due()
        for i in range(3):
            store.add(SCHEMA, entry(i))
            assert store.is_snapshot_due()
            store.write_snapshots({})
            assert not store.is_snapshot_due()
        store.clear()
        assert store.is_snapshot_due()
        store.write_snapshots({})
        assert json.loads((tmp_path / INDEX).read_text())["trajectory_id_list"] == []


def test_a_snapshot_of_a_long_list_is_due_when_the_journal_has_grown_by_a_quarter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SHORT_LIST", 10)
    with opened(tmp_path) as store:
        written_at: list[int] = []
        sizes = [0]
        for i in range(300):
            store.add(SCHEMA, entry(i))
            sizes.append((tmp_path / JOURNAL).stat().st_size)
            if store.is_snapshot_due():
                written_at.append(i + 1)
                store.write_snapshots({})
    assert written_at[:10] == list(range(1, 11))
    for before, after in itertools.pairwise(written_at[9:]):
        assert 4 * sizes[after] >= 5 * sizes[before]
        assert 4 * sizes[after - 1] < 5 * sizes[before]
    assert len(written_at) < 10 + 17  # 10 * 1.25 ** 16 > 300


def test_snapshots_are_not_written_again_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    _record(monkeypatch, "replace", calls.append)
    with opened(tmp_path) as store:
        store.add(SCHEMA, entry(0))
        store.write_snapshots({})
        store.write_snapshots({})
    assert calls == ["replace"] * 2  # one for each of the two files


def test_a_store_goes_by_its_journal_and_not_by_a_snapshot(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add(SCHEMA, put_file(tmp_path, entry(0)))
        store.write_snapshots({})
        store.add(SCHEMA, put_file(tmp_path, entry(1)))
    assert json.loads((tmp_path / INDEX).read_text())["trajectory_id_list"] == [0]
    assert entries_of(tmp_path) == [entry(0), entry(1)]


# -- checkpoints -----------------------------------------------------------------------------------


def write_checkpoint(directory: Path, count: int) -> str:
    contents = Contents()
    contents.schema = SCHEMA
    for i in range(count):
        contents.add(entry(i))
    contents.trajectory_counter += 5
    index.write_snapshots(str(directory), contents, {"seed": 1})
    return str(directory / INDEX)


def test_a_checkpoint_is_read_from_its_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    os.unlink(tmp_path / METADATA)  # the index has a copy of it
    contents, valid = index.read(str(tmp_path))
    assert list(contents.entries.values()) == [entry(0), entry(1), entry(2)]
    assert (contents.schema, contents.trajectory_counter, valid) == (SCHEMA, 8, 0)
    assert contents.unsynced == []


def test_an_empty_checkpoint_is_read(tmp_path: Path) -> None:
    index.write_snapshots(str(tmp_path), Contents(), {})
    contents, _ = index.read(str(tmp_path))
    assert (contents.entries, contents.schema, contents.trajectory_counter) == ({}, None, 0)


def test_the_order_of_a_checkpoint_is_that_of_its_list(tmp_path: Path) -> None:
    path = Path(write_checkpoint(tmp_path, 3))
    snapshot = without_crc(path)
    snapshot["trajectory_id_list"] = [2, 0, 1]
    path.write_text(json.dumps(snapshot))
    assert list(index.read(str(tmp_path))[0].entries) == [2, 0, 1]


def test_no_writer_opens_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError, match="got a checkpoint"):
        TrajectoryIndex(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == before


def test_a_checkpoint_cut_at_any_byte_is_corrupt(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 2)
    for size in range(os.stat(path).st_size - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(CorruptError) as error:
            index.read(str(tmp_path))
        assert error.value.path == path


def without_crc(path: Path) -> Any:
    snapshot = json.loads(path.read_text())
    del snapshot["crc"]
    return snapshot


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    def change(snapshot: dict[str, Any]) -> Any:
        del snapshot[key]
        return snapshot

    return change


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda snapshot: {**snapshot, key: value}


def _with_entry(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(snapshot: dict[str, Any]) -> Any:
        snapshot["trajectory_index"]["0"][key] = value
        return snapshot

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(_without(key) for key in ("trajectory_index", "trajectory_id_list", "schema")),
        *(_without(key) for key in ("version", "metadata")),
        _with("trajectory_id_list", [0, 0]),
        _with("trajectory_id_list", [0, 5]),
        _with("trajectory_id_list", 3),
        _with("trajectory_index", []),
        _with("trajectory_index", {"0": None, "1": None}),
        _with("metadata", {}),
        _with("metadata", {"trajectory_counter": "x"}),
        _with("metadata", {"trajectory_counter": float("inf")}),
        _with("schema", 3),
        _with("schema", [{"path": [], "dtype": "bool", "row_shape": []}]),
        _with("version", "x"),
        _with_entry("shape", [1]),
        _with_entry("parts", [[]]),
        _with_entry("parts", [[0, 1, [2]]]),
        _with_entry("size_bytes", float("inf")),
        lambda snapshot: [],
        lambda snapshot: None,
    ],
)
def test_a_bad_checkpoint_is_corrupt(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    path = Path(write_checkpoint(tmp_path, 2))
    path.write_text(json.dumps(change(without_crc(path))))
    with pytest.raises(CorruptError) as error:
        index.read(str(tmp_path))
    assert error.value.path == str(path)


def test_every_changed_byte_of_a_checkpoints_index_is_found(tmp_path: Path) -> None:
    path = Path(write_checkpoint(tmp_path, 2))
    expected, data = index.read(str(tmp_path))[0], path.read_bytes()
    for at in range(len(data)):
        for bit in (1, 16):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                contents = index.read(str(tmp_path))[0]
            except (CorruptError, VersionError):
                continue
            # The name of the CRC itself: all else is as it was.
            assert contents_equal(contents, expected), (at, bit)
            assert at >= len(data) - 20


def test_an_index_edited_by_hand_is_taken_without_its_crc(tmp_path: Path) -> None:
    path = Path(write_checkpoint(tmp_path, 2))
    snapshot = json.loads(path.read_text())
    snapshot["trajectory_index"]["1"]["max_episode_length"] = 7
    path.write_text(json.dumps(snapshot))
    with pytest.raises(CorruptError, match="CRC-32"):
        index.read(str(tmp_path))
    del snapshot["crc"]
    path.write_text(json.dumps(snapshot))
    assert entries_of(tmp_path)[1].max_episode_length == 7


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff\xfe", b"[" * 200_000, b"{}"])
def test_an_index_that_is_no_json_object_is_corrupt(tmp_path: Path, data: bytes) -> None:
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(CorruptError):
        index.read(str(tmp_path))


def test_a_checkpoint_of_a_newer_version_is_refused_by_path(tmp_path: Path) -> None:
    path = Path(write_checkpoint(tmp_path, 1))
    path.write_text(path.read_text().replace('"version": 1', '"version": 4'))
    with pytest.raises(VersionError) as error:
        index.read(str(tmp_path))
    assert str(error.value).startswith(f"{path}: expected store version 3 or older, got 4")


def test_an_empty_checkpoint_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    index.write_snapshots(str(tmp_path), Contents(), {})
    path = tmp_path / INDEX
    path.write_text(path.read_text().replace('"version": 1', '"version": 4'))
    with pytest.raises(VersionError):
        index.read(str(tmp_path))
