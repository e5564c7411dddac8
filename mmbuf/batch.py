"""Batches: from gathered columns to what the caller gets, and back to the memory of an old one.

A batch is a nested dict with the trajectories' own keys; tensors ``[K, *S]``, or ``[K, L, *S]`` of
slices; text as (lists of) lists of str.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from mmbuf import vm
from mmbuf.errors import MmbufError, SchemaError
from mmbuf.schema import Array, Column, Schema, paths_of

_BYTES_BESIDE = 16  # of a row: its number, and what is computed to find it
_LARGE = 1 << 30  # a batch; smaller ones are not worth a look at the memory

Batch = dict[str, Any]
Leaf = Any  # an array in storage dtype, or a list of str


def nested(schema: Schema, leaves: Sequence[Leaf], shape: tuple[int, ...] = ()) -> Batch:
    """Arrays ``[K, *S]`` in storage dtype as the nested dict of tensors; views.

    ``shape``: the leading dimensions instead of K.
    """
    if shape:
        columns = zip(schema.columns, leaves, strict=True)
        leaves = [_shaped(column, leaf, shape) for column, leaf in columns]
    tensors: list[Any] = [
        leaf if isinstance(leaf, list) else torch.from_numpy(leaf) for leaf in leaves
    ]
    for position, dtype in schema.viewed:
        tensors[position] = tensors[position].view(dtype)
    return schema.nest(tensors)


def _shaped(column: Column, leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
    if not isinstance(leaf, list):
        return leaf.reshape(*shape, *column.row_shape)
    for size in shape[:0:-1]:
        leaf = [leaf[i : i + size] for i in range(0, len(leaf), size)]
    return leaf


def check_free(schema: Schema, names: Sequence[str]) -> None:
    """SchemaError where columns have names that a sampler's keys need."""
    for column in schema.columns:
        if column.path[0] in names:
            raise SchemaError(
                f"column {column.name!r}: expected no column under {column.path[0]!r}, "
                f"which the sampler adds, got one. Rename what it adds, by NStep(discount=), "
                f"Prioritized(weights=, info=), Slices(mask=) or sample(with_info=); "
                f"each takes a name."
            )


def check_room(schema: Schema, num_rows: int) -> None:
    """MemoryError for a batch of more rows than there is memory for.

    The system itself would promise the memory, and end the process when it is used.
    """
    size_bytes = num_rows * (schema.row_bytes + _BYTES_BESIDE)
    if size_bytes > _LARGE:
        free = vm.free_bytes()
        if free is not None and size_bytes > free:
            raise MemoryError(
                f"sample: expected a batch that fits in the {free:,} bytes of memory that are "
                f"free, got one of {num_rows:,} rows, {size_bytes:,} bytes. Ask for fewer rows."
            )


def each(batch: Any, convert: Callable[[torch.Tensor], Any]) -> Any:
    """A batch whose tensors are converted; its lists of text are copies."""
    if isinstance(batch, dict):
        return {name: each(value, convert) for name, value in batch.items()}
    return convert(batch) if isinstance(batch, torch.Tensor) else list(batch)


def numpy_of(batch: Batch) -> Batch:
    """A batch of arrays; views. What NumPy has no dtype for (bfloat16, float8) comes as float32."""
    return each(batch, _array)  # type: ignore[no-any-return]


def _array(tensor: torch.Tensor) -> Array:
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.float().numpy()


def tensordict() -> ModuleType:
    """The library of that name; MmbufError where it is missing."""
    try:
        import tensordict as library
    except ImportError as error:
        raise MmbufError(
            'as_tensordict: tensordict is missing. Install it: pip install "mmbuf[tensordict]"'
        ) from error
    found: ModuleType = library
    return found


def tensordict_of(batch: Batch, num_dims: int) -> Any:
    """A batch as a `TensorDict` with ``num_dims`` batch dimensions; views. Text as non-tensors."""
    library = tensordict()

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            items = {name: convert(item) for name, item in value.items()}
            return library.TensorDict(items, batch_size=shape)
        return library.NonTensorStack.from_list(value) if isinstance(value, list) else value

    shape = _leading(batch, num_dims)
    return convert(batch)


def _leading(batch: Batch, num_dims: int) -> list[int]:
    """The leading dimensions of a batch, whose first leaf may be text."""
    leaf: Any = batch
    while isinstance(leaf, dict):
        leaf = next(iter(leaf.values()))
    shape = []
    for _ in range(num_dims):
        shape.append(len(leaf))
        leaf = leaf[0]
    return shape


def targets(schema: Schema, out: Mapping[str, Any], shape: tuple[int, ...]) -> list[Leaf]:
    """The memory of ``out``, a batch of leading dimensions ``shape``, as columns of rows; views.

    Text of slices, which has no memory of rows, is to be put there by `put_text`. SchemaError if
    it is not such a batch, or has memory that is that of two columns.
    """
    leaves = schema.pick(out, "out")
    if schema.is_plain and len(shape) == 1:
        # All columns at once, since each step counts in a small batch.
        with suppress(AttributeError, TypeError, RuntimeError):
            targets = [leaf.numpy() for leaf in leaves]
            if (
                [target.shape for target in targets] == schema.shapes(*shape)
                and [target.dtype for target in targets] == schema.storages
                and all(target.flags.c_contiguous for target in targets)
            ):
                _check_apart(schema, [leaf.data_ptr() for leaf in leaves], shape)
                return targets
    targets = [
        _target(column, leaf, shape) for column, leaf in zip(schema.columns, leaves, strict=True)
    ]
    places = [id(leaf) if isinstance(leaf, list) else leaf.data_ptr() for leaf in leaves]
    _check_apart(schema, places, shape)
    return targets


def _check_apart(schema: Schema, places: list[int], shape: tuple[int, ...]) -> None:
    """SchemaError where columns, whose contiguous memory begins at ``places``, share any of it.

    A list of text takes its first byte. What was found of the last batch is remembered: it is
    nearly always the next one.
    """
    if schema.apart == (shape, places):
        return
    num_rows = math.prod(shape)
    spans = sorted(
        (place, 1 if column.is_text else num_rows * column.row_bytes, column.name)
        for column, place in zip(schema.columns, places, strict=True)
    )
    stop, before = 0, ""
    for place, size, name in spans:
        if place < stop and size:
            raise SchemaError(
                f"column {name!r} of out: expected memory of its own, got some that is also that "
                f"of column {before!r}. Pass a batch whose tensors do not overlap."
            )
        if place + size > stop:
            stop, before = place + size, name
    schema.apart = (shape, places)


def check_lacks(out: Mapping[str, Any], schema: Schema, union: Schema) -> None:
    """SchemaError where ``out`` has a column of ``union`` that no batch of ``schema`` refills."""
    if stale := (paths_of(out) & union.paths) - schema.paths:
        raise SchemaError(
            f"column {'.'.join(min(stale))!r} of out: expected none, since not every trajectory of "
            f"the window has it, got one. Sample without out once."
        )


def put_text(schema: Schema, out: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
    """Put the text of a batch of slices into ``out``."""
    for column in schema.columns:
        if column.is_text:
            theirs, ours = out, batch
            for key in column.path:
                theirs, ours = theirs[key], ours[key]
            theirs[:] = ours  # type: ignore[index]


def _target(column: Column, leaf: Any, shape: tuple[int, ...]) -> Leaf:
    if column.is_text:
        if not isinstance(leaf, list):
            raise _misfit(column, leaf, shape)
        return leaf if len(shape) == 1 else []
    try:
        if column.viewed_as is None:
            array = leaf.numpy()
        else:
            array = leaf.view(column.storage_as).numpy()
            if leaf.dtype != column.viewed_as:
                raise _misfit(column, leaf, shape)
    except (AttributeError, TypeError, RuntimeError) as error:
        # No tensor, or one that NumPy cannot look into: on a device, with grad, conjugate.
        raise _misfit(column, leaf, shape) from error
    if (
        array.dtype != column.storage
        or array.shape != (*shape, *column.row_shape)
        or not array.flags.c_contiguous
    ):
        raise _misfit(column, leaf, shape)
    return array.reshape(math.prod(shape), *column.row_shape)


def _misfit(column: Column, leaf: object, shape: tuple[int, ...]) -> SchemaError:
    shape = (*shape, *column.row_shape)
    if isinstance(leaf, torch.Tensor):
        came = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)} on {leaf.device}"
        came += "" if leaf.is_contiguous() else ", not contiguous"
        came += ", requires grad" if leaf.requires_grad else ""
        came += ", a conjugate or negative view" if leaf.is_conj() or leaf.is_neg() else ""
    else:
        came = type(leaf).__name__
    expected = "a list of str" if column.is_text else f"a contiguous {column.dtype} {shape} on cpu"
    return SchemaError(f"column {column.name!r} of out: expected {expected}, got {came}.")
