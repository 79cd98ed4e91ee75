# SPDX-License-Identifier: Apache-2.0
"""An engine over several nodes has a name for its weights only if all nodes have the same. Without vLLM."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.configs import know_plain_specs, vllm_config

from kvoffload.config import parse_config
from kvoffload.engines.vllm.other_nodes import EqualWeights, num_other_nodes, weights_on_node
from kvoffload.engines.vllm.weights import name_of_current_files

DISK = {
    "cpu_bytes_to_use": "1MiB",
    "spec_name": "TieringOffloadingSpec",
    "secondary_tiers": [{"type": "disk", "path": "/kv", "max_bytes": "1GiB"}],
}


@pytest.fixture(autouse=True)
def _plain_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_plain_specs(monkeypatch)


def test_one_node_needs_no_other() -> None:
    assert EqualWeights(lambda: "a", 0)() == "a"
    assert EqualWeights(lambda: None, 0)() is None


def test_all_nodes_must_have_reported_the_same_weights(caplog: pytest.LogCaptureFixture) -> None:
    for last, name in (("a", "a"), ("b", None)):
        weights = EqualWeights(lambda: "a", 2)
        weights.add(["a"])
        assert weights() is None, "one node has not reported"
        weights.add([])
        weights.add([last])
        assert weights() == weights() == name
    (record,) = caplog.records
    assert "nodes of this engine have different weights" in record.message


def on_two_nodes(directory: Path, **changes: Any) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_text("weights")
    nodes = {"nnodes_within_dp": 2, "world_size": 4, "tensor_parallel_size": 4}
    changes |= {f"parallel_config__{name}": value for name, value in nodes.items()}
    return vllm_config(model_config__model=str(directory), **changes)


def test_the_first_worker_of_each_other_node_reports_its_files(tmp_path: Path) -> None:
    config, disk = on_two_nodes(tmp_path / "model"), parse_config(DISK)
    reports = [weights_on_node(config, disk, rank) for rank in range(4)]
    deadline = time.monotonic() + 60
    while reports[2]() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [report() for report in reports] == [None, None, name_of_current_files(config), None]
    assert num_other_nodes(config, disk) == 1


@pytest.mark.parametrize(
    "extra", [{"cpu_bytes_to_use": "1MiB"}, DISK | {"weights_version": "1"}], ids=["host", "named"]
)
def test_nothing_is_reported_if_no_block_needs_the_name(extra: dict[str, Any], tmp_path: Path) -> None:
    config, ours = on_two_nodes(tmp_path / "model"), parse_config(extra)
    assert num_other_nodes(config, ours) == 0
    assert weights_on_node(config, ours, 2)() is None
