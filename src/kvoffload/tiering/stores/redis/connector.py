# SPDX-License-Identifier: Apache-2.0
"""Connections to a server: the parts of its URL, TLS, credentials, and a deadline for each step.

Credentials and certificates are read again for each connection, because their files may be replaced while the server
runs: a Kubernetes secret, a token of 15 minutes.
"""

from __future__ import annotations

import copy
import os
import re
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from kvoffload.errors import ConfigError, KVOffloadError
from kvoffload.tiering.stores.redis.wire import Wire, encode, error_reply, open_wire
from kvoffload.tiering.stores.remote import check_credentials, connect
from kvoffload.tiering.stores.secrets import Secret, read_secret
from kvoffload.units import printable

_PORT, _SENTINEL_PORT = 6379, 26379
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds without a byte before the kernel asks, seconds between its probes, and their number. The probes keep
firewalls from dropping an idle connection, and detect a dropped one."""


class Address(NamedTuple):
    host: str
    port: int
    """Port number; 0 means that ``host`` is the path of a socket file."""

    def __str__(self) -> str:
        host = printable(self.host)  # another server may have named it
        return f"{host}:{self.port}" if self.port else host


def address_of(host: str, port: int) -> Address:
    """Return the address of a server that another server names. Raises ``ValueError`` if the port is not valid."""
    if not 0 < port < 1 << 16:
        raise ValueError("not a port")
    return Address(host, port)


class Timeouts(NamedTuple):
    connect_s: float = 1.0
    """Seconds each for the connection, for TLS, and for the greeting (authentication), and for an answer about the
    servers."""
    window_s: float = 5.0
    """Seconds for one window of requests and all of its answers."""


class Access(NamedTuple):
    """Credentials and certificates. A user or password here replaces the one in the URL."""

    username: str | None = None
    password: Secret | None = None
    sentinel_username: str | None = None
    sentinel_password: Secret | None = None
    """Credentials for sentinels, which never see the servers' own."""
    tls_ca: str | None = None
    """File of certificate authorities to trust, instead of the system's."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: bool = True


class RedisUrl(NamedTuple):
    """The parts of a URL. They include credentials, so never show them."""

    scheme: str
    addresses: tuple[Address, ...]
    """The server, or the sentinels."""
    username: str | None
    password: str | None
    database: int
    service: str
    """The service's name at the sentinels; empty if the URL names the server itself."""

    @property
    def has_tls(self) -> bool:
        return self.scheme.startswith("rediss")


def parse_url(url: str) -> RedisUrl:
    """``redis://user:password@host:port/database``, the same with ``rediss`` (TLS),
    ``redis+sentinel://host:port,host:port/service/database``, or ``unix:///path?db=database``. Raises ``ConfigError``,
    whose text never contains a part of a password."""
    check_credentials(url, "url of the 'redis' tier")
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigError("url of the 'redis' tier must begin with redis://, rediss://, unix:// or redis+sentinel://.")
    netloc, slash, path = rest.partition("/")
    credentials, _, hosts = netloc.rpartition("@")
    username, _, password = (unquote(part) or None for part in credentials.partition(":"))
    service, addresses = "", tuple[Address, ...]()
    if scheme == "unix":
        path, _, query = path.partition("?")
        path, database = unquote(slash + path), query.removeprefix("db=") if query else "0"
        if path and not hosts:
            addresses = (Address(path, 0),)
        if not database.isdigit():
            raise ConfigError(
                "url of the 'redis' tier accepts only ?db=NUMBER; give other settings as options of the tier."
            )
    elif "?" in rest:
        raise ConfigError("url of the 'redis' tier contains a '?'; give these settings as options of the tier.")
    elif scheme.endswith("+sentinel"):
        service, _, database = path.strip("/").partition("/")
        addresses = _addresses(hosts.split(","), _SENTINEL_PORT)
        if not service or not addresses:
            raise ConfigError(
                f"url of the 'redis' tier must be {scheme}://host:port,host:port/SERVICE, where SERVICE is "
                "the name that the sentinels know."
            )
    else:
        database = path.removesuffix("/")
        addresses = _addresses([hosts], _PORT, "localhost")
    if not addresses:
        raise ConfigError("url of the 'redis' tier is not valid; write it as redis://host:port.")
    if not re.fullmatch("[0-9]{0,9}", database):
        raise ConfigError("url of the 'redis' tier may contain only the number of a database after the '/'.")
    return RedisUrl(scheme, addresses, username, password, int(database or 0), service)


def _addresses(texts: Sequence[str], port: int, host: str = "") -> tuple[Address, ...]:
    """Return the address in each text, with defaults for missing parts; empty if a text does not contain an address."""
    found = []
    for text in texts:
        part = re.fullmatch(r"(\[[^][]*\]|[^][:,]*)(?::([0-9]{0,9}))?", text)
        if part is None or not (name := unquote(part[1].strip("[]")) or host):
            return ()
        try:
            found.append(address_of(name, int(part[2] or port)))
        except ValueError:
            return ()
    return tuple(found)


class _RefusedError(KVOffloadError, ConnectionError):
    """The server rejected the user and password."""


class Connector:
    """Connects to the servers of one URL. Raises ``ConfigError`` for a mistake in the URL or in ``access``."""

    def __init__(self, url: Secret, timeouts: Timeouts, access: Access | None = None) -> None:
        access = access or Access()
        self.url = _read_url(url)
        """The URL at startup. Later, only its user and password are read again."""
        tls = {"tls_ca": access.tls_ca, "tls_cert": access.tls_cert, "tls_key": access.tls_key}
        given = [name for name, value in (tls | {"tls_verify: false": not access.tls_verify}).items() if value]
        if given and not self.url.has_tls:
            raise ConfigError(
                f"A 'redis' tier with {given[0]} needs a url of rediss:// or rediss+sentinel://, because other URLs "
                "do not use TLS."
            )
        if access.tls_key and not access.tls_cert:
            raise ConfigError("A 'redis' tier with tls_key needs its tls_cert.")
        if not self.url.service and (access.sentinel_username, access.sentinel_password) != (None, None):
            raise ConfigError(
                "A 'redis' tier with sentinel_username or sentinel_password needs a url of redis+sentinel:// or "
                "rediss+sentinel://, because other URLs do not use sentinels."
            )
        self.address = self.url.addresses[0]
        """Address of the server that the URL names."""
        self.timeouts = timeouts
        self._source, self._access = url, access
        self._is_for_sentinels = False

    def __repr__(self) -> str:
        return f"Connector({self.address})"

    def for_sentinels(self) -> Connector:
        """Return the same connector for sentinels, which never see the servers' credentials."""
        made = copy.copy(self)
        made._is_for_sentinels = True
        return made

    def connect(self, address: Address) -> Wire:
        """Return a connection that is ready for commands. Raises ``OSError``, also if the server rejects it."""
        sock = self._socket(address)
        try:
            if self.url.has_tls:
                sock.settimeout(self.timeouts.connect_s)  # each of several addresses had a share of it
                sock = _tls(self._access).wrap_socket(sock, server_hostname=address.host)
            wire = open_wire(sock)
            self._greet(wire)
        except BaseException:
            sock.close()
            raise
        return wire

    def _socket(self, address: Address) -> socket.socket:
        if not address.port:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(self.timeouts.connect_s)
                sock.connect(address.host)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = connect(address.host, address.port, self.timeouts.connect_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return sock

    def _greet(self, wire: Wire) -> None:
        """Log in, and select the database. If the server rejects credentials that were replaced in the meantime, log
        in once more with the new ones."""
        wire.begin(self.timeouts.connect_s)
        greeting = self._greeting()
        try:
            _say(wire, greeting)
        except _RefusedError:
            renewed = self._greeting()
            if renewed == greeting:
                raise
            _say(wire, renewed)

    def _greeting(self) -> list[tuple[bytes, ...]]:
        """Return the first commands of a connection, with the credentials that their sources contain at this moment."""
        access, database = self._access, self.url.database
        try:
            if self._is_for_sentinels:
                username, password, database = access.sentinel_username, access.sentinel_password, 0
            else:
                url = _read_url(self._source)
                username = url.username if access.username is None else access.username
                password = url.password if access.password is None else access.password
            name = "sentinel_password" if self._is_for_sentinels else "password"
            text = None if password is None else read_secret(password, f"{name} of the 'redis' tier")
        except ConfigError as exc:
            raise ConnectionError(str(exc)) from exc
        commands: list[tuple[bytes, ...]] = []
        if username or text:
            words = (username, text or "") if username else (text,)
            commands.append((b"AUTH", *(word.encode() for word in words if word is not None)))
        if database:
            commands.append((b"SELECT", b"%d" % database))
        return commands


def _read_url(url: Secret) -> RedisUrl:
    return parse_url(read_secret(url, "url of the 'redis' tier"))


def _say(wire: Wire, commands: Sequence[tuple[bytes, ...]]) -> None:
    """Send each command and check its answer. The text of an answer to AUTH is not shown, because a server may repeat
    the password in it."""
    for words in commands:
        wire.send([encode(*words)])
        line = wire.read_line()
        if line == b"+OK":
            continue
        if line[:1] != b"-":
            raise ConnectionError("the server's answer is not a reply")
        if words[0] == b"AUTH":
            code = re.match("[A-Z]{0,20}", error_reply(line))
            raise _RefusedError(f"it rejects the tier's user and password with {code[0] if code else ''}")
        raise ConnectionError(error_reply(line))


def _tls(access: Access) -> ssl.SSLContext:
    """Return a TLS context. Reads the files again for each connection, because they may be replaced."""
    ca, cert, key = (path and os.path.expanduser(path) for path in (access.tls_ca, access.tls_cert, access.tls_key))
    context = ssl.create_default_context(cafile=ca)
    if cert:
        context.load_cert_chain(cert, key, _no_password)
    if not access.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _no_password() -> str:
    """Answer OpenSSL's question for the password of an encrypted key. Otherwise it would ask at the terminal."""
    raise ConnectionError("tls_key of the 'redis' tier is encrypted; use a key without a password")
