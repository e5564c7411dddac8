"""Table: named columns that are made when they are asked for, record batch by record batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.dataset as arrow_dataset

from mmbuf.errors import SchemaError
from mmbuf.packages import optional_package

# Makes record batches of the named columns, in their order.
Scan = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]


class Table:
    """A table over stores. Nothing is kept: each call reads anew what it needs.

    ``schema`` has all columns. Those in ``wide`` are left out where no columns are named. In all
    methods ``columns`` are names, in the order wanted; SchemaError for one that is not there.
    FileNotFoundError, CorruptError and OSError as reading gives them.
    """

    def __init__(self, schema: pa.Schema, wide: Iterable[str], scan: Scan) -> None:
        self.schema = schema
        self.wide = frozenset(wide)
        self._scan = scan

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are not wide."""
        return [name for name in self.schema.names if name not in self.wide]

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches, one after the other: memory for one, if no more are kept."""
        return self._scan(self.checked(columns))

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All of it as a ``pyarrow.Table``; views of the files where columns allow it."""
        names = self.checked(columns)
        return pa.Table.from_batches(self._scan(names), _picked(self.schema, names))

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """All of it as a ``pandas.DataFrame``. MmbufError where pandas is not installed."""
        optional_package("pandas", "analysis")
        return self.to_arrow(columns).to_pandas()

    def to_polars(self, columns: Sequence[str] | None = None) -> Any:
        """All of it as a ``polars.DataFrame``. MmbufError where Polars is not installed."""
        return optional_package("polars", "analysis").from_arrow(self.to_arrow(columns))

    def register(self, connection: Any, name: str, wide: Iterable[str] = ()) -> None:
        """Give it a name in a DuckDB connection. A query reads only the columns that it needs.

        In bounded memory, and as often as it is asked. ``wide`` columns are there only if they are
        named here.
        """
        kept = {*self.columns, *self.checked(list(wide))}
        schema = _picked(self.schema, [n for n in self.schema.names if n in kept])
        connection.register(name, _Dataset(self, schema))

    def checked(self, columns: Sequence[str] | None) -> list[str]:
        """Names of columns as all methods take them, without reading anything."""
        if columns is None:
            return self.columns
        if isinstance(columns, str):
            raise TypeError(f"columns: expected a list of names, got {columns!r}.")
        for name in columns:
            if name not in self.schema.names:
                raise SchemaError(
                    f"column {name!r}: expected one of {', '.join(self.schema.names)}."
                )
        return list(columns)


class _Dataset(arrow_dataset.Dataset):  # type: ignore[misc]
    """What gives DuckDB the ``schema`` of a table, and scanners.

    The base class is there for its name, by which DuckDB knows that columns and filters can be
    handed down. Its other methods would read fragments of files that there are not, so it is given
    to nobody else.
    """

    def __init__(self, table: Table, schema: pa.Schema) -> None:
        self._table = table
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def scanner(
        self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any
    ) -> _Scanner:
        """Reads ``columns`` and those that ``filter`` needs. Other options mean nothing here."""
        names = self._schema.names if columns is None else list(columns)
        needed = _needed_by(filter, self._schema).union(names)
        read = [name for name in self._schema.names if name in needed] or self._schema.names[:1]
        return _Scanner(_picked(self._schema, names), partial(self._table.batches, read), filter)


class _Scanner:
    """One scan of a table, made in the thread of whoever reads it, and no further than it is read.

    Arrow's own scanner reads ahead in threads of its own. Where a query stops early (``limit``)
    these still run Python when the interpreter ends, which aborts.
    """

    def __init__(
        self, schema: pa.Schema, scan: Callable[[], Iterator[pa.RecordBatch]], filter: Any
    ) -> None:
        self.projected_schema = schema
        self._scan = scan
        self._filter = filter

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        names = self.projected_schema.names
        for batch in self._scan():
            if self._filter is None:
                yield batch.select(names)
            else:
                rows = pa.Table.from_batches([batch]).filter(self._filter)
                yield from rows.select(names).to_batches()


def _needed_by(filter: Any, schema: pa.Schema) -> set[str]:
    """The columns of a filter: those without which it means nothing."""
    if filter is None:
        return set()
    return {name for name in schema.names if not _can_bind(filter, schema, name)}


def _can_bind(filter: Any, schema: pa.Schema, without: str) -> bool:
    rest = _picked(schema, [name for name in schema.names if name != without])
    try:
        rest.empty_table().filter(filter)
    except pa.ArrowInvalid:
        return False
    return True


def _picked(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names])
