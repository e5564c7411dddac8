"""How rows travel between the processes of a cluster: as NumPy arrays.

Ray moves arrays without pickling their bytes, and gives them read-only in its shared memory.
Tensors of dtypes that NumPy has not travel as integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from mmbuf.pool import MIN_BYTES, BatchPool
from mmbuf.schema import Array


class Bits(NamedTuple):
    """A tensor of a dtype that NumPy has not, as integers of its size."""

    dtype: str
    array: Array


_INTEGERS = {1: torch.uint8, 2: torch.int16}


def packed(node: Any) -> Any:
    """Nested columns for Ray, which moves arrays without pickling their bytes; views if on CPU."""
    if isinstance(node, Mapping):
        return {name: packed(value) for name, value in node.items()}
    if isinstance(node, torch.Tensor):
        tensor = node.detach().cpu().resolve_conj().resolve_neg().contiguous()
        try:
            return tensor.numpy()
        except TypeError:
            bits = tensor.view(_INTEGERS[tensor.element_size()])
            return Bits(str(tensor.dtype).removeprefix("torch."), bits.numpy())
    return np.ascontiguousarray(node) if isinstance(node, np.ndarray) else node


def unpacked(node: Any) -> Any:
    """What a buffer takes; arrays as they came, read-only."""
    if isinstance(node, dict):
        return {name: unpacked(value) for name, value in node.items()}
    if isinstance(node, Bits):
        return _tensor(node.array.copy(), node.dtype)
    return node


def _tensor(array: Array, dtype: str | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


class Joint:
    """A batch of ``num_rows`` that is put together from packed parts as they come; new memory."""

    def __init__(self, num_rows: int, pool: BatchPool) -> None:
        self._num_rows, self._pool = num_rows, pool
        self._batch: Any = None

    def put(self, where: Array, part: Any) -> None:
        """Copy a part's rows to their places in the batch."""
        self._batch = self._put(self._batch, where, part)

    def _put(self, batch: Any, where: Array, part: Any) -> Any:
        if isinstance(part, dict):
            batch = batch or dict.fromkeys(part)
            return {name: self._put(batch[name], where, part[name]) for name in batch}
        if isinstance(part, list):
            texts = batch or [""] * self._num_rows
            for place, text in zip(where.tolist(), part, strict=True):
                texts[place] = text
            return texts
        if isinstance(part, Bits):
            return Bits(part.dtype, self._put(batch and batch.array, where, part.array))
        if batch is None:
            size = self._num_rows * part[:1].nbytes
            empty = self._pool.empty if size >= MIN_BYTES else np.empty
            batch = empty((self._num_rows, *part.shape[1:]), part.dtype)
        batch[where] = part
        return batch

    def batch(self) -> dict[str, Any]:
        """As of a buffer; all parts are there."""
        batch: dict[str, Any] = _finished(self._batch)
        return batch


def _finished(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _finished(value) for name, value in node.items()}
    if isinstance(node, Bits):
        return _tensor(node.array, node.dtype)
    return node if isinstance(node, list) else _tensor(node, None)
