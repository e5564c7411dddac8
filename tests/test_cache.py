"""The cache and what stands on it, by the rules that make it safe (R1 to R8 in docstrings).

R1 rows come back bit for bit at every moment; R2 nothing that points into a range leaves the cache;
R3 addresses are taken away only after the gathers that may look at them; R4 what is not written is
not evicted; R5 the index names complete files, which nothing writes to; R6 no shared writable
mapping; R7 a file's size is checked before it is mapped; R8 a rewire cannot lose rows.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import torch

from mmbuf import (
    CorruptError,
    EmptyBufferError,
    ReplayReader,
    TrajectoryReplayBuffer,
    WriteError,
    cache,
    files,
    lane,
    vm,
)
from mmbuf.cache import TrajectoryCache
from mmbuf.entry import Entry
from mmbuf.formats import arrow
from mmbuf.index import TrajectoryIndex
from mmbuf.places import Places, Slot
from mmbuf.schema import Array, Payload, measure

IS_LINUX = sys.platform.startswith("linux")
linux_only = pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
MILLION = 1_000_000
MIB = 1 << 20


# -- what the tests are made of ------------------------------------------------------------------


class Store:
    """A cache whose trajectories are written step by step, as the writer does it."""

    def __init__(self, directory: Path, example: dict[str, Any], **options: Any) -> None:
        self.directory = directory
        self.schema = measure(example).schema
        self.cache = TrajectoryCache(self.schema, **options)

    def put(self, i: int, fields: dict[str, Any], *, is_written: bool = False) -> Slot | None:
        payload = measure(fields, self.schema)
        entry = Entry(f"{i:032x}", i, payload.shape)
        return self.cache.put(entry, payload, is_written=is_written)

    def write(self, slot: Slot) -> tuple[Entry, str]:
        name = f"trajectory_{slot.entry.trajectory_id}_.arrow"
        rows, texts = self.cache.lend(slot)
        entry = dataclasses.replace(slot.entry, file=name)
        path = str(self.directory / name)
        return arrow.write(path, entry, self.schema, rows, texts), path

    def publish(self, slot: Slot | None) -> None:
        assert slot is not None
        self.cache.written(slot, *self.write(slot))

    def gather(self, draw: Callable[[int, int], Array] = np.arange) -> dict[str, Any]:
        """By default all rows of the window, oldest first."""
        return self.schema.nest(self.cache.gather(draw)[1])

    def codes(self) -> list[int]:
        return data.codes_of(self.gather()).tolist()  # type: ignore[no-any-return]


@pytest.fixture
def new_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Store]]:
    """Closed at the end, before ``monkeypatch`` is undone."""
    stores: list[Store] = []

    def make(example: dict[str, Any] | None = None, **options: Any) -> Store:
        stores.append(Store(tmp_path, example or data.coded(0, 1), **options))
        return stores[-1]

    yield make
    for store in stores:
        store.cache.close()


class Gate:
    """A place where another thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._opened.wait(60), "the gate stayed shut"

    def wait(self) -> None:
        assert self._reached.wait(60), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def writer_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Shut before a file that is written gets its name."""
    gate, rename = Gate(), files.rename

    def wait_and_rename(source: str, target: str) -> None:
        gate.pass_through()
        rename(source, target)

    monkeypatch.setattr(files, "rename", wait_and_rename)
    yield gate
    gate.open()


class InThread:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.failure: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as failure:
            self.failure = failure

    def is_done_within(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self) -> Any:
        assert self.is_done_within(60), "the thread did not end"
        if self.failure is not None:
            raise self.failure
        return self.result


def hold_gather(store_cache: TrajectoryCache) -> tuple[Gate, InThread]:
    """A gather of the whole window that has begun and waits."""
    gate = Gate()

    def draw(low: int, high: int) -> Array:
        gate.pass_through()
        return np.arange(low, high)

    held = InThread(lambda: store_cache.gather(draw)[1])
    gate.wait()
    return gate, held


def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that turn after 2 MiB already."""
    monkeypatch.setattr(lane, "_FIRST_LIMIT", 2 * MIB)


def all_codes(*lengths: int, first: int = 0) -> list[int]:
    return [i * MILLION + row for i, n in enumerate(lengths, first) for row in range(n)]


def drawn(sampled: TrajectoryReplayBuffer | ReplayReader, count: int = 400) -> set[int]:
    """The ids of the trajectories of ``count`` rows, each row checked."""
    return set((data.codes_of(sampled.sample(count)) // MILLION).tolist())


def window_codes(sampled: TrajectoryReplayBuffer | ReplayReader) -> list[int]:
    """The codes of all rows of the window, oldest first."""
    inner = sampled._window.cache
    assert inner is not None
    return data.codes_of(inner.schema.nest(inner.gather(np.arange)[1])).tolist()  # type: ignore[no-any-return]


def saving(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(path / "store"), **options)


def addresses_of(store_cache: TrajectoryCache) -> list[tuple[int, int]]:
    return [
        (range_.address, range_.address + range_.size_bytes)
        for each in store_cache._places.lanes
        for range_ in each.ranges
    ]


def looks_into(leaf: Any, ranges: list[tuple[int, int]]) -> bool:
    if isinstance(leaf, dict):
        return any(looks_into(value, ranges) for value in leaf.values())
    if isinstance(leaf, list):
        return False
    address = leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.ctypes.data
    return any(start <= address < stop for start, stop in ranges)


def flat(leaf: Any) -> Any:
    """``[T, B, ...]`` leaves as rows."""
    if isinstance(leaf, dict):
        return {name: flat(value) for name, value in leaf.items()}
    return leaf.flatten(0, 1) if isinstance(leaf, torch.Tensor) else list(chain(*leaf))


def mapped_files(path: Path) -> dict[str, str]:
    """Files below ``path`` that are mapped: name and permissions."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            found[line.split(maxsplit=5)[5].rsplit("/", 1)[1]] = line.split()[1]
    return found


def count_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the data files that are opened for reading from now on."""
    opens: list[str] = []
    opened = files.opened

    def count(path: str) -> Any:
        if not path.endswith(".jsonl"):
            opens.append(os.path.basename(path))
        return opened(path)

    monkeypatch.setattr(files, "opened", count)
    return opens


def out_of_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


# -- R1 ------------------------------------------------------------------------------------------


def test_rows_are_right_before_during_and_after_the_write(
    tmp_path: Path, writer_gate: Gate
) -> None:
    """R1."""
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 30, 2), data.coded(1, 1)])
        before = window_codes(buffer)
        writer_gate.wait()
        during = window_codes(buffer)
        writer_gate.open()
        buffer.flush()
        after = window_codes(buffer)
        maps = buffer.get_stats()["cache_maps"]
    assert before == during == after == all_codes(60, 1)
    assert maps == (1 if vm.CAN_REWIRE else 0)


@pytest.mark.skipif(not vm.CAN_REWIRE, reason="nothing is rewired")
def test_rows_are_right_between_the_rewires_of_two_columns(
    new_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1."""
    fields = data.coded(0, 600)
    store = new_store(fields)
    seen: list[list[int]] = []
    rewire = vm.AddressRange.rewire

    def look_and_rewire(*arguments: Any) -> None:
        seen.append(store.codes())
        rewire(*arguments)

    monkeypatch.setattr(vm.AddressRange, "rewire", look_and_rewire)
    store.publish(store.put(0, fields))
    assert len(seen) == 2  # states and image
    assert all(codes == all_codes(600) for codes in [*seen, store.codes()])


@pytest.mark.parametrize("cache_size", [None, 0])
def test_bits_of_every_dtype_come_back_at_every_moment(
    new_store: Callable[..., Store], cache_size: int | None
) -> None:
    """R1: NaN payloads too, of small columns and of mapped ones; then read back from the file."""
    num_rows = 300
    fields: dict[str, Any] = {}
    for shape in ((), (1,), (3, 2), (64,)):
        for dtype in data.DTYPES:
            name = f"{dtype}{shape}".replace(".", "")
            fields[name] = data.random_bits(dtype, (num_rows, 1, *shape), len(fields))
    store = new_store(fields, cache_size=cache_size)
    order = np.random.default_rng(0).permutation(num_rows)
    expected = [data.bits(leaf[:, 0][torch.from_numpy(order)]) for leaf in fields.values()]

    def found() -> list[bytes]:
        _, leaves = store.cache.gather(lambda low, _: low + order)
        return [data.bits(leaf) for leaf in leaves]

    slot = store.put(0, fields)
    before = found()
    store.publish(slot)
    after = found()
    store.cache.drop_pages()
    assert before == after == found() == expected


def test_rows_in_out_equal_rows_of_a_new_batch(tmp_path: Path) -> None:
    """R1."""
    with saving(tmp_path, cache_size=1) as buffer:
        buffer.add_trajectories([data.coded(i, 40, 2) for i in range(3)])
        out = buffer.sample(500)
        for _ in range(3):
            addresses = out["curr_obs"]["image"].data_ptr()
            for leaf in (out["actions"], out["rewards"], out["curr_obs"]["image"]):
                leaf.zero_()
            assert buffer.sample(500, out=out) is out
            assert out["curr_obs"]["image"].data_ptr() == addresses
            assert set((data.codes_of(out) // MILLION).tolist()) == {0, 1, 2}
            buffer.flush()


def test_trajectories_of_other_lengths_and_widths_keep_their_rows(tmp_path: Path) -> None:
    shapes = [(1, 1), (7, 3), (1, 16), (250, 1), (2, 2), (33, 9), (1, 1)]
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, t, b) for i, (t, b) in enumerate(shapes)])
        before = window_codes(buffer)
        buffer.flush()
        after = window_codes(buffer)
        whole = [buffer.get_trajectory(i) for i in range(len(shapes))]
    assert before == after == all_codes(*(t * b for t, b in shapes))
    assert [tuple(trajectory.actions.shape) for trajectory in whole] == [
        (t, b, 2) for t, b in shapes
    ]


def test_one_step_of_one_environment_can_be_drawn_many_times(tmp_path: Path) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 1, 1)])
        buffer.flush()
        assert data.codes_of(buffer.sample(9)).tolist() == [0] * 9


def test_200_001_steps_come_back_in_order(tmp_path: Path) -> None:
    fields = {"rewards": torch.arange(200_001).reshape(-1, 1), "flags": torch.ones(200_001, 1) == 1}
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([fields])
        buffer.flush()
        inner = buffer._window.cache
        assert inner is not None
        rows = inner.gather(np.arange)[1][0]
        whole = buffer.get_trajectory(0).rewards
    assert np.array_equal(rows, np.arange(200_001))
    assert torch.equal(whole, fields["rewards"])


def test_20_000_trajectories_of_three_rows_can_be_sampled(new_store: Callable[..., Store]) -> None:
    fields = {"x": np.zeros((3, 1), np.int64), "y": np.zeros((3, 1, 2), np.float32)}
    store = new_store(fields)
    for i in range(20_000):
        fields["x"][:, 0] = 3 * i + np.arange(3)
        fields["y"][:, 0] = (3 * i + np.arange(3))[:, None]
        store.put(i, fields, is_written=True)
    batch = store.gather()
    assert np.array_equal(batch["x"], np.arange(60_000))
    assert np.array_equal(batch["y"], np.stack([np.arange(60_000)] * 2, 1).astype(np.float32))


@pytest.mark.parametrize("num_steps", [1, 5, 63, 64, 130])
def test_rows_of_12_289_bytes_come_back(tmp_path: Path, num_steps: int) -> None:
    """Their size shares no factor with a page: 63 rows and less are copied, more are mapped."""
    lengths = [num_steps, 1, num_steps]
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, n, image=(12_289,)) for i, n in enumerate(lengths)])
        before = window_codes(buffer)
        buffer.flush()
        after = window_codes(buffer)
        buffer.clear_cache()
        again = window_codes(buffer)
    assert before == after == again == all_codes(*lengths)


# -- R2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 2000])
@pytest.mark.parametrize("cache_size", [None, 1])
def test_no_batch_looks_into_a_range(tmp_path: Path, count: int, cache_size: int | None) -> None:
    """R2."""
    with saving(tmp_path, cache_size=cache_size) as buffer:
        buffer.add_trajectories([data.coded(i, 50) for i in range(3)])
        inner = buffer._window.cache
        assert inner is not None
        ranges = addresses_of(inner)
        batches = [buffer.sample(count)]
        buffer.flush()
        batches += [buffer.sample(count)]
        batches += [buffer.sample(count, out=batches[0])]
        assert not any(looks_into(batch, ranges) for batch in batches)
        lanes = inner._places.lanes
        leaf = batches[1]["curr_obs"]["image"].numpy()
        assert not any(np.shares_memory(leaf, array) for each in lanes for array in each.arrays)


def test_changing_a_batch_changes_nothing_else(tmp_path: Path) -> None:
    """R2."""
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 40)])
        for _ in range(2):
            batch = buffer.sample(400)
            for leaf in (batch["actions"], batch["rewards"], batch["curr_obs"]["image"]):
                leaf.fill_(77)
            assert window_codes(buffer) == all_codes(40)
            buffer.flush()


@pytest.mark.parametrize("auto_save", [True, False])
def test_trajectory_that_is_got_is_private_and_writable(tmp_path: Path, auto_save: bool) -> None:
    """R2."""
    with TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=str(tmp_path)) as buffer:
        buffer.add_trajectories([data.coded(0, 40, 2)])
        buffer.flush()
        contents = data.contents_of(tmp_path)
        first = buffer.get_trajectory(0)
        inner = buffer._window.cache
        assert inner is not None
        assert not looks_into(first.to_columns(), addresses_of(inner))
        first.curr_obs["image"].fill_(1)
        first.actions.fill_(2)
        second = buffer.get_trajectory(0)
        assert window_codes(buffer) == all_codes(80)
        assert second.actions[:, :, 0].reshape(-1).tolist() == all_codes(80)
        assert data.contents_of(tmp_path) == contents
        assert int(first.actions.min()) == int(first.actions.max()) == 2


@pytest.mark.parametrize("auto_save", [True, False])
def test_trajectory_that_is_held_outlives_eviction_clearing_and_closing(
    tmp_path: Path, auto_save: bool
) -> None:
    """R2."""
    buffer = TrajectoryReplayBuffer(
        auto_save=auto_save, auto_save_path=str(tmp_path), sample_window_size=2
    )
    buffer.add_trajectories([data.coded(0, 40, 2)])
    buffer.flush()
    held = buffer.get_trajectory(0)
    buffer.add_trajectories([data.coded(i, 40, 2) for i in range(1, 5)])
    buffer.flush()
    buffer.clear()
    buffer.close()
    assert data.codes_of(flat(held.to_columns())).tolist() == all_codes(80)


# -- R3 ------------------------------------------------------------------------------------------


def stress(buffer: TrajectoryReplayBuffer, rounds: int, window: int, *, clears: bool) -> int:
    """Add, write, rewire and evict while two threads gather. How many rows were checked.

    Each drawn row has to be whole, and of a trajectory that was in the window while it was drawn.
    """
    started = added = 0
    is_over = threading.Event()
    generator = np.random.default_rng(rounds)

    def gather(number: int) -> int:
        checked = 0
        out: Any = None
        while not is_over.is_set():
            oldest = max(0, added - window)
            count = 300 if checked % 2 else 50  # 50: no batch of 1 MiB
            if number:
                batch = out = buffer.sample(700, out=out)
            else:
                batch = buffer.sample(count)
            newest = started - 1
            ids = data.codes_of(batch) // MILLION
            assert oldest <= ids.min(), "a row of a trajectory that had left the window"
            assert ids.max() <= newest
            checked += len(ids)
        return checked

    def add() -> None:
        nonlocal started, added
        steps, envs = int(generator.integers(1, 60)), int(generator.integers(1, 5))
        if generator.random() < 0.1:
            steps, envs = 300, 3  # an image column of more than a huge page
        fields = data.coded(started, steps, envs)
        started += 1
        buffer.add_trajectories([fields])
        added += 1

    add()
    threads = [InThread(lambda number=number: gather(number)) for number in range(2)]
    try:
        for _ in range(rounds):
            add()
            if clears and generator.random() < 0.3:
                buffer.clear_cache()
            if generator.random() < 0.1:
                buffer.flush()
            if not all(thread.failure is None for thread in threads):
                break
    finally:
        is_over.set()
    checked = sum(thread.join() for thread in threads)
    buffer.flush()
    assert min(data.codes_of(buffer.sample(5000)) // MILLION) == added - window
    return checked


VARIANTS: dict[str, dict[str, Any]] = {
    "all in the cache": {},
    "cache smaller than the window": {"cache_size": 2},
    "cache cleared in between": {},
    "few mappings": {},
}


def stress_variant(path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, rounds: int) -> None:
    small_rings(monkeypatch)
    if variant == "few mappings":
        monkeypatch.setattr(vm, "MAPS", vm.MapBudget(5))
    with saving(path, sample_window_size=6, **VARIANTS[variant]) as buffer:
        clears = variant in ("cache cleared in between", "few mappings")
        assert stress(buffer, rounds, 6, clears=clears) > 10_000
    assert vm.MAPS.used == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_gather_right_rows_while_others_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """R3, R1."""
    stress_variant(tmp_path, monkeypatch, variant, 120)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_gather_right_rows_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """R3, R1."""
    stress_variant(tmp_path, monkeypatch, variant, 3000)


def test_memory_only_buffer_gathers_right_rows_while_others_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R3, R1."""
    monkeypatch.setattr(lane, "_FIRST_LIMIT", 64 * MIB)
    with TrajectoryReplayBuffer(sample_window_size=6) as buffer:
        assert stress(buffer, 100, 6, clears=True) > 10_000


@pytest.mark.parametrize("auto_save", [True, False])
def test_adding_does_not_wait_for_a_gather_whose_rows_are_evicted(
    tmp_path: Path, auto_save: bool
) -> None:
    """R3: what the gather looks at stays until it ends."""
    with TrajectoryReplayBuffer(
        auto_save=auto_save, auto_save_path=str(tmp_path), sample_window_size=2
    ) as buffer:
        buffer.add_trajectories([data.coded(i, 300) for i in range(2)])
        buffer.flush()
        inner = buffer._window.cache
        assert inner is not None
        gate, held = hold_gather(inner)
        adding = InThread(
            lambda: buffer.add_trajectories([data.coded(i, 300) for i in range(2, 8)])
        )
        has_added = adding.is_done_within(20)
        buffer.flush()
        window = window_codes(buffer)
        gate.open()
        leaves = held.join()
        adding.join()
        assert has_added
        assert window == all_codes(300, 300, first=6)
        assert data.codes_of(inner.schema.nest(leaves)).tolist() == all_codes(300, 300)


@linux_only
def test_memory_of_what_is_evicted_is_given_back_when_the_gather_ends(
    new_store: Callable[..., Store],
) -> None:
    """R3."""
    fields = {"x": np.zeros((16, 1, MIB), np.uint8)}
    store = new_store(fields, window_size=1)
    store.put(0, fields, is_written=True)
    gate = Gate()

    def draw(low: int, _: int) -> Array:
        gate.pass_through()
        return np.array([low])

    held = InThread(lambda: store.cache.gather(draw)[1])
    gate.wait()
    store.put(1, fields, is_written=True)
    store.cache.reclaim()
    while_held = data.anonymous_bytes()
    gate.open()
    held.join()
    store.cache.reclaim()
    assert while_held - data.anonymous_bytes() > 14 * MIB


def test_closing_gives_nothing_back_before_the_gather_that_goes_on_has_ended(
    new_store: Callable[..., Store],
) -> None:
    """R3."""
    store = new_store()
    store.put(0, data.coded(0, 100), is_written=True)
    lanes = store.cache._places.lanes
    gate, held = hold_gather(store.cache)
    store.cache.close()
    assert all(lane.ranges for lane in lanes)
    gate.open()
    assert data.codes_of(store.schema.nest(held.join())).tolist() == all_codes(100)
    assert [lane.ranges for lane in lanes] == [[] for _ in lanes]


def test_clearing_does_not_take_rows_from_the_gather_that_goes_on(
    new_store: Callable[..., Store],
) -> None:
    """R3."""
    store = new_store()
    store.put(0, data.coded(0, 100), is_written=True)
    gate, held = hold_gather(store.cache)
    store.cache.clear()
    store.put(1, data.coded(1, 100), is_written=True)
    gate.open()
    assert data.codes_of(store.schema.nest(held.join())).tolist() == all_codes(100)
    assert store.codes() == all_codes(100, first=1)


def test_dropping_pages_does_not_take_rows_from_the_gather_that_goes_on(
    new_store: Callable[..., Store],
) -> None:
    """R3."""
    store = new_store()
    store.publish(store.put(0, data.coded(0, 100)))
    store.put(1, data.coded(1, 100))
    gate, held = hold_gather(store.cache)
    store.cache.drop_pages()
    now = store.codes()
    gate.open()
    assert now == all_codes(100, 100)
    assert data.codes_of(store.schema.nest(held.join())).tolist() == all_codes(100, 100)


@pytest.mark.parametrize("num_steps", [3, 60, 700])
def test_ring_goes_round_many_times(new_store: Callable[..., Store], num_steps: int) -> None:
    """R3."""
    fields = data.coded(0, num_steps)
    size = measure(fields).size_bytes
    store = new_store(fields, window_size=3, reserved_bytes=max(16 * MIB, 7 * size))
    rounds = 100 if num_steps < 700 else 25
    for i in range(rounds):
        slot = store.put(i, data.coded(i, num_steps))
        if slot is None:
            store.cache.reclaim()
            slot = store.put(i, data.coded(i, num_steps))
        store.publish(slot)
        first = max(0, i - 2)
        assert store.codes() == all_codes(*[num_steps] * (i + 1 - first), first=first)


def test_full_ring_refuses_and_takes_again_after_an_eviction(
    new_store: Callable[..., Store],
) -> None:
    fields = {"x": np.zeros((4, 1, MIB), np.uint8)}
    store = new_store(fields, reserved_bytes=8 * MIB)
    slots = [store.put(i, fields) for i in range(3)]
    assert [slot is None for slot in slots] == [False, False, True]
    store.publish(slots[0])
    assert store.cache.make_room()
    assert store.put(2, fields) is not None


def test_trajectory_that_can_never_fit_is_a_memory_error(new_store: Callable[..., Store]) -> None:
    fields = {"x": np.zeros((9, 1, MIB), np.uint8)}
    store = new_store(fields, reserved_bytes=8 * MIB)
    with pytest.raises(MemoryError, match="does not fit the addresses"):
        store.put(0, fields)


def test_longer_trajectories_find_room_after_the_ring_turned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_rings(monkeypatch)
    with TrajectoryReplayBuffer(sample_window_size=5) as buffer:
        for i, num_steps in enumerate([32] * 50 + [192] * 50):
            buffer.add_trajectories([{"x": np.full((num_steps, 1, 4096), i, np.uint8)}])
        assert torch.unique(buffer.sample(500)["x"]).tolist() == [95, 96, 97, 98, 99]


def test_trajectory_whose_copying_fails_leaves_the_others_and_its_room(
    new_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store()
    store.put(0, data.coded(0, 100), is_written=True)  # and none that could be read instead
    with monkeypatch.context() as patched:
        patched.setattr(Payload, "copy_rows", out_of_memory)
        for _ in range(5):
            with pytest.raises(MemoryError, match="Cannot allocate memory"):
                store.put(1, data.coded(1, 600))
    before = store.codes()
    store.publish(store.put(1, data.coded(1, 600)))
    assert before == all_codes(100)
    assert store.codes() == all_codes(100, 600)


def test_trajectories_that_are_got_beside_evictions_are_whole_or_missing() -> None:
    """R3."""
    with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
        buffer.add_trajectories([data.coded(0, 100)])
        is_over = threading.Event()

        def get() -> int:
            count = 0
            while not is_over.is_set():
                i = buffer.trajectory_counter - 3
                try:
                    trajectory = buffer.get_trajectory(max(0, i))
                except KeyError:
                    continue
                assert data.codes_of(flat(trajectory.to_columns())).tolist() == all_codes(
                    100, first=max(0, i)
                )
                count += 1
            return count

        getting = InThread(get)
        for i in range(1, 300):
            buffer.add_trajectories([data.coded(i, 100)])
        is_over.set()
        assert getting.join() > 0


def test_empty_window_is_an_error_that_says_so(new_store: Callable[..., Store]) -> None:
    with pytest.raises(EmptyBufferError, match="expected rows to draw from, got none"):
        new_store().cache.gather(np.arange)


def test_failing_draw_leaves_no_mark(new_store: Callable[..., Store]) -> None:
    """R3: a mark that stayed would keep what is evicted for ever."""

    def fail(low: int, high: int) -> Array:
        raise KeyError("draw")

    store = new_store(window_size=1)
    store.put(0, data.coded(0, 3), is_written=True)
    with pytest.raises(KeyError, match="draw"):
        store.cache.gather(fail)
    store.put(1, data.coded(1, 3), is_written=True)
    store.cache.reclaim()
    assert not store.cache._retired


# -- R4 ------------------------------------------------------------------------------------------


def test_trajectories_that_left_the_window_unwritten_are_written(
    tmp_path: Path, writer_gate: Gate
) -> None:
    """R4."""
    with saving(tmp_path, sample_window_size=2) as buffer:
        buffer.add_trajectories([data.coded(i, 20 + i) for i in range(5)])
        writer_gate.wait()
        window = window_codes(buffer)
        writer_gate.open()
    with ReplayReader(tmp_path / "store") as reader:
        assert window_codes(reader) == all_codes(20, 21, 22, 23, 24)
    assert window == all_codes(23, 24, first=3)


WAITING = """
import sys, threading
sys.path.insert(0, sys.argv[2])
import data, numpy as np
from mmbuf import TrajectoryReplayBuffer, files, lane

lane._FIRST_LIMIT = 2 << 20
rename, may_go_on = files.rename, threading.Event()
may_go_on.set()

def wait_and_rename(source, target):
    assert may_go_on.wait(60)
    rename(source, target)

files.rename = wait_and_rename
for number, options in enumerate([{"cache_size": 0}, {"enable_cache": False}]):
    path = sys.argv[1] + str(number)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options) as buffer:
        for i in range(3):
            buffer.add_trajectories([data.coded(i, 200)])
            buffer.flush()
        may_go_on.clear()
        buffer.add_trajectories([data.coded(i, 200) for i in range(3, 9)])
        may_go_on.set()
        buffer.flush()
        inner = buffer._window.cache
        codes = data.codes_of(inner.schema.nest(inner.gather(np.arange)[1]))
        print(codes.tolist() == [i * 1_000_000 + row for i in range(9) for row in range(200)])
"""


def test_what_waits_for_a_slow_disk_is_not_overwritten(tmp_path: Path) -> None:
    """R4, when all before was evicted at once and more is waiting than the ring began with.

    In a process of its own, since rows that were taken away would end it.
    """
    result = data.run_python(WAITING, tmp_path / "store", Path(__file__).parent)
    assert (result.returncode, result.stdout) == (0, "True\nTrue\n"), result.stderr


def test_memory_only_buffer_that_was_cleared_keeps_its_new_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_rings(monkeypatch)
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.add_trajectories([data.coded(i, 200) for i in range(3)])
        buffer.clear()
        buffer.add_trajectories([data.coded(i, 200) for i in range(3, 9)])
        assert window_codes(buffer) == all_codes(*[200] * 6, first=3)


def test_clear_cache_keeps_what_is_not_written(tmp_path: Path, writer_gate: Gate) -> None:
    """R4."""
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 50) for i in range(3)])
        writer_gate.wait()
        buffer.clear_cache()
        cleared = window_codes(buffer)
        writer_gate.open()
        buffer.flush()
        buffer.clear_cache()
        assert cleared == window_codes(buffer) == all_codes(50, 50, 50)


# -- R5 ------------------------------------------------------------------------------------------


def test_reader_does_not_see_a_file_before_the_journal_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5."""
    gate, add = Gate(), TrajectoryIndex.add

    def wait_and_add(index: TrajectoryIndex, *arguments: Any) -> None:
        if arguments[1].trajectory_id == 1:
            gate.pass_through()
        add(index, *arguments)

    monkeypatch.setattr(TrajectoryIndex, "add", wait_and_add)
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 5), data.coded(1, 5)])
        gate.wait()
        named = data.names_of(tmp_path / "store")
        with ReplayReader(tmp_path / "store") as reader:
            seen = window_codes(reader)
        gate.open()
    with ReplayReader(tmp_path / "store") as reader:
        assert window_codes(reader) == all_codes(5, 5)
    assert named == ["trajectory_0_.arrow", "trajectory_1_.arrow"]
    assert seen == all_codes(5)


def test_nothing_opens_a_published_file_for_writing(tmp_path: Path) -> None:
    """R5."""
    result = data.run_python(
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import data\n"
        "from mmbuf import ReplayReader, TrajectoryReplayBuffer\n"
        "opened, written = [], []\n"
        "def look(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('.arrow'):\n"
        "        flags = arguments[2]\n"
        "        (written if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) else opened)"
        ".append(arguments[0])\n"
        "sys.addaudithook(look)\n"
        "with TrajectoryReplayBuffer(sample_window_size=2, cache_size=1, auto_save=True,\n"
        "                            auto_save_path=sys.argv[1]) as buffer:\n"
        "    for i in range(6):\n"
        "        buffer.add_trajectories([data.coded(i, 40)])\n"
        "        buffer.flush(sync=True)\n"
        "        data.codes_of(buffer.sample(500))\n"
        "        buffer.clear_cache()\n"
        "        data.codes_of(buffer.sample(500))\n"
        "        buffer.get_trajectory(i).actions.fill_(1)\n"
        "with ReplayReader(sys.argv[1]) as reader:\n"
        "    data.codes_of(reader.sample(500))\n"
        "print(len(set(opened)), written)\n",
        tmp_path / "store",
        Path(__file__).parent,
    )
    assert (result.stdout, result.stderr) == ("6 []\n", "")


def test_failure_behind_the_journal_does_not_journal_the_trajectory_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5: the store opens again, with each trajectory once."""
    written = TrajectoryCache.written
    failures = [OSError(errno.ENOMEM, "no memory")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        written(*arguments)

    monkeypatch.setattr(TrajectoryCache, "written", fail_once)
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 5)])
        with pytest.raises(WriteError, match="no memory"):
            buffer.flush()
        try:
            buffer.flush()
        except WriteError:
            buffer.close(wait=False)
    with ReplayReader(tmp_path / "store") as reader:
        assert window_codes(reader) == all_codes(5)


# -- R6 ------------------------------------------------------------------------------------------


@linux_only
def test_no_file_is_ever_mapped_shared_and_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6."""
    asked: list[tuple[int, int]] = []
    seen: set[str] = set()
    mmap, mprotect = vm._mmap, vm._libc.mprotect

    def look_and_map(
        address: int | None, size: int, prot: int, flags: int, fd: int, offset: int
    ) -> int:
        if fd >= 0:
            asked.append((prot, flags))
        seen.update(mapped_files(tmp_path).values())
        return mmap(address, size, prot, flags, fd, offset)

    monkeypatch.setattr(vm, "_mmap", look_and_map)
    with saving(tmp_path, sample_window_size=3, cache_size=2) as buffer:
        for i in range(6):
            buffer.add_trajectories([data.coded(i, 40)])
            buffer.flush()
            drawn(buffer)
            buffer.clear_cache()
            drawn(buffer)
        held = buffer.get_trajectory(5)
        seen.update(mapped_files(tmp_path).values())
        assert held.actions is not None
        del held
    assert vm._libc.mprotect is mprotect
    assert seen == {"r--s", "rw-p"}
    assert {(prot, flags & 3) for prot, flags in asked} == {(1, 1), (3, 2)}


def test_space_is_allocated_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: a full disk is an error, not a signal."""
    events: list[tuple[str, int, int]] = []
    allocate, write_at = files.allocate, files.write_at

    def see_allocate(fd: int, offset: int, size: int) -> None:
        events.append(("allocate", offset, offset + size))
        allocate(fd, offset, size)

    def see_write(fd: int, piece: bytes | memoryview, offset: int) -> None:
        if ".arrow" in os.readlink(f"/proc/self/fd/{fd}") if IS_LINUX else True:
            events.append(("write", offset, offset + len(piece)))
        write_at(fd, piece, offset)

    monkeypatch.setattr(files, "allocate", see_allocate)
    monkeypatch.setattr(files, "write_at", see_write)
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 1000, image=(64, 64, 3))])
        buffer.flush()
    writes = [event for event in events if event[0] == "write"]
    assert writes
    for _, start, stop in writes:
        at = events.index(("write", start, stop))
        assert any(
            kind == "allocate" and low <= start and stop <= high for kind, low, high in events[:at]
        ), (start, stop)


@linux_only
def test_file_is_rewired_only_after_it_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: an error of close is an error of the write."""
    writable: list[str] = []
    written = TrajectoryCache.written

    def look(*arguments: Any) -> None:
        for fd in os.listdir("/proc/self/fd"):
            try:
                name = os.readlink(f"/proc/self/fd/{fd}")
                flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
            except OSError:
                continue
            if ".arrow" in name and int(flags, 8) & 3:
                writable.append(name)
        written(*arguments)

    monkeypatch.setattr(TrajectoryCache, "written", look)
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 30) for i in range(3)])
    assert writable == []


# -- R7 ------------------------------------------------------------------------------------------

CUTTING = """
import os, shutil, sys
sys.path.insert(0, sys.argv[2])
import data
from mmbuf import CorruptError, ReplayReader, TrajectoryReplayBuffer

def expect_corrupt(sampled):
    try:
        sampled.sample(100)
    except CorruptError as error:
        print("CorruptError", error.path == path, flush=True)
    else:
        print("no error", flush=True)

path = os.path.join(sys.argv[1], "trajectory_0_.arrow")
with TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1]) as buffer:
    buffer.add_trajectories([data.coded(0, 400, has_text=False)])
shutil.copy(path, path + ".whole")
size = os.path.getsize(path)
for wrong in (size - 1, size + 1, size // 2, 5000, 3, 0):
    shutil.copy(path + ".whole", path)
    with ReplayReader(sys.argv[1]) as reader:
        os.truncate(path, wrong)
        expect_corrupt(reader)
        expect_corrupt(reader)
with TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1] + "2") as buffer:
    path = os.path.join(sys.argv[1] + "2", "trajectory_0_.arrow")
    buffer.add_trajectories([data.coded(0, 400, has_text=False)])
    buffer.flush()
    buffer.clear_cache()
    os.truncate(path, size // 2)
    expect_corrupt(buffer)
print("end")
"""


@pytest.fixture(scope="module")
def cut_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process says that samples files which changed; a SIGBUS would end it."""
    path = tmp_path_factory.mktemp("cut") / "store"
    return data.run_python(CUTTING, path, Path(__file__).parent).stdout.splitlines()


def test_file_that_changed_its_size_after_the_store_was_opened_is_corrupt(
    cut_files: list[str],
) -> None:
    """R7."""
    assert cut_files[:12] == ["CorruptError True"] * 12


def test_file_that_was_cut_short_after_it_was_written_is_corrupt_when_it_is_mapped_again(
    cut_files: list[str],
) -> None:
    """R7: the file that this process wrote is looked at as well before it is mapped anew."""
    assert cut_files[12:] == ["CorruptError True", "end"]


@pytest.mark.parametrize("name", ["other trajectory", "other file"])
def test_file_that_was_exchanged_is_corrupt(tmp_path: Path, name: str) -> None:
    """R7: of equal size, and not the one that the index speaks of."""
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 40), data.coded(1, 40)])
    path = tmp_path / "store" / "trajectory_0_.arrow"
    if name == "other trajectory":
        shutil.copy(tmp_path / "store" / "trajectory_1_.arrow", path)
    else:
        path.write_bytes(bytes(path.stat().st_size))
    with ReplayReader(tmp_path / "store") as reader, pytest.raises(CorruptError) as caught:
        reader.sample(100)
    assert caught.value.path == str(path)


def test_cold_file_that_was_cut_short_is_corrupt(tmp_path: Path) -> None:
    """R7: read, not mapped."""
    with saving(tmp_path, cache_size=0) as buffer:
        buffer.add_trajectories([data.coded(0, 400)])
        buffer.flush()
        path = tmp_path / "store" / "trajectory_0_.arrow"
        os.truncate(path, 20_000)
        with pytest.raises(CorruptError) as caught:
            buffer.sample(100)
        assert caught.value.path == str(path)


def test_missing_file_is_corrupt_and_named(tmp_path: Path) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 4) for i in range(3)])
    path = tmp_path / "store" / "trajectory_1_.arrow"
    with ReplayReader(tmp_path / "store") as reader:
        path.unlink()
        with pytest.raises(CorruptError, match="the file is missing") as caught:
            reader.sample(100)
    assert caught.value.path == str(path)


# -- R8 ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not vm.CAN_REWIRE, reason="nothing is rewired")
@pytest.mark.parametrize("which", ["first", "second", "all"])
def test_rewire_that_fails_keeps_the_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    which: str,
) -> None:
    """R8: some of its columns may lie in the file then, and the others in memory of their own."""
    calls: list[int] = []
    mremap = vm._libc.mremap

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if which == "all" or len(calls) == (1 if which == "first" else 2):
            vm.ctypes.set_errno(errno.ENOMEM)
            return vm._FAILED
        return mremap(*arguments)

    monkeypatch.setattr(vm._libc, "mremap", fail)
    with saving(tmp_path, sample_window_size=2) as buffer:
        buffer.add_trajectories([data.coded(0, 600)])
        buffer.flush()
        first = window_codes(buffer)
        buffer.add_trajectories([data.coded(i, 600) for i in range(1, 4)])
        buffer.flush()
        assert first == all_codes(600)
        assert window_codes(buffer) == all_codes(600, 600, first=2)
    assert "its pages stay in memory of their own" in caplog.text
    with ReplayReader(tmp_path / "store") as reader:
        assert window_codes(reader) == all_codes(600, 600, 600, 600)


@pytest.mark.skipif(not vm.CAN_REWIRE, reason="nothing is rewired")
def test_rewire_without_addresses_keeps_the_rows(
    new_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8."""
    store = new_store()
    slot = store.put(0, data.coded(0, 50))
    with monkeypatch.context() as patched:
        patched.setattr(vm, "_reserve", out_of_memory)
        store.publish(slot)
    assert store.codes() == all_codes(50)
    store.cache.drop_pages()
    assert store.codes() == all_codes(50)


def test_without_rewiring_rows_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no mremap."""
    monkeypatch.setattr(vm, "CAN_REWIRE", False)
    with saving(tmp_path, sample_window_size=3) as buffer:
        for i in range(5):
            buffer.add_trajectories([data.coded(i, 60)])
            assert i in drawn(buffer)
        buffer.flush()
        after = window_codes(buffer)
        buffer.clear_cache()
        again = window_codes(buffer)
    assert after == again == all_codes(60, 60, 60, first=2)


# -- small caches, no cache, few mappings --------------------------------------------------------


@pytest.mark.parametrize(("cache_size", "resident"), [(3, 3), (1, 1), (0, 0), (50, 6), (None, 6)])
def test_cache_smaller_than_the_window_serves_all_of_the_window(
    tmp_path: Path, cache_size: int | None, resident: int
) -> None:
    with saving(tmp_path, sample_window_size=6, cache_size=cache_size) as buffer:
        for i in range(9):
            buffer.add_trajectories([data.coded(i, 30 + i)])
        buffer.flush()
        codes = window_codes(buffer)
        ids = drawn(buffer)
        stats = buffer.get_stats()
    assert codes == all_codes(*range(33, 39), first=3)
    assert ids == set(range(3, 9))
    assert (stats["window_trajectories"], stats["cache_size"]) == (6, resident)


@pytest.mark.parametrize("cache_size", [2, 0])
def test_reopened_store_with_a_small_cache_serves_all_of_the_window(
    tmp_path: Path, cache_size: int
) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 30 + i) for i in range(5)])
    with saving(tmp_path, sample_window_size=4, cache_size=cache_size) as buffer:
        first = window_codes(buffer)
        buffer.add_trajectories([data.coded(5, 35)])
        buffer.flush()
        second = window_codes(buffer)
    assert first == all_codes(31, 32, 33, 34, first=1)
    assert second == all_codes(32, 33, 34, 35, first=2)


@linux_only
def test_disabled_cache_never_maps_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    mmap = vm._mmap

    def look_and_map(*arguments: Any) -> int:
        if arguments[4] >= 0:
            mapped.append(arguments[4])
        return mmap(*arguments)

    monkeypatch.setattr(vm, "_mmap", look_and_map)
    with saving(tmp_path, enable_cache=False, sample_window_size=3) as buffer:
        for i in range(5):
            buffer.add_trajectories([data.coded(i, 60)])
            drawn(buffer)
        buffer.flush()
        codes = window_codes(buffer)
        found = mapped_files(tmp_path / "store")
    assert codes == all_codes(60, 60, 60, first=2)
    assert (mapped, found) == ([], {})


@linux_only
def test_trajectory_that_is_got_with_a_disabled_cache_is_not_mapped(tmp_path: Path) -> None:
    with saving(tmp_path, enable_cache=False) as buffer:
        buffer.add_trajectories([data.coded(0, 60)])
        buffer.flush()
        held = buffer.get_trajectory(0)
        found = mapped_files(tmp_path / "store")
        assert held.actions is not None
        del held
    assert found == {}


def test_spent_budget_of_mappings_leaves_rows_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm, "MAPS", vm.MapBudget(3))
    with saving(tmp_path) as buffer:
        for i in range(6):
            buffer.add_trajectories([data.coded(i, 60)])
            assert i in drawn(buffer)
        buffer.flush()
        after = window_codes(buffer)
        maps = buffer.get_stats()["cache_maps"]
        buffer.clear_cache()
        again = window_codes(buffer)
    assert after == again == all_codes(*[60] * 6)
    assert maps <= 3
    assert vm.MAPS.used == 0


def test_reader_without_any_mapping_left_reads_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 60) for i in range(4)])
    monkeypatch.setattr(vm, "MAPS", vm.MapBudget(0))
    with ReplayReader(tmp_path / "store") as reader:
        assert window_codes(reader) == all_codes(60, 60, 60, 60)
        assert reader.get_stats()["cache_filled"] == 0


def test_threshold_rises_when_mappings_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of 18 kB (states) and 1.8 MB (image): both are mapped, then only the larger."""
    monkeypatch.setattr(vm, "MAPS", vm.MapBudget(9))
    maps = []
    with saving(tmp_path) as buffer:
        for i in range(5):
            buffer.add_trajectories([data.coded(i, 600)])
            buffer.flush()
            maps.append(buffer.get_stats()["cache_maps"])
        codes = window_codes(buffer)
    assert maps == [2, 4, 6, 7, 8]
    assert codes == all_codes(*[600] * 5)


def test_mapping_that_fails_is_read_instead_and_mapped_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 600) for i in range(3)])
    with ReplayReader(tmp_path / "store") as reader:
        with monkeypatch.context() as patched:
            patched.setattr(vm.AddressRange, "map_file", out_of_memory)
            codes = window_codes(reader)
            filled = reader.get_stats()["cache_filled"]
        assert codes == window_codes(reader) == all_codes(600, 600, 600)
        assert (filled, reader.get_stats()["cache_filled"]) == (0, 3)


def test_mapping_that_fails_half_way_is_right_when_the_threshold_has_risen_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was mapped by the first try is then to be copied by the second."""
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 600)])
    calls: list[int] = []
    map_file = vm.AddressRange.map_file

    def fail_second(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            out_of_memory()
        map_file(*arguments)

    monkeypatch.setattr(vm, "MAPS", vm.MapBudget(9))
    monkeypatch.setattr(vm.AddressRange, "map_file", fail_second)
    with ReplayReader(tmp_path / "store") as reader:
        first = window_codes(reader)
        vm.MAPS.take(5)
        second = window_codes(reader)
        third = window_codes(reader)
        vm.MAPS.give_back(5)
    assert first == second == third == all_codes(600)


# -- filling, giving back ------------------------------------------------------------------------


def test_opening_reads_no_data_file_and_sampling_opens_only_what_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 50) for i in range(6)])
    opens = count_opens(monkeypatch)
    with ReplayReader(tmp_path / "store") as reader:
        after_opening = list(opens)
        inner = reader._window.cache
        assert inner is not None
        _, leaves = inner.gather(lambda low, _: low + np.array([210, 60, 249, 61]))
        codes = data.codes_of(inner.schema.nest(leaves)).tolist()
    assert after_opening == []
    assert sorted(opens) == ["trajectory_1_.arrow", "trajectory_4_.arrow"]
    assert codes == [4 * MILLION + 10, MILLION + 10, 4 * MILLION + 49, MILLION + 11]


@pytest.mark.parametrize("kind", ["reader", "buffer"])
def test_sampling_opens_no_file_once_all_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    buffer = saving(tmp_path)
    buffer.add_trajectories([data.coded(i, 50) for i in range(6)])
    buffer.flush()
    sampled: TrajectoryReplayBuffer | ReplayReader = buffer
    if kind == "reader":
        buffer.close()
        sampled = ReplayReader(tmp_path / "store")
        window_codes(sampled)
    opens = count_opens(monkeypatch)
    for _ in range(10):
        drawn(sampled)
    sampled.close()
    assert opens == []


def test_cold_gather_opens_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with saving(tmp_path, cache_size=0) as buffer:
        buffer.add_trajectories([data.coded(i, 50) for i in range(4)])
        buffer.flush()
        opens = count_opens(monkeypatch)
        assert drawn(buffer, 1000) == {0, 1, 2, 3}
    assert sorted(opens) == [f"trajectory_{i}_.arrow" for i in range(4)]


def test_two_threads_that_need_one_slot_fill_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(0, 50)])
    gate, fill = Gate(), Places.fill
    fills: list[int] = []

    def wait_and_fill(*arguments: Any) -> bool:
        fills.append(1)
        gate.pass_through()
        return fill(*arguments)

    monkeypatch.setattr(Places, "fill", wait_and_fill)
    with ReplayReader(tmp_path / "store") as reader:
        calls = [InThread(lambda: window_codes(reader)) for _ in range(2)]
        gate.wait()
        gate.open()
        assert [call.join() for call in calls] == [all_codes(50)] * 2
    assert fills == [1]


@linux_only
def test_cleared_cache_gives_its_memory_back_and_keeps_the_rows(tmp_path: Path) -> None:
    fields = [{"x": torch.full((4, 1, MIB // 4), float(i))} for i in range(3)]
    with saving(tmp_path) as buffer:
        buffer.add_trajectories(fields)
        buffer.flush()
        buffer.sample(2)
        mapped = sorted(mapped_files(tmp_path))
        buffer.clear_cache()
        cleared = mapped_files(tmp_path)
        found = sorted(set(buffer.sample(30)["x"][:, -1].tolist()))
    assert mapped == [f"trajectory_{i}_.arrow" for i in range(3)]
    assert cleared == {}
    assert found == [0.0, 1.0, 2.0]


@linux_only
def test_written_trajectories_cost_no_memory_of_their_own(tmp_path: Path) -> None:
    fields = {"x": torch.ones(16, 1, MIB // 4)}
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([fields])
        buffer.flush()
        before = data.anonymous_bytes()
        buffer.add_trajectories([fields, fields])
        buffer.flush()
        after = data.anonymous_bytes()
    assert after - before < 8 * MIB


@linux_only
def test_only_files_of_the_window_are_mapped(tmp_path: Path) -> None:
    with saving(tmp_path, sample_window_size=2) as buffer:
        buffer.add_trajectories([data.coded(i, 50) for i in range(6)])
        buffer.flush()
        drawn(buffer)
        assert sorted(mapped_files(tmp_path)) == ["trajectory_4_.arrow", "trajectory_5_.arrow"]


@linux_only
def test_files_that_are_unlinked_do_not_stay_mapped(tmp_path: Path) -> None:
    """Else the disk would not get their space back."""
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([data.coded(i, 50) for i in range(3)])
        buffer.flush()
        drawn(buffer)
        buffer.clear()
        assert data.names_of(tmp_path / "store") == []
        assert mapped_files(tmp_path) == {}
        buffer.add_trajectories([data.coded(3, 50)])
        assert drawn(buffer) == {3}


def test_pages_dropped_between_publishing_and_rewiring_leave_the_budget_right(
    new_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot has another place then, which the rewire must not count twice."""
    monkeypatch.setattr(vm, "MAPS", vm.MapBudget(100))
    store = new_store()
    slot = store.put(0, data.coded(0, 50))
    assert slot is not None
    store.cache._vm_lock = _DropFirst(store.cache)  # type: ignore[assignment]
    store.publish(slot)
    assert store.codes() == all_codes(50)
    assert vm.MAPS.used == store.cache.get_stats()["cache_maps"]
    store.cache.close()
    assert vm.MAPS.used == 0


class _DropFirst:
    """A lock that lets another thread's `drop_pages` in just before it is taken the first time."""

    def __init__(self, store_cache: TrajectoryCache) -> None:
        self._cache = store_cache
        self._lock = threading.RLock()
        self._has_dropped = False

    def __enter__(self) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            self._cache.drop_pages()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_batch_keeps_its_schema_when_the_buffer_gets_another_one_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gather has ended, so nothing keeps another thread from clearing the buffer."""
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([{"a": torch.ones(3, 1, dtype=torch.bfloat16), "b": torch.ones(3, 1)}])
    inner = buffer._window.cache
    assert inner is not None
    gather = inner.gather

    def gather_then_clear(*arguments: Any) -> Any:
        leaves = gather(*arguments)
        buffer.clear()
        buffer.add_trajectories([{"a": torch.ones(3, 1), "c": torch.ones(3, 1, dtype=torch.bool)}])
        return leaves

    monkeypatch.setattr(inner, "gather", gather_then_clear)
    batch = buffer.sample(5)
    buffer.close()
    assert {name: leaf.dtype for name, leaf in batch.items()} == {
        "a": torch.bfloat16,
        "b": torch.float32,
    }


# -- sampling ------------------------------------------------------------------------------------


def test_rows_are_drawn_uniformly_whatever_the_length_of_their_trajectory(tmp_path: Path) -> None:
    """10,000 draws over trajectories of two and six rows: chi-square of 7 degrees, 99.9 %: 24.3."""
    with saving(tmp_path, seed=7) as buffer:
        buffer.add_trajectories([data.coded(0, 2), data.coded(1, 6)])
        codes = np.concatenate([data.codes_of(buffer.sample(2500)) for _ in range(4)])
    values, counts = np.unique(codes, return_counts=True)
    assert values.tolist() == all_codes(2, 6)
    assert float(((counts - 1250) ** 2 / 1250).sum()) < 24.3


def test_both_rows_of_the_last_trajectory_are_drawn(tmp_path: Path) -> None:
    with saving(tmp_path, sample_window_size=1) as buffer:
        buffer.add_trajectories([data.coded(0, 5), data.coded(1, 2)])
        assert set(data.codes_of(buffer.sample(10_000)).tolist()) == {MILLION, MILLION + 1}


# -- forked children -----------------------------------------------------------------------------

FORKING = """
import json, os, sys, warnings
sys.path.insert(0, sys.argv[2])
import data
from mmbuf import MmbufError, TrajectoryReplayBuffer
warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads

def child():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        codes = data.codes_of(buffer.sample(500)).tolist()
        try:
            buffer.add_trajectories([data.coded(9, 5)])
            refused = None
        except MmbufError as error:
            refused = str(error)
        buffer.clear_cache()
        again = data.codes_of(buffer.sample(500)).tolist()
        buffer.close()
        os.write(write, json.dumps({"codes": codes, "again": again, "refused": refused}).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = json.loads(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    return said

buffer = TrajectoryReplayBuffer(seed=5, auto_save=True, auto_save_path=sys.argv[1])
buffer.add_trajectories([data.coded(i, 40) for i in range(3)])
buffer.flush()
buffer.sample(500)
children = [child(), child()]
parent = data.codes_of(buffer.sample(500)).tolist()
buffer.add_trajectories([data.coded(3, 40)])
buffer.flush()
size = len(buffer)
buffer.close()
other = TrajectoryReplayBuffer(seed=5)
other.add_trajectories([data.coded(i, 40) for i in range(3)])
other.sample(500)
unforked = data.codes_of(other.sample(500)).tolist()
other.close()

# While threads of the parent hold locks and marks.
import threading, time
buffer = TrajectoryReplayBuffer(seed=5, auto_save=True, auto_save_path=sys.argv[1] + "2",
                                sample_window_size=3, cache_size=2)
buffer.add_trajectories([data.coded(0, 40)])
is_over = threading.Event()
def sample():
    while not is_over.is_set():
        data.codes_of(buffer.sample(300))
def add():
    i = 1
    while not is_over.is_set():
        buffer.add_trajectories([data.coded(i, 40)])
        i += 1
threads = [threading.Thread(target=sample), threading.Thread(target=add)]
for thread in threads: thread.start()
busy = 0
for _ in range(15):
    time.sleep(0.01)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(3):
            data.codes_of(buffer.sample(300))
        os._exit(7)
    os.close(read), os.close(write)
    deadline = time.monotonic() + 20
    while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    if waited[0] == 0:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    elif os.waitstatus_to_exitcode(waited[1]) == 7:
        busy += 1
is_over.set()
for thread in threads: thread.join()
buffer.close()
print(json.dumps({"children": children, "parent": parent, "unforked": unforked, "size": size,
                  "busy": busy}))
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = data.run_python(
        FORKING, tmp_path_factory.mktemp("forked") / "store", Path(__file__).parent
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_forked_child_samples_the_same_rows(forked: Any) -> None:
    for child in forked["children"]:
        assert set(child["codes"]) <= set(all_codes(40, 40, 40))
        assert len({code // MILLION for code in child["codes"]}) == 3
        assert len({code // MILLION for code in child["again"]}) == 3


def test_forked_child_draws_from_a_stream_of_its_own(forked: Any) -> None:
    first, second = (child["codes"] for child in forked["children"])
    assert first != second
    assert forked["parent"] not in (first, second)


def test_forked_child_may_not_add(forked: Any) -> None:
    for child in forked["children"]:
        assert child["refused"].startswith("add_trajectories: expected the process that made")


def test_parent_goes_on_as_if_it_had_not_forked(forked: Any) -> None:
    assert forked["parent"] == forked["unforked"]
    assert forked["size"] == 4


def test_child_forked_beside_busy_threads_samples(forked: Any) -> None:
    assert forked["busy"] == 15


# -- counts --------------------------------------------------------------------------------------


def test_stats_count_the_window_and_what_is_resident(new_store: Callable[..., Store]) -> None:
    store = new_store(window_size=3, cache_size=2)
    for i in range(5):
        store.publish(store.put(i, data.coded(i, 10 + i)))
    stats = store.cache.get_stats()
    assert list(stats) == list(cache.STATS)
    assert stats == {
        "window_trajectories": 3,
        "window_samples": 39,
        "cache_size": 2,
        "cache_filled": 2,
        "cache_maps": 2 if vm.CAN_REWIRE else 0,
    }


def test_number_of_slots_kept_is_that_of_the_window(new_store: Callable[..., Store]) -> None:
    """Else a long run would grow for ever."""
    store = new_store(window_size=3, cache_size=2)
    for i in range(200):
        store.publish(store.put(i, data.coded(i, 2)))
        store.gather()
    store.cache.reclaim()
    assert (len(store.cache._slots), len(store.cache._retired)) == (3, 0)
    assert len(store.cache._busy) <= 1


def test_adding_costs_no_more_time_late_than_early(new_store: Callable[..., Store]) -> None:
    store = new_store(window_size=50)
    fields = data.coded(0, 2)

    def add(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            store.put(i, fields, is_written=True)
            store.cache.reclaim()
        return time.perf_counter() - start

    add(100)
    early = min(add(100) for _ in range(3))
    add(1500)
    late = min(add(100) for _ in range(3))
    assert late < 5 * early
