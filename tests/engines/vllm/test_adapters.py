# SPDX-License-Identifier: Apache-2.0
"""Keys of requests with LoRA adapters, and the worker's check of what vLLM has loaded. Without vLLM."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.vllm.configs import stub, vllm_config
from tests.sizes import by_size

from kvoffload.connector import TransferJob
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.engines.vllm import adapters as adapters_module
from kvoffload.engines.vllm import loaded_adapters, tell_connectors
from kvoffload.engines.vllm.adapters import Adapters, Loaded, NamedRequest, adapters_of, note_on_adapters
from kvoffload.engines.vllm.arguments import config_of
from kvoffload.engines.vllm.loaded_adapters import LoadedAdapters, Read
from kvoffload.engines.vllm.seeded_hashes import SeededHashes

HASHES = [bytes([n]) * 32 for n in range(4)]


def lora(name: str, path: Any, number: int = 1, in_place: bool = False, **more: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=in_place, **more)


def request(name: str, adapter: Any, media: Any = ()) -> Any:
    return SimpleNamespace(request_id=name, lora_request=adapter, block_hashes=list(HASHES), mm_features=media)


def write(directory: Path, content: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    file = directory / "adapter_model.safetensors"
    file.unlink(missing_ok=True)
    file.write_text(content)
    return directory


def named(adapters: Adapters, adapter: Any) -> Any:
    """Return a request that arrived after the files were hashed."""
    adapters.of(request("early", adapter))
    deadline = time.monotonic() + 60
    while adapters._current[adapter.lora_int_id].seed is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return adapters.of(request("asked", adapter))


def test_keys_contain_the_content_of_an_adapter(tmp_path: Path) -> None:
    one, copy, other = (write(tmp_path / name, content) for name, content in (("1", "a"), ("2", "a"), ("3", "b")))
    keys = {path: list(named(Adapters("facts"), lora("a", path)).block_hashes) for path in (one, copy, other)}
    assert keys[one] == keys[copy]  # vLLM's own hashes contain the path
    assert set(keys[one]).isdisjoint(keys[other])
    assert set(keys[one]).isdisjoint(HASHES)
    for options in ({"facts": "others"}, {"facts": "facts", "more": {"is_3d_lora_weight": True}}):
        adapter = lora("a", one, **options.get("more", {}))  # type: ignore[arg-type]
        assert set(keys[one]).isdisjoint(named(Adapters(options["facts"]), adapter).block_hashes)  # type: ignore[arg-type]


def test_no_request_is_offloaded_before_the_files_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "in_background", lambda compute, wait_s, on_error: lambda: None)
    adapters = Adapters("facts")
    own = adapters.of(request("a", lora("a", "/a")))
    assert adapters.leaves_out(own)
    assert not adapters.leaves_out(adapters.of(request("b", None)))
    assert adapters.checks(["a"], []) is None


def test_hashes_of_a_request_without_an_adapter_are_vllms() -> None:
    plain = request("a", None)
    assert Adapters("facts").of(plain) is plain


def test_seeded_hashes_are_a_sequence() -> None:
    seeded = SeededHashes(HASHES, lambda index: b"" if index == 0 else b"a" if index < 3 else b"b")
    assert len(seeded) == 4
    assert seeded[0] == HASHES[0]
    assert list(seeded) == seeded[:] == [seeded[index] for index in range(4)]
    assert seeded[3::4] == [seeded[3]] == [seeded[-1]]
    assert len({*seeded, *HASHES}) == 7
    other = SeededHashes(HASHES, lambda index: b"b")
    assert [mine == theirs for mine, theirs in zip(seeded, other, strict=True)] == [False, False, False, True]
    with pytest.raises(IndexError):
        seeded[4]


def test_an_adapter_loaded_in_place_gets_misses_and_then_its_own_hits(tmp_path: Path) -> None:
    adapters, path = Adapters("facts"), write(tmp_path / "a", "old")
    old = named(adapters, lora("a", path))
    assert not adapters.leaves_out(old)
    write(path, "new")
    adapters.load(lora("a", path, in_place=True))
    assert adapters.leaves_out(old)
    new = named(adapters, lora("a", path))
    assert not adapters.leaves_out(new)
    assert set(new.block_hashes).isdisjoint(old.block_hashes)
    write(path, "old")
    adapters.load(lora("a", path, in_place=True))
    assert list(named(adapters, lora("a", path)).block_hashes) == list(old.block_hashes)


def test_blocks_that_vllm_has_cached_for_an_earlier_adapter_are_not_stored(tmp_path: Path) -> None:
    adapters, path = Adapters("facts"), write(tmp_path / "a", "old")
    adapters.admit(named(adapters, lora("a", path)), 0)
    write(path, "new")
    # Unloaded, and loaded again under another number.
    late, fresh = named(adapters, lora("a", path, 2)), adapters.of(request("fresh", lora("a", path, 2)))
    adapters.admit(fresh, 0)
    adapters.admit(late, 16)
    assert adapters.leaves_out(late)
    assert not adapters.leaves_out(fresh)
    assert adapters.waits_for_empty_device
    adapters.device_is_empty()
    again = adapters.of(request("again", lora("a", path, 2)))
    adapters.admit(again, 0)
    adapters.admit(again, 16)
    assert not adapters.leaves_out(again)


def test_the_same_files_under_another_number_share_blocks(tmp_path: Path) -> None:
    adapters, path = Adapters("facts"), write(tmp_path / "a", "same")
    first = named(adapters, lora("a", path))
    adapters.admit(first, 0)
    second = named(adapters, lora("a", path, 2))
    adapters.admit(second, 16)
    assert not adapters.leaves_out(second)
    assert list(first.block_hashes) == list(second.block_hashes)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_request_that_names_another_path_than_its_number_has_is_left_out(is_known: bool) -> None:
    adapters = Adapters(reads_files=False)
    before, other = lora("a", "/a1"), lora("b", "/b", 2)
    if is_known:
        assert not adapters.leaves_out(adapters.of(request("before", before)))
    adapters.load(lora("a", "/a2", in_place=True))
    assert adapters.leaves_out(adapters.of(request("after", before)))
    assert not adapters.leaves_out(adapters.of(request("other", other)))


def test_without_persistent_tiers_vllms_hashes_are_enough_until_an_adapter_is_replaced() -> None:
    adapters = Adapters(reads_files=False)
    first = adapters.of(request("first", lora("a", "/a")))
    assert list(first.block_hashes) == HASHES
    assert not adapters.leaves_out(first)
    adapters.load(lora("a", "/a", in_place=True))
    second = adapters.of(request("second", lora("a", "/a")))
    assert not adapters.leaves_out(second)
    assert set(second.block_hashes).isdisjoint(HASHES)
    third = adapters.of(request("third", lora("a", "/a", 2)))
    assert set(third.block_hashes).isdisjoint([*HASHES, *second.block_hashes])


@pytest.mark.parametrize("adapts_media", [True, False])
def test_encodings_that_an_adapter_changes_are_left_out(tmp_path: Path, adapts_media: bool) -> None:
    adapters, path = Adapters("facts", adapts_media=adapts_media), write(tmp_path / "a", "x")
    named(adapters, lora("a", path))
    own = adapters.of(request("image", lora("a", path), media=["image"]))
    assert adapters.leaves_out(own) is adapts_media


def test_an_adapter_without_files_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters("facts")
    for number in range(3):
        assert adapters.leaves_out(adapters.of(request(str(number), lora("a", tmp_path / "none"))))
        deadline = time.monotonic() + 60
        while adapters._current[1]._failed_at_s is None and time.monotonic() < deadline:
            time.sleep(0.001)
    assert len(caplog.records) == 1
    assert "adapters_never_change" in caplog.text


@pytest.mark.parametrize("others", [[], [{"kv_connector": "NixlConnector"}]], ids=["alone", "beside NIXL"])
def test_adapters_are_left_out_beside_other_connectors(others: list[Any], tmp_path: Path) -> None:
    """Another connector may bring KV that a server with other files at this path has computed."""
    extra = {
        "cpu_bytes_to_use": "1MiB",
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "disk", "path": "/kv", "max_bytes": "1GiB"}],
    }
    ours = {"kv_connector": "KVOffloadConnector", "kv_connector_extra_config": extra}
    transfer = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [*others, ours]},
        kv_load_failure_policy="recompute",
    )
    tell_connectors(transfer)
    extra = transfer.kv_connector_extra_config["connectors"][-1]["kv_connector_extra_config"]
    for promise, is_left_out in (({}, bool(others)), ({"adapters_never_change": True}, False)):
        engine = vllm_config(lora_config=stub("LoRAConfig"))
        engine.kv_transfer_config.kv_connector_extra_config = extra | promise
        config, asked = config_of(extra | promise), lora("a", write(tmp_path / "a", "a"))
        adapters, note = adapters_of(engine, config), note_on_adapters(engine, config)
        if not is_left_out:
            assert not adapters.leaves_out(named(adapters, asked))
            assert note is None or "hashed" in note
            continue
        adapters.load(asked)
        assert adapters._current[1].seed is None
        assert adapters.leaves_out(adapters.of(request("asked", asked)))
        assert note is not None
        assert "another connector" in note


def job(number: int, request_id: str) -> TransferJob:
    return TransferJob(number, request_id, CPULoadStoreSpec([0]), CPULoadStoreSpec([0]))


class Manager:
    """vLLM's adapter manager, which can be referenced weakly."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[int, Read]:
    """What vLLM has loaded in this process."""
    manager, found = Manager(), {}  # type: ignore[var-annotated]
    monkeypatch.setattr(loaded_adapters, "_loaded", {manager: found})
    return found


@dataclass(eq=False)
class Served:
    """A request in ``World``."""

    named: NamedRequest
    key: tuple[str, str]
    contents: set[str] = field(default_factory=set)
    """Of the adapters that computed its blocks, as far as they are on the device."""
    is_admitted: bool = False
    is_new: bool = False
    has_loaded_blocks: bool = False


class World:
    """vLLM with adapters whose files are replaced at any time, and the law that nothing wrong is stored or used."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, shared: bool):
        self.random = random.Random(seed)
        self.version = 0
        self.disk: dict[str, tuple[str, str]] = {}
        """By path: digest and content."""
        self.earlier: dict[str, list[tuple[str, str]]] = {}
        self.reads: list[Callable[[], None]] = []
        self.delays = shared
        monkeypatch.setattr(adapters_module, "in_background", self.in_background)
        monkeypatch.setattr(adapters_module.Files, "of_adapter", self.files)
        self.adapters = Adapters("facts" if shared else None)
        self.worker = LoadedAdapters(0)
        (self.manager,) = loaded_adapters._loaded
        self.contents: dict[int, str] = {}
        """By number, what the worker has in memory."""
        self.paths = {1: "/a", 2: "/a", 3: "/b"}
        self.device: dict[str, set[str]] = {}
        """By path, the contents of which vLLM's prefix cache has blocks."""
        self.brought: dict[str, set[str]] = {}
        """Those of which a load brought blocks, perhaps for a request that never ran."""
        self.served: list[Served] = []
        self.stored: dict[tuple[tuple[str, str], bytes], str] = {}
        """By key and seed, the content of the stored blocks."""
        self.reports: list[Any] = []
        self.num_stored = self.num_undone = self.num_refused = 0
        for path in ("/a", "/b"):
            self.replace(path)

    def replace(self, path: str) -> None:
        """Other files take the place of the adapter's, or its own earlier ones come back."""
        self.version += 1
        new = f"digest {self.version}", f"content {self.random.randrange(4)}"
        earlier = self.earlier.setdefault(path, [])
        self.disk[path] = self.random.choice(earlier) if earlier and self.random.random() < 0.4 else new
        earlier.append(self.disk[path])

    def files(self, path: str) -> Any:
        digest, content = self.disk[path]
        return SimpleNamespace(digest=digest, name=lambda: content)

    def in_background(self, compute: Callable[[], Any], wait_s: float, on_error: Any) -> Callable[[], Any]:
        answer: list[Any] = []
        self.reads.append(lambda: answer.append(compute()))
        if not self.delays:
            self.reads.pop()()
        return lambda: answer[0] if answer else None

    def load(self, number: int, in_place: bool = False) -> None:
        path = self.paths[number]
        digest, content = self.disk[path]
        loaded_adapters._note(self.manager, lora(path, path, number, in_place), digest)
        self.contents[number] = content

    def act(self) -> None:
        choice = self.random.random()
        if choice < 0.08:
            self.replace(self.random.choice(["/a", "/b"]))
        elif choice < 0.14:
            number = self.random.choice([1, 2, 3])
            self.adapters.load(lora(self.paths[number], self.paths[number], number, in_place=True))
            self.load(number, in_place=True)
        elif choice < 0.2 and self.contents:
            del self.contents[self.random.choice(list(self.contents))]  # vLLM evicts it
        elif choice < 0.35 and self.reads:
            self.reads.pop(self.random.randrange(len(self.reads)))()
        elif choice < 0.38 and not any(each.is_admitted for each in self.served):
            self.empty_device()
            self.adapters.device_is_empty()
        elif choice < 0.6:
            self.arrive()
        elif choice < 0.7 and self.served:
            self.adapters.finish(self.served.pop(self.random.randrange(len(self.served))).named)
        else:
            self.step()

    def empty_device(self) -> None:
        self.device.clear()
        self.brought.clear()

    def arrive(self) -> None:
        self.version += 1
        number = self.random.choice([1, 2, 3])
        path = self.paths[number]
        own = self.adapters.of(request(f"request {self.version}", lora(path, path, number)))
        self.served.append(Served(own, (path, path)))

    def admit(self, each: Served) -> None:
        """It gets blocks of vLLM's prefix cache, of a load, both or none."""
        path = each.key[1]
        cached = self.random.choice([*sorted(self.device.get(path, ())), None])
        self.adapters.admit(each.named, 0 if cached is None else 16)
        each.contents = set() if cached is None else {cached}
        each.is_admitted = each.is_new = True
        key = each.key, each.named.seed
        content = None if self.adapters.leaves_out(each.named) else self.stored.get(key)  # type: ignore[arg-type]
        each.has_loaded_blocks = content is not None and content == cached and content in self.brought.get(path, ())
        if content is not None and self.random.random() < 0.7:
            each.has_loaded_blocks = True
            self.adapters.has_loaded_blocks(each.named)
            each.contents.add(content)
            self.device.setdefault(path, set()).add(content)
            self.brought.setdefault(path, set()).add(content)

    def step(self) -> None:
        for each in self.served:
            if not each.is_admitted and self.random.random() < 0.5:
                self.admit(each)
        scheduled = [each for each in self.served if each.is_admitted and self.random.random() < 0.7]
        stores = {}
        for each in scheduled:
            if not self.adapters.leaves_out(each.named) and self.random.random() < 0.6:
                self.version += 1
                stores[self.version] = each
        jobs = tuple(job(number, each.named.request_id) for number, each in stores.items())
        checks = self.adapters.checks(
            [each.named.request_id for each in scheduled], [each.named.request_id for each in stores.values()]
        )
        begun = self.worker.begin_step(jobs, checks)
        has_mixed = False
        for each in scheduled:
            number = each.named.lora_request.lora_int_id
            if number not in self.contents:
                self.load(number)
            has_mixed |= each.is_new and each.has_loaded_blocks and self.contents[number] not in each.contents
            each.contents.add(self.contents[number])
            self.device.setdefault(each.key[1], set()).update(each.contents)
            each.is_new = False
        checked = self.worker.end_step()
        begun += checked.stores if checked is not None else ()
        refused, others, must_undo = self.worker.take()
        assert must_undo or not has_mixed, "a request computed with blocks of another adapter"
        self.num_refused += len(refused)
        assert {each.job_id for each in begun} | {each.job_id for _, each in refused} == stores.keys()
        for each in begun:
            own = stores[each.job_id]
            assert len(own.contents) == 1, "blocks of several adapters are stored"
            (content,) = own.contents
            assert self.stored.setdefault((own.key, own.named.seed), content) == content  # type: ignore[arg-type]
            self.num_stored += 1
        self.reports.append((others, must_undo))
        if self.random.random() < 0.6:  # else the next step is already under way
            while self.reports:
                others, must_undo = self.reports.pop(0)
                self.adapters.others_are_loaded(others)
                if must_undo:
                    self.num_undone += 1
                    self.empty_device()
                    for each in self.served:  # vLLM preempts all
                        each.is_admitted = each.has_loaded_blocks = False


@pytest.mark.parametrize("shared", [True, False])
def test_whatever_happens_to_the_files_blocks_are_of_the_adapter_in_their_key(
    shared: bool, loaded: dict[int, Read], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = undone = refused = 0
    caplog.set_level(logging.ERROR)
    for seed in range(by_size(300, 5000)):
        loaded.clear()
        world = World(seed, monkeypatch, shared)
        for _ in range(80):
            world.act()
        stored, undone, refused = stored + world.num_stored, undone + world.num_undone, refused + world.num_refused
    assert min(stored, undone, refused) > 0, "the test did not reach all outcomes"


def test_stores_of_an_unknown_adapter_begin_only_if_no_proof_is_needed(loaded: dict[int, Read]) -> None:
    expected = Loaded(1, "digest")
    for needs_proof in (True, False):
        worker = LoadedAdapters(3)
        checks = adapters_module.AdapterChecks(frozenset([expected]), {"a": expected}, frozenset(), needs_proof)
        jobs = worker.begin_final_stores((job(1, "a"), job(2, "b")), checks)
        assert [each.job_id for each in jobs] == ([2] if needs_proof else [1, 2])
        refused, _, _ = worker.take()
        assert [(rank, each.job_id, each.success) for rank, each in refused] == [(3, 1, False)] * needs_proof


def test_after_a_mismatch_stores_begin_again_when_the_scheduler_knows(
    tmp_path: Path, loaded: dict[int, Read], caplog: pytest.LogCaptureFixture
) -> None:
    adapters, worker, path = Adapters("facts"), LoadedAdapters(0), write(tmp_path / "a", "old")
    (manager,) = loaded_adapters._loaded
    adapters.load(lora("b", write(tmp_path / "b", "b"), 2))
    own, other = named(adapters, lora("a", path)), named(adapters, lora("b", tmp_path / "b", 2))
    cached = adapters.of(request("cached", lora("a", path)))
    adapters.admit(own, 0)
    adapters.admit(cached, 16)
    for number, name in ((1, "a"), (2, "b")):
        digest = adapters._current[number].loaded.digest  # type: ignore[union-attr]
        loaded_adapters._note(manager, lora(name, tmp_path / name, number), digest)
    write(path, "new")
    loaded_adapters._note(manager, lora("a", path), adapters_module.Files.of_adapter(str(path)).digest)

    def stores(asked: Any) -> int:
        checks = adapters.checks([asked.request_id], [asked.request_id])
        begun = worker.begin_step((job(1, asked.request_id),), checks)
        checked = worker.end_step()
        return len(begun) + (len(checked.stores) if checked is not None else 0)

    assert stores(own) == 0
    _, reports, must_undo = worker.take()
    assert len(reports) == 1
    assert not must_undo
    # The next step is under way. Of the other adapter nothing is wrong, but who knows what it was cached for?
    assert stores(other) == 0
    adapters.others_are_loaded(reports)
    assert adapters.leaves_out(own)
    assert cached.is_left_out
    assert stores(other) == 1
    new = named(adapters, lora("a", path))
    assert not adapters.leaves_out(new)
    assert stores(new) == 1
    assert set(new.block_hashes).isdisjoint(own.block_hashes)
