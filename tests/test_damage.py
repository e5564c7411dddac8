"""One damaged file stops no command that can go on: it is named, with what mends the store."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data import opened
from matplotlib.figure import Figure
from typer.testing import CliRunner

from mmbuf import CorruptError, cli, doctor, files, storage
from mmbuf.analysis import Tables, summarize

COUNT = 4
DAMAGED = 2  # the id of the trajectory


@pytest.fixture(scope="module", autouse=True)
def _fonts() -> None:
    """matplotlib holds the files of its fonts open for ever."""
    figure = Figure()
    figure.text(0, 0, "x")
    figure.savefig(io.BytesIO())


def store(path: Path, trajectory_format: str = "arrow") -> Path:
    with opened(path, trajectory_format=trajectory_format, sample_window_size=0) as buffer:
        for i in range(COUNT):
            buffer.add_trajectories(
                [
                    {
                        "rewards": torch.full((3, 2), 3.0 * i),
                        "dones": torch.arange(3).reshape(3, 1).expand(3, 2) == 2,
                        "curr_obs": {"states": torch.full((3, 2, 5), float(i))},
                    }
                ]
            )
    return path


def file_of(path: Path) -> Path:
    (found,) = path.glob(f"trajectory_{DAMAGED}_*")
    return found


def _part(file: Path) -> Path:
    """The file, or one of the many that it is, which holds the end flags."""
    return next(file.glob("*dones*")) if file.is_dir() else file


def truncated(file: Path) -> None:
    part = _part(file)
    part.write_bytes(part.read_bytes()[:-1])


def grown(file: Path) -> None:
    with _part(file).open("ab") as target:
        target.write(b"x")


def missing(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def zeroed_head(file: Path) -> None:
    part = _part(file)
    data = part.read_bytes()
    part.write_bytes(bytes(16) + data[16:])


def empty(file: Path) -> None:
    _part(file).write_bytes(b"")


def replaced(file: Path) -> None:
    missing(file)
    file.write_bytes(b"x") if file.suffix == ".npy" else file.mkdir()


DAMAGES = [truncated, grown, missing, zeroed_head, empty, replaced]
by_damage = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
by_format = pytest.mark.parametrize("trajectory_format", list(storage.FORMATS))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def message(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    return str(failure.value.code)


def check_told(path: Path, ran: Any) -> None:
    """That a command named the file, counted it, and named the two commands."""
    assert ran.exit_code == 1, ran.output
    assert not ran.exception or isinstance(ran.exception, SystemExit)
    first, last = ran.stderr.splitlines()
    assert first.startswith(f"mmbuf: {file_name(path)}")
    assert last == (
        f"mmbuf: left out 1 of {COUNT} trajectories. All that is wrong: mmbuf verify {path}. "
        f"To set it aside: mmbuf repair {path}"
    )


def file_name(path: Path) -> str:
    return str(path / f"trajectory_{DAMAGED}_")


@by_damage
@by_format
def test_what_can_be_read_is_shown_and_what_cannot_is_named(
    tmp_path: Path, trajectory_format: str, damage: Callable[[Path], None]
) -> None:
    path = store(tmp_path / "store", trajectory_format)
    damage(file_of(path))
    ran = run("stats", path, "--json")
    check_told(path, ran)
    rewards = json.loads(ran.stdout)["columns"]["rewards"]
    assert (rewards["num_finite"], rewards["mean"]) == (3 * 6, (0 + 3 + 9) / 3)
    ran = run("sql", path, "select count(*), sum(rewards), sum(dones::int) from steps", "--csv")
    check_told(path, ran)
    assert ran.stdout.splitlines()[1] == "18,72.0,6"


@pytest.mark.parametrize("damage", [truncated, missing], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", ["info", "ls", "stats", "plot", "sql"])
def test_each_command_goes_on_with_the_rest(
    tmp_path: Path, command: str, damage: Callable[[Path], None]
) -> None:
    path = store(tmp_path / "store")
    damage(file_of(path))
    more = {
        "plot": ["--out", tmp_path / "plot.svg"],
        "sql": ["select count(*) as n from episodes"],
    }.get(command, [])
    ran = run(command, path, *more)
    check_told(path, ran)
    assert ran.stdout
    if command == "info":
        assert "damaged       1 trajectories\n" in ran.stdout
        assert "episodes      6\n" in ran.stdout
        told = json.loads(run("info", path, "--json").stdout)
        assert list(told["damaged"]) == [str(p) for p in [file_path(path)]]
    if command == "sql":
        assert "│ 6 │" in ran.stdout
    if command == "plot":
        assert (tmp_path / "plot.svg").exists()


def file_path(path: Path) -> str:
    (entry,) = [entry for entry, _ in Tables(path).entries if entry.trajectory_id == DAMAGED]
    return str(path / entry.file)


def test_a_store_of_which_nothing_can_be_read_is_no_traceback(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    for file in path.glob("trajectory_?_*"):
        truncated(file)
    for arguments in (
        ("info", path),
        ("ls", path),
        ("stats", path),
        ("plot", path, "--out", tmp_path / "plot.svg"),
        ("sql", path, "select * from steps"),
    ):
        ran = run(*arguments)
        assert ran.exit_code == 1
        assert isinstance(ran.exception, SystemExit), ran.exception
        assert f"left out {COUNT} of {COUNT} trajectories." in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["head", "STORE", "--trajectory", "2"],
        ["plot", "STORE", "--trajectory", "2", "--out", "OUT.svg"],
        ["merge", "STORE", "OUT"],
        ["convert", "STORE", "OUT", "--format", "npy"],
        ["split", "STORE", "OUT", "--shards", "2"],
        ["export", "STORE", "OUT", "--to", "parquet"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_cannot_go_on_names_the_file_and_the_two_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    path = store(tmp_path / "a store")
    truncated(file_of(path))
    places = {"STORE": str(path), "OUT": str(tmp_path / "out")}
    filled = [
        argument.replace("STORE", places["STORE"]).replace("OUT", places["OUT"])
        for argument in arguments
    ]
    told = message(monkeypatch, *filled)
    assert "\n" not in told
    assert told.startswith(f"mmbuf: {file_name(path)}")
    assert told.endswith(
        f" All that is wrong: mmbuf verify '{path}'. To set it aside: mmbuf repair '{path}'"
    )


def test_a_part_of_an_npy_trajectory_names_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store", "npy")
    zeroed_head(file_of(path))
    told = message(monkeypatch, "head", path, "--trajectory", DAMAGED)
    assert told.endswith(f"To set it aside: mmbuf repair {path}")


@pytest.mark.parametrize("error", ["EIO", "EACCES"])
def test_a_file_that_the_system_does_not_give_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    path = store(tmp_path / "store")
    number = getattr(errno, error)
    really = files._open

    def fail(name: str, flags: int) -> int:
        if name.startswith(file_name(path)):
            raise OSError(number, os.strerror(number), name)
        return really(name, flags)

    monkeypatch.setattr(files, "_open", fail)
    tables = Tables(path, skip_damaged=True)
    assert summarize(tables).columns["rewards"].num_finite == 18
    assert list(tables.skipped.values()) == [f"could not be read: {os.strerror(number)}."]
    with pytest.raises(OSError, match=os.strerror(number)):
        summarize(Tables(path))


def test_what_is_the_process_s_fault_is_an_error_also_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "store")

    def fail(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files", name)

    tables = Tables(path, skip_damaged=True)
    monkeypatch.setattr(files, "_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        summarize(tables)
    assert tables.skipped == {}


def test_damage_is_an_error_for_who_does_not_ask_to_skip_it(tmp_path: Path) -> None:
    path = store(tmp_path / "store")
    truncated(file_of(path))
    with pytest.raises(CorruptError):
        Tables(path).steps.to_arrow()
    tables = Tables(path, skip_damaged=True)
    assert tables.skipped == {}  # nothing was read yet
    assert tables.steps.to_arrow().num_rows == 18
    assert tables.trajectories.to_arrow().num_rows == COUNT
    assert list(tables.skipped) == [str(file_of(path))]


@by_format
@pytest.mark.parametrize("damage", [truncated, grown, missing], ids=lambda d: d.__name__)
def test_the_doctor_notices_files_of_the_wrong_length(
    tmp_path: Path, trajectory_format: str, damage: Callable[[Path], None]
) -> None:
    path = store(tmp_path / "store", trajectory_format)
    name = file_of(path).name

    def told() -> Any:
        (remark,) = [r for r in doctor.examine(path) if r.name == "files of the wrong length"]
        return remark

    assert (told().value, told().is_fine) == (0, True)
    damage(file_of(path))
    assert (told().value, told().is_fine) == (1, False)
    assert told().remedy == f"{name} is one of them. Run: mmbuf verify {path}"


def test_a_damaged_file_of_rlinf_s_is_left_out(tmp_path: Path) -> None:
    source = Path(__file__).parent / "fixtures" / "rlinf_pt"
    path = tmp_path / "rlinf"
    shutil.copytree(source, path)
    file = sorted(path.glob("trajectory_*.pt"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    ran = run("stats", path, "--json")
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"mmbuf: {file}: ")
    assert "left out 1 of 4 trajectories." in ran.stderr
    assert json.loads(ran.stdout)["columns"]
