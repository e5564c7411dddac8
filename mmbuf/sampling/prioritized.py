"""Prioritized: proportional prioritised replay (Schaul et al., *Prioritized Experience Replay*).

Row i is drawn with probability ``P(i) = p_i^alpha / sum of all``, and counts with the importance
weight ``(N P(i))^-beta``, divided by the largest of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from mmbuf import shield
from mmbuf.arguments import key_name, number
from mmbuf.errors import EmptyBufferError
from mmbuf.sampling.derived import Derived
from mmbuf.sampling.draw import Draw, Sampler, Sight
from mmbuf.sampling.tree import SumTree
from mmbuf.schema import Array
from mmbuf.slots import UUID_MARK

_MOST = 1e290  # of p^alpha, so that no sum of them is infinite
_LEAST = np.finfo(np.float64).tiny


class _Update(NamedTuple):
    """Priorities that were accepted."""

    leaves: Array
    values: Array  # p^alpha
    handles: Array
    num_late: int


class Prioritized(Sampler):
    """Rows in proportion to their priorities, with replacement, and importance weights.

    Batches have ``weights``, float32 ``[K]``, and ``info``, whose ``handle`` names the rows for
    `update_priorities`; the arguments of these names are what to call them. New rows have the
    highest priority seen so far. ``eps`` is added to each priority, so that none is 0. ``alpha`` 0
    is uniform; ``beta`` may be changed at any time.

    Equal seeds and updates give equal batches on one kind of processor. On another, whose powers
    are rounded otherwise, and after `load_state_dict`, which may order the sums otherwise, weights
    may differ in their last bits, and with a chance of about as little a row.
    """

    needs_info = True

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        weights: str = "weights",
        info: str = "info",
    ) -> None:
        super().__init__()
        self.weights, self.info = key_name("weights", weights), key_name("info", info)
        if self.weights == self.info:
            raise ValueError(f"info: expected another name than weights, got {info!r}.")
        self.alpha, self.beta, self.eps = (
            _finite(name, value) for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps))
        )
        self._rows = _Priorities()
        # Accepted, and not in the tree as a whole yet: an interrupted one is put there again.
        self._update: _Update | None = None
        self._updated: list[Array] = []  # handles, since the last draw
        self._num_late = 0

    @property
    def beta(self) -> float:
        """How far the weights make up for the priorities: 0 not at all, 1 fully."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _finite("beta", value)

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        self._check_is_outside()
        while (found := self._find(sight, num_chunks, generator)) is None:
            shield.run(self._follow, sight)
        leaves, values, low = found
        # (N P(i))^-beta over the largest of them: only ratios of the p^alpha are left, and of these
        # the logarithms are never infinite.
        logs = np.log(values)
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logs.min() - logs) * self.beta).astype(np.float32)
        return Draw(leaves + low, added={self.weights: weights})

    def _find(
        self, sight: Sight, num_chunks: int, generator: np.random.Generator
    ) -> tuple[Array, Array, int] | None:
        """Leaves, their p^alpha, and what makes rows of them.

        None where the sight has to be followed first.
        """
        with self._lock:
            rows = self._rows
            if not rows.is_at(sight):
                return None
            self._finish_update()
            if self._updated:
                self._updated = []
            total = rows.tree.total
            if not total > 0:
                raise EmptyBufferError("sample: expected a row with a priority above 0, got none.")
            leaves = rows.tree.find(generator.random(num_chunks) * total)
            return leaves, rows.tree.leaves[leaves], sight.view.low - rows.first_leaf

    def _follow(self, sight: Sight) -> None:
        with self._lock:
            self._finish_update()
            self._rows.follow(sight)
            self._count_late()

    def update_priorities(self, handles: torch.Tensor | Array, priorities: Any) -> None:
        """Set the priorities of the rows of ``handles``: int64 ``[K, 2]`` from ``batch["info"]``.

        ``priorities`` are ``[K]``, at least 0 and finite: ValueError otherwise, and nothing is
        changed. Those of rows that have left the window are ignored, and counted in `get_stats`
        by the next draw at the latest.
        """
        handles = _array(handles, np.int64)
        values = _array(priorities, np.float64).reshape(-1)
        if handles.shape != (len(values), 2):
            raise ValueError(
                f"handles: expected int64 of shape ({len(values)}, 2), one for each priority, "
                f"got {handles.shape}."
            )
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError("priorities: expected finite numbers of at least 0, got others.")
        values = values + self.eps
        with np.errstate(over="ignore", under="ignore"):
            powers = values**self.alpha
        # What is above 0 stays so, and can be drawn.
        np.maximum(powers, _LEAST, out=powers, where=values > 0)
        if not (powers <= _MOST).all():
            raise ValueError(
                f"priorities: expected (p + eps)^alpha of at most {_MOST:g}, "
                f"got p + eps = {values.max():g}."
            )
        self._check_is_outside()
        with self._lock:
            self._finish_update()
            leaves = self._rows.leaves_of(handles)
            is_there = leaves >= 0
            num_late = len(leaves) - int(is_there.sum())
            update = _Update(leaves[is_there], powers[is_there], handles[is_there], num_late)
            self._update = update  # from here on it is made, by whatever call comes next
            self._finish_update()

    def _finish_update(self) -> None:
        """Put what was accepted into the tree; once more where that was interrupted."""
        update = self._update
        if update is not None:
            self._rows.set(update.leaves, update.values)
            # At once: nothing is called.
            self._num_late += update.num_late
            self._updated += [update.handles]
            self._update = None

    def _count_late(self) -> None:
        """Count the updates whose rows had left already, and were not known to have."""
        if self._updated and self._rows.has_changed:
            leaves = self._rows.leaves_of(np.concatenate(self._updated))
            self._num_late += int((leaves < 0).sum())
        self._updated = []

    def get_stats(self) -> dict[str, Any]:
        """``late_updates``: priorities that came when their row had left the window."""
        return {"late_updates": self._num_late}

    def state_dict(self) -> dict[str, Any]:
        """The priorities of all rows, by trajectory; tensors and numbers."""
        with self._lock:
            return self._rows.state_dict(self._update)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the priorities of a `state_dict`, for the trajectories that are in it."""
        rows = _Priorities()
        rows.load_state_dict(state)
        self._check_is_outside()
        with self._lock:
            # At once: nothing is called.
            self._rows, self._update, self._updated = rows, None, []


def _finite(name: str, value: Any) -> float:
    found = number(name, value)
    if not 0 <= found < np.inf:
        raise ValueError(f"{name}: expected at least 0, got {found}.")
    return found


def _array(values: Any, dtype: Any) -> Array:
    """``values`` as an array; tensors of any device and dtype, with gradients or not."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values, dtype)


class _Priorities(Derived):
    """A tree whose leaves are the window's rows, from ``first_leaf`` on, in their order.

    It holds ``p^alpha``. What is left of a window that changed in its middle is found again by the
    marks of its trajectories.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree = SumTree(1)
        self.first_leaf = 0
        self._stop_leaf = 0
        self._highest = 1.0
        self._marks: list[Array] = []  # of the window's trajectories, in parts, oldest first
        self._saved: dict[int, Array] = {}  # of trajectories that are still to come, by mark
        self._order: tuple[Array, Array, Array] | None = None  # for `leaves_of`

    @property
    def has_changed(self) -> bool:
        """Whether trajectories came or left since `leaves_of` was asked last."""
        return self._order is None

    def leaves_of(self, handles: Array) -> Array:
        """The leaf of each handle; -1 where the row is not in the window."""
        if self._order is None:
            marks, ends = self._all_marks(), self._lengths.live.cumsum()
            order = marks.argsort(kind="stable")
            self._order = (
                marks[order],
                (ends - self._lengths.live)[order],
                self._lengths.live[order],
            )
        marks, begins, lengths = self._order
        if not len(marks):
            return np.full(len(handles), -1)
        at = np.minimum(marks.searchsorted(handles[:, 0]), len(marks) - 1)
        rows = handles[:, 1]
        is_there = (marks[at] == handles[:, 0]) & (rows >= 0) & (rows < lengths[at])
        return np.where(is_there, self.first_leaf + begins[at] + rows, -1)

    def set(self, leaves: Array, values: Array) -> None:
        """May be interrupted, and is whole when it is called again."""
        if len(leaves):
            self._highest = max(self._highest, float(values.max()))
            self.tree.set(leaves, values)

    def _all_marks(self) -> Array:
        self._marks = [np.concatenate([np.empty(0, np.int64), *self._marks])]
        return self._marks[0]

    def _values(self) -> Array:
        return self.tree.leaves[self.first_leaf : self._stop_leaf]

    def state_dict(self, update: _Update | None = None) -> dict[str, Any]:
        """With an update that may be half made."""
        marks, lengths = self._all_marks(), self._lengths.live
        values, highest = self._values().copy(), self._highest
        if update is not None and len(update.leaves):
            values[update.leaves - self.first_leaf] = update.values
            highest = max(highest, float(update.values.max()))
        if self._saved:  # loaded, and not drawn from since
            known = set(marks.tolist())
            late = [mark for mark in self._saved if mark not in known]
            marks = np.concatenate([marks, np.array(late, np.int64)])
            lengths = np.concatenate([lengths, [len(self._saved[mark]) for mark in late]])
            values = np.concatenate([values, *(self._saved[mark] for mark in late)])
        return {
            "marks": torch.from_numpy(np.array(marks, np.int64)),
            "lengths": torch.from_numpy(np.array(lengths, np.int64)),
            "values": torch.from_numpy(values),
            "highest": highest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ends = state["lengths"].numpy().cumsum()
        parts = np.split(state["values"].numpy().copy(), ends[:-1]) if len(ends) else []
        self._saved = dict(zip(state["marks"].tolist(), parts, strict=True))
        self._highest = float(state["highest"])

    def _clear(self) -> None:
        """Keep what is known, to find it again among the trajectories that come."""
        num_rows = int(self._lengths.live.sum())
        # Unless a change was broken off halfway.
        if len(self._all_marks()) == len(self._lengths) and num_rows == len(self._values()):
            self.load_state_dict(self.state_dict())
        self._marks.clear()
        self._order = None
        self.tree, self.first_leaf, self._stop_leaf = SumTree(1), 0, 0

    def _drop(self, num_slots: int, num_rows: int) -> None:
        self._marks = [self._all_marks()[num_slots:]]
        self._order = None
        self.tree.fill(self.first_leaf, 0.0, self.first_leaf + num_rows)
        self.first_leaf += num_rows

    def _add(self, sight: Sight, first: int, lengths: Array) -> None:
        view = sight.view
        marks = view.facts[UUID_MARK, first : view.stop].copy()
        num_rows = int(lengths.sum())
        if self._stop_leaf + num_rows > len(self.tree.leaves):
            values = self._values()
            tree = SumTree(2 * (len(values) + num_rows))
            tree.fill(0, values, len(values))
            self.tree, self.first_leaf, self._stop_leaf = tree, 0, len(values)
        start = self._stop_leaf
        values = np.full(num_rows, self._highest)
        if self._saved:
            stops = lengths.cumsum()
            for mark, stop, length in zip(
                marks.tolist(), stops.tolist(), lengths.tolist(), strict=True
            ):
                saved = self._saved.get(mark)
                if saved is not None and len(saved) == length:
                    values[stop - length : stop] = saved
        self.tree.fill(start, values, start + num_rows)
        self._stop_leaf += num_rows
        self._marks.append(marks)
        self._order = None
        self._saved.clear()
