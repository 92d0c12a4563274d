"""Beam search, plain and speculative (appendix A.4 of Leviathan, Kalman, Matias 2023), for one request at a time.

Plain: a target call reads the w hypotheses' last tokens, and the search advances one level. Speculative: the drafter
runs a beam search of its own, of width u >= w, for gamma levels from where the target's stands. One target call reads
the w last tokens and all u gamma guesses: w + u gamma runs of M_p. The target's search then advances by these log p
exactly as plain search would. A level is accepted if all w continuations that it chose are among the guesses; the
first one that is not, or the one behind all gamma, ends the round: its tokens are known, only not read yet.

u guesses a level, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.beams.reader import TreeReader
from specbench.beams.search import Chosen, Node, Search
from specbench.decoding.timer import Clock, Stage


@dataclass(frozen=True)
class BeamRound:
    """A target call: what was drafted, and how many levels the search advanced."""

    gamma: int  # levels drafted
    accepted: int  # levels whose w continuations were all drafted
    rejected: bool  # whether the level after them was tested and was not
    levels: int  # advanced
    width: int  # tokens that the target read


def plain_round(search: Search, target: TreeReader, clock: Clock) -> BeamRound:
    """One level of plain beam search."""
    running = search.running
    log_p = target.read(running)
    clock.end(Stage.VERIFY)
    search.running = [Node(token, parent) for parent, token in search.step(log_p)]
    target.keep(search.running)
    clock.end(Stage.ACCEPT)
    return BeamRound(0, 0, False, 1, len(running))


def speculative_round(search: Search, target: TreeReader, drafter: TreeReader, gamma: int, clock: Clock) -> BeamRound:
    """One round of speculative beam search, of `gamma` levels of guesses."""
    guesses = draft(search, drafter, gamma)
    clock.end(Stage.DRAFT)
    nodes = [*target.unread(search.running), *guesses]
    log_p = target.read(nodes)
    clock.end(Stage.VERIFY)
    levels, accepted = advance(search, nodes, log_p)
    target.keep(search.running)
    drafter.keep(search.running)
    clock.end(Stage.ACCEPT)
    rejected = not search.over and accepted < gamma
    return BeamRound(gamma, accepted, rejected, levels, len(nodes))


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


def advance(search: Search, nodes: Sequence[Node], log_p: Tensor) -> tuple[int, int]:
    """Advances the search by log p [nodes, V] after each of the nodes, level by level, as far as they reach. Returns
    how many levels, and how many of them were accepted."""
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


def drafted(chosen: Sequence[Chosen]) -> list[Node] | None:
    """The guesses that these continuations are, or None unless all of them were drafted: top_w(M_p) is a part of
    top_u(M_q)."""
    found = [node for parent, token in chosen if (node := parent.children.get(token)) is not None]
    return found if len(found) == len(chosen) else None
