"""Minari's data sets as others make them, and there and back without a loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
import torch
from data import is_equal, opened
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

from mmbuf import CorruptError, ReplayReader, SchemaError, cli, health
from mmbuf.analysis import Tables
from mmbuf.exchange.minari import from_minari, to_minari

BOX = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
DISCRETE = gymnasium.spaces.Discrete(5, start=2)


def data_set(
    path: Path,
    infos: list[dict[str, Any] | None],
    *,
    data_format: str = "hdf5",
    observations: gymnasium.Space[Any] = BOX,
    actions: gymnasium.Space[Any] = BOX,
    **metadata: Any,
) -> Path:
    """One episode of ``i + 2`` steps for each of ``infos``; values say their episode and step."""
    path.mkdir()
    storage = MinariStorage.new(path, observations, actions, data_format=data_format)
    buffers = []
    for i, info in enumerate(infos):
        steps = i + 2

        def rows_of(space: Any, count: int, i: int = i) -> Any:
            if isinstance(space, gymnasium.spaces.Tuple):
                return tuple(rows_of(inner, count) for inner in space)
            if isinstance(space, gymnasium.spaces.Discrete):
                return np.arange(count) % space.n + space.start
            rows = np.arange(count, dtype=np.float32)[:, None] / 100 + i / 10
            return rows.repeat(space.shape[0], 1)

        buffers.append(
            EpisodeBuffer(
                seed=40 + i,
                observations=rows_of(observations, steps + 1),
                actions=rows_of(actions, steps),
                rewards=np.arange(steps, dtype=np.float64),
                terminations=np.arange(steps) == steps - 1,
                truncations=np.zeros(steps, bool),
                infos=info,
            )
        )
    storage.update_episodes(buffers)
    storage.update_metadata(
        {"dataset_id": "test-v0", "minari_version": minari.__version__, **metadata}
    )
    return path


def stored(path: Path) -> list[dict[str, Any]]:
    with ReplayReader(path) as reader:
        return [reader.get_trajectory(i).to_columns() for i in reader.trajectory_ids]


def mistake(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    return str(failure.value.code)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_a_data_set_without_infos_is_imported(tmp_path: Path, data_format: str) -> None:
    data_set(tmp_path / "data", [None, None], data_format=data_format)
    made = from_minari(tmp_path / "data", tmp_path / "store")
    assert (made.num_trajectories, made.num_rows, made.left_out) == (2, 5, {})
    for i, found in enumerate(stored(tmp_path / "store")):
        assert set(found) == {
            *("curr_obs", "next_obs", "actions", "rewards", "terminations", "truncations"),
            *("dones", "episode"),
        }
        rows = (np.arange(i + 3, dtype=np.float32) / 100 + np.float32(i / 10))[:, None, None]
        assert np.allclose(found["curr_obs"]["states"], rows[:-1].repeat(3, 2))
        assert np.allclose(found["next_obs"]["states"], rows[1:].repeat(3, 2))
        assert found["rewards"][:, 0].tolist() == list(range(i + 2))
    assert Tables(tmp_path / "store").episodes.to_arrow()["seed"].to_pylist() == [40, 41]


def test_infos_that_differ_between_episodes_are_left_out_and_said(tmp_path: Path) -> None:
    infos = [
        {
            "score": np.arange(steps + 1.0),
            "often": np.arange(steps) if steps < 4 else np.arange(steps).astype(np.float32),
            "goal": np.full((1, 2), steps),
            "pieces": np.arange(7),
            **({"rare": np.arange(steps)} if steps == 3 else {}),
        }
        for steps in (2, 3, 4)
    ]
    data_set(tmp_path / "data", infos)
    made = from_minari(tmp_path / "data", tmp_path / "store")
    assert made.left_out == {
        "infos.often": "it is not of one type and shape",
        "infos.pieces": (
            "expected a row for each step, one more, or one: episode 0 has 7 of it and 2 steps"
        ),
        "infos.rare": "the first has none",
    }
    for i, found in enumerate(stored(tmp_path / "store")):
        # Those of the reset are left out.
        assert found["infos"]["score"][:, 0].tolist() == list(range(1, i + 3))
        assert found["episode"]["infos"]["goal"][:, 0].tolist() == [[i + 2, i + 2]] * (i + 2)
    table = Tables(tmp_path / "store").episodes.to_arrow()
    assert table["infos.goal"].to_pylist() == [[2, 2], [3, 3], [4, 4]]
    made = from_minari(tmp_path / "data", tmp_path / "other", skip=["infos", "seed"])
    assert made.left_out == {}
    assert "infos" not in stored(tmp_path / "other")[0]
    assert "episode" not in stored(tmp_path / "other")[0]


def test_a_data_set_comes_back_with_its_spaces(tmp_path: Path) -> None:
    observations = gymnasium.spaces.Tuple([BOX, DISCRETE])
    told = {"algorithm_name": "SAC", "author": {"me"}}
    data_set(tmp_path / "data", [None, None], observations=observations, actions=DISCRETE, **told)
    from_minari(tmp_path / "data", tmp_path / "store")
    assert health.verify(tmp_path / "store") == []
    to_minari(Tables(tmp_path / "store"), tmp_path / "again")
    before = minari.MinariDataset(tmp_path / "data")
    found = minari.MinariDataset(tmp_path / "again" / "data")
    assert (found.observation_space, found.action_space) == (observations, DISCRETE)
    assert {name: found.storage.metadata[name] for name in told} == told
    for again, episode in zip(found, before, strict=True):
        for one, other in zip(again.observations, episode.observations, strict=True):
            assert np.array_equal(one, other)
        assert np.array_equal(again.actions, episode.actions)
        assert DISCRETE.contains(again.actions[0])
    metadata = list(found.storage.get_episode_metadata([0, 1]))
    assert [episode["seed"] for episode in metadata] == [40, 41]


def test_spaces_that_no_longer_fit_are_those_of_the_columns(tmp_path: Path) -> None:
    data_set(tmp_path / "data", [None], actions=DISCRETE)
    from_minari(tmp_path / "data", tmp_path / "store", skip=["observations"])
    note = json.loads((tmp_path / "store" / "minari.json").read_text())
    box = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    note["action_space"] = minari.serialization.serialize_space(box)
    (tmp_path / "store" / "minari.json").write_text(json.dumps(note))
    with pytest.raises(SchemaError, match="expected curr_obs, and next_obs"):
        to_minari(Tables(tmp_path / "store"), tmp_path / "again")
    from_minari(tmp_path / "data", tmp_path / "whole")
    (tmp_path / "whole" / "minari.json").write_text(json.dumps(note))
    to_minari(Tables(tmp_path / "whole"), tmp_path / "again")
    found = minari.MinariDataset(tmp_path / "again" / "data")
    assert found.observation_space == BOX
    assert (found.action_space.shape, found.action_space.dtype) == ((), np.int64)
    (tmp_path / "whole" / "minari.json").write_text("{")
    with pytest.raises(CorruptError, match=r"minari\.json: expected Minari's metadata, got"):
        to_minari(Tables(tmp_path / "whole"), tmp_path / "third")


def test_a_store_comes_back_from_minari_with_all_that_it_had(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = []
    with opened(tmp_path / "store") as buffer:
        for i in range(3):
            steps = 4 + i
            states = torch.rand(steps + 1, 1, 3, generator=generator)
            is_last = torch.arange(steps).reshape(steps, 1, 1) == steps - 1
            fields = {
                "actions": torch.randint(0, 5, (steps, 1), generator=generator),
                "rewards": torch.rand(steps, 1, 1, generator=generator),
                "terminations": is_last.to(torch.uint8) * (i % 2),
                "dones": is_last,
                "versions": torch.full((steps, 1, 1), float(i)),
                "curr_obs": {"states": states[:-1]},
                "next_obs": {"states": states[1:]},
                "success": is_last[..., 0] & (i == 1),
                "task": [[f"open {i}"]] * steps,
                "infos": {"score": torch.arange(steps).reshape(steps, 1)},
                "episode": {
                    "seed": torch.full((steps, 1), i),
                    "model": [[f"<model {i}>"]] * steps,
                    "start": {"pose": torch.full((steps, 1, 7), i, dtype=torch.float64)},
                    "id": torch.full((steps, 1), 100 + i),
                    "large": torch.full((steps, 1, 5000), i),
                },
            }
            expected.append(fields)
            buffer.add_trajectories(
                [fields | {"model_weights_id": f"v{i}", "max_episode_length": 9}]
            )
    before = stored(tmp_path / "store")
    to_minari(Tables(tmp_path / "store"), tmp_path / "out")
    from_minari(tmp_path / "out", tmp_path / "again")
    assert all(
        is_equal(found, other)
        for found, other in zip(stored(tmp_path / "again"), before, strict=True)
    )
    with ReplayReader(tmp_path / "again") as reader:
        found = [reader.get_trajectory(i) for i in reader.trajectory_ids]
    assert [(each.model_weights_id, each.max_episode_length) for each in found] == [
        *(("v0", 9), ("v1", 9), ("v2", 9))
    ]


def test_two_columns_that_would_be_one_info_are_refused(tmp_path: Path) -> None:
    rows = torch.zeros(2, 1)
    fields = {"curr_obs": {"states": rows}, "next_obs": {"states": rows}, "actions": rows}
    fields |= {"rewards": rows, "score": rows, "infos": {"score": rows}}
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([fields])
    with pytest.raises(SchemaError, match=r"column 'score': expected none, since 'infos\.score'"):
        to_minari(Tables(tmp_path / "store"), tmp_path / "out")


def _empty(path: Path) -> str:
    path.mkdir()
    return (
        f"mmbuf: {path}: expected a Minari data set, got none. Give the directory of one, such as "
        "~/.minari/datasets/D4RL/door/human-v2."
    )


def _store(path: Path) -> str:
    with opened(path) as buffer:
        buffer.add_trajectories([{"rewards": torch.zeros(2, 1)}])
    return (
        f"mmbuf: {path}: expected a Minari data set, got a directory whose metadata.json is "
        "another's."
    )


def _no_json(path: Path) -> str:
    path.mkdir()
    (path / "metadata.json").write_text("{")
    return (
        f"mmbuf: {path}: expected a Minari data set, got JSONDecodeError: Expecting property name "
        "enclosed in double quotes: line 1 column 2 (char 1)"
    )


def _no_data(path: Path) -> str:
    data_set(path, [None])
    (path / "main_data.hdf5").unlink()
    return (
        f"mmbuf: {path}: expected a Minari data set, got ValueError: No data found in data path "
        f"{path}"
    )


def _newer(path: Path) -> str:
    data_set(path, [None])
    metadata = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps(metadata | {"minari_version": "99.0"}))
    return (
        f"mmbuf: {path}: expected a Minari data set, got ValueError: The installed Minari version "
        f"{minari.__version__} does not support the dataset generated by Minari 99.0."
    )


def _cut(path: Path) -> str:
    data_set(path, [None])
    file = path / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[:1000])
    return f"mmbuf: {path}: expected a data set that can be read, got OSError: Unable to "


@pytest.mark.parametrize("make", [_empty, _store, _no_json, _no_data, _newer, _cut])
def test_what_is_no_data_set_of_minari_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    expected = make(tmp_path / "data")
    found = mistake(
        monkeypatch, "import", tmp_path / "data", tmp_path / "store", "--from", "minari"
    )
    assert "\n" not in found
    assert found.startswith(expected)
    assert not (tmp_path / "store").exists()
