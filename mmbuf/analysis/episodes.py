"""Episodes: where the episodes of trajectories begin and end, and what they earned.

An episode ends where a flag says so (`Roles.ends`) and at the trajectory's end. Those of a
trajectory are in the order of their environments, then of time.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa

from mmbuf.analysis.rows import Rows
from mmbuf.roles import Roles
from mmbuf.schema import Array, Column, Path, Schema

TERMINATION, TRUNCATION, DONE, OPEN = "termination", "truncation", "done", "open"

SUCCESS = "is_success"  # the last key of its path
FACTS = "episode"  # the first key of columns that have one value for each episode


def success_path(schema: Schema | None) -> Path | None:
    """The column that says whether an episode was a success; None where there is none."""
    columns = () if schema is None else schema.columns
    return next((c.path for c in columns if c.path[-1] == SUCCESS and not c.is_text), None)


def fact_columns(schema: Schema | None) -> list[Column]:
    """The columns that have one value for each episode, the same in all of its rows."""
    columns = () if schema is None else schema.columns
    return [c for c in columns if c.path[0] == FACTS and len(c.path) > 1 and c.row_bytes]


class Episodes:
    """The episodes of some trajectories; arrays ``[episodes]`` but for `numbers`, ``[N]``.

    Columns are read when they are first needed. ``roles`` are those of their columns.
    """

    def __init__(self, rows: Rows, roles: Roles) -> None:
        self.rows = rows
        self.roles = roles
        self._flags: dict[Path, Array | None] = {}
        self._positions = {
            column.path: i for i, column in enumerate(rows.schema.columns) if not column.is_text
        }

    def __len__(self) -> int:
        return len(self._last)

    def _values(self, path: Path) -> Array | None:
        """A column's numbers ``[N, V]``."""
        return self.rows.values(self._positions[path]) if path in self._positions else None

    def _side_by_side(self, values: Array) -> Array:
        """``values [N]`` with the steps of each environment side by side."""
        found = np.empty_like(values)
        found[self.rows.grid.places] = values
        return found

    def _is_set(self, path: Path) -> Array | None:
        """Where a flag is set, bool ``[N]``, side by side; each is read once."""
        if path not in self._flags:
            values = self._values(path)
            is_set = None if values is None else np.asarray(values.any(axis=1))
            self._flags[path] = None if is_set is None else self._side_by_side(is_set)
        return self._flags[path]

    @cached_property
    def _ends(self) -> Array:
        """Where an episode ends, bool ``[N]``, side by side."""
        is_end = np.zeros(self.rows.num_rows, np.bool_)
        for path in self.roles.ends:
            flags = self._is_set(path)
            if flags is not None:
                is_end |= flags
        return is_end

    @cached_property
    def numbers(self) -> Array:
        """Of each row the number of its episode among those of its environment, int32."""
        num_before = self._ends.cumsum() - self._ends
        grid = self.rows.grid
        first_of_env = grid.places - grid.steps
        numbers: Array = num_before[grid.places] - num_before[first_of_env]
        return numbers.astype(np.int32)

    @cached_property
    def _last(self) -> Array:
        """The places of their last steps, side by side."""
        is_last = self._ends | self._side_by_side(self.rows.grid.is_last)
        places: Array = is_last.nonzero()[0]
        return places

    @cached_property
    def _first(self) -> Array:
        return np.concatenate([[0], self._last[:-1] + 1])

    @cached_property
    def _first_rows(self) -> Array:
        """The rows of their first steps."""
        rows = self._side_by_side(np.arange(self.rows.num_rows))
        return rows[self._first]

    @cached_property
    def owners(self) -> Array:
        """The place of the trajectory of each among the entries of the rows."""
        return self.rows.owners[self._first_rows]

    def firsts(self, path: Path) -> pa.Array:
        """What a column holds in the first row of each, as Arrow."""
        position = [column.path for column in self.rows.schema.columns].index(path)
        return self.rows.array(position).take(self._first_rows)

    @cached_property
    def envs(self) -> Array:
        return self.rows.grid.envs[self._first_rows].astype(np.int32)

    @cached_property
    def start_steps(self) -> Array:
        return self.rows.grid.steps[self._first_rows].astype(np.int32)

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
        return self.numbers[self._first_rows]

    @cached_property
    def returns(self) -> Array | None:
        """The sum of all rewards, float64, NaN where one is; None where there are no rewards."""
        rewards = None if self.roles.reward is None else self._values(self.roles.reward)
        if rewards is None:
            return None
        with np.errstate(invalid="ignore"):  # of infinite ones
            sums = self._side_by_side(rewards.sum(axis=1, dtype=np.float64))
            totals: Array = np.add.reduceat(sums, self._first)
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

        "done" where only a flag of either end is set, and does not say by which.
        """
        terminations, truncations = (
            None if path is None or (flags := self._is_set(path)) is None else flags[self._last]
            for path in (self.roles.termination, self.roles.truncation)
        )
        is_open = ~self._ends[self._last]
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
