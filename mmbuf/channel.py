"""Channel: a bounded queue between whoever collects and whoever stores.

A channel between processes is built so that no process can leave it broken, killed or not.
Each item is one message in a socket pair: its memory is a shared block of torch's, and the
message carries that block's file descriptor. The kernel takes a message whole or not at all, keeps
the block alive while it is under way, though the sender be gone, and ends the stream for everybody
at `Channel.close`, behind the last message. A producer that is killed within `Channel.put`
has put nothing.

An exception of a signal handler (``KeyboardInterrupt``) may come anywhere in the main thread, and a
handler may call the channel itself. CPython runs handlers, and lets other threads have their turn,
after a call, where a loop goes back and where a function begins, and nowhere else. So what puts an
item in or takes one out is a few statements without a call, the last before the caller goes on: it
is done or not, for handlers and threads alike, and no lock is held. C code that is to be called
there is prepared as an iterator (``map``) and called by unpacking it.

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
import time
import weakref
from _thread import allocate_lock
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.context import BaseContext
from operator import methodcaller
from typing import Any

import numpy as np
import torch

from mmbuf import files, shield
from mmbuf.arguments import seconds, told, whole
from mmbuf.errors import ClosedError

# As many as the buffer of a socket holds on every common system (Linux by default: 278).
MAX_ITEMS_BETWEEN_PROCESSES = 256

_MESSAGE = struct.Struct("<QQ")  # bytes of the block, bytes of its head
_RIGHTS_BYTES = socket.CMSG_LEN(array("i").itemsize)  # of one descriptor
_ALIGNMENT = 64
_SOCKET_BYTES = 1 << 20
# A turn takes microseconds: who has it for so long was killed in it.
_TURN_TIMEOUT_S = 1.0
# How soon one who waits sees what nobody told him: who made room was killed before, or interrupted.
_RECHECK_S = 0.1
_SHORTEST_PAUSE_S = 0.0005  # of one who was told: what he waits for is only just to come


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
        waits). If it raises, a signal handler's exception too, the item is not in the channel.
        """
        self._items.put(item, seconds("timeout_s", timeout_s))

    def get(self, timeout_s: float | None = None) -> Any:
        """Take the oldest item; wait for one, for ever or for ``timeout_s``.

        `queue.Empty` after the timeout, `ClosedError` once the channel is closed and empty. If a
        signal handler's exception ends it, the item is still there; between processes, for this
        process only.
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


class _Wait:
    """How one caller waits: until he is woken, looks again after pauses, and at last gives up.

    ``lock`` is held until somebody wakes him, and is another one for each time that he waits.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.lock: Any = None
        self._remaining_s = _countdown(timeout_s)
        self._pause_s = _RECHECK_S

    def begins(self) -> bool:
        """Whether there is time left; then there is a lock, that he puts among those who wait."""
        if self._remaining_s() <= 0:
            return False
        lock = allocate_lock()
        lock.acquire()
        self.lock = lock
        return True

    def sleep(self, waiting: deque[Any]) -> None:
        """Until he is woken, or for a pause; then he is not among ``waiting`` any more."""
        lock = self.lock
        is_woken = False
        try:
            is_woken = lock.acquire(timeout=max(0.0, min(self._pause_s, self._remaining_s())))
        finally:
            self.lock = None
            if lock in waiting:
                with contextlib.suppress(ValueError):
                    waiting.remove(lock)
        self._pause_s = _SHORTEST_PAUSE_S if is_woken else min(2 * self._pause_s, _RECHECK_S)


def _wake(waiting: deque[Any]) -> None:
    """Wake the one who waits for longest."""
    with contextlib.suppress(IndexError):  # woken by another
        waiting.popleft().release()


class _ThreadQueue:
    """The standard library's `queue.Queue` cannot be closed before Python 3.13; this one can.

    Who puts or takes wakes one who waits for that *before*, as nothing may be called afterwards:
    who is woken looks again, soon at first.
    """

    def __init__(self, maxsize: int) -> None:
        self._num_free = maxsize
        self._items: deque[Any] = deque()
        self._is_closed = False
        self._putters: deque[Any] = deque()  # locks of those who wait
        self._getters: deque[Any] = deque()

    def __getstate__(self) -> None:
        raise TypeError(
            "Channel: expected a channel between processes to be sent to a process, got one "
            'between threads. Make it with context="spawn".'
        )

    def put(self, item: Any, timeout_s: float | None) -> None:
        wait: _Wait | None = None
        while True:
            if self._num_free and self._getters:
                _wake(self._getters)
            if self._is_closed:
                raise ClosedError(_CLOSED_TO_PUT)
            if self._num_free:
                self._num_free -= 1
                self._items += (item,)
                return
            if wait is None:
                wait = _Wait(timeout_s)
            elif wait.lock is not None:
                self._putters += (wait.lock,)
                wait.sleep(self._putters)
            elif not wait.begins():  # and look again: now he would be woken
                raise queue.Full

    def get(self, timeout_s: float | None) -> Any:
        wait: _Wait | None = None
        while True:
            if self._items and self._putters:
                _wake(self._putters)
            if self._items:
                item = self._items[0]
                del self._items[0]
                self._num_free += 1
                return item
            if self._is_closed:
                raise ClosedError(_CLOSED_TO_GET)
            if wait is None:
                wait = _Wait(timeout_s)
            elif wait.lock is not None:
                self._getters += (wait.lock,)
                wait.sleep(self._getters)
            elif not wait.begins():  # and look again: now he would be woken
                raise queue.Empty

    def close(self) -> None:
        self._is_closed = True
        for waiting in (self._putters, self._getters):
            while waiting:
                _wake(waiting)

    def __len__(self) -> int:
        return len(self._items)


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
        self._pid = files.process_id()
        self._returned: deque[_Message] = deque()  # taken by a `get` that was interrupted
        # Not in `close`: other threads may be waiting on the descriptors.
        for end in (self._inlet, self._outlet):
            weakref.finalize(self, end.close).atexit = False
        weakref.finalize(self, _close_all, self._returned).atexit = False

    def put(self, item: Any, timeout_s: float | None) -> None:
        remaining_s = _countdown(timeout_s)
        block: _Block | None = None
        while True:
            if self._num_unread() < self._maxsize:
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
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [block.descriptor]))
        acquire = map(self._turn.acquire, (True,), (_TURN_TIMEOUT_S,))
        send = map(self._inlet.sendmsg, ([block.message],), ([rights],))
        release = map(methodcaller("release"), (self._turn,))
        has_asked = False
        try:
            _ = [*acquire]
            has_asked = True
            if self._num_unread() >= self._maxsize:
                return False
            _ = [*send]
            return True
        except BrokenPipeError:
            raise ClosedError(_CLOSED_TO_PUT) from None
        except OSError as error:
            # The kernel's own bounds on bytes and on descriptors under way.
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                return False
            raise
        finally:
            # Also when it was not acquired, or a dead holder would cost every put the timeout.
            if has_asked:
                try:
                    _ = [*release]
                except ValueError:
                    has_asked = False

    def get(self, timeout_s: float | None) -> Any:
        self._begin_anew_in_a_child()
        remaining_s = _countdown(timeout_s)
        message = _Message()
        try:
            while not message.raw:
                if self._returned:
                    message = self._returned[0]
                    del self._returned[0]
                    break
                receive = map(self._outlet.recvmsg, (_MESSAGE.size,), (_RIGHTS_BYTES,))
                try:
                    [(message.raw, message.rights, _, _)] = receive
                except BlockingIOError:
                    wait_s = remaining_s()
                    if wait_s <= 0:
                        raise queue.Empty from None
                    connection.wait([self._outlet], min(wait_s, _RECHECK_S))
                    continue
                if message.raw:
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        self._outlet.send(b"\0")
                # The last item and the end may have come between the kernel's two looks.
                elif not self._num_unread():
                    raise ClosedError(_CLOSED_TO_GET)
            message.load()
            shield.run(message.close)
            return message.item
        except BaseException:
            if message.raw:
                self._returned += (message,)
            raise

    def _begin_anew_in_a_child(self) -> None:
        """What the parent has taken is the parent's."""
        if self._pid != files.process_id():
            self._pid = files.process_id()
            _close_all(self._returned)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # macOS: shut down before
            self._inlet.shutdown(socket.SHUT_RDWR)

    def __len__(self) -> int:
        return self._num_unread() + len(self._returned)

    def _num_unread(self) -> int:
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
        # Torch's own method beneath the one that holds a lock meanwhile, for storages that others
        # know: a handler that came within that one could put nothing.
        share = super(torch.UntypedStorage, storage)._share_fd_cpu_
        self.descriptor, size_bytes = share()  # type: ignore[no-untyped-call]
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


class _Message:
    """What `get` took from the socket; it stays until its item is with the caller."""

    def __init__(self) -> None:
        self.raw = b""  # empty: no message
        self.rights: Sequence[tuple[int, int, bytes]] = ()  # as ``recvmsg`` gives them
        self.item: Any = None
        self._is_loaded = False

    def load(self) -> None:
        """Have the item ready. One that cannot be loaded is no message any more.

        In the thread that wants it: unpickling may import what this thread is just importing. It
        may be interrupted, and then called again.
        """
        if not self._is_loaded:
            try:
                self.item = _loaded(self.raw, self._descriptors())
            except Exception:
                shield.run(self._give_up)
                raise
            self._is_loaded = True

    def _give_up(self) -> None:
        self.raw = b""
        self.close()

    def _descriptors(self) -> list[int]:
        found = array("i")
        for _, _, data in self.rights:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
        return list(found)

    def close(self) -> None:
        """Close its descriptor; the item has its own."""
        descriptors, self.rights = self._descriptors(), ()
        for descriptor in descriptors:
            socket.close(descriptor)


def _close_all(messages: deque[_Message]) -> None:
    while messages:
        messages.popleft().close()


def _loaded(message: bytes, descriptors: list[int]) -> Any:
    """The item in the block that ``message`` describes; its tensors look into the block."""
    if not descriptors:
        raise OSError(errno.EMFILE, "Channel.get: no file descriptor was free; the item is lost")
    size_bytes, head_bytes = _MESSAGE.unpack(message)
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
