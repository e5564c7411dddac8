"""BatchPool: what is held is never handed out again, and what is not held comes back."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import torch
from interrupts import every_call

from mmbuf import vm
from mmbuf.pool import BatchPool
from mmbuf.schema import Array
from mmbuf.vm import HUGE_PAGE

IS_LINUX = sys.platform.startswith("linux")
UINT8 = np.dtype(np.uint8)
MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[BatchPool]:
    pool = BatchPool()
    yield pool
    gc.collect()
    pool.clear()


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if low <= address < high:
            return True
    return False


def test_array_has_the_shape_and_dtype_asked_for(pool: BatchPool) -> None:
    array = pool.empty((300, 1000, 3), np.dtype(np.float32))
    assert (array.shape, array.dtype, array.nbytes) == ((300, 1000, 3), np.float32, 3_600_000)
    assert (array.flags.c_contiguous, array.flags.writeable) == (True, True)


def test_arrays_that_are_held_lie_apart(pool: BatchPool) -> None:
    held = [pool.empty((2, MIB), UINT8) for _ in range(10)]
    for i, array in enumerate(held):
        array[...] = i
    assert [np.unique(array).tolist() for array in held] == [[i] for i in range(10)]


def test_five_kept_batches_of_two_columns_have_ten_different_addresses(pool: BatchPool) -> None:
    batches = []
    for _ in range(5):
        batches.append([torch.from_numpy(pool.empty((MIB,), UINT8)) for _ in range(2)])
        pool.empty((MIB,), UINT8)  # one that nobody keeps
    assert len({tensor.data_ptr() for batch in batches for tensor in batch}) == 10


def test_memory_comes_back_when_the_array_dies(pool: BatchPool) -> None:
    address = pool.empty((MIB,), UINT8).ctypes.data
    assert pool.empty((MIB,), UINT8).ctypes.data == address


LOOKS: dict[str, Callable[[Array], Any]] = {
    "slice": lambda array: array[3:5, 7],
    "tensor": torch.from_numpy,
    "tensor slice": lambda array: torch.from_numpy(array)[9, 1:3],
    "typed view": lambda array: torch.from_numpy(array).view(torch.bfloat16),
    "array of a tensor": lambda array: torch.from_numpy(array)[5].numpy(),
    "storage": lambda array: torch.from_numpy(array).untyped_storage(),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_memory_does_not_come_back_while_anything_looks_into_it(pool: BatchPool, kind: str) -> None:
    array = pool.empty((1024, 1024), UINT8)
    array[...] = 5
    address = array.ctypes.data
    held = LOOKS[kind](array)
    before = bytes(held[:9]) if kind == "storage" else data.bits(held)
    del array
    gc.collect()
    others = [pool.empty((1024, 1024), UINT8) for _ in range(3)]
    for other in others:
        other[...] = 9
    after = bytes(held[:9]) if kind == "storage" else data.bits(held)
    del held
    gc.collect()
    assert address not in [other.ctypes.data for other in others]
    assert before == after == b"\5" * len(before)
    assert pool.empty((1024, 1024), UINT8).ctypes.data == address


def test_sizes_are_not_mixed_up(pool: BatchPool) -> None:
    small = pool.empty((HUGE_PAGE,), UINT8)
    address = small.ctypes.data
    del small
    gc.collect()
    large = pool.empty((HUGE_PAGE + 1,), UINT8)
    again = pool.empty((HUGE_PAGE - 1,), UINT8)
    assert large.ctypes.data != address
    assert again.ctypes.data == address


def test_clear_gives_idle_blocks_back_and_leaves_held_ones(pool: BatchPool) -> None:
    held = pool.empty((MIB,), UINT8)
    held[...] = 3
    pool.empty((MIB,), UINT8)
    gc.collect()
    before = pool.idle_bytes
    pool.clear()
    assert (before, pool.idle_bytes) == (HUGE_PAGE, 0)
    assert (held == 3).all()


def test_idle_bytes_are_bounded_when_many_batches_die_at_once() -> None:
    pool = BatchPool(max_idle_bytes=3 * HUGE_PAGE)
    held = [pool.empty((HUGE_PAGE,), UINT8) for _ in range(10)]
    held.clear()
    gc.collect()
    array = pool.empty((HUGE_PAGE,), UINT8)
    idle_bytes = pool.idle_bytes
    del array
    gc.collect()
    pool.clear()
    assert idle_bytes <= 3 * HUGE_PAGE


def test_idle_bytes_are_bounded_when_sizes_change() -> None:
    pool = BatchPool(max_idle_bytes=4 * HUGE_PAGE)
    most = 0
    for count in range(1, 20):
        pool.empty((count * HUGE_PAGE,), UINT8)
        pool.empty((HUGE_PAGE // 2,), UINT8)
        most = max(most, pool.idle_bytes - (count + 1) * HUGE_PAGE)
    pool.clear()
    assert most <= 4 * HUGE_PAGE


@pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
def test_block_that_outlives_its_pool_goes_back_to_the_system() -> None:
    pool = BatchPool()
    array = pool.empty((MIB,), UINT8)
    address = array.ctypes.data
    pool.clear()
    del pool
    gc.collect()
    array[...] = 4
    is_alive = is_mapped(address)
    del array
    gc.collect()
    assert (is_alive, is_mapped(address)) == (True, False)


@pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
def test_memory_is_flat_over_many_batches(pool: BatchPool) -> None:
    pool.empty((4 * MIB,), UINT8)[...] = 1
    before = data.anonymous_bytes()
    for _ in range(100):
        pool.empty((4 * MIB,), UINT8)[...] = 1
    assert data.anonymous_bytes() - before < 8 * MIB


def test_threads_never_share_a_block() -> None:
    pool = BatchPool(max_idle_bytes=2 * HUGE_PAGE)
    wrong: list[int] = []

    def use(number: int) -> None:
        generator = np.random.default_rng(number)
        kept: list[Array] = []
        for _ in range(150):
            array = pool.empty(
                (int(generator.integers(1, 3)) * HUGE_PAGE // 8,), np.dtype(np.int64)
            )
            array[:100] = number
            array[-100:] = number
            kept.append(array)
            if len(kept) > 3:
                oldest = kept.pop(0)
                if not ((oldest[:100] == number).all() and (oldest[-100:] == number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    pool.clear()
    assert (wrong, pool.idle_bytes) == ([], 0)


def test_a_block_that_an_interrupt_drops_on_its_way_is_given_back() -> None:
    """Whether it was new or idle; and what is handed out afterwards is held by nobody else."""
    gc.collect()
    before = len(vm._mappings)
    pool = BatchPool()
    for interrupt in every_call():
        for _ in range(2):
            kept = pool.empty((MIB,), UINT8)
            kept[...] = 7
            interrupt(lambda: pool.empty((MIB,), UINT8))
            if interrupt.result is not None:
                interrupt.result[...] = 8
            pool.empty((MIB,), UINT8)[...] = 9
            assert (kept == 7).all(), interrupt.place
            assert len(vm._mappings) - before <= 4, interrupt.place
        if not interrupt.was_met:
            break
    del kept, interrupt
    pool.clear()
    assert (pool.idle_bytes, len(vm._mappings), len(pool._lent)) == (0, before, 0)


def test_a_block_whose_return_is_interrupted_comes_back_with_the_next() -> None:
    gc.collect()
    before = len(vm._mappings)
    pool = BatchPool(max_idle_bytes=2 * HUGE_PAGE)
    for interrupt in every_call():
        held = [pool.empty((MIB,), UINT8) for _ in range(3)]
        interrupt(held.clear)
        kept = [pool.empty((MIB,), UINT8) for _ in range(2)]
        assert len({array.ctypes.data for array in kept}) == 2
        assert len(vm._mappings) - before <= 4, interrupt.place
        del kept
        pool._settle()
        assert pool.idle_bytes <= 2 * HUGE_PAGE
    pool.clear()
    assert (len(vm._mappings), len(pool._lent)) == (before, 0)


def test_a_handler_that_takes_and_returns_blocks_within_any_call_shares_none() -> None:
    pool, taken = BatchPool(max_idle_bytes=2 * HUGE_PAGE), []

    def take() -> None:
        taken.append(pool.empty((MIB,), UINT8))
        pool.empty((MIB,), UINT8)[...] = 1

    for interrupt in every_call():
        held = [pool.empty((MIB,), UINT8)]

        def use(held: list[Array] = held) -> None:
            held.append(pool.empty((MIB,), UINT8))
            held.pop(0)

        interrupt(use, take)
        arrays = [*held, *taken]
        assert len({array.ctypes.data for array in arrays}) == len(arrays), interrupt.place
        taken.clear()
    held.clear()
    del arrays
    pool.clear()
    assert (pool.idle_bytes, len(pool._lent)) == (0, 0)
