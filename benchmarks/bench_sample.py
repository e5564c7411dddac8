"""How fast batches of 256 rows are sampled.

Cases and their bars:

state       state rows, 100 trajectories of [50, 8]: at most 1.3x the floor and 0.35x TorchRL,
            faster than cpprb and SB3 (both in RAM)
state-out   the same with `out=`: at most 1.4x the floor with `out=`
images      images added, 20 trajectories of [50, 4], each batch dropped: at most 1.3x the floor
            with `out=` and 0.4x TorchRL
images-out  the same with `out=`: at most 1.15x the floor with `out=`
cache       state rows, a cache of 5 of 100 trajectories: at most 0.1x RLinf with the same cache
many        state rows, 5,000 trajectories: the ratio to the floor at most 1.3x that with 100

The floor gathers the same rows from one contiguous array in RAM per column. mmbuf reads mapped
files (auto_save, flushed); a buffer in memory and a `ReplayReader` of the same files are shown
beside it. Everything runs in one process, interleaved; rows are compared before they are timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import peers
import timing
from timing import Bar, Case, Contender

CASES = ("state", "state-out", "images", "images-out", "cache", "many")
RAM_PEERS = ("cpprb", "sb3")
BUDGET_S = 12.0


def floor_and_mmbuf(
    data: peers.Data, shape: tuple[int, int], directory: Path
) -> dict[str, peers.Floor]:
    return {
        "floor": peers.Floor(data),
        "mmbuf": peers.Mmbuf(data, shape, directory / "mmbuf"),
        "mmbuf in memory": peers.Mmbuf(data, shape),
        "mmbuf reader": peers.MmbufReader(directory / "mmbuf"),
    }


def close_all(contenders: dict[str, peers.Floor]) -> None:
    for contender in contenders.values():
        contender.close()


def sample_rows(
    name: str, directory: Path, *, names: list[str], has_images: bool, is_tiny: bool
) -> Case:
    """Every contender, and for images the floor with `out=` as well."""
    shape = (50, 4) if has_images else (50, 8)
    num_trajectories = (20 if has_images else 100) // (10 if is_tiny else 1)
    data = peers.make_data(num_trajectories * shape[0] * shape[1], has_images=has_images)
    contenders = floor_and_mmbuf(data, shape, directory)
    if "torchrl" in names:
        contenders["torchrl"] = peers.TorchRL(data, directory / "torchrl")
    if "cpprb" in names:
        contenders["cpprb"] = peers.Cpprb(data)
    if "sb3" in names:
        contenders["sb3"] = peers.Sb3(data)
    if "rlinf" in names:
        contenders["rlinf"] = peers.Rlinf(data, shape)
    for key, contender in contenders.items():
        peers.check_equal(key, contender, data)
    calls = {key: Contender(contender.sample) for key, contender in contenders.items()}
    if has_images:
        floor = contenders["floor"]
        batch = peers.check_refill("floor out=", floor, data)
        refill = Contender(functools.partial(floor.sample_into, batch))
        calls = {"floor out=": refill, **calls}
    times = timing.interleave(calls, BUDGET_S, is_tiny=is_tiny)
    close_all(contenders)
    rows = timing.rows_of(times, {"sb3": "holds fewer columns", "rlinf": "all in its cache in RAM"})
    bars = [
        timing.ratio_bar(rows, "mmbuf", 1.3, "floor out=" if has_images else "floor"),
        timing.ratio_bar(rows, "mmbuf", 0.4 if has_images else 0.35, "torchrl"),
    ]
    if not has_images:
        bars += [timing.ratio_bar(rows, "mmbuf", 1, peer, is_strict=True) for peer in RAM_PEERS]
    kind = "rows with two images" if has_images else "state rows"
    title = f"{kind} of {peers.row_bytes_of(data)} bytes, {num_trajectories} x {list(shape)}"
    return Case(name, title, rows, bars, "ms" if has_images else "µs")


def sample_rows_out(name: str, directory: Path, *, has_images: bool, is_tiny: bool) -> Case:
    """The floor and mmbuf refill a batch; no peer can."""
    shape = (50, 4) if has_images else (50, 8)
    num_trajectories = (20 if has_images else 100) // (10 if is_tiny else 1)
    data = peers.make_data(num_trajectories * shape[0] * shape[1], has_images=has_images)
    contenders = floor_and_mmbuf(data, shape, directory)
    calls = {}
    for key, contender in contenders.items():
        batch = peers.check_refill(key, contender, data)
        calls[key] = Contender(functools.partial(contender.sample_into, batch))
    times = timing.interleave(calls, BUDGET_S, is_tiny=is_tiny)
    close_all(contenders)
    rows = timing.rows_of(times)
    bars = [timing.ratio_bar(rows, "mmbuf", 1.15 if has_images else 1.4, "floor")]
    kind = "rows with two images" if has_images else "state rows"
    title = f"{kind}, {num_trajectories} x {list(shape)}, with out="
    return Case(name, title, rows, bars, "ms" if has_images else "µs")


def sample_beyond_cache(name: str, directory: Path, *, names: list[str], is_tiny: bool) -> Case:
    """Most of the window is not in the cache."""
    shape, cache_size = (50, 8), 5
    num_trajectories = 10 if is_tiny else 100
    data = peers.make_data(num_trajectories * shape[0] * shape[1])
    contenders = {
        "floor": peers.Floor(data),
        "mmbuf": peers.Mmbuf(data, shape, directory / "mmbuf", cache_size),
    }
    if "rlinf" in names:
        contenders["rlinf"] = peers.Rlinf(data, shape, directory / "rlinf", cache_size)
    for key, contender in contenders.items():
        peers.check_equal(key, contender, data)
    calls = {key: Contender(contender.sample) for key, contender in contenders.items()}
    times = timing.interleave(calls, BUDGET_S, is_tiny=is_tiny)
    close_all(contenders)
    rows = timing.rows_of(times)
    title = f"state rows, {num_trajectories} x {list(shape)}, a cache of {cache_size} trajectories"
    return Case(name, title, rows, [timing.ratio_bar(rows, "mmbuf", 0.1, "rlinf")])


def sample_many(name: str, directory: Path, *, is_tiny: bool) -> Case:
    """Few and many trajectories, each with a floor of its own size."""
    shape = (50, 8)
    few, many = (10, 50) if is_tiny else (100, 5000)
    calls: dict[str, Contender] = {}
    contenders: dict[str, peers.Floor] = {}
    for count in (few, many):
        data = peers.make_data(count * shape[0] * shape[1])
        pair = {
            f"floor {count}": peers.Floor(data),
            f"mmbuf {count}": peers.Mmbuf(data, shape, directory / f"mmbuf{count}"),
        }
        for key, contender in pair.items():
            peers.check_equal(key, contender, data)
            calls[key] = Contender(contender.sample)
        contenders |= pair
    times = timing.interleave(calls, BUDGET_S, is_tiny=is_tiny)
    close_all(contenders)
    rows = timing.rows_of(times)
    medians = {row.name: row.median for row in rows}
    at_few, at_many = (medians[f"mmbuf {n}"] / medians[f"floor {n}"] for n in (few, many))
    claim = f"ratio to the floor {at_many:.2f} at {many} at most 1.3x the {at_few:.2f} at {few}"
    title = f"state rows, {few} and {many} trajectories of {list(shape)}"
    return Case(name, title, rows, [Bar(claim, at_many / at_few, 1.3)])


def main() -> int:
    arguments = timing.argument_parser(__doc__, CASES).parse_args()
    found, missing = peers.choose_peers(arguments.peers)
    cases: dict[str, Callable[..., Case]] = {
        "state": functools.partial(sample_rows, names=found, has_images=False),
        "state-out": functools.partial(sample_rows_out, has_images=False),
        "images": functools.partial(sample_rows, names=found, has_images=True),
        "images-out": functools.partial(sample_rows_out, has_images=True),
        "cache": functools.partial(sample_beyond_cache, names=found),
        "many": sample_many,
    }
    return timing.run_cases(arguments, cases, peers.packages_of(found), missing, 4 << 30)


if __name__ == "__main__":
    sys.exit(main())
