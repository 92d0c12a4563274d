"""Kernels of sampling as PyTorch operators, through which tracing, export and graph capture pass. They are known to
PyTorch as soon as this module is imported; Triton is imported when one first runs.

B rows, N guesses, V vocabulary.
"""

import logging
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def run_on(device: torch.device) -> bool:
    """Whether these operators take the place of the plain code on a device."""
    return device.type == "cuda" and _launches(device)


@cache
def _launches(device: torch.device) -> bool:
    """Whether Triton is installed and can launch a kernel there, for which it needs a C compiler."""
    try:
        race(torch.ones(1, 2, device=device), torch.zeros(1, dtype=torch.long, device=device))
    except Exception as error:  # of Triton, of its compiler, or of the driver
        log.warning("sampling on %s runs without Triton's kernels: %s", device, str(error).partition("\n")[0])
        return False
    return True


@torch.library.custom_op("specbench::race", mutates_args=())
def race(weights: Tensor, bits: Tensor) -> Tensor:
    """`decoding.sampling.draw`: tokens [...] from unnormalised weights [..., V], none below 0, with random bits [...]
    int64. Of equal finishing times the lowest token's wins, and NaN wins over all others, as in `argmax`."""
    from specbench.kernels.race import triton_race

    return triton_race(weights, bits)


@race.register_fake
def _(weights: Tensor, bits: Tensor) -> Tensor:
    return torch.empty_like(bits, memory_format=torch.contiguous_format)


@torch.library.custom_op("specbench::chain_verdict", mutates_args=())
def chain_verdict(
    p: Tensor, q: Tensor | None, guesses: Tensor, limits: Tensor, bits: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """`decoding.verify.speculative_sampling`: the tokens x_1 .. x_n, t [B, N+1] and n [B].

    p [B, N+1, V]; q [B, N, V], None for point masses; guesses x [B, N]; limits [B, N], with which x_i is accepted where
    limits_i q_i(x_i) < p_i(x_i); bits [B, N+1]; count [B], the guesses of each row. All integers are int64.
    """
    from specbench.kernels.verdict import triton_verdict

    return triton_verdict(p, q, guesses, limits, bits, count)


@chain_verdict.register_fake
def _(
    p: Tensor, q: Tensor | None, guesses: Tensor, limits: Tensor, bits: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    return guesses.new_empty(len(guesses), guesses.shape[1] + 1), torch.empty_like(count)


@torch.library.custom_op("specbench::softmax", mutates_args=())
def softmax(logits: Tensor) -> Tensor:
    """Probabilities [..., V] of logits [..., V], both float32. -inf has probability 0; a row with NaN or +inf, or
    without a finite logit, is NaN."""
    from specbench.kernels.softmax import triton_softmax

    return triton_softmax(logits)


@softmax.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
