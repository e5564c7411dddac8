"""Rows: those of trajectories' files, column by column, as NumPy and Arrow.

What a column is in a table:

==========================  ===================================  ================================
column                      Arrow                                note
==========================  ===================================  ================================
row shape ``()``, ``(1,)``  its number                           zero-copy where it is mapped
other row shapes            fixed_size_list of all its numbers   row-major; likewise
bool                        bool                                 a copy: Arrow's is bit-packed
float16, bfloat16, float8   float32                              a copy: DuckDB has no others
complex64, complex128       fixed_size_list of float32, float64  real and imaginary part in turn
text                        dictionary<int32, utf8>
no bytes (a dimension 0)    none
==========================  ===================================  ================================

Steps that are left out of the rows (of columns with ``T + E``) are left out here too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mmbuf import files, storage, vm
from mmbuf.entry import Entry
from mmbuf.formats import native
from mmbuf.schema import Array, Column, Schema, TextTable

# Codes, and the strings that they point to.
Text = tuple[Array, list[str]]

_TEXT = pa.dictionary(pa.int32(), pa.utf8())
_MAX_SHORT = 64


def field_of(column: Column) -> pa.Field:
    """The field of a table that ``column``, which has bytes, is."""
    if column.is_text:
        kind = _TEXT
    else:
        kind = pa.from_numpy_dtype(decoded(column, np.empty(0, column.storage)).dtype)
        if not _is_number(column):
            kind = pa.list_(kind, _num_values(column))
    return pa.field(column.name, kind)


def is_wide(column: Column) -> bool:
    """Whether a row has more than 64 numbers: images, hidden states."""
    return not column.is_text and _num_values(column) > _MAX_SHORT


def decoded(column: Column, rows: Array) -> Array:
    """``rows`` in storage dtype as numbers that NumPy and Arrow know; a view where they are that.

    Small floats as float32; complex ones as pairs along a last dimension of twice the length.
    """
    if column.viewed_as is not None:
        values: Array = column.tensor(rows).float().numpy()
        return values
    if column.dtype == "float16":
        return rows.astype(np.float32)
    if rows.dtype.kind == "c":
        return np.ascontiguousarray(rows).reshape(-1).view(rows.real.dtype)
    return rows


def _num_values(column: Column) -> int:
    return math.prod(column.row_shape) * (2 if column.dtype.startswith("complex") else 1)


def _is_number(column: Column) -> bool:
    return column.row_shape in ((), (1,)) and not column.dtype.startswith("complex")


class Grid(NamedTuple):
    """Where each row is, ``[N]``."""

    steps: Array
    envs: Array
    is_last: Array  # whether it is of its trajectory's last step
    places: Array  # where it lies if the steps of each environment lie side by side


class Rows(ABC):
    """The aligned rows of some trajectories, one behind the other, column by column."""

    def __init__(
        self, schema: Schema, entries: Sequence[Entry], directories: Sequence[str]
    ) -> None:
        self.schema = schema
        self.entries = entries
        self.directories = directories
        self.num_rows = sum(entry.num_samples for entry in entries)

    @abstractmethod
    def rows(self, position: int) -> Array:
        """A column's rows ``[N, *S]`` in storage dtype (not text)."""

    @abstractmethod
    def text(self, position: int) -> Text:
        """A text column's codes, int32 ``[N]``, and the strings that they point to."""

    def values(self, position: int) -> Array:
        """A column's numbers ``[N, V]`` (not text); see `decoded`."""
        column = self.schema.columns[position]
        return decoded(column, self.rows(position)).reshape(self.num_rows, -1)

    def array(self, position: int) -> pa.Array:
        """A column's rows as Arrow."""
        column = self.schema.columns[position]
        if column.is_text:
            codes, strings = self.text(position)
            return pa.DictionaryArray.from_arrays(codes, pa.array(strings, pa.utf8()))
        numbers = pa.array(decoded(column, self.rows(position)).reshape(-1))
        if _is_number(column):
            return numbers
        return pa.FixedSizeListArray.from_arrays(numbers, _num_values(column))

    @cached_property
    def owners(self) -> Array:
        """Of each row the place of its trajectory among the entries."""
        return np.repeat(np.arange(len(self.entries)), [e.num_samples for e in self.entries])

    @cached_property
    def grid(self) -> Grid:
        shapes = np.array([entry.shape[:2] for entry in self.entries])
        sizes = shapes.prod(axis=1)
        begins = (sizes.cumsum() - sizes)[self.owners]
        num_steps, num_envs = shapes[self.owners].T
        steps, envs = np.divmod(np.arange(self.num_rows) - begins, num_envs)
        return Grid(steps, envs, steps == num_steps - 1, begins + envs * num_steps + steps)


class TrajectoryRows(Rows):
    """Those of one trajectory. Its file is opened when it is first needed.

    ``schema`` are columns that it has; it may have others. For one thread at a time, until
    ``stack`` closes; what was given out stays good. FileNotFoundError where there is no file,
    CorruptError unless it can be the one of ``entry``.
    """

    def __init__(self, entry: Entry, directory: str, schema: Schema, stack: ExitStack) -> None:
        super().__init__(schema, [entry], [directory])
        self.entry = entry
        self._own = entry.schema or schema
        self._path = files.join(directory, entry.file)
        self._stack = stack
        self._format = storage.FORMATS[entry.format]

    @cached_property
    def _source(self) -> storage.Source:
        opened = self._format.opened(self._path, self.entry, self._own, is_checked=False)
        return self._stack.enter_context(opened)

    @cached_property
    def _places(self) -> list[int]:
        """Of each column its position in the file."""
        places = {column.path: i for i, column in enumerate(self._own.columns)}
        return [places[column.path] for column in self.schema.columns]

    def rows(self, position: int) -> Array:
        """A column's rows ``[N, *S]`` in storage dtype (not text).

        Private pages of the file where it can be mapped and they are many, else a copy. No byte of
        another column is read where the format keeps them apart.
        """
        column = self.schema.columns[position]
        shape, size = (self.num_rows, *column.row_shape), self.num_rows * column.row_bytes
        if self._format.CAN_MAP and size >= vm.MAP_THRESHOLD:
            fd, offset = self._source.location(self._places[position])
            memory = native.private_pages(fd, self._path, offset + size)
            return memory[offset:].view(column.storage).reshape(shape)
        rows = np.empty(shape, column.storage)
        self._source.read_part(self._places[position], rows)
        return rows

    def text(self, position: int) -> Text:
        codes, strings = self._source.read_text(self._places[position])
        return codes[: self.num_rows], strings

    def read(self, positions: Sequence[int]) -> Piece:
        """Some columns, to be there when the file is closed."""
        columns = self.schema.columns
        found = [self.text(i) if columns[i].is_text else self.rows(i) for i in positions]
        return Piece(self.entry, self.directories[0], found)


class Piece(NamedTuple):
    """What was read of one trajectory: some columns, `Rows.text` or `Rows.rows` of each."""

    entry: Entry
    directory: str
    columns: list[Any]


class BlockRows(Rows):
    """Rows that were read: pieces of the columns at ``positions``; those of several are copied."""

    def __init__(self, schema: Schema, positions: Sequence[int], pieces: Sequence[Piece]) -> None:
        entries, directories, columns = zip(*pieces, strict=True)
        super().__init__(schema, entries, directories)
        self._columns = dict(zip(positions, zip(*columns, strict=True), strict=True))

    def rows(self, position: int) -> Array:
        return _joined(self._columns[position])

    def text(self, position: int) -> Text:
        table = TextTable()
        codes = [table.encode(strings)[codes] for codes, strings in self._columns[position]]
        return _joined(codes), table.strings


def _joined(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
