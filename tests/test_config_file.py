# SPDX-License-Identifier: Apache-2.0
"""Test that values in files and variables are used literally, or rejected with an error that names the place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.config_file import ENVIRONMENT, file_in_environment, load_config_file, with_config_file
from kvoffload.errors import ConfigError

GOOD = {"cpu_bytes_to_use": "64MiB", "block_size": 32}
YAML, JSON = "cpu_bytes_to_use: 64MiB\nblock_size: 32\n", '{"cpu_bytes_to_use": "64MiB",\n"block_size": 32}\n'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le with a mark", "utf-16-be with a mark"])
@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.json", JSON), ("c", JSON)])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_files_of_any_editor(encoding: str, name: str, text: str, line_end: str, tmp_path: Path) -> None:
    file, (codec, _, mark) = tmp_path / name, encoding.partition(" with ")
    file.write_bytes((("\ufeff" if mark else "") + text.replace("\n", line_end)).encode(codec))
    assert load_config_file(file) == GOOD


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.yaml", b"a: 1\nname: caf\xe9\n", ["line 2 ", "0xe9", "UTF-8"]),
        ("c.json", b'{"a": 1,\n\n"name": "caf\xe9"}', ["line 3 ", "0xe9", "UTF-8"]),
        ("c.yaml", b"a: 1\nb: \x07\n", ["line 2 ", "U+0007"]),
        ("c.yaml", b"a:\n\tb: 1\n", ["line 2 ", "tab"]),
        ("c.yaml", b"a:\t64MiB\n\tb: 16\n", ["line 2 ", "tab"]),
        ("c.yaml", b"a: 1\n  \tb: 16\n", ["line 2 ", "tab"]),
        ("c.yaml", b"a: 1\n---\nb: 2\n", ["line 2 ", "second document"]),
        ("c.yaml", b"a: 1\nb: {c: ${D}/kv, e: 1}\n", ["line 2: ", "quotes"]),
        ("c.yaml", b"a: 1\nb: [1\nc: 2\n", ["line 3: expected ',' or ']'"]),
        ("c.yaml", b"a: *b\n", ["line 1: ", "alias"]),
        ("c.yaml", b"a: 1\na: 2\n", ["'a' twice", "line 2"]),
        ("c.yaml", b"a: !!int b\n", [""]),
        ("c.json", b'{"a": 1,\n}', ["line 2: "]),
        ("c.json", b'{// words\n"a": 1}', ["line 1: "]),
        ("c.conf", YAML.encode(), ["line 1: ", "ends in .yaml"]),
        ("c.yaml", b"ttl: 12:00\n", ["12:00 in line 1", "quotes"]),
        ("c.yaml", b"a: 1\ntiers: [{ttl: 1:30:00}]\n", ["1:30:00 in line 2", "quotes"]),
        ("c.yaml", b"ttl: 1:30.5\n", ["1:30.5 in line 1"]),
        ("c.yaml", b"block_size: 016\n", ["016 in line 1"]),
        ("c.yaml", b"block_size: 0x10\n", ["0x10 in line 1"]),
        ("c.yaml", b"block_size: 0b10\n", ["0b10 in line 1"]),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line_and_its_reason(
    name: str, content: bytes, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config_file(file)
    text = str(caught.value)
    assert text.startswith(str(file)) and "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("written", "value"), [("0", 0), ("10", 10), ("-3", -3), ("1_000", 1000), ("0.5", 0.5)])
def test_plain_numbers_are_numbers(written: str, value: float, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"a: {written}\nb: '{written}'\nc: \"12:00\"\nd: redis://h:12\n")
    assert load_config_file(file) == {"a": value, "b": written, "c": "12:00", "d": "redis://h:12"}


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_a_blank_variable_is_none(blank: str) -> None:
    assert with_config_file({"block_size": 1}, {ENVIRONMENT: blank}) == {"block_size": 1}


def test_a_path_may_begin_with_a_tilde_and_have_blanks_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text(YAML)
    for path in ("~/c.yaml", " ~/c.yaml\n", f"{tmp_path}/c.yaml "):
        assert with_config_file({}, {ENVIRONMENT: path}) == GOOD
        assert with_config_file({"config_file": path}, {}) == GOOD


def test_a_path_may_contain_variables(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(YAML)
    environ = {"DIR": str(tmp_path)}
    for path in ("${DIR}/c.yaml", "$(DIR)/c.yaml"):
        assert with_config_file({}, environ | {ENVIRONMENT: path}) == GOOD
        assert with_config_file({"config_file": path}, environ) == GOOD
        with pytest.raises(ConfigError, match=r"config_file contains \$.DIR., but no such environment variable"):
            with_config_file({"config_file": path}, {})


@pytest.mark.parametrize(
    "path",
    ["/no/such/c.yaml", "~nobody-of-this-name/c.yaml", '"/tmp/c.yaml"', "'c.yaml'", "file:///tmp/c.yaml", "/tmp"],
)
def test_a_path_that_leads_nowhere_is_shown(path: str) -> None:
    for values, environ in (({}, {ENVIRONMENT: path}), ({"config_file": path}, {})):
        with pytest.raises(ConfigError) as caught:
            with_config_file(values, environ)
        assert path in str(caught.value) and "Errno" not in str(caught.value)


def test_variables_are_replaced_by_their_values(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "cpu_bytes_to_use: '${SIZE}'\n"
        "weights_version: $(POD)-${POD}\n"
        "secondary_tiers:\n- {type: disk, path: '/mnt/$(NODE)/kv', name: $NODE, price: 5$}\n"
    )
    environ = {ENVIRONMENT: str(file), "SIZE": "8GiB", "POD": "pod-1", "NODE": "node-2"}
    assert with_config_file({"record_trace": "/var/${POD}.jsonl"}, environ) == {
        "cpu_bytes_to_use": "8GiB",
        "weights_version": "pod-1-pod-1",
        "secondary_tiers": [{"type": "disk", "path": "/mnt/node-2/kv", "name": "$NODE", "price": "5$"}],
        "record_trace": "/var/pod-1.jsonl",
    }


def test_variables_that_are_not_set_are_all_named() -> None:
    values = {"a": "${ONE}", "b": [{"c": "/x/$(TWO)/y"}], "d": "$()"}
    with pytest.raises(ConfigError) as caught:
        with_config_file(values, {})
    first, second, third = caught.value.args
    assert "a contains ${ONE}" in first and "c contains $(TWO)" in second and "d contains $()" in third


SECRETS = ["hun${xqz}2", "${hunxqz}2", "hun$(xqz2)"]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "values",
    [
        lambda secret: {"secondary_tiers": [{"type": "redis", "password": secret}]},
        lambda secret: {"secondary_tiers": [{"type": "redis", "url": f"redis://me:{secret}@here:6379/0"}]},
        lambda secret: {"secondary_tiers": [{"type": "redis", "url": f"redis://{secret}:x@here"}]},
        lambda secret: {"secondary_tiers": [{"type": "object", "config": {"aws_secret_access_key": secret}}]},
        lambda secret: {"secondary_tiers": [{"type": "disk", "encryption_key": ["k" * 32, secret]}]},
    ],
)
def test_no_part_of_a_secret_is_shown(values: Callable[[str], dict[str, Any]], secret: str) -> None:
    """It contains characters that look like a variable."""
    with pytest.raises(ConfigError) as caught:
        with_config_file(values(secret), {})
    (problem,) = caught.value.args
    assert "hun" not in problem and "xqz" not in problem and "file" in problem


@pytest.mark.parametrize(
    "value", ["${NAME}", "redis://${NAME}:6379", "redis://me:${NAME}@here", "rediss://${NAME}:${NAME}@here/0"]
)
def test_a_variable_that_is_a_whole_secret_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="NAME"):
        with_config_file({"url": value}, {})


@pytest.mark.parametrize("path", ['"/etc/kv.yaml"', "'/etc/kv.yaml'", " 'kv.yaml'", "file:///etc/kv.yaml"])
def test_an_environment_file_that_keeps_quotes_is_named(path: str) -> None:
    """As ``docker --env-file`` does. An engine reads the variable by itself."""
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT} is .* without quotes"):
        file_in_environment({ENVIRONMENT: path})


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe cannot be read: it is not a regular file"):
        load_config_file(tmp_path / "pipe")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """Somebody has named a file of weights."""
    path = tmp_path / "model.yaml"
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        load_config_file(path)
