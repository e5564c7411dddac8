"""Files as the recorders of others write them become stores with every row in its place.

Each file is written here with the calls of h5py that the recorder makes: the names, shapes, types
and attributes are theirs.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data import run_python
from PIL import Image

from mmbuf import CorruptError, MmbufError, ReplayReader, SchemaError
from mmbuf.analysis import Tables
from mmbuf.exchange.hdf5 import from_hdf5


def stored(path: Path) -> list[dict[str, Any]]:
    with ReplayReader(path) as reader:
        return [reader.get_trajectory(i).to_columns() for i in reader.trajectory_ids]


def names_of(path: Path) -> list[str]:
    schema = Tables(path).schema
    assert schema is not None
    return sorted(column.name for column in schema.columns)


def episodes_of(path: Path, *names: str) -> list[tuple[Any, ...]]:
    table = Tables(path).episodes.to_arrow(list(names))
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def isaac_lab(path: Path, lengths: list[int]) -> None:
    """As `HDF5DatasetFileHandler.write_episode` does."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(lengths)
        data.attrs["env_args"] = json.dumps({"env_name": "Isaac-Stack-Cube", "type": 2})
        for i, steps in enumerate(lengths):
            demo = data.create_group(f"demo_{i}")
            demo.attrs["num_samples"] = steps
            demo.attrs["seed"] = 100 + i
            demo.attrs["success"] = i % 2 == 0
            rows = np.arange(steps, dtype=np.float32)[:, None] + i * 100
            for name, values in {
                "actions": rows.repeat(7, 1),
                "obs/joint_pos": rows.repeat(9, 1),
                "initial_state/articulation/robot/root_pose": np.full((1, 7), i, np.float32),
                "states/articulation/robot/root_pose": rows.repeat(7, 1) + 0.5,
            }.items():
                demo.create_dataset(name, data=values, compression="gzip")


def test_isaac_lab_s_demo_10_comes_after_demo_9_and_its_initial_state_is_the_episode_s(
    tmp_path: Path,
) -> None:
    lengths = [i + 1 for i in range(12)]  # one of one step too
    isaac_lab(tmp_path / "dataset.hdf5", lengths)
    made = from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "store")
    assert (made.num_trajectories, made.num_rows, made.left_out) == (12, sum(lengths), {})
    for i, (steps, found) in enumerate(zip(lengths, stored(tmp_path / "store"), strict=True)):
        rows = (np.arange(steps, dtype=np.float32) + i * 100)[:, None, None]
        assert np.array_equal(found["actions"], rows.repeat(7, 2))
        assert np.array_equal(found["curr_obs"]["joint_pos"], rows.repeat(9, 2))
        states = found["states"]["articulation"]["robot"]["root_pose"]
        assert np.array_equal(states, rows.repeat(7, 2) + 0.5)
        once = found["episode"]["initial_state"]["articulation"]["robot"]["root_pose"]
        assert np.array_equal(once, np.full((steps, 1, 7), i, np.float32))
    name = "initial_state.articulation.robot.root_pose"
    assert episodes_of(tmp_path / "store", "length", "seed", "success", name) == [
        (i + 1, 100 + i, i % 2 == 0, [i] * 7) for i in range(12)
    ]


def test_values_of_episodes_are_left_out_by_name(tmp_path: Path) -> None:
    isaac_lab(tmp_path / "dataset.hdf5", [2, 3])
    skip = ["initial_state", "episode.seed", "obs/joint_pos"]
    from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "store", skip=skip)
    assert names_of(tmp_path / "store") == [
        *("actions", "episode.success", "states.articulation.robot.root_pose")
    ]
    with pytest.raises(SchemaError, match=r"--skip: expected one of actions, .*, got 'sead'"):
        from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "other", skip=["sead"])


def test_a_value_that_some_episodes_lack_is_left_out_and_said(tmp_path: Path) -> None:
    isaac_lab(tmp_path / "dataset.hdf5", [2, 3, 4])
    with h5py.File(tmp_path / "dataset.hdf5", "a") as file:
        del file["data/demo_1"].attrs["seed"]
        file["data/demo_2"].attrs["success"] = 0.5
        file["data"].create_group("demo_3").attrs["num_samples"] = 0  # recorded without a step
    made = from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "store")
    assert made.num_trajectories == 3
    assert made.left_out == {
        "episode.seed": "data/demo_1 has none",
        "episode.success": "it is not of one type and shape",
        "data/demo_3": "it has no step",
    }


def maniskill(path: Path, lengths: list[int], *, has_json: bool = True) -> None:
    """As `RecordEpisode.flush_trajectory` does."""
    told = []
    with h5py.File(path, "w") as file:
        for i, steps in enumerate(lengths):
            group = file.create_group(f"traj_{i}", track_order=True)
            rows = np.arange(steps + 1, dtype=np.float32)[:, None] + i * 100
            obs = group.create_group("obs", track_order=True)
            obs.create_group("agent", track_order=True)["qpos"] = rows.repeat(9, 1)
            group["actions"] = rows[1:].repeat(8, 1)
            group["terminated"] = np.arange(steps) == steps - 1
            group["truncated"] = np.zeros(steps, bool)
            group["success"] = np.arange(steps) == steps - 1
            states = group.create_group("env_states", track_order=True)
            states.create_group("actors", track_order=True)["cube"] = rows.repeat(13, 1)
            group["rewards"] = rows[1:, 0]
            told.append(
                {
                    "episode_id": i,
                    "episode_seed": 7 + i,
                    "control_mode": "pd_joint_delta_pos",
                    "elapsed_steps": steps,
                    "reset_kwargs": {"options": {}, "seed": 7 + i},
                    "success": True,
                }
            )
    if has_json:
        path.with_suffix(".json").write_text(json.dumps({"env_info": {}, "episodes": told}))


@pytest.mark.parametrize("has_json", [True, False])
def test_observations_of_one_step_more_are_curr_obs_and_next_obs_of_maniskill(
    tmp_path: Path, has_json: bool
) -> None:
    lengths = [i + 2 for i in range(11)]
    maniskill(tmp_path / "trajectory.h5", lengths, has_json=has_json)
    from_hdf5(tmp_path / "trajectory.h5", tmp_path / "store")
    for i, (steps, found) in enumerate(zip(lengths, stored(tmp_path / "store"), strict=True)):
        rows = (np.arange(steps + 1, dtype=np.float32) + i * 100)[:, None, None]
        assert np.array_equal(found["curr_obs"]["agent"]["qpos"], rows[:-1].repeat(9, 2))
        assert np.array_equal(found["next_obs"]["agent"]["qpos"], rows[1:].repeat(9, 2))
        assert np.array_equal(found["env_states"]["actors"]["cube"], rows[:-1].repeat(13, 2))
        assert np.array_equal(found["next_env_states"]["actors"]["cube"], rows[1:].repeat(13, 2))
        assert np.array_equal(found["rewards"], rows[1:, :, 0])
        is_last = (np.arange(steps) == steps - 1)[:, None]
        for name in ("terminations", "dones", "success"):
            assert np.array_equal(found[name], is_last), name
        assert not found["truncations"].any()
    assert episodes_of(tmp_path / "store", "length", "ended_by") == [
        (steps, "termination") for steps in lengths
    ]
    if has_json:
        names = ("episode_seed", "control_mode", "success", "reset_kwargs.seed")
        assert episodes_of(tmp_path / "store", *names) == [
            (7 + i, "pd_joint_delta_pos", True, 7 + i) for i in range(11)
        ]


def test_maniskill_s_damaged_json_is_named(tmp_path: Path) -> None:
    maniskill(tmp_path / "trajectory.h5", [3])
    (tmp_path / "trajectory.json").write_text("{")
    with pytest.raises(CorruptError, match=r"trajectory\.json: expected ManiSkill's JSON, got"):
        from_hdf5(tmp_path / "trajectory.h5", tmp_path / "store")


def jpeg(image: np.ndarray[Any, Any]) -> bytes:
    """As ``cv2.imencode(".jpg", image)``, for which the first channel is blue."""
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image[..., ::-1])).save(data, "JPEG", quality=95)
    return data.getvalue()


def aloha(path: Path, i: int, steps: int, *, is_compressed: bool) -> list[np.ndarray[Any, Any]]:
    """As ``record_sim_episodes.py``, or with images compressed and padded as the robot's does."""
    rng = np.random.default_rng(i)
    colours = rng.integers(0, 256, (steps, 3), np.uint8)
    images = [np.broadcast_to(colour, (16, 24, 3)) for colour in colours]
    with h5py.File(path, "w") as root:
        root.attrs["sim"] = not is_compressed
        obs = root.create_group("observations")
        folder = obs.create_group("images")
        if is_compressed:
            root.attrs["compress"] = True
            encoded = [jpeg(image) for image in images]
            size = max(map(len, encoded)) + i  # another one in each file
            padded = np.zeros((steps, size), np.uint8)
            for row, data in zip(padded, encoded, strict=True):
                row[: len(data)] = np.frombuffer(data, np.uint8)
            folder.create_dataset("top", data=padded, chunks=(1, size))
            root["compress_len"] = np.array([[len(data) for data in encoded]], np.float32)
        else:
            folder.create_dataset("top", data=np.stack(images), chunks=(1, 16, 24, 3))
        obs.create_dataset("qpos", (steps, 14), "f4")[...] = np.full((steps, 14), i)
        obs.create_dataset("qvel", (steps, 14), "f4")[...] = np.arange(steps)[:, None]
        root.create_dataset("action", (steps, 14), "f4")[...] = np.full((steps, 14), -i)
    return images


@pytest.mark.parametrize("is_compressed", [False, True])
def test_aloha_s_episodes_are_files_and_their_images_are_decoded(
    tmp_path: Path, is_compressed: bool
) -> None:
    (tmp_path / "task").mkdir()
    images = [
        aloha(tmp_path / "task" / f"episode_{i}.hdf5", i, 3 + i, is_compressed=is_compressed)
        for i in range(11)
    ]
    made = from_hdf5(tmp_path / "task", tmp_path / "store")
    assert (made.num_trajectories, made.left_out) == (11, {})
    for i, found in enumerate(stored(tmp_path / "store")):
        assert np.array_equal(found["actions"], np.full((3 + i, 1, 14), -i, np.float32))
        assert np.array_equal(found["curr_obs"]["qpos"], np.full((3 + i, 1, 14), i, np.float32))
        top = found["curr_obs"]["images"]["top"].numpy()[:, 0]
        assert (top.shape, top.dtype) == ((3 + i, 16, 24, 3), np.uint8)
        apart = np.abs(top.astype(int) - np.stack(images[i]).astype(int)).max()
        assert apart <= (4 if is_compressed else 0)
    is_sim = not is_compressed
    assert episodes_of(tmp_path / "store", "length", "sim") == [(3 + i, is_sim) for i in range(11)]


def test_one_file_of_aloha_s_is_one_episode(tmp_path: Path) -> None:
    aloha(tmp_path / "episode_0.hdf5", 0, 4, is_compressed=False)
    made = from_hdf5(tmp_path / "episode_0.hdf5", tmp_path / "store")
    assert (made.num_trajectories, made.num_rows) == (1, 4)


def test_images_that_are_strings_of_bytes_are_decoded(tmp_path: Path) -> None:
    images = [np.full((8, 8, 3), value, np.uint8) for value in (10, 200)]
    encoded = [jpeg(image) for image in images]
    size = max(map(len, encoded))
    with h5py.File(tmp_path / "episode_0.hdf5", "w") as file:
        file["action"] = np.zeros((2, 6))
        file["observations/images/fixed"] = np.array(encoded, f"S{size}")
        several = file.create_dataset("observations/images/ragged", (2,), h5py.vlen_dtype(np.uint8))
        for row, data in enumerate(encoded):
            several[row] = np.frombuffer(data, np.uint8)
    from_hdf5(tmp_path / "episode_0.hdf5", tmp_path / "store")
    ((found,),) = [stored(tmp_path / "store")]
    for name in ("fixed", "ragged"):
        assert found["curr_obs"]["images"][name][:, 0, 0, 0].tolist() == [[10] * 3, [200] * 3]


def robomimic(path: Path, *, has_next: bool, is_longer: bool) -> None:
    """As ``dataset_states_to_obs.py`` and ``split_train_val.py`` do."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for i in range(11):
            steps = i + 2
            demo = data.create_group(f"demo_{i}")
            rows = np.arange(steps + 1, dtype=np.float64)[:, None] + i * 100
            demo["obs/eef"] = rows if is_longer else rows[:-1]
            if has_next:
                demo["next_obs/eef"] = rows[1:]
            demo["actions"] = rows[1:]
            demo["dones"] = (np.arange(steps) == steps - 1).astype(np.int64)
            demo["states"] = rows[:-1].repeat(3, 1)
            demo.attrs["model_file"] = f"<mujoco model='{i}'/>"
            demo.attrs["num_samples"] = steps
        data.attrs["env_args"] = "{}"
        file["mask/train"] = np.array([b"demo_10", b"demo_2", b"demo_9"])
        file["mask/valid"] = np.array([b"demo_1"])


@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("is_longer", [True, False])
def test_observations_of_robomimic_have_the_next_that_the_file_has(
    tmp_path: Path, has_next: bool, is_longer: bool
) -> None:
    robomimic(tmp_path / "demo.hdf5", has_next=has_next, is_longer=is_longer)
    from_hdf5(tmp_path / "demo.hdf5", tmp_path / "store")
    for i, found in enumerate(stored(tmp_path / "store")):
        rows = (np.arange(i + 3, dtype=np.float64) + i * 100)[:, None, None]
        assert np.array_equal(found["curr_obs"]["eef"], rows[:-1])
        assert ("next_obs" in found) == (has_next or is_longer)
        if has_next or is_longer:
            assert np.array_equal(found["next_obs"]["eef"], rows[1:])
    models = episodes_of(tmp_path / "store", "model_file")
    assert models == [(f"<mujoco model='{i}'/>",) for i in range(11)]


def test_a_mask_of_robomimic_chooses_episodes(tmp_path: Path) -> None:
    path = tmp_path / "demo.hdf5"
    robomimic(path, has_next=True, is_longer=False)
    from_hdf5(path, tmp_path / "store", filter_key="train")
    assert [len(found["actions"]) for found in stored(tmp_path / "store")] == [4, 11, 12]
    with pytest.raises(SchemaError, match="--filter-key: expected one of train, valid, got 'test'"):
        from_hdf5(path, tmp_path / "other", filter_key="test")
    with h5py.File(path, "a") as file:
        file["mask/odd"] = np.array([b"demo_77"])
    with pytest.raises(SchemaError, match=r"mask/odd: expected names in data/, got 'demo_77'"):
        from_hdf5(path, tmp_path / "other", filter_key="odd")
    isaac_lab(tmp_path / "isaac.hdf5", [2])
    with pytest.raises(SchemaError, match="got 'train'"):
        from_hdf5(tmp_path / "isaac.hdf5", tmp_path / "other", filter_key="train")


def test_a_leaf_of_another_length_is_named_with_what_leaves_it_out(tmp_path: Path) -> None:
    isaac_lab(tmp_path / "dataset.hdf5", [4, 5])
    with h5py.File(tmp_path / "dataset.hdf5", "a") as file:
        for i in range(2):
            file[f"data/demo_{i}/camera/timestamps"] = np.arange(9)
    with pytest.raises(SchemaError) as failure:
        from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "store")
    assert str(failure.value) == (
        f"{tmp_path}/dataset.hdf5: 'camera/timestamps': expected a row for each step, one more, or "
        "one: data/demo_0 has 9 of it and 4 steps. Leave it out: --skip camera.timestamps"
    )
    made = from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "store", skip=["camera"])
    assert made.num_trajectories == 2


def test_two_sources_of_one_column_are_refused(tmp_path: Path) -> None:
    isaac_lab(tmp_path / "dataset.hdf5", [4])
    with h5py.File(tmp_path / "dataset.hdf5", "a") as file:
        file["data/demo_0/curr_obs/joint_pos"] = np.zeros((4, 9))
        file["data/demo_0/seed"] = np.zeros((1, 2))
    with pytest.raises(
        SchemaError, match=r"column 'episode\.seed': expected one source of it, got"
    ):
        from_hdf5(tmp_path / "dataset.hdf5", tmp_path / "store")


@pytest.mark.parametrize("damage", ["cut", "data"])
def test_a_damaged_hdf5_file_is_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "dataset.hdf5"
    isaac_lab(path, [200, 300])
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    else:
        with h5py.File(path) as file:
            chunk = file["data/demo_1/actions"].id.get_chunk_info(0)
        data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(data)
    with pytest.raises(CorruptError) as failure:
        from_hdf5(path, tmp_path / "store")
    told = str(failure.value)
    assert told.startswith(f"{path}: ")
    assert "expected a whole HDF5 file, got one that cannot be read (" in told
    assert told.endswith("). Copy it anew.")
    assert ("data/demo_1/actions" in told) == (damage == "data")
    assert not (tmp_path / "store").exists()


def test_a_file_that_its_recorder_still_writes_says_so(tmp_path: Path) -> None:
    path = tmp_path / "dataset.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = 1
        file.flush()
        script = (
            "import sys; from mmbuf.exchange.hdf5 import from_hdf5\n"
            "try: from_hdf5(*sys.argv[1:])\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        ran = run_python(script, path, tmp_path / "store")
    assert ran.stdout == (
        f"MmbufError {path}: expected a file that nobody writes, got one that another process has "
        "open. Wait until it has closed it.\n"
    )


def test_a_directory_without_files_of_hdf5_is_named(tmp_path: Path) -> None:
    (tmp_path / "readme.md").touch()
    with pytest.raises(SchemaError, match=r"expected HDF5 files \(\.hdf5, \.h5, \.hdf\) in it"):
        from_hdf5(tmp_path, tmp_path / "store")


def test_one_file_of_a_directory_is_open_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task").mkdir()
    for i in range(5):
        aloha(tmp_path / "task" / f"episode_{i}.hdf5", i, 2, is_compressed=False)
    living: list[Any] = []
    really = h5py.File

    def open_file(*arguments: Any) -> Any:
        assert not any(living)
        living.append(really(*arguments))
        return living[-1]

    monkeypatch.setattr(h5py, "File", open_file)
    assert from_hdf5(tmp_path / "task", tmp_path / "store").num_trajectories == 5
    assert len(living) == 15  # to look for groups, to plan, to read


def test_nothing_but_h5py_is_needed_and_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MmbufError, match=r'h5py is missing. Install it: pip install "mmbuf'):
        from_hdf5(tmp_path, tmp_path / "store")
