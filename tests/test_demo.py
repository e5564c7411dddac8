"""`mmbuf demo`: its pure pieces, what ends it early, and the whole of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from rich.console import Console
from typer.testing import CliRunner

import mmbuf
from mmbuf import MmbufError, ReplayReader, SchemaError, TrajectoryReplayBuffer, cli
from mmbuf.cli import demo
from mmbuf.cli.returns import StoredRun, draw_learning_curve, episode_returns, read_run
from mmbuf.cli.sac import LOG_STD_RANGE, SAC

# Subprocesses run elsewhere, and mmbuf may be imported from its sources.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(mmbuf.__file__).parents[1])}
COMMAND = [sys.executable, "-c", "from mmbuf.cli import main; main()"]


def naive_returns(rewards: np.ndarray[Any, Any], dones: np.ndarray[Any, Any]) -> list[float]:
    returns = []
    sums = np.zeros(rewards.shape[1])
    for step in range(len(rewards)):
        for env in range(rewards.shape[1]):
            sums[env] += rewards[step, env]
            if dones[step, env]:
                returns.append(sums[env])
                sums[env] = 0.0
    return returns


def pendulum_rows(
    rewards: np.ndarray[Any, Any], dones: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    return {"rewards": rewards[..., None].astype(np.float32), "dones": dones[..., None]}


def quiet() -> Console:
    return Console(quiet=True)


# -- returns ---------------------------------------------------------------------------------


def test_returns_of_episodes_come_in_the_order_of_their_ends() -> None:
    rewards = np.array([[1, 10], [2, 20], [4, 40], [8, 80]], np.float32)
    dones = np.array([[0, 1], [1, 0], [0, 1], [0, 0]], bool)
    returns, steps, unfinished = episode_returns(rewards, dones)
    assert returns.tolist() == [10, 3, 60]
    assert steps.tolist() == [0, 1, 2]
    assert unfinished.tolist() == [12, 80]


def test_without_an_end_there_is_no_return() -> None:
    returns, steps, unfinished = episode_returns(np.ones((3, 2)), np.zeros((3, 2), bool), 5.0)
    assert (returns.tolist(), steps.tolist()) == ([], [])
    assert unfinished.tolist() == [8, 8]


@pytest.mark.parametrize("lengths", [[60], [1] * 60, [7, 1, 30, 2, 20]])
def test_episodes_go_on_across_the_borders_of_trajectories(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    rewards = rng.standard_normal((60, 5))
    dones = rng.random((60, 5)) < 0.1
    found: list[float] = []
    unfinished: Any = 0.0
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        returns, _, unfinished = episode_returns(rewards[part], dones[part], unfinished)
        found += returns.tolist()
        start += length
    assert found == pytest.approx(naive_returns(rewards, dones))


def test_a_run_is_read_from_its_files_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rewards = rng.standard_normal((30, 2)).astype(np.float32)
    dones = np.zeros((30, 2), bool)
    dones[[4, 14, 25], 0] = dones[[11, 19], 1] = True
    store = tmp_path / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(store)) as buffer:
        # An earlier run, whose episode was never finished.
        buffer.add_trajectories([pendulum_rows(np.ones((5, 2)), np.zeros((5, 2), bool))])
        for part in (slice(0, 10), slice(10, 12), slice(12, 30)):
            buffer.add_trajectories([pendulum_rows(rewards[part], dones[part])])
    run = read_run(store, num_before=1)
    assert (run.num_trajectories, run.num_rows, run.num_run_rows) == (4, 70, 60)
    assert run.size_bytes == sum(file.stat().st_size for file in store.iterdir())
    assert run.returns.tolist() == pytest.approx(naive_returns(rewards, dones))
    assert run.end_rows.tolist() == [10, 24, 30, 40, 52]


def test_a_quarter_without_episodes_has_no_return() -> None:
    run = StoredRun(1, 1, 1, 1, np.array([1.0, 2.0, 6.0]), np.array([1, 2, 3]))
    assert run.quarter_returns() == [1.0, 2.0, 6.0, None]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learning curve, drawn before a test looks for open files: Matplotlib keeps its fonts."""
    path = tmp_path_factory.mktemp("picture") / "curve.png"
    run = StoredRun(1, 8, 1, 8, np.array([-9.0, -5.0, -1.0]), np.array([4, 4, 8]))
    draw_learning_curve(run, -3.0, 2, path)
    return path


def test_learning_curve_is_a_png(picture: Path) -> None:
    assert picture.read_bytes().startswith(b"\x89PNG")


# -- collecting and learning -----------------------------------------------------------------


def test_final_state_of_a_cut_off_episode_is_the_real_one() -> None:
    def make_env() -> Any:
        import gymnasium

        return gymnasium.make("Pendulum-v1", max_episode_steps=3)

    envs = SyncVectorEnv([make_env] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    alone = make_env()
    actions = np.array([[0.5], [-1.0]], np.float32)
    envs.reset(seed=[7, 8])
    state, _ = alone.reset(seed=8)
    for step in range(3):
        states, _, _, truncations, infos = envs.step(actions)
        state, *_ = alone.step(actions[1])
        np.testing.assert_array_equal(demo.final_states(states, infos)[1], state)
        assert truncations.all() == (step == 2)
    assert not np.array_equal(states[1], state)
    envs.close()
    alone.close()


def test_policy_is_the_actor_of_its_moment() -> None:
    torch.manual_seed(0)
    learner = SAC(num_states=3, num_actions=1)
    policy = learner.policy()
    states = torch.randn(8, 3)
    actor = learner.actor
    with torch.no_grad():
        hidden = actor.second(actor.first(states).relu()).relu()
        mean, log_std = actor.last(hidden).chunk(2, dim=-1)
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 1), np.float32))
    expected = torch.tanh(mean + log_std.clamp(*LOG_STD_RANGE).exp() * noise)
    rows = torch.randn(16, 1)
    learner.learn(torch.randn(16, 3), rows, rows, torch.randn(16, 3), rows > 0)
    actions = policy.act(states.numpy(), np.random.default_rng(1))
    np.testing.assert_allclose(actions, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert (policy.version, learner.policy().version) == (0, 1)


def test_error_in_the_collector_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the simulator broke")

    monkeypatch.setattr(demo, "final_states", fail)
    with (
        TrajectoryReplayBuffer() as buffer,
        pytest.raises(RuntimeError, match="the simulator broke"),
    ):
        demo.train(buffer, 60.0, 0, demo.Interrupt(), quiet())


def test_store_of_other_columns_is_refused() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"actions": np.zeros((200, 8, 6), np.float32)}])
        with pytest.raises(SchemaError):
            demo.train(buffer, 60.0, 0, demo.Interrupt(), quiet())
        assert len(buffer) == 1


# -- the command -----------------------------------------------------------------------------


def test_version_is_shown() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mmbuf {mmbuf.__version__}\n")


def test_first_interrupt_asks_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with demo.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_directory_of_other_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").touch()
    monkeypatch.setattr(sys, "argv", ["mmbuf", "demo", "--path", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == (
        f"mmbuf: {tmp_path}: expected a store or an empty directory, got a directory with other "
        "files. Choose another --path."
    )
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(MmbufError, match="expected a directory, got a file"):
        demo.check_path(file)


def test_store_new_path_and_empty_directory_are_accepted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    demo.check_path(tmp_path)
    demo.check_path(store)
    TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(store)).close()
    demo.check_path(store)


@pytest.mark.parametrize("module", ["gymnasium", "matplotlib"])
def test_missing_extra_is_named_before_anything_is_done(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MmbufError) as caught:
        demo.demo(path=tmp_path / "store")
    assert str(caught.value) == f'demo: {module} is missing. Install it: pip install "mmbuf[demo]"'
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_missing_command_line_is_one_message(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from mmbuf.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    expected = f'mmbuf: the command needs {module}. Install it: pip install "mmbuf[cli]"\n'
    assert (result.returncode, result.stderr) == (1, expected)


def test_interrupt_leaves_a_store_that_opens(tmp_path: Path) -> None:
    store = tmp_path / "store"
    process = subprocess.Popen(
        [*COMMAND, "demo", "--path", str(store), "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(store.glob("trajectory_*.arrow"))) < 10:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    result = json.loads(output)
    assert result["is_interrupted"]
    assert (tmp_path / "learning_curve.png").exists()
    with ReplayReader(store) as reader:
        assert len(reader) == result["num_trajectories"] >= 10
        shapes = [
            reader.get_trajectory(i).to_columns()["rewards"].shape for i in range(len(reader))
        ]
        assert set(shapes) == {(demo.NUM_STEPS, demo.NUM_ENVS, 1)}
        assert reader.total_samples == result["num_rows"] == 200 * len(reader)
        assert reader.sample(256)["curr_obs"]["states"].shape == (256, 3)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_demo_learns(tmp_path: Path) -> None:
    store = tmp_path / "store"
    result = subprocess.run(
        [*COMMAND, "demo", "--path", str(store), "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["final_return"] > -300 > told["quarter_returns"][0]
    with ReplayReader(store) as reader:
        assert reader.total_samples == told["num_rows"] == told["num_run_rows"]
