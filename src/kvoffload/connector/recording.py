# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side tells a trace recorder about its requests. Scheduler thread only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.requests import RequestOffloadState
from kvoffload.record import TraceRecorder

__all__ = ["RequestRecording"]

logger = logging.getLogger(__name__)


class RequestRecording:
    """Writes a line per request to ``record_trace``: hashes of its prompt's block keys, and lengths.

    ``path`` may contain ``{pid}``, for engines that run several schedulers. Blocks are those of the group with the
    smallest ones. The file is made at once, so a path that cannot be written is a ``ConfigError`` before any request is
    served; after that, whatever fails ends the recording with one logged line and disturbs no step.
    """

    def __init__(
        self, path: str, geometry: Sequence[GroupGeometry], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._geometry = geometry
        self._finest = min(geometry, key=lambda group: group.block_tokens)
        self._recorder: TraceRecorder | None = TraceRecorder(
            path.replace("{pid}", str(os.getpid())), self._finest.block_tokens
        )
        self._clock = clock

    def __repr__(self) -> str:
        return f"RequestRecording({self._recorder})"

    def arrived(self, state: RequestOffloadState) -> None:
        if self._recorder is None:
            return
        try:
            state.extend_keys(self._geometry)
            prompt_tokens = state.request.num_prompt_tokens
            keys = state.groups[self._finest.index].keys[: prompt_tokens // self._finest.block_tokens]
            self._recorder.arrived(state.request_id, self._clock(), keys, prompt_tokens)
        except Exception:  # noqa: BLE001 - recording must never disturb a step
            self._give_up()

    def finished(self, state: RequestOffloadState) -> None:
        if self._recorder is None:
            return
        try:
            request = state.request
            self._recorder.finished(state.request_id, max(request.num_tokens - request.num_prompt_tokens, 0))
        except Exception:  # noqa: BLE001 - recording must never disturb a step
            self._give_up()

    def close(self) -> None:
        """Writes down the requests that have not finished, too. Idempotent."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _give_up(self) -> None:
        logger.exception("Recording the trace failed; it ends here, and serving goes on.")
        try:
            self.close()
        except Exception:
            logger.exception("The trace could not be closed.")
