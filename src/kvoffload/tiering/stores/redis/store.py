# SPDX-License-Identifier: Apache-2.0
"""A block store in Redis or Valkey: one value per block, the block and then its seal."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.redis.cluster import Cluster
from kvoffload.tiering.stores.redis.commands import Answer, Ask, Commands, Get, Put, PutNew
from kvoffload.tiering.stores.redis.nodes import Connector, Node, Nodes, Server, Timeouts
from kvoffload.tiering.stores.redis.sentinel import Primary, parse_sentinel_url
from kvoffload.tiering.stores.redis.wire import ErrorReply
from kvoffload.tiering.stores.remote import check_age
from kvoffload.tiering.stores.requests import Requests
from kvoffload.tiering.stores.seal import Sealer, shared_identity

__all__ = ["RedisStore"]

_WINDOW_BYTES = 4 << 20
_MOST_VALUES = 256
_MOST_KEYS = 4096
_MOST_ROUNDS = 3
_MOST_THREADS = 64
"""For the nodes of a cluster, all batches together. They start as they are needed; one server alone needs none."""
_SCAN_COUNT = b"1000"
_SERVER_STATES = ("READONLY", "NOAUTH", "LOADING", "MASTERDOWN", "CLUSTERDOWN")
"""Error replies about the server, not the key: the next connection may find another server, or this one recovered."""
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:")


@dataclass(slots=True)
class _Part:
    """What one node is asked of a batch, and what it answers."""

    node: Node
    indexes: Sequence[int]
    commands: Commands
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Why the rest has no answers."""


class RedisStore(BlockStore):
    """Blocks of ``block_bytes`` in the server or cluster that ``url`` names, or in the primary that the sentinels of
    ``redis+sentinel://host:26379,host:26379/service`` name.

    The constructor does no I/O. The server's ``maxmemory`` bounds what it holds, and its own policy evicts. ``ttl_s``
    is the age at which a block expires. ``secret`` makes the seals keyed, so that only who has it can make a block
    that is served.

    A server that cannot be reached, or does not answer a window of some 4 MiB in time, costs the keys it has: the batch
    raises ``StoreError`` if that is all of them, else their answer is ``False``. No buffer is touched after a call.
    """

    def __init__(
        self,
        url: str,
        block_bytes: int,
        namespace: str = "",
        *,
        cluster: bool = False,
        ttl_s: float | None = None,
        prefix: str = "kvoffload",
        secret: bytes | None = None,
        timeouts: Timeouts | None = None,
        username: str | None = None,
        password: str | None = None,
        sentinel_username: str | None = None,
        sentinel_password: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_verify: bool = True,
    ) -> None:
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        if not prefix or not set(prefix) <= _NAME_CHARACTERS:
            raise ConfigError(f"prefix of the 'redis' tier may have letters, digits and ._-: only, not {prefix!r}.")
        check_age(ttl_s, "ttl of the 'redis' tier")
        self._timeouts = timeouts or Timeouts()
        watched = parse_sentinel_url(url)
        if not watched and (sentinel_username, sentinel_password) != (None, None):
            raise ConfigError(
                "A 'redis' tier with sentinel_username or sentinel_password needs a url of redis+sentinel:// or "
                "rediss+sentinel://: the others ask no sentinels."
            )
        connector = Connector(
            watched.url if watched else url,
            self._timeouts,
            username=username,
            password=password,
            sentinel_username=sentinel_username,
            sentinel_password=sentinel_password,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_verify=tls_verify,
        )
        self._nodes: Nodes
        if watched and cluster:
            raise ConfigError("A 'redis' tier with cluster=true follows the cluster itself: give it no sentinels.")
        if watched:
            self._nodes = Primary(connector, watched.sentinels, watched.service)
        else:
            self._nodes = Cluster(connector) if cluster else Server(connector)
        self._requests = Requests("redis", _MOST_THREADS)
        self._block_bytes = block_bytes
        identity, digest = shared_identity(namespace, block_bytes, secret)
        self._directory = f"{prefix}:{digest}:".encode()
        self._sealer = Sealer(identity, secret)
        self._ttl_s = None if ttl_s is None else int(ttl_s)
        self._window = max(1, min(_MOST_VALUES, _WINDOW_BYTES // block_bytes))
        self._lock = threading.Lock()
        self._bad: list[OffloadKey] = []
        self._num_bad = 0

    def __repr__(self) -> str:
        return f"RedisStore({self._nodes!r}, {self._directory.decode()!r}, block_bytes={self._block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._ask(b"EXISTS", keys)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        names = [self._name(key) for key in keys]
        put = Put(names, self._window, keys, [self._bytes(block) for block in blocks], self._sealer, self._ttl_s)
        return self._run(PutNew(Ask(b"TOUCH", names, self._window), put))

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        names = [self._name(key) for key in keys]
        get = Get(names, self._window, keys, [self._bytes(block) for block in blocks], self._sealer)
        answers = self._run(get)
        if get.bad:
            self._remove_bad(dict.fromkeys(keys[index] for index in get.bad))
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._ask(b"UNLINK", keys)

    def close(self) -> None:
        self._nodes.close()
        self._requests.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        for node in self._nodes.all():
            cursor = b"0"
            with node.conversation(self._timeouts.window_s) as ask:
                while True:
                    cursor, names = ask(b"SCAN", cursor, b"MATCH", self._directory + b"*", b"COUNT", _SCAN_COUNT)
                    yield [key for name in names if (key := self._key(name)) is not None]
                    if cursor == b"0":
                        break

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        try:
            self._ask(b"TOUCH", keys[::-1])
        except StoreError:
            pass  # only an order of use is lost

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            bad, self._bad = self._bad, []
        return dict.fromkeys(bad, "corrupt")

    def stats(self) -> StoreStats:
        return StoreStats(corrupt_blocks=self._num_bad)

    # --------------------------------------------------------------------------------------------------- helpers

    def _name(self, key: OffloadKey) -> bytes:
        return self._directory + key.hex().encode()

    def _key(self, name: bytes) -> OffloadKey | None:
        try:
            return OffloadKey(bytes.fromhex(name.removeprefix(self._directory).decode()))
        except ValueError:
            return None  # not ours

    def _bytes(self, block: memoryview) -> memoryview:
        assert block.nbytes == self._block_bytes, f"a block of {block.nbytes} bytes for a store of {self._block_bytes}"
        return block if block.ndim == 1 and block.format == "B" else block.cast("B")

    def _remove_bad(self, keys: dict[OffloadKey, None]) -> None:
        with self._lock:
            self._bad += keys
            self._num_bad += len(keys)
        try:
            self.discard(list(keys))
        except StoreError:
            pass  # the next read finds them bad again

    def _ask(self, command: bytes, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._run(Ask(command, [self._name(key) for key in keys], _MOST_KEYS))

    def _run(self, commands: Commands) -> list[bool]:
        """The outcomes of ``commands``, by the servers that have the keys, side by side. Follows redirections.

        What is lost of a batch is a miss. If nothing came of it, the store fails as a whole; but not if a node of a
        cluster is lost and others work on, because the tier would leave those alone too.
        """
        answers = [False] * len(commands.names)
        refused, lost = list[str](), list[str]()
        parts = [_Part(node, indexes, commands) for node, indexes in self._nodes.split(commands.names).items()]
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            self._serve_all(parts)
            redirected: dict[tuple[Node, bool], list[int]] = {}
            for part in parts:
                lost += part.lost
                # A part that was lost has answers for its first windows only.
                for index, reply in zip(part.indexes, part.answers, strict=False):
                    if not isinstance(reply, ErrorReply):
                        answers[index] = reply
                    elif target := self._nodes.redirect(reply):
                        redirected.setdefault((target, reply.startswith("ASK")), []).append(index)
                    elif reply.partition(" ")[0] in _SERVER_STATES:
                        lost.append(f"Redis at {part.node.address} answers: {part.node.quote(reply)}.")
                        part.node.close_idle()
                        self._nodes.record(part.node, is_good=False)
                    else:
                        hint = "; set cluster to true" if reply.startswith("MOVED") else ""
                        refused.append(f"Redis at {part.node.address} answers: {part.node.quote(reply)}{hint}.")
            parts = [
                _Part(node, indexes, commands.asking() if is_asking else commands)
                for (node, is_asking), indexes in redirected.items()
                if rounds_left and self._nodes.may_ask(node)
            ]
            if not parts:
                break
        any_done = any(is_good and index not in commands.there for index, is_good in enumerate(answers))
        if (refused or lost) and not any_done and not (lost and self._nodes.has_others):
            raise StoreError((refused + lost)[0])
        return answers

    def _serve_all(self, parts: Sequence[_Part]) -> None:
        """Returns when every part has ended, so that nothing is written to a buffer any more. A thread each: a node
        that is frozen delays neither the sending to the others nor their deadlines."""
        if len(parts) == 1:
            self._serve(parts[0])
            return
        try:
            results = self._requests.run(lambda index: self._serve(parts[index]), len(parts))
        except BaseException:
            for part in parts:  # whose exchanges were never begun, and among them may be a node's probe
                self._nodes.record(part.node, is_good=False)
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
                part.lost.append(str(exc))
                return

    def _exchange(self, node: Node, commands: Commands, indexes: Sequence[int]) -> list[Answer]:
        try:
            answers = node.exchange(lambda wire: commands.exchange(wire, indexes))
        except BaseException:  # whatever it is: a probe that does not end leaves its node alone for ever
            self._nodes.record(node, is_good=False)
            raise
        self._nodes.record(node, is_good=True)
        return answers
