# SPDX-License-Identifier: Apache-2.0
"""Count the functions, classes and files that one hit from disk involves, from its arrival to its end::

    python -m tests.integration.hit_path [--list]

Code counts if three hits have it in common, on any thread. A class counts if one of its functions ran. Lambdas and
generator expressions belong to the function around them. The engine and its copies are fakes.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from tests.integration.served_tiers import BLOCK_TOKENS, ServedTiers

import kvoffload
from kvoffload.tiering.load_policy import BlockWorth

ROOT = Path(kvoffload.__file__).parent
BLOCKS = 8


class _Quiet(ServedTiers):
    def step(self) -> None:
        self.engine.step()
        for handler in self.handlers:
            for job_id in handler.pending:
                handler.run(job_id)
        time.sleep(0.02)  # an engine that is slower than a busy disk


def functions_of_a_hit() -> set[CodeType]:
    called: set[CodeType] = set()
    is_counting = False

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and is_counting:
            called.add(frame.f_code)

    worth = BlockWorth(ServedTiers.block_bytes, (BLOCK_TOKENS,), prefill_tokens_per_s=100.0)
    threading.setprofile(profile)  # the tier's threads begin below
    sys.setprofile(profile)
    with tempfile.TemporaryDirectory() as folder:
        served = _Quiet(Path(folder), 2 * BLOCKS, block_worth=worth)
        served.serve(rounds=2)  # more than host memory, so that the first prompt is only on disk
        found = 0.0
        hits: list[set[CodeType]] = []
        for n in range(40):  # a busy disk may be too slow
            called.clear()
            is_counting = True
            served.finish(served.ask(n % 4, BLOCKS))
            served.drain()
            is_counting = False
            before, found = found, served.engine.connector.get_stats().get(("tier_hit_tokens", "disk"), 0.0)
            if n and found > before:
                hits.append(set(called))
            if len(hits) == 3:
                break
        else:
            raise SystemExit("No three hits came from disk. Try again on a quieter machine.")
        served.close()
    sys.setprofile(None)
    threading.setprofile(None)
    return set.intersection(*hits)


def main() -> None:
    names: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    files: set[str] = set()
    classes: set[str] = set()
    for code in functions_of_a_hit():
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT):
            continue
        file, name = str(path.relative_to(ROOT)), code.co_qualname.split(".<locals>")[0]
        if name.startswith("<"):
            continue
        files.add(file)
        owner, _, _ = name.rpartition(".")
        if owner:
            classes.add(f"{file}::{owner}")
        if f"{file}::{name}" not in names:
            rooms[file.split("/")[0]] += 1
        names[f"{file}::{name}"] += 1
    if "--list" in sys.argv:
        print(*sorted(names), sep="\n")
    print(f"{len(names)} functions, {len(classes)} classes, {len(files)} files; functions by room: {dict(rooms)}")


if __name__ == "__main__":
    main()
