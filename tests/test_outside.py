"""Files from outside: what hostile hands put into a store reaches nothing but that store.

Nothing outside of it is read, written or unlinked, no code runs, the error is typed and names the
file, and what is in the store stays there. An audit hook sees what Python opens, lists, links,
renames and removes; files planted outside are compared as well.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from data import columns_of, contents_of, is_equal, is_whole, row_ids, trajectory

from mmbuf import (
    CorruptError,
    MmbufError,
    ReplayReader,
    TrajectoryReplayBuffer,
    WriteError,
    doctor,
    health,
    storage,
)
from mmbuf.transfer import convert

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = list(storage.FORMATS)
JSONS = ("journal.jsonl", "trajectory_index.json")
LOGS = "mmbuf"

by_format = pytest.mark.parametrize("form", FORMATS)


# -- a store, what lies beside it, and who watches -------------------------------------------------

_FOLLOWING = ("os.listdir", "os.scandir", "os.truncate", "os.chdir", "os.chmod", "os.utime")
_RUNNING = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")

_seen: list[str] | None = None  # real paths while somebody watches


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None or not event.startswith(("open", "os.", "subprocess.")):
        return
    if event in _RUNNING:
        _seen.append(event)
        return
    is_followed = event in _FOLLOWING or (event == "open" and not arguments[2] & os.O_NOFOLLOW)
    for path in arguments[:2] if event in ("os.link", "os.rename") else arguments[:1]:
        if isinstance(path, (str, bytes)):
            name = os.fsdecode(path)
            if is_followed:
                _seen.append(os.path.realpath(name))
            else:
                parent, name = os.path.split(name)
                _seen.append(os.path.join(os.path.realpath(parent), name))


@pytest.fixture(scope="module")
def _watch() -> None:
    sys.addaudithook(_hook)  # for the rest of the process; it does nothing while nobody watches


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the store, with files that are not ours to look at."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "precious").write_bytes(b"precious" * 1000)
    return path


@pytest.fixture
def store(tmp_path: Path, outside: Path, _watch: None) -> Path:
    return tmp_path / "store"


@contextmanager
def nothing_outside(store: Path, *, is_changed: bool = False) -> Iterator[None]:
    """Within the block nothing beside ``store`` is touched, nor anything in it lost or changed."""
    global _seen
    parent = store.parent
    others = {p: contents_of(p) for p in parent.iterdir() if p != store and p.is_dir()}
    before = contents_of(store) if store.exists() else {}
    _seen = []
    os.listdir(parent)  # that somebody watches is seen though nothing is opened
    try:
        yield
    finally:
        seen, _seen = _seen, None
    real = str(parent.resolve())
    assert seen, "nobody watches"
    assert not set(seen) & set(_RUNNING)
    for path in seen:
        if path.startswith(real + "/"):
            name = path[len(real) + 1 :].split("/")[0]
            is_ours = name.startswith((store.name, f".{store.name}", "copy", ".copy"))
            assert is_ours, f"{path} was touched"
    for path, contents in others.items():
        assert contents_of(path) == contents, path
    if not is_changed:
        assert contents_of(store) == before


def made(store: Path, form: str = "arrow", count: int = 3) -> Path:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=store, trajectory_format=form
    ) as buffer:
        for i in range(count):
            buffer.add_trajectories([trajectory(i, image=(64, 64, 3))])
        buffer.flush()
    return store


def made_checkpoint(store: Path, form: str = "arrow", count: int = 3) -> Path:
    """A checkpoint whose index has no CRC-32, so that it is taken as it is."""
    with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(count)])
        buffer.save_checkpoint(store)
    index = json.loads((store / "trajectory_index.json").read_text())
    del index["crc"]
    (store / "trajectory_index.json").write_text(json.dumps(index))
    return store


def file_of(store: Path, number: int) -> Path:
    (path,) = store.glob(f"trajectory_{number}_*")
    return path


def use(source: Any) -> None:
    source.sample(100)
    for trajectory_id in source.trajectory_ids:
        source.get_trajectory(trajectory_id)


def read(store: Path) -> None:
    with ReplayReader(store) as reader:
        use(reader)


def load(store: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(store)
        use(buffer)


def bring(store: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store.parent / "copy") as buffer:
        try:
            buffer.load_checkpoint(store)
            use(buffer)
        finally:
            buffer.clear()


def go_on(store: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer:
        use(buffer)


def change_format(store: Path) -> None:
    target = store.parent / "copy-of-it"
    try:
        convert(store, target, "pt" if list(store.glob("*.pkl")) else "pkl")
    finally:
        shutil.rmtree(target, ignore_errors=True)


WAYS = {"read": read, "load": load, "bring": bring, "convert": change_format}
by_way = pytest.mark.parametrize("way", WAYS)


def refused(way: Callable[[Path], None], store: Path, match: str | None = None) -> str:
    """The path that the CorruptError names."""
    with nothing_outside(store), pytest.raises(CorruptError, match=match) as error:
        way(store)
    return error.value.path


# -- names made from what users say ----------------------------------------------------------------

ODD = [
    *("", ".", "..", "../../x", "/etc/passwd", "a/b", "a\\b", "C:\\x", "\0", "a\0b", "%00", "%2f"),
    *("CON", "nul", "COM1.arrow", "a ", "a.", "~", "*", "a\nb", "\x7f", "\u202e", "é", "e\u0301"),
    *("\ud800", "a\udcff", "🎉" * 300, "x" * 10_000, "." * 300, "-rf", "journal.jsonl"),
]


def check_names(store: Path) -> None:
    for path in store.rglob("*"):
        assert len(path.name) <= 255
        assert path.name.isascii()
        assert path.name.isprintable()
        assert not set(path.name) & set("\\*:~ "), path.name


@by_format
def test_any_weights_id_stays_inside_and_comes_back(store: Path, outside: Path, form: str) -> None:
    items = [{**trajectory(i), "model_weights_id": odd} for i, odd in enumerate(ODD)]
    copy = store.parent / "copy"
    with nothing_outside(store, is_changed=True):
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=store, trajectory_format=form, sample_window_size=0
        ) as buffer:
            buffer.add_trajectories(items)
            buffer.save_checkpoint(copy)
        for path in (store, copy):
            check_names(path)
            with ReplayReader(path) as reader:
                assert is_whole(reader.sample(500))
                found = [reader.get_trajectory(i).model_weights_id for i in reader.trajectory_ids]
                assert found == ODD
    assert len(list(store.glob("trajectory_[0-9]*"))) == len(ODD)


@by_format
def test_any_key_that_utf8_can_hold_stays_inside_and_comes_back(
    store: Path, outside: Path, form: str
) -> None:
    keys = [key for key in ODD if key.encode(errors="ignore").decode() == key]
    columns = {key: torch.full((2, 3), float(i)) for i, key in enumerate(keys)}
    item = {"rewards": torch.zeros(2, 3), "..": {"..": columns}, "/": {"/tmp": columns}}
    with nothing_outside(store, is_changed=True):
        with TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=store, trajectory_format=form
        ) as buffer:
            buffer.add_trajectories([item])
        check_names(store)
        with ReplayReader(store) as reader:
            assert is_equal(reader.get_trajectory(0).to_columns(), columns_of(item))
            batch = reader.sample(5)
    assert [float(batch[".."][".."][key][0]) for key in keys] == [
        float(i) for i in range(len(keys))
    ]


# -- entries that lead elsewhere -------------------------------------------------------------------

ELSEWHERE = [
    *(
        "../outside/precious",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/../../outside/precious",
        "sub/a.arrow",
    ),
    *("./trajectory_0_.arrow", "a\0.arrow", ".writer.lock", "journal.jsonl", "metadata.json"),
    *("trajectory_index.json", "x" * 256, "é" * 200, "\ud800"),
]


def reseal(body: bytes) -> bytes:
    """A line of the journal whose CRC-32 fits; ``body`` is all before its last key."""
    return body + b', "crc": "%08x"}' % zlib.crc32(body)


def write_journal(store: Path, events: list[Any]) -> None:
    lines = [reseal(json.dumps(event)[:-1].encode()) + b"\n" for event in events]
    (store / "journal.jsonl").write_bytes(b"".join(lines))


def events_of(store: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (store / "journal.jsonl").read_bytes().splitlines()]
    for event in events:
        del event["crc"]
    return events


def rewrite(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the journal's last "add", or in a checkpoint the index's last entry."""
    if (store / "journal.jsonl").exists():
        events = events_of(store)
        change([event for event in events if event["event"] == "add"][-1]["entry"])
        write_journal(store, events)
    else:
        path = store / "trajectory_index.json"
        index = json.loads(path.read_text())
        change(index["trajectory_index"][str(index["trajectory_id_list"][-1])])
        path.write_text(json.dumps(index))


@pytest.mark.parametrize("file", ELSEWHERE, ids=lambda file: ascii(file[:30]))
def test_an_entry_whose_file_is_not_a_trajectorys_is_refused(
    store: Path, outside: Path, file: str
) -> None:
    made(store)
    size = (outside / "precious").stat().st_size
    rewrite(store, lambda entry: entry.update(file=file, size_bytes=size))
    for way in (*WAYS.values(), go_on):
        assert refused(way, store) == str(store / "journal.jsonl")


@by_way
@pytest.mark.parametrize("file", ELSEWHERE, ids=lambda file: ascii(file[:30]))
def test_an_index_whose_file_is_not_a_trajectorys_is_refused(
    store: Path, outside: Path, way: str, file: str
) -> None:
    made_checkpoint(store)
    rewrite(store, lambda entry: entry.update(file=file))
    assert refused(WAYS[way], store) == str(store / "trajectory_index.json")


@pytest.mark.parametrize("file", ["../outside/precious", "journal.jsonl", "metadata.json", "."])
def test_a_dropped_entry_does_not_unlink_what_is_no_trajectory(
    store: Path, outside: Path, file: str
) -> None:
    made(store)
    events = events_of(store)
    added = next(event["entry"] for event in events if event["event"] == "add")
    events.append({"event": "add", "entry": {**added, "trajectory_id": 7, "file": file}})
    events.append({"event": "drop", "trajectory_ids": [7]})
    write_journal(store, events)
    refused(go_on, store)


def test_a_save_into_a_hostile_checkpoint_unlinks_nothing_outside(
    store: Path, outside: Path
) -> None:
    made_checkpoint(store)
    rewrite(store, lambda entry: entry.update(file="../outside/precious"))
    names = ["../outside/precious", "/etc/passwd", "..", "", 7, None, ["x"]]
    (store / ".saving.json").write_text(json.dumps(names[:5]))
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(5)])
        for left_behind in (names[:5], names, "[" * 100_000, {"a": 1}, 7):
            text = left_behind if isinstance(left_behind, str) else json.dumps(left_behind)
            (store / ".saving.json").write_text(text)
            with nothing_outside(store, is_changed=True):
                buffer.save_checkpoint(store)
    read(store)


# -- symbolic links, pipes and directories ---------------------------------------------------------


def link(path: Path, outside: Path) -> None:
    """Move ``path`` out and leave a link that leads to it."""
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


@by_way
@by_format
def test_a_trajectory_that_is_a_link_is_refused(
    store: Path, outside: Path, form: str, way: str
) -> None:
    made(store, form)
    path = file_of(store, 1)
    link(path, outside)
    assert refused(WAYS[way], store, "a symbolic link") == str(path)


@by_format
def test_a_writer_refuses_a_trajectory_that_is_a_link_and_keeps_it(
    store: Path, outside: Path, form: str
) -> None:
    made(store, form)
    path = file_of(store, 2)
    link(path, outside)
    assert refused(go_on, store, "a symbolic link") == str(path)
    assert path.is_symlink()


@by_way
@pytest.mark.parametrize("name", ["trajectory.json", "rewards.npy", "curr_obs.image.npy"])
def test_a_column_that_is_a_link_is_refused(
    store: Path, outside: Path, way: str, name: str
) -> None:
    made(store, "npy")
    path = file_of(store, 1) / name
    link(path, outside)
    assert refused(WAYS[way], store, "a symbolic link") == str(path)


def test_a_link_of_the_length_of_its_file_is_no_disguise(store: Path, outside: Path) -> None:
    made(store, "npy")
    directory = file_of(store, 1)
    path = directory / "dones.npy"
    size = path.stat().st_size
    path.unlink()
    path.symlink_to("/" * (size - len("etc/passwd")) + "etc/passwd")
    assert path.lstat().st_size == size
    for way in WAYS.values():
        assert refused(way, store) == str(path)


@pytest.mark.parametrize("name", JSONS)
def test_an_index_that_is_a_link_is_refused(store: Path, outside: Path, name: str) -> None:
    (made if name == "journal.jsonl" else made_checkpoint)(store)
    link(store / name, outside)
    for way in WAYS.values():
        assert refused(way, store) == str(store / name)
    if name == "journal.jsonl":
        assert refused(go_on, store) == str(store / name)


@pytest.mark.parametrize("target", ["precious", "nothing"])
@pytest.mark.parametrize("name", ["journal.jsonl", ".writer.lock"])
def test_a_writer_begins_nothing_through_a_link(
    store: Path, outside: Path, name: str, target: str
) -> None:
    store.mkdir()
    (store / name).symlink_to(outside / target)
    with nothing_outside(store, is_changed=True), pytest.raises(CorruptError) as error:
        go_on(store)
    assert error.value.path == str(store / name)


def test_snapshots_that_are_links_are_replaced_and_not_followed(store: Path, outside: Path) -> None:
    made(store)
    for name in ("metadata.json", "trajectory_index.json"):
        link(store / name, outside)
    with (
        nothing_outside(store, is_changed=True),
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=store) as buffer,
    ):
        buffer.add_trajectories([trajectory(3, image=(64, 64, 3))])
    assert not (store / "metadata.json").is_symlink()
    assert json.loads((store / "metadata.json").read_text())["size"] == 4


def test_temporaries_that_are_links_are_unlinked_and_not_followed(
    store: Path, outside: Path
) -> None:
    made(store)
    (store / ".a.0123456789ab.tmp").symlink_to(outside / "precious")
    (store / ".b.0123456789ab.tmp").symlink_to(outside)
    (store / ".c.0123456789ab.tmp").mkdir()
    (store / ".c.0123456789ab.tmp" / "d").symlink_to(outside)
    with nothing_outside(store, is_changed=True):
        go_on(store)
    assert not list(store.glob(".*.tmp"))


def test_a_dropped_trajectory_that_became_a_link_is_unlinked_and_not_followed(
    store: Path, outside: Path
) -> None:
    made(store, "npy")
    path = file_of(store, 0)
    events = [*events_of(store), {"event": "drop", "trajectory_ids": [0]}]
    write_journal(store, events)
    link(path, outside)
    with nothing_outside(store, is_changed=True):
        go_on(store)
    assert not path.is_symlink()


NO_FILES = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
}
by_kind = pytest.mark.parametrize("kind", NO_FILES)


def put_no_file(path: Path, kind: str) -> None:
    try:
        NO_FILES[kind](path)
    except PermissionError:
        pytest.skip("devices are for root to make")


@by_way
@by_kind
@pytest.mark.parametrize(
    "name", ["journal.jsonl", "trajectory_1_.arrow", "trajectory_1_.pkl", "trajectory_1_.pt"]
)
def test_what_is_no_file_is_refused_and_nobody_waits_for_it(
    store: Path, outside: Path, way: str, name: str, kind: str
) -> None:
    made(store, name.split(".")[1] if name.startswith("trajectory") else "arrow")
    (store / name).unlink()
    put_no_file(store / name, kind)
    assert refused(WAYS[way], store, f"got a {kind}") == str(store / name)


@by_way
@by_kind
def test_an_index_that_is_no_file_is_refused_and_nobody_waits_for_it(
    store: Path, outside: Path, way: str, kind: str
) -> None:
    made_checkpoint(store)
    (store / "trajectory_index.json").unlink()
    put_no_file(store / "trajectory_index.json", kind)
    assert refused(WAYS[way], store, f"got a {kind}") == str(store / "trajectory_index.json")


@by_way
@by_kind
@pytest.mark.parametrize("name", ["dones.npy", "trajectory.json", "one.more"])
def test_what_is_no_file_in_a_trajectory_of_many_is_refused_and_nobody_waits_for_it(
    store: Path, outside: Path, way: str, name: str, kind: str
) -> None:
    made(store, "npy")
    path = file_of(store, 1) / name
    path.unlink(missing_ok=True)
    put_no_file(path, kind)
    assert refused(WAYS[way], store, f"got a {kind}") == str(path)


@by_way
@by_kind
def test_what_is_no_file_and_said_to_be_empty_is_refused_and_nobody_waits_for_it(
    store: Path, outside: Path, way: str, kind: str
) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"rewards": torch.ones(4, 2, 0)}])
        buffer.save_checkpoint(store)
    path = file_of(store, 0)
    path.unlink()
    put_no_file(path, kind)
    index = json.loads((store / "trajectory_index.json").read_text())
    del index["crc"]
    index["trajectory_index"]["0"]["size_bytes"] = path.lstat().st_size
    (store / "trajectory_index.json").write_text(json.dumps(index))
    assert refused(WAYS[way], store, f"got a {kind}") == str(path)


@by_kind
@pytest.mark.parametrize("name", ["journal.jsonl", ".writer.lock"])
def test_a_writer_waits_for_nothing_that_is_no_file(
    store: Path, outside: Path, name: str, kind: str
) -> None:
    made(store)
    (store / name).unlink()
    put_no_file(store / name, kind)
    assert refused(go_on, store, f"got a {kind}") == str(store / name)


@by_kind
@pytest.mark.parametrize("form", ["arrow", "npy"])
def test_a_writer_with_a_bound_waits_for_no_trajectory_that_is_no_file(
    store: Path, outside: Path, form: str, kind: str
) -> None:
    made(store, form)
    path = file_of(store, 1)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (form, kind) == ("npy", "directory"):
        path.mkdir()
        path = path / "dones.npy"
    put_no_file(path, kind)

    def bounded(store: Path) -> None:
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, max_disk_bytes=1 << 30)

    assert refused(bounded, store, f"got a {kind}") == str(path)


@by_kind
def test_checks_of_a_store_wait_for_nothing_that_is_no_file(
    store: Path, outside: Path, kind: str
) -> None:
    made(store)
    for name in ("trajectory_1_.arrow", "metadata.json", ".writer.lock"):
        (store / name).unlink()
        put_no_file(store / name, kind)
    with nothing_outside(store):
        found = {finding.path for finding in health.verify(store) if finding.is_damage}
        assert {str(store / "trajectory_1_.arrow"), str(store / "metadata.json")} <= found
        assert doctor.examine(store)
    (store / ".writer.lock").rmdir() if kind == "directory" else (store / ".writer.lock").unlink()
    with nothing_outside(store, is_changed=True):
        report = health.repair(store)
    assert (set(report.quarantined), "metadata.json" in report.rewritten) == (
        {"trajectory_1_.arrow"},
        True,
    )
    assert (store / "metadata.json").is_file()
    read(store)


@by_kind
def test_a_save_waits_for_nothing_that_is_no_file(store: Path, outside: Path, kind: str) -> None:
    made_checkpoint(store)
    (store / ".saving.json").touch()
    for path in (store / ".saving.json", file_of(store, 1), store / "metadata.json"):
        path.unlink()
        put_no_file(path, kind)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(7)])
        with nothing_outside(store, is_changed=True):
            if kind == "directory":
                with pytest.raises(WriteError):
                    buffer.save_checkpoint(store)
                return
            buffer.save_checkpoint(store)
    with ReplayReader(store) as reader:
        assert is_whole(reader.sample(100))
        assert len(reader) == 1


def test_a_directory_of_trajectories_may_be_a_link_itself(store: Path, tmp_path: Path) -> None:
    made(store)
    name = tmp_path / "name"
    name.symlink_to(store)
    for way in (*WAYS.values(), go_on):
        way(name)


# -- JSON ------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**62, 2**64, 10**400, 1.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", "x", "../x", "a\0", "\ud800", [], [[]], [1], [-1, 2], [2**62, 2**62]),
    *(
        [None],
        ["a", "b"],
        [[0, 12]] * 5,
        [[0, 2**61]] * 5,
        {},
        {"0": 1},
        [[0, 12, [0, -1, 0, 0]]] * 5,
    ),
]
ENTRY_KEYS = [
    *("trajectory_id", "max_episode_length", "shape", "model_weights_id", "uuid", "added_at"),
    *("format", "file", "size_bytes", "parts"),
]


def survives(way: Callable[[Path], None], store: Path) -> bool:
    """Whether it is taken; if not the error is typed and says where."""
    try:
        way(store)
    except CorruptError as error:
        path = error.path
    except (MmbufError, FileNotFoundError):
        return False
    else:
        return True
    assert path.startswith(str(store))
    return False


@pytest.mark.parametrize("form", ["arrow", "npy", "pt"])
@pytest.mark.parametrize("key", ENTRY_KEYS)
def test_any_value_in_an_entry_is_refused_or_does_no_harm(
    store: Path, outside: Path, form: str, key: str
) -> None:
    made_checkpoint(store, form)
    path = store / "trajectory_index.json"
    index = path.read_text()
    with nothing_outside(store, is_changed=True):
        for value in VALUES:
            rewrite(store, lambda entry, value=value: entry.update({key: value}))  # type: ignore[misc]
            for way in (read, load):
                survives(way, store)
            path.write_text(index)
    read(store)


def put(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return None


@pytest.mark.parametrize(
    "where",
    [
        *(("trajectory_index",), ("trajectory_id_list",), ("trajectory_id_list", 0), ("version",)),
        *(("schema",), ("schema", 0), ("schema", 0, "path"), ("schema", 0, "path", 0)),
        *(("schema", 0, "dtype"), ("schema", 0, "row_shape"), ("schema", 1, "row_shape", 0)),
        *(("metadata",), ("metadata", "seed"), ("metadata", "rng_state"), ("metadata", "id_step")),
        *(("metadata", "rng_state", "state"), ("metadata", "rng_state", "state", "state")),
        *(("metadata", "rng_state", "bit_generator"), ("metadata", "trajectory_counter")),
        *(("metadata", "trajectory_format"), ("trajectory_index", "0")),
    ],
    ids=str,
)
def test_any_value_in_an_index_is_refused_or_does_no_harm(
    store: Path, outside: Path, where: tuple[Any, ...]
) -> None:
    made_checkpoint(store)
    path = store / "trajectory_index.json"
    text = path.read_text()
    with nothing_outside(store, is_changed=True):
        for value in VALUES:
            index = json.loads(text)
            put(index, where, value)
            path.write_text(json.dumps(index))
            for way in (read, load):
                survives(way, store)


@pytest.mark.parametrize("key", [*ENTRY_KEYS, "schema", "columns", "trajectory_ids", "counter"])
def test_any_value_in_a_journal_is_refused_or_does_no_harm(
    store: Path, outside: Path, key: str
) -> None:
    made(store, count=2)
    events = events_of(store)
    with nothing_outside(store, is_changed=True):
        for value in VALUES:
            changed = json.loads(json.dumps(events))
            if key in ENTRY_KEYS:
                changed[-1]["entry"][key] = value
            elif key in ("schema", "columns"):
                (schema,) = [event for event in changed if event["event"] == "schema"]
                schema["columns"] = value if key == "columns" else [value]
            elif key == "trajectory_ids":
                changed.append({"event": "drop", "trajectory_ids": value})
            else:
                changed.append({"event": "clear", "trajectory_counter": value})
            write_journal(store, changed)
            survives(read, store)


def test_a_counter_that_is_no_number_of_a_trajectory_is_refused(store: Path) -> None:
    made(store)
    events = events_of(store)
    for value in (1e308, float("nan"), float("inf"), -1, 2**63, "x", None):
        write_journal(store, [*events, {"event": "clear", "trajectory_counter": value}])
        if value != 1e308:
            assert refused(go_on, store) == str(store / "journal.jsonl")
        else:
            refused(read, store)


def test_a_trajectory_without_a_schema_is_refused(store: Path) -> None:
    made(store)
    write_journal(store, [event for event in events_of(store) if event["event"] != "schema"])
    for way in (*WAYS.values(), go_on):
        assert refused(way, store) == str(store / "journal.jsonl")


def test_an_index_without_a_schema_is_refused(store: Path) -> None:
    made_checkpoint(store)
    path = store / "trajectory_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": None}))
    for way in WAYS.values():
        assert refused(way, store) == str(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"trajectory_index": ' * 50_000,
        '{"trajectory_id_list": [' + "0, " * 1_000_000 + "0]}",
        '{"version": ' + "9" * 1_000_000 + "}",
        '{"version": 1e999}',
        '{"version": NaN}',
        '{"version": 1, "schema": null, "trajectory_index": {}, "trajectory_id_list": [0, 0]}',
        "\ufeff{}",
        "{}" * 1000,
        "nul\0",
    ],
    ids=["deep", "deep dicts", "long", "digits", "1e999", "NaN", "ids", "BOM", "many", "NUL"],
)
@pytest.mark.parametrize("name", [*JSONS, "metadata.json"])
def test_json_of_any_form_is_refused_or_does_no_harm(
    store: Path, outside: Path, name: str, text: str
) -> None:
    (made if name == "journal.jsonl" else made_checkpoint)(store)
    data = text.encode()
    if name == "journal.jsonl":  # a whole line
        data = reseal(data.rstrip(b"}")) + b"\n"
    (store / name).write_bytes(data)
    for way in (*WAYS.values(), go_on) if name == "journal.jsonl" else WAYS.values():
        with nothing_outside(store):
            is_taken = survives(way, store)
        assert not is_taken or name == "metadata.json"  # only a copy of what the index says


def test_a_path_of_a_hundred_thousand_keys_is_refused_at_once(store: Path) -> None:
    made_checkpoint(store)
    path = store / "trajectory_index.json"
    index = json.loads(path.read_text())
    index["schema"][0]["path"] = ["a"] * 100_000
    path.write_text(json.dumps(index))
    assert refused(read, store, "a path of 100000 keys") == str(path)


def test_of_keys_that_come_twice_the_last_one_counts_and_does_no_harm(store: Path) -> None:
    made_checkpoint(store)
    path = store / "trajectory_index.json"
    text = path.read_text().replace('"file":', '"file": "../outside/precious", "file":')
    path.write_text(text)
    read(store)
    path.write_text(text.replace('"size_bytes":', '"file": "../outside/precious", "size_bytes":'))
    assert refused(read, store) == str(path)


def test_two_entries_of_one_file_lose_nothing_when_one_is_dropped(store: Path) -> None:
    made(store)
    events = events_of(store)
    added = events[-1]["entry"]
    events.append({"event": "add", "entry": {**added, "trajectory_id": 7}})
    events.append({"event": "drop", "trajectory_ids": [7]})
    write_journal(store, events)
    with nothing_outside(store, is_changed=True):
        go_on(store)
    with ReplayReader(store) as reader:
        assert {i for i, _, _ in row_ids(reader.sample(300))} == {0, 1, 2}


# -- RLinf's directories ---------------------------------------------------------------------------


@pytest.fixture
def rlinf(store: Path) -> Path:
    shutil.copytree(FIXTURES / "rlinf_pt", store)
    return store


def change_rlinf(store: Path, name: str, change: Callable[[Any], object]) -> None:
    index = json.loads((store / name).read_text())
    change(index)
    (store / name).write_text(json.dumps(index))


@by_way
@pytest.mark.parametrize("weights_id", ["../../x", "../../outside/x", "/../../outside/x", "a\0b"])
def test_a_weights_id_of_rlinfs_leads_nowhere(
    rlinf: Path, outside: Path, way: str, weights_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(file_of(rlinf, 0), outside / "x.pt")
    (rlinf / "trajectory_0_..").mkdir()
    change_rlinf(
        rlinf,
        "trajectory_index.json",
        lambda index: index["trajectory_index"]["0"].update(model_weights_id=weights_id),
    )
    with nothing_outside(rlinf):
        WAYS[way](rlinf)
    assert "trajectories [0] are listed and have no file" in caplog.text


@by_way
def test_a_file_of_rlinfs_that_is_a_link_is_refused(rlinf: Path, outside: Path, way: str) -> None:
    path = file_of(rlinf, 0)
    link(path, outside)
    assert refused(WAYS[way], rlinf, "a symbolic link") == str(path)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("metadata.json", ("trajectory_format",)),
        ("metadata.json", ("trajectory_counter",)),
        ("metadata.json", ("seed",)),
        ("trajectory_index.json", ("trajectory_index",)),
        ("trajectory_index.json", ("trajectory_index", "0")),
        ("trajectory_index.json", ("trajectory_index", "0", "max_episode_length")),
        ("trajectory_index.json", ("trajectory_index", "0", "model_weights_id")),
        ("trajectory_index.json", ("trajectory_id_list",)),
        ("trajectory_index.json", ("trajectory_id_list", 0)),
    ],
    ids=str,
)
def test_any_value_in_rlinfs_json_is_refused_or_does_no_harm(
    rlinf: Path, outside: Path, name: str, where: tuple[Any, ...]
) -> None:
    text = (rlinf / name).read_text()
    with nothing_outside(rlinf, is_changed=True):
        for value in VALUES:
            change_rlinf(rlinf, name, lambda index, value=value: put(index, where, value))  # type: ignore[misc]
            for way in (read, load):
                survives(way, rlinf)
            (rlinf / name).write_text(text)
    read(rlinf)


# -- code ------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def write_evil(path: Path, form: str, size: int) -> None:
    """A file that would run code for whoever trusts it; padded to ``size`` bytes."""
    item = {"rewards": torch.ones(4, 3), "actions": Evil()}
    path.unlink()
    if form == "pkl":
        with open(path, "wb") as file:
            pickle.dump(item, file, 4)
    else:
        torch.save(item, path)
    with open(path, "ab") as file:
        file.write(bytes(max(0, size - path.stat().st_size)))
    os.truncate(path, size)


@by_way
@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_a_pickle_in_a_store_runs_no_code(
    store: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, form: str, way: str
) -> None:
    made(store, form)
    monkeypatch.chdir(outside)
    path = file_of(store, 1)
    write_evil(path, form, path.stat().st_size)
    if way == "bring":  # it is linked and not opened, until it is sampled
        with nothing_outside(store), pytest.raises(CorruptError):
            bring(store)
    else:
        assert refused(WAYS[way], store) == str(path)
    assert any(finding.is_damage for finding in health.verify(store))
    assert not (outside / "ran").exists()


@pytest.mark.parametrize("form", ["pt", "pkl"])
def test_a_pickle_in_a_directory_of_rlinfs_runs_no_code(
    store: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    shutil.copytree(FIXTURES / f"rlinf_{form}", store)
    monkeypatch.chdir(outside)
    path = file_of(store, 0)
    write_evil(path, form, path.stat().st_size)
    for way in WAYS.values():
        assert refused(way, store) == str(path)
    assert not (outside / "ran").exists()


def test_the_pickles_would_run_code_elsewhere(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outside)
    with suppress(Exception):
        pickle.loads(pickle.dumps(Evil()))
    assert (outside / "ran").exists()


def test_the_watch_sees_what_is_read_outside(store: Path, outside: Path) -> None:
    made(store)
    path = store / "link"
    path.symlink_to(outside / "precious")
    with pytest.raises(AssertionError, match="was touched"), nothing_outside(store):
        path.read_bytes()
