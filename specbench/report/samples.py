"""Figure 1: the text as it came about, every token coloured by where it came from."""

from typing import Any

from specbench.storage.read import StoredRun

PROMPT_CHARACTERS = 300


def samples(run: StoredRun, count: int = 3) -> list[dict[str, Any]]:
    """The first prompts: the end of the prompt, then pieces of kind "a" (accepted guesses), "r" (a
    rejected one, which is not in the text), "o" (the target's own in its place) and "b" (bonus)."""
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
