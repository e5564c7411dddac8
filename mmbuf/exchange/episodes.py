"""Other people's episodes as a store: each becomes a trajectory ``[T, 1, ...]``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmbuf import files
from mmbuf.buffer import TrajectoryReplayBuffer
from mmbuf.errors import SchemaError
from mmbuf.exchange.target import new_directory
from mmbuf.locations import location
from mmbuf.transfer import Directory, OnProgress

# Nested dicts of arrays ``[T, ...]`` and lists of T strings; metadata of the trajectory too.
Episode = Mapping[str, Any]

_METADATA = {"model_weights_id", "max_episode_length"}  # of a trajectory, beside its columns


@dataclass(frozen=True)
class Imported:
    """What the new store holds. ``left_out`` says by name what it does not, and why."""

    num_trajectories: int
    num_rows: int
    left_out: dict[str, str] = field(default_factory=dict)


def write_store(
    episodes: Iterable[Episode],
    num_episodes: int,
    target: Directory,
    on_progress: OnProgress | None = None,
    *,
    beside: Mapping[str, bytes] | None = None,
) -> Imported:
    """Make the new store ``target`` of episodes that share a schema; none is there if that fails.

    FileExistsError unless ``target`` is new or an empty directory, SchemaError for an episode that
    is unlike the first. ``on_progress(done, total)`` is called after each. ``beside`` are other
    files to put there, by name.
    """
    with (
        new_directory(location("target", target)) as directory,
        TrajectoryReplayBuffer(
            sample_window_size=1, auto_save=True, auto_save_path=directory
        ) as buffer,
    ):
        for number, episode in enumerate(episodes):
            try:
                buffer.add_trajectories(
                    [
                        {
                            name: value if name in _METADATA else _in_one_environment(value)
                            for name, value in episode.items()
                        }
                    ]
                )
            except SchemaError as error:
                raise SchemaError(f"episode {number}: {error}") from error
            if on_progress is not None:
                on_progress(number + 1, num_episodes)
        buffer.flush()
        for name, data in (beside or {}).items():
            files.replace(files.join(directory, name), [data])
        return Imported(len(buffer), buffer.total_samples)


def _in_one_environment(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _in_one_environment(inner) for key, inner in values.items()}
    if isinstance(values, list):
        return [[text] for text in values]
    array = np.ascontiguousarray(values)
    # torch knows no other order of bytes than the machine's.
    return array.astype(array.dtype.newbyteorder("="), copy=False)[:, None]
