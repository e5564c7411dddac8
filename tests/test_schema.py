"""Columns, schemas and payloads: every leaf becomes rows and comes back, or is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from data import DTYPES, FLOAT8, NUMPY_DTYPES, bits, random_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmbuf import TrajectoryReplayBuffer
from mmbuf.errors import SchemaError
from mmbuf.schema import (
    LEADING,
    UNSTEADY,
    Column,
    Payload,
    Schema,
    TextTable,
    interleave,
    interleave_text,
    measure,
)

BIG = (600, 250)  # T, B of a float32 or complex64 column above the size that torch copies
STORAGE = (
    {name: name for name in NUMPY_DTYPES} | {"bfloat16": "uint16"} | dict.fromkeys(FLOAT8, "uint8")
)


def copied(payload: Payload, position: int = 0) -> np.ndarray[Any, Any]:
    """The rows of one column, copied into memory that held something else."""
    column = payload.schema.columns[position]
    rows = np.empty((payload.rows[position], *column.row_shape), column.storage)
    rows.reshape(-1).view(np.uint8)[...] = 0xA5
    payload.copy_rows(position, rows)
    return rows


def round_trip(leaf: Any, *path: str) -> torch.Tensor:
    """``leaf`` measured, copied to rows and put together again."""
    nested: Any = leaf
    for key in reversed(path or ("x",)):
        nested = {key: nested}
    payload = measure(nested)
    column = payload.schema.columns[0]
    whole = interleave(copied(payload), column, payload.num_steps, payload.num_envs)
    return column.tensor(whole)


# -- the dtype table ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(), (1,), (3,), (2, 3, 1)])
def test_random_bits_of_every_torch_dtype_come_back(dtype: str, row_shape: tuple[int, ...]) -> None:
    leaf = random_bits(dtype, (4, 3, *row_shape))
    back = round_trip(leaf)
    assert (back.dtype, back.shape) == (leaf.dtype, leaf.shape)
    assert bits(back) == bits(leaf)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_random_bits_of_every_numpy_dtype_come_back(dtype: str) -> None:
    leaf = random_bits(dtype, (4, 3, 2)).numpy()
    back = round_trip(leaf)
    assert back.numpy().dtype == leaf.dtype
    assert bits(back) == bits(leaf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_of_each_dtype_has_the_documented_storage(dtype: str) -> None:
    column = measure({"x": random_bits(dtype, (2, 2, 3))}).schema.columns[0]
    assert column == Column(("x",), dtype, (3,))
    assert column.storage == np.dtype(STORAGE[dtype])
    assert column.row_bytes == 3 * np.dtype(STORAGE[dtype]).itemsize


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_size_dimension_of_every_dtype_comes_back(dtype: str) -> None:
    leaf = torch.empty((4, 3, 0, 2), dtype=getattr(torch, dtype))
    payload = measure({"x": leaf})
    assert payload.schema.columns[0].row_bytes == 0
    assert payload.size_bytes == 0
    back = round_trip(leaf)
    assert (back.dtype, back.shape) == (leaf.dtype, leaf.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 2), (700, 500, 4)], ids=["small", "large"])
def test_transposed_tensors_of_every_dtype_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    leaf = random_bits(dtype, (shape[1], shape[0], shape[2])).transpose(0, 1)
    assert not leaf.is_contiguous()
    assert bits(round_trip(leaf)) == bits(leaf)


FLOAT_BITS = {
    "float16": (np.uint16, [0x7C00, 0xFC00, 0x7E01, 0xFDFF, 0x7D55, 0x0001, 0x83FF, 0x8000]),
    "bfloat16": (np.uint16, [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x807F, 0x8000]),
    "float32": (
        np.uint32,
        [0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 1, 0x807FFFFF, 0x80000000],
    ),
    "float64": (
        np.uint64,
        [
            *(0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (1 << 64) - 1, (0x7FF8 << 48) + 0xBEEF),
            *(1, (1 << 63) + (1 << 52) - 1, 1 << 63),
        ],
    ),
}


@pytest.mark.parametrize("dtype", FLOAT_BITS)
def test_inf_nan_payloads_subnormals_and_signed_zero_come_back(dtype: str) -> None:
    storage, patterns = FLOAT_BITS[dtype]
    leaf = torch.from_numpy(np.array(patterns, storage)).view(getattr(torch, dtype)).reshape(2, 4)
    assert round_trip(leaf).contiguous().view(torch.uint8).numpy().tobytes() == bits(leaf)
    assert torch.isnan(leaf).sum() == 3
    assert torch.isinf(leaf).sum() == 2


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_all_256_patterns_of_a_float8_come_back(dtype: str) -> None:
    leaf = torch.arange(256).to(torch.uint8).view(getattr(torch, dtype)).reshape(16, 16)
    assert round_trip(leaf).view(torch.uint8).flatten().tolist() == list(range(256))


# -- kinds of tensors and arrays -----------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(2.0 * 3 * 8).reshape(2, 3, 8)
    large = torch.arange(600.0 * 500).reshape(600, 500)
    numbers = torch.complex(base, -base)
    return {
        "strided": base[..., ::2],
        "transposed": base.transpose(0, 2),
        "expanded": base[:, :1, :1].expand(2, 5, 7),
        "requires_grad": base.clone().requires_grad_(),
        "of_a_graph": base.clone().requires_grad_() * 2,
        "parameter": torch.nn.Parameter(base.clone()),
        "conj": numbers.conj(),
        "neg": numbers.conj().imag,
        "real": numbers.real,
        "offset": base.flatten()[5:11].reshape(3, 2),
        "large_strided": large[:, ::2],
        "large_transposed": large.T,
        "large_expanded": large[:, :1].expand(600, 500),
        "large_requires_grad": large.clone().requires_grad_(),
        "large_conj": torch.complex(large, large).conj(),
        "large_neg": torch.complex(large, large).conj().imag,
    }


@pytest.mark.parametrize("kind", tensors())
def test_a_tensor_of_any_layout_comes_back(kind: str) -> None:
    leaf = tensors()[kind]
    back = round_trip(leaf)
    assert back.dtype == leaf.dtype
    assert torch.equal(back, leaf.detach())
    assert not back.requires_grad


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    base = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    large = np.arange(600 * 500, dtype=np.float32).reshape(600, 500)
    read_only, large_read_only = base.copy(), large.copy()
    read_only.flags.writeable = False
    large_read_only.flags.writeable = False
    record = np.zeros((600, 500), [("flag", "u1"), ("value", "f4")])
    record["value"] = large
    unaligned = np.zeros(large.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(large.shape)
    unaligned[...] = large
    return {
        "strided": base[..., ::2],
        "transposed": base.T,
        "fortran": np.asfortranarray(base),
        "expanded": np.broadcast_to(base[:, :1], (2, 5, 8)),
        "read_only": read_only,
        "negative_strides": base[::-1, :, ::-1],
        "foreign_byte_order": base.astype(base.dtype.newbyteorder()),
        "record_field": record["value"][:4],
        "unaligned": unaligned[:4],
        "large_strided": large[:, ::2],
        "large_transposed": large.T,
        "large_expanded": np.broadcast_to(large[:1], (600, 500)),
        "large_read_only": large_read_only,
        "large_negative_strides": large[::-1, ::-1],
        "large_foreign_byte_order": large.astype(large.dtype.newbyteorder()),
        "large_record_field": record["value"],
        "large_unaligned": unaligned,
    }


@pytest.mark.parametrize("kind", arrays())
def test_an_array_of_any_layout_comes_back(kind: str) -> None:
    leaf = arrays()[kind]
    back = round_trip(leaf).numpy()
    assert back.dtype == np.float32
    assert np.array_equal(back, leaf)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_foreign_byte_order_of_every_dtype_comes_back_as_the_same_values(dtype: str) -> None:
    leaf = random_bits(dtype, (4, 3)).numpy()
    assert bits(round_trip(leaf.astype(leaf.dtype.newbyteorder()))) == bits(leaf)


def test_the_leaves_are_left_as_they_were() -> None:
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    before = leaf.detach().clone()
    rows = copied(measure({"x": leaf}))
    rows[...] = -1
    assert torch.equal(leaf.detach(), before)
    assert leaf.requires_grad


# -- rows ------------------------------------------------------------------------------------


def test_row_number_t_times_b_plus_b_holds_the_entry_t_b() -> None:
    leaf = torch.arange(4 * 3 * 2).reshape(4, 3, 2)
    rows = copied(measure({"x": leaf}))
    for t in range(4):
        for b in range(3):
            assert rows[t * 3 + b].tolist() == leaf[t, b].tolist()


def test_text_rows_are_in_the_same_order() -> None:
    payload = measure({"x": [["00", "01", "02"], ["10", "11", "12"]]})
    assert payload.texts(0) == ["00", "01", "02", "10", "11", "12"]
    assert payload.schema.columns == (Column(("x",), "text", ()),)
    assert (payload.num_steps, payload.num_envs) == (2, 3)


@pytest.mark.parametrize(
    "leaf",
    [
        (("a", "ü"), ("", "\0")),
        [("a", "ü"), ["", "\0"]],
        np.array([["a", "ü"], ["", "\0"]], object),
    ],
)
def test_text_of_any_sequence_kind_is_taken(leaf: Any) -> None:
    assert measure({"x": leaf}).texts(0) == ["a", "ü", "", "\0"]


def test_text_of_a_numpy_string_array_is_plain_str() -> None:
    texts = measure({"x": np.array([["a", "日本"]])}).texts(0)
    assert texts == ["a", "日本"]
    assert [type(text) for text in texts] == [str, str]


def test_sizes_count_text_codes_and_left_out_rows() -> None:
    payload = measure(
        {
            "rewards": torch.zeros(4, 3),
            "dones": torch.zeros(5, 3, dtype=torch.bool),
            "x": [["a"] * 3] * 4,
        }
    )
    assert payload.rows == (12, 15, 12)
    assert payload.extra_steps == (0, 1, 0)
    assert payload.num_samples == 12
    assert payload.size_bytes == 12 * 4 + 15 + 12 * 4


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"prev_logprobs": torch.zeros(4, 3, 7), "rewards": torch.zeros(4, 3, 2)}, (4, 3, 7)),
        ({"rewards": torch.zeros(4, 3, 2), "a": torch.zeros(4, 3)}, (4, 3, 2)),
        ({"a": torch.zeros(4, 3, 5), "b": {"rewards": torch.zeros(4, 3, 9)}}, (4, 3)),
    ],
)
def test_the_shape_is_that_of_logprobs_else_of_rewards(
    fields: dict[str, Any], shape: tuple[int, ...]
) -> None:
    assert measure(fields).shape == shape


# -- left-out steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path[0] for path in LEADING))
def test_each_sampled_flag_belongs_to_its_action(name: str) -> None:
    # Step 0 of the flags is the state before the first action; action t ends in flag t + 1.
    flags = torch.tensor([[True, False], [False, False], [True, True], [False, True]])
    payload = measure({"actions": torch.zeros(3, 2, 1), name: flags})
    assert payload.extra_steps == (0, 1)
    rows = copied(payload, 1)
    assert rows[:6].tolist() == [False, False, True, True, False, True]
    assert rows[6:].tolist() == [True, False]


def test_the_last_step_of_prev_values_is_left_out_of_the_rows() -> None:
    values = torch.arange(4.0 * 2).reshape(4, 2, 1)
    rows = copied(measure({"actions": torch.zeros(3, 2, 1), "prev_values": values}), 1)
    assert rows[:6].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert rows[6:].flatten().tolist() == [6, 7]


def test_every_epoch_leaves_its_first_flag_out() -> None:
    flags = torch.arange(6 * 1).reshape(6, 1)
    rows = copied(measure({"rewards": torch.zeros(4, 1), "dones": flags}), 1)
    assert rows.tolist() == [1, 2, 4, 5, 0, 3]


def test_every_epoch_leaves_its_last_value_out() -> None:
    values = torch.arange(6 * 1).reshape(6, 1)
    rows = copied(measure({"rewards": torch.zeros(4, 1), "prev_values": values}), 1)
    assert rows.tolist() == [0, 1, 3, 4, 2, 5]


@pytest.mark.parametrize("name", sorted(path[0] for path in UNSTEADY))
@pytest.mark.parametrize("extra", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex64"])
def test_steps_and_left_out_steps_are_put_together_again(name: str, extra: int, dtype: str) -> None:
    leaf = random_bits(dtype, (6 + extra, 4, 2))
    payload = measure({"rewards": torch.zeros(6, 4), name: leaf})
    column = payload.schema.columns[1]
    rows = copied(payload, 1)
    assert rows.shape == ((6 + extra) * 4, 2)
    whole = column.tensor(interleave(rows, column, 6, 4))
    assert whole.shape == leaf.shape
    assert bits(whole) == bits(leaf)


def test_left_out_steps_of_a_large_strided_array_come_back() -> None:
    leaf = np.arange(601 * 1000, dtype=np.float32).reshape(601, 1000)[::-1, ::2]
    payload = measure({"rewards": torch.zeros(600, 500), "prev_values": leaf})
    column = payload.schema.columns[1]
    assert np.array_equal(interleave(copied(payload, 1), column, 600, 500), leaf)


def test_flags_of_t_steps_have_nothing_left_out() -> None:
    payload = measure({"rewards": torch.zeros(4, 2), "dones": torch.zeros(4, 2)})
    assert payload.rows == (8, 8)


@pytest.mark.parametrize("path", ["actions", "curr_obs.dones", "forward_inputs.deep.action"])
def test_every_epoch_leaves_the_last_step_of_any_other_column_out(path: str) -> None:
    leaf: Any = torch.arange(6 * 2).reshape(6, 2)
    nested = leaf
    for key in reversed(path.split(".")):
        nested = {key: nested}
    payload = measure({"rewards": torch.zeros(4, 2), **nested})
    assert payload.extra_steps == (0, 2)
    assert copied(payload, 1).tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11]


@pytest.mark.parametrize(
    ("path", "rows"),
    [("task", ["a", "b", "d", "e", "c", "f"]), ("dones", ["b", "c", "e", "f", "a", "d"])],
)
def test_text_has_left_out_steps_as_numbers_do(path: str, rows: list[str]) -> None:
    leaf = [[string] for string in "abcdef"]
    payload = measure({"rewards": torch.zeros(4, 1), path: leaf})
    assert payload.texts(1) == rows
    assert payload.rows == (4, 6)
    assert interleave_text(rows, payload.schema.columns[1], 4, 1) == leaf


def zeros(lengths: Mapping[str, int]) -> dict[str, Any]:
    """Columns by their names, nested, of so many steps of one environment."""
    fields: dict[str, Any] = {}
    for name, length in lengths.items():
        home = fields
        *outer, last = name.split(".")
        for key in outer:
            home = home.setdefault(key, {})
        home[last] = torch.zeros(length, 1)
    return fields


TOLD: dict[str, tuple[dict[str, int], int, tuple[int, ...]]] = {
    "rewards": ({"actions": 5, "curr_obs.a": 5, "rewards": 4}, 4, (1, 1, 0)),
    "rewards of a kind each": ({"actions": 5, "rewards.a": 4, "rewards.b": 4}, 4, (1, 0, 0)),
    "curr_obs": ({"x": 6, "y": 6, "curr_obs.a": 4, "z": 6}, 4, (2, 2, 0, 2)),
    "most of curr_obs": ({"curr_obs.a": 5, "curr_obs.b": 4, "curr_obs.c": 4}, 4, (1, 0, 0)),
    "most": ({"x": 4, "y": 5, "z": 4}, 4, (0, 1, 0)),
    "flags count for nothing": (
        {"dones": 5, "truncations": 5, "x": 4, "prev_values": 5, "y": 5},
        4,
        (1, 1, 0, 1, 1),
    ),
    "the shorter of two": ({"x": 5, "y": 4}, 4, (1, 0)),
    "one beside flags": ({"dones": 4, "x": 4}, 4, (0, 0)),
    "flags and values alone": ({"prev_values": 5, "dones": 4}, 4, (1, 0)),
    "all alike": ({"x": 5, "y": 5, "dones": 5}, 5, (0, 0, 0)),
    "one step": ({"rewards": 1, "dones": 2, "actions": 2}, 1, (0, 1, 1)),
    "an epoch a step": ({"rewards": 3, "dones": 6, "actions": 6}, 3, (0, 3, 3)),
}


@pytest.mark.parametrize("told_by", TOLD)
def test_t_is_that_of_rewards_else_of_curr_obs_else_of_most(told_by: str) -> None:
    lengths, num_steps, extra_steps = TOLD[told_by]
    payload = measure(zeros(lengths))
    assert (payload.num_steps, payload.extra_steps) == (num_steps, extra_steps)


UNTOLD: dict[str, tuple[dict[str, int], str]] = {
    "longer rewards": (
        {"rewards": 5, "x": 4},
        r"^column 'x': expected T = 5 steps as in column 'rewards', or T \+ E .*, got 4\.$",
    ),
    "one shorter than most": (
        {"x": 4, "y": 5, "z": 5},
        r"^column 'x': expected T = 5 steps as in column 'y', or T \+ E .*, got 4\.$",
    ),
    "all longer but flags": (
        {"x": 5, "y": 5, "dones": 4},
        r"^column 'dones': expected T = 5 steps as in column 'x', or T \+ E .*, got 4\.$",
    ),
    "two numbers of epochs": (
        {"rewards": 4, "dones": 6, "actions": 5},
        r"^column 'actions': expected T = 4 steps or T \+ E = 6 as in column 'dones', got 5",
    ),
    "more epochs than steps": (
        {"rewards": 4, "actions": 12},
        r"^column 'actions': expected T = 4 steps .*, got 12\.$",
    ),
    "no steps of rewards": ({"rewards": 0, "x": 1}, r"^trajectory: .* got T = 0, B = 1\.$"),
    "no steps of another": ({"rewards": 2, "x": 0}, r"^column 'x': expected T = 2 .* got 0\.$"),
}


@pytest.mark.parametrize("kind", UNTOLD)
def test_lengths_that_no_epochs_explain_are_refused(kind: str) -> None:
    lengths, message = UNTOLD[kind]
    with pytest.raises(SchemaError, match=message):
        measure(zeros(lengths))


def test_what_was_stored_with_two_numbers_of_epochs_is_still_read() -> None:
    payload = measure(zeros({"rewards": 4, "dones": 6, "prev_values": 5}), is_stored=True)
    assert payload.extra_steps == (0, 2, 1)
    payload.schema.check_rows([4, 6, 5], 4, 1)


@pytest.mark.parametrize(
    ("lengths", "version"),
    [
        ({"rewards": 4, "actions": 4}, 1),
        ({"rewards": 4, "dones": 6, "prev_values": 6}, 1),
        ({"rewards": 4, "dones": 6, "actions": 6}, 2),
    ],
)
def test_only_what_an_older_mmbuf_cannot_read_is_of_version_2(
    lengths: dict[str, int], version: int
) -> None:
    payload = measure(zeros(lengths))
    assert payload.schema.version_of(payload.rows, payload.num_samples) == version


def test_text_with_left_out_steps_is_of_version_2() -> None:
    payload = measure({"rewards": torch.zeros(1, 1), "dones": [["a"], ["b"]]})
    assert payload.schema.version_of(payload.rows, 1) == 2


def test_interleave_without_left_out_rows_is_a_view() -> None:
    rows = np.arange(12).reshape(6, 2)
    whole = interleave(rows, Column(("x",), "int64", (2,)), 3, 2)
    assert whole.shape == (3, 2, 2)
    assert whole.base is rows.base


# -- nesting and names ---------------------------------------------------------------------------


def paths_of(nested: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of the leaves in the order of the keys."""
    paths = []
    for key, value in nested.items():
        if isinstance(value, Mapping):
            paths += paths_of(value, (*prefix, key))
        else:
            paths.append((*prefix, key))
    return paths


def test_nested_dicts_keep_the_order_of_their_keys() -> None:
    leaf = torch.zeros(2, 2)
    fields = {"z": {"b": leaf, "a": {"y": leaf, "x": leaf}, "c": leaf}, "a": leaf, "m": {"q": leaf}}
    schema = measure(fields).schema
    assert [column.path for column in schema.columns] == paths_of(fields)
    nested = schema.nest(list(range(6)))
    assert paths_of(nested) == paths_of(fields)
    assert list(nested) == ["z", "a", "m"]
    assert list(nested["z"]) == ["b", "a", "c"]
    assert nested == {"z": {"b": 0, "a": {"y": 1, "x": 2}, "c": 3}, "a": 4, "m": {"q": 5}}


def test_each_nest_makes_new_dicts() -> None:
    schema = measure({"a": {"b": torch.zeros(1, 1)}}).schema
    first, second = schema.nest([1]), schema.nest([2])
    assert (first, second) == ({"a": {"b": 1}}, {"a": {"b": 2}})


def test_a_later_trajectory_may_order_its_keys_otherwise() -> None:
    schema = measure({"a": torch.zeros(1, 1), "b": {"c": torch.zeros(1, 1)}}).schema
    payload = measure({"b": {"c": torch.ones(1, 1)}, "a": torch.zeros(1, 1)}, schema)
    assert payload.schema is schema
    assert [copied(payload, i).tolist() for i in range(2)] == [[0.0], [1.0]]


ODD_PATHS = [
    *(("a", "b"), ("a.b",), ("a\\", "b"), ("a\\.b",), ("a\\", ".b"), ("a", "\\.b"), ("a\\\\.b",)),
    *(("a", "", "b"), ("a..b",), ("a.", "b"), ("a", ".b"), ("",), ("", ""), (".",), ("\\",)),
    *(("a/b",), ("../../etc",), ("é",), ("e\u0301",), ("日本", "語"), ("a\0b",), ("a\nb", "\t")),
]


def test_paths_that_look_alike_have_distinct_names() -> None:
    names = [Column(path, "bool", ()).name for path in ODD_PATHS]
    assert len(set(names)) == len(ODD_PATHS)


@pytest.mark.parametrize("path", ODD_PATHS)
def test_odd_keys_come_back(path: tuple[str, ...]) -> None:
    payload = measure({path[0]: torch.ones(1, 1)} if len(path) == 1 else _nested(path))
    assert payload.schema.columns[0].path == path
    assert Schema.from_json(payload.schema.to_json()) == payload.schema


def _nested(path: tuple[str, ...]) -> dict[str, Any]:
    value: Any = torch.ones(1, 1)
    for key in reversed(path):
        value = {key: value}
    return dict(value)


keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(keys, min_size=1, max_size=4).map(tuple), min_size=2, unique=True))
def test_distinct_paths_have_distinct_names(paths: list[tuple[str, ...]]) -> None:
    assert len({Column(path, "bool", ()).name for path in paths}) == len(paths)


leaf_specs = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 2**32),
)
nested_specs = st.dictionaries(
    keys,
    st.recursive(
        leaf_specs, lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3), max_leaves=6
    ),
    min_size=1,
    max_size=4,
)


def _built(spec: Any, num_steps: int, num_envs: int) -> Any:
    if isinstance(spec, dict):
        return {key: _built(value, num_steps, num_envs) for key, value in spec.items()}
    dtype, row_shape, seed = spec
    return random_bits(dtype, (num_steps, num_envs, *row_shape), seed)


def _assert_same(back: Any, leaf: Any) -> None:
    if isinstance(leaf, dict):
        assert list(back) == list(leaf)
        for key in leaf:
            _assert_same(back[key], leaf[key])
    else:
        assert (back.dtype, back.shape) == (leaf.dtype, leaf.shape)
        assert bits(back) == bits(leaf)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nested_specs, st.integers(1, 4), st.integers(1, 3))
def test_random_nested_dicts_come_back(spec: dict[str, Any], num_steps: int, num_envs: int) -> None:
    fields = _built(spec, num_steps, num_envs)
    payload = measure(fields)
    leaves = [
        column.tensor(interleave(copied(payload, i), column, num_steps, num_envs))
        for i, column in enumerate(payload.schema.columns)
    ]
    _assert_same(payload.schema.nest(leaves), fields)
    _assert_same(payload.schema.nest(payload.schema.leaves(fields, "batch")), fields)


# -- the schema itself ---------------------------------------------------------------------------


def full_schema() -> Schema:
    fields = {dtype: random_bits(dtype, (1, 1, 2)) for dtype in DTYPES}
    return measure({"dtypes": fields, "text": [["a"]], "none": torch.zeros(1, 1, 0)}).schema


def test_a_schema_survives_json() -> None:
    schema = full_schema()
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert hash(again) == hash(schema)


def test_schemas_of_other_order_differ() -> None:
    a, b = Column(("a",), "bool", ()), Column(("b",), "bool", ())
    assert Schema([a, b]) != Schema([b, a])


def test_a_schema_shows_its_columns() -> None:
    schema = Schema([Column(("a", "b"), "bool", ()), Column(("c",), "text", ())])
    assert repr(schema) == "Schema(a.b: bool[], c: text[])"


def test_a_path_that_comes_twice_is_refused() -> None:
    with pytest.raises(SchemaError, match="expected each path once, got one twice"):
        Schema([Column(("a",), "bool", ()), Column(("a",), "int8", ())])


@pytest.mark.parametrize("order", [1, -1])
def test_a_path_that_is_leaf_and_dict_is_refused(order: int) -> None:
    columns = [Column(("a", "b"), "bool", ()), Column(("a", "b", "c", "d"), "bool", ())]
    with pytest.raises(SchemaError, match=r"^column 'a\.b': expected a leaf or a dict, got both"):
        Schema(columns[::order])


def test_a_column_of_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"^column 'a\.b': expected .*bfloat16.* got 'float128'"):
        Column(("a", "b"), "float128", ())


def test_a_column_without_a_path_is_refused() -> None:
    with pytest.raises(SchemaError):
        Schema([Column((), "bool", ())])


@pytest.mark.parametrize("method", ["leaves", "pick"])
def test_values_are_found_in_the_order_of_the_columns(method: str) -> None:
    schema = measure({"a": torch.zeros(1, 1), "b": {"c": torch.zeros(1, 1)}}).schema
    assert getattr(schema, method)({"b": {"c": 2}, "a": 1}, "batch") == [1, 2]


def test_pick_passes_other_values_over() -> None:
    schema = measure({"a": torch.zeros(1, 1)}).schema
    assert schema.pick({"a": 1, "z": 2}, "out") == [1]


@pytest.mark.parametrize("method", ["leaves", "pick"])
@pytest.mark.parametrize("nested", [{"a": 1}, {"a": 1, "b": {}}, {"a": 1, "b": {"d": 2}}])
def test_a_missing_value_is_refused(method: str, nested: dict[str, Any]) -> None:
    schema = measure({"a": torch.zeros(1, 1), "b": {"c": torch.zeros(1, 1)}}).schema
    with pytest.raises(SchemaError, match=r"column 'b\.[cd]'"):
        getattr(schema, method)(nested, "out")


# -- misfits ---------------------------------------------------------------------------------


def example() -> dict[str, Any]:
    return {
        "actions": torch.zeros(4, 3, 7),
        "dones": torch.zeros(5, 3, dtype=torch.bool),
        "prev_values": torch.zeros(5, 3, 1),
        "curr_obs": {"states": torch.zeros(4, 3, 2), "task": [["a"] * 3] * 4},
    }


def changed(path: str, leaf: Any) -> dict[str, Any]:
    """The example with one leaf replaced, or removed if it is None."""
    fields = example()
    *outer, last = path.split(".")
    home = fields
    for key in outer:
        home = home[key]
    if leaf is None:
        del home[last]
    else:
        home[last] = leaf
    return fields


MISFITS: dict[str, tuple[str, Any, str]] = {
    "missing": (
        "curr_obs.states",
        None,
        r"^column 'curr_obs\.states': expected in the trajectory, but it is missing\.$",
    ),
    "unknown": (
        "curr_obs.depth",
        torch.zeros(4, 3),
        r"^column 'curr_obs\.depth': expected no such column in the trajectory\. The schema has: "
        r"actions, dones, prev_values, curr_obs\.states, curr_obs\.task\.$",
    ),
    "a dict for a leaf": (
        "actions",
        {"x": torch.zeros(4, 3, 7)},
        r"^column 'actions\.x': expected no such column",
    ),
    "a leaf for a dict": (
        "curr_obs",
        torch.zeros(4, 3),
        r"^column 'curr_obs': expected no such column",
    ),
    "dtype": (
        "actions",
        torch.zeros(4, 3, 7, dtype=torch.float64),
        r"^column 'actions': expected float32 rows of shape \(7,\), got float64 \(7,\)\.$",
    ),
    "unsupported dtype": (
        "actions",
        np.zeros((4, 3, 7), "S3"),
        r"^column 'actions': expected float32 rows of shape \(7,\), got \|S3 \(7,\)\.$",
    ),
    "row shape": (
        "actions",
        torch.zeros(4, 3, 8),
        r"^column 'actions': expected float32 rows of shape \(7,\), got float32 \(8,\)\.$",
    ),
    "row rank": (
        "actions",
        torch.zeros(4, 3),
        r"^column 'actions': expected float32 rows of shape \(7,\), got float32 \(\)\.$",
    ),
    "text for numbers": (
        "actions",
        [["a"] * 3] * 4,
        r"^column 'actions': expected float32 rows of shape \(7,\), got text \(\)\.$",
    ),
    "numbers for text": (
        "curr_obs.task",
        torch.zeros(4, 3),
        r"^column 'curr_obs\.task': expected text rows of shape \(\), got float32 \(\)\.$",
    ),
    "fewer steps": (
        "actions",
        torch.zeros(3, 3, 7),
        r"^column 'actions': expected T = 4 steps as in column 'curr_obs\.states', or T \+ E with "
        r"E a divisor of T, got 3\.$",
    ),
    "E of another column": (
        "actions",
        torch.zeros(6, 3, 7),
        r"^column 'dones': expected T = 4 steps or T \+ E = 6 as in column 'actions', got 5: one "
        r"trajectory has one number of rollout epochs, E\.$",
    ),
    "B": (
        "curr_obs.states",
        torch.zeros(4, 2, 2),
        r"^column 'curr_obs\.states': expected B = 3 as in the other columns, got 2",
    ),
    "B of text": (
        "curr_obs.task",
        [["a"] * 4] * 4,
        r"^column 'curr_obs\.task': expected B = 3 as in the other columns, got 4",
    ),
    "B of flags": (
        "dones",
        torch.zeros(5, 2, dtype=torch.bool),
        r"^column 'dones': expected B = 3 as in the other columns, got 2",
    ),
    "fewer flags": (
        "dones",
        torch.zeros(3, 3, dtype=torch.bool),
        r"^column 'dones': expected T = 4 steps as in column 'curr_obs\.states', or T \+ E with "
        r"E a divisor of T, got 3\.$",
    ),
    "E that does not divide T": (
        "dones",
        torch.zeros(7, 3, dtype=torch.bool),
        r"^column 'dones': expected T = 4 steps as in column 'curr_obs\.states', or T \+ E with "
        r"E a divisor of T, got 7\.$",
    ),
    "E above T": (
        "prev_values",
        torch.zeros(9, 3, 1),
        r"^column 'prev_values': expected T = 4 steps as in column 'curr_obs\.states', or T \+ E "
        r"with E a divisor of T, got 9\.$",
    ),
    "1-D tensor": (
        "actions",
        torch.zeros(4),
        r"^column 'actions': expected shape \[T, B, \.\.\.\], got \(4,\)\.$",
    ),
    "0-D array": (
        "actions",
        np.zeros(()),
        r"^column 'actions': expected shape \[T, B, \.\.\.\], got \(\)\.$",
    ),
    "sparse tensor": (
        "actions",
        torch.zeros(4, 3, 7).to_sparse(),
        r"^column 'actions': expected a dense tensor, got torch\.sparse_coo on cpu",
    ),
    "meta tensor": (
        "actions",
        torch.zeros(4, 3, 7, device="meta"),
        r"^column 'actions': expected a dense tensor, got torch\.strided on meta",
    ),
    "ragged text": (
        "curr_obs.task",
        [["a"] * 3, ["a"] * 3, ["a"] * 2, ["a"] * 3],
        r"^column 'curr_obs\.task': expected 3 strings in each step, got 2 in step 2\.$",
    ),
    "bytes for text": (
        "curr_obs.task",
        [["a"] * 3, ["a", b"a", "a"]],
        r"^column 'curr_obs\.task': expected a str at \[1\]\[1\], got bytes\.$",
    ),
    "None in text": (
        "curr_obs.task",
        [[None] * 3] * 4,
        r"^column 'curr_obs\.task': expected a str at \[0\]\[0\], got NoneType\.$",
    ),
    "a flat list": (
        "curr_obs.task",
        ["a"] * 4,
        r"^column 'curr_obs\.task': expected a tensor, an array, or text as .* got a list of",
    ),
    "an empty list": (
        "curr_obs.task",
        [],
        r"^column 'curr_obs\.task': expected a tensor, an array, or text as .* got a list of",
    ),
    "lone surrogates": (
        "curr_obs.task",
        [["a", "a", "\ud800"]] * 4,
        r"^column 'curr_obs\.task': expected text that UTF-8 can hold at \[0\]\[2\], "
        r"got '\\ud800'\.$",
    ),
    "object array": (
        "actions",
        np.full((4, 3), 1.5, object),
        r"^column 'actions': expected a str at \[0\]\[0\], got float\.$",
    ),
    "object array of arrays": (
        "actions",
        np.full((4, 3, 7), "a", object),
        r"^column 'actions': expected a str at \[0\]\[0\], got list\.$",
    ),
    "a number": (
        "actions",
        1.5,
        r"^column 'actions': expected a tensor or array of shape \[T, B, \.\.\.\] or text "
        r"list\[T\]\[B\], got float\.$",
    ),
    "a str": ("curr_obs.task", "abc", r"^column 'curr_obs\.task': expected .* got str\.$"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_misfit_is_refused_with_column_expectation_and_what_came(kind: str) -> None:
    path, leaf, message = MISFITS[kind]
    schema = measure(example()).schema
    with pytest.raises(SchemaError, match=message):
        measure(changed(path, leaf), schema)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        np.zeros((2, 2), np.longdouble),
        np.zeros((2, 2), "datetime64[s]"),
        np.zeros((2, 2), "timedelta64[s]"),
        np.zeros((2, 2), "S3"),
        np.zeros((2, 2), [("a", "f4")]),
        np.zeros((2, 2), np.void(3).dtype),
    ],
    ids=lambda leaf: str(leaf.dtype),
)
def test_a_dtype_that_no_column_has_is_refused(leaf: Any) -> None:
    with pytest.raises(SchemaError, match=r"^column 'a\.b': expected a dtype among bool, .*, got "):
        measure({"a": {"b": leaf}})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 3), r"^trajectory: expected at least one step of one environment, got T = 0, B = 3"),
        ((3, 0, 2), r"^trajectory: expected at least .*, got T = 3, B = 0\.$"),
        ((0, 0), r"^trajectory: expected at least .*, got T = 0, B = 0\.$"),
    ],
)
@pytest.mark.parametrize("name", ["a", "dones"])
def test_no_step_or_no_environment_is_refused(
    shape: tuple[int, ...], message: str, name: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        measure({name: torch.zeros(shape)})


def test_text_of_no_environment_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"got T = 2, B = 0\.$"):
        measure({"a": [[], []]})


@pytest.mark.parametrize("fields", [{}, {"a": {}}, {"a": {"b": {}}}])
def test_no_column_at_all_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"^trajectory: expected at least one column, got none"):
        measure(fields)


def test_a_key_that_is_no_str_is_refused_where_it_is() -> None:
    with pytest.raises(SchemaError, match=r"^key 3 under a\.b: expected a str, got int\.$"):
        measure({"a": {"b": {3: torch.zeros(1, 1)}}})
    with pytest.raises(SchemaError, match=r"^key None under the top level: expected a str"):
        measure({None: torch.zeros(1, 1)})  # type: ignore[dict-item]


def test_a_key_with_lone_surrogates_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"expected keys that UTF-8 can hold, got '\\udc80'"):
        measure({"a": {"\udc80": torch.zeros(1, 1)}})


def test_t_of_flags_and_values_alone_is_the_shortest() -> None:
    payload = measure({"dones": torch.zeros(5, 2), "prev_values": torch.zeros(4, 2)})
    assert (payload.num_steps, payload.extra_steps) == (4, (1, 0))


# -- text tables -------------------------------------------------------------------------------


def test_equal_strings_have_one_code_in_the_order_they_came() -> None:
    table = TextTable()
    codes = table.encode(["b", "a", "b", "", "a"])
    assert codes.dtype == np.int32
    assert codes.tolist() == [0, 1, 0, 2, 1]
    assert table.decode(codes) == ["b", "a", "b", "", "a"]


def test_codes_never_change() -> None:
    table = TextTable()
    first = table.encode(["b", "a"]).tolist()
    table.encode([str(i) for i in range(1000)])
    assert table.encode(["b", "a"]).tolist() == first
    assert table.decode(np.array(first, np.int32)) == ["b", "a"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.text(max_size=3), max_size=20), max_size=10))
def test_all_that_was_encoded_is_decoded_at_the_end(batches: list[list[str]]) -> None:
    table = TextTable()
    codes = [table.encode(batch) for batch in batches]
    assert [table.decode(code) for code in codes] == batches
    distinct = {string for batch in batches for string in batch}
    assert len({int(c) for code in codes for c in code}) == len(distinct)


def test_threads_that_encode_and_decode_agree() -> None:
    table = TextTable()
    failures: list[str] = []
    results: list[dict[str, int]] = []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        mine: dict[str, int] = {}
        for _ in range(200):
            strings = [str(i) for i in generator.integers(0, 2000, 20)]
            codes = table.encode(strings)
            if table.decode(codes) != strings:
                failures.append(f"{strings} became {table.decode(codes)}")
            for string, code in zip(strings, codes.tolist(), strict=True):
                if mine.setdefault(string, code) != code:
                    failures.append(f"{string} changed its code")
        results.append(mine)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    merged: dict[str, int] = {}
    for mine in results:
        assert all(merged.setdefault(string, code) == code for string, code in mine.items())
    assert sorted(merged.values()) == list(range(len(merged)))


# -- what no file can hold -------------------------------------------------------------------------


def test_a_row_of_2_to_the_31_bytes_is_refused_when_it_is_added() -> None:
    large = torch.zeros(1, dtype=torch.float32).expand(1, 1, 1 << 29)  # takes no memory
    with TrajectoryReplayBuffer() as buffer, pytest.raises(SchemaError) as error:
        buffer.add_trajectories([{"a": {"large": large}}])
    assert str(error.value) == (
        "column 'a.large': expected rows of at most 2,147,483,647 bytes, the limit of Arrow, got "
        "2,147,483,648 of float32 rows of shape (536870912,). Divide it into several columns."
    )
    assert measure({"a": large[:, :, 1:]}).schema.row_bytes == (1 << 31) - 4
    with pytest.raises(SchemaError, match="a row shape that can be counted"):
        measure({"a": torch.zeros(1, 1, 0, 1 << 48)})  # no bytes, and no index would list it


def test_more_dimensions_than_numpy_has_are_refused_when_they_are_added() -> None:
    assert measure({"a": torch.zeros([1] * 64)}).schema.columns[0].row_shape == (1,) * 62
    with pytest.raises(SchemaError, match=r"expected rows of at most 62 dimensions, .* got 63"):
        measure({"a": torch.zeros([1] * 65)})


def test_keys_that_nest_deeper_than_an_index_says_are_refused_when_they_are_added() -> None:
    def nested(depth: int) -> dict[str, Any]:
        return {"k": nested(depth - 1) if depth > 1 else torch.zeros(1, 1)}

    found = measure(nested(33)).schema
    assert Schema.from_json(found.to_json()) == found
    with pytest.raises(SchemaError, match="expected at most 33 keys in a path"):
        measure(nested(34))


def test_text_of_2_to_the_31_bytes_is_refused_when_it_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmbuf.schema._MAX_TEXT_BYTES", 10)
    measure({"a": [["0123456789"] * 3] * 2, "b": [["\u00e9" * 5] * 3] * 2})  # each string once
    for steps in ([["0123456789", "x"]], [["\u00e9" * 6]]):
        with pytest.raises(SchemaError) as error:
            measure({"a": steps})
        size = len("".join(steps[0]).encode())
        assert str(error.value) == (
            f"column 'a': expected at most 10 bytes of different strings in a trajectory, the "
            f"limit of Arrow, got {size}. Add it in shorter ones."
        )
