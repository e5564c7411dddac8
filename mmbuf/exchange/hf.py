"""Stores as Hugging Face data sets: a `datasets.DatasetDict` that ``load_from_disk`` opens.

Its parts are ``steps``, ``episodes`` and ``trajectories``. Types are those of `analysis.rows`, but
text is plain strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from mmbuf import files
from mmbuf.analysis.tables import Tables
from mmbuf.errors import MmbufError
from mmbuf.exchange.target import Exported, Part, new_directory, parts_of
from mmbuf.locations import location
from mmbuf.packages import optional_package
from mmbuf.transfer import Directory


def to_hf(tables: Tables, target: Directory, *, wide: tuple[str, ...] = ()) -> Exported:
    """Write the tables into the new directory ``target``; see `parquet.to_parquet`.

    In bounded memory, and for a while twice the space on the disk. MmbufError where `datasets` is
    not installed, and for an empty store: it could not load what it had saved.
    """
    datasets = optional_package("datasets", "exchange")
    if not len(tables):
        raise MmbufError(f"{tables.stores[0]}: expected a trajectory, got an empty store.")
    parts = parts_of(tables, wide)
    with new_directory(location("target", target)) as directory, _quiet(datasets):
        streams = {part.name: files.join(directory, f"{part.name}.stream") for part in parts}
        for part in parts:
            _write_stream(part, streams[part.name])
        found = {name: datasets.Dataset.from_file(path) for name, path in streams.items()}
        datasets.DatasetDict(found).save_to_disk(directory)
        num_rows = {name: part.num_rows for name, part in found.items()}
        for path in streams.values():
            files.unlink(path)
    return Exported(num_rows["trajectories"], num_rows["episodes"], num_rows["steps"])


def _write_stream(part: Part, path: str) -> None:
    schema = pa.schema([pa.field(field.name, _kind_of(field.type)) for field in part.schema])
    with files.created_file(path) as file, pa.ipc.new_stream(file, schema) as writer:
        for block in part.blocks():
            writer.write_table(block.cast(schema))


def _kind_of(kind: Any) -> Any:
    """`datasets` knows no dictionaries of strings."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars of its own."""
    was_loud = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_loud:
            datasets.enable_progress_bars()
