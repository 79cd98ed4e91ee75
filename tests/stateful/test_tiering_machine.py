# SPDX-License-Identifier: Apache-2.0
"""Test the tiering manager against a plain-dict oracle, with two tiers that are late, lose, tear, fail and hang.

The oracle knows only the calls at the interfaces: events, the stores and loads that it started, and the jobs in the
fake tiers. A block's bytes are a function of its key, so a wrong block is visible wherever it is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.sizes import by_size
from tests.tiering.rig import Rig, content, prefix

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering import CascadeMode, JobMetadata

CHAINS = ("a", "b")
LENGTH = 7
UNIVERSE = [key for name in CHAINS for key in prefix(LENGTH, of=name)]
MAX_WAIT_S = 5.0
WRITE_BACK = "kvoffload:write-back"

chains = st.sampled_from(CHAINS)
lengths = st.integers(1, LENGTH)
picks = st.integers(0, 11)

WEIGHTS = {"ask": 8, "store": 4, "complete_store": 4, "step": 5, "job_ok": 6, "job_fails": 1, "job_loses": 1}
WEIGHTS |= {"start": 2, "finish": 1, "complete_load": 2, "touch": 1, "put": 2, "gone": 1, "unknown": 1, "known": 1}
WEIGHTS |= {"wait": 1, "lose_patience": 1, "reset": 1}
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]


@dataclass
class Transfer:
    """A store or load between the device and host memory."""

    keys: list[OffloadKey]
    slots: list[int]
    context: ReqContext
    is_stale: bool = False


@dataclass
class _Unanswered:
    """The blocks for which a request had no answer, in the last step in which it lacked any."""

    step: int
    keys: set[OffloadKey]
    on_their_way: set[OffloadKey]
    """Those of them that have been on their way all the time since."""


class TieringMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 9),
        cache_policy=st.sampled_from(["lru", "arc", "density"]),
        cascade=st.tuples(*[st.sampled_from(["on_store", "on_evict"])] * 2),
        policies=st.tuples(*[st.sampled_from(OffloadPolicy)] * 2),
        threshold=st.sampled_from([1, 1, 2]),
        share=st.sampled_from([0.75, 0.5, 1.0, 0.2]),
        below=st.tuples(*[st.tuples(chains, lengths)] * 2),
    )
    def build(
        self,
        num_blocks: int,
        cache_policy: str,
        cascade: tuple[CascadeMode, CascadeMode],
        policies: tuple[OffloadPolicy, OffloadPolicy],
        threshold: int,
        share: float,
        below: tuple[tuple[str, int], tuple[str, int]],
    ) -> None:
        self.rig = Rig(
            num_blocks,
            policies,
            cache_policy=cache_policy,
            primary_options={"store_threshold": threshold},
            max_wait_s=MAX_WAIT_S,
            promotion_share=share,
            cascade=cascade,
        )
        self.cascade = cascade
        self.never_below: list[set[OffloadKey]] = [set(UNIVERSE), set(UNIVERSE)]
        self.least_dropped = self.most_dropped = 0
        self.manager = self.rig.manager
        self.live: dict[str, ReqContext] = {}
        self.started = 0
        self.resident: set[OffloadKey] = set()
        self.stores: list[Transfer] = []
        self.loads: list[Transfer] = []
        self.queued: set[OffloadKey] = set()
        self.undecided: set[OffloadKey] = set()
        """A tier has it, and another that does not know yet may be read sooner: begun in this step, or waited for."""
        self.late_jobs: set[int] = set()
        self.asked: dict[str, _Unanswered] = {}
        self.least_spent_s: Counter[str] = Counter()
        """Patience of each request that was spent for certain ..."""
        self.most_spent_s: Counter[str] = Counter()
        """... and that may have been spent."""
        self.open: dict[str, set[OffloadKey]] = {}
        """Blocks for which a request lacked an answer and did not ask again. It may wait for them as well."""
        self.step_number = 0
        for tier, (name, length) in zip(self.rig.tiers, below):
            tier.put(prefix(length, of=name), map(content, prefix(length, of=name)))
        for _ in range(3):
            self.start()

    @rule(action=st.sampled_from(ACTIONS), pick=picks, chain=chains, length=lengths, flag=st.booleans())
    def act(self, action: str, pick: int, chain: str, length: int, flag: bool) -> None:
        """One weighted choice instead of a rule per action, which would leave most runs without most actions."""
        context = list(self.live.values())[pick % len(self.live)] if self.live else None
        tier = self.rig.tiers[pick % 2]
        key = prefix(LENGTH, of=chain)[length - 1]
        match action:
            case "start" if len(self.live) < 5:
                self.start()
            case "finish" if context:
                self.finish_request(context)
            case "ask" if context:
                self.ask(context, prefix(length, of=chain), load=flag)
            case "complete_load" if self.loads:
                self.complete_load(self.loads.pop(pick % len(self.loads)))
            case "touch" if context:
                self.manager.touch(prefix(length, of=chain), context)
            case "store" if context:
                self.prepare_store(context, prefix(length, of=chain)[pick % length :])
            case "complete_store" if self.stores:
                self.complete_store(self.stores.pop(pick % len(self.stores)), success=pick % 4 > 0, named=flag)
            case "step":
                self.step()
            case "job_ok" | "job_fails" | "job_loses" if tier.jobs:
                self.end_job(tier, list(tier.jobs)[length % len(tier.jobs)], action, tear=flag)
            case "gone":
                tier.blocks.pop(key, None)
            case "put":
                tier.put([key], [content(key)])
            case "unknown":
                tier.answers[key] = None
            case "known":
                tier.answers.clear()
            case "wait":
                self.step()  # otherwise, earlier blocks would arrive later
                self.pass_time(0.1 if flag else 2.0)
            case "lose_patience" if context:
                self.lose_patience(context, prefix(LENGTH, of=chain), in_steps=flag)
            case "reset" if pick % 4 == 0:
                self.reset(hangs=flag)

    # ------------------------------------------------------------------------------------------------ requests

    def start(self) -> None:
        self.started += 1
        context = ReqContext(f"r{self.started}")
        wanted = {tier.policy for tier in self.rig.tiers}
        answer = self.manager.on_new_request(context)
        assert (answer.policy is OffloadPolicy.REQUEST_LEVEL) == (OffloadPolicy.REQUEST_LEVEL in wanted)
        self.live[context.req_id] = context

    def finish_request(self, context: ReqContext) -> None:
        self._expect_submits(lambda: self.manager.on_request_finished(context))
        del self.live[context.req_id]
        self.asked.pop(context.req_id, None)

    # ------------------------------------------------------------------------------------------------- reading

    def ask(self, context: ReqContext, blocks: list[OffloadKey], load: bool) -> None:
        answers = self._lookup_prefix(context, blocks)
        hit = answers.index(False) if False in answers else len(answers)
        if load and None not in answers and hit:
            spec = self.manager.prepare_load(blocks[:hit], context)
            self.asked.pop(context.req_id, None)
            transfer = Transfer(blocks[:hit], spec.block_ids.tolist(), context)
            self._check_bytes(transfer)
            self.loads.append(transfer)

    def _lookup_prefix(self, context: ReqContext, blocks: list[OffloadKey]) -> list[bool | None]:
        name, before = context.req_id, self._num_out_of_patience
        answers = self.manager.lookup_prefix(blocks, context)
        self._take_events()
        assert len(answers) == len(blocks) or answers[-1] is False
        assert False not in answers[:-1]
        for key, answer in zip(blocks, answers):
            self._check_answer(key, answer, context)
        if self._num_out_of_patience > before:
            assert self.most_spent_s[name] >= MAX_WAIT_S - 1e-6, "nothing was on its way to it for so long"
        unanswered = {key for key, answer in zip(blocks, answers) if answer is None}
        open_keys = self.open.setdefault(name, set())
        open_keys.difference_update(key for key, answer in zip(blocks, answers) if answer is not None)
        open_keys |= unanswered
        asked = self.asked.get(name)
        if unanswered:
            assert self.least_spent_s[name] < MAX_WAIT_S + 1e-6, "deferred beyond its patience"
            if asked is None or asked.step != self.step_number:
                asked = self.asked[name] = _Unanswered(self.step_number, set(), set())
            asked.keys |= unanswered
            asked.on_their_way |= unanswered
        elif asked is not None and asked.step != self.step_number:
            del self.asked[name]
        return answers

    @property
    def _num_out_of_patience(self) -> float:
        return self.manager.get_stats()["lookups_out_of_patience",]

    def pass_time(self, seconds: float) -> None:
        """Advance the clock without a question.

        A request's time limit runs only while something is on its way to it.
        """
        for name, asked in self.asked.items():
            if any(map(self._is_in_flight, asked.on_their_way)):
                self.least_spent_s[name] += seconds
        for name, keys in self.open.items():
            if any(self._is_in_flight(key) or self._is_unknown(key) for key in keys):
                self.most_spent_s[name] += seconds
        self.rig.clock.advance(seconds)

    def _is_in_flight(self, key: OffloadKey) -> bool:
        block = self.rig.primary.slots.get(key)
        return block is not None and not block.is_ready

    def _is_unknown(self, key: OffloadKey) -> bool:
        return any(tier.answers.get(key, True) is None for tier in self.rig.tiers)

    def _check_answer(self, key: OffloadKey, answer: bool | None, context: ReqContext) -> None:
        assert (answer is True) == (key in self.resident)
        if answer is not None:
            return
        below = [tier for tier in self.rig.tiers if tier.lookup(key, context) is not False]
        if key in self._coming() | self.queued or any(key in store.keys for store in self.stores if not store.is_stale):
            return
        assert below, "deferred for a block that nobody has"
        if any(tier.lookup(key, context) for tier in below):
            may_wait = any(tier.lookup(key, context) is None for tier in below)
            (self.undecided if may_wait else self.queued).add(key)

    def _coming(self) -> set[OffloadKey]:
        jobs = [job for tier in self.rig.tiers for job in tier.jobs.values()]
        return {key for job in jobs if job.is_promotion and job.job_id not in self.late_jobs for key in job.keys}

    def complete_load(self, transfer: Transfer) -> None:
        self._check_bytes(transfer)
        self.manager.complete_load(transfer.keys, transfer.context)

    # ------------------------------------------------------------------------------------------------- writing

    def prepare_store(self, context: ReqContext, offered: list[OffloadKey]) -> None:
        output = self.manager.prepare_store(offered, context)
        self.asked.pop(context.req_id, None)
        self._take_events()
        if output is None:
            return
        assert not set(output.keys_to_store) & self.resident
        assert not set(output.evicted_keys) & set(offered), "never evicts a key of its own call"
        if not output.keys_to_store:
            return
        transfer = Transfer(output.keys_to_store, output.store_spec.block_ids.tolist(), context)
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            self.rig.memory.write(slot, content(key))
        self.stores.append(transfer)

    def complete_store(self, transfer: Transfer, success: bool, named: bool) -> None:
        before = [len(tier.log) for tier in self.rig.tiers]
        self.manager.complete_store(transfer.keys, transfer.context if named else None, success)
        if success and not transfer.is_stale:
            for tier, start, mode in zip(self.rig.tiers, before, self.cascade):
                submitted = [
                    key for call in tier.log[start:] if call.req_id == transfer.context.req_id for key in call.keys
                ]
                if mode == "on_store" or tier.policy is OffloadPolicy.REQUEST_LEVEL:
                    assert set(transfer.keys) <= set(submitted), (
                        "a completed store goes to every tier that asked for it"
                    )
                else:
                    assert not set(transfer.keys) & set(submitted), "not stored on its way in"

    # --------------------------------------------------------------------------------------------- steps, tiers

    def step(self) -> None:
        below = [set(tier.blocks) for tier in self.rig.tiers]
        seen = [len(tier.log) for tier in self.rig.tiers]
        being_written = [
            {key for job in tier.jobs.values() if not job.is_promotion and self._is_behind(job) for key in job.keys}
            for tier in self.rig.tiers
        ]
        self._expect_submits(self.manager.on_schedule_end, everything=True)
        self.step_number += 1
        self._take_events()  # of promotions that ended, and may be next to go already
        for tier, mode, there, writing, start in zip(self.rig.tiers, self.cascade, below, being_written, seen):
            for call in tier.log[start:]:
                if call.req_id == WRITE_BACK:
                    assert mode == "on_evict" and call.name in ("submit_store", "touch")
                    assert set(call.keys) <= self.resident
                    if call.name == "touch":
                        assert set(call.keys) <= there, "only what is below is used there"
                        continue
                    assert not set(call.keys) & there, "what is below is not written again"
                    assert not set(call.keys) & writing, "nor what is being written"

    def _is_behind(self, job: JobMetadata) -> bool:
        return job.req_context.req_id == WRITE_BACK and job.job_id not in self.late_jobs

    def _expect_submits(self, call, *, everything: bool = False) -> None:  # type: ignore[no-untyped-def]
        seen = [len(tier.log) for tier in self.rig.tiers]
        call()
        loads = [
            (tier, key)
            for tier, start in zip(self.rig.tiers, seen)
            for entry in tier.log[start:]
            if entry.name == "submit_load"
            for key in entry.keys
        ]
        found = [key for _, key in loads]
        assert len(found) == len(set(found)), "promoted twice"
        assert set(found) <= self.queued | self.undecided
        if everything:
            assert set(found) >= self.queued, "a promotion that was answered for is not begun"
            self.undecided.clear()
        self.queued -= set(found)

    def end_job(self, tier: FakeTier, job_id: int, how: str, tear: bool) -> None:
        keys = tier.jobs[job_id].keys
        for asked in self.asked.values():
            asked.on_their_way.difference_update(keys)  # the next call that polls ends them, and may begin them again
        tier.finish([job_id], success=how != "job_fails", lose=keys[-1:] if how == "job_loses" else (), tear=tear)

    def lose_patience(self, context: ReqContext, blocks: list[OffloadKey], in_steps: bool) -> None:
        if None in self._lookup_prefix(context, blocks):
            for _ in range(2 if in_steps else 0):
                self.step()
                self.pass_time(MAX_WAIT_S / 2)
            if not in_steps:
                self.pass_time(MAX_WAIT_S)
            assert None not in self._lookup_prefix(context, blocks)

    def reset(self, hangs: bool) -> None:
        self.rig.tiers[0].hangs = hangs
        self.manager.reset_cache()
        self.rig.tiers[0].hangs = False
        for transfer in (*self.stores, *self.loads):
            transfer.is_stale = True
        self.late_jobs |= {job_id for tier in self.rig.tiers for job_id in tier.jobs}
        self.queued.clear()
        self.undecided.clear()
        self.open.clear()
        self._take_events(is_reset=True)
        assert not self.resident

    # ---------------------------------------------------------------------------------------------- invariants

    def _take_events(self, is_reset: bool = False) -> None:
        for tier, unseen in zip(self.rig.tiers, self.never_below):
            unseen.difference_update(tier.blocks)
        for event in self.manager.take_events():
            if event.medium == "CPU":
                keys = set(event.keys)
                assert len(keys) == len(event.keys)
                assert keys <= self.resident if event.removed else not keys & self.resident
                self.resident ^= keys
                if event.removed and not is_reset:
                    for mode, unseen in zip(self.cascade, self.never_below):
                        if mode == "on_evict":
                            self.most_dropped += len(keys)
                            self.least_dropped += len(keys & unseen)

    def _check_bytes(self, transfer: Transfer) -> None:
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            assert self.rig.memory.read(slot) == content(key), f"wrong bytes for {key!r}"

    @invariant()
    def books_agree(self) -> None:
        self.manager.check_invariants()
        for asked in self.asked.values():
            asked.on_their_way = set(filter(self._is_in_flight, asked.on_their_way))
        self._take_events()
        ready = {key for key in UNIVERSE if (block := self.rig.primary.slots.get(key)) is not None and block.is_ready}
        assert ready == self.resident

    @invariant()
    def every_resident_block_has_its_own_bytes(self) -> None:
        for key in self.resident:
            block = self.rig.primary.slots.get(key)
            assert block is not None
            assert self.rig.memory.read(block.block_id) == content(key)
        for transfer in (*self.loads, *self.stores):
            self._check_bytes(transfer)
        for tier in self.rig.tiers:
            assert all(block == content(key) for key, block in tier.blocks.items())

    @invariant()
    def no_slot_is_written_by_one_and_used_by_another(self) -> None:
        jobs = [job for tier in self.rig.tiers for job in tier.jobs.values()]
        written = [slot for store in self.stores for slot in store.slots]
        written += [slot for job in jobs if job.is_promotion for slot in job.block_ids.tolist()]
        read = {slot for load in self.loads for slot in load.slots}
        read |= {slot for job in jobs if not job.is_promotion for slot in job.block_ids.tolist()}
        assert len(written) == len(set(written))
        assert not set(written) & read

    @invariant()
    def each_tier_is_informed_of_an_end_once_and_last(self) -> None:
        for tier in self.rig.tiers:
            ended: set[str | None] = set()
            for call in tier.log:
                if call.name == "touch":
                    continue
                assert call.req_id not in ended, f"{call} after the request's end"
                if call.name == "on_request_finished":
                    ended.add(call.req_id)
            assert not ended & self.live.keys()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for transfer in self.stores:
            self.manager.complete_store(transfer.keys, transfer.context)
        self.stores.clear()
        for transfer in self.loads:
            self.manager.complete_load(transfer.keys, transfer.context)
        self.loads.clear()
        for tier in self.rig.tiers:
            tier.answers.clear()
        self.rig.finish()
        self._everybody_is_answered()
        for context in list(self.live.values()):
            self.manager.on_request_finished(context)
        for _ in range(3):
            self.rig.finish()
        assert not self.manager.has_pending_work()
        for tier in self.rig.tiers:
            ended = sorted(str(call.req_id) for call in tier.calls("on_request_finished"))
            assert ended == sorted(f"r{n + 1}" for n in range(self.started))
        stats = self.manager.get_stats()
        assert stats["primary_blocks_pinned",] == 0
        self._take_events()
        assert self.least_dropped <= stats["cascades", "dropped"] <= self.most_dropped
        assert stats["primary_blocks_used",] == len({*map(bytes, self._resident_now())})
        self.manager.shutdown()
        self.manager.shutdown()
        for tier, mode in zip(self.rig.tiers, self.cascade):
            begun, ended = (
                [call.req_id for call in tier.calls(name)].count(WRITE_BACK)
                for name in ("on_new_request", "on_request_finished")
            )
            assert begun == ended == (mode == "on_evict")
            if mode == "on_evict":
                assert self.resident <= tier.blocks.keys(), "a clean end leaves everything below"

    def _resident_now(self) -> set[OffloadKey]:
        self._take_events()
        return self.resident

    def _everybody_is_answered(self) -> None:
        """Check, without any time passing, that each request that keeps asking gets an answer in a few steps of I/O."""
        waiting = {f"{req_id}{chain}": (context, chain) for req_id, context in self.live.items() for chain in CHAINS}
        for _ in range(2 * LENGTH):
            for name, (context, chain) in list(waiting.items()):
                if None not in self.rig.ask(prefix(LENGTH, of=chain), context):
                    del waiting[name]
            self.rig.step()
            self.rig.finish()
        assert not waiting, f"deferred for ever: {sorted(waiting)}"


TestTieringMachine = TieringMachine.TestCase
TestTieringMachine.settings = settings(max_examples=by_size(quick=60, thorough=600), stateful_step_count=60)
