"""Stores: the trajectories of one store or of many, and what becomes of them while they grow.

A path names one store; a list or a pattern (``run/rank_*``) names many, which are one list in the
order of the time of addition. Of each live store the journal is followed, of a checkpoint the index
that each save replaces; a directory of RLinf's stays as it was when it was opened.

A shard is the part of one rank: each trajectory belongs to exactly one, by its number among all
that were ever added to its store and by that store's name. So it stays with its rank while stores
grow, lose their oldest, and come and go.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmbuf import checkpoint, files, index
from mmbuf.arguments import rank_of, told
from mmbuf.columns import REMEDY, check_alike, union, union_of
from mmbuf.errors import CorruptError, MmbufError, SchemaError
from mmbuf.index import Changes, JournalReader
from mmbuf.locations import is_pattern, matches
from mmbuf.schema import Schema
from mmbuf.snapshot import SnapshotReader
from mmbuf.window import Item

# New stores are looked for so often at most: listing directories costs more than a stat.
_LOOK_S = 1.0
_MAX_HELD = 16  # journals that are held open

_IndexReader = JournalReader | SnapshotReader


@dataclass
class News:
    """``gone`` keys have left, then ``come`` came, oldest first.

    Whoever takes them in clears them: what is left is told again, with what is new by then.
    ``is_late``: some of them may be older than what was there before. ``error`` is what one of the
    stores failed with, when all others had been looked at.
    """

    gone: list[Hashable] = field(default_factory=list)
    come: dict[Hashable, Item] = field(default_factory=dict)
    is_late: bool = False
    error: MmbufError | OSError | None = None

    def __bool__(self) -> bool:
        return bool(self.gone or self.come)

    def leave(self, keys: Iterable[Hashable]) -> None:
        """Those that came and were not taken in yet never were there."""
        self.gone.extend(key for key in keys if self.come.pop(key, None) is None)

    def sort(self) -> None:
        """Put what came in the order of the time of addition."""
        self.come = {item[0]: item for item in sorted(self.come.values(), key=_added_at)}


class Stores:
    """The stores of absolute ``paths``. For one thread at a time.

    Keys are the trajectory ids of a single store, and pairs (directory, id) for a list or pattern.
    ``shard`` is (rank, world_size). ``is_common``: trajectories may have several schemas, else they
    are a SchemaError. A ``damage`` list takes what is wrong with files of RLinf's, which are left
    out then; others are not looked at. FileNotFoundError where a directory holds no store; a
    pattern may match nothing yet.
    """

    def __init__(
        self,
        paths: Sequence[str],
        is_list: bool,
        shard: tuple[int, int] | None,
        *,
        follow: bool,
        is_common: bool = False,
        damage: list[CorruptError] | None = None,
    ) -> None:
        self.paths = paths
        self._is_common = is_common
        # For good: what is called so may come and go.
        self._patterns = {path for path in paths if is_pattern(path)}
        self.is_single = not is_list and not self._patterns
        self._rank, self._world_size = shard or (0, 1)
        self._follow = follow
        self._damage = damage
        self._journals: dict[str, _IndexReader] = {}  # by directory
        self._keys: dict[str, dict[int, Hashable]] = {}  # of each directory, by trajectory id
        self._schemas: dict[str, Schema] = {}
        self._news = News()
        self._looked_at = -_LOOK_S

    @property
    def schema(self) -> Schema | None:
        """The columns of all stores; None while there is no trajectory."""
        return union_of(self._schemas.values())

    @property
    def num_stores(self) -> int:
        return len(self._keys)

    @property
    def unread_bytes(self) -> int:
        """Bytes of journals that were not read yet."""
        total = 0
        for journal in list(self._journals.values()):
            try:
                total += journal.unread_bytes
            except FileNotFoundError:
                continue
        return total

    def has_news(self) -> bool:
        """Whether `refresh` may find something; a ``stat`` for each live store.

        For any number of threads, also while one refreshes.
        """
        if self._news.gone or self._news.come:
            return True
        if not self.is_single and time.monotonic() - self._looked_at > _LOOK_S:
            return True
        if self.is_single and not self._keys:
            return True
        return self._is_any(lambda journal: journal.has_changed())

    def looks_new(self) -> bool:
        """As `has_news`, cheaper; that a directory was moved away is seen within a second."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            if self.is_single:
                self._looked_at = now
            return self.has_news()
        if self._news.gone or self._news.come:
            return True
        return self._is_any(lambda journal: journal.looks_changed())

    def _is_any(self, is_new: Callable[[_IndexReader], bool]) -> bool:
        """Whether it is true of any journal; one that is not there counts as new."""
        try:
            for journal in list(self._journals.values()):
                if is_new(journal):
                    return True
        except FileNotFoundError:
            return True
        return False

    def close(self) -> None:
        """Let go of the journals that are held open."""
        for journal in self._journals.values():
            journal.let_go()

    def open(self) -> News:
        """All trajectories, oldest first."""
        news = self._news
        self._look(news)
        if news.error is not None:
            raise news.error
        if not self.is_single:  # the order of its own journal is that of its writer's list
            news.sort()
        return news

    def refresh(self) -> News:
        """What has changed since the last time."""
        news = self._news
        news.error = None
        for directory, journal in list(self._journals.items()):
            try:
                if journal.has_changed():
                    if isinstance(journal, SnapshotReader) and _is_live(directory):
                        self._leave(directory, news)  # to be found anew, as what it is now
                    else:
                        self._take_in(directory, *_read(journal), news)
            except FileNotFoundError:
                # What is mapped stays readable, and a store that was named may come again.
                if directory not in self.paths and not files.exists(directory):
                    self._leave(directory, news)
            except SchemaError:
                self._leave(directory, news)  # so that it is tried, and says so, again
            except (MmbufError, OSError) as error:
                news.error = error
        if not self.is_single:
            self._look(news)
            news.sort()
        elif not self._keys:
            self._look(news)
        return news

    def _look(self, news: News) -> None:
        """Find stores that are not known yet."""
        self._looked_at = time.monotonic()
        for path in self.paths:
            is_named = path not in self._patterns
            for directory in [path] if is_named else matches(path):
                if directory not in self._keys:
                    try:
                        self._enter(directory, news, is_named=is_named)
                    except (MmbufError, OSError) as error:
                        # What matched may be gone again.
                        if is_named or not isinstance(error, FileNotFoundError):
                            news.error = error

    def _enter(self, directory: str, news: News, *, is_named: bool) -> None:
        if is_named and not files.is_directory(directory):
            raise files.no_store(directory)
        is_live = _is_live(directory)
        contents = None if is_live else checkpoint.read_rlinf(directory, self._damage)
        if contents is not None:
            schema = contents.schema
            entries = enumerate(contents.entries.items())
            changes = Changes(added={key: (entry, i) for i, (key, entry) in entries})
        else:
            is_held = self._follow and len(self._journals) < _MAX_HELD
            kind = JournalReader if is_live else SnapshotReader
            journal = kind(directory, is_held=is_held)
            try:
                changes, schema = _read(journal)
            except BaseException as error:
                journal.let_go()  # the error's traceback may keep it for long
                if is_live or not isinstance(error, FileNotFoundError):
                    raise
                if not _is_live(directory):
                    if is_named:
                        raise checkpoint.missing(directory) from error
                    return  # a directory that matches and is no store, or not yet
            if not is_live and _is_live(directory):  # since a moment
                journal.let_go()
                self._enter(directory, news, is_named=is_named)
                return
            if self._follow:
                self._journals[directory] = journal
        self._keys[directory] = {}
        news.is_late = True
        try:
            self._take_in(directory, changes, schema, news)
        except MmbufError:
            self._leave(directory, news)  # so that it is tried, and says so, again
            raise

    def _leave(self, directory: str, news: News) -> None:
        news.leave(self._keys.pop(directory).values())
        self._schemas.pop(directory, None)
        journal = self._journals.pop(directory, None)
        if journal is not None:
            journal.let_go()

    def _take_in(self, directory: str, changes: Changes, schema: Schema | None, news: News) -> None:
        keys = self._keys[directory]
        dropped = list(keys) if changes.is_reset else changes.dropped
        news.leave([keys.pop(i) for i in dropped if i in keys])
        if not changes.added:
            if changes.is_reset:
                self._schemas.pop(directory, None)
            return
        assert schema is not None
        self._check_schema(directory, schema, changes)
        self._schemas[directory] = schema
        salt = zlib.crc32(files.name_of(directory).encode("utf-8", "surrogateescape"))
        for trajectory_id, (entry, number) in changes.added.items():
            if (number + salt) % self._world_size == self._rank:
                key = trajectory_id if self.is_single else (directory, trajectory_id)
                keys[trajectory_id] = key
                news.come[key] = (key, entry, directory)

    def _check_schema(self, directory: str, schema: Schema, changes: Changes) -> None:
        """SchemaError unless what came fits to all others."""
        if not self._is_common:
            before = [(directory, self._schemas[directory])] if self._keys[directory] else []
            come = (
                (files.join(directory, entry.file), entry.schema or schema)
                for entry, _ in changes.added.values()
            )
            check_alike([*before, *come])
        for other, known in self._schemas.items():
            if other == directory:
                continue
            if self._is_common:
                try:
                    union(known, schema)
                except SchemaError as error:
                    raise SchemaError(f"{directory}, with {other}: {error}") from None
            elif known != schema:
                raise SchemaError(
                    f"{directory}: expected {known} as in {other}, got {schema}. {REMEDY}"
                )


def _is_live(directory: str) -> bool:
    return files.exists(files.join(directory, index.JOURNAL))


def _read(journal: _IndexReader) -> tuple[Changes, Schema | None]:
    changes = journal.refresh()
    # The files of the dead are their writer's business; their names would only pile up here.
    journal.contents.dead_files.clear()
    return changes, journal.contents.schema


def _added_at(item: Item) -> float:
    return item[1].added_at


def checked_shard(shard: Any) -> tuple[int, int] | None:
    """``shard`` as (rank, world_size); TypeError or ValueError for what is none."""
    if shard is None:
        return None
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(f"shard: expected (rank, world_size), got {told(shard)}.")
    rank, world_size = shard
    return rank_of("shard", rank, world_size, "shard")
