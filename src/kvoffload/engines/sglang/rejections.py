# SPDX-License-Identifier: Apache-2.0
"""The table of setups of SGLang that kvoffload rejects. Loads neither SGLang nor torch.

The code that finds a setup raises the error of its row. ``docs/compatibility.md`` lists all rows.
"""

from __future__ import annotations

from kvoffload.engines.rejections import Rejection

_ACCEPTED = "SGLang's own backends accept it."
_NAMES_KEYS = "SGLang's own backends accept it. Their keys contain only the model's name and the ranks."
_TRIED = "install a version of SGLang that docs/sglang.md names"

VERSION = Rejection(
    setup="versions of SGLang that lack something that kvoffload uses",
    reason="kvoffload's calls would fail while SGLang serves",
    remedy="install the version that was tried, or serve without kvoffload",
    opened_by="A newer version of kvoffload.",
    peers="SGLang's own backends belong to its release.",
)
MEDIA = Rejection(
    setup="persistent tiers with models that accept media, without media_never_change",
    reason="a client may name a medium by a hash (mm_hashes) of another one, and others would get its pages",
    remedy="set media_never_change among kvoffload's options if no client does so, start SGLang with "
    "--language-model-only, or leave out the tier",
    opened_by="SGLang would have to say which pages contain media that a client named.",
    peers=_NAMES_KEYS,
)
KV_DTYPE = Rejection(
    setup="the values mxfp8, nvfp4 and fp4_mx_block16 of --kv-cache-dtype",
    reason="SGLang keeps their scales apart from the pages, and no test has shown that these are right",
    remedy="use auto, bfloat16, fp8_e4m3 or fp8_e5m2, or serve without kvoffload",
    opened_by="Pages that contain the scales, and a test on a GPU.",
    peers=_ACCEPTED,
)
LONG_ROPE = Rejection(
    setup="LongRoPE with a --context-length above the trained length",
    reason="one longer request changes the rotary factors of its whole batch, so equal tokens have unequal pages",
    remedy="set --context-length to the trained length at most, or serve this model without kvoffload",
    opened_by="SGLang would have to choose the factors of each request separately.",
    peers="SGLang's own cache and backends accept it, and may return wrong answers.",
)
WEIGHTS = Rejection(
    setup="persistent tiers with weights that kvoffload cannot tell from others",
    reason="others may find their pages",
    remedy="name the weights with --weight-version, and give each set of weights another name",
    opened_by="A hash of weights that do not come from the model's files.",
    peers=_NAMES_KEYS,
)
ADAPTER = Rejection(
    setup="persistent tiers with adapters of --lora-paths whose files cannot be read",
    reason="kvoffload cannot tell which weights the adapter has",
    remedy="load it with /load_lora_adapter instead, or make its files readable",
    opened_by="Nothing, because only the files prove which weights they contain.",
    peers=_NAMES_KEYS,
)
SCALES = Rejection(
    setup="a --quantization-param-path that cannot be read",
    reason="pages depend on its scales",
    remedy="make the file readable, or leave out the option",
    opened_by="Nothing, because only the file proves which scales it contains.",
    peers="SGLang does not start either.",
)
NUMBER_FORMAT = Rejection(
    setup="persistent tiers if SGLang does not say which eight-bit numbers it computes with",
    reason="GPUs of different makers read the same bytes as different numbers",
    remedy=f'{_TRIED}, or use tiers of type "memory"',
    opened_by="SGLang would have to name the format.",
    peers=_NAMES_KEYS,
)
UNREADABLE = Rejection(
    setup="settings of SGLang that kvoffload cannot read",
    reason="pages depend on them",
    remedy=_TRIED,
    opened_by="A rule in kvoffload for these settings.",
    peers=_NAMES_KEYS,
)
UNWATCHED = Rejection(
    setup="servers whose updates of weights kvoffload has not watched",
    reason="their pages may belong to other weights",
    remedy="let SGLang load kvoffload's plugin (see SGLANG_PLUGINS, and install kvoffload into SGLang's environment), "
    "or start the server with --hicache-storage-backend dynamic",
    opened_by="SGLang would have to tell its storage about updates.",
    peers="SGLang's own backends do not watch updates.",
)
PAGES = Rejection(
    setup="host pools of SGLang whose pages kvoffload cannot find in memory",
    reason="a wrong guess would give wrong tokens",
    remedy="use --hicache-mem-layout page_first, or serve this model without kvoffload",
    opened_by="A rule in kvoffload for this pool.",
    peers="SGLang's own backends need the same functions of a pool.",
)

TABLE = (VERSION, MEDIA, KV_DTYPE, LONG_ROPE, WEIGHTS, ADAPTER, SCALES, NUMBER_FORMAT, UNREADABLE, UNWATCHED, PAGES)
