# SPDX-License-Identifier: Apache-2.0
"""GPU blocks that stores read, held in vLLM's block pool so that vLLM does not allocate them again.

vLLM's V2 model runner zeroes new blocks, copies blocks and moves recurrent states before it calls
``handle_preemptions``. A flush there comes too late for a store that still reads such a block. So the store holds its
blocks: each hold is one more reference in vLLM's pool, like the reference of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any


def are_written_early(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether vLLM writes new blocks of this KV cache before it flushes. It does so only if they must be zeroed:
    with recurrent states, or with KV of several precisions."""
    return bool(vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing)


class HeldBlocks:
    """A ``GPUBlockPool`` over vLLM's ``BlockPool``. Scheduler thread only."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._holds: Counter[int] = Counter()
        # vLLM's pool cannot empty its cache while any block has a reference, and vLLM asks no connector before that.
        pool.reset_prefix_cache = self._without_holds(pool.reset_prefix_cache)

    def __repr__(self) -> str:
        return f"HeldBlocks({sorted(self._holds)})"

    def hold(self, gpu_block_ids: Collection[int]) -> None:
        self._holds.update(gpu_block_ids)
        self._pool.touch(self._blocks(gpu_block_ids))

    def release(self, gpu_block_ids: Collection[int]) -> None:
        for block_id in gpu_block_ids:
            self._holds[block_id] -= 1
            if not self._holds[block_id]:
                del self._holds[block_id]
        # vLLM evicts blocks in the order in which they are freed, so free the tail before the head.
        self._pool.free_blocks(reversed(self._blocks(gpu_block_ids)))

    def blocks_without_request(self) -> list[int]:
        """Return the held blocks that vLLM could allocate if they were not held."""
        blocks = self._pool.blocks
        return [block_id for block_id, holds in self._holds.items() if blocks[block_id].ref_cnt == holds]

    def _blocks(self, gpu_block_ids: Collection[int]) -> list[Any]:
        return [self._pool.blocks[block_id] for block_id in gpu_block_ids]

    def _without_holds(self, reset_prefix_cache: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``reset_prefix_cache`` such that it runs as if no block were held. Afterwards, the blocks are held
        again, because the stores continue to read them."""

        def reset() -> bool:
            held = self._blocks(list(self._holds.elements()))
            self._pool.free_blocks(held)
            try:
                return reset_prefix_cache()
            finally:
                self._pool.touch(held)

        return reset

    def check_invariants(self) -> None:
        """For tests."""
        assert all(self._pool.blocks[block_id].ref_cnt >= holds > 0 for block_id, holds in self._holds.items())
