# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector: a running request keeps the head of its prefix in host memory."""

from __future__ import annotations

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.steps import BLOCK, PAGE_BYTES, Steps

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("eviction_policy", ["lru", "arc", "density"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_other_requests_drive_out_is_the_tail(llama: SmallModel, asynchronous: bool, eviction_policy: str) -> None:
    steps = Steps(llama.path, asynchronous, 32, cpu_bytes_to_use=6 * PAGE_BYTES, eviction_policy=eviction_policy)
    request = steps.add("r", list(range(10, 10 + 2 * BLOCK)), 30)
    while len(steps.stores()) < 3:  # blocks 0 and 1 together, then 2, then 3
        steps.step()
    first_tokens = list(request.all_token_ids)[: 4 * BLOCK]
    other = steps.add("other", list(range(100, 100 + 2 * BLOCK)), 2 * BLOCK + 1)
    while not other.is_finished():
        steps.step()
        steps.scheduler.connector.take_events()
    # Blocks 0 to 3 are left from the head on, and not all of them have room.
    assert 1 <= steps.hit_blocks(first_tokens) <= 3
    steps.drain()
    steps.scheduler.connector.shutdown()
