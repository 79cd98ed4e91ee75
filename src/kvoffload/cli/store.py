# SPDX-License-Identifier: Apache-2.0
"""``kvoffload store``: maintenance of a disk tier, even while servers use it."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvoffload.cli.output import Json, print_json, print_table
from kvoffload.errors import ConfigError
from kvoffload.sim.table import Table
from kvoffload.tiering.stores.disk.admin import DiskRoot, is_disk_root
from kvoffload.tiering.stores.fs.admin import StoreRoot
from kvoffload.tiering.stores.root import NamespaceUsage, display_name, find_directory
from kvoffload.units import counted, format_bytes

_Root = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="The tier's directory: its 'path' in the configuration.", show_default=False),
]
_Yes = Annotated[bool, typer.Option("--yes", help="Delete without asking. Use it in scripts.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Report what would be deleted, but delete nothing.")]


_ID_DIGITS = 8
_LEAST_NAME = 20


store = typer.Typer(no_args_is_help=True, help="Maintain a 'disk' or 'fs' tier, even while servers use it.")


@store.command()
def ls(root: _Root, as_json: Json = False) -> None:
    """List the namespaces of a tier.

    Shows the model of each namespace, an id that 'clear' accepts, its number of blocks, their size on the
    disk (for a 'disk' tier: whole slabs, including empty slots), and the oldest and latest use. --json shows full
    names.
    """
    found = _open(root).usage()
    if as_json:
        print_json({"namespaces": [_figures(one) for one in found]})
        return
    if not found:
        print("No blocks yet.")
        return
    rows = []
    for one in found:
        model, number = _parts_of(one.name)
        size, times = format_bytes(one.size_bytes), (_ago(one.oldest_use_ns), _ago(one.last_use_ns))
        rows.append([model, number, f"{one.num_blocks:,}", size, *times])
    headings = ["model", "id", "blocks", "on disk", "oldest use", "last use"]
    wide = sum(max(map(len, column)) for column in zip(headings[1:], *(row[1:] for row in rows), strict=True))
    room = max(_LEAST_NAME, shutil.get_terminal_size().columns - wide - 2 * len(headings[1:]))
    for row in rows:
        row[0] = row[0] if len(row[0]) <= room else f"{row[0][: room - 3]}..."
    print_table(Table(headings, rows), is_wide=True)


@store.command()
def clear(
    root: _Root,
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="Namespace to delete, given by its name or id as 'ls' shows it.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all namespaces.")] = False,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete the blocks of one namespace or of all namespaces.

    Asks for confirmation, unless you give --yes.
    """
    if (namespace is None) != everything:
        raise ConfigError("Give one namespace as 'kvoffload store ls' shows it, or --all to delete all of them.")
    tier = _open(root)
    only = None if namespace is None else _directory(tier, root, namespace)
    found = [one for one in tier.usage() if only is None or one.directory == only]
    blocks, size_bytes = sum(one.num_blocks for one in found), sum(one.size_bytes for one in found)
    what = f"{counted(blocks, 'block')} ({format_bytes(size_bytes)}) of {counted(len(found), 'namespace')}"
    if not dry_run:
        _ask(f"Delete {what} from {root}?", yes)
    directories = [one.directory for one in found] if only is None else [only]
    deleted = 0 if dry_run else sum(tier.clear(directory) for directory in directories)
    if as_json:
        figures = {"namespaces": [_figures(one) for one in found], "blocks": blocks, "bytes": size_bytes}
        print_json(figures | ({} if dry_run else {"deleted": deleted}))
    elif dry_run:
        print(f"{what} would be deleted.")
    else:
        print(f"{counted(deleted, 'block')} deleted.")


def _ask(question: str, is_answered: bool) -> None:
    """Return if the user agrees, or ``is_answered``. Raise ``ConfigError`` if no terminal is available to ask."""
    if is_answered:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(
            f"{question} There is no terminal for an answer, so nothing was deleted; add --yes to delete "
            "without a question."
        )
    if not typer.confirm(question, err=True):
        print("Nothing was deleted.", file=sys.stderr)
        raise typer.Exit(1)


def _open(root: Path) -> StoreRoot | DiskRoot:
    return DiskRoot(root) if is_disk_root(root) else StoreRoot(root)


def _parts_of(name: str) -> tuple[str, str]:
    """Split a namespace into its readable part and the beginning of its hash, which is enough to name it."""
    found = re.fullmatch(r"(?:(.*)-)?([0-9a-f]{32})(.*)", name)
    if found is None:
        return name, "-"
    return f"{found[1] or 'unnamed'}{found[3]}", found[2][:_ID_DIGITS]


def _directory(tier: StoreRoot | DiskRoot, root: Path, namespace: str) -> str:
    """Return the directory of a namespace, given by its name or by its id as ``ls`` shows it. Raises
    ``ConfigError``."""
    directories = tier.directories()
    if len(namespace) >= _ID_DIGITS:
        found = [each for each in directories if _parts_of(display_name(each))[1] == namespace[:_ID_DIGITS]]
        if len(found) == 1 and re.fullmatch("[0-9a-f]+", namespace):
            return found[0]
    return find_directory(namespace, directories, str(root))


def _figures(usage: NamespaceUsage) -> Mapping[str, Any]:
    """Return the figures of a namespace for JSON. Times are seconds since 1970, or ``None`` without a block."""
    return {
        "namespace": usage.name,
        "blocks": usage.num_blocks,
        "bytes": usage.size_bytes,
        "oldest_use_s": usage.oldest_use_ns / 1e9 or None,
        "last_use_s": usage.last_use_ns / 1e9 or None,
    }


def _ago(when_ns: int) -> str:
    if not when_ns:
        return "-"
    seconds = max(0.0, time.time() - when_ns / 1e9)
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
