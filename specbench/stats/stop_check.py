"""Whether a finished text ends where it should."""

from collections.abc import Callable, Sequence


def ends_where_it_should(
    tokens: Sequence[int], limit: int, stop_tokens: Sequence[int], strings: Sequence[str], decode: Callable[..., str]
) -> bool:
    """Whether the new tokens of a text end at the first stop token or stop string, or else at `limit` tokens. `decode`
    is the tokenizer's."""
    before, whole = (decode(list(part), skip_special_tokens=True) for part in (tokens[:-1], tokens))
    stopped_before = bool(set(tokens[:-1]) & set(stop_tokens)) or any(string in before for string in strings)
    stops = tokens[-1] in stop_tokens or any(string in whole for string in strings)
    return not stopped_before and (stops or len(tokens) == limit)
