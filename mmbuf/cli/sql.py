"""`mmbuf sql`: DuckDB over the tables of stores."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from mmbuf import files
from mmbuf.cli.damage import tell_skipped
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import (
    AsJson,
    Paths,
    RoleOptions,
    plain,
    query_error,
    say,
    show_grid,
    tables_of,
)
from mmbuf.errors import MmbufError
from mmbuf.locations import location
from mmbuf.packages import optional_package
from mmbuf.terminal import printable

_BLOCK = 10_000  # rows that are fetched at once


def sql(
    paths: Paths,
    query: Annotated[str, typer.Argument(help="Over steps, episodes and trajectories.")],
    limit: Annotated[
        int, typer.Option(min=0, help="So many rows at most on the screen; 0: all.")
    ] = 50,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print it as CSV.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it into a Parquet file.")
    ] = None,
    role: RoleOptions = None,
    allow_files: Annotated[
        bool,
        typer.Option(
            "--allow-files",
            help="Let the query read and write any file, load extensions and change settings.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a store in SQL. Wide columns (images) are there where the query names them.

    The query can open no file, unless with --allow-files.
    """
    if as_csv + as_json + (parquet is not None) > 1:
        raise MmbufError("sql: expected one of --csv, --json and --parquet, got several.")
    duckdb = optional_package("duckdb", "analysis")
    stdout = sys.stdout  # the progress bar puts itself in its place
    try:
        with shown("reading") as show:
            tables = tables_of(paths, show, role=role, skip_damaged=True)
            wide = [name for name in tables.steps.wide if name in query]
            # Of a name that no query knows: what DuckDB writes beside it is nobody's.
            written = "" if parquet is None else _new_name(location("parquet", parquet))
            allowed = None if allow_files else [written] if written else []
            with tables.connect(wide, files=allowed) as connection:
                # Names that are no tables are mistakes, and no variables of this module.
                if allow_files:
                    connection.execute("set python_enable_replacements = false")
                if parquet is not None:
                    _write_parquet(connection, query, written, location("parquet", parquet))
                    tell_skipped(tables)
                    return
                found = connection.execute(query)
                if found is None:
                    raise MmbufError("sql: expected a query, got none.")
                names = [column[0] for column in found.description]
                if as_csv:
                    _write_csv(names, _rows_of(found), stdout)
                    tell_skipped(tables)
                    return
                if as_json:
                    _write_json(names, _rows_of(found), stdout)
                    tell_skipped(tables)
                    return
                rows = found.fetchmany(limit + 1) if limit else found.fetchall()
    except duckdb.Error as error:
        raise query_error("sql", error, allow_files=allow_files) from error
    show_grid(names, rows[:limit] if limit else rows)
    if limit and len(rows) > limit:
        say(f"the first {limit:,} rows; all with --limit 0")
    tell_skipped(tables)


def _rows_of(found: Any) -> Iterator[tuple[Any, ...]]:
    while block := found.fetchmany(_BLOCK):
        yield from block


def _new_name(target: str) -> str:
    """Where what is to be ``target`` is written: there itself where that is a link or a device."""
    is_kept = files.exists(target) and not files.is_file(target)
    return target if is_kept else files.temporary(target)


def _write_parquet(connection: Any, query: str, written: str, target: str) -> None:
    found = connection.sql(query)
    if found is None:
        raise MmbufError("sql: expected a query that gives rows, got one that gives none.")
    try:
        found.write_parquet(written)
        if written != target:
            files.rename(written, target)
    except BaseException:
        if written != target:
            files.unlink(written)
        raise


def _write_csv(names: list[str], rows: Iterable[tuple[Any, ...]], target: TextIO) -> None:
    """Lists as JSON; no value as nothing. Text as it is, unless a terminal would obey it."""
    writer = csv.writer(target, lineterminator="\n")
    is_obeyed = target.isatty()

    def cell(value: Any) -> Any:
        if isinstance(value, (list, tuple, dict)):
            return json.dumps(plain(value), default=str)
        return printable(value) if is_obeyed and isinstance(value, str) else value

    writer.writerow(map(cell, names))
    for row in rows:
        writer.writerow(map(cell, row))


def _write_json(names: list[str], rows: Iterable[tuple[Any, ...]], target: TextIO) -> None:
    """A list of objects, a row a line."""
    separator = "["
    for row in rows:
        line = json.dumps(plain(dict(zip(names, row, strict=True))), default=str)
        target.write(f"{separator}{line}")
        separator = ",\n "
    target.write("[]\n" if separator == "[" else "]\n")
