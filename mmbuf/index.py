"""TrajectoryIndex: what is in a store; the journal and its two snapshots.

``journal.jsonl`` is the truth of a live store: one JSON object a line, each with the CRC-32 of the
rest of its line::

    {"event": "schema", "version": 1, "columns": [...]}      before an add where there is none, and
                                                             again where it needs a newer version;
                                                             with version 3 among others: those
                                                             added later with "schema": 1 (2, ...)
                                                             in their entry have these columns
    {"event": "add", "entry": {...}}                         a file was published
    {"event": "drop", "trajectory_ids": [...]}               these are gone
    {"event": "clear", "trajectory_counter": 7}              all are gone; ids go on
    {"event": "load", "columns": [...], "entries": [...],    others have taken the place of all:
     "more_schemas": [[...]], "trajectory_counter": 7,       one line, so that it holds or not.
     "id_step": 1}                                           More schemas only where there are any.
                                                             Ids go on from there, but never below
                                                             those that the store gave before
    {"event": "sync"}                                        all before this is on the disk itself
    {"event": "boot", "id": "..."}                           the machine was started anew; before
                                                             the first line that it wrote since

Bytes behind the last valid line are a torn tail: the writer died in the middle of a line. Readers
ignore it, a writer cuts it off before it appends. A bad line *before* a valid one is damage.

A journal is appended to in place. One that has another name as well, in a copy of the store by hard
links, is first made the writer's own: a copy takes its place, and the other name keeps what it had.

Each ``version`` is the oldest that can say what follows, so that an older mmbuf that cannot read it
refuses it by that: 3 where there are several schemas, else that of `Schema.version_of`.

``.loading.json`` lists the files that a load is about to bring; of one that did not come to its
line of the journal the next writer removes them.

``trajectory_index.json`` and ``metadata.json`` are snapshots for people and for RLinf's tools,
which read the same keys. A checkpoint has no journal: there ``trajectory_index.json`` is the truth,
and ends as a line of the journal does, in the CRC-32 of the rest. Without its last key ``"crc"`` it
is taken as it is: so it can be edited by hand.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mmbuf import files
from mmbuf.arguments import text, whole
from mmbuf.columns import union
from mmbuf.entry import MAX_NUMBER, Entry, Part, parts_from_json
from mmbuf.errors import (
    BAD_JSON,
    CorruptError,
    LockedError,
    MmbufError,
    NoLocksError,
    VersionError,
)
from mmbuf.schema import Schema

JOURNAL = "journal.jsonl"
INDEX = "trajectory_index.json"
METADATA = "metadata.json"
LOADING = ".loading.json"
VERSION = 3
VERSION_OF_SEVERAL = 3  # of a store whose trajectories have several schemas

_SHORT_LIST = 1000  # up to here snapshots are always current
_BLOCK = 256  # entries encoded at once, since json.dumps stops all other threads
_CRC = ', "crc": "'
_ADD = b'{"event": "add", "entry": {'
_PARTS = b', "parts": '
_CRC_BYTES = len(_CRC) + 8 + len('"}')

_MAX_LAYOUTS = 1024  # that are known at once
_TAIL_BYTES = 4096

_log = logging.getLogger("mmbuf")


class Schemas:
    """The schemas of a store's trajectories, numbered from 0 as they were announced.

    ``union`` are the columns of all, None where none was announced; ``version`` is the newest that
    the journal has said before entries that need it.
    """

    def __init__(self, *schemas: Schema, version: int = 1) -> None:
        self._schemas: list[Schema] = []
        self.union: Schema | None = None
        self.version = version
        for schema in schemas:
            self.announce(schema, version)

    def __len__(self) -> int:
        return len(self._schemas)

    def __getitem__(self, number: int) -> Schema:
        return self._schemas[number]

    def number(self, schema: Schema) -> int:
        """The number that it has, or will have."""
        for number, known in enumerate(self._schemas):
            if known is schema or known == schema:
                return number
        return len(self._schemas)

    def announce(self, schema: Schema, version: int = 1) -> int:
        """Its number; SchemaError where it does not fit to the others."""
        number = self.number(schema)
        if number == len(self._schemas):
            self.union = union(self.union, schema)
            self._schemas.append(schema)
        self.version = max(self.version, version)
        return number

    def of(self, entry: dict[str, Any]) -> Schema | None:
        """The schema of an entry in JSON; None where none was announced."""
        if "schema" not in entry:  # as in most
            return self._schemas[0] if self._schemas else None
        return self._schemas[whole("schema", entry["schema"])]

    def event(self, schema: Schema, version: int) -> dict[str, Any] | None:
        """What announces it in the journal; None where both are known."""
        number = self.number(schema)
        if number < len(self._schemas) and version <= self.version:
            return None
        union(self.union, schema)
        version = VERSION_OF_SEVERAL if max(number, len(self._schemas) - 1) else version
        return {"event": "schema", "version": version, "columns": schema.to_json()}


class Contents:
    """What a journal or snapshot says: schema, entries by id (oldest first), the next id.

    ``schema`` is the union of all columns of its trajectories, of which each entry has its own.

    Ids rise by ``id_step``, which is more than 1 where several ranks count side by side.
    ``metadata`` is what a snapshot says beside the index.
    """

    def __init__(self) -> None:
        self.schemas = Schemas()
        self.entries: dict[int, Entry] = {}
        self.trajectory_counter = 0
        self.id_step = 1
        self.num_added = 0  # ever, so that each has a number that no other gets
        self.total_samples = 0
        self.metadata: dict[str, Any] = {}
        self.unsynced: list[int] = []  # ids added after the last sync mark
        self.boot_id = ""  # of the machine when the last line was written
        self.dead_files: list[str] = []  # of trajectories that are gone
        self.has_synced_dead = False  # of some that were on the disk itself

    @property
    def schema(self) -> Schema | None:
        return self.schemas.union

    @schema.setter
    def schema(self, schema: Schema | None) -> None:
        self.schemas = Schemas() if schema is None else Schemas(schema)

    @property
    def own_schemas(self) -> list[Schema]:
        """The schemas of the trajectories, each once, in the order of the first that has it."""
        own = {id(entry.schema): entry.schema or self.schema for entry in self.entries.values()}
        return list(dict.fromkeys(schema for schema in own.values() if schema is not None))

    def schemas_of_files(self, directory: str) -> Iterator[tuple[str, Schema]]:
        """The file of each trajectory and its schema."""
        for entry in self.entries.values():
            schema = entry.schema or self.schema
            if schema is not None:
                yield files.join(directory, entry.file), schema

    def apply(self, event: dict[str, Any]) -> None:
        """Take in one event of the journal; KeyError, TypeError or ValueError if it is none."""
        kind = text("event", event["event"])
        if kind == "add":
            self.add(Entry.from_json(event["entry"], schema=self.schemas.of(event["entry"])))
        elif kind == "schema":
            version = check_version(event["version"])
            schema = Schema.from_json(event["columns"])
            if not self.entries:  # what was said of others before does not bind this one
                self.schema = None
            elif version < VERSION_OF_SEVERAL and schema != self.schema:
                raise ValueError("another schema after trajectories")
            self.schemas.announce(schema, version)
        elif kind == "drop":
            for trajectory_id in ids_of(event):
                self.drop(trajectory_id)
        elif kind == "clear":
            self._bury_all()
            self.entries.clear()
            self.unsynced.clear()
            self.total_samples = 0
            self.schema = None
            counter = checked_counter(event["trajectory_counter"])
            self.trajectory_counter = max(self.trajectory_counter, counter)
        elif kind == "load":
            self.load(read_load(event))
        elif kind == "sync":
            self.synced()
        elif kind == "boot":
            self.boot_id = text("id", event["id"])
        # An event of a kind that is not known yet says nothing about the trajectories.

    def add(self, entry: Entry) -> None:
        if entry.trajectory_id in self.entries:
            raise ValueError(f"trajectory_id {entry.trajectory_id} twice")
        if self.schema is None:
            raise ValueError(f"trajectory_id {entry.trajectory_id} without a schema")
        self.entries[entry.trajectory_id] = entry
        next_id = entry.trajectory_id + self.id_step
        self.trajectory_counter = max(self.trajectory_counter, next_id)
        self.total_samples += entry.num_samples
        self.num_added += 1
        self.unsynced.append(entry.trajectory_id)

    def load(self, other: Contents) -> None:
        """Take another's place: its trajectories and schema instead of these; ids go on rising."""
        self._bury_all()
        self.schemas = Schemas(*_schemas_of(other), version=other.schemas.version)
        self.num_added += other.num_added
        self.entries = dict(other.entries)
        self.total_samples = other.total_samples
        self.unsynced = list(other.entries)
        self.trajectory_counter = next_id(
            self.trajectory_counter, other.trajectory_counter, other.id_step
        )
        self.id_step = other.id_step

    def count_from(self, trajectory_counter: int, id_step: int) -> None:
        """Go on with this id, or the one after the last; ValueError for a step below 1."""
        if not 1 <= id_step < MAX_NUMBER:
            raise ValueError(f"id_step {id_step}")
        self.id_step = id_step
        self.trajectory_counter = max([trajectory_counter, *(i + 1 for i in self.entries)])

    def count_above(self, trajectory_counter: int) -> None:
        """Go on with no id below this one; MmbufError where there is none that can be read."""
        counter = next_id(trajectory_counter, self.trajectory_counter, self.id_step)
        check_can_count(counter)
        self.trajectory_counter = counter

    def drop(self, trajectory_id: int) -> None:
        entry = self.entries.pop(trajectory_id)
        self.total_samples -= entry.num_samples
        self.dead_files.append(entry.file)
        if trajectory_id in self.unsynced:
            self.unsynced.remove(trajectory_id)
        else:
            self.has_synced_dead = True

    def synced(self) -> None:
        """All is on the disk itself."""
        self.unsynced.clear()
        self.has_synced_dead = False

    def _bury_all(self) -> None:
        self.dead_files.extend(entry.file for entry in self.entries.values())
        if len(self.unsynced) < len(self.entries):
            self.has_synced_dead = True


def next_id(lowest: int, counter: int, step: int) -> int:
    """The smallest id of those from ``counter`` on in steps of ``step`` that is not below another.

    ``lowest`` is the smallest that was never given in a store, ``counter`` the one that a rank of
    several is to go on with: since it stays among those of its steps, no other rank gives it.
    """
    return counter + max(0, -(-(lowest - counter) // step)) * step


def check_can_count(trajectory_counter: int) -> None:
    """MmbufError for a next id that no index would be read with."""
    if trajectory_counter >= MAX_NUMBER:
        raise MmbufError(
            f"trajectory_counter: expected ids below {MAX_NUMBER}, got {trajectory_counter}. "
            f"Load it with a smaller world_size, or begin a new store."
        )


@dataclass
class Changes:
    """What happened to a store: ``dropped`` ids are gone, then ``added`` ones came, in order.

    ``is_reset``: all that was there before is gone, and ``added`` is all that there is. With each
    entry comes its number among all that were ever added to the store.
    """

    is_reset: bool = False
    dropped: list[int] = field(default_factory=list)
    added: dict[int, tuple[Entry, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.is_reset or bool(self.dropped) or bool(self.added)


class JournalReader:
    """Reads a journal, and later what was appended to it. For one thread at a time.

    ``is_held``: the file is held open, so that `looks_changed` is cheap, until `let_go`.
    """

    def __init__(self, directory: str, *, is_held: bool = False) -> None:
        self.directory = directory
        self.contents = Contents()
        self.valid_bytes = 0
        self._tail = b""  # the last bytes of these
        self._journal = files.join(directory, JOURNAL)
        self._signature: files.Signature | None = None
        self._is_held = is_held
        self._watch: files.Watch | None = None
        self._untold = Changes()
        self._layouts: dict[bytes, tuple[Part, ...]] = {}

    @property
    def unread_bytes(self) -> int:
        """Bytes of the journal behind the last valid line that was read."""
        size_bytes = files.size_of(self._journal)
        # A shorter one is another: nothing of it was read.
        return size_bytes - (self.valid_bytes if size_bytes >= self.valid_bytes else 0)

    def has_changed(self) -> bool:
        """Whether the file is another one, or of another length, than when it was read last."""
        signature = self._signature
        return signature is None or files.has_changed(self._journal, signature)

    def let_go(self) -> None:
        """Hold the file open no longer."""
        self._is_held = False
        if self._watch is not None:
            self._watch.close()  # the traceback of an error may still have it
        self._watch = None

    def looks_changed(self) -> bool:
        """As `has_changed`, cheaper; but blind for a file that went away with its directory."""
        return looks_changed(self._watch, self._signature) and self.has_changed()

    def refresh(self) -> Changes:
        """Read what is new; all of it when another file has taken the journal's place.

        FileNotFoundError where there is none, CorruptError for damage; what comes before it is
        told with the next success.
        """
        changes = self._untold
        with files.opened(self._journal) as fd:
            signature = files.signature(fd)
            before = self._signature
            is_same = before is not None and signature.inode == before.inode
            if not is_same and self._is_held:
                self._watch = watch(fd)
            # A new file may have got the inode of the old one, or begin as that did: a copy.
            if before is None or not self._is_read_before(fd):
                if before is not None:
                    changes = self._untold = Changes(is_reset=True)
                self.contents, self.valid_bytes, self._signature = Contents(), 0, None
                self._tail = b""
            data = files.read_at(fd, signature.size - self.valid_bytes, self.valid_bytes)
        base = self.valid_bytes
        try:
            self._take_in(data, changes)
        finally:
            stop = self.valid_bytes - base
            self._tail = (self._tail + data[max(0, stop - _TAIL_BYTES) : stop])[-_TAIL_BYTES:]
        self._signature = signature
        self._untold = Changes()
        return changes

    def _is_read_before(self, fd: int) -> bool:
        """Whether the file begins with what was read, as far as its last bytes tell."""
        start = self.valid_bytes - len(self._tail)
        return files.read_at(fd, len(self._tail), start) == self._tail

    def _take_in(self, data: bytes, changes: Changes) -> None:
        base, offset = self.valid_bytes, 0
        bad: int | None = None
        while offset < len(data):
            end = data.find(b"\n", offset)
            event = _whole(data[offset:end]) if end >= 0 else None
            stop = end + 1 if end >= 0 else len(data)
            if event is None:
                bad = offset if bad is None else bad
            elif bad is not None:
                what = "a damaged line before a valid one."
                raise CorruptError(self._journal, what, offset=base + bad)
            else:
                try:
                    self._apply(event, changes)
                except VersionError as error:
                    raise VersionError(f"{self._journal}: {error}") from None
                except BAD_JSON as error:
                    what = f"not an event: {error!r}."
                    raise CorruptError(self._journal, what, offset=base + offset) from error
                self.valid_bytes = base + stop
            offset = stop

    def _apply(self, line: bytes, changes: Changes) -> None:
        contents = self.contents
        if line.startswith(_ADD):
            entry = _read_add(line, self._layouts, contents.schemas)
            contents.add(entry)
            changes.added[entry.trajectory_id] = (entry, contents.num_added - 1)
            return
        event = json.loads(line)
        contents.apply(event)
        if event["event"] == "drop":
            for trajectory_id in ids_of(event):
                if changes.added.pop(trajectory_id, None) is None:
                    changes.dropped.append(trajectory_id)
        elif event["event"] in ("clear", "load"):
            changes.is_reset = True
            changes.dropped.clear()
            first = contents.num_added - len(contents.entries)
            changes.added = {
                trajectory_id: (entry, first + i)
                for i, (trajectory_id, entry) in enumerate(contents.entries.items())
            }


def watch(fd: int) -> files.Watch | None:
    """Of an open file; None where no descriptor is left."""
    try:
        return files.Watch(fd)
    except OSError:  # asking costs more, and is as right
        return None


def looks_changed(watch: files.Watch | None, signature: files.Signature | None) -> bool:
    """Whether its name is to be asked whether the file of a watch has changed."""
    if watch is not None and signature is not None:
        with suppress(OSError):  # of a descriptor; the file's name may tell more
            return watch.has_changed(signature)
    return True


def read(directory: str) -> tuple[Contents, int]:
    """The contents of a store or checkpoint, and the length of its journal's valid part.

    Reads the journal where there is one, else ``trajectory_index.json``; no data file.
    FileNotFoundError where there is neither.
    """
    if files.exists(files.join(directory, JOURNAL)):
        reader = JournalReader(directory)
        reader.refresh()
        return reader.contents, reader.valid_bytes
    contents = Contents()
    read_snapshot(files.join(directory, INDEX), contents)
    return contents, 0


def is_store(directory: str) -> bool:
    """Whether there is a store or a checkpoint. OSError where the disk does not say."""
    return any(files.exists(files.join(directory, name)) for name in (JOURNAL, INDEX))


def names_listed_in(path: str) -> set[str]:
    """The trajectories' files in a list of what somebody was at; none where it cannot be read."""
    try:
        listed = set(map(str, json.loads(files.read(path)))) if files.exists(path) else set()
    except (CorruptError, *BAD_JSON):
        return set()
    # Whatever the list says: these are going to be removed.
    return {name for name in listed if name.startswith("trajectory_") and name != INDEX}


def check_is_no_checkpoint(directory: str) -> None:
    """FileExistsError for a checkpoint, which is no store to be written.

    To be asked before a writer leaves anything there, its lock's file too: by that a store is told
    whose journal is missing.
    """
    if files.exists(files.join(directory, INDEX)) and not files.exists(
        files.join(directory, JOURNAL)
    ):
        raise FileExistsError(
            f"{directory}: expected a live store or an empty directory, got a checkpoint. "
            f"Use load_checkpoint, or another auto_save_path."
        )


class TrajectoryIndex:
    """The index of a store that this process writes. For one thread at a time.

    It writes only while the directory still is the store that was opened: what was renamed, removed
    or made again meanwhile, or is written by another, is an OSError, and nothing has happened.
    """

    def __init__(
        self,
        directory: str,
        verify: Callable[[str, Entry, Schema], None] | None = None,
        size_of: Callable[[str, Entry], int] = lambda path, entry: files.size_of(path),
        lock: files.WriterLock | None = None,
    ) -> None:
        """Open the store in ``directory`` (which exists), or begin one there.

        What a writer that died left behind is put right: temporaries, a torn tail, files that are
        no longer listed or never were, files that did not survive a power loss. Those have the
        right size but not their bytes, as often as not: ``verify(path, entry, schema)`` raises
        CorruptError then. It is asked once, about what was not synced when the machine was started
        anew. ``size_of(path, entry)`` measures a trajectory's file. ``lock`` is what keeps others
        out.
        """
        self.directory = directory
        self._size_of = size_of
        self._lock = lock
        self._boot_id = files.boot_id()
        check_is_no_checkpoint(directory)
        files.remove_temporaries(directory)
        journal = self._journal = files.join(directory, JOURNAL)
        if files.exists(journal):
            self.contents, valid = read(directory)
        else:
            self.contents, valid = Contents(), 0
        is_new = not files.exists(journal)
        self._fd = files.open_for_append(journal)
        self._end = valid  # of the lines in the journal
        self._is_torn = False  # an append has failed: there may be something behind them
        self._changes = 0  # since the last snapshot
        try:
            with files.naming(journal):
                self._identity = files.identity(self._fd)
                if is_new:
                    # Or a snapshot could survive without it: this would look like a checkpoint.
                    files.sync(directory)
                if files.length(self._fd) > valid:
                    _log.warning("%s: a torn line at byte %d was cut off.", journal, valid)
                    self._is_torn = True
                self._make_own()
                self._cut()
                self._drop_unsound(verify)
                self.remove_dead_files()
                self._take_back_unfinished_load()
        except BaseException:
            with suppress(OSError):
                files.close(self._fd)
            raise
        self._snapshot_bytes = self._end

    def add(self, schema: Schema, entry: Entry) -> None:
        """A file was published; ValueError, and nothing said, if it cannot be among the others."""
        if entry.trajectory_id in self.contents.entries:
            raise ValueError(f"trajectory_id {entry.trajectory_id} twice")
        # What was said of others before does not bind the first.
        schemas = self.contents.schemas if self.contents.entries else Schemas()
        number, version = schemas.number(schema), _version_of([(schema, entry)])
        event = schemas.event(schema, version)
        lines = b"" if event is None else _encode(event)
        self._append(lines + _encode({"event": "add", "entry": entry.to_json(number)}))
        schemas.announce(schema, version if event is None else event["version"])
        self.contents.schemas = schemas
        self.contents.add(entry)

    def clear(self) -> None:
        """All trajectories are gone; `remove_dead_files` unlinks what was theirs."""
        counter = self.contents.trajectory_counter
        event = {"event": "clear", "trajectory_counter": counter}
        self._append(_encode(event))
        self.contents.apply(event)

    def drop(self, trajectory_ids: list[int]) -> None:
        """These are gone; `remove_dead_files` unlinks what was theirs."""
        event = {"event": "drop", "trajectory_ids": trajectory_ids}
        self._append(_encode(event))
        self.contents.apply(event)

    def load(self, contents: Contents) -> None:
        """Others, whose files are in the directory, have taken the place of all trajectories."""
        event = _load_event(contents)
        self._append(_encode(event))
        self.contents.load(contents)
        self.contents.schemas.version = event["version"]

    def check(self) -> None:
        """OSError unless the directory is the store that was opened, and no other writer's.

        Two ``stat``, if all is well. A journal that has got another name is made our own.
        """
        # The journal first: where it is not, the lock's file is not to be made anew.
        if not files.num_names(self._journal, self._identity):
            raise OSError(
                f"{JOURNAL}: expected the one that was opened, got "
                f"{'another' if files.exists(self._journal) else 'none'}. Was the directory, or "
                f"the file, renamed or removed? Put it back: until then nothing can be written"
            )
        if self._lock is not None:
            try:
                self._lock.hold()
            except (CorruptError, LockedError, NoLocksError) as error:
                raise OSError(f"the lock is lost: {str(error).rstrip('.')}") from error
        size = files.length(self._fd)
        if size < self._end or (size > self._end and not self._is_torn):
            raise OSError(
                f"{JOURNAL}: expected {self._end} bytes, got {size}: another has written to it. "
                f"Close the buffer by close(wait=False), and open the store anew"
            )
        self._make_own()

    def _make_own(self) -> None:
        """Put a copy in the place of a journal that has other names too."""
        if files.num_names(self._journal, self._identity) > 1:
            fd = files.replaced(self._journal, files.blocks_of(self._fd, self._end))
            former, self._fd = self._fd, fd
            self._identity, self._is_torn = files.identity(fd), False
            with suppress(OSError):
                files.close(former)
            files.sync(self.directory)  # or a later line could be synced, and not the file's name

    def _cut(self) -> None:
        """Cut off what a failed append, or one of a writer that died, has left."""
        if self._is_torn:
            # A disk that refused a line may have refused to cut off its beginning as well.
            files.truncate(self._fd, self._end)
            self._is_torn = False

    def remove_dead_files(self) -> None:
        """Unlink the files of trajectories that are gone."""
        contents = self.contents
        if contents.dead_files:
            self.check()  # or they could be another store's
            live = {entry.file for entry in contents.entries.values()}
            here = set(files.names_in(self.directory))
            gone = [name for name in contents.dead_files if name in here and name not in live]
            if gone and contents.has_synced_dead:
                files.sync_open(self._fd)  # or the journal could list what is no longer there
            for name in gone:
                files.remove(files.join(self.directory, name))
            contents.dead_files.clear()
            contents.has_synced_dead = False

    def sync(self) -> None:
        """Bring all that was added to the disk itself, then mark it in the journal."""
        self.check()
        for trajectory_id in self.contents.unsynced:
            files.sync_whole(files.join(self.directory, self.contents.entries[trajectory_id].file))
        files.sync(self.directory)  # the names of the files, and of the journal
        self._put(_encode({"event": "sync"}))  # no change for the snapshots to tell
        files.sync_open(self._fd)  # the mark, and all lines before it
        self.contents.synced()

    def unsynced(self) -> set[str]:
        """The uuids of those whose files may not be on the disk itself."""
        entries = self.contents.entries
        return {entries[trajectory_id].uuid for trajectory_id in self.contents.unsynced}

    def note_synced(self, uuids: set[str]) -> None:
        """The files of these are on the disk itself, but their names here may not be."""
        entries = self.contents.entries
        left = [i for i in self.contents.unsynced if entries[i].uuid not in uuids]
        self.contents.unsynced = left

    def is_snapshot_due(self) -> bool:
        """Whether the snapshots are behind: at all for a short list, by a quarter for a long."""
        if not self._changes:
            return False
        is_short = len(self.contents.entries) <= _SHORT_LIST
        return is_short or 4 * files.length(self._fd) >= 5 * self._snapshot_bytes

    def write_snapshots(self, metadata: dict[str, Any]) -> None:
        """Replace both snapshots; ``metadata`` is what the buffer adds to the counts."""
        if not self._changes:
            return
        self.check()
        changes, journal_bytes = self._changes, files.length(self._fd)
        write_snapshots(self.directory, self.contents, metadata)
        self._changes -= changes
        self._snapshot_bytes = journal_bytes

    def close(self) -> None:
        files.close(self._fd)

    def _append(self, lines: bytes) -> None:
        if self.contents.boot_id != self._boot_id:
            lines = _encode({"event": "boot", "id": self._boot_id}) + lines
        self._put(lines)
        self.contents.boot_id = self._boot_id
        self._changes += 1

    def _put(self, lines: bytes) -> None:
        self.check()
        self._cut()
        self._is_torn = True  # unless it comes to its end
        files.append(self._fd, lines)
        self._end += len(lines)
        self._is_torn = False

    def _drop_unsound(self, verify: Callable[[str, Entry, Schema], None] | None) -> None:
        """Drop what was added after the last sync mark and did not come through a power loss."""
        contents = self.contents
        # A killed process loses nothing that was written: only a machine that is started anew.
        if contents.boot_id == self._boot_id != "":
            verify = None
        lost = [i for i in contents.unsynced if not self._is_sound(contents.entries[i], verify)]
        if lost:
            _log.warning(
                "%s: trajectories %s were not synced and are gone or cut short; dropped.",
                self.directory,
                lost,
            )
            self.drop(lost)
        if verify is not None and contents.unsynced:
            self.sync()  # so that this is not asked again

    def _take_back_unfinished_load(self) -> None:
        """Remove the files of a load that did not come to its line of the journal."""
        path = files.join(self.directory, LOADING)
        if files.exists(path):
            listed = {entry.file for entry in self.contents.entries.values()}
            here = set(files.names_in(self.directory))
            for name in (names_listed_in(path) & here) - listed:
                files.remove(files.join(self.directory, name))
            files.remove(path)

    def _is_sound(self, entry: Entry, verify: Callable[[str, Entry, Schema], None] | None) -> bool:
        path = files.join(self.directory, entry.file)
        try:
            size = self._size_of(path, entry)  # CorruptError for a link: no power loss leaves one
        except FileNotFoundError:
            return False
        if size != entry.size_bytes:
            return False
        if verify is not None and self.contents.schema is not None:
            try:
                verify(path, entry, entry.schema or self.contents.schema)
            except (FileNotFoundError, CorruptError):
                return False
        return True


def write_journal(directory: str, contents: Contents) -> None:
    """Replace the journal in ``directory`` by one that says ``contents``, all of it synced."""
    lines = [_encode(_load_event(contents)), _encode({"event": "sync"})]
    files.replace(files.join(directory, JOURNAL), lines)


def lines_of(journal: bytes) -> Iterator[tuple[int, bytes | None]]:
    """The offset of each line, and the line itself; None for one that is not as it was written."""
    offset = 0
    while offset < len(journal):
        end = journal.find(b"\n", offset)
        yield offset, _whole(journal[offset:end]) if end >= 0 else None
        offset = end + 1 if end >= 0 else len(journal)


def _load_event(contents: Contents) -> dict[str, Any]:
    schemas = _schemas_of(contents)
    numbers = _Numbers(contents, schemas)
    return {
        "event": "load",
        "version": _version_of_all(contents, schemas),
        "columns": schemas[0].to_json() if schemas else None,
        **_more(schemas),
        "entries": [entry.to_json(numbers.of(entry)) for entry in contents.entries.values()],
        "trajectory_counter": contents.trajectory_counter,
        "id_step": contents.id_step,
    }


def _schemas_of(contents: Contents) -> list[Schema]:
    """Its own schemas; the one that it would have where there is no trajectory."""
    own = contents.own_schemas
    return own or ([] if contents.schema is None else [contents.schema])


def _more(schemas: list[Schema]) -> dict[str, Any]:
    more = [schema.to_json() for schema in schemas[1:]]
    return {"more_schemas": more} if more else {}


class _Numbers:
    """The numbers of entries' schemas among these."""

    def __init__(self, contents: Contents, schemas: list[Schema]) -> None:
        self._schema = contents.schema
        self._schemas = schemas
        self._known: dict[int, int] = {}

    def of(self, entry: Entry) -> int:
        if len(self._schemas) < 2:
            return 0
        number = self._known.get(id(entry.schema))
        if number is None:
            schema = entry.schema or self._schema
            assert schema is not None
            number = self._known[id(entry.schema)] = self._schemas.index(schema)
        return number


def write_snapshots(directory: str, contents: Contents, metadata: dict[str, Any]) -> None:
    """Replace ``trajectory_index.json`` and ``metadata.json`` in ``directory``."""
    counts = {
        **metadata,
        "size": len(contents.entries),
        "total_samples": contents.total_samples,
        "trajectory_counter": contents.trajectory_counter,
        "id_step": contents.id_step,
    }
    # First the index, which is the truth of a checkpoint and has all that the other one says.
    files.replace(files.join(directory, INDEX), _sealed(_encode_snapshot(contents, counts)))
    files.replace(files.join(directory, METADATA), [json.dumps(counts).encode()])


def _sealed(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """A JSON object that lacks its last brace, ended by the CRC-32 of its bytes."""
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
        yield block
    yield f'{_CRC}{crc:08x}"}}'.encode()


def _encode_snapshot(contents: Contents, metadata: dict[str, Any]) -> Iterator[bytes]:
    yield b'{"trajectory_index": {'
    entries = list(contents.entries.items())
    schemas = _schemas_of(contents)
    numbers = _Numbers(contents, schemas)
    for start in range(0, len(entries), _BLOCK):
        block = {
            str(i): entry.to_json(numbers.of(entry)) for i, entry in entries[start : start + _BLOCK]
        }
        yield (", " if start else "").encode() + json.dumps(block)[1:-1].encode()
    yield b'}, "trajectory_id_list": ' + json.dumps([i for i, _ in entries]).encode()
    version = _version_of_all(contents, schemas)
    schema = schemas[0].to_json() if schemas else None
    yield f', "version": {version}, "schema": {json.dumps(schema)}'.encode()
    for key, more in _more(schemas).items():
        yield f', "{key}": {json.dumps(more)}'.encode()
    yield f', "metadata": {json.dumps(metadata)}'.encode()


def read_snapshot(path: str, contents: Contents) -> None:
    """Read a ``trajectory_index.json`` into new ``contents``; CorruptError if it is none."""
    data = files.read(path)
    try:
        snapshot = json.loads(data)
        version = check_version(snapshot["version"])
        if "crc" in snapshot and _whole(data) is None:
            raise ValueError("the CRC-32 at its end is that of another; without it all is taken")
        contents.schemas = _schemas_from_json(snapshot["schema"], snapshot, version)
        for trajectory_id in snapshot["trajectory_id_list"]:
            listed = snapshot["trajectory_index"][str(trajectory_id)]
            entry = Entry.from_json(listed, schema=contents.schemas.of(listed))
            if entry.trajectory_id != trajectory_id:
                raise ValueError(f"trajectory_id {entry.trajectory_id} as {trajectory_id!r}")
            contents.add(entry)
        contents.metadata = dict(snapshot["metadata"])
        _count_from(contents, contents.metadata)
        contents.unsynced.clear()
    except VersionError as error:
        raise VersionError(f"{path}: {error}") from None
    except BAD_JSON as error:
        raise CorruptError(path, f"not an index: {error!r}.") from error


def read_load(event: dict[str, Any]) -> Contents:
    """What a "load" event brings; one of `BAD_JSON` if it is none, VersionError of a newer's."""
    contents = Contents()
    version = check_version(event["version"])
    contents.schemas = _schemas_from_json(event["columns"], event, version)
    for entry in event["entries"]:
        contents.add(Entry.from_json(entry, schema=contents.schemas.of(entry)))
    _count_from(contents, event)
    return contents


def _schemas_from_json(
    first: list[dict[str, Any]] | None, json: dict[str, Any], version: int
) -> Schemas:
    """The first schema, and those beside it."""
    columns = () if first is None else (first, *json.get("more_schemas", ()))
    return Schemas(*map(Schema.from_json, columns), version=version)


def _count_from(contents: Contents, json: dict[str, Any]) -> None:
    counter = checked_counter(json["trajectory_counter"])
    contents.count_from(counter, whole("id_step", json.get("id_step", 1), 1))


def ids_of(event: dict[str, Any]) -> list[int]:
    """The ids of a "drop" event; KeyError, TypeError or ValueError if it is none."""
    return [whole("trajectory_ids", i, bound=MAX_NUMBER) for i in event["trajectory_ids"]]


def checked_counter(counter: Any) -> int:
    """A ``trajectory_counter`` from JSON; TypeError or ValueError unless it can be one."""
    return whole("trajectory_counter", counter, bound=MAX_NUMBER)


def check_version(version: Any) -> int:
    """``version`` from JSON; VersionError for that of what a newer mmbuf wrote."""
    found = whole("version", version, 1)
    if found > VERSION:
        raise VersionError(
            f"expected store version {VERSION} or older, got {version}. Update mmbuf."
        )
    return found


def _version_of_all(contents: Contents, schemas: Sequence[Schema]) -> int:
    """The oldest version that can tell of all trajectories, which have these schemas."""
    if len(schemas) > 1:
        return VERSION_OF_SEVERAL
    if not schemas:
        return 1
    return _version_of((schemas[0], entry) for entry in contents.entries.values())


def _version_of(entries: Iterable[tuple[Schema, Entry]]) -> int:
    """The oldest version that can tell of each of these entries alone."""
    # Most have the layout of others. Equal parts of a journal are one object.
    layouts = {(id(entry.parts), entry.num_samples): (schema, entry) for schema, entry in entries}
    return max(
        (
            schema.version_of([part.rows for part in entry.parts], entry.num_samples)
            for schema, entry in layouts.values()
            if entry.parts
        ),
        default=1,
    )


def _encode(event: dict[str, Any]) -> bytes:
    return b"".join(_sealed([json.dumps(event)[:-1].encode()])) + b"\n"


def _read_add(line: bytes, layouts: dict[bytes, tuple[Part, ...]], schemas: Schemas) -> Entry:
    """The entry of an "add" line. Most parts of a store are equal, and are read only once.

    They come last in an entry, and the quotes of `_PARTS` cannot stand inside of a JSON string.
    """
    head, mark, tail = line[:-_CRC_BYTES].partition(_PARTS)
    if not mark or not tail.endswith(b"}"):
        entry = json.loads(line)["entry"]
        return Entry.from_json(entry, schema=schemas.of(entry))
    text = tail[:-1]
    parts = layouts.get(text)
    if parts is None:
        if len(layouts) >= _MAX_LAYOUTS:  # a store in which each has its own
            layouts.clear()
        parts = layouts[text] = parts_from_json(json.loads(text))
    # Decoded here, since json.loads would first look which encoding the bytes have.
    entry = json.loads((head + b"}}").decode())["entry"]
    return Entry.from_json(entry, parts, schemas.of(entry))


def _whole(line: bytes) -> bytes | None:
    """A line without its end, None if it is not as it was written."""
    body, suffix = line[:-_CRC_BYTES], line[-_CRC_BYTES:]
    if suffix != f'{_CRC}{zlib.crc32(body):08x}"}}'.encode():
        return None
    return line
