# SPDX-License-Identifier: Apache-2.0
"""What is refused of vLLM's arguments by their values alone. Loads neither vLLM nor torch, so that ``check-config`` can
say it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.weights import outliving_tier
from kvoffload.errors import ConfigError, Problems

CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")
"""Values of ``--prefix-caching-hash-algo`` under which nobody can make two prefixes with one key. They are the same in
every process, too."""

_HASHES = "prefix-caching-hash-algo"
_EXPERTS = "enable-return-routed-experts"


def refuse_transfer(failure_policy: Any, role: Any) -> None:
    if failure_policy != "recompute":
        raise ConfigError(
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config: a failed load is a miss, and with '
            f"{failure_policy!r} vLLM would fail the request instead."
        )
    if role != "kv_both":
        raise ConfigError(
            f'Set "kv_role": "kv_both" in --kv-transfer-config: kvoffload stores and loads, and {role!r} '
            "would leave out one of them."
        )


def refuse_hashes(algorithm: str, tier: str) -> None:
    if algorithm not in CRYPTOGRAPHIC_HASHES:
        raise ConfigError(
            f"Two prompts can be made that have one {algorithm!r} hash, and the secondary tier {tier!r} would serve "
            "the KV of one for the other to all of its readers: set --prefix-caching-hash-algo to one of "
            f"{', '.join(CRYPTOGRAPHIC_HASHES)}, or leave out the tier."
        )


def refuse_routed_experts(are_returned: bool) -> None:
    if are_returned:
        raise ConfigError(
            f"kvoffload cannot say which experts computed a block that it loads: leave out --{_EXPERTS}, or serve "
            "without kvoffload."
        )


def check_file(wrappers: Mapping[str, Any], config: OffloadingConfig, problems: Problems) -> list[str]:
    """What a file of vLLM's has beside kvoffload's keys (``load_wrapped``): adds to ``problems`` what a server would
    refuse. Returns the names of those that only a server can judge."""
    arguments = {name.replace("_", "-"): value for name, value in wrappers.items()}
    is_for_vllm = "kv-transfer-config" in arguments  # of another file the plug-in takes kvoffload's keys alone
    transfer = {name: arguments.pop(name, None) for name in _OF_TRANSFER}
    if is_for_vllm:
        with problems:
            refuse_transfer(transfer["kv-load-failure-policy"] or "fail", transfer["kv-role"])
    tier = outliving_tier(config)
    if (algorithm := arguments.pop(_HASHES, None)) is not None and tier is not None:
        with problems:
            refuse_hashes(str(algorithm), tier)
    with problems:
        refuse_routed_experts(arguments.pop(_EXPERTS, False) is True)
    return sorted(arguments)


_OF_TRANSFER = (
    *("kv-transfer-config", "kv-connector", "kv-connector-module-path", "kv-connector-extra-config", "kv-role"),
    *("kv-load-failure-policy", "engine-id"),
)
