"""What a store may hold, as far as is known; and what of it must survive.

The trainer is the only one that changes its store, one change at a time, so what the store holds is
always known but while a change goes on. Then it is one of some *outcomes*: a change that is
interrupted has happened or has not (of several trajectories some may have been added, in their
order). The state is put on a board before and after each change, so that whoever comes after a
killed trainer knows what may be there.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from attack.board import Slot

Listing = tuple[tuple[int, int], ...]  # ids, oldest first, and the serials that tell what they are

_MOST_REMEMBERED = 2000  # moments


@dataclasses.dataclass(frozen=True)
class Content:
    """A trajectory list, the id that the next one gets, and the step from there to the one after.

    Of a list the first ``num_safe`` are published in files. No id below ``safe_counter`` is given
    again.
    """

    listed: Listing = ()
    counter: int = 0
    step: int = 1
    num_safe: int = 0
    safe_counter: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for i, _ in self.listed)

    @property
    def serials(self) -> frozenset[int]:
        return frozenset(serial for _, serial in self.listed)

    def safe(self) -> Content:
        """It, when all is published."""
        return dataclasses.replace(
            self, num_safe=len(self.listed), safe_counter=max(self.counter, self.safe_counter)
        )

    def without_oldest(self, count: int) -> Content:
        return dataclasses.replace(
            self, listed=self.listed[count:], num_safe=max(0, self.num_safe - count)
        )

    def newest(self, count: int) -> Content:
        """What a window of ``count`` shows and a checkpoint holds; 0: all."""
        return Content(self.listed[-count:], self.counter, self.step)

    def part_shown(self, found: Sequence[Any], window_size: int | None) -> tuple[int, int] | None:
        """From where to where in the list ``found`` is, ids or pairs; None where that cannot be.

        All that is published is there, but for the oldest where these may have been removed: those
        that are older than a window of this size (None: none).
        """
        listed = self.ids if found and isinstance(found[0], int) else self.listed
        stop = len(listed)
        if found:
            stop = next((n for n, item in enumerate(listed) if item == found[-1]), -1) + 1
        elif not self.num_safe:
            stop = 0
        start = stop - len(found)
        if stop < self.num_safe or start < 0 or tuple(listed[start:stop]) != tuple(found):
            return None
        if start and (window_size is None or start > stop - window_size):
            return None
        return start, stop

    def adding(self, serials: Sequence[int]) -> list[Content]:
        """It, and what becomes of it when one after the other is added."""
        contents = [self]
        for serial in serials:
            last = contents[-1]
            contents.append(
                dataclasses.replace(
                    last,
                    listed=(*last.listed, (last.counter, serial)),
                    counter=last.counter + last.step,
                )
            )
        return contents

    def cleared(self) -> Content:
        return dataclasses.replace(self, listed=()).safe()

    def loading(self, saved: Content, rank: int = 0, world_size: int = 1) -> Content:
        """What becomes of it when a rank's part of a checkpoint is loaded."""
        share, rest = divmod(len(saved.listed), world_size)
        start = rank * share + min(rank, rest)
        step = saved.step * world_size
        least = saved.counter + rank * saved.step
        counter = least + -(-max(0, self.counter - least) // step) * step
        part = saved.listed[start : start + share + (rank < rest)]
        return Content(part, counter, step, len(part), max(counter, self.safe_counter))


@dataclasses.dataclass
class State:
    """What is on the board."""

    content: Content = Content()
    outcomes: tuple[Content, ...] = ()  # of the change that goes on; none where none does
    num_removals: int = 0  # begun and ended; odd while trajectories may leave the list
    next_serial: int = 0
    # What each checkpoint may hold (None: that it is not there); and those that threads are saving.
    saved: dict[str, tuple[Content | None, ...]] = dataclasses.field(default_factory=dict)
    being_saved: frozenset[str] = frozenset()
    num_saves: dict[str, int] = dataclasses.field(default_factory=dict)  # begun, of each

    @property
    def possible(self) -> tuple[Content, ...]:
        return self.outcomes or (self.content,)


class Moment(NamedTuple):
    """In the history that a `Model` has."""

    number: int
    num_removals: int


class Model:
    """The state, kept by the trainer, and what its window may have been at each moment.

    The main thread changes it, and whoever saves a checkpoint notes that. `lock` guards all.
    """

    def __init__(self, board: Slot, window_size: int, removable: int | None) -> None:
        self._board = board
        self._window_size = window_size
        self.removable = removable  # the window, where what is older is removed to save disk
        self.lock = threading.Lock()
        self.state: State = board.get()[1] or State()
        self._moments: deque[tuple[Content, ...]] = deque(maxlen=_MOST_REMEMBERED)  # windows
        self._num_moments = 0
        self._ids: dict[int, int] = {}  # by serial, of all that was ever in the list
        contents = [*self.state.possible, *(c for cs in self.state.saved.values() for c in cs if c)]
        for content in contents:
            self._learn(content)
        # A thread was saving when it was killed: nothing is known of what it saved.
        for name in self.state.being_saved:
            self.state.saved.pop(name, None)
        self.state.being_saved = frozenset()
        self._remember()

    def _learn(self, content: Content) -> None:
        self._ids.update((serial, i) for i, serial in content.listed)

    def id_of(self, serial: int) -> int | None:
        return self._ids.get(serial)

    @property
    def content(self) -> Content:
        return self.state.content

    # -- changes, by the main thread --

    def begin(self, outcomes: Iterable[Content], *, is_removal: bool) -> None:
        """A change begins, that makes one of these of the list."""
        with self.lock:
            self.state.outcomes = tuple(dict.fromkeys(outcomes))
            for content in self.state.outcomes:
                self._learn(content)
            self.state.num_removals += is_removal and not self.state.num_removals % 2
            self._put()

    def narrow(self, outcomes: Iterable[Content]) -> None:
        """The change has ended, or will have ended when the store is opened again, in one of these.

        It still counts as going on.
        """
        with self.lock:
            self.state.outcomes = tuple(dict.fromkeys(outcomes))
            self._put()

    def end(self, content: Content) -> None:
        """This is what the store holds now."""
        with self.lock:
            self.state.content = content
            self.state.outcomes = ()
            self.state.num_removals += self.state.num_removals % 2
            self._put()

    def match(self, ids: Sequence[int], counter: int, step: int) -> Content:
        """The outcome that an open buffer shows; AssertionError if it shows another."""
        for content in self.state.possible:
            part = content.part_shown(ids, self.removable)
            if part is None or part[1] != len(content.listed):
                continue
            if (counter, step) == (content.counter, content.step):
                return content.without_oldest(part[0])
        raise AssertionError(
            f"the list: expected one of {[_told(c) for c in self.state.possible]}, "
            f"got ids {ids}, the counter {counter} and the step {step}"
        )

    def match_reopened(self, found: Listing, counter: int) -> Content:
        """The outcome that a store shows when it is opened; AssertionError if it shows another."""
        for content in self.state.possible:
            is_there = content.part_shown(found, self.removable) is not None
            least = max(content.safe_counter, found[-1][0] + 1 if found else 0)
            if is_there and counter >= least and (counter - content.counter) % content.step == 0:
                return Content(found, counter, content.step).safe()
        raise AssertionError(
            f"the reopened store: expected one of {[_told(c) for c in self.state.possible]}, "
            f"got {found} and the counter {counter}"
        )

    def note_safe(self, num_trajectories: int, counter: int) -> None:
        """So many of the list are published, while no change goes on."""
        with self.lock:
            content = self.state.content
            if self.state.outcomes:
                return
            self.state.content = dataclasses.replace(
                content,
                num_safe=max(content.num_safe, min(num_trajectories, len(content.listed))),
                safe_counter=max(content.safe_counter, counter),
            )
            self._put()

    def new_serials(self, schema: int, num_schemas: int, count: int) -> list[int]:
        """Serials that were never used before."""
        with self.lock:
            first = -(-self.state.next_serial // num_schemas) * num_schemas + schema
            serials = list(range(first, first + count * num_schemas, num_schemas))
            self.state.next_serial = serials[-1] + 1
            self._put()
        return serials

    # -- checkpoints, by any thread --

    def begin_save(self, name: str, *, is_beside: bool = False) -> int:
        """A checkpoint is about to be saved there; what `end_save` wants to know.

        ``is_beside``: while the main thread makes changes, and not in the midst of one.
        """
        with self.lock:
            windows = self._windows()
            self.state.saved[name] = _joined(self.state.saved.get(name, (None,)), windows)
            self.state.num_saves[name] = self.state.num_saves.get(name, 0) + 1
            if is_beside:
                self.state.being_saved |= {name}
            self._put()
            return self._num_moments

    def end_save(self, name: str, begun: int, *, is_done: bool, is_beside: bool = False) -> None:
        """It was saved, or perhaps not."""
        with self.lock:
            old = () if is_done else self.state.saved[name]
            seen = self._since(begun)
            new = self._windows() if seen is None else [c for windows in seen for c in windows]
            if is_beside and seen is None:
                self.state.saved.pop(name)
            else:
                self.state.saved[name] = _joined(old, new)
            self.state.being_saved -= {name}
            self._put()

    def note_found(self, name: str, found: Listing | None) -> None:
        """This is what a checkpoint holds (None: it is not there); AssertionError if it may not."""
        with self.lock:
            known = self.state.saved.get(name)
            if known is None:  # of a thread that was killed
                matching = [None if found is None else Content(found)]
            else:
                matching = [c for c in known if (None if c is None else c.listed) == found]
            assert matching, (
                f"checkpoint {name!r}: expected one of {[c and _told(c) for c in known or ()]}, "
                f"got {found}"
            )
            self.state.saved[name] = tuple(matching)
            self._put()

    def note_leaving(self, name: str) -> None:
        """A checkpoint is about to be removed."""
        with self.lock:
            self.state.saved[name] = _joined(self.state.saved.get(name, ()), (None,))
            self._put()

    # -- moments --

    def now(self) -> Moment:
        return Moment(self._num_moments, self.state.num_removals)

    def may_have_removed(self, since: Moment) -> bool:
        """Whether trajectories may have left the list since then, but to save disk."""
        now = self.state.num_removals
        return bool(since.num_removals % 2) or now != since.num_removals

    def windows_since(self, moment: Moment) -> list[Content] | None:
        """Each window that there may have been since; None where that is not known any more."""
        with self.lock:
            seen = self._since(moment.number)
        return None if seen is None else [content for windows in seen for content in windows]

    def _since(self, number: int) -> list[tuple[Content, ...]] | None:
        count = self._num_moments - number + 1
        if count > len(self._moments):
            return None
        return [self._moments[-n] for n in range(1, count + 1)]

    def _windows(self) -> tuple[Content, ...]:
        return tuple(content.newest(self._window_size) for content in self.state.possible)

    def _remember(self) -> None:
        self._moments.append(self._windows())
        self._num_moments += 1

    def _put(self) -> None:
        windows = self._windows()
        if windows != self._moments[-1]:
            self._moments.append(windows)
            self._num_moments += 1
        self._board.put(self.state)


def _joined(
    old: Iterable[Content | None], new: Iterable[Content | None]
) -> tuple[Content | None, ...]:
    return tuple(dict.fromkeys([*old, *new]))


def _told(content: Content) -> str:
    return (
        f"{content.listed} (the first {content.num_safe} safe), counter {content.counter}, "
        f"step {content.step}"
    )
