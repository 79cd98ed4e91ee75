# SPDX-License-Identifier: Apache-2.0
"""The second node of an engine: ``vllm serve --headless --node-rank 1``, without the command."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.engines.vllm.harness import settings


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    given: dict[str, Any] = json.loads(sys.argv[1])
    model, gpu_blocks, extra = given.pop("model"), given.pop("gpu_blocks"), given.pop("extra")
    arguments = EngineArgs(model=model, **(settings(gpu_blocks, extra) | given))
    executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
