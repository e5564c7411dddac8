"""Stores whose files are damaged at random, and what must hold afterwards; for `test_corruption`.

Run as a program in an interpreter of its own, since damage must not kill the process that looks at
it: ``mutations.py DIRECTORY SEED COUNT``. Each mutation has a number of its own, printed before it
is tried; the last line is a summary in JSON. An exit status other than 0 is a failure.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import logging
import os
import re
import resource
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import coded, codes_of, is_equal

from mmbuf import MmbufError, ReplayReader, TrajectoryReplayBuffer, VersionError, health, vm

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = ("arrow", "npy", "pt", "pkl")
TYPED = (MmbufError, FileNotFoundError)
PAGE = 4096
NUMBER = re.compile(rb'(?<=[\[ ,:])-?[0-9]+(?=[,\]}])|"[A-Za-z0-9_.]*"')
INSTEAD = (
    *(b"0", b"-1", b"1", b"2147483648", b"9223372036854775807", b"1e308", b"NaN", b"-Infinity"),
    *(b"null", b"true", b'"x"', b"[]", b"{}", b"1.5", b"9" * 5000, b'"\\ud800"', b"[" * 2000),
    *(b"18446744073709551616", b"1099511627775", b'"../x"', b'"a\\u0000b"', b'""'),
)

# -- stores ----------------------------------------------------------------------------------------


def item(i: int) -> dict[str, Any]:
    """Trajectory ``i``: every row says so; left-out steps, and an image column that is all zero."""
    fields = coded(i, 4, 3)
    fields["dones"] = torch.arange(15).reshape(5, 3) % 4 == i % 4
    fields["zeros"] = torch.zeros(4, 3, 32, 32, 3, dtype=torch.uint8)
    return fields


@dataclass
class Store:
    """A directory that is whole, and what is in it.

    ``is_protected``: its index has checksums, so that no change of it goes unseen. ``files`` are
    those of the trajectories by their ids.
    """

    path: Path
    is_live: bool
    is_protected: bool
    is_ours: bool
    files: dict[int, str] = field(default_factory=dict)
    truth: dict[int, dict[str, Any]] = field(default_factory=dict)
    formats: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with ReplayReader(self.path) as reader:
            for i in reader.trajectory_ids:
                self.truth[i] = reader.get_trajectory(i).to_columns()
                (self.files[i],) = [p.name for p in self.path.glob(f"trajectory_{i}_*")]
                self.formats[i] = self.files[i].rsplit(".", 1)[1]

    @property
    def names(self) -> list[str]:
        """All files, those in directories of trajectories included."""
        found = (p for p in self.path.rglob("*") if p.is_file() and p.name != ".writer.lock")
        return sorted(str(p.relative_to(self.path)) for p in found)


def made(path: Path, *forms: str) -> Path:
    """A live store of a few trajectories in each format."""
    number = 0
    for form in forms:
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=path, trajectory_format=form
        ) as buffer:
            for _ in range(4 // len(forms)):
                buffer.add_trajectories([{**item(number), "model_weights_id": f"w{number}"}])
                number += 1
            buffer.flush()
    return path


def stores_in(directory: Path) -> list[Store]:
    stores = [Store(made(directory / form, form), True, True, True) for form in FORMATS]
    live = made(directory / "mixed", *FORMATS)
    stores.append(Store(live, True, True, True))
    for name in ("checkpoint", "bare"):
        with TrajectoryReplayBuffer() as buffer:
            buffer.load_checkpoint(live)
            buffer.save_checkpoint(directory / name)
    index = directory / "bare" / "trajectory_index.json"
    snapshot = json.loads(index.read_text())
    del snapshot["crc"]
    index.write_text(json.dumps(snapshot))
    stores.append(Store(directory / "checkpoint", False, True, True))
    stores.append(Store(directory / "bare", False, False, True))
    for name in ("rlinf_pt", "rlinf_pkl"):
        path = shutil.copytree(FIXTURES / name, directory / name)
        (path / "expected.json").unlink()
        stores.append(Store(path, False, False, False))
    return stores


# -- mutations -------------------------------------------------------------------------------------


def cut(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    size = int(random.integers(len(data) + 1))
    return data[: size // PAGE * PAGE if random.integers(3) == 0 else size]


def zero_page(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    start = int(random.integers(len(data) // PAGE + 1)) * PAGE
    size = len(data[start : start + PAGE])
    return data[:start] + bytes(size) + data[start + size :]


def flip_bits(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for at in random.integers(len(data), size=random.integers(1, 6)).tolist() if data else ():
        changed[at] ^= 1 << int(random.integers(8))
    return bytes(changed)


def append_bytes(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    size = int(random.integers(1, 5000))
    return data + (random.bytes(size) if random.integers(2) else bytes(size))


def splice(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    at, start = int(random.integers(len(data) + 1)), int(random.integers(len(other) + 1))
    piece = other[start : start + int(random.integers(1, 3000))]
    left = data[at:] if random.integers(2) else data[at + len(piece) :]
    return data[:at] + piece + left


def change_token(data: bytes, other: bytes, random: np.random.Generator) -> bytes:
    """One number or string of JSON replaced; the CRC-32 of its line made to fit again."""
    lines = data.split(b"\n")
    number = int(random.integers(len(lines)))
    found = list(NUMBER.finditer(lines[number]))
    if not found:
        return data
    token = found[int(random.integers(len(found)))]
    instead = INSTEAD[int(random.integers(len(INSTEAD)))]
    line = lines[number][: token.start()] + instead + lines[number][token.end() :]
    body, mark, _ = line.rpartition(b', "crc": "')
    lines[number] = body + mark + b'%08x"}' % zlib.crc32(body) if mark else line
    return b"\n".join(lines)


MUTATIONS = (cut, zero_page, flip_bits, append_bytes, splice)


@dataclass
class Damaged:
    """A copy of a store with something wrong. ``changed`` are the names of files that are not as
    they were; ``is_forged``: the checksum of an index may fit.
    """

    store: Store
    path: Path
    what: str
    changed: set[str]
    is_forged: bool = False

    @property
    def is_index_right(self) -> bool:
        """Whether what the index says can be relied on, if it is taken at all."""
        is_changed = any(
            name.endswith((".json", ".jsonl")) and "/" not in name for name in self.changed
        )
        return not is_changed or (self.store.is_protected and not self.is_forged)

    def is_changed(self, trajectory_id: int) -> bool:
        name = self.store.files[trajectory_id]
        return any(changed == name or changed.startswith(name + "/") for changed in self.changed)


def damaged(store: Store, stores: list[Store], path: Path, random: np.random.Generator) -> Damaged:
    shutil.copytree(store.path, path, copy_function=os.link)
    for name in store.names:  # what a writer goes on with is a copy, and so is what is changed
        if "/" not in name and name.endswith((".json", ".jsonl")):
            (path / name).unlink()
            shutil.copy(store.path / name, path / name)
    names = store.names
    name = names[int(random.integers(len(names)))]
    if random.integers(3) == 0:  # few files say what all others are
        name = str(random.choice([n for n in names if n.endswith((".json", ".jsonl"))]))
    kind = int(random.integers(len(MUTATIONS) + 4))
    data = (path / name).read_bytes()
    other = stores[int(random.integers(len(stores)))]
    if kind < len(MUTATIONS):
        theirs = (other.path / str(random.choice(other.names))).read_bytes()
        new, what = MUTATIONS[kind](data, theirs, random), MUTATIONS[kind].__name__
    elif kind == len(MUTATIONS) and len(names) > 1:
        second = str(random.choice([n for n in names if n != name]))
        replace(path / name, (store.path / second).read_bytes())
        replace(path / second, data)
        changed = {name, second} if (path / name).read_bytes() != data else set()
        return Damaged(store, path, f"swap {name} {second}", changed)
    elif kind == len(MUTATIONS) + 1:
        alike = [n for n in other.names if Path(n).suffix == Path(name).suffix] or other.names
        new, what = (other.path / str(random.choice(alike))).read_bytes(), f"of {other.path.name}"
    elif kind == len(MUTATIONS) + 2:
        (path / name).unlink()
        return Damaged(store, path, f"remove {name}", {name})
    elif name.endswith((".json", ".jsonl")):
        new, what = change_token(data, b"", random), "change_token"
    else:
        new, what = flip_bits(data, b"", random), "flip_bits"
    replace(path / name, new)
    changed = {name} if new != data else set()
    is_forged = what in ("change_token", "splice") or what.startswith("of ")
    return Damaged(store, path, f"{what} {name}", changed, is_forged)


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # another name of it is in the store that is whole
    path.write_bytes(data)


# -- what must hold --------------------------------------------------------------------------------

counts: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Errors that are meant for the caller are counted; all others go on."""
    try:
        yield
    except TYPED as error:
        counts[type(error).__name__] += 1


def check_rows(batch: dict[str, Any], case: Damaged) -> None:
    """Every row is one that was added, unless it is of a file that was changed."""
    if not case.store.is_ours or not case.is_index_right:
        return
    with contextlib.suppress(AssertionError):
        numbers = codes_of(batch) // 1_000_000
        assert not batch["zeros"].any()
        assert all(int(i) in case.store.truth for i in numbers)
        counts["rows"] += len(numbers)
        return
    states, image = batch["curr_obs"]["states"], batch["curr_obs"]["image"]
    said = torch.stack(
        [
            batch["actions"][:, 0] // 1_000_000,
            (batch["rewards"] // 1_000_000).nan_to_num(-1, -1, -1).long(),
            states[:, 0].nan_to_num(-1, -1, -1).long(),
            image.reshape(len(states), -1)[:, :8].contiguous().view(torch.int64)[:, 0] // 1_000_000,
        ],
        1,
    )
    for row, numbers in enumerate(said.tolist()):
        number, votes = collections.Counter(numbers).most_common(1)[0]
        if votes < 3 or number not in case.store.truth or case.is_changed(number):
            continue
        one = {k: v[row : row + 1] for k, v in batch.items() if k != "curr_obs"}
        one["curr_obs"] = {k: v[row : row + 1] for k, v in batch["curr_obs"].items()}
        codes_of(one)
        assert not one["zeros"].any(), "zeros"


def look_at(source: Any, case: Damaged) -> set[int]:
    """Sample and read all; the trajectories that are not as they were."""
    wrong = set()
    for _ in range(2):
        with typed():
            check_rows(source.sample(100), case)
    for i in source.trajectory_ids:
        right, found = case.store.truth.get(i), None
        with typed():
            found = source.get_trajectory(i).to_columns()
        if found is None or right is None or not is_equal(found, right):
            wrong.add(i)
            is_excused = not case.is_index_right or (i in case.store.truth and case.is_changed(i))
            assert is_excused, f"trajectory {i} is wrong"
    return wrong


def read(case: Damaged) -> set[int] | None:
    """What is wrong according to a reader; None where it finds no store."""
    with typed(), ReplayReader(case.path) as reader:
        return look_at(reader, case)
    return None


def load_into_memory(case: Damaged) -> None:
    with typed(), TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.load_checkpoint(case.path)
        look_at(buffer, case)


def load_into_a_store(case: Damaged, path: Path) -> None:
    """One that goes on as it was where that fails."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories([item(9)])
        try:
            buffer.load_checkpoint(case.path)
        except TYPED:
            assert set((codes_of(buffer.sample(20)) // 1_000_000).tolist()) == {9}
            assert buffer.trajectory_ids == [0]
        else:
            look_at(buffer, case)
    with ReplayReader(path) as reader:
        if reader.trajectory_ids:
            with typed():
                reader.sample(20)


def write(case: Damaged, path: Path, random: np.random.Generator) -> None:
    """Go on writing to it."""
    if not (case.path / "journal.jsonl").exists():
        return  # it is no store any more, and the constructor says so
    with typed():
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=case.path)
        try:
            look_at(buffer, case)
            with typed():
                buffer.add_trajectories([item(9)])
                added = buffer.trajectory_ids[-1]
                buffer.flush(sync=True)
                with ReplayReader(case.path) as reader:
                    columns = reader.get_trajectory(added).to_columns()
                    assert is_equal(columns, as_columns(item(9))), "what was added"
            with typed():
                form = random.choice([*FORMATS, ""])
                buffer.save_checkpoint(path, trajectory_format=str(form) or None)
        finally:
            try:
                buffer.close()
            except MmbufError as error:
                counts[f"{type(error).__name__} at close"] += 1
                buffer.close(wait=False)


def as_columns(fields: dict[str, Any]) -> dict[str, Any]:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([fields])
        return buffer.get_trajectory(0).to_columns()


def verify(case: Damaged, wrong: set[int] | None) -> None:
    """All that is wrong is found, and nothing where no byte is another."""
    try:
        findings = [finding for finding in health.verify(case.path) if finding.is_damage]
    except (VersionError, FileNotFoundError) as error:
        if wrong is not None and isinstance(error, FileNotFoundError):
            raise
        return
    if not case.changed:
        assert not findings, findings
    if wrong is None:
        assert findings or not case.changed, "nothing is found where no reader can open it"
    if not case.is_index_right:
        return
    is_swap = case.what.startswith(("swap", "of "))
    for i in wrong or ():
        # A pickle has no checksum; and neither it nor torch's files say whose they are.
        if case.store.formats[i] == "pkl" or (case.store.formats[i] == "pt" and is_swap):
            continue
        name = str(case.path / case.store.files[i])
        assert any(f.path.startswith(name) for f in findings), f"{name} is not found"
        counts["found by verify"] += 1


def run(directory: Path, seed: int, count: int) -> None:
    stores = stores_in(directory / "whole")
    for number in range(count):
        random = np.random.default_rng((seed, number))
        store = stores[number % len(stores)]
        path = directory / "damaged"
        case = damaged(store, stores, path, random)
        print(f"seed {seed} number {number}: {store.path.name}: {case.what}", flush=True)
        counts["mutations" if case.changed else "without a change"] += 1
        faulthandler.dump_traceback_later(60, exit=True)
        wrong = read(case)
        verify(case, wrong)
        way = int(random.integers(2 + store.is_live))
        if way == 0:
            load_into_memory(case)
        elif way == 1:
            load_into_a_store(case, directory / "loaded")
        else:
            write(case, directory / "saved", random)
        faulthandler.cancel_dump_traceback_later()
        for name in ("damaged", "loaded", "saved"):
            shutil.rmtree(directory / name, ignore_errors=True)
    print(json.dumps(counts))


def main(directory: str, seed: str, count: str) -> None:
    faulthandler.enable()
    logging.disable()
    vm.MAP_THRESHOLD = 16 << 10
    # So that a size that is wrong is an error here and not the end of the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    os.fsync = lambda fd: None  # no power is cut here
    run(Path(directory), int(seed), int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
