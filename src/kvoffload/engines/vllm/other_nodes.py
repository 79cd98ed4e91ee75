# SPDX-License-Identifier: Apache-2.0
"""Compare the weights of an engine's nodes. Importing this module does not load vLLM.

The scheduler names the blocks of all nodes by the weights on its own node. But each node loads its own files, vLLM does
not compare them, and all KV depends on the weights of all nodes. So the first worker of each other node sends the name
of its weights, and the scheduler uses a name only if all nodes have it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.vllm.weights import name_of_current_files
from kvoffload.engines.weights import Known, in_background, outliving_tier

logger = logging.getLogger(__name__)


def num_other_nodes(vllm_config: Any, config: OffloadingConfig) -> int:
    """Return the number of nodes besides the scheduler's, or 0 if blocks need no name of the weights."""
    need_name = outliving_tier(config) is not None and config.weights_version is None
    return int(vllm_config.parallel_config.nnodes_within_dp) - 1 if need_name else 0


def weights_on_node(vllm_config: Any, config: OffloadingConfig, rank: int) -> Known:
    """Return the name of the weights that the worker with this rank must report: the first of each other node."""
    parallel = vllm_config.parallel_config
    per_node = parallel.world_size // parallel.nnodes_within_dp
    if not num_other_nodes(vllm_config, config) or rank < per_node or rank % per_node:
        return lambda: None
    return in_background(lambda: name_of_current_files(vllm_config), 0)


class EqualWeights:
    """The name of the weights of all nodes, as a ``Known``. Scheduler thread only."""

    def __init__(self, own_name: Known, num_others: int) -> None:
        """``own_name``: the weights on the scheduler's node."""
        self._own_name = own_name
        self._num_others = num_others
        self._others: list[str] = []

    def __call__(self) -> str | None:
        own = self._own_name() if len(self._others) >= self._num_others else None
        if own is not None and any(other != own for other in self._others):
            logger.warning(
                "The nodes of this engine have different weights. So this engine shares no blocks with other engines, "
                "and later engines will not find its blocks. Start all nodes with copies of the same files."
            )
            self._own_name = lambda: None
            return None
        return own

    def add(self, others: Iterable[str]) -> None:
        """Workers of other nodes report the names of their weights."""
        self._others += others
