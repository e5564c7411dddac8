"""NStep: rows with the discounted rewards of the steps after them.

The targets of n-step learning as in Sutton and Barto, *Reinforcement Learning*, section 7.1: from
row t with rewards r and an episode that goes on for k >= 1 steps, k <= n,

    rewards  = r[t] + gamma r[t+1] + ... + gamma^(k-1) r[t+k-1]
    discount = gamma^k, or 0 when step t+k-1 terminated the episode
    target   = rewards + discount * value(next_obs of step t+k-1)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from mmbuf.arguments import number, told, whole
from mmbuf.errors import SchemaError
from mmbuf.sampling.derived import Follower
from mmbuf.sampling.draw import Draw, Sampler, Sight, any_of, column_of, flat
from mmbuf.sampling.episodes import (
    DONES,
    MAX_LEFT,
    TERMINATIONS,
    TRUNCATIONS,
    Episodes,
    stride_of,
)
from mmbuf.sampling.uniform import Uniform
from mmbuf.schema import Array, Column, Path, Schema
from mmbuf.slots import NUM_ENVS

_REWARDS: Path = ("rewards",)
_FLAGS = (DONES, TERMINATIONS, TRUNCATIONS)


class NStep(Follower):
    """Rows whose ``rewards`` are discounted sums over up to ``n`` steps of their episode.

    ``next_obs`` and the flags are those of the last step that was summed, and the new key
    ``discount`` is what to multiply the value there with: ``gamma`` to the power of the steps
    summed, 0 after a termination. It has a trailing dimension of 1 for each of a row of rewards.
    The sum stops at the end of the episode and of the trajectory. ``rows`` draws the rows, such as
    `Prioritized`.
    """

    def __init__(self, n: int, gamma: float, rows: Sampler | None = None) -> None:
        super().__init__()
        n, gamma = whole("n", n, None), number("gamma", gamma)
        if not 1 <= n <= MAX_LEFT:
            raise ValueError(f"n: expected 1 to {MAX_LEFT} steps, got {n}.")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma: expected 0 to 1, got {gamma}.")
        if rows is not None and not isinstance(rows, Sampler):
            raise TypeError(f"rows: expected None or a Sampler, got {told(rows)}.")
        self.n = n
        self.gamma = gamma
        self.rows = rows or Uniform()
        self.needs_info = self.rows.needs_info
        self.has_even_batches = self.rows.has_even_batches
        # One by one: those of an array NumPy computes by another routine where the processor has
        # one, and the same rewards would have other sums there.
        self._powers = np.array([float(gamma) ** steps for steps in range(n + 1)])
        self._ahead = np.arange(n)
        self._episodes = Episodes()
        self._discounts = self._powers.astype(np.float32)

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        if self.rows.owner not in (None, self.owner):
            raise ValueError(
                "rows: expected a sampler of this buffer's own, got one that has drawn from "
                "another. Make one for each."
            )
        left, stride, column, moved = self._known(sight)
        draw = self.rows.draw(sight, num_chunks, generator)
        if draw.shape or draw.moved or draw.replaced:
            raise ValueError("rows: expected a sampler of single rows.")
        rows = draw.rows
        steps = np.minimum(left.take(rows - view.low), self.n).astype(np.int64)
        if stride is None:
            stride = view.facts[NUM_ENVS].take(view.slots_of(rows))
        last = steps - 1
        draw.moved = (moved, rows + last * stride)
        ahead = self._ahead[: steps.max(), None]
        (rewards,) = sight.read([_REWARDS], (rows + np.minimum(ahead, last) * stride).reshape(-1))
        draw.replaced[_REWARDS] = self._sum(column, rewards, ahead <= last)
        draw.added["discount"] = np.empty(0)  # its name is taken; its value follows
        draw.derive = partial(self._discount, steps)
        return draw

    def _see(self, sight: Sight) -> tuple[Array, int | None, Column, frozenset[Path]]:
        """Of each row the steps that are left, and `stride_of`; the rewards, what is moved."""
        self._episodes.follow(sight)
        column, moved = _rewards_of(sight), _moved(sight.schema)
        return self._episodes.left, stride_of(sight.view), column, moved

    def _discount(self, steps: Array, columns: Mapping[Path, Array]) -> dict[str, Array]:
        """What the value behind the last of ``steps`` counts, from the flags of that one."""
        discount = self._discounts.take(steps)
        flags = _terminations(columns)
        if flags is not None:
            discount[flags] = 0.0
        return {"discount": discount.reshape(-1, *[1] * (columns[_REWARDS].ndim - 1))}

    def _sum(self, column: Column, rewards: Array, is_summed: Array) -> Array:
        """The discounted sums ``[K, *S]`` of those rewards ``[n * K, *S]`` that ``[n, K]`` says."""
        num_steps, num_rows = is_summed.shape
        rewards = rewards.reshape(num_steps, num_rows, -1)
        rewards[~is_summed] = 0
        # In float64: float32 rewards of many steps would lose digits to the order of the sum.
        sums = (rewards * self._powers[:num_steps, None, None]).sum(0)
        return np.asarray(sums.astype(column.storage).reshape(num_rows, *column.row_shape))

    def get_stats(self) -> dict[str, Any]:
        """Those of ``rows``."""
        return self.rows.get_stats()

    def renew_lock(self) -> None:
        super().renew_lock()
        self.rows.renew_lock()


def _rewards_of(sight: Sight) -> Column:
    column = column_of(sight, _REWARDS, "NStep")
    if column.storage.kind != "f":
        raise SchemaError(f"column 'rewards': expected floats for NStep, got {column.dtype}.")
    return column


def _moved(schema: Schema) -> frozenset[Path]:
    """The columns that are those of the last step."""
    return frozenset(
        column.path
        for column in schema.columns
        if column.path[0] == "next_obs" or column.path in _FLAGS
    )


def _terminations(columns: Mapping[Path, Array]) -> Array | None:
    """Whether the episode ended for good in each row; None where no column tells."""
    if TERMINATIONS in columns:
        return any_of(flat(columns[TERMINATIONS]))
    if DONES not in columns:
        return None
    is_over = flat(columns[DONES])
    if TRUNCATIONS in columns:
        is_over = np.logical_and(is_over, np.logical_not(flat(columns[TRUNCATIONS])))
    return any_of(is_over)
