"""`pt` and `pkl` files: RLinf's are read, ours are read by it, and no file runs code.

The fixtures were written by RLinf 0.3.0, those of ``rlinf_main`` by its main branch. Beside
each lies ``expected.json``: of each column of each trajectory the dtype, shape and SHA-256 of its N
rows.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import errno
import hashlib
import importlib.util
import io
import json
import os
import pickle
import pickletools
import re
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import DTYPES, bits, is_equal, random_bits, rows_and_texts, run_python, trajectory

from mmbuf import files
from mmbuf.adapters import nested, pkl, pt
from mmbuf.entry import Entry, Part
from mmbuf.errors import CorruptError
from mmbuf.schema import Array, Column, Schema, measure

FIXTURES = Path(__file__).parent / "fixtures"
RLINF_FILES = sorted(p for p in FIXTURES.rglob("trajectory_*") if p.suffix in (".pt", ".pkl"))
UUID = "0123456789abcdef0123456789abcdef"
YOUNG = ("uint16", "uint32", "uint64", *(d for d in DTYPES if d.startswith("float8")))
ADAPTERS = [pytest.param(pt, id="pt"), pytest.param(pkl, id="pkl")]
is_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.param


@dataclasses.dataclass
class Written:
    """A file, and all that was put into it."""

    adapter: Any
    path: str
    entry: Entry
    schema: Schema
    rows: list[Array]
    texts: dict[int, list[str]]

    def load(self, entry: Entry | None = None, schema: Schema | None = None) -> list[Any]:
        leaves: list[Any] = self.adapter.load(
            self.path, entry or self.entry, schema or self.schema, can_map=True
        )
        return leaves

    def opened(self, *, is_checked: bool = False) -> Any:
        return self.adapter.opened(self.path, self.entry, self.schema, is_checked=is_checked)

    def strings(self, position: int) -> list[str]:
        return [self.texts[position][code] for code in self.rows[position].tolist()]


def write(adapter: Any, path: Path | str, fields: dict[str, Any]) -> Written:
    """``fields`` written to ``path`` as the writer does it."""
    payload = measure(fields)
    rows, texts = rows_and_texts(payload)
    entry = Entry(UUID, 7, payload.shape, 80, "weights é", 1.5, file=Path(path).name)
    entry = adapter.write(str(path), entry, payload.schema, rows, texts)
    return Written(adapter, str(path), entry, payload.schema, rows, texts)


def every_kind() -> dict[str, Any]:
    """Every dtype with and without dimensions, text, left-out steps, and keys of all kinds."""
    fields: dict[str, Any] = {
        "rewards": random_bits("float32", (4, 3), 1),
        "none": torch.zeros(4, 3, 2, 0),
        "dones": random_bits("bool", (6, 3), 2),
        "terminations": random_bits("bool", (6, 3, 1), 3),
        "prev_values": random_bits("bfloat16", (6, 3, 2), 4),
        "text": [["put the carrot", "é", ""], ["日本"] * 3, ["", "é", "a"], ["a"] * 3],
        "a.b\\c/d": {"..": {"e/f": random_bits("int16", (4, 3, 2), 5)}, "": torch.ones(4, 3)},
    }
    for i, dtype in enumerate(DTYPES):
        fields[dtype] = {
            "scalar": random_bits(dtype, (4, 3), i),
            "tensor": random_bits(dtype, (4, 3, 2, 3), i + 200),
        }
    return fields


@pytest.fixture
def file(adapter: Any, tmp_path: Path) -> Written:
    return write(adapter, tmp_path / f"a{adapter.EXTENSION}", every_kind())


def same(file: Written, leaves: list[Any]) -> None:
    for i, (leaf, column) in enumerate(zip(leaves, file.schema.columns, strict=True)):
        if column.is_text:
            assert leaf == file.strings(i), column.name
        else:
            assert leaf.dtype == column.storage, column.name
            assert leaf.shape == file.rows[i].shape, column.name
            assert bits(leaf) == bits(file.rows[i]), column.name


def dump(path: Path, item: Any) -> str:
    with open(path, "wb") as out:
        if path.suffix == ".pt":
            torch.save(item, out)
        else:
            pickle.dump(item, out, protocol=4)
    return str(path)


def adapter_of(path: Path) -> Any:
    return {".pt": pt, ".pkl": pkl}[path.suffix]


def load_all(adapter: Any, path: str) -> dict[str, Any]:
    """All columns of a file that nothing is known of, as the flat dict of their rows."""
    entry, schema, _ = adapter.describe(path, Path(path).name)
    leaves = adapter.load(path, entry, schema, can_map=False)
    return dict(zip((column.name for column in schema.columns), leaves, strict=True))


# -- files of RLinf --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RLINF_FILES, ids=lambda p: f"{p.parent.name}-{p.name[:12]}")
def test_a_file_of_rlinf_gives_the_rows_that_rlinf_saw(path: Path) -> None:
    adapter = adapter_of(path)
    entry, schema, crcs = adapter.describe(str(path), path.name)
    known = json.loads((path.parent / "expected.json").read_text())[str(entry.trajectory_id)]
    leaves = adapter.load(str(path), entry, schema, can_map=True)
    got = {}
    for column, leaf in zip(schema.columns, leaves, strict=True):
        rows = leaf[: entry.num_samples]
        got[column.name] = {
            "dtype": column.dtype,
            "sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
            "shape": list(rows.shape),
        }
    assert got == known
    assert crcs is None


@pytest.mark.parametrize("path", RLINF_FILES, ids=lambda p: f"{p.parent.name}-{p.name[:12]}")
def test_a_file_of_rlinf_says_what_its_index_says(path: Path) -> None:
    entry, _, _ = adapter_of(path).describe(str(path), path.name)
    index = json.loads((path.parent / "trajectory_index.json").read_text())["trajectory_index"]
    known = index[str(entry.trajectory_id)]
    assert {key: entry.to_json()[key] for key in known} == {**known, "shape": tuple(known["shape"])}
    assert (entry.format, entry.file) == (path.suffix[1:], path.name)
    assert (entry.size_bytes, entry.added_at) == (path.stat().st_size, 0.0)


def test_all_fixtures_are_there() -> None:
    assert len(RLINF_FILES) == 4 + 4 + 3 + 4 + 2 + 6 + 3


def test_flags_of_rlinf_keep_their_leading_steps() -> None:
    path = RLINF_FILES[[p.parent.name for p in RLINF_FILES].index("rlinf_pt_extra_dones")]
    entry, schema, _ = pt.describe(str(path), path.name)
    rows = {c.name: part.rows for c, part in zip(schema.columns, entry.parts, strict=True)}
    assert {name for name, n in rows.items() if n == 12 + 2 * 2} == {
        *("dones", "terminations", "truncations"),
    }
    assert set(rows.values()) == {12, 16}


# -- what is written is what is read ---------------------------------------------------------------


def test_every_dtype_text_and_left_out_steps_come_back(file: Written) -> None:
    same(file, file.load())


def test_the_entry_of_a_written_file_is_complete(file: Written) -> None:
    entry = file.entry
    assert (entry.format, entry.size_bytes) == (file.adapter.NAME, os.path.getsize(file.path))
    assert [(part.offset, part.rows) for part in entry.parts] == [(0, len(r)) for r in file.rows]
    assert (entry.uuid, entry.trajectory_id, entry.added_at) == (UUID, 7, 1.5)


def test_loaded_arrays_are_the_callers(file: Written) -> None:
    for leaf in file.load():
        if isinstance(leaf, np.ndarray):
            assert leaf.flags.c_contiguous
            assert leaf.flags.writeable
            leaf[...] = 0
    same(file, file.load())


def test_parts_are_read_whole_and_without_their_left_out_rows(file: Written) -> None:
    with file.opened() as source:
        for position, column in enumerate(file.schema.columns):
            if column.is_text:
                continue
            for n in (file.entry.num_samples, len(file.rows[position]), 5):
                rows = np.empty((n, *column.row_shape), column.storage)
                source.read_part(position, rows)
                assert bits(rows) == bits(file.rows[position][:n]), (column.name, n)


def test_rows_are_read_in_any_order_to_any_target(file: Written) -> None:
    rows, targets = np.array([11, 0, 7, 7, 3]), np.array([4, 0, 2, 5, 1])
    leaves = [np.zeros((6, *c.row_shape), c.storage) for c in file.schema.columns]
    with file.opened(is_checked=True) as source:
        source.read_rows(rows, leaves, targets)
    for column, leaf, known in zip(file.schema.columns, leaves, file.rows, strict=True):
        if column.is_text:
            assert not leaf.any()
        else:
            assert bits(leaf[targets]) == bits(known[rows]), column.name
            assert bits(leaf[3]) == bytes(column.row_bytes), column.name


def test_text_is_read_as_codes_and_their_strings(file: Written) -> None:
    (position,) = file.texts
    with file.opened() as source:
        codes, strings = source.read_text(position)
    assert codes.dtype == np.int32
    assert [strings[code] for code in codes.tolist()] == file.strings(position)
    assert len(strings) == len(set(strings)) == 5


def test_a_file_tells_its_schema_again(file: Written) -> None:
    entry, schema, crcs = file.adapter.describe(file.path, "trajectory_12_some_thing.pt")
    assert schema == file.schema
    assert crcs is None
    assert entry == dataclasses.replace(
        file.entry,
        uuid=entry.uuid,
        trajectory_id=12,
        added_at=0.0,
        file="trajectory_12_some_thing.pt",
    )
    same(file, file.load(entry))


@pytest.mark.parametrize("name", ["a.pt", "trajectory_x_1.pt", "trajectory_.pt", "trajectory_5.pt"])
def test_a_name_without_an_id_has_the_id_0(file: Written, name: str) -> None:
    assert file.adapter.describe(file.path, name)[0].trajectory_id == 0


def test_the_uuid_of_a_file_of_rlinf_is_that_of_its_bytes(adapter: Any, tmp_path: Path) -> None:
    def uuid_of(name: str, change: float) -> str:
        fields = {"rewards": torch.zeros(200, 50), "actions": torch.zeros(200, 50, 4)}
        fields["actions"][100, 25, 2] = change
        path = tmp_path / f"{name}{adapter.EXTENSION}"
        if not path.exists():
            dump(path, fields)
        uuid: str = adapter.describe(str(path), name)[0].uuid
        return uuid

    path = dump(tmp_path / f"a{adapter.EXTENSION}", trajectory(1))
    (tmp_path / f"copy{adapter.EXTENSION}").write_bytes(Path(path).read_bytes())
    assert uuid_of("a", 0) == uuid_of("copy", 0)
    assert len({uuid_of("a", 0), uuid_of("b", 0), uuid_of("c", 1), uuid_of("d", 2)}) == 4
    assert all(len(uuid_of(name, 0)) == 32 for name in "ab")


def test_a_file_of_ours_says_whose_it_is(file: Written) -> None:
    assert file.adapter.describe(file.path, "a")[0].uuid == UUID
    assert Path(file.path).read_bytes().endswith(b"mmbuf 0123456789abcdef0123456789abcdef")


OTHER = "f" * 32


def refused_as_anothers(adapter: Any, path: str, entry: Entry, schema: Schema, found: str) -> None:
    """Whatever is done with the file of ``entry`` tells of ``found`` instead."""
    match = f"expected trajectory {entry.uuid}, got another one: {found}"
    for is_checked in (False, True):
        with (
            pytest.raises(CorruptError, match=match),
            adapter.opened(path, entry, schema, is_checked=is_checked),
        ):
            pass
    with pytest.raises(CorruptError, match=match):
        adapter.load(path, entry, schema, can_map=True)
    with pytest.raises(CorruptError, match=match):
        adapter.verify(path, entry, schema)
    with pytest.raises(CorruptError, match=match):
        adapter.check_identity(path, entry, schema)


def test_another_trajectory_of_the_same_size_and_shape_is_refused(file: Written) -> None:
    file.adapter.check_identity(file.path, file.entry, file.schema)
    entry = dataclasses.replace(file.entry, uuid=OTHER)
    refused_as_anothers(file.adapter, file.path, entry, file.schema, UUID)


@pytest.mark.parametrize("has_crcs", [True, False])
def test_a_file_of_rlinf_that_another_has_taken_the_place_of_is_refused(
    adapter: Any, tmp_path: Path, has_crcs: bool
) -> None:
    torch.serialization.set_crc32_options(has_crcs)
    try:
        path = dump(tmp_path / f"a{adapter.EXTENSION}", {"rewards": torch.zeros(3, 2)})
        entry, schema, _ = adapter.describe(path, "a")
        adapter.check_identity(path, entry, schema)
        adapter.verify(path, entry, schema)
        dump(tmp_path / f"a{adapter.EXTENSION}", {"rewards": torch.ones(3, 2)})
    finally:
        torch.serialization.set_crc32_options(True)
    other = adapter.describe(path, "a")[0]
    assert other.size_bytes == entry.size_bytes
    refused_as_anothers(adapter, path, entry, schema, other.uuid)


def test_files_that_we_wrote_before_they_had_marks_are_read(adapter: Any, tmp_path: Path) -> None:
    path = dump(tmp_path / f"a{adapter.EXTENSION}", {"rewards": torch.ones(3, 2)})
    entry, schema, _ = adapter.describe(path, "a")
    for uuid in (UUID, "0123456789ab4def0123456789abcdef"):
        (rows,) = adapter.load(path, dataclasses.replace(entry, uuid=uuid), schema, can_map=True)
        assert rows.tolist() == [1.0] * 6


def test_a_file_that_takes_the_name_while_torch_opens_it_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(pt, tmp_path / "a.pt", {"rewards": torch.zeros(3, 2)})
    write(pt, tmp_path / "b.pt", {"rewards": torch.ones(3, 2)})
    real = torch.load

    def load(path: Any, **options: Any) -> Any:
        os.replace(tmp_path / "b.pt", tmp_path / "a.pt")
        return real(path, **options)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(FileNotFoundError, match="another file has taken its name"):
        file.load()


def test_archives_without_crcs_have_uuids_of_their_own(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        paths = [dump(tmp_path / f"{i}.pt", {"rewards": torch.full((9, 9), i)}) for i in range(2)]
    finally:
        torch.serialization.set_crc32_options(True)
    assert not any(info.CRC for info in zipfile.ZipFile(paths[0]).filelist)
    first, second = (pt.describe(path, "a.pt")[0] for path in paths)
    assert first.size_bytes == second.size_bytes
    assert first.uuid != second.uuid


def test_a_file_is_as_large_as_its_rows(adapter: Any, tmp_path: Path) -> None:
    whole = np.zeros((1 << 20, 4), np.float32)
    schema = Schema([Column(("a",), "float32", (4,)), Column(("dones",), "float32", (4,))])
    rows = [whole[10:16], whole[5 : 5 + 9]]
    entry = Entry(UUID, 0, (2, 3))
    entry = adapter.write(str(tmp_path / "a"), entry, schema, rows, {})
    assert entry.size_bytes < 3000


def test_nothing_is_left_of_a_file_that_could_not_be_written(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(torch, "save", fails)
    monkeypatch.setattr(pkl._Pickler, "dump", fails)
    with pytest.raises(OSError, match="no space"):
        write(adapter, tmp_path / "a", trajectory(1))
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_never_written_over(adapter: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"here")
    with pytest.raises(FileExistsError):
        write(adapter, tmp_path / "a", trajectory(1))
    assert (tmp_path / "a").read_bytes() == b"here"


@is_linux
def test_a_pt_file_is_mapped_while_it_is_open(tmp_path: Path) -> None:
    file = write(pt, tmp_path / "a.pt", {"image": torch.ones(100, 10, 4000, dtype=torch.uint8)})

    def is_mapped() -> bool:
        return file.path in Path("/proc/self/maps").read_text()

    with file.opened() as source:
        assert is_mapped()
        leaf = np.zeros((1, 4000), np.uint8)
        source.read_rows(np.array([999]), [leaf], np.array([0]))
        assert leaf.all()
    del source
    assert not is_mapped()


# -- what other readers see ------------------------------------------------------------------------


def test_a_plain_loader_reads_the_dict_that_was_added(file: Written) -> None:
    if file.adapter is pt:
        item = torch.load(file.path, map_location="cpu")
    else:
        item = pickle.loads(Path(file.path).read_bytes())
    assert list(item)[:2] == ["max_episode_length", "model_weights_id"]
    assert is_equal(
        item, {"max_episode_length": 80, "model_weights_id": "weights é", **every_kind()}
    )


@pytest.mark.parametrize("dtype", YOUNG)
def test_torch_reads_tensors_of_young_dtypes_from_our_pickles(tmp_path: Path, dtype: str) -> None:
    tensor = random_bits(dtype, (2, 3, 4))
    file = write(pkl, tmp_path / "a.pkl", {"a": tensor, "b": tensor[:, :, :0]})
    item = pickle.loads(Path(file.path).read_bytes())
    assert is_equal([item["a"], item["b"]], [tensor, tensor[:, :, :0]])


@pytest.mark.parametrize("dtype", YOUNG)
def test_tensors_of_young_dtypes_are_read_as_torch_pickles_them(tmp_path: Path, dtype: str) -> None:
    tensor = random_bits(dtype, (3, 3, 4))
    path = dump(tmp_path / "a.pkl", {"a": tensor, "b": tensor.transpose(0, 1)})
    entry, schema, _ = pkl.describe(path, "a")
    assert [column.dtype for column in schema.columns] == [dtype, dtype]
    first, second = pkl.load(path, entry, schema, can_map=True)
    assert bits(first) == bits(tensor)
    assert bits(second) == bits(tensor.transpose(0, 1))


RLINF = """
import importlib, logging, sys, types
import torch

for name in ("logging", "omega_resolver"):
    sys.modules[f"rlinf.utils.{name}"] = types.ModuleType(name)
sys.modules["rlinf.utils.logging"].get_logger = lambda: logging.getLogger("rlinf")
sys.modules["rlinf.utils.omega_resolver"].omegaconf_register = lambda: None
from rlinf.data.replay_buffer import TrajectoryReplayBuffer

directory, form = sys.argv[1:]
buffer = TrajectoryReplayBuffer(seed=1, enable_cache=True, cache_size=5, trajectory_format=form)
buffer.load_checkpoint(directory)
flat = {
    i: buffer._flatten_trajectory(buffer._load_trajectory(i, f"weights-{i}"))
    for i in buffer._trajectory_id_list
}
torch.save([flat, buffer.sample(16)], f"{directory}/seen")
buffer.close()
"""


@pytest.mark.skipif(importlib.util.find_spec("rlinf") is None, reason="needs rlinf")
def test_rlinf_loads_our_files_as_a_checkpoint(adapter: Any, tmp_path: Path) -> None:
    every = [rlinf_fields(i) for i in range(3)]
    index = {}
    for i, fields in enumerate(every):
        payload = measure(fields)
        rows = [
            np.empty((n, *c.row_shape), c.storage)
            for n, c in zip(payload.rows, payload.schema.columns, strict=True)
        ]
        for position in range(len(rows)):
            payload.copy_rows(position, rows[position])
        entry = Entry(UUID, i, payload.shape, 80, f"weights-{i}")
        path = tmp_path / f"{files.trajectory_name(i, entry.model_weights_id)}{adapter.EXTENSION}"
        entry = adapter.write(str(path), entry, payload.schema, rows, {})
        keys = ("num_samples", "trajectory_id", "max_episode_length", "shape", "model_weights_id")
        index[i] = {key: entry.to_json()[key] for key in keys}
    (tmp_path / "trajectory_index.json").write_text(
        json.dumps({"trajectory_index": index, "trajectory_id_list": [0, 1, 2]})
    )
    metadata = {"size": 3, "total_samples": 24, "trajectory_counter": 3, "seed": 1}
    (tmp_path / "metadata.json").write_text(
        json.dumps({"trajectory_format": adapter.NAME, **metadata})
    )
    done = run_python(RLINF, tmp_path, adapter.NAME)
    assert done.returncode == 0, done.stderr
    flat, batch = torch.load(tmp_path / "seen")
    for i, fields in enumerate(every):
        aligned = {**fields, "dones": fields["dones"].reshape(2, 3, 2)[:, 1:].reshape(4, 2)}
        assert is_equal(flat[i], flattened(aligned))
    assert batch["rewards"].shape == (16, 1)


def rlinf_fields(i: int) -> dict[str, Any]:
    """In the order of RLinf's fields; one leading step for each of two rollout epochs."""
    return {
        "actions": random_bits("float32", (4, 2, 3), i),
        "rewards": random_bits("float32", (4, 2, 1), i + 1),
        "dones": random_bits("bool", (6, 2), i + 2),
        "curr_obs": {"states": random_bits("bfloat16", (4, 2, 5), i + 3)},
        "forward_inputs": {"tokens": random_bits("int64", (4, 2), i + 4)},
    }


def flattened(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: flattened(value) for key, value in node.items()}
    return node.reshape(-1, *node.shape[2:])


# -- what else such files may hold -----------------------------------------------------------------


def test_none_and_empty_dicts_are_left_out(adapter: Any, tmp_path: Path) -> None:
    item = {
        "max_episode_length": 3,
        "model_weights_id": "w",
        "rewards": torch.ones(2, 3),
        "dones": None,
        "curr_obs": {},
        "next_obs": {"a": None, "b": {}},
    }
    path = dump(tmp_path / f"a{adapter.EXTENSION}", item)
    assert list(load_all(adapter, path)) == ["rewards"]


def test_metadata_that_is_missing_is_empty(adapter: Any, tmp_path: Path) -> None:
    path = dump(tmp_path / f"a{adapter.EXTENSION}", {"rewards": torch.ones(2, 3)})
    entry = adapter.describe(path, "a")[0]
    assert (entry.max_episode_length, entry.model_weights_id) == (0, "")


def test_strides_gradients_and_conjugates_are_read_as_values(adapter: Any, tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(4, 3, 2)
    item = {
        "transposed": values.permute(1, 0, 2),
        "sliced": torch.arange(100.0).reshape(10, 10)[2:8:2, 1:9:2],
        "requires_grad": values.transpose(0, 1).clone().requires_grad_(),
        "conjugated": torch.complex(values, values).transpose(0, 1).conj(),
        "negative": torch.complex(values, values).transpose(0, 1).conj().imag,
        "scalar": {"empty": torch.zeros(3, 4, 0)},
    }
    path = dump(tmp_path / f"a{adapter.EXTENSION}", item)
    entry, schema, _ = adapter.describe(path, "a")
    loaded = adapter.load(path, entry, schema, can_map=False)
    picked = [np.zeros((12, *c.row_shape), c.storage) for c in schema.columns]
    with adapter.opened(path, entry, schema, is_checked=False) as source:
        source.read_rows(np.arange(12), picked, np.arange(12))
    for column, rows, same_rows in zip(schema.columns, loaded, picked, strict=True):
        leaf = item[column.path[0]]
        leaf = leaf["empty"] if isinstance(leaf, dict) else leaf.detach().resolve_conj()
        assert np.array_equal(rows, leaf.resolve_neg().reshape(12, *column.row_shape).numpy())
        assert bits(rows) == bits(same_rows)


def test_columns_may_share_their_memory(adapter: Any, tmp_path: Path) -> None:
    observations = random_bits("float32", (5, 3, 100))
    item = {"curr_obs": observations[:-1], "next_obs": observations[1:]}
    path = dump(tmp_path / f"a{adapter.EXTENSION}", item)
    rows = load_all(adapter, path)
    assert bits(rows["curr_obs"]) == bits(observations[:-1])
    assert bits(rows["next_obs"]) == bits(observations[1:])


def test_pt_files_from_before_archives_are_read(tmp_path: Path) -> None:
    fields = every_kind()
    for dtype in YOUNG:  # torch does not read what it wrote
        del fields[dtype]
    path = str(tmp_path / "a.pt")
    torch.save(fields, path, _use_new_zipfile_serialization=False)
    payload = measure(fields)
    entry, schema, _ = pt.describe(path, "a.pt")
    assert schema == payload.schema
    loaded = pt.load(path, entry, schema, can_map=True)
    known = write(pt, tmp_path / "b.pt", fields)
    same(known, loaded)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("core", ["core", "_core"])
def test_arrays_of_every_numpy_are_read(tmp_path: Path, protocol: int, core: str) -> None:
    item = {
        "max_episode_length": np.int64(5),
        **{dtype: random_bits(dtype, (2, 3, 2)).numpy() for dtype in DTYPES[:14]},
        "fortran": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
        "moved": np.arange(24).reshape(4, 2, 3).transpose(1, 2, 0),
        "swapped": np.arange(6, dtype=np.dtype("int32").newbyteorder("S")).reshape(2, 3),
        "empty": np.zeros((2, 3, 0)),
        "text": np.array([["a", "é"], ["", "bcd"]]).repeat(3, 1)[:, :3],
        "tensor": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    data = unframed(pickle.dumps(item, protocol))
    for name in (b"numpy._core.multiarray", b"numpy._core.numeric"):
        other = name.replace(b"_core", core.encode())
        data = data.replace(b"c" + name + b"\n", b"c" + other + b"\n")
        data = data.replace(short(name), short(other))
    path = tmp_path / "a.pkl"
    path.write_bytes(data)
    rows = load_all(pkl, str(path))
    assert pkl.describe(str(path), "a")[0].max_episode_length == 5
    for key, leaf in item.items():
        if key == "text":
            assert rows[key] == leaf.reshape(-1).tolist()
        elif isinstance(leaf, np.ndarray):
            native = leaf.astype(leaf.dtype.newbyteorder("="))
            assert bits(rows[key]) == bits(native), key


def unframed(data: bytes) -> bytes:
    """A pickle without its frames, whose sizes would not bear a change."""
    for operation, _, at in reversed(list(pickletools.genops(data))):
        if operation.name == "FRAME":
            data = data[:at] + data[at + 9 :]
    return data


def short(text: bytes) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text


# -- damaged files ---------------------------------------------------------------------------------


def refused(adapter: Any, path: Path | str, match: str | None = None) -> None:
    """Nothing is read from the file at ``path``, whoever asks."""
    entry = Entry(UUID, 0, (2, 2), size_bytes=os.path.getsize(path), parts=(Part(0, 4),))
    schema = Schema([Column(("rewards",), "float32", ())])
    with pytest.raises(CorruptError, match=match) as error:
        adapter.describe(str(path), Path(path).name)
    assert error.value.path == str(path)
    with pytest.raises(CorruptError, match=match):
        adapter.load(str(path), entry, schema, can_map=True)
    with (
        pytest.raises(CorruptError, match=match),
        adapter.opened(str(path), entry, schema, is_checked=True),
    ):
        pass


def test_a_missing_file_is_missing(file: Written) -> None:
    os.unlink(file.path)
    with pytest.raises(FileNotFoundError):
        file.load()
    with pytest.raises(FileNotFoundError), file.opened(is_checked=True):
        pass
    with pytest.raises(FileNotFoundError):
        file.adapter.describe(file.path, "a")


@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_a_file_of_another_size_is_refused(file: Written, change: int) -> None:
    data = Path(file.path).read_bytes()
    Path(file.path).write_bytes(data[:change] if change < 0 else data + b"\0")
    with pytest.raises(
        CorruptError, match=rf"expected {len(data)} bytes, got {len(data) + change}"
    ):
        file.load()
    with pytest.raises(CorruptError), file.opened(is_checked=True):
        pass


def test_a_file_cut_anywhere_is_corrupt(adapter: Any, tmp_path: Path) -> None:
    file = write(adapter, tmp_path / "a", trajectory(1))
    data = Path(file.path).read_bytes()
    generator = np.random.default_rng(0)
    end = len(data) - len(nested.mark_of(file.entry))  # whoever lacks some of that has all rows
    for size in [*range(12), *generator.integers(12, end, 60).tolist()]:
        Path(file.path).write_bytes(data[:size])
        with pytest.raises(CorruptError) as error:
            adapter.describe(file.path, "a")
        assert error.value.path == file.path


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 1000,
        b"\xff" * 1000,
        b"PK\x03\x04" * 100,
        b"{}",
        b"ARROW1\0\0",
    ],
    ids=["empty", "zeros", "ones", "zip", "JSON", "Arrow"],
)
def test_a_file_of_something_else_is_corrupt(adapter: Any, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    refused(adapter, tmp_path / "a")


@pytest.mark.parametrize(
    "item",
    [
        None,
        [1, 2],
        {},
        {"rewards": None},
        {"rewards": 1.5},
        {1: [["a"]]},
        {"rewards": [["a", 1]]},
        {"rewards": [["a"]] * 2 + [["a", "b"]]},
        {"rewards": [["a"]], "actions": [["a"], ["b"], ["c"]]},
        {"rewards": [["\ud800"]]},
        {"\ud800": [["a"]]},
        {"rewards": [["a"]], "max_episode_length": "3"},
        {"rewards": [["a"]], "model_weights_id": 3},
    ],
    ids=repr,
)
def test_an_object_that_is_no_trajectory_is_refused(
    adapter: Any, tmp_path: Path, item: Any
) -> None:
    refused(adapter, dump(tmp_path / f"a{adapter.EXTENSION}", item))


@pytest.mark.parametrize(
    "item",
    [
        torch.ones(2, 2),
        {"rewards": torch.ones(4)},
        {"rewards": torch.ones(2, 2), "actions": torch.ones(5, 2)},
        {"rewards": torch.ones(2, 2), "dones": torch.ones(1, 2)},
        {"rewards": torch.ones(0, 2)},
        {"rewards": torch.ones(2, 2).to_sparse()},
        {"rewards": torch.ones(1).expand(2, 2, 1 << 40)},
        {"rewards": torch.ones(2, 2, device="meta")},
    ],
    ids=["tensor", "flat", "ragged", "short", "empty", "sparse", "endless", "meta"],
)
def test_other_tensors_than_a_trajectorys_are_refused(
    adapter: Any, tmp_path: Path, item: Any
) -> None:
    refused(adapter, dump(tmp_path / f"a{adapter.EXTENSION}", item))


def test_a_trajectory_of_another_entry_is_refused(file: Written) -> None:
    entry, schema = file.entry, file.schema
    others = [
        dataclasses.replace(entry, shape=(3, 4)),
        dataclasses.replace(entry, shape=(2, 3)),
        dataclasses.replace(entry, parts=(Part(0, 15), *entry.parts[1:])),
        dataclasses.replace(entry, parts=entry.parts[:-1]),
    ]
    for other in others:
        with pytest.raises(CorruptError, match="rows of each column"):
            file.load(other)
    first, *rest = schema.columns
    for column in (
        dataclasses.replace(first, dtype="float64"),
        dataclasses.replace(first, row_shape=(1,)),
        dataclasses.replace(first, path=("reward",)),
    ):
        with pytest.raises(CorruptError, match="column 'reward"):
            file.load(schema=Schema([column, *rest]))
    with pytest.raises(CorruptError, match="column 'rewards'"):
        file.load(schema=Schema(rest))


def test_dicts_within_themselves_are_refused(tmp_path: Path) -> None:
    item: dict[str, Any] = {"rewards": torch.ones(2, 2)}
    item["curr_obs"] = item
    refused(pkl, dump(tmp_path / "a.pkl", item))
    refused(pt, dump(tmp_path / "a.pt", item))


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".")
    refused(pkl, tmp_path / "a.pkl")


def test_a_memo_of_four_billion_objects_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04}r\xff\xff\xff\xff.")
    refused(pkl, tmp_path / "a.pkl")


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.pt", {"rewards": torch.ones(100, 100)})
    with (
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    refused(pt, tmp_path / "b.pt", "compressed")


def test_being_out_of_mappings_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(pt, tmp_path / "a.pt", trajectory(1))

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 5242 bytes from file: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(OSError, match="unable to mmap") as error:
        file.load()
    assert error.value.errno == errno.ENOMEM


def test_a_place_before_the_file_is_corrupt_and_a_broken_disk_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with (
        open(tmp_path / "a", "rb") as file,
        pytest.raises(CorruptError, match="Invalid argument"),
        nested.reading("a"),
    ):
        file.seek(-1)
    with pytest.raises(OSError, match="broken"), nested.reading("a"):
        raise OSError(errno.EIO, "broken")


FUZZ = """
import sys, resource
from pathlib import Path

import numpy as np
from mmbuf.adapters import pkl, pt
from mmbuf.errors import CorruptError

name, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
path = Path(name)
adapter = {".pt": pt, ".pkl": pkl}[path.suffix]
limit = 8 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
data = path.read_bytes()
known, schema, _ = adapter.describe(name, "a")
generator = np.random.default_rng(seed)
found = 0
for i in range(rounds):
    damaged = bytearray(data)
    for at in generator.integers(0, len(data), generator.integers(1, 6)).tolist():
        if i % 2:
            damaged[at] ^= 1 << int(generator.integers(8))
        else:
            damaged[at] = int(generator.integers(256))
    path.write_bytes(damaged)
    try:
        entry, other, _ = adapter.describe(name, "a")
        adapter.load(name, entry, other, can_map=True)
        adapter.load(name, known, schema, can_map=True)
    except CorruptError:
        found += 1
print(found)
"""


def test_damage_is_found_or_does_no_harm(adapter: Any, tmp_path: Path) -> None:
    path = tmp_path / f"a{adapter.EXTENSION}"
    write(adapter, path, {**trajectory(1), "young": random_bits("uint16", (4, 3))})
    done = run_python(FUZZ, path, 0, 150)
    assert done.returncode == 0, done.stderr
    assert 40 < int(done.stdout) < 150


# -- files that mean harm --------------------------------------------------------------------------


def text(string: str) -> bytes:
    return b"X" + len(string.encode()).to_bytes(4, "little") + string.encode()


def name_of(module: str, name: str) -> bytes:
    """Dots in ``name`` would be followed from attribute to attribute."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def as_rewards(value: bytes) -> bytes:
    return b"\x80\x04}" + text("rewards") + value + b"s."


class Evil:
    """Pickled as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


TOUCH = "touch ran"
SYSTEM = call(name_of("os", "system"), text(TOUCH))
PYTHON = "__import__('os').system('touch ran')"
TENSOR = unframed(pickle.dumps(torch.ones(2, 2), 4))[2:-1]
DTYPE = call(name_of("numpy", "dtype"), text("f4"))
OBJECTS = pickle.dumps(np.array([[Evil(os.system, TOUCH)]], object), 4)
STORAGE = io.BytesIO()
torch.save({"a": Evil(os.system, TOUCH)}, STORAGE, _use_new_zipfile_serialization=False)


def inner(data: bytes) -> bytes:
    function = name_of("torch.storage", "_load_from_bytes")
    return call(function, b"B" + len(data).to_bytes(4, "little") + data)


HARM = {
    "os.system": (SYSTEM, "os.system"),
    "posix.system": (call(b"cposix\nsystem\n", text(TOUCH)), "posix.system"),
    "INST": (b"(" + text(TOUCH) + b"ios\nsystem\n", "os.system"),
    "OBJ": (b"(" + name_of("os", "system") + text(TOUCH) + b"o", "os.system"),
    "NEWOBJ": (name_of("subprocess", "Popen") + text(TOUCH) + b"\x85\x81", "subprocess.Popen"),
    "eval": (call(name_of("builtins", "eval"), text(PYTHON)), "builtins.eval"),
    "exec": (call(name_of("builtins", "exec"), text(PYTHON)), "builtins.exec"),
    "eval of Python 2": (call(b"c__builtin__\neval\n", text(PYTHON)), "__builtin__.eval"),
    "getattr": (
        call(name_of("builtins", "getattr"), name_of("torch", "float32"), text("__class__")),
        "builtins.getattr",
    ),
    "import": (call(name_of("builtins", "__import__"), text("antigravity")), "__import__"),
    "dotted torch": (
        call(name_of("torch._utils", "_rebuild_tensor_v2.__globals__.get"), text("os")),
        "_rebuild_tensor_v2.__globals__.get",
    ),
    "dotted numpy": (
        call(name_of("numpy", "dtype.__class__.__subclasses__")),
        "numpy.dtype.__class__.__subclasses__",
    ),
    "dotted own": (
        call(name_of("mmbuf.adapters.pkl", "files.unlink"), text("a.pkl")),
        "mmbuf.adapters.pkl.files.unlink",
    ),
    "partial": (
        call(call(name_of("functools", "partial"), name_of("os", "system"), text(TOUCH))),
        "functools.partial",
    ),
    "numpy.load": (call(name_of("numpy", "load"), text("a.pkl"), b"N", b"\x88"), "numpy.load"),
    "numpy.fromfile": (call(name_of("numpy", "fromfile"), text("a.pkl")), "numpy.fromfile"),
    "torch.load": (call(name_of("torch", "load"), text("a.pkl")), "torch.load"),
    "torch.hub": (call(name_of("torch.hub", "load"), text("."), text("a")), "torch.hub.load"),
    "UntypedStorage": (
        call(name_of("torch.storage", "UntypedStorage"), b"J\0\0\0\x40"),
        "torch.storage.UntypedStorage",
    ),
    "copyreg": (
        call(name_of("copyreg", "_reconstructor"), name_of("os", "system")),
        "copyreg._reconstructor",
    ),
    "open": (call(name_of("io", "open"), text("ran"), text("w")), "io.open"),
    "array of objects": (unframed(OBJECTS)[2:-1], "dtype 'O8'"),
    "array of pointers": (
        call(name_of("numpy", "dtype"), text("V8"), b"\x89", b"\x88"),
        "dtype 'V8'",
    ),
    "array of structures": (
        DTYPE + b"(K\x03" + text("<") + b"N" + text("a") + b"\x85}NNK?tb",
        "structures",
    ),
    "ndarray": (call(name_of("numpy", "ndarray"), b"K\x02\x85"), "not callable"),
    "inner pickle": (inner(b"\x80\x02cos\nsystem\n" + text(TOUCH) + b"\x85R."), "os.system"),
    "inner torch file": (inner(STORAGE.getvalue()), "system"),
    "state of a function": (
        name_of("torch._utils", "_rebuild_tensor_v2") + b"N}" + text("value") + SYSTEM + b"s\x86b",
        "os.system",
    ),
    "slots of a function": (
        name_of("torch._utils", "_rebuild_tensor_v2") + b"N}" + text("value") + b"Ns\x86b",
        "a state of",
    ),
    "slots of a tensor": (TENSOR + b"N}" + text("value") + b"Ns\x86b", "a state of"),
    "slots of a dtype": (
        name_of("torch", "float32") + b"N}" + text("value") + b"Ns\x86b",
        "a state of",
    ),
    "persistent id": (text("storage") + b"Q", "outside"),
    "persistent name": (b"Pos.system\n", "outside"),
    "extension": (b"\x82\xf0", "extension 240"),
    "buffer": (b"\x97", "out-of-band"),
}


@pytest.mark.parametrize("kind", HARM)
def test_a_pickle_that_means_harm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    program, named = HARM[kind]
    (tmp_path / "a.pkl").write_bytes(as_rewards(program))
    copyreg.add_extension("os", "system", 240)
    copyreg._extension_cache[240] = os.system  # type: ignore[attr-defined]
    try:
        refused(pkl, tmp_path / "a.pkl", re.escape(named))
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pkl"]


def test_the_harmful_calls_would_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("os.system", "INST", "OBJ", "eval", "array of objects", "inner pickle"):
        with contextlib.suppress(Exception):
            pickle.loads(as_rewards(HARM[kind][0]))
        assert (tmp_path / "ran").exists(), kind
        (tmp_path / "ran").unlink()


def test_what_a_pickle_can_name_has_no_way_out() -> None:
    """Each is an instance of our own classes, whose attributes a pickle cannot set."""
    for key, admitted in (pkl._ADMITTED | pkl._STORAGES).items():
        assert type(admitted) in (pkl._Inert, pkl._Admitted), key
        with pytest.raises(pickle.UnpicklingError):
            admitted.__setstate__(None)
        if type(admitted) is pkl._Admitted:
            module = getattr(admitted.value, "__module__", None)
            assert admitted.value is dict or module == "mmbuf.adapters.pkl", key


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_a_torch_file_that_means_harm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool, function: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    argument = TOUCH if function is os.system else PYTHON
    item = {"rewards": torch.ones(2, 2), "actions": Evil(function, argument)}
    torch.save(item, "a.pt", _use_new_zipfile_serialization=is_archive)
    refused(pt, tmp_path / "a.pt", function.__name__)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_program_of_torch_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    with zipfile.ZipFile(dump(tmp_path / "a.pt", {"rewards": torch.ones(2, 2)}), "a") as archive:
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(pt, path, "TorchScript")


def test_a_tar_file_is_refused_without_unpacking_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.pt", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(f"../{name}")
            archive.addfile(member, io.BytesIO())
    refused(pt, tmp_path / "a.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
