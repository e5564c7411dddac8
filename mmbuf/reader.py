"""ReplayReader: sample stores that someone else wrote or is writing.

It takes no lock and writes nothing. What it sees grows with the stores: each `sample` asks with one
``stat`` of the journal whether there is something new, and reads the new lines only. What is new is
taken in where no signal interrupts it (`shield`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from mmbuf import arguments, shield, snapshot, vm
from mmbuf.columns import SAME, is_common
from mmbuf.entry import Entry
from mmbuf.errors import ClosedError, CorruptError, EmptyBufferError
from mmbuf.locations import locations
from mmbuf.notebook import Shown
from mmbuf.sampling import Sampler
from mmbuf.schema import Schema
from mmbuf.stores import News, Stores, checked_shard
from mmbuf.trajectory import Trajectory
from mmbuf.window import Window

_Path = str | os.PathLike[str]

_SHORTEST_SLEEP_S = 0.001
_LONGEST_SLEEP_S = 0.05
_MAY_HAVE_CHANGED = (EmptyBufferError, CorruptError, FileNotFoundError)


class _Options(NamedTuple):
    """What a reader was made with."""

    paths: list[str]
    is_list: bool
    sample_window_size: int
    cache_size: int | None
    shard: tuple[int, int] | None
    follow: bool
    columns: str


class ReplayReader:
    """Random rows of one store or several, read-only. Opening reads journals and no data file.

    Parameters
    ----------
    path
        A store, a checkpoint or a directory of RLinf's; or a list of them, or a pattern such as
        ``run/rank_*``, which are one window in the order of the time of addition. Stores that
        appear later under a pattern are picked up. A path that exists is itself, brackets and all:
        see `mmbuf.locations`.
    seed
        As in `TrajectoryReplayBuffer`. Opened in a worker of a DataLoader it draws
        from a stream of that worker's.
    sample_window_size, cache_size
        As in `TrajectoryReplayBuffer`; the window is by default the whole.
    shard
        ``(rank, world_size)``: only this rank's trajectories. Each belongs to exactly one rank, and
        stays with it while the stores grow. Each rank draws from a stream of its own.
    follow
        False: what is seen stays as it was at opening, but for what a writer has removed.
    columns
        As in `TrajectoryReplayBuffer`: "common" takes trajectories, and stores, with several
        schemas.

    FileNotFoundError where there is no store, SchemaError where two do not fit together.

    Thread-safe but for `close`. A forked child, and whoever is sent a reader by pickle (a few
    kilobytes: paths and state), draw from streams of their own.
    """

    def __init__(
        self,
        path: _Path | Sequence[_Path],
        seed: int | Sequence[int] | None = 0,
        sample_window_size: int = 0,
        cache_size: int | None = None,
        shard: tuple[int, int] | None = None,
        follow: bool = True,
        columns: str = SAME,
    ) -> None:
        is_common(columns)
        paths, is_list = locations("path", path)
        sample_window_size = arguments.whole("sample_window_size", sample_window_size)
        cache_size = arguments.whole_or_none("cache_size", cache_size)
        shard = checked_shard(shard)
        entropy = arguments.seed(seed)
        worker = get_worker_info()
        # No shard and no child of a reader has such a key.
        of_worker = () if worker is None else (0, 0, worker.id)
        seeds = np.random.SeedSequence(entropy, spawn_key=(*(shard or ()), *of_worker))
        self._options = _Options(
            paths,
            is_list,
            sample_window_size,
            cache_size,
            shard,
            follow,
            columns,
        )
        shield.run(self._open, seeds)

    def _open(self, seeds: np.random.SeedSequence) -> None:
        options = self._options
        self._is_closed = False
        self._follow = options.follow
        self._stores = Stores(
            options.paths,
            options.is_list,
            options.shard,
            follow=options.follow,
            is_common=is_common(options.columns),
        )
        self._window = Window(
            seeds=seeds,
            window_size=options.sample_window_size,
            cache_size=options.cache_size,
            can_map=True,
        )
        try:
            with vm.uncollected():
                news = self._stores.open()
                news.is_late = False  # all are sorted
                self._take_in(news)
        except BaseException:
            self._stores.close()  # the error's traceback may keep them for long
            raise

    def refresh(self) -> bool:
        """Take in what has changed; whether anything has. With ``follow=False`` nothing does.

        CorruptError for a damaged journal, SchemaError for a store that does not fit; what was
        seen before stays.
        """
        if self._is_closed:
            raise _closed("refresh")
        if not self._follow:
            return False
        stores = self._stores
        if stores.is_single and not (stores.has_news() or self._window.has_evicted):
            return False
        return shield.run(self._refresh)

    def _refresh(self) -> bool:
        with self._window.change_lock:
            if self._is_closed:  # since it was looked at, by another thread
                raise _closed("refresh")
            news = self._stores.refresh()
            has_changed = bool(news)
            self._take_in(news)
            self._window.reclaim()  # what gathers of other threads still looked at
            if news.error is not None:
                raise news.error
            return has_changed

    def _take_in(self, news: News) -> None:
        """Change the window; what fails stays in ``news``."""
        if not news:
            return
        window = self._window
        schema = self._stores.schema
        with window.changing():
            if news.come and window.entries.keys() <= set(news.gone):
                assert schema is not None
                come = list(news.come.values())
                window.load(window.cache_for(schema, come), come)
                news.gone.clear()
                news.come.clear()
            if news.gone:
                window.remove(news.gone)
                news.gone.clear()
            if news.come:
                assert schema is not None
                window.open(schema, news.come.values())
                news.come.clear()
                if news.is_late:  # a store that is new to us may be older than the others
                    window.sort()
            news.is_late = False

    def sample(
        self,
        num_chunks: int,
        out: Mapping[str, Any] | None = None,
        *,
        sampler: Sampler | None = None,
        with_info: bool | str = False,
        as_numpy: bool = False,
        as_tensordict: bool = False,
        device: torch.device | str | None = None,
    ) -> Any:
        """As `TrajectoryReplayBuffer.sample`; of what has been published up to now."""
        if self._is_closed:
            raise _closed("sample")
        if self._follow and (self._stores.looks_new() or self._window.has_evicted):
            self.refresh()
        while True:
            num_changes = self._window.num_changes
            try:
                # Called as it is, by no C code: so that no interrupt loses a batch that has come.
                return self._window.sample(
                    num_chunks, out, sampler, with_info, as_numpy, as_tensordict, device
                )
            except _MAY_HAVE_CHANGED:
                self._check_can_retry(num_changes)

    def is_ready(self, min_size: int) -> bool:
        """Whether there are ``min_size`` trajectories; looks for new ones where there are fewer."""
        min_size = arguments.whole("min_size", min_size, None)
        if len(self) < min_size:
            self.refresh()
        return len(self) >= min_size

    def wait_for(self, min_size: int, timeout_s: float | None = None) -> bool:
        """Sleep until there are ``min_size`` trajectories; False if not within ``timeout_s``.

        With ``follow=False`` there is nothing to wait for.
        """
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        sleep_s = _SHORTEST_SLEEP_S
        while True:
            if self.is_ready(min_size):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._follow:
                return False
            time.sleep(min(sleep_s, left_s))
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def get_trajectory(self, trajectory_id: Any) -> Trajectory:
        """As `TrajectoryReplayBuffer.get_trajectory`; by one of `trajectory_ids`."""
        if self._is_closed:
            raise _closed("get_trajectory")
        return shield.run(self._get_trajectory, trajectory_id)

    def _get_trajectory(self, trajectory_id: Any) -> Trajectory:
        while True:
            num_changes = self._window.num_changes
            try:
                return self._window.get_trajectory(trajectory_id)
            except _MAY_HAVE_CHANGED:
                self._check_can_retry(num_changes)
            except KeyError:
                if not self._window.has_changed_since(num_changes):
                    raise

    def get_entry(self, trajectory_id: Any) -> Entry:
        """As `TrajectoryReplayBuffer.get_entry`; by one of `trajectory_ids`."""
        while True:
            num_changes = self._window.num_changes
            try:
                return self._window.get_entry(trajectory_id)
            except KeyError:
                if not shield.run(self._window.has_changed_since, num_changes):
                    raise

    def _check_can_retry(self, num_changes: int) -> None:
        """Raise the error that is handled, unless the window has changed since.

        A file that is gone was told as gone before. While another thread takes in a change, what is
        seen may be empty, or lack a trajectory, for a moment.
        """
        self.refresh()
        if not self._follow:
            shield.run(self._window.drop_missing, snapshot.whereabouts)
        if not shield.run(self._window.has_changed_since, num_changes):
            raise

    def __len__(self) -> int:
        return len(self._window.entries)

    @property
    def path(self) -> str:
        """The path or pattern, absolute; the first of several."""
        return self._stores.paths[0]

    @property
    def schema(self) -> Schema | None:
        """The columns of a batch: those of the trajectories; None while there are none."""
        return self._window.schema

    @property
    def total_samples(self) -> int:
        """Number of rows of all trajectories."""
        return self._window.total_samples

    @property
    def trajectory_ids(self) -> list[Any]:
        """Ids of all trajectories, oldest first; of several stores pairs (directory, id)."""
        return self._window.trajectory_ids

    @property
    def window_ids(self) -> list[Any]:
        """Ids of the trajectories that `sample` draws from, oldest first."""
        return self._window.window_ids

    def get_stats(self) -> dict[str, Any]:
        """As of the buffer, of list, window, cache and sampling; stores, and how far it is behind.

        ``unread_bytes`` are those of the journals that are not read yet.
        """
        stats = shield.run(self._window.get_stats)
        stats["num_stores"] = self._stores.num_stores
        stats["unread_bytes"] = self._stores.unread_bytes
        return stats

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator: a reader of the same content that loads it goes on alike."""
        return self._window.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the stream of a `state_dict`."""
        self._window.load_state_dict(state)

    def close(self) -> None:
        """Give back all memory. Closing again does nothing."""
        shield.run(self._close)

    def _close(self) -> None:
        with self._window.change_lock:
            if not self._is_closed:
                self._is_closed = True
                self._stores.close()
                self._window.close()

    def __enter__(self) -> ReplayReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._options, "seeds": self._window.spawn()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._options = state["options"]
        shield.run(self._open, state["seeds"])

    def __repr__(self) -> str:
        return self._shown().as_text()

    def _repr_html_(self) -> str:
        return self._shown().as_html()

    def _shown(self) -> Shown:
        state = " (closed)" if self._is_closed else ""
        return self._window.shown(f"ReplayReader {', '.join(self._stores.paths)}{state}")


def _closed(what: str) -> ClosedError:
    return ClosedError(f"{what}: expected an open reader, got one that was closed.")
