"""TrajectoryCollector: chunks in, one trajectory out."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import data
import numpy as np
import pytest
import torch
from interrupts import every_call

from mmbuf.collect import TrajectoryCollector
from mmbuf.errors import SchemaError

B = 4


def tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def test_chunks_are_stacked_in_time_order() -> None:
    trajectory = data.collected(3).to_trajectory()
    states = np.stack([data.chunk(t)["curr_obs"]["states"] for t in range(3)])
    assert np.array_equal(trajectory.curr_obs["states"], states)
    assert torch.equal(
        tensor(trajectory.actions), torch.stack([data.chunk(t)["actions"] for t in range(3)])
    )
    assert tensor(trajectory.rewards).tolist() == [[0.0] * B, [1.0] * B, [2.0] * B]


def test_text_is_collected_as_lists_of_lists() -> None:
    text = data.collected(2).to_trajectory().curr_obs["text"]
    assert text == [[f"t{t} b{b}" for b in range(B)] for t in range(2)]


def test_further_columns_go_to_extra() -> None:
    collector = TrajectoryCollector()
    collector.append(rewards=torch.ones(B), bonus=torch.zeros(B), info={"x": np.ones((B, 2))})
    trajectory = collector.to_trajectory()
    assert list(trajectory.extra) == ["bonus", "info"]
    assert trajectory.extra["info"]["x"].shape == (1, B, 2)


def test_arrays_may_be_reused_after_append() -> None:
    collector = TrajectoryCollector()
    array, given, text = np.zeros((B, 2)), torch.zeros(B), ["a"] * B
    collector.append(actions=array, rewards=given, instruction=text)
    array.fill(9)
    given.fill_(9)
    text[0] = "changed"
    trajectory = collector.to_trajectory()
    assert tensor(trajectory.actions).count_nonzero() == 0
    assert tensor(trajectory.rewards).count_nonzero() == 0
    assert trajectory.extra["instruction"] == [["a"] * B]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float16, torch.complex64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    collector = TrajectoryCollector()
    values = torch.tensor([0, 1, 2, 3]).to(dtype)
    collector.append(rewards=values)
    rewards = tensor(collector.to_trajectory().rewards)
    assert rewards.dtype == dtype
    assert torch.equal(rewards, values[None])


def test_what_is_collected_is_contiguous_and_detached() -> None:
    collector = TrajectoryCollector()
    values = torch.arange(2.0 * B, requires_grad=True).reshape(2, B).t()
    collector.append(actions=values, rewards=values.detach().numpy()[::-1, 0])
    trajectory = collector.to_trajectory()
    actions, rewards = tensor(trajectory.actions), tensor(trajectory.rewards)
    assert (actions.is_contiguous(), actions.requires_grad) == (True, False)
    assert rewards.tolist() == [[3.0, 2.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("terminations", "truncations", "dones"),
    [
        ([1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1]),
        ([1, 0, 0, 1], None, [1, 0, 0, 1]),
        (None, [0, 1, 0, 1], [0, 1, 0, 1]),
    ],
)
def test_missing_dones_are_terminations_or_truncations(
    terminations: list[int] | None, truncations: list[int] | None, dones: list[int]
) -> None:
    collector = TrajectoryCollector()
    collector.append(
        terminations=None if terminations is None else torch.tensor(terminations).bool(),
        truncations=None if truncations is None else np.array(truncations, bool),
    )
    derived = tensor(collector.to_trajectory().dones)
    assert derived.dtype == torch.bool
    assert derived.tolist() == [[bool(done) for done in dones]]


def test_given_dones_are_kept() -> None:
    collector = TrajectoryCollector()
    collector.append(terminations=torch.ones(B), dones=torch.zeros(B))
    assert tensor(collector.to_trajectory().dones).tolist() == [[0.0] * B]


def test_no_flags_give_no_dones() -> None:
    collector = TrajectoryCollector()
    collector.append(rewards=torch.zeros(B))
    assert collector.to_trajectory().dones is None


def test_flags_of_different_shapes_are_refused() -> None:
    collector = TrajectoryCollector()
    with pytest.raises(SchemaError, match=r"^column 'truncations': .*\(4,\), got \(4, 1\)\.$"):
        collector.append(terminations=torch.zeros(B), truncations=torch.zeros(B, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bonus": torch.zeros(B)}, "column 'bonus': expected no such column"),
        ({"rewards": None}, "column 'rewards': expected in the trajectory, but it is missing"),
        ({"rewards": torch.zeros(B).double()}, r"column 'rewards': .*float32 .*, got float64 \(\)"),
        ({"actions": np.zeros((B, 5))}, r"column 'actions': .*\(2,\), got float64 \(5,\)"),
        (
            {"curr_obs": {"states": np.zeros((B, 3)), "text": [""] * B}},
            r"column 'curr_obs.states': expected float32 rows of shape \(3,\), got float64 \(3,\)",
        ),
        ({"rewards": torch.zeros(B + 1)}, "column 'rewards': expected B = 4 .*, got 5"),
        ({"rewards": torch.tensor(1.0)}, r"column 'rewards': expected shape .*, got \(\)"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_whole(change: dict[str, Any], message: str) -> None:
    collector = data.collected(2)
    with pytest.raises(SchemaError, match=message):
        collector.append(**(data.chunk(2) | change))
    assert len(collector) == 2
    collector.append(**data.chunk(2))
    assert tensor(collector.to_trajectory().rewards)[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_a_chunk_of_another_b_is_refused() -> None:
    collector = TrajectoryCollector()
    collector.append(rewards=torch.zeros(B))
    with pytest.raises(SchemaError, match=r"^column 'rewards': expected B = 4 rows .*, got 3\.$"):
        collector.append(rewards=torch.zeros(B - 1))


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(SchemaError, match="expected at least one column, got none"):
        TrajectoryCollector().append(curr_obs={})


def test_metadata_is_no_column_of_a_chunk() -> None:
    with pytest.raises(SchemaError, match=r"^column 'max_episode_length': expected columns only"):
        TrajectoryCollector().append(rewards=torch.zeros(B), max_episode_length=3)


def test_the_weights_id_comes_from_the_bytes_of_versions() -> None:
    collector = TrajectoryCollector()
    for version in (1.0, 2.0):
        collector.append(versions=torch.full((1, 1), version))
    named = uuid.uuid5(uuid.NAMESPACE_DNS, np.array([1, 2], np.float32).tobytes().hex())
    assert collector.to_trajectory().model_weights_id == str(named)


def test_without_versions_the_weights_id_is_that_of_four_zero_bytes() -> None:
    named = str(uuid.uuid5(uuid.NAMESPACE_DNS, "00000000"))
    assert data.collected(1).to_trajectory().model_weights_id == named


def test_metadata_of_the_collector_yields_to_that_of_the_call() -> None:
    collector = data.collected(1, max_episode_length=80, model_weights_id="mine")
    default = collector.to_trajectory()
    asked = collector.to_trajectory(max_episode_length=0, model_weights_id="")
    assert (default.max_episode_length, default.model_weights_id) == (80, "mine")
    assert (asked.max_episode_length, asked.model_weights_id) == (0, "")


def test_a_trajectory_shares_no_memory_with_the_collector() -> None:
    collector = data.collected(2)
    tensor(collector.to_trajectory().rewards).fill_(9)
    assert tensor(collector.to_trajectory().rewards)[:, 0].tolist() == [0.0, 1.0]


def test_trajectories_are_parts_along_b() -> None:
    parts = data.collected(2).to_trajectories([1, 3])
    assert [(part.num_steps, part.num_envs) for part in parts] == [(2, 1), (2, 3)]


def test_a_cleared_collector_takes_other_columns() -> None:
    collector = data.collected(2)
    collector.clear()
    assert len(collector) == 0
    collector.append(bonus=torch.zeros(1))
    assert collector.to_trajectory().num_envs == 1


def test_an_empty_collector_gives_no_trajectory() -> None:
    with pytest.raises(ValueError, match="expected at least one chunk, got none"):
        TrajectoryCollector().to_trajectory()


def test_an_interrupted_append_has_taken_nothing_and_the_next_goes_on() -> None:
    collector, expected = TrajectoryCollector(), 0
    for interrupt in every_call():
        interrupt(partial(collector.append, **data.chunk(expected)))
        expected += not interrupt.was_met
        assert len(collector) == expected, interrupt.place
        collector.append(**data.chunk(expected))
        expected += 1
    assert data.bits(collector.to_trajectory().rewards) == data.bits(
        data.collected(expected).to_trajectory().rewards
    )


def test_an_interrupted_first_append_leaves_the_columns_open() -> None:
    for interrupt in every_call():
        collector = TrajectoryCollector()
        if interrupt(lambda: collector.append(**data.chunk(0))):  # noqa: B023
            collector.append(bonus=torch.zeros(1))
            assert collector.to_trajectory().num_envs == 1, interrupt.place


def test_what_a_handler_takes_within_an_append_is_of_whole_chunks() -> None:
    collector = data.collected(2)
    lengths = []
    for interrupt in every_call():
        before = len(collector)
        interrupt(
            lambda: collector.append(**data.chunk(0)),
            lambda: lengths.append(collector.to_trajectory().num_steps),
        )
        assert lengths in ([before], []), interrupt.place
        lengths.clear()
