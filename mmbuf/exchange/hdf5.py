"""HDF5 files as stores: of robomimic, Isaac Lab, ManiSkill, ALOHA and ACT, and D4RL.

==========================  ==================================  ====================================
layout                      file                                note
==========================  ==================================  ====================================
robomimic, Isaac Lab        ``data/demo_0`` and so on: ``obs``, ``mask/NAME`` lists episodes:
                            ``actions``, ...                    ``filter_key``
ManiSkill                   ``traj_0`` and so on                a JSON of the same name beside it
                                                                says more of each episode
ALOHA, ACT                  ``observations``, ``action``: one   images that are compressed are
                            episode a file                      decoded, as ``cv2.imdecode`` does
D4RL                        all episodes in a row:              cut where ``terminals`` or
                            ``observations``, ``terminals``     ``timeouts`` are set
==========================  ==================================  ====================================

A directory is all HDF5 files in it, by their names. What becomes of names, of observations of T + 1
rows and of values of episodes is said in `layouts`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mmbuf import files
from mmbuf.errors import CorruptError, MmbufError, SchemaError
from mmbuf.exchange import layouts
from mmbuf.exchange.episodes import Episode, Imported, write_store
from mmbuf.exchange.layouts import EPISODE, Leaf, Leaves
from mmbuf.locations import location
from mmbuf.packages import optional_package
from mmbuf.schema import Path
from mmbuf.transfer import Directory, OnProgress

_ENDINGS = (".hdf5", ".h5", ".hdf")
_COUNTS = {"num_samples", "total", "elapsed_steps", "episode_id"}  # attributes that T says, or none
_D4RL = {"observations", "actions", "rewards", "terminals"}
_NO_COLUMNS = {"metadata"}  # of D4RL
_LENGTHS = {"compress_len"}  # of ALOHA's compressed images
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG\r\n")
_KNOWN = (
    "data/demo_0 and so on (robomimic, Isaac Lab), traj_0 and so on (ManiSkill), observations and "
    "action (ALOHA), or observations, actions, rewards and terminals (D4RL)"
)


class _Group(NamedTuple):
    """Where one episode is: a group of a file, and what was said of it elsewhere."""

    path: str  # of the file
    name: str  # of the group; empty: the whole file
    facts: dict[str, Any]

    @property
    def told(self) -> str:
        return self.name or files.name_of(self.path)


class _Shelf:
    """The files, of which one at a time is open: a directory may have thousands."""

    def __init__(self, h5py: Any) -> None:
        self._h5py = h5py
        self._open = ExitStack()
        self._path = ""
        self._file: Any = None

    def file(self, path: str) -> Any:
        if path != self._path:
            self.close()
            self._file = self._open.enter_context(_opened(self._h5py, path))
            self._path = path
        return self._file

    def group(self, episode: _Group) -> Any:
        file = self.file(episode.path)
        return file[episode.name] if episode.name else file

    def close(self) -> None:
        self._path = ""
        self._open.close()


def from_hdf5(
    source: Directory,
    target: Directory,
    *,
    skip: Sequence[str] = (),
    filter_key: str | None = None,
    on_progress: OnProgress | None = None,
) -> Imported:
    """Make the new store ``target`` of a file, or of all in a directory; see `write_store`.

    ``skip`` are names of columns that are left out, with all below them (see `layouts.plan`);
    ``filter_key`` one of the lists of episodes in ``mask``. One episode at a time is in memory.

    FileNotFoundError, SchemaError for another layout or no HDF5 file, CorruptError for a damaged
    one or a pipe, MmbufError where h5py is not installed or somebody writes the file.
    """
    h5py = optional_package("h5py", "exchange")
    path = location("source", source)
    names = _paths(path)
    with closing(_Shelf(h5py)) as shelf:
        if len(names) == 1 and _is_d4rl(names[0], shelf.file(names[0])):
            if filter_key is not None:
                raise SchemaError(f"{path}: --filter-key: expected a file with mask/, got D4RL's.")
            return _import_d4rl(names[0], shelf.file(names[0]), target, skip, on_progress)
        groups = [each for name in names for each in _groups_of(name, shelf.file(name), filter_key)]
        return _import(path, shelf, groups, target, skip, on_progress)


def _paths(path: str) -> list[str]:
    """The files that ``path`` is, or that are in it."""
    if not files.exists(path):
        raise FileNotFoundError(f"{path}: expected an HDF5 file or a directory of such, got none.")
    if not files.is_directory(path):
        return [path]
    names = [name for name in files.names_in(path) if name.endswith(_ENDINGS) and name[0] != "."]
    if not names:
        raise SchemaError(f"{path}: expected HDF5 files ({', '.join(_ENDINGS)}) in it, got none.")
    return [files.join(path, name) for name in sorted(names, key=_natural)]


def _natural(name: str) -> list[Any]:
    """``demo_10`` comes after ``demo_9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@contextmanager
def _opened(h5py: Any, path: str) -> Iterator[Any]:
    files.check_can_be_read(path)
    with files.readable(path):
        pass  # what the system says, in its words
    if not h5py.is_hdf5(path):
        raise SchemaError(f"{path}: expected an HDF5 file, got one of another kind.")
    try:
        file = h5py.File(path, "r")
    except BlockingIOError as error:
        raise MmbufError(
            f"{path}: expected a file that nobody writes, got one that another process has open. "
            "Wait until it has closed it."
        ) from error
    except (OSError, RuntimeError) as error:
        raise _damaged(path, "", error) from error
    with file:
        yield file


def _damaged(path: str, name: str, error: BaseException) -> CorruptError:
    at = f"{name}: " if name else ""
    said = str(error.args[0] if error.args else error).split("\n")[0]
    return CorruptError(
        path, f"{at}expected a whole HDF5 file, got one that cannot be read ({said}). Copy it anew."
    )


@contextmanager
def _reading(path: str, name: str) -> Iterator[None]:
    """An error of the library's is one of the file's."""
    try:
        yield
    except MmbufError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise _damaged(path, name, error) from error


def _is_d4rl(path: str, file: Any) -> bool:
    with _reading(path, ""):
        return set(file) >= _D4RL and not hasattr(file["terminals"], "keys")


# -- episodes that are groups ----------------------------------------------------------------------


def _groups_of(path: str, file: Any, filter_key: str | None) -> list[_Group]:
    with _reading(path, ""):
        names = set(file)
        if filter_key is not None:
            wanted: list[str] | None = _masked(path, file, filter_key)
        else:
            wanted = None
        if "data" in names and hasattr(file["data"], "keys"):
            inner = file["data"]
            demos = sorted(inner, key=_natural) if wanted is None else wanted
            for name in demos:
                if name not in inner:
                    raise SchemaError(
                        f"{path}: mask/{filter_key}: expected names in data/, got {name!r}."
                    )
            return [_Group(path, f"data/{name}", {}) for name in demos]
        trajectories = sorted((n for n in names if re.fullmatch(r"traj_\d+", n)), key=_natural)
        if trajectories:
            facts = _facts_beside(path)
            return [_Group(path, name, facts.get(name, {})) for name in trajectories]
        if {"action", "actions"} & names and {"observations", "observation", "obs"} & names:
            return [_Group(path, "", {})]
    raise SchemaError(f"{path}: expected {_KNOWN}, got {', '.join(sorted(names)) or 'nothing'}.")


def _masked(path: str, file: Any, filter_key: str) -> list[str]:
    masks = file.get("mask", {})
    if filter_key not in masks:
        known = ", ".join(sorted(masks)) or "none, since the file has no mask/"
        raise SchemaError(f"{path}: --filter-key: expected one of {known}, got {filter_key!r}.")
    names = [name.decode() if isinstance(name, bytes) else name for name in masks[filter_key][()]]
    return sorted(names, key=_natural)


def _facts_beside(path: str) -> dict[str, dict[str, Any]]:
    """What ManiSkill's JSON says of each trajectory, by its name; nothing where there is none."""
    beside = re.sub(r"\.[^.]*$", "", path) + ".json"
    if not files.exists(beside):
        return {}
    with files.readable(beside) as file:
        data = file.read()
    try:
        return {f"traj_{each['episode_id']}": dict(each) for each in json.loads(data)["episodes"]}
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptError(beside, f"expected ManiSkill's JSON, got {error!r}.") from error


def _import(
    path: str,
    shelf: _Shelf,
    groups: list[_Group],
    target: Directory,
    skip: Sequence[str],
    on_progress: OnProgress | None,
) -> Imported:
    def scan(episode: _Group) -> tuple[str, int, Leaves]:
        with _reading(episode.path, episode.name):
            group = shelf.group(episode)
            leaves = _leaves_of(episode, group)
            num_samples = int(group.attrs.get("num_samples", 0))
            return episode.told, layouts.num_steps_of(leaves, num_samples), leaves

    empty: list[str] = []
    full: list[_Group] = []

    def scanned() -> Iterator[tuple[str, int, Leaves]]:
        for episode in groups:
            name, num_steps, leaves = scan(episode)
            if num_steps:
                full.append(episode)
                yield name, num_steps, leaves
            else:
                empty.append(name)

    plan = layouts.plan(scanned(), skip, where=path)
    if not full:
        raise SchemaError(f"{path}: expected an episode of a step or more, got none.")

    def read(episode: _Group) -> Episode:
        _, num_steps, leaves = scan(episode)
        return layouts.nested(plan.episode(leaves, num_steps))

    imported = write_store(map(read, full), len(full), target, on_progress)
    return replace(imported, left_out=plan.left_out | dict.fromkeys(empty, "it has no step"))


def _leaves_of(episode: _Group, group: Any) -> Leaves:
    taken = set(group)
    leaves: Leaves = {}
    for name in taken - _LENGTHS:
        _add_leaves(leaves, episode, group[name], (name,), taken)
    for facts in (dict(group.attrs), episode.facts):
        for path, leaf in layouts.attributes(facts):
            if leaf.name not in _COUNTS:
                leaves.setdefault(path, leaf)
    return dict(sorted(leaves.items()))


def _add_leaves(leaves: Leaves, episode: _Group, item: Any, names: Path, taken: set[str]) -> None:
    if hasattr(item, "keys"):
        for name in item:
            _add_leaves(leaves, episode, item[name], (*names, name), taken)
    elif hasattr(item, "dtype"):
        leaves[layouts.renamed(names, taken)] = _leaf_of(episode, item, names)


def _leaf_of(episode: _Group, item: Any, names: Path) -> Leaf:
    name = "/".join(names)

    def reading(read: Callable[[], Any]) -> Any:
        with _reading(episode.path, f"{episode.name}/{name}".lstrip("/")):
            return read()

    shape = item.shape
    if shape is None:  # a data set without a value
        return Leaf(name, None, "", (), lambda: None)
    num_rows = shape[0] if shape else None
    picture = _picture_in(item)
    if picture is not None:
        first = _decoded(picture)
        dtype, row_shape = str(first.dtype), first.shape
        read: Callable[[], Any] = partial(_read_pictures, item)
    elif item.dtype.kind in "OS":
        dtype, row_shape = "text" if len(shape) <= 1 and _is_text(item) else "", ()
        read = partial(_read_text, item)
    else:
        dtype = str(item.dtype) if item.dtype.kind in "biufc" else ""
        row_shape = shape[1:]
        read = partial(item.__getitem__, ())
    return Leaf(name, num_rows, dtype, row_shape, partial(reading, read))


def _is_text(item: Any) -> bool:
    return item.dtype.kind == "S" or (item.dtype.metadata or {}).get("vlen") in (str, bytes)


def _read_text(item: Any) -> Any:
    found = item.asstr()[()]
    return found if isinstance(found, str) else found.tolist()


def _picture_in(item: Any) -> bytes | None:
    """The first of the compressed images that a data set holds; None where it holds others."""
    if not item.shape or not item.shape[0]:
        return None
    vlen = (item.dtype.metadata or {}).get("vlen")
    is_padded = item.ndim == 2 and item.dtype == np.uint8
    is_bytes = item.ndim == 1 and (item.dtype.kind == "S" or vlen in (bytes, np.dtype(np.uint8)))
    if not (is_padded or is_bytes):
        return None
    first = _bytes_of(item[0])
    return first if first.startswith(_PICTURES) else None


def _bytes_of(row: Any) -> bytes:
    return row.encode("utf-8", "surrogateescape") if isinstance(row, str) else bytes(row)


def _read_pictures(item: Any) -> Any:
    return np.stack([_decoded(_bytes_of(row)) for row in item])


def _decoded(data: bytes) -> Any:
    """An image with its channels in the order of OpenCV, by which all these tools write and read.

    What pads the bytes is behind the end of the image, where no decoder looks.
    """
    image = np.asarray(optional_package("PIL.Image", "exchange").open(io.BytesIO(data)))
    return image[..., ::-1] if image.ndim == 3 and image.shape[2] == 3 else image


# -- D4RL: one episode behind the other ------------------------------------------------------------


def _import_d4rl(
    path: str, file: Any, target: Directory, skip: Sequence[str], on_progress: OnProgress | None
) -> Imported:
    with _reading(path, ""):
        leaves = _leaves_of(_Group(path, "", {}), file)
        leaves = {p: leaf for p, leaf in leaves.items() if p[0] not in {EPISODE, *_NO_COLUMNS}}
        ends = _ends_of(file)
    num_rows = ends[-1]
    plan = layouts.plan([("the file", num_rows, leaves)], skip, where=path)
    items = {p: file[leaves[p].name] for p in plan.kinds}
    for p, kind in plan.kinds.items():
        if kind is not layouts.Kind.ROWS:
            raise SchemaError(
                f"{path}: {leaves[p].name!r}: expected {num_rows} rows, got {leaves[p].num_rows}. "
                f"Leave it out: --skip {'.'.join(p)}"
            )

    def cut() -> Iterator[Episode]:
        for start, stop in zip([0, *ends], ends, strict=False):
            rows = slice(start, stop)
            part = {
                p: replace(leaves[p], read=partial(_read_rows, path, item, rows))
                for p, item in items.items()
            }
            episode = plan.episode(part, stop - start)
            flags = {p: np.asarray(episode[p], bool) for p in episode if p[0] in layouts.FLAGS}
            yield layouts.nested(episode | flags)

    imported = write_store(cut(), len(ends), target, on_progress)
    return replace(imported, left_out=plan.left_out)


def _read_rows(path: str, item: Any, rows: slice) -> Any:
    with _reading(path, item.name):
        return item.asstr()[rows].tolist() if item.dtype.kind in "OS" else item[rows]


def _ends_of(file: Any) -> list[int]:
    """Of each episode the row behind its last one."""
    is_end = file["terminals"][()].astype(bool).reshape(-1)
    if "timeouts" in file:
        is_end |= file["timeouts"][()].astype(bool).reshape(-1)
    ends: list[int] = (is_end.nonzero()[0] + 1).tolist()
    if not ends or ends[-1] < len(is_end):
        ends.append(len(is_end))
    return ends
