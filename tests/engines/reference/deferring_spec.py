# SPDX-License-Identifier: Apache-2.0
"""A spec from outside the package, named in the configuration: host memory whose answers can be deferred."""

from __future__ import annotations

from kvoffload.base import OffloadingManager, OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.cpu.spec import CPUOffloadingSpec

__all__ = ["DeferringSpec"]


class DeferringManager(CPUOffloadingManager):
    """Answers "not yet" to the requests in ``put_off``."""

    put_off: frozenset[str] = frozenset()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None if req_context.req_id in self.put_off else super().lookup(key, req_context)

    def lookup_prefix(self, keys, req_context):  # type: ignore[no-untyped-def]
        return [None] * len(keys) if req_context.req_id in self.put_off else super().lookup_prefix(keys, req_context)


class DeferringSpec(CPUOffloadingSpec):
    def _make_manager(self) -> OffloadingManager:
        return DeferringManager(self.num_blocks)
