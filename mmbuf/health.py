"""Health: whether all of a store, a checkpoint or a directory of RLinf's is whole; making it so.

`verify` reads every byte that means something and says what is wrong. `repair` makes the index anew
from the files, which say themselves what they are, and from what is still valid of the old one. It
deletes nothing: what is damaged moves to ``quarantine/``, and what is replaced is kept there too.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mmbuf import arguments, checkpoint, files, index, storage
from mmbuf.entry import Entry, told_apart
from mmbuf.errors import CorruptError, SchemaError, VersionError
from mmbuf.index import Contents
from mmbuf.locations import location
from mmbuf.salvage import Salvage, salvage
from mmbuf.schema import Schema

OnProgress = Callable[[int, int], None]
Directory = str | os.PathLike[str]

QUARANTINE = "quarantine"

_NUM_THREADS = 8
_ID_IN_NAME = re.compile(r"trajectory_([0-9]{1,18})_")

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Finding:
    """What was found at ``path``. ``is_damage`` False: a remark, nothing is lost or wrong."""

    path: str
    what: str
    is_damage: bool


@dataclass
class Report:
    """What a repair did, or would do. File names are relative to the directory.

    ``taken_in`` were not listed and are now, ``renumbered`` have these ids now, ``lost`` were
    listed and have no file, ``quarantined`` says why, ``rewritten`` are journal and snapshots.
    Of the ``corrected`` the list said what is not true of them.
    """

    num_trajectories: int = 0
    num_rows: int = 0
    taken_in: list[str] = field(default_factory=list)
    renumbered: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    rewritten: list[str] = field(default_factory=list)
    corrected: list[str] = field(default_factory=list)

    @property
    def has_changes(self) -> bool:
        return bool(self.quarantined or self.rewritten)


# -- verify ----------------------------------------------------------------------------------------


def verify(
    path: Directory, *, num_threads: int | None = None, on_progress: OnProgress | None = None
) -> list[Finding]:
    """Read all of a directory and say what is wrong, damage first; nothing: an empty list.

    Index, sizes, headers, and the CRC-32 of every column; of ``pt`` files those of their records;
    ``pkl`` files have none and are loaded only. Takes no lock and writes nothing: a store may be
    written meanwhile. ``on_progress(done, total)`` counts trajectories. FileNotFoundError where
    there is no store, VersionError for one of a newer mmbuf.
    """
    directory = _checked_directory(path)
    names = set(files.names_in(directory))
    found = _read(directory)
    schema = None if found.is_truth_damaged else found.schema
    unlisted = {name for name in names if _is_trajectory(name)}
    unlisted -= {entry.file for entry in found.entries}
    items: list[Entry | str] = [*found.entries]
    if found.is_truth_damaged:
        items += sorted(unlisted)  # any of them may have been listed
    results = _each(
        lambda item: _damage_of(directory, item, schema), items, num_threads, on_progress
    )
    damaged = [(i, finding) for i, finding in zip(items, results, strict=True) if finding]
    if damaged or unlisted:
        # A writer may have dropped and added some since.
        now = _read(directory)
        left = {(entry.uuid, entry.file) for entry in now.entries}
        here = set(files.names_in(directory))
        damaged = [
            (item, finding)
            for item, finding in damaged
            if (item in here if isinstance(item, str) else (item.uuid, item.file) in left)
        ]
        unlisted -= {entry.file for entry in now.entries}
        unlisted -= {item for item, _ in damaged if isinstance(item, str)}
        unlisted &= here
        found.dead_files |= now.dead_files
    findings = [Finding(error.path, error.what, True) for error in found.damage]
    findings += [finding for _, finding in damaged]
    return findings + _remarks(directory, found, unlisted)


def _damage_of(directory: str, item: Entry | str, schema: Schema | None) -> Finding | None:
    """What is wrong with a file, by its entry or by its name only."""
    name = item if isinstance(item, str) else item.file
    path = files.join(directory, name)
    try:
        format_ = storage.format_of(name)
        if isinstance(item, str) or (schema is None and format_ is not None):
            assert format_ is not None
            found, schema, _ = format_.describe(path, name)
            item = found if isinstance(item, str) else item
        storage.verify(path, item, item.schema or schema or Schema(()))
    except FileNotFoundError:
        return Finding(path, "expected a trajectory's file, got none.", True)
    except CorruptError as error:
        return Finding(error.path, error.what, True)
    except VersionError as error:
        return Finding(path, str(error), False)
    except OSError as error:
        return Finding(path, f"could not be read: {error}", True)
    return None


def _remarks(directory: str, found: Salvage, unlisted: set[str]) -> list[Finding]:
    """What nothing is lost by, and what the next writer or a repair puts right."""
    remarks = []

    def remark(name: str, what: str) -> None:
        remarks.append(Finding(files.join(directory, name), what, False))

    unfinished = _unfinished(directory, found.is_live)
    try:
        is_written = _is_locked(files.join(directory, files.WRITER_LOCK))
    except CorruptError as error:
        remarks.append(Finding(error.path, f"{error.what} Remove it.", True))
        is_written = False
    for name in sorted(unlisted - unfinished):
        if name not in found.dead_files:
            remark(name, "a trajectory's file that is not listed; a repair takes it in.")
        elif not is_written:
            remark(name, "of a trajectory that was dropped; the next writer removes it.")
    for name in sorted(unlisted & unfinished):
        if not found.is_live:
            remark(name, "of an earlier or an unfinished save; the next one removes it.")
        elif not is_written:
            remark(name, "of an unfinished load; the next writer removes it.")
    if not is_written:
        for name in sorted(files.temporaries_in(directory)):
            remark(name, "left half written; the next writer removes it.")
        if found.torn_at is not None:
            remark(index.JOURNAL, f"a torn line at byte {found.torn_at}; a writer cuts it off.")
    return remarks


# -- repair ----------------------------------------------------------------------------------------


def repair(
    path: Directory,
    *,
    dry_run: bool = False,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Report:
    """Make the index of a store or checkpoint anew from its files; what it did.

    Whole files stay or are taken in, each under the id that it had where that is known; damaged
    ones move to ``quarantine/``. Ids are never given again. At every moment the old index holds or
    the new one; an interrupted repair can be run again, and a second one changes nothing. With
    ``dry_run`` nothing is touched. LockedError while a writer has the store open, or somebody saves
    to the checkpoint; else as `verify`.
    """
    directory = _checked_directory(path)
    is_live = _read(directory).is_live
    if dry_run:
        _check_is_unlocked(directory, is_live)
        return _Plan(directory, num_threads, on_progress).report
    with _locked_store(directory) if is_live else checkpoint.locked(directory):
        plan = _Plan(directory, num_threads, on_progress)
        if plan.report.has_changes:
            plan.carry_out()
        return plan.report


def _check_is_unlocked(directory: str, is_live: bool) -> None:
    path = files.join(directory, files.WRITER_LOCK if is_live else checkpoint.LOCK)
    if _is_locked(path):
        error = files.locked(path)
        raise error if is_live else checkpoint.held_by_another(path, error)


@contextlib.contextmanager
def _locked_store(directory: str) -> Iterator[None]:
    lock = files.WriterLock(files.join(directory, files.WRITER_LOCK))
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class _Whole:
    """A file with nothing wrong in it. ``is_known``: the index says just this of it."""

    entry: Entry
    schema: Schema
    is_known: bool = False


class _Plan:
    """What a repair of ``directory`` is to do."""

    def __init__(
        self, directory: str, num_threads: int | None, on_progress: OnProgress | None
    ) -> None:
        self.report = Report()
        self._directory = directory
        self._old = _read(directory)
        self._names = set(files.names_in(directory))
        whole = self._examine_all(num_threads, on_progress)
        self._contents = self._listed_anew(whole)
        self._decide_what_is_written()
        self.report.num_trajectories = len(self._contents.entries)
        self.report.num_rows = self._contents.total_samples

    # -- what there is --

    def _examine_all(
        self, num_threads: int | None, on_progress: OnProgress | None
    ) -> dict[str, _Whole]:
        """All whole files, by name; the others are to be quarantined."""
        old = self._old
        listed = {entry.file: entry for entry in old.entries}
        hints = {entry.file: entry for entry in old.hints}
        # What a save or load has left behind that did not come to its end belongs to nothing. But
        # where the index is damaged it may have come to its end.
        unfinished = _unfinished(self._directory, old.is_live) - listed.keys()
        if old.is_truth_damaged:
            unfinished = set()
        names = [n for n in sorted(self._names - unfinished) if n in listed or _is_trajectory(n)]
        for name in names:
            if name in old.dead_files and name not in listed:
                self.report.quarantined[name] = "its trajectory was dropped."
        names = [name for name in names if name not in self.report.quarantined]

        def examine(name: str) -> _Whole | str:
            known = [entries[name] for entries in (listed, hints) if name in entries]
            return _examine(self._directory, name, known, old.schema)

        whole: dict[str, _Whole] = {}
        for name, result in zip(
            names, _each(examine, names, num_threads, on_progress), strict=True
        ):
            if isinstance(result, str):
                self.report.quarantined[name] = result
            else:
                whole[name] = result
        return whole

    # -- what is listed --

    def _listed_anew(self, whole: dict[str, _Whole]) -> Contents:
        old, report = self._old, self.report
        places = self._with_one_identity(whole)
        schema = self._common_schema(whole, places)
        # Of a store whose trajectories have several schemas those belong to it that fit. Where the
        # list is damaged, it may have had several.
        schemas = index.Schemas(*([] if schema is None else [schema]))
        has_several = len(old.schemas) > 1 or old.is_truth_damaged
        entries: dict[str, Entry] = {}
        for name, file in whole.items():
            entry = _with_columns_of(schema, file)
            if entry is None and has_several:
                with contextlib.suppress(SchemaError):
                    own = schemas[schemas.announce(file.schema)]
                    entry = dataclasses.replace(file.entry, schema=own)
            if entry is None:
                report.quarantined[name] = f"expected {schema}, got {file.schema}."
            else:
                entries[name] = entry
        before = [
            entries[name] for name in sorted(places, key=places.__getitem__) if name in entries
        ]
        others = [entry for name, entry in entries.items() if name not in places]
        report.taken_in = sorted(entry.file for entry in others)
        found = set(places.values())
        report.lost = [
            entry.file
            for i, entry in enumerate(old.entries)
            if i not in found and entry.file not in self._names
        ]
        return self._numbered(_in_order(before, others), schema)

    def _with_one_identity(self, whole: dict[str, _Whole]) -> dict[str, int]:
        """See that no trajectory is there twice; where the files' ones were listed, by name."""
        entries, report = self._old.entries, self.report
        by_file = {entry.file: i for i, entry in enumerate(entries)}
        by_uuid = {entry.uuid: i for i, entry in reversed([*enumerate(entries)])}
        hints = {entry.uuid: entry for entry in self._old.hints}
        holders: dict[str, str] = {}  # by uuid
        places: dict[str, int] = {}

        def is_elsewhere(name: str) -> tuple[bool, str]:
            i = by_uuid.get(whole[name].entry.uuid)
            return i is None or entries[i].file != name, name

        for name in sorted(whole, key=is_elsewhere):
            file = whole[name]
            entry = file.entry
            i = by_uuid.get(entry.uuid)
            if not storage.FORMATS[entry.format].CAN_MAP:
                if file.is_known and name in by_file:
                    places[name] = by_file[name]
                elif entry.uuid in holders or i is not None:
                    # Only its bytes are those of another.
                    entry = dataclasses.replace(entry, uuid=told_apart(entry.uuid))
            elif entry.uuid in holders:
                report.quarantined[name] = f"the same trajectory as {holders[entry.uuid]}."
                del whole[name]
                continue
            elif i is not None:
                listed = dataclasses.replace(entries[i], file=name)
                entry = dataclasses.replace(
                    entry,
                    trajectory_id=listed.trajectory_id,
                    added_at=entry.added_at or listed.added_at,
                )
                if entry != listed:
                    if not _is_truer(entry, listed):
                        report.quarantined[name] = "what it says of itself is not what is listed."
                        del whole[name]
                        continue
                    report.corrected.append(name)
                places[name] = i
            else:
                number = _number_of(name, entry.trajectory_id)
                if entry.uuid in hints:
                    number = hints[entry.uuid].trajectory_id
                entry = dataclasses.replace(entry, trajectory_id=number)
            holders.setdefault(entry.uuid, name)
            whole[name] = dataclasses.replace(file, entry=entry)
        return places

    def _common_schema(self, whole: dict[str, _Whole], places: dict[str, int]) -> Schema | None:
        """That of most of the files that were listed, or of most where none is left of these."""
        schemas = [whole[name].schema for name in places]
        if len(self._old.schemas) > 1:  # known ones first, so that they keep their numbers
            return self._old.schemas[0]
        counts = Counter(schemas or [file.schema for file in whole.values()])
        if not counts:
            return self._old.schema
        return max(counts, key=lambda schema: (counts[schema], schema == self._old.schema))

    def _numbered(self, entries: list[Entry], schema: Schema | None) -> Contents:
        """The contents of ``entries``; of two with one id the later one gets a new id."""
        counter, step = self._old.trajectory_counter, self._old.id_step
        if self._old.is_truth_damaged or self.report.quarantined or self.report.taken_in:
            gone = [*self.report.quarantined, *_names_in_quarantine(self._directory)]
            ids = [_number_of(name, -1) for name in gone]
            ids += [entry.trajectory_id for entry in (*entries, *self._old.entries)]
            highest = max(ids, default=-1)
            counter = index.next_id(highest + 1, counter, step)
        contents = Contents()
        contents.schema = schema
        taken_in, doubles = set(self.report.taken_in), []
        added_at = 0.0
        for entry in entries:
            if not entry.added_at and entry.file in taken_in:
                # It does not say, and lies behind the one before it.
                entry = dataclasses.replace(entry, added_at=added_at)
            added_at = entry.added_at
            if entry.trajectory_id in contents.entries:
                doubles.append(entry)
            else:
                contents.add(entry)
        for entry in doubles:
            contents.add(dataclasses.replace(entry, trajectory_id=counter))
            self.report.renumbered[entry.file] = counter
            counter += step
        contents.count_from(counter, step)
        return contents

    # -- what is done --

    def _decide_what_is_written(self) -> None:
        old, new = self._old, self._contents
        damaged, truth = old.damaged_names, old.truth
        entries = list(new.entries.values())
        has_changed = old.torn_at is not None or (
            (old.entries, old.trajectory_counter, old.id_step)
            != (entries, new.trajectory_counter, new.id_step)
            or [e.schema or old.schema for e in old.entries] != [e.schema for e in entries]
            or (not entries and old.schema != new.schema)
        )
        self._kept = sorted(damaged & self._names & {index.JOURNAL, index.INDEX, index.METADATA})
        if has_changed or truth in damaged:
            self.report.rewritten.append(truth)
            if truth in self._names and truth not in self._kept:
                self._kept.append(truth)
        if self.report.rewritten or {index.INDEX, index.METADATA} & damaged:
            self.report.rewritten = sorted(_SNAPSHOTS.union(self.report.rewritten))

    def carry_out(self) -> None:
        """Do it. The new index comes last."""
        directory, rewritten = self._directory, self.report.rewritten
        quarantine = files.join(directory, QUARANTINE)
        if self._kept or self.report.quarantined:
            files.make_directory(quarantine)
        taken = set(_names_in_quarantine(directory))
        for name in self._kept:
            path = files.join(directory, name)
            if not any(files.is_same(path, files.join(quarantine, other)) for other in taken):
                target = files.join(quarantine, _free(name, taken))
                if files.is_file(path):
                    files.link_or_copy(path, target)
                else:  # a link, a directory
                    files.rename(path, target)
        for name in self.report.quarantined:
            files.rename(files.join(directory, name), files.join(quarantine, _free(name, taken)))
        if taken:
            files.sync(quarantine)  # what was moved is in one place at least
        for entry in self._contents.entries.values() if rewritten else ():
            files.sync_whole(files.join(directory, entry.file))
        files.sync(directory)
        if index.JOURNAL in rewritten:
            index.write_journal(directory, self._contents)
        if rewritten:
            metadata = {"trajectory_format": "arrow", **self._old.metadata}
            index.write_snapshots(directory, self._contents, metadata)
            files.sync(directory)  # their names


_SNAPSHOTS = {index.INDEX, index.METADATA}


def _examine(directory: str, name: str, known: list[Entry], schema: Schema | None) -> _Whole | str:
    """A file, or what is wrong with it. ``known`` is what an index says of it."""
    path = files.join(directory, name)
    try:
        format_ = storage.format_of(name)
        if format_ is None:
            return f"expected one of {list(storage.FORMATS)}."
        found, own, _ = format_.describe(path, name)
        for entry in known:
            if entry.format == format_.NAME and not format_.CAN_MAP:
                # It cannot say itself who it is.
                listed = entry.schema or schema or own
                with contextlib.suppress(CorruptError):
                    storage.verify(path, entry, listed)
                    return _Whole(entry, listed, True)
        storage.verify(path, found, own)
    except CorruptError as error:
        return error.what
    except OSError as error:
        if error.errno != errno.EIO:  # else the fault is not the file's
            raise
        return f"could not be read: {error}"
    return _Whole(found, own)


def _is_truer(entry: Entry, listed: Entry) -> bool:
    """Whether a whole file is right about itself where the list says something else.

    What an arrow file says stands in it twice. That of npy stands in it once, without a checksum:
    it holds where its rows bear witness.
    """
    if entry.format == "arrow":
        return True
    rows = (entry.num_samples, entry.size_bytes, entry.parts)
    return rows != (listed.num_samples, listed.size_bytes, listed.parts)


def _with_columns_of(schema: Schema | None, file: _Whole) -> Entry | None:
    """The entry with its columns in the order of ``schema``; None where they are others."""
    if file.schema == schema:
        return dataclasses.replace(file.entry, schema=schema)
    if schema is None or storage.FORMATS[file.entry.format].CAN_MAP:
        return None
    parts = dict(zip(file.schema.columns, file.entry.parts, strict=True))
    if parts.keys() != set(schema.columns):
        return None
    ordered = tuple(parts[column] for column in schema.columns)
    return dataclasses.replace(file.entry, parts=ordered, schema=schema)


def _in_order(known: list[Entry], others: list[Entry]) -> list[Entry]:
    """``known`` in their order, each of ``others`` before the first of a higher id."""
    highest = list(itertools.accumulate((entry.trajectory_id for entry in known), max))
    placed: list[tuple[tuple[Any, ...], Entry]] = [((i, 1), e) for i, e in enumerate(known)]
    for entry in others:
        at = bisect.bisect_right(highest, entry.trajectory_id)
        placed.append(((at, 0, entry.trajectory_id, entry.added_at, entry.file), entry))
    return [entry for _, entry in sorted(placed, key=lambda pair: pair[0])]


# -- both ------------------------------------------------------------------------------------------


def _checked_directory(path: Directory) -> str:
    directory = location("path", path)
    if not files.is_directory(directory):
        raise files.no_store(directory)
    return directory


def _read(directory: str) -> Salvage:
    """What the index says, and what is wrong with it; FileNotFoundError where there is no store.

    Again where a checkpoint was saved over meanwhile: its parts were of different saves then.
    """
    deadline = time.monotonic() + checkpoint.PATIENCE_S
    while True:
        before = checkpoint.state_of(directory)
        found = _read_once(directory)
        if not found.damage or found.is_live or checkpoint.state_of(directory) == before:
            return found
        if time.monotonic() > deadline:
            return found


def _read_once(directory: str) -> Salvage:
    damage: list[CorruptError] = []
    try:
        contents = checkpoint.read_rlinf(directory, damage)
    except CorruptError:
        contents = None  # told below
    if contents is not None:
        return Salvage(
            False,
            list(contents.entries.values()),
            schemas=contents.schemas,
            metadata=contents.metadata,
            trajectory_counter=contents.trajectory_counter,
            damage=damage,
        )
    found = salvage(directory)
    names = files.names_in(directory)
    journal = files.join(directory, index.JOURNAL)
    has_files = any(map(_is_trajectory, names))
    if index.JOURNAL not in names:
        if found.is_live and (index.INDEX in names or has_files):
            found.damage.append(CorruptError(journal, "expected the journal of a store, got none."))
        elif not found.is_live and index.INDEX not in names:
            if not has_files:
                raise checkpoint.missing(directory)
            path = files.join(directory, index.INDEX)
            found.damage.append(CorruptError(path, "expected a journal or an index, got neither."))
        elif not found.is_live and not found.damage and checkpoint.SAVING not in names:
            _compare_metadata(directory, found)
    return found


def _compare_metadata(directory: str, found: Salvage) -> None:
    """The index of a checkpoint holds a copy, which was written last."""
    path = files.join(directory, index.METADATA)
    if files.exists(path) and json.loads(files.read(path)) != found.metadata:
        found.damage.append(CorruptError(path, f"expected what {index.INDEX} says, got another."))


def _unfinished(directory: str, is_live: bool) -> set[str]:
    """Names that a save of a checkpoint, or a load into a store, has left without its end."""
    name = index.LOADING if is_live else checkpoint.SAVING
    return index.names_listed_in(files.join(directory, name))


def _is_locked(path: str) -> bool:
    try:
        return files.exists(path) and files.is_locked(path)
    except OSError:  # a file system that cannot tell
        return False


def _is_trajectory(name: str) -> bool:
    return _ID_IN_NAME.match(name) is not None and storage.format_of(name) is not None


def _number_of(name: str, default: int) -> int:
    """The id that a file was named by."""
    match = _ID_IN_NAME.match(name)
    return int(match[1]) if match else default


def _names_in_quarantine(directory: str) -> list[str]:
    path = files.join(directory, QUARANTINE)
    return files.names_in(path) if files.is_directory(path) else []


def _free(name: str, taken: set[str]) -> str:
    """A name that is not taken, and is now."""
    stem, dot, extension = name.rpartition(".")
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{stem}.{number}{dot}{extension}"
    taken.add(free)
    return free


def _each(
    function: Callable[[_T], _R],
    items: Sequence[_T],
    num_threads: int | None,
    on_progress: OnProgress | None,
) -> list[_R]:
    """``function`` of each of ``items``, in several threads."""
    num_threads = arguments.whole_or_none("num_threads", num_threads, 1)
    results = []
    with ThreadPoolExecutor(num_threads or _NUM_THREADS, "mmbuf-verify") as executor:
        for result in executor.map(function, items):
            results.append(result)
            if on_progress is not None:
                on_progress(len(results), len(items))
    return results
