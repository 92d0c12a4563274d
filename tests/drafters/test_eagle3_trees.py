"""Trees of EAGLE checkpoints: each node's q, by the forward pass in numpy along its path."""

from functools import cache

import pytest
import torch
from choosing import only
from decoder_cases import queued, shape_of, spare_of, texts_of
from small_runs import composed, small
from test_eagle3 import expected_laws, overrides, parts

from specbench.config.check import check
from specbench.decoding import token_tree
from specbench.decoding.draft import Scores
from specbench.decoding.noise import prompt_key
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.token_tree import Tree
from specbench.decoding.verify_tree import match
from specbench.drafters import tree
from specbench.errors import ConfigError
from specbench.policies.base import FixedGamma
from specbench.verifiers.trees import IterativeVerifier

GAMMA = 3


class SomePath(IterativeVerifier):
    """Accepts paths of all lengths and places: guesses have much of the mass that t is drawn from."""

    def accept(self, p, draft, noise):
        p, (rows, nodes) = p.clone(), draft.exists().nonzero(as_tuple=True)
        above = draft.parents.expand_as(draft.tokens)[rows, nodes]
        p[rows, above, draft.tokens[rows, nodes]] += 0.2 + (nodes % 3 == 1)
        return match(p, draft, noise.bits)


def grown(name):
    """What was drafted for ragged texts in trees: by draft the text before it, the texts of nodes, and their q."""
    own, found, paths = parts(name), [], set()
    target, model = own.target, own.drafter.pairs
    drafter = type(own.drafter)(model, target.vocab_size, GAMMA, shape_of("eagle3_distinct", Sampling()))
    prompts = [[5, 9, 2, 7, 11, 3, 8], [4, 1, 6]]
    jobs = [Sequence(prompt, len(prompt) + 16, prompt_key(0, str(i))) for i, prompt in enumerate(prompts)]

    def note(state, scores, draft, verdict, kept):
        for row, before in enumerate(texts):
            if state.kept[row] and draft.depth:
                nodes = texts_of(draft, row)
                q = draft.probs[row, list(nodes)].clone()
                found.append((before, list(nodes.values()), q))
                paths.add(tuple(verdict.path[row, 1 : verdict.accepted[row] + 1].tolist()))

    texts = []
    propose = drafter.propose

    def before(state, gamma):
        texts[:] = [list(sequence.tokens) if sequence else [] for sequence in state.sequences]
        return propose(state, gamma)

    drafter.propose = before
    queued(target, drafter, jobs, 2, SomePath(False), FixedGamma(GAMMA), 4, spare_of("eagle3_distinct", GAMMA), note)
    assert len(paths) > 4 and {len(path) for path in paths} >= {0, 1, 2}
    return found


@cache
def law_after(name, text, path):
    """q [V] of the guess that follows a path of guesses."""
    return expected_laws(name, list(text), torch.tensor([*path, 0]))[-1]


def wrong(name, found):
    """How many of the drafts do not have the q of the forward pass in numpy."""
    return sum(not same_q(name, *draft) for draft in found)


def same_q(name, text, nodes, q):
    """Whether each q is the law after the node's parent without the siblings before it."""
    for number, (path, own) in enumerate(zip(nodes, q, strict=True)):
        law = law_after(name, tuple(text), path[:-1]).clone()
        law[[other[-1] for other in nodes[:number] if other[:-1] == path[:-1]]] = 0
        if not torch.allclose(own, law / law.sum(), atol=1e-4, rtol=0):
            return False
    return True


@pytest.mark.parametrize("name", only(["plain", "two_layers"], ["plain", "two_layers", "qwen"]))
def test_trees_are_those_of_the_whole_text(name):
    """In ragged rows, after paths of all kinds."""
    found = grown(name)
    assert len(found) > 5 and wrong(name, found[::3]) == 0


def seeing_siblings(own):
    def changed(*given):
        whole = own(*given)
        return Tree(whole.depth, torch.ones_like(whole.sees).tril(whole.sees.shape[2] - whole.sees.shape[1]))

    return changed


def one_further(own):
    def changed(*given):
        whole = own(*given)
        return Tree(whole.depth + 1, whole.sees)

    return changed


CONTROLS = {
    "keys of siblings": (token_tree, "newest", seeing_siblings),
    "positions": (token_tree, "newest", one_further),
    "states of another node": (tree, "take_rows", lambda own: lambda values, up: own(values, up * 0)),
    "states of the target that are not the path's": (
        Scores, "hidden_along", lambda own: lambda self, verdict: self.hidden[:, : GAMMA + 1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_is_seen(name, monkeypatch):
    """Negative controls."""
    owner, part, change = CONTROLS[name]
    monkeypatch.setattr(owner, part, change(getattr(owner, part)))
    assert wrong("plain", grown("plain")[:6]) > 0


@pytest.mark.parametrize(("more", "expected"), [
    (["drafter.nodes=8"], "drafts trees: use verifier=iterative, traversal"),
    (["drafter.nodes=8", "drafter.branching=[2]", "verifier=iterative"], r"branching=\[2\] is not possible"),
    (["drafter.nodes=8", "gamma_policy=confidence", "verifier=iterative"], "a drafter that is a model, and chains"),
    (["drafter.branching=[40,40]", "verifier=iterative"], "the leaves of the tree, must be at most 1000"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(more, expected, monkeypatch):
    with pytest.raises(ConfigError, match=expected):
        check(composed(*small(*overrides("plain"), *more)))
