"""What a path that a user gives means: itself, a home directory, a pattern; never a URL."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from data import opened

from mmbuf import ReplayReader, TrajectoryReplayBuffer, health, transfer
from mmbuf.analysis import Tables
from mmbuf.locations import LocationError, is_pattern, location, locations, matches

SWEEP = "sweep [lr=0.1]"
ODD = ["[a]", "a*b", "what?", "new\nline", "[!x", "é [1-3]", os.fsdecode(b"\xff[0]"), "**", "{a,b}"]


def item(value: float) -> dict[str, Any]:
    return {"x": torch.full((2, 2), value)}


def store(path: Path, value: float = 0.0) -> Path:
    with opened(path) as buffer:
        buffer.add_trajectories([item(value)])
    return path


def values(reader: ReplayReader) -> list[float]:
    return [float(reader.get_trajectory(i).to_columns()["x"][0, 0]) for i in reader.trajectory_ids]


def test_a_pattern_below_a_directory_with_brackets_in_its_name_matches(tmp_path: Path) -> None:
    for rank in range(2):
        store(tmp_path / SWEEP / f"rank_{rank}", rank)
    pattern = tmp_path / SWEEP / "rank_*"
    with ReplayReader(pattern) as reader:
        assert values(reader) == [0.0, 1.0]
    assert len(Tables(pattern)) == 2


def test_stores_under_a_name_with_brackets_that_are_not_there_yet_are_seen(tmp_path: Path) -> None:
    with ReplayReader(tmp_path / SWEEP / "rank_*") as reader:
        assert len(reader) == 0
        store(tmp_path / SWEEP / "rank_0", 5)
        reader._stores._looked_at = -10.0  # it looks once a second
        reader.refresh()
        assert values(reader) == [5.0]


def test_a_store_whose_own_name_has_brackets_is_waited_for_as_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "run[1]"
    with ReplayReader(path) as reader:
        path.mkdir()  # it is no store yet
        reader._stores._looked_at = -10.0
        reader.refresh()
        store(path, 5)
        reader._stores._looked_at = -10.0
        reader.refresh()
        assert values(reader) == [5.0]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_store_that_exists_is_itself_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    store(tmp_path / "a", 1)  # what the wildcards would match
    path = store(tmp_path / name, 2)
    with ReplayReader(path) as reader:
        assert (values(reader), reader.trajectory_ids) == ([2.0], [0])
        shutil.rmtree(path)
        reader.refresh()
        assert len(reader) == 1  # no other takes its place
    assert is_pattern(str(path)) == any(c in name for c in "*?[")


def test_wildcards_match_where_no_directory_has_that_very_name(tmp_path: Path) -> None:
    for name in ("a1", "a2", "a[1]", ".a1"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "a3").touch()
    (tmp_path / "a4").symlink_to(tmp_path / "a1")
    (tmp_path / "a5").symlink_to(tmp_path / "nowhere")

    def found(pattern: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in matches(str(tmp_path / pattern))]

    assert found("a?") == ["a1", "a2", "a4"]
    assert found("a[2]") == ["a2"]
    assert found("a[1]") == ["a[1]"]
    assert found("a[1]/d*") == ["a[1]/deep"]
    assert found("a[[]1]") == ["a[1]"]
    assert found("*/deep") == ["a1/deep", "a2/deep", "a4/deep", "a[1]/deep"]
    assert found(".*/deep") == [".a1/deep"]
    assert found("none*/x") == found("a3/*") == []


def test_a_tilde_is_the_home_directory_unless_a_directory_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path="~/run/store") as buffer:
        buffer.add_trajectories([item(3)])
        buffer.save_checkpoint(Path("~/checkpoint"))
        assert buffer.auto_save_path == str(tmp_path / "home/run/store")
    assert not (tmp_path / "~").exists()
    with ReplayReader(["~/run/*"]) as reader:
        assert values(reader) == [3.0]
    assert health.verify("~/checkpoint") == []
    store(tmp_path / "~", 4)
    with ReplayReader("~") as reader:
        assert (reader.path, values(reader)) == (str(tmp_path / "~"), [4.0])


URLS = {
    "s3://bucket/run": "Copy it here first, or mount it, and give the path that it has then: "
    "bucket/run",
    "file:///data/run": "Give the path itself: /data/run",
    "file://localhost/data/run": "Give the path itself: /data/run",
    "gs:/bucket/run": "Copy it here first, or mount it, and give the path that it has then: "
    "bucket/run",  # as pathlib has it
}


@pytest.mark.parametrize("url", URLS, ids=str)
def test_a_url_is_refused_by_name_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = store(tmp_path / "source")
    with TrajectoryReplayBuffer() as buffer:
        calls = {
            "auto_save_path": lambda: TrajectoryReplayBuffer(auto_save=True, auto_save_path=url),
            "save_path": lambda: buffer.save_checkpoint(url),
            "load_path": lambda: buffer.load_checkpoint(url),
            "path": lambda: ReplayReader([source, url]),
            "target": lambda: transfer.convert(source, url, "npy"),
        }
        for name, call in calls.items():
            with pytest.raises(LocationError) as error:
                call()
            scheme = url.partition(":")[0]
            assert str(error.value) == (
                f"{name}: expected a path on this machine, got a URL ({scheme}): {url}. {URLS[url]}"
            )
    assert os.listdir(tmp_path) == ["source"]


def test_what_looks_like_a_url_and_exists_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "run").mkdir(parents=True)
    assert location("path", "s3://run") == str(tmp_path / "s3:/run")
    assert location("path", "c:/run") == str(tmp_path / "c:/run")
    assert locations("path", ["a", b"b"]) == ([str(tmp_path / "a"), str(tmp_path / "b")], True)


def test_a_relative_path_stays_the_same_directory_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(Path("store")) as buffer, ReplayReader("st*") as reader:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        buffer.add_trajectories([item(6)])
        buffer.flush()
        reader._stores._looked_at = -10.0
        reader.refresh()
        assert values(reader) == [6.0]
    assert os.listdir(tmp_path / "other") == []
