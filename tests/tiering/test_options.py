# SPDX-License-Identifier: Apache-2.0
"""Test a tier's options: mistakes raise clear errors, each default is defined once, and every tier has its own name."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.config import parse_struct
from kvoffload.errors import ConfigError
from kvoffload.tiering.options import STORES, build_tier, parse_tier, parse_tiers
from kvoffload.tiering.stores import root
from kvoffload.tiering.stores.fs.options import FileSystemOptions
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import StoreTier, TierLimits


def view(num_blocks: int = 4, block_bytes: int = 128) -> memoryview:
    return memoryview(bytearray(num_blocks * block_bytes)).cast("B", (num_blocks, block_bytes))


def test_all_kinds_are_built_from_mappings(tmp_path: Path) -> None:
    for options in (
        {"type": "fs", "path": str(tmp_path / "kv"), "max_bytes": "1MiB", "threads": 2, "mode": "group"},
        {"type": "disk", "path": str(tmp_path / "slabs"), "max_bytes": "1MiB", "mode": "group", "threads": 2},
        {"type": "memory", "max_bytes": "64KiB", "offload_policy": "request_level"},
    ):
        before = dict(options)
        tier = build_tier(options, view(), "ns")
        try:
            assert isinstance(tier, StoreTier)
            assert tier.tier_type == options["type"]
            assert options == before
        finally:
            tier.shutdown()


def test_a_tier_without_enough_threads_is_refused_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, options = threading.Thread.start, {"type": "disk", "path": str(tmp_path), "max_bytes": "1MiB", "threads": 4}

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "kvoffload-disk-5":
            raise RuntimeError("can't start new thread")
        start(thread)

    build_tier(options, view(), "ns").shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        with pytest.raises(ConfigError, match="'disk' needs 9 threads, but only 5 could be started; lower its threads"):
            build_tier(options, view(), "ns")
    assert [path for _, path in root._open_under([str(tmp_path)], "self")] == []
    for thread in threading.enumerate():
        if thread.name.startswith("kvoffload-disk-"):
            thread.join(120)
            assert not thread.is_alive(), "a thread of the tier that was refused waits for ever"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "needs a 'type'"),
        ({"type": "fss"}, "Did you mean 'fs'"),
        ({"type": "fs"}, "path"),
        ({"type": "fs", "path": ""}, "path"),
        ({"type": "fs", "path": "x"}, "path of the 'fs' tier must begin with / or ~, for example '/mnt/kv', not 'x'"),
        ({"type": "fs", "path": "/x"}, "max_bytes of the 'fs' tier is missing: .* '200GiB', or 'unlimited'"),
        ({"type": "fs", "path": "/x", "max_bytes": "none"}, "must be a size .* 'unlimited', not 'none'"),
        ({"type": "fs", "path": "/x", "max_byte": 1}, "Did you mean 'max_bytes'"),
        ({"type": "fs", "path": "/x", "max_bytes": "many"}, "must be a size"),
        ({"type": "fs", "path": "/x", "max_bytes": 300}, "too little"),
        ({"type": "fs", "path": "/x", "mode": "maybe"}, "mode"),
        ({"type": "fs", "path": "/x", "threads": 0}, "threads"),
        ({"type": "fs", "path": "/x", "timeout_s": 0}, "timeout_s of the 'fs' tier"),
        ({"type": "fs", "path": "/x", "drain_timeout_s": -1}, "drain_timeout_s of the 'fs' tier"),
        ({"type": "fs", "path": "/x", "drain_timeout_s": 1e10}, "drain_timeout_s of the 'fs' tier must be at most"),
        ({"type": "fs", "path": "/x", "drain_timeout_s": float("inf")}, "must be at most 9.22e.09 s, not inf"),
        ({"type": "fs", "path": "/x", "max_backlog_blocks": 0}, "max_backlog_blocks of the 'fs' tier"),
        ({"type": "fs", "path": "/x", "offload_policy": "all"}, "block_level, request_level"),
        ({"type": "fs", "path": "/x", "cascade": "later"}, "cascade"),
        ({"type": "fs", "path": "/x", "name": ""}, "name"),
        ({"type": "fs", "path": "/x", "read_bytes_per_s": 0}, "read_bytes_per_s of the 'fs' tier must be positive"),
        (
            {"type": "disk", "path": "/x", "read_bytes_per_s": "fast"},
            "read_bytes_per_s of the 'disk' tier must be a size",
        ),
        ({"type": "disk"}, "path"),
        ({"type": "disk", "path": ""}, "path"),
        ({"type": "disk", "path": "./x"}, "path of the 'disk' tier must begin with / or ~, .*, not './x'"),
        ({"type": "disk", "path": "/x", "max_bytes": 4300}, "too little"),
        ({"type": "disk", "path": "/x", "mode": "all"}, "mode"),
        ({"type": "memory", "max_bytes": 100}, "less than one block"),
    ],
)
def test_a_mistake_is_one_sentence_and_touches_nothing(
    options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        parse_tier(options, block_bytes=128)
    assert not list(tmp_path.iterdir())


def test_the_limits_of_a_tier_are_its_configuration_keys() -> None:
    options = parse_tier({"type": "memory", "threads": 2})
    assert isinstance(options, TierLimits)
    defaults = TierLimits(threads=2)
    assert all(getattr(options, name) == getattr(defaults, name) for name in TierLimits.__struct_fields__)


def test_limits_in_code_are_checked_like_those_of_a_configuration() -> None:
    with pytest.raises(ConfigError, match="threads of the 'mine' tier must be at least 1"):
        StoreTier(view(), "mine", MemoryStore(128), TierLimits(threads=0))


def test_tiers_have_names_of_their_own() -> None:
    tiers = [
        {"type": "memory"},
        {"type": "memory"},
        {"type": "fs", "path": "/x", "max_bytes": "1GiB"},
        {"type": "fs", "path": "/y", "max_bytes": "unlimited", "name": "z"},
    ]
    assert [options.label for options in parse_tiers(tiers)] == ["memory", "memory-2", "fs", "z"]
    assert [options.label for options in parse_tiers([{"type": "memory", "name": "memory"}, {"type": "memory"}])] == [
        "memory",
        "memory-2",
    ]
    with pytest.raises(ConfigError, match="2 secondary tiers are called 'a'"):
        parse_tiers([{"type": "memory", "name": "a"}, {"type": "fs", "path": "/x", "max_bytes": "1GiB", "name": "a"}])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "on_store"),
        ({"max_bytes": "1GiB"}, "on_evict"),
        ({"max_bytes": "2GiB"}, "on_store"),
        ({"max_bytes": "1GiB", "offload_policy": "request_level"}, "on_store"),
        ({"max_bytes": "1GiB", "cascade": "on_store"}, "on_store"),
        ({"cascade": "on_evict"}, "on_evict"),
    ],
)
@pytest.mark.parametrize("kind", [{"type": "fs", "path": "/x", "max_bytes": "unlimited"}, {"type": "memory"}])
def test_small_tiers_are_written_on_eviction(kind: dict[str, Any], options: dict[str, Any], expected: str) -> None:
    assert parse_tier(kind | options).cascade_above(1 << 30) == expected


@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_a_home_directory_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    options = parse_tier({"type": kind, "path": "~/kv", "max_bytes": "1MiB"})
    options.open_store(4096, "ns").close()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / "kv" / ".kvoffload").is_dir()
    with pytest.raises(ConfigError, match="have the directory"):
        parse_tiers([{"type": kind, "path": path, "max_bytes": "1MiB"} for path in ("~/kv", f"{tmp_path}/home/kv")])
    with pytest.raises(ConfigError, match="~nobody-of-that-name/kv"):
        parse_tier({"type": kind, "path": "~nobody-of-that-name/kv"})


def test_which_stores_outlive_their_process() -> None:
    assert STORES.get("fs").is_persistent
    assert not STORES.get("memory").is_persistent
    assert isinstance(parse_tier({"type": "fs", "path": "/x", "max_bytes": "unlimited"}), FileSystemOptions)


@pytest.mark.parametrize("other", ["kv", "kv/", "./kv", "sub/../kv", "link"])
def test_two_tiers_on_one_path_are_refused(other: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    (tmp_path / "sub").mkdir()

    def tier(kind: str, name: str) -> dict[str, Any]:
        return {"type": kind, "path": f"{tmp_path}/{name}", "max_bytes": "1GiB"}

    tiers = [tier("fs", "kv"), {"type": "memory"}]
    for kind in ("fs", "disk"):
        with pytest.raises(ConfigError, match=f"have the directory {tmp_path}/kv"):
            parse_tiers([*tiers, tier(kind, other)])
    assert not (tmp_path / "kv").exists()
    assert len(parse_tiers([*tiers, {"type": "memory"}, tier("fs", "kv2")])) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"type": "disk", "path": "/kv"}, "tier 'disk': /kv, four fifths of the disk, written on_store"),
        (
            {"type": "disk", "path": "/kv", "max_bytes": "1GiB", "name": "nvme"},
            "tier 'nvme' (type disk): /kv, at most 1 GiB, written on_evict",
        ),
        ({"type": "fs", "path": "/kv", "max_bytes": "unlimited"}, "tier 'fs': /kv, no bound, written on_store"),
        ({"type": "memory", "max_bytes": "8GiB"}, "tier 'memory': at most 8 GiB, written on_store"),
        (
            {"type": "redis", "url": "rediss://me:secret@host:6380/1?password=secret", "password": "secret"},
            "tier 'redis': rediss://host:6380/1, as much as its servers keep, for 7d, written on_store",
        ),
        (
            {"type": "redis", "url": {"env": "REDIS_URL"}, "ttl": 3600},
            "tier 'redis': the URL from env REDIS_URL, as much as its servers keep, for 3600 s, written on_store",
        ),
        (
            {"type": "object", "url": "s3://bucket/kv", "config": {"secret_access_key": "secret", "region": "eu"}},
            "tier 'object': s3://bucket/kv, no bound, written on_store",
        ),
        (
            {"type": "mooncake", "master": "host:50051", "metadata": "http://me:secret@host:8080/metadata"},
            "tier 'mooncake': host:50051, as much as its servers keep, written on_store",
        ),
    ],
    ids=["disk", "named", "fs", "memory", "redis", "redis elsewhere", "object", "mooncake"],
)
def test_a_tier_is_described_in_a_line_without_credentials(options: dict[str, Any], words: str) -> None:
    kind = STORES.get(options["type"])  # unchecked: a client need not be installed here
    assert parse_struct(kind, options, "the options").describe(primary_bytes=1 << 30) == words


def test_a_directory_that_hangs_keeps_no_check_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is NFS without its server. Opening the tier reports the problem."""
    go_on, real = threading.Event(), os.path.realpath
    monkeypatch.setattr(root, "_ANSWER_S", 0.01)
    monkeypatch.setattr(os.path, "realpath", lambda path: go_on.wait(20) if path == "/nfs/kv" else real(path))
    shared = {"type": "fs", "path": "/nfs/kv", "max_bytes": "1GiB"}
    try:
        assert len(parse_tiers([{"type": "disk", "path": "/nvme/kv"}, shared])) == 2
        with pytest.raises(ConfigError, match="/nfs/kv is in /nfs"):
            parse_tiers([{"type": "disk", "path": "/nfs"}, shared])
    finally:
        go_on.set()


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory that a bind mount also shows at a second place."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "kv").mkdir(parents=True)
    here.mkdir()
    if subprocess.run(["mount", "--bind", there, here], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    yield tmp_path
    subprocess.run(["umount", "-l", here], check=True)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("there/kv", "here/kv", "have the directory"),
        ("there/later", "here/later", "have the directory"),
        ("here/kv/inner", "there/kv", "inside each other"),
        ("there", "here/later/inner", "inside each other"),
        ("there/kv", "here/other", None),
        ("there/later", "here/late", None),
    ],
)
def test_two_tiers_that_a_bind_mount_makes_one_directory_are_rejected(
    first: str, second: str, words: str | None, bound: Path
) -> None:
    tiers = [{"type": "disk", "path": str(bound / path), "max_bytes": "1GiB"} for path in (first, second)]
    if words is None:
        parse_tiers(tiers)
    else:
        with pytest.raises(ConfigError, match=words):
            parse_tiers(tiers)


@pytest.mark.parametrize("kind", ["disk", "fs"])
@pytest.mark.parametrize("path", ["place", "place/inner"])
def test_a_file_or_a_link_that_leads_nowhere_is_named(kind: str, path: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    options = parse_tier({"type": kind, "path": str(tmp_path / path), "max_bytes": "1GiB"})
    place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"{place} is a link to {tmp_path}/nowhere, which does not exist"):
        options.open_store(4096, "ns")
    place.unlink()
    place.touch()
    with pytest.raises(ConfigError, match=f"{place} is a file"):
        options.open_store(4096, "ns")
    assert [each.name for each in tmp_path.iterdir()] == ["place"]
