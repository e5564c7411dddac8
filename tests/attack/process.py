"""What all attacked processes have: signals, a crew of threads, a watchdog, figures."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Protocol

from children import Parent

import mmbuf
from attack.board import Ring, Slot
from mmbuf import vm

PATIENCE_S = 30.0  # for one call
_SETTLING_S = 20.0  # of threads that write what is left and end, on a slow machine
_RECORD_S = 0.5
_EXPOSED = 0.5  # of the main thread's calls are open to signals
_SOURCE = str(Path(mmbuf.__file__).parent)


@dataclass
class Papers:
    """What a process is given when it begins, and what is left of it when it is dead."""

    directory: Path  # of the attack
    role: str
    seed: str
    config: Any
    board: Slot  # the trainer's `State`
    orders: Slot  # `Orders` of the machine
    tally: Slot = field(default_factory=lambda: Slot(1 << 16))
    ring: Ring = field(default_factory=Ring)

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def stacks(self) -> Path:
        """Where stacks are written when it hangs or dies."""
        return self.directory / f"stacks of {self.role}"


@dataclass
class Orders:
    """What the machine tells all."""

    is_over: bool = False


@dataclass
class Account:
    """What a process did, each how often; and medians of its figures, early and late."""

    tally: Counter[str]
    figures: dict[str, tuple[float, float]]


class Member(Protocol):
    """Of a crew: `step` is called again and again; after `let_go` it holds nothing."""

    def step(self) -> None: ...

    def let_go(self) -> None: ...


class Ended:
    """How a call of the main thread ended: ``done``, ``interrupted`` or the name of an error."""

    def __init__(self, how: str, result: Any = None) -> None:
        self.how = how
        self.result = result

    @property
    def is_done(self) -> bool:
        return self.how == "done"


class Signals:
    """Signals act only within a call of the library's that was opened to them.

    SIGINT raises KeyboardInterrupt there; the others call ``on_call``, which may be interrupted.
    """

    def __init__(
        self, on_call: Callable[[int], None], note: Callable[[str], None], *, is_patient: bool
    ) -> None:
        self.is_open = False
        self._is_patient = is_patient  # no more signals in a call that was interrupted
        self.num_interrupts = self.num_calls = 0
        self._on_call = on_call
        self._note = note
        self._is_in_call = False
        signal.signal(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._call)

    @contextlib.contextmanager
    def opened(self, is_open: bool) -> Iterator[None]:
        self._is_in_call = False
        self.is_open = is_open
        try:
            yield
        finally:
            self.is_open = False

    def shut(self) -> _Shut:
        """A block in which no signal acts, within one in which they do."""
        return _Shut(self)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self.is_open and (place := _place_in_mmbuf(frame)):
            self.num_interrupts += 1
            self._note(f"interrupt at {place}")
            self.is_open = not self._is_patient
            raise KeyboardInterrupt

    def _call(self, number: int, frame: FrameType | None) -> None:
        if self.is_open and not self._is_in_call and (place := _place_in_mmbuf(frame)):
            self._is_in_call = True
            self.num_calls += 1
            self._note(f"signal handler at {place}")
            try:
                self._on_call(number)
            finally:
                self._is_in_call = False


class _Shut:
    """Not a generator, which would have to run to its end in the midst of an interrupt."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._was_open = False

    def __enter__(self) -> None:
        self._was_open = self._signals.is_open
        self._signals.is_open = False

    def __exit__(self, *_: object) -> None:
        self._signals.is_open = self._was_open


def _place_in_mmbuf(frame: FrameType | None) -> str:
    """The innermost line of the library that a frame is at or below; empty if there is none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_SOURCE):
            return f"{path[len(_SOURCE) + 1 :]}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class _Noted(logging.Handler):
    """What the library logs, among what was done."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        self._ring.note(f"log: {record.getMessage()}")


class Process:
    """A process under attack: its main thread makes calls, beside a crew of threads.

    Whatever fails in any thread ends it by `Failure`, raised in the main thread. Should a call last
    too long, the stacks of all threads are written and the process ends at once.
    """

    def __init__(self, parent: Parent, papers: Papers) -> None:
        self.papers = papers
        self.directory = papers.directory
        self.config = papers.config
        self.rng = Random(papers.seed)
        self.note = papers.ring.note
        self.series: dict[str, list[dict[str, float]]] = {"living": [], "quiet": []}
        self._looking = threading.Lock()  # one look has a file open that another one would count
        self._parent = parent
        self._counts: list[Counter[str]] = []  # of each thread its own
        self._own = threading.local()
        self._failure: str | None = None
        self._begun: dict[str, tuple[float, str]] = {}  # what each thread is at, and since when
        self._crew: dict[str, threading.Thread] = {}
        self._idle: set[str] = set()
        self._is_paused = self._is_ended = False
        self._stacks = papers.stacks.open("w")
        self.signals = Signals(self._on_signal, self.note, is_patient=not self.has("again"))
        self._set_up()

    def _set_up(self) -> None:
        faulthandler.enable(self._stacks)
        sys.unraisablehook = self._note_unraisable
        threading.excepthook = self._note_uncaught
        warnings.simplefilter("ignore", ResourceWarning)  # what is dropped unclosed says so
        log = logging.getLogger("mmbuf")
        log.propagate = False
        log.addHandler(_Noted(self.papers.ring))
        sys.setswitchinterval(self.rng.choice((0.005, 0.0005, 0.00005)))
        vm.MAP_THRESHOLD = 16 << 10  # so that small trajectories are mapped as large ones are
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watchdog.start()

    def has(self, ingredient: str) -> bool:
        """Whether the attack has this."""
        return ingredient not in self.config.without

    def say_ready(self) -> None:
        """From now on the machine sends signals."""
        self._parent.send("ready")

    # -- failures --

    def fail(self, where: str, error: BaseException) -> None:
        """The first failure is kept, and the main thread ends by it."""
        told = "".join(traceback.format_exception(error))
        if self._failure is None:
            self._failure = f"{where}:\n{told}"
            self._stacks.write(f"{where}:\n{told}\n")
            self._stacks.flush()

    def _note_unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:  # raised in a finalizer; Python drops it
            self.count("interrupts of finalizers")
            return
        told = f"{unraisable.err_msg}: {unraisable.object!r}"
        self.fail(told, unraisable.exc_value or unraisable.exc_type())

    def _note_uncaught(self, uncaught: Any) -> None:
        name = uncaught.thread.name if uncaught.thread else "a thread"
        self.fail(name, uncaught.exc_value or uncaught.exc_type())

    @property
    def is_over(self) -> bool:
        """Whether the machine wants it to end; AssertionError where something has failed."""
        if self._failure is not None:
            raise AssertionError(self._failure)
        orders: Orders = self.papers.orders.get()[1]
        return orders.is_over

    # -- the main thread --

    def do(
        self,
        what: str,
        call: Callable[[], Any],
        is_deserved: Callable[[Exception], bool] = lambda _: False,
        *,
        is_exposed: bool | None = None,
    ) -> Ended:
        """Make a call of the library's, open to signals or not; an error that is not deserved is
        raised.
        """
        if self._failure is not None:
            raise AssertionError(self._failure)
        if is_exposed is None:
            is_exposed = self.rng.random() < _EXPOSED
        self.note(f"{what}{' (open)' if is_exposed else ''}")
        self._begun["main"] = time.monotonic(), what
        try:
            with self.signals.opened(is_exposed):
                result = call()
            ended = Ended("done", result)
        except KeyboardInterrupt:
            ended = Ended("interrupted")
        except Exception as error:
            if not is_deserved(error):
                raise
            ended = Ended(type(error).__name__)
        del self._begun["main"]
        if ended.how != "done":
            self.note(f"{what}: {ended.how}")
        self.count(f"{what.split(':')[0]}: {ended.how}")
        return ended

    @contextlib.contextmanager
    def quietly(self, what: str) -> Iterator[None]:
        """A block of the main thread's that no signal reaches, watched as a call is."""
        self.note(what)
        self._begun["main"] = time.monotonic(), what
        yield
        del self._begun["main"]

    def _on_signal(self, number: int) -> None:
        """What a handler does; interruptible where `Signals` are open."""

    # -- the crew --

    def hire(self, name: str, member: Member) -> None:
        thread = threading.Thread(target=self._run, args=(name, member), name=name, daemon=True)
        self._crew[name] = thread

    def start_crew(self) -> None:
        for thread in self._crew.values():
            thread.start()

    def _run(self, name: str, member: Member) -> None:
        try:
            while not self._is_ended:
                if self._is_paused:
                    member.let_go()
                    self._idle.add(name)
                    while self._is_paused and not self._is_ended:
                        time.sleep(0.001)
                    self._idle.discard(name)
                    continue
                self._begun[name] = time.monotonic(), name
                member.step()
                self._begun.pop(name)
        except BaseException as error:
            self._begun.pop(name, None)
            self.fail(name, error)
        finally:
            member.let_go()
            self._idle.add(name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which the crew does and holds nothing."""
        self._is_paused = True
        deadline = time.monotonic() + PATIENCE_S
        while self._failure is None and not self._idle >= set(self._crew):
            assert time.monotonic() < deadline, f"{set(self._crew) - self._idle} do not come"
            time.sleep(0.001)
        yield
        self._is_paused = False

    def end(self) -> Account:
        """End the crew and the watchdog."""
        self._is_ended = True
        for thread in self._crew.values():
            thread.join(PATIENCE_S)
        self._watchdog.join(PATIENCE_S)
        faulthandler.cancel_dump_traceback_later()
        if self._failure is not None:
            raise AssertionError(self._failure)
        return Account(self._tally(), self._check_flat())

    # -- the watchdog --

    def _watch(self) -> None:
        recorded = 0.0
        while not self._is_ended:
            # Should it be kept from running: of this, another thread is the system's own.
            faulthandler.dump_traceback_later(PATIENCE_S + 15, exit=True, file=self._stacks)
            now = time.monotonic()
            for name, (since, what) in list(self._begun.items()):
                if now - since > PATIENCE_S:
                    self._stacks.write(f"{name}: {what} has lasted for {now - since:.0f} s\n")
                    self._stacks.flush()
                    faulthandler.dump_traceback(self._stacks)
                    os._exit(70)
            if now - recorded > _RECORD_S:
                recorded = now
                self.series["living"].append(self._figures())
                self.papers.tally.put(dict(self._tally()))
            time.sleep(0.1)
        self.papers.tally.put(dict(self._tally()))

    # -- counts and figures --

    def count(self, what: str, number: int = 1) -> None:
        counts: Counter[str] | None = getattr(self._own, "counts", None)
        if counts is None:
            counts = self._own.counts = Counter()
            self._counts.append(counts)
        counts[what] += number

    def _tally(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for counts in list(self._counts):
            for what, number in list(counts.items()):
                total[what] += number
        total["interrupts"] = self.signals.num_interrupts
        total["calls of signal handlers"] = self.signals.num_calls
        return total

    def _figures(self) -> dict[str, float]:
        with self._looking:
            status = Path("/proc/self/status").read_text()
            maps = Path("/proc/self/maps").read_text().splitlines()
            num_descriptors = len(os.listdir("/proc/self/fd"))
        values = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "descriptors": num_descriptors,
            "threads": int(values["Threads"]),
            "mappings": len(maps),
            "mappings of removed files": sum(line.endswith("(deleted)") for line in maps),
            "mappings counted": vm.MAPS.used,
            "anonymous MiB": int(values["RssAnon"].split()[0]) / 1024,
        }

    def check_nothing_left(self, when: str) -> None:
        """Nothing of the attack's directory is open, mapped or counted. No buffer may be open."""
        deadline = time.monotonic() + _SETTLING_S
        while left := self._left():
            if time.monotonic() > deadline:
                faulthandler.dump_traceback(self._stacks)
                raise AssertionError(f"{when}, these are left: {left}")
            gc.collect()
            time.sleep(0.01)
        gc.collect()
        self.series["quiet"].append(self._figures())
        self.count("moments at which nothing was left")

    def _left(self) -> list[str]:
        left = [] if vm.MAPS.used == 0 else [f"{vm.MAPS.used} mappings counted"]
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists the directory
                name = os.readlink(f"/proc/self/fd/{fd}")
                if name.startswith(f"{self.directory}/") and name != str(self.papers.stacks):
                    left.append(f"descriptor {fd} of {name}")
        with open("/proc/self/maps") as maps:
            left += [line.strip() for line in maps if f"{self.directory}/" in line]
        threads = [thread.name for thread in threading.enumerate()]
        return left + [f"thread {name}" for name in threads if name.startswith("mmbuf-writer")]

    # How much the last third of a series may be above the first, as a share and beside it.
    _BOUNDS = {  # noqa: RUF012
        "living": {
            "descriptors": (0.0, 8),
            "threads": (0.0, 4),
            "mappings": (0.5, 200),
            "mappings of removed files": (0.5, 50),
            "mappings counted": (0.5, 100),
            "anonymous MiB": (0.25, 48),
        },
        "quiet": {
            "descriptors": (0.0, 0),
            "threads": (0.0, 3),
            "mappings": (0.0, 64),
            "mappings of removed files": (0.0, 0),
            "anonymous MiB": (0.1, 24),
        },
    }

    def _check_flat(self) -> dict[str, tuple[float, float]]:
        """Each figure's median in the first third and in the last; AssertionError if it rose.

        The first quarter of a series does not count, and short ones say nothing.
        """
        told: dict[str, tuple[float, float]] = {}
        for kind, bounds in self._BOUNDS.items():
            series = self.series[kind][len(self.series[kind]) // 4 :]
            third = len(series) // 3
            if third < 4:
                continue
            for name, (share, slack) in bounds.items():
                first, last = (
                    statistics.median(figures[name] for figures in part)
                    for part in (series[:third], series[-third:])
                )
                told[f"{kind}: {name}"] = first, last
                assert last <= first * (1 + share) + slack, (
                    f"{kind}: {name} rose from {first:g} to {last:g}: "
                    f"{[round(figures[name]) for figures in series]}"
                )
        return told
