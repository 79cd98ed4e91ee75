# SPDX-License-Identifier: Apache-2.0
"""``kvoffload store``: maintenance of a disk tier, even while servers use it."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvoffload.cli.output import Json, print_json, print_table, progress
from kvoffload.errors import ConfigError
from kvoffload.sim.table import Table
from kvoffload.tiering.stores.disk.admin import DiskRoot, is_disk_root
from kvoffload.tiering.stores.fs.admin import StoreRoot
from kvoffload.tiering.stores.root import NamespaceUsage, display_name, seal_of
from kvoffload.tiering.stores.seal import EncryptionKey, secret_id
from kvoffload.tiering.stores.secrets import read_keys
from kvoffload.units import counted, format_bytes, parse_bytes, printable

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

    Shows the model of each namespace, an id that the other commands accept, its number of blocks, their size on the
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
def verify(
    root: _Root,
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE", help="Verify only this namespace, given by its name or id.", show_default=False
        ),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Delete bad blocks.")] = False,
    seal_key_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="File with a 'seal_key' of the tier, to verify its blocks.", show_default=False
        ),
    ] = None,
    encryption_key_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="File with an 'encryption_key' of the tier.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every block and verify its checksum or seal.

    The exit code is 1 if bad blocks remain, or if blocks were skipped because their key was not given.
    """
    secrets = read_keys([{"file": str(file)} for file in seal_key_file or ()], "--seal-key-file")
    keys = read_keys([{"file": str(file)} for file in encryption_key_file or ()], "--encryption-key-file")
    secrets += [EncryptionKey(key) for key in keys]
    tier: Any = _open(root, secrets)  # each kind of root uses its own kind of block
    directories = tier.directories() if namespace is None else [_directory(tier, namespace)]
    sealed = [directory for directory in directories if seal_of(directory) not in ("", *map(secret_id, secrets))]
    blocks = [block for one in directories if one not in sealed for block in tier.files(one)]
    size_bytes = sum(block.size_bytes for block in blocks)
    bad: list[Any] = []
    unreadable: list[str] = []
    with progress("verify", len(blocks), "blocks") as advance:
        for block in blocks:
            said = ""
            try:
                if tier.is_sound(block) is False:
                    bad.append(block)
                    said = f"bad: {printable(block.path)}"
            except OSError as exc:
                unreadable.append(block.path)
                said = f"unreadable: {printable(block.path)}: {exc.strerror}"
            if said and not as_json:  # at once, because the user may not wait for all blocks
                print(said, flush=True)
            advance()
    deleted = tier.remove(bad) if bad and repair else None
    if as_json:
        print_json(
            {
                "blocks": len(blocks),
                "bytes": size_bytes,
                "bad": [block.path for block in bad],
                "unreadable": unreadable,
                "deleted": deleted,
                "sealed": [display_name(directory) for directory in sealed],
            }
        )
    else:
        print(
            f"{len(blocks):,} blocks ({format_bytes(size_bytes)}) read, {len(bad):,} bad, "
            f"{len(unreadable):,} unreadable."
        )
        if deleted is not None:
            print(f"{deleted:,} deleted.")
        elif bad:
            print("A server treats each bad block as a miss when it reads it. --repair deletes them.")
        if sealed:
            names = ", ".join(map(display_name, sealed))
            print(f"Not verified: {names}. Give their keys with --seal-key-file or --encryption-key-file.")
    if unreadable or sealed or (bad and not repair):
        raise typer.Exit(1)


@store.command()
def gc(
    root: _Root,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Quota to enforce, for example 200GiB. Deletes the least recently used blocks ('fs': the oldest). "
            "A running server still fills its own 'max_bytes'.",
        ),
    ] = None,
    yes: _Yes = False,
    dry_run: _DryRun = False,
    as_json: Json = False,
) -> None:
    """Enforce a quota, and delete partial files of killed servers.

    Deletes blocks only if you give --max-bytes, and asks first unless you give --yes. The exit code is 1 if the quota
    is still exceeded.
    """
    limit = None if max_bytes is None else parse_bytes(max_bytes, "--max-bytes")
    tier = _open(root)
    blocks, freed_bytes, used_bytes = tier.would_shrink(limit)
    if dry_run:
        if as_json:
            print_json({"bytes": used_bytes, "would_free_bytes": freed_bytes, "would_delete": blocks})
        else:
            print(
                f"{format_bytes(used_bytes)} are in use. {counted(blocks, 'block')} would be deleted, which would free "
                f"{format_bytes(freed_bytes)}."
            )
        return
    if freed_bytes:
        _ask(f"Delete {counted(blocks, 'block')} and free {format_bytes(freed_bytes)} in {root}?", yes)
    dead = tier.sweep()
    evicted, used_bytes = tier.shrink(limit)
    is_exceeded = limit is not None and used_bytes > limit
    if as_json:
        print_json({"bytes": used_bytes, "deleted": evicted, "leftovers": dead, "is_exceeded": is_exceeded})
    else:
        print(
            f"{evicted:,} blocks deleted, {dead:,} partial files of killed servers deleted, "
            f"{format_bytes(used_bytes)} in use."
        )
        if is_exceeded:
            print("The quota is still exceeded: a server is writing, or files cannot be deleted.")
    if is_exceeded:
        raise typer.Exit(1)


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

    Asks first, unless you give --yes.
    """
    if (namespace is None) != everything:
        raise ConfigError("Name one namespace, as 'kvoffload store ls' shows it, or use --all to delete all of them.")
    tier = _open(root)
    only = None if namespace is None else _directory(tier, namespace)
    found = [one for one in tier.usage() if only is None or one.directory == only]
    blocks, size_bytes = sum(one.num_blocks for one in found), sum(one.size_bytes for one in found)
    what = f"{blocks:,} blocks ({format_bytes(size_bytes)}) of {counted(len(found), 'namespace')}"
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
        print(f"{deleted:,} blocks deleted.")


def _ask(question: str, is_answered: bool) -> None:
    """Return if the user agrees, or ``is_answered``. Raise ``ConfigError`` if no terminal is available to ask."""
    if is_answered:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(f"{question} Nothing was deleted, because there is no terminal to ask; use --yes.")
    if not typer.confirm(question, err=True):
        print("Nothing was deleted.", file=sys.stderr)
        raise typer.Exit(1)


def _open(root: Path, secrets: Sequence[bytes] = ()) -> StoreRoot | DiskRoot:
    return DiskRoot(root, secrets) if is_disk_root(root) else StoreRoot(root, secrets)


def _parts_of(name: str) -> tuple[str, str]:
    """Split a namespace into its readable part and the beginning of its hash, which is enough to name it."""
    found = re.fullmatch(r"(?:(.*)-)?([0-9a-f]{32})(.*)", name)
    if found is None:
        return name, "-"
    return f"{found[1] or 'unnamed'}{found[3]}", found[2][:_ID_DIGITS]


def _directory(tier: StoreRoot | DiskRoot, namespace: str) -> str:
    """Return the directory of a namespace, given by its name or by its id as ``ls`` shows it."""
    if len(namespace) >= _ID_DIGITS:
        found = [each for each in tier.directories() if _parts_of(display_name(each))[1] == namespace[:_ID_DIGITS]]
        if len(found) == 1 and re.fullmatch("[0-9a-f]+", namespace):
            return found[0]
    return tier.directory(namespace)


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
