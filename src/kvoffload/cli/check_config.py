# SPDX-License-Identifier: Apache-2.0
"""``kvoffload check-config``: how a server would use a configuration, before it starts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvoffload.cli.judge import BY_VLLM, Verdict, check_file, is_installed, judge
from kvoffload.cli.kv_size import ModelKV, model_kv
from kvoffload.cli.output import Json, check_unit, print_json
from kvoffload.config import OffloadingConfig, read_config_values
from kvoffload.config_file import ENVIRONMENT, expanded, has_variable, load_wrapped
from kvoffload.cpu.memory_limits import SHM, check_host_memory, check_shared_memory
from kvoffload.errors import CapacityError, ConfigError, MissingExtraError, Problems, StoreError, reason_of
from kvoffload.specs import spec_class
from kvoffload.tiering.options import SealedOptions, StoreOptions, parse_tier, parse_tiers
from kvoffload.tiering.stores.disk.options import DiskOptions
from kvoffload.tiering.stores.in_time import in_time
from kvoffload.tiering.stores.remote import RemoteOptions
from kvoffload.tiering.stores.root import MOUNT_IT, in_the_way_of, lacks_mount, nearest
from kvoffload.units import format_bytes, printable

_BLOCK_TOKENS = 16
"""Tokens in vLLM's block on a GPU."""
_ANSWER_S = 10.0
"""Time limit for a tier's disks to answer. A mount may hang forever."""


def check_config(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON or YAML file with kvoffload's keys, alone or within vLLM's arguments.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of vLLM, such as -- --tensor-parallel-size 2."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model's config.json, its folder, or its name on the Hub. Shows the sizes of its blocks, and "
            "whether kvoffload works with this model and ARGUMENTS. To judge ARGUMENTS, vLLM must be in this "
            "environment, but no GPU is needed.",
        ),
    ] = None,
    connect: Annotated[
        bool, typer.Option("--connect", help="Also test the connection to the servers of remote tiers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a configuration on this machine.

    Shows how a server would use it, and all mistakes at once. Writes nothing.

    Exit codes: 0, no problems were found; 1, it has problems, and one line describes each; 2, it cannot be read.
    """
    values, wrappers = load_wrapped(file)
    if model is not None and model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(
            f"--model: {model} does not exist; give a model's folder, its config.json, or a name on the Hub."
        )
    unset = Problems()
    config, problems = read_config_values(expanded(values, os.environ, unset))
    with problems:
        spec_class(config).check_config(config)
    # Without a size the configuration has a stand-in.
    cpu_bytes = None if any("cpu_bytes_to_use" in problem for problem in problems.found) else config.cpu_bytes
    sizes = None
    if model is not None and (Path(model).exists() or not is_installed()):
        # vLLM reads more models, such as Mamba and those in Mistral's format.
        with Problems() if is_installed() else problems:
            sizes = model_kv(model)
    warnings = _probe(config, cpu_bytes, sizes, connect, problems)
    unchecked: list[str] = []
    with problems:
        unchecked = check_file(wrappers, config, problems)
    verdict = None
    if model is not None:
        verdict = judge(file, model, arguments or [])
        for problem in verdict.problems:
            problems.add(problem)
    elif arguments:
        problems.add("kvoffload can check vLLM's arguments only for a given model; add --model MODEL.")
    # A text with a variable that is not set is wrong in other ways, too.
    problems.found = unset.found + [problem for problem in problems.found if not has_variable(problem)]
    answer: dict[str, Any] = {}
    if verdict is not None:
        unknown = [f"this model, because {verdict.unknown}"] if verdict.unknown else []
        answer = {"judged_by": verdict.judged_by, "not_judged": [*unknown, *verdict.unjudged], "notes": verdict.notes}
    if problems.found:
        if as_json:
            print_json({"problems": problems.found, **answer})
        for problem in () if as_json else problems.found:
            print(f"{file}: {problem}", file=sys.stderr)
        if verdict is not None and not as_json:
            if verdict.unknown and not verdict.problems:
                print(f"No verdict about {model}, because {verdict.unknown}.", file=sys.stderr)
            elif verdict.problems:
                is_vllm = all(problem.startswith(BY_VLLM) for problem in verdict.problems)
                subject = "vLLM itself" if is_vllm else "kvoffload"
                print(
                    f"No, {subject} does not work with {model} and these arguments{_judged_by(verdict)}.",
                    file=sys.stderr,
                )
        sys.exit(1)
    command, rows, tiers = _command(file, config), _rows(config, sizes), _tiers(config, connect)
    if as_json:
        print_json({"problems": [], "warnings": warnings, "command": command, **dict(rows), "tiers": tiers, **answer})
        return
    print(f"{command}\n")
    for name, value in (*rows, *(("tier", tier) for tier in tiers)):
        print(f"{name:14}{printable(value)}")
    for warning in warnings:
        print(f"Warning: {warning}")
    try:
        check_shared_memory(config.cpu_bytes, SHM)
    except CapacityError as exc:
        print(f"With several GPUs or vLLM for CPUs, a server would reject this configuration: {exc}")
    if verdict is not None and verdict.unknown:
        print(f"\nNo verdict about {model}, because {verdict.unknown}.")
    elif verdict is not None and verdict.judged_by:
        print(f"\nYes, kvoffload works with {model} and these arguments{_judged_by(verdict)}.")
        for note in verdict.notes:
            print(note)
    if verdict is not None and verdict.unjudged:
        print(f"Not judged without starting a server: {'; '.join(verdict.unjudged)}.")
    if unchecked:
        print(f"\nNot checked, because only a server can check them: {', '.join(unchecked)}.")


def _judged_by(verdict: Verdict) -> str:
    return f" ({verdict.judged_by})" if verdict.judged_by else ""


def _probe(
    config: OffloadingConfig, cpu_bytes: int | None, sizes: ModelKV | None, connect: bool, problems: Problems
) -> list[str]:
    """Add to ``problems`` everything that this machine, and with ``connect`` the servers, would reject. Return
    warnings."""
    warnings: list[str] = []
    block_bytes = None if sizes is None else sizes.bytes_per_token * (config.block_size or _BLOCK_TOKENS)
    if cpu_bytes is not None:
        with problems:
            check_host_memory(cpu_bytes)
        with problems:
            check_unit("cpu_bytes_to_use", cpu_bytes)
        if block_bytes is not None and block_bytes > cpu_bytes:
            problems.add(
                f"cpu_bytes_to_use is {format_bytes(cpu_bytes)}, but one block of this model needs "
                f"{format_bytes(block_bytes)}; raise it to hold a few thousand blocks."
            )
    for options in _readable_tiers(config):
        with problems:
            options.check(block_bytes)
        if block_bytes is None and options.bound_bytes is not None:
            with problems:
                check_unit(f"max_bytes of the {options.label!r} tier", options.bound_bytes)
        if isinstance(options, SealedOptions):
            with problems:
                options.read_keys()
        if options.directories:
            probe = partial(_probe_directories, options, cpu_bytes or 0, problems, warnings)
            (outcome,) = in_time([probe], _ANSWER_S)
            if isinstance(outcome, TimeoutError):
                problems.add(
                    f"path of the {options.label!r} tier, {options.place}, does not answer within {_ANSWER_S:g} s; "
                    "check its disk, or choose another directory."
                )
            elif outcome is not None:
                raise outcome
        elif isinstance(options, RemoteOptions):
            with problems:
                warnings += _probe_remote(options, block_bytes or 1 << 20, connect)
    return warnings


def _readable_tiers(config: OffloadingConfig) -> Sequence[StoreOptions]:
    """Return the tiers that are right each by itself. What is wrong with the others, or with all together, is known."""
    with Problems():
        return parse_tiers(config.secondary_tiers)
    tiers: list[StoreOptions] = []
    for tier in config.secondary_tiers:
        with Problems():
            tiers.append(parse_tier(tier))
    return tiers


def _probe_directories(options: StoreOptions, beside_bytes: int, problems: Problems, warnings: list[str]) -> None:
    """Add to ``problems`` why the tier's directories cannot be used, in addition to so much host memory, and to
    ``warnings`` which of them look like disks that are not mounted."""
    found = Problems()
    for directory in options.directories:
        with found:
            _probe_directory(options, directory)
    if not found.found:
        with found:
            if isinstance(options, DiskOptions):
                options.check_place(beside_bytes)
            _probe_quota(options)
    warnings += [
        f"path of the {options.label!r} tier, {path}, does not exist and would be on the system's disk. {MOUNT_IT}"
        for path in options.directories
        if lacks_mount(path)
    ]
    for problem in found.found:
        problems.add(problem)


def _probe_directory(options: StoreOptions, path: str) -> None:
    """Raise ``ConfigError`` if this user cannot write to one of the tier's directories, or cannot create it."""
    existing = nearest(path)
    where = f"path of the {options.label!r} tier, {path},"
    if reason := in_the_way_of(path):
        raise ConfigError(f"{where} is not a directory: {reason}; name another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{where} cannot be used, because this user may not write to {existing}; change the permissions of "
            "that directory, or mount the disk."
        )


def _probe_quota(options: StoreOptions) -> None:
    """Raise ``ConfigError`` if the tier's disks are smaller than its quota."""
    disks = options.each_disk() if isinstance(options, DiskOptions) else [options]
    for disk in disks:
        existing = nearest(disk.directories[0])
        size_bytes = shutil.disk_usage(existing).total
        if disk.bound_bytes is not None and disk.bound_bytes > size_bytes:
            raise ConfigError(
                f"max_bytes of the {options.label!r} tier is {format_bytes(disk.bound_bytes)}, but the disk of "
                f"{existing} has only {format_bytes(size_bytes)} in total; lower it."
            )


def _probe_remote(options: RemoteOptions, block_bytes: int, connect: bool) -> list[str]:
    """Return warnings. Raises ``ConfigError`` if the tier's secrets or, with ``connect``, its servers cannot be used
    here."""
    try:
        return options.check_store(block_bytes, ask=connect)
    except (StoreError, MissingExtraError, OSError) as exc:
        raise ConfigError(f"The {options.label!r} tier does not work here: {reason_of(exc).rstrip('.')}.") from exc


def _command(file: Path, config: OffloadingConfig) -> str:
    """Return the command that starts a server with the configuration."""
    ends = " --shutdown-timeout 60" if config.secondary_tiers else ""  # which a tier needs to be written at the end
    return f"{ENVIRONMENT}={shlex.quote(str(file.resolve()))} vllm serve MODEL{ends}"


def _rows(config: OffloadingConfig, sizes: ModelKV | None) -> list[tuple[str, str]]:
    """Return how a server would use the configuration, without its tiers."""
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
        is_cost = config.load_policy == "cost"
        rows.append(("loads", "hits that load faster than the engine computes them" if is_cost else "every hit"))
    return rows


def _tiers(config: OffloadingConfig, connect: bool) -> list[str]:
    found = []
    for options in parse_tiers(config.secondary_tiers):
        asked = " (not tested: use --connect)" if isinstance(options, RemoteOptions) and not connect else ""
        found.append(options.describe(config.cpu_bytes).removeprefix("tier ") + asked)
    return found
