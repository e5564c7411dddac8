"""ReplayReader: sample a store that someone else wrote or writes.

It takes no lock and writes nothing; what it sees is the store as it was when it was opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mmbuf import checkpoint, files
from mmbuf.errors import ClosedError
from mmbuf.trajectory import Trajectory
from mmbuf.window import Batch, Window


class ReplayReader:
    """Random rows of a store, read-only. Opening reads the index and no data file.

    ``path`` is a store, a checkpoint, or a directory of RLinf's (whose files have to be opened for
    their schema). ``seed`` and ``sample_window_size`` are as in `TrajectoryReplayBuffer`, but the
    window is by default the whole store. FileNotFoundError where there is none. Thread-safe but
    for `close`.
    """

    def __init__(
        self, path: str | os.PathLike[str], seed: int | None = 0, sample_window_size: int = 0
    ) -> None:
        self.path = files.absolute(path)
        if not files.is_directory(self.path):
            raise FileNotFoundError(f"{self.path}: expected a store directory, got none.")
        contents = checkpoint.read(self.path)
        self._is_closed = False
        self._window = Window(
            seed=seed, window_size=sample_window_size, cache_size=None, can_map=True
        )
        self._window.open(contents.schema, contents.entries.values(), self.path)

    def sample(self, num_chunks: int, out: Mapping[str, Any] | None = None) -> Batch:
        """As `TrajectoryReplayBuffer.sample`."""
        if self._is_closed:
            raise _closed("sample")
        return self._window.sample(num_chunks, out)

    def get_trajectory(self, trajectory_id: int) -> Trajectory:
        """As `TrajectoryReplayBuffer.get_trajectory`."""
        if self._is_closed:
            raise _closed("get_trajectory")
        return self._window.get_trajectory(trajectory_id)

    def __len__(self) -> int:
        return len(self._window.entries)

    @property
    def total_samples(self) -> int:
        """Number of rows of all trajectories."""
        return self._window.total_samples

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of all trajectories, oldest first."""
        return list(self._window.entries)

    @property
    def window_ids(self) -> list[int]:
        """Ids of the trajectories that `sample` draws from, oldest first."""
        return self._window.window_ids

    def get_stats(self) -> dict[str, int]:
        """Counts of the trajectory list, the window and the cache."""
        return self._window.get_stats()

    def close(self) -> None:
        """Give back all memory. Closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._window.close()

    def __enter__(self) -> ReplayReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ReplayReader {self.path}: {len(self)} trajectories, {self.total_samples} rows>"


def _closed(what: str) -> ClosedError:
    return ClosedError(f"{what}: expected an open reader, got one that was closed.")
