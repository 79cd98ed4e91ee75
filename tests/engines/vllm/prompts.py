# SPDX-License-Identifier: Apache-2.0
"""The prompts of all scenarios, the same in every process."""

from __future__ import annotations

from tests.engines.greedy import Prompt, random_tokens
from tests.engines.models import HEAD_DIM

BLOCK_TOKENS = 32
"""GPU block size in the lane: small, so that short prompts have many blocks."""

BLOCK_BYTES = 4 * 2 * BLOCK_TOKENS * 2 * HEAD_DIM * 4
"""The bytes of the Llama's block: layers, keys and values, tokens, KV heads, head size, float32."""


def long_prompts(count: int = 8, length: int = 1000) -> list[Prompt]:
    """Prompts of 31 full blocks and a piece."""
    return [Prompt(f"long{n}", random_tokens(100 + n, length)) for n in range(count)]


def crowd(count: int = 64) -> list[Prompt]:
    """Requests in families of eight that share the first half; they generate enough to need new blocks on the way."""
    prompts = []
    for n in range(count):
        shared = random_tokens(1000 + n // 8, 6 * BLOCK_TOKENS)
        own = random_tokens(2000 + n, BLOCK_TOKENS + 40 * (n % 5))
        prompts.append(Prompt(f"crowd{n}", shared + own, new_tokens=48))
    return prompts


def short_prompts(count: int = 6) -> list[Prompt]:
    """Shorter than Gemma's window of 512 tokens, with their answers."""
    return [Prompt(f"short{n}", random_tokens(300 + n, 330)) for n in range(count)]


def many_prompts(count: int = 150) -> list[Prompt]:
    """Prompts of three or four full blocks and a piece."""
    return [Prompt(f"many{n}", random_tokens(700 + n, 100 + 37 * n % 50), new_tokens=6) for n in range(count)]


def branches() -> list[Prompt]:
    """Prompts that leave a long prompt at various places, also inside a block: a window must be found behind each."""
    return [
        Prompt(f"branch{cut}", long_prompts(1)[0].token_ids[:cut] + random_tokens(400 + cut, 150))
        for cut in (96, 500, 512, 700, 992)
    ]


ONE_BLOCK_A_STEP = {"max_num_batched_tokens": BLOCK_TOKENS, "max_num_seqs": 16}
"""For models with states: on the CPU platform vLLM itself fails where a step computes more than a block of a prompt."""
STATE_PROMPT_TOKENS = 300


def state_prompts(count: int = 6) -> list[Prompt]:
    """Prompts of nine full blocks and a piece, for models with recurrent states, which compute a block in a step."""
    return [Prompt(f"state{n}", random_tokens(500 + n, STATE_PROMPT_TOKENS)) for n in range(count)]


def state_branches() -> list[Prompt]:
    """Prompts that leave the first of those at various places, also inside a block."""
    stem = state_prompts(1)[0].token_ids
    return [Prompt(f"leaves{cut}", stem[:cut] + random_tokens(600 + cut, 70)) for cut in (64, 100, 256)]


def family(name: str) -> list[Prompt]:
    if name == "llama":
        return [*long_prompts(), *crowd()]
    if name == "long":
        return long_prompts()
    if name == "many":
        return many_prompts()
    if name == "states":
        return [*state_prompts(), *state_branches(), *crowd(16)]
    return [*long_prompts(6), *short_prompts(), *branches()]
