# SPDX-License-Identifier: Apache-2.0
"""Test the page of ``kvoffload explain`` in Debian's Chromium, at the width of a desktop and of a phone."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.integration.served_tiers import ServedTiers

from kvoffload.cli import main

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.long
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium; `make test-remote` installs it")

FRAME = """<!doctype html><meta charset=utf-8><body style="margin:0">
<iframe id=f src="page.html" width={width} height=3000 style="border:0"></iframe><script>
const f = document.getElementById('f');
f.onload = () => {{
  const d = f.contentDocument, e = d.documentElement, all = selector => [...d.querySelectorAll(selector)];
  const box = element => element.getBoundingClientRect();
  const parts = all('h1,h2,p,.wide,svg');
  document.body.innerHTML = '<pre>' + JSON.stringify({{
    width: e.clientWidth,
    scroll: e.scrollWidth,
    outside: parts.filter(x => box(x).right > e.clientWidth + 1 || box(x).width < 1).length,
    tables: all('table').length,
    svgs: all('svg').length,
    title: d.title,
  }}) + '</pre>';
}};
</script>"""


class _Server:
    """A server that serves a folder and records the requests."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(handler, *args: Any) -> None:
                self.asked.append(handler.path)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def chromium(folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--no-first-run", "--disable-background-networking", "--virtual-time-budget=10000", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    served = ServedTiers(root, num_blocks=16, record_trace=str(root / "t.jsonl"))
    served.serve(rounds=3)
    served.close()
    with pytest.raises(SystemExit) as caught:
        main(["explain", str(root / "t.jsonl"), "--processes", "1", "--out", str(root / "page.html")])
    assert caught.value.code == 0
    return root


@pytest.fixture
def server(folder: Path) -> Iterator[_Server]:
    server = _Server(folder)
    yield server
    server.stop()


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_screen_and_loads_nothing(folder: Path, server: _Server, width: int) -> None:
    (folder / "frame.html").write_text(FRAME.format(width=width))
    shown = chromium(folder, "--window-size=1400,3200", "--dump-dom", f"{server.url}/frame.html")
    found = re.search(r"<pre>(\{.*\})</pre>", shown)
    assert found, shown[-2000:]
    seen = json.loads(found[1])
    assert seen["width"] == width
    assert seen["scroll"] <= width, "the page scrolls sideways"
    assert seen["outside"] == 0
    assert seen["tables"] >= 1
    assert seen["svgs"] == 1
    assert seen["title"] == "Why prompts were computed: t"
    assert set(server.asked) <= {"/frame.html", "/page.html", "/favicon.ico"}


@needs_chromium
def test_the_page_shows_colours_and_text(folder: Path) -> None:
    picture = folder / "page.png"
    chromium(folder, "--window-size=1280,1800", f"--screenshot={picture}", f"file://{folder / 'page.html'}")
    image = Image.open(picture).convert("RGB")
    assert image.size[0] == 1280
    colours = image.getcolors(1 << 24)
    assert colours is not None
    # The bar uses the colours of host memory, of the disk and of computed tokens.
    names = {f"#{red:02x}{green:02x}{blue:02x}" for count, (red, green, blue) in colours if count > 200}
    assert {"#d9730d", "#2f9e44", "#ced4da"} <= names
