"""What exports share: which tables are written, and a directory that is there when it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from mmbuf import files
from mmbuf.analysis.table import Table
from mmbuf.analysis.tables import Tables
from mmbuf.errors import SchemaError
from mmbuf.transfer import built_directory

_BLOCK_ROWS = 128 << 10
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Exported:
    """How many rows of each table were written."""

    num_trajectories: int
    num_episodes: int
    num_rows: int


@dataclass(frozen=True)
class Part:
    """One of the tables, and those of its columns that are written."""

    name: str
    table: Table
    columns: list[str]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([self.table.schema.field(name) for name in self.columns])

    def blocks(self) -> Iterator[pa.Table]:
        """All rows, those of many trajectories at once; memory for one block, and a trajectory."""
        batches: list[pa.RecordBatch] = []
        num_rows = size_bytes = 0
        for batch in self.table.batches(self.columns):
            batches.append(batch)
            num_rows += batch.num_rows
            size_bytes += batch.nbytes
            if num_rows >= _BLOCK_ROWS or size_bytes >= _BLOCK_BYTES:
                yield pa.Table.from_batches(batches, self.schema)
                batches, num_rows, size_bytes = [], 0, 0
        if batches:
            yield pa.Table.from_batches(batches, self.schema)


def parts_of(tables: Tables, wide: Iterable[str]) -> list[Part]:
    """All three tables; ``steps`` with these wide columns. SchemaError for one that is not wide."""
    steps = tables.steps
    kept = {*steps.columns, *wide}
    for name in wide:
        if name not in steps.wide:
            known = ", ".join(sorted(steps.wide)) or "none"
            raise SchemaError(f"wide: expected one of the wide columns ({known}), got {name!r}.")
    return [
        Part("steps", steps, [name for name in steps.schema.names if name in kept]),
        Part("episodes", tables.episodes, tables.episodes.columns),
        Part("trajectories", tables.trajectories, tables.trajectories.columns),
    ]


@contextmanager
def new_directory(target: str) -> Iterator[str]:
    """A directory that takes the place of absolute ``target`` when the block ends.

    Gone if the block fails. FileExistsError unless ``target`` is new or an empty directory.
    """
    if files.exists(target) and not (files.is_directory(target) and not files.names_in(target)):
        raise FileExistsError(
            f"{target}: expected a new path or an empty directory, got one that is there already. "
            "Choose another."
        )
    with built_directory(target) as directory:
        yield directory
