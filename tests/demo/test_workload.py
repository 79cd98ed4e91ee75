# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("transformers")
import torch

from kvoffload.demo.workload import Chat, ChatWorkload, Turn
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
    assert CHAT.beginning(0) == CHAT.beginning(1) != CHAT.message(0, 0)[:16]
    with_documents = replace(CHAT, document_tokens=30)
    first, second = with_documents.beginning(0), with_documents.beginning(1)
    assert first[:16] == second[:16] == CHAT.beginning(0)
    assert first[16:] != second[16:]
    assert len(first) == len(second) == 46
    assert with_documents.longest_tokens == CHAT.longest_tokens + 30


def test_every_round_has_one_turn_of_every_conversation() -> None:
    assert Counter(CHAT.order()[:3]) == Counter(CHAT.order()[3:]) == Counter(range(3))


def test_a_turn_answers_all_that_was_said_before() -> None:
    model = build_random_model(layers=1, hidden=32, heads=2, kv_heads=1, vocab=512)
    seen: list[Turn] = []
    with Engine(model, EngineOptions(num_blocks=16)) as engine:
        chat = Chat(engine, CHAT, seen.append)
        for number in range(CHAT.turns):
            chat.serve_round()
            assert not engine.has_requests
            assert {turn.turn for turn in chat.turns} == set(range(number + 1))
        turns = chat.turns
    assert [(turn.conversation, turn.turn) for turn in turns] == [(c, t) for c in range(3) for t in range(2)]
    assert sorted(seen, key=lambda turn: (turn.conversation, turn.turn)) == list(turns)
    assert {turn.prompt_tokens for turn in turns if turn.turn == 0} == {36}
    assert {turn.prompt_tokens for turn in turns if turn.turn == 1} == {60}
    first = turns[0]
    history = CHAT.beginning(0) + CHAT.message(0, 0)
    with Engine(model, EngineOptions(num_blocks=16)) as engine:
        assert engine.generate([history], SamplingParams(max_tokens=4)) == [list(first.tokens)]
        history += [*first.tokens, *CHAT.message(0, 1)]
        assert engine.generate([history], SamplingParams(max_tokens=4)) == [list(turns[1].tokens)]
