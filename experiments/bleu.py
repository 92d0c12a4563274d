"""Corpus BLEU of tokenised lines (Papineni et al., 2002): up to four-grams, one reference, no smoothing."""

import math
from collections import Counter
from collections.abc import Sequence

LONGEST = 4


def counts(guesses: Sequence[str], references: Sequence[str], n: int) -> tuple[int, int]:
    """How many n-grams of all guesses their references hold too, each at most as often, and how many there are."""
    found = total = 0
    for guess, reference in zip(guesses, references, strict=True):
        own, theirs = (Counter(ngrams(text.split(), n)) for text in (guess, reference))
        found += sum((own & theirs).values())
        total += sum(own.values())
    return found, total


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All n-grams of a line, in order."""
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def bleu(guesses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU from 0 to 100: the geometric mean of the precisions times the brevity penalty."""
    pairs = [counts(guesses, references, n) for n in range(1, LONGEST + 1)]
    if any(found == 0 for found, _ in pairs):
        return 0.0
    ours, theirs = (sum(len(text.split()) for text in texts) for texts in (guesses, references))
    penalty = min(0.0, 1 - theirs / ours)
    return 100 * math.exp(penalty + sum(math.log(found / total) for found, total in pairs) / LONGEST)
