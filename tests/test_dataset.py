"""Datasets over buffers and readers: mixing, waiting, prefetching, resuming, and all processes."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Child, Parent
from data import (
    bits,
    every_dtype,
    is_equal,
    is_whole,
    opened,
    row_ids,
    run_python,
    trajectory,
)
from interrupts import every_call
from torch.utils.data import DataLoader

from mmbuf import (
    ClosedError,
    EmptyBufferError,
    MmbufError,
    ReplayReader,
    SchemaError,
    TrajectoryReplayBuffer,
)
from mmbuf.dataset import (
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    replay_buffer_collate_fn,
)
from mmbuf.sampling import Prioritized, WithoutReplacement

pytestmark = pytest.mark.usefixtures("without_fsync")
N = 12  # rows of a `trajectory`
KINDS = [ReplayBufferDataset, PreloadReplayBufferDataset]
BOTH = pytest.mark.parametrize("kind", KINDS)


class Watched(TrajectoryReplayBuffer):
    """A buffer that notes what `sample` is asked, and does ``before`` first."""

    def __init__(self, *numbers: int, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[Any] = []
        self.before: Callable[[], None] = lambda: None
        if numbers:
            self.add_trajectories([trajectory(i) for i in numbers])

    def sample(self, num_chunks: int = 0, *args: Any, **options: Any) -> Any:
        self.asked.append((num_chunks, *args, options))
        self.before()
        return super().sample(num_chunks, *args, **options)


@pytest.fixture
def made() -> Iterator[Callable[..., Watched]]:
    """Makes buffers of these trajectories; they are closed at the end."""
    buffers: list[Watched] = []

    def make(*numbers: int, **options: Any) -> Watched:
        buffers.append(Watched(*numbers, **options))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


Made = Callable[..., Watched]


def take(dataset: ReplayBufferDataset, count: int) -> list[Any]:
    return list(itertools.islice(iter(dataset), count))


def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def is_filled(dataset: ReplayBufferDataset, count: int) -> Callable[[], bool]:
    return lambda: dataset.get_stats()["prefetched"] == count


def thread_of(dataset: ReplayBufferDataset) -> threading.Thread:
    """The thread that the dataset has started, where there is but one dataset."""
    iter(dataset)
    (thread,) = prefetchers()
    return thread


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mmbuf-prefetch"]


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """``function`` in a thread, and the list that its result or error gets into."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# -- mixing --------------------------------------------------------------------------------------


@BOTH
def test_without_a_demo_buffer_batches_are_those_of_the_buffer(kind: Any, made: Made) -> None:
    expected = [made(0, 1, 2, seed=3).sample(16)]
    buffer = made(0, 1, 2, seed=3)
    with kind(buffer, None, 16, 1, 0) as dataset:
        assert is_equal(take(dataset, 1), expected)


@pytest.mark.parametrize(
    ("batch_size", "demo_fraction", "num_replay", "num_demo"),
    [
        *((7, 0.5, 3, 4), (5, 0.5, 3, 2), (1, 0.5, 1, 0), (10, 0.25, 8, 2), (256, 0.5, 128, 128)),
        *((7, 0.0, 7, 0), (7, 1.0, 0, 7), (3, 0.9, 0, 3), (4, 0.9, 0, 4), (9, 0.1, 8, 1)),
    ],
)
@BOTH
def test_odd_batches_are_exact(
    kind: Any,
    batch_size: int,
    demo_fraction: float,
    num_replay: int,
    num_demo: int,
    made: Made,
) -> None:
    replay, demo = made(0, 1), made(10, 11)
    with kind(replay, demo, batch_size, 1, 1, demo_fraction=demo_fraction) as dataset:
        for batch in take(dataset, 3):
            numbers = [i for i, _, _ in row_ids(batch)]
            assert [i < 10 for i in numbers] == [True] * num_replay + [False] * num_demo
            assert is_whole(batch)


def test_seven_rows_of_two_buffers_are_seven_by_default(made: Made) -> None:
    with ReplayBufferDataset(made(0), made(1), 7, 1, 1) as dataset:
        (batch,) = take(dataset, 1)
    assert len(row_ids(batch)) == 7
    assert [len(batch["curr_obs"]["task"]), *batch["actions"].shape] == [7, 7, 3]


def test_rows_of_every_dtype_and_text_are_joined_bit_for_bit(made: Made) -> None:
    buffers = [made(seed=seed) for seed in (1, 2, 1, 2)]
    for buffer in buffers:
        buffer.add_trajectories([every_dtype()])
    with ReplayBufferDataset(buffers[0], buffers[1], 9, 1, 1) as dataset:
        (batch,) = take(dataset, 1)
    replay, demo = buffers[2].sample(5), buffers[3].sample(4)

    def check(joined: Any, ours: Any, theirs: Any) -> None:
        if isinstance(joined, dict):
            assert list(joined) == list(ours)
            for key in joined:
                check(joined[key], ours[key], theirs[key])
        elif isinstance(joined, list):
            assert joined == ours + theirs
        else:
            assert (joined.dtype, joined.shape) == (ours.dtype, (9, *ours.shape[1:]))
            assert bits(joined) == bits(ours) + bits(theirs)

    check(batch, replay, demo)


def test_columns_are_in_the_order_of_the_replay_buffer(made: Made) -> None:
    replay, demo = made(), made()
    replay.add_trajectories([{"b": torch.zeros(2, 1), "a": torch.zeros(2, 1)}])
    demo.add_trajectories([{"a": torch.ones(2, 1), "b": torch.ones(2, 1)}])
    with ReplayBufferDataset(replay, demo, 2, 1, 1) as dataset:
        (batch,) = take(dataset, 1)
    assert is_equal(batch, {"b": torch.tensor([0.0, 1.0]), "a": torch.tensor([0.0, 1.0])})


TEXT = [["a"], ["b"]]


@pytest.mark.parametrize(
    ("replay", "demo", "message"),
    [
        (
            {"x": torch.zeros(2, 1, 3)},
            {"x": torch.zeros(2, 1, 3).double()},
            "column 'x': expected the same of both buffers, got float32 rows of shape (3,) "
            "of replay_buffer and float64 rows of shape (3,) of demo_buffer.",
        ),
        (
            {"obs": {"x": torch.zeros(2, 1, 3)}},
            {"obs": {"x": torch.zeros(2, 1, 4)}},
            "column 'obs.x': expected the same of both buffers, got float32 rows of shape (3,) "
            "of replay_buffer and float32 rows of shape (4,) of demo_buffer.",
        ),
        (
            {"obs": torch.zeros(2, 1)},
            {"obs": {"y": torch.zeros(2, 1)}},
            "column 'obs': expected the same of both buffers, got float32 rows of shape () "
            "of replay_buffer and a dict of demo_buffer.",
        ),
        (
            {"x": torch.zeros(2, 1)},
            {"y": {"z": torch.zeros(2, 1), "a": torch.zeros(2, 1)}},
            "batch: expected a column that both buffers have, got only x of replay_buffer and "
            "y.z, y.a of demo_buffer.",
        ),
        (
            {"x": TEXT},
            {"x": torch.zeros(2, 1)},
            "column 'x': expected the same of both buffers, got text of replay_buffer and "
            "float32 rows of shape () of demo_buffer.",
        ),
    ],
)
@BOTH
def test_columns_that_differ_are_named(
    kind: Any, replay: Any, demo: Any, message: str, made: Made
) -> None:
    buffers = [made(), made()]
    for buffer, item in zip(buffers, (replay, demo), strict=True):
        buffer.add_trajectories([item])
    with kind(*buffers, 4, 1, 1) as dataset, pytest.raises(SchemaError) as raised:
        take(dataset, 1)
    assert str(raised.value) == message


def recorded(value: float) -> dict[str, Any]:
    """A demonstration: without versions and log-probabilities, with fewer forward inputs."""
    one = torch.full((2, 1), value)
    return {"camera": one, "rewards": one, "forward_inputs": {"state": one}}


def rolled_out(value: float) -> dict[str, Any]:
    """A rollout, with all that `recorded` has but for the camera."""
    one = torch.full((2, 1), value)
    inputs = {"action": one, "state": one, "token": {"ids": one, "mask": one}}
    return {"forward_inputs": inputs, "rewards": one, "versions": one}


@BOTH
def test_a_mixed_batch_has_the_columns_that_both_buffers_have(
    kind: Any, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    replay, demo = made(), made()
    replay.add_trajectories([rolled_out(1.0)])
    demo.add_trajectories([recorded(2.0)])
    both = torch.tensor([1.0, 1.0, 2.0, 2.0])
    with kind(replay, demo, 4, 1, 1) as dataset:
        assert dataset.left_out == {}
        batches = take(dataset, 3)
        assert dataset.left_out == {
            "replay_buffer": (
                *("forward_inputs.action", "forward_inputs.token.ids"),
                *("forward_inputs.token.mask", "versions"),
            ),
            "demo_buffer": ("camera",),
        }
        assert set(dataset.get_stats()) == {"batches", "wait_s", "prefetched"}
    assert is_equal(batches, [{"forward_inputs": {"state": both}, "rewards": both}] * 3)
    assert [list(batch) for batch in batches] == [["forward_inputs", "rewards"]] * 3
    assert [record.message for record in caplog.records] == [
        "mixed batches leave out what only replay_buffer has: forward_inputs.action, "
        "forward_inputs.token.ids, forward_inputs.token.mask, versions.",
        "mixed batches leave out what only demo_buffer has: camera.",
    ]


def test_what_is_left_out_follows_the_buffers_and_each_name_is_logged_once(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    replay, demo = made(), made()
    replay.add_trajectories([{"x": torch.zeros(2, 1), "y": torch.zeros(2, 1)}])
    demo.add_trajectories([{"x": torch.zeros(2, 1)}])
    seen = []
    with ReplayBufferDataset(replay, demo, 4, 1, 1) as dataset:
        for columns in (("x",), ("x", "y"), ("x",), ("x", "z")):
            demo.clear()
            demo.add_trajectories([{name: torch.zeros(2, 1) for name in columns}])
            take(dataset, 1)
            seen.append(tuple(dataset.left_out.values()))
    assert seen == [(("y",), ()), ((), ()), (("y",), ()), (("y",), ("z",))]
    assert [record.message for record in caplog.records] == [
        "mixed batches leave out what only replay_buffer has: y.",
        "mixed batches leave out what only demo_buffer has: z.",
    ]


@BOTH
def test_what_only_one_sampler_adds_is_not_left_out(kind: Any, made: Made) -> None:
    replay, demo = made(0), made(1)
    with (
        kind(replay, demo, 4, 1, 1, demo_sampler=Prioritized()) as dataset,
        pytest.raises(SchemaError, match="got that of demo_buffer alone"),
    ):
        take(dataset, 1)


@BOTH
def test_a_column_of_a_name_that_samplers_add_is_left_out_as_others(kind: Any, made: Made) -> None:
    replay, demo = made(), made()
    columns = {"x": torch.zeros(2, 1), "weights": torch.zeros(2, 1)}
    replay.add_trajectories([columns])
    demo.add_trajectories([{"x": torch.zeros(2, 1)}])
    with kind(replay, demo, 4, 1, 1, sampler=WithoutReplacement()) as dataset:
        assert list(take(dataset, 1)[0]) == ["x"]
        assert dataset.left_out == {"replay_buffer": ("weights",), "demo_buffer": ()}


def test_samplers_are_passed_on_where_they_are_given(made: Made) -> None:
    replay, demo, sampler = made(0), made(1), WithoutReplacement()
    with ReplayBufferDataset(replay, demo, 4, 1, 1, demo_sampler=sampler) as dataset:
        take(dataset, 2)
    assert (replay.asked, demo.asked) == ([(2, {})] * 2, [(2, {"sampler": sampler})] * 2)
    with ReplayBufferDataset(replay, None, 4, 1, 1, sampler=WithoutReplacement()) as dataset:
        batches = take(dataset, 3)
    assert len({row for batch in batches for row in row_ids(batch)}) == N


def test_collating_gives_the_batch_itself() -> None:
    batch = {"x": torch.zeros(3)}
    assert replay_buffer_collate_fn([batch]) is batch


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0."),
        ({"min_replay_buffer_size": -1}, "min_replay_buffer_size: expected at least 0, got -1."),
        ({"min_demo_buffer_size": -1}, "min_demo_buffer_size: expected at least 0, got -1."),
        ({"prefetch_size": 0}, "prefetch_size: expected at least 1, got 0."),
        ({"demo_fraction": -0.1}, "demo_fraction: expected a number in [0, 1], got -0.1."),
        ({"demo_fraction": 1.1}, "demo_fraction: expected a number in [0, 1], got 1.1."),
        ({"demo_fraction": float("nan")}, "demo_fraction: expected a number in [0, 1], got nan."),
        ({"timeout_s": -1}, "timeout_s: expected None or at least 0, got -1.0."),
    ],
)
def test_arguments_are_checked(options: Any, message: str, made: Made) -> None:
    given = {"batch_size": 4, "min_replay_buffer_size": 1, "min_demo_buffer_size": 1}
    with pytest.raises(ValueError, match="expected") as raised:
        PreloadReplayBufferDataset(made(), made(), **(given | options))
    assert str(raised.value) == message


@BOTH
def test_unknown_options_are_refused(kind: Any, made: Made) -> None:
    with pytest.raises(TypeError, match="prefetch_sizes"):
        kind(made(), None, 4, 1, 0, prefetch_sizes=3)


def test_a_dataset_that_does_not_prefetch_ignores_how_much(made: Made) -> None:
    with ReplayBufferDataset(made(0), None, 4, 1, 0, prefetch_size=0) as dataset:
        assert len(take(dataset, 3)) == 3
        assert prefetchers() == []


# -- waiting -------------------------------------------------------------------------------------


@BOTH
def test_batches_wait_for_both_minimum_sizes(kind: Any, made: Made) -> None:
    replay, demo = made(0, 1), made(10)
    with kind(replay, demo, 4, 3, 2) as dataset:
        thread, results = in_thread(lambda: take(dataset, 1))
        time.sleep(0.05)
        replay.add_trajectories([trajectory(2)])
        time.sleep(0.05)
        assert (replay.asked, demo.asked, results) == ([], [], [])
        demo.add_trajectories([trajectory(11)])
        thread.join(20)
    assert [i < 10 for i, _, _ in row_ids(results[0][0])] == [True, True, False, False]


@BOTH
def test_minimum_sizes_that_are_set_later_take_effect(kind: Any, made: Made) -> None:
    replay, demo = made(0), made(10)
    with kind(replay, demo, 4, 100, 100) as dataset:
        thread, results = in_thread(lambda: take(dataset, 1))
        until(prefetchers if kind is PreloadReplayBufferDataset else lambda: True)
        dataset.min_replay_buffer_size = 1
        time.sleep(0.1)
        assert (replay.asked, demo.asked, results) == ([], [], [])
        dataset.min_demo_buffer_size = 1
        thread.join(20)
        assert (dataset.min_replay_buffer_size, dataset.min_demo_buffer_size) == (1, 1)
        for name in ("min_replay_buffer_size", "min_demo_buffer_size"):
            with pytest.raises(ValueError, match=f"{name}: expected at least 0, got -1."):
                setattr(dataset, name, -1)
        copied = copy.deepcopy(pickle.loads(pickle.dumps(kind(None, None, 4, 7, 8))))
        assert (copied.min_replay_buffer_size, copied.min_demo_buffer_size) == (7, 8)
    assert len(row_ids(results[0][0])) == 4


@pytest.mark.parametrize(("demo_fraction", "is_demo"), [(0, False), (1, True)])
def test_a_buffer_without_rows_in_the_batch_is_not_waited_for(
    demo_fraction: float, is_demo: bool, made: Made
) -> None:
    replay, demo = (made(), made(10)) if is_demo else (made(0), made())
    options: Any = {"demo_fraction": demo_fraction, "timeout_s": 0}
    with ReplayBufferDataset(replay, demo, 4, 1, 1, **options) as dataset:
        assert len(take(dataset, 2)) == 2
    assert (demo if not is_demo else replay).asked == []


@BOTH
def test_waiting_on_a_reader_sees_what_is_written(kind: Any, tmp_path: Path) -> None:
    with (
        ReplayReader(tmp_path / "rank_*") as reader,
        kind(reader, None, 8, 2, 0) as dataset,
    ):
        thread, results = in_thread(lambda: take(dataset, 1))
        with opened(tmp_path / "rank_0") as buffer:
            buffer.add_trajectories([trajectory(4), trajectory(5)])
            buffer.flush()
            thread.join(20)
    assert {i for i, _, _ in row_ids(results[0][0])} <= {4, 5}


@BOTH
def test_batches_of_a_reader_follow_the_store(kind: Any, tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.flush()
        with (
            ReplayReader(tmp_path, sample_window_size=1) as reader,
            kind(reader, None, 8, 1, 0, prefetch_size=1) as dataset,
        ):
            batches = iter(dataset)
            assert {i for i, _, _ in row_ids(next(batches))} == {0}
            buffer.add_trajectories([trajectory(1)])
            buffer.flush()
            next(batches)
            assert {i for i, _, _ in row_ids(next(batches))} == {1}


@BOTH
def test_waiting_sleeps(kind: Any, made: Made) -> None:
    with kind(made(), None, 8, 1, 0, timeout_s=0.5) as dataset:
        used_s = time.process_time()
        with pytest.raises(TimeoutError):
            take(dataset, 1)
        assert time.process_time() - used_s < 0.1


@BOTH
def test_a_timeout_says_what_is_missing_and_does_not_end_the_iterator(
    kind: Any, made: Made
) -> None:
    replay, demo = made(0), made(10, 11)
    with kind(replay, demo, 4, 3, 4, timeout_s=0.02) as dataset:
        batches = iter(dataset)
        for _ in range(2):
            with pytest.raises(TimeoutError) as raised:
                next(batches)
            assert str(raised.value) == (
                "replay_buffer: expected 3 trajectories, got 1; "
                "demo_buffer: expected 4 trajectories, got 2 after 0.02 s."
            )
        replay.add_trajectories([trajectory(1), trajectory(2)])
        demo.add_trajectories([trajectory(12), trajectory(13)])
        assert len(row_ids(next(batches))) == 4


def test_a_draw_that_takes_longer_than_the_timeout_is_waited_for(made: Made) -> None:
    buffer = made(0)
    buffer.before = lambda: time.sleep(0.1)
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0, timeout_s=0) as dataset:
        assert len(take(dataset, 2)) == 2


@BOTH
def test_a_buffer_that_is_cleared_within_a_draw_is_waited_for(kind: Any, made: Made) -> None:
    buffer = made(0)

    def clear() -> None:
        buffer.before = lambda: None
        buffer.clear()

    buffer.before = clear
    with kind(buffer, None, 4, 1, 0) as dataset:
        thread, results = in_thread(lambda: take(dataset, 1))
        until(lambda: len(buffer) == 0)
        buffer.add_trajectories([trajectory(7)])
        thread.join(20)
    assert {i for i, _, _ in row_ids(results[0][0])} == {7}


@BOTH
def test_an_empty_buffer_that_need_not_be_waited_for_is_an_error(kind: Any, made: Made) -> None:
    with kind(made(), None, 4, 0, 0) as dataset, pytest.raises(EmptyBufferError):
        take(dataset, 1)


# -- closing -------------------------------------------------------------------------------------


@BOTH
def test_closing_ends_an_iterator_that_waits_in_another_thread(kind: Any, made: Made) -> None:
    dataset = kind(made(), None, 4, 1, 0)
    thread, results = in_thread(lambda: list(dataset))
    time.sleep(0.05)
    dataset.close()
    thread.join(20)
    assert results == [[]]


@BOTH
def test_closing_ends_an_iterator_between_its_batches(kind: Any, made: Made) -> None:
    with kind(made(0), None, 4, 1, 0) as dataset:
        count = 0
        for _ in dataset:
            count += 1
            if count == 3:
                dataset.close()
    assert count == 3


@pytest.mark.parametrize("waits_for", ["a buffer", "room", "a draw"])
def test_closing_returns_at_once(waits_for: str, made: Made) -> None:
    fastest_s = 1.0
    for _ in range(3):
        buffer = made() if waits_for == "a buffer" else made(0)
        may_go_on = threading.Event()
        if waits_for == "a draw":
            buffer.before = lambda: may_go_on.wait(20) and None  # noqa: B023
        dataset = PreloadReplayBufferDataset(buffer, None, 4, 1, 0, 2)
        thread = thread_of(dataset)
        if waits_for == "room":
            until(is_filled(dataset, 2))
        elif waits_for == "a draw":
            until(lambda: buffer.asked)  # noqa: B023
        began_s = time.monotonic()
        dataset.close()
        fastest_s = min(fastest_s, time.monotonic() - began_s)
        assert thread.is_alive() == (waits_for == "a draw")
        may_go_on.set()
        thread.join(20)
        assert not thread.is_alive()
    assert fastest_s < 0.1


@BOTH
def test_a_closed_dataset_says_so(kind: Any, made: Made) -> None:
    dataset = kind(made(0), None, 4, 1, 0)
    state = dataset.state_dict()
    dataset.close()
    dataset.close()
    for what, call in {
        "iter": lambda: iter(dataset),
        "state_dict": dataset.state_dict,
        "load_state_dict": lambda: dataset.load_state_dict(state),
    }.items():
        with pytest.raises(ClosedError) as raised:
            call()
        assert str(raised.value) == f"{what}: expected an open dataset, got one that was closed."


@BOTH
def test_closing_leaves_the_buffers_open_and_lets_go_of_them(kind: Any) -> None:
    with Watched(0) as buffer:
        with kind(buffer, None, 4, 1, 0) as dataset:
            take(dataset, 1)
        assert len(row_ids(buffer.sample(5))) == 5
    reference = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert reference() is None
    assert dataset.get_stats()["prefetched"] == 0


def test_closing_lets_go_of_an_error_that_nobody_was_told() -> None:
    def fail() -> None:
        raise OSError("told to nobody")

    with Watched(0) as buffer, PreloadReplayBufferDataset(buffer, None, 4, 1, 0) as dataset:
        buffer.before = fail
        iter(dataset)
        until(lambda: dataset._feed._error)
    reference = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("is_cycle", [False, True])
def test_a_dataset_that_is_dropped_ends_its_thread(is_cycle: bool, made: Made) -> None:
    for buffer in (made(), made(0)):  # it waits for the buffer, for room
        dataset: Any = PreloadReplayBufferDataset(buffer, None, 4, 1, 0)
        thread = thread_of(dataset)
        if is_cycle:
            dataset.itself = dataset
        del dataset
        gc.collect()
        thread.join(20)
        assert not thread.is_alive()


def test_a_dataset_that_its_own_thread_collects_ends_it(made: Made) -> None:
    buffer = made(0)
    dataset: Any = PreloadReplayBufferDataset(buffer, None, 4, 1, 0, 1)
    dataset.itself = dataset
    batches = iter(dataset)
    thread = thread_of(dataset)
    until(is_filled(dataset, 1))
    is_dropped = threading.Event()
    buffer.before = lambda: is_dropped.wait(20) and gc.collect() and None
    next(batches)
    gc.disable()
    try:
        del dataset, batches
        is_dropped.set()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_an_iterator_holds_its_dataset(made: Made) -> None:
    batches = iter(PreloadReplayBufferDataset(made(0), None, 4, 1, 0, 2))
    gc.collect()
    assert [len(row_ids(next(batches))) for _ in range(6)] == [4] * 6


EXIT = """
import atexit, threading

names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print(*names()))  # the first, so it is called last

import torch
from mmbuf import TrajectoryReplayBuffer
from mmbuf.dataset import PreloadReplayBufferDataset

kept = []  # a cycle, and a dataset that waits, one that has no room
buffers = [TrajectoryReplayBuffer(seed) for seed in range(2)]
for buffer in buffers:
    buffer.add_trajectories([{"x": torch.zeros(50, 8, 64)}])
for min_size in (1, 5):
    dataset = PreloadReplayBufferDataset(*buffers, 256, min_size, 1, 2)
    batches = iter(dataset)
    kept.append((dataset, batches))
for _ in range(50):
    next(kept[0][1])
kept.append(kept)
print(*names())
"""


def test_an_interpreter_that_exits_ends_the_threads_and_says_nothing() -> None:
    result = run_python(EXIT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "MainThread mmbuf-prefetch mmbuf-prefetch\nMainThread\n"


SLOW_AT_EXIT = """
import sys, threading

import torch
from mmbuf import TrajectoryReplayBuffer
from mmbuf.dataset import PreloadReplayBufferDataset

class Slow(TrajectoryReplayBuffer):
    def sample(self, num_chunks, **options):
        if threading.current_thread().name == "mmbuf-prefetch":
            torch.rand(16_000_000).sort()  # most of a second, without the interpreter's lock
        return super().sample(num_chunks, **options)

buffer = Slow(0)
buffer.add_trajectories([{"x": torch.zeros(50, 8, 64)}])
dataset = PreloadReplayBufferDataset(buffer, None, 256, 1, 0)
next(iter(dataset))
if sys.argv[1] == "closed":
    dataset.close()
"""


@pytest.mark.parametrize("how", ["open", "closed"])
def test_an_interpreter_that_exits_within_a_slow_draw_does_not_abort(how: str) -> None:
    result = run_python(SLOW_AT_EXIT, how)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_collector_may_close_in_the_midst_of_a_change(made: Made) -> None:
    dataset = PreloadReplayBufferDataset(made(0), None, 4, 1, 0)
    thread = thread_of(dataset)
    feed = dataset._feed
    with feed._drawing, feed._changed:
        del dataset
    thread.join(20)
    assert not thread.is_alive()


# -- prefetching ---------------------------------------------------------------------------------


def test_the_first_iter_starts_the_one_thread(made: Made) -> None:
    with PreloadReplayBufferDataset(made(0), None, 4, 1, 0) as dataset:
        assert prefetchers() == []
        iterators = [iter(dataset) for _ in range(3)]
        (thread,) = prefetchers()
        assert thread.daemon
        assert {len(row_ids(next(batches))) for batches in iterators} == {4}
        assert prefetchers() == [thread]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_the_prefetch_size_are_drawn_and_not_delivered(depth: int, made: Made) -> None:
    buffer = made(0)
    num_taken = 0
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(buffer.asked) - num_taken)

    buffer.before = look
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0, depth) as dataset:
        for _ in dataset:
            num_taken += 1
            if num_taken == 100:
                break
            if num_taken % 10 == 0:
                until(is_filled(dataset, depth))
                time.sleep(0.005)
                assert len(buffer.asked) == num_taken + depth
    # The consumer counts a batch a moment after it was delivered.
    assert most <= depth + 1


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_no_batch_predates_the_newest_add_by_more_than_the_prefetch_size(
    depth: int, made: Made
) -> None:
    buffer = made(0, sample_window_size=1)
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0, depth) as dataset:
        batches = iter(dataset)
        for i in range(1, 6):
            until(is_filled(dataset, depth))
            buffer.add_trajectories([trajectory(i)])
            newest = [row_ids(next(batches))[0][0] for _ in range(depth + 3)]
            assert newest == [i - 1] * depth + [i] * 3


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_prefetching_neither_drops_nor_repeats_nor_reorders_batches(depth: int, made: Made) -> None:
    with ReplayBufferDataset(made(0, 1, seed=1), made(5, seed=2), 7, 1, 1) as dataset:
        expected = take(dataset, 40)
    replay, demo = made(0, 1, seed=1), made(5, seed=2)
    with PreloadReplayBufferDataset(replay, demo, 7, 1, 1, depth) as dataset:
        one, other = iter(dataset), iter(dataset)
        got = [next(batches) for _ in range(20) for batches in (one, other)]
    assert is_equal(got, expected)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_epoch_has_each_row_once_however_deep_the_prefetch(depth: int, made: Made) -> None:
    options: Any = {"sampler": WithoutReplacement()}
    if depth:
        dataset: ReplayBufferDataset = PreloadReplayBufferDataset(
            made(*range(5)), None, 7, 1, 0, depth, **options
        )
    else:
        dataset = ReplayBufferDataset(made(*range(5)), None, 7, 1, 0, **options)
    with dataset:
        for _ in range(2):
            batches = take(dataset, 9)  # 60 rows
            assert [len(row_ids(batch)) for batch in batches] == [7] * 8 + [4]
            assert len({row for batch in batches for row in row_ids(batch)}) == 60


def test_an_error_reaches_the_consumer_behind_the_batches_drawn_before(made: Made) -> None:
    reference, buffer = made(0, seed=1), made(0, seed=1)
    error = EmptyBufferError("no luck")

    def fail_once() -> None:
        if len(buffer.asked) == 4:
            raise error

    buffer.before = fail_once
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0) as dataset:
        batches = iter(dataset)
        until(is_filled(dataset, 3))
        got = [next(batches) for _ in range(3)]
        assert is_equal(got, [reference.sample(4) for _ in range(3)])
        with pytest.raises(EmptyBufferError) as raised:
            next(batches)
        assert raised.value is error
        assert len(row_ids(next(batches))) == 4  # and on it goes


def test_an_error_is_raised_again_as_long_as_its_cause_lasts(made: Made) -> None:
    buffer = made(0)
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0, 2) as dataset:
        batches = iter(dataset)
        until(is_filled(dataset, 2))
        buffer.close()
        assert [len(row_ids(next(batches))) for _ in range(2)] == [4, 4]
        for _ in range(3):
            with pytest.raises(ClosedError):
                next(batches)
        assert len(buffer.asked) <= 6  # it is not tried again before it is told


def test_each_batch_goes_to_one_of_many_consumers(made: Made) -> None:
    reference = made(0, 1, seed=4)
    expected = sorted(row_ids(reference.sample(16)) for _ in range(80))
    with PreloadReplayBufferDataset(made(0, 1, seed=4), None, 16, 1, 0, 3) as dataset:
        consumers = [in_thread(lambda: take(dataset, 20)) for _ in range(4)]
        for thread, _ in consumers:
            thread.join(20)
        got = [row_ids(batch) for _, results in consumers for batch in results[0]]
    assert sorted(got) == expected


@BOTH
def test_batches_are_whole_while_another_thread_adds(kind: Any, made: Made) -> None:
    buffer = made(0, sample_window_size=3)
    is_over = threading.Event()

    def add() -> None:
        for i in itertools.cycle(range(50)):
            if is_over.is_set():
                return
            buffer.add_trajectories([trajectory(i)])

    with kind(buffer, None, 32, 1, 0) as dataset:
        thread, results = in_thread(add)
        assert all(is_whole(batch) for batch in take(dataset, 300))
        is_over.set()
        thread.join(20)
    assert results == [None]


@BOTH
def test_stats_count_batches_and_waiting(kind: Any, made: Made) -> None:
    buffer = made()
    with kind(buffer, None, 4, 1, 0, 3) as dataset:
        assert dataset.get_stats() == {"batches": 0, "wait_s": 0.0, "prefetched": 0}
        thread, _ = in_thread(lambda: take(dataset, 2))
        time.sleep(0.2)
        buffer.add_trajectories([trajectory(0)])
        thread.join(20)
        until(is_filled(dataset, 3 if kind is PreloadReplayBufferDataset else 0))
        stats = dataset.get_stats()
    assert stats["batches"] == 2
    assert 0.1 < stats["wait_s"] < 10


# -- resuming ------------------------------------------------------------------------------------


def saved(state: Any) -> Any:
    """``state`` after `torch.save` and the `torch.load` that runs no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@BOTH
def test_a_resumed_dataset_delivers_what_would_have_come(kind: Any, made: Made) -> None:
    with kind(made(0, 1, seed=1), made(5, seed=2), 7, 1, 1) as dataset:
        batches = iter(dataset)
        states, got = [], []
        for _ in range(12):
            states.append(saved(dataset.state_dict()))
            got.append(next(batches))
        got += [next(batches) for _ in range(10)]
    for step, state in enumerate(states):
        with kind(made(0, 1, seed=8), made(5, seed=9), 7, 1, 1) as resumed:
            resumed.load_state_dict(state)
            assert is_equal(take(resumed, 10), got[step : step + 10])


def test_prefetched_batches_that_were_not_used_are_replayed(made: Made) -> None:
    with PreloadReplayBufferDataset(made(0, 1, seed=1), None, 7, 1, 0, 4) as dataset:
        batches = iter(dataset)
        next(batches)
        until(is_filled(dataset, 4))
        state = saved(dataset.state_dict())
        expected = [next(batches) for _ in range(8)]
    assert is_equal(state["batches"], expected[:4])
    with PreloadReplayBufferDataset(made(0, 1, seed=5), None, 7, 1, 0, 4) as dataset:
        dataset.load_state_dict(state)
        assert is_equal(take(dataset, 8), expected)


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_a_state_resumes_at_any_depth(depth: int, made: Made) -> None:
    with PreloadReplayBufferDataset(made(0, seed=1), None, 4, 1, 0, 4) as dataset:
        iter(dataset)
        until(is_filled(dataset, 4))
        state = dataset.state_dict()
        expected = take(dataset, 20)
    buffer = made(0, seed=5)
    resumed = (
        PreloadReplayBufferDataset(buffer, None, 4, 1, 0, depth)
        if depth
        else ReplayBufferDataset(buffer, None, 4, 1, 0)
    )
    with resumed:
        resumed.load_state_dict(state)
        assert is_equal(take(resumed, 20), expected)


@BOTH
def test_the_states_of_samplers_are_part_of_it(kind: Any, tmp_path: Path) -> None:
    for name, numbers in {"replay": range(2), "demo": range(5, 7)}.items():
        with opened(tmp_path / name) as buffer:
            buffer.add_trajectories([trajectory(i) for i in numbers])

    @contextmanager
    def dataset_of(seed: int) -> Iterator[ReplayBufferDataset]:
        samplers: Any = {"sampler": WithoutReplacement(), "demo_sampler": WithoutReplacement()}
        with (
            ReplayReader(tmp_path / "replay", seed=seed) as replay,
            ReplayReader(tmp_path / "demo", seed=seed) as demo,
            kind(replay, demo, 7, 1, 1, 3, **samplers) as dataset,
        ):
            yield dataset

    with dataset_of(1) as dataset:
        batches = iter(dataset)
        for _ in range(5):
            next(batches)
        state = saved(dataset.state_dict())
        expected = [next(batches) for _ in range(12)]
    assert set(state) == {
        *("batches", "replay_buffer", "replay_buffer.sampler"),
        *("demo_buffer", "demo_buffer.sampler"),
    }
    with dataset_of(2) as dataset:
        dataset.load_state_dict(state)
        assert is_equal(take(dataset, 12), expected)


def test_loading_while_the_thread_draws_is_exact(made: Made) -> None:
    with PreloadReplayBufferDataset(made(0, 1, seed=1), None, 7, 1, 0, 3) as dataset:
        batches = iter(dataset)
        next(batches)
        state = dataset.state_dict()
        expected = [next(batches) for _ in range(10)]
        for step in range(40):
            dataset.load_state_dict(state)
            count = step % 10
            assert is_equal([next(batches) for _ in range(count)], expected[:count])
            time.sleep(0.0005 * (step % 3))


def test_loaded_batches_count_as_drawn(made: Made) -> None:
    with PreloadReplayBufferDataset(made(0), None, 4, 1, 0, 2) as dataset:
        iter(dataset)
        until(is_filled(dataset, 2))
        state = dataset.state_dict()
    buffer = made()
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0, 2) as dataset:
        batches = iter(dataset)  # whose thread has found room, and waits for trajectories
        time.sleep(0.02)
        dataset.load_state_dict(state)
        buffer.add_trajectories([trajectory(0)])
        time.sleep(0.1)
        assert buffer.asked == []
        next(batches)
        until(lambda: buffer.asked == [(4, {})])


def test_a_state_is_not_changed_by_who_uses_its_batches(made: Made) -> None:
    with PreloadReplayBufferDataset(made(0, seed=1), None, 4, 1, 0, 2) as dataset:
        batches = iter(dataset)
        until(is_filled(dataset, 2))
        state = dataset.state_dict()
        expected = saved(state)
        for _ in range(2):
            for _ in range(2):
                batch = next(batches)
                batch["rewards"].zero_()
                batch["curr_obs"]["task"].clear()
            assert is_equal(state, expected)
            dataset.load_state_dict(state)


@BOTH
def test_a_state_of_another_kind_of_dataset_is_refused(kind: Any, made: Made) -> None:
    with (
        kind(made(0, seed=1), None, 4, 1, 0) as dataset,
        kind(made(0), made(1), 4, 1, 1) as other,
    ):
        batches = iter(dataset)
        with pytest.raises(ValueError, match="state: expected") as raised:
            dataset.load_state_dict(other.state_dict())
        assert str(raised.value) == (
            "state: expected that of a dataset with batches, replay_buffer, "
            "got one with batches, replay_buffer, demo_buffer."
        )
        with pytest.raises(ValueError, match="state: expected"):
            dataset.load_state_dict({})
        assert is_equal(next(batches), made(0, seed=1).sample(4))


def test_a_pending_error_is_not_delivered_behind_a_loaded_state(made: Made) -> None:
    buffer = made(0)
    with PreloadReplayBufferDataset(buffer, None, 4, 1, 0) as dataset:
        state = dataset.state_dict()

        def fail_once() -> None:
            buffer.before = lambda: None
            raise OSError("once")

        buffer.before = fail_once
        batches = iter(dataset)
        until(lambda: buffer.asked)
        until(lambda: buffer.before is not fail_once)
        dataset.load_state_dict(state)
        assert is_equal([next(batches)], [made(0).sample(4)])


def resumed_in_child(_: Parent, store: Path, state: Path) -> list[Any]:
    with (
        ReplayReader(store, seed=None) as reader,
        PreloadReplayBufferDataset(reader, None, 16, 1, 0, 3) as dataset,
    ):
        dataset.load_state_dict(torch.load(state, weights_only=True))
        return [row_ids(batch) for batch in take(dataset, 8)]


def test_another_process_goes_on_exactly(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state.pt"
    with opened(store) as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(4)])
    with (
        ReplayReader(store, seed=None) as reader,
        PreloadReplayBufferDataset(reader, None, 16, 1, 0, 3) as dataset,
    ):
        batches = iter(dataset)
        next(batches)
        torch.save(dataset.state_dict(), state)
        expected = [row_ids(next(batches)) for _ in range(8)]
    with Child(resumed_in_child, store, state) as child:
        assert child.result() == expected


# -- processes -----------------------------------------------------------------------------------


def loaded(dataset: Any, count: int, **options: Any) -> list[list[Any]]:
    """``count`` batches of each of two epochs of a DataLoader."""
    loader = DataLoader(dataset, collate_fn=replay_buffer_collate_fn, batch_size=1, **options)
    epochs = []
    for _ in range(2):
        batches = iter(loader)
        epochs.append(list(itertools.islice(batches, count)))
        if not options.get("persistent_workers"):
            end_workers(batches)
    end_workers(getattr(loader, "_iterator", None))
    return epochs


def end_workers(batches: Any) -> None:
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


@pytest.mark.parametrize(
    ("num_workers", "is_persistent"), [(0, False), (1, False), (1, True), (2, False), (2, True)]
)
@BOTH
def test_workers_draw_whole_exact_batches_from_streams_of_their_own(
    kind: Any, num_workers: int, is_persistent: bool, made: Made
) -> None:
    replay, demo = made(*range(8)), made(*range(10, 18))
    with kind(replay, demo, 33, 1, 1, 3) as dataset:
        epochs = loaded(
            dataset,
            6,
            num_workers=num_workers,
            persistent_workers=is_persistent,
            multiprocessing_context="fork" if num_workers else None,
        )
    batches = [batch for epoch in epochs for batch in epoch]
    assert all(is_whole(batch) for batch in batches)
    for batch in batches:
        assert [i < 10 for i, _, _ in row_ids(batch)] == [True] * 17 + [False] * 16
    assert len({tuple(row_ids(batch)) for batch in batches}) == 12


def test_a_loader_that_does_not_batch_gives_the_batches(made: Made) -> None:
    reference = made(0, seed=1)
    with PreloadReplayBufferDataset(made(0, seed=1), None, 4, 1, 0) as dataset:
        batches = list(itertools.islice(DataLoader(dataset, batch_size=None), 3))
    assert is_equal(batches, [reference.sample(4) for _ in range(3)])


@BOTH
def test_forked_workers_follow_the_store_of_a_reader(kind: Any, tmp_path: Path) -> None:
    with (
        opened(tmp_path) as buffer,
        ReplayReader(tmp_path) as reader,
        kind(reader, None, 8, 1, 0) as dataset,
    ):
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=1,
            prefetch_factor=1,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
        buffer.add_trajectories([trajectory(3)])
        buffer.flush()
        assert {i for i, _, _ in row_ids(next(batches))} == {3}
        end_workers(batches)


def test_spawned_workers_have_streams_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(8)])
    with (
        ReplayReader(tmp_path) as reader,
        PreloadReplayBufferDataset(reader, None, 32, 1, 0) as dataset,
    ):
        here = take(dataset, 2)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn"
        )
        batches = iter(loader)
        there = list(itertools.islice(batches, 6))
        end_workers(batches)
    assert len({tuple(row_ids(batch)) for batch in [*here, *there]}) == 8


class SlowToPickle:
    def __reduce__(self) -> tuple[Any, ...]:
        torch.rand(1_000_000).sort()  # some 0.05 s, without the interpreter's lock
        return SlowToPickle, ()


class SlowToSend(ReplayBufferDataset):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {**batch, "slow": SlowToPickle()}


def test_a_spawned_worker_that_ends_while_a_batch_is_pickled_is_not_aborted(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(0)])
    with ReplayReader(tmp_path) as reader, SlowToSend(reader, None, 4, 1, 0) as dataset:
        loader = DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        batches: Any = iter(loader)
        assert len(row_ids(next(batches))) == 4
        (worker,) = batches._workers
        batches._shutdown_workers()
    assert worker.exitcode == 0


def drawn_in_child(_: Parent, dataset: Any, batches: Any) -> Any:
    """Batches of a new iterator, of the parent's one, and how many threads the child has."""
    got = [row_ids(batch) for batch in take(dataset, 4)]
    got += [row_ids(next(batches)) for _ in range(4)]
    num_threads = len(prefetchers())
    dataset.close()
    return got, num_threads, len(prefetchers())


def test_a_forked_child_prefetches_in_a_thread_of_its_own(made: Made) -> None:
    reference = made(0, 1, seed=1)
    with PreloadReplayBufferDataset(made(0, 1, seed=1), None, 32, 1, 0, 3) as dataset:
        batches = iter(dataset)
        ours = [row_ids(next(batches)) for _ in range(2)]
        until(is_filled(dataset, 3))
        with Child(drawn_in_child, dataset, batches) as child:
            theirs, num_threads, num_left = child.result()
        ours += [row_ids(next(batches)) for _ in range(10)]
    # The child took nothing from its parent.
    assert ours == [row_ids(reference.sample(32)) for _ in range(12)]
    assert (num_threads, num_left) == (1, 0)
    assert len({tuple(rows) for rows in theirs + ours}) == 20


def test_a_child_forked_in_the_middle_of_a_draw_does_not_hang(made: Made) -> None:
    buffer = made(0)
    dataset = PreloadReplayBufferDataset(buffer, None, 8, 1, 0)
    may_go_on = threading.Event()
    buffer.before = lambda: may_go_on.wait(20) and None
    batches = iter(dataset)
    until(lambda: buffer.asked)  # the thread holds the lock of drawing
    dataset._feed._changed.acquire()
    holder, _ = in_thread(lambda: dataset.get_stats())  # waits for the other one

    def draw(parent: Parent) -> Any:
        buffer.before = lambda: None
        return drawn_in_child(parent, dataset, batches)

    with Child(draw) as child:
        dataset._feed._changed.release()
        theirs, num_threads, num_left = child.result()
    may_go_on.set()
    holder.join(20)
    dataset.close()
    assert ([len(rows) for rows in theirs], num_threads, num_left) == ([8] * 8, 1, 0)


def test_a_child_that_drops_the_dataset_of_its_parent_does_not_hang(made: Made) -> None:
    kept: list[Any] = [PreloadReplayBufferDataset(made(0), None, 8, 1, 0)]
    kept.append(iter(kept[0]))
    until(is_filled(kept[0], 5))
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(condition: threading.Condition) -> None:
        with condition:
            is_held.set()
            may_go_on.wait(20)

    holder, _ = in_thread(partial(hold, kept[0]._feed._changed))
    is_held.wait(20)

    def drop(_: Parent) -> bool:
        reference = weakref.ref(kept[0])
        kept.clear()
        gc.collect()
        return reference() is None

    with Child(drop) as child:
        assert child.result() is True
    may_go_on.set()
    holder.join(20)
    assert len(row_ids(next(kept[1]))) == 8
    kept[0].close()


def test_a_dataset_of_readers_pickles_and_begins_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(8)])
    with (
        ReplayReader(tmp_path) as reader,
        PreloadReplayBufferDataset(reader, reader, 33, 1, 1, 3) as dataset,
    ):
        ours = take(dataset, 2)
        copied = pickle.loads(pickle.dumps(dataset))
        theirs = take(copied, 2)
        assert [len(row_ids(batch)) for batch in theirs] == [33, 33]
        assert len({tuple(row_ids(batch)) for batch in ours + theirs}) == 4
        copied.close()
        assert len(take(dataset, 5)) == 5


def test_a_dataset_of_a_buffer_with_files_says_that_it_does_not_pickle(tmp_path: Path) -> None:
    with (
        opened(tmp_path) as buffer,
        ReplayBufferDataset(buffer, None, 4, 1, 0) as dataset,
        pytest.raises(TypeError, match=r"use ReplayReader\(path\)"),
    ):
        pickle.dumps(dataset)


# -- signal handlers -----------------------------------------------------------------------------


def rows_of(buffer: Watched) -> list[Any]:
    found = buffer.sample(buffer.total_samples, sampler=WithoutReplacement())
    return sorted(row_ids(found))


def check_epochs(given: list[Any], rows: list[Any], place: str) -> None:
    """Each epoch of what was given has each row once; what is left of them stays."""
    while len(given) >= len(rows):
        assert sorted(given[: len(rows)]) == rows, place
        del given[: len(rows)]


@BOTH
def test_an_interrupted_next_loses_no_row_of_an_epoch(kind: Any, made: Made) -> None:
    buffer, given = made(0, 1, seed=0), []
    rows = rows_of(buffer)
    with kind(buffer, None, 5, 1, 0, sampler=WithoutReplacement()) as dataset:
        batches = iter(dataset)
        for interrupt in every_call():
            interrupt(lambda: next(batches))
            if interrupt.result is not None:
                given += row_ids(interrupt.result)
            given += row_ids(in_time(lambda: next(batches)))
            check_epochs(given, rows, interrupt.place)


@BOTH
def test_an_interrupted_next_loses_no_row_of_either_buffer(kind: Any, made: Made) -> None:
    both = made(0, seed=0), made(1, seed=0)
    rows = [rows_of(buffer) for buffer in both]
    samplers = {"sampler": WithoutReplacement(), "demo_sampler": WithoutReplacement()}
    with kind(*both, 8, 1, 1, **samplers) as dataset:
        batches, given = iter(dataset), [[], []]
        for interrupt in every_call():
            interrupt(lambda: next(batches))
            for batch in (interrupt.result, in_time(lambda: next(batches))):
                if batch is not None:
                    found = row_ids(batch)
                    given[0] += found[:4]
                    given[1] += found[4:]
            for i in range(2):
                check_epochs(given[i], rows[i], interrupt.place)


def in_time(function: Callable[[], Any]) -> Any:
    """What ``function`` gives in another thread, which would wait for ever for a lock left held."""
    thread, results = in_thread(function)
    thread.join(60)
    assert results, "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@BOTH
def test_an_interrupted_call_leaves_a_dataset_that_goes_on(kind: Any, made: Made) -> None:
    buffer = made(0, 1, seed=0)
    for interrupt in every_call():
        dataset = kind(buffer, None, 4, 1, 0, sampler=WithoutReplacement())

        def run(dataset: Any = dataset) -> None:
            next(iter(dataset))
            dataset.load_state_dict(dataset.state_dict())
            dataset.get_stats()

        interrupt(run)
        in_time(partial(dataset.load_state_dict, in_time(dataset.state_dict)))
        batches = in_time(partial(iter, dataset))
        assert len(row_ids(in_time(partial(next, batches)))) == 4, interrupt.place
        in_time(dataset.close)
        assert in_time(partial(next, batches, None)) is None
    until(lambda: not prefetchers())


@BOTH
def test_an_interrupted_close_can_be_called_again(kind: Any, made: Made) -> None:
    buffer = made(0)
    for interrupt in every_call():
        dataset = kind(buffer, None, 4, 1, 0)
        next(iter(dataset))
        interrupt(dataset.close)
        dataset.close()
        with pytest.raises(ClosedError):
            iter(dataset)
    until(lambda: not prefetchers())


@pytest.mark.parametrize("call", ["next", "state_dict", "load_state_dict", "get_stats", "close"])
@BOTH
def test_a_handler_may_call_the_dataset_within_any_call_of_it(
    kind: Any, call: str, made: Made
) -> None:
    """It is served, or refused where it came within a draw; and nobody hangs."""
    buffer, given = made(0, 1, seed=0), []
    rows = rows_of(buffer)
    dataset = kind(buffer, None, 5, 1, 0, sampler=WithoutReplacement())
    batches, state = iter(dataset), dataset.state_dict()
    given.clear()

    def handle() -> None:
        with suppress(MmbufError):
            if call == "next":
                given.extend(row_ids(next(batches)))
            elif call == "load_state_dict":
                dataset.load_state_dict(state)
            else:
                getattr(dataset, call)()

    for interrupt in every_call():
        if call == "close":
            dataset = kind(buffer, None, 5, 1, 0)
            batches = iter(dataset)
            interrupt(partial(next, batches, None), handle)
            dataset.close()
            continue
        interrupt(partial(next, batches), handle)
        given += row_ids(interrupt.result)
        given += row_ids(next(batches))
    dataset.close()
    if call in ("state_dict", "get_stats"):
        check_epochs(given, rows, call)
    elif call == "next":
        counts = Counter(given)
        assert max(counts.values()) - min(counts.values()) <= 1
    until(lambda: not prefetchers())


@BOTH
def test_an_interrupt_ends_a_next_that_waits_for_trajectories(kind: Any, made: Made) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError("by the handler")

    with kind(made(0), None, 4, 2, 0) as dataset:
        batches = iter(dataset)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            began_s = time.monotonic()
            with pytest.raises(InterruptedError, match="by the handler"):
                next(batches)
            assert time.monotonic() - began_s < 3.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@BOTH
def test_what_one_buffer_has_given_comes_when_the_other_one_can_give_too(
    kind: Any, made: Made
) -> None:
    both = made(0, seed=0), made(1, seed=0)
    rows = [rows_of(buffer) for buffer in both]
    samplers = {"sampler": WithoutReplacement(), "demo_sampler": WithoutReplacement()}
    failures = iter(range(100))

    def fail() -> None:
        if next(failures) % 2:
            raise MemoryError

    both[1].before = fail
    with kind(*both, 8, 1, 1, **samplers) as dataset:
        batches, found, num_halves = iter(dataset), [], 0
        while len(found) < 24:
            state = dataset.state_dict()
            num_halves += "drawn" in state
            dataset.load_state_dict(state)
            with suppress(MemoryError):
                found += row_ids(next(batches))
        assert num_halves or kind is PreloadReplayBufferDataset
    for i in range(2):
        assert sorted(row for j in range(3) for row in found[8 * j + 4 * i :][:4]) == rows[i]


def test_the_thread_ends_with_its_dataset_where_the_finalizer_was_lost(made: Made) -> None:
    dataset = PreloadReplayBufferDataset(made(0), None, 4, 1, 0)
    dataset._feed.start(dataset)
    (thread,) = prefetchers()
    del dataset
    thread.join(20)
    assert not thread.is_alive()
