"""Rules of verification in plain Python with exact fractions, and every draft and outcome of them: V = 3, small trees.

A rule lists the outcomes of one draft: how likely each is, what it keeps, the distribution of the token after it, and
uniforms r_i that lead there, each next to the bound that decides.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import product

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
