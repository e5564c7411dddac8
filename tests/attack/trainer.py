"""The trainer: the process that owns the store, and changes it in every way.

Its main thread makes one call after the other, each perhaps interrupted, or with a signal handler
that calls the buffer in the midst of it. A crew samples beside it and saves a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from children import Parent

from attack import rows
from attack.model import Content, Listing, Model, Moment
from attack.process import PATIENCE_S, Account, Ended, Papers, Process
from attack.rows import Drawer, Drawing, Drawn
from mmbuf import (
    Channel,
    ClosedError,
    EmptyBufferError,
    ReplayReader,
    SchemaError,
    Trajectory,
    TrajectoryReplayBuffer,
)

OVER = "saved over"  # the checkpoint that others are on
_BESIDE = "saved beside"  # by a thread
_NESTED = "saved within"  # by a signal handler, or by what is iterated over
_SAVED = (OVER, OVER, "saved 1", "saved 2", "saved 3")
CHECKPOINTS = {*_SAVED, _BESIDE, _NESTED}
_FORMATS = (None, None, "arrow", "npy", "pt", "pkl")
_MAX_STEP = 32  # of ids, which distributed loads multiply
_LONGEST, _LONGEST_WINDOW = 120, 40  # lists; then they are cleared
WEIGHTS: dict[str, float] = {
    "add": 30,
    "sample": 24,
    "look at the window": 3,
    "look at one": 6,
    "look at counts": 2,
    "flush": 8,
    "save": 4,
    "load": 3,
    "clear the cache": 3,
    "clear": 1,
    "close": 0.6,
    "close alone": 0.6,
    "give up": 0.4,
    "drop": 0.6,
}


@dataclass
class Held:
    """An open buffer. Whoever uses it may find it closed once that is possible."""

    buffer: TrajectoryReplayBuffer
    may_be_closed: bool = False
    drawers: dict[str, Drawer] = field(default_factory=dict)  # of each thread its own


def live(parent: Parent, papers: Papers) -> Account:
    """One life of the trainer."""
    return Trainer(parent, papers).live()


class Trainer(Process):
    """Everything that a trainer does, each as often as `WEIGHTS` say."""

    def __init__(self, parent: Parent, papers: Papers) -> None:
        super().__init__(parent, papers)
        self._window_size: int = self.config.options["sample_window_size"]
        self.model = Model(papers.board, self._window_size, self.config.removable)
        self.is_bounded = self.config.removable is not None
        self.held: Held | None = None
        self._calls: dict[str, Callable[[], None]] = {
            "add": self._add,
            "sample": self._sample,
            "look at the window": self._look_at_window,
            "look at one": self._look_at_one,
            "look at counts": self._look_at_counts,
            "flush": self._flush,
            "save": self._save,
            "load": self._load,
            "clear the cache": self._clear_cache,
            "clear": self._clear,
            "close": self._close,
            "close alone": self._close_alone,
            "give up": self._give_up,
            "drop": self._drop,
        }

    def live(self) -> Account:
        self._open()
        for number in range(2):
            self.hire(f"samples {number}", Samples(self, f"samples {number}"))
        self.hire("gets", Gets(self))
        if self.has("save"):
            self.hire("saves", Saves(self))
        self.start_crew()
        self.say_ready()
        calls = [(name, weight) for name, weight in WEIGHTS.items() if self.has(name)]
        names, weights = zip(*calls, strict=True)
        while not self.is_over:
            if self.held is None or self.held.may_be_closed:
                self._reopen()
                continue
            longest = _LONGEST if self._window_size else _LONGEST_WINDOW
            is_long = len(self.model.content.listed) > longest
            (name,) = ["clear"] if is_long else self.rng.choices(names, weights)
            self._calls[name]()
        with self.alone():
            if self.held is not None:
                self._close_it(is_exposed=False)
                self.held = None
            self.check_nothing_left("after the last close")
        return self.end()

    @property
    def _buffer(self) -> TrajectoryReplayBuffer:
        assert self.held is not None
        return self.held.buffer

    @property
    def _is_closing(self) -> bool:
        return self.held is None or self.held.may_be_closed

    def path_of(self, name: str) -> Path:
        """Of a checkpoint."""
        return self.directory / name

    # -- opening and closing --

    def _open(self) -> None:
        """Open the store, and find in it what must be there, every value."""
        self.model.begin(self.model.state.possible, is_removal=True)
        for attempt in itertools.count():
            ended = self.do("open", self._opened, is_exposed=None if attempt < 5 else False)
            if ended.is_done:
                break
        held = Held(ended.result)
        del ended
        with self.quietly("look at all"):
            found = self.listing_of(held.buffer)
        self.model.end(self.model.match_reopened(found, held.buffer.trajectory_counter))
        self.held = held

    def _opened(self) -> TrajectoryReplayBuffer:
        store = self.papers.store
        return TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, **self.config.options)

    def listing_of(self, store: Any) -> Listing:
        """Ids and serials of the list of a buffer or reader; every value of it is right."""
        ids = store.trajectory_ids
        found = tuple((i, rows.serial_of(store.get_trajectory(i))) for i in ids)
        self.count("trajectories compared", len(found))
        return found

    def _reopen(self) -> None:
        if self.held is not None:
            self._close_it()
            self.held = None
        self._open()

    def _close_it(self, *, wait: bool = True, is_exposed: bool | None = None) -> None:
        """Close the buffer; again if that is interrupted."""
        assert self.held is not None
        self.held.may_be_closed = True
        self.model.begin(self.model.state.possible, is_removal=True)
        close = functools.partial(self._buffer.close, wait=wait)
        if not self.do("close", close, is_exposed=is_exposed).is_done:
            self.do("close", close, is_exposed=False)
        if wait:
            self.model.narrow(content.safe() for content in self.model.state.possible)

    def _close(self) -> None:
        """While others use it."""
        self._close_it()

    def _close_alone(self) -> None:
        """While nobody uses it, so that nothing may be left."""
        with self.alone():
            self._close_it()
            self.held = None
            self.check_nothing_left("after close")
            self._open()

    def _give_up(self) -> None:
        """Close it without writing what is pending."""
        self._close_it(wait=False)
        self.held = None

    def _drop(self) -> None:
        """Let go of it without closing; nothing is left, and it holds the store no longer."""
        with self.alone():
            self.note("drop")
            self.count("drop: done")
            self.model.begin(self.model.state.possible, is_removal=True)
            self.held = None
            self.check_nothing_left("after a buffer was dropped")
            self._open()

    # -- what changes the list --

    def _change(
        self,
        what: str,
        call: Callable[[], Any],
        outcomes: list[Content],
        between: Iterable[Content] = (),
        *,
        is_removal: bool,
    ) -> Ended:
        """Make a call that makes one of ``outcomes`` of the list.

        If it is interrupted, that or what was before or one of those ``between``.
        """
        assert self.held is not None
        self.model.begin([self.model.content, *between, *outcomes], is_removal=is_removal)
        ended = self.do(what, call, self.is_deserved)
        if ended.is_done:
            self.model.narrow(outcomes)
        if not self.held.may_be_closed:  # else the store tells when it is opened again
            self.model.end(self._match(self._buffer.trajectory_ids))
        return ended

    def _match(self, ids: list[int]) -> Content:
        """The outcome that the buffer, which lists these, is in."""
        # The step shows only in ids to come: two loads of nothing may differ in it alone.
        return self.model.match(ids, self._buffer.trajectory_counter, self._buffer._id_step)

    def is_deserved(self, error: Exception) -> bool:
        """Whether an error of a call that draws no batch is no fault."""
        return isinstance(error, ClosedError) and self._is_closing

    def _add(self) -> None:
        listed = self.model.content.listed
        schema = rows.schema_of(listed[0][1]) if listed else self.rng.randrange(len(rows.IMAGES))
        serials = self.model.new_serials(
            schema, len(rows.IMAGES), self.rng.choice((1, 1, 1, 2, 3, 4))
        )
        items = [rows.content(serial) for serial in serials]
        form = self.rng.choice(("list", "list", "trajectories", "generator", "nested", "channel"))
        if not self.has(form):
            form = "list"
        _, *between, last = self.model.content.adding(serials)
        with self._given(form, items) as given:
            add = functools.partial(self._buffer.add_trajectories, given)
            self._change(f"add: {form} of {serials}", add, [last], between, is_removal=False)
            del add, given
        # The caller's memory is its own again, whether they were added or not.
        for item in items:
            rows.spoil(item)

    @contextlib.contextmanager
    def _given(self, form: str, items: Sequence[dict[str, Any]]) -> Iterator[Iterable[Any]]:
        """What is given to `add_trajectories`."""
        if form == "trajectories":
            yield [Trajectory.from_columns(item) for item in items]
        elif form == "generator":
            yield (item for item in items)
        elif form == "nested":
            yield self._calling(items)
        elif form == "channel":
            channel = Channel(maxsize=2)
            thread = threading.Thread(target=_feed, args=(channel, items), name="feeds a channel")
            thread.start()
            yield channel
            channel.close()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a channel that is closed keeps someone waiting"
        else:
            yield list(items)

    def _calling(self, items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The items, and calls to the buffer between them."""
        for item in items:
            with self.signals.shut():
                name = self.rng.choice(("flush", "sample", "save"))
            self._call_within(name)
            yield item

    def _load(self) -> None:
        known = [n for n, saved in self.model.state.saved.items() if saved != (None,)]
        names = sorted({*known} - {_BESIDE})
        if not names:
            return
        name = self.rng.choice(names)
        self._look_at_saved(name)
        saved = [content for content in self.model.state.saved[name] if content is not None]
        if not saved:
            return
        world_size = self.rng.choice((1, 1, 2, 3))
        if max(content.step for content in saved) * world_size > _MAX_STEP:
            world_size = 1
        rank = self.rng.randrange(world_size)
        before = self.model.content
        load = functools.partial(
            self._buffer.load_checkpoint, self.path_of(name), world_size > 1, rank, world_size
        )
        outcomes = [before.loading(content, rank, world_size) for content in saved]
        what = f"load: {name!r}, part {rank} of {world_size}"
        self._change(what, load, outcomes, is_removal=True)

    def _clear(self) -> None:
        cleared = self.model.content.cleared()
        self._change("clear", self._buffer.clear, [cleared], is_removal=True)

    # -- what does not --

    def _sample(self) -> None:
        assert self.held is not None
        self._draw(self.drawer_of(self.held, "main", self.rng).next())

    def drawer_of(self, held: Held, name: str, rng: Random) -> Drawer:
        """One thread's, of this buffer."""
        if name not in held.drawers:
            held.drawers[name] = Drawer(held.buffer, rng)
        return held.drawers[name]

    def _draw(self, drawing: Drawing) -> Drawn | None:
        """Draw a batch and check it; None where there is none."""
        held, moment = self.held, self.model.now()
        assert held is not None
        ended = self.do(
            f"sample: {drawing.what}",
            drawing.call,
            lambda error: self.is_no_fault(error, held, drawing, moment),
        )
        if not ended.is_done:
            return None
        drawn = drawing.check(ended.result)
        self.check_drawn(drawn, moment)
        return drawn

    def is_no_fault(self, error: Exception, held: Held, drawing: Drawing, moment: Moment) -> bool:
        """Whether an error of a batch that was drawn from a moment on is deserved."""
        windows = self.model.windows_since(moment) or (Content(),)  # forgotten: perhaps all
        if isinstance(error, EmptyBufferError):
            if not self.has("load at once") and self.model.may_have_removed(moment):
                return True
            return held.may_be_closed or any(not content.listed for content in windows)
        if isinstance(error, SchemaError):  # it was to refill a batch of another schema
            return drawing.refills is not None and any(
                {rows.schema_of(serial) for serial in content.serials} != {drawing.refills}
                for content in windows
            )
        return isinstance(error, ClosedError) and held.may_be_closed

    def check_drawn(self, drawn: Drawn, moment: Moment) -> None:
        """AssertionError unless all that was drawn has been in the window since that moment."""
        self.count("rows checked", len(drawn.codes))
        windows = self.model.windows_since(moment)
        if windows is not None:
            may_be = frozenset().union(*(content.serials for content in windows))
            assert drawn.serials <= may_be, (
                f"serials {sorted(drawn.serials - may_be)} are not in the window, "
                f"which has {sorted(may_be)}"
            )
        for serial, trajectory_id in drawn.ids.items():
            assert self.model.id_of(serial) == trajectory_id, (serial, trajectory_id)

    def _look_at_window(self) -> None:
        window = self.model.content.newest(self._window_size)
        drawn = self._draw(rows.every_row_once(self._buffer))
        if drawn is not None and not self._is_closing:
            expected = rows.rows_of([serial for _, serial in window.listed])
            assert sorted(drawn.codes.tolist()) == expected, "each row of the window, once"

    def _look_at_one(self) -> None:
        listed = self.model.content.listed
        in_window = self.model.content.newest(self._window_size).ids
        gone = self.model.content.counter
        i, serial = self.rng.choice([*listed, (gone, -1)])

        def is_deserved(error: Exception) -> bool:
            may_be_gone = i == gone or (self.is_bounded and i not in in_window)
            return self.is_deserved(error) or (isinstance(error, KeyError) and may_be_gone)

        get = functools.partial(self._buffer.get_trajectory, i)
        ended = self.do(f"get: {i}", get, is_deserved)
        if ended.is_done:
            assert rows.serial_of(ended.result) == serial, i
            self.count("trajectories compared")

    def _look_at_counts(self) -> None:
        """Of the list and the window, and other things that have no effect."""
        buffer, content = self._buffer, self.model.content
        ids = buffer.trajectory_ids
        found = self._match(ids)
        assert buffer.window_ids == list(content.newest(self._window_size).ids)
        shapes = [rows.shape_of(serial) for _, serial in found.listed]
        if not self.is_bounded:
            assert len(buffer) == buffer.size == len(ids)
            assert buffer.total_samples == sum(t * b for t, b in shapes)
        ended = self.do("look at counts", buffer.get_stats, self.is_deserved)
        if ended.is_done and not self.is_bounded and not self._is_closing:
            assert ended.result["num_trajectories"] == len(ids)
        assert "TrajectoryReplayBuffer" in repr(buffer)

    def _flush(self) -> None:
        before = self.model.content
        sync = self.rng.random() < 0.1
        flush = functools.partial(self._buffer.flush, sync=sync)
        if self.do("flush", flush, self.is_deserved).is_done:
            self.model.note_safe(len(before.listed), before.counter)

    def _clear_cache(self) -> None:
        self.do("clear the cache", self._buffer.clear_cache, self.is_deserved)

    def _save(self) -> None:
        before = self.model.content
        name = self.rng.choice(_SAVED)
        if name == OVER and not self.has("save over") and self.path_of(OVER).exists():
            return
        if self.rng.random() < 0.1:  # into the store itself
            save = functools.partial(self._buffer.save_checkpoint, self.papers.store)
            ended = self.do("save: where it is", save, self.is_deserved)
        else:
            if name != OVER and self.rng.random() < 0.3:
                self._remove_saved(name)
            format_name = self.rng.choice(_FORMATS)
            save = functools.partial(self._buffer.save_checkpoint, self.path_of(name), format_name)
            begun = self.model.begin_save(name)
            ended = self.do(f"save: {name!r} as {format_name}", save, self.is_deserved)
            self.model.end_save(name, begun, is_done=ended.is_done)
            if not ended.is_done or self.rng.random() < 0.2:
                self._look_at_saved(name)
        if ended.is_done:
            self.model.note_safe(len(before.listed), before.counter)

    def _remove_saved(self, name: str) -> None:
        path = self.path_of(name)
        self.model.note_leaving(name)
        if path.exists():
            trash = path.rename(self.path_of(f"removed {path.stat().st_ino}"))
            shutil.rmtree(trash)
        self.model.note_found(name, None)

    def _look_at_saved(self, name: str) -> None:
        """A checkpoint holds one of what it may hold, every value of it right."""
        with self.quietly(f"look at {name!r}"):
            self.look_at_saved(name)

    def look_at_saved(self, name: str) -> None:
        """As above, for any thread."""
        path = self.path_of(name)
        if not path.exists():
            self.model.note_found(name, None)
            return
        with ReplayReader(path) as reader:
            self.model.note_found(name, self.listing_of(reader))

    # -- calls in the midst of others --

    def _on_signal(self, number: int) -> None:
        if self.has("handlers"):
            with self.signals.shut():
                name = "close" if number == signal.SIGTERM else self.rng.choice(("flush", "save"))
            self._call_within(name)

    def _call_within(self, name: str) -> None:
        """Call the buffer within another call of it."""
        with self.signals.shut():
            held = self.held
            if held is None:
                return
            self.note(f"within that: {name}")
            call = self._within(name, held)
        call()
        with self.signals.shut():
            self.note(f"within that: {name}, ended")
            self.count(f"within another call: {name}")

    def _within(self, name: str, held: Held) -> Callable[[], None]:
        """The call, and what follows from it; in each of them signals are open."""
        if name == "sample":
            drawing = self.drawer_of(held, "within", self.rng).next()
            return functools.partial(self._draw_within, held, drawing, self.model.now())
        if name == "save":
            return functools.partial(self._save_within, held, self.model.begin_save(_NESTED))
        if name == "flush":
            return functools.partial(self._flush_within, held, self.model.content)
        held.may_be_closed = True
        return held.buffer.close

    def _draw_within(self, held: Held, drawing: Drawing, moment: Moment) -> None:
        try:
            batch = drawing.call()
        except (EmptyBufferError, ClosedError, SchemaError) as error:
            if not self.is_no_fault(error, held, drawing, moment):
                raise
            return
        with self.signals.shut():
            self.check_drawn(drawing.check(batch), moment)

    def _save_within(self, held: Held, begun: int) -> None:
        try:
            held.buffer.save_checkpoint(self.path_of(_NESTED))
        except ClosedError as error:
            if not self.is_deserved(error):
                raise
            return
        with self.signals.shut():
            self.model.end_save(_NESTED, begun, is_done=True)

    def _flush_within(self, held: Held, before: Content) -> None:
        try:
            held.buffer.flush()
        except ClosedError as error:
            if not self.is_deserved(error):
                raise
            return
        with self.signals.shut():
            self.model.note_safe(len(before.listed), before.counter)


def _feed(channel: Channel, items: Iterable[Any]) -> None:
    with contextlib.suppress(ClosedError):
        for item in items:
            channel.put(item)
    channel.close()


class Samples:
    """Draws batches beside the main thread."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer = trainer
        self._name = name
        self._rng = Random(f"{trainer.papers.seed} {name}")

    def step(self) -> None:
        trainer, held = self._trainer, self._trainer.held
        if held is None:
            time.sleep(0.001)
            return
        drawing = trainer.drawer_of(held, self._name, self._rng).next()
        moment = trainer.model.now()
        try:
            batch = drawing.call()
        except (EmptyBufferError, ClosedError, SchemaError) as error:
            if not trainer.is_no_fault(error, held, drawing, moment):
                raise
            trainer.count(f"sampling beside: {type(error).__name__}")
            time.sleep(0.001)
            return
        trainer.check_drawn(drawing.check(batch), moment)
        trainer.count("batches beside")
        if self._rng.random() < 0.8:  # or the main thread hardly gets its turn
            time.sleep(self._rng.uniform(0, 0.008))

    def let_go(self) -> None:
        pass


class Gets:
    """Looks at whole trajectories beside the main thread."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rng = Random(f"{trainer.papers.seed} gets")

    def step(self) -> None:
        trainer, held, model = self._trainer, self._trainer.held, self._trainer.model
        moment = model.now()
        ids = [] if held is None else held.buffer.trajectory_ids
        if held is None or not ids:
            time.sleep(0.001)
            return
        i = self._rng.choice(ids)
        try:
            trajectory = held.buffer.get_trajectory(i)
        except ClosedError:
            if not held.may_be_closed:
                raise
        except KeyError:
            if not model.may_have_removed(moment) and not self._may_be_old(i, moment):
                raise
        else:
            serial = rows.serial_of(trajectory)
            assert model.id_of(serial) == i, f"trajectory {i} is that of serial {serial}"
            trainer.count("trajectories compared")
        time.sleep(self._rng.uniform(0, 0.01))

    def _may_be_old(self, i: int, moment: Moment) -> bool:
        """Whether it may have been removed to save disk."""
        windows = self._trainer.model.windows_since(moment)
        return self._trainer.is_bounded and (
            windows is None or any(i not in content.ids for content in windows)
        )

    def let_go(self) -> None:
        pass


class Saves:
    """Saves a checkpoint over and over, and looks at it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rng = Random(f"{trainer.papers.seed} saves")
        self._has_looked = False

    def step(self) -> None:
        trainer, held, model = self._trainer, self._trainer.held, self._trainer.model
        if not self._has_looked:  # a thread like this may have been killed while it saved
            trainer.look_at_saved(_BESIDE)
            self._has_looked = True
        if held is None:
            time.sleep(0.001)
            return
        begun = model.begin_save(_BESIDE, is_beside=True)
        is_done = True
        try:
            held.buffer.save_checkpoint(trainer.path_of(_BESIDE), self._rng.choice(_FORMATS))
        except ClosedError:
            if not held.may_be_closed:
                raise
            is_done = False
        model.end_save(_BESIDE, begun, is_done=is_done, is_beside=True)
        trainer.look_at_saved(_BESIDE)
        trainer.count("saves beside")
        time.sleep(self._rng.uniform(0, 0.05))

    def let_go(self) -> None:
        pass
