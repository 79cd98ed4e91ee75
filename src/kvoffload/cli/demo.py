# SPDX-License-Identifier: Apache-2.0
"""``kvoffload demo``: what does offloading do for a chat server?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.cli.output import Json, check_out, print_json, print_table, progress, write_drawn
from kvoffload.config import DEFAULTS
from kvoffload.cpu.policies.base import POLICIES
from kvoffload.demo.chart import chart
from kvoffload.demo.report import latency_table, setting_lines, tokens_table, verdict_lines
from kvoffload.errors import MissingExtraError


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder of a model, or its name on the Hub. By default a random model."),
    ] = None,
    model_kind: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="Kind of the random model: attention (a Llama) or hybrid (a Falcon-H1, with states)."
        ),
    ] = "attention",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Device that computes: cpu or cuda.")] = "cpu",
    conversations: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of conversations that take turns.")
    ] = 8,
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Number of turns in each conversation.")] = 6,
    system_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens in the system prompt that all conversations share.")
    ] = 64,
    document_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens in the document that each conversation starts with.")
    ] = 384,
    message_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that a user adds per turn.")] = 64,
    reply_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens generated per turn.")] = 16,
    users: Annotated[int, typer.Option(min=1, metavar="N", help="Number of turns served at the same time.")] = 2,
    device_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens that fit in the device's KV pool. By default a quarter of the chat."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="POLICY", help="Cache policy of host memory.")
    ] = DEFAULTS.eviction_policy,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Directory of a disk tier. The demo then also serves the chat after a restart."
        ),
    ] = None,
    disk_gib: Annotated[float, typer.Option(metavar="N", help="Size limit of this directory in GiB.")] = 4.0,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Number of layers in the random model.")] = 6,
    hidden: Annotated[int, typer.Option(min=16, metavar="N", help="Hidden size of the random model.")] = 512,
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of CPU threads.")] = None,
    as_json: Json = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Also write all figures (.json) or a picture of the time to first token (.svg) to this file.",
        ),
    ] = None,
) -> None:
    """Serve chats in three variants and compare them.

    Each conversation asks questions about a document of its own. The three variants are: no prefix cache, the device's
    own prefix cache, and offloading. All conversations together are larger than the device's KV pool, so it evicts
    their prefixes before the next turn. The exit code is 1 if the three variants generate different tokens.
    """
    POLICIES.get(policy)
    check_out(*out or (), suffixes=(".json", ".svg"))
    # Read when torch is loaded. Otherwise torch's threads spin while they wait for one another, and on a machine that
    # does other work too (or lacks a core for the copies) a step takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from kvoffload.demo import setup
        from kvoffload.demo.comparison import compare
        from kvoffload.demo.workload import ChatWorkload
    except ImportError as exc:
        raise MissingExtraError(
            f"The demo needs kvoffload's extra 'demo': pip install torch transformers ({exc})."
        ) from exc
    setup.use_device(device, threads)
    llm = setup.make_model(model, model_kind, device, layers, hidden)
    vocab = int(llm.config.vocab_size)
    workload = ChatWorkload(
        conversations, turns, system_tokens, message_tokens, reply_tokens, users, vocab, setup.SEED, document_tokens
    )
    setup.check_length(workload, llm)
    options = setup.engine_options(workload, device_tokens)
    config = setup.offloading_config(llm, workload, policy, disk, disk_gib)
    if not as_json:
        print(*setting_lines(llm.name_or_path, device, workload, options, config), "", sep="\n")
    ways = setup.ways_of(config)
    with progress("demo", len(ways) * workload.num_turns, "turns") as advance:
        comparison = compare(llm, options, ways, workload, lambda *_: advance())
    figures = comparison.as_json()
    if as_json:
        print_json(figures)
    else:
        print_table(latency_table(comparison), "Time to first token, ms: median (95th percentile)", is_wide=True)
        print_table(tokens_table(comparison), "\nPrompt tokens: hit rate by tier", is_wide=True)
        print("", *verdict_lines(comparison.verdict, len(comparison.results)), sep="\n")
    write_drawn(out, figures, lambda _: chart(figures).encode())
    if not comparison.verdict.identical:
        raise typer.Exit(1)
