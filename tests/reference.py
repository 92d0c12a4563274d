"""Algorithm 1 of the paper, word for word, in numpy: the oracle of the tests.

It shares nothing with specbench. Randomness is passed in: r_i for acceptance, and for each token
that is sampled one standard exponential per entry of the vocabulary.
"""

import numpy as np


def sample(distribution: np.ndarray, exponentials: np.ndarray) -> int:
    """The first token to finish when x takes exponentials[x] / distribution[x]."""
    return int(np.argmax(np.asarray(distribution, np.float64) / exponentials))


def norm(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def speculative_decoding_step(M_p, M_q, prefix, gamma, x_exponentials, r, t_exponentials, lenience=1.0):
    """SpeculativeDecodingStep(M_p, M_q, prefix), with lenience l (A.5).

    M_p and M_q map a token sequence to a distribution. t_exponentials[n] samples the token that
    follows n accepted guesses.
    """
    # Sample gamma guesses x_1, ..., x_gamma from M_q autoregressively.
    q, x = [], []
    for i in range(gamma):
        q.append(M_q([*prefix, *x]))
        x.append(sample(q[i], x_exponentials[i]))
    # Run M_p in parallel.
    p = [M_p([*prefix, *x[:i]]) for i in range(gamma + 1)]
    n, t = accept(p, q, x, r, t_exponentials, lenience)
    # Return one token from M_p, and n tokens from M_q.
    return [*prefix, *x[:n], t]


def accept(p, q, x, r, t_exponentials, lenience=1.0):
    """n and t for given distributions and guesses. The paper rejects when r_i > p_i(x) / q_i(x);
    the boundary, which has probability zero, is rejected here."""
    gamma = len(x)
    # Determine the number of accepted guesses n.
    rejected = [i - 1 for i in range(1, gamma + 1) if not r[i - 1] * lenience * q[i - 1][x[i - 1]] < p[i - 1][x[i - 1]]]
    n = min([*rejected, gamma])
    # Adjust the distribution from M_p if needed.
    p_prime = p[n]
    if n < gamma:
        p_prime = norm(np.maximum(0, p[n] - q[n]))
    t = sample(p_prime, t_exponentials[n])
    return n, t


def output_law(p: np.ndarray, q: np.ndarray, lenience: float) -> np.ndarray:
    """s(x): the exact law of the first token of a step that drafts one from q, with lenience."""
    kept = np.minimum(p / lenience, q)
    residual = np.maximum(0, p - q)
    rejected = 1 - kept.sum()
    return kept + (rejected * norm(residual) if rejected > 1e-15 else 0)
