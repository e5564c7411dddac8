"""Episodes: where the episodes of one trajectory begin and end, and what they earned.

An episode ends where ``dones`` (``terminations`` or ``truncations`` where there is no ``dones``) is
set and at the trajectory's end. Episodes are in the order of their environments, then of time.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mmbuf.analysis.rows import TrajectoryRows
from mmbuf.sampling.episodes import DONES, TERMINATIONS, TRUNCATIONS, end_flags
from mmbuf.schema import Array, Path, Schema

TERMINATION, TRUNCATION, DONE, OPEN = "termination", "truncation", "done", "open"

REWARDS: Path = ("rewards",)
SUCCESS = "is_success"  # the last key of its path


def success_path(schema: Schema | None) -> Path | None:
    """The column that says whether an episode was a success; None where there is none."""
    columns = () if schema is None else schema.columns
    return next((c.path for c in columns if c.path[-1] == SUCCESS and not c.is_text), None)


def has_flags(schema: Schema) -> bool:
    """Whether any column says where an episode ends."""
    return any(c.path in (DONES, TERMINATIONS, TRUNCATIONS) for c in schema.columns)


class Episodes:
    """The episodes of one trajectory; arrays ``[episodes]`` but for `numbers`, ``[N]``.

    Columns are read when they are first needed.
    """

    def __init__(self, rows: TrajectoryRows) -> None:
        self.rows = rows
        self._flags: dict[Path, Array | None] = {}
        self._num_steps, self._num_envs = rows.entry.num_steps, rows.entry.num_envs
        self._positions = {
            column.path: i for i, column in enumerate(rows.schema.columns) if not column.is_text
        }

    def __len__(self) -> int:
        return len(self.envs)

    def _side_by_side(self, path: Path) -> Array | None:
        """A column's numbers ``[B * T, V]``, the steps of each environment side by side."""
        if path not in self._positions:
            return None
        values = self.rows.values(self._positions[path])
        steps_first = values.reshape(self._num_steps, self._num_envs, -1)
        side_by_side: Array = steps_first.swapaxes(0, 1).reshape(len(values), -1)
        return side_by_side

    def _is_set(self, path: Path) -> Array | None:
        """Where a flag is set, bool ``[B * T]``; each is read once."""
        if path not in self._flags:
            values = self._side_by_side(path)
            self._flags[path] = None if values is None else np.asarray(values.any(axis=1))
        return self._flags[path]

    @cached_property
    def _ends(self) -> Array:
        """Where an episode ends, bool ``[B, T]``."""
        is_end = np.zeros(self._num_envs * self._num_steps, np.bool_)
        for path in end_flags(self._positions.keys()):
            flags = self._is_set(path)
            if flags is not None:
                is_end |= flags
        return is_end.reshape(self._num_envs, self._num_steps)

    @cached_property
    def numbers(self) -> Array:
        """Of each row the number of its episode among those of its environment, int32."""
        ends = self._ends
        numbers: Array = (ends.cumsum(axis=1) - ends).astype(np.int32).T.reshape(-1)
        return numbers

    @cached_property
    def _last(self) -> Array:
        """The places of their last steps among ``B * T``."""
        is_last = self._ends.copy()
        is_last[:, -1] = True
        places: Array = is_last.reshape(-1).nonzero()[0]
        return places

    @cached_property
    def _first(self) -> Array:
        return np.concatenate([[0], self._last[:-1] + 1])

    @cached_property
    def envs(self) -> Array:
        return (self._first // self._num_steps).astype(np.int32)

    @cached_property
    def start_steps(self) -> Array:
        return (self._first % self._num_steps).astype(np.int32)

    @cached_property
    def lengths(self) -> Array:
        return (self._last + 1 - self._first).astype(np.int32)

    @property
    def end_steps(self) -> Array:
        """Of each the step behind its last one."""
        return self.start_steps + self.lengths

    @property
    def ordinals(self) -> Array:
        """The number of each among those of its environment: as `numbers`."""
        first_of_env = np.searchsorted(self.envs, self.envs)
        return (np.arange(len(self)) - first_of_env).astype(np.int32)

    @cached_property
    def returns(self) -> Array | None:
        """The sum of all rewards, float64; None where there are no rewards."""
        rewards = self._side_by_side(REWARDS)
        if rewards is None:
            return None
        with np.errstate(invalid="ignore"):  # of infinite ones
            totals: Array = np.add.reduceat(rewards.sum(axis=1, dtype=np.float64), self._first)
        return totals

    @cached_property
    def successes(self) -> Array | None:
        """Whether success is set in any of its steps; None where there is no such column."""
        path = success_path(self.rows.schema)
        is_set = None if path is None else self._is_set(path)
        return None if is_set is None else np.logical_or.reduceat(is_set, self._first)

    @cached_property
    def ended_by(self) -> Array:
        """What ended each: "termination", "truncation", "open" at the trajectory's end.

        "done" where only ``dones`` is set, and does not say by which.
        """
        terminations, truncations = (
            None if (flags := self._is_set(path)) is None else flags[self._last]
            for path in (TERMINATIONS, TRUNCATIONS)
        )
        is_open = ~self._ends.reshape(-1)[self._last]
        names = np.full(len(self), DONE, object)
        # Of two flags that are one without the other, what is not the one is the other.
        if truncations is not None:
            names[truncations] = TRUNCATION
            if terminations is None:
                names[~truncations] = TERMINATION
        if terminations is not None:
            if truncations is None:
                names[~terminations] = TRUNCATION
            names[terminations] = TERMINATION
        names[is_open] = OPEN
        return names
