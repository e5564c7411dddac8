"""What the commands that show a store share: their arguments, tables on a screen, and JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from mmbuf import files
from mmbuf.analysis import Tables
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError, MmbufError
from mmbuf.roles import parsed
from mmbuf.terminal import printable

Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help="Stores, checkpoints, directories of RLinf's, or a pattern such as 'run/rank_*'.",
    ),
]
RoleOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="NAME=COLUMN",
        help="What a column is: reward, termination, truncation, done, next.COLUMN; repeat it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]

_MAX_NAME = 20
_NAME_ENDS = 8  # of a longer one, from its beginning and from its end
_MAX_SHOWN = 8  # numbers of a vector, and a longer one's beginning
_WIDE_ENOUGH = 10_000  # of a screen that is none


def tables_of(
    paths: Sequence[Path],
    show: Callable[[int, int], None],
    trajectory: str | None = None,
    role: Sequence[str] | None = None,
    *,
    skip_damaged: bool = False,
) -> Tables:
    """The tables of the stores, or of one trajectory by its id or uuid; ``show`` is a progress."""
    tables = Tables(
        paths if len(paths) > 1 else paths[0],
        on_progress=show,
        roles=parsed(role or ()),
        columns="common",
        skip_damaged=skip_damaged and trajectory is None,
    )
    if trajectory is None:
        return tables
    is_id = trajectory.isascii() and trajectory.isdigit() and len(trajectory) < 20
    try:
        return tables.only(int(trajectory) if is_id else trajectory)
    except KeyError as error:
        raise MmbufError(str(error.args[0])) from error


def writer_of(directory: str) -> dict[str, Any] | None:
    """Who holds the store now."""
    path = files.join(directory, files.WRITER_LOCK)
    try:
        is_held = files.exists(path) and files.is_locked(path)
    except (CorruptError, OSError):  # no file, a file system without locks, a store that is gone
        return None
    pid, host = files.last_holder(path) or (None, None)
    return {"pid": pid, "host": host} if is_held else None


def disk_bytes_of(entry: Entry, directory: str) -> int:
    """Bytes that a trajectory's file takes on the disk; 0 where it cannot be told."""
    try:
        return files.disk_bytes_of(files.join(directory, entry.file))
    except (CorruptError, OSError):  # removed meanwhile; or for `mmbuf verify` to name
        return 0


class QueryError(MmbufError):
    """What DuckDB says of a query. It points into it, so its lines stay lines, but indented."""

    def __str__(self) -> str:
        return "\n    ".join(printable(line) for line in str(self.args[0]).split("\n"))


def query_error(where: str, error: Exception, *, allow_files: bool = False) -> QueryError:
    """The error that tells of one of DuckDB's."""
    remedy, kind = "", type(error).__name__
    if not allow_files and (kind == "PermissionException" or "has been locked" in str(error)):
        remedy = "\nA query may open files and change settings with: mmbuf sql --allow-files"
    elif not allow_files and kind == "OutOfMemoryException":
        remedy = "\nA query may put into files what memory does not hold: mmbuf sql --allow-files"
    return QueryError(f"{where}: {error}{remedy}")


def say(text: str) -> None:
    """Print a line."""
    print(printable(text))


def show_json(value: Any) -> None:
    """Print as JSON; what is no number in it is null, and times are text."""
    print(json.dumps(plain(value), default=str))


def plain(value: Any) -> Any:
    """``value`` as JSON has it, all the way down."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def show_grid(
    headers: Iterable[str], rows: Iterable[Sequence[Any]], gap_at: int | None = None
) -> None:
    """Print a table on the screen: numbers to the right. Elsewhere its lines are as long as needed.

    ``gap_at`` is where rows were left out. Text is no markup: a path may hold brackets.
    """
    cells = [list(row) for row in rows]
    grid = Grid()
    for position, header in enumerate(headers):
        column = [row[position] for row in cells if row[position] is not None]
        is_number = bool(column) and all(isinstance(value, (int, float)) for value in column)
        grid.add_column(
            printable(header), justify="right" if is_number else "left", overflow="fold"
        )
    for position, row in enumerate(cells):
        if position == gap_at:
            grid.add_row("...")
        grid.add_row(*(printable(told(value)) for value in row))
    console().print(grid)


def console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE_ENOUGH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def told_version(model_weights_id: str) -> str:
    """The name of a version in few characters; ``--json`` has all of it."""
    name = model_weights_id or "(none)"
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:_NAME_ENDS]}...{name[-_NAME_ENDS:]}"


def told(value: Any) -> str:
    """A value in few characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, (list, tuple)):
        inside = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in value[:_MAX_SHOWN]]
        more = [f"... {len(value):,}"] if len(value) > _MAX_SHOWN else []
        return f"[{', '.join(inside + more)}]"
    return str(value)
