"""`pt` files: ``torch.save`` of the nested dict of one trajectory (`nested`), as RLinf's.

Read by ``torch.load(weights_only=True)`` and never otherwise, so that no file can make it run
code. Its zip archives are mapped: only the rows asked for are touched. What torch wrote before it
had those is read whole.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from mmbuf import files
from mmbuf.adapters import nested
from mmbuf.entry import Entry
from mmbuf.errors import CorruptError
from mmbuf.schema import Array, Schema
from mmbuf.trajectory import fields_of

NAME = "pt"
EXTENSION = ".pt"
CAN_MAP = False
IS_DIRECTORY = False

_ZIP_MAGIC = b"PK\x03\x04"
_LENGTH = struct.Struct("<H")


def write(
    path: str, entry: Entry, schema: Schema, rows: list[Array], texts: dict[int, list[str]]
) -> Entry:
    """Write one trajectory to the new ``path``; as `storage.Format.write`."""
    with files.created_file(path) as file:
        torch.save(nested.to_dict(entry, schema, rows, texts), file)
        mark = nested.mark_of(entry)
        # As the comment of the archive, whose length is the last that torch has written.
        file.seek(-_LENGTH.size, io.SEEK_END)
        file.write(_LENGTH.pack(len(mark)) + mark)
    size = files.size_of(path)
    return dataclasses.replace(entry, format=NAME, size_bytes=size, parts=nested.parts(rows))


@contextmanager
def opened(path: str, entry: Entry, schema: Schema, *, is_checked: bool) -> Iterator[nested.Source]:
    """The file of ``entry``; CorruptError unless it is that one.

    Checked every time: reading it costs more than that.
    """
    yield nested.Source(path, _read(path, entry), entry, schema)


def load(path: str, entry: Entry, schema: Schema, *, can_map: bool) -> list[Array | list[str]]:
    """All rows of each column, left-out ones too, in memory of their own; text as strings."""
    return nested.Source(path, _read(path, entry), entry, schema).all_rows()


def describe(path: str, name: str) -> tuple[Entry, Schema, None]:
    """What a file says of itself; there are no CRCs of columns.

    The uuid of a file of RLinf's comes from the names, sizes and CRC-32s in the directory of the
    archive, so that the rows are not read; from all bytes where there is no archive or no CRC.
    """
    content = _read(path, None)
    with files.opened_file(path) as file, nested.reading(path):
        uuid = nested.uuid_of(file.fileno(), NAME, lambda: _digest(file))
    return nested.describe(path, name, NAME, content, uuid)


def verify(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless the file is ``entry``'s and all records of its archive are whole.

    What torch wrote without CRC-32s, or before it had archives, is only loaded.
    """
    with opened(path, entry, schema, is_checked=False), files.opened_file(path) as file:
        if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            with nested.reading(path), zipfile.ZipFile(file) as archive:
                has_crcs = any(record.CRC for record in archive.filelist)
                damaged = archive.testzip() if has_crcs else None
            if damaged is not None:
                what = f"record {damaged!r}: expected bytes of its CRC-32, got others."
                raise CorruptError(path, what)


def check_identity(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless the file is that of the entry's trajectory; no row of ours is read."""
    with files.opened_file(path) as file:
        _check_identity(path, file, entry)


def _check_identity(path: str, file: BinaryIO, entry: Entry) -> None:
    with nested.reading(path):
        nested.check_identity(path, file.fileno(), entry, NAME, lambda: _digest(file))


def _read(path: str, entry: Entry | None) -> nested.Content:
    with files.opened_file(path) as file:
        size = files.length(file.fileno())
        nested.check_size(path, size, entry)
        with nested.reading(path):
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
            if is_zip and any(record.compress_type for record in zipfile.ZipFile(file).filelist):
                raise CorruptError(path, "expected records as they are, got compressed ones.")
        if entry is not None:
            _check_identity(path, file, entry)
        with nested.reading(path):
            item = _load_zip(path) if is_zip else _load_whole(path, file)
        if is_zip and not files.has_name(file.fileno(), path):  # torch opened it by that
            raise FileNotFoundError(errno.ENOENT, "another file has taken its name", path)
        with nested.reading(path):
            return nested.Content(*fields_of(item), size)


def _load_zip(path: str) -> Any:
    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except RuntimeError as error:
        if "unable to mmap" in str(error):  # out of mappings or addresses: no fault of the file
            raise OSError(errno.ENOMEM, str(error), path) from error
        raise


def _load_whole(path: str, file: BinaryIO) -> Any:
    # From memory: torch would unpack a tar archive that has a name into a temporary directory.
    file.seek(0)
    data = io.BytesIO(file.read())
    try:
        return torch.load(data, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error


def _refused(path: str, error: pickle.UnpicklingError) -> CorruptError:
    """Without torch's advice, which is to trust the file."""
    unsafe = re.search(r"GLOBAL (\S+)", str(error))
    what = unsafe[1] if unsafe else "a pickle that it refuses"
    return CorruptError(path, f"expected what torch.load(weights_only=True) reads, got {what}.")


def _digest(file: BinaryIO) -> str:
    """Of the bytes of an open file."""
    file.seek(0)
    if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
        records = zipfile.ZipFile(file).filelist
        if any(record.CRC for record in records):
            return str([(record.filename, record.CRC, record.file_size) for record in records])
    file.seek(0)
    return hashlib.sha256(file.read()).hexdigest()
