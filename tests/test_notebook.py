"""How buffers, readers and trajectories show themselves: all that is in them, and no file read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data import opened, trajectory

from mmbuf import ReplayReader, Trajectory, TrajectoryReplayBuffer
from mmbuf.notebook import Shown, told_bytes
from mmbuf.terminal import printable

Shows = TrajectoryReplayBuffer | ReplayReader | Trajectory


def html(shown: Shows) -> str:
    return shown._repr_html_()


def fill(buffer: TrajectoryReplayBuffer, count: int) -> None:
    buffer.add_trajectories([trajectory(i) for i in range(count)])


# -- text ------------------------------------------------------------------------------------


def test_a_store_says_what_is_in_it(tmp_path: Path) -> None:
    columns = """
  rewards          float32  ()    96 bytes
  actions          float32  (3,)  288 bytes
  dones            bool     ()    24 bytes
  curr_obs.states  int32    (3,)  288 bytes
  curr_obs.task    text     ()    96 bytes>"""
    with opened(tmp_path, sample_window_size=1) as buffer:
        fill(buffer, 2)
        assert repr(buffer) == (
            f"<TrajectoryReplayBuffer {tmp_path}: 2 trajectories, 24 rows, 792 bytes, "
            f"window: the newest 1{columns}"
        )
    with ReplayReader(tmp_path) as reader:
        assert repr(reader) == (
            f"<ReplayReader {tmp_path}: 2 trajectories, 24 rows, 792 bytes, window: all{columns}"
        )


def test_an_empty_buffer_says_so() -> None:
    expected = "0 trajectories, 0 rows, 0 bytes, window: the newest 100"
    with TrajectoryReplayBuffer() as buffer:
        assert repr(buffer) == f"<TrajectoryReplayBuffer in memory: {expected}>"
        assert html(buffer) == f"<div><b>TrajectoryReplayBuffer in memory</b><br>{expected}</div>"
        fill(buffer, 1)
        buffer.clear()  # the schema is free again
        assert repr(buffer) == f"<TrajectoryReplayBuffer in memory: {expected}>"


def test_what_is_closed_still_says_what_was_in_it(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as memory, opened(tmp_path) as buffer:
        fill(memory, 1)
        fill(buffer, 1)
        buffer.flush()
        with ReplayReader(tmp_path) as reader:
            shown: list[Shows] = [memory, buffer, reader]
            before = [(repr(each), html(each)) for each in shown]
    for each, (text, page), where in zip(
        shown, before, ("in memory", tmp_path, tmp_path), strict=True
    ):
        assert f" {where} (closed): 1 trajectories, 12 rows" in repr(each)
        assert repr(each).replace(" (closed)", "") == text
        assert html(each).replace(" (closed)", "") == page


def test_a_reader_of_several_stores_names_them(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        with opened(path) as buffer:
            fill(buffer, 1)
    with ReplayReader(paths) as reader:
        assert repr(reader).startswith(f"<ReplayReader {paths[0]}, {paths[1]}: 2 trajectories")
    with ReplayReader(tmp_path / "*", sample_window_size=1500) as reader:
        assert f"<ReplayReader {tmp_path}/*: 2 trajectories" in repr(reader)
        assert "window: the newest 1,500" in repr(reader)


def test_a_trajectory_says_its_shapes_and_episodes() -> None:
    fields = trajectory(0)
    del fields["curr_obs"]["states"]
    dones = torch.zeros(5, 3, dtype=torch.bool)
    dones[0] = True  # the leading step ends what came before
    dones[2, 1] = True
    dones[4, 2] = True
    shown = Trajectory.from_columns(fields | {"dones": dones}, 8, "policy 7")
    assert repr(shown) == (
        "<Trajectory: T = 4, B = 3, 4 episodes, max_episode_length 8, model_weights_id policy 7\n"
        "  actions        float32  [4, 3, 3]\n"
        "  rewards        float32  [4, 3]\n"
        "  dones          bool     [5, 3]\n"
        "  curr_obs.task  text     [4, 3]>"
    )


def test_terminations_and_truncations_end_episodes_together() -> None:
    t = torch.arange(6).reshape(6, 1, 1)
    shown = Trajectory(terminations=(t == 1).float().bfloat16(), truncations=(t == 3).numpy())
    assert repr(shown).startswith("<Trajectory: T = 6, B = 1, 3 episodes\n")


def test_without_flags_in_memory_no_episodes_are_counted() -> None:
    rewards = torch.ones(2, 1)
    for dones in (None, [["yes"], ["no"]]):
        shown = Trajectory(rewards=rewards, dones=dones)  # type: ignore[arg-type]
        assert repr(shown).startswith("<Trajectory: T = 2, B = 1\n")


def test_a_trajectory_that_is_none_says_why() -> None:
    message = "trajectory: expected at least one column, got none."
    assert repr(Trajectory()) == f"<Trajectory: {message}>"
    assert html(Trajectory()) == f"<div><b>Trajectory</b><br>{message}</div>"
    shown = Trajectory(rewards=torch.ones(2, 3), actions=torch.ones(2, 4))
    assert repr(shown).startswith("<Trajectory: column 'rewards': expected B = 4 as in the other")
    assert "column &#x27;rewards&#x27;: expected B = 4" in html(shown)
    assert "column 'rewards': expected a tensor or array" in repr(Trajectory(rewards=7))  # type: ignore[arg-type]


# -- HTML ------------------------------------------------------------------------------------


def test_html_says_the_same_in_a_table() -> None:
    shown = Trajectory(rewards=torch.ones(2, 3), actions=torch.ones(2, 3, 4))
    th, td = (f'<{tag} style="text-align: left">' for tag in ("th", "td"))
    assert html(shown) == (
        "<div><b>Trajectory</b><br>T = 2, B = 3<table>"
        f"<tr>{th}column</th>{th}dtype</th>{th}shape</th></tr>"
        f"<tr>{td}actions</td>{td}float32</td>{td}[2, 3, 4]</td></tr>"
        f"<tr>{td}rewards</td>{td}float32</td>{td}[2, 3]</td></tr>"
        "</table></div>"
    )


def test_names_and_paths_are_no_markup(tmp_path: Path) -> None:
    path = tmp_path / '<i>"&'
    fields = {"<b>": torch.ones(1, 1), "x": {"'y</td>": torch.ones(1, 1)}}
    with opened(path) as buffer:
        buffer.add_trajectories([fields])
        buffer.flush()
        with ReplayReader(path) as reader:
            weights_id = Trajectory.from_columns(fields, 0, "</b><script>")
            shown: list[Shows] = [buffer, reader, reader.get_trajectory(0), weights_id]
            pages = [html(each) for each in shown]
    for page in pages:
        assert set(re.findall(r"</?(\w+)", page)) == {"div", "b", "br", "table", "tr", "th", "td"}
        assert page.count("<b>") == page.count("</b>") == 1
        assert "&lt;b&gt;</td>" in page
        assert "x.&#x27;y&lt;/td&gt;</td>" in page
    assert all("/&lt;i&gt;&quot;&amp;</b>" in page for page in pages[:2])


def test_html_has_no_colours_and_needs_nothing_else() -> None:
    with TrajectoryReplayBuffer() as buffer:
        fill(buffer, 1)
        page = html(buffer)
    assert set(re.findall(r'style="([^"]*)"', page)) == {"text-align: left"}
    assert not re.search("color|class|src|href|script|#[0-9a-f]{3}", page)


# -- what it must not do ---------------------------------------------------------------------


def test_no_file_is_read_to_show_a_store(tmp_path: Path, opened_files: list[str]) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 3)
    opened_files.clear()
    with ReplayReader(tmp_path) as reader:
        assert "36 rows" in repr(reader)
        assert "36 rows" in html(reader)
    assert opened_files == []


def test_nothing_waits_for_who_holds_the_locks(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
        with buffer._add_lock, buffer._save_lock, buffer._window.change_lock:
            assert "12 rows" in repr(buffer)
            assert "12 rows" in html(buffer)


def test_a_forked_child_shows_what_it_has(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        fill(buffer, 1)
        buffer.flush()
        child = os.fork()
        if not child:
            os._exit(0 if "12 rows" in repr(buffer) + html(buffer) else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("show", [Shown.as_text, Shown.as_html])
def test_what_a_terminal_would_obey_is_shown_as_its_escape(show: Callable[[Any], str]) -> None:
    text = show(Shown("a\x1b[2J", "b\nc", ["d"], [["e\r\udcff"]]))
    assert r"a\x1b[2J" in text
    assert r"b\nc" in text
    assert r"e\r\udcff" in text
    text.encode()
    assert printable("ä → ü") == "ä → ü"


def test_sizes_are_told_as_the_command_line_tells_them() -> None:
    from rich.filesize import decimal

    for size in (0, 2, 999, 1000, 1049, 1_500_000, 10**9, 12 * 10**12, 10**18):
        assert told_bytes(size) == decimal(size)
