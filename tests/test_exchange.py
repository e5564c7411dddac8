"""Other tools' files: they hold what the store held, and other tools open them."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import duckdb
import gymnasium
import h5py
import minari
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from data import every_dtype, is_equal, opened, trajectory
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from typer.testing import CliRunner

from mmbuf import CorruptError, ReplayReader, SchemaError, cli, storage
from mmbuf.analysis import Table, Tables
from mmbuf.exchange import target
from mmbuf.exchange.hf import to_hf
from mmbuf.exchange.minari import from_minari, to_minari
from mmbuf.exchange.parquet import to_parquet
from mmbuf.exchange.target import Exported

FIXTURES = Path(__file__).parent / "fixtures"
TABLES = ("steps", "episodes", "trajectories")
IMAGE = "curr_obs.image"
by_format = pytest.mark.parametrize("trajectory_format", list(storage.FORMATS))
by_kind = pytest.mark.parametrize("kind", ["parquet", "hf"])


def store(path: Path, count: int = 3, trajectory_format: str = "arrow") -> Path:
    with opened(path, trajectory_format=trajectory_format, sample_window_size=0) as buffer:
        buffer.add_trajectories([trajectory(i, i + 2, image=(5, 5, 3)) for i in range(count)])
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def mistake(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """The one message of a command that fails."""
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    return str(failure.value.code)


def rows_of(table: Table, *wide: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_arrow([*table.columns, *wide]).to_pylist()
    return rows


@pytest.fixture
def hf() -> Iterator[Any]:
    """Hugging Face's package; what it maps goes with the garbage."""
    yield datasets
    gc.collect()


@by_format
def test_parquet_holds_every_row_of_every_table(tmp_path: Path, trajectory_format: str) -> None:
    path, out = store(tmp_path / "store", 3, trajectory_format), tmp_path / "out"
    ran = run("export", path, out, "--to", "parquet", "--wide", IMAGE, "--json")
    # In each step of environment 0 an episode ends, in the two others none.
    assert json.loads(ran.stdout) == {"num_trajectories": 3, "num_episodes": 15, "num_rows": 27}
    assert sorted(file.name for file in out.iterdir()) == [
        *("episodes.parquet", "steps.parquet", "trajectories.parquet")
    ]
    tables = Tables(path)
    for name in TABLES:
        wide = [IMAGE] if name == "steps" else []
        rows = rows_of(getattr(tables, name), *wide)
        assert pq.read_table(out / f"{name}.parquet").to_pylist() == rows


def test_parquet_is_read_by_others(tmp_path: Path) -> None:
    path, out = store(tmp_path / "store"), tmp_path / "out"
    to_parquet(Tables(path), out)
    frame = pl.read_parquet(out / "steps.parquet")
    assert IMAGE not in frame.columns
    assert (
        frame["curr_obs.task"].to_list()
        == Tables(path).steps.to_polars()["curr_obs.task"].cast(pl.String).to_list()
    )
    with duckdb.connect() as connection:
        connection.execute("set python_enable_replacements = false")
        query = f"select env, count(*) from '{out}/episodes.parquet' group by env order by env"
        assert connection.sql(query).fetchall() == [(0, 9), (1, 3), (2, 3)]


@by_kind
def test_every_dtype_is_kept_as_the_tables_have_it(tmp_path: Path, kind: str, hf: Any) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([every_dtype()])
    tables, out = Tables(tmp_path / "store"), tmp_path / "out"
    if kind == "parquet":
        to_parquet(tables, out)
        found = pq.read_table(out / "steps.parquet")
    else:
        to_hf(tables, out)
        found = hf.load_from_disk(str(out))["steps"].data.table
    expected = tables.steps.to_arrow()
    assert found.schema.names == expected.schema.names
    for name in expected.schema.names:
        assert repr(found[name].to_pylist()) == repr(expected[name].to_pylist()), name  # NaN too


def test_trajectories_share_row_groups_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", 9)
    monkeypatch.setattr("mmbuf.analysis.tables._BLOCK", 1)
    monkeypatch.setattr(target, "_BLOCK_ROWS", 40)
    to_parquet(Tables(path), tmp_path / "rows")
    file = pq.ParquetFile(tmp_path / "rows" / "steps.parquet")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    file.close()
    # Of trajectories of 6, 9, ..., 30 rows.
    assert groups == [6 + 9 + 12 + 15, 18 + 21 + 24, 27 + 30]
    monkeypatch.setattr(target, "_BLOCK_BYTES", 1)
    to_parquet(Tables(path), tmp_path / "bytes")
    with pq.ParquetFile(tmp_path / "bytes" / "steps.parquet") as file:
        assert file.num_row_groups == 9


def test_a_hugging_face_data_set_holds_every_row_of_every_table(tmp_path: Path, hf: Any) -> None:
    path, out = store(tmp_path / "store"), tmp_path / "out"
    ran = run("export", path, out, "--to", "hf", "--wide", IMAGE)
    assert ran.stdout.replace("\n", "") == f"{out}: 3 trajectories, 15 episodes, 27 rows"
    found = hf.load_from_disk(str(out))
    tables = Tables(path)
    assert list(found) == list(TABLES)
    assert {file.name for file in out.iterdir()} == {*TABLES, "dataset_dict.json"}
    for name in TABLES:
        wide = [IMAGE] if name == "steps" else []
        assert found[name].to_list() == rows_of(getattr(tables, name), *wide)
    torched = found["steps"].with_format("torch", columns=["rewards", IMAGE])[3]
    assert (torched["rewards"].item(), torched[IMAGE].tolist()) == (1.0, [1] * 75)


@by_kind
def test_patterns_and_directories_of_rlinf_are_exported(tmp_path: Path, kind: str, hf: Any) -> None:
    for rank in range(2):
        store(tmp_path / f"rank_{rank}", 2)
    for path, count in ((tmp_path / "rank_*", 4), (FIXTURES / "rlinf_pt", 4)):
        out = tmp_path / f"of {path.name.strip('*')}"
        assert run("export", path, out, "--to", kind).exit_code == 0
        exported = (
            pq.read_table(out / "trajectories.parquet").num_rows
            if kind == "parquet"
            else len(hf.load_from_disk(str(out))["trajectories"])
        )
        assert exported == count


def test_an_empty_store_has_empty_tables_in_parquet_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf: Any
) -> None:
    path, out = store(tmp_path / "store", 0), tmp_path / "out"
    found = mistake(monkeypatch, "export", path, out, "--to", "hf")
    assert found == f"mmbuf: {path}: expected a trajectory, got an empty store."
    ran = run("export", path, out, "--to", "parquet", "--json")
    assert json.loads(ran.stdout) == {"num_trajectories": 0, "num_episodes": 0, "num_rows": 0}
    assert [pq.read_table(out / f"{name}.parquet").num_rows for name in TABLES] == [0, 0, 0]


@by_kind
def test_a_damaged_store_leaves_nothing_at_the_target(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store")
    file = next(path.glob("trajectory_2_*"))
    file.write_bytes(file.read_bytes()[:-1])
    found = mistake(monkeypatch, "export", path, tmp_path / "out", "--to", kind)
    assert found.startswith(f"mmbuf: {file}: expected")
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["OUT", "--to", "csv"], "--to: expected one of parquet, hf, minari, got 'csv'"),
        (["OUT", "--to", "parquet", "--wide", "rewards"], r"wide columns \(curr_obs.image\)"),
        (["OUT", "--to", "hf", "--wide", "nope"], "wide: expected one of .*, got 'nope'"),
        (["STORE", "--to", "parquet"], "store: expected a new path or an empty directory"),
        (["STORE/metadata.json", "--to", "hf"], "expected a new path or an empty directory"),
    ],
)
def test_a_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    path = store(tmp_path / "store")
    places = {"STORE": str(path), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        options = [option.replace(name, place) for option in options]
    found = mistake(monkeypatch, "export", path, *options)
    assert found.startswith("mmbuf: ")
    assert re.search(message, found), found
    assert not (tmp_path / "out").exists()


def test_columns_that_are_not_wide_are_refused(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store"))
    with pytest.raises(SchemaError, match=r"wide: expected one of the wide columns \(curr_obs"):
        to_parquet(tables, tmp_path / "out", wide=("rewards",))


def test_without_the_package_only_what_needs_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store")
    monkeypatch.setitem(sys.modules, "datasets", None)
    found = mistake(monkeypatch, "export", path, tmp_path / "hf", "--to", "hf")
    assert found == 'mmbuf: datasets is missing. Install it: pip install "mmbuf[exchange]"'
    assert run("export", path, tmp_path / "parquet", "--to", "parquet").exit_code == 0


def stored(path: Path) -> list[dict[str, Any]]:
    """The trajectories of a store as nested dicts."""
    with ReplayReader(path) as reader:
        return [reader.get_trajectory(i).to_columns() for i in reader.trajectory_ids]


def robomimic(path: Path) -> list[dict[str, Any]]:
    """Twelve episodes of ``i + 2`` steps, so that ``demo_10`` follows on ``demo_9``."""
    rng = np.random.default_rng(0)
    episodes = []
    with h5py.File(path, "w") as file:
        file.create_group("mask")["train"] = np.array([b"demo_0"])
        for i in range(12):
            steps = i + 2
            eyes = rng.integers(0, 255, (steps + 1, 4, 4, 3), np.uint8)
            joints = rng.random((steps + 1, 7))
            rest = {
                "actions": rng.random((steps, 7)).astype(">f8"),
                "rewards": rng.random(steps),
                "dones": np.arange(steps) == steps - 1,
                "states": rng.random((steps, 3), np.float32),
                "task": [f"é {i} {t}" for t in range(steps)],
            }
            group = file.create_group(f"data/demo_{i}")
            for name, rows in (("obs", slice(0, -1)), ("next_obs", slice(1, None))):
                group[f"{name}/eye"], group[f"{name}/arm/joints"] = eyes[rows], joints[rows]
            for name, values in rest.items():
                group[name] = values
            obs = [
                {"eye": eyes[rows], "arm": {"joints": joints[rows]}}
                for rows in (slice(0, -1), slice(1, None))
            ]
            episodes.append({"curr_obs": obs[0], "next_obs": obs[1], **rest})
    return episodes


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """That a trajectory ``[T, 1, ...]`` holds an episode's arrays and text, and nothing else."""
    assert set(found) == set(expected)
    for name, values in expected.items():
        if isinstance(values, dict):
            check_equal(found[name], values)
        elif isinstance(values, list):
            assert found[name] == [[text] for text in values]
        else:
            assert np.array_equal(found[name].numpy()[:, 0], values), name
            assert found[name].numpy().dtype == values.dtype.newbyteorder("="), name


def test_an_episode_of_robomimic_is_a_trajectory(tmp_path: Path) -> None:
    episodes, path = robomimic(tmp_path / "low_dim.hdf5"), tmp_path / "store"
    ran = run("import", tmp_path / "low_dim.hdf5", path, "--from", "hdf5", "--json")
    assert json.loads(ran.stdout) == {
        "num_trajectories": 12,
        "num_rows": sum(range(2, 14)),
        "left_out": {},
    }
    for found, episode in zip(stored(path), episodes, strict=True):
        check_equal(found, episode)


@pytest.mark.parametrize(("form", "name"), [("hdf5", "file"), ("minari", "data/main_data.hdf5")])
def test_a_pipe_is_refused_and_nobody_waits_for_it(tmp_path: Path, form: str, name: str) -> None:
    if form == "minari":
        minari_data(tmp_path / "data")
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    source = tmp_path / ("data" if form == "minari" else name)
    ran = run("import", source, tmp_path / "store", "--from", form)
    assert (ran.exit_code, isinstance(ran.exception, CorruptError)) == (1, True)
    assert str(ran.exception) == f"{tmp_path / name}: expected a file, got a pipe."
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("has_next", [False, True])
def test_d4rl_is_cut_where_episodes_end(tmp_path: Path, has_next: bool) -> None:
    numbers = np.arange(20, dtype=np.float32).reshape(10, 2)
    flat = {
        "observations": numbers,
        "actions": -numbers,
        "rewards": numbers[:, 0],
        "terminals": np.arange(10) == 3,
        "timeouts": np.arange(10) == 5,
        **({"next_observations": numbers + 1} if has_next else {}),
    }
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, values in flat.items():
            file[name] = values
        file["infos/qpos"] = numbers * 2
        file["metadata/algorithm"] = "sac"
    ran = run("import", tmp_path / "d4rl.hdf5", tmp_path / "store", "--from", "hdf5")
    told = f"{tmp_path / 'store'}: 3 trajectories, 10 rows"
    assert ran.stdout.replace("\n", "") == told
    cuts = (slice(0, 4), slice(4, 6), slice(6, 10))
    for found, rows in zip(stored(tmp_path / "store"), cuts, strict=True):
        terminations, truncations = flat["terminals"][rows], flat["timeouts"][rows]
        expected = {
            "curr_obs": {"states": numbers[rows]},
            "actions": -numbers[rows],
            "rewards": numbers[rows, 0],
            "terminations": terminations,
            "truncations": truncations,
            "dones": terminations | truncations,
            "infos": {"qpos": 2 * numbers[rows]},
        }
        if has_next:
            expected["next_obs"] = {"states": numbers[rows] + 1}
        check_equal(found, expected)
    ended_by = Tables(tmp_path / "store").episodes.to_arrow()["ended_by"].to_pylist()
    assert ended_by == ["termination", "truncation", "open"]


def minari_data(path: Path) -> list[dict[str, Any]]:
    """Three episodes of ``i + 2`` steps, with text and a last observation of their own."""
    boxes = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    space = gymnasium.spaces.Dict(
        {
            "mission": gymnasium.spaces.Text(20, charset="go é123"),
            "pair": gymnasium.spaces.Tuple([boxes, gymnasium.spaces.Discrete(9)]),
        }
    )
    path.mkdir()
    storage = MinariStorage.new(path, space, boxes, data_format="hdf5")
    rng = np.random.default_rng(0)
    expected, buffers = [], []
    for i in range(3):
        steps = i + 2
        missions = [f"go é {i}" for _ in range(steps + 1)]
        first, second = rng.random((steps + 1, 3), np.float32), rng.integers(0, 9, steps + 1)
        actions, rewards = rng.random((steps, 3), np.float32), rng.random(steps)
        is_last = np.arange(steps) == steps - 1
        terminations, truncations = is_last & (i < 2), is_last & (i == 2)
        infos = {"score": rng.random(steps + 1)}
        buffers.append(
            EpisodeBuffer(
                observations={"mission": missions, "pair": (first, second)},
                actions=actions,
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
                infos=infos,
            )
        )
        current, following = (
            {"mission": missions[rows], "pair": {"0": first[rows], "1": second[rows]}}
            for rows in (slice(0, -1), slice(1, None))
        )
        expected.append(
            {
                "curr_obs": current,
                "next_obs": following,
                "actions": actions,
                "rewards": rewards,
                "terminations": terminations,
                "truncations": truncations,
                "dones": is_last,
                "infos": {"score": infos["score"][1:]},
            }
        )
    storage.update_episodes(buffers)
    storage.update_metadata({"dataset_id": "test-v0", "minari_version": minari.__version__})
    return expected


def test_an_episode_of_minari_is_a_trajectory_with_its_last_observation(tmp_path: Path) -> None:
    expected = minari_data(tmp_path / "data")
    # The directory of a data set, and the one of its data.
    for source in (tmp_path, tmp_path / "data"):
        path = tmp_path / f"of {source.name}"
        ran = run("import", source, path, "--from", "minari", "--json")
        assert json.loads(ran.stdout) == {
            "num_trajectories": 3,
            "num_rows": 9,
            "left_out": {},
        }
        for found, episode in zip(stored(path), expected, strict=True):
            check_equal(found, episode)


def test_episodes_that_differ_leave_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robomimic(tmp_path / "file.hdf5")
    with h5py.File(tmp_path / "file.hdf5", "a") as file:
        del file["data/demo_10/rewards"]
    found = mistake(
        monkeypatch, "import", tmp_path / "file.hdf5", tmp_path / "store", "--from", "hdf5"
    )
    assert found == (
        f"mmbuf: {tmp_path}/file.hdf5: 'rewards': data/demo_10 has none. "
        "Leave it out: --skip rewards"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file.hdf5"]


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("none", "hdf5", "none: expected an HDF5 file or a directory of such, got none"),
        ("text", "hdf5", "text: expected an HDF5 file, got one of another kind"),
        ("other", "hdf5", r"other: expected data/demo_0 and so on \(robomimic, Isaac Lab\), "),
        ("none", "minari", "none: expected a Minari data set, got none"),
        ("other", "csv", "--from: expected one of hdf5, minari, got 'csv'"),
    ],
)
def test_what_cannot_be_imported_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str, message: str
) -> None:
    (tmp_path / "text").write_text("text")
    with h5py.File(tmp_path / "other", "w") as file:
        file["actions"] = np.zeros(3)
    found = mistake(monkeypatch, "import", tmp_path / source, tmp_path / "out", "--from", kind)
    assert found.startswith("mmbuf: ")
    assert re.search(message, found), found
    assert not (tmp_path / "out").exists()


def test_a_store_of_minari_s_episodes_gives_the_same_data_set_again(tmp_path: Path) -> None:
    minari_data(tmp_path / "data")
    from_minari(tmp_path / "data", tmp_path / "store")
    ran = run("export", tmp_path / "store", tmp_path / "again-v3", "--to", "minari", "--json")
    assert json.loads(ran.stdout) == {"num_trajectories": 3, "num_episodes": 3, "num_rows": 9}
    found = minari.MinariDataset(tmp_path / "again-v3" / "data")
    assert (found.spec.dataset_id, found.total_steps) == ("again-v3", 9)
    pairs = zip(found, minari.MinariDataset(tmp_path / "data"), strict=True)
    for again, before in pairs:
        assert again.observations["mission"] == before.observations["mission"]
        for i, values in enumerate(before.observations["pair"]):
            assert np.array_equal(again.observations["pair"][str(i)], values)
        for name in ("actions", "rewards", "terminations", "truncations"):
            assert np.array_equal(getattr(again, name), getattr(before, name)), name
        assert np.array_equal(again.infos["score"], before.infos["score"][1:])
    from_minari(tmp_path / "again-v3", tmp_path / "store again")
    pairs = zip(stored(tmp_path / "store again"), stored(tmp_path / "store"), strict=True)
    assert all(is_equal(again, before) for again, before in pairs)


def test_an_only_observation_called_states_has_no_name_in_minari(tmp_path: Path) -> None:
    states, last = torch.rand(3, 1, 2), torch.rand(1, 1, 2)
    following = torch.cat([states[1:], last])
    with opened(tmp_path / "store") as buffer:
        fields = {"actions": {"left": states, "right": states}, "rewards": states[..., 0]}
        obs = {"curr_obs": {"states": states}, "next_obs": {"states": following}}
        buffer.add_trajectories([obs | fields])
    to_minari(Tables(tmp_path / "store"), tmp_path / "out")
    (episode,) = minari.MinariDataset(tmp_path / "out" / "data")
    assert np.array_equal(episode.observations, torch.cat([states, last])[:, 0].numpy())
    assert set(episode.actions) == {"left", "right"}
    from_minari(tmp_path / "out", tmp_path / "again")
    (again,) = stored(tmp_path / "again")
    assert torch.equal(again["next_obs"]["states"], following)


def test_episodes_of_all_environments_are_minari_s_with_exact_last_observations(
    tmp_path: Path,
) -> None:
    states = torch.arange(16.0).reshape(4, 2, 2)
    images = torch.arange(4 * 2 * 75).reshape(4, 2, 5, 5, 3).to(torch.uint8)
    dones = torch.tensor([[0, 0], [1, 0], [0, 1], [0, 0]], dtype=torch.bool)
    fields = {
        "curr_obs": {"states": states, "image": images},
        "next_obs": {"states": states + 100, "image": images + 100},
        "actions": states.bfloat16(),
        "rewards": states.sum(-1, keepdim=True),
        "dones": dones,
        "versions": torch.arange(8).reshape(4, 2),
    }
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([fields])
    assert to_minari(Tables(tmp_path / "store"), tmp_path / "out") == Exported(1, 4, 8)
    found = list(minari.MinariDataset(tmp_path / "out" / "data"))
    assert [len(episode) for episode in found] == [2, 2, 3, 1]
    for episode, (env, rows) in zip(
        found, [(0, slice(0, 2)), (0, slice(2, 4)), (1, slice(0, 3)), (1, slice(3, 4))], strict=True
    ):
        for name, values in (("states", states), ("image", images)):
            expected = torch.cat([values[rows, env], values[rows, env][-1:] + 100])
            assert np.array_equal(episode.observations[name], expected.numpy())
        assert np.array_equal(episode.actions, states[rows, env].numpy())
        assert np.array_equal(episode.rewards, states[rows, env].sum(-1).numpy())
        assert np.array_equal(episode.terminations, dones[rows, env].numpy())
        assert not episode.truncations.any()
        assert np.array_equal(episode.infos["versions"], fields["versions"][rows, env].numpy())


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([], ([0, 1, 0, 1], [0, 0, 0, 0])),
        (["terminations"], ([0, 1, 0, 0], [0, 0, 0, 1])),
        (["truncations"], ([0, 1, 0, 0], [0, 0, 0, 1])),
        (["terminations", "truncations"], ([0, 1, 0, 0], [0, 0, 0, 1])),
    ],
)
def test_ends_are_of_the_kind_that_flags_tell(
    tmp_path: Path, known: list[str], expected: tuple[list[int], list[int]]
) -> None:
    obs = {"states": torch.zeros(4, 1)}
    flags = {
        "terminations": torch.tensor([[0], [1], [0], [0]], dtype=torch.bool),
        "truncations": torch.tensor([[0], [0], [0], [1]], dtype=torch.bool),
    }
    fields = {"curr_obs": obs, "next_obs": obs, "actions": obs["states"], "rewards": obs["states"]}
    fields["dones"] = flags["terminations"] | flags["truncations"]
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([fields | {name: flags[name] for name in known}])
    to_minari(Tables(tmp_path / "store"), tmp_path / "out")
    found = list(minari.MinariDataset(tmp_path / "out" / "data"))
    told = [
        np.concatenate([getattr(episode, name) for episode in found]).tolist()
        for name in ("terminations", "truncations")
    ]
    assert told == list(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_obs": {}}, "expected curr_obs, and next_obs with the same columns"),
        ({"actions": None}, "expected actions, got"),
        ({"rewards": torch.zeros(2, 1, 3)}, "expected rewards of one number a row"),
        ({"actions": torch.zeros(2, 1, dtype=torch.complex64)}, "column 'actions': expected numb"),
    ],
)
def test_what_minari_cannot_hold_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    obs = {"states": torch.zeros(2, 1)}
    fields = {"curr_obs": obs, "next_obs": obs, "actions": obs["states"], "rewards": obs["states"]}
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([fields | change])
    with pytest.raises(SchemaError, match=message):
        to_minari(Tables(tmp_path / "store"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
