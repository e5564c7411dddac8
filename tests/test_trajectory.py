"""What counts as a trajectory, its columns and metadata, and its parts."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from data import LookAlike

from mmbuf.errors import SchemaError
from mmbuf.trajectory import MAX_NESTING, Trajectory, fields_of

T, B = 4, 6


def numbered(steps: int = T, envs: int = B, *shape: int) -> torch.Tensor:
    """Distinct values, ``[steps, envs, *shape]`` float32."""
    whole = torch.arange(steps * envs * int(np.prod(shape)), dtype=torch.float32)
    return whole.reshape(steps, envs, *shape)


def texts() -> list[list[str]]:
    return [[f"t{t} b{b}" for b in range(B)] for t in range(T)]


def full() -> Trajectory:
    return Trajectory(
        max_episode_length=80,
        model_weights_id="w7",
        actions=numbered(T, B, 3),
        dones=numbered(T + 2, B) > 20,
        prev_values=numbered(T + 2, B, 1),
        curr_obs={"states": numbered(T, B, 9), "deep": {"text": texts()}},
        extra={"return_to_go": numbered()},
    )


def test_fields_have_the_documented_order_and_defaults() -> None:
    assert list(vars(Trajectory()).items()) == [
        ("max_episode_length", 0),
        ("model_weights_id", ""),
        ("actions", None),
        ("intervene_flags", None),
        ("rewards", None),
        ("terminations", None),
        ("truncations", None),
        ("dones", None),
        ("prev_logprobs", None),
        ("prev_values", None),
        ("versions", None),
        ("forward_inputs", {}),
        ("curr_obs", {}),
        ("next_obs", {}),
        ("extra", {}),
    ]


def test_a_trajectory_becomes_its_columns_and_metadata() -> None:
    trajectory = full()
    columns, length, weights = fields_of(trajectory)
    assert (length, weights) == (80, "w7")
    assert list(columns) == ["actions", "dones", "prev_values", "curr_obs", "return_to_go"]
    assert columns["return_to_go"] is trajectory.extra["return_to_go"]
    assert columns["curr_obs"]["deep"]["text"] is trajectory.curr_obs["deep"]["text"]


def test_a_foreign_dataclass_becomes_its_columns_and_metadata() -> None:
    item = LookAlike(5, "id", rewards=numbered(), next_obs={"states": numbered()})
    columns, length, weights = fields_of(item)
    assert (length, weights) == (5, "id")
    assert list(columns) == ["rewards", "next_obs"]
    assert columns["rewards"] is item.rewards


def test_a_foreign_dataclass_keeps_extra_as_a_column() -> None:
    @dataclass
    class Other:
        extra: dict[str, Any]

    leaf = numbered()
    assert fields_of(Other({"a": leaf}))[0] == {"extra": {"a": leaf}}


def test_a_mapping_becomes_its_columns_and_metadata() -> None:
    leaf = numbered()
    item = types.MappingProxyType(
        {"z": leaf, "max_episode_length": 3, "a": {"b": leaf}, "model_weights_id": "m"}
    )
    columns, length, weights = fields_of(item)
    assert (length, weights) == (3, "m")
    assert list(columns) == ["z", "a"]


def test_missing_metadata_is_zero_and_empty() -> None:
    assert fields_of({"a": 1}) == ({"a": 1}, 0, "")


def test_the_given_mapping_is_left_as_it_was() -> None:
    item = {"a": 1, "max_episode_length": 2, "b": {"c": None}}
    fields_of(item)
    assert item == {"a": 1, "max_episode_length": 2, "b": {"c": None}}


def test_none_and_dicts_that_hold_nothing_are_left_out() -> None:
    item: dict[str, Any] = {
        "a": None,
        "b": {},
        "c": {"d": None, "e": {"f": {}}},
        "g": {"h": 1, "i": None},
    }
    assert fields_of(item)[0] == {"g": {"h": 1}}


@pytest.mark.parametrize(
    "given", [7, np.int32(7), np.array(7), torch.tensor(7), torch.tensor(7, dtype=torch.uint8)]
)
def test_an_episode_length_of_any_integer_kind_is_an_int(given: Any) -> None:
    length = fields_of({"max_episode_length": given})[1]
    assert (type(length), length) == (int, 7)


@pytest.mark.parametrize(
    "given",
    [-1, True, np.True_, torch.tensor(True), 1.0, torch.tensor(1.0), torch.tensor([7]), "7"],
)
def test_another_episode_length_is_refused(given: Any) -> None:
    with pytest.raises(SchemaError, match=r"^max_episode_length: expected an int of 0 or more"):
        fields_of({"max_episode_length": given})


def test_a_weights_id_that_is_no_str_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^model_weights_id: expected a str, got int\.$"):
        fields_of({"model_weights_id": 7})


@pytest.mark.parametrize(
    ("given", "came"),
    [
        ([{}], "list"),
        ("path", "str"),
        (None, "NoneType"),
        (torch.zeros(2, 2), "Tensor"),
        (LookAlike, "the class LookAlike"),
        (Trajectory, "the class Trajectory"),
    ],
)
def test_another_kind_of_item_is_refused_by_name(given: Any, came: str) -> None:
    with pytest.raises(SchemaError, match=rf"expected a Trajectory, .*, got {came}\.$"):
        fields_of(given)


@pytest.mark.parametrize("name", ["actions", "curr_obs", "max_episode_length"])
def test_an_extra_column_named_like_a_field_is_refused(name: str) -> None:
    with pytest.raises(SchemaError, match=rf"^column '{name}': expected names in extra"):
        fields_of(Trajectory(extra={name: numbered()}))


def test_extra_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^extra: expected a mapping of columns, got list\.$"):
        fields_of(Trajectory(extra=[numbered()]))  # type: ignore[arg-type]


def test_a_key_that_is_no_str_is_refused_where_it_is() -> None:
    with pytest.raises(SchemaError, match=r"^key 3 under curr_obs: expected a str, got int\.$"):
        fields_of({"curr_obs": {3: numbered()}})


def test_a_dict_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(SchemaError, match=r"^column 'a.a.a...': expected at most 32 nested"):
        fields_of(loop)


def test_the_deepest_nesting_is_taken() -> None:
    item: Any = 1
    for _ in range(MAX_NESTING + 1):
        item = {"a": item}
    assert fields_of(item)[0] == item


def test_columns_come_back_as_the_same_trajectory() -> None:
    trajectory = full()
    again = Trajectory.from_columns(*fields_of(trajectory))
    assert again.actions is trajectory.actions
    assert again.extra == trajectory.extra
    assert (again.max_episode_length, again.model_weights_id) == (80, "w7")
    assert again.to_columns() == trajectory.to_columns()


def test_a_column_named_extra_survives_the_round_trip() -> None:
    columns = {"extra": {"a": numbered()}, "b": numbered()}
    assert Trajectory.from_columns(columns).to_columns() == columns


def test_metadata_among_columns_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^column 'model_weights_id': expected columns only"):
        Trajectory.from_columns({"model_weights_id": "w"})


def test_trajectories_compare_by_identity() -> None:
    trajectory = full()
    assert trajectory in [trajectory]
    assert trajectory != dataclasses.replace(trajectory)


def test_t_and_b_do_not_count_leading_and_trailing_steps() -> None:
    trajectory = Trajectory(
        dones=numbered(T + 2, B), prev_values=numbered(T + 2, B), rewards=numbered()
    )
    assert (trajectory.num_steps, trajectory.num_envs) == (T, B)


def test_t_of_flags_alone_is_the_smallest_length() -> None:
    trajectory = Trajectory(dones=numbered(T + 2, B), prev_values=numbered(T, B))
    assert (trajectory.num_steps, trajectory.num_envs) == (T, B)


def test_t_and_b_of_text_alone_are_those_of_its_lists() -> None:
    trajectory = Trajectory(curr_obs={"text": texts()})
    assert (trajectory.num_steps, trajectory.num_envs) == (T, B)


@pytest.mark.parametrize("name", ["num_steps", "num_envs"])
def test_an_empty_trajectory_has_neither_t_nor_b(name: str) -> None:
    with pytest.raises(ValueError, match="expected at least one column, got none"):
        getattr(Trajectory(), name)


def test_equal_parts_hold_their_environments() -> None:
    trajectory = full()
    parts = trajectory.split(3)
    assert [part.num_envs for part in parts] == [2, 2, 2]
    middle = parts[1]
    assert torch.equal(middle.actions, numbered(T, B, 3)[:, 2:4])  # type: ignore[arg-type]
    assert torch.equal(middle.dones, (numbered(T + 2, B) > 20)[:, 2:4])  # type: ignore[arg-type]
    assert torch.equal(middle.prev_values, numbered(T + 2, B, 1)[:, 2:4])  # type: ignore[arg-type]
    assert torch.equal(middle.curr_obs["states"], numbered(T, B, 9)[:, 2:4])
    assert torch.equal(middle.extra["return_to_go"], numbered()[:, 2:4])


def test_parts_of_given_sizes_split_text_too() -> None:
    parts = full().split((1, 5))
    assert parts[0].curr_obs["deep"]["text"] == [[f"t{t} b0"] for t in range(T)]
    assert parts[1].curr_obs["deep"]["text"] == [step[1:] for step in texts()]


def test_parts_have_the_metadata_of_the_whole() -> None:
    parts = full().split([2, 4])
    assert [(p.max_episode_length, p.model_weights_id) for p in parts] == [(80, "w7")] * 2


def test_parts_are_contiguous_and_own_their_memory() -> None:
    trajectory = Trajectory(rewards=numbered(), extra={"array": np.zeros((T, B))})
    first, _ = trajectory.split(2)
    assert first.rewards is not None
    assert trajectory.rewards is not None
    trajectory.rewards.fill_(-1)
    trajectory.extra["array"].fill(-1)
    assert torch.equal(first.rewards, numbered()[:, :3])
    assert first.rewards.is_contiguous()
    assert first.rewards.untyped_storage().nbytes() == T * 3 * 4
    assert np.array_equal(first.extra["array"], np.zeros((T, 3)))


@pytest.mark.parametrize("parts", [4, 0, -1])
def test_a_number_that_does_not_divide_b_is_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=rf"divides B = 6, got {parts}\.$"):
        full().split(parts)


@pytest.mark.parametrize("sizes", [[1, 2], [], [7, -1], [0, 6]])
def test_sizes_that_do_not_make_up_b_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"positive sizes that sum to B = 6, got \["):
        full().split(sizes)


def test_columns_of_different_b_are_not_split() -> None:
    with pytest.raises(SchemaError, match=r"^column 'extra_one': expected B = 6"):
        Trajectory(rewards=numbered(), extra={"extra_one": numbered(T, B - 1)}).split(1)


# -- select ---------------------------------------------------------------------------------------


def test_selected_rows_keep_all_their_columns_together() -> None:
    mask = torch.zeros(T, B, dtype=torch.bool)
    mask[[0, 3], 1] = True
    mask[2, 4] = True
    one, four = full().select(mask)
    assert (one.num_steps, one.num_envs) == (2, 1)
    assert (four.num_steps, four.num_envs) == (1, 1)
    for part, steps, env in ((one, [0, 3], 1), (four, [2], 4)):
        assert torch.equal(part.actions, numbered(T, B, 3)[steps, env, None])  # type: ignore[arg-type]
        states = part.curr_obs["states"]
        assert torch.equal(states, numbered(T, B, 9)[steps, env, None])
        assert part.curr_obs["deep"]["text"] == [[f"t{t} b{env}"] for t in steps]
        assert torch.equal(part.extra["return_to_go"], numbered()[steps, env, None])
        assert (part.max_episode_length, part.model_weights_id) == (80, "w7")


def test_selected_flags_and_values_are_those_of_their_rows_and_not_shifted() -> None:
    dones = torch.zeros(T + 2, 1, dtype=torch.bool)
    dones[[2, 5]] = True  # after the leading step of each of two epochs: rows 1 and 3
    values = torch.arange(T + 2.0).view(T + 2, 1)  # rows 0, 1, 3, 4, before a trailing step each
    trajectory = Trajectory(rewards=numbered(T, 1), dones=dones, prev_values=values)
    (part,) = trajectory.select(torch.tensor([[False], [True], [True], [True]]))
    assert part.dones is not None
    assert part.prev_values is not None
    assert part.dones.tolist() == [[True], [False], [True]]
    assert part.prev_values.tolist() == [[1.0], [3.0], [4.0]]


@pytest.mark.parametrize(("mode", "steps"), [("any", [1, 2]), ("all", [2])])
def test_a_row_of_several_flags_is_selected_by_any_or_by_all(mode: str, steps: list[int]) -> None:
    flags = torch.tensor([[[0, 0]], [[0, 1]], [[1, 1]]], dtype=torch.bool)
    trajectory = Trajectory(rewards=numbered(3, 1), intervene_flags=flags)
    (part,) = trajectory.select(flags, mode)
    assert torch.equal(part.rewards, numbered(3, 1)[steps])  # type: ignore[arg-type]


def test_of_no_row_there_is_no_part() -> None:
    assert full().select(np.zeros((T, B), np.bool_)) == []


def test_selected_parts_own_their_memory_and_keep_every_dtype() -> None:
    states = numbered().to(torch.bfloat16)
    trajectory = Trajectory(curr_obs={"states": states})
    parts = trajectory.select(torch.ones(T, B))
    states.fill_(-1)
    assert [part.curr_obs["states"].dtype for part in parts] == [torch.bfloat16] * B
    whole = torch.cat([part.curr_obs["states"] for part in parts], 1)
    assert torch.equal(whole, numbered().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("mask", "mode", "message"),
    [
        (torch.ones(T, B + 1), "any", r"expected the shape \[T, B\] = \[4, 6, ...\], got \[4, 7\]"),
        (torch.ones(T), "any", r"got \[4\]"),
        (torch.ones(T, B), "most", r"mode: expected 'any' or 'all', got 'most'"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: torch.Tensor, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        full().select(mask, mode)
