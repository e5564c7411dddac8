"""How benchmarks measure and report: a pinned allocator, warm memory, interleaved calls, tables."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

clock = time.perf_counter

# A block of calls is timed call by call. About 2 ms long, it is long enough for a contender to
# find its own data in the processor's caches again, as it would in a loop of its own, and short
# enough that a noisy neighbour disturbs every contender alike.
BLOCK_S = 2e-3
MAX_BLOCK_CALLS = 50
# Pages of mapped files are faulted in by the first gathers; a trainer samples for hours after.
WARM_UP_S = 1.0
WARM_UP_CALLS = 300


class UnequalError(Exception):
    """A contender returned something else than the rows it was given."""


@dataclass
class Contender:
    """A call that is timed, and what has to follow each call without being timed."""

    call: Callable[[], object]
    after: Callable[[], object] | None = None


@dataclass
class Row:
    """One line of a table: median and quartiles in seconds of the calls of one contender."""

    name: str
    median: float
    low: float
    high: float
    num_calls: int
    note: str = ""


@dataclass
class Bar:
    """A claim and its limit; `value` is None where a peer that it needs is missing."""

    claim: str
    value: float | None
    limit: float
    is_strict: bool = False
    unit: str = "x"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not judged"
        is_met = self.value < self.limit if self.is_strict else self.value <= self.limit
        return "met" if is_met else "MISSED"


@dataclass
class Case:
    """The result of one case; the first row is what the others are compared with."""

    name: str
    title: str
    rows: list[Row]
    bars: list[Bar]
    unit: str = "µs"
    remarks: list[str] = field(default_factory=list)


def pin_allocator() -> bool:
    """Make glibc keep freed memory and never move its thresholds; False without glibc.

    glibc raises its mmap threshold to the largest block freed so far and trims the heap at twice
    that. Whether a batch gets warm memory or fresh pages then depends on what ran before, which
    changes every contender that allocates by a factor of two. Pinned at the highest values that
    glibc takes, everyone gets warm memory: the fastest floor, and the fastest peers.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    return bool(
        mallopt(mmap_threshold, 32 << 20)
        and mallopt(trim_threshold, 2**31 - 1)
        and mallopt(top_pad, 64 << 20)
    )


def trim_heap() -> None:
    """Give the freed memory that the pinned allocator keeps back to the kernel."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def touch_memory(size_bytes: int) -> None:
    """Write to every page of `size_bytes` and free them again.

    A page that the host of a virtual machine has not backed yet costs about 12 µs at its first
    touch, which would be charged to whoever comes first.
    """
    with contextlib.suppress(OSError, ValueError):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size_bytes = min(size_bytes, available // 2)
    block = 64 << 20
    blocks = [mmap.mmap(-1, block) for _ in range(size_bytes // block)]
    for memory in blocks:
        memory[:: mmap.PAGESIZE] = b"x" * (block // mmap.PAGESIZE)
    for memory in blocks:
        memory.close()


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection inside: its pauses grow with what the imports left behind."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleave(
    contenders: dict[str, Contender],
    budget_s: float,
    *,
    warm_up_s: float = WARM_UP_S,
    is_tiny: bool = False,
) -> dict[str, list[float]]:
    """Seconds of every call of each contender, timed in short blocks that take turns."""
    with frozen_gc():
        warm_s = 0 if is_tiny else warm_up_s
        blocks = {name: _warm_up(contender, warm_s) for name, contender in contenders.items()}
        if any(contender.after is not None for contender in contenders.values()):
            # One that has to wait after each call finds the caches cold; so shall the others.
            blocks = dict.fromkeys(blocks, 1)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        order = list(contenders)
        end = clock() + budget_s
        num_rounds = 0
        while num_rounds < 2 or (clock() < end and not is_tiny):
            for name in order:
                _time_block(contenders[name], blocks[name], times[name])
            # Nobody always runs after the same neighbour, whose data then fill the caches.
            order = order[1:] + order[:1] if num_rounds % 2 else order[::-1]
            num_rounds += 1
    return times


def _warm_up(contender: Contender, warm_up_s: float) -> int:
    """Run a contender until its pages are mapped; return the number of calls in a block."""
    times: list[float] = []
    start = clock()
    while len(times) < 3 or (len(times) < WARM_UP_CALLS and clock() - start < warm_up_s):
        _time_block(contender, 1, times)
    return max(1, min(MAX_BLOCK_CALLS, round(BLOCK_S / statistics.median(times))))


def _time_block(contender: Contender, num_calls: int, times: list[float]) -> None:
    call, after = contender.call, contender.after
    for _ in range(num_calls):
        start = clock()
        call()
        times.append(clock() - start)
        if after is not None:
            after()


def rows_of(times: dict[str, list[float]], notes: dict[str, str] | None = None) -> list[Row]:
    rows = []
    for name, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        rows.append(Row(name, median, low, high, len(seconds), (notes or {}).get(name, "")))
    return rows


def ratio_bar(
    rows: Sequence[Row], name: str, limit: float, against: str, *, is_strict: bool = False
) -> Bar:
    """The claim that `name` takes at most `limit` times as long as `against`."""
    medians = {row.name: row.median for row in rows}
    value = medians[name] / medians[against] if against in medians else None
    claim = f"{name} {'below' if is_strict else 'at most'} {limit:g}x {against}"
    return Bar(claim, value, limit, is_strict)


def print_case(case: Case, *, is_tiny: bool = False) -> None:
    print(f"\n{case.name}: {case.title}", flush=True)
    if case.rows:
        scale = {"µs": 1e6, "ms": 1e3, "s": 1.0}[case.unit]
        width = max(len(row.name) for row in case.rows)
        print(
            f"  {'':{width}}  {case.unit + '/call':>10}  {'(quartiles)':>19}  {'ratio':>6}  calls"
        )
        for row in case.rows:
            quartiles = f"({row.low * scale:.1f} to {row.high * scale:.1f})"
            print(
                f"  {row.name:{width}}  {row.median * scale:10.1f}  {quartiles:>19}"
                f"  {row.median / case.rows[0].median:6.2f}  {row.num_calls:5}  {row.note}".rstrip()
            )
    for remark in case.remarks:
        print(f"  {remark}")
    for bar in case.bars:
        value = "-" if bar.value is None else f"{bar.value:.3g}{bar.unit}"
        verdict = "not judged (tiny)" if is_tiny else bar.verdict
        print(f"  bar: {bar.claim}: {value} {verdict}")


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds `path`."""
    best, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            mount, mount_kind = line.split()[1:3]
            if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
                best, kind = mount, mount_kind
    return kind


def busy_elsewhere_s() -> float:
    """Processor seconds that all other processes have used since the start of the machine."""
    with contextlib.suppress(OSError, ValueError):
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split()[1:9]
        )
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
    return 0.0


def machine(directory: Path) -> dict[str, str]:
    """What a number depends on besides the code."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).split(": ")[1]
    huge_pages = "unknown"
    with contextlib.suppress(OSError):
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        huge_pages = setting[setting.index("[") + 1 : setting.index("]")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "memory": f"{memory:.1f} GiB, transparent huge pages: {huge_pages}",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": filesystem_of(directory),
        "torch threads": str(torch.get_num_threads()),
    }


def versions(packages: Sequence[str]) -> str:
    """The version of each package that is installed."""
    known = [f"python {platform.python_version()}"]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(known)


def argument_parser(description: str, cases: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", help="names joined by commas, or none; default: all installed")
    parser.add_argument(
        "--cases",
        type=lambda text: text.split(","),
        default=list(cases),
        help=f"of {','.join(cases)}",
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="torch threads of all contenders (default: torch's own choice); on cores that other"
        " processes use, torch waits milliseconds for its second thread",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, no bar is judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="temporary files go here (default: here)"
    )
    return parser


def run_cases(
    arguments: argparse.Namespace,
    cases: dict[str, Callable[..., Case]],
    packages: Sequence[str],
    missing_peers: Sequence[str],
    memory_bytes: int,
) -> int:
    """Run and print the cases asked for; 0, or 1 when a contender returned unequal rows."""
    if unknown := set(arguments.cases) - set(cases):
        raise SystemExit(f"unknown cases {sorted(unknown)}; known: {','.join(cases)}")
    # A tiny run has to be short on cores that others use as well.
    if threads := arguments.threads or (1 if arguments.tiny else None):
        torch.set_num_threads(threads)
    is_pinned = pin_allocator()
    touch_memory(memory_bytes >> (4 if arguments.tiny else 0))
    header = machine(arguments.dir) | {
        "allocator": "glibc, thresholds pinned" if is_pinned else "not pinned",
        "versions": versions(("mmbuf", "numpy", "torch", "pyarrow", *packages)),
    }
    if missing_peers:
        header["not installed"] = ", ".join(missing_peers)
    for key, value in header.items():
        print(f"{key + ':':15}{value}")
    results = []
    for name in arguments.cases:
        start, busy = clock(), busy_elsewhere_s()
        with tempfile.TemporaryDirectory(prefix="mmbuf-bench-", dir=arguments.dir) as directory:
            try:
                case = cases[name](name, Path(directory), is_tiny=arguments.tiny)
            except UnequalError as error:
                print(f"\n{name}: UNEQUAL: {error}")
                return 1
        took = clock() - start
        others = max(0.0, busy_elsewhere_s() - busy) / took
        case.remarks.append(
            f"took {took:.0f} s, in which other processes kept {others:.1f} cores busy"
        )
        print_case(case, is_tiny=arguments.tiny)
        results.append(case)
    if arguments.json is not None:
        write_json(arguments.json, header, results)
    return 0


def write_json(path: Path, header: dict[str, str], cases: Sequence[Case]) -> None:
    results = [
        asdict(case) | {"bars": [asdict(bar) | {"verdict": bar.verdict} for bar in case.bars]}
        for case in cases
    ]
    path.write_text(json.dumps({"machine": header, "cases": results}, indent=1, ensure_ascii=False))
