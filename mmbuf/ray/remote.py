"""RemoteShard: one shard as a handle sees it, and the window of several."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mmbuf.errors import ClosedError, EmptyBufferError, MmbufError
from mmbuf.packages import optional_package
from mmbuf.ray.shard import Known, RowsAt, StaleError, Update
from mmbuf.reader import ReplayReader
from mmbuf.schema import Array, Schema

ray = optional_package("ray", "ray")

_log = logging.getLogger("mmbuf")

Ref = Any  # of an object in Ray's store


class ShardError(MmbufError):
    """Shards of a `RayReplayBuffer` do not answer.

    ``shards`` are their numbers; ``is_lost``: they are gone for good, not only for the moment.
    """

    def __init__(
        self, message: str, *, shards: list[int] | None = None, is_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.shards = shards or []
        self.is_lost = is_lost


class AwayError(Exception):
    """The shard does not answer, and was noted as such."""


class Span(NamedTuple):
    """The trajectories of one shard that are in the whole window, oldest first."""

    shard: RemoteShard
    epoch: str
    ids: Array
    ends: Array  # where the rows of each end, counted from the first one's first


class RemoteShard:
    """A shard's actor, and what is known of its window. Guarded by the lock of its `Shards`.

    ``actor`` is None of one that was gone before.
    """

    def __init__(self, number: int, actor: Any, path: str, node: str) -> None:
        self.number, self.actor, self.path, self.node = number, actor, path, node
        self._state_lock = threading.Lock()
        self.is_away = self.is_lost = actor is None
        self._reader: ReplayReader | None = None
        self._reader_lock = threading.Lock()
        self._has_warned = False  # that the files cannot be read
        self._ping: Ref = None  # while it is away
        self._forget()

    def _forget(self) -> None:
        self.epoch = ""
        self.schema: Schema | None = None
        self.ids = np.zeros(0, np.int64)
        self.times = np.zeros(0)
        self._rows = np.zeros(0, np.int64)
        self.ends = self._rows

    def __str__(self) -> str:
        return f"shard {self.number} on node {self.node}"

    # -- what is known -----------------------------------------------------------------------

    @property
    def known(self) -> Known:
        """What `Shard.update` is to be asked with."""
        ids = (int(self.ids[0]), int(self.ids[-1])) if len(self.ids) else (-1, -1)
        return Known(self.epoch, *ids)

    def take(self, update: Update | None) -> bool:
        """Take in what a shard told; whether anything is new."""
        if update is None:
            return False
        if update.epoch != self.epoch:
            if update.since != -1:
                return False  # a late answer, of an epoch that is over
            self._forget()
            self.epoch = update.epoch
        elif not len(update.ids) and (not len(self.ids) or self.ids[0] == update.first_id):
            return False
        self.schema = update.schema or self.schema
        keep = slice(int(self.ids.searchsorted(update.first_id)), None)
        new = slice(int(update.ids.searchsorted(self.known.last_id, "right")), None)
        self.ids = np.concatenate([self.ids[keep], update.ids[new]])
        self.times = np.concatenate([self.times[keep], update.times[new]])
        self._rows = np.concatenate([self._rows[keep], update.rows[new]])
        self.ends = self._rows.cumsum()
        return True

    def span(self, start: int) -> Span:
        """Those from the place ``start`` on."""
        before = self.ends[start - 1] if start else 0
        return Span(self, self.epoch, self.ids[start:], self.ends[start:] - before)

    # -- asking ------------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> Ref:
        return getattr(self.actor, method).remote(*arguments)

    def result(self, ref: Ref, what: str, deadline: float) -> Any:
        """What a call gave, or raised. AwayError where there is no shard to answer it."""
        errors = ray.exceptions
        try:
            return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except errors.GetTimeoutError:
            raise TimeoutError(
                f"{what}: expected an answer of {self}, got none in time. "
                f"Raise timeout_s, or look at that node."
            ) from None
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if not isinstance(cause, ClosedError):
                raise (cause if isinstance(cause, Exception) else error) from None
            # Somebody has ended it: it answers until Ray has killed it, a moment later.
            self._note_away(cause, is_lost=True)
            raise AwayError from cause
        except errors.RayError as error:
            lost = (errors.ActorDiedError, errors.ActorUnschedulableError)
            self._note_away(error, is_lost=isinstance(error, lost))
            raise AwayError from error

    def _note_away(self, error: Exception, *, is_lost: bool) -> None:
        with self._state_lock:  # several threads may learn of it at once, and one says so
            is_news = not self.is_away
            self.is_away, self.is_lost = True, is_lost
        if is_news:
            state = "lost" if is_lost else "away"
            why = str(error).splitlines()[0]
            _log.warning("%s is %s; going on with the others: %s", self, state, why)

    def look(self) -> bool:
        """Find out whether one that is away is back, without waiting."""
        if self.is_lost:
            return False
        if self._ping is None:
            self._ping = self.call("update", Known())
        if not ray.wait([self._ping], timeout=0)[0]:
            return False
        ping, self._ping = self._ping, None
        try:
            update = self.result(ping, "update", time.monotonic() + 1)  # it is there already
        except AwayError:
            return False
        except (MmbufError, OSError, ValueError) as error:  # its store cannot be opened, yet
            _log.warning("%s is still away: %s", self, error)
            return False
        self.is_away = False
        self.take(update)
        _log.warning("%s is back.", self)
        return True

    # -- reading -----------------------------------------------------------------------------

    def read_here(
        self, span: Span, offsets: Array, window_size: int
    ) -> tuple[dict[str, Any], Array] | None:
        """Rows from the files, and which of ``offsets`` they are; None where none can be read."""
        sampler = RowsAt(int(span.ids[0]), span.ids, span.ends, offsets)
        try:
            with self._reader_lock:
                if self._reader is None:
                    self._reader = ReplayReader(self.path, sample_window_size=window_size)
            return self._reader.sample(len(offsets), sampler=sampler), sampler.is_here
        except (StaleError, EmptyBufferError, FileNotFoundError):
            return None  # not in files yet
        except (MmbufError, OSError) as error:
            if not self._has_warned:
                _log.warning("%s: read through its actor, not from its files: %s", self, error)
                self._has_warned = True
            return None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def window_of(shards: Sequence[RemoteShard], size: int) -> list[Span]:
    """The newest ``size`` trajectories of all (0: all), by their time of addition, by shard.

    Of those of equal times the last of the last shard are the newest.
    """
    starts = [0] * len(shards)
    if size and sum(len(shard.ids) for shard in shards) > size:
        times = np.concatenate([shard.times[-size:] for shard in shards])
        # The oldest time that is in the window; of those equal to it only some may be.
        oldest = np.partition(times, len(times) - size)[len(times) - size]
        left = size - int((times > oldest).sum())
        for i, shard in reversed(list(enumerate(shards))):
            first = int(shard.times.searchsorted(oldest))
            newer = int(shard.times.searchsorted(oldest, "right"))
            equal = min(left, newer - first)
            left -= equal
            starts[i] = newer - equal
    spans = [shard.span(start) for shard, start in zip(shards, starts, strict=True)]
    return [span for span in spans if len(span.ids)]
