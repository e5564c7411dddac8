"""`mmbuf merge`, `mmbuf split`, `mmbuf convert`: `mmbuf.transfer` with a progress bar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from mmbuf import storage, transfer
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import say
from mmbuf.errors import MmbufError

SOURCE = "A store, a checkpoint or a directory of RLinf's."
TARGET = "A new path or an empty directory."
FORMATS = ", ".join(storage.FORMATS)

Target = Annotated[Path, typer.Argument(help=TARGET)]
Source = Annotated[Path, typer.Argument(help=SOURCE)]
OptionalFormat = Annotated[
    str | None, typer.Option("--format", help=f"{FORMATS}; by default each file keeps its own.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")]

# What the arguments of `transfer` are called here.
_OPTIONS = {
    "trajectory_format": "--format",
    "order": "--order",
    "first": "--first",
    "num_shards": "--shards",
}


def merge(
    sources: Annotated[list[Path], typer.Argument(help=SOURCE)],
    target: Target,
    order: Annotated[
        str,
        typer.Option(
            help="interleaved: by their ids; appended: one source after the other; "
            "added: by their times of addition."
        ),
    ] = "interleaved",
    trajectory_format: OptionalFormat = None,
    columns: Annotated[
        str, typer.Option(help="same: of all sources; common: some may lack columns of others.")
    ] = "same",
    as_json: AsJson = False,
) -> None:
    """Bring the trajectories of several stores together in a new one, numbered anew."""
    with _shown("merging") as on_progress:
        result = transfer.merge(
            sources,
            target,
            order=order,
            trajectory_format=trajectory_format,
            columns=columns,
            on_progress=on_progress,
        )
    _tell(result, target, as_json)


def split(
    source: Source,
    target: Target,
    first: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the N oldest trajectories.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(min=1, metavar="M", help="All, in M parts: target/rank_0, rank_1, ..."),
    ] = None,
    trajectory_format: OptionalFormat = None,
    as_json: AsJson = False,
) -> None:
    """Bring the oldest trajectories of a store to a new one, or all of them in parts."""
    if (first is None) == (shards is None):
        raise typer.BadParameter("expected either --first or --shards.")
    with _shown("splitting") as on_progress:
        result = transfer.split(
            source,
            target,
            first=first,
            num_shards=shards,
            trajectory_format=trajectory_format,
            on_progress=on_progress,
        )
    _tell(result, target, as_json)


def convert(
    source: Source,
    target: Target,
    trajectory_format: Annotated[str, typer.Option("--format", help=FORMATS)],
    as_json: AsJson = False,
) -> None:
    """Bring a store to a new one in another format."""
    with _shown("converting") as on_progress:
        result = transfer.convert(source, target, trajectory_format, on_progress=on_progress)
    _tell(result, target, as_json)


@contextmanager
def _shown(what: str) -> Iterator[transfer.OnProgress]:
    """A progress bar. An argument that is refused is an MmbufError."""
    with shown(what) as show:
        try:
            yield show
        except MmbufError:
            raise
        except ValueError as error:
            name, colon, what = str(error).partition(":")
            raise MmbufError(f"{_OPTIONS.get(name, name)}{colon}{what}") from error


def _tell(result: transfer.Transferred, target: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    say(
        f"{target}: {result.num_trajectories:,} trajectories, {result.num_rows:,} rows, "
        f"{decimal(result.size_bytes)}"
    )
    if result.num_duplicates:
        say(f"left out, since another source has them too: {result.num_duplicates:,}")
