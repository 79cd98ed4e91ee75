# SPDX-License-Identifier: Apache-2.0
"""How fast links and the engine are, estimated from their own work.

Estimates are medians over the last moments. So a stall now and then does not count, and a lasting change does as soon
as most of what was seen lately shows it; a large one of a link, once two reads in a row do. In a quiet period the last
samples are kept, however old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import inf
from statistics import median

from kvoffload.base import StepWork
from kvoffload.tiering.worth import Pace

_WINDOW = 24
_WINDOW_S = 15.0
_KEPT = 3
_CHANGE = 3.0
"""A link has changed when two reads in a row took this many times as long as those before, or that part of it."""
_ANSWERS = 7
"""Answers whose median says how long the next one takes."""
_CLOSE_S, _CLOSE = 0.002, 0.25
"""An answer has a time if that is known to so many seconds, or to this share of it."""
_SIZES_DIFFER = 2
"""Samples whose sizes differ by less than this factor cannot separate latency from bandwidth."""
_MIN_STEP_TOKENS = 16
_LARGE = 0.5
"""Steps of at least this share of the largest one say how fast the engine is."""
_LARGEST_S = 600.0
"""After so long without a large step, the next one counts as the largest."""


class _Window:
    """The samples of the last ``_WINDOW_S`` seconds, at most ``_WINDOW`` of them and at least ``_KEPT``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._added_s: deque[float] = deque(maxlen=_WINDOW)

    def add(self, sample: tuple[float, float]) -> Collection[tuple[float, float]]:
        """Adds one, and returns all that are left, until the next is added."""
        now_s = self._clock()
        self._samples.append(sample)
        self._added_s.append(now_s)
        while len(self._samples) > _KEPT and self._added_s[0] < now_s - _WINDOW_S:
            self._samples.popleft()
            self._added_s.popleft()
        return self._samples

    def keep(self, count: int) -> None:
        """Forgets all but the last ``count``."""
        while len(self._samples) > count:
            self._samples.popleft()
            self._added_s.popleft()

    @property
    def newest_s(self) -> float:
        """When the last one was added."""
        return self._added_s[-1] if self._added_s else float("-inf")


def fit_link(samples: Collection[tuple[float, float]]) -> Pace:
    """The line through samples of (blocks, seconds): Tukey's resistant line, through the medians of the smallest third
    and of the largest third. (J. W. Tukey, "Exploratory Data Analysis", 1977.)

    No block is faster than in the fastest sample, and no sample than the latency. If the sizes hardly differ, the
    latency is taken for a part of what a block takes.
    """
    ordered = sorted(samples)
    third = (len(ordered) + 2) // 3
    small, large = ordered[:third], ordered[-third:]
    low, high = median([size for size, _ in small]), median([size for size, _ in large])
    per_block = [seconds / size for size, seconds in ordered]
    if high < _SIZES_DIFFER * low:
        return Pace(0.0, median(per_block))
    rise_s = median([seconds for _, seconds in large]) - median([seconds for _, seconds in small])
    block_s = max(rise_s / (high - low), min(per_block))
    first_s = median([seconds - size * block_s for size, seconds in ordered])
    return Pace(min(max(0.0, first_s), *[seconds for _, seconds in ordered]), block_s)


def _has_changed(samples: Sequence[tuple[float, float]]) -> bool:
    """Whether the last two samples of (blocks, seconds) are both slower than those before them, or both faster.

    The ones before may be of another size. They are scaled to it twice, as if all of their time was latency and as if
    none was: a sample has changed if it differs from both by ``_CHANGE``.
    """
    *before, one, last = samples

    def change(size: float, seconds: float) -> int:
        most_s = median([each_s * max(1.0, size / each) for each, each_s in before])
        least_s = median([each_s * min(1.0, size / each) for each, each_s in before])
        return (seconds > _CHANGE * most_s) - (seconds * _CHANGE < least_s)

    return (newest := change(*last)) != 0 and change(*one) == newest


def weighted_median(values: Collection[tuple[float, float]]) -> float:
    """The median of (value, weight): half of the weight lies at smaller values, or at this one."""
    half = sum([weight for _, weight in values]) / 2
    passed = 0.0
    for value, weight in sorted(values):
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")


class LinkSpeedEstimator:
    """Latency and bandwidth of a link. Before the first sample ``speed`` is what is ``expected``, if anything is."""

    def __init__(self, clock: Callable[[], float], expected: Pace | None = None) -> None:
        self._speed = expected
        self._new: Collection[tuple[float, float]] = ()
        """Samples that ``_speed`` does not count yet."""
        self.measured_s = float("-inf")
        """When the last sample was added."""
        self.num_samples = 0
        self._clock = clock
        self._window = _Window(clock)

    def add(self, num_blocks: float, seconds: float) -> bool:
        """``num_blocks`` took ``seconds`` while nothing was queued before them. Returns whether the link has changed:
        what was seen before the last two samples counts no longer."""
        self._new = samples = self._window.add((num_blocks, max(seconds, 1e-9)))
        self.measured_s = self._clock()
        self.num_samples += 1
        is_changed = len(samples) > 2 and _has_changed([*samples])
        if is_changed:
            self._window.keep(2)
        return is_changed

    @property
    def speed(self) -> Pace | None:
        """``None``: nothing was measured, and nothing expected."""
        if self._new:
            self._speed, self._new = fit_link(self._new), ()
        return self._speed


class AnswerEstimator:
    """How long a store takes to say whether it has a block, and how often it has one that no other tier is known to
    have.

    An answer is seen when it is asked for again, and so is that there is none yet. Where these are far apart, it is
    only known that the answer took longer than the one and no longer than the other.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_ANSWERS)
        self._found: deque[bool] = deque(maxlen=_WINDOW)
        self._least_s: float | None = None

    def add(self, least_s: float, seconds: float, is_found: bool | None) -> None:
        """An answer came after ``least_s`` and within ``seconds``; ``None``: none came."""
        if is_found is not None:
            self._found.append(is_found)
        usual_s = self.seconds
        if seconds < inf and seconds - least_s <= max(_CLOSE_S, _CLOSE * seconds):
            self._seconds.append(seconds)
        elif usual_s is None or not self._seconds:
            self._least_s = max(least_s, usual_s or 0.0)
        elif least_s > usual_s or seconds < usual_s:
            self._seconds.append(max(least_s, min(seconds, usual_s)))

    @property
    def seconds(self) -> float | None:
        """``None``: none was seen yet."""
        return median(self._seconds) if self._seconds else self._least_s

    @property
    def found_share(self) -> float:
        """As if one more block had been found, and one more had not."""
        return (1 + sum(self._found)) / (2 + len(self._found))


class PrefillSpeedEstimator:
    """How many tokens the engine computes in a second, while it computes prompts.

    A step's duration is seen only from when later steps are decided: the next one, or, where an engine decides one step
    ahead of its results, the one after that. So it is the longer of the two intervals that follow it, and both count
    only if the engine did not idle in between.

    Among large steps, larger ones count for more. What a small step takes is mostly overhead, so small ones can show
    that the engine is faster than the large ones say, and never that it is slower. Otherwise an engine whose prompts
    are mostly found would look slow, load whatever it finds, compute only what is left of prompts, and so look slow.
    Before the first such step ``tokens_per_s`` is what is ``expected``, if anything is. Medians are computed when they
    are asked for.
    """

    def __init__(self, clock: Callable[[], float], expected: float | None = None) -> None:
        self._expected = expected
        self.queued_tokens = 0
        """Prompt tokens of running requests that the last step left for later ones."""
        self._clock = clock
        self._large, self._small = _Window(clock), _Window(clock)
        self._largest_tokens = 0
        self._speeds = [0.0, 0.0]
        """By the large steps, and by the small ones."""
        self._new: list[Collection[tuple[float, float]]] = [(), ()]
        """Samples of each that ``_speeds`` does not count yet."""
        self._steps: list[tuple[float, StepWork]] = []
        """The last steps, at most two, without a pause between them."""

    def note_step(self, work: StepWork) -> None:
        """A step was decided."""
        now_s = self._clock()
        self.queued_tokens = work.queued_tokens
        if not work.is_continued:
            self._steps.clear()
        elif len(self._steps) == 2:
            (first_s, first), (second_s, _) = self._steps
            seconds = max(second_s - first_s, now_s - second_s)
            if first.prompt_tokens >= _MIN_STEP_TOKENS and seconds > 0:
                self._add(first.tokens, seconds)
            del self._steps[0]
        self._steps.append((now_s, work))

    def _add(self, tokens: int, seconds: float) -> None:
        now_s = self._clock()
        if now_s - self._large.newest_s >= _LARGEST_S:
            self._largest_tokens = 0
        is_small = tokens < _LARGE * self._largest_tokens
        sample = tokens / max(seconds, 1e-9), tokens
        self._new[is_small] = (self._small if is_small else self._large).add(sample)
        if not is_small:
            self._largest_tokens = max(self._largest_tokens, tokens)
            if now_s - self._small.newest_s >= _WINDOW_S:
                # What small steps showed long ago says nothing against large ones of today.
                self._speeds[True], self._new[True] = 0.0, ()

    @property
    def tokens_per_s(self) -> float | None:
        """``None``: it was never measured, and nothing was expected."""
        if any(self._new):
            for at, samples in enumerate(self._new):
                if samples:
                    self._speeds[at], self._new[at] = weighted_median(samples), ()
        return max(self._speeds) or self._expected
