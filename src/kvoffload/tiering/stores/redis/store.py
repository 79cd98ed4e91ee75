# SPDX-License-Identifier: Apache-2.0
"""A block store in Redis or Valkey: one value per block, which is the block and then its seal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.redis.commands import Answer, Ask, Asking, Commands, Get, Put
from kvoffload.tiering.stores.redis.connector import Access, Connector, Timeouts
from kvoffload.tiering.stores.redis.node import Node
from kvoffload.tiering.stores.redis.servers import Cluster, OneServer, Primary, Servers
from kvoffload.tiering.stores.redis.wire import ErrorReply, in_one_line
from kvoffload.tiering.stores.remote import check_age
from kvoffload.tiering.stores.requests import Requests
from kvoffload.tiering.stores.secrets import Secret
from kvoffload.tiering.stores.shared import SharedStore, outcomes

_WINDOW_BYTES = 4 << 20
_MOST_VALUES = 256
_MOST_KEYS = 4096
_MOST_ROUNDS = 3
_MOST_THREADS = 64
"""Maximum number of threads for the nodes of a cluster, for all batches together. They start when needed; a single
server needs none."""
_SERVER_STATES = ("READONLY", "NOAUTH", "LOADING", "MASTERDOWN", "CLUSTERDOWN")
"""Error replies about the server, not the key. The next connection may reach another server, or this one after its
recovery."""
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:")


@dataclass(slots=True)
class _Part:
    """The part of a batch for one node, and its answers."""

    node: Node
    indexes: Sequence[int]
    commands: Commands
    answers: list[Answer] = field(default_factory=list)
    lost: list[StoreError] = field(default_factory=list)
    """The reason why the rest is not answered."""


class RedisStore(SharedStore):
    """Blocks of ``block_bytes`` in the server or cluster that ``url`` names, or in the primary that the sentinels of
    ``redis+sentinel://host:26379,host:26379/service`` name.

    The constructor does no I/O. The server's ``maxmemory`` limits its content, and its own policy evicts. ``ttl_s`` is
    the age at which a block expires. ``secret`` makes the seals keyed, so that only its owners can create a block that
    is served.

    If a server cannot be reached, or does not answer a window of about 4 MiB in time, its keys fail. The batch raises
    ``StoreError`` if all keys failed; otherwise the failed keys are answered with ``False``. No buffer is touched after
    a call.
    """

    requests_in_flight = 8

    def __init__(
        self,
        url: Secret,
        block_bytes: int,
        namespace: str = "",
        *,
        cluster: bool = False,
        ttl_s: float | None = None,
        prefix: str = "kvoffload",
        secret: bytes | None = None,
        timeouts: Timeouts | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(block_bytes, namespace, secret)
        if not prefix or not set(prefix) <= _NAME_CHARACTERS:
            raise ConfigError(f"prefix of the 'redis' tier may contain only letters, digits and ._-:, not {prefix!r}.")
        check_age(ttl_s, "ttl of the 'redis' tier")
        connector = Connector(url, timeouts or Timeouts(), access or Access())
        parsed = connector.url
        self._servers: Servers
        if parsed.service and cluster:
            raise ConfigError(
                "A 'redis' tier with cluster=true finds the cluster's nodes itself; use a url without sentinels."
            )
        if parsed.service:
            self._servers = Primary(connector, parsed.addresses, parsed.service)
        else:
            self._servers = Cluster(connector) if cluster else OneServer(connector)
        self._requests = Requests("redis", _MOST_THREADS)
        self._directory = f"{prefix}:{self._digest}:".encode()
        self._ttl_s = None if ttl_s is None else int(ttl_s)
        self._window = max(1, min(_MOST_VALUES, _WINDOW_BYTES // block_bytes))

    def __repr__(self) -> str:
        return f"RedisStore({self._servers!r}, {self._directory.decode()!r}, block_bytes={self._block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._without_bad(keys, self._ask(b"EXISTS", keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        names = [self._name(key) for key in keys]
        flat = [self._bytes(block) for block in blocks]
        put = Put(names, self._window, keys, flat, self._sealer, self._ttl_s)
        answers = self._run(put)
        for index, is_good in enumerate(answers) if self._bad.kept else ():
            if is_good and index not in put.there:
                self._bad.kept.discard(keys[index])
        return self._without_bad(keys, answers)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        names = [self._name(key) for key in keys]
        get = Get(names, self._window, keys, [self._bytes(block) for block in blocks], self._sealer)
        answers = self._run(get)
        self._bad.remove(dict.fromkeys(keys[index] for index in get.bad), self)
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._ask(b"UNLINK", keys)

    def close(self) -> None:
        self._servers.close()
        self._requests.close()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        with suppress(StoreError):  # only the order of use is lost
            self._ask(b"TOUCH", keys[::-1])

    def unbounded_servers(self) -> list[str]:
        """Return the servers that report no ``maxmemory``. Raises ``StoreError`` if none can be reached."""
        # Names in so many slots that every node of a cluster owns some of them.
        names = [self._directory + b"%d" % number for number in range(_MOST_KEYS)]
        found = []
        for node in self._servers.split(names):
            try:
                reply = node.ask(b"INFO", b"memory")
            except StoreError:
                continue  # it is down, or does not answer this user
            if isinstance(reply, bytes) and b"\nmaxmemory:0\r" in reply:
                found.append(str(node.address))
        return found

    # --------------------------------------------------------------------------------------------------- helpers

    def _name(self, key: OffloadKey) -> bytes:
        return self._directory + key.hex().encode()

    def _ask(self, word: bytes, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._run(Ask([self._name(key) for key in keys], _MOST_KEYS, word))

    def _without_bad(self, keys: Sequence[OffloadKey], answers: list[bool]) -> list[bool]:
        """Return the ``answers``, and ``False`` for bad blocks that this user may not delete. They would otherwise be
        found, read and rejected forever."""
        kept = self._bad.kept
        return [answer and key not in kept for key, answer in zip(keys, answers, strict=True)] if kept else answers

    def _run(self, commands: Commands) -> list[bool]:
        """Run ``commands`` concurrently at the servers of their keys, and return the outcomes. Follows redirections.

        The store does not fail as a whole if one node of a cluster is lost and others still work.
        """
        answers = [False] * len(commands.names)
        refused, lost = list[StoreError](), list[StoreError]()
        parts = [_Part(node, indexes, commands) for node, indexes in self._servers.split(commands.names).items()]
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            self._serve_all(parts)
            redirected: dict[tuple[Node, bool], list[int]] = {}
            for part in parts:
                lost += part.lost
                # A lost part contains answers only for its first windows.
                for index, reply in zip(part.indexes, part.answers, strict=False):
                    if not isinstance(reply, ErrorReply):
                        answers[index] = reply
                        continue
                    try:
                        target = self._servers.redirect(reply)
                    except StoreError as exc:
                        lost.append(exc)
                        continue
                    if target is not None:
                        redirected.setdefault((target, reply.startswith("ASK")), []).append(index)
                    elif reply.partition(" ")[0] in _SERVER_STATES:
                        lost.append(_answered(part.node, reply))
                        part.node.close_idle()
                        self._servers.record(part.node, is_good=False)
                    else:
                        refused.append(_answered(part.node, reply))
            parts = [
                _Part(node, indexes, Asking(commands.names, commands.most, commands) if is_asking else commands)
                for (node, is_asking), indexes in redirected.items()
                if rounds_left and self._servers.may_ask(node)
            ]
            if not parts:
                break
        # The tier would stop using the nodes that still work.
        is_store = not (lost and self._servers.has_others)
        return outcomes(answers, refused + (lost if is_store else []), commands.there)

    def _serve_all(self, parts: Sequence[_Part]) -> None:
        """Run all parts, and return when every part has ended, so that nothing writes to a buffer afterwards. Each part
        gets a thread, so that a frozen node delays neither the sending to the others nor their deadlines."""
        if len(parts) == 1:
            self._serve(parts[0])
            return
        try:
            results = self._requests.run(lambda index: self._serve(parts[index]), len(parts))
        except BaseException:
            for part in parts:  # their exchanges never began, and one may be a node's probe
                self._servers.record(part.node, is_good=False)
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _serve(self, part: _Part) -> None:
        for start in range(0, len(part.indexes), part.commands.most):
            window = part.indexes[start : start + part.commands.most]
            try:
                part.answers += self._exchange(part.node, part.commands, window)
            except StoreError as exc:
                part.lost.append(exc)
                return

    def _exchange(self, node: Node, commands: Commands, indexes: Sequence[int]) -> list[Answer]:
        try:
            answers = node.exchange(lambda wire: commands.exchange(wire, indexes))
        except BaseException:  # any error: without an end of its probe, a node would stay unused forever
            self._servers.record(node, is_good=False)
            raise
        self._servers.record(node, is_good=True)
        return answers


def _answered(node: Node, reply: ErrorReply) -> StoreError:
    hint = "; set cluster to true" if reply.startswith("MOVED") else ""
    return StoreError(f"Redis at {node.address} answers: {in_one_line(reply)}{hint}.")
