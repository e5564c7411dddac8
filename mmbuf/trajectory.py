"""One ``[T, B, ...]`` batch: T chunk steps of B environments, as named fields or nested columns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmbuf.arguments import plain, told, whole
from mmbuf.entry import MAX_NUMBER
from mmbuf.errors import SchemaError
from mmbuf.notebook import Shown
from mmbuf.roles import Roles
from mmbuf.schema import MAX_NESTING, Array, Payload, measure

_EPISODE_LENGTH = "max_episode_length"
_WEIGHTS_ID = "model_weights_id"


@dataclass(eq=False, repr=False)
class Trajectory:
    """One trajectory: T steps of B environments; it may hold many episodes.

    Tensors are ``[T, B, ...]``, any dtype and device. NumPy arrays of these shapes are taken too.
    Nothing is checked or copied before the trajectory is added, measured or split. Two
    trajectories are equal only if they are the same object.

    T is the length of ``rewards``, else of ``curr_obs``, else of most columns but the flags. Any
    other column may be ``[T + E, B, ...]``, with one step more for each of E rollout epochs (E
    divides T, and is the same for all): ``terminations``, ``truncations`` and ``dones`` a leading
    one, others a trailing bootstrap step. These steps are no part of the rows.

    ==================  ======================================================================
    field               shape
    ==================  ======================================================================
    max_episode_length  int; 0 means unknown
    model_weights_id    str; which weights acted
    actions             ``[T, B, action_dim]``
    intervene_flags     ``[T, B, action_dim]`` bool: a person or another policy acted
    rewards             ``[T, B, ...]``
    terminations        ``[T, B, ...]``
    truncations         ``[T, B, ...]``
    dones               ``[T, B, ...]``
    prev_logprobs       ``[T, B, ...]``
    prev_values         ``[T, B, ...]``
    versions            ``[T, B, ...]``: which version of the weights acted
    forward_inputs      dict, may nest: leaves ``[T, B, ...]``, or text as list[T] of list[B] of str
    curr_obs            as forward_inputs
    next_obs            as forward_inputs
    extra               dict of further columns, leaves as above; stored beside the fields under
                        their own names, which must not be names of fields
    ==================  ======================================================================
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        max_episode_length: int = 0,
        model_weights_id: str = "",
    ) -> Trajectory:
        """A trajectory of the nested ``columns``; those that no field is named after go to `extra`.

        Dicts are new, leaves are the given ones. None and empty dicts are left out. A key that is
        no str, metadata among the columns, or nesting deeper than `MAX_NESTING` is a `SchemaError`.
        """
        if not isinstance(columns, Mapping):
            raise SchemaError(f"columns: expected a mapping, got {_kind_of(columns)}.")
        for name in (_EPISODE_LENGTH, _WEIGHTS_ID):
            if name in columns:
                raise SchemaError(
                    f"column {name!r}: expected columns only, got metadata. Pass it as an argument."
                )
        present = _without_empty(columns)
        names = _column_fields(cls)
        return cls(
            max_episode_length=checked_episode_length(max_episode_length),
            model_weights_id=checked_weights_id(model_weights_id),
            extra={name: value for name, value in present.items() if name not in names},
            **{name: value for name, value in present.items() if name in names},
        )

    def to_columns(self) -> dict[str, Any]:
        """The nested dict of what is stored: new dicts, the same leaves. Errors as `fields_of`."""
        return fields_of(self)[0]

    @property
    def num_steps(self) -> int:
        """T, without the steps that are left out of the rows.

        Columns that do not fit together, and no column at all, are a `SchemaError` (a ValueError).
        """
        return measure(self.to_columns()).num_steps

    @property
    def num_envs(self) -> int:
        """B. Errors as `num_steps`."""
        return measure(self.to_columns()).num_envs

    def split(self, sizes: int | Sequence[int]) -> list[Trajectory]:
        """Parts along B: ``sizes`` equal ones if it is an int, else parts of these sizes.

        Every part is a contiguous copy and has the metadata of the whole. ValueError when the int
        does not divide B, or the sizes are not positive or do not sum to B.
        """
        columns = self.to_columns()
        num_envs = measure(columns).num_envs
        given: Any = sizes
        if isinstance(given, Sequence) or getattr(given, "ndim", False):  # or an array
            sizes = [whole("sizes", size, None) for size in given]
        else:
            number = whole("sizes", given, None)
            if number < 1 or num_envs % number:
                raise ValueError(
                    f"split: expected a number of parts that divides B = {num_envs}, got {number}."
                )
            sizes = [num_envs // number] * number
        if sum(sizes) != num_envs or min(sizes, default=0) < 1:
            raise ValueError(
                f"split: expected positive sizes that sum to B = {num_envs}, got {sizes} "
                f"with sum {sum(sizes)}."
            )
        bounds = [0, *itertools.accumulate(sizes)]
        return [
            self.from_columns(
                _between(columns, start, stop), self.max_episode_length, self.model_weights_id
            )
            for start, stop in itertools.pairwise(bounds)
        ]

    def select(self, mask: Any, mode: str = "any") -> list[Trajectory]:
        """The rows where ``mask`` holds: a trajectory ``[T', 1, ...]`` for each environment of any.

        ``mask`` is ``[T, B, ...]`` of truth values, or a column of this trajectory, such as
        `intervene_flags`, whose left-out steps are then left out; where a row has several values,
        ``mode`` says whether one is enough ("any") or "all" have to hold. All columns are those of
        the rows kept: steps that are left out of the rows are not in the parts. Environments
        without such a row have no part. The parts are copies, on the CPU, with the metadata of the
        whole. ValueError for another mode or a mask of another T, B.
        """
        if mode not in ("any", "all"):
            raise ValueError(f"mode: expected 'any' or 'all', got {mode!r}.")
        fields = self.to_columns()
        payload = measure(fields)
        num_steps, num_envs = payload.num_steps, payload.num_envs
        chosen: Array = np.asarray(torch.as_tensor(mask).detach().cpu(), np.bool_)
        leaves = payload.schema.leaves(fields, "trajectory")
        steps = [payload.steps_of(i) for i, leaf in enumerate(leaves) if leaf is mask]
        if steps and all(np.array_equal(steps[0], others) for others in steps):
            chosen = chosen[steps[0]]
        if chosen.shape[:2] != (num_steps, num_envs):
            raise ValueError(
                f"mask: expected the shape [T, B] = [{num_steps}, {num_envs}, ...], got "
                f"{list(chosen.shape)}. Of more steps it has to be a column of the trajectory."
            )
        chosen = chosen.reshape(num_steps, num_envs, -1)
        chosen = np.asarray(chosen.any(2) if mode == "any" else chosen.all(2))
        columns = [_rows_of(payload, position) for position in range(len(payload.rows))]
        parts = []
        for env in chosen.any(0).nonzero()[0].tolist():
            rows = chosen[:, env].nonzero()[0] * num_envs + env
            leaves = [
                [[column[row]] for row in rows.tolist()]
                if isinstance(column, list)
                else column[torch.from_numpy(rows)].unsqueeze(1)
                for column in columns
            ]
            nested = payload.schema.nest(leaves)
            parts.append(self.from_columns(nested, self.max_episode_length, self.model_weights_id))
        return parts

    def __repr__(self) -> str:
        return self._shown().as_text()

    def _repr_html_(self) -> str:
        return self._shown().as_html()

    def _shown(self) -> Shown:
        """T, B, episodes and columns; of columns that do not fit together, what is wrong."""
        try:
            payload = measure(self.to_columns())
        except SchemaError as error:
            return Shown("Trajectory", str(error))
        steps, envs = payload.num_steps, payload.num_envs
        facts = [f"T = {steps:,}", f"B = {envs:,}"]
        num_episodes = self._num_episodes(payload)
        if num_episodes is not None:
            facts.append(f"{num_episodes:,} episodes")
        if self.max_episode_length:
            facts.append(f"{_EPISODE_LENGTH} {self.max_episode_length:,}")
        if self.model_weights_id:
            facts.append(f"{_WEIGHTS_ID} {self.model_weights_id}")
        return Shown(
            "Trajectory",
            ", ".join(facts),
            ("column", "dtype", "shape"),
            [
                (c.name, c.dtype, str([steps + extra, envs, *c.row_shape]))
                for c, extra in zip(payload.schema.columns, payload.extra_steps, strict=True)
            ],
        )

    def _num_episodes(self, payload: Payload) -> int | None:
        """Those that a flag ends, and those that the trajectory ends. None without flags here."""
        try:
            ends = Roles(payload.schema).ends
        except SchemaError:  # two readings
            return None
        leaves = payload.schema.leaves(self.to_columns(), "trajectory")
        positions = [i for i, c in enumerate(payload.schema.columns) if c.path in ends]
        if not positions or not all(_is_at_hand(leaves[position]) for position in positions):
            return None
        is_end = torch.zeros(payload.num_steps, payload.num_envs, dtype=torch.bool)
        is_end[-1] = True
        for position in positions:
            rows = torch.as_tensor(_rows_of(payload, position))
            is_end |= rows.reshape(*is_end.shape, -1).bool().any(2)
        return int(is_end.sum())


def _is_at_hand(leaf: Any) -> bool:
    """Whether these are numbers in memory, not text and not on a device."""
    if isinstance(leaf, torch.Tensor):
        return leaf.is_cpu
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "UO"


def _rows_of(payload: Payload, position: int) -> torch.Tensor | list[str]:
    """A column's rows ``[N, *S]``, without left-out ones; a copy."""
    column = payload.schema.columns[position]
    if column.is_text:
        return payload.texts(position)[: payload.num_samples]
    rows = np.empty((payload.rows[position], *column.row_shape), column.storage)
    payload.copy_rows(position, rows)
    return column.tensor(rows[: payload.num_samples])


def rows_of(item: Any) -> dict[str, Any]:
    """The rows of an item's columns, nested: tensors ``[N, *S]``, or lists of N str; copies.

    Steps that are left out of the rows are not in them. ``item`` and errors as of `fields_of`.
    """
    payload = measure(fields_of(item)[0])
    return payload.schema.nest([_rows_of(payload, i) for i in range(len(payload.rows))])


def fields_of(item: Any) -> tuple[dict[str, Any], int, str]:
    """``item`` as (nested dict of columns, max_episode_length, model_weights_id).

    ``item`` is a `Trajectory`, an instance of any dataclass with such fields, or a mapping of
    ``[T, B, ...]`` leaves that may nest. The dicts are new and keep their order, the leaves are the
    caller's own and not looked at. None and dicts that hold nothing are left out. Metadata that is
    missing is 0 and ``""``. `SchemaError` for anything else: another kind of item, a key that is no
    str, metadata of another type, a name in ``extra`` that is also a field, nesting deeper than
    `MAX_NESTING`.
    """
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        if isinstance(item, Trajectory):
            fields |= _checked_extra(fields.pop("extra"), type(item))
    elif isinstance(item, Mapping):
        fields = dict(item)
    else:
        raise SchemaError(
            "trajectory: expected a Trajectory, an instance of a dataclass like it or a mapping of "
            f"[T, B, ...] columns, got {_kind_of(item)}."
        )
    max_episode_length = checked_episode_length(fields.pop(_EPISODE_LENGTH, None))
    model_weights_id = checked_weights_id(fields.pop(_WEIGHTS_ID, None))
    return _without_empty(fields), max_episode_length, model_weights_id


def _column_fields(kind: type[Trajectory]) -> set[str]:
    """The fields that are columns under their own names, `extra` not among them."""
    names = {f.name for f in dataclasses.fields(kind)}
    return names - {_EPISODE_LENGTH, _WEIGHTS_ID, "extra"}


def _checked_extra(extra: Any, kind: type[Trajectory]) -> dict[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise SchemaError(f"extra: expected a mapping of columns, got {_kind_of(extra)}.")
    taken = _column_fields(kind) | {_EPISODE_LENGTH, _WEIGHTS_ID}
    for name in extra:
        if name in taken:
            raise SchemaError(
                f"column {name!r}: expected names in extra that are not fields, got a field's. "
                "Set the field instead."
            )
    return dict(extra)


def checked_episode_length(value: Any) -> int:
    """A ``max_episode_length``, None as 0; SchemaError for what can be none."""
    if value is None:
        return 0
    try:
        return whole(_EPISODE_LENGTH, value, bound=MAX_NUMBER)
    except (TypeError, ValueError):
        raise SchemaError(
            f"{_EPISODE_LENGTH}: expected an int of 0 or more, got {told(value)}."
        ) from None


def checked_weights_id(value: Any) -> str:
    """A ``model_weights_id``, None as ""; SchemaError for what can be none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SchemaError(f"{_WEIGHTS_ID}: expected a str, got {_kind_of(value)}.")
    return plain(value)


def _without_empty(node: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """``node`` as new dicts, without None and without dicts that hold nothing else."""
    if len(path) > MAX_NESTING:
        raise SchemaError(
            f"column '{'.'.join(path[:3])}...': expected at most {MAX_NESTING} nested dicts, got "
            "more. Does a dict contain itself?"
        )
    present: dict[str, Any] = {}
    for name, value in node.items():
        if not isinstance(name, str):
            raise SchemaError(
                f"key {name!r} under {'.'.join(path) or 'the top level'}: expected a str, "
                f"got {_kind_of(name)}."
            )
        name = plain(name)
        if name in present:  # by what is no str's own way of being equal
            raise SchemaError(f"key {name!r}: expected each key once, got one twice.")
        is_dict = isinstance(value, Mapping)
        kept = _without_empty(value, (*path, name)) or None if is_dict else value
        if kept is not None:
            present[name] = kept
    return present


def _between(node: Any, start: int, stop: int) -> Any:
    """Environments ``[start, stop)`` of every leaf under ``node``, copied."""
    if isinstance(node, dict):
        return {name: _between(value, start, stop) for name, value in node.items()}
    if isinstance(node, torch.Tensor):
        return node[:, start:stop].clone(memory_format=torch.contiguous_format)
    if isinstance(node, np.ndarray):
        return np.array(node[:, start:stop], order="C")
    return [list(step[start:stop]) for step in node]


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
