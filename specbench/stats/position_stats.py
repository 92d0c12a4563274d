"""Betas along a finished text: p and q at every position, not only where a guess was tested.

The mean of beta over the target's own text is the paper's estimate of alpha (Corollary 3.6, section 4.2). The guess of
a token x that stands in the text was accepted with probability min(p, q)(x) / p(x), whatever was drafted before.

T tokens of a text, n of them read at a time, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.draft import Draft
from specbench.decoding.drafter import Drafter
from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.model import Model
from specbench.decoding.state import Job, State
from specbench.decoding.verify import dense, output_law
from specbench.stats.records import PositionStats

CHUNK = 64  # positions read at a time
LIMIT = 10_000  # a run reads about this many tokens of each decoder's text


@dataclasses.dataclass(frozen=True)
class DecodedText:
    """A finished text after a prompt: its T new tokens, the lenience of each, [T], and p [T, V] that they were drawn
    from, above temperature 0, if it was kept."""

    new: Sequence[int]
    lenience: Sequence[float]
    p: Tensor | None = None


def read_texts(
    target: Model,
    drafter: Drafter,
    prompt: Sequence[int],
    texts: Sequence[DecodedText],
    encoder_input: EncoderInput | None = None,
) -> list[PositionStats]:
    """Scores the tokens of texts after one prompt, and after an encoder's input if there is one, which are read once,
    with target and drafter; the target reads none of the texts whose p was kept. Returns arrays [T] of each text."""
    read = [torch.tensor([[*prompt, *text.new]], device=target.device) for text in texts]
    begin, longest = len(prompt), min(max(text.shape[1] for text in read), drafter.context)
    models = [*([target] if any(text.p is None for text in texts) else []), *drafter.models[:1]]
    for model in models:
        model.open_text(read[0], begin, longest, encoder_input)
    found = [
        _read_text(target, drafter, own, begin, text, encoder_input) for own, text in zip(read, texts, strict=True)
    ]
    for model in models:
        model.release(0)
    return found


def _read_text(
    target: Model, drafter: Drafter, text: Tensor, begin: int, known_of: DecodedText, encoder_input: EncoderInput | None
) -> PositionStats:
    """Scores the tokens of text [1, T] from `begin` on, with models that have read those before."""
    end, kept = min(text.shape[1], drafter.context), known_of.p
    laws = _model_laws(target, text, begin, end)
    if kept is not None:
        chunks = zip(range(begin, end, CHUNK), kept[: end - begin].split(CHUNK), strict=False)
        laws = ((first, p, p) for first, p in chunks)
    drafted = _drafter_laws(drafter, target.vocab_size, text, begin, end, encoder_input)
    columns = []
    for (first, p, sure), (q, known, certain) in zip(laws, drafted, strict=True):
        x = text[0, first : first + len(p)]
        lenience = known_of.lenience[first - begin :][: len(p)]
        lenient = torch.tensor(lenience, dtype=torch.double, device=p.device)[:, None]
        columns.append(_numbers(p, q, x, lenient, target.sampling.greedy, certain, known, sure))
    table = torch.cat(columns, 1).cpu().numpy() if columns else np.zeros((len(dataclasses.fields(PositionStats)), 0))
    missing = text.shape[1] - begin - table.shape[1]
    return PositionStats(*np.pad(table, ((0, 0), (0, missing)), constant_values=np.nan))


def _numbers(
    p: Tensor, q: Tensor, x: Tensor, lenience: Tensor, greedy: bool, certain: Tensor, known: Tensor, sure: Tensor
) -> Tensor:
    """The columns of PositionStats for n positions, [9, n]: p [n, V], q [n, V], tokens x [n], lenience [n, 1], certain
    and sure [n, V] (q and p before argmax), known [n] bool (whether there is a guess)."""
    p, q = (law.double() / law.double().sum(-1, keepdim=True).clamp(min=1e-300) for law in (p, q))
    law, kept = output_law(p, q, lenience, greedy)
    own = law.gather(-1, x[:, None])[:, 0]
    accepted = torch.where(own > 0, kept.gather(-1, x[:, None])[:, 0] / own, 0.0).clamp(max=1)
    if greedy:
        best = p.argmax(-1, keepdim=True)
        tv = 1 - law.gather(-1, best)[:, 0]
        kl = (law * (p.gather(-1, best).log() - p.clamp(min=1e-300).log())).sum(-1)
        bound = (law * lenience * p.gather(-1, best) / p.clamp(min=1e-300)).amax(-1)
    else:
        tv = 0.5 * (law - p).abs().sum(-1)
        kl = (torch.xlogy(law, law) - torch.xlogy(law, p.clamp(min=1e-300))).sum(-1)
        bound = (law * lenience / p.clamp(min=1e-300)).amax(-1)
    confidence, favourite = certain.max(-1)
    agreement = p.gather(-1, favourite[:, None])[:, 0]
    if greedy:  # p may be the one before argmax
        agreement = (p.argmax(-1) == favourite).double()
    rows = [kept.sum(-1), accepted, _entropy(certain), confidence.double(), tv, kl.clamp(min=0), bound, agreement]
    return torch.cat([torch.where(known, torch.stack(rows), torch.nan), _entropy(sure)[None]])


def _entropy(law: Tensor) -> Tensor:
    """H / log V [n] of distributions [n, V]."""
    entropy: Tensor = torch.special.entr(law.double()).sum(-1) / math.log(law.shape[-1])
    return entropy


def _model_laws(model: Model, text: Tensor, begin: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Chunks of (first position, distributions [n, V], distributions before argmax [n, V]) of the tokens
    begin .. end - 1 of text [1, T], read through row 0 of the model's cache, uncompiled."""
    sampling = model.sampling
    confident = dataclasses.replace(sampling, before_argmax=True)
    for first in range(begin, end, CHUNK):
        last = min(first + CHUNK, end)
        logits = model.read_text(text, first, last)
        seen = None if sampling.repetition_penalty == 1 else _seen(text, first, last, model.vocab_size)
        p = sampling.probabilities(logits, seen)[0]
        yield first, p, confident.probabilities(logits, seen)[0] if sampling.greedy else p


def _drafter_laws(
    drafter: Drafter, vocab_size: int, text: Tensor, begin: int, end: int, encoder_input: EncoderInput | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For the same chunks of text [1, T]: q [n, V], whether there is a guess [n], and q before argmax [n, V]."""
    if drafter.models:
        for _, q, certain in _model_laws(drafter.models[0], text, begin, end):
            yield q, torch.ones(len(q), dtype=torch.bool, device=q.device), certain
        return
    state = State.start([Job(text[0].tolist(), text.shape[1] + 1, 0, encoder_input)], [], 2, text.device)
    drafter.begin(state)
    for first in range(begin, end, CHUNK):
        drafts = []
        for position in range(first, min(first + CHUNK, end)):
            state.rows.length.fill_(position)
            state.lengths = [position]
            drafts.append(drafter.propose(state, [1]))
        q = torch.cat([_first_law(draft, vocab_size) for draft in drafts])
        yield q, torch.tensor([draft.tokens.shape[1] > 0 for draft in drafts], device=q.device), q


def _first_law(draft: Draft, vocab_size: int) -> Tensor:
    """q [1, V] of a draft's first guess; zeros if there is none."""
    if not draft.tokens.shape[1]:
        return torch.zeros(1, vocab_size, device=draft.tokens.device)
    return dense(draft, vocab_size)[:, 0]


def _seen(text: Tensor, first: int, last: int, vocab_size: int) -> Tensor:
    """[1, n, V] bool: the tokens of text [1, T] that occur before each of the positions first .. last - 1."""
    before = F.one_hot(text[0, :first], vocab_size).amax(0)
    inside = F.one_hot(text[0, first : last - 1], vocab_size).cumsum(0)
    return (before + F.pad(inside, (0, 0, 1, 0)) > 0)[None]
