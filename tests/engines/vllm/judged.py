# SPDX-License-Identifier: Apache-2.0
"""Lists of vLLM's arguments, as ``check-config`` judges them and as vLLM and the connector accept or reject them.

Each answer is made in a process of its own, forked after vLLM's import, which takes much longer than an answer.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from kvoffload.cli import judge
from kvoffload.config_file import ENVIRONMENT
from kvoffload.engines.vllm.rejections import NO_SHARED_MEMORY
from kvoffload.errors import ConfigError

_TIME_LIMIT_S = 300
"""For an answer, which usually needs a second."""


def judged(lists: list[tuple[str, list[str], dict[str, Any], bool]]) -> list[dict[str, Any]]:
    """Return, for each model, its arguments and kvoffload's keys, the ``verdict``, and if the last value is true, the
    ``rejected`` of a server."""
    import vllm.engine.arg_utils
    import vllm.entrypoints.cli.serve
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_model_runner  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.model_executor.models import registry

    import kvoffload.engines.vllm.connector  # noqa: F401

    registry._run_in_subprocess = lambda inspect: inspect()  # which would import vLLM again, for each kind of model
    judge._parsed("", [])  # vLLM remembers what it reads from the comments of its sources
    configure_logging(LoggingConfig())  # as vLLM does later, unless the log has this configuration
    gc.freeze()  # else each process would copy most of the memory
    answers = []
    for model, arguments, keys, has_server in lists:
        with TemporaryDirectory() as directory:
            file = Path(directory) / "offload.json"
            file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB"} | keys))
            os.environ[ENVIRONMENT] = str(file)
            answers.append(
                {
                    "verdict": _forked(_verdict, model, arguments),
                    "rejected": _forked(_rejected, model, arguments) if has_server else None,
                }
            )
    return answers


def _verdict(model: str, arguments: list[str]) -> Any:
    return msgspec.to_builtins(judge._verdict(model, arguments))


def _rejected(model: str, arguments: list[str]) -> dict[str, Any] | None:
    """Return the reasons of vLLM or of the connector, or ``None`` if both accept the setup and use kvoffload."""
    try:
        if not _start(model, arguments):
            return {"by": "nobody", "reasons": ["it starts without kvoffload"]}
    except ConfigError as exc:
        # Here is no rank that could share the memory.
        is_alone = all(NO_SHARED_MEMORY.setup in reason for reason in exc.args)
        return None if is_alone else {"by": "kvoffload", "reasons": list(exc.args)}
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - vLLM may raise anything
        return {"by": "vLLM", "reasons": [repr(exc)]}
    return None


def _start(model: str, arguments: list[str]) -> bool:
    """Do everything that a server does before it loads weights, and create the scheduler's connector. Return whether
    the server uses kvoffload."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from kvoffload.engines.vllm import NAME, connector, register

    connector._JOIN_TIMEOUT_S = 0.0
    register()
    vllm_config = judge._serve(judge._parsed(model, arguments), EngineArgs.create_engine_config)
    get_model_loader(vllm_config.load_config)
    with judge._one_process():
        kv_caches = judge._kv_caches(vllm_config)
    KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER, kv_caches[0]).shutdown()
    return bool(vllm_config.kv_transfer_config.has_connector(NAME))


def _forked(call: Callable[[str, list[str]], Any], model: str, arguments: list[str]) -> Any:
    """Return the result of ``call`` in a process of its own."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(_TIME_LIMIT_S)
        code = 1
        try:
            with os.fdopen(sender, "w") as file:
                json.dump(call(model, arguments), file)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(sender)
    with os.fdopen(receiver) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the process ended with {status}"
    return json.loads(text)
