"""Betas along a finished text: p and q at every position, not only where a guess was tested.

The mean of beta over the target's own text is the paper's estimate of alpha (Corollary 3.6, section 4.2). The guess of
a token x that stands in the text was accepted with probability min(p, q)(x) / p(x), whatever was drafted before.

T tokens of a text, n of them read at a time, V vocabulary.
"""

import dataclasses
import math
from collections import abc

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.model import Model
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.verify import dense, output_law
from specbench.drafters.base import Drafter
from specbench.stats.records import PositionStats

CHUNK = 64  # positions read at a time
LIMIT = 10_000  # a run reads about this many tokens of each decoder's text


@dataclasses.dataclass(frozen=True)
class DecodedText:
    """A finished text after a prompt: its T new tokens, the lenience of each, [T], and p [T, V] that they were drawn
    from, above temperature 0, if it was kept."""

    new: abc.Sequence[int]
    lenience: abc.Sequence[float]
    p: Tensor | None = None


def read_texts(
    target: Model,
    drafter: Drafter,
    prompt: abc.Sequence[int],
    texts: abc.Sequence[DecodedText],
    encoder_input: EncoderInput | None = None,
) -> list[PositionStats]:
    """Scores the tokens of texts after one prompt, and after an encoder's input if there is one, which are read once,
    with target and drafter; the target reads none of the texts whose p was kept. Returns arrays [T] of each text."""
    tokens = [torch.tensor([[*prompt, *text.new]], device=target.device) for text in texts]
    begin, longest = len(prompt), min(max(text.shape[1] for text in tokens), drafter.context)
    models = [*([target] if any(text.p is None for text in texts) else []), *drafter.models[:1]]
    for model in models:
        model.open_text(tokens[0], begin, longest, encoder_input)
    found = [_read_text(target, drafter, *one, begin, encoder_input) for one in zip(tokens, texts, strict=True)]
    for model in models:
        model.release(0)
    return found


def _read_text(
    target: Model, drafter: Drafter, text: Tensor, known: DecodedText, begin: int, encoder_input: EncoderInput | None
) -> PositionStats:
    """Scores the tokens of text [1, T] from `begin` on, with models that have read those before."""
    end = min(text.shape[1], drafter.context)
    state = None if drafter.models else opened(drafter, text, encoder_input)
    columns = [np.zeros((len(dataclasses.fields(PositionStats)), 0))]
    for first in range(begin, end, CHUNK):
        last = min(first + CHUNK, end)
        here = slice(first - begin, last - begin)
        p, sure = _law(target, text, first, last) if known.p is None else (known.p[here], known.p[here])
        if state is None:
            q, certain = _law(drafter.models[0], text, first, last)
            guessed = torch.ones(len(q), dtype=torch.bool, device=q.device)
        else:
            q, guessed = asked(drafter, target.vocab_size, state, first, last)
            certain = q
        lenience = torch.tensor(known.lenience[here], dtype=torch.double, device=p.device)[:, None]
        numbers = _numbers(p, q, text[0, first:last], lenience, target.sampling.greedy, certain, guessed, sure)
        columns.append(numbers.cpu().numpy())
    table = np.concatenate(columns, 1)
    missing = text.shape[1] - begin - table.shape[1]
    return PositionStats(*np.pad(table, ((0, 0), (0, missing)), constant_values=np.nan))


def _numbers(
    p: Tensor, q: Tensor, x: Tensor, lenience: Tensor, greedy: bool, certain: Tensor, guessed: Tensor, sure: Tensor
) -> Tensor:
    """The columns of PositionStats for n positions, [9, n]: p [n, V], q [n, V], tokens x [n], lenience [n, 1], certain
    and sure [n, V] (q and p before argmax), guessed [n] bool (whether there is a guess)."""
    p, q = (law.double() / law.double().sum(-1, keepdim=True).clamp(min=1e-300) for law in (p, q))
    law, kept = output_law(p, q, lenience, greedy)
    own = law.gather(-1, x[:, None])[:, 0]
    accepted = torch.where(own > 0, kept.gather(-1, x[:, None])[:, 0] / own, 0.0).clamp(max=1)
    positive = p.clamp(min=1e-300)
    if greedy:
        best, most = p.max(-1, keepdim=True).indices, p.amax(-1, keepdim=True)
        tv = 1 - law.gather(-1, best)[:, 0]
        kl = (law * (most.log() - positive.log())).sum(-1)
        bound = (law * lenience * most / positive).amax(-1)
    else:
        tv = 0.5 * (law - p).abs().sum(-1)
        kl = (torch.xlogy(law, law) - torch.xlogy(law, positive)).sum(-1)
        bound = (law * lenience / positive).amax(-1)
    confidence, favourite = certain.max(-1)
    # At temperature 0 p may be the one before argmax.
    agreement = (p.argmax(-1) == favourite).double() if greedy else p.gather(-1, favourite[:, None])[:, 0]
    rows = [kept.sum(-1), accepted, _entropy(certain), confidence.double(), tv, kl.clamp(min=0), bound, agreement]
    return torch.cat([torch.where(guessed, torch.stack(rows), torch.nan), _entropy(sure)[None]])


def _entropy(law: Tensor) -> Tensor:
    """H / log V [n] of distributions [n, V]."""
    entropy: Tensor = torch.special.entr(law.double()).sum(-1) / math.log(law.shape[-1])
    return entropy


def _law(model: Model, text: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Distributions [n, V] of the tokens begin .. end - 1 of text [1, T], and those before argmax [n, V], read through
    row 0 of the model's cache, uncompiled."""
    sampling = model.sampling
    logits = model.read_text(text, begin, end)
    seen = None if sampling.repetition_penalty == 1 else _seen(text, begin, end, model.vocab_size)
    p = sampling.probabilities(logits, seen)[0]
    if not sampling.greedy:
        return p, p
    return p, dataclasses.replace(sampling, before_argmax=True).probabilities(logits, seen)[0]


def opened(drafter: Drafter, text: Tensor, encoder_input: EncoderInput | None) -> State:
    """A state that holds a text [1, T], for a drafter without models."""
    state = State.start([Sequence(text[0].tolist(), text.shape[1] + 1, 0, encoder_input)], [], 2, text.device)
    drafter.begin(state)
    return state


def asked(drafter: Drafter, vocab_size: int, state: State, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """For the tokens begin .. end - 1 of a state's text: q [n, V] of a drafter without models, and whether there is a
    guess [n]."""
    laws, guessed, tokens = [], [], state.at(0).tokens
    for position in range(begin, end):
        state.rows.length.fill_(position)
        state.at(0).tokens = tokens[:position]
        draft = drafter.propose(state, [1])
        guessed.append(draft.tokens.shape[1] > 0)
        none = torch.zeros(1, vocab_size, device=draft.tokens.device)
        laws.append(dense(draft, vocab_size)[:, 0] if guessed[-1] else none)
    return torch.cat(laws), torch.tensor(guessed, device=laws[0].device)


def _seen(text: Tensor, first: int, last: int, vocab_size: int) -> Tensor:
    """[1, n, V] bool: the tokens of text [1, T] that occur before each of the positions first .. last - 1."""
    before = F.one_hot(text[0, :first], vocab_size).amax(0)
    inside = F.one_hot(text[0, first : last - 1], vocab_size).cumsum(0)
    return (before + F.pad(inside, (0, 0, 1, 0)) > 0)[None]
