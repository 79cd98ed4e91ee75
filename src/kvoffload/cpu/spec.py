# SPDX-License-Identifier: Apache-2.0
"""Build the scheduler's and the workers' side of offloading to host memory from one configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvoffload.base import CanonicalKVCaches, OffloadingHandler, OffloadingManager, OffloadingSpec
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.errors import ConfigError, LayoutError, Problems
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.units import format_bytes

_Primary = TypeVar("_Primary", bound=CPUOffloadingManager)


class CPUOffloadingSpec(OffloadingSpec):
    """Offloading to host memory without lower tiers.

    If scheduler and worker are one process (``layout.num_processes == 1``), one spec serves both and its region is
    anonymous. Otherwise each process makes a spec, and all of them map a shared region named by ``layout.instance_id``.
    """

    def __init__(self, config: OffloadingConfig, layout: EngineLayout) -> None:
        self.check_config(config)
        self.config = config
        self.layout = layout
        self.lost = LostBlocks() if config.record_trace or layout.traces_enabled else NO_LOSSES
        """The record of lost blocks that its managers and tiers write."""
        self.block_size_factor = layout.block_size_factor(config)
        self.block_bytes = layout.block_bytes(self.block_size_factor)
        self.num_blocks = layout.num_slots(config)
        if self.num_blocks < 1:
            raise ConfigError(
                f"cpu_bytes_to_use is {format_bytes(config.cpu_bytes)}, but one block alone takes "
                f"{format_bytes(self.block_bytes)}; raise it to hold a few thousand blocks."
            )
        self._region: SharedOffloadRegion | None = None
        self._manager: OffloadingManager | None = None
        self._handlers: dict[tuple[str, str], OffloadingHandler] = {}

    @classmethod
    def check_config(cls, config: OffloadingConfig) -> None:
        problems = Problems()
        with problems:
            POLICIES.get(config.eviction_policy)
        if config.secondary_tiers and cls is CPUOffloadingSpec:
            problems.add(
                "CPUOffloadingSpec keeps blocks in host memory only; to use secondary_tiers, leave out spec_name."
            )
        problems.raise_found()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_blocks} blocks of {format_bytes(self.block_bytes)})"

    @property
    def region(self) -> SharedOffloadRegion:
        """The region in host memory. Each process maps it on first use.

        Raises ``LayoutError`` unless all processes of the engine will map the same memory.
        """
        if self._region is None:
            _check_processes(self.layout)
            shape = self.num_blocks, self.block_bytes
            if self.layout.num_processes == 1:
                self._region = SharedOffloadRegion.anonymous(*shape)
            else:
                name = self.layout.instance_id
                if self.layout.num_nodes > 1:  # each node has a region, even if two nodes are one machine
                    name += f" node {self.layout.node}"
                self._region = SharedOffloadRegion.shared(name, *shape, num_processes=self.layout.num_processes)
        return self._region

    def wait_for_ranks(self, timeout_s: float) -> int | None:
        """Wait until all processes have mapped the region, if this process has mapped it.

        Return ``None`` if they have, and otherwise how many have.
        """
        return None if self._region is None else self._region.wait_for_all(timeout_s)

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        from kvoffload.cpu.gpu_worker import make_handlers

        if len(kv_caches.group_data_refs) != len(self.layout.groups):
            raise LayoutError(
                f"group_data_refs must have one entry for each of the layout's {len(self.layout.groups)} KV groups, "
                f"but has {len(kv_caches.group_data_refs)}."
            )
        self._handlers = make_handlers(
            kv_caches,
            self.region.create_kv_memoryview(),
            self.block_size_factor,
            self.layout.slice,
        )
        return self._handlers

    def shutdown(self) -> None:
        for handler in self._handlers.values():
            handler.shutdown()
        if self._manager is not None:
            self._manager.shutdown()
        if self._region is not None:
            self._region.close()

    def _make_manager(self) -> OffloadingManager:
        """Return a new manager.

        The scheduler's side reads no bytes, but maps the shared region anyway, so that a region too large for the host
        is rejected before any worker starts.
        """
        _ = self.region
        return self._make_primary(CPUOffloadingManager)

    def _make_primary(self, make: Callable[..., _Primary], *args: object) -> _Primary:
        """Return a manager of ``num_blocks`` slots, made with ``args`` and the configured options.

        It also makes the records of all slots. An engine freezes all objects that exist once it has started, so the
        garbage collector never visits the records.
        """
        manager = make(
            self.num_blocks,
            *args,
            cache_policy=self.config.eviction_policy,
            enable_events=self.layout.events_enabled,
            store_threshold=self.config.store_threshold,
            max_tracker_size=self.config.max_tracker_size,
            max_wait_s=self.config.max_wait_s,
            lost=self.lost,
        )
        manager.slots.make_records()
        return manager


def _check_processes(layout: EngineLayout) -> None:
    """Raise ``LayoutError`` unless all processes of the engine will map the same memory."""
    here = layout.ranks_per_node
    is_one = layout.num_ranks == layout.num_processes == 1
    is_without_scheduler = here < layout.num_ranks and layout.num_processes == here
    if not is_one and not is_without_scheduler and layout.num_processes != 1 + here:
        raise LayoutError(
            f"num_processes must be {1 + here}, one for the scheduler and one for each of {here} ranks, not "
            f"{layout.num_processes}; otherwise the processes do not share one region of host memory."
        )
