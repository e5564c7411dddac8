"""Samplers that a handler meets at each step of a draw: nothing lost, doubled, torn or stuck."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from data import is_equal
from interrupts import Interrupt, every_call, every_line, storm

from mmbuf import MmbufError, TrajectoryReplayBuffer
from mmbuf.sampling import (
    FreshVersions,
    NStep,
    Prioritized,
    Recent,
    Sampler,
    Slices,
    Stratified,
    Uniform,
    WithoutReplacement,
    tree,
)
from mmbuf.sampling.tree import FANOUT

BOTH = pytest.mark.parametrize("every", [every_line, every_call])
Every = Callable[[], Iterator[Interrupt]]
STEPS = 4


def numbered(i: int) -> dict[str, Any]:
    """Trajectory ``i``: one environment, rows ``4 * i`` and so on, two episodes of 2 steps."""
    rows = torch.arange(STEPS * i, STEPS * (i + 1)).reshape(STEPS, 1)
    return {
        "row": rows,
        "rewards": rows.float(),
        "dones": rows % 2 == 1,
        "versions": torch.full((STEPS, 1), float(i)),
    }


def filled(count: int, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**{"seed": 0, "sample_window_size": 0, **options})
    buffer.add_trajectories([numbered(i) for i in range(count)])
    return buffer


def rows_of(batch: Any) -> list[int]:
    rows: list[int] = batch["row"].reshape(-1).tolist()
    return rows


class Epochs:
    """A sampler whose epochs give each of ``num_rows`` rows once, over all batches that came."""

    def __init__(self, num_rows: int, sampler: WithoutReplacement | None = None) -> None:
        self.sampler = sampler or WithoutReplacement()
        self.all_rows = list(range(num_rows))
        self.given: list[int] = []

    def take(self, rows: list[int], place: str) -> None:
        """Rows of a batch that has come to its caller."""
        self.given += rows
        while len(self.given) >= len(self.all_rows):
            epoch, self.given = (
                self.given[: len(self.all_rows)],
                self.given[len(self.all_rows) :],
            )
            assert sorted(epoch) == self.all_rows, place


# -- epochs --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"as_numpy": True}, {"with_info": True}, {"device": "cpu"}], ids=str
)
def test_an_interrupted_epoch_gives_each_row_once_over_the_batches_that_come(
    every: Every, options: dict[str, Any]
) -> None:
    with filled(5) as buffer:
        epochs = Epochs(20)
        for interrupt in every():
            interrupt(lambda: buffer.sample(3, sampler=epochs.sampler, **options))
            if interrupt.result is not None:
                epochs.take(rows_of(interrupt.result), interrupt.place)
            epochs.take(rows_of(buffer.sample(2, sampler=epochs.sampler)), interrupt.place)


@BOTH
def test_an_interrupted_epoch_gives_each_row_once_while_the_window_slides(every: Every) -> None:
    for interrupt in every():
        with filled(4, sample_window_size=4) as buffer:
            sampler = WithoutReplacement()
            before = rows_of(buffer.sample(5, sampler=sampler))
            buffer.add_trajectories([numbered(4)])  # in the place of 0
            interrupt(lambda: buffer.sample(3, sampler=sampler))  # noqa: B023
            found = [] if interrupt.result is None else rows_of(interrupt.result)
            expected = sorted(set(range(4, 16)) - set(before))
            while len(found) < len(expected):
                found += rows_of(buffer.sample(3, sampler=sampler))
            assert sorted(found) == expected, interrupt.place
            assert sampler.epoch == 1


@BOTH
def test_an_epoch_that_an_interrupted_draw_begins_is_whole(every: Every) -> None:
    for interrupt in every():
        with filled(3) as buffer:
            sampler = WithoutReplacement(drop_last=True)
            for _ in range(2):
                buffer.sample(5, sampler=sampler)
            interrupt(lambda: buffer.sample(4, sampler=sampler))  # noqa: B023
            found = [] if interrupt.result is None else rows_of(interrupt.result)
            while len(found) < 12:
                found += rows_of(buffer.sample(4, sampler=sampler))
            assert sorted(found) == list(range(12)), interrupt.place


@BOTH
def test_an_interrupted_draw_of_n_steps_loses_no_row_of_the_epoch_that_draws_them(
    every: Every,
) -> None:
    with filled(5) as buffer:
        rows = WithoutReplacement()
        epochs, sampler = Epochs(20, rows), NStep(2, 0.9, rows=rows)
        for interrupt in every():
            interrupt(lambda: buffer.sample(3, sampler=sampler))
            if interrupt.result is not None:
                epochs.take(rows_of(interrupt.result), interrupt.place)
            epochs.take(rows_of(buffer.sample(2, sampler=sampler)), interrupt.place)


def test_what_a_handler_saves_within_a_draw_goes_on_where_the_batch_had_not_come() -> None:
    with filled(3) as buffer:
        for interrupt in every_call():
            sampler, states = WithoutReplacement(), []
            before = rows_of(buffer.sample(3, sampler=sampler))

            def save() -> None:
                states.append(sampler.state_dict())  # noqa: B023

            was_met = interrupt(lambda: buffer.sample(4, sampler=sampler), save)  # noqa: B023
            assert was_met == bool(states)
            for state in states:
                resumed = WithoutReplacement()
                resumed.load_state_dict(state)
                rest = rows_of(buffer.sample(12, sampler=resumed))
                assert sorted(before + rest) == list(range(12)), interrupt.place


def test_a_handler_that_draws_within_a_draw_is_refused_or_served_and_each_row_comes_once() -> None:
    with filled(5) as buffer:
        sampler, outcomes, given = WithoutReplacement(), Counter[str](), Counter[int]()

        def draw() -> None:
            try:
                given.update(rows_of(buffer.sample(2, sampler=sampler)))
            except MmbufError:
                outcomes["refused"] += 1
            else:
                outcomes["served"] += 1

        for interrupt in every_call():
            interrupt(lambda: buffer.sample(3, sampler=sampler), draw)
            given.update(rows_of(interrupt.result))
        while given.total() % 20:
            given.update(rows_of(buffer.sample(1, sampler=sampler)))
        assert given == dict.fromkeys(range(20), sampler.epoch)
        assert min(outcomes["refused"], outcomes["served"]) > 3


def test_an_epoch_under_random_interrupts_gives_each_row_once() -> None:
    with filled(40) as buffer, storm(5, 0.0015) as is_open:
        epochs, num_interrupted = Epochs(160), 0
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            batch = None
            try:
                is_open[0] = True
                batch = buffer.sample(7, sampler=epochs.sampler)
                is_open[0] = False
            except KeyboardInterrupt:
                is_open[0] = False
                num_interrupted += 1
            if batch is not None:
                epochs.take(rows_of(batch), "a random moment")
        assert num_interrupted > 20


# -- what follows the window ---------------------------------------------------------------------

FOLLOWERS: dict[str, Callable[[], Sampler]] = {
    "slices": lambda: Slices(2),
    "padded slices": lambda: Slices(3, pad=True),
    "nstep": lambda: NStep(2, 0.9),
    "fresh versions": lambda: FreshVersions(2),
    "stratified": lambda: Stratified("versions", {float(i): 1 / 8 for i in range(8)}),
    "recent": lambda: Recent(8.0),
    "uniform": Uniform,
    "prioritized": Prioritized,
}


def is_as_new(buffer: TrajectoryReplayBuffer, sampler: Sampler, other: Sampler) -> bool:
    """Whether ``sampler`` draws what ``other``, that has drawn nothing yet, draws."""
    state = buffer.state_dict()
    found = buffer.sample(16, sampler=sampler)
    buffer.load_state_dict(state)
    return is_equal(found, buffer.sample(16, sampler=other))


def in_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` gives in a thread; its error is raised."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    return results[0]


@BOTH
@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_an_interrupted_draw_leaves_draws_as_a_new_sampler(every: Every, name: str) -> None:
    make = FOLLOWERS[name]
    with filled(8, sample_window_size=8) as buffer:
        sampler, numbers = make(), itertools.count(8)
        for interrupt in every():
            buffer.sample(4, sampler=sampler)
            buffer.add_trajectories([numbered(next(numbers) % 8)])
            interrupt(lambda: buffer.sample(4, sampler=sampler))
            assert in_thread(lambda: is_as_new(buffer, sampler, make())), interrupt.place


@pytest.mark.parametrize("name", ["slices", "nstep", "fresh versions", "stratified"])
def test_what_follows_the_window_is_made_anew_where_it_was_broken_off(name: str) -> None:
    """In a thread that no signal reaches: a cancellation, or memory that ends."""
    make = FOLLOWERS[name]

    def check() -> None:
        with filled(8, sample_window_size=8) as buffer:
            sampler, numbers = make(), itertools.count(8)
            for interrupt in every_line():
                buffer.sample(4, sampler=sampler)
                buffer.add_trajectories([numbered(next(numbers) % 8)])
                interrupt(lambda: buffer.sample(4, sampler=sampler))
                assert is_as_new(buffer, sampler, make()), interrupt.place

    in_thread(check)


@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_handler_that_draws_within_a_draw_never_hangs(name: str) -> None:
    make = FOLLOWERS[name]
    with filled(8, sample_window_size=8) as buffer:
        sampler, numbers = make(), itertools.count(8)

        def draw() -> None:
            with suppress(MmbufError):
                buffer.sample(4, sampler=sampler)

        for interrupt in every_call():
            buffer.add_trajectories([numbered(next(numbers) % 8)])
            interrupt(lambda: buffer.sample(4, sampler=sampler), draw)
            assert is_as_new(buffer, sampler, make()), interrupt.place


def test_what_a_draw_has_seen_stays_as_it_was_when_all_is_made_anew() -> None:
    """It is read without a lock."""
    with filled(8, sample_window_size=8) as buffer:
        for make in (FOLLOWERS[name] for name in ("slices", "nstep", "fresh versions")):
            sampler = make()
            buffer.sample(4, sampler=sampler)
            kept = sampler._seen[1]  # type: ignore[attr-defined]
            seen = copy.deepcopy(kept)
            whole = {**numbered(9), "dones": torch.zeros(STEPS, 1, dtype=torch.bool)}
            buffer.add_trajectories([whole] * 8)
            buffer.sample(4, sampler=sampler)
            assert all(map(np.array_equal, seen[:2], kept[:2]))
            buffer.add_trajectories([numbered(i) for i in range(8)])


# -- priorities ----------------------------------------------------------------------------------


@pytest.fixture
def _small_tops(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tree of few rows has several levels."""
    monkeypatch.setattr(tree, "_MAX_TOP", FANOUT)


def check_sums(sampler: Prioritized) -> None:
    """Each node of the tree is the sum of those below it."""
    levels = sampler._rows.tree._levels
    for below, level in itertools.pairwise(levels):
        sums = below.reshape(-1, FANOUT).sum(1)
        assert np.array_equal(level[: len(sums)], sums)


def all_handles(buffer: TrajectoryReplayBuffer) -> Any:
    """The handles of all rows, by their numbers."""
    batch = buffer.sample(buffer.total_samples, sampler=WithoutReplacement(), with_info=True)
    return batch["info"]["handle"][batch["row"].reshape(-1).argsort()].numpy()


def priorities(state: dict[str, Any]) -> list[float]:
    values: list[float] = state["values"].tolist()
    return values


@BOTH
@pytest.mark.usefixtures("_small_tops")
def test_an_interrupted_update_of_priorities_is_whole_or_not_made(every: Every) -> None:
    with filled(40) as buffer:
        sampler = Prioritized(alpha=1.0, eps=0.0)
        buffer.sample(4, sampler=sampler)
        handles = all_handles(buffer)
        rng = np.random.default_rng(3)
        expected = [1.0] * 160
        for interrupt in every():
            before, picked = expected.copy(), rng.permutation(160)[:20]
            values = rng.integers(1, 100, 20).astype(np.float64)
            interrupt(lambda: sampler.update_priorities(handles[picked], values))  # noqa: B023
            for row, value in zip(picked.tolist(), values.tolist(), strict=True):
                expected[row] = value
            found = priorities(sampler.state_dict())
            assert found in (expected, before), interrupt.place
            if found == before and interrupt.was_met:
                expected = before
            in_thread(lambda: buffer.sample(4, sampler=sampler))
            assert priorities(sampler.state_dict()) == expected, interrupt.place
            assert sampler.state_dict()["highest"] >= max(expected)
            check_sums(sampler)
        assert sampler.get_stats() == {"late_updates": 0}


@pytest.mark.usefixtures("_small_tops")
def test_what_a_handler_saves_within_an_update_has_all_of_it_or_nothing() -> None:
    with filled(40) as buffer:
        sampler = Prioritized(alpha=1.0, eps=0.0)
        buffer.sample(4, sampler=sampler)
        handles, states = all_handles(buffer), []
        expected = [1.0] * 160
        for value, interrupt in enumerate(every_call(), 2):
            before = expected.copy()
            expected[:30] = [float(value)] * 30
            interrupt(
                lambda: sampler.update_priorities(handles[:30], np.full(30, float(value))),  # noqa: B023
                lambda: states.append(sampler.state_dict()),
            )
            while states:
                assert priorities(states.pop()) in (before, expected), interrupt.place
            assert priorities(sampler.state_dict()) == expected
            check_sums(sampler)


@BOTH
@pytest.mark.usefixtures("_small_tops")
def test_priorities_stay_when_a_draw_or_a_load_is_interrupted(every: Every) -> None:
    with filled(40, sample_window_size=40) as buffer:
        sampler, numbers = Prioritized(alpha=1.0, eps=0.0), itertools.count()
        values = np.arange(1.0, 161.0)
        expected = [*values[STEPS:].tolist(), *[160.0] * STEPS]  # new ones as the highest
        for interrupt in every():
            buffer.sample(4, sampler=sampler)
            handles, number = all_handles(buffer), next(numbers) % 40
            sampler.update_priorities(np.roll(handles, -STEPS * number, 0), values)
            buffer.add_trajectories([numbered(number)])  # in the place of its equal
            interrupt(lambda: buffer.sample(4, sampler=sampler))
            buffer.sample(4, sampler=sampler)
            assert priorities(sampler.state_dict()) == expected, interrupt.place
            check_sums(sampler)
        for interrupt in every():
            state = sampler.state_dict()
            interrupt(lambda: sampler.load_state_dict(state))  # noqa: B023
            in_thread(lambda: buffer.sample(4, sampler=sampler))
            assert priorities(sampler.state_dict()) == expected, interrupt.place
            check_sums(sampler)
