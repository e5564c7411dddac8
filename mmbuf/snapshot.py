"""Snapshots that are replaced: a checkpoint that is saved over while others are on it.

A save puts its index in the place of the old one, then takes away the files that it does not list.
So whoever misses a file finds the index that says what has become of it. A reader that follows goes
on with what the new index says (`SnapshotReader`); a memory-only buffer, or a reader that does not
follow, without what is gone (`whereabouts`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mmbuf import files, index
from mmbuf.entry import Entry
from mmbuf.errors import MmbufError
from mmbuf.index import Changes, Contents

_log = logging.getLogger("mmbuf")


class SnapshotReader:
    """Reads the index of a checkpoint, and again when another has taken its place.

    As `JournalReader`, which see. For one thread at a time.
    """

    unread_bytes = 0

    def __init__(self, directory: str, *, is_held: bool = False) -> None:
        self.contents = Contents()
        self._path = files.join(directory, index.INDEX)
        self._signature: files.Signature | None = None
        self._is_held = is_held
        self._watch: files.Watch | None = None
        self._known: dict[int, tuple[Entry, int]] = {}

    def has_changed(self) -> bool:
        """Whether there is another index than when it was read last."""
        signature = self._signature
        return signature is None or files.has_changed(self._path, signature)

    def looks_changed(self) -> bool:
        """As `has_changed`, cheaper; but blind for one that went away with its directory."""
        return index.looks_changed(self._watch, self._signature) and self.has_changed()

    def let_go(self) -> None:
        """Hold the file open no longer."""
        self._is_held = False
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def refresh(self) -> Changes:
        """What is in it that was not, and the other way round.

        FileNotFoundError where there is none, CorruptError for a damaged one; what was known stays.
        """
        with files.opened(self._path) as fd:
            signature = files.signature(fd)
            watch = index.watch(fd) if self._is_held else None
        contents = Contents()
        # If it is replaced just now, the signature is that of the former, and it is read again.
        index.read_snapshot(self._path, contents)
        known = self._known
        found = _numbered(contents)
        kept = [i for i, item in known.items() if found.get(i) == item]
        if kept == list(found)[: len(kept)]:
            gone = [i for i in known if found.get(i) != known[i]]
            come = {i: found[i] for i in list(found)[len(kept) :]}
            changes = Changes(dropped=gone, added=come)
        else:  # their order is another
            changes = Changes(is_reset=True, added=found)
        self.contents, self._known = contents, found
        self._signature, self._watch = signature, watch
        return changes


def _numbered(contents: Contents) -> dict[int, tuple[Entry, int]]:
    """Each entry with its number among all that were ever added, as far as a snapshot tells.

    So numbers stay what they were while a window moves on, and are the same for all readers.
    """
    first = contents.trajectory_counter // contents.id_step - len(contents.entries)
    return {i: (entry, first + n) for n, (i, entry) in enumerate(contents.entries.items())}


def whereabouts(directory: str, missing: Sequence[Entry]) -> dict[str, Entry | None]:
    """What has become of trajectories of ``directory`` whose files are missing, by uuid.

    The entry that the index has of it now, under another name; None where it has none any more, of
    which a warning tells. Left out are those whose file should be there.
    """
    try:
        contents, _ = index.read(directory)
    except (MmbufError, OSError):  # nothing is known of them
        return {}
    listed = {entry.uuid: entry for entry in contents.entries.values()}
    found: dict[str, Entry | None] = {}
    gone = []
    for entry in missing:
        now = listed.get(entry.uuid)
        if now is None or _rows_of(now) != _rows_of(entry):
            found[entry.uuid] = None
            gone.append(entry.trajectory_id)
        elif now.file != entry.file:
            found[entry.uuid] = now
    if gone:
        _log.warning(
            "%s: the files of trajectories %s were removed by who writes there: going on without.",
            directory,
            gone,
        )
    return found


def _rows_of(entry: Entry) -> list[int]:
    return [part.rows for part in entry.parts]
