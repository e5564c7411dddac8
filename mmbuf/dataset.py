"""Torch datasets over buffers and readers: batches without end, of one buffer or mixed from two.

They can stand in the place of RLinf's classes of those names. A dataset is a handle. What it draws
from, and what is drawn and not yet delivered, is in its `_Feed`: that is what a prefetching thread
holds, so that a dataset which nobody holds any more ends, and its thread with it.

A signal handler may raise, or call the dataset, anywhere in the main thread. So waiting and saving
go by `shield.run`, and so does drawing where what was drawn could be lost; it waits here until it
is delivered. That is done by a few statements without a call, the last before the caller goes on:
between such CPython runs neither handlers nor other threads. C code that is to be called there is
prepared as an iterator (``map``) and called by unpacking it.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import multiprocessing
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import methodcaller
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import IterableDataset

from mmbuf import files, shield
from mmbuf.arguments import number, seconds, whole
from mmbuf.batch import Batch
from mmbuf.buffer import TrajectoryReplayBuffer
from mmbuf.errors import ClosedError, EmptyBufferError, MmbufError, SchemaError
from mmbuf.reader import ReplayReader
from mmbuf.sampling import Sampler

_REPLAY, _DEMO = "replay_buffer", "demo_buffer"

_SHORTEST_SLEEP_S = 0.001
_LONGEST_SLEEP_S = 0.05
_JOIN_S = 0.05  # longer than a draw takes as a rule
_EXIT_S = 10.0  # longer than a draw takes on a slow machine
_QUEUE_THREAD = "QueueFeederThread"  # of a multiprocessing.Queue
_QUEUE_S = 2.0  # longer than pickling the batches that a worker has drawn ahead
_RECHECK_S = 1.0

_log = logging.getLogger("mmbuf")


class ReplayBufferDataset(IterableDataset[Batch]):
    """Batches of ``batch_size`` rows without end, each drawn when it is asked for.

    Parameters
    ----------
    replay_buffer, demo_buffer
        What to draw from; ``demo_buffer`` may be None. They stay the caller's to close.
    batch_size
        ``round(batch_size * demo_fraction)`` rows (half to even: 4 of 7) are the demo buffer's, if
        there is one, and follow those of the replay buffer. A buffer that has no row in a batch is
        neither drawn from nor waited for.
    min_replay_buffer_size, min_demo_buffer_size
        Each batch waits until the buffers have so many trajectories. As attributes they may be set
        later, also while a thread draws ahead.
    prefetch_size
        Has no effect here.
    sampler, demo_sampler
        Given to the buffers' `sample`; None: none. At the end of an epoch a sampler may give fewer
        rows.
    timeout_s
        How long to wait for trajectories; then TimeoutError says what is missing. None: for ever.

    A mixed batch has the columns that both buffers have; `left_out` lists what it lacks, and the
    log names it once. ``next`` raises what `sample` raises, and SchemaError where a column has
    another dtype or row shape in the other buffer, or only one of the samplers adds a name; it may
    be called again. Thread-safe: each batch goes to one of those who ask. Forked children, and
    spawned ones where the buffers pickle, begin anew, each with its buffers' own streams and none
    of the batches that wait here; so do the workers of a DataLoader.
    """

    _draws_ahead = False

    def __init__(
        self,
        replay_buffer: TrajectoryReplayBuffer | ReplayReader,
        demo_buffer: TrajectoryReplayBuffer | ReplayReader | None,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        prefetch_size: int = 5,
        *,
        demo_fraction: float = 0.5,
        sampler: Sampler | None = None,
        demo_sampler: Sampler | None = None,
        timeout_s: float | None = None,
    ) -> None:
        batch_size = whole("batch_size", batch_size, 1)
        min_replay_buffer_size = whole("min_replay_buffer_size", min_replay_buffer_size)
        min_demo_buffer_size = whole("min_demo_buffer_size", min_demo_buffer_size)
        if self._draws_ahead:
            prefetch_size = whole("prefetch_size", prefetch_size, 1)
        demo_fraction = number("demo_fraction", demo_fraction)
        timeout_s = seconds("timeout_s", timeout_s)
        if not 0 <= demo_fraction <= 1:
            raise ValueError(f"demo_fraction: expected a number in [0, 1], got {demo_fraction}.")
        if timeout_s is not None and timeout_s < 0:
            raise ValueError(f"timeout_s: expected None or at least 0, got {timeout_s}.")
        min_sizes = {_REPLAY: min_replay_buffer_size, _DEMO: min_demo_buffer_size}
        num_demo = 0 if demo_buffer is None else round(batch_size * demo_fraction)
        parts = [_Part(_REPLAY, replay_buffer, batch_size - num_demo, sampler)]
        if demo_buffer is not None:
            parts.append(_Part(_DEMO, demo_buffer, num_demo, demo_sampler))
        self._feed = _Feed(
            [part for part in parts if part.num_rows],
            prefetch_size if self._draws_ahead else 1,
            timeout_s,
            min_sizes,
        )

    @property
    def min_replay_buffer_size(self) -> int:
        """How many trajectories of the replay buffer the batches to come wait for."""
        return self._own_feed().min_sizes[_REPLAY]

    @min_replay_buffer_size.setter
    def min_replay_buffer_size(self, size: int) -> None:
        self._own_feed().min_sizes[_REPLAY] = whole("min_replay_buffer_size", size)

    @property
    def min_demo_buffer_size(self) -> int:
        """How many trajectories of the demo buffer the batches to come wait for."""
        return self._own_feed().min_sizes[_DEMO]

    @min_demo_buffer_size.setter
    def min_demo_buffer_size(self, size: int) -> None:
        self._own_feed().min_sizes[_DEMO] = whole("min_demo_buffer_size", size)

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """The columns that only one buffer has, by the name of its argument; as last drawn."""
        return dict(self._own_feed().left_out)

    def __iter__(self) -> Iterator[Batch]:
        """The batches to come, until the dataset is closed; ClosedError if it is already.

        All iterators take from the same batches.
        """
        feed = self._own_feed()
        feed.check_is_open("iter")
        if self._draws_ahead:
            shield.run(self._draw_ahead, feed)
        return iter(self._next, None)  # holds the dataset

    def _draw_ahead(self, feed: _Feed) -> None:
        if feed.start(self):
            weakref.finalize(self, feed.close).atexit = False

    def _next(self) -> Batch | None:
        return self._own_feed().next()

    def _own_feed(self) -> _Feed:
        """This process's feed: a forked child has another than its parent."""
        if self._feed.pid != files.process_id():
            self._feed = copy.copy(self._feed)
        return self._feed

    def state_dict(self) -> dict[str, Any]:
        """What the batches to come depend on, for ``torch.load(weights_only=True)`` as well.

        Copies of the batches that are drawn and not delivered, and the states of the buffers'
        generators and of the samplers; of this process, not of a DataLoader's workers. MmbufError
        in a signal handler that came within a draw: save between two batches.
        """
        feed = self._own_feed()
        feed.check_is_outside("state_dict")
        state: dict[str, Any] = shield.run(feed.state_dict)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: over the same trajectories, the same batches come.

        Those that wait to be delivered are dropped. ValueError where the state is another kind of
        dataset's.
        """
        feed = self._own_feed()
        feed.check_is_outside("load_state_dict")
        shield.run(feed.load_state_dict, state)

    def get_stats(self) -> dict[str, float]:
        """``batches`` delivered, ``wait_s`` spent in ``next``, batches ``prefetched`` by now."""
        return self._own_feed().get_stats()

    def close(self) -> None:
        """End all iterators, also those that wait, and let go of the buffers, which stay open.

        Returns at once; a draw that takes longer ends by itself. Closing again does nothing.
        """
        self._own_feed().close()

    def __enter__(self) -> ReplayBufferDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """A `ReplayBufferDataset` that has a thread draw the batches before they are asked for.

    The first ``iter`` starts it. At most ``prefetch_size`` batches are drawn, or being drawn, and
    not delivered: no batch is older than so many batches. What goes wrong is raised by the ``next``
    that follows the batches drawn before. A dataset that is dropped ends its thread like `close`.
    """

    _draws_ahead = True


def replay_buffer_collate_fn(batch: Sequence[Batch]) -> Batch:
    """The batch itself, for a ``DataLoader(dataset, batch_size=1)``."""
    return batch[0]


@dataclass(frozen=True)
class _Part:
    """The rows of each batch that come from one buffer.

    ``keys`` are those of columns, as far as they were seen; a sampler may add others.
    """

    name: str
    buffer: TrajectoryReplayBuffer | ReplayReader
    num_rows: int
    sampler: Sampler | None
    keys: set[str] = field(default_factory=set)

    def sample(self) -> Batch:
        if self.sampler is None:
            return self.buffer.sample(self.num_rows)  # type: ignore[no-any-return]
        # Called as it is, by no C code: so that no interrupt loses a batch that has come.
        return self.buffer.sample(self.num_rows, sampler=self.sampler)  # type: ignore[no-any-return]

    def is_added(self, key: str) -> bool:
        """Whether this key of a batch is no column's, but one that the sampler has added."""
        if self.sampler is None:
            return False
        schema = self.buffer.schema
        if schema is not None:
            self.keys.update(column.path[0] for column in schema.columns)
        return key not in self.keys


class _Feed:
    """Batches of ``parts``, drawn by whoever asks for one or, once started, by a thread ahead.

    At most ``depth`` are drawn and not delivered. No parts: it is closed. It belongs to one
    process, since in a forked child no thread goes on and locks may stay held.

    `next`, `close` and `get_stats` wait for no lock that their own thread has: a handler, or the
    garbage collector, may call them within anything. All else is for threads that no signal
    reaches.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        depth: int,
        timeout_s: float | None,
        min_sizes: dict[str, int],
    ) -> None:
        self.pid = files.process_id()
        self.min_sizes = min_sizes  # by the names of parts; may be changed at any time
        self.left_out: dict[str, tuple[str, ...]] = {}  # of the newest batch, by the same names
        self._depth = depth
        self._timeout_s = timeout_s
        # Taken first. Held from a draw's begin until its batch is queued, and for the state.
        self._drawing = threading.RLock()
        # For those who wait for batches, or for trajectories; guards the times and the start.
        self._changed = threading.Condition()
        self._asked: SimpleQueue[None] = SimpleQueue()  # tells the thread to look for room again
        self._holder: weakref.ref[Any] | None = None  # the dataset whose thread it is
        self._parts = parts
        # Whether a draw that is interrupted loses nothing: what one part has drawn must not wait
        # for the next one, unless rows are drawn with replacement.
        self._may_draw_here = len(parts) < 2 or not any(part.sampler for part in parts)
        self._thread: threading.Thread | None = None
        self._drawn: list[Batch] = []  # of the first parts, for a batch that failed at the next
        self._batches: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._num_delivered = 0
        self._wait_s = 0.0
        self._told: set[tuple[str, str]] = set()  # what of the left out was logged

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in whatever process, begins anew."""
        return _Feed, (self._parts, self._depth, self._timeout_s, self.min_sizes)

    @property
    def is_closed(self) -> bool:
        """Also where the dataset is gone, whose finalizer an interrupt may have ended."""
        return not self._parts or (self._holder is not None and self._holder() is None)

    def check_is_open(self, what: str) -> None:
        if self.is_closed:
            raise ClosedError(f"{what}: expected an open dataset, got one that was closed.")

    def start(self, holder: object) -> bool:
        """Draw ahead for ``holder`` from now on; False where a thread does already."""
        with self._changed:
            if self._thread is not None:
                return False
            self._holder = weakref.ref(holder)
            thread = threading.Thread(target=self._draw_ahead, name="mmbuf-prefetch", daemon=True)
            thread.start()
            self._thread = thread
        _STARTED.add(self)
        return True

    def next(self) -> Batch | None:
        """The next batch, None once closed; or raises what drawing it has raised."""
        ask = map(self._asked.put, (None,))  # done when it is unpacked, by C code
        while not self.is_closed:
            # At once, with no call until the caller has it.
            if self._batches:
                batch = self._batches[0]
                del self._batches[0]
                self._num_delivered += 1
                _ = [*ask]
                return batch
            if self._error is not None:
                error, self._error = self._error, None
                _ = [*ask]
                try:
                    raise error
                finally:
                    del error  # or it would be part of a cycle, by its traceback
            if self._thread is not None or not self._may_draw_here:
                shield.run(self._wait)
            elif (batch_here := self._draw_here()) is not None:
                return batch_here
        return None

    def _draw_here(self) -> Batch | None:
        """Draw a batch in this thread, for the caller; none where nothing can be drawn by now."""
        began_s, clock = time.monotonic(), iter(time.monotonic, None)
        acquire = map(self._drawing.acquire, (True,))
        release = map(methodcaller("release"), (self._drawing,))
        is_drawing = False
        try:
            if self._missing():
                shield.run(self._wait_for_buffers, self._timeout_s)
            _ = [*acquire]
            is_drawing = True
            parts = self._parts
            if not parts:
                return None
            batch = parts[0].sample() if len(parts) == 1 else self._draw_mixed(parts)
            self._num_delivered += 1
            return batch
        except EmptyBufferError:
            if self._missing():  # cleared since: to be waited for
                return None
            raise
        finally:
            if is_drawing:
                _ = [*release]
            for now_s in clock:
                self._wait_s += now_s - began_s
                break

    def _wait(self) -> None:
        """Draw a batch, or wait until there is something to take."""
        began_s = time.monotonic()
        try:
            if self._thread is None:
                self._wait_for_buffers(self._timeout_s)
                with self._turn():
                    self._draw_next()
            else:
                self._wait_for_thread()
        finally:
            with self._changed:
                self._wait_s += time.monotonic() - began_s

    def _wait_for_thread(self) -> None:
        """Until there is something to take; TimeoutError if it is trajectories that are missing."""
        timeout_s = math.inf if self._timeout_s is None else self._timeout_s
        deadline_s = time.monotonic() + max(timeout_s, _SHORTEST_SLEEP_S)
        with self._changed:
            while not (self.is_closed or self._batches or self._error is not None):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                # Not for longer: `close` and interrupts tell nobody.
                self._changed.wait(min(left_s, shield.LOOK_S))
                shield.check()
            else:
                return
        if missing := self._missing():
            raise TimeoutError(f"{missing} after {self._timeout_s} s.")

    def _draw_ahead(self) -> None:
        """What the thread does."""
        while self._has_room():
            try:
                self._wait_for_buffers(None)
            except BaseException as error:
                self._keep(error)
                continue
            with self._turn():
                try:
                    self._draw_next()
                except BaseException as error:
                    self._keep(error)  # still in turn: a state that is loaded then forgets it

    def _keep(self, error: BaseException) -> None:
        """For whoever asks next."""
        with self._changed:
            if self._parts:
                self._error = error
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until there is room and no error is left to deliver; False once closed."""
        while len(self._batches) >= self._depth or self._error is not None:
            if self.is_closed:
                break
            with suppress(Empty):
                self._asked.get(timeout=_RECHECK_S)
        return not self.is_closed

    def _draw_next(self) -> None:
        """Queue one more batch, in turn; none where that has become wrong."""
        parts, drawn = self._parts, self._drawn
        if not parts or len(self._batches) >= self._depth:  # another thread loaded or drew
            return
        try:
            for part in parts[len(drawn) :]:
                drawn.append(part.sample())
        except EmptyBufferError:
            if self._missing():  # cleared since: to be waited for
                return
            raise
        try:
            batch = self._mixed(parts, drawn)
        except SchemaError:
            self._drawn = []
            raise
        with self._changed:
            # At once: `close` holds no lock.
            self._drawn = []
            if self._parts:
                self._batches += (batch,)
            self._changed.notify_all()

    def _draw_mixed(self, parts: Sequence[_Part]) -> Batch:
        return self._mixed(parts, [part.sample() for part in parts])

    def _mixed(self, parts: Sequence[_Part], drawn: Sequence[Batch]) -> Batch:
        """The rows of all parts, in their order; says what is left out of them."""
        if len(parts) == 1:
            return drawn[0]
        mix = _Mix(*drawn)
        names = (mix.only_replay, mix.only_demo)
        for part, batch, others in zip(parts, drawn, reversed(drawn), strict=True):
            for key in batch.keys() - others.keys():
                if part.is_added(key):
                    raise SchemaError(
                        f"{key!r}: expected samplers of both buffers that add it, got that of "
                        f"{part.name} alone. Give both a sampler of the same kind."
                    )
        self.left_out = {part.name: tuple(only) for part, only in zip(parts, names, strict=True)}
        for whose, only in self.left_out.items():
            if news := [name for name in only if (whose, name) not in self._told]:
                self._told |= {(whose, name) for name in news}
                _log.warning(
                    "mixed batches leave out what only %s has: %s.", whose, ", ".join(news)
                )
        return mix.batch

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold ``_drawing``, which is waited for only as long as the caller is not interrupted."""
        while not self._drawing.acquire(timeout=shield.LOOK_S):
            shield.check()
        try:
            yield
        finally:
            self._drawing.release()

    def check_is_outside(self, what: str) -> None:
        """MmbufError for a signal handler that came within a draw of this thread's."""
        if self._drawing._is_owned():  # type: ignore[attr-defined]
            raise MmbufError(
                f"{what}: expected no call within a draw of the same thread, got one. "
                f"Call it between two batches."
            )

    def _wait_for_buffers(self, timeout_s: float | None) -> None:
        """Sleep until they have the trajectories that a batch waits for, or this is closed."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        sleep_s = _SHORTEST_SLEEP_S
        while missing := self._missing():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{missing} after {timeout_s} s.")
            with self._changed:
                if self.is_closed:
                    return
                self._changed.wait(min(sleep_s, left_s))
            shield.check()
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _missing(self) -> str:
        """What the buffers lack; empty where they are ready."""
        return "; ".join(
            f"{part.name}: expected {self.min_sizes[part.name]} trajectories, "
            f"got {len(part.buffer)}"
            for part in self._parts
            if not part.buffer.is_ready(self.min_sizes[part.name])
        )

    def _owners(self) -> dict[str, Any]:
        """Those that have a state, by the name that it has in ours."""
        owners: dict[str, Any] = {}
        for part in self._parts:
            owners |= {part.name: part.buffer, f"{part.name}.sampler": part.sampler}
        return {name: owner for name, owner in owners.items() if hasattr(owner, "state_dict")}

    def state_dict(self) -> dict[str, Any]:
        with self._turn():
            self.check_is_open("state_dict")
            states = {name: owner.state_dict() for name, owner in self._owners().items()}
            if self._drawn:
                states["drawn"] = copy.deepcopy(self._drawn)
            return {"batches": copy.deepcopy(list(self._batches)), **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._turn():
            self.check_is_open("load_state_dict")
            owners = self._owners()
            if set(state) - {"drawn"} != {"batches", *owners}:
                raise ValueError(
                    f"state: expected that of a dataset with batches, {', '.join(owners)}, "
                    f"got one with {', '.join(state)}."
                )
            for name, owner in owners.items():
                owner.load_state_dict(state[name])
            self._drawn = copy.deepcopy(state.get("drawn", []))
            batches = deque(copy.deepcopy(state["batches"]))
            with self._changed:
                self._batches, self._error = batches, None
                self._changed.notify_all()
        self._asked.put(None)

    def get_stats(self) -> dict[str, float]:
        return {
            "batches": self._num_delivered,
            "wait_s": self._wait_s,
            "prefetched": len(self._batches),
        }

    def close(self) -> None:
        if self.pid != files.process_id():  # the parent's, dropped by a forked child
            return
        self._parts = ()
        self._drawn, self._batches = [], deque()
        self._error = None  # its traceback holds the buffers
        self._asked.put(None)
        self.join(_JOIN_S)

    def join(self, timeout_s: float) -> None:
        """Wait so long for the end of the thread, in another one."""
        thread = self._thread
        if thread is not None and thread.ident != threading.get_ident():
            thread.join(timeout_s)


_STARTED: weakref.WeakSet[_Feed] = weakref.WeakSet()  # those whose thread is there, or was


@atexit.register
def _end_threads() -> None:
    """Before the interpreter does: a thread that it ends within torch takes the process along."""
    deadline_s = time.monotonic() + _EXIT_S
    feeds = list(_STARTED)
    for feed in feeds:
        feed.close()
    for feed in feeds:
        feed.join(max(deadline_s - time.monotonic(), 0.0))
    if multiprocessing.parent_process() is not None:
        _end_queues()


def _end_queues() -> None:
    """The same for the thread that pickles a worker's batches: PyTorch leaves it to its fate.

    A spawned worker that ends while its queue shares a tensor was aborted ("terminate called
    without an active exception"), and the training process raised. A full pipe that nobody reads
    holds such a thread up for ever, but outside torch, where it may end.

    In a child, `multiprocessing` has ended all other queues by now, so that none is waited for in
    vain. (Whether it is a worker, torch may no longer know.)
    """
    deadline_s = time.monotonic() + _QUEUE_S
    for thread in threading.enumerate():
        if thread.name == _QUEUE_THREAD:
            thread.join(max(deadline_s - time.monotonic(), 0.0))


class _Mix:
    """``batch``: the rows of one batch, then those of another, of the columns that both have.

    Copies. ``only_replay`` and ``only_demo`` name the columns that the other one lacks.
    """

    def __init__(self, replay: Batch, demo: Batch) -> None:
        self.only_replay: list[str] = []
        self.only_demo: list[str] = []
        self.batch = self._joined(replay, demo, ())
        if not self.batch:
            raise SchemaError(
                f"batch: expected a column that both buffers have, got only "
                f"{', '.join(self.only_replay)} of {_REPLAY} and "
                f"{', '.join(self.only_demo)} of {_DEMO}."
            )

    def _joined(self, replay: Batch, demo: Batch, path: tuple[str, ...]) -> Batch:
        joined: Batch = {}
        for key, ours in replay.items():
            inner = (*path, key)
            if key not in demo:
                self.only_replay += _names(ours, inner)
                continue
            theirs = demo[key]
            if isinstance(ours, dict) and isinstance(theirs, dict):
                if both := self._joined(ours, theirs, inner):
                    joined[key] = both
            elif isinstance(ours, list) and isinstance(theirs, list):
                joined[key] = ours + theirs
            elif (
                isinstance(ours, torch.Tensor)
                and isinstance(theirs, torch.Tensor)
                and (ours.dtype, ours.shape[1:]) == (theirs.dtype, theirs.shape[1:])
            ):
                joined[key] = torch.cat([ours, theirs])
            else:
                raise SchemaError(
                    f"column {'.'.join(inner)!r}: expected the same of both buffers, "
                    f"got {_kind(ours)} of {_REPLAY} and {_kind(theirs)} of {_DEMO}."
                )
        for key in demo:
            if key not in replay:
                self.only_demo += _names(demo[key], (*path, key))
        return joined


def _names(leaf: Any, path: tuple[str, ...]) -> list[str]:
    """Of the columns at or under ``path``."""
    if isinstance(leaf, dict):
        return [name for key, inner in leaf.items() for name in _names(inner, (*path, key))]
    return [".".join(path)]


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype} rows of shape {tuple(leaf.shape[1:])}"
    return "text" if isinstance(leaf, list) else "a dict"
