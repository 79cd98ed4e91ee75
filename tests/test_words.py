# SPDX-License-Identifier: Apache-2.0
"""House words: those that are not used here, and what is written instead."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("src", "docs", "deploy", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
TEXT = {".py", ".c", ".md", ".json", ".yml", ".yaml", ".txt"}

WORDS = {
    "told": (r"\btold\b", "given, configured, notified; to 'tell' things apart is to distinguish them"),
    "nobody": (r"\bnobody\b", "no process, no request, no other thread: say who"),
    "so many": (r"\bso many\b", "this many, or the number's name"),
    "behind": (r"\bbehind\b(?! an? (?:proxy|firewall|link)\b)", "after, in an order; 'behind a proxy' is fine"),
    "what is there": (r"\bwhat is there\b", "existing files, present blocks"),
    "there to be": (r"\bthere to be\b", "a verb of what is done"),
    "is no": (r"(?<!\bthere )\bis no\b(?! (?:longer|more|less|better|worse|later|slower|faster)\b)", "is not a"),
    "trail": (r"\btrails?\b", "Miss: why a block was not found or loaded"),
    "story": (r"(?<![a-z])stor(?:y|ies)(?:_?teller)?(?![a-z])", "explanation"),
    "books": (r"\bbooks\b", "explanation, or the table that is meant"),
    "cursor": (r"(?<![a-z])cursors?(?![a-z])", "next_block"),
    "unfit": (r"(?<![a-z])unfit(?![a-z])", "quarantined"),
    "Learned": (r"\bLearned\(|\bLearned\b(?=[,;\])])", "DiscoveredServers"),
    "give up": (r"\b(?:give[ns]?|gave|giving) up\b", "the deadline that ends it; or release, drop, stop"),
    "patience spent": (
        r"\bpatience (?:is |was )?spent\b|\b(?:spen[dt]s?) (?:its|their) patience\b",
        "its deadline passed",
    ),
}
"""By word: how it is found, in any case of letters and across the end of a line, and what to write instead."""


class Exempt(NamedTuple):
    place: str
    """A file, or a folder with all files under it."""
    word: str
    phrase: str
    """What the line has; empty: any line."""
    why: str

    def covers(self, hit: Hit) -> bool:
        in_place = (hit.file + "/").startswith(self.place + "/")
        return in_place and hit.word == self.word and self.phrase in hit.text


FORMAT = "a key of trace lines and of --json"
EXEMPT = [
    Exempt("src/kvoffload/cli/explain.py", "story", '"with_story"', FORMAT),
    Exempt("src/kvoffload/sim/explain.py", "story", 'name="story"', FORMAT),
    Exempt("CHANGELOG.md", "trail", "`ReqContext.trail`", "the old name"),
    Exempt("src/kvoffload/connector/recording.py", "story", '"story"', FORMAT),
    Exempt("src/kvoffload/connector/recording.py", "story", "``story``", FORMAT),
]
"""One that covers nothing fails the test."""


class Hit(NamedTuple):
    file: str
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}; write {WORDS[self.word][1]}: {self.text}"


def files() -> list[Path]:
    found = [path for place in PLACES for path in [ROOT / place, *(ROOT / place).rglob("*")]]
    return sorted(path for path in found if path.suffix in TEXT and path.is_file())


def hits_in(text: str, file: str = "text") -> Iterator[Hit]:
    """A sentence goes on in the next line, of a comment too, so line ends count as one space."""
    joined, at = "", [0]
    lines = text.splitlines()
    for line in lines:
        joined += re.sub(r"^\s*(?:#:? |// )?\s*", "", line) + " "
        at.append(len(joined))
    for word, (pattern, _) in WORDS.items():
        for match in re.finditer(pattern, joined, 0 if word == "Learned" else re.IGNORECASE):
            line = next(index for index, end in enumerate(at[1:]) if match.start() < end)
            yield Hit(file, line + 1, word, lines[line].strip())


@functools.cache
def all_hits() -> list[Hit]:
    return [hit for path in files() for hit in hits_in(path.read_text(), path.relative_to(ROOT).as_posix())]


def test_words_that_are_not_used_here() -> None:
    hits = [hit for hit in all_hits() if not any(each.covers(hit) for each in EXEMPT)]
    assert not hits, "\n".join(["", *map(str, hits)])


@pytest.mark.parametrize("exempt", EXEMPT, ids=lambda exempt: f"{exempt.place}-{exempt.word}")
def test_every_exemption_is_needed(exempt: Exempt) -> None:
    assert any(exempt.covers(hit) for hit in all_hits()), "delete it from EXEMPT"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A page is no block.", ["is no"]),
        ("There is no block, and it is no longer read.", []),
        ("Nobody waits\n    # for so\n    # many seconds", ["nobody", "so many"]),
        ("a server behind a proxy, requests behind it", ["behind"]),
        ("the history of a class StoryTeller, its _stories", ["story", "story"]),
        ("What was learned. class Primary(Learned):", ["Learned"]),
    ],
)
def test_how_they_are_found(text: str, words: list[str]) -> None:
    assert [hit.word for hit in hits_in(text)] == words


def test_the_message_says_where_and_what_instead() -> None:
    (hit,) = hits_in("one\nwas told\n", "a.py")
    assert str(hit).startswith("a.py:2: 'told'; write given, ")
