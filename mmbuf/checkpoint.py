"""Checkpoints: a directory of trajectory files and an index that is the truth of it.

A checkpoint has no journal. Its files are hard links to those of the live store wherever the file
system allows, since a published file never changes. Saving is atomic::

    a new path       built in a hidden directory beside it, synced, renamed
    an existing one  new files are linked in and synced; ``trajectory_index.json`` is replaced: the
                     moment it becomes the new checkpoint; what it no longer lists is unlinked

A name that a file had in a directory is never that of another trajectory there, though it be gone:
somebody may still read by that name. A name made of the id alone is for ids that are new there.

``.saving.json`` lists what an unfinished save has put into an existing directory or was about to
unlink there: the next one takes away what the index does not list. Until it is gone
``metadata.json`` may be older than the index.

Whoever changes an existing directory, by a save or a repair, holds ``.checkpoint.lock`` meanwhile.
It is removed at the end; one that is left was a killed process's, and locks nobody out.

`read` opens whatever there is: a live store by its journal, a checkpoint by its index, a directory
of RLinf's by its files. Here, and not in the index, since only the files know their schema there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from mmbuf import arguments, files, index, shield, storage
from mmbuf.entry import MAX_NUMBER, Entry
from mmbuf.errors import BAD_JSON, CorruptError, LockedError, MmbufError, SchemaError, WriteError
from mmbuf.index import Contents
from mmbuf.schema import Schema

# Brings a trajectory to a path in a format; its entry there.
Put = Callable[[Entry, str, str], Entry]

_LEGACY_INDEX = "trajector_index.json"
SAVING = ".saving.json"
LOCK = ".checkpoint.lock"
_KEPT = ("trajectory_format", "seed")
_USED_BELOW = "names_used_below"
PATIENCE_S = 10.0  # with a directory that changes all the time
_LOCK_PATIENCE_S = 10.0  # with another who saves to the same directory
_log = logging.getLogger("mmbuf")

_T = TypeVar("_T")


def save(
    directory: str,
    contents: Contents,
    metadata: dict[str, Any],
    put: Put,
    trajectory_format: str | None,
    synced: Collection[str] = (),
    in_use: Collection[str] = (),
) -> None:
    """Save ``contents`` to ``directory`` and bring it to the disk itself.

    ``put(entry, path, format)`` brings a trajectory's file to ``path``, complete when it appears.
    ``trajectory_format`` None: each file's own, and ``metadata["trajectory_format"]`` for what has
    no file yet. ``synced`` are the uuids of those whose files are on the disk itself: links to them
    need no sync, which would cost more than all the rest. ``in_use`` are files in ``directory``
    that somebody still reads: they stay until a later save, listed or not. OSError as the system
    gives it, LockedError where another does not come to the end of its save; then the old
    checkpoint is whole.
    """
    default = trajectory_format or str(metadata["trajectory_format"])
    wanted = {
        entry.uuid: trajectory_format or entry.format or default
        for entry in contents.entries.values()
    }
    formats = set(wanted.values())
    common = formats.pop() if len(formats) == 1 else default
    metadata = {**metadata, "trajectory_format": common}
    metadata.pop(_USED_BELOW, None)  # of the directory that it was read from
    if files.exists(directory):
        _check_can_be_saved_into(directory)
        with locked(directory):
            _save_into(directory, contents, metadata, put, wanted, synced, in_use)
        return
    parent = files.directory_of(directory)
    files.make_directory(parent)
    files.remove_temporaries_of(directory)
    temporary = files.temporary(directory)
    with files.created_directory(temporary):
        saved = _saved(contents)
        for entry in contents.entries.values():
            format_name = wanted[entry.uuid]
            file = _stem(entry) + storage.FORMATS[format_name].EXTENSION
            entry = dataclasses.replace(entry, file=file)
            saved.add(_placed(temporary, entry, put, format_name, synced))
        _commit(temporary, saved, contents, metadata)
        files.rename(temporary, directory)
    files.sync(parent)  # the new name


def _check_can_be_saved_into(directory: str) -> None:
    if not files.is_directory(directory):
        raise NotADirectoryError(f"save_path: expected a directory, got a file: {directory}")
    if files.exists(files.join(directory, index.JOURNAL)):
        raise FileExistsError(
            f"save_path: expected a checkpoint or a new path, got the live store {directory}."
        )


@contextmanager
def locked(directory: str) -> Iterator[None]:
    """Keep all others from saving into ``directory`` and from repairing it meanwhile.

    Waits for who does so now, be it another thread; LockedError if that does not end.
    """
    lock = _acquired(files.join(directory, LOCK))
    try:
        yield
    finally:
        lock.remove()


def _acquired(path: str) -> files.WriterLock:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return files.WriterLock(path)
        except LockedError as error:
            if time.monotonic() > deadline:
                raise held_by_another(path, error) from None
        time.sleep(shield.LOOK_S)
        shield.check()


def held_by_another(path: str, error: LockedError) -> LockedError:
    """The error that says who saves to a checkpoint or repairs it, by that of its lock's file."""
    who = "another process" if error.pid is None else f"process {error.pid} on {error.host}"
    return LockedError(
        f"{files.directory_of(path)}: expected nobody else who saves or repairs there, but {who} "
        f"does. Try again when it has ended, or save to another path.",
        pid=error.pid,
        host=error.host,
    )


def _save_into(
    directory: str,
    contents: Contents,
    metadata: dict[str, Any],
    put: Put,
    wanted: dict[str, str],
    synced: Collection[str],
    in_use: Collection[str],
) -> None:
    files.remove_temporaries(directory)
    before = _old_contents(directory)
    listed = list(before.entries.values())
    old = {entry.uuid: entry for entry in listed}
    used_below = max(before.trajectory_counter, _used_below(before.metadata))
    if used_below > contents.trajectory_counter:
        metadata = {**metadata, _USED_BELOW: used_below}
    left = _take_back_unfinished(directory, {entry.file for entry in listed}, in_use)
    here = set(files.names_in(directory))
    dropped = here.intersection(entry.file for entry in listed) | left
    saved = _saved(contents)
    new: list[tuple[Entry, str]] = []
    for entry in contents.entries.values():
        format_name = wanted[entry.uuid]
        known = old.get(entry.uuid)
        if known is not None and known.format == format_name and known.file in here:
            dropped.discard(known.file)
            saved.add(dataclasses.replace(known, trajectory_id=entry.trajectory_id))
        else:
            file = _free_name(_stem(entry, used_below, known), entry, format_name, here)
            here.add(file)
            new.append((dataclasses.replace(entry, file=file), format_name))
            saved.add(entry)  # in its order; completed below
    # Where no file changes too: it also tells why metadata.json may be older than the index.
    names = [*(entry.file for entry, _ in new), *sorted(dropped)]
    files.replace(files.join(directory, SAVING), [json.dumps(names).encode()])
    for entry, format_name in new:
        saved.entries[entry.trajectory_id] = _placed(directory, entry, put, format_name, synced)
    _commit(directory, saved, contents, metadata)
    for name in dropped.difference(in_use):
        files.remove(files.join(directory, name))
    if dropped.isdisjoint(in_use):
        files.unlink(files.join(directory, SAVING))


def _placed(
    directory: str, entry: Entry, put: Put, format_name: str, synced: Collection[str]
) -> Entry:
    """The entry, with its file in ``directory`` and on the disk itself."""
    shield.check()
    path = files.join(directory, entry.file)
    placed = put(entry, path, format_name)
    if entry.uuid not in synced or placed.format != entry.format:
        files.sync_whole(path)  # before the index speaks of it
    # Its number stays: adapters give files of equal bytes one uuid, and `put` goes by that.
    return dataclasses.replace(
        entry, format=placed.format, size_bytes=placed.size_bytes, parts=placed.parts
    )


def _saved(contents: Contents) -> Contents:
    saved = Contents()
    saved.schema = contents.schema
    return saved


def _commit(directory: str, saved: Contents, contents: Contents, metadata: dict[str, Any]) -> None:
    files.sync(directory)  # the names of the files, which the index is about to speak of
    saved.count_from(contents.trajectory_counter, contents.id_step)
    index.write_snapshots(directory, saved, metadata)
    files.sync(directory)  # the index's own name


def _old_contents(directory: str) -> Contents:
    """What an earlier save lists; nothing where no index can be read: it is to be replaced."""
    try:
        return index.read(directory)[0]
    except (FileNotFoundError, MmbufError):
        return Contents()


def _used_below(metadata: dict[str, Any]) -> int:
    """The id that names in the directory were below, where that is more than the counter says."""
    try:
        return index.checked_counter(metadata.get(_USED_BELOW, 0))
    except BAD_JSON:
        return 0


def _take_back_unfinished(directory: str, listed: set[str], in_use: Collection[str]) -> set[str]:
    """Remove what an earlier save put here in vain, or left to be removed; what is still in use."""
    path = files.join(directory, SAVING)
    if not files.exists(path):
        return set()
    unlisted = index.names_listed_in(path).intersection(files.names_in(directory)) - listed
    for name in unlisted.difference(in_use):
        files.remove(files.join(directory, name))
    left = unlisted.intersection(in_use)
    if not left:
        files.unlink(path)
    return left


def _stem(entry: Entry, used_below: int = 0, known: Entry | None = None) -> str:
    """The name of a new file, without its extension: one that no other trajectory ever had.

    Ids below ``used_below`` may have been others' in that directory: of these the uuid becomes part
    of the name. ``known`` is what the directory has of the trajectory, in another format.
    """
    stem = files.trajectory_name(entry.trajectory_id, entry.model_weights_id)
    if known is not None and known.file.startswith(f"{stem}."):
        return known.file.rpartition(".")[0]
    return stem if entry.trajectory_id >= used_below else f"{stem}.{entry.uuid[:8]}"


def _free_name(stem: str, entry: Entry, format_name: str, taken: set[str]) -> str:
    """A name that no other file has: what is published is never overwritten."""
    extension = storage.FORMATS[format_name].EXTENSION
    mark = f".{entry.uuid[:8]}"
    marked = stem if stem.endswith(mark) else stem + mark
    stems = itertools.chain((stem, marked), (f"{marked}-{n}" for n in itertools.count(1)))
    return next(name for stem in stems if (name := stem + extension) not in taken)


def read(directory: str) -> Contents:
    """What is in a store, a checkpoint or a directory of RLinf's. Read-only.

    FileNotFoundError where there is none of them. Of RLinf's, whose index may list trajectories
    that were evicted, only those with a file; the ids of the others are named in one warning.
    """
    contents = read_rlinf(directory)
    if contents is not None:
        return contents
    if any(files.exists(files.join(directory, name)) for name in (index.JOURNAL, index.INDEX)):
        return index.read(directory)[0]
    raise missing(directory)


def missing(directory: str) -> FileNotFoundError:
    """The error that says that there is no store."""
    if not files.is_directory(directory):
        return files.no_store(directory)
    return FileNotFoundError(
        f"{directory}: expected a store or a checkpoint, got neither {index.JOURNAL} "
        f"nor {index.INDEX}."
    )


def read_rlinf(directory: str, damage: list[CorruptError] | None = None) -> Contents | None:
    """What is in a directory of RLinf's; None where something else is.

    Trajectories whose files are damaged are left out if a list is given that takes the errors.
    """
    if not files.exists(files.join(directory, index.JOURNAL)):
        for name in (index.INDEX, _LEGACY_INDEX):
            path = files.join(directory, name)
            if files.exists(path):
                snapshot = _json(path)
                is_ours = "version" in snapshot or "crc" in snapshot
                return None if is_ours else _read_rlinf(directory, path, snapshot, damage)
    return None


def _json(path: str) -> dict[str, Any]:
    try:
        found = json.loads(files.read(path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(path, f"expected JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CorruptError(path, f"expected a JSON object, got {type(found).__name__}.")
    return found


def _read_rlinf(
    directory: str, path: str, snapshot: dict[str, Any], damage: list[CorruptError] | None
) -> Contents:
    metadata_path = files.join(directory, index.METADATA)
    metadata = _json(metadata_path) if files.exists(metadata_path) else {}
    contents = Contents()
    contents.metadata = metadata
    missing = []
    here = set(files.names_in(directory))
    try:
        extension = storage.FORMATS[str(metadata.get("trajectory_format", "pt"))].EXTENSION
        for trajectory_id in snapshot["trajectory_id_list"]:
            trajectory_id = arguments.whole("trajectory_id", trajectory_id, bound=MAX_NUMBER)
            info = snapshot["trajectory_index"][str(trajectory_id)]
            weights_id = arguments.text("model_weights_id", info["model_weights_id"])
            name = f"trajectory_{trajectory_id}_{weights_id}{extension}"
            if name not in here:
                missing.append(trajectory_id)
                continue
            shield.check()
            file = files.join(directory, name)
            try:
                entry, schema = _described(file, name, contents)
            except (CorruptError, SchemaError) as error:
                if damage is None:
                    raise
                if not isinstance(error, CorruptError):
                    error = CorruptError(file, str(error).removeprefix(f"{file}: "))
                damage.append(error)
                continue
            contents.add(
                dataclasses.replace(
                    entry,
                    trajectory_id=trajectory_id,
                    max_episode_length=arguments.whole(
                        "max_episode_length", info["max_episode_length"], bound=MAX_NUMBER
                    ),
                    model_weights_id=weights_id,
                    schema=schema,
                )
            )
        contents.count_from(index.checked_counter(metadata.get("trajectory_counter", 0)), 1)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, MmbufError):
            raise
        raise CorruptError(path, f"not an index: {error!r}.") from error
    contents.unsynced.clear()
    if missing:
        _log.warning("%s: trajectories %s are listed and have no file.", directory, missing)
    return contents


def _described(path: str, name: str, contents: Contents) -> tuple[Entry, Schema]:
    """A file's entry and schema; SchemaError unless it fits to those before it."""
    format_ = storage.format_of(name)
    assert format_ is not None
    entry, schema, _ = format_.describe(path, name)
    try:
        return entry, contents.schemas[contents.schemas.announce(schema)]
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from None


def metadata_of(directory: str, contents: Contents) -> dict[str, Any]:
    """What the index says beside its entries; of a live store its format and seed.

    Not where a live store's generator is: what its snapshot says may be older than that.
    """
    path = files.join(directory, index.METADATA)
    if contents.metadata or not files.exists(path):
        return contents.metadata
    return {key: value for key, value in _json(path).items() if key in _KEPT}


def check_files(directory: str, contents: Contents) -> None:
    """CorruptError unless every trajectory has a file of the right size and all of its columns."""
    here = set(files.names_in(directory))
    entries = contents.entries.values()
    if contents.schema is not None:
        storage.check_entries(contents.schema, [(entry, directory) for entry in entries])
    for entry in entries:
        path = files.join(directory, entry.file)
        if entry.file not in here:
            raise CorruptError(path, "expected a trajectory's file, got none.")
        size = storage.size_of(path, entry)
        if size != entry.size_bytes:
            raise CorruptError(path, f"expected {entry.size_bytes} bytes, got {size}.")


def read_whole(directory: str) -> Contents:
    """As `read`, of files that are all there (`check_files`)."""

    def look() -> Contents:
        contents = read(directory)
        check_files(directory, contents)
        return contents

    return settled(directory, look)


def settled(directory: str, look: Callable[[], _T]) -> _T:
    """What ``look()`` gives of a directory; again where somebody has changed its index meanwhile.

    What an index lists that was just replaced may be gone.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = state_of(directory)
        try:
            return look()
        except (CorruptError, FileNotFoundError):
            if state_of(directory) == before or time.monotonic() > deadline:
                raise


def state_of(directory: str) -> list[files.Signature | None]:
    """What changes with every change of a directory's index."""
    states: list[files.Signature | None] = []
    for name in (index.JOURNAL, index.INDEX):
        try:
            states.append(files.signature(files.join(directory, name)))
        except OSError:
            states.append(None)
    return states


def shard(contents: Contents, rank: int, world_size: int) -> Contents:
    """The part of one rank: contiguous, the first ``remainder`` ranks one longer.

    Its ids go on so that no two ranks give the same one.
    """
    ids = list(contents.entries)
    share, remainder = divmod(len(ids), world_size)
    start = rank * share + min(rank, remainder)
    part = Contents()
    part.schema = contents.schema
    part.metadata = contents.metadata
    for trajectory_id in ids[start : start + share + (rank < remainder)]:
        part.add(contents.entries[trajectory_id])
    step = contents.id_step
    if world_size * step >= MAX_NUMBER:
        raise MmbufError(f"world_size: expected ids below {MAX_NUMBER}, got steps of {step}.")
    counter = contents.trajectory_counter + rank * step
    index.check_can_count(counter)
    part.count_from(counter, world_size * step)
    return part


def generator_of(path: str, contents: Contents, seed: Any) -> np.random.Generator:
    """The generator as it was saved; else from the saved seed, else ``seed``."""
    metadata = contents.metadata
    try:
        generator = np.random.default_rng(arguments.seed(metadata.get("seed", seed)))
        if "rng_state" in metadata:
            generator.bit_generator.state = metadata["rng_state"]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CorruptError(path, f"not the state of a generator: {error!r}.") from error
    return generator


def stream_of(generator: np.random.Generator, rank: int, world_size: int) -> np.random.Generator:
    """A stream for one rank, decided by the state of ``generator``, which does not change."""
    entropy = generator.bit_generator.state["state"]["state"]
    seeds = np.random.SeedSequence(entropy, spawn_key=(world_size, rank))
    return np.random.default_rng(seeds)


@contextmanager
def brought_in(
    directory: str, source: str, contents: Contents, used_below: int
) -> Iterator[Contents]:
    """Link or copy the files of ``contents`` from ``source`` into the store ``directory``.

    Nothing there is written over, and no name is used again that another file had: the store has
    given the ids below ``used_below``. What was brought is taken back if that fails, or if the
    block does so by a WriteError or is cancelled: the journal does not speak of it then. Until the
    end of the block it is in a list, by which the next writer does so after a killed process.
    """
    here = set(files.names_in(directory))
    brought = Contents()
    brought.schema = contents.schema
    new: list[tuple[Entry, str]] = []  # and its name in the store
    for entry in contents.entries.values():
        shield.check()
        file = entry.file
        if not files.is_same(files.join(source, file), files.join(directory, file)):
            file = _free_name(_stem(entry, used_below), entry, entry.format, here)
            here.add(file)
            new.append((entry, file))
        brought.add(dataclasses.replace(entry, file=file))
    made: list[str] = []
    try:
        if new:
            names = [file for _, file in new]
            files.replace(files.join(directory, index.LOADING), [json.dumps(names).encode()])
        for entry, file in new:
            shield.check()
            schema = entry.schema or contents.schema
            assert schema is not None
            target = files.join(directory, file)
            storage.link(files.join(source, entry.file), entry, schema, target)
            made.append(target)
        # Not before all are here: a save may take them away from there. The journal's line may
        # survive a power loss at once, and takes all others away.
        for entry in brought.entries.values():
            shield.check()
            files.sync_whole(files.join(directory, entry.file))
        files.sync(directory)  # for the same reason: the names
    except BaseException:
        _take_back(directory, made)
        raise
    brought.count_from(contents.trajectory_counter, contents.id_step)
    try:
        yield brought
    except (WriteError, shield.CancelledError):  # the call of the writer has not begun, or failed
        _take_back(directory, made)
        raise
    with suppress(OSError):  # the load holds; the next writer finds its files in the journal
        files.unlink(files.join(directory, index.LOADING))


def _take_back(directory: str, made: list[str]) -> None:
    for path in made:
        files.remove(path)
    files.unlink(files.join(directory, index.LOADING))
