# SPDX-License-Identifier: Apache-2.0
"""A tier over the stores of several nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvoffload.base import OffloadPolicy
from kvoffload.lost_blocks import NO_LOSSES, LostBlocks
from kvoffload.tiering.nodes.nodes import Nodes
from kvoffload.tiering.nodes.store import NodesLosses, NodesStore
from kvoffload.tiering.tier import StoreTier, TierLimits

if TYPE_CHECKING:
    from kvoffload.tiering.options import StoreOptions

_DRAIN_S = 0.2


class NodesTier(StoreTier):
    """A ``StoreTier`` over tier ``index`` of ``nodes``, which it closes. It accepts the ``options`` of ``StoreTier``.

    Calls of the store end with steps of the engine, and the engine makes no steps while its scheduler's thread waits.
    So pass ``limits`` with a short ``drain_timeout_s``. Slots stay reserved until the agents have finished with them.
    """

    def __init__(
        self,
        primary_kv_view: memoryview,
        tier_type: str,
        nodes: Nodes,
        index: int,
        limits: TierLimits | None = None,
        lost: LostBlocks = NO_LOSSES,
        **options: Any,
    ) -> None:
        store = NodesStore(nodes, index, primary_kv_view)
        lost = lost if lost is NO_LOSSES else NodesLosses(lost, store)
        super().__init__(primary_kv_view, tier_type, store, limits, lost=lost, **options)
        self._nodes = nodes

    def shutdown(self) -> None:
        self._nodes.close()
        super().shutdown()


def build_nodes_tier(
    options: StoreOptions, view: memoryview, nodes: Nodes, index: int, lost: LostBlocks, enable_events: bool
) -> NodesTier:
    """Build tier ``index`` of an engine that spans ``nodes``, like ``StoreOptions.build``.

    This opens no store, because the agents open them.
    """
    tier = NodesTier(
        view,
        options.label,
        nodes,
        index,
        TierLimits(
            timeout_s=options.timeout_s,
            drain_timeout_s=_DRAIN_S,
            max_backlog_blocks=options.max_backlog_blocks,
            max_index_blocks=options.max_index_blocks,
        ),
        lost,
        offload_policy=OffloadPolicy(options.offload_policy),
        exclusive=options.exclusive and options.locality != "REMOTE",
        enable_events=enable_events,
    )
    tier.medium, tier.locality = options.medium, options.locality
    return tier
