"""Salvage: what the index of a store or checkpoint still says where some of it is damaged.

Every line of a journal has a checksum, so each that is whole still counts. A snapshot has none: of
a damaged one each entry that can be read is taken as a hint, to be held against its file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from mmbuf import files, index
from mmbuf.arguments import text, whole
from mmbuf.entry import Entry
from mmbuf.errors import BAD_JSON, CorruptError, VersionError
from mmbuf.index import Contents, Schemas
from mmbuf.schema import Schema

_ENTRY = re.compile(r'"([0-9]{1,18})": (?=\{"num_samples")')


@dataclass
class Salvage:
    """What is left. ``entries``: what is listed, oldest first; an id may be there twice.

    ``hints`` are entries that a snapshot has beside them, ``dead_files`` what the journal says is
    gone, ``damage`` all that is wrong, ``torn_at`` the byte where a torn tail begins.
    ``is_live`` tells a store, whose truth is its journal, from a checkpoint.
    """

    is_live: bool
    entries: list[Entry] = field(default_factory=list)
    hints: list[Entry] = field(default_factory=list)
    schemas: Schemas = field(default_factory=Schemas)
    metadata: dict[str, Any] = field(default_factory=dict)
    trajectory_counter: int = 0
    id_step: int = 1
    dead_files: set[str] = field(default_factory=set)
    damage: list[CorruptError] = field(default_factory=list)
    torn_at: int | None = None

    @property
    def schema(self) -> Schema | None:
        """The union of all columns."""
        return self.schemas.union

    @property
    def truth(self) -> str:
        """The file that holds: the other snapshots are only copies of what it says."""
        return index.JOURNAL if self.is_live else index.INDEX

    @property
    def damaged_names(self) -> set[str]:
        return {files.name_of(error.path) for error in self.damage}

    @property
    def is_truth_damaged(self) -> bool:
        return self.truth in self.damaged_names


def salvage(directory: str) -> Salvage:
    """Read the index of a store or checkpoint, but for what is damaged.

    VersionError for one that a newer mmbuf wrote.
    """
    journal = files.join(directory, index.JOURNAL)
    has_journal = files.exists(journal)
    is_live = has_journal or files.exists(files.join(directory, files.WRITER_LOCK))
    found = Salvage(is_live)
    snapshot = _read_snapshot(directory, found)
    found.metadata = snapshot.metadata
    if has_journal:
        _Lines(journal, found).read()
        names = {entry.file for entry in found.entries} | found.dead_files
        found.hints += [entry for entry in snapshot.entries.values() if entry.file not in names]
    else:
        found.entries = list(snapshot.entries.values())
        found.schemas = snapshot.schemas
    if not has_journal or found.is_truth_damaged:
        found.trajectory_counter = max(found.trajectory_counter, snapshot.trajectory_counter)
        if found.id_step == 1:
            found.id_step = snapshot.id_step
    return found


class _Lines:
    """The lines of a journal, taken in one after the other."""

    def __init__(self, path: str, found: Salvage) -> None:
        self._path = path
        self._found = found
        self._listed: dict[str, Entry] = {}  # by file, oldest first
        self._files: dict[int, list[str]] = {}  # by id

    def read(self) -> None:
        bad: list[int] = []
        try:
            journal = files.read(self._path)
        except CorruptError as error:  # no file at all
            self._found.damage.append(error)
            return
        for offset, line in index.lines_of(journal):
            if line is None:
                bad.append(offset)
                continue
            for at in bad:
                self._damaged("a damaged line before a valid one.", at)
            bad.clear()
            try:
                self._apply(json.loads(line))
            except VersionError as error:
                raise VersionError(f"{self._path}: {error}") from None
            except BAD_JSON as error:
                self._damaged(f"not an event: {error!r}.", offset)
        self._found.torn_at = bad[0] if bad else None
        self._found.entries = list(self._listed.values())

    def _damaged(self, what: str, offset: int) -> None:
        self._found.damage.append(CorruptError(self._path, what, offset=offset))

    def _apply(self, event: dict[str, Any]) -> None:
        found, kind = self._found, text("event", event["event"])
        if kind == "add":
            self._add(Entry.from_json(event["entry"], schema=found.schemas.of(event["entry"])))
        elif kind == "schema":
            if index.check_version(event["version"]) < index.VERSION_OF_SEVERAL:
                found.schemas = Schemas()
            found.schemas.announce(Schema.from_json(event["columns"]))
        elif kind == "drop":
            for trajectory_id in index.ids_of(event):
                for name in self._files.pop(trajectory_id):
                    del self._listed[name]
                    found.dead_files.add(name)
        elif kind == "clear":
            self._clear()
            found.schemas = Schemas()
            found.trajectory_counter = max(
                found.trajectory_counter, index.checked_counter(event["trajectory_counter"])
            )
        elif kind == "load":
            loaded = index.read_load(event)
            counter = index.next_id(
                found.trajectory_counter, loaded.trajectory_counter, loaded.id_step
            )
            self._clear()
            found.schemas = loaded.schemas
            for entry in loaded.entries.values():
                self._add(entry)
            found.trajectory_counter, found.id_step = counter, loaded.id_step

    def _add(self, entry: Entry) -> None:
        found, name, trajectory_id = self._found, entry.file, entry.trajectory_id
        before = self._listed.pop(name, None)
        if before is not None:
            self._files[before.trajectory_id].remove(name)
        self._listed[name] = entry
        found.dead_files.discard(name)
        found.trajectory_counter = max(found.trajectory_counter, trajectory_id + found.id_step)
        others = self._files.setdefault(trajectory_id, [])
        others.append(name)
        if len(others) > 1:
            raise ValueError(f"trajectory_id {trajectory_id} twice")
        if found.schema is None and not found.is_truth_damaged:
            raise ValueError(f"trajectory_id {trajectory_id} without a schema")

    def _clear(self) -> None:
        self._found.dead_files |= self._listed.keys()
        self._listed.clear()
        self._files.clear()


def _read_snapshot(directory: str, found: Salvage) -> Contents:
    """What the snapshots say; hints and damage go to ``found``."""
    contents = Contents()
    metadata_path = files.join(directory, index.METADATA)
    metadata: dict[str, Any] = {}
    if files.exists(metadata_path):
        try:
            read = json.loads(files.read(metadata_path))
            if not isinstance(read, dict):
                raise ValueError(f"got {type(read).__name__}")
            metadata = read
        except CorruptError as error:
            found.damage.append(error)
        except (ValueError, RecursionError) as error:
            found.damage.append(CorruptError(metadata_path, f"expected a JSON object: {error}."))
    path = files.join(directory, index.INDEX)
    if files.exists(path):
        try:
            index.read_snapshot(path, contents)
        except CorruptError as error:
            found.damage.append(error)
            found.hints = _entries_in(path)
            contents = Contents()
            contents.metadata = metadata
            try:
                counter = index.checked_counter(metadata["trajectory_counter"])
                contents.count_from(counter, whole("id_step", metadata["id_step"], 1))
            except BAD_JSON:
                contents.count_from(0, 1)
    else:
        contents.metadata = metadata
    return contents


def _entries_in(path: str) -> list[Entry]:
    """Each entry of a damaged snapshot that can be read."""
    try:
        text = files.read(path).decode("utf-8", "replace")
    except CorruptError:  # no file at all
        return []
    decoder = json.JSONDecoder()
    entries = []
    for match in _ENTRY.finditer(text):
        try:
            entry = Entry.from_json(decoder.raw_decode(text, match.end())[0])
        except BAD_JSON:
            continue
        if entry.trajectory_id == int(match[1]):
            entries.append(entry)
    return entries
