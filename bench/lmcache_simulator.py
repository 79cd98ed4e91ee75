# SPDX-License-Identifier: Apache-2.0
"""LMCache's analysis of a trace beside kvoffload's simulator, at the same sizes of host memory::

    python -m bench.lmcache_simulator TRACE [--percent 2,5,10,20] [--lookups FILE]

The trace is written as the lookups that an LMCache server logs, which ``lmcache tool cache-simulator simulate`` reads;
``--lookups`` keeps them. ``KVOFFLOAD_LMCACHE_PYTHON`` names the interpreter that has LMCache (``scripts/bench-lmcache``
makes one). Both count the tokens of whole blocks that a request's longest prefix finds in host memory alone. Not among
``BENCHES``: there is a trace to name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kvoffload.sim.driver import SimConfig, simulate
from kvoffload.sim.trace import Trace
from kvoffload.sim.trace_files import load_trace

POLICIES = ("lru", "density")
_BLOCK_BYTES = 1 << 20
"""Of both. Only how many blocks host memory holds means anything."""


def write_lookups(trace: Trace, file: Path) -> None:
    """One line for each request, with its whole blocks: what LMCache looks up and stores."""
    with file.open("w") as out:
        for request, (num_whole, time_s) in enumerate(
            zip(trace.num_whole.tolist(), trace.times_s.tolist(), strict=True)
        ):
            event = {
                "timestamp": time_s,
                "model_name": trace.name,
                "chunk_hashes": [f"{number:x}" for number in trace.blocks(request)[:num_whole].tolist()],
                "seq_len": int(trace.input_tokens[request]),
                "chunk_size": trace.block_tokens,
            }
            out.write(json.dumps(event) + "\n")


def hits_of_lmcache(lookups: Path, num_blocks: int) -> float:
    """Percent of the prompts' tokens."""
    python = os.environ.get("KVOFFLOAD_LMCACHE_PYTHON", sys.executable)
    command = [python, "-m", "lmcache.cli.main", "tool", "cache-simulator", "simulate", "-i", str(lookups)]
    command += ["--cache-capacity-gib", str(num_blocks * _BLOCK_BYTES / (1 << 30))]
    command += ["--kv-bytes-per-chunk", str(_BLOCK_BYTES), "-o", str(lookups.with_suffix(".png"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Token hit rate +: ([\d.]+)%", done.stdout)
    assert found, done.stdout
    return float(found[1])


def hits_of_kvoffload(trace: Trace, num_blocks: int, policy: str) -> float:
    config = SimConfig(cpu_blocks=num_blocks, block_bytes=_BLOCK_BYTES, policy=policy, store_threshold=1)
    return 100 * simulate(trace, config).token_hit_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--percent", default="2,5,10,20", help="sizes of host memory, of the trace's different blocks")
    parser.add_argument("--max-requests", type=int)
    parser.add_argument("--lookups", type=Path)
    options = parser.parse_args()
    trace = load_trace(options.trace, max_requests=options.max_requests)
    print("| host memory, blocks | LMCache's simulator | " + " | ".join(POLICIES) + " |")
    with tempfile.TemporaryDirectory() as directory:
        lookups = options.lookups or Path(directory) / "lookups.jsonl"
        write_lookups(trace, lookups)
        for percent in map(float, options.percent.split(",")):
            num_blocks = max(1, round(trace.num_unique * percent / 100))
            rates = [hits_of_lmcache(lookups, num_blocks)]
            rates += [hits_of_kvoffload(trace, num_blocks, policy) for policy in POLICIES]
            print(
                f"| {num_blocks:,} ({percent:g} %) | " + " | ".join(f"{rate:.2f} %" for rate in rates) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
