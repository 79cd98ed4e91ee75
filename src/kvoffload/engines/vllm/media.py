# SPDX-License-Identifier: Apache-2.0
"""The content of images, videos and sounds in the keys of blocks. Scheduler side; importing this module does not load
vLLM.

vLLM's block hashes contain an identifier of each medium. Usually this is a hash of its content, but a client may choose
the identifier, even one that another medium has. So the connector gets a ``MediaRequest`` in place of each request with
media. Its block hashes also contain a hash of the data that the model gets.

vLLM's own caches only know identifiers. So if two media with one identifier appear, blocks that vLLM computed for this
identifier may belong to either of them, and kvoffload neither stores nor loads such requests.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvoffload.config import OffloadingConfig
from kvoffload.engines.vllm.arguments import is_alone
from kvoffload.engines.vllm.seeded_hashes import SeededHashes
from kvoffload.engines.weights import outliving_tier
from kvoffload.errors import text_of
from kvoffload.logs import RateLimitedLog

logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)

_MOST_IDENTIFIERS = 1 << 19
"""The number of identifiers that an engine remembers. Each takes about 250 bytes."""


class MediaRequest:
    """A request of vLLM with media, as the connector sees it: other block hashes, and all else of vLLM's."""

    def __init__(self, of_vllm: Any, media: Media) -> None:
        self.of_vllm = of_vllm
        self.identifiers: list[str] = []
        self._media = media
        self._offsets: list[int] = []
        self._seeds = [b""]
        """The seeds of blocks with none of the media before their end, with the first one, and so on."""

    def __repr__(self) -> str:
        return f"MediaRequest({self.of_vllm.request_id!r}, {len(self.identifiers)} media)"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_vllm, name)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        self.catch_up()
        return SeededHashes(self.of_vllm.block_hashes, self._seed_of)

    def catch_up(self) -> None:
        """Read the media that are new. The next input of a session may bring more."""
        for feature in self.of_vllm.mm_features[len(self.identifiers) :]:
            self._seeds.append(hashlib.sha256(self._seeds[-1] + self._media.note(feature)).digest())
            self._offsets.append(feature.mm_position.offset)
            self.identifiers.append(feature.identifier)

    @property
    def is_clear(self) -> bool:
        """Whether the seed of each block identifies the content of all media that count for it."""
        self.catch_up()
        return self._offsets == sorted(self._offsets) and all(map(self._media.has_one_content, self.identifiers))

    def _seed_of(self, index: int) -> bytes:
        end = self._media.end_of(index)
        return self._seeds[bisect_left(self._offsets, end)]


class Media:
    """The content behind each identifier, and the requests with media. Scheduler thread only."""

    def __init__(self, hash_tokens: int | None = None, lookahead_tokens: int = 1) -> None:
        """``hash_tokens``: the tokens of one of vLLM's block hashes. ``None``: the content of media is not known here,
        so requests with media are left out. ``lookahead_tokens``: the tokens after a block on which its KV may depend.
        """
        self._hash_tokens, self._lookahead_tokens = hash_tokens, lookahead_tokens
        self._contents: dict[str, bytes] = {}
        """The hash of the content by identifier. Empty: several contents, or an unknown one.

        vLLM's caches know only the identifier, and use the same embeddings for each of its placeholders."""
        self._digests: dict[int, tuple[weakref.ref[Any], bytes]] = {}
        """The hash of data that vLLM keeps, by the data's ``id``. A chat contains its images again in each turn."""
        self._requests: dict[str, MediaRequest] = {}

    def of(self, request: Any) -> Any:
        """Return ``request``, or its ``MediaRequest`` if the content of its media is known.

        A session gets a ``MediaRequest`` from its beginning, because its next input may bring media.
        """
        if self._hash_tokens is None or not (request.mm_features or request.resumable):
            return request
        known = self._requests.get(request.request_id)
        if known is None or known.of_vllm is not request:
            known = self._requests[request.request_id] = MediaRequest(request, self)
            known.catch_up()
        return known

    def finish(self, request: Any) -> None:
        self._requests.pop(request.request_id, None)

    def leaves_out(self, request: Any) -> bool:
        """Return whether the keys of ``request``, a result of ``of``, do not identify the content of its media."""
        if self._hash_tokens is None:
            return bool(request.mm_features)
        return not getattr(request, "is_clear", not request.mm_features)

    def end_of(self, index: int) -> int:
        """Return the position before which a medium must begin to count for the block with this index."""
        assert self._hash_tokens is not None
        return (index + 1) * self._hash_tokens + self._lookahead_tokens

    def has_one_content(self, identifier: str) -> bool:
        return bool(self._contents.get(identifier))

    def note(self, feature: Any) -> bytes:
        """Return the hash of a medium's content and placeholder, and remember the content by its identifier."""
        content, placed = self._hashes_of(feature)
        known = self._contents.get(feature.identifier)
        if known is not None and known != content:
            self._contents[feature.identifier] = b""
        elif known is None and len(self._contents) < _MOST_IDENTIFIERS:
            self._contents[feature.identifier] = content
            if len(self._contents) == _MOST_IDENTIFIERS:
                logger.warning(
                    "kvoffload has seen %d images, videos or sounds, and does not offload requests with others. "
                    "Restart the server, or set media_never_change.",
                    _MOST_IDENTIFIERS,
                )
        return placed

    def _hashes_of(self, feature: Any) -> tuple[bytes, bytes]:
        """Return the hash of a medium's content, and the same with its placeholder. Both are empty if it is unknown.

        The length of a placeholder may depend on the text beside it, such as the medium's number in the prompt
        (MiniCPM-V). The number of embeddings in it depends only on the content, unless a client lies about it.
        """
        data, position = feature.data, feature.mm_position
        known, content = self._digests.get(id(data), (lambda: None, b""))
        try:
            if data is None:
                raise TypeError("vLLM does not show it to the scheduler")
            if known() is not data:
                content = _hash_of({name: element.data for name, element in data.items()})
                key = id(data)
                self._digests[key] = weakref.ref(data, lambda _: self._digests.pop(key, None)), content
            of_data = [feature.modality, content.hex()]
            return _hash_of([*of_data, position.get_num_embeds()]), _hash_of(
                [*of_data, position.length, position.is_embed]
            )
        except Exception as exc:  # noqa: BLE001 - then the request is left out
            _log.warning(
                f"kvoffload stores and loads nothing for a request, because it cannot read the data of its "
                f"{feature.modality}: {text_of(exc)}. Set media_never_change if no client sends the uuid of another "
                "medium."
            )
            return b"", b""


def media_of(vllm_config: Any, config: OffloadingConfig, hash_tokens: int, lookahead_tokens: int) -> Media | None:
    """Return a ``Media`` for this engine, or ``None`` if vLLM's hashes are enough. In persistent tiers keys contain the
    content of media, unless the user promises that each identifier has one content."""
    if not _are_in_question(vllm_config, config):
        return None
    if why_unseen(vllm_config) is not None:
        return Media()
    return Media(hash_tokens, max(1, lookahead_tokens))


def _are_in_question(vllm_config: Any, config: OffloadingConfig) -> bool:
    has_media = vllm_config.model_config.multimodal_config is not None
    return has_media and not config.media_never_change and outliving_tier(config) is not None


def encodings_are_foreign(vllm_config: Any) -> bool:
    """Return whether encodings of media may come from others than this engine's own encoders."""
    is_custom = vllm_config.ec_manager_config.encoder_cache_manager_cls is not None
    return is_custom or vllm_config.ec_transfer_config is not None


def why_unseen(vllm_config: Any) -> str | None:
    """Return why the scheduler's process does not see the data of media, as a clause, or ``None`` if it does."""
    if not is_alone(vllm_config):
        return "another connector may bring KV that was computed from other media"
    if encodings_are_foreign(vllm_config):
        return "another server or a custom encoder cache manager may encode them"
    if vllm_config.model_config.multimodal_config.mm_processor_cache_type != "lru":
        return "only vLLM's workers see their data (--mm-processor-cache-type)"
    return None


def note_on_media(vllm_config: Any, config: OffloadingConfig) -> str | None:
    """Return a sentence about media for the log and for ``check-config``, or ``None`` if there is nothing to say."""
    if not _are_in_question(vllm_config, config):
        return None
    if (why := why_unseen(vllm_config)) is not None:
        return (
            f"kvoffload neither stores nor loads for requests with images, videos or sounds, because {why}, and a "
            "client may name one by the uuid of another: set media_never_change if none does, or leave out persistent "
            "tiers"
        )
    return (
        "kvoffload hashes the content of images, videos and sounds, so that persistent tiers serve requests with them, "
        "even if a client sends the uuid of another medium"
    )


def _hash_of(value: Any) -> bytes:
    digest = hashlib.sha256()
    for part in _parts_of(value):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts_of(value: Any) -> Iterator[bytes | memoryview]:
    """Yield parts that differ for different values. Raises ``TypeError`` for a value of an unknown kind."""
    if isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for name in sorted(value):
            yield name.encode()
            yield from _parts_of(value[name])
    elif isinstance(value, (list, tuple)):
        yield f"list of {len(value)}".encode()
        for each in value:
            yield from _parts_of(each)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        yield from _parts_of_tensor(value)


def _parts_of_tensor(value: Any) -> Iterator[bytes | memoryview]:
    import torch

    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        raise TypeError(f"the data is a {type(value).__name__} that is not in host memory")
    yield f"{value.dtype} {tuple(value.shape)}".encode()
    if value.numel():
        yield memoryview(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
