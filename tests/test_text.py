"""Text of a window: it is right at every moment, and is forgotten when nothing there has it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import opened

from mmbuf import ReplayReader, TrajectoryReplayBuffer
from mmbuf.text import WindowText, give_back

T, B = 4, 3
PER_TRAJECTORY = T * B + 1  # strings of their own, and one that all share


def item(i: int) -> dict[str, Any]:
    """Text that never repeats; a number that says what it is to be."""
    text = [[f"{i}-{t}-{b}" for b in range(B)] for t in range(T)]
    shared = [["shared" if (t + b) % 2 else f"only {i}" for b in range(B)] for t in range(T)]
    number = i * T * B + torch.arange(T * B).reshape(T, B)
    return {"number": number, "text": text, "shared": shared}


def is_right(batch: dict[str, Any]) -> bool:
    def told(number: int) -> tuple[str, str]:
        i, row = divmod(number, T * B)
        t, b = divmod(row, B)
        return f"{i}-{t}-{b}", "shared" if (t + b) % 2 else f"only {i}"

    expected = [told(number) for number in batch["number"].tolist()]
    return [*zip(batch["text"], batch["shared"], strict=True)] == expected


def num_strings(source: TrajectoryReplayBuffer | ReplayReader) -> list[int]:
    cache = source._window.cache
    assert cache is not None
    return [len(text) for text in cache._places.texts.values()]


def test_a_code_is_free_when_its_last_use_is_given_back() -> None:
    text = WindowText()
    codes, first = text.encode(["a", "b", "a"])
    assert (codes.tolist(), sorted(first[1].tolist())) == ([0, 1, 0], [0, 1])
    again, second = text.encode(["b"])
    give_back([first])
    assert (len(text), text.decode(again)) == (1, ["b"])
    codes, third = text.encode(["c", "d", "b"])
    assert (codes.tolist(), text.decode(codes)) == ([0, 2, 1], ["c", "d", "b"])
    give_back([second, third])
    assert len(text) == 0
    assert text.encode([])[0].dtype == np.int32


def test_a_string_that_there_was_no_memory_for_spoils_no_other() -> None:
    class Full(list[Any]):
        def append(self, value: Any) -> None:
            raise MemoryError

    text = WindowText()
    for name in ("_strings", "_num_uses"):  # whichever of the two cannot grow
        there_is_room = getattr(text, name)
        setattr(text, name, Full(there_is_room))
        with pytest.raises(MemoryError):
            text.encode(["lost"])
        setattr(text, name, there_is_room)
    codes, use = text.encode(["a", "b"])
    assert (text.decode(codes), len(text)) == (["a", "b"], 2)
    give_back([use])
    assert len(text) == 0


@pytest.mark.parametrize("is_saved", [False, True], ids=["memory", "saved"])
def test_text_that_never_repeats_follows_the_window(tmp_path: Path, is_saved: bool) -> None:
    options: dict[str, Any] = {"sample_window_size": 5}
    saved = {"auto_save": True, "auto_save_path": tmp_path} if is_saved else {}
    with TrajectoryReplayBuffer(**options, **saved) as buffer:
        for i in range(40):
            buffer.add_trajectories([item(i)])
            assert is_right(buffer.sample(50))
        buffer.flush()
        buffer.add_trajectories([item(40)])
        buffer.flush()
        buffer._window.reclaim()
        assert num_strings(buffer) == [5 * T * B, 1 + 5]
        assert is_right(buffer.sample(50))
        if is_saved:
            with ReplayReader(tmp_path, **options) as reader:
                for i in range(41, 80):
                    buffer.add_trajectories([item(i)])
                    buffer.flush()
                    reader.refresh()
                    assert is_right(reader.sample(50))
                assert max(num_strings(reader)) <= 6 * T * B
        buffer.clear()
        buffer.add_trajectories([item(0)])
        assert num_strings(buffer) == [T * B, 2]


@pytest.mark.parametrize("cached", [0, 2, None], ids=["none", "some", "all"])
def test_text_that_is_read_without_a_place_follows_the_window_too(
    tmp_path: Path, cached: int | None
) -> None:
    with opened(tmp_path, sample_window_size=5, cache_size=cached) as buffer:
        for i in range(40):
            buffer.add_trajectories([item(i)])
            buffer.flush()
            for _ in range(3):
                assert is_right(buffer.sample(50))
        assert max(num_strings(buffer)) <= 6 * T * B
        buffer.clear_cache()
        assert is_right(buffer.sample(50))
        buffer._window.reclaim()
        assert max(num_strings(buffer)) <= 6 * T * B


def test_no_row_has_another_text_while_codes_are_used_again(tmp_path: Path) -> None:
    """Threads sample while trajectories come and go, from places and from files."""
    wrong: list[str] = []
    has_ended = threading.Event()

    def check(source: TrajectoryReplayBuffer | ReplayReader) -> None:
        while not has_ended.is_set():
            if not is_right(source.sample(40)):
                wrong.append(type(source).__name__)

    with opened(tmp_path, sample_window_size=4, cache_size=2) as buffer:
        buffer.add_trajectories([item(0)])
        buffer.flush()
        with ReplayReader(tmp_path, sample_window_size=3) as reader:
            sources = (buffer, buffer, reader)
            threads = [threading.Thread(target=check, args=(source,)) for source in sources]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 2
            i = 1
            while time.monotonic() < deadline:
                buffer.add_trajectories([item(i)])
                i += 1
                if i % 7 == 0:
                    buffer.clear_cache()
            has_ended.set()
            for thread in threads:
                thread.join()
    assert wrong == []
