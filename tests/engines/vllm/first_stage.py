# SPDX-License-Identifier: Apache-2.0
"""An extension of vLLM's workers that lets its first model runner start a pipeline with a drafter.

This runner, the only one on CPUs, calls the drafter on all ranks, although only the last stage has one. The extension
gives all other stages a drafter that does nothing. From the second token of an answer on, the runner is wrong in such a
setup, with and without kvoffload. vLLM's second runner, which GPUs use, knows the stages.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class _Absent(EagleProposer):
    kv_cache_gid = -1
    draft_attn_groups: tuple[Any, ...] = ()
    supports_mm_inputs = False

    def __init__(self) -> None:
        pass

    def load_model(self, *_: Any, **__: Any) -> None: ...
    def dummy_run(self, *_: Any, **__: Any) -> None: ...
    def initialize_attn_backend(self, *_: Any, **__: Any) -> None: ...
    def initialize_cudagraph_keys(self, *_: Any, **__: Any) -> None: ...


_init = GPUModelRunner.__init__


@functools.wraps(_init)
def _init_stage(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if not get_pp_group().is_last_rank:
        self.drafter = _Absent()


GPUModelRunner.__init__ = _init_stage


class Extension:
    """Named by ``worker_extension_cls``, so that workers import this module."""
