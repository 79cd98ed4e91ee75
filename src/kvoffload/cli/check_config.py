# SPDX-License-Identifier: Apache-2.0
"""``kvoffload check-config``: what a server would make of a configuration, before it starts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.cli.kv_size import ModelKV, model_kv
from kvoffload.cli.output import Json, print_json
from kvoffload.config import OffloadingConfig
from kvoffload.config_file import ENVIRONMENT, load_wrapped
from kvoffload.cpu.memory_limits import SHM, check_host_memory, check_shared_memory
from kvoffload.engines.vllm.arguments import check_file
from kvoffload.errors import CapacityError, ConfigError, MissingExtraError, Problems, StoreError
from kvoffload.specs import read_config
from kvoffload.tiering.options import SealedOptions, StoreOptions, parse_tiers
from kvoffload.tiering.stores.disk.options import DiskOptions
from kvoffload.tiering.stores.in_time import in_time
from kvoffload.tiering.stores.remote import RemoteOptions
from kvoffload.units import format_bytes

_BLOCK_TOKENS = 16
"""vLLM's block on a GPU."""
_LEAST_BYTES = 1 << 20
"""Less host memory than this is a unit that was forgotten."""
_ANSWER_S = 10.0
"""How long a tier's disks may take to say what they are. A mount may hang for ever."""


def check_config(
    file: Annotated[
        Path, typer.Argument(help="JSON or YAML: kvoffload's keys, alone or within vLLM's.", show_default=False)
    ],
    model: Annotated[Path | None, typer.Option(help="The model's config.json, or its folder: sizes of blocks.")] = None,
    connect: Annotated[bool, typer.Option("--connect", help="Ask the servers of remote tiers, too.")] = False,
    as_json: Json = False,
) -> None:
    """Check a configuration on this machine.

    Shows what a server would make of it. Nothing is written.

    Exit codes: 0, it would be taken; 1, it has problems, each in one line; 2, it cannot be read.
    """
    values, wrappers = load_wrapped(file)
    problems = Problems()
    config = None
    try:
        with problems:
            config = read_config(values)
    except MissingExtraError as exc:  # of a tier's library
        problems.add(str(exc))
    sizes = None
    if model is not None:
        with problems:
            sizes = model_kv(model)
    unchecked: list[str] = []
    if config is not None:
        _probe(config, sizes, connect, problems)
        unchecked = check_file(wrappers, config, problems)
    if config is None or problems.found:
        if as_json:
            print_json({"problems": problems.found})
        for problem in () if as_json else problems.found:
            print(f"{file}: {problem}", file=sys.stderr)
        sys.exit(1)
    command, rows, tiers = _command(file, config), _rows(config, sizes), _tiers(config, connect)
    if as_json:
        print_json({"problems": [], "command": command, **dict(rows), "tiers": tiers})
        return
    print(f"{command}\n")
    for name, value in (*rows, *(("tier", tier) for tier in tiers)):
        print(f"{name:14}{value}")
    try:
        check_shared_memory(config.cpu_bytes, SHM)
    except CapacityError as exc:
        print(f"With several GPUs, or on vLLM's CPU platform, this is refused: {exc}")
    if unchecked:
        print(f"\nNot checked, since a server alone can: {', '.join(unchecked)}.")


def _probe(config: OffloadingConfig, sizes: ModelKV | None, connect: bool, problems: Problems) -> None:
    """What this machine, and with ``connect`` the servers, would refuse."""
    with problems:
        check_host_memory(config.cpu_bytes)
    block_bytes = None if sizes is None else sizes.bytes_per_token * (config.block_size or _BLOCK_TOKENS)
    if block_bytes is not None and block_bytes > config.cpu_bytes:
        problems.add(
            f"cpu_bytes_to_use is {format_bytes(config.cpu_bytes)}, and one block of this model takes "
            f"{format_bytes(block_bytes)}; raise it to hold some thousand blocks."
        )
    else:
        with problems:
            _check_unit("cpu_bytes_to_use", config.cpu_bytes)
    for options in parse_tiers(config.secondary_tiers):
        with problems:
            options.check(block_bytes)
            if block_bytes is None and options.bound_bytes is not None:
                _check_unit(f"max_bytes of the {options.label!r} tier", options.bound_bytes)
            if isinstance(options, SealedOptions):
                options.read_keys()
            if options.directories:
                (outcome,) = in_time([partial(_probe_directories, options, config.cpu_bytes)], _ANSWER_S)
                if isinstance(outcome, TimeoutError):
                    raise ConfigError(
                        f"path of the {options.label!r} tier, {options.place}, does not answer within {_ANSWER_S:g} s: "
                        "look at its disk, or choose another directory."
                    )
                if outcome is not None:
                    raise outcome
            elif isinstance(options, RemoteOptions):
                _probe_remote(options, block_bytes or 1 << 20, connect)


def _check_unit(name: str, size_bytes: int) -> None:
    """Raises ``ConfigError`` for a size that no block of a model fits in."""
    if size_bytes < _LEAST_BYTES:
        raise ConfigError(
            f"{name} is {format_bytes(size_bytes)}, too little for the blocks of any model: a number without a unit is "
            "bytes; write '8GiB' for example."
        )


def _probe_directories(options: StoreOptions, beside_bytes: int) -> None:
    """Raises ``ConfigError`` if the tier's directories cannot be used, beside so much host memory."""
    for directory in options.directories:
        _probe_directory(options, directory)
    if isinstance(options, DiskOptions):
        options.check_place(beside_bytes)
    _probe_quota(options)


def _probe_directory(options: StoreOptions, path: str) -> None:
    """Raises ``ConfigError`` if this user could not write to one of the tier's directories, or could not make it."""
    existing = _existing(path)
    where = f"path of the {options.label!r} tier, {path},"
    if not os.path.isdir(existing):
        kind = "a file" if os.path.exists(existing) else "a link that leads nowhere"
        raise ConfigError(f"{where} is not a directory: {existing} is {kind}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} cannot be written to by this user: change the rights of {existing}.")


def _probe_quota(options: StoreOptions) -> None:
    """Raises ``ConfigError`` if the tier's disks are smaller than it."""
    disks = options.each_disk() if isinstance(options, DiskOptions) else [options]
    for disk in disks:
        existing = _existing(disk.directories[0])
        size_bytes = shutil.disk_usage(existing).total
        if disk.bound_bytes is not None and disk.bound_bytes > size_bytes:
            raise ConfigError(
                f"max_bytes of the {options.label!r} tier is {format_bytes(disk.bound_bytes)}, and the disk of "
                f"{existing} has {format_bytes(size_bytes)} in all; lower it."
            )


def _existing(path: str) -> Path:
    """``path``, or the next one above it that is there."""
    # ``Path.exists`` raises where this user may not look, and does not see a link that leads nowhere.
    return next(place for place in (Path(path), *Path(path).absolute().parents) if os.path.lexists(place))


def _probe_remote(options: RemoteOptions, block_bytes: int, connect: bool) -> None:
    """Raises ``ConfigError`` if the tier's secrets or, with ``connect``, its servers cannot be used here."""
    try:
        options.check_store(block_bytes, ask=connect)
    except (StoreError, MissingExtraError, OSError) as exc:
        raise ConfigError(f"The {options.label!r} tier cannot be used now: {exc}") from exc


def _command(file: Path, config: OffloadingConfig) -> str:
    """The line that starts a server with the configuration."""
    ends = " --shutdown-timeout 60" if config.secondary_tiers else ""  # which a tier needs to be written at the end
    return f"{ENVIRONMENT}={shlex.quote(str(file.resolve()))} vllm serve MODEL{ends}"


def _rows(config: OffloadingConfig, sizes: ModelKV | None) -> list[tuple[str, str]]:
    """What a server makes of the configuration, without its tiers."""
    rows: list[tuple[str, str]] = []
    memory = format_bytes(config.cpu_bytes)
    if sizes is not None:
        block_tokens = config.block_size or _BLOCK_TOKENS
        tokens = config.cpu_bytes // sizes.bytes_per_token
        rows.append(("KV per token", format_bytes(sizes.bytes_per_token)))
        rows.append(("block", f"{block_tokens} tokens, {format_bytes(block_tokens * sizes.bytes_per_token)}"))
        memory += f", room for {tokens:,} tokens ({tokens // block_tokens:,} blocks)"
    rows += [("host memory", memory), ("policy", config.eviction_policy)]
    if config.secondary_tiers:
        rows.append(("loads", "what is faster than computing" if config.load_policy == "cost" else "every hit"))
    return rows


def _tiers(config: OffloadingConfig, connect: bool) -> list[str]:
    found = []
    for options in parse_tiers(config.secondary_tiers):
        asked = " (not asked: --connect)" if isinstance(options, RemoteOptions) and not connect else ""
        found.append(options.describe(config.cpu_bytes).removeprefix("tier ") + asked)
    return found
