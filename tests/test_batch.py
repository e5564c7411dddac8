"""What comes of a batch: where its rows are from, arrays, TensorDicts, and tensors on a device."""

from __future__ import annotations

import builtins
import gc
import itertools
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import (
    DTYPES,
    FLOAT8,
    bits,
    every_dtype,
    is_equal,
    is_whole,
    opened,
    row_ids,
    trajectory,
)

from mmbuf import EmptyBufferError, MmbufError, ReplayReader, SchemaError, TrajectoryReplayBuffer
from mmbuf.sampling import (
    NStep,
    Prioritized,
    Recent,
    Sampler,
    Slices,
    Stratified,
    Uniform,
    WithoutReplacement,
)
from mmbuf.staging import _MAX_KEYS, Staging, as_device

pytestmark = pytest.mark.usefixtures("without_fsync")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def in_memory(count: int = 3, **options: Any) -> TrajectoryReplayBuffer:
    """A buffer of trajectories whose rows say where they belong; T and B differ."""
    buffer = TrajectoryReplayBuffer(**{"seed": 0, **options})
    buffer.add_trajectories([trajectory(i, 4 + i, 3) for i in range(count)])
    return buffer


# -- where rows are from -------------------------------------------------------------------------


def origins_of(batch: Any) -> list[tuple[int, int, int]]:
    info = batch["info"]
    return list(
        zip(
            info["trajectory_id"].tolist(),
            info["step"].tolist(),
            info["env"].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    "sampler", [None, Uniform(), WithoutReplacement(), Recent(20), Prioritized()]
)
def test_info_says_where_each_row_is_from(sampler: Sampler | None) -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([trajectory(i, 2 + i, 1 + i % 4) for i in range(12)])
    batch = buffer.sample(64, sampler=sampler, with_info=True)
    assert origins_of(batch) == row_ids(batch)


def test_info_says_where_each_row_is_from_when_the_window_has_moved_on() -> None:
    buffer = TrajectoryReplayBuffer(seed=0, sample_window_size=5)
    for i in range(200):
        buffer.add_trajectories([trajectory(i, 2 + i % 3, 1 + i % 4)])
        if i % 10 == 9:
            batch = buffer.sample(64, with_info=True)
            assert origins_of(batch) == row_ids(batch)


def test_info_says_where_rows_are_from_that_are_read_from_files(tmp_path: Path) -> None:
    with opened(tmp_path / "store", enable_cache=False) as buffer:
        buffer.add_trajectories([trajectory(i, 4 + i) for i in range(5)])
        buffer.flush()
        batch = buffer.sample(64, with_info=True)
        assert origins_of(batch) == row_ids(batch)


def test_info_says_where_the_steps_of_slices_are_from() -> None:
    batch = in_memory().sample(8, sampler=Slices(3), with_info=True)
    info = batch["info"]
    assert {name: tuple(value.shape) for name, value in info.items()} == {
        "trajectory_id": (8, 3),
        "step": (8, 3),
        "env": (8, 3),
        "handle": (8, 3, 2),
    }
    origins = torch.stack([info["trajectory_id"], info["step"], info["env"]], -1)
    assert torch.equal(origins, batch["curr_obs"]["states"].long())


def test_info_is_of_int64() -> None:
    info = in_memory().sample(5, with_info=True)["info"]
    assert list(info) == ["trajectory_id", "step", "env", "handle"]
    assert {value.dtype for value in info.values()} == {torch.int64}
    assert info["handle"].shape == (5, 2)


def test_info_comes_only_when_it_is_asked_for() -> None:
    assert "info" not in in_memory().sample(5)
    assert "info" not in in_memory().sample(5, sampler=Uniform())


def test_info_changes_nothing_else() -> None:
    batch, plain = in_memory().sample(32, with_info=True), in_memory().sample(32)
    del batch["info"]
    assert is_equal(batch, plain)


def test_info_of_a_batch_that_is_refilled_is_of_its_new_rows() -> None:
    buffer = in_memory()
    batch = buffer.sample(16, with_info=True)
    states = batch["curr_obs"]["states"]
    assert buffer.sample(16, batch, with_info=True) is batch
    assert batch["curr_obs"]["states"] is states
    assert origins_of(batch) == row_ids(batch)


def handles_of(buffer: TrajectoryReplayBuffer | ReplayReader) -> dict[tuple[int, int, int], Any]:
    """The handle of every row of the window."""
    batch = buffer.sample(buffer.total_samples, sampler=WithoutReplacement(), with_info=True)
    handles = [tuple(handle) for handle in batch["info"]["handle"].tolist()]
    return dict(zip(row_ids(batch), handles, strict=True))


def test_each_row_has_a_handle_of_its_own() -> None:
    handles = handles_of(in_memory(20))
    assert len(set(handles.values())) == len(handles) == sum(3 * (4 + i) for i in range(20))


def test_handle_names_the_same_row_in_a_reader_and_after_reopening(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(5)])
        handles = handles_of(buffer)
        buffer.flush()
        with ReplayReader(tmp_path / "store") as reader:
            assert handles_of(reader) == handles
    with opened(tmp_path / "store") as buffer:
        assert handles_of(buffer) == handles


def test_handle_names_the_same_row_in_a_checkpoint(tmp_path: Path) -> None:
    buffer = in_memory()
    buffer.save_checkpoint(tmp_path / "checkpoint")
    with TrajectoryReplayBuffer() as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        assert handles_of(other) == handles_of(buffer)


def test_handle_stays_while_the_window_moves_on() -> None:
    buffer = TrajectoryReplayBuffer(seed=0, sample_window_size=10)
    buffer.add_trajectories([trajectory(0)])
    handles = handles_of(buffer)
    for i in range(1, 100):
        buffer.add_trajectories([trajectory(i)])
        if i < 10:
            found = handles_of(buffer)
            assert handles.items() <= found.items()
            handles = found
    assert not set(handles.values()) & set(handles_of(buffer).values())


@pytest.mark.parametrize("path", [("info",), ("info", "states")])
def test_a_column_named_info_is_refused_where_info_is_asked_for(path: tuple[str, ...]) -> None:
    leaf: Any = torch.zeros(4, 1)
    for key in reversed(path):
        leaf = {key: leaf}
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([leaf])
    buffer.sample(4)
    with pytest.raises(
        SchemaError, match=rf"column '{'.'.join(path)}': expected no column under 'info'"
    ):
        buffer.sample(4, with_info=True)


@pytest.mark.parametrize("name", ["weights", "info"])
def test_a_column_whose_name_a_sampler_needs_is_refused(name: str) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([{"actions": torch.zeros(4, 1), name: torch.zeros(4, 1)}])
    with pytest.raises(SchemaError, match=rf"column '{name}': expected no column .*Rename"):
        buffer.sample(4, sampler=Prioritized())


def test_a_sampler_of_another_buffer_is_refused() -> None:
    sampler = Uniform()
    in_memory().sample(4, sampler=sampler)
    with pytest.raises(ValueError, match="expected one of this buffer's own"):
        in_memory().sample(4, sampler=sampler)


# -- arrays --------------------------------------------------------------------------------------


def test_arrays_have_the_values_of_the_tensors() -> None:
    arrays, tensors = (in_memory().sample(16, as_numpy=flag) for flag in (True, False))
    assert list(arrays) == list(tensors)
    for name in ("rewards", "actions", "dones"):
        assert type(arrays[name]) is np.ndarray
        assert np.array_equal(arrays[name], tensors[name].numpy())
    assert np.array_equal(arrays["curr_obs"]["states"], tensors["curr_obs"]["states"].numpy())


def test_text_stays_a_list_among_arrays() -> None:
    arrays, tensors = (in_memory().sample(16, as_numpy=flag) for flag in (True, False))
    assert arrays["curr_obs"]["task"] == tensors["curr_obs"]["task"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_each_dtype_have_the_bits_of_the_tensors(dtype: str) -> None:
    arrays, tensors = [], []
    for flag, found in ((True, arrays), (False, tensors)):
        buffer = TrajectoryReplayBuffer(seed=0)
        buffer.add_trajectories([every_dtype()])
        found.append(buffer.sample(16, as_numpy=flag)[dtype])
    for name, array in arrays[0].items():
        tensor = tensors[0][name]
        expected = tensor.float() if dtype in ("bfloat16", *FLOAT8) else tensor
        assert array.dtype == expected.numpy().dtype
        assert array.shape == tuple(tensor.shape)
        assert bits(array) == bits(expected)


def test_arrays_of_slices_have_two_leading_dimensions() -> None:
    arrays = in_memory().sample(5, sampler=Slices(3), as_numpy=True)
    assert arrays["curr_obs"]["states"].shape == (5, 3, 3)
    assert [len(texts) for texts in arrays["curr_obs"]["task"]] == [3] * 5


def test_info_and_weights_are_arrays_too() -> None:
    arrays = in_memory().sample(5, sampler=Prioritized(), as_numpy=True)
    assert type(arrays["weights"]) is np.ndarray
    assert {type(value) for value in arrays["info"].values()} == {np.ndarray}


def test_an_array_is_the_callers_own() -> None:
    buffer = in_memory()
    first = buffer.sample(16, as_numpy=True)
    first["rewards"][:] = -1
    second = buffer.sample(16, as_numpy=True)
    assert (first["rewards"] == -1).all()
    assert (second["rewards"] >= 0).all()


# -- TensorDicts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensordict() -> Any:
    module = pytest.importorskip("tensordict")
    gc.collect()
    gc.freeze()  # what importing made is never garbage
    return module


def test_a_tensordict_has_the_values_of_the_batch(tensordict: Any) -> None:
    found, batch = (in_memory().sample(16, as_tensordict=flag) for flag in (True, False))
    assert set(found.keys()) == set(batch)
    for name in ("rewards", "actions", "dones"):
        assert torch.equal(found[name], batch[name])
    assert torch.equal(found["curr_obs", "states"], batch["curr_obs"]["states"])


def test_a_tensordict_has_the_batch_size_all_the_way_down(tensordict: Any) -> None:
    found = in_memory().sample(16, as_tensordict=True, with_info=True)
    for part in (found, found["curr_obs"], found["info"]):
        assert isinstance(part, tensordict.TensorDict)
        assert part.batch_size == torch.Size([16])


def test_a_tensordict_of_slices_has_two_batch_dimensions(tensordict: Any) -> None:
    found = in_memory().sample(5, as_tensordict=True, sampler=Slices(3), with_info=True)
    for part in (found, found["curr_obs"], found["info"]):
        assert part.batch_size == torch.Size([5, 3])
    assert found["info", "handle"].shape == (5, 3, 2)


@pytest.mark.parametrize("sampler", [None, Slices(3)])
def test_a_tensordict_keeps_text(tensordict: Any, sampler: Sampler | None) -> None:
    buffer = in_memory()
    state = buffer.state_dict()
    found = buffer.sample(5, as_tensordict=True, sampler=sampler)
    buffer.load_state_dict(state)
    batch = buffer.sample(5, sampler=sampler)
    assert found["curr_obs", "task"] == batch["curr_obs"]["task"]


def test_a_tensordict_of_text_alone_has_a_batch_size(tensordict: Any) -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([{"task": [["push"], ["push"]]}])
    found = buffer.sample(3, as_tensordict=True)
    assert found.batch_size == torch.Size([3])
    assert found["task"] == ["push"] * 3


def test_a_tensordict_is_indexed_with_its_text(tensordict: Any) -> None:
    found, batch = (in_memory().sample(16, as_tensordict=flag) for flag in (True, False))
    assert found[3]["curr_obs", "task"] == batch["curr_obs"]["task"][3]
    assert found[3]["actions"].tolist() == batch["actions"][3].tolist()


def test_missing_tensordict_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(
        MmbufError, match=r"as_tensordict: tensordict is missing\..* pip install .mmbuf.tensordict."
    ):
        in_memory().sample(4, as_tensordict=True)


def test_tensordict_is_not_imported_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = builtins.__import__

    def watched(name: str, *arguments: Any, **options: Any) -> Any:
        assert not name.startswith("tensordict")
        return really(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", watched)
    buffer = in_memory()
    buffer.sample(4)
    buffer.sample(4, as_numpy=True)
    buffer.sample(4, device="cpu")


# -- outputs together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"as_numpy": True},
        {"as_tensordict": True},
        {"device": "cpu"},
        {"as_tensordict": True, "device": "cpu"},
    ],
)
def test_out_is_refused_with_another_output(options: dict[str, Any]) -> None:
    buffer = in_memory()
    batch = buffer.sample(4)
    with pytest.raises(ValueError, match="expected one of out, as_numpy, and as_tensordict or dev"):
        buffer.sample(4, batch, **options)


@pytest.mark.parametrize("options", [{"as_tensordict": True}, {"device": "cpu"}])
def test_arrays_are_refused_as_tensordict_or_on_a_device(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected one of out, as_numpy, and as_tensordict or dev"):
        in_memory().sample(4, as_numpy=True, **options)


def test_a_tensordict_may_be_on_a_device(tensordict: Any) -> None:
    found = in_memory().sample(16, as_tensordict=True, device="cpu")
    batch = in_memory().sample(16)
    assert found.batch_size == torch.Size([16])
    assert torch.equal(found["curr_obs", "states"], batch["curr_obs"]["states"])
    assert found["curr_obs", "task"] == batch["curr_obs"]["task"]


@pytest.mark.parametrize("options", [{"as_numpy": True}, {"device": "cpu"}])
def test_a_reader_gives_the_same_outputs(tmp_path: Path, options: dict[str, Any]) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(3)])
    batches = []
    for chosen in (options, {}):
        with ReplayReader(tmp_path / "store") as reader:
            batches.append(reader.sample(16, **chosen))
    assert batches[0]["actions"].tolist() == batches[1]["actions"].tolist()


# -- on a device ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "samplers", [(None, None), (Slices(3), Slices(3)), (Prioritized(), Prioritized())]
)
def test_batches_on_a_device_are_equal_to_those_that_are_not(
    samplers: tuple[Sampler | None, Sampler | None],
) -> None:
    there, here = in_memory(), in_memory()
    for _ in range(5):
        found = there.sample(16, sampler=samplers[0], device="cpu")
        expected = here.sample(16, sampler=samplers[1])
        for batch in (found, expected):
            if "info" in batch:
                del batch["info"]["handle"]  # of the uuids
        assert is_equal(found, expected)


def test_a_batch_of_every_dtype_on_a_device_has_the_same_bits() -> None:
    found, expected = [], []
    for batches, options in ((found, {"device": "cpu"}), (expected, {})):
        buffer = TrajectoryReplayBuffer(seed=0)
        buffer.add_trajectories([every_dtype()])
        batches += [buffer.sample(16, **options) for _ in range(3)]
    assert is_equal(found, expected)


def test_info_on_a_device_is_of_the_rows_of_its_batch() -> None:
    buffer = in_memory()
    for _ in range(5):
        batch = buffer.sample(16, with_info=True, device="cpu")
        assert origins_of(batch) == row_ids(batch)


def leaves_of(batch: Any) -> Iterator[Any]:
    for value in batch.values():
        if isinstance(value, dict):
            yield from leaves_of(value)
        else:
            yield value


def stages_of(buffer: TrajectoryReplayBuffer) -> list[Any]:
    """The staging batches that wait to be used."""
    (staging,) = buffer._window._stagings.values()
    return [stage.batch for free in staging._stages.values() for stage in free]


def test_a_batch_on_a_device_shares_no_memory_with_the_staging_batch() -> None:
    buffer = in_memory()
    batch = buffer.sample(16, with_info=True, device="cpu")
    (stage,) = stages_of(buffer)
    for leaf, staged in zip(leaves_of(batch), leaves_of(stage), strict=True):
        if isinstance(leaf, list):
            assert leaf is not staged
        else:
            assert leaf.data_ptr() != staged.data_ptr()


@pytest.mark.parametrize("sampler", [None, WithoutReplacement(), Prioritized()])
def test_batches_on_a_device_are_independent(sampler: Sampler | None) -> None:
    buffer = in_memory()
    batches = [buffer.sample(8, sampler=sampler, device="cpu") for _ in range(4)]
    for leaf in leaves_of(batches.pop(1)):
        leaf[:] = ["changed"] * 8 if isinstance(leaf, list) else leaf + 1
    batches.append(buffer.sample(8, sampler=sampler, device="cpu"))
    assert all(map(is_whole, batches))


def test_slices_on_a_device_are_independent() -> None:
    buffer, sampler = in_memory(), Slices(3)
    batches = [buffer.sample(8, sampler=sampler, device="cpu") for _ in range(4)]
    for leaf in leaves_of(batches.pop(1)):
        leaf[:] = [["changed"] * 3] * 8 if isinstance(leaf, list) else leaf + 1
    for batch in [*batches, buffer.sample(8, sampler=sampler, device="cpu")]:
        rows = {name: batch[name].flatten(0, 1) for name in ("rewards", "actions", "dones")}
        states = batch["curr_obs"]["states"].flatten(0, 1)
        tasks = list(itertools.chain(*batch["curr_obs"]["task"]))
        assert is_whole({**rows, "curr_obs": {"states": states, "task": tasks}})


def test_text_of_a_batch_on_a_device_stays_when_another_is_drawn() -> None:
    buffer = in_memory()
    batch = buffer.sample(16, device="cpu")
    tasks = list(batch["curr_obs"]["task"])
    for _ in range(5):
        buffer.sample(16, device="cpu")
    assert batch["curr_obs"]["task"] == tasks


def test_one_thread_uses_one_staging_batch_again_and_again() -> None:
    buffer = in_memory()
    used = set()
    for _ in range(10):
        buffer.sample(16, device="cpu")
        (stage,) = stages_of(buffer)
        used.add(stage["rewards"].data_ptr())
    assert len(used) == 1


def test_staging_batches_are_of_one_size_each() -> None:
    buffer = in_memory()
    for _ in range(3):
        for size in (4, 16):
            assert buffer.sample(size, device="cpu")["rewards"].shape == (size,)
    assert sorted(len(stage["rewards"]) for stage in stages_of(buffer)) == [4, 16]


def test_staging_memory_is_bounded_however_many_sizes_there_are() -> None:
    buffer = in_memory()
    for size in range(1, 100):
        buffer.sample(size, device="cpu")
    assert [len(stage["rewards"]) for stage in stages_of(buffer)] == list(
        range(100 - _MAX_KEYS, 100)
    )


def test_samplers_that_were_used_once_are_let_go_with_their_staging_memory() -> None:
    buffer, samplers = in_memory(), []
    for _ in range(50):
        sampler = Slices(3)
        samplers.append(weakref.ref(sampler))
        buffer.sample(4, sampler=sampler, device="cpu")
    del sampler
    gc.collect()
    assert sum(reference() is not None for reference in samplers) == _MAX_KEYS
    assert len(stages_of(buffer)) == _MAX_KEYS


def test_a_closed_buffer_has_no_staging_memory() -> None:
    buffer = in_memory()
    buffer.sample(16, device="cpu")
    buffer.close()
    assert not buffer._window._stagings


def test_batches_on_a_device_go_on_when_another_schema_takes_the_place() -> None:
    buffer = in_memory()
    buffer.sample(4, device="cpu")
    buffer.clear()
    buffer.add_trajectories([{"other": torch.ones(4, 2)}])
    for _ in range(3):
        assert is_equal(buffer.sample(4, device="cpu"), {"other": torch.ones(4)})


def test_what_a_sampler_lacks_is_said_on_a_device_too() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([{"actions": torch.zeros(4, 1)}])
    for _ in range(2):
        with pytest.raises(SchemaError, match="rewards"):
            buffer.sample(4, sampler=NStep(2, 0.9), device="cpu")


def test_an_empty_buffer_is_empty_on_a_device_too() -> None:
    buffer = TrajectoryReplayBuffer()
    for _ in range(2):
        with pytest.raises(EmptyBufferError, match="expected rows to draw from"):
            buffer.sample(4, device="cpu")


def test_short_last_batch_of_an_epoch_comes_on_a_device() -> None:
    buffer, sampler = TrajectoryReplayBuffer(seed=0), WithoutReplacement()
    buffer.add_trajectories([trajectory(0, 5, 2)])
    batches = [buffer.sample(4, sampler=sampler, device="cpu") for _ in range(6)]
    assert [len(batch["rewards"]) for batch in batches] == [4, 4, 2] * 2
    for epoch in (batches[:3], batches[3:]):
        rows = [row for batch in epoch for row in row_ids(batch)]
        assert sorted(rows) == [(0, t, b) for t in range(5) for b in range(2)]


def test_epoch_without_its_last_batch_uses_its_staging_batch_again() -> None:
    buffer, sampler = TrajectoryReplayBuffer(seed=0), WithoutReplacement(drop_last=True)
    buffer.add_trajectories([trajectory(0, 5, 2)])
    used = set()
    for _ in range(6):
        assert len(set(row_ids(buffer.sample(4, sampler=sampler, device="cpu")))) == 4
        (stage,) = stages_of(buffer)
        used.add(stage["rewards"].data_ptr())
    assert len(used) == 1


def test_threads_get_right_batches_on_a_device() -> None:
    buffer, failures = in_memory(5), []
    sampler = Prioritized()
    barrier = threading.Barrier(4)

    def run() -> None:
        try:
            barrier.wait(30)
            kept = []
            for step in range(60):
                own = sampler if step % 2 else None
                kept.append(buffer.sample(32, sampler=own, with_info=True, device="cpu"))
            for batch in kept:
                assert is_whole(batch)
                assert origins_of(batch) == row_ids(batch)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert 2 <= len(stages_of(buffer)) <= 8  # of two keys, for each thread at most


def test_an_unknown_device_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        in_memory().sample(4, device="nowhere")


class Copy:
    """In the place of an event of CUDA: a copy that goes on until it is told to end."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_waits = 0

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.num_waits += 1


class SlowStaging(Staging):
    """Staging to a device that the machine does not have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(torch.device("cuda", 0))
        self.copies: list[Copy] = []
        self.pinned: list[torch.Tensor] = []
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def _event(self) -> Copy:
        self.copies.append(Copy())
        return self.copies[-1]

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


def filling(value: float) -> Callable[[Any], Any]:
    def fill(out: Any) -> Any:
        if out is None:
            return {"x": torch.full((4,), value)}
        out["x"][:] = value
        return out

    return fill


def test_next_batch_is_gathered_while_the_copy_of_the_last_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staging = SlowStaging(monkeypatch)
    sent = [staging.send("key", filling(i)) for i in range(2)]
    assert len(staging.pinned) == 2
    assert [copy.num_waits for copy in staging.copies] == [0, 0]
    assert [batch["x"][0].item() for batch in sent] == [0, 1]


def test_staging_batch_whose_copy_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = SlowStaging(monkeypatch)
    for i in range(4):
        staging.send("key", filling(i))
    assert len(staging.pinned) == 2
    assert [copy.num_waits for copy in staging.copies] == [1, 1, 0, 0]


def test_staging_batch_whose_copy_has_ended_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = SlowStaging(monkeypatch)
    for i in range(4):
        staging.send("key", filling(i))
        staging.copies[-1].is_over = True
    assert len(staging.pinned) == 1
    assert sum(copy.num_waits for copy in staging.copies) == 0


def test_batch_that_is_not_a_refilled_one_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = SlowStaging(monkeypatch)
    for i in range(3):
        staging.send("key", lambda _, i=i: {"x": torch.full((4 - i,), 1.0)})
        staging.copies[-1].is_over = True
    assert [len(tensor) for tensor in staging.pinned] == [4, 3, 2]


def test_a_device_without_a_number_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert as_device("cuda") == torch.device("cuda", 3)
    assert as_device("cuda:1") == torch.device("cuda", 1)
    assert as_device("cpu") == as_device(torch.device("cpu")) == torch.device("cpu")


@GPU
def test_batches_on_a_gpu_are_equal_to_those_that_are_not() -> None:
    buffer, expected = in_memory(), in_memory()
    found = [buffer.sample(16, device="cuda") for _ in range(20)]
    for batch in found:
        assert batch["rewards"].is_cuda
        tasks = batch["curr_obs"].pop("task")
        plain = expected.sample(16)
        assert plain["curr_obs"].pop("task") == tasks
        for leaf, other in zip(leaves_of(batch), leaves_of(plain), strict=True):
            assert torch.equal(leaf.cpu(), other)


@GPU
def test_staging_batch_for_a_gpu_is_pinned() -> None:
    buffer = in_memory()
    for _ in range(3):
        buffer.sample(16, device="cuda")
    for stage in stages_of(buffer):
        assert stage["rewards"].is_pinned()


@GPU
def test_a_copy_to_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    really = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        flags.append((non_blocking, source.is_pinned()))
        return really(self, source, non_blocking)

    buffer = in_memory()
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    buffer.sample(16, device="cuda")
    assert set(flags) == {(True, True)}


@pytest.mark.parametrize(
    "sampler",
    [
        Slices(4, pad=True),
        WithoutReplacement(drop_last=True),
        NStep(3, gamma=0.5, rows=Prioritized(alpha=0.5)),
        Stratified("model_weights_id", {"": 1.0}),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_copy_of_a_sampler_begins_anew(sampler: Sampler) -> None:
    with TrajectoryReplayBuffer(seed=3) as buffer, TrajectoryReplayBuffer(seed=3) as other:
        item = {"rewards": torch.arange(40.0).view(20, 2)}
        buffer.add_trajectories([item])
        other.add_trajectories([item])
        first = buffer.sample(8, sampler=sampler)["rewards"]
        copy = pickle.loads(pickle.dumps(sampler))
        assert torch.equal(other.sample(8, sampler=copy)["rewards"], first)
