# SPDX-License-Identifier: Apache-2.0
"""kvoffload: KV-cache offloading for LLM servers.

The names that users, engine authors and authors of a store import. A module is loaded when one of its names is first
used, so that ``import kvoffload`` costs next to nothing. None of them loads torch or an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

__all__ = [
    "BlockStore",
    "CPUOffloadingManager",
    "CPUOffloadingSpec",
    "CPUPrimaryTierOffloadingManager",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "Checksummed",
    "ConfigError",
    "EngineLayout",
    "EngineStep",
    "FileSystemStore",
    "GroupKind",
    "GuardedManager",
    "KVGroupLayout",
    "KVOffloadError",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "OffloadingManager",
    "OffloadingSpec",
    "ReqContext",
    "ScheduledRequest",
    "SecondaryTierManager",
    "SharedOffloadRegion",
    "StoreOptions",
    "StoreTier",
    "TieringOffloadingManager",
    "TieringOffloadingSpec",
    "__version__",
    "make_offload_key",
    "make_spec",
    "parse_config",
]

if TYPE_CHECKING:
    from kvoffload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        OffloadingManager,
        OffloadingSpec,
        OffloadKey,
        OffloadPolicy,
        ReqContext,
        make_offload_key,
    )
    from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig, parse_config
    from kvoffload.connector import (
        EngineStep,
        GuardedManager,
        OffloadingConnectorScheduler,
        OffloadingConnectorWorker,
        ScheduledRequest,
    )
    from kvoffload.cpu import CPUOffloadingManager, CPUOffloadingSpec, SharedOffloadRegion
    from kvoffload.errors import ConfigError, KVOffloadError
    from kvoffload.specs import make_spec
    from kvoffload.tiering import (
        CPUPrimaryTierOffloadingManager,
        SecondaryTierManager,
        StoreOptions,
        StoreTier,
        TieringOffloadingManager,
    )
    from kvoffload.tiering.spec import TieringOffloadingSpec
    from kvoffload.tiering.stores import BlockStore, Checksummed, FileSystemStore
else:
    _NAMES = {
        "base": (
            "CanonicalKVCacheRef",
            "CanonicalKVCacheTensor",
            "CanonicalKVCaches",
            "OffloadKey",
            "OffloadPolicy",
            "OffloadingManager",
            "OffloadingSpec",
            "ReqContext",
            "make_offload_key",
        ),
        "config": ("EngineLayout", "GroupKind", "KVGroupLayout", "OffloadingConfig", "parse_config"),
        "connector": (
            "EngineStep",
            "GuardedManager",
            "OffloadingConnectorScheduler",
            "OffloadingConnectorWorker",
            "ScheduledRequest",
        ),
        "cpu": ("CPUOffloadingManager", "CPUOffloadingSpec", "SharedOffloadRegion"),
        "errors": ("ConfigError", "KVOffloadError"),
        "specs": ("make_spec",),
        "tiering": (
            "CPUPrimaryTierOffloadingManager",
            "SecondaryTierManager",
            "StoreOptions",
            "StoreTier",
            "TieringOffloadingManager",
        ),
        "tiering.spec": ("TieringOffloadingSpec",),
        "tiering.stores": ("BlockStore", "Checksummed", "FileSystemStore"),
    }
    _MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
