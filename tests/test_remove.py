"""TrajectoryCache.remove: written trajectories leave the window, wherever they lie in it."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest

from mmbuf import EmptyBufferError, files, index, vm
from mmbuf.cache import TrajectoryCache
from mmbuf.places import Slot
from mmbuf.schema import Array

pytestmark = pytest.mark.usefixtures("without_fsync")
LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MILLION = 1_000_000
COUNT = 12
LENGTHS = [6 + 3 * (i % 5) for i in range(COUNT)]
IMAGE = (32, 32, 3)  # of 6 rows and more: mapped; the other columns are copied


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of `COUNT` trajectories."""
    path = tmp_path_factory.mktemp("remove") / "store"
    with data.opened(path) as buffer:
        for i, length in enumerate(LENGTHS):
            buffer.add_trajectories([data.coded(i, length, image=IMAGE)])
    return path


class Cached:
    """A cache over the files of a store, and the numbers of the trajectories that it holds."""

    def __init__(self, directory: Path, **options: Any) -> None:
        contents, _ = index.read(str(directory))
        assert contents.schema is not None
        self.entries = [
            (entry, files.join(str(directory), entry.file)) for entry in contents.entries.values()
        ]
        self.schema = contents.schema
        self.cache = TrajectoryCache(self.schema, **options)
        self.slots: list[tuple[int, Slot]] = []

    def open(self, *numbers: int) -> None:
        slots = self.cache.open([self.entries[i] for i in numbers])
        self.slots += zip(numbers[len(numbers) - len(slots) :], slots, strict=True)

    def remove(self, *numbers: int) -> None:
        self.cache.remove([slot for i, slot in self.slots if i in numbers])
        self.slots = [(i, slot) for i, slot in self.slots if i not in numbers]

    def fill(self, *numbers: int) -> None:
        for i in numbers:
            self.gather(lambda low, high, i=i: low + self.first_row(i) + np.arange(1))

    def first_row(self, number: int) -> int:
        order = [i for i, _ in self.slots]
        return sum(LENGTHS[i] for i in order[: order.index(number)])

    def gather(self, draw: Callable[[int, int], Array] = np.arange) -> Any:
        """Codes of all rows by default, each row checked."""
        return data.codes_of(self.schema.nest(self.cache.gather(draw)[1]))

    def check(self) -> None:
        """That all rows of the window are there, in their order, and no others."""
        numbers = [i for i, _ in self.slots]
        stats = self.cache.get_stats()
        assert stats["window_trajectories"] == len(numbers)
        assert stats["window_samples"] == sum(LENGTHS[i] for i in numbers)
        if numbers:
            assert self.gather().tolist() == codes(*numbers)
        else:
            with pytest.raises(EmptyBufferError):
                self.gather()


def codes(*numbers: int) -> list[int]:
    return [i * MILLION + row for i in numbers for row in range(LENGTHS[i])]


@pytest.fixture
def new_cache(directory: Path) -> Iterator[Callable[..., Cached]]:
    made: list[Cached] = []

    def make(**options: Any) -> Cached:
        made.append(Cached(directory, **options))
        return made[-1]

    yield make
    for cached in made:
        cached.cache.close()


def deleted_maps(path: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(path) in line and line.endswith("(deleted)") for line in lines)


GONE = {
    "the oldest": [0],
    "the oldest few": [0, 1, 2],
    "one in the middle": [5],
    "several in the middle": [3, 4, 8],
    "the newest": [11],
    "the oldest and some in the middle": [0, 1, 6],
    "both ends": [0, 11],
    "every second": list(range(0, COUNT, 2)),
    "all but one": [i for i in range(COUNT) if i != 7],
    "all": list(range(COUNT)),
    "none": [],
}
FILLED = {
    "none": [],
    "some": [1, 4, 5, 8],
    "all": list(range(COUNT)),
}


@pytest.mark.parametrize("filled", FILLED)
def test_all_others_stay_with_every_row(new_cache: Callable[..., Cached], filled: str) -> None:
    for gone in GONE.values():
        cached = new_cache()
        cached.open(*range(COUNT))
        cached.fill(*FILLED[filled])
        cached.remove(*gone)
        stats = cached.cache.get_stats()
        assert stats["cache_size"] == COUNT - len(gone)
        assert stats["cache_filled"] == len(set(FILLED[filled]) - set(gone))
        cached.check()
        cached.check()  # all filled now


@pytest.mark.parametrize("cache_size", [0, 4])
def test_trajectories_without_a_place_leave_as_well(
    new_cache: Callable[..., Cached], cache_size: int
) -> None:
    for gone in GONE.values():
        cached = new_cache(cache_size=cache_size)
        cached.open(*range(COUNT))
        cached.remove(*gone)
        cached.check()


def test_others_may_come_and_leave_afterwards(new_cache: Callable[..., Cached]) -> None:
    for gone in GONE.values():
        cached = new_cache()
        cached.open(*range(COUNT))
        cached.gather()
        cached.remove(*gone)
        cached.open(*gone)
        cached.check()
        for i, _ in list(cached.slots):
            cached.remove(i)
            cached.check()
        assert cached.cache.get_stats()["cache_maps"] == 0


def test_what_has_left_may_be_removed_again(new_cache: Callable[..., Cached]) -> None:
    cached = new_cache()
    cached.open(*range(COUNT))
    slots = [slot for _, slot in cached.slots]
    cached.remove(0, 5)
    cached.cache.remove([slots[0], slots[5]])
    cached.check()


def test_the_window_goes_on_to_slide(new_cache: Callable[..., Cached]) -> None:
    cached = new_cache(window_size=6)
    cached.open(*range(8))
    cached.remove(4)
    cached.open(8, 9, 10)
    del cached.slots[0:2]
    assert [i for i, _ in cached.slots] == [5, 6, 7, 8, 9, 10]
    cached.check()


def test_a_trajectory_has_no_number_that_another_had(new_cache: Callable[..., Cached]) -> None:
    cached = new_cache()
    cached.open(*range(COUNT))
    before = {slot.number for _, slot in cached.slots}
    cached.remove(3)
    between = {slot.number for _, slot in cached.slots}
    cached.open(3)
    cached.remove(0)
    after = [slot.number for _, slot in cached.slots]
    assert not before & between
    assert after == sorted(after)
    cached.check()


def test_numbers_of_what_has_left_are_forgotten(new_cache: Callable[..., Cached]) -> None:
    cached = new_cache()
    cached.open(*range(COUNT))
    for i in (5, 0, 11, 7):
        cached.remove(i)
        cached.open(i)
        assert len(cached.cache._slots) == COUNT


# -- beside gathers --------------------------------------------------------------------------


class Held:
    """A gather of the whole window that has begun and waits."""

    def __init__(self, cached: Cached) -> None:
        self._begun, self._may_go_on = threading.Event(), threading.Event()
        self._codes: list[int] = []
        self._thread = threading.Thread(target=self._gather, args=(cached,))
        self._thread.start()
        assert self._begun.wait(60)

    def _gather(self, cached: Cached) -> None:
        def draw(low: int, high: int) -> Array:
            if not self._begun.is_set():
                self._begun.set()
                assert self._may_go_on.wait(60)
            return np.arange(low, high)

        self._codes = cached.gather(draw).tolist()

    def result(self) -> list[int]:
        self._may_go_on.set()
        self._thread.join(60)
        return self._codes


@pytest.mark.parametrize("gone", ["the oldest", "several in the middle", "all but one", "none"])
def test_a_gather_that_has_begun_ends_with_the_rows_that_were_there(
    new_cache: Callable[..., Cached], gone: str
) -> None:
    cached = new_cache()
    cached.open(*range(COUNT))
    cached.gather()
    used = vm.MAPS.used
    held = Held(cached)
    cached.remove(*GONE[gone])
    assert vm.MAPS.used == used
    assert cached.cache.has_evicted == bool(GONE[gone])
    cached.check()
    assert held.result() == codes(*range(COUNT))
    cached.cache.reclaim()
    assert not cached.cache.has_evicted
    cached.check()
    assert vm.MAPS.used == cached.cache.get_stats()["cache_maps"] < used + (not GONE[gone])


@pytest.mark.parametrize("gone", ["the oldest", "one in the middle", "both ends", "all but one"])
def test_a_gather_of_files_that_go_is_begun_anew(
    tmp_path: Path, directory: Path, gone: str
) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    cached = Cached(tmp_path)
    try:
        cached.open(*range(COUNT))
        cached.fill(2, 9)
        held = Held(cached)
        cached.remove(*GONE[gone])
        for i in GONE[gone]:
            Path(cached.entries[i][1]).unlink()
        assert held.result() == codes(*(i for i in range(COUNT) if i not in GONE[gone]))
        cached.check()
    finally:
        cached.cache.close()


def test_a_place_is_given_back_once_though_gathers_know_its_slot_by_two_numbers(
    new_cache: Callable[..., Cached],
) -> None:
    cached = new_cache()
    before = vm.MAPS.used
    cached.open(*range(COUNT))
    cached.gather()
    held = Held(cached)
    cached.remove(5)
    cached.cache.clear()
    assert held.result() == codes(*range(COUNT))
    cached.cache.reclaim()
    assert vm.MAPS.used == before


@LINUX_ONLY
@pytest.mark.parametrize("gone", ["the oldest", "one in the middle", "the newest", "all"])
def test_the_pages_of_deleted_files_are_given_back_wherever_they_lay(
    tmp_path: Path, directory: Path, gone: str
) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    cached = Cached(tmp_path)
    try:
        cached.open(*range(COUNT))
        cached.gather()
        for i in GONE[gone]:
            Path(cached.entries[i][1]).unlink()
        assert deleted_maps(tmp_path) > 0
        cached.remove(*GONE[gone])
        assert deleted_maps(tmp_path) == 0
        cached.check()
    finally:
        cached.cache.close()


@LINUX_ONLY
def test_the_memory_of_copied_columns_is_given_back_wherever_they_lay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm, "MAP_THRESHOLD", 1 << 30)
    with data.opened(tmp_path) as buffer:
        for i in range(20):
            buffer.add_trajectories([data.coded(i, 300, image=IMAGE)])  # 0.9 MB
        buffer.flush()
        entries = [(e, str(tmp_path / e.file)) for e in buffer._window.entries.values()]
        schema = buffer._window.schema
    assert schema is not None
    copied = TrajectoryCache(schema)
    slots = copied.open(entries)
    for _ in range(3):
        copied.gather(lambda low, high: np.arange(low, high, 100))
    before = data.anonymous_bytes()
    copied.remove(slots[1:])
    after = data.anonymous_bytes()
    left = data.codes_of(schema.nest(copied.gather(np.arange)[1]))
    copied.close()
    assert left.tolist() == list(range(300))
    assert before - after > 15 << 20


@pytest.mark.parametrize("seed", range(4))
def test_gathers_never_see_a_row_of_several_while_trajectories_come_and_go(
    new_cache: Callable[..., Cached], seed: int
) -> None:
    cached = new_cache(cache_size=[None, 6, None, 0][seed])
    cached.open(*range(COUNT))
    stop = threading.Event()
    failures: list[BaseException] = []
    counts = [0, 0, 0]

    def gather(thread: int) -> None:
        generator = np.random.default_rng([seed, thread])
        try:
            while not stop.is_set():
                got = cached.gather(lambda low, high: generator.integers(low, high, 40))
                rows = got % MILLION
                assert (rows < np.array(LENGTHS)[got // MILLION]).all()
                counts[thread] += 1
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=gather, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    pick = random.Random(seed)
    for step in range(150):
        here = [i for i, _ in cached.slots]
        away = [i for i in range(COUNT) if i not in here]
        if away and pick.random() < 0.5:
            cached.open(*pick.sample(away, pick.randint(1, len(away))))
        elif len(here) > 1:
            cached.remove(*pick.sample(here, pick.randint(1, len(here) - 1)))
        if step % 25 == 0:
            cached.cache.drop_pages()
        if failures:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(counts) > 0
    cached.check()
    cached.cache.reclaim()
    assert cached.cache._busy == [] or not cached.cache.has_evicted
    assert len(cached.cache._slots) == len(cached.slots)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_open_remove_fill_and_drop_keeps_every_row(
    new_cache: Callable[..., Cached], seed: int
) -> None:
    pick = random.Random(seed)
    cached = new_cache(cache_size=pick.choice([None, None, 0, 3, 8]))
    for _ in range(60):
        here = [i for i, _ in cached.slots]
        away = [i for i in range(COUNT) if i not in here]
        what = pick.random()
        if what < 0.4 and away:
            cached.open(*pick.sample(away, pick.randint(1, len(away))))
        elif what < 0.7 and here:
            cached.remove(*pick.sample(here, pick.randint(1, len(here))))
        elif what < 0.8:
            cached.cache.drop_pages()
        elif what < 0.85:
            cached.cache.clear()
            cached.slots.clear()
        elif here:
            cached.fill(*pick.sample(here, pick.randint(1, len(here))))
        if pick.random() < 0.5:
            cached.check()
    cached.check()
