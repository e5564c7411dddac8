"""Episodes: where the episodes of a window's trajectories end.

An episode ends where a flag says so (`Roles.ends`) and where its trajectory ends. Rows of one
environment lie B apart.
"""

from __future__ import annotations

import numpy as np

from mmbuf import shield
from mmbuf.roles import Roles, Told, checked
from mmbuf.sampling.derived import Derived, Fifo, blocks
from mmbuf.sampling.draw import Sight, any_of, column_of, flat, numbers_of
from mmbuf.schema import Array, Column, Schema
from mmbuf.slots import NUM_ENVS, View

MAX_LEFT = np.iinfo(np.uint16).max

_BLOCK_ROWS = 1 << 18


class Episodes(Derived):
    """The episodes of the window, as stretches of consecutive steps of one environment.

    ``left`` has, for each row of the window, the steps from it to the end of its episode, itself
    included (`MAX_LEFT` where there are more); ``firsts`` the ordinal of each episode's first row,
    ``lengths`` its steps and ``strides`` the rows from one step to the next (B). ``roles`` are what
    a caller says of the columns' roles.
    """

    def __init__(self, roles: Told | None = None) -> None:
        super().__init__()
        self._told = checked(roles)
        self._roles: tuple[Schema | None, Schema | None, Roles] = (None, None, Roles(None))
        self._left = Fifo(np.uint16)
        # Side by side, since what is drawn from many episodes is not in the processor's caches.
        self._table = Fifo(np.int64, 3)
        self._counts = Fifo(np.int64)  # episodes of each slot
        self._starts: dict[tuple[int, bool], Fifo] = {}  # see `starts`
        self._bases: dict[tuple[int, bool], int] = {}

    def roles_in(self, sight: Sight) -> Roles:
        """The roles of the columns; SchemaError where the caller has named others."""
        schema, union = sight.schema, sight.union
        *known, roles = self._roles
        if known[0] is not schema or known[1] is not union:
            roles = Roles(schema, self._told, union=union)
            self._roles = (schema, union, roles)
        return roles

    @property
    def left(self) -> Array:
        return self._left.live

    @property
    def table(self) -> Array:
        """Of each episode ``firsts``, ``lengths`` and ``strides``; int64 ``[episodes, 3]``."""
        return self._table.live

    @property
    def firsts(self) -> Array:
        return self.table[:, 0]

    @property
    def lengths(self) -> Array:
        return self.table[:, 1]

    @property
    def strides(self) -> Array:
        return self.table[:, 2]

    def starts(self, length: int, *, pad: bool) -> tuple[Array, int]:
        """Where slices of ``length`` steps may start, counted: cumulative over the episodes.

        The counts up to and with each episode, from a base on that is returned as well. A shorter
        episode has none, or with ``pad`` one: its beginning.
        """
        key = (length, pad)
        if key not in self._starts:
            self._starts[key], self._bases[key] = Fifo(np.int64), 0
            self._count_starts(key, self.lengths)
        return self._starts[key].live, self._bases[key]

    def _count_starts(self, key: tuple[int, bool], steps: Array) -> None:
        length, pad = key
        fifo = self._starts[key]
        base = int(fifo.live[-1]) if len(fifo) else self._bases[key]
        fifo.extend(base + np.maximum(steps - length + 1, int(pad)).cumsum())

    def _clear(self) -> None:
        for fifo in (self._left, self._table, self._counts):
            fifo.clear()
        self._starts.clear()
        self._bases.clear()

    def _drop(self, num_slots: int, num_rows: int) -> None:
        count = int(self._counts.live[:num_slots].sum())
        if count:
            for key, fifo in self._starts.items():
                self._bases[key] = int(fifo.live[count - 1])
                fifo.drop(count)
        self._table.drop(count)
        self._counts.drop(num_slots)
        self._left.drop(num_rows)

    def _add(self, sight: Sight, first: int, lengths: Array) -> None:
        ends = self.roles_in(sight).ends
        flags = [column_of(sight, path, "the ends of episodes") for path in ends]
        before = len(self._table)
        for block in blocks(lengths, _BLOCK_ROWS):
            shield.check()
            self._add_block(sight, flags, first + block.start, lengths[block])
        for key in self._starts:
            self._count_starts(key, self.lengths[before:])

    def _add_block(self, sight: Sight, flags: list[Column], first: int, lengths: Array) -> None:
        view = sight.view
        num_slots, num_rows = len(lengths), int(lengths.sum())
        low = int(view.starts[first])
        num_envs = view.facts[NUM_ENVS, first : first + num_slots]
        begins = np.cumsum(lengths) - lengths
        # Of each row: B, T and where it lies when the steps of an environment lie side by side.
        envs = np.repeat(num_envs, lengths)
        steps = np.repeat(lengths // num_envs, lengths)
        begin = np.repeat(begins, lengths)
        step, env = np.divmod(np.arange(num_rows) - begin, envs)
        position = begin + env * steps + step
        is_end = step == steps - 1
        found = sight.read([column.path for column in flags], np.arange(low, low + num_rows))
        for column, values in zip(flags, found, strict=True):
            is_end |= any_of(flat(numbers_of(column, values)))
        side_by_side = np.empty(num_rows, np.bool_)
        side_by_side[position] = is_end
        ends = side_by_side.nonzero()[0]
        episode_steps = np.diff(ends, prepend=-1)
        left = np.repeat(ends + 1, episode_steps) - np.arange(num_rows)
        self._left.extend(np.minimum(left[position], MAX_LEFT).astype(np.uint16))
        # And back: the row of each episode's first step.
        row_of = np.empty(num_rows, np.int64)
        row_of[position] = np.arange(num_rows)
        firsts = row_of[ends - episode_steps + 1]
        slots = np.searchsorted(begins, firsts, "right") - 1
        ordinals = firsts + self.num_dropped_rows + low - view.low
        self._table.extend(np.stack([ordinals, episode_steps, num_envs[slots]], 1))
        self._counts.extend(np.bincount(slots, minlength=num_slots))


def stride_of(view: View) -> int | None:
    """The rows from one step to the next; None where that is not the same for all."""
    num_envs = view.facts[NUM_ENVS, view.first : view.stop]
    return int(num_envs[0]) if (num_envs == num_envs[0]).all() else None
