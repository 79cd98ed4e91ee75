# SPDX-License-Identifier: Apache-2.0
"""vLLM's own parser takes each ``vllm serve`` of the pages. ``tests/test_docs.py`` has the rest of a line."""

from __future__ import annotations

import pytest
from tests import doc_commands

LINES = [
    command
    for page in doc_commands.PAGES
    for command in doc_commands.commands(page)
    if command.words[:2] == ("vllm", "serve") and command.words[2:]
]


@pytest.mark.vllm
def test_vllm_takes_every_line_of_the_pages() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    transfers = [(command, parser.parse_args(list(command.words[1:])).kv_transfer_config) for command in LINES]
    # Lines without it configure kvoffload with KVOFFLOAD_CONFIG.
    transfers = [(command, transfer) for command, transfer in transfers if transfer is not None]
    assert transfers
    for command, transfer in transfers:
        assert transfer.kv_connector == "KVOffloadConnector", str(command)
        assert transfer.kv_load_failure_policy == "recompute", str(command)
