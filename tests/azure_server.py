# SPDX-License-Identifier: Apache-2.0
"""Azurite, a server that speaks Azure's blob protocol, of this machine and for one test. ``KVOFFLOAD_AZURITE`` names
its program for blobs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from tests.ports import free_port
from tests.redis_server import PATIENCE_S, wait_until

ACCOUNT = "kvfleet"
KEY = base64.b64encode(b"the key of an account of a test").decode()
CONTAINER = "kv-fleet"


def program() -> str | None:
    return os.environ.get("KVOFFLOAD_AZURITE")


class AzureServer:
    """One server on its own port, with one account and one container."""

    def __init__(self, directory: Path) -> None:
        chosen = program()
        assert chosen is not None
        self.port = free_port()
        self.directory = directory
        self.config = {
            "endpoint": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "account_name": ACCOUNT,
            "account_key": KEY,
        }
        words = [shutil.which("node") or "node", chosen, "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        words += ["--location", str(directory), "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        with (directory / "azurite.log").open("wb") as log:
            self._process = subprocess.Popen(
                words,
                cwd=directory,
                env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._has_container, "the server has a container")

    def _has_container(self) -> bool:
        assert self._process.poll() is None, (self.directory / "azurite.log").read_text()[-4000:]
        try:
            return self.request("PUT", CONTAINER, "restype:container")[0] in (201, 409)
        except OSError:
            return False

    def request(
        self, method: str, path: str, query: str = "", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """A side door: a signed request, and its status and body. ``query`` is ``name:value`` or nothing."""
        own = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2021-08-06"}
        own |= headers or {}
        lines = [method, "", "", str(len(body) or ""), *[""] * 8, *(f"{name}:{own[name]}" for name in sorted(own))]
        lines += [f"/{ACCOUNT}/{ACCOUNT}/{path}", *([query] if query else [])]
        signed = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
        own["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            where = f"/{ACCOUNT}/{path}" + ("?" + query.replace(":", "=") if query else "")
            connection.request(method, where, body or None, own | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, name: str) -> bytes:
        status, body = self.request("GET", f"{CONTAINER}/{name}")
        assert status == 200, body
        return body

    def put(self, name: str, value: bytes) -> None:
        status, body = self.request("PUT", f"{CONTAINER}/{name}", body=value, headers={"x-ms-blob-type": "BlockBlob"})
        assert status == 201, body

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE_S)
