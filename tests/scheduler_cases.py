"""Requests of several lengths for the tabular pair, decoded through the queue."""

import torch
from decoder_cases import SAMPLED, TREES, V, make_drafter, queued, spare_of, tabular_model, verifier_of

from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import ignore
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.trees import IterativeVerifier

GAMMA, COLUMNS = 4, 60


def jobs(count: int = 11) -> list[Sequence]:
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    new = torch.randint(1, 18, (count,), generator=generator).tolist()
    prompts = [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]
    return [Sequence(p, len(p) + n, 100 + i) for i, (p, n) in enumerate(zip(prompts, new, strict=True))]


def decode(wanted, rows, tables, cache="static", kind="model", chunk=5, sampling=SAMPLED, watch=None,
           executor=None, device=None, policy=None, gamma=GAMMA, text="", after_round=ignore):  # fmt: skip
    """New tokens by job."""
    target = tabular_model(tables.target, sampling, cache, executor=executor, device=device)
    verifier = verifier_of(IterativeVerifier if kind in TREES else SpeculativeVerifier, sampling)
    helper = tabular_model(tables.similar, sampling, cache, executor=executor, device=device)
    drafter = kind and make_drafter(kind, target, text, helper)
    if drafter is not None and drafter.longest is not None:
        gamma = min(gamma, drafter.longest)
    spare = 1 if drafter is None else spare_of(kind, gamma)
    policy = policy or FixedGamma(gamma)
    queue = queued(target, drafter, wanted, rows, verifier, policy, chunk, spare, after_round, watch=watch)
    return [sequence.generated for sequence in queue.sequences]
