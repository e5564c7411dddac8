"""Fifo, blocks and Derived: what a sampler has made of the window follows it exactly."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import data
import numpy as np
import pytest
from children import Child, Parent
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmbuf import TrajectoryReplayBuffer
from mmbuf.cache import TrajectoryCache
from mmbuf.entry import Entry
from mmbuf.sampling import Sampler, Slices
from mmbuf.sampling.derived import Derived, Fifo, blocks
from mmbuf.sampling.draw import Delivery, Sight, StaleSightError
from mmbuf.schema import Array, Column, Path, Schema
from mmbuf.slots import Facts, SlotTable, View

# -- Fifo ------------------------------------------------------------------------------------


def test_new_fifo_is_empty() -> None:
    fifo = Fifo(np.int64)
    assert (len(fifo), fifo.live.tolist()) == (0, [])


def test_fifo_gives_back_what_was_appended_in_its_order() -> None:
    fifo = Fifo(np.int64)
    fifo.extend(np.array([3, 1]))
    fifo.extend(np.array([4]))
    assert fifo.live.tolist() == [3, 1, 4]


def test_fifo_drops_from_its_beginning() -> None:
    fifo = Fifo(np.int64)
    fifo.extend(np.arange(5))
    fifo.drop(2)
    assert fifo.live.tolist() == [2, 3, 4]


def test_cleared_fifo_is_empty() -> None:
    fifo = Fifo(np.int64)
    fifo.extend(np.arange(5))
    fifo.drop(2)
    fifo.clear()
    assert len(fifo) == len(fifo.live) == 0


@pytest.mark.parametrize("dtype", ["uint16", "int64", "float64"])
def test_fifo_keeps_its_dtype_when_it_grows(dtype: str) -> None:
    fifo = Fifo(dtype)
    fifo.extend(np.arange(1000))
    assert fifo.live.dtype == dtype


def test_fifo_of_constant_length_needs_constant_memory() -> None:
    fifo = Fifo(np.int64)
    fifo.extend(np.arange(100))
    sizes = set()
    for _ in range(10_000):
        fifo.extend(np.arange(7))
        fifo.drop(7)
        sizes.add(fifo.live.base.size)  # type: ignore[union-attr]
    assert max(sizes) == 214


@given(
    st.lists(
        st.one_of(st.integers(0, 100).map(lambda n: ("extend", n)), st.just(("clear", 0)))
        | st.floats(0, 1).map(lambda share: ("drop", share)),
        max_size=40,
    )
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_fifo_is_a_list_that_grows_at_its_end(steps: list[tuple[str, float]]) -> None:
    fifo, expected, value = Fifo(np.int64), [], 0
    for name, number in steps:
        if name == "extend":
            values = list(range(value, value + int(number)))
            value += int(number)
            fifo.extend(np.array(values, np.int64))
            expected += values
        elif name == "drop":
            count = int(number * len(expected))
            fifo.drop(count)
            del expected[:count]
        else:
            fifo.clear()
            expected.clear()
        assert fifo.live.tolist() == expected
        assert len(fifo) == len(expected)


# -- blocks ----------------------------------------------------------------------------------


def test_no_slots_are_no_blocks() -> None:
    assert blocks(np.empty(0, np.int64), 100) == []


def test_slots_of_few_rows_are_one_block() -> None:
    assert blocks(np.array([10, 20, 30]), 100) == [slice(0, 3)]


def test_slots_of_many_rows_are_several_blocks() -> None:
    assert blocks(np.array([40, 40, 40, 40, 40]), 100) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_slot_larger_than_a_block_is_in_one() -> None:
    assert blocks(np.array([5, 1000, 5]), 100) == [slice(0, 1), slice(1, 3)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 500))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_blocks_are_all_slots_in_order_and_not_large(lengths: list[int], max_rows: int) -> None:
    found = blocks(np.array(lengths), max_rows)
    assert [i for block in found for i in range(block.start, block.stop)] == [*range(len(lengths))]
    assert all(sum(lengths[block]) < max_rows + max(lengths) for block in found)


# -- Derived ---------------------------------------------------------------------------------


class FakeSight:
    """A view of a table, and whose it is."""

    schema = Schema([Column(("rewards",), "float32", ())])
    delivery = Delivery()

    def __init__(self, table: SlotTable, owner: object = None) -> None:
        self.view = View(table, is_filled=True)
        self.owner = owner or table

    def read(self, paths: Sequence[Path], rows: Array) -> list[Any]:
        raise NotImplementedError

    def entry(self, index: int) -> Entry:
        raise NotImplementedError


class Ids(Derived):
    """Of each slot the trajectory's id and its rows, and of each row its ordinal."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.fails = False

    def _clear(self) -> None:
        self.calls.append("clear")
        self.slots.clear()

    def _drop(self, num_slots: int, num_rows: int) -> None:
        self.calls.append(f"drop {num_slots}")
        assert sum(length for _, length in self.slots[:num_slots]) == num_rows
        del self.slots[:num_slots]

    def _add(self, sight: Sight, first: int, lengths: Array) -> None:
        view = sight.view
        self.calls.append(f"add {len(lengths)}")
        assert first + len(lengths) == view.stop
        ids = view.facts[1, first : view.stop].tolist()
        self.slots += zip(ids[:1] if self.fails else ids, lengths.tolist(), strict=False)
        if self.fails:
            raise MemoryError


class Slots:
    """A table whose slots have the ids 0, 1, ..."""

    def __init__(self, *lengths: int) -> None:
        self.table = SlotTable(1)
        self.slots: list[tuple[int, int]] = []  # of the window
        self.next_id = 0
        for length in lengths:
            self.append(length)

    def append(self, length: int) -> None:
        self.table.append(length, [0], is_filled=True, facts=Facts(1, self.next_id))
        self.slots.append((self.next_id, length))
        self.next_id += 1

    def drop(self, count: int = 1) -> None:
        for _ in range(count):
            self.table.drop_oldest()
        del self.slots[:count]

    def drop_all(self) -> None:
        self.table.drop_all()
        self.slots.clear()

    def keep(self, indices: list[int]) -> None:
        first = self.table.first_number + self.table.first
        self.table.keep(np.array([first + i for i in indices], np.int64))
        self.slots = [self.slots[i] for i in indices]

    def sight(self) -> FakeSight:
        return FakeSight(self.table)


def followed(slots: Slots) -> Ids:
    """What has followed the slots as they are, and has no calls in its list."""
    derived = Ids()
    derived.follow(slots.sight())
    derived.calls.clear()
    return derived


def test_all_slots_are_known_at_first() -> None:
    slots = Slots(3, 1, 4)
    slots.drop()
    assert followed(slots).slots == [(1, 1), (2, 4)]


def test_only_what_came_is_looked_at() -> None:
    slots = Slots(3, 1, 4)
    derived = followed(slots)
    slots.append(1)
    slots.append(5)
    derived.follow(slots.sight())
    assert derived.calls == ["add 2"]


def test_only_what_left_is_dropped() -> None:
    slots = Slots(3, 1, 4)
    derived = followed(slots)
    slots.drop(2)
    derived.follow(slots.sight())
    assert derived.calls == ["drop 2"]


def test_what_left_and_what_came_are_taken_in_at_once() -> None:
    slots = Slots(3, 1)
    derived = followed(slots)
    slots.append(4)
    slots.append(5)
    slots.drop()
    derived.follow(slots.sight())
    assert (derived.calls, derived.slots) == (["drop 1", "add 2"], [(1, 1), (2, 4), (3, 5)])


def test_all_is_forgotten_when_all_that_is_known_has_left() -> None:
    slots = Slots(3, 1)
    derived = followed(slots)
    slots.append(4)
    slots.append(5)
    slots.drop(2)
    derived.follow(slots.sight())
    assert (derived.calls, derived.slots) == (["clear", "add 2"], [(2, 4), (3, 5)])


def test_all_is_forgotten_when_the_middle_has_changed() -> None:
    slots = Slots(3, 1, 4)
    derived = followed(slots)
    slots.keep([0, 2])
    derived.follow(slots.sight())
    assert (derived.calls, derived.slots) == (["clear", "add 2"], [(0, 3), (2, 4)])


def test_same_view_again_is_not_looked_at() -> None:
    slots = Slots(3)
    derived = followed(slots)
    sight = slots.sight()
    derived.follow(sight)
    derived.follow(sight)
    assert derived.calls == []


def test_all_is_forgotten_when_the_window_went_on_beyond_what_is_known() -> None:
    slots = Slots(3, 1)
    derived = followed(slots)
    slots.append(4)
    slots.append(5)
    slots.drop(3)
    derived.follow(slots.sight())
    assert (derived.calls, derived.slots) == (["clear", "add 1"], [(3, 5)])


def test_all_is_forgotten_when_it_is_shown_another_window() -> None:
    derived = followed(Slots(3, 1))
    derived.follow(Slots(4, 1, 5).sight())
    assert (derived.calls, derived.slots) == (["clear", "add 3"], [(0, 4), (1, 1), (2, 5)])


def test_nothing_is_known_of_an_empty_window() -> None:
    slots = Slots(3, 1)
    derived = followed(slots)
    slots.drop_all()
    derived.follow(slots.sight())
    assert derived.slots == []


def test_what_comes_after_an_empty_window_is_known() -> None:
    slots = Slots(3, 1)
    derived = followed(slots)
    slots.drop_all()
    derived.follow(slots.sight())
    slots.append(7)
    derived.follow(slots.sight())
    assert derived.slots == [(2, 7)]


def test_sight_that_lacks_the_newest_slot_is_stale() -> None:
    slots = Slots(3)
    old = slots.sight()
    slots.append(1)
    derived = followed(slots)
    with pytest.raises(StaleSightError):
        derived.follow(old)


def test_sight_that_has_a_slot_that_left_is_stale() -> None:
    slots = Slots(3, 1)
    old = slots.sight()
    slots.drop()
    derived = followed(slots)
    with pytest.raises(StaleSightError):
        derived.follow(old)


def test_stale_sight_changes_nothing() -> None:
    slots = Slots(3)
    old = slots.sight()
    slots.append(1)
    derived = followed(slots)
    with pytest.raises(StaleSightError):
        derived.follow(old)
    slots.append(4)
    derived.follow(slots.sight())
    assert (derived.calls, derived.slots) == (["add 1"], [(0, 3), (1, 1), (2, 4)])


def test_older_view_of_the_same_slots_is_not_stale() -> None:
    slots = Slots(3, 1)
    old = slots.sight()
    slots.table.renew()
    derived = followed(slots)
    derived.follow(old)
    assert derived.calls == []


def test_ordinal_of_a_row_stays_while_slots_before_it_leave() -> None:
    slots = Slots(3, 1, 4)
    derived = followed(slots)
    ordinals = []
    for _ in range(3):
        view = slots.sight().view
        derived.follow(slots.sight())
        ordinals.append(view.high - 1 - view.low + derived.num_dropped_rows)
        slots.table.renew()  # row numbers begin again
        slots.drop()
    assert ordinals == [7, 7, 7]


def test_all_is_made_anew_after_an_error() -> None:
    slots = Slots(3, 1)
    derived = followed(slots)
    slots.append(4)
    slots.append(5)
    derived.fails = True
    with pytest.raises(MemoryError):
        derived.follow(slots.sight())
    derived.fails = False
    derived.follow(slots.sight())
    assert derived.slots == [(0, 3), (1, 1), (2, 4), (3, 5)]


def test_all_is_made_anew_after_an_error_even_for_the_same_view() -> None:
    slots = Slots(3, 1)
    sight = slots.sight()
    derived = Ids()
    derived.fails = True
    with pytest.raises(MemoryError):
        derived.follow(sight)
    derived.fails = False
    derived.follow(sight)
    assert derived.slots == [(0, 3), (1, 1)]


class FollowMachine(RuleBasedStateMachine):
    """Anything that a cache does to its table, seen or not seen by what follows it."""

    @initialize()
    def begin(self) -> None:
        self.slots = Slots()
        self.derived = Ids()

    @rule(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=70))
    def append(self, lengths: list[int]) -> None:
        for length in lengths:
            self.slots.append(length)

    @rule(count=st.integers(1, 40))
    def drop(self, count: int) -> None:
        self.slots.drop(min(count, len(self.slots.slots)))

    @rule()
    def drop_all(self) -> None:
        self.slots.drop_all()

    @rule()
    def renew(self) -> None:
        self.slots.table.renew()

    @rule(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.5, 0.9]))
    def keep_some(self, seed: int, share: float) -> None:
        draws = np.random.default_rng(seed).random(len(self.slots.slots))
        self.slots.keep((draws < share).nonzero()[0].tolist())

    @rule()
    def look(self) -> None:
        self.derived.follow(self.slots.sight())
        assert self.derived.slots == self.slots.slots

    @invariant()
    def one_that_is_new_knows_it_all(self) -> None:
        if hasattr(self, "slots"):
            assert followed(self.slots).slots == self.slots.slots


TestFollowMachine = FollowMachine.TestCase
TestFollowMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)


# -- forks -----------------------------------------------------------------------------------


def ids_drawn(_: Parent, buffer: TrajectoryReplayBuffer, sampler: Sampler) -> list[int]:
    batch = buffer.sample(200, sampler=sampler)
    return sorted({i for row in batch["curr_obs"]["states"].tolist() for i, _, _ in row})


def test_child_forked_while_another_thread_takes_in_a_trajectory_draws_from_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = os.getpid()
    reads, goes_on = threading.Event(), threading.Event()
    really = TrajectoryCache.read

    def read(*arguments: Any) -> Any:
        if os.getpid() == parent:
            reads.set()
            assert goes_on.wait(60)
        return really(*arguments)

    with TrajectoryReplayBuffer() as buffer:
        sampler = Slices(1)
        buffer.add_trajectories([data.trajectory(0)])
        buffer.sample(1, sampler=sampler)
        buffer.add_trajectories([data.trajectory(1)])
        monkeypatch.setattr(TrajectoryCache, "read", read)
        thread = threading.Thread(target=buffer.sample, args=(1,), kwargs={"sampler": sampler})
        thread.start()
        assert reads.wait(60)
        try:
            with Child(ids_drawn, buffer, sampler) as child:
                assert child.result() == [0, 1]
        finally:
            goes_on.set()
            thread.join()
