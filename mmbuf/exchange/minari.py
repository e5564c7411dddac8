"""Minari data sets as stores and stores as those: episodes with the observation that ended them.

=========================================  ====================================================
store                                      Minari
=========================================  ====================================================
``curr_obs``, then the last ``next_obs``   observations; the only one called ``states`` is bare
``actions``                                actions
``rewards``, one number a row              rewards
``terminations``, ``truncations``          terminations, truncations
all else                                   infos
=========================================  ====================================================
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmbuf import files
from mmbuf.analysis.episodes import DONE, TERMINATION, TRUNCATION, Episodes
from mmbuf.analysis.rows import TrajectoryRows, decoded
from mmbuf.analysis.tables import Tables
from mmbuf.errors import CorruptError, MmbufError, SchemaError
from mmbuf.exchange import layouts
from mmbuf.exchange.episodes import Episode, Imported, write_store
from mmbuf.exchange.layouts import CURRENT, EPISODE, FLAGS, FOLLOWING, Leaf, Leaves
from mmbuf.exchange.target import Exported, new_directory
from mmbuf.locations import location
from mmbuf.packages import optional_package
from mmbuf.roles import Roles
from mmbuf.schema import Array, Column, Path, Schema
from mmbuf.transfer import Directory, OnProgress

_ENDS = {TERMINATION: "terminations", DONE: "terminations", TRUNCATION: "truncations"}
_INFOS = "infos"
_FLAGS = {*FLAGS, "dones"}
_KNOWN = {CURRENT, FOLLOWING, "actions", "rewards", "dones", _INFOS, *FLAGS}  # else: infos
_METADATA = ("model_weights_id", "max_episode_length")  # of a trajectory; here of its episodes
_COUNTS = {"id", "total_steps"}  # Minari's own, of an episode
_MAX_FACT_BYTES = 32 << 10  # HDF5 takes no attribute of more than 64 KiB

_SPACES = ("observation_space", "action_space")
_NOTE = "minari.json"  # beside a store: what Minari's metadata say that no trajectory does
_NOT_NOTED = {
    *("total_episodes", "total_steps", "data_format", "jpeg_encoding", "dataset_id"),
    *("minari_version", "dataset_size", "mmbuf"),
}


def from_minari(
    source: Directory,
    target: Directory,
    *,
    skip: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> Imported:
    """Make the new store ``target`` of a data set's directory; see `episodes.write_store`.

    ``curr_obs`` and ``next_obs`` are the observations but the last and but the first; those of a
    tuple are named by their places. ``infos`` are those that came with each step. What
    `to_minari` wrote gets its columns back as they were. ``skip`` as of `layouts.plan`. One episode
    at a time is in memory; all are read twice. FileNotFoundError, SchemaError for another
    directory, CorruptError for one that is damaged, MmbufError where Minari is not installed.
    """
    minari = optional_package("minari", "exchange")
    path = location("source", source)
    inner = files.join(path, "data")
    if files.is_directory(inner):
        path = inner
    dataset, raw = _opened(minari, path)

    def scan() -> Iterator[tuple[str, int, Leaves, dict[str, Any]]]:
        episodes = dataset.iterate_episodes()
        metadatas = iter(dataset.storage.get_episode_metadata(dataset.episode_indices))
        while True:
            with _reading(path, CorruptError, "a data set that can be read"):
                data, told = next(episodes, None), next(metadatas, None)
                if data is None:
                    return
                facts = dict(told or {})
                metadata = {name: _plain(facts.pop(name)) for name in _METADATA if name in facts}
                leaves = _leaves_of(data, facts)
            yield f"episode {data.id}", len(data.rewards), leaves, metadata

    empty: list[str] = []

    def full() -> Iterator[tuple[str, int, Leaves, dict[str, Any]]]:
        for episode in scan():
            if episode[1]:
                yield episode
            elif episode[0] not in empty:
                empty.append(episode[0])

    made = layouts.plan((episode[:3] for episode in full()), skip, where=path)
    columns = _columns_told(raw)

    def read() -> Iterator[Episode]:
        for _, num_steps, leaves, metadata in full():
            episode = made.episode(leaves, num_steps)
            if columns is not None:
                episode = _restored(episode, columns, num_steps)
            yield layouts.nested(episode) | metadata

    note = {name: value for name, value in raw.items() if name not in _NOT_NOTED}
    beside = {_NOTE: json.dumps(note).encode()}
    num_episodes = int(dataset.total_episodes) - len(empty)
    imported = write_store(read(), num_episodes, target, on_progress, beside=beside)
    left_out = made.left_out | dict.fromkeys(empty, "it has no step")
    return dataclasses.replace(imported, left_out=left_out)


def _opened(minari: Any, path: str) -> tuple[Any, dict[str, Any]]:
    """The data set, and its metadata with the spaces as text."""
    if not files.exists(files.join(path, "metadata.json")):
        raise FileNotFoundError(
            f"{path}: expected a Minari data set, got none. Give the directory of one, such as "
            "~/.minari/datasets/D4RL/door/human-v2."
        )
    for name in files.names_in(path):
        files.check_can_be_read(files.join(path, name))
    with _reading(path, SchemaError, "a Minari data set"):
        with files.readable(files.join(path, "metadata.json")) as file:
            raw = dict(json.loads(file.read()))
        if "data_format" not in raw:
            raise SchemaError(
                f"{path}: expected a Minari data set, got a directory whose metadata.json is "
                "another's."
            )
        dataset = minari.MinariDataset(path)
        serialize = optional_package("minari.serialization", "exchange").serialize_space
        raw |= {name: serialize(getattr(dataset, name)) for name in _SPACES}
    return dataset, raw


@contextmanager
def _reading(path: str, kind: type[MmbufError], expected: str) -> Iterator[None]:
    """Whatever Minari raises, assertions too, as one error that names the data set."""
    try:
        yield
    except (MmbufError, PermissionError):
        raise
    except Exception as error:
        said = str(error).split("\n")[0] or "no reason given"
        what = f"expected {expected}, got {type(error).__name__}: {said}"
        raise (
            CorruptError(path, what) if kind is CorruptError else kind(f"{path}: {what}")
        ) from error


def _leaves_of(data: Any, facts: dict[str, Any]) -> Leaves:
    num_steps = len(data.rewards)
    leaves: Leaves = {}
    for name, values in (
        (CURRENT, data.observations),
        ("actions", data.actions),
        ("rewards", data.rewards),
        ("terminations", np.asarray(data.terminations, np.bool_)),
        ("truncations", np.asarray(data.truncations, np.bool_)),
        (_INFOS, data.infos),
    ):
        for path, found in _flat(values, (name,)):
            if name == _INFOS and _length_of(found) == num_steps + 1:
                found = found[1:]  # the first came with the reset
            target = (CURRENT, "states") if path == (CURRENT,) else path
            leaves[target] = _leaf(path, found)
    leaves.update(
        (path, leaf) for path, leaf in layouts.attributes(facts) if path[1] not in _COUNTS
    )
    return leaves


def _flat(values: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every leaf, that of a tuple by its place; text as lists."""
    if values is None:
        return
    if isinstance(values, Mapping):
        for name, inner in values.items():
            yield from _flat(inner, (*path, str(name)))
    elif isinstance(values, tuple):
        for place, inner in enumerate(values):
            yield from _flat(inner, (*path, str(place)))
    else:
        yield path, _as_text(values)


def _as_text(values: Any) -> Any:
    if isinstance(values, bytes):
        return values.decode("utf-8", "surrogateescape")
    if isinstance(values, np.ndarray) and values.dtype.kind in "OSU" and values.ndim == 1:
        values = values.tolist()
    if isinstance(values, list) and all(isinstance(each, (str, bytes)) for each in values):
        return [_as_text(each) for each in values]
    return values


def _length_of(values: Any) -> int | None:
    return None if isinstance(values, str) or not np.ndim(values) else len(values)


def _leaf(path: Path, values: Any) -> Leaf:
    name = "/".join(("observations", *path[1:]) if path[0] == CURRENT else path)
    if isinstance(values, str):
        return Leaf(name, None, "text", (), lambda: values)
    if isinstance(values, list) and all(isinstance(each, str) for each in values):
        return Leaf(name, len(values), "text", (), lambda: values)
    array = np.asarray(values)
    dtype = str(array.dtype) if array.dtype.kind in "biufc" else ""
    return Leaf(name, _length_of(array), dtype, array.shape[1:], lambda: array)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _columns_told(raw: Mapping[str, Any]) -> list[Column] | None:
    """The columns of the store that was written as this data set."""
    try:
        return [
            Column(tuple(map(str, c["path"])), str(c["dtype"]), tuple(map(int, c["row_shape"])))
            for c in raw["mmbuf"]["columns"]
        ]
    except (LookupError, TypeError, ValueError):
        return None


def _restored(
    episode: dict[Path, Any], columns: Sequence[Column], num_steps: int
) -> dict[Path, Any]:
    """An episode with the columns that its store had: their names, and the shapes of their rows."""
    found: dict[Path, Any] = {}
    for column in columns:
        place = next((p for p in (column.path, (_INFOS, *column.path)) if p in episode), None)
        if place is None:
            continue
        values = episode.pop(place)
        if not column.is_text and not isinstance(values, list):
            values = values.reshape(num_steps, *column.row_shape)
            if column.path[0] in _FLAGS and column.viewed_as is None:
                values = values.astype(column.storage)  # Minari has only bools
        found[column.path] = values
    return found | {path: values for path, values in episode.items() if path[0] not in _FLAGS}


def to_minari(tables: Tables, target: Directory, *, wide: tuple[str, ...] = ()) -> Exported:
    """Write the episodes into the new directory ``target``, as ``minari.MinariDataset`` opens it.

    Every column is written, so none is to be named as ``wide``; bfloat16 and float8 as float32.
    Within an episode what a step led to is taken to be what the next one began with.
    Of ``dones`` the ends are kept: as terminations, unless the other flags tell them to be
    truncations. A trajectory at a time is in memory.

    SchemaError where ``next_obs`` has not the columns of ``curr_obs``, or where there are no
    actions or rewards; else as `parquet.to_parquet`. MmbufError where Minari is not installed.
    """
    minari = optional_package("minari", "exchange")
    if wide:
        raise SchemaError(f"wide: expected none, since all columns are written, got {wide[0]!r}.")
    where = tables.stores[0]
    if tables.schema is None:
        raise SchemaError(f"{where}: expected a trajectory, got an empty store.")
    _check(tables.schema, where)
    target = location("target", target)
    storages = optional_package("minari.dataset.minari_storage", "exchange")
    buffers = optional_package("minari.data_collector", "exchange")
    num_trajectories = num_episodes = num_rows = 0
    with new_directory(target) as directory:
        note = _note_of(tables)
        observations, actions = _spaces_of(tables, note)
        data = storages.MinariStorage.new(
            files.join(directory, "data"),
            observations,
            actions,
            data_format="hdf5",
            jpeg_encoding=False,
        )
        for found in tables.read_each(lambda rows: list(_episodes_of(rows, tables.roles))):
            episodes = [
                episode
                | {
                    "observations": _of_space(observations, episode["observations"]),
                    "actions": _of_space(actions, episode["actions"]),
                }
                for episode, _ in found
            ]
            data.update_episodes(buffers.EpisodeBuffer(**episode) for episode in episodes)
            data.update_episode_metadata(
                [facts for _, facts in found], range(num_episodes, num_episodes + len(found))
            )
            num_trajectories += 1
            num_episodes += len(episodes)
            num_rows += sum(len(episode["rewards"]) for episode in episodes)
        data.update_metadata(
            {
                name: set(v) if name in _SETS else v
                for name, v in note.items()
                if name not in _SPACES
            }
            | {
                "dataset_id": _id_of(target),
                "minari_version": minari.__version__,
                "mmbuf": {"columns": [_told(column) for column in tables.schema.columns]},
            }
        )
    return Exported(num_trajectories, num_episodes, num_rows)


_SETS = {"author", "author_email"}  # of which Minari's own reading makes sets


def _told(column: Column) -> dict[str, Any]:
    return {
        "path": list(column.path),
        "dtype": column.dtype,
        "row_shape": list(column.row_shape),
    }


def _note_of(tables: Tables) -> dict[str, Any]:
    """What `from_minari` wrote beside the stores; nothing unless beside all of them, and alike."""
    notes = []
    for store in tables.stores:
        path = files.join(store, _NOTE)
        data = files.read(path) if files.is_file(path) else b"{}"
        try:
            notes.append(dict(json.loads(data)))
        except (ValueError, TypeError) as error:
            raise CorruptError(path, f"expected Minari's metadata, got {error}.") from error
    return notes[0] if all(note == notes[0] for note in notes) else {}


def _check(schema: Schema, where: str) -> None:
    kinds = {column.path: (column.dtype, column.row_shape) for column in schema.columns}
    current, following = (
        {path[1:]: kind for path, kind in kinds.items() if path[0] == name}
        for name in ("curr_obs", "next_obs")
    )
    if not current or current != following:
        raise SchemaError(
            f"{where}: expected curr_obs, and next_obs with the same columns, whose last row ends "
            f"an episode of Minari's; got {schema}."
        )
    if kinds.get(("rewards",), ("", None))[1] not in ((), (1,)):
        raise SchemaError(f"{where}: expected rewards of one number a row, got {schema}.")
    if "actions" not in {path[0] for path in kinds}:
        raise SchemaError(f"{where}: expected actions, got {schema}.")


def _id_of(target: str) -> str:
    """The directory's name, made one that Minari takes."""
    name = re.sub(r"[^-_a-zA-Z0-9]", "_", files.name_of(target))
    return name if re.search(r"-v[0-9]+$", name) else f"{name}-v0"


def _episodes_of(
    rows: TrajectoryRows, roles: Roles
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The arguments of an `EpisodeBuffer` for each episode, and what its metadata are to say."""
    num_steps, num_envs = rows.entry.num_steps, rows.entry.num_envs
    columns = {
        column.path: _steps_of(rows, position, num_steps, num_envs)
        for position, column in enumerate(rows.schema.columns)
        if column.row_bytes
    }
    episodes = Episodes(rows, roles)
    places = zip(episodes.envs, episodes.start_steps, episodes.end_steps, strict=True)
    for (env, start, stop), ended_by in zip(places, episodes.ended_by, strict=True):
        part = {path: values[start:stop, env] for path, values in columns.items()}
        current, following, actions, infos = (
            _below(part, name) for name in ("curr_obs", "next_obs", "actions", "infos")
        )
        facts = {
            "/".join(path[1:]): values[0] for path, values in part.items() if _is_fact(path, values)
        }
        for name in _METADATA:
            if getattr(rows.entry, name):
                facts[name] = getattr(rows.entry, name)
        others = _nested(
            {
                path: values
                for path, values in part.items()
                if path[0] not in _KNOWN and not _is_fact(path, values)
            }
        )
        for name in infos.keys() & others.keys():
            raise SchemaError(
                f"{rows.directories[0]}: column {name!r}: expected none, since 'infos.{name}' has "
                "its place in Minari's infos, got both."
            )
        infos |= others
        flags = {name: np.zeros(stop - start, np.bool_) for name in FLAGS}
        for name, values in flags.items():
            if (name,) in part:
                values |= part[(name,)].reshape(stop - start, -1).any(axis=1)
        if ended_by in _ENDS:
            flags[_ENDS[ended_by]][-1] = True
        episode = {
            "observations": _bare(_joined(current, following)),
            "actions": part.get(("actions",), actions),
            "rewards": part[("rewards",)].reshape(-1),
            "infos": infos,
            **flags,
        }
        yield episode, facts


def _is_fact(path: Path, values: Any) -> bool:
    """Whether a column's value of an episode can be metadata of it; else it is an info."""
    if path[0] != EPISODE or path[1:2] in ((), *((name,) for name in (*_COUNTS, *_METADATA))):
        return False
    return not any("/" in key for key in path) and values[0:1].nbytes <= _MAX_FACT_BYTES


def _of_space(space: Any, values: Any) -> Any:
    """Values as a space has them: what it holds as a tuple, by places."""
    kind = type(space).__name__
    if kind == "Dict":
        return {name: _of_space(inner, values[name]) for name, inner in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_of_space(inner, values[str(i)]) for i, inner in enumerate(space.spaces))
    return values


def _steps_of(rows: TrajectoryRows, position: int, num_steps: int, num_envs: int) -> Array:
    """A column as ``[T, B, *S]``; of text the strings, as objects."""
    column = rows.schema.columns[position]
    if column.is_text:
        strings = np.array(rows.array(position).to_pylist(), object)
        return strings.reshape(num_steps, num_envs)
    values = rows.rows(position)
    if column.viewed_as is not None:
        values = decoded(column, values)
    return values.reshape(num_steps, num_envs, *column.row_shape)


def _below(columns: Mapping[Path, Any], name: str) -> dict[str, Any]:
    """The columns below a name, in a nest of dicts."""
    return _nested({path[1:]: columns[path] for path in columns if path[0] == name and path[1:]})


def _nested(columns: Mapping[Path, Any]) -> dict[str, Any]:
    nest: dict[str, Any] = {}
    for path, values in columns.items():
        inner = nest
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        is_text = isinstance(values, np.ndarray) and values.dtype.kind == "O"
        inner[path[-1]] = values.tolist() if is_text else values
    return nest


def _joined(current: Any, following: Any) -> Any:
    """All observations, and the one that the last step led to."""
    if isinstance(current, dict):
        return {name: _joined(current[name], following[name]) for name in current}
    if isinstance(current, list):
        return [*current, following[-1]]
    return np.concatenate([current, following[-1:]])


def _bare(observations: dict[str, Any]) -> Any:
    """An only one that is called ``states``, as `from_minari` calls one that has no name."""
    is_bare = list(observations) == ["states"] and not isinstance(observations["states"], dict)
    return observations["states"] if is_bare else observations


def _spaces_of(tables: Tables, note: Mapping[str, Any]) -> tuple[Any, Any]:
    """The spaces of observations and actions: those of the note, where the columns fit into them.

    Else all that their dtypes can hold, and all text.
    """
    spaces = optional_package("gymnasium.spaces", "exchange")
    assert tables.schema is not None
    columns = [column for column in tables.schema.columns if column.row_bytes]
    texts = [i for i, c in enumerate(tables.schema.columns) if c.is_text]
    strings = {""}
    if texts:
        for found in tables.read_each(
            lambda rows: [text for i in texts for text in rows.array(i).dictionary.to_pylist()]
        ):
            strings.update(found)
    text = spaces.Text(max(1, *map(len, strings)), min_length=0, charset="".join(strings) or " ")

    def space_of(name: str) -> Any:
        found = {c.path: text if c.is_text else _box(spaces, c) for c in columns}
        bare = found.get((name,))
        return _as_space(spaces, _bare(_below(found, name))) if bare is None else bare

    made = space_of(CURRENT), space_of("actions")
    if not all(isinstance(note.get(name), str) for name in _SPACES):
        return made
    deserialize = optional_package("minari.serialization", "exchange").deserialize_space
    with _reading(files.join(tables.stores[0], _NOTE), CorruptError, "spaces of Minari's"):
        noted = [deserialize(note[name]) for name in _SPACES]
    return tuple(
        before if _fits(before, space, strings) else space
        for before, space in zip(noted, made, strict=True)
    )


def _fits(noted: Any, made: Any, strings: set[str]) -> bool:
    """Whether ``noted`` can be the space of the columns, of which ``made`` is the widest."""
    inner = getattr(noted, "spaces", None)
    if inner is not None:
        names = list(inner) if isinstance(inner, Mapping) else list(map(str, range(len(inner))))
        others = getattr(made, "spaces", None)
        if not isinstance(others, Mapping) or set(others) != set(names):
            return False
        parts = inner.values() if isinstance(inner, Mapping) else inner
        pairs = zip(names, parts, strict=True)
        return all(_fits(part, others[name], strings) for name, part in pairs)
    if type(made).__name__ == "Text":
        return type(noted).__name__ == "Text" and all(map(noted.contains, strings - {""}))
    return bool(noted.dtype == made.dtype and noted.shape == made.shape)


def _as_space(spaces: Any, nest: Any) -> Any:
    if not isinstance(nest, dict):
        return nest
    return spaces.Dict({name: _as_space(spaces, inner) for name, inner in nest.items()})


def _box(spaces: Any, column: Column) -> Any:
    dtype = np.dtype(np.float32 if column.viewed_as is not None else column.storage)
    if column.dtype == "bool":
        low, high, dtype = 0.0, 1.0, np.dtype(np.bool_)
    elif dtype.kind == "f":
        low, high = -np.inf, np.inf
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        raise SchemaError(
            f"column {column.name!r}: expected numbers Minari has, got {column.dtype}."
        )
    return spaces.Box(low, high, column.row_shape, dtype)
