# SPDX-License-Identifier: Apache-2.0
"""Test that SGLang with kvoffload's tiers generates the same greedy tokens as SGLang alone, even if the store fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline, Prompt, random_tokens
from tests.engines.models import SEED, write_llama
from tests.engines.sglang.server import PAGE_BYTES, PAGE_TOKENS, Answer, Server, backend, families, pages
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(4000)]

POLICIES = ("best_effort", "wait_complete", "timeout")


@pytest.fixture(scope="module")
def baseline(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Return the answers of SGLang without HiCache."""
    server = Server(llama, tmp_path_factory.mktemp("alone"), hicache=False).wait_until_ready()
    try:
        answers = server.generate(families(), gaps=True)
    finally:
        server.kill()
    return Baseline({name: {"tokens": each.tokens, "gap": each.gap} for name, each in answers.items()})


@pytest.fixture(scope="module")
def running(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server to which each test attaches its own storage."""
    server = Server(llama, tmp_path_factory.mktemp("running")).wait_until_ready()
    yield server
    server.kill()


@pytest.fixture
def attached(running: Server) -> Iterator[Server]:
    """Yield the server with empty pools. A storage that the test attaches is detached after it."""
    running.forget()
    yield running
    running.detach()


def disk(path: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "max_bytes": "256MiB"}


def judge(baseline: Baseline, answers: Mapping[str, Answer]) -> None:
    assert baseline.wrong({name: each.tokens for name, each in answers.items()}) == []


def from_storage(answers: Mapping[str, Answer]) -> int:
    return sum(each.cached["storage"] for each in answers.values())


def assert_all_found(prompts: list[Prompt], answers: Mapping[str, Answer]) -> None:
    """Assert that all full pages were found, except that SGLang computes at least the last token of a prompt."""
    assert {name: sum(each.cached.values()) for name, each in answers.items()} == {
        prompt.name: (len(prompt.token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS for prompt in prompts
    }


def store_command(*arguments: str) -> dict[str, Any]:
    """``kvoffload store``, whose exit code must be 0."""
    done = subprocess.run(
        [sys.executable, "-m", "kvoffload", "store", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_pages_come_back_after_evictions_and_after_a_restart(llama: str, baseline: Baseline, tmp_path: Path) -> None:
    prompts, storage = families(), backend(disk(tmp_path / "kv"))
    server = Server(llama, tmp_path, storage=storage).wait_until_ready()
    try:
        judge(baseline, server.generate(prompts))
        again = server.generate_in_turn(prompts)
        judge(baseline, again)
        assert from_storage(again) > 0, "nothing was evicted from SGLang's pools"
        server.detach()
    finally:
        server.stop()
    server = Server(llama, tmp_path, storage=storage).wait_until_ready()
    try:
        found = server.generate_in_turn(prompts)
        judge(baseline, found)
        assert_all_found(prompts, found)
        assert from_storage(found) >= pages(prompts) * PAGE_TOKENS
        assert server.metrics()["tier_blocks_loaded|disk"] >= pages(prompts)
    finally:
        server.stop()


def test_a_server_killed_amid_its_stores(llama: str, baseline: Baseline, tmp_path: Path) -> None:
    prompts, storage = families(), backend(disk(tmp_path / "kv"))
    server = Server(llama, tmp_path, storage=storage, layout="layer_first").wait_until_ready()
    is_killed = threading.Event()

    def ask_for_ever() -> None:
        number = 0
        while not is_killed.is_set():
            number += 1
            try:
                server.generate([*prompts, *(Prompt(f"{n}", random_tokens(number * 100 + n, 200)) for n in range(50))])
            except OSError:
                return

    asking = threading.Thread(target=ask_for_ever)
    asking.start()
    try:
        server.wait_until_stored(pages(prompts) // 3)
    finally:
        server.kill()
        is_killed.set()
        asking.join()
    server = Server(llama, tmp_path, storage=storage, layout="layer_first").wait_until_ready()
    try:
        answers = server.generate_in_turn(prompts)
        judge(baseline, answers)
        assert from_storage(answers) > 0
    finally:
        server.stop()


def test_flipped_bytes_are_misses(attached: Server, baseline: Baseline, tmp_path: Path) -> None:
    prompts, storage = families(), backend(disk(tmp_path / "kv"))
    attached.attach(storage)
    attached.generate(prompts)
    attached.wait_until_stored(pages(prompts))
    attached.detach()
    attached.forget()
    for slab in (tmp_path / "kv").glob("*/*.slab"):
        content = bytearray(slab.read_bytes())
        for page in range(0, len(content), 3 * PAGE_BYTES):
            content[page + PAGE_BYTES // 2] ^= 0x10
        slab.write_bytes(content)
    attached.attach(storage)
    answers = attached.generate_in_turn(prompts)
    judge(baseline, answers)
    assert from_storage(answers) > 0
    assert attached.metrics()["tier_corrupt_blocks|disk"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_prefetch_policy_ends_while_redis_is_frozen(
    policy: str, attached: Server, baseline: Baseline, tmp_path: Path
) -> None:
    prompts = families(40)
    redis = RedisServer(tmp_path)
    try:
        attached.attach(backend({"type": "redis", "url": redis.url}, max_wait_s=1), policy)
        judge(baseline, attached.generate(prompts))
        attached.wait_until_stored(pages(prompts) // 2, "redis")
        attached.forget()
        redis.freeze()
        judge(baseline, attached.generate(prompts))
        redis.thaw()

        def is_read_again() -> bool:
            attached.forget()
            answers = attached.generate_in_turn(prompts[:8])
            judge(baseline, answers)
            return from_storage(answers) > 0

        if policy != "best_effort":  # with which an idle server waits for no page
            attached.wait_until(is_read_again, "pages are read from Redis again")
    finally:
        redis.stop()


def test_a_storage_that_hangs_can_be_detached(attached: Server, baseline: Baseline, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        attached.attach(backend({"type": "redis", "url": redis.url}, max_wait_s=1))
        redis.freeze()
        judge(baseline, attached.generate(families(20)))
        attached.detach()
        judge(baseline, attached.generate(families(20)))
        attached.attach(backend(disk(tmp_path / "kv")))
        attached.forget()
        attached.generate(families(20))
        attached.wait_until_stored(pages(families(20)))
    finally:
        redis.stop()


def test_two_tiers_and_pages_as_tensors(attached: Server, baseline: Baseline, tmp_path: Path) -> None:
    prompts = families(40)
    tiers = [disk(tmp_path / "kv"), {"type": "fs", "path": str(tmp_path / "shared"), "max_bytes": "256MiB"}]
    for interface in (1, 0):
        attached.attach(backend(*tiers, interface=interface))
        attached.forget()
        attached.generate(prompts)
        for tier in ("disk", "fs"):
            attached.wait_until_stored(pages(prompts), tier)
        attached.detach()
    shutil.rmtree(tmp_path / "kv")
    for interface in (1, 0):
        attached.forget()
        attached.attach(backend(*tiers, interface=interface))
        answers = attached.generate_in_turn(prompts)
        judge(baseline, answers)
        assert_all_found(prompts, answers)
        assert from_storage(answers) > 0
        if interface:
            attached.detach()


def test_nothing_is_found_after_clearing(llama: str, baseline: Baseline, tmp_path: Path) -> None:
    """This test has its own server, because a server that was cleared no longer finds blocks that others store."""
    prompts = families(20)
    server = Server(llama, tmp_path, storage=backend(disk(tmp_path / "kv"))).wait_until_ready()
    try:
        server.generate(prompts)
        server.wait_until_stored(pages(prompts))
        server.clear()
        server.forget()
        answers = server.generate_in_turn(prompts)
        judge(baseline, answers)
        assert from_storage(answers) == 0
        server.forget()
        assert from_storage(server.generate_in_turn(prompts)) > 0
    finally:
        server.stop()


def test_weights_updated_in_place_reach_no_server_with_the_old_ones(
    llama: str, attached: Server, tmp_path: Path
) -> None:
    """The update has no version, like most updates. The storage is cleared after it, as docs/sglang.md says."""
    storage = backend(disk(tmp_path / "kv"))
    before, after = families(24)[:10], families(24)[10:]
    alone = attached.generate([*before, *after], gaps=True)
    baseline = Baseline({name: {"tokens": each.tokens, "gap": each.gap} for name, each in alone.items()})
    attached.forget()
    new = write_llama(tmp_path / "new", seed=SEED + 1).path
    server = Server(llama, tmp_path, storage=storage).wait_until_ready()
    try:
        judge(baseline, server.generate(before))
        server.wait_until_stored(pages(before))
        server.update_weights(new)
        answers = {name: each.tokens for name, each in server.generate(after).items()}
        assert baseline.wrong(answers), "the new weights answer as the old ones"
        server.forget()  # writes that have started end
        server.clear()
        server.generate(after)
        server.wait_until_stored(pages(before) + pages(after))
        server.forget()
        again = server.generate_in_turn(after)
        assert {name: each.tokens for name, each in again.items()} == answers
        assert from_storage(again) > 0, "since it was cleared, the server stores what the new weights made"
        server.detach()
    finally:
        server.stop()
    attached.attach(storage)
    found = attached.generate_in_turn([*before, *after])
    judge(baseline, found)
    assert from_storage(found) > 0


def test_the_command_line_maintains_what_sglang_wrote(attached: Server, baseline: Baseline, tmp_path: Path) -> None:
    root, prompts = str(tmp_path / "kv"), families(20)
    attached.attach(backend(disk(tmp_path / "kv")))
    attached.generate(prompts)
    attached.wait_until_stored(pages(prompts))
    attached.detach()
    [listed] = store_command("ls", root)["namespaces"]
    assert listed["namespace"].lower().startswith("sglang-llama")
    assert listed["blocks"] >= pages(prompts)
    assert store_command("clear", root, "--all", "--yes")["deleted"] == listed["blocks"]
    assert store_command("ls", root)["namespaces"] == []
    attached.forget()
    attached.attach(backend(disk(tmp_path / "kv")))
    answers = attached.generate(prompts)
    judge(baseline, answers)
    assert from_storage(answers) == 0
