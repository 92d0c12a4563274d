"""Drafters whose context is shorter than the texts: refused where no prompt fits, else noted with a count."""

import pytest
from checkpoints import checkpoint
from choosing import only
from small_runs import parts_of, run

from specbench.errors import ConfigError

NEW = 24


def overrides(folder, kind: str, context: int, length: int) -> list[str]:
    """Of a run whose prompts have `length` tokens or a few more, with a drafter of a shorter context."""
    target = checkpoint(folder / "target")
    short = checkpoint(folder / "drafter", max_position_embeddings=context)
    (folder / "prompts.jsonl").write_text(f'{{"prompt": "{" x" * length}"}}\n' * 2)
    path = f"drafter.paths=[{short}]" if kind == "multi_draft" else f"drafter.path={short}"
    return [f"target.path={target}", "target=model", f"drafter={kind}", path, "gamma=3", "executor=eager",
            "data=jsonl", f"data.path={folder / 'prompts.jsonl'}", f"max_new_tokens={NEW}"]  # fmt: skip


KINDS = ("model", "tree", "dynamic_tree", "multi_draft", "hierarchical")


def notes_of(folder, kind: str, context: int):
    """The notes on the drafter's context, and the records, of a run whose texts outgrow it."""
    parts = parts_of(*overrides(folder, kind, context, 20))
    result, records = run(parts, folder / "run")
    assert result.lossless.passed is not False and not result.counts.failed
    return [note for note in result.notes if "had no draft" in note], records


@pytest.mark.parametrize("kind", only(("model", "hierarchical"), KINDS))
def test_rounds_without_room_for_a_guess_are_counted(kind, tmp_path):
    [note], records = notes_of(tmp_path, kind, 40)
    # By hand: a round keeps one place for the token after its guesses, in the context of 40 tokens and in the limit.
    without = total = 0
    for record in records:
        place = 0
        for gamma, kept in zip(record.speculative.rounds.gamma, record.speculative.rounds.tokens, strict=True):
            no_room = record.prompt_tokens + place > 38 and place < NEW - 1
            without, total = without + no_room, total + 1
            assert gamma == 0 if no_room else gamma > 0 or place == NEW - 1
            place += kept
    assert 0 < without < total
    assert note.startswith(f"{without} of {total} rounds had no draft") and "context of 40 tokens" in note


def test_a_drafter_that_has_room_is_not_noted(tmp_path):
    """Control: the context is what the note follows from."""
    assert notes_of(tmp_path, "model", context=48)[0] == []


@pytest.mark.parametrize("kind", only(("model", "multi_draft"), KINDS))
@pytest.mark.parametrize(("context", "refused"), [(21, True), (22, False)])
def test_a_drafter_that_has_no_room_behind_any_prompt_is_refused(kind, context, refused, tmp_path):
    words = overrides(tmp_path, kind, context, 20)
    if refused:
        with pytest.raises(ConfigError, match=rf"drafter={kind} .*its context is {context} tokens, and the shortest"):
            parts_of(*words)
    else:
        assert parts_of(*words).drafter.context == context


@pytest.mark.parametrize("policy", only(("optimal",), ("optimal", "adaptive", "entropy", "confidence", "heuristic")))
def test_policies_work_beside_prompts_that_do_not_fit(policy, tmp_path):
    """The first prompt, with which costs are calibrated, leaves no room."""
    words = overrides(tmp_path, "model", 40, 20)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{" x" * n}"}}\n' for n in (60, 20)))
    result, _ = run(parts_of(*words, f"gamma_policy={policy}", "gamma_policy.largest=3"), tmp_path / "run")
    assert result.counts.drafted > 0 and any("had no draft" in note for note in result.notes)
