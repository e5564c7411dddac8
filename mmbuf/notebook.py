"""Notebook: how buffers, readers and trajectories show themselves, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from mmbuf.terminal import printable

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


class Shown(NamedTuple):
    """What there is to say of an object: a sentence, and a line for each column."""

    title: str
    sentence: str
    headers: Sequence[str] = ()
    columns: Sequence[Sequence[str]] = ()

    def as_text(self) -> str:
        """For ``__repr__``: a line, and one more for each column."""
        cells = [[printable(cell) for cell in column] for column in self.columns]
        widths = [max(map(len, position)) for position in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, column, widths)).rstrip() for column in cells]
        return "<" + "\n  ".join([printable(f"{self.title}: {self.sentence}"), *lines]) + ">"

    def as_html(self) -> str:
        """For ``_repr_html_``: the same. All text is escaped, and colours are left to the theme."""
        head = f"<b>{_html(self.title)}</b><br>{_html(self.sentence)}"
        if not self.columns:
            return f"<div>{head}</div>"
        lines = [_line("th", self.headers), *(_line("td", column) for column in self.columns)]
        return f"<div>{head}<table>{''.join(lines)}</table></div>"


def told_bytes(size_bytes: int) -> str:
    """A size in few characters, as the command line has it: ``631.8 kB``."""
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    size = float(size_bytes)
    for unit in _UNITS:
        size /= 1000
        if size < 1000 or unit == _UNITS[-1]:
            break
    return f"{size:,.1f} {unit}"


def _line(tag: str, cells: Iterable[str]) -> str:
    inside = (f'<{tag} style="text-align: left">{_html(cell)}</{tag}>' for cell in cells)
    return f"<tr>{''.join(inside)}</tr>"


def _html(text: str) -> str:
    return escape(printable(text))
