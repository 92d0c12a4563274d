"""The paper's Figure 1: generated text with every token marked by its origin."""

from typing import Any

from specbench.results.reader import StoredRun

PROMPT_CHARACTERS = 300


def samples(run: StoredRun, count: int = 3) -> list[dict[str, Any]]:
    """The first prompts: the end of the prompt, then pieces of text of kind "a" (accepted guesses), "r" (a rejected
    guess, not in the text), "o" (the recovered token) and "b" (the bonus token)."""
    found = []
    for prompt in [p for p in run.prompts if "error" not in p][:count]:
        pieces = []
        for r in run.rounds:
            if r["prompt"] != prompt["id"]:
                continue
            own = "b" if r["bonus"] else "o"
            parts = [("a", r["accepted_text"]), ("r", r["rejected_text"].replace("\n", "\\n")), (own, r["own_text"])]
            pieces += [{"kind": kind, "text": text} for kind, text in parts if text]
        found.append({"prompt": prompt["prompt"][-PROMPT_CHARACTERS:], "pieces": pieces})
    return found
