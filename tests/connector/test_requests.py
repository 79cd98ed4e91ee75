# SPDX-License-Identifier: Apache-2.0
"""Test sessions, whose input arrives in parts. Each part replaces generated tokens that are not computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from tests.connector.rig import BT, FULL, SLIDING, Request, Rig, block_hash, key

from kvoffload.base import OffloadPolicy, ReqContext
from kvoffload.config import DEFAULTS, EngineLayout
from kvoffload.connector.epochs import FIRST
from kvoffload.connector.groups import geometry_of
from kvoffload.connector.requests import Keys
from kvoffload.connector.requests import Request as OwnRequest

PARTS = "abcd"
"""The part of the input that produced a block's last token is in the block's hash."""


@dataclass
class Session(Request):
    """Blocks below ``same_blocks`` keep their hashes when the next part comes."""

    parts: list[tuple[int, int]] = field(default_factory=list)
    """(blocks that an earlier part and this one have in common, tokens of the prompt), by part after the first."""

    @property
    def block_hashes(self) -> list[bytes]:
        stems = [self.stem] * (self.num_tokens // BT)
        for name, (same_blocks, _) in zip(PARTS[1:], self.parts):
            stems[same_blocks:] = [name] * len(stems[same_blocks:])
        return [block_hash(stem, n) for n, stem in enumerate(stems)]

    def go_on(self, same_blocks: int, num_tokens: int) -> None:
        """Let the next part of the input arrive."""
        self.parts.append((same_blocks, num_tokens))
        self.num_tokens = self.num_prompt_tokens = num_tokens


def session(num_tokens: int) -> Session:
    return Session("session", num_tokens, PARTS[0])


def tracked(request: Request, groups: int = 1) -> OwnRequest:
    geometry = geometry_of(EngineLayout((FULL, SLIDING)[:groups], BT, "one"), DEFAULTS)
    context = ReqContext(request.request_id)
    return OwnRequest(request, context, OffloadPolicy.BLOCK_LEVEL, tuple(map(Keys, geometry)), FIRST)


def keys_of(state: OwnRequest, group: int = 0) -> list[bytes]:
    return list(state.groups[group].keys)


def test_the_next_part_gives_the_blocks_it_changes_other_keys() -> None:
    request = session(3 * BT)
    state = tracked(request, groups=2)
    state.extend_keys()
    request.go_on(same_blocks=2, num_tokens=4 * BT)
    state.extend_keys()
    for group in range(2):
        assert keys_of(state, group) == [
            key(0, group, "a"),
            key(1, group, "a"),
            key(2, group, "b"),
            key(3, group, "b"),
        ]


@pytest.mark.parametrize(
    ("before", "same_blocks", "num_tokens", "next_block"),
    [
        (3, 2, 4 * BT, 2),
        (3, 0, 4 * BT, 0),
        (1, 2, 4 * BT, 1),  # it was not there yet
        (3, 3, 4 * BT, 3),  # the part only adds to the block that is not full
        (3, 2, 2 * BT + 1, 2),  # a part that is shorter than the tokens that it replaces
    ],
)
def test_blocks_that_the_next_part_changes_are_offered_and_owned_anew(
    before: int, same_blocks: int, num_tokens: int, next_block: int
) -> None:
    request = session(3 * BT)
    state = tracked(request)
    state.extend_keys()
    assert state.groups[0].owns_any([key(2, stem="a")])
    state.groups[0].next_block = before
    request.go_on(same_blocks, num_tokens)
    state.extend_keys()
    assert state.groups[0].next_block == next_block
    assert state.next_offer_tokens == (next_block + 1) * BT
    for block, own in enumerate(keys_of(state)):
        assert state.groups[0].owns_any([own]), f"block {block}"


def test_what_was_computed_is_ready_again_when_a_later_step_shows_it() -> None:
    request = session(2 * BT)
    state = tracked(request)
    state.extend_keys()
    rig = Rig()
    state.last_scheduled = rig.run(request, [0, 1])
    state.offered_tokens = 2 * BT
    request.go_on(same_blocks=1, num_tokens=3 * BT)
    assert state.ready_tokens == 0, "before the keys are made anew, too"
    state.extend_keys()
    assert state.ready_tokens == 0
    state.last_scheduled = rig.run(request, [], computed=2 * BT - 1)
    assert state.ready_tokens == 3 * BT - 1


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_a_block_whose_last_token_was_replaced_is_stored_once_it_is_computed_again(policy: OffloadPolicy) -> None:
    """The step that computed the replaced token was planned before the engine knew that the turn ended with it."""
    rig = Rig(num_blocks=3, policy=policy)
    other = Request("other", 3 * BT, "other")
    others = rig.admit(other, range(20, 23)).stores  # all slots are in use
    request = rig.arrive(session(6))
    rig.ask(request)
    rig.alloc(request, [0, 1])
    rig.step(rig.run(request, [0, 1]))
    request.num_tokens = 7
    rig.step(rig.run(request, [], computed=6, new=False))
    rig.step(rig.run(request, [], computed=7, tokens=8, new=False))
    request.num_tokens = 8
    rig.step()  # offers the first block again, when the second one has a key
    rig.end(*others)
    rig.finish(other)
    rig.manager.offered.clear()

    request.go_on(same_blocks=1, num_tokens=12)
    assert rig.step().stores == (), "nothing is known to be computed"
    rig.alloc(request, [0, 1, 2])
    assert rig.step().stores == ()
    meta = rig.step(rig.run(request, [0, 1, 2], computed=7))
    assert [each for call in rig.manager.offered for each in call][-2:] == [key(1, stem="b"), key(2, stem="b")]
    assert [block for job in meta.stores for block in job.source.block_ids.tolist()][-2:] == [1, 2]
    assert key(1, stem="a") not in {each for call in rig.manager.offered for each in call}
    rig.end(*meta.stores)
    rig.finish(request)
    rig.assert_drained()


def test_a_request_whose_hashes_are_wrong_neither_loads_nor_stores_and_its_blocks_flush_stores() -> None:
    rig = Rig(left_out=frozenset({"wrong"}))
    rig.store_prefix(16)
    first = rig.arrive(Request("first", 16, "other"))
    rig.ask(first)
    rig.alloc(first, range(4))
    (store,) = rig.step(rig.run(first, range(4))).stores
    rig.finish(first)
    wrong = rig.arrive(Request("wrong", 17))
    rig.left_out = frozenset()  # the cause has ended, but its effect remains
    assert rig.ask(wrong) == (0, False)
    rig.alloc(wrong, range(5))
    meta = rig.step(rig.run(wrong, range(5)))
    assert (meta.loads, meta.stores, meta.flush_job_ids) == ((), (), {store.job_id})
    rig.finish(wrong)
    rig.end(store)
    rig.step()
    rig.assert_drained()


def test_a_request_that_is_left_out_later_loads_and_stores_nothing_from_then_on() -> None:
    """Examples are a session whose next part contains media with a client's name, and a request whose adapter gets
    other weights while it waits or runs."""
    rig = Rig()
    rig.store_prefix(16)
    running = rig.arrive(session(4 * BT))
    rig.ask(running)
    rig.alloc(running, range(4))
    (first,) = rig.step(rig.run(running, range(4), tokens=2 * BT)).stores
    rig.end(first)
    waiting = rig.arrive(Request("waiting", 17))
    assert rig.ask(waiting) == (16, True)

    rig.left_out = frozenset({"session", "waiting"})
    assert rig.ask(waiting) == (0, False)
    rig.alloc(waiting, range(10, 15))
    meta = rig.step(rig.run(waiting, range(10, 15)), rig.run(running, [], computed=2 * BT, new=False))
    assert (meta.loads, meta.stores) == ((), ())
    running.go_on(same_blocks=4, num_tokens=6 * BT)
    rig.alloc(running, range(6))
    assert rig.step(rig.run(running, range(6), computed=4 * BT)).stores == ()
    rig.finish(running)
    rig.finish(waiting)
    assert rig.step().final_stores == ()
    rig.assert_drained()
