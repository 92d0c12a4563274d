"""Token recycling: against a table in plain Python."""

import pytest
from decoder_cases import V, jobs_of, tabular_model, verifier_of

from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.drafters.token_recycling import TokenRecyclingDrafter
from specbench.policies.gamma.fixed import FixedGamma
from specbench.verifiers.iterative import IterativeVerifier

CHILDREN, SIZE, GAMMA, LIMIT = 3, 9, 3, 40
PROMPT = [3, 7, 1, 3, 7, 2, 3]


def paths(table, drafter, last):
    """The guesses of a draft, each as the tokens on the path to it, without those that the table does not have."""
    found = {-1: (last,)}
    for node, (parent, rank) in enumerate(zip(drafter.parent, drafter.rank, strict=True)):
        after = table.get(found[parent][-1], []) if parent in found else []
        if rank < len(after):
            found[node] = (*found[parent], after[rank])
    return [path[1:] for node, path in sorted(found.items()) if node >= 0]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("fault", [False, True])
def test_drafts_are_those_of_a_table_in_plain_python(temperature, fault, few_contexts):
    """The table of the next round follows from the p of this one; one that reads p of the parents is found out."""
    sampling = Sampling(temperature=temperature)
    target, drafter = tabular_model(few_contexts.target, sampling), TokenRecyclingDrafter(V, CHILDREN, SIZE, GAMMA)
    state = State.start(jobs_of([PROMPT], [LIMIT], [1]), [], SIZE + 1, target.device)
    target.allocate(1, state.tokens.shape[1])
    target.prefill(state)
    table, wrong, text = {3: [7], 7: [2, 1], 1: [3], 2: [3]}, [], list(PROMPT)

    def keep(state, scores, draft, verdict, kept):
        tokens, parents = draft.tokens[0].tolist(), draft.parents.expand_as(draft.tokens)[0].tolist()
        there, nodes = draft.exists()[0].tolist(), {-1: ()}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if there[node]:
                nodes[node] = (*nodes[parent], token)
        room = LIMIT - len(text) - 1
        expected = [path for path in paths(table, drafter, text[-1]) if len(path) <= room]
        wrong.append([path for node, path in sorted(nodes.items()) if node >= 0] != expected)
        read = {text[-1]: 0} | {path[-1]: node + 1 for node, path in nodes.items() if node >= 0}
        for token, entry in read.items():
            law = scores.p if temperature else scores.logits.softmax(-1)
            p = law[0, max(0, entry - 1) if fault else entry].tolist()
            best = [x for x in sorted(range(V), key=lambda x: -p[x])[:CHILDREN] if p[x] > 0]
            table[token] = [*best, *(x for x in table.get(token, []) if x not in best)][:CHILDREN]
        text[:] = state.texts[0]

    verifier = verifier_of(IterativeVerifier, sampling)
    decode_speculative(state, target, drafter, FixedGamma(GAMMA), verifier, Clock(), keep)
    assert any(wrong) == fault and len(wrong) > 4
