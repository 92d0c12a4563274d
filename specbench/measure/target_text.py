"""alpha along finished texts: beta at every position, not only where a guess was tested (Corollary 3.6, section 4.2).

One forward of the stock module of the target and one of the drafter's over a text, or a drafter without models asked at
each position. T tokens of a text with its prompt, n of them scored, V vocabulary.
"""

import dataclasses
import time
from collections import abc
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.verify import dense, output_distribution
from specbench.measure.intervals import Estimate, Sums, estimates
from specbench.models.reference_forward import FinishedText

CHUNK = 64  # positions that are standardised at a time
CLEAR = 3.0  # standard errors by which the control must differ from alpha


def read_target_text(
    target: Any, drafter: Any, text: FinishedText, kept: abc.Sequence[tuple[int, Tensor]] = (), lenience: float = 1.0
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


def _whole(kept: abc.Sequence[tuple[int, Tensor]], n: int) -> Tensor | None:
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
    """What a drafter without models says of the tokens of a text from `begin` on: q [n, V], and at which of the
    positions it has a guess [n]."""
    state = State.start([Sequence(tokens, len(tokens) + 1, 0, encoder_input)], [], 2, device)
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


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """Means of beta over texts, with texts as clusters. `shifted`, the control, compares q with p of the next position:
    a measurement that gives alpha there too is broken. `sound` says whether it differs clearly from alpha; None if
    there are too few texts for an error. `length` is tokens per target call."""

    alpha: Estimate
    length: Estimate
    shifted: Estimate
    sound: bool | None
    positions: int
    texts: int
    seconds: float


def read_alpha(
    target: Any, drafter: Any, texts: Iterable[tuple[abc.Sequence[int], int]], gamma: int, own: bool
) -> TeacherForced:
    """beta at each position of texts, each given with the position that it is scored from, by the stock modules of two
    `LanguageModel`s, and the control: no cache, no executor and no loop of ours takes part. Raises ValueError if
    no text can be scored. For the length with drafts of gamma tokens, a text that is the target's `own` says which
    guess was taken: x, drawn from p, was an accepted guess with probability min(1, q(x) / p(x)). Of another text only
    beta is known."""
    clock, rows = time.perf_counter(), []
    with torch.inference_mode():
        for tokens, begin in texts:
            read = tokens[: min(target.context, drafter.context)]
            text = FinishedText(read[:begin], read[begin:])
            if len(text.ids) < 2:  # the control needs a next position
                continue
            p, q = (distribution(text.scores(model), model.sampling) for model in (target, drafter))
            alpha, shifted = (float(torch.minimum(of, q[: len(of)]).sum()) for of in (p, p[1:]))
            p_x, q_x = (of[torch.arange(len(of)), text.ids] for of in (p, q))
            accepts = (q_x / p_x.clamp(min=1e-300)).clamp(max=1) if own else torch.minimum(p, q).sum(-1)
            rounds, kept = expected_rounds(accepts.tolist(), gamma)
            rows.append((float(len(p)), len(p) - 1.0, rounds, kept, alpha, shifted))
    if not rows:
        raise ValueError("no text can be scored: each needs two tokens at least, behind a prompt that fits")
    columns = dict(zip(("positions", "pairs", "rounds", "kept", "alpha", "shifted"), np.array(rows).T, strict=True))

    def means(s: Sums) -> dict[str, Any]:
        alpha, shifted = s["alpha"] / s["positions"], s["shifted"] / s["pairs"]
        return {"alpha": alpha, "shifted": shifted, "apart": shifted - alpha, "length": s["kept"] / s["rounds"]}

    found = estimates(columns, range(len(rows)), means, log=False)
    apart = found["apart"]
    sound = None if apart.stderr is None else abs(apart.value or 0.0) > CLEAR * apart.stderr
    positions, seconds = round(columns["positions"].sum()), time.perf_counter() - clock
    return TeacherForced(found["alpha"], found["length"], found["shifted"], sound, positions, len(rows), seconds)


def expected_rounds(accepts: abc.Sequence[float], gamma: int) -> tuple[float, float]:
    """The expected number of rounds of gamma guesses that end in a text, and of the tokens that they keep.
    accepts[i] is the probability that the guess of token i is accepted, where there is one."""
    place = np.eye(gamma + 1)[0]  # how likely the next token is x_1 .. x_gamma of its round, or the bonus token
    rounds = 0.0
    for accepted in accepts:
        ends = place[-1] + (1 - accepted) * place[:-1].sum()
        place = np.append(ends, accepted * place[:-1])
        rounds += ends
    return rounds, len(accepts) - float(place @ np.arange(gamma + 1))
