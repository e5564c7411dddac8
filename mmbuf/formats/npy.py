"""NumPy files whose columns can be mapped: a directory with one ``.npy`` file per column.

::

    trajectory_3_w.npy/
        trajectory.json             the header, JSON: what the trajectory is, and its text
        rewards.npy                 one column: rows ``[rows, *S]`` in storage dtype (`schema`),
        curr_obs.states.npy         left-out rows behind; of a text column the codes, int32
        ...

``numpy.load(file, mmap_mode="r")`` opens each column. The data of one of 16 KiB or more begin at
byte 4,096, so that they can be mapped where pages have that size (elsewhere they are read), those
of smaller ones on a 64-byte boundary. 16,384, which would suit larger pages too, is not to be had:
``numpy.load`` refuses headers of more than 10,000 characters.

Nothing of a file is evaluated: the ``.npy`` header is compared with the one that the column must
have.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import struct
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mmbuf import files, vm
from mmbuf.entry import Entry, Part
from mmbuf.errors import BAD_JSON, CorruptError
from mmbuf.formats import native
from mmbuf.schema import Array, Column, Schema

NAME = "npy"
EXTENSION = ".npy"
CAN_MAP = True
IS_DIRECTORY = True
HEADER = "trajectory.json"

_MAGIC = b"\x93NUMPY\x01\x00"  # version 1.0
_HEAD_BYTES = 4 << 10  # of the header: enough to hold the uuid
_PREFIX_BYTES = len(_MAGIC) + 2  # the length of what follows, uint16
_ALIGNMENT = 64
_WIDE_ALIGNMENT = 4 << 10
_WIDE = 16 << 10
_MAX_STEM = 160  # less than what `files.escape` cuts keys to, so that no cut key is in a plain name


def write(
    path: str, entry: Entry, schema: Schema, rows: list[Array], texts: dict[int, list[str]]
) -> Entry:
    """Write one trajectory as the new directory ``path``; ``entry`` completed with size and parts.

    ``rows[i]`` are column i's rows ``[rows, *S]`` in its storage dtype, C-contiguous, left-out
    rows behind; of a text column the codes into ``texts[i]``. Nothing is left if it fails.
    """
    parts: list[Part] = []
    size = 0
    with files.created_directory(path):
        for column, name, column_rows in zip(
            schema.columns, _file_names(schema), rows, strict=True
        ):
            data = native.bytes_of(column_rows)
            head = _npy_header(column, len(column_rows))
            _write_file(files.join(path, name), [head, data])
            parts.append(Part(len(head), len(column_rows)))
            size += len(head) + len(data)
        header = _header(entry, schema, rows, texts)
        _write_file(files.join(path, HEADER), [header])
    size += len(header)
    return dataclasses.replace(entry, format=NAME, size_bytes=size, parts=tuple(parts))


@contextmanager
def opened(path: str, entry: Entry, schema: Schema, *, is_checked: bool) -> Iterator[Source]:
    """The directory of ``entry``, to be read; CorruptError unless it is that one.

    ``is_checked``: a directory of that name was compared with the entry before, and need only be
    the same trajectory's still.
    """
    with files.opened_directory(path) as directory, ExitStack() as stack:
        source = Source(directory, path, entry, schema, stack)
        if is_checked:
            source.check_identity()
        else:
            source.check()
        yield source


def check_identity(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless the directory is that of the entry's trajectory; one file is opened."""
    with files.opened_directory(path) as directory, ExitStack() as stack:
        Source(directory, path, entry, schema, stack).check_identity()


class Source:
    """One directory, open. Its columns can be mapped; at most two of its files are open at once.

    Another one that takes its name is not looked at: all files are of one trajectory. A file that
    is missing or has not the size that the entry gives it is a CorruptError, so that none is read
    or mapped beyond its end. FileNotFoundError where the directory itself is gone.
    """

    def __init__(
        self, directory: int, path: str, entry: Entry, schema: Schema, stack: ExitStack
    ) -> None:
        self._directory = directory
        self._path = path
        self._entry = entry
        self._schema = schema
        self._names = _file_names(schema)
        self._stack = stack  # closes the column that is open
        self._position, self._fd = -1, -1  # of that column

    def check_identity(self) -> None:
        """CorruptError unless the directory is that of the entry's trajectory."""
        with ExitStack() as stack:
            fd = _open_in(self._directory, self._path, HEADER, stack)
            head = files.read_at(fd, _HEAD_BYTES, 0)
        uuid = self._entry.uuid
        if f'"uuid": "{uuid}"'.encode() not in head:
            file = files.join(self._path, HEADER)
            raise CorruptError(file, f"expected trajectory {uuid}, got another one's.")

    def check(self) -> None:
        """CorruptError unless all files are there, say what the entry says, and are the only ones.

        Then none can be read beyond its end.
        """
        entry, path = self._entry, self._path
        if len(entry.parts) != len(self._names):
            what = f"expected {len(self._names)} columns in the index, got {len(entry.parts)}."
            raise CorruptError(path, what)
        header = self._read_header()
        try:
            native.check_header(files.join(path, HEADER), entry, self._schema, header)
        except BAD_JSON as error:
            raise _wrong_header(path, error) from error
        for position, (column, part) in enumerate(
            zip(self._schema.columns, entry.parts, strict=True)
        ):
            file = files.join(path, self._names[position])
            found = _find_part(self._open(position), file, column, part.rows)
            if found != part or part.rows < entry.num_samples:
                raise CorruptError(
                    file, f"expected {entry.num_samples} rows or more at {part}, got {found}."
                )
        size = files.size_of(path)
        if size != entry.size_bytes:
            raise CorruptError(path, f"expected {entry.size_bytes} bytes in all, got {size}.")

    def location(self, position: int) -> tuple[int, int]:
        """The descriptor and byte offset at which a column's rows begin, to be mapped.

        The descriptor is good until another column is asked for.
        """
        return self._open(position), self._entry.parts[position].offset

    def read_part(self, position: int, rows: Array) -> None:
        """Read a column's first ``len(rows)`` rows (of text the codes) into C-contiguous memory."""
        if rows.nbytes:
            self._read(position, 0, native.bytes_of(rows))

    def read_text(self, position: int) -> tuple[Array, list[str]]:
        """All rows of a text column: codes ``int32 [rows]`` and the strings they point to."""
        codes = np.empty(self._entry.parts[position].rows, np.int32)
        self.read_part(position, codes)
        strings = self._read_strings(position)
        file = files.join(self._path, self._names[position])
        return native.checked_codes(
            codes, strings, file, self._entry.parts[position].offset
        ), strings

    def read_rows(self, rows: Array, leaves: Sequence[Any], targets: Array) -> None:
        """Read ``rows`` of each column that is not text into ``leaves[column][targets]``.

        The leaves are C-contiguous ``[K, *S]`` arrays in storage dtype.
        """
        native.read_rows(self._entry, self._schema, rows, leaves, targets, self._read)

    def _read(self, position: int, at: int, view: memoryview) -> None:
        fd, file = self._open(position), files.join(self._path, self._names[position])
        native.read_into(fd, file, view, self._entry.parts[position].offset + at)

    def _open(self, position: int) -> int:
        """A column's file, open until another one is."""
        if position != self._position:
            self._stack.close()
            self._position = -1
            self._fd = _open_in(self._directory, self._path, self._names[position], self._stack)
            file = files.join(self._path, self._names[position])
            _check_size(self._fd, file, self._size_of(position))
            self._position = position
        return self._fd

    def _size_of(self, position: int) -> int:
        part = self._entry.parts[position]
        return part.offset + part.rows * self._schema.columns[position].row_bytes

    def _read_header(self) -> dict[str, Any]:
        sizes = map(self._size_of, range(len(self._names)))
        size = self._entry.size_bytes - sum(sizes)
        return _read_header(self._directory, self._path, size)

    def _read_strings(self, position: int) -> list[str]:
        header = self._read_header()
        try:
            strings: list[str] = header["columns"][position]["strings"]
            if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
                raise TypeError("text that is not a list of strings")
        except (LookupError, TypeError) as error:
            raise _wrong_header(self._path, error) from error
        return strings


def load(path: str, entry: Entry, schema: Schema, *, can_map: bool) -> list[Array | list[str]]:
    """All rows of each column, left-out ones too, writable; text as strings.

    With ``can_map`` a private mapping for each column of `vm.MAP_THRESHOLD` or more, which dies
    with the last array that looks into it. All else is read into memory.
    """
    leaves: list[Array | list[str]] = []
    with opened(path, entry, schema, is_checked=False) as source:
        for position, (column, part) in enumerate(zip(schema.columns, entry.parts, strict=True)):
            size = part.rows * column.row_bytes
            shape = (part.rows, *column.row_shape)
            if column.is_text:
                codes, strings = source.read_text(position)
                leaves.append([strings[code] for code in codes.tolist()])
            elif can_map and size >= vm.MAP_THRESHOLD:
                fd, offset = source.location(position)
                memory = native.private_pages(fd, path, offset + size)
                leaves.append(memory[offset:].view(column.storage).reshape(shape))
            else:
                rows = np.empty(shape, column.storage)
                source.read_part(position, rows)
                leaves.append(rows)
    return leaves


def describe(path: str, name: str) -> tuple[Entry, Schema, list[int]]:
    """What a directory says of itself: entry (``file=name``), schema, CRC-32 of each column.

    Reads the header and those of the ``.npy`` files only.
    """
    parts = []
    with files.opened_directory(path) as directory:
        header = _read_header(directory, path)
        try:
            entry, schema, rows, crcs = native.take_apart(header, NAME, name)
        except BAD_JSON as error:
            raise _wrong_header(path, error) from error
        for column, file_name, n in zip(schema.columns, _file_names(schema), rows, strict=True):
            with ExitStack() as stack:
                fd = _open_in(directory, path, file_name, stack)
                parts.append(_find_part(fd, files.join(path, file_name), column, n))
    size = files.size_of(path)
    return dataclasses.replace(entry, size_bytes=size, parts=tuple(parts)), schema, crcs


def verify(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless all files are as they were written; as `storage.Format.verify`."""
    found, found_schema, crcs = describe(path, entry.file)
    native.check_same(path, entry, schema, found, found_schema)
    with files.opened_directory(path) as directory, ExitStack() as stack:
        source = Source(directory, path, entry, schema, stack)
        source.check()
        native.check_crcs(path, entry, schema, crcs, source._read, source)


@functools.lru_cache(maxsize=64)
def _file_names(schema: Schema) -> tuple[str, ...]:
    """The file of each column: its keys, escaped and joined by dots.

    A name that is too long, or that another one equals but for its case (which some file systems
    do not tell apart), ends in a digest of the path. They depend on no order of the columns.
    """
    stems = [".".join(map(files.escape, column.path)) for column in schema.columns]
    counts = collections.Counter(stem.lower() for stem in stems)
    names = []
    for column, stem in zip(schema.columns, stems, strict=True):
        if len(stem) > _MAX_STEM or counts[stem.lower()] > 1:
            digest = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(column.path)).hex
            # Escaped text never has two percent signs side by side.
            stem = f"{stem[:_MAX_STEM]}%%{digest}"
        names.append(stem + ".npy")
    return tuple(names)


def _npy_literal(column: Column, rows: int) -> bytes:
    shape = (rows, *column.row_shape)
    return (
        f"{{'descr': {column.storage.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    ).encode()


def _npy_header(column: Column, rows: int) -> bytes:
    """The head of a column's file, up to where its rows begin."""
    literal = _npy_literal(column, rows)
    alignment = _WIDE_ALIGNMENT if rows * column.row_bytes >= _WIDE else _ALIGNMENT
    size = vm.round_up(_PREFIX_BYTES + len(literal) + 1, alignment) - _PREFIX_BYTES
    return _MAGIC + struct.pack("<H", size) + literal.ljust(size - 1) + b"\n"


def _find_part(fd: int, file: str, column: Column, rows: int) -> Part:
    """Where the rows lie in a column's file; CorruptError unless it holds just these rows."""
    prefix = files.read_at(fd, _PREFIX_BYTES, 0)
    if not prefix.startswith(_MAGIC) or len(prefix) < _PREFIX_BYTES:
        raise CorruptError(file, f"expected an npy file 1.0, got one that begins {prefix!r}.")
    (size,) = struct.unpack_from("<H", prefix, len(_MAGIC))
    literal = _npy_literal(column, rows)
    found = files.read_at(fd, size, _PREFIX_BYTES).rstrip(b" \n")
    if found != literal:
        raise CorruptError(
            file,
            f"expected the npy header {literal!r}, got {found[: 2 * len(literal)]!r}.",
            offset=_PREFIX_BYTES,
        )
    offset = _PREFIX_BYTES + size
    _check_size(fd, file, offset + rows * column.row_bytes)
    return Part(offset, rows)


def _check_size(fd: int, file: str, size: int) -> None:
    length = files.length(fd)
    if length != size:
        raise CorruptError(file, f"expected {size} bytes, got {length}.")


def _open_in(directory: int, path: str, name: str, stack: ExitStack) -> int:
    """A file of the open ``directory`` that was found at ``path``, open until ``stack`` closes."""
    file = files.join(path, name)
    try:
        return stack.enter_context(files.opened_in(directory, file))
    except FileNotFoundError as error:
        if files.has_name(directory, path):  # else it was removed since
            raise CorruptError(file, "expected a file of the trajectory, got none.") from error
        raise


def _write_file(file: str, pieces: list[bytes | memoryview]) -> None:
    with files.created(file) as fd:
        files.allocate(fd, 0, sum(map(len, pieces)))
        offset = 0
        for piece in pieces:
            if len(piece):
                files.write_at(fd, piece, offset)
            offset += len(piece)


def _header(entry: Entry, schema: Schema, rows: list[Array], texts: dict[int, list[str]]) -> bytes:
    num_rows = [len(column_rows) for column_rows in rows]
    header = native.to_json(entry, schema, num_rows, native.crcs_of(rows, texts))
    for i, strings in texts.items():
        header["columns"][i]["strings"] = strings
    return json.dumps(header).encode() + b"\n"


def _read_header(directory: int, path: str, size: int | None = None) -> dict[str, Any]:
    """The directory's header, of ``size`` bytes where that is known."""
    file = files.join(path, HEADER)
    with ExitStack() as stack:
        fd = _open_in(directory, path, HEADER, stack)
        if size is not None:
            _check_size(fd, file, size)
        data = files.read_at(fd, files.length(fd), 0)
    try:
        return native.parse(file, data)
    except BAD_JSON as error:
        raise _wrong_header(path, error) from error


def _wrong_header(path: str, error: Exception) -> CorruptError:
    return CorruptError(files.join(path, HEADER), f"the header does not hold: {error!r}.")
