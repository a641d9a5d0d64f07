"""Rewards for the form of a text: its length, its variety and its end. They do not read its meaning."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """One sentence of a given length, with no word repeated.

    Attributes:
        words: The number of words that a completion should have, at least 1.
        tolerance: The largest difference from `words` that still is a success, at least 0.
    """

    words: int = 12
    tolerance: int = 2

    def score(self, text: str) -> float:
        """The mean of the scores for length, variety and end, in [0, 1]."""
        return (length_score(text, self.words) + variety(text) + float(is_one_sentence(text))) / 3

    def is_met(self, text: str) -> bool:
        """Whether the text is one sentence of the right length that repeats no word."""
        return abs(len(words_of(text)) - self.words) <= self.tolerance and variety(text) == 1 and is_one_sentence(text)


def words_of(text: str) -> list[str]:
    """Returns the runs of letters, digits, apostrophes and underscores, in lower case."""
    return re.findall(r"[\w'’]+", text.lower())


def length_score(text: str, words: int) -> float:
    """Returns 1 for a text of `words` words, falling linearly to 0 at no words and at twice as many."""
    return max(0.0, 1 - abs(len(words_of(text)) - words) / words)


def variety(text: str) -> float:
    """Returns the share of different words among those of four letters or more; 1 if there are none.

    Shorter words (articles, prepositions) repeat in any good sentence.
    """
    long_words = [word for word in words_of(text) if len(word) >= 4]
    return len(set(long_words)) / len(long_words) if long_words else 1.0


def is_one_sentence(text: str) -> bool:
    """Whether a text ends with its only full stop; those inside a name or a number (`os.path`, `3.5`) do not count."""
    text = text.strip()
    return text.endswith(".") and re.findall(r"[.!?](?=\s|$)", text) == ["."]
