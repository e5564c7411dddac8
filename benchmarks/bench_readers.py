"""What readers in processes of their own cost and share, and how fast they follow a live store.

Cases and their bars:

images         4 reader processes that have sampled all of one 2 GB image store ([50, 4]): the sum
               of their Pss for the store's files at most 1.2x the store; private memory of each at
               most 80 MB above an idle interpreter with torch imported
state          the same on a 1 GB store of state rows ([400, 8]: large columns have 410 kB): the sum
               of their Pss for the store's files, and of what they have in anonymous memory since
               the store was opened, at most 1.3x the store
beside         a reader beside the buffer that wrote its store, state rows, all slots filled: at
               most 1.1x
beside-images  the same with images
first          the first batch of a reader just opened on 10,000 trajectories of [50, 8]: slots are
               filled for what was drawn only
rate           1, 2 and 4 readers: batches a second in all, beside as many processes with private
               copies in TorchRL's memmap storage
open           opening a store of 50,000 trajectories, of [4, 2] and of [50, 8]: no data file is
               opened; at most 20 µs a trajectory more than `json.loads` of each line of the journal
latency        from the return of `flush()` in one process to the first sampled row of the new
               trajectory in another that samples all the time, median and 99 %
refresh        `refresh` with nothing new, one store: at most 5 µs

Linux only: memory is read from /proc/PID/smaps, of processes that all hold what they have sampled.
*Private* is Private_Clean + Private_Dirty of every mapping. The store's size is that of its
trajectories on the disk. The writer's process has let go of the store before. The journals of
`open` are crafted: but for the newest trajectory, the files that they list do not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import mmap
import multiprocessing
import os
import select
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peers
import timing
import torch
from bench_add import num_mapped_files, watch_opens
from timing import Bar, Case, Contender, Row, clock

from mmbuf import ReplayReader, TrajectoryReplayBuffer
from mmbuf.index import TrajectoryIndex
from mmbuf.index import read as read_index

CASES = (
    "images",
    "state",
    "beside",
    "beside-images",
    "first",
    "rate",
    "open",
    "latency",
    "refresh",
)
NUM_READERS = 4
# So many times as many rows are sampled as there are, for every page to be touched: an image row
# has pages of its own, and six times draw 99.8 % of the rows; of state rows 32 or more share one.
IMAGE_PASSES, STATE_PASSES = 6, 1
TIMEOUT_S = 300.0
clock_ns = time.monotonic_ns  # one clock for all processes
spawn = multiprocessing.get_context("spawn")

Steps = Generator[Any, Any, None]


class Child:
    """A spawned process that runs a generator: it sends what that yields, and what it is sent goes
    in. TimeoutError unless an answer comes in time; an exception of the child is raised here.
    """

    def __init__(self, steps: Callable[..., Steps], *arguments: Any) -> None:
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=serve, args=(theirs, torch.get_num_threads(), steps, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def receive(self) -> Any:
        if not self._connection.poll(TIMEOUT_S):
            raise TimeoutError(f"no answer from process {self.pid} in {TIMEOUT_S:.0f} s")
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self, message: Any = None) -> None:
        self._connection.send(message)

    def hang_up(self) -> None:
        """Let it end by itself."""
        self._connection.close()

    def close(self) -> None:
        self.hang_up()
        self._process.join(10)
        self._process.kill()
        self._process.join()


def serve(
    connection: Connection, num_threads: int, steps: Callable[..., Steps], *arguments: Any
) -> None:
    """What a `Child` runs."""
    torch.set_num_threads(num_threads)
    message = None
    # An end of the connection: nobody is interested any more.
    with (
        contextlib.suppress(EOFError, ConnectionError),
        contextlib.closing(steps(*arguments)) as running,
    ):
        while True:
            try:
                answer = running.send(message)
            except StopIteration:
                return
            except Exception as error:
                answer = error
            connection.send(answer)
            if not connection.poll(TIMEOUT_S):
                return
            message = connection.recv()


@contextlib.contextmanager
def closing_all(children: list[Child]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            child.hang_up()
        for child in children:
            child.close()


# -- stores of one trajectory, again and again ----------------------------------------------------


class Numbered:
    """A trajectory of `shape`; its rows are numbered anew for each position in a store."""

    def __init__(self, shape: tuple[int, int], *, has_images: bool = False) -> None:
        self.num_rows = shape[0] * shape[1]
        self.data = peers.make_data(self.num_rows, has_images=has_images)
        (self._trajectory,) = peers.trajectories_of(self.data, *shape)
        self._numbers = np.arange(self.num_rows)

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.data.values())

    def at(self, position: int) -> dict[str, Any]:
        """What is added at `position`; always the same tensors."""
        self.data[peers.ROW_NUMBER][:, 0] = self._numbers + position * self.num_rows
        return self._trajectory

    def check(self, name: str, batch: dict[str, Any]) -> np.ndarray:
        """Check a batch of such trajectories; their positions."""
        rows = {path: tensor.numpy() for path, tensor in peers.unnest(batch).items()}
        positions, numbers = np.divmod(rows[peers.ROW_NUMBER], self.num_rows)
        self.at(0)
        peers.check_batch(name, rows | {peers.ROW_NUMBER: numbers}, self.data, is_partial=False)
        return positions.reshape(-1).astype(np.int64)

    def write_store(self, directory: Path, num_trajectories: int) -> None:
        with TrajectoryReplayBuffer(
            sample_window_size=1, auto_save=True, auto_save_path=str(directory)
        ) as buffer:
            for position in range(num_trajectories):
                buffer.add_trajectories([self.at(position)])


def bytes_on_disk(store: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in store.glob("trajectory_*.arrow"))


# -- memory ---------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes of a process: Pss of a store's files; private, and anonymous, of all that it has."""

    store_pss: int
    private: int
    anonymous: int


def memory_of(pid: int, store: Path | None = None) -> Memory:
    store_pss = private = anonymous = 0
    prefix = f"{store}/"
    is_of_store = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        key = fields[0]
        if not key.endswith(":"):
            is_of_store = len(fields) == 6 and fields[5].startswith(prefix)
        elif key == "Pss:" and is_of_store:
            store_pss += int(fields[1]) * 1024
        elif key in ("Private_Clean:", "Private_Dirty:"):
            private += int(fields[1]) * 1024
        elif key == "Anonymous:":
            anonymous += int(fields[1]) * 1024
    return Memory(store_pss, private, anonymous)


@functools.cache
def idle_memory() -> Memory:
    """Of an interpreter that has imported torch, and nothing else."""
    code = "import sys, torch; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
                raise TimeoutError("no answer from an idle interpreter")
            return memory_of(process.pid)
        finally:
            process.kill()


def hold_store(
    store: Path, seed: int, shape: tuple[int, int], num_batches: int, *, has_images: bool
) -> Steps:
    """Sample a store and keep the last batch; the rows are checked at the end, since what they are
    compared with takes memory. Yields before it is opened, then the reader's counts.
    """
    yield None
    reader = ReplayReader(store, seed=seed)
    for _ in range(num_batches):
        batch = reader.sample(peers.BATCH_ROWS)
    yield reader.get_stats()
    numbered = Numbered(shape, has_images=has_images)
    numbered.check(f"reader {seed}", batch)
    for _ in range(8):
        numbered.check(f"reader {seed}", reader.sample(peers.BATCH_ROWS))
    yield None


def share_memory(name: str, directory: Path, *, has_images: bool, is_tiny: bool) -> Case:
    """What several readers of one store have in memory."""
    shape = (50, 4) if has_images else (400, 8)
    numbered = Numbered(shape, has_images=has_images)
    wanted = 20_000_000 if is_tiny else 2_000_000_000 if has_images else 1_000_000_000
    num_trajectories = -(-wanted // numbered.size_bytes)
    num_passes = IMAGE_PASSES if has_images else STATE_PASSES
    num_batches = num_passes * num_trajectories * numbered.num_rows // peers.BATCH_ROWS
    store = directory.resolve() / "store"
    numbered.write_store(store, num_trajectories)
    size = bytes_on_disk(store)

    hold = functools.partial(hold_store, has_images=has_images)
    num_readers = 2 if is_tiny else NUM_READERS
    children = [Child(hold, store, i, shape, num_batches) for i in range(num_readers)]
    with closing_all(children):
        for child in children:
            child.receive()
        before = [memory_of(child.pid, store) for child in children]
        idle = idle_memory()
        for child in children:
            child.send()
        for child in children:
            stats = child.receive()
            if stats["cache_filled"] != num_trajectories:
                raise timing.UnequalError(f"a reader has not filled all slots: {stats}")
        after = [memory_of(child.pid, store) for child in children]
        for child in children:
            child.send()
            child.receive()

    pss = sum(memory.store_pss for memory in after)
    copied = [now.anonymous - then.anonymous for now, then in zip(after, before, strict=True)]
    private = [memory.private - idle.private for memory in after]
    remarks = [
        f"{num_batches:,} batches and {stats['cache_maps']:,} mappings each; the rows of the store"
        f" have {num_trajectories * numbered.size_bytes / 1e6:.1f} MB, its files {size / 1e6:.1f}",
        f"{'MB':>10}  {'Pss of files':>12}  {'anonymous':>9}  {'since opened':>12}"
        f"  {'private':>7}  {'above idle':>10}",
    ]
    for i, memory in enumerate(after):
        remarks.append(
            f"{f'reader {i}':>10}  {memory.store_pss / 1e6:12.1f}  {memory.anonymous / 1e6:9.1f}"
            f"  {copied[i] / 1e6:12.1f}  {memory.private / 1e6:7.1f}  {private[i] / 1e6:10.1f}"
        )
    remarks += [
        f"{'together':>10}  {pss / 1e6:12.1f}  {'':9}  {sum(copied) / 1e6:12.1f}",
        f"private, idle: {idle.private / 1e6:.1f} MB with torch imported,"
        f" {before[0].private / 1e6:.1f} with all that this benchmark imports",
    ]
    if has_images:
        bars = [
            Bar("Pss for the store's files at most 1.2x the store", pss / size, 1.2),
            Bar("private above idle at most 80 MB", max(private) / 1e6, 80, unit=" MB"),
        ]
    else:
        remarks.append(
            f"of the store: Pss of files {pss / size:.3f}x, anonymous {sum(copied) / size:.3f}x"
        )
        claim = "Pss for the store's files and anonymous memory at most 1.3x the store"
        bars = [Bar(claim, (pss + sum(copied)) / size, 1.3)]
    kind = "image" if has_images else "state"
    title = f"{num_readers} readers of one {size / 1e9:.2f} GB {kind} store of {list(shape)}"
    return Case(name, title, [], bars, remarks=remarks)


# -- speed ----------------------------------------------------------------------------------------


def sample_beside(name: str, directory: Path, *, has_images: bool, is_tiny: bool) -> Case:
    """A reader and the buffer that wrote its store, in one process."""
    shape = (50, 4) if has_images else (50, 8)
    num_trajectories = (20 if has_images else 100) // (10 if is_tiny else 1)
    data = peers.make_data(num_trajectories * shape[0] * shape[1], has_images=has_images)
    contenders = {
        "buffer": peers.Mmbuf(data, shape, directory / "store"),
        "reader": peers.MmbufReader(directory / "store"),
        "reader, follow=False": peers.MmbufReader(directory / "store", follow=False),
        "floor": peers.Floor(data),
    }
    for key, contender in contenders.items():
        peers.check_equal(key, contender, data)
    calls = {key: Contender(contender.sample) for key, contender in contenders.items()}
    rows = timing.rows_of(timing.interleave(calls, 12, is_tiny=is_tiny))
    for contender in contenders.values():
        contender.close()
    kind = "rows with two images" if has_images else "state rows"
    title = f"{kind}, {num_trajectories} x {list(shape)}"
    bars = [timing.ratio_bar(rows, "reader", 1.1, "buffer")]
    return Case(name, title, rows, bars, "ms" if has_images else "µs")


def map_files(paths: list[Path]) -> None:
    """The least that a reader can do with files that it has not seen yet."""
    for path in paths:
        with path.open("rb") as file:
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()


def sample_first(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """The first batches of readers of a long list; the files are in the page cache."""
    num_trajectories, shape = 100 if is_tiny else 10_000, (50, 8)
    numbered = Numbered(shape)
    store = directory / "store"
    numbered.write_store(store, num_trajectories)
    paths = {int(path.name.split("_")[1]): path for path in store.glob("trajectory_*.arrow")}

    batches = {0: "first batch", 1: "second batch", 9: "tenth batch"}
    files = "map the files of the first"
    times: dict[str, list[float]] = {key: [] for key in ("open", *batches.values(), files)}
    num_filled, num_maps, num_beyond, grown = [], [], [], []
    with timing.frozen_gc():
        for seed in range(2 if is_tiny else 15):
            start = clock()
            reader = ReplayReader(store, seed=seed)
            times["open"].append(clock() - start)
            anonymous = memory_of(os.getpid()).anonymous
            drawn: set[int] = set()
            for i in range(10):
                start = clock()
                batch = reader.sample(peers.BATCH_ROWS)
                taken = clock() - start
                drawn.update(numbered.check("reader", batch).tolist())
                stats = reader.get_stats()
                if i in batches:
                    times[batches[i]].append(taken)
                if i == 0:
                    num_filled.append(stats["cache_filled"])
                    num_maps.append(stats["cache_maps"])
                    grown.append(memory_of(os.getpid()).anonymous - anonymous)
                    start = clock()
                    map_files([paths[position] for position in drawn])
                    times[files].append(clock() - start)
                num_beyond.append(stats["cache_filled"] - len(drawn))
            reader.close()
    rows = timing.rows_of(times)
    filled = statistics.median(num_filled)
    rows[1].note = (
        f"fills {filled:.0f} slots with {statistics.median(num_maps):.0f} mappings,"
        f" {rows[1].median / filled * 1e6:.0f} µs a slot"
    )
    remarks = [
        f"anonymous memory grows by {statistics.median(grown) / 1e6:.1f} MB with the first batch;"
        f" the slots that it fills have {filled * numbered.size_bytes / 1e6:.1f}"
    ]
    bar = Bar("slots filled beyond those drawn: none", max(num_beyond), 0, unit="")
    title = f"{num_trajectories:,} state trajectories of {list(shape)}"
    return Case(name, title, rows, [bar], "ms", remarks)


def sample_for(
    names: list[str], directory: Path, rank: int, shape: tuple[int, int], num_trajectories: int
) -> Steps:
    """Sample from one time to another, whom and as often as asked; yields batches a second."""
    timing.pin_allocator()
    torch.manual_seed(rank)
    data = peers.make_data(num_trajectories * shape[0] * shape[1])
    contenders: dict[str, peers.Floor] = {"mmbuf": peers.MmbufReader(directory / "store", rank)}
    if peers.choose_peers(",".join(names) or "none")[0]:
        contenders["torchrl"] = peers.TorchRL(data, directory / f"torchrl{rank}")
    contenders["floor"] = peers.Floor(data)
    for key, contender in contenders.items():
        peers.check_equal(key, contender, data)
    rate = 0.0
    while True:
        key, start, stop = yield rate
        contender = contenders[key]
        num_batches = 0
        with timing.frozen_gc():
            time.sleep(max(0, start - clock_ns()) * 1e-9)
            begin = clock_ns()
            while not num_batches or clock_ns() < stop:
                contender.sample()
                num_batches += 1
            rate = num_batches / (clock_ns() - begin) * 1e9


def sample_together(name: str, directory: Path, *, names: list[str], is_tiny: bool) -> Case:
    """Processes that sample at the same time; contenders and numbers of processes take turns."""
    shape, num_trajectories = (50, 8), 10 if is_tiny else 100
    counts = (1,) if is_tiny else (1, 2, NUM_READERS)
    num_rounds, round_s = (2, 0.1) if is_tiny else (7, 1.0)
    data = peers.make_data(num_trajectories * shape[0] * shape[1])
    peers.Mmbuf(data, shape, directory / "store").close()
    kinds = ("mmbuf", *names, "floor")
    times: dict[tuple[str, int], list[float]] = {(key, n): [] for key in kinds for n in counts}
    children = [
        Child(sample_for, names, directory, rank, shape, num_trajectories)
        for rank in range(max(counts))
    ]
    with closing_all(children):
        for child in children:
            child.receive()
        for _ in range(num_rounds):
            for (key, count), seconds in times.items():
                start = clock_ns() + 50_000_000
                for child in children[:count]:
                    child.send((key, start, start + int(round_s * 1e9)))
                seconds.append(1 / sum(child.receive() for child in children[:count]))
    rows = timing.rows_of({f"{key}, {count}": taken for (key, count), taken in times.items()})
    for row in rows:
        row.note = f"{1 / row.median:,.0f} batches a second in all"
    title = (
        f"state rows, {num_trajectories} x {list(shape)}, sampled by 1 to {max(counts)} processes;"
        f" calls are rounds of {round_s:g} s"
    )
    return Case(name, title, rows, [])


# -- following ------------------------------------------------------------------------------------


def craft_store(store: Path, numbered: Numbered, num_trajectories: int) -> None:
    """A journal of so many trajectories, of which only the newest has its file."""
    numbered.write_store(store, 1)
    contents, _ = read_index(str(store))
    (entry,) = contents.entries.values()
    assert contents.schema is not None
    for path in store.glob("*.json*"):
        path.unlink()
    index = TrajectoryIndex(str(store))
    for i in range(num_trajectories - 1):
        name = uuid.uuid4().hex
        index.add(
            contents.schema,
            dataclasses.replace(
                entry,
                uuid=name,
                trajectory_id=i,
                file=f"trajectory_{i}_{name}.arrow",
                added_at=entry.added_at + i * 1e-3,
            ),
        )
    newest = dataclasses.replace(
        entry, trajectory_id=num_trajectories - 1, added_at=entry.added_at + num_trajectories * 1e-3
    )
    index.add(contents.schema, newest)
    index.close()


def parse_lines(journal: Path) -> None:
    with journal.open("rb") as lines:
        for line in lines:
            json.loads(line)


def open_store(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Readers of long journals."""
    num_trajectories = 500 if is_tiny else 50_000
    held: list[ReplayReader] = []

    def open_reader(store: Path) -> None:
        held.append(ReplayReader(store))

    def open_collecting(store: Path) -> None:
        gc.enable()
        held.append(ReplayReader(store))
        gc.disable()

    contenders: dict[str, Contender] = {}
    stores = {}
    remarks = []
    for shape in ((4, 2), (50, 8)):
        numbered = Numbered(shape)
        store = stores[str(list(shape))] = directory / f"store{shape[0]}"
        craft_store(store, numbered, num_trajectories)
        with ReplayReader(store) as reader:
            if reader.trajectory_ids != list(range(num_trajectories)):
                raise timing.UnequalError(f"{len(reader)} trajectories after opening")
            if reader.total_samples != num_trajectories * numbered.num_rows:
                raise timing.UnequalError(f"{reader.total_samples} rows after opening")
        with ReplayReader(store, sample_window_size=1) as reader:
            numbered.check("reader", reader.sample(peers.BATCH_ROWS))
        journal = store / "journal.jsonl"
        remarks.append(f"journal of {list(shape)}: {journal.stat().st_size / 1e6:.2f} MB")
        close = functools.partial(close_last, held)
        calls: dict[str, Contender] = {
            "json.loads": Contender(functools.partial(parse_lines, journal)),
            "reader": Contender(functools.partial(open_reader, store), close),
            "reader, gc on": Contender(functools.partial(open_collecting, store), close),
        }
        contenders |= {f"{list(shape)} {key}": call for key, call in calls.items()}
    rows = timing.rows_of(timing.interleave(contenders, 20, is_tiny=is_tiny))
    medians = {}
    for row in rows:
        medians[row.name] = row.median / num_trajectories * 1e6
        row.note = f"{medians[row.name]:.2f} µs a trajectory"

    # Watched when all has been timed: the hook stays, and is told of other events as well.
    opened = watch_opens()
    num_touched = 0
    for store in stores.values():
        with ReplayReader(store):
            num_touched += len(opened) + num_mapped_files()
        with ReplayReader(store, sample_window_size=1) as reader:
            reader.sample(1)
        if not opened:
            raise timing.UnequalError("the opening of a data file goes unnoticed")
        opened.clear()
    bars = [Bar("data files opened or mapped by opening: none", num_touched, 0, unit="")]
    for shape_name in stores:
        extra = medians[f"{shape_name} reader"] - medians[f"{shape_name} json.loads"]
        claim = f"{shape_name} reader at most 20 µs a trajectory more than json.loads of each line"
        bars.append(Bar(claim, extra, 20, unit=" µs"))
    title = f"opening a store of {num_trajectories:,} trajectories"
    return Case(name, title, rows, bars, "ms", remarks)


def close_last(readers: list[ReplayReader]) -> None:
    readers.pop().close()


def add_on_demand(store: Path, shape: tuple[int, int], num_before: int) -> Steps:
    """Fill a window, then add one trajectory whenever asked. Yields the newest position, then when
    `add_trajectories` was called and when `flush` returned, in ns.
    """
    numbered = Numbered(shape)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(store)) as buffer:
        for position in range(num_before):
            buffer.add_trajectories([numbered.at(position)])
        buffer.flush()
        yield position
        while True:
            position += 1
            trajectory = [numbered.at(position)]
            called = clock_ns()
            buffer.add_trajectories(trajectory)
            buffer.flush()
            yield called, clock_ns()


def follow_writer(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """A writer adds one trajectory, and another one once the reader has drawn a row of it."""
    shape, num_before = (50, 8), 100
    num_rounds = 20 if is_tiny else 1000
    numbered = Numbered(shape)
    store = directory / "store"
    waits: dict[str, list[float]] = {}
    remarks = []
    flushes = []
    writer = Child(add_on_demand, store, shape, num_before)
    with closing_all([writer]):
        position = writer.receive()
        for window in (1, num_before):
            after_flush, after_add, num_batches = [], [], 0
            reader = ReplayReader(store, sample_window_size=window)
            for _ in range(200):
                numbered.check("reader", reader.sample(peers.BATCH_ROWS))
            with timing.frozen_gc():
                for _ in range(num_rounds):
                    position += 1
                    first_row = position * numbered.num_rows
                    end = clock_ns() + int(TIMEOUT_S * 1e9)
                    writer.send()
                    while True:
                        batch = reader.sample(peers.BATCH_ROWS)
                        seen = clock_ns()
                        num_batches += 1
                        if batch["rewards"].numpy().max() >= first_row:
                            break
                        if seen > end:
                            raise TimeoutError(f"no row of trajectory {position}")
                    called, flushed = writer.receive()
                    after_flush.append((seen - flushed) * 1e-9)
                    after_add.append((seen - called) * 1e-9)
                    flushes.append((flushed - called) * 1e-9)
                    if numbered.check("reader", batch).max() != position:
                        raise timing.UnequalError(f"trajectory {position} is not what was drawn")
            reader.close()
            key = f"a window of {window}"
            waits[f"{key}, after flush"] = after_flush
            waits[f"{key}, after add was called"] = after_add
            num_early = sum(wait < 0 for wait in after_flush)
            remarks.append(
                f"{key}: {num_early} of {num_rounds} were seen before flush had returned in the"
                f" writer (negative); {num_batches / num_rounds:.1f} batches a trajectory"
            )
    remarks.append(f"add and flush take the writer {statistics.median(flushes) * 1e6:.0f} µs")
    rows: list[Row] = timing.rows_of(waits)
    for row in rows:
        most = np.quantile(waits[row.name], 0.99) * 1e6
        row.note = f"99 % {most:.0f} µs, longest {max(waits[row.name]) * 1e6:.0f}"
    title = f"a new state trajectory of {list(shape)} to its first sampled row elsewhere"
    return Case(name, title, rows, [], "µs", remarks)


def refresh_idle(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """A reader of a store in which nothing happens."""
    numbered = Numbered((4, 2))
    store = directory / "store"
    numbered.write_store(store, 100)
    journal = str(store / "journal.jsonl")
    with ReplayReader(store) as reader:
        numbered.check("reader", reader.sample(peers.BATCH_ROWS))
        contenders = {
            "os.stat of the journal": Contender(lambda: os.stat(journal)),
            "refresh": Contender(reader.refresh),
        }
        rows = timing.rows_of(timing.interleave(contenders, 3, is_tiny=is_tiny))
        if reader.refresh():
            raise timing.UnequalError("refresh has found something new")
    bar = Bar("refresh at most 5 µs", rows[1].median * 1e6, 5, unit=" µs")
    return Case(name, "nothing new in one store", rows, [bar])


def main() -> int:
    arguments = timing.argument_parser(__doc__, CASES).parse_args()
    # No other peer is of use here.
    found, missing = peers.choose_peers("none" if arguments.peers == "none" else "torchrl")
    cases: dict[str, Callable[..., Case]] = {
        "images": functools.partial(share_memory, has_images=True),
        "state": functools.partial(share_memory, has_images=False),
        "beside": functools.partial(sample_beside, has_images=False),
        "beside-images": functools.partial(sample_beside, has_images=True),
        "first": sample_first,
        "rate": functools.partial(sample_together, names=found),
        "open": open_store,
        "latency": follow_writer,
        "refresh": refresh_idle,
    }
    return timing.run_cases(arguments, cases, peers.packages_of(found), missing, 2 << 30)


if __name__ == "__main__":
    sys.exit(main())
