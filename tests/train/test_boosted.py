"""Drafters trained together (boosted): losses by hand, and what they cover."""

import pytest
import torch
from checkpoints import tiny_module
from small_runs import composed

from specbench.train.student import BoostedStudents

VOCABULARY = 40


@pytest.fixture(autouse=True)
def _gradients():
    with torch.inference_mode(False), torch.enable_grad():
        yield


def tiny(seed):
    return tiny_module(seed, vocab_size=VOCABULARY, initializer_range=0.3)


def rows(seed=0):
    """Text in which each token follows from the one before."""
    start = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(seed))
    return (start + 7 * torch.arange(16)) % VOCABULARY


def settings_of(count):
    return BoostedStudents.Settings(learning_rate=1e-3, model="shipped:drafter", count=count)


def boosted():
    student = BoostedStudents(tiny(0), "kl", settings_of(2), tiny(1))
    student.models[1].load_state_dict(tiny(2).state_dict())
    return student


def distributions_of(student, tokens):
    p, *qs = (model(tokens).logits.flatten(0, 1).softmax(-1) for model in (student.target, *student.models))
    return p, qs


def test_a_later_drafter_is_trained_where_the_first_one_misses():
    """SpecInfer's examples: the first drafter has all positions, the second those where argmaxes differ."""
    student, tokens = boosted(), rows()
    counts = student.weights(*student.distributions(tokens))
    p, (first, second) = distributions_of(student, tokens)
    missed = first.argmax(-1) != p.argmax(-1)
    assert 0 < missed.sum() < len(missed) and torch.equal(counts[:, 0], torch.ones(len(missed)))
    assert torch.equal(counts[:, 1].bool(), missed)
    by_hand = [(p * (p / own).log()).sum(-1) for own in (first, second)]
    expected = (by_hand[0] + by_hand[1] * missed).mean()
    assert torch.isclose(student(tokens)["loss"], expected, rtol=1e-4)


def test_boosted_drafters_are_a_multi_draft(tmp_path):
    student = boosted()
    student.save(tmp_path, [])
    use = BoostedStudents.use(settings_of(2), tmp_path)
    assert composed(*use).drafter.paths == [str(folder) for folder in student.models_in(tmp_path)]
    assert all((folder / "config.json").is_file() for folder in student.models_in(tmp_path))
