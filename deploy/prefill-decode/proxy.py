# SPDX-License-Identifier: Apache-2.0
"""Separate prefill and decoding: ``python deploy/prefill-decode/proxy.py PREFILL_URL DECODE_URL PORT``.

The proxy sends each prompt to PREFILL for one token, and then to DECODE, which loads the computed blocks from the tier
that both servers share (docs/fleet.md). When a client disconnects, the request to DECODE ends.
"""

import contextlib
import http.client
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PREFILL, DECODE, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])


def post(url: str, path: str, body: dict[str, Any], client: socket.socket) -> http.client.HTTPResponse:
    """Send a request and return the start of the response. The response is cut off when ``client`` disconnects."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=600)
    connection.request("POST", parts.path + path, json.dumps(body), {"Content-Type": "application/json"})
    threading.Thread(target=follow, args=(client, connection.sock), daemon=True).start()
    return connection.getresponse()


def follow(client: socket.socket, server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # raised if the request has ended
        if not client.recv(1, socket.MSG_PEEK):
            server.shutdown(socket.SHUT_RDWR)


class Proxy(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        short = body | {"max_tokens": 1, "stream": False}
        for key in ("max_completion_tokens", "stream_options"):
            short.pop(key, None)
        try:
            post(PREFILL, self.path, short, self.connection).read()
        except (OSError, http.client.HTTPException):
            pass  # DECODE computes the prompt, or reports the mistake in it
        try:
            answer = post(DECODE, self.path, body, self.connection)
        except (OSError, http.client.HTTPException) as error:
            with contextlib.suppress(OSError):
                self.send_error(502, f"DECODE does not answer: {error}")
            return
        with answer, contextlib.suppress(OSError, http.client.HTTPException):  # raised if either side disconnects
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            while chunk := answer.read1(65536):  # as it comes, for streams
                self.wfile.write(chunk)


ThreadingHTTPServer(("127.0.0.1", PORT), Proxy).serve_forever()
