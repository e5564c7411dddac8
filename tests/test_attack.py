"""Nothing is wrong and nothing hangs under attack; see `attack`.

::

    MMBUF_ATTACK_MINUTES=10 pytest -m slow -n 0 tests/test_attack.py -s

is an hour of it: the six kinds of buffer, ten minutes each. ``MMBUF_ATTACK_SEED`` begins with
another seed, and ``MMBUF_ATTACK_WITHOUT=kills,load`` goes without something, to find out what a
failure comes from (see `attack.machine.Config`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from attack.machine import CONFIGS, Config, run

SEED = int(os.environ.get("MMBUF_ATTACK_SEED", "1"))
MINUTES = float(os.environ.get("MMBUF_ATTACK_MINUTES", "10"))
WITHOUT = frozenset(filter(None, os.environ.get("MMBUF_ATTACK_WITHOUT", "").split(",")))
SECONDS = 4.0  # of the short form

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def attack(directory: Path, config: Config, seconds: float) -> Counter[str]:
    summary = run(directory, dataclasses.replace(config, without=WITHOUT), SEED, seconds)
    print(f"\n{config.name}, {seconds:.0f} s: {summary}")
    return summary.tally


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_nothing_is_wrong_and_nothing_hangs_under_attack(
    tmp_path: Path, without_fsync: None, config: Config
) -> None:
    tally = attack(tmp_path, config, SECONDS)
    assert tally["rows checked"] > 0
    assert WITHOUT or tally["interrupts"] + tally["calls of signal handlers"] > 0


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_nothing_is_wrong_and_nothing_hangs_under_a_long_attack(
    tmp_path: Path, config: Config
) -> None:
    tally = attack(tmp_path, config, 60 * MINUTES)
    assert WITHOUT or (tally["kills"] > 0 and tally["interrupts"] > 10 * MINUTES)
