"""EAGLE-2's dynamic tree: the guesses are those of a search in plain Python, by row and by gamma."""

import math

import pytest
import torch
from decoder_cases import V, make_drafter, tabular_model, texts_of
from small_runs import parts_of
from tabular import random_table

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.token_tree import MISSING
from specbench.drafters.tree_shapes import DynamicTree, best_nodes

NODES, WIDTH = 7, 3  # of make_drafter


def search(table, text, gamma, temperature):
    """The texts of the guesses after a text: the best of all that were seen."""
    frontier, seen = [((), 0.0)], []
    for _ in range(gamma):
        found = []
        for path, score in frontier:
            before, last = [*text, *path][-2:]
            log_q = (table[before, last].double() / (temperature or 1)).log_softmax(-1)
            found += [((*path, int(x)), score + float(log_q[x])) for x in log_q.topk(WIDTH).indices]
        seen += found
        frontier = sorted(found, key=lambda pair: -pair[1])[:WIDTH]
    return {path for path, _ in sorted(seen, key=lambda pair: -pair[1])[:NODES]}


def paths(draft, row):
    return {*texts_of(draft, row).values()}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_the_tree_is_that_of_a_search(temperature):
    table, sampling = random_table(V, 3), Sampling(temperature)
    target, helper = tabular_model(random_table(V, 4), sampling), tabular_model(table, sampling)
    texts, gamma = [[1, 2, 3], [4, 5, 6], [7, 8], [9, 1, 2], [3, 3, 3, 3]], [4, 4, 2, 1, 0]
    state = State.start([Sequence(text, 30, key) for key, text in enumerate(texts)], [], 20, target.device)
    drafter = make_drafter("tree_dynamic", target, "", helper)
    drafter.begin(state)
    draft = drafter.propose(state, gamma)
    assert draft.probs is None and draft.steps().tolist() == [
        max(map(len, paths(draft, row)), default=0) for row in range(len(texts))
    ]
    for row, (text, depth) in enumerate(zip(texts, gamma, strict=True)):
        assert paths(draft, row) == search(table, text, depth, temperature)
    assert len({frozenset(draft.parents[row].tolist()) for row in range(2)}) == 2  # shapes of their own
    target.allocate(len(texts), 60)
    target.prefill(state)
    scores = target.score(state, draft)
    assert scores.width == NODES + 1  # what the target reads
    stored = sum(DynamicTree(1, WIDTH).levels(4)) + 1
    assert scores.p.nbytes == 4 * len(texts) * stored * V and (scores.logits is None) == (temperature > 0)


def share(left, q, k):
    """How many of the guesses that are left stand below child k of three, which was drawn with probability q."""
    if k == 2 or (k == 0 and q > 0.999999):
        return left
    accepted = (1 + q) / (2 if k == 0 else 4)
    ahead = math.log(4 * accepted / (1 - accepted)) / -math.log(0.7)
    return min(left, max(0, round((left + ahead) / 2)))


@pytest.mark.parametrize(("temperature", "gamma"), [(1.0, 4), (0.6, 4), (1.5, 2)])
def test_a_drawn_tree_has_the_laws_and_shares_of_plain_python(temperature, gamma):
    """Each guess's q is its parent's without earlier siblings, and it is there if anything is left of that."""
    table, sampling = random_table(V, 3, spread=3.0), Sampling(temperature)
    target, helper = tabular_model(random_table(V, 4), sampling), tabular_model(table, sampling)
    texts = [[1, 2, 3], [4, 5, 6], [7, 8], [9, 1, 2], [3, 3, 3, 3]]
    state = State.start([Sequence(text, 30, key) for key, text in enumerate(texts)], [], 20, target.device)
    drafter = make_drafter("tree_sampled", target, "", helper)
    drafter.begin(state)
    draft = drafter.propose(state, [gamma] * len(texts))
    for row, text in enumerate(texts):
        children: dict[int, list[int]] = {}
        for node, above in enumerate(draft.parents[row].tolist(), 1):
            if above != MISSING:
                children.setdefault(above, []).append(node)
        level = [(0, [], NODES)]  # nodes that have children, their texts, and how many guesses may be below them
        count = 0
        for _ in range(gamma):
            found = []
            for node, path, left in level:
                before, last = [*text, *path][-2:]
                law = (table[before, last].double() / temperature).softmax(-1)
                own = children.pop(node, [])
                for k, child in enumerate(own):
                    x = int(draft.tokens[row, child - 1])
                    law = law / law.sum()
                    assert torch.allclose(draft.probs[row, child - 1].double(), law, atol=1e-6) and law[x] > 0
                    below = share(left - 1, float(law[x]), k)
                    found.append((child, [*path, x], below))
                    left, law[x] = left - 1 - below, 0
                assert left == 0 or len(own) == WIDTH
                count += len(own)
            level = sorted([own for own in found if own[2]], key=lambda own: -own[2])[:WIDTH]
        assert not children and count <= NODES
    assert gamma == 2 or len({tuple(draft.parents[row].tolist()) for row in range(len(texts))}) > 1


def test_a_certain_guess_leaves_its_siblings_nothing():
    """q is 1 all along the first text. In the second one all tokens are as likely."""
    table = torch.zeros(V, V, V)
    table[1, :, 4], table[:, 4, 5], table[4, :, 6], table[5, :, 7] = 200.0, 200.0, 200.0, 200.0
    target = tabular_model(random_table(V, 4), Sampling(1.0))
    state = State.start([Sequence([1, 2], 30, 0), Sequence([8, 9], 30, 1)], [], 20, target.device)
    drafter = make_drafter("tree_sampled", target, "", tabular_model(table, Sampling(1.0)))
    drafter.begin(state)
    draft = drafter.propose(state, [4, 4])
    assert paths(draft, 0) == {(4,), (4, 5), (4, 5, 6), (4, 5, 6, 7)}
    assert draft.exists().sum(1).tolist() == [4, 5]


@pytest.mark.parametrize("drafter", ["tree", "dynamic_tree"])
def test_a_temperature_of_the_drafter_draws_nothing_at_temperature_0(drafter):
    own = parts_of(f"drafter={drafter}", "temperature=0", "drafter.temperature=0.4", "executor=eager")
    assert own.drafter.shape.point_masses


def test_equal_nodes_keep_their_parents():
    score = torch.tensor([[-1.0, 0.0, -1.0, 0.0, -torch.inf], [-torch.inf] * 5])
    assert best_nodes(score, 3).tolist() == [[True, True, False, True, False], [False] * 5]
