# SPDX-License-Identifier: Apache-2.0
"""Test that someone has judged every field of vLLM's configuration in the sources of the installed version."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tests.engines.vllm.counted import COUNTED_FIELDS, COUNTS, judged
from tests.engines.vllm.sources import Sources

from kvoffload.engines.vllm.fields import FIELDS

FOLLOWED = {
    COUNTS,
    "counts in the keys of adapters (adapters.py), or in the namespace (identity.py)",
    "counts where the drafter has KV (identity.py)",
}
"""Reasons of fields whose own fields are looked at."""

READ_LIMIT = """
layers/attention/mla_attention layers/attention/sparse_mla_attention layers/attention/static_sink_attention
layers/indexer_topk layers/quantization/modelopt_block_quant layers/rocm_paged_mxfp4_indexer
layers/rotary_embedding/phi3_long_rope_scaled_rope layers/sparse_attn_indexer layers/sparse_attn_indexer_kpool
models/cohere_compass models/colpali models/config models/deepseek_ocr models/deepseek_v2 models/deepseek_vl2
models/diffusion_gemma models/embedding_gemma2 models/ernie45_vl models/gemma3_mm models/gemma4_mm models/glm4_1v
models/idefics3 models/internvl models/kimi_k25 models/kimi_vl models/lfm2_vl models/llama4 models/minicpmv
models/minimax_m2 models/mllama4 models/nano_nemotron_vl models/parakeet models/plamo3 models/qwen2_5_vl models/qwen2_vl
models/qwen3_vl models/step3_vl models/transformers/utils models/voxtral models/voxtral_realtime models/deepseek_v32
models/deepseek_v4 models/deepseek_v41 models/dots3_note models/glm5next models/hy_v4 models/inkling models/kimi_k3
models/minimax_m3 models/muse_spark models/step5
"""
"""Modules and packages of models and layers that read ``max_model_len``. It sizes their buffers, and their largest
position, which a ``dynamic`` rope type depends on; but for LongRoPE and Llama 4, which ``identity.py`` knows."""


def classes_of(sources: Sources) -> dict[str, ast.ClassDef]:
    files = [*sorted((sources.root / "vllm/config").glob("*.py")), sources.root / "vllm/v1/kv_cache_interface.py"]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef) and node.decorator_list}


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Names and annotations."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            annotation = ast.unparse(each.annotation)
            if not annotation.startswith(("ClassVar", "InitVar")):
                yield each.target.id, annotation


def reason_of(kind: str, field: str) -> str | None:
    return next((reason for reason, names in judged(kind).items() if field in names.split()), None)


def lineage(kind: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    yield kind
    for base in classes[kind].bases if kind in classes else ():
        yield from lineage(ast.unparse(base), classes)


def in_neither_list(sources: Sources) -> set[str]:
    classes = classes_of(sources)
    specs = {"KVCacheSpec"}
    for name, node in classes.items():  # bases come before the classes that derive from them
        if specs & {ast.unparse(base) for base in node.bases}:
            specs.add(name)
    assert len(specs) > 10
    seen: set[str] = set()
    waiting = ["VllmConfig", *specs]
    missing = set()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for field, annotation in fields_of(classes[kind]):
            reason = next(filter(None, (reason_of(each, field) for each in lineage(kind, classes))), None)
            if reason is None:
                missing.add(f"{kind}.{field}")
            elif reason in FOLLOWED:
                waiting += [name for name in re.findall(r"\w+", annotation) if name in classes]
    assert {"ModelConfig", "MultiModalConfig", "LoRAConfig", "SpeculativeConfig", "MambaSpec"} <= seen
    return missing


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_every_field_counts_or_is_harmless_for_a_reason(sources: Sources) -> None:
    assert in_neither_list(sources) == set()


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_it_is_known_who_reads_the_longest_request(sources: Sources) -> None:
    assert unknown_readers(sources) == set()


def unknown_readers(sources: Sources) -> set[str]:
    known = READ_LIMIT.split()
    unknown = set()
    for folder in ("vllm/model_executor/models", "vllm/model_executor/layers", "vllm/models"):
        for file in (sources.root / folder).rglob("*.py"):
            name = "/".join(file.relative_to(sources.root / folder).parts)
            module = f"{folder.rsplit('/', 1)[-1]}/{name.removesuffix('.py')}"
            reads = "max_model_len" in file.read_text()
            if reads and not any(module == each or module.startswith(f"{each}/") for each in known):
                unknown.add(module)
    return unknown


def test_a_field_stands_in_one_list() -> None:
    for kind in FIELDS | COUNTED_FIELDS:
        names = [name for row in judged(kind).values() for name in row.split()]
        assert len(names) == len(set(names)), kind
