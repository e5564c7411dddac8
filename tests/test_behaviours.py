"""What users of other buffers suffered, as small tests that it cannot happen here.

Only what no other test module holds already: flags and their rows, seeds, ids, dtypes, the flag
combinations and bad input are in ``test_buffer``; torn and damaged files, full disks and killed
writers have modules named after these dangers.

What cannot happen here, and why:

- a batch row is padded: there is no padding, a row exists or it does not;
- sampling time grows with the number of record batches: a file has exactly one;
- compressed files are decoded on every read: files are never compressed;
- a mapping outlives a disk that is full and kills the process: no writable mapping exists;
- the store is larger than the memory for pickling: a buffer does not pickle at all;
- an index array of the caller is changed: no method takes one;
- a bounded ring ends in the middle of a trajectory: trajectories are never split;
- a cache of open decoders grows: no handle stays open, a mapping needs none.

What belongs to parts that come later: checkpoints and resuming; importing other formats; slices of
consecutive steps; priorities; n-step returns; prefetching and worker processes; filters, merges and
queries; following a live writer; relabelling and expert-only rows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from data import (
    anonymous_bytes,
    columns_of,
    is_equal,
    is_whole,
    names_of,
    opened,
    row_ids,
    run_python,
    trajectory,
)

from mmbuf import MmbufError, ReplayReader, TrajectoryReplayBuffer, WriteError, files, vm
from mmbuf.entry import Entry, Part
from mmbuf.index import TrajectoryIndex
from mmbuf.schema import Column, Payload, Schema

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
pytestmark = pytest.mark.usefixtures("without_fsync")
FLAGS = [(False, False), (False, True), (True, False), (True, True)]
IMAGE = (64, 64)  # of 12 rows: 48 KiB, so that it is mapped


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that publishes nothing until the event is set."""
    is_awake = threading.Event()
    really = files.rename

    def rename(source: str, target: str) -> None:
        assert is_awake.wait(60)
        really(source, target)

    monkeypatch.setattr(files, "rename", rename)
    return is_awake


def mapped_files(directory: Path) -> set[str]:
    """Names of the files below ``directory`` that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if str(directory) in line}


# -- rows that belong together -------------------------------------------------------------------


def test_the_last_step_of_a_trajectory_is_drawn_as_often_as_the_first() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"step": torch.tensor([[0], [1]])} for _ in range(3)])
        counts = torch.bincount(buffer.sample(10_000)["step"])
    assert counts.sum() == 10_000
    assert abs(int(counts[0]) - 5_000) < 250  # five standard deviations


def test_the_next_observation_of_a_truncated_step_is_the_final_one_not_the_reset() -> None:
    # Two environments; the first is truncated after step 1 and reset to 100.
    item = {
        "curr_obs": {"x": torch.tensor([[0, 50], [1, 51], [100, 52], [101, 53]])},
        "next_obs": {"x": torch.tensor([[1, 51], [2, 52], [101, 53], [102, 54]])},
        "truncations": torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.bool),
    }
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        batch = buffer.sample(400)
    assert torch.equal(batch["next_obs"]["x"], batch["curr_obs"]["x"] + 1)
    assert set(batch["next_obs"]["x"][batch["truncations"]].tolist()) == {2}


def test_flags_before_and_after_a_step_keep_their_own_names() -> None:
    resets = torch.tensor([[True], [False], [False]])
    dones = torch.tensor([[False], [False], [False], [True]])
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(
            [{"step": torch.arange(3)[:, None], "dones": dones, "resets": resets}]
        )
        batch = buffer.sample(60)
    assert torch.equal(batch["dones"], batch["step"] == 2)
    assert torch.equal(batch["resets"], batch["step"] == 0)


def test_leaves_that_share_memory_are_stored_each_for_itself() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    item = {"curr_obs": {"x": x[:-1]}, "next_obs": {"x": x[1:]}}
    before = x.clone()
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        batch = buffer.sample(30)
        batch["curr_obs"]["x"].zero_()
        assert torch.equal(x, before)
        again = buffer.sample(30)
    assert torch.equal(again["next_obs"]["x"], again["curr_obs"]["x"] + 2)


def test_a_long_trajectory_keeps_all_its_steps_in_order(tmp_path: Path) -> None:
    steps = torch.arange(200_001)[:, None]
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([{"step": steps, "twice": 2 * steps}])
    with ReplayReader(tmp_path) as reader:
        assert reader.total_samples == 200_001
        assert torch.equal(reader.get_trajectory(0).extra["step"], steps)
        batch = reader.sample(1_000)
        assert torch.equal(batch["twice"], 2 * batch["step"])


def test_a_bfloat16_takes_two_bytes_a_value_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([{"x": torch.ones(100, 10, 50, dtype=torch.bfloat16)}])
    (name,) = names_of(tmp_path)
    assert 100_000 < (tmp_path / name).stat().st_size < 100_000 + 20_000


def test_trajectories_of_different_lengths_are_not_padded(tmp_path: Path) -> None:
    lengths = [1, 40, 2, 3, 1, 5]
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([{"x": torch.full((n, 1, 1000), float(n))} for n in lengths])
        assert buffer.total_samples == sum(lengths)
        buffer.flush()
        sizes = [path.stat().st_size for path in tmp_path.glob("*.arrow")]
    assert sum(sizes) < 4000 * sum(lengths) + len(lengths) * 20_000


@pytest.mark.parametrize("window", [1, 5, 6, 7])
def test_a_window_may_be_exactly_full(tmp_path: Path, window: int) -> None:
    with opened(tmp_path, sample_window_size=window) as buffer:
        buffer.add_trajectories([trajectory(i, 1, 1) for i in range(6)])
        drawn = {i for i, _, _ in row_ids(buffer.sample(500))}
        assert drawn == set(range(max(0, 6 - window), 6))
    with ReplayReader(tmp_path) as reader:
        assert len(reader) == 6


# -- adding beside sampling ----------------------------------------------------------------------


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_rows_are_never_mixed_while_one_adds_and_four_sample(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    failures: list[object] = []
    counts = [0] * 4
    is_done = threading.Event()

    def constant(i: int) -> dict[str, Any]:
        value = float(i)
        return {
            "a": torch.full((1 + i % 4, 3, 5), value),
            "b": torch.full((1 + i % 4, 3, 64, 32), value),
            "c": np.full((1 + i % 4, 3), value),
        }

    def sample(k: int, buffer: TrajectoryReplayBuffer) -> None:
        try:
            while not is_done.is_set():
                batch = buffer.sample(32)
                c = batch["c"]
                is_right = torch.equal(batch["a"], c[:, None].float().expand(-1, 5))
                is_right &= torch.equal(batch["b"], c[:, None, None].float().expand(-1, 64, 32))
                if not is_right:
                    failures.append(batch)
                counts[k] += 1
        except BaseException as failure:
            failures.append(failure)

    with TrajectoryReplayBuffer(
        enable_cache=is_cached,
        cache_size=3,
        sample_window_size=5,
        auto_save=is_saved,
        auto_save_path=tmp_path,
    ) as buffer:
        buffer.add_trajectories([constant(0)])
        threads = [threading.Thread(target=sample, args=(k, buffer)) for k in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 0.7
        i = 1
        while time.monotonic() < deadline or i < 20:
            buffer.add_trajectories([constant(i)])
            i += 1
        is_done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert min(counts) > 0


def test_rows_can_be_sampled_before_a_slow_disk_has_them(
    tmp_path: Path, disk: threading.Event
) -> None:
    with opened(tmp_path, sample_window_size=8, cache_size=2) as buffer:
        buffer.add_trajectories([trajectory(i, image=IMAGE) for i in range(8)])
        assert names_of(tmp_path) == []
        batch = buffer.sample(2_000)
        assert is_whole(batch)
        assert {i for i, _, _ in row_ids(batch)} == set(range(8))
        assert all(
            is_equal(buffer.get_trajectory(i).to_columns(), columns_of(trajectory(i, image=IMAGE)))
            for i in range(8)
        )
        disk.set()
        buffer.flush()
        assert buffer.get_stats()["cache_size"] == 2
        batch = buffer.sample(2_000)
        assert is_whole(batch)
        assert {i for i, _, _ in row_ids(batch)} == set(range(8))


def test_a_reader_never_sees_what_is_not_published(tmp_path: Path, disk: threading.Event) -> None:
    disk.set()
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.flush()
        disk.clear()
        buffer.add_trajectories([trajectory(1)])
        with ReplayReader(tmp_path) as reader:
            assert reader.trajectory_ids == [0]
        disk.set()
        buffer.flush()
        with ReplayReader(tmp_path) as reader:
            assert reader.trajectory_ids == [0, 1]


def test_a_failed_write_is_raised_and_the_rows_are_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_added = threading.Event()

    def full(*_: object) -> None:
        assert are_added.wait(30)
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_at", full)
            buffer.add_trajectories([trajectory(0), trajectory(1)])
            are_added.set()
            with pytest.raises(WriteError, match="No space left") as caught:
                buffer.flush()
            assert isinstance(caught.value.__cause__, OSError)
            assert names_of(tmp_path) == []
            assert {i for i, _, _ in row_ids(buffer.sample(300))} == {0, 1}
        buffer.flush()
        assert len(names_of(tmp_path)) == 2
    with ReplayReader(tmp_path) as reader:
        assert reader.trajectory_ids == [0, 1]


@pytest.mark.parametrize("is_saved", [False, True])
def test_an_error_in_the_middle_of_an_add_costs_no_earlier_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    really = Payload.copy_rows

    def copy_some(payload: Payload, position: int, rows: Any) -> None:
        if position == 2:
            raise MemoryError("camera")
        really(payload, position, rows)

    with TrajectoryReplayBuffer(auto_save=is_saved, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0), trajectory(1)])
        with monkeypatch.context() as patch:
            patch.setattr(Payload, "copy_rows", copy_some)
            with pytest.raises(MemoryError, match="camera"):
                buffer.add_trajectories([trajectory(2)])
        assert (len(buffer), buffer.total_samples) == (2, 24)
        buffer.add_trajectories([trajectory(3)])
        batch = buffer.sample(500)
    assert is_whole(batch)
    assert {i for i, _, _ in row_ids(batch)} == {0, 1, 3}
    assert len(names_of(tmp_path)) == (3 if is_saved else 0)


def test_a_reopened_store_takes_an_add_before_its_first_sample(tmp_path: Path) -> None:
    for i in range(4):
        with opened(tmp_path, sample_window_size=3, cache_size=1) as buffer:
            buffer.add_trajectories([trajectory(i)])
            drawn = {k for k, _, _ in row_ids(buffer.sample(500))}
            assert drawn == set(range(max(0, i - 2), i + 1))


# -- files ---------------------------------------------------------------------------------------


def test_no_sample_opens_a_file_when_everything_is_mapped(
    tmp_path: Path, opened_files: list[str]
) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, image=IMAGE) for i in range(5)])
        buffer.flush()
        opened_files.clear()
        for _ in range(20):
            buffer.sample(256)
    assert opened_files == []


def test_a_sample_of_what_is_not_resident_opens_each_file_once(
    tmp_path: Path, opened_files: list[str]
) -> None:
    with opened(tmp_path, cache_size=2) as buffer:
        buffer.add_trajectories([trajectory(i, image=IMAGE) for i in range(6)])
        buffer.flush()
        opened_files.clear()
        buffer.sample(500)
    assert sorted(opened_files) == [f"trajectory_{i}_.arrow" for i in range(4)]


def test_what_is_read_grows_with_the_batch_and_not_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]
    really = files.read_into

    def note(fd: int, view: memoryview, offset: int) -> None:
        read[0] += len(view)
        really(fd, view, offset)

    with opened(tmp_path, enable_cache=False) as buffer:
        buffer.add_trajectories([{"x": torch.zeros(100, 10, 4096, dtype=torch.uint8)}])  # 4 MB
        buffer.flush()
        monkeypatch.setattr(files, "read_into", note)
        buffer.sample(5)
        assert read == [5 * 4096]
        buffer.sample(50)
        assert read == [55 * 4096]


def test_no_published_file_is_ever_opened_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    really = os.open

    def note(path: str, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and os.path.exists(path):
            written.append(os.path.basename(path))
        return really(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", note)
    for i in range(2):
        with opened(tmp_path, sample_window_size=2) as buffer:
            buffer.add_trajectories([trajectory(5 * i + j, image=IMAGE) for j in range(5)])
            buffer.flush(sync=True)
            buffer.clear_cache()
            buffer.sample(50)
            buffer.clear()
    assert [name for name in written if name.endswith((".arrow", ".json"))] == []


def test_a_reader_keeps_its_rows_when_the_writer_deletes_the_files(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, image=IMAGE) for i in range(2)])
        buffer.flush()
        with ReplayReader(tmp_path, follow=False) as reader:
            reader.sample(200)
            got = reader.get_trajectory(0)
            buffer.clear()
            buffer.add_trajectories([trajectory(i, image=IMAGE) for i in (7, 8)])
            buffer.flush()
            batch = reader.sample(200)
            assert is_whole(batch)
            assert {i for i, _, _ in row_ids(batch)} == {0, 1}
            assert is_equal(got.to_columns(), columns_of(trajectory(0, image=IMAGE)))
            del got


def test_a_snapshot_that_was_cut_in_half_costs_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(4)])
    for name in ("trajectory_index.json", "metadata.json"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
    with opened(tmp_path) as buffer:
        assert buffer.trajectory_ids == [0, 1, 2, 3]
        buffer.add_trajectories([trajectory(4)])
        assert {i for i, _, _ in row_ids(buffer.sample(800))} == {0, 1, 2, 3, 4}


def test_every_entry_of_the_index_has_its_file_after_each_flush(tmp_path: Path) -> None:
    with opened(tmp_path, sample_window_size=3) as buffer:
        for i in range(0, 12, 4):
            buffer.add_trajectories([trajectory(i + j) for j in range(4)])
            buffer.flush()
            with ReplayReader(tmp_path) as reader:
                assert len(reader) == i + 4 == len(names_of(tmp_path))
                assert is_whole(reader.sample(500))


# -- limits of the system ------------------------------------------------------------------------

FEW_DESCRIPTORS = """
import os, resource, torch
from mmbuf import ReplayReader, TrajectoryReplayBuffer

os.fsync = lambda fd: None
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
items = [
    {"id": torch.full((2, 1), i)}
    | {f"column {k}": torch.full((2, 1, 3), float(i + k)) for k in range(4)}
    | {"wide": torch.full((2, 1, 8192), i % 256, dtype=torch.uint8)}
    for i in range(2000)
]
with TrajectoryReplayBuffer(
    sample_window_size=0, auto_save=True, auto_save_path="store"
) as buffer:
    buffer.add_trajectories(items)
    buffer.flush()
    assert len(set(buffer.sample(30_000)["id"].tolist())) == 2000
with ReplayReader("store") as reader:
    batch = reader.sample(30_000)
assert len(set(batch["id"].tolist())) == 2000
assert torch.equal(batch["column 3"][:, 2], batch["id"] + 3.0)
assert torch.equal(batch["wide"][:, 8191].long(), batch["id"] % 256)
with TrajectoryReplayBuffer(
    sample_window_size=0, enable_cache=False, auto_save=True, auto_save_path="store"
) as buffer:
    assert torch.equal((batch := buffer.sample(500))["wide"][:, 0].long(), batch["id"] % 256)
"""


def test_thousands_of_files_are_sampled_with_few_descriptors(tmp_path: Path) -> None:
    ran = run_python(FEW_DESCRIPTORS, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_mappings_that_run_out_cost_speed_and_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm.MAPS, "limit", vm.MAPS.used + 3)
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, image=(128, 128)) for i in range(10)])
        buffer.flush()
        assert buffer.get_stats()["cache_maps"] <= 3
        batch = buffer.sample(2_000)
    assert is_whole(batch)
    assert {i for i, _, _ in row_ids(batch)} == set(range(10))


@LINUX_ONLY
def test_a_buffer_for_huge_windows_takes_no_memory_until_rows_come(tmp_path: Path) -> None:
    before = anonymous_bytes()
    with opened(tmp_path, sample_window_size=10**9) as buffer:
        buffer.add_trajectories([{"x": torch.zeros(1, 1, 1 << 20, dtype=torch.uint8)}])
        buffer.sample(1)
        assert anonymous_bytes() - before < 16 << 20


def test_a_store_of_ten_thousand_opens_without_looking_at_a_file(
    tmp_path: Path, opened_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema([Column(("x",), "float32", (3,)), Column(("dones",), "bool", ())])
    index = TrajectoryIndex(str(tmp_path))
    for i in range(10_000):
        entry = Entry(
            f"{i:032x}", i, (4, 3), 0, "", 0.0, "arrow", f"{i}.arrow", 9_999, (Part(64, 12),) * 2
        )
        index.add(schema, entry)
    index.close()
    looked: list[str] = []
    monkeypatch.setattr(files, "size_of", looked.append)
    opened_files.clear()
    start = time.perf_counter()
    with ReplayReader(tmp_path) as reader:
        took_s = time.perf_counter() - start
        assert (len(reader), reader.total_samples) == (10_000, 120_000)
    assert (opened_files, looked) == ([], [])
    assert took_s < 5  # 0.3 on a quiet machine


# -- memory --------------------------------------------------------------------------------------


@LINUX_ONLY
@pytest.mark.parametrize("kind", ["buffer", "reopened", "reader"])
def test_nothing_is_mapped_any_more_after_close(tmp_path: Path, kind: str) -> None:
    budget = vm.MAPS.used
    buffer: Any = opened(tmp_path)
    buffer.add_trajectories([trajectory(i, image=IMAGE) for i in range(3)])
    buffer.flush()
    if kind != "buffer":
        buffer.close()
        buffer = opened(tmp_path) if kind == "reopened" else ReplayReader(tmp_path)
        buffer.sample(200)
    assert len(mapped_files(tmp_path)) == 3
    buffer.close()
    assert (mapped_files(tmp_path), vm.MAPS.used) == (set(), budget)


@LINUX_ONLY
def test_files_that_left_the_cache_are_not_mapped_any_more(tmp_path: Path) -> None:
    with opened(tmp_path, sample_window_size=5, cache_size=2) as buffer:
        for i in range(8):
            buffer.add_trajectories([trajectory(i, image=IMAGE)])
            buffer.sample(100)
        buffer.flush()
        assert mapped_files(tmp_path) == {"trajectory_6_.arrow", "trajectory_7_.arrow"}


@LINUX_ONLY
def test_addresses_are_given_back_at_close(tmp_path: Path) -> None:
    def size_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * vm.PAGE

    gc.collect()
    before = size_bytes()
    for i in range(3):
        with opened(tmp_path / str(i)) as buffer:
            buffer.add_trajectories([trajectory(0)])
            assert size_bytes() - before > 1 << 30
    assert size_bytes() - before < 1 << 30


def test_a_sample_takes_nothing_from_arrows_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i, image=(256, 256)) for i in range(4)])
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated(), pool.max_memory()
    with ReplayReader(tmp_path) as reader:
        reader.sample(200)
        reader.get_trajectory(0)
    assert (pool.bytes_allocated(), pool.max_memory()) == before


@LINUX_ONLY
@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_memory_stays_flat_over_batches_that_are_converted_and_dropped(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    with TrajectoryReplayBuffer(
        enable_cache=is_cached, auto_save=is_saved, auto_save_path=tmp_path
    ) as buffer:
        buffer.add_trajectories([trajectory(i, image=(128, 128)) for i in range(5)])
        buffer.flush()

        def train() -> None:
            for _ in range(20):
                batch = buffer.sample(128)  # 2 MiB, 8 as float
                batch["curr_obs"]["image"].float().mean()

        train()
        train()  # by now the allocator has settled
        before = anonymous_bytes()
        train()
        assert anonymous_bytes() - before < 16 << 20


@LINUX_ONLY
@pytest.mark.parametrize("is_saved", [False, True])
def test_memory_stays_flat_over_a_thousand_adds(tmp_path: Path, is_saved: bool) -> None:
    with TrajectoryReplayBuffer(
        sample_window_size=10, auto_save=is_saved, auto_save_path=tmp_path
    ) as buffer:
        item = {"x": torch.zeros(4, 4, 2048)}  # 128 KiB
        buffer.add_trajectories([item] * 50)
        buffer.flush()
        before = anonymous_bytes()
        buffer.add_trajectories([item] * 1_000)
        buffer.flush()
        assert len(buffer) == 1_050
        assert anonymous_bytes() - before < 24 << 20


# -- processes -----------------------------------------------------------------------------------


children: list[int] = []


def forked(child: Callable[[int], object]) -> int:
    """Run ``child`` with one end of a pipe in a forked process; the other end, to read from."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads; that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)  # ends the child should it hang
            torch.set_num_threads(1)  # torch's own threads do not come through a fork
            child(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    children.append(pid)
    return reading


@contextlib.contextmanager
def reaped() -> Iterator[None]:
    """At the end of the block: every forked child has ended well."""
    yield
    codes = []
    while children:
        _, status = os.waitpid(children.pop(), 0)
        codes.append(os.waitstatus_to_exitcode(status))
    assert set(codes) <= {0}


def read_all(fd: int) -> str:
    with open(fd) as pipe:
        return pipe.read()


@pytest.mark.parametrize("kind", ["memory", "buffer", "reader"])
def test_forked_children_sample_each_a_stream_of_its_own(tmp_path: Path, kind: str) -> None:
    store: Any = TrajectoryReplayBuffer() if kind == "memory" else opened(tmp_path)
    store.add_trajectories([trajectory(i, image=IMAGE) for i in range(4)])
    store.flush()
    if kind == "reader":
        store.close()
        store = ReplayReader(tmp_path)

    def child(fd: int) -> None:
        batch = store.sample(40)
        assert is_whole(batch)
        os.write(fd, repr(row_ids(batch)).encode())

    with reaped():
        outlets = [forked(child) for _ in range(4)]
        streams = [read_all(fd) for fd in outlets] + [repr(row_ids(store.sample(40)))]
    store.close()
    assert len(set(streams)) == 5


def test_a_parent_draws_what_it_would_have_drawn_without_forking() -> None:
    with TrajectoryReplayBuffer(seed=3) as one, TrajectoryReplayBuffer(seed=3) as twin:
        for buffer in (one, twin):
            buffer.add_trajectories([trajectory(i) for i in range(4)])
        first = one.sample(40)
        with reaped():
            os.close(forked(lambda _: one.sample(7)))
        assert is_equal([first, one.sample(40)], [twin.sample(40), twin.sample(40)])


def test_a_forked_child_cannot_add_and_leaves_the_store_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.flush()

        def child(fd: int) -> None:
            for call in (
                lambda: buffer.add_trajectories([trajectory(1)]),
                buffer.flush,
                buffer.clear,
            ):
                with pytest.raises(MmbufError, match="forked child"):
                    call()
            buffer.close()

        with reaped():
            os.close(forked(child))
        buffer.add_trajectories([trajectory(2)])
        buffer.flush()
        assert len(names_of(tmp_path)) == 2
        assert {i for i, _, _ in row_ids(buffer.sample(300))} == {0, 2}


def test_a_fork_in_the_middle_of_adds_and_samples_does_not_hang_the_child(tmp_path: Path) -> None:
    is_done = threading.Event()

    def sample(buffer: TrajectoryReplayBuffer) -> None:
        while not is_done.is_set():
            buffer.sample(16)

    with opened(tmp_path, sample_window_size=4, cache_size=2) as buffer:
        buffer.add_trajectories([trajectory(0, image=IMAGE)])
        thread = threading.Thread(target=sample, args=(buffer,))
        thread.start()
        with reaped():
            for i in range(1, 12):
                buffer.add_trajectories([trajectory(i, image=IMAGE)])
                os.close(forked(lambda _: assert_whole(buffer.sample(64))))
        is_done.set()
        thread.join()


def assert_whole(batch: dict[str, Any]) -> None:
    assert is_whole(batch)


SPAWNED = """
import sys
from mmbuf import ReplayReader
with ReplayReader("store", seed=int(sys.argv[1])) as reader:
    print(reader.sample(30)["curr_obs"]["states"].tolist())
"""


def test_other_processes_sample_what_a_live_writer_holds(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(4)])
        buffer.flush()
        ran = run_python(SPAWNED, 3, cwd=tmp_path)
        with ReplayReader(tmp_path / "store", seed=3) as reader:
            expected = reader.sample(30)["curr_obs"]["states"].tolist()
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{expected}\n", "")
