# SPDX-License-Identifier: Apache-2.0
"""The work of the child processes: each function starts one engine, drives it, and returns its observations as JSON
values."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType
from typing import Any

from tests.engines.greedy import Prompt
from tests.engines.models import IMAGE_SIZE
from tests.engines.virtual_time import CHUNK_TOKENS, SIDE_BY_SIDE, Observed, Workload, serve
from tests.engines.vllm.harness import Engine, idle_state
from tests.engines.vllm.judged import judged  # noqa: F401 - a scenario
from tests.engines.vllm.prompts import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    ONE_BLOCK_A_STEP,
    crowd,
    family,
    long_prompts,
    many_prompts,
    state_branches,
    state_prompts,
)
from tests.engines.vllm.second_node import SecondNode

from kvoffload.connector import OffloadingConnectorWorker


def baseline(model: str, family: str, **options: Any) -> dict[str, Any]:
    """vLLM alone: every prompt's greedy tokens, and how far from a tie the closest of them was."""
    engine = Engine(model, **({"max_num_seqs": 16} | options))
    answers = {}
    prompts = _family(family)
    for prompt, output in zip(prompts, engine.generate(prompts, logprobs=2), strict=True):
        best = [sorted((p.logprob for p in position.values()), reverse=True) for position in output.outputs[0].logprobs]
        gap = min(first - second for first, second, *_ in best)
        answers[prompt.name] = {"tokens": list(output.outputs[0].token_ids), "gap": gap}
    engine.close()
    return answers


_family = family


FAULTY = {"spec_name": "FaultySpec", "spec_module_path": "tests.engines.vllm.faulty_spec"}
OUTCOMES = ("load_jobs|ok", "load_jobs|failed", "store_jobs|ok", "store_jobs|failed")


def _failing_rounds(engine: Engine, prompts: list[Prompt]) -> list[tuple[dict[str, list[int]], dict[str, int]]]:
    """Answers and cached tokens of three rounds or more (40 at most) over transfers that fail at random, until loads
    and stores have both failed and succeeded, and a prompt's full blocks were all cached. Each fourth round begins with
    an empty host memory, so that all is stored again."""
    rounds: list[tuple[dict[str, list[int]], dict[str, int]]] = []
    full = {prompt.name: len(prompt.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts}
    while len(rounds) < 40:
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=len(rounds) % 4 == 0)
        rounds.append(engine.answers(prompts))
        is_full = any(cached[name] == full[name] for _, cached in rounds for name in full)
        if len(rounds) >= 3 and is_full and all(engine.metrics().get(outcome) for outcome in OUTCOMES):
            break
    engine.drain()
    return rounds


def evict_and_return(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Long prompts one after the other, far more than the device holds; then all of them again."""
    prompts = long_prompts()
    engine = Engine(model, extra=extra, gpu_blocks=100)  # holds three of the eight prompts
    result: dict[str, Any] = {}
    result["first"], result["first_cached"] = engine.answers(prompts)
    engine.drain()
    engine.forget_device_cache()
    result["again"], result["again_cached"] = engine.answers(prompts)
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)

    # The same engine, many at once: preemption, aborts, resets in the middle.
    result["waves"] = waves = [_wave(engine, seed, reset=seed == 2) for seed in range(4)]
    while not engine.metrics().get("fenced_jobs") and len(waves) < 40:  # all stores had ended when they were to be
        waves.append(_wave(engine, seed=len(waves) + 1, reset=False))
    result["preemptions"] = engine.vllm_metric("vllm:num_preemptions")
    result["idle_after_waves"] = idle_state(engine)
    result["metrics_after_waves"] = engine.metrics()
    result["memory"] = _memory_of_kvoffload_after_waves(engine)
    engine.llm.reset_prefix_cache(reset_connector=True)
    result["idle_after_reset"] = idle_state(engine)
    engine.close()
    return result


def two_tiers(model: str, directory: str, *, is_tiered: bool) -> dict[str, Any]:
    """Serve 100 requests for a few prompts, one after the other, over a fast and a slow tier, or over none.

    After half of the requests, the fast tier becomes the slowest. Returns the seconds and the answer of each request.
    """
    from tests.engines.vllm import paced_tiers

    prompts = [Prompt(each.name, each.token_ids, 4) for each in long_prompts()]
    num_bytes = len(prompts[0].token_ids) // BLOCK_TOKENS * BLOCK_BYTES
    paced_tiers.BYTES_PER_S.update(fast=num_bytes / 0.01, slow=num_bytes / 0.05)
    extra = {
        "cpu_bytes_to_use": 70 * BLOCK_BYTES,
        "record_trace": f"{directory}/trace.jsonl",
        "secondary_tiers": [
            {"type": "paced", "name": name, "path": f"{directory}/{name}", "max_bytes": "1GiB", "cascade": "on_store"}
            for name in ("fast", "slow")
        ],
    }
    engine = Engine(model, extra=extra if is_tiered else None, gpu_blocks=70)  # holds two of the eight prompts
    rng, answers, seconds = random.Random(4), [], []
    order = [*range(len(prompts)), *(rng.randrange(len(prompts)) for _ in range(100 - len(prompts)))]
    for number, at in enumerate(order):
        if number == len(order) // 2:
            paced_tiers.BYTES_PER_S["fast"] = num_bytes / 3
        begun_s = monotonic()
        answers.append(engine.answers([prompts[at]])[0])
        seconds.append(monotonic() - begun_s)
        engine.drain()
    metrics = engine.metrics() if is_tiered else {}
    engine.close()
    return {"answers": answers, "seconds": seconds, "metrics": metrics}


def steps_to_first_token(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Of a prompt that is computed, that is on the device, and that is in host memory, while four others decode. All
    loads count as short."""
    from kvoffload.connector.short_loads import ShortLoads

    ShortLoads.fits = lambda self, *_: self._is_on  # type: ignore[method-assign]
    engine = Engine(model, extra=extra)
    llm = engine.llm.llm_engine
    prompt = long_prompts(1)[0]
    others = itertools.count()
    steps: dict[str, int] = {}
    answers: dict[str, list[int]] = {}
    for how in ("computed", "on the device", "in host memory"):
        for each in many_prompts(4):
            name, own = f"other{next(others)}", Prompt(each.name, each.token_ids, 40)
            llm.add_request(name, {"prompt_token_ids": list(own.token_ids)}, engine.parameters(own))
        for _ in range(6):
            llm.step()
        if how == "in host memory":
            engine.connector.scheduler.block_pool.evict_blocks({*range(400)})
        llm.add_request(how, {"prompt_token_ids": list(prompt.token_ids)}, engine.parameters(prompt))
        count = 0
        while how not in answers:
            outputs = llm.step()
            count += how not in steps
            for output in outputs:
                if output.request_id == how and output.outputs[0].token_ids:
                    steps.setdefault(how, count)
                    if output.finished:
                        answers[how] = list(output.outputs[0].token_ids)
        while llm.has_unfinished_requests():
            llm.step()
        engine.drain()
    result = {"steps": steps, "answers": answers, "metrics": engine.metrics(), "idle": idle_state(engine)}
    engine.close()
    return result


def late_copies(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Every copy goes through the CUDA backend and a fake driver."""
    from tests.cpu.copy import fake_cuda
    from tests.engines.vllm.fake_cuda_spec import sleep_and_wake
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    prompts = long_prompts()
    spec = {"spec_name": "FakeCudaSpec", "spec_module_path": "tests.engines.vllm.fake_cuda_spec"}
    engine = Engine(model, extra={**extra, **spec}, gpu_blocks=100)
    result: dict[str, Any] = {}
    result["first"], _ = engine.answers(prompts)
    engine.drain()
    engine.forget_device_cache()
    result["again"], result["again_cached"] = engine.answers(prompts)
    result["waves"] = [_wave(engine, seed, reset=seed == 1, count=32) for seed in range(2)]
    engine.answers(prompts)
    sleep_and_wake(get_kv_transfer_group())
    engine.forget_device_cache()
    result["woken"], result["woken_cached"] = engine.answers(prompts)
    engine.drain()
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    fake = fake_cuda.load()
    result["driver"] = {what: fake.count(what) for what in ("batches", "copies", "pageable", "registrations")}
    engine.close()
    result["after_shutdown"] = {what: fake.count(what) for what in ("faults", "registrations")}
    return result


def _memory_of_kvoffload_after_waves(engine: Engine) -> list[int]:
    """Bytes of Python objects made by kvoffload's code that are alive after each of some equal waves."""
    tracemalloc.start()
    sizes = []
    for _ in range(4):
        _wave(engine, seed=4, reset=False)
        engine.drain()
        engine.llm.reset_prefix_cache(reset_connector=True)
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/kvoffload/*")])
        sizes.append(sum(trace.size for trace in snapshot.traces))
    tracemalloc.stop()
    return sizes


def _wave(engine: Engine, seed: int, reset: bool, count: int = 64) -> dict[str, Any]:
    """All of the crowd at once, some of them aborted at some step; vLLM's own cache forgotten before."""
    engine.forget_device_cache()
    rng = random.Random(seed)
    prompts = crowd(count)
    rng.shuffle(prompts)
    fate = {prompt.name: rng.randrange(1, 60) for prompt in rng.sample(prompts, count // 5)}
    llm = engine.llm.llm_engine
    ids = {}
    for prompt in prompts:
        ids[prompt.name] = f"{prompt.name}-{seed}"
        llm.add_request(ids[prompt.name], {"prompt_token_ids": list(prompt.token_ids)}, engine.parameters(prompt))
    answers: dict[str, list[int]] = {}
    cached, steps, tries, resets = 0, 0, 0, 0
    by_id = {request_id: name for name, request_id in ids.items()}
    while llm.has_unfinished_requests():
        steps += 1
        for output in llm.step():
            if output.finished:
                name = by_id[output.request_id]
                if name not in fate or len(output.outputs[0].token_ids) == _new_tokens(name):
                    answers[name] = list(output.outputs[0].token_ids)
                    cached += int(output.num_cached_tokens or 0)
        doomed = [ids[name] for name, step in fate.items() if step == steps and name not in answers]
        if doomed:
            llm.abort_request(doomed)
        # A bounded number of times: steps that only wait for loads pass quickly, and a reset at every twenty of them
        # would take away all progress on a slow machine. If vLLM refused them all, tries go on until one succeeds.
        is_due = steps % 20 == 10 if tries < 12 else steps % 5 == 0 and not resets
        if reset and is_due:
            tries += 1
            resets += _reset_in_the_middle(engine)
    return {"answers": answers, "cached": cached, "steps": steps, "resets": resets, "aborted": sorted(fate)}


def saturated(
    model: str, extra: dict[str, Any], requests: int, remove: str | None = None, kill: int | None = None
) -> dict[str, Any]:
    """Serve many requests, most of which queue at any time, and abort a tenth of them.

    After a third of the answers, the directory ``remove`` disappears, and after two thirds, the process ``kill`` dies.
    """
    engine = Engine(model, extra=extra, gpu_blocks=100, max_num_seqs=16)
    llm, rng = engine.llm.llm_engine, random.Random(requests)
    prompts = [Prompt(prompt.name, prompt.token_ids, 4) for prompt in crowd()]
    waiting = {f"r{number}": rng.choice(prompts) for number in range(requests)}
    doomed = set(rng.sample(sorted(waiting), requests // 10))
    names = {request_id: prompt.name for request_id, prompt in waiting.items()}
    answers, most_queued, metrics = list[tuple[str, list[int]]](), 0, {"before": engine.metrics()}
    running: set[str] = set()
    while waiting or llm.has_unfinished_requests():
        while waiting and len(running) < 100:
            request_id, prompt = waiting.popitem()
            llm.add_request(request_id, {"prompt_token_ids": list(prompt.token_ids)}, engine.parameters(prompt))
            running.add(request_id)
        most_queued = max(most_queued, len(engine.core.scheduler.waiting))
        for output in llm.step():
            if output.finished:
                running.discard(output.request_id)
                if output.outputs[0].finish_reason != "abort":
                    answers.append((names[output.request_id], list(output.outputs[0].token_ids)))
        if aborted := [request_id for request_id in running & doomed if rng.random() < 0.02]:
            llm.abort_request(aborted)
            running.difference_update(aborted)
        if remove is not None and len(answers) > requests // 3:
            metrics["whole"] = engine.metrics()
            shutil.rmtree(remove)
            remove = None
        if kill is not None and len(answers) > requests * 2 // 3:
            metrics.setdefault("whole", engine.metrics())
            os.kill(kill, signal.SIGKILL)
            kill = None
    engine.drain()
    result = {"answers": answers, "most_queued": most_queued, "metrics": metrics, "idle": idle_state(engine)}
    engine.close()
    return result


def _new_tokens(name: str) -> int:
    return next(prompt.new_tokens for prompt in crowd() if prompt.name == name)


def _reset_in_the_middle(engine: Engine) -> int:
    """Reset vLLM's cache and kvoffload. vLLM refuses, and reports that, while a load is in flight.

    In this case nothing is reset, and a later call succeeds.
    """
    try:
        return int(engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
    except RuntimeError as error:
        if "remote KV transfer" not in str(error):
            raise
        return 0


def faults(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Load a corrupted block, to check that the comparison notices; then make loads and stores fail at random."""
    from tests.engines.vllm.faulty_spec import PLAN

    prompts = long_prompts(4)
    engine = Engine(model, extra=extra | FAULTY, gpu_blocks=100)
    result: dict[str, Any] = {}
    engine.answers(prompts)
    engine.drain()
    engine.forget_device_cache()
    PLAN.corrupt_loads = 1
    result["corrupted"], result["corrupted_cached"] = engine.answers(prompts)
    engine.drain()

    PLAN.fail_load, PLAN.fail_store, PLAN.refuse_to_start, PLAN.lag_polls = 0.3, 0.3, 0.1, 3
    result["waves"] = [_wave(engine, seed, reset=False) for seed in range(20, 22)]
    result["rounds"] = [answers for answers, _ in _failing_rounds(engine, prompts)]
    PLAN.fail_load = PLAN.fail_store = 1.0
    engine.drain()
    engine.forget_device_cache()
    result["nothing_works"], _ = engine.answers(prompts)
    engine.drain()
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def hybrid(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Serve Gemma, which has sliding windows and full attention over the same tensors."""
    from tests.engines.vllm.faulty_spec import PLAN

    prompts = _family("gemma")
    firsts = [prompt for prompt in prompts if not prompt.name.startswith("branch")]
    branches = [prompt for prompt in prompts if prompt.name.startswith("branch")]
    engine = Engine(model, extra=extra | FAULTY, gpu_blocks=250)
    result: dict[str, Any] = {"groups": len(engine.core.scheduler.kv_cache_config.kv_cache_groups)}
    result["first"], _ = engine.answers(firsts)
    for name in ("again", "once more"):
        engine.drain()
        engine.forget_device_cache()
        result[name], result[f"{name} cached"] = engine.answers(firsts)
    engine.drain()
    engine.forget_device_cache()
    result["branches"], result["branches cached"] = engine.answers(branches)
    result["metrics"] = engine.metrics()

    PLAN.corrupt_loads = 1
    engine.drain()
    engine.forget_device_cache()
    result["corrupted"], _ = engine.answers(firsts[:3])

    PLAN.fail_load, PLAN.fail_store, PLAN.lag_polls = 0.4, 0.2, 3
    result["failing"] = [answers for answers, _ in _failing_rounds(engine, prompts)]
    result["failing metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def states(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Serve a model with recurrent states: evictions and loads, failures, aborts and preemption."""
    from tests.engines.vllm.faulty_spec import PLAN

    prompts = state_prompts()
    # vLLM turns its prefix cache on by itself only where there is attention.
    options = ONE_BLOCK_A_STEP | {"enable_prefix_caching": True}
    engine = Engine(model, extra=extra | FAULTY, gpu_blocks=60, **options)
    groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
    result: dict[str, Any] = {
        "kinds": [type(group.kv_cache_spec).__name__ for group in groups],
        "layers": [len(group.layer_names) for group in groups],
        "layout": engine.core.scheduler.kv_cache_config.kv_cache_layout,
        "state bytes": sum(
            len(group.layer_names) * group.kv_cache_spec.state_content_size_bytes
            for group in groups
            if type(group.kv_cache_spec).__name__ == "MambaSpec"
        ),
    }
    for name in ("first", "again", "once more"):
        result[name], result[f"{name} cached"] = engine.answers(prompts)
        engine.drain()
        engine.forget_device_cache()
    result["metrics"] = engine.metrics()

    PLAN.corrupt_loads = 1
    result["corrupted"], _ = engine.answers(prompts[:3])
    engine.drain()
    engine.forget_device_cache()

    result["aborted loads"] = _abort_loads(engine)
    result["after aborts"], _ = engine.answers(prompts)
    engine.drain()

    PLAN.fail_load, PLAN.fail_store, PLAN.lag_polls = 0.4, 0.2, 3
    result["failing"] = [answers for answers, _ in _failing_rounds(engine, prompts)]
    result["failing metrics"] = engine.metrics()
    PLAN.fail_load = PLAN.fail_store = 0.1
    result["waves"] = [_wave(engine, seed, reset=seed == 1, count=16) for seed in range(3)]
    result["preemptions"] = engine.vllm_metric("vllm:num_preemptions")
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def _abort_loads(engine: Engine) -> int:
    """Starts requests whose prefixes must be loaded, and aborts each while its load is in flight. Returns how many."""
    from tests.engines.vllm.faulty_spec import PLAN

    llm, scheduler = engine.llm.llm_engine, engine.core.scheduler
    PLAN.lag_polls = 1000
    for prompt in state_prompts(3):
        llm.add_request(
            f"{prompt.name}-doomed", {"prompt_token_ids": list(prompt.token_ids)}, engine.parameters(prompt)
        )
    loading: set[str] = set()
    for _ in range(200):
        llm.step()
        loading = {each.request_id for each in scheduler.requests.values() if each.status.name.endswith("REMOTE_KVS")}
        if len(loading) == 3:
            break
    llm.abort_request([f"{prompt.name}-doomed" for prompt in state_prompts(3)])
    PLAN.lag_polls = 0
    engine.drain()
    engine.forget_device_cache()
    return len(loading)


def states_at_branches(model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM keeps the state at every block's end; then prompts go on from within one that was served."""
    engine = Engine(model, extra=extra, gpu_blocks=60, prefix_cache_retention_interval=None, **ONE_BLOCK_A_STEP)
    result: dict[str, Any] = {}
    result["first"], _ = engine.answers(state_prompts(2))
    engine.drain()
    engine.forget_device_cache()
    result["branches"], result["branches cached"] = engine.answers(state_branches())
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def two_ranks(model: str, extra: dict[str, Any], family: str = "long", **options: Any) -> dict[str, Any]:
    """Tensor parallelism over two worker processes; rank 1 fails some of its transfers (set in the environment)."""
    prompts = state_prompts(4) if family == "states" else long_prompts(4)
    engine = Engine(
        model,
        extra=extra | FAULTY,
        gpu_blocks=100,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **options,
    )
    result: dict[str, Any] = {}
    result["first"], _ = engine.answers(prompts)
    rounds = _failing_rounds(engine, prompts)
    result["rounds"], result["cached"] = [answers for answers, _ in rounds], [cached for _, cached in rounds]
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def return_once(model: str, extra: dict[str, Any], new_tokens: int | None = None, **options: Any) -> dict[str, Any]:
    """Serve some long prompts, and all of them again after the device has evicted them."""
    prompts = [Prompt(each.name, each.token_ids, new_tokens or each.new_tokens) for each in long_prompts(4)]
    engine = Engine(model, extra=extra, gpu_blocks=200, **options)
    result: dict[str, Any] = {}
    for name in ("first", "again"):
        result[name], result[f"{name}_cached"] = engine.answers(prompts)
        engine.drain()
        engine.forget_device_cache()
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def under_ray(model: str, extra: dict[str, Any], ranks: int) -> dict[str, Any]:
    """``return_once`` with workers that Ray starts."""
    from tests.engines.vllm import ray_on_cpu

    ray_on_cpu.start(ranks)
    return return_once(model, extra, tensor_parallel_size=ranks, distributed_executor_backend="ray")


def disk(
    model: str, extra: dict[str, Any], family: str = "long", first: int = 0, last: int = 8, **options: Any
) -> dict[str, Any]:
    """Serve every long prompt, or those from ``first`` to before ``last``, with a new engine and a disk tier that may
    be old.

    Prompts are served one after the other, because all waiting requests together may claim less of host memory than
    they want.
    """
    engine = Engine(model, extra=extra, gpu_blocks=100, **options)
    result: dict[str, Any] = {"tokens": {}, "cached": {}}
    for prompt in (state_prompts() if family == "states" else long_prompts())[first:last]:
        tokens, cached = engine.answers([prompt])
        result["tokens"] |= tokens
        result["cached"] |= cached
        engine.drain()  # a slow disk drops writes if too many blocks wait
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def two_nodes(
    model: str,
    extra: dict[str, Any],
    disks: list[str],
    rounds: list[tuple[str, int, int]],
    namespace: str = "",
    second_model: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Run an engine over two nodes, each with its own disk tier of ``disks``.

    The second node may have another model, ``second_model``, of the same shape. A round first applies a fault to the
    second node's disk, or none, and then asks a range of prompts, a few at a time.
    """
    address = os.environ["VLLM_HOST_IP"]
    with socket.socket() as each:
        each.bind((address, 0))
        port = each.getsockname()[1]
    tier = {"type": "disk", "max_bytes": "64MiB"}
    extras = [extra | {"secondary_tiers": [tier | {"path": path}]} for path in disks]
    options |= {"nnodes": 2, "master_addr": address, "master_port": port, "distributed_executor_backend": "mp"}
    node = SecondNode(second_model or model, disks[1], extras[1], namespace, gpu_blocks=100, **options)
    try:
        engine = Engine(model, extra=extras[0], gpu_blocks=100, node_rank=0, **options)
        engine.answers(long_prompts(1))  # the second node reports its weights
        engine.drain()
        result: dict[str, Any] = {"rounds": []}
        for fault, first, last in rounds:
            if fault:
                getattr(node, fault)()
            engine.forget_device_cache()
            before = engine.metrics()
            seen: dict[str, Any] = {"tokens": {}, "cached": {}}
            prompts = many_prompts()[first:last]
            for at in range(0, len(prompts), 5):
                tokens, cached = engine.answers(prompts[at : at + 5])
                seen["tokens"] |= tokens
                seen["cached"] |= cached
                engine.drain()
            seen["metrics"] = {name: value - before.get(name, 0) for name, value in engine.metrics().items()}
            result["rounds"].append(seen)
        result["idle"] = idle_state(engine)
        engine.close()
    finally:
        node.close()
    return result


def adapter(model: str, extra: dict[str, Any] | None, path: str, prompts: int = 2) -> dict[str, Any]:
    """Serve the first long prompts with the LoRA adapter at ``path``, one after the other; without ``extra``, with vLLM
    alone."""
    engine = Engine(model, extra=extra, gpu_blocks=100, enable_lora=True, max_lora_rank=8)
    result = _with_adapter(engine, "tuned", 1, path, prompts)
    engine.close()
    return result


def _with_adapter(engine: Engine, name: str, number: int, path: str, prompts: int = 2) -> dict[str, Any]:
    """Return the tokens of the first long prompts with this adapter, and how many tokens of each were cached."""
    from vllm.lora.request import LoRARequest

    result: dict[str, Any] = {"tokens": {}, "cached": {}}
    for prompt in long_prompts()[:prompts]:
        (output,) = engine.llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)}],
            engine.parameters(prompt),
            lora_request=LoRARequest(name, number, path),
            use_tqdm=False,
        )
        result["tokens"][prompt.name] = list(output.outputs[0].token_ids)
        result["cached"][prompt.name] = int(output.num_cached_tokens or 0)
    engine.drain()
    return result


def adapters_alone(model: str, paths: dict[str, str]) -> dict[str, Any]:
    """Return the answers of vLLM alone with each adapter, by name."""
    engine = Engine(model, gpu_blocks=100, enable_lora=True, max_lora_rank=8)
    named = enumerate(paths.items(), start=1)
    answers = {name: _with_adapter(engine, name, number, path)["tokens"] for number, (name, path) in named}
    engine.close()
    return answers


def adapters(model: str, extra: dict[str, Any], directory: str, passes: list[str], **options: Any) -> dict[str, Any]:
    """Serve with the adapters ``one`` and ``two`` in ``directory``. Each of ``passes`` is a way to load them first.

    ``load``: by the call of a server. ``replace``: the files of ``one`` are replaced, and it is loaded in place.
    ``evict``: the files of ``two`` are replaced, and vLLM evicts it and loads it again by itself. ``again``: nothing.
    vLLM's own cache is empty at the beginning of each pass.
    """
    from vllm.lora.request import LoRARequest

    engine = Engine(
        model,
        extra=extra,
        gpu_blocks=100,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        max_cpu_loras=2,
        **options,
    )
    root = Path(directory)

    def load(name: str, number: int, in_place: bool = False) -> None:
        request = LoRARequest(name, number, str(root / name), load_inplace=in_place)
        engine.core.add_lora(request)
        named = engine.connector.scheduler._adapters._current[number]
        deadline = monotonic() + 60
        while named.seed is None and monotonic() < deadline:
            sleep(0.01)
        assert named.seed is not None

    def replace(name: str) -> None:
        for file in (root / f"new-{name}").iterdir():
            os.replace(file, root / name / file.name)

    results: dict[str, Any] = {}
    for each in passes:
        engine.forget_device_cache()
        if each == "load":
            load("one", 1)
            load("two", 2)
        elif each == "replace":
            replace("one")
            load("one", 1, in_place=True)
        elif each == "evict":
            replace("two")
            _with_adapter(engine, "third", 3, str(root / "third"), 1)
            _with_adapter(engine, "one", 1, str(root / "one"), 1)
            engine.forget_device_cache()
        results[each] = {
            "one": _with_adapter(engine, "one", 1, str(root / "one")),
            "two": _with_adapter(engine, "two", 2, str(root / "two")),
        }
    results["metrics"] = engine.metrics()
    results["idle"] = idle_state(engine)
    engine.close()
    return results


def images(model: str, extra: dict[str, Any] | None, asked: list[tuple[int, str | None]]) -> dict[str, Any]:
    """Ask about one image after the other, each by its number and the name that a client gives it, or ``None``.

    vLLM's own prefix cache is empty before each.
    """
    from PIL import Image
    from vllm import SamplingParams

    # It needs torchvision, and vLLM only looks whether the model has its kind of encoder.
    pixtral = ModuleType("vllm.model_executor.models.pixtral")
    pixtral.PixtralHFEncoderInfo = pixtral.PixtralVisionConfig = type("Absent", (), {})  # type: ignore[attr-defined]
    sys.modules[pixtral.__name__] = pixtral
    tokens = list(long_prompts(1)[0].token_ids[:150])
    engine = Engine(model, extra=extra, gpu_blocks=100)
    answers = []
    for number, name in asked:
        bits = random.Random(number).randbytes(IMAGE_SIZE**2 * 3)
        image = Image.frombytes("RGB", (IMAGE_SIZE, IMAGE_SIZE), bits)
        prompt = {
            "prompt_token_ids": tokens,
            "multi_modal_data": {"image": image},
            "multi_modal_uuids": {"image": [name]},
        }
        parameters = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = engine.llm.generate([prompt], parameters, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)])
        engine.drain()
        engine.forget_device_cache()
    result = {"answers": answers, "idle": idle_state(engine) if extra else {}}
    engine.close()
    return result


def passes(model: str, extra: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Serve prompts of the Llama family by name, all prompts of a pass at once. vLLM's own cache is cleared between
    passes."""
    prompts = {prompt.name: prompt for prompt in _family("llama")}
    engine = Engine(model, extra=extra, gpu_blocks=200)
    seen = []
    for batch in names:
        tokens, cached = engine.answers([prompts[name] for name in batch])
        engine.drain()
        seen.append({"tokens": tokens, "cached": cached, "metrics": engine.metrics()})
        engine.forget_device_cache()
    result = {"passes": seen, "idle": idle_state(engine)}
    engine.close()
    return result


WITHOUT_KVOFFLOAD = {"max_offload_tokens": 0, "max_load_tokens": 0}


def speculate(model: str, extra: dict[str, Any], speculative_config: dict[str, Any]) -> dict[str, Any]:
    """Serve the same prompts in several ways, with their acceptance; then many at once; then with loads that only
    damage the drafter's KV."""
    from tests.engines.vllm.faulty_spec import PLAN

    flood = long_prompts(12)[4:]
    prompts = long_prompts(4) + crowd(8)
    engine = Engine(model, extra=extra | FAULTY, gpu_blocks=270, max_num_seqs=16, speculative_config=speculative_config)
    result: dict[str, Any] = {
        "layers": [group.layer_names for group in engine.core.scheduler.kv_cache_config.kv_cache_groups]
    }

    def ask(name: str, limits: dict[str, int] | None = None) -> None:
        before = engine.acceptance()
        tokens, cached = engine.answers(prompts, limits)
        drafted, accepted = (now - then for now, then in zip(engine.acceptance(), before, strict=True))
        result[name] = {"tokens": tokens, "cached": cached, "drafted": drafted, "accepted": accepted}
        engine.drain()

    ask("computed", WITHOUT_KVOFFLOAD)
    ask("on the device", WITHOUT_KVOFFLOAD)
    engine.forget_device_cache()
    ask("stored")
    result["stored bytes"] = engine.metrics()["store_bytes"]
    engine.answers(flood, WITHOUT_KVOFFLOAD)
    ask("restored")
    result["metrics"] = engine.metrics()
    PLAN.corrupt_loads, PLAN.corrupt_blocks = 1 << 30, 1 << 30
    # The drafter's layer is the last.
    PLAN.corrupt_from_group = len(result["layers"]) - 1
    PLAN.corrupt_layers = slice(len(result["layers"][-1]) - 1, None)
    engine.answers(flood, WITHOUT_KVOFFLOAD)
    ask("spoiled")
    PLAN.corrupt_loads = 0
    result["wave"] = _wave(engine, seed=3, reset=True)
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def new_weights(model: str, other: str, extra: dict[str, Any], version_file: str | None = None) -> dict[str, Any]:
    """Weights replaced in place while requests run: pause, new weights, reset, resume."""
    prompts = long_prompts()
    if version_file is not None:
        Path(version_file).write_text("first")
        extra = extra | {"weights_version": {"file": version_file}}
    engine = Engine(model, extra=extra, gpu_blocks=100)
    result: dict[str, Any] = {}
    result["first"], _ = engine.answers(prompts)
    engine.drain()
    _replace_weights(engine, other, version_file, "second")
    for name in ("replaced", "again"):
        result[name], result[f"{name} cached"] = engine.answers(prompts)
        engine.drain()
        engine.forget_device_cache()
    if version_file is not None:
        _replace_weights(engine, model, version_file, "first")
        result["back"], result["back cached"] = engine.answers(prompts)
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def weights_without_a_reset(model: str, other: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Weights replaced in place, and only vLLM's own cache emptied: by each way that vLLM has, then back again."""
    prompts = long_prompts(4)
    engine = Engine(model, extra=extra, gpu_blocks=100)
    result: dict[str, Any] = {}

    def ask(name: str) -> None:
        for time in ("", " again"):
            result[name + time], result[f"{name}{time} cached"] = engine.answers(prompts)
            engine.drain()
            engine.forget_device_cache()

    ask("first")
    engine.core.collective_rpc(_look_at_the_worker)
    engine.llm.apply_model(_look_at_the_worker)
    result["looked"], result["looked cached"] = engine.answers(prompts)
    engine.drain()
    engine.forget_device_cache()
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    ask("reloaded")
    engine.core.collective_rpc(_load_with_a_function, args=(model,))
    ask("back")
    engine.answers(prompts)
    engine.llm.llm_engine.model_executor.collective_rpc("reload_weights", kwargs={"weights_path": other})
    # vLLM may keep blocks on the device, but no block computed from them may be found later.
    engine.answers(prompts)
    engine.drain()
    engine.forget_device_cache()
    ask("reloaded by the executor")
    result["metrics"] = engine.metrics()
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def sleeps(model: str, other: str, extra: dict[str, Any], version_file: str) -> dict[str, Any]:
    """Follow the recipes for sleep, for a release of KV memory, and for new weights after a sleep."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.discard = lambda self, tags: None  # it cannot release memory, but ``_lose_kv`` has the same effect
    prompts = long_prompts(4)
    Path(version_file).write_text("first")
    engine = Engine(model, extra=extra | {"weights_version": {"file": version_file}}, gpu_blocks=200)
    llm, result = engine.llm, dict[str, Any]()

    def ask(name: str) -> None:
        before = engine.metrics().get("promotions|ok", 0)
        result[name], cached = engine.answers(prompts)
        engine.drain()
        result[f"{name} cached"] = cached
        result[f"{name} read"] = engine.metrics().get("promotions|ok", 0) - before

    def wake_with(path: str, version: str) -> None:
        llm.sleep(level=2)
        _lose_kv(engine)
        llm.wake_up()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        Path(version_file).write_text(version)
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    ask("first")
    llm.sleep(level=1)
    _lose_kv(engine)
    llm.wake_up()
    ask("slept")
    llm.sleep(level=0)
    llm.release_kv_cache_memory()
    _lose_kv(engine)
    llm.wake_up(tags=["kv_cache"])
    ask("released")
    wake_with(other, "second")
    ask("other weights")
    llm.sleep(level=1)
    llm.wake_up()
    ask("other weights, slept")
    wake_with(model, "first")
    ask("first weights again")
    llm.sleep(level=2)
    _lose_kv(engine)
    llm.wake_up()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other})  # without a reset
    ask("without a reset")
    result["idle"] = idle_state(engine)
    engine.close()
    return result


def _lose_kv(engine: Engine) -> None:
    """Overwrite the KV cache, as if its memory had been released."""
    for cache in engine.core.model_executor.driver_worker.worker.model_runner.kv_caches:
        cache.uniform_(-3, 3)


def _look_at_the_worker(part: Any) -> str:
    return type(part).__name__


def _load_with_a_function(worker: Any, path: str) -> None:
    worker.reload_weights(weights_path=path)


def _replace_weights(engine: Engine, path: str, version_file: str | None, version: str) -> None:
    """Pause, load new weights, reset and resume. Requests that share prefixes with later ones run at the same time."""
    llm, numbers = engine.llm.llm_engine, itertools.count()
    states: set[str] = set()
    # vLLM does not reset while a load is in flight.
    while "RUNNING" not in states or "WAITING_FOR_REMOTE_KVS" in states:
        if not llm.has_unfinished_requests():
            number = next(numbers)
            for prompt in long_prompts(3):
                parameters, name = engine.parameters(prompt), f"{prompt.name}-{version}-{number}"
                llm.add_request(name, {"prompt_token_ids": list(prompt.token_ids)}, parameters)
        llm.step()
        states = {request.status.name for request in engine.core.scheduler.requests.values()}
    engine.core.pause_scheduler("keep", clear_cache=False)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    if version_file is not None:
        Path(version_file).write_text(version)
    assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.core.resume_scheduler()
    engine.drain()
    engine.forget_device_cache()


def beside_another_connector(model: str, extra: dict[str, Any], directory: str) -> dict[str, Any]:
    """Under ``MultiConnector``: kvoffload, and vLLM's example connector, which keeps prompts that are computed
    in one step. vLLM loads from the first connector that has a prompt, and all store it."""
    own = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    engine = Engine(
        model,
        gpu_blocks=200,
        max_num_batched_tokens=8192,
        transfer={"kv_connector": "MultiConnector", "kv_connector_module_path": None},
        extra={"connectors": [own, other]},
    )
    prompts = long_prompts(4)
    result: dict[str, Any] = {}
    for name in ("first", "again", "from the other"):
        if name == "from the other":
            engine.connector.sub_connectors[0].reset_cache()
        result[name], result[f"{name} cached"] = engine.answers(prompts)
        engine.drain()
        engine.forget_device_cache()
        result[f"{name} metrics"] = engine.metrics()
    engine.close()
    return result


def refusals(model: str, extra: dict[str, Any]) -> dict[str, str]:
    """Return vLLM's messages at startup for configurations that cannot work.

    A message starts with "loaded: " if vLLM loads a model first.
    """
    from vllm.v1.engine.core import EngineCore

    begun: list[str] = []
    begin = EngineCore.__init__

    def note_and_begin(*args: Any, **kwargs: Any) -> None:
        begun.append(name)
        begin(*args, **kwargs)

    EngineCore.__init__ = note_and_begin
    child = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    said = {}
    for name, options in {
        "policy": {"transfer": {"kv_load_failure_policy": "fail"}, "extra": extra},
        "role": {"transfer": {"kv_role": "kv_producer"}, "extra": extra},
        "key": {"extra": extra | {"cpu_bytes": 1}},
        "size": {"extra": {}},
        "child": {
            "transfer": {"kv_connector": "MultiConnector", "kv_connector_module_path": None},
            "extra": {"connectors": [child | {"kv_connector_extra_config": {"cpu_bytes_to_us": 1}}]},
        },
        "policy of the whole": {
            "transfer": {
                "kv_connector": "MultiConnector",
                "kv_connector_module_path": None,
                "kv_load_failure_policy": "fail",
            },
            "extra": {"connectors": [child | {"kv_connector_extra_config": extra}]},
        },
        "block": {"extra": extra | {"block_size": 48}},
        "layout": {"extra": extra | {"kv_cache_layout": "BLNHC"}},
        "layout's name": {"extra": extra | {"kv_cache_layout": "NHD"}},
    }.items():
        try:
            Engine(model, **options)
        except ValueError as error:
            said[name] = "loaded: " * (name in begun) + f"{type(error).__name__}: {error}"
    return said


def serve_one_by_one(model: str, channel: int, **options: Any) -> None:
    """Answers each line of ``channel``, the tokens of a prompt and how many are to follow, with a line: how many tokens
    of the prompt were cached. By then the engine has nothing left to do."""
    engine = Engine(model, **options)
    with socket.socket(fileno=channel) as end, end.makefile("rw") as lines:
        for number, line in enumerate(lines):
            exit_if_hung()  # not before this answer's time is up
            token_ids, new_tokens = json.loads(line)
            prompt = Prompt(str(number), tuple(token_ids), new_tokens)
            _, cached = engine.answers([prompt])
            engine.drain()
            print(cached[prompt.name], file=lines, flush=True)
    engine.close()


class Stepped:
    """vLLM, step by step, for ``virtual_time.serve``. Each transfer takes no time, and has ended when its step ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: set[str] = set()
        self._tokens = 0
        self.now_s = 0.0
        engine.llm.apply_model(self._count)
        # The connector compares the times of loads and steps, and must not compare those of this machine.
        engine.connector.scheduler.core._short_loads._clock = lambda: self.now_s
        report = OffloadingConnectorWorker.get_report

        def wait_and_report(worker: Any) -> Any:
            for handler, job_ids in worker._open.items():
                handler.wait([*job_ids])
            found = report(worker)
            return replace(found, results=tuple((rank, result._replace(seconds=0.0)) for rank, result in found.results))

        OffloadingConnectorWorker.get_report = wait_and_report  # type: ignore[method-assign]

    def _count(self, model: Any) -> None:
        def count(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._tokens += (arguments[0] if arguments else named["input_ids"]).numel()

        model.register_forward_pre_hook(count, with_kwargs=True)

    def add(self, number: int, prompt: list[int], output: int) -> None:
        asked = Prompt(str(number), tuple(prompt), output)
        self.engine.llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, self.engine.parameters(asked))
        self._waiting.add(str(number))

    @property
    def has_requests(self) -> bool:
        return bool(self.engine.core.scheduler.has_requests())

    def step(self) -> tuple[int, list[int]]:
        before, first = self._tokens, []
        for output in self.engine.llm.llm_engine.step():
            name = output.request_id.partition("-")[0]
            if output.outputs[0].token_ids and name in self._waiting:
                self._waiting.remove(name)
                first.append(int(name))
        return self._tokens - before, first


def in_virtual_time(
    model: str, extra: dict[str, Any], gpu_blocks: int, workloads: list[tuple[float, int]]
) -> list[dict[str, Any]]:
    """Serve each workload, a load and a seed, with empty caches. Return the figures of each."""
    found = []
    engine = Engine(
        model,
        gpu_blocks=gpu_blocks,
        extra=extra,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=SIDE_BY_SIDE,
        async_scheduling=False,
    )
    stepped = Stepped(engine)
    for load, seed in workloads:
        exit_if_hung()
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        before = [engine.vllm_metric(f"vllm:{kind}prefix_cache_hits") for kind in ("", "external_")]
        seconds, ttft_s = serve(stepped, Workload(load, BLOCK_TOKENS, seed=seed))
        after = [engine.vllm_metric(f"vllm:{kind}prefix_cache_hits") for kind in ("", "external_")]
        device, host = (int(now - then) for now, then in zip(after, before, strict=True))
        found.append(Observed(seconds, ttft_s, device, host).as_json())
    engine.close()
    return found


def exit_if_hung(seconds: float = 370.0) -> None:
    """Says in ``seconds`` from now where this process is, and ends it, before its parent gives up. Replaces the last
    call."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def main() -> None:
    scenario, options, answer, *seconds = sys.argv[1:]
    exit_if_hung(*map(float, seconds))
    Path(answer).write_text(json.dumps(globals()[scenario](**json.loads(options))))


if __name__ == "__main__":
    main()
