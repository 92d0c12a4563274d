"""Requests of several lengths for the tabular pair, decoded through the queue."""

import torch
from decoder_cases import TREES, V, make_drafter, spare_of, tabular_model, verifier_of

from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.sampling import Sampling
from specbench.decoding.scheduler import Scheduler
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative, ignore
from specbench.decoding.state import State
from specbench.decoding.timer import Timer
from specbench.policies.fixed import FixedGamma
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.speculative import SpeculativeVerifier

GAMMA, COLUMNS = 4, 60


SAMPLED = Sampling()


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
    judge = IterativeVerifier if kind in TREES else SpeculativeVerifier
    verifier = verifier_of(judge, sampling)
    state = State.idle(rows, COLUMNS, [], target.device)
    target.allocate(rows, COLUMNS)
    helper = tabular_model(tables.similar, sampling, cache, executor=executor, device=device)
    drafter = None if kind is None else make_drafter(kind, target, text, helper)
    if drafter is not None and drafter.longest is not None:
        gamma = min(gamma, drafter.longest)
    models, spare = ([target], 1) if drafter is None else ([target, *drafter.models], spare_of(kind, gamma))
    queue = Scheduler(wanted, models, chunk, spare)
    clock = Timer(target.device)

    def feed(state, clock):
        more = queue(state, clock)
        if watch is not None:
            watch(state, queue, target)
        return more

    if drafter is None:
        decode_autoregressive(state, target, verifier, clock, after_round, feed)
    else:
        policy = policy or FixedGamma(gamma)
        decode_speculative(state, target, drafter, policy, verifier, clock, after_round, feed)
    return [sequence.generated for sequence in queue.sequences]
