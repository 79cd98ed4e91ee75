# SPDX-License-Identifier: Apache-2.0
"""kv-cache-tester's replay of coding agents against vLLM on its CPU platform, without kvoffload and with it::

    .venv-vllm/bin/python -m bench.kv_cache_tester --sources CHECKOUT --traces 0012,0019 [-- OPTIONS OF ITS OWN]

``CHECKOUT`` is a copy of callanjfox/kv-cache-tester (Apache 2.0), which needs pandas and plotly. The model is small and
random, with a token for each byte, and a CPU is slow: prompts and answers have 1/``--scale`` of the trace's tokens.
Nothing of that is for a real node, where ``vllm serve`` and ``trace_replay_tester.py`` run as they are. Not among
``BENCHES``: the development environment has no vLLM.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

DEVICE_TOKENS, BLOCK_TOKENS, MAX_TOKENS = 8_192, 32, 6_144
HOST_BYTES = "2GiB"
USERS = 4


def scaled(trace: dict[str, Any], scale: int) -> dict[str, Any]:
    """The trace with ``1 / scale`` of its tokens. Block ids are chained, so every ``scale``-th names a longer block."""
    trace = trace | {name: trace[name] // scale for name in ("tool_tokens", "system_tokens")}
    trace["requests"] = [
        scaled(each, scale)
        if "requests" in each
        else each
        | {"in": each["in"] // scale, "out": max(1, each["out"] // scale)}
        | {"hash_ids": each["hash_ids"][scale - 1 :: scale]}
        for each in trace["requests"]
    ]
    return trace


def write_model(directory: Path) -> None:
    """A random Llama and a tokenizer of bytes: any text has tokens of its own, and is the same text again."""
    from tests.engines.models import write_llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_llama(directory)
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate([*words, "<s>", "</s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(directory)


@contextmanager
def server(model: Path, directory: Path, is_offloading: bool) -> Iterator[str]:
    """Its url, once it answers."""
    from tests.engines.vllm.harness import CONNECTOR
    from tests.engines.vllm.server import environment_of_the_command
    from tests.ports import free_port

    directory.mkdir()
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--seed", "0"]
    command += ["--max-model-len", str(MAX_TOKENS), "--num-gpu-blocks-override", str(DEVICE_TOKENS // BLOCK_TOKENS)]
    command += ["--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(1 << 28)]
    if is_offloading:
        options = {"kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES}}
        command += ["--kv-transfer-config", json.dumps(CONNECTOR | options)]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment_of_the_command(directory), stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while get(f"{url}/health") is None:
            assert process.poll() is None, (directory / "log").read_text()[-20_000:]
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=120) as response:
            return str(response.read().decode())
    except OSError:
        return None


def replay(sources: Path, url: str, model: Path, traces: Path, out: Path, duration_s: int, more: list[str]) -> None:
    command = [
        sys.executable,
        str(sources / "trace_replay_tester.py"),
        "--api-endpoint",
        url,
        "--tokenizer",
        str(model),
    ]
    command += ["--trace-directory", str(traces), "--output-dir", str(out), "--test-duration", str(duration_s)]
    command += ["--start-users", str(USERS), "--max-users", str(USERS), "--recycle", "--seed", "1"]
    command += ["--max-ttft", "60", "--max-delay", "1", "--skip-graphs", "--no-color", *more]
    subprocess.run(command, check=True, stdout=sys.stderr)


def figures(out: Path) -> str:
    with (out / "detailed_results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["success"] == "True"]
    first_s = [float(row["ttft"]) for row in rows]
    tokens = sum(int(row["input_tokens"]) for row in rows)
    p50, p95 = np.percentile(first_s, (50, 95))
    return f"{len(rows)} requests, {tokens} prompt tokens, first token p50 {p50:.2f} s, p95 {p95:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="a copy of kv-cache-tester")
    parser.add_argument("--traces", required=True, help="numbers of its traces, such as 0012,0019")
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--duration", type=int, default=60, help="seconds for each server")
    parser.add_argument("own", nargs="*", help="options of trace_replay_tester.py, after --")
    ours = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (model, traces) = places = (place / "model", place / "traces")
        for each in places:
            each.mkdir()
        write_model(model)
        for trace in ours.traces.split(","):
            text = (ours.sources / "traces" / f"trace_{trace}.json").read_text()
            (traces / f"trace_{trace}.json").write_text(json.dumps(scaled(json.loads(text), ours.scale)))
        for what in ("without kvoffload", "with kvoffload"):
            out = place / what.split()[0]
            with server(model, place / f"{out.name} server", what.startswith("with ")) as url:
                replay(ours.sources, url, model, traces, out, ours.duration, ours.own)
                found = re.findall(r"^kvoffload_hit_tokens_total\S* (\S+)", get(f"{url}/metrics") or "", re.MULTILINE)
            of_host = "".join(f", {float(tokens):.0f} of them from host memory" for tokens in found)
            print(f"{what}: {figures(out)}{of_host}", flush=True)


if __name__ == "__main__":
    main()
