# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector, step by step and without a model: sessions, whose input comes in parts.

When a part comes, vLLM drops the last token that it sampled, which an asynchronous step may have computed already, and
puts the part's first token in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.steps import BLOCK, STOP, Steps, aborted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = range(10, 16)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def steps(request: pytest.FixtureRequest, llama: SmallModel) -> Iterator[Steps]:
    steps = Steps(llama.path, request.param, num_gpu_blocks=40, slots=64)
    yield steps
    steps.close()


def part(steps: Steps, tokens: Iterable[int], max_tokens: int = 20) -> Any:
    request = steps.request("session", list(tokens), max_tokens, stop_token_ids=[STOP])
    request.resumable = True
    steps.scheduler.add_request(request)
    return request


def first_turn(steps: Steps) -> Any:
    """Serve six tokens of input and two of output.

    The second output token is dropped; it would be the last one of a block.
    """
    session = part(steps, PROMPT)
    for n in range(1, 8):
        steps.step(STOP if n == 2 else 7)
        if session.status.name == "WAITING_FOR_STREAMING_REQ":
            return session
    raise AssertionError("the turn does not end")


def assert_right(steps: Steps, tokens: list[int]) -> None:
    """Assert that the blocks stored under the keys of ``tokens`` were computed from them, and serve another request."""
    steps.drain()
    steps.deliver_all()
    steps.stored_blocks(tokens)
    steps.scheduler.reset_prefix_cache()
    steps.add("other", tokens, 1)
    steps.drain()


def test_no_request_gets_what_a_session_computed_in_place_of_its_tokens(steps: Steps) -> None:
    session = first_turn(steps)
    before = list(session.all_token_ids)
    part(steps, range(50, 55))
    for _ in range(2):
        steps.step()
    steps.scheduler.finish_requests("session", aborted())
    assert_right(steps, before)


def test_a_session_that_ends_before_its_next_part_is_computed_stores_no_dropped_token(steps: Steps) -> None:
    session = first_turn(steps)
    part(steps, range(50, 55))
    tokens = list(session.all_token_ids)
    steps.scheduler.finish_requests("session", aborted())
    assert_right(steps, tokens)


@pytest.mark.parametrize("refused", [False, True])
def test_a_session_that_goes_on_stores_what_its_next_part_computes(steps: Steps, refused: bool) -> None:
    assert steps.manager is not None
    steps.manager.refuses = refused
    session = first_turn(steps)
    part(steps, range(50, 55))
    tokens = list(session.all_token_ids)
    if refused:
        steps.add("beside", list(range(100, 102)), 2)  # steps that offer refused blocks again
    steps.manager.refuses = False
    for _ in range(2):
        steps.step()
    steps.scheduler.finish_requests("session", aborted())
    assert_right(steps, tokens)
    assert steps.stored_blocks(tokens) == list(range(len(tokens) // BLOCK))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_events_of_a_session_describe_what_its_next_part_computes(llama: SmallModel, asynchronous: bool) -> None:
    from vllm.distributed.kv_events import BlockStored

    steps = Steps(llama.path, asynchronous, num_gpu_blocks=40, slots=64, self_describing_kv_events=True)
    session = first_turn(steps)
    steps.add("beside", list(range(100, 103)), 4)
    for _ in range(4):
        steps.step()  # its block of generated tokens makes the translator look at the hashes of all requests
    part(steps, range(50, 55))
    tokens = list(session.all_token_ids)
    for _ in range(2):
        steps.step()
    steps.scheduler.finish_requests("session", aborted())
    steps.drain()
    steps.deliver_all()
    stored = [event.token_ids for event in steps.events if isinstance(event, BlockStored) and event.medium == "CPU"]
    blocks = [tokens[n : n + BLOCK] for n in range(0, len(tokens), BLOCK)]
    assert [block for block in stored if block != [100, 101, 102, 7]] == blocks
    steps.close()


def test_events_of_the_block_that_a_session_gave_up_have_the_tokens_that_were_hashed(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_events import BlockStored

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    steps = Steps(llama.path, True, num_gpu_blocks=40, slots=64, self_describing_kv_events=True)
    session = part(steps, PROMPT, 2)
    while session.status.name != "WAITING_FOR_STREAMING_REQ":
        steps.step()
    given_up, tokens = bytes(session.block_hashes[1]), list(session.all_token_ids)[BLOCK : 2 * BLOCK]
    steps.add("beside", list(range(100, 103)), 4)
    for _ in range(6):
        steps.step()  # its block of generated tokens makes the translator look at the hashes of all requests
    steps.add("twin", list(PROMPT), 6)  # generates the same block
    for _ in range(4):
        steps.step()
    part(steps, range(50, 55))
    assert bytes(session.block_hashes[1]) != given_up
    for _ in range(4):
        steps.step()
    steps.scheduler.finish_requests("session", aborted())
    steps.drain()
    steps.deliver_all()
    events = [event for event in steps.events if isinstance(event, BlockStored) and event.medium == "CPU"]
    assert [event.token_ids for event in events if event.block_hashes == [given_up]] == [tokens]
    steps.close()
