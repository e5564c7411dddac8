"""HDF5 files of robomimic and of D4RL as stores.

=========  ======================================  ================================================
layout     file                                    store
=========  ======================================  ================================================
robomimic  ``data/demo_0`` and so on: ``obs``,     ``curr_obs``, ``next_obs``; the rest as named
           ``next_obs``, ``actions``, ...          there
D4RL       all episodes in a row:                  ``curr_obs``, ``next_obs``, ``terminations``,
           ``observations``, ``terminals``,        ``truncations``, ``dones``; the rest as named
           ``timeouts``, ``actions``, ...          there, but for ``metadata``
=========  ======================================  ================================================

``next_obs`` is there where the file has it: what the last step of an episode led to is in no other
place. An observation that is no group is ``curr_obs.states``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from mmbuf import files
from mmbuf.errors import SchemaError
from mmbuf.exchange.episodes import Episode, Imported, observation, write_store
from mmbuf.packages import optional_package
from mmbuf.transfer import Directory, OnProgress

_OBSERVATIONS = {
    "obs": "curr_obs",
    "observations": "curr_obs",
    "next_obs": "next_obs",
    "next_observations": "next_obs",
}
_FLAGS = {"terminals": "terminations", "timeouts": "truncations"}
_NO_COLUMNS = {"metadata"}


def from_hdf5(
    source: Directory, target: Directory, *, on_progress: OnProgress | None = None
) -> Imported:
    """Make the new store ``target`` of a file; see `episodes.write_store`.

    One episode at a time is in memory. SchemaError for a file of another layout, OSError for none
    of HDF5's, CorruptError for no file but a pipe, MmbufError where h5py is not installed.
    """
    h5py = optional_package("h5py", "exchange")
    path = files.absolute(source)
    files.check_can_be_read(path)
    with h5py.File(path, "r") as file:
        if "data" in file:
            demos = sorted(file["data"], key=_number_of)
            episodes = (_demo(file["data"][name]) for name in demos)
            return write_store(episodes, len(demos), target, on_progress)
        if {"observations", "actions", "rewards", "terminals"} <= set(file):
            ends = _ends_of(file)
            return write_store(_cut(file, ends), len(ends), target, on_progress)
    raise SchemaError(
        f"{path}: expected data/demo_0 and so on (robomimic), or observations, actions, rewards "
        f"and terminals (D4RL), got neither."
    )


def _number_of(name: str) -> tuple[int, str]:
    """``demo_10`` comes after ``demo_9``."""
    number = re.search(r"[0-9]+$", name)
    return (int(number[0]) if number else -1, name)


def _demo(group: Any) -> Episode:
    episode = {_OBSERVATIONS.get(name, name): _read(group[name], slice(None)) for name in group}
    for name in ("curr_obs", "next_obs"):
        if name in episode:
            episode[name] = observation(episode[name])
    return episode


def _ends_of(file: Any) -> list[int]:
    """Of each episode the row behind its last one."""
    is_end = file["terminals"][()].astype(bool).reshape(-1)
    if "timeouts" in file:
        is_end |= file["timeouts"][()].astype(bool).reshape(-1)
    ends: list[int] = (is_end.nonzero()[0] + 1).tolist()
    if not ends or ends[-1] < len(is_end):
        ends.append(len(is_end))
    return ends


def _cut(file: Any, ends: list[int]) -> Iterator[Episode]:
    for start, stop in zip([0, *ends], ends, strict=False):
        rows = slice(start, stop)
        episode = {}
        for name in file:
            if name in _OBSERVATIONS:
                episode[_OBSERVATIONS[name]] = observation(_read(file[name], rows))
            elif name in _FLAGS:
                episode[_FLAGS[name]] = _read(file[name], rows).astype(bool)
            elif name not in _NO_COLUMNS:
                episode[name] = _read(file[name], rows)
        flags = [episode[name] for name in _FLAGS.values() if name in episode]
        yield episode | {"dones": np.logical_or.reduce(flags)}


def _read(item: Any, rows: slice) -> Any:
    """Rows of a data set, or of all in a group; text as a list."""
    if hasattr(item, "keys"):
        return {name: _read(item[name], rows) for name in item}
    if item.dtype.kind in "OS":
        strings: list[str] = item.asstr()[rows].tolist()
        return strings
    return item[rows]
