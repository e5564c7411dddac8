"""Stores as Parquet: ``steps.parquet``, ``episodes.parquet`` and ``trajectories.parquet``.

Types are those of `analysis.rows`; pyarrow, Polars, pandas, DuckDB and Spark read them.
"""

from __future__ import annotations

import pyarrow.parquet as pq

from mmbuf import files
from mmbuf.analysis.tables import Tables
from mmbuf.exchange.target import Exported, Part, new_directory, parts_of
from mmbuf.locations import location
from mmbuf.transfer import Directory


def to_parquet(tables: Tables, target: Directory, *, wide: tuple[str, ...] = ()) -> Exported:
    """Write the tables into the new directory ``target``; nothing is left there if it fails.

    ``steps`` has those ``wide`` columns that are named. Trajectories that their writer removes
    meanwhile are left out. FileExistsError, SchemaError; CorruptError and OSError as reading and
    writing give them.
    """
    with new_directory(location("target", target)) as directory:
        num_rows = {part.name: _write(part, directory) for part in parts_of(tables, wide)}
    return Exported(num_rows["trajectories"], num_rows["episodes"], num_rows["steps"])


def _write(part: Part, directory: str) -> int:
    """The number of rows."""
    num_rows = 0
    path = files.join(directory, f"{part.name}.parquet")
    with (
        files.created_file(path) as file,
        pq.ParquetWriter(file, part.schema, compression="zstd") as writer,
    ):
        for block in part.blocks():
            writer.write_table(block, row_group_size=max(1, block.num_rows))
            num_rows += block.num_rows
    return num_rows
