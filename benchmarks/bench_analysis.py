"""What it costs to ask a store, beside loading the same trajectories with `torch.load`.

Cases and their bars, for 1,000 image trajectories of [25, 4] and 9.9 MB:

means    the mean reward of each trajectory, from `Tables.steps`
returns  the return of each episode, from `Tables.episodes`

each in at most 1/50 of the time of loading all, with less than 200 MB of memory above what the
process had before, and reading nothing but the columns used, the index and the head of each file,
by which it is known: what is before its columns, at least 4 KiB (returns: rewards and dones).

A store is opened anew for each answer; the trajectories are in the page cache, or not at all
("cold": the disk reads whole pages). `torch.load` reads 100 files, one after the other, and its
time is scaled to 1,000; with `mmap=True` it reads no images either. The answers are compared first.
torch is always there: `--peers` changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peers
import timing
import torch
from bench_checkpoint import drop_from_page_cache, share_in_page_cache, sync
from timing import Bar, Case, Row, UnequalError, clock

from mmbuf import ReplayReader, TrajectoryReplayBuffer
from mmbuf.analysis import Tables

CASES = ("means", "returns")
SHAPE = (25, 4)
NUM_ROWS = SHAPE[0] * SHAPE[1]
DONES = ("dones",)
USED = {"means": (peers.ROW_NUMBER,), "returns": (peers.ROW_NUMBER, DONES)}
LEAST_HEAD_BYTES = 4 << 10

Answer = Callable[[], np.ndarray]
Trajectory = dict[str, Any]


class Stored:
    """The same trajectories as a store and, the first of them, as files of torch's."""

    def __init__(self, directory: Path, *, is_tiny: bool) -> None:
        self.store, self.saved = directory / "store", directory / "torch"
        self.num_trajectories = 8 if is_tiny else 1000
        self.num_saved = 4 if is_tiny else 100
        self.data = peers.make_data(NUM_ROWS, has_images=True)
        self._dones = self.data[DONES].copy()
        (self._trajectory,) = peers.trajectories_of(self.data, *SHAPE)
        self.trajectory_bytes = NUM_ROWS * peers.row_bytes_of(self.data)
        self._write()

    def _write(self) -> None:
        self.saved.mkdir()
        with TrajectoryReplayBuffer(
            sample_window_size=1, auto_save=True, auto_save_path=str(self.store)
        ) as buffer:
            for position in range(self.num_trajectories):
                # Always the same tensors, with other row numbers and ends of episodes.
                first = position * NUM_ROWS
                self.data[peers.ROW_NUMBER][:, 0] = np.arange(first, first + NUM_ROWS)
                self.data[DONES][:] = np.roll(self._dones, position, axis=0)
                buffer.add_trajectories([self._trajectory])
                if position < self.num_saved:
                    torch.save(self._trajectory, self.saved_at(position))
                    sync(self.saved_at(position))
            buffer.flush(sync=True)

    def saved_at(self, position: int) -> Path:
        return self.saved / f"trajectory_{position}.pt"

    def heads_bytes(self) -> int:
        """Of all files: what is before their columns, but what is read of each at once at least."""
        with ReplayReader(self.store) as reader:
            entries = map(reader.get_entry, reader.trajectory_ids)
            heads = [min(part.offset for part in entry.parts) for entry in entries]
        return sum(max(LEAST_HEAD_BYTES, head) for head in heads)

    def used_bytes(self, name: str) -> int:
        """Of all columns that the answer needs."""
        row_bytes = sum(self.data[path][0].nbytes for path in USED[name])
        return self.num_trajectories * NUM_ROWS * row_bytes


# -- answers --------------------------------------------------------------------------------------


def means_of_tables(stored: Stored) -> np.ndarray:
    steps = Tables(stored.store).steps.to_arrow(["trajectory_id", "rewards"])
    means = steps.group_by("trajectory_id").aggregate([("rewards", "mean")])
    return means.sort_by("trajectory_id")["rewards_mean"].to_numpy()


def means_of_sql(stored: Stored) -> np.ndarray:
    with Tables(stored.store).connect() as connection:
        query = (
            "select avg(rewards) as mean from steps group by trajectory_id order by min(rewards)"
        )
        return connection.sql(query).fetchnumpy()["mean"]


def means_of_files(stored: Stored, *, mmap: bool = False) -> np.ndarray:
    loaded = (torch.load(stored.saved_at(i), mmap=mmap) for i in range(stored.num_saved))
    return np.array([trajectory["rewards"].double().mean() for trajectory in loaded])


def returns_of_tables(stored: Stored) -> np.ndarray:
    return Tables(stored.store).episodes.to_arrow(["episode_return"])["episode_return"].to_numpy()


def returns_of_files(stored: Stored, *, mmap: bool = False) -> np.ndarray:
    loaded = (torch.load(stored.saved_at(i), mmap=mmap) for i in range(stored.num_saved))
    return np.array([total for trajectory in loaded for total in returns_of(trajectory)])


def returns_of(trajectory: Trajectory) -> list[float]:
    """Of the episodes of one environment after the other, episode by episode."""
    rewards = trajectory["rewards"][..., 0].double().numpy()
    dones = trajectory["dones"][..., 0].numpy()
    return [
        episode.sum()
        for env in range(SHAPE[1])
        for episode in np.split(rewards[:, env], np.flatnonzero(dones[:, env]) + 1)
        if episode.size
    ]


# -- costs ----------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one answer: what was asked for is what calls read, be it from the page cache or not."""

    seconds: float
    asked_bytes: int
    disk_bytes: int
    peak_bytes: int


def cost_of(answer: Callable[[], object]) -> Cost:
    timing.trim_heap()
    forget_peak()
    memory = numbers_in("status").get("VmRSS", 0) * 1024
    before = numbers_in("io")
    start = clock()
    answer()
    seconds = clock() - start
    after = numbers_in("io")
    peak = numbers_in("status").get("VmHWM", 0) * 1024 - memory
    asked, disk = (after.get(key, 0) - before.get(key, 0) for key in ("rchar", "read_bytes"))
    # The numbers before are no part of themselves, but of those after.
    return Cost(seconds, asked - before["size"], disk, max(0, peak))


def numbers_in(file: str) -> dict[str, int]:
    """What the system counts of this process, where it does, and the ``size`` of what it says."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/self/{file}").read_text()
    numbers = {"size": len(text)}
    for line in text.splitlines():
        key, value = line.split(":", 1)
        if (number := value.split()[:1]) and number[0].isdigit():
            numbers[key] = int(number[0])
    return numbers


def forget_peak() -> None:
    """VmHWM begins anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def ask(
    name: str,
    directory: Path,
    *,
    of_tables: Callable[[Stored], np.ndarray],
    of_sql: Callable[[Stored], np.ndarray] | None,
    of_files: Callable[..., np.ndarray],
    is_tiny: bool,
) -> Case:
    stored = Stored(directory, is_tiny=is_tiny)
    answers: dict[str, Answer] = {"mmbuf": functools.partial(of_tables, stored)}
    if of_sql is not None and importlib.util.find_spec("duckdb") is not None:
        answers["mmbuf, SQL"] = functools.partial(of_sql, stored)
    answers["torch.load"] = functools.partial(of_files, stored)
    answers["torch.load, mmap"] = functools.partial(of_files, stored, mmap=True)
    expected = answers["torch.load"]()
    for key, answer in answers.items():
        if not np.array_equal(answer()[: len(expected)], expected):
            raise UnequalError(f"{key}: other {name} than those of torch.load")

    scale = stored.num_trajectories / stored.num_saved
    journal_bytes = (stored.store / "journal.jsonl").stat().st_size
    rows: list[Row] = []
    ratios = []
    for state in ("cached", "cold"):
        costs: dict[str, list[Cost]] = {key: [] for key in answers}
        shares = []
        with timing.frozen_gc():
            for _ in range(2 if is_tiny else 5):
                for key, answer in answers.items():
                    if state == "cold":
                        of = stored.saved if key.startswith("torch") else stored.store
                        drop_from_page_cache(of)
                        shares.append(share_in_page_cache(of))
                    costs[key].append(cost_of(answer))
        times = {
            f"{key}, {state}": [
                cost.seconds * (scale if key.startswith("torch") else 1) for cost in found
            ]
            for key, found in costs.items()
        }
        notes = {f"{key}, {state}": note_of(found) for key, found in costs.items()}
        found = timing.rows_of(times, notes)
        rows += found
        ratios.append(timing.ratio_bar(found, found[0].name, 1 / 50, f"torch.load, {state}"))
    of_mmbuf = costs["mmbuf"]
    heads_bytes = stored.heads_bytes()
    used_bytes = stored.used_bytes(name)
    asked_bytes = max(cost.asked_bytes for cost in of_mmbuf)
    other_bytes = asked_bytes - journal_bytes - heads_bytes - used_bytes
    peak = max(cost.peak_bytes for cost in of_mmbuf)
    bars = [
        *ratios,
        Bar("bytes read of other columns: none", other_bytes, 0, unit=""),
        Bar("memory below 200 MB", peak / 1e6, 200, is_strict=True, unit=" MB"),
    ]
    remarks = [
        f"torch.load reads {stored.num_saved} files; {scale:g} times what it took is shown",
        f"mmbuf reads {used_bytes:,} bytes of the columns used, {heads_bytes:,} of heads and a"
        f" journal of {journal_bytes:,}",
        f"cold: {np.median(shares):.1%} of the files in the page cache",
    ]
    shutil.rmtree(stored.store)
    shutil.rmtree(stored.saved)
    title = (
        f"{stored.num_trajectories} trajectories of {list(SHAPE)},"
        f" {stored.num_trajectories * stored.trajectory_bytes / 1e9:.2f} GB"
    )
    return Case(name, title, rows, bars, "ms", remarks)


def note_of(costs: list[Cost]) -> str:
    asked, disk, peak = (
        np.median([getattr(cost, field) for cost in costs]) / 1e6
        for field in ("asked_bytes", "disk_bytes", "peak_bytes")
    )
    return f"reads {asked:.2f} MB, {disk:.2f} from the disk; peak memory {peak:.1f} MB"


def main() -> int:
    arguments = timing.argument_parser(__doc__, CASES).parse_args()
    cases = {
        "means": functools.partial(
            ask, of_tables=means_of_tables, of_sql=means_of_sql, of_files=means_of_files
        ),
        "returns": functools.partial(
            ask, of_tables=returns_of_tables, of_sql=None, of_files=returns_of_files
        ),
    }
    return timing.run_cases(arguments, cases, ["duckdb"], [], 1 << 30)


if __name__ == "__main__":
    sys.exit(main())
