# SPDX-License-Identifier: Apache-2.0
"""Checks vLLM's arguments in a configuration file. Loads neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.rejections import problems_of
from kvoffload.engines.vllm.rejections import FAILURE_POLICY, HASHES, ROLE, Setup
from kvoffload.errors import Problems

_OF_TRANSFER = (
    *("kv-transfer-config", "kv-connector", "kv-connector-module-path", "kv-connector-extra-config", "kv-role"),
    *("kv-load-failure-policy", "engine-id"),
)
_DEFAULT_HASH = "sha256"
"""vLLM's default of ``--prefix-caching-hash-algo``."""


def check_file(wrappers: Mapping[str, Any], config: OffloadingConfig, problems: Problems) -> list[str]:
    """Check vLLM's arguments in a file that contains more than kvoffload's keys (see ``load_wrapped``).

    Adds to ``problems`` what a server would reject. Returns the names of arguments that only a server can check.
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
    )
    for problem in problems_of([HASHES, *([FAILURE_POLICY, ROLE] if is_for_vllm else [])], Setup(parts, config)):
        problems.add(problem)
    return sorted(arguments)
