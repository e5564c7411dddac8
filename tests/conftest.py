"""What every test is held to: nothing that it opened is left open when it ends."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from mmbuf import files, index, vm

IS_LINUX = sys.platform.startswith("linux")


def _open_files() -> set[str]:
    if not IS_LINUX:
        return set()
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:  # the one that lists the directory
            continue
    return {name for name in names if "/" in name.split(": ", 1)[1][:1]}


def _mapped_files(prefix: str) -> list[str]:
    if not IS_LINUX:
        return []
    with open("/proc/self/maps") as maps:
        return [line.rstrip() for line in maps if prefix in line]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mmbuf")}


def _settles(is_settled: object) -> bool:
    """Whether ``is_settled()`` comes true soon: threads and finalizers may take a moment."""
    deadline = time.monotonic() + 5
    while not is_settled():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def _map_small_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small trajectories are mapped and rewired as large ones are."""
    monkeypatch.setattr(vm, "MAP_THRESHOLD", 16 << 10)


@pytest.fixture(autouse=True)
def _no_leaks(tmp_path: object) -> Iterator[None]:
    descriptors, threads, maps = _open_files(), _threads(), vm.MAPS.used
    yield
    gc.collect()
    _settles(
        lambda: _open_files() <= descriptors and _threads() <= threads and vm.MAPS.used <= maps
    )
    assert _open_files() - descriptors == set(), "file descriptors left open"
    assert _threads() - threads == set(), "threads left running"
    assert vm.MAPS.used == maps, "mappings left in the budget"
    assert _mapped_files(str(tmp_path)) == [], "files left mapped"
    temporaries = [
        os.path.join(directory, name)
        for directory, _, names in os.walk(str(tmp_path))
        for name in names
        if name.endswith(".tmp")
    ]
    assert temporaries == [], "temporary files left"


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nobody cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the data files that were opened for reading, in order."""
    names: list[str] = []
    really = files.opened

    def note(path: str) -> AbstractContextManager[int]:
        if not path.endswith(index.JOURNAL):
            names.append(os.path.basename(path))
        return really(path)

    monkeypatch.setattr(files, "opened", note)
    return names


def pytest_collection_finish() -> None:
    """What importing made is never garbage: not looked at again, each collection is quick."""
    gc.collect()
    gc.freeze()
