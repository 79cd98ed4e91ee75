# SPDX-License-Identifier: Apache-2.0
"""Build host memory with lower tiers, and the namespace in which persistent tiers keep blocks."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload.base import OffloadingManager
from kvoffload.config import EngineLayout, GroupKind, OffloadingConfig
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.cpu.spec import CPUOffloadingSpec
from kvoffload.errors import ConfigError, Problems
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.nodes import AgentTier, NodeAgent, Nodes
from kvoffload.tiering.nodes.tier import build_nodes_tier
from kvoffload.tiering.options import StoreOptions, build_tier, parse_tiers

logger = logging.getLogger(__name__)

CACHE_FORMAT_VERSION = 2
"""The version of a slot's format. Raise it whenever a slot's bytes change their meaning for the same layout."""

_READABLE = ("model", "dtype", "kv_dtype")
"""The entries of an engine's identity that appear in the readable part of a namespace."""


def persistent_namespace(layout: EngineLayout, block_size_factor: int) -> str:
    """Return a name that two engines share only if each can use the other's blocks.

    It covers everything except the key that changes the bytes of a block: the engine's own ``identity`` (model,
    revision, KV dtype, layout), the groups, the number of GPU blocks in a block, the number of its slices, and the
    format version. It does not cover the rank, because a slot contains the slices of all ranks. If ranks share pages,
    it does not cover the number of slices either. If an engine spans several nodes, each node stores its part of the
    block under its own name.
    """
    num_slices = layout.slice.num_slices
    facts: dict[str, Any] = {
        "format": CACHE_FORMAT_VERSION,
        "identity": {str(name): str(value) for name, value in layout.identity.items()},
        "groups": [
            [group.kind.value, group.block_tokens, num_slices * group.page_bytes, group.sliding_window_tokens]
            for group in layout.groups
        ],
        "hash_block_tokens": layout.hash_block_tokens,
        "block_size_factor": block_size_factor,
        "num_slices": 1 if layout.rank_free else num_slices,
    }
    if layout.num_nodes > 1:
        facts["part"] = [layout.node, layout.num_nodes]
    words = {name: str(layout.identity[name]) for name in _READABLE if name in layout.identity}
    if not words.get("model"):
        # Equal weights at other paths have the same name, so the model's class takes the place of the path.
        words["model"] = str(layout.identity.get("class", "")).partition(" ")[0].rpartition(":")[2]
    return name_namespace([word for word in words.values() if word], facts)


def name_namespace(words: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Return a name such as ``Qwen3-8B-bfloat16-1f0c...``.

    It starts with ``words``, for people who look into the store, and ends with a hash of all ``facts``, which JSON must
    be able to express. If a word is a path, only its last part is used. The name consists of at most 80 letters, digits
    and ``._-``, so that it can name a directory.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    readable = "-".join(word.rstrip("/").rsplit("/", 1)[-1] for word in words)
    head = re.sub(r"[^A-Za-z0-9._-]+", "_", readable).strip("._-")[:47].rstrip("._-")
    return f"{head}-{digest}" if head else digest


def check_hashes_are_stable(layout: EngineLayout, tier_type: str) -> None:
    """Raise ``ConfigError`` for a persistent tier if the engine's block hashes differ from process to process.

    Otherwise no later process could find the blocks, and they would fill the quota.
    """
    if layout.hashes_are_stable:
        return
    raise ConfigError(
        f"The secondary tier {tier_type!r} keeps blocks for other processes, but this engine's block hashes differ "
        "from process to process, so no other process would find them. Make them the same in every process."
    )


class TieringOffloadingSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` with ``config.secondary_tiers`` below host memory.

    The worker side is the same as with ``CPUOffloadingSpec``. The scheduler's process also maps the region, and its I/O
    threads move blocks between host memory and the tiers. The constructor checks all options. Until ``get_manager``,
    nothing is allocated, and no tier's directory or server is touched.
    """

    def __init__(self, config: OffloadingConfig, layout: EngineLayout) -> None:
        super().__init__(config, layout)
        self.tier_options = parse_tiers(config.secondary_tiers, self.block_bytes)
        for options in self.tier_options:
            if options.is_persistent:
                check_hashes_are_stable(layout, options.type)
        self.namespace = persistent_namespace(layout, self.block_size_factor)
        self.nodes = Nodes(layout.num_nodes) if layout.num_nodes > 1 and self.tier_options else None
        """In the scheduler's process, the connection to the agents of an engine that spans several nodes, or
        ``None``."""
        self._agent: NodeAgent | None = None
        if self.nodes is not None:
            for options in self.tier_options:
                if type(options).build is not StoreOptions.build:
                    raise ConfigError(
                        f"The secondary tier {options.label!r} does its I/O only on the scheduler's node, but this "
                        "engine spans several nodes; leave the tier out, or run one engine per node."
                    )

    @classmethod
    def check_config(cls, config: OffloadingConfig) -> None:
        problems = Problems()
        with problems:
            super().check_config(config)
        with problems:
            parse_tiers(config.secondary_tiers)
        problems.raise_found()

    def make_agent(self) -> NodeAgent | None:
        """Return this node's agent, for a worker's process.

        Returns ``None`` if the engine is on one node, or if another worker runs the agent. Opens the stores, and raises
        their exceptions. ``shutdown`` ends the agent.
        """
        if self.nodes is None or self.layout.rank % self.layout.ranks_per_node:
            return None
        tiers = list[AgentTier]()
        try:
            for options in self.tier_options:
                options.check(self.block_bytes)
                store = options.open_store(self.block_bytes, self.namespace)
                tiers.append(AgentTier(options.label, store, options))
            self._agent = NodeAgent(self.layout.node, self.region.create_kv_memoryview(), tiers)
        except BaseException:
            for tier in tiers:
                tier.store.close()
            raise
        return self._agent

    def shutdown(self) -> None:
        if self._agent is not None:
            self._agent.shutdown()
        super().shutdown()

    def _make_manager(self) -> OffloadingManager:
        config = self.config
        for options in self.tier_options:
            logger.info("kvoffload: %s", options.describe(self.num_blocks * self.block_bytes))
        primary = self._make_primary(CPUPrimaryTierOffloadingManager, self.region)
        tiers: list[SecondaryTierManager] = []
        try:
            for index, options in enumerate(self.tier_options):
                events, view = self.layout.events_enabled, primary.kv_view
                if self.nodes is None:
                    tiers.append(build_tier(options, view, self.namespace, self.lost, enable_events=events))
                else:
                    tiers.append(build_nodes_tier(options, view, self.nodes, index, self.lost, events))
        except BaseException:
            for tier in tiers:
                tier.shutdown()
            primary.shutdown()
            raise
        return TieringOffloadingManager(
            primary,
            tiers,
            max_wait_s=config.max_wait_s,
            promotion_share=config.promotion_share,
            block_worth=self._block_worth(),
            cascade=[options.cascade_above(self.num_blocks * self.block_bytes) for options in self.tier_options],
        )

    def _block_worth(self) -> BlockWorth | None:
        """Return the values for weighing loads against computing, or ``None`` with ``load_policy: always``."""
        if self.config.load_policy == "always":
            return None
        tokens = (
            self.block_size_factor * group.block_tokens if group.kind is GroupKind.FULL_ATTENTION else 0
            for group in self.layout.groups
        )
        return BlockWorth(
            self.block_bytes,
            tuple(tokens),
            self.config.prefill_tokens_per_s,
            tuple(options.expected_bytes_per_s for options in self.tier_options),
        )
