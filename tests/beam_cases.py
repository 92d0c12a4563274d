"""Searches for beams, beams found by enumeration, and what two results must share."""

import pytest
import torch
from decoder_cases import GREEDY, adapted

from specbench.beams.decode import one_round
from specbench.beams.search import Search, TreeReader
from specbench.decoding.timer import Clock
from specbench.models.language_model import LanguageModel

LIMIT = 12


def assert_equal(found, wanted):
    assert [h.tokens for h in found] == [tuple(tokens) for tokens, _ in wanted]
    assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


def of_transformers(module, read, rules, stops, limit, start):
    """The beams, up to their stops, and scores of transformers' own search; new tokens begin at `start`."""
    answer = module.generate(
        torch.tensor([read]), num_beams=rules.width, do_sample=False, max_new_tokens=limit, eos_token_id=sorted(stops),
        pad_token_id=0, length_penalty=rules.length_penalty, early_stopping=rules.early_stopping,
        num_return_sequences=rules.width, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = []
    for row, score in zip(answer.sequences[:, start:].tolist(), answer.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, x in enumerate(row) if x in stops), len(row))
        found.append((row[:end], score))
    return [entry for entry in found if entry[1] > -1e8]


def stopping(module, stops, **how) -> LanguageModel:
    """A module behind the adapter, whose texts end at these tokens."""
    model = adapted(module, GREEDY, **how)
    model.stop_tokens = sorted(stops)
    return model


def noisy(module, spread=0.05):
    """The module, whose weights were moved by noise."""
    torch.manual_seed(3)
    for weight in module.parameters():
        weight.add_(torch.randn_like(weight) * weight.std() * spread)
    return module


def searched(rules, target, drafter=None, gamma=0, prompt=(), stops=(), limit=LIMIT, read=None):
    """The finished search of a prompt or an encoder's input, its rounds, and the target's reader."""
    start, forced = [*(prompt or target.start_tokens)], target.forced_tokens
    found = Search(rules, start[-1], frozenset(stops), limit - forced, target.device, forced)
    reader, drafts = (model and TreeReader(model, start, 200, read) for model in (target, drafter))
    rounds = []
    while not found.over:
        left = 0 if drafter is None else max(0, min(gamma, found.limit - found.levels - 1))
        rounds.append(one_round(found, reader, drafts, left, Clock()))
    return found, rounds, reader
