# SPDX-License-Identifier: Apache-2.0
"""Ask a store which blocks it has, for tiers whose store does not list its blocks. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvoffload.base import OffloadKey, ReqContext, get_offload_group_idx
from kvoffload.tiering.health import StoreHealth
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner
from kvoffload.tiering.stores.base import BlockStore

_FIRST_CHUNK = 8
"""Number of keys in the first chunk. Nearly all blocks of a new prompt are missing."""
_GROWTH = 4
"""Each chunk is this many times as large as the previous one."""
_MOST_IN_CHUNKS = 1024
"""Maximum number of blocks of a prefix that one thread asks for. With more, a slow store would seem to hang."""
_SLICE = 256
"""Number of keys in one call without chunks."""
_MAX_ASKING = 262_144
"""Maximum number of keys without an answer, at about 100 bytes each. Beyond this limit, a block is a miss."""
_MAX_SKIPPED = 65_536
"""Maximum number of keys remembered as skipped. Beyond this limit, all are forgotten, which costs a question in
chunks."""


class Questions:
    """Asks the store for unknown blocks, once for all questions of a step, and records the answers in ``index``.

    The blocks of one group that a request looks up in a step count as a prefix, head first. An I/O thread asks for them
    in growing chunks, and stops after the chunk with the first missing block. So a new prompt costs one or a few
    questions, not one for each of its blocks. The following blocks are *skipped*: they stay unknown. If a request needs
    a skipped block despite the hole and looks it up again, the store is asked at once, without chunks. So a store may
    have holes, and each of its blocks is found. If the first 1,024 are present, all threads ask for the rest at once.
    """

    def __init__(self, store: BlockStore, index: PresenceIndex, runner: TierRunner, reads: StoreHealth) -> None:
        self._store = store
        self._index = index
        self._runner = runner
        self._reads = reads
        self._asking: set[OffloadKey] = set()
        """Keys with the answer ``None`` that the store has not answered yet."""
        self._prefixes: dict[tuple[str, int], list[OffloadKey]] = {}
        """The keys of this step, by request and group."""
        self._at_once: list[OffloadKey] = []
        """The keys of this step that do not belong to a prefix."""
        self._skipped: set[OffloadKey] = set()

    def __repr__(self) -> str:
        return f"Questions({len(self._asking)} open)"

    @property
    def are_pending(self) -> bool:
        """Whether a question waits to be asked, or the store has not answered yet."""
        return bool(self._asking or self._index.to_refresh)

    def is_asking_all(self, keys: Collection[OffloadKey]) -> bool:
        """Return whether the store is being asked for each of ``keys``, or will be when the step ends."""
        return self._asking.issuperset(keys)

    def asked_of(self, keys: Collection[OffloadKey] | None) -> list[OffloadKey]:
        """Return the blocks among ``keys`` (or all blocks) that the store has not answered for."""
        return [*self._asking] if keys is None else [key for key in keys if key in self._asking]

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Stop waiting for the answers about ``keys``."""
        self._asking.difference_update(keys)

    def ask(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return the answer for ``key``, which is unknown: ``None`` if the store is being asked, or ``False`` if too
        many questions are open."""
        if key in self._asking:
            return None
        if len(self._asking) >= _MAX_ASKING:
            return False
        self._asking.add(key)
        if key in self._skipped:
            self._skipped.remove(key)
            self._at_once.append(key)
        else:
            self._prefixes.setdefault((req_context.req_id, get_offload_group_idx(key)), []).append(key)
        return None

    def submit(self) -> None:
        """Send the step's questions to the store, including questions about absent blocks that are due to be checked
        again."""
        at_once = [*self._at_once, *self._index.take_to_refresh()]
        self._at_once.clear()
        for keys in self._prefixes.values():
            if len(keys) > _FIRST_CHUNK:
                self._submit(keys, len(keys), self._ask_in_chunks)
            else:
                at_once += keys
        self._prefixes.clear()
        if at_once:
            self._submit(at_once, _SLICE, self._contains)

    def _submit(
        self, keys: list[OffloadKey], slice_keys: int, call: Callable[[Sequence[OffloadKey]], list[bool]]
    ) -> None:
        answers: dict[int, list[bool]] = {}

        def ask(start: int, stop: int) -> list[bool]:
            found = answers[start] = call(keys[start:stop])
            return found + [False] * (stop - start - len(found))

        def on_result(result: IoResult) -> None:
            self._asking.difference_update(result.keys)
            if result.status is IoStatus.OVERDUE:
                self._index.begin_hang(result.keys)
            else:
                self._index.end_hang(result.keys)
            self._reads.record(result)
            if result.status is IoStatus.DONE:
                found = answers.pop(result.start)
                for key, is_present in zip(result.keys, found):
                    self._index.record_answer(key, is_present)
                self._go_on(result.keys[len(found) :], all(found))

        self._runner.submit(IoTask(IoQueue.LOOKUP, len(keys), ask, keys, on_result), slice_keys)

    def _go_on(self, rest: Sequence[OffloadKey], is_present_before: bool) -> None:
        """Continue with the ``rest`` of a prefix, which the store was not asked for."""
        if rest and is_present_before:
            self._asking.update(rest)
            self._submit([*rest], _SLICE, self._contains)
            return
        if len(self._skipped) >= _MAX_SKIPPED:
            self._skipped.clear()
        self._skipped.update(rest)

    def _contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return the store's answers. They come from foreign code, so they may be an array, for example, or too few.
        Runs in an I/O thread."""
        found = [bool(is_present) for is_present in self._store.contains(keys)]
        if len(found) != len(keys):
            raise ValueError(f"{len(found)} answers for {len(keys)} blocks")
        return found

    def _ask_in_chunks(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return the answers for ``keys`` up to the end of the chunk with the first missing block, but at most 1,024
        answers. Runs in an I/O thread."""
        answers, size = list[bool](), _FIRST_CHUNK
        keys = keys[:_MOST_IN_CHUNKS]
        while len(answers) < len(keys):
            found = self._contains(keys[len(answers) : len(answers) + size])
            answers += found
            if not all(found):
                break
            size *= _GROWTH
        return answers
