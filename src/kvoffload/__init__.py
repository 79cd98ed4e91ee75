# SPDX-License-Identifier: Apache-2.0
"""kvoffload: KV-cache offloading for LLM servers."""

__version__ = "0.1.0"
