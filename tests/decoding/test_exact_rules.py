"""Which rules leave the target's distribution: proven by enumeration of every draft and outcome, in exact fractions;
and the tensor code decides as these rules do, for uniforms on both sides of each bound."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, partial
from itertools import product

import pytest
import torch
from random_cases import random_bits

from specbench.decoding.draft import Draft
from specbench.decoding.noise import exponentials
from specbench.decoding.verify_tree import iterative_sampling, traversal_sampling
from specbench.verifiers.chains import block_verification

V = 3
NEAR = Fraction(1, 10**9)
Distribution = tuple[Fraction, ...]
Text = tuple[int, ...]


@dataclass
class Node:
    """A guess, drawn from `q` given its earlier siblings; the root is the end of the text."""

    number: int
    text: Text
    q: Distribution = ()
    children: list["Node"] = field(default_factory=list)

    @property
    def ratio(self) -> Callable[[Distribution], Fraction]:
        """p(x) / q(x) of a p, for the guess x."""
        return lambda p: p[self.text[-1]] / self.q[self.text[-1]]


@dataclass
class Outcome:
    chance: Fraction
    node: Node
    distribution: Distribution
    r: dict[int, Fraction]  # by node


Rule = Callable[[Node, Callable[[Text], Distribution]], Iterator[Outcome]]


@cache
def random_distribution(seed: str, text: Text) -> Distribution:
    """A distribution that depends on all of a text; about one probability in seven is zero."""
    generator = random.Random(f"{seed} {text}")
    numbers = [generator.choice((0, 1, 1, 2, 3, 4, 5)) for _ in range(V)]
    return normal(numbers) or random_distribution(seed + "+", text)


def normal(weights: list | Distribution) -> Distribution:
    """Weights as a distribution; () if all are zero."""
    return tuple(Fraction(w) / sum(weights) for w in weights) if any(weights) else ()


def shapes(nodes: int) -> list[tuple[int, ...]]:
    """The parents, in order of depth, of every ordered tree with so many guesses and at most V children of a node."""
    found = [()]
    for i in range(nodes):
        found = [(*parents, above) for parents in found for above in range(max((0, *parents)), i + 1)]
    return [parents for parents in found if max(Counter(parents).values()) <= V]


def drafts(
    parents: tuple[int, ...], q: Callable[[Text], Distribution], replace: bool
) -> Iterator[tuple[Fraction, Node]]:
    """Every draft of a shape with its probability; children of one node are drawn with or without replacement. Where
    no token is left for a child, it repeats the first one as a point mass, as `drafter=tree` does."""
    for tokens in product(range(V), repeat=len(parents)):
        nodes, chance = [Node(0, ())], Fraction(1)
        for i, (above, x) in enumerate(zip(parents, tokens, strict=True), 1):
            up = nodes[above]
            before = [child.text[-1] for child in up.children]
            distribution = q(up.text)
            if not replace:
                rest = [0 if y in before else distribution[y] for y in range(V)]
                distribution = normal(rest) or tuple(Fraction(y == before[0]) for y in range(V))
            nodes.append(Node(i, (*up.text, x), distribution))
            up.children.append(nodes[i])
            chance *= distribution[x]
        if chance:
            yield chance, nodes[0]


def residual(weight: Fraction, p: Distribution, q: Distribution) -> list[Fraction]:
    return [max(Fraction(0), weight * a - b) for a, b in zip(p, q, strict=True)]


def beside(bound: Fraction, accepted: bool) -> Fraction:
    """A uniform that is accepted, or rejected, by a bound."""
    return bound * (1 - NEAR) if accepted else bound + NEAR


def iterative(root: Node, p: Callable[[Text], Distribution]) -> Iterator[Outcome]:
    """The children of a node in turn; each rejection replaces p by norm(max(0, p - q))."""

    def at(node: Node, chance: Fraction, r: dict[int, Fraction]) -> Iterator[Outcome]:
        distribution = p(node.text)
        for child in node.children:
            bound = min(Fraction(1), child.ratio(distribution))
            yield from at(child, chance * bound, r | {child.number: beside(bound, True)}) if bound else ()
            chance, r = chance * (1 - bound), r | {child.number: beside(bound, False)}
            if not chance:
                return
            distribution = normal(residual(Fraction(1), distribution, child.q))
        yield Outcome(chance, node, distribution, r)

    return at(root, Fraction(1), {})


def in_turn(tests: list[tuple[Fraction, Node, Distribution]]) -> Iterator[Outcome]:
    """The outcomes of nodes that are tested one after the other, each by (bound, node, distribution after it)."""
    chance, r = Fraction(1), {}
    for bound, node, distribution in tests:
        if chance * bound:
            yield Outcome(chance * bound, node, distribution, r | {node.number: beside(bound, True)})
        chance, r = chance * (1 - bound), r | {node.number: beside(bound, False)}


def whole_ratio(path: list[Node], p: Callable[[Text], Distribution]) -> Fraction:
    """The product of p / q along a chain, unbounded: HSD's released code accepts the whole draft with it."""
    found = Fraction(1)
    for node in path[1:]:
        found *= node.ratio(p(node.text[:-1]))
    return min(Fraction(1), found)


def block(
    root: Node, p: Callable[[Text], Distribution], last: Callable[..., Fraction] | None = None
) -> Iterator[Outcome]:
    """Block verification (2403.10444) of a chain; `last` is another rule for the whole draft."""
    path = [root]
    while path[-1].children:
        path += path[-1].children
    weights = [Fraction(1)]
    for node in path[1:]:
        weights.append(min(Fraction(1), weights[-1] * node.ratio(p(node.text[:-1]))))
    tests = [(last(path, p) if last else weights[-1], path[-1], p(path[-1].text))]
    for node, child, weight in list(zip(path, path[1:], weights, strict=False))[::-1]:
        rest = residual(weight, p(node.text), child.q)
        total = sum(rest) + 1 - weight
        bound = Fraction(1) if node is root else sum(rest) / total if total else Fraction(0)
        tests.append((bound, node, normal(rest) or p(node.text)))
    return in_turn(tests)


def of_paper(left: Fraction, weight: Fraction, taken: Fraction) -> Fraction:
    return left / (left + 1 - weight) if left else Fraction(0)


def of_public_code(left: Fraction, weight: Fraction, taken: Fraction) -> Fraction:
    """What a published implementation has instead; wrong."""
    return min(Fraction(1), left / (1 - taken)) if taken < 1 else Fraction(0)


def traversal(
    root: Node, p: Callable[[Text], Distribution], after: Callable[..., Fraction] = of_paper
) -> Iterator[Outcome]:
    """Traversal verification (2505.12398): goes down to the first leaf that is left; if it is rejected, takes it off
    its parent, whose distribution becomes the residual and whose weight is `after` that."""

    def tests(node: Node, weight: Fraction) -> Iterator[tuple[Fraction, Node, Distribution]]:
        distribution = p(node.text)
        for child in node.children:
            yield from tests(child, min(Fraction(1), weight * child.ratio(distribution)))
            rest = residual(weight, distribution, child.q)
            distribution = normal(rest) or distribution
            weight = after(sum(rest), weight, child.q[child.text[-1]])
            weight = Fraction(1) if node is root else weight
        yield weight, node, distribution

    return in_turn(list(tests(root, Fraction(1))))


def total_variation(rule: Rule, shape: tuple[int, ...], seed: int, replace: bool = False) -> tuple[Fraction, Fraction]:
    """Between the distribution of whole texts, if the target writes on after a round, and the target's; and the
    expected tokens of a round. Over every draft and outcome."""
    p, q = (lambda text, name=name: random_distribution(f"{name}{seed}", text) for name in "pq")
    emitted, tokens = Counter[Text](), Fraction(0)
    for likely, root in drafts(shape, q, replace):
        for outcome in rule(root, p):
            tokens += likely * outcome.chance * (len(outcome.node.text) + 1)
            for x in range(V):
                emitted[(*outcome.node.text, x)] += likely * outcome.chance * outcome.distribution[x]
    apart = Fraction(0)
    for text in product(range(V), repeat=max(map(len, emitted))):
        written, target = Fraction(0), Fraction(1)
        for end, x in enumerate(text):
            next_x = p(text[:end])[x]
            written, target = written * next_x + emitted[text[: end + 1]], target * next_x
        apart += abs(written - target) / 2
    return apart, tokens


SHAPES = [shape for nodes in range(1, 5) for shape in shapes(nodes)]
CHAINS = [tuple(range(nodes)) for nodes in range(1, 5)]
TENSORS = {iterative: iterative_sampling, block: block_verification, traversal: traversal_sampling}
PUBLIC, HSD = partial(traversal, after=of_public_code), partial(block, last=whole_ratio)


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
    """Controls: `of_public_code` is right without children, HSD's `whole_ratio` for one guess."""
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
