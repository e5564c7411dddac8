"""SlotTable and View against a naive computation: which slot, and which row of each lane."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmbuf.schema import Array
from mmbuf.slots import Facts, SlotTable, View


class Model:
    """A table and, for each slot in the window, its length and its first row in each lane.

    ``lane_starts`` None is a slot that is not in the lanes.
    """

    def __init__(self, num_lanes: int = 1) -> None:
        self.table = SlotTable(num_lanes)
        self.num_lanes = num_lanes
        self.slots: list[tuple[int, int, list[int] | None, bool]] = []

    def append(self, num_rows: int, lane_starts: list[int] | None, is_filled: bool = True) -> int:
        number = self.table.append(num_rows, lane_starts, is_filled=is_filled)
        self.slots.append((number, num_rows, lane_starts, is_filled))
        return number

    def extend(self, lengths: list[int], lane_starts: list[list[int]] | None) -> None:
        """As `append` of each, unfilled; ``lane_starts`` of each slot."""
        starts = None if lane_starts is None else np.array(lane_starts, np.int64).T
        facts = np.arange(3 * len(lengths)).reshape(3, -1)
        number = self.table.extend(np.array(lengths, np.int64), starts, facts)
        for i, num_rows in enumerate(lengths):
            starts_of_slot = None if lane_starts is None else lane_starts[i]
            self.slots.append((number + i, num_rows, starts_of_slot, False))

    def drop_oldest(self) -> None:
        self.table.drop_oldest()
        del self.slots[0]

    def keep(self, indices: Sequence[int]) -> None:
        kept = [self.slots[i] for i in indices]
        self.table.keep(np.array([number for number, *_ in kept], np.int64))
        self.slots = [(self.table.first_number + i, *rest) for i, (_, *rest) in enumerate(kept)]

    def view(self) -> View:
        return View(self.table, all(filled for *_, filled in self.slots))

    def check(self, view: View, slots: Sequence[tuple[int, int, list[int] | None, bool]]) -> None:
        """That ``view`` answers for all rows of ``slots``, and for no others."""
        lengths = [num_rows for _, num_rows, _, _ in slots]
        assert view.high - view.low == sum(lengths)
        if not slots:
            return
        rows = np.arange(view.low, view.high)
        order = np.random.default_rng(0).permutation(len(rows))
        which = np.repeat(np.arange(len(slots)), lengths)
        local = np.concatenate([np.arange(n) for n in lengths])
        found = np.empty(len(rows), np.int64)
        found[order] = view.slots_of(rows[order])
        assert np.array_equal(
            found + view.first_number, np.array([number for number, *_ in slots])[which]
        )
        assert np.array_equal(rows - view.first_rows(found), local)
        assert np.array_equal(
            view.filled.take(found), np.array([filled for *_, filled in slots])[which]
        )
        lanes = view.lane_rows(rows, found if view.needs_slots else None)
        assert len(lanes) == self.num_lanes
        is_placed = np.array([starts is not None for _, _, starts, _ in slots])[which]
        for lane, lane_rows in enumerate(lanes):
            first = np.array([starts[lane] if starts else 0 for _, _, starts, _ in slots])[which]
            assert np.array_equal(lane_rows[is_placed], (first + local)[is_placed])


def fill(model: Model, lengths: Sequence[int], gap: int = 0) -> None:
    """Append slots of ``lengths``, ``gap`` rows apart in each lane but the first."""
    ends = [0] * model.num_lanes
    for num_rows in lengths:
        model.append(num_rows, list(ends))
        ends = [end + num_rows + (gap if lane else 0) for lane, end in enumerate(ends)]


def ragged(seed: int, count: int, longest: int = 1000) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


LENGTHS: dict[str, Callable[[], list[int]]] = {
    "one slot of one row": lambda: [1],
    "one slot": lambda: [400],
    "equal": lambda: [400] * 100,
    "equal, a power of two": lambda: [64] * 130,
    "one row each": lambda: [1] * 500,
    "ragged": lambda: ragged(0, 300),
    "nearly equal": lambda: [300 + n for n in ragged(1, 300, 60)],
    "one row after long ones": lambda: [1000] * 80 + [1] + [1000] * 80,
    "one row first": lambda: [1] + [1000] * 100,
    "ever longer": lambda: list(range(1, 200)),
    "ever shorter": lambda: list(range(200, 0, -1)),
    "one very long": lambda: [3] * 70 + [200_001] + [3] * 70,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_row_is_found(name: str) -> None:
    for gap in (0, 5):
        model = Model(num_lanes=2)
        fill(model, LENGTHS[name](), gap)
        model.check(model.view(), model.slots)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_row_is_found_while_old_slots_are_dropped(name: str) -> None:
    model = Model()
    end = 0
    for i, num_rows in enumerate(LENGTHS[name]()):
        model.append(num_rows, [end + i])
        end += num_rows
        if len(model.slots) > 10:
            model.drop_oldest()
        if i % 25 == 0 or i > 190:
            model.check(model.view(), model.slots)
    model.check(model.view(), model.slots)


def test_every_row_of_20_000_slots_is_found() -> None:
    model = Model()
    fill(model, ragged(2, 20_000, 5))
    model.check(model.view(), model.slots)


@pytest.mark.parametrize("name", ["equal", "ragged", "one row after long ones"])
def test_old_view_keeps_answering_after_appends_growth_drops_and_renewal(name: str) -> None:
    model = Model(num_lanes=2)
    kept: list[tuple[View, list[tuple[int, int, list[int] | None, bool]]]] = []
    end = 0
    for i, num_rows in enumerate(LENGTHS[name]()):
        model.append(num_rows, [end, end + 3 * i])
        end += num_rows
        if len(model.slots) > 40:
            model.drop_oldest()
        if i == 70:
            model.table.renew()
        if i % 10 == 0:
            kept.append((model.view(), list(model.slots)))
    model.table.drop_all()
    for num_rows in (1, 2, 3):
        model.table.append(num_rows, [0, 0], is_filled=True)
    for view, slots in kept:
        model.check(view, slots)


def test_slot_shorter_than_all_before_does_not_change_an_old_view() -> None:
    model = Model()
    fill(model, [1000] * 10)
    view, slots = model.view(), list(model.slots)
    model.append(1, [10_000])
    model.append(1, [10_001])
    model.check(view, slots)
    model.check(model.view(), model.slots)


def test_dense_lanes_need_no_search() -> None:
    model = Model(num_lanes=2)
    fill(model, ragged(3, 100))
    assert not model.view().needs_slots


def test_one_lane_with_gaps_needs_the_search_and_the_dense_one_stays_right() -> None:
    model = Model(num_lanes=2)
    fill(model, [7] * 20, gap=3)
    view = model.view()
    assert view.needs_slots
    model.check(view, model.slots)


def test_search_ends_when_the_slots_before_a_jump_have_left() -> None:
    """A ring that turned has two offsets until the slots at its end are gone."""
    model = Model()
    for lane_start in (100, 110, 0, 10):
        model.append(10, [lane_start])
    needed = []
    for _ in range(3):
        needed.append(model.view().needs_slots)
        model.drop_oldest()
    assert needed == [True, True, False]


def test_slot_outside_the_lanes_needs_slots_and_no_other_offset() -> None:
    model = Model()
    model.append(10, [0])
    model.append(5, None, is_filled=False)
    model.append(10, [15])
    view = model.view()
    assert view.needs_slots
    assert view.lane_rows(np.array([0, 16]), None)[0].tolist() == [0, 16]
    model.check(view, model.slots)


def test_slots_that_are_not_filled_need_slots() -> None:
    model = Model()
    model.append(10, [0])
    model.append(10, [10], is_filled=False)
    assert model.view().needs_slots


def test_numbers_rise_for_ever() -> None:
    model = Model()
    numbers = []
    for i in range(300):
        numbers.append(model.append(2, [2 * i]))
        if i > 3:
            model.drop_oldest()
    model.table.drop_all()
    model.table.renew()
    numbers.append(model.table.append(1, [0], is_filled=True))
    assert numbers == list(range(301))


def test_window_says_which_numbers_it_holds() -> None:
    model = Model()
    for i in range(100):
        model.append(2, [2 * i])
    for _ in range(40):
        model.drop_oldest()
    held = [number for number in range(-5, 110) if model.table.is_in_window(number)]
    assert held == list(range(40, 100))


def test_empty_table_has_no_rows() -> None:
    view = View(SlotTable(3), True)
    assert (view.low, view.high) == (0, 0)


def test_table_without_lanes_finds_slots() -> None:
    model = Model(num_lanes=0)
    fill(model, [3, 1, 4])
    view = model.view()
    assert view.slots_of(np.arange(8)).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert view.lane_rows(np.arange(8), None) == []


def test_place_is_seen_by_new_views_and_not_by_old_ones() -> None:
    model = Model()
    fill(model, [5, 6, 7])
    old, slots = model.view(), list(model.slots)
    model.table.renew()
    for i, (number, num_rows, _, _) in enumerate(slots):
        model.table.place(number, [1000 - 10 * i])
        model.slots[i] = (number, num_rows, [1000 - 10 * i], True)
    model.check(old, slots)
    model.check(model.view(), model.slots)


KEPT: dict[str, Callable[[list[int]], list[int]]] = {
    "all": lambda indices: indices,
    "none": lambda indices: [],
    "the newest": lambda indices: indices[len(indices) // 3 :],
    "the oldest": lambda indices: indices[: len(indices) // 3],
    "all but one in the middle": lambda indices: [i for i in indices if i != len(indices) // 2],
    "every third": lambda indices: indices[::3],
    "both ends": lambda indices: sorted({indices[0], indices[-1]}),
}


@pytest.mark.parametrize("name", [name for name in LENGTHS if name != "one very long"])
def test_every_row_is_found_of_the_slots_that_are_kept(name: str) -> None:
    for gap, which in itertools.product((0, 5), KEPT.values()):
        model = Model(num_lanes=2)
        fill(model, LENGTHS[name](), gap)
        old, slots = model.view(), list(model.slots)
        model.keep(which(list(range(len(slots)))))
        model.check(model.view(), model.slots)
        model.check(old, slots)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_row_is_found_of_slots_added_to_those_that_are_kept(name: str) -> None:
    model = Model()
    fill(model, LENGTHS[name]())
    model.keep(range(0, len(model.slots), 2))
    for i, num_rows in enumerate(LENGTHS[name]()):
        model.append(num_rows, [10**7 + 10**6 * i])
    model.check(model.view(), model.slots)


def test_kept_slots_get_numbers_that_no_slot_had() -> None:
    model = Model()
    fill(model, [2] * 10)
    for _ in range(3):
        model.drop_oldest()
    model.keep([0, 2, 5])
    assert [number for number, *_ in model.slots] == [10, 11, 12]
    assert model.append(1, [50]) == 13
    assert [n for n in range(20) if model.table.is_in_window(n)] == [10, 11, 12, 13]


def test_numbers_go_on_when_no_slot_is_kept() -> None:
    model = Model()
    fill(model, [2] * 10)
    model.keep([])
    assert (model.view().low, model.view().high) == (0, 0)
    assert model.append(4, [0]) == 10
    model.check(model.view(), model.slots)


def test_slots_stay_filled_or_not_when_they_are_kept() -> None:
    model = Model()
    for i in range(9):
        model.append(3, [3 * i] if i % 3 else None, is_filled=i % 2 == 0)
    model.keep([1, 2, 3, 6, 8])
    model.check(model.view(), model.slots)
    model.table.set_filled(model.slots[0][0], True)
    assert model.view().filled[:5].tolist() == [True, True, False, True, True]


def test_dense_slots_need_the_search_only_behind_a_hole() -> None:
    model = Model()
    fill(model, [5] * 10)
    model.keep(range(4, 10))
    assert not model.view().needs_slots
    model.keep([0, 1, 3, 4, 5])
    assert model.view().needs_slots
    model.drop_oldest()
    model.drop_oldest()
    assert not model.view().needs_slots
    model.check(model.view(), model.slots)


def test_row_numbers_of_a_gather_are_not_changed_by_it() -> None:
    model = Model(num_lanes=2)
    fill(model, [5, 6, 7], gap=1)
    rows: Array = np.array([17, 0, 9, 9])
    view = model.view()
    view.lane_rows(rows, view.slots_of(rows))
    assert rows.tolist() == [17, 0, 9, 9]


def test_facts_stay_with_their_slots() -> None:
    table = SlotTable(1)
    for i in range(70):  # past the first arrays
        table.append(2, [2 * i], is_filled=True, facts=Facts(i, 10 * i, 100 * i))
    for _ in range(65):
        table.drop_oldest()
    rows = np.arange(2 * 70, 2 * 72)
    table.extend(np.array([2, 3]), rows[None, ::2], np.array([[7, 8], [70, 80], [700, 800]]))
    view = View(table, is_filled=False)
    facts = view.facts[:, view.first : view.stop]
    assert facts.T.tolist() == [
        *([i, 10 * i, 100 * i] for i in range(65, 70)),
        [7, 70, 700],
        [8, 80, 800],
    ]
    table.keep(view.first_number + np.array([view.first, view.stop - 1]))
    view = View(table, is_filled=False)
    assert view.facts[0, view.first : view.stop].tolist() == [65, 8]


class TableMachine(RuleBasedStateMachine):
    """Anything that a cache does to its table, in any order; old views are checked at the end."""

    @initialize(num_lanes=st.integers(0, 3))
    def begin(self, num_lanes: int) -> None:
        self.model = Model(num_lanes)
        self.kept: list[tuple[View, list[tuple[int, int, list[int] | None, bool]]]] = []
        self.ends = [0] * num_lanes

    @rule(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), gap=st.integers(0, 2))
    def append(self, lengths: list[int], gap: int) -> None:
        for num_rows in lengths:
            self.model.append(num_rows, list(self.ends))
            self.ends = [end + num_rows + lane * gap for lane, end in enumerate(self.ends)]

    @rule(
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=100),
        is_in_lanes=st.booleans(),
    )
    def extend(self, lengths: list[int], is_in_lanes: bool) -> None:
        starts = []
        for num_rows in lengths:
            starts.append(list(self.ends))
            self.ends = [end + num_rows for end in self.ends]
        self.model.extend(lengths, starts if is_in_lanes else None)

    @rule(num_rows=st.sampled_from([1, 64, 1000, 5000]))
    def append_of_another_size(self, num_rows: int) -> None:
        self.append([num_rows], 0)

    @rule(num_rows=st.integers(1, 40))
    def append_outside_the_lanes(self, num_rows: int) -> None:
        self.model.append(num_rows, None, is_filled=False)

    @rule()
    def turn(self) -> None:
        self.ends = [0] * self.model.num_lanes

    @rule(count=st.integers(1, 40))
    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self.model.slots))):
            self.model.drop_oldest()

    @rule()
    def drop_all(self) -> None:
        self.model.table.drop_all()
        self.model.slots.clear()

    @rule()
    def renew(self) -> None:
        self.model.table.renew()

    @rule(shift=st.integers(0, 9))
    def place_anew(self, shift: int) -> None:
        self.model.table.renew()
        slots = self.model.slots
        for i, (number, num_rows, starts, is_filled) in enumerate(slots):
            if starts is not None:
                starts = [start + 10_000 + shift * i for start in starts]
                self.model.table.place(number, starts)
            slots[i] = (number, num_rows, starts, is_filled)

    @rule(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    def keep_some(self, seed: int, share: float) -> None:
        draws = np.random.default_rng(seed).random(len(self.model.slots))
        self.model.keep((draws < share).nonzero()[0].tolist())

    @rule()
    def keep_view(self) -> None:
        self.kept.append((self.model.view(), list(self.model.slots)))

    @invariant()
    def new_view_is_right(self) -> None:
        if hasattr(self, "model"):
            self.model.check(self.model.view(), self.model.slots)

    def teardown(self) -> None:
        for view, slots in getattr(self, "kept", []):
            self.model.check(view, slots)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
