# SPDX-License-Identifier: Apache-2.0
"""``kvoffload demo``: what does offloading do for a chat server?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvoffload.config import OffloadingConfig, parse_config
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.demo.report import print_comparison, print_setting
from kvoffload.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from kvoffload.demo.comparison import Comparison, Way
    from kvoffload.demo.workload import ChatWorkload
    from kvoffload.engines.reference import EngineOptions

__all__ = ["register"]

_BLOCK_TOKENS = 16


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    model: Annotated[str | None, typer.Option(help="Folder or hub id. Default: a random Llama.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    conversations: Annotated[int, typer.Option(min=1, help="Conversations that take turns.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 6,
    system_tokens: Annotated[int, typer.Option(min=0, help="Prompt that all of them begin with.")] = 64,
    message_tokens: Annotated[int, typer.Option(min=1, help="Tokens a user adds per turn.")] = 128,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per turn.")] = 16,
    users: Annotated[int, typer.Option(min=1, help="Turns served at a time.")] = 2,
    device_tokens: Annotated[int | None, typer.Option(min=1, help="Device KV pool. Default: 1/4 of the chat.")] = None,
    cpu_gib: Annotated[float | None, typer.Option(help="Host memory to offload to. Default: the whole chat.")] = None,
    policy: Annotated[str, typer.Option(help="Which blocks host memory keeps.")] = "density",
    block_size: Annotated[int, typer.Option(min=1, help=f"Tokens per offloaded block: n x {_BLOCK_TOKENS}.")] = 16,
    disk: Annotated[Path | None, typer.Option(help="Offload to this folder too, and restart the engine.")] = None,
    disk_gib: Annotated[float, typer.Option(help="At most so much of it.")] = 4.0,
    layers: Annotated[int, typer.Option(min=1, help="Of the random Llama.")] = 6,
    hidden: Annotated[int, typer.Option(min=16, help="Of the random Llama: its width.")] = 512,
    seed: Annotated[int, typer.Option(help="Of weights and messages.")] = 39,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute on a CPU.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Serves a chat three ways and compares: no prefix cache, the device's own, with offloading.

    More conversations take turns than the device's KV pool holds, so their prefixes are evicted before they return.
    Exit code 1 if the three ways generate different tokens.
    """
    POLICIES.get(policy)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json: there is no folder {json_file.absolute().parent}; make it first.")
    # Read when torch is loaded. Else torch's threads spin while they wait for one another, and on a machine that does
    # other work too (or lacks a core for the copies) a step takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from kvoffload.demo.workload import ChatWorkload
    except ImportError as exc:
        raise MissingExtraError(
            f"The demo needs torch and transformers: pip install 'kvoffload[demo]' ({exc})."
        ) from exc
    prepare_device(device, threads)
    llm = make_model(model, device, layers, hidden, seed)
    workload = ChatWorkload(
        conversations, turns, system_tokens, message_tokens, reply_tokens, users, int(llm.config.vocab_size), seed
    )
    longest = int(llm.config.max_position_embeddings)
    if workload.longest_tokens > longest:
        raise ConfigError(
            f"A conversation grows to {workload.longest_tokens} tokens, and the model takes {longest}: "
            "lower --turns or --message-tokens."
        )
    options = engine_options(workload, device_tokens)
    config = offloading_config(llm, workload, policy, cpu_gib, block_size, disk, disk_gib)
    console = Console()
    print_setting(console, llm.name_or_path, device, workload, options, config)
    comparison = run(llm, options, workload, config)
    print_comparison(console, comparison, block_size)
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.as_json(), indent=2) + "\n")
        console.print(f"All figures are in {json_file}.", highlight=False, soft_wrap=True)
    if not comparison.verdict.identical:
        raise typer.Exit(1)


def prepare_device(device: str, threads: int | None) -> None:
    """Raises ``ConfigError`` for a device that is not here."""
    import torch

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is cpu or cuda, not {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    if threads is not None:
        torch.set_num_threads(threads)


def make_model(model: str | None, device: str, layers: int, hidden: int, seed: int) -> Any:
    """A float32 model, whose rounding is too small to change a token."""
    from transformers.utils import logging

    from kvoffload.engines.reference import build_random_model, load_model

    logging.disable_progress_bar()
    if model is not None:
        return load_model(model, device=device)
    if hidden % 128:
        raise ConfigError(f"--hidden must be a multiple of 128, not {hidden}.")
    return build_random_model(layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=2, seed=seed, device=device)


def engine_options(workload: ChatWorkload, device_tokens: int | None) -> EngineOptions:
    """A pool for a quarter of all that is said, but room for the turns that are served at a time."""
    from kvoffload.engines.reference import EngineOptions

    whole = workload.conversations * workload.longest_tokens
    least = workload.longest_tokens + _BLOCK_TOKENS
    if device_tokens is None:
        device_tokens = max(whole // 4, workload.users * least)
    elif device_tokens < least:
        raise ConfigError(f"--device-tokens must be at least {least}, room for one whole conversation.")
    return EngineOptions(device_tokens // _BLOCK_TOKENS, _BLOCK_TOKENS, max_requests=workload.users)


def offloading_config(
    llm: Any,
    workload: ChatWorkload,
    policy: str,
    cpu_gib: float | None,
    block_size: int,
    disk: Path | None,
    disk_gib: float,
) -> OffloadingConfig:
    """As a user would write it. Without ``cpu_gib``, host memory holds all that is said, and a fifth more."""
    if block_size % _BLOCK_TOKENS:
        raise ConfigError(f"--block-size must be a multiple of {_BLOCK_TOKENS}, not {block_size}.")
    if cpu_gib is None:
        tokens = workload.conversations * (workload.longest_tokens + block_size)
        cpu_bytes = int(1.2 * tokens * kv_token_bytes(llm))
    else:
        cpu_bytes = gib(cpu_gib, "--cpu-gib")
    values: dict[str, Any] = {"cpu_bytes_to_use": cpu_bytes, "eviction_policy": policy, "block_size": block_size}
    if disk is not None:
        tier = {"type": "fs", "path": str(disk), "max_bytes": gib(disk_gib, "--disk-gib")}
        values |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    return parse_config(values)


def gib(value: float, name: str) -> int:
    """Bytes, of a number of GiB that a user gave."""
    if not value > 0:
        raise ConfigError(f"{name} must be positive, not {value}.")
    return int(value * 2**30)


def kv_token_bytes(llm: Any) -> int:
    """Of one token, all layers."""
    from kvoffload.engines.reference.layout import engine_layout, kv_shape

    layout = engine_layout(kv_shape(llm.config), _BLOCK_TOKENS, llm.dtype, {})
    return sum(group.page_bytes for group in layout.groups) // _BLOCK_TOKENS


def ways_of(config: OffloadingConfig) -> tuple[Way, ...]:
    """Three, and with a disk a fourth: the same chat on a new engine, whose host memory is empty."""
    from kvoffload.demo.comparison import Way

    ways = (
        Way("no cache", prefix_caching=False),
        Way("device cache", prefix_caching=True),
        Way("offloading", prefix_caching=True, offloading=config),
    )
    return (*ways, Way("restarted", True, config)) if config.secondary_tiers else ways


def run(llm: Any, options: EngineOptions, workload: ChatWorkload, config: OffloadingConfig) -> Comparison:
    """Serves the chat every way, behind a progress bar."""
    from kvoffload.demo.comparison import compare

    ways = ways_of(config)
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {way.name: bar.add_task(way.name, total=workload.num_turns, start=False) for way in ways}

        def advance(name: str, _: object) -> None:
            bar.start_task(tasks[name])
            bar.advance(tasks[name])

        return compare(llm, options, ways, workload, advance)
