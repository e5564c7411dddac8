"""No character that a terminal would obey, and none that UTF-8 cannot hold, is ever printed.

A store is made whose columns, weights ids, text and lock are called so; every command shows it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from data import opened
from matplotlib.figure import Figure
from typer.testing import CliRunner

import mmbuf
from mmbuf import CorruptError, MmbufError, ReplayReader, SchemaError, Trajectory, WriteError, cli
from mmbuf.analysis import Tables
from mmbuf.cli.plot import draw_episodes, draw_steps
from mmbuf.schema import Column, Schema
from mmbuf.terminal import printable

# Escape sequences, returns, bells, C1, marks that turn text, markup, a formula, lone surrogates.
HOSTILE = "a\x1b[31m\x1b]0;t\x07\r\n\t\x7f\x85\x9b2J\u202e\u2066\u200b[red]:smile:$x^{$"
SURROGATE = "w\udcff"
SHOWN = r"a\x1b[31m\x1b]0;t\x07\r\n\t\x7f\x85\x9b2J\u202e\u2066\u200b[red]:smile:$x^{$"


@pytest.fixture(scope="module", autouse=True)
def _fonts() -> None:
    """matplotlib holds the files of its fonts open for ever."""
    figure = Figure()
    figure.text(0, 0, "x")
    figure.savefig(io.BytesIO())


def rollout(weights_id: str) -> dict[str, Any]:
    return {
        "rewards": torch.ones(3, 2, 1),
        "dones": torch.arange(3).reshape(3, 1, 1).expand(3, 2, 1) == 2,
        "curr_obs": {
            HOSTILE: torch.ones(3, 2, 2),
            "task": [[HOSTILE, SHOWN]] * 3,
            "image" + HOSTILE: torch.zeros(3, 2, 9, 9, 3, dtype=torch.uint8),
        },
        "model_weights_id": weights_id,
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / f"store {HOSTILE.replace('/', '')}"
    with opened(path) as buffer:
        for weights_id in (HOSTILE, SURROGATE, "_hidden", ""):
            buffer.add_trajectories([rollout(weights_id)])
    return path


def check(text: str) -> None:
    """Lines of printable characters."""
    assert all(line.isprintable() for line in text.split("\n")), text
    text.encode()


def run(*arguments: object) -> str:
    ran = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert ran.exit_code == 0, (ran.output, ran.exception)
    check(ran.output)
    return ran.stdout


def mistake(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    assert isinstance(failure.value.code, str)
    check(failure.value.code)
    return failure.value.code


@pytest.mark.parametrize(
    "character",
    [*map(chr, (*range(32), *range(127, 161))), *"\u2028\u2029\u202e\u2066\ufeff\ud800"],
)
def test_what_moves_a_cursor_or_cannot_be_encoded_is_shown_as_its_escape(character: str) -> None:
    shown = printable(f"a{character}b")
    assert shown == f"a{character!r}b".replace("'", "")
    check(shown)


def test_what_can_be_read_is_shown_as_it_is() -> None:
    for text in ("", "put [red] block", "ä → ü", "日本語", "\\x1b", "'\"", "e\u0301", "🎉"):
        assert printable(text) is text


@pytest.mark.parametrize(
    "arguments",
    [
        *(["info"], ["ls"], ["ls", "--limit", "1"], ["head"], ["stats"], ["watch", "--once"]),
        *(["verify"], ["repair", "--dry-run"], ["repair"]),
        *(["head", "--trajectory", "1"], ["ls", "--sort", "-model_weights_id"]),
        ["ls", "--where", "num_steps > 0"],
    ],
    ids=" ".join,
)
def test_commands_show_names_as_their_escapes(store: Path, arguments: list[str]) -> None:
    text = run(arguments[0], store, *arguments[1:])
    assert SHOWN[:12] in text
    run(arguments[0], store, *arguments[1:], "--json")


def test_names_are_shown_whole_and_are_no_markup(store: Path) -> None:
    text = run("info", store)
    assert f"curr_obs.{SHOWN}" in text
    assert f"{SHOWN}: 1, {printable(SURROGATE)}: 1" in text or f"{SHOWN}: 1\n" in text
    assert f"version {HOSTILE}" not in run("watch", store, "--once")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_text_in_an_answer_is_shown_as_its_escape(store: Path, options: list[str]) -> None:
    query = (
        'select distinct "curr_obs.task" as "' + HOSTILE + '", model_weights_id, '
        "['\x1b[31m'] as list, {'a\x1b': 'b\x9b'} as struct "
        "from steps join trajectories using (uuid) order by all"
    )
    text = run("sql", store, query, *options)
    if not options:
        assert text.count(SHOWN) > 2
        assert r"['\x1b[31m']" in text or r"[\x1b[31m]" in text


def test_csv_keeps_the_bytes_but_not_on_a_terminal(store: Path) -> None:
    query = 'select distinct "curr_obs.task" as task from steps order by 1'
    ran = CliRunner().invoke(cli.app, ["sql", str(store), query, "--csv"])
    assert HOSTILE.encode() in ran.stdout_bytes
    master, terminal = pty.openpty()
    try:
        subprocess.run(
            [
                sys.executable,
                "-c",
                "from mmbuf.cli import main; main()",
                "sql",
                store,
                query,
                "--csv",
            ],
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(Path(mmbuf.__file__).parents[1])},
            timeout=60,
            check=True,
        )
        written = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(terminal)
    assert written.split("\r\n")[:3] == ["task", SHOWN, SHOWN]


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge", "STORE", "TARGET"],
        ["split", "STORE", "TARGET", "--shards", "2"],
        ["convert", "STORE", "TARGET", "--format", "pt"],
        ["export", "STORE", "TARGET", "--to", "parquet"],
        ["plot", "STORE", "--out", "TARGET.png"],
        ["plot", "STORE", "--out", "TARGET.svg", "--trajectory", "0"],
    ],
    ids=" ".join,
)
def test_what_is_made_is_named_by_its_escape(
    store: Path, tmp_path: Path, arguments: list[str]
) -> None:
    places = {"STORE": str(store), "TARGET": str(tmp_path / f"target {HOSTILE}")}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    assert f"target {SHOWN}" in run(*arguments)


def test_pictures_have_names_as_they_are_and_no_formulas(store: Path) -> None:
    tables = Tables(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        episodes, steps = draw_episodes(tables)[0], draw_steps(tables.only(0), 0)
        for figure in (episodes, steps):
            figure.savefig(io.BytesIO(), format="svg")
    names = [text.get_text() for text in episodes.legends[0].get_texts()]
    assert names == [SHOWN, printable(SURROGATE), "_hidden", "(none)"]
    labels = [axis.get_ylabel() for axis in steps.axes]
    assert f"curr_obs.{SHOWN}" in labels


# -- errors and remarks ----------------------------------------------------------------------------


def test_errors_are_one_line_that_can_be_printed() -> None:
    made: list[Exception] = [
        MmbufError(HOSTILE),
        SchemaError(HOSTILE),
        CorruptError(HOSTILE, SURROGATE, offset=3),
        WriteError(HOSTILE),
    ]
    for error in made:
        assert str(error).isprintable()
        assert SHOWN in str(error)
    assert made[2].path == HOSTILE  # type: ignore[attr-defined]
    schema = Schema([Column((HOSTILE,), "int8", ())])
    assert repr(schema).isprintable()


def test_mistakes_are_told_without_obeying_names(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    with opened(other) as buffer:
        buffer.add_trajectories([rollout("x") | {"curr_obs": {HOSTILE: torch.ones(3, 2, 5)}}])
    for arguments in (
        ["merge", store, other, tmp_path / "target"],
        ["stats", store, other],
        ["info", tmp_path / f"none {HOSTILE}"],
        ["plot", store, "--out", tmp_path / f"none {HOSTILE}" / "x.png"],
        ["head", store, "--trajectory", HOSTILE],
        ["ls", store, "--sort", HOSTILE],
        ["export", store, tmp_path / "target", "--to", "parquet", "--wide", HOSTILE],
    ):
        found = mistake(*arguments, monkeypatch=monkeypatch)
        assert found.startswith("mmbuf: ")
        assert "\n" not in found


def test_lines_of_what_duckdb_says_are_indented(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (
        ["sql", store, 'select "curr_obs.a" from steps'],  # it names the columns that are alike
        ["ls", store, "--where", "nope"],
    ):
        first, *rest = mistake(*arguments, monkeypatch=monkeypatch).split("\n")
        assert first.startswith("mmbuf: ")
        assert rest
        assert all(line.startswith("    ") for line in rest)


def test_files_that_are_damaged_are_named_by_their_escapes(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for file in store.glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:-1])
    (store / "trajectory_9_\x1b[31m.arrow").write_bytes(b"x")
    ran = CliRunner().invoke(cli.app, ["verify", str(store)])
    assert ran.exit_code == 1
    check(ran.output)
    assert r"trajectory_9_\x1b[31m.arrow" in ran.output
    ran = CliRunner().invoke(cli.app, ["stats", str(store)])
    assert ran.exit_code == 1
    check(ran.output)
    assert SHOWN[:12] in ran.stderr
    assert "mmbuf verify" in mistake("merge", store, store / "x", monkeypatch=monkeypatch)
    run("repair", store, "--dry-run")
    run("repair", store)


def test_a_writer_that_calls_itself_names_is_shown_by_their_escapes(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store):
        (store / ".writer.lock").write_text(json.dumps({"pid": 7, "host": HOSTILE}))
        for command in (["info", store], ["watch", store, "--once"], ["doctor", store]):
            assert f"process 7 on {SHOWN}" in run(*command)
        found = mistake("repair", store, monkeypatch=monkeypatch)
        assert f"process 7 on {SHOWN}" in found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a terminal of its own")
def test_a_terminal_is_told_nothing_by_the_store(store: Path) -> None:
    for arguments in (["info", store], ["ls", store], ["watch", store, "--once"], ["head", store]):
        master, terminal = pty.openpty()
        try:
            subprocess.run(
                [sys.executable, "-c", "from mmbuf.cli import main; main()", *arguments],
                stdout=terminal,
                stderr=terminal,
                env=os.environ
                | {"PYTHONPATH": str(Path(mmbuf.__file__).parents[1]), "TERM": "xterm"},
                timeout=60,
                check=True,
            )
            written = os.read(master, 1 << 16).decode()
        finally:
            os.close(master)
            os.close(terminal)
        for part in ("\x1b[31m", "\x1b]0;", "\x07", "\x85", "\x9b", "\u202e", "\u200b", "\x7f"):
            assert part not in written


def test_objects_show_themselves_without_obeying_names(store: Path) -> None:
    shown: list[Any] = [Trajectory.from_columns({HOSTILE: torch.ones(1, 1)}, 0, SURROGATE)]
    with ReplayReader(store) as reader, opened(store) as buffer:
        for each in (*shown, reader, buffer):
            check(repr(each))
            check(each._repr_html_())
            assert "<red>" not in each._repr_html_()


def test_remarks_in_the_log_are_printable(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(store / "journal.jsonl", "ab") as journal:
        journal.write(b"torn")
    with caplog.at_level(logging.WARNING, "mmbuf"):
        opened(store).close()
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().isprintable()
