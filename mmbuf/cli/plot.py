"""`mmbuf plot`: how episodes went as trajectories were added, or one trajectory over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mmbuf.analysis import Tables
from mmbuf.analysis.episodes import OPEN
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import AsJson, Paths, show_json, tables_of
from mmbuf.errors import MmbufError
from mmbuf.packages import optional_package
from mmbuf.schema import Array, Column

_NUM_FRAMES = 10
_MAX_NAMED = 10  # versions in the legend
_MIN_PIXELS = 8  # of a side of an image
_CHANNELS = (1, 3, 4)
_PALE = 0.3


def plot(
    paths: Paths,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf.")],
    trajectory: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show this one over time; its id or uuid."),
    ] = None,
    env: Annotated[
        int | None, typer.Option(min=0, help="The environment of --trajectory; 0 by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the returns, lengths and rewards of a store, or one trajectory and its images."""
    if env is not None and trajectory is None:
        raise MmbufError("--env: expected --trajectory with it, got none.")
    with shown("reading") as show:
        tables = tables_of(paths, show, trajectory)
        if not tables.entries:
            raise MmbufError(f"{paths[0]}: expected a trajectory, got an empty store.")
        figure = draw_episodes(tables) if trajectory is None else draw_steps(tables, env or 0)
    try:
        figure.savefig(out)
    except ValueError as error:  # no such format
        raise MmbufError(f"--out: {error}") from error
    if as_json:
        show_json({"file": str(out)})
    else:
        print(out)


def draw_episodes(tables: Tables) -> Any:
    """A figure of the returns and lengths of episodes, and of rewards, over the trajectories.

    These are in the order of their addition, and have the colour of their version. Episodes that no
    flag ends are pale.
    """
    matplotlib = optional_package("matplotlib", "analysis")
    entries = {entry.uuid: (i, entry) for i, (entry, _) in enumerate(tables.entries)}
    versions = list(dict.fromkeys(entry.model_weights_id for _, entry in entries.values()))
    scale = np.linspace(0, 1, len(versions))
    colours = dict(zip(versions, matplotlib.colormaps["viridis"](scale), strict=True))
    figure, axes = _figure(["return", "length", "mean reward"])
    points: list[list[tuple[int, float, Array]]] = [[] for _ in axes]
    for batch in tables.episodes.batches(["uuid", "episode_return", "length", "ended_by"]):
        uuids, returns, lengths, reasons = (column.to_pylist() for column in batch.columns)
        place, entry = entries[uuids[0]]
        colour = colours[entry.model_weights_id]
        for total, length, reason in zip(returns, lengths, reasons, strict=True):
            shade = colour * (1, 1, 1, _PALE if reason == OPEN else 1)
            points[1].append((place, length, shade))
            if total is not None:
                points[0].append((place, total, shade))
        if None not in returns:
            points[2].append((place, sum(returns) / sum(lengths), colour))
    for axis, found in zip(axes, points, strict=True):
        if found:
            x, y, shades = zip(*found, strict=True)
            axis.scatter(x, y, s=14, c=np.stack(shades), linewidths=0)
    if len(versions) <= _MAX_NAMED:
        for name, colour in colours.items():
            axes[0].scatter([], [], color=[colour], label=name or "(none)")
        axes[0].legend(loc="best", frameon=False)
    axes[-1].set_xlabel("trajectories, in the order of their addition")
    return figure


def draw_steps(tables: Tables, env: int) -> Any:
    """A figure of one environment of the one trajectory: numbers over time, strips of images.

    Short columns are lines, flags steps; of an image there are ten frames at the most.
    """
    ((entry, _),) = tables.entries
    if env >= entry.num_envs:
        raise MmbufError(f"--env: expected one of {entry.num_envs} environments, got {env}.")
    assert tables.schema is not None
    narrow = set(tables.steps.columns)
    images = [column for column in tables.schema.columns if _is_image(column)]
    lines = [c for c in tables.schema.columns if c.name in narrow and _is_line(c)]
    names = [column.name for column in (*lines, *images)]
    if not names:
        raise MmbufError(f"trajectory {entry.trajectory_id}: expected numbers to draw, got none.")
    batch = next(tables.steps.batches(names))

    def values_of(name: str) -> Array:
        numbers = getattr(batch[name], "values", batch[name])  # of lists
        values: Array = numbers.to_numpy(zero_copy_only=False)
        return values.reshape(entry.num_steps, entry.num_envs, -1)[:, env]

    figure, axes = _figure(names)
    steps = np.arange(entry.num_steps)
    for axis, column in zip(axes, lines, strict=False):
        style = "steps-mid" if column.dtype == "bool" else "default"
        values = values_of(column.name).astype(np.float64)
        axis.plot(steps, values, drawstyle=style, linewidth=1)
    frames = np.unique(np.linspace(0, entry.num_steps - 1, _NUM_FRAMES).round().astype(int))
    for axis, column in zip(axes[len(lines) :], images, strict=True):
        pictures = [_pixels(row, column) for row in values_of(column.name)[frames]]
        axis.imshow(np.concatenate(pictures, axis=1))
        width = pictures[0].shape[1]
        axis.set_xticks([(i + 0.5) * width for i in range(len(frames))], [str(t) for t in frames])
        axis.set_yticks([])
    axes[0].set_title(f"trajectory {entry.trajectory_id}, environment {env}", loc="left")
    axes[-1].set_xlabel("step")
    return figure


def _figure(labels: list[str]) -> tuple[Any, list[Any]]:
    """A figure of one axis below the other."""
    pictures = optional_package("matplotlib.figure", "analysis")
    figure = pictures.Figure(figsize=(9, 0.8 + 1.9 * len(labels)), dpi=120, layout="constrained")
    axes = list(figure.subplots(len(labels), 1, squeeze=False)[:, 0])
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label, fontsize=8)
        axis.locator_params(axis="x", integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    return figure, axes


def _is_line(column: Column) -> bool:
    """Whether its numbers are lines: actions, rewards, flags, states."""
    return not (column.is_text or column.dtype.startswith("complex") or _is_image(column))


def _is_image(column: Column) -> bool:
    """Whether a row is an image: ``(H, W, C)`` or ``(C, H, W)`` of bytes or floats."""
    if len(column.row_shape) != 3 or not (column.dtype == "uint8" or "float" in column.dtype):
        return False
    first, middle, last = column.row_shape
    sides = (first, middle) if last in _CHANNELS else (middle, last)
    return (last in _CHANNELS or first in _CHANNELS) and min(sides) >= _MIN_PIXELS


def _pixels(row: Array, column: Column) -> Array:
    """One image ``[H, W, 3]``, or 4; floats are taken to be in ``[0, 1]``."""
    image: Array = row.reshape(column.row_shape)
    if image.shape[2] not in _CHANNELS:
        image = image.transpose(1, 2, 0)
    if image.shape[2] == 1:
        image = image.repeat(3, axis=2)
    return image if image.dtype == np.uint8 else image.astype(np.float64).clip(0, 1)
