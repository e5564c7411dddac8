"""`mmbuf verify`, `mmbuf repair`, `mmbuf doctor`: `mmbuf.health` and `mmbuf.doctor`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from mmbuf import doctor as examination
from mmbuf import health
from mmbuf.cli.progress import shown
from mmbuf.cli.screen import say

Store = Annotated[Path, typer.Argument(help="A store, a checkpoint or a directory of RLinf's.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Files that are read at once; 8 by default.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def verify(path: Store, threads: Threads = None, as_json: AsJson = False) -> None:
    """Read all of a store and say what is wrong; exit code 1 if anything is damaged."""
    num_trajectories = 0
    with shown("verifying") as show:

        def on_progress(done: int, total: int) -> None:
            nonlocal num_trajectories
            num_trajectories = total
            show(done, total)

        findings = health.verify(path, num_threads=threads, on_progress=on_progress)
    damaged = [finding for finding in findings if finding.is_damage]
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            say(f"{'damage' if finding.is_damage else 'remark'}: {finding.path}: {finding.what}")
        fault = f"{len(damaged):,} things are damaged" if damaged else "nothing is damaged"
        say(f"{path}: {num_trajectories:,} trajectories read, {fault}")
    if damaged:
        raise typer.Exit(1)


def repair(
    path: Store,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and touch nothing.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Make the index anew from the files; what is damaged moves to quarantine/."""
    with shown("repairing") as show:
        report = health.repair(path, dry_run=dry_run, num_threads=threads, on_progress=show)
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    would = "would be " if dry_run else ""
    for name, why in report.quarantined.items():
        say(f"{would}moved to {health.QUARANTINE}/: {name}: {why}")
    for name in report.lost:
        say(f"{would}no longer listed, since it has no file: {name}")
    for name in report.taken_in:
        say(f"{would}listed again: {name}")
    for name in report.corrected:
        say(f"{would}listed as it is, not as the index said: {name}")
    for name, trajectory_id in report.renumbered.items():
        say(f"{would}numbered {trajectory_id}: {name}")
    for name in report.rewritten:
        say(f"{would}written anew: {name}")
    if not report.has_changes:
        say("nothing to do")
    say(f"{path}: {report.num_trajectories:,} trajectories, {report.num_rows:,} rows")


def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="A store or a checkpoint; without: the machine only.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether the machine gives what a store needs, and what to do where it does not."""
    remarks = examination.examine(path)
    if as_json:
        print(json.dumps([dataclasses.asdict(remark) for remark in remarks]))
        return
    for remark in remarks:
        needed = "" if not remark.needed else f" (needed: {_told(remark.name, remark.needed)})"
        mark = "ok  " if remark.is_fine else "mind"
        say(f"{mark} {remark.name}: {_told(remark.name, remark.value)}{needed}")
        if remark.remedy:
            say(f"     {remark.remedy}")


def _told(name: str, value: Any) -> str:
    if isinstance(value, int):
        return decimal(value) if "bytes" in name else f"{value:,}"
    if value is None:
        return "unlimited" if name.endswith(("left", "bytes", "files")) else "unknown"
    return str(value)
