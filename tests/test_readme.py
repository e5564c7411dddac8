"""The README is true: its code runs, its commands are those that are tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    if "mmbuf.ray" not in block  # which needs a cluster: `test_ray` runs it
]


def test_the_code_of_the_readme_runs_block_after_block(tmp_path: Path) -> None:
    script = "\n".join(BLOCKS)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    assert "torch.Size([256, 64, 64, 3])" in ran.stdout
    assert "torch.Size([50, 8, 1])" in ran.stdout
    assert "[0, 1]" in ran.stdout
    assert "40 16000" in ran.stdout
    assert len(BLOCKS) == 10


def test_the_test_command_is_the_one_that_continuous_integration_runs() -> None:
    commands = [line for line in README.splitlines() if line.endswith("pytest")]
    assert len(commands) == 1
    assert "grep -m 1 'pytest$' README.md" in (ROOT / ".ci" / "run").read_text()


def test_continuous_integration_runs_with_the_oldest_torch_that_is_allowed() -> None:
    allowed = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = re.findall(r"torch==([\d.]+)", (ROOT / ".ci" / "run").read_text())
    assert len(allowed) == 1
    assert set(pinned) == {f"{allowed[0]}.0"}


@pytest.mark.parametrize("name", ["demo", "test"])
def test_each_extra_that_the_commands_install_exists(name: str) -> None:
    assert f'-e ".[{name}]"' in README
    assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
