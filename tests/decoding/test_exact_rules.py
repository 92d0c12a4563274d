"""Which rules leave the target's distribution: proven by enumeration of every draft and outcome, in exact fractions;
and the tensor code decides as these rules do, for uniforms on both sides of each bound."""

from functools import partial

import pytest
import torch
from plain_rules import (
    V,
    block,
    drafts,
    iterative,
    of_public_code,
    random_distribution,
    shapes,
    total_variation,
    traversal,
    whole_ratio,
)
from random_cases import random_bits

from specbench.decoding.draft import Draft
from specbench.decoding.noise import exponentials
from specbench.decoding.verify import block_verification
from specbench.decoding.verify_tree import iterative_sampling, traversal_sampling

SHAPES = [shape for nodes in range(1, 5) for shape in shapes(nodes)]
CHAINS = [tuple(range(nodes)) for nodes in range(1, 5)]
TENSORS = {iterative: iterative_sampling, block: block_verification, traversal: traversal_sampling}
PUBLIC, HSD = partial(traversal, after=of_public_code), partial(block, last=whole_ratio)


def test_every_shape_is_there():
    """Ordered trees of 1 to 4 edges, by Catalan's numbers, but those with a node of four children."""
    assert len(set(SHAPES)) == len(SHAPES) == 1 + 2 + 5 + 14 - 1 and set(CHAINS) <= set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_distributions_are_exact_and_traversal_keeps_most(shape):
    for seed in range(2):
        apart, kept = total_variation(traversal, shape, seed)
        assert apart == 0
        apart, in_turn = total_variation(iterative, shape, seed)
        assert apart == 0 and kept >= in_turn
        assert total_variation(traversal, shape, seed, replace=True)[0] == 0
        if shape in CHAINS:
            assert total_variation(block, shape, seed) == (0, kept)


def test_traversal_keeps_more():
    gains = [total_variation(traversal, shape, 0)[1] - total_variation(iterative, shape, 0)[1] for shape in SHAPES]
    assert sum(gains) / len(gains) > 0.02 and not any(gains[0:1])


def test_published_faults_are_found():
    """Controls: `of_public_code` is right where no guess has children, or only one that is the third of three tokens;
    HSD's `whole_ratio` is right for one guess."""
    wrong = {shape: max(total_variation(PUBLIC, shape, seed)[0] for seed in range(2)) for shape in SHAPES}
    right = {shape for shape, apart in wrong.items() if not apart}
    assert right == {(0,), (0, 0), (0, 0, 0), (0, 0, 0, 3)} and max(wrong.values()) > 0.1
    hsd = [max(total_variation(HSD, shape, seed)[0] for seed in range(2)) for shape in CHAINS]
    assert hsd[0] == 0 and min(hsd[1:]) > 0.02


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_tensor_code_decides_as_the_plain_rules(shape):
    for rule, judge in TENSORS.items():
        assert (rule is block and shape not in CHAINS) or agree(rule, judge, shape), rule.__name__


def test_the_tensor_code_does_not_decide_as_the_faults():
    """Controls."""
    assert not agree(PUBLIC, traversal_sampling, (0, 1, 1)) and not agree(HSD, block_verification, (0, 1, 2))


def agree(rule, judge, shape):
    """Whether the tensor code keeps the guesses and draws the token of each draft and outcome of a plain rule."""
    found = decisions(rule, judge, shape)
    assert found
    for outcome, n, tokens, race in found:
        weights = [float(w) / e for w, e in zip(outcome.distribution, race[n], strict=True)]
        if tokens[: n + 1] != [*outcome.node.text, weights.index(max(weights))]:
            return False
    return True


def decisions(rule, judge, shape):
    """For every draft and outcome of a plain rule: it, and what the tensor code does for its uniforms. A sibling that
    repeats another one is left out for `iterative`, which stands on both at once."""
    cases, all_p = [], []
    for seed in (0, 1):
        p, q = (partial(random_distribution, f"{name}{seed}") for name in "pq")
        for _, root in drafts(shape, q, False):
            nodes = nodes_of(root)
            if rule is not iterative or len({node.text for node in nodes}) == len(nodes):
                new = [(nodes, outcome) for outcome in rule(root, p)]
                cases, all_p = cases + new, all_p + [[[*map(float, p(node.text))] for node in nodes]] * len(new)
    distributions = torch.tensor(all_p, dtype=torch.double)
    probs = torch.tensor([[[*map(float, node.q)] for node in nodes[1:]] for nodes, _ in cases], dtype=torch.double)
    x = torch.tensor([[node.text[-1] for node in nodes[1:]] for nodes, _ in cases])
    r = [[float(outcome.r.get(i, 0.5)) for i in range(1, len(shape) + 1)] for _, outcome in cases]
    bits = random_bits((len(cases), len(shape) + 1), torch.Generator().manual_seed(1))
    draft = Draft.tree(x, shape, probs, torch.full((len(cases),), len(shape)))
    verdict = judge(distributions, draft, torch.tensor(r, dtype=torch.double), bits)
    races = exponentials(bits, V).tolist()
    triples = zip(cases, verdict.accepted.tolist(), verdict.tokens.tolist(), races, strict=True)
    return [(outcome, n, tokens, race) for (_, outcome), n, tokens, race in triples]


def nodes_of(root):
    """The root and all nodes, by number."""
    found = [root]
    for node in found:
        found += node.children
    return sorted(found, key=lambda node: node.number)
