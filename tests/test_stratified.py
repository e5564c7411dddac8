"""Stratified: exact numbers of rows of each kind in every batch."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import look_while_adding

from mmbuf import (
    EmptyBufferError,
    ReplayReader,
    SchemaError,
    Trajectory,
    TrajectoryReplayBuffer,
)
from mmbuf.entry import Entry
from mmbuf.sampling import Sampler, Stratified, stratified

QUANTILES = {8: 26.12}  # of chi-square by its freedom: 99.9 %


def rollout(
    i: int, num_steps: int = 4, num_envs: int = 1, kind: str = "", **columns: Any
) -> Trajectory:
    """Trajectory ``i`` of the weights ``kind``; ``columns`` by name are the same in all rows."""
    t, b = torch.meshgrid(torch.arange(num_steps), torch.arange(num_envs), indexing="ij")
    fields: dict[str, Any] = {"ids": torch.stack([torch.full_like(t, i), t, b], -1)}
    for name, value in columns.items():
        if isinstance(value, str):
            fields[name] = [[value] * num_envs for _ in range(num_steps)]
        else:
            value = torch.as_tensor(value)
            fields[name] = value.expand(num_steps, num_envs, *value.shape)
    return Trajectory.from_columns(fields, model_weights_id=kind)


def counts_of(
    buffer: TrajectoryReplayBuffer | ReplayReader,
    sampler: Sampler,
    kind_of: Mapping[int, Any],
    num_chunks: int = 10,
) -> dict[Any, int]:
    """Rows of a batch by the kinds of their trajectories."""
    batch = buffer.sample(num_chunks, sampler=sampler)
    assert len(batch["ids"]) == num_chunks
    return dict(Counter(kind_of[i] for i in batch["ids"][:, 0].tolist()))


def filled(*trajectories: Trajectory, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=0, **options)
    buffer.add_trajectories(trajectories)
    return buffer


A_AND_B = {0: "a", 1: "b", 2: "a"}


def a_and_b(**options: Any) -> TrajectoryReplayBuffer:
    """Two trajectories of the weights a, one of b."""
    return filled(*(rollout(i, 6, 2, kind) for i, kind in A_AND_B.items()), **options)


# -- quotas --------------------------------------------------------------------------------------


def test_every_batch_has_the_numbers_of_rows_that_were_asked_for() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 3, "b": 7})
        for _ in range(50):
            assert counts_of(buffer, sampler, A_AND_B) == {"a": 3, "b": 7}


def test_every_batch_has_the_shares_of_rows_that_were_asked_for() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 0.3, "b": 0.7})
        for _ in range(50):
            assert counts_of(buffer, sampler, A_AND_B) == {"a": 3, "b": 7}


@pytest.mark.parametrize(
    ("shares", "num_chunks", "expected"),
    [
        ((0.5, 0.3, 0.2), 10, (5, 3, 2)),
        ((0.5, 0.3, 0.2), 7, (4, 2, 1)),  # 3.5, 2.1, 1.4
        ((0.5, 0.3, 0.2), 1, (1, 0, 0)),
        ((1 / 3, 1 / 3, 1 / 3), 10, (4, 3, 3)),
        ((1 / 3, 1 / 3, 1 / 3), 11, (4, 4, 3)),
        ((0.1, 0.2, 0.7), 256, (26, 51, 179)),  # 25.6, 51.2, 179.2
        ((0.05, 0.05, 0.9), 9, (1, 0, 8)),  # 0.45, 0.45, 8.1
        ((0.0, 0.5, 0.5), 5, (0, 3, 2)),
    ],
    ids=str,
)
def test_shares_are_rounded_by_largest_remainder(
    shares: tuple[float, ...], num_chunks: int, expected: tuple[int, ...]
) -> None:
    kind_of = dict(enumerate("abc"))
    with filled(*(rollout(i, 300, 1, kind) for i, kind in kind_of.items())) as buffer:
        sampler = Stratified("model_weights_id", dict(zip("abc", shares, strict=True)))
        found = counts_of(buffer, sampler, kind_of, num_chunks)
    assert tuple(found.get(kind, 0) for kind in "abc") == expected


def test_values_without_a_quota_are_not_drawn() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"b": 1.0})
        assert counts_of(buffer, sampler, A_AND_B, 40) == {"b": 40}


def test_quota_of_0_draws_nothing() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 0, "b": 10})
        assert counts_of(buffer, sampler, A_AND_B) == {"b": 10}


def test_rows_of_a_stratum_are_drawn_uniformly() -> None:
    """Of trajectories of 2, 3 and 4 rows, with others between them."""
    sizes = {0: (2, 1), 2: (1, 3), 4: (2, 2)}
    with filled(
        *(rollout(i, *sizes.get(i, (7, 1)), kind="a" if i in sizes else "b") for i in range(6))
    ) as buffer:
        ids = buffer.sample(20_000, sampler=Stratified("model_weights_id", {"a": 0.9, "b": 0.1}))
    rows = [(i, t, b) for i, (T, B) in sizes.items() for t in range(T) for b in range(B)]
    counts = Counter(tuple(row) for row in ids["ids"].tolist() if row[0] in sizes)
    assert set(counts) == set(rows)
    assert sum((counts[row] - 2000) ** 2 / 2000 for row in rows) < QUANTILES[8]


def test_rows_of_a_batch_are_in_no_order() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 0.5, "b": 0.5})
        firsts = Counter(
            A_AND_B[int(buffer.sample(10, sampler=sampler)["ids"][0, 0])] for _ in range(200)
        )
    assert min(firsts["a"], firsts["b"]) > 70


# -- what strata there are -----------------------------------------------------------------------


def test_strata_may_be_those_of_an_attribute() -> None:
    trajectories = [rollout(i) for i in range(3)]
    for trajectory, length in zip(trajectories, (100, 200, 100), strict=True):
        trajectory.max_episode_length = length
    with filled(*trajectories) as buffer:
        sampler = Stratified("max_episode_length", {100: 2, 200: 8})
        assert counts_of(buffer, sampler, {0: 100, 1: 200, 2: 100}) == {100: 2, 200: 8}


def test_strata_may_be_single_trajectories() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("trajectory_id", {0: 1, 2: 9})
        assert counts_of(buffer, sampler, {0: 0, 2: 2}) == {0: 1, 2: 9}


def test_strata_may_be_those_of_a_text_column() -> None:
    with filled(
        rollout(0, task="lift"), rollout(1, task="push"), rollout(2, task="lift")
    ) as buffer:
        sampler = Stratified("task", {"lift": 4, "push": 6})
        kind_of = {0: "lift", 1: "push", 2: "lift"}
        assert counts_of(buffer, sampler, kind_of) == {"lift": 4, "push": 6}


def test_strata_may_be_those_of_a_column_inside_others() -> None:
    trajectories = []
    for i, task in enumerate(("lift", "push")):
        trajectories.append(rollout(i))
        trajectories[i].curr_obs = {"text": {"task": [[task]] * 4}}
    with filled(*trajectories) as buffer:
        sampler = Stratified("curr_obs.text.task", {"lift": 4, "push": 6})
        assert counts_of(buffer, sampler, {0: "lift", 1: "push"}) == {"lift": 4, "push": 6}


def test_text_of_the_first_row_decides() -> None:
    changing = rollout(0)
    changing.extra["task"] = [["lift"], ["push"], ["push"], ["push"]]
    with filled(changing, rollout(1, task="push")) as buffer:
        sampler = Stratified("task", {"lift": 4, "push": 6})
        assert counts_of(buffer, sampler, {0: "lift", 1: "push"}) == {"lift": 4, "push": 6}


def test_trajectories_are_of_a_flag_where_any_row_is_set() -> None:
    flags = torch.zeros(4, 3, 2, dtype=torch.bool)
    flags[2, 1, 1] = True
    trajectories = [rollout(i, 4, 3, success=[False, False]) for i in range(3)]
    trajectories[1].extra["success"] = flags
    with filled(*trajectories) as buffer:
        sampler = Stratified("success", {True: 7, False: 3})
        kind_of = {0: False, 1: True, 2: False}
        assert counts_of(buffer, sampler, kind_of) == {True: 7, False: 3}


def test_leading_steps_of_flags_set_nothing() -> None:
    flags = torch.tensor([[True], [False], [False], [False], [True]])
    trajectories = [rollout(i) for i in range(2)]
    trajectories[0].dones = flags & torch.tensor([[True]] * 4 + [[False]])
    trajectories[1].dones = flags
    with filled(*trajectories) as buffer:
        sampler = Stratified("dones", {True: 7, False: 3})
        assert counts_of(buffer, sampler, {0: False, 1: True}) == {True: 7, False: 3}


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float64", "bfloat16"])
def test_strata_may_be_those_of_a_column_of_numbers(dtype: str) -> None:
    numbers = [torch.tensor([value, 9], dtype=getattr(torch, dtype)) for value in (3, 4, 3)]
    with filled(*(rollout(i, level=numbers[i]) for i in range(3))) as buffer:
        sampler = Stratified("level", {3: 2, 4: 8})
        assert counts_of(buffer, sampler, {0: 3, 1: 4, 2: 3}) == {3: 2, 4: 8}


def test_strata_may_be_those_of_a_function() -> None:
    def is_long(entry: Entry) -> bool:
        return entry.num_steps > 5

    with filled(rollout(0, 4), rollout(1, 9), rollout(2, 5)) as buffer:
        sampler = Stratified(is_long, {True: 2, False: 8})
        assert counts_of(buffer, sampler, {0: False, 1: True, 2: False}) == {True: 2, False: 8}


def test_function_is_asked_once_for_each_trajectory() -> None:
    asked: list[int] = []

    def note(entry: Entry) -> str:
        asked.append(entry.trajectory_id)
        return "all"

    with filled(rollout(0)) as buffer:
        sampler = Stratified(note, {"all": 1.0})
        for i in range(1, 4):
            buffer.add_trajectories([rollout(i)])
            buffer.sample(2, sampler=sampler)
            buffer.sample(2, sampler=sampler)
    assert asked == [0, 1, 2, 3]


def test_flags_of_many_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stratified, "_BLOCK_ROWS", 10)
    kind_of = {i: i % 3 == 0 for i in range(30)}
    with filled(*(rollout(i, 1 + i % 5, 2, success=kind_of[i]) for i in range(30))) as buffer:
        sampler = Stratified("success", {True: 2000, False: 1000})
        assert counts_of(buffer, sampler, kind_of, 3000) == {True: 2000, False: 1000}
        batch = buffer.sample(3000, sampler=sampler)
    assert set(batch["ids"][:, 0].tolist()) == set(range(30))


# -- small and empty strata ----------------------------------------------------------------------


def test_empty_stratum_gives_its_part_to_the_others() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 0.2, "none": 0.5, "b": 0.3})
        assert counts_of(buffer, sampler, A_AND_B) == {"a": 4, "b": 6}


def test_empty_stratum_of_a_number_gives_its_part_to_the_others() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 2, "none": 5, "b": 3})
        assert counts_of(buffer, sampler, A_AND_B) == {"a": 4, "b": 6}


def test_stratum_that_is_empty_no_more_has_its_part_again() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 2, "c": 8})
        assert counts_of(buffer, sampler, A_AND_B) == {"a": 10}
        buffer.add_trajectories([rollout(3, kind="c")])
        assert counts_of(buffer, sampler, A_AND_B | {3: "c"}) == {"a": 2, "c": 8}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_empty_stratum_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with a_and_b() as buffer, caplog.at_level(logging.WARNING, "mmbuf"):
        sampler = Stratified("model_weights_id", {"a": 0.2, "none": 0.5, "b": 0.3})
        for _ in range(3):
            buffer.sample(10, sampler=sampler)
    assert warnings_of(caplog) == ["Stratified: no trajectory of 'none' is in the window."]


def test_stratum_that_was_small_before_it_was_empty_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        filled(rollout(0, 2, kind="b"), rollout(1, 9, kind="a"), sample_window_size=2) as buffer,
        caplog.at_level(logging.WARNING, "mmbuf"),
    ):
        sampler = Stratified("model_weights_id", {"a": 6, "b": 4})
        buffer.sample(10, sampler=sampler)
        assert warnings_of(caplog) == []
        buffer.add_trajectories([rollout(2, 9, kind="a")])
        buffer.sample(10, sampler=sampler)
        buffer.sample(10, sampler=sampler)
    assert warnings_of(caplog) == ["Stratified: no trajectory of 'b' is in the window."]


def test_empty_stratum_is_counted() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 0.2, "none": 0.5, "b": 0.3})
        for _ in range(3):
            buffer.sample(10, sampler=sampler)
        assert buffer.get_stats()["small_strata"] == {"a": 0, "none": 3, "b": 0}


def test_stratum_with_fewer_rows_than_its_quota_is_counted() -> None:
    with filled(rollout(0, 2, kind="a"), rollout(1, 9, kind="b")) as buffer:
        sampler = Stratified("model_weights_id", {"a": 3, "b": 7})
        for _ in range(4):
            assert counts_of(buffer, sampler, {0: "a", 1: "b"}) == {"a": 3, "b": 7}
        assert buffer.get_stats()["small_strata"] == {"a": 4, "b": 0}


def test_stratum_with_as_many_rows_as_its_quota_is_not_counted() -> None:
    with filled(rollout(0, 3, kind="a"), rollout(1, 7, kind="b")) as buffer:
        sampler = Stratified("model_weights_id", {"a": 3, "b": 7})
        buffer.sample(10, sampler=sampler)
        assert buffer.get_stats()["small_strata"] == {"a": 0, "b": 0}


def test_window_without_any_of_the_strata_is_empty() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"x": 0.5, "y": 0.5})
        with pytest.raises(
            EmptyBufferError,
            match=r"sample: expected trajectories of \['x', 'y'\], got none in the window\.",
        ):
            buffer.sample(10, sampler=sampler)


# -- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quotas",
    [{}, {"a": -1, "b": 11}, {"a": float("nan"), "b": 1.0}, {"a": float("inf")}],
    ids=["none", "below 0", "NaN", "infinite"],
)
def test_quotas_that_are_no_shares_or_numbers_are_refused(quotas: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="quotas: expected shares or numbers of rows, got"):
        Stratified("task", quotas)


@pytest.mark.parametrize("quotas", [{"a": 0.5, "b": 0.4}, {"a": 2, "b": 3.5}, {"a": 0.0}], ids=str)
def test_shares_that_do_not_sum_to_1_are_refused(quotas: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="quotas: expected shares that sum to 1, or ints, got "):
        Stratified("task", quotas)


def test_numbers_that_do_not_sum_to_the_batch_are_refused() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 3, "b": 7})
        with pytest.raises(
            ValueError, match="num_chunks: expected 10, the sum of the quotas, got 11"
        ):
            buffer.sample(11, sampler=sampler)


def test_column_that_there_is_not_is_refused() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("tusk", {"a": 1.0})
        with pytest.raises(
            SchemaError,
            match=r"by: expected one of model_weights_id, .* or the name of a column, got 'tusk'",
        ):
            buffer.sample(11, sampler=sampler)


def test_error_of_the_function_is_passed_on_and_the_next_batch_is_right() -> None:
    fails = True

    def kind_of(entry: Entry) -> str:
        if fails and entry.trajectory_id == 2:
            raise LookupError("no such kind")
        return entry.model_weights_id

    with a_and_b() as buffer:
        sampler = Stratified(kind_of, {"a": 3, "b": 7})
        with pytest.raises(LookupError, match="no such kind"):
            buffer.sample(10, sampler=sampler)
        fails = False
        assert counts_of(buffer, sampler, A_AND_B) == {"a": 3, "b": 7}


def test_sampler_of_another_buffer_is_refused() -> None:
    with a_and_b() as buffer, a_and_b() as other:
        sampler = Stratified("model_weights_id", {"a": 3, "b": 7})
        buffer.sample(10, sampler=sampler)
        with pytest.raises(ValueError, match="sampler: expected one of this buffer's own"):
            other.sample(10, sampler=sampler)


# -- while the window changes --------------------------------------------------------------------

WAYS: dict[str, Any] = {
    "weights": "model_weights_id",
    "text": "task",
    "flag": "success",
    "function": lambda entry: entry.model_weights_id,
}


def random_rollout(i: int, rng: np.random.Generator) -> Trajectory:
    """Of a kind that follows from ``i``."""
    kind = "abc"[(i // 3 + i) % 3]
    sizes = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    return rollout(i, *sizes, kind, task=kind, success=kind == "a")


def kinds_in(store: TrajectoryReplayBuffer | ReplayReader) -> dict[int, str]:
    """The weights of each trajectory of the window, by its number."""
    trajectories = [store.get_trajectory(key) for key in store.window_ids]
    return {int(found.extra["ids"][0, 0, 0]): found.model_weights_id for found in trajectories}


def check(
    store: TrajectoryReplayBuffer | ReplayReader,
    sampler: Sampler,
    way: str,
    ids_of: Mapping[int, str],
) -> None:
    """Quotas of three, two and one of six among what is in the window; rows of all of it."""
    numbers, counts = store.sample(6000, sampler=sampler)["ids"][:, 0].unique(return_counts=True)
    found: Counter[str] = Counter()
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        found[ids_of[number]] += count
    if way == "flag":
        parts = {"a": 5, "bc": 1}
        found = Counter({"a": found["a"], "bc": found["b"] + found["c"]})
        there = {"a" if kind == "a" else "bc" for kind in ids_of.values()}
    else:
        parts, there = {"a": 3, "b": 2, "c": 1}, set(ids_of.values())
    total = sum(parts[kind] for kind in there)
    assert {kind: found[kind] for kind in there} == {
        kind: 6000 * parts[kind] // total for kind in there
    }
    assert set(numbers.tolist()) == set(ids_of)


def stratified_by(way: str) -> Stratified:
    shares = {True: 5 / 6, False: 1 / 6} if way == "flag" else {"a": 1 / 2, "b": 1 / 3, "c": 1 / 6}
    return Stratified(WAYS[way], shares)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"cache_size": 2}, {"auto_save": False}], ids=str)
def test_quotas_are_exact_whatever_happens_to_the_window(
    tmp_path: Path, without_fsync: None, way: str, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    is_saved = options.get("auto_save", True)
    defaults = {"auto_save": True, "auto_save_path": tmp_path, "sample_window_size": 6}
    options = {**defaults, **options}
    buffer = TrajectoryReplayBuffer(**options)
    sampler, i = stratified_by(way), 0
    try:
        for _ in range(40):
            step = rng.choice(["add", "add", "add some", "flush", "clear", "reopen"])
            if step.startswith("add"):
                for _ in range(1 if step == "add" else 8):
                    buffer.add_trajectories([random_rollout(i, rng)])
                    i += 1
            elif step == "flush":
                buffer.flush()
                buffer.clear_cache()
            elif step == "clear" and rng.random() < 0.4:
                buffer.clear()
            elif step == "reopen" and is_saved:
                buffer.close()
                buffer = TrajectoryReplayBuffer(**options)
                sampler = stratified_by(way)
            if buffer.window_ids and rng.random() < 0.7:
                check(buffer, sampler, way, kinds_in(buffer))
    finally:
        buffer.close()


def test_reader_of_several_stores_follows_while_trajectories_go_from_their_middle(
    tmp_path: Path, without_fsync: None
) -> None:
    rng = np.random.default_rng(0)

    def added(i: int) -> Trajectory:
        trajectory = random_rollout(i, rng)
        num_steps, num_envs = trajectory.extra["ids"].shape[:2]
        trajectory.extra["padding"] = torch.zeros(num_steps, num_envs, 9000)
        return trajectory

    limit: dict[str, Any] = {"sample_window_size": 2, "max_disk_bytes": 1_500_000}
    first = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a", **limit)
    second = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b")
    with first, second:
        for buffer, i in ((first, 0), (second, 1)):
            buffer.add_trajectories([added(i)])
            buffer.flush()
        with ReplayReader([tmp_path / "a", tmp_path / "b"]) as reader:
            samplers = {way: stratified_by(way) for way in ("weights", "text", "flag")}
            holes = 0
            for i in range(2, 40):
                buffer = second if rng.random() < 0.2 else first
                buffer.add_trajectories([added(i)])
                if rng.random() < 0.6:
                    first.flush()
                    second.flush()
                    before = reader.window_ids
                    reader.refresh()
                    gone = [key for key in before if key not in set(reader.window_ids)]
                    holes += bool(gone) and gone != before[: len(gone)]
                    kinds = kinds_in(reader)
                    for way, sampler in samplers.items():
                        check(reader, sampler, way, kinds)
            assert holes > 3


# -- children and threads ------------------------------------------------------------------------


def kinds_drawn(_: Parent, buffer: TrajectoryReplayBuffer, sampler: Sampler) -> dict[Any, int]:
    return counts_of(buffer, sampler, A_AND_B)


def test_forked_child_draws_the_quotas_though_the_sampler_was_locked() -> None:
    with a_and_b() as buffer:
        sampler = Stratified("model_weights_id", {"a": 3, "b": 7})
        buffer.sample(10, sampler=sampler)
        with sampler._lock, Child(kinds_drawn, buffer, sampler) as child:
            assert child.result() == {"a": 3, "b": 7}


def test_threads_share_a_sampler_while_one_adds_and_evicts(tmp_path: Path) -> None:
    """Of the last six trajectories every third is of a kind: there are always all three."""
    numbers = itertools.count()

    def look(thread: int) -> None:
        ids = buffer.sample(60, sampler=sampler)["ids"]
        assert Counter((ids[:, 0] % 3).tolist()) == {0: 30, 1: 20, 2: 10}
        assert int(ids[:, 0].max() - ids[:, 0].min()) < 6

    with TrajectoryReplayBuffer(
        seed=0, auto_save=True, auto_save_path=tmp_path, sample_window_size=6, cache_size=4
    ) as buffer:
        sampler = Stratified("task", {"0": 30, "1": 20, "2": 10})

        def add() -> None:
            i = next(numbers)
            buffer.add_trajectories([rollout(i, 1 + i % 5, 2, task=str(i % 3))])

        for _ in range(3):
            add()
        look_while_adding(look, add)
    assert next(numbers) > 20
