# SPDX-License-Identifier: Apache-2.0
"""The configuration keys of an ``object`` tier."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvoffload.errors import Problems
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.object.client import Deadlines, require_obstore
from kvoffload.tiering.stores.object.store import ObjectStore
from kvoffload.tiering.stores.remote import RemoteOptions
from kvoffload.tiering.stores.secrets import Secret, check_secret
from kvoffload.tiering.tier import MOST_THREADS

_UNREAD = "dW5yZWFk"
"""Placeholder for a secret before it is read. It is base64, which obstore requires for some keys."""


class ObjectOptions(RemoteOptions, frozen=True, kw_only=True):
    """``{"type": "object", "url": "s3://bucket/prefix", "config": {"region": "eu-central-1"}}``."""

    url: Secret
    """``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``."""
    config: dict[str, Secret] | None = None
    """obstore's settings for the service: ``endpoint``, ``region``, ``access_key_id``, ``secret_access_key`` and so on,
    each as text, ``{"file": path}`` or ``{"env": name}``. kvoffload reads the files again after an error. An endpoint
    with http:// is used without TLS; all other requests use TLS, unless ``allow_http`` is ``"true"``. Default: the
    environment (``AWS_...``) and the machine's own role."""
    requests: int = 16
    """Maximum number of requests in flight, each for reads and for writes."""
    tls_ca: str | None = None
    """File of authorities to trust in addition to the system's, read again after an error. Default: none."""
    connect_timeout_s: float = Deadlines().connect_s
    """Seconds for a connection."""
    request_timeout_s: float = Deadlines().request_s
    """Seconds for one request, including its body."""

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        with problems:
            RemoteOptions.check(self, block_bytes)
        if not 1 <= self.requests <= MOST_THREADS:
            problems.add(f"requests of the 'object' tier must be 1 to {MOST_THREADS:,}, not {self.requests}.")
        with problems:
            self._check_deadlines("connect_timeout_s", "request_timeout_s")
        for name, value in (self.config or {}).items():
            with problems:
                check_secret(value, f"config of the 'object' tier: {name}")
        with problems:
            require_obstore()
        if isinstance(self.url, str) and not problems.found:
            known = {
                name: value if isinstance(value, str) else _UNREAD
                for name, value in (self.config or {}).items()
                if isinstance(value, str)
                or not name.lower().endswith("service_account_key")  # obstore parses this key at once
            }
            with problems:
                self._make(block_bytes or 1, "", self.url, known).close()  # reads no secret, and sends no request
        problems.raise_found()

    def _open(self, block_bytes: int, namespace: str, secret: bytes | None) -> BlockStore:
        return self._make(block_bytes, namespace, self.secret("url") or "", self.config or {}, secret)

    def _make(
        self, block_bytes: int, namespace: str, url: str, config: Mapping[str, Secret], secret: bytes | None = None
    ) -> ObjectStore:
        return ObjectStore(
            url,
            block_bytes,
            namespace,
            config=config,
            requests=self.requests,
            secret=secret,
            deadlines=Deadlines(self.connect_timeout_s, self.request_timeout_s),
            tls_ca=self.tls_ca and os.path.expanduser(self.tls_ca),
        )

    def _check_store(self, store: BlockStore) -> None:
        assert isinstance(store, ObjectStore)
        store.check()
