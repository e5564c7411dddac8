"""Staging: batches on a device, by way of pinned memory that is used again.

A copy from pinned memory goes on by itself (``non_blocking``): the next batch is gathered into
another staging batch meanwhile. Each is used again only when its copy has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

from mmbuf.batch import Batch, each

_MAX_KEYS = 16  # whose staging batches are kept


class _Stage:
    """A batch in pinned memory, and the end of the last copy from it."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.copied: torch.cuda.Event | None = None


class Staging:
    """Sends batches to ``device``. Thread-safe: each call has a staging batch of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stages: dict[Hashable, deque[_Stage]] = {}

    def send(self, key: Hashable, fill: Callable[[Batch | None], Batch]) -> Batch:
        """A batch on the device, the caller's own; of text the lists.

        ``fill(out)`` gathers into ``out``, or a new batch for None. Batches of one ``key`` have
        the same columns and shapes.
        """
        free = self._stages.setdefault(key, deque())
        for old in list(self._stages)[:-_MAX_KEYS]:
            self._stages.pop(old, None)
        stage = _next_stage(free)
        batch = fill(stage.batch)
        if batch is not stage.batch:
            batch = stage.batch = each(batch, self._pinned)
        sent: Batch = each(batch, self._copied)
        if self.device.type == "cuda":
            stage.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            stage.copied.record(torch.cuda.current_stream(self.device))
        free.append(stage)
        return sent

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)

    def clear(self) -> None:
        """Give the memory back."""
        self._stages.clear()


def _next_stage(free: deque[_Stage]) -> _Stage:
    """The one that was used longest ago, or another one while its copy alone goes on."""
    try:
        stage = free.popleft()
    except IndexError:
        return _Stage()
    if stage.copied is not None and not stage.copied.query():  # type: ignore[no-untyped-call]
        if not free:
            free.append(stage)
            return _Stage()
        stage.copied.synchronize()
    return stage


def as_device(device: Any) -> torch.device:
    """``device`` with its number; RuntimeError of torch's own for one that there is not."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
