# SPDX-License-Identifier: Apache-2.0
"""Random queues in virtual time: arrivals, priorities, aborts, tiers of all speeds, host memory of any size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from tests.connector.queue_rig import BLOCK_BYTES, BT, Prompt, QueueRig, throughput
from tests.sizes import by_size

from kvoffload.base import OffloadKey, ReqContext, TransferResult
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector.ahead import MOST_BLOCKS, REST_STEPS
from kvoffload.connector.engine import EngineStep, ScheduledRequest
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler


def random_rig(random: Random, policies: Sequence[str] = ("cost", "cost", "always")) -> QueueRig:
    disks = [
        (math.exp(random.uniform(math.log(0.1), math.log(20))), random.choice([None, None, random.uniform(0, 0.2)]))
        for _ in range(random.randint(1, 3))
    ]
    return QueueRig(
        disks,
        host_blocks=round(math.exp(random.uniform(math.log(4), math.log(2000)))),
        policy=random.choice(policies),
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


@pytest.mark.parametrize("seed", range(by_size(25, 1000)))
def test_every_request_is_served_and_nothing_is_left(seed: int) -> None:
    random = Random(seed)
    rig = random_rig(random)
    prompts = random_prompts(random, rig.tokens_per_s)
    for tier in rig.tiers:
        for prompt in prompts:
            if random.random() < 0.7:
                tier.keys.update(prompt.keys[: random.randint(0, len(prompt.keys))])
    rig.check_each = 16
    rig.serve(prompts)
    rig.check()
    for prompt in prompts:
        assert prompt.first_token_s is not None or prompt.abort_s < math.inf
    wanted = Counter(key for prompt in prompts for key in prompt.keys)
    if rig.manager.primary_tier.num_blocks >= len(wanted):
        reads = Counter(key for tier in rig.tiers for key in tier.reads.elements())
        assert max(reads.values(), default=0) <= 1, "a block is read twice"
    for tier in rig.tiers:
        # A block that would come too late gives up its place. If others overtake its request, it is of use again.
        most = 1 if len({prompt.priority for prompt in prompts}) == 1 else 2
        assert all(count <= most * wanted[key] for key, count in tier.reads.items()), "a block is read in vain"
    stats = rig.manager.get_stats()
    assert stats[("claimed_blocks",)] == stats[("promotions_in_flight",)] == 0
    assert rig.manager.primary_tier.slots.num_busy == 0


def test_first_tokens_come_no_later_than_without_tiers_in_sum() -> None:
    """A single one may, because others overtake a request that waits for its blocks."""
    sums_s = {True: 0.0, False: 0.0}
    for seed in range(by_size(15, 300)):
        random = Random(seed)
        rig = random_rig(random, policies=["cost"])
        prompts = random_prompts(random, rig.tokens_per_s)
        for tier in rig.tiers:
            for prompt in prompts:
                if random.random() < 0.7:
                    tier.keys.update(prompt.keys[: random.randint(0, len(prompt.keys))])
        num_blocks = rig.manager.primary_tier.num_blocks
        plain = QueueRig(host_blocks=num_blocks, budget=rig.budget, most_running=rig.most_running)
        for each in (rig, plain):
            served = [replace(prompt, abort_s=math.inf, block_ids=[]) for prompt in prompts]
            each.serve(served)
            sums_s[each is rig] += sum(prompt.first_token_s - prompt.arrival_s for prompt in served)  # type: ignore[operator]
    assert sums_s[True] <= 0.9 * sums_s[False]


@cache
def serve_documents(
    load: float, disk: float | None, policy: str = "cost", num_requests: int = 80
) -> tuple[Prompt, ...]:
    """Prompts over 100 documents, of which host memory holds a quarter and the disk, if there is one, holds all."""
    random = Random(1)
    documents = {f"d{n}": BT * random.randint(16, 64) for n in range(100)}
    rig = QueueRig([] if disk is None else [(disk, None)], policy=policy)
    rig.serve([Prompt(f"w{name}", name, size) for name, size in documents.items()])
    prompts, at_s = [], 0.0
    for n, name in enumerate(random.choices([*documents], k=num_requests)):
        prompts.append(Prompt(f"r{n}", name, documents[name] + 8, arrival_s=at_s))
        at_s += random.expovariate(1.0) * documents[name] / rig.tokens_per_s / load
    rig.serve(prompts)
    rig.check()
    return tuple(prompts)


def reached(prompts: tuple[Prompt, ...]) -> float:
    return throughput(prompts, 2000.0)


@pytest.mark.parametrize("disk", [0.3, 0.6, 1.0])
def test_a_saturated_engine_and_its_disk_hardly_pause(disk: float) -> None:
    """In a fluid model, the engine and the disk work side by side and never pause."""
    none = reached(serve_documents(10.0, None))
    always, cost = (reached(serve_documents(10.0, disk, policy)) for policy in ("always", "cost"))
    assert cost >= 0.8 * none * (1 + disk)
    assert cost >= always


@pytest.mark.parametrize("disk", [0.3, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("load", [0.5, 0.9])
def test_no_quantile_is_later_than_without_a_disk(load: float, disk: float) -> None:
    found = [
        sorted(p.first_token_s - p.arrival_s for p in serve_documents(load, way))  # type: ignore[operator]
        for way in (None, disk)
    ]
    for rank in (39, 71, 78):
        without, with_disk = (ttft_s[rank] for ttft_s in found)
        assert with_disk <= 1.05 * without


@pytest.mark.parametrize("has_other", [False, True])
def test_a_request_does_not_miss_its_turn_for_a_small_gain(has_other: bool) -> None:
    """It would wait for 0.21 s to save 0.11 s. Another one, which fills the next two steps, would overtake it."""
    rig = QueueRig([(1.5, None)])
    prompt, other = Prompt("r", "d0", 40 * BT), Prompt("other", "d1", 60 * BT)
    rig.tiers[0].keys.update(prompt.keys)
    rig.serve([prompt, other] if has_other else [prompt])
    assert prompt.external == (0 if has_other else 39 * BT)
    alone = Prompt("alone", "d0", 40 * BT)
    QueueRig().serve([alone, Prompt("other", "d1", 60 * BT)])
    assert prompt.first_token_s <= alone.first_token_s


@pytest.mark.parametrize(("load", "most"), [(0.5, 1.25), (0.9, 1.35)])
def test_requests_that_wait_for_a_fast_disk_do_not_drive_others_to_computing(load: float, most: float) -> None:
    """They compute little, so they delay a request that waits beside them by little."""
    cost, always = (
        sum(p.first_token_s - p.arrival_s for p in serve_documents(load, 3.0, way))  # type: ignore[operator]
        for way in ("cost", "always")
    )
    assert cost <= most * always


def test_requests_read_in_the_order_of_their_turns() -> None:
    rig = QueueRig([(0.5, None)], most_running=1)
    prompts = [Prompt(f"r{n}", f"d{n}", 40 * BT, priority=n == 1) for n in range(4)]
    for prompt in prompts:
        rig.tiers[0].keys.update(prompt.keys)
    rig.serve([Prompt("before", "before", 200 * BT), *prompts])
    read = [*dict.fromkeys(key[:2] for key in rig.tiers[0].reads)]
    assert read == [b"d0", b"d2", b"d3", b"d1"], "the second one has the least priority"


def only_reads(name: str, num_blocks: int) -> Prompt:
    """A request that only prepares another one."""
    prompt = Prompt(name, name, num_blocks * BT)
    prompt.kv_transfer_params = {"kvoffload": {"prefetch": True}}
    return prompt


def test_a_request_that_only_reads_is_the_last_in_the_queue() -> None:
    rig = QueueRig([(0.5, None)], most_running=1)
    ahead, *others = prompts = [only_reads("ahead", 40), *(Prompt(f"r{n}", f"d{n}", 40 * BT) for n in range(3))]
    for prompt in prompts:
        rig.tiers[0].keys.update(prompt.keys)
    rig.serve([Prompt("before", "before", 200 * BT), *prompts])
    rig.check()
    assert [*dict.fromkeys(key[:2] for key in rig.tiers[0].reads)] == [b"d0", b"d1", b"d2", b"ah"]
    assert ahead.external == 39 * BT, "all blocks of it are read, although the engine computes twice as fast"
    assert all(prompt.first_token_s is not None for prompt in others)


@pytest.mark.parametrize("num_others", [0, 3])
def test_a_request_that_only_reads_is_served_after_its_time_limit(num_others: int) -> None:
    """Whether its own reads are slow, or those of others."""
    rig = QueueRig([(1e-4, None)], policy="always", max_wait_s=5.0)
    prompts = [only_reads("ahead", 8), *(Prompt(f"r{n}", f"d{n}", 80 * BT) for n in range(num_others))]
    for prompt in prompts:
        rig.tiers[0].keys.update(prompt.keys)
    for prompt in prompts:
        rig._arrive(prompt)
    start_s = rig.clock()
    while rig.waiting or rig.running:
        rig.step(start_s)
        rig.check()
        assert rig.clock() - start_s < 11.0, "two time budgets: before the turn and after it"
    assert prompts[0].first_token_s >= 5.0


def count_lookups(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of blocks of each lookup from now on."""
    looked: list[int] = []
    real = rig.manager.lookup_prefix
    monkeypatch.setattr(
        rig.manager,
        "lookup_prefix",
        lambda keys, *args, **options: looked.append(len(keys)) or real(keys, *args, **options),
    )
    return looked


def test_each_step_looks_at_few_of_the_requests_that_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig([(0.01, None)])
    for n in range(2000):
        prompt = Prompt(f"r{n}", f"d{n}", 64 * BT)
        rig.tiers[0].keys.update(prompt.keys)
        rig.scheduler.on_new_request(prompt)
    looked = count_lookups(rig, monkeypatch)
    for _ in range(5):
        looked.clear()
        rig.scheduler.build_connector_meta(EngineStep())
        rig.clock.advance(0.1)
        assert sum(looked) <= MOST_BLOCKS + 64


def test_long_requests_are_looked_up_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig([(0.5, None)], host_blocks=20_000)
    prompts = [Prompt(f"r{n}", f"d{n}", 5 * MOST_BLOCKS * BT) for n in range(3)]
    for prompt in prompts:
        rig.tiers[0].keys.update(prompt.keys)
        rig.scheduler.on_new_request(prompt)
    looked = count_lookups(rig, monkeypatch)
    for _ in range(40):
        rig.scheduler.build_connector_meta(EngineStep())
        rig.clock.advance(0.1)
    assert 5 * MOST_BLOCKS < sum(looked) <= 45 * MOST_BLOCKS
    assert rig.tiers[0].reads, "all the same"


def test_a_step_looks_up_no_more_than_one_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tier has any of their blocks, so no tier's queue ends a step's lookups."""
    rig = QueueRig([(0.5, None)])
    for n in range(10):
        rig.scheduler.on_new_request(Prompt(f"r{n}", f"d{n}", 5 * MOST_BLOCKS * BT))
    looked = count_lookups(rig, monkeypatch)
    for step in range(1, 51):
        rig.scheduler.build_connector_meta(EngineStep())
        assert sum(looked) <= (step + 5) * MOST_BLOCKS
    assert len(looked) == 10, "each of them in the end"


def test_a_turn_comes_at_the_end_of_a_step() -> None:
    rig = QueueRig([(1.0, None)])
    running, *waiting = (Prompt(f"r{n}", f"d{n}", 10 * BT) for n in range(4))
    for prompt in (running, *waiting):
        rig.scheduler.on_new_request(prompt)
    blocks = ([*range(10)],)
    assert rig.scheduler.get_num_new_matched_tokens(running, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(running, blocks, 0)
    rig.scheduler.build_connector_meta(EngineStep((ScheduledRequest("r0", blocks, 0, 8 * BT, True),)))
    ahead = [rig.scheduler._requests[prompt.request_id].context.tokens_ahead for prompt in waiting]
    assert ahead == [8 * BT, 16 * BT, 24 * BT], "10, 20 and 30 blocks are ahead, and a step computes 8"


def test_a_request_whose_answers_hold_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig([(1.0, None)])
    prompts = [Prompt(f"r{n}", f"d{n}", 16 * BT) for n in range(10)]
    for prompt in prompts:
        rig.scheduler.on_new_request(prompt)
    looked = count_lookups(rig, monkeypatch)
    rig.scheduler.build_connector_meta(EngineStep())
    assert len(looked) == 10
    looked.clear()
    rig.scheduler.build_connector_meta(EngineStep())
    assert looked == []
    other = Prompt("other", "d3", 16 * BT)  # stores a block that the fourth one waits for
    rig.scheduler.on_new_request(other)
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(other, ([*range(17)],), 0)
    step = EngineStep((ScheduledRequest("other", ([*range(17)],), 0, 16 * BT, True),))
    looked.clear()
    rig.scheduler.build_connector_meta(step)
    for _ in range(REST_STEPS):
        rig.scheduler.build_connector_meta(EngineStep())
    assert len(looked) >= 1, "its first block is on its way"
    rig.check()


def test_requests_that_find_nothing_cost_little_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig([(1.0, None)])
    for n in range(10):
        rig.scheduler.on_new_request(Prompt(f"r{n}", f"d{n}", 16 * BT))
    asked, is_unchanged = list[str](), type(rig.manager).is_unchanged
    monkeypatch.setattr(
        type(rig.manager), "is_unchanged", lambda self, each: asked.append(each.req_id) or is_unchanged(self, each)
    )
    for _ in range(4 * REST_STEPS):
        rig.scheduler.build_connector_meta(EngineStep())
    assert 10 <= len(asked) <= 10 * 9


def queue_of(rig: QueueRig, prompts: Sequence[Prompt], num_steps: int) -> None:
    """Let the prompts queue for some steps of 0.5 s, in which another request decodes."""
    running = Prompt("running", "running", 2 * BT)
    for prompt in (running, *prompts):
        rig.scheduler.on_new_request(prompt)
    assert rig.scheduler.get_num_new_matched_tokens(running, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(running, ([0, 1, 2],), 0)
    for step in range(num_steps):
        blocks = ([0, 1, 2],) if not step else ()
        scheduled = ScheduledRequest("running", blocks, 2 * BT + step, 1, not step)
        rig.scheduler.build_connector_meta(EngineStep((scheduled,)))
        rig.clock.advance(0.5)


@pytest.mark.parametrize("lost", [0, 100])
def test_blocks_behind_a_lost_one_make_room_for_other_requests(lost: int) -> None:
    rig = QueueRig([(8.0, None)], host_blocks=256)
    first, second = Prompt("first", "d0", 193 * BT + 8), Prompt("second", "d1", 64 * BT + 8)
    for prompt in (first, second):
        rig.tiers[0].keys.update(prompt.keys)
    rig.tiers[0].failing.add(first.keys[lost])
    queue_of(rig, [first, second], 60)
    assert rig.scheduler.get_stats()["claimed_blocks",] <= lost + 64
    assert {*second.keys} <= rig.tiers[0].reads.keys()
    rig.check()


def test_a_hit_that_was_lost_in_the_queue_keeps_no_claims() -> None:
    """Its attention is in host memory. But the tier, which must ask its store, does not have its states."""
    rig = QueueRig([(8.0, 0.2)], host_blocks=256)
    groups = tuple(KVGroupLayout(kind, BT, BLOCK_BYTES) for kind in (GroupKind.FULL_ATTENTION, GroupKind.SINGLE_STATE))
    config = OffloadingConfig(cpu_bytes_to_use=512 * BLOCK_BYTES, secondary_tiers=({"type": "memory"},))
    rig.scheduler = OffloadingConnectorScheduler(rig.manager, EngineLayout(groups, BT, "hybrid"), config, rig.clock)
    prompt, context = Prompt("r", "d", 100 * BT + 8), ReqContext("stores")
    rig.manager.on_new_request(context)
    output = rig.manager.prepare_store(prompt.keys, context)
    assert output is not None
    rig.manager.complete_store(output.keys_to_store, context)
    rig.manager.on_request_finished(context)
    rig.scheduler.on_new_request(prompt)
    rig.scheduler.build_connector_meta(EngineStep())
    assert rig.scheduler.get_stats()["claimed_blocks",] == 100
    for _ in range(2 * REST_STEPS):
        rig.clock.advance(0.5)
        rig.scheduler.build_connector_meta(EngineStep())
    assert rig.scheduler.get_stats()["claimed_blocks",] == 0
    assert rig.scheduler.get_num_new_matched_tokens(prompt, 0) == (0, False)
    rig.manager.check_invariants()


def test_a_request_that_waits_for_gpu_blocks_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = QueueRig([(8.0, None)])
    prompt = Prompt("r", "d", 100 * BT + 8)
    rig.tiers[0].keys.update(prompt.keys)
    queue_of(rig, [prompt], 20)
    looked = count_lookups(rig, monkeypatch)
    for _ in range(20):
        assert rig.scheduler.get_num_new_matched_tokens(prompt, 0) == (100 * BT, True)
        rig.scheduler.build_connector_meta(EngineStep())
        rig.clock.advance(0.01)
    assert len(looked) <= 1
    rig.check()


def test_a_request_that_was_admitted_again_in_the_step_of_its_preemption_does_not_queue() -> None:
    """vLLM's reset of running requests reports them with the next step, which may already compute them again."""
    rig = QueueRig([(2.0, None)])
    again, other = Prompt("again", "d0", 16 * BT + 8), Prompt("other", "d1", 16 * BT + 8)
    rig.scheduler.on_new_request(again)
    for blocks in ([*range(20)], [*range(30, 50)]):
        assert rig.scheduler.get_num_new_matched_tokens(again, 0) == (0, False)
        rig.scheduler.update_state_after_alloc(again, (blocks,), 0)
        preempted = frozenset({"again"} if blocks[0] else ())
        scheduled = ScheduledRequest("again", (blocks,), 0, again.num_tokens, True)
        meta = rig.scheduler.build_connector_meta(EngineStep((scheduled,), preempted))
        results = tuple((0, TransferResult(job.job_id, success=True)) for job in meta.stores)
        rig.scheduler.update_connector_output(WorkerReport(results))
        rig.scheduler.reset_cache()
    rig.scheduler.on_new_request(other)
    rig.scheduler.build_connector_meta(EngineStep((ScheduledRequest("again", (), again.num_tokens, 1, False),)))
    assert rig.scheduler._requests["other"].context.tokens_ahead == 1


def test_time_in_the_queue_costs_no_budget_and_time_after_the_turn_does() -> None:
    rig = QueueRig([(1e-4, None)], policy="always", max_wait_s=2.0)
    prompt = Prompt("r", "d", 8 * BT)
    rig.tiers[0].keys.update(prompt.keys)
    context = ReqContext("r", tokens_ahead=1000)
    rig.manager.on_new_request(context)

    def is_answered_after(seconds: float) -> bool:
        rig.manager.on_schedule_end()
        rig.clock.advance(seconds)
        rig.manager.on_schedule_end()
        rig.check()
        return None not in rig.manager.lookup_prefix(prompt.keys, context)

    assert not is_answered_after(0.0)
    assert not is_answered_after(10.0), "five times its budget"
    context.tokens_ahead = None
    assert not is_answered_after(10.0), "until now it has waited for its turn"
    assert not is_answered_after(1.0)
    assert is_answered_after(1.5)


def test_a_tier_with_enough_to_read_begins_nothing_for_the_queue() -> None:
    rig = QueueRig([(1.0, None)])
    prompts = [Prompt(f"r{n}", f"d{n}", 100 * BT) for n in range(2)]
    contexts = [ReqContext(prompt.request_id, tokens_ahead=100_000) for prompt in prompts]
    for prompt, context in zip(prompts, contexts, strict=True):
        rig.tiers[0].keys.update(prompt.keys)
        rig.manager.on_new_request(context)
        rig.manager.lookup_prefix(prompt.keys, context)
        rig.manager.on_schedule_end()
    assert not rig.manager.reads_ahead()
    assert {*rig.tiers[0].reads} <= {*prompts[0].keys}
    rig.clock.advance(1.0)
    assert rig.manager.reads_ahead()
    rig.manager.lookup_prefix(prompts[1].keys, contexts[1])
    rig.manager.on_schedule_end()
    assert not {*rig.tiers[0].reads}.isdisjoint(prompts[1].keys)


def test_an_arrival_counts_with_the_share_that_recent_requests_computed() -> None:
    """A request that has not been looked up yet will probably find as much as they did."""
    rig = QueueRig([(100.0, None)])
    rig.serve([Prompt(f"w{n}", "d", 40 * BT) for n in range(40)])  # all but the first find 39 of 40 blocks
    waiting, other = Prompt("waiting", "d1", 10 * BT), Prompt("other", "d2", 40 * BT)
    for prompt in (waiting, other):
        rig.scheduler.on_new_request(prompt)
    assert rig.scheduler.get_num_new_matched_tokens(waiting, 0) == (0, False)
    assert rig.scheduler._requests["waiting"].context.tokens_behind < 20 * BT


def test_only_later_requests_are_behind_one_that_queues() -> None:
    rig = QueueRig([(1.0, None)])
    for n in range(3):
        rig.scheduler.on_new_request(Prompt(f"r{n}", f"d{n}", (n + 1) * 8 * BT))
    rig.scheduler.build_connector_meta(EngineStep())
    assert [rig.scheduler._requests[f"r{n}"].context.tokens_behind for n in range(3)] == [40 * BT, 24 * BT, 0]


def test_a_preempted_request_is_the_first_in_the_queue() -> None:
    rig = QueueRig([(1.0, None)])
    first, second = Prompt("first", "d0", 8 * BT), Prompt("second", "d1", 8 * BT)
    for prompt in (first, second):
        rig.scheduler.on_new_request(prompt)
    blocks = ([*range(8)],)
    assert rig.scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(first, blocks, 0)
    rig.scheduler.build_connector_meta(EngineStep((ScheduledRequest("first", blocks, 0, 4 * BT, True),)))
    waiting = rig.scheduler._requests["second"].context
    assert waiting.tokens_ahead == 8 * BT, "those of this step, and those that it leaves of the prompt"
    rig.tiers[0].keys.update(second.keys)
    rig.scheduler.reset_cache()  # so that the second one is looked up again
    rig.scheduler.build_connector_meta(EngineStep(preempted_request_ids=frozenset({"first"})))
    assert waiting.tokens_ahead == 8 * BT


# ------------------------------------------------------------------------------------------- from one turn to the next


def look_up(rig: QueueRig, keys: Sequence[OffloadKey], context: ReqContext, seconds: float = 0.0) -> list[bool | None]:
    """Let a step and ``seconds`` pass, and look ``keys`` up."""
    rig.manager.on_schedule_end()
    rig.clock.advance(seconds)
    rig.manager.on_schedule_end()
    rig.check()
    return rig.manager.lookup_prefix(keys, context)


def test_a_wait_whose_first_block_changes_stays_settled_between_events() -> None:
    rig = QueueRig([(1e-4, None)], policy="always", max_wait_s=1000.0)
    prompt = Prompt("r", "d", 8 * BT, own_tokens=0)
    rig.tiers[0].keys.update(prompt.keys)
    context = ReqContext("r", tokens_ahead=1000)
    rig.manager.on_new_request(context)
    look_up(rig, prompt.keys, context)
    context.tokens_ahead = None
    for first in (3, 5, 2):  # the engine's own cache grows and shrinks
        assert None in look_up(rig, prompt.keys[first:], context)
        rig.manager.on_schedule_end()
        assert rig.manager.is_unchanged(context)


def test_time_at_a_turn_counts_although_another_turn_follows() -> None:
    rig = QueueRig([(1e-4, None)], policy="always", max_wait_s=2.0)
    prompt = Prompt("r", "d", 8 * BT)
    rig.tiers[0].keys.update(prompt.keys)
    context = ReqContext("r")
    rig.manager.on_new_request(context)
    assert None in look_up(rig, prompt.keys, context)
    assert None in look_up(rig, prompt.keys, context, 1.5)
    context.tokens_ahead = 1000  # it is back in the queue
    for seconds in (0.0, 10.0):
        assert None in look_up(rig, prompt.keys, context, seconds)
    context.tokens_ahead = None
    assert None in look_up(rig, prompt.keys, context)
    assert None not in look_up(rig, prompt.keys, context, 1.0)


def test_a_request_that_loads_nothing_gives_its_claims_back_when_it_runs() -> None:
    rig = QueueRig([(1e-4, None)], policy="always")
    prompt = Prompt("r", "d", 8 * BT, kv_transfer_params={"max_offload_tokens": 0})
    rig.tiers[0].keys.update(prompt.keys)
    rig.scheduler.on_new_request(prompt)
    rig.scheduler.build_connector_meta(EngineStep())
    assert rig.scheduler.get_stats()["claimed_blocks",] > 0
    # By its turn, another request has left its prompt in the engine's own cache.
    assert rig.scheduler.get_num_new_matched_tokens(prompt, 7 * BT) == (0, False)
    rig.scheduler.update_state_after_alloc(prompt, ([*range(9)],), 0)
    step = EngineStep((ScheduledRequest("r", ([*range(9)],), 7 * BT, BT, True),))
    rig.scheduler.build_connector_meta(step)
    # Only the promotion in flight still claims them.
    assert len(rig.manager._waits.claimed) == len(rig.manager._waits.promoted)
    assert rig.manager._requests["r"].wait is None
    rig.check()


def test_requests_that_load_nothing_do_not_count_as_waits() -> None:
    rig = QueueRig([(1.0, None)])
    rig.serve([Prompt(f"r{n}", f"d{n}", 16 * BT) for n in range(10)])
    assert rig.manager._waits.lengths.stats() == {}


def test_reads_that_find_no_slot_are_not_listed() -> None:
    rig = QueueRig([(1e-3, None)], host_blocks=8, promotion_share=1.0)
    others = Prompt("other", "o", 6 * BT, own_tokens=0).keys
    assert rig.manager.prepare_store(others, ReqContext("other")) is not None  # and never ends
    prompt = Prompt("r", "d", 64 * BT, own_tokens=0)
    rig.tiers[0].keys.update(prompt.keys)
    context = ReqContext("r", tokens_ahead=100_000)
    rig.manager.on_new_request(context)
    for _ in range(20):
        look_up(rig, prompt.keys, context, 0.01)
    assert sum(each.num_blocks for each in rig.manager.weighed(context)) <= 2


def test_requests_that_find_nothing_cost_little_although_a_tier_cannot_tell_its_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = QueueRig([(1.0, None)])
    monkeypatch.setattr(type(rig.tiers[0]), "take_news", lambda self: None)
    for n in range(10):
        rig.scheduler.on_new_request(Prompt(f"r{n}", f"d{n}", 16 * BT))
    looked = count_lookups(rig, monkeypatch)
    for _ in range(4 * REST_STEPS):
        rig.scheduler.build_connector_meta(EngineStep())
    assert len(looked) <= 10 * REST_STEPS // 2
