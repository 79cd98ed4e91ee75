# SPDX-License-Identifier: Apache-2.0
"""An engine of your own: the calls that an engine makes in each step, with a small tensor as the GPU.

``kvoffload.engines.reference`` is a complete engine, with a scheduler, batches and Hugging Face models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvoffload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    EngineLayout,
    EngineStep,
    GroupKind,
    GuardedManager,
    KVGroupLayout,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    ScheduledRequest,
    make_spec,
    parse_config,
)
from kvoffload.engines.reference.hashing import extend_block_hashes, root_hash

PAGE_BYTES = 4096
"""The bytes of a GPU block, which holds the KV of 16 tokens."""


@dataclass
class MyRequest:
    """The engine's own request. kvoffload needs only these attributes (``EngineRequest``)."""

    request_id: str
    tokens: list[int]
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        extend_block_hashes(self.block_hashes, root_hash(), self.tokens, 16)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    num_prompt_tokens = num_tokens


class MyEngine:
    def __init__(self, num_blocks: int) -> None:
        """Make both planes from one configuration and one layout."""
        self.pool = torch.zeros(num_blocks, PAGE_BYTES, dtype=torch.int8)
        layout = EngineLayout(
            groups=(KVGroupLayout(GroupKind.FULL_ATTENTION, block_tokens=16, page_bytes=PAGE_BYTES),),
            hash_block_tokens=16,
            instance_id="my-engine",
        )
        config = parse_config({"cpu_bytes_to_use": "1MiB"})
        self.spec = make_spec(config, layout)
        self.scheduler = OffloadingConnectorScheduler(GuardedManager(self.spec.get_manager()), layout, config)
        self.worker = OffloadingConnectorWorker()
        tensor = CanonicalKVCacheTensor(self.pool, PAGE_BYTES)
        self.worker.register_kv_caches(self.spec, CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]))

    def step(self, *scheduled: ScheduledRequest, compute: Callable[[], object] = lambda: None) -> Any:
        """Run one step. Call it also if nothing is scheduled, as long as ``scheduler.has_pending_work()``."""
        self.worker.start_step(self.scheduler.build_connector_meta(EngineStep(scheduled)))  # stores, flushes, loads
        compute()  # the forward pass
        self.worker.end_step()  # stores the blocks that it filled
        return self.scheduler.update_connector_output(self.worker.get_report())

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        self.spec.shutdown()


def main() -> None:
    engine = MyEngine(num_blocks=8)
    scheduler, pool = engine.scheduler, engine.pool

    # A prompt of 40 tokens is computed into GPU blocks 0, 1 and 2, and its two full blocks are stored.
    first = MyRequest("first", list(range(40)))
    scheduler.on_new_request(first)
    assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    scheduler.update_state_after_alloc(first, ([0, 1, 2],), 0)
    prompt = ScheduledRequest("first", ([0, 1, 2],), 0, num_scheduled_tokens=40, block_table_is_new=True)
    engine.step(prompt, compute=lambda: pool[0:3].copy_(torch.tensor([[11], [22], [33]], dtype=torch.int8)))
    scheduler.request_finished(first)  # its GPU blocks may be used again at once
    while scheduler.has_pending_work():
        engine.step()

    # Other requests overwrite GPU memory. A request with the same prefix finds it in host memory, and waits.
    pool.zero_()
    second = MyRequest("second", [*range(32), 99, 98, 97])
    scheduler.on_new_request(second)
    assert scheduler.get_num_new_matched_tokens(second, 0) == (32, True)
    scheduler.update_state_after_alloc(second, ([5, 6],), 32)
    outcome = engine.step()
    while "second" not in outcome.loaded_request_ids:
        assert "second" not in outcome.failed_loads  # otherwise, compute these tokens
        outcome = engine.step()
    assert pool[5].eq(11).all()
    assert pool[6].eq(22).all()
    scheduler.request_finished(second)
    engine.close()
    print("32 of 35 tokens came back from host memory.")


if __name__ == "__main__":
    main()
