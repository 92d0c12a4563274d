"""Reads the texts of a request again after it was decoded: betas along plain decoding's text, and the verdict.

beta is read at every position of the text, not only where a guess was tested (Corollary 3.6, section 4.2). n tokens of
a text are scored, V vocabulary.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbench.data.prompts import Request
from specbench.decoding import sequence
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.decoding.verify import dense, output_distribution
from specbench.errors import first_line
from specbench.measure.record import Record
from specbench.measure.sequential import Kept
from specbench.measure.verdict import read_text, unread
from specbench.models.reference_forward import FinishedText
from specbench.run.session import Decoded

if TYPE_CHECKING:
    from specbench.decoding.stops import StopStrings

log = logging.getLogger(__name__)
BESIDE = 16  # texts, those that were decoded last, whose noise is compared with that of the next one
TARGET_TEXT_TOKENS = 10_000  # of plain decoding's texts along which betas are read, about
CHUNK = 64  # positions that are standardised at a time


def read_texts(method: Any, request: Request, record: Record, ours: Decoded, plain: Decoded, row: int) -> None:
    """Adds to a record what its texts say of alpha and losslessness. Without memory the run goes on, not "passed"."""
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


def read_target_text(
    target: Any, drafter: Any, text: FinishedText, kept: Kept = (), lenience: float = 1.0
) -> dict[str, float]:
    """What goes to `Record.target_text`, of plain decoding's text: the sum of beta = sum_x min(p / l, q) over the
    positions at which the drafter has a guess, and their number. `kept` is the decoder's p [m, V] from positions on: if
    it was kept everywhere, the target reads nothing. Raises MemoryError or RuntimeError if there is no room."""
    begin, own = len(text.prompt), target.sampling
    tokens = [*text.prompt, *text.ids][: drafter.context]
    if len(tokens) <= begin:
        return {"beta": 0.0, "positions": 0.0}
    if lenience < 1:
        own = dataclasses.replace(own, before_argmax=True)
    p = None if own.greedy else _whole(kept, len(tokens) - begin)
    if p is None:
        p = distribution(text.scores(target, end=drafter.context), own)
    if drafter.models:
        logits = text.scores(drafter.models[0], end=drafter.context)
        betas = _betas(p, distribution(logits, drafter.models[0].sampling), lenience, own.greedy)
    else:
        q, guessed = asked(drafter, tokens, begin, p.shape[-1], text.encoder_input, p.device)
        betas = _betas(p[guessed], q[guessed], lenience, own.greedy)
    return {"beta": float(betas.sum()), "positions": float(len(betas))}


def _whole(kept: Kept, n: int) -> Tensor | None:
    """p [n, V] of the first n new tokens; None unless it was kept for all of them."""
    whole = torch.cat([p for _, p in kept])[:n].double() if kept else None
    return None if whole is None or len(whole) < n else whole / whole.sum(-1, keepdim=True)


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [n, V] in float64 of logits [n, V] after the repetition penalty."""
    parts = logits.split(CHUNK)
    return torch.cat([dataclasses.replace(sampling, repetition_penalty=1.0).probabilities(x).double() for x in parts])


def _betas(p: Tensor, q: Tensor, lenience: float, greedy: bool) -> Tensor:
    """beta [n] from p [n, V] and q [n, V]."""
    return output_distribution(p, q, lenience, greedy)[1].sum(-1)


def asked(
    drafter: Any, tokens: list[int], begin: int, vocab_size: int, encoder_input: Any, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What a drafter without models says of a text from `begin` on: q [n, V], and where it has a guess [n]."""
    state = State.start([sequence.Sequence(tokens, len(tokens) + 1, 0, encoder_input)], [], 2, device)
    drafter.begin(state)
    found, guessed = torch.zeros(len(tokens) - begin, vocab_size, device=device), []
    for row, position in enumerate(range(begin, len(tokens))):
        state.rows.length.fill_(position)
        state.at(0).tokens = tokens[:position]
        draft = drafter.propose(state, [1])
        guessed.append(draft.tokens.shape[1] > 0)
        if guessed[-1]:
            found[row] = dense(draft, vocab_size)[0, 0]
    return found.double(), torch.tensor(guessed, device=device)


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
