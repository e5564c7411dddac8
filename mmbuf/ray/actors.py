"""The actors of a buffer: where they are placed, started and found again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mmbuf import files
from mmbuf.locations import location
from mmbuf.packages import optional_package
from mmbuf.ray.shard import CONCURRENCY, Config, Shard
from mmbuf.transfer import Directory

ray = optional_package("ray", "ray")
scheduling = optional_package("ray.util.scheduling_strategies", "ray")

_NAMESPACE = "mmbuf"


def pattern_of(path: Directory) -> str:
    """Of the shards' stores."""
    text = location("path", path)
    return text if "{shard}" in text else files.join(text, "rank_{shard}")


def placed(num_shards: int, placement: str | Sequence[str]) -> list[str]:
    """The node of each shard; ValueError where there are no such nodes."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    # By address, since an id is another one whenever the node is started.
    alive.sort(key=lambda node: [node[k] for k in ("NodeManagerAddress", "NodeName", "NodeID")])
    ids = [node["NodeID"] for node in alive]
    if placement == "spread":
        nodes = ids
    elif placement == "pack":
        nodes = [ray.get_runtime_context().get_node_id()]
    elif isinstance(placement, str) or len(placement) != num_shards or {*placement} - {*ids}:
        raise ValueError(
            f"placement: expected 'spread', 'pack' or the ids of {num_shards} nodes of {ids}, "
            f"got {placement!r}."
        )
    else:
        nodes = list(placement)
    return [nodes[number % len(nodes)] for number in range(num_shards)]


def start(
    config: Config, arguments: Mapping[str, Any], name: str | None, options: Mapping[str, Any]
) -> list[Any]:
    """New actors, each bound to its node. With a ``name`` they outlive their driver."""
    kind = ray.remote(concurrency_groups=CONCURRENCY)(Shard)
    actors = []
    for number, node in enumerate(config.nodes):
        of_shard = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": scheduling.NodeAffinitySchedulingStrategy(node, soft=False),
            **options,
        }
        if name is not None:
            names = {"name": _name_of(name, number), "namespace": _NAMESPACE}
            of_shard |= {**names, "lifetime": "detached"}
        actors.append(kind.options(**of_shard).remote(config, number, arguments))
    return actors


def found(name: str, timeout_s: float) -> tuple[Config, list[Any]]:
    """What was started with this name; None for a shard that is gone.

    ValueError where there is none, TimeoutError where none answers.
    """
    named = ray.util.list_named_actors(all_namespaces=True)
    listed = {actor["name"] for actor in named if actor["namespace"] == _NAMESPACE}
    numbers = (other.rpartition("/") for other in listed)
    actors = {
        int(number): ray.get_actor(_name_of(name, int(number)), namespace=_NAMESPACE)
        for other, _, number in numbers
        if other == name
    }
    if not actors:
        raise ValueError(f"name: expected that of a buffer in this cluster, got {name!r}.")
    config = _config_of(actors, time.monotonic() + timeout_s)
    return config, [actors.get(number) for number in range(config.num_shards)]


def _config_of(actors: Mapping[int, Any], deadline: float) -> Config:
    asked = [actor.config.remote() for actor in actors.values()]
    while asked:
        answered, asked = ray.wait(asked, timeout=max(0.0, deadline - time.monotonic()))
        if not answered:
            break
        try:
            config: Config = ray.get(answered[0])
        except ray.exceptions.RayError:
            continue  # of a shard that is away
        return config
    raise TimeoutError("attach: expected an answer of a shard, got none in time.")


def _name_of(name: str, number: int) -> str:
    return f"{name}/{number}"
