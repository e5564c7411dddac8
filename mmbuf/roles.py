"""Roles: which column is the reward, where episodes end, and which is the next state of what.

All who need to know ask here: samplers, tables and commands. The roles are learned from the names
of the columns, as well-known layouts have them:

===========  ========================  ==========================================  ===============
layout       next states               ends                                        reward
===========  ========================  ==========================================  ===============
RLinf        ``next_obs``, of          ``terminations``, ``truncations``,          ``rewards``
             ``curr_obs``              ``dones``
Gymnasium,   ``next_obs``,             ``terminations``, ``truncations``,          ``rewards``
CleanRL      ``next_observations``     ``dones``; singular ``terminated`` ...
D4RL         ``next_observations``     ``terminals``, ``timeouts``                 ``rewards``
Minari       none                      ``terminations``, ``truncations``           ``rewards``
robomimic    ``next_obs``, of ``obs``  ``dones``                                   ``rewards``
RLlib        ``new_obs``, of ``obs``   ``terminateds``, ``truncateds``             ``rewards``
Tianshou     ``obs_next``, of ``obs``  ``terminated``, ``truncated``, ``done``     ``rew``
TorchRL,     all that is under         ``done``, ``terminated``, ``truncated``     ``reward``
LeRobot      ``next``                  under ``next``                              under ``next``
RLDS         none: the next row has    ``is_last``, ``is_terminal``                ``reward``
             the next observation
===========  ========================  ==========================================  ===============

``next_X`` is the next state of ``X`` for any ``X``. Where there are rewards or flags under
``next``, those of the same names beside it are of the state before the step, and have no role. A
stored ``discount`` is what each step counts the value behind it with.

Where two columns can have a role, or what looks like a next state has no partner, asking for it is
a SchemaError that names them. ``roles=`` says what is so, and goes before all that is learned:

==================================  ==============================================================
``{"reward": "r"}``                 the column ``r`` is the reward; likewise ``termination``,
                                    ``truncation``, ``done`` (either end) and ``discount``; None:
                                    there is none
``{"next.observations": "after"}``  the column, or the columns under, ``after`` is the next state of
                                    ``observations``
``{"next": ["a", "b"]}``            these are of the state after the step, whatever was before it
``{"row": "next_waypoint"}``        this is an ordinary column of its row
==================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mmbuf.arguments import text, told
from mmbuf.errors import MmbufError, SchemaError
from mmbuf.schema import Path, Schema

REWARD, TERMINATION, TRUNCATION, DONE, DISCOUNT = ROLES = (
    *("reward", "termination", "truncation", "done", "discount"),
)
NEXT, ROW = "next", "row"

# What a caller says: by role, the names of columns.
Told = Mapping[str, str | Sequence[str] | None]
_Said = dict[str, tuple[str, ...]]

_NAMES = {
    REWARD: ("rewards", "reward", "rew"),
    TERMINATION: (
        *("terminations", "termination", "terminated", "terminateds", "terminals", "terminal"),
        *("is_terminal", "is_terminated", "is_state_terminal", "absorbing"),
    ),
    TRUNCATION: (
        *("truncations", "truncation", "truncated", "truncateds", "timeouts", "timeout"),
        "is_truncated",
    ),
    DONE: ("dones", "done", "is_last", "last", "is_done", "dones_float", "resets"),
    DISCOUNT: ("discount", "discounts"),
}
_ROLE_OF = {name: role for role, names in _NAMES.items() for name in names}
_ENDS = (TERMINATION, TRUNCATION, DONE)
# What TD3, ReAgent and others have: 0 where an episode ends.
_INVERSE = {"not_done", "not_dones", "not_terminal", "not_terminals", "nonterminal", "nonterminals"}
# Flags that TorchRL also has beside ``next``, of the state before the step.
_BEFORE = {"done", "terminated", "truncated"}
_ALIASES = {"obs": ("obs", "curr_obs")}


def checked(roles: Told | None) -> _Said:
    """``roles`` made plain; TypeError and ValueError for what cannot be such."""
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise TypeError(f"roles: expected a mapping, got {told(roles)}.")
    said: _Said = {}
    for name, value in roles.items():
        role = text("roles", name)
        if role not in (*ROLES, NEXT, ROW) and not (role.startswith("next.") and role != "next."):
            raise ValueError(
                f"roles: expected {', '.join(ROLES)}, next, row or next.COLUMN, got {role!r}."
            )
        if value is None:
            columns: tuple[str, ...] = ()
        elif isinstance(value, str):
            columns = (text(f"roles[{role!r}]", value),)
        elif isinstance(value, Sequence):
            columns = tuple(text(f"roles[{role!r}]", each) for each in value)
        else:
            raise TypeError(f"roles[{role!r}]: expected the name of a column, got {told(value)}.")
        is_many = len(columns) > 1 and role not in (NEXT, ROW)
        if is_many or (not columns and role not in ROLES):
            raise ValueError(f"roles[{role!r}]: expected one column, got {len(columns)}.")
        said[role] = columns
    return said


def parsed(options: Iterable[str]) -> dict[str, list[str]]:
    """Roles as a command line has them: ``NAME=COLUMN``, ``NAME=`` where there is none."""
    found: dict[str, list[str]] = {}
    for option in options:
        role, equals, column = option.partition("=")
        if not equals:
            raise MmbufError(f"--role: expected NAME=COLUMN, got {option!r}.")
        found.setdefault(role, []).extend([column] if column else [])
    try:
        checked(found)
    except ValueError as error:
        raise MmbufError(f"--role: {error}") from error
    return found


class Roles:
    """The roles of the columns of one schema (None: of no columns). Immutable.

    Where these are the columns that all of some trajectories have, ``union`` are those that any of
    them has: flags of ends that only some have are told as unclear.

    What is unclear is a SchemaError of whoever asks for it, and of nobody else. So is a column that
    ``roles`` names and that there is not, here.
    """

    def __init__(
        self, schema: Schema | None, roles: Told | None = None, *, union: Schema | None = None
    ) -> None:
        columns = () if schema is None else schema.columns
        self._names = {column.path: column.name for column in columns}
        self._said = checked(roles) if columns else {}
        numbers = {column.path for column in columns if not column.is_text}
        self._found: dict[str, list[Path]] = {role: [] for role in ROLES}
        self._next_states: dict[Path, Path | None] = {}
        self._lone: list[Path] = []  # what looks like a next state of nothing
        taken = self._take_said(numbers)
        rest = [path for path in self._names if path not in taken]
        self._learn_columns(path for path in rest if path in numbers)
        roles_found = {path for paths in self._found.values() for path in paths}
        self._learn_next_states([path for path in rest if path not in roles_found])
        self._inverse: list[str] = []  # what looks like flags of going on
        if not any(role in self._said for role in _ENDS):
            keys = {path: _keys_of(path) for path in rest if path in numbers}
            self._inverse = [self._names[p] for p in keys if keys[p][-1] in _INVERSE]
        self._missed: dict[str, list[str]] = {}  # flags that not all have, by role
        if union is not None and union is not schema:
            of_any = Roles(union, roles)
            for role in _ENDS:
                paths = [path for path in of_any._found[role] if path not in self._names]
                if paths:
                    self._missed[role] = [of_any._names[path] for path in paths]

    # -- what is asked -----------------------------------------------------------------------

    @property
    def reward(self) -> Path | None:
        """The reward of the row's step."""
        return self._only(REWARD)

    @property
    def termination(self) -> Path | None:
        """The flag of an end for good."""
        return self._only(TERMINATION)

    @property
    def truncation(self) -> Path | None:
        """The flag of an end by a limit of time or the like."""
        return self._only(TRUNCATION)

    @property
    def done(self) -> Path | None:
        """The flag of an end of either kind."""
        return self._only(DONE)

    @property
    def discount(self) -> Path | None:
        """What the value behind the row's step counts."""
        return self._only(DISCOUNT)

    @property
    def ends(self) -> list[Path]:
        """The flags that say where an episode ends: of either kind, or else those of each kind."""
        if self.done is not None:
            return [self.done]
        found = [path for path in (self.termination, self.truncation) if path is not None]
        if self._inverse and not found:
            raise SchemaError(
                f"column {self._inverse[0]!r}: expected a flag that is set where an episode ends, "
                f"got what looks like its inverse. Store it inverted, or go without: "
                f"roles={{{DONE!r}: None}}."
            )
        if self._missed and len(found) < 2:
            role, (name, *_) = next(iter(self._missed.items()))
            raise SchemaError(
                f"column {name!r}: expected in all trajectories, since it says where episodes end, "
                f"got some that lack it. Leave those out, or go without: roles={{{role!r}: None}}."
            )
        return found

    @property
    def flags(self) -> list[Path]:
        """All flags of ends."""
        found = (self.done, self.termination, self.truncation)
        return [path for path in found if path is not None]

    @property
    def next_states(self) -> dict[Path, Path | None]:
        """The columns of the state behind the row's step, and which has the one before it."""
        if self._lone:
            name = self._names[self._lone[0]]
            raise SchemaError(
                f"column {name!r}: expected the column whose next state it is, got none. "
                f"Say {_remedy('next.COLUMN', name)}; or, of a column that is of its row alone, "
                f"{_remedy(ROW, name)}."
            )
        return self._next_states

    def is_said(self, role: str) -> bool:
        """Whether the caller has said which column it is, or that there is none."""
        return role in self._said

    def _only(self, role: str) -> Path | None:
        found = self._found[role]
        if len(found) > 1:
            names = [self._names[path] for path in found]
            raise SchemaError(
                f"roles: expected one column that is the {role}, got {' and '.join(names)}. "
                f"Say which: {_remedy(role, names[0])}."
            )
        return found[0] if found else None

    def expected(self, role: str, who: str) -> Path:
        """The column of a role; SchemaError, that says who needs it, where there is none."""
        path = self._only(role)
        if path is None:
            raise SchemaError(
                f"roles: expected a column that is the {role} ({', '.join(_NAMES[role])}) "
                f"for {who}, got none. Say which of {', '.join(self._names.values())}: "
                f"{_remedy(role, 'COLUMN')}."
            )
        return path

    def told(self) -> dict[str, str | list[str]]:
        """What was taken, as ``roles=`` would say it; of what is unclear nothing."""
        found: dict[str, str | list[str]] = {
            role: self._names[paths[0]] for role, paths in self._found.items() if len(paths) == 1
        }
        lone = []
        for path, before in self._next_states.items():
            if before is None:
                lone.append(self._names[path])
                continue
            shared = 0
            while shared + 1 < min(len(path), len(before)) and path[~shared] == before[~shared]:
                shared += 1
            of, after = (".".join(each[: len(each) - shared]) for each in (before, path))
            found[f"next.{of}"] = after
        return found | ({NEXT: lone} if lone else {})

    def unclear(self) -> dict[str, list[str]]:
        """The columns that could have a role, where these are several, or that lack a partner."""
        found = {
            role: [self._names[path] for path in paths]
            for role, paths in self._found.items()
            if len(paths) > 1
        }
        if not self._found[DONE]:
            if self._inverse and not (self._found[TERMINATION] or self._found[TRUNCATION]):
                found[DONE] = self._inverse
            if not (self._found[TERMINATION] and self._found[TRUNCATION]):
                found |= self._missed
        lone = [self._names[path] for path in self._lone]
        return found | ({NEXT: lone} if lone else {})

    # -- what is said and learned ------------------------------------------------------------

    def _take_said(self, numbers: set[Path]) -> set[Path]:
        """Take what the caller says; the columns that are spoken for."""
        taken: set[Path] = set()
        for role, names in self._said.items():
            for name in names:
                paths, depth = self._named(name, role)
                taken.update(paths)
                if role in ROLES:
                    if len(paths) > 1 or paths[0] not in numbers:
                        raise SchemaError(
                            f"roles[{role!r}]: expected a column of numbers, got {name!r}."
                        )
                    self._found[role] = paths
                elif role == NEXT:
                    self._next_states |= dict.fromkeys(paths)
                elif role != ROW:
                    # Of two columns, or column by column of two dicts.
                    before, depth_before = self._named(role.removeprefix("next."), role)
                    partners = {path[depth_before:]: path for path in before}
                    self._next_states |= {path: partners.get(path[depth:]) for path in paths}
        return taken

    def _named(self, name: str, role: str) -> tuple[list[Path], int]:
        """The column of a name or all that are under it, and how many of their keys that is."""
        for path, known in self._names.items():
            if name in (known, ".".join(path)):
                return [path], len(path)
        prefix = tuple(name.split("."))
        found = [path for path in self._names if path[: len(prefix)] == prefix]
        if not found:
            raise SchemaError(
                f"roles[{role!r}]: expected one of {', '.join(self._names.values())}, got {name!r}."
            )
        return found, len(prefix)

    def _learn_columns(self, paths: Iterable[Path]) -> None:
        """Learn which columns are reward, flags and discount, but where the caller has said it."""
        found: dict[str, list[Path]] = {role: [] for role in ROLES}
        for path in paths:
            keys = _keys_of(path)
            role = _ROLE_OF.get(keys[-1]) if len(keys) == 1 + (keys[0] == NEXT) else None
            if role is not None:
                found[role].append(path)
        has_ends = any(_is_under_next(path) for role in _ENDS for path in found[role])
        for role, candidates in found.items():
            if role in _ENDS and has_ends:
                candidates = [p for p in candidates if p[0] not in _BEFORE]
            elif any(map(_is_under_next, candidates)):
                names = {_keys_of(p)[-1] for p in candidates if _is_under_next(p)}
                candidates = [p for p in candidates if _is_under_next(p) or p[0] not in names]
            if role not in self._said:
                self._found[role] = candidates

    def _learn_next_states(self, paths: list[Path]) -> None:
        """Learn which of ``paths`` are next states of what."""
        known = {_keys_of(path): path for path in self._names}
        groups: dict[Path, list[Path]] = {}
        for path in paths:
            keys = _keys_of(path)
            # All under ``next`` are one group; else those under one key.
            if keys[0] == NEXT and len(keys) > 1:
                group = (NEXT,) if _is_under_next(path) else keys[:2]
                groups.setdefault(group, []).append(path)
        for group, members in groups.items():
            partners = {path: _partner_of(_keys_of(path)[1:], known) for path in members}
            has_role = group == (NEXT,) and any(
                _is_under_next(path) for found in self._found.values() for path in found
            )
            if has_role or any(partner is not None for partner in partners.values()):
                self._next_states |= partners
            else:
                self._lone += members


def _keys_of(path: Path) -> Path:
    """``path`` in one form: ``("next", "obs")`` for next_obs, new_obs, obs_next and "next.obs"."""
    keys = tuple(key for part in path for key in part.split("."))
    first, rest = keys[0], keys[1:]
    if first in ("new_obs", "obs_next"):
        return (NEXT, "obs", *rest)
    if first.startswith("next_") and first != "next_":
        return (NEXT, first.removeprefix("next_"), *rest)
    return keys


def _is_under_next(path: Path) -> bool:
    """Whether it is in the dict ``next``, or called so."""
    return path[0].startswith("next.") or (path[0] == NEXT and len(path) > 1)


def _partner_of(keys: Path, known: Mapping[Path, Path]) -> Path | None:
    for name in _ALIASES.get(keys[0], (keys[0],)):
        path = known.get((name, *keys[1:]))
        if path is not None:
            return path
    return None


def _remedy(role: str, column: str) -> str:
    return f"roles={{{role!r}: {column!r}}}, of a command --role {role}={column}"
