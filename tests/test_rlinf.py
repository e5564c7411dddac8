"""Rollouts of RLinf's main branch, whose env worker appends each epoch's bootstrap step.

Its files lie in ``fixtures/rlinf_main`` as that branch wrote them. ``expected.json`` beside them
says of each column the dtype, shape and SHA-256 of its N rows: made with plain torch, one row after
the other, from the rule that row ``t`` of epoch ``e`` is step ``e * (T / E + 1) + t`` of a column
with a trailing step for each of E epochs, and one step later where it leads (the end flags).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from data import bits, is_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbuf import ReplayReader, Trajectory, TrajectoryReplayBuffer, health
from mmbuf.analysis import Tables
from mmbuf.channel import Channel
from mmbuf.sampling import NStep, Slices, WithoutReplacement
from mmbuf.transfer import convert, merge, split

pytestmark = pytest.mark.usefixtures("without_fsync")

FIXTURES = Path(__file__).parent / "fixtures" / "rlinf_main"
STORE = FIXTURES / "store_pt"
FILES = sorted(path.name for path in FIXTURES.glob("*.pt"))
FORMATS = ["arrow", "npy", "pt", "pkl"]
FLAGS = ("dones", "terminations", "truncations")

by_file = pytest.mark.parametrize("name", FILES)
by_format = pytest.mark.parametrize("form", FORMATS)


def rollout(name: str) -> dict[str, Any]:
    item: dict[str, Any] = torch.load(FIXTURES / name, weights_only=True)
    return item


def as_trajectory(item: Mapping[str, Any]) -> Trajectory:
    columns = dict(item)
    metadata = columns.pop("max_episode_length"), columns.pop("model_weights_id")
    return Trajectory.from_columns(columns, *metadata)


def columns_of(item: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of a nested dict, but for its metadata, by their names."""
    for key, leaf in item.items():
        if isinstance(leaf, Mapping):
            yield from columns_of(leaf, f"{prefix}{key}.")
        elif isinstance(leaf, (torch.Tensor, list)):
            yield prefix + key, leaf


def hashes_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "dtype": str(rows.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(bits(rows)).hexdigest(),
            "shape": list(rows.shape),
        }
        for name, rows in columns_of(batch)
    }


def in_order(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of `every_row` in the order of its rows."""
    info = batch["info"]
    keys = torch.stack([info["trajectory_id"], info["step"], info["env"]]).T.tolist()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    rows = {name: leaf for name, leaf in batch.items() if name != "info"}

    def sort(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: sort(leaf) for key, leaf in node.items()}
        return [node[row] for row in order] if isinstance(node, list) else node[order]

    found: dict[str, Any] = sort(rows)
    return found


def every_row(source: TrajectoryReplayBuffer | ReplayReader) -> dict[str, Any]:
    """All rows of a source as it samples them, in their order."""
    sampler = WithoutReplacement()
    return in_order(source.sample(source.total_samples, sampler=sampler, with_info=True))


def same(found: Trajectory, item: Mapping[str, Any]) -> None:
    """All columns and the metadata are those of ``item``, bit for bit and in its order."""
    metadata = {
        "max_episode_length": found.max_episode_length,
        "model_weights_id": found.model_weights_id,
    }
    assert is_equal(metadata | found.to_columns(), item)


# -- the fixtures ---------------------------------------------------------------------------------


def test_all_fixtures_are_there() -> None:
    assert FILES == ["dagger.pt", "interventions.pt", "prev.pt", "sac.pt", "sac_two_epochs.pt"]


@by_file
@by_format
def test_a_rollout_goes_through_every_format_bit_for_bit(
    tmp_path: Path, name: str, form: str
) -> None:
    item = rollout(name)
    known = json.loads((FIXTURES / "expected.json").read_text())[name]
    store = tmp_path / "store"
    options: dict[str, Any] = {"auto_save": True, "auto_save_path": store}
    with TrajectoryReplayBuffer(**options, trajectory_format=form) as buffer:
        buffer.add_trajectories([item])
        assert buffer.total_samples == item["rewards"].shape[0] * item["rewards"].shape[1]
        assert hashes_of(every_row(buffer)) == known
        same(buffer.get_trajectory(0), item)
        buffer.flush()
        assert hashes_of(every_row(buffer)) == known
    with TrajectoryReplayBuffer(**options) as buffer:
        assert hashes_of(every_row(buffer)) == known
        same(buffer.get_trajectory(0), item)
        buffer.save_checkpoint(tmp_path / "back", trajectory_format="pt")
    with ReplayReader(store, cache_size=0) as reader:
        assert hashes_of(every_row(reader)) == known
        same(reader.get_trajectory(0), item)
    assert health.verify(store) == []
    (file,) = (tmp_path / "back").glob("*.pt")
    assert is_equal(torch.load(file, weights_only=True), item)


@by_file
def test_a_rollout_of_one_epoch_and_of_two_is_of_the_right_length(name: str) -> None:
    trajectory = as_trajectory(rollout(name))
    expected = {"interventions.pt": (6, 3), "sac_two_epochs.pt": (8, 2)}.get(name, (4, 2))
    assert (trajectory.num_steps, trajectory.num_envs) == expected


def test_actions_of_two_epochs_belong_to_their_rewards() -> None:
    # The worker's actions count up, twice with a bootstrap step that no reward followed: 4 and 8.
    item = rollout("sac_two_epochs.pt")
    assert item["actions"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        batch = every_row(buffer)
        for name in ("actions", "rewards"):
            assert batch[name][::2, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7], name
        for inputs in (batch["curr_obs"], batch["forward_inputs"]):
            assert inputs["states"][::2, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        drawn = buffer.sample(256)
        assert torch.equal(drawn["actions"][:, :1], drawn["rewards"])
        assert torch.equal(drawn["forward_inputs"]["states"], drawn["curr_obs"]["states"])


def test_a_store_of_rlinfs_main_branch_opens_samples_right_and_is_not_damaged(
    tmp_path: Path,
) -> None:
    store = Path(shutil.copytree(STORE, tmp_path / "store"))
    known = json.loads((STORE / "expected.json").read_text())
    assert health.verify(store) == []
    with ReplayReader(store) as reader:
        assert (len(reader), reader.total_samples) == (3, 24)
        rows = every_row(reader)
        for i, file in enumerate(sorted(store.glob("trajectory_*.pt"))):
            part = dict(columns_of(rows))
            of_one = {name: leaf[8 * i : 8 * i + 8] for name, leaf in part.items()}
            assert hashes_of(of_one) == known[str(i)]
            same(reader.get_trajectory(i), torch.load(file, weights_only=True))
    with TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(store)
        assert is_equal(every_row(buffer), rows)


def test_interventions_are_selected_with_the_rows_that_they_belong_to() -> None:
    item = rollout("interventions.pt")
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        whole = buffer.get_trajectory(0)
    assert whole.intervene_flags is not None
    assert whole.rewards is not None
    parts = whole.select(whole.intervene_flags)
    # Another environment every third step; nobody intervenes in the bootstrap step.
    assert [len(part.rewards) for part in parts] == [2, 2, 2]  # type: ignore[arg-type]
    for env, part in enumerate(parts):
        steps = [2 - env, 5 - env]
        assert torch.equal(part.rewards, item["rewards"][steps, env, None])  # type: ignore[arg-type]
        assert torch.equal(part.actions, item["actions"][steps, env, None])  # type: ignore[arg-type]
        states = part.curr_obs["states"]
        assert torch.equal(states, item["curr_obs"]["states"][steps, env, None])
        after = [step + 1 for step in steps]
        assert torch.equal(part.dones, item["dones"][after, env, None])  # type: ignore[arg-type]


def test_a_mask_of_the_trajectorys_own_flags_is_theirs_and_any_other_has_t_steps() -> None:
    dones = torch.tensor([[True], [False], [True], [False], [False], [False]])
    trajectory = Trajectory(rewards=torch.arange(4.0)[:, None], dones=dones)
    (part,) = trajectory.select(dones)
    assert part.rewards.tolist() == [[1.0]]  # type: ignore[union-attr]
    both = Trajectory(rewards=trajectory.rewards, dones=dones, intervene_flags=dones)
    for whole, mask in ((trajectory, dones.clone()), (both, dones)):
        with pytest.raises(ValueError, match=r"got \[6, 1\]\. Of more steps it has to be a"):
            whole.select(mask)


# -- older versions of mmbuf ----------------------------------------------------------------------


def events_of(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store / "journal.jsonl").read_bytes().splitlines()]


def versions_of(store: Path) -> list[int]:
    return [event["version"] for event in events_of(store) if "version" in event]


@pytest.mark.parametrize("form", ["arrow", "npy"])
def test_a_file_says_the_version_that_an_older_mmbuf_refuses_only_if_it_has_to(
    tmp_path: Path, form: str
) -> None:
    new, old = rollout("sac.pt"), rollout("sac.pt")
    cut(old)
    for i, item in enumerate((old, new)):
        with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
            buffer.add_trajectories([item])
            buffer.save_checkpoint(tmp_path / str(i))
        index = json.loads((tmp_path / str(i) / "trajectory_index.json").read_text())
        assert index["version"] == i + 1
        (file,) = (tmp_path / str(i)).glob("trajectory_0_*")
        header = (file / "trajectory.json" if file.is_dir() else file).read_bytes()
        assert f'"version": {i + 1}, "uuid": '.encode() in header


def cut(item: dict[str, Any]) -> None:
    """Without the trailing steps, as RLinf 0.3.0 made it."""
    for key, leaf in item.items():
        if isinstance(leaf, dict):
            cut(leaf)
        elif isinstance(leaf, torch.Tensor) and key not in FLAGS:
            item[key] = leaf[:4]


@by_format
def test_a_store_says_the_newer_version_before_the_first_rollout_that_needs_it(
    tmp_path: Path, form: str
) -> None:
    old, new = rollout("sac.pt"), rollout("sac.pt")
    cut(old)
    options: dict[str, Any] = {
        "auto_save": True,
        "auto_save_path": tmp_path / "a",
        "trajectory_format": form,
    }
    with TrajectoryReplayBuffer(**options) as buffer, ReplayReader(tmp_path / "a") as reader:
        for item in (old, old, new, old, new):
            buffer.add_trajectories([item])
            buffer.flush()
            assert reader.refresh()
    kinds = [event["event"] for event in events_of(tmp_path / "a")]
    assert [k for k in kinds if k in ("schema", "add")] == [
        *("schema", "add", "add"),
        *("schema", "add", "add", "add"),
    ]
    assert versions_of(tmp_path / "a") == [1, 2]
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.add_trajectories([new])
        for i, item in enumerate((old, old, new, old, new, new)):
            same(buffer.get_trajectory(i), item)
        buffer.flush()
        assert versions_of(tmp_path / "a") == [1, 2]
        buffer.clear()
        buffer.add_trajectories([old])
        buffer.flush()
        assert versions_of(tmp_path / "a") == [1, 2, 1]
        buffer.save_checkpoint(tmp_path / "b")
        buffer.add_trajectories([new])
        buffer.save_checkpoint(tmp_path / "c")
        buffer.load_checkpoint(tmp_path / "b")
        assert versions_of(tmp_path / "a") == [1, 2, 1, 2, 1]
        buffer.load_checkpoint(tmp_path / "c")
        assert versions_of(tmp_path / "a") == [1, 2, 1, 2, 1, 2]
        same(buffer.get_trajectory(7), new)
        buffer.add_trajectories([new])
        buffer.flush()
        assert versions_of(tmp_path / "a") == [1, 2, 1, 2, 1, 2]
    assert health.verify(tmp_path / "a") == []


# -- any rollout ----------------------------------------------------------------------------------


def pieces(num_steps: int, num_epochs: int, num_envs: int, longer: set[str]) -> dict[str, Any]:
    """A rollout that counts its entries; of ``longer`` columns each epoch has one step more."""
    total = itertools.count()

    def leaf(name: str, *row_shape: int) -> torch.Tensor:
        steps = num_steps + num_epochs * (name in longer)
        values = [[next(total) for _ in range(num_envs)] for _ in range(steps)]
        return (
            torch.tensor(values)
            .reshape(steps, num_envs, *[1] * len(row_shape))
            .expand(-1, -1, *row_shape)
        )

    steps = num_steps + num_epochs * ("forward_inputs.task" in longer)
    return {
        "actions": leaf("actions", 2),
        "rewards": leaf("rewards").float(),
        "dones": leaf("dones") % 3 == 0,
        "terminations": leaf("terminations") % 5 == 0,
        "prev_logprobs": leaf("prev_logprobs", 1).to(torch.bfloat16),
        "forward_inputs": {
            "deep": {"tokens": leaf("forward_inputs.deep.tokens", 3)},
            "task": [[f"{next(total)} é" for _ in range(num_envs)] for _ in range(steps)],
        },
        "curr_obs": {
            "states": leaf("curr_obs.states", 2),
            "none": torch.zeros(num_steps, num_envs, 0),
        },
    }


MAY_BE_LONGER = (
    *("actions", "dones", "terminations", "prev_logprobs", "forward_inputs.deep.tokens"),
    *("forward_inputs.task", "curr_obs.states"),
)


def rows_by_the_rule(item: Mapping[str, Any], num_steps: int, num_epochs: int) -> dict[str, Any]:
    length = num_steps // num_epochs
    rows: dict[str, Any] = {}
    for name, leaf in columns_of(item):
        steps = list(range(num_steps))
        if len(leaf) > num_steps:
            first = name in FLAGS
            steps = [e * (length + 1) + t + first for e in range(num_epochs) for t in range(length)]
        entries = [leaf[step][b] for step in steps for b in range(len(leaf[0]))]
        rows[name] = entries if isinstance(leaf, list) else torch.stack(entries)
    return rows


shapes = st.tuples(
    st.integers(1, 4),  # steps of an epoch
    st.integers(1, 4),  # epochs
    st.integers(1, 3),  # environments
    st.sets(st.sampled_from(MAY_BE_LONGER)),
)


@settings(deadline=None, max_examples=25)
@given(drawn=st.lists(shapes, min_size=1, max_size=3), form=st.sampled_from(FORMATS))
def test_any_rollouts_come_back_and_have_the_rows_of_the_rule(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[int, int, int, set[str]]],
    form: str,
) -> None:
    items, parts = [], []
    for epoch, num_epochs, num_envs, longer in drawn:
        items.append(pieces(epoch * num_epochs, num_epochs, num_envs, longer))
        parts.append(rows_by_the_rule(items[-1], epoch * num_epochs, num_epochs))
    expected = {
        name: list(itertools.chain.from_iterable(part[name] for part in parts))
        if isinstance(leaf, list)
        else torch.cat([part[name] for part in parts])
        for name, leaf in parts[0].items()
    }

    def check(source: TrajectoryReplayBuffer | ReplayReader) -> None:
        for _ in range(2):  # from files, then from what was filled
            assert is_equal(dict(columns_of(every_row(source))), expected)
        for i, item in enumerate(items):
            whole = Trajectory.from_columns(item).to_columns()
            assert is_equal(source.get_trajectory(i).to_columns(), whole)

    path = tmp_path_factory.mktemp("rollouts")
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(items)
        check(buffer)
        buffer.save_checkpoint(path / "a", trajectory_format=form)
    for cache_size in (None, 0):
        with ReplayReader(path / "a", cache_size=cache_size) as reader:
            check(reader)
    assert health.verify(path / "a") == []
    shutil.rmtree(path)


# -- what else is done with rollouts --------------------------------------------------------------


def test_rollouts_go_through_every_conversion_merge_and_split(tmp_path: Path) -> None:
    path: Any = STORE
    for number, form in enumerate([*FORMATS, "arrow", "pkl", "npy", "pt"]):
        convert(path, tmp_path / str(number), form)
        path = tmp_path / str(number)
    split(path, tmp_path / "parts", num_shards=2)
    merge([tmp_path / "parts" / "rank_0", tmp_path / "parts" / "rank_1"], tmp_path / "whole")
    files = [torch.load(file, weights_only=True) for file in sorted(STORE.glob("*.pt"))]
    with ReplayReader(tmp_path / "whole") as reader:
        # The first of each part, then the second: 0 and 1 were in one part, 2 in the other.
        for i, origin in enumerate([0, 2, 1]):
            same(reader.get_trajectory(i), files[origin])


def test_a_rollout_comes_through_a_channel_and_is_split_with_its_bootstrap_steps() -> None:
    item = rollout("sac_two_epochs.pt")
    with Channel(1) as channel:
        channel.put(as_trajectory(item))
        parts = channel.get().split(2)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(parts)
        assert buffer.total_samples == 16
        for env in (0, 1):
            found = buffer.get_trajectory(env)
            assert torch.equal(found.actions, item["actions"][:, env, None])  # type: ignore[arg-type]
            assert found.num_steps == 8


def test_tables_have_the_rows_of_a_rollout_and_no_others(tmp_path: Path) -> None:
    item = rollout("sac_two_epochs.pt")
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        buffer.save_checkpoint(tmp_path / "a")
    steps = Tables(tmp_path / "a").steps.to_arrow().to_pydict()
    assert [row[0] for row in steps["actions"]] == steps["rewards"]
    assert steps["rewards"] == [float(t) for t in range(8) for _ in range(2)]


def test_n_step_targets_and_slices_of_a_rollout_are_of_its_rows() -> None:
    item = rollout("sac_two_epochs.pt")
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([item])
        batch = buffer.sample(64, sampler=NStep(3, 1.0))
        first = batch["actions"][:, :1]
        count = (8 - first).clamp(max=3)
        assert torch.equal(batch["rewards"], count * first + count * (count - 1) / 2)
        assert torch.equal(batch["next_obs"]["states"][:, :1], first + count)
        batch = buffer.sample(16, sampler=Slices(4))
        assert torch.equal(batch["actions"][..., :1], batch["rewards"])
        assert torch.equal(batch["rewards"].diff(dim=1), torch.ones(16, 3, 1))
