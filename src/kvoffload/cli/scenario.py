# SPDX-License-Identifier: Apache-2.0
"""Define a simulation: the options that ``simulate``, ``plan`` and ``explain`` share, and the file of ``--fleet``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvoffload.cli.kv_size import ModelKV, model_kv
from kvoffload.cli.output import positive
from kvoffload.config import DEFAULTS, parse_struct
from kvoffload.config_file import load_config_file
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.errors import ConfigError, UnknownNameError, suggest
from kvoffload.sim.config import USUAL, FleetConfig, Prices, SharedStore, SimConfig
from kvoffload.sim.hints import hinter
from kvoffload.sim.report import NO_FORECAST
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace
from kvoffload.sim.traffic import crowd
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.load_policy import LoadPolicy
from kvoffload.units import counted, format_bytes, parse_bytes

TRACE_HELP = "File of JSON lines, plain or compressed (gzip, zstd); or synthetic:KIND or synthetic:KIND:SEED."
_DEFAULT_KV_BYTES = 131_072
"""Bytes per token of a dense model of about 8 billion parameters with grouped-query attention in 16 bits."""
_STEP_S, _DECODE_S = 0.006, 2e-5
"""Seconds of a step of such a model on a GPU with 3 TB/s: the time to read 16 GB of weights, and the time for each
request that decodes."""
_GPU_BYTES_PER_S = 3e12
"""Speed at which a decoding request reads the KV of its context."""

GpuKVTokens = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Tokens of the GPU's own cache, as in vLLM's log.")
]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Sizes of blocks and states: a config.json, its folder, or a name on the Hub."),
]
KVBytes = Annotated[
    str | None, typer.Option("--kv-bytes-per-token", metavar="SIZE", help="KV bytes per token, instead of --model.")
]
PrefillSpeed = Annotated[
    float | None,
    typer.Option(
        metavar="N", help=f"Prompt tokens that the GPU computes per second. Default: {USUAL.prefill_tokens_per_s:,.0f}."
    ),
]
MaxRequests = Annotated[int | None, typer.Option(min=1, metavar="N", help="Read only the first N requests of a trace.")]
Processes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of processes to use. By default one per core.")
]
Fleet = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON or YAML file with all other settings: speeds, cascade, hints, prices, and a fleet's servers, "
        "routers and shared tiers.",
    ),
]


class _Store(msgspec.Struct, frozen=True, kw_only=True):
    size: int | str
    link: int | str | None = None
    """Bytes per second of each server's link, and of the link of the ``store`` itself."""
    store: int | str | None = None
    latency_s: float | None = None
    ttl_s: float | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the file of ``--fleet``."""

    policy: str | None = None
    load_speed: int | str | None = None
    disk_read_speed: int | str | None = None
    disk_write_speed: int | str | None = None
    nodes_step_s: float = 0.0
    step_s: float | None = None
    decode_s: float | None = None
    prompt_context_s: float = 0.0
    decode_context_s: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    cascade: CascadeMode | tuple[CascadeMode, ...] | None = None
    load_policy: LoadPolicy = DEFAULTS.load_policy
    store_threshold: int = DEFAULTS.store_threshold
    kv_dtype: str | None = None
    hints: str | None = None
    block_tokens: int | None = None
    stretch: float = 1.0
    copies: int = 1
    prices: dict[str, float | str] = {}
    servers: int | str | tuple[int, ...] | None = None
    routers: str | tuple[str, ...] | None = None
    shared: dict[str, Any] | tuple[dict[str, Any] | str | None, ...] | None = None
    pool: dict[str, Any] | None = None
    servers_per_machine: int = 1
    prefill_servers: int = 0


_OF_A_FLEET = ("routers", "shared", "pool", "servers_per_machine", "prefill_servers")
_WHAT = "the file of --fleet"
_LONGEST_S = 1e10
"""The longest trace. With more seconds on the clock, a float has no digits left for an engine's steps."""
_MOST_SERVERS = 4096
"""A limit above the number of servers that a replay can handle in reasonable time."""
_BOUNDS = {
    "store_threshold": (0, 1 << 30),
    "stretch": (1e-6, 1e6),
    "copies": (1, _MOST_SERVERS),
    "servers_per_machine": (1, _MOST_SERVERS),
    "prefill_servers": (0, _MOST_SERVERS),
    "max_num_seqs": (1, 1 << 20),
    "max_num_batched_tokens": (1, 1 << 30),
}


class Scenario:
    """The options and the file of a simulation, checked. Raises ``ConfigError``."""

    def __init__(
        self,
        fleet: Path | None,
        model: str | None,
        kv_bytes: str | None,
        gpu_kv_tokens: int | None,
        prefill_speed: float | None,
        max_requests: int | None,
        rate: float | None = None,
    ) -> None:
        values = {} if fleet is None else load_config_file(fleet)
        self._file: _File = parse_struct(_File, values, _WHAT)
        given = [name for name in _OF_A_FLEET if name in values]
        if not self.is_fleet and given:
            raise ConfigError(f"{_WHAT[0].upper()}{_WHAT[1:]} has {', '.join(given)}, but no fleet; add servers.")
        for name, (least, most) in _BOUNDS.items():
            if not least <= (value := getattr(self._file, name)) <= most:
                raise ConfigError(f"{name} of {_WHAT} must be from {least:g} to {most:g}, not {value:g}.")
        names = [field.name for field in fields(Prices)]
        for name in self._file.prices:
            if name not in names:
                raise UnknownNameError(f"Unknown key {name!r} in prices of {_WHAT}.{suggest(name, names)}")
        self.prices = Prices(**self._file.prices)
        self._sizes = model_sizes(model, kv_bytes, self._file.kv_dtype)
        self._is_kv_given = model is not None or kv_bytes is not None
        self._gpu_kv_tokens, self._max_requests = gpu_kv_tokens, max_requests
        self._is_cut = False
        self._prefill_speed = None if prefill_speed is None else positive(prefill_speed, "--prefill-speed")
        self._rate = None if rate is None else positive(rate, "--rate")

    @property
    def is_fleet(self) -> bool:
        return self._file.servers is not None

    def load(self, path: Path) -> Trace:
        """Return the trace in a file, or a synthetic one for the name ``synthetic:KIND`` or ``synthetic:KIND:SEED``."""
        file = self._file
        hinted = hinter(file.hints) if file.hints is not None else None
        word, _, rest = str(path).partition(":")
        if word != "synthetic":
            trace = load_trace(path, file.block_tokens, self._max_requests)
            self._is_cut = len(trace) == self._max_requests
            warn_if_cut(path, trace)
        elif file.block_tokens is not None:
            raise ConfigError(f"block_tokens of {_WHAT} works only with traces in files; remove it for {path}.")
        else:
            kind, _, seed = rest.partition(":")
            if not seed.isdecimal() and seed:
                raise ConfigError(f"{path}: the seed must be a number, as in 'synthetic:chat:7'.")
            trace = synthesize(kind, self._max_requests or 4000, int(seed or 0))
        trace = crowd(trace.stretched(file.stretch), file.copies)
        if self._rate is not None:
            trace = trace.at_rate(self._rate)
            if trace.arriving_s > _LONGEST_S:
                raise ConfigError(f"--rate {self._rate:g} spreads these requests over centuries; give a higher one.")
        return trace if hinted is None else hinted(trace)

    def block_bytes(self, trace: Trace) -> int:
        return max(round(self.token_bytes(trace) * trace.block_tokens), 1)

    def token_bytes(self, trace: Trace) -> float:
        """Return the KV bytes per token: given, of the server that recorded the trace, or a guess."""
        return trace.token_bytes if trace.token_bytes and not self._is_kv_given else self._sizes.bytes_per_token

    def alone(self, trace: Trace) -> SimConfig:
        """Return the machine without host memory and disk."""
        file, block_bytes = self._file, self.block_bytes(trace)
        speed, _ = prefill_speed(self._prefill_speed, trace)
        speeds: dict[str, Any] = {
            name.replace("speed", "bytes_per_s"): float(parse_bytes(given, f"{name} of {_WHAT}"))
            for name in ("load_speed", "disk_read_speed", "disk_write_speed")
            if (given := getattr(file, name)) is not None
        }
        return SimConfig(
            cpu_blocks=0,
            block_bytes=block_bytes,
            gpu_blocks=device_blocks(trace, self._gpu_kv_tokens),
            prefill_tokens_per_s=speed,
            store_threshold=file.store_threshold,
            nodes_step_s=file.nodes_step_s,
            **self._step(speed, trace),  # type: ignore[arg-type]
            prompt_context_s=file.prompt_context_s,
            max_requests=file.max_num_seqs,
            chunk_tokens=file.max_num_batched_tokens,
            load_policy=file.load_policy,
            state_slots=self._sizes.state_slots(block_bytes),
            **speeds,
        )

    def _step(self, speed: float, trace: Trace) -> dict[str, float]:
        """Return the costs of a step: given in the file, else measured by the server that recorded the trace, else
        those of a usual GPU, or of as many GPUs as the prefill speed requires."""
        share = min(max(USUAL.prefill_tokens_per_s / speed, 0.1), 4)
        costs = {
            "step_s": _STEP_S,
            "decode_s": _DECODE_S,
            "decode_context_s": self.token_bytes(trace) / _GPU_BYTES_PER_S,
        }
        costs = {name: share * cost for name, cost in costs.items()}
        if trace.step_s:
            costs = {"step_s": trace.step_s, "decode_s": trace.decode_s, "decode_context_s": 0.0}
        given = {name: getattr(self._file, name) for name in costs}
        return {name: cost if given[name] is None else given[name] for name, cost in costs.items()}

    def assumptions(self, base: SimConfig, trace: Trace) -> list[str]:
        """Return the simulation's assumptions about the machine, and a note on the accuracy of its times, in lines of
        at most 80 columns."""
        per_token = format_bytes(base.block_bytes // trace.block_tokens)
        guess = ", as recorded" if trace.token_bytes else ", a guess for a dense model of 8B parameters (--model)"
        speed, source = prefill_speed(self._prefill_speed, trace)
        measured = ", as the server measured it" * (trace.step_s > 0 and self._file.step_s is None)
        tokens, context_s = base.gpu_blocks * trace.block_tokens, base.decode_context_s
        lines = [
            "Assumptions",
            f"  KV per token   {per_token}{'' if self._is_kv_given else guess}",
            f"  GPU's cache    {f'{tokens:,} tokens' if tokens else 'none'} (--gpu-kv-tokens)",
            f"  prefill        {speed:,.0f} tokens/s ({source})",
            f"  a step         {1e3 * base.step_s:.3g} ms{measured} (step_s), and for each request that decodes",
            f"                 {1e6 * base.decode_s:.3g} us and {1e9 * context_s:.3g} ns a token of its context",
            f"  at once        {base.max_requests} requests (max_num_seqs), {base.chunk_tokens:,} tokens a step",
            f"  loads          {format_bytes(base.load_bytes_per_s)}/s from host memory (load_speed)",
        ]
        if base.disk_blocks:
            read, write = format_bytes(base.disk_read_bytes_per_s), format_bytes(base.disk_write_bytes_per_s)
            lines.append(f"  disk           {read}/s read, {write}/s written (disk_read_speed, disk_write_speed)")
        if not tokens:
            lines += [
                "Without the GPU's cache every hit counts for offloading, so hits are an upper",
                "bound. vLLM's log has the tokens as 'GPU KV cache size'.",
            ]
        lines += [
            "Not modelled: stores of answers, priorities, speculative decoding, adapters, and",
            "other users of the disk.",
        ]
        return [*lines, NO_FORECAST]

    def guesses(self, base: SimConfig, trace: Trace) -> list[str]:
        """Return the facts of the machine that are guesses, in words."""
        found = []
        if not base.gpu_blocks:
            found.append("no cache on the GPU (--gpu-kv-tokens)")
        if not (self._is_kv_given or trace.token_bytes):
            found.append(f"{format_bytes(self._sizes.bytes_per_token)} of KV per token (--model)")
        if not (self._prefill_speed or trace.prefill_tokens_per_s):
            found.append(f"{base.prefill_tokens_per_s:,.0f} tokens/s of prefill (--prefill-speed)")
        return found

    def warnings(self) -> list[str]:
        """Return sentences about the trace that was loaded."""
        if not self._is_cut:
            return []
        read = f"only the first {self._max_requests:,} requests were read (--max-requests)."
        return [f"{read} A longer trace has more hits and fills more memory."]

    def policies(self, text: str | None) -> list[str]:
        """Return the policies in ``text``, or else the policy of the file."""
        names = [name for name in map(str.strip, (text or self._file.policy or "").split(",")) if name]
        for name in names:
            if name not in POLICIES.names():
                raise UnknownNameError(f"Unknown cache policy: {name!r}.{suggest(name, POLICIES.names())}")
        if not names and text:
            raise ConfigError("--policy needs at least one policy.")
        return list(dict.fromkeys(names))

    def cascades(self) -> Sequence[CascadeMode | None]:
        """Return the modes to try. ``None`` is the default, which depends on the sizes."""
        cascade = self._file.cascade
        return [cascade] if isinstance(cascade, str) else [*dict.fromkeys(cascade)] if cascade else [None]

    def server_numbers(self) -> list[int]:
        """Return the numbers of servers to simulate."""
        servers = self._file.servers
        numbers = [servers] if isinstance(servers, int) else [*servers] if isinstance(servers, tuple) else []
        if not numbers or not all(1 <= number <= _MOST_SERVERS for number in numbers):
            raise ConfigError(
                f"servers of {_WHAT} must be a number or a list such as [4, 8]; only plan accepts a range."
            )
        return numbers

    def server_range(self) -> tuple[int, int]:
        """Return the smallest and the largest number of servers that a plan may choose."""
        servers = self._file.servers
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(servers))
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= _MOST_SERVERS:
            raise ConfigError(f"servers of {_WHAT} must be a number or a range such as 1:64.")
        if self._file.prefill_servers:
            raise ConfigError(f"prefill_servers of {_WHAT} works only with simulate; remove it.")
        return least, most

    def fleets(
        self, trace: Trace, servers: Sequence[SimConfig], numbers: Sequence[int], router: str
    ) -> list[FleetConfig]:
        """Return every combination, each once. ``router`` is used if the file names none."""
        file, block_bytes = self._file, self.block_bytes(trace)
        routers = router if file.routers is None else file.routers
        shared = file.shared if isinstance(file.shared, tuple) else (file.shared,)
        stores = [_store(values, "shared", trace, block_bytes) for values in shared]
        pool = _store(file.pool, "pool", trace, block_bytes)
        found = [
            FleetConfig(
                server,
                number,
                name,
                store if server.cpu_blocks else None,
                pool if server.cpu_blocks else None,
                file.servers_per_machine,
                file.prefill_servers,
            )
            for number in numbers
            for name in ([routers] if isinstance(routers, str) else routers)
            for store in stores
            for server in servers
        ]
        if not found:
            raise ConfigError(f"routers and shared of {_WHAT} must name at least one.")
        return [*dict.fromkeys(found)]  # servers without host memory cannot use a shared tier


def _store(values: Mapping[str, Any] | str | None, name: str, trace: Trace, block_bytes: int) -> SharedStore | None:
    if values is None or values == "none":
        return None
    if isinstance(values, str):
        raise ConfigError(f"{name} of {_WHAT} must be a mapping with a size, or none, not {values!r}.")
    store: _Store = parse_struct(_Store, values, f"{name} of {_WHAT}")
    several = ": write several stores as a list" if name == "shared" else ""
    blocks = capacity(str(store.size), f"size of {name} of {_WHAT}", trace, block_bytes, several)
    speeds = {"server_bytes_per_s": ("link", store.link), "store_bytes_per_s": ("store", store.store)}
    changes: dict[str, Any] = {
        target: float(parse_bytes(speed, f"{key} of {name}"))
        for target, (key, speed) in speeds.items()
        if speed is not None
    }
    changes |= {key: getattr(store, key) for key in ("latency_s", "ttl_s") if getattr(store, key) is not None}
    return SharedStore(blocks, **changes)


def warn_if_cut(path: Path, trace: Trace) -> None:
    """Say on standard error if a line of the trace was cut off."""
    if trace.cut_line is not None:
        used = counted(len(trace), "complete request")
        print(f"{path}: line {trace.cut_line} is cut off; {used} are used.", file=sys.stderr)


def prefill_speed(given: float | None, trace: Trace) -> tuple[float, str]:
    """Return the prompt tokens that the GPU computes per second, and the source of this number: the option, the trace
    or a guess."""
    if given is not None:
        return given, "--prefill-speed"
    if trace.prefill_tokens_per_s:
        return trace.prefill_tokens_per_s, "as the server measured it"
    return USUAL.prefill_tokens_per_s, "a guess: --prefill-speed"


def device_blocks(trace: Trace, gpu_kv_tokens: int | None) -> int:
    """Return the size of the GPU's own cache in blocks of ``trace``: from the option, or else from the trace, or else
    0."""
    return trace.device_blocks if gpu_kv_tokens is None else gpu_kv_tokens // trace.block_tokens


def model_sizes(model: str | None, kv_bytes: str | None, dtype: str | None = None) -> ModelKV:
    """Return the sizes of ``model``'s KV cache in ``dtype``, or of ``kv_bytes`` per token, or a default. The last two
    assume no states."""
    if model is not None and kv_bytes is not None:
        raise ConfigError("--model and --kv-bytes-per-token both give the KV size; choose one of them.")
    if model is not None:
        return model_kv(model, dtype)
    if dtype is not None:
        raise ConfigError("kv_dtype works only with --model; without it, give the size in --kv-bytes-per-token.")
    return ModelKV(parse_bytes(kv_bytes, "--kv-bytes-per-token") if kv_bytes is not None else _DEFAULT_KV_BYTES)


def capacities(text: str, option: str, trace: Trace, block_bytes: int) -> list[int]:
    """Return the number of blocks for each size in a list like ``"64GiB,10%"``, without repetitions.

    A percentage refers to the trace's different whole blocks. Only ``--disk`` may be 0. Raises ``ConfigError``, which
    names ``option``, for a size of less than one block.
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
                raise ConfigError(f"{option}: {part!r} is not a percentage; write for example '10%'.") from exc
        else:
            blocks = parse_bytes(part, option) // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"{option}: {part} has no room for one block of {trace.name}, which takes "
                f"{format_bytes(block_bytes)} ({trace.block_tokens} tokens); give a larger size."
            )
        sizes.append(blocks)
    if not sizes:
        raise ConfigError(f"{option} needs at least one size.")
    return list(dict.fromkeys(sizes))


def capacity(text: str, option: str, trace: Trace, block_bytes: int, several: str = "") -> int:
    """Return the one size in ``text``, as ``capacities`` does. ``several`` is added to the error about more than
    one."""
    blocks, *more = capacities(text, option, trace, block_bytes)
    if more:
        raise ConfigError(f"{option} must be one size, not {text}{several}.")
    return blocks
