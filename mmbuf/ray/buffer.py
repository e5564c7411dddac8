"""RayReplayBuffer: a handle of the shards; see `mmbuf.ray`."""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmbuf import arguments, checkpoint, files
from mmbuf.batch import check_room
from mmbuf.columns import COMMON, SAME, is_common
from mmbuf.errors import BAD_JSON, ClosedError, CorruptError, EmptyBufferError
from mmbuf.locations import location
from mmbuf.packages import optional_package
from mmbuf.pool import BatchPool
from mmbuf.ray.actors import found, pattern_of, placed, start
from mmbuf.ray.remote import AwayError, Ref, RemoteShard, Span
from mmbuf.ray.shard import Config
from mmbuf.ray.shards import Shards
from mmbuf.ray.wire import Joint, packed
from mmbuf.schema import Array
from mmbuf.trajectory import fields_of
from mmbuf.transfer import Directory, merge

ray = optional_package("ray", "ray")

Batch = dict[str, Any]
_STATE = "ray.json"  # beside the ranks of a checkpoint: how many there are, and the generator
_SUMMED = ("num_trajectories", "total_samples", "pending_trajectories", "pending_bytes")


@dataclass
class _Request:
    """A batch that is under way."""

    num_chunks: int
    state: Any  # of the generator before it was drawn
    parts: list[tuple[Span, Array, Array]]  # where the rows go in the batch, and which they are
    is_wanted: bool = True


class RayReplayBuffer:
    """One replay buffer over shards on the nodes of a Ray cluster. Needs ``ray.init`` before.

    Parameters
    ----------
    num_shards
        How many actors, each with a store of its own.
    path
        Of their stores, on the disk of each shard's node. ``{shard}`` in it stands for the shard's
        number; without it shard 2 is ``path/rank_2``. What is there is continued.
    seed, sample_window_size
        As in `TrajectoryReplayBuffer`; the window is of all shards together, by the time of
        addition, by default all.
    placement
        ``"spread"``: over all nodes in turn, in the order of their addresses; ``"pack"``: on the
        caller's node; or the id of the node of each. A shard never moves to another node.
    name
        For `attach` from other drivers; then the shards outlive this one until `close`.
    on_lost
        Whether ``sample`` is to ``"raise"`` when a node is gone for good, or the window to
        ``"shrink"``.
    prefetch
        How many batches are under way beyond the one that is asked for.
    refresh_s
        How old may be what this handle knows of additions by others.
    timeout_s
        Within which calls end that are given no other; of creating the shards too.
    actor_options
        More options of Ray for the actors, such as ``{"num_cpus": 1}``; by default they ask for
        none.
    buffer_arguments
        More arguments of each shard's `TrajectoryReplayBuffer`, such as ``cache_size``.

    A handle can be sent to tasks and actors of Ray; what they get draws from a stream of its own
    (`with_stream` says which). Thread-safe.
    """

    def __init__(
        self,
        num_shards: int,
        path: Directory,
        seed: int | Sequence[int] | None = 0,
        sample_window_size: int = 0,
        placement: str | Sequence[str] = "spread",
        *,
        name: str | None = None,
        on_lost: str = "raise",
        prefetch: int = 0,
        refresh_s: float = 0.05,
        timeout_s: float = 60.0,
        actor_options: Mapping[str, Any] | None = None,
        **buffer_arguments: Any,
    ) -> None:
        num_shards = arguments.whole("num_shards", num_shards, 1)
        sample_window_size = arguments.whole("sample_window_size", sample_window_size)
        seed = arguments.seed(seed)
        prefetch = arguments.whole("prefetch", prefetch)
        refresh_s = arguments.number("refresh_s", refresh_s)
        timeout_s = arguments.number("timeout_s", timeout_s)
        name = None if name is None else arguments.text("name", name)
        if on_lost not in ("raise", "shrink"):
            raise ValueError(f"on_lost: expected 'raise' or 'shrink', got {on_lost!r}.")
        for taken in ("auto_save", "auto_save_path"):
            if taken in buffer_arguments:
                raise TypeError(
                    f"{taken}: expected the stores in path, got an argument of its own."
                )
        if is_common(buffer_arguments.get("columns", SAME)):
            raise ValueError(
                f"columns: expected {SAME!r}, since a batch of several shards has one schema, "
                f"got {COMMON!r}. Open their stores with a ReplayReader for that."
            )
        nodes = placed(num_shards, placement)
        limits = (sample_window_size, on_lost, prefetch, refresh_s, timeout_s)
        config = Config(pattern_of(path), nodes, seed, *limits)
        actors = start(config, buffer_arguments, name, actor_options or {})
        self._begin(config, actors, stream=(0,), is_owner=True)
        try:
            self._of_all("creating", "size", timeout_s=timeout_s)
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise

    @classmethod
    def attach(cls, name: str, timeout_s: float = 60.0) -> RayReplayBuffer:
        """A handle of the buffer of this name. ValueError where there is none."""
        config, actors = found(name, timeout_s)
        handle = cls.__new__(cls)
        handle._begin(config, actors, stream=None, is_owner=False)
        return handle

    def _begin(
        self, config: Config, actors: Sequence[Any], stream: tuple[int, ...] | None, is_owner: bool
    ) -> None:
        """``stream`` None is one that no other handle has."""
        self._config = config
        self._shards = Shards(config, actors)
        self._is_owner = is_owner
        self._is_closed = False
        self._node = ray.get_runtime_context().get_node_id()
        if stream is None:
            stream = (1, uuid.uuid4().int)
        seeds = np.random.SeedSequence(config.seed, spawn_key=stream)
        self._generator = np.random.default_rng(seeds)
        self._lock = threading.Lock()  # guards the generator and the batches under way
        self._turn = itertools.count()
        self._num_short = 0
        self._pool = BatchPool()
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[_Request, Future[Batch]]] = deque()

    def with_stream(self, number: int, prefetch: int | None = None) -> RayReplayBuffer:
        """Another handle of the buffer, that draws the stream of this number: of a rank."""
        config = self._config
        number = arguments.whole("number", number)
        if prefetch is not None:
            config = config._replace(prefetch=arguments.whole("prefetch", prefetch))
        handle: RayReplayBuffer = type(self).__new__(type(self))
        handle._begin(config, self._actors, (2, number), is_owner=False)
        return handle

    @property
    def _actors(self) -> list[Any]:
        return [shard.actor for shard in self._shards.all]

    # -- adding ------------------------------------------------------------------------------

    def add_trajectories(
        self, trajectories: Iterable[Any], *, block: bool = True, timeout_s: float | None = None
    ) -> list[Ref]:
        """Add trajectories to one shard: one of the caller's node if there is any, else in turn.

        As `TrajectoryReplayBuffer.add_trajectories`. With ``block=False`` it returns at once, with
        references for ``ray.get``, which raises what the adding raised; nothing is tried again
        then. TimeoutError where no shard answers in time: one may add them later all the same.
        """
        if isinstance(trajectories, (str, bytes, Mapping)):
            raise TypeError(
                f"trajectories: expected a list of trajectories, "
                f"got {type(trajectories).__name__}. Put a single one in a list."
            )
        items = [(packed(columns), *rest) for columns, *rest in map(fields_of, trajectories)]
        deadline = self._deadline(timeout_s)
        self._shards.look(deadline)
        while True:
            shard = self._next_shard(deadline)
            ref = shard.call("add", items, self._shards.schema, shard.known)
            if not block:
                return [ref]
            with suppress(AwayError):
                update = self._shards.result(shard, ref, "add_trajectories", deadline)
                self._shards.take(shard, update)
                return []

    def _next_shard(self, deadline: float) -> RemoteShard:
        answering = self._shards.wait_for_one(deadline)
        near = [shard for shard in answering if shard.node == self._node] or answering
        return near[next(self._turn) % len(near)]

    # -- sampling ----------------------------------------------------------------------------

    def sample(self, num_chunks: int, *, timeout_s: float | None = None) -> Batch:
        """``num_chunks`` rows, uniform with replacement over the rows of the window of all shards.

        A nested dict as of `TrajectoryReplayBuffer.sample`, the caller's to keep. EmptyBufferError
        when there is nothing to draw from, ShardError for a node that is gone (see ``on_lost``),
        SchemaError where shards hold different columns, TimeoutError. Batches under way
        (``prefetch``) are of the window as it was when they were drawn.
        """
        num_chunks = arguments.whole("num_chunks", num_chunks, 1)
        deadline = self._deadline(timeout_s)
        if not self._config.prefetch:
            return self._fetch(self._draw(num_chunks, deadline), deadline)
        self._fill_ahead(num_chunks, deadline)
        with self._lock:
            request, future = self._ahead.popleft()
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            if future.done():
                raise  # its own: it names the shard
            with self._lock:
                self._ahead.appendleft((request, future))
            raise TimeoutError("sample: expected a batch in time, got none.") from None

    def _fill_ahead(self, num_chunks: int, deadline: float) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._config.prefetch + 1, "mmbuf-ray")
        with self._lock:
            if self._ahead and self._ahead[0][0].num_chunks != num_chunks:
                self._forget_ahead()
        while len(self._ahead) <= self._config.prefetch:
            self._shards.look(deadline)
            with self._lock:
                request = self._drawn(num_chunks)
                if request is not None:
                    future = self._executor.submit(self._fetch, request, self._deadline(None))
                    self._ahead.append((request, future))
            if request is None:
                self._wait_for_rows(deadline)

    def _forget_ahead(self) -> None:
        """What is under way is to be drawn once more, by the window as it is then."""
        if self._ahead:
            self._generator.bit_generator.state = self._ahead[0][0].state
            for request, _ in self._ahead:
                request.is_wanted = False
            self._ahead.clear()

    def _draw(self, num_chunks: int, deadline: float) -> _Request:
        self._shards.look(deadline)
        while True:
            with self._lock:
                request = self._drawn(num_chunks)
            if request is not None:
                return request
            self._wait_for_rows(deadline)

    def _wait_for_rows(self, deadline: float) -> None:
        """Where nothing is known that could be drawn: until a shard answers."""
        self._shards.wait_for_one(deadline)
        self._shards.look(deadline, is_forced=True)
        if self._shards.answering and not self._shards.window():
            raise EmptyBufferError("sample: expected rows to draw from, got none.")

    def _drawn(self, num_chunks: int) -> _Request | None:
        """The rows of a batch; None where none are known. Waits for nobody."""
        lost = self._shards.lost
        if lost and self._config.on_lost == "raise":
            raise self._shards.error("sample", lost)
        window = self._shards.window()
        if not window:
            return None
        self._num_short += len(self._shards.answering) < len(self._shards.all)
        if self._shards.schema is not None:
            check_room(self._shards.schema, num_chunks)
        state = self._generator.bit_generator.state if self._config.prefetch else None
        stops = np.cumsum([span.ends[-1] for span in window])
        rows = self._generator.integers(0, stops[-1], num_chunks)
        parts = []
        of = stops.searchsorted(rows, "right")
        for i, span in enumerate(window):
            where = (of == i).nonzero()[0]
            if len(where):
                parts.append((span, where, rows[where] - (stops[i] - span.ends[-1])))
        return _Request(num_chunks, state, parts)

    def _fetch(self, request: _Request, deadline: float) -> Batch:
        """The batch, drawn anew where its rows are not there any more."""
        while True:
            batch = self._try_to_fetch(request, deadline)
            if batch is not None:
                return batch
            if time.monotonic() > deadline:
                raise TimeoutError("sample: expected a window that holds still, got none in time.")
            if not request.is_wanted or self._is_closed:
                raise ClosedError("sample: expected a batch that is waited for, got none.")
            drawn = self._draw(request.num_chunks, deadline)
            request.parts = drawn.parts

    def _try_to_fetch(self, request: _Request, deadline: float) -> Batch | None:
        asked = []
        near = []
        for part in request.parts:
            if part[0].shard.node == self._node:
                near.append(part)
            else:
                asked.append(_ask(*part))
        joint = Joint(request.num_chunks, self._pool)
        for span, where, offsets in near:  # while the others answer
            read = span.shard.read_here(span, offsets, self._config.shard_window_size)
            if read is None:
                asked.append(_ask(span, where, offsets))
                continue
            batch, is_here = read
            if len(where) == request.num_chunks and is_here.all():
                return batch
            joint.put(where[is_here], packed(batch))
            if not is_here.all():
                asked.append(_ask(span, where[~is_here], offsets[~is_here]))
        is_whole = True
        for shard, where, ref in asked:
            try:
                rows, update = self._shards.result(shard, ref, "sample", deadline)
            except AwayError:
                is_whole = False
                continue
            self._shards.take(shard, update)
            if rows is None:
                is_whole = False
            else:
                joint.put(where, rows)
        return joint.batch() if is_whole else None

    def refresh(self, timeout_s: float | None = None) -> None:
        """Learn what others have added up to now."""
        self._shards.look(self._deadline(timeout_s), is_forced=True)

    # -- of all shards -----------------------------------------------------------------------

    def _of_all(
        self, what: str, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """What each shard gives; ShardError unless all of them answer."""
        of_each = [arguments] * len(self._shards.all)
        return self._shards.ask_all(what, method, of_each, self._deadline(timeout_s))

    def _of_answering(self, what: str, method: str, timeout_s: float | None) -> list[Any]:
        """What each shard gives that answers."""
        deadline = self._deadline(timeout_s)
        asked = [(shard, shard.call(method)) for shard in self._shards.wait_for_one(deadline)]
        return self._shards.answers(what, asked, deadline)

    def __len__(self) -> int:
        """Trajectories of all shards that answer."""
        return sum(number for number, _ in self._of_answering("len", "size", None))

    @property
    def size(self) -> int:
        """Number of trajectories in the lists of all shards that answer."""
        return len(self)

    @property
    def total_samples(self) -> int:
        """Number of rows of all trajectories in these lists."""
        return sum(rows for _, rows in self._of_answering("total_samples", "size", None))

    def is_ready(self, min_size: int) -> bool:
        """Whether the lists hold at least ``min_size`` trajectories together."""
        return len(self) >= arguments.whole("min_size", min_size, None)

    def get_stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Counts of all shards together; each one's own are in the list ``shards``.

        ``num_shards_away`` do not answer at the moment; ``num_short_batches`` is how many batches
        this handle has drawn without some shard.
        """
        shards = self._of_answering("get_stats", "stats", timeout_s)
        stats: dict[str, Any] = {key: sum(shard[key] for shard in shards) for key in _SUMMED}
        stats["num_shards"] = len(self._shards.all)
        stats["num_shards_away"] = len(self._shards.all) - len(shards)
        stats["num_short_batches"] = self._num_short
        stats["shards"] = shards
        return stats

    def flush(self, sync: bool = False, timeout_s: float | None = None) -> None:
        """As `TrajectoryReplayBuffer.flush`, in all shards. ShardError if one does not answer."""
        self._of_all("flush", "flush", sync, timeout_s=timeout_s)

    def clear(self, timeout_s: float | None = None) -> None:
        """Remove all trajectories of all shards. ShardError if one does not answer."""
        try:
            self._of_all("clear", "clear", timeout_s=timeout_s)
        finally:
            with self._lock:
                self._forget_ahead()
        self.refresh(timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """The state of this handle's generator: a handle that loads it draws the same rows.

        Batches under way are drawn again.
        """
        with self._lock:
            oldest = self._ahead[0][0].state if self._ahead else None
            return {"rng_state": oldest or self._generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the stream of a `state_dict`."""
        with self._lock:
            self._forget_ahead()
            self._generator.bit_generator.state = state["rng_state"]

    # -- checkpoints -------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_path: Directory,
        trajectory_format: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Save each shard's window as ``rank_0``, ``rank_1``, ... in a directory all nodes see.

        Each of them is a checkpoint of its own, for a `TrajectoryReplayBuffer` too, and is whole at
        any moment; the set of them is once this returns: save to a new path where an older one is
        to stay until then. The state of this handle's generator is saved with them. ShardError if
        a shard does not answer.
        """
        path = location("save_path", save_path)
        files.make_directory(path)
        num_shards = len(self._shards.all)
        ranks = [(files.join(path, f"rank_{i}"), trajectory_format) for i in range(num_shards)]
        state = {"num_shards": num_shards, **self.state_dict()}
        self._shards.ask_all("save_checkpoint", "save", ranks, self._deadline(timeout_s))
        for rank in _ranks_in(path)[num_shards:]:  # of an earlier checkpoint of more shards
            files.remove(rank)
        files.replace(files.join(path, _STATE), [json.dumps(state).encode()])

    def load_checkpoint(self, load_path: Directory, timeout_s: float | None = None) -> None:
        """Replace the content by that of a checkpoint of any number of shards, or of one buffer.

        ``load_path`` is seen by all nodes. Each trajectory comes to exactly one shard. Where as
        many shards were saved all goes on exactly as it was, the generator too; else trajectories
        are numbered anew and dealt out in the order of their addition. FileNotFoundError where
        there is no checkpoint, CorruptError for a damaged one; then nothing has changed. ShardError
        if a shard does not answer; some may have loaded their part then, or load it later.
        """
        deadline = self._deadline(timeout_s)
        path = location("load_path", load_path)
        num_shards = len(self._shards.all)
        ranks, state = _read_state(path)
        for source in ranks or [path]:
            checkpoint.read_whole(source)
        is_same = bool(state) and len(ranks) == num_shards
        merged = files.temporary(path)
        try:
            if is_same:
                loads: list[tuple[Any, ...]] = [(rank, False) for rank in ranks]
            else:
                if ranks:
                    merge(ranks, merged, order="added")
                loads = [(merged if ranks else path, num_shards > 1)] * num_shards
            self._shards.ask_all("load_checkpoint", "load", loads, deadline)
        finally:
            with self._lock:
                self._forget_ahead()
            files.remove(merged)
        self.refresh(timeout_s)
        if is_same:
            self.load_state_dict(state)

    # -- ending ------------------------------------------------------------------------------

    def close(self, shards: bool | None = None, timeout_s: float | None = None) -> None:
        """Let go of the shards; with ``shards``, by default of who made them, end them for all.

        Then all that is pending is written first; if that fails WriteError is raised, and the
        buffer stays open. Shards that do not answer are ended as they are. Closing again does
        nothing.
        """
        if self._is_closed:
            return
        deadline = self._deadline(timeout_s)
        if self._is_owner if shards is None else shards:
            self._shards.wait_for_all(deadline)
            for method, *arguments in (("flush", False), ("close",)):
                answering = self._shards.answering
                asked = [(shard, shard.call(method, *arguments)) for shard in answering]
                self._shards.answers("close", asked, deadline)
            for shard in self._shards.all:
                if shard.actor is not None:
                    ray.kill(shard.actor)
        self._is_closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._shards.close()

    def __enter__(self) -> RayReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self._config, "actors": self._actors}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._begin(state["config"], state["actors"], stream=None, is_owner=False)

    def __repr__(self) -> str:
        return f"<RayReplayBuffer {self._config.path}: {self._config.num_shards} shards>"

    def _deadline(self, timeout_s: float | None) -> float:
        if self._is_closed:
            raise ClosedError("expected an open buffer, got one that was closed.")
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        return time.monotonic() + (self._config.timeout_s if timeout_s is None else timeout_s)


def _ask(span: Span, where: Array, offsets: Array) -> tuple[RemoteShard, Array, Ref]:
    """Ask a shard for rows of a batch; with where they go in it.

    In one call: several, of which one could be copied while the next is gathered, took longer.
    """
    shard = span.shard
    of = (span.epoch, int(span.ids[0]), int(span.ids[-1]), int(span.ends[-1]))
    return shard, where, shard.call("rows", of, offsets, shard.known)


def _ranks_in(path: str) -> list[str]:
    """Directories ``rank_0``, ``rank_1``, ... in ``path``, as many as follow each other."""
    names = set(files.names_in(path))
    ranks = itertools.takewhile(names.__contains__, (f"rank_{i}" for i in itertools.count()))
    return [files.join(path, rank) for rank in ranks]


def _read_state(path: str) -> tuple[list[str], dict[str, Any]]:
    """The ranks of a checkpoint (none: it is that of one buffer), and what was saved with them."""
    ranks = _ranks_in(path)
    name = files.join(path, _STATE)
    if not files.exists(name):
        return ranks, {}
    try:
        state = json.loads(files.read(name))
        num_shards = int(state["num_shards"])
        rng_state = dict(state["rng_state"])
    except BAD_JSON as error:
        raise CorruptError(name, f"expected what a RayReplayBuffer saves: {error!r}.") from error
    if len(ranks) < num_shards:
        raise CorruptError(
            path, f"expected rank_0 to rank_{num_shards - 1}, got {len(ranks)} of these."
        )
    return ranks[:num_shards], {"rng_state": rng_state}
