"""Arrow files: what is written is what mmbuf and other people's tools read, or is refused.

The golden files hold every dtype and all kinds of left-out steps; ``python tests/test_arrow.py``
writes them anew after a wanted change of the format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from data import (
    DTYPES,
    bits,
    bytes_of_text,
    every_dtype,
    random_bits,
    rows_and_texts,
    trajectory,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbuf.entry import Entry
from mmbuf.errors import CorruptError, VersionError
from mmbuf.formats import arrow
from mmbuf.schema import Array, Schema, interleave, measure

GOLDEN = Path(__file__).parent / "golden"
UUID = "0123456789abcdef0123456789abcdef"
KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass
class Written:
    """A file, and all that was put into it."""

    path: str
    entry: Entry
    schema: Schema
    rows: list[Array]
    texts: dict[int, list[str]]

    def row_strings(self, position: int) -> list[str]:
        return [self.texts[position][code] for code in self.rows[position].tolist()]

    @property
    def data(self) -> bytes:
        return Path(self.path).read_bytes()


def write(path: Path | str, fields: dict[str, Any], **known: Any) -> Written:
    """``fields`` written to ``path`` as the writer does it."""
    payload = measure(fields, is_stored=True)  # the golden file has two numbers of epochs
    rows, texts = rows_and_texts(payload)
    entry = Entry(UUID, 7, payload.shape, 80, "weights é", 1700000000.25)
    entry = dataclasses.replace(entry, file=Path(path).name, **known)
    entry = arrow.write(str(path), entry, payload.schema, rows, texts)
    return Written(str(path), entry, payload.schema, rows, texts)


def opened(
    file: Written, entry: Entry | None = None, *, is_checked: bool = True
) -> AbstractContextManager[arrow.Source]:
    return arrow.opened(file.path, entry or file.entry, file.schema, is_checked=is_checked)


def golden_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {dtype: random_bits(dtype, (2, 2, 2), 5) for dtype in DTYPES}
    return {
        "rewards": random_bits("float32", (2, 2), 6),
        "dones": random_bits("bool", (3, 2), 7),
        "prev_values": random_bits("float16", (4, 2, 1), 8),
        "dtypes": fields,
        "a.b\\c/d": random_bits("int64", (2, 2), 9),
        "text": [["put the carrot", "é"], ["", "é"]],
        "none": torch.zeros(2, 2, 0),
    }


def golden_rollout() -> dict[str, Any]:
    """Of a file of version 2: columns of all kinds have left-out steps."""
    return {
        "actions": random_bits("float32", (3, 2, 2), 1),
        "rewards": random_bits("float32", (2, 2), 2),
        "dones": random_bits("bool", (3, 2), 3),
        "forward_inputs": {
            "tokens": random_bits("bfloat16", (3, 2, 4), 4),
            "text": [["put the carrot", "é"], ["", "é"], ["a", "b"]],
        },
    }


GOLDENS = {"trajectory.arrow": golden_fields, "rollout.arrow": golden_rollout}
by_golden = pytest.mark.parametrize("name", GOLDENS)


def write_golden(path: Path) -> Written:
    return write(path, GOLDENS[path.name](), model_weights_id="weights 7")


def read_table(path: str) -> pa.Table:
    with pa.OSFile(path) as source, pa.ipc.open_file(source) as reader:
        assert reader.num_record_batches == 1
        return reader.read_all()


def value_bytes(column: pa.ChunkedArray) -> bytes:
    """The values of an Arrow column, one after the other."""
    array = pa.concat_arrays(column.chunks)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type):
        array = array.flatten()
    return bits(array.to_numpy(zero_copy_only=False))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write(tmp_path / "a.arrow", every_dtype())


@pytest.fixture
def small(tmp_path: Path) -> Written:
    return write(tmp_path / "a.arrow", trajectory(3))


# -- other people's tools -----------------------------------------------------------------------


def test_pyarrow_reads_every_dtype_as_the_table_says(written: Written) -> None:
    table = read_table(written.path)
    types = {field.name: field.type for field in table.schema}
    for dtype in DTYPES:
        expected = {
            "bool": pa.uint8(),
            "bfloat16": pa.uint16(),
            "complex64": pa.float32(),
            "complex128": pa.float64(),
        }.get(dtype)
        if expected is None:
            is_float8 = dtype.startswith("float8")
            expected = pa.uint8() if is_float8 else pa.from_numpy_dtype(np.dtype(dtype))
        is_complex = dtype.startswith("complex")
        pair = (2,) if is_complex else ()
        shapes = {"scalar": (), "one": (1,), "tensor": (2, 3)}
        for name, shape in shapes.items():
            whole = (*shape, *pair)
            is_primitive = name != "tensor" and not is_complex
            tensor = expected if is_primitive else pa.fixed_shape_tensor(expected, whole)
            assert types[f"{dtype}.{name}"] == tensor, name
        assert f"{dtype}.none" not in types
    assert types["text"] == pa.dictionary(pa.int32(), pa.utf8())
    assert "none" not in types
    assert not any(field.nullable for field in table.schema)


def test_pyarrow_reads_the_same_values(written: Written) -> None:
    table = read_table(written.path)
    table.validate(full=True)
    assert table.num_rows == 12
    named = [column for column in written.schema.columns if column.row_bytes]
    assert table.column_names == [column.name for column in named]
    for i, column in enumerate(written.schema.columns):
        if column.is_text:
            assert table[column.name].to_pylist() == written.row_strings(i)
        elif column.row_bytes:
            assert value_bytes(table[column.name]) == bits(written.rows[i][:12]), column.name
            assert table[column.name].null_count == 0


def test_pyarrow_reads_a_mapped_file_without_a_copy(written: Written) -> None:
    before = pa.total_allocated_bytes()
    with pa.memory_map(written.path) as source, pa.ipc.open_file(source) as reader:
        table = reader.read_all()
        assert value_bytes(table["int32.tensor"]) == bits(
            written.rows[_position(written, "int32.tensor")]
        )
        assert pa.total_allocated_bytes() == before
        del table


def _position(written: Written, name: str) -> int:
    return [column.name for column in written.schema.columns].index(name)


@pytest.mark.parametrize("way", ["mapped file", "bytes", "scan"])
def test_polars_reads_the_same_values(written: Written, way: str) -> None:
    pl = pytest.importorskip("polars")
    frame = {
        "mapped file": lambda: pl.read_ipc(written.path),
        "bytes": lambda: pl.read_ipc(written.data),
        "scan": lambda: pl.scan_ipc(written.path).collect(),
    }[way]()
    assert frame.height == 12
    table = frame.to_arrow()
    for i, column in enumerate(written.schema.columns):
        if column.is_text:
            assert frame[column.name].cast(pl.String).to_list() == written.row_strings(i)
        elif column.row_bytes:
            assert value_bytes(table[column.name]) == bits(written.rows[i][:12]), column.name


def test_pandas_reads_the_same_values(written: Written) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.read_feather(written.path)
    assert len(frame) == 12
    for i, column in enumerate(written.schema.columns):
        if column.is_text:
            assert frame[column.name].tolist() == written.row_strings(i)
        elif column.row_bytes:
            values = frame[column.name].to_numpy()
            if values.dtype == object:
                values = np.stack(values.tolist())
            assert bits(values) == bits(written.rows[i][:12]), column.name


def test_duckdb_reads_the_same_values_but_float16(written: Written) -> None:
    duckdb = pytest.importorskip("duckdb")
    names = [
        field.name
        for field in read_table(written.path).schema
        if not field.name.startswith("float16")
    ]
    table = read_table(written.path).select(names)
    with duckdb.connect() as connection:
        connection.register("trajectory", table)
        back = connection.sql("select * from trajectory").to_arrow_table()
        count = connection.sql(
            """select count(*) from trajectory where text = 'a' and "bool.scalar" = 1"""
        ).fetchall()
    flags = written.rows[_position(written, "bool.scalar")].tolist()
    strings = written.row_strings(_position(written, "text"))
    assert count == [(sum(f and s == "a" for f, s in zip(flags, strings, strict=True)),)]
    assert back.column_names == names
    for name in names:
        position = _position(written, name)
        if written.schema.columns[position].is_text:
            assert back[name].to_pylist() == written.row_strings(position)
        else:
            assert value_bytes(back[name]) == bits(written.rows[position][:12]), name


def test_columns_of_odd_keys_have_names_that_tools_can_tell_apart(tmp_path: Path) -> None:
    one = torch.ones(1, 1)
    fields = {"a": {"b": one, "": one}, "a.b": one, "a\\": {"b": one}, "": one, "é/ü": one}
    odd = write(tmp_path / "a.arrow", fields)
    names = ["a.b", "a.", "a\\.b", "a\\\\.b", "", "é/ü"]
    assert read_table(odd.path).column_names == names
    assert arrow.describe(odd.path, "a.arrow")[1] == odd.schema


# -- the layout ----------------------------------------------------------------------------------


def test_parts_are_aligned_by_their_size(tmp_path: Path) -> None:
    def columns(n: int) -> dict[str, Any]:
        shapes = {"scalar": (), "wide": (127,), "huge": (128,)}
        rows = {k: torch.zeros(n, 1, *s, dtype=torch.uint8) for k, s in shapes.items()}
        return {"first": torch.zeros(n, 1, dtype=torch.bool), **rows}

    below = write(tmp_path / "below.arrow", columns(16 * KIB - 1))
    exact = write(tmp_path / "exact.arrow", columns(16 * KIB))
    offsets = [part.offset for part in below.entry.parts]
    assert [offset % 64 for offset in offsets] == [0] * 4
    assert offsets[0] < 16 * KIB
    assert offsets[1] == offsets[0] + 16 * KIB
    assert [offset % (16 * KIB) for offset in offsets[2:]] == [0, 0]
    assert offsets[3] < 4 * MIB - 128
    offsets = [part.offset for part in exact.entry.parts]
    assert offsets[:3] == [16 * KIB, 32 * KIB, 48 * KIB]
    assert offsets[3] == 4 * MIB


def test_holes_between_columns_are_sparse(tmp_path: Path) -> None:
    fields = {
        "a": torch.ones(16, 64),
        "b": torch.ones(16, 64, 520),
        "c": torch.ones(16, 64),
        "d": torch.ones(16, 64, 520),
    }
    sparse = write(tmp_path / "a.arrow", fields)
    data_bytes = sum(rows.nbytes for rows in sparse.rows)
    assert sparse.entry.size_bytes > 6 * MIB
    assert os.stat(sparse.path).st_size == sparse.entry.size_bytes
    assert os.stat(sparse.path).st_blocks * 512 < data_bytes + 256 * KIB


shapes = st.lists(
    st.sampled_from([(), (1,), (3,), (0,), (2, 0), (40,), (700,)]), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 30), st.integers(1, 4))
def test_parts_lie_one_after_the_other_between_head_and_tail(
    tmp_path_factory: pytest.TempPathFactory,
    row_shapes: list[tuple[int, ...]],
    num_steps: int,
    num_envs: int,
) -> None:
    fields: dict[str, Any] = {
        f"column {i}": random_bits("float32", (num_steps, num_envs, *shape), i)
        for i, shape in enumerate(row_shapes)
    }
    file = write(tmp_path_factory.mktemp("parts") / "a.arrow", fields)
    data = file.data
    (footer_bytes,) = struct.unpack_from("<i", data, len(data) - 10)
    stop = len(data) - 10 - footer_bytes
    end = 8
    for part, rows in zip(file.entry.parts, file.rows, strict=True):
        if rows.nbytes:
            assert part.offset % (16 * KIB if rows.nbytes >= 16 * KIB else 64) == 0
            assert end <= part.offset
            end = part.offset + rows.nbytes
            assert data[part.offset : end] == rows.tobytes()
    assert end <= stop
    assert len(data) == file.entry.size_bytes
    read_table(file.path).validate(full=True)
    assert arrow.describe(file.path, "a.arrow")[:2] == (file.entry, file.schema)


def test_a_last_column_without_bytes_leaves_the_others_whole(tmp_path: Path) -> None:
    fields = {"a": torch.arange(4000.0).reshape(10, 400), "none": torch.zeros(10, 400, 0)}
    file = write(tmp_path / "a.arrow", fields)
    assert len(file.data) == file.entry.size_bytes
    leaf = arrow.load(file.path, file.entry, file.schema, can_map=True)[0]
    assert np.array_equal(leaf, file.rows[0])
    read_table(file.path).validate(full=True)


def test_columns_without_bytes_alone_come_back(tmp_path: Path) -> None:
    file = write(tmp_path / "a.arrow", {"a": torch.zeros(4, 3, 0), "b": torch.zeros(4, 3, 2, 0)})
    assert read_table(file.path).num_rows == 12
    assert read_table(file.path).column_names == []
    entry, schema, crcs = arrow.describe(file.path, "a.arrow")
    assert (entry, schema, crcs) == (file.entry, file.schema, [0, 0])
    leaves = arrow.load(file.path, entry, schema, can_map=True)
    assert [leaf.shape for leaf in leaves] == [(12, 0), (12, 2, 0)]  # type: ignore[union-attr]


def test_a_single_row_comes_back(tmp_path: Path) -> None:
    fields = {"a": torch.tensor([[7]]), "text": [["x"]], "image": torch.ones(1, 1, 200, 200)}
    file = write(tmp_path / "a.arrow", fields)
    table = read_table(file.path)
    assert (table.num_rows, table["a"].to_pylist(), table["text"].to_pylist()) == (1, [7], ["x"])
    leaves = arrow.load(file.path, file.entry, file.schema, can_map=True)
    assert leaves[0].tolist() == [7]  # type: ignore[union-attr]
    assert leaves[1] == ["x"]
    assert np.array_equal(leaves[2], np.ones((1, 200, 200)))
    assert file.entry.parts[2].offset % (16 * KIB) == 0


def test_a_trajectory_of_thousands_of_columns_comes_back(tmp_path: Path) -> None:
    fields = {f"column {i}": torch.full((1, 1), i) for i in range(3000)}
    file = write(tmp_path / "a.arrow", fields)
    assert arrow.describe(file.path, "a.arrow")[:2] == (file.entry, file.schema)
    leaves = arrow.load(file.path, file.entry, file.schema, can_map=True)
    assert [int(leaf[0]) for leaf in leaves] == list(range(3000))


# -- left-out rows -------------------------------------------------------------------------------


def test_arrow_tools_see_the_aligned_rows_and_mmbuf_the_left_out_ones_too(tmp_path: Path) -> None:
    dones = torch.arange(6 * 2).reshape(6, 2)
    values = torch.arange(6 * 2).reshape(6, 2) + 100
    fields = {"rewards": torch.zeros(4, 2), "dones": dones, "prev_values": values}
    file = write(tmp_path / "a.arrow", fields)
    assert [part.rows for part in file.entry.parts] == [8, 12, 12]
    table = read_table(file.path)
    assert table["dones"].to_pylist() == [2, 3, 4, 5, 8, 9, 10, 11]
    assert table["prev_values"].to_pylist() == [100, 101, 102, 103, 106, 107, 108, 109]
    entry = arrow.describe(file.path, "a.arrow")[0]
    leaves = arrow.load(file.path, entry, file.schema, can_map=True)
    whole = [
        interleave(leaf, column, 4, 2)  # type: ignore[arg-type]
        for leaf, column in zip(leaves, file.schema.columns, strict=True)
    ]
    assert np.array_equal(whole[1], dones)
    assert np.array_equal(whole[2], values)


# -- what a file says of itself ------------------------------------------------------------------


def test_describe_gives_back_entry_schema_and_checksums(written: Written) -> None:
    entry, schema, crcs = arrow.describe(written.path, "a.arrow")
    assert entry == written.entry
    assert schema == written.schema
    for i, rows in enumerate(written.rows):
        text = bytes_of_text(written.texts.get(i))
        assert crcs[i] == zlib.crc32(rows.tobytes() + text), schema.columns[i].name


def test_describe_names_the_file_as_it_is_told(small: Written) -> None:
    entry = arrow.describe(small.path, "another.arrow")[0]
    assert entry == dataclasses.replace(small.entry, file="another.arrow")


def test_checksums_see_a_change_of_one_bit(small: Written) -> None:
    crc = arrow.describe(small.path, "a.arrow")[2][0]
    data = bytearray(small.data)
    part = small.entry.parts[0]
    data[part.offset + 5] ^= 1
    changed = data[part.offset : part.offset + small.rows[0].nbytes]
    assert zlib.crc32(changed) != crc


def test_the_header_is_json_that_people_can_read(small: Written) -> None:
    header = json.loads(read_table(small.path).schema.metadata[b"mmbuf"])
    columns = header.pop("columns")
    assert header == {
        "version": 1,
        "uuid": UUID,
        "trajectory_id": 7,
        "num_steps": 4,
        "num_envs": 3,
        "shape": [4, 3],
        "max_episode_length": 80,
        "model_weights_id": "weights é",
        "added_at": 1700000000.25,
    }
    assert [column["path"] for column in columns] == [
        *(["rewards"], ["actions"], ["dones"], ["curr_obs", "states"], ["curr_obs", "task"])
    ]
    assert columns[2] == {
        "path": ["dones"],
        "dtype": "bool",
        "row_shape": [],
        "rows": 15,
        "crc32": f"{zlib.crc32(small.rows[2].tobytes()):08x}",
    }


@pytest.mark.parametrize("weights", ["", "é", "a/b", "\ud800", "x" * 5000])
def test_any_weights_id_comes_back(tmp_path: Path, weights: str) -> None:
    file = write(tmp_path / "a.arrow", trajectory(1), model_weights_id=weights)
    assert arrow.describe(file.path, "a.arrow")[0] == file.entry
    assert len(arrow.load(file.path, file.entry, file.schema, can_map=True)) == 5


# -- reading rows ----------------------------------------------------------------------------------


def test_mapped_columns_hold_what_was_written(written: Written) -> None:
    leaves = arrow.load(written.path, written.entry, written.schema, can_map=True)
    for i, (leaf, column) in enumerate(zip(leaves, written.schema.columns, strict=True)):
        if column.is_text:
            assert leaf == written.row_strings(i)
        else:
            assert isinstance(leaf, np.ndarray)
            assert (leaf.dtype, leaf.shape) == (column.storage, written.rows[i].shape)
            assert bits(leaf) == bits(written.rows[i]), column.name


def test_writing_to_mapped_columns_never_changes_the_file(small: Written) -> None:
    before = small.data
    first = arrow.load(small.path, small.entry, small.schema, can_map=True)
    second = arrow.load(small.path, small.entry, small.schema, can_map=True)
    for leaf in first:
        if isinstance(leaf, np.ndarray):
            leaf[...] = 1
    assert small.data == before
    assert bits(second[0]) == bits(small.rows[0])
    assert bits(first[0]) != bits(small.rows[0])


def _num_maps(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_the_mapping_dies_with_its_last_array(small: Written) -> None:
    leaves = arrow.load(small.path, small.entry, small.schema, can_map=True)
    assert _num_maps(small.path) == 1
    last = leaves[3][2:, 1]  # type: ignore[call-overload]
    expected = small.rows[3][2:, 1]
    del leaves
    gc.collect()
    assert _num_maps(small.path) == 1
    assert np.array_equal(last, expected)
    del last
    gc.collect()
    assert _num_maps(small.path) == 0


def test_mapped_columns_outlive_the_name_of_their_file(small: Written) -> None:
    leaves = arrow.load(small.path, small.entry, small.schema, can_map=True)
    os.unlink(small.path)
    assert bits(leaves[3]) == bits(small.rows[3])


@pytest.mark.parametrize("image", [(2,), (4000,)], ids=["read whole", "row by row"])
def test_rows_are_read_in_any_order_to_any_target(tmp_path: Path, image: tuple[int, ...]) -> None:
    file = write(tmp_path / "a.arrow", {"image": random_bits("int16", (5, 4, *image))})
    rows = np.array([19, 0, 7, 7, 3])
    targets = np.array([4, 0, 2, 5, 1])
    leaf = np.full((6, *image), 77, np.int16)
    with opened(file) as source:
        source.read_rows(rows, [leaf], targets)
    assert np.array_equal(leaf[targets], file.rows[0][rows])
    assert (leaf[3] == 77).all()


@pytest.mark.parametrize("strings", [[""], ["", "a", ""], ["é" * 1000, "日本", "\0"], ["a"] * 3])
def test_a_text_table_comes_back(tmp_path: Path, strings: list[str]) -> None:
    file = write(tmp_path / "a.arrow", {"text": [strings], "other": [["x"] * len(strings)]})
    with opened(file) as source:
        assert source.read_text(0)[1] == file.texts[0]
        assert source.read_text(1)[1] == ["x"]
    assert arrow.load(file.path, file.entry, file.schema, can_map=True)[0] == strings


@pytest.mark.parametrize("field", ["num_strings", "offsets_at", "bytes_at"])
def test_a_text_table_beyond_its_file_is_corrupt(small: Written, field: str) -> None:
    table = small.entry.parts[4].table
    assert table is not None
    beyond = table._replace(**{field: small.entry.size_bytes * 2})
    parts = (*small.entry.parts[:4], small.entry.parts[4]._replace(table=beyond))
    entry = dataclasses.replace(small.entry, parts=(*parts, *small.entry.parts[5:]))
    with opened(small, entry) as source, pytest.raises(CorruptError) as error:
        source.read_text(4)
    assert error.value.path == small.path


def test_text_that_is_not_utf8_is_corrupt(small: Written) -> None:
    table = small.entry.parts[4].table
    assert table is not None
    data = bytearray(small.data)
    data[table.bytes_at] = 0xFF
    Path(small.path).write_bytes(data)
    with pytest.raises(CorruptError, match="expected UTF-8 text") as error:
        arrow.load(small.path, small.entry, small.schema, can_map=True)
    assert (error.value.path, error.value.offset) == (small.path, table.bytes_at)


def test_text_codes_beyond_the_table_are_corrupt(small: Written) -> None:
    data = bytearray(small.data)
    struct.pack_into("<i", data, small.entry.parts[4].offset, 99)
    Path(small.path).write_bytes(data)
    with pytest.raises(CorruptError):
        arrow.load(small.path, small.entry, small.schema, can_map=True)


def test_a_part_that_the_file_ends_before_is_corrupt(small: Written) -> None:
    part = small.entry.parts[0]._replace(offset=small.entry.size_bytes - 8)
    entry = dataclasses.replace(small.entry, parts=(part, *small.entry.parts[1:]))
    with opened(small, entry) as source, pytest.raises(CorruptError) as error:
        source.read_part(0, np.empty(12, np.float32))
    assert error.value.path == small.path
    assert error.value.offset == small.entry.size_bytes - 8


# -- wrong files -----------------------------------------------------------------------------------


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _longer(data: bytes) -> bytes:
    return data + b"\0"


def _other_magic(data: bytes) -> bytes:
    return b"PARQUET"[:6] + data[6:]


def _other_uuid(data: bytes) -> bytes:
    return data.replace(UUID.encode(), b"f" * 32)


def _empty(data: bytes) -> bytes:
    return data[:0]


@pytest.mark.parametrize("change", [_cut, _longer, _other_magic, _other_uuid, _empty])
def test_another_file_under_the_name_is_refused(
    small: Written, change: Callable[[bytes], bytes]
) -> None:
    Path(small.path).write_bytes(change(small.data))
    with pytest.raises(CorruptError) as error:
        arrow.load(small.path, small.entry, small.schema, can_map=True)
    assert error.value.path == small.path
    with pytest.raises(CorruptError), opened(small, is_checked=False):
        pass


def test_the_file_of_an_entry_passes(small: Written) -> None:
    with opened(small, is_checked=False):
        pass


@pytest.mark.parametrize("offset", [-64, 1 << 20, 1 << 62])
def test_a_part_outside_of_the_file_is_refused_before_it_is_mapped(
    small: Written, offset: int
) -> None:
    parts = (small.entry.parts[0]._replace(offset=offset), *small.entry.parts[1:])
    entry = dataclasses.replace(small.entry, parts=parts)
    with pytest.raises(CorruptError), opened(small, entry, is_checked=False):
        pass


def test_a_file_is_refused_also_behind_one_like_it_that_holds(small: Written) -> None:
    first, second, *others = small.entry.parts
    wider = [dataclasses.replace(small.schema.columns[0], row_shape=(1 << 20,))]
    beyond = first._replace(offset=small.entry.size_bytes)
    wrong = [
        (dataclasses.replace(small.entry, shape=(5, 3)), small.schema, "shape: expected"),
        (
            dataclasses.replace(small.entry, parts=(beyond, second, *others)),
            small.schema,
            "expected it at",
        ),
        (
            dataclasses.replace(small.entry, parts=(second, first, *others)),
            small.schema,
            "expected it at",
        ),
        (small.entry, Schema([*wider, *small.schema.columns[1:]]), "expected 12 .* got 12"),
    ]
    for entry, schema, what in wrong:
        with opened(small, is_checked=False):
            pass
        for _ in range(2):
            with (
                pytest.raises(CorruptError, match=what),
                arrow.opened(small.path, entry, schema, is_checked=False),
            ):
                pass


@pytest.mark.parametrize("count", [1, 40, 300])
def test_a_head_of_any_length_is_compared(tmp_path: Path, count: int) -> None:
    fields: dict[str, Any] = {f"column {i}": torch.full((4, 3, 2), i) for i in range(count)}
    file = write(tmp_path / "a.arrow", {**fields, "task": [["x" * 9000, "y", "z"]] * 4})
    with opened(file, is_checked=False):
        pass
    *others, last = file.entry.parts
    assert last.table is not None
    moved = last._replace(table=last.table._replace(bytes_at=last.table.bytes_at + 1))
    entry = dataclasses.replace(file.entry, parts=(*others, moved))
    with pytest.raises(CorruptError, match="'task': expected it at"):
        opened(file, entry, is_checked=False).__enter__()


def _with_header(file: Written, old: str, new: str) -> None:
    data = file.data
    assert data.count(old.encode()) == 2
    assert len(old) == len(new)
    Path(file.path).write_bytes(data.replace(old.encode(), new.encode()))


def test_a_file_of_a_newer_version_is_refused_by_name(small: Written) -> None:
    _with_header(small, '"version": 1,', '"version": 3,')
    with pytest.raises(VersionError, match=r"a\.arrow: expected file version 2 or older, got 3"):
        arrow.describe(small.path, "a.arrow")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1,', '"versiom": 1,'),
        ('"version": 1,', '"version": [,'),
        ('"version": 1, "uuid": "0123', '"version": 1e999, "uuid":"3'),
        ('"uuid"', '"uuim"'),
        ('"trajectory_id": 7', '"trajectory_id": x'),
        ('"max_episode_length": 80', '"max_episode_length": {}'),
        ('"added_at": 1700000000.25', '"added_at": null         '),
        ('"shape": [4, 3]', '"shape": [4   ]'),
        ('"shape": [4, 3]', '"shape": [4,-3]'),
        ('"shape": [4, 3]', '"shape": 12    '),
        ('"dtype": "bool"', '"dtype": "boom"'),
        ('"rows": 15', '"rows": 16'),
        ('"rows": 15', '"rows": -1'),
        ('"path": ["dones"]', '"path": []       '),
        ('"path": ["dones"]', '"path": ["actions'),
        ('"path": ["actions"]', '"path": ["rewards"]'),
    ],
)
def test_a_header_that_does_not_hold_is_corrupt(small: Written, old: str, new: str) -> None:
    _with_header(small, old, new)
    with pytest.raises(CorruptError) as error:
        arrow.describe(small.path, "a.arrow")
    assert error.value.path == small.path


def test_a_header_nested_too_deep_is_corrupt(tmp_path: Path) -> None:
    file = write(tmp_path / "a.arrow", trajectory(1), model_weights_id="x" * 300_000)
    _with_header(file, f'"{"x" * 300_000}"', "[" * 300_002)
    with pytest.raises(CorruptError):
        arrow.describe(file.path, "a.arrow")


def test_an_arrow_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.arrow")
    table = pa.table({"a": [1, 2, 3]})
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptError, match="expected one that mmbuf wrote") as error:
        arrow.describe(path, "a.arrow")
    assert error.value.path == path


@pytest.mark.parametrize(
    "data", [b"", b"A", b"ARROW1", b"ARROW1\0\0ARROW1", b"\0" * 100, b"\xff" * 4 + b"ARROW1"]
)
def test_a_file_that_is_no_arrow_file_is_corrupt(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(data)
    with pytest.raises(CorruptError) as error:
        arrow.describe(str(path), "a.arrow")
    assert error.value.path == str(path)


def test_a_file_cut_anywhere_is_corrupt(small: Written) -> None:
    data = small.data
    generator = np.random.default_rng(0)
    sizes = {*range(len(data) - 200, len(data)), *generator.integers(0, len(data), 200).tolist()}
    with open(small.path, "r+b") as file:
        for size in sorted(sizes, reverse=True):
            file.truncate(size)
            with pytest.raises(CorruptError):
                arrow.describe(small.path, "a.arrow")


def head_and_tail(file: Written) -> list[int]:
    """The positions of all bytes that are not those of a column."""
    size = len(file.data)
    columns = np.zeros(size, bool)
    for part, rows in zip(file.entry.parts, file.rows, strict=True):
        columns[part.offset : part.offset + rows.nbytes] = True
    return [int(at) for at in np.flatnonzero(~columns)]


@pytest.mark.parametrize("seed", range(4))
def test_damage_to_head_or_tail_is_found_or_does_no_harm(small: Written, seed: int) -> None:
    data = small.data
    generator = np.random.default_rng(seed)
    places = head_and_tail(small)
    found = 0
    with open(small.path, "r+b", buffering=0) as file:
        for _ in range(150):
            damaged = bytearray(data)
            for at in generator.choice(places, generator.integers(1, 4)).tolist():
                damaged[at] = generator.integers(0, 256)
            file.seek(0)
            file.write(damaged)
            try:
                entry, schema, crcs = arrow.describe(small.path, "a.arrow")
            except (CorruptError, VersionError):
                found += 1
            else:
                assert len(entry.parts) == len(schema.columns) == len(crcs)
    assert 0 < found < 150


def test_every_byte_of_the_tail_set_to_255_is_found_or_does_no_harm(small: Written) -> None:
    data = small.data
    with open(small.path, "r+b", buffering=0) as file:
        for at in [at for at in head_and_tail(small) if at > len(data) // 2]:
            os.pwrite(file.fileno(), b"\xff", at)
            with contextlib.suppress(CorruptError, VersionError):
                arrow.describe(small.path, "a.arrow")
            os.pwrite(file.fileno(), data[at : at + 1], at)


# -- the golden file -------------------------------------------------------------------------------


@by_golden
def test_the_golden_file_is_written_byte_for_byte(tmp_path: Path, name: str) -> None:
    file = write_golden(tmp_path / name)
    assert file.data == (GOLDEN / name).read_bytes(), (
        "if this is wanted: python tests/test_arrow.py"
    )


@by_golden
def test_the_golden_file_is_read_bit_for_bit(name: str) -> None:
    path = str(GOLDEN / name)
    entry, schema, crcs = arrow.describe(path, name)
    assert (entry.uuid, entry.trajectory_id, entry.shape) == (UUID, 7, (2, 2))
    assert (entry.max_episode_length, entry.model_weights_id) == (80, "weights 7")
    assert entry.added_at == 1700000000.25
    payload = measure(GOLDENS[name](), is_stored=True)
    assert schema == payload.schema
    leaves = arrow.load(path, entry, schema, can_map=True)
    for i, (leaf, column) in enumerate(zip(leaves, schema.columns, strict=True)):
        if column.is_text:
            assert leaf == payload.texts(i)
        else:
            rows = np.empty((payload.rows[i], *column.row_shape), column.storage)
            payload.copy_rows(i, rows)
            assert bits(leaf) == bits(rows), column.name
            assert crcs[i] == zlib.crc32(rows.tobytes())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for golden in GOLDENS:
        (GOLDEN / golden).unlink(missing_ok=True)
        write_golden(GOLDEN / golden)
