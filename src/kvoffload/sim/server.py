# SPDX-License-Identifier: Apache-2.0
"""Serves the requests of a trace, one at a time, through a manager called as the connector calls it.

Only whole blocks count, and the last token is never part of a hit. Hits are touched and loaded. Computed blocks are
offered chunk by chunk, in portions by the connector's own rule. Refused ones are offered again in each later step and
at the end, when the whole prefix is touched.
A model with recurrent states keeps one at the last whole block of each prompt, as vLLM does unless it is configured to
keep more, and a hit ends where there is one.
``tests/integration/test_simulator_agrees.py`` compares it with the reference engine and the connector, block for block.
The caller supplies clock and manager: with virtual ones it is a simulator (``driver.py``), with a real manager over
real memory it is a replay (``bench/placement.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, overload

from kvoffload.base import (
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    StepWork,
    get_offload_block_hash,
    make_offload_key,
)
from kvoffload.config import GroupKind
from kvoffload.connector.groups import GroupGeometry, find_hit, possible_hit
from kvoffload.connector.offers import Turnover, offer_in_portions
from kvoffload.connector.requests import UNLIMITED
from kvoffload.sim.device_cache import DeviceCache
from kvoffload.sim.disk import Link
from kvoffload.sim.trace import Trace


class Clock(Protocol):
    """Virtual seconds, which pass only in ``advance_to``, or real ones."""

    @property
    def now_s(self) -> float: ...

    def advance_to(self, time_s: float) -> None:
        """Returns when the time is ``time_s`` or later."""


UNKNOWN_TIER = "?"
"""Whence a block came that was on its way when the request arrived."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that one request found. Each counts for the highest tier that had it when the request arrived."""

    device: int
    host: int
    below: Mapping[str, int] = field(default_factory=dict)
    """By the tier's label."""

    @property
    def disk(self) -> int:
        """Of all tiers below host memory."""
        return sum(self.below.values())

    @property
    def blocks(self) -> int:
        """Of all tiers."""
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The keys of one prompt's whole blocks."""

    path: list[OffloadKey]
    states: tuple[_StateKeys, ...]
    """By group of states."""
    ends: list[int]
    """Numbers of blocks, ascending, after which a state may have been kept: those where some prompt ended. Empty for
    models with attention alone."""

    @property
    def num_keys(self) -> int:
        """Those that the connector has, which does not know where a state was kept."""
        return len(self.path) * (1 + len(self.states))

    @property
    def keys(self) -> list[OffloadKey]:
        """By position, without the states that were not kept."""
        keys: list[OffloadKey] = []
        begin = 0
        for end in self.ends:
            keys += [*self.path[begin:end], *self.states_at(end)]
            begin = end
        return keys + self.path[begin:]

    def states_at(self, num_blocks: int) -> list[OffloadKey]:
        return [group[num_blocks - 1] for group in self.states] if num_blocks else []


class _StateKeys(Sequence[OffloadKey]):
    """The key of a group's state at each block's end, made when it is asked for."""

    def __init__(self, path: list[OffloadKey], group: int) -> None:
        self._path, self._group = path, group

    def __len__(self) -> int:
        return len(self._path)

    @overload
    def __getitem__(self, index: int) -> OffloadKey: ...
    @overload
    def __getitem__(self, index: slice) -> list[OffloadKey]: ...
    def __getitem__(self, index: int | slice) -> OffloadKey | list[OffloadKey]:
        if isinstance(index, slice):
            return [self._key(of) for of in self._path[index]]
        return self._key(self._path[index])

    def _key(self, of: OffloadKey) -> OffloadKey:
        return make_offload_key(get_offload_block_hash(of), self._group)


class Server:
    """Serves requests, one at a time. While blocks are promoted it asks ``wait`` for the time at which it may be worth
    looking them up again.

    ``accesses`` (whole blocks asked for), ``loaded`` (blocks and states loaded to the device) and ``prefill_s``
    (seconds of prefill) are totals so far.
    """

    def __init__(
        self,
        trace: Trace,
        keys: Sequence[OffloadKey],
        manager: OffloadingManager,
        clock: Clock,
        *,
        cpu_blocks: int,
        prefill_tokens_per_s: float,
        chunk_tokens: int,
        block_bytes: int,
        load_link: Link,
        device: DeviceCache | None,
        wait: Callable[[], float],
        state_slots: int = 0,
    ) -> None:
        """``state_slots``: blocks that a recurrent state takes; 0 for models with attention alone."""
        self._trace, self._keys, self._manager, self._clock = trace, keys, manager, clock
        self._turnover = Turnover(cpu_blocks)
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._chunk_blocks = max(chunk_tokens // trace.block_tokens, 1)
        self._block_bytes = block_bytes
        self._load_link = load_link
        self._device = device
        self._wait = wait
        tokens = trace.block_tokens
        self._groups = (
            GroupGeometry(0, GroupKind.FULL_ATTENTION, tokens, 1, tokens, 1),
            *(GroupGeometry(1 + at, GroupKind.SINGLE_STATE, tokens, 1, tokens, 1) for at in range(state_slots)),
        )
        self._ends: set[OffloadKey] = set()
        self.accesses = self.loaded = 0
        self.prefill_s = 0.0

    def serve(self, request: int) -> Hit:
        """Serves one request from its arrival to its end."""
        return finish(self.steps(request), self._clock)

    def steps(self, request: int, output: int | None = None) -> Generator[float, None, Hit]:
        """Serves one request, and gives the times that it waits for: go on when the clock has come there. ``output``:
        tokens to generate, by default as many as in the trace."""
        trace, clock, manager = self._trace, self._clock, self._manager
        prompt = int(trace.input_tokens[request])
        output = int(trace.output_tokens[request]) if output is None else output
        numbers = trace.blocks(request)
        whole = min(len(numbers), prompt // trace.block_tokens)
        asked = self._prompt([self._keys[number] for number in numbers[:whole].tolist()])
        path = asked.path
        usable = min(whole, max(prompt - 1, 0) // trace.block_tokens)
        context = ReqContext(str(request), next_use=trace.next_use(request))
        manager.on_new_request(context)
        on_device = self._find_on_device(asked, usable)
        in_host, total_hit = yield from self._found_below(asked, on_device, usable, context)
        hit = total_hit - on_device
        sources = manager.sources(context)
        below: dict[str, int] = {}
        for key in path[on_device + in_host : total_hit]:
            tier = sources.get(key, UNKNOWN_TIER)
            below[tier] = below.get(tier, 0) + 1
        loaded = path[on_device:total_hit] + (asked.states_at(total_hit) if hit else [])
        if self._device is not None:
            self._device.admit(path, on_device, total_hit, asked.states_at(on_device), asked.states_at(total_hit))
        if loaded:
            manager.prepare_load(loaded, context)
            yield self._load_link.queue(clock.now_s, len(loaded) * self._block_bytes)
        if total_hit:
            manager.touch(path[:total_hit] + asked.states_at(total_hit), context)
        if loaded:
            manager.complete_load(loaded, context)
        offers = yield from self._prefill(asked, total_hit, prompt, output, context)
        if self._device is not None:
            self._device.release()
        last_step = offers.end_step()
        if not offers.is_done:
            offers.offer(len(path))
        # The head must outlive the tail, but portions were stored head first, so that the tail is the most recent.
        if path:
            manager.touch(asked.keys, context)
        manager.on_request_finished(context)
        if last_step:  # its stores end after the request
            manager.complete_store(last_step, context)
        if offers.in_flight:  # the last offer's stores start in another step
            manager.on_schedule_end()
            offers.complete()
        self.accesses += whole
        self.loaded += len(loaded)
        return Hit(on_device, min(in_host, hit), below)

    def _prompt(self, path: list[OffloadKey]) -> _Prompt:
        states = tuple(_StateKeys(path, group.index) for group in self._groups[1:])
        if states and path:
            self._ends.add(path[-1])
        return _Prompt(path, states, [end for end, key in enumerate(path, 1) if key in self._ends] if states else [])

    def _find_on_device(self, asked: _Prompt, usable: int) -> int:
        """Blocks at the head of the prompt that the device has, up to a state that it has."""
        if self._device is None:
            return 0
        found = self._device.find_prefix(asked.path[:usable])
        if not asked.states:
            return found
        ends = (end for end in reversed(asked.ends) if end <= found)
        return next((end for end in ends if self._device.has(asked.states_at(end))), 0)

    def _found_below(
        self, asked: _Prompt, on_device: int, usable: int, context: ReqContext
    ) -> Generator[float, None, tuple[int, int]]:
        """(blocks that host memory had at first, blocks of the whole hit once all promotions have ended)."""
        in_host: int | None = None
        ends: set[OffloadKey] | None = None

        def ask(keys: Sequence[OffloadKey]) -> Sequence[bool | None]:
            nonlocal in_host
            answers = self._manager.lookup_prefix(keys, context, ends)
            if in_host is None:  # attention is asked first
                in_host = next((at for at, answer in enumerate(answers) if answer is not True), len(answers))
            return answers

        keys = (asked.path, *asked.states)
        tokens = self._trace.block_tokens
        most = usable * tokens
        if asked.states:
            peek = partial(self._manager.peek, req_context=context)
            possible, ends = possible_hit(self._groups, keys, peek, self._manager.holds, on_device * tokens, most)
            most = most if possible is None else possible
        while (hit := find_hit(self._groups, keys, ask, on_device * tokens, most)) is None:
            self._manager.on_schedule_end()
            yield self._wait()
        if hit > on_device * tokens:
            self._manager.on_schedule_end()  # without a load, the same step computes
        return in_host or 0, hit // tokens

    def _prefill(
        self, asked: _Prompt, first: int, prompt: int, output: int, context: ReqContext
    ) -> Generator[float, None, _Offers]:
        """Computes the rest of the prompt, and offers the blocks of each chunk when it is computed.

        Blocks that were refused are offered again in each step of decoding, and when the request ends.
        """
        clock, block_tokens, path = self._clock, self._trace.block_tokens, asked.path
        tokens = prompt - first * block_tokens
        begin_s, seconds = clock.now_s, tokens / self._prefill_tokens_per_s
        offers = _Offers(self._manager, asked, first, context, self._turnover)
        done = 0
        for stop in range(first + self._chunk_blocks, len(path) + self._chunk_blocks, self._chunk_blocks):
            stop = min(stop, len(path))
            computed = (stop - first) * block_tokens
            before, done = done, min(computed, tokens)
            self._note_step(done - before, tokens - done, is_continued=bool(before))
            yield begin_s + min(seconds, computed / self._prefill_tokens_per_s)
            offers.complete()
            offers.offer(stop)
            self._manager.on_schedule_end()
            if self._device is not None:
                self._device.fill(path, stop)
        offers.forget_states()
        if self._device is not None and first < len(path):
            self._device.keep(asked.states_at(len(path)))
        if done < tokens:
            self._note_step(tokens - done, 0, is_continued=bool(done))
        yield begin_s + seconds
        for _ in range(2):  # steps that decode, whose times show how long the last chunks took
            self._manager.note_step(StepWork(tokens=1, is_continued=True))
        if self._device is not None:
            # All tokens but the last have KV; a partial block takes a whole one.
            self._device.grow(-(-max(prompt + output - 1, prompt) // block_tokens))
        # The stores of the last chunk end when another step is planned: one that computes the rest of the prompt beyond
        # its whole blocks, or one that decodes.
        last_step = first + (max(tokens, 1) - 1) // (self._chunk_blocks * block_tokens) * self._chunk_blocks
        if output > 1 or last_step >= len(path):
            offers.complete()
        if output > 1:
            self._manager.on_schedule_end()  # decoding goes on in steps
        for _ in range(output - 1):
            if offers.is_done:
                break
            offers.offer(len(path))
            self._manager.on_schedule_end()
            offers.complete()
        self.prefill_s += seconds
        return offers

    def _note_step(self, tokens: int, queued_tokens: int, *, is_continued: bool) -> None:
        self._manager.note_step(StepWork(tokens, tokens, queued_tokens, is_continued))


def finish(steps: Generator[float, None, Hit], clock: Clock) -> Hit:
    """Serves a request to its end, waiting for each time that ``steps`` gives."""
    while True:
        try:
            clock.advance_to(next(steps))
        except StopIteration as end:
            hit: Hit = end.value
            return hit


class _Portion(NamedTuple):
    blocks: list[OffloadKey]
    largest: int
    is_last: bool
    states: list[OffloadKey]

    @property
    def keys(self) -> list[OffloadKey]:
        return self.blocks + self.states


class _Offers:
    """One request's offers for store. Each store takes less than a step: ``complete``, called before the next step is
    planned, ends it. The state at the last block's end is offered with that block, or never."""

    def __init__(
        self, manager: OffloadingManager, asked: _Prompt, first: int, context: ReqContext, turnover: Turnover
    ) -> None:
        self._manager, self._path, self._context = manager, asked.path, context
        self._in_use, self._num_in_use = asked.keys, asked.num_keys
        self._states = asked.states_at(len(asked.path)) if first < len(asked.path) else []
        self._next_block = first
        self._turnover = turnover
        self.max_blocks, self.touched_at = UNLIMITED, 0
        turnover.touched(self)
        self._in_flight: list[OffloadKey] = []

    @property
    def is_done(self) -> bool:
        return not self.max_blocks or self._next_block >= len(self._path)

    @property
    def in_flight(self) -> bool:
        return bool(self._in_flight)

    def end_step(self) -> list[OffloadKey]:
        """The stores that the step started. The caller ends them."""
        stores, self._in_flight = self._in_flight, []
        return stores

    def offer(self, stop: int) -> None:
        """Offers the blocks before ``stop`` that were not accepted yet."""

        def plan(max_blocks: int) -> _Portion | None:
            keys = self._path[self._next_block : min(self._next_block + max_blocks, stop)]
            with_states = self._states if self._next_block + len(keys) == len(self._path) else []
            if not keys and not with_states:
                return None
            return _Portion(keys, max(len(keys), 1), self._next_block + len(keys) == stop, with_states)

        num_in_flight = len(self._in_flight)
        offer_in_portions(self, self._manager, self._context, plan, self._accept)
        if len(self._in_flight) > num_in_flight and self._turnover.is_due(self):
            self._manager.touch(self._in_use, self._context)
            self._turnover.touched(self, self._num_in_use)

    def _accept(self, portion: _Portion, output: PrepareStoreOutput | None) -> bool:
        assert output is not None, "every portion of a trace has keys"
        self._next_block += len(portion.blocks)
        if portion.states:
            self._states = []
        self._in_flight += output.keys_to_store
        self._turnover.count(len(output.keys_to_store))
        return bool(output.evicted_keys) and not set(self._in_use).isdisjoint(output.evicted_keys)

    def forget_states(self) -> None:
        """The step that named them is over."""
        self._states = []

    def complete(self) -> None:
        """Ends the stores in flight."""
        if self._in_flight:
            self._manager.complete_store(self._in_flight, self._context)
            self._in_flight = []
