# SPDX-License-Identifier: Apache-2.0
"""The configuration keys of a ``redis`` tier."""

from __future__ import annotations

from typing import ClassVar

from kvoffload.errors import ConfigError, Problems, reason_of
from kvoffload.files import read_file
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.redis.connector import Access, Timeouts
from kvoffload.tiering.stores.redis.store import RedisStore
from kvoffload.tiering.stores.remote import RemoteOptions, check_age
from kvoffload.tiering.stores.secrets import Secret, check_secret
from kvoffload.units import parse_seconds

_NEVER = "never"


class RedisOptions(RemoteOptions, frozen=True, kw_only=True):
    """``{"type": "redis", "url": "rediss://user@host:6380/0", "cluster": true, "ttl": "24h"}``."""

    server_evicts: ClassVar[bool] = True

    url: Secret
    """``redis://``, ``rediss://`` (TLS) or ``unix://``, perhaps with a user, a password and a database number; or
    ``redis+sentinel://host:26379,host:26379/SERVICE/0`` (``rediss+sentinel://``), which follows the primary that the
    sentinels name. As text, ``{"file": path}`` or ``{"env": name}``."""
    ttl: str | float = "7d"
    """The age at which a block expires: seconds, text with a unit such as ``"24h"``, or ``"never"``, so that only the
    server's eviction removes blocks."""
    cluster: bool = False
    """The URL names a node of a cluster; the others are learned from it."""
    prefix: str = "kvoffload"
    """Prefix of all names, for use in access rules."""
    username: str | None = None
    """User name that replaces the one in the URL. Default: the URL's."""
    password: Secret | None = None
    """Password that replaces the one in the URL: text, ``{"file": path}`` or ``{"env": name}``. Each connection reads
    the file again. Default: the URL's."""
    sentinel_username: str | None = None
    """User name for the sentinels of the URL, which never see the servers' credentials. Default: none."""
    sentinel_password: Secret | None = None
    """Password for the sentinels, in the same form as ``password``. Default: none."""
    tls_ca: str | None = None
    """File of certificate authorities to trust. kvoffload rejects this option and the next three if the URL does not
    use TLS. Default: the system's."""
    tls_cert: str | None = None
    """File of the client certificate, if the server requires one. Default: none."""
    tls_key: str | None = None
    """File of that certificate's key. Default: none."""
    tls_verify: bool = True
    """Check the server's certificate and name. If false, anybody in the network path can impersonate the server."""
    connect_timeout_s: float = Timeouts().connect_s
    """Seconds for a connection, and again for the greeting."""
    window_timeout_s: float = Timeouts().window_s
    """Seconds for about 4 MiB of requests and all of their answers. After that, the connection is closed."""

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        with problems:
            RemoteOptions.check(self, block_bytes)
        for name in ("password", "sentinel_password"):
            with problems:
                check_secret(getattr(self, name), self._called(name))
        with problems:
            self._check_deadlines("connect_timeout_s", "window_timeout_s")
        with problems:
            check_age(self.ttl_s, "ttl of the 'redis' tier")
        if isinstance(self.url, str):
            with problems:
                self._make(block_bytes or 1, "", None).close()  # reads no other secret, and does not connect
        problems.raise_found()

    @property
    def ttl_s(self) -> float | None:
        return None if self.ttl == _NEVER else parse_seconds(self.ttl, "ttl of the 'redis' tier", _NEVER)

    @property
    def quota(self) -> str:
        if self.ttl == _NEVER:
            return super().quota
        return f"{super().quota}, for {self.ttl if isinstance(self.ttl, str) else f'{self.ttl:g} s'}"

    def _open(self, block_bytes: int, namespace: str, secret: bytes | None) -> BlockStore:
        for name in ("password", "sentinel_password"):
            self.secret(name)  # each connection reads it again, but a mistake must prevent the start
        store = self._make(block_bytes, namespace, secret)
        for name in ("tls_ca", "tls_cert", "tls_key"):
            if path := getattr(self, name):
                try:
                    read_file(path)
                except (OSError, ValueError) as exc:
                    raise ConfigError(
                        f"{self._called(name)} is {path}, which cannot be read: {reason_of(exc)}."
                    ) from exc
        return store

    def _warnings(self, store: BlockStore) -> list[str]:
        assert isinstance(store, RedisStore)
        return [
            f"Redis at {server} has no maxmemory, so its blocks may use all memory of its machine: set maxmemory, and "
            "the policy allkeys-lru."
            for server in store.unbounded_servers()
        ]

    def _make(self, block_bytes: int, namespace: str, secret: bytes | None) -> RedisStore:
        access = Access(
            self.username,
            self.password,
            self.sentinel_username,
            self.sentinel_password,
            self.tls_ca,
            self.tls_cert,
            self.tls_key,
            self.tls_verify,
        )
        return RedisStore(
            self.url,
            block_bytes,
            namespace,
            cluster=self.cluster,
            ttl_s=self.ttl_s,
            prefix=self.prefix,
            secret=secret,
            timeouts=Timeouts(self.connect_timeout_s, self.window_timeout_s),
            access=access,
        )
