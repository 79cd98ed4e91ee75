# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import logging

import pytest
from tests.connector.rig import BT, FULL, STATE, Request, Rig, key

from kvoffload.base import OffloadingManager, OffloadPolicy, ReqContext
from kvoffload.config import EngineLayout, KVGroupLayout, OffloadingConfig
from kvoffload.connector import BoundaryState, EngineStep, OffloadingConnectorScheduler
from kvoffload.connector.guard import GuardedManager
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.errors import TransferError

CONTEXT = ReqContext("r")


class Broken(CPUOffloadingManager):
    """Every method raises once ``broken`` is set."""

    broken = False

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name in vars(OffloadingManager) and not name.startswith("_") and super().__getattribute__("broken"):

            def fail(*args: object, **kwargs: object) -> None:
                raise RuntimeError(f"{name} is broken")

            return fail
        return found


def test_every_method_of_the_seam_is_guarded() -> None:
    seam = {name for name, value in vars(OffloadingManager).items() if inspect.isfunction(value)}
    assert seam == {name for name in vars(GuardedManager) if name in seam}


def test_exceptions_become_misses(caplog: pytest.LogCaptureFixture) -> None:
    manager = Broken(4)
    guarded = GuardedManager(manager)
    manager.broken = True
    assert guarded.lookup(key(0), CONTEXT) is False
    assert guarded.lookup_prefix([key(0), key(1)], CONTEXT) == [False]
    assert guarded.lookup_prefix([], CONTEXT) == []
    assert guarded.prepare_store([key(0)], CONTEXT) is None
    assert guarded.on_new_request(CONTEXT).policy is OffloadPolicy.BLOCK_LEVEL
    assert tuple(guarded.take_events()) == ()
    assert guarded.has_pending_work() is False
    assert guarded.get_stats() == {}
    with pytest.raises(TransferError):
        guarded.prepare_load([key(0)], CONTEXT)
    for call in (guarded.complete_load, guarded.complete_store, guarded.touch):
        call([key(0)], CONTEXT)
    for quiet in (guarded.on_schedule_end, guarded.reset_cache, guarded.shutdown):
        quiet()
    guarded.on_request_finished(CONTEXT)
    assert len(caplog.records) == 1, "logged once, not for each"


def test_the_log_speaks_again_after_a_while_and_says_how_much_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    manager = Broken(4)
    guarded = GuardedManager(manager, log_every_s=60, clock=lambda: now)
    manager.broken = True
    for _ in range(5):
        guarded.on_schedule_end()
    now = 61.0
    guarded.on_schedule_end()
    first, second = caplog.records
    assert first.levelno == logging.ERROR
    assert "on_schedule_end failed" in first.getMessage() or "fail" in first.getMessage()
    assert "4 earlier" in second.getMessage()


def test_answers_pass_through() -> None:
    rig = Rig()
    rig.store_prefix(8)
    guarded = GuardedManager(rig.manager)
    assert guarded.lookup(key(0), CONTEXT) is True
    assert guarded.lookup_prefix([key(0), key(5)], CONTEXT) == [True, False]
    assert len(guarded.prepare_load([key(0)], CONTEXT).block_ids) == 1  # type: ignore[attr-defined]
    guarded.complete_load([key(0)], CONTEXT)
    assert guarded.get_stats() == rig.manager.get_stats()


def test_a_request_lives_through_a_manager_that_breaks() -> None:
    manager = Broken(8)
    layout = EngineLayout((FULL,), BT, "test")
    scheduler = OffloadingConnectorScheduler(
        GuardedManager(manager), layout, OffloadingConfig(cpu_bytes_to_use=1 << 20)
    )
    rig = Rig()
    rig.scheduler, rig.manager = scheduler, manager  # type: ignore[assignment]
    first = Request("a", 8)
    rig.end(*rig.admit(first, [0, 1]).stores)
    request = rig.arrive(Request("b", 9))
    assert rig.ask(request) == (8, True)
    manager.broken = True
    rig.alloc(request, [2, 3, 4], external=8)
    (job,) = scheduler.build_connector_meta(EngineStep()).loads
    assert rig.end(job, success=False).failed_loads == {"b": {2, 3}}
    assert rig.ask(request) == (0, False)
    rig.alloc(request, [2, 3, 4])
    assert rig.step(rig.run(request, [2, 3, 4])).stores == ()
    rig.finish(request)
    rig.finish(first)
    assert not scheduler.has_pending_work()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE)])
def test_a_manager_that_cannot_let_blocks_go_stops_no_request(
    groups: tuple[KVGroupLayout, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(groups)
    manager = rig.manager

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(manager, "release", fail)
    monkeypatch.setattr(manager, "reads_ahead", lambda: True)
    config = OffloadingConfig(cpu_bytes_to_use=1 << 20)
    rig.scheduler = OffloadingConnectorScheduler(GuardedManager(manager), EngineLayout(groups, BT, "rig"), config)
    if len(groups) == 1:
        rig.store_prefix(2 * BT)
    request = rig.arrive(Request("r", 2 * BT + 1, "p"))
    rig.step()  # looks it up ahead of its turn
    rig.ask(request)
    rig.alloc(request, *([range(3)] * len(groups)))  # and loads nothing
    rig.finish(request)


def test_an_answer_may_end_at_its_first_miss_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    inner = CPUOffloadingManager(4)
    guarded = GuardedManager(inner)
    for given, taken in (
        ([True, False], [True, False]),
        ([True, True, False], [True, True, False]),
        ([True, True], [False]),
        ([True, None], [False]),
        ([True, False, True], [True, False]),
        ([False, None, False], [False]),
    ):
        inner.lookup_prefix = lambda *_, given=given: given  # type: ignore[method-assign, misc]
        assert guarded.lookup_prefix([key(1), key(2), key(3)], CONTEXT) == taken


def test_a_block_that_is_missing_is_in_no_hit_whatever_is_answered_after_it() -> None:
    """A plug-in answers for each key, also after a miss.

    Loading the missing block would load bytes of an unrelated slot.
    """
    rig = Rig()
    rig.scheduler = OffloadingConnectorScheduler(
        GuardedManager(rig.manager), rig.layout, OffloadingConfig(cpu_bytes_to_use=1 << 20)
    )
    rig.manager.lookup_prefix = lambda keys, *_: [True, False, True, True][: len(keys)]  # type: ignore[method-assign]
    assert rig.ask(rig.arrive(Request("r", 4 * BT + 1))) == (BT, True)


def test_an_answer_for_too_few_blocks_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.manager, "where", lambda keys, context: [True])
    assert GuardedManager(rig.manager).where([key(1), key(2)], CONTEXT) == [None, None]


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("lookup_prefix", []),
        ("lookup_prefix", [True]),
        ("lookup_prefix", None),
        ("where", [True]),
        ("on_new_request", None),
        ("prepare_store", []),
        ("prepare_load", None),
    ],
)
def test_what_is_no_answer_is_a_miss_too(
    method: str, answer: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plug-in makes a mistake: a short list without a miss at its end, or a forgotten return."""
    rig = Rig(groups=(FULL, STATE))
    rig.scheduler = OffloadingConnectorScheduler(
        GuardedManager(rig.manager), rig.layout, OffloadingConfig(cpu_bytes_to_use=1 << 20)
    )
    seed = rig.arrive(Request("seed", 16))
    rig.ask(seed)
    tables = range(4), range(10, 14)
    rig.alloc(seed, *tables)
    rig.end(*rig.step(rig.run(seed, *tables, tokens=16), states=[BoundaryState("seed", 1, 13, 16)]).stores)
    rig.finish(seed)
    monkeypatch.setattr(rig.manager, method, lambda *args, **more: answer)
    request = rig.arrive(Request("r", 21))
    hit, _ = rig.ask(request)
    assert hit in (0, 16)
    own = [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]
    rig.alloc(request, *own, external=hit)
    jobs = rig.step()
    for job in jobs.loads:
        rig.end(job, success=job.source is not None)
    rig.end(*rig.step(rig.run(request, *own, tokens=20)).stores)
    rig.finish(request)
    rig.step()
    assert len(caplog.records) == 1
    assert "as a cache miss" in caplog.text


@pytest.mark.parametrize("call", ["get_all", "released", "remove"])
@pytest.mark.parametrize("success", [True, False])
def test_a_store_whose_end_raises_leaves_no_block_in_flight(call: str, success: bool) -> None:
    manager = CPUOffloadingManager(4)
    guarded = GuardedManager(manager)
    output = guarded.prepare_store([key(0), key(1)], CONTEXT)
    assert output is not None
    policy = manager.slots.policy
    original, calls = getattr(policy, call), [0]

    def fail_once(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("a foreign policy")
        return original(*args)

    setattr(policy, call, fail_once)
    manager.slots.get_all = policy.get_all  # type: ignore[method-assign]
    guarded.complete_store(output.keys_to_store, CONTEXT, success=success)
    assert manager.slots.num_in_flight == 0
    assert None not in [guarded.lookup(each, CONTEXT) for each in output.keys_to_store]
    manager.check_invariants()
