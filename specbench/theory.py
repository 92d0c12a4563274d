"""The paper's predictions (Leviathan, Kalman, Matias 2023) as plain functions of numbers.

alpha: expected acceptance rate, in [0, 1]. gamma: drafted tokens per round, >= 0. c: drafter step time / target step
time (Definition 3.7), >= 0.
"""

from typing import Any, overload

LARGEST = 1000  # gammas that are compared


@overload
def expected_tokens(alpha: float, gamma: float) -> float: ...
@overload
def expected_tokens(alpha: Any, gamma: Any) -> Any: ...
def expected_tokens(alpha: Any, gamma: Any) -> Any:
    """Expected tokens per run of Algorithm 1, betas i.i.d. with mean alpha (equation 1), which is < 1 in an array."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return gamma + 1
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_improvement(alpha: float, gamma: float, c: float) -> float:
    """Theorem 3.8: the speedup if a target call takes as long for gamma + 1 tokens as for 1, and all else no time."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: float, c_hat: float) -> float:
    """Theorem 3.11: the factor of operations; c_hat is those per token, drafter to target (Definition 3.10)."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float, largest: int = LARGEST) -> int:
    """The integer gamma, at most `largest`, that maximises Theorem 3.8 (section 3.5); 0 if no gamma helps. It is
    `largest` where a larger one would be better still: there is no best gamma for c = 0, or for alpha = 1 and c < 1."""
    return max(range(largest + 1), key=lambda gamma: walltime_improvement(alpha, gamma, c))
