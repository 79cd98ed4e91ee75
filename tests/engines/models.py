# SPDX-License-Identifier: Apache-2.0
"""Small random models, made in seconds and loaded offline, whose greedy tokens show whether the KV cache is right.

A freshly initialised transformer is a bad witness: its attention is almost uniform, so a wrong block of KV hardly
changes the output. So queries and keys are scaled up until attention picks out a few positions anywhere in the context,
and values until the picked positions dominate the residual stream. In float32, the gap between the two best tokens is
then orders of magnitude above rounding, while one wrong block changes the tokens. The tests check both.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 512
HEAD_DIM = 64
SEED = 20

_SCALES = {"q_proj": 2.5, "k_proj": 2.5, "v_proj": 1.5, "o_proj": 1.5}
"""Gain of each projection over the one that keeps the variance of its input."""


@dataclass(frozen=True)
class SmallModel:
    """A model directory, and the model's facts that tests need."""

    path: str
    num_layers: int
    kv_heads: int
    num_groups: int


def write_llama(directory: Path, seed: int = SEED, kv_heads: int = 2, num_layers: int = 4) -> SmallModel:
    """Layers of full attention: one KV group. Other seeds give other weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=VOCAB - 1,
    )
    _write(LlamaForCausalLM, config, directory, seed)
    return SmallModel(str(directory), num_layers=num_layers, kv_heads=kv_heads, num_groups=1)


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": 0,
}


def write_gemma3(directory: Path, sliding_window: int = 512) -> SmallModel:
    """Six layers, four of them with a sliding window: vLLM makes three KV groups that share their tensors."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sliding, full = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(
        **_COMMON,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=sliding_window,
        layer_types=[sliding, sliding, full, sliding, sliding, full],
    )
    _write(Gemma3ForCausalLM, config, directory)
    return SmallModel(str(directory), num_layers=6, kv_heads=2, num_groups=3)


def write_falcon_h1(directory: Path) -> SmallModel:
    """Four layers, each with attention and a Mamba2 state side by side."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **_COMMON,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )
    _write(FalconH1ForCausalLM, config, directory)
    return SmallModel(str(directory), num_layers=4, kv_heads=2, num_groups=2)


def write_granite_hybrid(directory: Path) -> SmallModel:
    """Three layers of Mamba2 and one of attention, without experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_COMMON,
        intermediate_size=512,
        shared_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_expand=1,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=32,
        attention_multiplier=HEAD_DIM**-0.5,
        position_embedding_type="rope",
    )
    _write(GraniteMoeHybridForCausalLM, config, directory)
    return SmallModel(str(directory), num_layers=4, kv_heads=2, num_groups=4)


def write_nemotron_h(directory: Path) -> SmallModel:
    """Mamba2, attention and feed-forward layers in turn."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_COMMON,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp", "mamba"],
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=32,
        use_mamba_kernels=False,
    )
    _write(NemotronHForCausalLM, config, directory)
    return SmallModel(str(directory), num_layers=4, kv_heads=2, num_groups=4)


def write_mamba2(directory: Path) -> SmallModel:
    """Four layers of Mamba2: states alone, and no attention."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        **{key: value for key, value in _COMMON.items() if key != "max_position_embeddings"},
        num_hidden_layers=4,
        expand=1,
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=32,
    )
    _write(Mamba2ForCausalLM, config, directory)
    return SmallModel(str(directory), num_layers=4, kv_heads=0, num_groups=1)


def write_qwen3_next(directory: Path) -> SmallModel:
    """Three layers of linear attention (gated delta rule) and one of attention, with few experts. Heads of 128,
    and bfloat16 when it runs: vLLM's CPU kernels take nothing else."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_COMMON,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,  # so large that a state fits into a block of 32 tokens
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    _write(Qwen3NextForCausalLM, config, directory)
    return SmallModel(str(directory), num_layers=4, kv_heads=4, num_groups=4)


IMAGE_SIZE = 56
IMAGE_TOKENS = 16


def write_paligemma(directory: Path) -> SmallModel:
    """Write a model that sees images, with the processor that prepares them."""
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        GemmaConfig,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipVisionConfig,
    )
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    text = GemmaConfig(
        **_COMMON,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_image_tokens=IMAGE_TOKENS,
    )
    vision = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=14,
        projection_dim=256,
    )
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=VOCAB - 2, projection_dim=256, hidden_size=256
    )
    _write(PaliGemmaForConditionalGeneration, config, directory)
    file = directory / "model.safetensors"
    # vLLM knows the names of older versions of transformers. Gemma's head is its embedding, so without a large gain of
    # attention, it repeats the last token.
    old = {
        re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): weight
        * (8 if ".o_proj." in name else 1)
        for name, weight in load_file(file).items()
    }
    save_file(old, file, metadata={"format": "pt"})
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["<image>"], words["\n"] = words.pop(f"w{VOCAB - 2}"), words.pop(f"w{VOCAB - 3}")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    images = SiglipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    images.image_seq_length = IMAGE_TOKENS
    PaliGemmaProcessor(images, AutoTokenizer.from_pretrained(directory)).save_pretrained(directory)
    return SmallModel(str(directory), num_layers=2, kv_heads=2, num_groups=1)


def _write(model_class: Any, config: Any, directory: Path, seed: int = SEED) -> None:
    import torch

    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            kind = name.split(".")[-2]
            if kind in ("q_norm", "k_norm"):
                weight.fill_(_SCALES["q_proj"] - 1.0)  # Gemma normalises queries and keys, then multiplies by 1 + w
            if weight.dim() != 2:
                continue  # norms, biases, and a state space's parameters other than matrices keep their initial values
            gain = _SCALES.get(kind, 1.0)
            fan_in = weight.shape[1]
            is_gemma = hasattr(config, "query_pre_attn_scalar") or config.model_type == "paligemma"
            if "embed" in name and not is_gemma:
                fan_in = (
                    1  # Gemma multiplies its embeddings by the root of the hidden size; others take them as they are
                )
            weight.normal_(0.0, gain / fan_in**0.5)
    model.save_pretrained(directory, safe_serialization=True)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one word per token (``w0 w1 …``), so that texts and token ids convert without loss."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w1", bos_token="w0", eos_token=f"w{VOCAB - 1}", pad_token="w0"
    ).save_pretrained(directory)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["chat_template"] = template
    config_path.write_text(json.dumps(config, indent=1))
