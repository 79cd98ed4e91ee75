# SPDX-License-Identifier: Apache-2.0
"""Test hints in every form in which an engine passes them, and invalid hints."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.connector.rig import BT, Request, Rig, key
from tests.sizes import by_size

from kvoffload.base import NextUse
from kvoffload.connector.hints import Hints
from kvoffload.cpu.policies.density.classes import NUM_USES
from kvoffload.metrics import IGNORED_HINTS, NEXT_USES
from kvoffload.testing.clock import ManualClock

UNKNOWN, SOON, LATER, NEVER = NextUse
PAGE = Path(__file__).parents[2] / "docs/requests.md"


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}


def next_use(hints: Hints, params: object, kv_hints: object = None) -> NextUse:
    return hints.of_request("r", params, kv_hints)[0]


def is_prefetch(hints: Hints, params: object) -> bool:
    return hints.of_request("r", params)[1]


def ignored(hints: Hints) -> tuple[int, int]:
    """(unknown, malformed)"""
    stats = hints.get_stats()
    return int(stats["hints_ignored", "unknown"]), int(stats["hints_ignored", "malformed"])


@pytest.mark.parametrize("use", [SOON, LATER, NEVER])
def test_a_client_says_it_by_name(use: NextUse) -> None:
    hints = Hints()
    assert next_use(hints, {"kvoffload": {"next_use": use.name.lower()}}) is use
    assert hints.get_stats()["requests_by_hint", use.name.lower()] == 1
    assert ignored(hints) == (0, 0)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"kvoffload": {}}, "text", 7])
def test_a_client_that_says_nothing(params: object) -> None:
    hints = Hints()
    assert next_use(hints, params) is UNKNOWN
    assert hints.get_stats()["requests_by_hint", "unknown"] == 1
    assert ignored(hints) == (0, 0)


def test_a_request_that_only_prepares_another() -> None:
    hints = Hints()
    assert is_prefetch(hints, {"kvoffload": {"prefetch": True, "next_use": "soon"}})
    for params in (None, "text", {}, {"kvoffload": {}}, {"kvoffload": {"prefetch": False}}):
        assert not is_prefetch(hints, params)
    assert ignored(hints) == (0, 0)
    assert not is_prefetch(hints, {"kvoffload": {"prefetch": "yes"}})
    assert ignored(hints) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "payload", "use"),
    [
        ("kv.retain", {"ttl_seconds": 60}, SOON),
        ("kv.retain", {"ttl_seconds": 300.0}, LATER),
        ("kv.retain", {"ttl_seconds": 0}, NEVER),
        ("kv.retain", {}, LATER),
        ("vllm.set_priority", {"target": "request_cached", "value": 10, "ttl_seconds": 60}, SOON),
        ("vllm.set_priority", {"target": "request_cached", "value": 10}, LATER),
        ("vllm.set_priority", {"target": "request_cached", "value": -1}, NEVER),
        ("vllm.set_priority", {"target": "request_cached", "value": None}, UNKNOWN),
    ],
)
def test_an_orchestrator_says_it_in_an_envelope(kind: str, payload: dict[str, Any], use: NextUse) -> None:
    """The envelope is a mapping, an object, or arrives through Dynamo's bridge."""
    as_mapping = envelope(action(kind, **payload))
    as_object = SimpleNamespace(actions=[SimpleNamespace(**each) for each in as_mapping["actions"]])
    for params, kv_hints in ((None, as_mapping), (None, as_object), ({"kv_hint": as_mapping}, None)):
        hints = Hints()
        assert next_use(hints, params, kv_hints) is use
        assert ignored(hints) == (0, 0)


def test_the_clients_own_word_goes_first() -> None:
    retain, forget = (envelope(action("kv.retain", ttl_seconds=seconds)) for seconds in (9, 0))
    assert next_use(Hints(), {"kvoffload": {"next_use": "later"}, "kv_hint": forget}, retain) is LATER
    assert next_use(Hints(), {"kv_hint": forget}, retain) is SOON
    assert next_use(Hints(), {"kvoffload": {"next_use": "tomorrow"}}, retain) is SOON


def test_other_actions_are_unknown() -> None:
    hints = Hints()
    assert next_use(hints, None, envelope(action("kv.fetch", source="x"), action("kv.retain", ttl_seconds=1))) is SOON
    assert ignored(hints) == (1, 0)


@pytest.mark.parametrize(
    "params",
    [
        {"kvoffload": "soon"},
        {"kvoffload": {"next_use": "now"}},
        {"kvoffload": {"next_use": ["soon"]}},
        {"kvoffload": {"next_use": "unknown"}},
        {"kv_hint": "kv.retain"},
        {"kv_hint": envelope("kv.retain")},
        {"kv_hint": envelope({"action_type": "kv.retain", "payload": 5})},
        {"kv_hint": envelope(action("kv.retain", ttl_seconds=-1))},
        {"kv_hint": envelope(action("kv.retain", ttl_seconds=float("nan")))},
        {"kv_hint": envelope(action("kv.retain", ttl_seconds=True))},
        {"kv_hint": envelope(action("vllm.set_priority", value="high"))},
    ],
)
def test_what_makes_no_sense_is_counted_and_ignored(params: dict[str, Any]) -> None:
    hints = Hints()
    assert next_use(hints, params) is UNKNOWN
    assert ignored(hints) == (0, 1)


def test_of_a_long_list_only_the_beginning_is_read() -> None:
    hints = Hints()
    assert next_use(hints, None, envelope(*[action("kv.fetch")] * 1000, action("kv.retain", ttl_seconds=1))) is UNKNOWN
    assert ignored(hints) == (16, 1)


class Completions:
    """The client object of the page's example. It only records requests instead of sending them."""

    def __init__(self) -> None:
        self.completions = self
        self.sent: list[dict[str, Any]] = []

    def create(self, **request: Any) -> None:
        self.sent.append(request)


def test_the_client_of_the_page_says_what_it_means() -> None:
    """``tests/engines/vllm/test_hints.py`` runs it against vLLM."""
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    sent = Completions()
    client = names["HintingClient"](sent, "m", temperature=0, extra_body={"ignore_eos": True})
    client.ask([1, 2], "soon")
    client.ask([1, 2])
    client.say([1, 2], "never")
    client.prefetch([1, 2])
    params = [request.get("extra_body", {}).get("kv_transfer_params") for request in sent.sent]
    hints = Hints()
    said = [(SOON, False), (UNKNOWN, False), (NEVER, False), (UNKNOWN, True)]
    assert [hints.of_request("r", each) for each in params] == said
    assert ignored(hints) == (0, 0)
    assert [request["max_tokens"] for request in sent.sent] == [256, 256, 1, 1]
    assert all(request["extra_body"]["ignore_eos"] and request["temperature"] == 0 for request in sent.sent)
    assert params[1] is None


def rubbish(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can hold, with words that hints use."""
    words = ["kvoffload", "next_use", "soon", "kv_hint", "actions", "action_type", "kv.retain", "vllm.set_priority"]
    words += ["payload", "ttl_seconds", "value", "x" * 50, "\ud800", ""]
    kind = rng.randrange(9 if depth < 5 else 6)
    if kind < 6:
        scalars = [None, rng.random() < 0.5, 10 ** rng.randrange(400), -rng.random() * 1e308, float("inf")]
        return rng.choice([*scalars, rng.choice(words)])
    if kind == 6:
        return [rubbish(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(words): rubbish(rng, depth + 1) for _ in range(rng.randrange(6))}


def test_malformed_envelopes_leave_counters_and_nothing_else() -> None:
    rng, hints = random.Random(28), Hints()
    requests = by_size(quick=5_000, thorough=100_000)
    for _ in range(requests):
        good = {"kvoffload": {"next_use": rubbish(rng)}, "kv_hint": envelope(rubbish(rng), rubbish(rng))}
        params = rubbish(rng) if rng.random() < 0.5 else good
        kv_hints = rubbish(rng) if rng.random() < 0.5 else SimpleNamespace(actions=rubbish(rng))
        next_use, is_prefetch = hints.of_request("r", params, kv_hints)
        assert (type(next_use), type(is_prefetch)) == (NextUse, bool)
    stats = hints.get_stats()
    assert sum(stats["requests_by_hint", name] for name in NEXT_USES) == requests
    assert stats.keys() == {("requests_by_hint", name) for name in NEXT_USES} | {
        ("hints_ignored", reason) for reason in IGNORED_HINTS
    }
    assert stats["hints_ignored", "malformed"] > requests / 2


@dataclass
class HintedRequest(Request):
    """A request in vLLM's form, whose envelope is its own field."""

    kv_hints: Any = field(default=None, kw_only=True)


def hint_of(rig: Rig, n: int) -> NextUse:
    block = rig.manager.slots.get(key(n))
    assert block is not None
    return NextUse(block.policy_state.class_ // NUM_USES)


def test_a_message_after_the_end_reaches_the_blocks() -> None:
    """A session closes with one more request for its last prompt, all of whose blocks are still on the device."""
    rig = Rig()
    rig.store_prefix(8 * BT)
    assert [hint_of(rig, n) for n in range(8)] == [UNKNOWN] * 8
    closing = HintedRequest("closing", 8 * BT + 1, kv_transfer_params={"kvoffload": {"next_use": "never"}})
    rig.admit(closing, range(100, 109), computed=8 * BT)
    rig.finish(closing)
    assert [hint_of(rig, n) for n in range(8)] == [NEVER] * 8
    assert rig.scheduler.get_stats()["requests_by_hint", "never"] == 1


def test_hits_of_hinted_requests_and_of_others_are_counted() -> None:
    rig = Rig()
    rig.store_prefix(8 * BT)
    for number, params in enumerate([None, {"kvoffload": {"next_use": "soon"}}, {"kvoffload": {"next_use": "now"}}]):
        request = HintedRequest(str(number), (4 + number) * BT + 1, kv_transfer_params=params)
        tokens, _ = rig.ask(request)
        rig.alloc(request, range(100 + 10 * number, 109 + 10 * number), external=tokens or 0)
        rig.end(*rig.step().loads)
        rig.finish(request)
    stats = rig.scheduler.get_stats()
    assert (stats["hit_tokens_by_hint", "yes"], stats["hit_tokens_by_hint", "no"]) == (5 * BT, 10 * BT)
    assert stats["lookup_tokens_by_hint", "yes"] == 5 * BT + 1
    assert stats["lookup_tokens_by_hint", "no"] == 8 * BT + 10 * BT + 2  # with the request that stored the prefix


def test_an_envelope_of_the_engine_reaches_the_blocks() -> None:
    rig = Rig()
    request = HintedRequest("r", 4 * BT, kv_hints=envelope(action("kv.retain", ttl_seconds=30)))
    meta = rig.admit(request, range(100, 104))
    rig.end(*meta.stores)
    rig.finish(request)
    assert [hint_of(rig, n) for n in range(3)] == [SOON] * 3


def test_a_malformed_hint_is_logged_with_its_request_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    hints = Hints(clock)
    assert hints.of_request("good", {"kvoffload": {"next_use": "soon"}}) == (SOON, False)
    for number in range(3):
        assert hints.of_request(f"bad-{number}\n", {"kvoffload": {"next_use": 5}}, kv_hints=7) == (UNKNOWN, False)
    clock.advance(100.0)
    hints.of_request("x" * 10**6, {"kvoffload": {"prefetch": 5}})
    first, second = (record.getMessage() for record in caplog.records)
    assert "bad-0" in first
    assert "\n" not in first
    assert len(second) < 300
    assert "2 earlier" in second
