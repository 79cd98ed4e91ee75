# SPDX-License-Identifier: Apache-2.0
"""The shipped contract, run by the fake tier and by store tiers in memory and on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoffload.base import OffloadKey, OffloadPolicy
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.testing.tier_contract import SecondaryTierContract
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.options import build_tier
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, PAGE_BYTES, SlabFormat, key_in, stated_in


class TestFakeTierAtOnce(SecondaryTierContract):
    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        return FakeTier(primary_kv_view, at_once=True)

    def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
        assert isinstance(tier, FakeTier)
        for key in names:
            del tier.blocks[key]
        return True


class TestFakeTierByHand(TestFakeTierAtOnce):
    wants_whole_requests = True

    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        return FakeTier(primary_kv_view, policy=OffloadPolicy.REQUEST_LEVEL)

    def progress(self, tier: SecondaryTierManager) -> None:
        assert isinstance(tier, FakeTier)
        tier.finish()


class TestMemoryTier(SecondaryTierContract):
    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        return build_tier({"type": "memory"}, primary_kv_view)


class TestRequestLevelMemoryTier(SecondaryTierContract):
    wants_whole_requests = True

    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        return build_tier({"type": "memory", "offload_policy": "request_level", "threads": 1}, primary_kv_view)


class TestDiskTier(SecondaryTierContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        path = tempfile.mkdtemp(dir=self.root)
        return build_tier({"type": "disk", "path": path, "max_bytes": "1MiB"}, primary_kv_view, "namespace")

    def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
        """Overwrites the payloads, as another process of the namespace might."""
        count = 0
        for table in self.root.rglob("*.table"):
            content = table.read_bytes()
            block_bytes = stated_in(content).block_bytes
            num_slots = SlabFormat(table.parent.name, block_bytes).parse_header(content[:PAGE_BYTES])
            entries = content[SlabFormat.entries_at(num_slots) :]
            for slot in range(num_slots):
                if key_in(entries[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]) in names:
                    with table.with_suffix(".slab").open("r+b") as file:
                        file.seek(slot * block_bytes)
                        file.write(bytes(block_bytes))
                    count += 1
        assert count == len(names)
        return True


class TestFileSystemTier(SecondaryTierContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make_tier(self, primary_kv_view: memoryview) -> SecondaryTierManager:
        path = tempfile.mkdtemp(dir=self.root)
        return build_tier({"type": "fs", "path": path, "max_bytes": "1MiB"}, primary_kv_view, "namespace")

    def forget(self, tier: SecondaryTierManager, names: Sequence[OffloadKey]) -> bool:
        found = [path for path in self.root.rglob("*") if path.is_file() and path.stat().st_size >= 512]
        wanted = {key.hex() for key in names}
        matching = [path for path in found if any(name in str(path).replace("/", "") for name in wanted)]
        assert len(matching) == len(wanted), found
        for path in matching:
            path.unlink()
        return True
