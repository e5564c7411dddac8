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


def parts_from_json(parts: Any) -> tuple[Part, ...]:
    return tuple(
        Part(part[0], part[1], Table(*part[2]) if len(part) > 2 else None) for part in parts
    )


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
        return cls(
            str(json["uuid"]),
            int(json["trajectory_id"]),
            checked_shape(json["shape"]),
            int(json["max_episode_length"]),
            str(json["model_weights_id"]),
            float(json["added_at"]),
            str(json["format"]),
            str(json["file"]),
            int(json["size_bytes"]),
            parts_from_json(json["parts"]) if parts is None else parts,
        )
