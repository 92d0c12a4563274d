"""Lookahead decoding: against a window by absolute places, and a pool of all n-grams, in plain Python."""

import pytest
from decoder_cases import V, jobs_of, tabular_model, verifier_of

from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.drafters.lookahead import LookaheadDrafter
from specbench.policies.gamma.fixed import FixedGamma
from specbench.verifiers.iterative import IterativeVerifier

PROMPT, LIMIT = [3, 7, 1, 3, 7, 2, 3], 47


class Plain:
    """The window as tokens by level and by place in the text, and the pool as a list of n-grams, the last seen at the
    end."""

    def __init__(self, table, ngram, guesses, prompt, gamma):
        self.table, self.ngram, self.guesses, self.width = table, ngram, guesses, gamma + 2 - ngram
        self.text = list(PROMPT)
        self.grams = [tuple(PROMPT[i : i + ngram]) for i in range(len(PROMPT) - ngram + 1)] if prompt else []
        self.levels = [{self.end + level + j: PROMPT[(level + j) % len(PROMPT)] for j in range(self.width)}
                       for level in range(ngram - 1)]  # fmt: skip

    @property
    def end(self):
        return len(self.text)

    def columns(self):
        """The tokens of each column, first levels first."""
        return [tuple(level[self.end + number + j] for number, level in enumerate(self.levels))
                for j in range(self.width)]  # fmt: skip

    def known(self):
        """The n-grams of the pool that begin with the text's last token, the last seen first, without it."""
        own = dict.fromkeys(gram[1:] for gram in reversed(self.grams) if gram[0] == self.text[-1])
        return list(own)[: self.guesses]

    def paths(self, room):
        found = {gram[: n + 1] for gram in self.known() for n in range(len(gram))}
        first = tuple(column[0] for column in self.columns())
        for j, column in enumerate(self.columns()):
            found |= {(*first[:j], *column[: n + 1]) for n in range(len(column))}
        return {path for path in found if len(path) <= room}

    def step(self, new, room):
        """Takes over a round that kept these tokens, whose draft was at most `room` deep."""
        first, made = [column[0] for column in self.columns()], {}
        for j, column in enumerate(self.columns()):
            if j + self.ngram - 1 <= room:
                path = [*self.text, *first[:j], *column]
                made[len(path)] = int(self.table[path[-2], path[-1]].argmax())
                self.grams.append((*column, made[len(path)]))
            else:
                place = self.end + j + self.ngram - 2
                made[place + 1] = self.levels[-1][place]
        before, self.text = [*self.levels[1:], made], [*self.text, *new]
        self.levels = []
        for number, level in enumerate(before):
            places = [self.end + number + j for j in range(self.width)]
            self.levels.append({place: level.get(place, level[max(level)]) for place in places})


@pytest.mark.parametrize(("ngram", "guesses", "prompt", "gamma"), [(3, 2, True, 4), (2, 1, False, 3), (4, 6, True, 3)])
@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_are_those_of_plain_python(ngram, guesses, prompt, gamma, temperature, few_contexts):
    sampling = Sampling(temperature=temperature)
    target = tabular_model(few_contexts.target, sampling)
    drafter = LookaheadDrafter(ngram, guesses, prompt, gamma)
    state = State.start(jobs_of([PROMPT], [LIMIT], [1]), [], len(drafter.parent) + 1, target.device)
    target.allocate(1, state.tokens.shape[1])
    target.prefill(state)
    plain, stale, rounds = Plain(few_contexts.target, ngram, guesses, prompt, gamma), [], []

    def keep(state, scores, draft, verdict, kept):
        tokens, parents = draft.tokens[0].tolist(), draft.parents.expand_as(draft.tokens)[0].tolist()
        there, nodes, room = draft.exists()[0].tolist(), {-1: ()}, min(gamma, LIMIT - plain.end - 1)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if there[node]:
                nodes[node] = (*nodes[parent], token)
        assert {path for path in nodes.values() if path} == plain.paths(room)
        if draft.depth and plain.known():  # what is in the pool is tried first, the last seen n-gram before others
            first = [token for token, parent, on in zip(tokens, parents, there, strict=True) if on and parent == -1]
            assert first[: len(plain.known())] == [gram[0] for gram in plain.known()]
        stale.append({path for path in nodes.values() if path} == plain.paths(room - 1))
        plain.step(state.texts[0][plain.end :], room)
        rounds.append(len(plain.known()))

    verifier = verifier_of(IterativeVerifier, sampling)
    decode_speculative(state, target, drafter, FixedGamma(gamma), verifier, Clock(), keep)
    assert plain.text == state.texts[0] and plain.end == LIMIT and len(rounds) > 4
    assert any(rounds) and not all(stale)  # the pool was used; and a control: shallower drafts are others


def test_a_draft_has_the_nodes_that_it_is_said_to_have():
    for ngram, guesses, gamma in ((2, 1, 1), (3, 2, 4), (5, 7, 9)):
        settings = LookaheadDrafter.Settings(ngram=ngram, guesses=guesses, prompt=False)
        drafter = LookaheadDrafter(ngram, guesses, False, gamma)
        assert len(drafter.parent) == sum(drafter.levels) == LookaheadDrafter.nodes(settings, gamma)
        assert len(drafter.levels) == gamma and all(drafter.levels)


def test_a_trajectory_that_repeats_is_accepted_whole(few_contexts):
    """A target that always counts on: soon its n-grams are in the pool, and rounds keep several tokens."""
    table = few_contexts.constant.clone().fill_(-9)
    for before in range(V):
        for last in range(V):
            table[before, last, (last + 1) % V] = 9
    target = tabular_model(table, Sampling(temperature=0))
    drafter = LookaheadDrafter(4, 2, False, 6)
    state = State.start(jobs_of([[1, 2, 3]], [51], [1]), [], len(drafter.parent) + 1, target.device)
    target.allocate(1, state.tokens.shape[1])
    target.prefill(state)
    kept = []
    verifier = verifier_of(IterativeVerifier, Sampling(temperature=0))
    decode_speculative(state, target, drafter, FixedGamma(6), verifier, Clock(), lambda *r: kept.append(int(r[-1])))
    assert state.texts[0] == [1, 2, 3] + [n % V for n in range(4, 52)]
    assert len(kept) < 30 and max(kept) > 3
