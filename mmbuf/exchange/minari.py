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

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mmbuf import files
from mmbuf.analysis.episodes import DONE, TERMINATION, TRUNCATION, Episodes
from mmbuf.analysis.rows import TrajectoryRows, decoded
from mmbuf.analysis.tables import Tables
from mmbuf.errors import SchemaError
from mmbuf.exchange.episodes import Episode, Imported, observation, write_store
from mmbuf.exchange.target import Exported, new_directory
from mmbuf.packages import optional_package
from mmbuf.schema import Array, Column, Path, Schema
from mmbuf.transfer import Directory, OnProgress

_FLAGS = ("terminations", "truncations")
_ENDS = {TERMINATION: "terminations", DONE: "terminations", TRUNCATION: "truncations"}
_KNOWN = {"curr_obs", "next_obs", "actions", "rewards", "dones", "infos", *_FLAGS}  # else: infos


def from_minari(
    source: Directory, target: Directory, *, on_progress: OnProgress | None = None
) -> Imported:
    """Make the new store ``target`` of a data set's directory; see `episodes.write_store`.

    ``curr_obs`` and ``next_obs`` are the observations but the last and but the first; those of a
    tuple are named by their places. ``infos`` are those that came with each step. One episode at a
    time is in memory. MmbufError where Minari is not installed; FileNotFoundError.
    """
    minari = optional_package("minari", "exchange")
    path = files.absolute(source)
    inner = files.join(path, "data")
    if files.is_directory(inner):
        path = inner
    if not files.exists(files.join(path, "metadata.json")):
        raise FileNotFoundError(f"{path}: expected a Minari data set, got none.")
    for name in files.names_in(path):
        files.check_can_be_read(files.join(path, name))
    dataset = minari.MinariDataset(path)
    episodes = map(_episode, dataset.iterate_episodes())
    return write_store(episodes, int(dataset.total_episodes), target, on_progress)


def _episode(data: Any) -> Episode:
    def steps(values: Any) -> Any:
        return values[1:] if len(values) > len(data.rewards) else values

    terminations, truncations = (
        np.asarray(flags, np.bool_) for flags in (data.terminations, data.truncations)
    )
    return {
        "curr_obs": observation(_each(data.observations, lambda values: values[:-1])),
        "next_obs": observation(_each(data.observations, lambda values: values[1:])),
        "actions": _each(data.actions, lambda values: values),
        "rewards": data.rewards,
        "terminations": terminations,
        "truncations": truncations,
        "dones": terminations | truncations,
        "infos": _each(data.infos, steps),
    }


def _each(values: Any, part: Callable[[Any], Any]) -> Any:
    """``part`` of every leaf; text as lists."""
    if values is None:
        return None
    if isinstance(values, dict):
        return {name: _each(inner, part) for name, inner in values.items()}
    if isinstance(values, tuple):
        return {str(place): _each(inner, part) for place, inner in enumerate(values)}
    rows = part(values)
    if isinstance(rows, list) or rows.dtype.kind == "O":
        return [text if isinstance(text, str) else text.decode() for text in rows]
    return rows


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
    target = files.absolute(target)
    storages = optional_package("minari.dataset.minari_storage", "exchange")
    buffers = optional_package("minari.data_collector", "exchange")
    num_trajectories = num_episodes = num_rows = 0
    with new_directory(target) as directory:
        observations, actions = _spaces_of(tables)
        data = storages.MinariStorage.new(
            files.join(directory, "data"),
            observations,
            actions,
            data_format="hdf5",
            jpeg_encoding=False,
        )
        for episodes in tables.read_each(lambda rows: list(_episodes_of(rows))):
            data.update_episodes(buffers.EpisodeBuffer(**episode) for episode in episodes)
            num_trajectories += 1
            num_episodes += len(episodes)
            num_rows += sum(len(episode["rewards"]) for episode in episodes)
        data.update_metadata({"dataset_id": _id_of(target), "minari_version": minari.__version__})
    return Exported(num_trajectories, num_episodes, num_rows)


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


def _episodes_of(rows: TrajectoryRows) -> Iterator[dict[str, Any]]:
    """The arguments of an `EpisodeBuffer` for each episode."""
    num_steps, num_envs = rows.entry.num_steps, rows.entry.num_envs
    columns = {
        column.path: _steps_of(rows, position, num_steps, num_envs)
        for position, column in enumerate(rows.schema.columns)
        if column.row_bytes
    }
    episodes = Episodes(rows)
    places = zip(episodes.envs, episodes.start_steps, episodes.end_steps, strict=True)
    for (env, start, stop), ended_by in zip(places, episodes.ended_by, strict=True):
        part = {path: values[start:stop, env] for path, values in columns.items()}
        current, following, actions, infos = (
            _below(part, name) for name in ("curr_obs", "next_obs", "actions", "infos")
        )
        infos |= _nested({path: part[path] for path in part if path[0] not in _KNOWN})
        flags = {name: np.zeros(stop - start, np.bool_) for name in _FLAGS}
        for name, values in flags.items():
            if (name,) in part:
                values |= part[(name,)].reshape(stop - start, -1).any(axis=1)
        if ended_by in _ENDS:
            flags[_ENDS[ended_by]][-1] = True
        yield {
            "observations": _bare(_joined(current, following)),
            "actions": part.get(("actions",), actions),
            "rewards": part[("rewards",)].reshape(-1),
            "infos": infos,
            **flags,
        }


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


def _spaces_of(tables: Tables) -> tuple[Any, Any]:
    """The spaces of observations and actions: all that their dtypes can hold, and all text."""
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

    return space_of("curr_obs"), space_of("actions")


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
