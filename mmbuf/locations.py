"""Locations: what a path that a user gives means, whoever asks for it.

A path that exists is itself, whatever it is called. Else ``~`` is the home directory, a relative
path begins at the working directory of this moment, and a URL is refused: no rows are read from
another machine's disk.

A path with wildcards (``*``, ``?``, ``[abc]``) is a *pattern*, for those who take several stores.
It means the directories that it names letter by letter as far as there are such, and only where
there are none what its wildcards match: ``sweep [lr=0.1]/rank_*`` are the ranks of the directory of
just this name, as soon as it is there.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Any

from mmbuf import arguments, files
from mmbuf.errors import MmbufError

# One slash is what pathlib leaves of two. A single letter is a drive of another system's.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_MAGIC = re.compile(r"[*?[]")


class LocationError(MmbufError, ValueError):
    """What was given is no path on this machine."""


def location(name: str, value: Any) -> str:
    """The absolute path that ``value`` means, the argument ``name``; TypeError, ValueError."""
    return _absolute(name, arguments.path(name, value))


def locations(name: str, value: Any) -> tuple[list[str], bool]:
    """A path or several as a list, and whether several were asked for."""
    found, is_list = arguments.paths(name, value)
    return [_absolute(name, path) for path in found], is_list


def _absolute(name: str, path: str) -> str:
    if _is_there(files.absolute(path)):
        return files.absolute(path)
    url = _URL.match(path)
    if url is not None:
        scheme = url[1].lower()
        rest = path[url.end() :].lstrip("/")
        remedy = f"Copy it here first, or mount it, and give the path that it has then: {rest}"
        if scheme == "file":
            remedy = f"Give the path itself: /{rest.removeprefix('localhost/')}"
        raise LocationError(
            f"{name}: expected a path on this machine, got a URL ({scheme}): {path}. {remedy}"
        )
    return files.absolute(files.expanded(path))


def is_pattern(path: str) -> bool:
    """Whether absolute ``path`` has wildcards behind the part of it that is there as it is."""
    _, rest = _split(path)
    return any(_MAGIC.search(part) for part in rest)


def matches(pattern: str) -> list[str]:
    """The directories that match, in the order of their names."""
    above, rest = _split(pattern)
    return sorted(path for path in _found(above, rest) if _is_directory(path))


def _split(path: str) -> tuple[str, list[str]]:
    """What of absolute ``path`` is there as it is, and the parts behind it."""
    above, parts = "/", [part for part in path.split("/") if part]
    for i, part in enumerate(parts):
        below = files.join(above, part)
        if not _is_there(below):
            return above, parts[i:]
        above = below
    return above, []


def _found(above: str, parts: list[str]) -> Iterator[str]:
    if not parts:
        yield above
        return
    part, *rest = parts
    literal = files.join(above, part)
    if _is_there(literal):
        found = list(_found(literal, rest))
        if found or not _MAGIC.search(part):
            yield from found
            return
    if _MAGIC.search(part):
        for name in _names_in(above):
            # As a shell has it, hidden ones are not meant by what begins with a wildcard.
            if (part[0] == "." or name[0] != ".") and fnmatch.fnmatchcase(name, part):
                yield from _found(files.join(above, name), rest)


def _is_there(path: str) -> bool:
    try:
        return files.exists(path)
    except (OSError, ValueError):  # too long for a name, no right to look, a NUL
        return False


def _is_directory(path: str) -> bool:
    try:
        return files.is_directory(path)
    except (OSError, ValueError):
        return False


def _names_in(directory: str) -> list[str]:
    try:
        return files.names_in(directory)
    except (OSError, ValueError):  # no directory, gone, no right to look
        return []
