# SPDX-License-Identifier: Apache-2.0
"""Blocks in an object store: S3 and compatible services, Google Cloud Storage, and Azure."""

from __future__ import annotations

from kvoffload.tiering.stores.object.store import ObjectStore

__all__ = ["ObjectStore"]
