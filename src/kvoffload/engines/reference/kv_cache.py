# SPDX-License-Identifier: Apache-2.0
"""The KV cache on the GPU: the requests' block tables over the pools of all groups, and prefix hits."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvoffload.config import GroupKind, KVGroupLayout
from kvoffload.connector import NO_BLOCK, BoundaryState
from kvoffload.device_pool import DevicePool
from kvoffload.engines.reference.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix in the GPU's cache: its length, and its block table by group."""

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


class KVCache:
    """The GPU blocks of all requests. Every group has its own pool of ``num_blocks`` blocks. All groups have the same
    ``block_tokens``.

    The table of a sliding-window group contains ``NO_BLOCK`` for blocks before the window that a *hit* did not need.
    Blocks that leave the window while a request runs are kept until it ends, which is simpler and costs only memory.

    For a step's tokens, a group of states uses one GPU block for the state at the last full block's end, and another
    one for the state after the last token if that is a different position. Its table contains ``NO_BLOCK`` for all
    blocks before them.
    """

    def __init__(self, groups: tuple[KVGroupLayout, ...], num_blocks: int, prefix_caching: bool = True) -> None:
        self._groups = groups
        self._block_tokens = groups[0].block_tokens
        self._pools = tuple(DevicePool(num_blocks) for _ in groups)
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self._named: dict[str, int] = {}
        """Number of leading blocks of each request that other requests can find, or that no request may find."""
        self._prefix_caching = prefix_caching

    def __repr__(self) -> str:
        return f"KVCache({len(self._tables)} tables, {list(self._pools)})"

    def table(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Return the request's GPU blocks by group, in order."""
        return tuple(tuple(table) for table in self._tables[request.request_id])

    def find_prefix(self, request: Request) -> PrefixHit:
        """Return the longest prefix on the GPU, in whole blocks. It excludes the last token, which must be computed."""
        hashes = request.block_hashes[: (request.num_tokens - 1) // self._block_tokens]
        for pool, group in zip(self._pools, self._groups, strict=True):
            if group.kind is GroupKind.FULL_ATTENTION:
                hashes = hashes[: len(pool.find_prefix(hashes))]
        while hashes:
            tables = [self._window(group, hashes) for group in range(len(self._groups))]
            if all(table is not None for table in tables):
                return PrefixHit(
                    len(hashes) * self._block_tokens, tuple(table for table in tables if table is not None)
                )
            hashes = hashes[:-1]
        return PrefixHit(0, tuple(() for _ in self._groups))

    def _window(self, group: int, hashes: list[bytes]) -> tuple[int, ...] | None:
        """Return the table of one group for this prefix, or ``None`` if a block that a continuation needs is
        missing."""
        first = self._first_needed_block(group, len(hashes) * self._block_tokens)
        blocks = self._pools[group].find(hashes[first:])
        return None if blocks is None else (*[NO_BLOCK] * first, *blocks)

    def _first_needed_block(self, group: int, num_tokens: int) -> int:
        """Return the block of the first token to which the token after ``num_tokens`` attends. For states, it is the
        last full block."""
        if self._groups[group].kind is GroupKind.SINGLE_STATE:
            return max(0, num_tokens // self._block_tokens - 1)
        window = self._groups[group].sliding_window_tokens
        return 0 if window is None else max(0, num_tokens - window + 1) // self._block_tokens

    def admit(self, request: Request, hit: PrefixHit, loaded_tokens: int, num_tokens: int) -> bool:
        """Create the request's table for ``num_tokens``: the hit's blocks, followed by new ones.

        A load will fill the new blocks up to ``loaded_tokens``. Returns ``False`` and changes nothing if a pool has too
        few free blocks.
        """
        plans = []
        for group, (pool, own) in enumerate(zip(self._pools, hit.block_ids, strict=True)):
            holes = self._holes(group, len(own), num_tokens)
            if loaded_tokens > hit.num_tokens:
                holes = max(holes, self._first_needed_block(group, loaded_tokens) - len(own))
            fresh = -(-num_tokens // self._block_tokens) - len(own) - holes
            shared = [block for block in own if block != NO_BLOCK]
            if fresh > pool.room_beside(shared):
                return False
            plans.append((shared, own, holes, fresh))
        tables = []
        for pool, (shared, own, holes, fresh) in zip(self._pools, plans, strict=True):
            pool.share(shared)
            tables.append([*own, *[NO_BLOCK] * holes, *pool.take(fresh)])
        self._tables[request.request_id] = tuple(tables)
        self._named[request.request_id] = hit.num_tokens // self._block_tokens
        return True

    def grow(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Add blocks until the request has room for ``num_tokens``, and return the new blocks by group.

        Returns ``None`` and changes nothing if a pool has too few free blocks.
        """
        tables = self._tables[request.request_id]
        held = len(tables[0])
        count = max(0, -(-num_tokens // self._block_tokens) - held)
        holes = [self._holes(group, held, num_tokens) for group in range(len(self._groups))]
        if any(pool.num_free < count - skipped for pool, skipped in zip(self._pools, holes, strict=True)):
            return None
        fresh = tuple(
            [*[NO_BLOCK] * skipped, *pool.take(count - skipped)]
            for pool, skipped in zip(self._pools, holes, strict=True)
        )
        for table, blocks in zip(tables, fresh, strict=True):
            table += blocks
        return fresh

    def _holes(self, group: int, held: int, num_tokens: int) -> int:
        """Return the number of blocks that a group of states skips when a table of ``held`` blocks grows to
        ``num_tokens``."""
        if self._groups[group].kind is not GroupKind.SINGLE_STATE:
            return 0
        return max(0, self._first_needed_block(group, num_tokens) - held)

    def boundary_states(self, request: Request, num_tokens: int) -> tuple[BoundaryState, ...]:
        """Return the states that a step keeps if it takes the request from its computed tokens to ``num_tokens``."""
        full = num_tokens // self._block_tokens
        if full * self._block_tokens <= request.num_computed_tokens:
            return ()
        tables = self._tables[request.request_id]
        return tuple(
            BoundaryState(request.request_id, group, table[full - 1], full * self._block_tokens)
            for group, table in enumerate(tables)
            if self._groups[group].kind is GroupKind.SINGLE_STATE
        )

    def name_computed(self, request: Request) -> None:
        """Let other requests find the full blocks of computed tokens. For states, this is the state at the end of the
        last full block."""
        first, stop = self._named[request.request_id], request.num_computed_tokens // self._block_tokens
        if not self._prefix_caching or stop <= first:
            return
        for group, (pool, table) in enumerate(zip(self._pools, self._tables[request.request_id], strict=True)):
            has_states = self._groups[group].kind is GroupKind.SINGLE_STATE
            begin = stop - 1 if has_states else first
            pool.name(table[begin:stop], request.block_hashes[begin:stop])
        self._named[request.request_id] = stop

    def release(self, request: Request) -> None:
        """Release the request's blocks. Their content can still be found."""
        tables = self._tables.pop(request.request_id)
        del self._named[request.request_id]
        for pool, table in zip(self._pools, tables, strict=True):
            pool.release([block for block in table if block != NO_BLOCK])

    def forget_all(self) -> None:
        """Forget all cached content. Other requests will also not find the tokens that current requests compute after
        it."""
        self._named = dict.fromkeys(self._named, sys.maxsize)
        for pool in self._pools:
            pool.forget_all()

    def check_invariants(self, request_ids: set[str] | None = None) -> None:
        """Check that reference counts equal the tables, and that exactly ``request_ids`` have tables. For tests."""
        assert request_ids is None or request_ids == set(self._tables) == set(self._named)
        for group, pool in enumerate(self._pools):
            pool.check_invariants(
                [block for block in tables[group] if block != NO_BLOCK] for tables in self._tables.values()
            )
        for request_id, tables in self._tables.items():
            assert len({len(table) for table in tables}) == 1, f"{request_id}: groups disagree about the length"
