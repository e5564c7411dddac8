"""Columns and schemas: a nested dict of ``[T, B, ...]`` leaves as columns of rows, and back.

A *column* is one leaf of the nested dict, named by its path. A *row* is one ``(t, b)`` entry, row
number ``t * B + b``. What a column's rows are made of, in memory and in files:

===================  ===================  ======================================
logical dtype        storage (NumPy)      note
===================  ===================  ======================================
bool                 bool                 one byte a value
int8 ... uint64      the same
float16/32/64        the same
complex64/128        the same
bfloat16             uint16               the bits; viewed back with torch.view
float8_*             uint8                the bits; viewed back with torch.view
text                 int32                codes into a table of strings
===================  ===================  ======================================

T is the length of ``rewards``, else of ``curr_obs``, else of most columns. Any other column may
have ``T + E`` steps, one more for each of E rollout epochs (E divides T, and is the same for all
columns): ``dones``, ``terminations``, ``truncations`` a *leading* one, others a *trailing* one. The
E steps are *left out* of the rows: a column of N rows keeps them behind, as rows ``N ... N + E *
B``. So row ``t`` of epoch ``e`` is step ``e * (T / E + 1) + t`` of a column with trailing steps.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mmbuf.arguments import plain, text, whole
from mmbuf.errors import SchemaError
from mmbuf.terminal import printable

Path = tuple[str, ...]
Leaf = torch.Tensor | np.ndarray[Any, Any] | list[list[str]]
Array = np.ndarray[Any, Any]

TEXT = "text"
LEADING: frozenset[Path] = frozenset({("dones",), ("terminations",), ("truncations",)})
# Those that mostly have left-out steps. In files of version 1 only they have any.
UNSTEADY: frozenset[Path] = LEADING | {("prev_values",)}

_PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_VIEWED = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
_STORAGE: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _PLAIN}
_STORAGE |= {name: np.dtype(storage) for name, storage in _VIEWED.items() if hasattr(torch, name)}
_STORAGE[TEXT] = np.dtype(np.int32)
_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _STORAGE if name != TEXT}
_NAME_OF_TORCH = {dtype: name for name, dtype in _TORCH.items()}
_NAME_OF_NUMPY = {_STORAGE[name]: name for name in _PLAIN}

# Real trajectories nest two or three deep; a dict that contains itself nests for ever.
MAX_NESTING = 32

# Of a row that a file speaks of: NumPy allows two dimensions more, and counts in int64.
_MAX_DIMENSIONS = 62
_MAX_VALUES = 1 << 48

# Arrow counts the values of a row, and the bytes of a column's strings, in int32; what is built of
# one row on the way to a file counts its bytes so too.
_MAX_ROW_BYTES = (1 << 31) - 1
_MAX_TEXT_BYTES = (1 << 31) - 1  # of the different strings of one trajectory
_MAX_BYTES_OF_CHARACTER = 4  # in UTF-8

# torch copies with several threads and NumPy with one, but torch takes longer to start.
_TORCH_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Column:
    """One column: ``path`` in the nested dict, logical ``dtype``, ``row_shape`` of one row."""

    path: Path
    dtype: str
    row_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.path:
            raise SchemaError("column: expected a path of at least one key, got none.")
        if self.dtype not in _STORAGE:
            raise SchemaError(
                f"column {self.name!r}: expected a dtype among {', '.join(_STORAGE)}, "
                f"got {self.dtype!r}."
            )

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype that rows have in memory."""
        return _STORAGE[self.dtype]

    @cached_property
    def name(self) -> str:
        """The path joined by dots; dots and backslashes in keys are escaped: names are unique."""
        return ".".join(key.replace("\\", "\\\\").replace(".", "\\.") for key in self.path)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 when a dimension is 0."""
        return self.storage.itemsize * math.prod(self.row_shape)

    @property
    def is_text(self) -> bool:
        return self.dtype == TEXT

    @cached_property
    def viewed_as(self) -> torch.dtype | None:
        """The torch dtype that storage has to be viewed as; None where it is that already."""
        return _TORCH[self.dtype] if self.dtype in _VIEWED else None

    @cached_property
    def storage_as(self) -> torch.dtype:
        """The torch dtype of the storage (not of text)."""
        return _TORCH[_VIEWED.get(self.dtype, self.dtype)]

    def tensor(self, rows: Array) -> torch.Tensor:
        """``rows`` (storage dtype) as a torch tensor of the logical dtype; a view."""
        tensor = torch.from_numpy(rows)
        return tensor if self.viewed_as is None else tensor.view(self.viewed_as)

    def __str__(self) -> str:
        return f"{self.dtype} rows of shape {self.row_shape}"


class Schema:
    """The columns of a buffer or store, in the order of the batch's keys. Immutable."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns = tuple(columns)
        self._position = {column.path: i for i, column in enumerate(self.columns)}
        if len(self._position) != len(self.columns):
            raise SchemaError("schema: expected each path once, got one twice.")
        for path in self._position:
            for cut in range(1, len(path)):
                if path[:cut] in self._position:
                    raise SchemaError(
                        f"column {'.'.join(path[:cut])!r}: expected a leaf or a dict, got both."
                    )
        self.viewed = [
            (i, column.viewed_as)
            for i, column in enumerate(self.columns)
            if column.viewed_as is not None
        ]
        self.paths = frozenset(self._position)
        self.storages = [column.storage for column in self.columns]
        self.row_bytes = sum(column.row_bytes for column in self.columns)
        self.no_extra_steps = (0,) * len(self.columns)
        self.is_plain = not self.viewed and not any(column.is_text for column in self.columns)
        self._shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        # The shape and the addresses of the batch that was last found to have each column's apart.
        self.apart: tuple[tuple[int, ...], list[int]] = ((), [])
        # For nest(): each dict with its keys in their order, parents first; which dict goes where;
        # and the dict and key of each leaf.
        self._dicts: list[dict[str, Any]] = [{}]
        self._inner: list[tuple[int, int, str]] = []
        self._homes: list[tuple[int, str]] = []
        numbers: dict[Path, int] = {(): 0}
        for column in self.columns:
            for cut in range(1, len(column.path)):
                path = column.path[:cut]
                if path not in numbers:
                    numbers[path] = len(numbers)
                    self._dicts.append({})
                    self._dicts[numbers[path[:-1]]][path[-1]] = None
                    self._inner.append((numbers[path], numbers[path[:-1]], path[-1]))
            home = numbers[column.path[:-1]]
            self._dicts[home][column.path[-1]] = None
            self._homes.append((home, column.path[-1]))
        self._dict_sizes = [len(keys) for keys in self._dicts]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.columns)

    def __repr__(self) -> str:
        inside = ", ".join(f"{c.name}: {c.dtype}{list(c.row_shape)}" for c in self.columns)
        return printable(f"Schema({inside})")

    def nest(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """One value per column, in order, as the nested dict."""
        dicts = [keys.copy() for keys in self._dicts]
        for number, parent, key in self._inner:
            dicts[parent][key] = dicts[number]
        for (home, key), leaf in zip(self._homes, leaves, strict=True):
            dicts[home][key] = leaf
        return dicts[0]

    def has_keys_of(self, nested: Mapping[str, Any]) -> bool:
        """Whether ``nested`` and its dicts have as many keys as a dict of this schema's columns."""
        try:
            dicts = [nested] * len(self._dicts)
            for number, parent, key in self._inner:
                dicts[number] = dicts[parent][key]
            return [len(found) for found in dicts] == self._dict_sizes
        except (KeyError, TypeError, IndexError):
            return False

    def pick(self, nested: Mapping[str, Any], what: str) -> list[Any]:
        """Like `leaves`, but other values in ``nested`` are passed over."""
        try:
            dicts = [nested] * len(self._dicts)
            for number, parent, key in self._inner:
                dicts[number] = dicts[parent][key]
            return [dicts[home][key] for home, key in self._homes]
        except (KeyError, TypeError, IndexError):
            return self.leaves(nested, what)

    def leaves(self, nested: Mapping[str, Any], what: str) -> list[Any]:
        """The values of ``nested`` in the order of the columns; ``what`` names it in errors.

        SchemaError if one is missing or there are others.
        """
        found = dict(_flatten(nested))
        if found.keys() != self._position.keys():
            for path in found.keys() - self._position.keys():
                raise SchemaError(
                    f"column {_name(path)!r}: expected no such column in the {what}. "
                    f"The schema has: {', '.join(c.name for c in self.columns)}."
                )
            for path in self._position.keys() - found.keys():
                raise SchemaError(
                    f"column {_name(path)!r}: expected in the {what}, but it is missing."
                )
        return [found[column.path] for column in self.columns]

    def shapes(self, *sizes: int) -> list[tuple[int, ...]]:
        """The shape ``(*sizes, *S)`` of each column; shared, not to be changed."""
        shapes = self._shapes.get(sizes)
        if shapes is None:
            shapes = [(*sizes, *column.row_shape) for column in self.columns]
            # Callers hardly ever change their sizes; the last few are enough.
            self._shapes = {**dict([*self._shapes.items()][-3:]), sizes: shapes}
        return shapes

    def check_rows(self, rows: Sequence[int], num_steps: int, num_envs: int) -> None:
        """SchemaError unless columns of so many ``rows`` can be those of one ``[T, B, ...]``.

        Columns may differ in E, as in files of version 1.
        """
        if not self.columns:
            raise SchemaError("trajectory: expected at least one column, got none.")
        for column, n in zip(self.columns, rows, strict=True):
            steps, odd = divmod(n, num_envs)
            if odd:
                raise SchemaError(
                    f"column {column.name!r}: expected rows of B = {num_envs}, got {n}."
                )
            if steps != num_steps:
                _extra_steps(column, steps, num_envs, num_steps, num_envs)

    def version_of(self, rows: Sequence[int], num_rows: int) -> int:
        """The oldest version of files and stores whose columns may have so many ``rows`` for N."""
        for column, n in zip(self.columns, rows, strict=True):
            if n != num_rows and (column.path not in UNSTEADY or column.is_text):
                return 2
        return 1

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"path": list(c.path), "dtype": c.dtype, "row_shape": list(c.row_shape)}
            for c in self.columns
        ]

    @classmethod
    def from_json(cls, columns: list[dict[str, Any]]) -> Schema:
        """The inverse of `to_json`; LookupError, TypeError or ValueError where it is none."""
        return cls(map(_column_from_json, columns))


def _column_from_json(json: dict[str, Any]) -> Column:
    if not isinstance(json["path"], list):
        raise TypeError(f"a path that is no list: {json['path']!r}")
    path = tuple(text("path", key) for key in json["path"])
    row_shape = tuple(whole("row_shape", size) for size in json["row_shape"])
    "".join(path).encode()  # UnicodeEncodeError, a ValueError, for keys that no file can hold
    if len(path) > MAX_NESTING + 1:
        raise ValueError(f"a path of {len(path)} keys")
    if len(row_shape) > _MAX_DIMENSIONS or (row_shape and json["dtype"] == TEXT):
        raise ValueError(f"a row shape {row_shape}")
    if math.prod(max(1, size) for size in row_shape) >= _MAX_VALUES:
        raise ValueError(f"a row shape {row_shape}")
    return Column(path, text("dtype", json["dtype"]), row_shape)


class Payload:
    """The leaves of one trajectory, measured: schema, T, B, and how many steps are left out.

    Made by `measure`. The leaves are the caller's own memory; `copy_rows` copies out of them.
    """

    def __init__(
        self,
        schema: Schema,
        leaves: list[Leaf],
        num_steps: int,
        num_envs: int,
        extra_steps: tuple[int, ...],
    ) -> None:
        self.schema = schema
        self.num_steps = num_steps
        self.num_envs = num_envs
        self.num_samples = num_steps * num_envs
        self.extra_steps = extra_steps
        self.rows = tuple(self.num_samples + extra * num_envs for extra in extra_steps)
        self._leaves = leaves

    @property
    def size_bytes(self) -> int:
        return sum(n * c.row_bytes for n, c in zip(self.rows, self.schema.columns, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(T, B, ...)`` as RLinf's index has it: of ``prev_logprobs``, else of ``rewards``."""
        for name in ("prev_logprobs", "rewards"):
            for column in self.schema.columns:
                if column.path == (name,):
                    return (self.num_steps, self.num_envs, *column.row_shape)
        return (self.num_steps, self.num_envs)

    def on_host(self) -> Payload:
        """The payload with all leaves in the host's memory.

        Called by whoever made them: another thread has another current stream, and would not wait
        for what goes on in this one.
        """
        self._leaves = [
            leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" else leaf
            for leaf in self._leaves
        ]
        return self

    def steps_of(self, position: int, *, with_left_out: bool = False) -> Array:
        """Which steps of a column's leaf its rows are: int64 ``[T]``, or ``[T + E]``."""
        extra = self.extra_steps[position]
        if not extra:
            return np.arange(self.num_steps)
        epochs = np.arange(self.num_steps + extra).reshape(extra, -1)
        aligned, left_out = _split_epochs(epochs, self.schema.columns[position].path)
        return np.concatenate([aligned.reshape(-1), *([left_out] if with_left_out else [])])

    def texts(self, position: int) -> list[str]:
        """The ``N + E * B`` strings of a text column, in row order, left-out ones behind."""
        leaf: Any = self._leaves[position]
        if self.extra_steps[position]:
            leaf = [leaf[step] for step in self.steps_of(position, with_left_out=True).tolist()]
        return list(itertools.chain.from_iterable(leaf))

    def copy_rows(self, position: int, rows: Array) -> None:
        """Copy a column (not text) into ``rows`` ``[N + E * B, *S]``, left-out rows behind."""
        column = self.schema.columns[position]
        leaf = _for_numpy(self._leaves[position], column)
        extra = self.extra_steps[position]
        steps, envs = self.num_steps, self.num_envs
        if not extra:
            _copy(rows.reshape(steps, envs, *column.row_shape), leaf)
            return
        epoch = steps // extra
        epochs = leaf.reshape(extra, epoch + 1, envs, *column.row_shape)
        aligned, left_out = _split_epochs(epochs, column.path)
        n = steps * envs
        _copy(rows[:n].reshape(extra, epoch, envs, *column.row_shape), aligned)
        _copy(rows[n:].reshape(extra, envs, *column.row_shape), left_out)


def measure(
    fields: Mapping[str, Any], schema: Schema | None = None, *, is_stored: bool = False
) -> Payload:
    """Measure the nested dict ``fields`` of ``[T, B, ...]`` leaves against ``schema``.

    Without a schema the leaves decide it. Leaves are torch tensors (any device and strides), NumPy
    arrays, or text: ``list[T]`` of ``list[B]`` of str. Nothing is copied. Every misfit is a
    `SchemaError` that names the column, what was expected and what came. Only in what ``is_stored``
    may columns differ in E: there were such once.
    """
    if schema is None:
        found = [(path, _checked(path, leaf)) for path, leaf in _flatten(fields)]
        if not found:
            raise SchemaError("trajectory: expected at least one column, got none.")
        schema = Schema(_describe(path, leaf) for path, leaf in found)
        for column in schema.columns:
            _check_can_be_written(column)
        leaves = [leaf for _, leaf in found]
    else:
        payload = _measure_plain(fields, schema)
        if payload is not None:
            return payload
        values = schema.leaves(fields, "trajectory")
        leaves = [_checked(c.path, v) for c, v in zip(schema.columns, values, strict=True)]
        for column, leaf in zip(schema.columns, leaves, strict=True):
            _check_fits(column, leaf)
    sizes = [_length_and_width(leaf) for leaf in leaves]
    num_steps, num_envs, as_in = _steps_and_envs(schema, sizes)
    extra = tuple(
        0
        if size == (num_steps, num_envs)
        else _extra_steps(column, *size, num_steps, num_envs, as_in)
        for column, size in zip(schema.columns, sizes, strict=True)
    )
    if not is_stored:
        _check_epochs(schema, num_steps, extra)
    return Payload(schema, leaves, num_steps, num_envs, extra)


def _measure_plain(fields: Mapping[str, Any], schema: Schema) -> Payload | None:
    """`measure` for the common case, all columns at once; None where any needs a closer look.

    That is: tensors that NumPy can look into, all of the same T and B, without text or bits.
    """
    if not schema.is_plain or not schema.has_keys_of(fields):
        return None
    try:
        leaves = [leaf.numpy() for leaf in schema.pick(fields, "trajectory")]
    except (AttributeError, TypeError, RuntimeError):
        return None
    num_steps, num_envs = (*leaves[0].shape, 0, 0)[:2]
    if (
        not num_steps
        or not num_envs
        or [leaf.dtype for leaf in leaves] != schema.storages
        or [leaf.shape for leaf in leaves] != schema.shapes(num_steps, num_envs)
    ):
        return None
    return Payload(schema, leaves, num_steps, num_envs, schema.no_extra_steps)


def interleave(rows: Array, column: Column, num_steps: int, num_envs: int) -> Array:
    """Rows ``[N + E * B, *S]`` as ``[T + E, B, *S]``: a view when E is 0, else a copy."""
    n = num_steps * num_envs
    extra = (len(rows) - n) // num_envs
    if not extra:
        return rows.reshape(num_steps, num_envs, *column.row_shape)
    epoch = num_steps // extra
    whole = np.empty((extra, epoch + 1, num_envs, *column.row_shape), column.storage)
    aligned, left_out = _split_epochs(whole, column.path)
    aligned[...] = rows[:n].reshape(aligned.shape)
    left_out[...] = rows[n:].reshape(left_out.shape)
    return whole.reshape(num_steps + extra, num_envs, *column.row_shape)


def interleave_text(
    strings: Sequence[str], column: Column, num_steps: int, num_envs: int
) -> list[list[str]]:
    """As `interleave`: the strings of N + E * B rows as ``list[T + E]`` of ``list[B]``."""
    numbers = interleave(np.arange(len(strings), dtype=np.int32), column, num_steps, num_envs)
    return [[strings[number] for number in step] for step in numbers.tolist()]


class TextTable:
    """The strings of a text column and their codes. Codes never change; the table only grows.

    Thread-safe: any number may `decode` while one encodes.
    """

    def __init__(self) -> None:
        self._strings: list[str] = []
        self._codes: dict[str, int] = {}
        self._lock = threading.Lock()  # guards the table against two that encode

    @property
    def strings(self) -> list[str]:
        """All strings in the order of their codes; a copy."""
        return list(self._strings)

    def encode(self, strings: Iterable[str]) -> Array:
        """Codes ``int32 [N]`` of ``strings``; new ones join the table."""
        codes = self._codes
        out: list[int] = []
        with self._lock:
            for string in strings:
                code = codes.get(string)
                if code is None:
                    code = len(self._strings)
                    self._strings.append(string)
                    codes[string] = code
                out.append(code)
        return np.array(out, np.int32)

    def decode(self, codes: Array) -> list[str]:
        """The strings of ``codes``."""
        strings = self._strings
        return [strings[code] for code in codes.tolist()]


def _split_epochs(epochs: Any, path: Path) -> tuple[Any, Any]:
    """``[E, L + 1, ...]`` as its aligned steps ``[E, L, ...]`` and left-out ones ``[E, ...]``."""
    if path in LEADING:
        return epochs[:, 1:], epochs[:, 0]
    return epochs[:, :-1], epochs[:, -1]


def _name(path: Path) -> str:
    return Column(path, "uint8", ()).name


def _flatten(nested: Mapping[str, Any], prefix: Path = ()) -> Iterable[tuple[Path, Any]]:
    for key, value in nested.items():
        if not isinstance(key, str):
            raise SchemaError(
                f"key {key!r} under {'.'.join(prefix) or 'the top level'}: expected a str, "
                f"got {type(key).__name__}."
            )
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def paths_of(nested: Mapping[str, Any]) -> set[Path]:
    """The paths of all leaves of a nested dict; SchemaError for a key that is no str."""
    return {path for path, _ in _flatten(nested)}


def _checked(path: Path, leaf: Any) -> Leaf:
    """``leaf`` as one of the three kinds of leaf, at least ``[T, B]``."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_nested:
            raise SchemaError(
                f"column {_name(path)!r}: expected a dense tensor, got {leaf.layout} "
                f"on {leaf.device}. Densify it before it is added."
            )
        if leaf.requires_grad:
            leaf = leaf.detach()
    elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "UO":
        leaf = leaf.tolist()
    if isinstance(leaf, (list, tuple)):
        return _checked_text(path, leaf)
    if not isinstance(leaf, (torch.Tensor, np.ndarray)):
        raise SchemaError(
            f"column {_name(path)!r}: expected a tensor or array of shape [T, B, ...] or text "
            f"list[T][B], got {type(leaf).__name__}."
        )
    if leaf.ndim < 2:
        raise SchemaError(
            f"column {_name(path)!r}: expected shape [T, B, ...], got {tuple(leaf.shape)}."
        )
    return leaf


def _checked_text(path: Path, steps: Sequence[Any]) -> list[list[str]]:
    if not steps or not all(isinstance(step, (list, tuple)) for step in steps):
        raise SchemaError(
            f"column {_name(path)!r}: expected a tensor, an array, or text as list[T] of list[B] "
            f"of str, got a {type(steps).__name__} of another form."
        )
    width = len(steps[0])
    strings: list[list[str]] = []
    for t, step in enumerate(steps):
        if len(step) != width:
            raise SchemaError(
                f"column {_name(path)!r}: expected {width} strings in each step, "
                f"got {len(step)} in step {t}."
            )
        for b, string in enumerate(step):
            if not isinstance(string, str):
                raise SchemaError(
                    f"column {_name(path)!r}: expected a str at [{t}][{b}], "
                    f"got {type(string).__name__}."
                )
            if not string.isascii():
                try:
                    string.encode()
                except UnicodeEncodeError as error:
                    raise SchemaError(
                        f"column {_name(path)!r}: expected text that UTF-8 can hold at "
                        f"[{t}][{b}], got {string!r}."
                    ) from error
        strings.append([plain(string) for string in step])
    _check_text_fits(path, strings)
    return strings


def _dtype_name(leaf: Leaf) -> str | None:
    """The logical dtype of ``leaf``, None if there is no column of such."""
    if isinstance(leaf, torch.Tensor):
        return _NAME_OF_TORCH.get(leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return _NAME_OF_NUMPY.get(leaf.dtype.newbyteorder("="))
    return TEXT


def _row_shape(leaf: Leaf) -> tuple[int, ...]:
    return () if isinstance(leaf, list) else tuple(leaf.shape[2:])


def _describe(path: Path, leaf: Leaf) -> Column:
    dtype = _dtype_name(leaf)
    if dtype is None:
        raise SchemaError(
            f"column {_name(path)!r}: expected a dtype among {', '.join(_STORAGE)}, "
            f"got {leaf.dtype}."  # type: ignore[union-attr]
        )
    for key in path:
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"column {path!r}: expected keys that UTF-8 can hold, got {key!r}."
            ) from error
    return Column(path, dtype, _row_shape(leaf))


def _check_can_be_written(column: Column) -> None:
    """SchemaError for a column that could be added, and then be in no file."""
    if column.row_bytes > _MAX_ROW_BYTES:
        raise SchemaError(
            f"column {column.name!r}: expected rows of at most {_MAX_ROW_BYTES:,} bytes, the limit "
            f"of Arrow, got {column.row_bytes:,} of {column}. Divide it into several columns."
        )
    if len(column.row_shape) > _MAX_DIMENSIONS:
        raise SchemaError(
            f"column {column.name!r}: expected rows of at most {_MAX_DIMENSIONS} dimensions, the "
            f"limit of NumPy with T and B before them, got {len(column.row_shape)}. Reshape it."
        )
    if math.prod(max(1, size) for size in column.row_shape) >= _MAX_VALUES:
        raise SchemaError(
            f"column {column.name!r}: expected a row shape that can be counted, got {column}."
        )
    if len(column.path) > MAX_NESTING + 1:
        raise SchemaError(
            f"column {column.name!r}: expected at most {MAX_NESTING + 1} keys in a path, the limit "
            f"of a store's index, got {len(column.path)}."
        )


def _check_text_fits(path: Path, steps: list[list[str]]) -> None:
    """SchemaError for more text than the strings of one file can be."""
    count = sum(sum(map(len, step)) for step in steps)
    if count * _MAX_BYTES_OF_CHARACTER <= _MAX_TEXT_BYTES:
        return
    size = sum(len(string.encode()) for string in set(itertools.chain.from_iterable(steps)))
    if size > _MAX_TEXT_BYTES:
        raise SchemaError(
            f"column {_name(path)!r}: expected at most {_MAX_TEXT_BYTES:,} bytes of different "
            f"strings in a trajectory, the limit of Arrow, got {size:,}. Add it in shorter ones."
        )


def _check_fits(column: Column, leaf: Leaf) -> None:
    dtype, row_shape = _dtype_name(leaf), _row_shape(leaf)
    if dtype != column.dtype or row_shape != column.row_shape:
        came = dtype or str(leaf.dtype)  # type: ignore[union-attr]
        raise SchemaError(f"column {column.name!r}: expected {column}, got {came} {row_shape}.")


def _length_and_width(leaf: Leaf) -> tuple[int, int]:
    if isinstance(leaf, list):
        return len(leaf), len(leaf[0])
    shape = leaf.shape
    return shape[0], shape[1]


def _steps_and_envs(schema: Schema, sizes: list[tuple[int, int]]) -> tuple[int, int, str]:
    """T and B, and who says T: of ``rewards``, else ``curr_obs``, else all but `UNSTEADY` most do.

    Of lengths that equally many columns have it is the shortest; the shortest of all where every
    column is unsteady. B is that of most columns.
    """
    pairs = list(zip(schema.columns, sizes, strict=True))
    telling = (
        [pair for pair in pairs if pair[0].path[0] == "rewards"]
        or [pair for pair in pairs if pair[0].path[0] == "curr_obs"]
        or [pair for pair in pairs if pair[0].path not in UNSTEADY]
        or [min(pairs, key=lambda pair: pair[1])]
    )
    counts = Counter(length for _, (length, _) in telling)
    num_steps = max(counts, key=lambda length: (counts[length], -length))
    column = next(column for column, (length, _) in telling if length == num_steps)
    ((num_envs, _),) = Counter(width for _, width in sizes).most_common(1)
    if num_steps == 0 or num_envs == 0:
        raise SchemaError(
            f"trajectory: expected at least one step of one environment, "
            f"got T = {num_steps}, B = {num_envs}."
        )
    return num_steps, num_envs, f" as in column {column.name!r}"


def _extra_steps(
    column: Column, length: int, width: int, num_steps: int, num_envs: int, as_in: str = ""
) -> int:
    """E, the number of left-out steps of a leaf ``[length, width, ...]``; ``as_in``: who says T."""
    if width != num_envs:
        raise SchemaError(
            f"column {column.name!r}: expected B = {num_envs} as in the other columns, "
            f"got {width} of shape [T, B, ...]."
        )
    extra = length - num_steps
    if extra < 0 or (extra and num_steps % extra):
        raise SchemaError(
            f"column {column.name!r}: expected T = {num_steps} steps{as_in}, or T + E with E a "
            f"divisor of T, got {length}."
        )
    return extra


def _check_epochs(schema: Schema, num_steps: int, extra_steps: Sequence[int]) -> None:
    """SchemaError unless all columns that have left-out steps have equally many."""
    first = ""
    extra = 0
    for column, found in zip(schema.columns, extra_steps, strict=True):
        if found and not extra:
            first, extra = column.name, found
        elif found and found != extra:
            raise SchemaError(
                f"column {column.name!r}: expected T = {num_steps} steps or T + E = "
                f"{num_steps + extra} as in column {first!r}, got {num_steps + found}: one "
                "trajectory has one number of rollout epochs, E."
            )


def _for_numpy(leaf: Any, column: Column) -> Any:
    """``leaf`` (not text) in storage dtype: an array, or a tensor that NumPy cannot look into.

    NumPy takes a tenth of the time that torch does to cut a small one into pieces.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    if column.viewed_as is not None:
        leaf = leaf.view(column.storage_as)
    return leaf.numpy() if leaf.is_cpu and not leaf.is_conj() and not leaf.is_neg() else leaf


def _copy(rows: Array, leaf: Any) -> None:
    """Copy ``leaf`` into ``rows`` of the same shape and dtype, bit for bit."""
    if not rows.nbytes:
        return
    if isinstance(leaf, np.ndarray):
        # torch takes no negative or odd strides and no foreign byte order, and warns of read-only.
        if (
            rows.nbytes >= _TORCH_COPY_BYTES
            and leaf.flags.writeable
            and leaf.dtype == rows.dtype
            and all(step >= 0 and step % leaf.itemsize == 0 for step in leaf.strides)
        ):
            torch.from_numpy(rows).copy_(torch.from_numpy(leaf))
        else:
            np.copyto(rows, leaf, casting="equiv")
    else:
        torch.from_numpy(rows).copy_(leaf)
