# SPDX-License-Identifier: Apache-2.0
"""Access to the inside of an ``ObjectStore``. Tests depend on its implementation only through this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.object import ObjectStore


def path_of(store: ObjectStore, key: OffloadKey) -> str:
    """Return the name of a block below the store's prefix."""
    return store._path(key)


def put(store: ObjectStore, key: OffloadKey, value: bytes) -> None:
    """Put an object in a block's place."""
    store._client.obstore.put(store._client.bucket, store._path(key), value)


def wrap_client(store: ObjectStore, wrap: Callable[[Any], Any]) -> Any:
    """Replace the store's obstore by the result of ``wrap``."""
    store._client.obstore = wrap(store._client.obstore)
    return store._client.obstore
