# SPDX-License-Identifier: Apache-2.0
"""Make a certificate authority for one test."""

from __future__ import annotations

from pathlib import Path

import trustme


class Authority:
    """Certificates of one's own: of the server (for 127.0.0.1), of a client, and of the authority itself."""

    def __init__(self, directory: Path, server_name: str = "127.0.0.1") -> None:
        directory.mkdir(exist_ok=True)
        ca = trustme.CA()
        self.ca, self.server, self.client = (str(directory / f"{name}.pem") for name in ("ca", "server", "client"))
        ca.cert_pem.write_to_path(self.ca)
        ca.issue_cert(server_name).private_key_and_cert_chain_pem.write_to_path(self.server)
        ca.issue_cert("client@example.com").private_key_and_cert_chain_pem.write_to_path(self.client)
