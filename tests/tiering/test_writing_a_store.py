# SPDX-License-Identifier: Apache-2.0
"""The store of ``examples/own_tier.py`` passes the contract of ``docs/authors.md``, and makes a tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from examples.own_tier import FlatOptions
from tests.doc_commands import section

from kvoffload.testing import BlockStoreContract
from kvoffload.tiering.options import STORES, build_tier
from kvoffload.tiering.stores.base import BlockStore

PAGE = Path(__file__).parents[2] / "docs" / "authors.md"
NAMES: dict[str, Any] = {"__name__": "page"}
SNIPPETS = re.findall(r"```python\n(.*?)```", section(PAGE, "Writing a store of your own"), re.DOTALL)
exec(compile("\n".join(SNIPPETS), str(PAGE), "exec"), NAMES)


class TestThePagesStore(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        store: BlockStore = NAMES["TestFlatStore"]().make_store(directory)
        return store


def test_the_options_make_a_tier(tmp_path: Path) -> None:
    STORES.register("flat", FlatOptions)
    try:
        view = memoryview(bytearray(4 * 64)).cast("B", (4, 64))
        tier = build_tier({"type": "flat", "path": str(tmp_path), "threads": 1}, view, "model")
        tier.shutdown()
        assert STORES.get("flat").is_persistent
    finally:
        STORES.unregister("flat")
    assert [path.name for path in tmp_path.iterdir()] == [b"model".hex()]
