# SPDX-License-Identifier: Apache-2.0
"""Says whether kvoffload would work with a model and vLLM's arguments, without starting an engine.

vLLM itself reads the arguments and the model's configuration, builds the model without memory for its weights, and
computes its KV groups. Then the table of rejected setups is applied. This needs no GPU and no weights.

vLLM runs in a child process, because it ends its process if it does not know an argument, and because it logs much.
Importing this module loads neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from kvoffload.cli.blame import cause_here, in_one_line, logged_errors, sentence_of
from kvoffload.config import OffloadingConfig
from kvoffload.config_file import ENVIRONMENT
from kvoffload.engines.rejections import problems_of
from kvoffload.engines.vllm.adapters import note_on_adapters
from kvoffload.engines.vllm.arguments import config_of
from kvoffload.engines.vllm.layout import layout_of
from kvoffload.engines.vllm.media import note_on_media
from kvoffload.engines.vllm.rejections import (
    BEFORE_LOAD,
    EXPERTS,
    FAILURE_POLICY,
    HASHES,
    PREFILL_CONTEXT,
    ROLE,
    TWO_CONNECTORS,
    UNEQUAL_STAGES,
    WITH_KV_CACHE,
    Setup,
    check_memory,
    undecided,
)
from kvoffload.engines.vllm.slices import page_bytes
from kvoffload.engines.vllm.weights import drafter_with_kv
from kvoffload.errors import ConfigError, KVOffloadError, MissingExtraError, Problems
from kvoffload.specs import make_spec

_TIME_LIMIT_S = 300.0
"""For the child process. It usually needs 10 to 30 s, most of them to import vLLM."""
_RANK_BYTES = 1 << 50
"""Memory of each rank in the computation of KV groups, so that every model fits."""

_OF_TRANSFER = (
    *("kv-transfer-config", "kv-connector", "kv-connector-module-path", "kv-connector-extra-config", "kv-role"),
    *("kv-load-failure-policy", "engine-id"),
)
_CONFIG = "config.json"
BY_VLLM = "vLLM rejects"
"""The start of problems that vLLM has without kvoffload."""
_DEFAULT_HASH = "sha256"
"""vLLM's default of ``--prefix-caching-hash-algo``."""


class Verdict(msgspec.Struct, kw_only=True):
    """The answer about a model and vLLM's arguments."""

    problems: list[str] = []
    """All reasons why a server would not start with kvoffload."""
    unjudged: list[str] = []
    """Setups about which only a starting server can decide."""
    unknown: str = ""
    """A clause that says why this environment cannot judge the model. If it is set, the answer is not yes, even without
    problems."""
    notes: list[str] = []
    """Sentences about parts of a working setup."""
    judged_by: str = ""
    """The version and platform of the vLLM that read the arguments. Empty if none did."""


def is_installed() -> bool:
    """Return whether vLLM is installed in this environment."""
    return importlib.util.find_spec("vllm") is not None


def judge(file: Path, model: str, arguments: Sequence[str]) -> Verdict:
    """Return the verdict about ``vllm serve MODEL ARGUMENTS`` with the configuration in ``file``."""
    if not is_installed():
        return Verdict(unknown="vLLM is not installed in this environment")
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer.json"
        command = [sys.executable, "-m", __name__, str(answer), _folder(model, Path(directory)), *arguments]
        environment = os.environ | {ENVIRONMENT: str(file.resolve()), "VLLM_LOGGING_LEVEL": "ERROR"}
        try:
            child = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,  # vLLM may ask whether to run a model's own code
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Verdict(unknown=f"vLLM needed more than {_TIME_LIMIT_S:g} s to read it")
        if answer.exists():
            return msgspec.json.decode(answer.read_bytes(), type=Verdict)
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    last = lines[-1].strip().rstrip(".") if lines else f"exit code {child.returncode}"
    return Verdict(unknown=f"vLLM failed in this environment: {last}")


def _folder(model: str, directory: Path) -> str:
    """Return the folder or name of the model, which vLLM reads, even if ``model`` is a file with its configuration."""
    path = Path(model)
    if path.name == _CONFIG and path.is_file():
        return str(path.parent)
    if path.suffix != ".json" or not path.is_file():
        return model
    copied = directory / path.stem
    copied.mkdir()
    shutil.copyfile(path, copied / _CONFIG)
    return str(copied)


def check_file(wrappers: Mapping[str, Any], config: OffloadingConfig, problems: Problems) -> list[str]:
    """Check vLLM's arguments in a file that contains more than kvoffload's keys (see ``load_wrapped``).

    Adds to ``problems`` the reasons why a server would not start. Returns the names of arguments that only a server can
    check.
    """
    arguments = {name.replace("_", "-"): value for name, value in wrappers.items()}
    is_for_vllm = "kv-transfer-config" in arguments  # the plug-in reads only kvoffload's keys of other files
    transfer = {name: arguments.pop(name, None) for name in _OF_TRANSFER}
    parts = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=transfer["kv-load-failure-policy"] or "fail", kv_role=transfer["kv-role"]
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=arguments.pop("prefix-caching-hash-algo", None) or _DEFAULT_HASH
        ),
        aux_output_config=SimpleNamespace(enabled=arguments.pop("enable-return-routed-experts", False) is True),
    )
    rows = [HASHES, EXPERTS, *([FAILURE_POLICY, ROLE] if is_for_vllm else [])]
    for problem in problems_of(rows, Setup(parts, config)):
        problems.add(problem)
    return sorted(arguments)


# ------------------------------------------------------------------------------------------------- the child process


def _verdict(model: str, arguments: Sequence[str]) -> Verdict:
    """Return the verdict. Runs in the child, which has the environment of a server."""
    verdict = Verdict()
    logged = logged_errors()
    parsed: Any = None
    try:
        verdict.judged_by = _vllm_and_platform()
        _let_vllm_read_all()
        parsed = _parsed(model, arguments)
        vllm_config = _ours(_serve(parsed, _reader()))
        config = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    except (ConfigError, MissingExtraError) as exc:
        verdict.problems += map(str, exc.args)
        return verdict
    except _NoHookError as exc:
        verdict.unknown = f"this vLLM starts its server in a way that kvoffload does not know: {exc}"
        return verdict
    except Exception as exc:  # noqa: BLE001 - vLLM may raise anything
        _add_error(verdict, [*logged, exc])
        if verdict.unknown and parsed is not None:
            verdict.problems += problems_of(
                (EXPERTS, PREFILL_CONTEXT), Setup(_parts(parsed), OffloadingConfig(cpu_bytes_to_use=1))
            )
        return verdict
    setup = Setup(vllm_config, config)
    verdict.unjudged += [row.setup for row in undecided(setup)]
    if vllm_config.device_config.device_type == "cpu" and vllm_config.model_config.use_mla:
        verdict.unjudged.append("latent attention on CPUs, which needs AMX")
    for note in (note_on_adapters(vllm_config, config), note_on_media(vllm_config, config)):
        if note is not None:
            verdict.notes.append(f"{note}.")
    problems = problems_of(BEFORE_LOAD, setup)
    memory = Problems()
    with memory:
        check_memory(vllm_config, config)
    problems += memory.found
    logged.clear()
    try:
        _check_loader(vllm_config)
    except Exception as exc:  # noqa: BLE001 - as above
        _add_error(verdict, [*logged, exc])
    try:
        _let_vllm_continue()
        with _one_process():
            kv_caches = _kv_caches(vllm_config)
    except ConfigError as exc:
        problems += map(str, exc.args)
        kv_caches = []
    except Exception as exc:  # noqa: BLE001 - as above; a newer vLLM may also lack names that this file uses
        verdict.unknown = (
            verdict.unknown
            or cause_here([*logged, exc])
            or (f"vLLM cannot build this model here, so its KV groups are not known: {sentence_of(exc)}")
        )
        kv_caches = []
    found = [
        problem
        for rank, kv_cache in enumerate(kv_caches)
        for problem in problems_of(WITH_KV_CACHE, Setup(vllm_config, config, kv_cache, rank))
    ]
    sizes = dict.fromkeys(page_bytes(vllm_config, kv_cache, rank) for rank, kv_cache in enumerate(kv_caches))
    is_named = any(UNEQUAL_STAGES.setup in problem for problem in found)
    if len(sizes) > 1 and not is_named:  # a server's ranks cannot join one memory then
        found.append(UNEQUAL_STAGES.sentence(f"blocks of {' and '.join(map(str, sizes))} bytes"))
    verdict.problems += dict.fromkeys([*problems, *found])
    if kv_caches and not verdict.problems:
        _check_blocks(verdict, vllm_config, config, kv_caches[0])
    return verdict


def _check_blocks(verdict: Verdict, vllm_config: Any, config: OffloadingConfig, kv_cache: Any) -> None:
    """Add what kvoffload's spec says about the sizes of blocks, as in the scheduler's connector."""
    has_own_blocks = vllm_config.cache_config.user_specified_block_size and not vllm_config.model_config.is_hybrid
    if config.block_size is not None and vllm_config.device_config.device_type == "cpu" and not has_own_blocks:
        verdict.unjudged.append("block_size, because vLLM's blocks have another size on CPUs than on GPUs")
        config = replace(config, block_size=None)
    try:
        make_spec(config, layout_of(vllm_config, kv_cache, config))
    except (ConfigError, MissingExtraError) as exc:
        verdict.problems += map(str, exc.args)
    except Exception as exc:  # noqa: BLE001 - a newer vLLM may lack names that the layout reads
        verdict.unknown = f"kvoffload cannot read its KV cache here: {sentence_of(exc)}"


def _add_error(verdict: Verdict, errors: Sequence[BaseException]) -> None:
    """Add vLLM's last error, either as a problem of the setup or as a reason why this environment cannot judge it."""
    verdict.unknown = cause_here(errors)
    if not verdict.unknown:
        verdict.problems.append(f"{BY_VLLM} this model with these arguments: {sentence_of(errors[-1])}.")


def _parts(parsed: Any) -> Any:
    """Return the parts of vLLM's configuration that rows need if this platform cannot read the arguments."""
    return SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=parsed.enable_return_routed_experts),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=parsed.prefill_context_parallel_size),
    )


def _reader() -> Callable[..., Any]:
    """Return vLLM's function that reads an engine's arguments, after kvoffload has filled in its own, and without
    kvoffload's checks."""
    from vllm.engine.arg_utils import EngineArgs

    from kvoffload.engines.vllm import fill_in, register

    register()  # also without the plug-in
    read = EngineArgs.create_engine_config

    def read_filled_in(engine_args: Any, *args: Any, **options: Any) -> Any:
        fill_in(engine_args)
        return getattr(read, "__wrapped__", read)(engine_args, *args, **options)

    return read_filled_in


def _parsed(model: str, arguments: Sequence[str]) -> Any:
    """Return the arguments, as ``vllm serve`` parses them."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            text = (message or "").partition("error: ")[2] or "--help starts no server"
            raise ConfigError(f"{BY_VLLM} its arguments: {in_one_line(text)}.")

    parser = Parser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser.parse_args(["serve", model, *arguments])


def _serve(parsed: Any, read: Callable[..., Any]) -> Any:
    """Run ``vllm serve`` until it would start a process, with ``read`` as ``EngineArgs.create_engine_config``. Return
    the result of ``read``, which is vLLM's configuration.

    Raises all errors of vLLM's checks, and ``_NoHookError`` if this vLLM starts in another way.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli import serve
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM

    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(read(*args, **options))
        return made[-1]

    def stop(*args: Any, **_: Any) -> NoReturn:
        raise _Stop(*args)

    def listen(*_: Any, **__: Any) -> socket.socket:
        return socket.socket()

    launcher = sys.modules[serve.setup_server.__module__]
    for owner, name, hook in (
        (EngineArgs, "create_engine_config", make),
        (launcher, "create_server_socket", listen),
        (launcher, "create_server_unix_socket", listen),
        (serve, "create_server_socket", listen),
        (AsyncLLM, "from_vllm_config", stop),
        (serve, "MultiprocExecutor", stop),
        (serve, "CoreEngineProcManager", stop),
        (utils, "bind_engine_zmq_listeners", stop),
        (BaseProcess, "start", stop),
    ):
        if not hasattr(owner, name):
            raise _NoHookError(f"{owner.__name__} has no {name}")
        setattr(owner, name, hook)
    command = serve.ServeSubcommand()
    command.validate(parsed)
    try:
        command.cmd(parsed)
    except _Stop as exc:
        if not made and exc.args:  # one of several servers, which have an engine each
            with contextlib.suppress(_Stop):
                exc.args[0].run()
    if not made:
        raise _NoHookError("no configuration was made")
    return made[-1]


def _check_loader(vllm_config: Any) -> None:
    """Let vLLM check the options of the load, without a load."""
    from vllm.model_executor.model_loader import get_model_loader

    get_model_loader(vllm_config.load_config)


def _ours(vllm_config: Any) -> Any:
    """Return the configuration that kvoffload's connector gets, which may be one of several.

    Raises ``ConfigError`` if there is no such connector, or more than one.
    """
    from vllm.config import KVTransferConfig

    from kvoffload.engines.vllm import NAME, tell_connectors

    transfer = vllm_config.kv_transfer_config
    if transfer is not None:
        tell_connectors(transfer)
        if transfer.kv_connector == NAME:
            return vllm_config
    children = [] if transfer is None else transfer.kv_connector_extra_config.get("connectors") or []
    ours = [child for child in children if child.get("kv_connector") == NAME]
    if len(ours) > 1:
        raise TWO_CONNECTORS.error()
    if not ours:
        if vllm_config.cache_config.kv_offloading_size is not None:
            raise ConfigError(
                "With --kv-offloading-size, vLLM uses its own offloading instead of kvoffload; remove this option."
            )
        raise ConfigError(
            f"These arguments use {transfer.kv_connector}, and kvoffload does nothing beside it: leave it out, or name "
            "both connectors in a MultiConnector."
        )
    vllm_config = copy.copy(vllm_config)
    vllm_config.kv_transfer_config = KVTransferConfig(**ours[0])
    return vllm_config


def _let_vllm_read_all() -> None:
    """Let vLLM's platform for CPUs read latent attention as on GPUs.

    Without AMX, it turns chunked prefill and prefix caching off, and rejects recurrent states beside it.
    """
    import torch

    torch.cpu._is_amx_tile_supported = lambda: True


def _let_vllm_continue() -> None:
    """Let vLLM compute the KV groups of setups that kvoffload rejects, so that the answer contains all reasons."""
    from kvoffload.engines.vllm import KVOffloadConnector
    from kvoffload.engines.vllm.layout import preferred_layout

    def ask(vllm_config: Any) -> str | None:
        return preferred_layout(vllm_config, config_of(vllm_config.kv_transfer_config.kv_connector_extra_config))

    KVOffloadConnector.get_required_kvcache_layout = staticmethod(ask)  # type: ignore[method-assign]


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Let vLLM believe that this process is the only rank of an engine, so that it can build layers."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield


def _kv_caches(vllm_config: Any) -> list[Any]:
    """Return vLLM's ``KVCacheConfig`` of each rank, from vLLM's own engine core over ranks that have no memory."""
    from vllm.v1.engine.core import EngineCore

    ranks = _Ranks(vllm_config)
    core = SimpleNamespace(model_executor=ranks, collective_rpc=lambda *args, **kwargs: [])
    try:
        with contextlib.suppress(_Stop):
            EngineCore._initialize_kv_caches(core, vllm_config)
    except Exception as exc:
        empty = [str(stage) for stage, specs in enumerate(ranks.stages, 1) if not specs]
        if len(empty) in (0, len(ranks.stages)):
            raise
        raise ConfigError(
            f"{BY_VLLM} pipelines with a stage that keeps no KV (stage {', '.join(empty)} of {len(ranks.stages)}): "
            "lower --pipeline-parallel-size, or move layers to it with VLLM_PP_LAYER_PARTITION."
        ) from exc
    return ranks.kv_caches


class _Stop(KVOffloadError):
    """The rest of the start is left out."""


class _NoHookError(KVOffloadError):
    """This vLLM starts in a way that this file does not know."""


class _Ranks:
    """Stands in for vLLM's executor, and for the workers of its ranks."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self.stages: list[dict[str, Any]] = []
        """The KV specs of each stage of the pipeline."""
        self.kv_caches: list[Any] = []

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        parallel = self._vllm_config.parallel_config
        per_stage = parallel.world_size // parallel.pipeline_parallel_size
        self.stages = [_specs_of_stage(self._vllm_config, stage) for stage in range(parallel.pipeline_parallel_size)]
        return [specs for specs in self.stages for _ in range(per_stage)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
        from vllm.v1.worker.worker_base import get_current_attn_backends

        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(self._vllm_config))
        return [[layout.name for layout in layouts]] * self._vllm_config.parallel_config.world_size

    def set_kv_cache_layout(self, layout: str, *_: Any) -> None:
        from vllm.v1.worker.worker_base import record_kv_cache_layout

        record_kv_cache_layout(self._vllm_config.cache_config, layout)

    def determine_available_memory(self) -> list[int]:
        return [_RANK_BYTES] * self._vllm_config.parallel_config.world_size

    def initialize_from_config(self, kv_caches: list[Any]) -> None:
        self.kv_caches = kv_caches
        raise _Stop


def _specs_of_stage(vllm_config: Any, stage: int) -> dict[str, Any]:
    """Return the KV specs of the layers of one pipeline stage, by name."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    vllm_config.compilation_config.static_forward_context.clear()
    pipeline, tensor = get_pp_group(), get_tp_group()
    pipeline.world_size, pipeline.rank_in_group = parallel.pipeline_parallel_size, stage
    pipeline.ranks, pipeline.rank = list(range(pipeline.world_size)), stage
    tensor.world_size = parallel.tensor_parallel_size
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(model.dtype), torch.device("meta"):
        try:
            initialize_model(vllm_config)
        except Exception:
            if vllm_config.quant_config is None:
                raise
            # This platform may lack kernels for quantized weights, which do not change KV groups.
            vllm_config.quant_config = None
            vllm_config.compilation_config.static_forward_context.clear()
            initialize_model(vllm_config)
        drafter = drafter_with_kv(vllm_config)
        if drafter is not None and stage == parallel.pipeline_parallel_size - 1:
            draft = drafter.draft_model_config
            if drafter.method == "draft_model":  # heads read their own configuration
                whole = copy.copy(vllm_config)
                whole.model_config, whole.quant_config = draft, None
                initialize_model(whole, prefix="draft_model")
            else:
                initialize_model(vllm_config, model_config=draft)
        current_platform.update_block_size_for_backend(vllm_config)
        runner = SimpleNamespace(vllm_config=vllm_config, shared_kv_cache_layers={})
        return dict(GPUModelRunner.get_kv_cache_spec(runner))


def _vllm_and_platform() -> str:
    from vllm.platforms import current_platform
    from vllm.version import __version__

    return f"vLLM {__version__} on the platform {current_platform.device_name}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(_verdict(sys.argv[2], sys.argv[3:])))
