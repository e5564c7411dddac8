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
import dataclasses
import errno
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from mmbuf import storage, vm
from mmbuf.analysis.episodes import Episodes, fact_columns, success_path
from mmbuf.analysis.rows import BlockRows, Rows, TrajectoryRows, field_of, is_wide
from mmbuf.analysis.table import Table
from mmbuf.columns import SAME, common, is_common, union_of
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError
from mmbuf.files import directory_of, join, name_of
from mmbuf.locations import location, locations
from mmbuf.packages import optional_package
from mmbuf.roles import Roles, Told, checked
from mmbuf.schema import Array, Path, Schema
from mmbuf.stores import Stores
from mmbuf.transfer import Directory
from mmbuf.window import Item

_Read = TypeVar("_Read")
_Paths = Callable[[Roles], Sequence[Path | None]]  # which columns, by their roles
_Kind = Any  # of Arrow

_MADE = ("", "tmp_")  # before the name of a file that DuckDB writes
_BLOCK = 4096  # trajectories in one record batch at the most
_FAULTS = {  # of a file, of which the process is not to blame
    *(errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
    *(errno.ESTALE, errno.ENODATA, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)),
}


class _Column(NamedTuple):
    """A column of a table: its type, and what makes it, of which columns of the store."""

    kind: _Kind
    make: Callable[[Episodes], Any]
    paths: _Paths = lambda roles: ()


class Tables:
    """The tables of one store, a list of stores, or a pattern such as ``run/rank_*``.

    A store may be live, a checkpoint or a directory of RLinf's, in any format. No lock is taken and
    nothing is written. What is added later is not seen; trajectories that their writer removes
    meanwhile are left out. Opening reads journals and no data file.

    With ``skip_damaged`` a trajectory whose file is missing, damaged or cannot be read is left out,
    and ``skipped`` has the file and what is wrong with it as soon as it was read, or looked at by
    `check_sizes`. Only `trajectories`, which reads no file, has it still.

    ``on_progress(done, total)`` is told of each trajectory that a scan has come to. ``roles`` says
    which columns are reward and flags where their names do not, see `mmbuf.roles`. ``columns`` is
    as in `TrajectoryReplayBuffer`: "common" takes trajectories with several schemas, and the tables
    have the columns that all of them have.

    FileNotFoundError where there is no store, SchemaError where two do not fit together.
    Thread-safe.
    """

    def __init__(
        self,
        path: Directory | Sequence[Directory],
        *,
        skip_damaged: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        roles: Told | None = None,
        columns: str = SAME,
    ) -> None:
        said = checked(roles)
        self._is_common = is_common(columns)
        self._paths, self._is_list = locations("path", path)
        self._on_progress = on_progress
        self._skips_damaged = skip_damaged
        self.skipped: dict[str, str] = {}
        stores, self._items = self._open()
        self._said = said
        self.union: Schema | None = stores.schema
        self._take_columns()
        self._has_stores = not stores.is_single

    def _open(self) -> tuple[Stores, list[Item]]:
        damage: list[CorruptError] | None = [] if self._skips_damaged else None
        stores = Stores(
            self._paths,
            self._is_list,
            None,
            follow=False,
            is_common=self._is_common,
            damage=damage,
        )
        items = list(stores.open().come.values())
        self.skipped.update((error.path, error.what) for error in damage or ())
        if not stores.num_stores:
            raise FileNotFoundError(f"{', '.join(self._paths)}: expected a store, got none.")
        if stores.schema is not None:
            storage.check_entries(stores.schema, [(entry, where) for _, entry, where in items])
        return stores, items

    def _take_columns(self) -> None:
        """Have the columns that all trajectories have."""
        self.schema: Schema | None = self.union
        if self.union is not None and self._items:
            found = {id(entry.schema): entry.schema or self.union for _, entry, _ in self._items}
            own = list(dict.fromkeys(found.values()))
            self.schema, self.union = common(self.union, own), union_of(own)
        self.roles = Roles(self.schema, self._said, union=self.union)

    @property
    def left_out(self) -> dict[str, int]:
        """The columns that only some trajectories have, and how many these are."""
        if self.union is None or self.schema == self.union:
            return {}
        numbers = Counter(id(entry.schema) for _, entry, _ in self._items)
        paths = {id(e.schema): (e.schema or self.union).paths for _, e, _ in self._items}
        shown = self.schema.paths if self.schema is not None else ()
        return {
            column.name: sum(n for of, n in numbers.items() if column.path in paths[of])
            for column in self.union.columns
            if column.path not in shown
        }

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
            ids = [item[1].trajectory_id for item in self._items]
            known = f"ids from {min(ids)} to {max(ids)}" if ids else "none"
            remedy = "All are listed by: mmbuf ls"
            if found:
                known, remedy = f"{len(found)} of this id", f"Give the uuid. {remedy} --json"
            raise KeyError(
                f"trajectory {trajectory_id}: expected the id or uuid of one trajectory, "
                f"got another; there are {known}. {remedy}"
            )
        return self._of(found)

    def part(self, start: int, stop: int) -> Tables:
        """The tables of the trajectories in the places ``[start, stop)``. It can be pickled."""
        return self._of(self._items[start:stop])

    def _of(self, items: list[Item]) -> Tables:
        part = copy.copy(self)
        part._items = items
        part._take_columns()
        return part

    @property
    def steps(self) -> Table:
        """One row per chunk: where it is, and every column of the store under its dotted name.

        ``trajectory_id``, ``uuid``, ``t``, ``env``, ``episode`` (the number of its episode among
        those of this environment in this trajectory), of several stores ``store``. A column of the
        store that has such a name is called ``name_``. Types as in `analysis.rows`; columns of more
        than 64 numbers a row are wide, and there only if they are named. A batch is of one
        trajectory, or of several small ones: of at most 64 KiB in each column.
        """
        columns = self._identity(lambda of: of.rows.owners) | {
            "t": _Column(pa.int32(), lambda of: of.rows.grid.steps),
            "env": _Column(pa.int32(), lambda of: of.rows.grid.envs),
            "episode": _Column(pa.int32(), lambda of: of.numbers, lambda roles: roles.ends),
        }
        wide = []
        for position, column in enumerate(self.schema.columns if self.schema else ()):
            if not column.row_bytes:
                continue
            name = column.name
            while name in columns:
                name += "_"
            make = partial(_array, position)
            paths = partial(_paths, [column.path])
            columns[name] = _Column(field_of(column).type, make, paths)
            if is_wide(column):
                wide.append(name)
        return self._table(columns, wide)

    @property
    def episodes(self) -> Table:
        """One row per episode, of each trajectory by environment and time.

        ``trajectory_id``, ``uuid``, ``env``, ``episode`` as in `steps`; ``start_step`` to
        ``end_step`` (half-open) and ``length``; ``episode_return``, the sum of all rewards,
        null where there are none; ``ended_by``: "termination", "truncation", "open" at the
        trajectory's end, or "done" where the flags do not say which. ``is_success``: whether the
        column of that name is set in any step, where there is one. Columns of the store below
        ``episode`` (seed, initial state, ...) have one value for each: that of its first row, under
        the name below ``episode``, or ``name_``. Batches as those of `steps`.
        """
        columns = self._identity(lambda of: of.owners) | {
            "env": _Column(pa.int32(), lambda of: of.envs),
            "episode": _Column(pa.int32(), lambda of: of.ordinals),
            "start_step": _Column(pa.int32(), lambda of: of.start_steps),
            "end_step": _Column(pa.int32(), lambda of: of.end_steps),
            "length": _Column(pa.int32(), lambda of: of.lengths),
            "episode_return": _Column(pa.float64(), _returns, lambda roles: [roles.reward]),
            "ended_by": _Column(pa.utf8(), lambda of: of.ended_by, _reasons),
        }
        success = success_path(self.schema)
        if success is not None:
            columns["is_success"] = _Column(
                pa.bool_(), lambda of: of.successes, partial(_paths, [success])
            )
        wide = []
        for column in fact_columns(self.schema):
            path = column.path
            name = dataclasses.replace(column, path=path[1:]).name
            while name in columns:
                name += "_"
            columns[name] = _Column(
                field_of(column).type, partial(_first, path), partial(_paths, [path])
            )
            if is_wide(column):
                wide.append(name)
        return self._table(columns, wide, lambda roles: roles.ends)

    @property
    def trajectories(self) -> Table:
        """One row per trajectory, oldest first, from the index. ``added_at`` is in UTC, or null."""
        return Table(_TRAJECTORIES, (), self._scan_trajectories)

    def connect(self, wide: Iterable[str] = (), *, files: Sequence[Directory] | None = None) -> Any:
        """A new DuckDB connection with ``steps``, ``episodes`` and ``trajectories``.

        A query reads the columns that it speaks of, and no others; ``wide`` are those wide ones
        that ``steps`` is to have. MmbufError where DuckDB is not installed.

        It is the caller's own, as from ``duckdb.connect()``: its SQL can read and write all files
        that the process can, and sees variables of Python that hold tables. For queries that
        others wrote give ``files``, those that it may open (and beside each the one that DuckDB
        writes first, ``tmp_`` before its name), or ``()``: then it can open no others (temporary
        ones neither, so all has to fit into memory), load no extension, see no variable and change
        no setting.
        """
        connection = optional_package("duckdb", "analysis").connect()
        self.steps.register(connection, "steps", wide)
        self.episodes.register(connection, "episodes")
        self.trajectories.register(connection, "trajectories")
        if files is not None:
            _lock_up(connection, [location("files", name) for name in files])
        return connection

    def read_each(self, read: Callable[[TrajectoryRows], _Read]) -> Iterator[_Read]:
        """What ``read`` gives of each trajectory, oldest first; its file is open meanwhile.

        Trajectories that are gone from their store by then are passed over.
        """
        return self._read_some(read, enumerate(self._items, 1))

    def _read_some(
        self, read: Callable[[TrajectoryRows], _Read], numbered: Iterable[tuple[int, Item]]
    ) -> Iterator[_Read]:
        """As `read_each`, of some trajectories, with their numbers from 1."""
        for done, item in numbered:
            yield from self._read_one(read, item)
            if self._on_progress is not None:
                self._on_progress(done, len(self))

    def _read_one(self, read: Callable[[TrajectoryRows], _Read], item: Item | None) -> list[_Read]:
        """What ``read`` gives of a trajectory, by the name it has now; nothing if it is gone."""
        assert self.schema is not None
        while item is not None:
            _, entry, directory = item
            path = join(directory, entry.file)
            if path in self.skipped:
                return []
            try:
                with ExitStack() as stack:
                    return [read(TrajectoryRows(entry, directory, self.schema, stack))]
            except (OSError, CorruptError) as error:
                is_gone = isinstance(error, (FileNotFoundError, CorruptError))
                now = self._as_listed(item) if is_gone else item
                if now == item and not self._skip(path, error):
                    raise
                item = now
        return []

    def _skip(self, path: str, error: OSError | CorruptError) -> bool:
        """Whether a file is left out for this; what is no fault of the file's is raised."""
        if not self._skips_damaged:
            return False
        if isinstance(error, CorruptError):
            self.skipped[path] = error.what if error.path == path else str(error)
        elif isinstance(error, FileNotFoundError):
            self.skipped[path] = "expected a file, got none."
        elif error.errno in _FAULTS:
            self.skipped[path] = f"could not be read: {error.strerror}."
        return path in self.skipped

    def check_sizes(self) -> None:
        """Look for each file: whether it is there and as long as the index says. None is opened."""
        for item in self._items:
            _, entry, directory = item
            path = join(directory, entry.file)
            try:
                size = storage.size_of(path, entry)
                if size != entry.size_bytes:
                    what = f"expected {entry.size_bytes} bytes, got {size}."
                    raise CorruptError(path, what)
            except (OSError, CorruptError) as error:
                if self._as_listed(item) == item and not self._skip(path, error):
                    raise

    def _as_listed(self, item: Item) -> Item | None:
        """What the stores say of this trajectory now: a save may have given it another file."""
        key, entry, _ = item
        items = self._open()[1]
        return next((now for now in items if now[0] == key and now[1].uuid == entry.uuid), None)

    def _identity(self, owners: Callable[[Episodes], Array]) -> dict[str, _Column]:
        """What all rows of a trajectory share; ``owners`` are the places of their trajectories."""

        def column(kind: _Kind, values_of: Callable[[Rows], Sequence[Any]]) -> _Column:
            return _Column(kind, lambda of: pa.array(values_of(of.rows), kind).take(owners(of)))

        columns = {
            "trajectory_id": column(
                pa.int64(), lambda rows: [e.trajectory_id for e in rows.entries]
            ),
            "uuid": column(pa.utf8(), lambda rows: [e.uuid for e in rows.entries]),
        }
        if self._has_stores:
            columns["store"] = column(pa.utf8(), lambda rows: list(map(_as_utf8, rows.directories)))
        return columns

    def _table(
        self,
        columns: dict[str, _Column],
        wide: Iterable[str],
        always: _Paths = lambda roles: (),
    ) -> Table:
        """``always`` are columns of the store that each of them is made of."""
        schema = pa.schema([pa.field(name, column.kind) for name, column in columns.items()])

        def scan(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
            made = [columns[name] for name in names]
            kinds = pa.schema([schema.field(name) for name in names])
            roles = self.roles
            paths = itertools.chain(always(roles), *(column.paths(roles) for column in made))
            for rows in self._blocks({path for path in paths if path is not None}):
                of = Episodes(rows, roles)
                arrays = [_as_array(column.make(of), column.kind) for column in made]
                yield pa.record_batch(arrays, schema=kinds)

        return Table(schema, wide, scan)

    def _blocks(self, paths: Set[Path]) -> Iterator[BlockRows]:
        """The rows of these columns, where there are such: those of small trajectories together."""
        if self.schema is None:
            return
        columns = self.schema.columns
        positions = [i for i, column in enumerate(columns) if column.path in paths]
        row_bytes = max((columns[i].row_bytes for i in positions), default=0)
        # None is mapped of a trajectory that shares its block: so no mapped column is copied.
        max_rows = vm.MAP_THRESHOLD // max(1, row_bytes)
        for numbered in _together(self._items, max_rows):
            pieces = list(self._read_some(lambda rows: rows.read(positions), numbered))
            if pieces:
                yield BlockRows(self.schema, positions, pieces)

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
    facts["model_weights_id"] = _as_utf8(entry.model_weights_id)
    # RLinf's files do not say when they were added.
    added_at = datetime.fromtimestamp(entry.added_at, timezone.utc) if entry.added_at else None
    return facts | {"store": _as_utf8(directory), "added_at": added_at}


def _as_utf8(text: str) -> str:
    """``text`` as Arrow can hold it: what UTF-8 cannot, ids and paths may have, is escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _lock_up(connection: Any, files: Sequence[str]) -> None:
    """See that SQL can open none but these absolute ``files``, and that it stays so."""
    # Of a file that is there DuckDB writes another one first, and puts it in its place.
    names = [join(directory_of(file), prefix + name_of(file)) for file in files for prefix in _MADE]
    literals = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    for setting in (
        "python_enable_replacements = false",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "temp_directory = ''",
        "allowed_directories = []",  # the temporary one was among them
        f"allowed_paths = [{literals}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"set {setting}")


def _together(items: Iterable[Item], max_rows: int) -> Iterator[list[tuple[int, Item]]]:
    """Items and their numbers, from 1: one after the other as many as have ``max_rows``, or one."""
    block: list[tuple[int, Item]] = []
    num_rows = 0
    for number, item in enumerate(items, 1):
        num_samples = item[1].num_samples
        if block and (num_rows + num_samples > max_rows or len(block) == _BLOCK):
            yield block
            block, num_rows = [], 0
        block.append((number, item))
        num_rows += num_samples
    if block:
        yield block


def _paths(paths: Sequence[Path], roles: Roles) -> Sequence[Path]:
    return paths


def _reasons(roles: Roles) -> Sequence[Path | None]:
    return [roles.termination, roles.truncation]


def _array(position: int, of: Episodes) -> pa.Array:
    return of.rows.array(position)


def _first(path: Path, of: Episodes) -> pa.Array:
    return of.firsts(path)


def _returns(of: Episodes) -> Any:
    return pa.nulls(len(of), pa.float64()) if of.returns is None else of.returns


def _as_array(values: Any, kind: _Kind) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, kind)
