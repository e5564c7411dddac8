"""The machine: starts all, sends signals, kills the trainer and starts another, and judges.

Signals come from here, another process, at moments that nobody there can know. What a process has
done last, its stacks and its counts are there when it is dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from children import Child

from attack import readers, trainer
from attack.board import Slot
from attack.process import PATIENCE_S, Account, Orders, Papers
from attack.rows import serial_of
from mmbuf import ReplayReader, health

_STARTING_S = 60.0
_ENDING_S = 3 * PATIENCE_S
_SHARE_OF_KILLS = 0.4  # of the time; the trainer of the rest lives long enough for its figures
_SIGNALS = (*[signal.SIGINT] * 8, *[signal.SIGUSR1] * 3, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Config:
    """One kind of buffer, and what the attack on it goes without.

    That is for finding out what a failure comes from: names of calls in `trainer.WEIGHTS` and of
    forms in ``Trainer._add``, or ``signals``, ``handlers``, ``again`` (signals in a call that was
    interrupted), ``kills``, ``follower``, ``sitter``, ``save over`` (of the checkpoint that the
    sitter is on), ``load at once`` (a window that is empty while a checkpoint is loaded is no fault
    then).
    """

    name: str
    options: dict[str, Any]
    without: frozenset[str] = frozenset()

    @property
    def removable(self) -> int | None:
        """The window, where trajectories older than that are removed to save disk."""
        is_bounded = self.options.get("max_disk_bytes") is not None
        return self.options["sample_window_size"] if is_bounded else None


CONFIGS = (
    Config("arrow", {"sample_window_size": 5}),
    Config("npy", {"sample_window_size": 0, "cache_size": 3, "trajectory_format": "npy"}),
    Config(
        "pt", {"sample_window_size": 5, "trajectory_format": "pt", "max_pending_bytes": 300_000}
    ),
    Config(
        "a small cache", {"sample_window_size": 5, "cache_size": 3, "max_pending_bytes": 300_000}
    ),
    Config("no cache", {"sample_window_size": 0, "cache_size": 0}),
    Config("little disk", {"sample_window_size": 5, "cache_size": 3, "max_disk_bytes": 4 << 20}),
)


@dataclasses.dataclass
class _Attacked:
    """One process, and where it can be found when it is dead."""

    papers: Papers
    child: Child


@dataclasses.dataclass
class Summary:
    """What all processes did, and the figures of those that lived to the end."""

    tally: Counter[str] = dataclasses.field(default_factory=Counter)
    figures: dict[str, dict[str, tuple[float, float]]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        counts = [f"{what} {number}" for what, number in sorted(self.tally.items())]
        figures = [
            f"{role}, {what}: {early:g}, late {late:g}"
            for role, told in self.figures.items()
            for what, (early, late) in told.items()
        ]
        return "\n".join(["; ".join(counts), *figures])


class Machine:
    """An attack on one store, in an empty directory, for so many seconds."""

    def __init__(self, directory: Path, config: Config, seed: int, life_s: float) -> None:
        self._directory = directory
        self._config = config
        self._seed = seed
        self._life_s = life_s
        self._rng = Random(f"{seed} machine")
        self._board, self._orders = Slot(), Slot(1 << 12)
        self._orders.put(Orders())
        self._attacked: dict[str, _Attacked] = {}
        self._num_lives = 0
        self._summary = Summary()

    def run(self) -> Summary:
        """What was done; AssertionError at the first that went wrong."""
        try:
            self._start_trainer()
            for role, life in (("follower", readers.follow), ("sitter", readers.sit)):
                if role not in self._config.without:
                    self._start(role, life)
            self._torment()
            self._end()
            self._check_what_is_left()
        finally:
            for attacked in self._attacked.values():
                attacked.child.kill()
        return self._summary

    def _start_trainer(self) -> None:
        self._num_lives += 1
        self._start("trainer", trainer.live)

    def _start(self, role: str, life: Callable[..., Any]) -> None:
        seed = f"{self._seed} {role} {self._num_lives}"
        papers = Papers(self._directory, role, seed, self._config, self._board, self._orders)
        left_s = int(self._life_s + _STARTING_S + 2 * _ENDING_S)
        attacked = _Attacked(papers, Child(life, papers, life_s=left_s))
        self._attacked[role] = attacked
        deadline = time.monotonic() + _STARTING_S
        while not attacked.child.pipe.poll(0.01):  # it does so when it has died as well
            assert time.monotonic() < deadline, self._told(attacked, "does not begin")
        self._receive(attacked)

    def _receive(self, attacked: _Attacked) -> Any:
        """What a child says, where it says something."""
        try:
            return attacked.child.receive(PATIENCE_S)
        except (AssertionError, EOFError) as error:
            raise AssertionError(self._told(attacked, str(error) or "has died")) from None

    def _judge(self, attacked: _Attacked) -> None:
        """AssertionError if a child has failed or died."""
        if attacked.child.exit_code is None and not attacked.child.pipe.poll():
            return
        said = self._receive(attacked)
        raise AssertionError(self._told(attacked, f"ended too early: {said}"))

    def _told(self, attacked: _Attacked, what: str) -> str:
        """A failure, with all that is known of it."""
        papers = attacked.papers
        attacked.child.kill()
        stacks = papers.stacks.read_text() if papers.stacks.exists() else ""
        others = [other.papers for other in self._attacked.values() if other is not attacked]
        return "\n".join(
            [
                f"{self._config}, seed {self._seed}: the {papers.role}: {what}",
                f"exit code {attacked.child.exit_code}; stacks, if it hung or died:\n{stacks}",
                *(f"the {other.role} has done:\n{other.ring}" for other in [*others, papers]),
            ]
        )

    def _torment(self) -> None:
        """Send signals, and kill the trainer now and then."""
        begun = time.monotonic()
        end = begun + self._life_s
        last_kill = begun + self._life_s * _SHARE_OF_KILLS
        killed_at = self._next_kill(begun, last_kill)
        while (now := time.monotonic()) < end:
            time.sleep(self._rng.uniform(0, self._rng.choice((0.003, 0.03, 0.03, 0.1))))
            for attacked in self._attacked.values():
                self._judge(attacked)
            if "signals" not in self._config.without:
                role = self._rng.choice(("trainer", "trainer", *self._attacked))
                self._attacked[role].child.send_signal(self._rng.choice(_SIGNALS))
            if killed_at < now and "kills" not in self._config.without:
                self._kill_trainer()
                killed_at = self._next_kill(now, last_kill)

    def _next_kill(self, now: float, last: float) -> float:
        """When to kill the trainer that lives from now on; never after ``last``."""
        when = now + self._rng.uniform(0.3, min(10.0, self._life_s * _SHARE_OF_KILLS))
        return when if when < last else float("inf")

    def _kill_trainer(self) -> None:
        attacked = self._attacked.pop("trainer")
        attacked.child.kill()
        self._summary.tally.update(attacked.papers.tally.get()[1] or {})
        self._summary.tally["kills"] += 1
        self._start_trainer()

    def _end(self) -> None:
        self._orders.put(Orders(is_over=True))
        deadline = time.monotonic() + _ENDING_S
        for attacked in self._attacked.values():
            while not attacked.child.pipe.poll(0.01):
                assert time.monotonic() < deadline, self._told(attacked, "does not end")
            account: Account = self._receive(attacked)
            self._summary.tally.update(account.tally)
            self._summary.figures[attacked.papers.role] = account.figures

    def _check_what_is_left(self) -> None:
        """The store is what it must be, and nothing in it or in a checkpoint is damaged."""
        possible = self._board.get()[1].possible
        with ReplayReader(self._directory / "store") as reader:
            ids = reader.trajectory_ids
            listed = [(i, serial_of(reader.get_trajectory(i))) for i in ids]
        parts = [content.part_shown(listed, self._config.removable) for content in possible]
        if not any(parts):
            what = f"has left {listed}, expected one of {possible}"
            raise AssertionError(self._told(self._attacked["trainer"], what))
        for name in ("store", *sorted(trainer.CHECKPOINTS)):
            path = self._directory / name
            if path.exists():
                found = [finding for finding in health.verify(path) if finding.is_damage]
                assert found == [], self._told(self._attacked["trainer"], f"{path}: {found}")


def run(directory: Path, config: Config, seed: int, life_s: float) -> Summary:
    """An attack. What is in its directory is left where it has failed."""
    summary = Machine(directory, config, seed, life_s).run()
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return summary
