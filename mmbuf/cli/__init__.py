"""The command line: `mmbuf COMMAND`. One file per command, one line below that registers it."""

from __future__ import annotations

import sys

import mmbuf
from mmbuf.errors import MmbufError
from mmbuf.terminal import printable

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    _missing = error.name
else:
    _missing = None

    from mmbuf.cli import demo, exchange, health, inspect, plot, sql, transfer, watch
    from mmbuf.cli.damage import hint

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        # A traceback in a box hides what a bug report needs.
        pretty_exceptions_enable=False,
    )

    app.command()(demo.demo)
    app.command()(inspect.info)
    app.command()(inspect.ls)
    app.command()(inspect.head)
    app.command()(inspect.stats)
    app.command()(sql.sql)
    app.command()(plot.plot)
    app.command()(watch.watch)
    app.command()(transfer.merge)
    app.command()(transfer.split)
    app.command()(transfer.convert)
    app.command()(exchange.export)
    app.command("import")(exchange.import_)
    app.command()(health.verify)
    app.command()(health.repair)
    app.command()(health.doctor)

    def _show_version(is_asked: bool) -> None:
        if is_asked:
            typer.echo(f"mmbuf {mmbuf.__version__}")
            raise typer.Exit

    @app.callback()
    def _root(
        version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Memory-mapped columnar storage for reinforcement-learning trajectories."""


def main(*command: str) -> None:
    """Run the command line. What a user can mend is one message on stderr and exit code 1.

    The scripts in ``tools/`` give the name of the one ``command`` that they are.
    """
    if _missing is not None:
        sys.exit(f'mmbuf: the command needs {_missing}. Install it: pip install "mmbuf[cli]"')
    try:
        app([*command, *sys.argv[1:]], prog_name="mmbuf")
    except MmbufError as error:
        sys.exit(f"mmbuf: {error}{hint(error)}")
    except OSError as error:
        sys.exit(f"mmbuf: {printable(str(error))}{hint(error)}")
