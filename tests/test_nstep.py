"""NStep: discounted rewards of the steps ahead, computed by hand and step by step.

Every row says whose it is: ``curr_obs.ids`` and ``next_obs.ids`` are (trajectory, step,
environment). Where sums have to be exact, rewards are small whole numbers and gamma is 0.5.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import look_while_adding

from mmbuf import SchemaError, TrajectoryReplayBuffer
from mmbuf.sampling import (
    FreshVersions,
    NStep,
    Prioritized,
    Sampler,
    Slices,
    WithoutReplacement,
)
from mmbuf.sampling.episodes import MAX_LEFT

Rows = Iterable[Sequence[int]]  # (t, b)


def flags_of(
    num_steps: int, num_envs: int, rows: Rows, row_shape: tuple[int, ...] = (1,), epochs: int = 0
) -> torch.Tensor:
    """``[T + E, B, *S]``: the last element of each of these rows is set, and all leading steps."""
    flags = torch.zeros(num_steps, num_envs, *row_shape, dtype=torch.bool)
    for t, b in rows:
        flags[t, b].reshape(-1)[-1] = True
    if not epochs:
        return flags
    parts = flags.reshape(epochs, num_steps // epochs, *flags.shape[1:])
    return torch.cat([torch.ones_like(parts[:, :1]), parts], 1).flatten(0, 1)


def rollout(
    i: int, rewards: Any, *, row_shape: tuple[int, ...] = (1,), epochs: int = 0, **flags: Rows
) -> dict[str, Any]:
    """Trajectory ``i`` with ``rewards`` ``[T]`` or ``[T, B, *S]``."""
    rewards = torch.as_tensor(rewards)
    if rewards.ndim == 1:
        rewards = rewards.float().reshape(-1, 1, 1)
    t, b = torch.meshgrid(*map(torch.arange, rewards.shape[:2]), indexing="ij")
    ids = torch.stack([torch.full_like(t, i), t, b], -1)
    fields: dict[str, Any] = {
        "curr_obs": {"ids": ids, "text": [[f"{t} {b}" for _, t, b in row] for row in ids.tolist()]},
        "next_obs": {"ids": ids, "text": [[f"{t} {b}" for _, t, b in row] for row in ids.tolist()]},
        "actions": ids.float(),
        "rewards": rewards,
    }
    num_steps, num_envs = t.shape
    for name, rows in flags.items():
        fields[name] = flags_of(num_steps, num_envs, rows, row_shape, epochs)
    return fields


def aligned(fields: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """``[T, B]``: whether any flag of the row is set; None where there are none of the name."""
    if name not in fields:
        return None
    num_steps, num_envs = fields["rewards"].shape[:2]
    flags: torch.Tensor = fields[name].reshape(len(fields[name]), num_envs, -1).any(-1)
    epochs = len(flags) - num_steps
    return flags.reshape(epochs, -1, num_envs)[:, 1:].flatten(0, 1) if epochs else flags


def expected_of(
    fields: Mapping[str, Any], n: int, gamma: float
) -> dict[tuple[int, int], tuple[list[float], float, int]]:
    """Of each row (t, b): its rewards, its discount and the last step, one step after another."""
    num_steps, num_envs = fields["rewards"].shape[:2]
    dones, terminations, truncations = (
        aligned(fields, name) for name in ("dones", "terminations", "truncations")
    )
    found = {}
    for t in range(num_steps):
        for b in range(num_envs):
            total = np.zeros(fields["rewards"][t, b].numel())
            factor, last, is_over = 1.0, t, False
            for step in range(t, min(t + n, num_steps)):
                total += factor * fields["rewards"][step, b].double().reshape(-1).numpy()
                factor, last = factor * gamma, step
                is_truncated = truncations is not None and bool(truncations[step, b])
                if terminations is not None:
                    is_over = bool(terminations[step, b])
                elif dones is not None:
                    is_over = bool(dones[step, b]) and not is_truncated
                ends = is_over or is_truncated if dones is None else bool(dones[step, b])
                if ends:
                    break
            found[t, b] = (total.tolist(), 0.0 if is_over else factor, last)
    return found


def check(
    batch: Mapping[str, Any], trajectories: Mapping[int, Mapping[str, Any]], n: int, gamma: float
) -> None:
    """Every row of a batch against `expected_of` its trajectory."""
    expected = {
        i: expected_of(trajectories[i], n, gamma)
        for i in set(batch["curr_obs"]["ids"][:, 0].tolist())
    }
    for k, (i, t, b) in enumerate(batch["curr_obs"]["ids"].tolist()):
        rewards, discount, last = expected[i][t, b]
        assert batch["rewards"][k].reshape(-1).tolist() == rewards
        assert batch["discount"][k].reshape(-1).tolist() == [discount]
        assert batch["next_obs"]["ids"][k].tolist() == [i, last, b]
        assert batch["next_obs"]["text"][k] == f"{last} {b}"
        assert batch["curr_obs"]["text"][k] == f"{t} {b}"
        assert batch["actions"][k].tolist() == [i, t, b]
        for name in ("dones", "terminations", "truncations"):
            flags = aligned(trajectories[i], name)
            if flags is not None:
                assert bool(batch[name][k].any()) == bool(flags[last, b])


def targets(
    fields: dict[str, Any], n: int = 3, gamma: float = 0.5, count: int = 200
) -> dict[int, tuple[float, float, int]]:
    """Of each step of a trajectory of one environment: rewards, discount, step of next_obs."""
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        batch = buffer.sample(count, sampler=NStep(n, gamma))
    return dict(
        zip(
            batch["curr_obs"]["ids"][:, 1].tolist(),
            zip(
                batch["rewards"].flatten().tolist(),
                batch["discount"].flatten().tolist(),
                batch["next_obs"]["ids"][:, 1].tolist(),
                strict=True,
            ),
            strict=True,
        )
    )


# -- by hand -------------------------------------------------------------------------------------


def test_three_rewards_are_summed_and_then_bootstrapped() -> None:
    found = targets(rollout(0, [1, 2, 4, 8, 16]))
    assert found[0] == (1 + 2 / 2 + 4 / 4, 1 / 8, 2)
    assert found[1] == (2 + 4 / 2 + 8 / 4, 1 / 8, 3)


def test_sum_stops_at_the_end_of_the_trajectory_and_bootstraps_there() -> None:
    found = targets(rollout(0, [1, 2, 4, 8, 16]))
    assert found[2] == (4 + 8 / 2 + 16 / 4, 1 / 8, 4)
    assert found[3] == (8 + 16 / 2, 1 / 4, 4)
    assert found[4] == (16, 1 / 2, 4)


def test_sum_stops_at_a_termination_and_nothing_is_bootstrapped() -> None:
    assert targets(rollout(0, [1, 2, 4, 8, 16], terminations=[(2, 0)], truncations=[])) == {
        0: (1 + 2 / 2 + 4 / 4, 0, 2),
        1: (2 + 4 / 2, 0, 2),
        2: (4, 0, 2),
        3: (8 + 16 / 2, 1 / 4, 4),
        4: (16, 1 / 2, 4),
    }


def test_sum_stops_at_a_truncation_and_bootstraps_there() -> None:
    assert targets(rollout(0, [1, 2, 4, 8, 16], terminations=[], truncations=[(2, 0)])) == {
        0: (1 + 2 / 2 + 4 / 4, 1 / 8, 2),
        1: (2 + 4 / 2, 1 / 4, 2),
        2: (4, 1 / 2, 2),
        3: (8 + 16 / 2, 1 / 4, 4),
        4: (16, 1 / 2, 4),
    }


def test_termination_that_is_a_truncation_too_bootstraps_nothing() -> None:
    found = targets(rollout(0, [1, 2, 4], terminations=[(1, 0)], truncations=[(1, 0)]))
    assert found == {0: (1 + 2 / 2, 0, 1), 1: (2, 0, 1), 2: (4, 1 / 2, 2)}


def test_terminated_last_step_of_the_trajectory_bootstraps_nothing() -> None:
    found = targets(rollout(0, [1, 2], terminations=[(1, 0)], truncations=[]))
    assert found == {0: (1 + 2 / 2, 0, 1), 1: (2, 0, 1)}


def test_termination_behind_the_n_steps_counts_for_nothing() -> None:
    found = targets(rollout(0, [1, 2, 4], terminations=[(2, 0)]), n=2)
    assert found[0] == (1 + 2 / 2, 1 / 4, 1)


def test_done_is_a_termination_where_nothing_else_is_known() -> None:
    found = targets(rollout(0, [1, 2, 4], dones=[(1, 0)]))
    assert found == {0: (1 + 2 / 2, 0, 1), 1: (2, 0, 1), 2: (4, 1 / 2, 2)}


def test_done_that_is_a_truncation_is_no_termination() -> None:
    found = targets(rollout(0, [1, 2, 4], dones=[(0, 0), (1, 0)], truncations=[(1, 0)]))
    assert found == {0: (1, 0, 0), 1: (2, 1 / 2, 1), 2: (4, 1 / 2, 2)}


def test_truncations_alone_end_sums_that_bootstrap() -> None:
    found = targets(rollout(0, [1, 2, 4], truncations=[(1, 0)]))
    assert found == {0: (1 + 2 / 2, 1 / 4, 1), 1: (2, 1 / 2, 1), 2: (4, 1 / 2, 2)}


def test_dones_say_where_and_terminations_whether_for_good() -> None:
    fields = rollout(0, [1, 2, 4, 8], dones=[(0, 0), (2, 0)], terminations=[(2, 0)])
    assert targets(fields) == {
        0: (1, 1 / 2, 0),
        1: (2 + 4 / 2, 0, 2),
        2: (4, 0, 2),
        3: (8, 1 / 2, 3),
    }


def test_n_of_1_gives_the_rewards_of_the_rows() -> None:
    found = targets(rollout(0, [1, 2, 4], terminations=[(1, 0)]), n=1)
    assert found == {0: (1, 1 / 2, 0), 1: (2, 0, 1), 2: (4, 1 / 2, 2)}


def test_n_larger_than_the_episode_sums_the_whole_of_it() -> None:
    found = targets(rollout(0, [1, 2, 4], terminations=[(2, 0)]), n=50)
    assert found == {0: (1 + 2 / 2 + 4 / 4, 0, 2), 1: (2 + 4 / 2, 0, 2), 2: (4, 0, 2)}


def test_trajectory_of_one_step_is_its_own_target() -> None:
    assert targets(rollout(0, [3])) == {0: (3, 1 / 2, 0)}


def test_gamma_of_0_takes_the_first_reward_and_no_bootstrap() -> None:
    assert targets(rollout(0, [1, 2, 4]), gamma=0.0) == {0: (1, 0, 2), 1: (2, 0, 2), 2: (4, 0, 2)}


def test_gamma_of_1_discounts_nothing() -> None:
    found = targets(rollout(0, [1, 2, 4, 8]), gamma=1.0)
    assert found == {0: (7, 1, 2), 1: (14, 1, 3), 2: (12, 1, 3), 3: (8, 1, 3)}


def test_steps_of_one_environment_are_summed() -> None:
    rewards = torch.tensor([[1.0, 100.0, 7.0], [2.0, 200.0, 7.0], [4.0, 400.0, 7.0]])
    fields = rollout(0, rewards, terminations=[(1, 1)])
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        batch = buffer.sample(200, sampler=NStep(3, 0.5))
    found = dict(
        zip(
            [(t, b) for _, t, b in batch["curr_obs"]["ids"].tolist()],
            zip(batch["rewards"].tolist(), batch["discount"].tolist(), strict=True),
            strict=True,
        )
    )
    assert found[0, 0] == (1 + 2 / 2 + 4 / 4, 1 / 8)
    assert found[0, 1] == (100 + 200 / 2, 0)
    assert found[2, 1] == (400, 1 / 2)
    assert found[0, 2] == (7 + 7 / 2 + 7 / 4, 1 / 8)


@pytest.mark.parametrize("row_shape", [(), (1,), (3,)], ids=str)
def test_any_termination_of_a_row_ends_its_episode(row_shape: tuple[int, ...]) -> None:
    found = targets(rollout(0, [1, 2, 4], row_shape=row_shape, terminations=[(1, 0)]))
    assert found == {0: (1 + 2 / 2, 0, 1), 1: (2, 0, 1), 2: (4, 1 / 2, 2)}


@pytest.mark.parametrize("epochs", [1, 2])
def test_leading_steps_of_flags_are_no_terminations(epochs: int) -> None:
    fields = rollout(0, [1, 2, 4, 8], epochs=epochs, terminations=[(2, 0)], truncations=[(0, 0)])
    assert targets(fields) == {
        0: (1, 1 / 2, 0),
        1: (2 + 4 / 2, 0, 2),
        2: (4, 0, 2),
        3: (8, 1 / 2, 3),
    }


def test_leading_steps_of_dones_are_no_terminations() -> None:
    found = targets(rollout(0, [1, 2, 4], epochs=1, dones=[(1, 0)]))
    assert found == {0: (1 + 2 / 2, 0, 1), 1: (2, 0, 1), 2: (4, 1 / 2, 2)}


# -- step by step --------------------------------------------------------------------------------

KINDS = {
    "terminations and truncations": ["terminations", "truncations"],
    "all three": ["dones", "terminations", "truncations"],
    "dones and truncations": ["dones", "truncations"],
    "dones": ["dones"],
    "terminations": ["terminations"],
    "truncations": ["truncations"],
    "none": [],
}


def random_rollout(
    i: int, names: Sequence[str], dtype: str = "float32", row_shape: tuple[int, ...] = (2,)
) -> dict[str, Any]:
    """Trajectory ``i`` of random sizes, flags and whole rewards; it follows from the arguments."""
    rng = np.random.default_rng(i)
    epochs = int(rng.integers(0, 3))
    num_steps, num_envs = int(rng.integers(1, 9)) * max(1, epochs), int(rng.integers(1, 4))
    rewards = rng.integers(-8, 9, (num_steps, num_envs, *row_shape)).astype(dtype)
    flags: dict[str, Any] = {
        name: np.argwhere(rng.random((num_steps, num_envs)) < 0.15).tolist() for name in names
    }
    return rollout(i, rewards, row_shape=(2,), epochs=epochs, **flags)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_random_trajectories_are_those_computed_step_by_step(kind: str) -> None:
    trajectories = {i: random_rollout(i, KINDS[kind]) for i in range(20)}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(trajectories.values())
        for n in (1, 3, 10):
            check(buffer.sample(300, sampler=NStep(n, 0.5)), trajectories, n, 0.5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rewards_keep_their_dtype(dtype: str) -> None:
    trajectories = {i: random_rollout(i, ["dones"], dtype) for i in range(5)}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(trajectories.values())
        batch = buffer.sample(100, sampler=NStep(3, 0.5))
    assert batch["rewards"].dtype == getattr(torch, dtype)
    check(batch, trajectories, 3, 0.5)


@pytest.mark.parametrize("row_shape", [(), (1,), (4,), (2, 3)], ids=str)
def test_discount_has_a_dimension_of_1_for_each_of_a_row_of_rewards(
    row_shape: tuple[int, ...],
) -> None:
    trajectories = {i: random_rollout(i, ["dones"], row_shape=row_shape) for i in range(5)}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(trajectories.values())
        batch = buffer.sample(100, sampler=NStep(3, 0.5))
    assert batch["rewards"].shape == (100, *row_shape)
    assert batch["discount"].shape == (100, *(1 for _ in row_shape))
    assert batch["discount"].dtype == torch.float32
    check(batch, trajectories, 3, 0.5)


def test_sums_of_float32_are_rounded_once() -> None:
    rewards = np.random.default_rng(0).normal(size=(200, 1, 1)).astype(np.float32)
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([rollout(0, rewards)])
        batch = buffer.sample(100, sampler=NStep(100, 0.99))
    factors = 0.99 ** np.arange(100)
    for (_, t, _), found in zip(
        batch["curr_obs"]["ids"].tolist(), batch["rewards"].flatten().tolist(), strict=True
    ):
        ahead = rewards[t : t + 100, 0, 0].astype(np.float64)
        exact = float(sum(ahead * factors[: len(ahead)]))
        assert abs(found - exact) <= np.spacing(np.float32(abs(exact))) / 2 + 1e-12


def test_a_reward_counts_as_much_on_every_processor() -> None:
    rewards = torch.zeros(60, 1, 1, dtype=torch.float64)
    rewards[-1] = 1.0
    found = targets(rollout(0, rewards), 60, 0.9, 2000)
    assert [found[t][0] for t in range(60)] == [0.9 ** (59 - t) for t in range(60)]


@pytest.mark.parametrize("reward", [float("inf"), float("-inf")])
def test_infinite_reward_of_the_last_step_is_no_nan(reward: float) -> None:
    found = targets(rollout(0, [1, 2, reward], terminations=[(2, 0)]), n=5)
    assert [found[t][0] for t in range(3)] == [reward] * 3


def test_infinite_reward_behind_the_n_steps_counts_for_nothing() -> None:
    assert targets(rollout(0, [1, 2, 4, float("inf")]), n=2)[1][0] == 2 + 4 / 2


@pytest.mark.parametrize("n", [5000, MAX_LEFT])
def test_n_of_thousands_takes_memory_for_the_steps_alone(n: int) -> None:
    """Not for a table of n rows of n numbers, which would be 34 GB."""
    num_steps = MAX_LEFT + 5
    steps = torch.arange(num_steps)[:, None]
    fields = {"rewards": torch.ones(num_steps, 1), "obs": steps, "next_obs": steps}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        batch = buffer.sample(4, sampler=NStep(n, 1.0), with_info=True)
    steps = (num_steps - batch["info"]["step"]).clamp(max=n)
    assert torch.equal(batch["rewards"], steps.float())
    assert torch.equal(batch["next_obs"], batch["info"]["step"] + steps - 1)


# -- what else is in the batch -------------------------------------------------------------------


def small() -> dict[str, Any]:
    return rollout(0, torch.arange(24.0).reshape(8, 3), terminations=[(4, 1)], truncations=[(2, 0)])


def test_keys_are_those_of_the_trajectories_and_discount() -> None:
    fields = small()
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([fields])
        assert list(buffer.sample(3, sampler=NStep(3, 0.5))) == [*fields, "discount"]


def test_next_observation_that_is_one_column_is_that_of_the_last_step() -> None:
    steps = torch.arange(5)[:, None]
    fields = {"rewards": torch.ones(5, 1), "obs": steps, "next_obs": steps}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        batch = buffer.sample(50, sampler=NStep(2, 1.0), with_info=True)
    assert torch.equal(batch["next_obs"], (batch["info"]["step"] + 1).clamp(max=4))


def test_info_is_that_of_the_drawn_rows() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([small()])
        batch = buffer.sample(50, sampler=NStep(3, 0.5), with_info=True)
    info = batch["info"]
    found = torch.stack([info["trajectory_id"], info["step"], info["env"]], -1)
    assert torch.equal(found, batch["curr_obs"]["ids"])


def test_rows_are_those_that_the_buffer_would_draw_without_it() -> None:
    found = []
    for sampler in (None, NStep(3, 0.5)):
        with TrajectoryReplayBuffer(seed=7) as buffer:
            buffer.add_trajectories([small()])
            found.append(buffer.sample(50, sampler=sampler)["curr_obs"]["ids"])
    assert torch.equal(found[0], found[1])


def test_out_is_refilled_in_place() -> None:
    trajectories = {i: random_rollout(i, ["dones"]) for i in range(5)}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(trajectories.values())
        sampler = NStep(3, 0.5)
        out = buffer.sample(40, sampler=sampler)
        leaves = [out["rewards"], out["actions"], out["next_obs"]["ids"], out["dones"]]
        pointers = [leaf.data_ptr() for leaf in leaves]
        text = out["next_obs"]["text"]
        assert buffer.sample(40, out=out, sampler=sampler) is out
        leaves = [out["rewards"], out["actions"], out["next_obs"]["ids"], out["dones"]]
        assert [leaf.data_ptr() for leaf in leaves] == pointers
        assert out["next_obs"]["text"] is text
        check(out, trajectories, 3, 0.5)


def test_added_arrays_are_not_changed() -> None:
    rewards, ids = np.arange(12.0).reshape(4, 3), np.arange(12).reshape(4, 3)
    dones = ids % 5 == 0
    copies = [array.copy() for array in (rewards, ids, dones)]
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"rewards": rewards, "obs": ids, "next_obs": ids, "dones": dones}])
        buffer.sample(50, sampler=NStep(3, 0.5))
    for array, copy in zip((rewards, ids, dones), copies, strict=True):
        assert np.array_equal(array, copy)


def test_stored_rows_are_not_changed() -> None:
    fields = small()
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        before = buffer.sample(50)
        buffer.sample(50, sampler=NStep(3, 0.5))
        for batch in (before, buffer.sample(50)):
            for k, (_, t, b) in enumerate(batch["curr_obs"]["ids"].tolist()):
                assert batch["rewards"][k] == fields["rewards"][t, b]
                assert batch["next_obs"]["ids"][k].tolist() == [0, t, b]
                assert torch.equal(batch["terminations"][k], fields["terminations"][t, b])


def test_batches_before_are_not_changed_by_later_ones() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([small()])
        sampler = NStep(3, 0.5)
        before = buffer.sample(50, sampler=sampler)
        copies = [before["rewards"].clone(), before["discount"].clone()]
        buffer.sample(50, sampler=sampler)
    assert torch.equal(before["rewards"], copies[0])
    assert torch.equal(before["discount"], copies[1])


# -- misuse --------------------------------------------------------------------------------------


def test_whole_numbers_as_rewards_are_refused() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"rewards": torch.ones(3, 1, dtype=torch.int64)}])
        with pytest.raises(SchemaError, match=r"column 'rewards': expected floats .* got int64"):
            buffer.sample(1, sampler=NStep(3, 0.5))


def test_no_rewards_are_refused() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"actions": torch.ones(3, 1)}])
        with pytest.raises(
            SchemaError, match=r"the reward \(rewards, reward, rew\) for NStep, got none\..*actions"
        ):
            buffer.sample(1, sampler=NStep(3, 0.5))


@pytest.mark.parametrize("n", [0, -1, MAX_LEFT + 1])
def test_n_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"n: expected 1 to 65535 steps, got {n}"):
        NStep(n, 0.5)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma: expected 0 to 1, got"):
        NStep(3, gamma)


@pytest.mark.parametrize("rows", [Slices(2), NStep(2, 0.5)], ids=["Slices", "NStep"])
def test_rows_that_are_no_single_rows_are_refused(rows: Sampler) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small()])
        with pytest.raises(ValueError, match="rows: expected a sampler of single rows"):
            buffer.sample(1, sampler=NStep(3, 0.5, rows))


def test_sampler_of_another_buffer_is_refused() -> None:
    with TrajectoryReplayBuffer() as buffer, TrajectoryReplayBuffer() as other:
        buffer.add_trajectories([small()])
        other.add_trajectories([small()])
        sampler = NStep(3, 0.5)
        buffer.sample(1, sampler=sampler)
        with pytest.raises(ValueError, match="sampler: expected one of this buffer's own"):
            other.sample(1, sampler=sampler)


def test_rows_that_have_drawn_from_another_buffer_are_refused() -> None:
    with TrajectoryReplayBuffer() as buffer, TrajectoryReplayBuffer() as other:
        buffer.add_trajectories([small()])
        other.add_trajectories([small()])
        rows = Prioritized()
        other.sample(1, sampler=rows)
        with pytest.raises(ValueError, match="rows: expected a sampler of this buffer's own"):
            buffer.sample(1, sampler=NStep(3, 0.5, rows))


def test_rows_may_be_drawn_by_their_sampler_alone_too() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        fields = small()
        buffer.add_trajectories([fields])
        rows = Prioritized()
        buffer.sample(1, sampler=rows)
        check(buffer.sample(20, sampler=NStep(3, 0.5, rows)), {0: fields}, 3, 0.5)


# -- over other samplers -------------------------------------------------------------------------


def test_weights_and_handles_of_prioritized_rows_are_those_of_the_drawn_rows() -> None:
    fields = rollout(0, torch.arange(40.0).reshape(20, 2), terminations=[(7, 0)])
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        rows = Prioritized(alpha=1.0, beta=1.0, eps=0.0)
        sampler = NStep(3, 0.5, rows)
        # Row r gets the priority r + 1.
        handles = buffer.sample(400, sampler=sampler)["info"]["handle"].unique(dim=0)
        assert handles[:, 1].tolist() == list(range(40))
        rows.update_priorities(handles, handles[:, 1] + 1.0)
        batch = buffer.sample(300, sampler=sampler)
    check(batch, {0: fields}, 3, 0.5)
    _, t, b = batch["curr_obs"]["ids"].unbind(-1)
    drawn = t * 2 + b
    assert torch.equal(batch["info"]["handle"][:, 1], drawn)
    expected = (drawn.min() + 1) / (drawn + 1)
    assert torch.allclose(batch["weights"], expected.float(), rtol=1e-6)


def test_late_updates_of_prioritized_rows_are_counted() -> None:
    with TrajectoryReplayBuffer(sample_window_size=1) as buffer:
        rows = Prioritized()
        sampler = NStep(3, 0.5, rows)
        buffer.add_trajectories([small()])
        handles = buffer.sample(5, sampler=sampler)["info"]["handle"]
        buffer.add_trajectories([small()])
        buffer.sample(5, sampler=sampler)
        rows.update_priorities(handles, torch.ones(5))
        assert buffer.get_stats()["late_updates"] == 5


def test_rows_of_fresh_versions_have_targets_from_their_episode() -> None:
    fields = rollout(0, [1, 2, 4, 8], dones=[]) | {"versions": torch.tensor([[9], [0], [0], [9]])}
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        sampler = NStep(3, 0.5, FreshVersions(1))
        batch = buffer.sample(50, sampler=sampler)
        assert set(batch["rewards"].flatten().tolist()) == {1 + 2 / 2 + 4 / 4, 8}
        assert buffer.get_stats()["excluded_versions"] == {0: 2}


def test_epoch_of_targets_has_each_row_once() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([small()])
        sampler = NStep(3, 0.5, WithoutReplacement())
        batches = [buffer.sample(10, sampler=sampler) for _ in range(3)]
    assert [len(batch["rewards"]) for batch in batches] == [10, 10, 4]
    rows = [tuple(row) for batch in batches for row in batch["curr_obs"]["ids"].tolist()]
    assert sorted(rows) == [(0, t, b) for t in range(8) for b in range(3)]


def test_short_last_batch_of_an_epoch_comes_on_a_device_too() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([small()])
        sampler = NStep(3, 0.5, WithoutReplacement())
        sizes = [len(buffer.sample(10, sampler=sampler, device="cpu")["rewards"]) for _ in "123"]
    assert sizes == [10, 10, 4]


# -- while the window changes --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_targets_are_right_whatever_happens_to_the_window(
    tmp_path: Path, without_fsync: None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "auto_save": True,
        "auto_save_path": tmp_path,
        "sample_window_size": 4,
        "cache_size": 3,
    }
    buffer = TrajectoryReplayBuffer(**options)
    sampler, kind, trajectories = NStep(3, 0.5), "dones", dict[int, Any]()
    try:
        for _ in range(60):
            step = rng.choice(["add", "add", "add some", "flush", "clear cache", "clear", "reopen"])
            if step.startswith("add"):
                for _ in range(1 if step == "add" else 6):
                    i = len(trajectories)
                    trajectories[i] = random_rollout(i, KINDS[kind])
                    buffer.add_trajectories([trajectories[i]])
            elif step == "flush":
                buffer.flush()
            elif step == "clear cache":
                buffer.clear_cache()
            elif step == "clear":
                buffer.clear()
                kind = str(rng.choice(list(KINDS)))
            else:
                buffer.close()
                buffer = TrajectoryReplayBuffer(**options)
                sampler = NStep(3, 0.5)
            if buffer.window_ids and rng.random() < 0.7:
                check(buffer.sample(40, sampler=sampler), trajectories, 3, 0.5)
    finally:
        buffer.close()


def batches_of(path: Path | None, **options: Any) -> list[Any]:
    """Several batches, while trajectories are added."""
    if path is not None:
        options |= {"auto_save": True, "auto_save_path": path}
    with TrajectoryReplayBuffer(seed=6, sample_window_size=6, **options) as buffer:
        sampler, found = NStep(3, 0.9), []
        for i in range(12):
            buffer.add_trajectories([random_rollout(i, KINDS["all three"])])
            buffer.flush()
            batch = buffer.sample(25, sampler=sampler)
            found.append(
                [
                    batch[name].tolist()
                    for name in ("rewards", "discount", "actions", "dones", "terminations")
                ]
                + [batch["next_obs"]["ids"].tolist(), batch["next_obs"]["text"]]
                + [batch["curr_obs"]["ids"].tolist(), batch["curr_obs"]["text"]]
            )
        return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_size": 2},
        {"cache_size": 0},
        {"enable_cache": False},
        {"trajectory_format": "npy", "cache_size": 1},
        {"trajectory_format": "pt", "cache_size": 1},
        {"trajectory_format": "pt", "enable_cache": False},
    ],
    ids=str,
)
def test_targets_of_files_are_those_of_memory(
    tmp_path: Path, without_fsync: None, options: dict[str, Any]
) -> None:
    assert batches_of(tmp_path, **options) == batches_of(None)


# -- children and threads ------------------------------------------------------------------------


def sampled(
    _: Parent, buffer: TrajectoryReplayBuffer, sampler: Sampler
) -> tuple[list[float], list[float]]:
    batch = buffer.sample(100, sampler=sampler)
    return batch["rewards"].tolist(), batch["discount"].tolist()


def test_forked_child_draws_targets() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([small()])
        sampler = NStep(3, 0.5, Prioritized())
        buffer.sample(1, sampler=sampler)
        with Child(sampled, buffer, sampler) as child:
            found = set(zip(*child.result(), strict=True))
    values = expected_of(small(), 3, 0.5).values()
    assert found == {(rewards[0], discount) for rewards, discount, _ in values}


def test_samplers_that_are_locked_during_a_fork_draw_in_the_child() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([small()])
        rows = Prioritized()
        sampler = NStep(3, 0.5, rows)
        buffer.sample(1, sampler=sampler)
        with sampler._lock, rows._lock, Child(sampled, buffer, sampler) as child:
            assert len(child.result()[0]) == 100


def test_threads_share_a_sampler_while_one_adds_and_evicts(tmp_path: Path) -> None:
    numbers = itertools.count()
    outs: dict[int, Any] = {}  # all threads but one refill theirs
    made = [random_rollout(i, KINDS["terminations and truncations"]) for i in range(32)]
    expected = [expected_of(fields, 3, 0.5) for fields in made]

    def look(thread: int) -> None:
        out = buffer.sample(100, out=outs.get(thread), sampler=sampler)
        outs[thread] = out if thread else None
        leaves = [
            out["curr_obs"]["ids"],
            out["next_obs"]["ids"],
            out["rewards"],
            out["discount"],
            out["actions"],
        ]
        for ids, next_ids, rewards, discount, actions in zip(
            *(leaf.tolist() for leaf in leaves), strict=True
        ):
            i, t, b = ids
            total, factor, last = expected[i % 32][t, b]
            assert (rewards, discount) == (total, [factor])
            assert next_ids == [i, last, b]
            assert actions == [i % 32, t, b]

    with TrajectoryReplayBuffer(
        seed=0, auto_save=True, auto_save_path=tmp_path, sample_window_size=6, cache_size=4
    ) as buffer:
        sampler = NStep(3, 0.5)

        def add() -> None:
            i = next(numbers)
            fields = dict(made[i % 32])
            shift = torch.tensor([i - i % 32, 0, 0])
            for name in ("curr_obs", "next_obs"):
                fields[name] = fields[name] | {"ids": fields[name]["ids"] + shift}
            buffer.add_trajectories([fields])

        add()
        look_while_adding(look, add)
    assert next(numbers) > 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "make",
    [lambda: NStep(2, 0.9), lambda: Slices(2), WithoutReplacement],
    ids=["nstep", "slices", "epoch"],
)
def test_a_sampler_does_not_keep_the_memory_of_a_buffer_that_is_gone(
    make: Callable[[], Sampler],
) -> None:
    def address_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")

    before = address_bytes()
    samplers = [make() for _ in range(3)]
    for sampler in samplers:
        buffer = TrajectoryReplayBuffer()
        buffer.add_trajectories([{"rewards": torch.ones(4, 2)}])
        buffer.sample(2, sampler=sampler)
        del buffer
    gc.collect()
    assert address_bytes() - before < 1 << 30  # a buffer has up to 8 TiB
