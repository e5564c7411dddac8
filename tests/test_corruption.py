"""Damage: whatever happens to the bytes of a store, nobody dies of it and no row is wrong.

What is tried, and what must hold after each mutation, is in ``mutations.py``, which runs in a child
process. Not tried: a file that is cut short while it is mapped. Nobody may do that to a published
file, and the system answers it with SIGBUS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
