"""SumTree and Prioritized against naive computations."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import opened

from mmbuf import EmptyBufferError, ReplayReader, TrajectoryReplayBuffer
from mmbuf.sampling import Prioritized, WithoutReplacement
from mmbuf.sampling.tree import FANOUT, SumTree
from mmbuf.schema import Array

pytestmark = pytest.mark.usefixtures("without_fsync")

SIZES = [1, 31, 32, 33, 1000, 40_000, 200_000]


def tree_of(leaves: Array) -> SumTree:
    tree = SumTree(len(leaves))
    tree.fill(0, leaves, len(leaves))
    return tree


def some_leaves(size: int, seed: int = 0) -> Array:
    """Whole numbers below 10, whose sums are exact; a third are 0."""
    rng = np.random.default_rng(seed)
    leaves = rng.integers(1, 10, size) * (rng.random(size) < 2 / 3)
    leaves[size // 2] = 5
    return leaves.astype(np.float64)


def chi_square(counts: Array, shares: Array) -> float:
    expected = shares / shares.sum() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# -- the tree ------------------------------------------------------------------------------------


def test_a_new_tree_holds_nothing() -> None:
    tree = SumTree(100)
    assert tree.total == 0
    assert tree.leaves.tolist() == [0.0] * 100


@pytest.mark.parametrize("size", SIZES)
def test_total_is_the_sum_of_all_leaves(size: int) -> None:
    leaves = some_leaves(size)
    assert tree_of(leaves).total == leaves.sum()


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_in_the_middle_of_a_leaf_finds_it(size: int) -> None:
    leaves = some_leaves(size)
    held = leaves.nonzero()[0]
    middles = leaves.cumsum()[held] - leaves[held] / 2
    found = tree_of(leaves).find(middles)
    assert found.dtype == np.int64
    assert np.array_equal(found, held)


@pytest.mark.parametrize("size", SIZES)
def test_find_is_a_search_of_the_running_sums(size: int) -> None:
    rng = np.random.default_rng(1)
    leaves = rng.random(size) * (rng.random(size) < 2 / 3)
    leaves[size // 2] = 0.5
    running = leaves.cumsum()
    sums = rng.random(20_000) * running[-1]
    expected = running.searchsorted(sums, "right")
    # But where rounding decides.
    nearest = np.minimum(
        np.abs(sums - running[expected]), np.abs(sums - (running[expected] - leaves[expected]))
    )
    is_clear = nearest > 1e-9 * running[-1]
    assert is_clear.mean() > 0.9
    assert np.array_equal(tree_of(leaves).find(sums)[is_clear], expected[is_clear])


def test_leaves_are_found_in_proportion() -> None:
    leaves = some_leaves(40)
    draws = np.random.default_rng(2).random(200_000)
    tree = tree_of(leaves)
    counts = np.bincount(tree.find(draws * tree.total), minlength=40)
    held = leaves > 0
    assert counts[~held].sum() == 0
    assert held.sum() == 27
    assert chi_square(counts[held], leaves[held]) < 61.66  # of 26, 1 - 1e-4


def hostile_leaves() -> dict[str, Array]:
    rng = np.random.default_rng(3)

    def powers(low: float, high: float, size: int) -> Array:
        return np.asarray(10.0 ** rng.uniform(low, high, size) * (rng.random(size) < 0.5))

    def but_one(size: int, at: int, value: float) -> Array:
        leaves = np.zeros(size)
        leaves[at] = value
        return leaves

    return {
        "huge and tiny": powers(-300, 300, 5000),
        "huge": powers(299, 300, 3000),
        "tiny": powers(-300, -299, 3000),
        "subnormal": but_one(2000, 77, 5e-324) + but_one(2000, 1999, 1e-310),
        "rounded": rng.random(5000) * (rng.random(5000) < 0.5) + 0.0,
        "only the first": but_one(40_000, 0, 0.1),
        "only the last": but_one(40_000, 39_999, 0.1),
        "only one": but_one(200_000, 123_456, 1e-300),
        "a tiny one after a huge one": but_one(100, 3, 1e300) + but_one(100, 4, 1e-300),
        "a tiny one before a huge one": but_one(100, 3, 1e-300) + but_one(100, 4, 1e300),
        "blocks": np.repeat(np.arange(2000) % 2 * 0.3, 32),
        "blocks of blocks": np.repeat(np.arange(40) % 2 * 0.7, 1024),
    }


@pytest.mark.parametrize("name", hostile_leaves())
def test_a_leaf_of_0_is_never_found(name: str) -> None:
    leaves = hostile_leaves()[name]
    tree, rng = tree_of(leaves), np.random.default_rng(4)
    ends = leaves.cumsum()
    ends = ends[np.linspace(0, len(ends) - 1, 20_000).astype(int)]
    sums = np.concatenate(
        [ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), rng.random(20_000) * tree.total]
    )
    found = tree.find(np.clip(sums, 0, np.nextafter(tree.total, 0)))
    assert (leaves[found] > 0).all()


@pytest.mark.parametrize("name", hostile_leaves())
def test_the_largest_sums_find_a_leaf_that_holds_something(name: str) -> None:
    """A draw below 1 times the total may be rounded to the total itself."""
    leaves = hostile_leaves()[name]
    tree = tree_of(leaves)
    sums = np.array([0.0, np.nextafter(tree.total, 0), tree.total])
    assert (leaves[tree.find(sums)] > 0).all()


@pytest.mark.parametrize("size", [33, 1000, 40_000])
def test_nodes_do_not_drift_in_100_000_updates(size: int) -> None:
    rng, tree = np.random.default_rng(5), SumTree(size)
    for _ in range(400):
        tree.set(rng.integers(0, size, 250), 10.0 ** rng.uniform(-9, 9, 250))
    whole = tree_of(tree.leaves)
    for level, expected in zip(tree._levels, whole._levels, strict=True):
        assert np.array_equal(level, expected)
    for below, level in itertools.pairwise(tree._levels):
        sums = below.reshape(-1, FANOUT).sum(1)
        assert np.array_equal(level[: len(sums)], sums)
        assert not level[len(sums) :].any()


def test_of_equal_indices_the_last_holds() -> None:
    tree = SumTree(100)
    tree.set(np.array([7, 50, 7, 7, 50]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert tree.leaves.nonzero()[0].tolist() == [7, 50]
    assert tree.leaves[[7, 50]].tolist() == [4, 5]
    assert tree.total == 9


@pytest.mark.parametrize("size", [1, 33, 5000])
def test_fill_changes_the_leaves_of_its_range_only(size: int) -> None:
    rng, tree, expected = np.random.default_rng(6), SumTree(size), np.zeros(size)
    for i in range(300):
        start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
        values = float(rng.integers(9)) if i % 2 else rng.integers(0, 9, stop - start) * 1.0
        tree.fill(start, values, stop)
        expected[start:stop] = values
        assert np.array_equal(tree.leaves, expected)
        assert tree.total == expected.sum()


# -- draws ---------------------------------------------------------------------------------------


def numbered(i: int, num_rows: int = 10) -> dict[str, Any]:
    """Trajectory ``i``, whose rows are ``1000 * i``, ``1000 * i + 1`` ..."""
    return {"row": torch.arange(1000 * i, 1000 * i + num_rows).reshape(num_rows, 1)}


def in_memory(count: int, num_rows: int = 10, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**{"seed": 0, "sample_window_size": 0, **options})
    buffer.add_trajectories([numbered(i, num_rows) for i in range(count)])
    return buffer


def handles_of(buffer: TrajectoryReplayBuffer | ReplayReader) -> dict[int, list[int]]:
    """The handle of each row of the window."""
    batch = buffer.sample(buffer.total_samples, sampler=WithoutReplacement(), with_info=True)
    return dict(zip(batch["row"].tolist(), batch["info"]["handle"].tolist(), strict=True))


def set_all(
    buffer: TrajectoryReplayBuffer | ReplayReader,
    sampler: Prioritized,
    priority_of: Callable[[int], float],
) -> None:
    """Give each row of the window the priority of its number."""
    buffer.sample(1, sampler=sampler)  # it knows the window from now on
    handles = handles_of(buffer)
    sampler.update_priorities(
        np.array(list(handles.values())), [priority_of(row) for row in handles]
    )


def values_of(sampler: Prioritized) -> list[float]:
    """``p^alpha`` of each row that the sampler knows, oldest first."""
    values: list[float] = sampler.state_dict()["values"].tolist()
    return values


def saved(state: Any) -> Any:
    """``state`` after a round through a file that cannot run code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_rows_are_drawn_in_proportion_to_their_priorities_to_the_power_of_alpha() -> None:
    buffer, sampler = in_memory(2), Prioritized(alpha=0.6, eps=0.0)
    set_all(buffer, sampler, lambda row: float(row % 1000))
    rows = buffer.sample(200_000, sampler=sampler)["row"]
    counts = np.bincount((rows // 1000 * 10 + rows % 1000).numpy(), minlength=20)
    assert counts[[0, 10]].tolist() == [0, 0]
    held = np.arange(20) % 10 > 0
    shares = (np.arange(20) % 10.0)[held] ** 0.6
    assert chi_square(counts[held], shares) < 47.57  # of 17, 1 - 1e-4


def test_alpha_of_0_is_uniform() -> None:
    buffer, sampler = in_memory(1, 20), Prioritized(alpha=0.0)
    set_all(buffer, sampler, lambda row: 100.0 * row)
    batch = buffer.sample(100_000, sampler=sampler)
    counts = np.bincount(batch["row"].numpy(), minlength=20)
    assert chi_square(counts, np.ones(20)) < 50.80  # of 19, 1 - 1e-4
    assert torch.equal(batch["weights"], torch.ones(100_000))


def test_equal_seeds_give_equal_batches() -> None:
    found = []
    for _ in range(2):
        buffer, sampler = in_memory(5), Prioritized()
        for step in range(5):
            batch = buffer.sample(16, sampler=sampler)
            sampler.update_priorities(batch["info"]["handle"], batch["row"] % 7 + step)
            found.append(batch["row"].tolist())
    assert found[:5] == found[5:]


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.6, 0.4), (0.7, 0.0), (0.0, 1.0)])
def test_weights_are_those_of_a_naive_computation(alpha: float, beta: float) -> None:
    buffer, sampler = in_memory(3), Prioritized(alpha, beta, eps=0.5)
    set_all(buffer, sampler, lambda row: float(row % 11))
    batch = buffer.sample(64, sampler=sampler)
    window = [1000 * i + j for i in range(3) for j in range(10)]
    total = sum((row % 11 + 0.5) ** alpha for row in window)
    shares = [(row % 11 + 0.5) ** alpha / total for row in batch["row"].tolist()]
    weights = [(len(window) * share) ** -beta for share in shares]
    expected = torch.tensor([weight / max(weights) for weight in weights], dtype=torch.float32)
    assert batch["weights"].dtype == torch.float32
    assert torch.allclose(batch["weights"], expected, rtol=1e-6, atol=0)


def test_beta_may_be_changed_at_any_time() -> None:
    buffer, sampler = in_memory(1), Prioritized(beta=0.0)
    set_all(buffer, sampler, float)
    assert set(buffer.sample(100, sampler=sampler)["weights"].tolist()) == {1.0}
    sampler.beta = 1.0
    assert len(set(buffer.sample(100, sampler=sampler)["weights"].tolist())) > 5


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")], ids=["below", "nan", "inf"])
def test_a_beta_that_would_make_weights_nan_is_refused_later_too(value: float) -> None:
    buffer, sampler = in_memory(1), Prioritized(beta=0.5)
    set_all(buffer, sampler, float)
    with pytest.raises(ValueError, match="beta: expected at least 0"):
        sampler.beta = value
    assert sampler.beta == 0.5
    sampler.beta = torch.tensor(1.0)  # type: ignore[assignment]  # as a schedule has it
    assert buffer.sample(100, sampler=sampler)["weights"].isfinite().all()


def test_batches_have_weights_and_handles_without_being_asked() -> None:
    batch = in_memory(1).sample(4, sampler=Prioritized())
    assert list(batch) == ["row", "weights", "info"]
    assert batch["weights"].shape == (4,)
    assert batch["info"]["handle"].shape == (4, 2)


def test_all_rows_are_equal_before_the_first_update() -> None:
    buffer, sampler = in_memory(2), Prioritized()
    buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [1.0] * 20


def test_new_rows_have_the_highest_priority_so_far() -> None:
    buffer, sampler = in_memory(1, 3, sample_window_size=2), Prioritized(1.0, eps=0.0)
    set_all(buffer, sampler, lambda row: [2.0, 50.0, 3.0][row])
    buffer.add_trajectories([numbered(1, 2)])
    buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [2, 50, 3, 50, 50]


def test_highest_priority_is_remembered_when_its_row_has_left() -> None:
    buffer, sampler = in_memory(1, 3, sample_window_size=2), Prioritized(1.0, eps=0.0)
    set_all(buffer, sampler, lambda row: 50.0)
    set_all(buffer, sampler, lambda row: 2.0)
    for i in range(1, 4):
        buffer.add_trajectories([numbered(i, 2)])
        buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [50] * 4


def test_all_priorities_of_0_are_an_empty_buffer() -> None:
    buffer, sampler = in_memory(2), Prioritized(eps=0.0)
    set_all(buffer, sampler, lambda row: 0.0)
    with pytest.raises(EmptyBufferError, match="expected a row with a priority above 0, got none"):
        buffer.sample(1, sampler=sampler)
    buffer.add_trajectories([numbered(2)])
    assert set(buffer.sample(100, sampler=sampler)["row"].tolist()) <= set(range(2000, 2010))


@pytest.mark.parametrize("option", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_an_option_below_0_or_not_finite_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected at least 0, got {value}"):
        Prioritized(**{option: value})


# -- updates -------------------------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A tensor that, as on a device, only `cpu` brings to where NumPy can see it."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    numpy = __array__  # type: ignore[assignment]

    def cpu(self, memory_format: Any = None) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


GIVEN = [0.5, 2.0, 0.0, 1.5]

FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: GIVEN,
    "tuple of numbers of NumPy": lambda: tuple(np.float32(value) for value in GIVEN),
    "float64 array": lambda: np.array(GIVEN),
    "float16 array": lambda: np.array(GIVEN, np.float16),
    "read-only array": lambda: np.frombuffer(np.array(GIVEN).tobytes()),
    "float32 tensor": lambda: torch.tensor(GIVEN),
    "bfloat16 tensor": lambda: torch.tensor(GIVEN, dtype=torch.bfloat16),
    "tensor with grad": lambda: torch.tensor(GIVEN, requires_grad=True),
    "tensor of a graph": lambda: torch.tensor(GIVEN, requires_grad=True) * 1,
    "column of a tensor": lambda: torch.tensor(GIVEN)[:, None],
    "tensor on a device": lambda: torch.tensor(GIVEN).as_subclass(OnDevice),
}


@pytest.mark.parametrize("form", FORMS)
def test_priorities_may_be_of_any_form(form: str) -> None:
    buffer, sampler = in_memory(1, 4), Prioritized(1.0, eps=1.0)
    buffer.sample(1, sampler=sampler)
    handles = np.array([handles_of(buffer)[row] for row in range(4)])
    sampler.update_priorities(handles, FORMS[form]())
    assert values_of(sampler) == [1.5, 3.0, 1.0, 2.5]


def test_handles_may_be_on_a_device() -> None:
    buffer, sampler = in_memory(1, 4), Prioritized(1.0, eps=0.0)
    batch = buffer.sample(1, sampler=sampler)
    handle = batch["info"]["handle"]
    sampler.update_priorities(handle.as_subclass(OnDevice), [9.0])
    assert values_of(sampler)[int(batch["row"])] == 9.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batch_on_a_gpu_is_updated_by_what_is_there() -> None:
    buffer, sampler = in_memory(1, 4), Prioritized(1.0, eps=0.0)
    batch = buffer.sample(1, sampler=sampler, device="cuda")
    sampler.update_priorities(batch["info"]["handle"], 9.0 * batch["weights"])
    assert values_of(sampler)[int(batch["row"])] == 9.0


def test_a_list_of_priorities_keeps_its_precision() -> None:
    buffer, sampler = in_memory(1, 2), Prioritized(1.0, eps=0.0)
    buffer.sample(1, sampler=sampler)
    handles = np.array([handles_of(buffer)[row] for row in range(2)])
    sampler.update_priorities(handles, [0.1, 1e-60])
    assert values_of(sampler) == [0.1, 1e-60]


def test_integers_are_priorities_too() -> None:
    buffer, sampler = in_memory(1, 2), Prioritized(1.0, eps=0.0)
    buffer.sample(1, sampler=sampler)
    handles = torch.tensor([handles_of(buffer)[row] for row in range(2)])
    sampler.update_priorities(handles, torch.tensor([3, 4]))
    assert values_of(sampler) == [3, 4]


def test_eps_is_added_before_the_power_is_taken() -> None:
    buffer, sampler = in_memory(1, 2), Prioritized(0.5, eps=1.0)
    set_all(buffer, sampler, lambda row: [8.0, 24.0][row])
    assert values_of(sampler) == pytest.approx([3, 5], rel=1e-14, abs=0)


def test_of_updates_of_one_row_the_last_holds() -> None:
    buffer, sampler = in_memory(1, 2), Prioritized(1.0, eps=0.0)
    buffer.sample(1, sampler=sampler)
    handle = handles_of(buffer)[1]
    sampler.update_priorities(np.array([handle] * 3), [5.0, 7.0, 6.0])
    assert values_of(sampler) == [1, 6]


def test_an_update_of_nothing_changes_nothing() -> None:
    buffer, sampler = in_memory(1, 2), Prioritized()
    buffer.sample(1, sampler=sampler)
    sampler.update_priorities(np.empty((0, 2), np.int64), [])
    assert values_of(sampler) == [1, 1]


WRONG: dict[str, tuple[Any, str]] = {
    "NaN": ([1.0, float("nan"), 99.0], "priorities: expected finite numbers of at least 0"),
    "inf": ([1.0, float("inf"), 99.0], "priorities: expected finite numbers of at least 0"),
    "negative": ([1.0, -1e-9, 99.0], "priorities: expected finite numbers of at least 0"),
    "too large a power": (
        [1.0, 1e200, 99.0],
        r"priorities: expected \(p \+ eps\)\^alpha of at most 1e\+290",
    ),
    "infinite with eps": (
        [1.0, 1.7e308, 99.0],
        r"priorities: expected \(p \+ eps\)\^alpha of at most 1e\+290",
    ),
    "too few": ([1.0, 99.0], r"expected int64 of shape \(2, 2\), one for each priority"),
    "too many": ([1.0, 2.0, 3.0, 99.0], r"expected int64 of shape \(4, 2\)"),
    "one number": (99.0, r"expected int64 of shape \(1, 2\)"),
    "none": (None, r"expected int64 of shape \(1, 2\)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_priorities_are_refused_and_nothing_is_changed(what: str) -> None:
    priorities, message = WRONG[what]
    buffer, sampler = in_memory(1, 5), Prioritized(2.0, eps=0.0)
    set_all(buffer, sampler, float)
    before = saved(sampler.state_dict())
    handles = buffer.sample(3, sampler=sampler)["info"]["handle"]
    with pytest.raises(ValueError, match=message):
        sampler.update_priorities(handles, priorities)
    after = sampler.state_dict()
    assert torch.equal(after["values"], before["values"])
    assert after["highest"] == before["highest"]
    assert buffer.get_stats()["late_updates"] == 0


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 3), (6, 2), (1, 3, 2)])
def test_handles_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    buffer, sampler = in_memory(1, 5), Prioritized()
    buffer.sample(3, sampler=sampler)
    with pytest.raises(ValueError, match=r"handles: expected int64 of shape \(3, 2\)"):
        sampler.update_priorities(np.zeros(shape, np.int64), [9.0, 9.0, 9.0])
    assert values_of(sampler) == [1] * 5


# -- late updates --------------------------------------------------------------------------------


def test_an_update_that_comes_when_its_row_has_left_is_counted() -> None:
    buffer, sampler = in_memory(1, sample_window_size=1), Prioritized()
    handles = buffer.sample(8, sampler=sampler)["info"]["handle"]
    buffer.add_trajectories([numbered(1)])
    sampler.update_priorities(handles, np.full(8, 0.5))
    buffer.sample(8, sampler=sampler)
    assert buffer.get_stats()["late_updates"] == 8


def test_an_update_of_a_row_that_is_known_to_have_left_is_counted_at_once() -> None:
    buffer, sampler = in_memory(1, sample_window_size=1), Prioritized()
    handles = buffer.sample(8, sampler=sampler)["info"]["handle"]
    buffer.add_trajectories([numbered(1)])
    buffer.sample(8, sampler=sampler)
    sampler.update_priorities(handles, np.full(8, 0.5))
    assert buffer.get_stats()["late_updates"] == 8
    buffer.sample(8, sampler=sampler)
    assert buffer.get_stats()["late_updates"] == 8


def test_an_update_in_time_is_not_counted_when_its_row_leaves_later() -> None:
    buffer, sampler = in_memory(1, sample_window_size=1), Prioritized()
    handles = buffer.sample(8, sampler=sampler)["info"]["handle"]
    sampler.update_priorities(handles, np.full(8, 0.5))
    buffer.sample(8, sampler=sampler)
    buffer.add_trajectories([numbered(1)])
    buffer.sample(8, sampler=sampler)
    assert buffer.get_stats()["late_updates"] == 0


def test_handles_that_never_were_are_late() -> None:
    buffer, sampler = in_memory(1), Prioritized()
    handle = buffer.sample(1, sampler=sampler)["info"]["handle"].numpy()
    for wrong in ([[1, 0]], [[handle[0, 0], 10]], [[handle[0, 0], -1]], [[-1, 3]]):
        sampler.update_priorities(np.array(wrong), [9.0])
    assert buffer.get_stats()["late_updates"] == 4
    assert values_of(sampler) == [1] * 10


def test_a_late_update_changes_no_other_row() -> None:
    for knows in (False, True):
        buffer, sampler = in_memory(3, sample_window_size=3), Prioritized(1.0, eps=0.0)
        set_all(buffer, sampler, lambda row: 1.0 + row % 10)
        old = [handles_of(buffer)[row] for row in range(10)]
        buffer.add_trajectories([numbered(3)])
        if knows:
            buffer.sample(1, sampler=sampler)
        sampler.update_priorities(np.array(old), np.full(10, 0.25))
        buffer.sample(1, sampler=sampler)
        assert values_of(sampler) == [*map(float, range(1, 11))] * 2 + [10.0] * 10


def test_a_late_update_changes_no_trajectory_of_the_same_id_that_was_loaded(
    tmp_path: Path,
) -> None:
    in_memory(3).save_checkpoint(tmp_path / "checkpoint")
    buffer, sampler = in_memory(3), Prioritized(1.0, eps=0.0)
    handles = np.array(list(handles_of(buffer).values()))
    buffer.sample(1, sampler=sampler)
    buffer.load_checkpoint(tmp_path / "checkpoint")
    assert buffer.window_ids == [0, 1, 2]
    sampler.update_priorities(handles, np.full(30, 0.5))
    buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [1.0] * 30
    assert buffer.get_stats()["late_updates"] == 30
    buffer.close()


def test_a_late_update_changes_no_row_that_came_after_clear() -> None:
    buffer, sampler = in_memory(3), Prioritized(1.0, eps=0.0)
    handles = np.array(list(handles_of(buffer).values()))
    buffer.sample(1, sampler=sampler)
    buffer.clear()
    buffer.add_trajectories([numbered(i) for i in range(3)])
    buffer.sample(1, sampler=sampler)
    sampler.update_priorities(handles, np.full(30, 0.5))
    assert values_of(sampler) == [1.0] * 30
    assert buffer.get_stats()["late_updates"] == 30


def test_rows_of_another_schema_take_the_place_of_all() -> None:
    buffer, sampler = in_memory(3), Prioritized(1.0, eps=0.0)
    set_all(buffer, sampler, lambda row: 7.0)
    buffer.clear()
    buffer.add_trajectories([{"other": torch.zeros(4, 2)}])
    assert "other" in buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [7.0] * 8


# -- while the window changes --------------------------------------------------------------------


class Model:
    """A dict of the priorities that a `Prioritized` of eps 0 is to have."""

    def __init__(self, sampler: Prioritized) -> None:
        self.sampler = sampler
        self.values: dict[int, float] = {}  # p^alpha of the rows of the last draw's window
        self.highest = 1.0
        self.updated: list[int] = []  # since then
        self.num_late = 0

    def check(self, buffer: TrajectoryReplayBuffer | ReplayReader, window: list[int]) -> Any:
        """Draw a batch from ``window``, and compare its weights and all priorities."""
        batch = buffer.sample(32, sampler=self.sampler)
        self.values = {row: self.values.get(row, self.highest) for row in window}
        self.num_late += sum(row not in self.values for row in self.updated)
        self.updated.clear()
        total = sum(self.values.values())
        rows = batch["row"].tolist()
        shares = np.array([self.values[row] for row in rows]) / total
        weights = (len(window) * shares) ** -self.sampler.beta
        assert np.allclose(batch["weights"].numpy(), weights / weights.max(), rtol=1e-5, atol=0)
        # Whose last bits NumPy's powers of arrays and of single numbers do not share everywhere.
        expected = [self.values[row] for row in window]
        np.testing.assert_allclose(values_of(self.sampler), expected, rtol=1e-14, atol=0)
        return batch

    def update(self, rows: list[int], handles: Any, priorities: list[float]) -> None:
        self.sampler.update_priorities(handles, priorities)
        for row, priority in zip(rows, priorities, strict=True):
            if row in self.values:
                self.values[row] = float(np.float64(priority) ** self.sampler.alpha)
                self.highest = max(self.highest, self.values[row])
                self.updated.append(row)
            else:
                self.num_late += 1


@pytest.mark.parametrize(("seed", "window_size"), [(0, 1), (1, 3), (2, 20), (3, 0), (4, 100)])
def test_priorities_follow_the_window(seed: int, window_size: int) -> None:
    rng = np.random.default_rng(seed)
    buffer = TrajectoryReplayBuffer(seed=seed, sample_window_size=window_size)
    model = Model(Prioritized(0.7, 0.5, eps=0.0))
    lengths: dict[int, int] = {}
    batches: list[Any] = []
    for _ in range(500):
        action = rng.choice(
            ["add", "sample", "update", "update late", "clear"], p=[0.3, 0.4, 0.2, 0.09, 0.01]
        )
        if action == "add":
            for _ in range(int(rng.integers(1, 6))):
                i, num_rows = buffer.trajectory_counter, int(rng.integers(1, 30))
                lengths[i] = num_rows
                buffer.add_trajectories([numbered(i, num_rows)])
        elif action == "clear":
            buffer.clear()
        elif action == "sample" and len(buffer):
            window = [1000 * i + j for i in buffer.window_ids for j in range(lengths[i])]
            batches.append(model.check(buffer, window))
        elif batches:
            which = -1 if action == "update" else int(rng.integers(len(batches)))
            batch = batches[which]
            rows = batch["row"].tolist()
            priorities = {row: float(rng.random()) * 3 for row in rows}
            model.update(rows, batch["info"]["handle"], [priorities[row] for row in rows])
    assert model.num_late > 50
    assert model.highest > 1
    buffer.add_trajectories([numbered(buffer.trajectory_counter, 5)])
    buffer.sample(1, sampler=model.sampler)
    expected = model.num_late + sum(row // 1000 not in buffer.window_ids for row in model.updated)
    assert buffer.get_stats()["late_updates"] == expected


def bulky(i: int) -> dict[str, Any]:
    """`numbered` of 8 rows with 64 KiB beside, so that a store can have too much of it."""
    return {**numbered(i, 8), "ballast": torch.zeros(8, 1, 8 << 10, dtype=torch.uint8)}


@pytest.mark.parametrize("window_size", [0, 12])
def test_priorities_stay_when_trajectories_in_the_middle_are_removed(
    tmp_path: Path, window_size: int
) -> None:
    model, numbers, removed = Model(Prioritized(0.7, 0.5, eps=0.0)), itertools.count(), 0
    rng = np.random.default_rng(0)
    named: dict[tuple[str, int], int] = {}
    with (
        opened(tmp_path / "limited", sample_window_size=2, max_disk_bytes=400 << 10) as limited,
        opened(tmp_path / "whole") as whole,
    ):
        stores = {limited: str(tmp_path / "limited"), whole: str(tmp_path / "whole")}

        def add(buffer: TrajectoryReplayBuffer) -> None:
            number = next(numbers)
            named[stores[buffer], buffer.trajectory_counter] = number
            buffer.add_trajectories([bulky(number)])
            buffer.flush()

        for buffer in (whole, limited, whole, limited):
            add(buffer)
        with ReplayReader(
            [tmp_path / "limited", tmp_path / "whole"], sample_window_size=window_size
        ) as reader:
            for step in range(40):
                before = set(reader.trajectory_ids)
                add(whole if step % 3 == 0 else limited)
                reader.refresh()
                removed += len(before - set(reader.trajectory_ids))
                window = [1000 * named[key] + j for key in reader.window_ids for j in range(8)]
                batch = model.check(reader, window)
                rows = batch["row"].tolist()
                priorities = {row: float(rng.random()) * 3 for row in rows}
                model.update(rows, batch["info"]["handle"], [priorities[row] for row in rows])
    assert removed > 20
    assert model.highest > 1


def test_priorities_stay_when_an_older_store_comes_late(tmp_path: Path) -> None:
    for name, i in (("a", 0), ("b", 1)):
        with opened(tmp_path / name) as buffer:
            buffer.add_trajectories([numbered(i, 3)])
    (tmp_path / "a").rename(tmp_path / "late")
    sampler = Prioritized(1.0, eps=0.0)
    with ReplayReader(tmp_path / "?") as reader:
        set_all(reader, sampler, lambda row: 1.0 + row % 1000)
        (tmp_path / "late").rename(tmp_path / "a")
        assert reader.wait_for(2, 10)
        reader.sample(1, sampler=sampler)
        assert values_of(sampler) == [3, 3, 3, 1, 2, 3]


def test_a_window_of_200_000_rows_is_drawn_from_by_priority() -> None:
    buffer, sampler = TrajectoryReplayBuffer(sample_window_size=4), Prioritized(1.0, eps=0.0)
    rows = torch.arange(300_000).reshape(6, 50_000, 1)
    buffer.add_trajectories([{"row": part} for part in rows[:4]])
    batch = buffer.sample(1000, sampler=sampler)
    # As much as all others: 1,000 of 200,000 rows.
    drawn = torch.unique(batch["row"])
    priorities = np.full(1000, (200_000 - len(drawn)) / len(drawn))
    sampler.update_priorities(batch["info"]["handle"], priorities)
    found = buffer.sample(10_000, sampler=sampler)["row"]
    assert int(torch.isin(found, drawn).sum()) == pytest.approx(5000, abs=200)
    for part in rows[4:]:
        buffer.add_trajectories([{"row": part}])
        assert int(buffer.sample(1000, sampler=sampler)["row"].max()) > int(part[0, 0])
    assert len(values_of(sampler)) == 200_000


def test_threads_draw_and_update_while_others_are_added() -> None:
    buffer, sampler = in_memory(4, sample_window_size=4), Prioritized(1.0, eps=0.0)
    jobs, failures = iter(range(3)), []
    barrier = threading.Barrier(3)

    def work() -> None:
        barrier.wait(30)
        if next(jobs) == 0:  # one of them adds
            for i in range(4, 200):
                buffer.add_trajectories([numbered(i)])
            return
        for _ in range(300):
            batch = buffer.sample(32, sampler=sampler)
            assert bool(((batch["weights"] > 0) & (batch["weights"] <= 1)).all())
            sampler.update_priorities(batch["info"]["handle"], (batch["row"] % 10 + 1) / 16)

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    buffer.sample(1, sampler=sampler)
    for place, value in enumerate(values_of(sampler)):
        assert value in (1.0, (place % 10 + 1) / 16)


def test_a_draw_that_fails_for_want_of_memory_loses_no_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer, sampler = in_memory(1, 3), Prioritized(1.0, eps=0.0)
    set_all(buffer, sampler, lambda row: 1.0 + row)
    buffer.add_trajectories([numbered(1, 3)])

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(SumTree, "fill", fail)
        for _ in range(3):
            with pytest.raises(MemoryError, match="no room"):
                buffer.sample(1, sampler=sampler)
    buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [1, 2, 3, 3, 3, 3]


def test_a_change_that_was_broken_off_does_not_keep_rows_from_being_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a child that was forked while another thread took it in."""
    buffer, sampler = in_memory(2, 3, sample_window_size=2), Prioritized(1.0, eps=0.0)
    set_all(buffer, sampler, lambda row: 5.0)
    buffer.add_trajectories([numbered(2, 3)])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SumTree, "fill", fail)
        with pytest.raises(KeyboardInterrupt):
            buffer.sample(1, sampler=sampler)
    buffer.sample(1, sampler=sampler)
    assert values_of(sampler) == [5.0] * 6


# -- resuming ------------------------------------------------------------------------------------


def go_on(
    buffer: TrajectoryReplayBuffer, sampler: Prioritized, num_steps: int
) -> tuple[list[list[int]], list[Array]]:
    """Train for some steps: what was drawn, and its weights."""
    drawn, weights = [], []
    for step in range(num_steps):
        batch = buffer.sample(16, sampler=sampler)
        rows = batch["row"]
        sampler.update_priorities(batch["info"]["handle"], (rows * 7 + step) % 13 / 5.0)
        drawn.append(rows.tolist())
        weights.append(batch["weights"].numpy())
        if step % 4 == 3:
            buffer.add_trajectories([numbered(buffer.trajectory_counter, 6 + step % 3)])
    return drawn, weights


@pytest.mark.parametrize("num_steps", [0, 1, 4, 50])
@pytest.mark.parametrize("is_saved_to_files", [False, True])
def test_batches_go_on_in_a_buffer_that_loads_the_checkpoint(
    tmp_path: Path, is_saved_to_files: bool, num_steps: int
) -> None:
    options: Any = {"seed": 3, "sample_window_size": 8}
    if is_saved_to_files:
        options |= {"auto_save": True, "auto_save_path": tmp_path / "store"}
    sampler, other_sampler = Prioritized(), Prioritized()
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.add_trajectories([numbered(i) for i in range(6)])
        go_on(buffer, sampler, num_steps)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        state = saved(sampler.state_dict())
        rows, weights = go_on(buffer, sampler, 30)
    with TrajectoryReplayBuffer(sample_window_size=8) as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        other_sampler.load_state_dict(state)
        other_rows, other_weights = go_on(other, other_sampler, 30)
    assert other_rows == rows
    # The leaves lie elsewhere in the tree, so their sum may be rounded otherwise.
    np.testing.assert_array_max_ulp(np.array(other_weights), np.array(weights), maxulp=1)


def test_a_loaded_state_that_was_not_drawn_from_is_the_same_state() -> None:
    buffer, sampler, other = in_memory(3), Prioritized(), Prioritized()
    set_all(buffer, sampler, float)
    state = saved(sampler.state_dict())
    other.load_state_dict(state)
    again = other.state_dict()
    assert again.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(torch.as_tensor(again[name]), torch.as_tensor(value)), name


def test_a_state_stays_what_it_was_while_its_sampler_goes_on() -> None:
    buffer, sampler = in_memory(3), Prioritized()
    set_all(buffer, sampler, float)
    state, before = sampler.state_dict(), saved(sampler.state_dict())
    go_on(buffer, sampler, 20)
    for name, value in before.items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name


def test_loaded_priorities_are_for_the_trajectories_of_the_state_only(tmp_path: Path) -> None:
    sampler, other = Prioritized(1.0, eps=0.0), Prioritized(1.0, eps=0.0)
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([numbered(i, 3) for i in range(4)])
        set_all(buffer, sampler, lambda row: 1.0 + row // 1000)
    with opened(tmp_path / "store", sample_window_size=3) as buffer:
        buffer.add_trajectories([numbered(4, 2)])
        other.load_state_dict(saved(sampler.state_dict()))
        buffer.sample(1, sampler=other)
        assert values_of(other) == [3.0] * 3 + [4.0] * 3 + [4.0] * 2


def test_a_state_that_is_none_is_refused_and_nothing_is_changed() -> None:
    buffer, sampler = in_memory(1), Prioritized(1.0, eps=0.0)
    set_all(buffer, sampler, float)
    state = sampler.state_dict()
    del state["highest"]
    with pytest.raises(KeyError, match="highest"):
        sampler.load_state_dict(state)
    assert values_of(sampler) == [*map(float, range(10))]
