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


def text_of(node, tokens, parent):
    """The tokens from the root of a tree to a node; of the root, -1, none."""
    return [] if node < 0 else [*text_of(parent[node], tokens, parent), tokens[node]]


def verify_tree(M_p, tokens, parent, q, r, t_exponentials):
    """Speculative verification of a token tree, step by step as the SpecInfer algorithm has it: at each
    node the children are tried in turn, against what the last rejection left of p. Nodes that spell the
    same text are one node of the prefix tree, with the children of both.

    M_p maps the tokens after the context to a distribution; node i is tokens[i] after node parent[i],
    drawn from q[i]. Returns the accepted tokens and t.
    """
    V, law = [], M_p([])
    going = True
    while going:
        going = False
        for i in [i for i in range(len(tokens)) if text_of(parent[i], tokens, parent) == V]:
            if r[i] * q[i][tokens[i]] < law[tokens[i]]:
                V, going = [*V, tokens[i]], True
                law = M_p(V)
                break
            law = norm(np.maximum(0, law - q[i]))
    return V, sample(law, t_exponentials[len(V)])


def greedy_tree(M_p, tokens, parent):
    """Appendix A of the notes: the longest path of the tree along the argmaxes of p, and the next one."""
    V, paths = [], [text_of(i, tokens, parent) for i in range(len(tokens))]
    while [*V, int(np.argmax(M_p(V)))] in paths:
        V.append(int(np.argmax(M_p(V))))
    return V, int(np.argmax(M_p(V)))


def block_accept(p, q, x, r, t_exponentials):
    """Block verification (Sun et al. 2024): tau, the longest block that stands, and the token after it."""
    gamma, weight, tau = len(x), [1.0], 0
    residual = [np.maximum(p[0] - q[0], 0)] if gamma else []
    for i in range(1, gamma + 1):
        weight.append(min(weight[i - 1] * p[i - 1][x[i - 1]] / q[i - 1][x[i - 1]], 1))
        if i < gamma:
            residual.append(np.maximum(weight[i] * p[i] - q[i], 0))
            mass = residual[i].sum()
            h = mass / (mass + 1 - weight[i]) if mass + 1 - weight[i] > 0 else 0
        else:
            h = weight[i]
        if r[i - 1] < h:
            tau = i
    law = p[gamma] if tau == gamma else residual[tau] if residual[tau].sum() > 0 else p[tau]
    return tau, sample(law, t_exponentials[tau])


def rejection_accept(p, q, x, r, t_exponentials):
    """Rejection sampling without repetition (A.2): n, and t drawn from p as it is."""
    n = 0
    for p_i, q_i, x_i, r_i in zip(p, q, x, r, strict=False):
        M = max(p_i[y] / q_i[y] if q_i[y] > 0 else np.inf for y in np.flatnonzero(p_i))
        if not r_i < p_i[x_i] / (M * q_i[x_i]):
            break
        n += 1
    return n, sample(p[n], t_exponentials[n])
