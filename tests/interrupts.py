"""Interrupts: calls that a signal handler meets at each of their steps in turn.

CPython runs signal handlers in the main thread between bytecodes. Here a trace function stands for
the handler, so that a test can put it at each step, once, and look at what is left::

    for interrupt in every_line():
        sampler = Sampler()
        if interrupt(sampler.draw):  # was it interrupted by a KeyboardInterrupt, by now raised?
            ...
        assert is_whole(sampler), interrupt.place

The loop ends with the first round in which the call came to its end before the step was reached.
Steps are those of the library's own code, and of the standard library's that it holds state with,
but for `mmbuf.shield`, whose own are for its tests to interrupt. Only what the calling thread does
is interrupted, which stands for the main thread.

`every_line` has a step at the begin of each line: quick, and enough where a line changes one thing.
It is not for a handler that calls the library itself, as it meets locks that are held for a few
lines without a call, where none can run.
`every_call` has one wherever CPython 3.11 or later does look for signals: after a call of C code,
when a function begins, when a loop goes back. After ``x = queue.get()`` has got something and
before ``x`` has it there is no line; and a function of Python code hands over what it returns
without a look.

Not steps: where a ``with`` block is left, as no handler runs between its last bytecode and the
``__exit__`` of a lock; nor where an ``except`` or ``finally`` takes over or is left.
"""

from __future__ import annotations

import _weakrefset
import contextlib
import dis
import gc
import inspect
import itertools
import os
import queue
import random
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import connection, synchronize
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mmbuf
from mmbuf import shield

_LIBRARY = str(Path(mmbuf.__file__).parent) + "/"
_OTHERS = {
    module.__file__
    for module in (
        *(_weakrefset, connection, contextlib, queue, socket, synchronize, threading, weakref),
    )
}
_MOST = 100_000  # steps; a call that has so many does not end


class Interrupt:
    """Runs a call and has a handler meet it at its step ``number``, counted from 0."""

    def __init__(self, number: int, *, is_fine: bool) -> None:
        self.place = "the end"  # where it came
        self.was_met = False
        self.result: Any = None  # of the call, if it returned
        self._left = number
        self._is_fine = is_fine
        self._handler: Callable[[], object] = _raise
        self._error: BaseException | None = None
        self._python_calls: set[FrameType] = set()  # whose last call was of a Python function

    def __call__(
        self, function: Callable[[], Any], handler: Callable[[], object] | None = None
    ) -> bool:
        """Call ``function``; whether the step was reached before it came to its end.

        ``handler()`` is called at the step, within the call; None: raises KeyboardInterrupt, which
        ends here. Any other error of the call is raised.
        """
        self._handler, self.result = handler or _raise, None
        tracer, profiler, hook = sys.gettrace(), sys.getprofile(), sys.unraisablehook
        sys.unraisablehook = lambda error: None if error.exc_value is self._error else hook(error)
        is_collecting = gc.isenabled()
        gc.disable()  # what others have left behind is not part of the call
        try:
            if self._is_fine:
                sys.setprofile(self._profile)
            sys.settrace(self._trace)
            self.result = function()
        except KeyboardInterrupt as error:
            if error is not self._error:
                raise
        finally:
            sys.settrace(tracer)
            sys.setprofile(profiler)
            self._python_calls.clear()
            self._error = None  # its traceback holds what the call had
            sys.unraisablehook = hook
            if is_collecting:
                gc.enable()
        return self.was_met

    def _step(self, frame: FrameType) -> None:
        if self.was_met:
            return
        if self._left:
            self._left -= 1
            return
        self.was_met = True
        code = frame.f_code
        self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        try:
            self._handler()
        except BaseException as error:
            self._error = error
            raise

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        """For a frame that begins: what traces it."""
        if self.was_met:
            return None
        if self._is_fine and frame.f_back is not None and _is_called_directly(frame.f_code):
            self._python_calls.add(frame.f_back)
        if not _is_of_library(frame.f_code):
            return None
        if self._is_fine:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return _Opcodes(self._step, self._python_calls)
        return self._by_line

    def _by_line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            self._step(frame)
        return self._by_line

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        # A call at the end of a block, whose error the block's own handlers get: after it there may
        # be no other bytecode of the block.
        code = frame.f_code
        if event.startswith("c_"):
            self._python_calls.discard(frame)  # what C code called
        if event == "c_return" and _is_of_library(code) and frame.f_lasti not in _steps(code):
            self._step(frame)


class _Opcodes:
    """Traces one frame, for the steps of `every_call`."""

    def __init__(self, step: Callable[[FrameType], None], python_calls: set[FrameType]) -> None:
        self._step = step
        self._python_calls = python_calls
        self._at = -1

    def __call__(self, frame: FrameType, event: str, _: object) -> _Opcodes:
        if event == "opcode":
            last, self._at = self._at, frame.f_lasti
            code = frame.f_code
            is_looked = frame not in self._python_calls or last in _star_calls(code)
            self._python_calls.discard(frame)
            if is_looked and self._at in _steps(code).get(last, ()):
                self._step(frame)
        return self


def every_line() -> Iterator[Interrupt]:
    """An `Interrupt` for each line that the call in the loop's body begins, and a last one."""
    return _every(is_fine=False)


def every_call() -> Iterator[Interrupt]:
    """An `Interrupt` for each moment at which CPython runs handlers in the call, and a last one."""
    return _every(is_fine=True)


def _every(*, is_fine: bool) -> Iterator[Interrupt]:
    for number in itertools.count():
        assert number < _MOST, "the call does not end"
        interrupt = Interrupt(number, is_fine=is_fine)
        yield interrupt
        if not interrupt.was_met:
            assert number, "nothing of the library was called"
            return


def _raise() -> None:
    raise KeyboardInterrupt


@cache
def _is_of_library(code: CodeType) -> bool:
    name = code.co_filename
    return name in _OTHERS or (name.startswith(_LIBRARY) and name != shield.__file__)


@cache
def _is_called_directly(code: CodeType) -> bool:
    """Not by C code that makes an object, or has a generator go on."""
    return code.co_name != "__init__" and not code.co_flags & inspect.CO_GENERATOR


@cache
def _star_calls(code: CodeType) -> frozenset[int]:
    """Calls like ``function(*arguments)``, which CPython 3.11 makes by C code."""
    instructions = dis.get_instructions(code)
    return frozenset(i.offset for i in instructions if i.opname == "CALL_FUNCTION_EX")


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Where ``with`` statements are left: their lines, but where they are entered.

    And where an error is caught or has been dealt with: it would be noted in vain, or for ever.
    """
    instructions = list(dis.get_instructions(code))
    lines = dict(dis.findlinestarts(code))
    line, line_of = 0, {}
    for instruction in instructions:
        line = lines.get(instruction.offset) or line
        line_of[instruction.offset] = line
    entries = {"BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"}
    with_lines = {line_of[i.offset] for i in instructions if i.opname in entries}
    return frozenset(
        i.offset
        for i in instructions
        if i.opname in ("PUSH_EXC_INFO", "POP_EXCEPT")
        or (
            line_of[i.offset] in with_lines
            and (i.opname == "LOAD_CONST" or not i.opname.startswith(("LOAD_", "PUSH_NULL")))
        )
    )


@cache
def _steps(code: CodeType) -> dict[int, frozenset[int]]:
    """After which bytecodes signals are looked for, and which ones follow them.

    -1 stands for the begin, and for where a generator goes on. An error gets to the handler of the
    former, so those are left out where that of the latter is another one.
    """
    handler = _handlers(code)
    steps: dict[int, frozenset[int]] = {-1: frozenset()}
    for instruction, following in itertools.pairwise(dis.get_instructions(code)):
        name, offset, then = instruction.opname, instruction.offset, following.offset
        if name == "RESUME":
            steps[-1] |= {offset, then}
        elif "JUMP_BACKWARD" in name:
            steps[offset] = frozenset([instruction.argval])
        elif name.startswith("CALL") and handler(offset) == handler(then):
            steps[offset] = frozenset([then])
    return steps


def _handlers(code: CodeType) -> Callable[[int], int]:
    """A function that gives the place of the handler of an error at this offset; -1 for none."""
    entries = dis._parse_exception_table(code) if hasattr(dis, "_parse_exception_table") else []

    def handler(offset: int) -> int:
        # The innermost comes last.
        found = [entry.target for entry in entries if entry.start <= offset < entry.end]
        return found[-1] if found else -1

    return handler


@contextlib.contextmanager
def storm(seed: int, longest_s: float) -> Iterator[list[bool]]:
    """SIGALRM at random moments, in the main thread; it raises while the list that comes is true.

    What a call returns is the test's, and the list is set, with nothing called in between::

        try:
            is_open[0] = True
            found = channel.get()
            is_open[0] = False
        except KeyboardInterrupt:
            is_open[0] = False
    """
    is_open = [False]

    def handle(*_: object) -> None:
        if is_open[0]:
            raise KeyboardInterrupt

    is_over = threading.Event()

    def send() -> None:
        rng = random.Random(seed)
        while not is_over.wait(rng.uniform(0, longest_s)):
            os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield is_open
    finally:
        is_open[0] = False
        is_over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)
