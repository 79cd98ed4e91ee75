# SPDX-License-Identifier: Apache-2.0
"""Test secrets in files and variables, as people and orchestrators write them, and files that are something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.secrets import read_secret


@pytest.mark.parametrize("content", [b"hunter2", b"hunter2\n", b"hunter2\r\n", b"\xef\xbb\xbfhunter2\r\n"])
@pytest.mark.parametrize("place", ["file", "env"])
def test_line_breaks_and_byte_order_marks_are_not_part_of_a_secret(
    content: bytes, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    monkeypatch.setenv("SECRET", os.fsdecode(content))
    assert read_secret({place: str(path) if place == "file" else "SECRET"}, "password") == "hunter2"


@pytest.mark.parametrize("kind", ["pipe", "huge", "directory", "utf-16", "empty"])
def test_a_file_that_is_no_secret_is_one_sentence(kind: str, tmp_path: Path) -> None:
    """Nobody waits for the writer of a pipe, and nobody reads a file of weights."""
    path = tmp_path / "secret"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes("hunter2".encode("utf-16") if kind == "utf-16" else b"")
        if kind == "huge":
            os.truncate(path, 1 << 42)
    with pytest.raises(ConfigError, match=r"^password is read from .*secret, which [^\n]*\.$") as caught:
        read_secret({"file": str(path)}, "password")
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize("option", ["tls_ca", "tls_cert", "tls_key"])
def test_certificates_are_no_pipes(option: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pem")
    files = {"tls_cert": str(tmp_path / "pem")} if option == "tls_key" else {}
    tier = parse_tier({"type": "redis", "url": "rediss://127.0.0.1:1", option: str(tmp_path / "pem")} | files)
    with pytest.raises(ConfigError, match="not a regular file"):
        tier.open_store(4096, "")
