"""Reads the texts of a request again after it was decoded: betas along plain decoding's text, and the verdict."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from specbench.data.prompts import Request
from specbench.decoding.sampling import Sampling
from specbench.errors import first_line
from specbench.measure.record import Record
from specbench.measure.target_text import read_target_text
from specbench.measure.verdict import read_text, unread
from specbench.models.reference_forward import FinishedText
from specbench.run.session import Decoded

if TYPE_CHECKING:
    from specbench.decoding.stops import StopStrings

log = logging.getLogger(__name__)
BESIDE = 16  # texts, those that were decoded last, whose noise is compared with that of the next one
TARGET_TEXT_TOKENS = 10_000  # of plain decoding's texts along which betas are read, about


def read_texts(method: Any, request: Request, record: Record, ours: Decoded, plain: Decoded, row: int) -> None:
    """Adds to a record what its texts say of alpha and of losslessness, as long as tokens may be read. Without memory
    for it the run goes on, and the verdict is not "passed"."""
    parts = method.parts
    assert record.speculative is not None and record.baseline is not None
    if not parts.decoding.samples:
        record.search = parts.decoding.read(parts.target, request, ours.searches[row], plain.searches[row])
        return
    record.drift = ours.drift[row]
    new, baseline = record.speculative.ids, record.baseline.ids
    text = FinishedText(request.tokens, baseline, request.encoder_input)
    readable = parts.verifier.judges_by_position and parts.drafter.reads_text
    if readable and method.tokens_read["target_text"] < TARGET_TEXT_TOKENS:
        kept, lenience = plain.draws[row].target if plain.draws else (), parts.verifier.lenience
        try:
            record.target_text = read_target_text(parts.target, parts.drafter, text, kept, lenience)
        except (RuntimeError, MemoryError) as error:
            log.warning("no betas along the text of %s: %s", request.id, first_line(error))
    if new != baseline:  # else, as at temperature 0, it is one text, which is read once
        text = FinishedText(request.tokens, new, request.encoder_input)
    root = parts.root
    sampling = Sampling(root.temperature, root.top_k, root.top_p, root.repetition_penalty)  # the configuration's own
    if not parts.verifier.judged:
        record.verdict = unread(parts.verifier.note or "its verifier is not judged")
    elif method.tokens_read["verdict"] >= root.verdict_tokens and (not sampling.greedy or new == baseline):
        record.verdict = unread(f"more than verdict_tokens={root.verdict_tokens} tokens")
    else:
        others = beside(request, len(new), [*islice(reversed(method.records.values()), BESIDE)][::-1])
        found = read_text(parts.target, parts.drafter, sampling, text, baseline, ours.draws[row], others)
        ended = ends_where_it_should(new, record.limit, parts.target.stop_tokens, parts.stop_strings)
        record.verdict = found | {"ended": ended}


def beside(request: Request, count: int, records: Sequence[Record]) -> list[int]:
    """What the latest of other texts that has one has at the position of each of `count` new tokens; -1 for none."""
    begin, found = len(request.tokens), [-1] * count
    for record in records:
        if record.speculative is not None:
            first = record.prompt_tokens if record.encoder_tokens is None else begin  # all decoders begin alike
            for position, token in enumerate(record.speculative.ids, first - begin):
                if 0 <= position < count:
                    found[position] = token
    return found


def tokens_read(records: Iterable[Record]) -> Counter[str]:
    """Tokens of records that were read again: along plain decoding's text, and for the verdict, prompts included."""
    found: Counter[str] = Counter()
    for record in records:
        if record.baseline is not None and record.target_text:
            found["target_text"] += len(record.baseline.ids)
        if record.speculative is not None and record.verdict is not None and "tokens" in record.verdict:
            found["verdict"] += record.prompt_tokens + len(record.speculative.ids)
    return found


def ends_where_it_should(
    tokens: Sequence[int], limit: int, stop_tokens: Sequence[int], strings: "StopStrings | None"
) -> bool:
    """Whether the new tokens of a text end at the first stop token or stop string, or else at `limit` tokens."""
    ends = [length for length, token in enumerate(tokens, 1) if token in stop_tokens]
    if strings is not None:
        if strings.are_in(tokens[:-1]):  # whatever the search below finds
            return False
        end = strings.end_of(tokens)
        ends += [] if end is None else [end]
    return len(tokens) == min(ends, default=limit)
