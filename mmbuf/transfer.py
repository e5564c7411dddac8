"""Transfer: whole stores brought to new places: several merged, one split, one converted.

A source is whatever `checkpoint.read` opens: a live store, a checkpoint, a directory of RLinf's.
It is only read. The target is a checkpoint; it is built in a hidden directory beside its place,
which it takes at once: `checkpoint` makes it, and here is decided what goes into it.

Files are linked, not copied, where their format stays and the file system allows it. Otherwise one
trajectory at a time is in memory.

``on_progress(done, total)`` is called after each trajectory. What it raises ends the work, and
nothing is left at the target; as with any other error.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmbuf import arguments, checkpoint, files, storage
from mmbuf.columns import SAME, difference, is_common, union
from mmbuf.entry import Entry, told_apart
from mmbuf.errors import SchemaError
from mmbuf.index import Contents
from mmbuf.locations import location, locations
from mmbuf.schema import Schema

OnProgress = Callable[[int, int], None]
Directory = str | os.PathLike[str]

ORDERS = ("interleaved", "appended", "added")


@dataclass(frozen=True)
class Transferred:
    """What the target holds: counts, and the bytes of its trajectories' files.

    ``num_duplicates`` trajectories of the sources were left out, since they were there already.
    """

    num_trajectories: int
    num_rows: int
    size_bytes: int
    num_duplicates: int = 0


def merge(
    sources: Sequence[Directory],
    target: Directory,
    *,
    order: str = "interleaved",
    trajectory_format: str | None = None,
    columns: str = SAME,
    on_progress: OnProgress | None = None,
) -> Transferred:
    """Bring all trajectories of ``sources`` together in the new directory ``target``.

    They are numbered anew from 0: ``"interleaved"`` by their ids in the sources (each source's 0
    in the order of ``sources``, then each one's 1, as RLinf's tool has it), ``"appended"``, one
    source after the other, or ``"added"``, by their times of addition. ``trajectory_format`` None:
    each file's own. The seed is that of the first source that has one.

    A trajectory in a format that gives it a name of its own (``arrow``, ``npy``) is taken once,
    however many sources hold it. ``pt`` and ``pkl`` name equal files alike: all are taken.

    With ``columns="common"`` sources may lack columns that others have: each trajectory keeps its
    own. The target is then to be opened with ``columns="common"`` too.

    ValueError for an argument that is none, SchemaError unless all sources have the same columns,
    FileExistsError unless ``target`` is new or an empty directory, CorruptError for a file that is
    missing or damaged, OSError as the system gives it.
    """
    if isinstance(sources, (str, bytes, os.PathLike)):
        raise TypeError(f"sources: expected a list of directories, got {sources!r}.")
    sources, _ = locations("sources", sources)
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {list(ORDERS)}, got {order!r}.")
    paths, target = _checked(sources, target, trajectory_format)
    parts = [_read(path, target) for path in paths]
    found = [
        (path, entry)
        for path, part in zip(paths, parts, strict=True)
        for entry in part.entries.values()
    ]
    if order == "interleaved":
        found.sort(key=lambda pair: pair[1].trajectory_id)  # stable: sources in their order
    elif order == "added":
        found.sort(key=lambda pair: pair[1].added_at)
    distinct = _distinct(found)
    merged = Contents()
    merged.schema = _schema_of(paths, parts, is_mixed=is_common(columns))
    merged.metadata = _merged_metadata(parts)
    origins = {i: files.join(path, entry.file) for i, (path, entry) in enumerate(distinct)}
    entries = (dataclasses.replace(entry, trajectory_id=i) for i, (_, entry) in enumerate(distinct))
    for entry in _told_apart(entries):
        merged.add(entry)
    transfer = _Transfer(origins, trajectory_format, on_progress)
    with built_directory(target) as directory:
        transfer.save(merged, directory)
    return dataclasses.replace(transfer.result, num_duplicates=len(found) - len(distinct))


def split(
    source: Directory,
    target: Directory,
    *,
    first: int | None = None,
    num_shards: int | None = None,
    trajectory_format: str | None = None,
    on_progress: OnProgress | None = None,
) -> Transferred:
    """Bring a part of ``source``, or all of it in parts, to the new directory ``target``.

    Either the ``first`` (oldest) trajectories, with their ids, the counter and the generator. Or
    ``num_shards`` contiguous parts, as ``target/rank_0``, ``rank_1``, ...: each is what
    ``load_checkpoint(source, is_distributed=True)`` gives that rank, its ids and its generator
    included. Errors as of `merge`; ValueError for more of ``first`` than there are.
    """
    if (first is None) == (num_shards is None):
        raise ValueError(
            f"expected either first or num_shards, got first={first}, num_shards={num_shards}."
        )
    first, num_shards = (
        None if number is None else arguments.whole(name, number, 1)
        for name, number in (("first", first), ("num_shards", num_shards))
    )
    (path,), target = _checked([source], target, trajectory_format)
    contents = _read(path, target)
    if first is not None and first > len(contents.entries):
        raise ValueError(
            f"first: expected at most {len(contents.entries)}, the trajectories of {path}, "
            f"got {first}."
        )
    transfer = _Transfer(_origins(path, contents), trajectory_format, on_progress)
    with built_directory(target) as directory:
        if num_shards is None:
            transfer.save(_first(contents, first), directory)
        else:
            for rank in range(num_shards):
                part = _shard(path, contents, rank, num_shards)
                transfer.save(part, files.join(directory, f"rank_{rank}"))
    return transfer.result


def convert(
    source: Directory,
    target: Directory,
    trajectory_format: str,
    *,
    on_progress: OnProgress | None = None,
) -> Transferred:
    """Bring all of ``source`` to the new directory ``target`` in another format.

    Ids, their order, the counter and the generator are kept; of a live store's generator, which
    no file tells, the seed. Errors as of `merge`.
    """
    (path,), target = _checked([source], target, trajectory_format)
    contents = _read(path, target)
    transfer = _Transfer(_origins(path, contents), trajectory_format, on_progress)
    with built_directory(target) as directory:
        transfer.save(contents, directory)
    return transfer.result


class _Transfer:
    """Brings trajectories to checkpoints and counts them. ``origins``: the file of each, by id."""

    def __init__(
        self,
        origins: dict[int, str],
        trajectory_format: str | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.result = Transferred(0, 0, 0)
        self._origins = origins
        self._format = trajectory_format
        self._on_progress = on_progress

    def save(self, contents: Contents, directory: str) -> None:
        """Make ``directory``, new or empty, a checkpoint of ``contents``."""

        def put(entry: Entry, path: str, format_name: str) -> Entry:
            assert contents.schema is not None
            origin = self._origins[entry.trajectory_id]
            # A private mapping of the file costs no memory of its own.
            schema = entry.schema or contents.schema
            entry = storage.copy(origin, entry, schema, path, format_name, can_map=True)
            self._count(entry)
            return entry

        checkpoint.save(directory, contents, contents.metadata, put, self._format)

    def _count(self, entry: Entry) -> None:
        self.result = Transferred(
            self.result.num_trajectories + 1,
            self.result.num_rows + entry.num_samples,
            self.result.size_bytes + entry.size_bytes,
        )
        if self._on_progress is not None:
            self._on_progress(self.result.num_trajectories, len(self._origins))


def _checked(
    sources: Sequence[Directory], target: Directory, trajectory_format: str | None
) -> tuple[list[str], str]:
    """Absolute paths, unless the target or the format is refused."""
    if trajectory_format is not None:
        storage.checked_format(trajectory_format)
    target = location("target", target)
    if files.exists(target):
        if not files.is_directory(target):
            raise NotADirectoryError(
                f"target: expected a new path or an empty directory, got a file: {target}"
            )
        if files.names_in(target):
            raise FileExistsError(
                f"target: expected a new path or an empty directory, got one that is not empty: "
                f"{target}"
            )
    return [location("source", source) for source in sources], target


def _is_within(path: str, directory: str) -> bool:
    """Whether ``path``, which may be missing, is ``directory`` or would lie in it."""
    while not files.is_directory(path):
        path = files.directory_of(path)
    while not files.is_same(path, directory):
        # Not the name above: a link leads to other directories than its name says.
        parent = files.join(path, "..")
        if not files.is_directory(parent) or files.is_same(parent, path):
            return False
        path = parent
    return True


def _read(path: str, target: str) -> Contents:
    """A source, all its files there, every entry told apart from the others by its uuid.

    ValueError if ``target`` lies in it.
    """
    contents = checkpoint.read_whole(path)
    if _is_within(target, path):
        raise ValueError(f"target: expected a path outside of {path}, got {target}.")
    metadata = checkpoint.metadata_of(path, contents)
    contents.metadata = {"trajectory_format": "arrow", **metadata}
    contents.entries = {
        entry.trajectory_id: entry for entry in _told_apart(contents.entries.values())
    }
    return contents


def _has_own_uuid(entry: Entry) -> bool:
    """Whether the uuid stands in the file itself, and so is that of no other trajectory."""
    return storage.FORMATS[entry.format].CAN_MAP


def _distinct(found: list[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
    """``found``, but of those with a uuid of their own only the first of each."""
    distinct = []
    uuids = set()
    for path, entry in found:
        if _has_own_uuid(entry):
            if entry.uuid in uuids:
                continue
            uuids.add(entry.uuid)
        distinct.append((path, entry))
    return distinct


def _told_apart(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, a new uuid in those whose own says only that another file has equal bytes."""
    entries = list(entries)
    uuids = {entry.uuid for entry in entries if _has_own_uuid(entry)}
    for entry in entries:
        if not _has_own_uuid(entry) and entry.uuid in uuids:
            entry = dataclasses.replace(entry, uuid=told_apart(entry.uuid))
        uuids.add(entry.uuid)
        yield entry


def _origins(path: str, contents: Contents) -> dict[int, str]:
    return {i: files.join(path, entry.file) for i, entry in contents.entries.items()}


def _schema_of(paths: list[str], parts: list[Contents], *, is_mixed: bool) -> Schema | None:
    """The schema of all that are not empty; SchemaError if there are two.

    ``is_mixed``: the union, and SchemaError where they do not fit together.
    """
    first, schema = "", None
    for path, part in zip(paths, parts, strict=True):
        if not part.entries or part.schema is None:
            continue
        if schema is None:
            first, schema = path, part.schema
        elif is_mixed:
            try:
                schema = union(schema, part.schema)
            except SchemaError as error:
                raise SchemaError(f"{path}: {error}") from None
        elif part.schema != schema:
            what = difference(schema, part.schema, first)
            remedy = 'Merge with columns "common" where some may lack columns of others.'
            if schema.paths == part.schema.paths:
                remedy = ""
            raise SchemaError(f"{path}: {what} {remedy}".rstrip())
    return schema


def _merged_metadata(parts: list[Contents]) -> dict[str, Any]:
    metadata = {"trajectory_format": parts[0].metadata["trajectory_format"]}
    seeds = [part.metadata["seed"] for part in parts if "seed" in part.metadata]
    return {**metadata, "seed": seeds[0]} if seeds else metadata


def _first(contents: Contents, number: int | None) -> Contents:
    part = Contents()
    part.schema, part.metadata = contents.schema, contents.metadata
    for entry in list(contents.entries.values())[:number]:
        part.add(entry)
    part.count_from(contents.trajectory_counter, contents.id_step)
    return part


def _shard(path: str, contents: Contents, rank: int, num_shards: int) -> Contents:
    part = checkpoint.shard(contents, rank, num_shards)
    if num_shards > 1 and not contents.metadata.keys().isdisjoint(("seed", "rng_state")):
        generator = checkpoint.generator_of(path, contents, None)
        stream = checkpoint.stream_of(generator, rank, num_shards)
        part.metadata = {**contents.metadata, "rng_state": stream.bit_generator.state}
    return part


@contextmanager
def built_directory(target: str) -> Iterator[str]:
    """A new directory that takes the place of ``target`` when the block ends; gone if it fails."""
    parent = files.directory_of(target)
    files.make_directory(parent)
    files.remove_temporaries_of(target)
    directory = files.temporary(target)
    with files.created_directory(directory):
        yield directory
        files.sync(directory)  # the names of the shards
        files.rename(directory, target)
    files.sync(parent)  # the new name
