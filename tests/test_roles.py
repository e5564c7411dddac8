"""Roles: layouts of well-known libraries, sampled and tabled as they are, by plain Python's count.

Every row of a layout says whose it is: its observation is (step, environment), its next one the
same. Rewards and discounts are small binary fractions, whose sums and products are exact.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbuf import SchemaError, Trajectory, TrajectoryReplayBuffer
from mmbuf.analysis import Tables, summarize
from mmbuf.roles import Roles, checked, parsed
from mmbuf.sampling import NStep, Prioritized, Slices, WithoutReplacement
from mmbuf.schema import Schema, measure

Fields = dict[str, Any]
Keys = tuple[str, ...]


class Facts:
    """What happened in T steps of B environments; arrays ``[T, B]``."""

    def __init__(self, num_steps: int, num_envs: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (num_steps, num_envs)
        self.rewards = rng.integers(-8, 9, shape).astype(np.float32)
        self.terminated = rng.random(shape) < 0.2
        self.truncated = (rng.random(shape) < 0.2) & ~self.terminated
        self.discounts = rng.choice([0.5, 1.0], shape).astype(np.float32)
        t, b = np.meshgrid(np.arange(num_steps), np.arange(num_envs), indexing="ij")
        self.ids = np.stack([t, b], -1).astype(np.float32)

    @property
    def done(self) -> Any:
        return self.terminated | self.truncated


def rlinf(facts: Facts) -> Fields:
    return {
        "curr_obs": {"states": facts.ids},
        "next_obs": {"states": facts.ids},
        "actions": facts.ids,
        "rewards": facts.rewards[..., None],
        "terminations": facts.terminated[..., None],
        "truncations": facts.truncated[..., None],
        "dones": facts.done[..., None],
    }


def gymnasium(facts: Facts) -> Fields:
    return {
        "obs": facts.ids,
        "next_obs": facts.ids,
        "reward": facts.rewards,
        "terminated": facts.terminated,
        "truncated": facts.truncated,
    }


def cleanrl(facts: Facts) -> Fields:
    """As in the buffer of its DQN, with the flags of Stable-Baselines3."""
    return {
        "observations": facts.ids,
        "next_observations": facts.ids,
        "actions": facts.ids[..., :1],
        "rewards": facts.rewards,
        "dones": facts.done.astype(np.float32),
        "timeouts": facts.truncated.astype(np.float32),
    }


def d4rl(facts: Facts) -> Fields:
    return {
        "observations": facts.ids,
        "next_observations": facts.ids,
        "rewards": facts.rewards,
        "terminals": facts.terminated.astype(np.uint8),
        "timeouts": facts.truncated.astype(np.uint8),
        "infos": {"qpos": facts.ids},
    }


def robomimic(facts: Facts) -> Fields:
    return {
        "obs": {"eef": facts.ids},
        "next_obs": {"eef": facts.ids},
        "rewards": facts.rewards,
        "terminals": facts.terminated,
        "dones": facts.done.astype(np.int64),
    }


def rllib(facts: Facts) -> Fields:
    return {
        "obs": facts.ids,
        "new_obs": facts.ids,
        "rewards": facts.rewards,
        "terminateds": facts.terminated,
        "truncateds": facts.truncated,
    }


def tianshou(facts: Facts) -> Fields:
    return {
        "obs": facts.ids,
        "obs_next": facts.ids,
        "rew": facts.rewards,
        "terminated": facts.terminated,
        "truncated": facts.truncated,
        "done": facts.done,
    }


def torchrl(facts: Facts) -> Fields:
    """Its root has the flags of the state before each step."""
    flags = {"done": facts.done, "terminated": facts.terminated, "truncated": facts.truncated}
    flags = {name: values[..., None] for name, values in flags.items()}
    before = {name: np.roll(values, 1, 0) for name, values in flags.items()}
    after = {"observation": facts.ids, "reward": facts.rewards[..., None], **flags}
    return {"observation": facts.ids, "action": facts.ids, **before, "next": after}


def lerobot(facts: Facts) -> Fields:
    return {
        "observation.state": facts.ids,
        "next.observation.state": facts.ids,
        "next.reward": facts.rewards,
        "next.done": facts.done,
        "next.truncated": facts.truncated,
    }


def bfloat16(facts: Facts) -> Fields:
    fields = rlinf(facts)
    for name in ("rewards", "terminations", "truncations", "dones"):
        fields[name] = torch.from_numpy(fields[name].astype(np.float32)).bfloat16()
    return fields


def rlds(facts: Facts) -> Fields:
    """The next observation is in the next row."""
    return {
        "observation": facts.ids,
        "action": facts.ids,
        "reward": facts.rewards,
        "discount": facts.discounts,
        "is_first": np.roll(facts.done, 1, 0),
        "is_last": facts.done,
        "is_terminal": facts.terminated,
    }


def minari(facts: Facts) -> Fields:
    return {
        "observations": facts.ids,
        "actions": facts.ids,
        "rewards": facts.rewards.astype(np.float64),
        "terminations": facts.terminated,
        "truncations": facts.truncated,
    }


def brax(facts: Facts) -> Fields:
    """Where an episode ends for good its discount is 0."""
    return {
        "observation": facts.ids,
        "next_observation": facts.ids,
        "reward": facts.rewards,
        "discount": facts.discounts,
        "terminated": facts.terminated,
        "truncated": facts.truncated,
    }


# Of each layout: how it is made, where the state before, the one after and the reward are.
LAYOUTS: dict[str, tuple[Callable[[Facts], Fields], Keys, Keys | None, Keys]] = {
    "rlinf": (rlinf, ("curr_obs", "states"), ("next_obs", "states"), ("rewards",)),
    "gymnasium": (gymnasium, ("obs",), ("next_obs",), ("reward",)),
    "cleanrl": (cleanrl, ("observations",), ("next_observations",), ("rewards",)),
    "d4rl": (d4rl, ("observations",), ("next_observations",), ("rewards",)),
    "robomimic": (robomimic, ("obs", "eef"), ("next_obs", "eef"), ("rewards",)),
    "rllib": (rllib, ("obs",), ("new_obs",), ("rewards",)),
    "tianshou": (tianshou, ("obs",), ("obs_next",), ("rew",)),
    "torchrl": (torchrl, ("observation",), ("next", "observation"), ("next", "reward")),
    "lerobot": (lerobot, ("observation.state",), ("next.observation.state",), ("next.reward",)),
    "bfloat16": (bfloat16, ("curr_obs", "states"), ("next_obs", "states"), ("rewards",)),
    "rlds": (rlds, ("observation",), None, ("reward",)),
    "minari": (minari, ("observations",), None, ("rewards",)),
    "brax": (brax, ("observation",), ("next_observation",), ("reward",)),
}

TAKEN: dict[str, dict[str, Any]] = {
    "rlinf": {
        "reward": "rewards",
        "termination": "terminations",
        "truncation": "truncations",
        "done": "dones",
        "next.curr_obs": "next_obs",
    },
    "gymnasium": {
        "reward": "reward",
        "termination": "terminated",
        "truncation": "truncated",
        "next.obs": "next_obs",
    },
    "cleanrl": {
        "reward": "rewards",
        "truncation": "timeouts",
        "done": "dones",
        "next.observations": "next_observations",
    },
    "d4rl": {
        "reward": "rewards",
        "termination": "terminals",
        "truncation": "timeouts",
        "next.observations": "next_observations",
    },
    "robomimic": {
        "reward": "rewards",
        "termination": "terminals",
        "done": "dones",
        "next.obs": "next_obs",
    },
    "rllib": {
        "reward": "rewards",
        "termination": "terminateds",
        "truncation": "truncateds",
        "next.obs": "new_obs",
    },
    "tianshou": {
        "reward": "rew",
        "termination": "terminated",
        "truncation": "truncated",
        "done": "done",
        "next.obs": "obs_next",
    },
    "torchrl": {
        "reward": "next.reward",
        "termination": "next.terminated",
        "truncation": "next.truncated",
        "done": "next.done",
        "next.observation": "next.observation",
    },
    "lerobot": {
        "reward": r"next\.reward",
        "truncation": r"next\.truncated",
        "done": r"next\.done",
        "next.observation.state": "next.observation.state",
    },
    "rlds": {
        "reward": "reward",
        "termination": "is_terminal",
        "done": "is_last",
        "discount": "discount",
    },
    "minari": {"reward": "rewards", "termination": "terminations", "truncation": "truncations"},
    "brax": {
        "reward": "reward",
        "termination": "terminated",
        "truncation": "truncated",
        "discount": "discount",
        "next.observation": "next_observation",
    },
}
TAKEN["bfloat16"] = TAKEN["rlinf"]


def at(batch: Mapping[str, Any], keys: Keys) -> Any:
    found: Any = batch
    for key in keys:
        found = found[key]
    return found


def schema_of(fields: Fields) -> Schema:
    return measure(fields).schema


def names(*names: str) -> Schema:
    """A schema of float columns of these dotted names."""
    fields: Fields = {}
    for name in names:
        *outer, last = name.split(".")
        inner = fields
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = np.zeros((1, 1), np.float32)
    return schema_of(fields)


def expected_of(
    facts: Facts, t: int, b: int, n: int, gamma: float, *, has_discount: bool
) -> tuple[float, float, int]:
    """Rewards, discount and last step of one row, one step after another."""
    total, factor = 0.0, 1.0
    for step in range(t, min(t + n, len(facts.rewards))):
        total += factor * float(facts.rewards[step, b])
        factor *= gamma * (float(facts.discounts[step, b]) if has_discount else 1.0)
        if facts.done[step, b]:
            break
    return total, 0.0 if facts.terminated[step, b] else factor, step


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 3)),
    n=st.integers(1, 5),
    gamma=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 1 << 32),
)
def test_n_step_targets_of_each_layout_are_those_of_plain_python(
    layout: str, sizes: tuple[int, int], n: int, gamma: float, seed: int
) -> None:
    make, before, after, reward = LAYOUTS[layout]
    facts = Facts(*sizes, seed)
    fields = make(facts)
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([fields])
        batch = buffer.sample(40, sampler=NStep(n, gamma))
    for k, (t, b) in enumerate(at(batch, before).int().tolist()):
        has_discount = "discount" in fields
        total, factor, last = expected_of(facts, t, b, n, gamma, has_discount=has_discount)
        assert at(batch, reward)[k].flatten().tolist() == [total]
        assert batch["discount"][k].flatten().tolist() == [factor]
        if after is not None:
            assert at(batch, after)[k].tolist() == [last, b]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_each_layout_cross_no_end(layout: str) -> None:
    make, before, _, _ = LAYOUTS[layout]
    facts = Facts(60, 3, 1)
    with TrajectoryReplayBuffer(seed=0) as buffer:
        buffer.add_trajectories([make(facts)])
        ids = at(buffer.sample(200, sampler=Slices(3)), before).int().numpy()
    assert len(np.unique(ids[:, 0], axis=0)) > 20
    for slice_ in ids.tolist():
        assert [t for t, _ in slice_] == list(range(slice_[0][0], slice_[0][0] + 3))
        assert not any(facts.done[t, b] for t, b in slice_[:-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_of_each_layout_have_its_episodes(layout: str, tmp_path: Path) -> None:
    facts = Facts(30, 2, 2)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([LAYOUTS[layout][0](facts)])
    expected = []
    for b in range(2):
        start = 0
        for t in range(30):
            if facts.done[t, b] or t == 29:
                reason = "truncation" if facts.truncated[t, b] else "open"
                reason = "termination" if facts.terminated[t, b] else reason
                expected.append((b, start, float(facts.rewards[start : t + 1, b].sum()), reason))
                start = t + 1
    found = Tables(tmp_path / "store").episodes.to_arrow(
        ["env", "start_step", "episode_return", "ended_by"]
    )
    assert [tuple(row.values()) for row in found.to_pylist()] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_taken_of_each_layout_is_told_as_it_would_be_said(layout: str) -> None:
    schema = schema_of(LAYOUTS[layout][0](Facts(2, 1, 0)))
    roles = Roles(schema)
    assert roles.told() == TAKEN[layout]
    assert roles.unclear() == {}
    assert Roles(schema, roles.told()).told() == TAKEN[layout]


# -- two readings, and none ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "columns"),
    [
        ("reward", ("reward", "rewards")),
        ("done", ("dones", "is_last")),
        ("done", ("dones", "next_dones")),
        ("termination", ("terminals", "terminated")),
        ("truncation", ("timeouts", "truncated")),
        ("discount", ("discount", "discounts")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_two_columns_for_one_role_are_an_error_that_names_both(
    role: str, columns: tuple[str, str]
) -> None:
    schema = names(*columns)
    with pytest.raises(
        SchemaError,
        match=rf"that is the {role}, got {columns[0]} and {columns[1]}.*roles={{'{role}': '",
    ):
        getattr(Roles(schema), role)
    for column in columns:
        assert getattr(Roles(schema, {role: column}), role) == (column,)
    assert getattr(Roles(schema, {role: None}), role) is None


def test_samplers_raise_where_two_columns_could_say_where_episodes_end() -> None:
    zeros = torch.zeros(4, 1)
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": zeros, "dones": zeros, "is_last": zeros}])
    for sampler in (Slices(2), NStep(2, 0.5)):
        with pytest.raises(SchemaError, match="dones and is_last"):
            buffer.sample(2, sampler=sampler)
    buffer.sample(2, sampler=Slices(2, roles={"done": "is_last"}))
    buffer.sample(2, sampler=NStep(2, 0.5, roles={"done": "is_last"}))
    buffer.sample(2)


def test_an_end_by_time_is_not_taken_for_one_for_good_where_a_discount_may_tell() -> None:
    """As dm_env has it: ``is_last`` of either kind, and a discount of 1 at a limit of time."""
    flags = torch.tensor([0, 1, 0, 1])[:, None].bool()
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories(
        [
            {
                "observation": torch.arange(4.0)[:, None],
                "reward": torch.ones(4, 1),
                "discount": torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None],
                "is_last": flags,
            }
        ]
    )
    with pytest.raises(SchemaError, match=r"'is_last', an end of either kind, and 'discount'"):
        buffer.sample(2, sampler=NStep(3, 0.5))
    for roles, discounts in (
        ({"termination": None}, {0: 0.25, 1: 0.5, 2: 0.0, 3: 0.0}),
        ({"discount": None}, dict.fromkeys(range(4), 0.0)),
    ):
        sampler = NStep(3, 0.5, roles=roles, discount="counted")
        batch = buffer.sample(99, sampler=sampler)
        found = zip(batch["observation"].tolist(), batch["counted"].tolist(), strict=True)
        assert dict(found) == discounts


def test_a_flag_of_going_on_is_not_passed_over() -> None:
    """As TD3 and ReAgent have it."""
    going_on = torch.tensor([1, 0, 1, 0])[:, None]
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": torch.ones(4, 1), "not_done": going_on}])
    assert Roles(buffer.schema).unclear() == {"done": ["not_done"]}
    for sampler in (Slices(3), NStep(3, 0.5)):
        with pytest.raises(SchemaError, match="'not_done': expected a flag that is set where"):
            buffer.sample(2, sampler=sampler)
    assert buffer.sample(2, sampler=Slices(3, roles={"done": None}))["not_done"].shape == (2, 3)
    buffer.clear()
    done = going_on == 0
    buffer.add_trajectories([{"rewards": torch.ones(4, 1), "not_done": going_on, "dones": done}])
    assert set(buffer.sample(99, sampler=Slices(2))["dones"][:, 0].tolist()) == {False}


def test_slices_and_sums_stop_at_the_flag_that_roles_names() -> None:
    flags = torch.tensor([0, 1, 0, 0])[:, None].bool()
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories(
        [{"r": torch.ones(4, 1), "info": {"fell": flags}, "t": torch.arange(4)[:, None]}]
    )
    roles = {"reward": "r", "termination": "info.fell"}
    batch = buffer.sample(50, sampler=Slices(2, roles=roles))
    assert set(batch["t"][:, 0].tolist()) == {0, 2}
    batch = buffer.sample(50, sampler=NStep(3, 1.0, roles=roles))
    targets = zip(batch["r"].tolist(), batch["discount"].tolist(), strict=True)
    found = dict(zip(batch["t"].tolist(), targets, strict=True))
    assert found == {0: (2, 0), 1: (1, 0), 2: (2, 1), 3: (1, 1)}


def test_a_next_state_without_a_partner_is_an_error_until_it_is_said() -> None:
    steps = torch.arange(5)[:, None]
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": torch.ones(5, 1), "state": steps, "next_waypoint": steps}])
    with pytest.raises(
        SchemaError, match=r"'next_waypoint': expected the column .*roles={'row': 'next_waypoint'}"
    ):
        buffer.sample(1, sampler=NStep(2, 0.5))
    ways: dict[str, tuple[Any, int]] = {
        "row": ({"row": "next_waypoint"}, 0),
        "pair": ({"next.state": "next_waypoint"}, 1),
        "next": ({"next": ["next_waypoint"]}, 1),
    }
    for roles, ahead in ways.values():
        batch = buffer.sample(50, sampler=NStep(2, 0.5, roles=roles))
        expected = (batch["state"] + ahead).clamp(max=4)
        assert torch.equal(batch["next_waypoint"], expected)
    assert buffer.sample(5, sampler=Slices(2))["state"].shape == (5, 2)


def test_pairs_of_dicts_can_be_said() -> None:
    schema = names("now.a", "now.b", "then.a", "then.b", "then.c")
    roles = Roles(schema, {"next.now": "then"})
    assert roles.next_states == {
        ("then", "a"): ("now", "a"),
        ("then", "b"): ("now", "b"),
        ("then", "c"): None,
    }
    assert roles.told() == {"next.now": "then", "next": ["then.c"]}


def test_a_flag_under_next_without_a_partner_goes_with_the_step() -> None:
    roles = Roles(names("observation", "next.observation", "next.success", "next.reward"))
    assert roles.next_states == {
        ("next", "observation"): ("observation",),
        ("next", "success"): None,
    }


def test_what_is_under_next_and_has_neither_partner_nor_role_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"'next.waypoint': expected the column whose next"):
        _ = Roles(names("rewards", "next.waypoint")).next_states


@pytest.mark.parametrize("name", ["next", "what_is_next", "nextdoor", "context", "prev_obs"])
def test_columns_that_are_only_called_alike_are_ordinary_ones(name: str) -> None:
    roles = Roles(names(name, "what_is", "rewards"))
    assert (roles.next_states, roles.told()) == ({}, {"reward": "rewards"})


def test_the_flags_beside_next_are_of_the_state_before_even_where_only_they_are_there() -> None:
    schema = names("done", "terminated", "truncated", "next.done", "next.reward", "reward")
    roles = Roles(schema)
    assert roles.ends == [("next", "done")]
    assert (roles.termination, roles.truncation) == (None, None)
    assert roles.reward == ("next", "reward")


def test_roles_are_pickled_with_tables_and_samplers(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([{"r": torch.ones(4, 1), "over": torch.eye(4)[1][:, None]}])
        sampler = pickle.loads(pickle.dumps(NStep(4, 1.0, roles={"reward": "r", "done": "over"})))
        assert set(buffer.sample(30, sampler=sampler)["r"].tolist()) == {1, 2}
    tables = Tables(tmp_path / "store", roles={"reward": "r", "done": "over"})
    tables = pickle.loads(pickle.dumps(tables.part(0, 1)))
    assert tables.episodes.to_arrow(["episode_return"])["episode_return"].to_pylist() == [2, 2]


def test_tables_speak_of_two_readings_only_to_who_reads_one(tmp_path: Path) -> None:
    zeros = torch.zeros(4, 1)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([{"rewards": zeros, "dones": zeros, "is_last": zeros}])
    tables = Tables(tmp_path / "store")
    assert tables.steps.to_arrow(["t", "rewards"]).num_rows == 4
    for table, column in ((tables.steps, "episode"), (tables.episodes, "length")):
        with pytest.raises(SchemaError, match="dones and is_last"):
            table.to_arrow([column])


def test_a_trajectory_counts_its_episodes_by_any_flag_that_is_known() -> None:
    flags = torch.tensor([0, 1, 0, 0])[:, None]
    trajectory = Trajectory(rewards=torch.ones(4, 1), extra={"terminals": flags})
    assert "2 episodes" in repr(trajectory)


def test_text_has_no_role_but_may_be_of_the_next_state() -> None:
    words = [["x"]]
    schema = schema_of(
        {"dones": words, "reward": words, "curr_obs": {"task": words}, "next_obs": {"task": words}}
    )
    roles = Roles(schema)
    assert (roles.reward, roles.ends) == (None, [])
    assert roles.next_states == {("next_obs", "task"): ("curr_obs", "task")}


@pytest.mark.parametrize(
    ("roles", "error", "message"),
    [
        (["reward"], TypeError, "roles: expected a mapping"),
        ({"rewards": "r"}, ValueError, "expected reward, termination.*got 'rewards'"),
        ({"next.": "r"}, ValueError, r"got 'next\.'"),
        ({"reward": 3}, TypeError, r"roles\['reward'\]: expected the name of a column"),
        ({"reward": ["a", "b"]}, ValueError, r"roles\['reward'\]: expected one column, got 2"),
        ({"row": None}, ValueError, r"roles\['row'\]: expected one column, got 0"),
    ],
    ids=["list", "name", "empty", "number", "two", "none"],
)
def test_roles_that_cannot_be_are_refused(roles: Any, error: type[Exception], message: str) -> None:
    for call in (checked, lambda said: NStep(2, 0.5, roles=said), lambda s: Slices(2, roles=s)):
        with pytest.raises(error, match=message):
            call(roles)


def test_a_column_that_roles_names_and_that_is_not_there_is_an_error() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([{"rewards": torch.ones(3, 1)}])
    with pytest.raises(SchemaError, match=r"roles\['done'\]: expected one of rewards, got 'over'"):
        buffer.sample(1, sampler=Slices(2, roles={"done": "over"}))


def test_roles_of_a_command_line_are_read() -> None:
    options = ["reward=r", "next.observation=after", "done=", "row=a", "row=b"]
    assert parsed(options) == {
        "reward": ["r"],
        "next.observation": ["after"],
        "done": [],
        "row": ["a", "b"],
    }


# -- discounts, and names that samplers add ------------------------------------------------------


def with_discount(dtype: torch.dtype = torch.float32) -> Fields:
    return {
        "reward": torch.tensor([1.0, 2.0, 4.0])[:, None],
        "discount": torch.tensor([1.0, 0.0, 1.0], dtype=dtype)[:, None],
        "t": torch.arange(3)[:, None],
    }


def test_stored_discounts_are_multiplied_and_stop_the_sum() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([with_discount()])
    batch = buffer.sample(60, sampler=NStep(3, 0.5))
    found = dict(
        zip(
            batch["t"].tolist(),
            zip(batch["reward"].tolist(), batch["discount"].tolist(), strict=True),
            strict=True,
        )
    )
    assert found == {0: (1 + 2 / 2, 0), 1: (2, 0), 2: (4, 1 / 2)}


def test_a_stored_discount_of_bfloat16_is_multiplied_and_keeps_its_dtype() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([with_discount(torch.bfloat16)])
    batch = buffer.sample(60, sampler=NStep(3, 0.5))
    assert batch["discount"].dtype == torch.bfloat16
    products = dict(zip(batch["t"].tolist(), batch["discount"].tolist(), strict=True))
    assert products == {0: 0, 1: 0, 2: 0.5}


@pytest.mark.parametrize("junk", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_what_is_behind_a_discount_of_0_counts_nothing_whatever_it_is(junk: float) -> None:
    fields = with_discount()
    fields["reward"][2] = junk
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([fields])
    batch = buffer.sample(60, sampler=NStep(3, 0.5))
    found = dict(zip(batch["t"].tolist(), batch["reward"].tolist(), strict=True))
    assert (found[0], found[1]) == (1 + 2 / 2, 2)
    fields = {"rewards": torch.tensor([[1.0], [junk]]), "t": torch.arange(2)[:, None]}
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([fields])
    batch = buffer.sample(30, sampler=NStep(2, 0.0))
    assert dict(zip(batch["t"].tolist(), batch["rewards"].tolist(), strict=True))[0] == 1


def test_discounts_that_fit_neither_the_row_nor_its_rewards_are_refused() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": torch.ones(3, 1, 3), "discount": torch.ones(3, 1, 2)}])
    with pytest.raises(SchemaError, match=r"'discount': .* for each of 3 rewards, got 2\."):
        buffer.sample(1, sampler=NStep(2, 0.5))


def test_stored_discounts_stay_those_of_the_rows_where_the_product_has_another_name() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([with_discount(torch.int32)])
    with pytest.raises(SchemaError, match="column 'discount': expected floats"):
        buffer.sample(1, sampler=NStep(3, 0.5))
    batch = buffer.sample(60, sampler=NStep(3, 0.5, discount="bootstrap"))
    products = dict(zip(batch["t"].tolist(), batch["bootstrap"].tolist(), strict=True))
    assert products == {0: 0, 1: 0, 2: 0.5}
    assert torch.equal(batch["discount"], (batch["t"] != 1).int())


def test_a_refilled_batch_has_new_discounts_in_the_memory_of_the_old() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([with_discount()])
    sampler = NStep(3, 0.5)
    batch = buffer.sample(9, sampler=sampler)
    memory = batch["discount"]
    buffer.sample(9, batch, sampler=sampler)
    assert batch["discount"] is memory
    assert memory.tolist() == [{0: 0.0, 1: 0.0, 2: 0.5}[t] for t in batch["t"].tolist()]


def test_each_reward_of_a_row_may_have_a_discount_of_its_own() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    discounts = torch.tensor([[0.5, 1.0], [0.5, 0.5]])[:, None]
    buffer.add_trajectories(
        [{"rewards": torch.ones(2, 1, 2), "discounts": discounts, "t": torch.arange(2)[:, None]}]
    )
    batch = buffer.sample(30, sampler=NStep(2, 1.0))
    for t, rewards, discount in zip(
        batch["t"].tolist(), batch["rewards"].tolist(), batch["discount"].tolist(), strict=True
    ):
        assert (rewards, discount) == (([1.5, 2], [0.25, 0.5]) if t == 0 else ([1, 1], [0.5, 0.5]))


ADDED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "weights": (Prioritized, {}),
    "info": (Prioritized, {}),
    "mask": (Slices, {"length": 2, "pad": True}),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_column_of_a_name_that_a_sampler_adds_is_kept_where_that_has_another(name: str) -> None:
    sampler, arguments = ADDED[name]
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{name: torch.full((4, 1), 7.0)}])
    with pytest.raises(SchemaError, match=rf"column '{name}': expected no column .*Rename"):
        buffer.sample(3, sampler=sampler(**arguments))
    batch = buffer.sample(3, sampler=sampler(**arguments, **{name: "other"}))
    assert (batch[name] == 7).all()
    assert "other" in batch


def test_info_can_have_another_name_without_a_sampler() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"info": torch.full((4, 1), 7.0)}])
    batch = buffer.sample(3, with_info="origin")
    assert batch["info"].tolist() == [7, 7, 7]
    assert list(batch["origin"]) == ["trajectory_id", "step", "env", "handle"]


def test_names_of_what_is_added_are_of_each_thing_one() -> None:
    with pytest.raises(ValueError, match="info: expected another name than weights"):
        Prioritized(weights="info")
    with pytest.raises(ValueError, match="mask: expected the name of a key, got an empty one"):
        Slices(2, mask="")
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": torch.ones(4, 1)}])
    with pytest.raises(ValueError, match=r"discount: expected another name .*'weights'"):
        buffer.sample(1, sampler=NStep(2, 0.5, Prioritized(), discount="weights"))
    with pytest.raises(ValueError, match=r"with_info: expected another name .*'discount'"):
        buffer.sample(1, sampler=NStep(2, 0.5), with_info="discount")
    batch = buffer.sample(1, sampler=NStep(2, 0.5, Prioritized(info="where")))
    assert set(batch) == {"rewards", "discount", "weights", "where"}


# -- rewards that are NaN, and rewards of few bits -----------------------------------------------


def with_nan(path: Path) -> Path:
    """960 rows in 40 episodes of 24 steps; the rewards of 4 rows, in 3 episodes, are NaN."""
    rewards = torch.ones(240, 4)
    for t, b in ((0, 0), (1, 0), (30, 1), (239, 3)):
        rewards[t, b] = torch.nan
    dones = (torch.arange(240) % 24 == 23)[:, None].expand(240, 4)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories([Trajectory(rewards=rewards, dones=dones, model_weights_id="v")])
    return path


def test_episodes_with_rewards_that_are_nan_are_counted_and_the_others_summarized(
    tmp_path: Path,
) -> None:
    version = summarize(Tables(with_nan(tmp_path / "store"))).versions["v"]
    assert (version.num_episodes, version.num_nan_returns) == (40, 3)
    returns = version.returns
    assert (returns.mean, returns.min, returns.median, returns.max) == (24, 24, 24, 24)
    assert version.lengths.mean == 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_rewards_of_few_bits_are_summed_in_many_and_rounded_once(dtype: torch.dtype) -> None:
    rewards = torch.tensor([1.0, -2.0, 0.5, 4.0])[:, None].to(dtype)
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": rewards, "t": torch.arange(4)[:, None]}])
    batch = buffer.sample(40, sampler=NStep(3, 0.5))
    assert batch["rewards"].dtype == dtype
    found = dict(zip(batch["t"].tolist(), batch["rewards"].float().tolist(), strict=True))
    sums = [1 - 1 + 0.125, -2 + 0.25 + 1, 0.5 + 2, 4]
    assert found == dict(enumerate(torch.tensor(sums).to(dtype).float().tolist()))


def test_half_precision_sums_that_are_too_large_are_infinite() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"rewards": torch.full((2, 1), 60_000.0, dtype=torch.float16)}])
    assert set(buffer.sample(20, sampler=NStep(2, 1.0))["rewards"].tolist()) == {60_000, np.inf}


# -- priorities ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    exponents=st.lists(st.floats(-300, 100), min_size=1, max_size=12),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    beta=st.sampled_from([0.0, 0.4, 1.0, 50.0, 1e6]),
    num_zeros=st.integers(0, 3),
)
def test_weights_of_extreme_priorities_are_finite_and_the_largest_is_1(
    exponents: list[float], alpha: float, beta: float, num_zeros: int
) -> None:
    priorities = np.array([0.0] * num_zeros + [10.0**e for e in exponents])
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"row": torch.arange(len(priorities))[:, None]}])
    sampler = Prioritized(alpha=alpha, beta=beta, eps=0.0)
    rows = buffer.sample(len(priorities), sampler=WithoutReplacement(), with_info=True)
    buffer.sample(1, sampler=sampler)
    sampler.update_priorities(rows["info"]["handle"], priorities[rows["row"].numpy()])
    batch = buffer.sample(50, sampler=sampler)
    weights = batch["weights"].double().numpy()
    assert np.isfinite(weights).all()
    assert weights.max() == 1
    assert (weights >= 0).all()
    drawn = priorities[batch["row"].numpy()]
    assert alpha == 0 or (drawn > 0).all()
    # The less likely row counts at least as much, but for rounding.
    order = drawn.argsort()
    assert (np.diff(weights[order]) <= 1e-6).all()


def test_weights_are_those_of_the_paper() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"row": torch.arange(4)[:, None]}])
    sampler = Prioritized(alpha=0.7, beta=0.5, eps=0.0)
    rows = buffer.sample(4, sampler=WithoutReplacement(), with_info=True)
    buffer.sample(1, sampler=sampler)
    priorities = np.array([1.0, 2.0, 5.0, 9.0])
    sampler.update_priorities(rows["info"]["handle"], priorities[rows["row"].numpy()])
    batch = buffer.sample(100, sampler=sampler)
    shares = priorities**0.7 / (priorities**0.7).sum()
    weights = (4 * shares) ** -0.5
    found = batch["weights"].numpy()
    drawn = batch["row"].numpy()
    np.testing.assert_allclose(found, weights[drawn] / weights[drawn].max(), rtol=1e-6)


def test_a_row_whose_priority_to_the_power_of_alpha_is_too_small_for_a_double_is_drawn() -> None:
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([{"row": torch.arange(3)[:, None]}])
    sampler = Prioritized(alpha=2.0, beta=50.0, eps=0.0)
    rows = buffer.sample(3, sampler=WithoutReplacement(), with_info=True)
    buffer.sample(1, sampler=sampler)
    sampler.update_priorities(rows["info"]["handle"], (rows["row"] == 1).double() * 1e-300)
    batch = buffer.sample(20, sampler=sampler)
    assert set(batch["row"].tolist()) == {1}
    assert set(batch["weights"].tolist()) == {1.0}
