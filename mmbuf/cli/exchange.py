"""`mmbuf export`, `mmbuf import`: stores as other tools' files, and their files as stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from mmbuf.analysis import Tables
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import AsJson, RoleOptions, say, show_json
from mmbuf.errors import MmbufError
from mmbuf.exchange.episodes import Imported
from mmbuf.exchange.hdf5 import from_hdf5
from mmbuf.exchange.hf import to_hf
from mmbuf.exchange.minari import from_minari, to_minari
from mmbuf.exchange.parquet import to_parquet
from mmbuf.exchange.target import Exported
from mmbuf.roles import parsed

EXPORTS: dict[str, Callable[..., Exported]] = {
    "parquet": to_parquet,
    "hf": to_hf,
    "minari": to_minari,
}
IMPORTS: dict[str, Callable[..., Imported]] = {"hdf5": from_hdf5, "minari": from_minari}


def export(
    path: Annotated[
        Path,
        typer.Argument(
            help="A store, a checkpoint, a directory of RLinf's, or a pattern such as 'run/rank_*'."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="A new path or an empty directory.")],
    to: Annotated[str, typer.Option("--to", metavar="KIND", help=f"{', '.join(EXPORTS)}.")],
    wide: Annotated[
        list[str] | None,
        typer.Option("--wide", metavar="NAME", help="Write this wide column (images) too."),
    ] = None,
    role: RoleOptions = None,
    as_json: AsJson = False,
) -> None:
    """Write a store as files of another kind: its tables, or (minari) its episodes."""
    _check("--to", to, EXPORTS)
    with shown("exporting") as show:
        tables = Tables(path, on_progress=show, roles=parsed(role or ()))
        exported = EXPORTS[to](tables, directory, wide=tuple(wide or ()))
    if as_json:
        show_json(dataclasses.asdict(exported))
        return
    say(
        f"{directory}: {exported.num_trajectories:,} trajectories, "
        f"{exported.num_episodes:,} episodes, {exported.num_rows:,} rows"
    )


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A file of robomimic's, Isaac Lab's, ManiSkill's, ALOHA's or D4RL's, or a "
            "directory of such; a data set's directory of Minari's."
        ),
    ],
    path: Annotated[Path, typer.Argument(help="A new path or an empty directory.")],
    kind: Annotated[str, typer.Option("--from", metavar="KIND", help=f"{', '.join(IMPORTS)}.")],
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="NAME", help="Leave this out, and what is below it."),
    ] = None,
    filter_key: Annotated[
        str | None,
        typer.Option("--filter-key", metavar="NAME", help="Only the episodes of mask/NAME (hdf5)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a new store of other tools' episodes, each a trajectory of one environment."""
    _check("--from", kind, IMPORTS)
    options = {} if filter_key is None else {"filter_key": filter_key}
    if options and kind != "hdf5":
        raise MmbufError(f"--filter-key: expected --from hdf5 with it, got --from {kind}.")
    with shown("importing") as show:
        imported = IMPORTS[kind](source, path, skip=skip or (), on_progress=show, **options)
    if as_json:
        show_json(dataclasses.asdict(imported))
        return
    say(f"{path}: {imported.num_trajectories:,} trajectories, {imported.num_rows:,} rows")
    for name, why in imported.left_out.items():
        say(f"left out: {name}: {why}")


def _check(option: str, kind: str, known: Iterable[str]) -> None:
    if kind not in known:
        raise MmbufError(f"{option}: expected one of {', '.join(known)}, got {kind!r}.")
