"""Lanes: where extents lie in the ring, and the pages behind them."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Iterator

import data
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmbuf import lane as lane_module
from mmbuf import vm
from mmbuf.lane import Extent, Lane, lanes_of
from mmbuf.schema import Column
from mmbuf.vm import HUGE_PAGE, PAGE

IS_LINUX = sys.platform.startswith("linux")
MIB = 1 << 20


def make_lane(row_bytes: int, num_rows: int, *, can_map: bool = True, num_columns: int = 1) -> Lane:
    columns = [Column((f"c{i}",), "uint8", (row_bytes,)) for i in range(num_columns)]
    return Lane(list(range(num_columns)), columns, num_rows, can_map=can_map)


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """A soft limit of 2 MiB to begin with."""
    monkeypatch.setattr(lane_module, "_FIRST_LIMIT", HUGE_PAGE)
    return HUGE_PAGE


class Ring:
    """A lane and a model of it: which rows are live, each row filled with its owner's number."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.live: deque[tuple[int, Extent, int]] = deque()
        self._next = 1

    def place(self, num_rows: int) -> bool:
        extent = self.lane.place(num_rows)
        if extent is None:
            return False
        self._take(num_rows, extent)
        return True

    def _take(self, num_rows: int, extent: Extent) -> None:
        row_bytes = self.lane.row_bytes
        assert extent.start % row_bytes == 0
        assert extent.stop - extent.start >= num_rows * row_bytes
        assert 0 <= extent.start < extent.stop <= self.lane.ranges[0].size_bytes
        for _, other, _ in self.live:
            assert extent.stop <= other.start or other.stop <= extent.start, "extents overlap"
        if extent.is_mappable:
            assert (extent.start % PAGE, extent.stop % PAGE) == (0, 0)
            self.lane.commit(extent)
        number, self._next = self._next, self._next + 1
        for array in self.rows(extent, num_rows):
            array[...] = number % 251
        self.live.append((number, extent, num_rows))

    def place_all(self, lengths: list[int]) -> bool:
        extents = self.lane.place_all(lengths)
        if extents is None:
            return False
        for num_rows, extent in zip(lengths, extents, strict=True):
            self._take(num_rows, extent)
        return True

    def release(self, index: int = 0) -> None:
        number, extent, num_rows = self.live[index]
        self.check(number, extent, num_rows)
        del self.live[index]
        self.lane.release(extent)

    def check(self, number: int, extent: Extent, num_rows: int) -> None:
        for array in self.rows(extent, num_rows):
            assert (array == number % 251).all(), f"rows of extent {number} were overwritten"

    def check_all(self) -> None:
        for number, extent, num_rows in self.live:
            self.check(number, extent, num_rows)

    def rows(
        self, extent: Extent, num_rows: int
    ) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        start = extent.start // self.lane.row_bytes
        for array in self.lane.arrays:
            yield array[start : start + num_rows]


def test_dense_extents_lie_row_after_row() -> None:
    lane = make_lane(36, 10_000)
    extents = [lane.place(n) for n in (3, 1, 5)]
    lane.close()
    assert extents == [Extent(0, 108, False), Extent(108, 144, False), Extent(144, 324, False)]


def test_extent_is_dense_below_the_threshold_and_mappable_from_it_on() -> None:
    lane = make_lane(64, 10_000)
    kinds = [
        lane.place(n).is_mappable  # type: ignore[union-attr]
        for n in (vm.MAP_THRESHOLD // 64 - 1, vm.MAP_THRESHOLD // 64)
    ]
    lane.close()
    assert kinds == [False, True]


def test_mappable_extents_start_on_pages_and_own_whole_pages() -> None:
    lane = make_lane(1000, 100_000)
    first = lane.place(3)
    second, third = lane.place(500), lane.place(17)
    lane.close()
    step = math.lcm(1000, PAGE)
    assert first == Extent(0, 3000, False)
    assert second == Extent(step, 2 * step, True)
    assert third == Extent(2 * step, 3 * step, True)


@pytest.mark.parametrize("row_bytes", [1000, 12_289, 1 << 20])
def test_many_extents_at_once_lie_where_one_after_the_other_would(row_bytes: int) -> None:
    alone, together = (make_lane(row_bytes, 500, num_columns=2) for _ in range(2))
    lengths = [20, 30, 20] if row_bytes > 1000 else [3, 1, 2]
    extents = together.place_all(lengths)
    assert extents == [alone.place(num_rows) for num_rows in lengths]
    assert together.place(2) == alone.place(2)
    alone.close()
    together.close()


def test_many_extents_are_placed_at_once_only_where_it_is_simple(small_limit: int) -> None:
    lane = make_lane(4096, 4 * HUGE_PAGE // 4096)
    assert lane.place_all([1, 400]) is None  # dense and mappable
    assert lane.place_all([2000, 200]) is None  # more than there is
    extents = lane.place_all([400, 400, 400, 400])
    assert extents is not None
    assert lane.place_all([400, 400]) is None  # behind the newest there is too little left
    lane.release(extents[0])
    assert lane.place(400) is not None  # the ring turns
    lane.close()


def test_extents_of_2_mib_start_on_huge_pages() -> None:
    lane = make_lane(4096, 100_000)
    lane.place(10)
    extents = [lane.place(512), lane.place(513), lane.place(511)]
    lane.close()
    assert extents == [
        Extent(1 * HUGE_PAGE, 2 * HUGE_PAGE, True),
        Extent(2 * HUGE_PAGE, 4 * HUGE_PAGE, True),
        Extent(4 * HUGE_PAGE, 4 * HUGE_PAGE + 511 * 4096, True),
    ]


def test_few_rows_of_12289_bytes_are_dense_and_many_are_mappable() -> None:
    """No factor is shared with the page, so a page boundary comes every 4,096 rows."""
    lane = make_lane(12_289, 100_000)
    few, many, next_few = lane.place(63), lane.place(64), lane.place(1)
    lane.close()
    step = 12_289 * 4096
    assert few == Extent(0, 63 * 12_289, False)
    assert many == Extent(step, 2 * step, True)
    assert next_few == Extent(2 * step, 2 * step + 12_289, False)


def test_lane_that_cannot_be_mapped_is_dense_whatever_the_size() -> None:
    lane = make_lane(4096, 100_000, can_map=False)
    extents = [lane.place(1), lane.place(1000)]
    lane.close()
    assert extents == [Extent(0, 4096, False), Extent(4096, 1001 * 4096, False)]


def test_columns_of_equal_row_size_share_a_lane_and_text_has_its_own() -> None:
    columns = (
        Column(("a",), "float32", (2,)),
        Column(("b",), "int64", ()),
        Column(("c",), "text", ()),
        Column(("d",), "int32", ()),
        Column(("e",), "uint8", (0,)),
    )
    lanes = lanes_of(columns, 1000, can_map=True)
    positions = [lane.positions for lane in lanes]
    shapes = [[array.shape[1:] for array in lane.arrays] for lane in lanes]
    for lane in lanes:
        lane.close()
    assert positions == [[0, 1], [2], [3]]
    assert shapes == [[(2,), ()], [()], [()]]


def test_no_room_is_none_and_there_is_room_again_after_a_release() -> None:
    ring = Ring(make_lane(4096, 512))
    assert [ring.place(200), ring.place(200), ring.place(200)] == [True, True, False]
    ring.release()
    assert [ring.place(200), ring.place(200)] == [True, False]
    ring.check_all()
    ring.lane.close()


def test_extent_as_large_as_the_lane_fits_once() -> None:
    ring = Ring(make_lane(4096, 512))
    assert [ring.place(512), ring.place(1)] == [True, False]
    ring.release()
    assert ring.place(512)
    ring.lane.close()


def test_extent_larger_than_the_lane_never_fits() -> None:
    lane = make_lane(4096, 512)
    extent = lane.place(513)
    lane.close()
    assert extent is None


def test_no_extent_straddles_the_end() -> None:
    ring = Ring(make_lane(4096, 512))
    starts = []
    for _ in range(20):
        if len(ring.live) == 2:
            ring.release()
        assert ring.place(150)
        starts.append(ring.live[-1][1].start // 4096)
    ring.lane.close()
    assert starts[:7] == [0, 150, 300, 0, 150, 300, 0]


def test_pages_are_released_only_with_the_last_rows_on_them() -> None:
    """Dense neighbours share a page."""
    ring = Ring(make_lane(1000, 4096))
    for _ in range(9):
        ring.place(1)
    for _ in range(8):
        ring.release()
        ring.check_all()
    ring.lane.close()


def test_extents_released_out_of_order_wait_for_the_oldest() -> None:
    ring = Ring(make_lane(4096, 512))
    for _ in range(4):
        ring.place(128)
    ring.release(1)
    ring.release(1)
    assert not ring.place(1)
    ring.release(0)
    assert ring.place(384)
    ring.check_all()
    ring.lane.close()


def test_ring_that_ran_empty_before_it_turned_never_overlaps(small_limit: int) -> None:
    """The oldest row is then the first one of the ring, not where the last one was released."""
    ring = Ring(make_lane(4096, 1 << 20))
    for _ in range(3):
        ring.place(160)
    for _ in range(3):
        ring.release()
    for _ in range(4):
        ring.place(160)
    ring.check_all()
    ring.lane.close()


def test_ring_that_turned_still_grows(small_limit: int) -> None:
    """None means that the range is full: here a thousandth of it is live."""
    ring = Ring(make_lane(4096, 1 << 20))
    for num_rows in [32] * 50 + [192] * 50:
        assert ring.place(num_rows), f"no room for {num_rows} rows beside {len(ring.live)} extents"
        if len(ring.live) > 5:
            ring.release()
    ring.lane.close()


LENGTHS = {
    36: (1, 40, 455, 456, 2000),
    1000: (1, 3, 16, 17, 300),
    4096: (1, 3, 4, 100, 512, 600),
    12_289: (1, 2, 20, 63),
}


@pytest.mark.parametrize("row_bytes", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_extents_never_overlap_however_often_the_ring_turns(row_bytes: int, seed: int) -> None:
    """FIFO and slightly out of order, with a lane that holds little more than what is live."""
    choose = random.Random(seed)
    ring = Ring(make_lane(row_bytes, 3 * HUGE_PAGE // row_bytes, num_columns=2))
    for step in range(500):
        if ring.live and (
            choose.random() < 0.45 or not ring.place(choose.choice(LENGTHS[row_bytes]))
        ):
            ring.release(choose.randrange(min(3, len(ring.live))))
        if step % 100 == 99:
            ring.check_all()
    ring.check_all()
    while ring.live:
        ring.release()
    assert ring.place(1)
    ring.lane.close()


@given(
    st.sampled_from([1000, 4096, 8192]),
    st.lists(
        st.one_of(
            st.integers(1, 400),
            st.just(0),
            st.just(-1),
            st.lists(st.one_of(st.integers(1, 30), st.just(300)), min_size=1, max_size=20),
        ),
        max_size=60,
    ),
)
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_order_of_place_and_release_keeps_rows_intact(
    row_bytes: int, steps: list[int | list[int]]
) -> None:
    """``n``: place n rows, or all of a list; 0: release the oldest; -1: the second oldest."""
    ring = Ring(make_lane(row_bytes, HUGE_PAGE // row_bytes))
    try:
        for step in steps:
            if isinstance(step, list):
                ring.place_all(step)
            elif step > 0:
                ring.place(step)
            elif len(ring.live) + step > 0:
                ring.release(-step)
        ring.check_all()
    finally:
        ring.lane.close()


def test_soft_limit_keeps_the_ring_near_what_is_live(small_limit: int) -> None:
    """Addresses that were ever used bound the page tables."""
    ring = Ring(make_lane(4096, 1 << 20))
    highest = 0
    for _ in range(500):
        if len(ring.live) == 4:
            ring.release()
        assert ring.place(32)
        highest = max(highest, ring.live[-1][1].stop)
    ring.lane.close()
    assert highest <= HUGE_PAGE


def test_soft_limit_doubles_until_what_is_live_fits(small_limit: int) -> None:
    ring = Ring(make_lane(4096, 1 << 20))
    for _ in range(60):
        assert ring.place(100)
    highest = max(extent.stop for _, extent, _ in ring.live)
    ring.check_all()
    ring.lane.close()
    assert highest == 60 * 100 * 4096


@pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
@pytest.mark.parametrize(("row_bytes", "num_rows"), [(4096, 512), (1000, 16), (12_289, 50)])
def test_memory_is_flat_however_often_the_ring_turns(row_bytes: int, num_rows: int) -> None:
    size = num_rows * row_bytes
    ring = Ring(make_lane(row_bytes, 12 * MIB // row_bytes))
    for _ in range(4):
        ring.place(num_rows)
    before = data.anonymous_bytes()
    for _ in range(60 * MIB // size):
        ring.release()
        assert ring.place(num_rows)
    after = data.anonymous_bytes()
    ring.lane.close()
    assert after - before < 2 * MIB


@pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
def test_memory_of_released_extents_is_given_back() -> None:
    ring = Ring(make_lane(4096, 1 << 20))
    before = data.anonymous_bytes()
    for _ in range(10):
        ring.place(1024)
    held = data.anonymous_bytes()
    for _, extent, _ in ring.live:
        ring.lane.release(extent)
    after = data.anonymous_bytes()
    ring.lane.close()
    assert held - before > 39 * MIB
    assert after - before < 3 * MIB


def test_range_that_cannot_be_reserved_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    closed: list[int] = []

    class Range(lane_module.AddressRange):
        def __init__(self, size_bytes: int) -> None:
            if len(made) == 2:
                raise OSError(12, "no more")
            super().__init__(size_bytes)
            made.append(self.address)

        def close(self) -> None:
            closed.append(self.address)
            super().close()

    monkeypatch.setattr(lane_module, "AddressRange", Range)
    columns = tuple(Column((f"c{i}",), "uint8", (i + 1,)) for i in range(3))
    with pytest.raises(OSError, match="no more"):
        lanes_of(columns, 1000, can_map=True)
    assert (len(made), sorted(closed)) == (2, sorted(made))
