# SPDX-License-Identifier: Apache-2.0
"""kvoffload inside vLLM: an out-of-tree KV connector.

The environment variable ``KVOFFLOAD_CONFIG`` turns it on, or ``--kv-transfer-config`` with the name
``KVOffloadConnector``. The entry point ``vllm.general_plugins`` registers that name, makes the variable alone
sufficient, rejects mistakes in the configuration before an engine starts, and records the files of weights before vLLM
loads them. If plug-ins are switched off, add ``"kv_connector_module_path": "kvoffload.engines.vllm"``.

Importing this package loads neither vLLM nor torch. Importing the connector from it raises ``ConfigError`` for a vLLM
that is not supported; registering its name does not, because vLLM does that in every process, whether or not it is
used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from kvoffload.config_file import ENVIRONMENT, file_in_environment
from kvoffload.engines.vllm.versions import NEWEST, differences, differs, installed_version, release_of, vllm_release

if TYPE_CHECKING:
    from kvoffload.engines.vllm.connector import KVOffloadConnector

__all__ = ["KVOffloadConnector", "register"]

logger = logging.getLogger(__name__)

NAME = "KVOffloadConnector"
_FAILURE_POLICY = "recompute"
"""The only policy that turns a failed load into a miss."""


def __getattr__(name: str) -> Any:
    if name == NAME:
        is_tested = vllm_release() <= NEWEST  # before importing anything that other versions of vLLM may lack
        try:
            from kvoffload.engines.vllm.connector import KVOffloadConnector
        except ImportError as exc:
            if is_tested:
                raise
            raise differs(exc) from exc
        if not is_tested and (found := differences(KVOffloadConnector)):
            raise differs("; ".join(found))
        return KVOffloadConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Register the connector's name with vLLM. vLLM calls this once in each process, whether or not a server names
    kvoffload. Idempotent.

    It never raises. In a vLLM that is too old, it only registers the name, so that the use of the name raises an error
    with the supported versions. A newer version is checked when the name is used.
    """
    try:
        _register_name()
        release_of(installed_version())
        _prepare_engine_arguments()
        _watch_loads()
    except Exception as exc:  # noqa: BLE001 - servers that use other connectors or none must start
        logger.debug("kvoffload is not set up in this process: %s", exc)


def _register_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def _is_named(vllm_config: Any) -> bool:
    """Return whether the server uses this connector, alone or together with others."""
    try:
        transfer = vllm_config.kv_transfer_config
        return transfer is not None and bool(transfer.has_connector(NAME))
    except Exception:  # noqa: BLE001 - as in `register`
        return False


def tell_connectors(transfer: Any) -> None:
    """Tell the connectors named kvoffload what vLLM does not show them.

    A child of a ``MultiConnector`` sees only its own part of the configuration. So it gets the policy of failed loads,
    which vLLM reads from the ``MultiConnector``. A connector without others learns this.
    """
    from kvoffload.engines.vllm.arguments import ALONE

    extra, policy = transfer.kv_connector_extra_config, transfer.kv_load_failure_policy
    children = extra.get("connectors")
    if transfer.kv_connector == NAME:
        transfer.kv_connector_extra_config = extra | {ALONE: True}
    elif isinstance(children, list):
        transfer.kv_connector_extra_config = extra | {
            "connectors": [
                child
                | {
                    "kv_load_failure_policy": policy,
                    "kv_connector_extra_config": _with_file(child.get("kv_connector_extra_config"))
                    | ({ALONE: True} if len(children) == 1 else {}),
                }
                if child.get("kv_connector") == NAME
                else child
                for child in children
            ]
        }


def _with_file(extra: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``extra`` with the path from the variable, because vLLM copies its configuration to all of an engine's
    processes, but does not copy the variable to Ray's processes."""
    path = file_in_environment()
    if path is None:
        return extra or {}
    return {"config_file": os.path.abspath(os.path.expanduser(path))} | (extra or {})


def _prepare_engine_arguments() -> None:
    """Replace ``EngineArgs.create_engine_config``, so that it also applies ``KVOFFLOAD_CONFIG`` and raises the
    connector's errors that do not depend on the KV cache.

    vLLM itself asks the connector's class before it loads a model only if it captures CUDA graphs, and then passes only
    the user's keys. Engine arguments are read in the process that the user starts, before it starts others.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    read = EngineArgs.create_engine_config
    if hasattr(read, "checks_kvoffload"):
        return

    @functools.wraps(read)
    def read_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        if file_in_environment():
            fill_in(self)
        vllm_config = read(self, *args, **kwargs)
        if _is_named(vllm_config):
            transfer = vllm_config.kv_transfer_config
            tell_connectors(transfer)
            KVConnectorFactory.get_connector_class(transfer).get_required_kvcache_layout(vllm_config)
        return vllm_config

    read_and_check.checks_kvoffload = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = read_and_check


def _watch_loads() -> None:
    """Replace the executor's constructor, so that it records the files of weights right before an engine loads them. It
    runs in the scheduler's process."""
    from vllm.v1.executor.abstract import Executor

    load = Executor.__init__
    if hasattr(load, "tells_kvoffload"):
        return

    @functools.wraps(load)
    def load_after_a_look(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if _is_named(vllm_config):
            try:
                from kvoffload.engines.vllm.weights import note_files

                note_files(vllm_config)
            except Exception as exc:  # noqa: BLE001 - without the files, the weights get no name
                logger.debug("kvoffload has not seen the files of the weights: %s", exc)
        load(self, vllm_config, *args, **kwargs)

    load_after_a_look.tells_kvoffload = True  # type: ignore[attr-defined]
    Executor.__init__ = load_after_a_look


def fill_in(arguments: Any) -> None:
    """Fill in the connector, its role, the policy of failed loads and the path of the file, unless the server uses
    another way to move KV. If a ``--kv-transfer-config`` names kvoffload, fill in only the last two."""
    from vllm.config import KVTransferConfig

    log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only its own loggers
    given = arguments.kv_transfer_config
    if isinstance(given, dict):  # from Python
        given = arguments.kv_transfer_config = KVTransferConfig(**given)
    if given is None and not arguments.kv_offloading_size:
        vllm_release()
        arguments.kv_transfer_config = KVTransferConfig(
            kv_connector=NAME,
            kv_role="kv_both",
            kv_load_failure_policy=_FAILURE_POLICY,
            kv_connector_extra_config=_with_file(None),
        )
        what = f'"kv_connector": "{NAME}", "kv_role": "kv_both", "kv_load_failure_policy": "{_FAILURE_POLICY}"'
    elif given is not None and given.kv_connector == NAME:
        given.kv_connector_extra_config = _with_file(given.kv_connector_extra_config)
        if given.kv_load_failure_policy == _FAILURE_POLICY:
            return
        given.kv_load_failure_policy = _FAILURE_POLICY
        what = f'"kv_load_failure_policy": "{_FAILURE_POLICY}"'
    else:
        if given is None or NAME not in repr(given):  # a MultiConnector may contain kvoffload
            other = "--kv-offloading-size" if given is None else f"the connector {given.kv_connector}"
            log.warning("%s is set, but kvoffload does nothing beside %s: use one of them.", ENVIRONMENT, other)
        return
    log.info("%s is set, so --kv-transfer-config gets %s", ENVIRONMENT, what)
