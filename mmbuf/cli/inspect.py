"""`mmbuf info`, `mmbuf ls`, `mmbuf head`, `mmbuf stats`: what is in stores, at a glance."""

from __future__ import annotations

import collections
import dataclasses
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from mmbuf.analysis import Spread, Summary, Tables, summarize
from mmbuf.cli.damage import tell_skipped
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import (
    AsJson,
    Paths,
    RoleOptions,
    console,
    disk_bytes_of,
    query_error,
    say,
    show_grid,
    show_json,
    tables_of,
    told,
    told_version,
    writer_of,
)
from mmbuf.errors import MmbufError
from mmbuf.packages import optional_package
from mmbuf.roles import DONE, TERMINATION, TRUNCATION
from mmbuf.schema import Column
from mmbuf.terminal import printable

_MAX_VERSIONS = 6
_MAX_LINE = 80
_MAX_LISTED = 50
_MAX_TEXT = 30

Trajectory = Annotated[
    str | None, typer.Option("--trajectory", metavar="ID", help="By its id or uuid.")
]


def info(paths: Paths, role: RoleOptions = None, as_json: AsJson = False) -> None:
    """Say what is in a store: counts, columns and their bytes, versions, who writes it."""
    with shown("reading") as show:
        tables = tables_of(paths, show, role=role, skip_damaged=True)
        tables.check_sizes()
        facts = _facts_of(tables)
    if as_json:
        show_json(facts)
    else:
        _show_facts(facts)
    tell_skipped(tables)


def _show_facts(facts: dict[str, Any]) -> None:
    lines = {
        "stores": "\n".join(map(printable, facts["stores"])),
        "trajectories": f"{facts['num_trajectories']:,}",
        "rows": f"{facts['num_rows']:,}",
        "episodes": told(facts["num_episodes"]),
        **({"damaged": f"{len(facts['damaged']):,} trajectories"} if facts["damaged"] else {}),
        "length": f"{decimal(facts['size_bytes'])} of files",
        "space taken": f"{decimal(facts['disk_bytes'])} on the disk",
        "formats": ", ".join(f"{name}: {n:,}" for name, n in facts["formats"].items()),
        "versions": _told_versions(facts["versions"]),
        "first added": told(facts["first_added_at"]),
        "last added": told(facts["last_added_at"]),
        "written by": "\n".join(
            printable(f"process {w['pid']} on {w['host']}: {store}")
            for store, w in facts["writers"].items()
        )
        or "nobody now",
        "roles": _told_roles(facts["roles"], facts["unclear_roles"]),
    }
    for name, text in lines.items():
        console().print(f"{name:<14}" + text.replace("\n", "\n" + " " * 14), soft_wrap=True)
    show_grid(
        ["column", "dtype", "row shape", "bytes"],
        [
            (_name_of(c), c["dtype"], str(tuple(c["row_shape"])), decimal(c["size_bytes"]))
            for c in facts["columns"]
        ],
    )


def _told_roles(taken: dict[str, Any], unclear: dict[str, list[str]]) -> str:
    """What each column was taken for, and of which it is to be said."""
    known = [
        f"{role}: {columns if isinstance(columns, str) else ', '.join(columns)}"
        for role, columns in taken.items()
    ]
    is_long = sum(map(len, known)) > _MAX_LINE
    lines = known if is_long else [", ".join(known)] if known else []
    lines += [
        f"{role} is unclear: {' or '.join(columns)}; say it with --role"
        for role, columns in unclear.items()
    ]
    return "\n".join(map(printable, lines)) or "none known; say them with --role"


def _told_versions(counts: dict[str, int]) -> str:
    """The first and the last of them, and how many trajectories each has; long names in full."""
    names = list(counts)
    versions = [printable(f"{name or '(none)'}: {counts[name]:,}") for name in _ends_of(names)]
    if len(versions) < len(names):
        more = f"... ({len(names):,} versions)"
        versions.insert(len(versions) // 2, more)
    is_long = sum(map(len, versions)) > _MAX_LINE
    return ("\n" if is_long else ", ").join(versions)


def _ends_of(names: list[str]) -> list[str]:
    """All of them, or the first and the last of many."""
    half = _MAX_VERSIONS // 2
    return names if len(names) <= _MAX_VERSIONS else [*names[:half], *names[-half:]]


def _facts_of(tables: Tables) -> dict[str, Any]:
    entries = [entry for entry, _ in tables.entries]
    num_episodes = _num_episodes_of(tables)
    times = tables.trajectories.to_arrow(["added_at"])["added_at"].drop_null()
    known = sorted(times.to_pylist())
    stores = tables.stores
    return {
        "stores": stores,
        "num_trajectories": len(entries),
        "num_rows": sum(entry.num_samples for entry in entries),
        "num_episodes": num_episodes,
        "damaged": dict(tables.skipped),
        "size_bytes": sum(entry.size_bytes for entry in entries),
        "disk_bytes": sum(disk_bytes_of(entry, directory) for entry, directory in tables.entries),
        "formats": dict(collections.Counter(entry.format for entry in entries)),
        "versions": dict(collections.Counter(entry.model_weights_id for entry in entries)),
        "first_added_at": known[0] if known else None,
        "last_added_at": known[-1] if known else None,
        "writers": {store: writer for store in stores if (writer := writer_of(store))},
        "roles": tables.roles.told(),
        "unclear_roles": tables.roles.unclear(),
        "columns": _columns_of(tables),
    }


def _num_episodes_of(tables: Tables) -> int | None:
    """None where several columns could say where they end."""
    if not {TERMINATION, TRUNCATION, DONE}.isdisjoint(tables.roles.unclear()):
        return None
    counts: list[int] = [batch.num_rows for batch in tables.episodes.batches(["env"])]
    return sum(counts)


def _columns_of(tables: Tables) -> list[dict[str, Any]]:
    found = []
    left_out = tables.left_out
    places: dict[int, dict[tuple[str, ...], int]] = {}  # of each schema
    for column in tables.union.columns if tables.union else ():
        size = 0
        for entry, _ in tables.entries:
            own = entry.schema or tables.union
            assert own is not None
            if id(own) not in places:
                places[id(own)] = {c.path: i for i, c in enumerate(own.columns)}
            position = places[id(own)].get(column.path)
            if position is None:
                continue
            part = entry.parts[position]
            table = part.table
            size += part.rows * column.row_bytes
            size += 0 if table is None else table.num_bytes + 4 * (table.num_strings + 1)
        of_some = {"num_trajectories": n} if (n := left_out.get(column.name)) is not None else {}
        found.append(_described(column) | {"size_bytes": size} | of_some)
    return found


def _name_of(column: dict[str, Any]) -> str:
    """As it is shown; with the number of trajectories where only some have it."""
    number = column.get("num_trajectories")
    return column["name"] if number is None else f"{column['name']} (of {number:,} trajectories)"


def _described(column: Column) -> dict[str, Any]:
    return {"name": column.name, "dtype": column.dtype, "row_shape": list(column.row_shape)}


def ls(
    paths: Paths,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Such as num_samples; -num_samples: largest first."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help="In SQL, such as 'num_steps > 50' (DuckDB)."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="At most so many; 0: all. 50, with --json all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List trajectories, oldest first; --json has all of their columns."""
    with shown("reading") as show:
        tables = tables_of(paths, show, skip_damaged=True)
        tables.check_sizes()
        table = tables.trajectories.to_arrow()
        if where is not None:
            table = _filtered(tables, where)
        if sort is not None:
            name = sort.removeprefix("-")
            if name not in table.schema.names:
                columns = ", ".join(table.schema.names)
                raise MmbufError(f"--sort: expected one of {columns}, got {name!r}.")
            table = table.sort_by([(name, "descending" if sort != name else "ascending")])
    total = table.num_rows
    if limit is None:
        limit = 0 if as_json else _MAX_LISTED
    table = table.slice(0, limit or total)
    if as_json:
        show_json(table.to_pylist())
    else:
        _show_list(tables, table, total, sort)
    tell_skipped(tables)


def _show_list(tables: Tables, table: Any, total: int, sort: str | None) -> None:
    hidden = _hidden(tables) - {sort and sort.removeprefix("-")}
    names = [name for name in table.schema.names if name not in hidden]
    shown_columns = {name: table[name].to_pylist() for name in names}
    versions = shown_columns["model_weights_id"]
    shown_columns["model_weights_id"] = [told_version(version) for version in versions]
    show_grid(names, zip(*shown_columns.values(), strict=True))
    if table.num_rows < total:
        say(f"{total - table.num_rows:,} more; all with --limit 0")


def _hidden(tables: Tables) -> set[str | None]:
    """Columns that the screen has no room for: what others say, or what is alike in all."""
    hidden: set[str | None] = {"uuid", "file", "num_samples"}
    if len(tables.stores) == 1:
        hidden.add("store")
    for name in ("format", "max_episode_length"):
        if len({getattr(entry, name) for entry, _ in tables.entries}) <= 1:
            hidden.add(name)
    return hidden


def _filtered(tables: Tables, where: str) -> Any:
    duckdb = optional_package("duckdb", "analysis")
    with tables.connect(files=()) as connection:
        try:
            return connection.view("trajectories").filter(where).to_arrow_table()
        except duckdb.Error as error:
            raise query_error("--where", error) from error


def head(
    paths: Paths,
    trajectory: Trajectory = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="So many rows.")] = 6,
    role: RoleOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a trajectory, by default of the oldest; of wide columns the shapes."""
    with shown("reading") as show:
        tables = tables_of(paths, show, trajectory, role)
        if not tables.entries:
            raise MmbufError(f"{paths[0]}: expected a trajectory, got an empty store.")
        entry, directory = tables.entries[0]
        steps = tables.only(entry.uuid).steps if trajectory is None else tables.steps
        names = [name for name in steps.columns if name not in ("trajectory_id", "uuid", "store")]
        first = next(steps.batches(names)).slice(0, rows)
    assert tables.schema is not None
    columns = {column.name: _described(column) for column in tables.schema.columns}
    if as_json:
        show_json(
            {
                "trajectory_id": entry.trajectory_id,
                "uuid": entry.uuid,
                "store": directory,
                "num_steps": entry.num_steps,
                "num_envs": entry.num_envs,
                "columns": list(columns.values()),
                "rows": first.to_pylist(),
            }
        )
        return
    # A line for each column: there are more of them than a screen is wide.
    lines = []
    for name in [*names, *(name for name in columns if name not in names)]:
        column = columns.get(name, {"dtype": "", "row_shape": None})
        shape = "" if column["row_shape"] is None else str(tuple(column["row_shape"]))
        values = first[name].to_pylist() if name in names else [None] * first.num_rows
        lines.append((name, column["dtype"], shape, *map(_cut, values)))
    say(
        f"{directory}: trajectory {entry.trajectory_id}, "
        f"{entry.num_steps:,} steps of {entry.num_envs:,} environments"
    )
    show_grid(["column", "dtype", "row shape", *(f"row {i}" for i in range(len(first)))], lines)


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _MAX_TEXT
    return f"{value[: _MAX_TEXT - 3]}..." if is_long else value


def stats(paths: Paths, role: RoleOptions = None, as_json: AsJson = False) -> None:
    """Read all of a store: numbers of each column, returns and lengths by model version."""
    with shown("reading") as show:
        tables = tables_of(paths, show, role=role, skip_damaged=True)
        summary = summarize(tables)
    _show_summary(summary, as_json)
    tell_skipped(tables)


def _show_summary(summary: Summary, as_json: bool) -> None:
    columns = {name: dataclasses.asdict(column) for name, column in summary.columns.items()}
    names = ("min", "mean", "std", "max", "num_nan", "num_inf")
    if as_json:
        for column in columns.values():
            del column["_squares"]
        versions = {name: dataclasses.asdict(v) for name, v in summary.versions.items()}
        show_json({"columns": columns, "versions": versions})
        return
    show_grid(
        ["column", *names],
        [(name, *(column[n] for n in names)) for name, column in columns.items()],
    )
    shown_versions = {name: summary.versions[name] for name in _ends_of(list(summary.versions))}
    num_more = len(summary.versions) - len(shown_versions)
    gap_at = _MAX_VERSIONS // 2 if num_more else None
    has_success = any(version.success_rate is not None for version in shown_versions.values())
    say("versions")
    show_grid(
        ["version", "trajectories", "episodes", "open", *(["success"] if has_success else [])],
        [
            (
                told_version(name),
                *(version.num_trajectories, version.num_episodes, version.num_open),
                *([version.success_rate] if has_success else []),
            )
            for name, version in shown_versions.items()
        ],
        gap_at,
    )
    num_nan = sum(version.num_nan_returns for version in summary.versions.values())
    for what in ("returns", "lengths"):
        but_nan = f", but of {num_nan:,} that have a reward that is NaN" if num_nan else ""
        say(f"{what} of episodes{but_nan if what == 'returns' else ''}")
        show_grid(
            ["version", *(field.name for field in dataclasses.fields(Spread))],
            [
                (told_version(name), *map(_rounded, dataclasses.astuple(getattr(version, what))))
                for name, version in shown_versions.items()
            ],
            gap_at,
        )
    if num_more:
        say(f"{num_more:,} more versions; --json has all")


def _rounded(value: float | None) -> float | None:
    """To four digits: six of these stand side by side."""
    return None if value is None else float(f"{value:.4g}")
