"""The disk as tests want it: each call by which `mmbuf.files` changes it is seen, or forgotten.

`Calls` stands in the place of ``os`` in `mmbuf.files`, the one door to the disk. `Disk` writes down
what goes through it and gives what a power failure may leave.
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHANGES = (
    *("open", "close", "mkdir", "rmdir", "rename", "link", "unlink", "ftruncate"),
    *("posix_fallocate", "pwrite", "write", "copy_file_range", "fsync"),
)
_SECTOR = 512

Call = Callable[..., Any]
Tree = dict[str, Any]  # names to bytes, or to trees


class Calls:
    """``os``, but each call of `CHANGES` goes through ``change(name, call, arguments)``."""

    def __init__(self, change: Callable[[str, Call, tuple[Any, ...]], Any]) -> None:
        self._change = change

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGES:
            return real

        def function(*arguments: Any, **options: Any) -> Any:
            if options:  # what is read in an open directory; all changes go by their paths
                return real(*arguments, **options)
            return self._change(name, real, arguments)

        return function

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not os.path.isdir(os.path.dirname(path)):
            self.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            self.mkdir(path)
        except FileExistsError:
            if not exist_ok or not os.path.isdir(path):
                raise


@dataclass(frozen=True)
class Op:
    """A change of a node (a file or directory, whatever names it has), or its sync."""

    kind: str  # names, write, size, sync, or nothing
    node: int
    names: tuple[tuple[str, int | None], ...] = ()  # that a directory gets (None: loses), at once
    offset: int = 0
    data: bytes = b""


@dataclass
class Node:
    """What of a node is on the disk itself, and what may be."""

    is_directory: bool
    is_journal: bool = False  # only ever appended to
    names: dict[str, int] = field(default_factory=dict)
    data: bytes = b""
    pending: list[Op] = field(default_factory=list)


class Disk:
    """A disk that forgets. Thread-safe.

    Calls are made on the real disk, below ``root``, and written down in ``ops``. What was there
    before is on the disk itself. Of the ops the power may take away, at any moment:

    - names of a directory that was not synced after they were set or taken away; each change by
      itself, but a rename is one change
    - bytes of a file that was not synced after they were written, sector by sector; the length by
      itself, so that zeros may be in their place
    - of what is appended all from some byte on, to the end or to zeros
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = Calls(self._change)
        self.ops: list[Op] = []
        self._nodes: list[Node] = []  # as they were before
        self._inodes: dict[int, int] = {}
        self._written: set[int] = set()  # descriptors that are open for writing
        self._lock = threading.Lock()  # so that ops are written down in the order they happen
        self._take_in(root)

    def _take_in(self, path: Path) -> int:
        inode = path.lstat().st_ino
        if inode in self._inodes:
            return self._inodes[inode]
        number = self._inodes[inode] = len(self._nodes)
        node = Node(path.is_dir(), path.suffix == ".jsonl")
        self._nodes.append(node)
        if node.is_directory:
            node.names = {inner.name: self._take_in(inner) for inner in path.iterdir()}
        else:
            node.data = path.read_bytes()
        return number

    # -- writing down --------------------------------------------------------------------------

    def _change(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            return getattr(self, f"_{name}")(call, *arguments)

    def _node_of(self, file: str | int) -> int:
        status = os.fstat(file) if isinstance(file, int) else os.lstat(file)
        return self._inodes[status.st_ino]

    def _made(self, path: str, node: Node) -> None:
        self._inodes[os.lstat(path).st_ino] = len(self._nodes)
        self._nodes.append(node)
        self._name(path, len(self._nodes) - 1)

    def _name(self, path: str, node: int | None, *, instead_of: str = "") -> None:
        directory, name = os.path.split(path)
        names: tuple[tuple[str, int | None], ...] = ((name, node),)
        if instead_of:
            assert os.path.dirname(instead_of) == directory
            names = ((os.path.basename(instead_of), None), *names)
        self.ops.append(Op("names", self._node_of(directory), names))

    def _open(self, call: Call, path: str, flags: int, mode: int = 0o777) -> Any:
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = call(path, flags, mode)
        if is_new:
            self._made(path, Node(is_directory=False, is_journal=bool(flags & os.O_APPEND)))
        if flags & (os.O_RDWR | os.O_WRONLY):
            self._written.add(fd)
        return fd

    def _close(self, call: Call, fd: int) -> None:
        if fd in self._written:
            self._written.discard(fd)
            node = self._node_of(fd)
            data = os.pread(fd, os.fstat(fd).st_size, 0)
            now = _most(self._changes_of(node), self._nodes[node].data)
            if data != now:  # a library wrote to it
                self.ops.append(Op("size", node, offset=len(data)))
                self.ops.append(Op("write", node, data=data))
        call(fd)

    def _changes_of(self, node: int) -> list[Op]:
        return [op for op in self.ops if op.node == node]

    def _mkdir(self, call: Call, path: str, mode: int = 0o777) -> None:
        call(path, mode)
        self._made(path, Node(is_directory=True))

    def _rmdir(self, call: Call, path: str) -> None:
        call(path)
        self._name(path, None)

    def _unlink(self, call: Call, path: str) -> None:
        call(path)
        self._name(path, None)

    def _rename(self, call: Call, source: str, target: str) -> None:
        node = self._node_of(source)
        call(source, target)
        self._name(target, node, instead_of=source)

    def _link(self, call: Call, source: str, target: str) -> None:
        call(source, target)
        self._name(target, self._node_of(source))

    def _ftruncate(self, call: Call, fd: int, size: int) -> None:
        call(fd, size)
        self.ops.append(Op("size", self._node_of(fd), offset=size))

    def _posix_fallocate(self, call: Call, fd: int, offset: int, size: int) -> None:
        before = os.fstat(fd).st_size
        call(fd, offset, size)
        if os.fstat(fd).st_size > before:
            self.ops.append(Op("size", self._node_of(fd), offset=os.fstat(fd).st_size))

    def _pwrite(self, call: Call, fd: int, data: Any, offset: int) -> int:
        written: int = call(fd, data, offset)
        whole = bytes(memoryview(data).cast("B")[:written])
        self.ops.append(Op("write", self._node_of(fd), offset=offset, data=whole))
        return written

    def _write(self, call: Call, fd: int, data: bytes) -> int:
        offset = os.fstat(fd).st_size
        written: int = call(fd, data)
        self.ops.append(Op("write", self._node_of(fd), offset=offset, data=data[:written]))
        return written

    def _copy_file_range(self, call: Call, fd: int, new: int, size: int, at: int, to: int) -> int:
        copied: int = call(fd, new, size, at, to)
        data = os.pread(fd, copied, at)
        self.ops.append(Op("write", self._node_of(new), offset=to, data=data))
        return copied

    def _fsync(self, call: Call, fd: int) -> None:
        self.ops.append(Op("sync", self._node_of(fd)))

    def leave_out_syncs(self, what: str) -> None:
        """Make as if nobody had synced any directory, journal or (other) file."""
        for number, op in enumerate(self.ops):
            node = self._nodes[op.node]
            kind = "directory" if node.is_directory else "journal" if node.is_journal else "file"
            if op.kind == "sync" and kind == what:
                self.ops[number] = dataclasses.replace(op, kind="nothing")

    # -- the power fails -----------------------------------------------------------------------

    def nodes_after(self, num_ops: int) -> Iterator[tuple[int, list[Node]]]:
        """``(cut, nodes)`` after each of the first ``num_ops`` ops; the nodes change as it goes."""
        nodes = [dataclasses.replace(node, pending=[]) for node in self._nodes]
        yield 0, nodes
        for cut, op in enumerate(self.ops[:num_ops], 1):
            node = nodes[op.node]
            if op.kind in ("names", "write", "size"):
                node.pending.append(op)
            elif op.kind == "sync":
                if node.is_directory:
                    node.names = _names(node, node.pending)
                else:
                    node.data = _most(node.pending, node.data)
                node.pending = []
            yield cut, nodes


def least(nodes: list[Node]) -> Tree:
    """All that is not synced is lost."""
    return _tree(nodes, lambda node: node.names, lambda node: node.data)


def most(nodes: list[Node]) -> Tree:
    """Nothing is lost."""
    return _tree(
        nodes,
        lambda node: _names(node, node.pending),
        lambda node: _most(node.pending, node.data),
    )


def mixed(nodes: list[Node], rng: random.Random) -> Tree:
    """Some of what is not synced is lost."""
    share = rng.choice((0.2, 0.5, 0.8, 1))  # of the names that survive
    return _tree(
        nodes,
        lambda node: _names(node, [op for op in node.pending if rng.random() < share]),
        lambda node: _mixed(node, rng),
    )


def _tree(
    nodes: list[Node],
    names: Callable[[Node], dict[str, int]],
    data: Callable[[Node], bytes],
) -> Tree:
    known: dict[int, bytes] = {}  # a file of two names has one content

    def content(number: int) -> Any:
        node = nodes[number]
        if node.is_directory:
            return {name: content(inner) for name, inner in sorted(names(node).items())}
        if number not in known:
            known[number] = data(node)
        return known[number]

    tree: Tree = content(0)
    return tree


def _names(node: Node, ops: list[Op]) -> dict[str, int]:
    found = dict(node.names)
    for op in ops:
        for name, inner in op.names:
            found.pop(name, None)
            if inner is not None:
                found[name] = inner
    return found


def _most(ops: list[Op], data: bytes = b"") -> bytes:
    found = bytearray(data)
    for op in ops:
        if op.kind == "size":
            del found[op.offset :]
            found += bytes(op.offset - len(found))
        elif op.kind == "write":
            found += bytes(max(0, op.offset - len(found)))
            found[op.offset : op.offset + len(op.data)] = op.data
    return bytes(found)


def _mixed(node: Node, rng: random.Random) -> bytes:
    if not node.pending:
        return node.data
    new = _most(node.pending, node.data)
    kind = rng.choice(("old", "new", "torn", "torn"))
    if kind == "old":
        return node.data
    if kind == "new":
        return new
    if node.is_journal:
        pairs = zip(new, node.data, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(node.data))
        kept = rng.randint(min(same, len(new)), len(new))
        return new[:kept] + bytes(rng.choice((0, rng.randint(0, len(new) - kept))))
    size = rng.choice((len(new), len(new), rng.randint(0, len(new))))
    share = rng.choice((0, 0.5, 0.9))  # of the sectors that survive
    old = node.data[:size].ljust(size, b"\0")
    return b"".join(
        (new if rng.random() < share else old)[at : min(size, at + _SECTOR)]
        for at in range(0, size, _SECTOR)
    )


def materialise(tree: Tree, directory: Path) -> None:
    """Make ``directory``, which is new, hold the tree."""
    directory.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (directory / name).write_bytes(inner)
        else:
            materialise(inner, directory / name)
