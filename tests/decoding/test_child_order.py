"""Guesses that are tried in a random order (SpecInfer): the same tree, and the same distribution if it is random."""

import numpy as np
import pytest
import torch
from decoder_cases import V
from distribution_cases import FEW, Distribution, decode, worst_excess
from random_cases import random_bits

from specbench.decoding.draft import Draft
from specbench.decoding.token_tree import branching_tree
from specbench.decoding.verify_tree import iterative_sampling
from specbench.drafters.multi_draft import shuffled
from specbench.drafters.tree_shapes import without_replacement
from specbench.verifiers.iterative import IterativeVerifier

ROWS, TOKENS = 60_000, 6
P = torch.tensor([0.30, 0.25, 0.2, 0.15, 0.07, 0.03], dtype=torch.float64)
Q = torch.tensor([[0.05, 0.1, 0.1, 0.15, 0.3, 0.3], [0.5, 0.3, 0.1, 0.05, 0.03, 0.02]], dtype=torch.float64)


@pytest.fixture
def tables(few_contexts):
    return few_contexts


def paths(draft, row):
    """Each node of a row as the tokens on its path, with its q."""
    texts, parents = {0: ()}, draft.parents.expand(len(draft.tokens), -1)[row].tolist()
    found = []
    for node, above in enumerate(parents, 1):
        texts[node] = (*texts[above], int(draft.tokens[row, node - 1]))
        found.append((texts[node], tuple(draft.probs[row, node - 1].tolist())))
    return sorted(found)


def test_a_shuffled_tree_is_the_same_tree_in_every_order():
    generator = torch.Generator().manual_seed(2)
    parent, rows = branching_tree([4, 2, 1]), 500
    tokens, probs = torch.randint(V, (rows, 20), generator=generator), torch.rand(rows, 20, V, generator=generator)
    draft = Draft.tree(tokens, parent, probs, torch.full((rows,), 20))
    mixed = shuffled(draft, random_bits(tuple(draft.tokens.shape), generator))
    assert mixed.levels == draft.levels and torch.equal(mixed.count, draft.count)
    assert all(paths(mixed, row) == paths(draft, row) for row in range(20))
    above = mixed.parents
    assert all((above[:, 4:12] <= 4).flatten()) and (above[:, 4:12] > 0).all() and (above[:, :4] == 0).all()
    four = torch.arange(4).expand(len(draft.tokens), 4)
    bits = random_bits((len(four), 4), generator)
    placed = shuffled(Draft.tree(four, (0,) * 4, None, torch.full((len(four),), 4)), bits).tokens
    seen = torch.stack([torch.bincount(column, minlength=4) for column in placed.T])
    assert (seen - len(four) / 4).abs().max() < 5 * (len(four) * 3 / 16) ** 0.5


def excess(children, order):
    """Chi-square of the token after a verified tree of two children, in units of its limit, for one of two ways to draw
    them and a way to order them."""
    generator = torch.Generator().manual_seed(1)
    if children == "independent":
        tokens = torch.stack([torch.multinomial(q, ROWS, replacement=True, generator=generator) for q in Q], 1)
        distributions = Q.expand(ROWS, -1, -1)
    else:
        tokens, distributions = without_replacement(Q[:1].expand(ROWS, 1, -1), random_bits((ROWS, 1), generator), 2)
    draft = Draft.tree(tokens, (0, 0), distributions, torch.full((ROWS,), 2), repeats=children == "independent")
    bits = {"random": random_bits((ROWS, 2), generator), "by guess": tokens, "fixed": None}[order]
    draft = draft if bits is None else shuffled(draft, bits)
    r = torch.rand(ROWS, 2, generator=generator, dtype=torch.float64)
    verdict = iterative_sampling(P.expand(ROWS, 3, -1), draft, r, random_bits((ROWS, 2), generator))
    counts, expected = np.bincount(verdict.tokens[:, 0], minlength=TOKENS), ROWS * P.numpy()
    return ((counts - expected) ** 2 / expected).sum() / (TOKENS - 1 + 8 * np.sqrt(2 * (TOKENS - 1)))


@pytest.mark.parametrize(("children", "order", "kept"), [
    ("independent", "fixed", True), ("independent", "random", True), ("independent", "by guess", False),
    ("distinct", "fixed", True), ("distinct", "random", False),
])  # fmt: skip
def test_which_orders_leave_the_distribution(children, order, kept):
    """Negative controls: an order that depends on the guesses, and any order but their own of guesses that were drawn
    without replacement, whose distributions are those given the ones before. So `drafter=tree` has no such setting."""
    assert (excess(children, order) < 1) == kept


@pytest.mark.slow
def test_a_random_order_leaves_the_target_distribution(tables, number_text):
    outputs = decode(tables, number_text, "multi_draft_random_two", verifier=IterativeVerifier,
                     drafter_table=tables.similar, trials=FEW)  # fmt: skip
    assert worst_excess(outputs, Distribution(tables.target)) < 1


@pytest.mark.slow
def test_an_order_by_the_guess_is_caught_through_the_whole_decoder(tables, number_text):
    """Negative control: the largest token is tried last."""

    def sort(draft):
        return shuffled(draft, draft.tokens) if draft.tokens.shape[1] else draft

    outputs = decode(tables, number_text, "multi_draft_two", verifier=IterativeVerifier, drafter_table=tables.similar,
                     trials=FEW, spoil=sort)  # fmt: skip
    assert worst_excess(outputs, Distribution(tables.target)) > 1 and outputs.max() < V
