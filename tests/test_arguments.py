"""What callers hand over: made plain, or refused at the door by the argument's name."""

from __future__ import annotations

import asyncio
import enum
import json
import pathlib
import pickle
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import is_equal, opened, trajectory

from mmbuf import (
    Channel,
    PreloadReplayBufferDataset,
    ReplayBufferDataset,
    ReplayReader,
    SchemaError,
    Trajectory,
    TrajectoryCollector,
    TrajectoryReplayBuffer,
    arguments,
    health,
    storage,
    vm,
)
from mmbuf.analysis import Tables
from mmbuf.sampling import FreshVersions, NStep, Prioritized, Recent, Slices, Stratified
from mmbuf.trajectory import fields_of
from mmbuf.transfer import merge, split


class Number(enum.IntEnum):
    TWO = 2


class Word(str, enum.Enum):
    """As the `enum.StrEnum` of later Pythons, but ``str(Word.ARROW)`` is its name."""

    ARROW = "arrow"


TWO = [
    *(2, np.int64(2), np.uint8(2), np.array(2), torch.tensor(2), torch.tensor(2, dtype=torch.int8)),
    Number.TWO,
]
NO_INTS = [
    *(True, np.True_, torch.tensor(True), 2.0, np.float64(2), torch.tensor(2.0), "2", np.str_("2")),
    *(b"2", 2j, np.array([2]), torch.tensor([2]), [2], (2,), {}, {2}, ..., uuid.UUID(int=2)),
    *(float("nan"), np.timedelta64(2, "s"), np.array("2"), torch.empty((), device="meta"), len),
]
TEXT = ["arrow", np.str_("arrow"), Word.ARROW]
NO_TEXT = [None, b"arrow", 2, 2.0, True, uuid.UUID(int=2), ["arrow"], {"arrow": 1}, ..., str]


# -- each kind of argument -------------------------------------------------------------------------


@pytest.mark.parametrize("given", TWO, ids=repr)
def test_a_number_of_any_integer_kind_is_an_int(given: Any) -> None:
    for found in (arguments.whole("n", given), arguments.whole_or_none("n", given)):
        assert (type(found), found) == (int, 2)
    assert arguments.whole_or_none("n", None) is None


@pytest.mark.parametrize("given", NO_INTS, ids=arguments.told)
def test_what_is_no_integer_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^n: expected an int, got "):
        arguments.whole("n", given)
    with pytest.raises(TypeError, match=r"^n: expected None or an int, got "):
        arguments.whole_or_none("n", given)


def test_numbers_out_of_range_are_told() -> None:
    for given, message in (
        (-1, "n: expected at least 0, got -1."),
        (1 << 63, "n: expected less than 9223372036854775808, got 9223372036854775808."),
        (10**5000, "n: expected less than 9223372036854775808, got a long int."),
        (-(10**5000), "n: expected at least 0, got a long int."),
    ):
        with pytest.raises(ValueError, match=r"^n: ") as error:
            arguments.whole("n", given)
        assert str(error.value) == message
    assert arguments.whole("n", (1 << 63) - 1) == (1 << 63) - 1
    assert arguments.whole("n", -5, None) == -5


@pytest.mark.parametrize(
    "given", [*TWO, 2.0, np.float16(2), np.longdouble(2), torch.tensor(2, dtype=torch.bfloat16)]
)
def test_a_number_of_any_real_kind_is_a_float(given: Any) -> None:
    found = arguments.number("x", given)
    assert (type(found), found) == (float, 2.0)


@pytest.mark.parametrize("given", [None, True, np.True_, "2", b"2", 2j, np.complex64(2), [2.0]])
def test_what_is_no_real_number_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: expected a number, got "):
        arguments.number("x", given)


def test_a_number_beyond_floats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^x: expected a number, got a long int\.$"):
        arguments.number("x", 10**400)


def test_seconds_are_what_the_system_can_wait() -> None:
    assert arguments.seconds("t", None) is None
    assert arguments.seconds("t", np.float32(0.5)) == 0.5
    for given in (float("inf"), 1e308, 1 << 62):
        assert arguments.seconds("t", given) == 9223372036.0
    with pytest.raises(ValueError, match=r"^t: expected None or a number of seconds, got nan\.$"):
        arguments.seconds("t", float("nan"))


@pytest.mark.parametrize("given", TEXT, ids=repr)
def test_text_of_a_subclass_is_a_str(given: Any) -> None:
    found = arguments.text("t", given)
    assert (type(found), found) == (str, "arrow")


@pytest.mark.parametrize("given", NO_TEXT, ids=repr)
def test_what_is_no_text_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^t: expected a str, got "):
        arguments.text("t", given)


def test_paths_of_every_kind_are_strs() -> None:
    for given in ("a/b", np.str_("a/b"), b"a/b", pathlib.PurePosixPath("a/b")):
        found = arguments.path("p", given)
        assert (type(found), found) == (str, "a/b")
        assert arguments.paths("p", given) == (["a/b"], False)
        assert arguments.paths("p", [given, "c"]) == (["a/b", "c"], True)
    for wrong in (None, 5, True, ["a"], {"a": 1}):
        with pytest.raises(TypeError, match=r"^p: expected a path, got "):
            arguments.path("p", wrong)
    for empty in ("", b"", np.str_("")):
        with pytest.raises(ValueError, match=r"^p: expected a path, got an empty one\.$"):
            arguments.path("p", empty)
        with pytest.raises(ValueError, match=r"^p: expected a path, got an empty one\.$"):
            arguments.paths("p", ["a", empty])
    assert arguments.path("p", pathlib.Path("")) == "."
    for none in (None, 5, {"a": 1}, [None], [5]):
        with pytest.raises(TypeError, match=r"^p: expected a path"):
            arguments.paths("p", none)
    with pytest.raises(ValueError, match=r"^p: expected at least one path, got none\.$"):
        arguments.paths("p", [])


def test_messages_stay_short_whatever_came() -> None:
    assert arguments.told("x" * 1000) == "a long str"
    assert arguments.told([1] * 1000) == "a long list"
    assert arguments.told(torch.zeros(100)) == "Tensor"
    assert arguments.told(Word.ARROW) == "Word"
    assert arguments.told("\x1b[2J") == r"'\x1b[2J'"


# -- seeds -----------------------------------------------------------------------------------------

SEEDS = [
    *(
        None,
        0,
        5,
        2**63,
        2**200,
        np.int64(5),
        np.uint32(7),
        torch.tensor(3),
        Number.TWO,
        [1, 2],
        [],
    ),
    *((1, np.int64(2)), range(3), np.array([1, 2]), torch.tensor([1, 2])),
    np.random.SeedSequence(3).generate_state(4),
]
NO_SEEDS = [
    *(True, np.True_, -1, np.int64(-1), "a", b"ab", bytearray(b"ab"), 1.5, float("nan"), [1, None]),
    *([True], [[1]], {1: 2}, {1}, 1 << 4096, 10**5000, np.array([1.5]), np.array([[1]])),
    *(torch.tensor(True), torch.tensor(1.5), np.random.SeedSequence(3), [-1], ...),
]


@pytest.mark.parametrize("seed", SEEDS, ids=arguments.told)
def test_a_seed_of_any_integer_kind_is_saved_and_drawn_by(tmp_path: Path, seed: Any) -> None:
    path = tmp_path / "store"
    with opened(path, seed=seed) as buffer:
        buffer.add_trajectories([trajectory(0)])
        buffer.flush()
        buffer.save_checkpoint(tmp_path / "checkpoint")
        expected = buffer.sample(20)
    assert json.loads((path / "metadata.json").read_text())["seed"] == buffer.seed
    with TrajectoryReplayBuffer() as resumed:
        resumed.load_checkpoint(tmp_path / "checkpoint")
        assert is_equal(resumed.sample(20), expected)
    with ReplayReader(path, seed=seed) as reader, pickle.loads(pickle.dumps(reader)) as other:
        assert len(other.sample(3)["rewards"]) == len(reader.sample(3)["rewards"]) == 3


@pytest.mark.parametrize("seed", NO_SEEDS, ids=arguments.told)
def test_what_is_no_seed_is_refused_before_anything_is_made(tmp_path: Path, seed: Any) -> None:
    for door in (partial(opened, tmp_path / "store"), partial(ReplayReader, tmp_path)):
        with pytest.raises((TypeError, ValueError), match=r"^seed: expected "):
            door(seed=seed)
    assert list(tmp_path.iterdir()) == []


def test_seeds_that_are_equal_draw_alike() -> None:
    def batch(seed: Any) -> Any:
        with TrajectoryReplayBuffer(seed=seed) as buffer:
            buffer.add_trajectories([trajectory(0)])
            return buffer.sample(50)

    for some in ([5, np.int64(5), torch.tensor(5)], [[1, 2], (1, 2), np.array([1, 2])]):
        batches = [batch(seed) for seed in some]
        assert all(is_equal(batches[0], other) for other in batches)


# -- every public door -----------------------------------------------------------------------------


@pytest.fixture
def buffer() -> Any:
    with TrajectoryReplayBuffer() as made:
        made.add_trajectories([trajectory(i) for i in range(3)])
        yield made


def constructed(**options: Any) -> None:
    TrajectoryReplayBuffer(**options).close()


def wait(maxsize: int, **options: Any) -> None:
    with Channel(maxsize) as channel:
        channel.put(1)
        channel.get(**options)


INTS: dict[str, Callable[[TrajectoryReplayBuffer, Path, Any], object]] = {
    "num_chunks": lambda b, p, v: b.sample(v),
    "num_chunks of a reader": lambda b, p, v: ReplayReader(p).sample(v),
    "num_chunks of arrays": lambda b, p, v: b.sample(v, as_numpy=True),
    "num_chunks on a device": lambda b, p, v: b.sample(v, device="cpu"),
    "min_size": lambda b, p, v: b.is_ready(v),
    "min_size awaited": lambda b, p, v: asyncio.run(b.is_ready_async(v)),
    "min_size of a reader": lambda b, p, v: ReplayReader(p).is_ready(v),
    "min_size waited for": lambda b, p, v: ReplayReader(p).wait_for(v, timeout_s=0),
    "cache_size": lambda b, p, v: constructed(cache_size=v),
    "sample_window_size": lambda b, p, v: constructed(sample_window_size=v),
    "max_pending_bytes": lambda b, p, v: constructed(max_pending_bytes=v),
    "max_disk_bytes": lambda b, p, v: constructed(max_disk_bytes=v),
    "cache_size of a reader": lambda b, p, v: ReplayReader(p, cache_size=v),
    "sample_window_size of a reader": lambda b, p, v: ReplayReader(p, sample_window_size=v),
    "shard": lambda b, p, v: ReplayReader(p, shard=(v, 3)),
    "shard of": lambda b, p, v: ReplayReader(p, shard=(0, v)),
    "local_rank": lambda b, p, v: b.load_checkpoint(p, True, v, 3),
    "world_size": lambda b, p, v: b.load_checkpoint(p, True, 0, v),
    "maxsize": lambda b, p, v: wait(v),
    "batch_size": lambda b, p, v: ReplayBufferDataset(b, None, v, 0, 0),
    "min_replay_buffer_size": lambda b, p, v: ReplayBufferDataset(b, None, 1, v, 0),
    "min_demo_buffer_size": lambda b, p, v: ReplayBufferDataset(b, b, 1, 0, v),
    "prefetch_size": lambda b, p, v: PreloadReplayBufferDataset(b, None, 1, 0, 0, v),
    "length": lambda b, p, v: Slices(v),
    "n": lambda b, p, v: NStep(v, 0.5),
    "sizes": lambda b, p, v: Trajectory(rewards=torch.ones(2, 4)).split(v),
    "sizes of each": lambda b, p, v: Trajectory(rewards=torch.ones(2, 4)).split([v, 2]),
    "first": lambda b, p, v: split(p, p.with_name("split"), first=v),
    "num_shards": lambda b, p, v: split(p, p.with_name("split"), num_shards=v),
    "num_threads": lambda b, p, v: health.verify(p, num_threads=v),
}
FLOATS: dict[str, Callable[[TrajectoryReplayBuffer, Path, Any], object]] = {
    "timeout_s": lambda b, p, v: ReplayReader(p).wait_for(1, v),
    "timeout_s of get": lambda b, p, v: wait(1, timeout_s=v),
    "timeout_s of put": lambda b, p, v: Channel(1).put(1, v),
    "timeout_s of a dataset": lambda b, p, v: ReplayBufferDataset(b, None, 1, 0, 0, timeout_s=v),
    "demo_fraction": lambda b, p, v: ReplayBufferDataset(b, None, 1, 0, 0, demo_fraction=v),
    "gamma": lambda b, p, v: NStep(1, v),
    "alpha": lambda b, p, v: Prioritized(alpha=v),
    "beta": lambda b, p, v: Prioritized(beta=v),
    "eps": lambda b, p, v: Prioritized(eps=v),
    "half_life": lambda b, p, v: Recent(v),
    "max_lag": lambda b, p, v: FreshVersions(v),
    "quotas": lambda b, p, v: Stratified("model_weights_id", {"": v}),
}
TEXTS: dict[str, Callable[[TrajectoryReplayBuffer, Path, Any], object]] = {
    "trajectory_format": lambda b, p, v: constructed(trajectory_format=v),
    "trajectory_format of a checkpoint": lambda b, p, v: b.save_checkpoint(p.with_name("s"), v),
    "by": lambda b, p, v: Stratified(v, {"": 1}),
}
PATHS: dict[str, Callable[[TrajectoryReplayBuffer, Path, Any], object]] = {
    "auto_save_path": lambda b, p, v: constructed(auto_save=True, auto_save_path=v),
    "save_path": lambda b, p, v: b.save_checkpoint(v),
    "load_path": lambda b, p, v: b.load_checkpoint(v),
    "path": lambda b, p, v: ReplayReader(v),
    "path of tables": lambda b, p, v: Tables(v),
    "path to verify": lambda b, p, v: health.verify(v),
    "source": lambda b, p, v: split(v, p.with_name("split"), first=1),
    "sources": lambda b, p, v: merge([v], p.with_name("merged")),
    "target": lambda b, p, v: split(p, v, first=1),
}


def checkpoint(buffer: TrajectoryReplayBuffer, path: Path) -> Path:
    buffer.save_checkpoint(path)
    return path


def refuses(
    door: Callable[[TrajectoryReplayBuffer, Path, Any], object],
    name: str,
    buffer: TrajectoryReplayBuffer,
    path: Path,
    value: Any,
) -> None:
    with pytest.raises(TypeError) as error:
        door(buffer, path, value)
    assert str(error.value).startswith(f"{name.split()[0]}: expected "), error.value


@pytest.mark.parametrize("name", INTS)
def test_a_count_is_an_int_of_any_kind_and_nothing_else(
    buffer: TrajectoryReplayBuffer, tmp_path: Path, name: str
) -> None:
    path = checkpoint(buffer, tmp_path / "checkpoint")
    door = INTS[name]
    for number, value in enumerate(TWO):
        door(buffer, path, value)
        if name in ("first", "num_shards"):
            (tmp_path / "split").rename(tmp_path / f"made {number}")
    for value in NO_INTS:
        if name != "sizes" or not hasattr(value, "__len__"):  # else sizes of each part
            refuses(door, name, buffer, path, value)
    assert len(buffer.sample(3)["rewards"]) == 3


@pytest.mark.parametrize("name", FLOATS)
def test_a_measure_is_a_number_of_any_kind_and_nothing_else(
    buffer: TrajectoryReplayBuffer, tmp_path: Path, name: str
) -> None:
    path = checkpoint(buffer, tmp_path / "checkpoint")
    for one in (1, 1.0, np.float32(1), np.int8(1), torch.tensor(1.0), np.array(1)):
        FLOATS[name](buffer, path, one)
    for value in ("1", b"1", True, np.True_, 1j, [1.0], np.array([1.0]), object()):
        refuses(FLOATS[name], name, buffer, path, value)
    for value in (float("nan"), 10**400):
        with pytest.raises(ValueError, match=f"^{name.split()[0]}: expected"):
            FLOATS[name](buffer, path, value)


@pytest.mark.parametrize("name", TEXTS)
def test_a_name_is_a_str_of_any_kind_and_nothing_else(
    buffer: TrajectoryReplayBuffer, tmp_path: Path, name: str
) -> None:
    path = checkpoint(buffer, tmp_path / "checkpoint")
    for value in TEXT:
        TEXTS[name](buffer, path, value)
    for value in NO_TEXT:
        if not (value is None and "checkpoint" in name) and not callable(value):
            refuses(TEXTS[name], name, buffer, path, value)


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_of_any_kind_and_nothing_else(
    buffer: TrajectoryReplayBuffer, tmp_path: Path, name: str
) -> None:
    path = checkpoint(buffer, tmp_path / "checkpoint")
    makes = name in ("auto_save_path", "save_path", "target")
    for number, kind in enumerate((Path, str, np.str_, str.encode)):
        place = str(tmp_path / f"new {number}") if makes else str(path)
        PATHS[name](buffer, path, kind(place))
        if name in ("source", "sources"):
            (tmp_path / ("split" if name == "source" else "merged")).rename(
                tmp_path / f"made {number}"
            )
    for value in (None, 5, True, 2.0, {"a": 1}):
        refuses(PATHS[name], name, buffer, path, value)
    with pytest.raises(TypeError, match=r"^shard: expected \(rank, world_size\), got "):
        ReplayReader(path, shard=5)  # type: ignore[arg-type]


def test_a_refused_argument_leaves_no_store_behind(tmp_path: Path) -> None:
    for options in ({"cache_size": "1"}, {"sample_window_size": None}, {"max_disk_bytes": 1.5}):
        with pytest.raises(TypeError):
            opened(tmp_path / "store", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_a_buffer_is_made_with_is_plain(tmp_path: Path) -> None:
    with opened(
        np.str_(tmp_path),  # type: ignore[arg-type]
        seed=np.int64(5),
        sample_window_size=np.uint8(3),
        trajectory_format=np.str_("npy"),
    ) as buffer:
        for value, kind in (
            (buffer.seed, int),
            (buffer.sample_window_size, int),
            (buffer.trajectory_format, str),
            (buffer.auto_save_path, str),
        ):
            assert type(value) is kind


def test_a_sampler_that_is_none_is_a_type_error(buffer: TrajectoryReplayBuffer) -> None:
    for value in ("uniform", 5, Slices, {}):
        with pytest.raises(TypeError, match=r"^sampler: expected a Sampler, got "):
            buffer.sample(3, sampler=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^rows: expected None or a Sampler, got "):
            NStep(2, 0.9, rows=value)  # type: ignore[arg-type]


def test_quotas_of_numpy_are_numbers_of_rows(buffer: TrajectoryReplayBuffer) -> None:
    sampler = Stratified("model_weights_id", {"": np.int64(4)})
    assert sampler.quotas == {"": 4}
    assert len(buffer.sample(4, sampler=sampler)["rewards"]) == 4


@pytest.mark.parametrize(
    "door", [lambda b, n: b.sample(n), lambda b, n: b.sample(4, sampler=Slices(n, pad=True))]
)
def test_a_batch_that_memory_cannot_hold_is_refused(
    buffer: TrajectoryReplayBuffer, door: Callable[[Any, int], Any]
) -> None:
    for number in (2**38, 10**12, 2**63 - 1):
        with pytest.raises(MemoryError, match=r"^sample: expected a batch that fits in the "):
            door(buffer, number)
    with pytest.raises(ValueError, match="expected less than 9223372036854775808"):
        door(buffer, 2**63)
    assert len(buffer.sample(3)["rewards"]) == 3


def test_small_batches_do_not_ask_for_the_memory(
    buffer: TrajectoryReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm, "free_bytes", lambda: 0)
    assert len(buffer.sample(100_000)["rewards"]) == 100_000
    monkeypatch.setattr(vm, "free_bytes", lambda: None)
    with pytest.raises(MemoryError):  # the system's own
        buffer.sample(2**50)


# -- trajectories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(storage.FORMATS))
def test_text_and_keys_of_numpy_are_stored_as_plain_ones(tmp_path: Path, form: str) -> None:
    names = np.array(["pick", "place"])
    key = np.str_("prompt")
    item = {
        np.str_("rewards"): torch.ones(3, 2),
        np.str_("forward_inputs"): {key: [list(names) for _ in range(3)], Word.ARROW: names[[0]]},
        np.str_("model_weights_id"): np.str_("w"),
        "max_episode_length": np.int64(7),
    }
    item["forward_inputs"][Word.ARROW] = torch.ones(3, 2)
    with opened(tmp_path / "store", trajectory_format=form) as buffer:
        buffer.add_trajectories([item])
        batches = [buffer.sample(4)]
        buffer.flush()
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with ReplayReader(tmp_path / "store") as reader, TrajectoryReplayBuffer() as loaded:
        loaded.load_checkpoint(tmp_path / "checkpoint")
        batches += [reader.sample(4), loaded.sample(4)]
        got = reader.get_trajectory(0)
    for batch in batches:
        assert {type(name) for name in (*batch, *batch["forward_inputs"])} == {str}
        assert list(batch["forward_inputs"]) == ["prompt", "arrow"]
        assert {type(string) for string in batch["forward_inputs"]["prompt"]} == {str}
    assert got.forward_inputs["prompt"] == [["pick", "place"]] * 3
    assert (type(got.model_weights_id), got.model_weights_id) == (str, "w")
    assert (type(got.max_episode_length), got.max_episode_length) == (int, 7)
    if form == "pt":
        (file,) = (tmp_path / "store").glob("*.pt")
        torch.load(file, weights_only=True)


def test_what_is_collected_is_plain() -> None:
    collector = TrajectoryCollector(np.int64(5), np.str_("w"))  # type: ignore[arg-type]
    collector.append(curr_obs={np.str_("task"): [np.str_("a")]}, rewards=torch.ones(1))
    found = collector.to_trajectory()
    assert [type(value) for value in (found.max_episode_length, found.model_weights_id)] == [
        int,
        str,
    ]
    ((key, text),) = found.curr_obs.items()
    assert {type(key), type(text[0][0])} == {str}


@pytest.mark.parametrize("value", [7, b"w", uuid.UUID(int=3), ["w"], 2.5, torch.tensor(1)])
def test_a_weights_id_of_another_kind_is_refused_at_once(
    buffer: TrajectoryReplayBuffer, value: Any
) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: buffer.add_trajectories([{**trajectory(1), "model_weights_id": value}]),
        lambda: Trajectory.from_columns(trajectory(1), 0, value),
        lambda: TrajectoryCollector(0, value),
    ]
    for door in doors:
        with pytest.raises(SchemaError, match=r"^model_weights_id: expected a str, got "):
            door()
    assert len(buffer) == 3


@pytest.mark.parametrize("value", [-1, 2.5, True, "7", 1 << 62, 10**5000, [7]], ids=arguments.told)
def test_an_episode_length_of_another_kind_is_refused_at_once(
    buffer: TrajectoryReplayBuffer, value: Any
) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: buffer.add_trajectories([{**trajectory(1), "max_episode_length": value}]),
        lambda: TrajectoryCollector(value),
    ]
    for door in doors:
        with pytest.raises(SchemaError, match=r"^max_episode_length: expected an int of 0 or more"):
            door()
    assert len(buffer) == 3


def test_keys_that_become_equal_are_refused() -> None:
    class Own(str):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = str.__hash__

    with pytest.raises(SchemaError, match=r"^key 'a': expected each key once, got one twice\.$"):
        fields_of({"x": {Own("a"): torch.ones(1, 1), "a": torch.ones(1, 1)}})


@pytest.mark.parametrize("context", [5, object(), ["spawn"], np.int64(1)])
def test_a_context_that_is_none_is_a_type_error(context: Any) -> None:
    with pytest.raises(TypeError, match=r"^context: expected None, a name or a context, got "):
        Channel(1, context)


def test_a_channel_between_processes_waits_for_any_time() -> None:
    with Channel(1, "spawn") as channel:
        for timeout_s in (1e308, float("inf"), 1e7):
            channel.put(1, timeout_s)
            assert channel.get(timeout_s) == 1
