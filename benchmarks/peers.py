"""The data of the benchmarks, and all who hold it: the floor, mmbuf and its peers.

A state row has 10 columns and 327 bytes; an image row has two 128x128x3 images more. `rewards`
holds the number of the row, so that each sampled row can be compared with the row it came from.
Each contender is a small class with `sample`, `rows` (a batch as plain columns) and `close`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import UnequalError

from mmbuf import ReplayReader, TrajectoryReplayBuffer

ColumnPath = tuple[str, ...]
Data = dict[ColumnPath, np.ndarray]

BATCH_ROWS = 256
ROW_NUMBER = ("rewards",)
STATE_COLUMNS: dict[ColumnPath, tuple[type, tuple[int, ...]]] = {
    ("curr_obs", "states"): (np.float32, (32,)),
    ("next_obs", "states"): (np.float32, (32,)),
    ("actions",): (np.float32, (7,)),
    ("rewards",): (np.float32, (1,)),
    ("dones",): (np.bool_, (1,)),
    ("terminations",): (np.bool_, (1,)),
    ("truncations",): (np.bool_, (1,)),
    ("prev_logprobs",): (np.float32, (7,)),
    ("prev_values",): (np.float32, (1,)),
    ("versions",): (np.float32, (1,)),
}
IMAGE_COLUMNS: dict[ColumnPath, tuple[type, tuple[int, ...]]] = {
    ("curr_obs", "main_images"): (np.uint8, (128, 128, 3)),
    ("next_obs", "main_images"): (np.uint8, (128, 128, 3)),
}


def make_data(num_rows: int, *, has_images: bool = False) -> Data:
    """Random rows, one contiguous array per column; row `i` has `rewards == i`."""
    rng = np.random.default_rng(0)
    data: Data = {}
    for path, (dtype, shape) in (STATE_COLUMNS | (IMAGE_COLUMNS if has_images else {})).items():
        size = (num_rows, *shape)
        if dtype is np.float32:
            data[path] = rng.random(size, dtype=np.float32)
        elif dtype is np.bool_:
            data[path] = rng.random(size) < 0.1
        else:
            data[path] = rng.integers(0, 256, size, dtype=np.uint8)
    # float32 counts exactly up to 2**24 rows.
    data[ROW_NUMBER][:, 0] = np.arange(num_rows)
    return data


def num_rows_of(data: Data) -> int:
    return len(data[ROW_NUMBER])


def row_bytes_of(data: Data) -> int:
    return sum(array[0].nbytes for array in data.values())


def nest(flat: Mapping[ColumnPath, Any]) -> dict[str, Any]:
    """{("a", "b"): x} as {"a": {"b": x}}."""
    nested: dict[str, Any] = {}
    for (*parents, key), value in flat.items():
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[key] = value
    return nested


def unnest(nested: Mapping[str, Any], prefix: ColumnPath = ()) -> dict[ColumnPath, Any]:
    """{"a": {"b": x}} as {("a", "b"): x}."""
    flat: dict[ColumnPath, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= unnest(value, (*prefix, key))
        else:
            flat[(*prefix, key)] = value
    return flat


def trajectories_of(data: Data, num_steps: int, num_envs: int) -> list[dict[str, Any]]:
    """The rows as nested dicts of [T, B, ...] tensors that look into `data`."""
    rows = num_steps * num_envs
    return [
        nest(
            {
                path: torch.from_numpy(
                    array[start : start + rows].reshape(num_steps, num_envs, *array.shape[1:])
                )
                for path, array in data.items()
            }
        )
        for start in range(0, num_rows_of(data), rows)
    ]


class Floor:
    """One contiguous array in RAM per column."""

    is_partial = False

    def __init__(self, data: Data) -> None:
        self._rng = np.random.default_rng(1)
        self._num_rows = num_rows_of(data)
        nested = nest(data)
        self._leaves = [(key, a) for key, a in nested.items() if not isinstance(a, dict)]
        self._groups = [(key, [*g.items()]) for key, g in nested.items() if isinstance(g, dict)]

    def sample(self) -> dict[str, Any]:
        i = self._rng.integers(0, self._num_rows, BATCH_ROWS)
        batch: dict[str, Any] = {
            name: {key: torch.from_numpy(a.take(i, 0, None, "clip")) for key, a in leaves}
            for name, leaves in self._groups
        }
        for key, a in self._leaves:
            batch[key] = torch.from_numpy(a.take(i, 0, None, "clip"))
        return batch

    def sample_into(self, batch: dict[str, Any]) -> dict[str, Any]:
        i = self._rng.integers(0, self._num_rows, BATCH_ROWS)
        for name, leaves in self._groups:
            group = batch[name]
            for key, a in leaves:
                a.take(i, 0, group[key].numpy(), "clip")
        for key, a in self._leaves:
            a.take(i, 0, batch[key].numpy(), "clip")
        return batch

    def rows(self, batch: dict[str, Any]) -> Data:
        return {path: tensor.numpy() for path, tensor in unnest(batch).items()}

    def close(self) -> None:
        pass


class Mmbuf(Floor):
    """A buffer with every row of `data`, flushed; without a directory a buffer in memory."""

    def __init__(
        self,
        data: Data,
        shape: tuple[int, int],
        directory: Path | None = None,
        cache_size: int | None = None,
    ) -> None:
        self._buffer = TrajectoryReplayBuffer(
            seed=1,
            cache_size=cache_size,
            sample_window_size=0,
            auto_save=directory is not None,
            auto_save_path=str(directory or ""),
        )
        for trajectory in trajectories_of(data, *shape):
            self._buffer.add_trajectories([trajectory])
        self._buffer.flush()

    def sample(self) -> dict[str, Any]:
        return self._buffer.sample(BATCH_ROWS)

    def sample_into(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._buffer.sample(BATCH_ROWS, out=batch)

    def close(self) -> None:
        self._buffer.close()


class MmbufReader(Mmbuf):
    """A reader of the store that someone else writes."""

    def __init__(self, directory: Path, seed: int = 2, *, follow: bool = True) -> None:
        self._buffer = ReplayReader(str(directory), seed=seed, follow=follow)


class MmbufResumed(Mmbuf):
    """A buffer in memory that has loaded a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._buffer = TrajectoryReplayBuffer(seed=2, sample_window_size=0)
        self._buffer.load_checkpoint(checkpoint)


class TorchRL(Floor):
    """`ReplayBuffer` over `LazyMemmapStorage`."""

    def __init__(self, data: Data, directory: Path, num_rows: int | None = None) -> None:
        from torchrl.data import LazyMemmapStorage, ReplayBuffer
        from torchrl.data.replay_buffers.samplers import RandomSampler

        self._buffer = ReplayBuffer(
            storage=LazyMemmapStorage(num_rows or num_rows_of(data), scratch_dir=str(directory)),
            sampler=RandomSampler(),
            batch_size=BATCH_ROWS,
        )
        self.extend(self.prepared(data))

    @staticmethod
    def prepared(data: Data) -> Any:
        """The rows as the `TensorDict` that `extend` takes."""
        from tensordict import TensorDict

        tensors = {path: torch.from_numpy(array) for path, array in data.items()}
        return TensorDict(nest(tensors), batch_size=[num_rows_of(data)])

    def extend(self, rows: Any) -> None:
        self._buffer.extend(rows)

    def sample(self) -> Any:
        return self._buffer.sample()

    def rows(self, batch: Any) -> Data:
        return super().rows(batch.to_dict())


class Cpprb(Floor):
    """`ReplayBuffer` in RAM; its batches are NumPy arrays and stay such."""

    def __init__(self, data: Data) -> None:
        from cpprb import ReplayBuffer

        names = {path: ".".join(path) for path in data}
        self._paths = {name: path for path, name in names.items()}
        self._buffer = ReplayBuffer(
            num_rows_of(data),
            {names[path]: {"shape": a.shape[1:], "dtype": a.dtype} for path, a in data.items()},
        )
        block = 1000
        for start in range(0, num_rows_of(data), block):
            self._buffer.add(**{names[path]: a[start : start + block] for path, a in data.items()})

    def sample(self) -> dict[str, np.ndarray]:
        return self._buffer.sample(BATCH_ROWS)

    def rows(self, batch: dict[str, np.ndarray]) -> Data:
        return {self._paths[name]: array for name, array in batch.items()}


class Sb3(Floor):
    """`DictReplayBuffer` in RAM; it has a place for five of the ten kinds of column only."""

    is_partial = True

    def __init__(self, data: Data) -> None:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import DictReplayBuffer

        def box(array: np.ndarray) -> spaces.Box:
            low, high = (0, 255) if array.dtype == np.uint8 else (-np.inf, np.inf)
            return spaces.Box(low, high, array.shape[1:], array.dtype.type)

        nested = nest(data)
        self._buffer = DictReplayBuffer(
            num_rows_of(data),
            spaces.Dict({key: box(array) for key, array in nested["curr_obs"].items()}),
            box(nested["actions"]),
            device="cpu",
        )
        # Its arrays are filled directly: `add` takes one row at a time.
        for key, array in nested["curr_obs"].items():
            self._buffer.observations[key][:, 0] = array
            self._buffer.next_observations[key][:, 0] = nested["next_obs"][key]
        self._buffer.actions[:, 0] = nested["actions"]
        self._buffer.rewards[:] = nested["rewards"]
        self._buffer.dones[:] = nested["dones"]
        self._buffer.full = True

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_ROWS)

    def rows(self, batch: Any) -> Data:
        nested = {
            "curr_obs": batch.observations,
            "next_obs": batch.next_observations,
            "actions": batch.actions,
            "rewards": batch.rewards,
            "dones": batch.dones.bool(),
        }
        return super().rows(nested)


def _import_rlinf() -> tuple[types.ModuleType, types.ModuleType]:
    """RLinf's buffer and its `Trajectory`.

    Its package imports a configuration framework and a cluster runtime, which the buffer never
    calls; stand-ins spare their installation.
    """
    resolver = types.ModuleType("rlinf.utils.omega_resolver")
    resolver.omegaconf_register = lambda: None
    log = types.ModuleType("rlinf.utils.logging")
    log.get_logger = lambda: logging.getLogger("rlinf")
    logging.getLogger("rlinf").setLevel(logging.ERROR)
    for module in (resolver, log):
        sys.modules.setdefault(module.__name__, module)
    return (
        importlib.import_module("rlinf.data.replay_buffer"),
        importlib.import_module("rlinf.data.embodied_io_struct"),
    )


class Rlinf(Floor):
    """RLinf's `TrajectoryReplayBuffer`; without a directory all rows are in its cache in RAM."""

    def __init__(
        self,
        data: Data,
        shape: tuple[int, int],
        directory: Path | None = None,
        cache_size: int = 5,
    ) -> None:
        replay_buffer, structs = _import_rlinf()
        trajectories = trajectories_of(data, *shape)
        self._buffer = replay_buffer.TrajectoryReplayBuffer(
            cache_size=cache_size,
            sample_window_size=len(trajectories),
            auto_save=directory is not None,
            auto_save_path=str(directory or ""),
            trajectory_format="pt",
        )
        for trajectory in trajectories:
            self._buffer.add_trajectories([structs.Trajectory(**trajectory)])
        # Its only way to wait for the files; it samples on afterwards.
        self._buffer.close(wait=True)

    def sample(self) -> dict[str, Any]:
        return self._buffer.sample(BATCH_ROWS)


def _import_torchrl() -> None:
    importlib.import_module("torchrl.data")
    logging.getLogger("torchrl").setLevel(logging.ERROR)


PEERS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "torchrl": (_import_torchrl, ["torchrl", "tensordict"]),
    "cpprb": (lambda: importlib.import_module("cpprb"), ["cpprb"]),
    "sb3": (
        lambda: importlib.import_module("stable_baselines3.common.buffers"),
        ["stable-baselines3"],
    ),
    "rlinf": (_import_rlinf, ["rlinf"]),
}
"""Name of a peer to how it is imported and the packages whose versions matter."""


def choose_peers(names: str | None) -> tuple[list[str], list[str]]:
    """Those asked for (None: all) that can be imported, and those that cannot."""
    if names == "none":
        return [], []
    wanted = list(PEERS) if names is None else names.split(",")
    if unknown := set(wanted) - set(PEERS):
        raise SystemExit(f"unknown peers {sorted(unknown)}; known: {','.join(PEERS)}")
    found = []
    for name in wanted:
        try:
            PEERS[name][0]()
        except ImportError:
            continue
        found.append(name)
    return found, [name for name in wanted if name not in found]


def packages_of(names: list[str]) -> list[str]:
    """The packages whose versions matter for these peers."""
    return [package for name in names for package in PEERS[name][1]]


def check_batch(name: str, rows: Data, data: Data, *, is_partial: bool) -> np.ndarray:
    """Compare a batch with the rows that it says it has; return their numbers."""
    i = rows[ROW_NUMBER].reshape(-1).astype(np.int64)
    if len(i) != BATCH_ROWS or i.min() < 0 or i.max() >= num_rows_of(data):
        raise UnequalError(f"{name}: {len(i)} rows, numbers {i.min()} to {i.max()}")
    if not is_partial and rows.keys() != data.keys():
        raise UnequalError(f"{name}: columns {sorted(rows)}, expected {sorted(data)}")
    for path, array in rows.items():
        expected = data[path][i]
        if array.dtype != expected.dtype or not np.array_equal(array, expected):
            raise UnequalError(f"{name}: column {'.'.join(path)} differs from what was added")
    return i


def check_equal(name: str, contender: Floor, data: Data, *, num_batches: int = 8) -> None:
    """Check that batches hold rows of `data`, column by column, spread over all of it."""
    numbers = []
    for _ in range(num_batches):
        rows = contender.rows(contender.sample())
        numbers.append(check_batch(name, rows, data, is_partial=contender.is_partial))
    drawn = np.concatenate(numbers)
    # The mean of uniform numbers: six standard deviations are never left by chance.
    tolerance = 6 * num_rows_of(data) / np.sqrt(12 * len(drawn))
    if abs(drawn.mean() - (num_rows_of(data) - 1) / 2) > tolerance:
        raise UnequalError(f"{name}: rows are not drawn from all of the data")


def check_refill(name: str, contender: Floor, data: Data) -> dict[str, Any]:
    """Check that a batch is refilled in place, and return it."""
    batch = contender.sample()
    before = {path: tensor.data_ptr() for path, tensor in unnest(batch).items()}
    for _ in range(8):
        contender.sample_into(batch)
        check_batch(name, contender.rows(batch), data, is_partial=False)
    if before != {path: tensor.data_ptr() for path, tensor in unnest(batch).items()}:
        raise UnequalError(f"{name}: out= was not refilled in place")
    return batch
