"""Shards: all shards of a buffer as one handle sees them, and what it knows of their windows."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mmbuf.columns import difference
from mmbuf.errors import SchemaError
from mmbuf.packages import optional_package
from mmbuf.ray.remote import AwayError, Ref, RemoteShard, ShardError, Span, window_of
from mmbuf.ray.shard import Config, Update
from mmbuf.schema import Schema

ray = optional_package("ray", "ray")

_PAUSE_S = 0.05
_PATIENCE_S = 2.0  # with shards that are away, where all are needed

Asked = tuple[RemoteShard, Ref]


class Shards:
    """The shards of one handle. Thread-safe; nobody is waited for under the lock."""

    def __init__(self, config: Config, actors: Sequence[Any]) -> None:
        self._config = config
        self.all = [
            RemoteShard(number, actor, config.path_of(number), node)
            for number, (actor, node) in enumerate(zip(actors, config.nodes, strict=True))
        ]
        self._lock = threading.RLock()  # guards what is known
        self._window: list[Span] | None = None  # None where it has changed
        self._known_at = float("-inf")  # what others have added up to then is known
        self._asked: tuple[float, list[Asked]] | None = None  # when, and whom

    # -- what is known -----------------------------------------------------------------------

    @property
    def answering(self) -> list[RemoteShard]:
        """Those that are not away."""
        return [shard for shard in self.all if not shard.is_away]

    @property
    def lost(self) -> list[RemoteShard]:
        """Those that are gone for good."""
        return [shard for shard in self.all if shard.is_lost]

    @property
    def schema(self) -> Schema | None:
        """That of the trajectories that are known."""
        with self._lock:
            return next((s.schema for s in self.answering if len(s.ids)), None)

    def window(self) -> list[Span]:
        """The whole window, of the shards that answer. SchemaError where they do not fit."""
        with self._lock:
            if self._window is None:
                window = window_of(self.answering, self._config.sample_window_size)
                _check_alike([span.shard for span in window])
                self._window = window
            return self._window

    def take(self, shard: RemoteShard, update: Update | None) -> None:
        """Take in what a shard told with its answer."""
        with self._lock:
            if shard.take(update):
                self._window = None

    def look(self, deadline: float, *, is_forced: bool = False) -> None:
        """Learn what others have added: up to ``refresh_s`` ago, or up to now.

        Shards are asked when half of that time is over, and waited for only when all of it is.
        """
        self._look_for_away()
        now = time.monotonic()
        with self._lock:
            age_s = now - self._known_at
            is_old = is_forced or age_s > self._config.refresh_s
            if is_forced or (self._asked is None and age_s > self._config.refresh_s / 2):
                asked = [(s, s.call("update", s.known)) for s in self.answering]
                self._asked = (now, asked)
            if self._asked is None or not (is_old or _have_answered(self._asked[1])):
                return
            (asked_at, asked), self._asked = self._asked, None
        for shard, ref in asked:
            with suppress(AwayError):
                self.take(shard, self.result(shard, ref, "refresh", deadline))
        with self._lock:
            self._known_at = max(self._known_at, asked_at)

    def _look_for_away(self) -> None:
        with self._lock:
            for shard in self.all:
                if shard.is_away and shard.look():
                    self._window = None

    # -- asking ------------------------------------------------------------------------------

    def result(self, shard: RemoteShard, ref: Ref, what: str, deadline: float) -> Any:
        """As `RemoteShard.result`."""
        try:
            return shard.result(ref, what, deadline)
        except AwayError:
            with self._lock:
                self._window = None
            raise

    def wait_for_one(self, deadline: float) -> list[RemoteShard]:
        """Those that answer, as soon as one does. ShardError where all are lost."""
        while True:
            self._look_for_away()
            if answering := self.answering:
                return answering
            if len(self.lost) == len(self.all):
                raise self.error("all shards", self.all)
            if time.monotonic() > deadline:
                raise TimeoutError("expected an answer of a shard, got none in time.")
            time.sleep(_PAUSE_S)

    def wait_for_all(self, deadline: float) -> list[RemoteShard]:
        """Those that are still away after a moment."""
        deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        while True:
            self._look_for_away()
            away = [shard for shard in self.all if shard.is_away]
            if not away or time.monotonic() > deadline or len(away) == len(self.lost):
                return away
            time.sleep(_PAUSE_S)

    def ask_all(
        self, what: str, method: str, arguments: Sequence[tuple[Any, ...]], deadline: float
    ) -> list[Any]:
        """What each shard gives. ShardError unless all answer; that of one when all have answered.

        ``arguments`` are each shard's own.
        """
        if away := self.wait_for_all(deadline):
            raise self.error(what, away)
        asked = [(s, s.call(method, *of)) for s, of in zip(self.all, arguments, strict=True)]
        answers = self.answers(what, asked, deadline)
        if len(answers) < len(self.all):
            raise self.error(what, [shard for shard in self.all if shard.is_away])
        return answers

    def answers(self, what: str, asked: Sequence[Asked], deadline: float) -> list[Any]:
        """What those give that answer; the first error when all have answered."""
        answers = []
        failure: Exception | None = None
        for shard, ref in asked:
            try:
                answers.append(self.result(shard, ref, what, deadline))
            except AwayError:
                continue
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def error(self, what: str, shards: Sequence[RemoteShard]) -> ShardError:
        """Of shards that do not answer."""
        is_lost = all(shard.is_lost for shard in shards)
        return ShardError(
            f"{what}: expected all shards, got no answer of {', '.join(map(str, shards))}. "
            + (
                "It was closed, or the node is gone: its rows are on its disk. Make the buffer "
                "again with what is left (on_lost='shrink' goes on without), or bring it back."
                if is_lost
                else "Try again when Ray has restarted it."
            ),
            shards=[shard.number for shard in shards],
            is_lost=is_lost,
        )

    def close(self) -> None:
        for shard in self.all:
            shard.close()


def _have_answered(asked: Sequence[Asked]) -> bool:
    refs = [ref for _, ref in asked]
    return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]


def _check_alike(shards: Sequence[RemoteShard]) -> None:
    for shard in shards[1:]:
        expected, got = shards[0].schema, shard.schema
        if expected is None or got is None:
            continue
        # The order of columns is each shard's own.
        if set(expected.columns) != set(got.columns):
            difference_of = difference(expected, got, str(shards[0]))
            raise SchemaError(f"{shard}: {difference_of} Clear the buffer.")
