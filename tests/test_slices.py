"""Slices and Episodes: consecutive steps of one environment, never beyond an episode's end.

Every row says whose it is: ``ids`` are (trajectory, step, environment). What the samplers derive is
compared with episodes that are found step by step in whole trajectories.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import look_while_adding

from mmbuf import EmptyBufferError, ReplayReader, SchemaError, TrajectoryReplayBuffer
from mmbuf.sampling import Draw, Sampler, Sight, Slices
from mmbuf.sampling import episodes as episodes_module
from mmbuf.sampling.episodes import MAX_LEFT, Episodes

Row = tuple[int, int, int]  # trajectory, step, environment
Set = Iterable[Sequence[int]]  # the rows (t, b) in which a flag is set

QUANTILES = {14: 36.12, 19: 43.82, 23: 49.73}  # of chi-square by degrees of freedom: 99.9 %


def flags_of(
    num_steps: int, num_envs: int, rows: Set, row_shape: tuple[int, ...], epochs: int = 0
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
    i: int,
    num_steps: int,
    num_envs: int = 1,
    *,
    row_shape: tuple[int, ...] = (1,),
    epochs: int = 0,
    has_text: bool = False,
    **flags: Set,
) -> dict[str, Any]:
    """Trajectory ``i``; ``flags`` by name, of ``row_shape`` and with ``epochs`` leading steps."""
    t, b = torch.meshgrid(torch.arange(num_steps), torch.arange(num_envs), indexing="ij")
    fields: dict[str, Any] = {"ids": torch.stack([torch.full_like(t, i), t, b], -1)}
    for name, rows in flags.items():
        fields[name] = flags_of(num_steps, num_envs, rows, row_shape, epochs)
    if has_text:
        fields["curr_obs"] = {
            "task": [[f"{i} {t} {b}" for b in range(num_envs)] for t in range(num_steps)]
        }
    return fields


def ends_of(fields: Mapping[str, Any]) -> torch.Tensor:
    """``[T, B]``: whether an episode ends there, of a whole trajectory of `rollout`."""
    num_steps, num_envs, _ = fields["ids"].shape
    ends = torch.zeros(num_steps, num_envs, dtype=torch.bool)
    ends[-1] = True
    for name in ["dones"] if "dones" in fields else ["terminations", "truncations"]:
        if name in fields:
            flags = fields[name].reshape(len(fields[name]), num_envs, -1).any(-1)
            epochs = len(flags) - num_steps
            if epochs:
                flags = flags.reshape(epochs, -1, num_envs)[:, 1:].reshape(num_steps, num_envs)
            ends |= flags
    return ends


def episodes_of(store: TrajectoryReplayBuffer | ReplayReader) -> list[list[Row]]:
    """The rows of each episode of the window, oldest trajectory first, one environment at a time"""
    found: list[list[Row]] = []
    for key in store.window_ids:
        fields = store.get_trajectory(key).to_columns()
        ids, ends = fields["ids"].tolist(), ends_of(fields).tolist()
        for b in range(len(ids[0])):
            episode: list[Row] = []
            for t in range(len(ids)):
                episode.append(tuple(ids[t][b]))
                if ends[t][b]:
                    found.append(episode)
                    episode = []
    return found


def slices_in(episodes: list[list[Row]], length: int) -> set[tuple[Row, ...]]:
    """All that can be drawn of these episodes."""
    return {
        tuple(episode[start : start + length])
        for episode in episodes
        for start in range(len(episode) - length + 1)
    }


def drawn(batch: Mapping[str, Any]) -> list[tuple[Row, ...]]:
    return [tuple(map(tuple, rows)) for rows in batch["ids"].tolist()]


def starts_drawn(
    *trajectories: dict[str, Any], length: int = 2, pad: bool = False, count: int = 400
) -> set[Row]:
    """The first rows of many slices, which are checked to be consecutive."""
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(trajectories)
        found = drawn(buffer.sample(count, sampler=Slices(length, pad)))
        if not pad:
            assert all(
                rows == tuple((i, t + step, b) for step in range(length))
                for rows in found
                for i, t, b in rows[:1]
            )
        return {rows[0] for rows in found}


def chi_square(counts: Counter[Any], expected: Mapping[Any, float]) -> float:
    """Pearson's statistic of counts of ``expected``'s keys, whose values are shares of 1."""
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    return sum(
        (counts[key] - total * share) ** 2 / (total * share) for key, share in expected.items()
    )


class Spy(Sampler):
    """Keeps what `Episodes` knows of the window, by rows counted from the window's first."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes = Episodes()
        self.found: list[list[int]] = []
        self.left: list[int] = []

    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        with self._lock:
            episodes = self.episodes
            episodes.follow(sight)
            self.left = episodes.left.tolist()
            self.found = [
                [first + stride * step - episodes.num_dropped_rows for step in range(length)]
                for first, length, stride in zip(
                    episodes.firsts.tolist(),
                    episodes.lengths.tolist(),
                    episodes.strides.tolist(),
                    strict=True,
                )
            ]
        return Draw(np.full(num_chunks, sight.view.low))


def check(store: TrajectoryReplayBuffer | ReplayReader, spy: Spy) -> None:
    """That ``spy`` knows the episodes of the window, and these only."""
    store.sample(1, sampler=spy)
    rows = [
        tuple(row)
        for key in store.window_ids
        for row in store.get_trajectory(key).to_columns()["ids"].flatten(0, 1).tolist()
    ]
    index = {row: i for i, row in enumerate(rows)}
    episodes = episodes_of(store)
    assert spy.found == [[index[row] for row in episode] for episode in episodes]
    left = {row: len(episode) - step for episode in episodes for step, row in enumerate(episode)}
    assert spy.left == [left[row] for row in rows]


# -- where episodes end --------------------------------------------------------------------------


def test_slices_stay_before_a_termination() -> None:
    starts = starts_drawn(rollout(0, 6, terminations=[(2, 0)]))
    assert starts == {(0, 0, 0), (0, 1, 0), (0, 3, 0), (0, 4, 0)}


def test_slices_stay_before_a_truncation() -> None:
    starts = starts_drawn(rollout(0, 6, truncations=[(3, 0)]))
    assert starts == {(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 4, 0)}


def test_episode_ends_where_it_is_terminated_or_truncated() -> None:
    starts = starts_drawn(rollout(0, 6, terminations=[(1, 0)], truncations=[(3, 0)]))
    assert starts == {(0, 0, 0), (0, 2, 0), (0, 4, 0)}


def test_termination_and_truncation_of_one_row_end_one_episode() -> None:
    starts = starts_drawn(rollout(0, 5, terminations=[(1, 0)], truncations=[(1, 0)]))
    assert starts == {(0, 0, 0), (0, 2, 0), (0, 3, 0)}


def test_dones_alone_count_where_there_are_dones() -> None:
    fields = rollout(0, 5, dones=[(2, 0)], terminations=[(0, 0)], truncations=[(1, 0)])
    assert starts_drawn(fields) == {(0, 0, 0), (0, 1, 0), (0, 3, 0)}


def test_episode_ends_with_its_trajectory() -> None:
    starts = starts_drawn(rollout(0, 3, dones=[]), rollout(1, 2, dones=[]))
    assert starts == {(0, 0, 0), (0, 1, 0), (1, 0, 0)}


def test_episodes_without_any_flag_end_with_their_trajectories() -> None:
    assert starts_drawn(rollout(0, 3), rollout(1, 2)) == {(0, 0, 0), (0, 1, 0), (1, 0, 0)}


def test_flag_of_the_last_step_ends_no_second_episode() -> None:
    assert starts_drawn(rollout(0, 3, dones=[(2, 0)])) == {(0, 0, 0), (0, 1, 0)}


def test_each_environment_has_episodes_of_its_own() -> None:
    starts = starts_drawn(rollout(0, 4, 3, dones=[(1, 0), (0, 1), (2, 2)]))
    assert starts == {(0, 0, 0), (0, 2, 0), (0, 1, 1), (0, 2, 1), (0, 0, 2), (0, 1, 2)}


@pytest.mark.parametrize("row_shape", [(), (1,), (3,), (2, 2)], ids=str)
def test_any_flag_of_a_row_ends_the_episode(row_shape: tuple[int, ...]) -> None:
    starts = starts_drawn(rollout(0, 4, 2, row_shape=row_shape, dones=[(1, 0), (2, 1)]))
    assert starts == {(0, 0, 0), (0, 2, 0), (0, 0, 1), (0, 1, 1)}


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_leading_steps_of_flags_end_no_episode(epochs: int) -> None:
    fields = rollout(0, 6, 2, epochs=epochs, dones=[(2, 0), (3, 1)])
    assert starts_drawn(fields) == {
        *((0, t, 0) for t in (0, 1, 3, 4)),
        *((0, t, 1) for t in (0, 1, 2, 4)),
    }


def test_leading_steps_of_terminations_and_truncations_end_no_episode() -> None:
    fields = rollout(0, 4, epochs=1, terminations=[(0, 0)], truncations=[(1, 0)])
    assert starts_drawn(fields) == {(0, 2, 0)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_flags_need_not_be_bool(dtype: torch.dtype) -> None:
    fields = rollout(0, 4, dones=[(1, 0)])
    fields["dones"] = fields["dones"].to(dtype)
    assert starts_drawn(fields) == {(0, 0, 0), (0, 2, 0)}


def test_trajectory_of_one_step_has_one_slice_for_each_environment() -> None:
    assert starts_drawn(rollout(0, 1, 3, dones=[]), length=1) == {(0, 0, b) for b in range(3)}


# -- which slices are drawn ----------------------------------------------------------------------


def many_episodes(i: int, *, has_text: bool = False) -> dict[str, Any]:
    """Trajectory ``i`` of a mixture of sizes, with episodes of all lengths."""
    rng = np.random.default_rng(i)
    num_steps, num_envs = int(rng.integers(1, 30)), int(rng.integers(1, 5))
    ends = np.argwhere(rng.random((num_steps, num_envs)) < 0.15).tolist()
    return rollout(i, num_steps, num_envs, dones=ends, has_text=has_text)


def test_no_slice_of_10_000_holds_two_episodes_environments_or_trajectories() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        trajectories = [many_episodes(i) for i in range(40)]
        buffer.add_trajectories(trajectories)
        batch = buffer.sample(10_000, sampler=Slices(4))
    ids = batch["ids"]
    assert ids.shape == (10_000, 4, 3)
    assert torch.equal(ids[:, :, 0], ids[:, :1, 0].expand(-1, 4))
    assert torch.equal(ids[:, :, 2], ids[:, :1, 2].expand(-1, 4))
    assert torch.equal(ids[:, :, 1], ids[:, :1, 1] + torch.arange(4))
    assert not batch["dones"][:, :-1].any()
    assert set(ids[:, 0, 0].unique().tolist()) == {
        rows[0][0]
        for i in range(40)
        for rows in slices_in(
            [
                [(i, t, b) for t in range(first, last + 1)]
                for b in range(trajectories[i]["ids"].shape[1])
                for first, last in _stretches(ends_of(trajectories[i])[:, b])
            ],
            4,
        )
    }


def _stretches(ends: torch.Tensor) -> list[tuple[int, int]]:
    lasts = ends.nonzero().flatten().tolist()
    return list(zip([0, *(last + 1 for last in lasts[:-1])], lasts, strict=True))


def test_every_legal_start_is_equally_likely() -> None:
    """Eight of an episode of 10 steps, three of each of two of 5, one of one of 3."""
    with TrajectoryReplayBuffer(seed=1) as buffer:
        buffer.add_trajectories([rollout(0, 10), rollout(1, 5, 2), rollout(2, 3)])
        legal = slices_in(episodes_of(buffer), 3)
        counts = Counter(drawn(buffer.sample(30_000, sampler=Slices(3))))
    assert len(legal) == 15
    assert chi_square(counts, dict.fromkeys(legal, 1 / 15)) < QUANTILES[14]


def test_every_legal_start_is_equally_likely_after_eviction() -> None:
    with TrajectoryReplayBuffer(seed=2, sample_window_size=3) as buffer:
        sampler = Slices(3)
        for i in range(7):
            buffer.add_trajectories([rollout(i, 7 + i, dones=[(3, 0)])])
            buffer.sample(1, sampler=sampler)
        legal = slices_in(episodes_of(buffer), 3)
        counts = Counter(drawn(buffer.sample(30_000, sampler=sampler)))
    assert len(legal) == 3 * 2 + 5 + 6 + 7 == 24
    assert chi_square(counts, dict.fromkeys(legal, 1 / 24)) < QUANTILES[23]


def test_last_start_of_an_episode_is_drawn() -> None:
    assert starts_drawn(rollout(0, 2), length=1, count=50) == {(0, 0, 0), (0, 1, 0)}


def test_slice_of_the_whole_episode_is_drawn() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([rollout(0, 7, dones=[(1, 0)])])
        found = set(drawn(buffer.sample(50, sampler=Slices(5))))
    assert found == {tuple((0, t, 0) for t in range(2, 7))}


def test_slices_of_one_step_are_rows() -> None:
    starts = starts_drawn(rollout(0, 3, 2, dones=[(0, 0), (0, 1), (1, 1)]), length=1)
    assert starts == {(0, t, b) for t in range(3) for b in range(2)}


def test_same_seed_gives_the_same_slices() -> None:
    found = []
    for _ in range(2):
        with TrajectoryReplayBuffer(seed=3) as buffer:
            buffer.add_trajectories([many_episodes(i) for i in range(5)])
            found.append(drawn(buffer.sample(50, sampler=Slices(2))))
    assert found[0] == found[1]


def test_shapes_are_slices_times_steps() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout(0, 8, 2, dones=[], row_shape=(3,))])
        batch = buffer.sample(5, sampler=Slices(4))
    assert {name: leaf.shape for name, leaf in batch.items()} == {
        "ids": (5, 4, 3),
        "dones": (5, 4, 3),
    }


def test_1_000_slices_are_right_while_episodes_of_uneven_lengths_wrap_around() -> None:
    """Neither the window's size nor any length is a multiple of the slices'."""
    with TrajectoryReplayBuffer(seed=0, sample_window_size=7) as buffer:
        sampler = Slices(4)
        for i in range(50):
            buffer.add_trajectories([rollout(i, 9 + i % 3, 3, dones=[(t, t % 3) for t in (2, 4)])])
            legal = slices_in(episodes_of(buffer), 4)
            found = drawn(buffer.sample(20 if i < 49 else 1000, sampler=sampler))
            assert set(found) <= legal
    assert set(found) == legal


def test_length_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        Slices(0)


def test_window_without_a_long_enough_episode_is_empty() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout(0, 4, 2, dones=[(1, 0), (1, 1)])])
        with pytest.raises(
            EmptyBufferError,
            match=r"sample: expected episodes of 3 steps or more, got none\. "
            r"Use a smaller length, or pad=True\.",
        ):
            buffer.sample(1, sampler=Slices(3))


def test_sampler_that_found_no_long_enough_episode_draws_the_one_that_comes() -> None:
    with TrajectoryReplayBuffer() as buffer:
        sampler = Slices(3)
        buffer.add_trajectories([rollout(0, 2)])
        with pytest.raises(EmptyBufferError):
            buffer.sample(1, sampler=sampler)
        buffer.add_trajectories([rollout(1, 3)])
        assert drawn(buffer.sample(1, sampler=sampler)) == [((1, 0, 0), (1, 1, 0), (1, 2, 0))]


def test_nothing_is_drawn_any_more_when_the_long_episode_has_left() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        sampler = Slices(3)
        buffer.add_trajectories([rollout(0, 3), rollout(1, 2)])
        buffer.sample(1, sampler=sampler)
        buffer.add_trajectories([rollout(2, 2)])
        with pytest.raises(EmptyBufferError, match="episodes of 3 steps"):
            buffer.sample(1, sampler=sampler)


def test_empty_buffer_is_said_to_be_empty() -> None:
    with TrajectoryReplayBuffer() as buffer, pytest.raises(EmptyBufferError, match="expected rows"):
        buffer.sample(1, sampler=Slices(1))


# -- padding -------------------------------------------------------------------------------------


def test_short_episode_is_padded_with_its_last_step() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([rollout(0, 2, 2, dones=[(0, 1)])])
        batch = buffer.sample(60, sampler=Slices(3, pad=True))
        found = set(zip(drawn(batch), map(tuple, batch["mask"].tolist()), strict=True))
    assert found == {
        (((0, 0, 0), (0, 1, 0), (0, 1, 0)), (True, True, False)),
        (((0, 0, 1), (0, 0, 1), (0, 0, 1)), (True, False, False)),
        (((0, 1, 1), (0, 1, 1), (0, 1, 1)), (True, False, False)),
    }


def test_mask_of_whole_slices_is_true() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([rollout(0, 5)])
        batch = buffer.sample(40, sampler=Slices(3, pad=True))
    assert batch["mask"].dtype == torch.bool
    assert torch.equal(batch["mask"], torch.ones(40, 3, dtype=torch.bool))
    assert {rows[0] for rows in drawn(batch)} == {(0, 0, 0), (0, 1, 0), (0, 2, 0)}


def test_short_episode_is_drawn_as_often_as_one_start() -> None:
    fields = rollout(0, 8, 4, dones=[*((t, 0) for t in range(8)), (1, 1), (4, 2)])
    # Eight episodes of a step; of 2 and 6, of 5 and 3, and one of 8 steps, four at a time.
    with TrajectoryReplayBuffer(seed=5) as buffer:
        buffer.add_trajectories([fields])
        counts = Counter(rows[0] for rows in drawn(buffer.sample(30_000, sampler=Slices(4, True))))
    starts = [
        *((0, t, 0) for t in range(8)),
        *((0, t, 1) for t in (0, 2, 3, 4)),
        *((0, t, 2) for t in (0, 1, 5)),
        *((0, t, 3) for t in range(5)),
    ]
    assert chi_square(counts, dict.fromkeys(starts, 1 / 20)) < QUANTILES[19]


def test_mask_is_exact_for_episodes_of_all_lengths() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([many_episodes(i) for i in range(30)])
        length_of = {rows[0]: len(rows) for rows in episodes_of(buffer)}
        batch = buffer.sample(5000, sampler=Slices(6, pad=True))
    for rows, mask in zip(drawn(batch), batch["mask"].tolist(), strict=True):
        (i, t, b), steps = rows[0], sum(mask)
        if steps < 6:
            assert length_of[i, t, b] == steps
        assert rows == tuple((i, t + min(step, steps - 1), b) for step in range(6))
        assert mask == [step < steps for step in range(6)]


def test_no_mask_without_padding() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout(0, 5)])
        assert list(buffer.sample(2, sampler=Slices(3))) == ["ids"]


def test_column_named_mask_is_refused_with_padding() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout(0, 5) | {"mask": torch.zeros(5, 1)}])
        with pytest.raises(SchemaError, match="column 'mask'"):
            buffer.sample(2, sampler=Slices(3, pad=True))


# -- text, out, info -----------------------------------------------------------------------------


def texts_of(batch: Mapping[str, Any]) -> list[list[str]]:
    """What the text of a batch has to be."""
    return [[f"{i} {t} {b}" for i, t, b in rows] for rows in batch["ids"].tolist()]


def test_text_comes_as_lists_of_lists() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([many_episodes(i, has_text=True) for i in range(10)])
        batch = buffer.sample(30, sampler=Slices(3))
    assert batch["curr_obs"]["task"] == texts_of(batch)


def test_out_is_refilled_in_place() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([many_episodes(i) for i in range(10)])
        sampler = Slices(3)
        out = buffer.sample(30, sampler=sampler)
        pointers = {name: leaf.data_ptr() for name, leaf in out.items()}
        before = drawn(out)
        batch = buffer.sample(30, out=out, sampler=sampler)
        assert batch is out
        assert {name: leaf.data_ptr() for name, leaf in out.items()} == pointers
        assert set(drawn(out)) <= slices_in(episodes_of(buffer), 3)
        assert drawn(out) != before


def test_out_is_refilled_in_place_where_there_is_text() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([many_episodes(i, has_text=True) for i in range(10)])
        sampler = Slices(3)
        out = buffer.sample(30, sampler=sampler)
        pointer, text, before = out["ids"].data_ptr(), out["curr_obs"]["task"], drawn(out)
        buffer.sample(30, out=out, sampler=sampler)
        assert (out["ids"].data_ptr(), out["curr_obs"]["task"]) == (pointer, text)
        assert out["curr_obs"]["task"] is text
        assert text == texts_of(out)
        assert drawn(out) != before


def test_refilled_slices_are_those_of_new_batches() -> None:
    batches = []
    for is_refilled in (False, True):
        with TrajectoryReplayBuffer(seed=4) as buffer:
            buffer.add_trajectories([many_episodes(i, has_text=True) for i in range(10)])
            sampler = Slices(3, pad=True)
            batch = buffer.sample(30, sampler=sampler)
            batch = buffer.sample(30, out=batch if is_refilled else None, sampler=sampler)
            batches.append((drawn(batch), batch["mask"].tolist(), batch["curr_obs"]["task"]))
    assert batches[0] == batches[1]


def test_out_of_other_sizes_is_refused() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout(0, 9)])
        out = buffer.sample(12)
        with pytest.raises(SchemaError, match=r"column 'ids' of out: .* \(4, 3, 3\) .*\(12, 3\)"):
            buffer.sample(4, out=out, sampler=Slices(3))


def test_info_says_of_each_step_where_it_is_from() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([many_episodes(i) for i in range(20)])
        batch = buffer.sample(50, sampler=Slices(3), with_info=True)
    info = batch["info"]
    assert info["handle"].shape == (50, 3, 2)
    found = torch.stack([info["trajectory_id"], info["step"], info["env"]], -1)
    assert torch.equal(found, batch["ids"])


def test_handles_of_slices_name_rows_of_the_trajectory() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([rollout(0, 6, 4), rollout(1, 6, 4)])
        batch = buffer.sample(50, sampler=Slices(3), with_info=True)
    marks, rows = batch["info"]["handle"].unbind(-1)
    ids = batch["ids"]
    assert torch.equal(rows, ids[..., 1] * 4 + ids[..., 2])
    mark_of = {i: set(marks[ids[..., 0] == i].tolist()) for i in (0, 1)}
    assert len(mark_of[0]) == len(mark_of[1]) == 1
    assert mark_of[0] != mark_of[1]


def test_two_slices_of_one_episode_have_ids_of_their_own() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([rollout(0, 6)])
        batch = buffer.sample(50, sampler=Slices(5), with_info=True)
    found = {
        (tuple(handles[0]), rows[0])
        for handles, rows in zip(batch["info"]["handle"].tolist(), drawn(batch), strict=True)
    }
    assert len(found) == len({handle for handle, _ in found}) == 2


def test_rows_of_slices_are_counted_as_sampled() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([rollout(0, 6)])
        buffer.sample(5, sampler=Slices(4))
        assert buffer.get_stats()["sampled_rows"] == 20


# -- what the sampler knows while the window changes ---------------------------------------------


def random_rollout(i: int, kind: str, rng: np.random.Generator) -> dict[str, Any]:
    epochs = int(rng.integers(0, 3))
    num_steps = int(rng.integers(1, 7)) * max(1, epochs)
    num_envs = int(rng.integers(1, 4))
    share = rng.choice([0.0, 0.1, 0.5, 1.0])
    names = {"dones": ["dones"], "both": ["terminations", "truncations"]}.get(kind, [])
    flags: dict[str, Any] = {
        name: np.argwhere(rng.random((num_steps, num_envs)) < share).tolist() for name in names
    }
    return rollout(i, num_steps, num_envs, epochs=epochs, row_shape=(2,), **flags)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_size": 2}, {"enable_cache": False}, {"auto_save": False}],
    ids=["store", "small cache", "no cache", "memory"],
)
def test_episodes_are_those_of_the_window_whatever_happens_to_it(
    tmp_path: Path, without_fsync: None, seed: int, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    is_saved = options.get("auto_save", True)
    defaults = {"auto_save": True, "auto_save_path": tmp_path, "sample_window_size": 5}
    options = {**defaults, **options}
    buffer = TrajectoryReplayBuffer(**options)
    spy, sampler, kind, i = Spy(), Slices(2, pad=True), "dones", 0
    try:
        for _ in range(60):
            step = rng.choice(["add", "add some", "flush", "clear cache", "clear", "reopen"])
            if step == "add":
                buffer.add_trajectories([random_rollout(i, kind, rng)])
                i += 1
            elif step == "add some":
                buffer.add_trajectories([random_rollout(i + n, kind, rng) for n in range(7)])
                i += 7
            elif step == "flush":
                buffer.flush()
            elif step == "clear cache":
                buffer.clear_cache()
            elif step == "clear" and rng.random() < 0.3:
                buffer.clear()
                kind = str(rng.choice(["dones", "both", "none"]))
            elif step == "reopen" and is_saved:
                buffer.close()
                buffer = TrajectoryReplayBuffer(**options)
                spy, sampler = Spy(), Slices(2, pad=True)
            if rng.random() < 0.3 or not buffer.window_ids:
                continue
            check(buffer, spy)
            firsts = {rows[0] for rows in drawn(buffer.sample(20, sampler=sampler))}
            episodes = episodes_of(buffer)
            assert firsts <= {row for e in episodes for row in e[: max(1, len(e) - 1)]}
    finally:
        buffer.close()


def test_clear_and_other_flags_leave_nothing_of_the_episodes_before() -> None:
    with TrajectoryReplayBuffer() as buffer:
        sampler = Slices(2)
        buffer.add_trajectories([rollout(0, 6, dones=[(1, 0)]), rollout(1, 9, 2, dones=[])])
        buffer.sample(1, sampler=sampler)
        buffer.clear()
        buffer.add_trajectories([rollout(2, 4, terminations=[(0, 0)], truncations=[(2, 0)])])
        assert set(drawn(buffer.sample(50, sampler=sampler))) == {((2, 1, 0), (2, 2, 0))}


def test_clear_and_the_same_columns_leave_nothing_of_the_episodes_before() -> None:
    with TrajectoryReplayBuffer() as buffer:
        sampler = Slices(2)
        buffer.add_trajectories([rollout(0, 6, dones=[(1, 0)]), rollout(1, 9, 2, dones=[])])
        buffer.sample(1, sampler=sampler)
        buffer.clear()
        buffer.add_trajectories([rollout(2, 3, dones=[(0, 0)])])
        assert set(drawn(buffer.sample(50, sampler=sampler))) == {((2, 1, 0), (2, 2, 0))}


def test_loaded_checkpoint_takes_the_place_of_the_episodes_before(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        spy = Spy()
        buffer.add_trajectories([rollout(i, 4 + i, dones=[(i, 0)]) for i in range(3)])
        buffer.save_checkpoint(tmp_path)
        buffer.add_trajectories([rollout(i, 4 + i, dones=[(i, 0)]) for i in range(3, 6)])
        check(buffer, spy)
        buffer.load_checkpoint(tmp_path)
        check(buffer, spy)
        assert buffer.window_ids == [0, 1, 2]


def test_reader_of_several_stores_follows_while_trajectories_go_from_their_middle(
    tmp_path: Path, without_fsync: None
) -> None:
    """The first store has room for few files, the second keeps all: holes in the window."""
    rng = np.random.default_rng(0)

    def added(i: int) -> dict[str, Any]:
        fields = random_rollout(i, "both", rng)
        return fields | {"padding": torch.zeros(*fields["ids"].shape[:2], 9000)}

    limit: dict[str, Any] = {"sample_window_size": 2, "max_disk_bytes": 1_000_000}
    first = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a", **limit)
    second = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b")
    with first, second:
        first.add_trajectories([added(0)])
        second.add_trajectories([added(1)])
        first.flush()
        second.flush()
        with ReplayReader([tmp_path / "a", tmp_path / "b"]) as reader:
            spy, sampler, holes = Spy(), Slices(2, pad=True), 0
            for i in range(2, 40):
                buffer = second if rng.random() < 0.3 else first
                buffer.add_trajectories([added(i)])
                if i == 25:
                    first.clear()
                if rng.random() < 0.6:
                    first.flush()
                    second.flush()
                    before = reader.window_ids
                    reader.refresh()
                    gone = [key for key in before if key not in set(reader.window_ids)]
                    holes += bool(gone) and gone != before[: len(gone)]
                    check(reader, spy)
                    drawn(reader.sample(20, sampler=sampler))
            assert holes > 3


def test_episodes_of_many_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_module, "_BLOCK_ROWS", 20)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([many_episodes(i) for i in range(25)])
        check(buffer, Spy())


def test_episode_longer_than_can_be_counted_is_sliced_at_its_end() -> None:
    num_steps = MAX_LEFT + 10
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([{"ids": torch.arange(num_steps)[:, None]}])
        batch = buffer.sample(5, sampler=Slices(num_steps - 1))
        assert {rows[0] for rows in batch["ids"].tolist()} == {0, 1}
        assert {rows[-1] for rows in batch["ids"].tolist()} == {num_steps - 2, num_steps - 1}


def test_steps_left_of_a_long_episode_are_counted_up_to_the_most() -> None:
    with TrajectoryReplayBuffer() as buffer:
        spy = Spy()
        buffer.add_trajectories([{"ids": torch.zeros(MAX_LEFT + 10, 1)}])
        buffer.sample(1, sampler=spy)
    assert spy.left[:12] == [*[MAX_LEFT] * 11, MAX_LEFT - 1]


# -- caches and formats --------------------------------------------------------------------------


def batches_of(path: Path | None, **options: Any) -> list[Any]:
    """Several batches of slices, while trajectories are added."""
    if path is not None:
        options |= {"auto_save": True, "auto_save_path": path}
    with TrajectoryReplayBuffer(seed=6, sample_window_size=6, **options) as buffer:
        sampler, found = Slices(3, pad=True), []
        for i in range(12):
            buffer.add_trajectories([many_episodes(i, has_text=True)])
            buffer.flush()
            batch = buffer.sample(25, sampler=sampler)
            found.append((drawn(batch), batch["mask"].tolist(), batch["dones"].tolist()))
            assert batch["curr_obs"]["task"] == texts_of(batch)
        return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_size": 2},
        {"cache_size": 0},
        {"enable_cache": False},
        {"trajectory_format": "npy"},
        {"trajectory_format": "npy", "cache_size": 1},
        {"trajectory_format": "pt", "cache_size": 1},
        {"trajectory_format": "pt", "enable_cache": False},
    ],
    ids=str,
)
def test_slices_of_files_are_those_of_memory(
    tmp_path: Path, without_fsync: None, options: dict[str, Any]
) -> None:
    assert batches_of(tmp_path, **options) == batches_of(None)


@pytest.mark.parametrize("options", [{"cache_size": 0}, {"enable_cache": False}], ids=str)
def test_slices_of_files_without_flags_end_with_their_trajectories(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, **options) as buffer:
        buffer.add_trajectories([rollout(0, 3), rollout(1, 2)])
        buffer.flush()
        found = {rows[0] for rows in drawn(buffer.sample(100, sampler=Slices(2)))}
    assert found == {(0, 0, 0), (0, 1, 0), (1, 0, 0)}


# -- whose it is, children, threads --------------------------------------------------------------


def test_sampler_of_another_buffer_is_refused() -> None:
    with TrajectoryReplayBuffer() as buffer, TrajectoryReplayBuffer() as other:
        buffer.add_trajectories([rollout(0, 3)])
        other.add_trajectories([rollout(0, 3)])
        sampler = Slices(2)
        buffer.sample(1, sampler=sampler)
        with pytest.raises(ValueError, match="sampler: expected one of this buffer's own"):
            other.sample(1, sampler=sampler)


def slices_drawn(
    _: Parent, buffer: TrajectoryReplayBuffer, sampler: Sampler
) -> set[tuple[Row, ...]]:
    return set(drawn(buffer.sample(300, sampler=sampler)))


def test_forked_child_draws_the_slices_of_its_parent() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        sampler = Slices(3)
        buffer.add_trajectories([rollout(0, 6, 2, dones=[(2, 0)]), rollout(1, 4, dones=[])])
        buffer.sample(1, sampler=sampler)
        with Child(slices_drawn, buffer, sampler) as child:
            assert child.result() == slices_in(episodes_of(buffer), 3)


def test_sampler_that_is_locked_during_a_fork_draws_in_the_child() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        sampler = Slices(3)
        buffer.add_trajectories([rollout(0, 6, 2, dones=[(2, 0)])])
        buffer.sample(1, sampler=sampler)
        with sampler._lock, Child(slices_drawn, buffer, sampler) as child:
            found = child.result()
        assert found == slices_in(episodes_of(buffer), 3)


def test_threads_share_a_sampler_while_one_adds_and_evicts(tmp_path: Path) -> None:
    """The episodes of trajectory i follow from i alone, so that each row can be checked."""
    numbers = itertools.count()
    outs: dict[int, Any] = {}  # all threads but one refill theirs
    made = [many_episodes(i) for i in range(64)]
    ends_in = [set(map(tuple, ends_of(fields).nonzero().tolist())) for fields in made]
    length_of = [len(fields["ids"]) for fields in made]

    def look(thread: int) -> None:
        batch = buffer.sample(200, out=outs.get(thread), sampler=sampler)
        outs[thread] = batch if thread else None
        ids, mask = batch["ids"], batch["mask"]
        num_steps = mask.sum(1, keepdim=True)
        steps = torch.minimum(torch.arange(4), num_steps - 1)
        assert torch.equal(ids[..., 0], ids[:, :1, 0].expand(-1, 4))
        assert torch.equal(ids[..., 1], ids[:, :1, 1] + steps)
        assert torch.equal(ids[..., 2], ids[:, :1, 2].expand(-1, 4))
        assert torch.equal(mask, torch.arange(4) < num_steps)
        for (i, t, b), count in zip(ids[:, 0].tolist(), num_steps[:, 0].tolist(), strict=True):
            ends = ends_in[i % 64]
            assert not any((t + step, b) in ends for step in range(count - 1))
            if count < 4:  # it begins and ends as its episode does
                assert (t + count - 1, b) in ends
                assert t == 0 or (t - 1, b) in ends
            assert t + count <= length_of[i % 64]

    with TrajectoryReplayBuffer(
        seed=0, auto_save=True, auto_save_path=tmp_path, sample_window_size=6, cache_size=4
    ) as buffer:
        sampler = Slices(4, pad=True)

        def add() -> None:
            i = next(numbers)
            fields = dict(made[i % 64])
            fields["ids"] = fields["ids"] + torch.tensor([i - i % 64, 0, 0])
            buffer.add_trajectories([fields])

        add()
        look_while_adding(look, add)
    assert next(numbers) > 20
