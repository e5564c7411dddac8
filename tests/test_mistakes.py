"""What a user gets wrong is told in one line: what, what was expected, what came, what to do.

And an interrupt, a stream that is not there or an encoding that holds few names is no traceback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from data import opened

import mmbuf
from mmbuf import cli

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(mmbuf.__file__).parents[1])}
COMMAND = [sys.executable, "-m", "mmbuf"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([{"rewards": torch.zeros(3, 2)}] * 3)
    (tmp_path / "file").write_text("text")
    (tmp_path / "other").mkdir()
    return tmp_path / "store"


def message(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["mmbuf", *map(str, arguments)])
    with pytest.raises(SystemExit) as failure:
        cli.main()
    return str(failure.value.code)


NO_DIRECTORY = "{d}/file: expected a store directory, got a file. Give the directory of its store."
NONE = "{d}/none: expected a store directory, got none."
NO_STORE = (
    "{d}/other: expected a store or a checkpoint, got neither journal.jsonl nor "
    "trajectory_index.json."
)
ON_PATHS: list[list[str]] = [
    *(["info", "P"], ["ls", "P"], ["head", "P"], ["stats", "P"], ["sql", "P", "select 1"]),
    *(["plot", "P", "--out", "OUT.png"], ["watch", "P", "--once"], ["verify", "P"]),
    *(["repair", "P"], ["merge", "P", "OUT"], ["split", "P", "OUT", "--shards", "2"]),
    *(["convert", "P", "OUT", "--format", "npy"], ["export", "P", "OUT", "--to", "parquet"]),
]


@pytest.mark.parametrize(("name", "expected"), [("file", NO_DIRECTORY), ("none", NONE)])
@pytest.mark.parametrize("arguments", [*ON_PATHS, ["doctor", "P"]], ids=lambda a: a[0])
def test_what_is_no_directory_is_named_as_what_it_is(
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    name: str,
    expected: str,
) -> None:
    places = {"P": store.parent / name, "OUT": store.parent / "out", "OUT.png": store.parent / "o"}
    found = message(monkeypatch, *(places.get(argument, argument) for argument in arguments))
    assert found == "mmbuf: " + expected.format(d=store.parent)
    assert not (store.parent / "out").exists()


@pytest.mark.parametrize("arguments", ON_PATHS, ids=lambda arguments: arguments[0])
def test_a_directory_that_is_no_store_is_named(
    store: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    places = {"P": store.parent / "other", "OUT": store.parent / "out", "OUT.png": store / "o"}
    found = message(monkeypatch, *(places.get(argument, argument) for argument in arguments))
    assert found == "mmbuf: " + NO_STORE.format(d=store.parent)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["head", "STORE", "--trajectory", "999"],
            "trajectory 999: expected the id or uuid of one trajectory, got another; there are ids "
            "from 0 to 2. All are listed by: mmbuf ls",
        ),
        (
            ["head", "STORE", "STORE2", "--trajectory", "0"],
            "trajectory 0: expected the id or uuid of one trajectory, got another; there are 2 of "
            "this id. Give the uuid. All are listed by: mmbuf ls --json",
        ),
        (
            ["convert", "STORE", "OUT", "--format", "zip"],
            "--format: expected one of ['arrow', 'npy', 'pt', 'pkl'], got 'zip'.",
        ),
        (
            ["export", "STORE", "OUT", "--to", "zip"],
            "--to: expected one of parquet, hf, minari, got 'zip'.",
        ),
        (
            ["import", "STORE", "OUT", "--from", "zip"],
            "--from: expected one of hdf5, minari, got 'zip'.",
        ),
        (
            ["import", "STORE", "OUT", "--from", "minari", "--filter-key", "train"],
            "--filter-key: expected --from hdf5 with it, got --from minari.",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_value_of_an_option_is_named_by_the_option(
    store: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    with opened(store.parent / "store2") as buffer:
        buffer.add_trajectories([{"rewards": torch.zeros(3, 2)}])
    places: dict[str, Any] = {
        "STORE": store,
        "STORE2": store.parent / "store2",
        "OUT": store.parent / "out",
    }
    found = message(monkeypatch, *(places.get(argument, argument) for argument in arguments))
    assert found == f"mmbuf: {expected}"


def test_an_interrupt_while_the_command_is_imported_is_quiet(store: Path) -> None:
    # At the first import that takes long, and nothing of the library is there yet.
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('numpy', 'torch', 'typer'): signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import mmbuf\nassert 'numpy' not in sys.modules\n"
        "from mmbuf.__main__ import main\nmain()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "info", str(store)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def run_stub(
    body: str, *, closed: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The entry of the command with ``body`` for all that it would import and do."""
    code = (
        "import signal, sys, types\n"
        "def run():\n"
        f"    {body}\n"
        "sys.modules['mmbuf.cli'] = types.SimpleNamespace(main=run)\n"
        "from mmbuf.__main__ import main\nmain()"
    )
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": ""} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_interrupt_of_a_running_command_is_quiet_and_has_its_clean_up() -> None:
    ran = run_stub("try: signal.raise_signal(signal.SIGINT)\n    finally: print('cleaned up')")
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "cleaned up\n", "")


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ran = run_stub("signal.raise_signal(signal.SIGINT); print('went on')")
    assert ran.returncode == 130
    ran = subprocess.run(
        [
            *(sys.executable, "-c"),
            f"{code}import sys, types\n"
            "sys.modules['mmbuf.cli'] = types.SimpleNamespace(main=lambda: ("
            "signal.raise_signal(signal.SIGINT), print('went on')))\n"
            "from mmbuf.__main__ import main\nmain()",
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "went on\n", "")


def test_a_real_interrupt_at_any_moment_of_the_start_is_quiet(store: Path) -> None:
    for delay_s in (0.2, 0.8):
        process = subprocess.Popen(
            [*COMMAND, "watch", str(store)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors or "mmbuf" not in errors, errors
        # Python itself may not have got to the command yet.
        assert process.returncode in (0, 130, -signal.SIGINT, 1), errors


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_needs_no_standard_stream(closed: str) -> None:
    ran = run_stub(
        "print(sys.stdin.read(0), sys.stdout.isatty(), sys.stderr.isatty())", closed=closed
    )
    shown = "" if ">&-" in closed.replace("2>&-", "") else " False False\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, shown, "")


def test_the_whole_command_runs_without_a_standard_stream(store: Path) -> None:
    ran = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m mmbuf info "{store}" <&- >&- 2>&-'],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_name_that_the_encoding_does_not_have_is_escaped() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    ran = run_stub("print('/caf\\xe9'); sys.exit('mmbuf: /caf\\xe9')", environment=ascii_only)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "/caf\\xe9\n", "mmbuf: /caf\\xe9\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    ran = run_stub("print('x')", closed=">/dev/full")
    told = "mmbuf: stdout: [Errno 28] No space left on device\n"
    assert (ran.returncode, ran.stderr) == (1, told)


def test_a_pipe_that_nobody_reads_is_no_traceback() -> None:
    ran = run_stub("import time; time.sleep(0.3); print('x')", closed="| true")
    assert ran.stderr == ""
