# SPDX-License-Identifier: Apache-2.0
"""Test accepted and rejected drafts while vLLM's own schedulers drive the connector step by step, without a model.

The worker of ``scripted.py`` knows the tokens from which each position was computed. No position of a rejected draft
may be stored or restored, nor one whose next token the drafter has not seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.drafts import NUM_DRAFTS, Speculation
from tests.engines.vllm.steps import BLOCK, Steps, aborted, attention

from kvoffload.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

METHODS = ["eagle", "draft_model", "ngram", "mtp, stages"]
SCHEDULING = [False, True]


@pytest.fixture(params=[(method, each) for method in METHODS for each in SCHEDULING], ids=str)
def steps(request: pytest.FixtureRequest, drafts: dict[str, Speculation]) -> Iterator[Steps]:
    method, asynchronous = request.param
    if method == "ngram" and asynchronous:
        pytest.skip("vLLM drafts n-grams in the scheduler's process, and not asynchronously")
    if method != "ngram":
        request.getfixturevalue("drafts")  # or skips
    speculation = drafts[method]
    steps = Steps(
        speculation.target,
        asynchronous,
        num_gpu_blocks=40,
        speculative_config=speculation.config,
        slots=64,
        max_tokens_per_step=16,
        stages=2 if method == "mtp, stages" else 1,
    )
    yield steps
    steps.close()


def forget_device(steps: Steps) -> None:
    assert steps.scheduler.reset_prefix_cache()


def test_what_is_stored_was_accepted_and_comes_back(steps: Steps) -> None:
    chance = random.Random(5)
    ahead = steps.lookahead_tokens
    for number in range(12):
        prompt = [100 + number] + [chance.randrange(200, 300) for _ in range(chance.randrange(1, 30))]
        request = steps.add(f"r{number}", prompt, chance.randrange(1, 24))
        abort_at = chance.randrange(3, 12) if number % 4 == 3 else None
        count = 0
        while not request.is_finished():
            steps.step(token=chance.randrange(300, 400), accept=chance.randrange(NUM_DRAFTS + 1))
            count += 1
            if count == abort_at and not request.is_finished():
                steps.scheduler.finish_requests(request.request_id, aborted())
        steps.drain()
        tokens = list(request.all_token_ids)
        # All full blocks of computed tokens; the last token is never computed.
        stored = steps.stored_blocks(tokens)
        if abort_at is None:
            assert stored == list(range((len(tokens) - 1) // BLOCK))
        forget_device(steps)

        # Serve the same tokens again: the hit equals that of vLLM's own prefix cache, and the worker checks it.
        again = steps.add(f"again{number}", tokens, 6)
        loads = len(steps.loads())
        while not again.is_finished():
            steps.step(accept=chance.randrange(NUM_DRAFTS + 1))
        steps.drain()
        loaded = sum(len(job.destination.block_ids) for job in steps.loads()[loads:])
        assert loaded == max(0, min(len(tokens) - 1, len(stored) * BLOCK - ahead)) // BLOCK
        forget_device(steps)

        # A prompt that continues differently after a whole block, whose drafter saw another next token.
        cut = chance.randrange(len(stored) + 1) * BLOCK
        fork = steps.add(f"fork{number}", [*tokens[:cut], 450, 451], 6)
        loads = len(steps.loads())
        while not fork.is_finished():
            steps.step(accept=chance.randrange(NUM_DRAFTS + 1))
        steps.drain()
        loaded = sum(len(job.destination.block_ids) for job in steps.loads()[loads:])
        assert loaded == max(0, cut - ahead) // BLOCK
        forget_device(steps)


@pytest.mark.parametrize("asynchronous", SCHEDULING, ids=["sync", "async"])
def test_a_hit_is_as_long_as_in_vllms_own_prefix_cache(drafts: dict[str, Speculation], asynchronous: bool) -> None:
    """Full attention beside a window of smaller blocks: for prompts of every length, on the device and from host
    memory."""
    eagle = drafts["eagle"]
    steps = Steps(
        eagle.target,
        asynchronous,
        num_gpu_blocks=200,
        groups=[attention(block=2 * BLOCK), attention(window=6)],
        speculative_config=eagle.config,
        slots=200,
    )
    tokens = list(range(100, 148))
    steps.add("first", tokens, 1)
    steps.drain()
    manager = steps.scheduler.kv_cache_manager
    own = {}
    for length in range(1, len(tokens)):
        # Shorter prompts, and prompts that continue differently.
        for prompt in (tokens[:length], tokens[:length] + [9] * 9):
            own[tuple(prompt)] = manager.get_computed_blocks(steps.request("probe", prompt, 1))[1]
    forget_device(steps)
    assert set(own.values()) == {0, 8, 16, 24, 32}
    for prompt, hit in own.items():
        request = steps.add("again", list(prompt), 1)
        found = steps.scheduler.connector.get_num_new_matched_tokens(request, 0)[0]
        assert found == hit, len(prompt)
        steps.scheduler.finish_requests("again", aborted())
    steps.close()


def test_without_the_drop_hits_are_whole(drafts: dict[str, Speculation]) -> None:
    eagle = drafts["eagle"]
    config = eagle.config | {"disable_eagle_block_drop": True}
    steps = Steps(eagle.target, False, num_gpu_blocks=40, speculative_config=config, slots=64)
    request = steps.add("r", list(range(100, 117)), 1)
    steps.drain()
    assert steps.hit_blocks(list(request.all_token_ids)) == 4
    steps.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "custom_class", "model": "tests.engines.vllm.drafts.Proposer"}, "method 'custom_class'"),
        ({"method": "extract_hidden_states", "num_speculative_tokens": 1}, "method 'extract_hidden_states'"),
    ],
)
def test_a_method_that_was_not_proven_is_refused(
    drafts: dict[str, Speculation], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Steps(drafts["eagle"].target, False, speculative_config={"num_speculative_tokens": 3} | config)


def test_drafts_that_are_made_at_once_are_refused(drafts: dict[str, Speculation]) -> None:
    config = drafts["draft_model"].config | {"parallel_drafting": True}
    with pytest.raises(ConfigError, match="'draft_model' with parallel drafting"):
        Steps(drafts["draft_model"].target, False, speculative_config=config)


def test_mtp_with_several_modules_is_refused(drafts: dict[str, Speculation], tmp_path: Path) -> None:
    target = Path(drafts["mtp"].target)
    for each in target.iterdir():
        (tmp_path / each.name).symlink_to(each)
    config = json.loads((target / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="several MTP modules"):
        Steps(str(tmp_path), False, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
