"""Channel: a bounded queue between whoever collects and whoever stores.

A channel between processes is built so that no process can leave it broken, killed or not.
Each item is one message in a socket pair: its memory is a shared block of torch's, and the
message carries that block's file descriptor. The kernel takes a message whole or not at all, keeps
the block alive while it is under way, though the sender be gone, and ends the stream for everybody
at `Channel.close`, behind the last message. A producer that is killed within `Channel.put`
has put nothing.

Of its own module, beside the collector, since it knows nothing of trajectories.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import multiprocessing
import pickle
import queue
import socket
import struct
import sys
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch

from mmbuf.arguments import seconds, told, whole
from mmbuf.errors import ClosedError

# As many as the buffer of a socket holds on every common system (Linux by default: 278).
MAX_ITEMS_BETWEEN_PROCESSES = 256

_MESSAGE = struct.Struct("<QQ")  # bytes of the block, bytes of its head
_ALIGNMENT = 64
_SOCKET_BYTES = 1 << 20
# A turn takes microseconds: who has it for so long was killed in it.
_TURN_TIMEOUT_S = 1.0
# How soon a blocked put sees room that a consumer made and was killed before it could say so.
_RECHECK_S = 0.1
_LONGEST_WAIT_S = 86_400.0  # as an int of milliseconds it fits in what the system takes


class Channel:
    """A bounded queue of at most ``maxsize`` items, between threads or between processes.

    ``context=None``: between threads; the item itself is handed over.

    ``context="spawn"`` (or ``"fork"``, ``"forkserver"``, or a context of multiprocessing): between
    processes that get the channel as an argument of their ``Process``. `put` copies the item
    into shared memory before it returns, so the sender may change it or exit; `get` maps that
    memory without a copy. CPU tensors and NumPy arrays travel this way, the rest is pickled.
    Tensors come out detached, contiguous and writable. What came out of one `get` holds one file
    descriptor for as long as one of its tensors or arrays lives. ``maxsize`` is at most
    `MAX_ITEMS_BETWEEN_PROCESSES`.

    Any number of threads and processes may put and get; each item is got once. After
    `close` no item gets in and those inside still come out; then `get` raises `ClosedError` and
    iteration ends. Leaving a ``with`` block closes.
    """

    def __init__(self, maxsize: int, context: str | BaseContext | None = None) -> None:
        maxsize = whole("maxsize", maxsize, 1)
        self._items: _ThreadQueue | _ProcessQueue
        if context is None:
            self._items = _ThreadQueue(maxsize)
        else:
            if isinstance(context, str):
                context = multiprocessing.get_context(context)
            if not isinstance(context, BaseContext):
                raise TypeError(
                    f"context: expected None, a name or a context, got {told(context)}."
                )
            self._items = _ProcessQueue(maxsize, context)

    def put(self, item: Any, timeout_s: float | None = None) -> None:
        """Put ``item`` in; wait for room, for ever or for ``timeout_s``.

        `queue.Full` after the timeout, `ClosedError` once the channel is closed (also while it
        waits). If it raises, the item is not in the channel.
        """
        self._items.put(item, seconds("timeout_s", timeout_s))

    def get(self, timeout_s: float | None = None) -> Any:
        """Take the oldest item; wait for one, for ever or for ``timeout_s``.

        `queue.Empty` after the timeout, `ClosedError` once the channel is closed and empty.
        """
        return self._items.get(seconds("timeout_s", timeout_s))

    def close(self) -> None:
        """Let no further item in, for everybody, and wake all who wait. May be called again."""
        self._items.close()

    def __len__(self) -> int:
        """How many items are inside; others may change it at once."""
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        """Take items until the channel is closed and empty."""
        while True:
            try:
                item = self.get()
            except ClosedError:
                return
            yield item

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_CLOSED_TO_PUT = "Channel.put: the channel is closed. The item was not put in."
_CLOSED_TO_GET = "Channel.get: the channel is closed and empty. Nothing more will come."


class _ThreadQueue:
    """The standard library's `queue.Queue` cannot be closed before Python 3.13; this one can."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        self._is_closed = False
        lock = threading.Lock()  # guards the two above
        self._may_put = threading.Condition(lock)
        self._may_get = threading.Condition(lock)

    def __getstate__(self) -> None:
        raise TypeError(
            "Channel: expected a channel between processes to be sent to a process, got one "
            'between threads. Make it with context="spawn".'
        )

    def put(self, item: Any, timeout_s: float | None) -> None:
        with self._may_put:
            if not self._may_put.wait_for(self._has_room_or_is_closed, timeout_s):
                raise queue.Full
            if self._is_closed:
                raise ClosedError(_CLOSED_TO_PUT)
            self._items.append(item)
            self._may_get.notify()

    def get(self, timeout_s: float | None) -> Any:
        with self._may_get:
            if not self._may_get.wait_for(self._has_items_or_is_closed, timeout_s):
                raise queue.Empty
            if not self._items:
                raise ClosedError(_CLOSED_TO_GET)
            self._may_put.notify()
            return self._items.popleft()

    def close(self) -> None:
        with self._may_put:
            self._is_closed = True
            self._may_put.notify_all()
            self._may_get.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    def _has_room_or_is_closed(self) -> bool:
        return self._is_closed or len(self._items) < self._maxsize

    def _has_items_or_is_closed(self) -> bool:
        return self._is_closed or bool(self._items)


class _ProcessQueue:
    """Messages from `_inlet` to `_outlet` are items; bytes the other way say that one was taken.

    multiprocessing's own queue would lose what its feeder thread had not written when a process is
    killed, block everybody when one is killed under its lock, and torch's reductions need the
    sender alive until its tensors are received.
    """

    def __init__(self, maxsize: int, context: BaseContext) -> None:
        if maxsize > MAX_ITEMS_BETWEEN_PROCESSES:
            raise ValueError(
                f"Channel: expected a maxsize of at most {MAX_ITEMS_BETWEEN_PROCESSES} between "
                f"processes, got {maxsize}."
            )
        # Linux keeps the bounds of messages; macOS has streams only, where the same bounds come
        # from the equal length of all messages.
        is_linux = sys.platform == "linux"
        kind = socket.SOCK_SEQPACKET if is_linux else socket.SOCK_STREAM
        inlet, outlet = socket.socketpair(socket.AF_UNIX, kind)
        for end in (inlet, outlet):
            end.setblocking(False)
        inlet.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        # Lets one put at a time count the items and add one: nothing but the bound hangs on it.
        turn = context.Lock()
        self.__setstate__((maxsize, inlet, outlet, turn))

    def __getstate__(self) -> tuple[Any, ...]:
        return self._maxsize, self._inlet, self._outlet, self._turn

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._maxsize, self._inlet, self._outlet, self._turn = state
        # Not in `close`: other threads may be waiting on the descriptors.
        for end in (self._inlet, self._outlet):
            weakref.finalize(self, end.close).atexit = False

    def put(self, item: Any, timeout_s: float | None) -> None:
        remaining_s = _countdown(timeout_s)
        block: _Block | None = None
        while True:
            if len(self) < self._maxsize:
                block = block or _Block.of(item)
                if self._has_sent(block):
                    return
            wait_s = remaining_s()
            if wait_s <= 0:
                raise queue.Full
            if connection.wait([self._inlet], min(wait_s, _RECHECK_S)):
                with contextlib.suppress(BlockingIOError):
                    if not self._inlet.recv(1):
                        raise ClosedError(_CLOSED_TO_PUT)

    def _has_sent(self, block: _Block) -> bool:
        """Send ``block`` if there is room."""
        self._turn.acquire(timeout=_TURN_TIMEOUT_S)
        try:
            if len(self) >= self._maxsize:
                return False
            socket.send_fds(self._inlet, [block.message], [block.descriptor])
        except BrokenPipeError:
            raise ClosedError(_CLOSED_TO_PUT) from None
        except OSError as error:
            # The kernel's own bounds on bytes and on descriptors under way.
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                return False
            raise
        finally:
            # Also when it was not acquired, or a dead holder would cost every put the timeout.
            with contextlib.suppress(ValueError):
                self._turn.release()
        return True

    def get(self, timeout_s: float | None) -> Any:
        remaining_s = _countdown(timeout_s)
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._outlet, _MESSAGE.size, 1)
            except BlockingIOError:
                wait_s = remaining_s()
                if wait_s <= 0:
                    raise queue.Empty from None
                connection.wait([self._outlet], min(wait_s, _LONGEST_WAIT_S))
                continue
            if message:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    self._outlet.send(b"\0")
                return _loaded(message, descriptors)
            # The last item and the end may have come between the kernel's two looks.
            if not len(self):
                raise ClosedError(_CLOSED_TO_GET)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # macOS: shut down before
            self._inlet.shutdown(socket.SHUT_RDWR)

    def __len__(self) -> int:
        unread = fcntl.ioctl(self._outlet.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(unread, sys.byteorder) // _MESSAGE.size


def _countdown(timeout_s: float | None) -> Callable[[], float]:
    """A function that gives the seconds left; infinite for None."""
    if timeout_s is None:
        return lambda: float("inf")
    end_s = time.monotonic() + timeout_s
    return lambda: end_s - time.monotonic()


class _Block:
    """One item in shared memory: the head (a pickle), then its buffers, each at 64 bytes."""

    def __init__(self, storage: torch.UntypedStorage, head_bytes: int) -> None:
        self._storage = storage  # owns the descriptor
        self.descriptor, size_bytes = storage._share_fd_cpu_()
        self.message = _MESSAGE.pack(size_bytes, head_bytes)

    @classmethod
    def of(cls, item: Any) -> _Block:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _ItemPickler(stream, protocol=5, buffer_callback=buffers.append).dump(item)
        raw = [buffer.raw() for buffer in buffers]
        head = pickle.dumps((stream.getvalue(), [view.nbytes for view in raw]))
        places, size_bytes = _places(len(head), [view.nbytes for view in raw])
        # By descriptor whatever the sharing strategy is: files by name would outlive the killed.
        storage = torch.UntypedStorage._new_using_fd_cpu(size_bytes)
        memory = _bytes_of(storage)
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        for place, view in zip(places, raw, strict=True):
            memory[place : place + view.nbytes] = np.frombuffer(view, np.uint8)
        return cls(storage, len(head))


def _loaded(message: bytes, descriptors: list[int]) -> Any:
    """The item in the block that ``message`` describes; its tensors look into the block."""
    if not descriptors:
        raise OSError(errno.EMFILE, "Channel.get: no file descriptor was free; the item is lost")
    size_bytes, head_bytes = _MESSAGE.unpack(message)
    with open(descriptors[0], "rb", buffering=0):  # closes it; the storage has its own
        storage = torch.UntypedStorage._new_shared_fd_cpu(  # type: ignore[attr-defined]
            descriptors[0], size_bytes
        )
    memory = _bytes_of(storage)
    body, sizes = pickle.loads(memory[:head_bytes].data)
    places, _ = _places(head_bytes, sizes)
    return pickle.loads(
        body,
        buffers=[memory[a : a + size] for a, size in zip(places, sizes, strict=True)],
    )


def _places(head_bytes: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the buffers start, and where the last one ends."""
    padded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in (head_bytes, *sizes))
    *places, size_bytes = itertools.accumulate(padded)
    return places, size_bytes


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


class _ItemPickler(pickle.Pickler):
    """Takes CPU tensors out of band like NumPy arrays; torch itself would copy them in band."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.is_cpu and obj.layout is torch.strided:
            flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            buffer = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
            return _tensor, (buffer, obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(
    buffer: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    return torch.from_numpy(buffer).view(dtype).reshape(shape)
