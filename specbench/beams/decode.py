"""Beam search, plain and speculative (appendix A.4 of Leviathan, Kalman, Matias 2023), for one request at a time.

Plain: a target call reads the w hypotheses' last tokens, and the search advances one level. Speculative: the drafter
runs a beam search of its own, of width u >= w, for gamma levels from where the target's stands. One target call reads
the w last tokens and all u gamma guesses: w + u gamma runs of M_p. The target's search then advances by these log p
exactly as plain search would. A level is accepted if all w continuations that it chose are among the guesses; the
first one that is not, or the one behind all gamma, ends the round: its tokens are known, only not read yet.

u guesses a level, V vocabulary.
"""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specbench.beams.search import BeamRules, Chosen, Hypothesis, Node, Search, TreeReader
from specbench.decoding.sequence import Sequence
from specbench.decoding.timer import DECODING, Clock, Stage, Timer
from specbench.measure.record import Rounds, Text
from specbench.models.language_model import LanguageModel

Seconds = Mapping[Stage, float]  # by stage of a round


@dataclass(frozen=True)
class FoundBeams:
    """What a search found for one request, and what it took. Levels behind the best text's end count too."""

    hypotheses: tuple[Hypothesis, ...]  # best first
    levels: int
    calls: int  # of the target
    target_tokens: int  # that the target read, the prompt's not counted
    drafter_tokens: int


@dataclass(frozen=True)
class BeamRound:
    """A target call: what was drafted, and how many levels the search advanced."""

    gamma: int  # levels drafted
    accepted: int  # levels whose w continuations were all drafted
    rejected: bool  # whether the level after them was tested and was not
    levels: int  # advanced
    width: int  # tokens that the target read


def decode_beams(
    target: LanguageModel, drafter: LanguageModel | None, rules: BeamRules, jobs: abc.Sequence[Sequence], columns: int,
    gamma: int,
) -> tuple[list[Text], list[FoundBeams]]:  # fmt: skip
    """Decodes jobs in a row of `columns` columns, gamma levels a round, or plainly. Returns best texts, all beams."""
    clock = Timer(target.device)
    found = [_search(target, drafter, rules, job, columns, gamma, clock) for job in jobs]
    stages = clock.rounds()
    prefill, of_drafter = (
        sum(own.get(stage, 0.0) for own in stages) / len(jobs) for stage in (Stage.PREFILL, Stage.DRAFTER_PREFILL)
    )
    calls = [own for own in stages if Stage.VERIFY in own]
    texts, begin = [], 0
    for rounds, beams in found:
        ids = list(beams.hypotheses[0].tokens)
        own = recorded(rounds, calls[begin : begin + len(rounds)], len(ids))
        begin += len(rounds)
        seconds = sum(map(sum, (own.draft, own.verify, own.accept, own.host)))
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(Text(ids, text, seconds, prefill, of_drafter, record_seconds=0.0, rounds=own))
    return texts, [beams for _, beams in found]


def _search(
    model: LanguageModel, drafting: LanguageModel | None, rules: BeamRules, job: Sequence, columns: int, gamma: int,
    clock: Timer,
) -> tuple[list[BeamRound], FoundBeams]:  # fmt: skip
    """The rounds of one request, and what they found."""
    prompt, stops = list(job.tokens), frozenset(model.stop_tokens)
    search = Search(rules, prompt[-1], stops, job.limit - len(prompt), model.device, model.forced_tokens)
    clock.start()
    target = TreeReader(model, prompt, columns, job.encoder_input)
    clock.end(Stage.PREFILL)
    drafter, room = None, 0
    if drafting is not None:
        drafter = TreeReader(drafting, prompt, columns, job.encoder_input)
        room = drafting.context - len(prompt) - 1
        clock.end(Stage.DRAFTER_PREFILL)
    rounds: list[BeamRound] = []
    while not search.over:
        if rounds:
            clock.start()
        levels = max(0, min(gamma, search.limit - search.levels - 1, room - search.levels))
        clock.end(Stage.HOST)
        rounds.append(one_round(search, target, drafter, levels, clock))
    read = 0 if drafter is None else drafter.tokens
    return rounds, FoundBeams(tuple(search.finished), search.levels, len(rounds), target.tokens, read)


def recorded(rounds: abc.Sequence[BeamRound], calls: abc.Sequence[Seconds], end: int) -> Rounds:
    """The rounds that yielded tokens of a best text of `end` tokens, with the seconds of their calls. Levels behind its
    end are not counted, as tokens behind a stop; the time of calls behind it is split evenly among the others."""
    begins = [0, *accumulate(made.levels for made in rounds)][:-1]
    count = sum(begin < end for begin in begins)
    behind = {stage: sum(call.get(stage, 0.0) for call in calls[count:]) / count for stage in DECODING}
    found = Rounds()
    for made, call, begin in zip(rounds[:count], calls, begins, strict=False):
        tokens = min(made.levels, end - begin)
        accepted = min(made.accepted, tokens)
        rejected = made.rejected and tokens == made.levels
        found.add(
            gamma=made.gamma,
            drafted=made.gamma,
            tested=accepted + rejected,
            accepted=accepted,
            tokens=tokens,
            recovered=int(rejected),
            bonus=int(tokens == made.levels > made.accepted == made.gamma),
            steps=made.gamma,
            rows=1,
            width=made.width,
            lenience=1.0,
            betas=[1.0] * accepted + [0.0] * rejected,
            **{stage.value: call.get(stage, 0.0) + behind[stage] for stage in DECODING},
        )
    return found


def one_round(search: Search, target: TreeReader, drafter: TreeReader | None, gamma: int, clock: Clock) -> BeamRound:
    """One level of plain search or, with a drafter, a round of the speculative one with `gamma` levels of guesses."""
    guesses: list[Node] = []
    if drafter is not None:
        guesses = draft(search, drafter, gamma)
        clock.end(Stage.DRAFT)
    nodes = [*target.unread(search.running), *guesses]
    log_p = target.read(nodes)
    clock.end(Stage.VERIFY)
    levels, accepted = advance(search, nodes, log_p)
    for reader in (target, drafter):
        if reader is not None:
            reader.keep(search.running)
    clock.end(Stage.ACCEPT)
    return BeamRound(gamma, accepted, not search.over and accepted < gamma, levels, len(nodes))


def draft(search: Search, drafter: TreeReader, gamma: int) -> list[Node]:
    """The drafter's own beam search of `gamma` levels, from the target's hypotheses and their scores: its guesses,
    level by level. A hypothesis that ends needs no reading, so stop tokens are no guesses."""
    if not gamma:
        return []
    ends, scores = search.running, search.scores
    unread = drafter.unread(ends)
    log_q = drafter.read(unread)[[unread.index(node) for node in ends]]
    stops = torch.tensor(sorted(search.stop_tokens), dtype=torch.long, device=log_q.device)
    guesses: list[Node] = []
    for level in range(gamma):
        totals = (log_q + scores[:, None]).index_fill(1, stops, -torch.inf).flatten()
        best, places = totals.topk(min(search.rules.drafter_width, len(totals)))
        possible = best > -torch.inf
        scores, chosen = best[possible], places[possible].tolist()
        ends = [_guess(ends[place // log_q.shape[1]], place % log_q.shape[1]) for place in chosen]
        guesses += ends
        if not ends:
            break
        if level + 1 < gamma:
            log_q = drafter.read(ends)
    return guesses


def _guess(parent: Node, token: int) -> Node:
    """A new continuation of a node, which knows of it."""
    parent.children[token] = Node(token, parent)
    return parent.children[token]


def advance(search: Search, nodes: abc.Sequence[Node], log_p: Tensor) -> tuple[int, int]:
    """Advances the search by log p [nodes, V] level by level. Returns how many levels, and how many were accepted."""
    row = {node: number for number, node in enumerate(nodes)}
    levels, accepted = 0, 0
    while True:
        chosen = search.step(log_p[[row[node] for node in search.running]])
        levels += 1
        found = drafted(chosen)
        if search.over or found is None:
            search.running = [Node(token, parent) for parent, token in chosen]
            return levels, accepted
        search.running = found
        accepted += 1


def drafted(chosen: abc.Sequence[Chosen]) -> list[Node] | None:
    """These continuations as guesses; None unless all of them were drafted: top_w(M_p) is a part of top_u(M_q)."""
    found = [node for parent, token in chosen if (node := parent.children.get(token)) is not None]
    return found if len(found) == len(chosen) else None
