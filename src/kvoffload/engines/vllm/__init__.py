# SPDX-License-Identifier: Apache-2.0
"""kvoffload inside vLLM: an out-of-tree KV connector.

``--kv-transfer-config`` names it as ``KVOffloadConnector``. The entry point ``vllm.general_plugins`` registers that
name, and has mistakes in the configuration refused before an engine starts. Where plug-ins are switched off, add
``"kv_connector_module_path": "kvoffload.engines.vllm"``. Importing this package loads neither vLLM nor torch. Importing
the connector from it raises ``ConfigError`` for a vLLM that is not supported; registering its name does not, because
vLLM does that in every process, whether or not it is used.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.engines.vllm.connector import KVOffloadConnector

__all__ = ["KVOffloadConnector", "register"]

_NAME = "KVOffloadConnector"


def __getattr__(name: str) -> Any:
    if name == _NAME:
        from kvoffload.engines.vllm.versions import vllm_release

        vllm_release()  # before the import of anything that other versions of vLLM may lack
        from kvoffload.engines.vllm.connector import KVOffloadConnector

        return KVOffloadConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Registers the connector's name with vLLM, which calls this once per process. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(_NAME, __name__, _NAME)
    except ValueError:  # registered already
        known = KVConnectorFactory.get_connector_class_by_name(_NAME)
        if not known.__module__.startswith(f"{__name__}."):
            raise
    _check_what_is_read()


def _pass_failure_policy_on(transfer: Any) -> None:
    """Under a ``MultiConnector`` vLLM reads the policy of failed loads from the whole, and never from its children. So
    the connector, which sees its own part alone, finds the policy of the whole there."""
    extra, policy = transfer.kv_connector_extra_config, transfer.kv_load_failure_policy
    children = extra.get("connectors")
    if isinstance(children, list):
        transfer.kv_connector_extra_config = extra | {
            "connectors": [
                child | {"kv_load_failure_policy": policy} if child.get("kv_connector") == _NAME else child
                for child in children
            ]
        }


def _check_what_is_read() -> None:
    """From now on ``EngineArgs.create_engine_config`` raises what the connector refuses without a KV cache.

    vLLM itself asks the connector's class before it loads a model only if it captures CUDA graphs, and then shows it
    only the user's keys. Engine arguments are read in the process that the user starts, before it starts others.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    read = EngineArgs.create_engine_config
    if hasattr(read, "checks_kvoffload"):
        return

    @functools.wraps(read)
    def read_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = read(self, *args, **kwargs)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.has_connector(_NAME):
            _pass_failure_policy_on(transfer)
            KVConnectorFactory.get_connector_class(transfer).get_required_kvcache_layout(vllm_config)
        return vllm_config

    read_and_check.checks_kvoffload = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = read_and_check
