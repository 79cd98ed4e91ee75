# SPDX-License-Identifier: Apache-2.0
"""One server and its replicas, watched by sentinels, which say who of them is the primary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.redis.nodes import Address, Connector, DiscoveredServers, Node
from kvoffload.tiering.stores.remote import check_credentials

__all__ = ["Primary", "SentinelUrl", "parse_sentinel_url"]

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_PORT = 26379


class SentinelUrl(NamedTuple):
    url: str
    """As of the primary: with the scheme, the credentials and the number of the database, and with the first sentinel's
    address, which is to be replaced."""
    sentinels: tuple[Address, ...]
    service: str


def parse_sentinel_url(url: str) -> SentinelUrl | None:
    """``redis+sentinel://user:password@host:26379,host:26379/service/0`` in its parts, ``None`` for other schemes."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        return None
    check_credentials(url, "url of the 'redis' tier")
    # Not by urllib: some of its releases refuse brackets after a comma.
    netloc, _, path = rest.partition("/")
    credentials, at, hosts = netloc.rpartition("@")
    service, _, database = path.strip("/").partition("/")
    sentinels = tuple(_address(text) for text in hosts.split(","))
    if not service or None in sentinels or "?" in path:
        raise ConfigError(
            f"url of the 'redis' tier must be {scheme}://host:port,host:port/SERVICE, with SERVICE as the "
            "sentinels call it."
        )
    known = tuple(address for address in sentinels if address is not None)
    first = f"[{known[0].host}]" if ":" in known[0].host else known[0].host
    return SentinelUrl(f"{_SCHEMES[scheme]}://{credentials}{at}{first}:{known[0].port}/{database}", known, service)


def _address(text: str) -> Address | None:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(_PORT)
    host = host.strip("[]")
    return Address(host, int(port)) if host and port.isdigit() else None


class Primary(DiscoveredServers):
    """The primary of ``service``, by the first of ``sentinels`` that knows one which is up. They are asked again when
    it fails, or answers that it is one no longer. A sentinel that fails in any way hides none of the others."""

    def __init__(
        self,
        connector: Connector,
        sentinels: Sequence[Address],
        service: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(connector, clock)
        asking = connector.for_sentinels()
        self._sentinels, self._service = tuple(Node(address, asking) for address in sentinels), service
        self._node: Node | None = None

    def __repr__(self) -> str:
        sentinels = ", ".join(str(sentinel.address) for sentinel in self._sentinels)
        return f"primary {self._service} of the sentinels {sentinels}"

    def split(self, names: Sequence[bytes]) -> dict[Node, list[int]]:
        return {self._current(): list(range(len(names)))}

    def record(self, node: Node, is_good: bool) -> None:
        if not is_good:
            self._is_stale = True

    def all(self) -> list[Node]:
        return [self._current()]

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    def _current(self) -> Node:
        self._refresh()
        assert self._node is not None, "a refresh without a node raises"
        return self._node

    @property
    def _is_known(self) -> bool:
        return self._node is not None

    def _read(self) -> None:
        address = self._ask_sentinels()
        old = self._node
        if old is None or old.address != address:
            self._node = Node(address, self._connector)
            if old is not None:
                old.close()

    def _ask_sentinels(self) -> Address:
        reason = ""
        for sentinel in self._sentinels:
            try:
                with sentinel.conversation(self._connector.timeouts.connect_s) as ask:
                    address = _address_of(self._service.encode(), ask(b"SENTINEL", b"MASTERS"))
            except StoreError as exc:
                reason = f" ({str(exc).rstrip('.')})"
                continue
            except (AttributeError, KeyError, TypeError, ValueError):
                reason = f" (Redis at {sentinel.address} names no primaries that can be read)"
                continue
            if address is not None:
                return address
        raise StoreError(f"No sentinel knows the {self}, or it is down{reason}.")


def _address_of(service: bytes, primaries: Any) -> Address | None:
    """Of the primary of ``service`` if it is up, by what a sentinel knows of its ``primaries``."""
    for fields in primaries:
        state = dict(zip(fields[::2], fields[1::2], strict=True))
        flags = state[b"flags"].split(b",")
        if state[b"name"] == service and b"master" in flags and not {b"s_down", b"o_down"} & set(flags):
            return Address(state[b"ip"].decode(), int(state[b"port"]))
    return None
