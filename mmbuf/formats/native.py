"""What our own formats share: the header of a file, and reading rows that lie as in memory.

The header is JSON and says what the trajectory is::

    {"version": 1, "uuid": ..., "trajectory_id": ..., "num_steps": T, "num_envs": B,
     "shape": [T, B, ...], "max_episode_length": ..., "model_weights_id": ..., "added_at": ...,
     "columns": [
        {"path": [...], "dtype": ..., "row_shape": [...], "rows": N + E * B, "crc32": "0a1b2c3d"}]}

The CRC-32 is that of a column's rows, left-out ones included; of text it goes on over the ends of
the strings (their bytes up to each, int32, 0 first) and the strings.

A header has the oldest version that can say what it says, so that an older mmbuf reads it too or
refuses it by its version: 2 where other columns than flags and ``prev_values`` have left-out rows.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mmbuf import files
from mmbuf.arguments import whole
from mmbuf.entry import MAX_ROWS, Entry, checked_uuid, facts_from_json
from mmbuf.errors import CorruptError, VersionError
from mmbuf.schema import Array, Schema
from mmbuf.vm import is_out_of_memory, map_privately

VERSION = 2

_COMPARED = ("uuid", "shape", "max_episode_length", "model_weights_id")

_READ_WHOLE = 32 << 10
_CRC_BYTES = 4 << 20  # read at once to be summed

# Reads bytes of a column, from a byte of its rows on: position, byte, memory.
Read = Callable[[int, int, memoryview], None]


class Header(NamedTuple):
    """A header taken apart: ``rows`` and CRC-32 of each column."""

    entry: Entry
    schema: Schema
    rows: list[int]
    crcs: list[int]


def crcs_of(rows: Sequence[Array], texts: dict[int, list[str]]) -> list[int]:
    """The CRC-32 of each column."""
    crcs = [zlib.crc32(bytes_of(column_rows)) for column_rows in rows]
    for i, strings in texts.items():
        crcs[i] = _crc_of_text(strings, crcs[i])
    return crcs


def _crc_of_text(strings: list[str], crc: int) -> int:
    encoded = [string.encode() for string in strings]
    ends = np.cumsum([0, *map(len, encoded)], dtype="<i4")
    return zlib.crc32(b"".join(encoded), zlib.crc32(bytes_of(ends), crc))


def bytes_of(rows: Array) -> memoryview:
    """The memory of C-contiguous ``rows``."""
    return rows.reshape(-1).view(np.uint8).data


def to_json(entry: Entry, schema: Schema, rows: list[int], crcs: list[int]) -> dict[str, Any]:
    return {
        "version": schema.version_of(rows, entry.num_samples),
        "uuid": entry.uuid,
        "trajectory_id": entry.trajectory_id,
        "num_steps": entry.num_steps,
        "num_envs": entry.num_envs,
        "shape": entry.shape,
        "max_episode_length": entry.max_episode_length,
        "model_weights_id": entry.model_weights_id,
        "added_at": entry.added_at,
        "columns": [
            {**column, "rows": n, "crc32": f"{crc:08x}"}
            for column, n, crc in zip(schema.to_json(), rows, crcs, strict=True)
        ],
    }


def parse(path: str, text: bytes) -> dict[str, Any]:
    """A header; one of `BAD_JSON` where it is none, VersionError for one of a newer mmbuf."""
    header: dict[str, Any] = json.loads(text)
    if whole("version", header["version"], 1) > VERSION:
        raise VersionError(
            f"{path}: expected file version {VERSION} or older, got {header['version']}. "
            f"Update mmbuf."
        )
    return header


def take_apart(header: dict[str, Any], format_name: str, file: str) -> Header:
    """Entry (without size and parts), schema, rows and CRCs; one of `BAD_JSON` where it is none."""
    schema = Schema.from_json(header["columns"])
    rows = [whole("rows", column["rows"], bound=MAX_ROWS) for column in header["columns"]]
    entry = Entry(
        checked_uuid(header["uuid"]), *facts_from_json(header), format=format_name, file=file
    )
    schema.check_rows(rows, entry.num_steps, entry.num_envs)
    return Header(entry, schema, rows, [int(column["crc32"], 16) for column in header["columns"]])


def read_into(fd: int, path: str, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset``; CorruptError if the file ends before."""
    try:
        files.read_into(fd, view, offset)
    except EOFError as error:
        raise CorruptError(path, f"expected more rows: {error}.", offset=offset) from error


def private_pages(fd: int, path: str, size_bytes: int) -> Array:
    """The beginning of a file as ``uint8 [size_bytes]``, the caller's to change: its private pages.

    A copy where no mapping is left.
    """
    try:
        return map_privately(fd, size_bytes)
    except OSError as error:
        if not is_out_of_memory(error):
            raise
    memory = np.empty(size_bytes, np.uint8)
    read_into(fd, path, memory.data, 0)
    return memory


def read_rows(
    entry: Entry,
    schema: Schema,
    rows: Array,
    leaves: Sequence[Any],
    targets: Array,
    read: Read,
) -> None:
    """Read ``rows`` of each column that is not text into ``leaves[column][targets]``.

    Columns whose leaf is None are left out.
    ``read(position, at, view)`` reads bytes of a column from byte ``at`` of its rows. The leaves
    are C-contiguous ``[K, *S]`` arrays in storage dtype.
    """
    columns = zip(schema.columns, entry.parts, leaves, strict=True)
    for position, (column, part, leaf) in enumerate(columns):
        step = column.row_bytes
        size = part.rows * step
        if leaf is None or column.is_text or not size:
            continue
        if size <= _READ_WHOLE:
            # One call for all rows costs less than a call for each.
            whole = np.empty((part.rows, *column.row_shape), column.storage)
            read(position, 0, bytes_of(whole))
            leaf[targets] = whole[rows]
            continue
        view = bytes_of(leaf)
        for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
            read(position, row * step, view[target * step : (target + 1) * step])


def checked_codes(codes: Array, strings: list[str], path: str, offset: int) -> Array:
    """``codes``; CorruptError unless all of them are places in ``strings``."""
    if not 0 <= int(codes.min()) <= int(codes.max()) < len(strings):
        raise CorruptError(path, "text codes beyond the text.", offset=offset)
    return codes


class TextSource(Protocol):
    """What `check_crcs` reads text from."""

    def read_text(self, position: int) -> tuple[Array, list[str]]:
        """As `storage.Source`."""


def check_same(path: str, entry: Entry, schema: Schema, found: Entry, found_schema: Schema) -> None:
    """CorruptError unless what a file says of itself is what its entry says, but for its number.

    A file that does not say when it was added may have been given a time.
    """
    found = dataclasses.replace(found, added_at=found.added_at or entry.added_at)
    if found_schema != schema:
        raise CorruptError(path, f"expected {schema}, got {found_schema}.")
    for name in ("uuid", "shape", "max_episode_length", "model_weights_id", "added_at"):
        expected, got = getattr(entry, name), getattr(found, name)
        if expected != got:
            raise CorruptError(path, f"{name}: expected {expected!r}, got {got!r}.")
    if found.size_bytes != entry.size_bytes:
        raise CorruptError(path, f"expected {entry.size_bytes} bytes, got {found.size_bytes}.")
    if found.parts != entry.parts:
        raise CorruptError(path, f"expected its columns at {entry.parts}, got {found.parts}.")


def check_header(path: str, entry: Entry, schema: Schema, header: dict[str, Any]) -> None:
    """CorruptError unless a header says of the trajectory what its entry says, but for its number.

    One of `BAD_JSON` where it is no header. Cheaper than to take it apart: this is done whenever a
    file is opened for the first time.
    """
    expected = (entry.uuid, list(entry.shape), entry.max_episode_length, entry.model_weights_id)
    found = tuple(header[name] for name in _COMPARED)
    if found != expected:
        for name, left, right in zip(_COMPARED, expected, found, strict=True):
            if left != right:
                raise CorruptError(path, f"{name}: expected {left!r}, got {right!r}.")
    columns = zip(schema.columns, entry.parts, header["columns"], strict=True)
    for column, part, told in columns:
        of_file = (told["path"], told["dtype"], told["row_shape"], told["rows"])
        if of_file != ([*column.path], column.dtype, [*column.row_shape], part.rows):
            raise CorruptError(
                path,
                f"column {column.name!r}: expected {part.rows} {column}, got {told['rows']} "
                f"{told['dtype']} rows of shape {tuple(told['row_shape'])} of {told['path']}.",
            )


def check_crcs(
    path: str, entry: Entry, schema: Schema, crcs: list[int], read: Read, source: TextSource
) -> None:
    """CorruptError, which names the columns, unless the CRC-32 of each is that of its rows.

    Reads all of the file, a few MiB at a time; only text is in memory whole.
    """
    buffer = bytearray(min(_CRC_BYTES, max(1, entry.size_bytes)))
    damaged = []
    for position, (column, part) in enumerate(zip(schema.columns, entry.parts, strict=True)):
        if column.is_text:
            try:
                codes, strings = source.read_text(position)
                crc = _crc_of_text(strings, zlib.crc32(bytes_of(codes)))
            except CorruptError:
                crc = -1
        else:
            crc, size = 0, part.rows * column.row_bytes
            for at in range(0, size, len(buffer)):
                view = memoryview(buffer)[: size - at]
                read(position, at, view)
                crc = zlib.crc32(view, crc)
        if crc != crcs[position]:
            damaged.append(column.name)
    if damaged:
        names = ", ".join(map(repr, damaged))
        raise CorruptError(path, f"column {names}: expected bytes of its CRC-32, got others.")
