# SPDX-License-Identifier: Apache-2.0
"""The configuration keys of a ``mooncake`` tier."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.mooncake.store import MooncakeStore
from kvoffload.tiering.stores.remote import RemoteOptions
from kvoffload.units import parse_bytes


class MooncakeOptions(RemoteOptions, frozen=True, kw_only=True):
    """``{"type": "mooncake", "master": "host:50051", "metadata": "http://host:8080/metadata"}``. Experimental."""

    server_evicts: ClassVar[bool] = True

    master: str
    """Address of the master, as host:port."""
    metadata: str
    """URL of Mooncake's metadata service, where its engines find each other."""
    hostname: str = "127.0.0.1"
    """This machine's name or address, as other machines reach it."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport for blocks: ``tcp`` or ``rdma``."""
    device: str = ""
    """The network card to use with ``rdma``."""
    segment_bytes: int | str | None = None
    """Memory of this machine that the engine contributes to the pool. Default: none, because other processes contribute
    memory."""

    @property
    def place(self) -> str:
        return self.master

    def check(self, block_bytes: int | None = None) -> None:
        RemoteOptions.check(self, block_bytes)
        for name in ("master", "metadata"):
            if not getattr(self, name):
                raise ConfigError(f"{name} of the 'mooncake' tier is empty.")
        self._make(block_bytes or 1, "", None)  # does not connect

    def _open(self, block_bytes: int, namespace: str, secret: bytes | None) -> BlockStore:
        return self._make(block_bytes, namespace, secret)

    def _make(self, block_bytes: int, namespace: str, secret: bytes | None) -> MooncakeStore:
        given = self.segment_bytes
        return MooncakeStore(
            self.master,
            self.metadata,
            block_bytes,
            namespace,
            hostname=self.hostname,
            protocol=self.protocol,
            device=self.device,
            segment_bytes=0 if given is None else parse_bytes(given, "segment_bytes of the 'mooncake' tier"),
            secret=secret,
        )
