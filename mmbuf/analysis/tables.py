"""Tables: the steps, episodes and trajectories of stores.

========================  ============================================================
`Tables.steps`            one row per chunk, in row order (``t * B + b``)
`Tables.episodes`         one row per episode
`Tables.trajectories`     one row per trajectory: what the index says, no file is read
========================  ============================================================

They join by ``uuid``, ``env`` and ``episode``; in one store also by ``trajectory_id``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from mmbuf import storage
from mmbuf.analysis.episodes import Episodes, success_path
from mmbuf.analysis.rows import TrajectoryRows, field_of, is_wide
from mmbuf.analysis.table import Table
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError
from mmbuf.files import absolute
from mmbuf.packages import optional_package
from mmbuf.schema import Array, Schema
from mmbuf.stores import Stores
from mmbuf.transfer import Directory
from mmbuf.window import Item

_Read = TypeVar("_Read")
_Kind = Any  # of Arrow

# The columns of a table, by name: their type, and what makes them of one trajectory.
_Columns = dict[str, tuple[_Kind, Callable[[Episodes], Any]]]

_BLOCK = 4096  # trajectories in one record batch of their own table


class Tables:
    """The tables of one store, a list of stores, or a pattern such as ``run/rank_*``.

    A store may be live, a checkpoint or a directory of RLinf's, in any format. No lock is taken and
    nothing is written. What is added later is not seen; trajectories that their writer removes
    meanwhile are left out. Opening reads journals and no data file.

    ``on_progress(done, total)`` is told of each trajectory that a scan has come to.

    FileNotFoundError where there is no store, SchemaError where two do not fit together.
    Thread-safe.
    """

    def __init__(
        self,
        path: Directory | Sequence[Directory],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        is_list = isinstance(path, (list, tuple))
        paths: Sequence[Any] = path if is_list else [path]  # type: ignore[assignment]
        self._paths = [absolute(p) for p in paths]
        self._is_list = is_list
        self._on_progress = on_progress
        stores, self._items = self._open()
        self.schema: Schema | None = stores.schema
        self._has_stores = not stores.is_single

    def _open(self) -> tuple[Stores, list[Item]]:
        stores = Stores(self._paths, self._is_list, None, follow=False)
        items = list(stores.open().come.values())
        if not stores.num_stores:
            raise FileNotFoundError(f"{', '.join(self._paths)}: expected a store, got none.")
        if stores.schema is not None:
            storage.check_entries(stores.schema, [(entry, where) for _, entry, where in items])
        return stores, items

    def __len__(self) -> int:
        """Number of trajectories."""
        return len(self._items)

    @property
    def stores(self) -> list[str]:
        """The directories of stores with trajectories, in the order of their first; else paths."""
        return list(dict.fromkeys(directory for _, _, directory in self._items)) or self._paths

    @property
    def entries(self) -> list[tuple[Entry, str]]:
        """What the index says of each trajectory, and the directory of its store; oldest first."""
        return [(entry, directory) for _, entry, directory in self._items]

    def only(self, trajectory_id: int | str) -> Tables:
        """The tables of one trajectory, by its id or its uuid. KeyError unless there is just one.

        Of several stores each may have one of the id.
        """
        names = [(item[1].trajectory_id, item[1].uuid) for item in self._items]
        found = [i for i, ids in zip(self._items, names, strict=True) if trajectory_id in ids]
        if len(found) != 1:
            raise KeyError(
                f"trajectory {trajectory_id}: expected the id or uuid of one trajectory, "
                f"got one of {len(found)}."
            )
        part = copy.copy(self)
        part._items = found
        return part

    @property
    def steps(self) -> Table:
        """One row per chunk: where it is, and every column of the store under its dotted name.

        ``trajectory_id``, ``uuid``, ``t``, ``env``, ``episode`` (the number of its episode among
        those of this environment in this trajectory), of several stores ``store``. A column of the
        store that has such a name is called ``name_``. Types as in `analysis.rows`; columns of more
        than 64 numbers a row are wide, and there only if they are named. A batch per trajectory.
        """
        columns = self._identity() | {
            "t": (pa.int32(), lambda of: _steps(of.rows.entry)),
            "env": (pa.int32(), lambda of: _envs(of.rows.entry)),
            "episode": (pa.int32(), lambda of: of.numbers),
        }
        wide = []
        for position, column in enumerate(self.schema.columns if self.schema else ()):
            if not column.row_bytes:
                continue
            name = column.name
            while name in columns:
                name += "_"
            columns[name] = (field_of(column).type, partial(_array, position))
            if is_wide(column):
                wide.append(name)
        return self._table(columns, wide, lambda of: of.rows.entry.num_samples)

    @property
    def episodes(self) -> Table:
        """One row per episode, of each trajectory by environment and time. A batch per trajectory.

        ``trajectory_id``, ``uuid``, ``env``, ``episode`` as in `steps`; ``start_step`` to
        ``end_step`` (half-open) and ``length``; ``episode_return``, the sum of all ``rewards``,
        null where there are none; ``ended_by``: "termination", "truncation", "open" at the
        trajectory's end, or "done" where the flags do not say which. ``is_success``: whether the
        column of that name is set in any step, where there is one.
        """
        columns = self._identity() | {
            "env": (pa.int32(), lambda of: of.envs),
            "episode": (pa.int32(), lambda of: of.ordinals),
            "start_step": (pa.int32(), lambda of: of.start_steps),
            "end_step": (pa.int32(), lambda of: of.end_steps),
            "length": (pa.int32(), lambda of: of.lengths),
            "episode_return": (pa.float64(), lambda of: of.returns),
            "ended_by": (pa.utf8(), lambda of: of.ended_by),
        }
        if success_path(self.schema) is not None:
            columns["is_success"] = (pa.bool_(), lambda of: of.successes)
        return self._table(columns, (), len)

    @property
    def trajectories(self) -> Table:
        """One row per trajectory, oldest first, from the index. ``added_at`` is in UTC, or null."""
        return Table(_TRAJECTORIES, (), self._scan_trajectories)

    def connect(self, wide: Iterable[str] = ()) -> Any:
        """A new DuckDB connection with ``steps``, ``episodes`` and ``trajectories``.

        A query reads the columns that it speaks of, and no others; ``wide`` are those wide ones
        that ``steps`` is to have. MmbufError where DuckDB is not installed.
        """
        connection = optional_package("duckdb", "analysis").connect()
        self.steps.register(connection, "steps", wide)
        self.episodes.register(connection, "episodes")
        self.trajectories.register(connection, "trajectories")
        return connection

    def read_each(self, read: Callable[[TrajectoryRows], _Read]) -> Iterator[_Read]:
        """What ``read`` gives of each trajectory, oldest first; its file is open meanwhile.

        Trajectories that are gone from their store by then are passed over.
        """
        for done, item in enumerate(self._items, 1):
            _, entry, directory = item
            assert self.schema is not None
            try:
                with ExitStack() as stack:
                    found = read(TrajectoryRows(entry, directory, self.schema, stack))
            except (FileNotFoundError, CorruptError):
                if self._is_listed(item):
                    raise
            else:
                yield found
            if self._on_progress is not None:
                self._on_progress(done, len(self))

    def _is_listed(self, item: Item) -> bool:
        """Whether the stores have this trajectory now."""
        key, entry, _ = item
        return any(key == k and entry.uuid == e.uuid for k, e, _ in self._open()[1])

    def _identity(self) -> _Columns:
        columns: _Columns = {
            "trajectory_id": (pa.int64(), lambda of: of.rows.entry.trajectory_id),
            "uuid": (pa.utf8(), lambda of: of.rows.entry.uuid),
        }
        if self._has_stores:
            columns["store"] = (pa.utf8(), lambda of: of.rows.directory)
        return columns

    def _table(
        self, columns: _Columns, wide: Iterable[str], count: Callable[[Episodes], int]
    ) -> Table:
        """``count`` says how many rows there are of a trajectory."""
        schema = pa.schema([pa.field(name, kind) for name, (kind, _) in columns.items()])

        def read(names: Sequence[str], rows: TrajectoryRows) -> pa.RecordBatch:
            of = Episodes(rows)
            made = [columns[name][1](of) for name in names]
            arrays = [
                _as_array(values, columns[name][0], count(of))
                for name, values in zip(names, made, strict=True)
            ]
            return pa.record_batch(arrays, schema=pa.schema([schema.field(n) for n in names]))

        return Table(schema, wide, lambda names: self.read_each(partial(read, names)))

    def _scan_trajectories(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        items = iter(self._items)
        while block := list(itertools.islice(items, _BLOCK)):
            rows = [_facts_of(entry, directory) for _, entry, directory in block]
            yield pa.RecordBatch.from_pylist(rows, schema=_TRAJECTORIES).select(names)


_TRAJECTORIES = pa.schema(
    {
        "trajectory_id": pa.int64(),
        "uuid": pa.utf8(),
        "store": pa.utf8(),
        "num_steps": pa.int64(),
        "num_envs": pa.int64(),
        "num_samples": pa.int64(),
        "size_bytes": pa.int64(),
        "format": pa.utf8(),
        "model_weights_id": pa.utf8(),
        "max_episode_length": pa.int64(),
        "added_at": pa.timestamp("us", tz="UTC"),
        "file": pa.utf8(),
    }
)


def _facts_of(entry: Entry, directory: str) -> dict[str, Any]:
    facts = {name: getattr(entry, name, None) for name in _TRAJECTORIES.names}
    # RLinf's files do not say when they were added.
    added_at = datetime.fromtimestamp(entry.added_at, timezone.utc) if entry.added_at else None
    return facts | {"store": directory, "added_at": added_at}


def _steps(entry: Entry) -> Array:
    return np.repeat(np.arange(entry.num_steps, dtype=np.int32), entry.num_envs)


def _envs(entry: Entry) -> Array:
    return np.tile(np.arange(entry.num_envs, dtype=np.int32), entry.num_steps)


def _array(position: int, of: Episodes) -> pa.Array:
    return of.rows.array(position)


def _as_array(values: Any, kind: _Kind, count: int) -> pa.Array:
    """A column as it was made: Arrow's own, NumPy's, None, or one value for all."""
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ndarray):
        return pa.array(values, kind)
    return pa.repeat(pa.scalar(values, kind), count)
