"""`mmbuf watch`: what it shows is what the stores hold, whoever writes them, until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Child, Parent
from data import opened
from rich.filesize import decimal
from typer.testing import CliRunner

import mmbuf
from mmbuf import cli, files, storage
from mmbuf.cli.watch import Followed, _told_age

ROOT = Path(mmbuf.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
WATCH = "from mmbuf.cli import main; main('watch')"


def rollout(i: int) -> dict[str, Any]:
    """Rewards ``i + 1`` in three steps; environment 1 ends after step 0, environment 0 with 1."""
    dones = torch.tensor([[False, True], [True, False], [False, False]])
    return {
        "rewards": torch.full((3, 2), i + 1.0),
        "dones": dones,
        "model_weights_id": f"v{i}",
    }


def store(path: Path, first: int, stop: int, trajectory_format: str = "arrow") -> Path:
    with opened(path, trajectory_format=trajectory_format, sample_window_size=0) as buffer:
        buffer.add_trajectories([rollout(i) for i in range(first, stop)])
    return path


@contextmanager
def followed(*paths: Path, window: int = 0) -> Iterator[Followed]:
    found = Followed(paths, window)
    try:
        yield found
    finally:
        found.close()


class Writer(Child):
    """A process that writes a store."""

    def __init__(self, path: Path) -> None:
        super().__init__(write, path)
        self.pid = self.receive()

    def add(self, reward: float) -> None:
        self.pipe.send(reward)
        assert self.receive() == "added"


def write(parent: Parent, path: Path) -> None:
    with opened(path) as buffer:
        parent.send(os.getpid())
        while True:
            rewards = torch.full((5, 2), float(parent.receive()))
            buffer.add_trajectories([{"rewards": rewards}])
            buffer.flush()
            parent.send("added")


@contextmanager
def watching(*arguments: object, output: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WATCH, *map(str, arguments)],
        stdout=output,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*arguments: object) -> str:
    ran = CliRunner().invoke(cli.app, ["watch", *map(str, arguments)])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.mark.parametrize("trajectory_format", list(storage.FORMATS))
def test_once_says_what_is_there(tmp_path: Path, trajectory_format: str) -> None:
    path = store(tmp_path / "store", 0, 3, trajectory_format)
    facts = json.loads(run(path, "--once", "--json", "--window", "2"))
    assert abs(facts.pop("time") - time.time()) < 60
    ages = [facts["window"].pop("age_s"), facts.pop("last_add_age_s")]
    assert ages == sorted(ages, reverse=True)
    assert facts == {
        "paths": [str(path)],
        "num_stores": 1,
        "num_trajectories": 3,
        "num_rows": 18,
        "adds_per_s": 0.3,
        "rows_per_s": 1.8,
        "window": {"num_trajectories": 2, "num_rows": 12},
        "size_bytes": sum(files.size_of(str(f)) for f in path.glob("trajectory_?_*")),
        "disk_bytes": sum(files.disk_bytes_of(str(f)) for f in path.glob("trajectory_?_*")),
        "version": "v2",
        "returns": [1, 2, 2, 4, 3, 6],
        "writers": {},
    }


def test_info_and_watch_show_the_same_length_and_space_taken(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 0, 3)
    names = [str(file) for file in path.glob("trajectory_?_*")]
    length, taken = (
        decimal(sum(map(size, names))) for size in (files.size_of, files.disk_bytes_of)
    )
    assert length != taken
    told = CliRunner().invoke(cli.app, ["info", str(path)]).stdout
    assert f"\nlength        {length} of files\nspace taken   {taken} on the disk\n" in told
    text = run(path, "--once")
    assert re.search(rf"│ length +│ +{length} │ of the files of 1 store +│", text)
    assert re.search(rf"│ space taken +│ +{taken} │ on the disk +│", text)


def test_once_shows_one_screen(tmp_path: Path) -> None:
    text = run(store(tmp_path / "store", 0, 3), "--once")
    lines = [line[1:-1].split("│") for line in text.splitlines() if line.startswith("│")]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    assert list(cells) == [
        *(
            "trajectories",
            "rows",
            "window",
            "length",
            "space taken",
            "last add",
            "return",
            "written by",
        ),
    ]
    assert cells["trajectories"] == ["3", "0.3 a second"]
    assert cells["rows"] == ["18", "2 a second"]
    assert cells["last add"][1] == "version v2"
    assert cells["return"] == ["3", "mean of the newest 6 episodes, the last 6"]
    assert cells["written by"] == ["0", "nobody now"]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, "-"),
        (0.04, "0.0 s ago"),
        (119, "119.0 s ago"),
        (120, "2.0 min ago"),
        (7_200, "2.0 h ago"),
        (400 * 86_400 + 8_640, "400.1 days ago"),
    ],
)
def test_ages_have_the_unit_that_fits(seconds: float | None, told: str) -> None:
    assert _told_age(seconds) == told


def test_rates_are_those_of_the_last_ten_seconds(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 0, 4)
    with followed(path) as watched:
        now = time.time()
        assert (watched.look(now)["adds_per_s"], watched.look(now)["rows_per_s"]) == (0.4, 2.4)
        later = watched.look(now + 100)
        assert (later["adds_per_s"], later["rows_per_s"]) == (0, 0)
        assert later["last_add_age_s"] == pytest.approx(100, abs=5)


def test_returns_are_those_of_the_newest_episodes_that_ended(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 0, 12)
    with followed(path) as watched:
        # Environment 1 ends first, then environment 0 after two steps; the rest stays open. Of the
        # twelve trajectories at most eight are read.
        expected = [n * reward for reward in range(5, 13) for n in (1, 2)]
        assert watched.look(0)["returns"] == expected


def test_without_flags_an_episode_is_a_whole_trajectory(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([{"rewards": torch.ones(30, 30)}])
    with followed(tmp_path / "store") as watched:
        assert watched.look(0)["returns"] == [30.0] * 20


def test_a_store_without_rewards_or_trajectories_has_no_returns(tmp_path: Path) -> None:
    with opened(tmp_path / "actions") as buffer:
        buffer.add_trajectories([{"actions": torch.ones(3, 2)}])
    with opened(tmp_path / "empty"):
        pass
    for name, count in (("actions", 1), ("empty", 0)):
        with followed(tmp_path / name) as watched:
            facts = watched.look(time.time())
            assert (facts["num_trajectories"], facts["returns"]) == (count, [])
        assert "no episode ended yet" in run(tmp_path / name, "--once")


def test_stores_that_come_later_are_followed_under_a_pattern(tmp_path: Path) -> None:
    with followed(tmp_path / "rank_*") as watched:
        assert watched.look(0)["num_stores"] == 0
        for rank in range(2):
            store(tmp_path / f"rank_{rank}", rank, rank + 1)
        facts = watched.look(0)
    assert (facts["num_stores"], facts["num_trajectories"]) == (2, 2)
    assert (facts["version"], facts["returns"]) == ("v1", [1, 2, 2, 4])


def test_what_is_cleared_is_no_longer_there(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as buffer, followed(tmp_path / "store") as watched:
        buffer.add_trajectories([rollout(0)])
        buffer.flush()
        assert watched.look(0)["num_rows"] == 6
        buffer.clear()
        buffer.flush()
        facts = watched.look(0)
    assert (facts["num_rows"], facts["disk_bytes"], facts["returns"]) == (0, 0, [])


def test_a_file_that_is_gone_already_has_no_returns(tmp_path: Path) -> None:
    path = store(tmp_path / "store", 0, 2)
    next(path.glob("trajectory_1_*")).unlink()
    with followed(path) as watched:
        facts = watched.look(0)
    assert (facts["num_trajectories"], facts["returns"]) == (2, [1, 2])


def test_a_writer_is_followed_through_its_death_and_restart(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def told(watched: Followed) -> tuple[int, list[float], list[int]]:
        facts = watched.look(time.time())
        pids = [writer["pid"] for writer in facts["writers"].values()]
        return facts["num_trajectories"], facts["returns"][::2], pids

    with Writer(path) as first, followed(path) as watched:
        assert told(watched) == (0, [], [first.pid])
        first.add(1)
        first.add(2)
        assert told(watched) == (2, [5, 10], [first.pid])
        first.kill()
        assert told(watched) == (2, [5, 10], [])
        with Writer(path) as second:
            second.add(3)
            assert told(watched) == (3, [5, 10, 15], [second.pid])


def test_json_comes_line_by_line_until_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Writer(path) as writer, watching(path, "--json", "--interval", "0.05") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["num_trajectories"] == 0
        writer.add(1)
        while not (facts := json.loads(process.stdout.readline()))["num_trajectories"]:
            pass
        assert (facts["num_rows"], facts["returns"]) == (10, [5, 5])
        assert [w["pid"] for w in facts["writers"].values()] == [writer.pid]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert all(json.loads(line)["num_trajectories"] == 1 for line in rest.splitlines())


def test_a_terminal_has_a_live_screen_until_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "store"
    master, terminal = pty.openpty()
    text = ""

    def read_until(pattern: str) -> None:
        nonlocal text
        while not re.search(pattern, text):
            assert select.select([master], [], [], 60)[0], text
            text += os.read(master, 1 << 16).decode()

    try:
        with Writer(path) as writer, watching(path, "--interval", "0.05", output=terminal) as shown:
            read_until("trajectories[ │]+0 ")
            writer.add(1)
            for line in ("trajectories[ │]+1 ", "rows[ │]+10 ", "return[ │]+5 "):
                read_until(line)
            assert f"process {writer.pid} on " in text
            shown.send_signal(signal.SIGINT)
            read_until(re.escape("\x1b[?25h"))  # the cursor is back
            _, errors = shown.communicate(timeout=60)
    finally:
        os.close(master)
        os.close(terminal)
    assert (shown.returncode, errors) == (0, "")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format": "arrow"', b'"format": "xx"', "expected a format among .*, got 'xx'"),
        (b'"added_at": ', b'"added_at": 1e308, "x": ', "not an event: .*added_at 1e"),
        (b'"parts": [', b'"parts": [[0, 1], ', "expected 2 columns in the index, got 3"),
    ],
)
def test_an_index_that_cannot_be_true_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes, message: str
) -> None:
    journal = store(tmp_path / "store", 0, 1) / "journal.jsonl"
    *lines, last = journal.read_bytes().splitlines()
    body = last.rpartition(b', "crc"')[0].replace(old, new)
    forged = body + b', "crc": "%08x"}' % zlib.crc32(body)
    journal.write_bytes(b"\n".join([*lines, forged, b""]))
    monkeypatch.setattr(sys, "argv", ["mmbuf", "watch", str(journal.parent), "--once"])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    assert re.match(f"mmbuf: {re.escape(str(tmp_path))}.*: {message}", str(failure.value.code))


def test_a_mistake_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path / "store", 0, 2)
    journal = path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"v0", b"x0"))
    for where, message in (
        (tmp_path / "none", "none: expected a store directory, got none"),
        (path, "journal.jsonl at byte [0-9]+: a damaged line before a valid one"),
    ):
        monkeypatch.setattr(sys, "argv", ["mmbuf", "watch", str(where), "--once"])
        with pytest.raises(SystemExit) as failure:
            cli.main()
        assert re.match(f"mmbuf: .*{message}", str(failure.value.code))
