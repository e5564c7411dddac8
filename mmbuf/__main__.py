"""`mmbuf`, also as ``python -m mmbuf``: the command, and how it ends when it is interrupted.

Ctrl-C ends it with exit code 130 and without a traceback at any time, also while the command line
is imported, which takes a second. It needs no standard streams, and no encoding of all names.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line with the arguments of the process."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # else it is ignored, as for what runs in the background
        signal.signal(signal.SIGINT, _leave)
    _mend_streams()
    try:
        command = importlib.import_module("mmbuf.cli").main
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if is_default:  # what is left to do needs nobody who waits for it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        _flush()


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing was begun yet that would have to be ended."""
    os._exit(INTERRUPTED)


def _mend_streams() -> None:
    """What the process was started without is a null device; what cannot be encoded is escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # as they are numbered
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Write out what was printed, and say here if that fails: later nobody could."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter would flush once more, and complain in its own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"mmbuf: stdout: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
