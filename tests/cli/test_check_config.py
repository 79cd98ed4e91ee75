# SPDX-License-Identifier: Apache-2.0
"""Run ``kvoffload check-config`` as users do.

Each line of ``bad_configs.jsonl`` contains a configuration with mistakes, and the expected messages. ``python -m
tests.cli.test_check_config`` rewrites the messages; read them before you keep them.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.memory_files import memory_directory
from tests.redis_server import RedisServer

from kvoffload.cli import main
from kvoffload.cli.check_config import _probe_directory
from kvoffload.config_file import ENVIRONMENT, load_config_file, with_config_file
from kvoffload.cpu import memory_limits
from kvoffload.errors import CapacityError, ConfigError, MissingExtraError
from kvoffload.specs import read_config
from kvoffload.tiering.stores.disk.options import DiskOptions

GOLDEN = Path(__file__).with_name("bad_configs.jsonl")
REDIS = {"type": "redis", "url": "redis://127.0.0.1:1/0"}


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["check-config", *map(str, args)])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def problems_of(config: Any) -> list[str]:
    try:
        read_config(config)
    except ConfigError as exc:
        return [str(problem) for problem in exc.args]
    return []


def golden() -> list[tuple[Any, list[str]]]:
    return [tuple(json.loads(line)) for line in GOLDEN.read_text().splitlines()]


def test_a_disk_that_hangs_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real = threading.Event(), os.path.lexists
    monkeypatch.setattr("kvoffload.cli.check_config._ANSWER_S", 0.01)
    monkeypatch.setattr(os.path, "lexists", lambda path: go_on.wait(20) if str(path) == "/nfs/kv" else real(path))
    tier = {"type": "fs", "path": "/nfs/kv", "max_bytes": "1GiB"}
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}))
    try:
        code, _, err = run(capsys, file)
    finally:
        go_on.set()
    assert (code, "'fs' tier, /nfs/kv, does not answer within 0.01 s; check its disk" in err) == (1, True), err


def test_characters_that_change_a_terminal_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = {"type": "disk", "path": f"{tmp_path}/a\nb\x1b[31m", "max_bytes": "32MiB"}
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}))
    code, out, _ = run(capsys, file)
    assert code == 0
    assert "\x1b" not in out
    assert f"{tmp_path}/a\\nb\\x1b[31m, at most" in out


@pytest.mark.parametrize(("config", "messages"), golden())
def test_all_mistakes_of_a_file_are_named_at_once(config: Any, messages: list[str]) -> None:
    assert messages
    assert problems_of(config) == messages
    for message in messages:
        assert "`" not in message and "$." not in message and "Object missing" not in message
        assert "hunter2" not in message


def test_everything_that_is_wrong_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes in the file, missing extras and limits of this machine are reported together, for each tier."""
    for package in ("obstore", "mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("kvoffload.tiering.options.require_ciphers", no_ciphers)
    (tmp_path / "file").write_text("")
    tiers = [
        {"type": "disk", "path": str(tmp_path / "file"), "max_bytes": "1GiB"},
        {"type": "object", "url": "s3://b/p", "encryption_key": "k" * 32, "requests": 0},
        {"type": "mooncake", "master": "h:1", "metadata": "http://h:2/metadata"},
        REDIS | {"ttl": "soon", "window_timeout_s": -1, "password": {"path": "x"}},
    ]
    file = tmp_path / "c.json"
    config = {"cpu_bytes_to_use": "900TiB", "record_trace": "${NOWHERE}/t", "max_wait_s": -1, "secondary_tiers": tiers}
    file.write_text(json.dumps(config))
    code, out, err = run(capsys, file)
    assert (code, out) == (1, "")
    for words in (
        "${NOWHERE}",
        "max_wait_s must be",
        "host memory",
        "is a file",
        "extra 'object'",
        "extra 'encryption'",
        "requests of the 'object' tier",
        "extra 'mooncake'",
        "ttl of the 'redis' tier",
        "window_timeout_s of the 'redis' tier",
        "password of the 'redis' tier",
    ):
        assert sum(words in line for line in err.splitlines()) == 1, (words, err)


def no_ciphers() -> None:
    raise MissingExtraError("Keys need kvoffload's extra 'encryption'.")


def test_a_good_file_is_shown_as_a_server_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096}
    model.write_text(json.dumps(sizes | {"torch_dtype": "bfloat16"}))
    file = tmp_path / "offload.yaml"
    file.write_text(
        f"cpu_bytes_to_use: 64Mi\nsecondary_tiers:\n- {{type: disk, path: {tmp_path}/kv, max_bytes: 128Mi,"
        " cascade: write_back}\n"
    )
    code, out, err = run(capsys, file, "--model", model)
    assert (code, err) == (0, "")
    assert "128 KiB" in out and "16 tokens, 2 MiB" in out and "room for 512 tokens (32 blocks)" in out
    assert f"'disk': {tmp_path}/kv, at most 128 MiB, written on_evict" in " ".join(out.split())
    assert "vllm serve MODEL --shutdown-timeout 60" in out, "a tier is written at the end"
    assert not (tmp_path / "kv").exists()


def test_the_line_that_starts_a_server_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "an offload.json"
    file.write_text('{"cpu_bytes_to_use": "1MiB"}')
    code, out, _ = run(capsys, file)
    assert code == 0
    variable, *command = shlex.split(out.splitlines()[0])
    assert variable == f"{ENVIRONMENT}={file}"
    assert command == ["vllm", "serve", "MODEL"]


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [REDIS | {"password": "hunter2"}]}))
    code, out, err = run(capsys, file, "--json")
    assert (code, err) == (0, "") and "hunter2" not in out
    told = json.loads(out)
    assert told["problems"] == [] and len(told["tiers"]) == 1 and str(file) in told["command"]
    file.write_text('{"cpu_bytes": "1MiB"}')
    code, out, err = run(capsys, file, "--json")
    assert (code, err) == (1, "")
    assert json.loads(out) == {"problems": problems_of({"cpu_bytes": "1MiB"})}


def test_credentials_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    tier = {"type": "redis", "url": "redis://me:hunter2@localhost/0"}
    file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}))
    code, out, err = run(capsys, file)
    assert code == 0
    assert "localhost" in out and "hunter2" not in out + err


@pytest.mark.parametrize("query", ["", "?db=1"])
def test_a_socket_is_no_credential(tmp_path: Path, capsys: pytest.CaptureFixture[str], query: str) -> None:
    file, url = tmp_path / "c.json", "unix:///run/redis.sock"
    tier = {"type": "redis", "url": url + query}
    file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}))
    code, out, err = run(capsys, file)
    assert (code, err) == (0, "")
    assert url in out


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("prefix-caching-hash-algo: xxhash", "prefix-caching-hash-algo to one of sha256"),
        ("prefix_caching_hash_algo: xxhash_cbor", "prefix-caching-hash-algo to one of sha256"),
        ("prefix-caching-hash-algo: sha256_cbor", None),
        ("enable-return-routed-experts: true", "--enable-return-routed-experts"),
        ("enable-return-routed-experts: false", None),
        ("max-model-len: 4096", None),
    ],
)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_arguments_of_vllm_in_the_file_are_refused_as_by_a_server(
    lines: str, words: str | None, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"""model: small
{lines}
kv-transfer-config:
  kv_connector: KVOffloadConnector
  kv_role: kv_both
  kv_load_failure_policy: {policy}
  kv_connector_extra_config:
    cpu_bytes_to_use: 1MiB
    secondary_tiers: [{{type: disk, path: {tmp_path}/kv, max_bytes: 128Mi}}]
""")
    code, out, err = run(capsys, file)
    refused = [words] if words else []
    refused += ["kv_load_failure_policy"] if policy == "fail" else []
    assert code == bool(refused)
    assert len(err.splitlines()) == len(refused)
    assert all(each in err for each in refused)
    if not refused:
        (told,) = [line for line in out.splitlines() if line.startswith("Not checked")]
        assert "model" in told and "kv" not in told


def test_what_the_plug_in_fills_in_need_not_be_in_a_file_that_the_variable_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "1MiB"}}))
    code, out, err = run(capsys, file)
    assert (code, err) == (0, "")
    assert "Not checked" not in out


def test_what_this_machine_cannot_give_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    file = tmp_path / "c.json"
    tiers = [
        {"type": "disk", "path": str(tmp_path / "file" / "kv")},
        {"type": "disk", "path": str(tmp_path / "kv"), "max_bytes": "900TiB"},
    ]
    file.write_text(json.dumps({"cpu_bytes_to_use": "900TiB", "secondary_tiers": tiers}))
    code, out, err = run(capsys, file)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert len(lines) == 3
    assert "host memory" in lines[0] and "file is a file" in lines[1] and "lower it" in lines[2]


def test_a_tier_without_a_bound_is_smaller_than_no_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    tier = {"type": "fs", "path": str(tmp_path / "kv"), "max_bytes": "unlimited"}
    file.write_text(json.dumps({"cpu_bytes_to_use": "64Mi", "secondary_tiers": [tier]}))
    code, _, err = run(capsys, file)
    assert (code, err) == (0, "")


def test_a_path_that_this_user_may_not_see_is_a_problem() -> None:
    """The path is in the home of root, and the command runs as the user nobody in its own process."""
    if Path("/root").stat().st_mode & 0o001:
        pytest.skip("everybody may look into the home of root here")
    options = DiskOptions(type="disk", path="/root/kvoffload-unseen/tier", max_bytes="1GiB")
    if not (child := os.fork()):
        code = 1
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            _probe_directory(options, "/root/kvoffload-unseen/tier")
        except ConfigError as exc:
            code = 0 if "cannot be used, because this user may not write to /root;" in str(exc) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_unit_that_was_forgotten_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"cpu_bytes_to_use": 64}')
    code, out, err = run(capsys, file)
    assert (code, out) == (1, "")
    assert "cpu_bytes_to_use is 64 B" in err and "without a unit is in bytes" in err


def test_a_small_mount_for_shared_memory_matters_to_several_processes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(wanted: int, mount: Path) -> None:
        raise CapacityError(f"{mount} is too small.")

    monkeypatch.setattr("kvoffload.cli.check_config.check_shared_memory", check)
    file = tmp_path / "c.json"
    file.write_text('{"cpu_bytes_to_use": "1MiB"}')
    code, out, err = run(capsys, file)
    assert (code, err) == (0, "")
    assert "With several GPUs" in out and "is too small" in out


def test_servers_are_asked_only_where_that_was_wished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening, and no other process can listen here
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{held.getsockname()[1]}/0"}
        file = tmp_path / "c.json"
        file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}))
        assert run(capsys, file)[0] == 0
        code, _, err = run(capsys, file, "--connect")
    assert code == 1
    assert "The 'redis' tier does not work here" in err
    server = RedisServer(tmp_path)
    try:
        file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{**tier, "url": server.url}]}))
        assert run(capsys, file, "--connect")[0] == 0
    finally:
        server.stop()


def test_a_disk_that_was_not_mounted_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.tiering.stores.root._SYSTEM", str(tmp_path))
    monkeypatch.setattr("kvoffload.tiering.stores.root._MOUNTS", (str(tmp_path / "mnt"),))
    (tmp_path / "mnt").mkdir()
    file, path = tmp_path / "c.json", tmp_path / "mnt" / "nvme"
    tier = {"type": "disk", "path": str(path), "max_bytes": "32MiB"}
    file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}))
    code, out, err = run(capsys, file)
    assert (code, err) == (0, "")
    assert f"Warning: path of the 'disk' tier, {path}, does not exist and would be on the system's disk." in out
    path.mkdir()
    assert "Warning" not in run(capsys, file)[1]


def test_a_redis_without_a_bound_on_its_memory_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (options, is_warned) in enumerate((({}, True), ({"maxmemory": "100mb"}, False))):
        (tmp_path / str(number)).mkdir()
        server = RedisServer(tmp_path / str(number), **options)
        try:
            file = tmp_path / "c.json"
            tier = {"type": "redis", "url": server.url, "connect_timeout_s": 30}
            file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}))
            code, out, err = run(capsys, file, "--connect")
            assert (code, err, "has no maxmemory" in out) == (0, "", is_warned)
            told = json.loads(run(capsys, file, "--connect", "--json")[1])
            assert len(told["warnings"]) == is_warned
            assert "maxmemory" not in run(capsys, file)[1]
        finally:
            server.stop()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"cpu_bytes_to_use": 1,\n "block_size": }', "c.json is not valid JSON: line 2: "),
        ("c.yaml", "cpu_bytes_to_use: 1\nblock_size: [1\n", "c.yaml is not valid YAML: line 3: "),
        ("c.yaml", "cpu_bytes_to_use: 1\n  block_size: 2\n", "check the indentation"),
        ("c.yaml", "", "c.yaml is empty"),
        ("c.json", "[]", "must contain a mapping of keys to values"),
        ("c.json", None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = run(capsys, tmp_path / name)
    assert code == 2
    assert message in err


def test_a_folder_that_does_not_exist_is_no_name_on_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("cpu_bytes_to_use: 64MiB\n")
    code, _, err = run(capsys, tmp_path / "c.yaml", "--model", tmp_path / "absent")
    assert code == 2
    assert "does not exist" in err


@pytest.mark.parametrize("wrap", ["own", "transfer", "serve", "text"])
def test_the_files_of_vllm_are_read_too(tmp_path: Path, wrap: str) -> None:
    own = {"cpu_bytes_to_use": "8GiB"}
    transfer = {"kv_connector": "KVOffloadConnector", "kv_connector_extra_config": own}
    shapes = {"own": own, "transfer": transfer, "serve": {"model": "m", "kv-transfer-config": transfer}}
    shapes["text"] = {"kv-transfer-config": json.dumps(transfer)}  # type: ignore[dict-item]
    file = tmp_path / "c.yml"
    file.write_text(json.dumps(shapes[wrap]))  # JSON is YAML
    assert load_config_file(file) == own


def test_a_file_is_below_what_the_command_line_says(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"cpu_bytes_to_use": "8GiB", "block_size": 64}')
    found = with_config_file({"config_file": str(file), "block_size": 32}, {ENVIRONMENT: "/nowhere"})
    assert found == {"cpu_bytes_to_use": "8GiB", "block_size": 32}
    assert with_config_file({}, {ENVIRONMENT: str(file)})["block_size"] == 64
    assert with_config_file({"block_size": 1}, {}) == {"block_size": 1}
    with pytest.raises(ConfigError, match="must be the path of a file, not a int"):
        with_config_file({"config_file": 5}, {})


def test_a_pool_in_memory_must_fit_beside_the_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 100 << 20)
    with memory_directory() as pool:
        file = tmp_path / "offload.json"
        tier = {"type": "disk", "path": str(pool / "kv")}
        for max_bytes, message in (
            (None, "is in memory (tmpfs); set max_bytes"),
            ("60MiB", "in addition to 64 MiB of host memory; lower max_bytes"),
            ("30MiB", ""),
        ):
            tiers = [tier if max_bytes is None else tier | {"max_bytes": max_bytes}]
            file.write_text(json.dumps({"cpu_bytes_to_use": "64MiB", "secondary_tiers": tiers}))
            code, _, err = run(capsys, file)
            assert (code, message in err) == (int(bool(message)), True), err
        assert not list(pool.iterdir()), "nothing is made"


@pytest.mark.parametrize(
    "tier",
    [
        REDIS | {"password": 12345678},
        REDIS | {"seal_key": 1234567812345678},
        REDIS | {"url": 12345678},
        REDIS | {"username": 12345678},
        REDIS | {"sentinel_password": [12345678]},
        {"type": "object", "url": "s3://b/p", "config": {"secret_access_key": 12345678}},
    ],
)
def test_a_number_that_is_a_secret_is_not_shown(tier: dict[str, Any]) -> None:
    (problem,) = problems_of({"cpu_bytes_to_use": "8GiB", "secondary_tiers": [tier]})
    assert "12345678" not in problem


@pytest.mark.parametrize("value", [{"file": 1}, {"file": None}])
def test_what_is_wrong_with_a_mapping_is_not_that_it_is_one(value: Any) -> None:
    for problem in (
        *problems_of({"cpu_bytes_to_use": "8GiB", "weights_version": value}),
        *problems_of({"cpu_bytes_to_use": "8GiB", "secondary_tiers": [REDIS | {"url": value}]}),
    ):
        assert not problem.endswith("a mapping, not a mapping.") and "a mapping" in problem


DIGITS = "9" * 400


@pytest.mark.parametrize(
    "changed",
    [
        {"cpu_bytes_to_use": DIGITS},
        {"cpu_bytes_to_use": int(DIGITS)},
        {"cpu_bytes_to_use": DIGITS + ".5GiB"},
        {"cpu_bytes_to_use": "9" * 5000},
        {"block_size": int(DIGITS)},
        {"max_wait_s": int(DIGITS)},
        {"max_wait_s": DIGITS},
        {"record_trace": "/var/tmp/a\0b"},
        {"spec_module_path": ""},
        {"spec_module_path": ".relative"},
        {"secondary_tiers": [{"type": "disk", "path": "/var/tmp/a\0b"}]},
        {"secondary_tiers": [{"type": "disk", "path": "/var/tmp/\ud800"}]},
        {"secondary_tiers": [{"type": "disk", "path": "/kv", "max_bytes": int(DIGITS)}]},
        {"secondary_tiers": [REDIS | {"url": "redis://h\0"}]},
        {"secondary_tiers": [REDIS | {"ttl": int(DIGITS)}]},
        {"secondary_tiers": [{"type": "disk", "path": "/kv", "threads": 1_000_000}]},
        {"secondary_tiers": [{"type": "object", "url": "s3://b/p", "requests": 1_000_000}]},
        {"secondary_tiers": [{"type": "disk", "path": "/kv", "name": "CPU"}]},
        {"secondary_tiers": [{"type": "disk", "path": "/kv", "name": "cpu"}]},
        {"secondary_tiers": [{"type": "disk", "path": "/kv"}, {"type": "fs", "path": "/kv/fs", "max_bytes": "1GiB"}]},
        {
            "secondary_tiers": [
                {"type": "fs", "path": "/kv/a/../b/c", "max_bytes": "1GiB"},
                {"type": "disk", "path": "/kv/b"},
            ]
        },
        {"secondary_tiers": [REDIS, REDIS | {"name": "again", "threads": 3}]},
    ],
)
def test_what_no_machine_can_do_is_one_sentence(changed: dict[str, Any]) -> None:
    (problem,) = problems_of({"cpu_bytes_to_use": "8GiB"} | changed)
    assert len(problem) < 300 and "\0" not in problem


def test_tiers_beside_one_another_are_taken() -> None:
    tiers = [
        {"type": "disk", "path": "/kv/a"},
        {"type": "fs", "path": "/kv/ab", "max_bytes": "1GiB"},
        REDIS,
        REDIS | {"prefix": "other"},
        {"type": "memory"},
        {"type": "memory"},
    ]
    assert problems_of({"cpu_bytes_to_use": "8GiB", "secondary_tiers": tiers}) == []


def secret_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    file = folder / "secret"
    if kind == "unset":
        monkeypatch.delenv("KVOFFLOAD_TEST_SECRET", raising=False)
        return {"env": "KVOFFLOAD_TEST_SECRET"}
    if kind == "directory":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes({"empty": b"\n", "binary": b"\xff" * 32, "short": b"short", "good": b"g" * 32}[kind])
    return {"file": str(file)}


@pytest.mark.parametrize("kind", ["missing", "empty", "directory", "binary", "short", "unset", "good"])
@pytest.mark.parametrize("tier", [REDIS, {"type": "object", "url": "s3://b/p"}])
def test_a_secret_that_this_machine_cannot_read_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tier: dict[str, Any], kind: str
) -> None:
    secret = secret_of(kind, tmp_path, monkeypatch)
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier | {"seal_key": secret}]}))
    code, _, err = run(capsys, file)
    assert (code, "seal_key" in err) == ((0, False) if kind == "good" else (1, True))


def test_an_empty_password_is_a_problem_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("\n")
    file = tmp_path / "c.json"
    tier = REDIS | {"password": {"file": str(tmp_path / "secret")}}
    file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}))
    code, _, err = run(capsys, file)
    assert (code, "password" in err) == (1, True)


def test_what_a_server_would_refuse_here_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    file = tmp_path / "c.json"
    for changed, word in (
        ({"secondary_tiers": [{"type": "disk", "path": str(tmp_path / "nowhere")}]}, "nowhere"),
        ({"secondary_tiers": [{"type": "disk", "path": str(tmp_path / "nowhere" / "kv")}]}, "nowhere"),
        ({"secondary_tiers": [{"type": "disk", "path": str(tmp_path / "kv"), "max_bytes": 1}]}, "max_bytes"),
        ({"secondary_tiers": [{"type": "memory", "max_bytes": 1}]}, "max_bytes"),
        ({"record_trace": str(tmp_path)}, "record_trace"),
    ):
        file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB"} | changed))
        code, _, err = run(capsys, file)
        assert (code, word in err) == (1, True), changed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.json", "[" * 20_000 + "]" * 20_000),
        ("deep.yaml", "[" * 500 + "]" * 500),
        ("bomb.yaml", "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}1]\n" for n in range(1, 30))),
        ("itself.yaml", "a: &a [*a]\n"),
        ("tag.yaml", "a: !!bool maybe\n"),
        ("twice.yaml", "cpu_bytes_to_use: 1GiB\ncpu_bytes_to_use: 2GiB\n"),
        ("twice.json", '{"cpu_bytes_to_use": "1GiB", "cpu_bytes_to_use": "2GiB"}'),
        ("within.yaml", "cpu_bytes_to_use: 1GiB\nsecondary_tiers: [{type: disk, path: /a, path: /b}]\n"),
    ],
)
def test_a_file_that_nobody_could_mean_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    code, out, err = run(capsys, tmp_path / name)
    assert (code, out) == (2, "")
    assert name in err and "Traceback" not in err
    assert ("path" in err and "line 2" in err) or name != "within.yaml"


def test_aliases_and_merges_of_yaml_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "base: &base {type: fs, max_bytes: 1GiB}\nsecondary_tiers:\n- {<<: *base, path: /a}\n"
        "- {<<: *base, path: /b, max_bytes: 2GiB}\n"
    )
    tiers = load_config_file(file)["secondary_tiers"]
    assert [tier["max_bytes"] for tier in tiers] == ["1GiB", "2GiB"]


if __name__ == "__main__":
    rows = [json.loads(line)[0] for line in GOLDEN.read_text().splitlines()]
    GOLDEN.write_text("".join(json.dumps([row, problems_of(row)]) + "\n" for row in rows))
