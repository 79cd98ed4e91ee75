# SPDX-License-Identifier: Apache-2.0
"""Real servers that speak S3, of this machine and for one test.

The default is moto's, which the tests install. ``KVOFFLOAD_S3_SERVER`` names SeaweedFS' ``weed`` instead. A call that
fails as long as a server starts is repeated until it succeeds, so nothing here depends on the machine's speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tests.forks import Command, Fork
from tests.ports import free_port
from tests.redis_server import wait_until

if TYPE_CHECKING:
    from tests.authority import Authority

BUCKET = "kv-fleet"
PATIENT = {"connect_timeout_s": 30.0, "request_timeout_s": 60.0}
"""Options of a tier whose test is not about deadlines."""
USER = {"region": "us-east-1", "access_key_id": "someone", "secret_access_key": "hush"}
"""Options of a tier's ``config`` for the only user who is no administrator."""


class S3Server:
    """One server on its own port, with one bucket."""

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        self.directory, self._authority = directory, authority
        self.port = free_port()
        self._log = directory / f"s3-{self.port}.log"
        self.endpoint = f"{'https' if authority else 'http'}://127.0.0.1:{self.port}"
        self.config = {"endpoint": self.endpoint} | USER
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="owner",
            aws_secret_access_key="owners-hush",
            verify=authority.ca if authority else None,
            config=Config(retries={"max_attempts": 1}, connect_timeout=10, read_timeout=30),
        )
        self._process: Fork | Command
        self._ports: set[str] = set()
        self.start()

    def start(self, *options: str) -> None:
        """``options``: of SeaweedFS alone. One that takes no writes is not asked for any."""
        self._is_full = bool(options)
        if weed := os.environ.get("KVOFFLOAD_S3_SERVER"):
            ports = {name: str(free_port()) for name in ("master.port", "volume.port", "filer.port")}
            self._ports |= {str(self.port), *ports.values()}
            words = [weed, "server", "-s3", f"-s3.port={self.port}", "-ip=127.0.0.1", f"-dir={self.directory}"]
            words += [f"-{name}={port}" for name, port in ports.items()]
            inner = [str(free_port()) for _ in range(4)]
            self._ports |= set(inner)
            words += [f"-{name}.grpc={port}" for name, port in zip(ports, inner[1:], strict=True)]
            words += [f"-s3.port.grpc={inner[0]}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
            words += ["-master.volumeSizeLimitMB=1024", f"-s3.config={self._write_users()}", *options]
            if self._authority:
                words += [f"-s3.cert.file={self._authority.server}", f"-s3.key.file={self._authority.server}"]
            with self._log.open("ab") as log:
                self._process = Command(words, cwd=self.directory, stdout=log, stderr=subprocess.STDOUT)
        else:
            words = ["-H", "127.0.0.1", "-p", str(self.port)]
            if self._authority:
                words += ["--ssl-cert", self._authority.server, "--ssl-key", self._authority.server]
            self._process = Fork(_serve_moto, words, self._log)
        wait_until(self._has_bucket, "the server has a bucket")

    def _write_users(self) -> Path:
        """Write the users. SeaweedFS checks keys, and moto accepts any key.

        If an administrator writes to a missing bucket, SeaweedFS creates it, so the stores' user is not an
        administrator.
        """
        owner = {"name": "owner", "credentials": [{"accessKey": "owner", "secretKey": "owners-hush"}]}
        fleet = {
            "name": "fleet",
            "credentials": [{"accessKey": self.config["access_key_id"], "secretKey": self.config["secret_access_key"]}],
        }
        identities = [owner | {"actions": ["Admin"]}, fleet | {"actions": ["Read", "List", "Write"]}]
        path = self.directory / "users.json"
        path.write_text(json.dumps({"identities": identities}))
        return path

    def _has_bucket(self) -> bool:
        assert self._process.is_alive, self.log()
        try:
            self.client.create_bucket(Bucket=BUCKET)
        except ClientError as exc:
            if "BucketAlready" not in str(exc):
                return False
        except BotoCoreError:
            return False
        if self._is_full:
            return True
        try:
            self.put("probe", b"probe")  # the part that keeps objects may start later
            self.delete("probe")
        except (BotoCoreError, ClientError):
            return False
        return True

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""

    def names(self, prefix: str = "") -> list[str]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for entry in listed.get("Contents", ())]

    def get(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def archive(self, name: str) -> None:
        """Move an object to an archive, as a lifecycle rule does."""
        self.client.copy_object(
            Bucket=BUCKET, Key=name, CopySource={"Bucket": BUCKET, "Key": name}, StorageClass="GLACIER"
        )

    def put(self, name: str, value: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=value)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)

    def freeze(self) -> None:
        self._process.stop()

    def thaw(self) -> None:
        self._process.go_on()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self.client.close()
        if self._process.is_alive:
            self.kill()
        for port in self._ports:  # SeaweedFS also listens on files, which a kill leaves behind
            for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


def _serve_moto(pipe: Connection, words: list[str], log: Path) -> None:
    from moto.server import main

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(words)
