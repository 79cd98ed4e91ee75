# SPDX-License-Identifier: Apache-2.0
"""The ``kvoffload`` command. One module per subcommand, with a function or a ``Typer`` of its name."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload import __version__

if TYPE_CHECKING:
    import typer

_COMMANDS = ("demo", "check-config", "doctor", "simulate", "plan", "explain", "top", "store")
"""In the order of ``--help``."""


def make_app(commands: Sequence[str] = _COMMANDS) -> typer.Typer:
    """Return the command with these of its subcommands, by default all. Raises ``ImportError`` without the extra
    ``cli``."""
    import typer

    app = typer.Typer(
        name="kvoffload",
        help="KV-cache offloading for LLM servers.",
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help texts, because rich cuts text that exceeds its columns
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(is_asked: bool) -> None:
        if is_asked:
            print(f"kvoffload {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=show_version, help="Show the version and exit."
        ),
    ) -> None:
        pass

    for name in commands:
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"kvoffload.cli.{module}"), module)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point. A caller's mistake, a missing extra or a disk that fails gives one sentence on stderr and the exit
    code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:  # without the parser, whose import takes longer than all else
        print(f"kvoffload {__version__}")
        sys.exit(0)
    from kvoffload.errors import ConfigError, MissingExtraError, reason_of

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # many containers have no UTF-8
    try:
        try:
            app = make_app(arguments[:1]) if arguments and arguments[0] in _COMMANDS else make_app()
        except ModuleNotFoundError as exc:
            if (exc.name or "kvoffload").partition(".")[0] == "kvoffload":
                raise
            raise MissingExtraError(
                f"The command needs kvoffload's extra 'cli': pip install typer rich prometheus-client pyyaml ({exc})."
            ) from exc
        app(args=argv, prog_name="kvoffload")
    except (ConfigError, MissingExtraError) as exc:
        print(f"kvoffload: {exc}", file=sys.stderr)
        sys.exit(2)
    except OSError as exc:
        place = f"{exc.filename}: " if exc.filename is not None else ""
        print(f"kvoffload: {place}{reason_of(exc)}.", file=sys.stderr)
        sys.exit(2)
