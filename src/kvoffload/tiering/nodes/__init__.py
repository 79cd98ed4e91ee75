# SPDX-License-Identifier: Apache-2.0
"""Tiers of an engine that spans several nodes. The scheduler decides, and an agent on each node executes its part."""

from __future__ import annotations

from kvoffload.tiering.nodes.agent import AgentTier, NodeAgent
from kvoffload.tiering.nodes.messages import Packet
from kvoffload.tiering.nodes.nodes import Nodes
from kvoffload.tiering.nodes.store import NodesStore
from kvoffload.tiering.nodes.tier import NodesTier

__all__ = ["AgentTier", "NodeAgent", "Nodes", "NodesStore", "NodesTier", "Packet"]
