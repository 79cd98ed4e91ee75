# SPDX-License-Identifier: Apache-2.0
"""A block store in Redis or Valkey: one value per block, the block and then its seal."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, StoreStats
from kvoffload.tiering.stores.redis.commands import Answer, Ask, Asking, Commands, Get, Put
from kvoffload.tiering.stores.redis.nodes import Cluster, Connector, Node, Nodes, Server, Timeouts
from kvoffload.tiering.stores.redis.wire import ErrorReply
from kvoffload.tiering.stores.seal import Sealer

__all__ = ["RedisStore"]

_FORMAT = "1"
_WINDOW_BYTES = 4 << 20
_MOST_VALUES = 256
_MOST_KEYS = 4096
_MOST_ROUNDS = 3
_SCAN_COUNT = 1000
_SERVER_STATES = ("READONLY", "NOAUTH", "LOADING", "MASTERDOWN", "CLUSTERDOWN")
"""Error replies about the server, not the key: the next connection may find another server, or this one recovered."""
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:")


class RedisStore(BlockStore):
    """Blocks of ``block_bytes`` in the server or cluster that ``url`` names.

    The constructor does no I/O. The server's ``maxmemory`` bounds what it holds, and its own policy evicts. ``ttl_s``
    is the age at which a block expires. ``secret`` makes the seals keyed, so that nobody who lacks it can make a block
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
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_verify: bool = True,
    ) -> None:
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        if not prefix or not set(prefix) <= _NAME_CHARACTERS:
            raise ConfigError(f"prefix of the 'redis' tier may have letters, digits and ._-: only, not {prefix!r}.")
        if ttl_s is not None and ttl_s < 1:
            raise ConfigError(f"ttl of the 'redis' tier must be a second at least, not {ttl_s:g} s.")
        self._timeouts = timeouts or Timeouts()
        connector = Connector(
            url,
            self._timeouts,
            username=username,
            password=password,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_verify=tls_verify,
        )
        self._nodes: Nodes = Cluster(connector) if cluster else Server(connector)
        self._block_bytes = block_bytes
        # Stores that could not read each other's blocks have other names, so that neither deletes the other's as bad.
        secret_id = hashlib.blake2b(secret, digest_size=8, person=b"kvoffload-id").hexdigest() if secret else ""
        identity = "\0".join((_FORMAT, namespace, str(block_bytes), secret_id))
        self._directory = f"{prefix}:{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}:".encode()
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
        # Another engine may have written them meanwhile. The question is small, and the answer may save megabytes; it
        # also counts as a use where the server evicts the least recently used.
        answers = self._ask(b"TOUCH", keys)
        new = [index for index, is_here in enumerate(answers) if not is_here]
        if new:
            names = [self._name(keys[index]) for index in new]
            blocks = [self._bytes(blocks[index]) for index in new]
            put = Put(names, self._window, [keys[index] for index in new], blocks, self._sealer, self._ttl_s)
            for index, is_written in zip(new, self._run(put), strict=True):
                answers[index] = is_written
        return answers

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

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        for node in self._nodes.all():
            cursor = b"0"
            found: set[OffloadKey] = set()  # a server may return a name twice
            with node.conversation(self._timeouts.window_s) as ask:
                while True:
                    cursor, names = ask("SCAN", cursor, "MATCH", self._directory + b"*", "COUNT", _SCAN_COUNT)
                    new = {key for name in names if (key := self._key(name)) is not None} - found
                    found |= new
                    yield list(new)
                    if cursor == b"0":
                        break

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        try:
            self._ask(b"TOUCH", keys[::-1])
        except StoreError:
            pass  # only an order of use is lost

    def take_evicted(self) -> list[OffloadKey]:
        with self._lock:
            bad, self._bad = self._bad, []
        return bad

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
        """The outcomes of ``commands``, in windows, by the servers that have the keys. Follows redirections.

        What is lost of a batch is a miss. If nothing came of it, the store fails as a whole; but not if a node of a
        cluster is lost and others work on, because the tier would leave those alone too.
        """
        answers = [False] * len(commands.names)
        refused, lost = list[str](), list[str]()
        batches = [(node, indexes, commands) for node, indexes in self._nodes.split(commands.names).items()]
        for _ in range(_MOST_ROUNDS):
            redirected: dict[tuple[Node, bool], list[int]] = {}
            for node, indexes, asked in batches:
                for start in range(0, len(indexes), asked.most):
                    part = indexes[start : start + asked.most]
                    try:
                        replies = self._exchange(node, asked, part)
                    except StoreError as exc:
                        lost.append(str(exc))
                        break
                    for index, reply in zip(part, replies, strict=True):
                        if not isinstance(reply, ErrorReply):
                            answers[index] = reply
                        elif target := self._nodes.redirect(reply):
                            redirected.setdefault((target, reply.startswith("ASK")), []).append(index)
                        elif reply.partition(" ")[0] in _SERVER_STATES:
                            lost.append(f"Redis at {node.address} answers: {reply}.")
                            node.close_idle()
                            self._nodes.record(node, is_good=False)
                        else:
                            hint = "; set cluster to true" if reply.startswith("MOVED") else ""
                            refused.append(f"Redis at {node.address} answers: {reply}{hint}.")
            batches = [
                (node, indexes, Asking(commands) if is_asking else commands)
                for (node, is_asking), indexes in redirected.items()
            ]
            if not batches:
                break
        if (refused or lost) and not any(answers) and not (lost and self._nodes.has_others):
            raise StoreError((refused + lost)[0])
        return answers

    def _exchange(self, node: Node, commands: Commands, indexes: Sequence[int]) -> list[Answer]:
        try:
            answers = node.exchange(
                lambda wire: commands.send(wire, indexes), lambda wire: commands.receive(wire, indexes)
            )
        except StoreError:
            self._nodes.record(node, is_good=False)
            raise
        self._nodes.record(node, is_good=True)
        return answers
