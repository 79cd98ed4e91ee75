# SPDX-License-Identifier: Apache-2.0
"""A small inference engine for Hugging Face models. The demo uses it, and it is the example of an engine adapter."""

from __future__ import annotations

from kvoffload.engines.reference.engine import Engine, EngineOptions
from kvoffload.engines.reference.models import build_random_model, load_model
from kvoffload.engines.reference.request import Request, SamplingParams, State

__all__ = ["Engine", "EngineOptions", "Request", "SamplingParams", "State", "build_random_model", "load_model"]
