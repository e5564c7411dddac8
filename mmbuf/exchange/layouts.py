"""Layouts: what episodes of other people's files are called there, and what of them is a row.

Of an episode of T steps each *leaf*, a data set or an attribute, is one of these; all episodes of a
file have to agree:

===============  ===============================  ==================================================
rows of a leaf   is                               becomes
===============  ===============================  ==================================================
T                one for each step                a column of its name
T + 1            with the one that the last step  ``name`` without the last row, ``next_name``
                 led to                           without the first; of flags both are kept
1, or none       a value of the episode           ``episode.name``, the same in each row; the table
                                                  `Tables.episodes` has it once
===============  ===============================  ==================================================

Observations are ``curr_obs`` and ``next_obs``; one that is no group is ``curr_obs.states``. Where
the file has both, ``next_obs`` is taken from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from mmbuf.errors import SchemaError
from mmbuf.schema import Path

EPISODE = "episode"  # the first key of what an episode has one value of

CURRENT, FOLLOWING = "curr_obs", "next_obs"
NAMES = {
    "obs": CURRENT,
    "observation": CURRENT,
    "observations": CURRENT,
    "next_observation": FOLLOWING,
    "next_observations": FOLLOWING,
    "action": "actions",
    "reward": "rewards",
    "terminals": "terminations",
    "terminated": "terminations",
    "timeouts": "truncations",
    "truncated": "truncations",
}
FLAGS = ("terminations", "truncations")
_ENDS = {*FLAGS, "dones"}  # of one step more all are kept: the first came before the first step
_SINGLE = {"initial_state"}  # also of an episode of one step
_NEEDED = {CURRENT, FOLLOWING, "actions", "rewards", *_ENDS}  # are not left out of themselves
_TELLING = ("actions", "rewards", "dones", *FLAGS)  # how many steps there are


class Kind(Enum):
    """What a leaf is for all episodes."""

    ROWS = "one row a step"
    LONGER = "one row more than steps"
    ONCE = "one value an episode"


@dataclass(frozen=True)
class Leaf:
    """A data set or an attribute of an episode: what is known of it, and what ``read`` gives.

    ``num_rows`` None: a single value, ``read`` gives it without a dimension for rows. Else an array
    ``[num_rows, *row_shape]``, or a list of str if ``dtype`` is "text". ``is_attribute`` leaves are
    values of the episode, whatever their shape.
    """

    name: str  # as the file has it
    num_rows: int | None
    dtype: str
    row_shape: tuple[int, ...]
    read: Callable[[], Any]
    is_attribute: bool = False


Leaves = dict[Path, Leaf]


@dataclass
class Plan:
    """What becomes of each leaf; ``left_out`` says by name why others become nothing."""

    kinds: dict[Path, Kind] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def episode(self, leaves: Leaves, num_steps: int) -> dict[Path, Any]:
        """The columns of an episode: arrays ``[T, ...]`` and lists of T strings."""
        columns: dict[Path, Any] = {}
        for path, kind in self.kinds.items():
            values = leaves[path].read()
            if kind is Kind.ONCE:
                once = values if leaves[path].num_rows is None else values[0]
                target = path if path[0] == EPISODE else (EPISODE, *path)
                columns[target] = _repeated(once, num_steps)
            elif kind is Kind.ROWS or path[0] in _ENDS:
                columns[path] = values
            elif path[0] == FOLLOWING:
                columns[path] = values[:num_steps]
            else:
                columns[path] = values[:-1]
                following = _following(path)
                if following not in self.kinds:
                    columns[following] = values[1:]
        flags = [np.asarray(columns[name,], bool) for name in FLAGS if (name,) in columns]
        if flags and ("dones",) not in columns and len({each.shape for each in flags}) == 1:
            columns["dones",] = np.logical_or.reduce(flags)
        return columns


def num_steps_of(leaves: Leaves, told: int | None = None) -> int:
    """T: the rows of the actions, or of what else there is one of for each step; else ``told``."""
    for name in _TELLING:
        for path, leaf in leaves.items():
            if path[0] == name and leaf.num_rows is not None:
                return leaf.num_rows
    if told:
        return told
    rows = Counter(leaf.num_rows for leaf in leaves.values() if leaf.num_rows is not None)
    return max(rows, key=lambda n: (rows[n], n)) if rows else 0


def plan(
    episodes: Iterable[tuple[str, int, Leaves]], skip: Sequence[str] = (), *, where: str
) -> Plan:
    """What becomes of the leaves of all ``episodes``: of each its name, T and leaves.

    ``skip`` leaves out what is called so, in the file or as a column, with all below it. Left out,
    and said, are values of episodes, and ``infos``, that not all episodes have alike. SchemaError
    for any other leaf that some episode lacks or has another number of rows of, and for a name to
    skip that is none.
    """
    first: dict[Path, Leaf] = {}
    rows: dict[Path, set[tuple[int | None, int]]] = {}
    forms: dict[Path, set[tuple[str, tuple[int, ...]]]] = {}
    counts: Counter[Path] = Counter()
    odd: dict[Path, str] = {}  # the episode of another number of rows
    lacking: dict[Path, str] = {}
    num_episodes = 0
    for name, num_steps, leaves in episodes:
        for path in first.keys() - leaves.keys():
            lacking.setdefault(path, name)
        for path, leaf in leaves.items():
            if path not in first and num_episodes:
                lacking.setdefault(path, "the first")
            first.setdefault(path, leaf)
            counts[path] += 1
            rows.setdefault(path, set()).add((leaf.num_rows, num_steps))
            forms.setdefault(path, set()).add((leaf.dtype, leaf.row_shape))
            if leaf.num_rows not in (None, 1, num_steps, num_steps + 1):
                odd.setdefault(path, f"{name} has {leaf.num_rows} of it and {num_steps} steps")
        num_episodes += 1
    skipped = {path for path, leaf in first.items() if any(_is_called(path, leaf, n) for n in skip)}
    for name in skip:
        if not any(_is_called(path, leaf, name) for path, leaf in first.items()):
            known = ", ".join(sorted({".".join(path) for path in first})) or "none"
            raise SchemaError(f"{where}: --skip: expected one of {known}, got {name!r}.")
    made = Plan()
    for path, leaf in first.items():
        if path in skipped:
            continue
        kind = Kind.ONCE if leaf.is_attribute else _kind_of(path, rows[path])
        is_free = kind is Kind.ONCE or path[0] == "infos"
        why = ""
        if leaf.dtype == "":
            why = "it holds neither numbers nor text"
        elif counts[path] < num_episodes:
            why = f"{lacking.get(path, 'an episode')} has none"
        elif kind is None:
            told = odd.get(path, "in some episodes one for each step, in others not")
            why = f"expected a row for each step, one more, or one: {told}"
        elif is_free and len(forms[path]) > 1:
            why = "it is not of one type and shape"
        if not why:
            assert kind is not None
            made.kinds[path] = kind
        elif is_free and path[0] not in _NEEDED:
            made.left_out[".".join(path)] = why
        else:
            raise SchemaError(
                f"{where}: {leaf.name!r}: {why}. Leave it out: --skip {'.'.join(path)}"
            )
    _check_names(made, first, where)
    return made


def renamed(path: Path, taken: Iterable[str]) -> Path:
    """A path of the file as one of the store; what would be ``taken`` twice keeps its name."""
    name = NAMES.get(path[0], path[0])
    path = path if name != path[0] and name in taken else (name, *path[1:])
    return (*path, "states") if path in ((CURRENT,), (FOLLOWING,)) else path


def attributes(facts: Mapping[str, Any], names: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """The leaves that are values of an episode, nested ones too; those that are None are none."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from attributes(value, (*names, name))
            continue
        leaf = _attribute("/".join((*names, name)), value)
        if leaf is not None:
            yield (EPISODE, *names, *name.split("/")), leaf


def _attribute(name: str, value: Any) -> Leaf | None:
    if value is None or type(value).__name__ == "Empty":  # of h5py: an attribute without a value
        return None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return Leaf(name, None, "text", (), lambda: str(value), is_attribute=True)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    dtype = str(array.dtype) if array.dtype.kind in "biufc" else ""
    return Leaf(name, None, dtype, array.shape, lambda: array, is_attribute=True)


def _is_called(path: Path, leaf: Leaf, name: str) -> bool:
    keys = tuple(name.replace("/", ".").strip(".").split("."))
    source = tuple(leaf.name.split("/"))
    inner = path[1:] if path[0] == EPISODE else path
    return keys in (each[: len(keys)] for each in (path, source, inner))


def _kind_of(path: Path, rows: set[tuple[int | None, int]]) -> Kind | None:
    """Of the pairs (rows, T) of all episodes."""
    is_single = all(num_rows in (None, 1) for num_rows, _ in rows)
    if is_single and (path[0] in _SINGLE or path[0] == EPISODE):
        return Kind.ONCE
    if all(num_rows == num_steps for num_rows, num_steps in rows):
        return Kind.ROWS
    if is_single:
        return Kind.ONCE
    if all(num_rows == num_steps + 1 for num_rows, num_steps in rows):
        return Kind.LONGER
    return None


def _following(path: Path) -> Path:
    return (FOLLOWING if path[0] == CURRENT else f"next_{path[0]}", *path[1:])


def _check_names(made: Plan, leaves: Mapping[Path, Leaf], where: str) -> None:
    """SchemaError where two leaves would be one column, or one a column and the dict of another."""
    targets: dict[Path, Path] = {}
    for path, kind in made.kinds.items():
        inner = path[1:] if path[0] == EPISODE else path
        names = [(EPISODE, *inner)] if kind is Kind.ONCE else [path]
        if kind is Kind.LONGER and path[0] not in (FOLLOWING, *_ENDS):
            following = _following(path)
            names += [] if following in made.kinds else [following]
        for target in names:
            other = targets.setdefault(target, path)
            if other != path:
                both = " and ".join(repr(leaves[each].name) for each in (other, path))
                raise SchemaError(
                    f"{where}: column {'.'.join(target)!r}: expected one source of it, got {both}. "
                    f"Leave one out: --skip {leaves[path].name.replace('/', '.')}"
                )
    for target, path in targets.items():
        for stop in range(1, len(target)):
            if target[:stop] in targets:
                above = leaves[targets[target[:stop]]].name
                raise SchemaError(
                    f"{where}: column {'.'.join(target[:stop])!r}: expected a column or others "
                    f"below it, got both ({above!r} and {leaves[path].name!r}). "
                    f"Leave one out: --skip {leaves[path].name.replace('/', '.')}"
                )


def _repeated(value: Any, num_steps: int) -> Any:
    if isinstance(value, str):
        return [value] * num_steps
    array = np.asarray(value)
    return np.broadcast_to(array, (num_steps, *array.shape))


def nested(columns: Mapping[Path, Any]) -> dict[str, Any]:
    """Columns by their paths as a nest of dicts."""
    nest: dict[str, Any] = {}
    for path, values in columns.items():
        inner = nest
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = values
    return nest
