"""The losslessness gate of every run: tests whether the output distribution is the target's.

Temperature 0: every token must equal the baseline's. In float32 any difference is a bug; in 16 bits a one-token and a
batched forward round differently, so a first divergence is classed as a tie if the target's two best logits there
differ by no more than rounding.

Temperature above 0: two statistics (`metrics/martingale.py`) that are standard normal if tokens are drawn from p.
"""

from collections.abc import Sequence
from typing import Any

import torch

from specbench.decoded import Result, Round
from specbench.metrics.martingale import DraftLeak, LogProbability, z_of
from specbench.metrics.metric import Metric
from specbench.models.language_model import LanguageModel
from specbench.results import Lossless

GATE: dict[str, Metric] = {"log_p": LogProbability(), "draft_leak": DraftLeak()}  # recorded at temperature > 0
Z_LIMIT = 4.0  # |z| of an exact run exceeds it once in 16,000
TIE_IN_ROUNDINGS = 4.0  # a tie: a gap up to this times the largest |logit| times the dtype's eps


def martingale_gate(rounds: Sequence[Round], expected: bool) -> Lossless:
    """The test above temperature 0: passes if no |z| exceeds Z_LIMIT."""
    z = {name: z_of([r.numbers[name] for r in rounds]) for name in GATE}
    worst = max(map(abs, z.values()))
    detail: dict[str, Any] = {f"z_{name}": value for name, value in z.items()}
    detail |= {"tokens": sum(r.tokens for r in rounds), "tested": sum(r.tested for r in rounds)}
    return Lossless(expected, worst <= Z_LIMIT, "martingale_z", worst, Z_LIMIT, detail)


def equality_gate(results: Sequence[Result], target: LanguageModel, expected: bool) -> Lossless:
    """The test at temperature 0: passes if every token equals the baseline's, up to ties in 16 bits."""
    divergences = []
    for index, result in enumerate(results):
        a, b = (decoded.tokens for decoded in result.both)
        if a != b:
            position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found: dict[str, Any] = {"request": index, "position": position}
            if expected:
                found |= _classify(result.request.tokens + b[:position], target)
            divergences.append(found)
    bugs = [d for d in divergences if target.dtype == torch.float32 or d.get("kind") != "tie"]
    detail = {
        "requests": len(results),
        "equal": len(results) - len(divergences),
        "ties": len(divergences) - len(bugs),
        "divergences": divergences[:20],
    }
    return Lossless(expected, not bugs, "token_equality", float(len(bugs)), 0.0, detail)


def _classify(tokens: list[int], target: LanguageModel) -> dict[str, Any]:
    """The gap of the two best logits after `tokens`, and whether rounding alone could swap them."""
    target.allocate(1, len(tokens))
    logits = target.logits(torch.tensor([tokens], device=target.device), [0])[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    tolerance = TIE_IN_ROUNDINGS * torch.finfo(target.dtype).eps * logits.abs().max().item()
    gap = best - second
    return {"gap": gap, "tolerance": tolerance, "kind": "tie" if gap <= tolerance else "bug"}
