"""What the decoder drew from, recorded round by round for the losslessness test (`measure/lossless.py`).

B rows, D steps, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.stats.metrics.base import Path
from specbench.stats.verdict_records import OVER

MARGIN = 1.05  # q / p above which a token is in it: more than rounding in 16 bits
LAW_BYTES = 256e6  # of the decoder's p that are kept for one group of requests, decoded one way


def width(D: int) -> int:
    """The number of `evidence_numbers` of D steps."""
    return D + 1 + (3 + OVER) * D


def evidence_numbers(path: Path) -> Tensor:
    """A round as [B, K] float64: p of each token of the path (not a number where p is no distribution); of the first
    guess of each step its id, p and q; and the ids of OVER tokens that q favours most over p, -1 for none."""
    p, draft = path.p, path.draft
    sound = (p.sum(-1) - 1).abs() < 0.01  # false also if p is not finite
    chosen = torch.where(sound, p.gather(-1, path.tokens[..., None])[..., 0].double(), torch.nan)
    before, guess = p[:, :-1], draft.tokens[..., None]
    if draft.probs is None:
        q_x = torch.ones_like(guess, dtype=torch.double)
        over = F.pad(guess, (0, OVER - 1), value=-1)
    else:
        q_x = draft.probs.gather(-1, guess).double()
        excess = torch.where(draft.probs > MARGIN * before, draft.probs - before, 0.0)
        most, ids = excess.topk(min(OVER, excess.shape[-1]), -1)
        over = F.pad(torch.where(most > 0, ids, -1), (0, OVER - most.shape[-1]), value=-1)
    table = torch.cat([guess.double(), before.gather(-1, guess).double(), q_x, over.double()], -1)  # [B, D, 3 + OVER]
    return torch.cat([chosen, table.transpose(1, 2).flatten(1)], 1)
