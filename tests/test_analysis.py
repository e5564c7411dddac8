"""The tables of stores: every row, number and end of an episode is the one that was stored.

The small stores are computed by hand; what is random is held against plain loops.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from data import DTYPES, contents_of, every_dtype, names_of, opened, run_python, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbuf import CorruptError, MmbufError, SchemaError, TrajectoryReplayBuffer, storage, vm
from mmbuf.analysis import ColumnSummary, Spread, Tables, VersionSummary, summarize
from mmbuf.analysis.rows import TrajectoryRows
from mmbuf.formats import native
from mmbuf.index import TrajectoryIndex

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = list(storage.FORMATS)
KIB = 1 << 10
by_format = pytest.mark.parametrize("trajectory_format", FORMATS)


def store(path: Path, *trajectories: Any, trajectory_format: str = "arrow") -> Path:
    """A closed store of these."""
    with opened(path, trajectory_format=trajectory_format, sample_window_size=0) as buffer:
        buffer.add_trajectories(list(trajectories))
    return path


def flags(*rows: str) -> torch.Tensor:
    """Bool ``[T, B, 1]``: a string for each environment, a step a character, ``x`` where set."""
    return torch.tensor([[[c == "x"] for c in step] for step in zip(*rows, strict=True)])


def by_hand() -> dict[str, Any]:
    """T = 4, B = 2; environment 0 has episodes of 2 and 2 steps, environment 1 of 3 and 1."""
    return {
        "rewards": torch.tensor([[1.0, 10], [2, 20], [3, 30], [4, 40]]),
        "dones": flags(".x..", "..x."),
        "terminations": flags(".x..", "...."),
        "truncations": flags("....", "..x."),
        "curr_obs": {
            "states": torch.arange(16).reshape(4, 2, 2),
            "task": [["lift", "push"]] * 4,
            "is_success": flags(".x..", "...."),
        },
        "model_weights_id": "v1",
        "max_episode_length": 4,
    }


EPISODES = [
    {"env": 0, "episode": 0, "start_step": 0, "end_step": 2, "length": 2, "episode_return": 3.0},
    {"env": 0, "episode": 1, "start_step": 2, "end_step": 4, "length": 2, "episode_return": 7.0},
    {"env": 1, "episode": 0, "start_step": 0, "end_step": 3, "length": 3, "episode_return": 60.0},
    {"env": 1, "episode": 1, "start_step": 3, "end_step": 4, "length": 1, "episode_return": 40.0},
]
ENDED_BY = ["termination", "open", "truncation", "open"]


def ended_by(path: Path, **columns: torch.Tensor) -> list[str]:
    rewards = torch.zeros(3, 1)
    tables = Tables(store(path, {"rewards": rewards, **columns}))
    found: list[str] = tables.episodes.to_arrow(["ended_by"])["ended_by"].to_pylist()
    return found


@by_format
def test_steps_are_the_rows_in_their_order(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "store", by_hand(), trajectory_format=trajectory_format)
    tables = Tables(path)
    found = tables.steps.to_arrow().to_pydict()
    (uuid,) = {entry.uuid for entry, _ in tables.entries}
    assert found == {
        "trajectory_id": [0] * 8,
        "uuid": [uuid] * 8,
        "t": [0, 0, 1, 1, 2, 2, 3, 3],
        "env": [0, 1, 0, 1, 0, 1, 0, 1],
        "episode": [0, 0, 0, 0, 1, 0, 1, 1],
        "rewards": [1, 10, 2, 20, 3, 30, 4, 40],
        "terminations": [False, False, True, False, False, False, False, False],
        "truncations": [False, False, False, False, False, True, False, False],
        "dones": [False, False, True, False, False, True, False, False],
        "curr_obs.states": [[i, i + 1] for i in range(0, 16, 2)],
        "curr_obs.task": ["lift", "push"] * 4,
        "curr_obs.is_success": [False, False, True, False, False, False, False, False],
    }


@by_format
def test_episodes_end_at_flags_and_at_the_end_of_the_trajectory(
    tmp_path: Path, trajectory_format: str
) -> None:
    path = store(tmp_path / "store", by_hand(), by_hand(), trajectory_format=trajectory_format)
    tables = Tables(path)
    expected = [
        {
            "trajectory_id": entry.trajectory_id,
            "uuid": entry.uuid,
            **episode,
            "ended_by": reason,
            "is_success": episode["episode_return"] == 3,
        }
        for entry, _ in tables.entries
        for episode, reason in zip(EPISODES, ENDED_BY, strict=True)
    ]
    assert tables.episodes.to_arrow().to_pylist() == expected


def test_trajectories_are_those_of_the_index_and_no_file_is_opened(
    tmp_path: Path, opened_files: list[str]
) -> None:
    path = store(tmp_path / "store", by_hand())
    del opened_files[:]
    tables = Tables(path)
    (found,) = tables.trajectories.to_arrow().to_pylist()
    assert opened_files == []
    ((entry, _),) = tables.entries
    (file,) = path.glob("*.arrow")
    assert found == {
        "trajectory_id": 0,
        "uuid": entry.uuid,
        "store": str(path),
        "num_steps": 4,
        "num_envs": 2,
        "num_samples": 8,
        "size_bytes": file.stat().st_size,
        "format": "arrow",
        "model_weights_id": "v1",
        "max_episode_length": 4,
        "added_at": datetime.fromtimestamp(entry.added_at, timezone.utc),
        "file": "trajectory_0_v1.arrow",
    }


def test_left_out_steps_of_flags_are_in_no_table(tmp_path: Path) -> None:
    fields = {"rewards": torch.ones(4, 1), "dones": flags("x.xx.x")}
    table = Tables(store(tmp_path / "store", fields)).steps
    # Two rollout epochs of three steps each: the first of each is no step of the rewards.
    assert table.to_arrow(["dones", "episode"]).to_pydict() == {
        "dones": [False, True, False, True],
        "episode": [0, 0, 1, 1],
    }


def test_a_termination_counts_before_a_truncation_of_the_same_step(tmp_path: Path) -> None:
    both = {"terminations": flags("x.."), "truncations": flags("xx.")}
    assert ended_by(tmp_path, **both) == ["termination", "truncation", "open"]


def test_dones_alone_do_not_say_by_what_an_episode_ended(tmp_path: Path) -> None:
    assert ended_by(tmp_path, dones=flags(".x.")) == ["done", "open"]


def test_dones_that_are_no_truncation_are_a_termination(tmp_path: Path) -> None:
    columns = {"dones": flags("xx."), "truncations": flags(".x.")}
    assert ended_by(tmp_path, **columns) == ["termination", "truncation", "open"]


def test_dones_that_are_no_termination_are_a_truncation(tmp_path: Path) -> None:
    columns = {"dones": flags("xx."), "terminations": flags(".x.")}
    assert ended_by(tmp_path, **columns) == ["truncation", "termination", "open"]


def test_dones_that_neither_flag_explains_are_done(tmp_path: Path) -> None:
    columns = {"terminations": flags("x.."), "truncations": flags("..."), "dones": flags("xx.")}
    assert ended_by(tmp_path, **columns) == ["termination", "done", "open"]


def test_where_there_are_dones_other_flags_end_no_episode(tmp_path: Path) -> None:
    assert ended_by(tmp_path, dones=flags("..x"), truncations=flags("x.x")) == ["truncation"]


def test_an_episode_that_ends_with_its_trajectory_is_not_open(tmp_path: Path) -> None:
    assert ended_by(tmp_path, terminations=flags("..x")) == ["termination"]


def test_without_flags_each_environment_has_one_episode(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", {"actions": torch.zeros(3, 2, 1)}))
    found = tables.episodes.to_arrow(["env", "length", "episode_return", "ended_by"])
    assert found.to_pylist() == [
        {"env": env, "length": 3, "episode_return": None, "ended_by": "open"} for env in range(2)
    ]


def test_rewards_of_chunks_are_summed_whole(tmp_path: Path) -> None:
    rewards = torch.tensor([[[1.0, 2]], [[4, 8]]], dtype=torch.bfloat16)
    tables = Tables(store(tmp_path / "store", {"rewards": rewards}))
    assert tables.episodes.to_arrow(["episode_return"]).to_pydict() == {"episode_return": [15.0]}


def test_episodes_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    expected, added = [], []
    for i in range(12):
        steps, envs = rng.integers(1, 9, 2).tolist()
        rewards = rng.integers(-9, 9, (steps, envs)).astype(np.float64)
        dones = rng.random((steps, envs)) < 0.3
        added.append({"rewards": rewards, "dones": dones})
        for env in range(envs):
            start = episode = 0
            for t in range(steps):
                if dones[t, env] or t == steps - 1:
                    total = rewards[start : t + 1, env].sum()
                    expected.append((i, env, episode, start, t + 1, total))
                    start, episode = t + 1, episode + 1
    tables = Tables(store(tmp_path / "store", *added))
    names = ["trajectory_id", "env", "episode", "start_step", "end_step", "episode_return"]
    found = tables.episodes.to_arrow(names).to_pydict()
    assert list(zip(*found.values(), strict=True)) == expected
    joined = tables.connect().sql(
        "select e.length = count(*) from steps s join episodes e using (uuid, env, episode) "
        "where s.t >= e.start_step and s.t < e.end_step "
        "group by uuid, env, episode, e.length"
    )
    assert joined.fetchall() == [(True,)] * len(expected)


@by_format
def test_every_dtype_comes_as_its_numbers(tmp_path: Path, trajectory_format: str) -> None:
    fields = every_dtype()
    path = store(tmp_path / "store", fields, trajectory_format=trajectory_format)
    table = Tables(path).steps.to_arrow()
    for dtype in DTYPES:
        for name, leaf in fields[dtype].items():
            if name == "none":
                assert f"{dtype}.none" not in table.schema.names
                continue
            column = table[f"{dtype}.{name}"].combine_chunks()
            if dtype.startswith("complex"):
                leaf = torch.view_as_real(leaf)
            elif dtype.startswith(("bfloat", "float8")) or dtype == "float16":
                leaf = leaf.float()
            size = leaf.numel() // 12
            if name == "tensor" or dtype.startswith("complex"):
                assert column.type.list_size == size
                column = column.values
            found = column.to_numpy(zero_copy_only=False)
            expected = leaf.reshape(-1).numpy()
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f")


@by_format
def test_text_comes_as_strings(tmp_path: Path, trajectory_format: str) -> None:
    fields = every_dtype()
    tables = Tables(store(tmp_path / "store", fields, trajectory_format=trajectory_format))
    expected = [string for step in fields["text"] for string in step]
    assert tables.steps.to_arrow(["text"])["text"].to_pylist() == expected
    assert tables.steps.to_pandas(["text"])["text"].tolist() == expected
    assert tables.steps.to_polars(["text"])["text"].to_list() == expected
    assert tables.connect().sql("select text from steps").fetchall() == [(s,) for s in expected]


def test_text_of_many_trajectories_is_that_of_each(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", *map(trajectory, range(5))))
    expected = [f"task {(i + b) % 5}" for i in range(5) for _ in range(4) for b in range(3)]
    assert tables.steps.to_pandas()["curr_obs.task"].tolist() == expected
    assert tables.steps.to_polars()["curr_obs.task"].to_list() == expected
    counts = tables.connect().sql(
        'select "curr_obs.task", count(*) from steps where "curr_obs.task" != \'task 3\' '
        "group by 1 order by 1"
    )
    assert counts.fetchall() == [(f"task {i}", 12) for i in (0, 1, 2, 4)]


def test_wide_columns_are_there_only_if_they_are_named(tmp_path: Path) -> None:
    fields = {
        "short": torch.zeros(2, 1, 8, 8),
        "image": torch.arange(130, dtype=torch.uint8).reshape(2, 1, 5, 13),
    }
    tables = Tables(store(tmp_path / "store", fields))
    table = tables.steps
    assert table.columns == ["trajectory_id", "uuid", "t", "env", "episode", "short"]
    assert table.to_arrow().schema.names == table.columns
    images = table.to_arrow(["image"])["image"].to_pylist()
    assert images == [list(range(65)), list(range(65, 130))]
    assert len(tables.connect().sql("select * from steps").columns) == 6
    sums = tables.connect(wide=["image"]).sql("select list_sum(image) from steps").fetchall()
    assert sums == [(sum(range(65)),), (sum(range(65, 130)),)]


def test_a_part_of_the_tables_goes_to_another_process(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", *(trajectory(i) for i in range(5))))
    part = pickle.loads(pickle.dumps(tables.part(1, 3)))
    assert part.trajectories.to_arrow()["trajectory_id"].to_pylist() == [1, 2]
    assert part.steps.to_arrow().to_pylist() == tables.steps.to_arrow().to_pylist()[12:36]
    assert len(tables.part(4, 9)) == 1


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    table = Tables(store(tmp_path / "store", by_hand())).steps
    assert table.to_arrow(["rewards", "env", "t"]).schema.names == ["rewards", "env", "t"]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", by_hand()))
    with pytest.raises(SchemaError, match="column 'reward': expected one of trajectory_id, uuid"):
        tables.steps.to_arrow(["reward"])
    with pytest.raises(SchemaError, match="column 'x': expected one of"):
        tables.connect(wide=["x"])
    with pytest.raises(TypeError, match="columns: expected a list of names, got 'rewards'"):
        tables.steps.to_arrow("rewards")


def test_a_column_with_the_name_of_a_place_gets_another_name(tmp_path: Path) -> None:
    fields = {"t": torch.tensor([[7], [8]]), "env": {"t": torch.tensor([[5], [6]])}}
    table = Tables(store(tmp_path / "store", fields)).steps
    assert table.to_arrow(["t", "t_", "env.t"]).to_pydict() == {
        "t": [0, 1],
        "t_": [7, 8],
        "env.t": [5, 6],
    }


def test_several_stores_are_told_apart(tmp_path: Path) -> None:
    for rank in range(2):
        store(tmp_path / f"rank_{rank}", by_hand())
    paths = [str(tmp_path / f"rank_{rank}") for rank in range(2)]
    for path in (tmp_path / "rank_*", paths, tuple(paths)):
        tables = Tables(path)
        found = tables.connect().sql(
            "select store, count(*) from steps join episodes using (store, uuid, env, episode) "
            "group by store order by store"
        )
        assert found.fetchall() == [(paths[0], 8), (paths[1], 8)]
        assert tables.trajectories.to_arrow(["store"])["store"].to_pylist() == paths
    assert "store" not in Tables(paths[0]).steps.columns


def test_stores_of_other_columns_do_not_fit_together(tmp_path: Path) -> None:
    store(tmp_path / "rank_0", by_hand())
    store(tmp_path / "rank_1", trajectory(0))
    with pytest.raises(SchemaError, match="rank_1: expected Schema"):
        Tables(tmp_path / "rank_*")


def test_no_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a store directory, got none"):
        Tables(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"none_\*: expected a store, got none"):
        Tables(tmp_path / "none_*")


def test_an_empty_store_has_empty_tables(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store"))
    assert len(tables) == 0
    assert tables.steps.to_arrow().num_rows == 0
    assert tables.episodes.to_pandas().empty
    assert tables.connect().sql("select count(*) from trajectories").fetchall() == [(0,)]
    assert summarize(tables).columns == {}


def test_checkpoints_and_directories_of_rlinf_are_stores(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([by_hand()])
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert Tables(tmp_path / "checkpoint").episodes.to_arrow().num_rows == 4
    tables = Tables(FIXTURES / "rlinf_pt")
    (rows,) = tables.connect().sql("select sum(num_samples) from trajectories").fetchall()
    assert tables.steps.to_arrow(["t"]).num_rows == rows[0]
    assert set(tables.trajectories.to_arrow()["added_at"].to_pylist()) == {None}


def test_nothing_is_written_and_the_writer_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([by_hand()])
        buffer.flush()
        before = contents_of(tmp_path)
        tables = Tables(tmp_path / "store")
        tables.steps.to_arrow()
        tables.connect().sql("select * from episodes").fetchall()
        assert contents_of(tmp_path) == before
        buffer.add_trajectories([by_hand()])
        buffer.flush()
        assert tables.steps.to_arrow(["t"]).num_rows == 8  # as when they were opened
        assert Tables(tmp_path / "store").steps.to_arrow(["t"]).num_rows == 16


@by_format
def test_trajectories_that_the_writer_clears_meanwhile_are_passed_over(
    tmp_path: Path, trajectory_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmbuf.analysis.tables._BLOCK", 1)
    with opened(tmp_path / "store", trajectory_format=trajectory_format) as buffer:
        buffer.add_trajectories([by_hand()] * 3)
        buffer.flush()
        tables = Tables(tmp_path / "store")
        batches = tables.steps.batches()
        first = next(batches)
        buffer.clear()
        assert list(batches) == []
        assert first["rewards"].to_pylist() == [1, 10, 2, 20, 3, 30, 4, 40]


def test_trajectories_that_are_removed_meanwhile_are_in_no_batch(tmp_path: Path) -> None:
    path = store(tmp_path / "store", *[by_hand()] * 4)
    told = []

    def remove(done: int, total: int) -> None:
        told.append((done, total))
        if done == 1:
            with contextlib.closing(TrajectoryIndex(str(path))) as writer:
                writer.drop([1, 2])
                writer.remove_dead_files()

    tables = Tables(path, on_progress=remove)
    (batch,) = tables.episodes.batches(["trajectory_id", "episode_return"])
    assert batch.to_pydict() == {
        "trajectory_id": [0] * 4 + [3] * 4,
        "episode_return": [3, 7, 60, 40] * 2,
    }
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_file_that_is_gone_and_still_listed_is_an_error(tmp_path: Path) -> None:
    path = store(tmp_path / "store", by_hand())
    (file,) = path.glob("*.arrow")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="trajectory_0_v1"):
        Tables(path).steps.to_arrow()


def test_a_damaged_file_is_named_also_by_duckdb(tmp_path: Path) -> None:
    path = store(tmp_path / "store", by_hand())
    (file,) = path.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-1])
    tables = Tables(path)
    with pytest.raises(CorruptError, match=r"trajectory_0_v1\.arrow: expected \d+ bytes"):
        tables.steps.to_arrow()
    with pytest.raises(duckdb.Error, match=r"trajectory_0_v1\.arrow: expected \d+ bytes"):
        tables.connect().sql("select sum(rewards) from steps").fetchall()


def test_tables_go_on_in_a_checkpoint_that_was_saved_over_in_another_format(
    tmp_path: Path,
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([by_hand(), by_hand()])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        tables = Tables(tmp_path / "checkpoint")
        before = tables.steps.to_arrow()
        for form in ("npy", "pt", "pkl", "arrow"):
            buffer.save_checkpoint(tmp_path / "checkpoint", form)
            assert tables.steps.to_arrow() == before
            assert tables.episodes.to_arrow().num_rows == 8
        buffer.clear()
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert tables.steps.to_arrow().num_rows == 0


def test_an_index_that_cannot_be_true_is_refused(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([by_hand()])
        buffer.save_checkpoint(tmp_path / "checkpoint")
    index = tmp_path / "checkpoint" / "trajectory_index.json"
    snapshot = json.loads(index.read_text())
    del snapshot["crc"]
    snapshot["trajectory_index"]["0"]["size_bytes"] = 16
    index.write_text(json.dumps(snapshot))
    with pytest.raises(CorruptError, match=r"expected \d+ bytes or more of its rows, got 16\."):
        Tables(tmp_path / "checkpoint")


def test_of_an_arrow_store_only_the_bytes_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", trajectory(0, image=(40, 40)))
    tables = Tables(path)
    ((entry, _),) = tables.entries
    assert tables.schema is not None
    position = [column.name for column in tables.schema.columns].index("rewards")
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(
        native, "read_into", lambda fd, path, view, at: read.append((at, view.nbytes))
    )
    monkeypatch.setattr(native, "private_pages", lambda *a: pytest.fail("mapped"))
    next(tables.steps.batches(["t", "rewards", "env"]))
    assert read == [(entry.parts[position].offset, 12 * 4)]


def test_places_are_known_without_the_file(tmp_path: Path, opened_files: list[str]) -> None:
    tables = Tables(store(tmp_path / "store", by_hand()))
    del opened_files[:]
    found = tables.connect().sql("select count(*), max(t), max(env) from steps").fetchall()
    assert found == [(8, 3, 1)]
    assert opened_files == []


def test_a_query_reads_the_columns_that_it_speaks_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(store(tmp_path / "store", trajectory(0), trajectory(1)))
    really, read = TrajectoryRows.read, []

    def note(rows: TrajectoryRows, positions: Sequence[int]) -> Any:
        read.extend(rows.schema.columns[position].name for position in positions)
        return really(rows, positions)

    monkeypatch.setattr(TrajectoryRows, "read", note)
    # Row t, b of trajectory i has the reward i + t + b, and b in its states.
    query = 'select sum(rewards) from steps where "curr_obs.states"[3] = 1'
    assert tables.connect().sql(query).fetchall() == [((1 + 2 + 3 + 4) + (2 + 3 + 4 + 5),)]
    assert set(read) == {"rewards", "curr_obs.states"}
    read.clear()
    assert tables.connect().sql("select count(*) from steps where dones").fetchall() == [(8,)]
    assert set(read) == {"dones"}


def test_a_filter_may_speak_of_columns_that_are_not_selected(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", by_hand()))
    with duckdb.connect() as connection:
        tables.steps.register(connection, "rows")
        query = "select rewards from rows where \"curr_obs.task\" = 'lift' and (dones or t = 3)"
        assert connection.sql(query).fetchall() == [(2,), (4,)]
        query = "select t from rows where env = 1 and t in (0, 2) and not truncations"
        assert connection.sql(query).fetchall() == [(0,)]


def test_a_connection_is_of_one_moment_and_serves_many_queries(tmp_path: Path) -> None:
    connection = Tables(store(tmp_path / "store", by_hand())).connect()
    for _ in range(3):
        query = "select ended_by, sum(episode_return) from episodes group by 1 order by 1"
        assert connection.sql(query).fetchall() == [
            ("open", 47),
            ("termination", 3),
            ("truncation", 60),
        ]


def test_pandas_and_polars_have_the_same_episodes(tmp_path: Path) -> None:
    table = Tables(store(tmp_path / "store", by_hand())).episodes
    frame, polars = table.to_pandas(), table.to_polars()
    assert isinstance(frame, pd.DataFrame)
    assert frame["episode_return"].tolist() == polars["episode_return"].to_list() == [3, 7, 60, 40]
    assert frame["ended_by"].tolist() == polars["ended_by"].to_list() == ENDED_BY


def test_a_batch_opens_no_more_files_than_it_needs(
    tmp_path: Path, opened_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmbuf.analysis.tables._BLOCK", 2)
    path = store(tmp_path / "store", *map(trajectory, range(5)))
    tables = Tables(path)
    del opened_files[:]
    batches = tables.steps.batches()
    assert next(batches)["trajectory_id"].to_pylist() == [0] * 12 + [1] * 12
    assert opened_files == ["trajectory_0_.arrow", "trajectory_1_.arrow"]
    assert [batch["trajectory_id"][0].as_py() for batch in batches] == [2, 4]
    assert opened_files == names_of(path)


def test_a_batch_is_of_trajectories_that_are_small_together(tmp_path: Path) -> None:
    sizes = [1000, 1000, 2096, 1, 4096, 5000, 8]
    path = store(tmp_path / "store", *({"rewards": torch.zeros(size, 1)} for size in sizes))
    tables = Tables(path)
    # 16 KiB of them are mapped (`conftest`).
    batches = list(tables.steps.batches(["rewards"]))
    assert [batch.num_rows for batch in batches] == [4096, 1, 4096, 5000, 8]
    (batch,) = tables.steps.batches(["t"])
    assert batch.num_rows == sum(sizes)


@st.composite
def stores(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Trajectories of like columns and all shapes, text and left-out steps among them."""
    seed = draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    names = draw(st.sets(st.sampled_from(["dones", "terminations", "truncations"])))
    num_rewards = draw(st.sampled_from([0, 1, 3]))
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=6))
    return [
        {
            "actions": rng.random((*shape, 2), np.float32),
            "curr_obs": {
                "task": [[f"task {n}" for n in step] for step in rng.integers(0, 4, shape)],
                "is_success": rng.random(shape) < 0.2,
            },
            **{name: rng.random((shape[0] + 1, shape[1])) < 0.3 for name in sorted(names)},
            # In eighths, whose sums are exact in whatever order they are taken.
            **(
                {"rewards": rng.integers(-99, 99, (*shape, num_rewards)) / 8} if num_rewards else {}
            ),
        }
        for shape in shapes
    ]


@settings(max_examples=40, deadline=None)
@given(stores(), st.sampled_from([1, 2, 3, 4096]), st.sampled_from([64, 256, 16 * KIB]))
def test_tables_are_those_of_each_trajectory_alone(
    tmp_path_factory: pytest.TempPathFactory,
    added: list[dict[str, Any]],
    max_trajectories: int,
    max_bytes: int,
) -> None:
    tables = Tables(store(tmp_path_factory.mktemp("blocks") / "store", *added))
    for name in ("steps", "episodes"):
        alone = [
            row
            for entry, _ in tables.entries
            for row in getattr(tables.only(entry.uuid), name).to_arrow().to_pylist()
        ]
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("mmbuf.analysis.tables._BLOCK", max_trajectories)
            monkeypatch.setattr(vm, "MAP_THRESHOLD", max_bytes)
            table = getattr(tables, name)
            assert table.to_arrow().to_pylist() == alone
            for column in table.columns:
                found = table.to_arrow([column])[column].to_pylist()
                assert found == [row[column] for row in alone]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("trajectory_format", ["arrow", "npy"])
def test_wide_columns_are_views_of_the_file(tmp_path: Path, trajectory_format: str) -> None:
    added = [trajectory(i, image=(64, 64)) for i in range(2)]
    path = store(tmp_path / "store", *added, trajectory_format=trajectory_format)
    batches = list(Tables(path).steps.batches(["curr_obs.image"]))
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        (line.split("-")[0], line.split()[0].split("-")[1]) for line in maps if str(path) in line
    ]
    for batch, fields in zip(batches, added, strict=True):
        address = batch.column(0).values.buffers()[1].address
        assert any(int(low, 16) <= address < int(high, 16) for low, high in ranges)
        image = batch.column(0).values.to_numpy().reshape(4, 3, 64, 64)
        assert np.array_equal(image, fields["curr_obs"]["image"].numpy())


def test_batches_stay_good_when_the_file_is_gone(tmp_path: Path) -> None:
    path = store(tmp_path / "store", trajectory(0, image=(64, 64)))
    batch = next(Tables(path).steps.batches(["curr_obs.image"]))
    for file in path.glob("*.arrow"):
        file.unlink()
    assert (
        pc.sum(batch.column(0).values).as_py()
        == sum(t + b for t in range(4) for b in range(3)) * 4096
    )


def test_progress_is_told_trajectory_by_trajectory(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = store(tmp_path / "store", *map(trajectory, range(3)))
    tables = Tables(path, on_progress=lambda done, total: told.append((done, total)))
    tables.steps.to_arrow(["t"])
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_many_threads_may_ask_at_once(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", *map(trajectory, range(8))))
    found: list[Any] = []

    def ask() -> None:
        found.append(tables.connect().sql("select sum(rewards) from steps").fetchall())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(i + t + b for i in range(8) for t in range(4) for b in range(3))
    assert found == [[(total,)]] * 4


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("duckdb", lambda tables: tables.connect()),
        ("pandas", lambda tables: tables.steps.to_pandas()),
        ("polars", lambda tables: tables.steps.to_polars()),
    ],
)
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ask: Callable[[Tables], Any]
) -> None:
    tables = Tables(store(tmp_path / "store", by_hand()))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MmbufError, match=rf'^{name} is missing.*pip install "mmbuf\[analysis\]"'):
        ask(tables)


def test_a_summary_is_computed_by_hand(tmp_path: Path) -> None:
    fields = by_hand()
    fields["values"] = torch.tensor([[1.0, 3.0]] * 3 + [[float("nan"), float("-inf")]])
    found = summarize(Tables(store(tmp_path / "store", fields)))
    assert list(found.columns) == [
        *("rewards", "dones", "terminations", "truncations"),
        *("curr_obs.states", "curr_obs.is_success", "values"),
    ]
    values = found.columns["values"]
    assert (values.min, values.mean, values.std, values.max) == (1, 2, 1, 3)
    assert (values.num_finite, values.num_nan, values.num_inf) == (6, 1, 1)
    assert found.columns["dones"].mean == 0.25
    assert found.columns["curr_obs.states"].mean == 7.5
    assert found.versions == {
        "v1": VersionSummary(
            num_trajectories=1,
            num_rows=8,
            num_episodes=4,
            num_open=2,
            returns=Spread(mean=31.5, min=3, p25=17.25, median=31.5, p75=45.75, max=60),
            lengths=Spread(mean=2.5, min=2, p25=2.25, median=2.5, p75=2.75, max=3),
            success_rate=0.5,
        )
    }


def test_where_no_column_says_that_an_episode_ends_all_are_counted(tmp_path: Path) -> None:
    path = store(tmp_path / "store", {"rewards": torch.ones(3, 2)})
    (version,) = summarize(Tables(path)).versions.values()
    assert (version.num_episodes, version.num_open, version.returns.mean) == (2, 2, 3)
    assert version.success_rate is None


def test_a_summary_of_many_blocks_is_that_of_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmbuf.analysis.summary._BLOCK", 1 << 10)
    rng = np.random.default_rng(5)
    images = [rng.integers(0, 256, (7, 3, 64, 64), np.uint8) for _ in range(3)]
    # Far from zero, where a sum of squares would lose all digits.
    floats = [rng.normal(1e8, 1, (7, 3, 100)) for _ in range(3)]
    added = [{"image": i, "floats": f} for i, f in zip(images, floats, strict=True)]
    columns = summarize(Tables(store(tmp_path / "store", *added))).columns
    for name, values in (("image", np.stack(images)), ("floats", np.stack(floats))):
        found = columns[name]
        assert (found.min, found.max) == (values.min(), values.max())
        assert found.mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-14)
        assert found.std == pytest.approx(values.std(dtype=np.float64), rel=1e-9)


def test_numbers_that_are_all_infinite_have_no_mean() -> None:
    column = ColumnSummary()
    column.add(np.array([np.inf, np.nan], np.float32))
    assert (column.mean, column.std, column.num_inf, column.num_nan) == (None, None, 1, 1)


@by_format
def test_every_dtype_has_a_summary(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "store", every_dtype(), trajectory_format=trajectory_format)
    columns = summarize(Tables(path)).columns
    # Three columns of each dtype, and rewards, dones and prev_values.
    assert len(columns) == 3 * len(DTYPES) + 3
    assert columns["bool.tensor"].num_finite == 4 * 3 * 6
    assert columns["complex64.one"].num_finite <= 24


def test_a_step_table_is_joined_by_arrow_too(tmp_path: Path) -> None:
    tables = Tables(store(tmp_path / "store", by_hand()))
    steps = tables.steps.to_arrow(["uuid", "env", "episode", "rewards"])
    joined = steps.join(
        tables.episodes.to_arrow(["uuid", "env", "episode", "length"]), ["uuid", "env", "episode"]
    )
    assert isinstance(joined, pa.Table)
    assert sorted(joined["length"].to_pylist()) == [1, 2, 2, 2, 2, 3, 3, 3]


def test_a_query_that_stops_early_leaves_no_file_open(tmp_path: Path) -> None:
    # What it would leave open, the fixture of every test finds.
    tables = Tables(store(tmp_path / "store", *map(trajectory, range(30))))
    assert tables.connect().sql("select rewards from steps limit 1").fetchall() == [(0,)]
    next(tables.steps.batches(["rewards"]))


def test_a_query_that_stops_early_lets_the_interpreter_end(tmp_path: Path) -> None:
    path = store(tmp_path / "store", *map(trajectory, range(30)))
    script = """
import sys
from mmbuf.analysis import Tables
connection = Tables(sys.argv[1]).connect()
print(connection.sql("select rewards from steps limit 1").fetchall())
print(connection.execute("select * from steps").fetchmany(1)[0][0])
"""
    ran = run_python(script, path)
    assert (ran.returncode, ran.stdout) == (0, "[(0.0,)]\n0\n"), ran.stderr


def test_a_connection_is_the_callers_own_unless_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(0)])
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("a\n7\n")
    tables = Tables(tmp_path / "store")
    frame = pa.table({"z": [9]})
    with tables.connect() as connection:
        assert connection.execute("select a, z from 'a.csv', frame").fetchall() == [(7, 9)]
        connection.execute("set threads = 1")
    for files in ((), ["a.csv"], [tmp_path / "a.csv"]):
        with tables.connect(files=files) as connection:
            assert connection.execute("select count(*) from steps").fetchall() == [(12,)]
            for query, may in (
                ("from 'a.csv'", bool(files)),
                ("copy steps to 'a.csv'", bool(files)),
                ("from 'b.csv'", False),
                ("copy steps to 'c.csv'", False),
                ("from frame", False),
                ("set threads = 1", False),
            ):
                if may:
                    connection.execute(query)
                else:
                    with pytest.raises(duckdb.Error):
                        connection.execute(query)
    assert frame.num_rows == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv", "store"]
