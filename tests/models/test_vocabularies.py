"""A drafter whose vocabulary is not the target's: padded to another size, of another tokenizer, or refused."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import HEAD, checkpoint, edit_tokenizer, tensors
from choosing import slow_unless
from decoder_cases import V
from distribution_cases import FEW, Distribution, decode, worst_excess
from small_runs import parts_of, run
from tabular import random_table

from specbench.errors import ConfigError
from specbench.models.intersection import Intersection, intersection
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.trees import IterativeVerifier

TOKENS = 4096  # of the shipped tokenizer


def renumber(tokenizer) -> None:
    """Has a tokenizer count backwards."""
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({token: TOKENS - 1 - index for token, index in vocabulary.items()})
    for added in tokenizer["added_tokens"]:
        added["id"] = TOKENS - 1 - added["id"]


@pytest.fixture(scope="session")
def unpadded(tmp_path_factory) -> Path:
    """A model with as many rows as its tokenizer has tokens."""
    return checkpoint(tmp_path_factory.mktemp("unpadded"), vocab_size=TOKENS)


@pytest.fixture(scope="session")
def renumbered(unpadded, tmp_path_factory) -> Path:
    """The same model with a tokenizer that counts backwards."""
    folder = tmp_path_factory.mktemp("renumbered") / "model"
    shutil.copytree(unpadded, folder)
    edit_tokenizer(renumber)(folder)
    return folder


def parts(target: Path, drafter: Path, *more: str, kind: str = "model"):
    return parts_of("target=model", f"target.path={target}", f"drafter={kind}", f"drafter.path={drafter}",
                    "data.limit=2", "max_new_tokens=8", *more)  # fmt: skip


def test_other_tokenizers_are_refused_unless_asked_for(unpadded, renumbered):
    with pytest.raises(ConfigError, match=r"have different tokenizers .* drafter\.vocabulary=intersection") as caught:
        parts(unpadded, renumbered)
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture(scope="session")
def wider(tmp_path_factory) -> Path:
    """As `good`, with 64 more rows of padding, whose tokens it writes often."""
    folder = checkpoint(tmp_path_factory.mktemp("wider"), vocab_size=4224)
    tensors(lambda state: state[HEAD][4160:].mul_(2))(folder)
    return folder


@pytest.mark.parametrize("drafter_is, kind, batch_size", [
    ("wider", "tree", 3),
    *(slow_unless(False, *other) for other in (
        ("narrower", "hierarchical", 1), ("wider", "model", 1), ("narrower", "model", 3),
        ("narrower", "multi_draft", 3))),
])  # fmt: skip
def test_padded_vocabularies_leave_the_text_as_it_is(drafter_is, kind, batch_size, good, wider, tmp_path):
    target, drafter = (good, wider) if drafter_is == "wider" else (wider, good)
    path = f"drafter.paths=[{drafter}]" if kind == "multi_draft" else f"drafter.path={drafter}"
    parts = parts_of("target=model", f"target.path={target}", f"drafter={kind}", path, f"batch_size={batch_size}",
                     "data.limit=3", "max_new_tokens=8", "gamma=2", "temperature=0",
                     "repetition_penalty=1.2")  # fmt: skip
    result, records = run(parts, tmp_path)
    assert result.lossless.passed and result.counts.failed == 0
    padding = [t >= 4160 for record in records for t in record.speculative.ids]
    assert any(padding) == (drafter_is == "narrower")


@cache
def shared(own: int) -> Intersection:
    """Eleven of the target's tokens are among a model's `own`, at other numbers; five are read as another."""
    numbers = torch.randperm(own, generator=torch.Generator().manual_seed(3))
    own_of = torch.cat([numbers, numbers])[:V]
    return Intersection(own_of, torch.arange(V) % 3 != 1, own)


BY_KIND = {"model": SpeculativeVerifier, "under_model": SpeculativeVerifier,
           "tree_independent": IterativeVerifier, "tree_distinct": IterativeVerifier,
           "multi_draft_two": IterativeVerifier}  # fmt: skip


def texts_by(tables, own: int, kind: str = "model", **more):
    """Texts of a drafter's model with `own` tokens."""
    table = random_table(own, seed=4)
    return decode(tables, None, kind, verifier=BY_KIND[kind], drafter_table=table, trials=FEW, **more)


@pytest.mark.parametrize(("kind", "rows"), [
    slow_unless(kind == "model" and rows < V, kind, rows)
    for kind in BY_KIND for rows in (V - 5, V + 5)
])  # fmt: skip
def test_a_drafter_of_a_padded_vocabulary_leaves_the_law_as_it_is(kind, rows, few_contexts):
    assert worst_excess(texts_by(few_contexts, rows, kind), Distribution(few_contexts.target)) < 1


@pytest.mark.parametrize(("kind", "own"), [
    ("model", V - 4), ("model", V + 5),
    slow_unless(False, "tree_distinct", V + 5), slow_unless(False, "tree_independent", V - 4),
])  # fmt: skip
def test_shared_tokens_leave_the_law_as_it_is(kind, own, few_contexts):
    outputs = texts_by(few_contexts, own, kind, vocabulary=shared(own))
    assert worst_excess(outputs, Distribution(few_contexts.target)) < 1


def not_renormalised(draft):
    """q as the wider drafter has it, without the mass of the tokens that were cut off."""
    return draft if draft.probs is None else replace(draft, probs=draft.probs * V / (V + 5))


def of_all_tokens(draft):
    """Guesses of shared tokens, judged by a q that has mass on the others too."""
    return draft if draft.probs is None else replace(draft, probs=0.7 * draft.probs + 0.3 / V)


@pytest.mark.parametrize(("spoil", "vocabulary"), [
    (not_renormalised, None), (of_all_tokens, shared(V + 5)),
])  # fmt: skip
def test_another_q_changes_the_law(spoil, vocabulary, few_contexts):
    """Negative controls."""
    more = {} if vocabulary is None else {"vocabulary": vocabulary}
    assert worst_excess(texts_by(few_contexts, V + 5, spoil=spoil, **more), Distribution(few_contexts.target)) > 1


class Words:
    """A tokenizer of words with numbers, which reads a text as a word or else letter by letter."""

    def __init__(self, end: int | None, *words: str):
        self.vocabulary, self.eos_token_id = {word: index for index, word in enumerate(words)}, end

    def get_vocab(self):
        return self.vocabulary

    def decode(self, tokens):
        return next(word for word, index in self.vocabulary.items() if index == tokens[0]).replace("\u0120", " ")

    def __call__(self, texts, **options):
        known = {word.replace("\u2581", " "): index for word, index in reversed(self.vocabulary.items())}
        words = [[text] if text in known else text for text in texts]
        return {"input_ids": [[known[word] for word in text if word in known] for text in words]}


def shared_by(target: Words, drafter: Words, wanted: int, own: int) -> Intersection:
    return intersection(target, drafter, wanted, own, torch.device("cpu"))


def test_tokens_that_are_spelt_alike_are_shared():
    found = shared_by(Words(3, "\u0120a", "b", "ab", "<end>", "zz"), Words(3, "b", "\u2581a", "a", "</s>"), 6, 4)
    assert found.own_of.tolist() == [1, 0, 0, 3, 0, 0]  # ab is read as its last letter, zz and padding as token 0
    assert found.is_shared.tolist() == [True, True, False, True, False, False] and found.shared == 3
    q = found.fit(torch.tensor([1.0, 2.0, 3.0, 4.0])).softmax(-1)
    assert torch.allclose(q[[0, 1, 3]], torch.tensor([2.0, 1.0, 4.0]).softmax(-1)) and q[[2, 4, 5]].sum() == 0


def test_two_tokens_of_the_target_never_share_one_of_the_drafter():
    """The end of a text pairs the tokenizers' own ends, whatever else is spelt as they are; and of two tokens of the
    target that are spelt alike the second is not shared, but read as its text."""
    words = ("a", "<|im_end|>", "<|endoftext|>")
    found = shared_by(Words(1, *words), Words(2, *words), 3, 3)
    assert found.own_of.tolist() == [0, 2, 2] and found.is_shared.tolist() == [True, True, False]
    alike = shared_by(Words(None, "\u2581a", " a"), Words(None, " a"), 2, 1)
    assert alike.own_of.tolist() == [0, 0] and alike.is_shared.tolist() == [True, False]
