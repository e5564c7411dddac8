"""Address ranges: what each call does to pages, addresses and the budget of mappings."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import data
import numpy as np
import pytest
import torch
from interrupts import every_call

from mmbuf import vm
from mmbuf.vm import HUGE_PAGE, PAGE, AddressRange, MapBudget

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

UINT8 = np.dtype(np.uint8)
SIZE = 4 * HUGE_PAGE


@pytest.fixture
def reserved() -> Iterator[AddressRange]:
    range_ = AddressRange(SIZE)
    yield range_
    range_.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file whose byte ``i`` is ``i // PAGE % 251``: 4 MiB and three bytes."""
    path = tmp_path / "pages"
    path.write_bytes(pages(2 * HUGE_PAGE + 3).tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def pages(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return (np.arange(size) // PAGE % 251).astype(np.uint8)


def mappings(start: int, stop: int) -> list[tuple[int, int, str, str]]:
    """Start, stop, permissions and file of what is mapped in ``[start, stop)``."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in fields[0].split("-"))
        if low < stop and high > start:
            path = fields[5] if len(fields) > 5 else ""
            found.append((max(low, start), min(high, stop), fields[1], path))
    return found


def permissions(range_: AddressRange) -> list[tuple[int, int, str]]:
    """Offsets and permissions of the parts of a range; equal neighbours are one part."""
    parts: list[tuple[int, int, str]] = []
    for low, high, perms, _ in mappings(range_.address, range_.address + range_.size_bytes):
        start, stop = low - range_.address, high - range_.address
        if parts and parts[-1][2] == perms and parts[-1][1] == start:
            parts[-1] = (parts[-1][0], stop, perms)
        else:
            parts.append((start, stop, perms))
    return parts


def test_reserving_a_tebibyte_costs_no_memory() -> None:
    before = data.anonymous_bytes()
    range_ = AddressRange(1 << 40)
    after = data.anonymous_bytes()
    range_.close()
    assert after - before < 1 << 20


def test_range_lies_on_a_huge_page_and_is_rounded_up_to_whole_ones() -> None:
    range_ = AddressRange(HUGE_PAGE + 1)
    size, address = range_.size_bytes, range_.address
    range_.close()
    assert (size, address % HUGE_PAGE) == (2 * HUGE_PAGE, 0)


def test_reserved_addresses_cannot_be_touched(reserved: AddressRange) -> None:
    assert permissions(reserved) == [(0, SIZE, "---p")]


def test_array_has_all_rows_that_fit(reserved: AddressRange) -> None:
    array = reserved.array(np.dtype(np.int32), (5, 7))
    assert array.shape == (SIZE // 140, 5, 7)
    assert array.ctypes.data == reserved.address


def test_commit_makes_zero_pages_there_and_nowhere_else(reserved: AddressRange) -> None:
    reserved.commit(PAGE, 3 * PAGE)
    assert permissions(reserved) == [(0, PAGE, "---p"), (PAGE, 3 * PAGE, "rw-p"),
                                     (3 * PAGE, SIZE, "---p")]  # fmt: skip
    assert not reserved.array(UINT8, ())[PAGE : 3 * PAGE].any()


def test_commit_keeps_what_pages_hold(reserved: AddressRange) -> None:
    array = reserved.array(UINT8, ())
    reserved.commit(0, 2 * PAGE)
    array[: 2 * PAGE] = 7
    reserved.commit(PAGE, 4 * PAGE)
    assert (array[: 2 * PAGE] == 7).all()
    assert not array[2 * PAGE : 4 * PAGE].any()


def test_release_gives_the_memory_back_and_leaves_the_neighbours(reserved: AddressRange) -> None:
    array = reserved.array(UINT8, ())
    reserved.commit(0, SIZE)
    array[:] = 7
    before = data.anonymous_bytes()
    reserved.release(HUGE_PAGE, SIZE - HUGE_PAGE)
    assert before - data.anonymous_bytes() > SIZE - 2 * HUGE_PAGE - (1 << 20)
    assert permissions(reserved) == [(0, HUGE_PAGE, "rw-p"),
                                     (HUGE_PAGE, SIZE - HUGE_PAGE, "---p"),
                                     (SIZE - HUGE_PAGE, SIZE, "rw-p")]  # fmt: skip
    assert (array[:HUGE_PAGE] == 7).all()
    assert (array[-HUGE_PAGE:] == 7).all()


def test_released_pages_are_zero_when_committed_again(reserved: AddressRange) -> None:
    array = reserved.array(UINT8, ())
    reserved.commit(0, PAGE)
    array[:PAGE] = 7
    reserved.release(0, PAGE)
    reserved.commit(0, PAGE)
    assert not array[:PAGE].any()


def test_map_file_shows_the_file_and_changes_nothing_beside(
    reserved: AddressRange, fd: int
) -> None:
    array = reserved.array(UINT8, ())
    reserved.commit(0, 8 * PAGE)
    array[: 8 * PAGE] = 255
    reserved.map_file(2 * PAGE, 5 * PAGE, fd, PAGE)
    assert np.array_equal(array[2 * PAGE : 5 * PAGE], pages(4 * PAGE)[PAGE:])
    assert (array[: 2 * PAGE] == 255).all()
    assert (array[5 * PAGE : 8 * PAGE] == 255).all()
    assert permissions(reserved)[1] == (2 * PAGE, 5 * PAGE, "r--s")


def test_map_file_may_go_beyond_the_end_of_the_file(reserved: AddressRange, fd: int) -> None:
    reserved.map_file(0, SIZE, fd, 0)
    array = reserved.array(UINT8, ())
    assert np.array_equal(array[: 2 * HUGE_PAGE + 3], pages(2 * HUGE_PAGE + 3))


@pytest.mark.parametrize("size", [PAGE, 5 * PAGE, HUGE_PAGE, 2 * HUGE_PAGE])
def test_rewire_puts_the_file_in_the_place_of_equal_pages(
    reserved: AddressRange, fd: int, size: int
) -> None:
    array = reserved.array(UINT8, ())
    reserved.commit(0, SIZE)
    array[:] = 255
    array[HUGE_PAGE : HUGE_PAGE + size] = pages(size)
    reserved.rewire(HUGE_PAGE, HUGE_PAGE + size, fd, 0, size)
    assert np.array_equal(array[HUGE_PAGE : HUGE_PAGE + size], pages(size))
    assert (array[:HUGE_PAGE] == 255).all()
    assert (array[HUGE_PAGE + size :] == 255).all()
    assert permissions(reserved)[1] == (HUGE_PAGE, HUGE_PAGE + size, "r--s")


def test_rewire_gives_the_anonymous_memory_back(reserved: AddressRange, fd: int) -> None:
    array = reserved.array(UINT8, ())
    reserved.commit(0, 2 * HUGE_PAGE)
    array[: 2 * HUGE_PAGE] = pages(2 * HUGE_PAGE)
    before = data.anonymous_bytes()
    reserved.rewire(0, 2 * HUGE_PAGE, fd, 0, 2 * HUGE_PAGE)
    assert before - data.anonymous_bytes() > 2 * HUGE_PAGE - (1 << 20)


def test_rewire_leaves_no_scratch_mapping(reserved: AddressRange, fd: int, tmp_path: Path) -> None:
    reserved.commit(0, HUGE_PAGE)
    reserved.rewire(0, HUGE_PAGE, fd, 0, HUGE_PAGE)
    found = [m for m in mappings(0, 1 << 63) if m[3].startswith(str(tmp_path))]
    assert [m[:2] for m in found] == [(reserved.address, reserved.address + HUGE_PAGE)]


def test_readers_see_equal_bytes_all_through_a_rewire(reserved: AddressRange, fd: int) -> None:
    size = 16 * PAGE
    array, expected = reserved.array(UINT8, ())[:size], pages(size)
    stop = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not stop.is_set():
            if not np.array_equal(array, expected):
                wrong.append(1)

    reserved.commit(0, size)
    array[:] = expected
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        reserved.rewire(0, size, fd, 0, size)
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_rewire_to_a_bad_descriptor_leaves_the_old_pages(reserved: AddressRange) -> None:
    """R8."""
    array = reserved.array(UINT8, ())
    reserved.commit(0, HUGE_PAGE)
    array[:HUGE_PAGE] = 7
    with pytest.raises(OSError, match="Bad file descriptor"):
        reserved.rewire(0, HUGE_PAGE, 1_000_000, 0, HUGE_PAGE)
    assert (array[:HUGE_PAGE] == 7).all()


def test_rewire_whose_mremap_fails_leaves_the_old_pages_and_no_scratch(
    reserved: AddressRange, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8."""

    def mremap(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return ctypes.c_void_p(-1).value  # type: ignore[return-value]

    array = reserved.array(UINT8, ())
    reserved.commit(0, HUGE_PAGE)
    array[:HUGE_PAGE] = 7
    monkeypatch.setattr(vm._libc, "mremap", mremap)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        reserved.rewire(0, HUGE_PAGE, fd, 0, HUGE_PAGE)
    assert vm.is_out_of_memory(caught.value)
    assert (array[:HUGE_PAGE] == 7).all()
    assert [m for m in mappings(0, 1 << 63) if m[3].startswith(str(tmp_path))] == []


def test_close_gives_the_addresses_back_and_may_be_repeated() -> None:
    range_ = AddressRange(SIZE)
    range_.commit(PAGE, 2 * PAGE)
    start = range_.address
    range_.close()
    left = mappings(start, start + SIZE)
    range_.close()
    assert left == []


def test_budget_is_taken_all_or_not_at_all() -> None:
    budget = MapBudget(10)
    assert [budget.take(6), budget.take(5), budget.take(4), budget.take(1), budget.take(0)] == [
        True, False, True, False, True,
    ]  # fmt: skip
    assert budget.used == 10
    budget.give_back(3)
    assert (budget.used, budget.take(4), budget.take(3)) == (7, False, True)


def test_budget_is_short_when_more_than_half_is_used() -> None:
    budget = MapBudget(10)
    budget.take(5)
    at_half = budget.is_short
    budget.take(1)
    assert (at_half, budget.is_short) == (False, True)


def test_budget_of_many_threads_never_exceeds_its_limit_and_ends_at_zero() -> None:
    budget = MapBudget(7)
    excess: list[int] = []

    def take_and_give_back(count: int) -> None:
        for _ in range(3000):
            if budget.take(count):
                if budget.used > 7:
                    excess.append(budget.used)
                budget.give_back(count)

    threads = [threading.Thread(target=take_and_give_back, args=(n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (excess, budget.used) == ([], 0)


def test_budget_of_this_process_is_less_than_a_third_of_the_kernels_limit() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert vm.MAPS.limit == int(0.3 * limit)


def test_writes_to_a_private_map_never_reach_the_file(fd: int, tmp_path: Path) -> None:
    size = 2 * HUGE_PAGE + 3
    array = vm.map_privately(fd, size)
    before = array.copy()
    array[:] = 9
    assert np.array_equal(before, pages(size))
    assert (array == 9).all()
    assert (tmp_path / "pages").read_bytes() == pages(size).tobytes()


def test_private_map_dies_with_the_last_array_that_looks_into_it(fd: int, tmp_path: Path) -> None:
    array = vm.map_privately(fd, 10 * PAGE)
    tail = torch.from_numpy(array[PAGE:].view(np.int32))[5:]
    address = array.ctypes.data
    del array
    gc.collect()
    held = mappings(address, address + 10 * PAGE)
    value = int(tail[0])
    del tail
    gc.collect()
    assert [m[2] for m in held] == ["rw-p"]
    assert value == 0x01010101
    assert mappings(address, address + 10 * PAGE) == []


def test_a_block_is_given_back_when_neither_it_nor_its_memory_is_held() -> None:
    block = vm.new_block(HUGE_PAGE)
    address = block.address
    array = np.frombuffer(block.memory(1000), np.uint8)
    assert (array.dtype, array.shape, array.ctypes.data) == (np.uint8, (1000,), address)
    part = torch.from_numpy(array.view(np.int64).reshape(25, 5))[3].numpy()[1:]
    del block, array
    gc.collect()
    held = mappings(address, address + HUGE_PAGE)
    assert part.tolist() == [0, 0, 0, 0]
    del part
    gc.collect()
    assert (held != [], mappings(address, address + HUGE_PAGE)) == (True, [])


def test_block_is_whole_huge_pages_and_freed_whole() -> None:
    block = vm.new_block(HUGE_PAGE + 1)
    address = block.address
    inside = mappings(address, address + 2 * HUGE_PAGE)
    del block
    assert address % HUGE_PAGE == 0
    assert (inside[0][0], inside[-1][1]) == (address, address + 2 * HUGE_PAGE)
    assert mappings(address, address + 2 * HUGE_PAGE) == []


def test_address_space_is_unlimited_without_a_limit() -> None:
    assert vm.address_space_left() is None


def test_address_space_left_is_the_limit_less_what_is_used_and_never_negative() -> None:
    result = data.run_python(
        "import resource\n"
        "from mmbuf import vm\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * vm.PAGE\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "print(vm.address_space_left() - ((8 << 30) - used))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (64 << 20, 64 << 20))\n"
        "print(vm.address_space_left())\n"
    )
    assert result.returncode == 0, result.stderr
    difference, left = map(int, result.stdout.split())
    assert abs(difference) < 4 << 20
    assert left == 0


def test_reserving_more_than_the_limit_is_an_error_and_leaves_nothing() -> None:
    result = data.run_python(
        "import resource\n"
        "from mmbuf import vm\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "before = vm.address_space_left()\n"
        "try:\n"
        "    vm.AddressRange(16 << 30)\n"
        "except OSError as error:\n"
        "    print(vm.is_out_of_memory(error), abs(vm.address_space_left() - before) < 1 << 20)\n"
    )
    assert (result.stdout, result.stderr) == ("True True\n", "")


def test_what_the_system_refused_to_take_back_goes_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, block = AddressRange(SIZE), vm.new_block(SIZE)
    places = [first.address, block.address]
    with monkeypatch.context() as patch:
        patch.setattr(vm._libc, "munmap", lambda address, size: -1)
        first.close()
        del block
    assert all(mappings(address, address + SIZE) for address in places)
    AddressRange(SIZE).close()
    assert not any(mappings(address, address + SIZE) for address in places)
    assert len(vm._unheld) == 0


def test_what_an_interrupted_finalizer_left_goes_with_the_next() -> None:
    for interrupt in every_call():
        blocks = [vm.new_block(HUGE_PAGE)]
        address = blocks[0].address
        interrupt(blocks.clear)
        vm.new_block(HUGE_PAGE)
        assert mappings(address, address + HUGE_PAGE) == [], interrupt.place
        assert len(vm._unheld) == 0
