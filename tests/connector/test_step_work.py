# SPDX-License-Identifier: Apache-2.0
"""Test ``StepWork``, which tells a manager about each step."""

from __future__ import annotations

from tests.connector.rig import Request, Rig

from kvoffload.base import StepWork
from kvoffload.connector.engine import ScheduledRequest


class NotingRig(Rig):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted: list[StepWork] = []
        self.manager.note_step = self.noted.append  # type: ignore[method-assign]


def test_prompts_decodes_and_what_is_left() -> None:
    rig = NotingRig()
    long, short = Request("long", 100, "a"), Request("short", 10, "b")
    for request in (long, short):
        rig.arrive(request)
        rig.ask(request)
        rig.alloc(request, range(100, 100))
    rig.step(ScheduledRequest("long", ((),), 0, 40, True), ScheduledRequest("short", ((),), 0, 10, True))
    rig.step(ScheduledRequest("long", (), 40, 50), ScheduledRequest("short", (), 10, 1))
    rig.step(ScheduledRequest("long", (), 90, 12), ScheduledRequest("short", (), 11, 3))  # with drafts
    rig.step()
    assert rig.noted == [
        StepWork(50, 50, 60, is_continued=False, context_tokens=850),
        StepWork(51, 50, 10, is_continued=True, context_tokens=3250),
        StepWork(15, 10, 0, is_continued=True, context_tokens=950),
        StepWork(),
    ]
