"""The words of a comparison: its factors, and what is ranked."""

CAUSES = {  # factors of a ratio, in words
    "alpha": "alpha",
    "gamma": "gamma",
    "other_tokens": "other tokens",
    "c": "drafting",
    "v": "verifying",
    "o": "rest",
    "plain_rest": "plain's rest",
    "plain": "plain's speed",
}
UNITS = {"tokens_per_second": "tokens per second", "speedup": "speedup over plain decoding"}
