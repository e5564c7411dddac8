"""Stores and JournalReader: what becomes of journals, and which trajectories that tells of."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmbuf import CorruptError, SchemaError, files, index, stores
from mmbuf.entry import Entry, Part
from mmbuf.index import JOURNAL, Contents, JournalReader
from mmbuf.schema import Column, Schema
from mmbuf.stores import Stores

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

SCHEMA = Schema([Column(("states",), "float32", (3,))])
OTHER = Schema([Column(("states",), "float64", (3,))])


def entry(i: int, added_at: float | None = None, rows: int = 2) -> Entry:
    return Entry(
        uuid=f"{i:032x}",
        trajectory_id=i,
        shape=(rows, 1),
        added_at=float(i) if added_at is None else added_at,
        format="arrow",
        file=f"trajectory_{i}_.arrow",
        size_bytes=1000 * rows,
        parts=(Part(64, rows),),
    )


def line(event: dict[str, Any]) -> bytes:
    body = json.dumps(event)[:-1].encode()
    return body + b', "crc": "%08x"}\n' % zlib.crc32(body)


def schema_line(schema: Schema = SCHEMA) -> bytes:
    return line({"event": "schema", "version": 1, "columns": schema.to_json()})


def add_line(item: Entry) -> bytes:
    return line({"event": "add", "entry": item.to_json()})


def drop_line(*ids: int) -> bytes:
    return line({"event": "drop", "trajectory_ids": ids})


def clear_line(trajectory_counter: int = 0) -> bytes:
    return line({"event": "clear", "trajectory_counter": trajectory_counter})


def load_line(entries: Sequence[Entry], schema: Schema = SCHEMA) -> bytes:
    return line(
        {
            "event": "load",
            "version": 1,
            "columns": schema.to_json(),
            "entries": [item.to_json() for item in entries],
            "trajectory_counter": 1000,
            "id_step": 1,
        }
    )


def append(directory: Path, *lines: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / JOURNAL, "ab") as journal:
        journal.write(b"".join(lines))


def begin(directory: Path, *ids: int, schema: Schema = SCHEMA) -> Path:
    append(directory, schema_line(schema), *(add_line(entry(i)) for i in ids))
    return directory


def checkpoint(directory: Path, *ids: int, schema: Schema = SCHEMA) -> Path:
    contents = Contents()
    contents.schema = schema
    for i in ids:
        contents.add(entry(i))
    directory.mkdir(parents=True)
    index.write_snapshots(str(directory), contents, {})
    return directory


class Seen:
    """Stores, and what who takes in all of their news has seen."""

    def __init__(
        self,
        *paths: Path | str,
        is_list: bool = False,
        shard: tuple[int, int] | None = None,
        follow: bool = True,
    ) -> None:
        self.stores = Stores(
            [str(p) for p in paths], is_list or len(paths) > 1, shard, follow=follow
        )
        self.keys: list[Hashable] = []
        self._take(self.stores.open())

    def _take(self, news: stores.News) -> None:
        for key in news.gone:
            self.keys.remove(key)
        assert not set(self.keys) & set(news.come)
        assert [item[0] for item in news.come.values()] == list(news.come)
        self.keys.extend(news.come)
        news.gone.clear()
        news.come.clear()
        news.is_late = False

    def refresh(self) -> list[Hashable]:
        """All keys; what one of the stores failed with is raised after the others' were taken."""
        news = self.stores.refresh()
        self._take(news)
        if news.error is not None:
            raise news.error
        return self.keys


# -- a journal that is being written ----------------------------------------------------------


def everything() -> list[tuple[bytes, list[int]]]:
    """Lines of every kind, and the ids that are there after each."""
    return [
        (schema_line(), []),
        (add_line(entry(0)), [0]),
        (add_line(entry(1)), [0, 1]),
        (line({"event": "sync"}), [0, 1]),
        (add_line(entry(2)), [0, 1, 2]),
        (drop_line(0, 1), [2]),
        (line({"event": "of a later version"}), [2]),
        (add_line(entry(3)), [2, 3]),
        (drop_line(3), [2]),
        (clear_line(4), []),
        (schema_line(OTHER), []),
        (add_line(entry(4)), [4]),
        (load_line([entry(1), entry(7)]), [1, 7]),
        (add_line(entry(8)), [1, 7, 8]),
        (drop_line(7), [1, 8]),
        (load_line([]), []),
        (add_line(entry(9)), [9]),
    ]


def test_each_line_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    append(tmp_path)
    seen = Seen(tmp_path)
    for whole, ids in everything():
        append(tmp_path, whole)
        assert seen.refresh() == ids


def test_a_line_is_not_seen_before_its_last_byte(tmp_path: Path) -> None:
    append(tmp_path)
    seen = Seen(tmp_path)
    before: list[int] = []
    for whole, ids in everything():
        for at in range(len(whole)):
            append(tmp_path, whole[at : at + 1])
            assert seen.refresh() == (ids if at == len(whole) - 1 else before)
        before = ids


def test_any_number_of_lines_may_come_at_once(tmp_path: Path) -> None:
    lines = everything()
    for seed in range(40):
        pick = random.Random(seed)
        directory = tmp_path / str(seed)
        append(directory)
        seen = Seen(directory)
        at = 0
        while at < len(lines):
            count = pick.randint(1, 9)
            append(directory, *(whole for whole, _ in lines[at : at + count]))
            at = min(at + count, len(lines))
            assert seen.refresh() == lines[at - 1][1]


def test_a_torn_line_that_the_next_writer_cut_off_is_never_seen(tmp_path: Path) -> None:
    begin(tmp_path, 0)
    seen = Seen(tmp_path)
    size = (tmp_path / JOURNAL).stat().st_size
    append(tmp_path, add_line(entry(1))[:-30])
    assert seen.refresh() == [0]
    with open(tmp_path / JOURNAL, "r+b") as journal:
        journal.truncate(size)
    append(tmp_path, add_line(entry(2)))
    assert seen.refresh() == [0, 2]


def test_only_the_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, *range(500))
    seen = Seen(tmp_path)
    read: list[int] = []
    really = files.read_at

    def read_at(fd: int, size: int, offset: int) -> bytes:
        read.append(size)
        return really(fd, size, offset)

    monkeypatch.setattr(files, "read_at", read_at)
    new = add_line(entry(500))
    append(tmp_path, new)
    assert seen.refresh() == list(range(501))
    assert sum(read) <= len(new) + 4096  # and the end of what was read before


def test_a_journal_that_has_not_changed_costs_one_stat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(begin(tmp_path, 0))
    journal = str(tmp_path / JOURNAL)
    inode = os.stat(journal).st_ino
    calls: list[object] = []
    counting = SimpleNamespace(**vars(os))
    for name in ("stat", "fstat", "lstat"):
        really = getattr(os, name)

        def counted(file: object, really: Any = really) -> object:
            status = really(file)
            if status.st_ino == inode:
                calls.append(file)
            return status

        setattr(counting, name, counted)
    monkeypatch.setattr(files, "os", counting)
    assert not seen.stores.has_news()
    assert calls == [journal]
    calls.clear()
    assert not seen.stores.looks_new()
    assert [type(call) for call in calls] == [int]  # of the open file, which is cheaper
    monkeypatch.setattr(stores, "_LOOK_S", -1.0)
    calls.clear()
    assert not seen.stores.looks_new()
    assert calls == [journal]
    seen.stores.close()


def held(directory: Path) -> list[str]:
    """Paths of the files below ``directory`` that this process has open."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in paths if path.startswith(str(directory))]


@LINUX_ONLY
def test_closing_lets_go_of_the_journals(tmp_path: Path) -> None:
    seen = Seen(begin(tmp_path, 0))
    assert held(tmp_path) == [str(tmp_path / JOURNAL)]
    seen.stores.close()
    assert held(tmp_path) == []
    assert not seen.stores.looks_new()


def test_stores_are_followed_when_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(files, "Watch", refuse)
    seen = Seen(begin(tmp_path, 0))
    assert not seen.stores.looks_new()
    append(tmp_path, add_line(entry(1)))
    assert seen.stores.looks_new()


@LINUX_ONLY
def test_a_journal_that_could_not_be_read_is_not_held_by_the_error(tmp_path: Path) -> None:
    append(tmp_path, b"no line\n", add_line(entry(0)))
    with pytest.raises(CorruptError) as error:
        Seen(tmp_path)
    assert held(tmp_path) == []
    assert error.value.__traceback__ is not None


def test_stores_are_followed_when_a_held_journal_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, known: object) -> bool:
        raise OSError(errno.EIO, "refused")

    seen = Seen(begin(tmp_path, 0))
    monkeypatch.setattr(files.Watch, "has_changed", fail)
    assert not seen.stores.looks_new()
    append(tmp_path, add_line(entry(1)))
    assert seen.stores.looks_new()
    seen.stores.close()


@LINUX_ONLY
def test_no_more_than_16_journals_are_held_open(tmp_path: Path) -> None:
    for i in range(20):
        begin(tmp_path / f"rank_{i}", i)
    seen = Seen(tmp_path / "rank_*")
    assert len(held(tmp_path)) == 16
    seen.stores.close()


def test_each_entry_comes_with_its_number_among_all_that_were_added(tmp_path: Path) -> None:
    append(tmp_path)
    reader = JournalReader(str(tmp_path))
    numbers: dict[int, int] = {}
    for whole, _ in everything():
        append(tmp_path, whole)
        for i, (_, number) in reader.refresh().added.items():
            numbers[number] = i
    assert numbers == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 7, 7: 8, 8: 9}


def test_unread_bytes_are_those_behind_the_last_line_that_was_read(tmp_path: Path) -> None:
    seen = Seen(begin(tmp_path, 0))
    assert seen.stores.unread_bytes == 0
    new = add_line(entry(1))
    append(tmp_path, new)
    assert seen.stores.unread_bytes == len(new)
    append(tmp_path, new[:10])
    seen.refresh()
    assert seen.stores.unread_bytes == 10
    (tmp_path / JOURNAL).write_bytes(schema_line())
    assert seen.stores.unread_bytes == len(schema_line())
    (tmp_path / JOURNAL).unlink()
    assert seen.stores.unread_bytes == 0


# -- damage --------------------------------------------------------------------------------------


def damaged(directory: Path) -> bytes:
    """Append three lines to a journal, the middle one damaged; the middle one as it should be."""
    broken = add_line(entry(11))
    append(directory, add_line(entry(10)), broken.replace(b"arrow", b"ARROW", 1))
    append(directory, add_line(entry(12)))
    return broken


def repair(directory: Path, whole: bytes) -> None:
    data = (directory / JOURNAL).read_bytes().replace(whole.replace(b"arrow", b"ARROW", 1), whole)
    (directory / JOURNAL).write_bytes(data)


def test_a_damaged_line_before_a_valid_one_is_said_at_each_refresh(tmp_path: Path) -> None:
    seen = Seen(begin(tmp_path, 0))
    offset = (tmp_path / JOURNAL).stat().st_size + len(add_line(entry(10)))
    damaged(tmp_path)
    for _ in range(3):
        assert seen.stores.has_news()
        with pytest.raises(CorruptError, match="a damaged line before a valid one") as caught:
            seen.refresh()
        assert (caught.value.path, caught.value.offset) == (str(tmp_path / JOURNAL), offset)
        assert seen.keys == [0]


def test_a_journal_that_was_repaired_goes_on(tmp_path: Path) -> None:
    seen = Seen(begin(tmp_path, 0))
    broken = damaged(tmp_path)
    with pytest.raises(CorruptError):
        seen.refresh()
    repair(tmp_path, broken)
    assert seen.refresh() == [0, 10, 11, 12]
    assert not seen.stores.has_news()


def test_a_damaged_journal_stops_no_other_store(tmp_path: Path) -> None:
    bad, good = begin(tmp_path / "bad", 0), begin(tmp_path / "good", 1)
    seen = Seen(tmp_path / "*")
    damaged(bad)
    append(good, add_line(entry(2)))
    with pytest.raises(CorruptError):
        seen.refresh()
    assert seen.keys == [(str(bad), 0), (str(good), 1), (str(good), 2)]


def test_a_damaged_journal_is_refused_at_opening(tmp_path: Path) -> None:
    damaged(begin(tmp_path / "bad", 0))
    begin(tmp_path / "good", 1)
    with pytest.raises(CorruptError):
        Seen(tmp_path / "*")


# -- another file in the journal's place ------------------------------------------------------


@pytest.mark.parametrize("ids", [(), (5,), (0, 1), tuple(range(30))])
def test_a_journal_that_was_replaced_is_read_from_its_beginning(
    tmp_path: Path, ids: tuple[int, ...]
) -> None:
    store = begin(tmp_path / "store", 0, 1, 2)
    seen = Seen(store)
    begin(tmp_path / "other", *ids)
    (tmp_path / "other" / JOURNAL).rename(store / JOURNAL)
    assert seen.refresh() == list(ids)
    append(store, add_line(entry(99)))
    assert seen.refresh() == [*ids, 99]


@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_a_journal_that_was_replaced_is_found_by_its_bytes_where_the_inode_is_the_same(
    tmp_path: Path, count: int
) -> None:
    store = begin(tmp_path / "store", 0, 1, 2)
    seen = Seen(store)
    begin(tmp_path / "other", *range(10, 10 + count))
    data = (tmp_path / "other" / JOURNAL).read_bytes()
    (store / JOURNAL).write_bytes(data)
    assert seen.refresh() == list(range(10, 10 + count))
    append(store, add_line(entry(99)))
    assert seen.refresh() == [*range(10, 10 + count), 99]


def test_a_journal_that_is_replaced_again_and_again_is_followed(tmp_path: Path) -> None:
    store = begin(tmp_path / "store")
    seen = Seen(store)
    pick = random.Random(0)
    for i in range(100):
        ids = [1000 * i + k for k in range(pick.randint(0, 6))]
        begin(tmp_path / "other", *ids)
        (tmp_path / "other" / JOURNAL).rename(store / JOURNAL)
        assert seen.refresh() == ids


def test_what_came_before_a_damaged_line_of_a_new_journal_is_told_once(tmp_path: Path) -> None:
    store = begin(tmp_path / "store", 0)
    seen = Seen(store)
    broken = damaged(begin(tmp_path / "other", 1))
    (tmp_path / "other" / JOURNAL).rename(store / JOURNAL)
    for _ in range(2):
        with pytest.raises(CorruptError):
            seen.refresh()
    repair(store, broken)
    assert seen.refresh() == [1, 10, 11, 12]


def test_a_named_store_stays_while_its_journal_is_away_and_goes_on_when_it_is_back(
    tmp_path: Path,
) -> None:
    store = begin(tmp_path / "store", 0)
    seen = Seen(store)
    shutil.rmtree(store)
    assert seen.stores.has_news()
    assert seen.refresh() == [0]
    begin(store, 7, 8)
    assert seen.refresh() == [7, 8]


def test_what_was_read_of_a_journal_is_forgotten_where_it_would_pile_up(tmp_path: Path) -> None:
    seen = Seen(begin(tmp_path))
    journal = next(iter(seen.stores._journals.values()))
    for i in range(3000):
        append(tmp_path, add_line(entry(i, rows=i + 1)), *([drop_line(i - 5)] if i >= 5 else []))
        if i % 100 == 99:
            assert seen.refresh() == list(range(i - 4, i + 1))
    assert journal.contents.dead_files == []
    assert len(journal.contents.entries) == len(journal.contents.unsynced) == 5
    assert len(journal._layouts) <= 1024


# -- many stores ---------------------------------------------------------------------------------


def test_keys_are_ids_of_one_store_and_pairs_of_many(tmp_path: Path) -> None:
    one, two = begin(tmp_path / "rank_0", 0), begin(tmp_path / "rank_1", 0)
    assert Seen(one).keys == [0]
    assert Seen(one, is_list=True).keys == [(str(one), 0)]
    pairs = [(str(one), 0), (str(two), 0)]
    assert Seen(one, two).keys == pairs
    assert Seen(tmp_path / "rank_*").keys == pairs
    assert Seen(tmp_path / "rank_1*").keys == pairs[1:]


def test_many_stores_are_one_list_in_the_order_of_addition(tmp_path: Path) -> None:
    pick = random.Random(1)
    times = pick.sample(range(1000), 60)
    for i, added_at in enumerate(times):
        directory = tmp_path / f"rank_{i % 3}"
        append(directory, *([] if directory.exists() else [schema_line()]))
        append(directory, add_line(entry(i, added_at)))
    keys = Seen(tmp_path / "rank_*").keys
    assert [times[i] for _, i in keys] == sorted(times)  # type: ignore[misc]


def test_a_store_that_appears_later_under_the_pattern_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(tmp_path / "rank_*")
    assert (seen.keys, seen.stores.num_stores, seen.stores.schema) == ([], 0, None)
    store = begin(tmp_path / "rank_3", 0)
    assert seen.refresh() == [(str(store), 0)]
    begin(tmp_path / "other_4", 0)
    assert not seen.stores.has_news()
    monkeypatch.setattr(stores, "_LOOK_S", -1.0)
    assert seen.stores.has_news()
    assert seen.refresh() == [(str(store), 0)]
    assert seen.stores.num_stores == 1


def test_what_is_not_a_store_yet_is_passed_over_until_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_1").write_bytes(b"a file")
    seen = Seen(tmp_path / "rank_*")
    assert seen.keys == []
    (tmp_path / "rank_0" / ".writer.lock").touch()
    assert seen.refresh() == []
    append(tmp_path / "rank_0")
    assert seen.refresh() == []
    begin(tmp_path / "rank_0", 4)
    assert seen.refresh() == [(str(tmp_path / "rank_0"), 4)]


def test_a_store_that_goes_while_it_is_entered_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = begin(tmp_path / "rank_0", 0), begin(tmp_path / "rank_1", 1)
    really = files.opened

    def opened(path: str) -> AbstractContextManager[int]:
        if path.startswith(str(store)):
            shutil.rmtree(store, ignore_errors=True)
        return really(path)

    monkeypatch.setattr(files, "opened", opened)
    assert Seen(tmp_path / "rank_*").keys == [(str(other), 1)]


def test_a_match_that_is_deleted_leaves(tmp_path: Path) -> None:
    store, other = begin(tmp_path / "rank_0", 0), begin(tmp_path / "rank_1", 1)
    seen = Seen(tmp_path / "rank_*")
    shutil.rmtree(store)
    assert seen.refresh() == [(str(other), 1)]
    assert seen.stores.num_stores == 1
    begin(store, 2)
    assert seen.refresh() == [(str(other), 1), (str(store), 2)]


def test_a_directory_called_like_a_pattern_is_one_store(tmp_path: Path) -> None:
    assert Seen(begin(tmp_path / "run[1]", 0)).keys == [0]


def test_a_checkpoint_that_is_gone_stays_as_it_was_until_there_is_one_again(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", 0, 1)
    live = begin(tmp_path / "live", 2)
    seen = Seen(saved, live)
    shutil.rmtree(saved)
    append(live, add_line(entry(3)))
    assert seen.refresh() == [(str(saved), 0), (str(saved), 1), (str(live), 2), (str(live), 3)]
    checkpoint(saved, 5)
    assert seen.refresh() == [(str(live), 2), (str(live), 3), (str(saved), 5)]
    seen.stores.close()


def test_a_missing_store_of_a_list_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a store directory"):
        Seen(begin(tmp_path / "one", 0), tmp_path / "two")


def test_has_news_may_be_asked_while_stores_come_and_go(tmp_path: Path) -> None:
    for i in range(30):
        begin(tmp_path / f"rank_{i}", i)
    seen = Seen(tmp_path / "rank_*")
    is_done = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not is_done.is_set():
                seen.stores.has_news()
                _ = seen.stores.unread_bytes
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(150):
        if i % 2:
            begin(tmp_path / f"rank_{i % 30}", i)
        else:
            shutil.rmtree(tmp_path / f"rank_{(i + 1) % 30}", ignore_errors=True)
        seen.refresh()
    is_done.set()
    for thread in threads:
        thread.join()
    assert failures == []


# -- checkpoints that are saved over ---------------------------------------------------------------


def save_over(directory: Path, *ids: int, schema: Schema = SCHEMA) -> None:
    contents = Contents()
    contents.schema = schema
    for i in ids:
        contents.add(entry(i))
    index.write_snapshots(str(directory), contents, {})


def test_a_checkpoint_that_is_saved_over_is_followed(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", 0, 1, 2)
    seen = Seen(saved)
    assert not seen.stores.looks_new()
    save_over(saved, 1, 2, 3)
    assert seen.stores.looks_new()
    assert seen.refresh() == [1, 2, 3]
    assert not seen.stores.looks_new()
    save_over(saved, 7, schema=OTHER)
    assert (seen.refresh(), seen.stores.schema) == ([7], OTHER)
    save_over(saved)
    assert seen.refresh() == []
    seen.stores.close()


def test_checkpoints_beside_stores_are_followed_when_they_are_saved_over(tmp_path: Path) -> None:
    saved = [checkpoint(tmp_path / f"saved_{i}", i, 10 + i) for i in range(20)]
    live = begin(tmp_path / "saved_live", 30)
    seen = Seen(tmp_path / "saved_*")
    for i, path in enumerate(saved):
        save_over(path, 10 + i, 40 + i)
    append(live, add_line(entry(31)))
    expected = [(str(saved[i]), 10 + i) for i in range(20)]
    expected += [(str(live), 30), (str(live), 31)]
    expected += [(str(saved[i]), 40 + i) for i in range(20)]
    assert sorted(seen.refresh(), key=lambda key: key[1]) == expected  # type: ignore[index]
    seen.stores.close()


def test_a_checkpoint_that_does_not_follow_stays_as_it_was(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", 0, 1)
    seen = Seen(saved, follow=False)
    save_over(saved, 2)
    assert seen.refresh() == [0, 1]


@pytest.mark.parametrize("is_pattern", [False, True])
def test_a_store_that_is_begun_where_a_checkpoint_was_is_followed(
    tmp_path: Path, is_pattern: bool
) -> None:
    saved = checkpoint(tmp_path / "saved", 0, 1)
    seen = Seen(tmp_path / "save*" if is_pattern else saved)

    def keys(*ids: int) -> list[Hashable]:
        return [(str(saved), i) if is_pattern else i for i in ids]

    shutil.rmtree(saved)
    assert seen.refresh() == ([] if is_pattern else keys(0, 1))
    begin(saved, 4)
    save_over(saved)  # the snapshot of a live store is older than its journal
    assert seen.refresh() == keys(4)
    append(saved, add_line(entry(5)), drop_line(4))
    assert seen.refresh() == keys(5)
    seen.stores.close()


def test_a_damaged_index_of_a_checkpoint_is_said_and_what_was_seen_stays(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", 0, 1)
    seen = Seen(saved)
    (saved / index.INDEX).write_text("{")
    for _ in range(2):
        with pytest.raises(CorruptError, match="not an index"):
            seen.refresh()
        assert seen.keys == [0, 1]
    save_over(saved, 1)
    assert seen.refresh() == [1]
    seen.stores.close()


def test_every_rank_sees_its_part_of_a_checkpoint_that_is_saved_over(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", *range(10))
    ranks = [Seen(saved, shard=(rank, 3)) for rank in range(3)]
    before = ranks_of(saved, 3)
    for newest in (12, 20, 21):
        save_over(saved, *range(newest - 10, newest))
        now = ranks_of(saved, 3)
        for rank, seen in enumerate(ranks):
            assert seen.refresh() == [i for i in range(newest - 10, newest) if now[i] == rank]
        assert all(now[i] == before[i] for i in now.keys() & before.keys())
        before = now
    for seen in ranks:
        seen.stores.close()


# -- errors half way -----------------------------------------------------------------------------


def test_what_other_stores_told_before_one_failed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_stores = [begin(tmp_path / f"rank_{i}", i) for i in range(3)]
    seen = Seen(tmp_path / "rank_*")
    for i, store in enumerate(all_stores):
        append(store, add_line(entry(10 + i)))
    really = files.opened

    def opened(path: str) -> AbstractContextManager[int]:
        if path.startswith(str(all_stores[1])):
            raise OSError(errno.EMFILE, "too many open files", path)
        return really(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "opened", opened)
        with pytest.raises(OSError, match="too many open files"):
            seen.refresh()
    assert [i for _, i in seen.keys] == [0, 1, 2, 10, 12]  # type: ignore[misc]
    assert [i for _, i in seen.refresh()] == [0, 1, 2, 10, 12, 11]  # type: ignore[misc]


def test_news_that_nobody_took_in_is_told_again(tmp_path: Path) -> None:
    seen = Seen(begin(tmp_path, 0, 1))
    append(tmp_path, add_line(entry(2)), drop_line(0), add_line(entry(3)))
    seen.stores.refresh()
    assert seen.stores.has_news()
    append(tmp_path, drop_line(2), add_line(entry(4)))
    news = seen.stores.refresh()
    assert (news.gone, list(news.come)) == ([0], [3, 4])
    assert seen.refresh() == [1, 3, 4]


def test_a_store_that_came_and_went_before_anybody_took_it_in_was_never_there(
    tmp_path: Path,
) -> None:
    seen = Seen(tmp_path / "rank_*")
    store = begin(tmp_path / "rank_0", 0, 1)
    assert len(seen.stores.refresh().come) == 2
    shutil.rmtree(store)
    assert not seen.stores.refresh()
    assert seen.refresh() == []


# -- schemas -------------------------------------------------------------------------------------


def test_different_schemas_are_refused_with_both_names(tmp_path: Path) -> None:
    one, two = begin(tmp_path / "rank_0", 0), begin(tmp_path / "rank_1", 1, schema=OTHER)
    with pytest.raises(SchemaError) as caught:
        Seen(tmp_path / "rank_*")
    assert str(one) in str(caught.value)
    assert str(two) in str(caught.value)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_store_or_checkpoint_of_another_schema_is_refused_however_it_is_opened(
    tmp_path: Path, follow: bool, is_saved: bool
) -> None:
    one = begin(tmp_path / "one", 0)
    two = (checkpoint if is_saved else begin)(tmp_path / "two", 1, schema=OTHER)
    with pytest.raises(SchemaError, match="expected"):
        Seen(one, two, follow=follow)


def test_a_store_that_does_not_fit_is_said_at_each_refresh_while_the_others_go_on(
    tmp_path: Path,
) -> None:
    one = begin(tmp_path / "rank_0", 0)
    seen = Seen(tmp_path / "rank_*")
    two = begin(tmp_path / "rank_1", 1, schema=OTHER)
    expected: list[Hashable] = [(str(one), 0)]
    for i in range(2, 5):
        append(one, add_line(entry(i)))
        expected.append((str(one), i))
        with pytest.raises(SchemaError, match="rank_0"):
            seen.refresh()
        assert seen.keys == expected
    append(two, clear_line(), schema_line(), add_line(entry(9)))
    assert seen.refresh() == [*expected, (str(two), 9)]


def test_a_store_that_no_longer_fits_leaves_and_comes_again_when_it_does(tmp_path: Path) -> None:
    one, two = begin(tmp_path / "rank_0", 0), begin(tmp_path / "rank_1", 1)
    seen = Seen(tmp_path / "rank_*")
    append(two, clear_line(), schema_line(OTHER), add_line(entry(2)))
    for _ in range(2):
        with pytest.raises(SchemaError, match="rank_1"):
            seen.refresh()
        assert seen.keys == [(str(one), 0)]
    append(one, clear_line())
    assert seen.refresh() == [(str(two), 2)]


def test_stores_that_change_their_schema_together_are_no_error(tmp_path: Path) -> None:
    one, two = begin(tmp_path / "rank_0", 0), begin(tmp_path / "rank_1", 1)
    seen = Seen(tmp_path / "rank_*")
    for i, store in enumerate((one, two), 2):
        append(store, clear_line(), schema_line(OTHER), add_line(entry(i)))
    assert seen.refresh() == [(str(one), 2), (str(two), 3)]


def test_a_named_store_that_did_not_fit_and_is_gone_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    one, two = begin(tmp_path / "one", 0), begin(tmp_path / "two", 1)
    seen = Seen(one, two)
    append(two, clear_line(), schema_line(OTHER), add_line(entry(2)))
    with pytest.raises(SchemaError):
        seen.refresh()
    shutil.rmtree(two)
    append(one, add_line(entry(3)))
    with pytest.raises(FileNotFoundError, match="two"):
        seen.refresh()
    assert seen.keys == [(str(one), 0), (str(one), 3)]


# -- shards --------------------------------------------------------------------------------------


def ranks_of(path: Path, world_size: int) -> dict[Hashable, int]:
    """The rank of each trajectory; AssertionError if one has two."""
    found: dict[Hashable, int] = {}
    for rank in range(world_size):
        for key in Seen(path, shard=(rank, world_size)).keys:
            assert found.setdefault(key, rank) == rank, key
    return found


@pytest.mark.parametrize("num_stores", [1, 2, 3, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 50])
def test_every_trajectory_is_on_exactly_one_rank(
    tmp_path: Path, num_stores: int, world_size: int
) -> None:
    pick = random.Random(world_size)
    sizes = [pick.randint(0, 40) for _ in range(num_stores)]
    for i, size in enumerate(sizes):
        begin(tmp_path / f"rank_{i}", *range(size))
    found = ranks_of(tmp_path / "rank_*", world_size)
    assert len(found) == sum(sizes)
    counts = Counter(found.values())
    # Round robin within each store: each rank is off by less than one trajectory of each.
    for rank in range(world_size):
        assert abs(counts[rank] - sum(sizes) / world_size) < num_stores + 1


def test_a_trajectory_stays_with_its_rank_while_stores_grow_shrink_come_and_go(
    tmp_path: Path,
) -> None:
    pick = random.Random(3)
    readers = [Seen(tmp_path / "rank_*", shard=(rank, 3)) for rank in range(3)]
    live: dict[int, list[int]] = {}
    ranks: dict[Hashable, int] = {}
    for step in range(250):
        i = pick.randrange(4)
        store = tmp_path / f"rank_{i}"
        if i not in live:
            begin(store)
            live[i] = []
        what = pick.random()
        if what < 0.7:
            append(store, *(add_line(entry(8 * step + k)) for k in range(4)))
            live[i] += [8 * step + k for k in range(4)]
        elif what < 0.9 and live[i]:
            append(store, drop_line(*live[i][:5]))
            del live[i][:5]
        elif what < 0.95:
            shutil.rmtree(store)
            del live[i]
        for rank, reader in enumerate(readers):
            for key in reader.refresh():
                assert ranks.setdefault(key, rank) == rank
        expected = {(str(tmp_path / f"rank_{k}"), n) for k, ids in live.items() for n in ids}
        assert sorted(key for reader in readers for key in reader.keys) == sorted(expected)
    assert ranks_of(tmp_path / "rank_*", 3).items() <= ranks.items()


def test_many_small_stores_are_spread_over_the_ranks(tmp_path: Path) -> None:
    for i in range(80):
        begin(tmp_path / f"rank_{i}", 0)
    counts = Counter(ranks_of(tmp_path / "rank_*", 4).values())
    assert sum(counts.values()) == 80
    assert all(8 <= counts[rank] <= 32 for rank in range(4))


def test_a_shard_does_not_depend_on_where_the_store_lies(tmp_path: Path) -> None:
    store = begin(tmp_path / "here" / "store", *range(20))
    before = ranks_of(store, 3)
    (tmp_path / "there").mkdir()
    store.rename(tmp_path / "there" / "store")
    assert ranks_of(tmp_path / "there" / "store", 3) == before


@pytest.mark.parametrize("shard", [(0, 0), (-1, 2), (2, 2), (0, -1)])
def test_an_impossible_shard_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="shard: expected"):
        stores.checked_shard(shard)
