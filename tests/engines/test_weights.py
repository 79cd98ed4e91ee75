# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.engines import weights
from kvoffload.engines.weights import fingerprint, local_directory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "vision").mkdir(parents=True)
    for name in ("model-1.safetensors", "model-2.safetensors", "vision/model.safetensors"):
        (directory / name).write_bytes(os.urandom(3 * MIB))
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
        lambda model: write_at(model / "model-2.safetensors", 3 * MIB - 4, b"new!"),
        lambda model: write_at(model / "vision" / "model.safetensors", MIB, bytes(64 * KIB)),
        lambda model: (model / "model-1.safetensors").rename(model / "model-3.safetensors"),
        lambda model: os.truncate(model / "model-2.safetensors", 3 * MIB + 1),
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


@pytest.mark.parametrize("thousandth", [0, 123, 500, 998])
def test_a_changed_matrix_is_met_wherever_it_lies(tmp_path: Path, thousandth: int) -> None:
    file, size = tmp_path / "model.safetensors", 256 * MIB  # of which a sixteenth is read
    with file.open("wb") as new:
        new.truncate(size)
    before = fingerprint(tmp_path)
    write_at(file, thousandth * size // 1000, b"\1" * (size // 1000))
    assert fingerprint(tmp_path) != before


def test_what_is_read_does_not_grow_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as new:
            new.truncate(4 * GIB)
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, place: int) -> bytes:
        read.append(size)
        return pread(fd, size, place)

    monkeypatch.setattr(weights.os, "pread", counted)
    fingerprint(tmp_path)
    assert 60 * 16 <= len(read) <= 4096
    assert sum(read) <= 16 * MIB


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


def test_a_directory_is_itself(model: Path) -> None:
    assert local_directory(str(model)) == model
