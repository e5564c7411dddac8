"""What the README shows of the commands is what they print, and the commands are those there are.

A training run gives other numbers on each machine. So the outputs are compared without the numbers,
names of versions, times and sizes, and without the widths of columns, which follow from them.
"""

from __future__ import annotations

import io
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from mmbuf import cli
from mmbuf.cli import demo

README = (Path(__file__).parent.parent / "README.md").read_text()
SHOWN = re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
MAX_WIDTH = 100

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS: dict[str, click.Command] = GROUP.commands
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# A command as the README writes it: in a span of code, in a table, after a prompt.
MENTION = re.compile(r"(?:^\$ |[`/])mmbuf ([a-z]+)", re.MULTILINE)

ROUNDS = 3  # of eight trajectories: the episodes of all environments

_VARYING = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "VERSION"),
        (r"\b[0-9a-f]{8}\.\.\.[0-9a-f]{8}\b", "VERSION"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
        # Not those of names (p25, float32) and of row shapes, (3,).
        (r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?(?![\w.]|,\))", "N"),
        (r"N (?:bytes|[kMG]B)\b", "SIZE"),
        (r"N (?:s|min|h|days) ago", "AGE"),
        (r"(?m)^(?:ok  |mind) ([\w. ]+): .*\n(?: {5}.*\n)?", r"\1: WHATEVER\n"),  # of the doctor
        (r"[━─]+", "─"),
        (r" +", " "),
        (r"(?<=│) - (?=│)", " N "),  # of a version without episodes that ended
        (r"(?m)^ | $", ""),
    )
]


def without_what_varies(output: str) -> str:
    for pattern, name in _VARYING:
        output = pattern.sub(name, output)
    return output


def sessions() -> Iterator[tuple[list[str], str]]:
    """The arguments of each command that is shown, and its output."""
    for block in SHOWN:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, output = _split(part)
            assert command[0] == "mmbuf"
            yield command[1:], output


def _split(part: str) -> tuple[list[str], str]:
    """A command, which goes on over the next line while a quote is open, and its output."""
    stop = part.index("\n") + 1
    while part[:stop].count('"') % 2:
        stop = part.index("\n", stop) + 1
    return shlex.split(part[:stop]), part[stop:]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with a path that is short enough for the titles of tables."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.chdir(directory)
        yield Path.cwd()


@pytest.fixture(scope="module", autouse=True)
def _fonts() -> None:
    """matplotlib holds the files of its fonts open for ever."""
    figure = Figure()
    figure.text(0, 0, "x")
    figure.text(0, 0, "x", fontweight="bold")
    figure.savefig(io.BytesIO())


@pytest.fixture
def _short_demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The demo ends after three rounds of episodes, whatever it has learned by then."""
    monkeypatch.setattr(demo, "TARGET_RETURN", -10_000.0)
    monkeypatch.setattr(demo, "REQUIRED_RETURN", -10_000.0)
    monkeypatch.setattr(demo, "HOLD_ROUNDS", ROUNDS)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_short_demo")
def test_the_readme_shows_what_the_commands_print(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(MAX_WIDTH))
    shown, printed = {}, {}
    for arguments, output in sessions():
        ran = CliRunner().invoke(cli.app, arguments)
        command = shlex.join(arguments)
        assert ran.exit_code == 0, f"{command}: {ran.output}"
        shown[command] = without_what_varies(output)
        printed[command] = without_what_varies(ran.stdout.replace(str(home), "/home/you"))
    assert printed == shown
    assert {arguments[0] for arguments, _ in sessions()} == set(COMMANDS)


def test_what_is_shown_fits_on_a_screen() -> None:
    assert max(len(line) for block in SHOWN for line in block.splitlines()) <= MAX_WIDTH


def test_only_what_differs_from_run_to_run_is_left_out_of_the_comparison() -> None:
    output = """\
            title
┏━━━━━━━━┳━━━━━━━┓
│ p25    │  1,23 │
│ 7611649e...6d4b1f9d │ - │ (3,) │ float32 │ [-1, 2.5e-05] │ 12.3 kB │ 26.3 s ago │
2026-11-30 14:17:15 7611649e-22a6-5903-bb0b-99406d4b1f9d -1,234.5
mind free disk bytes: 3 kB (needed: 1.1 GB)
     Free some space.
ok   torch: 2.13.0+cpu
end
"""
    assert (
        without_what_varies(output)
        == """\
title
┏─┳─┓
│ p25 │ N,N │
│ VERSION │ N │ (3,) │ float32 │ [N, N] │ SIZE │ AGE │
TIME VERSION N
free disk bytes: WHATEVER
torch: WHATEVER
end
"""
    )


def test_the_readme_names_every_command_and_no_other() -> None:
    listed = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"}).stdout
    assert all(re.search(rf"^\W*{name} ", listed, re.MULTILINE) for name in COMMANDS)
    assert set(MENTION.findall(README)) == set(COMMANDS)


def _options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts}


def _named_options() -> Iterator[tuple[str, str]]:
    """Pairs of a command and an option that the README gives to it."""
    for line in re.findall(r"^\| `mmbuf .*$", README, re.MULTILINE):
        command = MENTION.search(line)
        assert command is not None
        yield from ((command[1], option) for option in OPTION.findall(line))
    for code in re.findall(r"`mmbuf [^`]+`", README):
        yield from ((code.split()[1].strip("`"), option) for option in OPTION.findall(code))
    for arguments, _ in sessions():
        yield from ((arguments[0], option) for option in OPTION.findall(shlex.join(arguments[1:])))


def test_every_option_that_the_readme_gives_to_a_command_is_its_own() -> None:
    named = set(_named_options())
    assert {(name, option) for name, option in named if option not in _options_of(name)} == set()
    assert {name for name, _ in named} >= {
        "ls",
        "sql",
        "plot",
        "watch",
        "export",
        "import",
        "split",
    }


def test_every_option_in_the_readme_is_one_of_some_command() -> None:
    known = {option for name in COMMANDS for option in _options_of(name)}
    of_others = {"--rounds", "--tiny", "--peers"}  # of tools/ and benchmarks/
    assert set(OPTION.findall(README)) - of_others <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_all_commands_have_json_and_say_so(name: str) -> None:
    text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).stdout
    assert set(OPTION.findall(text)) >= {"--json", "--help"}
    assert set(OPTION.findall(text)) - {"--help"} <= _options_of(name) | _negations_of(name)


def _negations_of(name: str) -> set[str]:
    return {option for p in COMMANDS[name].params for option in p.secondary_opts}
