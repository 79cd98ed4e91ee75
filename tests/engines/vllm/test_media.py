# SPDX-License-Identifier: Apache-2.0
"""Test that keys contain the content of media, and that nothing is offloaded if an identifier does not identify it."""

from __future__ import annotations

import gc
import random
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.vllm.configs import stub, vllm_config

from kvoffload.config import parse_config
from kvoffload.engines.vllm import media as module
from kvoffload.engines.vllm import tell_connectors
from kvoffload.engines.vllm.adapters import Adapters
from kvoffload.engines.vllm.arguments import ALONE, config_of
from kvoffload.engines.vllm.media import Media, encodings_are_foreign, media_of, note_on_media
from kvoffload.logs import RateLimitedLog

HASHES = [bytes([n]) * 32 for n in range(8)]
BLOCK = 4
DISK = {
    "cpu_bytes_to_use": "1MiB",
    "spec_name": "TieringOffloadingSpec",
    "secondary_tiers": [{"type": "disk", "path": "/kv", "max_bytes": "1GiB"}],
}


def data(value: float, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3)) -> Any:
    """vLLM's ``MultiModalKwargsItem``: it can be referenced weakly, but not hashed."""
    pixels = torch.full(shape, value, dtype=dtype)
    return UserDict(pixels=SimpleNamespace(data=pixels), grid=SimpleNamespace(data=[torch.tensor([1, 2]), None]))


@dataclass
class Position:
    """vLLM's ``PlaceholderRange``."""

    offset: int
    length: int
    is_embed: torch.Tensor | None = None

    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())


def medium(
    identifier: str,
    content: Any,
    offset: int = 5,
    length: int = 3,
    modality: str = "image",
    mask: list[bool] | None = None,
) -> Any:
    position = Position(offset, length, None if mask is None else torch.tensor(mask))
    return SimpleNamespace(identifier=identifier, data=content, mm_position=position, modality=modality)


def request(name: str, *features: Any, adapter: Any = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        lora_request=adapter,
        block_hashes=list(HASHES),
        mm_features=list(features),
        resumable=name.startswith("session"),
    )


def keys(media: Media, *features: Any) -> list[bytes]:
    own = media.of(request("asked", *features))
    assert not media.leaves_out(own)
    return list(own.block_hashes)


def test_requests_without_media_are_vllms() -> None:
    plain = request("a")
    media = Media(BLOCK)
    assert media.of(plain) is plain
    assert not media.leaves_out(plain)
    with_media = request("b", medium("x", data(1)))
    assert Media().of(with_media) is with_media
    assert Media().leaves_out(with_media)


def test_keys_contain_the_content_from_the_block_of_a_medium_on() -> None:
    one, copy, other = (keys(Media(BLOCK), medium("x", data(value))) for value in (1, 1, 2))
    assert one == copy
    assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [True] + [False] * 7
    assert one[0] == HASHES[0]
    assert set(one[1:]).isdisjoint(HASHES)


def test_a_medium_right_behind_a_block_is_in_its_key() -> None:
    """The head of a drafter reads one token ahead."""
    behind = [keys(Media(BLOCK), medium("x", data(value), offset=BLOCK)) for value in (1, 2)]
    assert behind[0][0] != behind[1][0]
    later = [keys(Media(BLOCK), medium("x", data(value), offset=BLOCK + 1)) for value in (1, 2)]
    assert later[0][0] == later[1][0]
    wide = [keys(Media(BLOCK, lookahead_tokens=2), medium("x", data(value), offset=BLOCK + 1)) for value in (1, 2)]
    assert wide[0][0] != wide[1][0]


def test_prompts_share_blocks_up_to_the_first_medium_that_differs() -> None:
    media = Media(BLOCK)
    first = medium("x", data(1))
    one = keys(media, first, medium("y", data(2), offset=18))
    two = keys(media, first, medium("z", data(3), offset=18))
    assert [mine == theirs for mine, theirs in zip(one, two, strict=True)] == [True] * 4 + [False] * 4


def test_contents_that_differ_in_any_part_are_apart() -> None:
    base = medium("x", data(1))
    for other in (
        medium("x", data(1, torch.float64)),
        medium("x", data(1, shape=(3, 2))),
        medium("x", data(1), modality="video"),
        medium("x", data(1), length=4),
        medium("x", UserDict(pixels=SimpleNamespace(data=torch.full((2, 3), 1.0)))),
    ):
        assert keys(Media(BLOCK), base)[2] != keys(Media(BLOCK), other)[2]
    masked = medium("x", data(1), mask=[True, False, True])
    assert keys(Media(BLOCK), base)[2] != keys(Media(BLOCK), masked)[2]


def test_two_media_with_one_identifier_are_not_offloaded() -> None:
    media = Media(BLOCK)
    honest = media.of(request("honest", medium("x", data(1))))
    other = media.of(request("other", medium("y", data(2))))
    assert not media.leaves_out(honest)
    liar = media.of(request("liar", medium("x", data(2))))
    for own in (honest, liar, media.of(request("later", medium("x", data(1))))):
        assert media.leaves_out(own)
    assert not media.leaves_out(other)
    media.finish(honest)
    assert media.leaves_out(honest)


def test_the_text_around_the_embeddings_of_a_medium_is_not_its_content() -> None:
    """The placeholders of MiniCPM-V contain the number of the image in the prompt, so their length varies."""
    media = Media(BLOCK)
    short, long = medium("x", data(1), mask=[False, True, True]), medium("x", data(1), length=4, mask=[False, True] * 2)
    one, two = (media.of(request(str(each.mm_position.length), each)) for each in (short, long))
    assert not media.leaves_out(one)
    assert not media.leaves_out(two)
    assert one.block_hashes[:1] == two.block_hashes[:1]
    assert set(one.block_hashes[1:]).isdisjoint(two.block_hashes[1:])


def test_a_client_that_places_a_medium_on_other_tokens_is_left_out() -> None:
    """vLLM's block hashes contain the identifier and where a placeholder begins, but not where it ends."""
    media = Media(BLOCK)
    asked = [media.of(request(str(length), medium("x", data(1), length=length))) for length in (3, 4)]
    assert all(map(media.leaves_out, asked))


def test_one_warning_says_which_media_are_not_offloaded(caplog: pytest.LogCaptureFixture) -> None:
    media = Media(BLOCK)
    for number in range(3):
        hidden = UserDict(pixels=SimpleNamespace(data=torch.ones(2, device="meta")))
        assert media.leaves_out(media.of(request(str(number), medium(str(number), hidden, modality="video"))))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "video" in record.message
    assert "media_never_change" in record.message


@pytest.fixture(autouse=True)
def no_earlier_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_log", RateLimitedLog(module.logger))


@pytest.mark.parametrize(
    "hidden",
    [
        None,
        UserDict(pixels=SimpleNamespace(data=object())),
        UserDict(pixels=SimpleNamespace(data=torch.ones(2, device="meta"))),
        UserDict(pixels=SimpleNamespace(data=torch.ones(2).to_sparse())),
        object(),
    ],
    ids=["none", "unknown", "another device", "sparse", "no mapping"],
)
def test_media_whose_data_vllm_does_not_show_are_not_offloaded(hidden: Any) -> None:
    media = Media(BLOCK)
    assert media.leaves_out(media.of(request("a", medium("x", hidden))))
    assert media.leaves_out(media.of(request("b", medium("x", data(1))))), "vLLM may have computed with either"


def test_media_of_the_next_input_of_a_session_are_in_the_keys() -> None:
    media = Media(BLOCK)
    session = request("a", medium("x", data(1)))
    own = media.of(session)
    before = list(own.block_hashes)
    session.mm_features.append(medium("y", data(2), offset=18))
    assert [mine == theirs for mine, theirs in zip(own.block_hashes, before, strict=True)] == [True] * 4 + [False] * 4
    session.mm_features.append(medium("y", data(3), offset=22))
    assert media.leaves_out(own)


def test_media_are_left_out_beside_other_connectors() -> None:
    """Another connector may bring KV of another medium with the same identifier, which kvoffload would store."""
    options = {"mm_processor_cache_type": "lru", "mm_processor_cache_gb": 4}
    ours = {"kv_connector": "KVOffloadConnector", "kv_connector_extra_config": DISK}
    alone = SimpleNamespace(**ours, kv_load_failure_policy="recompute")
    tell_connectors(alone)
    found = [(DISK, True), (alone.kv_connector_extra_config, False)]
    for others, is_left_out in (([], False), ([{"kv_connector": "NixlConnector"}], True)):
        transfer = SimpleNamespace(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": [*others, ours]},
            kv_load_failure_policy="recompute",
        )
        tell_connectors(transfer)
        found.append((transfer.kv_connector_extra_config["connectors"][-1]["kv_connector_extra_config"], is_left_out))
    for extra, is_left_out in found:
        config = vllm_config(model_config__multimodal_config=stub("MultiModalConfig", **options))
        config.kv_transfer_config.kv_connector_extra_config = extra
        media, asked = media_of(config, config_of(extra), BLOCK, 0), request("a", medium("x", data(1)))
        assert (media is not None and media.leaves_out(media.of(asked))) == is_left_out


def test_a_session_is_one_request_from_its_beginning() -> None:
    """Another object for its id would begin as another request, and lose the decision that it is left out."""
    media = Media(BLOCK)
    session = request("session")
    own = media.of(session)
    before = list(own.block_hashes)
    assert before == HASHES
    session.mm_features.append(medium("z", data(1), offset=18))
    assert media.of(session) is own
    assert own.block_hashes[:4] == before[:4]
    assert own.block_hashes[4] != before[4]
    assert not media.leaves_out(own)


def test_a_request_with_an_adapter_has_both_in_its_keys() -> None:
    media, adapters = Media(BLOCK), Adapters(reads_files=False)
    adapter = SimpleNamespace(lora_name="a", lora_path="/a", lora_int_id=1, load_inplace=False)
    one, two = (
        adapters.of(media.of(request(str(value), medium(str(value), data(value)), adapter=adapter))) for value in (1, 2)
    )
    assert one.block_hashes[3] != two.block_hashes[3]
    assert not media.leaves_out(one)
    media.of(request("liar", medium("1", data(2))))
    assert media.leaves_out(one)
    assert not media.leaves_out(two)


def test_data_that_vllm_keeps_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    media, content = Media(BLOCK), data(1)
    hashed: list[Any] = []
    parts = module._parts_of_tensor
    monkeypatch.setattr(module, "_parts_of_tensor", lambda value: (hashed.append(value), parts(value))[1])
    turns = [keys(media, medium("x", content)) for _ in range(3)]
    assert turns[0] == turns[1] == turns[2]
    assert len(hashed) == 2
    media.finish(request("asked"))
    hashed.clear()
    del content
    gc.collect()
    assert not media._digests


def test_identifiers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_IDENTIFIERS", 2)
    media = Media(BLOCK)
    asked = [media.of(request(str(n), medium(str(n), data(n)))) for n in range(4)]
    assert [media.leaves_out(each) for each in asked] == [False, False, True, True]
    assert not media.leaves_out(media.of(request("again", medium("1", data(1)))))


@pytest.mark.parametrize("seed", range(20))
def test_no_key_is_of_two_contents(seed: int) -> None:
    """Clients name media as they like. Compare with the contents that a block may contain."""
    rng, media = random.Random(seed), Media(BLOCK)
    contents = {n: data(n) for n in range(4)}
    found: dict[bytes, Any] = {}
    computed: dict[str, set[int]] = {}
    for number in range(100):
        chosen = [(rng.choice("abcdef"), rng.randrange(4), offset) for offset in (2, 9, 17) if rng.random() < 0.5]
        features = [medium(name, contents[n] if rng.random() < 0.5 else data(n), offset) for name, n, offset in chosen]
        asked = request(str(number), *features)
        # vLLM's hashes contain the identifiers.
        named = [str([(name, at) for name, _, at in chosen if at < (n + 1) * BLOCK]).encode() for n in range(8)]
        asked.block_hashes = [b"%d %s" % (index, text) for index, text in enumerate(named)]
        own = media.of(asked)
        for name, n, _ in chosen:
            computed.setdefault(name, set()).add(n)
        if media.leaves_out(own):
            assert any(len(computed[name]) > 1 for name, _, _ in chosen)
            continue
        assert all(len(computed[name]) == 1 for name, _, _ in chosen), "vLLM's caches may have computed with either"
        for index, each in enumerate(own.block_hashes):
            content = [(n, at) for _, n, at in chosen if at <= (index + 1) * BLOCK]
            assert found.setdefault(each, content) == content


def test_an_engine_says_whether_it_serves_media() -> None:
    media = {"mm_processor_cache_type": "lru", "mm_processor_cache_gb": 4}
    config = vllm_config(model_config__multimodal_config=stub("MultiModalConfig", **media))
    config.kv_transfer_config.kv_connector_extra_config = {ALONE: True}
    asked = request("a", medium("x", data(1)))

    def of(extra: dict[str, Any]) -> tuple[bool, bool]:
        found = media_of(config, parse_config(extra), BLOCK, 0)
        if found is None:
            return False, False
        own = found.of(asked)
        return own is not asked, found.leaves_out(own)

    assert of(DISK) == (True, False)
    assert "hashes the content" in str(note_on_media(config, parse_config(DISK)))
    for extra in (DISK | {"media_never_change": True}, {"cpu_bytes_to_use": "1MiB"}):
        assert of(extra) == (False, False)
        assert note_on_media(config, parse_config(extra)) is None
    config.model_config.multimodal_config.mm_processor_cache_type = "shm"
    assert of(DISK) == (False, True)
    assert "--mm-processor-cache-type" in str(note_on_media(config, parse_config(DISK)))
    config.model_config.multimodal_config.mm_processor_cache_type = "lru"
    assert not encodings_are_foreign(config)
    for foreign in (
        {"ec_transfer_config": SimpleNamespace()},
        {"ec_manager_config": stub("EncoderCacheManagerConfig", encoder_cache_manager_cls="mine.Manager")},
    ):
        config = vllm_config(model_config__multimodal_config=stub("MultiModalConfig", **media), **foreign)
        config.kv_transfer_config.kv_connector_extra_config = {ALONE: True}
        assert encodings_are_foreign(config)
        assert of(DISK) == (False, True)
        assert "encoder cache manager" in str(note_on_media(config, parse_config(DISK)))
