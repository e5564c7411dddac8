"""What a machine has little of: descriptors, mappings, addresses, memory; and what is very large.

Limits are set in forked children, so that they end with them.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child, Parent
from data import anonymous_bytes, is_whole, row_ids, trajectory

from mmbuf import ReplayReader, TrajectoryReplayBuffer, index, storage, vm

pytestmark = pytest.mark.skipif(not vm.CAN_REWIRE, reason="looks into /proc; has Linux's limits")

MIB = 1 << 20


def saving(directory: Path, **options: Any) -> TrajectoryReplayBuffer:
    options = {"sample_window_size": 0, **options}
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory, **options)


def in_child(function: Callable[..., Any], *arguments: Any, timeout_s: float = 100) -> Any:
    """What ``function(*arguments)`` returns in a forked child."""

    def run(_: Parent) -> Any:
        signal.alarm(int(timeout_s))
        return function(*arguments)

    with Child(run) as child:
        return child.result(timeout_s)


def limit(what: int, size: int) -> None:
    resource.setrlimit(what, (size, size))


def status(name: str) -> int:
    """A line of ``/proc/self/status`` in kB, as bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def num_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wide(i: int, num_steps: int, row_bytes: int, num_columns: int = 1) -> dict[str, Any]:
    """Trajectory ``i`` of one environment: ``code = 1,000 * i + t``, and wide rows of it."""
    codes = torch.arange(num_steps)[:, None] + 1000 * i
    rows = codes[..., None].expand(num_steps, 1, row_bytes // 8)
    return {"code": codes, "wide": {f"{k}": rows + k for k in range(num_columns)}}


def assert_is_wide(batch: dict[str, Any]) -> None:
    codes = batch["code"][:, None]
    for k, rows in batch["wide"].items():
        assert torch.equal(rows, (codes + int(k)).expand_as(rows)), k


# -- descriptors -----------------------------------------------------------------------------------


def multiply(directory: Path, count: int) -> None:
    """Have the journal name the files of a store again and again, until there are ``count``."""
    contents, _ = index.read(str(directory))
    entries = [entry.to_json() for entry in contents.entries.values()]
    lines = []
    for i in range(len(entries), count):
        entry = entries[i % len(entries)]
        entry["trajectory_id"] = i
        entry["added_at"] += 1
        lines.append(index._encode({"event": "add", "entry": entry}))
    with open(directory / index.JOURNAL, "ab") as journal:
        journal.write(b"".join(lines))


def with_few_descriptors(directory: Path, num_files: int) -> None:
    limit(resource.RLIMIT_NOFILE, 64)
    with saving(directory / "store") as buffer:
        for i in range(num_files):
            buffer.add_trajectories([trajectory(i)])
        buffer.flush()
        assert is_whole(buffer.sample(5_000))
        buffer.save_checkpoint(directory / "checkpoint")
    with saving(directory / "other") as buffer:
        buffer.load_checkpoint(directory / "checkpoint")
        assert len(buffer) == num_files
        assert is_whole(buffer.sample(5_000))
    multiply(directory / "store", 2_000)
    for cache_size in (None, 0):
        with saving(directory / "store", cache_size=cache_size) as buffer:
            assert len(buffer) == 2_000
            batch = buffer.sample(5_000)
            assert is_whole(batch)
            assert len({i for i, _, _ in row_ids(batch)}) > 0.9 * num_files


def test_64_descriptors_are_enough_for_2_000_trajectories(
    tmp_path: Path, without_fsync: None
) -> None:
    in_child(with_few_descriptors, tmp_path, 200)


@pytest.mark.slow
def test_64_descriptors_are_enough_for_2_000_files(tmp_path: Path, without_fsync: None) -> None:
    in_child(with_few_descriptors, tmp_path, 2_000)


# -- mappings --------------------------------------------------------------------------------------


def sample_far_more_than_can_be_mapped(directory: Path, count: int, num_rows: int) -> int:
    generator = np.random.default_rng(0)
    before = num_maps()  # those of all libraries, many more in some processes than in others
    with ReplayReader(directory) as reader:
        assert len(reader) == count
        cache = reader._window.cache
        assert cache is not None
        for _ in range(14):
            rows = generator.integers(0, count * num_rows, 1024)
            _, leaves = cache.gather(lambda low, _, rows=rows: low + rows)  # type: ignore[misc]
            batch = cache.schema.nest([torch.from_numpy(leaf) for leaf in leaves])
            expected = rows // num_rows % 20 * 1000 + rows % num_rows
            assert np.array_equal(batch["code"].numpy(), expected)
            assert_is_wide(batch)
            for k in range(7):
                assert torch.equal(batch["small"][f"{k}"], batch["code"].float() + k)
        lines, used = num_maps(), vm.MAPS.used
        assert used > 0.9 * vm.MAPS.limit
    assert vm.MAPS.used == 0
    assert num_maps() < before + 500
    return lines


def test_50_000_trajectories_of_ten_columns_stay_below_the_limit_of_mappings(
    tmp_path: Path,
) -> None:
    count, num_rows = 50_000, 32
    with saving(tmp_path) as buffer:
        for i in range(20):
            item = wide(i, num_rows, 4096, num_columns=2)
            item["small"] = {f"{k}": item["code"].float() + k for k in range(7)}
            buffer.add_trajectories([item])
    multiply(tmp_path, count)
    lines = in_child(sample_far_more_than_can_be_mapped, tmp_path, count, num_rows)
    assert lines < int(Path("/proc/sys/vm/max_map_count").read_text())


# -- memory and addresses --------------------------------------------------------------------------


def sample_with_little_memory(directory: Path, extra: int) -> None:
    limit(resource.RLIMIT_DATA, status("VmData") + extra)
    for opened in (ReplayReader, saving):
        with opened(directory) as source:
            seen = set()
            for _ in range(60):
                batch = source.sample(200)
                assert_is_wide(batch)
                seen.update((batch["code"] // 1000).tolist())
            assert seen == set(range(20))
            found = source.get_trajectory(19).to_columns()
            assert found["code"][0].item() == 19_000


@pytest.mark.parametrize("kind", ["mapped", "copied"])
def test_a_data_set_larger_than_the_memory_that_is_allowed_is_sampled(
    tmp_path: Path, kind: str
) -> None:
    """96 MiB where 40 are allowed: of columns that are mapped, and of such as are copied."""
    num_steps, count = (600, 20) if kind == "mapped" else (1, 12_000)
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([wide(i, num_steps, 8192) for i in range(20)])
    multiply(tmp_path, count)
    in_child(sample_with_little_memory, tmp_path, 40 * MIB)


def add_with_few_addresses(directory: Path, extra: int, num_trajectories: int) -> int:
    limit(resource.RLIMIT_AS, status("VmSize") + extra)
    with saving(directory) as buffer:
        for i in range(num_trajectories):
            buffer.add_trajectories([wide(i, 100, 40_960)])
            assert_is_wide(buffer.sample(10))
        buffer.flush()
        seen = set()
        for _ in range(40):
            batch = buffer.sample(20)
            assert_is_wide(batch)
            seen.update((batch["code"] // 1000).tolist())
        assert seen == set(range(num_trajectories))
        return buffer.get_stats()["cache_size"]


def test_a_window_larger_than_the_addresses_that_are_allowed_is_sampled(tmp_path: Path) -> None:
    """160 MB where there are addresses of 200 MiB for all."""
    resident = in_child(add_with_few_addresses, tmp_path, 200 * MIB, 40)
    assert 5 < resident < 40


def add_to_memory_with_few_addresses(extra: int) -> int:
    limit(resource.RLIMIT_AS, status("VmSize") + extra)
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        items = (wide(i, 100, 40_960) for i in range(200))
        with pytest.raises(MemoryError, match="RLIMIT_AS"):
            buffer.add_trajectories(items)
        assert_is_wide(buffer.sample(100))
        return len(buffer)


def test_memory_that_is_full_refuses_the_next_trajectory_and_keeps_the_others() -> None:
    assert 5 < in_child(add_to_memory_with_few_addresses, 400 * MIB) < 100


# -- what is very large ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_a_column_above_two_gibibytes_comes_back(tmp_path: Path, trajectory_format: str) -> None:
    num_steps = 2_100
    marks = (torch.arange(num_steps) % 251).to(torch.uint8)
    item = {"t": torch.arange(num_steps)[:, None]}
    item["image"] = marks[:, None, None, None].expand(num_steps, 1, 1024, 1024)
    assert item["image"].nelement() > 1 << 31

    def check(batch: dict[str, Any]) -> None:
        image = batch["image"]
        expected = (batch["t"] % 251).to(torch.uint8)[:, None, None]
        assert torch.equal(image, expected.expand_as(image))

    path = tmp_path / "store"
    try:
        with saving(path, trajectory_format=trajectory_format) as buffer:
            buffer.add_trajectories([item])
            check(buffer.sample(40))
            buffer.flush()
            check(buffer.sample(40))
        for can_map in (True, False):
            with saving(path, enable_cache=can_map) as buffer:
                check(buffer.sample(200))
        with ReplayReader(path) as reader:
            found = reader.get_trajectory(0).to_columns()["image"]
            for t in (0, 1, 2_047, 2_048, num_steps - 1):
                assert found[t].min() == found[t].max() == t % 251
            del found
        contents, _ = index.read(str(path))
        (entry,) = contents.entries.values()
        assert contents.schema is not None
        storage.verify(str(path / entry.file), entry, contents.schema)
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_200_001_steps_come_back(tmp_path: Path, trajectory_format: str) -> None:
    steps = torch.arange(200_001)[:, None]
    item = {
        "rewards": steps,
        "dones": torch.arange(200_002)[:, None] % 1_000 == 0,
        "curr_obs": {"pixels": (steps % 256).to(torch.uint8)[..., None].expand(-1, -1, 40)},
    }
    item["curr_obs"]["task"] = [[f"task {t % 9}"] for t in range(200_001)]

    def check(batch: dict[str, Any]) -> None:
        t = batch["rewards"]
        pixels = batch["curr_obs"]["pixels"]
        assert torch.equal(batch["dones"], (t + 1) % 1_000 == 0)
        assert torch.equal(pixels, (t % 256).to(torch.uint8)[:, None].expand_as(pixels))
        assert batch["curr_obs"]["task"] == [f"task {i % 9}" for i in t.tolist()]

    with saving(tmp_path, trajectory_format=trajectory_format) as buffer:
        buffer.add_trajectories([item])
        check(buffer.sample(2_000))
        buffer.flush()
        check(buffer.sample(2_000))
    with saving(tmp_path, cache_size=0) as buffer:
        check(buffer.sample(50))
    with ReplayReader(tmp_path) as reader:
        check(reader.sample(2_000))
        found = reader.get_trajectory(0)
    assert torch.equal(found.rewards, steps)
    assert torch.equal(found.dones, item["dones"])


# -- nothing grows ---------------------------------------------------------------------------------


def counts() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": num_descriptors(),
        "threads": threading.active_count(),
        "mappings": num_maps(),
        "budget": vm.MAPS.used,
        "anonymous": anonymous_bytes(),
    }


def go_round(directory: Path, rounds: int, trajectory_format: str) -> None:
    """Add, sample, evict, reopen, sample, close; counts are flat after the first quarter."""
    image = (32, 32, 3)

    def go(number: int) -> dict[str, int]:
        path = directory / f"{number // 20}"  # so that the store itself does not grow
        options = {"trajectory_format": trajectory_format, "sample_window_size": 3}
        with saving(path, cache_size=2, **options) as buffer:
            for i in range(4):
                buffer.add_trajectories([trajectory(i, image=image)])
                assert is_whole(buffer.sample(50))
            buffer.flush()
            buffer.clear_cache()
            assert is_whole(buffer.sample(50))
            during = counts() if number % 5 == 0 else {}
        with saving(path, **options) as buffer:
            assert is_whole(buffer.sample(400))
        with ReplayReader(path) as reader:
            assert is_whole(reader.sample(50))
        return during

    before = counts()
    first: list[dict[str, int]] = []
    for number in range(rounds):
        during = go(number)
        if number % 5:
            continue
        after = counts()
        for name in ("descriptors", "threads", "budget"):
            assert after[name] == before[name], (number, name)
        if number < rounds // 3:
            first += [during, after]
            continue
        for now in (during, after):
            for name, slack in (("descriptors", 0), ("threads", 0), ("mappings", 8), ("budget", 0)):
                assert now[name] <= max(known[name] for known in first) + slack, (number, name)
            most = max(known["anonymous"] for known in first)
            assert now["anonymous"] <= most + 8 * MIB, number


def test_nothing_grows_over_a_hundred_rounds(tmp_path: Path) -> None:
    in_child(go_round, tmp_path, 100, "arrow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trajectory_format", list(storage.FORMATS))
def test_nothing_grows_over_a_thousand_rounds(tmp_path: Path, trajectory_format: str) -> None:
    in_child(go_round, tmp_path, 1_000, trajectory_format, timeout_s=1_700)
