# SPDX-License-Identifier: Apache-2.0
"""The explanations of an engine that really computes, stores and loads: causes that take several requests at once, or a
prompt longer than host memory. Each is injected, named right, and the tokens add up.
``tests/integration/test_explanations.py`` has the others."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.reference.inside import wrap_handlers
from tests.engines.reference.zoo import tiny_model

from kvoffload.base import LoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.cli import main
from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams
from kvoffload.errors import StoreError
from kvoffload.sim import explain
from kvoffload.sim.config import SimConfig
from kvoffload.sim.explain import read_explanations
from kvoffload.testing import FaultyStore, GatedStore
from kvoffload.tiering.options import STORES
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.fs.options import FileSystemOptions

BLOCK_TOKENS = 4
SLOTS = 16
GPU_BLOCKS = 64
BLOCKS = 8
WHOLE = BLOCKS * BLOCK_TOKENS
Explanation = dict[str, dict[str, int]]


class Prompt(OffloadingHandler):
    """A real handler whose transfers have ended when the step that starts them reports. While ``is_held``, it reports
    none."""

    def __init__(self, inner: OffloadingHandler) -> None:
        self._inner = inner
        self.is_held = False

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        self._inner.transfer_async(job_id, spec)
        self._inner.wait([job_id])

    def get_finished(self) -> list[TransferResult]:
        return [] if self.is_held else list(self._inner.get_finished())

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()


class FilesOptions(FileSystemOptions, frozen=True, kw_only=True):
    """``{"type": "files", "path": ...}``: plain files whose reads can be delayed, and can fail."""

    max_bytes: int | str | None = "unlimited"

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        gated = GatedStore(super().open_store(block_bytes, namespace))
        _OPENED.append((gated, FaultyStore(gated)))
        return _OPENED[-1][1]


_OPENED: list[tuple[GatedStore, FaultyStore]] = []


class Recorded:
    """An engine with 16 slots of host memory above a tier of plain files, whose requests are recorded."""

    def __init__(self, root: Path, max_batch_tokens: int = 256, family: str = "llama", **config: Any) -> None:
        self.path = root / "trace.jsonl"
        options = EngineOptions(num_blocks=GPU_BLOCKS, block_tokens=BLOCK_TOKENS, max_batch_tokens=max_batch_tokens)
        model = tiny_model(family)
        with Engine(model, options) as bare:
            slot_bytes = bare.layout.block_bytes(1)
        self.engine = Engine(
            model,
            options,
            parse_config(
                {
                    "cpu_bytes_to_use": SLOTS * slot_bytes,
                    "eviction_policy": "lru",
                    "spec_name": "TieringOffloadingSpec",
                    "secondary_tiers": [{"type": "files", "path": str(root / "blocks"), "exclusive": True}],
                    "load_policy": "always",
                    "max_wait_s": 120.0,
                    "record_trace": str(self.path),
                    **config,
                }
            ),
        )
        self.handlers = wrap_handlers(self.engine, lambda _, handler: Prompt(handler))

    def ask(self, *first_tokens: int, num_blocks: int = BLOCKS) -> list[Request]:
        """Requests that arrive at once, from their arrival until all is written, on a device that has nothing."""
        self.engine.reset_cache(device=True, offloaded=False)
        requests = [self.add(token, num_blocks) for token in first_tokens]
        self.engine.drain()
        return requests

    def add(self, first_token: int, num_blocks: int = BLOCKS) -> Request:
        tokens = [first_token, *(n % 11 for n in range(num_blocks * BLOCK_TOKENS))]
        return self.engine.add_request(tokens, SamplingParams(max_tokens=1))

    def finish(self, request: Request) -> None:
        deadline_s = time.monotonic() + 120
        while not request.is_done:
            assert time.monotonic() < deadline_s
            self.engine.step()

    def explanations(self, *requests: Request) -> list[Explanation]:
        """Return the explanations of ``requests``, after a check of the sums over all requests."""
        self.engine.shutdown()
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        for line in lines:
            each = line["story"]
            assert sum(each["found"].values()) + sum(each["missed"].values()) == line["input_length"]
        total = read_explanations(self.path)
        assert total.explained == len(total.trace) == len(lines)
        assert sum(total.found.values()) + sum(total.missed.values()) == total.tokens
        numbers = [int(request.request_id.removeprefix("request-")) for request in requests]
        return [lines[number]["story"] for number in numbers]


MakeRecorded = Callable[..., Recorded]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRecorded]:
    STORES.register("files", FilesOptions)
    made: list[Recorded] = []

    def recorded(**options: Any) -> Recorded:
        made.append(Recorded(tmp_path, **options))
        return made[-1]

    yield recorded
    for each in made:
        each.engine.shutdown()
    STORES.unregister("files")
    _OPENED.clear()


def test_promotions_that_find_no_slot(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1)
    recorded.ask(2, num_blocks=SLOTS)
    stores = recorded.handlers["GPU", "CPU"]
    stores.is_held = True
    recorded.engine.reset_cache(device=True, offloaded=False)
    recorded.finish(recorded.add(3, num_blocks=SLOTS - 3))  # its stores keep all but three slots
    asked = recorded.add(1)
    recorded.finish(asked)
    stores.is_held = False
    recorded.engine.drain()
    (explanation,) = recorded.explanations(asked)
    assert explanation["found"] == {"device": 0, "files": 3 * BLOCK_TOKENS}
    assert explanation["missed"] == {"no room": WHOLE - 3 * BLOCK_TOKENS, "tail": 1}


def test_requests_that_wait_for_all_that_may_be_claimed(make: MakeRecorded) -> None:
    recorded = make()
    most = SLOTS * 3 // 4
    recorded.ask(1, num_blocks=most)
    recorded.ask(2)
    recorded.ask(3, num_blocks=SLOTS)
    ((gate, _),) = _OPENED
    gate.close_gate("read_into")
    recorded.engine.reset_cache(device=True, offloaded=False)
    first, second = recorded.add(1, num_blocks=most), recorded.add(2)
    recorded.finish(second)
    gate.open_gate()
    recorded.engine.drain()
    explanations = recorded.explanations(first, second)
    assert explanations[0]["found"] == {"device": 0, "files": most * BLOCK_TOKENS}
    assert explanations[0]["missed"] == {"tail": 1}
    assert explanations[1]["found"] == {"device": 0}
    assert explanations[1]["missed"] == {"promotion_share": WHOLE, "tail": 1}


def test_a_prompt_that_evicts_its_own_blocks_is_too_long(make: MakeRecorded) -> None:
    """It stores six blocks per step. The third step evicts its own blocks, and then it stops offering blocks."""
    recorded = make(max_batch_tokens=6 * BLOCK_TOKENS, secondary_tiers=[], spec_name="CPUOffloadingSpec")
    recorded.ask(1, num_blocks=2 * SLOTS)
    (asked,) = recorded.ask(1, num_blocks=2 * SLOTS)
    (explanation,) = recorded.explanations(asked)
    # The third portion evicts the last two blocks of the second, and is worth nothing after them.
    assert explanation["found"] == {"device": 0, "CPU": 10 * BLOCK_TOKENS}
    assert explanation["missed"] == {"evicted CPU": 8 * BLOCK_TOKENS, "too long": 14 * BLOCK_TOKENS, "tail": 1}


def test_a_prompt_that_is_stored_at_once_is_too_long_too(make: MakeRecorded) -> None:
    """Host memory is full of its first blocks before any of them may be evicted."""
    recorded = make(secondary_tiers=[], spec_name="CPUOffloadingSpec")
    recorded.ask(1, num_blocks=2 * SLOTS)
    (asked,) = recorded.ask(1, num_blocks=2 * SLOTS)
    (explanation,) = recorded.explanations(asked)
    stored = explanation["found"]["CPU"]
    assert 0 < stored <= SLOTS * BLOCK_TOKENS
    assert explanation["missed"] == {"too long": 2 * SLOTS * BLOCK_TOKENS - stored, "tail": 1}


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "gemma3_text", "mistral"])
def test_slots_that_others_took_are_no_fault_of_the_prompt(make: MakeRecorded, family: str) -> None:
    """The prompt's attention blocks would fit. Blocks of states and windows, which are not all stored, do not count."""
    recorded = make(family=family, secondary_tiers=[], spec_name="CPUOffloadingSpec")
    stores = recorded.handlers["GPU", "CPU"]
    stores.is_held = True
    for token in range(2, 7):
        recorded.finish(recorded.add(token, num_blocks=4))
    recorded.finish(recorded.add(1, num_blocks=SLOTS * 5 // 8))
    stores.is_held = False
    recorded.engine.drain()
    (asked,) = recorded.ask(1, num_blocks=SLOTS * 5 // 8)
    (explanation,) = recorded.explanations(asked)
    assert explanation["missed"] == {"refused": SLOTS * 5 // 8 * BLOCK_TOKENS, "tail": 1}


def test_the_device_in_the_trace_is_the_one_that_served(
    tmp_path: Path, make: MakeRecorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the simulator finds the same hits there as the engine, if it models that engine's scheduler."""
    monkeypatch.setattr(explain, "SimConfig", functools.partial(SimConfig, engine="reference"))
    recorded = make(load_policy="always")
    for token in (1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 8):
        recorded.add(token)
        recorded.engine.drain()
    recorded.engine.shutdown()
    on_device = read_explanations(recorded.path).found["device"]
    assert 3 * WHOLE <= on_device < 7 * WHOLE
    figures = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(recorded.path), "--processes", "1", "--out", str(figures)])
    assert not ended.value.code
    (as_it_was, *others) = json.loads(figures.read_text())["what_if"]
    assert (as_it_was["gpu_blocks"], as_it_was["gpu_hit_tokens"]) == (GPU_BLOCKS, on_device)
    assert {each["gpu_blocks"] for each in others} == {GPU_BLOCKS}


def test_promotions_that_fail(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1)
    recorded.ask(2, num_blocks=SLOTS)
    ((_, store),) = _OPENED
    store.broken["read_into"] = StoreError("The test breaks it.")
    (asked,) = recorded.ask(1)
    (explanation,) = recorded.explanations(asked)
    assert explanation["found"] == {"device": 0}
    assert explanation["missed"] == {"promotion failed": WHOLE, "tail": 1}


def test_a_reset_is_the_cause_for_blocks_in_host_memory_and_in_tiers(make: MakeRecorded) -> None:
    recorded = make()
    for token in (1, 2, 3):  # more than host memory holds; the tier has all of them
        recorded.ask(token)
    recorded.engine.reset_cache()
    first, second, new = recorded.ask(1), recorded.ask(3), recorded.ask(9)
    again = recorded.ask(3)
    explanations = recorded.explanations(*first, *second, *new, *again)
    causes = [{cause for cause in explanation["missed"] if cause != "tail"} for explanation in explanations]
    assert causes == [{"reset"}, {"reset"}, {"new"}, set()]
