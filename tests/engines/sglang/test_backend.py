# SPDX-License-Identifier: Apache-2.0
"""The backend as SGLang's own factory makes and calls it."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engines.models import SEED, write_llama
from tests.engines.sglang.pools import TOKENS, HostPool, hashes, open_storage
from tests.engines.sglang.server import backend as backend_options
from tests.ports import free_port

from kvoffload.engines import weights
from kvoffload.engines.sglang import updates
from kvoffload.engines.sglang.updates import ServedWeights
from kvoffload.errors import ConfigError

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def model(llama: str) -> Iterator[str]:
    """Yield the model that SGLang believes it is serving."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(model_path=llama, device="cpu"):
        yield llama


@pytest.fixture
def build(model: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from sglang.srt.runtime_context import get_server_args

    made: list[Any] = []

    def make(pool: Any, interface: int = 1, model_name: str = model, **options: Any) -> Any:
        tier = {"type": "disk", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"}
        updates.note_files(get_server_args())  # as before SGLang loads them
        extra = backend_options(tier, interface=interface, **({"max_wait_s": 120} | options))
        made.append(storage := open_storage("dynamic", model_name, pool, extra))
        return storage

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> ServedWeights:
    """Return the weights of a process in which SGLang has not updated anything yet."""
    from kvoffload.engines.sglang import backend

    served = ServedWeights(is_watched=True)
    monkeypatch.setattr(updates, "SERVED", served)
    monkeypatch.setattr(backend, "SERVED", served)
    return served


def test_other_weights_or_settings_find_nothing(tmp_path: Path, build) -> None:
    from sglang.srt.runtime_context import get_context

    def found(**settings: Any) -> int:
        with get_context().override_server_args(model_path=path, device="cpu", **settings):
            return int(build(pool).batch_exists(keys))

    path = write_llama(tmp_path / "model").path
    pool, keys = HostPool(4), hashes(1)
    with get_context().override_server_args(model_path=path, device="cpu"):
        assert build(pool).batch_set_v1(keys, pool.indices(0)) == [True]
    assert found() == found(port=1, context_length=4096) == 1
    assert found(rl_on_policy_target="fsdp") == found(weight_version="v2") == 0
    write_llama(tmp_path / "model", seed=SEED + 1)
    assert found() == 0


def test_a_copy_at_another_path_has_the_same_pages_unless_a_version_names_the_weights(tmp_path: Path, build) -> None:
    from sglang.srt.runtime_context import get_context

    paths = [write_llama(tmp_path / name).path for name in ("model", "mount")]
    pool, keys = HostPool(4), hashes(1)
    for version, num_found in ({}, 1), ({"weight_version": "v2"}, 0):
        with get_context().override_server_args(model_path=paths[0], device="cpu", **version):
            assert build(pool, model_name=paths[0]).batch_set_v1(keys, pool.indices(0)) == [True]
        with get_context().override_server_args(model_path=paths[1], device="cpu", **version):
            assert build(pool, model_name=paths[1]).batch_exists(keys) == num_found


@pytest.mark.parametrize("is_first", [True, False], ids=["at the start", "attached later"])
def test_weights_that_nobody_saw_being_loaded_need_not_be_those_it_serves(
    model: str, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload.engines.sglang import backend

    monkeypatch.setattr(backend.KVOffloadStorage, "_is_first", is_first)
    tier = {"type": "disk", "path": str(tmp_path / "disk"), "max_bytes": "64MiB"}
    with pytest.raises(ConfigError, match=r"plugin.*not loaded.*--weight-version"):
        open_storage("dynamic", model, HostPool(4), backend_options(tier))


def test_until_the_weights_files_are_hashed_nothing_is_found(build, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.engines.sglang import backend

    pool, keys, gate = HostPool(4), hashes(1), threading.Event()
    assert build(pool).batch_set_v1(keys, pool.indices(0)) == [True]
    monkeypatch.setattr(weights, "STARTUP_S", 0.0)
    name_of = backend._name_of
    monkeypatch.setattr(backend, "_name_of", lambda files: name_of(files) if gate.wait(60) else "")
    storage = build(pool)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, pool.indices(0)) == [False]
    gate.set()
    while storage.batch_exists(keys) == 0:
        time.sleep(0.01)


def test_another_format_of_eight_bits_finds_nothing(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both MI300X and MI355X call their format ``fp8_e4m3``, but one reads the other's values as half of their real
    size."""
    from sglang.kernels.ops.quantization import fp8_kernel

    pool, keys = HostPool(4), hashes(1)
    assert build(pool).batch_set_v1(keys, pool.indices(0)) == [True]
    for where, name, value in ((fp8_kernel, "fp8_dtype", torch.float8_e4m3fnuz), (torch.version, "hip", "7.0")):
        with monkeypatch.context() as other:
            other.setattr(where, name, value)
            assert build(pool).batch_exists(keys) == 0
    assert build(pool).batch_exists(keys) == 1
    monkeypatch.delattr(fp8_kernel, "fp8_dtype")
    with pytest.raises(ConfigError, match="eight-bit numbers"):
        build(pool)
    assert build(pool, secondary_tiers=[{"type": "memory", "max_bytes": "1MiB"}]).batch_exists(keys) == 0


def test_a_rank_that_cannot_be_read_refuses_the_start(build, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import hicache_storage

    names = [field.name for field in dataclasses.fields(hicache_storage.HiCacheStorageConfig)]
    renamed = ["tensor_rank" if name == "tp_rank" else name for name in names]
    kind = dataclasses.make_dataclass("HiCacheStorageConfig", [(name, Any, None) for name in renamed])

    def config(tp_rank: int, **values: Any) -> Any:
        return kind(tensor_rank=tp_rank, **values)

    monkeypatch.setattr(hicache_storage, "HiCacheStorageConfig", config)
    with pytest.raises(ConfigError, match="it has no tp_rank"):
        build(HostPool(4))


@pytest.mark.parametrize("takes", ["is_multimodal", "is_audio_model"])
def test_media_that_clients_name_are_in_no_tier_that_others_read(
    build, monkeypatch: pytest.MonkeyPatch, takes: str
) -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.runtime_context import get_server_args

    monkeypatch.setattr(model_config_of(get_server_args()), takes, True)
    with pytest.raises(ConfigError, match="media_never_change"):
        build(HostPool(4))
    build(HostPool(4), media_never_change=True)
    build(HostPool(4), secondary_tiers=[{"type": "memory", "max_bytes": "1MiB"}])


def test_weights_that_change_in_a_running_server(build, served: ServedWeights) -> None:
    from sglang.srt.runtime_context import get_context, get_serving

    pool, keys = HostPool(4), hashes(1)
    storage = build(pool)
    assert storage.batch_set_v1(keys, pool.indices(0)) == [True]
    before = get_serving().weight_version

    def is_off(storage: Any) -> bool:
        return (
            storage.batch_exists(keys) == 0
            and storage.batch_get_v1(keys, pool.indices(1)) == [False]
            and storage.batch_set_v1(hashes(2), pool.indices(1)) == [False]
        )

    served.change(before)
    served.flush()
    assert is_off(storage)
    assert is_off(build(pool)), "nothing says which weights these are"
    get_context().override("test", weight_version="new")  # as SGLang's scheduler does
    try:
        assert is_off(storage)
        attached = build(pool)
        assert attached.batch_exists(keys) == 0
        assert attached.batch_set_v1(keys, pool.indices(1)) == [True]
        assert attached.batch_exists(keys) == 1
        served.change("new")  # another update, which names nothing
        assert is_off(attached)
        attached.clear()
        assert is_off(attached), "SGLang would store the pages of the weights before under the new keys"
        served.flush()
        assert attached.batch_exists(keys) == 0
        assert attached.batch_set_v1(keys, pool.indices(1)) == [True]
        assert attached.batch_exists(keys) == 1
        served.salt = b""  # as in another process
        assert build(pool).batch_exists(keys) == 1, "of the first update, by its name"
    finally:
        get_context().override("test", weight_version=before)


def test_what_was_cleared_stays_so_when_a_storage_is_attached_again(build) -> None:
    pool, keys = HostPool(4), hashes(1)
    storage = build(pool)
    assert storage.batch_set_v1(keys, pool.indices(0)) == [True]
    storage.clear()
    storage.register_mem_pool_host(HostPool(4))
    assert storage.batch_exists(keys) == 0
    assert build(pool).batch_exists(keys) == 0


def test_each_rank_has_a_port_and_one_that_is_taken_stops_nothing(build, caplog: pytest.LogCaptureFixture) -> None:
    from kvoffload.engines.sglang.backend import _number_of

    sizes = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2}
    ranks = itertools.product(range(2), repeat=4)
    numbers = [
        _number_of(SimpleNamespace(dp_rank=dp, pp_rank=pp, attn_cp_rank=cp, tp_rank=tp, **sizes))
        for dp, pp, cp, tp in ranks
    ]
    assert numbers == list(range(16))
    port = free_port()
    build(HostPool(4), metrics_port=port)
    other = build(pool := HostPool(4), metrics_port=port)
    assert "cannot be served" in caplog.text
    assert other.batch_set_v1(hashes(1), pool.indices(0)) == [True]


def test_pages_by_addresses(build) -> None:
    pool, keys = HostPool(8), hashes(*range(3))
    backend = build(pool)
    written = [pool.fill(page, key) for page, key in enumerate(keys)]
    assert backend.batch_set_v1(keys, pool.indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists([*keys, *hashes(9)]) == 3
    assert backend.batch_exists(hashes(9, 0)) == 0
    assert backend.batch_get_v1(keys, pool.indices(5, 6, 7)) == [True] * 3
    assert [torch.equal(pool.page(5 + page), content) for page, content in enumerate(written)] == [True] * 3
    assert backend.batch_get_v1(hashes(9, 0), pool.indices(5, 6)) == [False, True]
    backend.clear()
    assert backend.batch_exists(keys) == 0


def test_pages_as_tensors(build) -> None:
    pool, keys = HostPool(4), hashes(1, 2)
    backend = build(pool, interface=0)
    values = [torch.randn(pool.page(0).shape) for _ in keys]
    assert backend.batch_set(keys, values)
    targets = [torch.zeros_like(value) for value in values]
    found = backend.batch_get([*keys, *hashes(3)], [*targets, torch.zeros_like(values[0])])
    assert found[2] is None
    assert torch.equal(found[0], values[0])
    assert torch.equal(targets[1], values[1])
    assert backend.set("any text", values[0])
    assert backend.exists("any text")
    assert not backend.exists("other")
    assert backend.get("other", targets[0]) is None
    assert build(pool).batch_exists(keys) == 0, "the bytes of a tensor are in another order"


def test_models_with_several_pools(build) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    kv, state, keys = HostPool(8), HostPool(8, layers=1), hashes(*range(6))
    backend = build(kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    backend.register_mem_host_pool_v2(state, PoolName.SWA)
    backend.on_host_pools_registered()
    for page, key in enumerate(keys):
        kv.fill(page, key)
    assert all(backend.batch_set_v1(keys, kv.indices(*range(6))))

    def transfer(pages: list[int], **values: Any) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.SWA, keys=[keys[page] for page in pages], host_indices=state.indices(*pages), **values
        )

    kept = [state.fill(page, f"state {page}") for page in (2, 3)]
    assert backend.batch_set_v2([transfer([2, 3])]) == {PoolName.SWA: [True, True]}
    asked = transfer([4, 5], hit_policy=PoolHitPolicy.TRAILING_PAGES)  # windows of two pages
    found = backend.batch_exists_v2(keys, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 4}
    every = backend.batch_exists_v2(keys, [transfer([0], hit_policy=PoolHitPolicy.ALL_PAGES)])
    assert every.kv_hit_pages == 0
    moved = PoolTransfer(name=PoolName.SWA, keys=keys[2:4], host_indices=state.indices(6, 7))
    assert backend.batch_get_v2([moved]) == {PoolName.SWA: [True, True]}
    assert torch.equal(state.page(6), kept[0])
    assert torch.equal(state.page(7), kept[1])
    unknown = PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], host_indices=state.indices(0))
    assert backend.batch_get_v2([unknown]) == {PoolName.MAMBA: [False]}
    assert backend.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0


_PAGES = 6
_SOME_PAGES = st.sets(st.integers(0, _PAGES - 1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kv=st.integers(0, _PAGES).map(lambda count: set(range(count))) | _SOME_PAGES,
    extra=st.lists(
        st.tuples(st.sampled_from(["SWA", "MAMBA", "INDEXER"]), _SOME_PAGES, st.booleans(), st.integers(1, 3)),
        max_size=3,
        unique_by=lambda pool: pool[0],
    ),
)
def test_hits_end_where_those_of_sglangs_own_backend_do(beside_file, kv, extra) -> None:
    """SGLang's ``file`` backend is the oracle, given the same calls."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    backends, pools, keys = beside_file()
    for backend in backends:
        for name, pages in [("KV", kv), *((name, pages) for name, pages, _, _ in extra)]:
            moved = PoolTransfer(
                name=PoolName[name], keys=[keys[page] for page in pages], host_indices=pools[name].indices(*pages)
            )
            assert backend.batch_set_v2([moved]) == {PoolName[name]: [True] * len(pages)}
    asked = [
        PoolTransfer(
            name=PoolName[name],
            keys=keys[-window:],
            hit_policy=PoolHitPolicy.ALL_PAGES if is_whole else PoolHitPolicy.TRAILING_PAGES,
        )
        for name, _, is_whole, window in extra
    ]
    ours, theirs = (backend.batch_exists_v2(keys, asked) for backend in backends)
    assert ours.kv_hit_pages == theirs.kv_hit_pages
    assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
    # It asks no further pool once no end is left.
    assert theirs.extra_pool_hit_pages.items() <= ours.extra_pool_hit_pages.items()
    assert [backend.batch_exists(keys) for backend in backends] == [min({*range(_PAGES)} - kv, default=_PAGES)] * 2
    wanted = [PoolTransfer(name=PoolName.KV, keys=keys, host_indices=pools["KV"].indices(*range(_PAGES, 2 * _PAGES)))]
    contents = []
    for backend in backends:
        pools["KV"].kv_buffer[:, _PAGES * TOKENS :] = 0
        assert backend.batch_get_v2(wanted) == {PoolName.KV: [page in kv for page in range(_PAGES)]}
        contents.append(pools["KV"].kv_buffer.clone())
    assert torch.equal(*contents)


@pytest.fixture
def beside_file(build, tmp_path: Path) -> Callable[[], tuple[tuple[Any, Any], dict[str, HostPool], list[str]]]:
    """kvoffload's backend and SGLang's own over the same pools, and keys that neither has seen."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName

    pools = {name: HostPool(2 * _PAGES) for name in ("KV", "SWA", "MAMBA", "INDEXER")}
    ours = build(pools["KV"])
    backends = (ours, HiCacheFile(ours._config, file_path=str(tmp_path / "file")))
    for backend in backends:
        for name, pool in pools.items():
            backend.register_mem_host_pool_v2(pool, PoolName[name])
    for pool in pools.values():
        for page in range(_PAGES):
            pool.fill(page, f"{id(pool)}-{page}")
    turn = itertools.count()
    return lambda: (backends, pools, hashes(*range(_PAGES * (first := next(turn)), _PAGES * (first + 1))))


def test_metrics_are_served(build) -> None:
    pool, port = HostPool(4), free_port()
    backend = build(pool, metrics_port=port)
    assert backend.batch_set_v1(hashes(1, 2), pool.indices(0, 1)) == [True, True]
    assert backend.batch_exists(hashes(1, 3)) == 1
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert 'kvoffload_tier_blocks_stored_total{rank="0",tier="disk"} 2.0' in lines
    assert 'kvoffload_tier_lookups_total{answer="miss",rank="0",tier="disk"} 1.0' in lines


def test_mistakes_fail_the_start(build) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_wait_s'"):
        build(HostPool(4), max_wait=1)
    with pytest.raises(ConfigError, match="host pools of SGLang whose pages"):
        build(SimpleNamespace(page_size=4))
