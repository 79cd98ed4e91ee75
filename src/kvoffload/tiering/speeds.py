# SPDX-License-Identifier: Apache-2.0
"""Estimate the speeds of links and of the engine from their own work.

Estimates are medians over recent samples. So an occasional stall does not count, and a lasting change counts as soon as
most recent samples show it. A large change of a link counts after two reads in a row. In a quiet period, the last
samples are kept, however old they are.
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
"""A link has changed if two reads in a row were slower or faster than the earlier ones by this factor."""
_ANSWERS = 7
"""Number of answers whose median predicts the time of the next one."""
_CLOSE_S, _CLOSE = 0.002, 0.25
"""An answer counts as a sample if its time is known within this number of seconds, or within this share of it."""
_SIZES_DIFFER = 2
"""Samples whose sizes differ by less than this factor cannot separate latency from bandwidth."""
_MIN_STEP_TOKENS = 16
_LEAST_STEPS = 9
_LEAST_DISTANCE = 1024
"""Steps show how a token's time rises with its position if there are so many of them, and if they are so many positions
apart, ..."""
_CLEAR = 0.1
"""... and if later tokens take longer by this share."""
_LEAST_COST = 0.1
"""No token takes less than this share of the mean, whatever the line says."""
_LARGE = 0.5
"""Steps of at least this share of the largest one determine the engine's speed."""
_LARGEST_S = 600.0
"""After this many seconds without a large step, the next step counts as the largest."""


class _Window:
    """The samples of the last ``_WINDOW_S`` seconds, but at most ``_WINDOW`` and at least ``_KEPT`` of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._added_s: deque[float] = deque(maxlen=_WINDOW)

    def add(self, sample: tuple[float, float]) -> Collection[tuple[float, float]]:
        """Add a sample, and return all remaining samples. The result is valid until the next call."""
        now_s = self._clock()
        self._samples.append(sample)
        self._added_s.append(now_s)
        while len(self._samples) > _KEPT and self._added_s[0] < now_s - _WINDOW_S:
            self._samples.popleft()
            self._added_s.popleft()
        return self._samples

    def keep(self, count: int) -> None:
        """Forget all samples but the last ``count``."""
        while len(self._samples) > count:
            self._samples.popleft()
            self._added_s.popleft()

    @property
    def samples(self) -> Collection[tuple[float, float]]:
        return self._samples

    @property
    def newest_s(self) -> float:
        """The time at which the last sample was added."""
        return self._added_s[-1] if self._added_s else float("-inf")


def _outer_thirds(ordered: Sequence[tuple[float, float]]) -> tuple[Sequence[tuple[float, float]], ...]:
    third = (len(ordered) + 2) // 3
    return ordered[:third], ordered[-third:]


def fit_link(samples: Collection[tuple[float, float]]) -> Pace:
    """Return the line through samples of (blocks, seconds): Tukey's resistant line, which goes through the medians of
    the smallest third and of the largest third. (J. W. Tukey, "Exploratory Data Analysis", 1977.)

    No block is faster than in the fastest sample, and no sample is faster than the latency. If the sizes hardly differ,
    the latency is included in the time per block.
    """
    ordered = sorted(samples)
    small, large = _outer_thirds(ordered)
    low, high = median([size for size, _ in small]), median([size for size, _ in large])
    per_block = [seconds / size for size, seconds in ordered]
    if high < _SIZES_DIFFER * low:
        return Pace(0.0, median(per_block))
    rise_s = median([seconds for _, seconds in large]) - median([seconds for _, seconds in small])
    block_s = max(rise_s / (high - low), min(per_block))
    first_s = median([seconds - size * block_s for size, seconds in ordered])
    return Pace(min(max(0.0, first_s), *[seconds for _, seconds in ordered]), block_s)


def _has_changed(samples: Sequence[tuple[float, float]]) -> bool:
    """Return whether the last two samples of (blocks, seconds) are both slower than earlier ones, or both faster.

    Earlier samples may have another size. They are scaled to the size of the new ones in two ways: as if all of their
    time was latency, and as if none was. A sample has changed if it differs from both by ``_CHANGE``.
    """
    *before, one, last = samples

    def change(size: float, seconds: float) -> int:
        factors = [(each_s, size / each) for each, each_s in before]
        most_s = median([each_s if factor < 1 else each_s * factor for each_s, factor in factors])
        least_s = median([each_s if factor > 1 else each_s * factor for each_s, factor in factors])
        return (seconds > _CHANGE * most_s) - (seconds * _CHANGE < least_s)

    return (newest := change(*last)) != 0 and change(*one) == newest


def weighted_median(values: Collection[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight): half of the weight belongs to smaller values or to this one."""
    half = sum([weight for _, weight in values]) / 2
    passed = 0.0
    for value, weight in sorted(values):
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")


def fit_rise(samples: Collection[tuple[float, float]]) -> tuple[float, float]:
    """Return the median position of samples of (position, seconds per token), and the relative rise of a token's time
    per position, by Tukey's resistant line.

    The rise is 0 if the positions hardly differ, or if the times do not clearly rise with them.
    """
    ordered = sorted(samples)
    if len(ordered) < _LEAST_STEPS:
        return 0.0, 0.0
    first, last = _outer_thirds(ordered)
    low, middle, high = (median([at for at, _ in part]) for part in (first, ordered, last))
    early_s, usual_s, late_s = (median([each_s for _, each_s in part]) for part in (first, ordered, last))
    rise_s = late_s - early_s
    if high - low < _LEAST_DISTANCE or rise_s < _CLEAR * usual_s:
        return middle, 0.0
    return middle, rise_s / (high - low) / usual_s


class LinkSpeedEstimator:
    """Estimates latency and bandwidth of a link. Before the first sample, ``speed`` is the ``expected`` pace, if there
    is one."""

    def __init__(self, clock: Callable[[], float], expected: Pace | None = None) -> None:
        self._speed = expected
        self._new: Collection[tuple[float, float]] = ()
        """Samples that ``_speed`` does not include yet."""
        self.measured_s = float("-inf")
        """The time at which the last sample was added."""
        self.num_samples = 0
        self._clock = clock
        self._window = _Window(clock)

    def add(self, num_blocks: float, seconds: float) -> bool:
        """Add a sample: ``num_blocks`` took ``seconds`` with nothing queued before them. Returns whether the link has
        changed, so that samples before the last two no longer count."""
        self._new = samples = self._window.add((num_blocks, max(seconds, 1e-9)))
        self.measured_s = self._clock()
        self.num_samples += 1
        is_changed = len(samples) > 2 and _has_changed([*samples])
        if is_changed:
            self._window.keep(2)
        return is_changed

    @property
    def speed(self) -> Pace | None:
        """The estimate; ``None`` if nothing was measured and no pace was expected."""
        if self._new:
            self._speed, self._new = fit_link(self._new), ()
        return self._speed


class AnswerEstimator:
    """Estimates the time in which a store answers whether it has a block, and how often it has a block that no other
    tier is known to have.

    An answer, or its absence, is noticed only when somebody asks again. If these questions are far apart, the time of
    the answer is known only to be between them.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_ANSWERS)
        self._found: deque[bool] = deque(maxlen=_WINDOW)
        self._least_s: float | None = None

    def add(self, least_s: float, seconds: float, is_found: bool | None) -> None:
        """Add an answer that came after ``least_s`` and within ``seconds``. ``is_found`` is ``None`` if no answer
        came."""
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
        """The expected time of an answer; ``None`` if there has been no answer yet."""
        return median(self._seconds) if self._seconds else self._least_s

    @property
    def found_share(self) -> float:
        """The share of blocks found, computed as if one more block had been found and one more had not."""
        return (1 + sum(self._found)) / (2 + len(self._found))


class PrefillSpeedEstimator:
    """Estimates the number of tokens that the engine computes per second while it computes prompts.

    A step's duration shows only in the times at which later steps are decided: the next step or, if an engine decides
    one step ahead of its results, the step after that. So the duration is the longer of the two intervals that follow
    the step, and it counts only if the engine did not idle in between.

    Among large steps, larger ones count for more. A small step consists mostly of overhead, so small steps can show
    that the engine is faster than the large steps suggest, but never that it is slower. Otherwise, an engine whose
    prompts are mostly hits would look slow, load every hit, compute only the rest of its prompts, and continue to look
    slow.

    Before the first such step, ``tokens_per_s`` is the ``expected`` speed, if there is one. Medians are computed on
    demand.
    """

    def __init__(self, clock: Callable[[], float], expected: float | None = None) -> None:
        self._expected = expected
        self.queued_tokens = 0
        """Number of prompt tokens of running requests that the last step left for later steps."""
        self._clock = clock
        self._large, self._small = _Window(clock), _Window(clock)
        self._contexts = _Window(clock)
        """Of the large steps: the mean position of a prompt's token, and the seconds per token."""
        self._fit: tuple[float, float] | None = None
        self._largest_tokens = 0
        self._speeds = [0.0, 0.0]
        """The speeds shown by the large steps and by the small ones."""
        self._new: list[Collection[tuple[float, float]]] = [(), ()]
        """Samples of both kinds that ``_speeds`` does not include yet."""
        self._steps: list[tuple[float, StepWork]] = []
        """The last steps (at most two) without a pause between them."""

    def note_step(self, work: StepWork) -> None:
        """Note a step, which has just been decided."""
        now_s = self._clock()
        self.queued_tokens = work.queued_tokens
        if not work.is_continued:
            self._steps.clear()
        elif len(self._steps) == 2:
            (first_s, first), (second_s, _) = self._steps
            seconds = max(second_s - first_s, now_s - second_s)
            if first.prompt_tokens >= _MIN_STEP_TOKENS and seconds > 0:
                self._add(first, seconds)
            del self._steps[0]
        self._steps.append((now_s, work))

    def _add(self, work: StepWork, seconds: float) -> None:
        now_s, tokens = self._clock(), work.tokens
        if now_s - self._large.newest_s >= _LARGEST_S:
            self._largest_tokens = 0
        is_small = tokens < _LARGE * self._largest_tokens
        sample = tokens / max(seconds, 1e-9), tokens
        self._new[is_small] = (self._small if is_small else self._large).add(sample)
        if not is_small:
            self._largest_tokens = max(self._largest_tokens, tokens)
            self._contexts.add((work.context_tokens / work.prompt_tokens, seconds / tokens))
            self._fit = None
            if now_s - self._small.newest_s >= _WINDOW_S:
                # Old samples of small steps do not count against recent large ones.
                self._speeds[True], self._new[True] = 0.0, ()

    @property
    def tokens_per_s(self) -> float | None:
        """The estimate; ``None`` if it was never measured and no speed was expected."""
        if any(self._new):
            for at, samples in enumerate(self._new):
                if samples:
                    self._speeds[at], self._new[at] = weighted_median(samples), ()
        return max(self._speeds) or self._expected

    @property
    def rise(self) -> float:
        """Increase of a token's time for each token before it, as a share of the mean time. 0 until it is measured."""
        return self._line()[1]

    def relative_cost(self, position: float) -> float:
        """Return the time of a token at ``position``, relative to ``1 / tokens_per_s``, the mean of recent steps."""
        middle, rise = self._line()
        return max(1 + rise * (position - middle), _LEAST_COST)

    def _line(self) -> tuple[float, float]:
        """Return the mean position in recent large steps, and the relative rise of a token's time per position."""
        if self._fit is None:
            self._fit = fit_rise(self._contexts.samples)
        return self._fit

    def turn_s(self, own_tokens: int, tokens_behind: int) -> float:
        """Return how long the engine works for the requests that overtake one with ``own_tokens`` that misses its turn.

        They have ``tokens_behind``. They fill a step, and the rest of the last one's prompt also comes first. They are
        taken to be as long as the request.
        """
        tokens_per_s = self.tokens_per_s
        if tokens_per_s is None:
            return 0.0
        room = max(self._largest_tokens - self.queued_tokens, 0)
        num_overtaking = room // max(own_tokens, 1) + 1
        return min(tokens_behind, num_overtaking * own_tokens) / tokens_per_s
