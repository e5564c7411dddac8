"""Arguments: what callers and files hand over, made plain or refused at the door.

A number may come as NumPy's, torch's or an enum's, text as a subclass of str. What is accepted here
becomes Python's own int, float or str: only those are sure to come out of JSON, ``torch.load`` and
other processes as they went in. TypeError for another type, ValueError for a value out of range;
messages begin with the name of the argument. A bool is no number.
"""

from __future__ import annotations

import numbers
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import SeedSequence

_BOUND = 1 << 63  # of what NumPy counts in
_MAX_SEED_BITS = 4096  # Python refuses to write much longer numbers out, as JSON has to
_MAX_TOLD = 60  # characters of a value in a message


def whole(name: str, value: Any, least: int | None = 0, *, bound: int = _BOUND) -> int:
    """``value`` as an int of ``least`` (None: any) or more and below ``bound``."""
    found = value if type(value) is int else _int_of(name, value, "an int")
    return _within(name, found, least, bound, "")


def whole_or_none(name: str, value: Any, least: int | None = 0) -> int | None:
    """As `whole`, or None."""
    if value is None:
        return None
    return _within(name, _int_of(name, value, "None or an int"), least, _BOUND, "None or ")


def rank_of(
    name: str, rank: Any, world_size: Any, size_name: str = "world_size"
) -> tuple[int, int]:
    """One of ``world_size`` ranks, and that number, as ints."""
    size = whole(size_name, world_size, 1)
    found = whole(name, rank, None)
    if not 0 <= found < size:
        raise ValueError(f"{name}: expected [0, {size}), got {found}.")
    return found, size


def number(name: str, value: Any) -> float:
    """``value`` as a float. Infinite ones and NaN are for the caller to refuse."""
    found = _scalar(value)
    if isinstance(found, numbers.Real) and not isinstance(found, bool):
        try:
            return float(found)
        except OverflowError:
            raise ValueError(f"{name}: expected a number, got {told(value)}.") from None
    raise TypeError(f"{name}: expected a number, got {told(value)}.")


def seconds(name: str, value: Any) -> float | None:
    """``value`` as seconds that the system can wait, None for ever; ValueError for NaN."""
    if value is None:
        return None
    found = number(name, value)
    if found != found:
        raise ValueError(f"{name}: expected None or a number of seconds, got {found}.")
    return min(found, threading.TIMEOUT_MAX)


def text(name: str, value: Any) -> str:
    """``value`` as a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {told(value)}.")
    return plain(value)


def key_name(name: str, value: Any) -> str:
    """The name of a key of a batch: a str that is not empty."""
    found = text(name, value)
    if not found:
        raise ValueError(f"{name}: expected the name of a key, got an empty one.")
    return found


def plain(text: str) -> str:
    """The same characters without the subclass of str that they may come in."""
    return text if type(text) is str else str.__str__(text)


def path(name: str, value: Any) -> str:
    """A path as a str: of a str, bytes or an ``os.PathLike``.

    ValueError for an empty one, which would be the working directory, whatever that is.
    """
    try:
        found = plain(os.fsdecode(value))
    except TypeError:
        raise TypeError(f"{name}: expected a path, got {told(value)}.") from None
    if not found:
        raise ValueError(f"{name}: expected a path, got an empty one.")
    return found


def paths(name: str, value: Any) -> tuple[list[str], bool]:
    """A path or several as a list, and whether several were asked for; ValueError for none."""
    if isinstance(value, (str, bytes, os.PathLike)):
        return [path(name, value)], False
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}: expected a path or a list of paths, got {told(value)}.")
    found = [path(name, each) for each in value]
    if not found:
        raise ValueError(f"{name}: expected at least one path, got none.")
    return found, True


def seed(value: Any) -> int | list[int] | None:
    """The seed of a generator: None, an int of 0 or more, or a list of such."""
    if value is None:
        return None
    if isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_seed_of(each, "ints of 0 or more") for each in value]
    return _seed_of(value, "None, an int of 0 or more or a list of such")


def _seed_of(value: Any, expected: str) -> int:
    if isinstance(value, SeedSequence):
        raise TypeError(
            f"seed: expected {expected}, got a SeedSequence. Pass its generate_state(4)."
        )
    found = _int_of("seed", value, expected)
    if found < 0 or found.bit_length() > _MAX_SEED_BITS:
        raise ValueError(
            f"seed: expected {expected}, {_MAX_SEED_BITS} bits at most, got {told(found)}."
        )
    return found


def told(value: Any) -> str:
    """What came, in few characters: small values as they are, others by their type."""
    kind = type(value)
    if kind.__module__ not in ("builtins", "numpy") or isinstance(value, np.ndarray):
        return kind.__name__
    try:
        shown = repr(value)
    except ValueError:  # an int of thousands of digits
        shown = ""
    return shown if 0 < len(shown) <= _MAX_TOLD else f"a long {kind.__name__}"


def _within(name: str, found: int, least: int | None, bound: int, or_: str) -> int:
    if least is not None and found < least:
        raise ValueError(f"{name}: expected {or_}at least {least}, got {told(found)}.")
    if found >= bound:
        raise ValueError(f"{name}: expected {or_}less than {bound}, got {told(found)}.")
    return found


def _int_of(name: str, value: Any, expected: str) -> int:
    found = _scalar(value)
    if isinstance(found, bool) or not hasattr(found, "__index__"):
        raise TypeError(f"{name}: expected {expected}, got {told(value)}.")
    return int(operator.index(found))


def _scalar(value: Any) -> Any:
    """NumPy's and torch's single numbers and bools as Python's, None for what else they have.

    All other values are given back.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if not value.ndim and not value.is_meta else None
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if not value.ndim and value.dtype.kind in "biuf" else None
    return value
