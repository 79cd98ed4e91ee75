# SPDX-License-Identifier: Apache-2.0
"""Images over a persistent tier on the real vLLM: hits of equal images, and no KV of another image, whatever a client
calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.models import write_paligemma
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.prompts import BLOCK_TOKENS
from tests.engines.vllm.test_new_weights import extra_with
from tests.engines.vllm.test_serving import assert_idle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WHOLE = 5 * BLOCK_TOKENS
"""The tokens in full blocks of a prompt: 16 of an image, 150 of text, and two that the processor adds."""


def test_images_are_told_apart_by_their_content(tmp_path: Path) -> None:
    model = write_paligemma(tmp_path / "model").path
    extra = extra_with("disk", tmp_path) | {"cpu_bytes_to_use": "64MiB"}

    def ask(*asked: tuple[int, str | None]) -> tuple[list[list[int]], list[int]]:
        seen = run_child("images", model=model, extra=extra, asked=asked)
        assert_idle(seen["idle"])
        return [answer for answer, _ in seen["answers"]], [cached for _, cached in seen["answers"]]

    alone = run_child("images", model=model, extra=None, asked=[(number, None) for number in range(4)])
    right = [answer for answer, _ in alone["answers"]]
    assert len({str(answer) for answer in right}) == 4, "the answer depends on the image"

    answers, cached = ask((0, None), (1, "a"))
    assert (answers, cached) == (right[:2], [0, 0])

    # After a restart, equal images are hits. The name of one does not help another.
    answers, cached = ask((0, None), (1, "a"), (2, None))
    assert (answers, cached) == (right[:3], [WHOLE, WHOLE, 0])
    answers, cached = ask((2, "a"), (3, "0a" * 32))
    assert (answers, cached) == ([right[2], right[3]], [0, 0])

    # vLLM's processor takes two images with one name for the first, and nothing of that may be stored.
    answers, _ = ask((3, "b"), (0, "b"), (0, "b"))
    assert answers[0] == right[3]
    answers, cached = ask((0, "b"))
    assert (answers, cached) == ([right[0]], [0])
    answers, _ = ask((3, "b"))
    assert answers == [right[3]]
