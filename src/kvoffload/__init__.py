# SPDX-License-Identifier: Apache-2.0
"""kvoffload: KV-cache offloading for LLM servers.

The names that users, engine authors and authors of a store import. A module is loaded when one of its names is first
used, so that ``import kvoffload`` costs next to nothing. None of them loads torch or an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvoffload.base import CanonicalKVCacheRef as CanonicalKVCacheRef
    from kvoffload.base import CanonicalKVCaches as CanonicalKVCaches
    from kvoffload.base import CanonicalKVCacheTensor as CanonicalKVCacheTensor
    from kvoffload.base import OffloadingManager as OffloadingManager
    from kvoffload.base import OffloadingSpec as OffloadingSpec
    from kvoffload.base import OffloadKey as OffloadKey
    from kvoffload.base import OffloadPolicy as OffloadPolicy
    from kvoffload.base import ReqContext as ReqContext
    from kvoffload.base import make_offload_key as make_offload_key
    from kvoffload.config import EngineLayout as EngineLayout
    from kvoffload.config import GroupKind as GroupKind
    from kvoffload.config import KVGroupLayout as KVGroupLayout
    from kvoffload.config import OffloadingConfig as OffloadingConfig
    from kvoffload.config import parse_config as parse_config
    from kvoffload.connector import EngineStep as EngineStep
    from kvoffload.connector import GuardedManager as GuardedManager
    from kvoffload.connector import OffloadingConnectorScheduler as OffloadingConnectorScheduler
    from kvoffload.connector import OffloadingConnectorWorker as OffloadingConnectorWorker
    from kvoffload.connector import ScheduledRequest as ScheduledRequest
    from kvoffload.cpu import CPUOffloadingManager as CPUOffloadingManager
    from kvoffload.cpu import CPUOffloadingSpec as CPUOffloadingSpec
    from kvoffload.cpu import SharedOffloadRegion as SharedOffloadRegion
    from kvoffload.errors import ConfigError as ConfigError
    from kvoffload.errors import KVOffloadError as KVOffloadError
    from kvoffload.specs import make_spec as make_spec
    from kvoffload.tiering import CPUPrimaryTierOffloadingManager as CPUPrimaryTierOffloadingManager
    from kvoffload.tiering import SecondaryTierManager as SecondaryTierManager
    from kvoffload.tiering import StoreOptions as StoreOptions
    from kvoffload.tiering import StoreTier as StoreTier
    from kvoffload.tiering import TieringOffloadingManager as TieringOffloadingManager
    from kvoffload.tiering.spec import TieringOffloadingSpec as TieringOffloadingSpec
    from kvoffload.tiering.stores import BlockStore as BlockStore
    from kvoffload.tiering.stores import Checksummed as Checksummed
    from kvoffload.tiering.stores import FileSystemStore as FileSystemStore
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
    __all__ = [*_MODULE_OF, "__version__"]

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
