"""The default prompts: held-out code and documentation, the same in every run."""

import pytest

from specbench.data.stdlib import LINES_BEFORE, SIGNATURE, StdlibData, is_held_out


def prompts(kind, count=40):
    return list(StdlibData(StdlibData.Settings(limit=None, count=count, kind=kind)).prompts())


def test_prompts_are_held_out_and_end_where_they_say():
    for prompt in prompts("python") + prompts("prose"):
        module = prompt.id.rsplit(":", 1)[0]
        assert is_held_out(module) and len(prompt.turns[0].splitlines()) <= LINES_BEFORE
    assert all(SIGNATURE.match(prompt.turns[0].splitlines()[-1]) for prompt in prompts("python"))


@pytest.mark.slow
def test_mixed_is_one_of_each_in_turn():
    mixed, python, prose = prompts("mixed"), prompts("python", 20), prompts("prose", 20)
    assert mixed[::2] == python and mixed[1::2] == prose
    assert [p.category for p in mixed[:4]] == ["python", "prose", "python", "prose"]
    assert len({p.id for p in mixed}) == 40 and prompts("mixed") == mixed
