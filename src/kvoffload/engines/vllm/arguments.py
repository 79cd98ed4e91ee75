# SPDX-License-Identifier: Apache-2.0
"""Read values from vLLM's arguments. This module loads neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.config_file import with_config_file
from kvoffload.specs import read_config

CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")
"""Values of ``--prefix-caching-hash-algo`` with which nobody can create two prefixes with one key. Their hashes are
also the same in every process."""


ALONE = "_is_only_connector"
"""A key that ``tell_connectors`` adds to ``kv_connector_extra_config`` if there is no other connector. A connector in a
``MultiConnector`` does not see the others, so without this key there may be some."""


def is_alone(vllm_config: Any) -> bool:
    """Return whether kvoffload is certainly the only connector, so that no other one brings KV."""
    return bool(vllm_config.kv_transfer_config.kv_connector_extra_config.get(ALONE))


def config_of(extra: Mapping[str, Any]) -> OffloadingConfig:
    """Return the configuration in ``kv_connector_extra_config``, merged over a file that it or the environment names.

    Checks everything that needs neither a model nor a layout. Raises ``ConfigError`` with all problems.
    """
    return read_config(with_config_file({key: value for key, value in extra.items() if key != ALONE}))
