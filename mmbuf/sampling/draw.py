"""Draw, Sight and Sampler: what a sampler is asked, and what it answers.

A sampler is shown the window as it is at one moment (`Sight`) and says which of its rows a batch
has (`Draw`). Row numbers are those of the sight's view, and mean nothing to another one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from mmbuf.entry import Entry
from mmbuf.errors import MmbufError, SchemaError
from mmbuf.schema import Array, Column, Path, Schema
from mmbuf.slots import View

_Own = TypeVar("_Own", bound="Sampler")


class StaleSightError(Exception):
    """The sight is older than what the sampler has taken in already; it is to be shown a new one.

    Never leaves the library.
    """


class Delivery:
    """What becomes of the batches that are drawn for one call of somebody who samples.

    A batch has reached its caller, or it is in vain: a gather failed, or a signal handler
    interrupted it anywhere. Who samples says so by an assignment, as the last that is done, or the
    first that is done after an error: with nothing called beside, no interrupt comes in between.
    A sampler that must not lose rows looks at it by the next draw.
    """

    attempt = 0  # raised by one: what was drawn before is in vain
    has_come = False  # what was drawn last is the caller's


class Sight(Protocol):
    """The window at one moment, and its rows."""

    @property
    def delivery(self) -> Delivery:
        """Of the batch that is drawn."""

    @property
    def view(self) -> View:
        """Its row numbers, slots and facts of them."""

    @property
    def owner(self) -> object:
        """Whose slot numbers the view's are."""

    @property
    def schema(self) -> Schema:
        """Of the rows."""

    @property
    def union(self) -> Schema:
        """The columns that any of the trajectories has."""

    def read(self, paths: Sequence[Path], rows: Array) -> list[Any]:
        """These columns of these rows: arrays ``[len(rows), *S]`` in storage dtype, or list[str].

        The caller's own.
        """

    def entry(self, index: int) -> Entry:
        """What is known of the trajectory in the slot of this index."""


@dataclass(slots=True)
class Draw:
    """The rows of one batch.

    ``rows`` are int64 row numbers; the batch's leading dimensions are ``shape``, or ``[len(rows)]``
    where it is empty. ``moved`` columns come from other rows, as many. ``replaced`` columns and
    ``added`` keys have the given values, with the batch's leading dimensions; ``derive`` gives more
    of these from the gathered columns, by path.
    """

    rows: Array
    shape: tuple[int, ...] = ()
    moved: tuple[frozenset[Path], Array] | None = None
    replaced: dict[Path, Array] = field(default_factory=dict)
    added: dict[str, Array] = field(default_factory=dict)
    derive: Callable[[Mapping[Path, Any]], dict[str, Array]] | None = None


class Sampler(ABC):
    """Says which rows a batch has. Thread-safe. A copy, by pickle too, begins anew.

    An exception of a signal handler may come anywhere in the main thread. So what a draw changes is
    worked out aside and put in place by one assignment, or changed by `shield.run`. A handler that
    draws from a sampler within a call of it gets MmbufError, and its ``state_dict``.

    ``needs_info``: batches always have ``batch[info]``, since the caller needs the handles; it is
    called "info" unless somebody says otherwise. ``has_even_batches``: equal numbers asked for give
    batches of equal shapes. ``num_dims``: the leading dimensions of its batches.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    needs_info = False
    info = "info"
    has_even_batches = True
    num_dims = 1

    def __new__(cls: type[_Own], *args: Any, **kwargs: Any) -> _Own:
        sampler = super().__new__(cls)
        sampler._arguments = (args, kwargs)
        return sampler

    def __reduce__(self) -> tuple[Any, ...]:
        args, kwargs = self._arguments
        return partial(type(self), *args, **kwargs), ()

    def __init__(self) -> None:
        self.owner: object | None = None  # the window that it belongs to
        # Guards all that the sampler remembers. By who has it, a thread is kept from waiting for
        # itself; entering and leaving it is C code, which is not interrupted.
        self._lock = threading.RLock()

    @abstractmethod
    def draw(self, sight: Sight, num_chunks: int, generator: np.random.Generator) -> Draw:
        """The rows of a batch of ``num_chunks``; the window has rows.

        EmptyBufferError where none of them may be drawn, SchemaError where the sampler needs a
        column that there is not.
        """

    def get_stats(self) -> dict[str, Any]:
        """Counts, for `get_stats` of whom it belongs to."""
        return {}

    def renew_lock(self) -> None:
        """In a forked child: the thread that may have held it is gone."""
        self._lock = threading.RLock()

    def _check_is_outside(self) -> None:
        """MmbufError for a signal handler that came within another call of this thread's."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise MmbufError(
                "sampler: expected no call within another one of the same thread, got one. "
                "In a signal handler, use state_dict only."
            )


def column_of(sight: Sight, path: Path, who: str) -> Column:
    """The column of numbers of this path; SchemaError, that says who needs it, if there is none."""
    name = ".".join(path)
    for column in sight.schema.columns:
        if column.path == path:
            if column.is_text:
                raise SchemaError(
                    f"column {name!r}: expected a dtype of numbers for {who}, got text."
                )
            return column
    raise SchemaError(f"column {name!r}: expected one for {who}, got none.")


def numbers_of(column: Column, rows: Array) -> Array:
    """``rows`` of storage as numbers that NumPy knows: of bfloat16 and float8 a copy as float32."""
    if column.viewed_as is None:
        return rows
    numbers: Array = column.tensor(rows).float().numpy()
    return numbers


def storage_of(column: Column, numbers: Array) -> Array:
    """Floats as rows of storage: rounded, infinite where they are too large."""
    if column.viewed_as is None:
        with np.errstate(over="ignore"):
            return numbers.astype(column.storage)
    bits: Array = torch.from_numpy(numbers).to(column.viewed_as).view(column.storage_as).numpy()
    return bits


def flat(rows: Array) -> Array:
    """``[N, *S]`` as ``[N, size of S]``; a view where it can be."""
    return rows.reshape(len(rows), -1)


def any_of(flags: Array) -> Array:
    """Whether any of ``flags`` ``[N, C]`` is set, bool ``[N]``."""
    # Most have one flag a row: no need to look for others.
    if flags.shape[1] == 1:
        return flags[:, 0].astype(np.bool_)
    return np.asarray(flags.any(axis=1))
