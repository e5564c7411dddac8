"""Recent and FreshVersions: how often rows of each age are drawn, and which are not at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import look_while_adding

from mmbuf import EmptyBufferError, ReplayReader, SchemaError, TrajectoryReplayBuffer
from mmbuf.sampling import FreshVersions, Recent, Sampler, recency

QUANTILES = {1: 10.83, 9: 27.88, 19: 43.82, 29: 58.3}  # of chi-square by its freedom: 99.9 %


def numbered(first: int, num_steps: int, num_envs: int = 1) -> dict[str, torch.Tensor]:
    """Rows with the numbers ``first``, ``first + 1``, ..."""
    return {"number": torch.arange(first, first + num_steps * num_envs).reshape(num_steps, -1)}


def ages_drawn(
    half_life: float, num_rows: int, count: int, *, window: int = 0, num_before: int = 0
) -> Counter[int]:
    """Ages of rows drawn from ``num_rows`` in trajectories of uneven sizes, after others left."""
    with TrajectoryReplayBuffer(seed=0, sample_window_size=window) as buffer:
        sizes = [(num_before, 1)] if num_before else []
        sizes += [(1, 1), (3, 2), (num_rows - 7, 1)]
        first = 0
        for num_steps, num_envs in sizes:
            buffer.add_trajectories([numbered(first, num_steps, num_envs)])
            first += num_steps * num_envs
        numbers = buffer.sample(count, sampler=Recent(half_life))["number"]
    return Counter((first - 1 - numbers).tolist())


def chi_square(counts: Counter[int], shares: list[float]) -> float:
    """Pearson's statistic of counts of 0, 1, ... that are expected in these shares of 1."""
    assert set(counts) <= set(range(len(shares)))
    total = sum(counts.values())
    return sum((counts[i] - total * share) ** 2 / (total * share) for i, share in enumerate(shares))


def geometric(half_life: float, num_rows: int) -> list[float]:
    weights = 0.5 ** (np.arange(num_rows) / half_life)
    return [float(share) for share in weights / weights.sum()]


# -- Recent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_life", [3.0, 10.0, 0.5])
def test_weight_of_a_row_halves_every_half_life(half_life: float) -> None:
    counts = ages_drawn(half_life, 20, 40_000)
    shares = geometric(half_life, 20)
    # Those that hardly ever come count as one.
    common = [share for share in shares if share * 40_000 > 5]
    rest = sum(shares[len(common) :])
    merged = Counter({min(age, len(common)): 0 for age in counts})
    for age, count in counts.items():
        merged[min(age, len(common))] += count
    statistic = chi_square(merged, [*common, rest] if rest else common)
    assert statistic < QUANTILES[19]


def test_age_counts_rows_from_the_newest_after_others_have_left() -> None:
    counts = ages_drawn(5.0, 30, 30_000, window=3, num_before=50)
    assert chi_square(counts, geometric(5.0, 30)) < QUANTILES[29]


def test_very_large_half_life_is_uniform() -> None:
    for half_life in (1e9, 1e300):
        assert chi_square(ages_drawn(half_life, 20, 20_000), [1 / 20] * 20) < QUANTILES[19]


def test_tiny_half_life_draws_the_newest_row_only() -> None:
    for half_life in (0.01, 1e-300):
        assert set(ages_drawn(half_life, 20, 1000)) == {0}


def test_oldest_row_is_drawn_too() -> None:
    assert max(ages_drawn(10.0, 20, 1000)) == 19


def test_single_row_is_drawn_always() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([numbered(4, 1)])
        assert buffer.sample(100, sampler=Recent(3.0))["number"].tolist() == [4] * 100


def test_same_seed_draws_the_same_recent_rows() -> None:
    assert ages_drawn(5.0, 20, 100) == ages_drawn(5.0, 20, 100)


@pytest.mark.parametrize("half_life", [0, -1.0, float("nan")])
def test_half_life_that_is_not_above_0_is_refused(half_life: float) -> None:
    with pytest.raises(
        ValueError, match=r"half_life: expected a finite number of rows above 0, got "
    ):
        Recent(half_life)


def test_infinite_half_life_is_refused() -> None:
    """Its ages were no numbers."""
    with pytest.raises(ValueError, match=r"half_life: expected a finite number of .*, got inf"):
        Recent(float("inf"))


def test_recent_rows_of_an_empty_buffer_are_none() -> None:
    with TrajectoryReplayBuffer() as buffer, pytest.raises(EmptyBufferError):
        buffer.sample(1, sampler=Recent(3.0))


# -- FreshVersions -------------------------------------------------------------------------------


def versioned(i: int, versions: Any) -> dict[str, torch.Tensor]:
    """Trajectory ``i`` with ``versions`` ``[T, ...]`` of one environment, or ``[T, B, ...]``."""
    versions = torch.as_tensor(versions)
    if versions.ndim == 1:
        versions = versions[:, None]
    t, b = torch.meshgrid(*map(torch.arange, versions.shape[:2]), indexing="ij")
    return {"versions": versions, "ids": torch.stack([torch.full_like(t, i), t, b], -1)}


def drawn(
    *trajectories: Mapping[str, Any], max_lag: float, count: int = 300
) -> tuple[set[tuple[int, ...]], dict[float, int]]:
    """The rows (i, t, b) that are drawn, and how many are left out, by version."""
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(trajectories)
        sampler = FreshVersions(max_lag)
        ids = buffer.sample(count, sampler=sampler)["ids"]
        return set(map(tuple, ids.tolist())), buffer.get_stats()["excluded_versions"]


def test_versions_that_lag_more_than_max_lag_are_not_drawn() -> None:
    with TrajectoryReplayBuffer(seed=0, sample_window_size=0) as buffer:
        buffer.add_trajectories([versioned(i, [i] * 5) for i in range(10)])
        sampler = FreshVersions(3)
        assert set(buffer.sample(300, sampler=sampler)["versions"].flatten().tolist()) == {
            *range(6, 10)
        }
        assert buffer.get_stats()["excluded_versions"] == dict.fromkeys(range(6), 5)


def test_max_lag_of_0_draws_the_newest_version_only() -> None:
    rows, excluded = drawn(*(versioned(i, [i] * 2) for i in range(4)), max_lag=0)
    assert rows == {(3, 0, 0), (3, 1, 0)}
    assert excluded == {0: 2, 1: 2, 2: 2}


def test_large_max_lag_draws_all_rows() -> None:
    rows, excluded = drawn(*(versioned(i, [i] * 2) for i in range(4)), max_lag=3)
    assert len(rows) == 8
    assert excluded == {}


def test_fresh_rows_are_drawn_uniformly() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories(
            [
                versioned(0, [5] * 3),
                versioned(1, [0, 5, 0, 4]),
                versioned(2, [1] * 9),
                versioned(3, [[4, 0], [4, 5]]),
                versioned(4, [3]),
                versioned(5, [4, 4]),
            ]
        )
        ids = buffer.sample(20_000, sampler=FreshVersions(1))["ids"].tolist()
    fresh = [
        *((0, t, 0) for t in range(3)),
        (1, 1, 0),
        (1, 3, 0),
        *((3, 0, 0), (3, 1, 0), (3, 1, 1)),
        *((5, 0, 0), (5, 1, 0)),
    ]
    counts = Counter(fresh.index(tuple(row)) for row in ids)
    assert chi_square(counts, [1 / 10] * 10) < QUANTILES[9]


def test_versions_may_change_inside_a_trajectory() -> None:
    rows, excluded = drawn(versioned(0, [3, 3, 9, 9, 2, 9]), max_lag=2)
    assert rows == {(0, 2, 0), (0, 3, 0), (0, 5, 0)}
    assert excluded == {3: 2, 2: 1}


def test_versions_may_differ_between_environments() -> None:
    rows, excluded = drawn(versioned(0, [[9, 3], [8, 3], [7, 9]]), max_lag=1)
    assert rows == {(0, 0, 0), (0, 1, 0), (0, 2, 1)}
    assert excluded == {3: 2, 7: 1}


def test_row_of_several_versions_counts_by_its_oldest() -> None:
    rows, excluded = drawn(versioned(0, [[[9, 9]], [[9, 5]], [[8, 9]], [[7, 8]]]), max_lag=1)
    assert rows == {(0, 0, 0), (0, 2, 0)}
    assert excluded == {5: 1, 7: 1}


def test_rows_whose_version_is_nan_are_never_fresh() -> None:
    nan = float("nan")
    rows, excluded = drawn(versioned(0, [nan, 1.0, nan, 2.0, nan]), max_lag=10)
    assert rows == {(0, 1, 0), (0, 3, 0)}
    assert [(np.isnan(version), count) for version, count in excluded.items()] == [(True, 3)]


def test_row_with_one_version_that_is_nan_is_never_fresh() -> None:
    rows, _ = drawn(versioned(0, [[[1.0, float("nan")]], [[1.0, 1.0]]]), max_lag=10)
    assert rows == {(0, 1, 0)}


def test_window_of_nan_only_is_empty() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([versioned(0, [float("nan")] * 3)])
        with pytest.raises(EmptyBufferError, match="expected versions that are numbers, got NaN"):
            buffer.sample(1, sampler=FreshVersions(1))


@pytest.mark.parametrize("dtype", ["int16", "int64", "uint8", "float16", "float32", "float64"])
def test_versions_may_be_of_any_dtype_of_numbers(dtype: str) -> None:
    versions = np.array([0, 9, 8, 9], dtype)[:, None]
    rows, excluded = drawn(versioned(0, versions), max_lag=0)
    assert rows == {(0, 1, 0), (0, 3, 0)}
    assert excluded == {0: 1, 8: 1}


def test_max_lag_need_not_be_whole() -> None:
    rows, _ = drawn(versioned(0, [1.0, 2.25, 2.75, 3.0]), max_lag=0.5)
    assert rows == {(0, 2, 0), (0, 3, 0)}


def test_no_versions_are_refused() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([numbered(0, 3)])
        with pytest.raises(
            SchemaError, match="column 'versions': expected one for FreshVersions, got none"
        ):
            buffer.sample(1, sampler=FreshVersions(1))


def test_versions_that_are_text_are_refused() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"versions": [["a"], ["b"]]}])
        with pytest.raises(SchemaError, match=r"column 'versions': expected a dtype .* got text"):
            buffer.sample(1, sampler=FreshVersions(1))


def test_sampler_that_was_refused_draws_when_there_are_versions() -> None:
    with TrajectoryReplayBuffer() as buffer:
        sampler = FreshVersions(0)
        buffer.add_trajectories([numbered(0, 3)])
        with pytest.raises(SchemaError):
            buffer.sample(1, sampler=sampler)
        buffer.clear()
        buffer.add_trajectories([versioned(1, [4, 5])])
        assert buffer.sample(1, sampler=sampler)["ids"].tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("max_lag", [-1, float("nan")])
def test_max_lag_below_0_is_refused(max_lag: float) -> None:
    with pytest.raises(ValueError, match="max_lag: expected at least 0, got"):
        FreshVersions(max_lag)


# -- FreshVersions while the window changes ------------------------------------------------------


def check(store: TrajectoryReplayBuffer | ReplayReader, sampler: Sampler, max_lag: float) -> None:
    """Rows and counts against the whole trajectories of the window."""
    columns = [store.get_trajectory(key).to_columns() for key in store.window_ids]
    versions = torch.cat([c["versions"].flatten(0, 1).flatten(1).amin(1) for c in columns])
    ids = [tuple(row) for c in columns for row in c["ids"].flatten(0, 1).tolist()]
    is_fresh = (versions >= versions.max() - max_lag).tolist()
    fresh = {row for row, keep in zip(ids, is_fresh, strict=True) if keep}
    found = store.sample(20 * len(fresh), sampler=sampler)["ids"].tolist()
    assert {tuple(row) for row in found} <= fresh
    assert len({tuple(row) for row in found}) > 0.9 * len(fresh)
    stale = [v for v, keep in zip(versions.tolist(), is_fresh, strict=True) if not keep]
    assert store.get_stats()["excluded_versions"] == dict(Counter(stale))


def random_versions(i: int, rng: np.random.Generator, row_shape: tuple[int, ...]) -> Any:
    shape = (int(rng.integers(1, 7)), int(rng.integers(1, 4)), *row_shape)
    versions = i + rng.integers(-3, 3, shape) * (rng.random(shape) < 0.4)
    return versioned(i, versions.astype(np.int32))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{"cache_size": 2}, {"auto_save": False}], ids=str)
def test_fresh_rows_are_right_whatever_happens_to_the_window(
    tmp_path: Path, without_fsync: None, seed: int, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    is_saved = options.get("auto_save", True)
    defaults = {"auto_save": True, "auto_save_path": tmp_path, "sample_window_size": 5}
    options = {**defaults, **options}
    buffer = TrajectoryReplayBuffer(**options)
    sampler, i = FreshVersions(2), 0
    row_shape: tuple[int, ...] = (2,)
    try:
        for _ in range(50):
            step = rng.choice(["add", "add", "add some", "flush", "clear", "reopen"])
            if step.startswith("add"):
                for _ in range(1 if step == "add" else 7):
                    buffer.add_trajectories([random_versions(i, rng, row_shape)])
                    i += 1
            elif step == "flush":
                buffer.flush()
                buffer.clear_cache()
            elif step == "clear" and rng.random() < 0.4:
                buffer.clear()
                row_shape = (2,) if rng.random() < 0.5 else (1, 1)
            elif step == "reopen" and is_saved:
                buffer.close()
                buffer = TrajectoryReplayBuffer(**options)
                sampler = FreshVersions(2)
            if buffer.window_ids and rng.random() < 0.7:
                check(buffer, sampler, 2)
    finally:
        buffer.close()


def test_reader_of_several_stores_follows_while_trajectories_go_from_their_middle(
    tmp_path: Path, without_fsync: None
) -> None:
    rng = np.random.default_rng(0)

    def added(i: int) -> dict[str, Any]:
        fields: dict[str, Any] = random_versions(i, rng, (1,))
        return fields | {"padding": torch.zeros(*fields["ids"].shape[:2], 9000)}

    limit: dict[str, Any] = {"sample_window_size": 2, "max_disk_bytes": 1_500_000}
    first = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a", **limit)
    second = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "b")
    with first, second:
        for buffer, i in ((first, 0), (second, 1)):
            buffer.add_trajectories([added(i)])
            buffer.flush()
        with ReplayReader([tmp_path / "a", tmp_path / "b"]) as reader:
            sampler, holes = FreshVersions(6), 0
            for i in range(2, 40):
                buffer = second if rng.random() < 0.3 else first
                buffer.add_trajectories([added(i)])
                if rng.random() < 0.6:
                    first.flush()
                    second.flush()
                    before = reader.window_ids
                    reader.refresh()
                    gone = [key for key in before if key not in set(reader.window_ids)]
                    holes += bool(gone) and gone != before[: len(gone)]
                    check(reader, sampler, 6)
            assert holes > 3


def test_versions_of_many_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recency, "_BLOCK_ROWS", 20)
    rng = np.random.default_rng(0)
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([random_versions(i, rng, (2,)) for i in range(30)])
        check(buffer, FreshVersions(12), 12)


def test_counts_of_left_out_rows_follow_the_window() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        sampler = FreshVersions(0)
        found = []
        for version in (1, 2, 3, 3):
            buffer.add_trajectories([versioned(version, [version] * 2)])
            buffer.sample(1, sampler=sampler)
            found.append(buffer.get_stats()["excluded_versions"])
    assert found == [{}, {1: 2}, {2: 2}, {}]


# -- whose they are, children, threads -----------------------------------------------------------


@pytest.mark.parametrize("sampler", [Recent(3.0), FreshVersions(1)], ids=["Recent", "Fresh"])
def test_sampler_of_another_buffer_is_refused(sampler: Sampler) -> None:
    with TrajectoryReplayBuffer() as buffer, TrajectoryReplayBuffer() as other:
        buffer.add_trajectories([versioned(0, [1])])
        other.add_trajectories([versioned(0, [1])])
        buffer.sample(1, sampler=sampler)
        with pytest.raises(ValueError, match="sampler: expected one of this buffer's own"):
            other.sample(1, sampler=sampler)


def ids_drawn(
    _: Parent, buffer: TrajectoryReplayBuffer, sampler: Sampler
) -> set[tuple[int, int, int]]:
    return set(map(tuple, buffer.sample(200, sampler=sampler)["ids"].tolist()))


def test_forked_child_draws_fresh_rows_though_the_sampler_was_locked() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        sampler = FreshVersions(1)
        buffer.add_trajectories([versioned(0, [4, 5, 2, 5])])
        buffer.sample(1, sampler=sampler)
        with sampler._lock, Child(ids_drawn, buffer, sampler) as child:
            assert child.result() == {(0, 0, 0), (0, 1, 0), (0, 3, 0)}


def test_forked_child_draws_recent_rows() -> None:
    with TrajectoryReplayBuffer(seed=0) as buffer:
        sampler = Recent(0.01)
        buffer.add_trajectories([versioned(0, [4, 5, 2, 5])])
        with Child(ids_drawn, buffer, sampler) as child:
            assert child.result() == {(0, 3, 0)}


@pytest.mark.parametrize("make", [lambda: FreshVersions(3), lambda: Recent(3.0)], ids="FR")
def test_rows_of_files_are_those_of_memory(tmp_path: Path, without_fsync: None, make: Any) -> None:
    found = []
    for options in (
        {},
        {"auto_save": True, "auto_save_path": tmp_path / "a", "enable_cache": False},
        {"auto_save": True, "auto_save_path": tmp_path / "b", "cache_size": 1},
    ):
        rng = np.random.default_rng(1)
        settings: dict[str, Any] = {"seed": 5, "sample_window_size": 6, **options}
        with TrajectoryReplayBuffer(**settings) as buffer:
            sampler, batches = make(), []
            for i in range(10):
                buffer.add_trajectories([random_versions(i, rng, (1,))])
                buffer.flush()
                batches.append(buffer.sample(20, sampler=sampler)["ids"].tolist())
            found.append(batches)
    assert found[0] == found[1] == found[2]


def test_threads_share_a_sampler_while_one_adds_and_evicts(tmp_path: Path) -> None:
    """Trajectory i has the versions i and i - 1; max_lag is 2, and the window 6."""
    numbers = itertools.count()
    num_added = 0

    def look(thread: int) -> None:
        newest = num_added - 1
        batch = buffer.sample(200, sampler=sampler)
        versions, ids = batch["versions"].flatten(), batch["ids"]
        assert torch.equal(versions, ids[:, 0] - ids[:, 1] % 2)
        assert int(versions.min()) >= newest - 2
        assert int(versions.max() - versions.min()) <= 2
        assert int(versions.max()) <= num_added + 1

    with TrajectoryReplayBuffer(
        seed=0, auto_save=True, auto_save_path=tmp_path, sample_window_size=6, cache_size=4
    ) as buffer:
        sampler = FreshVersions(2)

        def add() -> None:
            nonlocal num_added
            i = next(numbers)
            num_steps = 1 + i % 7
            versions = i - torch.arange(num_steps)[:, None].expand(-1, 2) % 2
            buffer.add_trajectories([versioned(i, versions)])
            num_added = i + 1

        add()
        look_while_adding(look, add)
    assert next(numbers) > 20
