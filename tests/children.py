"""Forked children of a test: they run a function, may be killed, and end in any case."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_LIFE_S = 110  # less than a test may take


class Child:
    """``function(pipe, *arguments)`` in a forked process; the pipe's other end is `pipe`.

    As a context manager it is killed at the end of the block, unless it has ended. It ends by
    itself after ``life_s`` at the latest.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, life_s: int = _LIFE_S
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(function, theirs, self.pipe, arguments, life_s), daemon=True
        )
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; that is what is tested.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def receive(self, timeout_s: float = 60.0) -> Any:
        """The next that the function has sent, or what it returned; its failure is raised."""
        assert self.pipe.poll(timeout_s), "the child said nothing"
        kind, item = self.pipe.recv()
        if kind == "failed":
            raise AssertionError(f"in the child:\n{item}")
        return item

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the function returned; it must have sent nothing that was not received."""
        item = self.receive(timeout_s)
        self._process.join(timeout_s)
        assert self._process.exitcode == 0
        return item

    def send_signal(self, number: int) -> None:
        """A signal; none to a child that has ended."""
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it lives."""
        return self._process.exitcode

    def kill(self) -> None:
        """By SIGKILL."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


class Parent:
    """The child's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, item: Any) -> None:
        self._pipe.send(("said", item))

    def has_spoken(self) -> bool:
        return self._pipe.poll()

    def receive(self) -> Any:
        return self._pipe.recv()


def _run(
    function: Callable[..., Any],
    pipe: Connection,
    theirs: Connection,
    arguments: tuple[Any, ...],
    life_s: int,
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own is the parent's
    signal.alarm(life_s)  # ends the child should it hang
    theirs.close()
    torch.set_num_threads(1)  # torch's own threads do not come through a fork
    try:
        pipe.send(("returned", function(Parent(pipe), *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)
    finally:
        pipe.close()
    os._exit(0)
