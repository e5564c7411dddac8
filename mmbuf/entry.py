"""Entry and Part: what is known of one stored trajectory.

The index (`index`) and the files themselves (`formats`) both speak of entries, and neither
imports the other; so the entry is a module of its own below them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from mmbuf.arguments import number, text, whole
from mmbuf.schema import Schema


class Table(NamedTuple):
    """Where a file keeps the strings of a text column: Arrow's int32 offsets and UTF-8 bytes."""

    offsets_at: int
    num_strings: int
    bytes_at: int
    num_bytes: int


class Part(NamedTuple):
    """A column's part of a file: ``rows`` rows (left-out ones included) from byte ``offset``."""

    offset: int
    rows: int
    table: Table | None = None


MAX_NUMBER = 1 << 62  # of bytes, ids and lengths
MAX_ROWS = 1 << 40  # so that the row numbers of millions of trajectories fit in int64
_MAX_TIME_S = 1e11  # since the epoch, which every calendar can show
_MAX_NAME_BYTES = 255  # of file systems
_APART = 12  # digits of a uuid, in which trajectories of one file's bytes differ


def parts_from_json(parts: Any) -> tuple[Part, ...]:
    """Parts; LookupError, TypeError or ValueError unless all of their numbers can be such."""
    found = tuple(
        Part(part[0], part[1], Table(*part[2]) if len(part) > 2 else None) for part in parts
    )
    for part in found:
        for n in (part.offset, part.rows, *(part.table or ())):
            if type(n) is not int or not 0 <= n < MAX_NUMBER:
                raise ValueError(f"expected ints of 0 or more, got {part}")
        if part.rows >= MAX_ROWS:
            raise ValueError(f"{part.rows} rows")
    return found


def checked_uuid(uuid: Any) -> str:
    """``uuid`` from JSON; ValueError unless it is one: names of files are made from it."""
    if type(uuid) is not str or len(uuid) != 32 or not (uuid.isascii() and uuid.isalnum()):
        raise ValueError(f"expected a uuid of 32 digits, got {uuid!r}")
    return uuid


def told_apart(uuid: str) -> str:
    """A new uuid, for one more trajectory whose file has the bytes of that of another."""
    return uuid4().hex[:_APART] + uuid[_APART:]


def is_of_same_bytes(uuid: str, other: str) -> bool:
    """Whether both are one uuid, or told apart from one."""
    return uuid[_APART:] == other[_APART:]


def _checked_file(file: str) -> str:
    """``file``; ValueError unless a trajectory's file in the store's own directory can have it.

    So no entry leads elsewhere, and none to what is not a trajectory: hidden files, the journal and
    its snapshots.
    """
    if "/" in file or "\0" in file or file[:1] in ("", ".") or file.endswith((".json", ".jsonl")):
        raise ValueError(f"expected the name of a trajectory's file, got {file!r}")
    if len(file if file.isascii() else file.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"a file name of {len(file)} characters")
    return file


def checked_shape(shape: Any) -> tuple[int, ...]:
    """``shape`` from JSON as a tuple; ValueError unless it is ``[T, B, ...]``."""
    found = tuple(whole("shape", n, bound=MAX_NUMBER) for n in shape)
    if len(found) < 2 or 0 in found[:2] or found[0] * found[1] >= MAX_ROWS:
        raise ValueError(f"expected a shape [T, B, ...], got {shape!r}")
    return found


def checked_time(added_at: Any) -> float:
    """``added_at`` from JSON; TypeError or ValueError unless it is a time, or 0 for unknown."""
    found = number("added_at", added_at)
    if not 0 <= found < _MAX_TIME_S:
        raise ValueError(f"expected seconds since the epoch, got added_at {found}")
    return found


def facts_from_json(json: dict[str, Any]) -> tuple[int, tuple[int, ...], int, str, float]:
    """What index and file both say, from an entry's ``trajectory_id`` to its ``added_at``.

    KeyError, TypeError or ValueError where it is none.
    """
    return (
        whole("trajectory_id", json["trajectory_id"], bound=MAX_NUMBER),
        checked_shape(json["shape"]),
        whole("max_episode_length", json["max_episode_length"], bound=MAX_NUMBER),
        text("model_weights_id", json["model_weights_id"]),
        checked_time(json["added_at"]),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One trajectory of a store.

    ``uuid`` is its identity, ``trajectory_id`` its number in this store. ``shape`` begins with
    ``(T, B)``. ``format``, ``file``, ``size_bytes`` and ``parts`` (one per column, in the order of
    its schema) say all that is needed to map it; ``file`` is empty for one that has no file.
    ``added_at`` is in seconds since the epoch. ``schema`` are its own columns, which others of the
    store may lack; None where all have the same.
    """

    uuid: str
    trajectory_id: int
    shape: tuple[int, ...]
    max_episode_length: int = 0
    model_weights_id: str = ""
    added_at: float = 0.0
    format: str = ""
    file: str = ""
    size_bytes: int = 0
    parts: tuple[Part, ...] = ()
    schema: Schema | None = field(default=None, compare=False, repr=False)

    @property
    def uuid_mark(self) -> int:
        """The first 12 digits of the uuid as a number that fits in int64."""
        return int(self.uuid[:_APART], 36)

    @property
    def num_steps(self) -> int:
        return self.shape[0]

    @property
    def num_envs(self) -> int:
        return self.shape[1]

    @property
    def num_samples(self) -> int:
        return self.shape[0] * self.shape[1]

    def to_json(self, schema_number: int = 0) -> dict[str, Any]:
        """As a JSON object with RLinf's keys first; the number is that of its schema."""
        numbered = {"schema": schema_number} if schema_number else {}
        return {
            "num_samples": self.num_samples,
            "trajectory_id": self.trajectory_id,
            "max_episode_length": self.max_episode_length,
            "shape": self.shape,
            "model_weights_id": self.model_weights_id,
            "uuid": self.uuid,
            "added_at": self.added_at,
            "format": self.format,
            "file": self.file,
            "size_bytes": self.size_bytes,
            **numbered,
            "parts": [part[:2] if part.table is None else part for part in self.parts],
        }

    @classmethod
    def from_json(
        cls,
        json: dict[str, Any],
        parts: tuple[Part, ...] | None = None,
        schema: Schema | None = None,
    ) -> Entry:
        """The inverse of `to_json`; KeyError, TypeError or ValueError where it is none.

        ``parts`` is for callers that have read those of ``json`` already; ``schema`` is that of its
        number.
        """
        return cls(
            checked_uuid(json["uuid"]),
            *facts_from_json(json),
            text("format", json["format"]),
            _checked_file(text("file", json["file"])),
            whole("size_bytes", json["size_bytes"], bound=MAX_NUMBER),
            parts_from_json(json["parts"]) if parts is None else parts,
            schema,
        )
