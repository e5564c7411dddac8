"""What sampling and adding cost over a Ray cluster, beside one buffer and beside plain calls.

Cases and their bars:

state   a batch of 256 state rows, 100 trajectories of [50, 8]
images  a batch of 256 rows with two images, 20 trajectories of [50, 4]: over the store on the own
        node at most 1.3x the local buffer; through an actor at most 1.5x a plain call of an actor
        on the same node that returns as many bytes
add-state, add-images  one such trajectory, until it can be sampled

The cluster has three nodes on this machine, which ``ray.cluster_utils`` starts; what goes from node
to node goes through the loopback device. A plain call returns (or takes) arrays of the batch's
shapes that it holds already, and nobody looks at them. Everything is called from one process,
interleaved, ten calls in a row; rows are compared before they are timed. Needs the extra ``ray``;
it has no peers.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers
import ray
import timing
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from timing import Case, Contender

from mmbuf.ray import RayReplayBuffer

CASES = ("state", "images", "add-state", "add-images")
BUDGET_S = 40.0
LOOP = 10  # calls in a row, as in a training loop: a handle asks for news every 50 ms
STORE_BYTES = 1 << 30  # the shared memory of each node: no batch has to go to the disk
ANY_DISK = {"local_fs_capacity_threshold": 1.0}  # so how full it is may decide nothing


@contextmanager
def cluster() -> Iterator[list[str]]:
    """Three nodes; their ids, that of this process first."""
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    head = {**node, "include_dashboard": False, "_system_config": ANY_DISK}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(**node)
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    own = ray.get_runtime_context().get_node_id()
    try:
        others = sorted(n["NodeID"] for n in ray.nodes() if n["NodeID"] != own)
        yield [own, *others]
    finally:
        ray.shutdown()
        nodes.shutdown()


class Sharded(peers.Mmbuf):
    """A buffer of one shard on ``node``; ``by_actor``: its files are not read here."""

    def __init__(self, directory: Path, node: str, *, by_actor: bool = False) -> None:
        self._buffer = RayReplayBuffer(1, directory, seed=1, placement=[node])
        if by_actor:
            self._buffer._node = ""

    def fill(self, trajectories: list[dict[str, Any]]) -> None:
        for trajectory in trajectories:
            self.add(trajectory)
        self._buffer.flush()

    def add(self, trajectory: dict[str, Any]) -> None:
        self._buffer.add_trajectories([trajectory])

    def flush(self) -> None:
        self._buffer.flush()


class Plain:
    """An actor that gives what it holds, or takes what it is given."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def give(self) -> Any:
        return self._held

    def take(self, _: Any) -> None:
        pass


def plain_on(node: str, held: Any) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(Plain).remote(held)


def sample_rows(name: str, directory: Path, *, has_images: bool, is_tiny: bool) -> Case:
    shape = (50, 4) if has_images else (50, 8)
    num_trajectories = (20 if has_images else 100) // (10 if is_tiny else 1)
    data = peers.make_data(num_trajectories * shape[0] * shape[1], has_images=has_images)
    trajectories = peers.trajectories_of(data, *shape)
    with cluster() as (own, other, _):
        shards = {
            "own store": Sharded(directory / "a", own),
            "actor, same node": Sharded(directory / "b", own, by_actor=True),
            "actor, other node": Sharded(directory / "c", other),
        }
        for shard in shards.values():
            shard.fill(trajectories)
        local = peers.Mmbuf(data, shape, directory / "local")
        contenders: dict[str, peers.Floor] = {"local buffer": local, **shards}
        for key, contender in contenders.items():
            peers.check_equal(key, contender, data)
        batch = peers.nest(local.rows(local.sample()))
        calls: dict[str, Callable[[], object]] = {
            key: contender.sample for key, contender in contenders.items()
        }
        for key, node in (("plain call, same node", own), ("plain call, other node", other)):
            give = plain_on(node, batch).give
            calls[key] = functools.partial(call, give)
        ahead = Sharded.__new__(Sharded)
        ahead._buffer = shards["actor, other node"]._buffer.with_stream(1, prefetch=4)
        calls["other node, 4 ahead"] = ahead.sample
        times = timing.interleave(
            {
                key: Contender(functools.partial(repeat, function))
                for key, function in calls.items()
            },
            BUDGET_S,
            is_tiny=is_tiny,
        )
        times = {key: [seconds / LOOP for seconds in found] for key, found in times.items()}
        for contender in (ahead, *contenders.values()):
            contender.close()
    rows = timing.rows_of(times)
    bars = []
    if has_images:
        bars = [
            timing.ratio_bar(rows, "own store", 1.3, "local buffer"),
            timing.ratio_bar(rows, "actor, same node", 1.5, "plain call, same node"),
            timing.ratio_bar(rows, "actor, other node", 1.5, "plain call, other node"),
        ]
    title = (
        f"{peers.BATCH_ROWS} rows of {peers.row_bytes_of(data)} bytes, "
        f"{num_trajectories} x {list(shape)}"
    )
    return Case(name, title, rows, bars, "ms" if has_images else "µs")


def repeat(function: Callable[[], object]) -> None:
    for _ in range(LOOP):
        function()


def call(method: Any, *arguments: Any) -> Any:
    return ray.get(method.remote(*arguments))


def add_one(name: str, directory: Path, *, has_images: bool, is_tiny: bool) -> Case:
    shape = (50, 4) if has_images else (50, 8)
    data = peers.make_data(shape[0] * shape[1], has_images=has_images)
    (trajectory,) = peers.trajectories_of(data, *shape)
    arrays = peers.nest(data)
    with cluster() as (own, other, _):
        local = peers.Mmbuf(data, shape, directory / "local")
        shards = {
            "same node": Sharded(directory / "a", own),
            "other node": Sharded(directory / "b", other),
        }
        calls = {
            "local buffer": Contender(
                functools.partial(local._buffer.add_trajectories, [trajectory]), local._buffer.flush
            )
        }
        for key, shard in shards.items():
            shard.fill([trajectory])
            peers.check_equal(key, shard, data)
            calls[key] = Contender(functools.partial(shard.add, trajectory), shard.flush)
        for key, node in (("plain call, same node", own), ("plain call, other node", other)):
            take = plain_on(node, None).take
            calls[key] = Contender(functools.partial(call, take, arrays))
        times = timing.interleave(calls, BUDGET_S / 4, warm_up_s=0.3, is_tiny=is_tiny)
        for contender in (local, *shards.values()):
            contender.close()
    size = sum(array.nbytes for array in data.values())
    title = f"one trajectory of {list(shape)}, {size / 1e6:.1f} MB, until it can be sampled"
    return Case(name, title, timing.rows_of(times), [], "ms")


def main() -> int:
    arguments = timing.argument_parser(__doc__, CASES).parse_args()
    cases = {
        "state": functools.partial(sample_rows, has_images=False),
        "images": functools.partial(sample_rows, has_images=True),
        "add-state": functools.partial(add_one, has_images=False),
        "add-images": functools.partial(add_one, has_images=True),
    }
    return timing.run_cases(arguments, cases, ["ray"], [], 1 << 30)


if __name__ == "__main__":
    sys.exit(main())
