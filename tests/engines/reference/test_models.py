# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.reference.zoo import greedy, random_prompts, tiny_model

from kvoffload.engines.reference import Engine, SamplingParams
from kvoffload.engines.reference.models import build_random_model, load_model
from kvoffload.errors import ConfigError


def test_a_saved_model_is_served(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    prompt = random_prompts(1, 20, 20)[0]
    expected, _ = greedy(model, prompt, 5)
    with Engine(load_model(str(tmp_path))) as engine:
        assert engine.generate([prompt], SamplingParams(max_tokens=5)) == [expected]


def test_what_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="multiple"):
        build_random_model(hidden=30, heads=4)
    with pytest.raises(ConfigError, match="hybrid"):
        build_random_model("typo")
