"""Damage: whatever happens to the bytes of a store, nobody dies of it and no row is wrong.

What is tried, and what must hold after each mutation, is in ``mutations.py``, which runs in a child
process; ``forgeries.py`` has what somebody could do who puts the checksums right. Not tried: a file
that is cut short while it is mapped. Nobody may do that to a published file, and the system answers
it with SIGBUS.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import forgeries
import numpy as np
import pytest
from matplotlib.figure import Figure

PROGRAM = Path(__file__).with_name("mutations.py")


def mutate(directory: Path, seed: int, count: int, timeout_s: int) -> dict[str, int]:
    """Try ``count`` mutations; how many were what."""
    done = subprocess.run(
        [sys.executable, PROGRAM, directory, str(seed), str(count)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={"PYTHONPATH": str(PROGRAM.parent.parent), "OMP_NUM_THREADS": "1"},
    )
    lines = done.stdout.splitlines()
    # The last number that was tried, and what became of it.
    assert done.returncode == 0, f"{lines[-1:]} {done.returncode}\n{done.stderr[-5000:]}"
    print(f"seed {seed}: {lines[-1]}")
    counts: dict[str, int] = json.loads(lines[-1])
    return counts


def check(counts: dict[str, int], count: int) -> None:
    """That the mutations were such, and were seen."""
    assert counts["mutations"] + counts["without a change"] == count
    assert counts["mutations"] > 0.9 * count
    assert counts["CorruptError"] > count
    assert counts["found by verify"] > 0.2 * count
    assert counts["rows"] > 50 * count


def test_no_damage_kills_hangs_or_gives_a_wrong_row(tmp_path: Path) -> None:
    check(mutate(tmp_path, 0, 300, 110), 300)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 8))
def test_no_damage_of_thousands_kills_hangs_or_gives_a_wrong_row(tmp_path: Path, seed: int) -> None:
    check(mutate(tmp_path, seed, 300, 580), 300)


@pytest.fixture(scope="module")
def _fonts() -> None:
    """matplotlib holds the files of its fonts open for ever."""
    figure = Figure()
    figure.text(0, 0, "x")
    figure.savefig(io.BytesIO())


def forged(directory: Path, kind: str, form: str, seed: int, count: int) -> None:
    """Try ``count`` forgeries of a store, and three commands on each."""
    if kind == "rlinf":
        fixture = Path(__file__).parent / "fixtures" / f"rlinf_{form}"
        whole = shutil.copytree(fixture, directory / "rlinf")
    elif kind == "live":
        whole = forgeries.made(directory / "whole", form)
    else:
        whole = forgeries.made_checkpoint(directory / "whole", form)
    (directory / "scratch").mkdir()
    random = np.random.default_rng(seed)
    found = forgeries.forgeries_of(whole)
    for i in random.choice(len(found), count, replace=False).tolist():
        chosen = random.choice(len(forgeries.COMMANDS), 3, replace=False).tolist()
        commands = [forgeries.COMMANDS[number] for number in chosen]
        forgeries.check(whole, found[i], directory / "scratch", commands)


@pytest.mark.usefixtures("_fonts", "without_fsync")
@pytest.mark.parametrize(
    ("kind", "form", "count"),
    [
        ("live", "arrow", 50),
        *(("live", "npy", 15), ("live", "pt", 15), ("live", "pkl", 5)),
        *(("checkpoint", "arrow", 15), ("checkpoint", "npy", 10), ("rlinf", "pt", 5)),
    ],
)
def test_no_forged_value_ends_a_command_or_gives_a_wrong_row(
    tmp_path: Path, kind: str, form: str, count: int
) -> None:
    forged(tmp_path, kind, form, 0, count)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_fonts", "without_fsync")
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("live", "arrow"), ("live", "npy"), ("live", "pt"), ("live", "pkl")),
        *(("checkpoint", "arrow"), ("checkpoint", "npy"), ("rlinf", "pt"), ("rlinf", "pkl")),
    ],
)
def test_no_forged_value_of_thousands_ends_a_command_or_gives_a_wrong_row(
    tmp_path: Path, kind: str, form: str, seed: int
) -> None:
    forged(tmp_path, kind, form, seed, 500)
