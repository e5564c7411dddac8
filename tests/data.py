"""What several tests share: trajectories whose every row says where it belongs, and children."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmbuf
from mmbuf import TrajectoryCollector
from mmbuf.schema import Array, Payload, TextTable

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
NUMPY_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
DTYPES = (*NUMPY_DTYPES, "bfloat16", *FLOAT8)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bit patterns: NaN payloads, subnormals and all; bools are 0 or 1."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return torch.from_numpy(generator.integers(0, 2, shape).astype(np.bool_))
    tensor = torch.empty(shape, dtype=torch_dtype)
    if tensor.numel():
        data = generator.integers(0, 256, tensor.nbytes, np.uint8)
        tensor = torch.from_numpy(data).view(torch_dtype).reshape(shape)
    return tensor


def bits(leaf: Any) -> bytes:
    """The bytes of a tensor or array in row-major order."""
    if isinstance(leaf, torch.Tensor):
        if not leaf.numel():
            return b""
        leaf = leaf.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(leaf).tobytes()


def bytes_of_text(strings: list[str] | None) -> bytes:
    """What the CRC-32 of a text column goes on over: the ends of the strings, and the strings."""
    if strings is None:
        return b""
    encoded = [string.encode() for string in strings]
    return np.cumsum([0, *map(len, encoded)], dtype="<i4").tobytes() + b"".join(encoded)


def trajectory(
    i: int, num_steps: int = 4, num_envs: int = 3, *, image: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Trajectory ``i``: each row carries ``(i, t, b)``; ``dones`` has a leading step.

    ``image`` is the row shape of one more observation; () for none.
    """
    t, b = torch.meshgrid(torch.arange(num_steps), torch.arange(num_envs), indexing="ij")
    states = torch.stack([torch.full_like(t, i), t, b], -1)
    fields: dict[str, Any] = {
        "rewards": states.sum(-1).float(),
        "actions": states.float(),
        "dones": torch.arange((num_steps + 1) * num_envs).reshape(num_steps + 1, num_envs) % 3 == 0,
        "curr_obs": {
            "states": states.int(),
            "task": [[f"task {(i + b) % 5}" for b in range(num_envs)] for _ in range(num_steps)],
        },
    }
    if image:
        fields["curr_obs"]["image"] = (
            states.sum(-1)
            .to(torch.uint8)
            .reshape(num_steps, num_envs, *(1 for _ in image))
            .expand(num_steps, num_envs, *image)
        )
    return fields


def row_ids(batch: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """``(i, t, b)`` of each row of a batch of `trajectory`."""
    return [(i, t, b) for i, t, b in batch["curr_obs"]["states"].tolist()]


def is_whole(batch: Mapping[str, Any], num_envs: int = 3) -> bool:
    """Whether every row of a batch of `trajectory` holds values of one row of one trajectory."""
    states = batch["curr_obs"]["states"]
    _, t, b = states.unbind(-1)
    tasks = [f"task {(i + b) % 5}" for i, _, b in states.tolist()]
    image = batch["curr_obs"].get("image", states.sum(-1).to(torch.uint8))
    values = states.sum(-1).to(torch.uint8).reshape(-1, *[1] * (image.ndim - 1)).expand_as(image)
    return (
        torch.equal(batch["rewards"], states.sum(-1).float())
        and torch.equal(batch["actions"], states.float())
        and torch.equal(batch["dones"], ((t + 1) * num_envs + b) % 3 == 0)
        and batch["curr_obs"]["task"] == tasks
        and torch.equal(image, values)
    )


def is_equal(left: Any, right: Any) -> bool:
    """Whether two nests of dicts and lists have the same keys in the same order and leaves."""
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and list(left) == list(right)
            and all(is_equal(left[key], right[key]) for key in left)
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    return type(left) is type(right) and bool(left == right)


def columns_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of ``item`` in the order in which a `mmbuf.Trajectory` has them."""
    return mmbuf.Trajectory.from_columns(item).to_columns()


@dataclass
class LookAlike:
    """A dataclass that mmbuf does not know, with the fields of RLinf's own trajectory."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)


def counts_of(buffer: mmbuf.TrajectoryReplayBuffer) -> dict[str, Any]:
    """Its statistics without those that time alone changes."""
    return {name: n for name, n in buffer.get_stats().items() if not name.endswith("_s")}


class Halt:
    """Halts the first call of ``owner.name`` that ``is_it``, in a thread, while the block goes on.

    ``run(function)`` is that thread; `result` lets the call go on and gives what the function gave.
    """

    def __init__(self, monkeypatch: Any, owner: Any, name: str, is_it: Callable[..., bool]) -> None:
        self._is_there, self._goes_on = threading.Event(), threading.Event()
        really = getattr(owner, name)

        def halted(*arguments: Any, **options: Any) -> Any:
            if not self._is_there.is_set() and is_it(*arguments):
                self._is_there.set()
                assert self._goes_on.wait(60)
            return really(*arguments, **options)

        monkeypatch.setattr(owner, name, halted)

    def run(self, function: Callable[[], Any]) -> None:
        """Returns when it is halted."""

        def work() -> None:
            try:
                self._result = function()
            except BaseException as error:
                self._error = error

        self._error: BaseException | None = None
        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert self._is_there.wait(60)

    def result(self) -> Any:
        self._goes_on.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.__dict__.pop("_result")


def look_while_adding(look: Callable[[int], None], add: Callable[[], None]) -> None:
    """`add()` for two seconds beside three threads that `look(thread)` without pause.

    The first failure is raised.
    """
    failures: list[BaseException] = []
    is_over = threading.Event()
    rounds: Counter[int] = Counter()

    def look_on(thread: int) -> None:
        try:
            while not is_over.is_set():
                look(thread)
                rounds[thread] += 1
        except BaseException as failure:
            failures.append(failure)
            is_over.set()

    threads = [threading.Thread(target=look_on, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not is_over.is_set():
        add()
        time.sleep(0.002)
    is_over.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert min(rounds[thread] for thread in range(3)) > 1


def rows_and_texts(payload: Payload) -> tuple[list[Array], dict[int, list[str]]]:
    """The rows of each column and the strings of text, as the writer hands them to a format."""
    rows: list[Array] = []
    texts: dict[int, list[str]] = {}
    for i, column in enumerate(payload.schema.columns):
        if column.is_text:
            table = TextTable()
            rows.append(table.encode(payload.texts(i)))
            texts[i] = table.strings
        else:
            rows.append(np.empty((payload.rows[i], *column.row_shape), column.storage))
            payload.copy_rows(i, rows[-1])
    return rows, texts


def every_dtype() -> dict[str, Any]:
    """Every dtype as scalars, as ``(1,)`` and as tensors; text, flags and columns without bytes."""
    fields: dict[str, Any] = {
        "rewards": random_bits("float32", (4, 3), 1),
        "none": torch.zeros(4, 3, 2, 0),
        "dones": random_bits("bool", (6, 3), 2),
        "prev_values": random_bits("bfloat16", (6, 3, 1), 3),
        "text": [["put the carrot", "é", ""], ["日本"] * 3, ["", "é", "a"], ["a"] * 3],
        "other text": [["", "", ""]] * 4,
    }
    for i, dtype in enumerate(DTYPES):
        fields[dtype] = {
            "scalar": random_bits(dtype, (4, 3), i),
            "one": random_bits(dtype, (4, 3, 1), i + 100),
            "tensor": random_bits(dtype, (4, 3, 2, 3), i + 200),
            "none": torch.zeros((4, 3, 0), dtype=getattr(torch, dtype)),
        }
    return fields


def opened(path: Path, **options: Any) -> mmbuf.TrajectoryReplayBuffer:
    """An auto-saving buffer in ``path``."""
    return mmbuf.TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, **options)


def contents_of(directory: Path) -> dict[str, bytes]:
    """Every file below ``directory`` and its bytes, but for the writer's lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".writer.lock"
    }


def names_of(directory: Path, suffix: str = ".arrow") -> list[str]:
    """Names of the files in ``directory`` that end in ``suffix``, sorted."""
    return sorted(path.name for path in directory.iterdir() if path.name.endswith(suffix))


def anonymous_bytes() -> int:
    """Anonymous memory of this process; Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def run_python(
    script: str, *arguments: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in an interpreter of its own, warnings as errors."""
    root = str(Path(mmbuf.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def without_privileges(function: Callable[[], None]) -> None:
    """Run ``function`` in a thread that file permissions hold for, also where we are root.

    Linux only: there each thread has capabilities of its own.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            if os.geteuid() == 0:
                _drop_capabilities()
            function()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _drop_capabilities() -> None:
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(version_3, none):
        raise OSError(ctypes.get_errno(), "capset")


def coded(
    trajectory_id: int,
    num_steps: int,
    num_envs: int = 1,
    *,
    image: tuple[int, ...] = (32, 32, 3),
    has_text: bool = True,
) -> dict[str, Any]:
    """Trajectory whose rows hold ``code = trajectory_id * 1,000,000 + row`` in every column.

    ``image`` rows of uint8 repeat the eight bytes of the code, as far as they fit.
    """
    num_rows = num_steps * num_envs
    codes = trajectory_id * 1_000_000 + np.arange(num_rows)
    size = int(np.prod(image))
    repeated = np.tile(codes[:, None], (1, -(-size // 8))).view(np.uint8)[:, :size]
    tasks = [f"task {code % 7}" for code in codes.tolist()]

    def rows(array: Any) -> Any:
        return np.ascontiguousarray(array).reshape(num_steps, num_envs, *np.shape(array)[1:])

    observation = {
        "states": rows(np.stack([codes // 1_000_000, codes % 1_000_000] * 4, 1).astype(np.float32)),
        "image": rows(repeated.reshape(num_rows, *image)),
    }
    if has_text:
        steps = range(0, num_rows, num_envs)
        observation["task"] = [tasks[start : start + num_envs] for start in steps]
    return {
        "actions": rows(np.stack([codes, ~codes], 1)),
        "rewards": rows(codes.astype(np.float64)),
        "flags": rows(codes % 2 == 1),
        "curr_obs": observation,
    }


def codes_of(batch: Mapping[str, Any]) -> Any:
    """The codes of a batch or list of rows of `coded`; AssertionError if columns disagree."""
    actions, rewards = np.asarray(batch["actions"]), np.asarray(batch["rewards"])
    codes = actions[:, 0]
    states = np.asarray(batch["curr_obs"]["states"])
    image = np.asarray(batch["curr_obs"]["image"]).reshape(len(codes), -1)
    task = batch["curr_obs"].get("task")
    whole = image[:, : image.shape[1] // 8 * 8].view(np.int64)
    rest = image[:, image.shape[1] // 8 * 8 :]
    expected = np.stack([codes // 1_000_000, codes % 1_000_000] * 4, 1)
    assert np.array_equal(actions[:, 1], ~codes), "actions"
    assert np.array_equal(rewards, codes.astype(np.float64)), "rewards"
    assert np.array_equal(np.asarray(batch["flags"]), codes % 2 == 1), "flags"
    assert np.array_equal(states, expected.astype(np.float32)), "states"
    assert (whole == codes[:, None]).all(), "image"
    assert np.array_equal(rest, codes[:, None].copy().view(np.uint8)[:, : rest.shape[1]]), "image"
    assert task is None or task == [f"task {code % 7}" for code in codes.tolist()], "task"
    return codes


CHUNK_ENVS = 4


def chunk(t: int) -> dict[str, Any]:
    """The t-th chunk of a made-up simulator, as arrays and tensors mixed."""
    rng = np.random.default_rng(t)
    return {
        "curr_obs": {
            "states": rng.normal(size=(CHUNK_ENVS, 3)).astype(np.float32),
            "text": [f"t{t} b{b}" for b in range(CHUNK_ENVS)],
        },
        "actions": torch.from_numpy(rng.normal(size=(CHUNK_ENVS, 2))),
        "rewards": torch.full((CHUNK_ENVS,), float(t)),
        "terminations": np.arange(CHUNK_ENVS) == t,
    }


def collected(steps: int, **options: Any) -> TrajectoryCollector:
    collector = TrajectoryCollector(**options)
    for t in range(steps):
        collector.append(**chunk(t))
    return collector
