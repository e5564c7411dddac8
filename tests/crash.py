"""Killed writers: a child writes to a store without pause and is killed; what is left is checked.

A `Series` is a directory in which one child after the other lives: it opens the store, adds, saves,
loads and clears, tells the parent through a pipe what it begins and what was acknowledged, and dies
of SIGKILL at a moment that the seed decides: some time after it began something, or at (before,
after, or in the middle of) one of the calls by which `mmbuf.files` changes the disk.

The parent keeps a model of what must be there and compares. What it finds is where the next child
begins. Used by ``test_crash.py`` and, for more rounds, by ``tools/crash_loop.py``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import columns_of, is_equal, is_whole, names_of, trajectory
from disk import Calls

from mmbuf import ReplayReader, TrajectoryReplayBuffer, files, index

LIVES = 8  # children in one directory
PATIENCE_S = 30  # for one child
LIFETIME_S = 0.4  # of a child whose planned moment does not come
OPS = ("open", "add", "flush", "clear", "save", "save again", "load")
WEIGHTS = {"add": 10, "flush": 5, "clear": 0.3, "save": 0.7, "save again": 1, "load": 0.5}
_IMAGE = (48, 48)

Listed = list[tuple[int, int]]  # ids, and the serials that say what is in them


@functools.lru_cache(maxsize=4096)
def content(serial: int) -> dict[str, Any]:
    """The trajectory of a serial, which no other trajectory of a series has."""
    return trajectory(serial, 2 + serial % 4, image=_IMAGE)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one child dies: in ``op``, at a call that changes the disk or after a while."""

    seed: int
    op: str  # or "snapshot"
    is_at_call: bool
    call: int  # its number among those within such an op
    place: str  # before, after or amid that call
    begun: int  # how many such ops have begun
    delay_s: float  # from then on

    @classmethod
    def of(cls, rng: random.Random) -> Plan:
        op = rng.choice((*OPS, "add", "snapshot"))
        return cls(
            rng.getrandbits(32),
            op,
            op == "snapshot" or rng.random() < 0.6,
            rng.randint(1, 4 if op == "open" else rng.choice((8, 40, 200))),
            rng.choice(("before", "after", "amid")),
            rng.randint(1, 8) if op != "open" else 1,
            rng.uniform(0, rng.choice((0.001, 0.01, 0.1))),
        )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    listed: Listed
    counter: int


# -- the child -----------------------------------------------------------------------------------


class _Death:
    """Kills this process at a call that changes the disk."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._calls = 0
        self.op = "open"
        self.is_in_snapshot = False

    def change(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        plan = self._plan
        if name in ("open", "close"):
            return call(*arguments)
        if name == "fsync":  # a killed process loses nothing that is not synced
            call = lambda fd: None  # noqa: E731
        is_meant = plan.op == self.op or (plan.op == "snapshot" and self.is_in_snapshot)
        if not plan.is_at_call or not is_meant:
            return call(*arguments)
        self._calls += 1
        if self._calls == plan.call:
            if plan.place == "amid" and name in ("write", "pwrite"):
                fd, data, *offset = arguments
                call(fd, memoryview(data)[: len(data) // 2], *offset)
            elif plan.place == "after":
                call(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    def in_snapshot(self, write: Callable[..., None]) -> Callable[..., None]:
        def write_snapshots(*arguments: Any) -> None:
            self.is_in_snapshot = self.op not in ("save", "save again")
            write(*arguments)
            self.is_in_snapshot = False

        return write_snapshots


def _live(series: Series, plan: Plan, serial: int, outlet: int) -> None:
    """The child's life. Its checkpoints are those that the parent knows of and its own."""
    death = _Death(plan)
    files.os = Calls(death.change)  # type: ignore[attr-defined]
    index.write_snapshots = death.in_snapshot(index.write_snapshots)
    rng = random.Random(plan.seed)
    weights = dict(WEIGHTS)
    if plan.op in weights:
        weights[plan.op] += 4

    def say(**message: Any) -> None:
        os.write(outlet, json.dumps(message).encode() + b"\n")

    say(begin="open")
    buffer = TrajectoryReplayBuffer(**series.options)
    say(done="open", counter=buffer.trajectory_counter)
    names = list(series.checkpoints)
    while True:
        (op,) = rng.choices(list(weights), list(weights.values()))
        if op == "load" and not names:
            continue
        death.op = op
        if op == "add":
            serials = list(range(serial, serial + rng.randint(1, 4)))
            serial += len(serials)
            say(begin=op, serials=serials)
            buffer.add_trajectories([content(i) for i in serials])
            say(done=op)
            if rng.random() < 0.2:
                assert is_whole(buffer.sample(16))
        elif op == "flush":
            say(begin=op)
            buffer.flush(sync=rng.random() < 0.1)
            say(done=op)
        elif op == "clear":
            say(begin=op)
            buffer.clear()
            say(done=op)
        else:
            name = {"save": f"new {serial} {len(names)}", "save again": "same"}.get(op)
            name = name or rng.choice(names)
            say(begin=op, name=name)
            if op == "load":
                buffer.load_checkpoint(series.directory / name)
            else:
                buffer.save_checkpoint(series.directory / name)
                names = [*dict.fromkeys([*names, name])]
            say(done=op)


def _fork(child: Callable[[int], None]) -> tuple[int, int]:
    """A child of this process and the end of the pipe that it writes to."""
    inlet, outlet = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads. The child uses none of this process's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(outlet)
        return pid, inlet
    try:
        os.close(inlet)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)  # ends the child should it hang
        torch.set_num_threads(1)  # torch's own threads do not come through a fork
        child(outlet)
    except BaseException:
        os.write(outlet, json.dumps({"error": traceback.format_exc()[-3000:]}).encode() + b"\n")
    finally:
        os._exit(1)


# -- the parent ----------------------------------------------------------------------------------


class Series:
    """A directory with a store and checkpoints, and what must be in them."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        directory.mkdir()
        self.store = directory / "store"
        self.window = rng.choice((0, 3, 8))
        is_bounded = self.window == 3 and rng.random() < 0.8
        self.options: dict[str, Any] = {
            "auto_save": True,
            "auto_save_path": self.store,
            "trajectory_format": rng.choice(("arrow", "npy")),
            "sample_window_size": self.window,
            "cache_size": rng.choice((None, 2)),
            "max_disk_bytes": 1 << 20 if is_bounded else None,
        }
        self.checkpoints: dict[str, Checkpoint] = {}
        self.num_acknowledged = 0
        self.op = ""  # in which the last child died
        self._rng = rng
        self._next_serial = 0
        self._counter = self._safe_counter = 0  # the next id; the least that it may be
        self._listed: Listed = []
        self._num_safe = 0  # of those, acknowledged
        self._message: dict[str, Any] = {}  # of the op that has begun and not ended
        self._saved: set[str] = set()  # in this life
        self._checked: set[int] = set()  # serials whose every value was compared

    def round(self) -> None:
        """One child lives and dies; AssertionError if anything is lost or wrong."""
        plan = Plan.of(self._rng)
        try:
            self._kill_one(plan)
            self._check_store()
            self._check_checkpoints()
        except Exception as error:
            raise AssertionError(f"{plan} {self.options}: {self._message}: {error}") from error

    def _kill_one(self, plan: Plan) -> None:
        self._message, self._saved = {}, set()
        first = self._next_serial
        pid, inlet = _fork(lambda outlet: _live(self, plan, first, outlet))
        try:
            self._listen(plan, inlet, pid)
        finally:
            os.close(inlet)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code == -signal.SIGKILL, f"the child ended with {code}"
        self.op = self._message.get("begin", "between")

    def _listen(self, plan: Plan, inlet: int, pid: int) -> None:
        """Take in what the child says until it is dead; kill it if that is the plan."""
        deadline = time.monotonic() + PATIENCE_S
        rest, begun, killed_at = b"", 0, time.monotonic() + LIFETIME_S
        while True:
            now = time.monotonic()
            assert now < deadline, "the child neither ended nor was killed"
            if now >= killed_at:
                os.kill(pid, signal.SIGKILL)
                killed_at = deadline
            if not select.select([inlet], [], [], min(killed_at, deadline) - now)[0]:
                continue
            data = os.read(inlet, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._apply(message)
                if message.get("begin") == plan.op and not plan.is_at_call:
                    begun += 1
                    if begun == plan.begun:
                        killed_at = time.monotonic() + plan.delay_s

    def _apply(self, message: dict[str, Any]) -> None:
        assert "error" not in message, message["error"]
        if "begin" in message:
            self._message = message
            for serial in message.get("serials", ()):
                self._listed.append((self._counter, serial))
                self._counter += 1
                self._next_serial = serial + 1
            return
        op, name = message["done"], self._message.get("name", "")
        if op == "open":
            assert message["counter"] >= self._counter, "ids are given again"
            self._counter = message["counter"]
        elif op == "clear":
            self._listed, self._num_safe = [], 0
        elif op in ("save", "save again"):
            self.checkpoints[name] = self._would_save()
            self._saved.add(name)
        elif op == "load":
            self._listed = list(self.checkpoints[name].listed)
            self._counter = max(self._counter, self.checkpoints[name].counter)
        if op != "add" and op != "open":
            self.num_acknowledged += max(0, len(self._listed) - self._num_safe)
            self._num_safe = len(self._listed)
            self._safe_counter = self._counter
        self._message = {}

    def _would_save(self) -> Checkpoint:
        return Checkpoint(self._listed[-self.window :], self._counter)

    # What may be there: the list from somewhere at its beginning on, where there is a budget, to
    # somewhere behind what was acknowledged; or what the op that was not finished makes of it.
    def _is_allowed(self, found: Listed) -> bool:
        op = self._message.get("begin")
        if op == "clear" and not found:
            return True
        if op == "load" and found == self.checkpoints[self._message["name"]].listed:
            counter = self.checkpoints[self._message["name"]].counter
            self._safe_counter = max(self._safe_counter, counter)
            return True
        start = 0
        if self.options["max_disk_bytes"] is not None and found and found[0] in self._listed:
            start = self._listed.index(found[0])
        stop = start + len(found)
        if start > max(0, stop - self.window):
            return False
        return stop >= self._num_safe and found == self._listed[start:stop]

    def _check_store(self) -> None:
        as_reader = self._rng.random() < 0.4
        if as_reader and (self.store / index.JOURNAL).exists():
            with ReplayReader(self.store) as reader:
                found = self._look_at(reader)
        else:
            with TrajectoryReplayBuffer(**self.options) as buffer:
                found = self._look_at(buffer)
                temporaries = [p.name for p in self.store.rglob("*") if p.name.endswith(".tmp")]
                assert temporaries == [], "temporaries are left"
                last = found[-1][0] if found else -1
                assert buffer.trajectory_counter > last, "ids are given again"
        assert self._is_allowed(found), (
            f"expected {self._num_safe} or more of {self._listed}, found {found}"
        )
        self._listed, self._num_safe = found, len(found)
        last = found[-1][0] + 1 if found else 0
        # Ids of what was never acknowledged may come again.
        self._counter = self._safe_counter = max(last, self._safe_counter)

    def _check_checkpoints(self) -> None:
        op, name = self._message.get("begin"), self._message.get("name", "")
        unfinished = name if op in ("save", "save again") else ""
        for saved in self._saved - {unfinished}:
            found = self._load(saved)
            assert found == self.checkpoints[saved], f"checkpoint {saved}: {found}"
            self._check_names(saved)
        if unfinished:
            found = self._load(unfinished)
            old, new = self.checkpoints.get(unfinished), self._would_save()
            assert found in (old, new), f"expected {old} or {new}, found {found}"
            if found is not None:
                self.checkpoints[unfinished] = found

    def _check_names(self, name: str) -> None:
        """Nothing but what is listed is in a finished checkpoint, and nothing is left beside it."""
        path = self.directory / name
        snapshot = json.loads((path / index.INDEX).read_text())
        listed = {entry["file"] for entry in snapshot["trajectory_index"].values()}
        assert {p.name for p in path.iterdir()} == {*listed, index.INDEX, index.METADATA}
        left = [n for n in names_of(self.directory, ".tmp") if n.startswith(f".{name}.")]
        assert left == [], "temporaries are left"

    def _load(self, name: str) -> Checkpoint | None:
        if not (self.directory / name).exists():
            return None
        with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
            buffer.load_checkpoint(self.directory / name)
            return Checkpoint(self._look_at(buffer), buffer.trajectory_counter)

    def _look_at(self, store: Any) -> Listed:
        """Ids and serials of what is in a store; AssertionError if a value is wrong."""
        found: Listed = []
        for trajectory_id in store.trajectory_ids:
            item = store.get_trajectory(trajectory_id).to_columns()
            serial = int(item["curr_obs"]["states"][0, 0, 0])
            found.append((trajectory_id, serial))
            if serial not in self._checked or self._rng.random() < 0.02:
                assert is_equal(item, columns_of(content(serial))), f"trajectory {trajectory_id}"
                self._checked.add(serial)
        if found:
            assert is_whole(store.sample(32))
        return found


@dataclasses.dataclass
class Summary:
    """What many rounds came to."""

    rounds: int = 0
    acknowledged: int = 0
    died_in: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __str__(self) -> str:
        where = ", ".join(f"{op} {n}" for op, n in self.died_in.most_common())
        return (
            f"{self.rounds} kills survived (in {where}); "
            f"{self.acknowledged} trajectories acknowledged, none lost."
        )


def _warm_up(directory: Path) -> None:
    """Have this process import what children need, so that none of them has to."""
    for trajectory_format in ("arrow", "npy"):
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=directory, trajectory_format=trajectory_format
        ) as buffer:
            buffer.add_trajectories([content(0)])
            buffer.sample(8)
    shutil.rmtree(directory)


def run(directory: Path, rounds: int, seed: int, *, is_loud: bool = False) -> Summary:
    """``rounds`` kills; AssertionError, which names the seed, at the first that is not survived."""
    rng = random.Random(seed)
    summary = Summary()
    _warm_up(directory / "warm")
    while summary.rounds < rounds:
        series = Series(directory / f"series_{summary.rounds}", rng)
        for _ in range(min(LIVES, rounds - summary.rounds)):
            try:
                series.round()
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed}, round {summary.rounds}, {series.directory}: {error}"
                ) from error
            summary.rounds += 1
            summary.died_in[series.op] += 1
        summary.acknowledged += series.num_acknowledged
        shutil.rmtree(series.directory)
        if is_loud:
            print(summary, file=sys.stderr)
    return summary
