"""Killed writers: whatever was acknowledged is there; see `crash`."""

from __future__ import annotations

import sys
from pathlib import Path

import crash
import pytest

SEEDS = (1, 2, 3, 4, 5)  # each names its failure

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks beside threads")


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    assert crash.run(tmp_path, 10, seed).rounds == 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert crash.run(tmp_path, 1000, 6).rounds == 1000
