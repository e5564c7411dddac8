"""One trajectory as one nested dict of ``[T, B, ...]`` leaves: what `pt` and `pkl` have in common.

The dict is what RLinf's files hold: ``max_episode_length`` (int), ``model_weights_id`` (str), and
the columns under the keys of their paths: CPU tensors ``[T, B, ...]``, text as list[T] of list[B]
of str (``T + E`` instead of T where steps are left out of the rows).

Such a file says nothing of where its rows lie: all parts of its entry are at byte 0. Behind what
torch and pickle read, ours end in a mark that says the uuid of their trajectory. Those of RLinf
have no identity of their own: there the uuid is derived from the bytes. Equal files are the same
trajectory, or have uuids that were told apart (`entry.told_apart`).
"""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, uuid5

import numpy as np
import torch

from mmbuf import files
from mmbuf.entry import Entry, Part, checked_uuid, is_of_same_bytes
from mmbuf.errors import CorruptError, SchemaError
from mmbuf.schema import Array, Column, Payload, Schema, TextTable, interleave, measure

_ID_IN_NAME = re.compile(r"trajectory_([0-9]+)_")
_MARK = b"mmbuf "
_MARK_BYTES = len(_MARK) + 32
_DERIVED = "5"  # the version among the digits of a uuid that was made of a file's bytes


class Content(NamedTuple):
    """What was read from a file of ``size_bytes`` bytes; ``fields`` are the nested columns."""

    fields: Mapping[str, Any]
    max_episode_length: int
    model_weights_id: str
    size_bytes: int


def to_dict(
    entry: Entry, schema: Schema, rows: Sequence[Array], texts: Mapping[int, Sequence[str]]
) -> dict[str, Any]:
    """The nested dict of one trajectory, from what `storage.Format.write` is given.

    Tensors are views of ``rows`` but for those with left-out steps, and none has more storage than
    it shows.
    """
    steps, envs = entry.num_steps, entry.num_envs
    leaves: list[Any] = []
    for i, column in enumerate(schema.columns):
        if column.is_text:
            codes = interleave(rows[i], column, steps, envs).tolist()
            leaves.append([[texts[i][code] for code in step] for step in codes])
        else:
            leaves.append(column.tensor(interleave(rows[i], column, steps, envs)))
    return {
        "max_episode_length": entry.max_episode_length,
        "model_weights_id": entry.model_weights_id,
        **schema.nest(leaves),
    }


def mark_of(entry: Entry) -> bytes:
    """What a file of ours ends in."""
    return _MARK + entry.uuid.encode()


def uuid_of(fd: int, format_: str, digest: Callable[[], str]) -> str:
    """The uuid of an open file's trajectory. ``digest()`` is that of the file's bytes."""
    return _marked(fd) or _derived(fd, format_, digest)


def check_identity(
    path: str, fd: int, entry: Entry, format_: str, digest: Callable[[], str]
) -> None:
    """CorruptError unless the open file is that of the entry's trajectory. As `uuid_of`.

    Those of ours from before there were marks do not say whose they are.
    """
    found = _marked(fd)
    if found is None and entry.uuid[12] == _DERIVED:
        found = _derived(fd, format_, digest)
    if found is not None and not is_of_same_bytes(found, entry.uuid):
        raise CorruptError(path, f"expected trajectory {entry.uuid}, got another one: {found}.")


def _marked(fd: int) -> str | None:
    """The uuid at the end of a file of ours; None for others'."""
    end = files.read_at(fd, _MARK_BYTES, max(0, files.length(fd) - _MARK_BYTES))
    if not end.startswith(_MARK):
        return None
    try:
        return checked_uuid(end[len(_MARK) :].decode())
    except ValueError:
        return None


def _derived(fd: int, format_: str, digest: Callable[[], str]) -> str:
    return uuid5(NAMESPACE_OID, f"{format_} {files.length(fd)} {digest()}").hex


def parts(rows: Sequence[Array]) -> tuple[Part, ...]:
    return tuple(Part(0, len(column_rows)) for column_rows in rows)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Whatever the block fails with is a CorruptError, but for what the disk itself says."""
    try:
        yield
    except CorruptError:
        raise
    except (SchemaError, pickle.UnpicklingError) as error:
        raise CorruptError(path, str(error)) from error
    except Exception as error:
        # EINVAL: the file named a place that no file has.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise CorruptError(
            path, f"expected the nested dict of one trajectory, got {type(error).__name__}: {error}"
        ) from error


def check_size(path: str, size_bytes: int, entry: Entry | None) -> None:
    """CorruptError unless a file of this size can be the one of ``entry``."""
    if entry is not None and size_bytes != entry.size_bytes:
        raise CorruptError(path, f"expected {entry.size_bytes} bytes, got {size_bytes}.")


def describe(
    path: str, name: str, format_: str, content: Content, uuid: str
) -> tuple[Entry, Schema, None]:
    """Entry and schema of a file. Its id is the one in its name, as RLinf names them, else 0."""
    with reading(path):
        payload = _measured(path, content, None)
    match = _ID_IN_NAME.match(name)
    entry = Entry(
        uuid,
        int(match[1]) if match else 0,
        payload.shape,
        content.max_episode_length,
        content.model_weights_id,
        0.0,
        format_,
        name,
        content.size_bytes,
        tuple(Part(0, n) for n in payload.rows),
    )
    return entry, payload.schema, None


class Source:
    """The content of one file, as the rows of its columns; CorruptError unless it is ``entry``'s.

    Only the rows that are asked for are touched.
    """

    def __init__(self, path: str, content: Content, entry: Entry, schema: Schema) -> None:
        with reading(path):
            payload = _measured(path, content, schema)
        shape, rows = payload.shape[:2], payload.rows
        expected = entry.shape[:2], tuple(part.rows for part in entry.parts)
        if (shape, rows) != expected:
            raise CorruptError(
                path, f"expected [T, B] and rows of each column {expected}, got {(shape, rows)}."
            )
        self._payload = payload
        self._leaves = schema.leaves(content.fields, "trajectory")

    def location(self, position: int) -> tuple[int, int]:
        raise AssertionError("rows of this format cannot be mapped")

    def read_part(self, position: int, rows: Array) -> None:
        """Read a column's first ``len(rows)`` rows (not text) into C-contiguous memory."""
        if len(rows) == self._payload.rows[position]:
            self._payload.copy_rows(position, rows)
        else:
            rows[...] = self._rows(position, np.arange(len(rows)))

    def read_text(self, position: int) -> tuple[Array, list[str]]:
        """All rows of a text column: codes ``int32 [rows]`` and the strings they point to."""
        table = TextTable()
        codes = table.encode(self._payload.texts(position))
        return codes, table.decode(np.arange(codes.max() + 1))

    def read_rows(self, rows: Array, leaves: Sequence[Any], targets: Array) -> None:
        """Read ``rows`` of each column that is not text into ``leaves[column][targets]``.

        Columns whose leaf is None are left out.
        """
        for position, column in enumerate(self._payload.schema.columns):
            if leaves[position] is not None and not column.is_text:
                leaves[position][targets] = self._rows(position, rows)

    def all_rows(self) -> list[Array | list[str]]:
        """All rows of each column, left-out ones behind, as new arrays; text as strings."""
        leaves: list[Array | list[str]] = []
        for position, column in enumerate(self._payload.schema.columns):
            if column.is_text:
                leaves.append(self._payload.texts(position))
            else:
                shape = (self._payload.rows[position], *column.row_shape)
                rows = np.empty(shape, column.storage)
                self._payload.copy_rows(position, rows)
                leaves.append(rows)
        return leaves

    def _rows(self, position: int, rows: Array) -> Array:
        column, payload = self._payload.schema.columns[position], self._payload
        steps, envs = np.divmod(rows, payload.num_envs)
        if payload.extra_steps[position]:
            steps = payload.steps_of(position, with_left_out=True)[steps]
        found: Array = _array(column, self._leaves[position])[steps, envs]
        return found


def _measured(path: str, content: Content, schema: Schema | None) -> Payload:
    payload = measure(content.fields, schema, is_stored=True)
    for column, n in zip(payload.schema.columns, payload.rows, strict=True):
        # A tensor may show the same bytes many times over: without bound in a damaged file.
        if not column.is_text and n * column.row_bytes > content.size_bytes:
            raise CorruptError(
                path,
                f"column {column.name!r}: expected no more than the file's {content.size_bytes} "
                f"bytes, got {n} {column}.",
            )
    return payload


def _array(column: Column, leaf: Any) -> Array:
    """A leaf as an array of the same shape in storage dtype; a view, unless lazily conjugated."""
    if isinstance(leaf, torch.Tensor):
        if column.viewed_as is not None:
            leaf = leaf.view(column.storage_as)
        leaf = leaf.detach().resolve_conj().resolve_neg().numpy()
    array: Array = leaf
    return array
