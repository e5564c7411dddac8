"""TrajectoryReplayBuffer: what adding, sampling, reopening and closing promise."""

from __future__ import annotations

import asyncio
import copy
import errno
import fcntl
import json
import math
import multiprocessing.context
import os
import pickle
import random
import shutil
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import (
    DTYPES,
    Halt,
    LookAlike,
    anonymous_bytes,
    bits,
    columns_of,
    contents_of,
    counts_of,
    every_dtype,
    is_equal,
    is_whole,
    names_of,
    opened,
    random_bits,
    row_ids,
    run_python,
    trajectory,
    without_privileges,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from mmbuf import (
    ClosedError,
    CorruptError,
    EmptyBufferError,
    LockedError,
    NoLocksError,
    ReplayReader,
    SchemaError,
    Trajectory,
    TrajectoryReplayBuffer,
    VersionError,
    WriteError,
    files,
    index,
    storage,
)
from mmbuf.cache import TrajectoryCache
from mmbuf.formats import arrow
from mmbuf.places import Places
from mmbuf.sampling import Prioritized, Slices, Uniform

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
pytestmark = pytest.mark.usefixtures("without_fsync")
FLAGS = [(False, False), (False, True), (True, False), (True, True)]
IMAGE = (64, 64)  # of 12 rows: 48 KiB, so that it is mapped
T, B = 4, 3
N = T * B


def made(path: Path, is_saved: bool, is_cached: bool, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        auto_save=is_saved, auto_save_path=path, enable_cache=is_cached, **options
    )


def fill(buffer: TrajectoryReplayBuffer, count: int = 3, **options: Any) -> None:
    buffer.add_trajectories([trajectory(i, **options) for i in range(count)])


def all_ids(*numbers: int) -> set[tuple[int, int, int]]:
    return {(i, t, b) for i in numbers for t in range(T) for b in range(B)}


def one_row(value: float = 7.0) -> dict[str, Any]:
    return {"x": torch.full((1, 1, 2), value)}


# -- sample --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 256])
def test_sample_returns_exactly_the_number_asked_for(count: int) -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer)
        batch = buffer.sample(count)
    assert [len(leaf) for leaf in (batch["rewards"], batch["dones"], batch["actions"])] == (
        [count] * 3
    )
    assert len(batch["curr_obs"]["task"]) == count


def test_more_rows_than_there_are_come_with_replacement() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(0, 2, 1)])
        ids = row_ids(buffer.sample(50))
    assert (len(ids), set(ids)) == (50, {(0, 0, 0), (0, 1, 0)})


@pytest.mark.parametrize("count", [0, -1])
def test_zero_or_fewer_rows_are_refused(count: int) -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer)
        with pytest.raises(ValueError, match=f"num_chunks: expected at least 1, got {count}"):
            buffer.sample(num_chunks=count)


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_there_is_nothing_to_draw_from_an_empty_buffer(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    with made(tmp_path, is_saved, is_cached) as buffer:
        with pytest.raises(EmptyBufferError):
            buffer.sample(1)
        fill(buffer)
        buffer.clear()
        with pytest.raises(RuntimeError, match="expected rows to draw from"):
            buffer.sample(1)


def test_a_longer_trajectory_is_drawn_more_often() -> None:
    with TrajectoryReplayBuffer(seed=3) as buffer:
        buffer.add_trajectories([trajectory(0, 1, 1), trajectory(1, 9, 1)])
        counts = Counter(row_ids(buffer.sample(20_000)))
    assert len(counts) == 10
    # Five standard deviations.
    assert all(abs(count - 2_000) < 212 for count in counts.values())


def test_sample_draws_from_the_newest_of_the_window() -> None:
    with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
        fill(buffer, 8)
        assert set(row_ids(buffer.sample(2_000))) == all_ids(5, 6, 7)


def test_a_window_of_zero_is_the_whole_list() -> None:
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        fill(buffer, 120, num_steps=1, num_envs=1)
        assert {i for i, _, _ in row_ids(buffer.sample(5_000))} == set(range(120))


def test_the_window_is_the_newest_hundred_by_default() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 120, num_steps=1, num_envs=1)
        assert buffer.window_ids == list(range(20, 120))
        assert {i for i, _, _ in row_ids(buffer.sample(5_000))} == set(range(20, 120))


def test_a_batch_nests_as_its_trajectories_do() -> None:
    item = {
        "z": torch.zeros(T, B),
        "obs": {"b": {"deep": torch.zeros(T, B, 2)}, "a": torch.zeros(T, B, dtype=torch.uint8)},
        "a.b/c": torch.zeros(T, B),
    }
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        batch = buffer.sample(5)
    expected = {
        "z": torch.zeros(5),
        "obs": {"b": {"deep": torch.zeros(5, 2)}, "a": torch.zeros(5, dtype=torch.uint8)},
        "a.b/c": torch.zeros(5),
    }
    assert is_equal(batch, expected)


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_changing_a_batch_changes_nothing_else(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    item = {"x": torch.full((1, 1, 8192), 7.0)}
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([item])
        for _ in range(2):
            batch = buffer.sample(3)
            assert torch.equal(batch["x"], torch.full((3, 8192), 7.0))
            batch["x"].zero_()
            batch.clear()
            buffer.flush()
    if is_saved:
        with ReplayReader(tmp_path) as reader:
            assert torch.equal(reader.sample(1)["x"], torch.full((1, 8192), 7.0))


@pytest.mark.parametrize("is_saved", [False, True])
def test_changing_a_trajectory_that_was_got_changes_nothing_else(
    tmp_path: Path, is_saved: bool
) -> None:
    with made(tmp_path, is_saved, True) as buffer:
        buffer.add_trajectories([trajectory(0, image=IMAGE)])
        buffer.flush()
        got = buffer.get_trajectory(0)
        got.actions.zero_()
        got.curr_obs["image"].zero_()
        again = buffer.get_trajectory(0)
        assert torch.equal(again.curr_obs["image"], trajectory(0, image=IMAGE)["curr_obs"]["image"])
        assert is_whole(buffer.sample(50))


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_text_comes_out_as_a_list_of_str(tmp_path: Path, is_saved: bool, is_cached: bool) -> None:
    tasks = [["pick", "", "押す"], ["place\0", "pick", "é" * 300]]
    codes = torch.arange(6).reshape(2, 3)
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([{"code": codes, "task": tasks}])
        for _ in range(2):
            batch = buffer.sample(40)
            flat = [*tasks[0], *tasks[1]]
            assert batch["task"] == [flat[code] for code in batch["code"].tolist()]
            buffer.flush()


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_every_dtype_keeps_its_bits(tmp_path: Path, is_saved: bool, is_cached: bool) -> None:
    item = {dtype: random_bits(dtype, (T, B, 5), i) for i, dtype in enumerate(DTYPES)}
    item["code"] = torch.arange(N).reshape(T, B)
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([item])
        buffer.flush()
        got = buffer.get_trajectory(0).to_columns()
        batch = buffer.sample(64)
        rows = batch["code"]
        for dtype in DTYPES:
            assert (got[dtype].dtype, bits(got[dtype])) == (item[dtype].dtype, bits(item[dtype]))
            expected = item[dtype].reshape(N, 5).view(torch.uint8)[rows]
            assert batch[dtype].dtype == item[dtype].dtype
            assert bits(batch[dtype]) == bits(expected)


# -- sample into a batch -------------------------------------------------------------------------


def pointers(batch: dict[str, Any]) -> list[int]:
    leaves = (batch["rewards"], batch["actions"], batch["dones"], *batch["curr_obs"].values())
    return [leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_a_batch_is_refilled_in_place(tmp_path: Path, is_saved: bool, is_cached: bool) -> None:
    with (
        made(tmp_path, is_saved, is_cached, seed=5) as buffer,
        TrajectoryReplayBuffer(seed=5) as twin,
    ):
        fill(buffer, image=IMAGE)
        fill(twin, image=IMAGE)
        buffer.flush()
        batch = buffer.sample(300)
        twin.sample(300)
        before, task = pointers(batch), batch["curr_obs"]["task"]
        again = buffer.sample(300, out=batch)
        assert again is batch
        assert pointers(batch) == before
        assert batch["curr_obs"]["task"] is task
        assert is_equal(batch, twin.sample(300))


def test_a_batch_of_the_callers_own_is_filled() -> None:
    out = {"x": torch.empty(4, 2)}
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([one_row()])
        buffer.sample(4, out=out)
    assert torch.equal(out["x"], torch.full((4, 2), 7.0))


def with_leaf(leaf: Any) -> Callable[[dict[str, Any]], None]:
    return lambda out: out.__setitem__("actions", leaf)


BAD_OUTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "dtype": (with_leaf(torch.zeros(8, 3, dtype=torch.float64)), "column 'actions' of out: .*64"),
    "row shape": (with_leaf(torch.zeros(8, 4)), r"column 'actions' of out: .*\(8, 4\)"),
    "count": (with_leaf(torch.zeros(7, 3)), r"column 'actions' of out: .*\(8, 3\).*\(7, 3\)"),
    "strides": (with_leaf(torch.zeros(3, 8).T), "column 'actions' of out: .*not contiguous"),
    "grad": (with_leaf(torch.zeros(8, 3, requires_grad=True)), "'actions' of out: .*requires grad"),
    "meta": (with_leaf(torch.zeros(8, 3, device="meta")), "column 'actions' of out: .*on meta"),
    "array": (with_leaf(np.zeros((8, 3), np.float32)), "column 'actions' of out: .*ndarray"),
    "none": (with_leaf(None), "column 'actions' of out: .*NoneType"),
    "missing": (lambda out: out.pop("actions"), "column 'actions': .*missing"),
    "flat": (lambda out: out.__setitem__("curr_obs", torch.zeros(8)), "column 'curr_obs"),
    "text": (
        lambda out: out["curr_obs"].__setitem__("task", "text"),
        "column 'curr_obs.task' of out: expected a list of str, got str",
    ),
}


@pytest.mark.parametrize("case", BAD_OUTS)
def test_what_is_no_such_batch_is_refused_and_left_as_it_is(case: str) -> None:
    change, message = BAD_OUTS[case]
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer)
        out = buffer.sample(8)
        change(out)
        rewards, task = out["rewards"].clone(), str(out["curr_obs"])
        with pytest.raises(SchemaError, match=message):
            buffer.sample(8, out=out)
        assert torch.equal(out["rewards"], rewards)
        assert str(out["curr_obs"]) == task


def test_a_conjugate_view_is_refused_as_a_batch() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"z": torch.zeros(T, B, dtype=torch.complex64)}])
        with pytest.raises(SchemaError, match="column 'z' of out"):
            buffer.sample(2, out={"z": torch.zeros(2, dtype=torch.complex64).conj()})


def two_columns(dtype: torch.dtype = torch.float32) -> TrajectoryReplayBuffer:
    """Rows of two columns of 8 bytes: ``a`` of 1, and ``b`` of 2."""
    buffer = TrajectoryReplayBuffer(seed=0)
    shape = (4, 3, 8 // dtype.itemsize)
    buffer.add_trajectories(
        [{"a": torch.full(shape, 1, dtype=dtype), "deep": {"b": torch.full(shape, 2, dtype=dtype)}}]
    )
    return buffer


def of_one_tensor(kind: str, dtype: torch.dtype, *sizes: int) -> dict[str, Any]:
    """A batch of `two_columns` that lies in one tensor of zeros, or two tensors in its memory."""
    width = 8 // dtype.itemsize
    count = math.prod(sizes) * width
    memory = torch.zeros(2 * count, dtype=dtype)
    at = {"the same": 0, "half of it": count // 2, "one number": count - 1, "none": count}[kind]
    a, b = (memory[i : i + count].view(*sizes, width) for i in (0, at))
    return {"a": a, "deep": {"b": b}}


@pytest.mark.parametrize("sizes", [(6,), (6, 2)], ids=["rows", "slices"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["the same", "half of it", "one number"])
def test_out_whose_tensors_overlap_is_refused_before_anything_is_written(
    kind: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    buffer = two_columns(dtype)
    sampler = Slices(2) if len(sizes) == 2 else None
    out = of_one_tensor(kind, dtype, *sizes)
    with pytest.raises(
        SchemaError, match=r"column 'deep.b' of out: .* memory of its own.*that of column 'a'"
    ):
        buffer.sample(6, out, sampler=sampler)
    assert not out["a"].any()
    assert not out["deep"]["b"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_whose_tensors_lie_side_by_side_in_one_is_refilled(dtype: torch.dtype) -> None:
    out = of_one_tensor("none", dtype, 6)
    two_columns(dtype).sample(6, out)
    assert (out["a"] == 1).all()
    assert (out["deep"]["b"] == 2).all()


def test_overlapping_out_is_refused_after_one_of_the_same_shape_was_good() -> None:
    buffer = two_columns()
    good, bad = (of_one_tensor(kind, torch.float32, 6) for kind in ("none", "half of it"))
    buffer.sample(6, good)
    for _ in range(2):
        with pytest.raises(SchemaError, match="memory of its own"):
            buffer.sample(6, bad)
        buffer.sample(6, good)
    # In the memory that was good with fewer rows, more of them overlap.
    memory = torch.zeros(24)
    buffer.sample(6, {"a": memory[:12].view(6, 2), "deep": {"b": memory[12:].view(6, 2)}})
    longer = {"a": memory[:14].view(7, 2), "deep": {"b": memory[10:].view(7, 2)}}
    with pytest.raises(SchemaError, match="memory of its own"):
        buffer.sample(7, longer)


def test_out_with_one_list_for_two_columns_of_text_is_refused() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"a": [["x"]], "b": [["y"]]}])
    texts = ["", ""]
    with pytest.raises(SchemaError, match=r"column 'b' of out: .* memory of its own"):
        buffer.sample(2, {"a": texts, "b": texts})
    assert texts == ["", ""]


def test_out_with_a_tensor_that_overlaps_itself_is_refused() -> None:
    out = {"a": torch.zeros(1, 2).expand(6, 2), "deep": {"b": torch.zeros(6, 2)}}
    with pytest.raises(SchemaError, match="column 'a' of out: expected a contiguous"):
        two_columns().sample(6, out)


def test_out_with_columns_of_no_bytes_at_one_place_is_refilled() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories(
        [{"a": torch.ones(2, 1, 0), "b": torch.ones(2, 1, 0), "c": torch.ones(2, 1)}]
    )
    nothing = torch.zeros(3, 0)
    out = buffer.sample(3, {"a": nothing, "b": nothing, "c": torch.zeros(3)})
    assert out["c"].tolist() == [1, 1, 1]


def test_memory_of_big_batches_is_used_again() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"x": torch.ones(T, B, 4096)}])
        batch = buffer.sample(128)
        address = batch["x"].data_ptr()
        del batch
        assert buffer.sample(128)["x"].data_ptr() == address


def test_a_big_batch_that_is_held_is_not_handed_out_again() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"x": torch.ones(T, B, 4096)}])
        view = buffer.sample(128)["x"][5:6]
        for _ in range(3):
            buffer.sample(128)["x"].zero_()
        assert torch.equal(view, torch.ones(1, 4096))


def test_a_big_batch_outlives_its_buffer() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"x": torch.ones(T, B, 4096)}])
        batch = buffer.sample(128)
    assert torch.equal(batch["x"], torch.ones(128, 4096))


# -- seeds and global state ----------------------------------------------------------------------


def test_no_global_random_state_is_read_or_set(tmp_path: Path) -> None:
    def state() -> str:
        return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    before = state()
    with opened(tmp_path, seed=1) as buffer:
        fill(buffer)
        first = buffer.sample(20)
        buffer.flush()
    assert state() == before
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    with TrajectoryReplayBuffer(seed=1) as buffer:
        fill(buffer)
        assert is_equal(buffer.sample(20), first)


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_the_same_seed_gives_the_same_batches_however_rows_are_kept(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    with TrajectoryReplayBuffer(seed=8) as twin, made(tmp_path, is_saved, is_cached, seed=8) as one:
        for i in range(4):
            for buffer in (twin, one):
                buffer.add_trajectories([trajectory(i)])
            assert is_equal(one.sample(30), twin.sample(30))


def test_batches_do_not_depend_on_other_buffers() -> None:
    with (
        TrajectoryReplayBuffer(seed=8) as one,
        TrajectoryReplayBuffer(seed=8) as twin,
        TrajectoryReplayBuffer(seed=8) as other,
    ):
        fill(one)
        fill(twin)
        first = one.sample(20)
        fill(other, 9)
        other.sample(7)
        assert is_equal(twin.sample(20), first)


def test_another_seed_gives_other_batches() -> None:
    with TrajectoryReplayBuffer(seed=1) as one, TrajectoryReplayBuffer(seed=2) as other:
        fill(one)
        fill(other)
        assert row_ids(one.sample(50)) != row_ids(other.sample(50))


def test_without_a_seed_each_buffer_draws_its_own() -> None:
    with TrajectoryReplayBuffer(seed=None) as one, TrajectoryReplayBuffer(seed=None) as other:
        fill(one)
        fill(other)
        assert row_ids(one.sample(50)) != row_ids(other.sample(50))


# -- add -----------------------------------------------------------------------------------------


def plain() -> dict[str, Any]:
    return {
        "actions": torch.arange(24.0).reshape(T, B, 2),
        "rewards": torch.arange(12.0).reshape(T, B),
        "curr_obs": {"states": torch.arange(36).reshape(T, B, 3)},
    }


def as_arrays(item: dict[str, Any]) -> dict[str, Any]:
    return {
        key: as_arrays(leaf) if isinstance(leaf, dict) else leaf.numpy()
        for key, leaf in item.items()
    }


@pytest.mark.parametrize(
    "kind",
    [Trajectory, LookAlike, dict, lambda **item: as_arrays(item)],
    ids=["trajectory", "look-alike", "dict of tensors", "dict of arrays"],
)
@pytest.mark.parametrize("is_saved", [False, True])
def test_what_is_added_comes_back(tmp_path: Path, kind: Callable[..., Any], is_saved: bool) -> None:
    with made(tmp_path, is_saved, True) as buffer:
        buffer.add_trajectories([kind(**plain())])
        buffer.flush()
        got = buffer.get_trajectory(0)
        assert isinstance(got, Trajectory)
        assert is_equal(got.to_columns(), plain())
        assert list(buffer.sample(2)) == ["actions", "rewards", "curr_obs"]


def test_different_kinds_of_trajectories_go_into_one_buffer() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([Trajectory(**plain()), LookAlike(**plain()), as_arrays(plain())])
        assert all(is_equal(buffer.get_trajectory(i).to_columns(), plain()) for i in range(3))


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_the_caller_may_overwrite_its_memory_after_an_add(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    tensor, array, task = torch.full((T, B, 2), 1.0), np.full((T, B), 2.0), [["a"] * B] * T
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([{"x": tensor, "y": array, "task": task}])
        tensor.fill_(-1)
        array.fill(-1)
        task[0][0] = "b"
        for _ in range(2):
            batch = buffer.sample(20)
            assert torch.equal(batch["x"], torch.full((20, 2), 1.0))
            assert torch.equal(batch["y"], torch.full((20,), 2.0, dtype=torch.float64))
            assert batch["task"] == ["a"] * 20
            buffer.flush()
        assert torch.equal(buffer.get_trajectory(0).extra["x"], torch.full((T, B, 2), 1.0))


def test_an_add_leaves_the_callers_trajectory_as_it_is() -> None:
    item, same = trajectory(1), trajectory(1)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        buffer.sample(30)
    assert is_equal(item, same)


def test_tensors_that_require_grad_are_added_without_it() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"x": torch.ones(T, B, requires_grad=True)}])
        assert not buffer.sample(3)["x"].requires_grad


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x], -1)[..., 1],
        lambda x: x.repeat_interleave(2, 0)[::2],
    ],
    ids=["transposed", "last dimension", "every second step"],
)
def test_strides_do_not_matter(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(N * 2).reshape(T, B, 2)
    assert not view(x).is_contiguous()
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"x": view(x)}])
        assert torch.equal(buffer.get_trajectory(0).extra["x"], x)


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_lengths_and_widths_may_differ(tmp_path: Path, is_saved: bool, is_cached: bool) -> None:
    sizes = [(4, 3), (1, 1), (7, 2), (2, 5)]
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([{"x": torch.full((t, b), t * b)} for t, b in sizes])
        assert buffer.total_samples == 12 + 1 + 14 + 10
        for _ in range(2):
            counts = Counter(buffer.sample(3_000)["x"].tolist())
            assert set(counts) == {12, 1, 14, 10}
            buffer.flush()
        shapes = [tuple(buffer.get_trajectory(i).extra["x"].shape) for i in range(4)]
        assert shapes == sizes


def test_nan_and_infinity_are_data() -> None:
    x = torch.tensor([[float("nan"), float("inf")], [-float("inf"), -0.0]])
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"x": x}])
        assert bits(buffer.get_trajectory(0).extra["x"]) == bits(x)


def changed(**columns: Any) -> dict[str, Any]:
    return trajectory(1) | columns


MISFITS: dict[str, tuple[Any, str | None]] = {
    "a further key": (changed(more=torch.zeros(T, B)), "column 'more': expected no such column"),
    "a missing key": (
        {k: v for k, v in trajectory(1).items() if k != "rewards"},
        "column 'rewards': .*missing",
    ),
    "a dtype": (
        changed(rewards=torch.zeros(T, B, dtype=torch.float64)),
        r"column 'rewards': expected float32 rows of shape \(\), got float64 \(\)",
    ),
    "a row shape": (
        changed(actions=torch.zeros(T, B, 4)),
        r"column 'actions': expected float32 rows of shape \(3,\), got float32 \(4,\)",
    ),
    "a leaf for a dict": (changed(curr_obs=torch.zeros(T, B)), "column 'curr_obs"),
    "a number of steps": (
        changed(actions=torch.zeros(T - 1, B, 3)),
        "column 'actions': expected T = 4 steps as in column 'rewards', or T . E with E a divisor "
        "of T, got 3",
    ),
    "a number of flag steps": (
        changed(dones=torch.zeros(T + 3, B, dtype=torch.bool)),
        "column 'dones': expected T = 4 steps as in column 'rewards', or T . E with E a divisor "
        "of T, got 7",
    ),
    "a number of environments": (
        changed(actions=torch.zeros(T, B + 1, 3)),
        "column 'actions': expected B = 3 as in the other columns, got 4",
    ),
    "no steps": (trajectory(1, 0, B) | {"dones": torch.zeros(0, B, dtype=torch.bool)}, None),
    "no environments": (trajectory(1, T, 0), None),
    "a number": (changed(rewards=1.0), "column 'rewards'"),
    "text for a tensor": (changed(rewards=[["a"] * B] * T), "column 'rewards'"),
    "a tensor for text": (
        changed(curr_obs={"states": trajectory(1)["curr_obs"]["states"], "task": torch.ones(T, B)}),
        "column 'curr_obs.task': expected text",
    ),
    "ragged text": (
        changed(
            curr_obs={
                "states": trajectory(1)["curr_obs"]["states"],
                "task": [["a"] * B] * (T - 1) + [["a"]],
            }
        ),
        "column 'curr_obs.task'",
    ),
    "a key that is no str": (trajectory(1) | {3: torch.zeros(T, B)}, "key 3"),
    "a tensor": (torch.zeros(T, B), "trajectory: expected a Trajectory"),
    "nothing": (None, "trajectory: expected a Trajectory"),
    "an episode length": (changed(max_episode_length=-1), "max_episode_length: expected an int"),
    "weights": (changed(model_weights_id=3), "model_weights_id: expected a str, got int"),
}


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("case", MISFITS)
def test_of_a_misfit_nothing_is_kept_and_later_adds_work(
    tmp_path: Path, case: str, is_saved: bool
) -> None:
    item, message = MISFITS[case]
    with made(tmp_path, is_saved, True) as buffer:
        fill(buffer, 1)
        before = counts_of(buffer)
        with pytest.raises(SchemaError, match=message):
            buffer.add_trajectories([item])
        buffer.flush()
        after = counts_of(buffer)
        pending = dict.fromkeys(("pending_trajectories", "pending_bytes", "cache_maps"), 0)
        assert after | pending == before | pending
        buffer.add_trajectories([trajectory(2)])
        assert buffer.trajectory_ids == [0, 1]
        assert set(row_ids(buffer.sample(500))) == all_ids(0, 2)
        buffer.flush()
    assert len(names_of(tmp_path)) == (2 if is_saved else 0)


@pytest.mark.parametrize(
    "item",
    [
        {},
        {"x": None, "y": {}},
        Trajectory(),
        {"x": torch.zeros(())},
        {"x": torch.zeros(3)},
        {"x": torch.zeros(0, 3)},
        {"x": torch.zeros(3, 0)},
        {"x": np.zeros((2, 2), object)},
        {"x": np.zeros((2, 2), "M8[s]")},
        {"x": 3},
        {"x": torch.zeros(2, 2), "y": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 2).to_sparse()},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_first_trajectory_that_cannot_be_stored_decides_no_schema(item: Any) -> None:
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(SchemaError):
            buffer.add_trajectories([item])
        assert (len(buffer), buffer.trajectory_counter) == (0, 0)
        fill(buffer, 1)
        assert is_whole(buffer.sample(20))


def test_items_before_a_misfit_are_kept_and_those_after_are_not() -> None:
    bad = changed(rewards=torch.zeros(T, B, 1))
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(SchemaError, match="column 'rewards'"):
            buffer.add_trajectories([trajectory(0), trajectory(1), bad, trajectory(3)])
        assert buffer.trajectory_ids == [0, 1]
        assert set(row_ids(buffer.sample(500))) == all_ids(0, 1)


def test_a_generator_of_trajectories_is_taken() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(trajectory(i) for i in range(3))
        assert set(row_ids(buffer.sample(800))) == all_ids(0, 1, 2)


def test_what_a_generator_gave_before_it_failed_is_kept() -> None:
    def items() -> Iterator[dict[str, Any]]:
        yield trajectory(0)
        raise KeyError("simulator")

    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(KeyError, match="simulator"):
            buffer.add_trajectories(items())
        fill(buffer, 1)
        assert buffer.trajectory_ids == [0, 1]


@pytest.mark.parametrize(
    "item", [trajectory(0), Trajectory(), "text", b"bytes", 3, None], ids=lambda i: type(i).__name__
)
def test_a_single_item_instead_of_a_list_is_a_type_error(item: Any) -> None:
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(TypeError, match="expected a list of trajectories"):
            buffer.add_trajectories(item)
        assert len(buffer) == 0


def test_an_empty_list_adds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([])
        assert (len(buffer), buffer.trajectory_counter) == (0, 0)


@pytest.mark.parametrize("max_pending_bytes", [0, 1, 100_000])
def test_a_trajectory_larger_than_what_may_be_pending_is_let_in_alone(
    tmp_path: Path, max_pending_bytes: int
) -> None:
    with opened(tmp_path, max_pending_bytes=max_pending_bytes) as buffer:
        for i in range(4):
            buffer.add_trajectories([trajectory(i, image=(128, 128))])
            assert buffer.get_stats()["pending_trajectories"] <= 1
        assert set(row_ids(buffer.sample(2_000))) == all_ids(0, 1, 2, 3)


# -- flags of T + E steps ------------------------------------------------------------------------


def with_extra_steps(num_epochs: int) -> dict[str, Any]:
    """``dones`` say which step they follow, ``prev_values`` which they precede; -1: left out."""
    epoch = T // num_epochs
    follows, precedes = [], []
    for first in range(0, T, epoch):
        steps = list(range(first, first + epoch))
        follows += [-1, *steps]
        precedes += [*steps, -1]
    return {
        "step": torch.arange(T)[:, None].expand(T, B),
        "dones": torch.tensor(follows)[:, None].expand(-1, B),
        "terminations": torch.tensor(follows)[:, None, None].expand(-1, B, 2),
        "truncations": torch.arange(T)[:, None].expand(T, B),
        "prev_values": torch.tensor(precedes).float()[:, None, None].expand(-1, B, 1),
    }


@pytest.mark.parametrize("num_epochs", [1, 2, 4])
@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_flags_of_more_steps_belong_to_their_rows(
    tmp_path: Path, num_epochs: int, is_saved: bool, is_cached: bool
) -> None:
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([with_extra_steps(num_epochs)])
        assert buffer.total_samples == N
        for _ in range(2):
            batch = buffer.sample(100)
            step = batch["step"]
            assert torch.equal(batch["dones"], step)
            assert torch.equal(batch["terminations"], step[:, None].expand(-1, 2))
            assert torch.equal(batch["truncations"], step)
            assert torch.equal(batch["prev_values"], step[:, None].float())
            buffer.flush()


@pytest.mark.parametrize("num_epochs", [1, 2, 4])
@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_steps_that_are_left_out_are_given_back(
    tmp_path: Path, num_epochs: int, is_saved: bool, is_cached: bool
) -> None:
    item = with_extra_steps(num_epochs)
    with made(tmp_path, is_saved, is_cached) as buffer:
        buffer.add_trajectories([item])
        for _ in range(2):
            got = buffer.get_trajectory(0).to_columns()
            assert {key: leaf.tolist() for key, leaf in got.items()} == {
                key: leaf.tolist() for key, leaf in item.items()
            }
            buffer.flush()


# -- counts --------------------------------------------------------------------------------------


def test_size_and_samples_count_the_list_and_the_window_has_counts_of_its_own(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, sample_window_size=3, cache_size=2) as buffer:
        fill(buffer, 5)
        buffer.flush()
        assert (len(buffer), buffer.size, buffer.total_samples) == (5, 5, 5 * N)
        assert buffer.trajectory_ids == [0, 1, 2, 3, 4]
        assert buffer.window_ids == [2, 3, 4]
        assert buffer.trajectory_counter == 5
        buffer.sample(2 * N)
        assert counts_of(buffer) == {
            "num_trajectories": 5,
            "total_samples": 5 * N,
            "window_trajectories": 3,
            "window_samples": 3 * N,
            "cache_size": 2,
            "cache_filled": 2,
            "cache_maps": 0,
            "sampled_rows": 2 * N,
            "reuse": 2 / 5,
            "trajectory_counter": 5,
            "pending_trajectories": 0,
            "pending_bytes": 0,
        }


def test_stats_tell_the_rate_the_age_and_the_waiting(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 2)
        start_s = time.monotonic()
        buffer.get_stats()  # the rate is that since some moment within this
        buffer.sample(1000)
        time.sleep(0.02)
        stats = buffer.get_stats()
        took_s = time.monotonic() - start_s
        assert 1000 / took_s <= stats["sampled_rows_per_s"] <= 1000 / 0.02
        assert stats["window_age_s"] >= 0.02
        assert stats["add_wait_s"] >= 0.0
        assert buffer.get_stats()["sampled_rows_per_s"] == 0.0  # since it was asked last


def test_waiting_for_the_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = files.rename

    def slowly(source: str, target: str) -> None:
        time.sleep(0.05)
        really(source, target)

    monkeypatch.setattr(files, "rename", slowly)
    with opened(tmp_path, max_pending_bytes=0) as buffer:
        fill(buffer, 3)
        assert buffer.get_stats()["add_wait_s"] >= 0.05


def test_stats_have_the_same_keys_before_the_first_trajectory() -> None:
    with TrajectoryReplayBuffer() as buffer:
        empty = buffer.get_stats()
        assert set(empty.values()) == {0}
        fill(buffer)
        assert list(buffer.get_stats()) == list(empty)


def test_is_ready_counts_trajectories() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 2)
        assert [buffer.is_ready(n) for n in (0, 1, 2, 3)] == [True, True, True, False]


def test_is_ready_can_be_awaited() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 2)
        assert [asyncio.run(buffer.is_ready_async(n)) for n in (2, 3)] == [True, False]


def test_the_repr_says_where_and_how_much(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 2)
        where, what = repr(buffer).splitlines()[0].split(": ", 1)
        assert where == f"<TrajectoryReplayBuffer {tmp_path}"
        assert what == "2 trajectories, 24 rows, 792 bytes, window: the newest 100"


# -- the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_each_combination_of_flags_adds_samples_and_reopens(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    with made(tmp_path, is_saved, is_cached) as buffer:
        fill(buffer, 4, image=IMAGE)
        for _ in range(2):
            batch = buffer.sample(500)
            assert is_whole(batch)
            assert set(row_ids(batch)) == all_ids(0, 1, 2, 3)
            buffer.flush()
    with made(tmp_path, is_saved, is_cached) as buffer:
        assert len(buffer) == (4 if is_saved else 0)
        buffer.add_trajectories([trajectory(4, image=IMAGE)])
        batch = buffer.sample(800)
        assert is_whole(batch)
        assert set(row_ids(batch)) == all_ids(*((0, 1, 2, 3, 4) if is_saved else (4,)))


def test_an_existing_store_is_continued_and_its_files_stay_as_they_are(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 2)
    old = {name: (tmp_path / name).stat() for name in names_of(tmp_path)}
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(2)])
        assert buffer.trajectory_ids == [0, 1, 2]
        assert set(row_ids(buffer.sample(800))) == all_ids(0, 1, 2)
    assert len(names_of(tmp_path)) == 3
    for name, stat in old.items():
        now = (tmp_path / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


def test_a_reopened_store_holds_to_its_schema(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
    with opened(tmp_path) as buffer:
        with pytest.raises(SchemaError, match="column 'rewards'"):
            buffer.add_trajectories([changed(rewards=torch.zeros(T, B, 1))])
        assert len(buffer) == 1


def test_a_store_opens_under_another_window_and_cache(tmp_path: Path) -> None:
    with opened(tmp_path, sample_window_size=2) as buffer:
        fill(buffer, 6)
    with opened(tmp_path, sample_window_size=5, cache_size=1) as buffer:
        batch = buffer.sample(2_000)
        assert is_whole(batch)
        assert set(row_ids(batch)) == all_ids(1, 2, 3, 4, 5)


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path="store") as buffer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        fill(buffer)
        buffer.flush()
        buffer.clear_cache()
        assert is_whole(buffer.sample(20))
    assert len(names_of(tmp_path / "store")) == 3
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_missing_directories_are_made(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as buffer:
        fill(buffer, 1)
    assert len(names_of(tmp_path / "a" / "b")) == 1


def test_ids_go_on_after_clear(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 3)
        buffer.clear()
        fill(buffer, 2)
        assert buffer.trajectory_ids == [3, 4]


def test_ids_go_on_after_clear_of_a_buffer_in_memory() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 3)
        buffer.clear()
        fill(buffer, 2)
        assert buffer.trajectory_ids == [3, 4]
        assert set(row_ids(buffer.sample(500))) == all_ids(0, 1)


def test_ids_go_on_after_reopening(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 3)
    with opened(tmp_path) as buffer:
        assert buffer.trajectory_counter == 3
        fill(buffer, 1)
        assert buffer.trajectory_ids == [0, 1, 2, 3]


def test_ids_go_on_after_clear_and_reopening(tmp_path: Path) -> None:
    for _ in range(3):
        with opened(tmp_path) as buffer:
            fill(buffer, 2)
            last = buffer.trajectory_ids[-1]
            buffer.clear()
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
        assert (last, buffer.trajectory_ids) == (5, [6])


def test_clear_removes_rows_and_files(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 3)
        buffer.clear()
        assert names_of(tmp_path) == []
        assert (len(buffer), buffer.total_samples, buffer.window_ids) == (0, 0, [])
        assert buffer.get_stats()["window_trajectories"] == 0
    with opened(tmp_path) as buffer:
        assert len(buffer) == 0


@pytest.mark.parametrize("is_saved", [False, True])
def test_clear_frees_the_schema(tmp_path: Path, is_saved: bool) -> None:
    with made(tmp_path, is_saved, True) as buffer:
        fill(buffer, 2)
        buffer.clear()
        buffer.add_trajectories([one_row()])
        assert is_equal(buffer.sample(2), {"x": torch.full((2, 2), 7.0)})


def test_a_schema_after_clear_is_that_of_the_reopened_store(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 2)
        buffer.clear()
        buffer.add_trajectories([one_row()])
    with opened(tmp_path) as buffer:
        assert is_equal(buffer.sample(2), {"x": torch.full((2, 2), 7.0)})


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_after_clear_cache_everything_is_as_it_was(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    with made(tmp_path, is_saved, is_cached, seed=2) as buffer, TrajectoryReplayBuffer(2) as twin:
        for i in range(4):
            for one in (buffer, twin):
                one.add_trajectories([trajectory(i, image=IMAGE)])
            buffer.clear_cache()
            assert is_equal(buffer.sample(50), twin.sample(50))
            buffer.flush()
            buffer.clear_cache()
            assert is_equal(buffer.sample(50), twin.sample(50))
            assert is_equal(
                buffer.get_trajectory(i).to_columns(), columns_of(trajectory(i, image=IMAGE))
            )


def test_clear_cache_gives_back_what_can_be_read_again(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 3, image=IMAGE)
        buffer.flush()
        assert buffer.get_stats()["cache_filled"] == 3
        buffer.clear_cache()
        stats = buffer.get_stats()
        assert (stats["cache_filled"], stats["cache_maps"], stats["num_trajectories"]) == (0, 0, 3)


def test_clear_cache_of_a_buffer_in_memory_gives_nothing_back() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 3)
        buffer.clear_cache()
        assert buffer.get_stats()["cache_filled"] == 3
        assert set(row_ids(buffer.sample(500))) == all_ids(0, 1, 2)


def test_clear_cache_of_an_empty_buffer_does_nothing() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.clear_cache()
        assert len(buffer) == 0


# -- the reference's configurations --------------------------------------------------------------


def test_a_memory_only_buffer_takes_and_ignores_what_is_for_stores(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(
        seed=1234,
        enable_cache=True,
        cache_size=1,
        sample_window_size=3,
        auto_save=False,
        auto_save_path=str(tmp_path / "replay"),
        trajectory_format="pt",
    ) as buffer:
        fill(buffer, 5)
        buffer.flush()
        assert set(row_ids(buffer.sample(1_000))) == all_ids(2, 3, 4)
    assert list(tmp_path.iterdir()) == []


def test_the_references_arguments_go_in_its_order(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(1234, True, 5, 100, True, str(tmp_path), "arrow") as buffer:
        fill(buffer)
        assert buffer.auto_save_path == str(tmp_path)


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt", "pkl"])
def test_a_memory_only_buffer_takes_any_known_format(trajectory_format: str) -> None:
    with TrajectoryReplayBuffer(trajectory_format=trajectory_format) as buffer:
        fill(buffer)
        assert is_whole(buffer.sample(20))


# -- get_trajectory and metadata -----------------------------------------------------------------


@pytest.mark.parametrize(("is_saved", "is_cached"), FLAGS)
def test_each_trajectory_comes_back_as_it_was_added(
    tmp_path: Path, is_saved: bool, is_cached: bool
) -> None:
    with made(tmp_path, is_saved, is_cached, cache_size=1) as buffer:
        fill(buffer, 4, image=IMAGE)
        for _ in range(2):
            for i in range(4):
                got = buffer.get_trajectory(i).to_columns()
                assert is_equal(got, columns_of(trajectory(i, image=IMAGE)))
            buffer.flush()


@pytest.mark.parametrize("trajectory_id", [3, -1, 10**12])
def test_an_id_that_was_never_given_is_a_key_error(trajectory_id: int) -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 3)
        with pytest.raises(KeyError, match=f"trajectory {trajectory_id}: expected an id"):
            buffer.get_trajectory(trajectory_id)


def test_an_id_that_was_cleared_is_a_key_error(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
        buffer.clear()
        with pytest.raises(KeyError, match="trajectory 0"):
            buffer.get_trajectory(0)


def test_a_trajectory_that_left_a_window_in_memory_is_a_key_error() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        fill(buffer, 3)
        with pytest.raises(KeyError, match="trajectory 0: no longer in memory"):
            buffer.get_trajectory(0)
        assert is_equal(buffer.get_trajectory(1).to_columns(), columns_of(trajectory(1)))


def test_a_trajectory_that_left_the_window_of_a_store_is_read_from_its_file(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, sample_window_size=1) as buffer:
        fill(buffer, 3)
        assert is_equal(buffer.get_trajectory(0).to_columns(), columns_of(trajectory(0)))
        buffer.flush()
        assert is_equal(buffer.get_trajectory(0).to_columns(), columns_of(trajectory(0)))


def test_a_trajectory_that_was_got_outlives_buffer_and_file(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0, image=IMAGE)])
        buffer.flush()
        got = buffer.get_trajectory(0)
        buffer.clear()
    assert is_equal(got.to_columns(), columns_of(trajectory(0, image=IMAGE)))
    del got


@pytest.mark.parametrize("max_episode_length", [0, 1, 10**9])
def test_the_maximal_episode_length_is_kept(tmp_path: Path, max_episode_length: int) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0) | {"max_episode_length": max_episode_length}])
        assert buffer.get_trajectory(0).max_episode_length == max_episode_length
    with opened(tmp_path) as buffer:
        assert buffer.get_trajectory(0).max_episode_length == max_episode_length


WEIGHTS_IDS = [
    "",
    "step/1000",
    "..",
    "../../escape",
    "/absolute",
    "a.b",
    "重み-é",
    "x" * 1000,
    "重" * 1000,
    "nul\0",
    "half a pair \ud800",
    "%2f",
    "new\nline",
    "-rf *",
]


@pytest.mark.parametrize("weights_id", WEIGHTS_IDS, ids=lambda text: ascii(text)[:20])
def test_any_name_of_weights_is_kept(tmp_path: Path, weights_id: str) -> None:
    store = tmp_path / "store"
    with opened(store) as buffer:
        buffer.add_trajectories([Trajectory(model_weights_id=weights_id, **plain())])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(names_of(store)) == 1
    with opened(store) as buffer:
        assert buffer.get_trajectory(0).model_weights_id == weights_id
        assert is_equal(buffer.get_trajectory(0).to_columns(), plain())


def test_names_of_weights_that_differ_only_at_their_end_do_not_collide(tmp_path: Path) -> None:
    assert files.escape("x" * 1000 + "a") != files.escape("x" * 1000 + "b")


# -- closing -------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[TrajectoryReplayBuffer], object]] = {
    "add_trajectories": lambda buffer: buffer.add_trajectories([trajectory(0)]),
    "sample": lambda buffer: buffer.sample(1),
    "get_trajectory": lambda buffer: buffer.get_trajectory(0),
    "flush": lambda buffer: buffer.flush(),
    "clear_cache": lambda buffer: buffer.clear_cache(),
    "clear": lambda buffer: buffer.clear(),
}


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_closed_buffer_refuses_what_needs_it_open(
    tmp_path: Path, name: str, is_saved: bool
) -> None:
    buffer = made(tmp_path, is_saved, True)
    fill(buffer)
    buffer.close()
    with pytest.raises(ClosedError, match=f"{name}: expected an open buffer"):
        CALLS[name](buffer)


def test_nothing_of_a_closed_store_is_lost(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    fill(buffer)
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.clear()
    with ReplayReader(tmp_path) as reader:
        assert set(row_ids(reader.sample(800))) == all_ids(0, 1, 2)


@pytest.mark.parametrize("is_saved", [False, True])
def test_closing_again_does_nothing(tmp_path: Path, is_saved: bool) -> None:
    buffer = made(tmp_path, is_saved, True)
    fill(buffer)
    buffer.close()
    before = contents_of(tmp_path)
    buffer.close()
    buffer.close(wait=False)
    assert contents_of(tmp_path) == before


def test_leaving_the_context_writes_and_closes(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer)
    assert len(names_of(tmp_path)) == 3
    with pytest.raises(ClosedError):
        buffer.sample(1)


def test_an_error_in_the_context_closes_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), opened(tmp_path) as buffer:  # noqa: PT012
        fill(buffer)
        raise KeyError("trainer")
    with opened(tmp_path) as buffer:
        assert len(buffer) == 3


def test_a_store_closed_by_another_thread_than_opened_it_can_be_opened_again(
    tmp_path: Path,
) -> None:
    buffers: list[TrajectoryReplayBuffer] = []
    thread = threading.Thread(
        target=lambda: buffers.append(
            TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
        )
    )
    thread.start()
    thread.join()
    buffers[0].close()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as again:
        assert again.schema is None
        again.add_trajectories([trajectory(0)])
        assert again.schema is not None
        assert "rewards" in [column.name for column in again.schema.columns]


def test_counts_can_be_asked_while_others_sample_with_new_samplers() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(0)])
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.is_set():
                buffer.sample(2, sampler=Uniform())

        threads = [threading.Thread(target=sample) for _ in range(3)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                assert buffer.get_stats()["num_trajectories"] == 1
        finally:
            sys.setswitchinterval(interval)
            is_over.set()
            for thread in threads:
                thread.join()


def test_what_the_index_says_of_a_trajectory(tmp_path: Path) -> None:
    before = time.time()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0) | {"model_weights_id": "w"}])
        entry = buffer.get_entry(0)
        assert (entry.num_steps, entry.num_envs, entry.num_samples) == (4, 3, 12)
        assert entry.model_weights_id == "w"
        assert before <= entry.added_at <= time.time()
        buffer.flush()
        written = buffer.get_entry(0)
        assert (written.uuid, written.added_at) == (entry.uuid, entry.added_at)
        assert (tmp_path / written.file).is_file()
        with ReplayReader(tmp_path) as reader:
            assert reader.get_entry(0) == written
        for missing in (1, -1, "0"):
            with pytest.raises(KeyError, match="expected an id of trajectory_ids"):
                buffer.get_entry(missing)  # type: ignore[arg-type]


def test_a_buffer_does_not_pickle_and_says_what_does(tmp_path: Path) -> None:
    with (
        opened(tmp_path) as buffer,
        pytest.raises(TypeError, match=r"use ReplayReader\(path\)"),
    ):
        pickle.dumps(buffer)


def copied_by_pickle(buffer: TrajectoryReplayBuffer) -> TrajectoryReplayBuffer:
    found = pickle.loads(pickle.dumps(buffer))
    assert isinstance(found, TrajectoryReplayBuffer)
    return found


@pytest.mark.parametrize("copied", [copied_by_pickle, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_buffer_in_memory_is_copied_with_its_rows_ids_and_random_state(
    copied: Callable[[TrajectoryReplayBuffer], TrajectoryReplayBuffer],
) -> None:
    with TrajectoryReplayBuffer(seed=7, sample_window_size=2, trajectory_format="npy") as buffer:
        buffer.add_trajectories([trajectory(i, image=(8, 8)) for i in range(3)])
        buffer.sample(5)
        buffer.note = ["mine"]  # type: ignore[attr-defined]
        copy_ = copied(buffer)
        with copy_:
            assert (copy_.trajectory_ids, copy_.window_ids) == ([0, 1, 2], [1, 2])
            assert (copy_.total_samples, copy_.trajectory_counter) == (3 * N, 3)
            assert (copy_.trajectory_format, copy_.sample_window_size, copy_.seed) == ("npy", 2, 7)
            assert copy_.note == ["mine"]  # type: ignore[attr-defined]
            assert [copy_.get_entry(i) for i in range(3)] == [buffer.get_entry(i) for i in range(3)]
            for i in (1, 2):
                assert is_equal(
                    copy_.get_trajectory(i).to_columns(), buffer.get_trajectory(i).to_columns()
                )
            for _ in range(3):
                assert is_equal(copy_.sample(20), buffer.sample(20))
            copy_.add_trajectories([trajectory(3, image=(8, 8))])
            assert (copy_.window_ids, buffer.window_ids) == ([2, 3], [1, 2])
            copy_.clear()
        assert set(row_ids(buffer.sample(800))) == all_ids(1, 2)


def test_every_dtype_is_copied_bit_for_bit() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([every_dtype()])
        with copied_by_pickle(buffer) as copy_:
            assert is_equal(copy_.get_trajectory(0).to_columns(), columns_of(every_dtype()))


def test_an_empty_buffer_is_copied_with_its_ids_and_may_have_another_schema() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer)
        buffer.clear()
        with copy.deepcopy(buffer) as copy_:
            assert (len(copy_), copy_.trajectory_counter, copy_.schema) == (0, 3, None)
            copy_.add_trajectories([one_row()])
            assert copy_.trajectory_ids == [3]


def test_a_buffer_in_memory_that_has_loaded_files_is_copied_without_them(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        fill(buffer)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer() as loaded:
        loaded.load_checkpoint(tmp_path / "checkpoint")
        sent = pickle.dumps(loaded)
    shutil.rmtree(tmp_path / "checkpoint")
    with pickle.loads(sent) as copy_:
        assert set(row_ids(copy_.sample(800))) == all_ids(0, 1, 2)
        copy_.save_checkpoint(tmp_path / "checkpoint")
    with ReplayReader(tmp_path / "checkpoint") as reader:
        assert reader.trajectory_ids == [0, 1, 2]


def test_a_priority_is_that_of_the_same_row_in_a_copy() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer)
        sampler = Prioritized()
        batch = buffer.sample(40, sampler=sampler)
        sampler.update_priorities(batch["info"]["handle"], torch.arange(40.0) + 1)
        with copy.deepcopy(buffer) as copy_:
            other = Prioritized()
            other.load_state_dict(sampler.state_dict())
            assert is_equal(copy_.sample(64, sampler=other), buffer.sample(64, sampler=sampler))


def test_a_buffer_in_memory_that_is_closed_does_not_pickle() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.close()
    with pytest.raises(ClosedError):
        pickle.dumps(buffer)


def test_spawned_processes_that_are_sent_one_buffer_draw_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer)
        monkeypatch.setattr(multiprocessing.context, "get_spawning_popen", lambda: object())
        sent = [pickle.dumps(buffer) for _ in range(2)]
        monkeypatch.undo()
        streams = [tuple(row_ids(pickle.loads(each).sample(20))) for each in sent]
        assert len({*streams, tuple(row_ids(buffer.sample(20)))}) == 3


@pytest.mark.parametrize("names", [("journal.jsonl",), ("trajectory_index.json",)], ids=str)
def test_a_store_that_is_ignored_without_auto_save_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    TrajectoryReplayBuffer(auto_save_path=tmp_path).close()
    TrajectoryReplayBuffer(auto_save_path=tmp_path / "none").close()
    TrajectoryReplayBuffer(auto_save_path="bad\0path").close()
    assert caplog.messages == []
    for name in names:
        (tmp_path / name).touch()
    TrajectoryReplayBuffer(auto_save_path=tmp_path).close()
    assert caplog.messages == [
        f"auto_save_path: expected auto_save=True, since there is a store, got False: {tmp_path} "
        f"is neither read nor written. Set auto_save=True to go on with it, or call "
        f"load_checkpoint to have a copy of it in memory."
    ]


LEFT_OPEN = """
import os, sys, torch
from mmbuf import TrajectoryReplayBuffer

def filled(path):
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
    buffer.add_trajectories([{"x": torch.full((20, 10, 300), float(i))} for i in range(10)])
    return buffer

if sys.argv[1] == "killed":
    buffer = filled("killed")
    buffer.flush()
    os._exit(7)
buffer = filled("ended")
filled("dropped")
"""


@pytest.mark.parametrize(
    ("way", "code", "stores"), [("ended", 0, ["ended", "dropped"]), ("killed", 7, ["killed"])]
)
def test_a_store_that_was_never_closed_opens(
    tmp_path: Path, way: str, code: int, stores: list[str]
) -> None:
    ran = run_python(LEFT_OPEN, way, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (code, "")
    for store in stores:
        with opened(tmp_path / store) as buffer:
            assert buffer.trajectory_ids == list(range(10))
            assert set(buffer.sample(500)["x"][:, 299].tolist()) == set(map(float, range(10)))


# -- bad paths and arguments ---------------------------------------------------------------------


def test_a_second_writer_is_told_who_holds_the_store(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer)
        with pytest.raises(LockedError) as caught:
            opened(tmp_path)
        assert (caught.value.pid, caught.value.host) == (os.getpid(), socket.gethostname())
        assert f"process {os.getpid()} on {socket.gethostname()} holds" in str(caught.value)
        assert set(row_ids(buffer.sample(800))) == all_ids(0, 1, 2)


def test_a_cell_that_is_run_again_is_told_that_this_process_holds_the_store(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer)
        with pytest.raises(LockedError, match=r"this very process.*Call that buffer's close\(\)"):
            opened(tmp_path)
    opened(tmp_path).close()


def test_where_no_file_can_be_locked_there_is_no_writer_but_readers_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with opened(tmp_path / "store") as buffer:
        fill(buffer)
        monkeypatch.setattr(fcntl, "flock", flock)
        buffer.save_checkpoint(tmp_path / "new")
        with pytest.raises(NoLocksError, match=f"^{tmp_path}/new: expected a file system that "):
            buffer.save_checkpoint(tmp_path / "new")
        os.unlink(tmp_path / "store" / files.WRITER_LOCK)  # so that it is taken anew
        buffer.add_trajectories([trajectory(3)])
        with pytest.raises(WriteError, match=r"the lock is lost: .* expected a file system that"):
            buffer.flush()
        monkeypatch.undo()
        buffer.flush()
        monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(NoLocksError, match=f"^{tmp_path}/store: expected a file system that lock"):
        opened(tmp_path / "store")
    with ReplayReader(tmp_path / "new") as reader, ReplayReader(tmp_path / "store") as live:
        assert (len(reader), len(live)) == (3, 4)


def test_a_second_writer_works_once_the_first_has_closed(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(LockedError):
        opened(tmp_path)
    fill(first)
    first.close()
    with opened(tmp_path) as second:
        fill(second, 1)
        assert second.trajectory_ids == [0, 1, 2, 3]


def test_a_path_that_is_a_file_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(NotADirectoryError, match="expected a directory, got a file"):
        opened(path)
    assert path.read_bytes() == b"mine"


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OSError, match="file"):
        opened(tmp_path / "file" / "store")
    assert contents_of(tmp_path) == {"file": b"mine"}


@LINUX_ONLY
@pytest.mark.parametrize("where", ["", "below"], ids=["it", "its parent"])
def test_a_directory_without_permission_is_refused(tmp_path: Path, where: str) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)

    def attempt() -> None:
        with pytest.raises(PermissionError) as caught:
            opened(locked / where)
        assert caught.value.errno == errno.EACCES
        assert str(locked) in str(caught.value)

    without_privileges(attempt)
    assert list(locked.iterdir()) == []


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines()
    event = json.loads(lines[1])
    assert (event["event"], event["version"]) == ("schema", 1)
    del event["crc"]
    body = json.dumps(event | {"version": 4}).encode()[:-1]
    lines[1] = body + f', "crc": "{zlib.crc32(body):08x}"}}'.encode()
    journal.write_bytes(b"\n".join(lines) + b"\n")
    before = contents_of(tmp_path)
    with pytest.raises(VersionError, match="expected store version 3 or older, got 4") as first:
        opened(tmp_path)
    with pytest.raises(VersionError):  # and not that it is held, though the first error lives
        opened(tmp_path)
    del first
    assert contents_of(tmp_path) == before


def test_a_checkpoint_is_not_written_into(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
    (tmp_path / "journal.jsonl").unlink()
    before = contents_of(tmp_path)
    with pytest.raises(FileExistsError, match="got a checkpoint"):
        opened(tmp_path)
    assert contents_of(tmp_path) == before


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no path": ({"auto_save": True}, "auto_save_path: expected a path, got an empty"),
    "format": ({"trajectory_format": "parquet"}, "trajectory_format: expected one of .*'parquet'"),
    "cache size": ({"cache_size": -1}, "cache_size: expected None or at least 0, got -1"),
    "window": ({"sample_window_size": -1}, "sample_window_size: expected at least 0, got -1"),
    "seed": ({"seed": -1}, None),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_an_argument_that_cannot_be_is_refused(case: str) -> None:
    options, message = BAD_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        TrajectoryReplayBuffer(**options)


def test_a_negative_bound_of_pending_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_pending_bytes: expected at least 0, got -1"):
        opened(tmp_path, max_pending_bytes=-1).close()


def test_a_bad_seed_leaves_no_store_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed: expected"):
        opened(tmp_path / "store", seed=-1)
    assert not (tmp_path / "store").exists()


# -- memory --------------------------------------------------------------------------------------


@LINUX_ONLY
@pytest.mark.parametrize("is_saved", [False, True])
def test_trajectories_that_left_the_window_are_gone_from_memory(
    tmp_path: Path, is_saved: bool
) -> None:
    item = {"x": torch.zeros(4, 4, 64, 1024, dtype=torch.uint8)}  # 1 MiB
    with made(tmp_path, is_saved, True, sample_window_size=4) as buffer:
        buffer.add_trajectories([item] * 8)
        buffer.flush()
        buffer.sample(8)
        before = anonymous_bytes()
        for i in range(25):
            item["x"].fill_(i)
            buffer.add_trajectories([item] * 4)
            assert set(buffer.sample(8)["x"][:, 0, 0].tolist()) == {i}
        buffer.flush()
        assert len(buffer) == 108
        assert anonymous_bytes() - before < 16 << 20


@LINUX_ONLY
def test_rows_that_were_written_take_no_memory_of_their_own(tmp_path: Path) -> None:
    item = {"x": torch.ones(4, 4, 64, 1024, dtype=torch.uint8)}
    with opened(tmp_path, sample_window_size=0) as buffer:
        buffer.add_trajectories([item] * 4)
        buffer.flush()
        before = anonymous_bytes()
        buffer.add_trajectories([item] * 60)
        buffer.flush()
        assert buffer.get_stats()["cache_maps"] == 64
        assert anonymous_bytes() - before < 8 << 20


# -- threads and forks ---------------------------------------------------------------------------


def test_rows_are_whole_while_one_thread_adds_and_others_sample(tmp_path: Path) -> None:
    failures: list[object] = []
    is_done = threading.Event()

    def sample(buffer: TrajectoryReplayBuffer) -> None:
        try:
            while not is_done.is_set():
                if not is_whole(buffer.sample(64)):
                    failures.append("a row of several trajectories")
        except BaseException as failure:
            failures.append(failure)

    with opened(tmp_path, sample_window_size=6, cache_size=4) as buffer:
        fill(buffer, 1, image=IMAGE)
        threads = [threading.Thread(target=sample, args=(buffer,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for i in range(1, 60):
            buffer.add_trajectories([trajectory(i, 1 + i % 5, image=IMAGE)])
            if i % 10 == 0:
                buffer.clear_cache()
        is_done.set()
        for thread in threads:
            thread.join()
    assert failures == []


# -- against a model -----------------------------------------------------------------------------


def numbered(i: int, num_steps: int, num_envs: int, width: int) -> dict[str, Any]:
    """As `trajectory`, smaller, with a payload of ``width`` bytes a row."""
    item = trajectory(i, num_steps, num_envs)
    fields = {"rewards": item["rewards"], "dones": item["dones"], "curr_obs": item["curr_obs"]}
    if width:
        sums = item["curr_obs"]["states"].sum(-1, keepdim=True).to(torch.uint8)
        fields["payload"] = sums.expand(num_steps, num_envs, width)
    return fields


class BufferMachine(RuleBasedStateMachine):
    """A buffer beside a list of the trajectories that were added to it."""

    directories = 0

    def __init__(self, root: Path) -> None:
        super().__init__()
        BufferMachine.directories += 1
        self.path = root / str(BufferMachine.directories)
        self.buffer: TrajectoryReplayBuffer | None = None
        self.model: list[tuple[int, dict[str, Any]]] = []
        self.next_id = 0
        self.width = 0

    @initialize(
        is_saved=st.booleans(),
        is_cached=st.booleans(),
        window=st.sampled_from([0, 1, 2, 5]),
        cache_size=st.sampled_from([None, 0, 1, 3]),
        width=st.sampled_from([0, 37, 4096]),
    )
    def begin(
        self, is_saved: bool, is_cached: bool, window: int, cache_size: int | None, width: int
    ) -> None:
        self.is_saved = is_saved
        self.window = window
        self.width = width
        self.options: dict[str, Any] = {
            "enable_cache": is_cached,
            "sample_window_size": window,
            "cache_size": cache_size,
        }
        self.buffer = TrajectoryReplayBuffer(
            auto_save=is_saved, auto_save_path=self.path, **self.options
        )

    @property
    def in_window(self) -> list[tuple[int, dict[str, Any]]]:
        return self.model[-self.window :] if self.window else self.model

    @rule(num_steps=st.integers(1, 6), num_envs=st.integers(1, 4), count=st.integers(1, 3))
    def add(self, num_steps: int, num_envs: int, count: int) -> None:
        items = []
        for _ in range(count):
            item = numbered(self.next_id, num_steps, num_envs, self.width)
            self.model.append((self.next_id, item))
            self.next_id += 1
            items.append(item)
        self.buffer.add_trajectories(items)
        self.check_counts()

    @rule()
    def add_misfit(self) -> None:
        if self.model:
            with pytest.raises(SchemaError):
                self.buffer.add_trajectories([{"rewards": torch.zeros(2, 2)}])
            self.check_counts()

    @rule(count=st.integers(1, 40))
    def sample(self, count: int) -> None:
        if not self.model:
            with pytest.raises(EmptyBufferError):
                self.buffer.sample(count)
            return
        batch = self.buffer.sample(count)
        self.check_rows(batch, count)
        self.check_rows(self.buffer.sample(count, out=batch), count)

    def check_rows(self, batch: dict[str, Any], count: int) -> None:
        model = dict(self.in_window)
        assert list(batch) == list(next(iter(model.values())))
        ids = row_ids(batch)
        assert len(ids) == count
        for k, (i, t, b) in enumerate(ids):
            item = model[i]
            assert batch["rewards"][k] == item["rewards"][t, b]
            assert batch["dones"][k] == item["dones"][t + 1, b]
            assert batch["curr_obs"]["task"][k] == item["curr_obs"]["task"][t][b]
            if self.width:
                assert torch.equal(batch["payload"][k], item["payload"][t, b])

    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        if self.model:
            i, item = data.draw(st.sampled_from(self.model))
            is_kept = self.is_saved or any(i == j for j, _ in self.in_window)
            if is_kept:
                assert is_equal(self.buffer.get_trajectory(i).to_columns(), columns_of(item))
            else:
                with pytest.raises(KeyError):
                    self.buffer.get_trajectory(i)

    @rule()
    def flush(self) -> None:
        self.buffer.flush()
        if self.is_saved:
            assert len(names_of(self.path)) == len(self.model)

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()
        self.check_counts()

    @rule(width=st.sampled_from([0, 37, 4096]))
    def clear(self, width: int) -> None:
        self.buffer.clear()
        self.model.clear()
        self.width = width
        self.check_counts()

    @rule(is_cached=st.booleans(), window=st.sampled_from([0, 1, 2, 5]))
    def reopen(self, is_cached: bool, window: int) -> None:
        if self.is_saved:
            self.buffer.close()
            self.options |= {"enable_cache": is_cached, "sample_window_size": window}
            self.window = window
            self.buffer = opened(self.path, **self.options)
            self.check_counts()

    def check_counts(self) -> None:
        rows = {i: item["rewards"].numel() for i, item in self.model}
        assert len(self.buffer) == self.buffer.size == len(rows)
        assert self.buffer.trajectory_ids == list(rows)
        assert self.buffer.total_samples == sum(rows.values())
        assert self.buffer.trajectory_counter == self.next_id
        assert self.buffer.window_ids == [i for i, _ in self.in_window]

    def teardown(self) -> None:
        if self.buffer is not None:
            self.buffer.close()


def test_any_sequence_of_calls_does_what_a_list_would_do(tmp_path: Path) -> None:
    run_state_machine_as_test(
        lambda: BufferMachine(tmp_path),
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- what has been replaced ----------------------------------------------------------------------


def valued(value: float, num_envs: int = 2) -> dict[str, Any]:
    return {"rewards": torch.full((4, num_envs, 10), value)}


def values_of(batch: dict[str, Any]) -> set[tuple[int, float]]:
    """Id and value of each row; AssertionError where a row has two values."""
    rewards = batch["rewards"]
    assert (rewards == rewards[:, :1]).all()
    ids = batch["info"]["trajectory_id"].tolist()
    return set(zip(ids, rewards[:, 0].tolist(), strict=True))


def reads(trajectory_id: int) -> Callable[..., bool]:
    """Whether rows of this trajectory are about to be read from its file."""
    return lambda _, slot, *__: slot.entry.trajectory_id == trajectory_id


def with_ids_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a store of an earlier version may have them: names of files too."""
    monkeypatch.setattr(index, "next_id", lambda lowest, counter, step: counter)


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
@pytest.mark.parametrize("num_envs", [1, 2, 3])
@pytest.mark.parametrize("is_given_again", [False, True])
def test_a_cold_read_that_a_load_overtakes_gives_rows_of_no_other_trajectory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_given_again: bool,
    num_envs: int,
    trajectory_format: str,
) -> None:
    options = {"cache_size": 0, "trajectory_format": trajectory_format}
    with opened(tmp_path / "live", **options) as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([valued(1.0)])
        buffer.flush()
        buffer.sample(50)  # all files have been looked at
        if is_given_again:
            with_ids_given_again(monkeypatch)
        halt = Halt(monkeypatch, Places, "read_rows", reads(1))
        halt.run(lambda: buffer.sample(50, with_info=True))
        buffer.load_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([valued(777.0, num_envs)])
        buffer.flush()
        batch = halt.result()
        new = buffer.trajectory_ids[-1]
        assert new == (1 if is_given_again else 2)
        assert values_of(batch) == {(0, 0.0), (new, 777.0)}
        marks = {buffer.get_entry(i).uuid_mark for i in (0, new)}
        assert set(batch["info"]["handle"][:, 0].tolist()) == marks


@pytest.mark.parametrize("is_given_again", [False, True])
def test_a_trajectory_that_is_replaced_while_it_is_read_is_gone_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given_again: bool
) -> None:
    with opened(tmp_path / "live") as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([valued(1.0)])
        buffer.flush()
        if is_given_again:
            with_ids_given_again(monkeypatch)
        halt = Halt(monkeypatch, arrow, "load", lambda path, *_: "_1_" in path)
        halt.run(lambda: buffer.get_trajectory(1))
        buffer.load_checkpoint(tmp_path / "checkpoint")
        buffer.add_trajectories([valued(777.0, 5)])
        buffer.flush()
        if is_given_again:
            assert torch.equal(halt.result().rewards, valued(777.0, 5)["rewards"])
        else:
            with pytest.raises(KeyError, match="trajectory 1"):
                halt.result()


def test_a_trajectory_that_is_written_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "live") as buffer:
        buffer.add_trajectories([valued(0.0)])
        buffer.flush()
        buffer.clear_cache()
        halt = Halt(monkeypatch, TrajectoryCache, "copy_of", lambda *_: True)
        wait = Halt(monkeypatch, storage, "write", lambda *_: True)
        wait.run(lambda: buffer.add_trajectories([valued(1.0)]) or buffer.flush())
        halt.run(lambda: buffer.get_trajectory(1))
        wait.result()
        buffer.clear_cache()  # its rows are in the file only
        assert torch.equal(halt.result().rewards, valued(1.0)["rewards"])


@pytest.mark.parametrize("cache_size", [0, None])
def test_a_file_of_another_trajectory_in_the_place_of_a_listed_one_is_damage(
    tmp_path: Path, cache_size: int | None
) -> None:
    with opened(tmp_path / "other") as other:
        other.add_trajectories([valued(5.0), valued(6.0)])
    with opened(tmp_path / "live", cache_size=cache_size) as buffer:
        buffer.add_trajectories([valued(0.0), valued(1.0)])
        buffer.flush()
        buffer.sample(50)
        os.replace(tmp_path / "other/trajectory_1_.arrow", tmp_path / "live/trajectory_1_.arrow")
        buffer.clear_cache()
        with pytest.raises(CorruptError, match=r"trajectory_1_.arrow: expected trajectory"):
            buffer.sample(50)
