# SPDX-License-Identifier: Apache-2.0
"""Blocks in Redis or Valkey, one server or a cluster."""

from __future__ import annotations

from kvoffload.tiering.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
