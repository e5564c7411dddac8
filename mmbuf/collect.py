"""From a running simulator to a buffer: `TrajectoryCollector` stacks chunks into a trajectory."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmbuf.errors import SchemaError
from mmbuf.schema import Array, Schema, measure
from mmbuf.trajectory import Trajectory, checked_episode_length, checked_weights_id


class TrajectoryCollector:
    """Stacks chunks in time order into a `Trajectory` ``[T, B, ...]`` on the CPU.

    ``max_episode_length`` and ``model_weights_id`` are the metadata of its trajectories. Without an
    id, it is derived from the bytes of the stacked ``versions``. One thread at a time.
    """

    def __init__(self, max_episode_length: int = 0, model_weights_id: str | None = None) -> None:
        self.max_episode_length = checked_episode_length(max_episode_length)
        self.model_weights_id = (
            None if model_weights_id is None else checked_weights_id(model_weights_id)
        )
        self._schema: Schema | None = None
        self._num_envs = 0
        self._steps: list[list[Array | list[str]]] = []

    def append(
        self,
        *,
        curr_obs: Mapping[str, Any] | None = None,
        next_obs: Mapping[str, Any] | None = None,
        actions: torch.Tensor | Array | None = None,
        rewards: torch.Tensor | Array | None = None,
        terminations: torch.Tensor | Array | None = None,
        truncations: torch.Tensor | Array | None = None,
        dones: torch.Tensor | Array | None = None,
        prev_logprobs: torch.Tensor | Array | None = None,
        prev_values: torch.Tensor | Array | None = None,
        versions: torch.Tensor | Array | None = None,
        intervene_flags: torch.Tensor | Array | None = None,
        forward_inputs: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        """Take one chunk: a copy of every value, so that the caller may reuse its arrays at once.

        Values are tensors or arrays ``[B, ...]``, text as list of B str, or dicts of those.
        ``extra`` names further columns. ``dones`` that are not given are ``terminations`` or
        ``truncations``. All chunks have the columns, dtypes, row shapes and B of the first one;
        `SchemaError` names the column that has not. Nothing is kept of a chunk whose call raises,
        by a signal handler's exception either.
        """
        if dones is None:
            dones = _either(terminations, truncations)
        given = {
            "curr_obs": curr_obs,
            "next_obs": next_obs,
            "actions": actions,
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
            "dones": dones,
            "prev_logprobs": prev_logprobs,
            "prev_values": prev_values,
            "versions": versions,
            "intervene_flags": intervene_flags,
            "forward_inputs": forward_inputs,
        }
        columns = Trajectory.from_columns(given | extra).to_columns()
        step = measure(_as_step(columns), self._schema)
        if self._schema is not None and step.num_envs != self._num_envs:
            raise SchemaError(
                f"column {step.schema.columns[0].name!r}: expected B = {self._num_envs} rows as in "
                f"the first chunk, got {step.num_envs}."
            )
        rows: list[Array | list[str]] = []
        for position, column in enumerate(step.schema.columns):
            if column.is_text:
                rows.append(step.texts(position))
            else:
                copy = np.empty((step.num_envs, *column.row_shape), column.storage)
                step.copy_rows(position, copy)
                rows.append(copy)
        schema, num_envs = step.schema, step.num_envs
        # At once: with nothing called no signal handler comes in between, or before the caller.
        self._schema = schema
        self._num_envs = num_envs
        self._steps += [rows]

    def __len__(self) -> int:
        """T so far."""
        return len(self._steps)

    def to_trajectory(
        self, *, max_episode_length: int | None = None, model_weights_id: str | None = None
    ) -> Trajectory:
        """All chunks so far as one trajectory, a copy; the collector keeps them.

        None means what the constructor was given. ValueError when there is no chunk.
        """
        if self._schema is None:
            raise ValueError("collector: expected at least one chunk, got none. Append first.")
        leaves: list[Any] = []
        versions = bytes(4)  # the id of a trajectory without versions, as RLinf has it
        for column, steps in zip(self._schema.columns, zip(*self._steps, strict=True), strict=True):
            if column.is_text:
                leaves.append([list(step) for step in steps])
                continue
            stacked = np.stack(steps)
            if column.path == ("versions",):
                versions = stacked.tobytes()
            leaves.append(column.tensor(stacked))
        if max_episode_length is None:
            max_episode_length = self.max_episode_length
        if model_weights_id is None:
            model_weights_id = self.model_weights_id
        if model_weights_id is None:
            model_weights_id = str(uuid.uuid5(uuid.NAMESPACE_DNS, versions.hex()))
        return Trajectory.from_columns(
            self._schema.nest(leaves), max_episode_length, model_weights_id
        )

    def to_trajectories(self, sizes: int | Sequence[int]) -> list[Trajectory]:
        """``to_trajectory().split(sizes)``: parts along B."""
        return self.to_trajectory().split(sizes)

    def clear(self) -> None:
        """Forget all chunks; the next one is the first again and may have other columns."""
        self._schema = None
        self._num_envs = 0
        self._steps = []


def _either(*flags: Any) -> torch.Tensor | None:
    """The logical or of those flags that are tensors or arrays; None if none is."""
    given = [
        torch.as_tensor(value != 0).cpu()
        for value in flags
        if isinstance(value, (torch.Tensor, np.ndarray))
    ]
    for value in given[1:]:
        if value.shape != given[0].shape:
            raise SchemaError(
                f"column 'truncations': expected the shape of terminations, "
                f"{tuple(given[0].shape)}, got {tuple(value.shape)}."
            )
    return torch.stack(given).any(dim=0) if given else None


def _as_step(value: Any) -> Any:
    """A chunk ``[B, ...]`` as a trajectory of one step, ``[1, B, ...]``; views."""
    if isinstance(value, dict):
        return {name: _as_step(inner) for name, inner in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[None] if value.ndim else value
    return [value] if isinstance(value, (list, tuple)) else value
