"""One trajectory in any format, and live buffers that write each of them."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import torch

from mmbuf import ReplayReader, TrajectoryReplayBuffer, files, storage
from mmbuf.entry import Entry, Part
from mmbuf.errors import CorruptError
from mmbuf.schema import Column, Schema, measure

FORMATS = list(storage.FORMATS)


def fields_of(i: int) -> dict[str, Any]:
    """[6, 3]: a column to be mapped, bits, text, and flags of T + 1 steps; the row in `rewards`."""
    return {
        "rewards": torch.arange(18.0).reshape(6, 3, 1) + 100 * i,
        "dones": data.random_bits("bool", (7, 3, 1), i),
        "curr_obs": {
            "image": data.random_bits("uint8", (6, 3, 40, 33), i + 50),
            "hidden": data.random_bits("bfloat16", (6, 3, 5), i + 90),
            "task": [[f"task {i}", f"step {t}", ""] for t in range(6)],
        },
    }


def assert_rows_of(batch: dict[str, Any], added: dict[int, dict[str, Any]]) -> None:
    """Every row of the batch is, bit for bit, the row of what was added that `rewards` names."""
    for k, number in enumerate(batch["rewards"][:, 0].tolist()):
        i, row = divmod(int(number), 100)
        t, b = divmod(row, 3)
        fields = added[i]
        assert batch["dones"][k].equal(fields["dones"][t + 1, b])
        for key in ("image", "hidden"):
            got, expected = batch["curr_obs"][key][k], fields["curr_obs"][key][t, b]
            assert data.bits(got) == data.bits(expected)
        assert batch["curr_obs"]["task"][k] == fields["curr_obs"]["task"][t][b]


def new_buffer(path: Path, trajectory_format: str, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(
        seed=3, auto_save=True, auto_save_path=path, trajectory_format=trajectory_format, **options
    )


@pytest.mark.parametrize("trajectory_format", FORMATS)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_size": 1}, {"enable_cache": False}, {"sample_window_size": 2}],
    ids=["all cached", "one cached", "no cache", "window of two"],
)
def test_rows_are_right_before_and_after_they_are_written(
    tmp_path: Path, trajectory_format: str, options: dict[str, Any]
) -> None:
    added: dict[int, dict[str, Any]] = {}
    with new_buffer(tmp_path, trajectory_format, **options) as buffer:
        for i in range(5):
            added[i] = fields_of(i)
            buffer.add_trajectories([added[i]])
            assert_rows_of(buffer.sample(40), added)
            buffer.flush()
            assert_rows_of(buffer.sample(40), added)
        buffer.clear_cache()
        assert_rows_of(buffer.sample(40), added)
        for i in range(5):
            assert data.is_equal(buffer.get_trajectory(i).to_columns(), added[i])


@pytest.mark.parametrize("trajectory_format", FORMATS)
def test_a_store_is_continued_from_its_files(tmp_path: Path, trajectory_format: str) -> None:
    added = {i: fields_of(i) for i in range(3)}
    with new_buffer(tmp_path, trajectory_format) as buffer:
        buffer.add_trajectories([added[0], added[1]])
    with new_buffer(tmp_path, trajectory_format) as buffer:
        buffer.add_trajectories([added[2]])
        assert buffer.trajectory_ids == [0, 1, 2]
        assert_rows_of(buffer.sample(60), added)
    with ReplayReader(tmp_path) as reader:
        assert_rows_of(reader.sample(60), added)
        assert data.is_equal(reader.get_trajectory(1).to_columns(), added[1])


def test_a_store_may_hold_every_format(tmp_path: Path) -> None:
    added = {}
    for i, trajectory_format in enumerate(FORMATS):
        added[i] = fields_of(i)
        with new_buffer(tmp_path, trajectory_format) as buffer:
            buffer.add_trajectories([added[i]])
    with ReplayReader(tmp_path) as reader:
        assert_rows_of(reader.sample(100), added)
        for i in added:
            assert data.is_equal(reader.get_trajectory(i).to_columns(), added[i])


@pytest.mark.parametrize("trajectory_format", FORMATS)
def test_clear_leaves_no_file_of_a_trajectory(tmp_path: Path, trajectory_format: str) -> None:
    with new_buffer(tmp_path, trajectory_format) as buffer:
        buffer.add_trajectories([fields_of(0), fields_of(1)])
        buffer.flush(sync=True)
        assert sum(name.startswith("trajectory_") for name in os.listdir(tmp_path)) == 3
        buffer.clear()
        names = set(os.listdir(tmp_path))
    assert {name for name in names if name.startswith("trajectory_")} <= {"trajectory_index.json"}


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_native_formats_are_mapped_and_the_others_stay_in_memory(
    tmp_path: Path, trajectory_format: str
) -> None:
    with new_buffer(tmp_path, trajectory_format) as buffer:
        buffer.add_trajectories([fields_of(0)])
        buffer.flush()
        assert buffer.get_stats()["cache_maps"] == 1
    with new_buffer(tmp_path / "pt", "pt") as buffer:
        buffer.add_trajectories([fields_of(0)])
        buffer.flush()
        assert buffer.get_stats()["cache_maps"] == 0


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_a_copy_in_any_format_holds_the_same_rows(tmp_path: Path, source: str, target: str) -> None:
    payload = measure(fields_of(1))
    rows, texts = data.rows_and_texts(payload)
    schema = payload.schema
    entry = Entry("a" * 32, 4, payload.shape, 9, "weights", 5.0, file="a")
    entry = storage.write(str(tmp_path / "a"), entry, schema, rows, texts, source)
    copied = storage.copy(
        str(tmp_path / "a"), entry, schema, str(tmp_path / "b"), target, can_map=True
    )
    assert copied.format == target
    assert files.size_of(str(tmp_path / "b")) == copied.size_bytes
    leaves = storage.FORMATS[target].load(str(tmp_path / "b"), copied, schema, can_map=True)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, list):
            assert leaf == payload.texts(position)
        else:
            assert np.array_equal(leaf, rows[position])
    assert files.is_same(str(tmp_path / "a"), str(tmp_path / "b")) == (source == target)


@pytest.mark.parametrize("name", ["link", "directory"])
def test_a_copy_where_links_are_not_allowed_is_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "source"
    if name == "directory":
        source.mkdir()
        (source / "inner").write_bytes(b"abc" * 1000)
    else:
        source.write_bytes(b"abc" * 1000)
    target = tmp_path / "target"
    files.link_or_copy(str(source), str(target))
    copy = target / "inner" if name == "directory" else target
    assert copy.read_bytes() == b"abc" * 1000
    assert copy.stat().st_nlink == 1
    assert not files.is_same(str(source), str(target))


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trajectory_format: expected one of .*, got 'csv'"):
        TrajectoryReplayBuffer(trajectory_format="csv")


@pytest.mark.parametrize("source", ["arrow", "npy", "pt"])
def test_damage_is_not_converted(tmp_path: Path, source: str) -> None:
    with new_buffer(tmp_path / "live", source) as buffer:
        buffer.add_trajectories([fields_of(0)])
    (found,) = [p for p in (tmp_path / "live").iterdir() if p.suffix == f".{source}"]
    file = found / "curr_obs.image.npy" if found.is_dir() else found
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(tmp_path / "live")
        with pytest.raises(CorruptError):
            buffer.save_checkpoint(tmp_path / "saved", trajectory_format="pkl")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("rows", "is_right"),
    [
        *(((12, 12, 12), True), ((12, 15, 12), True), ((12, 24, 12), True), ((12, 18, 15), True)),
        *(
            ((15, 12, 12), True),
            ((17, 12, 12), False),
            ((11, 12, 12), False),
            ((12, 13, 12), False),
        ),
        *(((12, 9, 12), False), ((12, 21, 12), False), ((12, 12, 0), False), ((1, 1, 1), False)),
    ],
)
def test_parts_that_do_not_fit_to_steps_and_environments_are_damage(
    rows: tuple[int, ...], is_right: bool
) -> None:
    schema = Schema([Column((n,), "int8", ()) for n in ("actions", "dones", "prev_values")])
    parts = tuple(Part(4096 * i, n) for i, n in enumerate(rows))
    entry = Entry("0" * 32, 3, (4, 3), format="arrow", file="a", size_bytes=1 << 20, parts=parts)
    if is_right:
        storage.check_entries(schema, [(entry, "/store")])
        return
    with pytest.raises(CorruptError, match=r"^/store/a: column '\w+': expected ") as error:
        storage.check_entries(schema, [(entry, "/store")])
    assert error.value.path == "/store/a"


def test_equal_parts_are_looked_at_for_each_shape() -> None:
    schema = Schema([Column(("actions",), "int8", ())])
    parts = (Part(0, 12),)
    entry = Entry("0" * 32, 3, (4, 3), format="arrow", file="a", size_bytes=1 << 20, parts=parts)
    other = dataclasses.replace(entry, shape=(4, 4))
    with pytest.raises(CorruptError, match="column 'actions': expected T = 4 steps"):
        storage.check_entries(schema, [(entry, "/store"), (other, "/store")])
