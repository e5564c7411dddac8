"""The commands that show a store: what they print is what was stored, and a mistake is one line."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from data import contents_of, opened, trajectory
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

import mmbuf
from mmbuf import MmbufError, SchemaError, cli, files, storage
from mmbuf.analysis import Tables
from mmbuf.cli.plot import draw_episodes, draw_steps

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(mmbuf.__file__).parents[1]
PROGRAM = "from mmbuf.cli import main; main()"
by_format = pytest.mark.parametrize("trajectory_format", list(storage.FORMATS))


@pytest.fixture(scope="module", autouse=True)
def _fonts() -> None:
    """matplotlib holds the files of its fonts open for ever."""
    figure = Figure()
    figure.text(0, 0, "x")
    figure.savefig(io.BytesIO())


def rollout(i: int, num_steps: int = 2) -> dict[str, Any]:
    """Rewards ``i + 1`` in each step of two environments; the first one ends with it."""
    is_last = torch.arange(num_steps).reshape(-1, 1, 1) == num_steps - 1
    return {
        "rewards": torch.full((num_steps, 2, 1), i + 1.0),
        "dones": is_last & torch.tensor([[True], [False]]),
        "curr_obs": {
            "task": [["lift [red] block", "push"]] * num_steps,
            "image": torch.full((num_steps, 2, 5, 5, 3), i, dtype=torch.uint8),
        },
        "model_weights_id": f"v{i // 2}",
    }


def store(path: Path, count: int = 3, trajectory_format: str = "arrow") -> Path:
    """Trajectory ``i`` has ``i + 2`` steps."""
    with opened(path, trajectory_format=trajectory_format, sample_window_size=0) as buffer:
        buffer.add_trajectories([rollout(i, i + 2) for i in range(count)])
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def told(*arguments: object) -> Any:
    """What a command says with ``--json``."""
    ran = run(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def shown(*arguments: object) -> list[list[str]]:
    """The cells of a command's tables, line by line, their headers too."""
    ran = run(*arguments)
    assert ran.exit_code == 0, ran.output
    lines = [line for line in ran.stdout.splitlines() if line[:1] in ("│", "┃")]
    return [[cell.strip() for cell in line[1:-1].replace("┃", "│").split("│")] for line in lines]


def mistake(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one message of a command that fails."""
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    assert isinstance(failure.value.code, str)
    return failure.value.code


@by_format
def test_info_counts_what_is_there(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "store", trajectory_format=trajectory_format)
    found = told("info", path)
    times = [found.pop(name) for name in ("first_added_at", "last_added_at")]
    assert times == sorted(times)
    sizes = {column["name"]: column.pop("size_bytes") for column in found["columns"]}
    assert (sizes["rewards"], sizes["dones"], sizes["curr_obs.image"]) == (18 * 4, 18, 18 * 75)
    assert found == {
        "stores": [str(path)],
        "num_trajectories": 3,
        "num_rows": 18,
        "num_episodes": 6,
        "damaged": {},
        "size_bytes": sum(files.size_of(str(f)) for f in path.glob("trajectory_?_*")),
        "disk_bytes": sum(files.disk_bytes_of(str(f)) for f in path.glob("trajectory_?_*")),
        "formats": {trajectory_format: 3},
        "versions": {"v0": 2, "v1": 1},
        "writers": {},
        "roles": {"reward": "rewards", "done": "dones"},
        "unclear_roles": {},
        "columns": [
            {"name": "rewards", "dtype": "float32", "row_shape": [1]},
            {"name": "dones", "dtype": "bool", "row_shape": [1]},
            {"name": "curr_obs.task", "dtype": "text", "row_shape": []},
            {"name": "curr_obs.image", "dtype": "uint8", "row_shape": [5, 5, 3]},
        ],
    }


def test_info_is_one_screen_however_many_versions_there_are(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 40)
    ran = run("info", path)
    assert "trajectories  40\n" in ran.stdout
    versions = "v0: 2, v1: 2, v2: 2, ... (20 versions), v17: 2, v18: 2, v19: 2"
    assert f"versions      {versions}\n" in ran.stdout
    assert len(ran.stdout.splitlines()) < 24


def test_long_names_of_versions_stand_below_each_other(tmp_path: Path) -> None:
    names = [f"{i:036x}" for i in range(7)]
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([rollout(0) | {"model_weights_id": name} for name in names])
    lines = [*names[:3], "... (7 versions)", *names[4:]]
    told_lines = [line if "..." in line else f"{line}: 1" for line in lines]
    indented = ("\n" + " " * 14).join(told_lines)
    assert f"versions      {indented}\n" in run("info", tmp_path / "store").stdout
    cut = ["00000000...00000000", "00000000...00000001"]
    assert [row[4] for row in shown("ls", tmp_path / "store", "--limit", "2")[1:]] == cut


def test_info_names_the_writer_that_is_alive(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([rollout(0)])
        buffer.flush()
        found = told("info", tmp_path / "store")
        (writer,) = found["writers"].values()
        assert writer["pid"] == os.getpid()
        assert f"written by    process {os.getpid()} on " in run("info", tmp_path / "store").stdout
    assert told("info", tmp_path / "store")["writers"] == {}
    assert "written by    nobody now" in run("info", tmp_path / "store").stdout


def test_several_stores_and_patterns_are_shown_as_one(tmp_path: Path) -> None:
    paths = [store(tmp_path / f"rank_{rank}", 2) for rank in range(2)]
    for arguments in (paths, [tmp_path / "rank_*"]):
        found = told("info", *arguments)
        assert found["stores"] == [str(path) for path in paths]
        assert (found["num_trajectories"], found["num_rows"]) == (4, 20)
    stores = [row[1] for row in shown("ls", tmp_path / "rank_*")]
    assert stores == ["store", *[str(paths[0])] * 2, *[str(paths[1])] * 2]


def test_a_directory_of_rlinf_and_an_empty_store_are_shown(tmp_path: Path) -> None:
    found = told("info", FIXTURES / "rlinf_pt")
    assert found["formats"] == {"pt": 4}
    assert found["first_added_at"] is None
    store(tmp_path / "empty", 0)
    assert told("info", tmp_path / "empty")["num_rows"] == 0
    assert told("ls", tmp_path / "empty") == []
    assert told("stats", tmp_path / "empty") == {"columns": {}, "versions": {}}
    assert told("sql", tmp_path / "empty", "select * from steps") == []


def test_ls_lists_the_oldest_first(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    names = ["trajectory_id", "num_steps", "num_envs", "size_bytes", "model_weights_id", "added_at"]
    header, *rows = shown("ls", path)
    assert header == names
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        ("0", "2", "2", "v0"),
        ("1", "3", "2", "v0"),
        ("2", "4", "2", "v1"),
    ]


def test_ls_shows_what_differs_and_what_is_sorted_by(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for trajectory_format, max_length in (("arrow", 5), ("npy", 6)):
        with opened(path, trajectory_format=trajectory_format) as buffer:
            buffer.add_trajectories([rollout(0) | {"max_episode_length": max_length}])
    header, *rows = shown("ls", path, "--sort", "-num_samples")
    assert header == [
        *("trajectory_id", "num_steps", "num_envs", "num_samples", "size_bytes", "format"),
        *("model_weights_id", "max_episode_length", "added_at"),
    ]
    assert [(row[3], row[5], row[7]) for row in rows] == [("4", "arrow", "5"), ("4", "npy", "6")]


def test_ls_sorts_filters_and_limits(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 6)

    def ids(*options: object) -> list[int]:
        return [row["trajectory_id"] for row in told("ls", path, *options)]

    assert ids("--sort", "-num_steps") == [5, 4, 3, 2, 1, 0]
    assert ids("--sort", "num_samples", "--limit", "2") == [0, 1]
    assert ids("--where", "num_steps between 3 and 5 and model_weights_id <> 'v0'") == [2, 3]
    assert ids("--where", "num_steps > 3", "--sort", "-added_at", "--limit", "1") == [5]
    assert ids("--where", "false") == []


def test_ls_says_how_many_more_there_are(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 53)
    ran = run("ls", path)
    assert ran.stdout.endswith("3 more; all with --limit 0\n")
    assert len(shown("ls", path)) == 51
    assert len(shown("ls", path, "--limit", "0")) == 54
    assert len(told("ls", path)) == 53


def test_head_shows_the_first_rows_of_the_oldest(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    assert f"{path}: trajectory 0, 2 steps of 2 environments\n" in run("head", path).stdout
    assert shown("head", path, "--rows", "3") == [
        ["column", "dtype", "row shape", "row 0", "row 1", "row 2"],
        ["t", "", "", "0", "0", "1"],
        ["env", "", "", "0", "1", "0"],
        ["episode", "", "", "0", "0", "0"],
        ["rewards", "float32", "(1,)", "1", "1", "1"],
        ["dones", "bool", "(1,)", "no", "no", "yes"],
        ["curr_obs.task", "text", "()", "lift [red] block", "push", "lift [red] block"],
        ["curr_obs.image", "uint8", "(5, 5, 3)", "-", "-", "-"],
    ]


def test_head_shows_the_trajectory_asked_for_by_id_or_uuid(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    found = told("head", path, "--trajectory", "2", "--rows", "1")
    assert (found["trajectory_id"], found["num_steps"], found["store"]) == (2, 4, str(path))
    row = {"t": 0, "env": 0, "episode": 0, "rewards": 3.0, "dones": False}
    assert found["rows"] == [row | {"curr_obs.task": "lift [red] block"}]
    assert told("head", path, "--trajectory", found["uuid"], "--rows", "1") == found


def test_stats_are_those_of_all_rows(tmp_path: Path) -> None:
    found = told("stats", store(tmp_path / "store"))
    # Rows of reward 1, 2 and 3: 4, 6 and 8 of them.
    assert found["columns"]["rewards"] == {
        "num_finite": 18,
        "min": 1.0,
        "mean": pytest.approx(40 / 18),
        "std": pytest.approx(
            (4 * (11 / 9) ** 2 + 6 * (2 / 9) ** 2 + 8 * (7 / 9) ** 2) ** 0.5 / 18**0.5
        ),
        "max": 3.0,
        "num_nan": 0,
        "num_inf": 0,
    }
    assert list(found["columns"]) == ["rewards", "dones", "curr_obs.image"]
    one = {"mean": 9.0 + 3, **dict.fromkeys(("min", "p25", "median", "p75", "max"), 12.0)}
    assert found["versions"]["v1"] == {
        "num_trajectories": 1,
        "num_rows": 8,
        "num_episodes": 2,
        "num_open": 1,
        "returns": one,
        "lengths": dict.fromkeys(one, 4.0),
        "success_rate": None,
        "num_nan_returns": 0,
    }
    assert found["versions"]["v0"]["returns"]["mean"] == (2 + 6) / 2


def test_stats_show_the_first_and_the_last_of_many_versions(tmp_path: Path) -> None:
    ran = run("stats", store(tmp_path / "store", 20))
    assert ran.stdout.endswith("\n4 more versions; --json has all\n")
    found = shown("stats", tmp_path / "store")
    expected = ["version", "v0", "v1", "v2", "...", "v7", "v8", "v9"]
    tables = [found[start : start + 8] for start in (4, 12, 20)]
    assert [[row[0] for row in table] for table in tables] == [expected] * 3
    assert tables[0][1] == ["v0", "2", "4", "2"]
    assert tables[1][0][1:] == ["mean", "min", "p25", "median", "p75", "max"]
    assert tables[1][1][1:] == ["4", "2", "3", "4", "5", "6"]
    assert tables[2][1][1:] == ["2.5", "2", "2.25", "2.5", "2.75", "3"]
    assert [row[1:] for row in tables[1] if row[0] == "..."] == [[""] * 6]


def test_stats_count_what_is_no_number(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        values = torch.tensor([[float("nan"), float("inf")], [float("-inf"), 5.0]])
        buffer.add_trajectories([{"rewards": values}])
    assert shown("stats", tmp_path / "store")[:2] == [
        ["column", "min", "mean", "std", "max", "num_nan", "num_inf"],
        ["rewards", "5", "5", "0", "5", "1", "2"],
    ]
    assert told("stats", tmp_path / "store")["versions"][""]["returns"]["mean"] is None


QUERY = "select env, sum(rewards) as total from steps group by env order by env"


def test_sql_shows_a_table(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    assert shown("sql", path, QUERY) == [["env", "total"], ["0", "20"], ["1", "20"]]


def test_sql_prints_json_and_csv(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    assert told("sql", path, QUERY) == [{"env": 0, "total": 20}, {"env": 1, "total": 20}]
    assert run("sql", path, QUERY, "--csv").stdout == "env,total\n0,20.0\n1,20.0\n"


def test_sql_writes_lists_times_and_no_numbers_as_json_and_csv_can(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 1)
    query = (
        "select [1, 2] as list, 'nan'::float as x, null as nothing, 'a,\"b' as text, "
        "timestamp '2026-01-02 03:04:05' as time, 1.5::decimal(3, 1) as d"
    )
    (row,) = told("sql", path, query)
    assert row == {
        "list": [1, 2],
        "x": None,
        "nothing": None,
        "text": 'a,"b',
        "time": "2026-01-02T03:04:05",
        "d": "1.5",
    }
    rows = list(csv.reader(io.StringIO(run("sql", path, query, "--csv").stdout)))
    assert rows[1] == ["[1, 2]", "nan", "", 'a,"b', "2026-01-02 03:04:05", "1.5"]


def test_sql_writes_a_parquet_file_with_every_step(tmp_path: Path) -> None:
    path, target = store(tmp_path / "store"), tmp_path / "steps.parquet"
    ran = run("sql", path, "select * from steps", "--parquet", target)
    assert (ran.exit_code, ran.stdout) == (0, "")
    frame = pl.read_parquet(target)
    assert frame["rewards"].to_list() == [1.0] * 4 + [2.0] * 6 + [3.0] * 8
    assert frame["curr_obs.task"].to_list() == ["lift [red] block", "push"] * 9


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files in it; DuckDB's own home elsewhere."""
    path = tmp_path / "outside"
    (path / ".tmp").mkdir(parents=True)
    for name in ("secret.csv", ".tmp/secret.csv"):
        (path / name).write_text("a,b\n7,8\n")
    monkeypatch.chdir(path)
    return path


OUTSIDE = [
    *("select * from 'secret.csv'", "select * from read_csv('secret.csv')"),
    *("select * from '.tmp/secret.csv'", "select * from read_text('/proc/self/environ')"),
    *("select * from glob('*')", "select * from sniff_csv('secret.csv')"),
    *("copy steps to 'new.csv'", "copy steps to '.tmp/new.csv'", "copy steps to '/dev/stdout'"),
    *("create table t as select 1 as a; copy t from 'secret.csv'", "attach 'new.db'"),
    *("export database 'new'", "import database 'new'"),
    "from query('from read_csv(''secret.csv'')')",
    *("install httpfs", "load httpfs", "load 'secret.csv'"),
    "create persistent secret s (type http)",
    *("set enable_external_access = true", "reset enable_external_access", "set threads = 1"),
    *("set lock_configuration = false", "set allowed_directories = ['/']"),
    *("set temp_directory = '.'", "set profiling_output = 'new'"),
    "pragma enable_profiling = 'json'",
    "call enable_logging(storage = 'file', storage_config = {'path': 'new'})",
    "set enable_external_access = true; select * from 'secret.csv'",
    "create macro m(a) as table from read_csv(a); from m('secret.csv')",
    "prepare p as select * from read_text($1); execute p('secret.csv')",
]


@pytest.mark.parametrize("query", OUTSIDE)
def test_sql_opens_no_file_and_says_how_it_may(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    path = store(tmp_path / "store", 1)
    before = contents_of(tmp_path)
    found = mistake("sql", path, query, monkeypatch=monkeypatch)
    assert found.startswith("mmbuf: sql: ")
    assert found.endswith("mmbuf sql --allow-files")
    assert contents_of(tmp_path) == before


def test_a_condition_opens_no_file(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", 1)
    where = "exists (select * from read_csv('secret.csv'))"
    found = mistake("ls", path, "--where", where, monkeypatch=monkeypatch)
    assert found.startswith('mmbuf: --where: Permission Error: Cannot access file "secret.csv"')


def test_sql_sees_no_variables_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", 1)
    for options in ([], ["--allow-files"]):
        for name in ("tables", "paths", "rows"):
            found = mistake("sql", path, f"from {name}", *options, monkeypatch=monkeypatch)
            assert "does not exist" in found


def test_sql_opens_files_where_it_is_allowed(tmp_path: Path, outside: Path) -> None:
    path = store(tmp_path / "store", 1)
    query = (
        "copy (select a + 1 as c from 'secret.csv') to 'new.csv'; set threads = 1; from 'new.csv'"
    )
    assert told("sql", path, query, "--allow-files") == [{"c": 8}]
    assert (outside / "new.csv").read_text() == "c\n8\n"


@pytest.mark.parametrize("name", ["new.parquet", "it's, 'new'.parquet"])
def test_sql_writes_the_one_file_that_is_named(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = store(tmp_path / "store", 1)
    for total in (4, 8):  # the second time another is put into its place
        query = f"select sum(rewards) * {total} // 4 as total from steps"
        assert run("sql", path, query, "--parquet", name).exit_code == 0
        assert pl.read_parquet(outside / name)["total"].to_list() == [total]
    found = mistake("sql", path, "from 'secret.csv'", "--parquet", name, monkeypatch=monkeypatch)
    assert "Cannot access file" in found
    assert sorted(os.listdir(outside)) == sorted([".tmp", "secret.csv", name])


def test_sql_writes_over_no_neighbour_of_the_file_that_is_named(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", 1)
    (outside / "tmp_o.parquet").write_bytes(b"precious")
    for name in ("tmp_o.parquet", "o.parquet"):
        query = f"copy (select 5 as z) to '{name}' (format parquet); select 1 as a"
        found = mistake("sql", path, query, "--parquet", "o.parquet", monkeypatch=monkeypatch)
        assert "Cannot access file" in found
        assert sorted(os.listdir(outside)) == [".tmp", "secret.csv", "tmp_o.parquet"]
    assert run("sql", path, "select 1 as a", "--parquet", "o.parquet").exit_code == 0
    assert pl.read_parquet(outside / "o.parquet")["a"].to_list() == [1]
    assert (outside / "tmp_o.parquet").read_bytes() == b"precious"


def test_sql_says_what_to_do_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", 1)
    connect = Tables.connect

    def small(self: Tables, *arguments: Any, **options: Any) -> Any:
        connection = connect(self, *arguments, files=None)
        connection.execute("set memory_limit = '20MB'; set temp_directory = ''")
        return connection

    monkeypatch.setattr(Tables, "connect", small)
    query = "select range, repeat('x', 100) from range(10_000_000) order by 2, 1 desc"
    found = mistake("sql", path, query, monkeypatch=monkeypatch)
    assert found.endswith("into files what memory does not hold: mmbuf sql --allow-files")
    found = mistake("sql", path, query, "--allow-files", monkeypatch=monkeypatch)
    assert "--allow-files" not in found


def test_sql_reads_wide_columns_where_the_query_names_them(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    assert "curr_obs.image" not in told("sql", path, "select * from steps limit 1")[0]
    query = 'select sum(list_sum("curr_obs.image")) as total from steps'
    assert told("sql", path, query) == [{"total": 75 * (6 * 1 + 8 * 2)}]


def test_sql_says_that_there_are_more_rows(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    ran = run("sql", path, "select t from steps", "--limit", "4")
    assert ran.stdout.endswith("the first 4 rows; all with --limit 0\n")
    assert len(shown("sql", path, "select t from steps", "--limit", "4")) == 5
    assert len(shown("sql", path, "select t from steps", "--limit", "0")) == 19
    assert "first" not in run("sql", path, "select t from steps", "--limit", "18").stdout


def test_text_of_a_store_is_no_markup(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 1)
    query = "select distinct \"curr_obs.task\" as task, ':smile:' as x from steps order by 1"
    assert shown("sql", path, query)[1] == ["lift [red] block", ":smile:"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sql", "STORE", "select nope from steps"], 'sql: Binder Error: .*"nope" not found'),
        (["sql", "STORE", "selekt 1"], "sql: Parser Error"),
        (["sql", "STORE", "select * from paths"], "sql: Catalog Error: .*paths does not exist"),
        (["sql", "STORE", "insert into steps values (1)"], "sql: Catalog Error"),
        (["sql", "STORE", " "], "sql: expected a query"),
        (["sql", "STORE", "select 1", "--csv", "--json"], "expected one of --csv, --json"),
        (["sql", "STORE", "select 1", "--parquet", "STORE/no/x"], "sql: IO Error"),
        (["ls", "STORE", "--where", "nope > 1"], '--where: Binder Error: .*"nope" not found'),
        (["ls", "STORE", "--sort", "nope"], "--sort: expected one of trajectory_id, .*'nope'"),
        (["head", "STORE", "--trajectory", "9"], "trajectory 9: expected the id or uuid of one"),
        (["head", "STORE", "--trajectory", "x"], "trajectory x: expected the id or uuid of one"),
        (["head", "EMPTY"], "expected a trajectory, got an empty store"),
        (["info", "STORE/none"], "none: expected a store directory, got none"),
        (["info", "STORE/none_*"], r"none_\*: expected a store, got none"),
        (["plot", "STORE", "--out", "STORE/x.xyz"], "--out: Format 'xyz' is not supported"),
        (["plot", "STORE", "--out", "STORE/none/x.png"], "No such file or directory"),
        (["plot", "EMPTY", "--out", "STORE/x.png"], "expected a trajectory, got an empty store"),
        (["plot", "STORE", "--out", "STORE/x.png", "--env", "0"], "expected --trajectory with it"),
        (
            ["plot", "STORE", "--out", "STORE/x.png", "--trajectory", "0", "--env", "2"],
            "--env: expected one of 2 environments, got 2",
        ),
        (
            ["stats", "OTHER", "STORE"],
            r"column '.*': expected .* rows of shape .*, as in other trajectories, got .* rows",
        ),
    ],
)
def test_a_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    path = store(tmp_path / "store", 1)
    store(tmp_path / "empty", 0)
    with opened(tmp_path / "other") as buffer:
        buffer.add_trajectories([trajectory(0)])
    places = {"STORE": path, "EMPTY": tmp_path / "empty", "OTHER": tmp_path / "other"}
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    found = mistake(*arguments, monkeypatch=monkeypatch)
    assert found.startswith("mmbuf: ")
    assert re.search(message, found), found


@pytest.mark.parametrize("command", [["info"], ["stats"], ["head"], ["sql", "select * from steps"]])
def test_a_damaged_file_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    path = store(tmp_path / "store", 1)
    (file,) = path.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(sys, "argv", ["mmbuf", command[0], str(path), *command[1:]])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    # It ends there, or goes on with the others.
    told = capsys.readouterr().err if failure.value.code == 1 else str(failure.value.code)
    assert f"mmbuf: {file}: expected 3698 bytes, got 3697." in told
    assert f"mmbuf verify {path}" in told


def test_without_duckdb_only_what_needs_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", 1)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    for command in (["sql", path, "select 1"], ["ls", path, "--where", "true"]):
        found = mistake(*command, monkeypatch=monkeypatch)
        assert found == 'mmbuf: duckdb is missing. Install it: pip install "mmbuf[analysis]"'
    for name in ("info", "ls", "head", "stats"):
        assert run(name, path).exit_code == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a terminal of its own")
def test_a_terminal_shows_the_progress_and_json_stays_clean(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    master, terminal = pty.openpty()
    try:
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, "sql", str(path), QUERY, "--json"],
            stdout=subprocess.PIPE,
            stderr=terminal,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
            timeout=60,
            check=True,
        )
        written = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(terminal)
    assert json.loads(ran.stdout) == [{"env": 0, "total": 20}, {"env": 1, "total": 20}]
    assert "reading" in written
    assert "3/3" in written


def test_a_plot_of_a_store_has_every_episode_in_the_order_of_addition(tmp_path: Path) -> None:
    figure, _ = draw_episodes(Tables(store(tmp_path / "store")))
    drawn = [axis.collections[0] for axis in figure.axes]
    points = [points.get_offsets().tolist() for points in drawn]
    assert points[0] == [[0, 2], [0, 2], [1, 6], [1, 6], [2, 12], [2, 12]]
    assert points[1] == [[0, 2], [0, 2], [1, 3], [1, 3], [2, 4], [2, 4]]
    assert points[2] == [[0, 1], [1, 2], [2, 3]]
    alphas = drawn[0].get_facecolors()[:, 3].tolist()
    assert alphas == [1, 0.3] * 3  # the second environment's never end
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["v0", "v1"]


def test_a_plot_of_many_versions_has_a_bar_of_their_colours(tmp_path: Path) -> None:
    figure, _ = draw_episodes(Tables(store(tmp_path / "store", 22)))
    *axes, bar = figure.axes
    assert (len(axes), figure.legends) == (3, [])
    assert bar.get_ylabel() == "version, from the first to the last"
    assert bar.get_ylim() == (0, 10)


def test_a_plot_of_a_trajectory_has_its_numbers_and_frames(tmp_path: Path) -> None:
    t = torch.arange(30).reshape(30, 1, 1)
    fields = {
        "rewards": (t[..., 0] * torch.tensor([[1, -1]])).float(),
        "actions": torch.cat([t, t + 1], -1).expand(30, 2, 2).bfloat16(),
        "dones": (t == 29).expand(30, 2, 1),
        "image": t.reshape(30, 1, 1, 1, 1).expand(30, 2, 8, 8, 1).to(torch.uint8),
        "wrist": torch.full((30, 2, 3, 9, 16), 0.5),
        "hidden": torch.zeros(30, 2, 100),
    }
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([fields])
    figure = draw_steps(Tables(tmp_path / "store").only(0), 1)
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels == ["rewards", "actions", "dones", "image", "wrist"]
    axes = dict(zip(labels, figure.axes, strict=True))
    assert axes["rewards"].lines[0].get_ydata().tolist() == [-float(t) for t in range(30)]
    assert [line.get_ydata()[2] for line in axes["actions"].lines] == [2, 3]
    assert axes["dones"].lines[0].get_ydata().tolist() == [0.0] * 29 + [1.0]
    strip = axes["image"].images[0].get_array()
    assert strip.shape == (8, 80, 3)
    assert strip[0, ::8, 0].tolist() == [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]
    strip = axes["wrist"].images[0].get_array()
    assert (strip.shape, strip.min(), strip.max()) == ((9, 160, 3), 0.5, 0.5)


@pytest.mark.parametrize("options", [[], ["--trajectory", "1"]])
def test_plot_writes_a_picture(tmp_path: Path, options: list[str]) -> None:
    path, picture = store(tmp_path / "store"), tmp_path / "picture.png"
    counts = {} if options else {"num_nan_returns": 0}
    assert told("plot", path, "--out", picture, *options) == {"file": str(picture)} | counts
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_rewards_has_lengths(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([{"actions": torch.zeros(3, 2, 1)}])
    figure, _ = draw_episodes(Tables(tmp_path / "store"))
    assert figure.axes[1].collections[0].get_offsets().tolist() == [[0, 3], [0, 3]]


def with_nan(path: Path) -> Path:
    """40 episodes of 24 rows and reward 1 a row; of 4 rows, in 3 episodes, it is NaN."""
    rewards = torch.ones(240, 4)
    for t, b in ((0, 0), (1, 0), (30, 1), (239, 3)):
        rewards[t, b] = torch.nan
    dones = (torch.arange(240) % 24 == 23)[:, None].expand(240, 4)
    with opened(path) as buffer:
        buffer.add_trajectories([{"rewards": rewards, "dones": dones}])
    return path


def test_stats_go_on_with_the_rest_where_rewards_are_nan_and_say_how_many(tmp_path: Path) -> None:
    path = with_nan(tmp_path / "store")
    found = told("stats", path)
    assert found["columns"]["rewards"]["num_nan"] == 4
    assert found["versions"][""]["num_nan_returns"] == 3
    assert set(found["versions"][""]["returns"].values()) == {24.0}
    assert (
        "returns of episodes, but of 3 that have a reward that is NaN\n"
        in run("stats", path).stdout
    )


def test_plot_goes_on_with_the_rest_where_rewards_are_nan_and_says_how_many(tmp_path: Path) -> None:
    path, picture = with_nan(tmp_path / "store"), tmp_path / "picture.png"
    ran = run("plot", path, "--out", picture)
    line = "3 episodes have a reward that is NaN; their returns are left out"
    assert ran.stdout.splitlines() == [line, str(picture)]
    figure, num_nan = draw_episodes(Tables(path))
    returns, lengths, means = (axis.collections[0].get_offsets() for axis in figure.axes[:3])
    assert num_nan == 3
    assert (len(returns), len(lengths)) == (37, 40)
    assert means.tolist() == [[0, 1]]


def d4rl(path: Path, **more: torch.Tensor) -> Path:
    """Two episodes of two steps, with reward 1 and 3."""
    with opened(path) as buffer:
        buffer.add_trajectories(
            [
                {
                    "observations": torch.zeros(4, 1, 2),
                    "next_observations": torch.zeros(4, 1, 2),
                    "rewards": torch.tensor([[0.0], [1.0], [1.0], [2.0]]),
                    "terminals": torch.tensor([[0], [1], [0], [0]]),
                    "timeouts": torch.tensor([[0], [0], [0], [1]]),
                    **more,
                }
            ]
        )
    return path


def test_info_says_which_roles_the_columns_were_taken_for(tmp_path: Path) -> None:
    path = d4rl(tmp_path / "store")
    assert told("info", path)["roles"] == {
        "reward": "rewards",
        "termination": "terminals",
        "truncation": "timeouts",
        "next.observations": "next_observations",
    }
    lines = [line.strip() for line in run("info", path).stdout.splitlines()]
    at = lines.index("roles         reward: rewards")
    assert lines[at + 1 : at + 4] == [
        "termination: terminals",
        "truncation: timeouts",
        "next.observations: next_observations",
    ]
    assert told("info", path)["num_episodes"] == 2


def test_commands_take_roles_and_info_says_what_is_unclear(tmp_path: Path) -> None:
    path = d4rl(tmp_path / "store", terminated=torch.ones(4, 1), reward=torch.ones(4, 1))
    found = told("info", path)
    assert found["num_episodes"] is None
    assert found["unclear_roles"] == {
        "reward": ["rewards", "reward"],
        "termination": ["terminals", "terminated"],
    }
    shown_info = run("info", path).stdout
    assert "termination is unclear: terminals or terminated; say it with --role\n" in shown_info
    assert isinstance(run("stats", path).exception, SchemaError)
    roles = ["--role", "termination=terminated", "--role", "reward=reward"]
    assert told("info", path, *roles)["num_episodes"] == 4
    assert told("stats", path, *roles)["versions"][""]["returns"]["mean"] == 1
    found = told("sql", path, "select sum(episode_return) as total from episodes", *roles)
    assert found == [{"total": 4}]
    assert told("watch", path, "--once", *roles)["returns"] == [1, 1, 1, 1]
    told("plot", path, "--out", tmp_path / "picture.png", *roles)
    assert told("head", path, *roles)["rows"][1]["episode"] == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("reward", "--role: expected NAME=COLUMN, got 'reward'"),
        ("rewards=r", "--role: roles: expected reward, .* got 'rewards'"),
        ("reward=nothing", r"roles\['reward'\]: expected one of observations, .*got 'nothing'"),
    ],
    ids=["no column", "no role", "no such column"],
)
def test_a_role_that_cannot_be_is_one_message(tmp_path: Path, option: str, message: str) -> None:
    ran = run("info", d4rl(tmp_path / "store"), "--role", option)
    assert isinstance(ran.exception, MmbufError)
    assert re.search(message, str(ran.exception))
