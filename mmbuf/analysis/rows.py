"""TrajectoryRows: the rows of one trajectory's file, column by column, as NumPy and Arrow.

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

Steps that are left out of the rows (``T + E`` flags) are left out here too.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import pyarrow as pa

from mmbuf import files, storage, vm
from mmbuf.entry import Entry
from mmbuf.formats import native
from mmbuf.schema import Array, Column, Schema

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


class TrajectoryRows:
    """The aligned rows of one trajectory. Its file is opened when it is first needed.

    For one thread at a time, until ``stack`` closes; what was given out stays good.
    FileNotFoundError where there is no file, CorruptError unless it can be the one of ``entry``.
    """

    def __init__(self, entry: Entry, directory: str, schema: Schema, stack: ExitStack) -> None:
        self.entry = entry
        self.directory = directory
        self.schema = schema
        self._stack = stack
        self._format = storage.FORMATS[entry.format]

    @cached_property
    def _path(self) -> str:
        return files.join(self.directory, self.entry.file)

    @cached_property
    def _source(self) -> storage.Source:
        opened = self._format.opened(self._path, self.entry, self.schema, is_checked=False)
        return self._stack.enter_context(opened)

    def rows(self, position: int) -> Array:
        """A column's rows ``[N, *S]`` in storage dtype (not text).

        Private pages of the file where it can be mapped and they are many, else a copy. No byte of
        another column is read where the format keeps them apart.
        """
        column, num_rows = self.schema.columns[position], self.entry.num_samples
        shape, size = (num_rows, *column.row_shape), num_rows * column.row_bytes
        if self._format.CAN_MAP and size >= vm.MAP_THRESHOLD:
            fd, offset = self._source.location(position)
            memory = native.private_pages(fd, self._path, offset + size)
            return memory[offset:].view(column.storage).reshape(shape)
        rows = np.empty(shape, column.storage)
        self._source.read_part(position, rows)
        return rows

    def values(self, position: int) -> Array:
        """A column's numbers ``[N, V]``; see `decoded`. Of text the codes."""
        column = self.schema.columns[position]
        return decoded(column, self.rows(position)).reshape(self.entry.num_samples, -1)

    def array(self, position: int) -> pa.Array:
        """A column's rows as Arrow."""
        column, num_rows = self.schema.columns[position], self.entry.num_samples
        if column.is_text:
            codes, strings = self._source.read_text(position)
            return pa.DictionaryArray.from_arrays(
                pa.array(codes[:num_rows], pa.int32()), pa.array(strings, pa.utf8())
            )
        numbers = pa.array(decoded(column, self.rows(position)).reshape(-1))
        if _is_number(column):
            return numbers
        return pa.FixedSizeListArray.from_arrays(numbers, _num_values(column))
