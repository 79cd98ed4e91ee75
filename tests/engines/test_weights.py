# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.engines import weights
from kvoffload.engines.weights import Files, fingerprint, in_background, local_directory

KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 600 * KIB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "vision").mkdir(parents=True)
    for name in ("model-1.safetensors", "model-2.safetensors", "vision/model.safetensors"):
        (directory / name).write_bytes(os.urandom(FILE_BYTES))
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "config.json").write_text("{}")
    return directory


def write_at(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def test_a_copy_has_the_same_fingerprint_wherever_and_however_old(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    assert fingerprint(copy) == fingerprint(model)


def test_files_that_are_links_count_as_what_they_point_to(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        shutil.copy(path, blobs / str(number))
        link = linked / path.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    assert fingerprint(linked) == fingerprint(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: write_at(model / "model-1.safetensors", 0, b"new!"),
        lambda model: write_at(model / "model-2.safetensors", FILE_BYTES - 4, b"new!"),
        lambda model: write_at(model / "vision" / "model.safetensors", FILE_BYTES // 3, bytes(64 * KIB)),
        lambda model: (model / "model-1.safetensors").rename(model / "model-3.safetensors"),
        lambda model: os.truncate(model / "model-2.safetensors", FILE_BYTES + 1),
        lambda model: (model / "model-2.safetensors").unlink(),
        lambda model: (model / "extra.bin").touch(),
        lambda model: (model / "model.safetensors.index.json").write_text("[]"),
        lambda model: (model / "hf_quant_config.json").write_text("{}"),
    ],
    ids=["first bytes", "last bytes", "subdirectory", "name", "size", "deleted", "added", "index", "quantization"],
)
def test_other_weights_have_another_fingerprint(model: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_other_files_do_not_count(model: Path) -> None:
    before = fingerprint(model)
    (model / "README.md").write_text("about")
    (model / "tokenizer.json").write_text("{}")
    (model / "checkpoint.bin").mkdir()  # no file
    assert fingerprint(model) == before


def write_tensors(file: Path, sizes: dict[str, int]) -> dict[str, int]:
    """Write a sparse safetensors file full of zeroes, and return the offsets of its tensors."""
    header, offset = dict[str, Any](), 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    start = file.stat().st_size
    os.truncate(file, start + offset)
    return {name: start + entry["data_offsets"][0] for name, entry in header.items()}


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head", "layers.7.experts.3.up_proj", "norm"])
def test_one_changed_row_is_other_weights_wherever_it_lies(tmp_path: Path, name: str) -> None:
    sizes = {"embed_tokens": 40 * MIB, "layers.7.experts.3.up_proj": 30 * MIB, "norm": KIB, "lm_head": 40 * MIB}
    starts = write_tensors(tmp_path / "model.safetensors", sizes)
    before = fingerprint(tmp_path)
    write_at(tmp_path / "model.safetensors", starts[name] + sizes[name] // 3, b"\1")
    assert fingerprint(tmp_path) != before


class Reads:
    """The files whose content is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        read = weights._read

        def counted(path: Path, stat: Any) -> str:
            self.paths.append(path)
            return read(path, stat)

        monkeypatch.setattr(weights, "_read", counted)


def test_of_the_hub_s_blobs_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are hashes of their content."""
    reads = Reads(monkeypatch)
    content = os.urandom(MIB)
    snapshot = Hub(tmp_path).download("1", content)
    other = Hub(tmp_path / "other").download("2", os.urandom(MIB))
    name = fingerprint(snapshot)
    assert fingerprint(other) != name
    assert reads.paths == []
    copy = tmp_path / "copy"
    shutil.copytree(snapshot, copy)
    assert fingerprint(copy) == name, "it has the same content"
    assert reads.paths == [copy / "model.safetensors"]


@pytest.mark.parametrize("place", ["blobs", "elsewhere"])
def test_outside_the_hub_s_cache_a_name_says_nothing(tmp_path: Path, place: str) -> None:
    blob = tmp_path / place / ("a" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(blob)
    before = fingerprint(tmp_path / "model")
    blob.write_bytes(b"trained")
    assert fingerprint(tmp_path / "model") != before


def test_a_file_that_changes_while_it_is_read_has_no_name(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": MIB})
    files = Files.of(tmp_path)
    write_at(tmp_path / "model.safetensors", 100, b"new!")
    with pytest.raises(OSError, match="has changed"):
        files.name()


def test_a_start_waits_for_a_quick_name_and_not_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known = in_background(lambda: "quick")
    assert known() == "quick"
    monkeypatch.setattr(weights, "STARTUP_S", 0.0)
    gate = threading.Event()
    known = in_background(lambda: "slow" if gate.wait(60) else "never")
    assert known() is None
    gate.set()
    while known() is None:
        time.sleep(0.001)
    assert known() == "slow"


def test_a_name_that_cannot_be_had_stays_unknown(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise OSError("the disk is gone")

    assert in_background(fail)() is None
    assert "the disk is gone" in caplog.text


def test_no_weights_and_weights_that_cannot_be_read_are_errors(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "absent")
    (model / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        fingerprint(model)


def test_a_name_of_the_hub_is_found_in_its_cache(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--tiny"
    for revision, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_text(revision)
    cache = str(tmp_path)
    main = local_directory("org/tiny", cache_dir=cache)
    assert main == repo / "snapshots" / ("1" * 40)
    assert local_directory("org/tiny", "v2", cache) == repo / "snapshots" / ("2" * 40)
    assert fingerprint(main) != fingerprint(local_directory("org/tiny", "v2", cache))


@pytest.mark.parametrize("model", ["org/other", "/no/such/directory", "s3://bucket/model", ""])
def test_weights_that_are_not_on_this_host_are_an_error(tmp_path: Path, model: str) -> None:
    with pytest.raises(FileNotFoundError):
        local_directory(model, cache_dir=str(tmp_path))


@pytest.mark.parametrize("variable", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_the_hub_s_cache_says_nothing_about_files_from_elsewhere(
    variable: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine loads this name from ModelScope, whose files may differ."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("1" * 40)
    for file in (snapshot / "model.safetensors", snapshot.parents[1] / "refs" / "main"):
        file.parent.mkdir(parents=True)
        file.write_text("1" * 40)
    assert local_directory("org/tiny", cache_dir=str(tmp_path)) == snapshot
    monkeypatch.setenv(variable, "True")
    with pytest.raises(FileNotFoundError, match=variable):
        local_directory("org/tiny", cache_dir=str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=variable):
        Files.of_adapter("org/tiny")
    assert local_directory(str(model)) == model


def test_a_directory_is_itself(model: Path) -> None:
    assert local_directory(str(model)) == model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: write_at(model / "model-1.safetensors", 0, b"new!"),
        lambda model: write_at(model / "vision" / "model.safetensors", 0, b"new!"),
        lambda model: os.replace(model / "model-1.safetensors", model / "model-2.safetensors"),
        lambda model: (model / "model-2.safetensors").unlink(),
        lambda model: (model / "vision" / "more.bin").touch(),
        lambda model: (model / "model.safetensors.index.json").write_text("[]"),
        lambda model: replace_directory(model),
        lambda model: set_back(model / "model-1.safetensors"),
    ],
    ids=["written", "subdirectory", "replaced", "deleted", "added", "index", "directory", "set back"],
)
def test_a_file_that_changes_while_an_engine_loads_is_named(model: Path, change: Callable[[Path], object]) -> None:
    shutil.copytree(model, model.parent / "next")
    before = Files.of(model)
    (model / "README.md").write_text("about")
    assert Files.of(model).why_not(before) is None
    change(model)
    changed = Files.of(model).why_not(before)
    assert changed is not None and changed.startswith(str(model))
    assert Files.of(model).why_not(None) == str(model), "nobody downloads files to such a directory"


def replace_directory(model: Path) -> None:
    """Replace the directory by one with the same time."""
    model.rename(model.parent / "old")
    (model.parent / "next").rename(model)


def set_back(file: Path) -> None:
    """Restore the file's old time after changing its content but not its size."""
    times = file.stat()
    write_at(file, 0, b"new!")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_link_that_points_elsewhere_is_a_change(model: Path) -> None:
    shutil.copytree(model, model.parent / "next")
    latest = model.parent / "latest"
    latest.symlink_to(model)
    before = Files.of(latest)
    latest.unlink()
    latest.symlink_to(model.parent / "next")
    assert Files.of(latest).why_not(before) is not None


class Hub:
    """A model in the cache of the Hub's client."""

    def __init__(self, cache: Path) -> None:
        self.repo = cache / "models--org--tiny"

    def download(self, commit: str, content: bytes, name: str = "model.safetensors", *, has_links: bool = True) -> Path:
        snapshot, blobs = self.repo / "snapshots" / (commit * 40), self.repo / "blobs"
        for directory in (snapshot, blobs):
            directory.mkdir(parents=True, exist_ok=True)
        blob = blobs / hashlib.sha256(content).hexdigest() if has_links else snapshot / name
        blob.write_bytes(content)
        if has_links:
            (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
        return snapshot


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_files_that_an_engine_downloads_are_those_that_it_loads(tmp_path: Path, has_links: bool) -> None:
    hub = Hub(tmp_path)
    snapshot = hub.download("1", b"weights", has_links=has_links)
    first = Files.of(snapshot)
    assert first.why_not(None) is None
    hub.download("1", b"more", "more.bin", has_links=has_links)
    assert Files.of(snapshot).why_not(first) is None
    assert first.why_not(Files.of(snapshot)) == str(snapshot / "more.bin")
    write_at(snapshot / "model.safetensors", 0, b"trained")
    assert Files.of(snapshot).why_not(first) == str(snapshot / "model.safetensors")


def test_a_name_of_the_hub_that_moves_while_an_engine_loads_is_a_change(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    first, second = Files.of(hub.download("1", b"weights")), Files.of(hub.download("2", b"trained"))
    assert second.why_not(first) == str(second.directory)
