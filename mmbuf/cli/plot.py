"""`mmbuf plot`: how episodes went as trajectories were added, or one trajectory over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mmbuf.analysis import Tables
from mmbuf.analysis.episodes import OPEN
from mmbuf.cli.damage import tell_skipped
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import AsJson, Paths, RoleOptions, say, show_json, tables_of
from mmbuf.errors import MmbufError
from mmbuf.packages import optional_package
from mmbuf.schema import Array, Column
from mmbuf.terminal import printable

_NUM_FRAMES = 10
_MAX_NAMED = 10  # versions in the legend
_MIN_PIXELS = 8  # of a side of an image
_CHANNELS = (1, 3, 4)
_PALE = 0.3
_HEIGHT = 1.9  # of an axis, in inches
_FLAG_HEIGHT = 0.6
_STRIP_WIDTH = 7.5  # of the frames side by side
_TICKS = 0.4  # below them


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
    role: RoleOptions = None,
    as_json: AsJson = False,
) -> None:
    """Draw the returns, lengths and rewards of a store, or one trajectory and its images."""
    if env is not None and trajectory is None:
        raise MmbufError("--env: expected --trajectory with it, got none.")
    with shown("reading") as show:
        tables = tables_of(paths, show, trajectory, role, skip_damaged=True)
        if not tables.entries:
            raise MmbufError(f"{paths[0]}: expected a trajectory, got an empty store.")
        num_nan = None
        if trajectory is None:
            figure, num_nan = draw_episodes(tables)
        else:
            figure = draw_steps(tables, env or 0)
    try:
        figure.savefig(out)
    except ValueError as error:  # no such format
        raise MmbufError(f"--out: {error}") from error
    if as_json:
        counts = {} if num_nan is None else {"num_nan_returns": num_nan}
        show_json({"file": str(out)} | counts)
    else:
        if num_nan:
            say(f"{num_nan:,} episodes have a reward that is NaN; their returns are left out")
        say(str(out))
    tell_skipped(tables)


def draw_episodes(tables: Tables) -> tuple[Any, int]:
    """A figure of the returns and lengths of episodes, and of rewards, over the trajectories.

    These are in the order of their addition, and have the colour of their version. Episodes that no
    flag ends are pale. Those whose return is NaN have a length only; their number is returned.
    """
    matplotlib = optional_package("matplotlib", "analysis")
    entries = [entry for entry, _ in tables.entries]
    versions = list(dict.fromkeys(entry.model_weights_id for entry in entries))
    numbers = {name: number for number, name in enumerate(versions)}
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 1, len(versions)))
    of_entries = colours[[numbers[entry.model_weights_id] for entry in entries]]
    places, returns, lengths, are_open, num_nan = _episodes_of(tables)
    shades = of_entries[places]
    shades[are_open, 3] = _PALE
    has_return = ~np.isnan(returns)
    figure, axes = _figure(["return", "length", "mean reward"])
    _scatter(axes[0], places[has_return], returns[has_return], shades[has_return])
    _scatter(axes[1], places, lengths, shades)
    found = np.unique(places[has_return])
    sums, steps = (
        np.bincount(places, np.where(has_return, values, 0.0))[found]
        for values in (returns, lengths)
    )
    _scatter(axes[2], found, sums / steps, of_entries[found])
    axes[1].locator_params(axis="y", integer=True)
    for axis in axes:
        axis.set_xlim(-1, len(entries))
        axis.tick_params(labelbottom=axis is axes[-1])
    if len(versions) <= _MAX_NAMED:
        marks = [axes[0].scatter([], [], color=[colour]) for colour in colours]
        labels = [str(number) for number in range(len(versions))]  # some names would be left out
        legend = figure.legend(
            marks, labels, loc="outside upper left", frameon=False, ncols=2, fontsize=8
        )
        for text, name in zip(legend.get_texts(), versions, strict=True):
            _write(text, name or "(none)")
    else:
        scale = matplotlib.colors.Normalize(0, len(versions) - 1)
        bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, "viridis"), ax=axes, aspect=60)
        bar.set_label("version, from the first to the last", fontsize=8)
        bar.locator.set_params(integer=True)
    axes[-1].set_xlabel("trajectories, in the order of their addition")
    return figure, num_nan


def _episodes_of(tables: Tables) -> tuple[Array, Array, Array, Array, int]:
    """Of each episode the place of its trajectory, return (or NaN), length, whether it is open.

    And how many returns are NaN, and not only unknown.
    """
    place_of = {entry.uuid: place for place, (entry, _) in enumerate(tables.entries)}
    batches = list(tables.episodes.batches(["uuid", "episode_return", "length", "ended_by"]))
    places = [place_of[uuid] for batch in batches for uuid in batch["uuid"].to_pylist()]
    reasons = [reason for batch in batches for reason in batch["ended_by"].to_pylist()]
    returns, lengths = (
        np.concatenate([np.empty(0), *(b[n].to_numpy(zero_copy_only=False) for b in batches)])
        for n in ("episode_return", "length")
    )
    num_unknown = sum(batch["episode_return"].null_count for batch in batches)
    num_nan = int(np.isnan(returns).sum()) - num_unknown
    are_open = np.array([r == OPEN for r in reasons], bool)
    return np.array(places, int), returns, lengths, are_open, num_nan


def _scatter(axis: Any, x: Array, y: Array, colours: Array) -> None:
    if len(x):
        axis.scatter(x, y, s=14, c=colours, linewidths=0)


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

    frames = np.unique(np.linspace(0, entry.num_steps - 1, _NUM_FRAMES).round().astype(int))
    strips = [
        np.concatenate([_pixels(row, column) for row in values_of(column.name)[frames]], axis=1)
        for column in images
    ]
    heights = [_FLAG_HEIGHT if column.dtype == "bool" else _HEIGHT for column in lines]
    shapes = [strip.shape for strip in strips]
    heights += [min(_HEIGHT, _STRIP_WIDTH * high / wide) + _TICKS for high, wide, _ in shapes]
    figure, axes = _figure(names, heights)
    steps = np.arange(entry.num_steps)
    for axis, column in zip(axes, lines, strict=False):
        is_flag = column.dtype == "bool"
        values = values_of(column.name).astype(np.float64)
        axis.plot(steps, values, drawstyle="steps-mid" if is_flag else "default", linewidth=1)
        axis.set_xlim(-0.5, entry.num_steps - 0.5)
        axis.tick_params(labelbottom=column is lines[-1])
        if is_flag:
            axis.set_yticks([0, 1], ["no", "yes"])
            axis.set_ylim(-0.2, 1.2)
            _label_beside(axis, column.name)
    for axis, column, strip in zip(axes[len(lines) :], images, strips, strict=True):
        axis.imshow(strip)
        width = strip.shape[1] / len(frames)
        axis.set_xticks([(i + 0.5) * width for i in range(len(frames))], [str(t) for t in frames])
        axis.set_yticks([])
        _label_beside(axis, column.name)
    axes[0].set_title(f"trajectory {entry.trajectory_id}, environment {env}", loc="left")
    axes[-1].set_xlabel("step")
    return figure


def _figure(labels: list[str], heights: list[float] | None = None) -> tuple[Any, list[Any]]:
    """A figure of one axis below the other; ``heights`` in inches."""
    pictures = optional_package("matplotlib.figure", "analysis")
    heights = heights or [_HEIGHT] * len(labels)
    figure = pictures.Figure(figsize=(9, 0.8 + sum(heights)), dpi=120, layout="constrained")
    ratios = {"height_ratios": heights}
    axes = list(figure.subplots(len(labels), 1, squeeze=False, gridspec_kw=ratios)[:, 0])
    for axis, label in zip(axes, labels, strict=True):
        _write(axis.yaxis.label, label)
        axis.yaxis.label.set_fontsize(8)
        axis.locator_params(axis="x", integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    return figure, axes


def _label_beside(axis: Any, name: str) -> None:
    """Upright, where the axis is lower than its name is long."""
    label = axis.yaxis.label
    _write(label, *name.split("."))
    label.set(rotation=0, horizontalalignment="right", verticalalignment="center", fontsize=8)


def _write(label: Any, *parts: str) -> None:
    """Put a name, whose parts stand below each other, where a text is. It is no formula."""
    label.set_parse_math(False)
    label.set_text(".\n".join(map(printable, parts)))


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
