# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("transformers")
import torch

from kvoffload.demo.workload import ChatWorkload, Turn, run_chat
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams, build_random_model

torch.set_num_threads(1)

CHAT = ChatWorkload(
    conversations=3, turns=2, system_tokens=16, message_tokens=20, reply_tokens=4, users=2, vocab=512, seed=7
)


def test_the_same_numbers_say_the_same_things() -> None:
    again = ChatWorkload(
        conversations=3, turns=2, system_tokens=16, message_tokens=20, reply_tokens=4, users=2, vocab=512, seed=7
    )
    assert again.order() == CHAT.order()
    assert again.message(2, 1) == CHAT.message(2, 1)
    assert CHAT.message(2, 1) != CHAT.message(1, 1)
    assert CHAT.system_prompt() != CHAT.message(0, 0)[:16]


def test_every_round_has_one_turn_of_every_conversation() -> None:
    assert Counter(CHAT.order()[:3]) == Counter(CHAT.order()[3:]) == Counter(range(3))


def test_a_turn_answers_all_that_was_said_before() -> None:
    model = build_random_model(layers=1, hidden=32, heads=2, kv_heads=1, vocab=512)
    seen: list[Turn] = []
    with Engine(model, EngineOptions(num_blocks=16)) as engine:
        turns = run_chat(engine, CHAT, seen.append)
        assert not engine.has_requests
    assert [(turn.conversation, turn.turn) for turn in turns] == [(c, t) for c in range(3) for t in range(2)]
    assert sorted(seen, key=lambda turn: (turn.conversation, turn.turn)) == turns
    assert {turn.prompt_tokens for turn in turns if turn.turn == 0} == {36}
    assert {turn.prompt_tokens for turn in turns if turn.turn == 1} == {60}
    first = turns[0]
    history = CHAT.system_prompt() + CHAT.message(0, 0)
    with Engine(model, EngineOptions(num_blocks=16)) as engine:
        assert engine.generate([history], SamplingParams(max_tokens=4)) == [list(first.tokens)]
        history += [*first.tokens, *CHAT.message(0, 1)]
        assert engine.generate([history], SamplingParams(max_tokens=4)) == [list(turns[1].tokens)]
