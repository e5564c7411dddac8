"""What RLinf's workers and tools import of its replay buffer, by another import.

Of RLinf 0.3.0::

    # from rlinf.data.replay_buffer import TrajectoryReplayBuffer
    # from rlinf.data.embodied_io_struct import Trajectory
    # from rlinf.data.embodied_buffer_dataset import (
    #     PreloadReplayBufferDataset, ReplayBufferDataset, replay_buffer_collate_fn)
    from mmbuf.rlinf import (
        PreloadReplayBufferDataset, ReplayBufferDataset, Trajectory, TrajectoryReplayBuffer,
        replay_buffer_collate_fn)

Of its main branch the same names are in ``rlinf.data.storage.replay`` and
``rlinf.data.schema.embodied_types``. RLinf's own `Trajectory` may stay: the buffer takes it. So in
a worker the buffer's import is all that has to change, and its checkpoints load as they are.

What differs, and why:

``trajectory_format``
    "arrow" instead of "pt" in the configuration is 6 times faster: 21 ms instead of 125 for 256
    rows of a window of 40 trajectories of which 5 are cached. "pt" works too, and is what RLinf
    reads; ``save_checkpoint(path, trajectory_format="pt")`` gives it that of any buffer.
``sample``
    Exactly ``num_chunks`` rows, where RLinf gives at most as many as there are in the window. A
    batch is drawn uniformly over rows and with replacement, by a generator of the buffer's own.
an existing store
    In ``auto_save_path`` it is continued, not overwritten: ids go on. Call `clear`, or take another
    path, for an empty one.
text
    Lists of strings in dicts are kept, and come as lists of K strings. RLinf drops them.
columns
    A batch has those that every trajectory of the window has (``columns="common"``), and a mixed
    one those that both buffers have. Where they differ RLinf fails, or leaves rows unset.
``clear``
    Ids go on rising, so that no file is ever another trajectory's.

Beside the documented methods works what tools reach for: `sample_chunks`, ``_flatten_trajectory``,
``_trajectory_id_list``, ``_trajectory_index``, ``_load_trajectory``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mmbuf.batch import Batch
from mmbuf.buffer import TrajectoryReplayBuffer as _Buffer
from mmbuf.channel import Channel
from mmbuf.columns import COMMON
from mmbuf.dataset import (
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    replay_buffer_collate_fn,
)
from mmbuf.trajectory import Trajectory as _Trajectory
from mmbuf.trajectory import fields_of, rows_of

__all__ = [
    "Channel",
    "PreloadReplayBufferDataset",
    "ReplayBufferDataset",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "replay_buffer_collate_fn",
]


class Trajectory(_Trajectory):
    """A `mmbuf.Trajectory` that parts with its interventions as RLinf's does."""

    def extract_intervene_traj(self, mode: str = "any") -> list[_Trajectory] | None:
        """The rows where ``intervene_flags`` hold, as of `select`; None where there are none.

        Without ``versions``, as in RLinf: those are of the policy that did not act.
        """
        if self.intervene_flags is None:
            return None
        flags = rows_of({"flags": self.intervene_flags, **self.to_columns()})["flags"]
        mask = flags.reshape(self.num_steps, self.num_envs, -1)
        return dataclasses.replace(self, versions=None).select(mask, mode) or None


class TrajectoryReplayBuffer(_Buffer):
    """A `mmbuf.TrajectoryReplayBuffer` of columns that may differ, with the names of RLinf's."""

    def __init__(self, *args: Any, columns: str = COMMON, **kwargs: Any) -> None:
        super().__init__(*args, columns=columns, **kwargs)

    def add_trajectories(self, trajectories: Iterable[Any]) -> None:
        """As `mmbuf.TrajectoryReplayBuffer.add_trajectories`; empty ones are passed over."""
        is_list = isinstance(trajectories, Iterable) and not isinstance(
            trajectories, (str, bytes, Mapping)
        )
        # What is no list is refused there.
        super().add_trajectories(filter(_has_columns, trajectories) if is_list else trajectories)

    def sample_chunks(self, num_chunks: int) -> Batch:
        """As `sample`."""
        batch: Batch = self.sample(num_chunks)
        return batch

    def _flatten_trajectory(self, trajectory: Any) -> dict[str, Any]:
        """Its tensors ``[T, B, ...]`` as rows ``[T * B, ...]``, left-out steps left out; copies.

        Text is left out. Of the buffer nothing is needed.
        """
        return _tensors_of(rows_of(trajectory))

    @property
    def _trajectory_id_list(self) -> list[int]:
        """Ids of all trajectories, oldest first; a copy."""
        return self.trajectory_ids

    @property
    def _trajectory_index(self) -> dict[int, dict[str, Any]]:
        """What RLinf's index says of each trajectory; a copy."""
        entries = [self.get_entry(i) for i in self.trajectory_ids]
        return {
            entry.trajectory_id: {
                "num_samples": entry.num_samples,
                "trajectory_id": entry.trajectory_id,
                "max_episode_length": entry.max_episode_length,
                "shape": entry.shape,
                "model_weights_id": entry.model_weights_id,
            }
            for entry in entries
        }

    @property
    def _trajectory_counter(self) -> int:
        return self.trajectory_counter

    def _load_trajectory(self, trajectory_id: int, model_weights_id: str = "") -> Trajectory:
        """As `get_trajectory`; ValueError where there is none of this id."""
        try:
            found = self.get_trajectory(trajectory_id)
        except KeyError as error:
            raise ValueError(f"trajectory {trajectory_id}: {error}") from error
        return Trajectory(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})


def _has_columns(item: Any) -> bool:
    return bool(fields_of(item)[0])


def _tensors_of(node: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, torch.Tensor):
            kept[key] = value
        elif isinstance(value, dict) and (inner := _tensors_of(value)):
            kept[key] = inner
    return kept
