"""`pkl` files: ``pickle.dump`` of the nested dict of one trajectory (`nested`), as RLinf's.

A pickle is a program that calls what it names. Here it can name nothing but the entries of
`_ADMITTED`, which stand for what tensors and arrays are pickled by: each is a function of this
module that checks what it is given and opens nothing, and neither they nor what they return can
be changed from within the pickle. Everything else is a CorruptError that names it.

A file is read whole whenever it is opened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import torch

from mmbuf import files
from mmbuf.adapters import nested
from mmbuf.entry import Entry
from mmbuf.schema import Array, Schema
from mmbuf.trajectory import fields_of

NAME = "pkl"
EXTENSION = ".pkl"
CAN_MAP = False
IS_DIRECTORY = False

_PROTOCOL = 4  # RLinf's own; every Python since 3.4 reads it
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_TORCH_VERSION = 1001
_NUMPY_CODE = re.compile(r"\?|[biufcU][0-9]{1,9}")


def write(
    path: str, entry: Entry, schema: Schema, rows: list[Array], texts: dict[int, list[str]]
) -> Entry:
    """Write one trajectory to the new ``path``; as `storage.Format.write`."""
    with files.created_file(path) as file:
        _Pickler(file, _PROTOCOL).dump(nested.to_dict(entry, schema, rows, texts))
        file.write(nested.mark_of(entry))  # who reads a pickle stops at its end
    size = files.size_of(path)
    return dataclasses.replace(entry, format=NAME, size_bytes=size, parts=nested.parts(rows))


@contextmanager
def opened(path: str, entry: Entry, schema: Schema, *, is_checked: bool) -> Iterator[nested.Source]:
    """The file of ``entry``; CorruptError unless it is that one.

    Checked every time: reading it costs more than that.
    """
    yield nested.Source(path, _read(path, entry), entry, schema)


def load(path: str, entry: Entry, schema: Schema, *, can_map: bool) -> list[Array | list[str]]:
    """All rows of each column, left-out ones too, in memory of their own; text as strings."""
    return nested.Source(path, _read(path, entry), entry, schema).all_rows()


def describe(path: str, name: str) -> tuple[Entry, Schema, None]:
    """What a file says of itself; there are no CRCs of columns.

    The uuid of a file of RLinf's comes from all bytes.
    """
    with files.opened(path) as fd:
        data = files.read_at(fd, files.length(fd), 0)
        uuid = nested.uuid_of(fd, NAME, lambda: _digest(data))
    return nested.describe(path, name, NAME, _content(path, data), uuid)


def verify(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless the file can be read and be ``entry``'s. A pickle has no checksum."""
    load(path, entry, schema, can_map=False)


def check_identity(path: str, entry: Entry, schema: Schema) -> None:
    """CorruptError unless the file is that of the entry's trajectory; no row of ours is read."""
    with files.opened(path) as fd:
        nested.check_identity(
            path, fd, entry, NAME, lambda: _digest(files.read_at(fd, files.length(fd), 0))
        )


def _read(path: str, entry: Entry) -> nested.Content:
    with files.opened(path) as fd:
        nested.check_size(path, files.length(fd), entry)
        data = files.read_at(fd, entry.size_bytes, 0)
        nested.check_identity(path, fd, entry, NAME, lambda: _digest(data))
    return _content(path, data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(path: str, data: bytes) -> nested.Content:
    with nested.reading(path):
        item = _unwrapped(_Unpickler(io.BytesIO(data), _ADMITTED).load())
        return nested.Content(*fields_of(item), len(data))


class _Pickler(pickle.Pickler):
    """Writes storages without a dtype as storages of bytes.

    Those are what the tensors of younger dtypes (uint16, float8) are pickled with, and torch
    2.13 cannot read its own: ``type object 'UntypedStorage' has no attribute 'dtype'``.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            tensor = torch.empty(0, dtype=torch.uint8).set_(obj)
            _, (typed_storage, *_) = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
            return typed_storage.__reduce__()
        return NotImplemented


class _Unpickler(pickle._Unpickler):
    """Reads a pickle that names only what is ``admitted``.

    The one in Python: the one in C takes memory for as many objects as a damaged byte says.
    """

    def __init__(self, file: BinaryIO, admitted: Mapping[tuple[str, str], _Inert]) -> None:
        super().__init__(file)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._admitted[module, name]
        except KeyError:
            raise _refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _refused("a reference to something outside")

    def get_extension(self, code: int) -> Any:
        raise _refused(f"extension {code}")  # would be looked up in a cache first, not by name


class _StorageUnpickler(_Unpickler):
    """Reads the description of one storage."""

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Inert:
    """A value that a pickle can pass on, but not look into, call or change."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        raise _refused(f"a state of {self.value!r}")


class _Admitted(_Inert):
    """A function that a pickle can call."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)


class _Dtype(_Inert):
    """A NumPy dtype of numbers or text. Its state is its byte order."""

    __slots__ = ()

    def __init__(self, code: str, *_: Any) -> None:
        if not _NUMPY_CODE.fullmatch(code):
            raise _refused(f"an array of dtype {code!r}")
        super().__init__(np.dtype(code))

    def __setstate__(self, state: Any) -> None:
        _, order, *structure = state
        if structure[:3] != [None, None, None]:
            raise _refused("an array of structures")
        self.value = self.value.newbyteorder(order)


class _Array(_Inert):
    """A NumPy array. Its state is its content."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.value = _array_of(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"expected tensors, arrays, text and numbers only, got {what!r}.")


def _unwrapped(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _unwrapped(value) for key, value in node.items()}
    return node.value if isinstance(node, _Inert) else node


def _storage(data: bytes) -> _Inert:
    """A storage as a flat tensor, from the form that torch wrote before it had archives."""
    file = io.BytesIO(data)
    magic, version, system = (_Unpickler(file, {}).load() for _ in range(3))
    if (magic, version) != (_TORCH_MAGIC, _TORCH_VERSION):
        raise _refused("a storage of another form")
    if system["little_endian"] != (sys.byteorder == "little"):
        raise _refused("a storage of the other byte order")
    kind, dtype, key, _, size, view = _StorageUnpickler(file, _STORAGES).load()
    keys = _Unpickler(file, {}).load()
    (stored_size,) = struct.unpack("<q", file.read(8))
    values = torch.from_numpy(np.frombuffer(data, np.uint8, offset=file.tell()).copy())
    flat = _flat(values, dtype)
    if (kind, keys, view, size, stored_size) != ("storage", [key], None, len(flat), len(flat)):
        raise _refused("a storage of another size than its own")
    return _Inert(flat)


def _flat(tensor: torch.Tensor, dtype: _Inert) -> torch.Tensor:
    """All memory of ``tensor`` as a flat one of ``dtype``; also where there is none to view."""
    return torch.empty(0, dtype=dtype.value).set_(tensor.untyped_storage())


def _tensor(
    storage: _Inert,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    metadata: Mapping[str, bool] | None = None,
) -> _Inert:
    tensor = storage.value.as_strided(size, stride, offset)
    if metadata and metadata.get("conj"):
        tensor = tensor.conj()
    if metadata and metadata.get("neg"):
        tensor = -tensor
    return _Inert(tensor)


def _tensor_of_bytes(
    storage: _Inert,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: _Inert,
    metadata: Mapping[str, bool] | None = None,
) -> _Inert:
    flat = _flat(storage.value, dtype)
    return _tensor(_Inert(flat), offset, size, stride, requires_grad, hooks, metadata)


def _array_of(data: bytes, dtype: _Dtype) -> Array:
    if not isinstance(dtype, _Dtype):
        raise _refused("an array without a dtype")
    return np.frombuffer(data, dtype.value)


def _empty_array(kind: Any, shape: Any, code: Any) -> _Array:
    return _Array(np.empty(0))


def _array(
    data: bytes, dtype: _Dtype, shape: Any, order: Any, axes: tuple[int, ...] | None = None
) -> _Array:
    flat = _array_of(data, dtype)
    if axes is None:
        return _Array(flat.reshape(shape, order=order))
    return _Array(flat.reshape(shape).transpose(axes))


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return _array_of(data, dtype).reshape(()).item()


def _no_bytes() -> bytes:
    return b""


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes as pickles before protocol 3 have them."""
    return text.encode("latin1")


def _both(module: str, name: str, function: Callable[..., Any]) -> dict[tuple[str, str], _Inert]:
    """Under the names of NumPy 1 and NumPy 2."""
    return {(f"numpy.{core}.{module}", name): _Admitted(function) for core in ("core", "_core")}


_STORAGES: dict[tuple[str, str], _Inert] = {
    ("torch", "BoolStorage"): _Inert(torch.bool),
    ("torch", "ByteStorage"): _Inert(torch.uint8),
    ("torch", "CharStorage"): _Inert(torch.int8),
    ("torch", "ShortStorage"): _Inert(torch.int16),
    ("torch", "IntStorage"): _Inert(torch.int32),
    ("torch", "LongStorage"): _Inert(torch.int64),
    ("torch", "HalfStorage"): _Inert(torch.float16),
    ("torch", "BFloat16Storage"): _Inert(torch.bfloat16),
    ("torch", "FloatStorage"): _Inert(torch.float32),
    ("torch", "DoubleStorage"): _Inert(torch.float64),
    ("torch", "ComplexFloatStorage"): _Inert(torch.complex64),
    ("torch", "ComplexDoubleStorage"): _Inert(torch.complex128),
    ("torch.storage", "UntypedStorage"): _Inert(torch.uint8),
}

_ADMITTED: dict[tuple[str, str], _Inert] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Admitted(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Admitted(_tensor_of_bytes),
    ("torch.storage", "_load_from_bytes"): _Admitted(_storage),
    ("collections", "OrderedDict"): _Admitted(dict),
    ("numpy", "ndarray"): _Inert(np.ndarray),
    ("numpy", "dtype"): _Admitted(_Dtype),
    **_both("multiarray", "_reconstruct", _empty_array),
    **_both("multiarray", "scalar", _scalar),
    **_both("numeric", "_frombuffer", _array),
    ("_codecs", "encode"): _Admitted(_latin1),
    ("__builtin__", "bytes"): _Admitted(_no_bytes),
    ("builtins", "bytes"): _Admitted(_no_bytes),
    **{
        ("torch", name): _Inert(value)
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
}
