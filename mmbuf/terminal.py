"""Terminal: text that comes from outside, as it may be shown.

Names of columns, ids of weights, text and names of files are whatever somebody put into a store. A
terminal obeys some of their characters: escape sequences, carriage returns, C1 controls, marks that
turn the direction of text; and what UTF-8 cannot hold ends a command that prints it. So whatever
shows text that was not written in this library sends it through `printable` first: `errors` their
messages, `notebook` what objects show of themselves, the command line all that it prints. What is
logged is seen to here.
"""

from __future__ import annotations

import logging
from typing import Any


def printable(text: str) -> str:
    """``text`` on one line: what would move a cursor, or what UTF-8 cannot hold, as its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _PrintableArguments(logging.Filter):
    """Makes the arguments of remarks printable; their own text is ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_shown, record.args))
        return True


def _shown(argument: Any) -> Any:
    return argument if isinstance(argument, (int, float)) else printable(str(argument))


logging.getLogger("mmbuf").addFilter(_PrintableArguments())
