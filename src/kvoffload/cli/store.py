# SPDX-License-Identifier: Apache-2.0
"""``kvoffload store``: maintenance of a disk tier, also while servers use it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvoffload.tiering.stores.disk.admin import DiskRoot, is_disk_root
from kvoffload.tiering.stores.fs.admin import StoreRoot
from kvoffload.units import format_bytes, parse_bytes

__all__ = ["register"]

_Root = Annotated[Path, typer.Argument(help="Folder of the tier: its 'path' in the configuration.", show_default=False)]

_console = Console(soft_wrap=True)


def register(app: typer.Typer) -> None:
    store = typer.Typer(no_args_is_help=True, help="Maintain a disk tier, also while servers use it.")
    for command in (ls, du, verify, gc, clear):
        store.command()(command)
    app.add_typer(store, name="store")


def ls(root: _Root) -> None:
    """List the namespaces with their blocks, bytes, and oldest and last use."""
    found = _open(root).usage()
    if not found:
        _console.print("No blocks yet.")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("namespace", overflow="fold")
    for heading in ("blocks", "size", "oldest use", "last use"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        uses = (_ago(one.oldest_use_ns), _ago(one.last_use_ns))
        table.add_row(escape(one.name), f"{one.num_blocks:,}", format_bytes(one.size_bytes), *uses)
    _console.print(table)


def du(root: _Root) -> None:
    """Show the bytes in use, by namespace and in all, and the free space of the disk."""
    found = _open(root).usage()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for one in sorted(found, key=lambda one: -one.size_bytes):
        table.add_row(format_bytes(one.size_bytes), escape(one.name))
    table.add_row(format_bytes(sum(one.size_bytes for one in found)), "[bold]in all[/bold]")
    table.add_row(format_bytes(shutil.disk_usage(root).free), "free on the disk")
    _console.print(table)


def verify(
    root: _Root,
    namespace: Annotated[str | None, typer.Argument(help="Verify this namespace only.", show_default=False)] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Delete the bad blocks.")] = False,
) -> None:
    """Read every block and verify its checksum. The exit code is 1 if bad blocks remain."""
    store = _open(root)
    directory = None if namespace is None else store.directory(namespace)
    if isinstance(store, DiskRoot):
        _verify(store, list(store.files(directory)), repair)
    else:
        _verify(store, list(store.files(directory)), repair)


class _Block(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


_B = TypeVar("_B", bound=_Block)


class _Verifiable(Protocol[_B]):
    def is_sound(self, block: _B, /) -> bool | None: ...

    def remove(self, blocks: list[_B], /) -> int: ...


def _verify(store: _Verifiable[_B], blocks: list[_B], repair: bool) -> None:
    bad, unreadable = list[_B](), 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as progress:
        for file in progress.track(blocks, description="verifying"):
            try:
                if store.is_sound(file) is False:
                    bad.append(file)
                    progress.console.print(f"bad: {escape(file.path)}")
            except OSError as exc:
                unreadable += 1
                progress.console.print(f"unreadable: {escape(file.path)}: {exc.strerror}")
    total = sum(file.size_bytes for file in blocks)
    _console.print(f"{len(blocks):,} blocks ({format_bytes(total)}) read, {len(bad):,} bad, {unreadable:,} unreadable.")
    if bad and repair:
        _console.print(f"{store.remove(bad):,} deleted.")
    elif bad:
        _console.print("A server counts each of them as a miss when it reads it; --repair deletes them now.")
    if unreadable or (bad and not repair):
        raise typer.Exit(1)


def gc(
    root: _Root,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Quota to enforce, for example 200GiB. Evicts the blocks used least recently ('fs': the oldest)."
        ),
    ] = None,
) -> None:
    """Enforce a quota on the existing files, and delete what killed writers left."""
    limit = None if max_bytes is None else parse_bytes(max_bytes, "--max-bytes")
    store = _open(root)
    dead = store.sweep()
    evicted, used_bytes = store.shrink(limit)
    _console.print(
        f"{evicted:,} blocks deleted, {dead:,} leftovers of dead writers removed, {format_bytes(used_bytes)} in use."
    )
    if limit is not None and used_bytes > limit:
        _console.print("The quota is still exceeded: by other files in the folder, or because a server is writing.")
        raise typer.Exit(1)


def clear(
    root: _Root,
    namespace: Annotated[str, typer.Argument(help="Namespace to delete, as 'ls' shows it.", show_default=False)],
) -> None:
    """Delete a namespace with all its blocks."""
    store = _open(root)
    _console.print(f"{store.clear(store.directory(namespace)):,} blocks deleted.")


def _open(root: Path) -> StoreRoot | DiskRoot:
    return DiskRoot(root) if is_disk_root(root) else StoreRoot(root)


def _ago(when_ns: int) -> str:
    if not when_ns:
        return "-"
    seconds = max(0.0, time.time() - when_ns / 1e9)
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
