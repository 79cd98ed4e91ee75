# SPDX-License-Identifier: Apache-2.0
"""A tier of your own: one file per block in one directory. To run it: ``python examples/own_tier.py DIRECTORY``.

A store has five methods, which may block. kvoffload calls them on I/O threads, and adds lookups, time limits, a
backlog, circuit breakers and checksums. ``FlatOptions`` makes the store available as ``{"type": "flat", "path": ...}``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvoffload import (
    BlockStore,
    Checksummed,
    CPUPrimaryTierOffloadingManager,
    OffloadKey,
    ReqContext,
    SharedOffloadRegion,
    StoreOptions,
    StoreTier,
    TieringOffloadingManager,
    make_offload_key,
)


class FlatStore(BlockStore):
    """One file per block in one directory."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        for key, block in zip(keys, blocks, strict=True):
            # Write under a temporary name that no other thread uses, so that readers see either the whole block or
            # nothing.
            temporary = self.root / f"{os.urandom(8).hex()}.tmp"
            temporary.write_bytes(block)
            temporary.rename(self._path(key))
        return [True] * len(keys)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return [self._read(key, block) for key, block in zip(keys, blocks, strict=True)]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def _read(self, key: OffloadKey, block: memoryview) -> bool:
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return False  # a miss is a value
        if len(data) != block.nbytes:
            return False
        block[:] = data
        return True

    def _path(self, key: OffloadKey) -> Path:
        return self.root / f"{len(key)}-{key.hex()[:200]}"


class FlatOptions(StoreOptions, frozen=True, kw_only=True):
    """The options of the tier. Register this class by the entry point ``kvoffload.stores`` of your package."""

    path: str

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        # The namespace covers everything besides the key that changes a block's bytes, so each has a directory.
        directory = os.path.join(self.path, namespace.encode().hex()[:200] or "default")
        return Checksummed(FlatStore(directory), namespace=namespace)


def main(directory: str) -> None:
    """Store 16 blocks in host memory that has room for 8, and find the first ones again in the tier."""
    region = SharedOffloadRegion.anonymous(num_blocks=8, block_bytes=4096)
    primary = CPUPrimaryTierOffloadingManager(8, region, cache_policy="lru")
    slots = np.asarray(primary.kv_view)
    tier = StoreTier(primary.kv_view, "flat", FlatOptions(type="flat", path=directory).open_store(4096, "model"))
    manager = TieringOffloadingManager(primary, [tier], max_wait_s=60.0)
    prompts = [[make_offload_key(bytes([prompt, block]) * 16, 0) for block in range(4)] for prompt in range(4)]
    for number, keys in enumerate(prompts):
        request = ReqContext(f"store {number}")
        manager.on_new_request(request)
        output = manager.prepare_store(keys, request)
        assert output is not None
        slots[output.store_spec.block_ids] = number + 1  # an engine copies KV from the GPU here
        manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
        while manager.has_pending_work():  # the tier writes on its own threads
            manager.on_schedule_end()
            time.sleep(0.001)
    request = ReqContext("load")
    manager.on_new_request(request)
    while None in (answers := manager.lookup_prefix(prompts[0], request)):  # not yet: ask again in the next step
        manager.on_schedule_end()
        time.sleep(0.001)
    assert answers == [True] * 4, answers
    spec = manager.prepare_load(prompts[0], request)
    assert (slots[spec.block_ids] == 1).all()  # an engine copies them to the GPU here
    manager.complete_load(prompts[0], request)
    manager.on_request_finished(request)
    print("The tier kept 16 blocks, and 4 of them came back.")
    manager.shutdown()
    region.close()


if __name__ == "__main__":
    main(sys.argv[1])
