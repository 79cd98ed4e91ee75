# SPDX-License-Identifier: Apache-2.0
"""Test weights that change while vLLM serves: which calls count as updates, and which blocks are stored and found after
one."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.models import SmallModel
from tests.engines.vllm.sources import Sources
from tests.engines.vllm.steps import BLOCK, PAGE_BYTES, Steps, aborted

from kvoffload.engines.vllm.checksums import weights_state
from kvoffload.engines.vllm.updates import HARMLESS, UPDATES, Device, unwatch, watch

COMPARED = """
apply_model init_weight_transfer_engine shutdown_weight_transfer_engine handle_ft_command reinitialize_distributed
update_max_model_len
"""
"""Methods that vLLM calls by name and that may change weights, or are too rare to examine. Checksums are compared
around them."""

BEFORE_A_SCHEDULER = """
adjust_rank compile_or_warm_up_model determine_available_memory get_kv_cache_spec get_supported_kv_cache_layouts
init_device init_worker initialize_from_config load_model set_kv_cache_layout update_environment_variables
"""


class Heard:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def weights_may_change(self, method: str) -> None:
        self.calls.append(method)

    def device_is_released(self) -> None:
        self.calls.append("released")

    def encoder_cache_is_reset(self) -> None:
        self.calls.append("encoder")

    def adapter_is_loaded(self, adapter: Any) -> None:
        self.calls.append(adapter)


class Worker:
    """A worker of vLLM with a model of two tensors. One tensor is a view of a part of the other."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(5000, 30, bias=False)
        self.model.register_buffer("scale", torch.ones(3))
        self.model.register_buffer("tied", self.model.weight.data.t()[:10])

    def get_model(self) -> torch.nn.Module:
        return self.model

    def changes(self) -> None:
        self.model.weight.data[-1, -1] += 1  # which counts no version of the parameter

    def looks(self) -> None:
        pass

    def fails_half_way(self) -> None:
        self.changes()
        raise RuntimeError


class Executor:
    """An executor in vLLM's form."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.worker: Any = Worker()
        self.is_sleeping = False

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None, non_block: bool = False
    ) -> list[Any]:
        if callable(method) and method is not print:
            return [method(self.worker, *args)]
        self.made.append((method, timeout, args, kwargs, non_block))
        if isinstance(method, str):
            getattr(self.worker, method, lambda: None)()
        return ["done"]

    @classmethod
    def get_class(cls, vllm_config: Any) -> type:
        return vllm_config.executor  # type: ignore[no-any-return]


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    module = ModuleType("vllm.v1.executor.abstract")
    module.Executor = Executor  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return type("Own", (Executor,), {})()  # type: ignore[no-any-return]


@pytest.fixture
def heard(executor: Executor) -> Iterator[Heard]:
    listener = Heard()
    for _ in range(2):  # twice does nothing more
        watch(SimpleNamespace(executor=type(executor)), listener)
    yield listener
    unwatch(listener)


def test_calls_reach_the_workers_as_they_are_made(executor: Executor, heard: Heard) -> None:
    for method in (*HARMLESS, "reload_weights", "something_new", print, b"execute_model"):
        assert executor.collective_rpc(method, 5, args=(1,), non_block=True) == ["done"]
        assert executor.made[-1] == (method, 5, (1,), None, True)
        assert executor.collective_rpc(method, 5, (1,), None, True) == ["done"]
        assert executor.made[-1] == (method, 5, (1,), None, True)
    # Whoever does not wait cannot compare.
    assert [each for each in heard.calls if each not in (1, "encoder", "released")] == [
        *["'reload_weights'"] * 2,
        *["'something_new'"] * 2,
        *["a function"] * 4,
    ]
    unwatch(heard)
    heard.calls.clear()
    executor.collective_rpc("reload_weights")
    assert heard.calls == []
    assert not hasattr(Executor.collective_rpc, "tells_kvoffload"), "other executors stay as they are"


def test_a_call_of_the_user_s_own_is_an_update_if_it_changes_weights(executor: Executor, heard: Heard) -> None:
    for harmless in ("looks", Worker.looks, *COMPARED.split(), *HARMLESS):
        executor.collective_rpc(harmless)
    assert set(heard.calls) <= {"encoder", "released"}
    for changes in ("changes", Worker.changes):
        heard.calls.clear()
        executor.collective_rpc(changes)
        assert heard.calls == ["'changes'" if changes == "changes" else "a function"]
    heard.calls.clear()
    with pytest.raises(RuntimeError):
        executor.collective_rpc("fails_half_way")
    assert heard.calls == ["'fails_half_way'"]


@pytest.mark.parametrize("obstacle", ["no model", "asleep", "checksums fail"])
def test_where_weights_cannot_be_compared_each_call_is_an_update(
    executor: Executor, heard: Heard, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "no model":
        executor.worker = object()
    elif obstacle == "asleep":
        executor.is_sleeping = True
    else:
        monkeypatch.setattr(Worker, "get_model", lambda worker: 1 / 0)
    executor.collective_rpc("looks")
    assert heard.calls == ["'looks'"]


def test_each_byte_of_the_weights_is_compared() -> None:
    worker = Worker()
    states = [weights_state(worker)]
    flat, scale = worker.model.weight.data.view(-1), worker.model.get_buffer("scale")
    assert scale is not None
    for place in (0, 1, 5000 * 30 // 2, -1):
        flat[place] += 1
        states.append(weights_state(worker))
    flat[:10000].copy_(flat[:10000].flip(0))
    states.append(weights_state(worker))
    for one, other in ((0, 2), (100, 5000), (-9, -3)):  # words change places, as if somebody had sorted rows
        words = worker.model.weight.data.view(torch.int64).view(-1)
        words[[one, other]] = words[[other, one]]
        states.append(weights_state(worker))
    scale[2] = 2.0
    states.append(weights_state(worker))
    assert len({str(state) for state in states}) == len(states)
    assert weights_state(worker) == states[-1]


SLEEPS: list[tuple[list[tuple[str, tuple[Any, ...]]], list[str]]] = [
    ([("sleep", (1,)), ("wake_up", (None,))], ["released"]),
    ([("sleep", (2,)), ("wake_up", (["weights"],)), ("wake_up", (None,))], ["'sleep'", "'wake_up'"]),
    ([("discard", (("kv_cache",),)), ("wake_up", (None,))], ["released"]),
    ([("discard", (("kv_cache", "weights"),)), ("wake_up", (None,))], ["'discard'", "'wake_up'"]),
    ([("elastic_ep_execute", ("commit_scale_up", True)), ("elastic_ep_execute", ("clear_async",))], []),
    ([("checkpoint_prepare", ()), ("checkpoint_restore", ())], []),
]


@pytest.mark.parametrize(("calls", "expected"), SLEEPS)
@pytest.mark.parametrize("by_name", [False, True], ids=["args", "kwargs"])
def test_sleep_and_scaling_are_updates_only_if_the_weights_are_lost(
    executor: Executor, heard: Heard, calls: list[tuple[str, tuple[Any, ...]]], expected: list[str], by_name: bool
) -> None:
    for method, arguments in calls:
        if by_name:
            executor.collective_rpc(method, kwargs={f"name {place}": each for place, each in enumerate(arguments)})
        else:
            executor.collective_rpc(method, args=arguments)
    assert heard.calls == expected


def test_an_update_is_told_of_before_it_is_made_and_no_listener_can_fail_it(executor: Executor, heard: Heard) -> None:
    def fail(method: str) -> None:
        assert executor.made == []
        raise RuntimeError

    heard.weights_may_change = fail  # type: ignore[method-assign]
    assert executor.collective_rpc("reload_weights") == ["done"]
    assert len(executor.made) == 1


@pytest.mark.parametrize(
    "call", [{"args": ("adapter",)}, {"kwargs": {"lora_request": "adapter"}}, {"args": ("adapter",), "kwargs": None}]
)
def test_adapters_and_encoders_are_told_of(executor: Executor, heard: Heard, call: dict[str, Any]) -> None:
    executor.collective_rpc("add_lora", **call)
    executor.collective_rpc("reset_encoder_cache")
    assert set(heard.calls) == {"adapter", "encoder"}


class Pool:
    num_gpu_blocks = 10

    def __init__(self, free: int, cached: int) -> None:
        self.free, self.cached_block_hash_to_block = free, dict.fromkeys(range(cached))

    def get_num_free_blocks(self) -> int:
        return self.free


@pytest.mark.parametrize(
    ("free", "held", "cached", "is_empty"), [(9, 0, 0, True), (8, 0, 0, False), (9, 0, 1, False), (7, 2, 0, True)]
)
def test_a_device_without_blocks_is_empty(free: int, held: int, cached: int, is_empty: bool) -> None:
    device = Device(outputs_are_foreign=False)
    assert not device.is_empty()
    device.bind(Pool(free, cached), lambda: held)
    assert device.is_empty() is is_empty


def test_what_encoders_made_of_old_weights_is_waited_for() -> None:
    device = Device(outputs_are_foreign=False)
    device.bind(Pool(9, 0), lambda: 0)
    device.weights_may_change()
    assert device.is_empty()
    device.encoders_run()
    assert device.is_empty()
    device.weights_may_change()
    assert not device.is_empty()
    device.encoder_cache_is_reset()
    assert device.is_empty()
    shared = Device(outputs_are_foreign=True)
    shared.bind(Pool(9, 0), lambda: 0)
    assert shared.is_empty()
    shared.weights_may_change()
    shared.encoder_cache_is_reset()
    assert not shared.is_empty()


# ------------------------------------------------------------------------------------------------ with vLLM


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_all_methods_that_vllm_calls_by_name_are_known(sources: Sources) -> None:
    assert set(calls_in(sources.root / "vllm")) >= {"execute_model", "sleep", "add_lora", "reload_weights"}
    assert unknown_calls(sources) == set()


def unknown_calls(sources: Sources) -> set[str]:
    called = set(calls_in(sources.root / "vllm"))
    return called - HARMLESS - UPDATES - {*COMPARED.split(), *BEFORE_A_SCHEDULER.split()}


def calls_in(directory: Path) -> Iterator[str]:
    for file in directory.rglob("*.py"):
        text = file.read_text()
        if "collective_rpc" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("collective_rpc") and node.args:
                method = node.args[0]
                if isinstance(method, ast.Constant):
                    yield str(method.value)


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK + 1))


def update(steps: Steps) -> None:
    """As ``LLM.collective_rpc`` does it."""
    from vllm.v1.executor import UniProcExecutor

    worker = SimpleNamespace(reload_weights=lambda: None)
    UniProcExecutor.collective_rpc(SimpleNamespace(driver_worker=worker), "reload_weights")  # type: ignore[arg-type]


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_after_an_update_the_device_is_emptied_before_anything_is_stored(llama: SmallModel, asynchronous: bool) -> None:
    steps = Steps(llama.path, asynchronous, 40, slots=40)
    prompt = tokens(100, 4)
    steps.add("first", prompt, 1)
    steps.drain()
    assert steps.stored_blocks(prompt) == [0, 1, 2, 3]
    running = steps.add("running", tokens(200, 3), 30)
    steps.step()
    update(steps)
    num_stores = len(steps.stores())
    assert steps.hit_blocks(prompt) == 0
    # On the device vLLM finds two blocks of the old weights, and computes the others.
    steps.add("mixed", [*prompt[: 2 * BLOCK], *tokens(300, 3)], 1)
    for _ in range(6):
        steps.step()
    assert not steps.scheduler.reset_prefix_cache(reset_connector=True)  # something runs
    steps.add("still mixed", [*prompt[: 2 * BLOCK], *tokens(400, 3)], 1)
    for _ in range(4):
        steps.step()
    assert not running.is_finished()
    assert len(steps.stores()) == num_stores
    steps.scheduler.finish_requests("running", aborted())
    steps.drain()
    assert len(steps.stores()) == num_stores
    # vLLM's own reset is enough. The epoch continues with blocks that are computed from now on.
    assert steps.scheduler.reset_prefix_cache()
    steps.add("again", prompt, 1)
    steps.drain()
    assert steps.stored_blocks(prompt) == [0, 1, 2, 3]
    steps.close()


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_paused_engine_that_was_reset_goes_on_storing_after_the_update(llama: SmallModel) -> None:
    """Update as training loops do: pause and clear, several calls that send the weights, resume."""
    steps = Steps(llama.path, False, 40, slots=40)
    prompt = tokens(100, 4)
    steps.add("first", prompt, 1)
    steps.drain()
    assert steps.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(3):
        update(steps)
    assert steps.hit_blocks(prompt) == 0
    steps.add("again", prompt, 1)
    steps.drain()
    assert steps.stored_blocks(prompt) == [0, 1, 2, 3]
    steps.close()
    update(steps)  # nobody is listening


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("level", "is_found"), [(1, True), (2, False)])
def test_after_a_sleep_that_keeps_the_weights_the_tiers_blocks_are_found(
    llama: SmallModel, tmp_path: Path, level: int, is_found: bool
) -> None:
    from vllm.v1.executor import UniProcExecutor

    class Asleep:
        def __init__(self) -> None:
            self.driver_worker = SimpleNamespace(sleep=lambda level: None, wake_up=lambda tags=None: None)

    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "unlimited"}
    steps = Steps(
        llama.path,
        False,
        40,
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=20 * PAGE_BYTES,
        secondary_tiers=[tier],
        load_policy="always",
        max_wait_s=300.0,
    )
    prompt = tokens(100, 4)
    steps.add("first", prompt, 1)
    while steps.scheduler.has_requests():  # until the tier has everything
        steps.step()
        time.sleep(0.001)
    executor: Any = Asleep()
    assert steps.scheduler.reset_prefix_cache(reset_connector=True)  # as each sleep does by itself
    steps.worker.slots.clear()  # what comes to them from now on is promoted
    UniProcExecutor.collective_rpc(executor, "sleep", kwargs={"level": level})
    UniProcExecutor.collective_rpc(executor, "wake_up", kwargs={"tags": None})
    again = steps.add("again", prompt, 1)
    while not again.is_finished():
        steps.step()
        time.sleep(0.001)
    assert bool(steps.loads()) is is_found
    steps.close()
