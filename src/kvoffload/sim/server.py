# SPDX-License-Identifier: Apache-2.0
"""Serves the requests of a trace, one at a time, through a manager called as the connector calls it.

Only whole blocks count, and the last token is never part of a hit. Hits are touched and loaded. Computed blocks are
offered chunk by chunk, in portions by the connector's own rule. Refused ones are offered again in each later step and
at the end, when the whole prefix is touched.
``tests/integration/test_simulator_agrees.py`` compares it with the reference engine and the connector, block for block.
The caller supplies clock and manager: with virtual ones it is a simulator (``driver.py``), with a real manager over
real memory it is a replay (``bench/placement.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvoffload.base import OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext, StepWork
from kvoffload.connector.offers import Turnover, offer_in_portions
from kvoffload.connector.requests import PortionState
from kvoffload.sim.device_cache import DeviceCache
from kvoffload.sim.disk import Link
from kvoffload.sim.trace import Trace

__all__ = ["Clock", "Hit", "Server"]


class Clock(Protocol):
    """Virtual seconds, which pass only in ``advance_to``, or real ones."""

    @property
    def now_s(self) -> float: ...

    def advance_to(self, time_s: float) -> None:
        """Returns when the time is ``time_s`` or later."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that one request found. Each counts for the highest tier that had it when the request arrived."""

    device: int
    host: int
    disk: int


class Server:
    """Serves requests, one per call of ``serve``. While blocks are promoted it calls ``wait``, which returns when it
    may be worth looking them up again.

    ``accesses`` (whole blocks asked for) and ``prefill_s`` (seconds of prefill) are totals so far.
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
        wait: Callable[[], None],
    ) -> None:
        self._trace, self._keys, self._manager, self._clock = trace, keys, manager, clock
        self._turnover = Turnover(cpu_blocks)
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._chunk_blocks = max(chunk_tokens // trace.block_tokens, 1)
        self._block_bytes = block_bytes
        self._load_link = load_link
        self._device = device
        self._wait = wait
        self.accesses = 0
        self.prefill_s = 0.0

    def serve(self, request: int) -> Hit:
        trace, clock, manager = self._trace, self._clock, self._manager
        prompt, output = int(trace.input_tokens[request]), int(trace.output_tokens[request])
        numbers = trace.blocks(request)
        whole = min(len(numbers), prompt // trace.block_tokens)
        path = [self._keys[number] for number in numbers[:whole].tolist()]
        usable = min(whole, max(prompt - 1, 0) // trace.block_tokens)
        context = ReqContext(str(request))
        manager.on_new_request(context)
        on_device = self._device.find_prefix(path[:usable]) if self._device is not None else 0
        in_host, hit = self._found_below(path[on_device:usable], context)
        loaded = path[on_device : on_device + hit]
        total_hit = on_device + hit
        if self._device is not None:
            self._device.admit(path, on_device, total_hit)
        if loaded:
            manager.prepare_load(loaded, context)
            begin_s = clock.now_s
            clock.advance_to(self._load_link.queue(begin_s, len(loaded) * self._block_bytes))
            manager.note_step(
                StepWork(loaded_bytes=len(loaded) * self._block_bytes, load_seconds=clock.now_s - begin_s)
            )
        if total_hit:
            manager.touch(path[:total_hit], context)
        if loaded:
            manager.complete_load(loaded, context)
        offers = self._prefill(path, total_hit, prompt, output, context)
        if self._device is not None:
            self._device.release()
        last_step = offers.end_step()
        offers.offer(len(path))
        # The head must outlive the tail, but portions were stored head first, so that the tail is the most recent.
        if path:
            manager.touch(path, context)
        manager.on_request_finished(context)
        if last_step:  # its stores end after the request
            manager.complete_store(last_step, context)
        if offers.in_flight:  # the last offer's stores start in another step
            manager.on_schedule_end()
            offers.complete()
        self.accesses += whole
        return Hit(on_device, min(in_host, hit), hit - min(in_host, hit))

    def _found_below(self, path: list[OffloadKey], context: ReqContext) -> tuple[int, int]:
        """(blocks that host memory had at first, length of the hit once all promotions have ended)."""
        answers = self._manager.lookup_prefix(path, context)
        in_host = next((at for at, answer in enumerate(answers) if answer is not True), len(answers))
        while None in answers:
            self._manager.on_schedule_end()
            self._wait()
            answers = self._manager.lookup_prefix(path, context)
        self._manager.on_schedule_end()
        return in_host, sum(answer is True for answer in answers)

    def _prefill(self, path: list[OffloadKey], first: int, prompt: int, output: int, context: ReqContext) -> _Offers:
        """Computes the rest of the prompt, and offers the blocks of each chunk when it is computed.

        Blocks that were refused are offered again in each step of decoding, and when the request ends.
        """
        clock, block_tokens = self._clock, self._trace.block_tokens
        tokens = prompt - first * block_tokens
        begin_s, seconds = clock.now_s, tokens / self._prefill_tokens_per_s
        offers = _Offers(self._manager, path, first, context, self._turnover)
        done = 0
        for stop in range(first + self._chunk_blocks, len(path) + self._chunk_blocks, self._chunk_blocks):
            stop = min(stop, len(path))
            computed = (stop - first) * block_tokens
            self._note_step(min(computed, tokens) - done, tokens - min(computed, tokens), is_continued=bool(done))
            done = min(computed, tokens)
            clock.advance_to(begin_s + min(seconds, computed / self._prefill_tokens_per_s))
            offers.complete()
            offers.offer(stop)
            self._manager.on_schedule_end()
            if self._device is not None:
                self._device.fill(path, stop)
        if done < tokens:
            self._note_step(tokens - done, 0, is_continued=bool(done))
        clock.advance_to(begin_s + seconds)
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


class _Portion(NamedTuple):
    keys: list[OffloadKey]
    largest: int
    is_last: bool


class _Offers:
    """One request's offers for store. Each store takes less than a step: ``complete``, called before the next step is
    planned, ends it."""

    def __init__(
        self, manager: OffloadingManager, path: list[OffloadKey], first: int, context: ReqContext, turnover: Turnover
    ) -> None:
        self._manager, self._path, self._context = manager, path, context
        self._cursor = first
        self._turnover = turnover
        self._portions = PortionState()
        turnover.admitted(self._portions)
        self._in_flight: list[OffloadKey] = []

    @property
    def is_done(self) -> bool:
        return self._portions.evicts_itself or self._cursor >= len(self._path)

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
            keys = self._path[self._cursor : min(self._cursor + max_blocks, stop)]
            return _Portion(keys, len(keys), self._cursor + len(keys) == stop) if keys else None

        num_in_flight = len(self._in_flight)
        offer_in_portions(self._portions, self._manager, self._context, plan, self._accept)
        if len(self._in_flight) > num_in_flight and self._turnover.is_due(self._portions):
            self._manager.touch(self._path, self._context)
            self._turnover.touched(self._portions, len(self._path))

    def _accept(self, portion: _Portion, output: PrepareStoreOutput | None) -> bool:
        assert output is not None, "every portion of a trace has keys"
        self._cursor += len(portion.keys)
        self._in_flight += output.keys_to_store
        self._turnover.count(len(output.keys_to_store))
        return bool(output.evicted_keys) and not set(self._path).isdisjoint(output.evicted_keys)

    def complete(self) -> None:
        """Ends the stores in flight."""
        if self._in_flight:
            self._manager.complete_store(self._in_flight, self._context)
            self._in_flight = []
