"""Storage: one trajectory as a file (or a directory), in any of the formats.

Each format is a module that looks like `Format`. `FORMATS` is the only list of them: whoever reads
or writes a trajectory's file asks it by the name that stands in the trajectory's entry.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mmbuf import files
from mmbuf.adapters import pkl, pt
from mmbuf.arguments import text
from mmbuf.entry import Entry, Part
from mmbuf.errors import CorruptError, SchemaError
from mmbuf.formats import arrow, npy
from mmbuf.schema import Array, Schema, TextTable


class Source(Protocol):
    """One trajectory's file, open for reading. For one thread at a time."""

    def location(self, position: int) -> tuple[int, int]:
        """The descriptor and byte offset at which a column's rows begin, to be mapped.

        The descriptor is good until the next call. Only where the format `CAN_MAP`.
        """

    def read_part(self, position: int, rows: Array) -> None:
        """Read a column's first ``len(rows)`` rows (not text) into C-contiguous memory."""

    def read_text(self, position: int) -> tuple[Array, list[str]]:
        """All rows of a text column: codes ``int32 [rows]`` and the strings they point to."""

    def read_rows(self, rows: Array, leaves: Sequence[Any], targets: Array) -> None:
        """Read ``rows`` of each column that is not text into ``leaves[column][targets]``.

        The leaves are C-contiguous ``[K, *S]`` arrays in storage dtype.
        """


class Format(Protocol):
    """A file format. OSError as the system gives it, CorruptError for wrong bytes."""

    NAME: str
    EXTENSION: str
    CAN_MAP: bool  # whether rows lie in the file as they lie in memory
    IS_DIRECTORY: bool  # whether a "file" is a directory of files

    def write(
        self,
        path: str,
        entry: Entry,
        schema: Schema,
        rows: list[Array],
        texts: dict[int, list[str]],
    ) -> Entry:
        """Write one trajectory to the new ``path``; ``entry`` with format, size and parts.

        ``rows[i]`` are column i's rows ``[rows, *S]`` in its storage dtype, C-contiguous, left-out
        rows behind; of a text column the codes into ``texts[i]``. Nothing is left if it fails.
        """

    def opened(
        self, path: str, entry: Entry, schema: Schema, *, is_checked: bool
    ) -> AbstractContextManager[Source]:
        """The file of ``entry``, open for reading; CorruptError unless it is that one.

        What it says of itself is compared with the entry. ``is_checked`` spares that for a file
        that was looked at before, since none ever changes; but it is the same trajectory's still,
        whatever may have taken its name.
        """

    def check_identity(self, path: str, entry: Entry, schema: Schema) -> None:
        """CorruptError unless the file is that of the entry's trajectory; one small read.

        Of files of RLinf's, which do not say whose they are, it may be more than that.
        """

    def load(
        self, path: str, entry: Entry, schema: Schema, *, can_map: bool
    ) -> list[Array | list[str]]:
        """All rows of each column, left-out ones too, writable and the caller's; text as strings.

        With ``can_map`` private pages of the file where the format allows.
        """

    def describe(self, path: str, name: str) -> tuple[Entry, Schema, list[int] | None]:
        """What a file says of itself: entry (``file=name``), schema, CRC-32 of each column.

        None for the CRCs where the format has none.
        """

    def verify(self, path: str, entry: Entry, schema: Schema) -> None:
        """Read all of a file; CorruptError unless it is ``entry``'s and as it was written.

        In bounded memory and without the GIL where the format `CAN_MAP`.
        """


FORMATS: dict[str, Format] = {format_.NAME: format_ for format_ in (arrow, npy, pt, pkl)}


def checked_format(name: str) -> str:
    """``name``; TypeError or ValueError unless it is one of `FORMATS`."""
    name = text("trajectory_format", name)
    if name not in FORMATS:
        raise ValueError(f"trajectory_format: expected one of {list(FORMATS)}, got {name!r}.")
    return name


def format_of(name: str) -> Format | None:
    """The format of a trajectory's file, by its extension."""
    for format_ in FORMATS.values():
        if name.endswith(format_.EXTENSION):
            return format_
    return None


def verify(path: str, entry: Entry, schema: Schema) -> None:
    """Read all of the file of ``entry``: CorruptError unless it is as it was written.

    Header, size and layout are those of the entry, and each column has the CRC-32 that it was
    written with. Of a ``pt`` file the records' CRC-32s, of a ``pkl`` file nothing but that it loads
    and fits. Takes a few MiB of memory, but for text and ``pkl``; thread-safe. FileNotFoundError
    for no file, VersionError for one of a newer mmbuf.
    """
    if entry.format not in FORMATS:
        raise CorruptError(path, f"expected a format of {list(FORMATS)}, got {entry.format!r}.")
    FORMATS[entry.format].verify(path, entry, schema)


def size_of(path: str, entry: Entry) -> int:
    """Bytes of the file of ``entry``, of which the format must be known; it is not opened.

    CorruptError unless it is a file, or a directory of files if that is what the format makes.
    """
    of = files.size_of if FORMATS[entry.format].IS_DIRECTORY else files.size_of_file
    return of(path)


def check_entries(schema: Schema, items: Iterable[tuple[Entry, str]]) -> None:
    """CorruptError unless all entries can be those of files with the columns of ``schema``.

    Or with those of their own. ``items`` are entries and their directories. What passes can be
    given a place, however little of it may be true; that is looked at when a file is first opened
    (`Format.opened`).
    """
    # Equal parts of a journal are one object. Of each layout the bytes that no file of it lacks.
    layouts: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for entry, directory in items:
        if entry.format not in FORMATS:
            raise CorruptError(
                files.join(directory, entry.file),
                f"expected a format among {list(FORMATS)}, got {entry.format!r}.",
            )
        layout = id(entry.parts), id(entry.schema), entry.shape[:2]
        num_bytes = layouts.get(layout)
        if num_bytes is None:
            own = entry.schema or schema
            if len(entry.parts) != len(own.columns) or not entry.parts:
                raise CorruptError(
                    files.join(directory, entry.file),
                    f"expected {len(own.columns)} columns in the index, got {len(entry.parts)}.",
                )
            try:
                own.check_rows([part.rows for part in entry.parts], *entry.shape[:2])
            except SchemaError as error:
                raise CorruptError(files.join(directory, entry.file), str(error)) from error
            num_bytes = layouts[layout] = _fewest_bytes(entry.parts, own)
        if num_bytes > entry.size_bytes:
            raise CorruptError(
                files.join(directory, entry.file),
                f"expected {num_bytes} bytes or more of its rows, got {entry.size_bytes}.",
            )


def _fewest_bytes(parts: Sequence[Part], schema: Schema) -> int:
    """Bytes that no file of such columns lacks."""
    return max(
        # Of text a file may have less than we do.
        0 if column.is_text else column.row_bytes * part.rows
        for column, part in zip(schema.columns, parts, strict=True)
    )


def write(
    path: str,
    entry: Entry,
    schema: Schema,
    rows: list[Array],
    texts: dict[int, list[str]],
    format_name: str,
) -> Entry:
    """Write one trajectory to ``path``, which is complete when it appears. See `Format.write`."""
    temporary = files.temporary(path)
    entry = FORMATS[format_name].write(temporary, entry, schema, rows, texts)
    try:
        files.rename(temporary, path)
    except BaseException:
        files.remove(temporary)
        raise
    return entry


def link(source: str, entry: Entry, schema: Schema, target: str) -> None:
    """Give the file ``source`` of ``entry`` the new name ``target`` as well; a copy at the worst.

    FileNotFoundError, and nothing there, where another trajectory's has taken its name: it is gone.
    """
    files.link_or_copy(source, target)
    try:
        _check_identity(target, entry, schema, source)
    except BaseException:
        files.remove(target)
        raise


def _check_identity(path: str, entry: Entry, schema: Schema, name: str) -> None:
    """FileNotFoundError, of ``name``, unless the file is that of the entry's trajectory."""
    try:
        FORMATS[entry.format].check_identity(path, entry, schema)
    except CorruptError as error:
        what = f"expected trajectory {entry.uuid}, got another one's file"
        raise FileNotFoundError(errno.ENOENT, what, name) from error


def copy(
    source: str, entry: Entry, schema: Schema, target: str, format_name: str, *, can_map: bool
) -> Entry:
    """Bring the file ``source`` of ``entry`` to ``target`` in a format; the entry of the new one.

    A hard link where the format is the same and the file system allows it. Else the source is
    verified first: damage must not be given checksums of its own. FileNotFoundError as of `link`.
    """
    if entry.format == format_name:
        link(source, entry, schema, target)
        return entry
    _check_identity(source, entry, schema, source)
    verify(source, entry, schema)
    rows: list[Array] = []
    texts: dict[int, list[str]] = {}
    leaves = FORMATS[entry.format].load(source, entry, schema, can_map=can_map)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, list):
            table = TextTable()
            rows.append(table.encode(leaf))
            texts[position] = table.strings
        else:
            rows.append(leaf)
    return write(target, entry, schema, rows, texts, format_name)
