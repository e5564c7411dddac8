"""read_store: the tables of stores as data sets of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from mmbuf import files
from mmbuf.analysis import Tables
from mmbuf.arguments import whole
from mmbuf.packages import optional_package
from mmbuf.roles import Told
from mmbuf.transfer import Directory


def read_store(
    path: Directory | Sequence[Directory],
    columns: Sequence[str] | None = None,
    *,
    table: str = "steps",
    trajectories_per_block: int = 256,
    roles: Told | None = None,
) -> Any:
    """A table of stores as a ``ray.data.Dataset``; only ``columns`` are read, by Ray's workers.

    ``path``, ``columns``, ``roles`` and what they mean are those of `mmbuf.analysis.Tables`;
    ``table`` is ``"steps"`` or ``"episodes"``. A block is the rows of so many trajectories. All
    nodes must see the files. Errors as of `Tables`, here or where the data set is read.
    """
    if table not in ("steps", "episodes"):
        raise ValueError(f"table: expected 'steps' or 'episodes', got {table!r}.")
    trajectories_per_block = whole("trajectories_per_block", trajectories_per_block, 1)
    data = optional_package("ray.data", "ray")
    tables = Tables(path, roles=roles)
    names = getattr(tables, table).checked(columns)
    starts = range(0, max(1, len(tables)), trajectories_per_block)
    parts = [tables.part(start, start + trajectories_per_block) for start in starts]
    source = _source(data, [(part, table, names) for part in parts])
    return data.read_datasource(source, override_num_blocks=len(parts))


def _source(data: Any, parts: Sequence[tuple[Tables, str, list[str]]]) -> Any:
    """What Ray Data reads ``parts`` from, a block each."""
    tables, table, names = parts[0]
    schema = getattr(tables, table).schema
    schema = pa.schema([schema.field(name) for name in names])

    class Source(data.Datasource):  # type: ignore[misc]
        def get_name(self) -> str:
            return "mmbuf"

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
            return [
                data.ReadTask(partial(_read, *part), _metadata_of(*part), schema) for part in parts
            ]

    return Source()


def _read(tables: Tables, table: str, names: list[str]) -> list[Any]:
    return [getattr(tables, table).to_arrow(names)]


def _metadata_of(tables: Tables, table: str, names: list[str]) -> Any:
    entries = tables.entries
    num_rows = sum(e.num_samples for e, _ in entries) if table == "steps" else None
    metadata = optional_package("ray.data.block", "ray").BlockMetadata
    paths = [files.join(directory, entry.file) for entry, directory in entries]
    return metadata(num_rows=num_rows, size_bytes=None, input_files=paths, exec_stats=None)
