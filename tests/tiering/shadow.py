# SPDX-License-Identifier: Apache-2.0
"""Compare an earlier revision's tiering manager with this tree's on a trace, request by request::

    python -m tests.tiering.shadow e40bdb9e TRACE cost always+asked+ahead+resets+hints [--requests 150]

A case is ``always`` or ``cost``, with optional parts: ``asked``, a second tier that must find out which blocks it
contains; ``ahead``, lookups of requests that queue; ``resets`` of the cache; ``hints``. Two requests are alike if they
hit equally many blocks, from the same tiers, after the same time.

Time is a number, tiers read one block after another, and the engine computes prompts at a fixed speed. So each run has
the same result, on any machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import zstandard

from kvoffload.base import NextUse, ReqContext, RequestOffloadingContext, StepWork, make_offload_key
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.tiering.base import JobResult, SecondaryTierManager
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager

ROOT = Path(__file__).parents[2]
TOKENS, TOKENS_PER_S, STEP_S = 64, 20_000.0, 0.02
MOST_BLOCKS, MOST_RUNNING, ARRIVAL_S, RESET_AFTER = 1200, 6, 0.35, 150
HINTS = NextUse.UNKNOWN, NextUse.SOON, NextUse.NEVER


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Memory:
    def __init__(self, num_slots: int) -> None:
        self._view = memoryview(bytearray(num_slots)).cast("B", (num_slots, 1))

    def create_kv_memoryview(self) -> memoryview:
        return self._view


class Tier(SecondaryTierManager):
    """Reads one block after another. If it must find out, it answers 8 ms after it was asked."""

    def __init__(self, view: memoryview, name: str, block_s: float, must_ask: bool, capacity: int, clock: Clock):
        super().__init__(view, name)
        self.max_backlog_blocks = 10**9
        self.block_s, self.must_ask, self.capacity, self.clock = block_s, must_ask, capacity, clock
        self.blocks, self.known, self.open, self.jobs = {}, {}, {}, []
        self.free_s, self.news = 0.0, []

    def lookup(self, key, req_context):
        if not self.must_ask:
            return key in self.blocks
        self.progress()
        if key not in self.known:
            self.open.setdefault(key, self.clock() + 0.008)
        return self.known.get(key)

    def progress(self):
        while self.open and self.open[key := next(iter(self.open))] <= self.clock():
            del self.open[key]
            self.known[key] = key in self.blocks
            self.news.append(key)

    def take_news(self):
        self.progress()
        news, self.news = self.news, []
        return news

    def submit_store(self, job):
        for key in job.keys:
            self.blocks[key] = self.known[key] = True
            if len(self.blocks) > self.capacity:
                oldest = next(iter(self.blocks))
                del self.blocks[oldest]
                self.known[oldest] = False
        self.jobs.append((self.clock() + 0.001, job, job.keys))

    def submit_load(self, job):
        self.free_s = max(self.free_s, self.clock()) + 0.0005 + self.block_s * len(job.keys)
        self.jobs.append((self.free_s, job, [key for key in job.keys if key in self.blocks]))

    def get_finished_jobs(self):
        ended = [each for each in self.jobs if each[0] <= self.clock()]
        self.jobs = [each for each in self.jobs if each[0] > self.clock()]
        return [JobResult(job.job_id, len(good) == len(job.keys), good, at_s) for at_s, job, good in ended]

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def has_pending_work(self):
        return bool(self.jobs)

    def drain_jobs(self):
        self.clock.now_s = max([self.clock(), *(at_s for at_s, _, _ in self.jobs)])


def serve(trace: str, case: str, num_requests: int, num_slots: int) -> None:
    """Prints a line for each request: its number, hit, blocks, seconds of waiting, blocks of the hit by tier."""
    options = {*case.split("+")}
    prompts = []
    with open(trace, "rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file)):
            ids = json.loads(line)["hash_ids"][:MOST_BLOCKS]
            prompts.append([make_offload_key(b"%032d" % (each % (1 << 64)), 0) for each in ids])
            if len(prompts) == num_requests:
                break
    clock = Clock()
    primary = CPUPrimaryTierOffloadingManager(num_slots, Memory(num_slots), "lru")
    tiers = [Tier(primary.kv_view, "disk", 0.0004, False, 8_000, clock)]
    if "asked" in options:
        tiers.append(Tier(primary.kv_view, "remote", 0.0008, True, 60_000, clock))
    worth = BlockWorth(1 << 20, (TOKENS,), None) if "cost" in options else None
    manager = TieringOffloadingManager(primary, tiers, max_wait_s=5.0, block_worth=worth, clock=clock)
    queue, waiting, running, stores, num_served, step = [*enumerate(prompts)], [], [], [], 0, 0
    while queue or waiting or running or stores:
        clock.now_s = max(clock.now_s, step * STEP_S)
        step += 1
        while queue and queue[0][0] * ARRIVAL_S <= clock():
            number, keys = queue.pop(0)
            hint = HINTS[number % 3] if "hints" in options else NextUse.UNKNOWN
            context = ReqContext(f"r{number}", next_use=hint)
            manager.on_new_request(context)
            waiting.append((number, keys, context, clock()))
        for keys, context in stores:
            manager.complete_store(keys, context)
        stores = []
        for each in [*waiting]:
            if len(running) >= MOST_RUNNING:
                break
            number, keys, context, since_s = each
            context.tokens_ahead = None
            answers = manager.lookup_prefix(keys, context) if keys else []
            if None in answers:
                continue
            hit = answers.index(False) if False in answers else len(answers)
            sources = manager.sources(context)
            by_tier = Counter(sources.get(key, "CPU") for key in keys[:hit])
            waiting.remove(each)
            if hit:
                manager.prepare_load(keys[:hit], context)
                manager.touch(keys[:hit], context)
            running.append([keys, context, hit, True, (len(keys) - hit) * TOKENS])
            print(json.dumps([number, hit, len(keys), round(clock() - since_s, 3), by_tier]))
        left, prompt_tokens = TOKENS_PER_S * STEP_S, 0
        for each in [*running]:
            keys, context, hit, is_loading, tokens = each
            if is_loading and hit:
                manager.complete_load(keys[:hit], context)
            taken = min(left, tokens)
            left -= taken
            prompt_tokens += int(taken)
            each[3:] = False, tokens - taken
            if each[4] > 0:
                continue
            for at in range(hit, len(keys), 64):
                output = manager.prepare_store(keys[at : at + 64], context)
                if output is None:
                    break
                stores.append((output.keys_to_store, context))
            manager.touch(keys, context)
            manager.on_request_finished(context)
            running.remove(each)
            num_served += 1
            if "resets" in options and num_served % RESET_AFTER == 0:
                manager.reset_cache()
        queued = int(sum(each[4] for each in running))
        manager.note_step(StepWork(prompt_tokens + len(running), prompt_tokens, queued, bool(running)))
        ahead = queued
        for _, keys, context, _ in waiting if "ahead" in options and len(running) >= MOST_RUNNING else ():
            context.tokens_ahead = ahead
            if keys and not manager.is_unchanged(context) and manager.reads_ahead():
                manager.lookup_prefix(keys, context)
            ahead += len(keys) * TOKENS
        manager.on_schedule_end()


# ---------------------------------------------------------------------------------------------------------- comparison


def main() -> None:
    parser = argparse.ArgumentParser(description="Two tiering managers on a trace, request by request.")
    parser.add_argument("revision")
    parser.add_argument("trace")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--slots", type=int, default=1500)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", asked.revision, "src"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)

        def run(case: str, source: Path) -> dict[int, list]:
            sizes = str(asked.requests), str(asked.slots)
            command = [sys.executable, "-m", __spec__.name, "--serve", asked.trace, case, *sizes]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source / "src"), str(ROOT)])}
            done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            return {row[0]: row[1:] for row in map(json.loads, done.stdout.splitlines())}

        for case in asked.cases:
            print(f"{case}: {_difference(run(case, Path(folder)), run(case, ROOT))}")


def _difference(before: dict[int, list], now: dict[int, list]) -> str:
    differ = [number for number in before if before[number] != now[number]]
    other_hit = sum(before[number][0] != now[number][0] for number in differ)
    hits = [sum(row[0] for row in rows.values()) for rows in (before, now)]
    waited_s = [sum(row[2] for row in rows.values()) / len(rows) for rows in (before, now)]
    return (
        f"{len(differ)} of {len(before)} requests differ, {other_hit} in their hits; "
        f"{hits[0]} and {hits[1]} blocks hit; {waited_s[0]:.3f} and {waited_s[1]:.3f} s in the queue, on average"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        trace, case, num_requests, num_slots = sys.argv[2:]
        serve(trace, case, int(num_requests), int(num_slots))
    else:
        main()
