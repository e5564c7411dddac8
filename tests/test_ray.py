"""A buffer over a Ray cluster: three nodes on one machine, real actors, real kills.

Where Ray is installed (extra ``ray``): ``pytest tests/test_ray.py -n 0``, one cluster for all.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import DTYPES, bits, is_equal, is_whole, random_bits, row_ids, trajectory
from hypothesis import given
from hypothesis import strategies as st

from mmbuf import (
    ClosedError,
    CorruptError,
    EmptyBufferError,
    LockedError,
    ReplayReader,
    SchemaError,
    TrajectoryReplayBuffer,
    WriteError,
)
from mmbuf.analysis import Tables
from mmbuf.pool import BatchPool

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.data import from_items  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from mmbuf.ray import RayReplayBuffer, ShardError, read_store  # noqa: E402
from mmbuf.ray.remote import RemoteShard, window_of  # noqa: E402
from mmbuf.ray.shard import Update  # noqa: E402
from mmbuf.ray.wire import Joint, packed, unpacked  # noqa: E402

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray's own, of itself
]

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text()
MEMORY = 200 << 20  # of each node's object store
WAIT_S = 120.0  # a busy machine imports torch slowly


# -- how rows travel ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_travel_bit_for_bit(dtype: str) -> None:
    columns = {"a": random_bits(dtype, (5, 3)).t(), "b": {"text": [["x", "y"]]}}
    back = unpacked(packed(columns))
    tensor = torch.as_tensor(back["a"])
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.shape == (3, 5)
    assert bits(tensor) == bits(columns["a"])
    assert back["b"] == columns["b"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_joined_row_by_row(dtype: str) -> None:
    rows = random_bits(dtype, (7, 2, 3))
    texts = [f"row {i}" for i in range(7)]
    places = [np.array([6, 0, 3]), np.array([1, 2, 4, 5])]
    joint = Joint(7, BatchPool())
    for where in places:
        joint.put(where, packed({"a": {"b": rows[where]}, "t": [texts[i] for i in where]}))
    batch = joint.batch()
    assert is_equal(batch, {"a": {"b": rows}, "t": texts})
    batch["a"]["b"].zero_()  # is the caller's


def test_a_tensor_with_a_graph_and_a_view_of_one_travel() -> None:
    tensor = torch.arange(12.0, requires_grad=True).view(3, 4)[:, 1::2]
    assert np.array_equal(packed(tensor), [[1, 3], [5, 7], [9, 11]])


# -- the window --------------------------------------------------------------------------------


def update_of(
    ids: list[int], times: list[float], rows: list[int], *, epoch: str = "e", since: int = -1
) -> Update:
    first = ids[0] if ids else -1
    columns = (np.array(ids, "q"), np.array(times, "d"), np.array(rows, "q"))
    return Update(epoch, since, first, *columns, None)


def shard_of(times: list[float], number: int = 0) -> RemoteShard:
    shard = RemoteShard(number, object(), "", "")
    shard.take(update_of(list(range(len(times))), times, [3] * len(times)))
    return shard


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=8).map(sorted), min_size=1, max_size=4),
    st.integers(0, 12),
)
def test_the_window_is_the_newest_of_all_shards(times: list[list[int]], size: int) -> None:
    shards = [shard_of([float(t) for t in of], i) for i, of in enumerate(times)]
    found = {(span.shard.number, i) for span in window_of(shards, size) for i in span.ids.tolist()}
    in_order = sorted((t, number, i) for number, of in enumerate(times) for i, t in enumerate(of))
    assert found == {(number, i) for _, number, i in in_order[-size:]}
    for span in window_of(shards, size):
        assert span.ends.tolist() == [3 * (i + 1) for i in range(len(span.ids))]


def test_updates_may_come_late_twice_and_of_an_epoch_that_is_over() -> None:
    shard = RemoteShard(0, object(), "", "")
    assert shard.known == ("", -1, -1)
    assert shard.take(update_of([2, 4], [1.0, 2.0], [5, 6]))
    assert shard.known == ("e", 2, 4)
    assert not shard.take(None)
    assert shard.take(update_of([4, 6, 8], [2.0, 2.0, 3.0], [6, 7, 8]))  # 2 has left the window
    assert shard.ids.tolist() == [4, 6, 8]
    assert shard.times.tolist() == [2.0, 2.0, 3.0]
    assert shard.ends.tolist() == [6, 13, 21]
    shard.take(update_of([4, 6], [2.0, 2.0], [6, 7]))  # an older answer
    assert shard.ids.tolist() == [4, 6, 8]
    assert shard.take(update_of([0], [9.0], [4], epoch="f"))
    assert (shard.known, shard.ends.tolist()) == (("f", 0, 0), [4])
    assert not shard.take(update_of([8], [3.0], [8], since=6))
    assert shard.known == ("f", 0, 0)
    assert shard.take(update_of([], [], [], epoch="g"))
    assert shard.known == ("g", -1, -1)


# -- the cluster -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes of one CPU; tests and data can be imported on them."""
    quick = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}
    any_disk = {"local_fs_capacity_threshold": 1.0}  # objects may spill however full it is
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": MEMORY,
            "include_dashboard": False,
            "_system_config": quick | any_disk,
        },
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}},
    )
    from_items([0]).count()  # Ray's log of it stays open
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def shared(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayReplayBuffer]:
    """A shard on each node, for tests that change nothing but trajectories."""
    path = tmp_path_factory.mktemp("shared")
    with RayReplayBuffer(3, path, seed=5, timeout_s=WAIT_S, refresh_s=0.0) as buffer:
        yield buffer


@pytest.fixture
def buffer(shared: RayReplayBuffer) -> Iterator[RayReplayBuffer]:
    """A handle of its own: what it opens is closed with it."""
    shared.clear()
    with shared.with_stream(0) as handle:
        yield handle


def run_on(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` gives in a task on this node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(function)
    return ray.get(task.remote(*arguments), timeout=WAIT_S)


def add(buffer: RayReplayBuffer, *numbers: int) -> None:
    buffer.add_trajectories([trajectory(i) for i in numbers])


def add_on(buffer: RayReplayBuffer, shard: int, *numbers: int) -> None:
    """Add to one shard: a task on its node does."""
    run_on(buffer._config.nodes[shard], add, buffer, *numbers)


def sampled(buffer: Any, count: int = 400) -> set[int]:
    batch = buffer.sample(count)
    assert is_whole(batch)
    assert len(batch["rewards"]) == count
    return {i for i, _, _ in row_ids(batch)}


def assert_uniform(batches: list[dict[str, Any]], numbers: range, num_rows: int = 12) -> None:
    """Chi-square over every row of these trajectories, five deviations wide."""
    counts = Counter(row for batch in batches for row in row_ids(batch))
    total = sum(counts.values())
    cells = len(numbers) * num_rows
    assert len(counts) <= cells
    assert {i for i, _, _ in counts} == set(numbers)
    expected = total / cells
    chi_square = sum((n - expected) ** 2 for n in counts.values()) / expected
    chi_square += (cells - len(counts)) * expected
    assert abs(chi_square - (cells - 1)) < 5 * (2 * (cells - 1)) ** 0.5


def known_ids(buffer: RayReplayBuffer) -> list[int]:
    return [i for shard in buffer._shards.all for i in shard.ids.tolist()]


def call(buffer: RayReplayBuffer, shard: int, function: Callable[..., Any]) -> Any:
    """What ``function`` gives of the actor itself, in its process."""
    actor = buffer._shards.all[shard].actor
    return ray.get(actor.__ray_call__.remote(function), timeout=WAIT_S)


def pid_of(buffer: RayReplayBuffer, shard: int) -> int:
    pid: int = call(buffer, shard, lambda _: os.getpid())
    return pid


def test_rows_of_unequal_shards_are_uniform_and_shuffled(buffer: RayReplayBuffer) -> None:
    assert len(set(buffer._config.nodes)) == 3
    add_on(buffer, 0, 0)
    add_on(buffer, 1, 1, 2, 3, 4, 5)
    add_on(buffer, 2, 6, 7)
    assert (len(buffer), buffer.total_samples) == (8, 96)
    batches = [buffer.sample(500) for _ in range(40)]
    assert all(map(is_whole, batches))
    assert_uniform(batches, range(8))
    # By place in the batch, too: of shard 1 is the same part of the first and the last rows.
    for places in (slice(0, 100), slice(400, 500)):
        of_one = [i in range(1, 6) for batch in batches for i, _, _ in row_ids(batch)[places]]
        assert abs(np.mean(of_one) - 5 / 8) < 5 * (15 / 64 / len(of_one)) ** 0.5


def test_a_batch_is_as_of_one_buffer(buffer: RayReplayBuffer) -> None:
    item = trajectory(3, image=(64, 64, 3)) | {"half": random_bits("bfloat16", (4, 3, 2))}
    with TrajectoryReplayBuffer() as local:
        local.add_trajectories([item])
        expected = local.sample(64)
    for shard in range(3):
        run_on(buffer._config.nodes[shard], RayReplayBuffer.add_trajectories, buffer, [item])
    batch = buffer.sample(64)
    assert is_whole(batch)

    def kinds(node: Any) -> Any:
        if isinstance(node, dict):
            return [(name, kinds(value)) for name, value in node.items()]
        return type(node) if isinstance(node, list) else (node.dtype, node.shape)

    assert kinds(batch) == kinds(expected)
    batch["curr_obs"]["image"].fill_(7)  # the caller's to change
    assert is_whole(buffer.sample(64))


def test_the_window_goes_over_the_shards(tmp_path: Path, cluster: Cluster) -> None:
    with RayReplayBuffer(
        3, tmp_path / "{shard}" / "store", sample_window_size=4, timeout_s=WAIT_S, refresh_s=0.0
    ) as buffer:
        for i in range(3):
            add_on(buffer, 0, 3 * i)
            add_on(buffer, 1, 3 * i + 1)
            add_on(buffer, 2, 3 * i + 2)
        assert sampled(buffer) == {5, 6, 7, 8}
        add_on(buffer, 1, 9, 10, 11, 12)
        assert sampled(buffer) == {9, 10, 11, 12}
        assert len(buffer) == 13
        buffer.flush()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]
        with ReplayReader(tmp_path / "*" / "store", sample_window_size=4) as reader:
            assert sampled(reader) == {9, 10, 11, 12}


def test_rows_on_the_own_node_are_read_from_the_files(buffer: RayReplayBuffer) -> None:
    def rows_of_actors() -> list[int]:
        return [shard["sampled_rows"] for shard in buffer.get_stats()["shards"]]

    own = buffer._config.nodes.index(buffer._node)
    before = rows_of_actors()
    add(buffer, 0, 1, 2)
    buffer.flush()
    assert sampled(buffer) == {0, 1, 2}
    assert rows_of_actors() == before
    other = (own + 1) % 3
    add_on(buffer, other, 3)
    assert sampled(buffer) == {0, 1, 2, 3}
    after = rows_of_actors()
    assert after[own] == before[own]
    assert 50 < after[other] - before[other] < 150  # about a quarter of 400


def test_the_same_stream_gives_the_same_rows_wherever_it_is_drawn(buffer: RayReplayBuffer) -> None:
    for shard in range(3):
        add_on(buffer, shard, shard, shard + 3)
    here = row_ids(buffer.with_stream(7).sample(100))
    assert row_ids(buffer.with_stream(7).sample(100)) == here
    assert row_ids(buffer.with_stream(8).sample(100)) != here
    for node in buffer._config.nodes:
        assert run_on(node, draw_stream, buffer, 7) == here
    # Whoever is sent a handle has a stream of its own, though it is sent once.
    sent = ray.put(buffer)
    node = buffer._config.nodes[1]
    assert run_on(node, draw, sent) != run_on(node, draw, sent)


def draw(buffer: RayReplayBuffer) -> list[tuple[int, int, int]]:
    return row_ids(buffer.sample(100))


def draw_stream(buffer: RayReplayBuffer, number: int) -> list[tuple[int, int, int]]:
    return draw(buffer.with_stream(number))


def test_adds_come_from_many_at_once_and_none_is_lost(buffer: RayReplayBuffer) -> None:
    strategy = [NodeAffinitySchedulingStrategy(n, soft=False) for n in buffer._config.nodes]
    task = ray.remote(num_cpus=0)(add)
    refs = [
        task.options(scheduling_strategy=strategy[i % 3]).remote(
            buffer, *range(10 * i, 10 * i + 10)
        )
        for i in range(6)
    ]
    while ray.wait(refs, num_returns=6, timeout=0)[1]:
        if len(buffer):
            sampled(buffer, 100)
    ray.get(refs)
    assert len(buffer) == 60
    assert sampled(buffer, 3000) == set(range(60))
    stats = buffer.get_stats()
    assert (stats["num_trajectories"], stats["total_samples"]) == (60, 720)
    assert (stats["num_shards"], stats["num_shards_away"], stats["num_short_batches"]) == (3, 0, 0)
    assert [shard["num_trajectories"] for shard in stats["shards"]] == [20, 20, 20]
    assert len(set(known_ids(buffer))) == 60


def test_references_instead_of_waiting(buffer: RayReplayBuffer) -> None:
    (ref,) = buffer.add_trajectories([trajectory(0)], block=False)
    ray.get(ref, timeout=WAIT_S)
    assert sampled(buffer) == {0}
    (ref,) = buffer.add_trajectories([{"rewards": torch.zeros(2, 2)}], block=False)
    with pytest.raises(SchemaError, match="expected"):
        ray.get(ref, timeout=WAIT_S)


def test_batches_under_way_are_those_that_come_without(buffer: RayReplayBuffer) -> None:
    for shard in range(3):
        add_on(buffer, shard, shard, shard + 3)
    plain, ahead = buffer.with_stream(3), buffer.with_stream(3, prefetch=4)
    expected = [row_ids(plain.sample(50)) for _ in range(8)]
    got = [row_ids(ahead.sample(50)) for _ in range(5)]
    state = ahead.state_dict()
    assert len(ahead._ahead) == 4
    got += [row_ids(ahead.sample(50)) for _ in range(3)]
    assert got == expected
    ahead.load_state_dict(state)
    assert [row_ids(ahead.sample(50)) for _ in range(3)] == expected[5:]
    assert len(ahead.sample(20)["rewards"]) == 20  # another size: what was under way is let go
    ahead.close()


# -- errors ------------------------------------------------------------------------------------


def test_errors_of_a_shard_are_those_of_a_buffer(buffer: RayReplayBuffer, tmp_path: Path) -> None:
    with pytest.raises(EmptyBufferError):
        buffer.sample(3)
    with pytest.raises(ValueError, match="num_chunks"):
        buffer.sample(0)
    add(buffer, 0)
    with pytest.raises(SchemaError, match="rewards"):
        buffer.add_trajectories([trajectory(1) | {"rewards": torch.zeros(4, 3, 9)}])
    with pytest.raises(TypeError, match="Put a single one in a list"):
        buffer.add_trajectories(trajectory(1))
    with pytest.raises(FileNotFoundError):
        buffer.load_checkpoint(tmp_path / "none")
    assert sampled(buffer) == {0}
    with pytest.raises(LockedError):
        RayReplayBuffer(3, Path(buffer._config.path).parent, timeout_s=WAIT_S)
    with pytest.raises(ValueError, match=r"num_shards: expected more than 2, .*_2\."):
        RayReplayBuffer(2, Path(buffer._config.path).parent, timeout_s=WAIT_S)


def test_shards_have_the_same_columns(buffer: RayReplayBuffer) -> None:
    add_on(buffer, 0, 0)
    other = trajectory(1) | {"rewards": torch.zeros(4, 3, dtype=torch.int64)}
    with pytest.raises(SchemaError, match="'rewards': expected float32"):
        run_on(buffer._config.nodes[1], RayReplayBuffer.add_trajectories, buffer, [other])
    # Two that add at the same time may not know of each other.
    call(buffer, 1, lambda shard: shard._open().add_trajectories([other]))
    call(buffer, 1, lambda shard: shard._begin_epoch(shard._open()))
    buffer.refresh()
    with pytest.raises(SchemaError, match=r"shard 1 .*'rewards': expected .* as in shard 0"):
        buffer.sample(3)
    buffer.clear()
    run_on(buffer._config.nodes[1], RayReplayBuffer.add_trajectories, buffer, [other])
    assert buffer.sample(3)["rewards"].dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards: expected at least 1, got 0"),
        ({"sample_window_size": -1}, "sample_window_size"),
        ({"placement": "there"}, "placement: expected 'spread', 'pack' or"),
        ({"placement": ["there"]}, "placement"),
        ({"on_lost": "cry"}, "on_lost: expected 'raise' or 'shrink', got 'cry'"),
        ({"prefetch": -1}, "prefetch"),
    ],
)
def test_arguments_that_are_none_are_refused(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RayReplayBuffer(**{"num_shards": 1, "path": tmp_path, **options})
    assert os.listdir(tmp_path) == []


def test_a_closed_handle_says_so(buffer: RayReplayBuffer) -> None:
    handle = buffer.with_stream(1)
    handle.close()
    handle.close()
    for call in (handle.flush, handle.refresh, lambda: handle.sample(1), lambda: len(handle)):
        with pytest.raises(ClosedError):
            call()
    assert len(buffer) == 0  # which goes on


# -- several drivers ---------------------------------------------------------------------------

DRIVER = """
import logging, sys
sys.path.insert(0, sys.argv[3])
import ray
from data import trajectory
from mmbuf.ray import RayReplayBuffer
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
buffer = RayReplayBuffer.attach("named")
first = int(sys.argv[2])
buffer.add_trajectories([trajectory(i) for i in range(first, first + 5)])
print(len(buffer.sample(32)["rewards"]))
buffer.close()
"""


def test_several_drivers_hold_a_named_buffer(cluster: Cluster, tmp_path: Path) -> None:
    buffer = RayReplayBuffer(2, tmp_path, name="named", timeout_s=WAIT_S, refresh_s=0.0)
    with pytest.raises(ValueError, match="named"):
        RayReplayBuffer(1, tmp_path / "other", name="named")
    with pytest.raises(ValueError, match="nobody"):
        RayReplayBuffer.attach("nobody")
    drivers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DRIVER, cluster.address, str(i), str(HERE)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in (0, 5)
    ]
    for driver in drivers:
        out, _ = driver.communicate(timeout=WAIT_S)
        assert (driver.returncode, out) == (0, "32\n")
    assert sampled(buffer, 1000) == set(range(10))
    again = RayReplayBuffer.attach("named")
    assert len(again) == 10
    again.close(shards=True)
    with pytest.raises(ShardError, match="gone"):
        buffer.flush()
    buffer.close()


def test_shards_that_another_driver_has_just_ended_are_gone_for_all(
    cluster: Cluster, tmp_path: Path
) -> None:
    with RayReplayBuffer(2, tmp_path, timeout_s=WAIT_S, refresh_s=0.0) as buffer:
        add_on(buffer, 0, 7)
        for shard in buffer._shards.all:  # as `close` does, before Ray has killed them
            ray.get(shard.actor.close.remote())
        for call in (buffer.flush, lambda: buffer.sample(1), lambda: len(buffer)):
            with pytest.raises(ShardError, match="gone") as caught:
                call()
            assert caught.value.is_lost


# -- checkpoints -------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_exactly(buffer: RayReplayBuffer, tmp_path: Path) -> None:
    for shard in range(3):
        add_on(buffer, shard, *range(10 * shard, 10 * shard + shard + 1))
    buffer.sample(30)
    buffer.save_checkpoint(tmp_path / "saved")
    expected = [row_ids(buffer.sample(50)) for _ in range(3)]
    ids = [shard.ids.tolist() for shard in buffer._shards.all]
    add_on(buffer, 1, 77)
    buffer.load_checkpoint(tmp_path / "saved")
    assert [row_ids(buffer.sample(50)) for _ in range(3)] == expected
    assert [shard.ids.tolist() for shard in buffer._shards.all] == ids
    assert sampled(buffer, 1000) == {0, 10, 11, 20, 21, 22}
    assert sorted(os.listdir(tmp_path / "saved")) == ["rank_0", "rank_1", "rank_2", "ray.json"]
    with TrajectoryReplayBuffer(sample_window_size=0) as one:  # each rank is one of its own
        one.load_checkpoint(tmp_path / "saved" / "rank_2")
        assert sampled(one) == {20, 21, 22}


def test_a_checkpoint_loads_on_any_number_of_shards(
    buffer: RayReplayBuffer, tmp_path: Path
) -> None:
    for shard in range(3):
        add_on(buffer, shard, *range(10 * shard, 10 * shard + 4))
    numbers = {10 * shard + i for shard in range(3) for i in range(4)}
    buffer.save_checkpoint(tmp_path / "three")
    with RayReplayBuffer(2, tmp_path / "of two", timeout_s=WAIT_S, refresh_s=0.0) as two:
        two.load_checkpoint(tmp_path / "three")
        assert len(two) == 12
        assert sampled(two, 2000) == numbers
        assert sorted(known_ids(two)) == list(range(12))
        add_on(two, 0, 50)
        add_on(two, 1, 51)
        two.refresh()
        assert len(set(known_ids(two))) == 14
        two.save_checkpoint(tmp_path / "three")  # over one of more shards
    assert sorted(os.listdir(tmp_path)) == ["of two", "three"]
    assert sorted(os.listdir(tmp_path / "three")) == ["rank_0", "rank_1", "ray.json"]
    buffer.load_checkpoint(tmp_path / "three")
    assert len(buffer) == 14
    assert sampled(buffer, 2000) == numbers | {50, 51}


def test_a_damaged_checkpoint_changes_nothing(buffer: RayReplayBuffer, tmp_path: Path) -> None:
    for shard in range(3):
        add_on(buffer, shard, shard)
    buffer.save_checkpoint(tmp_path)
    add_on(buffer, 0, 7)
    (file,) = (tmp_path / "rank_1").glob("*.arrow")
    file.unlink()
    with pytest.raises(CorruptError, match="rank_1"):
        buffer.load_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "rank_2")
    with pytest.raises(CorruptError, match="expected rank_0 to rank_2, got 2 of these"):
        buffer.load_checkpoint(tmp_path)
    (tmp_path / "ray.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"ray\.json"):
        buffer.load_checkpoint(tmp_path)
    assert sampled(buffer) == {0, 1, 2, 7}


def test_checkpoints_of_one_buffer_and_of_rlinf_load(
    buffer: RayReplayBuffer, tmp_path: Path
) -> None:
    with TrajectoryReplayBuffer(sample_window_size=0) as one:
        one.add_trajectories([trajectory(i) for i in range(7)])
        one.save_checkpoint(tmp_path / "one")
    buffer.load_checkpoint(tmp_path / "one")
    assert sampled(buffer, 1000) == set(range(7))
    assert sorted(len(shard.ids) for shard in buffer._shards.all) == [2, 2, 3]
    ranks = HERE / "fixtures" / "rlinf_ranks"
    num_rows = [ReplayReader(ranks / f"rank_{i}").total_samples for i in range(2)]
    buffer.load_checkpoint(ranks)
    assert buffer.total_samples == sum(num_rows)


def test_a_buffer_that_cannot_write_stays_open(cluster: Cluster, tmp_path: Path) -> None:
    def break_flush(shard: Any) -> None:
        def flush(sync: bool = False) -> None:
            raise WriteError("no space")

        shard._open().flush = flush

    buffer = RayReplayBuffer(2, tmp_path, timeout_s=WAIT_S, refresh_s=0.0)
    add_on(buffer, 0, 0)
    add_on(buffer, 1, 1)
    call(buffer, 0, break_flush)
    for ending in (buffer.flush, buffer.close):
        with pytest.raises(WriteError, match="no space"):
            ending()
    add_on(buffer, 0, 2)
    add_on(buffer, 1, 3)
    assert sampled(buffer) == {0, 1, 2, 3}
    call(buffer, 0, lambda shard: shard._open().__dict__.pop("flush"))
    buffer.close()
    with ReplayReader(tmp_path / "rank_*") as reader:
        assert sampled(reader) == {0, 1, 2, 3}


# -- what fails --------------------------------------------------------------------------------


def test_a_killed_actor_is_restarted_and_nothing_flushed_is_lost(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """While one thread adds and another samples, two actors are killed one after the other."""
    with RayReplayBuffer(3, tmp_path, timeout_s=WAIT_S, refresh_s=0.0) as buffer:
        for shard in range(3):
            add_on(buffer, shard, shard)
        buffer.flush()
        added = [0, 1, 2]
        stop = threading.Event()
        ends: list[BaseException] = []

        def add_more() -> None:
            number = 3
            while not stop.is_set():
                add(buffer, number)
                added.append(number)
                number += 1
                time.sleep(0.02)

        def sample_more() -> None:
            while not stop.is_set():
                sampled(buffer, 50)

        def run(function: Callable[[], None]) -> None:
            try:
                function()
            except BaseException as error:
                ends.append(error)

        threads = [threading.Thread(target=run, args=(f,)) for f in (add_more, sample_more)]
        for thread in threads:
            thread.start()
        own = buffer._config.nodes.index(buffer._node)
        for shard in ((own + 1) % 3, own):
            os.kill(pid_of(buffer, shard), signal.SIGKILL)
            deadline = time.monotonic() + WAIT_S
            while not any("is back" in message for message in caplog.messages):
                assert time.monotonic() < deadline
                assert ends == []
                time.sleep(0.05)
            messages = [m for m in caplog.messages if m.startswith("shard")]
            assert len(messages) == 2, messages
            assert messages[0].startswith(f"shard {shard} on node {buffer._config.nodes[shard]}")
            assert "is away; going on with the others" in messages[0]
            caplog.clear()
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert ends == []
        buffer.refresh()
        stats = buffer.get_stats()
        assert stats["num_shards_away"] == 0
        assert stats["num_short_batches"] > 0
        buffer.flush()
        found = sampled(buffer, 100 * len(added))
        assert {0, 1, 2} <= found <= {*added}
        # What was lost was in the memory of the killed only: added just before.
        assert len({*added} - found) < 20
    with ReplayReader(tmp_path / "rank_*") as reader:
        assert sampled(reader, 100 * len(added)) == found


def test_a_shard_that_does_not_answer_is_a_timeout(buffer: RayReplayBuffer) -> None:
    add_on(buffer, 1, 0, 1)
    pid = pid_of(buffer, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"shard 1 on node .* Raise timeout_s"):
            buffer.sample(3, timeout_s=1.0)
        with pytest.raises(TimeoutError):
            buffer.flush(timeout_s=1.0)
        with buffer.with_stream(1, prefetch=2) as ahead:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    ahead.sample(3, timeout_s=1.0)
        assert time.monotonic() - start < 15
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sampled(buffer) == {0, 1}


def test_whoever_only_adds_or_counts_notices_that_a_shard_is_back(
    buffer: RayReplayBuffer,
) -> None:
    own = buffer._shards.all[buffer._config.nodes.index(buffer._node)]
    own.is_away = True
    add(buffer, 0)  # elsewhere, or by then it is back
    deadline = time.monotonic() + WAIT_S
    while buffer.get_stats()["num_shards_away"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    num_known = len(own.ids)
    add(buffer, 1)
    assert len(own.ids) == num_known + 1
    assert sampled(buffer) == {0, 1}


@pytest.mark.parametrize("on_lost", ["raise", "shrink"])
def test_a_node_that_is_gone_is_an_error_or_a_smaller_window(
    tmp_path: Path, cluster: Cluster, on_lost: str
) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    nodes = [ray.get_runtime_context().get_node_id(), node.node_id]
    buffer = RayReplayBuffer(
        2, tmp_path, placement=nodes, on_lost=on_lost, timeout_s=WAIT_S, refresh_s=0.0
    )
    add_on(buffer, 0, 0)
    add_on(buffer, 1, 1)
    buffer.flush()
    assert sampled(buffer) == {0, 1}
    cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + WAIT_S
    while not buffer._shards.all[1].is_lost:
        assert time.monotonic() < deadline
        add(buffer, 2)  # goes elsewhere
        buffer.refresh()
        time.sleep(0.2)
    with pytest.raises(ShardError, match=r"flush: .*shard 1 on node .*the node is gone") as error:
        buffer.flush()
    assert (error.value.shards, error.value.is_lost) == ([1], True)
    if on_lost == "raise":
        with pytest.raises(ShardError, match="on_lost='shrink' goes on without"):
            buffer.sample(3)
    else:
        assert sampled(buffer) == {0, 2}
        assert buffer.get_stats()["num_shards_away"] == 1
    buffer.close()
    with RayReplayBuffer(2, tmp_path, timeout_s=WAIT_S) as again:  # its disk is still there
        assert sampled(again) >= {0, 1}


# -- the README --------------------------------------------------------------------------------


def test_the_code_of_the_readme_collects_and_trains(cluster: Cluster, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "mmbuf.ray" in block]
    script = tmp_path / "train.py"
    script.write_text(block)
    ran = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(HERE.parent)},
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^20$.*^8000$", ran.stdout, re.DOTALL | re.MULTILINE), ran.stdout


# -- analysis ----------------------------------------------------------------------------------


def test_a_store_is_a_data_set_of_ray(cluster: Cluster, tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([trajectory(i) for i in range(10)])
    tables = Tables(tmp_path / "store")
    names = ["trajectory_id", "t", "rewards"]
    steps = read_store(tmp_path / "store", names, trajectories_per_block=4)
    assert steps.schema().names == names
    rows = sorted(steps.take_all(), key=lambda row: (row["trajectory_id"], row["t"]))
    assert rows == tables.steps.to_arrow(names).to_pylist()
    assert steps.materialize().num_blocks() == 3
    episodes = read_store(tmp_path / "store", table="episodes")
    assert episodes.sum("length") == 120
    with pytest.raises(SchemaError, match="column 'none'"):
        read_store(tmp_path / "store", ["none"])
    with pytest.raises(ValueError, match="table: expected 'steps' or 'episodes', got 'rows'"):
        read_store(tmp_path / "store", table="rows")
