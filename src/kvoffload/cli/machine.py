# SPDX-License-Identifier: Apache-2.0
"""The options that describe the machine and the trace of a simulation: the same for all commands that simulate."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, get_args

import typer

from kvoffload.cli.output import positive
from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SPEEDS, SimConfig, Speeds
from kvoffload.sim.kv_size import ModelKV, model_kv
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace
from kvoffload.tiering.load_policy import LoadPolicy
from kvoffload.units import format_bytes, parse_bytes

__all__ = [
    "CASCADE_DEFAULT",
    "DISK_READ_SPEED",
    "DISK_WRITE_SPEED",
    "LOAD_SPEED",
    "TRACE_HELP",
    "BlockTokens",
    "DiskReadSpeed",
    "DiskWriteSpeed",
    "GpuBlocks",
    "GpuKVTokens",
    "KVBytes",
    "LoadPolicyOption",
    "LoadSpeed",
    "MaxRequests",
    "Model",
    "PrefillSpeed",
    "Processes",
    "StoreThreshold",
    "assumptions",
    "capacities",
    "device_blocks",
    "load_one",
    "load_policy_of",
    "model_sizes",
    "speeds_of",
]

TRACE_HELP = "File of JSON lines, plain, gzip or zstd; or synthetic:KIND or synthetic:KIND:SEED."
CASCADE_DEFAULT = "By default on_evict if the disk is less than twice as large as host memory, as in serving."
_DEFAULT_KV_BYTES = 131_072
"""Per token: a dense model of some 8 billion parameters with grouped-query attention in 16 bits."""

GpuKVTokens = Annotated[
    int | None,
    typer.Option("--gpu-kv-tokens", min=0, help="Tokens of the GPU's own cache, as in vLLM's log."),
]
GpuBlocks = Annotated[int | None, typer.Option(min=0, help="The same in blocks of the trace.")]
Model = Annotated[
    str | None, typer.Option(help="Sizes of blocks and states: a config.json, its folder, or a name on the Hub.")
]
KVBytes = Annotated[str | None, typer.Option("--kv-bytes-per-token", help="KV bytes per token, in place of --model.")]
PrefillSpeed = Annotated[float, typer.Option(help="Tokens that the device prefills per second.")]
LoadSpeed = Annotated[str, typer.Option(help="Bytes loaded from host memory to the device per second.")]
DiskReadSpeed = Annotated[str, typer.Option(help="Bytes read from disk per second.")]
DiskWriteSpeed = Annotated[str, typer.Option(help="Bytes written to disk per second.")]
LoadPolicyOption = Annotated[
    str, typer.Option("--load-policy", help="Hits on disk to load: cost, if faster than computing; or always.")
]
StoreThreshold = Annotated[int, typer.Option(min=0, help="Store a block at the n-th request that asks for it.")]
BlockTokens = Annotated[int | None, typer.Option(min=1, help="Tokens per hash id, if that is ambiguous.")]
MaxRequests = Annotated[int | None, typer.Option(min=1, help="Requests to read of a trace, from the first on.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes to use. By default one per core.")]

LOAD_SPEED = f"{SPEEDS.load_bytes_per_s / 1e9:g}GB"
DISK_READ_SPEED = f"{SPEEDS.disk_read_bytes_per_s / 1e9:g}GB"
DISK_WRITE_SPEED = f"{SPEEDS.disk_write_bytes_per_s / 1e9:g}GB"


def speeds_of(prefill: float, load: str, disk_read: str, disk_write: str) -> Speeds:
    return Speeds(
        positive(prefill, "--prefill-speed"),
        parse_bytes(load, "--load-speed"),
        parse_bytes(disk_read, "--disk-read-speed"),
        parse_bytes(disk_write, "--disk-write-speed"),
    )


def load_policy_of(text: str) -> LoadPolicy:
    choices: tuple[LoadPolicy, ...] = get_args(LoadPolicy)
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"--load-policy is {' or '.join(choices)}, not {text!r}.")


def device_blocks(trace: Trace, gpu_blocks: int | None, gpu_kv_tokens: int | None) -> int:
    """Blocks of ``trace`` that the device's own cache holds: by the options, else what the trace says, else 0."""
    if gpu_blocks is not None and gpu_kv_tokens is not None:
        raise ConfigError("--gpu-blocks and --gpu-kv-tokens both give the device's cache; choose one of them.")
    if gpu_kv_tokens is not None:
        return gpu_kv_tokens // trace.block_tokens
    return trace.device_blocks if gpu_blocks is None else gpu_blocks


def model_sizes(model: str | None, kv_bytes: str | None, dtype: str | None = None) -> ModelKV:
    """Of ``model``, its KV cache in ``dtype``; or ``kv_bytes`` per token, or a default, and no states."""
    if model is not None and kv_bytes is not None:
        raise ConfigError("--model and --kv-bytes-per-token both give the KV size; choose one of them.")
    if model is not None:
        return model_kv(_config_file(model), dtype)
    if dtype is not None:
        raise ConfigError("--dtype belongs to --model or --layers; --kv-bytes-per-token gives the size as it is.")
    return ModelKV(parse_bytes(kv_bytes, "--kv-bytes-per-token") if kv_bytes is not None else _DEFAULT_KV_BYTES)


def _config_file(model: str) -> Path:
    """The file of a path, or that of a name such as ``Qwen/Qwen3-8B`` in the Hub's cache or on the Hub."""
    if Path(model).exists() or model.endswith(".json") or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return Path(model)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as exc:
        raise ConfigError(
            f"There is no file {model}. A name on the Hub needs huggingface_hub: install it, or give a config.json."
        ) from exc
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"There is no file {model}, and no config.json of that name can be had from the Hub: give a config.json."
        ) from exc


def assumptions(base: SimConfig, trace: Trace, is_kv_given: bool) -> str:
    """What a simulation takes for granted of the machine, and what its advice is worth."""
    per_token = format_bytes(base.block_bytes // trace.block_tokens)
    guess = "" if is_kv_given else ", a guess for a dense model of 8 billion parameters (--model gives yours)"
    tokens = base.gpu_blocks * trace.block_tokens
    device = f"{tokens:,} tokens (--gpu-kv-tokens)" if tokens else "none (--gpu-kv-tokens)"
    lines = [
        "Assumptions",
        f"  KV per token   {per_token}{guess}",
        f"  GPU's cache    {device}",
        f"  prefill        {base.prefill_tokens_per_s:,.0f} tokens/s (--prefill-speed)",
        f"  loads          {format_bytes(base.load_bytes_per_s)}/s from host memory (--load-speed)",
    ]
    if base.disk_blocks:
        read, write = format_bytes(base.disk_read_bytes_per_s), format_bytes(base.disk_write_bytes_per_s)
        lines.append(f"  disk           {read}/s read, {write}/s written (--disk-read-speed, --disk-write-speed)")
    if not tokens:
        lines.append(
            "Without the GPU's cache every hit counts for offloading: what follows is an upper bound. vLLM's log has "
            "the tokens as 'GPU KV cache size'."
        )
    return "\n".join(lines) + "\n"


def load_one(path: Path, block_tokens: int | None, max_requests: int | None) -> Trace:
    """The trace in a file, or a synthetic one for the name ``synthetic:KIND`` or ``synthetic:KIND:SEED``."""
    word, _, rest = str(path).partition(":")
    if word != "synthetic":
        return load_trace(path, block_tokens, max_requests)
    if block_tokens is not None:
        raise ConfigError(f"--block-tokens is for traces in files; {path} has blocks of its own size.")
    kind, _, seed = rest.partition(":")
    if not seed.isdecimal() and seed:
        raise ConfigError(f"{path}: the seed is a number, as in 'synthetic:chat:7'.")
    return synthesize(kind, max_requests or 4000, int(seed or 0))


def capacities(text: str, option: str, trace: Trace, block_bytes: int) -> list[int]:
    """The number of blocks for each size in a list like ``"64GiB,10%"``, without repetitions.

    A percentage is of the trace's different whole blocks. Only ``--disk`` may be 0. Raises ``ConfigError``, which names
    ``option``, for a size of less than one block.
    """
    footprint = trace.whole_blocks().num_unique
    sizes = []
    for part in filter(None, map(str.strip, text.split(","))):
        if part == "0" and option == "--disk":
            sizes.append(0)
            continue
        if part.endswith("%"):
            try:
                blocks = int(footprint * float(part[:-1]) / 100)
            except (ValueError, OverflowError) as exc:
                raise ConfigError(f"{option}: {part!r} is not a share; write for example '10%'.") from exc
        else:
            blocks = parse_bytes(part, option) // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"{option}: {part} is less than one block of {format_bytes(block_bytes)} "
                f"({trace.block_tokens} tokens) of {trace.name}."
            )
        sizes.append(blocks)
    if not sizes:
        raise ConfigError(f"{option} needs at least one size.")
    return list(dict.fromkeys(sizes))
