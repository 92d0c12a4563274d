"""A drafter whose vocabulary is padded to another size than the target's changes neither the text nor its law."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import HEAD, checkpoint, tensors
from choosing import slow_unless
from decoder_cases import V
from law_cases import FEW, Law, decode, worst_excess
from small_runs import parts_of
from tabular import random_table

from specbench.run.run import run
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.speculative import SpeculativeVerifier


@pytest.fixture(scope="session")
def wider(tmp_path_factory) -> Path:
    """As `good`, with 64 more rows of padding, whose tokens it writes often."""
    folder = checkpoint(tmp_path_factory.mktemp("wider"), vocab_size=4224)
    tensors(lambda state: state[HEAD][4160:].mul_(2))(folder)
    return folder


@pytest.mark.parametrize("drafter_is, kind, batch_size", [
    ("wider", "model", 1), ("wider", "tree", 3), ("narrower", "model", 3), ("narrower", "hierarchical", 1),
    ("narrower", "multi_draft", 3),
])  # fmt: skip
def test_padded_vocabularies_leave_the_text_as_it_is(drafter_is, kind, batch_size, good, wider, tmp_path):
    target, drafter = (good, wider) if drafter_is == "wider" else (wider, good)
    path = f"drafter.paths=[{drafter}]" if kind == "multi_draft" else f"drafter.path={drafter}"
    parts = parts_of("target=model", f"target.path={target}", f"drafter={kind}", path, f"batch_size={batch_size}",
                     "data.limit=3", "max_new_tokens=8", "gamma=2", "temperature=0",
                     "repetition_penalty=1.2")  # fmt: skip
    result, record = run(parts, tmp_path)
    assert result.lossless.passed and result.counts.failed == 0
    padding = [t >= 4160 for group in record.groups for found in group.results for t in found.speculative.tokens]
    assert any(padding) == (drafter_is == "narrower")


BY_KIND = {"model": SpeculativeVerifier, "non_autoregressive": SpeculativeVerifier, "under_model": SpeculativeVerifier,
           "tree_independent": IterativeVerifier, "tree_distinct": IterativeVerifier,
           "multi_draft_two": IterativeVerifier}  # fmt: skip


BOTH = ("model", "tree_distinct")  # the others have one of the two in turn


@pytest.mark.parametrize(("kind", "rows"), [
    slow_unless(kind in BOTH or (place + wider) % 2, kind, rows)
    for place, kind in enumerate(BY_KIND) for wider, rows in enumerate((V - 5, V + 5))
])  # fmt: skip
def test_a_drafter_of_another_vocabulary_leaves_the_law_as_it_is(kind, rows, few_contexts):
    table = random_table(rows, seed=4)
    outputs = decode(few_contexts, None, kind, verifier=BY_KIND[kind], drafter_table=table, trials=FEW)
    assert worst_excess(outputs, Law(few_contexts.target)) < 1


def test_q_that_is_not_renormalised_changes_the_law(few_contexts):
    """Negative control: q as the wider drafter has it, without the mass of the tokens that were cut off."""
    share = V / (V + 5)

    def spoil(draft):
        return draft if draft.probs is None else replace(draft, probs=draft.probs * share)

    outputs = decode(few_contexts, None, drafter_table=random_table(V + 5, seed=4), spoil=spoil, trials=FEW)
    assert worst_excess(outputs, Law(few_contexts.target)) > 1
