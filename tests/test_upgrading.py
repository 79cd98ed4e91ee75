# SPDX-License-Identifier: Apache-2.0
"""Follow ``docs/upgrading.md`` from version 0.1.0: its configuration, one server after the other, and back again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli import main

ROOT = Path(__file__).parents[1]
OLD = "70d390254e654edd8b3daec8c96d0b90bc91f497"
"""The commit of version 0.1.0."""

SERVE = """
import sys
from pathlib import Path

import yaml

import kvoffload
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams, build_random_model

model = build_random_model(layers=2, hidden=128, heads=2, vocab=256)
config = kvoffload.parse_config(yaml.safe_load(Path(sys.argv[1]).read_text()))
prompts = [[7 + conversation] * 200 for conversation in range(4)]
print(kvoffload.__version__, flush=True)
for _ in sys.stdin:  # each line starts a server, which serves and shuts down
    with Engine(model, EngineOptions(num_blocks=64, block_tokens=16), config) as engine:
        tokens = engine.generate(prompts, SamplingParams(max_tokens=4))
        engine.drain()
    print([tokens, engine.counts.external_hit_tokens], flush=True)
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed 0.1.0, from a wheel that is built from its commit."""
    folder = tmp_path_factory.mktemp("old")
    if subprocess.run(["git", "cat-file", "-e", OLD], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("needs the history: a checkout that contains the commit of version 0.1.0")
    files = ("src", "pyproject.toml", "README.md", "LICENSE")
    subprocess.run(["git", "archive", "--output", folder / "old.tar", OLD, *files], cwd=ROOT, check=True)
    (folder / "source").mkdir()
    subprocess.run(["tar", "-xf", folder / "old.tar", "-C", folder / "source"], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source"]
    subprocess.run(build, check=True, capture_output=True)
    with zipfile.ZipFile(folder / "kvoffload-0.1.0-py3-none-any.whl") as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(site), "OMP_WAIT_POLICY": "passive"}


def kvoffload(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvoffload", *arguments]
    return subprocess.run(command, env=environment(site), capture_output=True, text=True, check=False)


def test_check_config_names_what_to_change_in_a_file_of_the_old_version(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, disk = tmp_path / "offload.yaml", tmp_path / "kv"
    rest = f"cpu_bytes_to_use: 1MiB\nsecondary_tiers:\n  - {{type: disk, path: {disk}, max_bytes: 1GiB}}\n"
    file.write_text(f"claim_share: 0.5\n{rest}")
    assert kvoffload(old, "check-config", file).returncode == 0
    with pytest.raises(SystemExit) as rejected:
        main(["check-config", str(file)])
    assert rejected.value.code == 1
    said = capsys.readouterr()
    assert "claim_share" in said.out + said.err
    file.write_text(rest)
    with pytest.raises(SystemExit) as accepted:
        main(["check-config", str(file)])
    assert not accepted.value.code
    assert not disk.exists()


class Server:
    """A process of one version that starts an engine for each call of ``serve``."""

    def __init__(self, site: Path, file: Path) -> None:
        command = [sys.executable, "-c", SERVE, str(file)]
        self._process = subprocess.Popen(
            command, env=environment(site), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def serve(self) -> tuple[Any, int]:
        """Return the tokens, and the number of prompt tokens that were loaded."""
        assert self._process.stdin is not None
        self._process.stdin.write("serve\n")
        self._process.stdin.flush()
        tokens, hits = json.loads(self._read())
        return tokens, hits

    def close(self) -> None:
        self._process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_servers_of_both_versions_share_a_directory(old: Path, tmp_path: Path, kind: str) -> None:
    """Each version finds its own blocks, before, while and after the other one uses the directory."""
    file, directory = tmp_path / "offload.yaml", tmp_path / "kv"
    patient = "timeout_s: 120, drain_timeout_s: 120"  # the machine may be busy
    tier = f"{{type: {kind}, path: {directory}, max_bytes: 1GiB, {patient}}}"
    options = "cpu_bytes_to_use: 4MiB\nload_policy: always\nmax_wait_s: 120\n"
    file.write_text(f"{options}secondary_tiers:\n  - {tier}\n")
    before, after = Server(old, file), Server(ROOT / "src", file)
    try:
        assert (before.version, after.version != "0.1.0") == ("0.1.0", True)
        tokens, hits = before.serve()
        assert hits == 0
        first_after, _ = after.serve()
        again_after, hits_after = after.serve()
        again, hits_again = before.serve()  # the way back
    finally:
        before.close()
        after.close()
    assert first_after == again_after == again == tokens
    assert min(hits_after, hits_again) >= 4 * 160
    listed = kvoffload(ROOT / "src", "store", "ls", directory, "--json")
    namespaces = json.loads(listed.stdout)
    assert len(namespaces) >= 1, listed.stderr
    assert kvoffload(ROOT / "src", "store", "clear", directory, "--all", "--yes").returncode == 0
