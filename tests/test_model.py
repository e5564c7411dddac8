"""A buffer against a perfect model of it: whatever is done in whatever order, they agree.

The model is a list: of each trajectory its id, and by its number all of its columns. Every row that
is sampled is found in the model's window; ids and counts agree after every step.

By default a few hundred steps are run, always the same; the slow form runs ten thousand others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from data import columns_of, is_equal, trajectory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mmbuf import EmptyBufferError, ReplayReader, TrajectoryReplayBuffer, health, storage
from mmbuf.transfer import convert

IMAGE = (64, 64, 1)  # four rows of it are mapped

settings.register_profile("normal", max_examples=25, stateful_step_count=30, derandomize=True)
settings.register_profile("nightly", max_examples=300, stateful_step_count=50, derandomize=True)

formats = st.sampled_from(list(storage.FORMATS))
windows = st.sampled_from([0, 1, 2, 5])
caches = st.sampled_from([None, 0, 1, 2])


class Known(NamedTuple):
    """One trajectory of the model: ``number`` says what is in it."""

    trajectory_id: int
    number: int
    num_samples: int
    has_file: bool


class Saved(NamedTuple):
    """What a checkpoint holds."""

    path: Path
    list: list[Known]
    counter: int
    id_step: int


class Machine(RuleBasedStateMachine):
    """One buffer, the model of it, its checkpoints, and a reader that follows its store."""

    directory: Path  # of the test
    num_steps = 0
    num_rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.home = self.directory / "example"
        self.home.mkdir()
        self.num_names = 0
        self.columns: dict[int, dict[str, Any]] = {}  # by number, all that was ever added
        self.list: list[Known] = []
        self.counter, self.id_step = 0, 1
        self.num_flushed = 0  # of the list: what a kill must leave
        self.saved: list[Saved] = []
        self.reader: ReplayReader | None = None
        self.buffer: TrajectoryReplayBuffer | None = None

    def name(self) -> Path:
        self.num_names += 1
        return self.home / str(self.num_names)

    @initialize(is_saved=st.booleans(), form=formats, window=windows, cache=caches)
    def start(self, is_saved: bool, form: str, window: int, cache: int | None) -> None:
        self.is_saved = is_saved
        self.path = self.name()
        self.open(form, window, cache)
        self.add([(2, 2), (3, 3), (1, 1)], "")

    def open(self, form: str, window: int, cache: int | None, *, enable_cache: bool = True) -> None:
        self.window = window
        self.buffer = TrajectoryReplayBuffer(
            seed=1,
            enable_cache=enable_cache,
            cache_size=cache,
            sample_window_size=window,
            auto_save=self.is_saved,
            auto_save_path=self.path,
            trajectory_format=form,
        )

    @property
    def in_window(self) -> list[Known]:
        return self.list[-self.window :] if self.window else self.list

    # -- what is done --

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
        weights_id=st.sampled_from(["", "w", "../é"]),
    )
    def add(self, sizes: list[tuple[int, int]], weights_id: str) -> None:
        items = []
        for num_steps, num_envs in sizes:
            number = len(self.columns)
            item = trajectory(number, num_steps, num_envs, image=IMAGE)
            if number % 2:
                item["actions"] = torch.cat([item["actions"], torch.ones(1, num_envs, 3)])
                item["curr_obs"]["task"] += [[f"bootstrap {number}"] * num_envs]
            self.columns[number] = item
            items.append({**item, "model_weights_id": weights_id, "max_episode_length": number})
            num_samples = num_steps * num_envs
            self.list.append(Known(self.counter, number, num_samples, self.is_saved))
            self.counter += self.id_step
        self.buffer.add_trajectories(items)

    @rule(count=st.integers(1, 60), is_refilled=st.booleans())
    def sample(self, count: int, is_refilled: bool) -> None:
        self.check_sample(self.buffer, count, self.in_window, is_refilled)

    @rule(data=st.data())
    def get_trajectory(self, data: st.DataObject) -> None:
        if self.list:
            known = data.draw(st.sampled_from(self.list))
            is_left = known.has_file or known in self.in_window
            self.check_trajectory(self.buffer, known, is_left)
        with pytest.raises(KeyError):
            self.buffer.get_trajectory(self.counter)

    @rule(sync=st.booleans())
    def flush(self, sync: bool) -> None:
        self.buffer.flush(sync=sync)
        self.num_flushed = len(self.list)

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    @precondition(lambda self: len(self.list) > 5)
    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.list, self.num_flushed = [], 0

    @precondition(lambda self: self.is_saved)
    @rule(form=formats, window=windows, cache=caches, enable_cache=st.booleans())
    def reopen(self, form: str, window: int, cache: int | None, enable_cache: bool) -> None:
        self.buffer.close()
        self.num_flushed = len(self.list)
        self.open(form, window, cache, enable_cache=enable_cache)

    @precondition(lambda self: self.is_saved)
    @rule(form=formats, window=windows, cache=caches)
    def kill_and_reopen(self, form: str, window: int, cache: int | None) -> None:
        """Go on with a copy of the directory as a process would leave it that is killed now."""
        self.flush(sync=False)
        copy = self.name()
        copy_as_it_is(self.path, copy)
        self.buffer.close(wait=False)
        self.close_reader()
        self.path = copy
        self.open(form, window, cache)

    @precondition(lambda self: self.is_saved)
    @rule(form=formats)
    def kill_while_it_writes(self, form: str) -> None:
        """How much is there then is a matter of time, so the copy is looked at and left."""
        copy = self.name()
        copy_as_it_is(self.path, copy)
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=copy, trajectory_format=form, sample_window_size=0
        ) as buffer:
            count = len(buffer)
            assert self.num_flushed <= count <= len(self.list)
            found, lost = self.list[:count], self.list[count:]
            assert buffer.trajectory_ids == [known.trajectory_id for known in found]
            assert buffer.trajectory_counter == (lost[0].trajectory_id if lost else self.counter)
            self.check_sample(buffer, 10, found)
            for known in found:
                self.check_trajectory(buffer, known, True)
            number = len(self.columns) - 1
            buffer.add_trajectories([self.columns[number]])
            added = Known(buffer.trajectory_ids[-1], number, 1, True)
        with ReplayReader(copy) as reader:
            assert reader.trajectory_ids == [known.trajectory_id for known in [*found, added]]
            self.check_sample(reader, 10, [*found, added])
        # A file that was published and not yet listed is no damage.
        assert not any(finding.is_damage for finding in health.verify(copy))

    # -- checkpoints --

    @rule(form=st.none() | formats, is_new=st.booleans())
    def save(self, form: str | None, is_new: bool) -> None:
        path = self.name()
        if not is_new and self.saved:
            path = self.saved.pop().path
        self.buffer.save_checkpoint(path, trajectory_format=form)
        self.num_flushed = len(self.list)
        in_files = [known._replace(has_file=True) for known in self.in_window]
        self.saved.append(Saved(path, in_files, self.counter, self.id_step))

    @rule(data=st.data(), world_size=st.integers(1, 3))
    @precondition(lambda self: self.saved)
    def load(self, data: st.DataObject, world_size: int) -> None:
        saved = data.draw(st.sampled_from(self.saved))
        rank = data.draw(st.integers(0, world_size - 1))
        self.buffer.load_checkpoint(saved.path, world_size > 1, rank, world_size)
        share, rest = divmod(len(saved.list), world_size)
        start = rank * share + min(rank, rest)
        self.list = saved.list[start : start + share + (rank < rest)]
        before, self.counter = self.counter, saved.counter + rank * saved.id_step
        self.id_step = saved.id_step * world_size
        while self.counter < before:
            self.counter += self.id_step
        self.num_flushed = len(self.list)
        if not self.is_saved:  # its files are mapped where they are, and stay so
            self.saved.remove(saved)

    @rule(data=st.data(), form=formats)
    @precondition(lambda self: self.saved)
    def convert(self, data: st.DataObject, form: str) -> None:
        saved = data.draw(st.sampled_from(self.saved))
        path = self.name()
        convert(saved.path, path, form)
        self.saved.append(saved._replace(path=path))

    @rule(data=st.data())
    @precondition(lambda self: self.saved)
    def read_checkpoint(self, data: st.DataObject) -> None:
        saved = data.draw(st.sampled_from(self.saved))
        assert health.verify(saved.path) == []
        with ReplayReader(saved.path) as reader:
            assert reader.trajectory_ids == [known.trajectory_id for known in saved.list]
            self.check_sample(reader, 20, saved.list)
            for known in saved.list:
                self.check_trajectory(reader, known, True)

    # -- a reader that follows --

    @precondition(lambda self: self.is_saved and self.reader is None)
    @rule(window=windows, cache=caches)
    def open_reader(self, window: int, cache: int | None) -> None:
        self.reader = ReplayReader(self.path, sample_window_size=window, cache_size=cache)
        self.reader_window = window

    @precondition(lambda self: self.reader is not None)
    @rule()
    def read_on(self) -> None:
        self.buffer.flush()
        self.num_flushed = len(self.list)
        self.reader.refresh()
        ids = [known.trajectory_id for known in self.list]
        assert self.reader.trajectory_ids == ids
        assert self.reader.total_samples == sum(known.num_samples for known in self.list)
        in_window = self.list[-self.reader_window :] if self.reader_window else self.list
        assert self.reader.window_ids == [known.trajectory_id for known in in_window]
        self.check_sample(self.reader, 20, in_window)

    @precondition(lambda self: self.reader is not None)
    @rule()
    def sample_meanwhile(self) -> None:
        """While some of it may not be published: any row that was ever added."""
        with contextlib.suppress(EmptyBufferError):
            self.check_rows(self.reader.sample(10), set(self.columns))

    @precondition(lambda self: self.reader is not None)
    @rule()
    def close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    # -- what must hold --

    @invariant()
    def counts_agree(self) -> None:
        type(self).num_steps += 1
        buffer, ids = self.buffer, [known.trajectory_id for known in self.list]
        if buffer is None:
            return
        assert buffer.trajectory_ids == ids
        assert buffer.window_ids == [known.trajectory_id for known in self.in_window]
        assert len(buffer) == buffer.size == len(ids)
        assert buffer.total_samples == sum(known.num_samples for known in self.list)
        assert buffer.trajectory_counter == self.counter
        stats = buffer.get_stats()
        assert stats["num_trajectories"] == len(ids)
        assert stats["window_trajectories"] >= len(self.in_window)
        assert stats["window_samples"] == sum(known.num_samples for known in self.in_window)
        assert stats["cache_filled"] <= stats["cache_size"]

    def check_sample(
        self, source: Any, count: int, window: list[Known], is_refilled: bool = False
    ) -> None:
        if not window:
            with pytest.raises(EmptyBufferError):
                source.sample(count)
            return
        numbers = {known.number for known in window}
        batch = source.sample(count)
        self.check_rows(batch, numbers)
        if is_refilled:
            assert source.sample(count, out=batch) is batch
            self.check_rows(batch, numbers)

    def check_rows(self, batch: dict[str, Any], numbers: set[int]) -> None:
        for row, (number, t, b) in enumerate(batch["curr_obs"]["states"].tolist()):
            assert number in numbers
            assert is_equal(row_of(batch, row), row_at(self.columns[number], t, b))
            type(self).num_rows += 1

    def check_trajectory(self, source: Any, known: Known, is_left: bool) -> None:
        if not is_left:
            with pytest.raises(KeyError):
                source.get_trajectory(known.trajectory_id)
            return
        found = source.get_trajectory(known.trajectory_id)
        assert is_equal(found.to_columns(), columns_of(self.columns[known.number]))
        assert found.max_episode_length == known.number

    def teardown(self) -> None:
        self.close_reader()
        if self.buffer is not None:
            self.buffer.close()
        shutil.rmtree(self.home)


def row_of(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """One row of a batch."""
    return {
        key: row_of(value, row) if isinstance(value, dict) else value[row]
        for key, value in batch.items()
    }


def row_at(columns: dict[str, Any], t: int, b: int) -> dict[str, Any]:
    """The row ``(t, b)`` of a trajectory whose ``dones`` have a leading step, others a last one."""
    return {
        key: row_at(value, t, b) if isinstance(value, dict) else value[t + (key == "dones")][b]
        for key, value in columns.items()
    }


def copy_as_it_is(source: Path, target: Path) -> None:
    """Copy a store that is written meanwhile; the journal first, as it names complete files."""
    target.mkdir()
    shutil.copy(source / "journal.jsonl", target)
    for name in os.listdir(source):
        if name in ("journal.jsonl", ".writer.lock"):
            continue
        with contextlib.suppress(FileNotFoundError, shutil.Error):  # a temporary that is gone
            if (source / name).is_dir():
                shutil.copytree(source / name, target / name)
            else:
                shutil.copy(source / name, target / name)


def run(directory: Path, profile: str) -> tuple[int, int]:
    """Run a machine of its own; how many steps were run, how many rows compared."""
    machine = type("Model", (Machine,), {"directory": directory, "num_steps": 0, "num_rows": 0})
    options = settings(
        settings.get_profile(profile),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)
    return machine.num_steps, machine.num_rows


@pytest.fixture(autouse=True)
def _is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def test_a_buffer_agrees_with_its_model(tmp_path: Path) -> None:
    num_steps, num_rows = run(tmp_path, "normal")
    print(f"{num_steps} steps, {num_rows} rows")
    assert num_steps >= 300
    assert num_rows > 500


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_buffer_agrees_with_its_model_for_ten_thousand_steps(tmp_path: Path) -> None:
    num_steps, num_rows = run(tmp_path, "nightly")
    print(f"{num_steps} steps, {num_rows} rows")
    assert num_steps >= 10_000
    assert num_rows > 20_000


def test_the_model_knows_a_wrong_row(tmp_path: Path) -> None:
    machine = type("Model", (Machine,), {"directory": tmp_path})()
    machine.start(is_saved=False, form="arrow", window=1, cache=None)
    batch = machine.buffer.sample(5)
    machine.check_rows(batch, {2})
    with pytest.raises(AssertionError):
        machine.check_rows(batch, {1})
    batch["curr_obs"]["image"][3, 1] ^= 1
    with pytest.raises(AssertionError):
        machine.check_rows(batch, {2})
    assert isinstance(batch["rewards"], torch.Tensor)
    machine.teardown()
