"""Token trees: packing, the walk through a tree against the oracle, and the tree drafters' own distributions."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from choosing import in_turn
from decoder_cases import V
from random_cases import random_bits, random_distributions
from tabular import random_table

from specbench.decoding.draft import Draft
from specbench.decoding.noise import exponentials
from specbench.decoding.token_tree import MISSING, branching_tree, level_slices, levels_of
from specbench.decoding.verify_tree import iterative_sampling, longest_path, match
from specbench.drafters.blockwise import chosen_tree
from specbench.drafters.multi_draft import join_drafts
from specbench.drafters.tree_shapes import without_replacement
from specbench.verifiers.chains import block_verification, rejection_sampling
from specbench.verifiers.trees import TypicalVerifier

ROWS = 150
TREES = {
    "wide": branching_tree([4, 2, 1]),
    "three chains": branching_tree([3, 1, 1]),
    "sparse": (0, 0, 0, 1, 1, 2, 4),
    "chain": (0, 1, 2),
}
BY_ROW = "one of its own in each row"


def p_after(table, text):
    """A distribution that depends on the last two tokens, as float64."""
    before, last = [0, 0, *text][-2:]
    return table[before, last].double().softmax(-1)


def own_parents(levels, generator):
    """Parents [B, N] that differ by row; about a fifth of the nodes is missing."""
    parents = torch.full((ROWS, sum(levels)), MISSING)
    chance = torch.rand(parents.shape, generator=generator)
    for row in range(ROWS):
        above = [0]
        for level in level_slices(levels):
            columns = range(level.start, level.stop)
            for i in columns:
                if above and chance[row, i] > 0.2:
                    parents[row, i] = above[int((chance[row, i] - 0.2) / 0.8 * len(above))]
            above = [i + 1 for i in columns if parents[row, i] != MISSING]
    return parents


def random_tree(name, seed, repeats):
    """The target's table, and a draft whose siblings were drawn independently from one q, or without replacement."""
    generator = torch.Generator().manual_seed(seed)
    levels = levels_of(TREES["wide" if name == BY_ROW else name])
    parents = own_parents(levels, generator) if name == BY_ROW else torch.tensor([TREES[name]] * ROWS)
    p_table, q_table = random_table(V, seed), random_table(V, seed + 1, spread=0.7)
    N = parents.shape[1]
    tokens = torch.zeros(ROWS, N, dtype=torch.long)
    q = torch.zeros(ROWS, N, V, dtype=torch.float64)
    for row in range(ROWS):
        texts = {0: []}
        parent = parents[row].tolist()
        for i, above in enumerate(parent):
            if above == MISSING:
                continue
            distribution = p_after(q_table, texts[above])
            if not repeats:
                for sibling in range(i):
                    if parent[sibling] == above:
                        distribution[tokens[row, sibling]] = 0
                distribution = distribution / distribution.sum()
            q[row, i] = distribution
            tokens[row, i] = torch.multinomial(distribution, 1, generator=generator)
            texts[i + 1] = [*texts[above], int(tokens[row, i])]
    depth = torch.randint(len(levels) + 1, (ROWS,), generator=generator)
    count = torch.tensor([0, *np.cumsum(levels)])[depth]
    draft = Draft(tokens, levels, None if name == "chain" else parents, q, count, repeats=repeats)
    return p_table, draft, generator


def p_of(p_table, draft):
    """The target's distributions of every node, [B, N+1, V]."""
    rows = []
    for row, parent in zip(draft.tokens.tolist(), draft.parents.expand(ROWS, -1).tolist(), strict=True):
        texts = [[]]
        for token, above in zip(row, parent, strict=True):
            texts.append([*texts[above], token] if above != MISSING else [])
        rows.append(torch.stack([p_after(p_table, text) for text in texts]))
    return torch.stack(rows)


@pytest.mark.parametrize(("name", "repeats"), in_turn(
    [*TREES, BY_ROW], [(True,), (False,)], ["three chains", "sparse", BY_ROW]
))  # fmt: skip
def test_a_tree_is_verified_as_the_oracle_does(name, repeats):
    p_table, draft, generator = random_tree(name, 3, repeats)
    N, D = draft.tokens.shape[1], draft.depth
    r = torch.rand(ROWS, N, generator=generator, dtype=torch.float64)
    bits = random_bits((ROWS, D + 1), generator)
    times = exponentials(bits, V).numpy()
    p = p_of(p_table, draft)
    verdict = iterative_sampling(p, draft, r, bits)
    greedy = match(p, draft, None)
    for row in range(ROWS):
        parent = draft.parents.expand(ROWS, -1)[row].tolist()
        there = [i for i in range(int(draft.count[row])) if parent[i] != MISSING]
        part = draft.tokens[row, there].tolist(), [there.index(parent[i] - 1) if parent[i] else -1 for i in there]

        def target(text):
            return p_after(p_table, text).numpy()

        accepted, t = reference.verify_tree(
            target, *part, draft.probs[row, there].numpy(), r[row, there].numpy(), times[row]
        )
        n = int(verdict.accepted[row])
        assert [*accepted, t] == verdict.tokens[row, : n + 1].tolist()
        assert draft.tokens[row, verdict.path[row, 1 : n + 1] - 1].tolist() == accepted
        accepted, t = reference.greedy_tree(target, *part)
        assert [*accepted, t] == greedy.tokens[row, : int(greedy.accepted[row]) + 1].tolist()


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_block_and_rejection_are_the_oracles(rule, point_mass):
    N, generator = 4, torch.Generator().manual_seed(4)
    p, q = (random_distributions((ROWS, n), seed).double() for n, seed in ((N + 1, 1), (N, 2)))
    p, q = (distribution / distribution.sum(-1, keepdim=True) for distribution in (p, q))
    x = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(ROWS, N)
    if point_mass:
        q = torch.nn.functional.one_hot(x, V).double()
    count = torch.randint(N + 1, (ROWS,), generator=generator)
    r, bits = torch.rand(ROWS, N, generator=generator, dtype=torch.float64), random_bits((ROWS, N + 1), generator)
    times = exponentials(bits, V).numpy()
    judge = {"block": block_verification, "rejection": rejection_sampling}[rule]
    oracle = {"block": reference.block_accept, "rejection": reference.rejection_accept}[rule]
    verdict = judge(p, Draft.chain(x, None if point_mass else q, count), r, bits)
    with np.errstate(divide="ignore", invalid="ignore"):
        for row in range(ROWS):
            g = int(count[row])
            n, t = oracle(
                p[row, : g + 1].numpy(), q[row, :g].numpy(), x[row, :g].tolist(), r[row, :g].numpy(), times[row]
            )
            assert verdict.accepted[row] == n
            assert verdict.tokens[row, : n + 1].tolist() == [*x[row, :n].tolist(), t]


def test_distinct_children_have_the_distribution_they_say():
    trials = 100_000
    q = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    bits = random_bits((trials, 1), torch.Generator().manual_seed(1))
    tokens, distributions = without_replacement(q.expand(trials, 1, 5), bits, 2)
    assert (tokens[:, 0] != tokens[:, 1]).all()
    first = torch.bincount(tokens[:, 0], minlength=5) / trials
    assert torch.allclose(first, q, atol=5 * 0.5 / trials**0.5)
    for x in range(4):
        rows = tokens[:, 0] == x
        rest = q.clone()
        rest[x] = 0
        assert torch.allclose(distributions[rows, 1], rest / rest.sum())
        second = torch.bincount(tokens[rows, 1], minlength=5) / rows.sum()
        assert torch.allclose(second, rest / rest.sum(), atol=5 * 0.5 / rows.sum().item() ** 0.5)


def test_children_beyond_the_support_of_q_are_never_accepted():
    q = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 1, 4)
    tokens, distributions = without_replacement(q, torch.zeros(1, 1, dtype=torch.long), 3)
    assert tokens.tolist() == [[1, 1, 1]] and distributions[0].tolist() == [[0, 1, 0, 0]] * 3
    draft = Draft.tree(tokens, (0, 0, 0), distributions, torch.tensor([3]))
    p = torch.tensor([[0.3, 0.0, 0.7, 0.0]]).expand(1, 4, 4)
    verdict = iterative_sampling(p, draft, torch.full((1, 3), 1e-9), torch.zeros(1, 2, dtype=torch.long))
    assert verdict.accepted[0] == 0 and verdict.tokens[0, 0] in (0, 2)


def test_beta_of_typical_acceptance_is_its_rate_on_a_chain():
    """Of each step alone, whatever is accepted before and after it; an outcome would be 0 or 1."""
    p_table, draft, _ = random_tree("chain", 5, True)
    draft = replace(draft, count=torch.full((ROWS,), 3))
    p, verifier = p_of(p_table, draft), TypicalVerifier(greedy=False, epsilon=0.09, delta=0.3)
    noise = SimpleNamespace(bits=random_bits((ROWS, 4), torch.Generator().manual_seed(1)))
    verdict = verifier.accept(p, draft, noise)
    beta, steps = verifier.beta(p, draft, verdict), torch.arange(3)
    assert ((beta > 0.01) & (beta < 0.99)).any(0).all()
    tested, taken = steps <= verdict.accepted[:, None], steps < verdict.accepted[:, None]
    difference = ((beta - taken.double()) * tested).sum() / tested.sum()
    assert abs(difference) < 5 * 0.5 / tested.sum() ** 0.5
    assert beta[:, 1].std() > 0.05  # it depends on the text, so a constant would not do
    for row in range(20):
        distribution = p[row, 1].numpy()
        passing = distribution >= min(0.09, 0.3 * np.exp((distribution * np.log(distribution)).sum()))
        assert beta[row, 1].item() == pytest.approx(draft.probs[row, 1].numpy()[passing].sum())


def test_drafts_stand_side_by_side():
    """A wrong parent would cost guesses and no exactness: each q is that of the guess's own draw."""
    one = Draft.tree(torch.tensor([[1, 2, 3]]), branching_tree([1, 2]), None, torch.tensor([3]))
    two = Draft.tree(torch.tensor([[4, 5, 6, 7]]), branching_tree([2, 1]), None, torch.tensor([2]))
    both = join_drafts([one, two])
    assert both.tokens.tolist() == [[1, 4, 5, 2, 3, 6, 7]]
    assert both.levels == (3, 4) and both.parent.tolist() == [[0, 0, 0, 1, 1, 2, 3]] and both.count.tolist() == [5]


def test_the_chosen_tree_has_the_likeliest_nodes():
    parent, rank = chosen_tree([[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]], 5)
    # .5, .2, .5*.4 = .2, .5*.3 = .15, .1; then .2*.4 = .08
    assert sorted(zip(parent, rank, strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    parent, rank = chosen_tree([[0.2, 0.3], [0.1, 0.0]], 9)  # accuracies that do not fall, and a zero
    assert len(parent) == len(rank) and all(above < i for i, above in enumerate(parent, 1))


def test_typical_acceptance_takes_the_longest_path_that_passes():
    parent = (0, 0, 1, 2, 4)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    p = torch.full((1, 6, V), 0.01)
    p[0, 0, 1] = p[0, 0, 2] = 0.4
    p[0, 1, 0] = p[0, 2, 4] = p[0, 4, 5] = 0.8  # node 2 (a 3 after 1) fails, nodes 3 and 4 pass
    p = p / p.sum(-1, keepdim=True)
    verifier = TypicalVerifier(greedy=True, epsilon=0.3, delta=0.9)
    draft = Draft.tree(tokens, parent, None, torch.tensor([5]))
    verdict = verifier.accept(p, draft, None)
    assert verdict.path.tolist() == [[0, 2, 4, 5]] and verdict.accepted.tolist() == [3]
    assert verdict.tokens[0, :3].tolist() == [2, 4, 5]
    passing = torch.zeros(1, 5, dtype=torch.bool)
    nothing = longest_path(p, draft, passing, lambda distribution, n: distribution.argmax(-1))
    assert nothing.accepted.tolist() == [0]
