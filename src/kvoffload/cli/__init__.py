# SPDX-License-Identifier: Apache-2.0
"""The ``kvoffload`` command. One module per subcommand; each has a ``register(app)``."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["main", "make_app"]

_COMMANDS: tuple[str, ...] = ("demo", "check_config", "doctor", "simulate", "plan", "explain", "top", "store")
"""Modules of this package that register a subcommand, in the order of ``--help``."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"kvoffload {version('kvoffload')}")
        sys.exit(0)


def make_app() -> typer.Typer:
    """The command with all of its subcommands. Raises ``ImportError`` without the extra ``cli``."""
    import typer

    app = typer.Typer(
        name="kvoffload", help="KV-cache offloading for LLM servers.", no_args_is_help=True, add_completion=False
    )

    @app.callback()
    def options(
        show_version: bool = typer.Option(
            False, "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ) -> None:
        pass

    for name in _COMMANDS:
        importlib.import_module(f"kvoffload.cli.{name}").register(app)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point. A caller's mistake, a missing extra or a disk that fails gives one sentence on stderr and the exit
    code 2."""
    from kvoffload.errors import ConfigError, MissingExtraError

    try:
        try:
            app = make_app()
        except ModuleNotFoundError as exc:
            if (exc.name or "kvoffload").partition(".")[0] == "kvoffload":
                raise
            raise MissingExtraError(
                f"The command needs kvoffload's extra 'cli': pip install typer rich prometheus-client pyyaml ({exc})."
            ) from exc
        app(args=argv, prog_name="kvoffload")
    except (ConfigError, MissingExtraError, OSError) as exc:
        print(f"kvoffload: {exc}", file=sys.stderr)
        sys.exit(2)
