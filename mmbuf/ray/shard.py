"""Shard: one shard of a buffer, an actor on its node, and how it is asked."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from mmbuf import files
from mmbuf.buffer import TrajectoryReplayBuffer
from mmbuf.errors import EmptyBufferError
from mmbuf.packages import optional_package
from mmbuf.ray.wire import packed, unpacked
from mmbuf.sampling import Sampler
from mmbuf.sampling.draw import Draw, Sight
from mmbuf.schema import Array, Schema, measure
from mmbuf.slots import TRAJECTORY_ID

ray = optional_package("ray", "ray")

# Threads of the actor: sampling waits neither for adding nor for what takes long.
CONCURRENCY = {"look": 4, "sample": 4, "add": 1, "all": 2}

# A shard's own window is a little larger than what it has of the whole window at most, so that
# rows which were drawn are still there when they are asked for, while others add.
_SLACK = 64


class Config(NamedTuple):
    """What all handles of a buffer share."""

    path: str  # ``{shard}`` in it stands for the number of a shard
    nodes: list[str]
    seed: int | list[int] | None
    sample_window_size: int
    on_lost: str
    prefetch: int
    refresh_s: float
    timeout_s: float

    @property
    def num_shards(self) -> int:
        return len(self.nodes)

    def path_of(self, number: int) -> str:
        return self.path.replace("{shard}", str(number))

    @property
    def shard_window_size(self) -> int:
        """The window of one shard."""
        return self.sample_window_size + _SLACK if self.sample_window_size else 0


class Known(NamedTuple):
    """What somebody knows of a shard's window: the first and last ids of an epoch."""

    epoch: str = ""
    first_id: int = -1
    last_id: int = -1


class Update(NamedTuple):
    """Of a shard's window: the oldest trajectory, and those behind the id ``since``.

    Ids mean nothing beyond their ``epoch``, which ends when the shard dies, is cleared or loaded.
    The schema is there where ``since`` is -1 and there are trajectories.
    """

    epoch: str
    since: int
    first_id: int
    ids: Array
    times: Array  # of addition; they never fall
    rows: Array  # how many each has
    schema: Schema | None


class StaleError(Exception):
    """The window is not what the rows were drawn from."""


class RowsAt(Sampler):
    """The rows of these ``offsets`` behind the first row of the trajectory ``first_id``.

    ``ids`` are trajectories from there on that the asker knows of, ``ends`` where their rows end.
    Rows behind the newest of them that is here are left out: ``is_here`` says which. StaleError
    where what is here is not what the asker knows, or none of the rows is here.
    """

    has_even_batches = False

    def __init__(self, first_id: int, ids: Array, ends: Array, offsets: Array) -> None:
        super().__init__()
        self._first_id, self._ids, self._ends = first_id, ids, ends
        self._offsets = offsets
        self.is_here = np.zeros(len(offsets), np.bool_)

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        view = sight.view
        ids = view.facts[TRAJECTORY_ID, view.first : view.stop]
        known = int(self._ids.searchsorted(ids[-1], "right")) - 1
        first = int(ids.searchsorted(self._first_id))
        if known < 0 or ids[min(first, len(ids) - 1)] != self._first_id:
            raise StaleError
        last = int(ids.searchsorted(self._ids[known]))
        low, high = (int(view.starts[view.first + i]) for i in (first, last + 1))
        if ids[last] != self._ids[known] or high - low != self._ends[known]:
            raise StaleError
        self.is_here = self._offsets < high - low
        if not self.is_here.any():
            raise StaleError
        return Draw(low + self._offsets[self.is_here])


class Shard:
    """The actor. Its store is opened by the first call, so that errors of opening reach a caller.

    Thread-safe: its methods run in the threads of `CONCURRENCY`.
    """

    def __init__(self, config: Config, number: int, arguments: Mapping[str, Any]) -> None:
        self._config, self._number, self._arguments = config, number, dict(arguments)
        self._buffer: TrajectoryReplayBuffer | None = None
        self._change_lock = threading.Lock()  # one at a time changes what there is; first
        self._lock = threading.Lock()  # guards what follows
        self._epoch = ""
        self._trajectories: deque[tuple[int, float, int]] = deque()  # id, time, rows
        self._schema: Schema | None = None

    @ray.method(concurrency_group="look")  # type: ignore[untyped-decorator]
    def config(self) -> Config:
        return self._config

    def _open(self) -> TrajectoryReplayBuffer:
        if self._buffer is None:
            with self._change_lock:
                if self._buffer is None:
                    self._check_path()
                    buffer = TrajectoryReplayBuffer(
                        seed=self._config.seed,
                        auto_save=True,
                        auto_save_path=self._config.path_of(self._number),
                        sample_window_size=self._config.shard_window_size,
                        **self._arguments,
                    )
                    try:
                        if not len(buffer) and not buffer.trajectory_counter:
                            self._share_ids(buffer)
                        self._begin_epoch(buffer)
                    except BaseException:
                        buffer.close()
                        raise
                    self._buffer = buffer
        return self._buffer

    def _check_path(self) -> None:
        """ValueError where there are stores of more shards, whose rows would not be seen."""
        num_shards = self._config.num_shards
        if files.exists(more := self._config.path_of(num_shards)):
            raise ValueError(
                f"num_shards: expected more than {num_shards}, since there is {more}. Make the "
                f"buffer with as many shards as before, or elsewhere, and load these stores there."
            )

    def _share_ids(self, buffer: TrajectoryReplayBuffer) -> None:
        """No two shards are to give the same id: as parts of one checkpoint, here an empty one."""
        num_shards = self._config.num_shards
        if num_shards == 1:
            return
        path = files.temporary(self._config.path_of(self._number))
        try:
            with TrajectoryReplayBuffer() as empty:
                empty.save_checkpoint(path)
            buffer.load_checkpoint(path, True, self._number, num_shards)
        finally:
            files.remove(path)

    def _begin_epoch(self, buffer: TrajectoryReplayBuffer) -> None:
        entries = [buffer.get_entry(i) for i in buffer.window_ids]
        with self._lock:
            self._epoch = uuid.uuid4().hex
            self._trajectories.clear()
            self._schema = buffer.schema
            for entry in entries:
                self._note(entry.trajectory_id, entry.added_at, entry.num_samples)

    def _note(self, trajectory_id: int, time_s: float, num_rows: int) -> None:
        known = self._trajectories
        # A clock that is set back changes no order.
        known.append((trajectory_id, max(time_s, known[-1][1]) if known else time_s, num_rows))
        limit = self._config.shard_window_size
        while limit and len(known) > limit:
            known.popleft()

    @ray.method(concurrency_group="look")  # type: ignore[untyped-decorator]
    def update(self, known: Known) -> Update | None:
        """What is new to who knows this; None where nothing is, which travels in half the time."""
        self._open()
        with self._lock:
            trajectories = self._trajectories
            ids = (trajectories[0][0], trajectories[-1][0]) if trajectories else (-1, -1)
            if known == (self._epoch, *ids):
                return None
            since = known.last_id if known.epoch == self._epoch else -1
            come = []
            for trajectory in reversed(trajectories):
                if trajectory[0] <= since:
                    break
                come.append(trajectory)
            epoch = self._epoch
            schema = self._schema if since == -1 else None
        come.reverse()
        columns = list(zip(*come, strict=True)) or [(), (), ()]
        new_ids, times, rows = (
            np.array(c, d)
            for c, d in zip(columns, "qdq", strict=True)  # int64, float64, int64
        )
        return Update(epoch, since, ids[0], new_ids, times, rows, schema)

    @ray.method(concurrency_group="add")  # type: ignore[untyped-decorator]
    def add(
        self,
        items: Sequence[tuple[Any, int, str]],
        like: Schema | None,
        known: Known,
    ) -> Update | None:
        """Add packed trajectories; the first of a shard must fit to the schema of the others."""
        buffer = self._open()
        with self._change_lock:
            for packed_columns, max_episode_length, model_weights_id in items:
                trajectory_id = buffer.trajectory_counter
                columns = unpacked(packed_columns)
                if like is not None and not len(buffer):
                    measure(columns, like)
                metadata = {
                    "max_episode_length": max_episode_length,
                    "model_weights_id": model_weights_id,
                }
                buffer.add_trajectories([columns | metadata])
                entry = buffer.get_entry(trajectory_id)
                with self._lock:
                    self._schema = buffer.schema
                    self._note(trajectory_id, entry.added_at, entry.num_samples)
        update: Update | None = self.update(known)
        return update

    @ray.method(concurrency_group="sample")  # type: ignore[untyped-decorator]
    def rows(
        self, span: tuple[str, int, int, int], offsets: Array, known: Known
    ) -> tuple[dict[str, Any] | None, Update | None]:
        """Rows by their place in a span: epoch, first and last id, rows; None where it is stale."""
        buffer = self._open()
        of_epoch, first_id, last_id, num_rows = span
        sampler = RowsAt(first_id, np.array([last_id]), np.array([num_rows]), offsets)
        batch = None
        if of_epoch == self._epoch:
            with suppress(StaleError, EmptyBufferError):
                batch = packed(buffer.sample(len(offsets), sampler=sampler))
        return batch, self.update(known)

    @ray.method(concurrency_group="look")  # type: ignore[untyped-decorator]
    def stats(self) -> dict[str, Any]:
        return self._open().get_stats()

    @ray.method(concurrency_group="look")  # type: ignore[untyped-decorator]
    def size(self) -> tuple[int, int]:
        """Trajectories and rows of the whole list."""
        buffer = self._open()
        return len(buffer), buffer.total_samples

    @ray.method(concurrency_group="all")  # type: ignore[untyped-decorator]
    def flush(self, sync: bool) -> None:
        self._open().flush(sync)

    @ray.method(concurrency_group="all")  # type: ignore[untyped-decorator]
    def clear(self) -> None:
        buffer = self._open()
        with self._change_lock:
            buffer.clear()
            self._begin_epoch(buffer)

    @ray.method(concurrency_group="all")  # type: ignore[untyped-decorator]
    def save(self, path: str, trajectory_format: str | None) -> None:
        self._open().save_checkpoint(path, trajectory_format)

    @ray.method(concurrency_group="all")  # type: ignore[untyped-decorator]
    def load(self, path: str, is_distributed: bool) -> None:
        buffer = self._open()
        with self._change_lock:
            num_shards = self._config.num_shards
            buffer.load_checkpoint(path, is_distributed, self._number, num_shards)
            self._begin_epoch(buffer)

    @ray.method(concurrency_group="all")  # type: ignore[untyped-decorator]
    def close(self) -> None:
        with self._change_lock:
            if self._buffer is not None:
                self._buffer.close()
