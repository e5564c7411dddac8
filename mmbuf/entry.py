"""Entry and Part: what is known of one stored trajectory.

The index (`index`) and the files themselves (`formats`) both speak of entries, and neither
imports the other; so the entry is a module of its own below them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


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


# Of bytes and ids; and of rows, so that the row numbers of millions of trajectories fit in int64.
_LIMIT = 1 << 62
_MAX_ROWS = 1 << 40
_MAX_NAME_BYTES = 255  # of file systems


def parts_from_json(parts: Any) -> tuple[Part, ...]:
    """Parts; LookupError, TypeError or ValueError unless all of their numbers can be such."""
    found = tuple(
        Part(part[0], part[1], Table(*part[2]) if len(part) > 2 else None) for part in parts
    )
    for part in found:
        for number in (part.offset, part.rows, *(part.table or ())):
            if type(number) is not int or not 0 <= number < _LIMIT:
                raise ValueError(f"expected ints of 0 or more, got {part}")
        if part.rows >= _MAX_ROWS:
            raise ValueError(f"{part.rows} rows")
    return found


def checked_uuid(uuid: Any) -> str:
    """``uuid`` from JSON; ValueError unless it is one: names of files are made from it."""
    if type(uuid) is not str or len(uuid) != 32 or not (uuid.isascii() and uuid.isalnum()):
        raise ValueError(f"expected a uuid of 32 digits, got {uuid!r}")
    return uuid


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
    if len(shape) < 2 or not all(type(n) is int and n >= 0 for n in shape) or 0 in shape[:2]:
        raise ValueError(f"expected a shape [T, B, ...], got {shape!r}")
    return tuple(shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """One trajectory of a store.

    ``uuid`` is its identity, ``trajectory_id`` its number in this store. ``shape`` begins with
    ``(T, B)``. ``format``, ``file``, ``size_bytes`` and ``parts`` (one per column, in the order of
    the schema) say all that is needed to map it; ``file`` is empty for one that has no file.
    ``added_at`` is in seconds since the epoch.
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

    @property
    def uuid_mark(self) -> int:
        """The first 12 digits of the uuid as a number that fits in int64."""
        return int(self.uuid[:12], 36)

    @property
    def num_steps(self) -> int:
        return self.shape[0]

    @property
    def num_envs(self) -> int:
        return self.shape[1]

    @property
    def num_samples(self) -> int:
        return self.shape[0] * self.shape[1]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object with RLinf's keys first."""
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
            "parts": [part[:2] if part.table is None else part for part in self.parts],
        }

    @classmethod
    def from_json(cls, json: dict[str, Any], parts: tuple[Part, ...] | None = None) -> Entry:
        """The inverse of `to_json`; KeyError, TypeError or ValueError where it is none.

        ``parts`` is for callers that have read those of ``json`` already.
        """
        entry = cls(
            checked_uuid(json["uuid"]),
            int(json["trajectory_id"]),
            checked_shape(json["shape"]),
            int(json["max_episode_length"]),
            str(json["model_weights_id"]),
            float(json["added_at"]),
            str(json["format"]),
            _checked_file(str(json["file"])),
            int(json["size_bytes"]),
            parts_from_json(json["parts"]) if parts is None else parts,
        )
        if not (0 <= entry.trajectory_id < _LIMIT and 0 <= entry.size_bytes < _LIMIT):
            raise ValueError(f"trajectory {entry.trajectory_id} of {entry.size_bytes} bytes")
        if entry.max_episode_length < 0:
            raise ValueError(f"max_episode_length {entry.max_episode_length}")
        return entry
