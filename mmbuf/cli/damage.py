"""What commands say of damage: the file, and the commands that look at it and set it aside."""

from __future__ import annotations

import shlex
import sys

import typer

from mmbuf import files, index
from mmbuf.analysis import Tables
from mmbuf.errors import CorruptError
from mmbuf.terminal import printable

_MARKS = (index.JOURNAL, index.INDEX, files.WRITER_LOCK)
_LEVELS = 3  # a file of an npy trajectory lies two below its store


def hint(error: Exception) -> str:
    """The two commands, if the error is of a file of a store's; else nothing."""
    path = error.path if isinstance(error, CorruptError) else getattr(error, "filename", None)
    if not isinstance(path, str) or not path:
        return ""
    for _ in range(_LEVELS):
        try:
            if any(files.exists(files.join(path, mark)) for mark in _MARKS):
                return f" {_commands(path)}"
        except OSError:
            return ""
        path = files.directory_of(path)
    return ""


def tell_skipped(tables: Tables) -> None:
    """Say on stderr what was left out, and end with exit code 1; nothing where all is well."""
    skipped = tables.skipped
    if not skipped:
        return
    listed = {files.join(where, entry.file) for entry, where in tables.entries}
    stores: dict[str, None] = {}
    for path, what in skipped.items():
        print(printable(f"mmbuf: {path}: {what}"), file=sys.stderr)
        stores[files.directory_of(path)] = None
    total = len(listed | skipped.keys())
    told = f"mmbuf: left out {len(skipped):,} of {total:,} trajectories."
    print(printable(" ".join([told, *map(_commands, stores)])), file=sys.stderr)
    raise typer.Exit(1)


def _commands(store: str) -> str:
    name = printable(shlex.quote(store))
    return f"All that is wrong: mmbuf verify {name}. To set it aside: mmbuf repair {name}"
