# SPDX-License-Identifier: Apache-2.0
"""Test vLLM over two nodes, with a disk on each: it answers as vLLM alone does, and finds its blocks again.

Both nodes are processes of this machine that communicate over TCP. Each has its own host memory, directory and agent,
and its own network namespace if this user may make one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SEED, SmallModel, write_llama
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.prompts import BLOCK_BYTES, BLOCK_TOKENS, many_prompts
from tests.engines.vllm.test_serving import assert_idle
from tests.engines.vllm.test_topologies import TWO_STAGES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

EXTRA = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 64 * BLOCK_BYTES // 2,  # on each node, for half of 64 blocks: about 20 prompts
    "load_policy": "always",  # the test counts hits, whatever the speed
    "max_wait_s": 300.0,
}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
FULL = {prompt.name: (len(prompt.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in many_prompts()}
"""The number of tokens found of each prompt: all full blocks, except that the last token is computed."""


@pytest.fixture(scope="module")
def right(llama: SmallModel) -> Baseline:
    """Return vLLM's own answers, on one node."""
    return Baseline(run_child("baseline", model=llama.path, family="many"))


@pytest.fixture
def network() -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``run_child`` that give the second node its own network namespace with a virtual wire.

    Without the permission to make one, both nodes use the loopback.
    """
    name, net = f"kvo{os.getpid()}", f"198.18.{os.getpid() % 256}"
    lines = [
        f"netns add {name}",
        f"link add {name} type veth peer name {name} netns {name}",
        f"addr add {net}.1/30 dev {name}",
        f"link set {name} up",
        f"-n {name} addr add {net}.2/30 dev {name}",
        f"-n {name} link set {name} up",
        f"-n {name} link set lo up",
    ]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_HOST_IP": "127.0.0.1"}
    if shutil.which("ip") is None or any(
        subprocess.run(["ip", *line.split()], check=False).returncode for line in lines
    ):
        yield {"environment": environment}
        return
    yield {"environment": environment | {"VLLM_HOST_IP": f"{net}.1", "GLOO_SOCKET_IFNAME": name}, "namespace": name}
    subprocess.run(["ip", "netns", "delete", name], check=True)


def serve(
    llama: SmallModel,
    division: dict[str, Any],
    network: dict[str, Any],
    disks: list[Path],
    rounds: list[tuple[str, int, int]],
    **extra: Any,
) -> list[Any]:
    seen = run_child(
        "two_nodes",
        model=llama.path,
        extra=EXTRA | extra,
        disks=list(map(str, disks)),
        rounds=rounds,
        **division | network,
    )
    assert_idle(seen["idle"])
    return seen["rounds"]  # type: ignore[no-any-return]


def loaded(seen: dict[str, Any]) -> float:
    return float(seen["metrics"].get("promotions|ok", 0))


@pytest.mark.parametrize(
    "division", [TENSOR, pytest.param(TWO_STAGES, marks=pytest.mark.long)], ids=["heads", "stages"]
)
def test_whatever_befalls_the_disk_of_one_node_is_a_miss(
    division: dict[str, Any], llama: SmallModel, right: Baseline, network: dict[str, Any], tmp_path: Path
) -> None:
    trace, disks = tmp_path / "trace.jsonl", [tmp_path / "0", tmp_path / "1"]
    rounds = [("", 0, 40), ("", 0, 40), ("flip", 0, 20), ("refuse_writes", 40, 70), ("", 40, 70), ("remove", 70, 80)]
    found = serve(llama, division, network, disks, rounds, record_trace=str(trace))
    stored, again, flipped, refused, unwritten, _ = found
    for seen in found:
        assert right.wrong(seen["tokens"]) == []
    assert set(stored["cached"].values()) == {0}
    assert again["cached"] == {name: FULL[name] for name in again["cached"]}
    assert loaded(again) > 60, "most of it from the disks of both nodes"
    assert set(flipped["cached"].values()) == {0}
    causes = [cause for line in trace.read_text().splitlines() for cause in json.loads(line)["story"]["missed"]]
    assert "corrupt disk on node 1" in causes
    assert not any("node 0" in cause for cause in causes)
    assert refused["metrics"]["tier_store_failures|disk"] > 0
    assert loaded(unwritten) == 0


@pytest.mark.long
def test_blocks_outlive_the_engine_and_need_both_nodes(
    llama: SmallModel, right: Baseline, network: dict[str, Any], tmp_path: Path
) -> None:
    disks = [tmp_path / "0", tmp_path / "1"]
    # An engine whose nodes have different weights leaves nothing that others find.
    other = write_llama(tmp_path / "other", seed=SEED + 1)
    serve(llama, TENSOR | {"second_model": other.path}, network, disks, [("", 0, 20)])
    stored, again = serve(llama, TENSOR, network, disks, [("", 0, 150), ("", 0, 50)])
    (restarted,) = serve(llama, TENSOR, network, disks, [("", 0, 150)])
    # A part of another node is not taken for one's own; and where one node has lost all, nothing is left.
    (swapped,) = serve(llama, TENSOR, network, disks[::-1], [("", 0, 20)])
    (alone,) = serve(llama, TENSOR, network, [disks[0], tmp_path / "2"], [("", 20, 40)])
    for seen in (stored, again, restarted, swapped, alone):
        assert right.wrong(seen["tokens"]) == []
    assert set(stored["cached"].values()) == set(swapped["cached"].values()) == set(alone["cached"].values()) == {0}
    assert again["cached"] == {name: FULL[name] for name in again["cached"]}
    assert restarted["cached"] == FULL
    assert loaded(restarted) >= sum(FULL.values()) // BLOCK_TOKENS
