"""NumPy files: what is written is what `numpy.load` and mmbuf read, or is refused.

What all formats have in common is in ``test_formats.py``.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import pickle
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import bits, bytes_of_text, trajectory
from test_formats import UUID, Written, every_dtype, is_refused
from test_formats import write as write_format

from mmbuf import files
from mmbuf.errors import CorruptError, VersionError
from mmbuf.formats import npy

KIB = 1 << 10


def write(path: Path, fields: dict[str, Any], **known: Any) -> Written:
    return write_format(npy, path, fields, **known)


def names_in(file: Written) -> list[str]:
    """The column files of a directory, in no order."""
    return [path.name for path in file.files if path.name != "trajectory.json"]


def names_of(file: Written) -> list[str]:
    """The file of each column, told by its contents: the values of column i are all i."""
    found = {name: int(np.load(file.path / name)[0]) for name in names_in(file)}
    return sorted(found, key=lambda name: found[name])


def numbered(*paths: tuple[str, ...]) -> dict[str, Any]:
    """A trajectory of one row, in which every value of column i is i."""
    fields: dict[str, Any] = {}
    for i, path in enumerate(paths):
        inner = fields
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = torch.full((1, 1), i)
    return fields


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write(tmp_path / "a.npy", every_dtype())


@pytest.fixture
def small(tmp_path: Path) -> Written:
    return write(tmp_path / "a.npy", trajectory(3))


# -- numpy.load ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap_mode", ["r", None])
def test_numpy_loads_every_column_in_its_storage_dtype(written: Written, mmap_mode: Any) -> None:
    names = names_in(written)
    assert len(names) == len(written.schema.columns)
    for column, rows in zip(written.schema.columns, written.rows, strict=True):
        name = ".".join(column.path).replace(" ", "%20") + ".npy"
        array = np.load(written.path / name, mmap_mode=mmap_mode)
        assert (array.dtype, array.shape) == (column.storage, rows.shape)
        assert isinstance(array, np.memmap) == (mmap_mode == "r")
        assert bits(array) == bits(rows), name
        names.remove(name)
    assert names == []


def test_the_head_of_a_column_is_the_one_that_numpy_writes(written: Written) -> None:
    for name in names_in(written):
        data = (written.path / name).read_bytes()
        sink = io.BytesIO()
        np.save(sink, np.load(io.BytesIO(data)))
        theirs = sink.getvalue()
        size = data.index(b"\n") + 1
        assert data[:8] == theirs[:8] == b"\x93NUMPY\x01\x00"
        assert int.from_bytes(data[8:10], "little") == size - 10
        assert data[10:size].split() == theirs[10 : theirs.index(b"\n")].split()


# -- the layout ----------------------------------------------------------------------------------


def test_columns_of_16_kib_begin_on_a_page_and_smaller_ones_on_64_bytes(tmp_path: Path) -> None:
    def rows(n: int) -> torch.Tensor:
        return torch.zeros(1, 1, n, dtype=torch.uint8)

    fields = {"a": rows(16 * KIB - 1), "b": rows(16 * KIB), "c": rows(0), "d": rows(1)}
    file = write(tmp_path / "a.npy", fields)
    assert [part.offset for part in file.entry.parts] == [128, 4096, 128, 128]
    sizes = [(file.path / f"{name}.npy").stat().st_size for name in "abcd"]
    assert sizes == [128 + 16 * KIB - 1, 4096 + 16 * KIB, 128, 129]


def test_keys_are_escaped_and_joined_by_dots(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.npy",
        numbered(
            ("a", "b"),
            ("a", ""),
            ("a.b",),
            ("",),
            ("é/ü",),
            ("..",),
            ("trajectory",),
            ("trajectory.json",),
            ("c", "npy"),
            ("%",),
        ),
    )
    assert names_of(file) == [
        "a.b.npy",
        "a..npy",
        "a%2eb.npy",
        ".npy",
        "%c3a9%2f%c3bc.npy",
        "%2e%2e.npy",
        "trajectory.npy",
        "trajectory%2ejson.npy",
        "c.npy.npy",
        "%25.npy",
    ]


def test_names_that_are_too_long_end_in_a_digest_and_stay_apart(tmp_path: Path) -> None:
    paths = [("x" * 160,), ("x" * 161,), ("x" * 400,), ("x" * 401,), ("x" * 80, "x" * 80)]
    names = names_of(write(tmp_path / "a.npy", numbered(*paths)))
    assert names[0] == "x" * 160 + ".npy"
    assert [name[:162] for name in names[1:4]] == ["x" * 160 + "%%"] * 3
    assert names[4][:162] == "x" * 80 + "." + "x" * 79 + "%%"
    assert {len(name) for name in names[1:]} == {198}
    assert len({name[162:] for name in names[1:]}) == 4


def test_no_key_can_take_the_name_of_one_that_is_too_long(tmp_path: Path) -> None:
    long = "x" * 300
    (name,) = names_of(write(tmp_path / "a.npy", numbered((long,))))
    digest = name.removesuffix(".npy").removeprefix("x" * 160)
    names = names_of(write(tmp_path / "b.npy", numbered((long,), ("x" * 160 + digest,))))
    assert names[0] == name
    assert len(set(names)) == 2


def test_names_that_differ_only_in_case_end_in_a_digest(tmp_path: Path) -> None:
    names = names_of(write(tmp_path / "a.npy", numbered(("a", "B"), ("A", "b"), ("a", "c"))))
    assert [name.split("%%")[0] for name in names] == ["a.B", "A.b", "a.c.npy"]
    assert len({name.lower() for name in names}) == 3


def test_the_name_of_a_file_does_not_depend_on_the_order_of_the_columns(tmp_path: Path) -> None:
    paths = [("a",), ("A",), ("x" * 300,), ("b", "c")]
    forth = names_of(write(tmp_path / "a.npy", numbered(*paths)))
    back = names_of(write(tmp_path / "b.npy", numbered(*reversed(paths))))
    assert forth == list(reversed(back))


def test_the_header_is_json_that_people_can_read(small: Written) -> None:
    header = json.loads((small.path / "trajectory.json").read_text())
    columns = header.pop("columns")
    assert header == {
        "version": 1,
        "uuid": UUID,
        "trajectory_id": 7,
        "num_steps": 4,
        "num_envs": 3,
        "shape": [4, 3],
        "max_episode_length": 80,
        "model_weights_id": "weights é",
        "added_at": 1700000000.25,
    }
    assert columns[2] == {
        "path": ["dones"],
        "dtype": "bool",
        "row_shape": [],
        "rows": 15,
        "crc32": f"{zlib.crc32(small.rows[2].tobytes()):08x}",
    }
    text = zlib.crc32(small.rows[4].tobytes() + bytes_of_text(["task 3", "task 4", "task 0"]))
    assert columns[4] == {
        "path": ["curr_obs", "task"],
        "dtype": "text",
        "row_shape": [],
        "rows": 12,
        "crc32": f"{text:08x}",
        "strings": ["task 3", "task 4", "task 0"],
    }


# -- memory and descriptors ----------------------------------------------------------------------


def _maps(path: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.rsplit("/", 1)[1] for line in lines if f"{path}/" in line]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_only_large_columns_are_mapped_and_each_dies_with_its_last_array(tmp_path: Path) -> None:
    fields = {name: torch.ones(4, 4, 1024) for name in ("first", "second")}
    file = write(tmp_path / "a.npy", {"small": torch.ones(4, 4), **fields})
    _, first, second = file.load()
    assert sorted(_maps(file.path)) == ["first.npy", "second.npy"]
    last = second[3:, 7]
    del first, second
    gc.collect()
    assert _maps(file.path) == ["second.npy"]
    assert last.tolist() == [1.0] * 13
    del last
    gc.collect()
    assert _maps(file.path) == []


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let the process open ``count`` files more."""
    used = [int(name) for name in os.listdir("/dev/fd")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    try:
        # Numbers that are free below the limit would be given out as well.
        while len(fillers) < max(used) - len(used) + 1:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(*used, *fillers) + 1 + count, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_thousands_of_columns_need_two_descriptors(tmp_path: Path) -> None:
    fields: dict[str, Any] = {f"column {i}": torch.full((1, 1), i) for i in range(2000)}
    fields["text"] = [["x"]]
    with descriptors_left(2):
        file = write(tmp_path / "a.npy", fields)
        assert file.describe()[:2] == (file.entry, file.schema)
        leaves = file.load()
        assert [int(leaf[0]) for leaf in leaves[:-1]] == list(range(2000))
        assert leaves[-1] == ["x"]
        with file.opened() as source:
            rows = [np.empty((1, *c.row_shape), c.storage) for c in file.schema.columns]
            source.read_rows(np.array([0]), rows, np.array([0]))
        assert [int(leaf[0]) for leaf in rows[:-1]] == list(range(2000))


# -- files that change under the hand --------------------------------------------------------------


def _replace(file: Path, size: int) -> None:
    """Put another file of ``size`` bytes, with the same beginning, in the place of ``file``."""
    new = file.with_name("new")
    new.write_bytes(file.read_bytes()[:size].ljust(size))
    new.replace(file)


@pytest.mark.parametrize("size", [0, 4096, 4097, 1 << 20])
def test_a_column_that_was_replaced_since_the_check_is_never_mapped(
    tmp_path: Path, size: int
) -> None:
    file = write(tmp_path / "a.npy", {"a": torch.ones(4, 4, 1024), "b": torch.ones(4, 4)})
    with file.opened(is_checked=False) as source:
        _replace(file.path / "a.npy", size)
        with pytest.raises(CorruptError, match=f"expected {4096 + 65536} bytes, got {size}") as e:
            source.location(0)
        assert e.value.path == str(file.path / "a.npy")
        rows = np.empty((16,), np.float32)
        source.read_part(1, rows)
        assert rows.tolist() == [1.0] * 16


def test_a_header_that_was_replaced_since_the_check_is_corrupt(small: Written) -> None:
    with small.opened(is_checked=False) as source:
        _replace(small.path / "trajectory.json", 300)
        with pytest.raises(CorruptError, match="got 300"):
            source.read_text(4)


def test_a_directory_that_is_being_removed_is_missing_and_never_corrupt(
    small: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = files.unlink
    missing = []

    def look(path: str) -> None:
        with pytest.raises(FileNotFoundError), small.opened() as source:
            source.read_part(0, np.empty(12, np.float32))
        with pytest.raises(FileNotFoundError):
            small.load()
        missing.append(path)
        unlink(path)

    monkeypatch.setattr(files, "unlink", look)
    files.remove(str(small.path))
    assert len(missing) == 6
    assert not any(small.path.parent.iterdir())


# -- wrong files -----------------------------------------------------------------------------------


def test_a_file_too_many_is_refused(small: Written) -> None:
    (small.path / "more.npy").write_bytes(b"x")
    with pytest.raises(CorruptError, match="bytes in all, got") as error:
        small.load()
    assert error.value.path == str(small.path)


def test_a_column_in_the_place_of_another_is_refused(small: Written) -> None:
    (small.path / "actions.npy").write_bytes((small.path / "curr_obs.states.npy").read_bytes())
    assert is_refused(small)
    with pytest.raises(CorruptError, match=r"expected the npy header .*<f4.*, got .*<i4") as error:
        small.describe()
    assert error.value.path == str(small.path / "actions.npy")
    assert error.value.offset == 10


def test_every_byte_of_the_head_of_a_column_counts(small: Written) -> None:
    path = small.path / "actions.npy"
    data = path.read_bytes()
    for at in range(small.entry.parts[1].offset):
        for bit in (0x01, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(CorruptError) as error:
                small.describe()
            assert error.value.path == str(path)
    path.write_bytes(data)
    assert len(small.load()) == 5


@pytest.mark.parametrize(
    "text",
    [b"__import__('os').abort()", b"[" * 50_000, b"{'shape': " * 5000, b"\xff" * 65_535, b""],
)
def test_a_head_is_never_evaluated(small: Written, text: bytes) -> None:
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (small.path / "actions.npy").write_bytes(data.ljust(small.entry.parts[1].offset + 12 * 12))
    with pytest.raises(CorruptError) as error:
        small.describe()
    assert len(str(error.value)) < 1000


class _Bomb:
    def __reduce__(self) -> Any:
        return (os.abort, ())


@pytest.mark.parametrize("kind", ["objects", "pickle", "archive", "fortran"])
def test_what_else_numpy_may_write_is_refused(small: Written, kind: str) -> None:
    path = small.path / "actions.npy"
    if kind == "objects":
        np.save(path, np.array([_Bomb()], object), allow_pickle=True)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(_Bomb()))
    elif kind == "archive":
        with open(path, "wb") as file:
            np.savez(file, small.rows[1])
    else:
        np.save(path, np.asfortranarray(small.rows[1]))
    assert is_refused(small)
    with pytest.raises(CorruptError) as error:
        small.describe()
    assert error.value.path == str(path)


def _with_header(file: Written, old: str, new: str) -> None:
    """Change the header and let the entry have its new size."""
    path = file.path / "trajectory.json"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    size = file.entry.size_bytes + len(new) - len(old)
    file.entry = dataclasses.replace(file.entry, size_bytes=size)


def test_a_header_of_a_newer_version_is_refused_by_name(small: Written) -> None:
    _with_header(small, '"version": 1,', '"version": 3,')
    message = r"trajectory\.json: expected file version 2 or older, got 3\. Update mmbuf\."
    with pytest.raises(VersionError, match=message):
        small.describe()
    with pytest.raises(VersionError, match=message):
        small.load()


WRONG = [
    ('"version": 1,', '"versiom": 1,'),
    ('"version": 1,', '"version": [,'),
    ('"version": 1,', '"version": 1e999,'),
    ('"version": 1,', '"version": null,'),
    ('{"version"', '[{"version"'),
    ('"uuid"', '"uuim"'),
    ('"trajectory_id": 7', '"trajectory_id": x'),
    ('"trajectory_id": 7', f'"trajectory_id": {"7" * 5000}'),
    ('"max_episode_length": 80', '"max_episode_length": {}'),
    ('"added_at": 1700000000.25', '"added_at": null'),
    ('"shape": [4, 3]', '"shape": [4]'),
    ('"shape": [4, 3]', '"shape": [4, -3]'),
    ('"shape": [4, 3]', '"shape": [40, 3]'),
    ('"shape": [4, 3]', '"shape": 12'),
    ('"columns": [', '"columns": {}, "x": ['),
    ('"dtype": "bool"', '"dtype": "boom"'),
    ('"dtype": "bool"', '"dtype": "uint8"'),
    ('"rows": 15', '"rows": 16'),
    ('"rows": 15', '"rows": 11'),
    ('"rows": 15', '"rows": 1e400'),
    ('"rows": 15', f'"rows": {10**30}'),
    ('"path": ["dones"]', '"path": []'),
    ('"path": ["dones"]', '"path": ["actions"]'),
    ('"path": ["dones"]', '"path": ["other"]'),
    ('"path": ["dones"]', '"path": ["\\ud800"]'),
    ('["curr_obs", "states"], "dtype": "int32", "row_shape": [3]', '["x"], "dtype": "int8"'),
    (', "dtype": "bool", "row_shape": []', ', "dtype": "bool", "row_shape": [-1]'),
    (', "dtype": "bool", "row_shape": []', ', "dtype": "bool", "row_shape": [2, 0]'),
    (', "dtype": "bool", "row_shape": []', ', "dtype": "bool", "row_shape": "x"'),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_header_that_does_not_hold_is_corrupt(small: Written, old: str, new: str) -> None:
    _with_header(small, old, new)
    with pytest.raises(CorruptError) as error:
        small.describe()
    assert error.value.path.startswith(str(small.path))


@pytest.mark.parametrize("data", [b"", b"null", b"1", b'"x"', b"[" * 100_000, b"\xff" * 9, b"{"])
def test_a_header_that_is_no_json_object_is_corrupt(small: Written, data: bytes) -> None:
    (small.path / "trajectory.json").write_bytes(data)
    with pytest.raises(CorruptError) as error:
        small.describe()
    assert error.value.path == str(small.path / "trajectory.json")


def test_damage_to_the_header_is_found_or_does_no_harm(small: Written) -> None:
    path = small.path / "trajectory.json"
    data = path.read_bytes()
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        damaged = bytearray(data)
        for at in generator.choice(len(data), generator.integers(1, 4)).tolist():
            damaged[at] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            entry, schema, crcs = small.describe()
        except (CorruptError, VersionError):
            found += 1
        else:
            assert crcs is not None
            assert len(entry.parts) == len(schema.columns) == len(crcs)
    assert 200 < found < 300


# -- text ------------------------------------------------------------------------------------------

STRINGS = '["task 3", "task 4", "task 0"]'


@pytest.mark.parametrize("new", ["{}", "null", '"abc"', '["task 3", 4, "task 0"]', "[[], [], []]"])
def test_text_that_is_no_list_of_strings_is_corrupt(small: Written, new: str) -> None:
    _with_header(small, STRINGS, new)
    with pytest.raises(CorruptError, match="not a list of strings") as error:
        small.load()
    assert error.value.path == str(small.path / "trajectory.json")


def test_text_without_strings_is_corrupt(small: Written) -> None:
    _with_header(small, '"strings"', '"string"')
    with pytest.raises(CorruptError, match="KeyError\\('strings'\\)"):
        small.load()


def test_fewer_strings_than_codes_are_corrupt(small: Written) -> None:
    _with_header(small, STRINGS, '["task 3", "task 4"]')
    with pytest.raises(CorruptError, match="text codes beyond the text") as error:
        small.load()
    assert (error.value.path, error.value.offset) == (
        str(small.path / "curr_obs.task.npy"),
        small.entry.parts[4].offset,
    )


@pytest.mark.parametrize("code", [3, -1, 2**31 - 1])
def test_codes_beyond_the_text_are_corrupt(small: Written, code: int) -> None:
    codes = np.load(small.path / "curr_obs.task.npy", mmap_mode="r+")
    codes[5] = code
    codes.flush()
    del codes
    with pytest.raises(CorruptError, match="text codes beyond the text"):
        small.load()
