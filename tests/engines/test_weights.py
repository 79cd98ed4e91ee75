# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sizes import by_size

from kvoffload.engines import weights
from kvoffload.engines.weights import changed_since, fingerprint, local_directory, process_start_s

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
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


@pytest.mark.parametrize("thousandth", by_size([123], [0, 123, 500, 998]))
@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_changed_matrix_is_met_wherever_it_lies(tmp_path: Path, name: str, thousandth: int) -> None:
    file, size = tmp_path / name, 256 * MIB  # of which an eighth is read
    if name == "model.bin":
        file.touch()
        os.truncate(file, size)
    else:
        write_tensors(file, {"all": size})
    before = fingerprint(tmp_path)
    write_at(file, thousandth * size // 1000 + KIB, b"\1" * (size // 1000))
    assert fingerprint(tmp_path) != before


def write_tensors(file: Path, sizes: dict[str, int], entries: dict[str, Any] | None = None) -> dict[str, int]:
    """A safetensors file full of zeroes, which takes no room; where its tensors begin. ``entries``: others for its
    header."""
    header, offset = dict[str, Any](), 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header | (entries or {})).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    start = file.stat().st_size
    os.truncate(file, start + offset)
    return {name: start + entry["data_offsets"][0] for name, entry in header.items()}


def test_a_small_tensor_is_met_wherever_it_lies(tmp_path: Path) -> None:
    scales = {f"layers.{n}.attention.{which}_scale": 4 for n in range(64) for which in "kv"}
    norms = {f"layers.{n}.norm": 16 * KIB for n in range(64)}
    matrices = {f"layers.{n}.attention.{which}_proj.weight": 23 * MIB for n in range(64) for which in "qkvo_"}
    sizes = scales | dict(item for pair in zip(norms.items(), matrices.items(), strict=False) for item in pair)
    starts = write_tensors(tmp_path / "model.safetensors", sizes | matrices)
    assert (tmp_path / "model.safetensors").stat().st_size > 7 * GIB
    seen = {fingerprint(tmp_path)}
    changed = ["layers.0.attention.k_scale", "layers.63.attention.v_scale", "layers.0.norm", "layers.40.norm"]
    for number, name in enumerate(changed):
        write_at(tmp_path / "model.safetensors", starts[name] + sizes[name] - 1, b"\1")
        seen.add(fingerprint(tmp_path))
        assert len(seen) == number + 2, name


def test_each_large_tensor_is_met(tmp_path: Path) -> None:
    large = {f"expert.{n}": 257 * KIB for n in range(50)}
    starts = write_tensors(tmp_path / "model.safetensors", {"embedding": 400 * GIB} | large | {"head": 400 * GIB})
    seen = {fingerprint(tmp_path)}
    for number, name in enumerate(["expert.0", "expert.33", "expert.49"]):
        write_at(tmp_path / "model.safetensors", starts[name], b"\1" * large[name])
        seen.add(fingerprint(tmp_path))
        assert len(seen) == number + 2, name


def test_tensors_that_change_names_are_others(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": MIB, "b": MIB})
    before = fingerprint(tmp_path)
    write_tensors(tmp_path / "model.safetensors", {"b": MIB, "a": MIB})
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    "entries",
    [
        {"more": {"data_offsets": [10 * MIB, 11 * MIB]}},
        {"more": {"data_offsets": [0, MIB]}},
        {"more": {"data_offsets": [10 * MIB, 9 * MIB]}},
        {"more": {"data_offsets": ["0", None]}},
        {"more": {"data_offsets": 1}},
        {"more": {}},
        {"more": None},
    ],
    ids=lambda entries: str(entries["more"]),
)
def test_of_a_header_that_cannot_be_true_the_file_s_ends_and_samples_are_read(
    tmp_path: Path, entries: dict[str, Any]
) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": 10 * MIB}, entries)
    seen = {fingerprint(tmp_path)}
    for number, place in enumerate((20, 100 * KIB, file.stat().st_size - 100 * KIB)):
        write_at(file, place, b"new!")
        seen.add(fingerprint(tmp_path))
        assert len(seen) == number + 2


@pytest.mark.parametrize("head", [b"", b"\0" * 8, b"\xff" * 8, b"\4\0\0\0\0\0\0\0nope", b"\2\0\0\0\0\0\0\0[]"])
def test_a_file_with_no_header_is_read_all_the_same(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(head + b"old")
    before = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(head + b"new")
    assert fingerprint(tmp_path) != before


def test_a_small_tensor_that_torch_saved_is_met(tmp_path: Path) -> None:
    import torch

    tensors = {"a": torch.zeros(8 * MIB), "scale": torch.zeros(1), "b": torch.zeros(8 * MIB)}
    torch.save(tensors, tmp_path / "model.bin")
    before = fingerprint(tmp_path)
    torch.save(tensors, tmp_path / "model.bin")
    assert fingerprint(tmp_path) == before
    tensors["scale"] += 1
    torch.save(tensors, tmp_path / "model.bin")
    assert fingerprint(tmp_path) != before


def bytes_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By one fingerprint."""
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, place: int) -> bytes:
        read.append(size)
        return pread(fd, size, place)

    with monkeypatch.context() as patch:
        patch.setattr(weights.os, "pread", counted)
        fingerprint(directory)
    return read


def test_what_is_read_does_not_grow_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        write_tensors(tmp_path / f"model-{number}.safetensors", {f"{n}": GIB for n in range(4)} | {"norm": 16 * KIB})
        (tmp_path / f"model-{number}.bin").touch()
        os.truncate(tmp_path / f"model-{number}.bin", 4 * GIB)
    read = bytes_read(tmp_path, monkeypatch)
    assert 60 * 16 <= len(read) <= 10_000
    assert sum(read) <= 100 * MIB


def test_what_is_read_of_small_tensors_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {f"{n}": 200 * KIB for n in range(1000)} | {f"scale.{n}": 4 for n in range(1000)}
    starts = write_tensors(tmp_path / "model.safetensors", sizes)
    assert sum(bytes_read(tmp_path, monkeypatch)) <= 100 * MIB
    seen = {fingerprint(tmp_path)}
    for number, name in enumerate(["0", "999", "scale.0", "scale.999"]):
        write_at(tmp_path / "model.safetensors", starts[name], b"\1" * sizes[name])
        seen.add(fingerprint(tmp_path))
        assert len(seen) == number + 2, name


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


def earlier() -> float:
    """All that was changed until now was changed before that; what will be, later."""
    time.sleep(0.02)  # longer than a tick of the clock of files
    return time.time() - 0.01


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
        lambda model: os.utime(model / "model-1.safetensors", (1, 1)),
    ],
    ids=["written", "subdirectory", "replaced", "deleted", "added", "index", "directory", "set back"],
)
def test_files_that_have_changed_are_named(model: Path, change: Callable[[Path], object]) -> None:
    shutil.copytree(model, model.parent / "next")
    before = earlier()
    assert changed_since(model, before) is None
    (model.parent / "other").mkdir()  # not in the directory
    assert changed_since(model, before) is None
    change(model)
    changed = changed_since(model, before)
    assert changed is not None and changed.startswith(str(model))


def replace_directory(model: Path) -> None:
    """By one that is as old as it was."""
    model.rename(model.parent / "old")
    (model.parent / "next").rename(model)


def test_a_link_that_points_elsewhere_is_a_change(model: Path) -> None:
    shutil.copytree(model, model.parent / "next")
    latest = model.parent / "links" / "latest"
    latest.parent.mkdir()
    (model.parent / "way").symlink_to(latest)
    latest.symlink_to(model)
    before = earlier()
    assert changed_since(model.parent / "way", before) is None
    latest.unlink()
    latest.symlink_to(model.parent / "next")
    assert changed_since(model.parent / "way", before) is not None
    assert changed_since(latest / "vision", before) is not None


class Hub:
    """A model in the cache of the Hub's client."""

    def __init__(self, cache: Path) -> None:
        self.repo = cache / "models--org--tiny"

    def download(self, commit: str, content: bytes, name: str = "model.safetensors") -> Path:
        snapshot, blob = self.repo / "snapshots" / (commit * 40), self.repo / "blobs" / content.hex()
        for directory in (snapshot, blob.parent, self.repo / "refs"):
            directory.mkdir(parents=True, exist_ok=True)
        (self.repo / "refs" / "main").write_text(commit * 40)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
        return snapshot


def test_what_is_downloaded_while_a_model_is_loaded_is_no_change(tmp_path: Path) -> None:
    hub, before = Hub(tmp_path), earlier()
    snapshot = hub.download("1", b"weights")
    hub.download("1", b"more", "tokenizer.bin")
    assert changed_since(snapshot, before) is None
    time.sleep(0.02)
    write_at(snapshot / "model.safetensors", 0, b"trained")
    assert changed_since(snapshot, before) == str(snapshot / "model.safetensors")


def test_a_name_of_the_hub_that_moves_is_a_change(tmp_path: Path) -> None:
    hub = Hub(tmp_path)
    first = hub.download("1", b"weights")
    before = earlier()
    second = hub.download("2", b"trained")
    assert changed_since(second, before) == str(hub.repo / "refs" / "main")
    assert changed_since(first, before) is None, "it has been asked for by its commit"
    assert changed_since(second, earlier()) is None


def test_a_file_in_a_snapshot_that_no_client_has_put_there_may_be_a_change(tmp_path: Path) -> None:
    hub, before = Hub(tmp_path), earlier()
    snapshot = hub.download("1", b"weights")
    (snapshot / "own.safetensors").write_bytes(b"own")
    assert changed_since(snapshot, before) == str(snapshot / "own.safetensors")


def start_of_a_process(*before: str) -> tuple[float, float, float]:
    """Before, by its own account, after."""
    code = "\n".join((*before, "from kvoffload.engines.weights import process_start_s", "print(process_start_s())"))
    begin_s = time.time()
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return begin_s, float(answer), time.time()


def test_a_process_knows_when_it_started() -> None:
    begin_s, start_s, end_s = start_of_a_process("import time", "time.sleep(0.5)")
    assert begin_s <= start_s <= end_s - 0.4


def test_files_that_were_written_right_before_a_process_are_older(model: Path) -> None:
    for number in range(by_size(1, 5)):
        write_at(model / "model-1.safetensors", number, b"new!")
        _, start_s, _ = start_of_a_process()
        assert changed_since(model, start_s) is None


def test_a_clock_that_is_set_makes_no_process_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    start_s, now = process_start_s(), time.time
    monkeypatch.setattr(weights.time, "time", lambda: now() + 3600)
    assert process_start_s() == pytest.approx(start_s, abs=1)
    monkeypatch.setattr(weights.time, "time", lambda: now() - 3600)
    assert process_start_s() == pytest.approx(start_s - 3600, abs=1)


def test_where_the_system_does_not_say_nothing_is_trusted(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(weights.Path, "read_text", lambda path: "")
    assert changed_since(model, process_start_s()) is not None
