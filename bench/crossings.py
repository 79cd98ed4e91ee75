# SPDX-License-Identifier: Apache-2.0
"""How many source files one block crosses on its way to disk and back, and how often its way changes files.

*store*: a block that has been computed is copied to host memory and cascades to an ``fs`` tier. *load*: host memory has
forgotten it; a second request with the same tokens looks it up, has it promoted and loads it. A thread is in the file
of the innermost kvoffload function on its stack. Each time that file differs from the one before is a change. Functions
elsewhere, and in ``kvoffload.testing``, do not count; neither does the beginning of a thread.

All I/O of a step ends within the step, and what happens only once (imports, compilation, directories) has happened
before. So the figures depend on the code alone: two runs print the same.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import kvoffload
from bench.core import Row
from kvoffload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, parse_config
from kvoffload.connector import EngineStep, OffloadingConnectorScheduler, OffloadingConnectorWorker, ScheduledRequest
from kvoffload.specs import make_spec
from kvoffload.testing.fake_request import FakeRequest

BLOCK = 16
WARM_UPS = 1
IO_S = 0.05
"""Any I/O of one block ends in this time."""
UPKEEP_S = 1.1
"""After this time a tier passes on in its next step what was used. So that is part of every load."""
PACKAGE = Path(kvoffload.__file__).parent


class Recorder:
    """The files that each thread goes through while ``is_on``. To be made before any thread starts."""

    def __init__(self) -> None:
        self.is_on = False
        self.trails: dict[int, list[str]] = {}
        self._files: dict[str, str | None] = {}
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        at = frame if event == "call" else frame.f_back
        file = None
        while at is not None and (file := self._file_of(at)) is None:
            at = at.f_back
        if file is not None:
            trail = self.trails.setdefault(threading.get_ident(), [])
            if trail[-1:] != [file]:
                trail.append(file)

    def _file_of(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._files:
            path = Path(name)
            is_ours = path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "testing")
            self._files[name] = str(path.relative_to(PACKAGE)) if is_ours else None
        return self._files[name]


class Engine:
    """As much of one as a single request needs: both sides of the connector, and a KV cache of a few blocks."""

    def __init__(self, recorder: Recorder, root: Path, page_bytes: int, index_blocks: int) -> None:
        self._recorder = recorder
        tier: dict[str, Any] = {"type": "fs", "path": str(root), "max_bytes": "1GiB", "cascade": "on_store"}
        tier |= {"threads": 1, "max_index_blocks": index_blocks}  # one thread, so that none is new to its work
        options: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 * page_bytes}
        config = parse_config(options | {"secondary_tiers": [tier]})
        layout = EngineLayout((KVGroupLayout(GroupKind.FULL_ATTENTION, BLOCK, page_bytes),), BLOCK, "crossings")
        self._pages = torch.zeros((4, page_bytes), dtype=torch.int8)
        self._spec = make_spec(config, layout)
        self._scheduler = OffloadingConnectorScheduler(self._spec.get_manager(), layout, config)
        self._worker = OffloadingConnectorWorker()
        tensors, refs = [CanonicalKVCacheTensor(self._pages, page_bytes)], [[CanonicalKVCacheRef(0, page_bytes)]]
        self._worker.register_kv_caches(self._spec, CanonicalKVCaches(tensors, refs))
        self._steps = self._ask_again = 0

    def round(self, number: int) -> list[dict[str, Any]]:
        """Both phases with a block of its own, each begun with nothing else to do."""
        tokens = [number] * BLOCK
        self._settle()
        content = self._pages[0] = torch.randint(-128, 128, self._pages.shape[1:], dtype=torch.int8)
        stored = self._record("store", self._store, FakeRequest(f"store-{number}", tokens, 1, BLOCK))
        # Takes the block's place in the tier's index, so that the disk has to be asked.
        self._store(FakeRequest(f"other-{number}", [-1 - number] * BLOCK, 1, BLOCK))
        self._scheduler.reset_cache()
        self._pages.zero_()
        self._settle()
        # One token more, since the last one of a prompt is never part of a hit.
        again = FakeRequest(f"load-{number}", [*tokens, 0], 1, BLOCK)
        loaded = self._record("load", self._load, again)
        assert torch.equal(self._pages[1], content), "what was loaded is not what was stored"
        self._scheduler.request_finished(again)
        return [stored, loaded]

    def shutdown(self) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()
        self._spec.shutdown()

    def _record(self, name: str, phase: Callable[[FakeRequest], None], request: FakeRequest) -> dict[str, Any]:
        self._recorder.trails = {}
        self._steps = self._ask_again = 0
        self._recorder.is_on = False
        phase(request)
        self._recorder.is_on = False
        files = sorted({file for trail in self._recorder.trails.values() for file in trail})
        changes = sum(len(trail) - 1 for trail in self._recorder.trails.values())
        steps = {"steps": self._steps, "ask_again": self._ask_again}
        return {"phase": name, "num_files": len(files), "changes": changes, **steps, "files": files}

    def _store(self, request: FakeRequest) -> None:
        """Computes a block in the first step, and steps on until it is on the disk."""
        self._scheduler.on_new_request(request)
        assert self._scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self._scheduler.update_state_after_alloc(request, ((0,),), 0)
        self._step(ScheduledRequest(request.request_id, ((0,),), 0, BLOCK, block_table_is_new=True))
        while self._scheduler.has_pending_work():
            self._step()
        self._recorder.is_on = False
        self._scheduler.request_finished(request)

    def _load(self, request: FakeRequest) -> None:
        """Steps until the lookup has its answer, then until the block is on the device."""
        self._scheduler.on_new_request(request)
        self._recorder.is_on = True
        while (answer := self._scheduler.get_num_new_matched_tokens(request, 0)) == (None, False):
            self._ask_again += 1
            self._step()
        assert answer == (BLOCK, True), f"not a hit: {answer}"
        self._scheduler.update_state_after_alloc(request, ((1, 2),), BLOCK)
        while request.request_id not in self._step():
            pass

    def _step(self, *scheduled: ScheduledRequest) -> frozenset[str]:
        """A step that all I/O ends in; the requests whose loads ended."""
        self._steps += 1
        self._worker.start_step(self._scheduler.build_connector_meta(EngineStep(scheduled)))
        self._recorder.is_on = True
        self._worker.end_step()
        time.sleep(IO_S)
        outcome = self._scheduler.update_connector_output(self._worker.get_report())
        time.sleep(IO_S)
        assert not outcome.failed_loads
        return outcome.loaded_request_ids

    def _settle(self) -> None:
        time.sleep(UPKEEP_S)
        self._step()
        time.sleep(UPKEEP_S)


def run(short: bool) -> list[Row]:
    rows = []
    for phase in measure(64 << 10, index_blocks=1, warm_ups=0 if short else WARM_UPS):
        name, steps = phase["phase"], phase["steps"]
        rows.append(Row("crossings", f"{name}, source files", phase["num_files"], "files", f"{steps} steps"))
        rows.append(Row("crossings", f"{name}, changes of file", phase["changes"], "changes", f"{steps} steps"))
    return rows


def measure(page_bytes: int, index_blocks: int, warm_ups: int) -> list[dict[str, Any]]:
    """The figures of each phase, with the sorted names of its files. ``index_blocks`` of 1: the tier's index has
    forgotten the block, so the disk is asked for it."""
    recorder = Recorder()
    try:
        with tempfile.TemporaryDirectory() as root:
            # The first engine makes the directories that the blocks of the second one lie in; its files are deleted.
            for _ in range(1 + warm_ups):
                for file in [path for path in Path(root).rglob("*") if path.is_file()]:
                    file.unlink()
                engine = Engine(recorder, Path(root), page_bytes, index_blocks)
                phases = [engine.round(number) for number in range(warm_ups + 1)][-1]
                engine.shutdown()
        return phases
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
