"""What adding costs the caller, how it scales, and what it leaves behind.

Cases and their bars:

images  add one [50, 4] image trajectory (19.7 MB): at most 2.5x a copy of its bytes into warm
        memory and 0.5x TorchRL's `extend`
state   add one [50, 8] state trajectory: at most 0.6x TorchRL's `extend`
many    100,000 adds of [4, 2] state trajectories, flushed every 500: the last 1,000 cost at most
        1.3x the first 1,000; 99.9 % of the adds stall under 5 ms, none above 50
memory  anonymous memory after 4 GB of images were added and written: under 200 MB above the start
reopen  10,000 trajectories: opening the store reads no data file; time per trajectory, beside a
        plain `json.loads` of every line of the journal

Only the calling thread's wait is timed in the first two; the writer gets its time between two
adds (`flush`, untimed). Everything runs in one process, interleaved; rows are compared as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import peers
import timing
import torch
from timing import Bar, Case, Contender, clock

from mmbuf import ReplayReader, TrajectoryReplayBuffer

CASES = ("images", "state", "many", "memory", "reopen")
# TorchRL's storage is a ring of this many trajectories: after its first round it overwrites pages
# that it has written before, which is its fastest state and the one that it stays in.
RING = 20


def check_added(name: str, source: TrajectoryReplayBuffer | ReplayReader, data: peers.Data) -> None:
    """Check that what is sampled are rows of `data`."""
    for _ in range(8):
        rows = {p: t.numpy() for p, t in peers.unnest(source.sample(peers.BATCH_ROWS)).items()}
        peers.check_batch(name, rows, data, is_partial=False)


def add_one(
    name: str, directory: Path, *, names: list[str], has_images: bool, is_tiny: bool
) -> Case:
    """One trajectory, added again and again."""
    shape = (50, 4) if has_images else (50, 8)
    data = peers.make_data(shape[0] * shape[1], has_images=has_images)
    (trajectory,) = peers.trajectories_of(data, *shape)
    arrays = [(np.zeros_like(array), array) for array in data.values()]
    tensors = [(torch.from_numpy(warm), torch.from_numpy(array)) for warm, array in arrays]

    def copy_numpy() -> None:
        for warm, array in arrays:
            np.copyto(warm, array)

    def copy_torch() -> None:
        for warm, tensor in tensors:
            warm.copy_(tensor)

    contenders = {"copy, NumPy": Contender(copy_numpy), "copy, torch": Contender(copy_torch)}
    # The second buffer evicts its oldest trajectory with each add.
    buffers = {
        "mmbuf": TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(directory / "mmbuf")),
        "mmbuf evicting": TrajectoryReplayBuffer(
            sample_window_size=2, auto_save=True, auto_save_path=str(directory / "evicting")
        ),
    }
    for key, buffer in buffers.items():
        contenders[key] = Contender(
            functools.partial(buffer.add_trajectories, [trajectory]), after=buffer.flush
        )
    if "torchrl" in names:
        peer = peers.TorchRL(data, directory / "torchrl", RING * len(data[peers.ROW_NUMBER]))
        peers.check_equal("torchrl", peer, data)
        prepared = peer.prepared(data)
        for _ in range(RING):
            peer.extend(prepared)
        contenders["torchrl"] = Contender(functools.partial(peer.extend, prepared))
    # Images are written at 40 MB a round: few enough that the kernel never makes a writer wait for
    # the disk.
    budget_s, warm_up_s = (3, 0.2) if has_images else (12, 1)
    times = timing.interleave(contenders, budget_s, warm_up_s=warm_up_s, is_tiny=is_tiny)
    for key, buffer in buffers.items():
        check_added(key, buffer, data)
        buffer.close()
    rows = sorted(timing.rows_of(times), key=lambda row: not row.name.startswith("copy"))
    copy = min(rows[:2], key=lambda row: row.median).name
    bars = [timing.ratio_bar(rows, "mmbuf", 0.5 if has_images else 0.6, "torchrl")]
    if has_images:
        bars.insert(0, timing.ratio_bar(rows, "mmbuf", 2.5, copy))
    size = sum(array.nbytes for array in data.values())
    title = f"one {list(shape)} trajectory of {size / 1e6:.2f} MB"
    return Case(name, title, rows, bars, "ms" if has_images else "µs")


def add_many(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Many small trajectories into one store, timed one by one."""
    num_adds, flush_every, thousand = (200, 50, 100) if is_tiny else (100_000, 500, 1000)
    shape = (4, 2)
    data = peers.make_data(100 * shape[0] * shape[1])
    trajectories = peers.trajectories_of(data, *shape)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(directory / "warm")) as buffer:
        for trajectory in trajectories:
            buffer.add_trajectories([trajectory])
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(directory / "store"))
    adds = np.empty(num_adds)
    delays = np.empty(num_adds)
    flushes = np.empty(num_adds // flush_every)
    before = processor_seconds()
    begin = clock()
    with timing.frozen_gc(), open_schedule() as schedule:
        for i in range(num_adds):
            batch = [trajectories[i % len(trajectories)]]
            delay = delay_s(schedule)
            start = clock()
            buffer.add_trajectories(batch)
            adds[i] = clock() - start
            delays[i] = delay_s(schedule) - delay
            if (i + 1) % flush_every == 0:
                start = clock()
                buffer.flush()
                flushes[i // flush_every] = clock() - start
    total = clock() - begin
    spent = [now - then for now, then in zip(processor_seconds(), before, strict=True)]
    check_added("mmbuf", buffer, data)
    buffer.close()

    adds_s = adds.reshape(-1, thousand).sum(axis=1)
    flushes_s = flushes.reshape(len(adds_s), -1).sum(axis=1)
    together = adds_s + flushes_s
    first, last = together[:10].min(), together[-10:].min()
    remarks = [f"{'adds':>19}  {'adds':>7} {'flushes':>8} {'together':>9}  (s)"]
    for i in np.unique(np.linspace(0, len(adds_s) - 1, 6).astype(int)):
        block = f"{i * thousand:,} to {(i + 1) * thousand:,}"
        remarks.append(f"{block:>19}  {adds_s[i]:7.3f} {flushes_s[i]:8.3f} {together[i]:9.3f}")
    files = [entry.stat() for entry in os.scandir(directory / "store")]
    on_disk = sum(stat.st_blocks for stat in files) * 512
    remarks += [
        f"fastest of the first ten and of the last ten blocks: {first:.3f} and {last:.3f} s",
        f"wall clock {total:.1f} s: adds {adds.sum():.1f}, flushes {flushes.sum():.1f}",
        "processor seconds: calling thread {:.1f} user {:.1f} system, others {:.1f} user {:.1f}"
        " system".format(*spent),
        f"{len(files):,} files, {on_disk / num_adds / 1e3:.1f} kB of disk and"
        f" {sum(s.st_size for s in files) / num_adds / 1e3:.1f} kB of bytes a trajectory,"
        f" {(directory / 'store' / 'journal.jsonl').stat().st_size / num_adds:.0f} of them journal",
        f"a plain file of that size, written and renamed: {plain_write_s(directory) * 1e6:.0f} µs",
        f"adds: {describe(adds)}",
        f"without their waits for a processor: {describe(adds - delays)}",
    ]
    bars = [
        Bar("last 1,000 at most 1.3x the first 1,000, flushed", together[-1] / together[0], 1.3),
        Bar(
            "99.9 % of the adds below 5 ms",
            np.quantile(adds, 0.999) * 1e3,
            5,
            is_strict=True,
            unit=" ms",
        ),
        Bar("no add above 50 ms", adds.max() * 1e3, 50, unit=" ms"),
    ]
    title = (
        f"{num_adds:,} adds of {list(shape)} state trajectories, flush after every {flush_every}"
    )
    return Case(name, title, [], bars, remarks=remarks)


def describe(adds: np.ndarray) -> str:
    """The distribution of the stalls in words."""
    median, most, nearly_all = np.quantile(adds, (0.5, 0.99, 0.999)) * 1e3
    longest = ", ".join(f"{seconds * 1e3:.1f}" for seconds in np.sort(adds)[:-4:-1])
    return (
        f"median {median:.2f} ms, 99 % {most:.2f}, 99.9 % {nearly_all:.2f}, longest {longest};"
        f" {np.count_nonzero(adds >= 5e-3)} of 5 ms or more"
    )


@contextlib.contextmanager
def open_schedule() -> Iterator[BinaryIO | None]:
    """What the kernel's scheduler tells about the calling thread; None where it tells nothing."""
    with contextlib.ExitStack() as stack:
        schedule = None
        with contextlib.suppress(OSError):
            path = "/proc/thread-self/schedstat"
            schedule = stack.enter_context(open(path, "rb", buffering=0))
        yield schedule


def delay_s(schedule: BinaryIO | None) -> float:
    """Seconds so far that the thread could have run, but others had the processors."""
    if schedule is None:
        return 0.0
    return int(os.pread(schedule.fileno(), 64, 0).split()[1]) * 1e-9


def plain_write_s(directory: Path, size_bytes: int = 6000) -> float:
    """Median seconds to write and rename a file as large as a small trajectory's."""
    times = []
    content = bytes(size_bytes)
    for i in range(300):
        hidden, path = directory / f".plain{i}", directory / f"plain{i}"
        start = clock()
        file = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.pwrite(file, content, 0)
        os.close(file)
        os.rename(hidden, path)
        times.append(clock() - start)
    return statistics.median(times)


def processor_seconds() -> list[float]:
    """User and system seconds of the calling thread, then of all other threads."""
    own = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    everyone = resource.getrusage(resource.RUSAGE_SELF)
    return [
        own.ru_utime,
        own.ru_stime,
        everyone.ru_utime - own.ru_utime,
        everyone.ru_stime - own.ru_stime,
    ]


def kernel_counts(*keys: str, file: str = "status", unit: int = 1024) -> list[int]:
    """Values of /proc/self/status (or another file of that shape), 0 where there are none."""
    values = dict.fromkeys(keys, 0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", file).read_text().splitlines():
            key, _, value = line.partition(":")
            if key in values:
                values[key] = int(value.split()[0]) * unit
    return list(values.values())


def add_gigabytes(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """What stays in anonymous memory; the window holds all that was added."""
    shape = (50, 4)
    data = peers.make_data(shape[0] * shape[1], has_images=True)
    (trajectory,) = peers.trajectories_of(data, *shape)
    size = sum(array.nbytes for array in data.values())
    num_adds = (40_000_000 if is_tiny else 4_000_000_000) // size + 1
    timing.trim_heap()
    (start,) = kernel_counts("RssAnon")
    peak = 0
    buffer = TrajectoryReplayBuffer(
        sample_window_size=0, auto_save=True, auto_save_path=str(directory / "store")
    )
    begin = clock()
    for _ in range(num_adds):
        buffer.add_trajectories([trajectory])
        peak = max(peak, *kernel_counts("RssAnon"))
    added = clock() - begin
    buffer.flush()
    flushed = clock() - begin
    (after,) = kernel_counts("RssAnon")
    (huge,) = kernel_counts("AnonHugePages", file="smaps_rollup")
    check_added("mmbuf", buffer, data)
    sampled, mapped = kernel_counts("RssAnon", "RssFile")
    buffer.close()
    remarks = [
        f"{num_adds} adds in {added:.1f} s, written after {flushed:.1f} s"
        f" ({num_adds * size / flushed / 1e9:.1f} GB/s)",
        f"anonymous MB above the start ({start / 1e6:.0f}): highest {(peak - start) / 1e6:.0f}"
        f" while adding, {(after - start) / 1e6:.1f} when written,"
        f" {(sampled - start) / 1e6:.1f} after 8 batches of 25 MB;"
        f" {huge / 1e6:.0f} MB of the whole in huge pages; {mapped / 1e6:.0f} MB of mapped files",
    ]
    bar = Bar(
        "below 200 MB above the start", (after - start) / 1e6, 200, is_strict=True, unit=" MB"
    )
    title = f"{num_adds * size / 1e9:.2f} GB of image trajectories, all in the window"
    return Case(name, title, [], [bar], remarks=remarks)


def watch_opens() -> list[str]:
    """The data files that Python opens from now on."""
    opened: list[str] = []

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        # It hears of every event of the interpreter for ever: the cheap test comes first.
        if event == "open" and str(arguments[0]).endswith(".arrow"):
            opened.append(str(arguments[0]))

    sys.addaudithook(on_event)
    return opened


def num_mapped_files() -> int:
    with contextlib.suppress(OSError):
        return sum(
            line.endswith(".arrow") for line in Path("/proc/self/maps").read_text().splitlines()
        )
    return 0


def open_store(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Open a store with many trajectories, as its writer and as a reader."""
    num_trajectories = 50 if is_tiny else 10_000
    shape = (4, 2)
    data = peers.make_data(num_trajectories * shape[0] * shape[1])
    store = directory / "store"
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(store)) as buffer:
        for trajectory in peers.trajectories_of(data, *shape):
            buffer.add_trajectories([trajectory])

    def open_buffer() -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            sample_window_size=0, auto_save=True, auto_save_path=str(store)
        )

    def open_reader() -> ReplayReader:
        return ReplayReader(str(store))

    opened = watch_opens()
    next(store.glob("*.arrow")).open("rb").close()
    if len(opened) != 1:
        raise timing.UnequalError("the opening of a data file goes unnoticed")
    opened.clear()
    remarks = []
    num_touched = 0
    snapshots = sum(path.stat().st_size for path in store.glob("*.json*"))
    for kind, open_it in (("buffer", open_buffer), ("reader", open_reader)):
        (before,) = kernel_counts("rchar", file="io", unit=1)
        source = open_it()
        (after,) = kernel_counts("rchar", file="io", unit=1)
        num_touched += len(opened) + num_mapped_files()
        remarks.append(
            f"{kind}: {len(opened)} data files opened, {num_mapped_files()} mapped;"
            f" {(after - before) / 1e6:.2f} MB read (journal and snapshots have"
            f" {snapshots / 1e6:.2f})"
        )
        if source.total_samples != peers.num_rows_of(data):
            raise timing.UnequalError(f"{kind}: {source.total_samples} rows after opening")
        check_added(f"{kind}, opened again", source, data)
        source.close()
        opened.clear()

    def parse_journal() -> None:
        with (store / "journal.jsonl").open("rb") as journal:
            for line in journal:
                json.loads(line)

    held: list[TrajectoryReplayBuffer | ReplayReader] = []
    contenders = {
        "json.loads of each line": Contender(parse_journal),
        "buffer": Contender(lambda: held.append(open_buffer()), lambda: held.pop().close()),
        "reader": Contender(lambda: held.append(open_reader()), lambda: held.pop().close()),
    }
    rows = timing.rows_of(timing.interleave(contenders, 8, is_tiny=is_tiny))
    for row in rows:
        row.note = f"{row.median / num_trajectories * 1e6:.2f} µs a trajectory"
    bar = Bar("data files opened or mapped by opening: none", num_touched, 0, unit="")
    title = f"opening a store of {num_trajectories:,} trajectories of {list(shape)}"
    return Case(name, title, rows, [bar], "ms", remarks)


def main() -> int:
    arguments = timing.argument_parser(__doc__, CASES).parse_args()
    found, missing = peers.choose_peers(arguments.peers)
    cases: dict[str, Callable[..., Case]] = {
        "images": functools.partial(add_one, names=found, has_images=True),
        "state": functools.partial(add_one, names=found, has_images=False),
        "many": add_many,
        "memory": add_gigabytes,
        "reopen": open_store,
    }
    return timing.run_cases(arguments, cases, peers.packages_of(found), missing, 8 << 30)


if __name__ == "__main__":
    sys.exit(main())
