"""WithoutReplacement and Permutation: each row of the window once, in shuffled order."""

from __future__ import annotations

import io
import itertools
import queue
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from data import opened

from mmbuf import ReplayReader, SchemaError, TrajectoryReplayBuffer
from mmbuf.sampling import Sight, WithoutReplacement
from mmbuf.sampling.draw import Delivery, StaleSightError
from mmbuf.sampling.epoch import _ROUNDS, Permutation
from mmbuf.schema import Array
from mmbuf.slots import Facts, SlotTable, View

pytestmark = pytest.mark.usefixtures("without_fsync")


def numbered(i: int, num_rows: int = 10) -> dict[str, Any]:
    """Trajectory ``i``, whose rows are ``1000 * i``, ``1000 * i + 1`` ..."""
    return {"row": torch.arange(1000 * i, 1000 * i + num_rows).reshape(num_rows, 1)}


def rows_of(i: int, num_rows: int = 10) -> set[int]:
    return set(range(1000 * i, 1000 * i + num_rows))


def in_memory(count: int, num_rows: int = 10, **options: Any) -> TrajectoryReplayBuffer:
    """A buffer of ``count`` trajectories, its window all of them."""
    buffer = TrajectoryReplayBuffer(**{"seed": 0, "sample_window_size": 0, **options})
    buffer.add_trajectories([numbered(i, num_rows) for i in range(count)])
    return buffer


def drawn(
    buffer: TrajectoryReplayBuffer | ReplayReader, sampler: WithoutReplacement, num_chunks: int
) -> list[int]:
    rows: list[int] = buffer.sample(num_chunks, sampler=sampler)["row"].tolist()
    return rows


def batches(
    buffer: TrajectoryReplayBuffer, sampler: WithoutReplacement, num_chunks: int, count: int
) -> list[list[int]]:
    return [drawn(buffer, sampler, num_chunks) for _ in range(count)]


def saved(state: Any) -> Any:
    """``state`` after a round through a file that cannot run code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def keys_of(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 63, 2 * _ROUNDS)


def orders_of(size: int, count: int) -> Iterator[Array]:
    """Orders of ``count`` keys."""
    for keys in np.random.default_rng(size).integers(0, 1 << 63, (count, 2 * _ROUNDS)):
        yield Permutation(size, keys).at(0, size)


def chi_square(counts: Array) -> float:
    """Of counts that are expected to be equal."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


# -- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 63, 64, 65, 1000, 4097, 100_003])
def test_an_order_has_each_number_once(size: int) -> None:
    for seed in range(5):
        order = Permutation(size, keys_of(seed)).at(0, size)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 63, 64, 65, 1000, 4097, 100_003])
def test_blocks_of_an_order_are_parts_of_the_whole(size: int) -> None:
    order = Permutation(size, keys_of(0))
    whole = order.at(0, size)
    cuts = np.random.default_rng(1).integers(0, size + 1, 20)
    borders = [0, *sorted(cuts.tolist()), size]
    blocks = [order.at(start, stop) for start, stop in itertools.pairwise(borders)]
    assert np.array_equal(np.concatenate(blocks), whole)


def test_each_key_changes_the_order() -> None:
    keys = keys_of(0)
    order = Permutation(1000, keys).at(0, 1000)
    for i in range(len(keys)):
        other = keys.copy()
        other[i] ^= 2
        assert not np.array_equal(Permutation(1000, other).at(0, 1000), order)


def test_equal_keys_give_equal_orders() -> None:
    first, second = (Permutation(1000, keys_of(7)).at(0, 1000) for _ in range(2))
    assert np.array_equal(first, second)


# The quantiles are those of 1 - 1e-4.


def test_each_number_is_at_each_place_equally_often() -> None:
    counts = np.zeros((10, 10), np.int64)
    for order in orders_of(10, 2000):
        counts[np.arange(10), order] += 1
    assert chi_square(counts) < 137.07  # of 81 degrees of freedom


@pytest.mark.parametrize(("size", "quantile"), [(2, 15.14), (3, 25.74)])
def test_each_order_of_few_rows_is_equally_likely(size: int, quantile: float) -> None:
    found = Counter(tuple(order.tolist()) for order in orders_of(size, 3000))
    counts = [found[order] for order in itertools.permutations(range(size))]
    assert chi_square(np.array(counts)) < quantile


@pytest.mark.parametrize(("size", "quantile"), [(16, 42.58), (64, 112.17)])
def test_neighbours_differ_by_each_number_equally_often(size: int, quantile: float) -> None:
    counts = np.zeros(size, np.int64)
    for order in orders_of(size, 3000):
        counts += np.bincount(np.diff(order) % size, minlength=size)
    assert counts[0] == 0
    assert chi_square(counts[1:]) < quantile  # of size - 2 degrees of freedom


def test_neighbours_of_a_long_order_have_as_many_differences_as_chance_gives() -> None:
    size = 100_003
    order = Permutation(size, keys_of(3)).at(0, size)
    differences = len(np.unique(np.diff(order) % size))
    assert differences / size == pytest.approx(1 - np.exp(-1), abs=0.01)


def test_an_order_of_any_size_takes_no_more_memory_than_a_small_one() -> None:
    peaks = []
    for size in (10**4, 10**12):
        keys = keys_of(0)
        tracemalloc.start()
        block = Permutation(size, keys).at(0, 4096)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(np.unique(block)) == 4096
        assert block.min() >= 0
        assert block.max() < size
    assert peaks[1] <= peaks[0]


# -- an epoch ------------------------------------------------------------------------------------


def test_an_epoch_gives_each_row_once() -> None:
    buffer, sampler = TrajectoryReplayBuffer(seed=0), WithoutReplacement()
    lengths = [1, 50, 7, 300, 2]
    buffer.add_trajectories([numbered(i, n) for i, n in enumerate(lengths)])
    found = sorted(itertools.chain(*batches(buffer, sampler, 7, 52)))  # 360 rows
    assert found == sorted(set().union(*map(rows_of, range(5), lengths)))


def test_an_epoch_of_many_blocks_gives_each_row_once() -> None:
    buffer, sampler = TrajectoryReplayBuffer(seed=0), WithoutReplacement()
    buffer.add_trajectories([{"row": torch.arange(70_001).reshape(-1, 1)}])
    found = np.concatenate([buffer.sample(5000, sampler=sampler)["row"].numpy() for _ in range(15)])
    assert np.array_equal(np.sort(found), np.arange(70_001))


def test_an_epoch_is_in_shuffled_order() -> None:
    buffer, sampler = in_memory(1, 1000), WithoutReplacement()
    order = np.array(drawn(buffer, sampler, 1000))
    ascents = int((np.diff(order) > 0).sum())
    assert ascents == pytest.approx(999 / 2, abs=4 * (1001 / 12) ** 0.5)


def test_last_batch_has_the_rows_that_are_left() -> None:
    sizes = [len(rows) for rows in batches(in_memory(5), WithoutReplacement(), 16, 6)]
    assert sizes == [16, 16, 16, 2, 16, 16]


def test_drop_last_leaves_a_short_batch_out() -> None:
    found = batches(in_memory(5), WithoutReplacement(drop_last=True), 16, 6)
    assert [len(set(rows)) for rows in found] == [16] * 6
    for epoch in (found[:3], found[3:]):
        assert len(set().union(*epoch)) == 48


def test_drop_last_keeps_a_last_batch_that_is_whole() -> None:
    found = batches(in_memory(5), WithoutReplacement(drop_last=True), 10, 5)
    assert sorted(itertools.chain(*found)) == sorted(set().union(*map(rows_of, range(5))))


def test_two_epochs_have_different_orders_of_the_same_rows() -> None:
    first, second = batches(in_memory(5), WithoutReplacement(), 50, 2)
    assert first != second
    assert sorted(first) == sorted(second)


def test_epoch_counts_the_epochs_that_have_begun() -> None:
    buffer, sampler = in_memory(1, 10), WithoutReplacement()
    counted = [sampler.epoch]
    for _ in range(7):
        drawn(buffer, sampler, 4)
        counted.append(sampler.epoch)
    assert counted == [0, 1, 1, 1, 2, 2, 2, 3]


def test_equal_seeds_give_equal_epochs() -> None:
    first, second = (batches(in_memory(5), WithoutReplacement(), 16, 6) for _ in range(2))
    assert first == second


def test_a_batch_larger_than_the_window_is_the_window() -> None:
    for rows in batches(in_memory(3), WithoutReplacement(), 100, 3):
        assert sorted(rows) == sorted(set().union(*map(rows_of, range(3))))


def test_a_window_smaller_than_a_batch_is_refused_with_drop_last() -> None:
    with pytest.raises(
        ValueError,
        match=r"num_chunks: expected at most the 30 rows of the window with drop_last, got 31\.",
    ):
        in_memory(3).sample(31, sampler=WithoutReplacement(drop_last=True))


def test_a_batch_that_is_refused_takes_no_rows() -> None:
    buffer, sampler = in_memory(3), WithoutReplacement(drop_last=True)
    found = batches(buffer, sampler, 10, 1)
    with pytest.raises(ValueError, match="num_chunks"):
        buffer.sample(31, sampler=sampler)
    found += batches(buffer, sampler, 10, 2)
    assert sorted(itertools.chain(*found)) == sorted(set().union(*map(rows_of, range(3))))
    assert sampler.epoch == 1


# -- while the window changes --------------------------------------------------------------------


def test_what_is_added_joins_the_next_epoch_only() -> None:
    buffer, sampler = in_memory(3), WithoutReplacement()
    found = drawn(buffer, sampler, 10)
    buffer.add_trajectories([numbered(3), numbered(4)])
    found += drawn(buffer, sampler, 10) + drawn(buffer, sampler, 10)
    assert sorted(found) == sorted(set().union(*map(rows_of, range(3))))
    assert set(drawn(buffer, sampler, 50)) == set().union(*map(rows_of, range(5)))


def test_what_has_left_the_window_is_passed_over() -> None:
    buffer, sampler = in_memory(3, sample_window_size=3), WithoutReplacement()
    found = drawn(buffer, sampler, 6)
    buffer.add_trajectories([numbered(3)])  # in the place of 0
    rest = drawn(buffer, sampler, 100)
    assert set(rest) == (rows_of(1) | rows_of(2)) - set(found)
    assert len(rest) == len(set(rest))


def test_an_epoch_whose_rows_have_all_left_ends() -> None:
    buffer, sampler = in_memory(2, sample_window_size=2), WithoutReplacement()
    drawn(buffer, sampler, 5)
    buffer.add_trajectories([numbered(2), numbered(3)])
    assert set(drawn(buffer, sampler, 20)) == rows_of(2) | rows_of(3)
    assert sampler.epoch == 2


class Watched:
    """Draws, and holds every epoch to what may be in it.

    ``live`` are the rows that are in the window at the moment.
    """

    def __init__(self, sampler: WithoutReplacement) -> None:
        self.sampler = sampler
        self.num_rows = 0
        self._listed: set[int] = set()  # at the epoch's begin
        self._given: set[int] = set()
        self._left: set[int] = set()  # since then

    def draw(
        self, buffer: TrajectoryReplayBuffer | ReplayReader, num_chunks: int, live: set[int]
    ) -> None:
        epoch = self.sampler.epoch
        rows = drawn(buffer, self.sampler, num_chunks)
        self._left |= self._listed - live
        if self.sampler.epoch != epoch:
            self._check_end(num_chunks)
            self._listed, self._given, self._left = set(live), set(), set()
        assert self.sampler.epoch <= epoch + 1
        assert set(rows) <= live & self._listed
        assert len(set(rows)) == len(rows)
        assert not self._given & set(rows)
        self._given |= set(rows)
        self.num_rows += len(rows)

    def _check_end(self, num_chunks: int) -> None:
        missed = self._listed - self._given - self._left
        assert len(missed) < (num_chunks if self.sampler.drop_last else 1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_adds", [1, 2, 5])
def test_no_row_is_missed_or_given_twice_while_the_window_slides(
    num_adds: int, drop_last: bool
) -> None:
    rng = np.random.default_rng(num_adds)
    lengths: list[int] = rng.integers(1, 30, 400).tolist()
    buffer = TrajectoryReplayBuffer(seed=0, sample_window_size=20)
    watched = Watched(WithoutReplacement(drop_last))
    added = 0
    while added < len(lengths):
        for _ in range(num_adds):
            buffer.add_trajectories([numbered(added, lengths[added])])
            added += 1
        live = set().union(*(rows_of(i, lengths[i]) for i in buffer.window_ids))
        for _ in range(int(rng.integers(0, 4))):
            watched.draw(buffer, min(9, len(live)), live)
    assert watched.sampler.epoch > 3


def test_an_epoch_goes_on_while_many_trajectories_are_added() -> None:
    buffer, sampler = in_memory(30), WithoutReplacement()
    found = drawn(buffer, sampler, 10)
    for i in range(30, 330):  # the tables are made anew
        buffer.add_trajectories([numbered(i)])
        if i % 12 == 0:
            found += drawn(buffer, sampler, 10)
    found += drawn(buffer, sampler, 300)
    assert sorted(found) == sorted(set().union(*map(rows_of, range(30))))


def test_an_epoch_goes_on_when_the_cache_is_cleared(tmp_path: Path) -> None:
    sampler = WithoutReplacement()
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([numbered(i) for i in range(5)])
        found = drawn(buffer, sampler, 20)
        buffer.flush()
        buffer.clear_cache()
        found += drawn(buffer, sampler, 20) + drawn(buffer, sampler, 20)
    assert sorted(found) == sorted(set().union(*map(rows_of, range(5))))


def test_an_epoch_ends_when_the_buffer_is_cleared() -> None:
    buffer, sampler = in_memory(3), WithoutReplacement()
    drawn(buffer, sampler, 10)
    buffer.clear()
    buffer.add_trajectories([numbered(9)])
    assert set(drawn(buffer, sampler, 30)) == rows_of(9)
    assert sampler.epoch == 2


def test_an_epoch_ends_when_rows_of_another_schema_take_the_place_of_all() -> None:
    buffer, sampler = in_memory(3), WithoutReplacement()
    drawn(buffer, sampler, 10)
    buffer.clear()
    buffer.add_trajectories([{"other": torch.arange(8.0).reshape(4, 2)}])
    assert sorted(buffer.sample(30, sampler=sampler)["other"].tolist()) == list(range(8))


def test_a_reader_takes_what_is_published_into_the_next_epoch(tmp_path: Path) -> None:
    sampler = WithoutReplacement()
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([numbered(0), numbered(1)])
        buffer.flush()
        with ReplayReader(tmp_path / "store") as reader:
            found = drawn(reader, sampler, 10)
            buffer.add_trajectories([numbered(2)])
            buffer.flush()
            found += drawn(reader, sampler, 20)
            assert sorted(found) == sorted(rows_of(0) | rows_of(1))
            assert set(drawn(reader, sampler, 30)) == set().union(*map(rows_of, range(3)))


def bulky(i: int) -> dict[str, Any]:
    """`numbered` of 8 rows with 64 KiB beside, so that a store can have too much of it."""
    return {**numbered(i, 8), "ballast": torch.zeros(8, 1, 8 << 10, dtype=torch.uint8)}


def test_an_epoch_over_several_stores_passes_over_those_that_a_limit_removes(
    tmp_path: Path,
) -> None:
    watched, numbers, removed = Watched(WithoutReplacement()), itertools.count(), 0
    named: dict[tuple[str, int], int] = {}
    with (
        opened(tmp_path / "limited", sample_window_size=2, max_disk_bytes=400 << 10) as limited,
        opened(tmp_path / "whole") as whole,
    ):
        stores = {limited: str(tmp_path / "limited"), whole: str(tmp_path / "whole")}

        def add(buffer: TrajectoryReplayBuffer) -> None:
            number = next(numbers)
            named[stores[buffer], buffer.trajectory_counter] = number
            buffer.add_trajectories([bulky(number)])
            buffer.flush()

        for buffer in (whole, limited, whole, limited):
            add(buffer)
        with ReplayReader([tmp_path / "limited", tmp_path / "whole"]) as reader:
            for step in range(40):
                before = set(reader.trajectory_ids)
                add(whole if step % 3 == 0 else limited)
                reader.refresh()
                removed += len(before - set(reader.trajectory_ids))
                live = set().union(*(rows_of(named[key], 8) for key in reader.trajectory_ids))
                for _ in range(1 + step % 3):
                    watched.draw(reader, 13, live)
    assert removed > 20
    assert watched.sampler.epoch > 3


# -- resuming ------------------------------------------------------------------------------------


Resume = Callable[[TrajectoryReplayBuffer, Path], TrajectoryReplayBuffer]


def from_files(buffer: TrajectoryReplayBuffer, path: Path) -> TrajectoryReplayBuffer:
    state = saved(buffer.state_dict())
    buffer.close()
    other = opened(path / "store", sample_window_size=30)
    other.load_state_dict(state)
    return other


def from_checkpoint(buffer: TrajectoryReplayBuffer, path: Path) -> TrajectoryReplayBuffer:
    buffer.save_checkpoint(path / "checkpoint")
    other = TrajectoryReplayBuffer(sample_window_size=30)
    other.load_checkpoint(path / "checkpoint")
    return other


@pytest.mark.parametrize("resume", [from_files, from_checkpoint])
@pytest.mark.parametrize("num_batches", [0, 1, 7, 24, 25, 26])
def test_an_epoch_goes_on_in_another_buffer_as_it_would_have(
    tmp_path: Path, resume: Resume, num_batches: int
) -> None:
    sampler, other_sampler = WithoutReplacement(), WithoutReplacement()
    with opened(tmp_path / "store", sample_window_size=30) as buffer:
        buffer.add_trajectories([numbered(i) for i in range(100)])  # rows are not counted from 0
        batches(buffer, sampler, 12, num_batches)
        state = saved(sampler.state_dict())
        if resume is from_checkpoint:
            other = resume(buffer, tmp_path)
            expected = batches(buffer, sampler, 12, 60)
        else:
            # The same batches are drawn before it is closed, from the same state.
            again = saved(buffer.state_dict())
            expected = batches(buffer, sampler, 12, 60)
            buffer.load_state_dict(again)
            other = resume(buffer, tmp_path)
    with other:
        other_sampler.load_state_dict(state)
        assert batches(other, other_sampler, 12, 60) == expected
        assert other_sampler.epoch == sampler.epoch


def test_a_resumed_epoch_passes_over_what_is_gone_by_then(tmp_path: Path) -> None:
    sampler, other_sampler = WithoutReplacement(), WithoutReplacement()
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([numbered(i) for i in range(10)])
        given = drawn(buffer, sampler, 35)
    with opened(tmp_path / "store", sample_window_size=4) as buffer:
        other_sampler.load_state_dict(saved(sampler.state_dict()))
        rest = drawn(buffer, other_sampler, 100)
    assert sorted(rest) == sorted(set().union(*map(rows_of, range(6, 10))) - set(given))
    assert other_sampler.epoch == 1


def test_a_state_stays_what_it_was_while_its_sampler_goes_on() -> None:
    buffer, sampler = in_memory(5), WithoutReplacement()
    drawn(buffer, sampler, 20)
    state, again = sampler.state_dict(), saved(sampler.state_dict())
    buffer.add_trajectories([numbered(i) for i in range(5, 80)])
    batches(buffer, sampler, 20, 40)
    assert state.keys() == again.keys()
    for name, value in again.items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name


def test_a_loaded_state_takes_the_place_of_the_epoch_that_went_on() -> None:
    buffer, sampler = in_memory(5), WithoutReplacement()
    drawn(buffer, sampler, 20)
    state = sampler.state_dict()
    expected = drawn(buffer, sampler, 20)
    batches(buffer, sampler, 20, 5)
    sampler.load_state_dict(state)
    assert drawn(buffer, sampler, 20) == expected


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_prefetched_epoch_gives_each_row_once(depth: int) -> None:
    buffer, sampler = in_memory(7), WithoutReplacement()
    num_batches = 24  # of 70 rows by 3
    ahead: queue.Queue[list[int]] = queue.Queue(depth)

    def fetch() -> None:
        for _ in range(2 * num_batches):
            ahead.put(drawn(buffer, sampler, 3))

    def delivered() -> Iterator[list[int]]:
        if not depth:
            yield from batches(buffer, sampler, 3, 2 * num_batches)
            return
        thread = threading.Thread(target=fetch)
        thread.start()
        for _ in range(2 * num_batches):
            yield ahead.get(timeout=30)
        thread.join()

    found = list(delivered())
    for epoch in (found[:num_batches], found[num_batches:]):
        assert sorted(itertools.chain(*epoch)) == sorted(set().union(*map(rows_of, range(7))))


def together(num_threads: int, work: Callable[[], None]) -> None:
    """Call ``work`` in several threads at once; what one of them raises is raised here."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(num_threads)

    def run() -> None:
        try:
            barrier.wait(30)
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


def test_threads_that_share_a_sampler_give_each_row_once_in_all() -> None:
    buffer, sampler = in_memory(20, 100), WithoutReplacement()
    turns, found = iter(range(3 * 223)), []  # three epochs of 2,000 rows by 9

    def work() -> None:
        for _ in turns:
            found.append(drawn(buffer, sampler, 9))

    together(4, work)
    assert Counter(itertools.chain(*found)) == dict.fromkeys(
        set().union(*(rows_of(i, 100) for i in range(20))), 3
    )


def test_threads_give_each_row_of_an_epoch_once_while_others_are_added() -> None:
    buffer, sampler = in_memory(20, 100), WithoutReplacement()
    turns, jobs, found = iter(range(199)), itertools.count(), [drawn(buffer, sampler, 10)]

    def work() -> None:
        if next(jobs) == 0:  # one of them adds
            buffer.add_trajectories([numbered(i) for i in range(20, 420)])
        else:
            for _ in turns:
                found.append(drawn(buffer, sampler, 10))

    together(4, work)
    assert sorted(itertools.chain(*found)) == sorted(
        set().union(*(rows_of(i, 100) for i in range(20)))
    )
    assert sampler.epoch == 1


def test_a_sight_from_before_an_addition_that_is_known_is_refused() -> None:
    table, sampler, owner = SlotTable(1), WithoutReplacement(), object()
    generator = np.random.default_rng(0)

    def sight() -> Sight:
        view = View(table, is_filled=True)
        return cast(Sight, SimpleNamespace(view=view, owner=owner, delivery=Delivery()))

    table.append(5, [0], is_filled=True, facts=Facts(uuid_mark=1))
    old = sight()
    table.append(5, [5], is_filled=True, facts=Facts(uuid_mark=2))
    sampler.draw(sight(), 3, generator)
    with pytest.raises(StaleSightError):
        sampler.draw(old, 3, generator)


def test_rows_of_a_batch_that_failed_come_again() -> None:
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.add_trajectories([{"rewards": torch.arange(30.0).view(30, 1)}])
        epochs = WithoutReplacement()
        drawn = []
        for _ in range(3):
            with pytest.raises(SchemaError, match="of out"):
                buffer.sample(10, {"rewards": torch.zeros(3)}, sampler=epochs)
            drawn += buffer.sample(10, sampler=epochs)["rewards"].tolist()
        assert sorted(drawn) == list(range(30))
        assert epochs.epoch == 1
