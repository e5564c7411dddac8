"""Returns of episodes: as rewards come in, from a store's files, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmbuf import ReplayReader


def episode_returns(
    rewards: NDArray[Any], dones: NDArray[Any], unfinished: NDArray[Any] | float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.float64]]:
    """Returns of the episodes that end within ``[T, B]`` rewards, in the order of their ends.

    ``unfinished`` is the sum, for each environment, of what came before in its present episode.
    Gives back the returns, the steps in which the episodes end, and the new ``unfinished`` ``[B]``.
    """
    totals = unfinished + np.cumsum(rewards, axis=0, dtype=np.float64)
    # By environment, then by time: what an episode did not earn itself, the one before it did.
    envs, steps = np.nonzero(dones.T)
    at_end = totals[steps, envs]
    before = np.where(np.diff(envs, prepend=-1) == 0, np.roll(at_end, 1), 0.0)
    earned = np.zeros(totals.shape[1])
    earned[envs] = at_end  # the last one of each environment stays
    order = np.argsort(steps, kind="stable")
    return (at_end - before)[order], steps[order], totals[-1] - earned


@dataclass(frozen=True)
class StoredRun:
    """What the files say: of a whole store, and of the episodes of its latest run."""

    num_trajectories: int
    num_rows: int
    size_bytes: int
    num_run_rows: int
    returns: NDArray[np.float64]  # of the run's complete episodes, in the order of their ends
    end_rows: NDArray[np.int64]  # rows of the run up to the end of each

    def quarter_returns(self) -> list[float | None]:
        """Mean returns of the first to the last quarter of the episodes; None for no episode."""
        return [mean_of_last(part, part.size) for part in np.array_split(self.returns, 4)]


def read_run(path: Path, num_before: int) -> StoredRun:
    """Read every trajectory of a store; the run's are all but the first ``num_before``.

    Its environments go on from one trajectory to the next, and so do the episodes.
    """
    num_rows = num_run_rows = 0
    returns = [np.empty(0)]
    end_rows = [np.empty(0, np.int64)]
    unfinished: NDArray[np.float64] | float = 0.0
    with ReplayReader(path) as reader:
        trajectory_ids = reader.trajectory_ids
        for position, trajectory_id in enumerate(trajectory_ids):
            columns = reader.get_trajectory(trajectory_id).to_columns()
            rewards, dones = columns["rewards"][..., 0].numpy(), columns["dones"][..., 0].numpy()
            num_rows += rewards.size
            if position < num_before:
                continue
            ended, steps, unfinished = episode_returns(rewards, dones, unfinished)
            returns.append(ended)
            end_rows.append(num_run_rows + (steps + 1) * rewards.shape[1])
            num_run_rows += rewards.size
    return StoredRun(
        num_trajectories=len(trajectory_ids),
        num_rows=num_rows,
        size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        num_run_rows=num_run_rows,
        returns=np.concatenate(returns),
        end_rows=np.concatenate(end_rows),
    )


def mean_of_last(returns: NDArray[np.float64] | list[float], count: int) -> float | None:
    """Mean of the last ``count`` returns, or of fewer where there are no more; None of none."""
    return float(np.mean(returns[-count:])) if count and len(returns) else None


def draw_learning_curve(run: StoredRun, target: float, num_averaged: int, picture: Path) -> None:
    """Draw every episode and the mean of the last ``num_averaged`` into the file ``picture``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    # Episodes that end in the same step share one mean.
    ends, counts = np.unique(run.end_rows, return_counts=True)
    means = [mean_of_last(run.returns[:stop], num_averaged) for stop in np.cumsum(counts)]

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(target, color="#2a9d8f", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"target {target:.0f}",
        (0, target),
        xytext=(4, 4),
        textcoords="offset points",
        color="#2a9d8f",
    )
    axes.scatter(
        run.end_rows, run.returns, s=16, color="#8d99ae", alpha=0.7, linewidths=0, label="episode"
    )
    axes.plot(
        ends,
        np.array(means, np.float64),
        color="#d1495b",
        linewidth=2.2,
        marker="o",
        markersize=4,
        label=f"mean of the last {num_averaged} episodes",
    )
    axes.set_title("SAC on Pendulum-v1, from the stored rewards", loc="left", fontweight="bold")
    axes.set_xlabel("environment steps stored")
    axes.set_ylabel("return of an episode")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture)
