# SPDX-License-Identifier: Apache-2.0
"""Serve traffic for minutes or hours while everything around the disk fails: ``make soak MINUTES=60``.

A reference engine (or vLLM) serves conversations over host memory and two disk tiers that are too small for them. Every
generated token is compared with an engine that offloads nothing. A second engine in its own process works on the same
directories. At random and repeatedly, that neighbour is killed or stopped; files are damaged, cut short, replaced or
deleted; the directories disappear; reads and writes fail or take seconds (through a C library in front of the real
one); quotas change; requests are aborted; caches are reset; and the engine is restarted.

The exit code is 0 if no token was wrong, no exception reached a step, no request was delayed for longer than
``max_wait_s``, requests kept finishing, and memory, descriptors and threads stayed constant after the first third. The
seed is printed. The same seed draws the same faults, although threads and the machine decide when they occur.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import heapq
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.soak.server import HANG_S, MAX_WAIT_S, ReferenceServer, Server, Turn, make_turns

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.fs.admin import StoreRoot

FAULT_EVERY_S = 0.7
SAMPLE_EVERY_S = 5.0
CALM_S = 4.0
"""Without faults, before the end: longer than any call hangs."""


# ------------------------------------------------------------------------------------------------------ the neighbour


def be_neighbour(root: Path, turns_file: Path, seed: int, quota_bytes: int) -> None:
    """A reference engine that serves until it is killed. Leaves with an exit code if it generates a wrong token."""
    turns = [Turn(**each) for each in json.loads(turns_file.read_text())]
    server = ReferenceServer(root, turns, random.Random(seed), quota_bytes)
    parent = os.getppid()
    while os.getppid() == parent:
        server.step()
        if server.served.wrong:
            sys.exit(f"the neighbour generated {server.served.wrong[0]}")


class Neighbour:
    """That process, from outside."""

    def __init__(self, root: Path, turns_file: Path, chance: random.Random, quotas_bytes: Sequence[int]) -> None:
        self._root, self._turns_file, self._chance, self._quotas_bytes = root, turns_file, chance, quotas_bytes
        self.failures: list[str] = []
        self._log = turns_file.with_name("neighbour.log")
        self._start()

    def _start(self) -> None:
        arguments = ["--neighbour", str(self._root), str(self._turns_file)]
        arguments += [str(self._chance.randrange(1 << 30)), str(self._chance.choice(self._quotas_bytes))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.soak", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=self._log.open("w"),
        )

    def kill(self) -> None:
        self._end()
        self._start()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _end(self) -> None:
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        if code is not None:
            self.failures.append(f"the neighbour ended by itself: {code}: {self._log.read_text()[-2000:]}")

    def end(self) -> None:
        self._end()


# --------------------------------------------------------------------------------------------------------- the faults


class Faults:
    """One fault after the other, drawn by chance. Some heal after a while."""

    def __init__(self, server: Server, neighbour: Neighbour, root: Path, plan: Path | None, seed: int) -> None:
        self._server, self._neighbour, self._root, self._plan = server, neighbour, root, plan
        self._chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._healing: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._active: set[str] = set()
        # Links lead to this file, which nobody may write to, and where nothing is lost if somebody does.
        self._victim, self._victims_content = root.with_name("victim"), self._chance.randbytes(4096)
        self._victim.write_bytes(self._victims_content)
        self._kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "file damaged": (6, lambda: self._on_file(self._damage)),
            "file cut short": (4, lambda: self._on_file(self._cut)),
            "file deleted": (4, lambda: self._on_file(Path.unlink)),
            "file replaced by a link": (2, lambda: self._on_file(self._link)),
            "file replaced by another": (3, lambda: self._on_file(self._swap)),
            "directory deleted": (1, self._delete_directory),
            "root moved away": (1, self._move_root),
            "neighbour killed": (1, self._neighbour.kill),
            "neighbour stopped": (2, self._stop_neighbour),
            "request aborted": (6, self._server.abort_one),
            "cache reset": (3, self._reset),
            "store cleared": (1, self._clear),
        }
        if isinstance(server, ReferenceServer):  # vLLM takes too long
            self._kinds["engine restarted"] = 1, lambda: server.restart(self._chance.choice(server.quotas_bytes))
        if plan is not None:
            self._kinds |= {
                "reads fail": (2, lambda: self._fail("read", errno.EIO)),
                "writes fail": (2, lambda: self._fail("write", errno.EIO)),
                "disk full": (2, lambda: self._fail("write", errno.ENOSPC)),
                "reads hang": (1, lambda: self._fail("read", 0, self._chance.choice([100, 3000]))),
                "writes hang": (1, lambda: self._fail("write", 0, self._chance.choice([100, 3000]))),
            }

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    def strike(self) -> None:
        # The rare ones first, so that a short run has one of each.
        unseen = [kind for kind in self._kinds if not self.counts[kind]]
        weights = [weight for weight, _ in self._kinds.values()]
        kind = unseen[-1] if unseen else self._chance.choices(list(self._kinds), weights)[0]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the neighbour was there first
            self._kinds[kind][1]()
        self.counts[kind] += 1

    @property
    def wrote_through_a_link(self) -> bool:
        return self._victim.read_bytes() != self._victims_content

    def heal(self, now_s: float = float("inf")) -> None:
        while self._healing and self._healing[0][0] <= now_s:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # healed by another fault
                heapq.heappop(self._healing)[2]()

    def _later(self, low_s: float, high_s: float, heal: Callable[[], None]) -> None:
        due_s = time.monotonic() + self._chance.uniform(low_s, high_s)
        heapq.heappush(self._healing, (due_s, next(self._numbers), heal))

    def _once(self, name: str, low_s: float, high_s: float, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Unless it is so already."""
        if name in self._active:
            return

        def heal() -> None:
            self._active.discard(name)
            end()

        begin()
        self._active.add(name)
        self._later(low_s, high_s, heal)

    def _on_file(self, spoil: Callable[[Path], object]) -> None:
        files = sorted(path for path in self._root.rglob("*") if path.is_file() and not path.is_symlink())
        if files:
            spoil(self._chance.choice(files))

    def _damage(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(self._chance.randrange(max(1, path.stat().st_size)))
            file.write(self._chance.randbytes(self._chance.randint(1, 64)))

    def _cut(self, path: Path) -> None:
        os.truncate(path, self._chance.randrange(max(1, path.stat().st_size)))

    def _link(self, path: Path) -> None:
        """Nothing is read or written through it, so that a tier may be out of use until somebody removes it."""
        path.unlink()
        path.symlink_to(self._chance.choice([str(self._victim), str(path), "nowhere"]))
        self._later(1, 10, lambda: path.unlink() if path.is_symlink() else None)

    def _swap(self, path: Path) -> None:
        self._on_file(lambda other: shutil.copyfile(other, path) if other != path else None)

    def _delete_directory(self) -> None:
        directories = [path for path in self._root.rglob("*") if path.is_dir()]
        if directories:
            shutil.rmtree(self._chance.choice(sorted(directories)), ignore_errors=True)

    def _move_root(self) -> None:
        away = self._root.with_name("away")

        def back() -> None:
            shutil.rmtree(self._root, ignore_errors=True)  # a neighbour that started meanwhile has made a new one
            with contextlib.suppress(OSError):
                away.rename(self._root)

        self._once("root", 0.2, 2, lambda: away.exists() or self._root.rename(away), back)

    def _stop_neighbour(self) -> None:
        self._once("stopped", 0.5, 6, self._neighbour.stop, self._neighbour.resume)

    def _reset(self) -> None:
        device = self._chance.random() < 0.7
        self._server.reset(device=device, offloaded=not device or self._chance.random() < 0.5)

    def _clear(self) -> None:
        with contextlib.suppress(ConfigError, OSError):  # other faults have made the directory unfit
            root = StoreRoot(self._root / "files")
            for directory in root.directories():
                root.clear(directory)

    def _fail(self, call: str, number: int, milliseconds: int = 0) -> None:
        plan = self._plan
        assert plan is not None

        def write(text: str) -> None:
            new = plan.with_suffix(".new")
            new.write_text(text)
            new.replace(plan)

        line = f"{call} {number} {self._chance.choice([5, 50, 100])} {milliseconds}\n"
        self._once("plan", 0.5, 5, lambda: write(line), lambda: write(""))


# ------------------------------------------------------------------------------------------------------------ the run


@dataclass(frozen=True, slots=True)
class Sample:
    rss_mib: float
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Sample:
        process = psutil.Process()
        return Sample(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())


def flat(samples: list[Sample], rss_share: float = 1.05) -> list[str]:
    """Return the measures that grew from the second third of the run to the last, memory by more than ``rss_share`` and
    a little.

    Too few samples prove nothing.
    """
    third = len(samples) // 3
    if third < 8:
        return []
    grown = []
    for name, share, more in (("rss_mib", rss_share, 16), ("descriptors", 1.1, 16), ("threads", 1.0, 4)):
        middle, last = (
            statistics.median(getattr(each, name) for each in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        if last > share * middle + more:
            grown.append(f"{name} grew from {middle:.0f} to {last:.0f}")
    return grown


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    directory = Path(os.environ.get("KVOFFLOAD_SOAK_DIR", tempfile.gettempdir())) / f"kvoffload-soak-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def soak(minutes: float, seed: int, engine: str, root: Path, plan: Path | None) -> int:
    chance, begin_s = random.Random(seed), time.monotonic()
    turns = make_turns(seed)
    turns_file = root.with_name("turns.json")
    turns_file.write_text(json.dumps([{"prompt": turn.prompt, "reply": turn.reply} for turn in turns]))
    kind: type[Server] = ReferenceServer
    if engine == "vllm":
        from tests.soak.vllm_server import VLLMServer, make_vllm_turns

        kind, turns = VLLMServer, make_vllm_turns(root.with_name("model"))
    print(f"seed {seed}: {len(turns)} turns; {'with' if plan else 'without (no C compiler)'} failing calls", flush=True)
    server = kind(root, turns, random.Random(chance.random()), kind.quotas_bytes[1])
    neighbour = Neighbour(root, turns_file, chance, kind.quotas_bytes)
    faults = Faults(server, neighbour, root, plan, chance.randrange(1 << 30))
    samples: list[Sample] = []
    problems: list[str] = []
    next_fault_s = next_sample_s = next_line_s = time.monotonic() + 3
    end_s = time.monotonic() + 60 * minutes
    try:
        while (now_s := time.monotonic()) < end_s:
            server.step()
            faults.heal(now_s)
            if now_s >= next_fault_s:
                faults.strike()
                next_fault_s = time.monotonic() + chance.expovariate(1 / FAULT_EVERY_S)
            if now_s >= next_sample_s:
                samples.append(Sample.now())
                next_sample_s = now_s + SAMPLE_EVERY_S
            if now_s >= next_line_s:
                print(line(server, faults, samples, now_s - begin_s), flush=True)
                next_line_s = now_s + 30
            if now_s - server.served.last_finished_s > HANG_S:
                problems.append(f"no request finished in {HANG_S:.0f} s")
                break
            if server.served.wrong:
                break
    finally:
        faults.heal()
        neighbour.end()
    calm_until_s = time.monotonic() + CALM_S
    while time.monotonic() < calm_until_s:
        server.step()
    server.end()
    problems += [f"wrong tokens: {wrong}" for wrong in server.served.wrong]
    problems += [f"raised: {each}" for each in server.exceptions] + neighbour.failures
    problems += flat(samples, server.rss_share)
    if faults.wrote_through_a_link:
        problems.append("a file was written through a link that lay in its place")
    if server.longest_wait_s > MAX_WAIT_S:
        problems.append(f"a request was put off for {server.longest_wait_s:.3f} s, and max_wait_s is {MAX_WAIT_S}")
    if unseen := [kind for kind in faults.kinds if not faults.counts[kind]]:
        print(f"too short for: {', '.join(unseen)}")
    print(line(server, faults, samples, time.monotonic() - begin_s))
    for kind in faults.kinds:
        print(f"  {faults.counts[kind]:6,}  {kind}")
    print(
        f"{server.num_waits:,} waits, the longest {server.longest_wait_s:.3f} s of at most {MAX_WAIT_S} s; "
        f"{len(server.served.wrong)} wrong tokens."
    )
    for problem in problems:
        print(f"FAILED (seed {seed}): {problem}")
    return 1 if problems else 0


def line(server: Server, faults: Faults, samples: list[Sample], seconds: float) -> str:
    served, last = server.served, samples[-1] if samples else Sample.now()
    return (
        f"{seconds:6.0f} s: {served.requests:,} requests, {served.tokens:,} tokens, {served.hit_tokens:,} hit, "
        f"{served.aborted:,} aborted, {faults.counts.total():,} faults, {last.rss_mib:.0f} MiB, "
        f"{last.descriptors} descriptors, {last.threads} threads"
    )


def main() -> int:
    if sys.argv[1:2] == ["--neighbour"]:
        root, turns_file, number, quota_bytes = sys.argv[2:]
        be_neighbour(Path(root), Path(turns_file), int(number), int(quota_bytes))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", choices=["reference", "vllm"], default="reference")
    arguments = parser.parse_args()
    if plan := os.environ.get("KVO_SOAK_PLAN"):
        root = Path(os.environ["KVO_SOAK_ROOT"])
        return soak(arguments.minutes, arguments.seed, arguments.engine, root, Path(plan))
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 30)
    with workplace() as directory:
        if (compiler := shutil.which("cc")) is None:
            return soak(arguments.minutes, seed, arguments.engine, directory / "kv", None)
        library, plan_file = directory / "faults.so", directory / "plan"
        source = Path(__file__).with_name("faults.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        plan_file.touch()
        environment: dict[str, Any] = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "KVO_SOAK_PLAN": str(plan_file),
            "KVO_SOAK_ROOT": str(directory / "kv"),
        }
        command = [sys.executable, "-m", "tests.soak.soak", "--minutes", str(arguments.minutes)]
        command += ["--seed", str(seed), "--engine", arguments.engine]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
