"""Traversal verification (2505.12398): judges the guesses of a tree together, leaves first."""

from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.verify import block_verification
from specbench.decoding.verify_tree import traversal_sampling
from specbench.verifiers.iterative import IterativeVerifier


class TraversalVerifier(IterativeVerifier):
    """Exact for trees and chains; on a chain it is block verification. If the children of a node were drawn without
    replacement, it keeps at least as many guesses in expectation as `IterativeVerifier`. Point masses, and at
    temperature 0 all guesses, are judged as there: no exact rule keeps more of them. A verdict depends on guesses that
    are not kept, so every round renews the noise. `beta` is that of `IterativeVerifier`: alpha stays a number of the
    two models and the tree."""

    looks_ahead = True
    keeps_guess = None

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy or draft.probs is None:
            return super().accept(p, draft, noise)
        return (block_verification if draft.is_chain else traversal_sampling)(p, draft, noise.r, noise.bits)
