"""What is in the trajectories of an attack, and whether what is drawn of them is right.

A trajectory is told by its *serial*: shape, schema and every value follow from it. Each row carries
its code, see `data.coded`; ``dones`` end an episode after every fifth step and have a leading step,
and ``next_obs`` is a column of its own that n-step targets take from another row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import data
import numpy as np
import torch

import mmbuf
from mmbuf.sampling import NStep, Prioritized, Slices, WithoutReplacement

IMAGES = ((32, 32, 3), (16, 16, 3))  # of the two schemas; `schema_of` says whose is which
EPISODE = 5
MAX_SERIAL = 1 << 24  # beyond it ``states``, which are float32, are not exact
_LENGTH, _STEPS, _GAMMA = 3, 3, 0.9
_ROLES = {"next": ["next_obs.codes"]}  # of no other column
_ROW = 1_000_000


def schema_of(serial: int) -> int:
    return serial % len(IMAGES)


@functools.lru_cache(maxsize=4096)
def shape_of(serial: int) -> tuple[int, int]:
    """T and B. Every trajectory has an episode of four steps or more."""
    drawn = serial * 2_654_435_761 >> 7
    return 4 + drawn % 30, 1 + drawn // 30 % 3


def content(serial: int) -> dict[str, Any]:
    """The trajectory, of tensors that nobody else has."""
    num_steps, num_envs = shape_of(serial)
    item = data.coded(serial, num_steps, num_envs, image=IMAGES[schema_of(serial)])
    item["next_obs"] = {"codes": 3 * item["actions"][..., 0] + 1}
    ends = np.arange(num_steps + 1) % EPISODE == 0
    ends[0] = serial % 3 == 0
    item["dones"] = np.repeat(ends[:, None], num_envs, 1)
    return _as_tensors(item)


def _as_tensors(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _as_tensors(value)
        if isinstance(value, dict)
        else torch.from_numpy(value)
        if isinstance(value, np.ndarray)
        else value
        for key, value in item.items()
    }


def spoil(item: Mapping[str, Any]) -> None:
    """Write over all tensors of a trajectory, as a caller may as soon as it was added or not."""
    for value in item.values():
        if isinstance(value, dict):
            spoil(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(77)


@functools.lru_cache(maxsize=64)
def _expected(serial: int) -> dict[str, Any]:
    return data.columns_of(content(serial))


def serial_of(trajectory: mmbuf.Trajectory) -> int:
    """The serial of a whole trajectory; AssertionError if any of its values is wrong."""
    columns = trajectory.to_columns()
    serial = int(columns["actions"][0, 0, 0]) // _ROW
    assert 0 <= serial < MAX_SERIAL, f"a trajectory of serial {serial}"
    assert data.is_equal(columns, _expected(serial)), f"trajectory of serial {serial}"
    return serial


class Drawn(NamedTuple):
    """What a batch has said."""

    codes: Any  # int64 [N]
    serials: set[int]
    ids: dict[int, int]  # by serial, where the batch has said so


class _Places(NamedTuple):
    """Where rows are, by their codes."""

    step: Any
    env: Any
    num_steps: Any
    num_envs: Any


def _places_of(codes: Any) -> _Places:
    serials, rows = codes // _ROW, codes % _ROW
    known, inverse = np.unique(serials, return_inverse=True)
    assert known[0] >= 0, "a row of no trajectory"
    assert known[-1] < MAX_SERIAL, "a row of no trajectory"
    num_steps, num_envs = np.array([shape_of(serial) for serial in known.tolist()])[inverse].T
    assert (rows < num_steps * num_envs).all(), "a row beyond the end of its trajectory"
    return _Places(rows // num_envs, rows % num_envs, num_steps, num_envs)


def _codes_of(batch: Mapping[str, Any]) -> Any:
    try:
        return data.codes_of(batch)
    except AssertionError as error:
        raise AssertionError(f"{error} is wrong: {_told(batch)}") from None


def _told(batch: Mapping[str, Any]) -> str:
    """Each code that wrong rows have, column by column."""
    actions = np.asarray(batch["actions"])
    states = np.asarray(batch["curr_obs"]["states"])[:, :2].astype(np.int64)
    image = np.asarray(batch["curr_obs"]["image"]).reshape(len(actions), -1)
    columns = {
        "actions": actions[:, 0],
        "~actions": ~actions[:, 1],
        "rewards": np.asarray(batch["rewards"]).astype(np.int64),
        "states": states[:, 0] * _ROW + states[:, 1],
        "image": image[:, :8].copy().view(np.int64)[:, 0],
        "the end of image": image[:, -8:].copy().view(np.int64)[:, 0],
    }
    values = np.stack(list(columns.values()), 1)
    wrong = (values != values[:, :1]).any(1).nonzero()[0]
    rows = [dict(zip(columns, values[row].tolist(), strict=True)) for row in wrong[:5].tolist()]
    return f"{len(wrong)} of {len(values)} rows, from {wrong[:1]} to {wrong[-1:]}: {rows}"


def _ends(step: Any) -> Any:
    return step % EPISODE == EPISODE - 1


def checked(batch: Mapping[str, Any]) -> Drawn:
    """What a batch of single rows says; AssertionError if any row is wrong."""
    codes = _codes_of(batch)
    places = _places_of(codes)
    assert np.array_equal(np.asarray(batch["dones"]), _ends(places.step)), "dones"
    assert np.array_equal(np.asarray(batch["next_obs"]["codes"]), 3 * codes + 1), "next_obs"
    return _drawn(batch, codes, places)


def _drawn(batch: Mapping[str, Any], codes: Any, places: _Places) -> Drawn:
    ids: dict[int, int] = {}
    serials = codes // _ROW
    if "info" in batch:
        info = {name: np.asarray(values) for name, values in batch["info"].items()}
        assert np.array_equal(info["step"].reshape(-1), places.step), "info: step"
        assert np.array_equal(info["env"].reshape(-1), places.env), "info: env"
        told = np.stack([serials, info["trajectory_id"].reshape(-1)], 1)
        pairs = np.unique(told, axis=0).tolist()
        ids = dict(pairs)
        assert len(ids) == len(pairs) == len(set(ids.values())), f"one id, one trajectory: {pairs}"
    return Drawn(codes, set(serials.tolist()), ids)


def _checked_targets(batch: Mapping[str, Any]) -> Drawn:
    codes = np.asarray(batch["actions"])[:, 0]
    places = _places_of(codes)
    left = np.minimum(EPISODE - 1 - places.step % EPISODE, places.num_steps - 1 - places.step)
    num_summed = np.minimum(left + 1, _STEPS)
    ahead = np.arange(_STEPS)[:, None]
    rewards = np.where(ahead < num_summed, (codes + ahead * places.num_envs) * _GAMMA**ahead, 0)
    assert np.allclose(np.asarray(batch["rewards"]), rewards.sum(0), rtol=1e-12), "summed rewards"
    last = codes + (num_summed - 1) * places.num_envs
    is_over = _ends(places.step + num_summed - 1)
    discount = np.where(is_over, 0, _GAMMA**num_summed)
    assert np.allclose(np.asarray(batch["discount"]), discount, rtol=1e-6), "discount"
    assert np.array_equal(np.asarray(batch["dones"]), is_over), "dones of the last step"
    assert np.array_equal(np.asarray(batch["next_obs"]["codes"]), 3 * last + 1), "next_obs of it"
    _codes_of({**batch, "rewards": codes.astype(np.float64)})
    return _drawn(batch, codes, places)


def _checked_slices(batch: Mapping[str, Any], length: int) -> Drawn:
    mask = batch.get("mask")
    rows = _flat({key: value for key, value in batch.items() if key not in ("mask", "info")})
    drawn = checked({**rows, **({"info": batch["info"]} if "info" in batch else {})})
    codes = drawn.codes.reshape(-1, length)
    places = _Places(*(values.reshape(-1, length) for values in _places_of(drawn.codes)))
    is_real = np.ones_like(codes, bool) if mask is None else np.asarray(mask)
    assert is_real[:, 0].all(), "a sequence of nothing"
    assert (is_real[:, 1:] <= is_real[:, :-1]).all(), "a sequence goes on behind its end"
    strides = np.where(is_real[:, 1:], places.num_envs[:, 1:], 0)
    assert np.array_equal(np.diff(codes, axis=1), strides), "consecutive steps"
    is_inside = ~_ends(places.step[:, :-1]) | ~is_real[:, 1:]
    assert is_inside.all(), "a sequence goes on beyond its episode"
    return drawn


def _flat(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its two leading dimensions made one."""
    flat: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, dict):
            flat[key] = _flat(value)
        elif isinstance(value, list):
            flat[key] = [text for row in value for text in row]
        else:
            flat[key] = value.flatten(0, 1)
    return flat


def _checked_epoch(batch: Mapping[str, Any]) -> Drawn:
    drawn = checked(batch)
    assert len(np.unique(drawn.codes)) == len(drawn.codes), "a row twice in an epoch"
    return drawn


class Drawing(NamedTuple):
    """A batch to be drawn, and how it is checked."""

    what: str
    call: Callable[[], Any]
    check: Callable[[Any], Drawn]
    refills: int | None = None  # the schema of the batch that is refilled


class Drawer:
    """Draws batches of every kind from one buffer or reader, in one thread."""

    KINDS = (
        *("plain", "plain", "info", "out", "out", "numpy", "slices", "padded", "targets"),
        *("targets by priority", "epoch", "priority"),
    )

    def __init__(self, source: Any, rng: Random) -> None:
        self._source = source
        self._rng = rng
        self._out: dict[str, Any] | None = None  # the batch to be refilled
        self._slices, self._padded = Slices(_LENGTH), Slices(_LENGTH + 1, pad=True)
        self._targets = NStep(_STEPS, _GAMMA, roles=_ROLES)
        self._rows = Prioritized()
        self._by_priority = NStep(_STEPS, _GAMMA, rows=self._rows, roles=_ROLES)
        self._epoch = WithoutReplacement()

    def next(self, kinds: tuple[str, ...] = KINDS) -> Drawing:
        """The next batch, of one of these kinds."""
        kind = self._rng.choice(kinds)
        count = self._rng.choice((1, 7, 60, 256))
        has_info = self._rng.random() < 0.5
        sample = self._source.sample
        if kind == "out":
            out, self._out = self._out, None  # undefined, should it be interrupted
            schema = None if out is None else _schema_in(out)
            return Drawing(kind, lambda: sample(200, out=out), self._refilled, schema)
        calls: dict[str, tuple[Callable[[], Any], Callable[[Any], Drawn]]] = {
            "plain": (lambda: sample(count), checked),
            "info": (lambda: sample(count, with_info=True), checked),
            "numpy": (lambda: sample(count, as_numpy=True, with_info=has_info), checked),
            "slices": (
                lambda: sample(count, sampler=self._slices, with_info=has_info),
                functools.partial(_checked_slices, length=_LENGTH),
            ),
            "padded": (
                lambda: sample(count, sampler=self._padded, with_info=has_info),
                functools.partial(_checked_slices, length=_LENGTH + 1),
            ),
            "targets": (
                lambda: sample(count, sampler=self._targets, with_info=has_info),
                _checked_targets,
            ),
            "targets by priority": (
                lambda: self._updated(sample(count, sampler=self._by_priority)),
                _checked_targets,
            ),
            "epoch": (
                lambda: sample(count, sampler=self._epoch, with_info=has_info),
                _checked_epoch,
            ),
            "priority": (lambda: self._updated(sample(count, sampler=self._rows)), checked),
        }
        return Drawing(kind, *calls[kind])

    def _refilled(self, batch: dict[str, Any]) -> Drawn:
        drawn = checked(batch)
        self._out = batch
        return drawn

    def _updated(self, batch: dict[str, Any]) -> dict[str, Any]:
        weights = np.asarray(batch["weights"])
        priorities = np.abs(weights - 0.5)
        self._rows.update_priorities(batch["info"]["handle"], priorities)
        assert (weights > 0).all(), "weights"
        assert (weights <= 1).all(), "weights"
        return batch


def _schema_in(batch: Mapping[str, Any]) -> int:
    return IMAGES.index(tuple(batch["curr_obs"]["image"].shape[1:]))


def every_row_once(source: Any) -> Drawing:
    """All rows of the window, each once."""
    return Drawing(
        "every row once",
        lambda: source.sample(_ROW, sampler=WithoutReplacement(), with_info=True),
        _checked_epoch,
    )


def rows_of(serials: list[int]) -> list[int]:
    """The codes of all rows of these trajectories, sorted."""
    codes = []
    for serial in sorted(serials):
        num_steps, num_envs = shape_of(serial)
        codes += range(serial * _ROW, serial * _ROW + num_steps * num_envs)
    return codes
