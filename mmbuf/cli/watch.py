"""`mmbuf watch`: stores while they grow, as a live screen or as JSON."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table as Grid

from mmbuf import storage
from mmbuf.analysis.episodes import OPEN, Episodes
from mmbuf.analysis.rows import TrajectoryRows
from mmbuf.cli.screen import (
    AsJson,
    Paths,
    RoleOptions,
    console,
    disk_bytes_of,
    show_json,
    told,
    writer_of,
)
from mmbuf.errors import CorruptError
from mmbuf.locations import is_pattern, location, matches
from mmbuf.roles import Roles, Told, parsed
from mmbuf.stores import Stores
from mmbuf.terminal import printable
from mmbuf.window import Item

RATE_S = 10.0  # rates are those of the last seconds
NUM_RETURNS = 20  # of the newest episodes
_MAX_READ = 8  # trajectories, to find them


def watch(
    paths: Paths,
    interval: Annotated[
        float, typer.Option(min=0.05, metavar="SECONDS", help="From one look to the next.")
    ] = 1.0,
    window: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="The trainer's sample_window_size; 0: all."),
    ] = 0,
    role: RoleOptions = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a store while it grows: rates, counts, newest returns, who writes it. Ctrl-C ends."""
    screen = console()
    try:
        with ExitStack() as stack:
            followed = Followed(paths, window, parsed(role or ()))
            stack.callback(followed.close)
            is_live = screen.is_terminal and not (as_json or once)
            live = Live(console=screen, auto_refresh=False) if is_live else None
            if live is not None:
                stack.enter_context(live)
            while True:
                facts = followed.look(time.time())
                if live is not None:
                    live.update(_grid_of(facts), refresh=True)
                elif as_json:
                    show_json(facts)
                    sys.stdout.flush()
                else:
                    screen.print(_grid_of(facts))
                if once:
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return


class Followed:
    """What stores hold, followed through adds, removals and other writers. No lock is taken.

    FileNotFoundError where there is no store; of a pattern, stores may come later.
    """

    def __init__(self, paths: Sequence[Path], window_size: int, roles: Told | None = None) -> None:
        self._paths = [location("path", path) for path in paths]
        self._window_size = window_size
        self._told = roles
        self._stores = Stores(self._paths, len(paths) > 1, None, follow=True, is_common=True)
        self._items: dict[Hashable, Item] = {}  # oldest first
        self._disk_bytes: dict[Hashable, int] = {}
        self._returns: dict[str, list[float]] = {}  # by uuid
        self._is_open = False

    def look(self, now: float) -> dict[str, Any]:
        """The facts of this moment, which is ``now``; errors are those of reading journals."""
        self._take_in()
        entries = [entry for _, entry, _ in self._items.values()]
        window = entries[-self._window_size :]  # 0: all
        recent = list(
            itertools.takewhile(lambda entry: entry.added_at > now - RATE_S, reversed(entries))
        )
        newest = entries[-1] if entries else None
        return {
            "time": now,
            "paths": self._paths,
            "num_stores": self._stores.num_stores,
            "num_trajectories": len(entries),
            "num_rows": sum(entry.num_samples for entry in entries),
            "adds_per_s": len(recent) / RATE_S,
            "rows_per_s": sum(entry.num_samples for entry in recent) / RATE_S,
            "window": {
                "num_trajectories": len(window),
                "num_rows": sum(entry.num_samples for entry in window),
                "age_s": _age_of(window[0].added_at, now) if window else None,
            },
            "size_bytes": sum(entry.size_bytes for entry in entries),
            "disk_bytes": sum(self._disk_bytes.values()),
            "last_add_age_s": _age_of(newest.added_at, now) if newest else None,
            "version": newest.model_weights_id if newest else None,
            "returns": self._newest_returns(),
            "writers": self._writers(),
        }

    def close(self) -> None:
        """Let go of the journals."""
        self._stores.close()

    def _take_in(self) -> None:
        news = self._stores.refresh() if self._is_open else self._stores.open()
        self._is_open = True
        for key in news.gone:
            self._items.pop(key, None)
            self._disk_bytes.pop(key, None)
        if self._stores.schema is not None:
            come = [(entry, where) for _, entry, where in news.come.values()]
            storage.check_entries(self._stores.schema, come)
        for key, item in news.come.items():
            self._items[key] = item
            self._disk_bytes[key] = disk_bytes_of(*item[1:])
        if news.is_late and not self._stores.is_single:
            self._items = dict(sorted(self._items.items(), key=lambda pair: pair[1][1].added_at))
        news.gone.clear()
        news.come.clear()
        news.is_late = False
        if news.error is not None:
            raise news.error

    def _newest_returns(self) -> list[float]:
        """Of the newest episodes that ended, the last one last."""
        found: list[float] = []
        known, self._returns = self._returns, {}
        for item in itertools.islice(reversed(self._items.values()), _MAX_READ):
            uuid = item[1].uuid
            returns = known[uuid] if uuid in known else self._returns_of(item)
            self._returns[uuid] = returns
            found[:0] = returns
            if len(found) >= NUM_RETURNS:
                break
        return found[-NUM_RETURNS:]

    def _returns_of(self, item: Item) -> list[float]:
        """Of the episodes that ended in it, in the order of their ends."""
        _, entry, directory = item
        schema = self._stores.schema
        assert schema is not None
        try:
            with ExitStack() as stack:
                rows = TrajectoryRows(entry, directory, entry.schema or schema, stack)
                roles = Roles(rows.schema, self._told)
                episodes = Episodes(rows, roles)
                returns = episodes.returns
                if returns is None:
                    return []
                order = episodes.end_steps.argsort(kind="stable")
                if roles.ends:
                    order = order[(episodes.ended_by != OPEN)[order]]
                found: list[float] = returns[order].tolist()
                return found
        except (OSError, CorruptError):
            return []  # gone meanwhile, or for `mmbuf verify` to name

    def _writers(self) -> dict[str, dict[str, Any]]:
        """Who holds each store now; those that nobody does are left out."""
        directories = [
            directory
            for path in self._paths
            for directory in (matches(path) if is_pattern(path) else [path])
        ]
        return {where: writer for where in directories if (writer := writer_of(where))}


def _age_of(added_at: float, now: float) -> float | None:
    """None of RLinf's files, which do not say when they were added."""
    return max(0.0, now - added_at) if added_at else None


def _grid_of(facts: dict[str, Any]) -> Grid:
    window, returns = facts["window"], [r for r in facts["returns"] if not math.isnan(r)]
    num_nan = len(facts["returns"]) - len(returns)
    but_nan = f", {num_nan} more are NaN" if num_nan else ""
    writers = [printable(f"process {w['pid']} on {w['host']}") for w in facts["writers"].values()]
    stores = "1 store" if facts["num_stores"] == 1 else f"{facts['num_stores']:,} stores"
    version = printable(facts["version"] or "(none)")
    grid = Grid(title="\n".join(map(printable, facts["paths"])), show_header=False, min_width=60)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    lines = [
        ("trajectories", f"{facts['num_trajectories']:,}", f"{facts['adds_per_s']:,.1f} a second"),
        ("rows", f"{facts['num_rows']:,}", f"{facts['rows_per_s']:,.0f} a second"),
        (
            "window",
            f"{window['num_trajectories']:,}",
            f"{window['num_rows']:,} rows, the oldest added {_told_age(window['age_s'])}",
        ),
        ("length", decimal(facts["size_bytes"]), f"of the files of {stores}"),
        ("space taken", decimal(facts["disk_bytes"]), "on the disk"),
        ("last add", _told_age(facts["last_add_age_s"]), f"version {version}"),
        (
            "return",
            told(sum(returns) / len(returns) if returns else None),
            f"mean of the newest {len(returns)} episodes, the last {told(returns[-1])}{but_nan}"
            if returns
            else f"no episode ended yet{but_nan}",
        ),
        ("written by", f"{len(writers):,}", "\n".join(writers) or "nobody now"),
    ]
    for line in lines:
        grid.add_row(*line)
    return grid


def _told_age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:,.1f} {unit} ago"
    return f"{seconds:,.1f} s ago"
