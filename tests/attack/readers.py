"""Those who read what the trainer writes: its store, and a checkpoint that is saved over.

They know nothing but what they see: each row is right in itself, an id never names another
trajectory than it did before, and while the trainer changes nothing a reader shows what it has.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from random import Random
from typing import Any

from children import Parent

from attack import rows
from attack.model import State
from attack.process import Account, Papers, Process
from attack.rows import Drawer, Drawing, Drawn
from attack.trainer import OVER
from mmbuf import EmptyBufferError, ReplayReader, SchemaError, TrajectoryReplayBuffer

_OWN = rows.MAX_SERIAL // 2  # serials from here on are of what is added in memory only


def follow(parent: Parent, papers: Papers) -> Account:
    """Readers that follow the store."""
    return Follower(parent, papers).live()


def sit(parent: Parent, papers: Papers) -> Account:
    """A reader and a memory-only buffer on a checkpoint that is saved over."""
    return Sitter(parent, papers).live()


class _Reading(Process):
    """What both have: sources to draw from, which a crew draws from as well."""

    def __init__(self, parent: Parent, papers: Papers) -> None:
        super().__init__(parent, papers)
        self.sources: dict[str, Any] = {}  # open ones
        self.num_changes: dict[str, int] = {}  # of each; odd while it is changed
        self._ids: dict[int, int] = {}  # by serial
        self._serials: dict[int, int] = {}  # by id
        self._drawers: dict[str, Drawer] = {}  # the main thread's

    @property
    def state(self) -> State:
        """What the trainer has said last."""
        state: State = self.papers.board.get()[1]
        return state

    def note_pair(self, serial: int, trajectory_id: int) -> None:
        """AssertionError if this id has meant another trajectory."""
        if serial < _OWN:
            known = self._ids.setdefault(serial, trajectory_id)
            assert known == trajectory_id, f"serial {serial} was {known}, and is {trajectory_id}"
            known = self._serials.setdefault(trajectory_id, serial)
            assert known == serial, f"trajectory {trajectory_id} was serial {known}, is {serial}"

    def check_drawn(self, drawn: Drawn) -> None:
        self.count("rows checked", len(drawn.codes))
        for serial, trajectory_id in drawn.ids.items():
            self.note_pair(serial, trajectory_id)

    def open_source(self, name: str, opened: Callable[[], Any]) -> None:
        """Open it, in more than one attempt if it is interrupted."""
        while True:
            ended = self.do(f"open {name}", opened)
            if ended.is_done:
                break
        self.sources[name] = ended.result
        self._drawers[name] = Drawer(ended.result, self.rng)

    def close_source(self, name: str) -> None:
        source = self.sources.pop(name)
        del self._drawers[name]
        if not self.do(f"close {name}", source.close).is_done:
            self.do(f"close {name}", source.close, is_exposed=False)

    def draw(self, name: str) -> Drawn | None:
        source = self.sources[name]
        state = self.state
        drawing = self._drawers[name].next()

        def is_deserved(error: Exception) -> bool:
            if isinstance(error, SchemaError):
                return drawing.refills is not None
            if isinstance(error, EmptyBufferError):
                return len(source) == 0 and self.may_be_empty(name, state)
            return False

        ended = self.do(f"sample {name}: {drawing.what}", drawing.call, is_deserved)
        if not ended.is_done:
            return None
        drawn = drawing.check(ended.result)
        self.check_drawn(drawn)
        return drawn

    def may_be_empty(self, name: str, state: State) -> bool:
        """Whether a source may show nothing, where the trainer had said ``state`` before."""
        raise NotImplementedError

    def get(self, name: str) -> None:
        source = self.sources[name]
        ids = source.trajectory_ids
        if not ids:
            return
        i = self.rng.choice(ids)

        def is_deserved(error: Exception) -> bool:
            return isinstance(error, KeyError) and i not in source.trajectory_ids

        ended = self.do(f"get of {name}", lambda: source.get_trajectory(i), is_deserved)
        if ended.is_done:
            self.note_pair(rows.serial_of(ended.result), i)
            self.count("trajectories compared")

    def stay(self, calls: dict[Callable[[], None], float]) -> Account:
        """Make these calls, each as often as its weight says, until all is over."""
        self.start_crew()
        self.say_ready()
        while not self.is_over:
            (call,) = self.rng.choices(list(calls), list(calls.values()))
            call()
            time.sleep(self.rng.uniform(0, 0.004))
        with self.alone():
            for name in list(self.sources):
                self.close_source(name)
            self.check_nothing_left("after the last close")
        return self.end()


class _Beside:
    """Draws and looks beside the main thread, from one of the sources."""

    def __init__(self, reading: _Reading, source: str, name: str) -> None:
        self._reading = reading
        self._source = source
        self._rng = Random(f"{reading.papers.seed} {name}")
        self._drawer: tuple[Any, Drawer] | None = None

    def step(self) -> None:
        reading, name = self._reading, self._source
        source = reading.sources.get(name)
        num_changes = reading.num_changes.get(name, 0)
        if source is None:
            time.sleep(0.002)
            return
        if self._drawer is None or self._drawer[0] is not source:
            self._drawer = (source, Drawer(source, self._rng))
        drawing = self._drawer[1].next()
        state = reading.state
        try:
            if self._rng.random() < 0.1:
                self._get(source)
            else:
                reading.check_drawn(drawing.check(drawing.call()))
                reading.count("batches beside")
        except (EmptyBufferError, SchemaError, KeyError) as error:
            has_changed = num_changes % 2 or num_changes != reading.num_changes.get(name, 0)
            if not has_changed and not self._is_deserved(error, drawing, state):
                raise
        time.sleep(self._rng.uniform(0, 0.004))

    def _get(self, source: Any) -> None:
        ids = source.trajectory_ids
        if ids:
            i = self._rng.choice(ids)
            self._reading.note_pair(rows.serial_of(source.get_trajectory(i)), i)

    def _is_deserved(self, error: Exception, drawing: Drawing, state: State) -> bool:
        if isinstance(error, EmptyBufferError):
            return self._reading.may_be_empty(self._source, state)
        if isinstance(error, SchemaError):
            return drawing.refills is not None
        return isinstance(error, KeyError)  # it is gone meanwhile

    def let_go(self) -> None:
        self._drawer = None


class Follower(_Reading):
    """Two readers of the store, one of which only the main thread uses."""

    def live(self) -> Account:
        self._open("own")
        self._open("shared")
        for number in range(2):
            self.hire(f"reads {number}", _Beside(self, "shared", f"reads {number}"))
        return self.stay(
            {self._draw: 40, self._refresh: 10, self._get: 8, self._reopen: 1, self._alone: 0.5}
        )

    def _open(self, name: str) -> None:
        window_size, cache_size = self.rng.choice((0, 4)), self.rng.choice((None, 2))
        self.open_source(
            name,
            lambda: ReplayReader(
                self.papers.store,
                seed=self.rng.getrandbits(32),
                sample_window_size=window_size,
                cache_size=cache_size,
            ),
        )

    def may_be_empty(self, name: str, state: State) -> bool:
        now = self.state
        return any(
            not content.num_safe for content in (*state.possible, *now.possible)
        ) or self._has_removed(state, now)

    def _has_removed(self, state: State, now: State) -> bool:
        """Whether the list may have been changed, but by adding, from one state to another."""
        return bool(state.num_removals % 2) or state.num_removals != now.num_removals

    def _draw(self) -> None:
        drawn = self.draw("own")
        if drawn is not None:
            in_window = set(self.sources["own"].window_ids)
            assert set(drawn.ids.values()) <= in_window, (drawn.ids, in_window)

    def _get(self) -> None:
        self.get("own")

    def _refresh(self) -> None:
        number, state = self.papers.board.get()
        reader = self.sources["own"]
        if not self.do("refresh", reader.refresh).is_done:
            return
        ids = reader.trajectory_ids
        if self.papers.board.number == number and not state.outcomes:
            content = state.content
            assert content.part_shown(ids, self.config.removable) is not None, (
                f"a reader shows {ids} of {content.ids}, of which {content.num_safe} are published"
            )
            self.count("lists compared")

    def _reopen(self) -> None:
        self.close_source("own")
        self._open("own")

    def _alone(self) -> None:
        with self.alone():
            for name in ("own", "shared"):
                self.close_source(name)
            self.check_nothing_left("after close")
            for name in ("own", "shared"):
                self._open(name)


class Sitter(_Reading):
    """A reader and a memory-only buffer of a checkpoint that others save over."""

    def __init__(self, parent: Parent, papers: Papers) -> None:
        super().__init__(parent, papers)
        self._path = self.directory / OVER
        self._next_own = _OWN

    def live(self) -> Account:
        while not self._path.exists():
            if self.is_over:
                return self.end()
            time.sleep(0.01)
        self._open_reader()
        self._open_memory()
        self.hire("reads", _Beside(self, "reader", "reads"))
        self.hire("remembers", _Beside(self, "memory", "remembers"))
        return self.stay(
            {
                functools.partial(self.draw, "reader"): 20,
                functools.partial(self.draw, "memory"): 20,
                functools.partial(self.get, "reader"): 5,
                functools.partial(self.get, "memory"): 5,
                self._refresh: 5,
                self._load: 2,
                self._add: 2,
                self._reopen: 1,
                self._alone: 0.3,
            }
        )

    def may_be_empty(self, name: str, state: State) -> bool:
        return len(self.sources[name]) == 0 if name in self.sources else True

    def _open_reader(self) -> None:
        state = self.state
        self.open_source("reader", lambda: ReplayReader(self._path))
        self._check_saved("reader", state)

    def _open_memory(self) -> None:
        self.open_source("memory", TrajectoryReplayBuffer)
        self._load()

    def _load(self) -> None:
        state = self.state
        memory = self.sources["memory"]
        before = memory.trajectory_ids
        self.num_changes["memory"] = self.num_changes.get("memory", 0) + 1
        ended = self.do("load", lambda: memory.load_checkpoint(self._path))
        self.num_changes["memory"] += 1
        if ended.is_done or memory.trajectory_ids != before:
            self._check_saved("memory", state)

    def _check_saved(self, name: str, before: State) -> None:
        """A source shows one of the checkpoints that there have been since that state.

        Or what is left of it in a later one, if another thread has found that already.
        """
        ids = tuple(self.sources[name].trajectory_ids)
        now = self.state  # after that: saves that the ids know of are known here as well
        if now.num_saves[OVER] - before.num_saves[OVER] <= 1:
            saved = {*before.saved[OVER], *now.saved[OVER]}
            known = {content.ids for content in saved if content is not None}
            left = {tuple(i for i in some if i in others) for some in known for others in known}
            assert ids in left, f"{name} shows {ids}, which is none of {known} nor left of these"
            self.count("checkpoints compared")

    def _add(self) -> None:
        memory = self.sources["memory"]
        ids = memory.trajectory_ids
        schema = 0
        if ids:
            try:
                schema = rows.schema_of(rows.serial_of(memory.get_trajectory(ids[-1])))
            except KeyError:  # gone meanwhile
                return
        self._next_own += len(rows.IMAGES)
        item = rows.content(self._next_own + schema)
        counter = memory.trajectory_counter
        # Where all had gone, an error of before may be looked at when there is something again.
        self.num_changes["memory"] += not ids
        ended = self.do("add", lambda: memory.add_trajectories([item]))
        self.num_changes["memory"] += not ids
        rows.spoil(item)
        now = memory.trajectory_ids
        is_there = counter in now
        assert is_there or not ended.is_done, f"{counter} is not among {now}"
        # Another thread may have found that some are gone.
        left = [i for i in ids if i in now]
        assert now == [*left, *([counter] if is_there else [])], f"{now} of {ids} and {counter}"

    def _refresh(self) -> None:
        reader = self.sources["reader"]
        self.do("refresh", reader.refresh)

    def _reopen(self) -> None:
        with self.alone():  # what is in use is not to be closed
            if self.rng.random() < 0.5:
                self.close_source("reader")
                self._open_reader()
            else:
                self.close_source("memory")
                self._open_memory()

    def _alone(self) -> None:
        with self.alone():
            self.close_source("reader")
            self.close_source("memory")
            self.check_nothing_left("after close")
            self._open_reader()
            self._open_memory()
