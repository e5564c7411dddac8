"""What the ways to sample cost, beside plain sampling and beside TorchRL's.

Cases and their bars, for state rows of episodes of 50 steps, 2,500 trajectories of [50, 8]:

slices         64 sequences of 16 steps: at most 2x as many rows drawn one by one, and a third of
               TorchRL's `SliceSampler`
slices-many    the same from 10,000,000 rows: at most 1.3x that from 1,000,000
epoch          256 rows without replacement: at most 1.3x 256 with
epoch-memory   what `WithoutReplacement` allocates for an epoch of 1,000,000 and of 100,000,000
               rows: at most 1.1x
prioritized    draw 256 by priority, gather, update 256: at most TorchRL's prioritised buffer, whose
               tree is C++
nstep          256 rows with 3-step targets: at most 2x 256 rows as they are
prefetch       a consumer that computes for 2 ms a batch waits for the prefetching dataset at most
               5 % of its time

Buffers are in memory and TorchRL's storage is its memory map, in the order that suits its sampler:
the steps of each environment side by side. Everything runs in one process, interleaved; what
comes is compared with what was added before it is timed.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
import timing
import torch
from timing import Bar, Case, Contender, UnequalError

from mmbuf import PreloadReplayBufferDataset, TrajectoryReplayBuffer
from mmbuf.sampling import NStep, Prioritized, Sampler, Slices, WithoutReplacement

CASES = ("slices", "slices-many", "epoch", "epoch-memory", "prioritized", "nstep", "prefetch")
BUDGET_S = 12.0
SHAPE = (50, 8)
NUM_SLICES, LENGTH = 64, 16
N_STEPS, GAMMA = 3, 0.99
FLAGS = (("dones",), ("terminations",), ("truncations",))


def make_episodes(num_trajectories: int) -> peers.Data:
    """State rows in the order [T, B]; every episode is truncated after 50 steps."""
    steps, envs = SHAPE
    data = peers.make_data(num_trajectories * steps * envs)
    is_last = np.arange(steps * num_trajectories).repeat(envs) % steps == steps - 1
    for path in FLAGS:
        data[path][:, 0] = is_last & (path != ("terminations",))
    return data


def side_by_side(data: peers.Data) -> peers.Data:
    """The same rows with the steps of each environment one after the other."""
    steps, envs = SHAPE
    return {
        path: np.ascontiguousarray(
            array.reshape(-1, steps, envs, *array.shape[1:]).swapaxes(1, 2)
        ).reshape(array.shape)
        for path, array in data.items()
    }


def buffer_of(data: peers.Data, *, num_times: int = 1) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=1, sample_window_size=0)
    for _ in range(num_times):
        buffer.add_trajectories(peers.trajectories_of(data, *SHAPE))
    return buffer


def numbers_of(batch: dict[str, Any]) -> np.ndarray:
    """The number of each row of a batch."""
    return batch["rewards"][..., 0].numpy().astype(np.int64)


def check_rows(name: str, batch: dict[str, Any], data: peers.Data) -> None:
    """That all columns of a batch of rows or slices are those of the rows that it says it has."""
    numbers = numbers_of(batch)
    for path, tensor in peers.unnest(batch).items():
        if path in data and not np.array_equal(tensor.numpy(), data[path][numbers]):
            raise UnequalError(f"{name}: column {'.'.join(path)} differs from what was added")


def check_slices(name: str, numbers: np.ndarray, stride: int) -> None:
    """That each row ``[K, L]`` of numbers goes on by ``stride`` and stays in its trajectory."""
    if not (np.diff(numbers, axis=1) == stride).all():
        raise UnequalError(f"{name}: steps that do not follow one another")
    if (numbers[:, 0] // (SHAPE[0] * SHAPE[1]) != numbers[:, -1] // (SHAPE[0] * SHAPE[1])).any():
        raise UnequalError(f"{name}: a slice of two trajectories")


def by(buffer: TrajectoryReplayBuffer, num_rows: int, sampler: Sampler | None) -> Contender:
    return Contender(functools.partial(buffer.sample, num_rows, sampler=sampler))


def torchrl_buffer(data: peers.Data, directory: Path, sampler: Any, batch_size: int) -> Any:
    """TorchRL's buffer of the rows; `episode` numbers the episode of each."""
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    num_rows = peers.num_rows_of(data)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(num_rows, scratch_dir=str(directory)),
        sampler=sampler,
        batch_size=batch_size,
        priority_key="td_error",
    )
    rows = peers.TorchRL.prepared(data)
    rows["episode"] = torch.arange(num_rows) // SHAPE[0]
    buffer.extend(rows)
    return buffer


def sample_slices(name: str, directory: Path, *, names: list[str], is_tiny: bool) -> Case:
    data = make_episodes(50 if is_tiny else 2500)
    buffer, slices = buffer_of(data), Slices(LENGTH)
    for _ in range(20):
        batch = buffer.sample(NUM_SLICES, sampler=slices)
        check_rows("slices", batch, data)
        check_slices("slices", numbers_of(batch), SHAPE[1])
    calls = {
        "uniform rows": by(buffer, NUM_SLICES * LENGTH, None),
        "slices": by(buffer, NUM_SLICES, slices),
    }
    if "torchrl" in names:
        from torchrl.data.replay_buffers.samplers import SliceSampler

        ordered = side_by_side(data)
        sampler = SliceSampler(slice_len=LENGTH, traj_key="episode", cache_values=True)
        torchrl = torchrl_buffer(ordered, directory / "torchrl", sampler, NUM_SLICES * LENGTH)
        found = torchrl.sample()["rewards"].view(NUM_SLICES, LENGTH, 1)
        check_slices("torchrl", numbers_of({"rewards": found}), SHAPE[1])
        calls["torchrl"] = Contender(torchrl.sample)
    rows = timing.rows_of(timing.interleave(calls, BUDGET_S, is_tiny=is_tiny))
    buffer.close()
    bars = [
        timing.ratio_bar(rows, "slices", 2, "uniform rows"),
        timing.ratio_bar(rows, "slices", 1 / 3, "torchrl"),
    ]
    title = f"{NUM_SLICES} slices of {LENGTH} steps, {peers.num_rows_of(data):,} state rows"
    return Case(name, title, rows, bars)


def sample_slices_of_many(name: str, directory: Path, *, is_tiny: bool) -> Case:
    data = make_episodes(50 if is_tiny else 2500)
    calls, buffers = {}, []
    for num_times in (1, 10):
        buffer, slices = buffer_of(data, num_times=num_times), Slices(LENGTH)
        buffers.append(buffer)
        start = timing.clock()
        batch = buffer.sample(NUM_SLICES, sampler=slices)
        first_s = timing.clock() - start
        check_rows("slices", batch, data)
        check_slices("slices", numbers_of(batch), SHAPE[1])
        calls[f"{buffer.total_samples:,} rows"] = by(buffer, NUM_SLICES, slices)
        uniform = by(buffer, NUM_SLICES * LENGTH, None)
        calls[f"one by one of {buffer.total_samples:,}"] = uniform
    rows = timing.rows_of(timing.interleave(calls, BUDGET_S, is_tiny=is_tiny))
    for buffer in buffers:
        buffer.close()
    few, _, many, _ = (row.name for row in rows)
    remark = f"the first batch of {many}, which finds the ends of all episodes: {first_s:.2f} s"
    bars = [timing.ratio_bar(rows, many, 1.3, few)]
    return Case(name, "the same slices of more rows", rows, bars, remarks=[remark])


def sample_epochs(name: str, directory: Path, *, is_tiny: bool) -> Case:
    data = make_episodes(50 if is_tiny else 2500)
    buffer, epochs = buffer_of(data), WithoutReplacement()
    drawn = []
    while sum(map(len, drawn)) < peers.num_rows_of(data):
        batch = buffer.sample(peers.BATCH_ROWS, sampler=epochs)
        check_rows("epoch", batch, data)
        drawn.append(numbers_of(batch))
    if not np.array_equal(np.sort(np.concatenate(drawn)), np.arange(peers.num_rows_of(data))):
        raise UnequalError("epoch: not each row once")
    calls = {
        "uniform": by(buffer, peers.BATCH_ROWS, None),
        "without replacement": by(buffer, peers.BATCH_ROWS, epochs),
    }
    rows = timing.rows_of(timing.interleave(calls, BUDGET_S, is_tiny=is_tiny))
    buffer.close()
    bars = [timing.ratio_bar(rows, "without replacement", 1.3, "uniform")]
    return Case(name, f"epochs of {peers.num_rows_of(data):,} state rows", rows, bars)


def measure_epochs(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Rows of one byte, so that there can be many."""
    peaks = []
    for num_rows in (10_000, 100_000) if is_tiny else (1_000_000, 100_000_000):
        with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
            part = {"flags": torch.zeros(num_rows // 1000, 100, dtype=torch.uint8)}
            buffer.add_trajectories([part] * 10)
            epochs = WithoutReplacement()
            tracemalloc.start()
            for _ in range(100):
                buffer.sample(peers.BATCH_ROWS, sampler=epochs)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    remark = f"highest memory of 100 batches: {peaks[0] / 1024:.0f} and {peaks[1] / 1024:.0f} KiB"
    bars = [Bar("memory for 100 times the rows at most 1.1x", peaks[1] / peaks[0], 1.1)]
    return Case(name, "memory for the order of an epoch", [], bars, remarks=[remark])


def sample_by_priority(name: str, directory: Path, *, names: list[str], is_tiny: bool) -> Case:
    data = make_episodes(50 if is_tiny else 2500)
    buffer, prioritized = buffer_of(data), Prioritized(alpha=0.6, beta=0.4)
    rng = np.random.default_rng(3)
    errors = itertools.cycle(
        torch.from_numpy(rng.random(peers.BATCH_ROWS, dtype=np.float32)) for _ in range(64)
    )

    def step() -> dict[str, Any]:
        batch = buffer.sample(peers.BATCH_ROWS, sampler=prioritized)
        prioritized.update_priorities(batch["info"]["handle"], next(errors))
        return batch

    for _ in range(20):
        check_rows("prioritized", step(), data)
    calls = {"mmbuf": Contender(step)}
    if "torchrl" in names:
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        sampler = PrioritizedSampler(peers.num_rows_of(data), alpha=0.6, beta=0.4)
        torchrl = torchrl_buffer(data, directory / "torchrl", sampler, peers.BATCH_ROWS)

        def step_torchrl() -> Any:
            batch = torchrl.sample()
            torchrl.update_priority(batch["index"], next(errors))
            return batch

        for _ in range(20):
            batch = step_torchrl()
            check_rows("torchrl", {key: batch[key] for key in ("rewards", "actions")}, data)
        calls["torchrl"] = Contender(step_torchrl)
    rows = timing.rows_of(timing.interleave(calls, BUDGET_S, is_tiny=is_tiny))
    buffer.close()
    bars = [timing.ratio_bar(rows, "mmbuf", 1, "torchrl")]
    title = f"draw by priority, gather, update: 256 of {peers.num_rows_of(data):,} state rows"
    return Case(name, title, rows, bars)


def sample_n_steps(name: str, directory: Path, *, is_tiny: bool) -> Case:
    data = make_episodes(50 if is_tiny else 2500)
    buffer, n_steps = buffer_of(data), NStep(N_STEPS, GAMMA)
    check_n_steps(buffer.sample(peers.BATCH_ROWS, sampler=n_steps, with_info=True), data)
    calls = {
        "uniform": by(buffer, peers.BATCH_ROWS, None),
        "3 steps": by(buffer, peers.BATCH_ROWS, n_steps),
    }
    rows = timing.rows_of(timing.interleave(calls, BUDGET_S, is_tiny=is_tiny))
    buffer.close()
    bars = [timing.ratio_bar(rows, "3 steps", 2, "uniform")]
    return Case(name, f"{N_STEPS}-step targets", rows, bars)


def check_n_steps(batch: dict[str, Any], data: peers.Data) -> None:
    """Against a loop over the rows."""
    steps, envs = SHAPE
    info = batch["info"]
    for i in range(peers.BATCH_ROWS):
        step = int(info["step"][i])
        first = int(info["trajectory_id"][i]) * steps * envs + step * envs + int(info["env"][i])
        count = min(N_STEPS, steps - step)
        rewards = data[("rewards",)][first : first + count * envs : envs, 0].astype(np.float64)
        last = first + (count - 1) * envs
        is_right = (
            np.isclose(batch["rewards"][i, 0], (rewards * GAMMA ** np.arange(count)).sum())
            and np.isclose(batch["discount"][i, 0], GAMMA**count)
            and np.array_equal(batch["actions"][i], data[("actions",)][first])
            and np.array_equal(batch["next_obs"]["states"][i], data["next_obs", "states"][last])
            and bool(batch["dones"][i, 0]) == data[("dones",)][last, 0]
        )
        if not is_right:
            raise UnequalError("3 steps: a target differs from the one computed step by step")


def wait_for_prefetched(name: str, directory: Path, *, is_tiny: bool) -> Case:
    data = make_episodes(50 if is_tiny else 2500)
    num_batches = 20 if is_tiny else 2000
    buffer = buffer_of(data)
    matrix = torch.rand(64, 64)
    dataset = PreloadReplayBufferDataset(buffer, None, peers.BATCH_ROWS, 1, 0, prefetch_size=5)
    waits, works = [], []
    with dataset:
        batches = iter(dataset)
        check_rows("prefetch", next(batches), data)
        time.sleep(0.05)
        for _ in range(num_batches):
            start = timing.clock()
            batch = next(batches)
            waits.append(timing.clock() - start)
            start = timing.clock()
            while timing.clock() - start < 2e-3:
                torch.mm(matrix, matrix)
            del batch  # whoever waits for the interpreter's lock gets it here: not the dataset
            works.append(timing.clock() - start)
    buffer.close()
    rows = timing.rows_of({"computing": works, "waiting for the batch": waits})
    share = 100 * sum(waits) / (sum(waits) + sum(works))
    bars = [Bar("waiting at most 5 % of the time", share, 5, unit=" %")]
    return Case(name, "prefetched batches, a consumer that computes for 2 ms", rows, bars)


def main() -> int:
    parser = timing.argument_parser(__doc__, CASES)
    arguments = parser.parse_args()
    names, missing = peers.choose_peers("torchrl" if arguments.peers is None else arguments.peers)
    cases: dict[str, Callable[..., Case]] = {
        "slices": functools.partial(sample_slices, names=names),
        "slices-many": sample_slices_of_many,
        "epoch": sample_epochs,
        "epoch-memory": measure_epochs,
        "prioritized": functools.partial(sample_by_priority, names=names),
        "nstep": sample_n_steps,
        "prefetch": wait_for_prefetched,
    }
    return timing.run_cases(arguments, cases, peers.packages_of(names), missing, 5 << 30)


if __name__ == "__main__":
    sys.exit(main())
