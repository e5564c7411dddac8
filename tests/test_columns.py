"""Columns that come and go: what a batch, a store and all that reads it have of them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmbuf import EmptyBufferError, ReplayReader, SchemaError, TrajectoryReplayBuffer, health
from mmbuf.analysis import Tables
from mmbuf.index import JOURNAL, read
from mmbuf.salvage import salvage
from mmbuf.sampling import NStep, Slices, WithoutReplacement
from mmbuf.transfer import convert, merge, split

pytestmark = pytest.mark.usefixtures("without_fsync")

SHAPES = {"rewards": (), "state": (7,), "late": (7,), "image": (64, 64, 3), "wide": (5000,)}
FORMATS = pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt", "pkl"])
FEW, MANY = ("rewards", "obs.state"), ("rewards", "obs.state", "obs.image", "late", "wide", "text")


def trajectory(number: int, columns: Sequence[str], steps: int = 4, envs: int = 3) -> Any:
    """Of these columns; each value is the trajectory's number."""
    made: dict[str, Any] = {}
    for name in columns:
        *outer, key = name.split(".")
        if key == "text":
            leaf: Any = [[f"{number}: {t} {b}" for b in range(envs)] for t in range(steps)]
        else:
            dtype = torch.uint8 if key == "image" else torch.float32
            leaf = torch.full((steps, envs, *SHAPES[key]), number, dtype=dtype)
        node = made
        for part in outer:
            node = node.setdefault(part, {})
        node[key] = leaf
    return made


def names(batch: Any, prefix: str = "") -> list[str]:
    return [
        name
        for key, value in batch.items()
        for name in (
            names(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
        )
    ]


def check(batch: Any, columns: Sequence[str]) -> set[int]:
    """The numbers of the trajectories that the rows are of, if all values are."""
    assert sorted(names(batch)) == sorted(columns)
    numbers = batch["rewards"]
    for name in columns:
        leaf = batch
        for key in name.split("."):
            leaf = leaf[key]
        if name == "text":
            assert [int(text.partition(":")[0]) for text in leaf] == numbers.tolist()
        else:
            assert (leaf.reshape(len(numbers), -1) == numbers[:, None]).all()
    return set(numbers.int().tolist())


def mixed(path: Path, *columns: Sequence[str], **options: Any) -> Path:
    """A store of these trajectories, numbered from 0."""
    options = {"auto_save": True, "auto_save_path": path, "columns": "common"} | options
    with TrajectoryReplayBuffer(**options) as buffer:
        for number, of in enumerate(columns):
            buffer.add_trajectories([trajectory(number, of)])
    return path


# -- "same" ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (FEW[:1], "column 'obs.state': expected in the trajectory, but it is missing."),
        ((*FEW, "late"), "column 'late': expected no such column in the trajectory."),
    ],
    ids=["fewer", "more"],
)
def test_a_column_that_comes_or_goes_is_refused_and_the_remedy_named(
    columns: Sequence[str], message: str
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(0, FEW)])
        with pytest.raises(SchemaError) as raised:
            buffer.add_trajectories([trajectory(1, columns)])
        assert str(raised.value).startswith(message)
        assert str(raised.value).endswith(
            ' Open it with columns="common" where trajectories may lack columns or bring others.'
        )
        assert len(buffer) == 1


def test_a_store_of_several_schemas_is_refused_and_the_remedy_named(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW, MANY)
    expected = "column 'obs.image': expected none as in those before it, got uint8 rows"
    for open_it in (
        lambda: ReplayReader(path),
        lambda: Tables(path),
        lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=path),
        lambda: TrajectoryReplayBuffer().load_checkpoint(path),
    ):
        with pytest.raises(SchemaError, match=r'columns="common"') as raised:
            open_it()
        assert str(raised.value).startswith(f"{path}/trajectory_1_.arrow: {expected}")


def test_a_reader_of_one_schema_says_when_another_comes(tmp_path: Path) -> None:
    options: Any = {"auto_save": True, "auto_save_path": tmp_path, "columns": "common"}
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.add_trajectories([trajectory(0, FEW)])
        buffer.flush()
        with ReplayReader(tmp_path) as reader:
            assert check(reader.sample(9), FEW) == {0}
            buffer.add_trajectories([trajectory(1, (*FEW, "late"))])
            buffer.flush()
            with pytest.raises(SchemaError, match="column 'late': expected none"):
                reader.sample(9)


@pytest.mark.parametrize("columns", ["all", "", None, 3])
def test_other_ways_are_refused(columns: Any, tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW)
    for make in (TrajectoryReplayBuffer, lambda **o: ReplayReader(path, **o)):
        with pytest.raises((ValueError, TypeError), match="columns: expected"):
            make(columns=columns)


# -- "common" --------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("options", [{}, {"enable_cache": False}, {"cache_size": 1}], ids=str)
def test_a_batch_has_what_every_trajectory_of_the_window_has(
    trajectory_format: str, options: Any, tmp_path: Path
) -> None:
    options |= {"auto_save": True, "auto_save_path": tmp_path, "sample_window_size": 2}
    options |= {"trajectory_format": trajectory_format, "columns": "common"}
    with TrajectoryReplayBuffer(**options) as buffer:
        seen: set[int] = set()
        for number, (columns, common) in enumerate(
            [(MANY, MANY), (FEW, FEW), (MANY, FEW), (MANY, MANY), (MANY[::-1], MANY)]
        ):
            buffer.add_trajectories([trajectory(number, columns)])
            for _ in range(2):  # before it is written, and after
                seen = check(buffer.sample(60), common)
                assert seen == set(range(max(0, number - 1), number + 1))
                assert [c.name for c in buffer.schema.columns] == names(buffer.sample(1))
                buffer.flush()
                buffer.clear_cache()
        for number, columns in enumerate([MANY, FEW, MANY, MANY, MANY]):
            kept = buffer.get_trajectory(number).to_columns()
            assert sorted(names(kept)) == sorted(columns)
            assert (kept["obs"]["state"] == number).all()


@FORMATS
def test_files_keep_what_came_and_every_way_brings_it_on(
    trajectory_format: str, tmp_path: Path
) -> None:
    columns = (FEW, MANY, FEW, ("rewards", "late"), MANY)
    path = mixed(tmp_path / "store", *columns, trajectory_format=trajectory_format)
    ways = {"store": path, "saved": tmp_path / "saved"}
    with TrajectoryReplayBuffer(columns="common") as buffer:
        buffer.load_checkpoint(path)
        buffer.save_checkpoint(ways["saved"])
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path / "loaded", columns="common"
    ) as buffer:
        buffer.load_checkpoint(path)
        assert check(buffer.sample(60), ["rewards"]) == {0, 1, 2, 3, 4}
        buffer.add_trajectories([trajectory(5, FEW)])
    ways["loaded"] = tmp_path / "loaded"
    for name in ("npy", "arrow"):
        ways[name] = tmp_path / name
        convert(path, ways[name], name)
    ways["merged"] = tmp_path / "merged"
    merge([path], ways["merged"], order="appended")
    for way in ways.values():
        assert health.verify(way) == []
        assert not health.repair(way).has_changes
        with ReplayReader(way, columns="common") as reader:
            assert check(reader.sample(60), ["rewards"]) >= {0, 1, 2, 3, 4}
            for number, of in enumerate(columns):
                kept = reader.get_trajectory(number).to_columns()
                assert sorted(names(kept)) == sorted(of)
                assert all((leaf == number).all() for leaf in _tensors(kept))


def _tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, dict):
        return [leaf for value in node.values() for leaf in _tensors(value)]
    return [node] if isinstance(node, torch.Tensor) else []


def test_a_split_and_a_rank_have_the_columns_of_their_own(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW, FEW, MANY, MANY)
    split(path, tmp_path / "parts", num_shards=2)
    for rank, columns in enumerate((FEW, MANY)):
        with ReplayReader(tmp_path / "parts" / f"rank_{rank}") as reader:  # one schema each
            assert check(reader.sample(60), columns) == {2 * rank, 2 * rank + 1}
        with TrajectoryReplayBuffer() as buffer, pytest.raises(SchemaError):
            buffer.load_checkpoint(path, True, rank, 2)
        with TrajectoryReplayBuffer(columns="common") as buffer:
            buffer.load_checkpoint(path, True, rank, 2)
            assert check(buffer.sample(60), columns) == {2 * rank, 2 * rank + 1}


def test_a_merge_of_stores_with_other_columns_is_to_be_asked_for(tmp_path: Path) -> None:
    parts = [mixed(tmp_path / str(i), columns) for i, columns in enumerate((FEW, MANY))]
    with pytest.raises(SchemaError, match='Merge with columns "common"'):
        merge(parts, tmp_path / "merged")
    merge(parts, tmp_path / "merged", columns="common")
    with ReplayReader(tmp_path / "merged", columns="common") as reader:
        assert check(reader.sample(60), FEW) == {0}
        assert names(reader.get_trajectory(1).to_columns()) == list(MANY)


def test_several_stores_are_one_window_of_what_all_have(tmp_path: Path) -> None:
    for i, columns in enumerate((FEW, MANY)):
        mixed(tmp_path / f"rank_{i}", columns)
    with pytest.raises(SchemaError, match=r'columns="common"'):
        ReplayReader(tmp_path / "rank_*")
    with ReplayReader(tmp_path / "rank_*", columns="common") as reader:
        assert names(reader.sample(60)) == list(FEW)
        mixed(tmp_path / "rank_2", ("rewards", "late"))
        reader._stores._looked_at = 0.0
        assert names(reader.sample(60)) == ["rewards"]


def test_a_reader_follows_columns_that_come_and_go(tmp_path: Path) -> None:
    options: Any = {"auto_save": True, "auto_save_path": tmp_path, "columns": "common"}
    with (
        TrajectoryReplayBuffer(**options) as buffer,
        ReplayReader(tmp_path, sample_window_size=2, columns="common") as reader,
    ):
        for number, (columns, common) in enumerate(
            [(FEW, FEW), (MANY, FEW), (MANY, MANY), (FEW, FEW)]
        ):
            buffer.add_trajectories([trajectory(number, columns)])
            buffer.flush()
            assert check(reader.sample(60), common) == set(range(max(0, number - 1), number + 1))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"state": torch.zeros(4, 3, 8)}, "column 'state': expected float32 rows of shape"),
        ({"state": torch.zeros(4, 3, 7).double()}, "column 'state': expected float32 rows of"),
        (
            {"state": {"x": torch.zeros(4, 3)}},
            "column 'state': expected a leaf or a dict, got both",
        ),
        ({"state": 3}, "column 'state': expected a tensor or array"),
    ],
    ids=["row shape", "dtype", "dict", "no tensor"],
)
def test_a_column_of_another_kind_stays_an_error_and_nothing_is_kept(
    other: Any, message: str, tmp_path: Path
) -> None:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, columns="common"
    ) as buffer:
        buffer.add_trajectories([trajectory(0, ("rewards", "state"))])
        buffer.add_trajectories([trajectory(1, ("rewards",))])
        with pytest.raises(SchemaError) as raised:
            buffer.add_trajectories([trajectory(2, ("rewards", "late")) | other])
        assert str(raised.value).startswith(message)
        assert buffer.trajectory_ids == [0, 1]
        assert check(buffer.sample(60), ["rewards"]) == {0, 1}


def test_trajectories_without_a_common_column_are_told_when_they_are_sampled() -> None:
    with TrajectoryReplayBuffer(columns="common", sample_window_size=2) as buffer:
        with pytest.raises(EmptyBufferError):
            buffer.sample(3)
        buffer.add_trajectories([trajectory(0, ("state",)), trajectory(1, ("rewards",))])
        with pytest.raises(SchemaError, match="a column that every trajectory of the window has"):
            buffer.sample(3)
        buffer.add_trajectories([trajectory(2, ("rewards",))])
        assert check(buffer.sample(60), ["rewards"]) == {1, 2}


def test_an_old_batch_is_refilled_only_while_it_fits() -> None:
    with TrajectoryReplayBuffer(columns="common", sample_window_size=2) as buffer:
        buffer.add_trajectories([trajectory(0, MANY)])
        out = buffer.sample(16)
        buffer.add_trajectories([trajectory(1, MANY)])
        check(buffer.sample(16, out=out), MANY)
        buffer.add_trajectories([trajectory(2, FEW)])
        with pytest.raises(SchemaError, match="of out: expected none, since not every"):
            buffer.sample(16, out=out)


def test_the_schema_is_free_again_after_clear(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, columns="common"
    ) as buffer:
        buffer.add_trajectories([trajectory(0, FEW), trajectory(1, MANY)])
        buffer.clear()
        buffer.add_trajectories([{"state": torch.ones(2, 1, dtype=torch.int64)}])
        buffer.flush()
    with ReplayReader(tmp_path) as reader:
        assert reader.sample(2)["state"].tolist() == [1, 1]


def test_samplers_see_the_columns_that_all_have() -> None:
    with TrajectoryReplayBuffer(columns="common") as buffer:
        for number in range(3):
            buffer.add_trajectories([trajectory(number, (*FEW, "late")[: 2 + number % 2])])
        assert check(buffer.sample(36, sampler=WithoutReplacement()), FEW) == {0, 1, 2}
        stepped = buffer.sample(5, sampler=NStep(2, gamma=1.0))
        assert set(names(stepped)) == {*FEW, "discount"}
        slices = buffer.sample(3, sampler=Slices(2))
        assert slices["obs"]["state"].shape == (3, 2, 7)


def test_a_store_of_one_schema_is_written_as_before(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", MANY, MANY)
    lines = [json.loads(line) for line in (path / JOURNAL).read_bytes().splitlines()]
    assert [line.get("version") for line in lines if line["event"] == "schema"] == [1]
    assert not any("schema" in line["entry"] for line in lines if line["event"] == "add")
    snapshot = json.loads((path / "trajectory_index.json").read_bytes())
    assert snapshot["version"] == 1
    assert "more_schemas" not in snapshot


def test_an_older_mmbuf_is_told_by_the_version_of_the_second_schema(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW, MANY, FEW)
    lines = [json.loads(line) for line in (path / JOURNAL).read_bytes().splitlines()]
    assert [line["version"] for line in lines if line["event"] == "schema"] == [1, 3]
    numbers = [line["entry"].get("schema") for line in lines if line["event"] == "add"]
    assert numbers == [None, 1, None]
    assert json.loads((path / "trajectory_index.json").read_bytes())["version"] == 3
    contents, _ = read(str(path))
    assert [len(e.schema.columns) for e in contents.entries.values() if e.schema] == [2, 6, 2]


def test_left_out_steps_and_several_schemas_are_told_in_one_journal(tmp_path: Path) -> None:
    """A newer version of a known schema is no other schema."""
    path = tmp_path / "store"
    late = trajectory(1, FEW)
    late["obs"]["state"] = torch.cat([late["obs"]["state"], torch.full((1, 3, 7), 9.0)])
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, columns="common") as buffer:
        buffer.add_trajectories([trajectory(0, FEW)])
        buffer.add_trajectories([late])
        buffer.add_trajectories([trajectory(2, MANY), trajectory(3, FEW)])
        buffer.flush()
        state = buffer.get_trajectory(1).to_columns()["obs"]["state"]
        assert torch.equal(state, late["obs"]["state"])
    lines = [json.loads(line) for line in (path / JOURNAL).read_bytes().splitlines()]
    assert [line["version"] for line in lines if line["event"] == "schema"] == [1, 2, 3]
    numbers = [line["entry"].get("schema") for line in lines if line["event"] == "add"]
    assert numbers == [None, None, 1, None]
    for contents in (read(str(path))[0], salvage(str(path))):
        assert len(contents.schemas) == 2
    with ReplayReader(path, columns="common") as reader:
        assert check(reader.sample(200), FEW) == {0, 1, 2, 3}
        assert torch.equal(reader.get_trajectory(1).to_columns()["obs"]["state"], state)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))],
    ids=["deepcopy", "pickle"],
)
def test_a_buffer_in_memory_is_copied_with_the_columns_of_each(copied: Any) -> None:
    with TrajectoryReplayBuffer(columns="common") as buffer:
        buffer.add_trajectories([trajectory(i, c) for i, c in enumerate([MANY, FEW, MANY])])
        with copied(buffer) as made:
            assert sorted(names(made.get_trajectory(2).to_columns())) == sorted(MANY)
            assert sorted(names(made.get_trajectory(1).to_columns())) == sorted(FEW)
            assert check(made.sample(99), FEW) == {0, 1, 2}
            made.add_trajectories([trajectory(3, [*FEW, "late"])])
            assert check(made.sample(200), FEW) == {0, 1, 2, 3}


def test_a_repair_of_a_damaged_journal_keeps_every_schema(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW, MANY, FEW)
    journal = path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    (number,) = [i for i, line in enumerate(lines) if b'"trajectory_id": 0' in line]
    lines[number] = b"x" + lines[number][1:]
    journal.write_bytes(b"".join(lines))
    report = health.repair(path)
    assert (report.num_trajectories, report.quarantined) == (3, {})
    with ReplayReader(path, columns="common") as reader:
        assert check(reader.sample(60), FEW) == {0, 1, 2}
        assert names(reader.get_trajectory(1).to_columns()) == list(MANY)


def _without_second_schema(path: Path) -> None:
    journal = path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    _, second = [i for i, line in enumerate(lines) if b'"event": "schema"' in line]
    lines[second] = b"x" + lines[second][1:]
    journal.write_bytes(b"".join(lines))


def _without_index(path: Path) -> None:
    for name in (JOURNAL, "trajectory_index.json", "metadata.json"):
        (path / name).unlink()


@FORMATS
@pytest.mark.parametrize("damage", [_without_second_schema, _without_index])
def test_a_repair_that_finds_no_list_of_schemas_quarantines_no_whole_trajectory(
    damage: Any, trajectory_format: str, tmp_path: Path
) -> None:
    path = mixed(tmp_path / "store", FEW, MANY, FEW, trajectory_format=trajectory_format)
    damage(path)
    report = health.repair(path)
    assert (report.num_trajectories, report.quarantined) == (3, {})
    with ReplayReader(path, columns="common") as reader:
        assert check(reader.sample(60), FEW) == {0, 1, 2}
        assert sorted(names(reader.get_trajectory(1).to_columns())) == sorted(MANY)
    assert health.verify(path) == []


def test_a_repair_without_an_index_quarantines_what_cannot_be_in_one_store(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW, FEW)
    other = mixed(tmp_path / "other", FEW[:1], FEW[:1], [*FEW[:1], "late"], FEW)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "int") as buffer:
        for _ in range(4):
            buffer.add_trajectories([{"rewards": torch.ones(4, 3, dtype=torch.int32)}])
    (misplaced,) = (tmp_path / "int").glob("trajectory_3_*")
    (fitting,) = other.glob("trajectory_2_*")
    for file in (misplaced, fitting):
        file.rename(path / file.name)
    _without_index(path)
    report = health.repair(path)
    assert (report.num_trajectories, list(report.quarantined)) == (3, [misplaced.name])
    with ReplayReader(path, columns="common") as reader:
        assert len(reader) == 3
        assert names(reader.sample(60)) == ["rewards"]


def test_tables_have_the_columns_that_all_have_and_say_what_some_lack(tmp_path: Path) -> None:
    path = mixed(tmp_path / "store", FEW, MANY, MANY)
    tables = Tables(path, columns="common")
    assert tables.left_out == {"obs.image": 2, "late": 2, "wide": 2, "text": 2}
    rows = tables.steps.to_arrow()
    assert rows["rewards"].to_pylist() == [0.0] * 12 + [1.0] * 12 + [2.0] * 12
    assert [set(row) for row in rows["obs.state"].to_pylist()] == [{i // 12} for i in range(36)]
    one = tables.only(1)
    assert one.left_out == {}
    assert set(one.steps.to_arrow()["late"].to_pylist()[0]) == {1.0}


@pytest.mark.parametrize("sampler", [Slices(2), NStep(2, 0.9)], ids=["slices", "nstep"])
def test_flags_that_only_some_trajectories_have_are_not_passed_over(sampler: Any) -> None:
    """Of a window that goes on without them episodes would end with their trajectories alone."""

    def flagged(number: int, *flags: str) -> Any:
        return trajectory(number, FEW) | {
            name: torch.zeros(4, 3, dtype=torch.bool) for name in flags
        }

    with TrajectoryReplayBuffer(columns="common", sample_window_size=2) as buffer:
        buffer.add_trajectories([flagged(0, "dones", "terminations", "truncations")])
        buffer.add_trajectories([flagged(1, "terminations", "truncations")])
        buffer.sample(9, sampler=sampler)  # these say each end too
        buffer.add_trajectories([flagged(2, "terminations")])
        with pytest.raises(SchemaError, match="'truncations': expected in all trajectories"):
            buffer.sample(9, sampler=sampler)
        buffer.add_trajectories([flagged(3)])
        with pytest.raises(SchemaError, match=r"roles=\{'termination': None\}"):
            buffer.sample(9, sampler=sampler)
        buffer.add_trajectories([flagged(4)])  # none of the window has any
        assert set(buffer.sample(99, sampler=sampler)["rewards"].reshape(-1).tolist()) >= {3.0}


def test_a_part_of_the_tables_has_the_columns_and_the_roles_of_its_own(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, columns="common"
    ) as buffer:
        flags = {"dones": torch.ones(4, 3, dtype=torch.bool)}
        buffer.add_trajectories([trajectory(0, FEW) | flags, trajectory(1, FEW)])
    tables = Tables(tmp_path, columns="common")
    assert tables.roles.unclear() == {"done": ["dones"]}
    with pytest.raises(SchemaError, match="'dones': expected in all trajectories"):
        tables.episodes.to_arrow()
    assert [tables.only(i).episodes.to_arrow().num_rows for i in (0, 1)] == [12, 3]
    told = Tables(tmp_path, columns="common", roles={"done": None})
    assert told.episodes.to_arrow().num_rows == 6
