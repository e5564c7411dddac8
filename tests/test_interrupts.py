"""Interrupted calls of buffers and readers: each happened or did not, and all goes on as before.

At each step of a call in the main thread a handler raises KeyboardInterrupt, or calls the buffer
itself (as one for SIGTERM that saves). What is left is compared with a model. See `interrupts`.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from data import columns_of, is_equal, names_of, row_ids, trajectory
from interrupts import Interrupt, every_call, every_line, storm

from mmbuf import ClosedError, LockedError, ReplayReader, TrajectoryReplayBuffer, vm

WINDOW = 4
MODES = {"every line": every_line, "every call": every_call}
modes = pytest.mark.parametrize(
    "mode", ["every line", pytest.param("every call", marks=pytest.mark.slow)]
)


class Model:
    """A buffer and what must be in it: serial numbers, that say what is in a trajectory."""

    def __init__(self, directory: Path | None, **options: Any) -> None:
        self.directory = directory
        self.options = {"sample_window_size": WINDOW, "seed": 1, **options}
        self.serials: list[int] = []
        self.next_serial = 0
        self.checked_at = 0
        self.buffer = self.open()

    def open(self) -> TrajectoryReplayBuffer:
        path = "" if self.directory is None else self.directory
        return TrajectoryReplayBuffer(
            auto_save=self.directory is not None, auto_save_path=path, **self.options
        )

    def item(self) -> dict[str, Any]:
        """The next trajectory; no other is equal."""
        self.next_serial += 1
        return trajectory(self.next_serial - 1, 3, 2, image=(48, 48))

    def add(self) -> None:
        self.buffer.add_trajectories([self.item()])
        self.serials.append(self.next_serial - 1)

    def note_added(self) -> None:
        """An interrupted add of the last item happened, or did not."""
        if len(self.buffer) == len(self.serials) + 1:
            self.serials.append(self.next_serial - 1)

    def note_cleared(self) -> None:
        """An interrupted clear happened, or did not."""
        if not len(self.buffer):
            self.serials = []

    def check(self) -> None:
        """What can be seen at once."""
        assert len(self.buffer) == len(self.serials)
        stats = self.buffer.get_stats()
        assert stats["window_trajectories"] == min(WINDOW, len(self.serials))
        ids = self.buffer.trajectory_ids
        assert ids == sorted(set(ids)), "an id was given twice"
        if self.serials:
            found = {serial for serial, _, _ in row_ids(self.buffer.sample(60))}
            assert found <= set(self.serials[-WINDOW:])

    def check_all(self) -> None:
        """All of it, in memory and in the files; and that it goes on."""
        self.check()
        self.add()
        self.buffer.flush()
        self.check()
        stats = self.buffer.get_stats()
        assert stats["pending_trajectories"] == 0
        assert stats["cache_size"] <= WINDOW
        for key, serial in zip(self.buffer.window_ids, self.serials[-WINDOW:], strict=True):
            found = self.buffer.get_trajectory(key).to_columns()
            assert is_equal(found, columns_of(trajectory(serial, 3, 2, image=(48, 48))))
        if self.directory is not None:
            with ReplayReader(self.directory) as reader:
                assert reader.trajectory_ids == self.buffer.trajectory_ids
            assert len(names_of(self.directory)) == len(self.serials), "files"

    def reopen(self) -> None:
        self.buffer.close()
        self.buffer = self.open()
        self.check()

    def steps(self, mode: str) -> Iterator[Interrupt]:
        """The rounds of a call; all is checked after each tenth and after the last."""
        for number, interrupt in enumerate(MODES[mode]()):
            yield interrupt
            try:
                self.check()
                if number % 10 == 0 or not interrupt.was_met:
                    self.check_all()
            except BaseException as error:
                error.add_note(f"after an interrupt at {interrupt.place}")
                raise


@pytest.fixture(
    params=["memory", pytest.param("files", marks=pytest.mark.slow), "small cache"],
)
def model(request: pytest.FixtureRequest, tmp_path: Path, without_fsync: None) -> Iterator[Model]:
    options = {"cache_size": 1} if request.param == "small cache" else {}
    found = Model(None if request.param == "memory" else tmp_path / "store", **options)
    for _ in range(WINDOW + 2):
        found.add()
    yield found
    if found.directory is not None:
        found.reopen()
    found.buffer.close()


def of_files(model: Model) -> Path:
    if model.directory is None:
        pytest.skip("of buffers with files")
    return model.directory


@modes
def test_an_interrupted_add_happened_or_did_not(model: Model, mode: str) -> None:
    for interrupt in model.steps(mode):
        item = model.item()
        interrupt(lambda: model.buffer.add_trajectories([item]))  # noqa: B023
        model.note_added()


@modes
def test_an_interrupted_add_of_several_added_the_first_of_them(model: Model, mode: str) -> None:
    for interrupt in model.steps(mode):
        first = model.next_serial
        items = [model.item() for _ in range(3)]
        interrupt(lambda: model.buffer.add_trajectories(iter(items)))  # noqa: B023
        num_added = len(model.buffer) - len(model.serials)
        assert 0 <= num_added <= 3
        model.serials += range(first, first + num_added)


@modes
@pytest.mark.parametrize("options", [{}, {"with_info": True}, {"as_numpy": True}], ids=str)
def test_an_interrupted_sample_leaves_nothing_behind(
    model: Model, mode: str, options: dict[str, Any]
) -> None:
    for interrupt in model.steps(mode):
        model.buffer.clear_cache()  # so that files are mapped and read
        interrupt(lambda: model.buffer.sample(20, **options))
    cache = model.buffer._window.cache
    assert cache is not None
    gc.collect()  # tracebacks of the interrupts, which know what was pinned
    cache.reclaim()
    assert not cache.has_evicted, "a gather that has ended keeps what was evicted"


@modes
def test_an_interrupted_get_trajectory_leaves_nothing_behind(model: Model, mode: str) -> None:
    for interrupt in model.steps(mode):
        newest = model.buffer.trajectory_ids[-1]
        interrupt(lambda: model.buffer.get_trajectory(newest))  # noqa: B023


@modes
@pytest.mark.parametrize("call", ["flush", "sync", "clear_cache", "get_stats"])
def test_an_interrupted_call_changes_nothing(model: Model, mode: str, call: str) -> None:
    buffer = model.buffer
    calls: dict[str, Callable[[], Any]] = {
        "flush": buffer.flush,
        "sync": lambda: buffer.flush(sync=True),
        "clear_cache": buffer.clear_cache,
        "get_stats": buffer.get_stats,
    }
    for interrupt in model.steps(mode):
        model.add()
        interrupt(calls[call])


@modes
def test_an_interrupted_clear_happened_or_did_not(model: Model, mode: str) -> None:
    for interrupt in model.steps(mode):
        model.add()
        interrupt(model.buffer.clear)
        model.note_cleared()


@modes
def test_an_interrupted_save_leaves_a_whole_checkpoint_or_none(
    model: Model, mode: str, tmp_path: Path
) -> None:
    for number, interrupt in enumerate(model.steps(mode)):
        model.add()
        path = tmp_path / f"checkpoint {number // 2}"  # each second one is saved over
        before = list(model.serials)
        interrupt(lambda: model.buffer.save_checkpoint(path))  # noqa: B023
        if path.exists():
            with ReplayReader(path) as saved:
                assert len(saved) == WINDOW
                found = {serial for serial, _, _ in row_ids(saved.sample(100))}
                assert found in (set(before[-WINDOW:]), set(before[-WINDOW - 1 : -1]))
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


@modes
def test_an_interrupted_load_happened_or_did_not(model: Model, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    model.buffer.save_checkpoint(path)
    saved = model.serials[-WINDOW:]
    for interrupt in model.steps(mode):
        model.add()
        interrupt(lambda: model.buffer.load_checkpoint(path))
        if len(model.buffer) == WINDOW:
            model.serials = list(saved)


@modes
def test_an_interrupted_close_happened_or_did_not(model: Model, mode: str) -> None:
    path = of_files(model)
    for interrupt in MODES[mode]():
        model.add()
        interrupt(model.buffer.close)
        with pytest.raises(ClosedError) if model.buffer._is_closed else _nothing():
            model.buffer.sample(1)
        model.reopen()
    assert len(names_of(path)) == len(model.serials)


@modes
def test_an_interrupted_opening_lets_the_store_go(model: Model, mode: str) -> None:
    of_files(model)
    for interrupt in MODES[mode]():
        model.buffer.close()
        if not interrupt(model.open):
            interrupt.result.close()
        interrupt.result = None
        model.buffer = opened_when_let_go(model)
        model.check()


def opened_when_let_go(model: Model) -> TrajectoryReplayBuffer:
    """A buffer that is dropped closes its store by and by."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return model.open()
        except LockedError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# -- readers -------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("call", ["refresh", "sample", "wait_for"])
def test_an_interrupted_reader_misses_nothing_and_takes_nothing_twice(
    model: Model, mode: str, call: str
) -> None:
    path = of_files(model)
    model.buffer.flush()
    with ReplayReader(path, sample_window_size=WINDOW) as reader:
        calls: dict[str, Callable[[], Any]] = {
            "refresh": reader.refresh,
            "sample": lambda: reader.sample(20),
            "wait_for": lambda: reader.wait_for(len(model.serials), 5.0),
        }
        for interrupt in MODES[mode]():
            model.add()
            model.buffer.flush()
            interrupt(calls[call])
            reader.refresh()
            assert reader.trajectory_ids == model.buffer.trajectory_ids
            found = {serial for serial, _, _ in row_ids(reader.sample(60))}
            assert found <= set(model.serials[-WINDOW:])


# -- handlers that call the buffer -----------------------------------------------------------------


def calls_of(model: Model, path: Path) -> dict[str, Callable[[], Any]]:
    buffer = model.buffer
    return {
        "add": lambda: buffer.add_trajectories([model.item()]),
        "sample": lambda: buffer.sample(20),
        "flush": buffer.flush,
        "save": lambda: buffer.save_checkpoint(path),
        "clear_cache": buffer.clear_cache,
        "get_stats": buffer.get_stats,
    }


@pytest.mark.parametrize("below", ["add", "sample", "flush", "save", "clear_cache", "get_stats"])
@pytest.mark.parametrize("of_handler", ["add", "sample", "flush", "save", "get_stats"])
def test_a_handler_may_call_the_buffer_within_any_call(
    model: Model, tmp_path: Path, below: str, of_handler: str
) -> None:
    outer, inner = (calls_of(model, tmp_path / name) for name in ("outer", "inner"))
    for interrupt in model.steps("every line"):
        first, num_before = model.next_serial, len(model.buffer)
        was_met = interrupt(outer[below], inner[of_handler])
        num_added = (below == "add") + (was_met and of_handler == "add")
        assert len(model.buffer) == num_before + num_added
        # One that is added by a handler may come before the one below it.
        added = [number_of(model.buffer, key) for key in model.buffer.trajectory_ids[num_before:]]
        assert sorted(added) == list(range(first, first + num_added))
        model.serials += added


def number_of(buffer: TrajectoryReplayBuffer, key: int) -> int:
    found = buffer.get_trajectory(key).to_columns()
    serial = int(found["curr_obs"]["states"][0, 0, 0])
    assert is_equal(found, columns_of(trajectory(serial, 3, 2, image=(48, 48))))
    return serial


@pytest.mark.parametrize("below", ["add", "sample", "flush", "save", "clear_cache", "get_stats"])
def test_a_handler_may_close_the_buffer_within_any_call(
    tmp_path: Path, without_fsync: None, below: str
) -> None:
    """The usual answer to a scheduler's SIGTERM, though it should not end the process."""
    for interrupt in every_line():
        model = Model(tmp_path / "store")
        model.serials = list(range(len(model.buffer)))
        model.add()
        calls = calls_of(model, tmp_path / "checkpoint")
        try:
            was_met = interrupt(calls[below], model.buffer.close)
        except ClosedError:
            was_met = True
        if not was_met:
            model.buffer.close()
        with pytest.raises(ClosedError):
            model.buffer.flush()
        with ReplayReader(tmp_path / "store") as reader:
            assert len(reader) >= len(model.serials)
    assert vm.MAPS.used == 0


# -- real signals ----------------------------------------------------------------------------------


def test_interrupts_at_random_moments_tear_nothing(model: Model) -> None:
    rng = random.Random(7)
    buffer, num_interrupted = model.buffer, 0
    calls = {
        "add": lambda: buffer.add_trajectories([model.item()]),
        "sample": lambda: buffer.sample(50),
        "flush": buffer.flush,
        "clear": buffer.clear,
    }
    deadline = time.monotonic() + 2.0
    with storm(8, 0.004) as is_open:
        while time.monotonic() < deadline:
            name = rng.choice(["add"] * 6 + ["sample"] * 4 + ["flush"] * 2 + ["clear"])
            if name == "sample" and not model.serials:
                continue
            try:
                is_open[0] = True
                calls[name]()
                is_open[0] = False
            except KeyboardInterrupt:
                is_open[0] = False
                num_interrupted += 1
            model.note_added()
            model.note_cleared()
            model.check()
    assert num_interrupted > 20
    model.check_all()


def test_a_handler_that_flushes_at_random_moments_never_waits_for_what_it_met(
    model: Model,
) -> None:
    num_handled = 0
    rng = random.Random(9)

    def handle(*_: object) -> None:
        nonlocal num_handled
        model.buffer.flush()
        num_handled += 1

    before = signal.signal(signal.SIGALRM, handle)
    deadline = time.monotonic() + 1.5
    try:
        while time.monotonic() < deadline:
            # Sooner than what follows has ended, most of the time, on a fast machine too.
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00002, 0.0007))
            model.add()
            model.buffer.sample(50)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_handled > 20
    model.check_all()


# -- callers' own code within a call ---------------------------------------------------------------


def test_what_is_added_may_come_from_code_that_calls_the_buffer(model: Model) -> None:
    first = model.next_serial

    def items() -> Iterator[dict[str, Any]]:
        for _ in range(3):
            model.buffer.flush()
            yield model.item()
            model.buffer.sample(10)

    model.buffer.add_trajectories(items())
    model.serials += range(first, first + 3)
    model.check_all()


def test_others_save_while_an_add_waits_for_its_next_item(model: Model, tmp_path: Path) -> None:
    """As with a channel that nobody closes."""
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def items() -> Iterator[dict[str, Any]]:
        yield model.item()
        is_waiting.set()
        assert may_go_on.wait(30)

    thread = threading.Thread(target=model.buffer.add_trajectories, args=(items(),))
    thread.start()
    assert is_waiting.wait(30)
    model.serials.append(model.next_serial - 1)
    model.buffer.save_checkpoint(tmp_path / "checkpoint")
    model.check_all()
    may_go_on.set()
    thread.join()
    with ReplayReader(tmp_path / "checkpoint") as saved:
        assert len(saved) == WINDOW
