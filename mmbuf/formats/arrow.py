"""Arrow IPC files whose columns can be mapped: one uncompressed record batch of N rows.

Byte layout, in this order::

    head      magic, schema message (its metadata key ``mmbuf`` is the header, JSON), text tables
              (dictionary batches), the record batch's message
    columns   one after the other in the order of the schema, each on a 64-byte boundary; of
              16 KiB or more on 16,384 bytes, of 2 MiB or more on 2 MiB. The holes are sparse
    tail      end-of-stream mark, footer

There are no validity bitmaps and no compression. A column's part may be longer than its N rows
(left-out steps, `schema`); Arrow allows that and its readers ignore the rest.

pyarrow's own writer aligns to 8 and offers no choice. So pyarrow writes a file of *one* row of the
same schema into memory, and the real row count, buffer offsets and lengths, body length and footer
block are stamped into its flatbuffers: all of them are fixed-width integers. Field numbers are
those of Arrow's ``Message.fbs``, ``Schema.fbs`` and ``File.fbs``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from mmbuf import files
from mmbuf.entry import Entry, Part, Table
from mmbuf.errors import BAD_JSON, CorruptError
from mmbuf.formats import native
from mmbuf.schema import Array, Column, Schema
from mmbuf.vm import HUGE_PAGE, round_up

NAME = "arrow"
EXTENSION = ".arrow"
CAN_MAP = True
IS_DIRECTORY = False

_KEY = b"mmbuf"
_MAGIC = b"ARROW1"
_ALIGNMENT = 64
_WIDE = _WIDE_ALIGNMENT = 16 << 10
_SCHEMA_AT = 8  # behind the magic and its padding
_HEAD_BYTES = 4 << 10  # of a file: enough to hold the beginning of its header
_MAX_LAYOUTS = 64  # that are known at once
_CONTINUATION = 0xFFFFFFFF  # begins a message
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # kinds of messages
_WRITE_WHOLE = 256 << 10  # one call for a small file: copying it costs less than many calls
_MAX_HOLE = 64 << 10  # larger holes between columns stay sparse

# The types that Arrow lacks, or that it would not store one value after the other.
_VALUE_TYPES = {
    "bool": pa.uint8(),
    "uint16": pa.uint16(),
    "uint8": pa.uint8(),
    "float16": pa.float16(),
    "complex64": pa.float32(),
    "complex128": pa.float64(),
}


def write(
    path: str, entry: Entry, schema: Schema, rows: list[Array], texts: dict[int, list[str]]
) -> Entry:
    """Write one trajectory into the new file ``path``; ``entry`` completed with size and parts.

    ``rows[i]`` are column i's rows ``[rows, *S]`` in its storage dtype, C-contiguous, left-out
    rows behind; of a text column the codes into ``texts[i]``. No file is left if it fails.
    """
    data = [native.bytes_of(column_rows) for column_rows in rows]
    num_rows = [len(column_rows) for column_rows in rows]
    crcs = native.crcs_of(rows, texts)
    header = json.dumps(native.to_json(entry, schema, num_rows, crcs))
    head, tail, tail_at, parts = _stamp(
        _one_row_file(schema, header, texts), schema, num_rows, entry.num_samples
    )
    pieces = [(0, memoryview(head))]
    pieces += [(part.offset, d) for part, d in zip(parts, data, strict=True) if len(d)]
    pieces += [(tail_at, memoryview(tail))]
    size = tail_at + len(tail)
    runs = _runs(pieces)
    if size <= _WRITE_WHOLE:
        whole = bytearray(size)
        for offset, piece in pieces:
            whole[offset : offset + len(piece)] = piece
        pieces = [(0, memoryview(whole))]
    with files.created(path) as fd:
        for start, stop in runs:
            files.allocate(fd, start, stop - start)
        for offset, piece in pieces:
            files.write_at(fd, piece, offset)
    return dataclasses.replace(entry, format=NAME, size_bytes=size, parts=tuple(parts))


@contextmanager
def opened(path: str, entry: Entry, schema: Schema, *, is_checked: bool) -> Iterator[Source]:
    """The file of ``entry``, open for reading; CorruptError unless it is that one.

    ``is_checked``: a file of that name was compared with the entry before, and need only be the
    same trajectory's still.
    """
    with files.opened(path) as fd:
        source = Source(fd, path, entry, schema)
        if is_checked:
            source.check_identity()
        else:
            source.check()
        yield source


def check_identity(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless the file is that of the entry's trajectory; reads its first bytes."""
    with files.opened(path) as fd:
        Source(fd, path, entry, schema).check_identity()


class Source:
    """One file, open for reading. Its columns can be mapped."""

    def __init__(self, fd: int, path: str, entry: Entry, schema: Schema) -> None:
        self._fd = fd
        self._path = path
        self._entry = entry
        self._schema = schema

    def check_identity(self) -> bytes:
        """CorruptError unless the file is that of the entry's trajectory; its first bytes."""
        head = files.read_at(self._fd, _HEAD_BYTES, 0)
        if not head.startswith(_MAGIC):
            what = f"expected an Arrow file, got one that begins {head[:6]!r}."
            raise CorruptError(self._path, what)
        uuid = self._entry.uuid
        if f'"uuid": "{uuid}"'.encode() not in head:
            what = f"expected trajectory {uuid} in the header, got another one's."
            raise CorruptError(self._path, what)
        return head

    def check(self) -> None:
        """CorruptError unless the file says of itself what the entry says of it.

        Then all its parts lie inside the file, so that none of it can be read beyond the end.
        """
        path, entry = self._path, self._entry
        size = files.length(self._fd)
        if size != entry.size_bytes:
            raise CorruptError(path, f"expected {entry.size_bytes} bytes, got {size}.")
        head = _Head(self._fd, self.check_identity(), size)
        try:
            native.check_header(path, entry, self._schema, native.parse(path, head.header()))
            parts = head.parts(self._schema, tuple(part.rows for part in entry.parts))
        except (*BAD_JSON, RuntimeError, struct.error) as error:
            raise CorruptError(path, f"the header does not hold: {error!r}.") from error
        for column, part, found in zip(self._schema.columns, entry.parts, parts, strict=True):
            if part != found:
                what = f"column {column.name!r}: expected it at {part}, got {found}."
                raise CorruptError(path, what)
            if part.rows < entry.num_samples or (
                column.is_text and not _is_within(part, column, entry.num_samples, size)
            ):
                what = f"column {column.name!r}: expected its part inside the file, got {part}."
                raise CorruptError(path, what)

    def location(self, position: int) -> tuple[int, int]:
        """The descriptor and byte offset at which a column's rows begin, to be mapped."""
        return self._fd, self._entry.parts[position].offset

    def read_part(self, position: int, rows: Array) -> None:
        """Read a column's first ``len(rows)`` rows (of text the codes) into C-contiguous memory."""
        if rows.nbytes:
            self._read(position, 0, native.bytes_of(rows))

    def read_text(self, position: int) -> tuple[Array, list[str]]:
        """All rows of a text column: codes ``int32 [rows]`` and the strings they point to."""
        part = self._entry.parts[position]
        assert part.table is not None
        codes = np.empty(part.rows, np.int32)
        self.read_part(position, codes)
        strings = self._read_table(part.table)
        return native.checked_codes(codes, strings, self._path, part.offset), strings

    def read_rows(self, rows: Array, leaves: Sequence[Any], targets: Array) -> None:
        """Read ``rows`` of each column that is not text into ``leaves[column][targets]``.

        The leaves are C-contiguous ``[K, *S]`` arrays in storage dtype.
        """
        native.read_rows(self._entry, self._schema, rows, leaves, targets, self._read)

    def _read(self, position: int, at: int, view: memoryview) -> None:
        offset = self._entry.parts[position].offset + at
        native.read_into(self._fd, self._path, view, offset)

    def _read_table(self, table: Table) -> list[str]:
        offsets = files.read_at(self._fd, 4 * (table.num_strings + 1), table.offsets_at)
        data = files.read_at(self._fd, table.num_bytes, table.bytes_at)
        ends = np.frombuffer(offsets[: len(offsets) // 4 * 4], "<i4")
        path = self._path
        if (
            not 0 < len(ends) == table.num_strings + 1
            or ends[0] < 0
            or (np.diff(ends) < 0).any()
            or ends[-1] > len(data)
        ):
            raise CorruptError(path, "text offsets do not fit the text.", offset=table.offsets_at)
        try:
            return [data[a:b].decode() for a, b in itertools.pairwise(ends.tolist())]
        except UnicodeDecodeError as error:
            where = table.bytes_at
            raise CorruptError(path, f"expected UTF-8 text: {error}.", offset=where) from error


def load(path: str, entry: Entry, schema: Schema, *, can_map: bool) -> list[Array | list[str]]:
    """All rows of each column, left-out ones too; text as strings.

    Writable views of one private mapping of the file, which dies with the last of them. Columns
    are only read where they are looked at. Without ``can_map`` all is read into memory.
    """
    with files.opened(path) as fd:
        source = Source(fd, path, entry, schema)
        source.check()
        if can_map:
            memory = native.private_pages(fd, path, entry.size_bytes)
        else:
            memory = np.empty(entry.size_bytes, np.uint8)
            native.read_into(fd, path, memory.data, 0)
        leaves: list[Array | list[str]] = []
        for position, (column, part) in enumerate(zip(schema.columns, entry.parts, strict=True)):
            if part.table is None:
                data = memory[part.offset : part.offset + part.rows * column.row_bytes]
                leaves.append(data.view(column.storage).reshape(part.rows, *column.row_shape))
            else:
                codes, strings = source.read_text(position)
                leaves.append([strings[code] for code in codes.tolist()])
    return leaves


def describe(path: str, name: str) -> tuple[Entry, Schema, list[int]]:
    """What a file says of itself: entry (``file=name``), schema and the CRC-32 of each column.

    Reads the file's head and footer only.
    """
    with files.opened(path) as fd:
        size = files.length(fd)
        end = files.read_at(fd, 10, size - 10) if size >= 10 else b""
        if end[4:] != _MAGIC:
            raise CorruptError(path, "expected an Arrow file, got one that ends otherwise.")
        (footer_bytes,) = struct.unpack_from("<i", end)
        if not 0 < footer_bytes <= size - 10:
            raise CorruptError(path, f"footer of {footer_bytes} bytes.", offset=size - 10)
        footer_at = size - 10 - footer_bytes
        try:
            footer = _Flatbuffer(bytearray(files.read_at(fd, footer_bytes, footer_at)))
            header = native.take_apart(_read_header(path, footer), NAME, name)
            head_bytes = footer.batch_block()[1]
            if not 0 < head_bytes <= footer_at:
                raise ValueError(f"a head of {head_bytes} bytes")
            head = _Flatbuffer(bytearray(files.read_at(fd, head_bytes, 0)))
            parts = _parts_of(head, footer, header.schema, header.rows)
            for column, part in zip(header.schema.columns, parts, strict=True):
                if not _is_within(part, column, header.entry.num_samples, size):
                    raise ValueError(f"column {column.name!r} lies at {part}")
        except (*BAD_JSON, RuntimeError, struct.error) as error:
            raise CorruptError(path, f"the header or footer does not hold: {error!r}.") from error
    entry = dataclasses.replace(header.entry, size_bytes=size, parts=tuple(parts))
    return entry, header.schema, header.crcs


def verify(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless all of the file is as it was written; as `storage.Format.verify`."""
    found, found_schema, crcs = describe(path, entry.file)
    native.check_same(path, entry, schema, found, found_schema)
    _check_for_others(path, entry, schema)
    with files.opened(path) as fd:
        source = Source(fd, path, entry, schema)
        source.check()
        native.check_crcs(path, entry, schema, crcs, source._read, source)


def _check_for_others(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless pyarrow finds our columns, where they lie for us, and one header."""
    expected = _schema_for_others(schema)
    with files.opened(path) as fd:
        buffer = pa.py_buffer(native.private_pages(fd, path, entry.size_bytes))
    try:
        reader = pa.ipc.open_file(buffer)
        schemas = reader.schema, pa.ipc.open_stream(buffer.slice(_SCHEMA_AT)).schema
        batch = reader.get_batch(0)
        batch.validate()
        found = [_places(array) for array in batch.columns]
    except (pa.ArrowException, ValueError, OSError) as error:
        raise CorruptError(path, f"pyarrow cannot read it: {error}") from error
    if any(not s.equals(expected) or s.metadata != schemas[0].metadata for s in schemas):
        raise CorruptError(path, "the schema for other readers is not that of the header.")
    places = []
    for column, part in zip(schema.columns, entry.parts, strict=True):
        if column.row_bytes:
            places.append((entry.num_samples, [buffer.address + part.offset]))
            if part.table is not None:
                places[-1][1].append(buffer.address + part.table.offsets_at)
                if part.table.num_bytes:
                    places[-1][1].append(buffer.address + part.table.bytes_at)
    if batch.num_rows != entry.num_samples or found != places:
        raise CorruptError(path, "the columns for other readers lie elsewhere than for us.")


@functools.lru_cache(maxsize=16)
def _schema_for_others(schema: Schema) -> pa.Schema:
    texts = {i: [""] for i, column in enumerate(schema.columns) if column.is_text}
    return pa.ipc.open_file(bytes(_one_row_file(schema, "", texts))).schema


def _places(array: pa.Array) -> tuple[int, list[int]]:
    """How many rows a column has, none of them null, and where its data lie in memory."""
    if array.null_count or array.offset:
        raise ValueError(f"{array.null_count} nulls, first row {array.offset}")
    if isinstance(array, pa.DictionaryArray):
        arrays = [array.indices, array.dictionary]
    else:
        arrays = [array.storage if isinstance(array, pa.ExtensionArray) else array]
    return len(array), [b.address for part in arrays for b in part.buffers() if b]


def _read_header(path: str, footer: _Flatbuffer) -> dict[str, Any]:
    text = footer.metadata(footer.deref(footer.field(footer.root(), 1)))
    if text is None:
        raise CorruptError(path, "an Arrow file, but expected one that mmbuf wrote.")
    return native.parse(path, text)


def _is_primitive(column: Column) -> bool:
    return column.row_shape in ((), (1,)) and not column.dtype.startswith("complex")


def _text_of_one(strings: list[str]) -> pa.Array:
    codes = pa.array([0], pa.int32())
    return pa.DictionaryArray.from_arrays(codes, pa.array(strings, pa.utf8()))


# Half of the time that a small file takes to write.
@functools.lru_cache(maxsize=512)
def _array_of_one(column: Column) -> pa.Array:
    """One row of ``column``, not text, for the template."""
    storage = column.storage.name
    value_type = _VALUE_TYPES.get(storage) or pa.from_numpy_dtype(column.storage)
    if _is_primitive(column):
        return pa.array(np.zeros(1, value_type.to_pandas_dtype()), value_type)
    shape = (*column.row_shape, 2) if storage.startswith("complex") else column.row_shape
    size = math.prod(shape)
    values = pa.array(np.zeros(size, value_type.to_pandas_dtype()), value_type)
    return pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(value_type, shape),
        pa.FixedSizeListArray.from_arrays(values, size),
    )


def _one_row_file(schema: Schema, header: str, texts: dict[int, list[str]]) -> bytearray:
    named = [
        (column.name, _text_of_one(texts[i]) if column.is_text else _array_of_one(column))
        for i, column in enumerate(schema.columns)
        if column.row_bytes
    ]
    arrow_schema = pa.schema(
        [pa.field(name, array.type, nullable=False) for name, array in named],
        metadata={_KEY: header},
    )
    if named:
        batch = pa.record_batch([array for _, array in named], schema=arrow_schema)
    else:
        batch = pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct([])))
        batch = batch.replace_schema_metadata({_KEY: header})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytearray(memoryview(sink.getvalue()))


def _stamp(
    template: bytearray, schema: Schema, rows: list[int], num_rows: int
) -> tuple[bytes, bytes, int, list[Part]]:
    """Head, tail, the offset of the tail, and the parts of a file of ``num_rows`` rows."""
    (footer_bytes,) = struct.unpack_from("<i", template, len(template) - 10)
    footer_at = len(template) - 10 - footer_bytes
    footer = _Flatbuffer(template, footer_at)
    block, head_bytes, one_row_bytes = footer.batch_block()
    head = _Flatbuffer(template)
    message, batch = head.message(block)

    head.set_int64(batch, 0, num_rows)
    for at in head.vector(batch, 1, 16):  # nodes: length, null count
        head.put(at, head.int64(at) * num_rows)
    buffers = list(head.vector(batch, 2, 16))  # offset, length
    offset = head_bytes
    for column, n, owned in _buffers_of(schema, rows, buffers):
        for at in owned[:-1]:  # validity bitmaps, all absent
            head.put(at, offset - head_bytes)
        size = n * column.row_bytes
        offset = round_up(offset, _alignment(size))
        head.put(owned[-1], offset - head_bytes)
        head.put(owned[-1] + 8, size)
        offset += size
    body_bytes = round_up(offset, _ALIGNMENT) - head_bytes if one_row_bytes else 0
    if one_row_bytes:  # 0 is a flatbuffer's default and has no place to stamp
        head.set_int64(message, 3, body_bytes)
    footer.put(footer.batch_block_at() + 16, body_bytes)
    parts = _parts_of(head, footer, schema, rows)
    tail = bytes(template[head_bytes + one_row_bytes :])
    return bytes(template[:head_bytes]), tail, head_bytes + body_bytes, parts


def _parts_of(
    head: _Flatbuffer, footer: _Flatbuffer, schema: Schema, rows: list[int]
) -> list[Part]:
    """Where the columns lie, from the stamped messages."""
    block, head_bytes, _ = footer.batch_block()
    offsets = _offsets(head, block, schema, rows)
    return list(_parts(schema, rows, offsets, head_bytes, _tables(head, footer.dictionaries())))


def _parts(
    schema: Schema,
    rows: Sequence[int],
    offsets: Sequence[int | None],
    head_bytes: int,
    tables: Iterator[Table],
) -> Iterator[Part]:
    for column, n, offset in zip(schema.columns, rows, offsets, strict=True):
        if offset is None:
            yield Part(0, n)
        else:
            yield Part(head_bytes + offset, n, next(tables) if column.is_text else None)


def _layout(message: bytes, schema: Schema, rows: tuple[int, ...]) -> _Layout:
    offsets = _offsets(_Flatbuffer(message), 0, schema, rows)
    sizes = [n * column.row_bytes for n, column in zip(rows, schema.columns, strict=True)]
    ends = [0, *(at + size for at, size in zip(offsets, sizes, strict=True) if at is not None)]
    if min(0, *(offset or 0 for offset in offsets)) < 0:
        raise ValueError("a column before the body")
    return _Layout(schema, rows, offsets, max(ends))


def _offsets(
    head: _Flatbuffer, block: int, schema: Schema, rows: Sequence[int]
) -> list[int | None]:
    """Where the columns lie in the body of the record batch; None for one without bytes."""
    _, batch = head.message(block)
    offsets: list[int | None] = [None] * len(rows)
    positions = [i for i, column in enumerate(schema.columns) if column.row_bytes]
    buffers = list(head.vector(batch, 2, 16))
    owned = _buffers_of(schema, rows, buffers)
    for i, (column, n, places) in zip(positions, owned, strict=True):
        if head.int64(places[-1] + 8) != n * column.row_bytes:
            raise ValueError(f"column {column.name!r} has another size than its rows")
        offsets[i] = head.int64(places[-1])
    return offsets


def _tables(head: _Flatbuffer, blocks: list[tuple[int, int]]) -> Iterator[Table]:
    """The text tables, in the order of the dictionary batches: that of the text columns."""
    for block, body_at in blocks:
        _, dictionary = head.message(block)
        batch = head.field(dictionary, 1)
        batch = head.deref(batch)
        _, ends, data = head.vector(batch, 2, 16)
        nodes = list(head.vector(batch, 1, 16))
        yield Table(
            body_at + head.int64(ends),
            head.int64(nodes[0]),
            body_at + head.int64(data),
            head.int64(data + 8),
        )


def _buffers_of(
    schema: Schema, rows: Sequence[int], buffers: list[int]
) -> Iterator[tuple[Column, int, list[int]]]:
    """Each column that has bytes, its rows, and its buffers: bitmaps first, its data last."""
    left = iter(buffers)
    for column, n in zip(schema.columns, rows, strict=True):
        if column.row_bytes:
            count = 2 if _is_primitive(column) else 3
            yield column, n, [next(left) for _ in range(count)]


def _alignment(size: int) -> int:
    if size >= HUGE_PAGE:
        return HUGE_PAGE
    return _WIDE_ALIGNMENT if size >= _WIDE else _ALIGNMENT


def _is_within(part: Part, column: Column, num_rows: int, size: int) -> bool:
    """Whether a column's part has ``num_rows`` rows and all of it lies in ``size`` bytes."""
    if part.rows < num_rows or column.is_text != (part.table is not None):
        return False
    spans = [(part.offset, part.rows * column.row_bytes)]
    if part.table is not None:
        spans.append((part.table.offsets_at, 4 * (part.table.num_strings + 1)))
        spans.append((part.table.bytes_at, part.table.num_bytes))
    return all(0 <= start <= start + length <= size for start, length in spans)


def _runs(pieces: list[tuple[int, memoryview]]) -> list[tuple[int, int]]:
    """The byte ranges to allocate: all pieces, with the small holes between them."""
    runs: list[tuple[int, int]] = []
    for offset, piece in pieces:
        stop = offset + len(piece)
        if runs and offset - runs[-1][1] <= _MAX_HOLE:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((offset, stop))
    return runs


class _Layout(NamedTuple):
    """What a record batch's message says of columns of so many rows.

    ``offsets`` are where they begin in the body, ``size`` is where the last of them ends.
    """

    schema: Schema
    rows: tuple[int, ...]
    offsets: list[int | None]
    size: int


class _Head:
    """The head of a file that is open, read as far as it is needed. ValueError where it ends."""

    # By the message. Most files have that of one before, and taking it apart takes as long as to
    # open a file and to read a column.
    _layouts: ClassVar[dict[bytes, _Layout]] = {}

    def __init__(self, fd: int, data: bytes, size: int) -> None:
        self._fd = fd
        self._data = data
        self._size = size  # of the file

    def header(self) -> bytes:
        """Our header, which the schema's message holds; mostly at its beginning."""
        try:
            text = self._own_metadata()
        except (ValueError, struct.error):
            self._end_of(_SCHEMA_AT)
            text = self._own_metadata()
        if text is None:
            raise ValueError("no header")
        return text

    def _own_metadata(self) -> bytes | None:
        head = _Flatbuffer(self._data)
        return head.metadata(head.message(_SCHEMA_AT)[1])

    def parts(self, schema: Schema, rows: tuple[int, ...]) -> tuple[Part, ...]:
        """Where the columns lie, all of them inside the file."""
        block = self._end_of(_SCHEMA_AT)
        dictionaries = []
        for column in schema.columns:
            if column.is_text:
                body_at = self._end_of(block)
                dictionaries.append((block, body_at))
                block = body_at + self._body_bytes(block, _DICTIONARY_BATCH)
        head_bytes = self._end_of(block)
        message = self._data[block:head_bytes]
        layout = _Head._layouts.get(message)
        if layout is None or layout.schema != schema or layout.rows != rows:
            self._body_bytes(block, _RECORD_BATCH)
            layout = _layout(message, schema, rows)
            if len(_Head._layouts) >= _MAX_LAYOUTS:
                _Head._layouts.clear()
            _Head._layouts[message] = layout
        if head_bytes + layout.size > self._size:
            raise ValueError(f"columns of {layout.size} bytes")
        tables = _tables(_Flatbuffer(self._data), dictionaries) if dictionaries else iter(())
        return tuple(_parts(schema, rows, layout.offsets, head_bytes, tables))

    def _body_bytes(self, block: int, kind: int) -> int:
        """Bytes of the body of a message, which has to be of this kind."""
        head = _Flatbuffer(self._data)
        message, _ = head.message(block)
        if self._data[head.field(message, 1)] != kind:
            raise ValueError(f"expected a message of kind {kind} at byte {block}")
        at = head.find(message, 3)
        return 0 if at is None else head.int64(at)

    def _end_of(self, block: int) -> int:
        """Where the message at ``block`` ends; it is read by then."""
        self._read_to(block + 8)
        mark, size = struct.unpack_from("<Ii", self._data, block)
        if mark != _CONTINUATION or size <= 0:
            raise ValueError(f"a message of {size} bytes")
        end = block + 8 + int(size)
        self._read_to(end)
        return end

    def _read_to(self, stop: int) -> None:
        if len(self._data) < stop <= self._size:
            self._data += files.read_at(self._fd, stop - len(self._data), len(self._data))
        if not 0 <= stop <= len(self._data):
            raise ValueError(f"a head of {stop} bytes")


class _Flatbuffer:
    """Just enough of the flatbuffers format to find fields; every read stays in the buffer.

    Positions are absolute in ``data``; those of the root table and of vectors come from the
    data and are checked by the reads that follow them.
    """

    def __init__(self, data: bytes | bytearray, start: int = 0) -> None:
        self.data = data
        self.start = start

    def _unpack(self, code: str, at: int) -> int:
        if at < 0:
            raise ValueError(f"position {at}")
        value: int = struct.unpack_from(code, self.data, at)[0]
        return value

    def int64(self, at: int) -> int:
        return self._unpack("<q", at)

    def put(self, at: int, value: int) -> None:
        struct.pack_into("<q", self.data, at, value)

    def root(self) -> int:
        return self.deref(self.start)

    def deref(self, at: int) -> int:
        return at + self._unpack("<I", at)

    def find(self, table: int, number: int) -> int | None:
        """Position of a table's field, None when it has its default."""
        vtable = table - self._unpack("<i", table)
        slot = 4 + 2 * number
        if slot + 2 > self._unpack("<H", vtable):
            return None
        offset = self._unpack("<H", vtable + slot)
        return table + offset if offset else None

    def field(self, table: int, number: int) -> int:
        at = self.find(table, number)
        if at is None:
            raise ValueError(f"field {number} is missing")
        return at

    def set_int64(self, table: int, number: int, value: int) -> None:
        self.put(self.field(table, number), value)

    def vector(self, table: int, number: int, item_bytes: int) -> range:
        """Positions of the items of a vector of structs or offsets."""
        at = self.find(table, number)
        if at is None:
            return range(0)
        first = self.deref(at)
        count = self._unpack("<I", first)
        if count * item_bytes > len(self.data):
            raise ValueError(f"a vector of {count} items")
        return range(first + 4, first + 4 + count * item_bytes, item_bytes)

    def text(self, at: int) -> bytes:
        start = self.deref(at)
        size = self._unpack("<I", start)
        if start + 4 + size > len(self.data):
            raise ValueError(f"a text of {size} bytes")
        return bytes(self.data[start + 4 : start + 4 + size])

    def metadata(self, schema: int) -> bytes | None:
        """Of a schema: what its metadata has under our key."""
        for at in self.vector(schema, 2, 4):
            pair = self.deref(at)
            if self.text(self.field(pair, 0)) == _KEY:
                return self.text(self.field(pair, 1))
        return None

    def dictionaries(self) -> list[tuple[int, int]]:
        """Of a footer: positions of the dictionary batches and of their bodies in the file."""
        return [self.block(at) for at in self.vector(self.root(), 2, 24)]

    def batch_block_at(self) -> int:
        blocks = self.vector(self.root(), 3, 24)
        if len(blocks) != 1:
            raise ValueError(f"expected one record batch, got {len(blocks)}")
        return blocks[0]

    def block(self, at: int) -> tuple[int, int]:
        """Of a footer: position of a message and of its body in the file."""
        offset = self.int64(at)
        return offset, offset + self._unpack("<i", at + 8)

    def batch_block(self) -> tuple[int, int, int]:
        """Of a footer: the record batch's message, its body, and the body's size."""
        at = self.batch_block_at()
        return (*self.block(at), self.int64(at + 16))

    def message(self, block: int) -> tuple[int, int]:
        """The message at ``block`` and the table inside it."""
        message = self.deref(block + 8)  # behind the continuation mark and the size
        return message, self.deref(self.field(message, 2))
