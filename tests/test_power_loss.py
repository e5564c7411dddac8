"""The power fails: what was acknowledged as synced is there, the rest whole or not at all.

A buffer works on a disk that forgets (`disk`). For every moment of its work the states are made
that a power failure may leave: the one in which all that was not synced is lost, the one in which
nothing is, and random mixtures. Each of them is opened and compared with what was promised.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data import columns_of, contents_of, is_equal, is_whole, trajectory
from disk import Call, Calls, Disk, Tree, least, materialise, mixed, most

from mmbuf import ReplayReader, TrajectoryReplayBuffer, checkpoint, files, index, storage

SEED = 20240611
STORE = "run/store"
GO_ON = 0.05  # the share of states that are not only opened, but gone on with

Listed = tuple[tuple[int, int], ...]  # ids, and the serials that say what is in them


@functools.lru_cache(maxsize=256)
def content(serial: int) -> dict[str, Any]:
    return columns_of(trajectory(serial, 2 + serial % 3, 2))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A store that may be left: all of ``listed`` that are in ``needed``, any others of it."""

    listed: Listed = ()
    needed: frozenset[tuple[int, int]] = frozenset()

    def allows(self, found: Listed) -> bool:
        rest = iter(self.listed)
        return self.needed <= set(found) and all(item in rest for item in found)


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint says."""

    listed: Listed
    counter: int
    rng_state: Any


@dataclasses.dataclass
class Promise:
    """What may be left: one of these stores, and of each checkpoint one of these (None: none)."""

    stores: tuple[Outcome, ...] = (Outcome(),)
    checkpoints: dict[str, list[Saved | None]] = dataclasses.field(default_factory=dict)


class Work:
    """A buffer on a disk that forgets, and what it has promised after each op of the disk."""

    def __init__(
        self,
        root: Path,
        patch: pytest.MonkeyPatch,
        promise: Promise | None = None,
        serial: int = 0,
        **options: Any,
    ) -> None:
        self.disk = Disk(root)
        self.promises = [(0, promise or Promise())]
        self.options = options
        self.serial = serial
        self._root = root
        patch.setattr(files, "os", self.disk.calls)
        self.open()
        if promise is not None:
            found = look_at(self.buffer)
            left = next(store for store in reversed(promise.stores) if store.allows(found))
            self._promise(*promise.stores, Outcome(found, left.needed))

    @property
    def promise(self) -> Promise:
        return self.promises[-1][1]

    def promised_at(self, cut: int) -> Promise:
        return next(promise for at, promise in reversed(self.promises) if at <= cut)

    def _promise(self, *stores: Outcome, **checkpoints: list[Saved | None]) -> None:
        known = {**self.promise.checkpoints, **checkpoints}
        self.promises.append((len(self.disk.ops), Promise(stores or self.promise.stores, known)))

    def _kept(self, listed: Listed) -> Listed:
        """What the disk budget keeps in any case."""
        is_bounded = self.options.get("max_disk_bytes") is not None
        return listed[-self.options["sample_window_size"] :] if is_bounded else listed

    def open(self) -> None:
        self.buffer = TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=self._root / STORE, **self.options
        )

    def add(self, count: int) -> None:
        for _ in range(count):
            self.serial += 1
            *others, last = self.promise.stores
            listed = (*last.listed, (self.buffer.trajectory_counter, self.serial))
            needed = last.needed & set(self._kept(listed))
            self._promise(*others, Outcome(listed, needed))
            self.buffer.add_trajectories([content(self.serial)])

    def sync(self) -> None:
        self.buffer.flush(sync=True)
        listed = self.promise.stores[-1].listed
        self._promise(Outcome(listed, frozenset(self._kept(listed))))

    def clear(self) -> None:
        self._promise(*self.promise.stores, Outcome())
        self.buffer.clear()

    def save(self, name: str) -> None:
        self.buffer.sample(3)  # the generator goes on
        allowed = [*self.promise.checkpoints.get(name, [None])]
        self._promise(**{name: allowed})
        self.buffer.save_checkpoint(self._root / name)
        saved = read_checkpoint(self._root / name)
        allowed.append(saved)
        self._promise(**{name: [saved]})

    def load(self, name: str) -> None:
        saved = read_checkpoint(self._root / name)
        assert saved is not None
        self._promise(*self.promise.stores, Outcome(saved.listed, frozenset(saved.listed)))
        self.buffer.load_checkpoint(self._root / name)


Life = Callable[..., Work]


def a_long_life(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Work:
    """Adds, saves, clears and loads; of the store and of each checkpoint there are old and new."""
    work = Work(root, patch, sample_window_size=3, **options)
    work.add(2)
    work.sync()
    work.add(2)
    work.save("checkpoint")
    work.add(2)
    work.sync()
    work.save("checkpoint")
    work.add(1)
    work.buffer.flush()
    work.clear()
    work.add(2)
    work.sync()
    work.load("checkpoint")
    work.add(1)
    work.sync()
    work.save("deep/er/checkpoint")
    work.buffer.close()
    work.open()
    work.add(1)
    work.save("checkpoint")
    work.clear()
    work.add(1)
    work.sync()
    work.clear()
    work.buffer.close()
    return work


def a_short_life(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Work:
    """A little of each."""
    work = Work(root, patch, sample_window_size=2, **options)
    work.add(1)
    work.sync()
    work.add(2)
    work.save("checkpoint")
    work.load("checkpoint")
    work.add(1)
    work.save("checkpoint")
    work.sync()
    work.clear()
    work.buffer.close()
    return work


def a_bounded_life(root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Work:
    """The oldest are removed from the disk again and again."""
    work = Work(root, patch, sample_window_size=2, max_disk_bytes=160_000, **options)
    for _ in range(2):
        work.add(2)
        work.sync()
        work.add(3)
        work.buffer.flush()
    work.save("checkpoint")
    work.buffer.close()
    return work


# -- looking at what is left ---------------------------------------------------------------------


def look_at(buffer: TrajectoryReplayBuffer) -> Listed:
    """Ids and serials of what is in a buffer, each value of it compared."""
    found = []
    for trajectory_id in buffer.trajectory_ids:
        item = buffer.get_trajectory(trajectory_id).to_columns()
        serial = int(item["curr_obs"]["states"][0, 0, 0])
        assert is_equal(item, content(serial)), f"trajectory {trajectory_id}"
        found.append((trajectory_id, serial))
    if found:
        assert is_whole(buffer.sample(20), num_envs=2)
    return tuple(found)


def read_checkpoint(path: Path) -> Saved | None:
    if not path.exists():
        return None
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.load_checkpoint(path)
        state = checkpoint.read(str(path)).metadata["rng_state"]
        return Saved(look_at(buffer), buffer.trajectory_counter, state)


class Judge:
    """Opens what a power failure may leave; what it has seen before it remembers."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, options: Any) -> None:
        self.num_states = 0
        self._root = directory / "left"
        self._patch = patch
        self._options = {"auto_save": True, "auto_save_path": self._root / STORE, **options}
        self._checkpoints: dict[str, Saved | None] = {}
        self._stores: set[tuple[str, tuple[Outcome, ...]]] = set()
        self._log: list[str] = []
        # Nothing of this is to be kept, and no boot is like another.
        patch.setattr(files, "os", Calls(_without_sync))
        handler = logging.Handler()
        handler.emit = lambda record: self._log.append(record.getMessage())  # type: ignore
        patch.setattr(logging.getLogger("mmbuf"), "handlers", [handler])

    def look_at(self, tree: Tree, promise: Promise, *, goes_on: bool = False) -> None:
        """AssertionError unless the tree is as promised; and can be added to and saved."""
        self.num_states += 1
        self._patch.setattr(files, "boot_id", lambda: f"boot {self.num_states}")
        store = (repr(_below(tree, STORE)), promise.stores)
        names = {name: repr(_below(tree, name)) for name in promise.checkpoints}
        is_new = store not in self._stores
        if goes_on or is_new or not self._checkpoints.keys() >= set(names.values()):
            materialise(tree, self._root)
        for name, inside in names.items():
            if inside not in self._checkpoints:
                self._checkpoints[inside] = read_checkpoint(self._root / name)
            assert self._checkpoints[inside] in promise.checkpoints[name], name
        if is_new:
            self._check_store(promise)
            self._stores.add(store)
        if goes_on:
            self._go_on(promise)
        if self._root.exists():
            shutil.rmtree(self._root)

    def _check_store(self, promise: Promise) -> None:
        directory = self._root / STORE
        listed: set[int] = set()
        if (directory / index.JOURNAL).exists():
            listed = set(index.read(str(directory))[0].entries)
        self._log.clear()
        with TrajectoryReplayBuffer(**self._options) as buffer:
            found = look_at(buffer)
            assert any(outcome.allows(found) for outcome in promise.stores), f"found {found}"
            lost = listed - {trajectory_id for trajectory_id, _ in found}
            assert not lost or str(sorted(lost)) in " ".join(self._log), "dropped without a word"
            assert [path for path in directory.iterdir() if path.suffix == ".tmp"] == []
            assert all(trajectory_id < buffer.trajectory_counter for trajectory_id, _ in found)

    def _go_on(self, promise: Promise) -> None:
        with TrajectoryReplayBuffer(**self._options) as buffer:
            found = look_at(buffer)
            counter = buffer.trajectory_counter
            buffer.add_trajectories([content(0)])
            buffer.flush()
            window = (*found, (counter, 0))[-buffer.sample_window_size :]
            for name in promise.checkpoints:
                buffer.save_checkpoint(self._root / name)
                saved = read_checkpoint(self._root / name)
                assert saved is not None
                assert (saved.listed, saved.counter) == (window, counter + 1), name
        with TrajectoryReplayBuffer(**self._options) as buffer:
            assert look_at(buffer)[-len(window) :] == window


def _below(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _without_sync(name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
    return None if name == "fsync" else call(*arguments)


def states(
    work: Work, rng: random.Random, num_mixed: int, share: float
) -> Iterator[tuple[int, str, Tree]]:
    """What a power failure may leave after each op; after a ``share`` of them where it is below 1.

    The least that can be left is there after each op.
    """
    for cut, nodes in work.disk.nodes_after(len(work.disk.ops)):
        yield cut, "least", least(nodes)
        if rng.random() < share:
            yield cut, "most", most(nodes)
            for number in range(num_mixed):
                yield cut, f"mixed {number}", mixed(nodes, rng)


def survive(
    work: Work, directory: Path, patch: pytest.MonkeyPatch, num_mixed: int, share: float = 1
) -> int:
    """How many states were judged; AssertionError at the first that breaks a promise."""
    rng = random.Random(SEED)
    judge = Judge(directory, patch, work.options)
    for cut, kind, tree in states(work, rng, num_mixed, share):
        try:
            judge.look_at(tree, work.promised_at(cut), goes_on=rng.random() < GO_ON * share)
        except Exception as error:
            op = work.disk.ops[cut - 1]
            raise AssertionError(
                f"seed {SEED}, after {op.kind} of node {op.node} {op.names}, op {cut} of "
                f"{len(work.disk.ops)}, {kind}: {type(error).__name__}: {error}"
            ) from error
    return judge.num_states


# -- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt"])
def test_the_disk_that_forgets_nothing_is_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajectory_format: str
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        work = a_short_life(root, patch, trajectory_format=trajectory_format)
    *_, (_, nodes) = work.disk.nodes_after(len(work.disk.ops))
    materialise(most(nodes), tmp_path / "most")
    assert contents_of(tmp_path / "most") == contents_of(root)


@pytest.mark.parametrize(
    ("life", "trajectory_format", "share"),
    [
        (a_long_life, "arrow", 0.2),
        (a_short_life, "npy", 0.1),
        (a_short_life, "pt", 0.1),
        (a_bounded_life, "arrow", 0.15),
    ],
)
def test_what_was_promised_survives_a_power_loss_after_each_op(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    life: Life,
    trajectory_format: str,
    share: float,
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        work = life(root, patch, trajectory_format=trajectory_format)
        assert survive(work, tmp_path, patch, 1, share) > len(work.disk.ops)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt"])
@pytest.mark.parametrize("life", [a_long_life, a_bounded_life])
def test_what_was_promised_survives_all_power_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, life: Life, trajectory_format: str
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        work = life(root, patch, trajectory_format=trajectory_format)
        survive(work, tmp_path, patch, 4)


def _twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_losses: int, share: float) -> None:
    """The power fails, and again after each op of what then goes on."""
    first = tmp_path / "first"
    first.mkdir()
    rng = random.Random(SEED)
    with monkeypatch.context() as patch:
        work = a_short_life(first, patch, trajectory_format="arrow")
    left = list(states(work, rng, 2, 1))
    for number, (cut, kind, tree) in enumerate(rng.sample(left, num_losses)):
        root = tmp_path / f"second_{number}"
        materialise(tree, root)
        with monkeypatch.context() as patch:
            patch.setattr(files, "boot_id", lambda: "another")
            promise = work.promised_at(cut)
            again = Work(root, patch, promise, work.serial, **work.options)
            again.add(1)
            again.sync()
            again.add(1)
            again.save("checkpoint")
            again.clear()
            again.buffer.close()
            try:
                survive(again, tmp_path, patch, 1, share)
            except AssertionError as error:
                raise AssertionError(
                    f"after the first loss at op {cut}, {kind}: {error}"
                ) from error


def test_what_was_promised_survives_a_second_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _twice(tmp_path, monkeypatch, 3, 0.1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_was_promised_survives_all_second_power_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _twice(tmp_path, monkeypatch, 60, 1)


@pytest.mark.parametrize("what", ["directory", "journal", "file"])
def test_a_sync_that_is_left_out_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        work = a_short_life(root, patch, trajectory_format="arrow")
        work.disk.leave_out_syncs(what)
        with pytest.raises(AssertionError, match=f"seed {SEED}, after"):
            survive(work, tmp_path, patch, 0, 0)


# -- the machine is started anew -----------------------------------------------------------------


def store_of(directory: Path, count: int, trajectory_format: str) -> list[Path]:
    """A store of trajectories that were flushed and not synced; their files."""
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=directory, trajectory_format=trajectory_format
    ) as buffer:
        buffer.add_trajectories([content(i) for i in range(count)])
    return sorted(directory.glob("trajectory_*_*"))


def ids_of(directory: Path) -> list[int]:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory) as buffer:
        return buffer.trajectory_ids


def write_zeros(path: Path) -> None:
    """Zeros in the place of the last 100 bytes of rows, as of a page that was not written."""
    file = path / "rewards.npy" if path.is_dir() else path
    data = file.read_bytes()
    at = len(data) - 24 if path.is_dir() else data.index(content(1)["actions"].numpy().tobytes())
    file.write_bytes(data[:at] + bytes(24) + data[at + 24 :])


@pytest.mark.parametrize("trajectory_format", ["arrow", "npy", "pt"])
def test_what_has_its_size_and_not_its_bytes_after_a_boot_is_dropped_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trajectory_format: str,
) -> None:
    paths = store_of(tmp_path, 3, trajectory_format)
    write_zeros(paths[1])
    monkeypatch.setattr(files, "boot_id", lambda: "another")
    assert ids_of(tmp_path) == [0, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: trajectories [1] were not synced and are gone or cut short; dropped."
    ]
    assert not paths[1].exists()
    with ReplayReader(tmp_path) as reader:
        assert is_equal(reader.get_trajectory(2).to_columns(), content(2))


def test_files_are_read_once_after_a_boot_and_never_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = []
    real = storage.verify

    def verify(path: str, *arguments: Any) -> None:
        verified.append(os.path.basename(path))
        real(path, *arguments)

    monkeypatch.setattr(storage, "verify", verify)
    names = [path.name for path in store_of(tmp_path, 2, "arrow")]
    assert ids_of(tmp_path) == [0, 1]
    assert verified == []
    for boot in ("another", "another", "a third"):
        monkeypatch.setattr(files, "boot_id", lambda boot=boot: boot)
        assert ids_of(tmp_path) == [0, 1]
        assert verified == names


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="not Linux")
def test_a_boot_has_a_name() -> None:
    assert files.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip() != ""
