"""Stores whose JSON says odd things under right checksums; for `test_corruption`.

Each value of each line of a journal, of the index of a checkpoint, of a lock and of the header of
a file is replaced by each of `VALUES` in turn. Whoever opens the store and every command then goes
on, or gives an error that is meant for the caller: no traceback, no wrong row, and nothing that a
terminal would obey.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from data import is_equal, opened, trajectory
from typer.testing import CliRunner

from mmbuf import MmbufError, ReplayReader, TrajectoryReplayBuffer, cli, storage
from mmbuf.formats import native
from mmbuf.terminal import printable

TYPED = (MmbufError, OSError)
NAN, INFINITY = float("nan"), float("inf")
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 2**31, 2**61, 2**62, 2**63, 10**30, 10**4000, 1e11, 1e308),
    *(NAN, INFINITY, -INFINITY, "", "0", "x", "a\x1b[31m\r\n\x9b\u202e", "\ud800", "é" * 300),
    *("x" * 10_000, "../x", "a\0b", [], [[]], [0], [1, 1], [-1, 2], [2**62, 2**62], ["a"], {}),
    *({"0": 1}, [[[[[[]]]]]]),
]


class Forgery(NamedTuple):
    """Put ``value`` at a place in a file's JSON: in line ``line`` of it."""

    file: str
    line: int
    where: tuple[Any, ...]
    value: Any

    def __str__(self) -> str:
        return f"{self.file} {self.line} {self.where} {json.dumps(self.value)[:60]}"


# -- stores ----------------------------------------------------------------------------------------


def item(i: int) -> dict[str, Any]:
    fields = trajectory(i) | {"model_weights_id": f"w{i}", "max_episode_length": 9}
    fields["image"] = torch.full((4, 3, 9, 9, 3), i, dtype=torch.uint8)
    return fields


def made(path: Path, form: str) -> Path:
    """A live store in which every kind of event was journalled."""
    with opened(path, trajectory_format=form) as buffer:
        buffer.add_trajectories([item(9)])
        buffer.clear()
        buffer.add_trajectories([item(8)])
        buffer.save_checkpoint(path.with_name(path.name + "-before"))
        buffer.load_checkpoint(path.with_name(path.name + "-before"))
        buffer.add_trajectories([item(0)])
    with opened(
        path, trajectory_format=form, sample_window_size=1, max_disk_bytes=1 << 18
    ) as buffer:
        buffer.add_trajectories([item(i) for i in (1, 2)])
        buffer.flush(sync=True)
    shutil.rmtree(path.with_name(path.name + "-before"))
    return path


def made_checkpoint(path: Path, form: str) -> Path:
    with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
        buffer.add_trajectories([item(i) for i in range(2)])
        buffer.save_checkpoint(path)
    return path


# -- what is forged --------------------------------------------------------------------------------


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value below ``node``; of long lists to the first and the last two."""
    if isinstance(node, dict):
        inner = [(key, node[key]) for key in node if key != "crc"]
    elif isinstance(node, list):
        inner = (
            [(i, node[i]) for i in sorted({0, max(0, len(node) - 2), len(node) - 1})]
            if node
            else []
        )
    else:
        inner = []
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def forgeries_of(path: Path) -> list[Forgery]:
    found = []
    for name in ("journal.jsonl", "trajectory_index.json", "metadata.json", ".writer.lock"):
        if not (path / name).exists() or (name == "trajectory_index.json" and is_live(path)):
            continue
        for number, line in enumerate((path / name).read_text().splitlines()):
            node = json.loads(line)
            found += [Forgery(name, number, where, v) for where in places(node) for v in VALUES]
    for file in sorted(path.glob("trajectory_*")):
        if file.suffix in (".arrow", ".npy"):
            _, schema, _ = storage.FORMATS[file.suffix[1:]].describe(str(file), file.name)
            header = {"columns": [{"rows": 12, "crc32": "00", **c} for c in schema.to_json()]}
            header |= dict.fromkeys(
                ("version", "uuid", "trajectory_id", "shape", "max_episode_length"), 0
            )
            header |= dict.fromkeys(("model_weights_id", "added_at", "num_steps", "num_envs"), 0)
            found += [
                Forgery(file.name, 0, where, value)
                for where in places(header)
                for value in VALUES
                if where[:-1] != ("columns",) and where != ("columns",)  # no file could be written
            ]
    return found


def is_live(path: Path) -> bool:
    return (path / "journal.jsonl").exists()


def forge(path: Path, forgery: Forgery) -> None:
    file = path / forgery.file
    if file.suffix in (".arrow", ".npy"):
        _forge_header(path, forgery)
        return
    lines = file.read_text().splitlines(keepends=True)
    line = lines[forgery.line]
    node = json.loads(line)
    is_sealed = node.pop("crc", None) is not None
    _put(node, forgery.where, forgery.value)
    text = json.dumps(node)
    if is_sealed:
        body = text[:-1].encode()
        text = f'{text[:-1]}, "crc": "{zlib.crc32(body):08x}"}}'
    lines[forgery.line] = text + "\n" * line.endswith("\n")
    file.write_text("".join(lines))


def _put(node: Any, where: tuple[Any, ...], value: Any) -> None:
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value


def _forge_header(path: Path, forgery: Forgery) -> None:
    """Write the file anew, with what it says of itself changed; the index follows its size."""
    with ReplayReader(path) as reader:
        entries = {e.file: e for i in reader.trajectory_ids for e in [reader.get_entry(i)]}
        schema = reader.schema
    assert schema is not None
    entry = entries[forgery.file]
    format_ = storage.FORMATS[entry.format]
    leaves = format_.load(str(path / entry.file), entry, schema, can_map=False)
    rows, texts = [], {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, list):
            texts[i] = sorted(set(leaf))
            rows.append(np.array([texts[i].index(string) for string in leaf], np.int32))
        else:
            rows.append(leaf)
    honest = native.to_json

    def to_json(*arguments: Any) -> dict[str, Any]:
        header = json.loads(json.dumps(honest(*arguments)))
        _put(header, forgery.where, forgery.value)
        return header

    native.to_json = to_json
    try:
        shutil.rmtree(path / entry.file, ignore_errors=True)
        (path / entry.file).unlink(missing_ok=True)
        written = format_.write(str(path / entry.file), entry, schema, rows, texts)
    finally:
        native.to_json = honest
    index = "journal.jsonl" if is_live(path) else "trajectory_index.json"
    lines = (path / index).read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        node = json.loads(line)
        for where in places(node):
            found = node
            for key in where:
                found = found[key]
            if isinstance(found, dict) and found.get("uuid") == entry.uuid:
                forge(path, Forgery(index, number, where, written.to_json()))


# -- what must hold --------------------------------------------------------------------------------


@contextlib.contextmanager
def typed() -> Iterator[None]:
    with contextlib.suppress(*TYPED):
        yield


def check_rows(source: ReplayReader | TrajectoryReplayBuffer, is_ours: bool) -> None:
    """Those of a trajectory are those of one that was added; of RLinf's files nothing tells."""
    with typed():
        source.sample(30)
    repr(source)
    source._repr_html_()
    source.get_stats()
    for i in source.trajectory_ids:
        with typed():
            got = source.get_trajectory(i)
            if not is_ours:
                continue
            number = int(got.curr_obs["states"].flatten()[0])
            expected = item(number)
            for name in ("rewards", "actions", "dones"):
                assert is_equal(getattr(got, name), expected[name]), name
            assert is_equal(got.curr_obs, expected["curr_obs"])


def read(path: Path, is_ours: bool) -> None:
    with typed(), ReplayReader(path) as reader:
        check_rows(reader, is_ours)
    with typed(), ReplayReader([path]) as reader:
        check_rows(reader, is_ours)


def load(path: Path, is_ours: bool) -> None:
    with typed(), TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(path)
        check_rows(buffer, is_ours)
    with typed(), TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(path, True, 1, 2)


def write(path: Path, is_ours: bool) -> None:
    """Go on writing to it; what was added is there when it is opened again."""
    if not is_live(path):
        return
    with typed():
        buffer = opened(path)
        try:
            check_rows(buffer, is_ours)
            before = list(buffer.trajectory_ids)
            with typed():
                buffer.add_trajectories([item(5)])
                buffer.flush()
                with ReplayReader(path) as reader:
                    assert reader.trajectory_ids == [*before, buffer.trajectory_ids[-1]]
        finally:
            try:
                buffer.close()
            except MmbufError:
                buffer.close(wait=False)


COMMANDS: list[list[str]] = [
    *(["info"], ["ls"], ["ls", "--sort", "added_at"], ["ls", "--where", "num_steps > 0"], ["head"]),
    *(["stats"], ["watch", "--once"], ["verify"], ["repair", "--dry-run"], ["doctor"]),
    *(["sql", "from steps"], ["sql", "from episodes"], ["sql", "from trajectories"]),
    *(["plot", "--out", "TARGET.png"], ["convert", "TARGET", "--format", "pkl"]),
    *(["merge", "TARGET", "--order", "added"], ["split", "TARGET", "--shards", "2"]),
    *(["export", "TARGET", "--to", "parquet"], ["export", "TARGET", "--to", "minari"], ["repair"]),
]


def command(path: Path, target: Path, arguments: list[str], options: list[str]) -> None:
    """Run one; its exit is 0, or there is one message."""
    name, *rest = [argument.replace("TARGET", str(target)) for argument in arguments]
    ran = CliRunner().invoke(cli.app, [name, str(path), *rest, *options])
    if ran.exception is not None and not isinstance(ran.exception, (SystemExit, *TYPED)):
        raise AssertionError(f"mmbuf {name} {rest} {options}") from ran.exception
    assert ran.exit_code in (0, 1), ran.output
    text = ran.output
    if ran.exception is not None:
        text += f"{printable(str(ran.exception))}"
    assert all(line.isprintable() for line in text.split("\n")), (arguments, text)
    if options and ran.exit_code == 0:
        json.loads(ran.stdout)


def check(whole: Path, forgery: Forgery, scratch: Path, commands: list[list[str]]) -> None:
    """What must hold of a copy of ``whole`` with this forgery."""
    is_ours = not whole.name.startswith("rlinf")
    path = scratch / "forged"
    try:
        shutil.copytree(whole, path)
        forge(path, forgery)
        read(path, is_ours)
        load(path, is_ours)
        for number, arguments in enumerate(commands):
            options = [["--json"], []][number % 2]
            place = path
            if arguments == ["repair"]:
                place = shutil.copytree(path, scratch / "repaired")
            command(place, scratch / f"target{number}", arguments, options)
        write(path, is_ours)
    except Exception as error:
        raise AssertionError(str(forgery)) from error
    finally:
        for left in scratch.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
