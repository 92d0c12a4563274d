"""The losslessness gate: is the output law the target's own? A field of every run.

Temperature 0: every token must equal the baseline's. In float32 there is no excuse; in 16 bits a
one-token and a batched forward round differently, so a first divergence is classed as a tie when
the target's two best logits there differ by no more than rounding.

Temperature above 0: if each token was drawn from p, then for any f known before the draw
z = sum(f(x_t) - E_p f) / sqrt(sum Var_p f) is standard normal (a martingale). Two choices of f:
log p, and the indicator of the tokens that the draft proposes too often, on tested positions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from specbench.measure.recorder import Round
from specbench.models.language_model import LanguageModel
from specbench.results import Lossless

Z_LIMIT = 4.0  # |z| of an exact run exceeds it once in 16,000
TIE_IN_ROUNDINGS = 4.0  # the logits' largest magnitude times the dtype's resolution, times this


def martingale_gate(rounds: Sequence[Round], expected: bool) -> Lossless:
    """The gate for sampled runs."""
    z = {}
    for name in ("log_p", "draft_leak"):
        deviation, variance = (sum(getattr(r, name)[i] for r in rounds) for i in (0, 1))
        z[name] = deviation / math.sqrt(variance) if variance > 0 else 0.0
    worst = max(map(abs, z.values()))
    detail = {f"z_{name}": value for name, value in z.items()}
    detail |= {"tokens": sum(r.tokens for r in rounds), "tested": sum(r.tested for r in rounds)}
    return Lossless(expected, worst <= Z_LIMIT, "martingale_z", worst, Z_LIMIT, detail)


def equality_gate(
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    baseline: Sequence[list[int]],
    target: LanguageModel,
    dtype: torch.dtype,
    expected: bool,
) -> Lossless:
    """The gate for temperature 0: token ids of each prompt, and of both outputs."""
    divergences = []
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, baseline, strict=True)):
        if a != b:
            position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found = {"request": index, "position": position}
            if expected:
                found |= _classify(prompt + b[:position], target, dtype)
            divergences.append(found)
    bugs = [d for d in divergences if dtype == torch.float32 or d.get("kind") != "tie"]
    detail = {
        "requests": len(prompts),
        "equal": len(prompts) - len(divergences),
        "ties": len(divergences) - len(bugs),
        "divergences": divergences[:20],
    }
    return Lossless(expected, not bugs, "token_equality", float(len(bugs)), 0.0, detail)


def _classify(tokens: list[int], target: LanguageModel, dtype: torch.dtype) -> dict[str, Any]:
    """The top-2 logit gap after `tokens`, and whether rounding alone could swap the two."""
    target.allocate(1, len(tokens))
    logits = target.logits(torch.tensor([tokens], device=target.device), [0])[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    tolerance = TIE_IN_ROUNDINGS * torch.finfo(dtype).eps * logits.abs().max().item()
    gap = best - second
    return {"gap": gap, "tolerance": tolerance, "kind": "tie" if gap <= tolerance else "bug"}
