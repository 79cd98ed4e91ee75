# SPDX-License-Identifier: Apache-2.0
"""Random queues in virtual time: arrivals, priorities, aborts, tiers of all speeds, host memory of any size."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from tests.connector.queue_rig import BT, Prompt, QueueRig, throughput
from tests.sizes import by_size


def random_rig(random: Random) -> QueueRig:
    disks = [
        (math.exp(random.uniform(math.log(0.1), math.log(20))), random.choice([None, None, random.uniform(0, 0.2)]))
        for _ in range(random.randint(1, 3))
    ]
    return QueueRig(
        disks,
        host_blocks=round(math.exp(random.uniform(math.log(4), math.log(2000)))),
        policy=random.choice(["cost", "cost", "always"]),
        budget=random.choice([64, 512, 4096]),
        most_running=random.choice([1, 4, 32]),
    )


def random_prompts(random: Random, tokens_per_s: float) -> list[Prompt]:
    documents = {f"d{n}": BT * random.randint(1, 64) for n in range(random.randint(1, 20))}
    load, at_s, prompts = math.exp(random.uniform(-1, 2)), 0.0, []
    for n in range(random.randint(1, 30)):
        document = random.choice([*documents])
        prompt = Prompt(
            f"r{n}", document, documents[document] + 8, arrival_s=at_s, priority=random.choice([0, 0, 0, 1])
        )
        if random.random() < 0.15:
            prompt.abort_s = at_s + random.expovariate(1.0)
        prompts.append(prompt)
        at_s += random.expovariate(1.0) * prompt.num_prompt_tokens / tokens_per_s / load
    return prompts


@pytest.mark.parametrize("seed", range(by_size(40, 1000)))
def test_every_request_is_served_and_nothing_is_left(seed: int) -> None:
    random = Random(seed)
    rig = random_rig(random)
    prompts = random_prompts(random, rig.tokens_per_s)
    for tier in rig.tiers:
        for prompt in prompts:
            if random.random() < 0.7:
                tier.keys.update(prompt.keys[: random.randint(0, len(prompt.keys))])
    rig.serve(prompts)
    rig.check()
    for prompt in prompts:
        assert prompt.first_token_s is not None or prompt.abort_s < math.inf
    wanted = Counter(key for prompt in prompts for key in prompt.keys)
    for tier in rig.tiers:
        assert all(count <= wanted[key] for key, count in tier.reads.items()), "a block is read in vain"
    stats = rig.manager.get_stats()
    assert stats[("claimed_blocks",)] == stats[("promotions_in_flight",)] == 0
    assert rig.manager.primary_tier.slots.num_busy == 0


def test_a_fast_disk_takes_work_off_a_saturated_engine() -> None:
    random = Random(1)
    documents = {f"d{n}": BT * random.randint(16, 64) for n in range(100)}
    reached = {}
    for policy in ("none", "cost"):
        rig = QueueRig([(3.0, None)] if policy == "cost" else [], policy=policy)
        rig.serve([Prompt(f"w{name}", name, size) for name, size in documents.items()])
        names = Random(2).choices([*documents], k=60)
        prompts = [Prompt(f"r{n}", name, documents[name] + 8) for n, name in enumerate(names)]
        rig.serve(prompts)
        reached[policy] = throughput(prompts, rig.tokens_per_s)
    assert reached["cost"] > 2 * reached["none"]
