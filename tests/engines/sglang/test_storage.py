# SPDX-License-Identifier: Apache-2.0
"""Test that pages of SGLang's host pools are written and read back, in every layout, with any store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.sglang.pools import TOKENS, HostPool, hashes
from tests.redis_server import PATIENT_OPTIONS, RedisServer

from kvoffload.engines.sglang.options import parse_options
from kvoffload.engines.sglang.storage import PoolStorage, page_facts, pages_of
from kvoffload.errors import ConfigError

MODEL = {"name": "small"}
RANKS = {"tp_rank": 0, "tp_size": 1, "is_mla_model": False}


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., PoolStorage]]:
    made: list[PoolStorage] = []

    def make(pool: Any, *tiers: dict[str, Any], model: Any = MODEL, **more: Any) -> PoolStorage:
        given = list(tiers) or [{"type": "disk", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"}]
        options = parse_options({"kvoffload": {"secondary_tiers": given, "max_wait_s": 120}})
        made.append(PoolStorage("kv", pool, torch.arange(TOKENS), options, model=model, ranks=RANKS, **more))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def move(call: Callable[..., list[bool]], keys: list[str], pool: HostPool, *pages: int) -> list[bool]:
    return call(keys, lambda: pages_of(pool, pool.indices(*pages), len(keys)))


@pytest.mark.parametrize("parts", [1, 2], ids=["latent", "keys and values"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_to_other_places(layout: str, parts: int, build) -> None:
    pool = HostPool(12, layout, parts)
    storage = build(pool)
    keys = hashes(*range(4))
    written = [pool.fill(page, key) for page, key in zip((9, 2, 5, 0), keys, strict=True)]
    assert storage.present(keys) == []
    assert move(storage.store, keys, pool, 9, 2, 5, 0) == [True] * 4
    pool.kv_buffer.zero_()
    assert storage.present([*keys, *hashes(77)]) == [True] * 4
    assert move(storage.load, keys, pool, 3, 4, 11, 7) == [True] * 4
    for page, content in zip((3, 4, 11, 7), written, strict=True):
        assert torch.equal(pool.page(page), content)
    assert not pool.page(0).any() and not pool.page(10).any()


def test_tiers_of_all_kinds_by_order(tmp_path: Path, build) -> None:
    server = RedisServer(tmp_path)
    try:
        pool, keys = HostPool(8), hashes(*range(4))
        redis = {"type": "redis", "url": server.url, **PATIENT_OPTIONS}
        disk = {"type": "disk", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"}
        storage = build(pool, disk, redis)
        written = [pool.fill(page, key) for page, key in enumerate(keys)]
        assert move(storage.store, keys, pool, 0, 1, 2, 3) == [True] * 4
        for tier in (disk, redis):  # each has all of them
            other = HostPool(8)
            alone = build(other, tier)
            assert alone.namespace == storage.namespace
            assert alone.present(keys) == [True] * 4
            assert move(alone.load, keys, other, 4, 5, 6, 7) == [True] * 4
            assert [torch.equal(other.page(4 + page), content) for page, content in enumerate(written)] == [True] * 4
            alone.close()
    finally:
        server.stop()


def test_another_model_or_layout_finds_nothing(build) -> None:
    pool, keys = HostPool(4), hashes(1)
    storage = build(pool)
    assert move(storage.store, keys, pool, 0) == [True]
    for other, model in (
        (HostPool(4), {"name": "large"}),
        (HostPool(4, "layer_first"), MODEL),
        (HostPool(4, layers=2), MODEL),
    ):
        assert build(other, model=model).present(keys) == []
    assert build(HostPool(9)).present(keys) == [True]


def test_under_another_salt_nothing_older_is_found(build) -> None:
    pool, keys = HostPool(4), hashes(1)
    salts = [b""]
    storage = build(pool, salt=lambda: salts[-1])
    assert move(storage.store, keys, pool, 0) == [True]
    salts.append(b"new")
    assert storage.present(keys) == []
    pool.fill(1, "new")
    assert move(storage.store, keys, pool, 1) == [True]
    assert move(storage.load, keys, pool, 2) == [True]
    assert torch.equal(pool.page(2), pool.page(1))


def test_calls_that_make_no_sense_are_misses(build) -> None:
    pool, keys = HostPool(4), hashes(1, 2)
    storage = build(pool)
    assert move(storage.store, keys, pool, 0) == [False, False]  # one page for two keys
    assert storage.store(keys[:1], lambda: [[(0, 8)]]) == [False]  # of another size
    assert storage.load(keys[:1], lambda: 1 // 0) == [False]
    assert storage.present([None]) == []  # type: ignore[list-item]
    for _ in range(100):  # of staging memory nothing is lost
        assert storage.store(keys, lambda: pages_of(pool, pool.indices(0), 1)) == [False, False]
    assert move(storage.store, keys, pool, 0, 1) == [True, True]


def test_a_pool_without_addresses_is_refused_with_what_to_do(build) -> None:
    class NoPages(HostPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
            raise ValueError("Unsupported layout: page_head")

    with pytest.raises(ConfigError, match="--hicache-mem-layout page_first"):
        build(NoPages(4))


def test_a_pool_that_lacks_what_every_pool_has_is_refused(build) -> None:
    pool = HostPool(4)
    del pool.dtype
    with pytest.raises(ConfigError, match="it has no dtype"):
        build(pool)


def test_what_a_pool_says_about_its_pages_counts_and_what_is_free_does_not() -> None:
    pool, facts = HostPool(4), page_facts(HostPool(9))
    assert page_facts(pool) == facts
    pool.of_a_newer_sglang = ("interleaved", 2)  # type: ignore[attr-defined]
    assert page_facts(pool) != facts
