"""The size of a dynamic tree: chances against plain Python, the choice, and the law of what was chosen."""

import math

import decoder_cases
import numpy as np
import pytest
import torch
from choosing import only
from decoder_cases import V, make_drafter, tabular_model
from law_cases import Law, decode, worst_excess
from small_runs import composed, parts_of, small
from tabular import random_table

from specbench.config.validate import check
from specbench.decoding.noise import prompt_key
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Job, State
from specbench.decoding.token_tree import MISSING
from specbench.drafters.tree_shapes import DynamicTree, SampledTree, pool
from specbench.drafters.tree_size import choose_size, sizes, sums_of_chances
from specbench.errors import ConfigError
from specbench.run import warm_up
from specbench.run.run import run
from specbench.verifiers.iterative import IterativeVerifier


@pytest.mark.parametrize("kind", ["tree_dynamic", "tree_sampled"])
def test_chances_are_those_of_plain_python(kind):
    """Of drawn guesses a child is taken with (1 + q) / 2, a later one with half of that if all before it are not."""
    table = random_table(V, 3, spread=3.0)
    target = tabular_model(random_table(V, 4), Sampling(1.0))
    drafter = make_drafter(kind, target, "", tabular_model(table, Sampling(1.0)))
    heard = []
    drafter.shape.heard = lambda *draft: heard.append(sums_of_chances(*draft))
    texts = [[1, 2, 3], [4, 5, 6], [3, 3, 3, 3]]
    state = State.start([Job(text, 30, key) for key, text in enumerate(texts)], [], 20, target.device)
    drafter.begin(state)
    draft = drafter.propose(state, [4, 4, 0])
    for row, text in enumerate(texts):
        own = {-1: (text, 1.0, 1.0)}  # text, chance, and that no child before was taken
        for node, above in enumerate(draft.parents[row].tolist()):
            if above == MISSING:
                continue
            path, chance, left = own[above]
            x = int(draft.tokens[row, node])
            if kind == "tree_dynamic":
                taken = float(table[path[-2], path[-1]].double().softmax(-1)[x])
            else:
                taken = (1 + float(draft.probs[row, node, x])) / (2 if left == 1 else 4)
                own[above] = path, chance, left * (1 - taken)
            own[node] = [*path, x], chance * left * taken, 1.0
        found = sorted((chance for _, chance, _ in list(own.values())[1:]), reverse=True)
        assert len(found) > 3 or row == 2
        expected = np.cumsum([*found, *[0.0] * 7][:7])
        np.testing.assert_allclose(heard[0][row].numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("seconds", "chosen"), [
    (lambda n, width: 1.0, (32, 4)),
    (lambda n, width: 1 + n, (4, 4)),
    (lambda n, width: 8 + n, (8, 4)),
    (lambda n, width: 6 + n, (4, 4)),  # a quarter of what chances promise is accepted: with them as they are 8
    (lambda n, width: 8 + n + 2 * width, (8, 2)),
    (lambda n, width: math.nan, (32, 4)),
])  # fmt: skip
def test_the_size_with_the_most_tokens_per_second_is_chosen(seconds, chosen):
    """Guesses of half the width have chances that are .9 of the others."""
    tree, tried = DynamicTree(32, 4), []

    def probe(number):
        P = sum(pool(tree.width, 4))
        value = torch.linspace(0, -4, 52)[None, :P] + math.log(1 if tree.width == 4 else 0.9)
        kept = torch.arange(P)[None] < tree.most
        tree.heard(tree, (torch.zeros(1, P), None, value, None, None), kept, 4)
        tried.append((number, tree.most, tree.width))
        return 0.25 * float(value.exp()[kept].sum()), seconds(tree.most, tree.width)

    tree.most, tree.width = 4, 2  # what an earlier run with the same parts has chosen
    told = choose_size(tree, 4, probe)
    assert (tree.most, tree.width) == chosen and f"drafts have {chosen[0]} guesses" in told and tree.heard is None
    every = [*((n, 4) for n in (4, 8, 16, 32)), (4, 2), (8, 2), (14, 2)]  # a tree of width 2 has 2 + 3 * 4 guesses
    assert tried == [*((0, *size) for size in every), *((1, *size) for size in every[::-1])]


def test_an_interrupted_probe_leaves_the_size():
    tree = DynamicTree(20, 4)
    with pytest.raises(RuntimeError):
        choose_size(tree, 4, lambda number: exec("raise RuntimeError"))
    assert (tree.most, tree.width, tree.heard) == (20, 4, None) and sizes(20) == [4, 8, 16, 20] and sizes(3) == [3]


class Chosen(SampledTree):
    """As a choice leaves it."""

    def __init__(self, nodes, width):
        super().__init__(nodes, width)
        self.most = 4


class ChoosesLate(SampledTree):
    """Negative control: whether a draft has nodes follows from the first one that was drawn."""

    def draft(self, grown, gamma, depth):
        tokens, parent, value, place, q = grown
        none = tokens[:, :1] % 2 == 0
        return super().draft((tokens, parent, value.masked_fill(none, -torch.inf), place, q), gamma, depth)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passes"), [(Chosen, True), (ChoosesLate, False)])
def test_the_law_is_the_targets(kind, passes, tables, number_text, monkeypatch):
    monkeypatch.setattr(decoder_cases, "SampledTree", kind)
    found = worst_excess(
        decode(tables, number_text, "tree_sampled", verifier=IterativeVerifier, drafter_table=tables.similar,
               trials=3_000), Law(tables.target))  # fmt: skip
    assert (found < 1) == passes, found


@pytest.mark.parametrize("temperature", only([1], [0, 1]))
def test_a_run_chooses_before_its_first_prompt(temperature, tmp_path, monkeypatch):
    """By probes whose noise is not that of a request."""
    keys = {True: set(), False: set()}  # of requests, and of probes

    def key(seed, id):
        found = prompt_key(seed, id)
        keys[" probe " not in id].add(found)
        return found

    monkeypatch.setattr(warm_up, "prompt_key", key)
    monkeypatch.setattr(warm_up, "CALIBRATION_TOKENS", 8)
    parts = parts_of("drafter=dynamic_tree", "drafter.path=shipped:drafter_tv", "target.path=shipped:drafter",
                     "drafter.nodes=8", "drafter.calibrate=true", f"temperature={temperature}", "gamma=2")  # fmt: skip
    result, _ = run(parts, tmp_path)
    (told,) = [note for note in result.notes if "(drafter.calibrate)" in note]
    assert told.startswith(f"drafts have {parts.drafter.shape.most} guesses of width {parts.drafter.shape.width}: ")
    assert result.lossless.passed is not False and result.counts.verified <= result.counts.rounds * 9
    requests = {prompt_key(parts.seed, prompt.id) for prompt in parts.prompts}
    assert keys[False] and not keys[True] and not keys[False] & requests


@pytest.mark.parametrize(("words", "told"), [
    (["drafter.nodes=null", "drafter.branching=[2]"], "drafter.calibrate=true is not possible with drafter.nodes=null"),
    (["workers=2"], "drafter=mtp is not possible with workers=2 and drafter.calibrate=true"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        check(composed(*small("drafter=mtp", "drafter.nodes=8", "drafter.calibrate=true", *words)), here=False)
