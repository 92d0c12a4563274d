"""Block verification: guesses stand or fall together, and more of them stand than one by one."""

from torch import Tensor

from specbench.decoding.protocols import Noise
from specbench.decoding.state import Draft, Verdict
from specbench.decoding.verify import acceptance_probability, block_verification, greedy_matching
from specbench.verifiers.rule import Rule


class BlockVerifier(Rule):
    """Exact for chains. The verdict depends on every guess, so no noise of a round may be used again."""

    looks_ahead = True
    trees = False

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return greedy_matching(p, draft)
        return block_verification(p, draft, noise.r, noise.bits)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """sum_x min(p, q): what alpha is defined by. A block keeps more than it says."""
        return acceptance_probability(p[:, :-1], draft, 1.0, self.greedy)
