"""`mmbuf demo`: an agent learns Pendulum-v1 from a store, in less than a minute.

A thread steps eight environments and puts trajectories ``[T, B, ...]`` on a channel. The trainer
adds them to a `TrajectoryReplayBuffer`, takes batches of its rows, which a dataset draws ahead, and
learns. What was stored is then read again from the files alone, and tells the same story.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mmbuf import (
    Channel,
    PreloadReplayBufferDataset,
    Trajectory,
    TrajectoryCollector,
    TrajectoryReplayBuffer,
)
from mmbuf.batch import Batch
from mmbuf.cli.returns import draw_learning_curve, episode_returns, mean_of_last, read_run
from mmbuf.cli.sac import SAC, Policy
from mmbuf.errors import ClosedError, MmbufError
from mmbuf.terminal import printable

if TYPE_CHECKING:
    from gymnasium.vector import SyncVectorEnv

NUM_ENVS = 8
NUM_STEPS = 25  # of a trajectory
EPISODE_STEPS = 200
TORQUE = 2.0  # the environment's action for the policy's 1.0

WINDOW_SIZE = 100  # trajectories, so 20,000 rows
BATCH_ROWS = 256
# Random actions first: a policy that has learned from nothing explores worse than none.
WARMUP_ROWS = 1_000
# Learning is what takes the time, so it sets the pace: see `train`.
UPDATES_PER_ROW = 0.15

MEAN_EPISODES = 20
TARGET_RETURN = -200.0
# The target has to hold for so many rounds of episodes: by then no episode from before is in the
# mean.
HOLD_ROUNDS = 4
REQUIRED_RETURN = -300.0


def demo(
    path: Annotated[Path, typer.Option(help="Directory of the store.")] = Path("mmbuf-demo"),
    seconds: Annotated[float, typer.Option(min=1, help="Upper bound of the training.")] = 90.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Learn Pendulum-v1 from a store, then tell from the stored files how it went."""
    check_extra()
    path = path.expanduser()
    check_path(path)
    # A path may hold brackets, which would read as markup.
    console = Console(stderr=as_json, markup=False, highlight=False, emoji=False)
    # The networks are small: a second thread would only take the collector's core.
    torch.set_num_threads(1)
    with Interrupt() as interrupt:
        with TrajectoryReplayBuffer(
            seed=seed,
            sample_window_size=WINDOW_SIZE,
            auto_save=True,
            auto_save_path=str(path),
        ) as buffer:
            num_before = len(buffer)
            if num_before:
                console.print(
                    f"{printable(str(path))} holds {num_before:,} trajectories already; "
                    f"adding to them."
                )
            progress = train(buffer, seconds, seed, interrupt, console)
        result = {"path": str(path), "seed": seed, **progress.result()}

        # The buffer is closed: from here on there is nothing but the files.
        run = read_run(path, num_before)
        final_return = mean_of_last(run.returns, MEAN_EPISODES)
        result |= {
            "is_interrupted": interrupt.is_requested,
            "num_trajectories": run.num_trajectories,
            "num_rows": run.num_rows,
            "size_bytes": run.size_bytes,
            "num_run_rows": run.num_run_rows,
            "num_run_episodes": len(run.returns),
            "quarter_returns": run.quarter_returns(),
            "final_return": final_return,
            "learning_curve": None,
        }
        if len(run.returns):
            # Not into the store: what is in there is the store's.
            picture = path.resolve().parent / "learning_curve.png"
            draw_learning_curve(run, TARGET_RETURN, MEAN_EPISODES, picture)
            result["learning_curve"] = str(picture)
        if as_json:
            print(json.dumps(result, indent=2))
        else:
            console.print(result_table(result))
            if result["learning_curve"] is not None:
                picture_name = printable(result["learning_curve"])
                console.print(f"learning curve: {picture_name}", soft_wrap=True)
        if interrupt.is_requested:
            raise typer.Exit(128 + signal.SIGINT)
    if final_return is None or final_return <= REQUIRED_RETURN:
        raise MmbufError(
            f"demo: expected a mean return above {REQUIRED_RETURN:.0f} over the last "
            f"{MEAN_EPISODES} episodes, got {_number(final_return, 'no episode')}. "
            "Allow more --seconds."
        )


def check_extra() -> None:
    """Raise unless what the extra `demo` installs is there."""
    for module in ("gymnasium", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise MmbufError(f'demo: {module} is missing. Install it: pip install "mmbuf[demo]"')


def check_path(path: Path) -> None:
    """Raise unless a store can be made at ``path`` or is there already."""
    if path.exists() and not path.is_dir():
        raise MmbufError(f"{path}: expected a directory, got a file. Choose another --path.")
    if path.is_dir() and any(path.iterdir()) and not (path / "journal.jsonl").exists():
        raise MmbufError(
            f"{path}: expected a store or an empty directory, got a directory with other files. "
            "Choose another --path."
        )


class Interrupt:
    """Within the block the first Ctrl-C only sets `is_requested`; the second one raises.

    An exception could come between any two instructions, the buffer's own among them.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = signal.SIG_DFL

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


class Collector(threading.Thread):
    """Steps the environments with the newest `policy`, and puts trajectories on the channel.

    Ends when the channel is closed. Closes it itself when it fails; `error` says why.
    """

    def __init__(self, envs: SyncVectorEnv, channel: Channel, seed: int) -> None:
        super().__init__(name="mmbuf-demo-collector", daemon=True)
        self.policy: Policy | None = None  # None: random actions
        self.error: Exception | None = None
        self._envs = envs
        self._channel = channel
        self._seed = seed

    def run(self) -> None:
        """Collect until nobody takes it any more."""
        try:
            self._collect()
        except ClosedError:
            pass
        except Exception as error:
            self.error = error
        finally:
            self._channel.close()

    def _collect(self) -> None:
        rng = np.random.default_rng(self._seed)
        states, _ = self._envs.reset(seed=self._seed)
        rollout = TrajectoryCollector(max_episode_length=EPISODE_STEPS)
        while True:
            for _ in range(NUM_STEPS):
                policy = self.policy
                if policy is None:
                    version = 0
                    actions = rng.uniform(-1, 1, (NUM_ENVS, 1)).astype(np.float32)
                else:
                    version = policy.version
                    actions = policy.act(states, rng)
                after, rewards, terminations, truncations, infos = self._envs.step(TORQUE * actions)
                rollout.append(
                    curr_obs={"states": states},
                    next_obs={"states": final_states(after, infos)},
                    actions=actions,
                    rewards=rewards[:, None].astype(np.float32),
                    terminations=terminations[:, None],
                    truncations=truncations[:, None],
                    versions=np.full((NUM_ENVS, 1), version, np.float32),
                )
                states = after
            self._channel.put(rollout.to_trajectory())
            rollout.clear()


def final_states(states: NDArray[np.float32], infos: Mapping[str, Any]) -> NDArray[np.float32]:
    """What a step led to, ``[B, S]``: where an episode ended, its last state.

    There ``states`` has the first one of the next episode already (`AutoresetMode.SAME_STEP`).
    """
    if "final_obs" not in infos:
        return states
    is_over = infos["_final_obs"]
    states = states.copy()
    states[is_over] = np.stack(infos["final_obs"][is_over])
    return states


@dataclass
class Progress:
    """What the trainer knows of its run."""

    seconds: float
    started_s: float = field(default_factory=time.monotonic)
    num_rows: int = 0
    num_updates: int = 0
    returns: list[float] = field(default_factory=list)
    unfinished: NDArray[np.float64] | float = 0.0
    num_rounds_held: int = 0
    add_s: list[float] = field(default_factory=list)
    sample_s: list[float] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Since the training began."""
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        """The target was held, or the time is up."""
        return self.num_rounds_held >= HOLD_ROUNDS or self.elapsed_s >= self.seconds

    def note(self, rewards: NDArray[Any], dones: NDArray[Any]) -> None:
        """Count the rows ``[T, B]`` of one trajectory, and the episodes that end in them."""
        self.num_rows += rewards.size
        returns, _, self.unfinished = episode_returns(rewards, dones, self.unfinished)
        if returns.size:
            self.returns.extend(returns.tolist())
            is_held = np.mean(self.returns[-MEAN_EPISODES:]) > TARGET_RETURN
            self.num_rounds_held = self.num_rounds_held + 1 if is_held else 0

    def result(self) -> dict[str, Any]:
        """What the files cannot tell."""
        return {
            "train_s": round(self.elapsed_s, 1),
            "num_updates": self.num_updates,
            "add_us": _microseconds(self.add_s),
            "sample_us": _microseconds(self.sample_s),
        }

    def table(self, num_trajectories: int) -> Table:
        """The live display."""
        table = Table(title="SAC learns Pendulum-v1 from a store", show_header=False, min_width=60)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        table.add_row("time", f"{self.elapsed_s:.0f} s", f"of at most {self.seconds:.0f} s")
        table.add_row("steps", f"{self.num_rows:,}", f"in {NUM_ENVS} environments")
        window = min(num_trajectories, WINDOW_SIZE)
        table.add_row("window", f"{window}", f"newest of {num_trajectories:,} trajectories")
        table.add_row("updates", f"{self.num_updates:,}", f"on {BATCH_ROWS} rows each")
        add, sample = _microseconds(self.add_s), _microseconds(self.sample_s[-1_000:])
        table.add_row("add", f"{_number(add['median'])} µs", "median")
        table.add_row("sample", f"{_number(sample['median'])} µs", "median wait, drawn ahead")
        mean = mean_of_last(self.returns, MEAN_EPISODES)
        table.add_row(
            "return", _number(mean), f"mean of {MEAN_EPISODES} episodes, target {TARGET_RETURN:.0f}"
        )
        return table


def train(
    buffer: TrajectoryReplayBuffer,
    seconds: float,
    seed: int,
    interrupt: Interrupt,
    console: Console,
) -> Progress:
    """Collect and learn until the target is held, the time is up or the user has had enough.

    Learning never waits for the environments. Whenever the last trajectory has had its share of
    updates, the next one is taken if it is there; the channel holds few, so the collector, which is
    faster, waits for the learner and its policy is never much older than the newest.
    """
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    torch.manual_seed(seed)
    learner = SAC(num_states=3, num_actions=1)
    envs = SyncVectorEnv([make_env] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    channel = Channel(maxsize=1)
    collector = Collector(envs, channel, seed)
    progress = Progress(seconds)

    def add(trajectory: Trajectory) -> None:
        start_s = time.perf_counter()
        buffer.add_trajectories([trajectory])
        progress.add_s.append(time.perf_counter() - start_s)
        columns = trajectory.to_columns()
        progress.note(columns["rewards"][..., 0].numpy(), columns["dones"][..., 0].numpy())

    # Batches are drawn while the learner computes; what it is given lacks the newest one or two.
    dataset = PreloadReplayBufferDataset(buffer, None, BATCH_ROWS, 1, 0, prefetch_size=2)
    collector.start()
    try:
        with dataset, Live(console=console, auto_refresh=False) as live:
            batches: Iterator[Batch] | None = None
            shown_s = 0.0
            while not (progress.is_over or interrupt.is_requested):
                # A store that was continued has rows enough, but only an add tells that they fit.
                is_warm = progress.num_rows > 0 and buffer.total_samples >= WARMUP_ROWS
                if not is_warm or learner.num_updates >= UPDATES_PER_ROW * progress.num_rows:
                    try:
                        trajectory = channel.get(timeout_s=0.0 if is_warm else 0.1)
                    except queue.Empty:
                        pass
                    except ClosedError:
                        break
                    else:
                        add(trajectory)
                if is_warm:
                    start_s = time.perf_counter()
                    batches = batches or iter(dataset)
                    batch = next(batches)
                    progress.sample_s.append(time.perf_counter() - start_s)
                    learner.learn(
                        batch["curr_obs"]["states"],
                        batch["actions"],
                        batch["rewards"],
                        batch["next_obs"]["states"],
                        batch["terminations"],
                    )
                    if learner.num_updates % 50 == 0:
                        collector.policy = learner.policy()
                progress.num_updates = learner.num_updates
                if progress.elapsed_s >= shown_s + 0.25:
                    shown_s = progress.elapsed_s
                    live.update(progress.table(len(buffer)), refresh=True)
            live.update(progress.table(len(buffer)), refresh=True)
        console.print()
        if interrupt.is_requested:
            console.print("Interrupted: closing the store.")
    finally:
        channel.close()
        collector.join()
        envs.close()
    if collector.error is not None:
        raise collector.error
    for trajectory in channel:
        add(trajectory)
    return progress


def make_env() -> Any:
    """One pendulum."""
    import gymnasium

    return gymnasium.make("Pendulum-v1", max_episode_steps=EPISODE_STEPS)


def result_table(result: Mapping[str, Any]) -> Table:
    """The end of the story, for people."""
    title = f"What {printable(result['path'])} holds, read from its files"
    table = Table(title=title, show_header=False, min_width=60)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("trajectories", f"{result['num_trajectories']:,}")
    table.add_row("rows", f"{result['num_rows']:,}")
    table.add_row("bytes on disk", f"{result['size_bytes']:,}", end_section=True)
    for name in ("add", "sample"):
        times = result[f"{name}_us"]
        table.add_row(
            f"{name}: median, p99", f"{_number(times['median'])} µs, {_number(times['p99'])} µs"
        )
    table.add_section()
    for quarter, mean in enumerate(result["quarter_returns"], 1):
        table.add_row(f"mean return, quarter {quarter} of the run", _number(mean))
    table.add_row(
        f"mean return, last {MEAN_EPISODES} episodes",
        _number(result["final_return"]),
        style="bold",
    )
    return table


def _microseconds(durations_s: list[float]) -> dict[str, float | None]:
    if not durations_s:
        return {"median": None, "p99": None}
    median, p99 = np.quantile(durations_s, (0.5, 0.99)) * 1e6
    return {"median": round(float(median), 1), "p99": round(float(p99), 1)}


def _number(value: float | None, nothing: str = "-") -> str:
    return nothing if value is None else f"{value:,.0f}"
