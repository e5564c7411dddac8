"""A stand-in for RLinf's SAC worker: its calls of the buffer, in their order, by `mmbuf.rlinf`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmbuf import SchemaError
from mmbuf import rlinf as of_rlinf
from mmbuf.rlinf import (
    Channel,
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    Trajectory,
    TrajectoryReplayBuffer,
    replay_buffer_collate_fn,
)

pytestmark = pytest.mark.usefixtures("without_fsync")
T, B, RANKS = 4, 2, 2


@dataclass
class Rollout:
    """A trajectory of a class that is not ours, as an env worker of RLinf's sends it."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Any = None
    intervene_flags: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    dones: Any = None
    prev_logprobs: Any = None
    prev_values: Any = None
    versions: Any = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)


def values(number: int) -> dict[str, Any]:
    """What a rollout has: its actions are its number; the first environment is intervened in."""
    actions = torch.full((T, B, 6), float(number))
    flags = torch.zeros(T, B, 6, dtype=torch.bool)
    flags[1:3, 0] = True
    ends = torch.zeros(T + 1, B, 1, dtype=torch.bool)
    states = torch.arange(T * B * 9, dtype=torch.float32).reshape(T, B, 9)
    return {
        "max_episode_length": 8,
        "model_weights_id": f"w{number}",
        "actions": actions,
        "intervene_flags": flags,
        "rewards": torch.full((T, B, 1), float(number)),
        **dict.fromkeys(("terminations", "truncations", "dones"), ends),
        "prev_logprobs": torch.zeros(T, B, 6),
        "versions": torch.full((T, B, 1), float(number)),
        "forward_inputs": {"action": actions, "model_action": actions},
        "curr_obs": {"states": states},
        "next_obs": {"states": states + 1},
    }


def recorded(path: Path, trajectory_format: str) -> Path:
    """Demonstrations, which have less, as a checkpoint of four."""
    with TrajectoryReplayBuffer(trajectory_format=trajectory_format) as buffer:
        for number in range(100, 104):
            fields = values(number)
            for name in ("versions", "prev_logprobs", "forward_inputs"):
                del fields[name]
            buffer.add_trajectories([Trajectory(**fields)])
        buffer.save_checkpoint(path)
    return path


class Worker:
    """One rank."""

    def __init__(self, rank: int, log_path: Path, demos: Path, cfg: dict[str, Any]) -> None:
        self.rank = rank
        self.replay_buffer = TrajectoryReplayBuffer(
            seed=1234,
            enable_cache=True,
            cache_size=5,
            sample_window_size=10,
            auto_save=cfg["auto_save"],
            auto_save_path=str(log_path / f"replay_buffer/rank_{rank}"),
            trajectory_format=cfg["trajectory_format"],
        )
        self.demo_buffer = TrajectoryReplayBuffer(
            seed=1234,
            enable_cache=True,
            cache_size=5,
            sample_window_size=10,
            auto_save=cfg["auto_save"],
            auto_save_path=str(log_path / f"demo_buffer/rank_{rank}"),
            trajectory_format="pt",
        )
        self.demo_buffer.load_checkpoint(
            str(demos), is_distributed=True, local_rank=rank, world_size=RANKS
        )
        kind = PreloadReplayBufferDataset if cfg["enable_preload"] else ReplayBufferDataset
        self.dataset = kind(
            replay_buffer=self.replay_buffer,
            demo_buffer=self.demo_buffer,
            batch_size=8,
            min_replay_buffer_size=100,
            min_demo_buffer_size=1,
            prefetch_size=10,
        )
        self.dataset.min_replay_buffer_size = 1
        loader: Any = DataLoader(
            self.dataset,
            batch_size=1,
            num_workers=0,
            drop_last=True,
            collate_fn=replay_buffer_collate_fn,
        )
        self.batches = iter(loader)

    def receive(self, channel: Channel, count: int) -> None:
        received = [channel.get() for _ in range(count)]
        self.replay_buffer.add_trajectories(received)
        interventions = []
        for trajectory in received:
            parts = trajectory.extract_intervene_traj()
            if parts is not None:
                interventions.extend(parts)
        if interventions:
            self.demo_buffer.add_trajectories(interventions)

    def stats(self) -> dict[str, Any]:
        return {
            f"{name}/{key}": value
            for name, buffer in (("replay", self.replay_buffer), ("demo", self.demo_buffer))
            for key, value in buffer.get_stats().items()
        }

    def stop(self) -> None:
        self.dataset.close()
        self.replay_buffer.close()
        self.demo_buffer.close()


@pytest.mark.parametrize("enable_preload", [False, True], ids=["", "preload"])
@pytest.mark.parametrize("auto_save", [False, True], ids=["memory", "auto_save"])
@pytest.mark.parametrize("trajectory_format", ["pt", "arrow"])
def test_a_worker_does_what_it_did(
    trajectory_format: str, auto_save: bool, enable_preload: bool, tmp_path: Path
) -> None:
    demos = recorded(tmp_path / "demos", trajectory_format)
    cfg = {
        "trajectory_format": trajectory_format,
        "auto_save": auto_save,
        "enable_preload": enable_preload,
    }
    workers = [Worker(rank, tmp_path, demos, cfg) for rank in range(RANKS)]
    for worker in workers:
        assert worker.demo_buffer.trajectory_ids == [2 * worker.rank, 2 * worker.rank + 1]
        assert not worker.replay_buffer.is_ready(1)
        channel = Channel(4)
        for number in (1, 2):
            channel.put(Trajectory(**values(number)))
        channel.put(Trajectory())
        worker.receive(channel, 3)
        assert (len(worker.replay_buffer), len(worker.demo_buffer)) == (2, 4)
        assert asyncio.run(worker.replay_buffer.is_ready_async(2))

        for _ in range(3):
            batch = next(worker.batches)
            assert set(batch) == {
                *("actions", "intervene_flags", "rewards", "terminations", "truncations", "dones"),
                *("curr_obs", "next_obs"),
            }
            assert torch.equal(batch["rewards"][:, 0], batch["actions"][:, 0])
            assert set(batch["actions"][:4, 0].tolist()) <= {1.0, 2.0}
            of_demos = {100.0 + i for i in worker.demo_buffer.trajectory_ids[:2]} | {1.0, 2.0}
            assert set(batch["actions"][4:, 0].tolist()) <= of_demos
            assert torch.equal(batch["next_obs"]["states"], batch["curr_obs"]["states"] + 1)
        assert worker.dataset.left_out["demo_buffer"] == ()
        assert "versions" in worker.dataset.left_out["replay_buffer"]

    stats = [worker.stats() for worker in workers]
    averaged = {key: np.mean([each[key] for each in stats]) for key in stats[0]}
    assert averaged["replay/num_trajectories"] == 2
    assert averaged["replay/total_samples"] == 2 * T * B
    assert averaged["demo/total_samples"] == 2 * T * B + 4

    for worker in workers:
        worker.replay_buffer.save_checkpoint(str(tmp_path / f"saved/rank_{worker.rank}"))
        before = worker.replay_buffer.get_trajectory(0)
        worker.replay_buffer.load_checkpoint(str(tmp_path / f"saved/rank_{worker.rank}"))
        after = worker.replay_buffer.get_trajectory(0)
        assert torch.equal(before.dones, after.dones)
        assert before.dones.shape == (T + 1, B, 1)
        assert after.model_weights_id == "w1"
        assert worker.replay_buffer.sample(num_chunks=64)["actions"].shape == (64, 6)
        worker.stop()


def test_tools_reach_for_what_rlinf_has(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, trajectory_format="pt"
    ) as buffer:
        buffer.add_trajectories([Rollout(**values(1)), Rollout(), Rollout(**values(2))])
        assert buffer._trajectory_id_list == [0, 1]
        assert buffer._trajectory_index[1] == {
            "num_samples": T * B,
            "trajectory_id": 1,
            "max_episode_length": 8,
            "shape": (T, B, 6),
            "model_weights_id": "w2",
        }
        assert len(buffer.sample_chunks(100)["rewards"]) == 100
        assert buffer._trajectory_counter == 2
        loaded = buffer._load_trajectory(1, "w2")
        assert torch.equal(loaded.actions, values(2)["actions"])
        with pytest.raises(ValueError, match="trajectory 7"):
            buffer._load_trajectory(7, "w7")
        with pytest.raises(TypeError, match="expected a list of trajectories"):
            buffer.add_trajectories({"rewards": torch.zeros(2, 1)})
        flat = buffer._flatten_trajectory(loaded)
        assert flat["dones"].shape == (T * B, 1)
        assert torch.equal(flat["curr_obs"]["states"], loaded.curr_obs["states"].reshape(-1, 9))


def test_a_rollout_is_flattened_without_a_buffer_and_without_text() -> None:
    rollout = Rollout(**values(3))
    rollout.curr_obs["task"] = [["a"] * B] * T
    flat = TrajectoryReplayBuffer._flatten_trajectory(object(), rollout)  # type: ignore[arg-type]
    assert list(flat["curr_obs"]) == ["states"]
    assert flat["rewards"].tolist() == [[3.0]] * (T * B)


def test_interventions_are_rows_of_one_environment_each_without_versions() -> None:
    parts = Trajectory(**values(4)).extract_intervene_traj()
    assert parts is not None
    (part,) = parts
    assert isinstance(part, Trajectory)
    assert part.versions is None
    assert torch.equal(part.curr_obs["states"], values(4)["curr_obs"]["states"][1:3, :1])
    fields = values(4)
    fields["intervene_flags"][:, :, 3] = False
    assert Trajectory(**fields).extract_intervene_traj("all") is None
    fields["intervene_flags"][:] = False
    assert Trajectory(**fields).extract_intervene_traj() is None
    del fields["intervene_flags"]
    assert Trajectory(**fields).extract_intervene_traj() is None


def test_an_input_that_goes_after_an_intervention_goes_from_the_batch() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        fields = values(1)
        buffer.add_trajectories([Rollout(**fields)])
        del fields["forward_inputs"]["model_action"]
        buffer.add_trajectories([Rollout(**fields)])
        assert list(buffer.sample(8)["forward_inputs"]) == ["action"]
        buffer.add_trajectories([Rollout(**values(2)), Rollout(**values(3))])
        assert list(buffer.sample(8)["forward_inputs"]) == ["action", "model_action"]
    with TrajectoryReplayBuffer(columns="same") as buffer:
        buffer.add_trajectories([Rollout(**values(1))])
        with pytest.raises(SchemaError, match="model_action"):
            buffer.add_trajectories([Rollout(**fields)])


def test_the_core_has_none_of_these_names() -> None:
    import mmbuf

    for name in ("sample_chunks", "_flatten_trajectory", "_trajectory_index", "_load_trajectory"):
        assert not hasattr(mmbuf.TrajectoryReplayBuffer, name)
        assert hasattr(of_rlinf.TrajectoryReplayBuffer, name)
