# SPDX-License-Identifier: Apache-2.0
"""Test that vLLM contains the names that the adapter uses, without importing it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.engines.vllm.sources import Sources
from tests.engines.vllm.surface import SINCE, missing

from kvoffload.engines.vllm.versions import NEWEST, vllm_release

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ADAPTER = Path(__file__).parents[3] / "src" / "kvoffload" / "engines" / "vllm"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def test_all_that_the_adapter_touches_is_there(sources: Sources) -> None:
    assert missing(sources, vllm_release()) == []


def test_what_an_older_version_lacks_is_known(sources: Sources) -> None:
    lacks = sorted(name for name, since in SINCE.items() if vllm_release() < since)
    assert missing(sources, NEWEST) == lacks


class Changed(Sources):
    """The sources at ``root``, with one text of one module replaced by another."""

    def __init__(self, root: Path, module: str, old: str, new: str) -> None:
        super().__init__(root)
        text = (root / module.replace(".", "/")).with_suffix(".py").read_text()
        assert old in text
        self._trees[module] = ast.parse(text.replace(old, new))


@pytest.mark.parametrize(
    ("module", "old", "new", "named"),
    [
        ("vllm.v1.request", "self.block_hashes", "self.hashes", "vllm.v1.request.Request.block_hashes"),
        ("vllm.v1.core.sched.output", "class SchedulerOutput", "class Output", "SchedulerOutput.preempted_req_ids"),
        ("vllm.v1.core.kv_cache_utils", "def maybe_convert_block_hash", "def convert", "hash(hash_bytes)"),
        (
            "vllm.distributed.utils",
            "pp_size: int",
            "pp_size: int, heads: int",
            "get_pp_indices(num_hidden_layers,",
        ),
        ("vllm.distributed.kv_events", "token_ids:", "tier: str\n    token_ids:", "BlockStored.tier, which is new"),
        (
            "vllm.v1.core.block_pool",
            "def touch(self, blocks",
            "def touch(self, owner, blocks",
            "Pool.touch(blocks)",
        ),
        (BASE, "def wait_for_save(self)", "def wait_for_save(self, step)", "KVConnectorBase_V1.wait_for_save()"),
        (BASE, "def wait_for_save(self)", "def wait_for_all(self)", "KVConnectorBase_V1.wait_for_all, which is new"),
        (BASE, "def has_pending_push_work", "def has_work", "KVConnectorBase_V1.has_pending_push_work"),
    ],
)
def test_what_a_newer_version_has_otherwise_is_named(
    module: str, old: str, new: str, named: str, sources: Sources
) -> None:
    found = missing(Changed(sources.root, module, old, new), (0, 34))
    assert any(named in each for each in found), found


def test_a_newer_version_may_have_more(sources: Sources) -> None:
    lacks = missing(sources, (0, 34))  # the lane may be of an older version
    more = Changed(sources.root, "vllm.distributed.utils", "pp_size: int", "pp_size: int, heads: int = 1")
    assert missing(more, (0, 34)) == lacks
    hook = "def a_new_hook(self) -> None: ...\n\n    "
    more = Changed(sources.root, BASE, "def has_pending_push_work", f"{hook}def has_pending_push_work")
    assert missing(more, (0, 34)) == lacks


def test_a_reset_reaches_the_connector_by_the_names_in_the_docs(sources: Sources) -> None:
    """Over HTTP and in Python they differ. A wrong one over HTTP is ignored, and the answer is success all the same."""
    router = sources.module("vllm.entrypoints.serve.dev.cache.api_router")
    routes = {node.name: node for node in ast.walk(router) if isinstance(node, ast.AsyncFunctionDef)}
    arguments = routes["reset_prefix_cache"].args.args
    assert [each.arg for each in arguments][1:] == ["reset_running_requests", "reset_external"]
    python = sources.methods("vllm.entrypoints.llm", "LLM")["reset_prefix_cache"]
    assert python.parameters[-2:] == ("reset_running_requests", "reset_connector")
    told = (ADAPTER.parents[3] / "docs" / "weights.md").read_text()
    assert "/reset_prefix_cache?reset_running_requests=true&reset_external=true" in told
    assert "reset_prefix_cache(reset_running_requests=True, reset_connector=True)" in told


def test_no_connector_of_vllm_asks_for_another_layout(sources: Sources) -> None:
    """``MultiConnector`` raises where two of its connectors ask for different ones."""
    asked: dict[str, set[object]] = {}
    folder = sources.root / "vllm/distributed/kv_transfer/kv_connector/v1"
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "get_required_kvcache_layout":
                returned = {each.value for each in ast.walk(node) if isinstance(each, ast.Return)}
                names = {each.value for each in returned if isinstance(each, ast.Constant)} - {None}
                asked[str(path.relative_to(folder))] = names
    assert {"LBHNC"} in asked.values()
    others = {file for file, names in asked.items() if not names <= {"LBHNC"}}
    # For HiSparse, and for hidden states as drafts. We refuse both.
    assert others <= {"hisparse/connector.py", "offloading_connector.py", "example_hidden_states_connector.py"}


def test_the_limit_as_it_was_asked_for_is_kept(sources: Sources) -> None:
    """vLLM assigns it after its fields are read, so it is none of them."""
    assert "self.original_max_model_len = self.max_model_len" in (sources.root / "vllm/config/model.py").read_text()


def test_the_kinds_of_groups_are_still_called_so(sources: Sources) -> None:
    kinds = sources.class_of("vllm.v1.kv_cache_interface", "KVCacheSpecKind")
    values = {
        node.value.value for node in kinds.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert {"full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "mamba"} <= values
