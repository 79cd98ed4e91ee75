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
import logging
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from kvoffload.config import OffloadingConfig
from kvoffload.config_file import ENVIRONMENT
from kvoffload.engines.rejections import problems_of
from kvoffload.engines.vllm.adapters import note_on_adapters
from kvoffload.engines.vllm.arguments import config_of
from kvoffload.engines.vllm.media import note_on_media
from kvoffload.engines.vllm.rejections import (
    BEFORE_LOAD,
    EXPERTS,
    FAILURE_POLICY,
    HASHES,
    ONE_PIECE,
    ROLE,
    TWO_CONNECTORS,
    WITH_KV_CACHE,
    Setup,
    check_memory,
    undecided,
)
from kvoffload.engines.vllm.weights import drafter_with_kv
from kvoffload.errors import ConfigError, KVOffloadError, Problems, text_of

_TIME_LIMIT_S = 300.0
"""For the child process. It usually needs 10 to 30 s, most of them to import vLLM."""
_RANK_BYTES = 1 << 50
"""Memory of each rank in the computation of KV groups, so that every model fits."""

_OF_TRANSFER = (
    *("kv-transfer-config", "kv-connector", "kv-connector-module-path", "kv-connector-extra-config", "kv-role"),
    *("kv-load-failure-policy", "engine-id"),
)
_USAGE = 2
"""The exit code of Python's parser of arguments."""
_IMPORT_ERROR = re.compile(r"^(?:ModuleNotFoundError|ImportError): (.+)$", re.MULTILINE)
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
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
        command = [sys.executable, "-m", __name__, str(answer), model, *arguments]
        environment = os.environ | {ENVIRONMENT: str(file.resolve()), "VLLM_LOGGING_LEVEL": "ERROR"}
        try:
            child = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Verdict(unknown=f"vLLM needed more than {_TIME_LIMIT_S:g} s to read it")
        if answer.exists():
            return msgspec.json.decode(answer.read_bytes(), type=Verdict)
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    last = lines[-1].strip().rstrip(".") if lines else f"exit code {child.returncode}"
    if child.returncode != _USAGE:
        return Verdict(unknown=f"vLLM failed in this environment: {last}")
    return Verdict(problems=[f"vLLM rejects its arguments: {last}."])


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
    logged = _logged_errors()
    try:
        vllm_config = _read(model, arguments)
        verdict.judged_by = _vllm_and_platform()
        vllm_config = _ours(vllm_config)
    except ConfigError as exc:
        verdict.problems += map(str, exc.args)
        return verdict
    except Exception as exc:  # noqa: BLE001 - vLLM may raise anything
        verdict.unknown = _missing_package([*logged, exc])
        if not verdict.unknown:
            verdict.problems.append(f"vLLM rejects this model with these arguments: {_first_line(exc)}.")
        return verdict
    config = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    setup = Setup(vllm_config, config)
    verdict.unjudged += [row.setup for row in undecided(setup)]
    rows = list(BEFORE_LOAD)
    if vllm_config.device_config.device_type == "cpu" and vllm_config.model_config.use_mla:
        rows.remove(ONE_PIECE)
        verdict.unjudged.append(f"{ONE_PIECE.setup}, because this vLLM runs on CPUs, where latent attention needs AMX")
    for note in (note_on_adapters(vllm_config, config), note_on_media(vllm_config, config)):
        if note is not None:
            verdict.notes.append(f"{note[0].upper()}{note[1:]}.")
    problems = problems_of(rows, setup)
    memory = Problems()
    with memory:
        check_memory(vllm_config, config)
    problems += memory.found
    logged.clear()
    try:
        _let_vllm_continue()
        with _one_process():
            kv_caches = _kv_caches(vllm_config)
    except Exception as exc:  # noqa: BLE001 - as above; a newer vLLM may also lack names that this file uses
        verdict.unknown = _missing_package([*logged, exc]) or (
            f"vLLM cannot build this model here, so its KV groups are not known: {_first_line(exc)}"
        )
        kv_caches = []
    for rank, kv_cache in enumerate(kv_caches):
        problems += problems_of(WITH_KV_CACHE, Setup(vllm_config, config, kv_cache, rank))
    verdict.problems += dict.fromkeys(problems)
    return verdict


def _read(model: str, arguments: Sequence[str]) -> Any:
    """Return vLLM's configuration, as ``vllm serve`` makes it before kvoffload judges it."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvoffload.engines.vllm import fill_in, register

    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args([model, *arguments])
    parsed.model = model
    engine_args = AsyncEngineArgs.from_cli_args(parsed)
    register()  # also without the plug-in
    fill_in(engine_args)
    read = EngineArgs.create_engine_config
    return getattr(read, "__wrapped__", read)(engine_args)


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
        raise TWO_CONNECTORS.error(f"{len(ours)} of them")
    if not ours:
        used = "--kv-offloading-size" if transfer is None else transfer.kv_connector
        raise ConfigError(f"These arguments use {used} instead of kvoffload: leave out one of them.")
    vllm_config = copy.copy(vllm_config)
    vllm_config.kv_transfer_config = KVTransferConfig(**ours[0])
    return vllm_config


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
    with contextlib.suppress(_Stop):
        EngineCore._initialize_kv_caches(core, vllm_config)
    return ranks.kv_caches


class _Stop(KVOffloadError):
    """The KV groups are known, and the rest of the start is left out."""


class _Ranks:
    """Stands in for vLLM's executor, and for the workers of its ranks."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self.kv_caches: list[Any] = []

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        parallel = self._vllm_config.parallel_config
        per_stage = parallel.world_size // parallel.pipeline_parallel_size
        stages = [_specs_of_stage(self._vllm_config, stage) for stage in range(parallel.pipeline_parallel_size)]
        return [specs for specs in stages for _ in range(per_stage)]

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


def _logged_errors() -> list[BaseException]:
    """Return a list of the exceptions that vLLM logs from now on. It imports a model's code in another process, logs
    the error of that process, and raises an exception that does not contain it.

    A handler would not see them all, because vLLM configures its log several times, which removes handlers.
    """
    errors: list[BaseException] = []
    make_record = logging.getLogRecordFactory()

    def make(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        if record.levelno >= logging.ERROR and record.exc_info and record.exc_info[1] is not None:
            errors.append(record.exc_info[1])
        return record

    logging.setLogRecordFactory(make)
    return errors


def _missing_package(errors: Sequence[BaseException]) -> str:
    """Return a clause that names the Python package whose absence caused one of ``errors``, and the remedy. Return
    ``""`` if none was caused by a failed import."""
    texts = ["".join(traceback.format_exception(error)) for error in errors]
    found = [reason for text in texts for reason in _IMPORT_ERROR.findall(text)]
    if not found:
        return ""
    if missing := _NO_MODULE.search(found[-1]):
        package = missing[1].partition(".")[0]
        return (
            f"vLLM needs the Python package {package!r} for it, which this environment lacks: install the package, for "
            f"example with `pip install {package}`"
        )
    return f"a Python package that vLLM needs for it cannot be imported in this environment: {found[-1].rstrip('.')}"


def _vllm_and_platform() -> str:
    from vllm.platforms import current_platform
    from vllm.version import __version__

    return f"vLLM {__version__} on the platform {current_platform.device_name}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    # pydantic puts its own heading first
    line = next((line for line in lines if "Value error" in line), lines[0])
    return line.removeprefix("Value error, ").partition(" [type=")[0].rstrip(".: ")


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(_verdict(sys.argv[2], sys.argv[3:])))
