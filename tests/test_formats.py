"""What every format promises (`mmbuf.storage.Format`), each one held to the same tests."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import (
    DTYPES,
    bits,
    bytes_of_text,
    contents_of,
    every_dtype,
    random_bits,
    rows_and_texts,
    trajectory,
)

from mmbuf import files, storage
from mmbuf.entry import Entry, Part
from mmbuf.errors import CorruptError
from mmbuf.formats import arrow, native, npy
from mmbuf.schema import Array, Schema, interleave, measure
from mmbuf.storage import Format, Source

FORMATS: dict[str, Format] = {"arrow": arrow, "npy": npy}
UUID = "0123456789abcdef0123456789abcdef"
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclasses.dataclass
class Written:
    """A trajectory's file or directory, and all that was put into it."""

    format: Format
    path: Path
    entry: Entry
    schema: Schema
    rows: list[Array]
    texts: dict[int, list[str]]

    def row_strings(self, position: int) -> list[str]:
        return [self.texts[position][code] for code in self.rows[position].tolist()]

    def position(self, name: str) -> int:
        return [column.name for column in self.schema.columns].index(name)

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]

    @property
    def data(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.files}

    def opened(self, *, is_checked: bool = True) -> AbstractContextManager[Source]:
        return self.format.opened(str(self.path), self.entry, self.schema, is_checked=is_checked)

    def load(self, *, can_map: bool = True) -> list[Any]:
        return self.format.load(str(self.path), self.entry, self.schema, can_map=can_map)

    def describe(self) -> tuple[Entry, Schema, list[int] | None]:
        return self.format.describe(str(self.path), self.path.name)


def write(format_: Format, path: Path, fields: dict[str, Any], **known: Any) -> Written:
    """``fields`` written to ``path`` as the writer does it."""
    payload = measure(fields)
    rows, texts = rows_and_texts(payload)
    entry = Entry(UUID, 7, payload.shape, 80, "weights é", 1700000000.25, file=path.name)
    entry = dataclasses.replace(entry, **known)
    entry = format_.write(str(path), entry, payload.schema, rows, texts)
    return Written(format_, path, entry, payload.schema, rows, texts)


def every_kind() -> dict[str, Any]:
    """Every dtype in small and in large columns; text, left-out rows and columns without bytes."""
    fields = every_dtype()
    for i, dtype in enumerate(DTYPES):
        fields[dtype]["large"] = random_bits(dtype, (4, 3, 75, 73), i + 300)
    return fields


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.fixture(params=FORMATS)
def format_(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def written(format_: Format, tmp_path: Path) -> Written:
    return write(format_, tmp_path / f"a{format_.EXTENSION}", every_kind())


@pytest.fixture
def small(format_: Format, tmp_path: Path) -> Written:
    return write(format_, tmp_path / f"a{format_.EXTENSION}", trajectory(3))


# -- what was written comes back -----------------------------------------------------------------


@pytest.mark.parametrize("can_map", [True, False], ids=["mapped", "read"])
def test_load_gives_every_column_bit_for_bit(written: Written, can_map: bool) -> None:
    leaves = written.load(can_map=can_map)
    assert len(leaves) == len(written.schema.columns)
    for i, (leaf, column) in enumerate(zip(leaves, written.schema.columns, strict=True)):
        if column.is_text:
            assert leaf == written.row_strings(i)
        else:
            assert (leaf.dtype, leaf.shape) == (column.storage, written.rows[i].shape)
            assert bits(leaf) == bits(written.rows[i]), column.name


def test_read_part_gives_every_column_bit_for_bit(written: Written) -> None:
    with written.opened(is_checked=False) as source:
        for i, column in enumerate(written.schema.columns):
            if not column.is_text:
                rows = np.empty_like(written.rows[i])
                source.read_part(i, rows)
                assert bits(rows) == bits(written.rows[i]), column.name


def test_read_part_gives_the_first_rows_where_fewer_are_asked_for(written: Written) -> None:
    with written.opened() as source:
        for i in [written.position("dones"), written.position("int16.large")]:
            rows = np.empty_like(written.rows[i][:5])
            source.read_part(i, rows)
            assert bits(rows) == bits(written.rows[i][:5])


def test_read_rows_gives_rows_in_any_order_to_any_target(written: Written) -> None:
    rows, targets = np.array([11, 0, 7, 7, 3]), np.array([4, 0, 2, 5, 1])
    leaves: list[Any] = [
        None if column.is_text else np.zeros((6, *column.row_shape), column.storage)
        for column in written.schema.columns
    ]
    with written.opened() as source:
        source.read_rows(rows, leaves, targets)
    for leaf, expected in zip(leaves, written.rows, strict=True):
        if leaf is not None:
            assert bits(leaf[targets]) == bits(expected[rows])
            assert not leaf[3].any()


def test_location_is_where_the_rows_begin(written: Written) -> None:
    if not written.format.CAN_MAP:
        pytest.skip("rows do not lie in the file as in memory")
    with written.opened() as source:
        for i, rows in enumerate(written.rows):
            fd, offset = source.location(i)
            assert offset == written.entry.parts[i].offset
            assert os.pread(fd, rows.nbytes, offset) == bits(rows)


def test_read_text_gives_codes_and_their_strings(written: Written) -> None:
    with written.opened() as source:
        for i in written.texts:
            codes, strings = source.read_text(i)
            assert (codes.dtype, codes.shape) == (np.int32, (12,))
            assert [strings[code] for code in codes.tolist()] == written.row_strings(i)


@pytest.mark.parametrize(
    "strings",
    [[""], ["", "a", ""], ["a\0", "a", "\0"], ["é" * 1000, "日本", "🥕"], ["a\nb", '"\\', "\x7f"]],
)
def test_odd_text_comes_back(format_: Format, tmp_path: Path, strings: list[str]) -> None:
    file = write(format_, tmp_path / "a", {"text": [strings], "other": [["x"] * len(strings)]})
    assert file.load() == [strings, ["x"] * len(strings)]


def test_left_out_rows_lie_behind_the_aligned_ones(format_: Format, tmp_path: Path) -> None:
    dones = torch.arange(6 * 2).reshape(6, 2)
    values = torch.arange(6 * 2).reshape(6, 2) + 100
    fields = {"rewards": torch.zeros(4, 2), "dones": dones, "prev_values": values}
    file = write(format_, tmp_path / "a", fields)
    assert [part.rows for part in file.entry.parts] == [8, 12, 12]
    leaves = file.load()
    assert leaves[1].tolist() == [2, 3, 4, 5, 8, 9, 10, 11, 0, 1, 6, 7]
    assert leaves[2].tolist() == [100, 101, 102, 103, 106, 107, 108, 109, 104, 105, 110, 111]
    whole = [interleave(*pair, 4, 2) for pair in zip(leaves, file.schema.columns, strict=True)]
    assert np.array_equal(whole[1], dones)
    assert np.array_equal(whole[2], values)


def test_columns_without_bytes_alone_come_back(format_: Format, tmp_path: Path) -> None:
    file = write(format_, tmp_path / "a", {"a": torch.zeros(4, 3, 0), "b": torch.zeros(4, 3, 2, 0)})
    assert file.describe()[:2] == (file.entry, file.schema)
    assert [leaf.shape for leaf in file.load()] == [(12, 0), (12, 2, 0)]
    with file.opened(is_checked=False) as source:
        source.read_rows(np.array([3]), [np.empty((1, 0)), np.empty((1, 2, 0))], np.array([0]))


def test_columns_whose_names_are_alike_come_back(format_: Format, tmp_path: Path) -> None:
    keys = ["a.b", "", "é/ü", "..", "A", "x" * 400, "x" * 401, "a\\", "a%2e", "trajectory"]
    fields: dict[str, Any] = {key: torch.full((1, 2), i) for i, key in enumerate(keys)}
    fields["a"] = {"b": torch.full((1, 2), 10), "": torch.full((1, 2), 11)}
    file = write(format_, tmp_path / "a", fields)
    assert file.describe()[1] == file.schema
    assert [leaf.tolist() for leaf in file.load()] == [[i, i] for i in range(12)]


# -- what a file says of itself ------------------------------------------------------------------


def test_describe_gives_back_entry_and_schema(written: Written) -> None:
    assert written.describe()[:2] == (written.entry, written.schema)


def test_what_was_written_is_whole(written: Written) -> None:
    storage.verify(str(written.path), written.entry, written.schema)


def test_describe_names_the_file_as_it_is_told(small: Written) -> None:
    entry = small.format.describe(str(small.path), "another")[0]
    assert entry == dataclasses.replace(small.entry, file="another")


def test_checksums_are_those_of_the_rows_and_then_the_text(written: Written) -> None:
    crcs = written.describe()[2]
    if crcs is None:
        pytest.skip("the format has none")
    for i, rows in enumerate(written.rows):
        text = bytes_of_text(written.texts.get(i))
        assert crcs[i] == zlib.crc32(rows.tobytes() + text), written.schema.columns[i].name


def test_the_entry_says_format_and_size(small: Written) -> None:
    assert small.entry.format == small.format.NAME
    assert small.entry.size_bytes == sum(map(len, small.data.values()))
    assert small.entry.size_bytes == files.size_of(str(small.path))


@pytest.mark.parametrize("weights", ["", "é", "a/b", "\ud800", "x" * 5000])
def test_any_weights_id_comes_back(format_: Format, tmp_path: Path, weights: str) -> None:
    file = write(format_, tmp_path / "a", trajectory(1), model_weights_id=weights)
    assert file.describe()[0] == file.entry
    assert len(file.load()) == 5


# -- memory that is the caller's -----------------------------------------------------------------


@pytest.mark.parametrize("can_map", [True, False], ids=["mapped", "read"])
def test_what_is_loaded_is_writable_and_changes_nothing_else(
    written: Written, can_map: bool
) -> None:
    before = written.data
    first, second = written.load(can_map=can_map), written.load(can_map=can_map)
    for leaf in first:
        if isinstance(leaf, np.ndarray):
            leaf.reshape(-1).view(np.uint8)[...] ^= 0xFF
    assert written.data == before
    for i, leaf in enumerate(second):
        if isinstance(leaf, np.ndarray):
            assert bits(leaf) == bits(written.rows[i])


def test_what_is_loaded_outlives_the_name_of_its_file(written: Written) -> None:
    leaves = written.load()
    files.remove(str(written.path))
    for name in ["rewards", "int64.large"]:
        position = written.position(name)
        assert bits(leaves[position]) == bits(written.rows[position])


# -- wrong files ---------------------------------------------------------------------------------


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _longer(data: bytes) -> bytes:
    return data + b"\0"


def _empty(data: bytes) -> bytes:
    return b""


def is_refused(file: Written) -> bool:
    """Whether to open and to load it are CorruptErrors that name the file or its directory."""
    with pytest.raises(CorruptError) as error:
        file.load()
    with pytest.raises(CorruptError), file.opened(is_checked=False):
        pass
    return error.value.path.startswith(str(file.path))


@pytest.mark.parametrize("change", [_cut, _longer, _empty])
def test_a_file_of_another_size_is_refused(
    small: Written, change: Callable[[bytes], bytes]
) -> None:
    for path in small.files:
        data = path.read_bytes()
        path.write_bytes(change(data))
        assert is_refused(small), path.name
        path.write_bytes(data)
    assert len(small.load()) == 5


def test_a_trajectory_of_another_uuid_is_refused(small: Written) -> None:
    path = small.path.with_name("b")
    other = write(small.format, path, trajectory(3), uuid="f" * 32)
    assert other.entry.size_bytes == small.entry.size_bytes
    files.remove(str(small.path))
    path.rename(small.path)
    assert is_refused(small)


def test_a_trajectory_of_other_columns_is_refused(small: Written) -> None:
    other = write(small.format, small.path.with_name("b"), {"a": torch.zeros(4, 3)})
    files.remove(str(small.path))
    other.path.rename(small.path)
    assert is_refused(small)


def _with_first_part(entry: Entry, **said: Any) -> tuple[Part, ...]:
    return (entry.parts[0]._replace(**said), *entry.parts[1:])


def _with_first_column(schema: Schema, **said: Any) -> Schema:
    return Schema([dataclasses.replace(schema.columns[0], **said), *schema.columns[1:]])


LIES: dict[str, Callable[[Entry, Schema], tuple[Entry, Schema]]] = {
    "fewer steps": lambda e, s: (dataclasses.replace(e, shape=(3, 3)), s),
    "more steps": lambda e, s: (dataclasses.replace(e, shape=(5, 3)), s),
    "turned": lambda e, s: (dataclasses.replace(e, shape=(3, 4)), s),
    "another width": lambda e, s: (dataclasses.replace(e, shape=(4, 3, 7)), s),
    "episodes": lambda e, s: (dataclasses.replace(e, max_episode_length=81), s),
    "weights": lambda e, s: (dataclasses.replace(e, model_weights_id="w"), s),
    "fewer parts": lambda e, s: (dataclasses.replace(e, parts=e.parts[:-1]), s),
    "more parts": lambda e, s: (dataclasses.replace(e, parts=(*e.parts, e.parts[-1])), s),
    "rows": lambda e, s: (dataclasses.replace(e, parts=_with_first_part(e, rows=13)), s),
    "offset": lambda e, s: (dataclasses.replace(e, parts=_with_first_part(e, offset=64)), s),
    "dtype": lambda e, s: (e, _with_first_column(s, dtype="int32")),
    "row shape": lambda e, s: (e, _with_first_column(s, row_shape=(1,))),
    "path": lambda e, s: (e, _with_first_column(s, path=("other",))),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_says_what_the_file_does_not_is_refused(small: Written, lie: str) -> None:
    with small.opened(is_checked=False):
        pass
    truth = small.entry, small.schema
    small.entry, small.schema = LIES[lie](small.entry, small.schema)
    for _ in range(2):
        assert is_refused(small)
    small.entry, small.schema = truth
    with small.opened(is_checked=False):
        pass


def test_another_trajectory_under_the_name_of_one_that_was_checked_is_refused(
    small: Written,
) -> None:
    path = small.path.with_name("b")
    other = write(small.format, path, trajectory(3), uuid="f" * 32)
    with small.opened(is_checked=False):
        pass
    files.remove(str(small.path))
    path.rename(small.path)
    assert other.entry.size_bytes == small.entry.size_bytes
    with pytest.raises(CorruptError, match=f"expected trajectory {UUID}"), small.opened():
        pass


def test_rows_are_those_of_the_file_that_was_opened_whatever_takes_its_name(
    written: Written,
) -> None:
    path = written.path.with_name("b")
    write(written.format, path, every_kind(), uuid="f" * 32)
    large = written.position("float32.large")
    with written.opened(is_checked=False) as source:
        before = np.empty_like(written.rows[0])
        source.read_part(0, before)
        written.path.rename(written.path.with_name("c"))
        path.rename(written.path)
        rows = np.empty_like(written.rows[large])
        source.read_part(large, rows)
        assert bits(rows) == bits(written.rows[large])


def test_a_trajectory_that_is_removed_while_it_is_read_is_missing_or_whole(
    written: Written,
) -> None:
    large = written.position("float32.large")
    rows = np.empty_like(written.rows[large])
    with written.opened(is_checked=False) as source:
        files.remove(str(written.path))
        write(written.format, written.path, every_kind(), uuid="f" * 32)
        if written.format is arrow:
            source.read_part(large, rows)
            assert bits(rows) == bits(written.rows[large])
        else:
            with pytest.raises(FileNotFoundError) as error:
                source.read_part(large, rows)
            assert str(error.value.filename).startswith(str(written.path))


def test_a_part_of_fewer_rows_than_the_trajectory_is_refused(small: Written) -> None:
    small.entry = dataclasses.replace(small.entry, shape=(100, 3))
    assert is_refused(small)


def test_a_missing_trajectory_is_missing_and_not_corrupt(small: Written) -> None:
    files.remove(str(small.path))
    with pytest.raises(FileNotFoundError):
        small.load()
    with pytest.raises(FileNotFoundError):
        small.describe()
    with pytest.raises(FileNotFoundError), small.opened(is_checked=False):
        pass
    with pytest.raises(FileNotFoundError) as error, small.opened(is_checked=True) as source:
        source.read_part(0, np.empty(12, np.float32))
    assert str(error.value.filename).startswith(str(small.path))


def test_a_missing_file_of_a_directory_is_corrupt_and_named(small: Written) -> None:
    if not small.path.is_dir():
        pytest.skip("the trajectory is one file")
    for path in small.files:
        hidden = path.rename(small.path.with_name("hidden"))
        with pytest.raises(CorruptError) as error:
            small.load()
        assert error.value.path == str(path)
        with pytest.raises(CorruptError) as error:
            small.describe()
        assert error.value.path == str(path)
        hidden.rename(path)
    assert len(small.load()) == 5


def test_a_directory_for_a_file_and_a_file_for_a_directory_are_refused(small: Written) -> None:
    if small.path.is_dir():
        shutil.rmtree(small.path)
        small.path.write_bytes(b"x" * small.entry.size_bytes)
        assert is_refused(small)
        with pytest.raises(CorruptError):
            small.describe()
    else:
        small.path.unlink()
        small.path.mkdir()
        with pytest.raises((CorruptError, IsADirectoryError)):
            small.load()


def test_a_file_that_was_cut_since_it_was_checked_is_corrupt(written: Written) -> None:
    with written.opened(is_checked=False):
        pass
    for path in written.files:
        os.truncate(path, 10)
    position = written.position("float32.large")
    with pytest.raises(CorruptError), written.opened() as source:
        source.read_part(position, np.empty_like(written.rows[position]))
    with pytest.raises(CorruptError), written.opened() as source:
        source.read_rows(np.array([11]), _leaves(written, 1), np.array([0]))
    with pytest.raises(CorruptError), written.opened() as source:
        source.read_text(written.position("text"))


def _leaves(file: Written, num_rows: int) -> list[Any]:
    return [np.empty((num_rows, *c.row_shape), c.storage) for c in file.schema.columns]


# -- writing that fails --------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["first", "last"])
@pytest.mark.parametrize("function", ["write_at", "allocate"])
def test_a_full_disk_leaves_nothing(
    format_: Format,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    when: str,
) -> None:
    real: Callable[..., None] = getattr(files, function)
    calls = []

    def count(*arguments: Any) -> None:
        calls.append(arguments)
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, function, count)
        write(format_, tmp_path / "whole", every_kind())
    fatal = 1 if when == "first" else len(calls)
    calls.clear()

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == fatal:
            raise NO_SPACE
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, function, fail)
        with pytest.raises(OSError, match=NO_SPACE.strerror):
            write(format_, tmp_path / "failed", every_kind())
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_what_is_there_already_is_neither_taken_nor_removed(small: Written) -> None:
    before = contents_of(small.path.parent)
    with pytest.raises(FileExistsError):
        write(small.format, small.path, trajectory(4))
    assert contents_of(small.path.parent) == before


# -- descriptors ---------------------------------------------------------------------------------


def test_a_source_holds_at_most_two_descriptors_and_leaves_none_open(written: Written) -> None:
    before = num_descriptors()
    with written.opened(is_checked=False) as source:
        for i, column in enumerate(written.schema.columns):
            if column.is_text:
                source.read_text(i)
            else:
                source.read_part(i, np.empty_like(written.rows[i]))
            if written.format.CAN_MAP:
                source.location(i)
            assert num_descriptors() - before <= 2
        source.read_rows(np.array([0]), _leaves(written, 1), np.array([0]))
        assert num_descriptors() - before <= 2
    assert num_descriptors() == before


def test_neither_success_nor_failure_leaves_a_descriptor_open(small: Written) -> None:
    before = num_descriptors()
    leaves = small.load()
    small.describe()
    assert num_descriptors() == before
    for path in small.files:
        path.write_bytes(b"")
    assert is_refused(small)
    with pytest.raises(CorruptError):
        small.describe()
    assert num_descriptors() == before
    assert len(leaves) == 5


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("added_at", (float("nan"), float("inf"), 1e308, -1, "5", True, None)),
        ("trajectory_id", (True, 7.0, "7", None, -1, 1 << 62)),
        ("max_episode_length", (True, 80.0, "80", None, -1, 1 << 62)),
        ("model_weights_id", (True, 7, None, ["a"])),
        ("shape", ("43", [4.0, 3], [True, 3], [2, 3], [4, 2], [1 << 40, 1])),
        ("version", (True, 1.0, "1", None, 0)),
        ("rows", (True, 12.0, "12", None, 11, 24)),
    ],
)
def test_a_header_of_other_values_than_are_written_is_corrupt(
    format_: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, values: Any
) -> None:
    honest = native.to_json
    for number, value in enumerate(values):

        def to_json(*arguments: Any, value: Any = value) -> dict[str, Any]:
            header = honest(*arguments)
            (header["columns"][0] if key == "rows" else header)[key] = value
            return header

        monkeypatch.setattr(native, "to_json", to_json)
        file = write(format_, tmp_path / f"{number}{format_.EXTENSION}", trajectory(3))
        for look in (file.describe, lambda file=file: verify(file)):
            with pytest.raises(CorruptError) as error:
                look()
            assert error.value.path.startswith(str(file.path))


def verify(file: Written) -> None:
    file.format.verify(str(file.path), file.entry, file.schema)
