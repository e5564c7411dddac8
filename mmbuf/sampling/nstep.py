"""NStep: rows with the discounted rewards of the steps after them.

The targets of n-step learning as in Sutton and Barto, *Reinforcement Learning*, section 7.1: from
row t with rewards r and an episode that goes on for k >= 1 steps, k <= n,

    rewards  = r[t] + gamma r[t+1] + ... + gamma^(k-1) r[t+k-1]
    discount = gamma^k, or 0 when step t+k-1 terminated the episode
    target   = rewards + discount * value(next_obs of step t+k-1)
"""

from __future__ import annotations

import numpy as np

from mmbuf.errors import SchemaError
from mmbuf.sampling.draw import Draw, Sampler, Sight, column_of, flat
from mmbuf.sampling.episodes import DONES, MAX_LEFT, TERMINATIONS, TRUNCATIONS, Episodes
from mmbuf.sampling.uniform import Uniform
from mmbuf.schema import Array, Path

_REWARDS: Path = ("rewards",)
_FLAGS = (DONES, TERMINATIONS, TRUNCATIONS)


class NStep(Sampler):
    """Rows whose ``rewards`` are discounted sums over up to ``n`` steps of their episode.

    ``next_obs`` and the flags are those of the last step that was summed, and the new key
    ``discount`` is what to multiply the value there with: ``gamma`` to the power of the steps
    summed, 0 after a termination. It has a trailing dimension of 1 for each of a row of rewards.
    The sum stops at the end of the episode and of the trajectory. ``rows`` draws the rows, such as
    `Prioritized`.
    """

    def __init__(self, n: int, gamma: float, rows: Sampler | None = None) -> None:
        super().__init__()
        if not 1 <= n <= MAX_LEFT:
            raise ValueError(f"n: expected 1 to {MAX_LEFT} steps, got {n}.")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma: expected 0 to 1, got {gamma}.")
        self.n = n
        self.gamma = gamma
        self.rows = rows or Uniform()
        self.needs_info = self.rows.needs_info
        self._powers = gamma ** np.arange(n + 1)
        self._steps = np.arange(n)[:, None]
        # Row k: what each of n rewards counts where k steps are summed.
        self._factors = np.tril(np.tile(self._powers[:n], (n + 1, 1)), -1)
        self._episodes = Episodes()

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        with self._lock:
            self._episodes.follow(sight)
            draw = self.rows.draw(sight, num_chunks, generator)
            if draw.shape or draw.moved or draw.replaced:
                raise ValueError("rows: expected a sampler of single rows.")
            rows = draw.rows
            steps = np.minimum(self._episodes.left[rows - view.low], self.n).astype(np.int64)
        strides = view.facts[0].take(view.slots_of(rows))
        last = steps - 1
        ahead = rows + np.minimum(self._steps, last) * strides
        draw.moved = (_moved(sight), rows + last * strides)
        draw.replaced[_REWARDS] = self._sum(sight, ahead, steps)
        is_over = _terminations(sight, draw.moved[1])
        discount = np.where(is_over, 0.0, self._powers.take(steps)).astype(np.float32)
        ndim = draw.replaced[_REWARDS].ndim
        draw.added["discount"] = discount.reshape(-1, *[1] * (ndim - 1))
        return draw

    def _sum(self, sight: Sight, ahead: Array, steps: Array) -> Array:
        """The discounted rewards of rows ``[n, K]``, of which ``steps`` ``[K]`` count."""
        column = column_of(sight, _REWARDS, "NStep")
        if column.storage.kind != "f":
            raise SchemaError(f"column 'rewards': expected floats for NStep, got {column.dtype}.")
        (rewards,) = sight.read([_REWARDS], ahead.reshape(-1))
        n, num_rows = ahead.shape
        # In float64: float32 rewards of many steps would lose digits to the order of the sum.
        factors = self._factors.take(steps, 0).T[..., None]
        sums = (rewards.reshape(n, num_rows, -1) * factors).sum(0)
        return np.asarray(sums.astype(column.storage).reshape(num_rows, *column.row_shape))

    def renew_lock(self) -> None:
        super().renew_lock()
        self.rows.renew_lock()


def _moved(sight: Sight) -> frozenset[Path]:
    """The columns that are those of the last step."""
    return frozenset(
        column.path
        for column in sight.schema.columns
        if column.path[0] == "next_obs" or column.path in _FLAGS
    )


def _terminations(sight: Sight, rows: Array) -> Array:
    """Whether the episode ended for good in each of these rows."""
    paths = {column.path for column in sight.schema.columns}
    if TERMINATIONS not in paths and DONES not in paths:
        return np.zeros(len(rows), np.bool_)
    read = [TERMINATIONS] if TERMINATIONS in paths else [DONES, TRUNCATIONS]
    flags = sight.read([path for path in read if path in paths], rows)
    is_over, *truncated = (np.asarray(flat(found).any(axis=1)) for found in flags)
    return is_over & ~truncated[0] if truncated else is_over
