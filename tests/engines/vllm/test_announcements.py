# SPDX-License-Identifier: Apache-2.0
"""Test that each block is announced once per medium and removed with its last copy, and how routers interpret these
events."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.vllm.configs import know_plain_events
from tests.engines.vllm.routers import Dynamo, LlmD
from tests.sizes import by_size
from tests.tiering.rig import Rig, content

from kvoffload.base import OffloadingEvent, OffloadKey, ReqContext, get_offload_block_hash, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout
from kvoffload.engines.vllm.announcements import Place, places_of
from kvoffload.engines.vllm.events import EventTranslator
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering.options import parse_tiers
from kvoffload.tiering.presence import PresenceIndex

pytestmark = pytest.mark.vllm(elsewhere=True)

BLOCK_TOKENS = 4
LAYOUT = EngineLayout((KVGroupLayout(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, 64),), BLOCK_TOKENS, "engine")
PLACES = {
    "CPU": Place("CPU"),
    "disk": Place("STORAGE", "LOCAL"),
    "redis": Place("STORAGE", "REMOTE"),
    "memory": Place("CPU", "LOCAL"),
}


@pytest.fixture(autouse=True)
def _plain_events(monkeypatch: pytest.MonkeyPatch) -> None:
    know_plain_events(monkeypatch)


def request(name: str, path: Sequence[int]) -> Any:
    """Return a request whose n-th GPU block has the tokens ``path[n]``."""
    return SimpleNamespace(
        request_id=name,
        block_hashes=[bytes(path[: n + 1]) for n in range(len(path))],
        all_token_ids=[token for each in path for token in [each] * BLOCK_TOKENS],
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        lora_request=None,
        session_id=None,
    )


def key(*path: int) -> OffloadKey:
    return make_offload_key(bytes(path), 0)


def event(tier: str, *keys: OffloadKey, removed: bool = False) -> OffloadingEvent:
    return OffloadingEvent(list(keys), tier, removed)


def named(events: Iterable[Any]) -> list[tuple[str, str, list[bytes]]]:
    return [(type(each).__name__, each.medium, each.block_hashes) for each in events]


def test_places_say_where_each_store_is() -> None:
    tiers = [
        {"type": "disk", "path": "/a", "max_bytes": "1GiB"},
        {"type": "fs", "path": "/b", "max_bytes": "1GiB", "name": "cold"},
        {"type": "memory", "max_bytes": "1MiB"},
        {"type": "redis", "url": "redis://localhost"},
    ]
    places = places_of(parse_tiers(tiers))
    assert places == {
        "CPU": ("CPU", None),
        "disk": ("STORAGE", "LOCAL"),
        "cold": ("STORAGE", "LOCAL"),
        "memory": ("CPU", "LOCAL"),
        "redis": ("STORAGE", "REMOTE"),
    }


def test_a_tier_of_others_counts_as_storage() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    stored, removed = translator.translate([event("tape", key(1)), event("tape", key(1), removed=True)])
    for each in (stored, removed):
        assert (each.medium, each.locality) == ("STORAGE", None)


def test_a_block_is_removed_with_its_last_copy_in_a_medium_and_in_the_words_of_its_announcement() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True, places=PLACES)
    translator.track(request("a", [1, 2]))
    (stored,) = translator.translate([event("disk", key(1)), event("redis", key(1)), event("disk", key(1))])
    assert (stored.medium, stored.locality) == ("STORAGE", "LOCAL")
    assert translator.translate([event("disk", key(1), removed=True)]) == []
    assert translator.translate([event("disk", key(1), removed=True)]) == [], "twice"
    (removed,) = translator.translate([event("redis", key(1), removed=True)])
    assert (removed.medium, removed.locality) == ("STORAGE", "LOCAL")
    assert translator.translate([event("redis", key(1), removed=True)]) == []
    # Media are apart from each other, and two of host memory are one.
    assert len(translator.translate([event("CPU", key(1)), event("memory", key(1)), event("disk", key(1))])) == 2
    assert translator.translate([event("CPU", key(1), removed=True)]) == []
    assert named(translator.translate([event("memory", key(1), removed=True)])) == [("BlockRemoved", "CPU", [b"\1"])]


def test_blocks_that_part_inside_share_the_engines_blocks_before() -> None:
    translator = EventTranslator(LAYOUT, factor=4, describe=True, places=PLACES)
    translator.track(request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    translator.track(request("b", [1, 2, 9, 9]))
    first, second, third = translator.translate(
        [event("CPU", key(1, 2, 3, 4), key(1, 2, 9, 9), key(1, 2, 3, 4, 5, 6, 7, 8))]
    )
    assert first.block_hashes == [b"\1", b"\1\2", b"\1\2\3", b"\1\2\3\4"]
    assert (second.block_hashes, second.parent_block_hash) == ([b"\1\2\x09", b"\1\2\x09\x09"], b"\1\2")
    assert (second.token_ids, second.block_size) == ([9] * 8, 4)
    assert (third.parent_block_hash, len(third.block_hashes)) == (b"\1\2\3\4", 4)
    (removed,) = translator.translate([event("CPU", key(1, 2, 3, 4), removed=True)])
    assert removed.block_hashes == [b"\1\2\3", b"\1\2\3\4"], "the other block still has the first two"
    (removed,) = translator.translate([event("CPU", key(1, 2, 9, 9), removed=True)])
    assert removed.block_hashes == [b"\1", b"\1\2", b"\1\2\x09", b"\1\2\x09\x09"]


def test_what_a_router_may_have_dropped_is_not_removed_together_with_the_rest() -> None:
    """Dynamo ends at the first hash of a removal that it does not know."""
    translator = EventTranslator(LAYOUT, factor=1, describe=True, places=PLACES)
    translator.track(request("a", [1, 2]))
    translator.translate([event("CPU", key(1), key(7), key(1, 2))])
    removed = translator.translate([event("CPU", key(7), key(1), key(1, 2), removed=True)])
    assert named(removed) == [("BlockRemoved", "CPU", [b"\7"]), ("BlockRemoved", "CPU", [b"\1", b"\1\2"])]


def test_tiers_that_are_found_no_longer_are_taken_back() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True, places=PLACES)
    translator.translate([event("disk", key(1), key(2)), event("redis", key(2)), event("CPU", key(1))])
    removed = translator.forget_tiers()
    assert sorted(each for event in removed for each in event.block_hashes) == [b"\1", b"\2"]
    assert {each.medium for each in removed} == {"STORAGE"}
    assert translator.translate([event("disk", key(1), removed=True)]) == []
    assert translator.forget_tiers() == []


def test_a_tier_that_lost_changes_is_taken_back_but_for_what_it_has() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True, places=PLACES)
    translator.translate([event("disk", key(1), key(2), key(3)), event("redis", key(3)), event("CPU", key(1))])
    lost = OffloadingEvent([], "disk", removed=True)
    assert named(translator.translate([lost, event("disk", key(2))])) == [
        ("BlockRemoved", "STORAGE", [b"\1", b"\2"]),  # the third is in the other tier
        ("BlockStored", "STORAGE", [b"\2"]),
    ]


class ScannedTier(FakeTier):
    """A tier that announces all of its blocks at startup and when ``rescan`` is called, as a scanned store does."""

    def rescan(self) -> None:
        self._events += [OffloadingEvent([each], self.tier_type, removed=False) for each in self.blocks]

    def announced(self) -> Iterable[OffloadKey]:
        """Return the blocks that the events announce while the server is idle."""
        return self.blocks


class AskedTier(ScannedTier):
    """A tier that remembers a few of its blocks, and asks its store for all others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.index = self.make_index()
        self.asked: set[OffloadKey] = set()

    def make_index(self) -> PresenceIndex:
        return PresenceIndex(self.tier_type, 6, enable_events=True, clock=lambda: 0.0)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self.index.lookup(key, is_complete=True)
        if answer is None:
            self.asked.add(key)
        return answer

    def on_schedule_end(self) -> None:
        for each in self.asked:
            self.index.record_answer(each, each in self.blocks)
        self.asked.clear()

    def take_events(self) -> Sequence[OffloadingEvent]:
        for each in super().take_events():
            (self.index.remove if each.removed else self.index.add)(each.keys)
        if self.index.lost_events:
            self.rescan()
        return list(self.index.take_events())

    def announced(self) -> Iterable[OffloadKey]:
        return [each for each in self.blocks if each in self.index]


class ExactTier(AskedTier):
    """A tier whose store knows its keys, and whose events are dropped if there are many."""

    def make_index(self) -> PresenceIndex:
        return PresenceIndex(self.tier_type, 1, resident=self.blocks, enable_events=True)


class Server:
    """One engine's managers over the same stores, which are killed and restarted, and two routers' knowledge of it."""

    def __init__(self, seed: int, factor: int, tiers: Mapping[str, type[ScannedTier]]) -> None:
        self.chance = random.Random(seed)
        self.factor = factor
        self.classes = tiers
        self.routers = LlmD(), Dynamo(BLOCK_TOKENS)
        self.kept: dict[str, dict[OffloadKey, bytes]] = {"disk": {}, "redis": {}}
        self.count = 0
        paths = (path for length in range(factor, 9, factor) for path in itertools.product(range(2), repeat=length))
        self.keys = [key(*path) for path in paths]
        self.start()

    def start(self) -> None:
        for router in self.routers:
            router.restarted()
        self.rig = Rig(num_blocks=6, policies=())
        view = self.rig.memory.create_kv_memoryview()
        for label, capacity in (("disk", 8), ("redis", 10)):
            tier = self.classes[label](view, label, capacity=capacity)
            tier.put(self.kept[label], self.kept[label].values())
            tier.rescan()
            self.kept[label] = tier.blocks
            self.rig.tiers.append(tier)
        self.rig.manager = type(self.rig.manager)(self.rig.primary, self.rig.tiers, clock=self.rig.clock)
        self.translator = EventTranslator(
            replace(LAYOUT, events_enabled=True), self.factor, describe=True, places=PLACES
        )

    def publish(self) -> None:
        events = self.translator.translate(self.rig.manager.take_events())
        for router in self.routers:
            router.apply(events)

    def serve(self) -> None:
        """Serve a request that asks for its prefix and stores its blocks. It may end before its transfers do."""
        path = [self.chance.randrange(2) for _ in range(self.chance.randrange(1, 9))]
        asked = request(f"r{self.count}", path)
        self.count += 1
        self.routers[0].computed(asked.block_hashes)
        self.translator.track(asked)
        ends = range(self.factor, len(path) + 1, self.factor)
        keys = [key(*path[:end]) for end in ends]
        context = self.rig.start(asked.request_id)
        for _ in range(self.chance.randrange(3)):
            if keys:
                self.rig.manager.lookup_prefix(keys, context)
                self.rig.step()
                self.publish()
        if keys and (output := self.rig.manager.prepare_store(keys, context)) is not None:
            for each, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
                self.rig.memory.write(slot, content(each))
            self.rig.manager.complete_store(output.keys_to_store, context, success=self.chance.random() < 0.9)
        if self.chance.random() < 0.5:
            self.transfer()
        self.translator.finish(asked)
        self.rig.manager.on_request_finished(context)
        self.publish()

    def transfer(self) -> None:
        for tier in self.rig.tiers:
            tier.finish(success=self.chance.random() < 0.9)
        self.rig.step()

    def operate(self) -> None:
        number = self.chance.random()
        if number < 0.8:
            self.serve()
        elif number < 0.9:
            self.transfer()
        elif number < 0.95:
            self.chance.choice(self.rig.tiers).rescan()
        elif number < 0.98:
            self.rig.manager.reset_cache()
        else:
            self.start()

    def check(self) -> None:
        """Check, while the server is idle, that the routers know the managers' blocks."""
        while any(tier.has_pending_work() for tier in self.rig.tiers):
            for tier in self.rig.tiers:
                tier.finish()
            self.rig.step()
        self.publish()
        self.publish()  # a tier that has lost changes announces that first, and then its blocks
        held = self.rig.primary.where(self.keys, ReqContext("other"))
        primary = [each for each, is_held in zip(self.keys, held, strict=True) if is_held]
        host = {each for block in primary for each in self.inside(block)}
        below = {get_offload_block_hash(block) for tier in self.rig.tiers for block in tier.announced()}
        llm_d, dynamo = self.routers
        assert llm_d.blocks.get("cpu", set()) == host
        storage = llm_d.blocks.get("storage", set())
        assert {each for each in storage if len(each) % self.factor == 0} == below
        assert dynamo.blocks.get("host", set()) == host
        assert not dynamo.blocks.get("device")
        assert dynamo.blocks.get("disk", set()) <= storage
        books = self.translator._announced
        assert set(books.keys_in("CPU")) == set(primary)
        for tier in self.rig.tiers:
            assert set(books.keys_in(tier.tier_type)) == set(tier.announced()), "a key that is kept for ever"

    def inside(self, block: OffloadKey) -> Iterable[bytes]:
        path = get_offload_block_hash(block)
        return (path[:end] for end in range(len(path) - self.factor + 1, len(path) + 1))


TIERS = {
    "scanned": {"disk": ScannedTier, "redis": ScannedTier},
    "indexed": {"disk": ExactTier, "redis": AskedTier},
}


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("tiers", list(TIERS))
def test_at_rest_routers_know_what_the_managers_have(tiers: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.presence._MIN_EVENT_KEYS", 8)
    server = Server(factor, factor, TIERS[tiers])
    checks, was_on_disk = 0, False
    for number in range(by_size(400, 50_000)):
        server.operate()
        if number % 20 == 19:
            server.check()
            checks += 1
            was_on_disk |= bool(server.routers[1].blocks.get("disk"))
    assert checks >= 20
    assert was_on_disk, "Dynamo counts the disk"
