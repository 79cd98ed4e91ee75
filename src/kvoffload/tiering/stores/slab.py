# SPDX-License-Identifier: Apache-2.0
"""The former place and name of ``DiskStore``."""

from __future__ import annotations

from kvoffload.tiering.stores.disk import DiskStore

SlabStore = DiskStore
