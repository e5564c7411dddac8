"""Shield: what runs in it is never interrupted, what waits in it ends, nothing waits for itself."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mmbuf import MmbufError, shield


@pytest.fixture(autouse=True)
def _in_the_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")


@contextmanager
def interrupted_after(delay_s: float, handler: Callable[..., Any] | None = None) -> Iterator[None]:
    """A real signal comes in the block, whose handler raises KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler or interrupt)
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGALRM))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGALRM, before)


def test_the_main_thread_hands_over_and_others_call() -> None:
    assert shield.run(_thread.get_ident) != _thread.get_ident()
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(shield.run(_thread.get_ident) == _thread.get_ident())
    )
    thread.start()
    thread.join()
    assert found == [True]


def test_results_and_errors_come_back() -> None:
    def fail() -> None:
        raise ValueError("what it says")

    assert shield.run(divmod, 7, 3) == (2, 1)
    with pytest.raises(ValueError, match="what it says"):
        shield.run(fail)


def test_an_error_is_part_of_no_cycle() -> None:
    """Or what its traceback knows would live until the garbage is collected."""

    class Known:
        pass

    def fail(known: Known) -> None:
        raise ValueError

    import gc
    import weakref

    gc.disable()
    try:
        known = Known()
        weak = weakref.ref(known)
        with pytest.raises(ValueError):  # noqa: PT011
            shield.run(fail, known)
        del known
        assert weak() is None
    finally:
        gc.enable()


def test_what_is_interrupted_is_done_as_a_whole_before_the_interrupt_is_raised() -> None:
    steps: list[int] = []

    def work() -> None:
        for step in range(5):
            time.sleep(0.05)
            steps.append(step)

    with interrupted_after(0.08), pytest.raises(KeyboardInterrupt):
        shield.run(work)
    assert steps == [0, 1, 2, 3, 4]


def test_a_wait_ends_when_its_caller_is_interrupted() -> None:
    ended: list[str] = []

    def wait() -> None:
        try:
            while True:
                time.sleep(0.01)
                shield.check()
        except shield.CancelledError:
            ended.append("cancelled")
            raise

    with interrupted_after(0.05), pytest.raises(KeyboardInterrupt):
        shield.run(wait)
    assert ended == ["cancelled"]
    shield.check()  # of nobody else


def test_a_wait_for_a_lock_ends_when_its_caller_is_interrupted() -> None:
    lock = shield.Lock()
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(20)

    def take() -> None:
        with lock:
            raise AssertionError

    with interrupted_after(0.05), pytest.raises(KeyboardInterrupt):
        shield.run(take)
    may_end.set()
    thread.join()
    with lock:
        pass


def test_a_thread_does_not_wait_for_a_lock_that_it_has() -> None:
    lock = shield.Lock()

    def take_twice() -> None:
        with lock, lock:
            raise AssertionError

    with pytest.raises(MmbufError, match="of the same thread"):
        shield.run(take_twice)
    with lock:
        pass


def test_a_handler_may_call_while_a_call_below_it_goes_on() -> None:
    lock = shield.Lock()
    order: list[str] = []

    def work(name: str) -> None:
        with lock:
            time.sleep(0.1)
            order.append(name)

    with interrupted_after(0.03, lambda *_: shield.run(work, "of the handler")):
        shield.run(work, "below it")
    assert order == ["below it", "of the handler"]


def test_without_a_thread_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(shield, "_pool", shield._Pool())
    monkeypatch.setattr(shield, "start_new_thread", refuse)
    assert shield.run(_thread.get_ident) == _thread.get_ident()
    with pytest.raises(ZeroDivisionError):
        shield.run(divmod, 1, 0)


def test_a_job_that_no_worker_took_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may end while its token is taken by a caller that is interrupted."""
    pool = shield._Pool()
    pool.free.append(None)  # of a worker that has ended
    monkeypatch.setattr(shield, "_pool", pool)
    assert shield.run(divmod, 7, 3) == (2, 1)


def test_workers_end_when_they_have_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shield, "_IDLE_S", 0.02)
    pool = shield._Pool()
    monkeypatch.setattr(shield, "_pool", pool)
    worker = shield.run(_thread.get_ident)
    deadline = time.monotonic() + 20
    while worker in sys._current_frames() or pool.free:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert shield.run(divmod, 7, 3) == (2, 1)


def test_a_forked_child_has_workers_of_its_own() -> None:
    assert shield.run(divmod, 7, 3) == (2, 1)
    script = (
        "import os; from mmbuf import shield; import _thread\n"
        "shield.run(int)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    other = shield.run(_thread.get_ident) != _thread.get_ident()\n"
        "    os._exit(0 if other else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


def test_a_storm_of_interrupts_tears_nothing() -> None:
    """Two counts that are changed together agree, whenever the interrupt comes."""
    begun, ended, raised = [0], [0], [0]

    def work() -> None:
        begun[0] += 1
        time.sleep(0.0002)
        ended[0] += 1

    is_over = threading.Event()

    def bomb() -> None:
        while not is_over.wait(0.0007):
            os.kill(os.getpid(), signal.SIGALRM)

    def interrupt(*_: object) -> None:
        if is_open[0]:
            raise KeyboardInterrupt

    is_open = [False]
    before = signal.signal(signal.SIGALRM, interrupt)
    thread = threading.Thread(target=bomb)
    thread.start()
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            try:
                is_open[0] = True
                shield.run(work)
                is_open[0] = False
            except KeyboardInterrupt:
                is_open[0] = False
                raised[0] += 1
            assert begun == ended
    finally:
        is_open[0] = False
        is_over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)
    assert raised[0] > 50
    assert ended[0] > 50


def test_an_interrupt_within_a_handler_within_an_interrupt_is_waited_for_as_well() -> None:
    """The handler of a second signal comes while the first is on its way, and fails itself."""
    steps: list[str] = []
    is_open = [False]  # set with nothing called in between: outside it none may come

    def work() -> None:
        steps.append("begun")
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.3)
        steps.append("ended")

    def interrupt(*_: object) -> None:
        if is_open[0]:
            signal.setitimer(signal.ITIMER_REAL, 0.001)  # the next one
            raise KeyboardInterrupt

    raised = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(5):
            steps.clear()
            try:
                is_open[0] = True
                shield.run(work)
                is_open[0] = False
            except KeyboardInterrupt:
                is_open[0] = False
                raised += 1
            signal.setitimer(signal.ITIMER_REAL, 0)  # one left over would end the next round early
            assert steps == ["begun", "ended"]
    finally:
        is_open[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised == 5
