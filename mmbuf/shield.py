"""Shield: code that no signal interrupts, and waits that end when their caller is interrupted.

Python runs signal handlers in the main thread, between any two of its bytecodes. So in the main
thread an exception (``KeyboardInterrupt``, or whatever a handler raises) may come anywhere, in a
``finally`` block and in ``Condition.__enter__`` as well; and a handler may call this library again
while a call below it is half done and holds a lock, which no wait of the handler's can end.

No other thread is interrupted. So whatever changes state, or holds a lock for longer than one
call of C code, is handed by the main thread to a *worker* thread (`run`), and the main thread holds
nothing while it waits for it: a handler's own calls go to another worker, and get their turn when
the first call is done. An exception that comes while the main thread waits is raised when the
worker has ended: what the worker did happened as a whole, or not at all. Long waits inside of it
(for a disk, for a lock) end then, by `check`. Handing over costs about 50 µs.

In other threads `run` is a plain call. Where no thread is to be had (a limit of processes, the
interpreter's exit) it is one as well, and then an interrupt may tear what it meets.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

# Now, and not when NumPy first needs them: an interrupt within an import may leave its lock held.
import numpy.ma
import numpy.random  # noqa: F401

from mmbuf.errors import MmbufError

_T = TypeVar("_T")

LOOK_S = 0.05  # how often a wait looks whether there is still something to wait for
_IDLE_S = 10.0  # a worker without work ends
_PATIENCE_S = 5.0  # how long an interrupted caller waits for what it cannot undo
_BEGIN_S = 0.5  # how long a worker takes at most from having its turn to its first step


class CancelledError(BaseException):
    """The caller of what this worker runs was interrupted. Never reaches a caller."""


class _Job:
    """One call that a worker makes for the main thread."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.generation = _pool.generation
        self.is_cancelled = False
        self.has_begun = False
        self.is_done = False
        self.is_left = False  # by a caller that was interrupted
        self.left_at: float | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.turn = allocate_lock()  # whoever gets it may begin, or see to it that nobody does
        self.end = allocate_lock()  # released at the end
        self.end.acquire()

    def work(self) -> None:
        if self.turn.acquire(False):
            self.has_begun = True
            _current.job = self
            try:
                self.result = self.function(*self.arguments)
            except BaseException as error:
                self.error = error
            finally:
                _current.job = None
                # A worker that waits for its next job must not keep what this one was about.
                del self.function, self.arguments
                self.is_done = True
                self.end.release()

    def wait(self) -> None:
        while not self.is_done:
            self.end.acquire(timeout=1.0)
            if self.is_done:
                return
            if self.generation != _pool.generation:
                raise MmbufError("forked by a signal handler within a call: it cannot be finished.")
            if not self.turn.locked():  # the worker that it was meant for may have ended
                _pool.start()

    def leave(self) -> None:
        """Wait for the end after an interrupt, or see to it that the job never begins."""
        while not self.is_left:
            try:
                self._leave()
            except BaseException:  # another interrupt: the first is on its way already
                continue

    def _leave(self) -> None:
        if self.turn.acquire(False):
            self.is_left = True
            return
        if self.left_at is None:
            self.left_at = time.monotonic()
        # The turn is taken by a worker, which then begins, or by an earlier call of this.
        while not self.is_done:
            waited_s = time.monotonic() - self.left_at
            if waited_s > (_PATIENCE_S if self.has_begun else _BEGIN_S):
                break
            self.end.acquire(timeout=LOOK_S)
        self.is_left = True


class _Pool:
    """The workers. Each step of a caller's is one call of C code: it may be interrupted anywhere.

    ``free`` has a token for each worker that waits for a job. A token that is lost to an interrupt
    costs one more worker, that ends when it has waited for long.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation  # of forks
        self.main_thread = threading.main_thread().ident
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.free: list[None] = []

    def give(self, job: _Job) -> bool:
        """Have a worker do it; False where no thread is to be had."""
        try:
            self.free.pop()
        except IndexError:
            if not self.start():
                return False
        self.jobs.put(job)
        return True

    def start(self) -> bool:
        try:
            # Not a `threading.Thread`: its start waits in Python code, that can be interrupted.
            start_new_thread(self._work, ())
        except RuntimeError:
            return False
        return True

    def _work(self) -> None:
        while self._work_once():
            self.free.append(None)

    def _work_once(self) -> bool:
        """Do the next job; False if none came for long."""
        try:
            job = self.jobs.get(timeout=_IDLE_S)
        except Empty:
            try:
                self.free.pop()
            except IndexError:  # the token was taken: a job is on its way, unless it was lost
                try:
                    job = self.jobs.get(timeout=_IDLE_S)
                except Empty:
                    return False
            else:
                return False
        job.work()
        return True


_current = threading.local()
_pool = _Pool()


def run(function: Callable[..., _T], *arguments: Any) -> _T:
    """What ``function(*arguments)`` gives, run where no signal handler interrupts it.

    An exception that a handler raises meanwhile is raised when the function has ended, cut short
    by its next `check` if there is one. The function must not wait for the main thread.
    """
    # In the very last finalizers no other thread runs any more.
    if get_ident() != _pool.main_thread or sys.is_finalizing():
        return function(*arguments)
    job = _Job(function, arguments)
    try:
        is_given = _pool.give(job)
        if is_given:
            job.wait()
    except BaseException:
        job.is_cancelled = True
        # More interrupts may come; `leave` takes them but where it begins and where its loop goes
        # back. So that each of these is waited out by the next.
        try:
            job.leave()
        finally:
            try:
                job.leave()
            finally:
                job.leave()
        raise
    if not is_given:
        return function(*arguments)
    error, job.error = job.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # or it would be part of a cycle, by its traceback
    result: _T = job.result
    return result


def caller() -> int | None:
    """The thread that this one works for: of a worker the main thread, else itself."""
    return get_ident() if getattr(_current, "job", None) is None else _pool.main_thread


def check() -> None:
    """End what this worker runs if its caller was interrupted; not where it cannot be undone."""
    job: _Job | None = getattr(_current, "job", None)
    if job is not None and job.is_cancelled:
        raise CancelledError


def acquire(lock: Any) -> None:
    """Acquire one of `threading`'s, as long as the caller is not interrupted."""
    while not lock.acquire(timeout=LOOK_S):
        check()


class Lock:
    """A lock that is waited for only as long as the caller is not interrupted.

    For the workers of `run` and for threads that no signal reaches. MmbufError for a thread that
    has it already, instead of waiting for itself.
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._owner = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            if self._owner == get_ident():
                raise MmbufError("expected no call within another one of the same thread, got one.")
            acquire(self._lock)
        self._owner = get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()


def is_exiting() -> bool:
    """Whether the interpreter is on its way out: a thread that is started now may never run."""
    return not threading.main_thread().is_alive()


def _renew_after_fork() -> None:
    global _pool
    _pool = _Pool(_pool.generation + 1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
