# SPDX-License-Identifier: Apache-2.0
"""``kvoffload top`` over the metrics of a real manager with a real disk tier, read over HTTP."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.integration.served_tiers import ServedTiers

from kvoffload.cli import main
from kvoffload.cli.top import Snapshot, TierView, View, compare, draw, parse
from kvoffload.errors import ConfigError


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedTiers]:
    served = ServedTiers(tmp_path, num_blocks=16)
    yield served
    served.close()


def scrape(served: ServedTiers, at_s: float) -> Snapshot:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=10) as response:
        return parse(response.read().decode(), at_s)


def shown(view: View) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(draw(view))
    return out.getvalue()


def test_an_interval_is_what_happened_in_it(served: ServedTiers) -> None:
    served.serve(rounds=1)
    before, stats = scrape(served, 0.0), served.engine.connector.get_stats()
    served.serve(rounds=1)
    after, now = scrape(served, 10.0), served.engine.connector.get_stats()
    view = compare(before, after)

    def grown(*sample: str) -> float:
        return now[sample] - stats.get(sample, 0)

    assert view.hit_rate == pytest.approx(grown("hit_tokens") / grown("lookup_tokens"))
    assert view.hit_rate_total == pytest.approx(now["hit_tokens",] / now["lookup_tokens",])
    host, disk = view.tiers
    assert (host.name, disk.name) == ("host memory", "disk")
    assert disk.hit_rate == pytest.approx(grown("tier_hit_tokens", "disk") / grown("lookup_tokens"))
    assert disk.hit_rate > 0
    assert disk.hit_rate_total == pytest.approx(now["tier_hit_tokens", "disk"] / now["lookup_tokens",])
    assert host.hit_rate + disk.hit_rate == pytest.approx(view.hit_rate)
    assert host.fill == 1.0
    assert disk.read_bytes_per_s == pytest.approx(grown("tier_io_bytes", "disk", "read") / 10)
    assert disk.fill == pytest.approx(disk.used / served.disk_bytes)
    assert not view.problems
    text = shown(view)
    assert "disk" in text
    assert "problems: none" in text
    assert disk.off == ()


def test_a_tier_that_is_off_says_why() -> None:
    tier = 'engine="0",tier="disk"'
    last_trip = f'kvoffload_tier_breaker_last_trip_timestamp_seconds{{{tier},direction="write"'
    lines = [
        f"kvoffload_tier_healthy{{{tier}}} 0.0",
        f'kvoffload_tier_breaker_open{{{tier},direction="write"}} 1.0',
        f'{last_trip},reason="EIO"}} 900',
        f'{last_trip},reason="hang"}} 940',
        'kvoffload_cascades_total{engine="0",outcome="dropped"} 7',
        'vllm:other_total{engine="0"} 7',
    ]
    now = parse("\n".join(lines) + "\n", 10.0)
    view = compare(Snapshot(0.0, {}), now)
    assert view.tiers[1].off == ("writing off, hang",)
    assert "hang" in shown(view)
    assert view.problems == {"tiers off": 1, "dropped writes": 7}
    assert compare(now, now).problems == {"tiers off": 1}, "while it lasts"
    assert "problems: tiers off 1" in shown(compare(now, now))


def test_engines_of_one_server_are_added_up_and_a_restart_begins_anew() -> None:
    def page(*values: float) -> Snapshot:
        lines = [f'kvoffload_lookup_tokens_total{{engine="{at}"}} {value}' for at, value in enumerate(values)]
        lines += [f'kvoffload_hit_tokens_total{{engine="{at}"}} {value / 2}' for at, value in enumerate(values)]
        return parse("\n".join(lines) + "\n", values[0])

    view = compare(page(10, 20), page(20, 30))
    assert view.lookup_tokens_per_s == 2.0
    assert view.hit_rate == 0.5
    restarted = compare(page(100, 100), page(110, 4))
    assert restarted.hit_rate == 0.5
    assert restarted.lookup_tokens_per_s == 11.4


def test_engines_that_share_a_tier_show_its_bytes_once() -> None:
    figures = {"healthy": (1, 1), "bytes": (200, 204), "quota_bytes": (400, 400), "io_bytes_total": (5, 7)}
    lines = [
        f'kvoffload_tier_{name}{{engine="{engine}",tier="disk",direction="read"}} {value}'
        for name, values in figures.items()
        for engine, value in enumerate(values)
    ]
    _, disk = compare(Snapshot(0.0, {}), parse("\n".join(lines) + "\n", 1.0)).tiers
    assert (disk.used, disk.fill) == (204, 0.51)
    assert disk.read_bytes_per_s == 12, "what each did is added up"


def test_once_as_a_table_and_as_json(served: ServedTiers, capsys: pytest.CaptureFixture[str]) -> None:
    served.serve(rounds=2)
    url = f"127.0.0.1:{served.port}"
    main_of(["top", url, "--once", "--interval", "0.01"])
    text = capsys.readouterr().out
    assert "host memory" in text
    assert "disk" in text
    main_of(["top", url, "--once", "--json", "--interval", "0.01"])
    (line,) = capsys.readouterr().out.splitlines()
    view = json.loads(line)
    assert view["hit_rate_total"] > 0
    assert [tier["name"] for tier in view["tiers"]] == ["host memory", "disk"]


def main_of(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("localhost:abc", "not the address"),
        ("ftp://localhost", "not the address"),
        ("http://[::1", "not the address"),
        ("http://127.0.0.1:1", "cannot be read"),
        ("127.0.0.1:1/metrics", "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(url: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["top", url, "--once"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert what in error
    assert "Errno" not in error


@pytest.fixture
def serve_raw() -> Iterator[Callable[[list[bytes]], int]]:
    """``serve_raw(answers)``: the port of a server that gives each connection the next of ``answers``, the last for
    ever, and closes it."""
    sockets: list[socket.socket] = []

    def serve(answers: list[bytes]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def answer() -> None:
            rest = list(answers)
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(rest.pop(0) if len(rest) > 1 else rest[0])

        threading.Thread(target=answer, daemon=True).start()
        return int(listener.getsockname()[1])

    yield serve
    for each in sockets:
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def test_a_port_that_speaks_something_else(
    serve_raw: Callable[[list[bytes]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["top", f"127.0.0.1:{serve_raw([b'SSH-2.0-server' + bytes([13, 10])])}", "--once"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "cannot be read" in err
    assert err.count("\n") == 1


def test_a_server_that_dies_in_the_middle_of_an_answer_does_not_end_the_view(
    serve_raw: Callable[[list[bytes]], int],
) -> None:
    page = b"kvoffload_lookup_tokens_total 7.0\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page)
    port = serve_raw([head + page, head + page[:9], head + page])
    command = [sys.executable, "-m", "kvoffload", "top", f"127.0.0.1:{port}", "--json", "--interval", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None and view.stderr is not None
            assert "cannot be read" in view.stderr.readline(), "what is on stdout is JSON"
            rest = iter(view.stdout.readline, "")
            assert any(line.startswith("{") for line in rest)
        finally:
            view.kill()


def test_a_proxy_of_the_environment_is_named(
    serve_raw: Callable[[list[bytes]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    answers = {b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n": "Forbidden"}
    answers[b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nup 1\n"] = "no metrics"
    for answer, word in answers.items():
        proxy = f"127.0.0.1:{serve_raw([answer])}"
        monkeypatch.setenv("http_proxy", f"http://me:hunter2@{proxy}")
        monkeypatch.setattr(urllib.request, "_opener", None)  # it reads the environment once
        with pytest.raises(SystemExit):
            main(["top", "kv-server:8000", "--once"])
        err = capsys.readouterr().err
        assert f"proxy http://{proxy} (HTTP_PROXY" in err and word in err and "hunter2" not in err
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(SystemExit):
        main(["top", "127.0.0.1:1", "--once"])
    assert "proxy" not in capsys.readouterr().err


def test_no_error_shows_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "me:hun%20ter2@127.0.0.1:1", "--once"])
    err = capsys.readouterr().err
    assert "password" in err and "hun" not in err and "me:" not in err


def test_labels_are_shown_as_they_are() -> None:
    """Rich would read brackets as markup, and reject some. Control characters could change the terminal."""
    name = "[/red] [bold]x"
    page = f'kvoffload_tier_healthy{{tier="{name}"}} 1\nkvoffload_tier_healthy{{tier="\x1b[2J"}} 1\n'
    text = shown(compare(parse(page, 0), parse(page, 1)))
    assert name in text and "\x1b" not in text and "\\x1b[2J" in text


def test_a_page_without_kvoffload_or_without_metrics() -> None:
    assert parse("# nothing\nup 1\n", 0).values == {}
    with pytest.raises(ConfigError, match="not a page of metrics"):
        parse("<html>\n", 0)


def test_80_columns_hold_all_that_the_table_says() -> None:
    host = TierView("host memory", 0.123, 0.456, 12e9, 3e9, 0.995, 123_456, 12)
    disk = TierView("disk", 1.0, 1.0, 12e9, 3e9, 1.0, 1_234_567_890_123, 4000, ("reading off, timeout for 12 s",))
    text = shown(View(2.0, 0.5, 0.4, 12_345, 10, 3, 5, {}, (host, disk)))
    assert "…" not in text
    for word in ("host memory", "99.5%", "11.2 GiB", "1.12 TiB, 100%", "4,000", "reading off, timeout for 12 s"):
        assert word in text
