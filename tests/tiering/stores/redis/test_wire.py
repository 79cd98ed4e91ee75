# SPDX-License-Identifier: Apache-2.0
"""Replies are scattered to where they belong, however the bytes come in, and requests are gathered however they go."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.authority import Authority

from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.redis.commands import Answer, Ask, Asking, Get, Put
from kvoffload.tiering.stores.redis.store import RedisStore
from kvoffload.tiering.stores.redis.wire import ErrorReply, Wire, encode, error_reply, open_wire
from kvoffload.tiering.stores.seal import sealer_of

SIZE = 700
SEALER = sealer_of("ns", None)


@contextmanager
def wire() -> Iterator[tuple[Wire, socket.socket]]:
    near, far = socket.socketpair()
    opened = open_wire(near)
    opened.begin(60.0)
    try:
        yield opened, far
    finally:
        opened.close()
        far.close()


@contextmanager
def answering(far: socket.socket, data: bytes, chunks: list[int]) -> Iterator[None]:
    """Sends ``data`` from a thread, in pieces of these sizes and then the rest."""

    def send() -> None:
        start = 0
        for size in chunks:
            far.sendall(data[start : start + size])
            start += size
        far.sendall(data[start:])

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


def value(index: int, kind: str) -> bytes:
    """Return the reply for key ``index``."""
    key = keys(index)[0]
    block = block_of(key, SIZE)
    good = block + SEALER.seal(key, memoryview(block))[1]
    match kind:
        case "hit":
            return b"$%d\r\n%s\r\n" % (len(good), good)
        case "altered":
            return b"$%d\r\n%s\r\n" % (len(good), b"?" + good[1:])
        case "short":
            return b"$%d\r\n%s\r\n" % (len(good) - 5, good[5:])
        case "long":
            return b"$%d\r\n%s\r\n" % (3 * len(good), 3 * good)
        case "empty":
            return b"$0\r\n\r\n"
        case "wrongtype":
            return b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
        case "error":
            return b"-LOADING the dataset\r\n"
    return b"$-1\r\n"


KINDS = st.lists(
    st.sampled_from(["hit", "hit", "miss", "altered", "short", "long", "empty", "wrongtype", "error"]),
    min_size=1,
    max_size=9,
)


@given(KINDS, st.lists(st.integers(1, 900), max_size=12))
def test_values_are_scattered_however_they_come_in(kinds: list[str], chunks: list[int]) -> None:
    wanted = keys(*range(len(kinds)))
    blocks = [memoryview(bytearray(SIZE)) for _ in kinds]
    get = Get([bytes(key) for key in wanted], 100, wanted, blocks, SEALER)
    data = b"".join(value(index, kind) for index, kind in enumerate(kinds))
    with wire() as (opened, far), answering(far, data, chunks):
        answers = get.receive(opened, range(len(kinds)))
    expected = [ErrorReply("LOADING the dataset") if kind == "error" else kind == "hit" for kind in kinds]
    assert answers == expected
    assert get.bad == [i for i, kind in enumerate(kinds) if kind in ("altered", "short", "long", "empty", "wrongtype")]
    for key, block, kind in zip(wanted, blocks, kinds, strict=True):
        if kind == "hit":
            assert bytes(block) == block_of(key, SIZE)


@given(st.lists(st.sampled_from([b":0", b":1", b"-ERR no"]), min_size=1, max_size=300), st.lists(st.integers(1, 9)))
def test_lines_are_read_however_they_come_in(lines: list[bytes], chunks: list[int]) -> None:
    ask = Ask([b"name"] * len(lines), 1000, b"EXISTS")
    with wire() as (opened, far), answering(far, b"".join(line + b"\r\n" for line in lines), chunks):
        answers = ask.receive(opened, range(len(lines)))
    assert answers == [ErrorReply("ERR no") if line[:1] == b"-" else line == b":1" for line in lines]


def test_a_large_block_goes_out_whole_through_small_buffers() -> None:
    key, size = keys(1)[0], 3 << 20
    block = memoryview(block_of(key, size))
    put = Put([b"name"], 10, [key], [block], SEALER, ttl_s=60)
    received = bytearray()
    with wire() as (opened, far):

        def drain() -> None:
            while data := far.recv(50_000):
                received.extend(data)

        thread = threading.Thread(target=drain)
        thread.start()
        opened.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        put.send(opened, [0])
        opened.socket.shutdown(socket.SHUT_WR)
        thread.join()
    sealed = bytes(block) + SEALER.seal(key, block)[1]
    assert received == encode(b"SET", b"name", sealed, b"NX", b"EX", b"60")


def test_more_parts_than_one_call_takes() -> None:
    wanted = keys(*range(600))
    blocks = [memoryview(block_of(key, 8)) for key in wanted]
    put = Put([b"n"] * 600, 1000, wanted, blocks, SEALER, ttl_s=None)
    with wire() as (opened, far):
        put.send(opened, range(600))
        opened.socket.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: far.recv(1 << 16), b""))
    expected = [
        encode(b"SET", b"n", bytes(block) + SEALER.seal(key, block)[1], b"NX")
        for key, block in zip(wanted, blocks, strict=True)
    ]
    assert received == b"".join(expected)


def exchanged(size: int, touched: bytes, turns: Sequence[tuple[Sequence[int], bytes]]) -> list[Answer]:
    """The answers to one window of blocks of ``size``, where the server answers ``touched`` to the question. Each of
    ``turns`` has the blocks that must arrive before it sends the rest of its answer, and nothing after them."""
    count = touched.count(b"\r\n")
    wanted, names = keys(*range(count)), [b"%d" % n for n in range(count)]
    blocks = [memoryview(block_of(key, size)) for key in wanted]
    put = Put(names, count, wanted, blocks, SEALER, ttl_s=None)
    sent = [
        encode(b"SET", name, bytes(block) + SEALER.seal(key, block)[1], b"NX")
        for name, key, block in zip(names, wanted, blocks, strict=True)
    ]
    wrong = list[str]()
    with wire() as (opened, far):

        def serve() -> None:
            before = b"".join(encode(b"TOUCH", name) for name in names)
            for blocks_sent, reply in turns:
                expected = before + b"".join(sent[n] for n in blocks_sent)
                if far.recv(len(expected), socket.MSG_WAITALL) != expected:
                    wrong.append(f"not the blocks {blocks_sent}")
                try:
                    far.recv(1, socket.MSG_DONTWAIT)
                    wrong.append(f"something after the blocks {blocks_sent}")
                except BlockingIOError:
                    pass
                far.sendall((touched if before else b"") + reply)
                before = b""

        thread = threading.Thread(target=serve)
        thread.start()
        answers = put.exchange(opened, range(count))
        thread.join()
    assert not wrong
    return answers


def test_what_is_there_already_is_not_sent_but_for_the_first() -> None:
    turns = [((0,), b"-OOM\r\n"), ((1,), b"+OK\r\n"), ((3,), b"-OOM\r\n")]
    answers = exchanged(1 << 20, b":1\r\n:0\r\n-MOVED 1 h:1\r\n:0\r\n:1\r\n", turns)
    assert answers == [True, True, ErrorReply("MOVED 1 h:1"), ErrorReply("OOM"), True]


def test_each_mebibyte_is_answered_before_the_next_is_sent() -> None:
    turns = [((0, 1), b"+OK\r\n$-1\r\n"), ((2, 4), b"-OOM\r\n+OK\r\n"), ((5, 6), 2 * b"+OK\r\n"), ((7,), b"+OK\r\n")]
    answers = exchanged(512 << 10, b":0\r\n:1\r\n:0\r\n:1\r\n" + 4 * b":0\r\n", turns)
    assert answers == [True, True, ErrorReply("OOM"), True, True, True, True, True]


@pytest.mark.parametrize("line", [b":2", b"+QUEUED", b"$3", b"", b"HTTP/1.1 400 Bad Request"])
def test_an_answer_that_such_a_command_has_not_is_an_error(line: bytes) -> None:
    wanted, block = keys(1), memoryview(bytes(8))
    for commands in (Ask([b"a"], 1, b"EXISTS"), Put([b"a"], 1, wanted, [block], SEALER, None)):
        with wire() as (opened, far):
            far.sendall(line + b"\r\n")
            with pytest.raises(ConnectionError, match="not a reply"):
                commands.receive(opened, [0])


def test_lines_that_do_not_end_take_no_memory() -> None:
    with (
        wire() as (opened, far),
        answering(far, bytes(1 << 17), []),
        pytest.raises(ConnectionError, match="does not end"),
    ):
        opened.read_lines(3)


def test_permission_is_asked_for_each_command() -> None:
    ask = Asking([b"a", b"b"], 10, Ask([b"a", b"b"], 10, b"EXISTS"))
    with wire() as (opened, far):
        ask.send(opened, [0, 1])
        expected = b"".join(encode(b"ASKING") + encode(b"EXISTS", name) for name in (b"a", b"b"))
        assert far.recv(1000) == expected
        far.sendall(b"+OK\r\n:1\r\n+OK\r\n:0\r\n")
        assert ask.receive(opened, [0, 1]) == [True, False]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"$7",
        b"$716\r\nabc",
        b"HTTP/1.1 400\r\n",
        b"$x\r\n",
        b":5\r\n",
        b"x" * 5000,
        b"$716\r\n" + bytes(716) + b"xx",
    ],
)
def test_what_is_no_value_is_an_error(data: bytes) -> None:
    with wire() as (opened, far):
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            opened.read_value(memoryview(bytearray(700)), memoryview(bytearray(16)))


def test_more_answers_than_questions_are_an_error() -> None:
    with wire() as (opened, far):
        far.sendall(b":1\r\n:1\r\n:1\r\n")
        with pytest.raises(ConnectionError):
            opened.read_lines(2)


def test_no_answer_by_the_deadline_is_a_timeout() -> None:
    with wire() as (opened, _):
        opened.begin(0.05)
        with pytest.raises(TimeoutError):
            opened.read_lines(2)
        with pytest.raises(TimeoutError):
            opened.send([b"x"])  # the deadline is for the whole exchange


def test_each_exchange_has_its_own_deadline() -> None:
    """The kernel keeps the limit of the previous exchange if it is still right."""

    def limits_s() -> list[int]:
        options = (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)
        return [struct.unpack("ll", opened.socket.getsockopt(socket.SOL_SOCKET, o, 16))[0] for o in options]

    with wire() as (opened, far):
        for timeout_s, least_s in ((1000.0, 500), (1000.0, 500), (100.0, 50), (1000.0, 500)):
            opened.begin(timeout_s)
            opened.send([b"question"])
            far.sendall(b":1\r\n:0\r\n")
            assert opened.read_lines(2) == [b":1", b":0"]
            assert all(least_s < limit_s <= timeout_s for limit_s in limits_s())


def test_a_drip_is_no_answer_in_time() -> None:
    """Each byte arrives soon after the previous one, and the value would be complete in the end.

    The deadline is for all of it.
    """
    size = 1 << 20
    with wire() as (opened, far):
        has_ended = threading.Event()

        def drip() -> None:
            far.sendall(b"$%d\r\n" % size)
            for _ in range(size):
                if has_ended.wait(0.001):
                    return
                far.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        opened.begin(0.1)
        with pytest.raises(TimeoutError):
            opened.read_value(memoryview(bytearray(size - 16)), memoryview(bytearray(16)))
        has_ended.set()
        thread.join()


def test_nobody_who_takes_what_is_sent_is_a_timeout() -> None:
    with wire() as (opened, _):
        opened.begin(0.05)
        with pytest.raises(TimeoutError):
            opened.send([bytes(16 << 20)])


def test_a_window_is_some_4_mib() -> None:
    for size, expected in ((64, 256), (1 << 20, 4), (3 << 20, 1), (16 << 20, 1)):
        store = RedisStore("redis://h", size)
        assert store._window == expected
        store.close()


REPLIES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=1500),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def encoded(reply: object) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    raise AssertionError(reply)


def depth_of(reply: object) -> int:
    return 1 + max(map(depth_of, reply), default=0) if isinstance(reply, list) else 0


@given(
    replies=st.lists(REPLIES.filter(lambda reply: depth_of(reply) <= 8), max_size=4),
    chunks=st.lists(st.integers(1, 900), max_size=12),
)
def test_replies_of_any_kind_however_they_come_in(replies: list[object], chunks: list[int]) -> None:
    with wire() as (opened, far), answering(far, b"".join(map(encoded, replies)) + b"+OK\r\n-ERR no\r\n", chunks):
        assert [opened.read_reply() for _ in replies] == replies
        assert opened.read_reply() == b"OK"
        error = opened.read_reply()
        assert isinstance(error, ErrorReply)
        assert error == "ERR no"


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 400",
        b":1.5",
        b"$-2",
        b"*-2",
        b"$99999999999",
        b"*99999999",
        b"$" + b"1" * 40,
        b"*1\r\n" * 9 + b":1",
    ],
)
def test_a_reply_that_is_none_is_an_error_without_much_memory(reply: bytes) -> None:
    with wire() as (opened, far), answering(far, reply + b"\r\n", []), pytest.raises(ConnectionError):
        opened.read_reply()


def test_what_a_server_repeats_of_a_command_is_no_part_of_an_error() -> None:
    line = b"-ERR unknown command 'AUTH', with args beginning with: 'engines' 'hunter2' "
    assert error_reply(line) == "ERR unknown command 'AUTH'"


def test_over_tls_what_is_sent_and_what_is_received_is_whole(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=authority.ca)
    server.load_cert_chain(authority.server)
    near, plain = socket.socketpair()
    plain.settimeout(60)

    def received(count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += far.recv(1 << 16)
        return data

    with ThreadPoolExecutor(1) as other_side:
        accepted = other_side.submit(server.wrap_socket, plain, server_side=True)
        opened = open_wire(client.wrap_socket(near, server_hostname="127.0.0.1"))
        opened.begin(60.0)
        far = accepted.result()
        (key,) = keys(0)
        for size in (SIZE, (1 << 14) - 1, 1 << 14, 1 << 18):
            block = memoryview(block_of(key, size))
            expected = encode(b"SET", b"name", bytes(block) + SEALER.seal(key, block)[1], b"NX")
            arriving = other_side.submit(received, len(expected))
            Put([b"name"], 10, [key], [block], SEALER, ttl_s=None).send(opened, [0])
            assert arriving.result() == expected

        kinds = ["hit", "miss", "altered", "hit"] * 12  # of several records
        wanted = keys(*range(len(kinds)))
        blocks = [memoryview(bytearray(SIZE)) for _ in kinds]
        get = Get([bytes(key) for key in wanted], 100, wanted, blocks, SEALER)
        with answering(far, b"".join(value(index, kind) for index, kind in enumerate(kinds)), [5, 700, 1]):
            assert get.receive(opened, range(len(kinds))) == [kind == "hit" for kind in kinds]
        assert [bytes(block) for block in blocks[:4:3]] == [block_of(key, SIZE) for key in wanted[:4:3]]

        opened.begin(0.01)
        with pytest.raises(TimeoutError):
            opened.read_line()
        opened.begin(60.0)
        far.close()
        with pytest.raises(ConnectionError):
            opened.read_line()
        opened.close()
