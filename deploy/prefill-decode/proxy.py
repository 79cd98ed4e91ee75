# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: each prompt goes to PREFILL for one token, then to DECODE, which loads what it computed.

``python deploy/prefill-decode/proxy.py PREFILL_URL DECODE_URL PORT``, for servers that share a tier:
docs/fleet.md.
"""

import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PREFILL, DECODE, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


class Proxy(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        short = body | {"max_tokens": 1, "stream": False}
        for key in ("max_completion_tokens", "stream_options"):
            short.pop(key, None)
        try:
            post(PREFILL + self.path, short).read()
        except OSError:
            pass  # DECODE computes the prompt, or says what is wrong with it
        try:
            answer = post(DECODE + self.path, body)
        except urllib.error.HTTPError as error:
            answer = error
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.end_headers()
        while chunk := answer.read1(65536):  # as it comes, for streams
            self.wfile.write(chunk)


ThreadingHTTPServer(("127.0.0.1", PORT), Proxy).serve_forever()
