"""Columns that come and go: what trajectories of one list may have, and what a batch has of it.

``columns="same"``
    all trajectories of a list have the columns of the first one.
``columns="common"``
    a trajectory may lack columns of those before it, and bring new ones. A batch has the columns
    that every trajectory of the window has. Files keep what came; nothing is filled in.

In both a column has one dtype and one row shape, whoever has it. A list's *union* are the columns
of all of its trajectories: those of the first, then what others brought, in the order in which it
came. So a column's place in it never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmbuf.arguments import text
from mmbuf.errors import SchemaError
from mmbuf.schema import Schema, measure, paths_of

SAME, COMMON = "same", "common"
REMEDY = 'Open it with columns="common" where trajectories may lack columns or bring others.'


def is_common(columns: str) -> bool:
    """Whether ``columns`` is "common"; TypeError or ValueError unless it is that or "same"."""
    columns = text("columns", columns)
    if columns not in (SAME, COMMON):
        raise ValueError(f"columns: expected {SAME!r} or {COMMON!r}, got {columns!r}.")
    return columns == COMMON


def union(known: Schema | None, other: Schema) -> Schema:
    """``known`` with what ``other`` has beside it; ``known`` itself where that is nothing.

    SchemaError for a column that both have with another dtype or row shape, or as another kind.
    """
    if known is None or known is other:
        return other
    places = {column.path: column for column in known.columns}
    for column in other.columns:
        expected = places.get(column.path, column)
        if expected != column:
            raise SchemaError(
                f"column {column.name!r}: expected {expected}, as in other trajectories, "
                f"got {column}."
            )
    new = [column for column in other.columns if column.path not in places]
    return Schema((*known.columns, *new)) if new else known


def union_of(schemas: Iterable[Schema]) -> Schema | None:
    """The union of all; None of none."""
    found = None
    for schema in schemas:
        found = union(found, schema)
    return found


def common(known: Schema, schemas: Sequence[Schema]) -> Schema:
    """What all of ``schemas`` have, in the order of ``known``; the schema itself of a single one.

    ``known`` is their union, or more than that.
    """
    if len(schemas) == 1:
        return schemas[0]
    kept = set(known.columns).intersection(*(schema.columns for schema in schemas))
    return Schema(column for column in known.columns if column in kept)


def own(fields: Mapping[str, Any], known: Schema, schemas: Iterable[Schema]) -> Schema:
    """The schema by which to measure a trajectory among others, whose schemas and union these are.

    One of ``schemas`` where there is such. SchemaError where it does not fit to them.
    """
    paths = paths_of(fields)
    for schema in schemas:
        if schema.paths == paths:
            return schema
    # Measured by itself first: so what can be no column is refused here.
    columns = union(known, measure(fields).schema).columns
    return Schema(column for column in columns if column.path in paths)


def check_alike(schemas: Iterable[tuple[str, Schema]]) -> None:
    """SchemaError where trajectories, each a file and its schema, have several schemas."""
    first: Schema | None = None
    for file, schema in schemas:
        if first is None or schema is first:
            first = schema
        elif schema != first:
            what = difference(first, schema, "those before it")
            raise SchemaError(
                f"{file}: {what} {REMEDY if first.paths != schema.paths else ''}".rstrip()
            )


def difference(expected: Schema, got: Schema, where: str) -> str:
    """What keeps two schemas that differ from being one; the first is that of ``where``."""
    columns = {column.path: column for column in got.columns}
    for column in expected.columns:
        other = columns.pop(column.path, None)
        if other != column:
            return (
                f"column {column.name!r}: expected {column} as in {where}, got {other or 'none'}."
            )
    for column in columns.values():
        return f"column {column.name!r}: expected none as in {where}, got {column}."
    return (
        f"expected the columns in the order {[column.name for column in expected.columns]} "
        f"as in {where}, got {[column.name for column in got.columns]}."
    )


def differs(fields: Mapping[str, Any], schema: Schema) -> bool:
    """Whether the nested dict lacks columns of ``schema``, or has others."""
    return paths_of(fields) != schema.paths
