"""Stores: the trajectories of one store or of many, and what becomes of them while they grow.

A path names one store; a list or a pattern (``run/rank_*``) names many, which are one list in the
order of the time of addition. Of each live store the journal is followed; a checkpoint, or a
directory of RLinf's, stays as it was when it was opened.

A shard is the part of one rank: each trajectory belongs to exactly one, by its number among all
that were ever added to its store and by that store's name. So it stays with its rank while stores
grow, lose their oldest, and come and go.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmbuf import checkpoint, files, index
from mmbuf.entry import Entry
from mmbuf.errors import MmbufError, SchemaError
from mmbuf.index import Changes, JournalReader
from mmbuf.schema import Schema

Item = tuple[Hashable, Entry, str]  # key, entry, directory

# New stores are looked for so often at most: listing directories costs more than a stat.
_LOOK_S = 1.0


@dataclass
class News:
    """``gone`` keys have left, then ``come`` came, oldest first.

    ``is_late``: some of them may be older than what was there before. ``error`` is what one of the
    stores failed with, when all others had been looked at.
    """

    gone: list[Hashable] = field(default_factory=list)
    come: list[Item] = field(default_factory=list)
    is_late: bool = False
    error: MmbufError | None = None


class Stores:
    """The stores of absolute ``paths``. For one thread at a time.

    Keys are the trajectory ids of a single store, and pairs (directory, id) for a list or pattern.
    ``shard`` is (rank, world_size). FileNotFoundError where a directory holds no store; a pattern
    may match nothing yet.
    """

    def __init__(
        self,
        paths: Sequence[str],
        is_list: bool,
        shard: tuple[int, int] | None,
        *,
        follow: bool,
    ) -> None:
        self.paths = paths
        self.is_single = not is_list and not files.is_pattern(paths[0])
        self._rank, self._world_size = shard or (0, 1)
        self._follow = follow
        self._journals: dict[str, JournalReader] = {}  # by directory
        self._keys: dict[str, dict[int, Hashable]] = {}  # of each directory, by trajectory id
        self._schemas: dict[str, Schema] = {}
        self._looked_at = -_LOOK_S

    @property
    def schema(self) -> Schema | None:
        """The schema that all stores share; None while there is no trajectory."""
        return next(iter(self._schemas.values()), None)

    @property
    def num_stores(self) -> int:
        return len(self._keys)

    @property
    def unread_bytes(self) -> int:
        """Bytes of journals that were not read yet."""
        total = 0
        for journal in self._journals.values():
            try:
                total += journal.unread_bytes
            except FileNotFoundError:
                continue
        return total

    def has_news(self) -> bool:
        """Whether `refresh` may find something; a ``stat`` for each live store."""
        if not self.is_single and time.monotonic() - self._looked_at > _LOOK_S:
            return True
        for journal in self._journals.values():
            try:
                if journal.has_changed():
                    return True
            except FileNotFoundError:
                return True
        return False

    def open(self) -> News:
        """All trajectories, oldest first."""
        news = News()
        self._look(news)
        if news.error is not None:
            raise news.error
        news.come.sort(key=_added_at)
        return news

    def refresh(self) -> News:
        """What has changed since the last time."""
        news = News()
        for directory, journal in list(self._journals.items()):
            try:
                if journal.has_changed():
                    self._take_in(directory, journal.refresh(), journal.contents.schema, news)
            except FileNotFoundError:
                # What is mapped stays readable, and a store that was named may come again.
                if directory not in self.paths and not files.exists(directory):
                    self._leave(directory, news)
            except MmbufError as error:
                news.error = error
                if isinstance(error, SchemaError):
                    self._leave(directory, news)  # so that it is tried, and says so, again
        if not self.is_single:
            self._look(news)
        news.come.sort(key=_added_at)
        return news

    def _look(self, news: News) -> None:
        """Find stores that are not known yet."""
        self._looked_at = time.monotonic()
        for path in self.paths:
            for directory in files.matches(path) if files.is_pattern(path) else [path]:
                if directory not in self._keys:
                    try:
                        self._enter(directory, news, is_named=directory == path)
                    except MmbufError as error:
                        news.error = error

    def _enter(self, directory: str, news: News, *, is_named: bool) -> None:
        if is_named and not files.is_directory(directory):
            raise FileNotFoundError(f"{directory}: expected a store directory, got none.")
        if files.exists(files.join(directory, index.JOURNAL)):
            journal = JournalReader(directory)
            changes, schema = journal.refresh(), journal.contents.schema
            if self._follow:
                self._journals[directory] = journal
        else:
            try:
                contents = checkpoint.read(directory)
            except FileNotFoundError:
                if is_named:
                    raise
                return  # a directory that matches and is no store, or not yet
            schema = contents.schema
            entries = enumerate(contents.entries.items())
            changes = Changes(added={key: (entry, i) for i, (key, entry) in entries})
        self._keys[directory] = {}
        news.is_late = True
        try:
            self._take_in(directory, changes, schema, news)
        except MmbufError:
            self._leave(directory, news)  # so that it is tried, and says so, again
            raise

    def _leave(self, directory: str, news: News) -> None:
        news.gone.extend(self._keys.pop(directory).values())
        self._schemas.pop(directory, None)
        del self._journals[directory]

    def _take_in(self, directory: str, changes: Changes, schema: Schema | None, news: News) -> None:
        keys = self._keys[directory]
        dropped = list(keys) if changes.is_reset else changes.dropped
        news.gone.extend(keys.pop(i) for i in dropped if i in keys)
        if not changes.added:
            if changes.is_reset:
                self._schemas.pop(directory, None)
            return
        assert schema is not None
        self._check_schema(directory, schema)
        self._schemas[directory] = schema
        salt = zlib.crc32(files.name_of(directory).encode("utf-8", "surrogateescape"))
        for trajectory_id, (entry, number) in changes.added.items():
            if (number + salt) % self._world_size == self._rank:
                key = trajectory_id if self.is_single else (directory, trajectory_id)
                keys[trajectory_id] = key
                news.come.append((key, entry, directory))

    def _check_schema(self, directory: str, schema: Schema) -> None:
        for other, known in self._schemas.items():
            if other != directory and known != schema:
                raise SchemaError(f"{directory}: expected {known} as in {other}, got {schema}.")


def _added_at(item: Item) -> float:
    return item[1].added_at


def checked_shard(shard: Any) -> tuple[int, int] | None:
    """``shard`` as (rank, world_size); ValueError unless ``0 <= rank < world_size``."""
    if shard is None:
        return None
    rank, world_size = shard
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"shard: expected (rank, world_size) with rank in [0, world_size), got {shard}."
        )
    return int(rank), int(world_size)
