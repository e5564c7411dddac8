"""NStep: rows with the discounted rewards of the steps after them.

The targets of n-step learning as in Sutton and Barto, *Reinforcement Learning*, section 7.1: from
row t with rewards r and an episode that goes on for k >= 1 steps, k <= n,

    rewards  = r[t] + gamma r[t+1] + ... + gamma^(k-1) r[t+k-1]
    discount = gamma^k, or 0 when step t+k-1 terminated the episode
    target   = rewards + discount * value(next state of step t+k-1)

Where each step has a discount d of its own, a power of gamma is a product with those:
gamma^2 is gamma d[t] gamma d[t+1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mmbuf.arguments import key_name, number, told, whole
from mmbuf.errors import SchemaError
from mmbuf.roles import REWARD, TERMINATION, Roles, Told
from mmbuf.sampling.derived import Follower
from mmbuf.sampling.draw import (
    Draw,
    Sampler,
    Sight,
    any_of,
    column_of,
    flat,
    numbers_of,
    storage_of,
)
from mmbuf.sampling.episodes import MAX_LEFT, Episodes, stride_of
from mmbuf.sampling.uniform import Uniform
from mmbuf.schema import Array, Column, Path
from mmbuf.slots import NUM_ENVS


class _Columns(NamedTuple):
    """The columns that targets are made of; of ``flags`` those by which an end is told."""

    reward: Column
    discount: Column | None
    flags: dict[Path, Column]
    roles: Roles
    moved: frozenset[Path]  # those of the last step


class NStep(Follower):
    """Rows whose rewards are discounted sums over up to ``n`` steps of their episode.

    Next states and flags of ends are those of the last step that was summed, and the key
    ``discount``, or what it is called by this argument, is what to multiply the value there with:
    ``gamma`` to the power of the steps summed, 0 after a termination. It is new, float32, and has a
    trailing dimension of 1 for each of a row of rewards; or that of a stored column of floats with
    this name. The sum stops at the end of the episode and of the trajectory. ``rows`` draws the
    rows, such as `Prioritized`. `mmbuf.roles` says how columns are known, and what ``roles`` is
    for; a stored discount is multiplied with ``gamma``.
    """

    def __init__(
        self,
        n: int,
        gamma: float,
        rows: Sampler | None = None,
        *,
        roles: Told | None = None,
        discount: str = "discount",
    ) -> None:
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
        self.discount = key_name("discount", discount)
        self.needs_info = self.rows.needs_info
        self.info = self.rows.info
        self.has_even_batches = self.rows.has_even_batches
        # One by one: those of an array NumPy computes by another routine where the processor has
        # one, and the same rewards would have other sums there.
        self._powers = np.array([float(gamma) ** steps for steps in range(n + 1)])
        self._ahead = np.arange(n)
        self._episodes = Episodes(roles)

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        if self.rows.owner not in (None, self.owner):
            raise ValueError(
                "rows: expected a sampler of this buffer's own, got one that has drawn from "
                "another. Make one for each."
            )
        left, stride, columns = self._known(sight)
        draw = self.rows.draw(sight, num_chunks, generator)
        if draw.shape or draw.moved or draw.replaced:
            raise ValueError("rows: expected a sampler of single rows.")
        if self.discount in draw.added:
            raise ValueError(
                f"discount: expected another name than those that rows adds, got {self.discount!r}."
            )
        rows = draw.rows
        steps = np.minimum(left.take(rows - view.low), self.n).astype(np.int64)
        if stride is None:
            stride = view.facts[NUM_ENVS].take(view.slots_of(rows))
        last = steps - 1
        draw.moved = (columns.moved, rows + last * stride)
        ahead = self._ahead[: steps.max(), None]
        is_summed = ahead <= last
        summed = (rows + np.minimum(ahead, last) * stride).reshape(-1)
        reward, stored = columns.reward, columns.discount
        paths = [reward.path] if stored is None else [reward.path, stored.path]
        found = sight.read(paths, summed)
        rewards = numbers_of(reward, found[0]).reshape(*is_summed.shape, -1)
        rewards[~is_summed] = 0
        if stored is None:
            factors, discounts = self._powers[: len(ahead), None, None], self._powers.take(steps)
        else:
            own = numbers_of(stored, found[1]).reshape(*is_summed.shape, -1)
            factors, discounts = self._with_stored(own, is_summed, steps)
        if not factors.all():  # what counts nothing may be anything: NaN, infinite
            rewards = np.where(factors, rewards, 0)
        # In float64: float32 rewards of many steps would lose digits to the order of the sum.
        sums = (rewards * factors).sum(0).reshape(len(rows), *reward.row_shape)
        draw.replaced[reward.path] = storage_of(reward, sums)
        if stored is None or stored.path != (self.discount,):
            draw.added[self.discount] = np.empty(0)  # its name is taken; its value follows
        draw.derive = partial(self._discounted, columns, discounts)
        return draw

    def _see(self, sight: Sight) -> tuple[Array, int | None, _Columns]:
        """Of each row the steps that are left, and `stride_of`; the columns."""
        self._episodes.follow(sight)
        return self._episodes.left, stride_of(sight.view), self._columns_of(sight)

    def _columns_of(self, sight: Sight) -> _Columns:
        roles = self._episodes.roles_in(sight)
        reward = _floats_of(sight, roles.expected(REWARD, "NStep"))
        discount = None
        if roles.discount is not None:
            discount = column_of(sight, roles.discount, "NStep")
            width, num_rewards = _width_of(discount), _width_of(reward)
            if width not in (1, num_rewards):
                raise SchemaError(
                    f"column {discount.name!r}: expected one discount a row, or one for each of "
                    f"{num_rewards} rewards, got {width}."
                )
            if discount.path == (self.discount,):
                _floats_of(sight, discount.path)
            if roles.flags == [roles.done] and not roles.is_said(TERMINATION):
                done, told = ".".join(roles.done or ()), "roles={'termination': None}"
                raise SchemaError(
                    f"roles: expected a column that is the termination, got {done!r}, an end of "
                    f"either kind, and {discount.name!r}, which may say of which. Say {told} where "
                    f"the discounts do, roles={{'discount': None}} where each end is for good."
                )
        flags = {path: column_of(sight, path, "the ends of episodes") for path in roles.flags}
        moved = frozenset([*roles.next_states, *flags])
        return _Columns(reward, discount, flags, roles, moved)

    def _with_stored(self, own: Array, is_summed: Array, steps: Array) -> tuple[Array, Array]:
        """What each reward ``[n, K, C]`` and the value behind the last ``[K, C]`` count.

        With the discounts ``own`` that the steps have.
        """
        products = np.where(is_summed[:, :, None], own.astype(np.float64), 1.0).cumprod(0)
        factors = np.ones_like(products)
        factors[1:] = products[:-1]
        factors *= self._powers[: len(factors), None, None]
        return factors, self._powers.take(steps)[:, None] * products[-1]

    def _discounted(
        self, columns: _Columns, discounts: Array, found: Mapping[Path, Array]
    ) -> dict[str, Array]:
        """What the value behind the last step counts, from the flags of that one."""
        is_over = _terminations(columns, found)
        if is_over is not None:
            discounts[is_over] = 0.0
        reward, stored = columns.reward, columns.discount
        num_rows = len(discounts)
        if stored is not None and stored.path == (self.discount,):
            target = found[stored.path]
            target[...] = storage_of(stored, discounts.reshape(target.shape))
            return {}
        if discounts.size == num_rows:
            shape: tuple[int, ...] = (1,) * len(reward.row_shape)
        else:
            shape = reward.row_shape
        return {self.discount: discounts.astype(np.float32).reshape(num_rows, *shape)}

    def get_stats(self) -> dict[str, Any]:
        """Those of ``rows``."""
        return self.rows.get_stats()

    def renew_lock(self) -> None:
        super().renew_lock()
        self.rows.renew_lock()


def _floats_of(sight: Sight, path: Path) -> Column:
    column = column_of(sight, path, "NStep")
    if column.storage.kind != "f" and column.viewed_as is None:
        raise SchemaError(f"column {column.name!r}: expected floats for NStep, got {column.dtype}.")
    return column


def _width_of(column: Column) -> int:
    return math.prod(column.row_shape)


def _terminations(columns: _Columns, found: Mapping[Path, Array]) -> Array | None:
    """Whether the episode ended for good in each row; None where no column tells."""
    roles = columns.roles

    def flags(path: Path) -> Array:
        return flat(numbers_of(columns.flags[path], found[path]))

    if roles.termination is not None:
        return any_of(flags(roles.termination))
    if roles.done is None or (columns.discount is not None and roles.truncation is None):
        return None  # the stored discounts tell, if anything does
    is_over = flags(roles.done)
    if roles.truncation is not None:
        is_over = np.logical_and(is_over, np.logical_not(flags(roles.truncation)))
    return any_of(is_over)
